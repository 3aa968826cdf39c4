"""The processes of a cluster as the notebook holds them: started, watched, ended, and how one was lost."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ortlab.errors import ExecutionError, InstallError
from ortlab.ranks import guard
from ortlab.ranks.rank_process import Place, join, renew, request_break

_KILL_SECONDS: Final = 15.0

START_SECONDS: Final = 180
"""How long engines may take to start; on a busy machine Python and torch alone take many seconds."""

_END_SECONDS: Final = 15

_RANK_SECONDS: Final = 3

_POLL_SECONDS: Final = 0.1

_STATUS_SECONDS: Final = 3

_WATCH_SECONDS: Final = 0.5

_LOG_LINES: Final = 12


@dataclass(frozen=True)
class Lost:
    """A rank that was lost."""

    rank: int
    process: int  # its id
    how: str  # "was killed by signal 9", "ended with status 1", or "has ended" where that is not known
    when: str  # "while it ran" or "between two calls"
    ranks: int  # how many the cluster had


class RankDiedError(ExecutionError):
    """The process of a rank has ended while others went on."""

    def __init__(self, lost: Lost) -> None:
        self.lost = lost
        super().__init__(
            f"Rank {lost.rank} (process {lost.process}) {lost.how} {lost.when}, and the other ranks were ended.",
            why="Ranks train on the same model: without one of them the others would wait forever.",
            fix=f"Start the cluster again, %ort_cluster -n {lost.ranks} or Cluster({lost.ranks}); where memory was "
            "short, with fewer ranks or smaller batches.",
        )


class Lifetime:
    """The processes of one cluster, which end with this object and with the interpreter at the latest."""

    # `tell` is called with a sentence when a rank dies between two calls.

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.processes: Processes | None = None
        self.lost: Lost | None = None  # the rank that has died since the last start
        # Held during a call. The watch looks only between calls: a call itself notices that a rank has died.
        self.calling = threading.Lock()
        self._tell = tell
        self._end: weakref.finalize[[Processes], Lifetime] | None = None
        self._changing = threading.Lock()

    def start(self, ranks: int, threads: int, backend: str) -> None:
        """Start the processes and the watch; does nothing if they run. Raises what `Processes` raises."""
        if self.processes is not None:
            return
        self.lost = None
        self.processes = held = Processes(ranks, threads, backend)
        self._end = weakref.finalize(self, Processes.end, held)
        watch = threading.Thread(
            target=_watch, args=(weakref.ref(self), held), daemon=True, name="ortlab-cluster"
        )
        watch.start()

    def stop(self) -> None:
        """End the processes, and wait until they have ended; does nothing if none run."""
        with self._changing:
            end = self._taken()
        if end is not None:
            end()

    def give_up(self, lost: Lost) -> None:
        """End the other ranks after one was lost."""
        self.lost = lost
        self.stop()

    def look(self, held: Processes) -> bool:
        """End the ranks if one of these processes has died while nobody called; return whether to look again."""
        if not self.calling.acquire(blocking=False):
            return self.processes is held
        try:
            with self._changing:
                lost = held.lost("between two calls") if self.processes is held else None
                if lost is None:
                    return self.processes is held
                self.lost, end = lost, self._taken()
            if end is not None:
                end()
        finally:
            self.calling.release()
        self._tell(str(RankDiedError(lost)))
        return False

    def _taken(self) -> Callable[[], object] | None:
        """Forget the processes, and return what ends them."""
        end, self.processes, self._end = self._end, None, None
        return end


def _watch(lifetime: weakref.ref[Lifetime], held: Processes) -> None:
    while True:
        time.sleep(_WATCH_SECONDS)
        living = lifetime()
        if living is None or not living.look(held):
            return
        del living


class Processes:
    """What has to be ended: the controller, the engines, and what they started."""

    def __init__(self, ranks: int, threads: int, backend: str) -> None:
        try:
            import ipyparallel
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
        self._output = ""  # of an engine that has ended; ipyparallel has read its log, and removed it
        self._groups = 0
        self._requests = 0
        self.ranks: tuple[int, ...] = ()  # process ids, by rank
        whose = guard.variables(self._folder)
        self._started = _Started(whose)
        try:
            with _environment({**whose, "OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": _loopback()}):
                self._cluster.start_cluster_sync()
            self._list_engines()
            self.client = _quiet_client()(
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
                fix="Correct what the log names, or try fewer ranks: the machine may be short of memory.",
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

    def _list_engines(self) -> None:
        """Note the engines that ipyparallel has started, unless one has ended: it lists those that live."""
        for engines in self._cluster.engines.values():
            self._engines |= {one.pid: one.process for one in engines.launchers.values()}
            for name, ended in engines.stop_data.get("engines", {}).items():
                self._output = str(engines.outputs.get(name) or "")
                raise ChildProcessError(
                    f"engine {ended['pid']} {_ending(ended['exit_code'])} before it was ready"
                )

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
        found += [f"  {line}" for line in self._output.splitlines()[-_LOG_LINES:] if line.strip()]
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


def _quiet_client() -> Any:
    """Return the class of a client whose connection registers no magics."""
    # The first client in a notebook registers ``%px``, ``%autopx``, ``%pxresult`` and ``%pxconfig`` for its own engines
    # (``ipyparallel/client/client.py``, `Client.__init__`). They would stay when ortlab is unloaded, and would run on
    # the ranks what the user means for a cluster of their own; here, ``%%ort_ranks`` is what runs a cell on all.
    from ipyparallel import Client

    class QuietClient(Client):  # type: ignore[misc] # Client is Any: ipyparallel has no stubs
        def activate(self, *_: Any, **__: Any) -> None:
            """Register nothing."""

    return QuietClient


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


class _Started:
    """Those processes below this one whose environment has a mark, whoever has started them."""

    # The mark is environment variables that they, and what they start, have and no other process has.

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
        """Ask processes to end, and kill those that have not ended after so many seconds."""
        # `only` holds the ids of those that are meant; without it, all that were noted are.
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


def lives(pid: int) -> bool:
    """Say whether a process has not ended."""
    import psutil

    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def how_ended(engine: Any) -> str:
    """Say how an engine has ended; `engine` is ipyparallel's own `psutil.Process` of it."""
    # A thread of ipyparallel waits for the process, and this object keeps the status.
    import psutil

    deadline = time.monotonic() + _STATUS_SECONDS
    code = None
    while code is None and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)  # whoever asks first gets the status, and that is to be the thread
        with contextlib.suppress(psutil.Error):
            code = None if psutil.pid_exists(engine.pid) else engine.wait(timeout=0)
    return _ending(code)


def _ending(code: int | None) -> str:
    """Say how a process has ended by its exit status, which is negative after a signal; None if it is not known."""
    if code is None:
        return "has ended"
    return f"was killed by signal {-int(code)}" if code < 0 else f"ended with status {int(code)}"
