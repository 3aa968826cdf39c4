"""A graph for one batch shape: the sizes of a batch in place of the symbols that stand for them.

1.19.2 hands the sizes to its graph builder, which counts no inputs and refuses them: ORTModule lists the inputs among
the initializers (``_graph_execution_manager._initialize_graph_builder``), and the builder
(``ortmodule_graph_builder.cc``, ``SetConcreteInputShapes``) expects one shape for each input that is not there. Here
the sizes are written into the exported model instead, before the builder gets it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import onnx

    from ortlab.engine.schema import Schema


def batch_sizes(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Schema:
    """Describe the sizes of the tensors among a forward's arguments, which a graph for one shape depends on."""
    import torch
    from torch.utils import _pytree

    leaves = _pytree.tree_leaves((list(args), dict(kwargs)))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return tuple(
        (f"size of tensor {position}", " x ".join(map(str, tensor.shape)))
        for position, tensor in enumerate(tensors)
    )


def with_sizes(model: onnx.ModelProto, sizes: Mapping[str, int]) -> onnx.ModelProto:
    """Copy an exported model with numbers in its shapes where `sizes`, the values of its symbols, determine them."""
    import sympy

    fixed = type(model)()
    fixed.CopyFrom(model)
    known: dict[str, int | None] = dict(sizes)
    symbols = {name: sympy.Symbol(name, integer=True) for name in sizes}
    values = {symbols[name]: value for name, value in sizes.items()}

    def evaluated(text: str) -> int | None:
        if text not in known:
            try:
                number = sympy.sympify(text, locals=symbols).subs(values)
            except (sympy.SympifyError, TypeError, ValueError):
                number = None
            known[text] = int(number) if number is not None and number.is_Integer else None
        return known[text]

    for value in (*fixed.graph.input, *fixed.graph.value_info, *fixed.graph.output):
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.HasField("dim_param"):
                number = evaluated(dimension.dim_param)
                if number is not None:
                    dimension.dim_value = number
    return fixed
