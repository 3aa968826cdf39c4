from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree as ET

import matplotlib as mpl
import pytest

from ortlab import units
from ortlab.options.options import Options
from ortlab.records.runs import Ledger, step_parts
from ortlab.render import plots, text


@pytest.fixture
def runs(new_run, fallback_run):
    return [new_run(1, "eager", step_ms=12.0), new_run(2), fallback_run]


def test_the_bars_of_a_run_end_at_its_median(runs):
    axes = plots.overview(runs).axes[1]
    last_parts = axes.containers[3]
    ends = [bar.get_x() + bar.get_width() for bar in last_parts]
    assert ends == pytest.approx([run.step_ms for run in runs])
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["#1 eager", "#2 ort", "#4 PYTORCH (fallback)"]


def test_error_bars_are_the_quartiles(new_run):
    run = new_run(1)  # warm steps of 10.1, 10.2, 10.0 and 10.1 ms
    axes = plots.overview([run]).axes[1]
    (segment,) = axes.collections[0].get_segments()
    assert segment[:, 0] == pytest.approx([10.075, 10.125])


def test_a_memory_bar_is_what_a_step_needs_above_its_start(runs):
    bars = plots.memory(runs).axes[0].containers[0]
    assert [bar.get_width() for bar in bars] == pytest.approx([110, 120, 140])  # MiB


def test_a_saved_figure_keeps_only_the_names_that_others_use(runs):
    source = plots.svg(plots.overview(runs), "runs")
    root = ET.fromstring(source)  # noqa: S314 - our own
    named = [one.get("id") for one in root.iter() if one.get("id")]
    assert named
    assert all(source.count(f"#{name}") for name in named)
    assert "<!--" not in source


def test_losses_are_drawn_step_by_step(runs):
    axes = plots.losses(runs).axes[0]
    assert len(axes.lines) == 3
    assert list(axes.lines[1].get_ydata()) == [7.0, 6.5, 6.0, 5.5, 5.0]
    assert list(axes.lines[1].get_xdata()) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("draw", [plots.losses, plots.memory, plots.overview])
def test_no_runs_draw_a_sentence_and_not_an_error(draw):
    source = plots.svg(draw([]), "no runs")
    assert "No run" in source


def test_a_run_without_memory_or_loss_is_drawn(new_run):
    run = new_run(1, "eager", memory=None, step_memory_bytes=None)
    assert "No run measured its step memory." in plots.svg(plots.overview([run]), "one run")


def test_only_the_latest_runs_are_drawn(new_run):
    axes = plots.overview([new_run(number) for number in range(1, 101)]).axes[1]
    assert len(axes.get_yticklabels()) == plots.RUNS_SHOWN
    assert axes.get_yticklabels()[-1].get_text() == "#100 ort"


def test_inline_svg_follows_the_theme_and_leaves_the_page_alone(runs):
    source = plots.inline(plots.overview(runs), 'Loss & time "<of> three runs')
    root = ET.fromstring(source)  # noqa: S314 - our own text; it has to be well-formed
    assert root.attrib["aria-label"] == 'Loss & time "<of> three runs'
    assert root.attrib["role"] == "img"
    assert "currentColor" in source
    assert plots.INK not in source
    assert plots.INK not in source
    assert "<style" not in source


def test_drawing_leaves_matplotlib_as_it_was(runs):
    before = dict(mpl.rcParams)
    plots.svg(plots.overview(runs), "runs")
    assert dict(mpl.rcParams) == before
    import sys

    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or not pyplot.get_fignums()


def test_names_with_dollar_signs_are_not_formulas(new_run):
    from ortlab.options.options import Options

    run = new_run(1, options=Options(save_onnx_path="$\\frac$<b>"))
    assert "$\\frac$&lt;b&gt;" in plots.svg(plots.overview([run]), "one run")


def test_an_axis_of_one_step_names_that_step_only(new_run):
    run = new_run(1)
    (axes,) = plots.losses([replace(run, steps=run.steps[:1])]).axes
    assert [tick for tick in axes.get_xticks() if axes.get_xlim()[0] <= tick <= axes.get_xlim()[1]] == [1]


def test_the_parts_of_a_step_add_up_to_it(new_run):
    run = new_run(1)
    slow = [replace(step, total_ms=30.0, forward_ms=24.0) for step in run.steps[1:3]]
    odd = replace(run, steps=(run.steps[0], *slow, *run.steps[3:]))
    medians = [step.forward_ms for step in odd.warm_steps]
    assert max(medians) > 2 * min(medians)  # a slow forward in some steps
    parts = step_parts(odd.warm_steps, odd.step_ms)
    assert sum(parts.values()) == pytest.approx(odd.step_ms)
    assert min(parts.values()) > 0
    # The list of runs says the same as the page of one: medians of the parts stood there once.
    (row,) = Ledger([odd]).table().to_dict("records")
    assert [row[f"{name} [ms]"] for name in list(parts)[:3]] == list(parts.values())[:3]
    page = text.render(odd)
    assert all(units.duration(ms) in page for ms in parts.values())


def test_a_plan_is_not_broken_at_its_minus(new_run):
    plan = "BiasGelu+FusedMatMul+:1:-1"
    run = new_run(1, options=Options(memory_plan=(plan, f"Cast+{plan}")))
    lines = plots._label(run).split("\n")
    assert not any(line.endswith(":-") for line in lines)
