"""Faults of onnxruntime 1.19.2's training module that are repaired by replacing one function each.

1.19.2 is the last release of that module. Each ``install_*`` names the file and the function whose fault it repairs;
all are idempotent. Faults of operators are repaired in `ortlab.engine.operators.symbolics` and
`ortlab.engine.passes.graph_passes`.
"""

from __future__ import annotations

import sys
import warnings
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from ortlab.engine import build_log
from ortlab.engine.devices import PROVIDERS, multiplies_in_tf32
from ortlab.engine.operators import compiled_calls
from ortlab.engine.passes import label_density, shapes
from ortlab.engine.patching import only_new_garbage, replace, set_to
from ortlab.engine.tracing import (
    autograd,
    carried,
    gradient_stops,
    graph_inputs,
    guards,
    outputs,
    source_lines,
)
from ortlab.errors import BuildError
from ortlab.records.activation_statistics import SAMPLES, TensorStatistics

if TYPE_CHECKING:
    from collections.abc import Callable
    from io import TextIOWrapper


def install_all() -> None:
    """Install every repair that replaces a function; a second call changes nothing."""
    graph_inputs.install_arguments()
    graph_inputs.install_buffers()
    carried.install()  # around the repair of buffers, which puts these back
    gradient_stops.install()
    outputs.install()
    guards.install()
    source_lines.install()
    shapes.install()
    label_density.install()
    install_statistics()
    install_arena()
    install_refusals()
    install_sparsity_switches()
    install_export_cleanup()
    install_export_silence()
    install_quick_collection()
    install_log_levels()
    install_precision()
    build_log.install()
    autograd.install()
    install_seed()


# --- errors -----------------------------------------------------------------------------------------------------


def install_refusals() -> None:
    """Let a BuildError that is raised inside an export reach the caller as it is."""
    # ``_graph_transition_manager._get_exported_model`` turns what went wrong into the text of another exception.
    from onnxruntime.training.ortmodule._graph_transition_manager import GraphTransitionManager

    replace(GraphTransitionManager, "_export_model", _raise_refusal)


def _raise_refusal(original: Callable[..., Any]) -> Callable[..., Any]:
    def export_model(**kwargs: Any) -> Any:
        try:
            return original(**kwargs)
        except Exception as error:
            refusal = _refusal_in(error)
            if refusal is None or refusal is error:
                raise
            raise refusal from None  # its own traceback leads through the export to the operator

    return export_model


def _refusal_in(error: BaseException | None) -> BuildError | None:
    """Return the BuildError among an exception and those that led to it; None if there is none."""
    pending, seen = [error], set[int]()
    while pending:
        error = pending.pop()
        if isinstance(error, BuildError):
            return error
        if error is not None and id(error) not in seen:
            seen.add(id(error))
            pending += [error.__context__, error.__cause__]
    return None


# --- sparsity of labels and embeddings ----------------------------------------------------------------------------


class _Sparsity(NamedTuple):
    label: bool
    embedding: bool


_sparsity: Final[ContextVar[_Sparsity | None]] = ContextVar("sparsity", default=None)
_hooks: Final[ContextVar[list[Any] | None]] = ContextVar("hooks", default=None)


def install_sparsity_switches() -> None:
    """Make the switches of the label and embedding sparsity optimizers do what they say."""
    # ``_graph_transition_manager._export_model`` passes the embedding's switch to the label's hook as well, so that
    # ORTMODULE_ENABLE_LABEL_SPARSE_OPTIMIZER has no effect; ``_add_check_label_sparsity_hook`` returns None where a
    # list is iterated, so that switching off either the embedding's optimizer or the compute optimizer ends in a
    # TypeError; and a compute optimizer that is switched off after wrapping leaves a printing operator in the graph
    # that only it would have removed.
    from onnxruntime.training.ortmodule._graph_transition_manager import GraphTransitionManager

    replace(GraphTransitionManager, "_export_model", _read_sparsity_switches)
    replace(GraphTransitionManager, "_add_check_label_sparsity_hook", _hook_of("label"))
    replace(GraphTransitionManager, "_add_check_embedding_sparsity_hook", _hook_of("embedding"))


def _read_sparsity_switches(original: Callable[..., Any]) -> Callable[..., Any]:
    def export_model(**kwargs: Any) -> Any:
        options = kwargs[
            "stage3_param_handle"
        ]._runtime_options  # the GraphTransitionManager, in spite of its name
        switches = _Sparsity(
            label=options.enable_compute_optimizer and options.enable_label_sparse_optimizer,
            embedding=options.enable_compute_optimizer and options.enable_embedding_sparse_optimizer,
        )
        with set_to(_sparsity, switches):
            return original(**kwargs)

    return export_model


def _hook_of(kind: str) -> Callable[[Callable[..., Any]], Callable[..., list[Any]]]:
    """Return what replaces the function that adds the hook of a kind: it asks that kind's switch."""

    def asking_its_switch(original: Callable[..., Any]) -> Callable[..., list[Any]]:
        def add_check_sparsity_hook(enable: bool, *args: Any) -> list[Any]:  # noqa: FBT001 - ORT's signature
            switches = _sparsity.get()
            added = original(enable if switches is None else getattr(switches, kind), *args) or []
            if (hooks := _hooks.get()) is not None:
                hooks.extend(added)
            return list(added)

        return add_check_sparsity_hook

    return asking_its_switch


# --- an export that fails -----------------------------------------------------------------------------------------


def install_export_cleanup() -> None:
    """Leave no hooks and no changed random state behind when an export fails."""
    # ``_graph_transition_manager._export_model`` removes its hooks and restores the random state only on success; after
    # a failure the model would go on with hooks on its loss and its embeddings.
    from onnxruntime.training.ortmodule._graph_transition_manager import GraphTransitionManager

    replace(GraphTransitionManager, "_export_model", _clean_up_after_failure)


def _clean_up_after_failure(original: Callable[..., Any]) -> Callable[..., Any]:
    def export_model(**kwargs: Any) -> Any:
        from onnxruntime.training.ortmodule import _utils

        random_states = _utils.get_random_states()
        hooks: list[Any] = []
        try:
            with set_to(_hooks, hooks):
                return original(**kwargs)
        except BaseException:
            for hook in hooks:
                hook.remove()
            _utils.set_random_states(random_states)
            raise

    return export_model


_RETIREMENTS: Final = (
    "You are using the legacy TorchScript-based ONNX export",
    "Setting `training` to something other than default is deprecated",
    "The feature will be removed. Please remove usage of this function",
)


def install_export_silence() -> None:
    """Ignore the warnings that torch's TorchScript exporter will be retired: ORTModule has no other."""
    # All other warnings of an export pass, above all those of the tracer, which may be about the user's model.
    from onnxruntime.training.ortmodule._graph_transition_manager import GraphTransitionManager

    replace(GraphTransitionManager, "_export_model", _ignore_retirements)


def _ignore_retirements(original: Callable[..., Any]) -> Callable[..., Any]:
    def export_model(**kwargs: Any) -> Any:
        with warnings.catch_warnings():
            for message in _RETIREMENTS:
                warnings.filterwarnings("ignore", message, DeprecationWarning)
            return original(**kwargs)

    return export_model


def install_quick_collection() -> None:
    """Let the export collect garbage among what it has made itself: its copy of the model, which may hold itself."""
    from onnxruntime.training.ortmodule import _io

    replace(_io, "parse_outputs_for_onnx_export_and_extract_schema", _among_its_own)


def _among_its_own(original: Callable[..., Any]) -> Callable[..., Any]:
    return only_new_garbage()(original)


# --- logging --------------------------------------------------------------------------------------------------------


def install_log_levels() -> None:
    """Give sessions ONNX Runtime's number for ORTModule's log level."""
    # ``_graph_execution_manager._get_session_config`` passes ORTModule's own number: FATAL is out of range and ends in
    # a RuntimeError, WARNING means "error" there and hides warnings. ``_logger.ORTMODULE_LOG_LEVEL_MAP`` has the right
    # numbers.
    from onnxruntime.training.ortmodule._graph_execution_manager import GraphExecutionManager

    replace(GraphExecutionManager, "_get_session_config", _map_log_level)


def install_precision() -> None:
    """Let sessions on a GPU multiply matrices as PyTorch does: in TF32 only where PyTorch may."""
    # 1.19.2 leaves the provider its default, TF32, in which a number has 10 bits behind the point where float32 has 23.
    # PyTorch's default is float32, so that losses of the two parted by 1e-3 without a word.
    from onnxruntime.training.ortmodule._graph_execution_manager import GraphExecutionManager

    replace(GraphExecutionManager, "_get_session_config", _multiply_as_torch)


def _multiply_as_torch(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_session_config(self: Any) -> Any:
        session_options, providers, provider_options = original(self)
        if PROVIDERS["cuda"] in providers:
            provider_options[0]["use_tf32"] = str(int(multiplies_in_tf32()))
        return session_options, providers, provider_options

    return get_session_config


def _map_log_level(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_session_config(self: Any) -> Any:
        from onnxruntime.training.ortmodule._logger import ortmodule_loglevel_to_onnxruntime_c_loglevel

        session_options, providers, provider_options = original(self)
        level = self._debug_options.logging.log_level
        session_options.log_severity_level = int(ortmodule_loglevel_to_onnxruntime_c_loglevel(level))
        return session_options, providers, provider_options

    return get_session_config


# --- random numbers -----------------------------------------------------------------------------------------------

_INSTEAD_OF_ZERO: Final = 1_073_741_789
"""Far from the small numbers that people choose as seeds."""

_MINSTD_MODULUS: Final = 2**31 - 1
_SPREAD: Final = 1_103_515_245
"""Puts 80,000 dropouts or more between any two of the seeds up to 2000."""


def install_seed() -> None:
    """Let ``torch.manual_seed(0)`` give different dropout masks in the first two steps."""
    # On the CPU, ONNX Runtime draws dropout masks from ``std::default_random_engine``, seeded with a counter that
    # starts at the seed. That engine (minstd) treats seed 0, and every multiple of 2**31 - 1, as seed 1. And seed 8
    # would give in its first step the masks that seed 7 gave in its second: runs under consecutive seeds, which people
    # take for error bars, would share their masks. So seeds are spread first.
    import onnxruntime
    from onnxruntime.training import ortmodule

    # torch.manual_seed is ``ortmodule.override_torch_manual_seed`` by now, which looks `set_seed` up there.
    for module in (onnxruntime, ortmodule):
        replace(module, "set_seed", _for_both)
    # As ORTModule has seeded ONNX Runtime when it was imported.
    compiled_calls.seed(torch.initial_seed() % sys.maxsize)
    replace(ortmodule, "set_seed", _avoid_seed_zero)


def _for_both(original: Callable[[int], None]) -> Callable[[int], None]:
    """Seed what computes dropout in the place of ONNX Runtime's kernel, too."""

    def set_seed(seed: int) -> None:
        original(seed)
        compiled_calls.seed(seed)

    return set_seed


def _avoid_seed_zero(original: Callable[[int], None]) -> Callable[[int], None]:
    def set_seed(seed: int) -> None:
        original(seed * _SPREAD % _MINSTD_MODULUS or _INSTEAD_OF_ZERO)

    return set_seed


# --- memory ---------------------------------------------------------------------------------------------------------

_arena: bool | None = None
"""Whether the provider that the process keeps has an arena; None while nobody knows."""


def install_arena() -> None:
    """Give each session an arena of CPU memory if its own options say so (`enable_cpu_mem_arena`)."""
    # 1.19.2's training module keeps one CPU execution provider for the whole process (``orttraining_python_module.cc``,
    # ``GetProviderInstanceHash``: its key is 0 whatever the options), and whether there is an arena is the provider's.
    # So the first session of the process decided it for all later ones. A provider that was made for the other setting
    # is dropped before a session is made; the sessions that have it keep it.
    from onnxruntime import InferenceSession

    replace(InferenceSession, "_create_inference_session", _with_its_own_arena)


def _with_its_own_arena(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_inference_session(self: Any, *args: Any, **kwargs: Any) -> Any:
        options = self._sess_options
        _drop_provider_of_other_kind(arena=options is None or bool(options.enable_cpu_mem_arena))
        return original(self, *args, **kwargs)

    return create_inference_session


def _drop_provider_of_other_kind(*, arena: bool) -> None:
    global _arena  # noqa: PLW0603 - the provider is the process's
    if arena != _arena:
        from onnxruntime.capi import _pybind_state

        _pybind_state.clear_training_ep_instances()
        _arena = arena


# --- files of statistics --------------------------------------------------------------------------------------------


def install_statistics() -> None:
    """Let ORTModule's StatisticsSubscriber write the right numbers, in the right steps; once."""
    # ``utils.hooks._statistics_subscriber._summarize_tensor`` of 1.19.2 takes the sum of each bucket for its mean, so
    # that its "std" is of the order of the sum: 3.74 for values between -0.87 and 0.59. The files keep their form,
    # which `merge_activation_summary` and people's own scripts read. Its `start_step` and `end_step` are asked while
    # hooks run. A graph of ONNX Runtime is traced in step 0, so that with a later start nothing was ever written of
    # what is inside; and `inspect_activation` did not ask at all. Here each writing asks. Both are told which module
    # they see by a table of the modules that were subscribed. What is exported is a copy of them: its modules were not
    # in the table, which ended the export with a KeyError. A copy has the number of its original.
    from onnxruntime.training.utils.hooks import _statistics_subscriber, _subscriber_base

    replace(_statistics_subscriber, "_summarize_tensor", _right_statistics)
    replace(_subscriber_base.RuntimeStates._GlobalStates, "__init__", _with_numbers_of_copies)
    writer = _statistics_subscriber.StatisticsSubscriber
    replace(writer, "post_forward_tensor_apply", _in_every_step)
    for name in ("module_post_forward_impl", "module_pre_backward_impl"):
        replace(writer, name, _in_its_steps)


class _Numbers(dict[torch.nn.Module, int]):
    """Number of each module in the tree, and of the copies of these modules."""

    def __missing__(self, module: torch.nn.Module) -> int:
        number = vars(module).get("id")  # upstream writes it on each module, and a copy takes it along
        if not isinstance(number, int):
            raise KeyError(module)
        return number


def _with_numbers_of_copies(original: Callable[..., Any]) -> Callable[..., None]:
    def initialise(self: Any) -> None:
        original(self)
        self.module_to_module_index = _Numbers()

    return initialise


def _in_every_step(_original: Callable[..., Any]) -> Callable[..., Any]:
    from onnxruntime.training.utils.hooks import _subscriber_manager

    def post_forward_tensor_apply(
        self: Any, run_rtx: Any, module: Any, tensor_index: int, tensor: Any
    ) -> Any:
        exporting = _subscriber_manager.ORT_NO_INCREASE_GLOBAL_STEP[0]
        if not exporting and self._need_skip_step(run_rtx.global_states.execution_step):
            return tensor
        return self.post_forward_tensor_apply_impl(run_rtx, module, tensor_index, tensor)

    return post_forward_tensor_apply


def _in_its_steps(original: Callable[..., Any]) -> Callable[..., Any]:
    def write(self: Any, activation: Any, depth: int, name: str, step: int) -> None:
        if not self._need_skip_step(step):
            original(self, activation, depth, name, step)

    return write


def _right_statistics(_original: Callable[..., Any]) -> Callable[..., None]:
    def summarize_tensor(
        display_name: str,
        tensor: torch.Tensor,
        f: TextIOWrapper,
        depth: int = 0,
        run_on_cpu: bool = False,  # noqa: FBT001, FBT002 - ORT's signature
        bucket_size: int = 0,  # noqa: ARG001 - ORT's signature
    ) -> None:
        flat = (tensor.cpu() if run_on_cpu else tensor).detach().reshape(-1)
        facts = TensorStatistics.of(flat)
        f.write(
            f"{'>' * max(0, depth) + display_name} shape: {tensor.shape} dtype: {tensor.dtype} size: {flat.size()} \n"
            f"min: {facts.minimum} max: {facts.maximum}, mean: {facts.mean}, std: {facts.std} \n"
            f"nan: {facts.nan}, inf: {facts.inf}\n"
            f"samples(top {SAMPLES}): {_printed(flat[:SAMPLES])}\n"
            f"neg: {facts.negative}, pos: {facts.positive}, zero: {facts.zero},\n"
            f"{'=' * 16}\n"
        )

    return summarize_tensor


def _printed(sample: torch.Tensor) -> str:
    """Return a tensor's text as upstream prints it; upstream leaves these settings behind for the user's own prints."""
    before = dict(vars(torch._tensor_str.PRINT_OPTS))
    torch.set_printoptions(precision=6, linewidth=128)
    try:
        return str(sample)
    finally:
        vars(torch._tensor_str.PRINT_OPTS).update(before)
