"""Which lab a magic acts on: the one named, or the one wrapped last."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ortlab.errors import ArgumentError
from ortlab.notebook.magics.arguments import variable

if TYPE_CHECKING:
    from ortlab.lab.lab import Lab


def chosen_lab(name: str | None, variables: Mapping[str, object]) -> Lab:
    """Return the lab in the variable that `--lab` names; for None the lab wrapped last, by magic or in Python.

    Raises ArgumentError if the variable does not exist or holds something else, or nothing was wrapped yet.
    """
    from ortlab.lab.lab import Lab, latest

    if name is None:
        lab = latest()
        if lab is None:
            raise ArgumentError("No model is wrapped yet.", fix="%ort_wrap model")
        return lab
    labs = [key for key, held in variables.items() if isinstance(held, Lab) and not key.startswith("_")]
    found = variable(name, variables, fitting=labs)
    if not isinstance(found, Lab):
        raise ArgumentError(
            f"{name!r} is a {type(found).__name__}, not a lab.",
            fix=" or ".join(f"--lab {lab}" for lab in labs) or "lab = %ort_wrap model",
        )
    return found
