"""One executable form of a module: exported, with its gradient graph, in an ONNX Runtime session.

ORTModule 1.19.2 does all of it inside its first forward, reads its switches from the environment on the way, and can
redo nothing but everything. Here the same code is driven stage by stage - export, graph, session - so that a changed
switch redoes only what it touches, and a failed or interrupted stage leaves the last working form as it was.

Importing this module loads ONNX Runtime.
"""

# ruff: noqa: E402 - onnxruntime.training can be imported only after load() has prepared torch for it

from __future__ import annotations

import json
import logging
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ortlab.engine import load
from ortlab.engine.build_environment import build_environment
from ortlab.engine.build_log import python_messages, runtime_messages
from ortlab.engine.callback_error import take_error
from ortlab.engine.diagnosis import explain_execution_failure
from ortlab.engine.memory_report import PROBE_ANYWHERE, PROBE_WITHIN_LAYERS, MemoryReport, plans_of_level
from ortlab.engine.schema import tensor_identities
from ortlab.runs import Initialization

ortmodule = load()

import onnxruntime
from onnxruntime.capi import _pybind_state as C
from onnxruntime.tools import pytorch_export_contrib_ops
from onnxruntime.training.ortmodule import DebugOptions, LogLevel, _io, _use_deterministic_algorithms
from onnxruntime.training.ortmodule._custom_autograd_function import (
    custom_autograd_function_enabler,
    enable_custom_autograd_support,
)
from onnxruntime.training.ortmodule._custom_gradient_registry import CustomGradientRegistry
from onnxruntime.training.ortmodule._custom_op_symbolic_registry import CustomOpSymbolicRegistry
from onnxruntime.training.ortmodule._fallback import _FallbackManager, _FallbackPolicy
from onnxruntime.training.ortmodule._graph_transition_manager import GraphTransitionManager
from onnxruntime.training.ortmodule._inference_manager import InferenceManager
from onnxruntime.training.ortmodule._logger import (
    ORTModuleInitPhase,
    configure_ortmodule_logger,
    ortmodule_loglevel_to_onnxruntime_c_loglevel,
)
from onnxruntime.training.ortmodule._training_manager import TrainingManager

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
        self._identities: tuple[int, ...] = ()
        self._reports: dict[str, MemoryReport] = {}
        with self._environment():
            self._manager = _manager(module, options, training=training)

    # ---- stages -----------------------------------------------------------------------------------------------

    def export(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Trace the module to ONNX and infer shapes."""
        manager = self._manager
        autograd = custom_autograd_function_enabler.state
        try:
            with self._environment(), _without_hooks(self.module), python_messages(self._said["export"]):
                enable_custom_autograd_support(self.options.custom_autograd)
                manager._runtime_options.enable_custom_autograd_function = self.options.custom_autograd
                _register_operators(self.options.opset)
                transition = manager._graph_transition_manager
                transition.get_post_processed_model(tuple(args), dict(kwargs))
                self._leave_out_frozen_parameters(transition)
        finally:
            enable_custom_autograd_support(autograd)

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

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the forward graph; the result's backward runs the gradient graph."""
        identities = tensor_identities(self.module)
        if identities != self._identities:
            # The manager keeps references to parameters and buffers from its first run on: make it look again.
            self._info._buffer_for_ort_runs = None
            self._identities = identities
        return self._manager.forward(*args, **kwargs)

    def release_session(self) -> None:
        """Free the session and its memory; the export and the graph stay for a later `with_options`."""
        self._manager._execution_agent = None

    # ---- reading ----------------------------------------------------------------------------------------------

    @property
    def messages(self) -> tuple[Message, ...]:
        """What was said while it was built, each message once."""
        return tuple(dict.fromkeys(message for said in self._said.values() for message in said))

    @property
    def device(self) -> str:
        """The device that the session runs on, as torch names it."""
        return str(self._manager._device)

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


class _SessionOptions:
    """What ortlab sets in a session that ORTModule 1.19.2 does not; mixed into both of its managers."""

    options: Options
    symbols: dict[str, int]
    _execution_agent: Any

    def _get_session_config(self) -> Any:
        session_options, providers, provider_options = super()._get_session_config()  # type: ignore[misc]
        # 1.19.2 passes its own enumeration for ORT's severity, so that WARNING hides warnings and FATAL is refused
        # (rows T9, T10).
        level = self._debug_options.logging.log_level  # type: ignore[attr-defined]
        session_options.log_severity_level = int(ortmodule_loglevel_to_onnxruntime_c_loglevel(level))
        session_options.enable_cpu_mem_arena = self.options.cpu_memory_arena
        if not self.options.intra_op_spinning:
            session_options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if self.execution_graph_file:
            session_options.optimized_model_filepath = self.execution_graph_file
        return session_options, providers, provider_options

    execution_graph_file = ""

    def execution_graph(self, plans: list[str]) -> bytes:
        """Create another session, only to have it write the graph that it executes."""
        agent = self._execution_agent
        with tempfile.TemporaryDirectory(prefix="ortlab-") as folder:
            self.execution_graph_file = str(Path(folder) / "execution.onnx")
            try:
                self.create_session(plans)
                return Path(self.execution_graph_file).read_bytes()
            finally:
                self.execution_graph_file = ""
                self._execution_agent = agent

    def create_session(self, plans: list[str]) -> None:
        """Create the session that the manager runs, with these memory plans applied."""
        deterministic = torch.are_deterministic_algorithms_enabled()
        _use_deterministic_algorithms(deterministic)
        runtime = self._runtime_options  # type: ignore[attr-defined]
        with tempfile.TemporaryDirectory(prefix="ortlab-") as folder:
            # 1.19.2 reads plans from a JSON file only (row T8), and only while it creates the session.
            runtime.memory_optimizer_config_file_path = ""
            if plans:
                file = Path(folder) / "plans.json"
                file.write_text(json.dumps(plans), encoding="utf-8")
                runtime.memory_optimizer_config_file_path = str(file)
            self._create_execution_agent()  # type: ignore[attr-defined]
        if hasattr(self._execution_agent, "run_backward"):
            self._execution_agent = _ExplainingAgent(self._execution_agent)


class _ExplainingAgent:
    """A training agent whose backward failures name the operator or Function that raised, not ORT's wrapper of it."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def run_backward(self, feeds: Any, fetches: Any, state: Any) -> None:
        """Run the backward graph, as `TrainingAgent.run_backward`."""
        take_error()
        try:
            self._agent.run_backward(feeds, fetches, state)
        except Exception as error:
            raise explain_execution_failure(error) from error


class _Training(_SessionOptions, TrainingManager):  # type: ignore[misc] # untyped base
    """ORTModule's training manager, which ortlab drives stage by stage."""

    def probe_memory(self, probe: str) -> tuple[str, Mapping[str, tuple[str, int]]]:
        """Ask a session without plans, since the answer of one with plans lacks what those have removed."""
        agent = self._execution_agent
        level = self._runtime_options.memory_optimization_level
        try:
            if agent is None or self._runtime_options.memory_optimizer_is_enabled():
                self._runtime_options.memory_optimization_level = 0
                self.create_session([])
            answer: tuple[str, Mapping[str, tuple[str, int]]] = (
                self._execution_agent.get_serialized_ortmodule_memory_stat("", probe, True)  # noqa: FBT003
            )
        finally:
            self._runtime_options.memory_optimization_level = level
            self._execution_agent = agent
        return answer


class _Inference(_SessionOptions, InferenceManager):  # type: ignore[misc] # untyped base
    """ORTModule's inference manager, which ortlab drives stage by stage."""


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


class _FlattenedModule(_io._FlattenedModule):  # type: ignore[misc] # untyped base
    """What ORTModule exports in the module's place; torch's exporter cannot switch the module's mode through it.

    For an export with `TrainingMode.TRAINING`, torch calls `train(True)` on everything and leaves it so
    (`torch.onnx.utils.select_model_mode_for_export`): a BatchNorm that the user keeps in eval while the model trains
    would be trained from then on.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        self.training = module.training

    def train(self, mode: bool = True) -> _FlattenedModule:  # noqa: ARG002, FBT001, FBT002 - torch's signature
        """Change nothing: every part of the user's module is exported in the mode it is in."""
        return self


def _manager(module: torch.nn.Module, options: Options, *, training: bool) -> Any:
    debug = DebugOptions(
        log_level=LogLevel[options.log_level],
        save_onnx=options.save_onnx,
        onnx_prefix=options.save_onnx_prefix or type(module).__name__,
    )
    logger: logging.Logger = configure_ortmodule_logger(debug.logging.log_level)
    fallback = _FallbackManager(module, _FallbackPolicy.FALLBACK_DISABLE, False, logger)  # noqa: FBT003
    flattened = _FlattenedModule(module)
    manager = (_Training if training else _Inference)(flattened, debug, fallback, logger)
    manager.options = options
    manager.symbols = {}
    manager._first_skip_check_warning = False
    # ORTModule would create a second session in each build, only to print the plans; see memory_report().
    manager._runtime_inspector.memory_ob._is_enabled = False
    _apply_unnamed_switches(manager._runtime_options, options)
    return manager


def _apply_unnamed_switches(runtime: Any, options: Options) -> None:
    """Set the switches that 1.19.2 has no environment variable for."""
    runtime.propagate_cast_ops_level = options.cast_level
    runtime.propagate_cast_ops_strategy = getattr(C.PropagateCastOpsStrategy, options.cast_strategy)
    runtime.propagate_cast_ops_allow = list(options.cast_allow)
    runtime.use_static_shape = options.static_shape
    runtime.run_symbolic_shape_infer = options.symbolic_shape_inference
    runtime.use_external_gpu_allocator = options.external_gpu_allocator
    runtime.enable_grad_acc_optimization = options.grad_accumulation_cache
    runtime.use_memory_efficient_gradient = options.memory_efficient_gradient


def _register_operators(opset: int) -> None:
    """Register symbolics and gradients as `ORTModule.__init__` does."""
    pytorch_export_contrib_ops.register()
    CustomOpSymbolicRegistry.register_all(opset)
    CustomGradientRegistry.register_all()


def seed(value: int) -> None:
    """Seed ONNX Runtime's own generator, from which its Dropout draws; its state cannot be read, only set.

    Parameters
    ----------
    value
        At least 2: seeds 0 and 1 start the same stream on the CPU (row T13).
    """
    onnxruntime.set_seed(value)


def versions() -> dict[str, str]:
    """Return the versions that a run's numbers depend on."""
    import onnx

    return {"torch": torch.__version__, "onnxruntime": onnxruntime.__version__, "onnx": onnx.__version__}
