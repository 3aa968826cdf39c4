"""The variables of a rank: read, set, and the ledger of its lab. The notebook sends these functions there."""

from __future__ import annotations

from typing import Any


def value(expression: str) -> Any:
    """Evaluate an expression of the user among this rank's variables."""
    from IPython.core.getipython import get_ipython

    shell: Any = get_ipython()
    return eval(expression, shell.user_global_ns, shell.user_ns)  # noqa: S307 - the user's own expression


def set_variables(variables: dict[str, Any]) -> None:
    """Set variables of this rank."""
    from IPython.core.getipython import get_ipython

    shell: Any = get_ipython()
    shell.push(variables)


def ledger(name: str | None) -> dict[str, Any]:
    """Return the ledger of the lab of that name, or of the one wrapped last, as plain JSON types.

    Raises
    ------
    LedgerError
        If there is no lab.
    """
    from ortlab.errors import LedgerError
    from ortlab.lab.lab import Lab
    from ortlab.lab.wrapped import latest
    from ortlab.ranks.rank_ledger import rank_ledger

    lab = latest() if name is None else value(name)
    if not isinstance(lab, Lab):
        what = "There is no lab" if name is None else f"{name!r} is a {type(lab).__name__}, not a lab,"
        raise LedgerError(
            f"{what} on this rank.", fix="Wrap a model on each: %%ort_ranks, lab = %ort_wrap model."
        )
    return rank_ledger(lab.runs).to_dict()
