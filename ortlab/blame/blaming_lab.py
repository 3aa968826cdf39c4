"""What a lab does to find the switches to blame: run sets of them from one start, and be as it was before."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from ortlab.blame.blame import UNFINISHED, Blame
from ortlab.blame.investigation import Access, Investigation
from ortlab.blame.metrics import METRICS, STEP_MS, Metric, Own
from ortlab.blame.reference import Reference
from ortlab.blame.request import check_resumable, read_changes
from ortlab.engine.versions import versions
from ortlab.errors import OptionError, StepError
from ortlab.recording import Recording
from ortlab.snapshot import Snapshot

if TYPE_CHECKING:
    import torch

    from ortlab.configuration import Configuration
    from ortlab.engine.baselines import Baseline
    from ortlab.engine.ort import OrtEngine
    from ortlab.experiment import Experiment
    from ortlab.memory.measured import MemoryMeasurement
    from ortlab.messages import MessageLog
    from ortlab.options import Need
    from ortlab.partial import PartsEngine
    from ortlab.runs import Ledger, Run
    from ortlab.wrapping import Takeover

ROUNDS: Final = 4
"""Pairs of runs in which a set of changes is timed at first."""

_TIMED_STEPS: Final = 5


class BlamingLab(ABC):
    """The base of `Lab` that finds the switches to blame; the abstract parts are the lab's."""

    module: torch.nn.Module
    name: str
    have: frozenset[Need]
    runs: Ledger
    _engine: OrtEngine | PartsEngine | Baseline
    _experiment: Experiment | None
    _log: MessageLog
    _recording: Any
    _takeover: Takeover

    def __init__(self) -> None:
        super().__init__()
        self.blames: list[Blame] = []

    def blame(
        self,
        metric: str | Own = "loss",
        *,
        changes: Mapping[str, object] | None = None,
        against: Mapping[str, object] | None = None,
        n: int | None = None,
        rounds: int = ROUNDS,
        tolerance: float | None = None,
        resume: Blame | None = None,
        progress: bool = True,
    ) -> Blame:
        """Find the smallest set of switches that causes a change of numbers, time or memory, or a failure.

        The last step is run with the baseline's switches and with all changes. If that makes a difference, sets of the
        changes are run until the culprits are found: one culprit takes some log2 of the number of changes, several that
        act only together take as many runs each. What is left without them is run, too, and searched if it shows the
        change as well. If the step fails with the changes, the cause of that is looked for. Each set of switches is run
        once. Afterwards, also after a failure or an interrupt, weights, gradients, optimizers, random state, engine and
        options are as they were before the call; nothing comes into the ledger.

        Switches that 1.19.2 reads when it is imported act here in the process like all others.

        Parameters
        ----------
        metric
            "loss": the largest relative difference of the losses to the baseline's, step by step. "parity": the largest
            relative difference of losses and updated parameters to PyTorch's from the same start. "step_ms": the time
            of a step, in pairs of runs with the baseline, with an interval. "peak_bytes": the peak, as `measure_memory`
            measures it. Or a function that takes a `Run` and returns a number or a truth.
        changes
            What may be to blame, by option, as `set` takes it; the baseline is then the lab as it is set.
        against
            The baseline, by option; what is not named stands as it is set. By default all switches at their defaults.
        n
            Steps of each run; by default as many as the last step call had, and at least 5 where they are timed.
        rounds
            Pairs of runs of each set that is timed; three times as many where the noise hides the answer.
        tolerance
            A change up to this is none: by default a relative 1e-5 of losses, 1e-4 of parity, 2 % of time and memory,
            and 0 of a function's number.
        resume
            A blame that was interrupted, from `lab.blames` or `Blame.load`; it has its changes and steps.
        progress
            Whether to show a progress bar on a terminal.

        Returns
        -------
        Blame
            The record, also in `lab.blames`.

        Raises
        ------
        OptionError
            If nothing differs from the baseline, an option is unknown, a value or the metric makes no sense, or ONNX
            Runtime is not the engine. Nothing has run then.
        StepError
            If no step has run yet, a step is running, or the step fails with the switches and without.
        LedgerError
            If the blame to resume started elsewhere, or is finished.
        KeyboardInterrupt
            If the user interrupts. The trials so far are kept in `lab.blames[-1]`.

        Examples
        --------
        >>> lab.set(memory_level=1, aten_backward=False, compute_optimizer=False).blame("loss", tolerance=0)
        >>> lab.blame("step_ms", changes={"aten_backward": False, "intra_op_spinning": True})
        """
        self._check_usable("look for switches to blame")
        experiment = self._last_experiment()
        if self.configuration.engine != "ort":
            raise OptionError(
                f"Switches act in ONNX Runtime, and the engine is {self.configuration.engine!r}.",
                fix='lab.set(engine="ort") first.',
            )
        measured = Metric.read(metric, tolerance)
        if resume is not None:
            if (changes, against, n, tolerance) != (None, None, None, None):
                raise OptionError(
                    "A blame that is resumed has its changes, baseline, steps and tolerance already.",
                    fix="lab.blame(resume=...) alone; with the metric, where that is a function.",
                )
            check_resumable(resume, experiment.start.digest, versions())
            if resume.metric not in METRICS and measured.name != resume.metric:
                raise OptionError(
                    f"This blame was made with the function {resume.metric}.",
                    fix=f"lab.blame({resume.metric}, resume=...).",
                )
            own = measured.own if resume.metric not in METRICS else None
            measured, blame = Metric(resume.metric, resume.tolerance, own), resume
        else:
            if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 2:  # noqa: PLR2004 - an interval
                raise StepError(f"The number of rounds must be a whole number from 2 on, not {rounds!r}.")
            least = _TIMED_STEPS if measured.own is None and measured.name == STEP_MS else 1
            count = experiment.times(max(experiment.count, least) if n is None else n).count
            base, differing = read_changes(self.configuration, changes, against, self.have)
            blame = Blame(
                len(self.blames) + 1,
                self.name,
                measured.name,
                measured.tolerance,
                base,
                differing,
                count,
                rounds,
                experiment.start.digest,
                versions(),
            )
        if all(blame is not known for known in self.blames):
            blame.number = len(self.blames) + 1
            self.blames.append(blame)
        return self._blamed(blame, measured, experiment.times(blame.count), show=progress)

    # ---- parts ------------------------------------------------------------------------------------------------

    def _blamed(self, blame: Blame, metric: Metric, experiment: Experiment, *, show: bool) -> Blame:
        last, configuration = self._experiment, self.configuration
        before = Snapshot(self.module, experiment.start.stateful)
        position = next(i for i, known in enumerate(self.blames) if known is blame)
        reference = Reference(self.module)

        def run(tried: Configuration) -> Run:
            self.configure(tried)
            experiment.start.put_back()
            return self._run_apart(experiment)

        def distance(tried: Configuration) -> tuple[Run, float]:
            if not reference.known:
                reference.take(run(type(tried)("eager", tried.options)))
            made = run(tried)
            return made, reference.distance(made)

        def peak(tried: Configuration) -> float:
            self.configure(tried)
            return float(self.measure_memory().peak_bytes)

        try:
            with self._blame_progress(blame, show=show) as tell:
                Investigation(blame, metric, Access(run, distance, peak, self.have), tell).find()
        except KeyboardInterrupt as interrupt:
            kept = f"lab.blames[{position}]"
            how = f"The search stopped after {len(blame.trials)} trials; the lab is as it was before it."
            interrupt.args = (
                f"{how}\nKept: {kept}\nGo on: lab.blame(resume={kept}), or %ort_blame --resume",
            )
            raise
        except BaseException:
            if blame.outcome == UNFINISHED and not blame.culprits:
                self.blames.remove(blame)
            raise
        finally:
            self._experiment = last
            before.put_back()
            self.configure(configuration)
        return blame

    def _run_apart(self, experiment: Experiment) -> Run:
        """Run an experiment and leave the ledger alone."""
        number = self.runs.next_number
        self._recording = recording = Recording(
            self.module, self._engine, self._takeover.original_forward, experiment, self._report_progress
        )
        try:
            with self._log.during_run(number):
                return recording.run(number, self.configuration.options, show=False)
        finally:
            self._recording = None

    @contextmanager
    def _blame_progress(self, blame: Blame, *, show: bool) -> Iterator[Callable[[tuple[str, ...]], None]]:
        from tqdm import tqdm

        # How many trials there will be is known only for a single culprit, so the bar has no end.
        with tqdm(unit="trial", leave=False, disable=None if show else True) as bar:
            expected = math.ceil(math.log2(len(blame.changes) + 1)) + 4

            def tell(names: tuple[str, ...]) -> None:
                done = len(blame.trials)
                where = f"Trial {done + 1}: {_words(blame, names)}"
                bar.set_description(where)
                bar.update(done - bar.n)
                self._tell_progress(where, done / max(expected, done + 2))

            try:
                yield tell
            finally:
                self._tell_progress("", 1.0)

    @property
    @abstractmethod
    def configuration(self) -> Configuration:
        """Engine and switches together."""

    @abstractmethod
    def configure(self, configuration: Configuration) -> object:
        """Take over engine and switches as a whole."""

    @abstractmethod
    def measure_memory(self) -> MemoryMeasurement:
        """Measure the memory of the last step."""

    @abstractmethod
    def _last_experiment(self) -> Experiment: ...

    @abstractmethod
    def _check_usable(self, what: str) -> None: ...

    @abstractmethod
    def _report_progress(self, text: str, fraction: float) -> None: ...

    @abstractmethod
    def _tell_progress(self, text: str, fraction: float) -> None: ...


def _words(blame: Blame, names: tuple[str, ...]) -> str:
    if not names:
        return "the baseline"
    if len(names) == len(blame.changes):
        return "all changes"
    return blame.words(names[0]) if len(names) == 1 else f"{len(names)} of {len(blame.changes)} changes"
