"""Build a module for a call as a wrapped one would be built, and note what comes to light on the way."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from ortlab.engine import exports
from ortlab.engine.inspection.changes import Changes
from ortlab.engine.inspection.failures import finding_of
from ortlab.engine.inspection.frozen_values import FrozenValues
from ortlab.engine.inspection.gradients import GradientsAsked
from ortlab.engine.inspection.places import Places
from ortlab.engine.inspection.translation import Translation
from ortlab.engine.operators.untrained_operators import WATCHER
from ortlab.engine.ort import OrtEngine
from ortlab.records.findings import Finding, Findings, Kind

if TYPE_CHECKING:
    from ortlab.options.options import Options

Progress = Callable[[str, float], None]


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
        token = WATCHER.set(translation)
        try:
            with exports.set_aside(self._module), FrozenValues(self._places, self._findings.add).on():
                engine.prepare(args, kwargs)
            built = True
        except Exception as error:  # noqa: BLE001 - whatever stops a build is a finding
            if not _said_by(self._findings.all):
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
        if changes.any:
            self._see_changes(changes, run_original, args, kwargs)
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


_SAY_ALL: Final = frozenset({Kind.NO_RULE, Kind.CHECKPOINT})


def _said_by(findings: tuple[Finding, ...]) -> bool:
    return any(one.kind in _SAY_ALL for one in findings)
