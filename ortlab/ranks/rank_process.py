"""A process as a rank of its cluster: it joins the process group, does what the notebook asks, leaves a broken group.

The notebook sends functions of this module to ipyparallel's engines. A rank that waits in C++ for one that will not
come answers no message; it is asked with a file to break its connections.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

from ortlab.errors import LedgerError

_REQUEST: Final = "leave-"
"""A file of this name and a number, in the cluster's folder, asks the ranks to break their connections."""

_POLL_SECONDS: Final = 0.2

_following = threading.Lock()
_followed: set[str] = set()


@dataclass(frozen=True)
class Place:
    """Where this process stands among the others."""

    rank: int  # from 0 on
    ranks: int
    backend: str  # "gloo" or "nccl"
    folder: str  # the cluster's, which all of its processes can read


_place: Place | None = None


def place() -> Place | None:
    """Return where this process stands in a notebook's cluster; None if it is no rank of one."""
    return _place


def join(here: Place, threads: int) -> int:
    """Become a rank, and return the process id."""
    # It joins the first process group, follows the notebook's requests, and loads the magics.
    import torch
    from IPython.core.getipython import get_ipython

    global _place  # noqa: PLW0603 - a process is one rank
    _place = here
    # What torchrun sets, too: a script that reads them runs here as it does there.
    os.environ.update(RANK=str(here.rank), LOCAL_RANK=str(here.rank), WORLD_SIZE=str(here.ranks))
    torch.set_num_threads(threads)
    if here.backend == "nccl":
        torch.cuda.set_device(here.rank)
    follow_requests(Path(here.folder), here.backend)
    _enter(here, 0)
    shell: Any = get_ipython()
    hear_interrupts_in(shell)
    shell.run_line_magic("load_ext", "ortlab")
    return os.getpid()


def hear_interrupts_in(shell: Any) -> None:
    """Let SIGINT interrupt the user's code, and nothing around it."""
    # ipykernel has Python's own handler for as long as it handles a message. An interrupt that comes between the user's
    # code and the end of that leaves the event loop, and the process ends, with status 0. Who interrupts ranks asks
    # again where one had not begun its cell.
    namespace = shell.user_global_ns

    def interrupt(_: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_globals is namespace:
                raise KeyboardInterrupt
            frame = frame.f_back

    def hear() -> None:
        signal.signal(signal.SIGINT, interrupt)

    hear()
    shell.kernel.pre_handler_hook = hear  # a cell may have set another
    shell.kernel.post_handler_hook = lambda: None


def renew(group: int) -> None:
    """Leave the process group, whatever state it is in, and enter a new one with all ranks."""
    # `group` is the number of the new one; each is used once.
    import torch.distributed as dist

    if _place is None:
        raise RuntimeError("this process is no rank of a cluster")
    pass_over_requests(Path(_place.folder))
    with contextlib.suppress(Exception):  # a group whose connections are broken may say so
        dist.destroy_process_group()
    _enter(_place, group)


def position() -> int:
    """Return how many collective operations this rank has begun; ranks that differ would never meet again."""
    # Where that cannot be told, the number is negative, and another one on each rank.
    import torch.distributed as dist

    try:
        group: Any = dist.group.WORLD
        return int(group._get_sequence_number_for_group())  # noqa: SLF001 - there is no public one
    except (AttributeError, RuntimeError):
        return -1 - (_place.rank if _place else 0)


def _enter(here: Place, group: int) -> None:
    import torch.distributed as dist

    # A file, not a port: none can be in use.
    store = Path(here.folder) / f"group-{group}"
    dist.init_process_group(
        here.backend, init_method=f"file://{store}", rank=here.rank, world_size=here.ranks
    )


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
    """Return the ledger of the lab of that name, or of the one wrapped last, as plain JSON types."""
    from ortlab.ranks.ledgers import rank_ledger
    from ortlab.records.runs import Ledger
    from ortlab.runs.bench import latest

    lab = latest() if name is None else value(name)
    runs = getattr(lab, "runs", None)
    if not isinstance(runs, Ledger):
        what = "There is no lab" if name is None else f"{name!r} is a {type(lab).__name__}, not a lab,"
        raise LedgerError(
            f"{what} on this rank.", fix="Wrap a model on each: %%ort_ranks, lab = %ort_wrap model."
        )
    return rank_ledger(runs).to_dict()


# ---- a broken group -------------------------------------------------------------------------------------------------


def request_break(folder: Path, number: int, processes: Sequence[int]) -> None:
    """Ask all ranks to break their connections, which they do within some tenths of a second."""
    # The request is a file in the cluster's folder, with the process ids of all ranks. `number` counts requests from 1
    # on; each is followed once.
    written = folder / f"of-{_REQUEST}{number}"
    written.write_text(json.dumps(processes), encoding="utf-8")
    written.rename(folder / f"{_REQUEST}{number}")  # whole when it appears


def follow_requests(folder: Path, backend: str) -> None:
    """Follow requests from now on, in a thread of this rank."""
    threading.Thread(target=_follow, args=(folder, backend), daemon=True, name="ortlab-rank").start()


def pass_over_requests(folder: Path) -> None:
    """Count the requests made so far as followed, once one that is being followed is over."""
    # A rank that came back by itself may not have looked yet, and would break the connections of its next group.
    with _following:
        _followed.update(request.name for request in folder.glob(f"{_REQUEST}*"))


def _follow(folder: Path, backend: str) -> None:
    while True:
        for request in sorted(folder.glob(f"{_REQUEST}*")):
            with _following:
                if request.name not in _followed:
                    _followed.add(request.name)
                    with contextlib.suppress(Exception):  # the next look must come, whatever a file holds
                        _break(backend, json.loads(request.read_text(encoding="utf-8")))
        time.sleep(_POLL_SECONDS)


def _break(backend: str, processes: list[int]) -> None:
    """Let every collective operation that waits for another rank fail at once."""
    # NCCL's can be aborted. gloo's `abort` does nothing in torch 2.4 to 2.13, and its timeout is half an hour; but it
    # gives up when the connection to a peer ends, so the connections between the ranks are shut down.
    import psutil
    import torch.distributed as dist

    if backend == "nccl":
        group: Any = dist.group.WORLD
        group.abort()
        return
    theirs = set()
    for pid in processes:
        if pid != os.getpid():
            with contextlib.suppress(psutil.Error):
                theirs |= {(one.laddr, one.raddr) for one in _connections(psutil.Process(pid))}
    for one in _connections(psutil.Process()):
        if one.raddr and (one.raddr, one.laddr) in theirs:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(one.fd)) as connection:
                connection.shutdown(socket.SHUT_RDWR)


def _connections(process: Any) -> list[Any]:
    """List TCP connections of a process; psutil renamed the method in its release 6."""
    method = getattr(process, "net_connections", None) or process.connections
    return list(method("tcp"))
