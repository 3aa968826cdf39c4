"""The first five minutes, on a small BERT: wrap, step, plan, rerun with a plan and eagerly, compare, graph."""

from __future__ import annotations

import pytest

SETUP = """
import torch
from transformers import BertConfig, BertForMaskedLM, set_seed

set_seed(1)
config = BertConfig(
    vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
    max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)
model = BertForMaskedLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
tokens = torch.randint(0, 50, (4, 12))
batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
"""

STEP = """%%ort_step -n 5
loss = model(**batch).loss
loss.backward(); optimizer.step(); optimizer.zero_grad()
"""


@pytest.mark.slow
def test_the_first_five_minutes(shell, tmp_path):
    shell.run(SETUP)
    shell.run("lab = %ort_wrap model --no-panel")
    lab, model = shell.user_ns["lab"], shell.user_ns["model"]
    names = list(model.state_dict())

    first = shell.run(STEP)
    assert first.executed_by == "ort"
    assert first.losses[-1] < first.losses[0]

    plan = shell.run("%ort_plan")
    assert plan.rows
    assert all(row.saving_bytes is None or row.saving_bytes > 0 for row in plan.rows)

    shell.user_ns["chosen"] = plan.rows[0].config
    shell.run("%ort_set memory_plan=$chosen")
    second = shell.run("%ort_rerun")
    assert shell.run("%ort_plan").enabled == (plan.rows[0].config,)
    third = shell.run("%ort_rerun engine=eager")
    assert third.executed_by == "eager"

    comparison = shell.run("%ort_compare --baseline 3")
    assert [contrast.run.number for contrast in comparison.contrasts] == [1, 2]
    for contrast in comparison.contrasts:
        assert contrast.remarks == ()
        assert contrast.loss_difference < 1e-5
    assert second.start_digest == first.start_digest == third.start_digest

    shell.user_ns["target"] = tmp_path / "optimized.onnx"
    graph = shell.run("graph = %ort_graph optimized --save $target\ngraph")
    assert graph.stage == "optimized"
    assert graph.node_count == sum(graph.operators.values())
    for record in (first, plan, comparison, graph, lab.runs):
        forms = shell.formats(record)
        assert forms["text/plain"]
        assert forms["text/html"].startswith("<style>")

    assert shell.run("%ort_unwrap") is model
    assert list(model.state_dict()) == names
    assert type(model).__name__ == "BertForMaskedLM"
