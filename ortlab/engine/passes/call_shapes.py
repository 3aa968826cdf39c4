"""Types and shapes of what torch returns inside a graph: its operators are called on tensors without memory."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import torch
from onnx import TensorProto, helper

from ortlab.engine.operators.aten_executor import Operator
from ortlab.engine.operators.gradients import call_text
from ortlab.engine.operators.torch_calls import CallableCall
from ortlab.engine.passes.graph_edits import aten_operator

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import onnx

Results: TypeAlias = "list[tuple[torch.dtype, list[int | str | None]] | None]"
"""Dtype and shape of each result of a call; a size is None if it is not known, a result if it is undefined."""

_PRIMES: Final = (
    (31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97),
    (211, 223, 227, 229, 233, 239, 241, 251, 257, 263, 269, 271, 277, 281, 283),
)
"""Two sets of sizes, so that a size which is the same with both is a constant."""


def called(
    node: onnx.NodeProto, operand: Callable[[int, bool], torch.Tensor]
) -> Sequence[torch.Tensor | None]:
    """Return what the call of torch in a node returns; raises what the operator raises that needs values.

    `operand` makes the input of a place: a tensor without memory, or one with values where the second argument is
    False.
    """
    text = call_text(node)
    overload = next((one.s.decode() for one in node.attribute if one.name == "overload_name"), "")
    found = CallableCall.find if text else Operator.find
    call = found(aten_operator(node), text or overload)
    operands = [
        operand(place, call.is_tensor(place, is_input=True)) if name else None
        for place, name in enumerate(node.input)
    ]
    with torch.random.fork_rng([]):  # what draws numbers without a tensor to fill draws them on the CPU
        return call.results(operands) if isinstance(call, CallableCall) else call.execute(operands)


def symbolic_results(
    node: onnx.NodeProto,
    types: Sequence[int],
    shapes: Sequence[Sequence[int | str] | None],
    values: Sequence[np.ndarray[Any, Any] | None],
) -> Results | None:
    """Return dtype and shape of each result of a call of torch; None if torch cannot tell them without more values.

    The operands are told by their ONNX element types, their shapes, and their values where these are constants. A size
    of a result is None if it is neither a constant nor a size of an operand.
    """
    # Each is a size of its own, even "Min(512, length)" beside "length": evaluated, it would be a constant for some.
    texts = sorted({size for shape in shapes for size in shape or () if isinstance(size, str)})
    if len(texts) > len(_PRIMES[0]):
        return None

    def results(sizes: dict[str, int]) -> Sequence[torch.Tensor | None]:
        def operand(place: int, is_tensor: bool) -> torch.Tensor:  # noqa: FBT001 - as `called` calls it
            if not is_tensor:
                return torch.from_numpy(np.array(values[place]))
            shape = shapes[place]
            if shape is None:
                raise ValueError(node.input[place])
            return without_memory(
                [sizes[size] if isinstance(size, str) else size for size in shape], types[place]
            )

        return called(node, operand)

    try:
        one, other = (results(dict(zip(texts, primes, strict=False))) for primes in _PRIMES)
    except Exception:  # noqa: BLE001 - whatever an operator cannot do without values, its sizes stay unknown
        return None
    met = {(small, large): text for text, small, large in zip(texts, *_PRIMES, strict=False)}
    return [
        None
        if a is None or b is None
        else (a.dtype, [m if m == n else met.get((m, n)) for m, n in zip(a.shape, b.shape, strict=True)])
        for a, b in zip(one, other, strict=True)
    ]


def without_memory(shape: Sequence[int], element_type: int) -> torch.Tensor:
    """Return a tensor of this shape and ONNX element type that has no memory."""
    return torch.empty(shape, dtype=_dtypes()[element_type], device="meta")


def onnx_element_type(dtype: torch.dtype) -> int:
    """Return ONNX's number for a dtype."""
    return next(number for number, known in _dtypes().items() if known is dtype)


@cache
def _dtypes() -> dict[int, torch.dtype]:
    numbers: dict[int, torch.dtype] = {TensorProto.BFLOAT16: torch.bfloat16}
    for name in ("FLOAT", "DOUBLE", "FLOAT16", "INT64", "INT32", "INT16", "INT8", "UINT8", "BOOL"):
        number = TensorProto.DataType.Value(name)
        numbers[number] = torch.from_numpy(np.empty(0, helper.tensor_dtype_to_np_dtype(number))).dtype
    return numbers
