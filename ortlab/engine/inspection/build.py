"""Build a module for a call as a wrapped one would be built, and note what comes to light, gradients included.

A trace is watched for values that a graph would hold for ever: numbers and branches that are made of data. Torch's
tracer warns of each tensor that becomes a Python number, and most of those are sizes, which ortlab binds an export to
(`ortlab.engine.tracing.graph_inputs`). What matters is whether data had a part in it. So what is known without data is
followed here: sizes, constants, and what is computed of these alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from ortlab.engine import kept_builds
from ortlab.engine.inspection.changes import Changes
from ortlab.engine.inspection.failures import Translation, finding_of
from ortlab.engine.inspection.places import Places
from ortlab.engine.operators.untrained_operators import WATCHER
from ortlab.engine.ort import OrtEngine
from ortlab.engine.tracing.carried import CarriedStateError
from ortlab.engine.tracing.source_lines import in_onnx_runtime
from ortlab.engine.tracing.traced_values import (
    FACTS,
    SIZES,
    flat,
    function_name,
    holds_numbers,
    is_certain_of_uniform,
)
from ortlab.records.preflight import Finding, Findings, Kind
from ortlab.records.runs import EXECUTED_BY_EAGER

if TYPE_CHECKING:
    from ortlab.options.options import Options


Progress = Callable[[str, float], None]

_SAY_ALL: Final = frozenset({Kind.NO_RULE, Kind.CHECKPOINT})
"""Kinds of findings that say what an error of the build would say again."""


@dataclass(frozen=True)
class Outcome:
    """What became of one module."""

    path: str  # of the module; "" for the model
    built: bool  # exported, with a gradient graph and a session
    findings: tuple[Finding, ...]
    seconds: float  # wall time
    export_seconds: float = float("nan")  # of it, in the export; not a number if the build failed

    @property
    def trains(self) -> bool:
        """Whether it was built and would do what the module does."""
        return self.built and not any(one.stops for one in self.findings)


class Builder:
    """Builds a model or one of its modules, watched; nothing of it runs on ONNX Runtime."""

    # The export and the gradient graph are kept for the module, as those of a lab are, so that wrapping it makes
    # neither again. `path` is that of the module to build; "" for the model.

    def __init__(self, model: torch.nn.Module, path: str, options: Options, progress: Progress) -> None:
        self._module = model.get_submodule(path)
        self._path = path
        self._options = options
        self._progress = progress
        self._places = Places(model, path)
        self._findings = Findings()
        self._export_seconds = float("nan")

    def build(
        self,
        run_original: Callable[..., Any],
        instance_forward: Callable[..., Any] | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Outcome:
        """Build what the call needs."""
        started = time.perf_counter()
        translation = Translation(self._places, self._findings.add)
        changes = Changes(self._module, self._places)
        engine = OrtEngine(
            self._module,
            run_original,
            self._options,
            self._progress,
            self._note_time,
            instance_forward=instance_forward,
            part=self._path,
        )
        built = False
        carried: CarriedStateError | None = None
        token = WATCHER.set(translation)
        try:
            with kept_builds.set_aside(self._module), FrozenValues(self._places, self._findings.add).on():
                engine.prepare(args, kwargs)
            built = True
        except CarriedStateError as error:
            carried = error
        except Exception as error:  # noqa: BLE001 - whatever stops a build is a finding
            if not any(one.kind in _SAY_ALL for one in self._findings.all):
                self._findings.add(finding_of(error, self._places, translation))
        finally:
            WATCHER.reset(token)
            engine.close()
        names = {name.rpartition("::")[2].removesuffix("_") for name in translation.trained_by_torch}
        if built and names:
            with (
                suppress(Exception),
                torch.enable_grad(),
                GradientsAsked(names, self._places, self._findings.add),
            ):
                run_original(*args, **kwargs)
        if changes.any or carried is not None:
            self._see_changes(changes, run_original, args, kwargs)
        if carried is not None and not any(
            one.kind in (Kind.ATTRIBUTE, Kind.GLOBAL) for one in self._findings.all
        ):
            self._findings.add(finding_of(carried, self._places, translation))
        return Outcome(
            self._path, built, self._findings.all, time.perf_counter() - started, self._export_seconds
        )

    def _see_changes(
        self,
        changes: Changes,
        run_original: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Run the forward twice more: what still changes is state, what does not was settled by the first call."""
        again = changes
        with suppress(Exception), torch.no_grad():  # it has been a finding already
            run_original(*args, **kwargs)
            again = Changes(self._module, self._places)
            run_original(*args, **kwargs)
        for finding in again.findings:
            self._findings.add(finding)

    def _note_time(self, done: Any) -> None:
        self._export_seconds = done.export_ms / 1000


class BuildingEngine(OrtEngine):
    """Build, at each call of the module, the graph and the session for it, and run the module's own forward."""

    # ONNX Runtime draws no random numbers then. The state of its generator can be set but not read, so nothing could
    # put right what it would draw later.

    def forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Build what the call needs, and run it in PyTorch; raises `BuildError` where the build fails."""
        self.prepare(args, kwargs)
        self.executed_by = EXECUTED_BY_EAGER
        return self._original_forward(*args, **kwargs)


class GradientsAsked(TorchFunctionMode):
    """Differentiate the operators `names`, without namespace, of a forward in PyTorch, on copies of their inputs."""

    def __init__(self, names: Collection[str], places: Places, report: Callable[[Finding], None]) -> None:
        super().__init__()
        self._names = frozenset(names)
        self._places = places
        self._report = report

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if operator_name(function) in self._names:
            self._ask(function, args, kwargs)
        return function(*args, **kwargs)

    def _ask(self, function: Any, args: Any, kwargs: Any) -> None:
        given: list[torch.Tensor] = []

        def copied(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            copy = value.detach().clone()
            if value.requires_grad and value.is_floating_point():
                given.append(copy.requires_grad_())
            return copy

        with torch.enable_grad():
            args, kwargs = _pytree.tree_map(copied, (args, kwargs))
            results = _pytree.tree_leaves(function(*args, **kwargs))
            ends = [one for one in results if isinstance(one, torch.Tensor) and one.requires_grad]
            if not given or not ends:
                return
            try:
                torch.autograd.grad(ends, given, [torch.zeros_like(one) for one in ends], allow_unused=True)
            except (RuntimeError, NotImplementedError) as error:
                why = str(error).strip().splitlines()[0].rstrip(".")
                self._report(
                    Finding.of(
                        Kind.NO_GRADIENT,
                        f"`{operator_name(function)}` has no gradient, in PyTorch neither: {why}.",
                        self._places.here(),
                        "Detach its input if none is meant, or register a gradient for it.",
                    )
                )


def operator_name(function: Any) -> str:
    """Return the name of an operator without namespace, overload and the underscore of an in-place one."""
    if isinstance(function, torch._ops.OpOverload):
        name = str(function._schema.name).rpartition("::")[2]
    elif isinstance(function, torch._ops.OpOverloadPacket):
        name = function.__name__
    else:
        name = function_name(function)
    return name if name.startswith("_") else name.removesuffix("_")


_BRANCHES: Final = frozenset({"__bool__", "__contains__", "equal", "allclose", "is_nonzero", "__len__"})
_LIKE: Final = frozenset({"zeros_like", "ones_like", "new_zeros", "new_ones", "new_empty", "empty_like"})
"""Functions that take no value from the tensor that they are given."""

_RANDOM: Final = frozenset(
    {"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "bernoulli", "multinomial", "normal"}
)


class FrozenValues(TorchFunctionMode):
    """Report what of the data a trace makes constant, with its place."""

    def __init__(self, places: Places, report: Callable[[Finding], None]) -> None:
        super().__init__()
        self._places = places
        self._report = report
        self._known: dict[int, torch.Tensor] = {}  # kept alive, so that ids stay theirs
        self._uniform: dict[int, torch.Tensor] = {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch._C._get_tracing_state() is None:
            return function(*args, **kwargs)
        result = function(*args, **kwargs)
        self._look(function_name(function), args, kwargs, result)
        return result

    @contextmanager
    def on(self) -> Iterator[None]:
        """Watch the block."""
        try:
            with self:
                yield
        finally:
            self._known, self._uniform = {}, {}

    def _look(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        given = [one for one in flat((args, kwargs)) if isinstance(one, torch.Tensor)]
        made = [one for one in flat(result) if isinstance(one, torch.Tensor)]
        known = all(id(one) in self._known for one in given)
        if name in SIZES or name in _LIKE or self._is_certain(name, args, given):
            self._known |= {id(one): one for one in made}
        elif made:
            self._follow(name, made, known=known and name not in _RANDOM)
            for one in made:
                self._look_at_result(name, one)
        elif given and not known and name not in FACTS and holds_numbers(result) and not in_onnx_runtime():
            self._frozen(name)
        if name == "register_hook":
            self._add(
                Kind.HOOK,
                "A hook on a tensor is set in the forward; ONNX Runtime does not run it.",
                "Change the gradient in an autograd Function instead.",
            )

    def _follow(self, name: str, made: list[torch.Tensor], *, known: bool) -> None:
        for one in made:
            if known:
                self._known[id(one)] = one
            else:  # data may have been written into it
                self._known.pop(id(one), None)
                if one._is_view() and one._base is not None and name.endswith(("_", "__setitem__")):
                    self._known.pop(id(one._base), None)
            if name in {"rand", "rand_like"}:
                self._uniform[id(one)] = one

    def _is_certain(self, name: str, args: Any, given: list[torch.Tensor]) -> bool:
        """Tell whether a limit alone decides a comparison with a number from [0, 1), as in transformers' layer drop."""
        if len(args) != 2 or not is_certain_of_uniform(name, args[1]):  # noqa: PLR2004
            return False
        return bool(given) and all(id(one) in self._uniform for one in given)

    def _look_at_result(self, name: str, made: torch.Tensor) -> None:
        if made.layout is not torch.strided or made.is_nested:
            kind = str(made.layout).removeprefix("torch.")
            self._add(
                Kind.LAYOUT,
                f"`{name}` makes a tensor of layout {kind}, which ONNX Runtime cannot hold.",
                "Use dense tensors here, or leave this module to PyTorch.",
            )

    def _frozen(self, name: str) -> None:
        plain = name.strip("_")
        if name in _BRANCHES:
            self._add(
                Kind.BRANCH,
                "The forward takes a branch that depends on data; the graph keeps the one that this batch took.",
                "Choose with torch.where, or leave this module to PyTorch.",
            )
        else:
            self._add(
                Kind.NUMBER,
                f"`{plain}` makes a Python value of data; the graph keeps that of this batch.",
                "Compute with the tensor itself, or leave this module to PyTorch.",
            )

    def _add(self, kind: Kind, what: str, fix: str) -> None:
        self._report(Finding.of(kind, what, self._places.here(), fix))
