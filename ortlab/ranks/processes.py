"""The processes of a cluster as the notebook holds them: ipyparallel's controller and engines, started and ended."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from ortlab.errors import ExecutionError, InstallError
from ortlab.ranks import guard
from ortlab.ranks.cluster_loss import Lost, how_ended, lives
from ortlab.ranks.connections import request_break
from ortlab.ranks.member import Place, join, renew

_KILL_SECONDS: Final = 15.0

START_SECONDS: Final = 180
"""How long engines may take to start; on a busy machine Python and torch alone take many seconds."""

_END_SECONDS: Final = 15

_RANK_SECONDS: Final = 3

_POLL_SECONDS: Final = 0.1

_LOG_LINES: Final = 12


class Processes:
    """What has to be ended: the controller, the engines, and what they started.

    Raises InstallError where ipyparallel is missing, and ExecutionError, with the end of their log, where the engines
    do not start.
    """

    def __init__(self, ranks: int, threads: int, backend: str) -> None:
        try:
            import ipyparallel

            from ortlab.ranks.client import QuietClient
        except ImportError as error:
            raise InstallError(
                "ipyparallel is missing.", why=str(error), fix="pip install ipyparallel"
            ) from error
        self._temporary = tempfile.TemporaryDirectory(prefix="ortlab-cluster-", ignore_cleanup_errors=True)
        self._folder = Path(self._temporary.name)
        self._cluster = ipyparallel.Cluster(
            n=ranks,
            profile_dir=str(self._folder / "profile"),
            cluster_id=f"ortlab-{os.getpid()}-{id(self):x}",
            log_level=logging.CRITICAL,
            engine_timeout=START_SECONDS,
            controller_ip="127.0.0.1",  # the port is one that is free
            config=_guarded(),
        )
        self.client: Any = None  # ipyparallel's; `client[rank]` is what a rank is asked through
        self._engines: dict[int, Any] = {}
        self._groups = 0
        self._requests = 0
        self.ranks: tuple[int, ...] = ()  # process ids, by rank
        whose = guard.variables(self._folder)
        self._started = Started(whose)
        try:
            with _environment({**whose, "OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": _loopback()}):
                self._cluster.start_cluster_sync()
            for engines in self._cluster.engines.values():
                self._engines |= {one.pid: one.process for one in engines.launchers.values()}
            self.client = QuietClient(
                profile_dir=self._cluster.profile_dir,
                cluster_id=self._cluster.cluster_id,
                cluster=self._cluster,
                timeout=START_SECONDS,
            )
            self._wait(lambda: len(self.client.ids) >= ranks)
            self._started.note()
            places = [Place(rank, ranks, backend, str(self._folder)) for rank in range(ranks)]
            joined = [self.client[place.rank].apply_async(join, place, threads) for place in places]
            self._wait(lambda: all(one.ready() for one in joined))
            self.ranks = tuple(one.get() for one in joined)
        except BaseException as error:
            log = self._log_end()
            self.end()
            if not isinstance(error, Exception):
                raise
            raise ExecutionError(
                f"The {ranks} processes of the cluster did not start.",
                why=f"{type(error).__name__}: {error}" + (f"\nThe end of their log:\n{log}" if log else ""),
                fix="Mend what the log names, or try fewer ranks: the machine may be short of memory.",
            ) from error

    def lost(self, when: str) -> Lost | None:
        """Return the first rank that has ended, None if all live; `when` is "while it ran" or "between two calls"."""
        for rank, pid in enumerate(self.ranks):
            if not lives(pid):
                return Lost(rank, pid, how_ended(self._engines[pid]), when, len(self.ranks))
        return None

    def interrupt(self, ranks: list[int]) -> None:
        """Send ranks a SIGINT, as Ctrl-C does; one that runs nothing ignores it."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.ranks[rank], signal.SIGINT)

    def break_connections(self) -> None:
        """Let every collective operation that waits for another rank fail, within some tenths of a second."""
        self._requests += 1
        request_break(self._folder, self._requests, self.ranks)

    def renew_group(self) -> None:
        """Put all ranks into a new process group; raise whatever ipyparallel raises where a rank does not come."""
        self._groups += 1
        pending = [self.client[rank].apply_async(renew, self._groups) for rank in range(len(self.ranks))]
        for one in pending:
            one.get(START_SECONDS)

    def end(self) -> None:
        """End what was started, whatever state it is in; only processes that were started here."""
        self._started.note()
        with contextlib.suppress(Exception):  # nothing may keep the processes from being ended below
            if self.client is not None:
                self.client.close(linger=0)
        # The ranks first: one that computes, or waits for another, does not hear a SIGTERM.
        self._started.end(_RANK_SECONDS, only=self._engines)
        with contextlib.suppress(Exception):
            self._cluster.stop_cluster_sync()
        self._started.note()
        self._started.end(_END_SECONDS)
        self._temporary.cleanup()

    def _wait(self, is_done: Callable[[], bool]) -> None:
        """Wait for all engines, unless one has ended: ipyparallel would wait for it until its time is over."""
        deadline = time.monotonic() + START_SECONDS
        while not is_done():
            for pid in self._engines:
                if not lives(pid):
                    raise ChildProcessError(
                        f"engine {pid} {how_ended(self._engines[pid])} before it was ready"
                    )
            if time.monotonic() > deadline:
                raise TimeoutError(f"not all engines were ready after {START_SECONDS} s")
            time.sleep(_POLL_SECONDS)

    def _log_end(self) -> str:
        """Return the last lines that the controller and the engines wrote."""
        found = []
        for file in sorted((self._folder / "profile" / "log").glob("*")):
            with contextlib.suppress(OSError):
                lines = file.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
                found += [f"  {line}" for line in lines if line.strip()]
        return "\n".join(found[-3 * _LOG_LINES :])


def _guarded() -> Any:
    """Return the configuration by which ipyparallel starts its processes beside guards."""
    from traitlets.config import Config

    return Config(
        LocalControllerLauncher={"controller_cmd": guard.command("ipyparallel.controller")},
        LocalEngineSetLauncher={"engine_cmd": guard.command("ipyparallel.engine")},
    )


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


class Started:
    """Those processes below this one whose environment has a mark, whoever has started them.

    The mark is environment variables that they, and what they start, have and no other process has.
    """

    def __init__(self, mark: Mapping[str, str]) -> None:
        self._mark = mark.items()
        self._noted: list[Any] = []

    def note(self) -> None:
        """Take up the processes that have come; one whose parent has ended could not be found later."""
        import psutil

        for one in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if one not in self._noted and self._mark <= one.environ().items():
                    self._noted.append(one)

    def end(self, seconds: float, only: Collection[int] | None = None) -> None:
        """Ask processes to end, and kill those that have not ended after so many seconds.

        `only` holds the ids of those that are meant; without it, all that were noted are.
        """
        import psutil

        meant = [one for one in self._noted if only is None or one.pid in only]
        for one in meant:
            with contextlib.suppress(psutil.Error):
                one.terminate()  # psutil signals no other process that has got the same id
        _, alive = psutil.wait_procs(meant, timeout=seconds)
        for one in alive:
            with contextlib.suppress(psutil.Error):
                one.kill()
        psutil.wait_procs(alive, timeout=_KILL_SECONDS)
