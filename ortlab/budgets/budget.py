"""The answer to a number of bytes: plans, what is predicted of them, and what was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from ortlab.record_files import JsonRecord

if TYPE_CHECKING:
    import pandas as pd

NO_PLANS_NEEDED: Final = "no plans needed"
MET: Final = "met"
MISSED: Final = "missed"
PREDICTED: Final = "predicted to fit"
TOO_SMALL: Final = "too small"


@dataclass(frozen=True)
class Prediction:
    """Plans, and what is predicted of them; nothing here was measured.

    Attributes
    ----------
    plans
        What `Options.memory_plan` takes; ":1:k" recomputes in the first k places.
    peak_bytes
        Predicted peak of a step: the measured one without plans, less what the simulation takes off.
    cost_ms
        What they are predicted to add to a step, in ms.
    """

    plans: tuple[str, ...]
    peak_bytes: float
    cost_ms: float


@dataclass(frozen=True)
class PlanTrial:
    """One set of plans that was run.

    Attributes
    ----------
    prediction
        The plans, and what was predicted.
    peak_bytes
        Measured peak of a step, in bytes.
    """

    prediction: Prediction
    peak_bytes: int

    @property
    def error(self) -> float:
        """How far the prediction is from what was measured, relative to the latter; below 0: too low."""
        return (self.prediction.peak_bytes - self.peak_bytes) / self.peak_bytes


@dataclass(frozen=True)
class Solver:
    """How the plans were found.

    Attributes
    ----------
    plans, places
        How many plans there were to choose from, and in how many places all together.
    instants
        Instants of the step that were looked at.
    cost_ms
        Predicted cost of the plans that the exact solver chose, in ms.
    greedy_cost_ms
        Cost of those that the greedy one did; None where it found nothing that fits.
    gap
        Share of the cost that a better choice could at most save; None where that is unknown.
    proven
        Whether nothing better exists, as far as savings add up.
    seconds
        How long all of it took, simulations included.
    """

    plans: int
    places: int
    instants: int
    cost_ms: float
    greedy_cost_ms: float | None
    gap: float | None
    proven: bool
    seconds: float


@dataclass(frozen=True)
class Obstacle:
    """The instant that keeps the peak from falling further.

    Attributes
    ----------
    where
        The phase, and what runs then.
    bytes
        What is needed then, predicted.
    live
        What lives there and how many bytes it has, the largest first.
    """

    where: str
    bytes: float
    live: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Compared:
    """Another way to run the same step, as measured: eager, checkpointing, a level.

    Attributes
    ----------
    name
        What it is.
    peak_bytes
        Measured peak, in bytes.
    step_ms
        Measured time of a step, in ms; None where it was not measured.
    """

    name: str
    peak_bytes: int
    step_ms: float | None = None


@dataclass(frozen=True)
class Budget(JsonRecord, noun="budget", layout=1):
    """The plans that cost least within a number of bytes; `Lab.budget` makes it.

    Attributes
    ----------
    model
        What the lab calls the model.
    asked
        What was asked for, as written: "6 GiB", "saving of 30 %".
    limit_bytes
        The same in bytes: what the peak of a step may be.
    kind
        What the bytes are of: "resident set of this process", "CUDA allocated of this process".
    without
        The step without plans, as measured.
    prediction
        The chosen plans. Where nothing fits, those that come closest.
    floor
        The lowest peak that plans can reach, predicted.
    solver
        How they were found.
    trials
        What was run to verify them, in order; every one but the last missed the budget. Empty if nothing was run.
    obstacle
        What keeps the peak from falling further; None where the budget is met.
    curve
        Predicted peaks and costs for other budgets, from none to the floor; empty if not asked for.
    compared
        Other ways to run the step, as `Lab.peers` measured them, ONNX Runtime as it was set first.
    applied
        Whether the lab was left with these plans switched on.
    device
        "cpu" or "cuda:0", ...
    """

    model: str
    asked: str
    limit_bytes: int
    kind: str
    without: Compared
    prediction: Prediction
    floor: Prediction
    solver: Solver
    trials: tuple[PlanTrial, ...] = ()
    obstacle: Obstacle | None = None
    curve: tuple[Prediction, ...] = ()
    compared: tuple[Compared, ...] = ()
    applied: bool = False
    device: str = "cpu"

    @property
    def plans(self) -> tuple[str, ...]:
        """What `Options.memory_plan` takes: the last plans that were run or, without trials, the predicted ones."""
        return self.best.prediction.plans if self.best else self.prediction.plans

    @property
    def best(self) -> PlanTrial | None:
        """The trial that met the budget, or else came closest; None where nothing was run."""
        met = [trial for trial in self.trials if trial.peak_bytes <= self.limit_bytes]
        return met[-1] if met else min(self.trials, key=lambda trial: trial.peak_bytes, default=None)

    @property
    def outcome(self) -> str:
        """What came out: "met", "missed", "predicted to fit", "too small" or "no plans needed"."""
        if self.without.peak_bytes <= self.limit_bytes:
            return NO_PLANS_NEEDED
        if self.best is not None and self.best.peak_bytes <= self.limit_bytes:
            return MET
        if self.prediction.peak_bytes > self.limit_bytes:
            return TOO_SMALL
        return MISSED if self.best else PREDICTED

    def table(self) -> pd.DataFrame:
        """One row for the step without plans, each trial and each point of the curve; bytes and ms.

        Returns
        -------
        pandas.DataFrame
            Predicted and measured numbers are in columns of their own; what was not measured is missing.
        """
        import pandas as pd

        none = self.without
        rows = [_row("without plans", None, none.peak_bytes, none.step_ms)]
        for number, trial in enumerate(self.trials, start=1):
            rows.append(_row(f"trial {number}", trial.prediction, trial.peak_bytes, None))
        if not self.trials:
            rows.append(_row("chosen", self.prediction, None, None))
        rows += [_row(one.name, None, one.peak_bytes, one.step_ms) for one in self.compared]
        rows += [_row("other budget", one, None, None) for one in self.curve]
        return pd.DataFrame(rows)

    # ---- JSON -------------------------------------------------------------------------------------------------

    def _fields(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def _of_fields(cls, fields: dict[str, Any]) -> Budget:
        return cls(**{**fields, **{name: reader(fields[name]) for name, reader in _READERS.items()}})

    def __repr__(self) -> str:
        """Show what was asked for, what came out, and the plans."""
        return f"Budget({self.asked} for {self.model}: {self.outcome}, {list(self.plans)})"


def _row(
    what: str, prediction: Prediction | None, peak_bytes: int | None, step_ms: float | None
) -> dict[str, object]:
    return {
        "what": what,
        "plans": ", ".join(prediction.plans) if prediction else "",
        "predicted peak [bytes]": prediction.peak_bytes if prediction else None,
        "predicted cost [ms]": prediction.cost_ms if prediction else None,
        "measured peak [bytes]": peak_bytes,
        "measured step [ms]": step_ms,
    }


def _prediction(value: Mapping[str, Any]) -> Prediction:
    return Prediction(**{**value, "plans": tuple(value["plans"])})


def _trial(value: Mapping[str, Any]) -> PlanTrial:
    return PlanTrial(**{**value, "prediction": _prediction(value["prediction"])})


def _obstacle(value: Mapping[str, Any]) -> Obstacle:
    return Obstacle(**{**value, "live": tuple((str(name), int(size)) for name, size in value["live"])})


_READERS: Final[Mapping[str, Callable[[Any], object]]] = {
    "without": lambda value: Compared(**value),
    "prediction": _prediction,
    "floor": _prediction,
    "solver": lambda value: Solver(**value),
    "trials": lambda values: tuple(_trial(value) for value in values),
    "obstacle": lambda value: _obstacle(value) if value else None,
    "curve": lambda values: tuple(_prediction(value) for value in values),
    "compared": lambda values: tuple(Compared(**value) for value in values),
}
"""How the fields that are records themselves are read from JSON."""
