"""A sweep where users meet it: its table and figure in JupyterLab, on a transformer, and what an interrupt leaves."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest

from .conftest import CELLS_SECONDS

pytestmark = pytest.mark.browser

BERT = """\
%load_ext ortlab
import torch
from transformers import BertConfig, BertForMaskedLM

torch.manual_seed(3)
config = BertConfig(
    hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512, vocab_size=2000
)
model = BertForMaskedLM(config)
optimizer = torch.optim.AdamW(model.parameters())
tokens = torch.randint(0, 2000, (4, 64))
lab = %ort_wrap --no-panel model"""

STEP = """\
%%ort_step -n 5
loss = model(input_ids=tokens, labels=tokens).loss
loss.backward(); optimizer.step(); optimizer.zero_grad()"""

SWEEP = "%ort_sweep memory_level=0,1 memory_plan=[],['Gelu+:1:-1'] engine=ort,eager --rounds 2"


@pytest.fixture
def screenshots(tmp_path) -> Path:
    """Where pictures go: $ORTLAB_SCREENSHOTS to keep them, else a folder that pytest removes."""
    folder = Path(os.environ.get("ORTLAB_SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.mark.slow
def test_a_sweep_is_a_table_and_a_figure(open_notebook, jupyter, screenshots):
    cells = [nbformat.v4.new_code_cell(cell) for cell in (BERT, STEP, SWEEP, "lab.runs")]
    document = nbformat.v4.new_notebook(cells=cells)
    document.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(document, jupyter.folder / "sweep.ipynb")
    page = open_notebook("sweep.ipynb", theme="dark", height=3000)
    page.keyboard.press("Control+b")
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_text("Run All Cells", exact=True).click()
    page.get_by_text("Sweep 1: lab.sweeps[0] shows its points.").first.wait_for(timeout=1000 * CELLS_SECONDS)

    sweep = page.locator(".jp-OutputArea-output", has_text="Sweep 1 of model: 8 points").first
    rows = sweep.locator("table").first.locator("tbody tr")
    assert rows.count() == 4
    assert "baseline" in sweep.inner_text()
    assert sweep.locator("img[src^='data:image/svg']").count() == 1
    by_memory = sweep.get_by_text("By step memory")
    assert not sweep.locator("details table").first.is_visible()
    by_memory.click()
    assert sweep.locator("details table").first.is_visible()
    by_memory.click()
    sweep.screenshot(path=screenshots / "sweep.png")
    page.locator(".jp-OutputArea-output", has_text="Runs").last.screenshot(path=screenshots / "runs.png")
