"""What runs inside each process of a cluster: it joins the process group, leaves it on request, ends with the notebook.

The processes import this module; functions that the notebook sends are called from ipyparallel's engine.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

POLL_SECONDS: Final = 0.2
"""How often a rank looks whether the notebook lives and whether it shall leave its group."""

LEAVE: Final = "leave-"
"""A file of this name and a number, in the cluster's folder, asks the ranks to break their connections."""


STARTED: Final = "started.json"
"""File in the cluster's folder with id and start time of each process that the notebook started."""


@dataclass(frozen=True)
class Place:
    """Where this process stands among the others.

    Attributes
    ----------
    rank, ranks
        Its number, from 0 on, and how many there are.
    backend
        "gloo" or "nccl".
    folder
        The cluster's folder, which all of its processes can read.
    """

    rank: int
    ranks: int
    backend: str
    folder: str


_place: Place | None = None


def place() -> Place | None:
    """Return where this process stands in a notebook's cluster; None if it is no rank of one."""
    return _place


def join(here: Place, threads: int, parent: int) -> int:
    """Become a rank: join the first process group, watch the notebook's process, and load the magics.

    Parameters
    ----------
    here
        Which rank.
    threads
        How many threads PyTorch computes with.
    parent
        Id of the notebook's process.

    Returns
    -------
    int
        Id of this process.
    """
    import torch
    from IPython.core.getipython import get_ipython

    global _place  # noqa: PLW0603 - a process is one rank
    _place = here
    # What torchrun sets, too: a script that reads them runs here as it does there.
    os.environ.update(RANK=str(here.rank), LOCAL_RANK=str(here.rank), WORLD_SIZE=str(here.ranks))
    torch.set_num_threads(threads)
    if here.backend == "nccl":
        torch.cuda.set_device(here.rank)
    threading.Thread(target=_watch, args=(here, parent), daemon=True, name="ortlab-rank").start()
    _enter(here, 0)
    shell: Any = get_ipython()
    shell.run_line_magic("load_ext", "ortlab")
    return os.getpid()


def renew(group: int) -> None:
    """Leave the process group, whatever state it is in, and enter a new one with all ranks.

    Parameters
    ----------
    group
        Number of the new one; each is used once.
    """
    import torch.distributed as dist

    if _place is None:
        raise RuntimeError("this process is no rank of a cluster")
    with contextlib.suppress(Exception):  # a group whose connections are broken may say so
        dist.destroy_process_group()
    _enter(_place, group)


def position() -> int:
    """Return how many collective operations this rank has begun; ranks that differ would never meet again.

    Returns
    -------
    int
        The count; a negative number, another on each rank, where it cannot be told.
    """
    import torch.distributed as dist

    try:
        group: Any = dist.group.WORLD
        return int(group._get_sequence_number_for_group())  # noqa: SLF001 - there is no public one
    except (AttributeError, RuntimeError):
        return -1 - (_place.rank if _place else 0)


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
    from ortlab.lab import Lab
    from ortlab.ranks.rank_ledger import rank_ledger
    from ortlab.wrapped import latest

    lab = latest() if name is None else value(name)
    if not isinstance(lab, Lab):
        what = "There is no lab" if name is None else f"{name!r} is a {type(lab).__name__}, not a lab,"
        raise LedgerError(
            f"{what} on this rank.", fix="Wrap a model on each: %%ort_ranks, lab = %ort_wrap model."
        )
    return rank_ledger(lab.runs).to_dict()


def _enter(here: Place, group: int) -> None:
    import torch.distributed as dist

    store = Path(here.folder) / f"group-{group}"
    dist.init_process_group(
        here.backend, init_method=f"file://{store}", rank=here.rank, world_size=here.ranks
    )


def _watch(here: Place, parent: int) -> None:
    """End this process soon after the notebook's, and break its connections when a file asks for it."""
    import psutil

    try:
        watched = psutil.Process(parent)
        started = watched.create_time()
    except psutil.NoSuchProcess:
        watched = None
    done: set[str] = set()
    while watched is not None and _lives(watched, started):
        for request in sorted(Path(here.folder).glob(f"{LEAVE}*")):
            if request.name not in done:
                done.add(request.name)
                with contextlib.suppress(Exception):  # the next look must come, whatever a file holds
                    _break_connections(here.backend, json.loads(request.read_text(encoding="utf-8")))
        time.sleep(POLL_SECONDS)
    _end_others(Path(here.folder))
    os.kill(os.getpid(), signal.SIGKILL)


def _lives(process: Any, started: float) -> bool:
    import psutil

    try:
        return bool(process.create_time() == started and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _end_others(folder: Path) -> None:
    """End what the notebook started besides the ranks: ipyparallel's controller outlives a kernel that is killed."""
    import psutil

    with contextlib.suppress(OSError, ValueError):
        for pid, started in json.loads((folder / STARTED).read_text(encoding="utf-8")):
            with contextlib.suppress(psutil.Error):
                one = psutil.Process(pid)
                if one.create_time() == started and pid != os.getpid():
                    one.terminate()
    shutil.rmtree(folder, ignore_errors=True)


def _break_connections(backend: str, ranks: list[int]) -> None:
    """Let every collective operation that waits for another rank fail at once.

    NCCL's can be aborted. gloo's `abort` does nothing in torch 2.4 to 2.13, and its timeout is half an hour; but it
    gives up when the connection to a peer ends, so the connections between the ranks are shut down.

    Parameters
    ----------
    backend
        "gloo" or "nccl".
    ranks
        Process ids of all ranks.
    """
    import psutil
    import torch.distributed as dist

    if backend == "nccl":
        group: Any = dist.group.WORLD
        group.abort()
        return
    theirs = set()
    for pid in ranks:
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
