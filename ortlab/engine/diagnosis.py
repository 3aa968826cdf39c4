"""Why a build or a run failed, in the user's words: their own forward, their outputs, or what ORT cannot express."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from ortlab.engine import calls
from ortlab.engine.callback_error import take_error
from ortlab.engine.exhaustion import place, ran_out
from ortlab.engine.random_state import RandomState
from ortlab.errors import BuildError, ExecutionError, OrtlabError


class ForwardError(BuildError):
    """The model's own forward fails or returns nothing that can be trained, in PyTorch as well: never falls back."""


class OutOfMemoryError(ExecutionError):
    """ONNX Runtime had no memory left for a step; nobody asks what PyTorch would say to the same call."""


_LESS: Final = (
    "Take a smaller batch, or keep less for the backward: lab.set(memory_level=1). lab.find_batch_size(...) finds the "
    "largest batch that fits; on a GPU `nvidia-smi` names other processes that hold memory."
)


def explain_build_failure(
    error: Exception,
    module: torch.nn.Module,
    original_forward: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> OrtlabError:
    """Find out why a build failed and return the error to raise from what ORTModule raised.

    The module's own forward is run once more in PyTorch, without gradients and with its buffers put back, because
    1.19.2 reports the user's exception, an output it cannot flatten and an operator it cannot export alike.
    """
    said = _said_by_ortlab(error)
    if said is not None:
        return said
    own = own_fault(module, original_forward, args, kwargs)
    if own is not None:
        return own
    message = _message(error)
    operator = re.search(r"operator '?([\w:]+)'?.{0,40}(?:not supported|unsupported)", message)
    gradient = re.search(
        r"gradient (?:builder|definition)[^.\n]*?(?:for|op)[ :]+(\w+)", message, re.IGNORECASE
    )
    if "two nodes with same node name (_recompute)" in message:
        return BuildError(
            "These memory plans cannot be applied together.",
            why="They recompute several nodes that have no name, and 1.19.2 gives their copies the same one.",
            fix="Use memory_level=1, which leaves them out, or other plans: lab.plan() lists all.",
        )
    if operator:
        what = f"ONNX has no form for the operator {operator.group(1)}, so the model cannot be exported."
    elif gradient:
        what = f"ONNX Runtime has no gradient for the operator {gradient.group(1)}."
    else:
        what = f"ONNX Runtime could not build {type(module).__name__}: {_first_line(message)}"
    return BuildError(
        what,
        why=f"ORTModule raised {type(_root(error)).__name__}; plain PyTorch runs the same call.",
        fix="Wrap a part of the model that does not use it, or allow PyTorch to step in: lab.set(fallback=True).",
    )


def explain_execution_failure(error: Exception) -> BaseException:
    """Return what to raise for a failed run: what a callback left, that memory ran out, or ORT's message in short."""
    kept = take_error()
    if kept is not None:
        return kept
    if ran_out(error):
        torch.cuda.empty_cache()  # for what comes next, a pool of ONNX Runtime's own among it; nothing without CUDA
        where = place(error)
        return OutOfMemoryError(
            f"Memory ran out while ONNX Runtime ran the model{where and f', {where}'}.",
            why=f"ONNX Runtime says: {_first_line(str(error))}",
            fix=_LESS,
        )
    return ExecutionError(
        f"ONNX Runtime failed while it ran the model: {_first_line(str(error)) or type(error).__name__}",
        why="This is the first line of ONNX Runtime's message; the exception's __cause__ has all of it.",
        fix="Run the same batch with engine='eager': if PyTorch can, the switches or ONNX Runtime are at fault.",
    )


def own_fault(
    module: torch.nn.Module,
    original_forward: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> ForwardError | None:
    """Run a module's own forward in PyTorch, and return what is wrong with the model or the batch; None if it runs.

    Gradients are off; buffers and random state are put back.
    """
    random = RandomState.read()
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    name = type(module).__name__
    try:
        with torch.no_grad():
            outputs = original_forward(*args, **kwargs)
    except Exception as fault:  # noqa: BLE001 - a user's forward may raise anything
        why, fix = calls.explain(fault, module, args, kwargs)
        fix = _LESS if ran_out(fault) else fix
        own = ForwardError(f"The forward of {name} failed: {type(fault).__name__}: {fault}", why=why, fix=fix)
        own.__cause__ = fault
        return own
    finally:
        random.put_back()
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
    if not any(True for _ in _tensors(outputs)):
        return ForwardError(
            f"The forward of {name} returned no tensor, but {_kind(outputs)}.",
            why="Only tensors can carry a loss and gradients.",
            fix="Return the loss or the outputs as tensors, in a tuple, a dict or a dataclass.",
        )
    return None


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from _tensors(getattr(value, name))


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _root(error: BaseException) -> BaseException:
    cause = error.__cause__ or error.__context__
    return error if cause is None else _root(cause)


def _said_by_ortlab(error: BaseException) -> OrtlabError | None:
    """Return what ortlab's own code in a forward has raised, which explains it best; None if nothing."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, OrtlabError):
            return link
        link = link.__cause__ or link.__context__
    return None


def _message(error: BaseException) -> str:
    chain: list[str] = []
    link: BaseException | None = error
    while link is not None:
        chain.append(str(link))
        link = link.__cause__ or link.__context__
    return "\n".join(chain)


def _first_line(message: str) -> str:
    """Return the line of a message that says something: the last that looks like "SomeError: ...", else the first."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    telling = [line for line in lines if re.match(r"[\w.]*(?:Error|Exception): \S", line)]
    return (telling or lines or [""])[-1 if telling else 0]
