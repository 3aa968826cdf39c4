"""One executable form of a module: exported, with its gradient graph, in an ONNX Runtime session.

ORTModule 1.19.2 does all of it inside its first forward, reads its switches from the environment on the way, and can
redo nothing but everything. Here the same code is driven stage by stage - export, graph, session - so that a changed
switch redoes only what it touches, and a failed or interrupted stage leaves the last working form as it was.

Importing this module loads ONNX Runtime.
"""

# ruff: noqa: E402 - onnxruntime.training can be imported only after load() has prepared torch for it

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils._pytree import tree_leaves

from ortlab.engine import load, recompute_plans
from ortlab.engine.build_environment import build_environment, building_with
from ortlab.engine.build_log import exporter_messages, runtime_messages
from ortlab.engine.calls import label_ranges
from ortlab.engine.capture import CAPTURE
from ortlab.engine.devices import device_made_current
from ortlab.engine.execution_view import ExecutionView
from ortlab.engine.functions.export import own_backwards
from ortlab.engine.kept_builds import BuiltGraph, Export
from ortlab.engine.operators.long_attention import with_long_attentions
from ortlab.engine.operators.symbolics import ATEN_CROSS_ENTROPY
from ortlab.engine.passes import chunked_loss
from ortlab.engine.passes.graph_edits import NEEDING_GRADIENT, SIZES
from ortlab.engine.passes.label_density import valid_label_counts
from ortlab.engine.passes.shapes import with_sizes
from ortlab.engine.patching import set_to
from ortlab.engine.recompute_words import recomputed_graph
from ortlab.engine.sessions import make_manager, register_operators, released_agent
from ortlab.engine.threads import threads_for
from ortlab.engine.tracing.autograd import TensorHooks, check_hooks, masks_indexed_plainly
from ortlab.engine.tracing.graph_inputs import FIXED_ONES, Inputs
from ortlab.engine.tracing.guards import Reads, reads_noted
from ortlab.engine.tracing.sizes import SizeGuards
from ortlab.engine.tracing.source_lines import source_lines
from ortlab.engine.tracing.untold import traced_as_it_runs
from ortlab.options.log_levels import log_level
from ortlab.records.messages import ORTLAB, MessageLog

load()

from onnxruntime.training.ortmodule._custom_autograd_function import (
    custom_autograd_function_enabler,
    enable_custom_autograd_support,
)
from onnxruntime.training.ortmodule._graph_transition_manager import GraphTransitionManager
from onnxruntime.training.ortmodule._utils import get_rank

if TYPE_CHECKING:
    from ortlab.engine.profiling import Profile
    from ortlab.options.options import Options
    from ortlab.records.messages import Message

Progress = Callable[[str, float], None]
"""Called with what is being done and the fraction done so far, 0 to 1."""


class Execution(ExecutionView):
    """A module that ONNX Runtime can run, for one mode, one input schema and one set of options."""

    # It is made in three stages - export, graph, session - of which the first two can be taken from another execution.
    # The module's parameters are read at each step, its forward only while it is exported. Without `training` there is
    # no gradient graph, and outputs carry no gradient. `part` is the module's path in the model that it is a part of;
    # it names the files of `save_onnx`.

    def __init__(
        self, module: torch.nn.Module, options: Options, log: MessageLog, *, training: bool, part: str = ""
    ) -> None:
        self.module = module
        self.options = options
        self.log = log
        self.training = training
        self.has_run = False
        self._part = part
        self.recomputed = recompute_plans.Recomputed()
        self._export: Export
        self._graph: BuiltGraph
        self._state: tuple[object, ...] = ()
        self._most_entries = 0  # of the tensors of a call that its session is known to have the threads for
        self._profile: Profile | None = None
        with self._environment(), log.during("export"):
            self._manager = make_manager(module, options, log, training=training, part=part)
        self._manager._runtime_options.enable_custom_autograd_function = options.custom_autograd

    # ---- stages -----------------------------------------------------------------------------------------------

    def export(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Export:
        """Trace the module to ONNX and infer shapes; the result is not taken yet."""
        manager = self._manager
        autograd = custom_autograd_function_enabler.state
        functions = own_backwards() if self.training and self.options.custom_autograd else nullcontext()
        try:
            with (
                set_to(ATEN_CROSS_ENTROPY, self.options.aten_cross_entropy),
                set_to(FIXED_ONES, True),  # noqa: FBT003 - its value
                functions,
                self._environment(),
                _without_hooks(self.module),
                self._listening("export") as said,
            ):
                enable_custom_autograd_support(self.options.custom_autograd)
                register_operators(self.options.opset)
                transition = manager._graph_transition_manager
                if not self.options.zero_stage3:  # DeepSpeed gathers parameters in hooks of its own
                    check_hooks(self.module, self.log)
                reads, lines = traced_as_it_runs(
                    lambda: self._trace(args, kwargs),
                    lambda text: self.log.add("WARNING", ORTLAB, text),
                )
                self._leave_out_frozen_parameters(transition)
        finally:
            enable_custom_autograd_support(autograd)
        flattened, inputs = manager._flattened_module, transition._model_info_for_export
        readers = inputs.onnx_graph_input_data_accessor_user_defined
        readers = [readers[name] for name in inputs.onnx_graph_input_names]
        return Export(
            options=self.options,
            training=self.training,
            exported=transition._exported_model_info,
            inputs=inputs,
            processed=_without_module(transition._post_export_processed_model_info),
            flattened={name: getattr(flattened, name) for name in _NOTED_BY_EXPORT},
            device=transition._device,
            inert=self._inert_switches(),
            messages=tuple(said),
            sizes=SizeGuards(reads.sizes, reads.computation, readers, (args, kwargs)),
            lines=lines,
        )

    def _trace(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Reads, dict[str, str]]:
        """Trace the module; return what its forward reads in Python, and the lines of its nodes."""
        capture = CAPTURE.get()
        marking = capture.taps.exporting() if capture and capture.hands_over else nullcontext()
        with (
            marking,
            reads_noted() as reads,
            TensorHooks(),
            masks_indexed_plainly(),
            source_lines() as lines,
        ):
            self._manager._graph_transition_manager.get_post_processed_model(tuple(args), dict(kwargs))
        return reads, lines

    def take_export(self, export: Export) -> None:
        """Go on from an export of this module, made by this execution or another one."""
        manager = self._manager
        transition = manager._graph_transition_manager
        transition._exported_model_info = export.exported
        transition._model_info_for_export = export.inputs
        transition._post_export_processed_model_info = copy.copy(export.processed)
        transition._post_export_processed_model_info._flattened_module = manager._flattened_module
        transition._device = export.device
        for name, value in export.flattened.items():
            setattr(manager._flattened_module, name, value)
        self._export = export
        manager.lines = export.lines
        readers = export.inputs.onnx_graph_input_data_accessor_user_defined
        self._labels = label_ranges(self._info._post_export_processed_model, readers)
        self.log.repeat(export.messages)

    def build_graph(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> BuiltGraph:
        """Optimise the exported graph and build its gradient; the result is not taken yet."""
        manager = self._manager
        sizes = self._sizes_of(args, kwargs)
        with (
            self._environment(),
            self._listening("graph") as said,
            runtime_messages(self.log, "graph"),
            set_to(SIZES, sizes),
        ):
            for level, text in chunked_loss.messages(self._info, sizes):
                self.log.add(level, ORTLAB, text)
            info = self._info_for_graph(sizes)
            manager._initialize_graph_builder(info)
            manager._detect_from_inputs(tuple(args), dict(kwargs))
            config = manager._get_graph_transformer_config()
            try:
                manager._build_graph(config)
            except RuntimeError as error:
                if not config.enable_compute_optimizer:
                    raise
                config.enable_compute_optimizer = False
                manager._initialize_graph_builder(info)
                try:
                    manager._build_graph(config)
                except RuntimeError:
                    raise error from None
                self.log.add("WARNING", ORTLAB, _WITHOUT_COMPUTE_OPTIMIZER)
        return BuiltGraph(
            options=self.options,
            forward=bytes(manager._graph_builder.get_forward_model()),
            info=manager._graph_info,
            models=manager._onnx_models,
            gradient_map=tuple(manager._gradient_map) if self.training else (),
            digest=sha256(manager._onnx_models.optimized_model.SerializeToString()).hexdigest(),
            symbols=self._symbols(args, kwargs),
            messages=tuple(said),
        )

    @property
    def lines(self) -> Mapping[str, str]:
        """Return "file:line" of the model's source by name of a node."""
        return self._export.lines

    def take_graph(self, graph: BuiltGraph) -> None:
        """Go on from a graph of this export, built by this execution or another one."""
        # What the switch `recompute` says is done to it here; raises OptionError where that names what is not there.
        manager = self._manager
        manager._graph_builder = None  # it holds the model four times over, and has done its work
        manager.copies = frozenset()
        self.unrepeated = graph
        if self.training and self.options.recompute:
            graph, made = recomputed_graph(
                graph, self.options.recompute, self.module, self.user_inputs, self._part
            )
            manager.copies = made.copies
        manager._graph_info, manager._onnx_models = graph.info, graph.models
        manager._gradient_map = graph.gradient_map
        self._graph = graph
        self.log.repeat(graph.messages)

    def create_session(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Create the ONNX Runtime session that executes the graph for such a call, with the memory plans applied."""
        manager = self._manager
        manager.threads = self._threads_for(args, kwargs)
        self._most_entries = _entries(args, kwargs)
        choice = self.recompute_choice()
        with device_made_current(self._export.device), runtime_messages(self.log, "session"):
            self.recomputed = recompute_plans.create_session(manager, choice)
        manager._gradient_accumulation_manager.initialize(
            manager._runtime_options.enable_grad_acc_optimization,
            manager._flattened_module,
            manager._graph_info,
        )
        capture = CAPTURE.get()
        if capture is not None and self.training:
            capture.attach(self, self._part)

    def outgrown(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Say whether its session has one thread, for small batches, and a call gives it work for all."""
        if self._manager.threads != 1 or torch.get_num_threads() == 1:
            return False
        entries = _entries(args, kwargs)
        if entries <= self._most_entries:
            return False
        self._most_entries = entries
        return self._threads_for(args, kwargs) > 1

    def _threads_for(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        if self._export.device.type != "cpu":
            return 0
        return threads_for(self._info._post_export_processed_model, self._sizes_of(args, kwargs))

    # ---- running ----------------------------------------------------------------------------------------------

    def labels_fit(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Tell whether the labels of a call name classes; ORT's losses read other memory for those that do not."""
        return all(labels.holds(args, kwargs) for labels in self._labels)

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any], state: tuple[object, ...]) -> Any:
        """Run the forward graph; the result's backward runs the gradient graph."""
        # `state` is what `ModuleReader.state` returned; another object than in the last call if any tensor was
        # replaced.
        if state is not self._state:
            # The manager keeps references to parameters and buffers from its first run on: make it look again.
            self._forget_tensors()
            self._state = state
        self.has_run = True
        collecting = self._manager.collecting
        timed = self._profile.timing("model") if self._profile else nullcontext()
        with timed, device_made_current(self._export.device), collecting() if collecting else nullcontext():
            if self.options.zero_stage3:
                kwargs = dict(kwargs)
                self._manager._append_pull_weight_trigger_as_input(kwargs, self._manager._device)
            inputs = Inputs(self._info, args, kwargs, self._manager._device)
            outputs = inputs.returned(self._manager.run(inputs.by_name.values()))
        if self._profile is not None:
            self._profile.watch(outputs)
        return outputs

    @contextmanager
    def profiling(self, profile: Profile, *, memory_efficient_order: bool) -> Iterator[None]:
        """Run in a session that ORT's profiler watches while the block runs; see `ortlab.engine.profiling`."""
        choice, manager = self.recompute_choice(), self._manager
        with runtime_messages(MessageLog(), "session"):  # it has said it all when it was created first
            profiled = manager.profiled_agent(
                profile, choice.plans, choice.kept, memory_efficient_order=memory_efficient_order
            )
        agent, manager._execution_agent, self._profile = manager._execution_agent, profiled, profile
        try:
            yield
        finally:
            manager._execution_agent, self._profile = agent, None
            profile.end(profiled)

    def release_session(self) -> None:
        """Free the session, its memory and the tensors that were last given to it."""
        self._manager._execution_agent = released_agent(self._manager._execution_agent)
        if self._info is not None:
            self._forget_tensors()

    def _forget_tensors(self) -> None:
        self._info._buffer_for_ort_runs, self._manager.fed_parameters = None, {}

    # ---- parts ------------------------------------------------------------------------------------------------

    def _info_for_graph(self, sizes: Mapping[str, int]) -> Any:
        made = model = self._info._post_export_processed_model
        if self.options.static_shape:
            made = with_sizes(made, sizes)
        if self.options.aten_backward and self._export.device.type == "cpu":
            needing = frozenset(self._info.onnx_graph_input_names_require_grad)
            with set_to(NEEDING_GRADIENT, needing):
                made = with_long_attentions(made, sizes)
        if made is model:
            return self._info
        info = copy.copy(self._info)
        info._post_export_processed_model = made
        return info

    @contextmanager
    def _environment(self) -> Iterator[None]:
        # The plan file is written when the session is created; fallback (see OrtEngine), densities and memory
        # statistics (see Recording) and the cache of exports (see export_cache) are ortlab's own.
        options = self.options.replace(
            memory_plan=(),
            fallback=False,
            print_input_density=False,
            print_memory_stats=False,
            export_cache_dir="",
        )
        if self.options.static_shape:  # the sparsity optimizers keep another number of rows in each batch
            options = options.replace(label_sparse_optimizer=False, embedding_sparse_optimizer=False)
        with build_environment(options.environment()), building_with(self.options):
            yield

    @contextmanager
    def _listening(self, stage: str) -> Iterator[list[Message]]:
        """Collect what ORTModule and the exporter say in the block; the list is filled meanwhile."""
        level = log_level(self.options.log_level)
        with (
            self.log.during(stage),
            self.log.noting() as said,
            exporter_messages(level, self.log, get_rank()),
        ):
            yield said

    def _leave_out_frozen_parameters(self, transition: Any) -> None:
        # ORTModule asks for the gradients of all parameters at first, and looks for frozen ones in the second step
        # (GraphTransitionManager._reprocess_check), unless its policy of checks leaves that out, as by default.
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

    def _symbols(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, int]:
        tensors = self._graph_inputs(args, kwargs)
        counts = valid_label_counts(self._manager._onnx_models.optimized_model, tensors)
        return {**self._sizes(tensors), **counts}

    def _graph_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        values = self._info.construct_inputs(tuple(args), dict(kwargs), True, self._manager._device)  # noqa: FBT003
        self._info._buffer_for_ort_runs = None
        return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}

    def last_sizes(self) -> dict[str, int]:
        """Return the symbolic dimensions as they were in its last call; empty where that call's inputs are gone."""
        held = self._info._buffer_for_ort_runs or {}
        return self._sizes({name: one for name, one in held.items() if isinstance(one, torch.Tensor)})

    def _sizes_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, int]:
        return self._sizes(self._graph_inputs(args, kwargs))

    def _sizes(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
        return {
            symbol: int(tensors[name].size(dimension))
            for name, axes in self._info.onnx_graph_input_dynamic_axes_map.items()
            if name in tensors
            for dimension, symbol in axes.items()
        }

    def _inert_switches(self) -> frozenset[str]:
        """Name the sparsity switches that left no mark in this export, and could leave none."""
        # Where one of them was on, its hooks have looked at the batch (``_add_check_*_sparsity_hook``); where it was
        # off, there is none to add if the module has no part that they would be added to.
        inspector, cuda = self._manager._runtime_inspector, self._manager._device.type == "cuda"
        marked = {
            "label_sparse_optimizer": inspector._sceloss_module_to_ignore_density_map,
            "embedding_sparse_optimizer": inspector._embedding_module_to_padding_density_map,
        }
        parts = list(self.module.modules())
        markable = {
            "label_sparse_optimizer": any(isinstance(part, torch.nn.CrossEntropyLoss) for part in parts),
            "embedding_sparse_optimizer": cuda
            and any(isinstance(part, torch.nn.Embedding) and part.padding_idx is not None for part in parts),
        }
        acted = {name: self.options.acts(name) for name in marked}
        inert = {name for name in marked if not (marked[name] if acted[name] else markable[name])}
        return frozenset(inert)


# Its checks stop a build at a size that nothing names, or at a slice along an axis that counts from the end
# (``upstream_gather_actors.cc``); where it loses a shape, the gradient's do (``gradient_builder_base.cc``).
_WITHOUT_COMPUTE_OPTIMIZER: Final = (
    "This graph is built without the compute optimizer, with which it cannot be built: nothing is sliced ahead of "
    "costly operators. With compute_optimizer=False it is not tried."
)

_NOTED_BY_EXPORT: Final = ("_device", "_args_schema", "_kwargs_schema", "_num_positionals", "_output_schema")


def _without_module(processed: Any) -> Any:
    """Copy a `PostExportProcessedModelInfo` without the module, and the tensors and notes that belong to it."""
    plain = copy.copy(processed)
    plain._flattened_module = plain._buffer_for_ort_runs = None
    for name in [name for name in vars(plain) if name.startswith("_ortlab_")]:
        delattr(plain, name)
    return plain


@contextmanager
def _without_hooks(module: torch.nn.Module) -> Iterator[None]:
    """Keep the module's own forward hooks out of its trace: its caller runs them, around ORT's forward."""
    # What `module.compile()` has put in the place of a call, of the module or of a part, is left out, too.
    hooks = {name: getattr(module, name) for name in ("_forward_hooks", "_forward_pre_hooks")}
    compiled = [(part, part._compiled_call_impl) for part in module.modules() if part._compiled_call_impl]
    try:
        for name in hooks:
            setattr(module, name, OrderedDict())
        for part, _ in compiled:
            part._compiled_call_impl = None
        yield
    finally:
        for name, before in hooks.items():
            setattr(module, name, before)
        for part, call in compiled:
            part._compiled_call_impl = call


def _entries(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Return how many entries the tensors of a call have."""
    total = 0
    for one in (*args, *kwargs.values()):
        leaves = (one,) if isinstance(one, torch.Tensor) else tree_leaves(one)
        total += sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))
    return total
