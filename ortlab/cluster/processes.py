"""The processes of a cluster as the notebook holds them: ipyparallel's controller and engines, started and ended."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ortlab.cluster.member import LEAVE, STARTED, Place, join, renew
from ortlab.errors import ExecutionError, InstallError

START_SECONDS: Final = 180
"""How long engines may take to start; on a busy machine Python and torch alone take many seconds."""

_END_SECONDS: Final = 15
_RANK_SECONDS: Final = 3
_POLL_SECONDS: Final = 0.1
_LOG_LINES: Final = 12


@dataclass(frozen=True)
class Lost:
    """A rank that has ended though nobody asked it to.

    Attributes
    ----------
    rank, process
        Which, and the id of its process.
    how
        "was killed by signal 9", "ended with status 1", or "has ended" where that is not known.
    """

    rank: int
    process: int
    how: str


class Processes:
    """What has to be ended: the controller, the engines, and what they started.

    Parameters
    ----------
    ranks
        How many engines.
    threads
        Threads that each computes with.
    backend
        "gloo" or "nccl".

    Attributes
    ----------
    ranks
        Process ids, by rank.

    Raises
    ------
    InstallError
        If ipyparallel is missing.
    ExecutionError
        If the engines do not start; the end of their log is in it.
    """

    def __init__(self, ranks: int, threads: int, backend: str) -> None:
        try:
            import ipyparallel

            from ortlab.cluster.client import QuietClient
        except ImportError as error:
            raise InstallError(
                "ipyparallel is missing.", why=str(error), fix="pip install ipyparallel"
            ) from error
        self._temporary = tempfile.TemporaryDirectory(prefix="ortlab-cluster-", ignore_cleanup_errors=True)
        self.folder = Path(self._temporary.name)
        self._cluster = ipyparallel.Cluster(
            n=ranks,
            profile_dir=str(self.folder / "profile"),
            cluster_id=f"ortlab-{os.getpid()}-{id(self):x}",
            log_level=logging.CRITICAL,
            engine_timeout=START_SECONDS,
            controller_ip="127.0.0.1",  # the port is one that is free
        )
        self.client: Any = None
        self._started: list[Any] = []
        self._engines: dict[int, Any] = {}
        self._groups = 0
        self._requests = 0
        self.ranks: tuple[int, ...] = ()
        before = _children()
        try:
            with _environment({"OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": _loopback()}):
                self._cluster.start_cluster_sync()
            for engines in self._cluster.engines.values():
                self._engines |= {one.pid: one.process for one in engines.launchers.values()}
            self._note_started(before)
            self.client = QuietClient(
                profile_dir=self._cluster.profile_dir,
                cluster_id=self._cluster.cluster_id,
                cluster=self._cluster,
                timeout=START_SECONDS,
            )
            # Its progress bar would stay in the output of the cell.
            self.client.wait_for_engines(ranks, timeout=START_SECONDS, interactive=False)
            self._note_started(before)
            joined = [
                self.client[rank].apply_async(
                    join, Place(rank, ranks, backend, str(self.folder)), threads, os.getpid()
                )
                for rank in range(ranks)
            ]
            self.ranks = tuple(one.get(START_SECONDS) for one in joined)
        except BaseException as error:
            self._note_started(before)
            log = self._log_end()
            self.end()
            if not isinstance(error, Exception):
                raise
            raise ExecutionError(
                f"The {ranks} processes of the cluster did not start.",
                why=f"{type(error).__name__}: {error}" + (f"\nThe end of their log:\n{log}" if log else ""),
                fix="Mend what the log names, or try fewer ranks: the machine may be short of memory.",
            ) from error

    def lost(self) -> Lost | None:
        """Look whether a rank has ended; None if all live."""
        import psutil

        for rank, pid in enumerate(self.ranks):
            try:
                lives = psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
            except psutil.NoSuchProcess:
                lives = False
            if not lives:
                return Lost(rank, pid, self._how(pid))
        return None

    def interrupt(self, ranks: list[int]) -> None:
        """Send ranks a SIGINT, as Ctrl-C does; one that runs nothing ignores it."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.ranks[rank], signal.SIGINT)

    def break_connections(self) -> None:
        """Let every collective operation that waits for another rank fail, within some tenths of a second."""
        self._requests += 1
        name = f"{LEAVE}{self._requests}"
        written = self.folder / f"of-{name}"
        written.write_text(json.dumps(self.ranks), encoding="utf-8")
        written.rename(self.folder / name)  # whole when it appears

    def renew_group(self) -> None:
        """Put all ranks into a new process group.

        Raises
        ------
        Exception
            Whatever ipyparallel raises if a rank does not come.
        """
        self._groups += 1
        pending = [self.client[rank].apply_async(renew, self._groups) for rank in range(len(self.ranks))]
        for one in pending:
            one.get(START_SECONDS)

    def end(self) -> None:
        """End what was started, whatever state it is in; only processes that were started here."""
        with contextlib.suppress(Exception):  # nothing may keep the processes from being ended below
            if self.client is not None:
                self.client.close(linger=0)
        # The ranks first: one that computes, or waits for another, does not hear a SIGTERM.
        engines = [one for one in self._started if one.pid in self._engines]
        _end(engines, _RANK_SECONDS)
        with contextlib.suppress(Exception):
            self._cluster.stop_cluster_sync()
        _end(self._started, _END_SECONDS)
        self._started = []
        self._temporary.cleanup()

    def _note_started(self, before: list[Any]) -> None:
        """Write down what was started, for the ranks: where the kernel is killed, they end it."""
        import psutil

        known = {one.pid for one in self._started}
        self._started += [one for one in _children() if one not in before and one.pid not in known]
        listed = []
        for one in self._started:
            with contextlib.suppress(psutil.Error):
                listed.append([one.pid, one.create_time()])
        (self.folder / STARTED).write_text(json.dumps(listed), encoding="utf-8")

    def _how(self, pid: int) -> str:
        """Say how an engine has ended; ipyparallel waits for each in a thread, and its process keeps the status."""
        import psutil

        deadline = time.monotonic() + _RANK_SECONDS
        code = None
        while code is None and pid in self._engines and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)  # whoever asks first gets the status, and that is to be the thread
            with contextlib.suppress(psutil.Error):
                code = None if psutil.pid_exists(pid) else self._engines[pid].wait(timeout=0)
        if code is None:
            return "has ended"
        return f"was killed by signal {-int(code)}" if code < 0 else f"ended with status {int(code)}"

    def _log_end(self) -> str:
        """Return the last lines that the controller and the engines wrote."""
        found = []
        for file in sorted((self.folder / "profile" / "log").glob("*")):
            with contextlib.suppress(OSError):
                lines = file.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
                found += [f"  {line}" for line in lines if line.strip()]
        return "\n".join(found[-3 * _LOG_LINES :])


def _end(processes: list[Any], seconds: float) -> None:
    """Ask processes to end, and kill those that have not after a time."""
    import psutil

    for one in processes:
        with contextlib.suppress(psutil.Error):
            one.terminate()
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    for one in alive:
        with contextlib.suppress(psutil.Error):
            one.kill()
    psutil.wait_procs(alive, timeout=_END_SECONDS)


def _children() -> list[Any]:
    import psutil

    return list(psutil.Process().children(recursive=True))


def _loopback() -> str:
    return "lo" if sys.platform == "linux" else "lo0"


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
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
