"""Models that are broken on purpose: a tiny BERT or GPT-2 with one fault, in a module that is known."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import small_transformers
import torch
from torch import nn

BERT_PLACE = "bert.encoder.layer.1.intermediate"
GPT_PLACE = "transformer.h.1.mlp"

draws = 0
"""A global variable that one of the faults changes."""


@dataclass(frozen=True)
class Broken:
    """A model with its batch, and where its fault is: a path, or "" for the model itself."""

    model: nn.Module
    batch: Any
    guilty: str


def bert() -> nn.Module:
    return small_transformers.bert(layers=3, words=100, max_position_embeddings=32)


def gpt2() -> nn.Module:
    return small_transformers.gpt2(layers=3, words=100, n_positions=32)


def tokens() -> dict[str, torch.Tensor]:
    return small_transformers.batch_of(words=100, first=5, mask=True)


class Faulty(nn.Module):
    """A module of a model, with a fault after it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fault(self.inner(x))

    def fault(self, y: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def in_bert(kind: type[Faulty]) -> Broken:
    model = bert()
    layer = model.bert.encoder.layer[1]
    layer.intermediate = kind(layer.intermediate)
    return Broken(model, tokens(), BERT_PLACE)


def in_gpt2(kind: type[Faulty]) -> Broken:
    model = gpt2()
    block = model.transformer.h[1]
    block.mlp = kind(block.mlp)
    return Broken(model, tokens(), GPT_PLACE)


# --- operators -----------------------------------------------------------------------------------------------------


class ReadsMemoryByLayout(Faulty):
    """as_strided over what is a part of other memory."""

    def fault(self, y):
        part = y[:, 1:]
        return part.as_strided(part.shape, part.stride()).sum() + y


class OperatorWithoutRule(Faulty):
    """An operator of one's own that returns a list, which has no form in ONNX and cannot be a node."""

    def fault(self, y):
        return torch.cat(torch.ops.ortlab_tests.halves(y), -1)


class OperatorWithoutGradient(Faulty):
    """An operator that PyTorch itself cannot differentiate."""

    def fault(self, y):
        return torch.special.zeta(y.abs() + 1.5, torch.ones(()))


class OwnOperatorWithoutGradient(Faulty):
    """An operator of one's own for which no gradient was registered."""

    def fault(self, y):
        return torch.ops.ortlab_tests.doubled(y)


class WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(_ctx, x):
        return x * 2

    @staticmethod
    def backward(_ctx, gradient):
        return gradient * 3


class FunctionWithWrongBackward(Faulty):
    """An autograd Function whose backward is wrong; a pre-flight can only say that nothing checks it."""

    def fault(self, y):
        return WrongBackward.apply(y)


# --- values of the data ----------------------------------------------------------------------------------------------


class Branch(Faulty):
    def fault(self, y):
        if y.mean() > 0:
            return y * 2
        return y


class Loop(Faulty):
    def fault(self, y):
        while y.abs().max() > 0.1:
            y = y / 2
        return y


class Item(Faulty):
    def fault(self, y):
        return y / (y.abs().max().item() + 1.0)


class Float(Faulty):
    def fault(self, y):
        return y * float(y.std())


class ToList(Faulty):
    def fault(self, y):
        return y * max(y.detach().amax((1, 2)).tolist())


class Numpy(Faulty):
    def fault(self, y):
        return y * float(y.detach().cpu().numpy().std())


class TryOnValues(Faulty):
    def fault(self, y):
        try:
            if torch.isnan(y).any():
                raise ValueError("nan")  # noqa: TRY301 - the fault
        except ValueError:
            y = torch.nan_to_num(y)
        return y


class CountOfData(Faulty):
    def fault(self, y):
        return y / (1 + int((y > 0).sum()))


class RandomOfPython(Faulty):
    def fault(self, y):
        return y * 2 if random.random() < 0.5 else y


class RandomOfTorch(Faulty):
    def fault(self, y):
        return y * 2 if torch.rand(()) < 0.5 else y


# --- state ---------------------------------------------------------------------------------------------------------


class Counter(Faulty):
    """A forward that counts its calls, and computes with the count."""

    calls = 0

    def fault(self, y):
        self.calls += 1
        return y / self.calls


class History(Faulty):
    """A forward that keeps what it has seen."""

    def __init__(self, inner):
        super().__init__(inner)
        self.seen = []

    def fault(self, y):
        self.seen.append(len(self.seen))
        return y * (1 + len(self.seen))


class Global(Faulty):
    def fault(self, y):
        global draws  # noqa: PLW0603 - the fault
        draws += 1
        return y * draws


class OwnStatistics(Faulty):
    """A history that is kept in a buffer, which it makes longer."""

    def __init__(self, inner):
        super().__init__(inner)
        self.register_buffer("history", torch.zeros(1))

    def fault(self, y):
        self.history = torch.cat([self.history, y.detach().mean().reshape(1)])
        return y - self.history.mean()


class WritesWithoutGradient(Faulty):
    def fault(self, y):
        y = y * 1.0
        with torch.no_grad():
            y.clamp_(max=0.5)
        return y


class WritesThroughDiagonal(Faulty):
    def fault(self, y):
        flat = y * 1.0
        view = flat.diagonal(1)
        view.mul_(3)
        return flat + y


class AssignsData(Faulty):
    def fault(self, y):
        z = y * 1.0
        z.data = z.data.clamp(min=0)
        return z


# --- what a graph cannot hold ----------------------------------------------------------------------------------------


class Sparse(Faulty):
    def fault(self, y):
        return (y * (y > 0)).to_sparse().to_dense() + y


class TensorHook(Faulty):
    def fault(self, y):
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * 0.5)
        return y


class Checkpointed(Faulty):
    def fault(self, y):
        from torch.utils.checkpoint import checkpoint

        return checkpoint(torch.tanh, y, use_reentrant=True)


class FailsItself(Faulty):
    def fault(self, y):
        return y @ torch.ones(3, 3)


class Quantized(Faulty):
    """Values of a quantised dtype, which no graph of ONNX Runtime trains."""

    def fault(self, y):
        return torch.quantize_per_tensor(y, 0.1, 0, torch.qint8).dequantize() + y


class Float8(Faulty):
    """A dtype that ONNX Runtime 1.19.2 does not compute with."""

    def fault(self, y):
        return y.to(torch.float8_e4m3fn).to(y.dtype)


def on_meta() -> Broken:
    model = bert()
    model.bert.encoder.layer[1].output.dense.to("meta")
    return Broken(model, tokens(), "bert.encoder.layer.1.output.dense")


def backward_hook() -> Broken:
    model = bert()
    model.bert.encoder.layer[1].attention.register_full_backward_hook(lambda _module, given, _taken: given)
    return Broken(model, tokens(), "bert.encoder.layer.1.attention")


def forward_hook() -> Broken:
    model = gpt2()
    model.transformer.h[2].register_forward_hook(_scaled_by_item)
    return Broken(model, tokens(), "transformer.h.2")


def _scaled_by_item(_module: nn.Module, _args: Any, output: Any) -> Any:
    hidden = output[0] if isinstance(output, tuple) else output
    scaled = hidden / (1 + hidden.abs().max().item())
    return (scaled, *output[1:]) if isinstance(output, tuple) else scaled


class Returns(nn.Module):
    """A model that returns something beside its loss."""

    def __init__(self, extra: Callable[[], object]) -> None:
        super().__init__()
        self.model = bert()
        self.extra = extra

    def forward(self, **batch: torch.Tensor) -> tuple[object, ...]:
        return self.model(**batch).loss, self.extra()


def returns_generator() -> Broken:
    return Broken(Returns(lambda: (number for number in range(3))), tokens(), "")


class Chain:
    """An object that holds itself."""

    def __init__(self) -> None:
        self.next = self


def returns_itself() -> Broken:
    return Broken(Returns(Chain), tokens(), "")


class TakesAnything(nn.Module):
    """A model that takes a generator."""

    def __init__(self) -> None:
        super().__init__()
        self.model = bert()

    def forward(self, stream: Any) -> torch.Tensor:
        ids = torch.stack(list(stream)) if not isinstance(stream, torch.Tensor) else stream
        return self.model(input_ids=ids, labels=ids).loss


def takes_generator() -> Broken:
    return Broken(TakesAnything(), (iter(torch.randint(5, 100, (2, 8))),), "")


BROKEN: dict[str, Callable[[], Broken]] = {
    **{
        kind.__name__: lambda kind=kind: in_bert(kind)
        for kind in (
            *(ReadsMemoryByLayout, OperatorWithoutRule, OperatorWithoutGradient, OwnOperatorWithoutGradient),
            *(FunctionWithWrongBackward, Branch, Loop, Item, ToList, Numpy, TryOnValues, RandomOfPython),
            *(
                Counter,
                Global,
                OwnStatistics,
                WritesWithoutGradient,
                WritesThroughDiagonal,
                AssignsData,
                Sparse,
            ),
            *(TensorHook, Checkpointed, FailsItself, Quantized, Float8),
        )
    },
    **{
        kind.__name__: lambda kind=kind: in_gpt2(kind)
        for kind in (Float, CountOfData, RandomOfTorch, History)
    },
    **{
        make.__name__: make
        for make in (on_meta, backward_hook, forward_hook, returns_generator, returns_itself, takes_generator)
    },
}
"""Every broken model, by what is broken in it."""


def define_operators() -> torch.library.Library:
    """Define the operators of one's own; they live as long as what is returned."""
    library = torch.library.Library("ortlab_tests", "DEF")
    library.define("halves(Tensor x) -> Tensor[]")
    library.impl("halves", lambda x: list(x.chunk(2, -1)), "CompositeImplicitAutograd")
    if not hasattr(torch.ops.ortlab_tests, "doubled"):
        torch.library.custom_op("ortlab_tests::doubled", _doubled, mutates_args=())
    return library


def _doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2
