"""Indexing for onnxruntime 1.19.2: sums over places that meet, which it or torch's export gets wrong."""

from __future__ import annotations

from typing import Any, NoReturn

from ortlab.engine.symbolic_words import aten, constant, filled, int64
from ortlab.errors import BuildError


def scatter_add(g: Any, x: Any, dim: Any, index: Any, source: Any) -> Any:
    """``Tensor.scatter_add``: executed by torch.

    The gradient of ScatterElements in 1.19.2 (``gradient_builder.cc``, GetScatterElementsGradient) does not look at
    its `reduction`, and cuts the gradient of what is added to.
    """
    return aten(g, "scatter_add", x, dim, index, source).setType(x.type())


def index_add(g: Any, x: Any, dim: Any, index: Any, source: Any, alpha: Any = None) -> Any:
    """``Tensor.index_add``: executed by torch; torch's export keeps only one of the rows that meet in one place."""
    if alpha is not None and constant(alpha, "f") != 1:
        source = g.op("Mul", source, filled(g, int64(g, [1]), constant(alpha, "f"), like=source))
    one = int64(g, 1)
    return aten(g, "index_add", x, dim, index, source, one).setType(x.type())


def refused(name: str, why: str) -> Any:
    """Return a symbolic function that refuses an operator which would crash or compute something else."""

    def symbolic(*_: Any) -> NoReturn:
        raise BuildError(
            f"{name} cannot be trained by ONNX Runtime.",
            why=why,
            fix="Leave the part of the model that uses it out of the wrapped module.",
        )

    return symbolic


def index_put(onnx_index_put: Any) -> Any:
    """``Tensor.index_put``: as torch exports it, unless values that meet in one place are to be summed."""

    def symbolic(g: Any, x: Any, indices: Any, values: Any, accumulate: Any = None) -> Any:
        if accumulate is not None and constant(accumulate, "i"):
            return refused("index_put with accumulate=True", "Its export keeps one of the summed values.")()
        return onnx_index_put(g, x, indices, values, accumulate)

    return symbolic
