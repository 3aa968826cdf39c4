"""A folder `triton_debug` with three sub-graphs of a BERT."""

from __future__ import annotations

import pytest
import torch
import triton_files
from transformers import BertConfig, BertForMaskedLM

import ortlab

LAYER = "/_original_module/bert/encoder/layer.0"
FUSED = (
    (f"{LAYER}/attention/self/Softmax", f"{LAYER}/attention/self/Dropout"),
    (f"{LAYER}/intermediate/dense/Add", "Gelu"),
    (f"{LAYER}/output/dense/Add", f"{LAYER}/output/dropout/Dropout", f"{LAYER}/output/Add"),
)


@pytest.fixture(scope="module")
def bert():
    """Wrap a BERT of one layer, after one backward on two sequences of eight tokens."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "num_hidden_layers": 1}
    config = BertConfig(vocab_size=40, max_position_embeddings=16, attn_implementation="eager", **sizes)
    model = BertForMaskedLM(config)
    lab = ortlab.wrap(model)
    words = torch.randint(0, 40, (2, 8))
    model(input_ids=words, labels=words).loss.backward()
    yield lab
    lab.unwrap()


@pytest.fixture
def fused(bert, tmp_path, monkeypatch):
    """Let ORT write the files of three sub-graphs of the BERT, and return their keys."""
    monkeypatch.chdir(tmp_path)
    graph = bert.graph("gradient").model
    symbols = bert.activations().symbols
    return [triton_files.write(triton_files.cut(graph, names), symbols, monkeypatch) for names in FUSED]
