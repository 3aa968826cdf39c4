"""Models of which only some sub-modules are wrapped: four steps as PyTorch trains them, and ORT ran just these."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import pytest
import small_transformers
import torch
from differences import Differences
from torch import nn
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
)

pytestmark = [
    pytest.mark.zoo,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Exporting aten..index operator of advanced indexing:UserWarning"),
    pytest.mark.filterwarnings("ignore:Constant folding - Only steps=1 can be constant folded:UserWarning"),
]

STEPS = 4


@dataclass
class Case:
    """A model, a batch of it, the parts to wrap, and what is to come of that.

    Attributes
    ----------
    calls
        How often each part is called in a step.
    """

    model: nn.Module
    batch: dict
    only: object
    calls: dict[str, int]
    options: dict = field(default_factory=dict)


def tokens(rows=3, length=7, vocabulary=50):
    return torch.randint(0, vocabulary, (rows, length))


def language(model, **rest):
    ids = tokens()
    return {"input_ids": ids, "labels": ids.clone(), **rest}


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def bert_encoder():
    mask = torch.ones(3, 7, dtype=torch.long)
    mask[1, 5:] = 0
    model = small_transformers.bert(width=16, words=50)
    return Case(model, language(model, attention_mask=mask), "bert.encoder", {"bert.encoder": 1})


def gpt2_two_blocks():
    model = small_transformers.gpt2(layers=3, width=16, words=50, n_positions=16)
    paths = ["transformer.h.0", "transformer.h.2"]
    return Case(model, {**language(model), "use_cache": False}, paths, dict.fromkeys(paths, 1))


def albert_shared_layer():
    config = AlbertConfig(
        vocab_size=50,
        embedding_size=8,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=32,
        **NO_DROPOUT,
    )
    model = AlbertForMaskedLM(config)
    group = model.albert.encoder.albert_layer_groups[0]
    return Case(model, language(model), group, {"albert.encoder.albert_layer_groups.0": 3})


def t5_stacks():
    model = small_transformers.t5(layers=1, width=16, words=50, pad_token_id=0)
    return Case(model, language(model), ["decoder", "encoder"], {"encoder": 1, "decoder": 1})


class Adaptive(nn.Module):
    """Goes through its encoder as often as the data wants: no graph can hold that, but one of the encoder can."""

    def __init__(self):
        super().__init__()
        self.into = nn.Linear(4, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(8, 3)
        self.rounds = []

    def forward(self, x, labels):
        hidden, rounds = self.into(x), 0
        while rounds < 1 or (x.mean() > 0 and rounds < 3):
            hidden = self.encoder(hidden)
            rounds += 1
        self.rounds.append(rounds)
        return nn.functional.cross_entropy(self.out(hidden.mean(1)), labels)


def control_flow():
    return Case(
        Adaptive(),
        {"x": torch.randn(5, 6, 4), "labels": torch.tensor([0, 1, 2, 1, 0])},
        ["encoder"],
        {"encoder": 3},
    )


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3),
        )
        self.head = nn.Linear(8 * 9, 4)

    def forward(self, x, labels):
        features = nn.functional.relu(self.features(x), inplace=True)
        return nn.functional.cross_entropy(self.head(features.flatten(1)), labels)


def cnn_features():
    batch = {"x": torch.randn(6, 3, 10, 10), "labels": torch.tensor([0, 1, 2, 3, 1, 0])}
    return Case(Convolutional(), batch, "features", {"features": 1})


def cnn_head():
    batch = {"x": torch.randn(6, 3, 10, 10), "labels": torch.tensor([0, 1, 2, 3, 1, 0])}
    return Case(Convolutional(), batch, "head", {"head": 1})


class Arguments(nn.Module):
    """A part with every kind of input, used twice: first without an input that requires a gradient, then with one."""

    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x, nested, bias=None, *, doubled=False, pairs=None):
            first, (second, third) = nested
            hidden = torch.tanh(self.linear(x)) * self.scale + first * second
            if bias is not None:
                hidden = hidden + bias
            if doubled:
                hidden = hidden * 2
            if pairs is not None:
                hidden = hidden - pairs["a"] * pairs["b"]
            return hidden, {"sum": hidden.sum(-1), "third": third + hidden, "none": None}

    def __init__(self):
        super().__init__()
        self.part = self.Part()
        self.bias = nn.Parameter(torch.randn(4))
        self.out = nn.Linear(4, 1)

    def forward(self, x, mask):
        hidden, rest = self.part(x, (x, (x, x)))
        hidden, more = self.part(
            hidden,
            (rest["third"], [hidden * 0.5, x]),
            self.bias,
            doubled=bool(mask.all()),
            pairs={"a": hidden, "b": mask},
        )
        assert more["none"] is None
        return self.out(hidden).pow(2).mean() + rest["sum"].mean() + more["third"].abs().mean()


def every_input():
    mask = torch.tensor([[True, False, True, True]])
    return Case(Arguments(), {"x": torch.randn(5, 4), "mask": mask}, "part", {"part": 2})


class TwoParts(nn.Module):
    """A frozen trunk in eval mode between parts that train: gradients have to get through it."""

    def __init__(self):
        super().__init__()
        self.prompt = nn.Linear(4, 8)
        self.trunk = nn.Sequential(
            nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.5), nn.Linear(8, 8)
        )
        self.trunk.requires_grad_(False)
        self.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

    def train(self, mode=True):
        super().train(mode)
        self.trunk.eval()
        return self

    def forward(self, x, labels):
        return nn.functional.cross_entropy(self.head(self.trunk(self.prompt(x))), labels)


def frozen_trunk():
    batch = {"x": torch.randn(6, 4), "labels": torch.tensor([0, 1, 2, 1, 0, 2])}
    return Case(TwoParts(), batch, ["trunk", "head"], {"trunk": 1, "head": 1})


def frozen_start():
    """Nothing requires a gradient in the part, nor in its input: what comes out must not, either."""
    case = frozen_trunk()
    case.model.prompt.requires_grad_(False)
    case.only, case.calls = "trunk", {"trunk": 1}
    return case


CASES = (
    bert_encoder,
    gpt2_two_blocks,
    albert_shared_layer,
    t5_stacks,
    control_flow,
    cnn_features,
    cnn_head,
    every_input,
    frozen_trunk,
    frozen_start,
)


def loss_of(output):
    return output if isinstance(output, torch.Tensor) else output.loss


def gradients(module):
    return {name: one.grad for name, one in module.named_parameters() if one.grad is not None}


@pytest.fixture
def inference_runs(monkeypatch):
    """Count how often ONNX Runtime's inference sessions run."""
    from ortlab.engine import load

    load()
    from onnxruntime.training.ortmodule._execution_agent import InferenceAgent

    original, runs = InferenceAgent.run_forward, []

    def run(self, *args):
        runs.append(args)
        return original(self, *args)

    monkeypatch.setattr(InferenceAgent, "run_forward", run)
    return runs


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_four_steps_agree_with_pytorch(make, wrap, session_runs, inference_runs):
    torch.manual_seed(3)
    case = make()
    model = case.model.train()
    reference = copy.deepcopy(model)
    keys = list(model.state_dict())
    lab = wrap(model, only=case.only, **case.options)
    assert list(model.state_dict()) == keys
    optimizers = [
        torch.optim.SGD(module.parameters(), lr=1e-2, momentum=0.9) for module in (reference, model)
    ]
    found = Differences()
    forwards = 0
    for step in range(1, STEPS + 1):
        expected, actual = (loss_of(module(**case.batch)) for module in (reference, model))
        coverage = lab.status.coverage
        calls = {part.path: part.calls for part in coverage.parts}
        assert calls == {part.path: part.on_ort for part in coverage.parts}
        if make is not control_flow:
            assert calls == case.calls
        forwards += sum(calls.values())
        frozen = make is frozen_start
        assert session_runs["forward"] == (0 if frozen else forwards), "ONNX Runtime ran something else"
        assert len(inference_runs) == (forwards if frozen else 0)
        assert lab.status.executed_by == "ort parts"
        found.compare("loss", {"": expected.detach()}, {"": actual.detach()})
        expected.backward()
        actual.backward()
        assert session_runs["backward"] == (0 if frozen else forwards), "the backward was not ONNX Runtime's"
        assert gradients(reference)
        found.compare("gradient", gradients(reference), gradients(model))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        found.compare("parameter", dict(reference.named_parameters()), dict(model.named_parameters()))
        found.compare("buffer", dict(reference.named_buffers()), dict(model.named_buffers()))
        assert not found.beyond(), step
        if make is control_flow:
            case.batch["x"] = -case.batch["x"]
    if make is control_flow:
        assert sorted(model.rounds) == [1, 1, 3, 3]
        assert model.rounds == reference.rounds
