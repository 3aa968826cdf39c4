"""The head and the cross entropy in blocks of rows: PyTorch's numbers, no logits, and a word where it cannot be."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from small_transformers import bert, gpt2, llama, t5
from torch import nn
from torch.nn import functional as F
from transformers import Trainer, TrainingArguments

import ortlab
from ortlab.engine.operators.chunked_loss import rows_of_block
from ortlab.engine.passes.graph_edits import aten_operator
from ortlab.errors import ExecutionError

WORDS, WIDTH, BATCH, LENGTH = 600, 32, 4, 96

SIZES = {"layers": 1, "width": WIDTH, "words": WORDS}
FAMILIES = {
    "gpt2": lambda: gpt2(**SIZES, n_positions=LENGTH),
    "llama": lambda: llama(**SIZES, intermediate_size=48, num_key_value_heads=1),
    "bert": lambda: bert(**SIZES, intermediate_size=48, max_position_embeddings=LENGTH),
    "t5": lambda: t5(**SIZES, d_ff=48, pad_token_id=0),
}


def batch():
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(1, WORDS, (BATCH, LENGTH), generator=generator)
    labels = torch.where(torch.arange(LENGTH) % 5 == 0, -100, ids)  # 300 rows and more count: two blocks
    return {"input_ids": ids, "labels": labels}


def wrapped(model, **options):
    return ortlab.wrap(model, options=ortlab.Options(**{"chunked_loss": True} | options), log_level="ERROR")


def said(lab):
    return [message.text for message in lab.messages if message.source == "ortlab"]


def calls(lab):
    """Return the operators of torch that the training graph calls."""
    return [aten_operator(node) for node in lab.graph("gradient").model.graph.node]


def gradients(model):
    found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def agree(found, expected, within=1e-5):
    """Each gradient is within this part of its norm, or of a millionth of all gradients' where it is rounding alone."""
    assert found.keys() == expected.keys()
    floor = 1e-6 * torch.stack([one.float().norm() for one in expected.values()]).norm()
    for name, one in expected.items():
        apart = (found[name].float() - one.float()).norm()
        assert apart <= within * max(one.float().norm(), floor), name


def trained(model, **inputs):
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), gradients(model)


@pytest.fixture(scope="module", params=FAMILIES)
def both(request):
    torch.manual_seed(0)
    eager = FAMILIES[request.param]().train()
    lab = wrapped(copy.deepcopy(eager))
    yield lab, eager
    lab.unwrap()


# --- models of transformers ---------------------------------------------------------------------------------------


def test_loss_and_gradients_are_those_of_pytorch(both):
    lab, eager = both
    (loss, found), (expected_loss, expected) = (trained(one, **batch()) for one in (lab.module, eager))
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=0)
    agree(found, expected)


def test_no_value_of_the_graph_is_as_large_as_the_logits(both):
    lab, _ = both
    trained(lab.module, **batch())
    largest = max(row.bytes or 0 for row in lab.activations().rows)
    assert largest < BATCH * (LENGTH - 1) * WORDS * 4
    called = calls(lab)
    assert called.count("ortlab::chunked_cross_entropy") == 1
    assert called.count("ortlab::chunked_cross_entropy_backward") == 1


def test_the_lab_says_in_how_many_blocks(both):
    lab, _ = both
    trained(lab.module, **batch())
    text = next(text for text in said(lab) if "blocks of 256 rows" in text)
    assert "The loss is computed in 2 blocks" in text
    assert "MiB) never exist" in text or "KiB) never exist" in text
    assert "'logits'" in text


def test_logits_that_the_model_returns_refuse_to_be_read(both):
    lab, _ = both
    outputs = lab.module(**batch())
    outputs.loss.backward()
    gradients(lab.module)
    assert outputs[0] is outputs.loss
    assert not hasattr(outputs.logits, "dtype")
    assert "chunked_loss" in repr(outputs.logits)
    for again in (copy.copy, copy.deepcopy):
        assert repr(again(outputs.logits)) == repr(outputs.logits)
    for read in (
        lambda logits: logits.argmax(-1),
        lambda logits: torch.argmax(logits, -1),
        lambda logits: torch.stack([logits]),
        lambda logits: logits[..., -1],
        lambda logits: logits + 1,
        lambda logits: logits == 1,
        bool,
        len,
        list,
        np.asarray,
        lambda logits: logits.shape,
    ):
        with pytest.raises(ExecutionError, match=r"'logits' was read") as error:
            read(outputs.logits)
        assert "lab.set(chunked_loss=False)" in str(error.value)


def test_in_eval_mode_the_logits_are_there(both):
    lab, eager = both
    with torch.no_grad():
        found, expected = (one.eval()(**batch()) for one in (lab.module, eager))
    lab.module.train()
    eager.train()
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=0)


def test_with_all_labels_ignored_it_is_nan_as_in_pytorch(both):
    lab, eager = both
    inputs = batch()
    inputs["labels"] = torch.full_like(inputs["labels"], -100)
    (loss, found), (expected_loss, expected) = (trained(one, **inputs) for one in (lab.module, eager))
    assert torch.isnan(loss)
    assert torch.isnan(expected_loss)
    for name, one in expected.items():
        torch.testing.assert_close(found[name], one, equal_nan=True)


def test_in_bfloat16_it_is_as_near_to_float32_as_pytorch(both):
    lab, eager = both
    _, exact = trained(eager, **batch())
    results = []
    for one in (lab.module, eager):
        with torch.autocast("cpu", torch.bfloat16):
            loss = one(**batch()).loss
        loss.backward()
        results.append((loss.detach(), gradients(one)))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-3, atol=0)
    floor = 1e-3 * torch.stack([one.norm() for one in exact.values()]).norm()
    for name, one in exact.items():
        ours, pytorchs = ((found[name].float() - one).norm() for _, found in results)
        assert ours <= 1.5 * pytorchs + 0.05 * max(one.norm(), floor), name


def test_its_flops_are_those_of_the_three_products_that_it_stands_for(both):
    lab, _ = both
    lab.step(lambda: trained(lab.module, **batch())[0], memory=False, progress=False)
    counted = lab.flops().total
    lab.set(chunked_loss=False)
    plain = lab.flops().total
    lab.set(chunked_loss=True)
    assert counted == plain


def test_it_acts_from_the_next_step_on_in_a_lab_that_has_trained_without_it():
    model = FAMILIES["bert"]().train()
    lab = wrapped(model, chunked_loss=False)
    trained(model, **batch())
    lab.set(chunked_loss=True)  # both exports are one ONNX model; what is made of it differs
    trained(model, **batch())
    assert [text for text in said(lab) if "blocks of 256 rows" in text]
    lab.set(chunked_loss=False)
    assert model(**batch()).logits.shape == (BATCH, LENGTH, WORDS)


def test_several_forwards_before_one_backward_and_a_scaled_loss(both):
    lab, eager = both
    first = batch()
    second = {name: one.flip(0) for name, one in first.items()}
    found = []
    for one in (lab.module, eager):
        (2.5 * one(**first).loss - 0.5 * one(**second).loss).backward()
        found.append(gradients(one))
    agree(*found)


# --- forms of heads and losses ------------------------------------------------------------------------------------


class Reader(nn.Module):
    """Embeds, and computes a loss of a head's logits as it is told; it returns loss and logits."""

    def __init__(self, loss, *, bias=True, returns_logits=True):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=bias)
        self.loss, self.returns_logits = loss, returns_logits
        self.register_buffer("weights", torch.linspace(0.5, 2, WORDS))

    def forward(self, input_ids, labels):
        logits = self.head(self.embedding(input_ids))
        loss = self.loss(logits, labels, self)
        return (loss, logits) if self.returns_logits else (loss,)


def rows(logits):
    return logits.reshape(-1, WORDS)


FORMS = {
    "mean": lambda logits, labels, _: F.cross_entropy(rows(logits), labels.reshape(-1)),
    "sum": lambda logits, labels, _: F.cross_entropy(rows(logits), labels.reshape(-1), reduction="sum"),
    "divided": lambda logits, labels, _: (
        F.cross_entropy(rows(logits), labels.reshape(-1), reduction="sum") / 37
    ),
    "shifted": lambda logits, labels, _: F.cross_entropy(rows(logits[:, :-1]), labels[:, 1:].reshape(-1)),
    "dotted": lambda logits, labels, _: F.cross_entropy(
        rows(logits[..., :-1, :].contiguous()), labels[..., 1:].reshape(-1)
    ),
    "flattened": lambda logits, labels, _: F.cross_entropy(logits.flatten(0, 1), labels.flatten()),
    "shifted and flattened": lambda logits, labels, _: F.cross_entropy(
        logits[:, :-1].flatten(end_dim=-2), labels[:, 1:].flatten()
    ),
    "turned": lambda logits, labels, _: F.cross_entropy(logits.transpose(1, 2), labels),
    "upcast": lambda logits, labels, _: F.cross_entropy(rows(logits.float()), labels.reshape(-1)),
    "own ignored label": lambda logits, labels, _: F.cross_entropy(
        rows(logits), labels.clamp(min=0).reshape(-1), ignore_index=0
    ),
    "class weights": lambda logits, labels, model: F.cross_entropy(
        rows(logits), labels.reshape(-1), weight=model.weights
    ),
    "summed class weights": lambda logits, labels, model: F.cross_entropy(
        rows(logits), labels.reshape(-1), weight=model.weights, reduction="sum"
    ),
    "two heads": lambda logits, labels, model: (
        F.cross_entropy(rows(logits), labels.reshape(-1))
        + F.cross_entropy(rows(model.head(model.embedding(labels.clamp(min=0)))), labels.reshape(-1))
    ),
}


def readers(loss, **how):
    torch.manual_seed(1)
    eager = Reader(loss, **how)
    return eager, copy.deepcopy(eager)


def same_steps(lab, eager):
    found = []
    for one in (lab.module, eager):
        loss = one(**batch())[0]
        loss.backward()
        found.append((loss.detach(), gradients(one)))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=0)
    agree(found[0][1], found[1][1])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("aten", [True, False], ids=["torch's loss", "ORT's loss"])
def test_forms_of_losses(form, aten):
    eager, model = readers(FORMS[form])
    lab = wrapped(model, aten_cross_entropy=aten)
    same_steps(lab, eager)
    assert sum("never exist" in text for text in said(lab)) == 1 + (form == "two heads")
    lab.unwrap()


def test_a_head_without_bias_that_returns_its_loss_alone():
    eager, model = readers(FORMS["mean"], bias=False, returns_logits=False)
    lab = wrapped(model)
    same_steps(lab, eager)
    assert all("The forward returns no" not in text for text in said(lab))
    lab.unwrap()


@pytest.mark.parametrize("frozen", ["head.weight", "head.bias", "embedding.weight", "head"])
def test_frozen_parts_get_no_gradient(frozen):
    eager, model = readers(FORMS["mean"])
    for one in (eager, model):
        for name, parameter in one.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen))
    lab = wrapped(model)
    same_steps(lab, eager)
    assert any("never exist" in text for text in said(lab))
    lab.unwrap()


def test_ignored_rows_that_ortmodule_would_leave_out_are_left_out_here():
    torch.manual_seed(0)
    eager = ortlab.with_loss(FAMILIES["bert"]().train(), ortlab.TokenLoss(), loss_only=True)
    inputs = batch()
    inputs["labels"] = torch.where(torch.arange(LENGTH) % 4 == 0, inputs["input_ids"], -100)
    lab = wrapped(copy.deepcopy(eager))
    found = []
    for one in (lab.module, eager):
        loss = one(**inputs)["loss"]
        loss.backward()
        found.append((loss.detach(), gradients(one)))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=0)
    agree(found[0][1], found[1][1])
    assert "ortlab::chunked_cross_entropy" in calls(lab)
    assert "PythonOp" not in {node.op_type for node in lab.graph("gradient").model.graph.node}
    lab.unwrap()


def test_a_label_that_no_class_has_is_an_error_as_in_pytorch():
    eager, model = readers(FORMS["mean"])
    lab = wrapped(model)
    same_steps(lab, eager)
    inputs = batch()
    inputs["labels"][0, 1] = WORDS
    with pytest.raises(IndexError):
        eager(**inputs)
    with pytest.raises((IndexError, ExecutionError), match="out of bounds"):
        lab.module(**inputs)
    same_steps(lab, eager)
    lab.unwrap()


def test_a_forward_that_reads_values_is_guarded_as_ever():
    def loss(logits, labels, _):
        found = F.cross_entropy(rows(logits), labels.reshape(-1))
        return found * 2 if labels.max().item() > 0 else found

    eager, model = readers(loss)
    lab = wrapped(model)
    found, expected = (one(**batch()) for one in (lab.module, eager))
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=0)
    with pytest.raises(ExecutionError, match=r"'\[1\]' was read"):
        found[1].sum()
    other = batch()
    other["labels"] = other["labels"].clamp(max=7)
    with pytest.raises(ExecutionError, match="depends on a value of the batch"):
        lab.module(**other)
    lab.unwrap()


def test_a_cache_of_keys_and_values_is_returned_beside():
    torch.manual_seed(0)
    eager = FAMILIES["gpt2"]().train()
    eager.config.use_cache = True
    lab = wrapped(copy.deepcopy(eager))
    found, expected = (one(**batch()) for one in (lab.module, eager))
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=0)
    keys = (one.past_key_values.layers[0].keys for one in (found, expected))
    torch.testing.assert_close(*keys, rtol=1e-5, atol=1e-6)
    with pytest.raises(ExecutionError, match="'logits' was read"):
        found.logits.sum()
    lab.unwrap()


@pytest.mark.usefixtures("accelerate_forgotten")
@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])
def test_transformers_trainer_trains_with_it_and_evaluates_the_logits(tmp_path, bf16):
    ids = batch()["input_ids"]
    data = [{"input_ids": row, "labels": row} for row in ids]

    def seen(prediction):
        return {"shape": prediction.predictions.shape[-1]}

    losses = []
    for chunked in (False, True):
        torch.manual_seed(0)
        model = FAMILIES["gpt2"]().train()
        lab = wrapped(model, chunked_loss=chunked)
        arguments = TrainingArguments(
            str(tmp_path),
            max_steps=2,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=2,  # so that the loss is a sum over the tokens of both, see loss_function
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=bf16,
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data, compute_metrics=seen)
        trainer.train()
        found = trainer.evaluate()
        assert found["eval_shape"] == WORDS
        logged = [one["loss"] for one in trainer.state.log_history if "loss" in one]
        losses.append(torch.tensor([*logged, found["eval_loss"]]))
        assert any("The loss is computed in" in text for text in said(lab)) == chunked
        lab.unwrap()
    assert len(losses[0]) == 3
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-3 if bf16 else 1e-5, atol=0)


def test_parity_looks_at_the_graph_that_trains():
    torch.manual_seed(0)
    model = FAMILIES["gpt2"]().train()
    lab = wrapped(model)

    def step():
        loss = model(**batch()).loss
        loss.backward()
        model.zero_grad(set_to_none=True)
        return loss

    lab.step(step, memory=False, progress=False)
    table = lab.parity(progress=False).table()
    made = table[(table["module"] == "lm_head") & (table["kind"] == "output")]
    assert set(made["verdict"]) == {"not compared"}
    assert "differs" not in set(table["verdict"])
    lab.unwrap()


def test_of_other_batch_sizes_and_switched_off_again():
    eager, model = readers(FORMS["mean"])
    lab = wrapped(model)
    same_steps(lab, eager)
    few = {name: one[:1, :7] for name, one in batch().items()}
    torch.testing.assert_close(lab.module(**few)[0], eager(**few)[0], rtol=1e-5, atol=0)
    lab.set(chunked_loss=False)
    found, expected = (one(**few)[1] for one in (lab.module, eager))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    lab.unwrap()


@pytest.mark.parametrize(
    "options",
    [{"static_shape": True}, {"memory_level": 1}, {"symbolic_shape_inference": False}, {"opset": 14}],
    ids=lambda options: next(iter(options)),
)
def test_beside_other_switches(options):
    torch.manual_seed(0)
    eager = FAMILIES["gpt2"]().train()
    lab = wrapped(copy.deepcopy(eager), **options)
    (loss, found), (expected_loss, expected) = (trained(one, **batch()) for one in (lab.module, eager))
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=0)
    agree(found, expected)
    lab.unwrap()


def test_an_export_from_the_disk_cache_has_it_too(tmp_path):
    torch.manual_seed(0)
    eager = FAMILIES["llama"]().train()
    for _ in range(2):
        lab = wrapped(copy.deepcopy(eager), export_cache_dir=str(tmp_path))
        (loss, found), (expected_loss, expected) = (trained(one, **batch()) for one in (lab.module, eager))
        torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=0)
        agree(found, expected)
        assert sum("never exist" in text for text in said(lab)) == 1
        lab.unwrap()
    assert any(tmp_path.iterdir())


# --- what stays as it is ------------------------------------------------------------------------------------------

OBSTACLES = {
    "label smoothing": (
        lambda logits, labels, _: F.cross_entropy(rows(logits), labels.reshape(-1), label_smoothing=0.1),
        "label smoothing",
    ),
    "one loss for each row": (
        lambda logits, labels, _: F.cross_entropy(rows(logits), labels.reshape(-1), reduction="none").mean(),
        "one loss for each row",
    ),
    "softcap": (
        lambda logits, labels, _: F.cross_entropy(rows(torch.tanh(logits)), labels.reshape(-1)),
        "Tanh stands between",
    ),
    "z-loss": (
        lambda logits, labels, _: (
            F.cross_entropy(rows(logits), labels.reshape(-1)) + 1e-4 * logits.exp().sum(-1).log().mean()
        ),
        "reads its logits, too",
    ),
    "some classes": (
        lambda logits, labels, _: F.cross_entropy(
            logits[..., : WORDS - 1].reshape(-1, WORDS - 1), labels.clamp(max=WORDS - 2).reshape(-1)
        ),
        "some classes are taken",
    ),
    "float64": (
        lambda logits, labels, _: F.cross_entropy(rows(logits.double()), labels.reshape(-1)),
        "float32",
    ),
    "no cross entropy": (
        lambda logits, labels, _: (logits - labels[..., None] / WORDS).square().mean(),
        "the graph has no cross entropy",
    ),
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_where_it_cannot_be_the_lab_says_why_and_trains_as_before(name):
    loss, why = OBSTACLES[name]
    eager, model = readers(loss)
    lab = wrapped(model)
    same_steps(lab, eager)
    warned = [message.text for message in lab.messages if message.level == "WARNING"]
    assert [text for text in warned if text.startswith("chunked_loss") and why in text], warned
    found, expected = (one(**batch())[1] for one in (lab.module, eager))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    lab.unwrap()


def test_a_loss_outside_of_the_model_is_not_seen():
    torch.manual_seed(0)
    lab = wrapped(FAMILIES["llama"]().train())
    ids = batch()["input_ids"]
    logits = lab.module(input_ids=ids).logits
    F.cross_entropy(rows(logits), ids.reshape(-1)).backward()
    assert any("with_loss" in text for text in said(lab))
    lab.unwrap()


def test_without_the_switch_nothing_is_looked_for():
    torch.manual_seed(0)
    lab = wrapped(FAMILIES["llama"]().train(), chunked_loss=False)
    assert lab.module(**batch()).logits.shape == (BATCH, LENGTH, WORDS)
    assert not [text for text in said(lab) if "chunked" in text or "blocks" in text]
    lab.unwrap()


def test_a_block_is_as_large_as_the_weight_but_not_too_small():
    assert rows_of_block(1024) == 1024
    assert rows_of_block(8) == 256
