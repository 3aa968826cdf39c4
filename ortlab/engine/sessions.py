"""ORTModule's training and inference managers, as ortlab drives them: their options, sessions and operators.

Importing this module loads ONNX Runtime.
"""

# ruff: noqa: E402 - onnxruntime.training can be imported only after load() has prepared torch for it

from __future__ import annotations

import copy
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import onnx
import torch

from ortlab.engine import build_environment, load
from ortlab.engine.autograd_node import AutogradNode
from ortlab.engine.border import border_watched, take_error
from ortlab.engine.build_environment import building_with
from ortlab.engine.build_log import ortmodule_logger, runtime_lines, runtime_messages, user_code
from ortlab.engine.diagnosis import explain_execution_failure
from ortlab.engine.operators import compiled_calls
from ortlab.engine.operators.dropout import drawn_dropouts, with_quick_dropouts
from ortlab.engine.operators.quick_choice import BEHIND_PLANS, with_quick_choices
from ortlab.engine.operators.torch_backward import TorchBackward
from ortlab.engine.passes.graph_edits import has_inner_graphs, nodes_of
from ortlab.engine.passes.training_graph import leaving_alone
from ortlab.engine.patching import with_attributes
from ortlab.engine.recompute_plans import PROBE_ANYWHERE
from ortlab.errors import BuildError, ExecutionError
from ortlab.memory.recompute import COPY
from ortlab.options.log_levels import log_level
from ortlab.options.option_files import check_onnx_folder

load()

import onnxruntime
from onnxruntime.capi import _pybind_state as C
from onnxruntime.tools import pytorch_export_contrib_ops
from onnxruntime.training.ortmodule import DebugOptions, LogLevel, _io, _use_deterministic_algorithms
from onnxruntime.training.ortmodule._custom_gradient_registry import CustomGradientRegistry
from onnxruntime.training.ortmodule._custom_op_symbolic_registry import CustomOpSymbolicRegistry
from onnxruntime.training.ortmodule._fallback import _FallbackManager, _FallbackPolicy
from onnxruntime.training.ortmodule._inference_manager import InferenceManager
from onnxruntime.training.ortmodule._logger import ORTModuleInitPhase
from onnxruntime.training.ortmodule._training_manager import TrainingManager
from onnxruntime.training.ortmodule._utils import get_rank

if TYPE_CHECKING:
    from ortlab.engine.profiling import Profile
    from ortlab.engine.runtime_log import Line
    from ortlab.options.options import Options
    from ortlab.records.messages import MessageLog

Kept: TypeAlias = Sequence[Sequence[str]]
"""Results that no memory plan recomputes, by node."""

Answer: TypeAlias = tuple[str, Mapping[str, tuple[str, int]]]
"""What ORT reports of memory: its MemoryInsight text, and for each plan the saving, symbolic, and the places."""

_VERBOSE: Final = 0
"""ORT's severity at which its memory optimizer explains itself."""

Collecting = Callable[[], AbstractContextManager[None]]
"""Makes a block in which what ONNX Runtime logs is collected."""

_ROCM_ONLY: Final = "RocmBlasAltImpl"
"""An optimizer of 1.19.2 that marks backward nodes for AMD's matrix library, in sessions without an AMD GPU, too.

It says each time that it has changed the graph (``rocm_blas_alt_impl.cc``), so that ORT runs all optimizers of its
level again until it reaches its limit of ten rounds: half of the time that a session takes to be created. Nothing but
ROCm's kernels reads the marks.
"""

_DROPS_DEVIATION: Final = "SkipLayerNormFusion"
"""Puts an addition and the layer normalisation behind it together, in 1.19.2 without the deviation that the gradient of
`memory_efficient_gradient` reads: it then ends in "Missing Input"."""


_FUSES_WHAT_IS_READ: Final = (
    *("BiasGeluFusion", "FastGeluFusion", "GeluFusionL1", "GeluFusionL2", "QuickGeluFusion"),
    *("EmbedLayerNormFusion", "LayerNormFusionL1", "LayerNormFusionL2", "SimplifiedLayerNormFusion"),
    *("AttentionFusion", "GemmActivationFusion", "MatMulActivationFusion", "ConvActivationFusion"),
    *("ConvAddActivationFusion", _DROPS_DEVIATION),
)
"""Optimizers that put nodes together where nobody else reads what is between them.

In a training graph the backward does, so they find nothing there. Where it reads copies instead they would find the
forward, which rounds otherwise then, and `SkipLayerNormFusion` would end in "Missing Input". The graphs of sessions
without recomputation are the same node for node with these optimizers and without (GPT-2, BERT, Llama, T5), so that
leaving them out costs no time.
"""


class _SessionOptions:
    """What ortlab sets in a session that ORTModule 1.19.2 does not; mixed into both of its managers."""

    options: Options
    collecting: Collecting | None
    _execution_agent: Any

    def _get_session_config(self) -> Any:
        session_options, providers, provider_options = super()._get_session_config()  # type: ignore[misc]
        # 1.19.2 passes its own enumeration for ORT's severity, so that WARNING hides warnings and FATAL is refused.
        session_options.log_severity_level = (
            _VERBOSE if self.explains_places else log_level(self.options.log_level).backend_severity
        )
        session_options.enable_cpu_mem_arena = self.options.cpu_memory_arena
        # At most as many as PyTorch has: left to itself ORT takes all cores, and a comparison of the two says little.
        session_options.intra_op_num_threads = self.threads or torch.get_num_threads()
        if not self.options.intra_op_spinning:
            session_options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        left_out = [] if "ROCMExecutionProvider" in providers else [_ROCM_ONLY]
        left_out += [] if self.options.acts("triton") else [build_environment.FUSION]
        if self.copies:
            left_out += _FUSES_WHAT_IS_READ
        elif self.options.memory_efficient_gradient:
            left_out += [_DROPS_DEVIATION]
        session_options.add_session_config_entry(
            "optimization.disable_specified_optimizers", ";".join(left_out)
        )
        self.users_file = session_options.optimized_model_filepath
        if self.execution_graph_file:
            session_options.optimized_model_filepath = self.execution_graph_file
        if self.profile is not None:
            session_options.enable_profiling = True
            session_options.profile_file_prefix = str(self.profile.prefix)
        if self.memory_efficient_order or self.copies or self.optimized_before:
            session_options.execution_order = onnxruntime.ExecutionOrder.MEMORY_EFFICIENT
        if self.optimized_before:
            session_options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        return session_options, providers, provider_options

    execution_graph_file = ""
    users_file = ""  # where `save_onnx` puts the graph that the session executes
    lines: Mapping[str, str] = MappingProxyType({})  # "file:line" by node of the export
    recomputes = False
    threads = 0  # that its kernels get; 0 for as many as PyTorch has (`ortlab.engine.threads`)
    asks_for_plans = False  # whether it is made only to ask ONNX Runtime for its plans
    exchanged: frozenset[str] = frozenset()  # operators that ortlab computes, at least in some places
    optimized_before = False  # whether another session has optimized the graph that it is made of
    explains_places = False
    memory_efficient_order = False
    # Names of the nodes that `ortlab.engine.passes.recompute` has put into the graph, which act in that order only.
    copies: frozenset[str] = frozenset()
    profile: Profile | None = None

    @contextmanager
    def another_session(self, **settings: object) -> Iterator[None]:
        """Let a session be made with other attributes in the block; afterwards the manager has its own again."""
        # Two threads may ask for a session at once, and these attributes belong to both.
        before = ("_execution_agent", "recomputes", "exchanged")
        with build_environment.one_build_at_a_time, with_attributes(self, before, **settings):
            yield

    @contextmanager
    def graph_written(self) -> Iterator[Path]:
        """Let sessions that are made in the block write the graph that they execute to a file, which is then gone."""
        with (
            build_environment.one_build_at_a_time,
            tempfile.TemporaryDirectory(prefix="ortlab-") as folder,
        ):
            file = Path(folder) / "execution.onnx"
            with with_attributes(self, execution_graph_file=str(file)):
                yield file

    def profiled_agent(
        self, profile: Profile, plans: Sequence[str], kept: Kept, *, memory_efficient_order: bool
    ) -> Any:
        """Create another session, one that ORT's profiler watches, and return its agent."""
        with self.another_session(
            profile=profile,
            execution_graph_file=str(profile.graph_file),
            memory_efficient_order=memory_efficient_order,
        ):
            self.create_session(plans, kept)
            return _ProfiledAgent(self._execution_agent, profile)

    def execution_graph(self, plans: Sequence[str], kept: Kept) -> bytes:
        """Create another session, only to have it write the graph that it executes."""
        with self.another_session(), self.graph_written() as file:
            self.create_session(plans, kept)
            return file.read_bytes()

    def create_session(self, plans: Sequence[str], kept: Kept = ()) -> None:
        """Create the session that the manager runs; each plan acts in all its places, but for results in `kept`."""
        began = time.time()
        deterministic = torch.are_deterministic_algorithms_enabled()
        _use_deterministic_algorithms(deterministic)
        runtime = self._runtime_options  # type: ignore[attr-defined]
        self.recomputes = bool(plans)
        with tempfile.TemporaryDirectory(prefix="ortlab-") as folder:
            # 1.19.2 reads plans from a JSON file only, and only while it creates the session.
            runtime.memory_optimizer_config_file_path = ""
            if plans:
                file = Path(folder) / "plans.json"
                file.write_text(json.dumps(list(plans)), encoding="utf-8")
                runtime.memory_optimizer_config_file_path = str(file)
            with building_with(self.options), self._leaving_alone(kept), self._exchanging(plans):
                self._create_execution_agent()  # type: ignore[attr-defined]
        # What a session took to be created of which this one is made counts, too.
        self.time_tracker.starts_[ORTModuleInitPhase.CREATE_SESSION] = began  # type: ignore[attr-defined]
        graph = self._onnx_models.optimized_model.graph  # type: ignore[attr-defined]
        # What runs in an inner graph is not looked for.
        self.runs_python = any("PythonOp" in one.op_type for one in graph.node) or has_inner_graphs(graph)
        is_trained = hasattr(self._execution_agent, "run_backward")
        self._share_cores()
        if is_trained:
            self._take_seeds()
            self._execution_agent = _ExplainingAgent(
                self._execution_agent, self.collecting, self.options, self.lines
            )

    @contextmanager
    def _exchanging(self, plans: Sequence[str]) -> Iterator[None]:
        """Let the session be made of a graph some of whose nodes PyTorch or the library computes, where they can."""
        graph = self._onnx_models.optimized_model  # type: ignore[attr-defined]
        quick = self._quick(graph)
        # ONNX Runtime recomputes only what is its own: a plan that names one of them has to act before.
        acted = any(operator in plan for operator in self.exchanged for plan in plans)
        if acted:
            quick = self._quick(self._planned_graph())
            _put_in_order_of(graph, quick)
        with self._made_of(quick), self._plans_done() if acted else nullcontext():
            yield

    def _quick(self, graph: onnx.ModelProto) -> onnx.ModelProto:
        """Return what a session is made of in the place of a graph, and note which operators are others in it."""
        quick = graph
        on_cpu = self._device.type == "cpu"  # type: ignore[attr-defined]
        if on_cpu and self.options.aten_backward and not self.asks_for_plans:
            quick = with_quick_choices(with_quick_dropouts(graph) or graph)
        self.exchanged = frozenset(
            operator
            for operator in ("Dropout", *BEHIND_PLANS)
            if len(nodes_of(quick, operator)) < len(nodes_of(graph, operator))
        )
        return quick

    def _planned_graph(self) -> onnx.ModelProto:
        """Create a session only to have it apply the plans."""
        with with_attributes(self, profile=None), self.another_session(), self.graph_written() as file:
            self._create_execution_agent()  # type: ignore[attr-defined]
            planned = onnx.load(file)
        made = {name for node in planned.graph.node for name in node.output}
        # ORT gives no type to what it recomputes.
        for value in list(planned.graph.value_info):
            if f"{value.name}{COPY}" in made:
                planned.graph.value_info.add(name=f"{value.name}{COPY}", type=value.type)
        return planned

    @contextmanager
    def _plans_done(self) -> Iterator[None]:
        """Let the session be made of a graph to which the plans, and all of ONNX Runtime's optimizers, were applied."""
        runtime = self._runtime_options  # type: ignore[attr-defined]
        without = with_attributes(runtime, memory_optimizer_config_file_path="", memory_optimization_level=0)
        with without, with_attributes(self, optimized_before=True):
            yield

    def _take_seeds(self) -> None:
        """Let dropouts that ONNX Runtime computes go on with the seeds of those that ortlab computes."""
        if "Dropout" not in self.exchanged and not compiled_calls.lacking():
            drawn = drawn_dropouts(self._onnx_models.optimized_model)  # type: ignore[attr-defined]
            if drawn:
                self._execution_agent = _SeededAgent(self._execution_agent, drawn)

    def _share_cores(self) -> None:
        """Let PyTorch's threads make room for those of the session, unless Python's code runs in the midst of it."""
        if self.threads > 1 and not self.runs_python:
            self._execution_agent = _SharingAgent(self._execution_agent, self.threads)

    @contextmanager
    def _leaving_alone(self, kept: Kept) -> Iterator[None]:
        """Let the session be made of a graph in which these results cannot be recomputed."""
        if not kept:
            yield
            return
        graph, missing = leaving_alone(self._onnx_models.optimized_model, kept)  # type: ignore[attr-defined]
        if missing:
            raise BuildError(
                "The plans cannot be applied in some of their places only.",
                why=f"ONNX Runtime makes {missing[0]} in no node of the gradient graph.",
                fix="Ask for all places, as in Gelu+:1:-1, or choose other plans.",
            )
        with self._made_of(graph):
            yield

    def _made_of(self, graph: onnx.ModelProto) -> AbstractContextManager[None]:
        """Let sessions that are created in the block be made of another graph."""
        models = copy.copy(self._onnx_models)  # type: ignore[attr-defined]
        models.optimized_model = graph
        return with_attributes(self, _onnx_models=models)


def _put_in_order_of(first: onnx.ModelProto, second: onnx.ModelProto) -> None:
    """Put the nodes of a graph that a session has made of another in the order that they had for that session."""
    # Of two nodes that could both run next, ORT runs the one that comes first in the graph. What its optimizers add
    # comes last. So the order is not a topological one, which ORT does not ask for.
    place = {node.name: number for number, node in enumerate(first.graph.node)}
    nodes = sorted(second.graph.node, key=lambda node: place.get(node.name, len(place)))
    del second.graph.node[:]
    second.graph.node.extend(nodes)


class _WrappedAgent:
    """An agent that does more around its calls than the one of ONNX Runtime inside it."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)


class _SeededAgent(_WrappedAgent):
    """ONNX Runtime's own dropouts take seeds from the count that ortlab's take theirs from."""

    def __init__(self, agent: Any, drawn: int) -> None:
        super().__init__(agent)
        self._drawn = drawn

    def run_forward(self, feeds: Any, fetches: Any, state: Any, cache: Any = None) -> None:
        C.set_seed(compiled_calls.library().ortlab_take_seeds(self._drawn))
        self._agent.run_forward(feeds, fetches, state, cache)


class _SharingAgent(_WrappedAgent):
    """Its session has several threads, which need the cores that PyTorch's threads wait on; see `compiled_calls`."""

    def __init__(self, agent: Any, threads: int) -> None:
        super().__init__(agent)
        self._threads = threads

    def run_forward(self, *given: Any) -> Any:  # a training agent's arguments, or an inference agent's
        try:
            compiled_calls.begin_run(id(self), self._threads)
            return self._agent.run_forward(*given)
        finally:
            compiled_calls.end_run()

    def run_backward(self, feeds: Any, fetches: Any, state: Any) -> None:
        try:
            compiled_calls.begin_run(id(self) + 1, self._threads)
            self._agent.run_backward(feeds, fetches, state)
        finally:
            compiled_calls.end_run()


class _ExplainingAgent(_WrappedAgent):
    """Its backward failures name the operator or Function that raised, not ORT's wrapper of it."""

    def __init__(
        self, agent: Any, collecting: Collecting | None, options: Options, lines: Mapping[str, str]
    ) -> None:
        super().__init__(agent)
        self._collecting, self._options, self._lines = collecting or nullcontext, options, lines

    def run_backward(self, feeds: Any, fetches: Any, state: Any) -> None:
        take_error()
        with border_watched():
            try:
                with self._collecting():
                    self._agent.run_backward(feeds, fetches, state)
            except Exception as error:
                raise explain_execution_failure(error, self._options, self._lines) from error


class _ProfiledAgent(_WrappedAgent):
    """It tells a profile what goes in and out."""

    def __init__(self, agent: Any, profile: Profile) -> None:
        super().__init__(agent)
        self._profile = profile

    def run_forward(self, feeds: Any, fetches: Any, state: Any, cache: Any) -> None:
        with self._profile.timing("session"):
            self._agent.run_forward(feeds, fetches, state, cache)
        self._profile.after_forward(fetches)

    def run_backward(self, feeds: Any, fetches: Any, state: Any) -> None:
        self._profile.before_backward(feeds)
        with self._profile.timing("session"):
            self._agent.run_backward(feeds, fetches, state)


class _ReleasedAgent:
    """What is left of an agent whose session was freed: it tells a backward that comes too late why it cannot run."""

    def run_backward(self, feeds: Any, fetches: Any, state: Any) -> None:  # noqa: ARG002 - as TrainingAgent
        raise ExecutionError(
            "The ONNX Runtime session that ran this forward has been freed.",
            why="A switch or the input's schema was changed and the model called again, or the model was unwrapped, "
            "before backward() was called.",
            fix="Call backward() before you change anything, or call the model again.",
        )


def released_agent(agent: Any) -> Any:
    """Return what stands in for an agent whose session is freed; None if there was no agent yet."""
    return None if agent is None else _ReleasedAgent()


class _Training(_SessionOptions, TorchBackward, AutogradNode, TrainingManager):  # type: ignore[misc] # untyped base
    """ORTModule's training manager, which ortlab drives stage by stage."""

    def probe_memory(self, probe: str) -> Answer:
        """Ask a session without plans, since the answer of one with plans lacks what those have removed."""
        applied = self._runtime_options.memory_optimizer_is_enabled()
        if self._execution_agent is not None and not self.exchanged and not applied:
            return self._asked(probe)
        with self._without_plans():
            self.create_session([])
            return self._asked(probe)

    def probe_places(self) -> tuple[list[Line], bytes, Answer]:
        """Ask a session without plans where it would recompute, and have it explain every place."""
        with self._without_plans(explains_places=True), self.graph_written() as file:
            with runtime_lines("session"):
                self.create_session([])
            with runtime_lines("session") as lines:
                answer = self._asked(PROBE_ANYWHERE)
            return lines, file.read_bytes(), answer

    def _asked(self, probe: str) -> Answer:
        answer: Answer = self._execution_agent.get_serialized_ortmodule_memory_stat("", probe, True)  # noqa: FBT003
        return answer

    @contextmanager
    def _without_plans(self, **settings: object) -> Iterator[None]:
        """Let another session be made at memory level 0 in the block."""
        with (
            with_attributes(self._runtime_options, memory_optimization_level=0),
            self.another_session(asks_for_plans=True, **settings),
        ):
            yield


class _Inference(_SessionOptions, InferenceManager):  # type: ignore[misc] # untyped base
    """ORTModule's inference manager, which ortlab drives stage by stage."""

    def run(self, inputs: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Run the session."""
        model, device = self._onnx_models.optimized_model, self._device
        outputs: tuple[torch.Tensor, ...]
        outputs, _ = InferenceManager.execution_session_run_forward(
            self._execution_agent, model, device, *inputs
        )
        return outputs


class _FlattenedModule(_io._FlattenedModule):  # type: ignore[misc] # untyped base
    """What ORTModule exports in the module's place; torch's exporter cannot switch the module's mode through it."""

    # For an export with `TrainingMode.TRAINING`, torch calls `train(True)` on everything and leaves it so
    # (`torch.onnx.utils.select_model_mode_for_export`): a BatchNorm that the user keeps in eval while the model trains
    # would be trained from then on.

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        self.training = module.training

    def forward(self, *args: Any) -> Any:
        """Run the user's module, as `_io._FlattenedModule.forward`."""
        with user_code():
            return super().forward(*args)

    def train(self, mode: bool = True) -> _FlattenedModule:  # noqa: ARG002, FBT001, FBT002 - torch's signature
        """Change nothing: every part of the user's module is exported in the mode it is in."""
        return self


def make_manager(
    module: torch.nn.Module, options: Options, log: MessageLog, *, training: bool, part: str = ""
) -> Any:
    """Make the manager that ORTModule would make, with these options; it has not exported anything yet."""
    # Call it inside `build_environment`: 1.19.2 reads most options from the environment in its constructor.
    # 1.19.2 looks at permission bits only, and may trip over the folder in the export.
    check_onnx_folder(options)
    debug = DebugOptions(
        log_level=LogLevel[options.log_level],
        save_onnx=options.save_onnx,
        onnx_prefix="_".join(
            filter(None, (options.save_onnx_prefix or type(module).__name__, part.replace(".", "_")))
        ),
    )
    level = log_level(options.log_level)
    logger = ortmodule_logger(level, log, get_rank())
    build_environment.prepare(options)
    fallback = _FallbackManager(module, _FallbackPolicy.FALLBACK_DISABLE, False, logger)  # noqa: FBT003
    flattened = _FlattenedModule(module)
    manager = (_Training if training else _Inference)(flattened, debug, fallback, logger)
    manager.options = options
    # At the other levels ONNX Runtime says nothing in a step unless something is wrong, and then at once.
    manager.collecting = partial(runtime_messages, log, "step") if level.talks_in_steps else None
    if options.acts("triton"):
        manager.collecting = partial(build_environment.stepping, options, manager.collecting)
    # ORTModule would create a second session in each build, only to print the plans; see memory_report().
    manager._runtime_inspector.memory_ob._is_enabled = False
    _apply_unnamed_switches(manager._runtime_options, options)
    return manager


def _apply_unnamed_switches(runtime: Any, options: Options) -> None:
    """Set the switches that 1.19.2 has no environment variable for."""
    runtime.propagate_cast_ops_level = options.cast_level
    runtime.propagate_cast_ops_strategy = getattr(C.PropagateCastOpsStrategy, options.cast_strategy)
    runtime.propagate_cast_ops_allow = list(options.cast_allow)
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
    """Seed ONNX Runtime's own generator, from which its Dropout draws; its state cannot be read, only set."""
    # The value is at least 2: seeds 0 and 1 start the same stream on the CPU.
    onnxruntime.set_seed(value)


def available_providers() -> list[str]:
    """Return the execution providers of the installed ONNX Runtime."""
    return list(onnxruntime.get_available_providers())
