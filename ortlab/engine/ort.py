"""The ONNX Runtime engine: keeps a module's executions and rebuilds, at each call, only what has changed."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import _StopRecomputationError

from ortlab.engine import graph_optimizers, kept_builds
from ortlab.engine.border import border_watched, take_error
from ortlab.engine.build_environment import one_build_at_a_time
from ortlab.engine.calls import check_call, check_module, refuse_transforms
from ortlab.engine.diagnosis import (
    ForwardError,
    explain_build_failure,
    explain_execution_failure,
    own_fault,
)
from ortlab.engine.kept_builds import Built, BuiltSessions, KeptExport
from ortlab.engine.patching import with_attributes
from ortlab.engine.random_state import restored_on_failure
from ortlab.engine.schema import ModuleReader, Schema, call_schema, difference, module_schema, surroundings
from ortlab.engine.tracing.autograd import saving_apart
from ortlab.engine.tracing.graph_inputs import written_state
from ortlab.engine.tracing.sizes import batch_sizes
from ortlab.errors import BuildError, ExecutionError, FallbackWarning, OrtlabError, PlanWarning, warn
from ortlab.options.options import Effect, Options
from ortlab.records.messages import ORTLAB, MessageLog
from ortlab.records.runs import EXECUTED_BY_FALLBACK, EXECUTED_BY_ORT, Coverage, Initialization

if TYPE_CHECKING:
    from ortlab.engine.execution import Execution, Progress

STAGES: Final = {Effect.STEP: "step", Effect.SESSION: "session", Effect.GRAPH: "graph"}
"""What is redone for a change with that effect; everything earlier means a new export."""

_STATE: Final = ("options", "executed_by", "fallback_reason", "rebuild_reason", "_failed")
"""What `OrtEngine.beside` puts back."""

_NOTHING: Final = ("", "step")

_NO_FAILURES: Final = (OrtlabError, _StopRecomputationError)
"""What is passed on as it is: explained already, or how torch.utils.checkpoint ends a recomputation."""


class OrtEngine:
    """Run a module on ONNX Runtime."""

    # Assign to `options` to change switches; the next call rebuilds what they touch. The module's `original_forward`
    # serves for diagnosis and, where the user allows it, for fallback. `instance_forward` is the forward that stood on
    # the object itself, if there was one: an export depends on its code. `on_built` is told what was redone and how
    # long it took, after each build and before the module runs. `part` is the module's dotted path in a larger model,
    # the rest of which PyTorch runs; empty for a whole model. Autograd may then want gradients in eval mode, too, and
    # calls may differ within a step: a layer that the model uses twice, first for a batch and then for an activation,
    # which requires a gradient.

    name = "ort"
    coverage = total_coverage = Coverage()

    def __init__(
        self,
        module: torch.nn.Module,
        original_forward: Callable[..., Any],
        options: Options,
        progress: Progress,
        on_built: Callable[[Initialization], None],
        log: MessageLog | None = None,
        instance_forward: Callable[..., Any] | None = None,
        part: str = "",
    ) -> None:
        self._part = part
        self._log = MessageLog() if log is None else log
        self.options = options
        self.executed_by = ""  # who executed the last call: "ort" or "fallback"; empty if nobody did
        self.fallback_reason = ""  # empty if the last call did not fall back
        self.rebuild_reason = ""  # why the last build was needed, in words
        self._module = module
        self._original_forward = original_forward
        self._progress = progress
        self._on_built = on_built
        self._sessions = BuiltSessions()
        self._failed: tuple[Schema, Options] | None = None
        self._functions = () if instance_forward is None else (instance_forward,)
        self._reader = ModuleReader(module, self._functions)
        self._state: tuple[object, ...] = ()
        self._module_schema: Schema = ()
        self._last_schema: tuple[list[Schema], Schema] = ([], ())
        self._device_type = "cpu"
        self._starts_over = False
        self._lines: Mapping[str, str] = {}  # of what is built, by node
        self._called_again: tuple[str, ...] = ()  # as the last build told, which may be freed

    # ---- running ----------------------------------------------------------------------------------------------

    def forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the module's forward on ORT, after building what is missing or out of date."""
        refuse_transforms()
        schema = self._schema(args, kwargs)
        if self._failed == (schema, self.options) and not self.options.fallback_retry:
            return self._fall_back(args, kwargs, self.fallback_reason)
        self._failed = None
        try:
            execution = self._execution(schema, args, kwargs)
            outputs = self._run(execution, args, kwargs)
        except (BuildError, ExecutionError) as error:
            if not self.options.fallback or isinstance(error, ForwardError):
                self.executed_by = self.fallback_reason = ""  # nobody has executed this call
                raise
            self._failed = (schema, self.options)
            self._say_fallback(error.what)
            return self._fall_back(args, kwargs, error.what)
        self.executed_by, self.fallback_reason = EXECUTED_BY_ORT, ""
        return outputs

    def _run(self, execution: Execution, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if not execution.labels_fit(args, kwargs):
            self._raise_own_fault(args, kwargs)
        take_error()
        with border_watched():
            try:
                return execution.run(args, kwargs, self._state)
            except _NO_FAILURES:
                raise
            except Exception as error:
                failure = explain_execution_failure(error, self.options, execution.lines)
                if type(failure) is ExecutionError and failure.__cause__ is None:  # no callback has said more
                    self._raise_own_fault(args, kwargs)
                raise failure from error

    def _raise_own_fault(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise what the module's own forward raises in PyTorch for this call; nothing if it raises nothing."""
        fault = own_fault(self._module, self._original_forward, args, kwargs)
        if fault is not None:
            raise fault

    def _fall_back(self, args: Sequence[Any], kwargs: Mapping[str, Any], reason: str) -> Any:
        self.executed_by, self.fallback_reason = EXECUTED_BY_FALLBACK, reason
        return self._original_forward(*args, **kwargs)

    def prepare(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Build what a call of the forward needs, down to the session, without running it; may raise BuildError."""
        self._execution(self._schema(args, kwargs), args, kwargs)

    def _say_fallback(self, reason: str) -> None:
        """Say once that PyTorch steps in: among the messages, and as a warning for a loop without a panel."""
        text = f"PyTorch executes {type(self._module).__name__}, not ONNX Runtime (fallback): {reason}"
        self._log.add("WARNING", ORTLAB, text)
        warn(text, FallbackWarning)

    def _say_absent_plans(self, execution: Execution) -> None:
        """Say which recompute plans this model does not have, as ORT does not, and where `recompute` does nothing."""
        from ortlab.engine.recompute_plans import absent_words

        words = [absent_words(execution)]
        if execution.training and self.options.recompute and not self._part and not execution.repeats_forward:
            asked = ", ".join(self.options.recompute)
            words.append(
                f"recompute={asked!r} makes nothing again: what the backward reads there is kept anyway, or cannot be "
                "made twice. lab.activations() lists what is kept."
            )
        for one in filter(None, words):
            text = f"{self._part}: {one}" if self._part else one
            self._log.add("WARNING", ORTLAB, text)
            if not execution.repeats_forward:  # else most often what `recompute` makes again already
                warn(text, PlanWarning)

    def start_over(self) -> None:
        """Let the next training call draw the random numbers that the first one of its session drew."""
        # `onnxruntime.set_seed` does that, except where plans recompute a Dropout: ORT then gives every Dropout a seed
        # of its own, so that the recomputed mask is the first one (``memory_optimizer.cc``, SetSeedForDropoutNode), and
        # with it a generator that only a new session starts again.
        built = self._sessions.last(training=True)
        self._starts_over = (
            built is not None and built.execution.has_run and built.execution.recomputes_dropout
        )
        self._sessions.release_earlier(keep=lambda one: not one.execution.recomputes_dropout)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Let calls in the block run with other options; afterwards the engine is as it was, sessions included."""
        # A session that differs from the present one in that it has no arena stays beside it, so that the next
        # measurement of memory builds nothing.
        with (
            self._sessions.beside(usable=self._may_serve),
            with_attributes(self, _STATE, _starts_over=False),
        ):
            yield

    # ---- building ---------------------------------------------------------------------------------------------

    def pending_stage(self) -> str:
        """Return what the present options will redo at the next training call: "export", "graph", "session" or ""."""
        stage = self.stage_of(self.options)
        return "" if stage == "step" else stage

    @property
    def built_options(self) -> Options | None:
        """Switches of what the next training call would find built; None if nothing is built."""
        current = self._sessions.last()
        return None if current is None else current.options

    def stage_of(self, options: Options) -> str:
        """Return what some options, which are not set, would redo at the next training call for the last input."""
        # That is "export", "graph", "session", "step" (they act in the next step, with nothing to redo) or "" (nothing
        # changes). What was built before and is still kept counts as there.
        current = self._sessions.last()
        if current is None:
            return "export"
        stage = self._stage(current, options)
        before, after = self._options_schema(current.options), self._options_schema(options)
        if before == after and stage not in ("export", "graph"):
            return stage
        schema = tuple(entry for entry in current.kept.schema if entry not in before) + after
        kept = self._find(schema, options, training=current.kept.export.training)
        if kept is None:
            return "export"
        return "graph" if kept.export.graph(options) is None else "session"

    @property
    def execution(self) -> Execution:
        """The training execution, or the inference one where no training step has run."""
        return self.execution_of(self.options)

    def execution_for(self, *, training: bool) -> Execution:
        """Return what runs in one mode; raises BuildError where nothing has been built for the present options yet."""
        return self.execution_of(self.options, training=training)

    def execution_of(self, options: Options, *, training: bool | None = None) -> Execution:
        """Return what runs with some switches, without building; raises BuildError where nothing is built for them."""
        # Without a mode it is the training execution, or the inference one where no training step has run.
        found = self.ready(options, training=training)
        if found is not None:
            return found
        self.check_buildable(options)
        if self._sessions.last(training=training) is None and self._sessions.last() is not None:
            assert training is not None  # noqa: S101 - otherwise both are the same session
            raise _no_graph_for(training=training)
        if training is False:
            raise BuildError(
                "There is no inference graph for the present options yet.",
                why="ONNX Runtime builds it in the first call after a change, because it needs a batch for that.",
                fix="Call the model for inference once: model.eval(), then `with torch.no_grad(): model(...)`.",
            )
        raise BuildError(
            "There is no graph for the present options yet.",
            why="ONNX Runtime builds it from a step, because it needs a batch for that, and this lab remembers none.",
            fix="Run a step first: %%ort_step, lab.step(fn), or call the model once.",
        )

    def ready(self, options: Options, *, training: bool | None = None) -> Execution | None:
        """Return what is there and runs with some switches as it is; None if something would have to be redone."""
        last = self._sessions.last(training=training)
        mode = training if last is None else last.execution.training
        earlier = [] if mode is None else self._sessions.earlier(training=mode)
        # Those of the last call's kind come before those of other batches.
        earlier = sorted(earlier, key=lambda one: last is not None and one.kept.schema == last.kept.schema)
        kept = [*earlier, *([] if last is None else [last])]
        return next((one.execution for one in reversed(kept) if self._stage(one, options) in _NOTHING), None)

    def check_buildable(self, options: Options) -> None:
        """Raise BuildError if PyTorch executed the last step with these switches, as a fallback: there is no graph."""
        if self._failed is not None and self._failed[1] == options:
            raise BuildError(
                "There is no graph: PyTorch executed the last step, not ONNX Runtime.",
                why=self.fallback_reason,
                fix="Correct that, or wrap a part of the model only: ortlab.wrap(model, only=[...]).",
            )

    def called_again(self) -> tuple[str, ...]:
        """Return the paths of the blocks that the forward calls several times; none before a step has run."""
        from ortlab.engine.recompute_words import called_again

        last = self._sessions.last()
        if last is not None:
            graph = last.execution.unrepeated.models.optimized_model.graph
            self._called_again = called_again(graph, last.execution.module)
        return self._called_again

    def graph_digests(self) -> dict[str, str]:
        """Return SHA-256 digests of the training graph without and with its gradient; none after a fallback."""
        built = self._sessions.last(training=True)
        if built is None or self.executed_by != EXECUTED_BY_ORT:
            return {}
        return {
            stage: hashlib.sha256(built.execution.serialized_graph(stage)).hexdigest()[:16]
            for stage in ("processed", "gradient")
        }

    def close(self, *, forget: bool = False) -> None:
        """Free all sessions; the exports and graphs are kept for the module's next lab, unless `forget` drops them."""
        self._sessions.release()
        if forget:
            kept_builds.forget(self._module)

    def _execution(self, schema: Schema, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Execution:
        training = self._trains(args, kwargs)
        current = self._sessions.last(training=training)
        starts_over = training and self._starts_over
        if current is not None and not starts_over and self._serves(current, schema, args, kwargs):
            return current.execution
        for earlier in self._sessions.earlier(training=training):
            if self._serves(earlier, schema, args, kwargs):
                self._sessions.keep(earlier, usable=self._may_serve)
                return earlier.execution
        changed = self._what_changed(current, schema, args, kwargs)
        self.rebuild_reason = changed or self._why(current)
        with one_build_at_a_time, restored_on_failure(), saving_apart(), _outside_inference_mode():
            try:
                built = self._build(schema, *_ordinary((args, kwargs)), changed)
            except OrtlabError:
                raise
            except Exception as error:
                raise explain_build_failure(
                    error, self._module, self._original_forward, args, kwargs, self.options, self._lines
                ) from error
        if current is not None and starts_over:
            self._sessions.release_last(training=training)
        self._sessions.keep(built, usable=self._may_serve)
        self._starts_over = self._starts_over and not training
        self._say_absent_plans(built.execution)
        return built.execution

    def _trains(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Tell whether a call needs a gradient graph; in eval mode, only autograd knows."""
        if self._module.training or not torch.is_grad_enabled():
            return self._module.training
        tensors = (*self._module.parameters(), *tree_leaves((args, kwargs)))
        return any(isinstance(one, torch.Tensor) and one.requires_grad for one in tensors)

    def _serves(self, built: Built, schema: Schema, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Tell whether what was built can run a call as it is."""
        return (
            built.kept.is_for(schema)
            and built.deterministic == torch.are_deterministic_algorithms_enabled()
            and self._is_up_to_date(built)
            and built.kept.export.sizes.hold(args, kwargs)
            and not built.execution.outgrown(args, kwargs)
        )

    def _is_up_to_date(self, built: Built) -> bool:
        """Tell whether the present options ask for nothing that would have to be redone."""
        return self._stage(built, self.options) in _NOTHING

    def _may_serve(self, built: Built) -> bool:
        """Tell whether the present options, or a measurement with them, which needs no arena, would use it as it is."""
        without_arena = self.options.replace(cpu_memory_arena=False)
        return self._is_up_to_date(built) or self._stage(built, without_arena) in _NOTHING

    def _build(self, schema: Schema, args: Sequence[Any], kwargs: Mapping[str, Any], changed: str) -> Built:
        from ortlab.engine.execution import Execution
        from ortlab.engine.sessions import available_providers

        check_module(self._module, available_providers())
        check_call(self._module, args, kwargs)
        started, self._lines = time.perf_counter(), {}
        training = self._trains(args, kwargs)
        execution = Execution(self._module, self.options, self._log, training=training, part=self._part)
        try:
            kept, exported = self._export(execution, schema, args, kwargs)
            execution.take_export(kept.export)
            self._lines = execution.lines
            graph = kept.export.graph(self.options)
            built = graph is None
            if graph is None:
                self._progress("Building the gradient graph" if training else "Optimising the graph", 0.6)
                graph = execution.build_graph(args, kwargs)
                kept.export.keep(graph)
            execution.take_graph(graph)
            self._progress("Creating the ONNX Runtime session", 0.75)
            execution.create_session(args, kwargs)
            self._progress("", 1.0)
        except BaseException:
            execution.release_session()
            raise
        stage = "export" if exported else "graph" if built else "session"
        if changed:  # no change of options asked for it, so it is said
            with self._log.during(stage):
                where = f"{self._part}: " if self._part else ""
                self._log.add("WARNING", ORTLAB, f"{where}Built anew from the {stage} on: {changed}.")
        self._on_built(execution.initialization_since(stage, (time.perf_counter() - started) * 1000, changed))
        deterministic = torch.are_deterministic_algorithms_enabled()
        return Built(kept, graph, self.options, deterministic, execution)

    def _export(
        self, execution: Execution, schema: Schema, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[KeptExport, bool]:
        """Return an export for a call, and whether it had to be made: one that is kept, or else a new one."""
        kept = self._find(schema, self.options, training=execution.training, call=(args, kwargs))
        if kept is not None:
            kept_builds.keep(self._module, kept)
            return kept, False
        self._progress("Exporting the model to ONNX", 0.0)
        if self.options.export_cache_dir:
            from ortlab.engine.disk_cache.cache import cached_export

            export = cached_export(execution, args, kwargs)
        else:
            export = execution.export(args, kwargs)
        written = written_state(export.processed)
        if not written <= kept_builds.written_buffers(self._module):
            kept_builds.note_written(self._module, written)
            self._state = ()  # it is read without them from now on
        # A forward may settle an attribute in its first call, which was the trace: a `config.problem_type`, for one. A
        # rerun takes that back, and needs no other export.
        made = KeptExport(self._schema(args, kwargs), export, unsettled=schema)
        made = made.joined_to(kept_builds.kept_exports(self._module))
        if (
            not self.options.zero_stage3
        ):  # DeepSpeed's table of parameters stays with the execution that exported
            kept_builds.keep(self._module, made)
        return made, True

    def _find(
        self,
        schema: Schema,
        options: Options,
        *,
        training: bool,
        call: tuple[Sequence[Any], Mapping[str, Any]] | None = None,
    ) -> KeptExport | None:
        mine = self._sessions.exports()
        # Files of graphs are written while these are made: others' exports would leave a folder empty.
        others = () if options.save_onnx else kept_builds.kept_exports(self._module)
        return kept_builds.find((*mine, *others), schema, options, training=training, call=call)

    def _stage(self, built: Built, options: Options) -> str:
        if built.options is options:  # as in every step but those after a change
            return ""
        effect = built.options.stage_of_change(options, ignoring=built.kept.export.inert)
        return "" if effect is None else STAGES.get(effect, "export")

    def _what_changed(
        self, current: Built | None, schema: Schema, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> str:
        """Say in one clause what changed in the call or in the module since the last build; empty if nothing did."""
        if current is None:
            return ""
        changed = difference(current.kept.schema, schema)
        return changed or current.kept.export.sizes.difference(args, kwargs)

    def _why(self, current: Built | None) -> str:
        if current is None:
            return "first call in this mode"
        names = ", ".join(current.options.changed(self.options))
        if names:
            return f"options changed: {names}"
        if self._starts_over:
            return "recomputed dropout draws from the start again"
        if current.deterministic == torch.are_deterministic_algorithms_enabled():
            return "the batch has grown, and a session with more threads runs it"
        return "deterministic algorithms were switched"

    def _schema(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Schema:
        if self._reader.state() != self._state:
            written = kept_builds.written_buffers(self._module)
            self._reader = ModuleReader(self._module, self._functions, written)
            self._state = self._reader.state()
            self._module_schema = module_schema(self._module, self._functions, written)
            self._device_type = next((one.device.type for one in self._module.parameters()), "cpu")
        parts = [call_schema(args, kwargs), surroundings(self._device_type), self._module_schema]
        parts.append(graph_optimizers.registered(type(self._module).__name__))
        if self.options.static_shape:
            parts.append(batch_sizes(args, kwargs))
        parts.append(self._options_schema(self.options))
        if parts != self._last_schema[0]:  # else it is the same object, which nobody has to read again
            self._last_schema = parts, tuple(chain.from_iterable(parts))
        return self._last_schema[1]

    def _options_schema(self, options: Options) -> Schema:
        if options.memory_level == 1 and any(
            getattr(part, "gradient_checkpointing", False) for part in self._module.modules()
        ):
            # At this level ORTModule traces through torch.utils.checkpoint, and ORT recomputes instead of torch.
            return (("gradient checkpointing", "traced through"),)
        return ()


@contextmanager
def _outside_inference_mode() -> Iterator[None]:
    """Exchange ``torch.inference_mode`` for ``torch.no_grad``, which lets exports ask for gradients."""
    # A build in that mode would take every result for one that has no gradient, and keep that for later calls.
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(mode=False), torch.no_grad():
        yield


def _ordinary(call: tuple[Sequence[Any], Mapping[str, Any]]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Copy the tensors of a call that were made in ``torch.inference_mode``, which autograd does not follow."""
    copied: tuple[Sequence[Any], Mapping[str, Any]] = tree_map_only(
        torch.Tensor, lambda one: one.clone() if one.is_inference() else one, call
    )
    return copied


def _no_graph_for(*, training: bool) -> BuildError:
    if training:
        return BuildError(
            "There is no training graph.",
            why="So far the model was called for inference only: in eval mode, or without gradients.",
            fix="Run a training step: model.train(), then %%ort_step or lab.step(fn).",
        )
    return BuildError(
        "There is no inference graph.",
        why="So far the model was called for training only, and inference has a graph of its own.",
        fix="Call it for inference once: model.eval(), then `with torch.no_grad(): model(...)`.",
    )
