"""Sizes of 1 are part of an export; all other sizes of inputs are symbols in it.

ORTModule 1.19.2 makes every dimension of every input a symbol (``_io.parse_inputs_for_onnx_export``), and its gradient
builder takes two dimensions that meet in an operator for equal (``gradient_builder_base.cc``,
ComputeBroadcastBackwardAxes): where one of them is 1, the gradient is not summed over it, and the backward fails. A
`squeeze` or a branch on a size of 1 is traced as it was, too. As in torch.export, a 1 is therefore a number of the
graph, and `schema.call_schema` tells calls with and without it apart.

Where a forward makes a Python number of a size, as in ``range(x.shape[0])`` or ``math.sqrt(k.size(-1))``, the graph
holds the number of the batch that it was traced with. Such an export is bound to the sizes of its inputs, until another
export has shown which of them make no difference.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from ortlab.engine.patching import replace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

FIXED_ONES: Final[ContextVar[bool]] = ContextVar("FIXED_ONES", default=False)
"""Whether an export makes sizes of 1 numbers; on where calls with other sizes get another export."""


Sizes: TypeAlias = frozenset[tuple[str, int]]
"""Names of dimensions, such as "size 0 of tensor 1", and their sizes."""

_MAKES_NUMBERS: Final = frozenset(
    {"__float__", "__index__", "__int__", "__len__", "as_strided", "stride", "unbind"}
)
"""Functions of a tensor that a trace makes constants of; a branch (`__bool__`) is not among them, see `schema`."""


class NumbersMade(TorchFunctionMode):
    """Notes in `any`, while a module is traced, whether a Python number is made of a traced value."""

    def __init__(self) -> None:
        super().__init__()
        self.any = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `function`."""
        name = getattr(function, "__name__", "")
        if name in _MAKES_NUMBERS and torch._C._get_tracing_state():
            self.any = True
        return function(*args, **(kwargs or {}))


def sizes(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sizes:
    """Return the size of each dimension of each tensor among the arguments of a forward."""
    leaves = _pytree.tree_leaves((list(args), dict(kwargs)))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return frozenset(
        (f"size {axis} of tensor {position}", size)
        for position, tensor in enumerate(tensors)
        for axis, size in enumerate(tensor.shape)
    )


def difference(bound_to: Sizes, present: Sizes) -> str:
    """Say which size an export is bound to that a call does not have; empty if there is none."""
    now = dict(present)
    for name, size in sorted(bound_to):
        if now.get(name) != size:
            return f"`{name}`, which the forward makes a number of, changed from {size} to {now.get(name)}"
    return ""


def install() -> None:
    """Let exports ask for sizes of 1 as numbers. Calling it again changes nothing."""
    from onnxruntime.training.ortmodule import _io

    replace(_io, "parse_inputs_for_onnx_export", _fix_ones)


def _fix_ones(original: Callable[..., Any]) -> Callable[..., Any]:
    def parse_inputs_for_onnx_export(
        parameters: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *more: Any
    ) -> Any:
        found = original(parameters, args, kwargs, *more)
        if FIXED_ONES.get():
            access = found.onnx_graph_input_data_accessor_user_defined
            for name, axes in found.onnx_graph_input_dynamic_axes_map.items():
                sizes = getattr(access[name](args, kwargs), "shape", ())
                for axis in [axis for axis in axes if axis < len(sizes) and sizes[axis] == 1]:
                    del axes[axis]
        return found

    return parse_inputs_for_onnx_export
