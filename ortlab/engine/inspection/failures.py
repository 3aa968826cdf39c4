"""Why a module cannot be built, as findings: what it is before anything runs, its operators, and what an error says.

`Translation` watches torch's exporter. An operator that cannot be translated is noted and stands in for itself, so that
one export finds all of them; the export then fails at its end.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils.checkpoint import CheckpointFunction

from ortlab.engine.diagnosis import ForwardError, causes
from ortlab.errors import BuildError, OrtlabError
from ortlab.records.preflight import Finding, Kind, Level, Place

if TYPE_CHECKING:
    from ortlab.engine.inspection.places import Places


class Translation:
    """Reports what becomes of the nodes of one traced graph; see `untrained_operators.WATCHER`."""

    def __init__(self, places: Places, report: Callable[[Finding], None]) -> None:
        self._places = places
        self._report = report
        self._failure: BuildError | None = None
        self._doubtful: set[int] = set()
        # Operators of ONNX on the way of a gradient that ONNX Runtime may not train: obstacles if the gradient graph
        # cannot be built.
        self.untrained: list[tuple[frozenset[str], str, Place]] = []
        self.trained_by_torch: set[str] = set()  # operators that PyTorch runs and differentiates

    def called(self, node: Any) -> None:
        """Note an autograd Function that stays one."""
        name = node.pyname() if hasattr(node, "pyname") else node.kind()
        if name == CheckpointFunction.__name__:  # refused, or left to PyTorch as the user wished
            return
        self._report(
            Finding.of(
                Kind.FUNCTION,
                f"The autograd Function {name} runs as it is, in Python; nothing checks its backward.",
                self._places.of_node(node),
                "ortlab.parity.check_functions(model, ...) compares its backward with finite differences.",
            )
        )

    def left(self, node: Any, *, trained: bool) -> None:
        """Note an operator that PyTorch runs inside the graph."""
        if trained:
            self.trained_by_torch.add(node.kind())
        again = ", and once more in the backward" if trained else ""
        self._report(
            Finding.of(
                Kind.BY_TORCH,
                f"PyTorch runs {node.kind()} inside the graph{again}.",
                self._places.of_node(node),
            )
        )

    def without_gradient(self, node: Any, operators: set[str], why: str) -> None:
        """Note operators that ONNX Runtime may have no gradient for, and why PyTorch cannot run them."""
        self.untrained.append((frozenset(operators), f"{node.kind()} ({why})", self._places.of_node(node)))

    def failed(self, node: Any, error: Exception) -> None:
        """Note an operator that cannot be translated; what uses its result may fail only for that."""
        doubtful = any(one.unique() in self._doubtful for one in node.inputs())
        self._doubtful |= {one.unique() for one in node.outputs()}
        place = self._places.of_node(node)
        if doubtful and not _has_no_rule(error):
            return
        refusal = next((one for one in causes(error) if isinstance(one, BuildError)), None)
        finding = _no_rule(node, error, place) if refusal is None else _refusal(refusal, place)
        self._report(finding)
        self._failure = self._failure or refusal or BuildError(finding.what, why=str(error).strip())

    def finish(self) -> None:
        """End the export; raise BuildError if an operator could not be translated."""
        if self._doubtful:
            raise self._failure or BuildError("An operator could not be translated.")


def _has_no_rule(error: Exception) -> bool:
    return type(error).__name__ == "UnsupportedOperatorError"


def _no_rule(node: Any, error: Exception, place: Place) -> Finding:
    why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    reason = getattr(error, "not_a_call", "")
    what = f"ONNX has no form for {node.kind()}"
    if not _has_no_rule(error):
        what = f"{node.kind()} cannot be written in ONNX as it is used here ({why.rstrip('.')})"
    also = f", and PyTorch cannot run it inside the graph: {reason}" if reason else ""
    return Finding.of(
        Kind.NO_RULE, f"{what}{also}.", place, "Use another operator, or leave this module to PyTorch."
    )


def _refusal(error: BuildError, place: Place) -> Finding:
    if "checkpoint" in error.what:
        return Finding.of(Kind.CHECKPOINT, error.what, place, error.fix)
    what = " ".join(filter(None, (error.what, error.why)))
    return Finding.of(Kind.NO_RULE, what, place, error.fix)


# --- errors -------------------------------------------------------------------------------------------------------

_NODE: Final = re.compile(r"/_original_module(?:/[\w.]+)+")
"""Name of a node in an ONNX graph."""

_LINE: Final = re.compile(r" cannot be exported: (?P<where>.+), line (?P<line>\d+): ")
_BUFFERS: Final = re.compile(r"changes buffers: (?P<name>[^,]+?)(?:,.*)?\.$")

_HOOKED: Final = re.compile(r"(?P<module>[\w.]+)[^:]*? has a backward hook")

_KINDS: Final = (
    (r"^(Writing|Assigning|Reading a tensor)", Kind.WRITE),
    (r"^A random number that Python or numpy draws", Kind.RANDOM),
    (r"changes buffers", Kind.BUFFER),
    (r"returns something that is no tensor|returned no tensor", Kind.OUTPUT),
    (r"checkpoint", Kind.CHECKPOINT),
    (r"is on device|same device", Kind.DEVICE),
    (r"has no gradient for|gradient builder", Kind.NO_GRADIENT),
    (r"Half|float16|bfloat16|complex|[Dd]type", Kind.DTYPE),
)


def finding_of(error: BaseException, places: Places, translation: Translation) -> Finding:
    """Say what an error of a build means, and where it comes from."""
    what, fix = _words(error)
    if isinstance(error, ForwardError):
        if error.__cause__ is None:
            return Finding.of(Kind.OUTPUT, what, places.root, fix)
        return finding_of_forward(error.__cause__, places)
    hooked = _HOOKED.match(what)
    if hooked:
        return backward_hook(places.inside(hooked["module"]))
    kind = next((kind for pattern, kind in _KINDS if re.search(pattern, what)), Kind.BUILD)
    if kind is Kind.NO_GRADIENT and translation.untrained:
        operator, place = _untrained(what, translation)
        return Finding.of(kind, f"ONNX Runtime has no gradient for {operator}.", place, fix)
    place = places.root if kind is Kind.OUTPUT else _place_of(error, what, places)
    line = _LINE.search(what)
    if line:
        place = place._replace(where=f"{line['where']}:{line['line']}")
        what = what[: line.start()] + " cannot be exported."
    return Finding.of(kind, what, place, fix)


def _place_of(error: BaseException, what: str, places: Places) -> Place:
    """Find where an error comes from: a buffer or a node that it names, or the line that raised its first cause."""
    buffers = _BUFFERS.search(what.splitlines()[0])
    if buffers:
        return places.of_parameter(buffers["name"])
    node = next(filter(None, (_NODE.search(str(one)) for one in causes(error))), None)
    if node:
        return places.of_name(node[0])
    raised = (places.of_traceback(one.__traceback__) for one in reversed(list(causes(error))))
    return next((place for place in raised if place.where), places.root)


def finding_of_forward(error: BaseException, places: Places) -> Finding:
    """Say where a forward fails in PyTorch."""
    return Finding.of(
        Kind.FORWARD,
        f"The forward fails in PyTorch, too: {type(error).__name__}: {error}",
        places.of_traceback(error.__traceback__),
        "Correct the model or the batch; the model is untouched.",
    )


def _words(error: BaseException) -> tuple[str, str]:
    if isinstance(error, OrtlabError):
        says_more = re.search("returns something", error.what)
        return " ".join(filter(None, (error.what, error.why if says_more else ""))), error.fix
    return f"{type(error).__name__}: {str(error).strip() or 'no message'}".splitlines()[0], ""


def _untrained(what: str, translation: Translation) -> tuple[str, Place]:
    named = (one for one in translation.untrained if any(re.search(rf"\b{name}\b", what) for name in one[0]))
    return next(named, translation.untrained[0])[1:]


_SHORT = frozenset({torch.float16, torch.bfloat16})


def device_of(model: torch.nn.Module) -> torch.device:
    """Return the device that most of a model is on; the CPU for one without tensors."""
    counts: Counter[torch.device] = Counter()
    for tensor in (*model.parameters(), *model.buffers()):
        counts[tensor.device] += tensor.numel()
    return counts.most_common(1)[0][0] if counts else torch.device("cpu")


def findings_in_model(model: torch.nn.Module, places: Places) -> Iterator[Finding]:
    """Yield what a look at the model's parts shows."""
    yield from _mode(model, places)
    device = device_of(model)
    for path, part in model.named_modules():
        if (part._backward_hooks or part._backward_pre_hooks) and part is not model:
            yield backward_hook(places.of_module(path))
        for name, tensor in (part._parameters | part._buffers).items():
            if tensor is not None:
                yield from _tensor(path, name, tensor, device, places)


def _mode(model: torch.nn.Module, places: Places) -> Iterator[Finding]:
    if not any(one.requires_grad for one in model.parameters()):
        yield Finding.of(
            Kind.NOT_TRAINED,
            "No parameter requires a gradient, so there is nothing to train.",
            places.root,
            "Set requires_grad on what shall be trained.",
        )
    if not model.training:
        yield Finding.of(
            Kind.MODE,
            "The model is in eval mode, and is looked at so: this says nothing about training mode.",
            places.root,
            "Call model.train(), then look again.",
        )
        return
    frozen = [path for path, part in model.named_modules() if not part.training]
    if frozen:
        rest = f" and {len(frozen) - 1} more parts are" if len(frozen) > 1 else " is"
        yield Finding.of(
            Kind.MODE, f"{frozen[0]}{rest} in eval mode, and is built so.", places.of_module(frozen[0])
        )


def backward_hook(place: Place) -> Finding:
    """Say that a backward hook stands on a module."""
    return Finding(
        Kind.HOOK,
        "A backward hook stands on this module; a graph has no place where it could run.",
        place,
        "Take it off, put it on the wrapped module itself, or leave this module to PyTorch.",
    )


def _tensor(
    path: str, name: str, tensor: torch.Tensor, device: torch.device, places: Places
) -> Iterator[Finding]:
    place = places.of_module(path)
    if tensor.is_meta:
        yield Finding.of(
            Kind.DEVICE,
            f"{name} is on the device meta: it has no values.",
            place,
            "Give it memory: module.to_empty(device=...), and load its weights.",
        )
        return
    if tensor.device != device:
        yield Finding.of(
            Kind.DEVICE,
            f"{name} is on {tensor.device}, most of the model on {device}.",
            place,
            f"Move it: model.to({str(device)!r}).",
        )
    if tensor.layout is not torch.strided or tensor.is_quantized:
        yield Finding.of(
            Kind.LAYOUT, f"{name} is not a dense tensor of floats.", place, "Leave this module to PyTorch."
        )
        return
    if tensor.dtype in _SHORT and tensor.device.type == "cpu":
        dtype = str(tensor.dtype).removeprefix("torch.")
        yield Finding(
            Kind.DTYPE,
            f"It is {dtype} on the CPU, where PyTorch's kernels run most of it inside the graph.",
            place,
            "Train in float32 here: model.float().",
            level=Level.NOTE,
        )
    elif tensor.dtype is torch.float64:
        yield Finding(
            Kind.DTYPE,
            "It is float64, for which ONNX Runtime has few fast kernels.",
            place,
            "Train in float32 unless you need it: model.float().",
            level=Level.NOTE,
        )
    if isinstance(tensor, torch.nn.Parameter) and not _is_finite(tensor):
        yield Finding.of(
            Kind.VALUES,
            f"{name} holds nan or inf; so will the loss, on ONNX Runtime as in PyTorch.",
            place,
            "Load good weights, or start with a lower learning rate.",
        )


def _is_finite(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor holds neither nan nor inf; the sum, which needs no memory, shows that most do not."""
    values = tensor.detach()
    return bool(torch.isfinite(values.sum())) or bool(torch.isfinite(values).all())
