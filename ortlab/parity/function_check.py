"""What was found of the backwards of a model's own `autograd.Function` classes."""

from __future__ import annotations

from dataclasses import dataclass

from ortlab.shown import Shown


@dataclass(frozen=True)
class FunctionCheck:
    """One Function: whether its backward is the derivative of its forward.

    Attributes
    ----------
    name
        Its class, with the module that it is from.
    calls
        How often one forward of the model called it.
    state
        "agrees", "differs", or "not checked".
    found
        What differs, or why it was not checked; empty where it agrees.
    """

    name: str
    calls: int
    state: str
    found: str = ""


@dataclass(frozen=True, repr=False)
class FunctionReport(Shown):
    """The Functions of a model, in the order of their first calls.

    Attributes
    ----------
    model
        Name of the model's class.
    checks
        One per Function.
    """

    model: str
    checks: tuple[FunctionCheck, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether no backward differs from the derivative of its forward."""
        return not any(check.state == "differs" for check in self.checks)
