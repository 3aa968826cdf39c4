"""What a user asks of a search, read and checked before anything runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ortlab.errors import LedgerError, OptionError
from ortlab.memory.sizes import read_size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ortlab.studies.batch_size_search import BatchSizeSearch


def read_sizes(sizes: object) -> tuple[int, ...] | None:
    """Read the batch sizes that a user names, and put them in order; None stays None.

    Raises
    ------
    OptionError
        If they are no whole numbers from 1 on, or there are none.
    """
    if sizes is None:
        return None
    fix = "sizes=[8, 16, 32], or leave it out for powers of two from 1."
    given = list(sizes) if isinstance(sizes, Iterable) and not isinstance(sizes, (str, bytes)) else [sizes]
    read: set[int] = set()
    for size in given:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise OptionError(f"A batch size must be a whole number from 1 on, not {size!r}.", fix=fix)
        read.add(size)
    if not read:
        raise OptionError("There are no batch sizes to try.", fix=fix)
    return tuple(sorted(read))


def read_limit(limit: object, device: object) -> int:
    """Read the limit of a search, of step memory or of a whole device, in bytes.

    Raises
    ------
    OptionError
        If it is both or neither, no size, or a percentage.
    """
    fix = 'lab.find_batch_size(make_batch, limit="6 GiB") of step memory, or device="8 GiB" of all of it.'
    if limit is None and device is None:
        raise OptionError("A search needs a limit of memory.", fix=fix)
    if limit is not None and device is not None:
        raise OptionError("A search has one limit: of step memory, or of the whole device.", fix=fix)
    asked = limit if device is None else device
    if isinstance(asked, str) and "%" in asked:
        raise OptionError(
            f"The limit is {asked.strip()!r}.",
            why="A percentage is of what one step needs; a search changes the batch, and with it what a step needs.",
            fix=fix,
        )
    return read_size(asked)


def check_above_floor(limit_bytes: int, used_bytes: int, device: str) -> None:
    """Refuse a limit below what is in use before any step.

    Raises
    ------
    OptionError
        If no batch can fit under the limit.
    """
    if limit_bytes > used_bytes:
        return
    what = "The process, with Python, libraries and weights," if device == "cpu" else f"Torch on {device}"
    raise OptionError(
        f"The limit of {limit_bytes:,} bytes is below what is in use before any step.",
        why=f"{what} takes {used_bytes:,} bytes already.",
        fix='Give more, or limit what a step needs above that: lab.find_batch_size(make_batch, limit="6 GiB").',
    )


def check_resumable(
    search: BatchSizeSearch, start_digest: str, versions: Mapping[str, str], engine: str
) -> None:
    """Refuse to go on with a search whose other points would not be comparable.

    Raises
    ------
    LedgerError
        If the start, the engine or an installed version is another.
    """
    other = [name for name, version in search.versions.items() if versions.get(name) != version]
    why = ""
    if search.start_digest != start_digest:
        why = f"Its points start from {search.start_digest}, and the lab stands at {start_digest} (digests of weights, "
        why += "buffers, optimizer and random state)."
    elif search.engine != engine:
        why = f"Its points were executed by {search.engine}, and the lab is set to {engine}."
    elif other:
        why = f"It was made with other versions of {', '.join(other)}."
    if why:
        raise LedgerError(
            "This search cannot be resumed here.",
            why=why,
            fix="Start another: lab.find_batch_size(make_batch, limit=...).",
        )
