"""A drawn graph through its life in JupyterLab: hostile names, plans, differences, a restart, a saved notebook."""

from __future__ import annotations

from types import SimpleNamespace

import nbformat
import pytest

from .conftest import CELLS_SECONDS
from .test_graph_browser import SCRATCH, execute, ready, run_all
from .test_panel_browser import STEP, WRAP, notebook, press, screenshots, tab
from .test_panel_life_browser import NOT_FOUND, save

__all__ = ["notebook", "screenshots"]

pytestmark = pytest.mark.browser

SHOW = "import ortlab\nview = ortlab.show_graph(lab, height=420)\nview"

LOST = "The kernel of this view has ended or was restarted"

HOSTILE = """\
import onnx, ortlab
hostile = "<img src=x onerror='hacked=1;parent.hacked=1'><script>hacked=1</script>\\"'`&<b>\\U0001f525" + "x" * 10_000
nodes = [
    onnx.helper.make_node("Relu", [f"v{at}"], [f"v{at + 1}"], name=f"/{hostile}/layer.{at // 3}/Relu_{at}")
    for at in range(6)
]
nodes[0].doc_string = hostile
graph = onnx.helper.make_graph(nodes, hostile, [onnx.ValueInfoProto(name="v0")], [])
onnx.save(onnx.helper.make_model(graph), "hostile.onnx")
view = ortlab.show_graph(ortlab.open_graph("hostile.onnx"))
view.highlight({view.names[0]: hostile, view.names[1]: "added"})
view"""

DARK = """() => {
    const colours = getComputedStyle(document.getElementById('target')).backgroundColor.match(/[0-9.]+/g);
    return Math.max(...colours.slice(0, 3).map(Number)) < 100;
}"""


def content(view):
    """Return the frame of a view itself, in which scripts can be run."""
    return view.locator("iframe").element_handle().content_frame()


def test_names_with_markup_quotes_and_ten_thousand_characters_run_no_script(
    open_notebook, notebook, screenshots
):
    page = open_notebook(notebook(HOSTILE, SCRATCH), height=1500)
    run_all(page)
    view, frame = ready(page)
    frame.locator("path.node-border.ortlab-added").wait_for()
    frame.locator("g.graph-node", has_text="Relu").first.click()
    view.get_by_text("Selected: /<img src=x").wait_for()
    assert execute(page, "view.selected == view.names[:1]") == "True"
    frame.get_by_label("Search nodes").fill("<img relu_4")
    frame.locator("#ortlab-found button").first.click()
    view.get_by_text("Relu_4").wait_for()
    frame.locator("#sidebar").get_by_text(
        "v5"
    ).wait_for()  # what it makes, and not what the node before makes
    view.screenshot(path=screenshots / "graph-hostile.png")
    view.get_by_label("Draw").select_option("module")
    view, frame = ready(page, 1)
    frame.locator("g.graph-node").first.click()
    frame.locator("#sidebar").get_by_text("<img src=x").first.wait_for()
    for where in (page.main_frame, content(view)):
        assert where.evaluate("globalThis.hacked") is None
    assert content(view).evaluate("document.querySelectorAll('img').length") == 0
    assert view.locator("img").count() == 0
    assert view.evaluate("view => view.scrollWidth <= view.clientWidth + 1")


def test_a_ticked_plan_marks_its_nodes_in_the_dark_view_too(open_notebook, notebook, screenshots):
    wrapped = WRAP.replace("--no-panel ", "")
    page = open_notebook(notebook(wrapped, STEP, SHOW, SCRATCH), theme="dark", height=4000)
    run_all(page)
    view, frame = ready(page)
    assert content(view).evaluate(DARK)
    panel = page.locator(".ortlab-panel").first
    tab(panel, "Memory")
    press(panel, "Memory plan")
    panel.get_by_label("Gelu+:1:-1").check()
    marked = frame.locator("path.node-border[style*=stroke]")
    marked.first.wait_for()
    operators = "{node.op_type for node in view.graph.model.graph.node if node.name in view.marks}"
    assert execute(page, f"'Gelu' in {operators}") == "True"
    view.get_by_text("the next step builds another graph").wait_for()
    view.screenshot(path=screenshots / "graph-plan-dark.png")
    panel.get_by_label("Gelu+:1:-1").uncheck()
    marked.first.wait_for(state="detached")


def test_a_difference_is_marked_in_both_graphs_and_its_table_is_sorted(open_notebook, notebook, screenshots):
    compare = "%ort_graph_diff exported execution"
    cells = (WRAP, STEP, compare, f"view = {compare} --view\nview", SCRATCH)
    page = open_notebook(notebook(*cells), height=3000)
    run_all(page)
    view, frame = ready(page)
    view.get_by_text("Marked: ").wait_for()
    kinds = execute(page, "sorted(set(view.marks.values()))")
    assert kinds != "[]"
    frame.locator("text.ortlab-mark").first.wait_for()
    view.screenshot(path=screenshots / "graph-difference.png")
    view.get_by_label("Stage").select_option("before")
    view, frame = ready(page, 1)
    assert execute(page, "view.graph.stage") == "exported"
    colours = "lab.graph_diff('exported', 'execution').colours()[0]"
    assert execute(page, f"view.marks == {colours}") == "True"

    table = page.locator("table.ortlab-sorts").first
    names = "table => [...table.tBodies[0].rows].map((row) => row.cells[1].textContent)"
    before = table.evaluate(names)
    heading = table.get_by_role("button", name="operators")
    heading.click()
    table.locator("th[aria-sort=ascending]").wait_for()
    assert sorted(table.evaluate(names)) == sorted(before)
    up = table.evaluate(names)
    heading.click()
    table.locator("th[aria-sort=descending]").wait_for()
    collated = "rows => [...rows].sort((a, b) => a.localeCompare(b, undefined, { numeric: true }))"
    assert up == page.evaluate(collated, before)
    table.screenshot(path=screenshots / "graph-difference-table.png")


def test_a_saved_notebook_has_table_and_picture_and_a_restarted_kernel_is_told(
    open_notebook, notebook, jupyter, screenshots
):
    name = notebook(WRAP, STEP, SHOW, SCRATCH)
    page = open_notebook(name, height=3000, expected=NOT_FOUND)
    run_all(page)
    ready(page)
    assert not page.locator(".ortlab-saved").first.is_visible()  # beside the living view
    saved = save(SimpleNamespace(page=page, file=jupyter.folder / name))
    assert "ortlab-saved" in str(saved)
    for trust in ("trusted", "untrusted"):
        copy = nbformat.from_dict(saved)
        if trust == "untrusted":
            copy.cells[2].source += "\n# changed by somebody else"
        nbformat.write(copy, jupyter.folder / f"view-{trust}.ipynb")
        other = open_notebook(f"view-{trust}.ipynb", height=3000, expected=NOT_FOUND)
        other.locator(".jp-OutputArea table", has_text="Gelu").first.wait_for()
        other.locator(".jp-OutputArea img[src^='data:image/svg']").first.wait_for()
        assert other.locator("iframe").count() == 0
        for words in ("Error displaying widget", "Loading widget"):
            assert not other.get_by_text(words).first.is_visible()
        other.screenshot(path=screenshots / f"graph-saved-{trust}.png")
        other.context.close()

    # The kernel that is restarted under the view: what is drawn stays, and can be searched.
    page.get_by_role("menuitem", name="Kernel", exact=True).click()
    page.get_by_text("Restart Kernel…", exact=True).click()
    page.get_by_role("button", name="Confirm Kernel Restart").click()
    view = page.locator(".ortlab-graph").first
    view.get_by_role("alert").filter(has_text=LOST).wait_for(timeout=1000 * CELLS_SECONDS)
    assert view.get_by_label("Stage").evaluate("one => Boolean(one.closest('[inert]'))")
    frame = view.frame_locator("iframe")
    frame.get_by_label("Search nodes").fill("gelu")
    frame.locator("#ortlab-found button").first.wait_for()
    view.screenshot(path=screenshots / "graph-restarted.png")
    page.locator(".ortlab-saved table").first.wait_for()
    page.get_by_text("| Idle").first.wait_for(timeout=1000 * CELLS_SECONDS)
