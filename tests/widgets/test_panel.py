"""The panel over a real lab: a small model on ONNX Runtime, buttons clicked and controls set from Python."""

from __future__ import annotations

import ctypes
import gc
import json
import re
from dataclasses import replace
from functools import partial
from html import unescape

import ipywidgets as widgets
import pytest
import small_transformers
import torch
from ipywidgets.embed import dependency_state
from ipywidgets.widgets.widget import _instances as open_widgets

import ortlab.notebook.widgets.panel
from ortlab import units
from ortlab.errors import ExecutionError, OptionError
from ortlab.memory.saved_activations import kept_with
from ortlab.notebook.widgets.frame import Attendant
from ortlab.notebook.widgets.panel import Panel
from ortlab.notebook.widgets.record_table import PAGE, RecordTable
from ortlab.options.options import Group, Options, switches, unmet


@pytest.fixture
def step_and_lab():
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(4, 8)

    def step():
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    lab = ortlab.wrap(model, options=Options())
    yield step, lab
    lab.unwrap()


@pytest.fixture
def lab(step_and_lab):
    return step_and_lab[1]


@pytest.fixture
def run(step_and_lab):
    step, lab = step_and_lab
    return partial(lab.step, step, 4)


@pytest.fixture
def panel(lab):
    panel = ortlab.notebook.widgets.panel.Panel(lab)
    yield panel
    panel.close()


def words(panel: Panel) -> str:
    """Text of every HTML part and table of the panel that is on show, tags left out."""
    found = []

    def visit(widget):
        if isinstance(widget, widgets.HTML) and not widget.value.startswith("<style"):
            found.append(re.sub(r"<[^>]+>", " ", widget.value))
        if isinstance(widget, RecordTable):
            found.extend(cell for row in widget.table.get("rows", ()) for cell in row["cells"])
        for child in getattr(widget, "children", ()):
            visit(child)

    visit(panel)
    return " ".join(" ".join(found).split())


# ---- switches ---------------------------------------------------------------------------------------------------


def test_every_switch_has_a_control_with_its_help(panel):
    for one in switches():
        row = panel.switches.row(one.name)
        assert row.control.description == one.name
        assert re.sub(r"\W+", " ", one.help).split()[0] in words_of(row)


def words_of(row) -> str:
    return re.sub(r"<[^>]+>", " ", row.children[-1].value)


def test_a_tick_changes_the_option_and_is_marked(panel, lab):
    row = panel.switches.row("compute_optimizer")
    row.control.value = False
    assert lab.options == Options(compute_optimizer=False)
    assert panel.errors.text == ""
    assert "ortlab-changed" in row._dom_classes
    assert "changed" in words_of(row)
    assert "default on" in words_of(row)
    assert panel.switches.groups.options[0][0] == "Compute (1 changed)"
    row.control.value = True
    assert lab.options == Options()
    assert "ortlab-changed" not in row._dom_classes


def test_what_differs_from_the_defaults_stands_first(panel, lab):
    line = lambda: unescape(re.sub(r"<[^>]+>", "", panel.switches.children[0].value))  # noqa: E731
    assert line() == "All switches are at their defaults."
    assert panel.switches.reset.tooltip == "Every switch is at its default."
    lab.set(memory_level=1, compute_optimizer=False)
    assert line().startswith("Differs from the defaults: ")
    assert "memory_level 1 (default 0)" in line()
    assert "compute_optimizer off (default on)" in line()
    assert panel.switches.reset.tooltip == "Set every switch to its default"


def test_all_switches_go_back_to_their_defaults_at_once(panel, lab):
    assert panel.switches.reset.disabled
    lab.set(compute_optimizer=False, memory_level=1)
    panel.switches.reset.click()
    assert lab.options == Options()
    assert panel.switches.row("memory_level").control.value == 0
    assert panel.switches.reset.disabled


def test_a_change_in_another_group_leaves_that_group_on_show(panel, lab):
    memory = dict(panel.switches.groups.options)["Memory"]
    panel.switches.groups.value = memory
    panel.switches.row("memory_level").control.value = 1
    assert panel.switches.groups.value is memory
    assert panel.switches.row("memory_level") in panel.switches._body.children
    lab.set(compute_optimizer=False)
    assert panel.switches.groups.value is memory


def test_each_row_says_what_a_change_takes_now(panel, lab, run):
    row = panel.switches.row("intra_op_spinning")
    assert "ortlab-chip" not in row.children[-1].value  # nothing is built yet, as the line above says
    run()
    assert re.search(r"rebuilds the session, [\d.]+ m?s in run 1", words_of(row))
    row.control.value = True
    assert "no rebuild if changed back" in words_of(row)
    assert "Changed since the last build: intra_op_spinning." in words(panel)
    assert "ortlab-chip" not in panel.switches.row("memory_level").children[-1].value  # it is rebuilt anyway
    panel.rerun.click()
    assert "Changed since the last build" not in words(panel)
    assert "in run 2" in words_of(panel.switches.row("intra_op_spinning"))


def test_a_variable_that_gave_a_first_value_is_named(monkeypatch, wrap):
    monkeypatch.setenv("ORTMODULE_LOG_LEVEL", "ERROR")
    lab = wrap(torch.nn.Linear(2, 2))
    panel = ortlab.notebook.widgets.panel.Panel(lab)
    assert "First value from the variable  ORTMODULE_LOG_LEVEL" in words_of(panel.switches.row("log_level"))
    assert "ORTMODULE_LOG_LEVEL sets log_level='ERROR'." in unescape(words(panel))
    assert "variable" not in words_of(panel.switches.row("save_onnx"))
    panel.close()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("memory_level", 2, 2),
        ("log_level", "ERROR", "ERROR"),
        ("save_onnx_prefix", "a <b>", "a <b>"),
        ("memory_plan", "Gelu+:1:-1, Cast+:2:3", ("Gelu+:1:-1", "Cast+:2:3")),
        ("skip_check", ("DEVICE",), ("DEVICE",)),
        ("cast_level", 0, 0),
    ],
)
def test_each_kind_of_control_sets_its_option(panel, lab, name, value, expected):
    panel.switches.row(name).control.value = value
    assert panel.errors.text == ""
    assert getattr(lab.options, name) == expected


def test_a_switch_that_cannot_act_here_is_greyed_out_with_the_reason(panel, lab):
    missing = [one.name for one in switches() if unmet(one.name, lab.have)]
    for one in switches():
        row = panel.switches.row(one.name)
        assert row.control.disabled == bool(row.reason)
        if one.name in missing:
            assert row.reason == unmet(one.name, lab.have)
            # Where code begins and ends, there are tags in the one and backticks in the other.
            shown, reason = (
                "".join(re.sub("[`]|<[^>]+>", "", form).split()) for form in (words_of(row), row.reason)
            )
            assert reason in unescape(shown)


def test_a_part_of_a_switch_that_is_off_is_greyed_out_until_it_is_on(panel, lab):
    row = panel.switches.row("save_onnx_prefix")
    assert row.control.disabled
    assert "Acts only while save_onnx is on." in " ".join(words_of(row).split()).replace(" .", ".")
    lab.set(save_onnx=True)
    assert not row.control.disabled


def test_a_refused_value_is_explained_and_taken_back(panel, lab):
    row = panel.switches.row("memory_plan")
    row.control.value = "not a plan <script>alert(1)</script>"
    assert lab.options == Options()
    assert row.control.value == ""
    assert "Why:" in panel.errors.text
    assert "Next:" in panel.errors.text
    assert "<script>" not in panel.errors.text
    assert panel.errors.layout.display is None
    panel.switches.row("memory_level").control.value = 1  # a change that succeeds clears the message
    assert panel.errors.text == ""
    assert panel.errors.layout.display == "none"


def test_a_message_can_be_dismissed(panel):
    panel.compare.click()
    assert panel.errors.text
    panel.errors.children[1].click()
    assert panel.errors.text == ""


def test_a_change_from_a_cell_shows_and_a_refused_one_changes_nothing(panel, lab):
    lab.set(memory_level=2)
    assert panel.switches.row("memory_level").control.value == 2
    with pytest.raises(OptionError):
        lab.set(memory_level=7)
    assert panel.switches.row("memory_level").control.value == 2


def test_the_engine_buttons_choose_the_engine(panel, lab):
    panel.engine.value = "eager"
    assert lab.engine == "eager"
    assert "PyTorch eager: ready." in words(panel)
    lab.set(engine="ort")
    assert panel.engine.value == "ort"


# ---- tabs and the head ------------------------------------------------------------------------------------------


def test_tabs_draw_what_is_expensive_when_they_are_opened(panel, run):
    assert panel.tabs.chosen == "Overview"
    panel.tabs.open("Graph")
    assert "There is no graph yet. Run a step first" in words(panel)
    assert panel.errors.text == ""
    assert not panel.messages.is_open
    run()
    assert panel.graph.map is not None  # the tab is open, so it is what the user waits for
    panel.tabs.open("Messages")
    assert panel.messages.run.value == "all"


def test_a_tab_counts_changed_switches_and_stays_open_meanwhile(panel, lab):
    panel.tabs.open("Switches")
    names = lambda: [name for name, _ in panel.tabs.bar.options]  # noqa: E731
    assert names() == ["Overview", "Memory", "Graph", "Switches", "Messages"]
    lab.set(memory_level=1)
    assert names()[3] == "Switches (1 changed)"
    assert panel.tabs.chosen == "Switches"
    told = []
    panel.tabs.bar.observe(lambda change: told.append(change.name), "index")
    panel.switches.groups.observe(lambda change: told.append(change.name), "index")
    lab.set(memory_level=0)
    assert told == []  # a browser in which another tab was pressed meanwhile stays there
    assert names()[3] == "Switches"


def test_the_head_says_what_the_last_run_has_measured(panel, lab, run):
    assert panel.header.result.value == ""
    run()
    shown = panel.header.result.value
    assert f"Last run #1 ort: {units.duration(lab.runs[0].step_ms)} a step" in shown
    assert f"{units.size(lab.runs[0].step_memory_bytes)} step memory" in shown


def test_changes_of_engine_and_switches_are_undone_one_by_one(panel, lab):
    assert panel.undo.disabled
    lab.set(memory_level=1)
    panel.switches.row("compute_optimizer").control.value = False
    panel.engine.value = "eager"
    panel.undo.click()
    assert (lab.engine, lab.options) == ("ort", Options(memory_level=1, compute_optimizer=False))
    panel.undo.click()
    assert lab.options == Options(memory_level=1)
    assert panel.switches.row("compute_optimizer").control.value is True
    panel.undo.click()
    assert lab.options == Options()
    assert panel.undo.disabled
    assert panel.errors.text == ""


# ---- buttons ----------------------------------------------------------------------------------------------------


def test_before_the_first_step_the_buttons_are_off_and_say_why(panel, run):
    assert "not built yet" in words(panel)
    assert "Next: run a training step" in words(panel)
    buttons = (panel.rerun, panel.plan, panel.activations, panel.measure)
    assert all("Run a step first" in button.tooltip for button in buttons)
    assert all(button.disabled for button in (*buttons, panel.compare))
    assert "two runs" in panel.compare.tooltip
    run()
    assert not any(button.disabled for button in buttons)
    assert not any("Run a step first" in button.tooltip for button in buttons)
    assert panel.compare.disabled
    run()
    assert not panel.compare.disabled


def test_every_button_works_after_every_other(panel, lab, run):
    """What one changes in sessions and switches is no reason for another to refuse."""
    run()
    run()
    tick = lambda: lab.set(memory_plan=("Gelu+:1:-1",))  # noqa: E731 - as a click
    untick = lambda: lab.set(memory_plan=())  # noqa: E731
    buttons = [one.click for one in (panel.measure, panel.plan, panel.activations, panel.compare)]
    for change in (tick, untick):
        for first in buttons:
            for second in buttons:
                change()
                first()
                second()
                assert panel.errors.text == ""
    lab.set(engine="eager")
    for click in buttons:
        click()
        assert panel.errors.text == ""
    panel.tabs.open("Graph")
    assert panel.errors.text == ""
    assert panel.graph.map is not None


def test_an_error_goes_once_something_succeeds(panel, run):
    panel.rerun.click()
    assert "no step to go back to" in panel.errors.text
    run()
    assert panel.errors.text == ""


def test_a_level_takes_the_ticked_plans_out_and_says_so_beside_the_switch(panel, lab, run):
    run()
    lab.set(memory_plan=("Gelu+:1:-1",))
    row = panel.switches.row("memory_level")
    row.control.value = 1
    assert (lab.options.memory_level, lab.options.memory_plan) == (1, ())
    assert panel.errors.text == ""
    assert "your 1 ticked plan is off now" in words_of(row)
    plans = panel.switches.row("memory_plan")
    plans.control.value = "Gelu+:1:-1"
    assert (lab.options.memory_level, lab.options.memory_plan) == (0, ("Gelu+:1:-1",))
    assert "memory_level is 0; it was 1" in words_of(plans)
    assert "ticked plan" not in words_of(panel.switches.row("memory_level"))
    plans.control.value = "no plan"
    assert lab.options.memory_plan == ("Gelu+:1:-1",)
    assert "Not set." in words_of(plans)


def test_a_comparison_says_that_runs_were_added_since(panel, run):
    run()
    run()
    panel.compare.click()
    assert "older than the runs" not in words(panel)
    run()
    assert "run 3 was added since. Press Compare again." in words(panel)
    panel.compare.click()
    assert "older than the runs" not in words(panel)


def test_rerun_adds_a_run_with_the_present_switches(panel, lab, run):
    run()
    panel.switches.row("compute_optimizer").control.value = False
    assert "rebuild pending" in words(panel)
    panel.rerun.click()
    assert panel.errors.text == ""
    assert len(lab.runs) == 2
    assert lab.runs[1].options.compute_optimizer is False
    assert "#2 ort (compute_optimizer=False)" in words(panel)
    assert "ONNX Runtime: ready." in words(panel)
    assert panel.actions.progress.layout.display == "none"


def test_compare_shows_intervals_and_a_chart(panel, run):
    run()
    run()
    panel.compare.click()
    assert panel.errors.text == ""
    assert re.search(r"\d\.\d+x \[", words(panel))
    assert panel.runs.chart.is_open
    assert 'aria-label="Loss, step time' in panel.runs.picture.svg
    assert panel.runs.picture.svg.count("<svg") == 1


def plan_rows(panel: Panel) -> dict[str, dict]:
    """Rows of the plan table as the browser draws them, by configuration."""
    return {row["key"]: row for row in panel.plans.table.table["rows"]}


def tell(panel: Panel, act: str, *values) -> None:
    """Send what the plan table's script sends."""
    panel.plans.table._handle_custom_msg({"do": act, "with": list(values)}, [])


def test_ticking_a_plan_sets_it_and_the_rerun_applies_it(panel, lab, run):
    run()
    panel.plan.click()
    assert panel.errors.text == ""
    assert plan_rows(panel)["Gelu+:1:-1"]["ticked"] is False
    assert panel.plans.table.table["totals"] == []
    tell(panel, "tick", "Gelu+:1:-1", True)
    assert lab.options.memory_plan == ("Gelu+:1:-1",)
    assert plan_rows(panel)["Gelu+:1:-1"]["ticked"] is True
    assert panel.plans.table.table["totals"][0] == "ticked: 1"
    assert panel.plans.table.table["totals"][2] == plan_rows(panel)["Gelu+:1:-1"]["cells"][2]
    panel.rerun.click()
    assert lab.plan().enabled == ("Gelu+:1:-1",)
    assert "not measured" in words(panel)
    assert panel.plans.plan.enabled == ("Gelu+:1:-1",)  # the rerun has read it again
    tell(panel, "slide", "batch", 8)
    assert plan_rows(panel)["Gelu+:1:-1"]["cells"][2] == units.size(
        lab.plan().at(batch=8).rows[0].saving_bytes
    )
    assert "predicted for another batch" in words(panel)
    tell(panel, "slide", "batch", 0)
    assert "batch cannot be 0" in words(panel)
    tell(panel, "tick", "Gelu+:1:-1", False)
    assert lab.options.memory_plan == ()


def test_a_plan_ticked_elsewhere_shows_and_a_level_takes_over(panel, lab, run):
    run()
    panel.plan.click()
    lab.set(memory_plan=("Gelu+:1:-1",))
    assert plan_rows(panel)["Gelu+:1:-1"]["ticked"]
    lab.set(memory_plan=(), memory_level=1)
    assert all(
        "memory_level=1 chooses the plans" in row["locked"] and not row["ticked"]
        for row in plan_rows(panel).values()
    )
    tell(panel, "tick", "Gelu+:1:-1", True)  # from a page that is not drawn again yet
    assert "memory_level=1 and memory_plan contradict each other" in panel.errors.text
    assert lab.options.memory_plan == ()


def test_a_switch_that_plans_do_not_depend_on_leaves_their_table_alone(panel, lab, run):
    run()
    panel.plan.click()
    before = panel.plans.table.table
    lab.set(compute_optimizer=False)
    assert panel.plans.table.table is before
    lab.set(compute_optimizer=True, memory_plan=("Gelu+:1:-1",))
    assert plan_rows(panel)["Gelu+:1:-1"]["ticked"]
    # A tick that is refused is drawn again, though nothing has changed here: the browser shows it as set.
    lab.set(memory_plan=(), memory_level=1)
    before = panel.plans.table.table
    tell(panel, "tick", "Gelu+:1:-1", True)
    assert lab.options.memory_plan == ()
    assert panel.plans.table.table["drawn"] > before["drawn"]


def test_the_activations_is_shown_and_read_again_by_a_rerun(panel, lab, run):
    run()
    panel.activations.click()
    assert panel.errors.text == ""
    table = panel.explorer.table.table
    assert len(table["rows"]) == len(lab.activations().rows)
    lab.set(memory_plan=("Gelu+:1:-1",))
    panel.rerun.click()
    assert len(panel.explorer.table.table["rows"]) == len(lab.activations().rows) < len(table["rows"])
    assert "With recompute plans applied: Gelu+:1:-1" in words(panel)


def test_an_unexpected_error_shows_its_type_and_a_folded_traceback(panel, lab, run):
    run()
    calls = ctypes.c_int()  # in C, where no way back to the start looks

    def failing_step():
        calls.value += 1
        loss = lab.module(torch.randn(4, 8)).sum()
        loss.backward()
        if calls.value > 2:
            raise ZeroDivisionError("<b>out of data</b>")
        return loss

    lab.step(failing_step, 2)
    weights = {name: value.clone() for name, value in lab.module.state_dict().items()}
    panel.rerun.click()
    assert "ZeroDivisionError: &lt;b&gt;out of data" in panel.errors.text
    assert "<details><summary>Traceback" in panel.errors.text
    assert "failing_step" in panel.errors.text
    assert len(lab.runs) == 2
    assert all(torch.equal(value, weights[name]) for name, value in lab.module.state_dict().items())
    assert not panel.rerun.disabled


def test_an_interrupt_of_a_rerun_is_said_and_leaves_the_lab(panel, lab):
    calls = ctypes.c_int()  # in C, where no way back to the start looks

    def interrupted_step():
        calls.value += 1
        if calls.value > 1:
            raise KeyboardInterrupt
        loss = lab.module(torch.randn(4, 8)).sum()
        loss.backward()
        return loss

    lab.step(interrupted_step, memory=False)
    panel.rerun.click()
    assert "Interrupted." in panel.errors.text
    assert len(lab.runs) == 1


def test_progress_is_shown_while_steps_run(panel, lab, run):
    seen = []
    panel.actions.progress.observe(
        lambda _: seen.append((panel.actions.progress.layout.display, panel.actions.progress.value)),
        "value",
    )
    run()
    assert seen
    assert panel.actions.progress.layout.display == "none"


def test_a_thousand_runs_are_paged_newest_first(panel, lab, run):
    run()
    for number in range(2, 1001):
        lab.runs.add(replace(lab.runs[0], number=number))
    run()
    table = panel.runs.table.table
    assert len(table["rows"]) == PAGE
    assert table["rows"][0]["cells"][0] == "#1001 ort"
    assert table["found"] == f"1 to {PAGE} of 1,001 runs"
    panel.compare.click()  # an interval for each would take minutes
    assert panel.errors.text == ""
    assert "The first run and the latest 11." in words(panel)


def test_ticked_runs_are_compared_and_drawn(panel, run):
    for _ in range(4):
        run()
    table = panel.runs.table
    table._handle_custom_msg({"do": "tick", "with": ["3", True]}, [])
    table._handle_custom_msg({"do": "tick", "with": ["2", True]}, [])
    panel.compare.click()
    assert "Ratios are against run 3" in words(panel)
    assert "#2 ort" in panel.runs.picture.svg
    assert "#4 ort" not in panel.runs.picture.svg
    table._handle_custom_msg({"do": "tick", "with": ["2", False]}, [])
    assert "#2 ort" not in panel.runs.picture.svg  # an open chart follows the ticks
    panel.compare.click()
    assert "only one run" in panel.errors.text


def test_a_run_is_opened_by_its_name(panel, run):
    run()
    choose = {"do": "choose", "with": ["1"]}
    panel.runs.table._handle_custom_msg(choose, [])
    assert "Run #1 ort" in words(panel)
    assert "data digest" in words(panel)
    assert panel.runs.table.table["rows"][0]["chosen"] is True
    panel.runs.table._handle_custom_msg(choose, [])
    assert "data digest" not in words(panel)


def test_a_chart_costs_nothing_until_it_is_opened(panel, run):
    run()
    assert panel.runs.picture.svg == ""
    panel.runs.chart.heading.value = True
    first = panel.runs.picture.svg
    assert "<svg" in first
    run()
    assert panel.runs.picture.svg != first


class Scale:
    factor = 2.0


class Scaled(torch.nn.Module):
    """Takes an input that is no tensor, which ORT cannot."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x, scale):
        return self.inner(x) * scale.factor


def test_a_fallback_has_a_red_badge_with_the_reason(wrap):
    model = Scaled()
    lab = wrap(model, options=Options(fallback=True))
    panel = ortlab.notebook.widgets.panel.Panel(lab)
    lab.step(lambda: model(torch.ones(2, 4), Scale()).sum().backward(), 2)
    assert lab.runs[-1].executed_by == "fallback"
    assert '<span class="ortlab-badge ortlab-bad">PYTORCH (fallback)</span>' in panel.header.line.value
    assert "cannot be given to ONNX Runtime" in panel.header.line.value
    assert "#1 PYTORCH (fallback)" in words(panel)
    panel.close()


# ---- several panels, other forms, the end -----------------------------------------------------------------------


def test_two_panels_of_one_lab_stay_in_step(lab, run):
    first, second = Panel(lab), Panel(lab)
    first.switches.row("compute_optimizer").control.value = False
    assert second.switches.row("compute_optimizer").control.value is False
    run()
    assert "#1 ort" in words(first)
    assert words(first) == words(second)
    first.close()
    second.switches.row("compute_optimizer").control.value = True
    assert lab.options == Options()
    second.close()


def test_closing_leaves_no_widget_and_no_observer_behind(lab, run):
    gc.collect()
    before = set(open_widgets)
    for _ in range(3):
        panel = Panel(lab)
        run()
        for label, group in panel.switches.groups.options:
            panel.switches.groups.value = group
            assert label
        panel.plan.click()
        panel.plan.click()
        panel.activations.click()
        panel.compare.click()
        panel.close()
    assert set(open_widgets) == before
    assert lab._bench.observers == []
    run()  # the lab goes on without its panels


def test_a_closed_panel_can_be_closed_again(lab):
    panel = Panel(lab)
    panel.close()
    panel.close()


def test_front_ends_without_widgets_get_text_and_html(panel, lab, run):
    run()
    lab.set(memory_level=1)
    bundle = panel._repr_mimebundle_()
    assert bundle["application/vnd.jupyter.widget-view+json"]["model_id"] == panel.model_id
    for form in ("text/plain", "text/html"):
        assert "#1 ort" in bundle[form]
        assert "memory_level" in bundle[form]
        assert "rebuild pending" in bundle[form]
        assert "measured" in bundle[form]


def test_what_the_browser_asks_behind_a_click_is_answered(panel, monkeypatch):
    (attendant,) = [part for part in panel.children if isinstance(part, Attendant)]
    sent = []
    monkeypatch.setattr(attendant, "send", lambda message, *_: sent.append(message))
    attendant._handle_custom_msg({"asked": "view 1"}, [])
    assert sent == [{"answered": "view 1"}]


def test_a_panel_with_all_its_parts_open_adds_little_to_a_notebook_saved_with_its_widgets():
    """The state as `jupyter execute` writes it; JupyterLab leaves more defaults out."""
    torch.manual_seed(3)
    model, tokens = (
        small_transformers.bert(width=64, heads=4, words=500, drop=0.1),
        torch.randint(0, 500, (2, 16)),
    )
    lab = ortlab.wrap(model)
    before = set(open_widgets)
    panel = ortlab.notebook.widgets.panel.Panel(lab)
    try:

        def step():
            model(input_ids=tokens, labels=tokens).loss.backward()

        lab.step(step, n=3)
        panel.rerun.click()
        for group in Group:
            panel.switches.groups.value = group
        panel.plan.click()
        panel.activations.click()
        panel.compare.click()
        panel.tabs.open("Graph")
        assert panel.errors.text == ""
        assert panel.plans.table.found()
        assert panel.runs.picture.svg
        assert len(panel.explorer.table.found()) > PAGE
        states = widgets.Widget.get_manager_state()["state"]
        made = {key: state for key, state in states.items() if key not in before}
        assert set(dependency_state(panel)) <= set(
            made
        )  # those that nobody shows any more are in the notebook, too
        assert len(json.dumps(made)) + len(json.dumps(panel._saved._bundle())) <= 100_000
    finally:
        panel.close()
        lab.unwrap()


def test_the_repr_names_the_lab_and_has_no_address(panel):
    assert repr(panel).startswith("Panel(Lab(model: Sequential, engine='ort', not built")
    assert "0x" not in repr(panel)


def test_a_hostile_model_name_stays_text(wrap):
    model = torch.nn.Linear(2, 2)
    lab = wrap(model, name="<img src=x onerror=alert(1)>", engine="eager")
    panel = ortlab.notebook.widgets.panel.Panel(lab)
    assert "<img" not in panel.header.line.value
    assert "<img" not in panel._repr_mimebundle_()["text/html"]
    panel.close()


def test_a_lab_has_one_panel_until_it_is_closed(lab):
    shown = ortlab.panel(lab)
    assert ortlab.panel(lab) is shown
    shown.close()
    again = ortlab.panel(lab)
    assert again is not shown
    again.close()


def test_the_panel_of_a_model_in_parts_says_which_ran(wrap):
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    lab = wrap(model, only=["0", "1"])
    panel = ortlab.notebook.widgets.panel.Panel(lab)
    assert "ORT: 2 PARTS" in words(panel)
    model(torch.randn(4, 8)).sum().backward()
    shown = words(panel)
    assert "ORT: 2 of 2 PARTS" in shown
    assert "ONNX Runtime: 0, 1 (2 of 2 parts, 80.0 % of the parameters): ready." in shown
    assert "Parts on ONNX Runtime; PyTorch executes the rest" in shown
    panel.plan.click()
    assert panel.errors.text == ""
    panel.engine.value = "eager"
    assert "Parts on ONNX Runtime" not in words(panel)
    panel.close()


def test_memory_is_followed_and_shown(panel, run, lab):
    assert not panel._memory.value
    seen = []
    panel._memory.observe(lambda change: seen.append(change["new"]), "value")
    lab.set(print_memory_stats=True)
    run()
    assert "post backward" in panel._memory.value
    assert "run 1" in panel._memory.value
    assert "<svg" in panel._memory.value
    assert "this run" in seen[0]  # while it went on
    lab.set(print_memory_stats=False).rerun()
    assert not panel._memory.value


def test_memory_is_measured_by_a_click(panel, run, lab):
    run()
    runs, options = len(lab.runs), lab.options
    panel.measure.click()
    assert not panel.errors.text
    assert "saved activations and outputs" in panel._measured.value
    assert (len(lab.runs), lab.options) == (runs, options)


def test_measuring_without_a_step_says_what_to_do(panel):
    panel.measure.click()
    assert "no step to go back to" in panel.errors.text


# ---- the overview -------------------------------------------------------------------------------------------------


def test_the_card_waits_for_a_second_run_and_then_says_what_the_verdict_permits(panel, lab, run):
    assert "%%ort_step -n 20" in panel.runs.card.value
    assert "two runs" in panel.settle.tooltip
    run()
    assert "Change a switch or the engine and press Rerun" in panel.runs.card.value
    run()
    (contrast,) = lab.compare().contrasts
    shown = unescape(re.sub(r"<[^>]+>", " ", panel.runs.card.value))
    assert "Run 2 (the same again) against run 1 (ort)" in shown
    assert (
        (contrast.time.reason or "no difference") in shown
        or contrast.verdict in shown
        or "too unsteady" in shown
    )
    percents = re.findall(r"[+-]\d+ %\s+time", shown)
    assert bool(percents) == (contrast.verdict in ("faster", "slower"))


def test_measuring_in_turns_gives_the_card_its_interval(panel, lab, run):
    run()
    panel.switches.row("compute_optimizer").control.value = False
    panel.rerun.click()
    held = (lab.engine, lab.options)
    panel.runs.settle()
    shown = unescape(panel.runs.card.value)
    assert "Compute_optimizer=False" not in shown  # names of switches stay as they are typed
    assert "compute_optimizer=False against ort" in shown
    assert len(lab.sweeps) == 1
    assert (lab.engine, lab.options) == held
    panel.undo.click()  # what was tried meanwhile was no change of the user's
    assert lab.options == Options()


def test_each_run_is_a_point_whose_click_opens_it(panel, lab, run):
    assert panel.runs.scatter.drawing == {}
    run()
    drawing = panel.runs.scatter.drawing
    (point,) = drawing["points"]
    assert (point["key"], point["kind"], point["last"], point["base"]) == ("1", "ort", True, True)
    assert units.duration(lab.runs[0].step_ms) in point["said"]
    panel.engine.value = "eager"
    panel.rerun.click()
    points = panel.runs.scatter.drawing["points"]
    assert [one["kind"] for one in points] == ["ort", "eager"]
    assert all(0 <= one[place] <= 1 for one in points for place in ("x", "y"))
    assert all(one["low"] <= one["x"] <= one["high"] for one in points)
    faster = min(lab.runs, key=lambda one: one.step_ms)
    assert min(points, key=lambda one: one["x"])["key"] == str(faster.number)
    panel.runs.scatter._handle_custom_msg({"choose": "2"}, [])
    assert "Run #2 eager" in words(panel)
    assert panel.runs.scatter.drawing["chosen"] == "2"
    panel.runs.scatter._handle_custom_msg({"choose": "2"}, [])
    assert "Run #2 eager" not in words(panel)


# ---- less memory --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bert():
    torch.manual_seed(3)
    model = small_transformers.bert(width=128, heads=4, words=500, drop=0.1, intermediate_size=512)
    tokens = torch.randint(0, 500, (8, 64))
    lab = ortlab.wrap(model)

    def step():
        model(input_ids=tokens, labels=tokens).loss.backward()

    lab.step(step, n=6)
    yield lab
    lab.unwrap()


def test_a_tab_that_is_not_read_yet_asks_for_no_step_that_has_run(panel, run):
    assert "Run a step first" in panel.graph.children[0].value
    run()  # what stands in the other tabs is what a user reads until the kernel has read them
    assert "Reading the graph" in panel.graph.children[0].value
    assert "Predict runs the last step" in panel.budget.result.value
    assert panel.budget.shares.states == {}


def test_before_a_prediction_the_memory_tab_says_the_next_step_and_shows_what_is_kept(panel, lab, run):
    panel.tabs.open("Memory")
    assert "Next: run a training step" in panel.budget.result.value
    assert panel.budget.shares.states == {}
    run()
    assert "Predict runs the last step" in panel.budget.result.value
    shown = panel.budget.shares.states
    assert [one["share"] for one in shown["states"]] == [1.0]
    kept = lab.activations()
    assert [sum(bar["all"]) for bar in shown["bars"]] == [kept.total_bytes] * 2
    assert panel.apply.disabled
    lab.set(memory_level=1)  # nothing is built for the bars
    assert panel.budget.shares.states == {}


def test_after_a_step_without_a_backward_each_button_says_what_it_lacks(panel, lab):
    lab.module.eval()
    lab.step(torch.no_grad()(lambda: lab.module(torch.randn(4, 8))), n=3)
    for one in ("Memory", "Graph"):
        panel.tabs.open(one)
        assert not panel.errors.text
    assert "built no gradient" in panel.budget.result.value
    assert panel.graph.graph.mode == "inference"
    assert panel.predict.disabled
    assert "trained nothing" in panel.predict.tooltip
    for button in (panel.plan, panel.activations):
        button.click()
        assert "built no gradient" in panel.errors.text
        assert "model.train()" in panel.errors.text
    with pytest.raises(ExecutionError, match="no forward was followed by its backward"):
        lab.profile(1, progress=False)
    lab.module.train()
    lab.step(lambda: lab.module(torch.randn(4, 8)).sum().backward(), n=3)
    assert not panel.predict.disabled


def test_a_prediction_that_is_older_than_the_switches_or_the_data_says_so(panel, lab, run):
    run()
    panel.tabs.open("Memory")
    panel.predict.click()
    assert panel.errors.text == ""
    assert panel.budget._old.value == ""
    lab.set(memory_level=1)  # what a budget chooses itself
    assert panel.budget._old.value == ""
    lab.set(memory_level=0, compute_optimizer=False)
    assert "compute_optimizer changed since" in panel.budget._old.value
    lab.set(compute_optimizer=True)
    assert panel.budget._old.value == ""
    lab.step(lambda: lab.module(torch.randn(6, 8)).square().mean().backward(), 2)
    assert "Of the data of run #1; run #2 had other data" in panel.budget._old.value
    panel.predict.click()
    assert panel.budget._old.value == ""


def test_a_prediction_fills_the_slider_and_switches_nothing_on(bert):
    panel = Panel(bert)
    assert "Press Predict first" in panel.apply.tooltip
    held = (bert.engine, bert.options, len(bert.runs))
    panel.predict.click()
    assert panel.errors.text == ""
    assert (bert.engine, bert.options, len(bert.runs)) == held
    assert not panel.apply.disabled
    shown = panel.budget.shares.states
    shares = [one["share"] for one in shown["states"]]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == 1.0
    assert shown["states"][0]["cost"] == "no time"
    assert all("predicted" in one["said"] and one["cost"].startswith("+") for one in shown["states"][1:])
    assert shown["low"] >= 100 * shares[-1]
    for number, bar in enumerate(shown["bars"]):
        sums = [sum(one["kept"][number]) for one in shown["states"] if one["kept"]]
        assert sums[0] == sum(bar["all"])
        assert sums[-1] < sums[0]  # the bar shrinks
    panel.close()


def test_what_is_kept_with_several_plans_is_close_to_what_the_graph_with_them_keeps(bert):
    kept = bert.activations(plans=True)
    rows = bert.plan().rows
    places = {row.config: row.frequency for row in rows}
    plans = tuple(row.config for row in rows if row.config.startswith(("Gelu+", "LayerNormalization+")))
    assert len(plans) == 2
    partly = f"{plans[0].rpartition(':')[0]}:1"
    assert kept_with(kept, (), places).total_bytes == kept.total_bytes
    for chosen in (plans, (partly,)):
        with_plans = kept_with(kept, chosen, places).total_bytes
        bert.set(memory_plan=chosen)
        there = bert.activations(plans=True)
        assert with_plans == pytest.approx(there.total_bytes, rel=0.05)
        # From the graph with plans back to the one without.
        assert kept_with(there, (), places).total_bytes == pytest.approx(kept.total_bytes, rel=0.05)
        bert.set(memory_plan=())


def test_a_share_is_applied_verified_and_undone(bert):
    panel = Panel(bert)
    panel.predict.click()
    panel.budget.shares.keep = 80
    panel.apply.click()
    assert panel.errors.text == ""
    budget = bert.budgets[-1]
    assert budget.asked == "80 %"
    shown = unescape(re.sub(r"<[^>]+>", " ", panel.budget.result.value))
    if budget.applied:
        assert "less memory costs" in shown
        assert "what changed: kept for backward in" in shown
        assert bert.options.memory_plan or bert.options.memory_level
        panel.undo.click()
        assert bert.options == Options()
    else:
        assert "cannot be reached" in shown
    panel.close()
