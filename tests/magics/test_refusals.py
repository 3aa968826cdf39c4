"""What each magic refuses, in one table: a UsageError with what to do next, and nothing is changed or written."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from pathlib import Path

import pytest
from IPython.core.error import UsageError

from .conftest import LOSS, NET, REST, STEP, lab_state, loaded, wrapped_net

CELL = "\n" + LOSS + REST

VARIABLES = """
number, word, lengths, none, half, limits = 3, "<script>alert(1)</script>", [1, 2], None, 0.5, (1, 2)
nest = nn.Linear(8, 8)
parallel = nn.DataParallel(nest)
def make_batch(size):
    return torch.ones(size, 8)
def train(batch):
    net(batch).mean().backward()
    net.zero_grad()
"""

# By what has happened before: each line, and what its refusal names.
REFUSED = {
    "nothing is wrapped": [
        ("%%ort_step\nloss = 1", "No model is wrapped yet.\nNext: %ort_wrap model"),
        ("%ort_wrap nett", "There is no variable 'nett'.\nNext: Did you mean 'net'"),
        ("%ort_wrap", "the following arguments are required: MODEL"),
        ("%ort_wrap number", "A int cannot be wrapped"),
        ("%ort_wrap nn.Linear(3, 2)", "'nn.Linear(3, 2)' is not the name of a variable"),
        ("%ort_wrap nn.Linear 3", "'3' is not option=value"),
        ("%ort_wrap net.wait", "net has no attribute 'wait'"),
        ("%ort_wrap net --engine tensorrt", "no engine 'tensorrt'"),
        ("%ort_wrap net --engine eager engine=ort", "engine is given twice"),
        ("%ort_wrap net --panel", "unrecognized arguments: --panel"),
        ("%ort_wrap net memory_levle=1", "Did you mean 'memory_level'"),
        ("%ort_wrap net parts=wait", "-h behind the magic shows what else it takes"),
        ("%ort_wrap net memory_level=high", "memory_level cannot be 'high'"),
        ("%ort_wrap net conv_algo_search=EXHAUSTIVE", "needs an NVIDIA GPU"),
        ("%ort_wrap net memory_level='1", "quotation does not end"),
        ("%ort_wrap torch.nn.DataParallel", "A type cannot be wrapped"),
        ("%ort_wrap parallel", "DataParallel and ORT do not go together"),
        ("%ort_wrap net --no-panel --only nothing", "The model has no part 'nothing'."),
        ("%ort_wrap net --no-panel --only", "expected at least one argument"),
        ("%ort_wrap net --no-panel --only $nothing", "There is no variable 'nothing'."),
        ("%ort_wrap net --no-panel --only memory_level=1", "There is no part in the list."),
        ("%ort_wrap net --recipe fused_adan", "Did you mean 'fused_adam'"),
        ("%ort_wrap net --recipe", "expected one argument"),
        ("%ort_wrap net --recipe all memory_level=1", "--recipe goes with no option"),
        ("%ort_wrap inputs --recipe all", "not a torch.nn.Module"),
        ("%ort_wrap nett --recipe all", "Did you mean 'net'"),
        ("%ort_memory --run 1 -n 2", "nothing else"),
        ("%ort_memory --run 1 --from x.log", "nothing else"),
        ("%ort_memory --from x.log memory_level=1", "nothing else"),
        ("%ort_memory --from none.log", "cannot be read"),
        ("%ort_memory --snapshot step.pickle -n 2", "--snapshot takes one step"),
        ("%ort_memory --snapshot step.pickle --run 1", "--snapshot takes one step"),
        ("%ort_memory --snapshot step.pickle --from x.log", "--snapshot takes one step"),
        ("%ort_doctor --fix", "unrecognized arguments: --fix"),
        ("%ort_cluster start", "How many ranks is missing"),
        ("%ort_cluster stop -n 2", "stop takes nothing else"),
        ("%ort_cluster -n many", "-n takes a whole number"),
        ("%ort_cluster -n 0", "A cluster of 0 ranks"),
        ("%ort_cluster -n 1 --backend mpi", "no backend 'mpi'"),
        ("%ort_cluster now", "invalid choice"),
        ("%ort_ranks --from nowhere", "cannot be read"),
        ("%%ort_ranks\nprint(1)", "\nNext: %ort_cluster -n 2"),
        ("%ort_balance lengths", "--batch"),
        ("%ort_balance lengths --batch 0", "batch size is 0"),
        ("%ort_balance lengths --batch many", "--batch"),
        ("%ort_preflight nett inputs", "Did you mean 'net'"),
        ("%ort_preflight net", "the following arguments are required: BATCH.\n"),
    ],
    "no step was run": [
        ("%ort_wrap net", "%ort_unwrap"),
        ("%ort_unwrap nothing", "unrecognized arguments: nothing"),
        ("%ort_set", "needs an option=value"),
        ("%ort_set memory_level", "is not option=value"),
        ("%ort_set memory_levle=1", "Did you mean 'memory_level'"),
        ("%ort_set memory_level=high", "memory_level cannot be 'high'"),
        ("%ort_set memory_level=7", "one of 0, 1, 2"),
        ("%ort_set memory_level=off", "Next: Off is memory_level=0."),
        ("%ort_set memory_level=$net", "memory_level cannot be"),
        (
            "%ort_set memory_level=$missing",
            "There is no variable 'missing'.\nNext: Run a cell that defines it before: missing = ...",
        ),
        ("%ort_set memory_level=2 memory_plan=Gelu+:1:-1", "contradict each other"),
        ("%ort_set memory_level=2 log_level=LOUD", "log_level cannot be 'LOUD'"),
        ("%ort_set conv_algo_search=EXHAUSTIVE", "needs an NVIDIA GPU"),
        ("%ort_set engine=tensorrt", "no engine 'tensorrt'"),
        ("%ort_set name=other", "no option 'name'"),
        ("%ort_set memory_level=1 \\", "The line ends with a backslash."),
        ("%ort_set save_onnx_path='my graphs", "A quotation does not end: save_onnx_path='my graphs"),
        ("%ort_set memory_plan=['Gelu+:1:-1'", "A bracket is not closed: memory_plan=['Gelu+:1:-1'"),
        ("%%ort_step -n 4 \\" + CELL, "The line ends with a backslash."),
        ("%ort_options memory_levle", "Did you mean 'memory_level'"),
        ("%ort_rerun", "no step to go back to"),
        ("%ort_rerun memory_level=1", "no step to go back to"),
        ("%ort_compare", "no run to compare"),
        ("%ort_plan", "no graph for the present options yet"),
        ("%ort_plan --lab frist", "There is no variable 'frist'"),
        ("%ort_plan --lab lba", "There is no variable 'lba'.\nNext: Did you mean 'lab'?"),
        ("%ort_plan --lab net", "'net' is a Sequential, not a lab.\nNext: --lab lab"),
        ("%ort_graph", "no graph for the present options yet"),
        ("%ort_graph_diff memory_level=1", "Run a step first"),
        ("%ort_activations", "Run a step first"),
        ("%ort_parity", "no step to go back to"),
    ],
    "PyTorch ran a step": [
        ("%%ort_step -n 0" + CELL, "whole number from 1 on"),
        ("%%ort_step -n many" + CELL, "-n takes a whole number, not 'many'"),
        ("%%ort_step -n $missing" + CELL, "no variable 'missing'"),
        ("%%ort_step --optimizer optimiser" + CELL, "Did you mean 'optimizer'"),
        ("%%ort_step --steps 3" + CELL, "unrecognized arguments: --steps 3"),
        ("%%ort_step -n 2\nawait train()", "A training step cannot await"),
        ("%%ort_step -n 2\n%%time" + CELL, "%%time cannot stand inside %%ort_step"),
        ("%%ort_step -n 2\n" + LOSS, "no backward()"),
        ("%%ort_step -n 2\npass", "did not call the wrapped model"),
        ("%%ort_step -n 2\n", "the cell body is empty"),
        ("%ort_step -n 2", "did you mean that instead"),
        ("%%ort_step -n 2" + CELL + "%ort_set memory_level=1", "while a step is running"),
        ("%%ort_step -n 2" + CELL + "%ort_rerun", "while a step is running"),
        ("%%ort_step -n 2" + CELL + "%ort_unwrap", "while a step is running"),
        ("%ort_rerun -n 0", "whole number from 1 on"),
        ("%ort_rerun -n", "expected one argument"),
        ("%ort_rerun 5", "'5' is not option=value"),
        ("%ort_rerun memory_level=1 log_level=LOUD", "log_level cannot be 'LOUD'"),
        ("%ort_rerun memory_level=1 -n 0", "whole number from 1 on"),
        ("%ort_rerun --lab lba", "Did you mean 'lab'"),
        ("%ort_compare", "only one run"),
        ("%ort_compare 1 7", "There is no run 7"),
        ("%ort_compare 1 --baseline 7", "There is no run 7"),
        ("%ort_compare one", "%ort_compare takes a whole number"),
        ("%ort_compare 1 memory_level=1", "in one call"),
        ("%ort_compare memory_levle=1", "Did you mean 'memory_level'"),
        ("%ort_plan 3", "unrecognized arguments: 3"),
        ("%ort_graph optimised", "no graph stage 'optimised'"),
        ("%ort_graph exported gradient", "unrecognized arguments: gradient"),
        ("%ort_memory --snapshot step.pickle", "needs an NVIDIA GPU"),
        ("%ort_sweep", "needs options with the values to try"),
        ("%ort_sweep memory_level", "is not option=value,value"),
        ("%ort_sweep memory_level=", "A value is missing behind an equals sign"),
        ("%ort_compare recompute=", "recompute=[] for none"),
        ("%ort_sweep memory_level=0,,1", "A value is missing"),
        ("%ort_sweep memory_level=0,7", "one of 0, 1, 2"),
        ("%ort_sweep memory_levle=0,1", "Did you mean 'memory_level'"),
        ("%ort_sweep engine=ort,eagr", "Did you mean 'eager'"),
        ("%ort_sweep memory_level=0 memory_level=1", "memory_level is given twice"),
        ("%ort_sweep memory_level=$missing", "There is no variable 'missing'"),
        ("%ort_sweep $net", "lists of values by option"),
        ("%ort_sweep memory_plan=[Gelu]", "not a list of literals"),
        ("%ort_sweep memory_level='0,1", "quotation does not end"),
        ("%ort_sweep memory_level=0 -n 0", "whole number from 1 on"),
        ("%ort_sweep memory_level=0 -n two", "-n takes a whole number"),
        ("%ort_sweep memory_level=0 --rounds 0", "whole number from 1 on"),
        ("%ort_sweep memory_level=0 --rounds", "expected one argument"),
        ("%ort_sweep memory_level=0 --lab lba", "Did you mean 'lab'"),
        ("%ort_sweep memory_level=1 memory_plan=Gelu+:1:-1", "No point of this sweep can run"),
        ("%ort_sweep --resume", "no sweep to resume"),
        ("%ort_sweep memory_level=0 --resume", "has its points"),
        ("%ort_sweep --resume -n 3", "has its points"),
        ("%ort_compare_engines --budgets 1,2", "no activation memory budget"),
        ("%ort_compare_engines --engines eagr", "Did you mean 'eager'"),
        ("%ort_compare_engines --also memory_levle=1", "Did you mean 'memory_level'"),
        ("%ort_compare_engines --also memory_level", "is not option=value"),
        ("%ort_compare_engines --also $missing", "There is no variable 'missing'"),
        ("%ort_compare_engines -n two", "-n takes a whole number"),
        ("%ort_compare_engines --rounds 0", "whole number from 1 on"),
        ("%ort_compare_engines extra", "unrecognized arguments: extra"),
        ("%ort_find_batch_size make_batch", "needs a limit"),
        ("%ort_find_batch_size make_batch --limit 6 GX", "'gx'"),
        ("%ort_find_batch_size make_batch --limit 0B", "above zero"),
        ("%ort_find_batch_size make_batch --limit 70%", "a search changes the batch"),
        ("%ort_find_batch_size make_batch --limit 1GiB --device 1GiB", "one limit"),
        ("%ort_find_batch_size make_batch --device 1MiB", "below what is in use"),
        ("%ort_find_batch_size nothing --limit 6GiB", "There is no variable 'nothing'"),
        ("%ort_find_batch_size limits --limit 6GiB", "not a tuple"),
        ("%ort_find_batch_size make_batch --limit 6GiB --train nothing", "nothing"),
        ("%ort_find_batch_size make_batch --limit 6GiB --sizes 1,x", "--sizes takes a whole number"),
        ("%ort_find_batch_size make_batch --limit 6GiB --sizes 0", "not 0"),
        ("%ort_find_batch_size make_batch --limit 64GiB --sizes 2", "without a loss"),
        ("%ort_find_batch_size make_batch --limit 64GiB --plans Gelu+:1:-1", "act in ONNX Runtime"),
        ("%ort_find_batch_size make_batch --limit 64GiB --plans $lengths", "1 is no set of plans"),
        ("%ort_find_batch_size make_batch --resume", "no search to resume"),
    ],
    "ONNX Runtime ran a step": [
        ("%ort_activations --by colour", "colour"),
        ("%ort_activations --at batch", "no size"),
        ("%ort_activations --at batch=0", "batch cannot be 0"),
        ("%ort_activations --part encoder", "no wrapped part"),
        ("%ort_bisect", "Nothing differs from the baseline"),
        ("%ort_bisect speed memory_level=1", "There is no metric 'speed'"),
        ("%ort_bisect loss memory_levle=1", "Did you mean 'memory_level'"),
        ("%ort_bisect loss memory_level=1 --tolerance much", "--tolerance takes a number"),
        ("%ort_bisect loss memory_level=1 --rounds 1", "whole number from 2 on"),
        ("%ort_bisect $missing memory_level=1", "There is no variable 'missing'"),
        ("%ort_bisect --resume", "There is no bisection to resume"),
        ("%ort_budget", "needs a limit"),
        ("%ort_budget 6 GX", "gx"),
        ("%ort_budget 0", "'0' has no unit"),
        ("%ort_budget 400", "'400' has no unit"),
        ("%ort_budget 0%", "othing would be left"),
        ("%ort_budget 130%", "without any plan"),
        ("%ort_budget -100%", "othing would be left"),
        ("%ort_budget 1 GiB --device 1GiB", "not of both"),
        ("%ort_budget --device 50%", "percentage is of what a step needs"),
        ("%ort_budget --saving 30%", "Its form is"),
        ("%ort_budget $nothing", "There is no variable 'nothing'"),
        ("%ort_budget 1 GiB --lab nothing", "nothing"),
        ("%ort_density on --measure 2", "exclude each other"),
        ("%ort_density nothing", "nothing"),
        ("%ort_flops --baseline compute_optimizer=True", "set so already"),
        ("%ort_flops --baseline colour=True", "colour"),
        ("%ort_graph --view --embed", "--view"),
        ("%ort_graph --around x", "--around"),
        ("%ort_graph all --view", "--view"),
        ("%ort_graph --changes --profile", "compares two graphs"),
        ("%ort_graph --save $net", "$net holds a Sequential, not the path"),
        ("%ort_graph --save /nowhere/all.onnx", "/nowhere/all.onnx"),
        ("%ort_graph_diff", "compares two stages"),
        ("%ort_graph_diff gradient", "compares two stages"),
        ("%ort_graph_diff gradient execution --stage exported", "compares two stages"),
        ("%ort_graph_diff gradient opset=20", "compares two stages"),
        ("%ort_graph_diff gradiant execution", "Did you mean 'gradient'"),
        ("%ort_graph_diff opset=20 --stage executed", "no graph stage"),
        ("%ort_graph_diff opset=20 --part encoder", "no wrapped part"),
        ("%ort_graph_diff engine=eager", "has no graph to compare"),
        ("%ort_messages --level LOUD", "LOUD"),
        ("%ort_messages --source torch", "torch"),
        ("%ort_messages --stage backward", "backward"),
        ("%ort_messages --run two", "--run"),
        ("%ort_messages --lab nothing", "nothing"),
        ("%ort_parity -n 0", "whole number"),
        ("%ort_parity -n many", "-n takes"),
        ("%ort_parity -n $missing", "There is no variable 'missing'"),
        ("%ort_parity --lab missing", "missing"),
        ("%ort_parity --steps 2", "--steps"),
        ("%ort_plan --at batch", "is no size"),
        ("%ort_plan --at batch=1 batch=2", "given twice"),
        ("%ort_plan --at batches=16", "no symbolic dimension 'batches'"),
        ("%ort_plan --at batch=many", "whole number"),
        ("%ort_plan --from absent.json", "absent.json cannot be read"),
        ("%ort_plan --from $word", "neither plans nor a table"),
        ("%ort_plan --from $word --at batch=1", "do not go together"),
        ("%ort_plan --dialect 2022", "Add --write PATH"),
        ("%ort_plan --write plans.json --dialect 2021", "invalid choice"),
        ("%ort_plan --write plans.json", "no plan to write"),
        ("%ort_profile -n 0", "whole number from 1 on"),
        ("%ort_triton_kernels", "There are no Triton kernels"),
        ("%ort_triton_kernels", "triton needs an NVIDIA GPU"),
        ("%ort_triton_kernels --from nowhere", "cannot be opened"),
    ],
}


# Each is refused in one line, by both magics that take a number of steps.
NO_NUMBERS = ("0", "-1", "1.5", "x", "''", "1e9", "True", "$missing", "$none", "$half")


@contextmanager
def shell_where(situation):
    """Give a shell in which so much has happened; whatever was refused in it, it goes on at the end."""
    if situation == "nothing is wrapped":
        gc.unfreeze()  # a lab of an earlier test that waits to be collected would be the latest
        gc.collect()
        with loaded() as shell:
            shell.run(NET + VARIABLES)
            yield shell
            shell.run("lab = %ort_wrap net --no-panel\nlab.unwrap()")
    else:
        with wrapped_net() as shell:
            shell.run(VARIABLES)
            if situation == "PyTorch ran a step":
                shell.run("%ort_set engine=eager")
            if situation != "no step was run":
                shell.run(STEP)
            yield shell
            assert len(shell.run(STEP).steps) == 4


def state(shell) -> object:
    """All that a refusal leaves as it was: the lab, its lists, the user's next cell and folder."""
    lab = shell.user_ns.get("lab")
    kept = None
    if lab is not None:
        studies = (lab.sweeps, lab.bisections, lab.budgets, lab.batch_size_searches)
        kept = (lab_state(shell), lab._bench.configuration, [list(one) for one in studies])
    return kept, getattr(shell, "rl_next_input", None), list(Path.cwd().iterdir())


def faults(shell, line, said, *, in_one_line=False):
    """Say what is wrong with the refusal of a line."""
    before = state(shell)
    try:
        shell.run(line)
    except UsageError as error:
        message, kind = str(error), type(error)
    else:
        return [f"{line}: not refused"]
    found = [] if kind is UsageError else [f"{line}: a {kind.__name__}"]
    found += [] if said in message else [f"{line}: {message}"]
    found += [f"{line}: several lines"] if in_one_line and len(message.splitlines()) > 1 else []
    return found + ([] if state(shell) == before else [f"{line}: something is changed"])


@pytest.mark.parametrize("situation", REFUSED)
def test_each_line_is_refused_and_changes_nothing(situation, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = []
    with shell_where(situation) as shell:
        for line, said in REFUSED[situation]:
            found += faults(shell, line, said)
        if situation == "PyTorch ran a step":
            for number in NO_NUMBERS:
                missing = number == "$missing"
                said = "no variable 'missing'" if missing else "whole number"
                found += faults(shell, f"%%ort_step -n {number}{CELL}", said, in_one_line=not missing)
                found += faults(shell, f"%ort_rerun -n {number}", said, in_one_line=not missing)
    assert not found, "\n".join(found)


def test_every_magic_stands_in_the_table(shell):
    magics = shell.magics_manager.magics
    registered = {f"%{name}" for name in magics["line"] if name.startswith("ort_")}
    registered |= {f"%%{name}" for name in magics["cell"] if name.startswith("ort_")}
    assert {line.split()[0] for rows in REFUSED.values() for line, _ in rows} >= registered
