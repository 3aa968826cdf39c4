"""The trials of a search: one point after another is run in the lab, under a ceiling, and nothing of it is left."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from ortlab.engine.diagnosis import place, ran_out, reason, says_ran_out
from ortlab.engine.patching import only_new_garbage
from ortlab.errors import OptionError, OrtlabError, PlanWarning
from ortlab.memory.measured import RESIDENT
from ortlab.memory.plan import RECOMPUTE_IS
from ortlab.options.configuration import NOTHING_RECOMPUTED
from ortlab.options.options import Options
from ortlab.options.switches import ALL_BUT_MATMULS
from ortlab.runs.experiment import Experiment, leaving_no_trace
from ortlab.runs.process_memory import following_live_buffers, reason_unknown
from ortlab.runs.recording import HeldRecording
from ortlab.studies.batch_size import (
    FAILED,
    FELL_BACK,
    FITS,
    OVER,
    PREDICTED,
    RAN_OUT,
    BatchSizePoint,
    Plans,
    most_of,
)
from ortlab.studies.plans import plan

if TYPE_CHECKING:
    from ortlab.memory.plan import MemoryPlan, PlanRow
    from ortlab.records.runs import Run
    from ortlab.runs.bench import Bench
    from ortlab.runs.experiment import Snapshot
    from ortlab.studies.batch_size import BatchSizeSearch, Task
    from ortlab.studies.batch_size_room import Room

_SINGLES: Final = 3
_IN_SET: Final = 4
_RECOMPUTED: Final = ("layers", "layers but linear", ALL_BUT_MATMULS)
_SMALLEST_SHARE: Final = 0.25
"""Least share of the largest saving: a plan that saves less gets no batch to the next power of two."""


def read_plan_sets(plans: object) -> tuple[Plans, ...] | None:
    """Read the sets of plans that a user names; None stays None. Raises OptionError for what is no list of plans."""
    # A set is one plan ("Gelu+:1:-1", "recompute=layers") or several that are applied together.
    if plans is None:
        return None
    fix = 'plans=["Gelu+:1:-1", ("Gelu+:1:-1", "Dropout+:1:-1"), "recompute=layers"]; lab.plan() lists them.'
    given = [plans] if isinstance(plans, str) else plans
    if not isinstance(given, Iterable):
        raise OptionError(f"The plans are a {type(plans).__name__}, not a list of plans.", fix=fix)
    sets: dict[Plans, None] = {}
    for one in given:
        if not isinstance(one, (str, list, tuple)) or not all(isinstance(part, str) for part in one):
            raise OptionError(f"{one!r} is no set of plans.", fix=fix)
        try:
            checked = Options(**switches_of((one,) if isinstance(one, str) else tuple(one)))
        except OptionError as error:
            raise OptionError(f"{one!r} is no set of plans.", why=error.what, fix=fix) from error
        together = (*checked.memory_plan, *(f"{RECOMPUTE_IS}{word}" for word in checked.recompute))
        if together:
            sets[together] = None
    return tuple(sets)


def switches_of(plans: Plans) -> dict[str, Any]:
    """Return the switches that turn a set of plans on, and all else that recomputes off."""
    words = [one.removeprefix(RECOMPUTE_IS) for one in plans if one.startswith(RECOMPUTE_IS)]
    own = [one for one in plans if not one.startswith(RECOMPUTE_IS)]
    return {**NOTHING_RECOMPUTED, "memory_plan": tuple(own), "recompute": tuple(words)}


def largest_plan_sets(plan: MemoryPlan) -> tuple[Plans, ...]:
    """Choose sets from a table of plans: the `_SINGLES` largest of ORT singly, then the largest that go together.

    Then two of what ortlab recomputes: layers, and layers without their matrix products.
    """
    # Savings are those of the simulated peak where known, else those that were printed; they only rank.
    rows = sorted((row for row in plan.rows if _saving(row) > 0), key=lambda row: (-_saving(row), row.config))
    rows = [row for row in rows if _saving(row) >= _SMALLEST_SHARE * _saving(rows[0])]
    together: list[PlanRow] = []
    for row in rows:
        if len(together) < _IN_SET and not any(_clash(row, other) for other in together):
            together.append(row)
    sets: dict[Plans, None] = {(row.config,): None for row in rows[:_SINGLES]}
    if together:
        sets[tuple(row.config for row in together)] = None
    offered = {row.config for row in plan.recomputed}
    ours = [(one,) for word in _RECOMPUTED if (one := f"{RECOMPUTE_IS}{word}") in offered]
    return (*sets, *ours[:2])


def _saving(row: PlanRow) -> float:
    known = row.peak_saving_bytes if row.peak_saving_bytes is not None else row.saving_bytes
    return known or 0.0


def _clash(one: PlanRow, other: PlanRow) -> bool:
    return other.config in one.excludes or one.config in other.excludes


MARGIN: Final = 1.1
"""A point is tried if it is predicted to need at most this many times the limit: the prediction may be wrong."""

_HEAP_KEEPS: Final = 2.0
"""Times the limit that a timed run may take: an ordinary heap and ORT's arena keep freed memory for reuse."""

_TRY_STEPS: Final = 2  # an optimizer allocates its state in the first


class Trials:
    """Runs the points of a search and fills it in; every run starts from `start`, and there the lab ends."""

    def __init__(
        self,
        bench: Bench,
        search: BatchSizeSearch,
        make_batch: Callable[[int], Any],
        step: Callable[[Any], object],
        start: Snapshot,
        room: Room,
    ) -> None:
        self._bench = bench
        self._configuration = bench.configuration
        self._search = search
        self._make_batch = make_batch
        self._step = step
        self._start = start
        self._room = room
        self._follows = room.on_cpu and not reason_unknown()
        self._level = 0

    # ---- tasks ------------------------------------------------------------------------------------------------

    def do(self, task: Task) -> None:
        """Do one task and write down its result."""
        if task.kind == "choose":
            self._choose()
        elif task.kind == "try":
            self._search.add(self._tried(task.size, task.plans))
        else:
            self._time(task)

    @contextmanager
    def lab_as_before(self, *, had_session: bool) -> Iterator[None]:
        """Leave the lab, when the block ends, as it is now; a session that it had is built again, of the last step."""
        last = self._bench.experiment
        gc.collect()
        try:
            with only_new_garbage(), self._bench.set_as_before():
                try:
                    self._release()
                    yield
                    smallest = min((one.size for one in self._search.points if one.fits), default=None)
                    if had_session and last is not None:
                        self._bench.configure(self._configuration)
                        with self._bench.as_before(last), leaving_no_trace(last.step):
                            last.start.put_back()
                            self._bench.run_apart(last.times(1))
                    elif had_session and smallest is not None:
                        self._bench.configure(self._configuration)
                        self._run(smallest, 1, self._search.limit_bytes * _HEAP_KEEPS, keep=True)
                finally:
                    self._start.put_back()
        finally:
            self._room.free()
            self._bench.notify("options")  # sessions were freed, and one is there again: views look once more

    def _tried(self, size: int, plans: Plans) -> BatchSizePoint:
        search = self._search
        predicted = search.predicted(size, plans)
        refusal = self._refusal(size, plans, predicted)
        if refusal:
            return BatchSizePoint(size, plans, PREDICTED, refusal, predicted)
        point = BatchSizePoint(size, plans, FAILED, predicted_bytes=predicted)
        try:
            self._configure(plans, follow=self._follows)
            run = self._run(size, _TRY_STEPS, search.limit_bytes * MARGIN, plans=plans, follow=self._follows)
        except Exception as error:
            if ran_out(error):
                return replace(
                    point, outcome=RAN_OUT, reason=f"Ran out of memory {place(error)}".strip() + "."
                )
            if not search.points:
                raise
            return replace(point, reason=reason(error))
        if run.fell_back:
            outcome = RAN_OUT if says_ran_out(run.fallback_reason) else FELL_BACK
            return replace(point, outcome=outcome, reason=run.fallback_reason)
        search.kept_bytes = self._start.number_of_bytes  # an optimizer is known from its first step on
        if run.memory is None:
            return replace(point, reason="The memory of a process cannot be told on this system.")
        peak = run.memory.peak_bytes - search.kept_bytes
        held = min(self._level - search.kept_bytes, peak)
        search.held_bytes = max(search.held_bytes, held)
        kind = RESIDENT if self._follows else run.memory.kind
        point = replace(point, peak_bytes=peak, step_memory_bytes=peak - held, kind=kind)
        fits = (search.needed(point) or 0) <= search.asked_bytes
        why = "" if fits else "It was measured to need more than the limit."
        return replace(point, outcome=FITS if fits else OVER, reason=why)

    def _time(self, task: Task) -> None:
        search = self._search
        try:
            self._configure(task.plans, follow=False)
            most = search.limit_bytes * _HEAP_KEEPS
            run = self._run(task.size, search.steps + 1, most, plans=task.plans)
        except Exception as error:  # noqa: BLE001 - whatever a step raises is a result of the point
            point = search.point(task.size, task.plans)
            assert point is not None  # noqa: S101 - only points that fit are timed
            outcome = RAN_OUT if ran_out(error) else FAILED
            why = (
                f"While it was timed: {place(error) if ran_out(error) else reason(error)}".rstrip(": .") + "."
            )
            search.add(replace(point, outcome=outcome, reason=why, runs=()))
        else:
            search.add_run(task.size, task.plans, run)

    def _choose(self) -> None:
        """Read the plans that ORT offers for this graph, and choose sets of them."""
        search = self._search
        sizes = [one.size for one in search.points if one.fits]
        # A batch of 1 has a graph of its own, in which sizes of 1 are fixed.
        size = min((one for one in sizes if one > 1), default=min(sizes, default=search.points[0].size))
        try:
            self._configure((), follow=False)
            try:
                self._run(size, 1, search.limit_bytes * MARGIN, keep=True)
            except Exception as error:  # a graph that cannot run is built all the same, and has plans
                if not ran_out(error):
                    raise
            search.plan_sets = largest_plan_sets(plan(self._bench))
        except OrtlabError:
            search.plan_sets = ()
        finally:
            self._release()

    # ---- parts ------------------------------------------------------------------------------------------------

    def _refusal(self, size: int, plans: Plans, predicted: float | None) -> str:
        """Say why a point is not even tried; "" if it is."""
        search, room = self._search, self._room
        left = room.left_bytes()
        used = room.used_bytes() - search.kept_bytes if search.of_device else 0
        if predicted is not None:
            if predicted > search.asked_bytes * MARGIN:
                return "It is predicted to need more than the limit."
            if left is not None and predicted - used > left:
                return "It is predicted to need more than the machine has left."
            return ""
        known = search.measured(plans, size)
        if known and left is not None and most_of(size, used, *known[-1]) - used > left:
            return "It may take more than the machine has left, judged by the smaller batch alone."
        return ""

    def _configure(self, plans: Plans, *, follow: bool) -> None:
        """Set the lab to a set of plans, without a fallback, which would run in PyTorch what ORT has no memory for."""
        changes: dict[str, object] = {}
        if self._configuration.engine == "ort":
            changes = {**switches_of(plans), "fallback": False}
            if follow:
                changes["cpu_memory_arena"] = False  # it keeps freed memory, so that no peak can be told
        self._bench.configure(self._configuration.changed(changes, self._bench.have))

    def _run(
        self,
        size: int,
        count: int,
        most_bytes: float,
        *,
        plans: Plans = (),
        follow: bool = False,
        keep: bool = False,
    ) -> Run:
        """Run steps with a batch from the start, under the ceiling; the session is freed after, unless it is kept."""
        room = self._room
        most = int(most_bytes) + self._start.number_of_bytes
        self._start.put_back()
        try:
            with room.ceiling_down_after(), following_live_buffers() if follow else nullcontext() as gaps:
                room.hold(most)
                batch = self._make_batch(size)
                room.ceiling.take_down()
                self._start.put_back()  # it may have drawn random numbers
                experiment = Experiment(lambda: self._step(batch), count, self._start)
                levels = [room.used_bytes()]  # at the start of each step, and at the end

                def settle() -> None:
                    if gaps is not None:
                        gaps.fill()
                    levels.append(room.used_bytes())

                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", PlanWarning)  # it is written down, below
                    run = self._record(experiment, lambda: room.hold(most), settle)
                self._level = levels[-2]
                if plans:
                    room.ceiling.take_down()  # reading plans builds
                    self._check_known(plans)
            return run
        finally:
            self._start.put_back()
            if not keep:
                self._release()

    def _record(self, experiment: Experiment, hold: Callable[[], None], settle: Callable[[], object]) -> Run:
        """Run an experiment under a ceiling, and leave the ledger alone; see `HeldRecording`."""
        bench = self._bench
        pending = bool(bench.engine.pending_stage())
        facts = (bench.module, bench.engine, bench.takeover.original_forward, experiment, bench.progress)
        held = HeldRecording(*facts, hold=hold, settle=settle, pending=pending)
        return bench.run_apart(experiment, held)

    def _check_known(self, plans: Plans) -> None:
        """Refuse plans of ORT that this graph does not have: it silently accepts them and applies nothing."""
        offered = {part.rsplit(":", 1)[0] for row in plan(self._bench).rows for part in row.config.split(",")}
        own = switches_of(plans)["memory_plan"]
        wanted = {part.rsplit(":", 1)[0] for one in own for part in one.split(",")}
        missing = sorted(wanted - offered)
        if missing:
            raise OrtlabError(
                f"ORT does not offer {', '.join(missing)} for this graph.",
                fix="lab.plan() lists what it offers.",
            )

    def _release(self) -> None:
        """Free what the point has left: sessions with their arenas, and memory that the device's allocator caches."""
        if self._configuration.engine == "ort":
            self._bench.ort.close()  # exports and graphs stay
            # `close` has given wrapped parts back to PyTorch; this takes them again.
            self._bench.configure(self._bench.configuration)
        self._room.free()
