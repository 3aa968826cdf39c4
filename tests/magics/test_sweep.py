"""%ort_sweep: the grid on a line, resuming, and how a sweep shows itself."""

from __future__ import annotations

import re
from threading import Event

import pytest
from IPython.core.error import UsageError


def points(sweep) -> list[dict]:
    return [point.changes for point in sweep.points]


def test_a_line_holds_a_grid(stepped_shell):
    lab = stepped_shell.user_ns["lab"]
    before = lab._bench.configuration
    sweep = stepped_shell.run("%ort_sweep memory_level=0,1 engine=ort,eager -n 2 --rounds 2")
    assert points(sweep) == [
        {"memory_level": level, "engine": engine} for level in (0, 1) for engine in ("ort", "eager")
    ]
    assert (sweep.count, sweep.rounds, sweep.complete) == (2, 2, True)
    assert lab.sweeps == [sweep]
    assert lab._bench.configuration == before


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("memory_level=$levels", [{"memory_level": 0}, {"memory_level": 2}]),
        ("memory_level=[0, 2]", [{"memory_level": 0}, {"memory_level": 2}]),
        ("memory_level=$one,2", [{"memory_level": 1}, {"memory_level": 2}]),
        (
            "memory_plan=[],['Gelu+:1:-1'],Gelu+:1:1",
            [{"memory_plan": ()}, {"memory_plan": ("Gelu+:1:-1",)}, {"memory_plan": ("Gelu+:1:1",)}],
        ),
        ("memory_plan=['Gelu+:1:-1','Add+:1:-1']", [{"memory_plan": ("Gelu+:1:-1", "Add+:1:-1")}]),
        ("memory_plan=[['Gelu+:1:-1'],[]]", [{"memory_plan": ("Gelu+:1:-1",)}, {"memory_plan": ()}]),
        ('save_onnx_path="a,b",c', [{"save_onnx_path": "a,b"}, {"save_onnx_path": "c"}]),
        ("$grid", [{"memory_level": 1}, {"memory_level": 2}]),
        ("$listed", [{"memory_level": 1}, {"opset": 16}]),
    ],
)
def test_values_are_written_as_for_set(eager_shell, line, expected):
    eager_shell.run(
        "levels, one = (0, 2), 1\ngrid = {'memory_level': [1, 2]}\n"
        "listed = [{'memory_level': 1}, {'opset': 16}]"
    )
    sweep = eager_shell.run(f"%ort_sweep {line} -n 1")
    assert [point.changes for point in sweep.points if point.number] == expected


def test_an_interrupt_says_how_to_go_on_and_resume_does(stepped_shell, unchanged):
    lab, pressed = stepped_shell.user_ns["lab"], Event()

    def wait():
        if lab.sweeps and lab.sweeps[-1].runs_done == 1 and not pressed.is_set():
            pressed.set()
            raise KeyboardInterrupt

    stepped_shell.user_ns["wait"] = wait
    stepped_shell.run(
        "%%ort_step -n 2\nloss = nn.functional.cross_entropy(net(inputs), labels)\nloss.backward()\n"
        "optimizer.step()\noptimizer.zero_grad()\nwait()"
    )
    runs = list(lab.runs)
    configuration, weights = lab._bench.configuration, [p.tolist() for p in lab.module.parameters()]
    with pytest.raises(KeyboardInterrupt, match=r"after 1 of 3 runs(?s:.*)%ort_sweep --resume"):
        stepped_shell.run("%ort_sweep memory_level=0,1,2")
    assert lab._bench.configuration == configuration
    assert [p.tolist() for p in lab.module.parameters()] == weights
    assert list(lab.runs)[:-1] == runs
    page = stepped_shell.formats(lab.sweeps[0])
    assert "! Interrupted: 1 of 3 runs are done." in page["text/plain"]
    sweep = stepped_shell.run("%ort_sweep --resume")
    assert sweep is lab.sweeps[0]
    assert sweep.complete
    assert "Interrupted" not in stepped_shell.formats(sweep)["text/plain"]
    with pytest.raises(UsageError, match="no sweep to resume"):
        stepped_shell.run("%ort_sweep --resume")


def test_a_sweep_shows_its_table_its_figure_and_what_failed(stepped_shell):
    lab = stepped_shell.user_ns["lab"]
    sweep = stepped_shell.run("%ort_sweep memory_level=0,1 memory_plan=[],['Gelu+:1:-1'] -n 4")
    forms = stepped_shell.formats(sweep)
    for form in ("text/plain", "text/html"):
        assert "Sweep 1 of net: 4 points, 4 steps each" in forms[form]
        assert "memory_level=1, memory_plan=Gelu+:1:-1" in forms[form]
        assert "contradict each other" in forms[form]
        assert "baseline" in forms[form]
    assert forms["text/html"].count("data:image/svg+xml") == 1
    assert "<script" not in forms["text/html"]
    assert "By step memory</summary>" in forms["text/html"]
    assert "memory_level=1, memory_plan=()" in forms["text/plain"]
    figure = stepped_shell.run("import ortlab\nortlab.plot(lab.sweeps[0])")
    numbers = {text.get_text() for text in figure.axes[0].texts}
    assert numbers == {"1", "2", "3"}
    assert lab.sweeps[0].points[3].state == "skipped"


def test_runs_of_a_sweep_are_one_line_in_the_ledger(stepped_shell):
    stepped_shell.run("%ort_sweep memory_level=0,1,2 -n 2 --rounds 2")
    stepped_shell.run("%ort_rerun")
    text = stepped_shell.formats(stepped_shell.user_ns["lab"].runs)["text/plain"]
    assert re.search(r"^sweep 1: #2 to #7 +12 ", text, re.MULTILINE)
    assert re.search(r"^#1 ort ", text, re.MULTILINE)
    assert re.search(r"^#8 ort ", text, re.MULTILINE)
    assert "#3 ort" not in text
    assert "lab.sweeps" in text
