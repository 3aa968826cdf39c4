"""What all studies of many runs share: the lab keeps one from its first run on, and a later call goes on with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol, TypeVar

from ortlab import units
from ortlab.errors import LedgerError, StepError
from ortlab.runs.interrupts import say


class Study(Protocol):
    """A sweep, a bisection or a search for a batch size."""

    number: int
    start_digest: str


S = TypeVar("S", bound=Study)


@contextmanager
def kept(
    studies: list[S],
    study: S,
    place: str,
    stopped: Callable[[], str],
    go_on: str,
    *,
    is_empty: Callable[[], bool] = lambda: False,
) -> Iterator[None]:
    """Keep a study in the lab's list while the block fills it in; after an error, a study that is empty goes."""
    # `place` is what the user calls the list; a study that is new to it takes the number of its place. On Ctrl-C the
    # study stays, and a line says what is left: `stopped` tells what, "the sweep after 2 of 8 runs", and `go_on` how to
    # resume it, "go on with lab.sweep(resume={})", where the braces are the study's place.
    if all(study is not known for known in studies):
        study.number = len(studies) + 1
        studies.append(study)
    position = next(index for index, known in enumerate(studies) if known is study)
    name = f"{place}[{position}]"
    try:
        yield
    except KeyboardInterrupt as interrupt:
        words = f"Stopped {stopped()}; kept as {name}. The lab is as it was before; {go_on.format(name)}."
        say(interrupt, words)
        raise
    except BaseException:
        if is_empty():
            del studies[position]
        raise


def check_same_ground(
    study: Study, what: str, start_digest: str, made_with: Mapping[str, str], present: Mapping[str, str]
) -> None:
    """Raise LedgerError if a study has another start or other versions: its runs would not be comparable."""
    # `what` is what the user calls the study: "sweep". `start_digest` is of the start of the lab's last step call.
    if study.start_digest != start_digest:
        raise LedgerError(
            f"This {what} cannot be resumed here: it started from another point.",
            why=f"Its runs start from {study.start_digest}, and the lab now from {start_digest} (digests of weights, "
            "buffers, optimizer and random state).",
            fix="Go back to its start first, the same weights, optimizer and seed (lab.restore(), or load them), or "
            f"start another {what}.",
        )
    if other := [name for name, version in made_with.items() if present.get(name) != version]:
        raise LedgerError(
            f"This {what} cannot be resumed here: {', '.join(other)} had other versions.",
            why="Differences between two versions in one table would be taken for effects of the switches.",
            fix=f"Resume it in the environment it was made in, or start another {what}.",
        )


def check_rounds(rounds: object, least: int) -> None:
    """Raise StepError for a number of rounds that is no whole number from `least` on."""
    if not units.is_whole(rounds, least):
        raise StepError(f"The number of rounds must be a whole number from {least} on, not {rounds!r}.")
