"""What a graph is fed besides parameters: the arguments of a call, the buffers of its module; and the writes to both.

A graph of onnxruntime 1.19.2 has no effects, and it is made from copies of a batch. So what a forward writes to one of
them comes out of the graph, or is worked out beside it, and is written where PyTorch writes it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, Protocol

from ortlab.engine.kept_builds import written_buffers
from ortlab.engine.patching import replace, set_to
from ortlab.engine.tracing.origins import Origin, Origins
from ortlab.engine.tracing.outputs import Part
from ortlab.engine.tracing.sizes import tensors_of
from ortlab.engine.tracing.taps import is_tracing
from ortlab.engine.tracing.traced_writes import memory, not_traced
from ortlab.errors import BuildError, ExecutionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TypeAlias

    import onnx
    import torch

    _Average: TypeAlias = tuple[Any, torch.Tensor, torch.Tensor]  # of a normalisation: mean and variance


# ---- arguments: numbers and sizes -----------------------------------------------------------------------------------

# ORTModule 1.19.2 makes tensors of numbers (``_graph_transition_manager``, `constant_as_tensor`), so that a forward
# that looks at their type, or indexes with one, does something else than in PyTorch: a causal model of transformers
# takes a tensor for `logits_to_keep` as the positions to keep, and `generate()` gives other words without a sign. Here
# numbers stay numbers; a call with another one gets another export anyway (`schema.call_schema`).
#
# It also makes every dimension of every input a symbol (``_io.parse_inputs_for_onnx_export``), and its gradient builder
# takes two dimensions that meet in an operator for equal (``gradient_builder_base.cc``, ComputeBroadcastBackwardAxes):
# where one of them is 1, the gradient is not summed over it, and the backward fails. A `squeeze` or a branch on a size
# of 1 is traced as it was, too. As in torch.export, a 1 is therefore a number of the graph, and `schema.call_schema`
# tells calls with and without it apart. All other sizes of inputs are symbols.

FIXED_ONES: Final[ContextVar[bool]] = ContextVar("FIXED_ONES", default=False)
"""Whether an export makes sizes of 1 numbers; on where calls with other sizes get another export."""


def install_arguments() -> None:
    """Read the arguments of each export as said above. Calling it again changes nothing."""
    from onnxruntime.training.ortmodule import _io

    replace(_io, "parse_inputs_for_onnx_export", _read_arguments)


def _read_arguments(original: Callable[..., Any]) -> Callable[..., Any]:
    from onnxruntime.training.ortmodule._fallback import ORTModuleIOError

    def parse_inputs_for_onnx_export(
        parameters: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        constant_as_tensor: bool,  # noqa: ARG001, FBT001 - ORT's signature
        *more: Any,
    ) -> Any:
        try:
            found = original(parameters, args, kwargs, False, *more)  # noqa: FBT003 - ORT's signature
        except ORTModuleIOError as error:
            raise _unreadable(str(error)) from error
        if FIXED_ONES.get():
            access = found.onnx_graph_input_data_accessor_user_defined
            for name, axes in found.onnx_graph_input_dynamic_axes_map.items():
                shape = getattr(access[name](args, kwargs), "shape", ())
                for axis in [axis for axis in axes if axis < len(shape) and shape[axis] == 1]:
                    del axes[axis]
        return found

    return parse_inputs_for_onnx_export


def _unreadable(message: str) -> BuildError:
    """Explain "ORTModule does not support input type <class 'a.B'> for input name"."""
    kind, _, name = message.rpartition(" for input ")
    kind = kind.rpartition("input type ")[2].removeprefix("<class '").removesuffix("'>")
    fix = "Pass the tensors that it holds, in a tuple, a list or a dict; or use PyTorch for such calls: engine='eager'."
    if "cache" in kind.lower():
        fix = (
            "Call it with use_cache=False, also in model.generate(..., use_cache=False); "
            "or generate with PyTorch: lab.set(engine='eager'), and engine='ort' to train on."
        )
    return BuildError(
        f"The argument `{name}` of this call cannot be given to ONNX Runtime.",
        why=f"A graph takes tensors, numbers and texts, in tuples, lists and dicts; this is of the class {kind}.",
        fix=fix,
    )


# ---- arguments that a forward writes to -----------------------------------------------------------------------------

# What a forward writes into its arguments, as ``labels[labels == 0] = -100`` does, would be lost. Here the last value
# of each argument that is written to is one more output of the graph. The graph computes from a copy of such an
# argument, since its backward may read it, and the output is copied into the argument afterwards, in autograd's sight
# where gradients are on: an activation that a part of a model writes to goes on with its gradient.


@dataclass(frozen=True)
class WritingPart(Part):
    """What a forward returns that writes to its arguments, or to buffers and parameters."""

    returned: Any  # schema of what the forward returns
    places: tuple[int, ...]  # of arguments that are written to, among the inputs of the graph
    state: tuple[str, ...]  # names of buffers and parameters that are written to
    index: int  # of the first of these values, those of arguments before those of state, among the graph's tensors

    def filled(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return what the forward returns."""
        from onnxruntime.training.ortmodule import _graph_transition_manager as transitions

        return transitions.unflatten_data_using_schema(tensors, self.returned)


class Stops(Protocol):
    """What `TracedStops` tells of writes."""

    def refresh(self, given: list[torch.Tensor]) -> None:
        """Give tensors the values that were written to their memory through others."""

    def wrote_to(self, tensor: torch.Tensor) -> bool:
        """Tell whether the memory of a tensor was written to."""


class StateWrites:
    """The buffers and parameters that an export's forward writes to as a trace sees it."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._before: dict[str, _Before] = {}
        self._saved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.written: set[str] = set()
        self.given: tuple[str, ...] = ()  # whose last values the export gives out

    def state(self) -> dict[str, torch.Tensor]:
        """Return what a forward may write to, by name."""
        return {**dict(self._module.named_parameters()), **dict(self._module.named_buffers())}

    def begin(self) -> None:
        """Note what these are in the trace, and how often they have been written to."""
        self._before = {name: _Before(one, _traced(one), _version(one)) for name, one in self.state().items()}

    def end(self, stops: Stops) -> None:
        """Note which have other values now that are made of data or random numbers: others are the same each time."""
        origins = Origins()
        self.written = {
            name
            for name, one in self.state().items()
            if (self._is_another(name, one) or stops.wrote_to(one))
            and origins.of(one) in {Origin.INPUTS, Origin.RANDOM}
        }

    def _is_another(self, name: str, tensor: torch.Tensor) -> bool:
        """Say whether a name stands for another value of the trace than before, in another tensor or by a write."""
        before = self._before.get(name)
        if before is None:
            return True
        # What returns its own argument, as `contiguous` does of a dense tensor, makes another value without a write.
        written = before.version is None or _version(tensor) != before.version
        return _traced(tensor) != before.traced and (tensor is not before.tensor or written)

    def save(self, parameter: torch.Tensor) -> None:
        """Keep the values of a parameter that will be written to."""
        if id(parameter) not in self._saved:
            with not_traced():
                self._saved[id(parameter)] = (parameter, parameter.detach().clone())

    def put_back(self) -> None:
        """Write the values of parameters back."""
        for parameter, values in self._saved.values():
            parameter.detach().copy_(values)


class _Before(NamedTuple):
    """A buffer or parameter as it was before the forward."""

    tensor: torch.Tensor
    traced: int
    version: int | None


def _version(tensor: torch.Tensor) -> int | None:
    """Count the writes to a tensor; PyTorch does not for those made in its inference mode."""
    return None if tensor.is_inference() else tensor._version


def _traced(tensor: torch.Tensor) -> int:
    import torch

    internals: Any = torch._C
    return int(internals._get_value_trace(tensor).unique())


_USERS: Final = "_original_module."
"""Begins the names of what the user's module owns in the one that ORTModule puts around it."""

STATE_WRITES: Final[ContextVar[StateWrites | None]] = ContextVar("STATE_WRITES", default=None)
"""Those of the export that is going on."""


def give_out(
    flattened: Any, args: Sequence[torch.Tensor], written: Sequence[int], outputs: list[Any], stops: Stops
) -> Any:
    """Return the outputs of an export's forward with the arguments at some places, and the state, it has written to."""
    from onnxruntime.training.ortmodule._io import _OutputIdentityOp

    writes = STATE_WRITES.get()
    names = writes.given if writes is not None else ()
    present = writes.state() if writes is not None else {}
    if writes is not None and is_tracing():
        stops.refresh([one for one in present.values() if stops.wrote_to(one)])
        writes.end(stops)
    if not written and not names:
        return outputs
    flattened._output_schema = WritingPart(flattened._output_schema, tuple(written), names, len(outputs))
    values = [*(args[place] for place in written), *(present[name].detach() for name in names)]
    return [*outputs, *map(_OutputIdentityOp.apply, values)]


def written_state(info: Any) -> set[str]:
    """Name the buffers and parameters whose last values come out of a processed graph."""
    part = _part_of(info.module_forward_output_schema)
    return set() if part is None else {name.removeprefix(_USERS) for name in part.state}


def _part_of(schema: Any) -> WritingPart | None:
    while schema is not None and not isinstance(schema, WritingPart):
        schema = getattr(schema, "returned", None)
    return schema


def _refuse_shared(written: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a call in which another argument shares the memory of one that is written to."""
    if any(one is not written and memory(one) == memory(written) for one in tensors_of(args, kwargs)) or (
        sum(one is written for one in tensors_of(args, kwargs)) > 1
    ):
        raise ExecutionError(
            "The forward writes to one of its arguments, and another one shares its memory.",
            why="A graph has values and no memory: the other argument would not show what was written.",
            fix="Pass a copy of one of them, tensor.clone(), or train with PyTorch: lab.set(engine='eager').",
        )


# ---- buffers --------------------------------------------------------------------------------------------------------

# The export runs the real module, and writes to its buffers; a graph does not. Three things are repaired here: the
# export leaves no traces; batch normalisation keeps its statistics (the operator itself is torch's, see
# `ortlab.engine.operators.layer_symbolics.batch_norm`); where a forward writes into another buffer or a parameter (a
# spectral norm, a moving average), it is exported once more, and the last value comes out of the graph, as that of an
# argument.


def install_buffers() -> None:
    """Keep the buffers of exported modules right. Calling it again changes nothing."""
    from onnxruntime.training.ortmodule._graph_transition_manager import GraphTransitionManager

    replace(GraphTransitionManager, "_export_model", _leave_no_traces)


# ---- buffers: the export --------------------------------------------------------------------------------------------


def _leave_no_traces(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``GraphTransitionManager._export_model``, which traces the user's own module."""
    # The trace runs the forward, so in 1.19.2 the running statistics of batch normalisation are one batch ahead before
    # the first step.

    def export_model(*, flattened_module: torch.nn.Module, **kwargs: Any) -> Any:
        before, writes = Buffers(flattened_module), StateWrites(flattened_module)
        module: Any = flattened_module._original_module
        inputs = {f"{_USERS}{name}" for name in written_buffers(module)}

        def export() -> Any:
            with (
                _last_batch_only(flattened_module),
                set_to(STATE_WRITES, writes),
                _inputs_of_graphs(flattened_module, inputs),
            ):
                return original(flattened_module=flattened_module, **kwargs)

        try:
            exported = export()
            known = set(advanced_by_graph(exported[0]))
            seen = writes.written - known
            unseen = before.changed() - known - seen
            _refuse_unread(flattened_module, unseen)
            if unseen:
                unseen = _change_again(unseen, flattened_module, kwargs["flatten_module_inputs"])
            before.refuse(unseen, seen)
            if seen:
                before.restore()
                writes.put_back()
                writes.given = tuple(sorted(seen))
                inputs |= seen
                exported = export()
        finally:
            before.restore()
            writes.put_back()
        return exported

    return export_model


@contextmanager
def _inputs_of_graphs(module: torch.nn.Module, names: Collection[str]) -> Iterator[None]:
    """Let an export in the block take some buffers for inputs, though they are not in the `state_dict`."""
    kept = [
        (part, name)
        for path, part in module.named_modules()
        for name in part._non_persistent_buffers_set & part._buffers.keys()
        if f"{path}.{name}" in names
    ]
    try:
        for part, name in kept:  # torch's exporter makes constants of these
            part._non_persistent_buffers_set.discard(name)
        yield
    finally:
        for part, name in kept:
            part._non_persistent_buffers_set.add(name)


class Buffers:
    """The buffers of a module at one moment."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._tables = [(part, dict(part._buffers)) for part in module.modules()]
        self._values = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}

    def changed(self) -> set[str]:
        """Return the names of the buffers that have another value, shape or dtype now, or are new."""
        import torch

        return {
            name
            for name, buffer in self._module.named_buffers()
            if (value := self._values.get(name)) is None
            or value.dtype != buffer.dtype
            or not torch.equal(torch.nan_to_num(value), torch.nan_to_num(buffer))
        }

    def refuse(self, unseen: Collection[str], seen: Collection[str]) -> None:
        """Raise BuildError if a buffer changes out of sight of a trace, or to what could not be written to it."""
        if unseen:
            _refuse(min(unseen), "what writes to this one, a trace does not see")
        present = dict(self._module.named_buffers())
        for name in sorted(present.keys() & seen):
            before, now = self._values.get(name), present[name]
            if before is None:
                _refuse(name, "this one is made anew in each forward")
            if now.requires_grad:
                _refuse(name, "this one has a gradient, which PyTorch would follow into earlier steps")
            if (before.shape, before.dtype) != (now.shape, now.dtype):
                _refuse(name, f"this one becomes {_kind(now)}, and was {_kind(before)}")

    def restore(self) -> None:
        """Put the same tensors back in place, with the values they had."""
        import torch

        for part, table in self._tables:
            part._buffers.clear()
            part._buffers.update(table)
        changed = self.changed()  # a buffer that is expanded can be read only
        with torch.no_grad():
            for name, buffer in self._module.named_buffers():
                if name in changed:
                    buffer.copy_(self._values[name])


def _change_again(names: set[str], module: torch.nn.Module, inputs: Sequence[Any]) -> set[str]:
    """Return those of `names` that another forward of the same inputs changes once more."""
    # A buffer that does not change again is a cache (a causal mask, rotary angles), which a graph does without.
    import torch

    before = Buffers(module)
    with torch.random.fork_rng(), torch.no_grad():
        module(*inputs)
    return names & before.changed()


def _refuse_unread(module: torch.nn.Module, names: Collection[str]) -> None:
    """Raise BuildError if a graph leaves out a batch normalisation that changes its statistics."""
    from torch.nn.modules.batchnorm import _NormBase

    for name in sorted(names):
        if isinstance(module.get_submodule(name.rpartition(".")[0]), _NormBase):
            _refuse(name, "nothing that the forward returns is made of this normalisation's result")


def _refuse(name: str, why: str) -> NoReturn:
    raise BuildError(
        f"The forward of this module changes buffers: {name.removeprefix(_USERS)}.",
        why=f"What a forward writes to buffers comes out of the graph; but {why}.",
        fix="Write to a registered buffer of the final shape, without gradients, and return what is made of the "
        "normalisations that run; or leave the module that owns it out of the wrapped one, or train it with the eager "
        "engine.",
    )


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {' x '.join(map(str, tensor.shape)) or 'scalar'}"


# ---- buffers: batch normalisation -----------------------------------------------------------------------------------


@contextmanager
def _last_batch_only(module: torch.nn.Module) -> Iterator[None]:
    """Export batch normalisations with ``momentum=None`` as if it were 1."""
    # With None, torch computes the momentum anew for each batch, in Python; a trace makes it a constant. With 1 the
    # graph leaves the statistics of the batch in the buffers, and `_count_batch` forms the cumulative average.
    import torch

    cumulative = [
        part
        for part in module.modules()
        if isinstance(part, torch.nn.modules.batchnorm._BatchNorm) and part.momentum is None
    ]
    for part in cumulative:
        part.momentum = 1.0
    try:
        yield
    finally:
        for part in cumulative:
            part.momentum = None


def _updates(model: onnx.ModelProto) -> dict[str, int]:
    """Count, per module name, the batch normalisations of a graph that write running statistics."""
    true = {
        node.output[0]
        for node in model.graph.node
        if node.op_type == "Constant" and node.attribute and any(node.attribute[0].t.raw_data)
    }
    times: dict[str, int] = {}
    for node in model.graph.node:
        is_batch_norm = any(attribute.s == b"native_batch_norm" for attribute in node.attribute)
        if is_batch_norm and node.input[5] in true and node.input[3].endswith(".running_mean"):
            name = node.input[3].removesuffix(".running_mean")
            times[name] = times.get(name, 0) + 1
    return times


def advanced_by_graph(model: onnx.ModelProto) -> Iterator[str]:
    """Yield the names of the buffers that the normalisations of a graph write."""
    for name in _updates(model):
        yield from (f"{name}.running_mean", f"{name}.running_var", f"{name}.num_batches_tracked")
    for node in model.graph.node:
        if any(attribute.s == b"ortlab::instance_norm" for attribute in node.attribute):
            yield from node.input[3:5]


def _statistics(info: Any) -> list[tuple[torch.nn.modules.batchnorm._BatchNorm, int]]:
    """Return the batch normalisations that a processed graph updates, and how often it does in one forward."""
    # This is worked out once per graph and module.
    module, found = getattr(info, "_ortlab_statistics", (None, []))
    if module is not info._flattened_module:
        module = info._flattened_module
        updates = _updates(info._post_export_processed_model)
        found = [(module.get_submodule(name), times) for name, times in updates.items()]
        info._ortlab_statistics = (module, found)
    return found


def _averages(info: Any) -> list[_Average]:
    """Return the statistics of those normalisations that average over all batches, as they are before a run."""
    return [
        (part, mean.clone(), variance.clone())
        for part, _ in _statistics(info)
        if part.momentum is None
        and (mean := part.running_mean) is not None
        and (variance := part.running_var) is not None
    ]


def _count_batch(info: Any, averages: Sequence[_Average]) -> None:
    """Count the batch of a run in each normalisation, and form the cumulative averages."""
    statistics = _statistics(info)
    if not statistics:
        return
    import torch

    with torch.no_grad():
        for part, times in statistics:
            if part.num_batches_tracked is not None:
                part.num_batches_tracked.add_(times)
        for part, mean, variance in averages:
            share = 1 / float(part.num_batches_tracked)
            part.running_mean.copy_(mean.lerp_(part.running_mean, share))
            part.running_var.copy_(variance.lerp_(part.running_var, share))


# ---- a run ----------------------------------------------------------------------------------------------------------


class Inputs:
    """What a run of a graph is fed, and what has to be done with its outputs."""

    def __init__(
        self, info: Any, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device
    ) -> None:
        self._info = info
        self._averages = _averages(info)
        self._written: list[tuple[torch.Tensor, int]] = []
        self.by_name: dict[str, torch.Tensor] = _fed(info, args, kwargs, device)
        part = _part_of(info.module_forward_output_schema)
        if part is not None:
            self._copy_written(part, args, kwargs)

    def _copy_written(self, part: WritingPart, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Feed copies of what the forward writes to, and note where the values are to be written."""
        readers = self._info.onnx_graph_input_data_accessor_user_defined
        names = list(readers)
        for number, place in enumerate(part.places):
            tensor: torch.Tensor = readers[names[place]](args, kwargs)
            _refuse_shared(tensor, args, kwargs)
            self._written.append((tensor, part.index + number))
            if self.by_name.get(names[place]) is tensor:
                self.by_name[names[place]] = tensor.clone()
        for number, name in enumerate(part.state, len(part.places)):
            present = attrgetter(name)(self._info._flattened_module)
            self._written.append((present.detach(), part.index + number))
            if name in self.by_name:
                self.by_name[name] = present.clone()

    def returned(self, outputs: Sequence[torch.Tensor]) -> Any:
        """Write what the forward writes, and return what it returns."""
        _count_batch(self._info, self._averages)
        restored = self._info.restore_outputs(outputs)
        for tensor, index in self._written:
            tensor.copy_(outputs[index])
        return restored


def _fed(
    info: Any, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device
) -> dict[str, torch.Tensor]:
    """Return the inputs of a graph, as ``PostExportProcessedModelInfo.construct_inputs`` does."""
    held: dict[str, torch.Tensor] | None = info._buffer_for_ort_runs
    made_here = info.is_mem_efficient_grad_management_enabled or info.onnx_graph_input_const_as_tensor
    if held is None or made_here:
        found: dict[str, torch.Tensor] = info.construct_inputs(args, kwargs, True, device)  # noqa: FBT003 - ORT's
        return found
    readers = info.onnx_graph_input_data_accessor_user_defined
    for name in info.onnx_graph_input_names_user_defined:
        held[name] = readers[name](args, kwargs)
    return held
