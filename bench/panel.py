"""A click on a switch of the panel shows within 100 ms, and a panel adds at most 100 kB to a saved notebook.

The panel answers a click itself, before the kernel does: that it waits. What it waits for, the words on what the next
step redoes, comes from the kernel and is timed, too. The notebook is saved with its widgets.

In a real JupyterLab and a headless Chromium: a click is timed in the page, from the press to the frame in which the
panel says what the next step redoes; the steps themselves are not in it. First paint is from the keys that run a cell
with another panel to the frame in which its head stands there. A thousand runs and ten thousand plan rows are drawn,
sorted, filtered and turned. Every tab is measured in its height, and what the console says is counted.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from report import REPOSITORY, Report, arguments

if TYPE_CHECKING:
    from playwright.sync_api import Page

RUNS = 1000
PLANS = 10_000

CELLS = (
    """\
%load_ext ortlab
import torch
torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(256, 16), torch.randint(0, 4, (256,))
lab = %ort_wrap model""",
    """\
%%ort_step -n 20
optimizer.zero_grad()
loss = torch.nn.functional.cross_entropy(model(x), y)
loss.backward()
optimizer.step()""",
)

MANY = """\
from dataclasses import replace
for number in range(2, {runs} + 1):
    lab.runs.add(replace(lab.runs[0], number=number))
import ortlab
panel = ortlab.panel(lab)
plan = lab.plan()
rows = [replace(plan.rows[0], config=f"Gelu{{n}}+:1:-1", saving_bytes=float(n)) for n in range({plans})]
panel.plans.show_plan(replace(plan, rows=tuple(rows)))
panel.runs.show()"""

ANOTHER = """\
from ortlab.notebook.widgets.panel import Panel
another = Panel(lab)
another"""
"""Shows another panel; the one that it has shown before stays with the kernel."""

HEIGHT = 700
TABS = ("Overview", "Memory", "Graph", "Switches", "Messages")

WAIT_MS = 60_000
"""How long one press may go without an answer before the benchmark ends with an error."""

TIMED = """\
([press, seen, limit]) => new Promise((done, failed) => {
  const look = (words) => [...document.querySelectorAll(words[0])].some(
    (one) => one.textContent.includes(words[1]) === (words[2] ?? true));
  const [pressed] = document.querySelectorAll(press);
  if (!pressed || pressed.disabled) throw new Error(`${press} cannot be pressed`);
  const start = performance.now();
  const end = (act) => {
    watch.disconnect();
    clearTimeout(timer);
    act();
  };
  const watch = new MutationObserver(() => {
    if (look(seen)) end(() => requestAnimationFrame(() => done(performance.now() - start)));
  });
  const late = `${press} was pressed, and after ${limit} ms ${JSON.stringify(seen)} does not hold`;
  const timer = setTimeout(() => end(() => failed(new Error(late))), limit);
  const panel = document.querySelector('.ortlab-panel');
  watch.observe(panel, {subtree: true, childList: true, characterData: true});
  pressed.click();
})"""
"""Presses an element and resolves with the ms until one of others has, or no longer has, certain words."""


SIGNED = """\
([press, limit]) => new Promise((done, failed) => {
  const panel = document.querySelector('.ortlab-panel');
  const start = performance.now();
  const end = (act) => {
    watch.disconnect();
    clearTimeout(timer);
    act();
  };
  const watch = new MutationObserver(() => {
    if (!panel.classList.contains('ortlab-waits')) return;
    end(() => requestAnimationFrame(() => done(performance.now() - start)));
  });
  const late = `${press} was pressed, and after ${limit} ms the panel does not say that it waits`;
  const timer = setTimeout(() => end(() => failed(new Error(late))), limit);
  watch.observe(panel, {attributes: true, attributeFilter: ['class']});
  document.querySelector(press).click();
})"""
"""Presses an element and resolves with the ms until the panel says that it waits for the kernel."""


PAINTED = """\
() => {
  const head = (panel) => panel.querySelector('.ortlab-badge') && !panel.dataset.seen;
  const panels = () => [...document.querySelectorAll('.ortlab-panel')];
  for (const panel of panels()) panel.dataset.seen = 'yes';
  const start = performance.now();
  window.painted = new Promise((done) => {
    const watch = new MutationObserver(() => {
      if (!panels().some(head)) return;
      watch.disconnect();
      requestAnimationFrame(() => done(performance.now() - start));
    });
    watch.observe(document.body, {subtree: true, childList: true});
  });
}"""
"""Begins to wait for a panel that is not there yet; `painted` resolves with the ms until its head is drawn."""


def main() -> None:
    """Measure, print and write."""
    read = arguments(__doc__, rounds=20)
    report = Report("panel", read)
    sys.path.append(str(REPOSITORY / "tests" / "browser"))
    from playwright.sync_api import sync_playwright
    from server import CHROMIUM_FLAGS, chromium_executable, started

    with (
        tempfile.TemporaryDirectory() as home,
        started(Path(home)) as server,
        sync_playwright() as playwright,
    ):
        server.keep_widgets()
        executable = chromium_executable()
        browser = playwright.chromium.launch(executable_path=executable, args=list(CHROMIUM_FLAGS))
        page = browser.new_page(viewport={"width": 1280, "height": 2400})
        page.set_default_timeout(120_000)
        errors = _complaints(page)
        cells = [*CELLS, MANY.format(runs=RUNS, plans=PLANS), ANOTHER]
        file = server.folder / "bench.ipynb"
        file.write_text(json.dumps(_notebook(cells)), encoding="utf-8")
        page.goto(server.address(file.name))
        page.get_by_text("| Idle").first.wait_for()
        _run(page, 0)
        _open(page, "Switches")
        page.locator(".ortlab-panel[role=region] .ortlab-switch").first.wait_for()
        _run(page, 1)
        page.locator(".ortlab-runs .ortlab-records tbody tr").first.wait_for(state="attached")

        signs = _signs(page, read.rounds)
        clicks = _clicks(page, read.rounds)
        before = _weight(_saved(page, file))
        _open(page, "Memory")
        page.get_by_role("button", name="Memory plan").click()
        page.locator(".ortlab-plans tbody tr").first.wait_for()
        _run(page, 2)
        page.get_by_text(f"of {PLANS:,} plans").wait_for()
        large = {name: _acts(page, *acts, read.rounds) for name, acts in _LARGE.items()}
        _open(page, "Switches")
        after = _weight(_saved(page, file))
        crowded = _clicks(page, read.rounds)
        heights = _heights(page)
        paints = [_paint(page, len(cells) - 1) for _ in range(read.rounds)]
        browser.close()

    report.table(
        "Click on a switch to what the panel shows",
        [
            _row("that it waits, 1 run", signs),
            _row("what is redone, 1 run", clicks),
            _row(f"what is redone, {RUNS} runs", crowded),
        ],
    )
    report.table(
        "Bytes of the panel in the notebook as JupyterLab saves it, state of the widgets included",
        [{"panel": "1 run", "bytes": before}, {"panel": f"{RUNS} runs, {PLANS} plans", "bytes": after}],
    )
    report.table(f"{RUNS} runs and {PLANS} plans", [_row(name, times) for name, times in large.items()])
    report.table(f"Another panel, with {RUNS} runs and {PLANS} plans", [_row("first paint", paints)])
    report.table(
        f"Height with {RUNS} runs and {PLANS} plans",
        [{"tab": name, "height [px]": pixels} for name, pixels in heights.items()],
    )
    for what, value, limit in (
        ("click on a switch to a visible response, 95th percentile [ms]", _high(signs), 100.0),
        ("to the kernel's words, 95th percentile [ms]", _high(clicks), 150.0),
        ("the same with a thousand runs [ms]", _high(crowded), 150.0),
        ("first paint of another panel, median [ms]", statistics.median(paints), None),
        ("height of the highest tab [px]", max(heights.values()), HEIGHT),
        ("errors on the browser's console", len(errors), 0),
        ("bytes added to a saved notebook", max(before, after), 100_000),
        ("slowest act in the large tables, median [ms]", max(map(statistics.median, large.values())), None),
    ):
        report.claim(what, value, at_most=limit)
    report.write()


_BOX = ".ortlab-switch input[type=checkbox]"

_LARGE = {
    # Forth and back, since there is a last page.
    "turn the runs": (
        (".ortlab-runs [data-at=later]", ".ortlab-runs [data-at=earlier]"),
        (".ortlab-runs tbody th", "#"),
    ),
    "sort the plans": ((".ortlab-plans [data-at='sort saves']",), (".ortlab-plans tbody th", "Gelu")),
    "turn the plans": (
        (".ortlab-plans [data-at=later]", ".ortlab-plans [data-at=earlier]"),
        (".ortlab-plans tbody th", "Gelu"),
    ),
    "tick a run": ((".ortlab-runs input[type=checkbox]",), (".ortlab-runs tbody th", "#")),
}
"""What is done in the large tables: the elements that are pressed in turn, and what is drawn then."""


def _clicks(page: Page, rounds: int) -> list[float]:
    """Switch an option off and on again; both directions count, and each press is waited for to its end."""
    times = []
    for press in range(2 * rounds):
        seen = (".ortlab-state", "rebuild pending", press % 2 == 0)
        times.append(page.evaluate(TIMED, [_BOX, seen, WAIT_MS]))
        _rest(page)
    return times


def _signs(page: Page, rounds: int) -> list[float]:
    """Press the same box until the panel says that it waits; each press is waited for to its end."""
    times = []
    for _ in range(2 * rounds):
        times.append(page.evaluate(SIGNED, [_BOX, WAIT_MS]))
        _rest(page)
    return times


def _open(page: Page, tab: str) -> None:
    """Open a tab, once what answers a press is there."""
    page.locator(".ortlab-panel[role=region]").get_by_role("tab", name=tab).click()
    _rest(page)


def _complaints(page: Page) -> list[str]:
    """Return a list that gets every error of a page's console from now on."""
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    return errors


def _heights(page: Page) -> dict[str, float]:
    """Open every tab, and return the height of the panel with each, in pixels."""
    found = {}
    for name in TABS:
        _open(page, name)
        found[name] = page.locator(".ortlab-panel").first.evaluate(
            "one => one.getBoundingClientRect().height"
        )
    return found


def _paint(page: Page, cell: int) -> float:
    """Run the cell that shows another panel, and return the ms to its first paint."""
    page.locator(".jp-Notebook .jp-CodeCell .jp-InputArea-editor").nth(cell).click()
    page.evaluate(PAINTED)
    page.keyboard.press("Control+Enter")
    taken = page.evaluate("painted")
    page.keyboard.press("Escape")
    _rest(page)
    return float(taken)


def _rest(page: Page) -> None:
    page.locator(".ortlab-panel:not(.ortlab-waits)").first.wait_for(timeout=WAIT_MS)


def _weight(notebook: dict[str, Any]) -> int:
    """Count what the panel's cell and the widgets' state take, as JSON."""
    return len(json.dumps(notebook["cells"][0]["outputs"])) + len(json.dumps(notebook["metadata"]["widgets"]))


def _acts(page: Page, presses: tuple[str, ...], seen: tuple[str, ...], rounds: int) -> list[float]:
    times = []
    for number in range(rounds):
        times.append(page.evaluate(TIMED, [presses[number % len(presses)], seen, WAIT_MS]))
        _rest(page)
        page.wait_for_timeout(100)
    return times


def _row(name: str, times: list[float]) -> dict[str, object]:
    return {
        "what": name,
        "median [ms]": statistics.median(times),
        "95th percentile [ms]": _high(times),
        "longest [ms]": max(times),
    }


def _high(times: list[float]) -> float:
    return sorted(times)[round(0.95 * (len(times) - 1))]


def _run(page: Page, number: int) -> None:
    cell = page.locator(".jp-Notebook .jp-CodeCell").nth(number)
    cell.locator(".jp-InputArea-editor").click()
    page.keyboard.press("Control+Enter")
    page.keyboard.press("Escape")
    page.wait_for_function(
        "n => /[0-9]/.test(document.querySelectorAll('.jp-CodeCell .jp-InputArea-prompt')[n].textContent)",
        arg=number,
    )


def _saved(page: Page, file: Path) -> dict[str, Any]:
    """Save the notebook and read it."""
    stamp = file.stat().st_mtime_ns
    page.keyboard.press("Control+s")
    for _ in range(100):
        page.wait_for_timeout(100)
        if file.stat().st_mtime_ns != stamp:
            break
    page.wait_for_timeout(500)
    return json.loads(file.read_text(encoding="utf-8"))


def _notebook(cells: list[str]) -> dict[str, object]:
    made = [
        {
            "cell_type": "code",
            "id": f"c{n}",
            "metadata": {},
            "source": cell,
            "outputs": [],
            "execution_count": None,
        }
        for n, cell in enumerate(cells)
    ]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return {"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


if __name__ == "__main__":
    main()
