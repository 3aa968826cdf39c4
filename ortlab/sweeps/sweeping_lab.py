"""What a lab does to sweep: from one start through many configurations, and back to where it was."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ortlab.engine.versions import versions
from ortlab.errors import OptionError
from ortlab.options import check_needs
from ortlab.snapshot import Snapshot
from ortlab.sweeps.layout import check_resumable, lay_out
from ortlab.sweeps.running import SweepProgress, make_runs

if TYPE_CHECKING:
    import torch

    from ortlab.configuration import Configuration
    from ortlab.experiment import Experiment
    from ortlab.options import Need
    from ortlab.runs import Run
    from ortlab.sweeps.sweep import Sweep


class SweepingLab(ABC):
    """The base of `Lab` that sweeps; the abstract parts are the lab's."""

    module: torch.nn.Module
    name: str
    have: frozenset[Need]
    _experiment: Experiment | None

    def __init__(self) -> None:
        super().__init__()
        self.sweeps: list[Sweep] = []
        self._sweeping: SweepProgress | None = None

    def sweep(
        self,
        grid: object = None,
        *,
        n: int | None = None,
        rounds: int = 1,
        baseline: Mapping[str, object] | None = None,
        resume: Sweep | None = None,
        progress: bool = True,
    ) -> Sweep:
        """Try many configurations from the start of the last step call, and leave the lab as it was.

        Parameters
        ----------
        grid
            Values by option, as in `{"memory_level": [0, 1, 2], "engine": ["ort", "eager"]}`: every combination is a
            point. Or the points themselves, as in `[{"memory_level": 1}, {"engine": "eager"}]`. What a point does not
            name stays as the lab is set.
        n
            Steps of each run; by default as many as the last step call had.
        rounds
            Runs of each point. Every other round goes backwards, so that a drift of the machine favours no point.
        baseline
            What the point changes that the others are held against; by default nothing: the lab as it is set. It is
            run as one more point if it is none of the grid.
        resume
            A sweep that was interrupted, from `lab.sweeps` or `Sweep.load`: the runs that are missing are made.
            Points that failed are not tried again.
        progress
            Whether to show a progress bar on a terminal.

        Returns
        -------
        Sweep
            The record, also in `lab.sweeps`; its runs are in `lab.runs`. A point that fails stands in it with the
            reason, as does one whose options contradict each other.

        Raises
        ------
        OptionError
            If the grid makes no sense as a whole: no points, an unknown option, a value of the wrong type. Nothing
            has run then.
        StepError
            If no step has run yet, or a step is running.
        LedgerError
            If the sweep cannot be resumed, because nothing is missing or the start is another.
        KeyboardInterrupt
            If the user interrupts. The runs made so far are kept in `lab.sweeps[-1]`.
        """
        self._check_usable("sweep")
        experiment = self._last_experiment().times(n)
        if resume is None:
            sweep = lay_out(
                grid,
                self.configuration,
                self.have,
                baseline=baseline,
                rounds=rounds,
                number=len(self.sweeps) + 1,
                model=self.name,
                count=experiment.count,
                start_digest=experiment.start.digest,
            )
        else:
            if (grid, n, rounds, baseline) != (None, None, 1, None):
                raise OptionError(
                    "A sweep that is resumed has its points, steps, rounds and baseline already.",
                    fix="lab.sweep(resume=...) alone.",
                )
            sweep = resume
            check_resumable(sweep, start_digest=experiment.start.digest, versions=versions())
            experiment = experiment.times(sweep.count)
        if all(sweep is not known for known in self.sweeps):
            sweep.number = len(self.sweeps) + 1
            self.sweeps.append(sweep)
        return self._swept(sweep, experiment, progress=progress)

    # ---- parts ------------------------------------------------------------------------------------------------

    def _swept(self, sweep: Sweep, experiment: Experiment, *, progress: bool) -> Sweep:
        last, configuration = self._experiment, self.configuration
        before = Snapshot(self.module, experiment.start.stateful)
        position = next(i for i, known in enumerate(self.sweeps) if known is sweep)

        def trial(tried: Configuration) -> Run:
            check_needs(tried.options, self.have)
            self.configure(tried)
            experiment.start.put_back()
            return self._run(experiment, progress=False, sweep=sweep.number)

        self._sweeping = bar = SweepProgress(sweep, self._tell_progress, show=progress)
        try:
            make_runs(sweep, trial, bar, kept_as=f"lab.sweeps[{position}]")
        finally:
            self._sweeping = None
            bar.close()
            self._experiment = last
            before.put_back()
            self.configure(configuration)
        return sweep

    @property
    @abstractmethod
    def configuration(self) -> Configuration:
        """Engine and switches together."""

    @abstractmethod
    def configure(self, configuration: Configuration) -> object:
        """Take over engine and switches as a whole."""

    @abstractmethod
    def _run(self, experiment: Experiment, *, progress: bool, sweep: int = 0) -> Run: ...

    @abstractmethod
    def _last_experiment(self) -> Experiment: ...

    @abstractmethod
    def _check_usable(self, what: str) -> None: ...

    @abstractmethod
    def _tell_progress(self, text: str, fraction: float) -> None: ...
