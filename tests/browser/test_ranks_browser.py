"""Two ranks as a user sees them: a real cluster, its cells' output, and the ranks' table in JupyterLab in Chromium."""

from __future__ import annotations

import re

import pytest

from .test_panel_browser import notebook, screenshots, tab
from .test_panel_life_browser import run_cell

__all__ = ["notebook", "screenshots"]

pytestmark = pytest.mark.browser

NOTEBOOK_SECONDS = 600
"""How long a kernel and two ranks may take to start, to import torch and to run all cells."""

START = "%load_ext ortlab\ncluster = %ort_cluster -n 2 --threads 1\ncluster"

MODEL = """\
%%ort_ranks --here
import torch, torch.distributed as dist
from torch import nn
torch.manual_seed(3)
rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
model = nn.Sequential(nn.Embedding(100, 64, padding_idx=0), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 100))
tokens = torch.randint(1, 100, (8, 32))[rank::ranks].clone()
lab = %ort_wrap --no-panel model print_input_density=True"""

TRAIN = """\
%%ort_ranks
parallel = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
for factor in (1, 1 + 3 * rank):
    own = tokens.repeat(factor, 1)
    def step():
        loss = nn.functional.cross_entropy(parallel(own).flatten(0, 1), own.roll(1, 1).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss
    lab.step(step, n=4)
print(len(lab.runs), "runs")
lab.runs[-1]"""

RANKS = "ranks = %ort_ranks\nranks"

SHOW = "import ortlab\npanel = ortlab.panel(lab)\npanel"

ELSEWHERE = """\
import dataclasses, tempfile
folder = tempfile.TemporaryDirectory()
for one in ranks.ledgers:  # as if each had been a machine of a cluster
    dataclasses.replace(one, host=f"node-{one.rank + 1:02}.cluster.example.org").save(folder.name)
opened = %ort_ranks --from $folder.name
folder.cleanup()
opened"""

FAIL = """\
%%ort_ranks
if rank == 1:
    raise ValueError("one gives up")
dist.barrier()"""

STOP = "%ort_cluster stop"


def ranks_table(output):
    """Return the table of ranks in an output, or in the panel."""
    table = output.locator(".ortlab-ranks table")
    table.locator("tbody tr").first.wait_for(timeout=1000 * NOTEBOOK_SECONDS)
    return table


def column(table, name):
    """Return the texts of a column, from the top."""
    heads = [one.strip(" \n▲▼") for one in table.locator("thead th").all_inner_texts()]
    return table.locator(f"tbody tr > :nth-child({heads.index(name) + 1})").all_inner_texts()


def sort(table, name, words):
    """Press a heading, and wait until this stands in the first row."""
    table.get_by_role("button", name=name, exact=True).click()
    table.locator("tbody tr").first.get_by_text(words, exact=True).wait_for()


@pytest.mark.parametrize(("theme", "width"), [("dark", 1280), ("light", 700)])
def test_ranks_are_a_table_that_is_sorted(open_notebook, notebook, screenshots, theme, width):
    name = notebook(START, MODEL, TRAIN, RANKS, SHOW, ELSEWHERE, FAIL, STOP)
    page = open_notebook(name, theme=theme, width=width, height=5000)
    page.keyboard.press("Control+b")  # the file browser takes its room
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_text("Run All Cells", exact=True).click()
    cells = page.locator(".jp-Notebook .jp-CodeCell")

    shown = ranks_table(cells.nth(3))
    assert column(shown, "rank") == ["0", "1"]
    assert column(shown, "tokens") == ["512", "2,048"]
    for measured in ("step", "computing", "exchange"):
        assert all(re.fullmatch(r"[\d.,]+ (us|ms|s)", cell) for cell in column(shown, measured))
    assert all(re.fullmatch(r"[\d.,]+ [MG]iB", cell) for cell in column(shown, "peak memory"))
    sort(shown, "tokens", "2,048")
    assert column(shown, "rank") == ["1", "0"]
    cells.nth(3).locator(".ortlab-ranks select").select_option("run 1")
    shown.get_by_text("2,048", exact=True).wait_for(state="detached")
    assert column(shown, "tokens") == ["512", "512"]

    # A failed rank ends the run of all cells: what is said, and that the others came back.
    failed = cells.nth(6).locator(".jp-OutputArea-output")
    failed.get_by_text("Rank 1 failed").first.wait_for(timeout=1000 * NOTEBOOK_SECONDS)
    said = " ".join(failed.all_inner_texts())
    assert "ValueError: one gives up" in said
    assert "Where:" not in said  # the line stands in the rank's own traceback

    # The panel shows ledgers that were opened from files, with their machines.
    panel = cells.nth(4).locator(".ortlab-panel").first
    tab(panel, "Ranks")
    table = ranks_table(panel)
    assert column(table, "machine") == ["node-01: cpu", "node-02: cpu"]
    sort(table, "tokens", "2,048")
    assert column(table, "machine") == ["node-02: cpu", "node-01: cpu"]
    assert panel.evaluate("panel => panel.scrollWidth <= panel.clientWidth + 1")
    page.screenshot(path=screenshots / f"ranks-{theme}-{width}.png")

    stopped = run_cell(page, 7)
    stopped.get_by_text("Not running: 2 ranks.").first.wait_for()
