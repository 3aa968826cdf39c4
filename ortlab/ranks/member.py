"""A process as a rank of its cluster: it joins the process group, and moves to a new one where that broke.

The notebook sends these functions to ipyparallel's engines.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ortlab.ranks.connections import follow_requests, pass_over_requests


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
    """Become a rank, and return the process id.

    It joins the first process group, follows the notebook's requests, and loads the magics.
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
    follow_requests(Path(here.folder), here.backend)
    _enter(here, 0)
    shell: Any = get_ipython()
    shell.run_line_magic("load_ext", "ortlab")
    return os.getpid()


def renew(group: int) -> None:
    """Leave the process group, whatever state it is in, and enter a new one with all ranks.

    `group` is the number of the new one; each is used once.
    """
    import torch.distributed as dist

    if _place is None:
        raise RuntimeError("this process is no rank of a cluster")
    pass_over_requests(Path(_place.folder))
    with contextlib.suppress(Exception):  # a group whose connections are broken may say so
        dist.destroy_process_group()
    _enter(_place, group)


def position() -> int:
    """Return how many collective operations this rank has begun; ranks that differ would never meet again.

    Where that cannot be told, the number is negative, and another one on each rank.
    """
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
