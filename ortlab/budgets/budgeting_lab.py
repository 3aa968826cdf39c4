"""What a lab does for a budget: profile and measure a step, choose plans, run them, and be as it was before."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ortlab.budgets.budget import MET, NO_PLANS_NEEDED, PREDICTED, Budget, Compared
from ortlab.budgets.request import read_request
from ortlab.errors import OptionError

if TYPE_CHECKING:
    import torch

    from ortlab.budgets.planning import Ground
    from ortlab.budgets.simulation import SimulatedStep
    from ortlab.configuration import Configuration
    from ortlab.engine.ort import OrtEngine
    from ortlab.experiment import Experiment
    from ortlab.memory.measured import MemoryMeasurement
    from ortlab.memory.trace import Trace
    from ortlab.options import Need
    from ortlab.peers.peers import Peers

_STAGES: Final = 10
"""Parts of the work that are told: profile, simulate, measure, choose, three trials with choices between, the curve."""

_STEPS: Final = 2
"""Steps that each measurement is the highest of."""


class BudgetingLab(ABC):
    """The base of `Lab` that chooses plans for a budget; the abstract parts are the lab's."""

    module: torch.nn.Module
    name: str
    have: frozenset[Need]

    def __init__(self) -> None:
        super().__init__()
        self.budgets: list[Budget] = []
        self._known: tuple[Configuration, Experiment, SimulatedStep, int] | None = None

    def budget(
        self,
        limit: str | int | None = None,
        *,
        saving: float | None = None,
        apply: bool = False,
        verify: bool = True,
        curve: bool = True,
        peers: Peers | None = None,
        progress: bool = True,
    ) -> Budget:
        """Choose the recompute plans that cost least time within a number of bytes, and verify them by running.

        The last step is profiled and its peak measured without plans; from that is predicted what plans take off and
        what they cost. The chosen plans are then run from the step's start and measured. If they miss, plans that
        take more off are chosen and run, three times in all at most.

        Parameters
        ----------
        limit
            What the peak of a step may be, as `measure_memory` tells it: "6 GiB", "900 MiB", or bytes.
        saving
            Instead: the share of the peak without plans that is to go, between 0 and 1.
        apply
            Whether the lab keeps the plans switched on where the budget is met. Otherwise, and whenever something
            fails, options are afterwards as before; weights, optimizer, random state and ledger always are.
        verify
            Whether to run the plans. Without, everything but the peak without plans is predicted.
        curve
            Whether to predict other budgets as well.
        peers
            What `peers` has measured of the same step, to be shown beside the plans.
        progress
            Whether to show a progress bar on a terminal.

        Returns
        -------
        Budget
            The record, also in `lab.budgets`. If nothing fits, it holds the plans that come closest, and why.

        Raises
        ------
        OptionError
            If the budget is no size, not above zero, or both a limit and a saving; if the engine is not "ort", or
            several parts of the model are wrapped.
        StepError
            If no step has run yet, a step is running, or memory cannot be told on this system.
        Exception
            Whatever the step raises.

        Examples
        --------
        >>> lab.budget("6 GiB")
        >>> lab.budget(saving=0.3, apply=True).plans
        """
        from ortlab.budgets.planning import answer

        request = read_request(limit, saving)
        self._check_usable("choose plans for a budget")
        experiment = self._last_experiment()
        engine = self._engine_to_plan()
        configuration = kept = self.configuration
        plain = configuration.changed({"memory_plan": [], "memory_level": 0}, self.have)
        stages = _Stages(self._report_progress, show=progress)

        def run(plans: tuple[str, ...]) -> Compared:
            return Compared("plans", self.measure_memory(steps=_STEPS, memory_plan=plans).peak_bytes)

        try:
            self.configure(plain)
            ground = self._ground(plain, experiment, engine, stages.tell)
            found = answer(ground, request, run if verify else None, stages.tell, curve=curve)
            found = replace(found, compared=_compared(peers))
            if apply and found.outcome in {MET, PREDICTED, NO_PLANS_NEEDED}:
                plans = () if found.outcome == NO_PLANS_NEEDED else found.plans
                kept = plain.changed({"memory_plan": list(plans)}, self.have)
                found = replace(found, applied=True)
        finally:  # profiles and measurements have put back what they trained, each by itself
            stages.close()
            self.configure(kept)
        self.budgets.append(found)
        return found

    def _ground(
        self, plain: Configuration, experiment: Experiment, engine: OrtEngine, tell: Callable[[str], None]
    ) -> Ground:
        """Profile the step without plans, once for each step call and configuration, and measure it each time.

        What else has come into the process since, such as matplotlib, is in every later measurement.
        """
        from ortlab.budgets.planning import Ground
        from ortlab.budgets.search import choose
        from ortlab.budgets.simulation import SimulatedStep
        from ortlab.memory.lifetimes import lifetimes

        if self._known is None or self._known[0] != plain or self._known[1] is not experiment:
            tell("Profiling a step")
            trace = self.profile(memory_efficient_order=True, progress=False)
            ordered, usual = lifetimes(trace).peak, lifetimes(self.profile(1, progress=False)).peak
            tell("Simulating plans")
            step = SimulatedStep(trace, engine.execution.recompute_places())
            choose(step, 0.0)  # the solver's libraries are in the process before that is measured
            self._known = (plain, experiment, step, max(ordered - usual, 0))
        tell("Measuring a step without plans")
        measured = self.measure_memory(steps=_STEPS)
        peaks = {phase.phase: phase.peak_bytes for phase in measured.step.phases}
        beyond = peaks.pop("optimizer", 0)
        return Ground(
            model=self.name,
            step=self._known[2],
            order_bytes=self._known[3],
            without=Compared("without plans", measured.peak_bytes),
            within_bytes=max(peaks.values(), default=0),
            beyond_bytes=beyond,
            kind=measured.label,
            device=measured.device,
        )

    def _engine_to_plan(self) -> OrtEngine:
        if self.engine != "ort":
            raise OptionError(
                f"There are no recompute plans for engine {self.engine!r}.",
                why="They are ONNX Runtime's.",
                fix='lab.set(engine="ort"), then ask again.',
            )
        engines = self._engines(None)
        if len(engines) > 1:
            raise OptionError(
                "A budget is for a model that is wrapped as a whole, or for one part of it.",
                why=f"Several parts are wrapped: {', '.join(engines)}.",
                fix="Wrap one part: ortlab.wrap(model, only=[...]).",
            )
        return next(iter(engines.values()))

    @property
    @abstractmethod
    def engine(self) -> str:
        """The engine of the next step."""

    @property
    @abstractmethod
    def configuration(self) -> Configuration:
        """Engine and switches together."""

    @abstractmethod
    def configure(self, configuration: Configuration) -> object:
        """Take over engine and switches as a whole."""

    @abstractmethod
    def profile(
        self,
        steps: int = 3,
        *,
        part: str | None = None,
        memory_efficient_order: bool = False,
        progress: bool = True,
    ) -> Trace:
        """Run the last step again while ORT's profiler watches."""

    @abstractmethod
    def measure_memory(
        self,
        fn: Callable[[], object] | None = None,
        *,
        steps: int = 2,
        watch: Iterable[object] = (),
        **changes: object,
    ) -> MemoryMeasurement:
        """Measure what a step needs."""

    @abstractmethod
    def _last_experiment(self) -> Experiment: ...

    @abstractmethod
    def _engines(self, part: str | None) -> dict[str, OrtEngine]: ...

    @abstractmethod
    def _check_usable(self, what: str) -> None: ...

    @abstractmethod
    def _report_progress(self, text: str, fraction: float) -> None: ...


def _compared(peers: Peers | None) -> tuple[Compared, ...]:
    """Take over what peers needed, where both their memory and their time were measured."""
    return tuple(
        Compared(peer.name, peer.memory.peak_bytes, peer.point.step_ms)
        for peer in peers or ()
        if peer.memory is not None and peer.outcome is not None
    )


class _Stages:
    """One progress bar over the parts of the work."""

    def __init__(self, report: Callable[[str, float], None], *, show: bool) -> None:
        from tqdm import tqdm

        self._report = report
        # With disable=None tqdm draws on terminals only; a notebook shows the panel's bar instead.
        self._bar = tqdm(total=_STAGES, desc="Budget", leave=False, disable=None if show else True)

    def tell(self, what: str) -> None:
        """Go on to the next part."""
        self._bar.set_description(what)
        self._bar.update()
        self._report(what, min(1.0, self._bar.n / _STAGES))

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()
        self._report("", 1.0)
