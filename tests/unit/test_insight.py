"""What ORT's memory report says is added up in full, and the same in every process."""

from __future__ import annotations

import pytest
import torch

from ortlab.memory import formulas
from ortlab.memory.insight import read
from ortlab.memory.plan_reading import read_plan

REPORT = """
|Freq   | Memory Optimization Opportunities (Clustered by node-level activation patterns)   |
|2      |For each row options are mutually exclusive, only one of them can be enabled.      |
|       |>>Option 1     : Recompute subgraph LayerNormalization+                            |
|       |  Stashed Activations:                                                             |
|       |   - ReuseFreq :  Output 0(2),                                                     |
|       |   - Output 1  : [((batch)*(1))], byte/elem: 4, 100% saved                         |
|       |   - Output 0  : [((batch)*(32))], byte/elem: 4, 100% saved                        |
|1      |For each row options are mutually exclusive, only one of them can be enabled.      |
|       |>>Option 1     : Recompute subgraph LayerNormalization+                            |
|       |   - Output 0  : [((batch)*(32))], byte/elem: 4, 100% saved                        |
|       |   - Output 1  : [((batch)*(1))], byte/elem: 4, 100% saved                         |
|       |>>Option 2     : RecomputeWithCompromise subgraph Cast+                            |
|       |   - Output 0  : [((batch)*(8))], byte/elem: 4, 50% saved                          |
"""


def test_every_output_of_every_place_is_counted():
    found = read(REPORT).savings()
    assert {config: places for config, (_, places) in found.items()} == {
        "LayerNormalization+:1:-1": 3,
        "Cast+:2:-1": 1,
    }
    assert formulas.read(found["LayerNormalization+:1:-1"][0]).value({"batch": 5}) == 3 * (32 + 1) * 4 * 5
    assert formulas.read(found["Cast+:2:-1"][0]).value({"batch": 5}) == 8 * 4 * 5 / 2


@pytest.mark.parametrize("report", ["", "MemoryInsight Summary", REPORT.replace("subgraph", "nodes")])
def test_a_text_of_another_form_leaves_the_plain_sums(report):
    assert read(report).savings() == {}
    assert read_plan({"Gelu+:1:-1": ("batch*4", 1)}, {"batch": 5}, report).rows[0].saving_bytes == 20


def test_other_numbers_of_places_leave_the_plain_sums():
    plain = {"LayerNormalization+:1:-1": ("batch*4", 2)}
    assert read_plan(plain, {"batch": 5}, REPORT).rows[0].saving_bytes == 20


def test_layer_normalisations_save_all_three_outputs(wrap):
    torch.manual_seed(0)
    parts = [torch.nn.Sequential(torch.nn.LayerNorm(32), torch.nn.Linear(32, 32)) for _ in range(4)]
    lab = wrap(torch.nn.Sequential(torch.nn.Linear(32, 32), *parts))
    lab.module(torch.randn(7, 32)).sum().backward()
    rows = {row.cluster: row for row in lab.plan().rows}
    # The normalised tensor, the mean and the inverse deviation; float32.
    assert rows["LayerNormalization+"].saving_bytes == 4 * (32 + 1 + 1) * 4 * 7
