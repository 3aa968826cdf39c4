"""ORT against PyTorch over four optimizer steps: loss, gradients, parameters and buffers."""

from __future__ import annotations

import copy

import pytest
import torch
import zoo_models as models

import ortlab

pytestmark = [
    pytest.mark.zoo,
    # ORTModule looks at every attribute of the model; transformers announces the end of one of them.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    # What torch's exporter says about models of transformers and about batch normalisation, which ortlab takes care of.
    pytest.mark.filterwarnings("ignore:Exporting aten..index operator of advanced indexing:UserWarning"),
    pytest.mark.filterwarnings("ignore:Constant folding - Only steps=1 can be constant folded:UserWarning"),
    pytest.mark.filterwarnings("ignore:ONNX Preprocess - Removing mutation from node aten..add_:UserWarning"),
    pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:Exporting a model to ONNX with a batch_size other than 1:UserWarning"),
]

TOLERANCE = 1e-5
STEPS = 4
FLOOR = 1e-2
"""Part of the largest entry of a kind (all gradients of a step, all parameters) below which a tensor of that kind is
compared with that entry instead of with its own: the gradient of a bias in front of a normalisation, or of a key's bias
in an attention, is zero but for rounding, and rounding has no relative accuracy."""

WITH_ATTENTION = (
    models.bert,
    models.gpt2,
    models.gpt2_without_mask,
    models.gpt2_padded,
    models.llama,
    models.t5,
    models.vit,
    models.wav2vec2,
)
WITHOUT_CHOICE = (
    models.deberta,
    models.bloom,
    models.cnn_with_batch_norm,
    models.grouped_convolution,
    models.transposed_convolution,
    models.lstm,
    models.attention_layer,
    models.transformer_encoder,
)
CASES = [
    *(
        pytest.param(build, attention, id=f"{build.__name__}-{attention}")
        for build in WITH_ATTENTION
        for attention in ("eager", "sdpa")
        # T5 has it since transformers 5.
        if attention == "eager" or build is not models.t5 or models.t5_has_sdpa()
    ),
    *(pytest.param(build, "eager", id=build.__name__) for build in WITHOUT_CHOICE),
]


class Worst:
    """The largest relative difference seen, and where."""

    def __init__(self):
        self.value, self.place = 0.0, ""

    def compare(self, kind, expected, actual):
        """Compare tensors by name; each relative to its own largest entry, or to `FLOOR` of the largest of all."""
        assert expected.keys() == actual.keys()
        sizes = {
            name: tensor.double().abs().max().item() for name, tensor in expected.items() if tensor.numel()
        }
        largest = max(sizes.values(), default=0.0)
        for name, own in sizes.items():
            difference = (expected[name].double() - actual[name].double()).abs().max().item()
            relative = difference / max(own, FLOOR * largest, 1e-30)
            if not relative <= self.value:  # a NaN is worse than anything
                self.value, self.place = relative, f"{kind} {name}"


def loss_of(output):
    return output if isinstance(output, torch.Tensor) else output.loss


def gradients(module):
    return {
        name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None
    }


@pytest.fixture
def wrap():
    """Return `ortlab.wrap`, whose fallback is off; the labs are unwrapped after the test."""
    labs = []

    def wrap(model):
        labs.append(ortlab.wrap(model))
        assert not labs[-1].options.fallback
        return labs[-1]

    yield wrap
    for lab in labs:
        lab.unwrap()


@pytest.mark.parametrize(("build", "attention"), CASES)
def test_four_steps_agree_with_pytorch(build, attention, wrap, record_property):
    torch.manual_seed(0)
    case = build(attention)
    reference = copy.deepcopy(case.model).train()
    lab = wrap(case.model.train())
    optimizers = [
        torch.optim.SGD(module.parameters(), lr=1e-2, momentum=0.9) for module in (reference, case.model)
    ]
    worst = Worst()
    for _ in range(STEPS):
        expected, actual = loss_of(reference(**case.batch)), loss_of(case.model(**case.batch))
        expected.backward()
        actual.backward()
        assert lab.status.executed_by == "ort"
        assert lab.status.reason == "first call in this mode", "a step was exported anew"
        assert "ORTModuleFunction" in type(actual.grad_fn).__name__, "ONNX Runtime did not execute this step"
        worst.compare("loss", {"": expected.detach()}, {"": actual.detach()})
        worst.compare("gradient of", gradients(reference), gradients(case.model))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        worst.compare("parameter", dict(reference.named_parameters()), dict(case.model.named_parameters()))
        worst.compare("buffer", dict(reference.named_buffers()), dict(case.model.named_buffers()))
    record_property("worst_relative_difference", f"{worst.value:.1e} ({worst.place})")
    print(f"{worst.value:.1e} {worst.place}")
    assert worst.value <= TOLERANCE, worst.place


def test_output_has_the_type_that_pytorch_gives(wrap):
    torch.manual_seed(0)
    case = models.bert("sdpa")
    expected = case.model.train()(**case.batch)
    wrap(case.model)
    actual = case.model(**case.batch)
    assert type(actual) is type(expected)
    assert actual.loss.item() == pytest.approx(expected.loss.item(), rel=TOLERANCE)
    assert actual.logits.shape == actual["logits"].shape == expected.logits.shape


class Attention(torch.nn.Module):
    """Nothing but scaled dot product attention with dropout."""

    def __init__(self, dropout):
        super().__init__()
        self.values = torch.nn.Parameter(torch.ones(1))
        self.dropout = dropout

    def forward(self, x):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x * self.values, dropout_p=self.dropout)


def test_attention_drops_as_much_as_pytorch(wrap):
    """With equal keys and values of one, each output is the kept share of the weights, scaled back up."""
    dropout, keys, rows = 0.3, 50, 4000
    torch.manual_seed(5)
    x = torch.ones(1, 1, keys, 4)
    attention = wrap(Attention(dropout).train()).module
    outputs = torch.stack([attention(x)[0, 0, :, 0].detach() for _ in range(rows // keys)]).flatten()
    deviation = (dropout / (1 - dropout) / keys) ** 0.5  # of one row
    assert abs(outputs.mean() - 1) < 5 * deviation / rows**0.5
    assert outputs.std().item() == pytest.approx(deviation, rel=0.1)
