"""A recipe: code that puts ONNX Runtime and an optimizer together."""

from __future__ import annotations

from dataclasses import dataclass

from ortlab.shown import Shown


@dataclass(frozen=True, repr=False)
class Recipe(Shown):
    """Code that puts ONNX Runtime and an optimizer together.

    Attributes
    ----------
    name
        "fused_adam", "deepspeed", "apex" or "all".
    title
        What it puts together.
    code
        Python, for a cell of its own.
    missing
        What it needs and this machine lacks, a sentence each with what mends it.
    """

    name: str
    title: str
    code: str
    missing: tuple[str, ...] = ()
