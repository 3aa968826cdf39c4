"""Build a module for a call as a wrapped one would be built, and note what comes to light, gradients included."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from ortlab.engine import kept_builds
from ortlab.engine.inspection.changes import Changes
from ortlab.engine.inspection.failures import Translation, finding_of
from ortlab.engine.inspection.frozen_values import FrozenValues
from ortlab.engine.inspection.places import Places
from ortlab.engine.operators.untrained_operators import WATCHER
from ortlab.engine.ort import OrtEngine
from ortlab.engine.tracing.carried import CarriedStateError
from ortlab.engine.tracing.traced_values import function_name
from ortlab.records.preflight import Finding, Findings, Kind

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
    """Builds a model or one of its modules, watched; nothing of it runs on ONNX Runtime.

    The export and the gradient graph are kept for the module, as those of a lab are, so that wrapping it makes neither
    again. `path` is that of the module to build; "" for the model.
    """

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
        """Build what the call needs.

        `run_original` is the module's own forward, `instance_forward` the one on the object if there is one; see
        `ortlab.runs.wrapping.Takeover`.
        """
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
