"""What can be read of an execution: its graphs, the plans in it, and how long it took to build.

Importing this module loads ONNX Runtime.
"""

# ruff: noqa: E402 - onnxruntime.training can be imported only after load() has prepared torch for it

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import onnx

from ortlab.engine import load
from ortlab.engine.build_log import runtime_messages
from ortlab.engine.inspection.places import forward_line
from ortlab.engine.passes import chunked_loss
from ortlab.engine.passes.label_density import label_totals
from ortlab.engine.recompute_plans import PROBE_ANYWHERE, MemoryReport, check_places, find_places
from ortlab.graphs.stages import TracedModel
from ortlab.memory.recompute import NOTHING, RecomputeChoice, are_partial
from ortlab.records.messages import MessageLog
from ortlab.records.runs import Initialization

load()

from onnxruntime.training.ortmodule._logger import ORTModuleInitPhase

if TYPE_CHECKING:
    import torch

    from ortlab.engine.kept_builds import BuiltGraph, Export
    from ortlab.memory.recompute import RecomputePlaces
    from ortlab.options.options import Options


class ExecutionView:
    """The base class of `Execution` whose methods only look at an execution, and change nothing."""

    options: Options
    log: MessageLog
    training: bool
    unrepeated: BuiltGraph  # the graph as it is without the switch `recompute`
    _export: Export
    _graph: BuiltGraph
    _manager: Any

    @property
    def built(self) -> BuiltGraph:
        """The graph that its session was made of."""
        return self._graph

    @property
    def plans(self) -> tuple[str, ...]:
        """Configurations of the memory plans that its session applies."""
        if self.options.memory_level == 0:
            return tuple(self.options.memory_plan) if self.training else ()
        return tuple(f"{name}:{count}" for name, count in self.recompute_choice().counts.items())

    @property
    def repeats_forward(self) -> bool:
        """Whether nodes run again in the backward because of the switch `recompute`, whatever plans add."""
        return bool(self._manager.copies)

    @property
    def orders_for_memory(self) -> bool:
        """Whether its session runs nodes in ORT's memory-efficient order, as one that recomputes anything does."""
        return bool(self.plans) or self.repeats_forward

    @property
    def loss_blocks(self) -> tuple[int, ...]:
        """Bytes of the logits of one block, for each loss that is computed in blocks of rows."""
        return chunked_loss.block_bytes(self._info, self._graph.symbols)

    @property
    def loss_unchanged(self) -> str:
        """Why a loss that was to be computed in blocks of rows is not; empty if it is, or nobody has asked."""
        said = chunked_loss.messages(self._info, self._graph.symbols)
        return next((text for level, text in said if level == "WARNING"), "")

    @property
    def user_inputs(self) -> frozenset[str]:
        """Names of the graph's inputs that a call gives: not parameters and buffers."""
        return frozenset(self._info.onnx_graph_input_names_user_defined)

    @property
    def recomputes_dropout(self) -> bool:
        """Whether recompute plans are applied to a graph whose dropouts are ONNX Runtime's."""
        if "Dropout" in self._manager.exchanged or not self.plans:
            return False
        return any(
            "Dropout" in node.op_type for node in self._manager._onnx_models.optimized_model.graph.node
        )

    def initialization_since(self, stage: str, total_ms: float, reason: str = "") -> Initialization:
        """Read ORT's own tracker for the stages that were run: `stage` and those after it."""
        # `total_ms` is the wall time of the whole build; shape inference, for one, is in no phase of the tracker.
        order = ("export", "graph", "session")
        done = order[order.index(stage) :]

        def spent(phase: Any, needed: str) -> float:
            seconds = self._manager.time_tracker._get_duration(phase)
            return float(max(seconds, 0.0)) * 1000 if needed in done else 0.0

        phases = {
            "export_ms": spent(ORTModuleInitPhase.EXPORT, "export"),
            "graph_builder_ms": spent(ORTModuleInitPhase.GRAPH_BUILDER_INIT, "graph"),
            "detection_ms": spent(ORTModuleInitPhase.DETECTION, "graph"),
            "graph_ms": spent(ORTModuleInitPhase.BUILD_GRAPH, "graph"),
            "session_ms": spent(ORTModuleInitPhase.CREATE_SESSION, "session"),
        }
        return Initialization(stage=stage, **phases, total_ms=total_ms, reason=reason)

    def memory_report(self, probe: str = PROBE_ANYWHERE) -> MemoryReport:
        """Ask ORT what is kept for backward and which plans there are, once per gradient graph and probe."""
        answers, question = self._export.savings, (self._graph.digest, probe)
        if question not in answers:
            with runtime_messages(self.log, "session"):
                answers[question] = self._manager.probe_memory(probe)
        insight, savings = answers[question]
        totals = label_totals(self._manager._onnx_models.optimized_model)
        return MemoryReport(insight, dict(savings), dict(self._graph.symbols), totals)

    def serialized_graph(self, stage: str) -> bytes:
        """Return one of the five graphs of this execution as a serialised ONNX model."""
        manager = self._manager
        if stage == "exported":
            return bytes(
                manager._graph_transition_manager._exported_model_info.exported_model.SerializeToString()
            )
        if stage == "processed":
            return bytes(self._info._post_export_processed_model.SerializeToString())
        if stage == "optimized":
            return self._graph.forward
        if stage == "gradient":
            return bytes(manager._onnx_models.optimized_model.SerializeToString())
        return self._execution_graph(self.recompute_choice())

    def traced_model(self, model: torch.nn.Module) -> TracedModel:
        """Return what is known of the module that the graphs are of, and stands in none of them; sizes are in bytes."""
        flattened = self._manager._flattened_module
        return TracedModel(
            modules={path: forward_line(part) for path, part in model.named_modules()},
            lines=dict(self._export.lines),
            parameters={name: one.nbytes for name, one in flattened.named_parameters()},
            buffers={name: one.nbytes for name, one in flattened.named_buffers()},
            symbols=dict(self._graph.symbols),
        )

    def execution_graph(self, plans: Sequence[str]) -> bytes:
        """Return the graph that a session with these memory plans would execute, as a serialised ONNX model."""
        return self._execution_graph(self._chosen(plans))

    def recompute_places(self) -> RecomputePlaces:
        """Ask ORT where it would recompute for each of its plans; asked once per gradient graph, of another session."""
        known, digest = self._export.places, self._graph.digest
        if digest not in known:
            lines, graph, answer = self._manager.probe_places()
            places = find_places(lines, onnx.load_model_from_string(graph).graph)
            check_places(places, answer[0])
            known[digest] = places.beside(self._manager.copies)
            self._export.savings.setdefault((digest, PROBE_ANYWHERE), answer)
        return known[digest]

    @property
    def known_places(self) -> RecomputePlaces | None:
        """Where ORT would recompute for each of its plans; None if it has not been asked."""
        return self._export.places.get(self._graph.digest)

    def recompute_choice(self) -> RecomputeChoice:
        """Say which plans the options apply, and in which places."""
        level = self.options.memory_level
        if not self.training or not (level or self.options.memory_plan):
            return NOTHING
        return self.recompute_places().of_level(level) if level else self._chosen(self.options.memory_plan)

    @property
    def _info(self) -> Any:
        return self._manager._graph_transition_manager._post_export_processed_model_info

    def _chosen(self, plans: Sequence[str]) -> RecomputeChoice:
        if are_partial(plans) or self._manager.copies:
            return self.recompute_places().chosen(plans)
        return RecomputeChoice(tuple(plans), (), {})

    def _execution_graph(self, choice: RecomputeChoice) -> bytes:
        with runtime_messages(MessageLog(), "session"):  # it has said it all when it was created first
            return bytes(self._manager.execution_graph(choice.plans, choice.kept))
