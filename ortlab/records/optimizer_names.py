"""What an optimizer is called in a run: its class, and which kernels make its steps, as far as it tells."""

from __future__ import annotations

from typing import Final

OVERRIDDEN_BY: Final = "ortlab_fp16_functions"
"""Attribute of an optimizer whose methods `ortlab.optim.fp16_optimizer` replaced: what computes in them."""

_PATHS: Final = ("fused", "foreach")


def optimizer_name(optimizer: object) -> str:
    """Name an optimizer.

    Parameters
    ----------
    optimizer
        One of torch's, of `ortlab.optim`, or any other.

    Returns
    -------
    str
        "AdamW"; "AdamW, fused" where the user asked torch for that; "FusedAdam by ORT's fused_ops"; or
        "FusedAdam by PyTorch's fused kernel: ..." with the reason why it is not ORT's.
    """
    words = type(optimizer).__name__
    groups = getattr(optimizer, "param_groups", ())
    asked = next((path for path in _PATHS if any(group.get(path) for group in groups)), "")
    if asked:
        words += f", {asked}"
    if by := getattr(optimizer, "implementation", ""):
        words += f" by {by}"
    if by := getattr(optimizer, OVERRIDDEN_BY, ""):
        words += f", FP16_Optimizer by {by}"
    return words
