"""What a lab does to hunt for a batch size: try, time, and be as it was before."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from ortlab.engine.versions import versions
from ortlab.errors import OptionError
from ortlab.experiment import check_count, mentioned
from ortlab.hunting.batch_hunt import BatchHunt
from ortlab.hunting.batches import check_callable, checked_batch, plain_step
from ortlab.hunting.following import following
from ortlab.hunting.held_recording import HeldRecording
from ortlab.hunting.plan_sets import read_plan_sets
from ortlab.hunting.progress import HuntProgress
from ortlab.hunting.request import check_above_floor, check_resumable, read_sizes
from ortlab.hunting.room import Room
from ortlab.hunting.trials import Access, Trials
from ortlab.memory.sizes import read_size
from ortlab.snapshot import Snapshot, is_stateful
from ortlab.weights import check_weights

if TYPE_CHECKING:
    import torch

    from ortlab.configuration import Configuration
    from ortlab.engine.baselines import Baseline
    from ortlab.engine.ort import OrtEngine
    from ortlab.experiment import Experiment
    from ortlab.memory.plan import MemoryPlan
    from ortlab.messages import MessageLog
    from ortlab.options import Need
    from ortlab.partial import PartsEngine
    from ortlab.recording import Recording
    from ortlab.runs import Ledger, Run
    from ortlab.wrapping import Takeover

    Tell = Callable[[str, float], None]
    Hold = Callable[[], None]
    Settle = Callable[[], object]


STEPS: Final = 3
"""Timed steps of each run, where the user asks for no other number."""

ROUNDS: Final = 2
"""Timed runs of each point."""


class HuntingLab(ABC):
    """The base of `Lab` that hunts for a batch size; the abstract parts are the lab's."""

    module: torch.nn.Module
    name: str
    have: frozenset[Need]
    runs: Ledger
    _engine: OrtEngine | PartsEngine | Baseline
    _ort: OrtEngine | PartsEngine
    _log: MessageLog
    _takeover: Takeover
    _recording: Recording | None

    def __init__(self) -> None:
        super().__init__()
        self.hunts: list[BatchHunt] = []

    def hunt_batch(
        self,
        make_batch: Callable[[int], Any],
        limit: str | int | None = None,
        *,
        train: Callable[[Any], object] | None = None,
        sizes: Iterable[int] | None = None,
        plans: Sequence[str | Sequence[str]] | None = None,
        steps: int = STEPS,
        resume: BatchHunt | None = None,
        progress: bool = True,
    ) -> BatchHunt:
        """Look for the batch size, and the recompute plans, that train most samples per second under a limit.

        Sizes go up until one does not fit. Then sets of plans are tried on it, each from the largest batch that fits
        without. What fits is timed in rounds. A point that is predicted not to fit is not run; one that runs out of
        memory all the same fails with an error that is written down, and the next point runs. Afterwards weights,
        gradients, optimizers, random state, options and engine are as before; nothing is added to the ledger.

        Parameters
        ----------
        make_batch
            `make_batch(size)` returns a batch of that many samples: a mapping, a tuple or a tensor.
        limit
            What the peak may reach: "6 GiB", or a whole number of bytes. On a CPU that is the resident set of the whole
            process, on CUDA what torch's allocator hands out.
        train
            `train(batch)` takes one training step. By default forward, loss (`output.loss`, or the output itself if it
            is a scalar), backward, and gradients cleared; no optimizer.
        sizes
            Batch sizes to try; by default powers of two from 1.
        plans
            Sets of recompute plans to try where a size does not fit without: each a plan, or several that go together.
            By default the largest that ORT offers. Every other engine than "ort" has none.
        steps
            Timed steps of each run, after one that is not timed; each point that fits has two runs.
        resume
            A hunt that was interrupted, from `lab.hunts` or `BatchHunt.load`; it has its limit, sizes and plans.
        progress
            Whether to show a progress bar on a terminal.

        Returns
        -------
        BatchHunt
            The record, also in `lab.hunts`.

        Raises
        ------
        OptionError
            If the limit is no size or below what is in use already, or `make_batch` cannot make the first batch.
        StepError
            If the first step fails for another reason than memory, or a step is running.
        LedgerError
            If the hunt to resume started elsewhere.
        KeyboardInterrupt
            If the user interrupts. The points so far are kept in `lab.hunts[-1]`.

        Examples
        --------
        >>> lab.hunt_batch(lambda size: {name: tensor[:size] for name, tensor in data.items()}, limit="6 GiB")
        """
        self._check_usable("hunt for a batch size")
        check_callable(make_batch, "make_batch")
        if train is not None:
            check_callable(train, "train")
        check_weights(self.module)
        step = plain_step(self.module) if train is None else train
        device = next((tensor.device for tensor in self.module.parameters()), None)
        if device is None:
            raise OptionError("The model has no parameters, so there is nothing to train.")
        room = Room(device)
        if resume is not None and (limit, sizes, plans, steps) != (None, None, None, STEPS):
            raise OptionError(
                "A hunt that is resumed has its limit, sizes, plans and steps already.",
                fix="lab.hunt_batch(make_batch, resume=...) alone, with the same train.",
            )
        asked = None if resume is not None else self._read(limit, sizes, plans, steps)
        room.free()
        used = room.used_bytes()
        if asked is not None:
            check_above_floor(asked["limit_bytes"], used, str(device))
        start = Snapshot(self.module, [thing for thing in mentioned(step) if is_stateful(thing)])
        if asked is None:
            assert resume is not None  # noqa: S101 - one of the two is there
            check_resumable(resume, start.digest, versions(), self.configuration.engine)
            hunt, hunt.stopped = resume, False
        else:
            hunt = BatchHunt(
                len(self.hunts) + 1,
                self.name,
                engine=self.configuration.engine,
                device=str(device),
                start_digest=start.digest,
                kept_bytes=start.number_of_bytes,
                versions=versions(),
                **asked,
            )
        if all(hunt is not known for known in self.hunts):
            self.hunts.append(hunt)
        access = Access(self, self._record_held, self._release_sessions)
        trials = Trials(access, hunt, lambda size: checked_batch(make_batch, size), step, start, room)
        return self._hunted(hunt, trials, show=progress)

    # ---- what the trials do with the lab --------------------------------------------------------------------

    @property
    def _has_session(self) -> bool:
        """Whether ONNX Runtime is the engine and has a session for the next training call."""
        return self.configuration.engine == "ort" and not self._engine.pending_stage()

    def _record_held(self, experiment: Experiment, tell: Tell, hold: Hold, settle: Settle) -> Run:
        """Run an experiment under a ceiling, and leave the ledger alone; see `HeldRecording`."""
        number = self.runs.next_number
        pending = bool(self._engine.pending_stage())
        facts = (self.module, self._engine, self._takeover.original_forward, experiment, tell)
        self._recording = recording = HeldRecording(*facts, hold=hold, settle=settle, pending=pending)
        try:
            with self._log.during_run(number):
                return recording.run(number, self.configuration.options, show=False)
        finally:
            self._recording = None

    def _release_sessions(self) -> None:
        """Free ONNX Runtime's sessions with their arenas; exports and graphs stay."""
        self._ort.close()
        self.configure(self.configuration)  # parts are given back by the one, and taken again by the other

    # ---- parts ------------------------------------------------------------------------------------------------

    def _read(self, limit: object, sizes: object, plans: object, steps: int) -> dict[str, Any]:
        if limit is None:
            raise OptionError(
                "A hunt needs a limit of memory.", fix='lab.hunt_batch(make_batch, limit="6 GiB").'
            )
        check_count(steps)
        sets = read_plan_sets(plans)
        if self.configuration.engine != "ort":
            if sets:
                raise OptionError(
                    f"Recompute plans act in ONNX Runtime, and the engine is {self.configuration.engine!r}.",
                    fix='lab.set(engine="ort"), or leave plans out.',
                )
            sets = ()
        return {
            "limit_bytes": read_size(limit),
            "sizes": read_sizes(sizes),
            "plan_sets": sets,
            "steps": steps,
            "rounds": ROUNDS,
        }

    def _hunted(self, hunt: BatchHunt, trials: Trials, *, show: bool) -> BatchHunt:
        position = next(i for i, known in enumerate(self.hunts) if known is hunt)
        bar = HuntProgress(hunt, self._tell_progress, show=show)
        try:
            with trials.lab_as_before(had_session=self._has_session):
                while (task := following(hunt)) is not None:
                    bar.begin(task)
                    trials.do(task, bar.report)
                    bar.end()
        except KeyboardInterrupt as interrupt:
            hunt.stopped = True
            kept = f"lab.hunts[{position}]"
            how = f"The hunt stopped after {len(hunt.points)} points; the lab is as it was before it."
            interrupt.args = (f"{how}\nKept: {kept}\nGo on: lab.hunt_batch(make_batch, resume={kept})",)
            raise
        except BaseException:
            if not hunt.points:  # the first batch failed: there is nothing to keep
                self.hunts.remove(hunt)
            raise
        finally:
            bar.close()
        return hunt

    @property
    @abstractmethod
    def configuration(self) -> Configuration:
        """Engine and switches together."""

    @abstractmethod
    def configure(self, configuration: Configuration) -> object:
        """Take over engine and switches as a whole."""

    @abstractmethod
    def plan(self, part: str | None = None) -> MemoryPlan:
        """Read which recompute plans ORT offers."""

    @abstractmethod
    def _check_usable(self, what: str) -> None: ...

    @abstractmethod
    def _tell_progress(self, text: str, fraction: float) -> None: ...
