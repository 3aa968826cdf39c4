"""Saved activations are what the backward of the running graph reads: held against ORT's profiler, one by one."""

from __future__ import annotations

import json
import math

import pytest
import small_transformers
import torch
from torch import nn
from transformers import ConvNextV2Config, ConvNextV2ForImageClassification

import ortlab
from ortlab.errors import BuildError, OptionError
from ortlab.memory.saved_activations import KINDS, OUTSIDE
from ortlab.render import html, text


def vit(batch):
    images = torch.randn(batch, 3, 16, 16)
    model = small_transformers.vit(size=16, patch=4)
    return model, {"pixel_values": images, "labels": torch.arange(batch) % 2}


def language(model, batch):
    return model, small_transformers.batch_of(batch, 16)


def bert(batch):
    model, given = language(small_transformers.bert(drop=0.1), batch)
    return model, {**given, "attention_mask": torch.ones_like(given["input_ids"])}


def t5(batch):
    model, given = language(small_transformers.t5(drop=0.1, use_cache=True), batch)
    return model, {**given, "labels": given["labels"][:, :8].clone()}


def convnext(batch):
    """A model whose transposes ORT moves, so that some results have names that no export knows."""
    sizes = {"hidden_sizes": [8, 16], "depths": [2, 2], "num_stages": 2, "image_size": 32, "num_labels": 2}
    model = ConvNextV2ForImageClassification(ConvNextV2Config(**sizes))
    return model, {"pixel_values": torch.randn(batch, 3, 32, 32), "labels": torch.arange(batch) % 2}


MODELS = {
    "bert": bert,
    "gpt2": lambda batch: language(small_transformers.gpt2(drop=0.1, n_positions=64, use_cache=True), batch),
    "llama": lambda batch: language(
        small_transformers.llama(heads=4, num_key_value_heads=2, use_cache=True), batch
    ),
    "vit": vit,
    "t5": t5,
    "convnext": convnext,
}


class Padded(nn.Module):
    """An encoder that is given a mask of padding."""

    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        return self.body(x, src_key_padding_mask=x[:, :, 0] == 0)


class Stepped:
    """A model in a lab, after one step."""

    def __init__(self, model, batch):
        self.model, self.batch = model.train(), batch
        self.lab = ortlab.wrap(model)
        self.lab.step(self.step, progress=False)

    def step(self):
        loss = self.model(**self.batch).loss
        loss.backward()
        self.model.zero_grad()
        return loss


@pytest.fixture(scope="module")
def stepped_models():
    """Keep every model that has been stepped, in its lab, by name and batch."""
    made = {}

    def find(name, batch=2):
        if (name, batch) not in made:
            torch.manual_seed(0)
            made[name, batch] = Stepped(*MODELS[name](batch))
        return made[name, batch]

    yield find
    for one in made.values():
        one.lab.unwrap(forget=True)


@pytest.fixture(params=MODELS)
def stepped(request, stepped_models):
    return stepped_models(request.param)


@pytest.fixture
def of_gpt2(stepped_models):
    """Return a GPT-2 without plans; its exports are kept, so that only sessions are made again."""
    made = stepped_models("gpt2")
    yield made
    made.lab.set(memory_plan=[])
    made.lab.step(made.step, progress=False)


class Picking(nn.Module):
    """How many rows it keeps depends on values."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 8)
        self.outer = nn.Linear(8, 3)

    def forward(self, x, keep):
        return self.outer(torch.sigmoid(torch.tanh(self.inner(x))[keep])).sum()


def kept_in(trace):
    """Names of the results of the forward that the backward reads, or that were returned, as the profiler saw it."""
    made = {name for node in trace.nodes if not node.backward for name in node.outputs if name}
    read = {name for node in trace.nodes if node.backward for name in node.inputs}
    return made & (read | trace.returned)


# ---- the rows ---------------------------------------------------------------------------------------------------


@pytest.mark.row("E7")
def test_every_activation_has_the_bytes_that_the_profiler_saw(stepped):
    activations = stepped.lab.activations()
    trace = stepped.lab.profile(1, progress=False)
    assert not activations.unknown
    assert {row.value: row.bytes for row in activations.rows} == {
        row.value: trace.sizes[row.value] for row in activations.rows
    }
    assert activations.total_bytes == sum(trace.sizes[row.value] for row in activations.rows) > 0
    of_inputs = kept_in(trace) - {name for row in activations.rows for name in (row.value, *row.views)}
    given = {one.name for one in activations.inputs}
    producers = {name: node for node in trace.nodes for name in node.outputs}
    # What is left over are views of what the caller holds: inputs and weights.
    assert all(producers[name].inputs[0] not in producers for name in of_inputs), of_inputs
    assert given <= {"input_ids", "labels", "attention_mask", "pixel_values"}


@pytest.mark.row("E7")
def test_groups_and_shares_add_up(stepped):
    activations = stepped.lab.activations()
    for kind in KINDS:
        groups = activations.by(kind)
        assert sum(group.bytes for group in groups) == activations.total_bytes
        assert sum(group.count for group in groups) == len(activations.rows)
        assert math.isclose(sum(activations.share(group) for group in groups), 1.0)
    assert math.isclose(sum(activations.share(row) for row in activations.rows), 1.0)
    assert sum(map(len, activations.alike())) == len(activations.rows)
    layers = [group.name for group in activations.by("layer")]
    assert layers == [*sorted(layers[:-1]), OUTSIDE] or layers[0].startswith("encoder.")
    assert len(layers) in {3, 5}


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_another_batch_is_evaluated_as_it_would_be_built(stepped_models, name):
    small, large = stepped_models(name), stepped_models(name, batch=6)
    assert small.lab.activations().at(batch=6).total_bytes == large.lab.activations().total_bytes
    assert small.lab.activations().total_bytes == large.lab.activations().at(batch=2).total_bytes


def test_the_record_says_which_batch_it_is_of_and_that_the_last_one_was_another(stepped_models):
    small, large = stepped_models("bert"), stepped_models("bert", batch=6)
    assert ", for input_ids_dim0 = 2, input_ids_dim1 = 16" in text.render(small.lab.activations())
    usual, small.batch = small.batch, large.batch
    try:
        small.lab.step(small.step, progress=False)
        activations = small.lab.activations()
    finally:
        small.batch = usual
        small.lab.step(small.step, progress=False)
    assert activations.last_batch == {
        name: 6 for name in activations.symbols if name.endswith("dim0")
    }  # nothing was built for it
    asked = ", ".join(f"{name}=6" for name in activations.last_batch)
    for page in (text.render(activations), text.render(activations.shown("layer")), html.render(activations)):
        words = " ".join(page.split())
        assert "That is the batch that the graph was built with." in words
        assert f"lab.activations().at({asked})" in words
    evaluated = activations.at(**activations.last_batch)
    assert evaluated.total_bytes == large.lab.activations().total_bytes
    assert not evaluated.last_batch
    assert "built with" not in text.render(evaluated)
    assert not small.lab.activations().last_batch


def test_rows_say_where_in_the_model_they_are(stepped):
    modules = dict(stepped.model.named_modules())
    for row in stepped.lab.activations().rows:
        assert row.module in modules
        assert not row.layer or row.module.startswith(row.layer)
        assert row.returned or row.kept_by
        if row.source:
            assert row.source.rpartition(":")[2].isdigit()


def test_gelu_of_gpt2_is_where_it_is(of_gpt2):
    (row,) = [
        one for one in of_gpt2.lab.activations().rows if one.operator == "FastGelu" and "h.0" in one.module
    ]
    assert (row.module, row.layer, row.shape) == (
        "transformer.h.0.mlp.act",
        "transformer.h.0",
        ("input_ids_dim0", "input_ids_dim1", 128),
    )
    assert (row.bytes, row.dtype, row.bytes_symbolic) == (
        2 * 16 * 128 * 4,
        "float",
        "512*input_ids_dim0*input_ids_dim1",
    )
    assert row.views == ("/_original_module/transformer/h.0/mlp/c_proj/Reshape_output_0",)  # counted once
    assert row.source.rpartition(":")[0].endswith("activations.py")


def test_what_the_model_returns_is_told_apart(of_gpt2):
    activations = of_gpt2.lab.activations()
    returned = [row for row in activations.rows if row.returned and not row.kept_by]
    assert activations.returned_bytes == sum(row.bytes for row in returned)
    # the logits, and keys and values of two layers
    assert {(row.bytes, row.dtype) for row in returned} >= {
        (2 * 16 * 64 * 4, "float"),
        (2 * 16 * 32 * 4, "float"),
    }


# ---- plans ------------------------------------------------------------------------------------------------------

GELU = "FastGelu+Reshape+:1:-1"


@pytest.mark.row("E7")
def test_a_plan_removes_exactly_its_activations(of_gpt2):
    lab, asked = of_gpt2.lab, of_gpt2.lab.activations(plans=True, progress=False)
    before = {row.value for row in asked.rows}
    lab.set(memory_plan=[GELU])
    lab.step(of_gpt2.step, progress=False)
    after = lab.activations()
    gelus = {row.value for row in asked.rows if row.operator == "FastGelu"}
    assert len(gelus) == 2
    assert before - {row.value for row in after.rows} == gelus
    assert {row.value for row in after.rows} <= before
    assert {row.value for row in asked.rows if GELU in row.plans} == gelus
    assert after.applied == (GELU,)
    assert asked.total_bytes - after.total_bytes == 2 * 2 * 16 * 128 * 4


def test_what_is_kept_instead_is_in_it(of_gpt2):
    """`Add+` saves nothing: what the additions read is as large as what they give, and was not kept before."""
    lab, asked = of_gpt2.lab, of_gpt2.lab.activations(plans=True, progress=False)
    effect = next(one for one in asked.effects if one.config == "Add+:1:-1")
    assert [row.operator for row in effect.removed] == ["Add"] * 4
    assert [row.operator for row in effect.added] == ["Dropout"] * 4
    assert (effect.removed_bytes, effect.added_bytes, effect.net_bytes) == (16384, 16384, 0)
    lab.set(memory_plan=["Add+:1:-1"])
    lab.step(of_gpt2.step, progress=False)
    after, trace = lab.activations(), lab.profile(1, progress=False)
    assert after.total_bytes == asked.total_bytes
    assert {row.value: row.bytes for row in after.rows} == {
        row.value: trace.sizes[row.value] for row in after.rows
    }
    # Each plan's effect is that on the graph without plans, whatever is applied.
    again = lab.activations(plans=True, progress=False)
    assert [(one.config, one.net_bytes) for one in again.effects] == [
        (one.config, one.net_bytes) for one in asked.effects
    ]


def test_effects_follow_the_batch(of_gpt2):
    asked = of_gpt2.lab.activations(plans=True, progress=False)
    larger = asked.at(batch=8)
    gelu = [next(one for one in activations.effects if one.config == GELU) for activations in (asked, larger)]
    assert gelu[1].net_bytes == 4 * gelu[0].net_bytes > 0


# ---- sizes that are not known -----------------------------------------------------------------------------------


def test_unknown_sizes_are_said_and_filled_from_a_profile():
    torch.manual_seed(0)
    model = Picking()
    lab = ortlab.wrap(model)
    x, keep = torch.randn(6, 4), torch.tensor([True, False, True, True, False, True])

    def step():
        loss = model(x, keep)
        loss.backward()
        return loss

    lab.step(step, progress=False)
    activations = lab.activations()
    assert len(activations.unknown) == 2
    assert activations.rows[:2] == activations.unknown
    assert activations.share(activations.unknown[0]) is None
    shown = text.render(activations)
    assert "At least " in shown
    assert "2 activations are of unknown size" in shown
    trace = lab.profile(1, progress=False)
    filled = lab.activations(sizes=trace.sizes)
    assert not filled.unknown
    assert sum(row.measured for row in filled.rows) == 2
    assert filled.total_bytes == sum(trace.sizes[row.value] for row in filled.rows)
    assert len(filled.at(batch=12).unknown) == 2  # measured for one batch only
    assert "At least" not in text.render(filled)
    lab.unwrap(forget=True)


class Tail(nn.Module):
    """What shape inference states of its slice is wrong for a batch of few rows; two sizes only torch can tell."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv1d(3, 4, 3)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        hidden = nn.functional.max_pool1d(torch.relu(self.norm(self.convolution(x))), 2)
        return torch.sigmoid(self.head(torch.tanh(hidden.transpose(1, 2)[:, -4095:]))).sum()


def test_a_shape_that_inference_states_wrongly_is_not_believed():
    torch.manual_seed(0)
    model, x = Tail(), torch.randn(2, 3, 20)
    lab = ortlab.wrap(model)

    def step():
        loss = model(x)
        loss.backward()
        return loss

    lab.step(step, progress=False)
    activations, trace = lab.activations(), lab.profile(1, progress=False)
    known = [row for row in activations.rows if row.bytes is not None]
    assert len(known) == len(activations.rows) > 5
    assert {row.value: row.bytes for row in known} == {row.value: trace.sizes[row.value] for row in known}
    # The sizes behind the pooling are no dimension of the input: at another length they are not known, and said so.
    longer = activations.at(x_dim2=40)
    assert longer.unknown
    assert "not known" in text.render(longer)
    lab.unwrap(forget=True)


# ---- when there is none -----------------------------------------------------------------------------------------


def test_activations_are_of_the_present_switches(experiment, wrap):
    lab = wrap(experiment.model)
    with pytest.raises(BuildError, match="no graph for the present options"):
        lab.activations()
    lab.step(experiment.step, progress=False)
    assert lab.activations().total_bytes > 0
    lab.set(memory_level=1)
    assert "Built for this page" in lab.activations().note


def test_no_activations_in_eval_mode(experiment, wrap):
    lab = wrap(experiment.model.eval())
    with torch.no_grad():
        experiment.model(experiment.x)
    with pytest.raises(BuildError, match="built no gradient"):
        lab.activations()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"batch": 0}, "batch cannot be 0"),
        ({"input_ids_dim7": 3}, "no symbolic dimension 'input_ids_dim7'"),
        ({"input_ids_dim0": 1.5}, "cannot be 1.5"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(stepped_once, wrong, words):
    with pytest.raises(OptionError, match=words):
        stepped_once.at(**wrong)


@pytest.fixture
def stepped_once(of_gpt2):
    return of_gpt2.lab.activations()


def test_an_unknown_kind_is_refused(stepped_once):
    with pytest.raises(OptionError, match="layer, operator, module"):
        stepped_once.by("colour")
    with pytest.raises(OptionError, match="layer, operator, module"):
        stepped_once.shown("colour")


# ---- parts ------------------------------------------------------------------------------------------------------


def test_parts_of_a_model_are_put_together():
    torch.manual_seed(0)
    model, batch = MODELS["gpt2"](2)
    lab = ortlab.wrap(model, only=["transformer.h.0", "transformer.h.1"])
    with pytest.raises(BuildError):
        lab.activations()

    def step():
        model(**batch, use_cache=False).loss.backward()

    lab.step(step, progress=False)
    whole = lab.activations()
    parts = [lab.activations(path) for path in ("transformer.h.0", "transformer.h.1")]
    assert {row.part for row in whole.rows} == {"transformer.h.0", "transformer.h.1"}
    assert whole.total_bytes == sum(part.total_bytes for part in parts) > 0
    assert [group.name for group in whole.by("layer")] == ["transformer.h.0", "transformer.h.1"]
    assert {row.module for row in parts[0].rows if row.operator == "FastGelu"} == {"transformer.h.0.mlp.act"}
    with pytest.raises(OptionError, match="no wrapped part"):
        lab.activations("transformer.h.7")
    lab.unwrap(forget=True)


# ---- forms ------------------------------------------------------------------------------------------------------


def test_text_html_pandas_and_json_hold_the_same(of_gpt2):
    activations = of_gpt2.lab.activations(plans=True, progress=False)
    table = activations.table()
    assert table["bytes"].sum() == activations.total_bytes
    assert table["share"].sum() == pytest.approx(1.0)
    record = json.loads(json.dumps(activations.to_dict()))
    assert record["total_bytes"] == activations.total_bytes
    assert sum(group["bytes"] for group in record["groups"]["operator"]) == activations.total_bytes
    for shown in (text.render(activations), html.render(activations)):
        for words in (
            GELU,
            "transformer.h.*.mlp.act",
            "outside the layers",
            "100.0 %",
            "no plan",
            "keeps instead",
        ):
            assert words in shown
    only = text.render(activations.shown("operator"))
    assert "FastGelu" in only
    assert "transformer.h.0" not in only


def test_figure_shows_each_layer_and_all_bytes(stepped_once):
    figure = ortlab.plot(stepped_once)
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "transformer.h.0",
        "transformer.h.1",
        OUTSIDE,
    ]
    drawn = sum(bar.get_width() for bars in axes.containers for bar in bars) * 1024
    assert drawn == pytest.approx(stepped_once.total_bytes)
    with pytest.raises(TypeError, match="no figure for a int"):
        ortlab.plot(3)


def test_no_warning_of_shape_inference_gets_out(wrap, caplog):
    """A padding mask of torch's encoder layer is one of the things that it cannot tell."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True)
    body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    model = Padded(body)
    lab = wrap(model)
    tokens = torch.ones(4, 12, 32)
    lab.step(lambda: model(tokens).sum().backward(), n=2, memory=False)
    assert lab.activations().rows
    assert "unsupported broadcast" not in caplog.text
