"""Pages and figures of sweeps, over records with round numbers."""

from __future__ import annotations

import dataclasses
import re
from xml.etree import ElementTree as ET

import pytest

from ortlab.options.configuration import Configuration
from ortlab.options.options import Options
from ortlab.records.verdicts import FELL_BACK
from ortlab.render import html, plots, text
from ortlab.render.sweep_page import sweep_plot
from ortlab.studies.engine_comparison import EngineComparison
from ortlab.studies.sweep import Point, Sweep

MIB = 1 << 20


@pytest.fixture
def make_sweep(new_run):
    def make(*points: tuple[float, float | None], rounds: int = 1, **changes) -> Sweep:
        """Make a sweep of points given by step time in ms and step memory in MiB; no time for one not measured."""
        made = []
        for number, (step_ms, size) in enumerate(points, start=1):
            memory = None if size is None else int(size * MIB)
            runs = tuple(
                new_run(round_, step_ms=step_ms, step_memory_bytes=memory, sweep=1)
                for round_ in range(rounds if step_ms else 0)
            )
            level = {"opset": 11 + number}
            made.append(Point(number, level, Configuration("ort", Options(**level)), runs=runs))
        facts = {"baseline": 0, "count": 5, "rounds": rounds, "start_digest": "a" * 16, **changes}
        return Sweep(1, "net", made, **facts)

    return make


def front(sweep: Sweep) -> list[int]:
    return sorted(one.point.number for one in sweep.outcomes() if one.on_front)


def test_the_front_holds_what_no_other_point_beats(make_sweep):
    assert front(make_sweep((10, 1000), (20, 800), (30, 600), (25, 900), (10.5, 1100))) == [1, 2, 3]


def test_memory_within_two_percent_counts_as_equal(make_sweep):
    assert front(make_sweep((10, 1015), (20, 1000))) == [1]
    assert front(make_sweep((10, 1030), (20, 1000))) == [1, 2]


def test_without_memory_the_fastest_is_the_front(make_sweep):
    sweep = make_sweep((10, None), (9, None), (12, None))
    assert front(sweep) == [2]
    axes = sweep_plot(sweep).axes[0]
    assert axes.get_xlabel() == "points, the fastest first"
    assert "n/a" in text.render(sweep)


def test_points_are_listed_by_time_and_say_what_the_ratio_shows(make_sweep):
    page = text.render(make_sweep((10, 1000), (20, 800), (5, 900), rounds=3))
    lines = [line for line in page.splitlines() if "opset=" in line]
    assert [line.split()[0] for line in lines[:3]] == ["3", "1", "2"]
    assert "0.50x [0.50, 0.50]  faster, less memory" in lines[0]
    assert "1.00x" in lines[1]
    assert "baseline" in lines[1]
    assert "slower" in lines[2]
    assert "export, 2.40 s in 3 builds" in lines[2]
    assert re.search(r"800 MiB +-20 %", lines[2])


def test_one_round_says_what_it_can_tell(make_sweep):
    page = " ".join(text.render(make_sweep((10, 1000), (20, 800))).split())
    assert (
        "of 1 round, which a drift of the machine is not in; 3 rounds or more are compared round by round"
        in page
    )
    assert "Step memory: measured, how far a step rises" in page
    assert "process" not in page


def test_one_round_on_a_machine_that_drifted_has_no_verdict(make_sweep, new_run):
    sweep = make_sweep((10, 1000), (20, 800))
    slowed = tuple(dataclasses.replace(step, optimizer_ms=2.0) for step in sweep.points[1].runs[0].steps)
    run = dataclasses.replace(sweep.points[1].runs[0], steps=slowed)
    sweep.points[1] = dataclasses.replace(sweep.points[1], runs=(run,))
    page = " ".join(text.render(sweep).split())
    assert "not comparable, less memory" in page
    assert "one round, and the optimizer's step, the same code in both, took 2 ms" in page


def test_an_unfinished_sweep_says_how_to_go_on(make_sweep):
    sweep = make_sweep((10, 1000), (0, None))
    assert "! Interrupted: 1 of 2 runs are done." in text.render(sweep)
    assert "%ort_sweep --resume" in html.render(sweep)


def test_a_baseline_that_failed_leaves_no_ratios(make_sweep):
    sweep = make_sweep((0, None), (10, 1000))
    sweep.fail(0, "ValueError: <b>no</b>")
    page = text.render(sweep)
    assert "There are no ratios: the baseline, point 1, was not measured." in page
    assert "nan" not in page
    assert "1  opset=12  failed" in page
    assert "&lt;b&gt;no&lt;/b&gt;" in html.render(sweep)


def test_a_sweep_in_which_all_failed_has_no_figure(make_sweep):
    sweep = make_sweep((0, None), (0, None))
    sweep.fail(0, "first")
    sweep.fail(1, "second")
    page = html.render(sweep)
    assert "No point could be measured." in page
    assert "data:image/svg+xml" not in page
    assert "No point was measured." in {words.get_text() for words in sweep_plot(sweep).axes[0].texts}


def test_marks_stand_at_the_medians_and_carry_the_points_number(make_sweep):
    axes = sweep_plot(make_sweep((10, 1000), (20, 800), rounds=2)).axes[0]
    places = {words.get_text(): words.xy for words in axes.texts}
    assert places["1"] == (1000, pytest.approx(10.1))
    assert places["2"] == (800, pytest.approx(20.1))
    assert axes.get_xlabel() == "step memory [MiB]"


def test_many_points_leave_room_for_the_axes(make_sweep):
    sweep = make_sweep(*((10 + i, 1000 - i) for i in range(9)))
    points = [
        Point(n, {"save_onnx_path": f"a path with ${n}$ " * 9}, None, runs=sweep.points[0].runs)
        for n in range(40)
    ]
    figure = sweep_plot(Sweep(1, "net", points, baseline=0, count=5, rounds=1, start_digest=""))
    picture = plots.svg(figure, "a sweep")
    ET.fromstring(picture[picture.index("<svg") :])  # noqa: S314 - our own picture
    labels = [words.get_text() for words in figure.axes[0].get_legend().get_texts()]
    assert "and 16 more" in labels
    assert figure.axes[0].get_position().width > 0.3


def test_a_sweep_is_one_line_of_the_ledger(new_run):
    from ortlab.records.runs import Ledger
    from ortlab.render.run_pages import ledger_page

    runs = [
        new_run(1),
        *(new_run(n, sweep=1, step_ms=10 * n) for n in range(2, 9)),
        new_run(9),
        new_run(10, sweep=2),
    ]
    page = text.render(ledger_page(Ledger(runs), 3))
    lines = page.splitlines()
    assert [line.split("  ")[0] for line in lines[4:7]] == ["sweep 1: #2 to #8", "#9 ort", "sweep 2: #10"]
    assert "20.1 ms to 80.1 ms" in lines[4]
    assert "1 earlier run: lab.runs.table() has all runs." in page
    assert "Sweep 2: lab.sweeps[1] shows its points." in page


def test_a_baseline_that_fell_back_is_no_baseline_in_any_table(fallback_run, new_run):
    options = Options()
    points = [
        Point(1, {}, Configuration("ort", options), runs=(fallback_run,)),
        Point(2, {"engine": "eager"}, Configuration("eager", options), runs=(new_run(2, "eager"),)),
    ]
    sweep = Sweep(1, "net", points, baseline=0, count=5, rounds=1, start_digest="")
    for table in (sweep.table(), EngineComparison(sweep).table()):
        assert table["verdict"].iloc[0] == FELL_BACK
