"""`ortlab.preflight`: build a model as a wrapped one would be, and say what stands in the way."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from ortlab.checks.preflight_batches import Call, as_call, findings_in
from ortlab.checks.preflight_captured import calls_of_parts
from ortlab.checks.preflight_search import Part, largest, number_of_tests
from ortlab.engine.inspection.build import Builder, Outcome
from ortlab.engine.inspection.failures import finding_of_forward
from ortlab.engine.inspection.places import Places
from ortlab.engine.inspection.standing import device_of, findings_in_model
from ortlab.engine.inspection.unchanged import unchanged, weights_kept
from ortlab.options.options import Options
from ortlab.records.findings import Finding, Findings, Kind, Level
from ortlab.records.preflight import Checked, Preflight
from ortlab.runs.progress import Progress
from ortlab.runs.wrapping import Takeover, check_wrappable, released

if TYPE_CHECKING:
    import torch

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
            module(
                *call.args, **call.kwargs
            )  # so that hooks on it change its inputs as they will in training
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
    """Tell whether a finding is about the module that it names; some errors name no place, and stand for the whole."""
    return finding.kind is not Kind.BUILD or bool(finding.place.module)


def _tree(path: str, module: torch.nn.Module, called: set[str]) -> Part:
    children = [
        _tree(f"{path}.{name}" if path else name, child, called) for name, child in module.named_children()
    ]
    return Part(path, _trainable([module]), path in called, tuple(children))


def _trainable(modules: list[torch.nn.Module]) -> int:
    tensors = {id(one): one for module in modules for one in module.parameters() if one.requires_grad}
    return sum(one.numel() for one in tensors.values())
