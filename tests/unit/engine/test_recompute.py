"""The switch `recompute`: gradients stay the same bit for bit, and a step needs less memory."""

from __future__ import annotations

import copy
import re
from collections import Counter

import onnx
import pytest
import torch
from small_transformers import batch_of, bert, gpt2, llama, t5
from torch import nn
from transformers import AlbertConfig, AlbertForMaskedLM, OPTConfig, OPTForCausalLM
from transformers.utils import ModelOutput

import ortlab
from ortlab.engine.passes.recompute import ForwardPass
from ortlab.engine.recompute_words import find_regions, regions_of_nodes
from ortlab.engine.sessions import seed
from ortlab.errors import ExecutionError, OptionError, PlanWarning
from ortlab.graphs.diff import diff
from ortlab.graphs.nodes import executed_operator, repeats
from ortlab.memory.trace import WRITTEN_OVER, lifetimes
from ortlab.options.options import Options

WIDTH, LAYERS, WORDS = 64, 3, 120


SIZES = {"layers": LAYERS, "width": WIDTH, "heads": 4, "words": WORDS}
MODELS = {
    "gpt2": lambda drop: gpt2(**SIZES, drop=drop, n_positions=64),
    "bert": lambda drop: bert(**SIZES, drop=drop),
    "llama": lambda drop: llama(**SIZES, drop=drop, num_key_value_heads=2),
    "t5": lambda drop: t5(**SIZES, drop=drop),
}


def batch(rows=2, length=16):
    torch.manual_seed(rows)
    return batch_of(rows, length, WORDS, first=1)


def gradients(lab, model, inputs):
    """Run forward and backward from the same draws; return the loss and the gradient of each parameter."""
    seed(11)
    torch.manual_seed(5)
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: one.grad.clone() for name, one in model.named_parameters()}}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def copies(lab):
    nodes = lab.graph("execution").model.graph.node
    return [node for node in nodes if any(name.endswith("_recompute") for name in node.output)]


def forward_operators(lab):
    """Count the operators of a session without the copies: of the forward, and of the gradients."""
    nodes = lab.graph("execution").model.graph.node
    return Counter(
        node.op_type
        for node in nodes
        if not any(name.endswith(("_recompute", "_held", "_late")) for name in node.output)
    )


@pytest.fixture
def wrapped():
    labs = []

    def wrap(model, **options):
        labs.append(ortlab.wrap(model.train(), **options))
        return labs[-1]

    yield wrap
    for lab in labs:
        lab.unwrap()


WAYS = [
    "layers",
    "layers:2",
    "layers:1/2",
    "layers:1/2 nested",
    "layers:2 nested",
    "all but matmuls",
    "all but linear",
    ("*.0",),
    ("layers[:1]", "layers[1:2] but linear", "layers[2:] but matmuls"),
]


@pytest.mark.parametrize("drop", [0.0, 0.1])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_the_same_bit_for_bit_and_less_is_kept(name, drop, wrapped):
    torch.manual_seed(3)
    model = MODELS[name](drop)
    lab, inputs = wrapped(model), batch()
    if name == "t5" and drop:
        # Recomputation comes with ORT's memory-efficient order, in which encoder and decoder take turns otherwise, and
        # so draw their masks; this switch brings that order, too.
        lab.set(mem_efficient_grad_management=True)
    expected = gradients(lab, model, inputs)
    kept = lab.activations().total_bytes
    for words in WAYS:
        lab.set(recompute=words)
        assert_same(gradients(lab, model, inputs), expected)
        assert copies(lab)
        assert lab.activations().total_bytes < kept
    lab.set(recompute=())
    assert_same(gradients(lab, model, inputs), expected)
    assert not copies(lab)


class Residual(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)


def test_a_model_that_is_the_list_of_its_blocks_recomputes_them(wrapped):
    torch.manual_seed(3)
    blocks = [
        Residual(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        for _ in range(LAYERS)
    ]
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, nn.Linear(WIDTH, WORDS))
    ids = torch.randint(WORDS, (2, 16))

    def train():
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        return [loss.detach(), *(one.grad.clone() for one in model.parameters())]

    lab = wrapped(model)
    expected, kept = train(), lab.activations().total_bytes
    for words in ("layers", "layers:2", "layers:1/2", "layers[:1]", ("2", "3")):
        lab.set(recompute=words)
        assert all(map(torch.equal, train(), expected)), words
        assert lab.activations().total_bytes < kept, words
    lab.set(engine="checkpoint")
    assert lab.status.detail == f"{LAYERS} Residual in the model"


def test_of_layers_only_what_one_hands_to_the_next_is_kept(wrapped):
    torch.manual_seed(3)
    model = MODELS["gpt2"](0.0)
    lab, inputs = wrapped(model, recompute="layers"), batch()
    gradients(lab, model, inputs)
    rows = [
        row for row in lab.activations().rows if row.layer.startswith("transformer.h.") and row.bytes > 64
    ]
    # The attention mask, and who sees anything through it, are made once and read in all layers.
    assert [(row.layer, row.operator) for row in sorted(rows, key=lambda row: row.position)] == [
        (f"transformer.h.{LAYERS - 1}", "ortlab::where"),
        (f"transformer.h.{LAYERS - 1}", "ReduceMax"),
        *((f"transformer.h.{number}", "Add") for number in range(LAYERS)),
    ]
    lab.set(recompute="all but matmuls")
    gradients(lab, model, inputs)
    rows = [
        row for row in lab.activations().rows if row.layer.startswith("transformer.h.") and row.bytes > 64
    ]
    assert {row.operator for row in rows} <= {"MatMul", "FusedMatMul", "Gemm", "ortlab::where", "ReduceMax"}


@pytest.mark.parametrize(
    ("nested", "outer"), [("layers:1/2 nested", "layers"), ("layers:3 nested", "layers:3")]
)
@pytest.mark.parametrize("drop", [0.0, 0.1])
def test_nested_keeps_no_more_than_the_stretches_and_needs_less_while_they_run(nested, outer, drop, wrapped):
    torch.manual_seed(3)
    model = MODELS["bert"](drop)
    lab, inputs = wrapped(model), batch(4, 64)
    lab.step(lambda: gradients(lab, model, inputs), n=1)
    peaks, kept, runs = {}, {}, {}
    for words in (nested, outer):
        lab.set(recompute=words)
        gradients(lab, model, inputs)
        kept[words] = {row.value for row in lab.activations().rows}
        peaks[words] = lifetimes(lab.profile(1, progress=False)).peak
        runs[words] = Counter(repeats(node) for node in copies(lab))
    assert kept[nested] == kept[outer]
    assert peaks[nested] < 0.95 * peaks[outer]
    # No node runs more than twice again, and none that did not with the stretch as a whole.
    assert set(runs[nested].values()) == {1, 2}
    assert set(runs[outer].values()) == {1}
    assert runs[nested].keys() == runs[outer].keys()


def test_no_call_writes_over_a_value_that_shares_the_memory_of_another(wrapped):
    """ONNX Runtime frees that memory behind the call, whose result lies in it."""
    torch.manual_seed(3)
    model = t5(**SIZES, drop=0.0, use_cache=True)  # the gradient of what it returns is added in place
    lab, inputs = wrapped(model), batch()
    expected = gradients(lab, model, inputs)
    lab.set(recompute="layers")
    assert_same(gradients(lab, model, inputs), expected)
    nodes = lab.graph("execution").model.graph.node
    shared = {name for node in nodes if node.op_type == "PassThrough" for name in node.output}
    over = [
        node.input[number]
        for node in nodes
        for number in WRITTEN_OVER.get(executed_operator(node), ())
        if number < len(node.input)
    ]
    assert over
    assert shared.isdisjoint(over)


MASKS = {"gpt2": 3 * LAYERS, "bert": 3 * LAYERS, "llama": LAYERS, "t5": (4 + 6) * LAYERS}
"""Dropouts in the layers of a model."""


@pytest.mark.parametrize("name", MODELS)
def test_the_forward_stays_node_for_node(name, wrapped):
    """No optimiser of the session finds something to fuse because the backward reads copies."""
    torch.manual_seed(3)
    model = MODELS[name](0.1)
    lab, inputs = wrapped(model), batch()
    gradients(lab, model, inputs)
    plain = forward_operators(lab)
    lab.set(recompute="layers")
    gradients(lab, model, inputs)
    # Beside what packs the mask of each dropout, and hands it to the backward with its shape.
    masks = Counter(dict.fromkeys(("ATen", "PassThrough", "Shape"), MASKS[name]))
    assert forward_operators(lab) == plain + masks
    assert {"FusedMatMul", "Softmax"} <= {node.op_type for node in copies(lab)}
    assert "Dropout" not in {node.op_type for node in copies(lab)}


@pytest.mark.parametrize("length", [16, 13])  # 13: masks whose entries fill no whole number of bytes
def test_masks_are_kept_with_eight_entries_in_a_byte(length, wrapped):
    torch.manual_seed(3)
    model = MODELS["bert"](0.1)
    lab, inputs = wrapped(model), batch(3, length)
    expected = gradients(lab, model, inputs)
    before = {row.value: row for row in lab.activations().rows if row.dtype == "uint8"}
    lab.set(recompute="layers")
    assert_same(gradients(lab, model, inputs), expected)
    rows = lab.activations().rows
    packed = {row.value.removesuffix("_packed"): row for row in rows if row.value.endswith("_packed")}
    # The embedding's dropout lies in no layer.
    assert len(packed) == len(before) - 1 == 3 * LAYERS
    assert {row.operator for row in packed.values()} == {"ortlab::packed_bits"}
    assert all(row.bytes == -(-before[mask].bytes // 8) for mask, row in packed.items())
    assert packed.keys().isdisjoint(row.value for row in rows)
    lab.step(lambda: gradients(lab, model, inputs), n=1)
    sizes = lab.profile().sizes
    assert all(sizes[mask + "_packed"] == row.bytes for mask, row in packed.items())


@pytest.mark.parametrize("static", [False, True])
def test_masks_are_those_of_their_own_forward(static, wrapped):
    """Two forwards before a backward, other batches, and a seed that comes again."""
    torch.manual_seed(3)
    model = MODELS["bert"](0.3)
    lab, one, other = wrapped(model), batch(2), batch(3, 24)
    lab.set(static_shape=static)

    def both(number):
        torch.manual_seed(number)
        model.zero_grad()
        (model(**one).loss + model(**other).loss).backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    both(1)
    expected = {number: both(number) for number in (1, 2)}
    lab.set(recompute="all but matmuls")
    for number in (1, 2, 1):
        assert all(map(torch.equal, both(number), expected[number]))
    assert not all(map(torch.equal, expected[1], expected[2]))


# --- what a step does with it -------------------------------------------------------------------------------------


def deep(drop=0.0):
    """Return a GPT-2 whose activations are most of what a step needs."""
    torch.manual_seed(3)
    return gpt2(**SIZES | {"layers": 4, "width": 128}, drop=drop, n_positions=256)


def test_a_step_needs_less_memory_also_beside_a_level(wrapped):
    model = deep()
    lab, inputs = wrapped(model), batch(4, 256)
    lab.call = lambda: gradients(lab, model, inputs)
    needs = {}
    for words, level in (((), 0), ((), 1), ("layers", 0), ("layers", 1), ("all but matmuls", 0)):
        lab.set(recompute=words, memory_level=level)
        needs[words, level] = lab.step(lab.call, n=2).step_memory_bytes
    assert needs["layers", 0] < 0.5 * needs[(), 0]
    assert needs["layers", 0] < needs[(), 1]
    assert needs["layers", 1] < 1.05 * needs["layers", 0]
    assert needs["all but matmuls", 0] < 0.8 * needs[(), 0]


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ("layers", {"memory_level": 1}),
        ("all but matmuls", {"memory_level": 2}),
        (("*.attention",), {"memory_plan": ["Gelu+:1:-1"]}),
    ],
)
def test_plans_and_levels_act_beside_it_and_leave_its_copies_alone(words, changes, wrapped):
    torch.manual_seed(3)
    model = MODELS["bert"](0.0)
    lab, inputs = wrapped(model), batch()
    expected = gradients(lab, model, inputs)
    lab.set(recompute=words)
    assert_same(gradients(lab, model, inputs), expected)
    ours, kept = {node.name for node in copies(lab)}, lab.activations().total_bytes
    lab.set(**changes)
    assert_same(gradients(lab, model, inputs), expected)
    assert {node.name for node in copies(lab)} > ours
    assert lab.activations().total_bytes < kept
    applied = [row for row in lab.plan().rows if row.applied]
    assert applied
    assert not any("_recompute_recompute" in node.name for node in copies(lab))


def test_two_forwards_before_a_backward_other_batches_and_eval(wrapped):
    torch.manual_seed(3)
    model = MODELS["gpt2"](0.0)
    lab, one, other = wrapped(model), batch(2), batch(3, 24)

    def both():
        model.zero_grad()
        loss = model(**one).loss + model(**other).loss
        loss.backward()
        return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]

    def evaluated():
        model.eval()
        with torch.no_grad():
            logits = model(**other).logits
        model.train()
        return logits

    expected, logits = both(), evaluated()
    lab.set(recompute="layers")
    built = []
    for _ in range(2):
        assert all(map(torch.equal, both(), expected))
        assert torch.equal(evaluated(), logits)
        built.append(lab.graph("execution").digest)
        assert copies(lab)
    assert len(set(built)) == 1


def test_what_the_model_returns_is_kept_and_not_written_over(wrapped):
    torch.manual_seed(3)
    model = MODELS["gpt2"](0.0)
    lab, inputs = wrapped(model), batch()
    model(**inputs, output_hidden_states=True).loss.backward()
    lab.set(recompute="layers")
    outputs = model(**inputs, output_hidden_states=True)
    before = [one.detach().clone() for one in (outputs.logits, *outputs.hidden_states)]
    (outputs.loss + outputs.hidden_states[1].square().sum()).backward()
    assert copies(lab)
    assert all(map(torch.equal, before, (outputs.logits, *outputs.hidden_states)))
    outputs = model(**inputs, output_hidden_states=True)
    with torch.no_grad():
        outputs.hidden_states[1].mul_(2)
    with pytest.raises(ExecutionError, match="Written to between a forward pass and its backward"):
        outputs.loss.backward()


def test_what_only_products_read_of_a_result_of_the_model_is_not_copied(wrapped):
    torch.manual_seed(3)
    model = MODELS["t5"](0.0)
    lab, inputs = wrapped(model), batch()
    expected = gradients(lab, model, inputs)
    lab.set(recompute="layers:1/2 nested")
    outputs = model(**inputs)
    # What the decoder's keys and values are made of.
    states = outputs.encoder_last_hidden_state.detach().clone()
    outputs.loss.backward()
    assert torch.equal(outputs.encoder_last_hidden_state, states)
    assert_same(gradients(lab, model, inputs), expected)
    assert copies(lab)
    nodes = lab.graph("execution").model.graph.node
    assert not [node for node in nodes if executed_operator(node) == "ortlab::copy_of"]


def test_the_halves_of_a_decoders_layer_part_its_attentions(wrapped):
    torch.manual_seed(3)
    model = MODELS["t5"](0.0)
    lab, inputs = wrapped(model), batch()
    gradients(lab, model, inputs)
    execution = lab._bench.ort.execution
    forward = ForwardPass(execution.unrepeated.models.optimized_model, execution.user_inputs)
    regions = find_regions(execution.module, ("layers:1/2",))
    found = regions_of_nodes(forward, regions, [path for path, _ in execution.module.named_modules()])
    # The keys and values are made of the encoder's result alone, and stand in front of all else in the graph.
    seconds = {
        attention: {
            region.second
            for place, region in found.items()
            if f"/decoder/block.1/{attention}/" in forward.nodes[place].name
        }
        for attention in ("layer.0/SelfAttention", "layer.1/EncDecAttention")
    }
    assert seconds == {"layer.0/SelfAttention": {False}, "layer.1/EncDecAttention": {True}}


def test_a_weight_that_changes_before_the_backward_is_refused(wrapped):
    torch.manual_seed(3)
    model = MODELS["gpt2"](0.0)
    wrapped(model, recompute="layers")
    loss = model(**batch()).loss
    with torch.no_grad():
        model.transformer.h[0].mlp.c_fc.bias.add_(1.0)  # no backward reads a bias; its recomputation does
    with pytest.raises(ExecutionError, match=r"Written to between .*c_fc.bias"):
        loss.backward()


def test_bfloat16_autocast(wrapped):
    torch.manual_seed(3)
    model = MODELS["bert"](0.1)
    lab, inputs = wrapped(model), batch()

    def cast():
        with torch.autocast("cpu", torch.bfloat16):
            return gradients(lab, model, inputs)

    expected = cast()
    kept = lab.activations().total_bytes
    for words in ("layers", "all but matmuls"):
        lab.set(recompute=words)
        assert_same(cast(), expected)
        assert lab.activations().total_bytes < kept


class Noisy(nn.Module):
    """Layers with what is not made again: batch statistics, noise and a Function."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.2)
            )
            for _ in range(3)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + Doubled.apply(layer(x))
            x = torch.nn.functional.alpha_dropout(x, 0.1, self.training)
        return x.square().mean()


class Doubled(torch.autograd.Function):
    """Twice a value, with a count of its calls."""

    calls = 0

    @staticmethod
    def forward(_ctx, x):
        Doubled.calls += 1
        return 2 * x

    @staticmethod
    def backward(_ctx, gradient):
        return 2 * gradient


def test_random_and_stateful_nodes_and_functions_run_once(wrapped):
    torch.manual_seed(3)
    model, x = Noisy(), torch.randn(8, 16)
    lab = wrapped(model, recompute="layers")

    def run():
        seed(11)
        torch.manual_seed(5)
        model.zero_grad()
        loss = model(x)
        loss.backward()
        return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]

    run()
    assert not {"PythonOp", "BatchNormInternal"} & {node.op_type for node in copies(lab)}
    assert "Gelu" in {node.op_type for node in copies(lab)}
    start = {name: value.clone() for name, value in model.state_dict().items()}
    Doubled.calls = 0
    found, after = run(), {name: value.clone() for name, value in model.state_dict().items()}
    assert Doubled.calls == 3
    model.load_state_dict(start)
    lab.set(recompute=())
    assert all(map(torch.equal, run(), found))
    assert all(torch.equal(after[name], value) for name, value in model.state_dict().items())


class Images(nn.Module):
    """Blocks of convolutions with group norms, whose kernels are calls of torch."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.SiLU(), nn.Conv2d(8, 8, 3, padding=1)
            )
            for _ in range(3)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def test_group_norms_run_again(wrapped):
    torch.manual_seed(3)
    model, x = Images(), torch.randn(2, 8, 16, 16)
    lab = wrapped(model)

    def run():
        model.zero_grad()
        loss = model(x)
        loss.backward()
        return {"loss": loss.detach(), **{name: one.grad.clone() for name, one in model.named_parameters()}}

    expected, kept = run(), lab.activations().total_bytes
    for words in ("layers", "layers:1/2 nested", "layers:3 nested"):
        lab.set(recompute=words)
        assert_same(run(), expected)
        assert any("GroupNorm" in node.name or "blocks.0.1" in node.name for node in copies(lab))
        assert lab.activations().total_bytes < 0.6 * kept


class Distances(nn.Module):
    """Attention to what lies at a distance, as DeBERTa has: the same distances for each entry of the batch."""

    def __init__(self):
        super().__init__()
        self.score = nn.Linear(64, 64)

    def forward(self, x):
        places = torch.arange(x.shape[1])
        distances = (places[:, None] - places[None, :]).clamp(-8, 7) + 8
        scores = self.score(x).gather(2, distances.expand(x.shape[0], -1, -1))
        return x + (scores.softmax(-1) @ x).relu()


@pytest.mark.parametrize("words", [(), "layers"])
def test_indices_are_kept_as_they_were_before_they_were_broadcast(words, wrapped):
    torch.manual_seed(3)
    eager = nn.Sequential(nn.Sequential(*(Distances() for _ in range(3))))
    x = torch.randn(32, 16, 64)
    model = copy.deepcopy(eager)
    lab = wrapped(model, recompute=words)
    model(x).square().mean().backward()
    eager(x).square().mean().backward()
    for one, other in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)
    kept = {row.operator: row for row in lab.activations().rows if row.dtype == "int64"}
    assert "Expand" not in kept
    assert sum(row.bytes for row in kept.values()) < x.shape[0] * x.shape[1] ** 2


@pytest.mark.parametrize("aten", [True, False], ids=["torch's loss", "ORT's loss"])
def test_labels_that_are_all_ignored_give_what_they_give_without(aten, wrapped):
    torch.manual_seed(3)
    model = MODELS["gpt2"](0.1)
    lab, inputs = wrapped(model, aten_cross_entropy=aten), batch()
    inputs["labels"] = torch.full_like(inputs["labels"], -100)
    expected = gradients(lab, model, inputs)
    assert expected["loss"].isnan()
    for words in ("layers", "layers:1/2 nested", "all but matmuls"):
        lab.set(recompute=words)
        found = gradients(lab, model, inputs)
        assert all(torch.equal(found[name].isnan(), one.isnan()) for name, one in expected.items())
        assert all(torch.equal(found[name].nan_to_num(), one.nan_to_num()) for name, one in expected.items())
        assert copies(lab)


def test_parts_of_a_model_recompute_by_names_of_the_whole(wrapped):
    torch.manual_seed(3)
    model = MODELS["bert"](0.0)
    lab, inputs = wrapped(model, only=["bert.encoder"]), batch()
    expected = gradients(lab, model, inputs)
    for words in ("layers", ("bert.encoder.layer.*.attention",)):
        lab.set(recompute=words)
        assert_same(gradients(lab, model, inputs), expected)
        nodes = lab.graph("execution", part="bert.encoder").model.graph.node
        assert any(node.name.endswith("_recompute") for node in nodes)


def test_layers_of_a_part_that_the_model_calls_past_its_owner_recompute(wrapped):
    """OPT's forward calls `self.model.decoder`, so that no name in the graph has "model" in it."""
    torch.manual_seed(3)
    sizes = {"num_hidden_layers": 2, "hidden_size": WIDTH, "ffn_dim": 2 * WIDTH, "word_embed_proj_dim": WIDTH}
    model = OPTForCausalLM(OPTConfig(**sizes, num_attention_heads=4, vocab_size=WORDS, use_cache=False))
    lab, inputs = wrapped(model), batch()
    expected = gradients(lab, model, inputs)
    kept = lab.activations().total_bytes
    lab.set(recompute="layers")
    assert_same(gradients(lab, model, inputs), expected)
    assert lab.activations().total_bytes < 0.7 * kept
    assert copies(lab)


class Loop(nn.Module):
    """Calls one block several times, as a universal transformer does."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)

    def forward(self, input_ids, labels, **_):
        states = self.words(input_ids)
        for _ in range(LAYERS):
            states = self.block(states)
        loss = nn.functional.cross_entropy(self.head(states).flatten(0, 1), labels.flatten())
        return ModelOutput(loss=loss)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Loop()

    def forward(self, **batch):
        return self.inner(**batch)


def albert():
    return AlbertForMaskedLM(
        AlbertConfig(
            vocab_size=WORDS,
            embedding_size=16,
            hidden_size=WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            intermediate_size=4 * WIDTH,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [(albert, "layers"), (albert, "layers:1/2 nested"), (Loop, ("block",)), (Loop, "layers")],
)
def test_each_call_of_a_shared_layer_hands_on_what_is_kept_of_it(make, words, wrapped):
    torch.manual_seed(3)
    model = make()
    lab, inputs = wrapped(model), batch()
    expected = gradients(lab, model, inputs)
    lab.set(recompute=words)
    assert_same(gradients(lab, model, inputs), expected)
    states = inputs["input_ids"].numel() * WIDTH * 4
    rows = [
        row
        for row in lab.activations().rows
        if row.bytes == states and ("albert_layers" in row.node or "/block" in row.node)
    ]
    calls = [re.search(r"(?:block|albert_layer_groups\.0)(?:#(\d))?", row.node)[1] for row in rows]
    assert calls == [None, *map(str, range(2, LAYERS + 1))]


# --- what is shown ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", ["layers", "layers:1/2 nested"])
def test_differences_summaries_and_profiles_name_what_is_recomputed(words, wrapped):
    torch.manual_seed(3)
    model = MODELS["bert"](0.1)
    lab, inputs = wrapped(model), batch()
    call = lambda: gradients(lab, model, inputs)  # noqa: E731 - a step
    lab.step(call, n=1)
    plain = lab.graph("execution")
    lab.set(recompute=words)
    run = lab.step(call, n=1)
    assert run.options.recompute == (words,)
    again = len(copies(lab))
    graph = lab.graph("execution")
    assert any(f"Added {again} recompute nodes" in sentence for sentence in diff(plain, graph).sentences)
    assert f"{again} that compute again" in str(graph)
    assert f"recompute={words} is on." in str(lab.plan())
    assert f"applied: recompute={words}." in str(lab.activations())
    profile = lab.profile()
    repeated = [node for node in profile.nodes if node.recomputes]
    assert len(repeated) == again
    assert {node.recomputes for node in repeated} <= {node.name for node in profile.nodes}
    assert all(node.backward for node in profile.nodes if node.name.endswith("_held"))


def test_the_users_graph_files_have_the_copies(wrapped, tmp_path):
    torch.manual_seed(3)
    model = MODELS["bert"](0.0)
    lab = wrapped(
        model, recompute="layers", save_onnx=True, save_onnx_path=str(tmp_path), save_onnx_prefix="rc"
    )
    gradients(lab, model, batch())
    (file,) = tmp_path.glob("*execution*training*.onnx")
    assert any(node.name.endswith("_recompute") for node in onnx.load(file).graph.node)


# --- bad input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("bert.encoder.layer.0.atention", "Did you mean 'bert.encoder.layer.0.attention'"),
        ("lyers", "Did you mean 'layers'"),
        (["bert.pooler.*"], "has no module"),
        ("bert.encoder.layer.0.atention but linear", "Did you mean 'bert.encoder.layer.0.attention'"),
        ("layers[3:]", "It has 3, numbered from 0"),
    ],
)
def test_modules_that_do_not_exist_are_named_with_near_ones(words, said, wrapped):
    model = MODELS["bert"](0.0)
    lab = wrapped(model, recompute="layers")
    with pytest.raises(OptionError, match=said):
        lab.set(recompute=words)
    assert lab.options.recompute == ("layers",)
    with pytest.raises(OptionError, match="has no"):
        ortlab.wrap(MODELS["bert"](0.0), recompute=words)


def test_words_that_find_nothing_to_make_again_are_said(wrapped):
    lab = wrapped(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), recompute="all but matmuls")
    with pytest.warns(PlanWarning, match="'all but matmuls' makes nothing again") as said:
        lab.module(torch.randn(2, 4)).sum().backward()
    assert [one.filename for one in said] == [__file__]  # the line that has called, and none of ortlab's
    assert "makes nothing again" in lab.messages[-1].text


@pytest.mark.parametrize("only", [None, ["inner"]])
def test_a_block_that_is_called_several_times_counts_as_a_layer_once_a_step_has_run(only, wrapped):
    torch.manual_seed(3)
    model = Outer()
    lab = wrapped(model, only=only)
    with pytest.raises(OptionError, match="counts, too, once a step has run"):
        lab.set(recompute="layers")
    assert lab.options.recompute == ()
    gradients(lab, model, batch())
    lab.set(recompute="layers")
    gradients(lab, model, batch())
    assert any("recompute=layers" in row.config for row in lab.plan(part=only and only[0]).recomputed)


def test_a_model_without_repeated_layers_says_what_else_there_is(wrapped):
    lab = wrapped(nn.Sequential(nn.Linear(4, 8), nn.GELU()))
    with pytest.raises(OptionError, match="has no repeated layers to recompute") as refusal:
        lab.set(recompute="layers")
    assert 'recompute="all but matmuls"' in refusal.value.fix


@pytest.mark.parametrize(
    "value",
    [
        "layers:0",
        "layers:x",
        "layers:",
        "layers[2:2]",
        "layers[1:] but gelus",
        "layers nested",
        "layers:1 nested",
        "layers:2 but linear nested",
        "all but matmuls nested",
        ["layers", "h.0"],
        ["layers", "layers[1:]"],
        ["layers[:2]", "h.0"],
        ["layers[:2]", "layers[1:] but linear"],
        ["all but linear", "layers[:2]"],
        "a..b",
        "all but gelus",
        3,
    ],
)
def test_words_that_make_no_sense_are_refused(value):
    with pytest.raises(OptionError, match="recompute"):
        Options(recompute=value)
    assert Options(recompute="layers:2").recompute == ("layers:2",)
    assert Options(recompute="a.*.b, c but linear").recompute == ("a.*.b", "c but linear")
    assert Options(recompute="layers[:4],layers[4:] but matmuls").recompute[1] == "layers[4:] but matmuls"
