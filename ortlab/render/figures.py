"""Which figure a record gets: what `ortlab.plot` asks."""

from __future__ import annotations

from functools import singledispatch
from typing import TYPE_CHECKING

from ortlab.graphs.flop_savings import FlopSavings
from ortlab.graphs.flops import Flops
from ortlab.memory.measured import MemoryMeasurement
from ortlab.memory.saved_activations import SavedActivations
from ortlab.parity.record import Parity
from ortlab.ranks.balancing import Balance
from ortlab.ranks.ledgers import Ranks
from ortlab.records.density_report import DensityReport
from ortlab.records.memory_phases import MemoryPhases
from ortlab.render import batch_size_plot, budget_plot, sweep_plot
from ortlab.render.activations_plot import activations_plot
from ortlab.render.balance_plot import balance_plot
from ortlab.render.density_plot import density_plot
from ortlab.render.engines_plot import engines_plot
from ortlab.render.flops_plot import flops_plot, savings_plot
from ortlab.render.memory_plot import measurement_plot, phases_plot
from ortlab.render.parity_plot import parity_plot
from ortlab.render.ranks_plot import ranks_plot
from ortlab.studies.batch_size_search import BatchSizeSearch
from ortlab.studies.budget import Budget
from ortlab.studies.engine_comparison import EngineComparison
from ortlab.studies.sweep import Sweep

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@singledispatch
def plot(record: object) -> Figure:
    """Draw a record.

    Parameters
    ----------
    record
        A `Sweep`: step time against peak memory. A `SavedActivations`: what each layer keeps for backward.
        `EngineComparison`: step time against the memory that a step needs. A `Budget`: what plans cost against the
        peak. `BatchSizeSearch`: samples per second and peak memory against the batch.

        `Parity`: distances over the depth of the model and over the steps.
        `MemoryMeasurement`: the phases of a step. `MemoryPhases`: memory at the points of the steps.
        `DensityReport`: the density of each input. `Flops`: FLOPs by module. `FlopSavings`: with a switch and without.
        `Balance`: tokens of each rank, step by step. `Ranks`: where the time of each goes, and its memory.

    Returns
    -------
    matplotlib.figure.Figure
        `ortlab.plot(record).savefig("figure.svg")` saves it.

    Raises
    ------
    TypeError
        If there is no figure for a record of this type.
    """
    known = ", ".join(sorted(kind.__name__ for kind in plot.registry if kind is not object))
    message = f"There is no figure for a {type(record).__name__}; records that have one: {known}."
    raise TypeError(message)


plot.register(Sweep, sweep_plot.plot)
plot.register(SavedActivations, activations_plot)
plot.register(MemoryMeasurement, measurement_plot)
plot.register(MemoryPhases, phases_plot)
plot.register(EngineComparison, engines_plot)
plot.register(Parity, parity_plot)
plot.register(Budget, budget_plot.plot)
plot.register(BatchSizeSearch, batch_size_plot.plot)
plot.register(DensityReport, density_plot)
plot.register(Flops, flops_plot)
plot.register(FlopSavings, savings_plot)
plot.register(Balance, balance_plot)
plot.register(Ranks, ranks_plot)
