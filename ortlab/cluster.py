"""Processes that train together, started from a notebook: ipyparallel engines in one gloo process group."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from ortlab.errors import ExecutionError, InstallError, OptionError

START_SECONDS: Final = 120
"""How long engines may take to start; on a busy machine Python alone takes seconds."""

_END_SECONDS: Final = 15


class Cluster:
    """Some processes on this machine, each a rank of a `torch.distributed` group over gloo.

    Use it in a `with` statement, or call `start` and `stop`. The processes end with it; with the interpreter; and,
    where the interpreter is killed, by themselves.

    Parameters
    ----------
    ranks
        How many.
    threads
        Threads that each computes with; by default the machine's cores, divided among them.

    Raises
    ------
    OptionError
        If `ranks` is no whole number above 0.

    Examples
    --------
    >>> with Cluster(2) as cluster:
    ...     cluster.run(train, epochs=3)  # a list: what each rank returned
    """

    def __init__(self, ranks: int, *, threads: int | None = None) -> None:
        if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
            raise OptionError(
                f"A cluster of {ranks!r} ranks.", fix="Give a whole number above 0: Cluster(2)."
            )
        self.ranks = ranks
        self.threads = threads or max(1, (os.cpu_count() or 1) // ranks)
        self._held: _Processes | None = None
        self._end: weakref.finalize[[_Processes], Cluster] | None = None

    @property
    def running(self) -> bool:
        """Whether the processes are there."""
        return self._held is not None

    @property
    def processes(self) -> tuple[int, ...]:
        """Process ids, by rank; empty if it is not running."""
        return self._held.ranks if self._held else ()

    def start(self) -> Cluster:
        """Start the processes and let them find each other; does nothing if they run.

        Raises
        ------
        InstallError
            If ipyparallel is missing.
        ExecutionError
            If they do not start.
        """
        if self._held is None:
            self._held = _Processes(self.ranks, self.threads)
            self._end = weakref.finalize(self, _Processes.end, self._held)
        return self

    def stop(self) -> None:
        """End the processes, and wait until they have ended; does nothing if none run."""
        if self._end is not None:
            self._end()
        self._held = self._end = None

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call a function on every rank at the same time.

        Parameters
        ----------
        function
            Runs in the other processes: it imports what it needs itself. `torch.distributed` is set up there.
        *args, **kwargs
            What it is called with, on each rank the same.

        Returns
        -------
        list
            What it returned, by rank.

        Raises
        ------
        ExecutionError
            If it raises on a rank, or the cluster does not run. The others are ended then: they would wait forever.
        KeyboardInterrupt
            If the user interrupts; the processes are ended.
        """
        if self._held is None:
            raise ExecutionError("The cluster does not run.", fix="with Cluster(2) as cluster: ...")
        try:
            return self._held.call(function, args, kwargs)
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> Cluster:  # noqa: PYI034 - Self needs Python 3.11
        """Start."""
        return self.start()

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self.stop()

    def __repr__(self) -> str:
        """Show how many ranks there are and whether they run."""
        return f"Cluster({self.ranks}, {'running' if self.running else 'not running'})"


class _Processes:
    """What has to be ended: ipyparallel's controller and its engines."""

    def __init__(self, ranks: int, threads: int) -> None:
        try:
            import ipyparallel
        except ImportError as error:
            raise InstallError(
                "ipyparallel is missing.", why=str(error), fix="pip install ipyparallel"
            ) from error
        self._folder = tempfile.TemporaryDirectory(prefix="ortlab-cluster-")
        environment = {"OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": _loopback()}
        self._cluster = ipyparallel.Cluster(
            n=ranks,
            profile_dir=str(Path(self._folder.name) / "profile"),
            cluster_id=f"ortlab-{os.getpid()}-{id(self):x}",
            log_level=logging.ERROR,
            engine_timeout=START_SECONDS,
            controller_ip="127.0.0.1",
        )
        self._client: Any = None
        self._all: list[Any] = []
        self.ranks: tuple[int, ...] = ()
        before = _children()
        try:
            with _environment(environment):
                self._cluster.start_cluster_sync()
                self._client = self._cluster.connect_client_sync()
                # Its progress bar would stay in the output of the cell.
                self._client.wait_for_engines(ranks, timeout=START_SECONDS, interactive=False)
            view = self._client[:]
            view.block = True
            self._all = [one for one in _children() if one not in before]
            store = str(Path(self._folder.name) / "store")
            joined = [
                self._client[rank].apply_async(_join, rank, ranks, store, threads, os.getpid())
                for rank in range(ranks)
            ]
            self.ranks = tuple(one.get(START_SECONDS) for one in joined)
        except Exception as error:
            self._all = [one for one in _children() if one not in before]
            self.end()
            raise ExecutionError(
                f"The {ranks} processes of the cluster did not start.",
                why=f"{type(error).__name__}: {error}",
                fix="Try fewer ranks; the machine may be short of memory or of open ports.",
            ) from error
        except BaseException:
            self._all = [one for one in _children() if one not in before]
            self.end()
            raise

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        import ipyparallel

        pending = [
            self._client[rank].apply_async(function, *args, **kwargs) for rank in range(len(self.ranks))
        ]
        waiting = dict(enumerate(pending))
        while waiting:
            for rank, one in list(waiting.items()):
                one.wait(0.05)
                if one.ready():
                    del waiting[rank]
                    if not one.successful():
                        cause = one.exception()
                        raise ExecutionError(
                            f"Rank {rank} failed, and the cluster was stopped: the other ranks wait for it.",
                            why=f"{getattr(cause, 'ename', type(cause).__name__)}: "
                            f"{getattr(cause, 'evalue', cause)}",
                            fix="Mend the function that the ranks run, and start the cluster again.",
                        ) from (cause if isinstance(cause, ipyparallel.RemoteError) else None)
        return [one.get() for one in pending]

    def end(self) -> None:
        """End what was started, whatever state it is in; only processes that were started here."""
        import psutil

        with contextlib.suppress(Exception):  # nothing may keep the processes from being ended below
            if self._client is not None:
                self._client.close(linger=0)
        with contextlib.suppress(Exception):
            self._cluster.stop_cluster_sync()
        for one in self._all:
            with contextlib.suppress(psutil.Error):
                one.terminate()
        _, alive = psutil.wait_procs(self._all, timeout=_END_SECONDS)
        for one in alive:
            with contextlib.suppress(psutil.Error):
                one.kill()
        psutil.wait_procs(alive, timeout=_END_SECONDS)
        self._all = []
        self._folder.cleanup()


def _join(rank: int, ranks: int, store: str, threads: int, parent: int) -> int:
    """Join the process group, and watch the notebook's process; runs in an engine, which imports this module."""
    import torch
    import torch.distributed as dist

    from ortlab.cluster import _end_with

    torch.set_num_threads(threads)
    _end_with(parent)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    return os.getpid()


def _end_with(parent: int) -> None:
    """End this process soon after another one has ended: ipyparallel's engines outlive a kernel that is killed."""
    import threading
    import time

    import psutil

    def watch() -> None:
        watched = psutil.Process(parent)
        controllers = [one for one in watched.children(recursive=True) if one.pid != os.getpid()]
        while watched.is_running():
            time.sleep(1)
        for one in controllers:
            with contextlib.suppress(psutil.Error):
                if "ipyparallel" in " ".join(one.cmdline()):
                    one.terminate()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="ortlab-parent").start()


def _children() -> list[Any]:
    import psutil

    return list(psutil.Process().children(recursive=True))


def _loopback() -> str:
    return "lo" if sys.platform == "linux" else "lo0"


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Any:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
