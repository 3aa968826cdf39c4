"""Padding and ignored labels are counted on the real inputs, step by step, for every engine, and no graph changes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forked import python
from small_transformers import bert, gpt2
from torch import nn

import ortlab
from ortlab.records.density import Density
from ortlab.records.memory_phases import PHASES
from ortlab.records.runs import Run
from ortlab.render import text
from ortlab.render.run_pages import run_page
from ortlab.runs.padded_inputs import DensityProbe, PaddedInput

LOGS = Path(__file__).with_name("logs")


class Tagger(nn.Module):
    """An embedding with padding, dropout, batch normalisation, and a loss inside."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8, padding_idx=3)
        self.dropout = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 20)
        self.loss = nn.CrossEntropyLoss(ignore_index=-1)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        hidden = self.dropout(self.embedding(batch["tokens"]))
        logits = self.head(self.norm(hidden.flatten(0, 1)))
        return self.loss(logits, batch["targets"].flatten())


@pytest.fixture
def tagger():
    torch.manual_seed(2)
    return Tagger()


@pytest.fixture
def batch():
    tokens = torch.full((4, 6), 5)
    tokens[0, 2:] = 3
    tokens[1, 5:] = 3
    targets = torch.full((4, 6), -1)
    targets[:, :2] = 7
    return {"tokens": tokens, "targets": targets}


def golden(name):
    """Read a density table of the release that still printed it."""
    for line in (LOGS / f"density_{name}.txt").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        if cells[0].isdigit():
            per_sample = [] if cells[7] == "N/A" else [int(size) for size in re.findall(r"\d+", cells[7])]
            yield cells[1], cells[2], int(cells[3]), cells[4], int(cells[5]), int(cells[6]), per_sample


@pytest.mark.row("T14")
@pytest.mark.parametrize("name", ["glue", "mlm"])
def test_the_tables_of_the_reference_come_out_of_their_token_counts(name):
    lines = list(golden(name))
    assert len(lines) == 10
    for kind, column, pad, density, valid, total, per_sample in lines:
        values = torch.full((len(per_sample) or 1, total // (len(per_sample) or 1)), pad)
        for sample, count in enumerate(per_sample or [valid]):
            values[sample, :count] = pad + 5
        row = PaddedInput(column, kind, pad).count(1, values)
        assert (row.valid, row.total, list(row.valid_per_sample)) == (valid, total, per_sample)
        assert f"{100 * row.density:.2f} %" == density


def test_inputs_in_containers_are_found_and_counted(tagger, batch):
    probe = DensityProbe(tagger, tagger.forward)
    probe.count(1, (batch,), {})
    rows = {row.name: row for row in probe.read().rows}
    tokens, targets = rows["batch.tokens"], rows["batch.targets"]
    assert (tokens.kind, tokens.pad_index, tokens.valid, tokens.total) == ("EMBED", 3, 2 + 5 + 6 + 6, 24)
    assert tokens.valid_per_sample == (2, 5, 6, 6)
    assert (targets.kind, targets.pad_index, targets.valid, targets.total) == ("LABEL", -1, 8, 24)


def test_the_search_changes_neither_buffers_nor_random_state(tagger, batch):
    before = {name: value.clone() for name, value in tagger.state_dict().items()}
    random = torch.get_rng_state()
    DensityProbe(tagger, tagger.forward).count(1, (batch,), {})
    assert torch.equal(torch.get_rng_state(), random)
    for name, value in tagger.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("shifting", [False, True])
def test_models_of_transformers_are_understood(shifting):
    torch.manual_seed(2)
    model = (gpt2 if shifting else bert)(layers=1, width=16, words=60, drop=0.1)
    ids = torch.randint(1, 60, (2, 8))
    ids[0, 4:] = 0
    labels = torch.where(torch.arange(8) < 2, ids, -100)
    probe = DensityProbe(model, model.forward)
    probe.count(1, (), {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels})
    found = [(row.kind, row.name, row.valid) for row in probe.read().rows]
    # GPT-2's embedding has no padding index, so that there is nothing to say about its tokens.
    assert found == ([] if shifting else [("EMBED", "input_ids", 12)]) + [("LABEL", "labels", 4)]


@pytest.mark.row("T14")
@pytest.mark.parametrize("engine", ["ort", "eager"])
def test_a_run_counts_each_of_its_steps(tagger, batch, engine, wrap):
    lab = wrap(tagger, engine=engine, print_input_density=True)
    counts = iter([1, 2, 3])

    def step():
        batch["targets"][:, : next(counts)] = 7
        loss = tagger(batch)
        loss.backward()
        return loss

    batch["targets"].fill_(-1)
    run = lab.step(step, n=3)
    table = run.density.table()
    labels = table[table["INPUT TYPE"] == "LABEL"]
    assert list(labels["VALID TOKENS"]) == [4, 8, 12]
    assert list(labels["STEP"]) == [1, 2, 3]
    assert list(table.columns) == [
        "STEP", "INPUT TYPE", "INPUT NAME", "PAD IDX", "DENSITY", "VALID TOKENS", "TOTAL TOKENS", "VALID TOKENS/BATCH",
    ]  # fmt: skip
    shown = text.render(run_page(run))
    assert "batch.targets" in shown
    assert "33.3 %" in shown  # 24 of 72
    assert Run.from_dict(json.loads(json.dumps(run.to_dict()))) == run


def test_counting_changes_no_graph_and_no_number(tagger, batch, wrap):
    lab = wrap(tagger)

    def step():
        loss = tagger(batch)
        loss.backward()
        return loss

    plain = lab.step(step, n=2)
    counted = lab.set(print_input_density=True, print_memory_stats=True).rerun()
    assert not plain.density
    assert not plain.phases
    assert counted.density
    assert counted.initialization is None  # nothing was built again
    assert counted.losses == plain.losses
    assert counted.graph_digests == plain.graph_digests
    assert counted.data_digest == plain.data_digest


def test_an_old_record_without_densities_is_read(tagger, batch):
    lab = ortlab.wrap(tagger, engine="eager")
    record = lab.step(lambda: tagger(batch).backward()).to_dict()
    lab.unwrap()
    del record["density"], record["phases"]
    assert Run.from_dict(record).density == Density()


@pytest.mark.row("E5", "T15")
@pytest.mark.parametrize("engine", ["ort", "eager"])
def test_memory_is_read_at_the_points_of_a_step(tagger, batch, engine, wrap):
    lab = wrap(tagger, engine=engine, print_memory_stats=True)
    run = lab.step(lambda: tagger(batch).backward(), n=18)
    assert [phase.step for phase in run.phases[::4]] == [*range(1, 11), 17]
    assert [phase.phase for phase in run.phases] == list(PHASES) * 11
    for phase in run.phases:
        assert 0 < phase.sizes["resident"] <= phase.sizes["max resident"]
    shown = text.render(run_page(run))
    assert "post backward" in shown
    assert "max resident, later" in shown


@pytest.mark.row("E5")
def test_memory_kept_for_backward_shows_after_forward(wrap):
    """Sixty-four MiB that only the backward pass frees."""

    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.weight).exp().sum()

    model, x = Square(), torch.zeros(2**24)
    lab = wrap(model, engine="eager", print_memory_stats=True)
    run = lab.step(lambda: model(x).backward())
    sizes = {phase.phase: phase.sizes["resident"] for phase in run.phases}
    assert sizes["post_forward"] - sizes["pre_forward"] > 60 * 2**20


RAW = """
from fault_cases import unrepaired
ortmodule = unrepaired()
import torch
from torch import nn

class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 5)
        self.loss = nn.CrossEntropyLoss()
    def forward(self, x, y):
        return self.loss(self.head(x), y)

y = torch.tensor([1, -100, -100, -100])
ortmodule.ORTModule(Loss())(torch.randn(4, 4), y).backward()
"""


@pytest.mark.row("T14", "T15")
def test_as_released_there_is_no_table_of_densities_and_no_memory_on_the_cpu():
    folder = Path(__file__).with_name("engine")
    finished = subprocess.run(
        python("-W", "ignore", "-c", RAW),
        check=True,
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "ORTMODULE_FALLBACK_POLICY": "FALLBACK_DISABLE",
            "ORTMODULE_PRINT_INPUT_DENSITY": "1",
            "ORTMODULE_PRINT_MEMORY_STATS": "1",
            "ORTMODULE_LOG_LEVEL": "INFO",
        },
    )
    said = finished.stdout + finished.stderr
    assert "label tensor density:  25.0" in said
    assert "VALID TOKENS" not in said
    assert "pre_forward" not in said


class Labelled(nn.Module):
    """A loss of its own, behind layers that label sparsity moves its gather ahead of."""

    def __init__(self, ignored: int = -100) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64))
        self.head = nn.Linear(64, 50)
        self.loss = nn.CrossEntropyLoss(ignore_index=ignored)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.loss(self.head(self.layers(self.embedding(tokens))).view(-1, 50), labels.view(-1))


@pytest.mark.row("T16")
@pytest.mark.parametrize("ignored", [-100, 7])
def test_savings_of_plans_count_the_labels_that_label_sparsity_leaves(ignored, capfd):
    torch.manual_seed(2)
    tokens = torch.randint(8, 50, (4, 8))
    labels = torch.where(torch.arange(8) < 3, tokens, ignored)
    lab = ortlab.wrap(Labelled(ignored))
    lab.step(lambda: lab.module(tokens, labels).backward())
    rows = [row for row in lab.plan().rows if "valid_indices_count" in row.saving_symbolic]
    lab.unwrap()
    assert rows
    # One hidden tensor of 64 float32 for each of the 4 x 3 labels.
    assert [row.saving_bytes for row in rows] == [12 * 64 * 4]
    assert not capfd.readouterr().out  # 1.19.2 prints a density for each forward of an export
