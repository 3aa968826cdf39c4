"""The ONNX Runtime engine: keeps a module's executions and rebuilds, at each call, only what has changed."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from ortlab.engine.callback_error import take_error
from ortlab.engine.diagnosis import ForwardError, explain_build_failure, explain_execution_failure
from ortlab.engine.providers import check_device
from ortlab.engine.random_state import restored_on_failure
from ortlab.engine.schema import Schema, call_schema, difference, module_schema, module_state
from ortlab.errors import BuildError, ExecutionError, OrtlabError
from ortlab.options import Effect, Options
from ortlab.runs import EXECUTED_BY_FALLBACK, EXECUTED_BY_ORT, Initialization

if TYPE_CHECKING:
    from ortlab.engine.execution import Execution, Progress
    from ortlab.messages import Message

KEPT_EXPORTS: Final = 4
"""Exports and graphs kept for going back to earlier options or inputs; they hold no weights, less than 1 MB each."""

STAGES: Final = {Effect.SESSION: "session", Effect.GRAPH: "graph"}
"""What is redone for a change with that effect; everything earlier means a new export."""


@dataclass(frozen=True)
class _Built:
    schema: Schema
    options: Options
    deterministic: bool
    execution: Execution


class OrtEngine:
    """Run a module on ONNX Runtime.

    Parameters
    ----------
    module
        The user's module.
    original_forward
        The module's own forward, for diagnosis and, where the user allows it, for fallback.
    options
        The switches; assign to `options` to change them, the next call rebuilds what they touch.
    progress
        Told about each stage of a build.
    on_built
        Told what was redone and how long it took, after each build and before the module runs.

    Attributes
    ----------
    executed_by
        Who executed the last call: "ort" or "fallback"; empty before the first.
    fallback_reason
        Why the last call fell back; empty if it did not.
    rebuild_reason
        Why the last build was needed, in words.
    """

    name = "ort"

    def __init__(
        self,
        module: torch.nn.Module,
        original_forward: Callable[..., Any],
        options: Options,
        progress: Progress,
        on_built: Callable[[Initialization], None],
    ) -> None:
        self.options = options
        self.executed_by = ""
        self.fallback_reason = ""
        self.rebuild_reason = ""
        self._module = module
        self._original_forward = original_forward
        self._progress = progress
        self._on_built = on_built
        self._current: dict[bool, _Built] = {}
        self._kept: list[_Built] = []
        self._failed: tuple[Schema, Options] | None = None
        self._state: tuple[object, ...] = ()
        self._module_schema: Schema = ()

    # ---- running ----------------------------------------------------------------------------------------------

    def forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the module's forward on ORT, after building what is missing or out of date.

        Raises
        ------
        BuildError
            Export, graph or session failed; the last working form is kept.
        ExecutionError
            ORT failed while it ran.
        """
        schema = self._schema(args, kwargs)
        if self._failed == (schema, self.options) and not self.options.fallback_retry:
            return self._fall_back(args, kwargs, self.fallback_reason)
        self._failed = None
        try:
            execution = self._execution(schema, args, kwargs)
            outputs = self._run(execution, args, kwargs)
        except (BuildError, ExecutionError) as error:
            if not self.options.fallback or isinstance(error, ForwardError):
                raise
            self._failed = (schema, self.options)
            return self._fall_back(args, kwargs, error.what)
        self.executed_by, self.fallback_reason = EXECUTED_BY_ORT, ""
        return outputs

    def _run(self, execution: Execution, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        take_error()
        try:
            return execution.run(args, kwargs, self._state)
        except OrtlabError:
            raise
        except Exception as error:
            raise explain_execution_failure(error) from error

    def _fall_back(self, args: Sequence[Any], kwargs: Mapping[str, Any], reason: str) -> Any:
        self.executed_by, self.fallback_reason = EXECUTED_BY_FALLBACK, reason
        return self._original_forward(*args, **kwargs)

    # ---- building ---------------------------------------------------------------------------------------------

    def pending_stage(self) -> str:
        """Return what the present options will redo at the next training call: "export", "graph", "session" or ""."""
        current = self._current.get(True) or self._current.get(False)
        return "export" if current is None else self._stage(current, self.options)

    @property
    def execution(self) -> Execution:
        """The training execution, or the inference one where no training step has run.

        Raises
        ------
        BuildError
            Nothing has been built for the present options yet.
        """
        current = self._current.get(True) or self._current.get(False)
        if current is None or self._stage(current, self.options):
            raise BuildError(
                "There is no graph for the present options yet.",
                why="ONNX Runtime builds it in the first step after a change, because it needs a batch for that.",
                fix="Run a step first: %%ort_step, lab.step(fn), or call the model once.",
            )
        return current.execution

    def graph_digests(self) -> dict[str, str]:
        """Return SHA-256 digests of the training graph without and with its gradient; none after a fallback."""
        built = self._current.get(True)
        if built is None or self.executed_by != EXECUTED_BY_ORT:
            return {}
        return {
            stage: hashlib.sha256(built.execution.serialized_graph(stage)).hexdigest()[:16]
            for stage in ("processed", "gradient")
        }

    @property
    def messages(self) -> tuple[Message, ...]:
        """What was said while the present executions were built."""
        return tuple(message for built in self._current.values() for message in built.execution.messages)

    def close(self) -> None:
        """Free all sessions, graphs and exports."""
        for built in (*self._current.values(), *self._kept):
            built.execution.release_session()
        self._current, self._kept = {}, []

    def _execution(self, schema: Schema, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Execution:
        training = self._module.training
        deterministic = torch.are_deterministic_algorithms_enabled()
        current = self._current.get(training)
        if (
            current is not None
            and current.schema == schema
            and current.deterministic == deterministic
            and not self._stage(current, self.options)
        ):
            return current.execution
        self.rebuild_reason = self._why(current, schema)
        with restored_on_failure():
            try:
                execution = self._build(schema, args, kwargs)
            except OrtlabError:
                raise
            except Exception as error:
                raise explain_build_failure(
                    error, self._module, self._original_forward, args, kwargs
                ) from error
        # A forward may settle an attribute in its first call, which was the trace: a `config.problem_type`, for one.
        built = _Built(self._schema(args, kwargs), self.options, deterministic, execution)
        self._keep(built)
        return execution

    def _build(self, schema: Schema, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Execution:
        from ortlab.engine.execution import Execution
        from ortlab.engine.sessions import available_providers

        for device in {parameter.device for parameter in self._module.parameters()}:
            check_device(device, available_providers())
        started = time.perf_counter()
        training = self._module.training
        donor, stage = self._donor(schema)
        if donor is None:
            execution = Execution(self._module, self.options, training=training)
            self._progress("Exporting the model to ONNX", 0.0)
            execution.export(args, kwargs)
        else:
            execution = donor.execution.with_options(self.options, keep_graph=stage == "session")
        if stage != "session":
            self._progress("Building the gradient graph" if training else "Optimising the graph", 0.6)
            execution.build_graph(args, kwargs)
        self._progress("Creating the ONNX Runtime session", 0.75)
        execution.create_session()
        self._progress("", 1.0)
        self._on_built(execution.initialization_since(stage, (time.perf_counter() - started) * 1000))
        return execution

    def _donor(self, schema: Schema) -> tuple[_Built | None, str]:
        """Find the kept execution that shares the most with what is wanted, and the stage to redo."""
        best: tuple[_Built | None, str] = (None, "export")
        for built in self._kept:
            if built.schema != schema or built.execution.training != self._module.training:
                continue
            stage = self._stage(built, self.options) or "session"
            if stage == "session" or (stage == "graph" and best[1] == "export"):
                best = (built, stage)
        return best

    def _keep(self, built: _Built) -> None:
        training = built.execution.training
        replaced = self._current.get(training)
        if replaced is not None:
            replaced.execution.release_session()
        self._current[training] = built
        self._kept = [*(one for one in self._kept if one is not replaced), built]
        if replaced is not None and (replaced.schema, replaced.options) != (built.schema, built.options):
            self._kept.insert(0, replaced)
        in_use = list(self._current.values())
        spare = [one for one in self._kept if all(one is not used for used in in_use)]
        self._kept = [*spare[-KEPT_EXPORTS:], *in_use]

    def _stage(self, built: _Built, options: Options) -> str:
        if built.options is options:  # as in every step but those after a change
            return ""
        effect = built.options.stage_of_change(options)
        if effect is None or effect is Effect.STEP:
            return ""
        return STAGES.get(effect, "export")

    def _why(self, current: _Built | None, schema: Schema) -> str:
        if current is None:
            return "first call in this mode"
        changed = difference(current.schema, schema)
        if changed:
            return changed
        names = ", ".join(current.options.changed(self.options))
        return f"options changed: {names}" if names else "deterministic algorithms were switched"

    def _schema(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Schema:
        state = module_state(self._module)
        if state != self._state:
            self._state, self._module_schema = state, module_schema(self._module)
        schema = call_schema(args, kwargs) + self._module_schema
        if self.options.memory_level == 1 and any(
            getattr(part, "gradient_checkpointing", False) for part in self._module.modules()
        ):
            # At this level ORTModule traces through torch.utils.checkpoint, and ORT recomputes instead of torch.
            schema += (("gradient checkpointing", "traced through"),)
        return schema
