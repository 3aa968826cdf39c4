"""One executable form of a module: exported, with its gradient graph, in an ONNX Runtime session.

ORTModule 1.19.2 does all of it inside its first forward, reads its switches from the environment on the way, and can
redo nothing but everything. Here the same code is driven stage by stage - export, graph, session - so that a changed
switch redoes only what it touches, and a failed or interrupted stage leaves the last working form as it was.

Importing this module loads ONNX Runtime.
"""

# ruff: noqa: E402 - onnxruntime.training can be imported only after load() has prepared torch for it

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ortlab.engine import load
from ortlab.engine.build_environment import build_environment
from ortlab.engine.build_log import python_messages, runtime_messages
from ortlab.engine.memory_report import PROBE_ANYWHERE, PROBE_WITHIN_LAYERS, MemoryReport, plans_of_level
from ortlab.engine.sessions import make_manager, register_operators
from ortlab.engine.symbolics import ATEN_CROSS_ENTROPY
from ortlab.runs import Initialization

load()

from onnxruntime.training.ortmodule._custom_autograd_function import (
    custom_autograd_function_enabler,
    enable_custom_autograd_support,
)
from onnxruntime.training.ortmodule._graph_transition_manager import GraphTransitionManager
from onnxruntime.training.ortmodule._logger import ORTModuleInitPhase

if TYPE_CHECKING:
    from ortlab.messages import Message
    from ortlab.options import Options

Progress = Callable[[str, float], None]
"""Called with what is being done and the fraction done so far, 0 to 1."""


class Execution:
    """A module that ONNX Runtime can run, for one mode, one input schema and one set of options.

    Each stage makes a new object that shares the earlier stages' results with the old one.

    Parameters
    ----------
    module
        The user's module. Its parameters are read at each step, its forward only while it is exported.
    options
        The switches.
    training
        Whether a gradient graph is built; otherwise outputs carry no gradient.
    """

    def __init__(self, module: torch.nn.Module, options: Options, *, training: bool) -> None:
        self.module = module
        self.options = options
        self.training = training
        self._said: dict[str, list[Message]] = {"export": [], "graph": [], "session": []}
        self._state: tuple[object, ...] = ()
        self._reports: dict[str, MemoryReport] = {}
        with self._environment():
            self._manager = make_manager(module, options, training=training)

    # ---- stages -----------------------------------------------------------------------------------------------

    def export(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Trace the module to ONNX and infer shapes."""
        manager = self._manager
        autograd = custom_autograd_function_enabler.state
        cross_entropy = ATEN_CROSS_ENTROPY.set(self.options.aten_cross_entropy)
        try:
            with self._environment(), _without_hooks(self.module), python_messages(self._said["export"]):
                enable_custom_autograd_support(self.options.custom_autograd)
                manager._runtime_options.enable_custom_autograd_function = self.options.custom_autograd
                register_operators(self.options.opset)
                transition = manager._graph_transition_manager
                transition.get_post_processed_model(tuple(args), dict(kwargs))
                self._leave_out_frozen_parameters(transition)
        finally:
            enable_custom_autograd_support(autograd)
            ATEN_CROSS_ENTROPY.reset(cross_entropy)

    def build_graph(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Optimise the exported graph and build its gradient."""
        manager = self._manager
        said = self._said["graph"]
        with self._environment(), python_messages(said), runtime_messages(said):
            manager._initialize_graph_builder(self._info)
            manager._detect_from_inputs(tuple(args), dict(kwargs))
            manager._build_graph(manager._get_graph_transformer_config())
        self._collect_symbols(args, kwargs)

    def create_session(self) -> None:
        """Create the ONNX Runtime session that executes the graph, with the memory plans applied."""
        manager = self._manager
        plans = self._plans()
        with runtime_messages(self._said["session"]):
            manager.create_session(plans)
        manager._gradient_accumulation_manager.initialize(
            manager._runtime_options.enable_grad_acc_optimization,
            manager._flattened_module,
            manager._graph_info,
        )

    def with_options(self, options: Options, *, keep_graph: bool) -> Execution:
        """Make an execution with other options that shares this one's export, and its graph if `keep_graph`.

        The stages that are not shared still have to be run on the result.
        """
        other = Execution(self.module, options, training=self.training)
        mine, its = self._manager, other._manager
        its._graph_transition_manager = mine._graph_transition_manager
        its._flattened_module = mine._flattened_module
        other._said["export"] = self._said["export"]
        if keep_graph:
            other._said["graph"] = self._said["graph"]
            for name in ("_graph_builder", "_graph_info", "_onnx_models", "_gradient_map"):
                if hasattr(mine, name):
                    setattr(its, name, getattr(mine, name))
            its.symbols = mine.symbols
            other._reports = self._reports
        return other

    # ---- running ----------------------------------------------------------------------------------------------

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any], state: tuple[object, ...]) -> Any:
        """Run the forward graph; the result's backward runs the gradient graph.

        Parameters
        ----------
        args, kwargs
            The arguments of the module's forward.
        state
            What `schema.module_state` returned; another object than in the last call if any tensor was replaced.
        """
        if state is not self._state:
            # The manager keeps references to parameters and buffers from its first run on: make it look again.
            self._info._buffer_for_ort_runs = None
            self._state = state
        return self._manager.forward(*args, **kwargs)

    def release_session(self) -> None:
        """Free the session and its memory; the export and the graph stay for a later `with_options`."""
        self._manager._execution_agent = None

    # ---- reading ----------------------------------------------------------------------------------------------

    @property
    def messages(self) -> tuple[Message, ...]:
        """What was said while it was built, each message once."""
        return tuple(dict.fromkeys(message for said in self._said.values() for message in said))

    def initialization_since(self, stage: str, total_ms: float) -> Initialization:
        """Read ORT's own tracker for the stages that were run.

        Parameters
        ----------
        stage
            The earliest of them: "export", "graph" or "session".
        total_ms
            Wall time of the whole build, in ms; shape inference, for one, is in no phase of the tracker.
        """
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
        return Initialization(stage=stage, **phases, total_ms=total_ms)

    def memory_report(self, probe: str = PROBE_ANYWHERE) -> MemoryReport:
        """Ask ORT what is kept for backward and which plans there are; asked once per gradient graph."""
        if probe not in self._reports:
            with runtime_messages(self._said["session"]):
                insight, savings = self._manager.probe_memory(probe)
            self._reports[probe] = MemoryReport(insight, dict(savings), dict(self._manager.symbols))
        return self._reports[probe]

    def serialized_graph(self, stage: str) -> bytes:
        """Return one of the five graphs of this execution as a serialised ONNX model.

        Parameters
        ----------
        stage
            "exported", "processed", "optimized" (before the gradient is built), "gradient" or "execution".
        """
        manager = self._manager
        if stage == "exported":
            return bytes(
                manager._graph_transition_manager._exported_model_info.exported_model.SerializeToString()
            )
        if stage == "processed":
            return bytes(self._info._post_export_processed_model.SerializeToString())
        if stage == "optimized":
            return bytes(manager._graph_builder.get_forward_model())
        if stage == "gradient":
            return bytes(manager._onnx_models.optimized_model.SerializeToString())
        plans = self._plans()
        with runtime_messages([]):  # the session has said it all when it was created first
            return bytes(manager.execution_graph(plans))

    # ---- parts ------------------------------------------------------------------------------------------------

    @property
    def _info(self) -> Any:
        return self._manager._graph_transition_manager._post_export_processed_model_info

    def _environment(self) -> Any:
        # The plan file is written when the session is created; the fallback is ortlab's own (see OrtEngine).
        options = self.options.replace(memory_plan=(), fallback=False)
        return build_environment(options.environment())

    def _plans(self) -> list[str]:
        if not self.training:
            return []
        if self.options.memory_level == 0:
            return list(self.options.memory_plan)
        return plans_of_level(self.memory_report(PROBE_WITHIN_LAYERS), self.options.memory_level)

    def _leave_out_frozen_parameters(self, transition: Any) -> None:
        # ORTModule asks for the gradients of all parameters at first, and would notice the frozen ones at the second
        # step (GraphTransitionManager._reprocess_check) if the default skip-check policy did not skip that.
        exported = transition._exported_model_info
        wanted = {
            name
            for name, parameter in transition._flatten_module.named_parameters()
            if parameter.requires_grad
        }
        wanted |= set(exported.onnx_graph_input_names_require_grad_user_defined)
        names = [name for name in exported.onnx_graph_input_names_require_grad if name in wanted]
        if not self.training or names == exported.onnx_graph_input_names_require_grad:
            return
        exported.onnx_graph_input_names_require_grad = names
        transition._post_export_processed_model_info = GraphTransitionManager._post_export_process(
            flatten_module=transition._flatten_module,
            export_mode=transition._export_mode,
            exported_model_info=exported,
            model_info_for_export=transition._model_info_for_export,
            enable_custom_autograd_function=transition._runtime_options.enable_custom_autograd_function,
            enable_zero_stage3_support=transition._runtime_options.enable_zero_stage3_support,
            run_symbolic_shape_infer=transition._runtime_options.run_symbolic_shape_infer,
            stage3_param_handle=transition,
            enable_mem_efficient_grad_management=transition._runtime_options.enable_mem_efficient_grad_management,
            logger=transition._logger,
        )

    def _collect_symbols(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        values = self._info.construct_inputs(tuple(args), dict(kwargs), True, self._manager._device)  # noqa: FBT003
        self._info._buffer_for_ort_runs = None
        self._manager.symbols = {
            symbol: int(values[name].size(dimension))
            for name, axes in self._info.onnx_graph_input_dynamic_axes_map.items()
            if isinstance(values.get(name), torch.Tensor)
            for dimension, symbol in axes.items()
        }


@contextmanager
def _without_hooks(module: torch.nn.Module) -> Iterator[None]:
    """Keep the module's own forward hooks out of its trace: its caller runs them, around ORT's forward."""
    hooks = {name: getattr(module, name) for name in ("_forward_hooks", "_forward_pre_hooks")}
    try:
        for name in hooks:
            setattr(module, name, OrderedDict())
        yield
    finally:
        for name, before in hooks.items():
            setattr(module, name, before)
