"""Records and labs in a real kernel without the extension: what a notebook holds after its cells have run."""

from __future__ import annotations

from pathlib import Path

import pytest
from kernel import executed

VIEW = "application/vnd.jupyter.widget-view+json"

WRAP = """\
import torch
import ortlab
torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
x = torch.randn(5, 8)
lab = ortlab.wrap(model)"""

STEP = "lab.step(lambda: model(x).square().mean().backward(), n=4)"


def run(folder: Path, *cells: str) -> list[list[dict]]:
    return [cell.outputs for cell in executed(folder, *cells).cells]


def forms(outputs: list[dict]) -> list[set[str]]:
    return [set(one.data) for one in outputs if one.output_type in {"display_data", "execute_result"}]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Outputs of a session in Python, by source of the cell."""
    cells = [
        WRAP + "\nlab",
        "lab",
        STEP,
        "lab.activations()",
        "lab.set(memory_level=1)",
        "lab.restore()",
        "lab.rerun()",
        "lab.compare()",
        "[lab.runs[0]]",
        "print(lab.runs[0])",
    ]
    found = run(tmp_path_factory.mktemp("kernel"), *cells)
    return dict(zip(["wrap", *cells[1:]], found, strict=True))


def test_a_lab_as_the_last_line_is_its_panel_and_a_saved_form(plain):
    for cell in ("wrap", "lab"):
        assert forms(plain[cell]) == [{VIEW, "text/html"}, {"text/plain", "text/html"}]
        assert "model: Sequential" in plain[cell][1].data["text/plain"]


def test_a_record_is_text_and_html_and_a_widget_where_it_has_one(plain):
    for cell in (STEP, "lab.rerun()", "lab.compare()"):
        assert forms(plain[cell]) == [{"text/plain", "text/html"}]
    assert forms(plain["lab.activations()"]) == [{"text/plain", "text/html", VIEW}]
    assert plain[STEP][0].data["text/plain"].startswith("Run #1 ort\n")
    assert plain["print(lab.runs[0])"][0].text.startswith("Run #1 ort\n")
    (listed,) = plain["[lab.runs[0]]"]
    assert set(listed.data) == {"text/plain"}
    assert listed.data["text/plain"].startswith("[Run(#1 ort: 4 steps, ")


def test_a_lab_that_a_call_returns_is_one_line(plain):
    for cell in ("lab.set(memory_level=1)", "lab.restore()"):
        (line,) = plain[cell]
        assert set(line.data) == {"text/plain"}
        assert line.data["text/plain"].startswith("Lab(model: Sequential, engine='ort'")


def test_wrap_shows_the_panel_once(tmp_path):
    wrap = WRAP.replace("lab = ortlab.wrap(model)", "")
    wrap, alone, assigned, again, without = run(
        tmp_path,
        wrap + "\n%load_ext ortlab",
        "%ort_wrap model --no-panel\n%ort_unwrap\n%ort_wrap model",
        "%ort_unwrap\nlab = %ort_wrap model",
        "%ort_set memory_level=1",
        "%ort_unwrap\n%ort_wrap model --no-panel",
    )
    panel = [{VIEW, "text/html"}, {"text/plain", "text/html"}]
    assert forms(wrap) == []
    assert forms(alone) == [*panel, {"text/plain"}]
    assert alone[-1].data["text/plain"].startswith("Lab(model: Sequential")
    assert forms(assigned) == panel
    assert forms(again) == forms(without) == [{"text/plain"}]
