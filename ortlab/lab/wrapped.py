"""Wrapping a model, and the lab that a notebook's magics act on: of those in use, the one wrapped last."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from ortlab.lab.lab import Lab

if TYPE_CHECKING:
    import torch

    from ortlab.options.options import Options
    from ortlab.runs.parts import Wishes

_labs: list[weakref.ref[Lab]] = []
"""Every lab that lives, in the order in which they were wrapped."""


def wrap(
    module: torch.nn.Module,
    *,
    only: Wishes | None = None,
    options: Options | None = None,
    engine: str = "ort",
    name: str = "model",
    **changes: object,
) -> Lab:
    """Run a PyTorch model on ONNX Runtime, and make it the subject of a lab.

    The model keeps its identity, its parameters and its `state_dict` keys; only who runs its forward changes. The
    first call exports it and builds the gradient graph.

    Parameters
    ----------
    module
        Any `torch.nn.Module`. Wrap it before DDP or DeepSpeed are put around it.
    only
        The sub-modules that ONNX Runtime shall run, where it cannot or shall not run the whole model: dotted paths as
        `module.named_modules()` gives them, patterns ("encoder.layer.*"), or the sub-modules themselves; one or
        several. PyTorch runs the rest, and gradients flow through. By default the whole model.
    options
        The switches; by default those that the `ORTMODULE_*` environment variables set.
    engine
        "ort", "eager", "checkpoint" or "compile"; see `Lab.set`.
    name
        What tables and errors call the model.
    **changes
        Switches by name, as in `ortlab.wrap(model, memory_level=1)`.

    Raises
    ------
    WrapError
        If the object or a part of it cannot be wrapped, or there is no such part.
    OptionError
        If an option is unknown, wrong, or needs something that is missing here.
    InstallError
        If the installed packages cannot train with ONNX Runtime.
    """
    lab = Lab(module, only=only, options=options, engine=engine, name=name, **changes)
    _labs.append(weakref.ref(lab, _labs.remove))
    return lab


def latest() -> Lab | None:
    """Return the lab that was wrapped last and is not unwrapped; if all are, the last one; None if there is none."""
    living = [lab for lab in (reference() for reference in _labs) if lab is not None]
    return next((lab for lab in reversed(living) if lab._bench.wrapped), living[-1] if living else None)
