"""The trials of a hunt: one point after another is run in the lab, under a ceiling, and nothing of it is left."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from ortlab.engine.exhaustion import place, ran_out, reason, says_ran_out
from ortlab.errors import OrtlabError, PlanWarning
from ortlab.experiment import Experiment
from ortlab.hunting.plan_sets import largest_plan_sets
from ortlab.hunting.points import FAILED, FELL_BACK, FITS, OVER, PREDICTED, RAN_OUT, HuntPoint, Plans
from ortlab.hunting.prediction import most_of
from ortlab.memory.heap import following_live_buffers, reason_unknown
from ortlab.memory.measured import RESIDENT

if TYPE_CHECKING:
    from ortlab.hunting.batch_hunt import BatchHunt
    from ortlab.hunting.following import Task
    from ortlab.hunting.hunting_lab import HuntingLab
    from ortlab.hunting.room import Room
    from ortlab.runs import Run
    from ortlab.snapshot import Snapshot

    Tell = Callable[[str, float], None]

MARGIN: Final = 1.1
"""A point is tried if its predicted peak is at most this much above the limit: the prediction may be wrong."""

_HEAP_KEEPS: Final = 2.0
"""Times the limit that a timed run may take: an ordinary heap and ORT's arena keep freed memory for reuse."""

_TRY_STEPS: Final = 2  # an optimizer allocates its state in the first


@dataclass(frozen=True)
class Access:
    """What a hunt does with the lab.

    Attributes
    ----------
    lab
        The lab.
    record
        Runs an experiment under a ceiling: `HuntingLab._record_held`.
    release
        Frees ONNX Runtime's sessions.
    """

    lab: HuntingLab
    record: Callable[[Experiment, Tell, Callable[[], None], Callable[[], object]], Run]
    release: Callable[[], None]


class Trials:
    """Runs the points of a hunt.

    Parameters
    ----------
    access
        The lab.
    hunt
        Filled in.
    make_batch, step
        Make a batch of a size, checked; take a training step with it.
    start
        Where every run starts, and the lab ends.
    room
        How much memory there is.
    """

    def __init__(
        self,
        access: Access,
        hunt: BatchHunt,
        make_batch: Callable[[int], Any],
        step: Callable[[Any], object],
        start: Snapshot,
        room: Room,
    ) -> None:
        self._lab, self._access = access.lab, access
        self._configuration = access.lab.configuration
        self._hunt = hunt
        self._make_batch = make_batch
        self._step = step
        self._start = start
        self._room = room
        self._follows = room.on_cpu and not reason_unknown()

    # ---- tasks ------------------------------------------------------------------------------------------------

    def do(self, task: Task, tell: Tell) -> None:
        """Do one task and write down what came of it."""
        if task.kind == "choose":
            self._choose(tell)
        elif task.kind == "try":
            self._hunt.add(self._tried(task.size, task.plans, tell))
        else:
            self._time(task, tell)

    @contextmanager
    def lab_as_before(self, *, had_session: bool) -> Iterator[None]:
        """Leave the lab, when the block ends, as it is now; a session that it had is built again."""
        lab, configuration = self._lab, self._configuration
        # Garbage is collected around every run. What was there before the hunt is none of it, and is most of the time.
        freezes = not gc.get_freeze_count()
        if freezes:
            gc.collect()
            gc.freeze()
        self._release()
        try:
            yield
            smallest = min((one.size for one in self._hunt.points if one.fits), default=None)
            if had_session and smallest is not None:
                lab.configure(configuration)
                self._run(smallest, 1, _nobody, self._hunt.limit_bytes * _HEAP_KEEPS, keep=True)
        finally:
            self._start.put_back()
            lab.configure(configuration)
            if freezes:
                gc.unfreeze()
            self._room.free()

    def _tried(self, size: int, plans: Plans, tell: Tell) -> HuntPoint:
        hunt = self._hunt
        predicted = hunt.predicted(size, plans)
        refusal = self._refusal(size, plans, predicted)
        if refusal:
            return HuntPoint(size, plans, PREDICTED, refusal, predicted)
        point = HuntPoint(size, plans, FAILED, predicted_bytes=predicted)
        try:
            self._configure(plans, follow=self._follows)
            run = self._run(
                size, _TRY_STEPS, tell, hunt.limit_bytes * MARGIN, plans=plans, follow=self._follows
            )
        except Exception as error:
            if ran_out(error):
                return replace(
                    point, outcome=RAN_OUT, reason=f"Ran out of memory {place(error)}".strip() + "."
                )
            if not hunt.points:
                raise
            return replace(point, reason=reason(error))
        if run.fell_back:
            outcome = RAN_OUT if says_ran_out(run.fallback_reason) else FELL_BACK
            return replace(point, outcome=outcome, reason=run.fallback_reason)
        hunt.kept_bytes = self._start.number_of_bytes  # an optimizer is known from its first step on
        if run.memory is None:
            return replace(point, reason="The memory of a process cannot be told on this system.")
        peak = run.memory.peak_bytes - hunt.kept_bytes
        kind = RESIDENT if self._follows else run.memory.kind
        fits = peak <= hunt.limit_bytes
        why = "" if fits else "Its measured peak is above the limit."
        return replace(point, outcome=FITS if fits else OVER, reason=why, peak_bytes=peak, kind=kind)

    def _time(self, task: Task, tell: Tell) -> None:
        hunt = self._hunt
        try:
            self._configure(task.plans, follow=False)
            most = hunt.limit_bytes * _HEAP_KEEPS
            run = self._run(task.size, hunt.steps + 1, tell, most, plans=task.plans)
        except Exception as error:  # noqa: BLE001 - whatever a step raises is a result of the point
            point = hunt.point(task.size, task.plans)
            assert point is not None  # noqa: S101 - only points that fit are timed
            outcome = RAN_OUT if ran_out(error) else FAILED
            why = (
                f"While it was timed: {place(error) if ran_out(error) else reason(error)}".rstrip(": ") + "."
            )
            hunt.add(replace(point, outcome=outcome, reason=why, runs=()))
        else:
            hunt.add_run(task.size, task.plans, run)

    def _choose(self, tell: Tell) -> None:
        """Read the plans that ORT offers for this graph, and choose sets of them."""
        hunt, lab = self._hunt, self._lab
        sizes = [one.size for one in hunt.points if one.fits]
        # A batch of 1 has a graph of its own, in which sizes of 1 are fixed.
        size = min((one for one in sizes if one > 1), default=min(sizes, default=hunt.points[0].size))
        try:
            self._configure((), follow=False)
            try:
                self._run(size, 1, tell, hunt.limit_bytes * MARGIN, keep=True)
            except Exception as error:  # what cannot run has been built, and has plans
                if not ran_out(error):
                    raise
            hunt.plan_sets = largest_plan_sets(lab.plan())
        except OrtlabError:
            hunt.plan_sets = ()
        finally:
            self._release()

    # ---- parts ------------------------------------------------------------------------------------------------

    def _refusal(self, size: int, plans: Plans, predicted: float | None) -> str:
        """Say why a point is not even tried; "" if it is."""
        hunt, room = self._hunt, self._room
        left = room.left_bytes()
        used = room.used_bytes() - hunt.kept_bytes
        if predicted is not None:
            if predicted > hunt.limit_bytes * MARGIN:
                return "Its predicted peak is above the limit."
            if left is not None and predicted - used > left:
                return "Its predicted peak is more than the machine has left."
            return ""
        known = hunt.measured(plans, size)
        if known and left is not None and most_of(size, used, *known[-1]) - used > left:
            return "It may take more than the machine has left, judged by the smaller batch alone."
        return ""

    def _configure(self, plans: Plans, *, follow: bool) -> None:
        """Set the lab to a set of plans, without a fallback, which would run in PyTorch what ORT has no memory for."""
        changes: dict[str, object] = {}
        if self._configuration.engine == "ort":
            changes = {"memory_plan": list(plans), "memory_level": 0, "fallback": False}
            if follow:
                changes["cpu_memory_arena"] = False  # it keeps freed memory, so that no peak can be told
        self._lab.configure(self._configuration.changed(changes, self._lab.have))

    def _run(
        self,
        size: int,
        count: int,
        tell: Tell,
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
                room.let_go()
                self._start.put_back()  # it may have drawn random numbers
                experiment = Experiment(lambda: self._step(batch), count, self._start)
                settle = gaps.fill if gaps is not None else _nothing
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", PlanWarning)  # it is written down, below
                    run = self._access.record(experiment, tell, lambda: room.hold(most), settle)
                if plans:
                    room.let_go()  # reading plans builds
                    self._check_known(plans)
            return run
        finally:
            self._start.put_back()
            if not keep:
                self._release()

    def _check_known(self, plans: Plans) -> None:
        """Refuse plans that this graph does not have: ORT takes them without a word and applies nothing."""
        offered = {part.rsplit(":", 1)[0] for row in self._lab.plan().rows for part in row.config.split(",")}
        wanted = {part.rsplit(":", 1)[0] for one in plans for part in one.split(",")}
        missing = sorted(wanted - offered)
        if missing:
            raise OrtlabError(
                f"ORT does not offer {', '.join(missing)} for this graph.",
                fix="lab.plan() lists what it offers.",
            )

    def _release(self) -> None:
        """Free what the point has left: sessions with their arenas, and memory that the device's allocator keeps."""
        if self._configuration.engine == "ort":
            self._access.release()
        self._room.free()


def _nobody(_text: str, _fraction: float) -> None:
    """Tell nobody."""


def _nothing() -> None:
    """Do nothing."""
