"""Write into the tensors of a call what a forward writes into its arguments, as ``labels[labels == 0] = -100`` does.

ORTModule 1.19.2 exports from copies of a batch, and its graphs have no effects: the batch stays as it was, without a
word. Here the last value of each argument that is written to is one more output of the graph. The graph computes from
a copy of such an argument, since its backward may read it, and the output is copied into the argument afterwards, in
autograd's sight where gradients are on: an activation that a part of a model writes to goes on with its gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ortlab.engine.patching import replace
from ortlab.engine.tracing.outputs import Part
from ortlab.engine.tracing.sizes import tensors_of
from ortlab.engine.tracing.traced_writes import memory
from ortlab.errors import ExecutionError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


@dataclass(frozen=True)
class WritingPart(Part):
    """What a forward returns that writes to its arguments."""

    returned: Any  # schema of what the forward returns
    places: tuple[int, ...]  # of what is written to, among the inputs of the graph
    index: int  # of the first of these values, among the tensors of the graph

    def filled(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return what the forward returns."""
        from onnxruntime.training.ortmodule import _graph_transition_manager as transitions

        return transitions.unflatten_data_using_schema(tensors, self.returned)


def install() -> None:
    """Write to the arguments of each call. Calling it again changes nothing."""
    from onnxruntime.training.ortmodule._graph_transition_manager import PostExportProcessedModelInfo

    # The two calls that ORTModule makes right before and right after each run of a graph.
    replace(PostExportProcessedModelInfo, "construct_inputs", _copy_before_run)
    replace(PostExportProcessedModelInfo, "restore_outputs", _write_after_run)


def give_out(flattened: Any, args: Sequence[torch.Tensor], written: Sequence[int], outputs: list[Any]) -> Any:
    """Return the outputs of an export's forward with the arguments at some places, which were written to."""
    from onnxruntime.training.ortmodule._io import _OutputIdentityOp

    if not written:
        return outputs
    flattened._output_schema = WritingPart(flattened._output_schema, tuple(written), len(outputs))
    return [*outputs, *(_OutputIdentityOp.apply(args[place]) for place in written)]


def _part_of(schema: Any) -> WritingPart | None:
    while schema is not None and not isinstance(schema, WritingPart):
        schema = getattr(schema, "returned", None)
    return schema


def _copy_before_run(original: Callable[..., Any]) -> Callable[..., Any]:
    def construct_inputs(self: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *more: Any) -> Any:
        found = original(self, args, kwargs, *more)
        part = _part_of(self.module_forward_output_schema)
        self._ortlab_written = []
        if part is not None:
            readers = self.onnx_graph_input_data_accessor_user_defined
            names = list(readers)
            for number, place in enumerate(part.places):
                tensor = readers[names[place]](args, kwargs)
                _refuse_shared(tensor, args, kwargs)
                self._ortlab_written.append((tensor, part.index + number))
                if found.get(names[place]) is tensor:
                    found[names[place]] = tensor.clone()
        return found

    return construct_inputs


def _write_after_run(original: Callable[..., Any]) -> Callable[..., Any]:
    def restore_outputs(self: Any, tensors: Sequence[torch.Tensor], *more: Any) -> Any:
        restored = original(self, tensors, *more)
        for tensor, index in self._ortlab_written:
            tensor.copy_(tensors[index])
        self._ortlab_written = []
        return restored

    return restore_outputs


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
