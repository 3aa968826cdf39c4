"""`?` and `-h` explain every magic: its form, its arguments, an example, and the same in Python."""

from __future__ import annotations

import pytest

PYTHON = {
    "%ort_wrap": "lab = ortlab.wrap(model, memory_level=1)\n    lab",
    "%ort_unwrap": "model = lab.unwrap()",
    "%ort_set": 'lab.set(memory_level=1, log_level="INFO")',
    "%%ort_step": "run = lab.step(step, n=20)",
    "%ort_sweep": 'sweep = lab.sweep({"memory_level": [0, 1, 2], "engine": ["ort", "eager"]}, n=20, rounds=2)',
    "%ort_rerun": "run = lab.rerun(memory_level=1)",
    "%ort_compare": 'comparison = lab.compare(engine="eager", memory_level=[1, 2])',
    "%ort_plan": "plan = lab.plan()",
    "%ort_activations": 'activations = lab.activations()\n    activations.at(batch=16).shown("operator")',
    "%ort_compare_engines": 'lab.compare_engines(n=10, budgets=[1, 0.5, 0.2], also=[{"memory_level": 1}])',
    "%ort_budget": 'lab.budget("70%")',
    "%ort_profile": "lab.profile()",
    "%ort_find_batch_size": 'lab.find_batch_size(make_batch, limit="6 GiB", plans=["Gelu+:1:-1"])',
    "%ort_bisect": (
        'lab.bisect("step_ms", changes={"aten_backward": False, "intra_op_spinning": True, "memory_level": 1})'
    ),
    "%ort_parity": "lab.parity(n=3)",
    "%ort_memory": 'measured = lab.memory(memory_plan=("Gelu+:1:-1",))',
    "%ort_graph": 'graph = lab.graph("optimized")\n    graph.save("my graphs/optimized.onnx")',
    "%ort_graph_diff": "difference = lab.graph_diff(memory_level=1)",
    "%ort_triton_kernels": "kernels = lab.triton_kernels()\n    view = ortlab.show_graph(kernels.kernel(2))",
    "%ort_options": 'OptionList(lab.options, ("memory_level", "memory_plan"), lab.have)',
    "%ort_messages": 'lab.messages.of(run=2, level="WARNING")',
    "%ort_preflight": "report = ortlab.preflight(model, batch)",
    "%ort_density": "lab.density(batch)\n    lab.set(print_input_density=True)  # on\n    lab.density(measure=3)",
    "%ort_flops": 'lab.flops()\n    lab.flops(baseline={"label_sparse_optimizer": False})',
    "%ort_balance": "record = balance(lengths, 8, ranks=2)\n    with Cluster(2) as cluster:",
    "%ort_cluster": "cluster = Cluster(2).start()",
    "%ort_ranks": "ranks = cluster.gather()\n    ranks = ortlab.load(folder)  # --from",
    "%%ort_ranks": "outputs = cluster.run_cell(source)",
    "%ort_doctor": "report = ortlab.doctor()",
}


def test_every_magic_is_in_the_table_above(shell):
    registered = shell.magics_manager.magics
    found = {f"%{name}" for name in registered["line"] if name.startswith("ort_")}
    found |= {f"%%{name}" for name in registered["cell"] if name.startswith("ort_")}
    assert found == set(PYTHON)


@pytest.mark.parametrize("magic", PYTHON)
def test_question_mark_shows_the_help(shell, magic):
    text = shell.object_inspect_text(magic)
    assert f"\n    {magic}" in text
    assert "Example::\n\n    " in text
    assert "The same in Python::\n\n" in text
    assert PYTHON[magic] in text


@pytest.mark.parametrize("magic", PYTHON)
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_h_prints_the_same_and_does_nothing_else(shell, capsys, magic, flag):
    assert shell.run(f"{magic} {flag}" + ("\npass" if magic.startswith("%%") else "")) is None
    out = capsys.readouterr().out
    assert PYTHON[magic] in out
    kind = "cell" if magic.startswith("%%") else "line"
    assert out.strip().splitlines()[0] in shell.magics_manager.magics[kind][magic.lstrip("%")].__doc__
