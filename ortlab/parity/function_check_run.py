"""Hold the backwards of a model's own `autograd.Function` classes against finite differences of their forwards.

PyTorch and ONNX Runtime run the same backward, so a run that compares them cannot see that it is wrong: both train in
the same wrong way. This asks the forward instead.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.autograd import gradcheck
from torch.autograd.gradcheck import GradcheckError

from ortlab.engine.functions.export import functions
from ortlab.engine.random_state import RandomState
from ortlab.errors import StepError
from ortlab.parity.parity import FunctionCheck, FunctionReport

_SEED: Final = 1234
_OF_TORCH: Final = ("torch", "onnxruntime", "ortlab")


def check_functions(model: torch.nn.Module, *args: Any, **kwargs: Any) -> FunctionReport:
    """Check the backward of each `torch.autograd.Function` that a model's forward calls.

    A copy of the model runs once in PyTorch. Each Function is then run alone, on the first inputs it got, in float64,
    and `torch.autograd.gradcheck` compares its backward with finite differences along random directions. The model and
    the random state stay as they are.

    Parameters
    ----------
    model
        The model, wrapped or not.
    *args, **kwargs
        A batch, as its forward takes it.

    Returns
    -------
    FunctionReport
        A difference is a fault, or meant: a straight-through estimator and a reversal of gradients differ on purpose.

    Raises
    ------
    StepError
        If the forward itself fails.

    Examples
    --------
    >>> ortlab.parity.check_functions(model, **batch)
    """
    random = RandomState.read()
    calls: dict[type, list[tuple[Any, ...]]] = {}
    try:
        with torch.enable_grad(), _recorded(calls):
            copy.deepcopy(model)(*args, **kwargs)  # the copy of a wrapped model is a plain one
    except Exception as error:
        raise StepError(
            f"The forward of {type(model).__name__} failed: {type(error).__name__}: {error}",
            fix="Call it with a batch that it takes: ortlab.parity.check_functions(model, **batch).",
        ) from error
    else:
        with torch.enable_grad():
            checks = tuple(_check(kind, made) for kind, made in calls.items())
    finally:
        random.put_back()
    return FunctionReport(type(model).__name__, checks)


@contextmanager
def _recorded(calls: dict[type, list[tuple[Any, ...]]]) -> Iterator[None]:
    """Keep the arguments of each Function's forward; `apply` looks it up in the class at each call."""
    found = [
        (kind, vars(kind).get("forward"), kind.forward)
        for kind in functions()
        if kind.__module__.partition(".")[0] not in _OF_TORCH
    ]
    for kind, _, forward in found:
        kind.forward = staticmethod(_recording(kind, forward, calls))  # type: ignore[method-assign]
    try:
        yield
    finally:
        for kind, own, _ in found:
            if own is None:  # it is its base's
                del kind.forward
            else:
                kind.forward = own  # type: ignore[method-assign]


def _recording(
    kind: Any, forward: Callable[..., Any], calls: dict[type, list[tuple[Any, ...]]]
) -> Callable[..., Any]:
    takes_context = kind.setup_context is torch.autograd.Function.setup_context

    def recorded(*args: Any) -> Any:
        if takes_context and getattr(type(args[0]), "_forward_cls", kind) is not kind:
            return forward(*args)  # called by the forward of another Function, which has its own backward
        inputs = args[1:] if takes_context else args
        kept = inputs if calls.get(kind) else tuple(_detached(one) for one in inputs)
        calls.setdefault(kind, []).append(kept)
        return forward(*args)

    return recorded


def _detached(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _check(kind: Any, calls: list[tuple[Any, ...]]) -> FunctionCheck:
    home = "" if kind.__module__ == "__main__" else f"{kind.__module__}."
    name, inputs = f"{home}{kind.__qualname__}", calls[0]
    places = [
        place
        for place, one in enumerate(inputs)
        if isinstance(one, torch.Tensor) and one.is_floating_point() and one.numel()
    ]
    if not places:
        return FunctionCheck(name, len(calls), "not checked", "none of its inputs is a floating-point tensor")

    def alone(*tensors: torch.Tensor) -> Any:
        given = dict(zip(places, tensors, strict=True))
        torch.manual_seed(_SEED)  # dropout draws one mask in all evaluations
        return kind.apply(*(given[n].clone() if n in given else one for n, one in enumerate(inputs)))

    tensors = [inputs[place].double().requires_grad_() for place in places]
    try:
        gradcheck(alone, tensors, fast_mode=True, nondet_tol=1e-9, check_undefined_grad=False)
    except GradcheckError as error:
        return FunctionCheck(name, len(calls), "differs", _in_words(str(error)))
    except Exception as error:  # noqa: BLE001 - a kernel that takes float32 only may raise anything
        reason = f"it does not run alone in float64: {type(error).__name__}: {error}"
        return FunctionCheck(name, len(calls), "not checked", reason.splitlines()[0])
    return FunctionCheck(name, len(calls), "agrees")


def _in_words(message: str) -> str:
    """Say what torch found: "Jacobian mismatch for output 0 with respect to input 0, numerical:... analytical:..."."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    found = re.match(
        r"Jacobian mismatch for output (\d+) with respect to input (\d+),\s*numerical:(\S+)\s+analytical:(\S+)",
        " ".join(lines),
    )
    if found is None:
        return " ".join(lines[:3])
    output, given, forward, backward = found.groups()
    return f"output {output}, input {given}: its forward changes by {forward}, its backward says {backward}"
