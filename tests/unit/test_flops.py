"""FLOPs are counted from the shapes that nodes ran with; what the compute optimiser moves, and saves, is found."""

from __future__ import annotations

import json

import pytest
import small_transformers
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import ortlab
from ortlab.errors import OptionError, StepError
from ortlab.graphs.flop_formulas import flops
from ortlab.graphs.flops import Flops, FlopSavings
from ortlab.render import html, text

BATCH, LENGTH, HIDDEN, INNER, LAYERS, WORDS = 4, 16, 32, 64, 2, 100
SIZES = {"words": WORDS, "max_position_embeddings": 40, "attn_implementation": "eager"}


def tokens():
    generator = torch.Generator().manual_seed(3)
    return torch.randint(5, WORDS, (BATCH, LENGTH), generator=generator)


def by_torch(step):
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()


@pytest.fixture(scope="module")
def bert():
    """A BERT of which a step has run, with a lab; its loss is a module, and two of three labels are ignored."""
    torch.manual_seed(0)
    model = small_transformers.bert(**SIZES)
    ids = tokens()
    labels = torch.where(torch.arange(LENGTH) % 4 == 0, ids, -100)
    ortlab.with_loss(model, ortlab.TokenLoss(), loss_only=True)
    lab = ortlab.wrap(model)

    def step():
        loss = model(input_ids=ids, labels=labels)["loss"]
        loss.backward()
        return loss

    lab.step(step)
    yield lab, step
    lab.unwrap()


@pytest.fixture(scope="module")
def plain(bert):
    lab, _ = bert
    saved = lab.flops(baseline={"label_sparse_optimizer": False})
    lab.set(label_sparse_optimizer=False)
    whole = lab.flops()
    lab.set(label_sparse_optimizer=True)
    return saved, whole


def test_the_total_of_bert_is_that_of_a_closed_formula(plain):
    _, whole = plain
    # 2 * weights * tokens for the matrices, 4 * batch * length^2 * hidden for each layer's attention, and twice that
    # back again; no gradient is needed of the tokens themselves, but the embeddings multiply nothing.
    weights = LAYERS * (4 * HIDDEN * HIDDEN + 2 * HIDDEN * INNER) + HIDDEN * HIDDEN + HIDDEN * WORDS
    forward = 2 * weights * BATCH * LENGTH + LAYERS * 4 * BATCH * LENGTH**2 * HIDDEN
    assert whole.forward == forward
    assert whole.backward == 2 * forward
    assert whole.total == 3 * forward
    assert not whole.uncounted


def test_torch_counts_the_same(bert, plain):
    lab, step = bert
    lab.set(engine="eager")
    try:
        counted = by_torch(step)
    finally:
        lab.set(engine="ort")
        lab.module.zero_grad()
    assert plain[1].total == counted


@pytest.mark.row("D7")
def test_label_sparsity_saves_the_share_of_the_head_that_is_ignored(plain):
    saved, whole = plain
    assert saved.without.total == whole.total
    # Forward and backward of the decoder, for each label that is ignored. ORT moves the gather no further: it does not
    # pass the LayerNormalization ahead of it.
    ignored = BATCH * LENGTH * 3 // 4
    assert saved.by_module() == {"cls.predictions.decoder": 3 * 2 * ignored * HIDDEN * WORDS}
    assert saved.saved == 3 * 2 * ignored * HIDDEN * WORDS
    assert any(node.operator.endswith("ShrunkenGather") for node in saved.moved)


@pytest.mark.row("D2", "D3")
def test_the_head_of_roberta_lets_the_last_layer_compute_one_token():
    torch.manual_seed(0)
    model = small_transformers.bert("ForSequenceClassification", family="Roberta", **SIZES, num_labels=3)
    ids, labels = tokens(), torch.arange(BATCH) % 3
    lab = ortlab.wrap(model)

    def step():
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        return loss

    lab.step(step)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    saved = lab.flops(baseline={"compute_optimizer": False})
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert lab.options.compute_optimizer
    lab.unwrap()
    # The output projection and both dense layers of the last layer are computed for one token of each sample.
    left_out = BATCH * (LENGTH - 1)
    assert saved.saved == 3 * 2 * left_out * (HIDDEN * HIDDEN + 2 * HIDDEN * INNER)
    last = "roberta.encoder.layer.1"
    assert saved.by_module() == {
        f"{last}.intermediate.dense": 3 * 2 * left_out * HIDDEN * INNER,
        f"{last}.output.dense": 3 * 2 * left_out * HIDDEN * INNER,
        f"{last}.attention.output.dense": 3 * 2 * left_out * HIDDEN * HIDDEN,
    }
    assert {node.module for node in saved.moved} == {"classifier"}
    assert f"{last}.attention.self" in {node.reads for node in saved.moved}
    assert {one.node.module for one in saved.passed} >= set(saved.by_module())
    assert saved.same.keys() <= {node.name for node in saved.without.nodes} | {"YieldOp"}
    assert not [
        one for one in saved.changes if one.without and one.having and one.without.module != one.having.module
    ]
    table = saved.table()
    assert table["saved"].sum() == saved.saved == saved.without.total - saved.having.total
    assert FlopSavings.from_dict(json.loads(json.dumps(saved.to_dict()))) == saved
    for shown in (text.render(saved), html.render(saved)):
        assert "roberta.encoder.layer.1.attention.self" in shown
        assert "classifier" in shown


@pytest.mark.row("D4")
def test_the_stated_gain_is_a_latency_and_not_a_speed():
    # "208ms ~ 199ms, 4.5+%" is the gain in speed; the latency falls by 4.3 %.
    assert round(100 * (208 / 199 - 1), 2) == 4.52
    assert round(100 * (1 - 199 / 208), 2) == 4.33


def test_a_record_is_read_again_and_shown(plain):
    _, whole = plain
    assert Flops.from_dict(json.loads(json.dumps(whole.to_dict()))) == whole
    assert sum(whole.by("module").values()) == sum(whole.by("operator").values()) == whole.total
    assert set(whole.by("layer")) == {"bert.encoder.layer.0", "bert.encoder.layer.1", ""}
    table = whole.table()
    assert table["FLOPs"].sum() == whole.total
    assert table["time [ms]"].min() >= 0
    for shown in (text.render(whole), html.render(whole)):
        assert "cls.predictions.decoder" in shown


def test_what_makes_no_sense_is_refused(bert, wrap):
    lab, _ = bert
    with pytest.raises(OptionError, match="set so already"):
        lab.flops(baseline={"compute_optimizer": True})
    with pytest.raises(OptionError, match="by 'colour'"):
        Flops(()).by("colour")
    fresh = wrap(nn.Linear(2, 2))
    with pytest.raises(StepError, match="no step"):
        fresh.flops()


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 8, 3, stride=2)  # torch forgets the groups of a backward
        self.wide = nn.ConvTranspose2d(8, 2, 2, stride=2)
        self.head = nn.Linear(2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.wide(self.second(self.first(x).relu())).mean((2, 3))).square().mean()


def test_a_part_that_alone_is_wrapped_is_counted_as_that_part_without_being_named():
    model, x = Pictures(), torch.randn(2, 3, 9, 9)
    lab = ortlab.wrap(model, only=["head"])
    lab.step(lambda: model(x).backward())
    counted = lab.flops()
    lab.unwrap()
    assert counted.part == "head"
    assert {node.module for node in counted.nodes if node.flops} == {"head"}


@pytest.mark.parametrize("kernels", [True, False])
def test_convolutions_count_as_torch_counts_them(kernels):
    torch.manual_seed(0)
    model, x = Pictures(), torch.randn(2, 3, 9, 9)
    lab = ortlab.wrap(model, aten_backward=kernels)
    lab.step(lambda: model(x).backward())
    counted = lab.flops()
    lab.unwrap()
    convolutions = {node.module for node in counted.nodes if node.flops and "onv" in node.operator}
    assert convolutions == {"first", "second", "wide"}
    assert not counted.uncounted
    assert counted.total == by_torch(lambda: model(x).backward())


@pytest.mark.parametrize(
    ("operator", "inputs", "outputs", "attributes", "expected"),
    [
        ("_grouped_mm", [(12, 16), (4, 16, 24), (4,)], [(12, 24)], {}, 2 * 12 * 16 * 24),
        ("_grouped_mm", [(16, 12), (12, 24), (4,)], [(4, 16, 24)], {}, 2 * 12 * 16 * 24),
        ("_grouped_mm", [(4, 12, 16), (16, 24), (4,)], [(12, 24)], {}, 2 * 12 * 16 * 24),
        (
            *("_grouped_mm_vjp", [(12, 24), (12, 16), (4, 16, 24), (4,)]),
            *([(12, 16), (4, 16, 24)], {}, 4 * 12 * 16 * 24),
        ),
        ("ortlab::grouped_linear", [(12, 16), (4, 24, 16), (4,)], [(12, 24)], {}, 2 * 12 * 16 * 24),
        (
            *("ortlab::grouped_linear_backward", [(12, 24), (12, 16), (4, 24, 16), (4,)]),
            *([(12, 16), (4, 24, 16)], {}, 4 * 12 * 16 * 24),
        ),
        ("MatMul", [(2, 3, 4), (4, 5)], [(2, 3, 5)], {}, 2 * 2 * 3 * 4 * 5),
        ("MatMul", [(4,), (4,)], [()], {}, 2 * 4),
        ("com.microsoft.FusedMatMul", [(2, 4, 3), (2, 4, 5)], [(2, 3, 5)], {"transA": 1}, 2 * 2 * 3 * 4 * 5),
        (
            "com.microsoft.FusedMatMul",
            [(3, 2, 4), (2, 4, 5)],
            [(2, 3, 5)],
            {"transBatchA": 1},
            2 * 2 * 3 * 4 * 5,
        ),
        ("Gemm", [(4, 3), (4, 5), (5,)], [(3, 5)], {"transA": 1}, 2 * 3 * 4 * 5),
        ("ortlab::matmul_of_rows", [(6, 3), (6, 5)], [(3, 5)], {}, 2 * 6 * 3 * 5),
        ("Einsum", [(2, 3, 4), (2, 4, 5)], [(2, 3, 5)], {"equation": b"bij,bjk->bik"}, 2 * 2 * 3 * 4 * 5),
        ("Einsum", [(2, 3)], [(3, 2)], {"equation": b"ij->ji"}, 0),
        ("Einsum", [(2, 3), (3, 4)], [(2, 4)], {"equation": b"...j,jk->...k"}, None),
        ("Conv", [(1, 4, 8, 8), (6, 2, 3, 3)], [(1, 6, 8, 8)], {"group": 2}, 2 * 6 * 64 * 2 * 9),
        (
            "com.microsoft.MultiHeadAttention",
            [(2, 3, 8), (2, 5, 8), (2, 5, 8)],
            [(2, 3, 8)],
            {},
            4 * 2 * 15 * 8,
        ),
        ("com.microsoft.Attention", [(2, 3, 8), (8, 24)], [(2, 3, 8)], {}, 2 * 6 * 8 * 24 + 4 * 2 * 9 * 8),
        ("LSTM", [(7, 2, 3), (1, 20, 3), (1, 20, 5)], [(7, 1, 2, 5)], {}, 2 * 7 * 2 * (20 * 3 + 20 * 5)),
        (
            "com.microsoft.LSTMTraining",
            [(7, 2, 3), (1, 20, 3), (1, 20, 5)],
            [(7, 1, 2, 5)],
            {},
            2 * 14 * (60 + 100),
        ),
        ("aten::ortlab::lstm_layer", [(7, 2, 3), (20, 3), (20, 5)], [(7, 2, 5)], {}, 2 * 7 * 2 * (60 + 100)),
        (
            "ortlab::gru_layer_backward",
            [(7, 2, 5), (7, 2, 3), (15, 3), (15, 5)],
            [(7, 2, 3), (15, 3), (15, 5)],
            {},
            4 * 7 * 2 * (45 + 75),
        ),
        (
            "ortlab::chunked_cross_entropy",
            [(2, 7, 4), (30, 4), (14,), (6,)],
            [(), (2, 7, 4), (0,), (0,)],
            {},
            2 * 2 * 14 * 4 * 30,
        ),
        ("Softmax", [(2, 3)], [(2, 3)], {}, 0),
        ("com.microsoft.PythonOp", [(2, 3)], [(2, 3)], {}, None),
    ],
)
def test_formulas(operator, inputs, outputs, attributes, expected):
    assert flops(operator, inputs, outputs, attributes) == expected


def test_attention_counts_as_torch_counts_it():
    query, key, value = (2, 2, 6, 8), (2, 2, 5, 8), (2, 2, 5, 4)
    result = (2, 2, 6, 4)
    name = "_scaled_dot_product_flash_attention_for_cpu"
    assert flops(name, [query, key, value], [result], {}) == sdpa_flop_count(query, key, value)
    counted = flops(f"{name}_backward", [result, query, key, value], [query, key, value], {})
    assert counted == sdpa_backward_flop_count(result, query, key, value)
