"""`ortlab.preflight`: build a model as a wrapped one would be, and say what stands in the way."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch.utils import _pytree

from ortlab.engine.inspection.build import Builder, Outcome
from ortlab.engine.inspection.changes import unchanged, weights_kept
from ortlab.engine.inspection.failures import device_of, finding_of_forward, findings_in_model
from ortlab.engine.inspection.places import Places
from ortlab.errors import StepError
from ortlab.options.catalogue import check_names
from ortlab.options.options import Options
from ortlab.records.preflight import Checked, Finding, Findings, Kind, Level, Place, Preflight
from ortlab.runs.progress import Progress
from ortlab.runs.wrapping import Takeover, check_wrappable, released

_LEAST_SHARE: Final = 0.01
"""Share of the model's trainable parameters below which a sub-module is not worth a border of its own."""

_ORDER: Final = tuple(Level)

_OF_A_CALL: Final = frozenset({Kind.OUTPUT, Kind.INPUT})
"""Kinds that are no fault of a sub-module: they say only that its border is in the wrong place."""


def preflight(
    model: torch.nn.Module,
    batch: object,
    *,
    options: Options | None = None,
    name: str = "model",
    search: bool = True,
    progress: bool = True,
    **changes: object,
) -> Preflight:
    """Say what stands between a model and ONNX Runtime, before a training step.

    The model is exported, its gradient graph is built and a session is created, as a wrapped model's first step would,
    but nothing runs on ONNX Runtime. If the whole model cannot be built, its sub-modules are, each for the inputs that
    it gets in one forward in PyTorch, from the top down: the largest that can are the ones to wrap. Exports and graphs
    are kept as those of a lab are, so that wrapping the model, or these parts of it, does not export again.

    The model is left as it was: weights, buffers, gradients, mode, class, attributes, random state.

    Parameters
    ----------
    model
        Any `torch.nn.Module`, wrapped or not; in training mode, if it shall be trained.
    batch
        What it is called with: a mapping for `model(**batch)`, a tuple or list for `model(*batch)`, anything else for
        `model(batch)`.
    options
        The switches; by default those that the `ORTMODULE_*` environment variables set.
    name
        What the report calls the model.
    search
        Whether to look for sub-modules to wrap if the whole model cannot be.
    progress
        Whether to show a progress bar on a terminal.
    **changes
        Switches by name, as in `ortlab.wrap`.

    Returns
    -------
    Preflight
        The record.

    Raises
    ------
    WrapError
        If the object cannot be wrapped whatever its forward does: it is no module, or a `DataParallel`.
    OptionError
        If an option is unknown or wrong.
    StepError
        If the batch is a mapping whose keys are no names.

    Examples
    --------
    >>> report = ortlab.preflight(model, batch)
    >>> report.ok
    True
    """
    started = time.perf_counter()
    call = as_call(batch)
    check_names(changes, preflight)
    if options is None:
        options = Options.from_environment(os.environ)[0]
    options = options.replace(**{**changes, "export_cache_dir": "", "save_onnx": False})
    with Progress().task(show=progress) as bar, released(model):
        check_wrappable(model)
        return _Flight(model, call, options, bar.report, search=search).report(name, started)


class _Flight:
    """One pre-flight under way."""

    def __init__(
        self,
        model: torch.nn.Module,
        call: Call,
        options: Options,
        tell: Callable[[str, float], None],
        *,
        search: bool,
    ) -> None:
        self._wanted = search
        self._model = model
        self._call = call
        self._options = options
        self._tell = tell
        self._places = Places(model)
        self._findings = Findings()
        self._outcomes: list[Outcome] = []
        self._reasons: dict[str, str] = {}

    def report(self, name: str, started: float) -> Preflight:
        with unchanged(self._model):
            parts, whole = self._look()
        findings = sorted(self._findings.all, key=lambda one: _ORDER.index(one.level))
        return Preflight(
            model=type(self._model).__name__,
            name=name,
            training=self._model.training,
            built=whole is not None and whole.built,
            findings=tuple(findings),
            parts=tuple(self._checked(path) for path in parts),
            checked=tuple(self._checked(one.path) for one in self._outcomes),
            parameters=_trainable([self._model]),
            parts_parameters=_trainable([self._model.get_submodule(path) for path in parts]),
            seconds=time.perf_counter() - started,
            export_seconds=float("nan") if whole is None else whole.export_seconds,
            device=str(device_of(self._model)),
        )

    def _look(self) -> tuple[list[str], Outcome | None]:
        place, device = self._places.root, device_of(self._model)
        for one in (
            *findings_in_model(self._model, self._places),
            *findings_in(self._call, self._model.forward, place, device),
        ):
            self._findings.add(one)
        if any(one.kind is Kind.DEVICE for one in self._findings.all):
            return [], None  # PyTorch cannot run it either
        whole = self._build("", self._call)
        self._findings.merge(whole.findings)
        if whole.trains and not any(one.stops for one in self._findings.all):
            return [], whole
        if any(one.kind in {Kind.FORWARD, Kind.INPUT} and one.stops for one in self._findings.all):
            return [], whole
        return self._search() if self._wanted else [], whole

    def _build(self, path: str, call: Call) -> Outcome:
        module = self._model.get_submodule(path)
        outcome: list[Outcome] = []
        builder = Builder(self._model, path, self._options, self._tell)

        def dispatch(args: Any, kwargs: Any) -> Any:
            outcome.append(builder.build(takeover.run_original, takeover.instance_forward, args, kwargs))
            raise _Built

        takeover = Takeover(module, dispatch)
        try:
            # The module, and not its forward: hooks on it change its inputs as they will in training.
            module(*call.args, **call.kwargs)
        except _Built:
            return outcome[0]
        except Exception as error:  # noqa: BLE001 - a hook of the user, or arguments that forward does not take
            return Outcome(path, False, (finding_of_forward(error, self._places),), 0.0)  # noqa: FBT003
        finally:
            takeover.release()
        return Outcome(path, False, (), 0.0)  # noqa: FBT003 - a hook caught it

    # ---- the search ------------------------------------------------------------------------------------------

    def _search(self) -> list[str]:
        self._tell("Running the model once in PyTorch", 0.0)
        with weights_kept(self._model):
            calls, error = calls_of_parts(
                self._model, lambda: self._model(*self._call.args, **self._call.kwargs)
            )
        if error is not None:
            self._findings.add(finding_of_forward(error, self._places))
            return []
        root = _tree("", self._model, set(calls))
        least = max(1, round(_LEAST_SHARE * _trainable([self._model])))
        planned = number_of_tests(root, guilty=self._guilty, least=least)

        def passes(part: Part) -> bool:
            done = len(self._outcomes)
            self._tell(f"Testing {part.path}", done / max(planned, done + 1))
            outcome = self._build(part.path, calls[part.path])
            self._outcomes.append(outcome)
            self._findings.merge(tuple(one for one in outcome.findings if one.kind not in _OF_A_CALL))
            self._reasons[part.path] = next((one.what for one in outcome.findings if one.stops), "")
            return outcome.trains

        found = largest(root, passes, guilty=self._guilty, least=least)
        return [part.path for part in found]

    def _guilty(self, path: str) -> bool:
        return any(one.stops and one.place.module == path for one in self._findings.all if _stands_in(one))

    def _checked(self, path: str) -> Checked:
        module = self._model.get_submodule(path)
        outcome = next(one for one in self._outcomes if one.path == path)
        return Checked(
            path, type(module).__name__, _trainable([module]), outcome.trains, self._reasons.get(path, "")
        )


class _Built(BaseException):
    """Ends a call of a module once it is built for it; no `except Exception` of a user holds it up."""


def _stands_in(finding: Finding) -> bool:
    """Say whether a finding is about the module that it names; some errors name no place, and stand for the whole."""
    return finding.kind is not Kind.BUILD or bool(finding.place.module)


def _tree(path: str, module: torch.nn.Module, called: set[str]) -> Part:
    children = [
        _tree(f"{path}.{name}" if path else name, child, called) for name, child in module.named_children()
    ]
    return Part(path, _trainable([module]), path in called, tuple(children))


def _trainable(modules: list[torch.nn.Module]) -> int:
    tensors = {id(one): one for module in modules for one in module.parameters() if one.requires_grad}
    return sum(one.numel() for one in tensors.values())


def calls_of_parts(
    model: torch.nn.Module, run: Callable[[], object]
) -> tuple[dict[str, Call], BaseException | None]:
    """Run a forward with `run`; return the first call of each module by path, in order, and what it raised, or None."""
    # Tensors are kept as they are, cut off from what they were computed of; the memory that they need is that of the
    # activations of a step.
    calls: dict[str, Call] = {}

    def keeper(path: str) -> Callable[..., None]:
        def keep(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if path not in calls:
                calls[path] = Call(*_pytree.tree_map(_cut, (tuple(args), dict(kwargs))))

        return keep

    hooks = [
        part.register_forward_pre_hook(keeper(path), with_kwargs=True)
        for path, part in model.named_modules()
        if part is not model
    ]
    try:
        with torch.enable_grad():
            run()
    except Exception as error:  # noqa: BLE001 - what failed is said by whoever asked
        return calls, error
    finally:
        for hook in hooks:
            hook.remove()
    return calls, None


def _cut(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
        return value.detach().requires_grad_(value.requires_grad)
    return value


@dataclass(frozen=True)
class Part:
    """A module in the tree of a model."""

    path: str  # as `named_modules` gives it; "" for the model
    weight: int  # how much it matters: the numbers in its trainable parameters
    callable: bool  # whether it is called in a forward, so that it could be wrapped
    children: tuple[Part, ...] = ()

    def inside(self) -> Iterator[Part]:
        """Yield it and all that is in it."""
        yield self
        for child in self.children:
            yield from child.inside()


def largest(
    root: Part, passes: Callable[[Part], bool], *, guilty: Callable[[str], bool], least: int
) -> list[Part]:
    """Find the largest parts that pass a test, which may be long; none of them lies in another."""
    # The model, `root`, does not pass. `guilty` tells whether a module is known to be a reason why nothing that holds
    # it passes. A part of less weight than `least` is not worth a test.
    found = []
    for child in root.children:
        if child.weight < least:
            continue
        free = not any(guilty(one.path) for one in child.inside())
        if child.callable and free and passes(child):
            found.append(child)
        else:
            found += largest(child, passes, guilty=guilty, least=least)
    return found


def number_of_tests(root: Part, *, guilty: Callable[[str], bool], least: int) -> int:
    """Return how many tests there are if all of them are passed."""
    tests: list[Part] = []

    def passes(part: Part) -> bool:
        tests.append(part)
        return True

    largest(root, passes, guilty=guilty, least=least)
    return len(tests)


_PLAIN: Final = (bool, int, float, str, bytes, type(None))


class Call(NamedTuple):
    """The arguments of one call of a forward."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def as_call(batch: object) -> Call:
    """Read a batch: a mapping has keyword arguments, a tuple or list positional ones, anything else is the only one."""
    if isinstance(batch, Mapping):
        if not all(isinstance(key, str) for key in batch):
            raise StepError(
                "The keys of this batch are no names.",
                why="A mapping holds the forward's keyword arguments: model(**batch).",
                fix="Give a tuple for positional arguments.",
            )
        return Call((), dict(batch))
    if isinstance(batch, (tuple, list)):
        return Call(tuple(batch), {})
    return Call((batch,), {})


def findings_in(
    call: Call, forward: Callable[..., Any], place: Place, device: torch.device
) -> Iterator[Finding]:
    """Yield what is wrong with a call before anything runs; place and device are the model's."""
    try:
        inspect.signature(forward).bind(*call.args, **call.kwargs)
    except TypeError as error:
        yield Finding.of(
            Kind.INPUT,
            f"The batch is not what the forward takes: {error}.",
            place,
            "Give a mapping for model(**batch), a tuple for model(*batch), a tensor for model(batch).",
        )
    named = {**{f"batch[{position}]": value for position, value in enumerate(call.args)}, **call.kwargs}
    for name, value in named.items():
        for path, leaf in _leaves(name, value):
            yield from _findings_in_leaf(path, leaf, place, device)


def _findings_in_leaf(path: str, leaf: object, place: Place, device: torch.device) -> Iterator[Finding]:
    if not isinstance(leaf, torch.Tensor):
        if not isinstance(leaf, _PLAIN):
            yield Finding.of(
                Kind.INPUT,
                f"{path} is a {type(leaf).__name__}, which cannot be an input of a graph.",
                place,
                "Give tensors, numbers, texts and None, in lists, tuples and dicts.",
            )
        return
    if leaf.device != device and not (leaf.dim() == 0 and leaf.device.type == "cpu"):
        yield Finding.of(
            Kind.DEVICE,
            f"{path} is on {leaf.device}, the model on {device}.",
            place,
            f"Move it: {path}.to({str(device)!r}).",
        )
    if leaf.layout is not torch.strided or leaf.is_nested:
        yield Finding.of(
            Kind.LAYOUT, f"{path} is not a dense tensor.", place, "Give a dense one: x.to_dense()."
        )
    if leaf.is_complex():
        yield Finding.of(
            Kind.DTYPE,
            f"{path} is {_dtype(leaf)}; ONNX Runtime has no complex tensors.",
            place,
            "Give its real and imaginary parts: torch.view_as_real(x).",
        )
    if leaf.numel() == 0:
        yield Finding.of(
            Kind.INPUT, f"{path} is empty: its shape is {list(leaf.shape)}.", place, "Give a batch with data."
        )


def _leaves(path: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(f"{path}[{key!r}]", item)
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        for position, item in enumerate(value):
            yield from _leaves(f"{path}[{position}]", item)
    else:
        yield path, value


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
