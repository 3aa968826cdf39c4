"""What a bisection is asked for: the baseline, and the changes that may be responsible."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from ortlab.errors import LedgerError, OptionError
from ortlab.options.options import Need, Options, check_needs, declaration

if TYPE_CHECKING:
    from ortlab.options.configuration import Configuration
    from ortlab.options.switches import Value
    from ortlab.studies.bisection import Bisection


def read_changes(
    present: Configuration,
    changes: Mapping[str, object] | None,
    against: Mapping[str, object] | None,
    have: Collection[Need],
) -> tuple[Options, dict[str, Value]]:
    """Return the baseline's switches, and what differs from them.

    Parameters
    ----------
    present
        The lab's configuration.
    changes
        What may be responsible; the baseline is `present`.
    against
        The baseline as changes of `present`, which is then what may be responsible; None, without `changes`, for the
        defaults.
    have
        What is present: `ortlab.engine.installation.have()`.

    Returns
    -------
    baseline : Options
        Its switches.
    changes : dict
        Values by option, those that act latest first: what is tried first then needs no new export.

    Raises
    ------
    OptionError
        If both are given, neither is a dict, an option is unknown, a value is wrong or cannot act here, or nothing
        differs.
    """
    for given, word in ((changes, "changes"), (against, "against")):
        if given is not None and not isinstance(given, Mapping):
            raise OptionError(
                f"{word} is a dict of values by option, not {given!r}.",
                fix='For example lab.bisect("loss", changes={"memory_level": 1}).',
            )
        if given is not None and "engine" in given:
            raise OptionError(
                "The engine is no switch of ONNX Runtime.",
                fix='To hold ONNX Runtime against PyTorch: lab.bisect("parity").',
            )
    if changes is not None and against is not None:
        raise OptionError(
            "changes and against do not go together.",
            why="With changes, the baseline is the lab as it is set.",
            fix="Leave one of the two out.",
        )
    base = whole = present.options
    if changes is not None:
        whole = present.changed(changes, have).options
    elif against is not None:
        base = present.changed(against, have).options
    else:
        base = _defaults(present.options)
    check_needs(base, have)
    names = sorted(whole.changed(base), key=lambda name: -declaration(name).effect)
    if not names:
        raise OptionError(
            "Nothing differs from the baseline, so there is nothing responsible.",
            why="" if changes or against else "All switches stand at their defaults.",
            fix='Name suspects: lab.bisect("loss", changes={"memory_level": 1, "aten_backward": False}).',
        )
    return base, {name: getattr(whole, name) for name in names}


def check_resumable(bisection: Bisection, start_digest: str, present: Mapping[str, str]) -> None:
    """Refuse to go on with a bisection whose other trials would not be comparable.

    Raises
    ------
    LedgerError
        If it is finished, the start is another, or other versions are installed.
    """
    from ortlab.studies.bisection import UNFINISHED

    if bisection.outcome != UNFINISHED:
        raise LedgerError("There is nothing to resume: this bisection is finished.", fix="Start another.")
    if bisection.start_digest != start_digest:
        raise LedgerError(
            "This bisection cannot be resumed here: it started from another point.",
            fix="Run the same step from the same weights and seed first, or start another.",
        )
    other = [name for name, version in bisection.versions.items() if present.get(name) != version]
    if other:
        raise LedgerError(
            f"This bisection cannot be resumed here: {', '.join(other)} had other versions.",
            fix="Resume it in the environment it was made in, or start another.",
        )


def _defaults(present: Options) -> Options:
    """Return the defaults, but for where files go: that is no switch to be tried."""
    kept = {name: getattr(present, name) for name in ("export_cache_dir",)}
    return dataclasses.replace(Options(), **kept)
