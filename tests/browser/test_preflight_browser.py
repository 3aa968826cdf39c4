"""A pre-flight where users meet it: one screen in JupyterLab, for a model with a branch on data in one layer."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest

from .conftest import CELLS_SECONDS

pytestmark = pytest.mark.browser

MODEL = """\
%load_ext ortlab
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM

class Rescaled(nn.Module):
    def forward(self, x):
        if x.abs().max() > 100:
            x = x / 10
        return nn.functional.elu(x)

torch.manual_seed(3)
config = BertConfig(
    hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=128, vocab_size=500
)
model = BertForMaskedLM(config)
model.bert.encoder.layer[2].intermediate.intermediate_act_fn = Rescaled()
tokens = torch.randint(0, 500, (4, 32))
batch = {"input_ids": tokens, "labels": tokens}"""

PREFLIGHT = "report = %ort_preflight model batch\nreport"


@pytest.mark.slow
def test_a_preflight_is_one_screen(open_notebook, jupyter, tmp_path):
    folder = Path(os.environ.get("ORTLAB_SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    cells = [nbformat.v4.new_code_cell(cell) for cell in (MODEL, PREFLIGHT)]
    document = nbformat.v4.new_notebook(cells=cells)
    document.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(document, jupyter.folder / "preflight.ipynb")
    page = open_notebook("preflight.ipynb", height=2000)
    page.keyboard.press("Control+b")
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_text("Run All Cells", exact=True).click()
    page.get_by_text("No step was run").first.wait_for(timeout=1000 * CELLS_SECONDS)
    output = page.locator(".jp-OutputArea-output", has_text="Pre-flight of model").first
    output.screenshot(path=folder / "preflight.png")
    shown = output.inner_text()
    assert "bert.encoder.layer.2.intermediate.intermediate_act_fn (Rescaled)" in shown
    assert "Cell In[1]:8" in shown
    assert "bert.encoder.layer.{0-1, 3}" in shown
    assert output.bounding_box()["height"] <= 1000
