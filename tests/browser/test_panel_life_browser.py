"""The panel through a working day: reloaded, seen by two people, far away, saved, opened again, its kernel restarted.

All tests share one notebook, one kernel and, where they do not say otherwise, one page.
"""

from __future__ import annotations

import json
import re
import time
from types import SimpleNamespace

import nbformat
import pytest
from nbconvert import HTMLExporter

from . import proxy
from .conftest import CELLS_SECONDS, pages
from .test_panel_browser import STEP, WRAP, press, run_all, screenshots, shown, tab

__all__ = ["screenshots"]

pytestmark = pytest.mark.browser

SHOW = "panel = ortlab.panel(lab)\npanel"

COUNT = """\
import gc, threading
from ipywidgets.widgets.widget import _instances
gc.collect()
print("alive:", len(_instances), threading.active_count(), len(lab._bench.observers))"""

LOST = "The kernel of this panel has ended or was restarted"

ONE_CHANGED = "Compute (1 changed)"

NOT_FOUND = "model not found|Comm not found|Could not create a (model|view)|No such comm"
"""What JupyterLab itself says on the console where the kernel of a widget has gone."""


@pytest.fixture(scope="module")
def day(jupyter, chromium, tmp_path_factory):
    """One notebook whose cells have run; `page` shows it, `open` opens it in another browser."""
    name = "life.ipynb"
    cells = [WRAP + "\nimport ortlab", STEP, SHOW, COUNT]
    document = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    document.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(document, jupyter.folder / name)
    with pages(jupyter, chromium, tmp_path_factory.mktemp("day")) as open_page:
        page = open_page(name, height=2400, expected=NOT_FOUND)
        page.keyboard.press("Control+b")  # the file browser takes its room
        run_all(page)
        yield SimpleNamespace(page=page, open=open_page, name=name, file=jupyter.folder / name)


@pytest.fixture
def panel(day):
    """The panel in the shared page, with the default switches."""
    return day.page.locator(".ortlab-panel").first


def badge(panel):
    return panel.locator(".ortlab-badge").inner_text()


def runs(panel):
    return panel.locator(".ortlab-runs .ortlab-records tbody tr")


def settled(day):
    """Wait until the kernel has answered every click, and the panel has put the focus back."""
    day.page.wait_for_function(
        """async () => {
            const one = document.querySelector('.ortlab-panel'), pause = () => new Promise((go) => setTimeout(go, 200));
            for (let quiet = 0; quiet < 3; quiet++) {
                const before = one.innerHTML;
                await pause();
                if (one.matches('.ortlab-waits') || one.innerHTML !== before) return false;
            }
            return true;
        }"""
    )


def run_cell(page, number):
    """Run a cell again and wait until the kernel has done it."""
    cell = page.locator(".jp-Notebook .jp-CodeCell").nth(number)
    prompt = cell.locator(".jp-InputArea-prompt")
    before = prompt.inner_text()
    cell.locator(".jp-InputArea-editor").click()
    page.keyboard.press("Control+Enter")
    page.keyboard.press("Escape")
    done = prompt.filter(has_text=re.compile(r"\[\d+\]:")).filter(has_not_text=before)
    done.wait_for(timeout=1000 * CELLS_SECONDS)
    return cell


def save(day):
    """Save the notebook and read it."""
    before = day.file.stat().st_mtime_ns
    day.page.locator(".jp-Notebook .jp-InputPrompt").first.click()
    day.page.keyboard.press("Control+s")
    deadline = time.monotonic() + CELLS_SECONDS
    while day.file.stat().st_mtime_ns == before and time.monotonic() < deadline:
        day.page.wait_for_timeout(100)
    day.page.wait_for_timeout(300)
    return nbformat.read(day.file, 4)


def alive(page) -> list[int]:
    """Return how many widgets, threads and observers the kernel holds."""
    cell = run_cell(page, 3)
    return [int(word) for word in cell.locator(".jp-OutputArea-output").inner_text().split()[1:]]


def test_all_is_done_by_keyboard_and_the_focus_stays(day, panel):
    page = day.page
    assert badge(panel) == "ORT"
    assert page.locator(".ortlab-saved").count() == 1
    assert not page.locator(".ortlab-saved").is_visible()  # beside the living panel
    tab(panel, "Switches")
    switch = panel.get_by_label("compute_optimizer", exact=True)
    switch.focus()
    page.keyboard.press("Space")
    shown(panel, "rebuild pending")
    assert not switch.is_checked()
    panel.get_by_role("button", name="Rerun").focus()
    page.keyboard.press("Enter")
    tab(panel, "Overview")
    runs(panel).nth(1).wait_for()
    assert "compute_optimizer=False" in runs(panel).first.inner_text()
    tab(panel, "Switches")
    panel.get_by_role("button", name="Rerun").focus()
    page.keyboard.press("Enter")
    shown(panel, "Last run #3 ort")
    # The button was grey while it worked, which takes the focus from it.
    page.wait_for_function(
        "document.activeElement.textContent === 'Rerun' && !document.activeElement.disabled"
    )
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Undo"
    switch.focus()
    page.keyboard.press("Space")
    press(panel, "Compute")
    settled(day)  # what the kernel greys out meanwhile would take the focus
    # From the first control to the last, Tab meets every one, in the order of the page, and all of them are seen.
    met = []
    panel.get_by_role("button", name="ONNX Runtime").focus()
    for _ in range(120):
        inside = page.evaluate(
            """() => { const one = document.activeElement, panel = one.closest('.ortlab-panel');
            if (!panel) return null;
            const all = [...panel.querySelectorAll('input, select, button, summary, [tabindex="0"]')];
            const style = getComputedStyle(one);
            return [all.indexOf(one), style.outlineStyle !== 'none' ? '' : one.outerHTML]; }"""
        )
        if inside is None:
            break
        met.append(inside)
        page.keyboard.press("Tab")
    assert [place for place, _ in met] == sorted({place for place, _ in met})
    assert [unseen for _, unseen in met if unseen] == []
    reachable = panel.evaluate(
        """panel => [...panel.querySelectorAll('input, select, button, summary')].filter(
            one => one.offsetParent !== null && !one.disabled).length"""
    )
    assert len(met) >= reachable


def test_a_screen_reader_is_told_what_is_what(day, panel):
    region = day.page.get_by_role("region", name="ortlab: model").first
    region.wait_for()
    assert "ONNX Runtime" in region.get_by_role("status").first.inner_text()
    engines = region.get_by_role("group", name="Engine")
    assert engines.get_by_role("button", pressed=True).inner_text() == "ONNX Runtime"
    region.get_by_role("tab", name="Messages", selected=False).wait_for()
    region.get_by_role("tab", name=re.compile("^Switches"), selected=True).wait_for()
    switch = region.get_by_label("compute_optimizer", exact=True).and_(region.locator("[aria-describedby]"))
    described = switch.get_attribute("aria-describedby")
    about = day.page.locator(f"#{described}")
    about.get_by_text("What it does").click()
    assert "Moves slicing" in about.inner_text()
    about.get_by_text("What it does").click()
    tab(panel, "Overview")
    region.get_by_role("tabpanel", name="Overview").get_by_role("table", name="Runs").wait_for()


def test_narrow_and_wide_cells_hold_the_whole_panel(day, panel, screenshots):
    output = day.page.locator(".jp-OutputArea-output:has(.ortlab-panel)").first
    for width in (350, 560, 1400):
        output.evaluate("(one, width) => { one.style.flex = `0 0 ${width}px`; }", width)
        narrow = day.page.locator(".ortlab-panel.ortlab-narrow").first
        narrow.wait_for(state="visible" if width < 1400 else "detached")
        assert output.bounding_box()["width"] == width
        panel.screenshot(path=screenshots / f"panel-{width}.png")
        assert panel.evaluate("panel => panel.scrollWidth <= panel.clientWidth + 1")
        assert panel.bounding_box()["width"] <= width
    output.evaluate("one => { one.style.flex = ''; }")


def test_the_chart_is_saved_as_a_picture(day, panel):
    tab(panel, "Overview")
    press(panel, "Loss and time of each step")
    panel.locator("svg[role=img]").wait_for()
    for button, beginning in (("Save as SVG", b"<svg"), ("Save as PNG", b"\x89PNG")):
        with day.page.expect_download() as download:
            panel.get_by_role("button", name=button).click()
        assert download.value.path().read_bytes().startswith(beginning)
        assert download.value.suggested_filename.startswith("runs.")
    press(panel, "Loss and time of each step")


def test_a_reloaded_page_has_the_panel_again(day, panel):
    before = runs(panel).count()
    save(day)
    day.page.reload()
    runs(panel).nth(before - 1).wait_for(timeout=1000 * CELLS_SECONDS)
    assert runs(panel).count() == before
    tab(panel, "Switches")
    panel.get_by_label("compute_optimizer", exact=True).uncheck()
    shown(panel, ONE_CHANGED)
    panel.get_by_label("compute_optimizer", exact=True).check()
    panel.get_by_text(ONE_CHANGED).wait_for(state="hidden")


def test_two_browsers_stay_in_step(day, panel):
    second = day.open(day.name, height=2400)
    other = second.locator(".ortlab-panel").first
    other.locator(".ortlab-tabbar button").first.wait_for(timeout=1000 * CELLS_SECONDS)
    tab(other, "Switches")
    tab(panel, "Switches")
    other.get_by_label("compute_optimizer", exact=True).uncheck()
    shown(panel, ONE_CHANGED)
    assert not panel.get_by_label("compute_optimizer", exact=True).is_checked()
    panel.get_by_label("compute_optimizer", exact=True).check()
    other.get_by_text(ONE_CHANGED).wait_for(state="hidden")
    second.context.close()


def test_a_browser_that_cannot_reach_the_kernels_host_has_it_all(day, jupyter):
    with proxy.running(int(jupyter.url.rpartition(":")[2])) as way:
        settings = {"server": f"http://127.0.0.1:{way.port}", "bypass": "<-loopback>"}
        origin = f"http://{proxy.HOST}"
        page = day.open(
            day.name,
            height=2400,
            origin=origin,
            proxy=settings,
            expected="502|ERR_|favicon|Failed to fetch|CORS",
        )
        reached = page.evaluate(f"fetch('{jupyter.url}/api').then(() => true, () => false)")
        assert reached is False  # the kernel's localhost is not this browser's
        assert way.refused
        way.refused.clear()
        panel = page.locator(".ortlab-panel").first
        panel.locator(".ortlab-tabbar button").first.wait_for(timeout=1000 * CELLS_SECONDS)
        tab(panel, "Overview")
        runs(panel).first.wait_for()
        before = runs(panel).count()
        press(panel, "Rerun")
        runs(panel).nth(before).wait_for()
        press(panel, "Loss and time of each step")
        panel.locator("svg[role=img]").wait_for()
        press(panel, "Loss and time of each step")
        # Nothing was asked for elsewhere; Chromium itself asks its maker about forms.
        assert [one for one in way.refused if not one.endswith(".googleapis.com:443")] == []
        page.context.close()


def test_running_the_cell_again_and_closing_leave_nothing_behind(day, panel):
    page = day.page
    first = alive(page)
    for _ in range(3):
        run_cell(page, 2)
        panel.locator(".ortlab-switch").first.wait_for(state="attached")
    assert alive(page) == first
    assert page.locator(".ortlab-panel").count() == 1
    cell = page.locator(".jp-Notebook .jp-CodeCell").nth(3)
    cell.locator(".jp-InputArea-editor").click()
    page.keyboard.press("Control+End")
    page.keyboard.type(
        "\nfor _ in range(3):\n_p = ortlab.notebook.widgets.panel.Panel(lab)"
        "; _p.plan.click(); _p.compare.click(); _p.close()"
    )
    alive(page)  # counts, then makes the panels and closes them
    assert alive(page) == first


# The bar of a slow step leaves an output without data, of which nbconvert warns; none of the panel's is without.
@pytest.mark.filterwarnings(r"ignore:Your element with mimetype\(s\) dict_keys\(\[\]\):UserWarning")
def test_a_saved_notebook_shows_the_tables_wherever_it_is_opened(day, panel, jupyter, screenshots):
    page = day.page
    run_cell(page, 2)  # a reloaded page passes no new form on
    tab(panel, "Overview")
    runs(panel).first.wait_for()
    press(panel, "Rerun")
    count = runs(panel).count() + 1
    runs(panel).nth(count - 1).wait_for()
    deadline = time.monotonic() + CELLS_SECONDS
    saved = save(day)
    while f"#{count} ort" not in str(saved.cells[2].outputs) and time.monotonic() < deadline:
        saved = save(day)
    outputs = saved.cells[2].outputs
    assert len(json.dumps(outputs)) < 100_000  # what a panel adds
    assert len(outputs) == 2
    # The saved form is of the end, not of the moment when the cell ran.
    assert f"#{count} ort" in outputs[1]["data"]["text/plain"]

    # Opened where there is no such panel: trusted as it was saved, and untrusted after a change from outside.
    for trust in ("trusted", "untrusted"):
        copy = nbformat.from_dict(saved)
        if trust == "untrusted":
            copy.cells[2].source += "\n# changed by somebody else"
        name = f"{trust}.ipynb"
        nbformat.write(copy, jupyter.folder / name)
        other = day.open(name, height=2400, expected=NOT_FOUND)
        table = other.locator(".jp-OutputArea table", has_text=f"#{count} ort").first
        table.wait_for()
        assert other.locator(".ortlab-panel").count() == 0
        for words in ("Error displaying widget", "Loading widget"):
            assert not other.get_by_text(words).first.is_visible()
        other.screenshot(path=screenshots / f"saved-{trust}.png")
        other.context.close()

    exported = HTMLExporter().from_notebook_node(saved)[0]
    bare = page.context.new_page()
    bare.route("**/*", lambda route: route.abort())  # no network
    bare.set_content(exported, wait_until="domcontentloaded")
    assert bare.locator("table", has_text=f"#{count} ort").first.is_visible()
    bare.screenshot(path=screenshots / "saved-nbconvert.png")
    bare.close()


def test_a_restarted_kernel_is_said_and_the_saved_form_remains(day, panel, screenshots):
    page = day.page
    page.get_by_role("menuitem", name="Kernel", exact=True).click()
    page.get_by_text("Restart Kernel…", exact=True).click()
    page.get_by_role("button", name="Confirm Kernel Restart").click()
    alert = panel.get_by_role("alert").filter(has_text=LOST)
    alert.wait_for(timeout=1000 * CELLS_SECONDS)
    assert panel.locator(".ortlab-switch input").first.evaluate("one => Boolean(one.closest('[inert]'))")
    saved = page.locator(".ortlab-saved").first
    saved.locator("table").first.wait_for()
    assert "#1 ort" in saved.inner_text()
    panel.scroll_into_view_if_needed()
    page.screenshot(path=screenshots / "panel-restarted.png")
    # A server that is ended while a kernel restarts never ends (jupyter_server waits for that kernel in vain).
    page.get_by_text("| Idle").first.wait_for(timeout=1000 * CELLS_SECONDS)
