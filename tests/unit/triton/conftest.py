"""A folder `triton_debug` with three sub-graphs of a BERT."""

from __future__ import annotations

import pytest
import small_transformers
import torch
import triton_files

import ortlab

LAYER = "/_original_module/bert/encoder/layer.0"
FUSED = (
    (f"{LAYER}/attention/self/Softmax", f"{LAYER}/attention/self/Dropout"),
    (f"{LAYER}/intermediate/dense/Add", f"{LAYER}/intermediate/intermediate_act_fn/Gelu"),
    (f"{LAYER}/output/dense/Add", f"{LAYER}/output/dropout/Dropout", f"{LAYER}/output/Add"),
)


@pytest.fixture(scope="module")
def bert():
    """Wrap a BERT of one layer, after one backward on two sequences of eight tokens."""
    torch.manual_seed(0)
    sizes = {"layers": 1, "width": 16, "words": 40, "max_position_embeddings": 16}
    model = small_transformers.bert(**sizes, drop=0.1, attn_implementation="eager")
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
