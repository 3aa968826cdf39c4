"""What ORT's tuning of operators found, read from the folder that `tuning_results_path` names.

ORT times the implementations of an operator for the shapes that it meets and writes the number of the fastest
(``tuning_context.h``). It does not write the times, nor what the numbers stand for.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ortlab.errors import LedgerError
from ortlab.options.option_files import text_of
from ortlab.records.record_files import checked
from ortlab.shown import Shown

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class TunedOperator:
    """One choice."""

    provider: str  #: The execution provider: "CUDAExecutionProvider"
    operator: str  #: The operator's signature, with its data types, as ORT writes it
    shape: str  #: The signature of its sizes
    choice: int  #: Number of the implementation that was fastest; 0 is the one that is taken without tuning


@dataclass(frozen=True, repr=False)
class TuningResults(Shown):
    """The choices of one mode, and what they hold for."""

    path: str  #: The file
    operators: tuple[TunedOperator, ...]  #: The choices, in the order of the file
    #: By provider: what has to be the same for ORT to take them, such as the GPU's name and ORT's version.
    validators: dict[str, dict[str, str]]

    def table(self) -> pd.DataFrame:
        """Return one row a choice, with the columns provider, operator, shape and choice."""
        import pandas as pd

        return pd.DataFrame(
            [vars(one) for one in self.operators], columns=list(TunedOperator.__annotations__)
        )


def read_tuning_results(
    folder: str | Path, mode: Literal["training", "inference"] = "training"
) -> TuningResults:
    """Read what was tuned.

    Parameters
    ----------
    folder
        The value of `tuning_results_path`.
    mode
        Of the sessions: each has a file of its own.

    Returns
    -------
    TuningResults
        The choices; none where ORT wrote an empty list.

    Raises
    ------
    LedgerError
        If there is no such file, or it holds something else.
    """
    file = Path(folder) / f"tuning_results_{mode}.json"
    try:
        content = json.loads(text_of(file))
    except OSError as error:
        raise LedgerError(
            f"There are no tuning results: {file} cannot be read ({error.strerror}).",
            fix="Train with lab.set(tuning=True, tuning_results_path=...) first; that needs an NVIDIA GPU.",
        ) from None
    except (ValueError, RecursionError) as error:
        raise LedgerError(f"{file} is not JSON.", why=f"{error}.", fix="Delete it and tune again.") from None
    try:
        return checked(TuningResults(str(file), tuple(_operators(content)), _validators(content)))
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise LedgerError(
            f"{file} holds no tuning results.",
            why=f"{type(error).__name__}: {error}.",
            fix="Delete it and tune again.",
        ) from None


def _operators(content: list[dict[str, Any]]) -> list[TunedOperator]:
    return [
        TunedOperator(one["ep"], operator, shape, int(choice))
        for one in content
        for operator, choices in one["results"].items()
        for shape, choice in choices.items()
    ]


def _validators(content: list[dict[str, Any]]) -> dict[str, dict[str, str]]:
    return {one["ep"]: {name: str(value) for name, value in one["validators"].items()} for one in content}
