"""What a forward is called with, as its trace sees it: numbers stay numbers, and a size of 1 is one of them.

ORTModule 1.19.2 makes tensors of numbers (``_graph_transition_manager``, `constant_as_tensor`), so that a forward that
looks at their type, or indexes with one, does something else than in PyTorch: a causal model of transformers takes a
tensor for `logits_to_keep` as the positions to keep, and `generate()` gives other words without a sign. Here numbers
stay numbers; a call with another one gets another export anyway (`schema.call_schema`).

It also makes every dimension of every input a symbol (``_io.parse_inputs_for_onnx_export``), and its gradient builder
takes two dimensions that meet in an operator for equal (``gradient_builder_base.cc``, ComputeBroadcastBackwardAxes):
where one of them is 1, the gradient is not summed over it, and the backward fails. A `squeeze` or a branch on a size of
1 is traced as it was, too. As in torch.export, a 1 is therefore a number of the graph, and `schema.call_schema` tells
calls with and without it apart. All other sizes of inputs are symbols.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

from ortlab.engine.patching import replace
from ortlab.errors import BuildError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

FIXED_ONES: Final[ContextVar[bool]] = ContextVar("FIXED_ONES", default=False)
"""Whether an export makes sizes of 1 numbers; on where calls with other sizes get another export."""


def install() -> None:
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
        why=f"A graph takes tensors, numbers and texts, in tuples, lists and dicts; this is a {kind}.",
        fix=fix,
    )
