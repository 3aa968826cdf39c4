"""ORTModule's training and inference managers, as ortlab drives them: their options, sessions and operators.

Importing this module loads ONNX Runtime.
"""

# ruff: noqa: E402 - onnxruntime.training can be imported only after load() has prepared torch for it

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ortlab.engine import load
from ortlab.engine.callback_error import take_error
from ortlab.engine.diagnosis import explain_execution_failure

load()

import onnxruntime
from onnxruntime.capi import _pybind_state as C
from onnxruntime.tools import pytorch_export_contrib_ops
from onnxruntime.training.ortmodule import DebugOptions, LogLevel, _io, _use_deterministic_algorithms
from onnxruntime.training.ortmodule._custom_gradient_registry import CustomGradientRegistry
from onnxruntime.training.ortmodule._custom_op_symbolic_registry import CustomOpSymbolicRegistry
from onnxruntime.training.ortmodule._fallback import _FallbackManager, _FallbackPolicy
from onnxruntime.training.ortmodule._inference_manager import InferenceManager
from onnxruntime.training.ortmodule._logger import (
    configure_ortmodule_logger,
    ortmodule_loglevel_to_onnxruntime_c_loglevel,
)
from onnxruntime.training.ortmodule._training_manager import TrainingManager

if TYPE_CHECKING:
    from ortlab.options import Options


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


def make_manager(module: torch.nn.Module, options: Options, *, training: bool) -> Any:
    """Make the manager that ORTModule would make, with these options.

    Call it inside `build_environment`: 1.19.2 reads most options from the environment in its constructor.

    Parameters
    ----------
    module
        The user's module.
    options
        The switches.
    training
        Whether it shall build a gradient graph.

    Returns
    -------
    _Training or _Inference
        A manager that has not exported anything yet.
    """
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


def register_operators(opset: int) -> None:
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


def available_providers() -> list[str]:
    """Return the execution providers of the installed ONNX Runtime."""
    return list(onnxruntime.get_available_providers())
