"""The connections between ranks, which are broken where a rank waits in C++ for one that will not come.

The notebook asks for it with a file, since such a rank answers no message.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

_REQUEST: Final = "leave-"
"""A file of this name and a number, in the cluster's folder, asks the ranks to break their connections."""

_POLL_SECONDS: Final = 0.2

_following = threading.Lock()
_followed: set[str] = set()


def request_break(folder: Path, number: int, processes: Sequence[int]) -> None:
    """Ask all ranks to break their connections, which they do within some tenths of a second.

    The request is a file in the cluster's folder, with the process ids of all ranks. `number` counts requests from 1
    on; each is followed once.
    """
    written = folder / f"of-{_REQUEST}{number}"
    written.write_text(json.dumps(processes), encoding="utf-8")
    written.rename(folder / f"{_REQUEST}{number}")  # whole when it appears


def follow_requests(folder: Path, backend: str) -> None:
    """Follow requests from now on, in a thread of this rank."""
    threading.Thread(target=_follow, args=(folder, backend), daemon=True, name="ortlab-rank").start()


def pass_over_requests(folder: Path) -> None:
    """Count the requests made so far as followed, once one that is being followed is over.

    A rank that came back by itself may not have looked yet, and would break the connections of its next group.
    """
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
    """Let every collective operation that waits for another rank fail at once.

    NCCL's can be aborted. gloo's `abort` does nothing in torch 2.4 to 2.13, and its timeout is half an hour; but it
    gives up when the connection to a peer ends, so the connections between the ranks are shut down.
    """
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
