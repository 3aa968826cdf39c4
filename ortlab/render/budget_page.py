"""The page of a budget: what was asked for, the plans, what is predicted of them and what was measured."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from ortlab.budgets import budget as outcomes
from ortlab.render import units
from ortlab.render.page import Block, Cell, Column, Drawing, Folded, Mark, Note, Page, Table, row

if TYPE_CHECKING:
    from ortlab.budgets.budget import Budget, Obstacle, Prediction

_MARKS: Final = {
    outcomes.NO_PLANS_NEEDED: Mark.GOOD,
    outcomes.MET: Mark.GOOD,
    outcomes.MISSED: Mark.BAD,
    outcomes.PREDICTED: Mark.PLAIN,
    outcomes.TOO_SMALL: Mark.BAD,
}
_LIVE_SHOWN: Final = 8


def budget_page(budget: Budget) -> Page:
    """Say whether a budget is met, by which plans, and what they cost."""
    blocks: list[Block] = [Note(_verdict(budget), _MARKS[budget.outcome])]
    if budget.outcome != outcomes.NO_PLANS_NEEDED:
        blocks.append(_plans(budget))
        if budget.trials:
            blocks.append(_trials(budget))
    if budget.obstacle is not None:
        blocks.append(_obstacle(budget.obstacle))
    if budget.curve:
        blocks += [_curve(budget), _drawing(budget)]
    if budget.compared:
        blocks.append(_compared(budget))
    blocks += [Note(_how(budget)), Note(_sources(budget), Mark.QUIET)]
    return Page(f"Budget for {budget.model}: {budget.asked}", tuple(blocks))


def _verdict(budget: Budget) -> str:
    limit, needed = units.size(budget.limit_bytes), units.size(budget.without.peak_bytes)
    best, chosen = budget.best, budget.prediction
    if budget.outcome == outcomes.NO_PLANS_NEEDED:
        return f"No plans are needed: a step without any takes {needed} at its peak (measured), the budget is {limit}."
    if budget.outcome == outcomes.MET and best is not None:
        peak = units.size(best.peak_bytes)
        return f"Met: {peak} at the peak (measured) of {limit}; {needed} without plans (measured)."
    if budget.outcome == outcomes.PREDICTED:
        return (
            f"Predicted to fit, not verified: {units.size(chosen.peak_bytes)} at the peak of {limit}; "
            f"{needed} without plans (measured)."
        )
    if budget.outcome == outcomes.MISSED and best is not None:
        rounds = "1 trial" if len(budget.trials) == 1 else f"{len(budget.trials)} trials"
        return (
            f"Missed in {rounds}: {units.size(best.peak_bytes)} at the peak (measured) of {limit} comes closest; "
            f"{needed} without plans (measured)."
        )
    closest = (
        f"{units.size(best.peak_bytes)} (measured)"
        if best
        else f"{units.size(chosen.peak_bytes)} (predicted)"
    )
    why = "" if budget.solver.plans else " There is no recompute plan for this model that takes anything off."
    return (
        f"Too small: {limit} cannot be reached with recompute plans. Closest: {closest}; {needed} without plans "
        f"(measured).{why}"
    )


def _plans(budget: Budget) -> Table | Note:
    if not budget.plans:
        return Note("No plan is chosen.", Mark.QUIET)
    columns = (
        Column("plan", meaning="what memory_plan takes: cluster, strategy, count (-1 for all places)"),
        Column("where", meaning="in which places ONNX Runtime recomputes"),
    )
    return Table("Chosen plans", columns, tuple(row(plan, _places(plan)) for plan in budget.plans))


def _places(plan: str) -> str:
    count = int(plan.rsplit(":", 1)[1])
    if count < 0:
        return "in all places"
    return "in the first place" if count == 1 else f"in the first {units.count(count)} places"


def _trials(budget: Budget) -> Table:
    columns = (
        Column("trial"),
        Column("predicted peak", numeric=True, meaning="predicted: simulated, and set to one measurement"),
        Column("measured peak", numeric=True, meaning="measured: highest point of a step"),
        Column("prediction off", numeric=True, meaning="predicted over measured peak"),
        Column("predicted cost", numeric=True, meaning="predicted from the times of a profiled step"),
        Column("plans", numeric=True),
        Column("verdict"),
    )
    rows = [
        row(
            "without plans",
            "",
            units.size(budget.without.peak_bytes),
            "",
            "",
            "0",
            "",
        )
    ]
    for number, trial in enumerate(budget.trials, start=1):
        met = trial.peak_bytes <= budget.limit_bytes
        rows.append(
            row(
                f"trial {number}",
                units.size(trial.prediction.peak_bytes),
                units.size(trial.peak_bytes),
                units.percent(trial.error),
                units.duration(trial.prediction.cost_ms),
                units.count(len(trial.prediction.plans)),
                Cell("met", Mark.GOOD) if met else Cell("missed", Mark.BAD),
            )
        )
    return Table("Verified by running", columns, tuple(rows))


def _obstacle(obstacle: Obstacle) -> Folded:
    """Say what keeps the peak up."""
    blocks: list[Table | Note] = [
        Note(f"Predicted: {units.size(obstacle.bytes)} at {obstacle.where}."),
    ]
    if obstacle.live:
        shown = obstacle.live[:_LIVE_SHOWN]
        hidden = len(obstacle.live) - len(shown)
        columns = (Column("what lives there"), Column("size", numeric=True))
        rows = tuple(row(name, units.size(size)) for name, size in shown)
        blocks.append(Table("", columns, rows, f"{units.count(hidden)} smaller ones" if hidden else ""))
    return Folded("What keeps the peak from falling further", blocks=tuple(blocks), is_open=True)


def _curve(budget: Budget) -> Folded:
    columns = (
        Column("predicted peak", numeric=True),
        Column("predicted cost", numeric=True),
        Column("plans"),
    )

    def names(one: Prediction) -> str:
        return units.fold(", ".join(one.plans), 200) or "none"

    rows = tuple(
        row(units.size(one.peak_bytes), units.duration(one.cost_ms), names(one)) for one in budget.curve
    )
    return Folded("Other budgets, predicted", blocks=(Table("", columns, rows),))


def _compared(budget: Budget) -> Table:
    columns = (
        Column("the same step otherwise"),
        Column("measured peak", numeric=True),
        Column("measured step", numeric=True),
    )
    rows = tuple(
        row(one.name, units.size(one.peak_bytes), units.duration(one.step_ms)) for one in budget.compared
    )
    return Table("", columns, rows)


def _drawing(budget: Budget) -> Drawing:
    what = "What plans add to a step against its peak, predicted and measured; ortlab.plot(budget) draws it."

    def svg() -> str:
        from ortlab.render.budget_plot import plot
        from ortlab.render.plots import svg as inline

        return inline(plot(budget), what)

    return Drawing(what, svg)


def _how(budget: Budget) -> str:
    """Say what to do next."""
    if budget.outcome == outcomes.NO_PLANS_NEEDED:
        return "Next: ask for less, as in lab.budget(saving=0.3)."
    if budget.applied:
        return "These plans are switched on. Take them back: lab.set(memory_plan=[])."
    if budget.outcome == outcomes.TOO_SMALL and not budget.solver.plans:
        return "Next: a smaller batch, or layer checkpointing: lab.peers() compares."
    plans = json.dumps(list(budget.plans))
    if budget.outcome == outcomes.TOO_SMALL:
        floor = units.size(budget.floor.peak_bytes)
        return (
            f"Next: ask for {floor} (predicted floor) or more, take a smaller batch, or keep the closest: "
            f"lab.set(memory_plan={plans})"
        )
    return f"The options are as they were. Switch the plans on: lab.set(memory_plan={plans})"


def _sources(budget: Budget) -> str:
    """Say once what the numbers are and where they come from."""
    solver = budget.solver
    lines = [
        (
            f"Memory: {budget.kind} on {budget.device}. Predicted peaks: one measured peak without plans, less what a "
            "simulation of the step takes off. Predicted costs: those of the recomputed nodes in a profiled step."
        )
    ]
    if solver.plans:
        places, plans = units.count(solver.places), units.count(solver.plans)
        proven = "proven the best" if solver.proven else "not proven the best in the time allowed"
        line = (
            f"Chosen among {plans} plans in {places} places over {units.count(solver.instants)} instants in "
            f"{units.duration(1000 * solver.seconds)}: {units.duration(solver.cost_ms)} predicted, {proven} as far as "
            "savings add up"
        )
        if solver.gap is not None and not solver.proven:
            line += f" (at most {units.percent(solver.gap)} cheaper)"
        greedy = solver.greedy_cost_ms
        line += "; the greedy choice " + (
            f"costs {units.duration(greedy)}." if greedy is not None else "finds nothing that fits."
        )
        lines.append(line)
    return "\n".join(lines)
