"""The graph tab of the panel over a real lab: the map by modules, and what its buttons ask of Python."""

from __future__ import annotations

import gzip
import json
from base64 import b64decode

import pytest
import torch
from ipywidgets.widgets.widget import _instances as open_widgets

import ortlab
from ortlab.lab.lab import latest
from ortlab.notebook.widgets.panel import GRAPH, Panel


@pytest.fixture
def run():
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 2))
    inputs = torch.randn(4, 8)

    def step():
        loss = model(inputs).square().mean()
        loss.backward()
        return loss

    lab = ortlab.wrap(model)
    yield lambda: lab.step(step, 2, progress=False)
    lab.unwrap()


@pytest.fixture
def panel(run):
    panel = Panel(latest())
    yield panel
    panel.close()


def asked(panel, do, *values):
    """Ask as the browser does."""
    panel.graph.map._handle_custom_msg({"do": do, "with": list(values)}, [])


def drawn(panel):
    """What goes to the browser, unpacked."""
    return json.loads(gzip.decompress(b64decode(panel.graph.map._told["map"])))


def test_the_tab_reads_the_graph_once_and_saves_none_of_its_rows(panel, run):
    run()
    assert panel.graph.map is None
    panel.tabs.open(GRAPH)
    assert panel.errors.text == ""
    told = drawn(panel)
    assert told["sized"]
    assert told["backward"]
    assert {row["t"].partition(" ")[0] for row in told["rows"]} >= {"0", "1", "2"}
    number = panel.graph.map.shown["number"]
    panel.tabs.open("Memory")
    panel.tabs.open(GRAPH)
    assert panel.graph.map.shown["number"] == number
    assert len(json.dumps(panel.graph.map.get_state())) < 2_000
    messages = []
    panel.graph.map.send = messages.append
    asked(panel, "map")
    assert [message["number"] for message in messages] == [number]


def test_a_switch_makes_it_stale_and_the_next_run_draws_it_anew(panel, run):
    run()
    panel.tabs.open(GRAPH)
    first = panel.graph.map.shown
    panel.lab.set(memory_level=1)
    assert "the next step builds another graph" in panel.graph.map.shown["stale"]
    run()
    assert panel.graph.map.shown["stale"] == ""
    assert panel.graph.map.shown["number"] > first["number"]
    assert [name for _, name in panel.graph.map.shown["runs"]] == ["#1 defaults", "#2 memory_level=1"]
    assert panel.graph.map.shown["pair"] == ["1", "2"]


def test_a_graph_that_is_read_after_a_switch_is_that_of_the_switch_and_says_so(panel, run):
    run()
    panel.lab.set(memory_level=1)
    panel.tabs.open(GRAPH)
    assert panel.graph.graph.digest == panel.lab.graph().digest
    assert panel.graph.map.shown["stale"] == ""
    panel.lab.set(memory_level=0)  # as the last step had it; the map shows the other graph
    assert "the next step builds another graph" in panel.graph.map.shown["stale"]
    panel.tabs.open("Memory")
    panel.tabs.open(GRAPH)
    assert panel.graph.graph.digest == panel.lab.graph().digest
    assert panel.graph.map.shown["stale"] == ""


def test_other_switches_that_ran_in_between_do_not_make_it_stale(panel, run):
    run()
    panel.tabs.open(GRAPH)
    panel.lab.sweep(memory_level=[0, 1], n=1, baseline={"memory_level": 1})
    assert panel.lab.rebuild().stage == "session"
    assert panel.graph.map.shown["stale"] == ""
    panel.tabs.open("Memory")
    panel.tabs.open(GRAPH)
    assert panel.graph.map.shown["stale"] == ""
    assert panel.graph.graph.digest == panel.lab.graph().digest


def test_time_plans_and_what_changed_are_read_when_they_are_asked_for(panel, run):
    run()
    panel.tabs.open(GRAPH)
    asked(panel, "time")
    assert drawn(panel)["timed"]
    assert len(panel.lab.runs) == 1
    asked(panel, "plans")
    told = drawn(panel)
    assert told["planned"]
    assert told["timed"]
    panel.lab.set(memory_level=1)
    run()
    asked(panel, "compare", "1", "2")
    told = drawn(panel)
    assert told["compared"]
    assert told["about"][0] == "From run #1 ort to run #2 ort (memory_level=1)"
    assert told["about"][1:]
    asked(panel, "compare", "2", "2")
    assert drawn(panel)["about"][1] == "The graphs are the same."
    assert panel.errors.text == ""


def test_what_cannot_be_read_is_said_in_the_panel_and_the_map_stays(panel, run):
    run()
    panel.tabs.open(GRAPH)
    number = panel.graph.map.shown["number"]
    asked(panel, "compare", "1", "7")
    assert "7" in panel.errors.text
    assert panel.graph.map.shown["number"] == number
    panel.lab.rerun(engine="eager")
    assert [number for number, _ in panel.graph.map.shown["runs"]] == ["1"]


def test_every_node_is_drawn_on_demand_and_the_map_comes_back(panel, run):
    run()
    panel.tabs.open(GRAPH)
    assert panel.graph.view is None
    node = next(row["n"][0] for row in drawn(panel)["rows"] if row.get("n"))
    asked(panel, "nodes", node)
    assert panel.graph.view in panel.graph.children
    assert panel.graph.view.selected == [node]
    panel.graph.children[0].children[0].click()
    assert panel.graph.children == (panel.graph.map,)
    assert panel.errors.text == ""


def test_a_closed_panel_leaves_nothing_of_the_graph(run):
    before = set(open_widgets)
    panel = Panel(latest())
    run()
    panel.tabs.open(GRAPH)
    asked(panel, "nodes", "")
    panel.close()
    assert set(open_widgets) == before


def test_each_of_several_parts_has_its_map(wrap):
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    lab = wrap(model, only=["0", "2"])
    inputs = torch.randn(4, 8, requires_grad=True)
    lab.step(lambda: model(inputs).sum().backward(), 2, progress=False)
    panel = Panel(lab)
    panel.tabs.open(GRAPH)
    assert panel.errors.text == ""
    assert panel.graph.map.shown["parts"] == [["0", "0"], ["2", "2"]]
    assert panel.graph.map.shown["part"] == "0"
    first = drawn(panel)
    asked(panel, "part", "2")
    assert panel.errors.text == ""
    assert panel.graph.map.shown["part"] == "2"
    assert panel.graph.graph.part == "2"
    assert drawn(panel) != first
    for act in ("time", "plans"):
        asked(panel, act)
        assert panel.errors.text == ""
        assert panel.graph.graph.part == "2"
    panel.close()
