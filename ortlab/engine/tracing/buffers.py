"""A module's buffers: as they were after an export, advanced by each step as torch advances them.

A graph of onnxruntime 1.19.2 has no effects, so whatever a forward writes into a buffer is lost in training, while
the export, which runs the real module, does write. Three things are repaired here: the export leaves no traces; batch
normalisation keeps its statistics (the operator itself is torch's, see
`ortlab.engine.operators.layer_symbolics.batch_norm`); any other module that writes into a buffer is refused.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ortlab.engine.patching import replace
from ortlab.errors import BuildError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import onnx
    import torch


def install() -> None:
    """Keep the buffers of exported modules right. Calling it again changes nothing."""
    from onnxruntime.training.ortmodule._graph_transition_manager import (
        GraphTransitionManager,
        PostExportProcessedModelInfo,
    )

    replace(GraphTransitionManager, "_export_model", _leave_no_traces)
    # The two calls that ORTModule makes right before and right after each run of a graph.
    replace(PostExportProcessedModelInfo, "construct_inputs", _before_run)
    replace(PostExportProcessedModelInfo, "restore_outputs", _after_run)


# --- the export -----------------------------------------------------------------------------------------------


def _leave_no_traces(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``GraphTransitionManager._export_model``, which traces the user's own module.

    The trace runs the forward, so in 1.19.2 the running statistics of batch normalisation are one batch ahead before
    the first step.
    """

    def export_model(*, flattened_module: torch.nn.Module, **kwargs: Any) -> Any:
        before = Buffers(flattened_module)
        try:
            with _last_batch_only(flattened_module):
                exported = original(flattened_module=flattened_module, **kwargs)
            unknown = before.changed() - set(advanced_by_graph(exported[0]))
            lost = unknown and _change_again(unknown, flattened_module, kwargs["flatten_module_inputs"])
        finally:
            before.restore()
        if lost:
            _refuse(sorted(lost))
        return exported

    return export_model


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
    """Return those of `names` that another forward of the same inputs changes once more.

    A buffer that does not change again is a cache (a causal mask, rotary angles), which a graph does without.
    """
    import torch

    before = Buffers(module)
    with torch.random.fork_rng(), torch.no_grad():
        module(*inputs)
    return names & before.changed()


def _refuse(names: list[str]) -> None:
    shown = ", ".join(name.removeprefix("_original_module.") for name in names)
    raise BuildError(
        f"The forward of this module changes buffers: {shown}.",
        why="An ONNX graph has no side effects, so ONNX Runtime would leave them as they are.",
        fix="Leave the module that owns them out of the wrapped one, or train it with the eager engine.",
    )


# --- batch normalisation --------------------------------------------------------------------------------------


@contextmanager
def _last_batch_only(module: torch.nn.Module) -> Iterator[None]:
    """Export batch normalisations with ``momentum=None`` as if it were 1.

    With None, torch computes the momentum anew for each batch, in Python; a trace makes it a constant. With 1 the
    graph leaves the statistics of the batch in the buffers, and `_after_run` forms the cumulative average.
    """
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
    """Return the batch normalisations that a processed graph updates, and how often it does in one forward.

    This is worked out once per graph and module.
    """
    module, found = getattr(info, "_ortlab_statistics", (None, []))
    if module is not info._flattened_module:
        module = info._flattened_module
        updates = _updates(info._post_export_processed_model)
        found = [(module.get_submodule(name), times) for name, times in updates.items()]
        info._ortlab_statistics = (module, found)
    return found


def _before_run(original: Callable[..., Any]) -> Callable[..., Any]:
    def construct_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._ortlab_averages = [
            (part, mean.clone(), variance.clone())
            for part, _ in _statistics(self)
            if part.momentum is None
            and (mean := part.running_mean) is not None
            and (variance := part.running_var) is not None
        ]
        return original(self, *args, **kwargs)

    return construct_inputs


def _after_run(original: Callable[..., Any]) -> Callable[..., Any]:
    def restore_outputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        with torch.no_grad():
            for part, times in _statistics(self):
                if part.num_batches_tracked is not None:
                    part.num_batches_tracked.add_(times)
            for part, mean, variance in self._ortlab_averages:
                share = 1 / float(part.num_batches_tracked)
                part.running_mean.copy_(mean.lerp_(part.running_mean, share))
                part.running_var.copy_(variance.lerp_(part.running_var, share))
        return original(self, *args, **kwargs)

    return restore_outputs
