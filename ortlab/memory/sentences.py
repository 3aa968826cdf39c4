"""What a recompute plan does, in a sentence for somebody who has never read a log of ORT."""

from __future__ import annotations

import re
from typing import Final

_WORDS: Final = {
    "Gelu": "GELU",
    "FastGelu": "GELU",
    "QuickGelu": "GELU",
    "BiasGelu": "GELU and its bias",
    "Relu": "ReLU",
    "Dropout": "dropout",
    "BitmaskDropout": "dropout",
    "BiasDropout": "dropout and a bias",
    "LayerNormalization": "layer normalisation",
    "SimplifiedLayerNormalization": "RMS normalisation",
    "SkipLayerNormalization": "layer normalisation",
    "Softmax": "softmax",
    "BiasSoftmax": "softmax and its bias",
    "BiasSoftmaxDropout": "softmax and dropout",
    "MatMul": "matmul",
    "FusedMatMul": "matmul",
    "Gemm": "matmul",
    "Add": "addition",
    "Sub": "subtraction",
    "Mul": "multiplication",
    "Div": "division",
    "Pow": "power",
    "Sqrt": "square root",
    "Tanh": "tanh",
    "Sigmoid": "sigmoid",
    "Erf": "error function",
    "Neg": "negation",
    "Cast": "cast",
    "Where": "where",
    "Gather": "gather",
    "Concat": "concat",
    "Slice": "slice",
    "Split": "split",
    "Expand": "expand",
    "Tile": "tile",
    "Reshape": "reshape",
    "Transpose": "transpose",
    "Squeeze": "reshape",
    "Unsqueeze": "reshape",
}
"""Operators in words; others keep ORT's name."""


def operators(cluster: str) -> list[str]:
    """Split a cluster, or several with commas, into its operators: "Where+Dropout+" holds two."""
    return [name for name in re.split(r"[+,]", cluster) if name]


def sentence(cluster: str, strategy: int, frequency: int, layers: int | None = None) -> str:
    """Say what a plan does in `frequency` places, which are in `layers` layers of the model.

    Strategy 1 recomputes, 2 recomputes with compromise. `layers` is None where that is not known.
    """
    words: list[str] = []
    for name in operators(cluster):
        word = _WORDS.get(name, name)
        if word not in words[-1:]:
            words.append(word)
    what = ", ".join(words[:-1]) + " and " + words[-1] if len(words) > 1 else "".join(words)
    where = _count(frequency, "place")
    if layers:
        where = _count(layers, "layer") if layers == frequency else f"{where} of {_count(layers, 'layer')}"
    partly = "; that saves a part of it" if strategy > 1 else ""
    return f"Recompute {what} in {where} instead of keeping it{partly}."


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
