"""The view of a graph over a real build: what Python selects, what the browser says, and what goes wrong."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from collections import Counter

import pytest
import torch
import triton_files
from ipywidgets.widgets.widget import _instances as open_widgets

import ortlab
from ortlab.errors import BuildError, InstallError, OptionError
from ortlab.graphs.diff import GraphDiff
from ortlab.graphs.stages import STAGES
from ortlab.graphs.viewer import bundle as bundles
from ortlab.notebook.widgets import browser
from ortlab.notebook.widgets.graph_display import highlight, highlight_plans, open_views
from ortlab.render import html, text


@pytest.fixture
def view(lab, monkeypatch):
    """A view, with the messages that it sends to the browser in `view.sent`."""
    view = ortlab.show_graph(lab)
    view.sent = []
    monkeypatch.setattr(view, "send", lambda message, *_: view.sent.append(message))
    yield view
    view.close()


def tell(view, act, *values):
    """Do what the browser's script does."""
    view._handle_custom_msg({"do": act, "with": list(values)}, [])


def test_selection_goes_both_ways(view):
    heard = []
    view.observe(lambda change: heard.append(change["new"]), "selected")
    names = view.names
    view.select(names[:2])
    assert view.selected == names[:2]
    view.set_state({"selected": [names[3]]})  # as the browser sets it
    assert view.selected == [names[3]]
    assert heard == [names[:2], [names[3]]]
    with pytest.raises(OptionError, match="has no node 'nobody', nor 1 others"):
        view.select(["nobody", "else"])
    with pytest.raises(OptionError, match="come as a list"):
        view.select(names[0])
    assert view.selected == [names[3]]


def test_the_page_is_sent_when_it_is_asked_for_and_is_in_no_trait(view):
    tell(view, "document")
    (sent,) = view.sent
    assert sent["number"] == view.shown["number"]
    assert sent["html"].startswith("<!DOCTYPE html>")
    assert len(sent["html"]) > 100_000
    state = json.dumps(view.get_state(), default=str)
    assert len(state) + len(view.script.source) < 15_000


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_can_be_chosen(view, lab, stage):
    tell(view, "stage", stage)
    assert view.stage == view.graph.stage == stage
    assert view.graph.digest == lab.graph(stage).digest
    assert view.shown["stage"] == stage
    assert not view.problem
    assert [one for one, _ in view.shown["stages"]] == list(STAGES)


def test_a_neighbourhood_and_back(view):
    whole = view.graph.node_count
    tell(view, "around")
    assert "No node is selected" in view.problem
    assert view.shown["problem"] == view.problem
    name = view.names[2]
    view.select([name])
    before = view.shown["number"]
    tell(view, "around")
    assert view.shown["around"] == name
    assert f"of {whole} nodes are drawn" in view.reduced
    assert view.shown["number"] == before + 1
    assert view.selected == [name]
    tell(view, "whole", "module")
    assert "groups by module" in view.reduced
    tell(view, "whole", "auto")
    assert view.reduced == ""
    with pytest.raises(OptionError):
        view.around("nobody")
    assert view.shown["around"] == ""  # what failed has changed nothing


def test_marks_have_words_or_a_colour_and_go_with_the_stage(view):
    names = view.names
    view.highlight(names[:2])
    assert set(view.marks) == set(names[:2])
    view.highlight({names[0]: "added", names[1]: "#1a7f37"})
    assert view.marks == {names[0]: "added", names[1]: "#1a7f37"}
    view.stage = "exported"
    assert set(view.marks) <= set(view.names)
    view.highlight()
    assert view.marks == {}


def test_what_the_browser_cannot_draw_is_shown_as_a_picture(view):
    tell(view, "failed", view.shown["number"] - 1, "an earlier page")
    assert view.shown["still"] == ""
    tell(view, "failed", view.shown["number"], "The nodes could not be placed: it took too long.")
    assert view.shown["still"].startswith("<svg")
    assert "it took too long" in view.shown["why"]
    view.stage = "optimized"
    assert view.shown["still"] == ""


def test_a_cell_that_runs_again_shows_the_same_view(view, lab):
    before = len(open_widgets)
    again = ortlab.show_graph(lab)
    assert again is view
    assert len(open_widgets) == before
    other = ortlab.show_graph(lab, "optimized")
    assert other is not view
    assert open_views(lab) == [view, other]
    other.close()
    assert open_views(lab) == [view]
    assert len(open_widgets) == before


def test_a_rebuild_is_told_and_refreshed(lab):
    view = ortlab.show_graph(lab)
    try:
        module = lab.module
        before = view.graph.digest
        lab.set(memory_plan=["Gelu+:1:-1"])
        assert "the next step builds another graph" in view.shown["stale"]
        lab.set(memory_plan=[])
        assert view.shown["stale"] == ""
        lab.set(memory_plan=["Gelu+:1:-1"])
        lab.step(lambda: module(torch.randn(4, 8)).sum().backward())
        assert "has built another graph since" in view.shown["stale"]
        tell(view, "refresh")
        assert view.shown["stale"] == ""
        assert view.graph.digest != before
        assert any(name.endswith("_recompute") for name in view.names)
    finally:
        view.close()
        lab.set(memory_plan=[])
        module(torch.randn(4, 8)).sum().backward()


def test_a_view_that_is_opened_after_a_switch_is_that_of_the_switch_and_says_so(lab):
    module = lab.module
    lab.step(lambda: module(torch.randn(4, 8)).sum().backward())
    lab.set(memory_plan=["Gelu+:1:-1"])
    view = ortlab.show_graph(lab)
    try:
        assert any(name.endswith("_recompute") for name in view.names)
        assert lab.rerun().number  # news of a run
        lab.set(memory_plan=[])
        assert "the next step builds another graph" in view.shown["stale"]
        view.refresh()
        lab.set(log_level=lab.options.log_level)  # news that changes no graph
        assert view.shown["stale"] == ""
        lab.set(memory_plan=["Gelu+:1:-1"])  # as the last step had it; the view shows the other graph
        assert "the next step builds another graph" in view.shown["stale"]
        lab.set(memory_plan=[])
        assert view.shown["stale"] == ""
    finally:
        view.close()
        lab.set(memory_plan=[])
        lab.rerun()


def test_marks_of_plans_follow_the_ticks_while_a_rebuild_is_due(view, lab):
    highlight_plans(lab, ["Gelu+:1:-1"])
    every = dict(view.marks)
    assert every
    lab.set(memory_plan=["Gelu+:1:-1"])
    try:
        highlight_plans(lab, ["Gelu+:1:1"])
        assert len(view.marks) == 1
        assert set(view.marks) < set(every)
        highlight_plans(lab, [])
        assert view.marks == {}
    finally:
        lab.set(memory_plan=[])


def test_a_closed_view_follows_the_lab_no_more_and_is_forgotten(lab):
    observers = len(lab._bench.observers)
    before = len(open_widgets)
    view = ortlab.show_graph(lab, "gradient")
    assert len(lab._bench.observers) == observers + 1
    view.close()
    assert len(lab._bench.observers) == observers
    assert len(open_widgets) == before
    gone = weakref.ref(view)
    del view
    gc.collect()
    assert gone() is None


def test_the_nodes_of_a_activations_row_are_highlighted_with_their_copies(view, lab):
    row = lab.activations().rows[0]
    highlight(lab, [row.node, "no such node"])
    assert row.node in view.marks
    assert row.node in view.selected
    highlight(lab, [])
    assert view.marks == {}


def test_one_graph_and_a_file_have_views_of_their_own(lab, tmp_path):
    path = lab.graph("optimized").save(tmp_path / "some.onnx")
    view = ortlab.show_graph(ortlab.open_graph(path))
    try:
        assert [stage for stage, _ in view.shown["stages"]] == ["file"]
        assert view.graph.operators == lab.graph("optimized").operators
        assert ortlab.show_graph(ortlab.open_graph(path)) is view
    finally:
        view.close()


def test_a_difference_is_marked_in_both_of_its_graphs(lab, tmp_path):
    difference = lab.graph_diff("exported", "execution")
    before, after = difference.colours()
    assert before
    assert after
    view = ortlab.show_graph(difference)
    try:
        assert view.graph is difference.graphs[1]
        assert view.marks == after
        counts = Counter(after.values())
        assert all(f" {number} {kind}" in view.shown["marked"] for kind, number in counts.items())
        assert [title for _, title in view.shown["stages"]] == ["before: exported", "after: execution"]
        tell(view, "stage", "before")
        assert view.graph is difference.graphs[0]
        assert view.marks == before
        view.highlight()
        assert view.shown["marked"] == ""
        assert ortlab.show_graph(lab.graph_diff("exported", "execution"), "after") is view
        assert view.marks == after
        with pytest.raises(OptionError, match="no side 'execution'"):
            ortlab.show_graph(difference, "execution")
    finally:
        view.close()
    read = GraphDiff.load(difference.save(tmp_path / "difference.json"))
    with pytest.raises(BuildError, match="has no graphs to show"):
        ortlab.show_graph(read)


def test_front_ends_without_widgets_show_tables_and_a_picture(view):
    forms, _ = view._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in forms
    assert "data:image/svg+xml;base64," in forms["text/html"]
    assert "<table" in forms["text/html"]
    assert "Figure: Graph: execution" in forms["text/plain"]
    assert "Modules and their operators" in forms["text/plain"]
    assert "Gelu" in forms["text/plain"]
    assert len(forms["text/html"]) < 60_000
    assert repr(view) == f"GraphView('execution', 'training', nodes={view.graph.node_count})"


def test_an_embedded_graph_adds_no_more_than_is_promised(lab):
    graph = lab.graph("execution")
    embedded = ortlab.embed_graph(graph)
    whole = html.render(embedded)
    assert embedded.refused == ""
    assert len(whole.encode()) <= 400_000 + len(graph.serialized)
    assert 'sandbox="allow-scripts allow-downloads"' in whole
    assert "allow-same-origin" not in whole
    assert "srcdoc=" in whole
    assert whole.index("<table") < whole.index("<iframe")
    assert "can be browsed in the HTML" in text.render(embedded)


def test_a_broken_netron_leaves_tables_and_picture_and_says_why(lab, tmp_path, monkeypatch):
    broken = tmp_path / "netron"
    broken.mkdir()
    shutil.copy(bundles._installed() / "__init__.py", broken)
    monkeypatch.setattr(bundles, "_installed", lambda: broken)
    bundles.bundle.cache_clear()
    try:
        embedded = ortlab.embed_graph(lab.graph("execution"))
        assert embedded.refused
        page = html.render(embedded)
        assert "The graph cannot be browsed here" in page
        assert "<iframe" not in page
        assert "data:image/svg+xml" in page
        view = ortlab.show_graph(lab, "processed")
        assert view.shown["still"].startswith("<svg")
        assert "Next:" in view.shown["why"]
        view.close()
    finally:
        bundles.bundle.cache_clear()


def test_a_damaged_installation_is_explained(tmp_path, monkeypatch):
    monkeypatch.setattr(browser, "STATIC", tmp_path)
    with pytest.raises(InstallError, match=r"graph_view\.js for the browser cannot be read") as raised:
        browser.compact("graph_view.js")
    assert "pip install" in raised.value.fix


@pytest.fixture
def kernel(lab, tmp_path, monkeypatch):
    """A sub-graph of the lab with the code that ORT has generated for it."""
    monkeypatch.chdir(tmp_path)
    graph = lab.graph("gradient").model
    name = next(node.name for node in graph.graph.node if node.op_type == "Gelu")
    triton_files.write(triton_files.cut(graph, [name]), lab.activations().symbols, monkeypatch)
    return lab.triton_kernels().kernel(1)


@pytest.mark.row("H7")
def test_a_sub_graph_of_triton_is_drawn_beside_its_code(kernel):
    view = ortlab.show_graph(kernel)
    assert [one for one, _ in view.shown["stages"]] == ["original", "processed"]
    assert view.graph.operators == {"com.microsoft.Gelu": 1}
    about, code = view.shown["code"]
    assert about.startswith("func_")
    assert f'<span class="nf">{kernel.functions[0]}</span>' in code
    tell(view, "stage", "processed")
    assert view.graph.inputs[0].shape == (4, 32)  # sizes, where the original has a name
    assert view.shown["code"] == [about, code]
    assert kernel.functions[0] in text.render(view.page())
    assert ortlab.show_graph(kernel) is view
    assert view.stage == "original"
    view.close()


def test_graphs_without_code_have_none_beside_them(view):
    assert view.shown["code"] is None
    assert "ortlab-code" not in html.render(view.page())
