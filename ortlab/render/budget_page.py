"""The page and the figure of a budget: what was asked for, its plans, what is predicted and what was measured."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from ortlab import units
from ortlab.options.configuration import NOTHING_RECOMPUTED
from ortlab.options.switches import kept_words
from ortlab.render.page import Block, Cell, Column, Folded, Mark, Note, Page, Table, left_out, row
from ortlab.render.plots import COLOURS, INK, MIB, drawing, dress, key, new_figure, plain, say
from ortlab.studies import budget as outcomes
from ortlab.studies.batch_size import plans_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ortlab.studies.budget import Budget, Obstacle, Prediction

_MARKS: Final = {
    outcomes.NO_PLANS_NEEDED: Mark.GOOD,
    outcomes.MET: Mark.GOOD,
    outcomes.MISSED: Mark.BAD,
    outcomes.PREDICTED: Mark.PLAIN,
    outcomes.TOO_SMALL: Mark.BAD,
}

_LIVE_SHOWN: Final = 8
_NAMED: Final = 4
"""Plans that the first sentence names."""

_NAME: Final = 32
"""Characters of each name there."""

_CALLED: Final = 3
"""Plans that a call writes out; of more, the record has them."""

_LAST: Final = "lab.budgets[-1]"
"""That record, also where a magic's result has no name."""

_ROUNDED_UP: Final = 1.005
"""Times a size that is then shown with three digits: what is shown is no less than the size."""

_BECAUSE: Final = {
    "cheapest": "cheapest that is predicted to fit",
    "lowest": "lowest that is predicted",
    "by hand": "ticked by hand: largest saving first",
}


def budget_page(budget: Budget) -> Page:
    """Say what an amount of memory costs, by which plans, and what the lab has switched on now."""
    blocks: list[Block] = [*answer_notes(budget)]
    if budget.curve:
        blocks.append(
            drawing(
                "Time that plans add to a step against its memory, predicted and measured; "
                "ortlab.plot(budget) draws it.",
                lambda: budget_plot(budget),
            )
        )
    if budget.outcome != outcomes.NO_PLANS_NEEDED and budget.solver.ways:
        blocks.append(_plans(budget))
    if budget.trials:
        blocks.append(_trials(budget))
    blocks += [
        Note(f"Could not be run, and was left out: {plans_words(one.prediction)}. Why: {one.error}", Mark.BAD)
        for one in budget.failed
    ]
    if budget.obstacle is not None:
        blocks.append(_obstacle(budget.obstacle))
    if budget.curve:
        blocks.append(_curve(budget))
    if budget.compared:
        blocks.append(_compared(budget))
    if budget.no_blocks and budget.outcome != outcomes.NO_PLANS_NEEDED:
        why = f"The loss in blocks of rows (chunked_loss) is not offered: {budget.no_blocks}"
        blocks.append(Note(why, Mark.QUIET))
    blocks.append(Note(_sources(budget), Mark.QUIET))
    return Page(f"Budget for {budget.model}: {budget.asked}", tuple(blocks))


def answer_notes(budget: Budget) -> list[Note]:
    """Say the answer, what is known of the time, and what the lab has switched on now."""
    more = [Note(said) for said in (_time(budget), _device(budget), _state(budget)) if said]
    return [Note(_verdict(budget), _MARKS[budget.outcome]), *more]


def _verdict(budget: Budget) -> str:
    """Say the answer in one sentence."""
    needed, limit = units.size(budget.without.step_memory_bytes), units.size(max(budget.limit_bytes, 0))
    best, answer = budget.best, budget.answer
    if budget.outcome == outcomes.NO_PLANS_NEEDED:
        needs = f"needs {needed} without any (measured), and the budget is {limit}"
        if not budget.without.step_memory_bytes:
            needs = "is too small to measure, and finds all the memory that it needs free already"
        return f"No plans are needed: a step {needs}."
    if budget.outcome == outcomes.PREDICTED:
        return (
            f"{_less(budget, answer.step_memory_bytes)} is predicted to cost {_cost(budget)}: {plans_words(answer)}; "
            f"{units.size(answer.step_memory_bytes)} of {needed}, not run."
        )
    if best is None:
        why = (
            "There is no recompute plan for this model that saves anything."
            if not budget.solver.ways
            else (
                f"The lowest that plans are predicted to reach is {units.size(budget.floor.step_memory_bytes)}."
            )
        )
        return f"{limit} cannot be reached; a step needs {needed} without plans (measured). {why}"
    measured = units.size(best.step_memory_bytes)
    if budget.outcome == outcomes.MET:
        return (
            f"{_less(budget, best.step_memory_bytes)} costs {_cost(budget)}: {plans_words(answer)}; "
            f"measured {measured} of {needed}."
        )
    if not _saves(budget):
        return (
            f"{limit} cannot be reached: a step needs {needed} without plans, and nothing that was run needs less; the "
            f"closest needs {measured} (measured): {plans_words(answer)}."
        )
    return (
        f"{limit} cannot be reached: the closest needs {measured} of {needed} (measured), "
        f"{_less(budget, best.step_memory_bytes)} for {_cost(budget)}: {plans_words(answer)}."
    )


def _saves(budget: Budget) -> bool:
    """Tell whether the closest that was run needs less than a step without plans; true where nothing was run."""
    return budget.best is None or budget.best.step_memory_bytes < budget.without.step_memory_bytes


def _less(budget: Budget, step_memory_bytes: float) -> str:
    return f"{units.rounded_percent(1 - step_memory_bytes / budget.without.step_memory_bytes)} less memory"


def _cost(budget: Budget) -> str:
    """Say what the plans cost: as measured where a difference was told, else as predicted."""
    timing = budget.timing
    if timing is not None and timing.holds and timing.low > 1:
        return f"{units.rounded_percent(timing.ratio - 1)} time (measured)"
    if timing is not None and timing.holds and timing.high < 1:
        return f"no time (measured: {units.rounded_percent(1 - timing.ratio)} less)"
    share = _predicted_share(budget)
    said = units.duration(budget.answer.cost_ms) if share is None else units.rounded_percent(share)
    return f"{said} time" if budget.outcome == outcomes.PREDICTED else f"{said} time (predicted)"


def _predicted_share(budget: Budget) -> float | None:
    return budget.answer.cost_ms / budget.without.step_ms if budget.without.step_ms else None


def plans_words(prediction: Prediction) -> str:
    """Name plans in a sentence: "3 plans (Gelu, FusedMatMul -> Add, Where)"."""
    if prediction.setting:
        return prediction.setting
    names = [
        units.fold(name, _NAME) for name in dict.fromkeys(plans_name((plan,)) for plan in prediction.plans)
    ]
    shown = names if len(names) <= _NAMED else [*names[:_NAMED], f"{len(names) - _NAMED} more"]
    plans = units.many(prediction.plans, "plan")
    return f"{plans} ({', '.join(shown)})" if names else "no plan"


def _time(budget: Budget) -> str:
    """Say what is predicted and what was measured of the time, and what neither can tell."""
    share, timing = _predicted_share(budget), budget.timing
    if share is None or not budget.solver.ways:
        return ""
    said = (
        f"Time of a step, predicted from the profile: {units.duration(budget.answer.cost_ms)} more "
        f"({units.rounded_percent(share)} of {units.duration(budget.without.step_ms)})."
    )
    if timing is None:
        return said
    if not timing.holds:
        drift = units.rounded_percent(abs(timing.drift))
        return (
            f"{said} Measured: not told; the machine was not steady, steps without plans took {drift} "
            f"{'longer' if timing.drift > 0 else 'less'} after those with plans than before."
        )
    added, more = units.duration(abs(timing.added_ms)), "more" if timing.added_ms >= 0 else "less"
    told = "" if timing.low > 1 or timing.high < 1 else ": no difference that could be told"
    times, steps = units.times(timing.ratio, timing.low, timing.high), units.count(len(timing.with_ms))
    return (
        f"{said} Measured: {added} {more}, {times} the time (95 % interval){told}; {steps} steps with plans, as many "
        "without, in turns."
    )


def _device(budget: Budget) -> str:
    device = budget.whole_device
    if device is None:
        return ""
    what = "this process" if budget.device == "cpu" else f"torch's allocator on {budget.device}"
    return (
        f"Of {units.size(device.asked_bytes)} for {what}, {units.size(device.held_bytes)} are held at the start of a "
        f"step (measured); that leaves {units.size(max(budget.limit_bytes, 0))} for the step."
    )


def _state(budget: Budget) -> str:
    """Say what the lab has switched on now, and how to change that."""
    switches, before = budget.switches, dict(budget.before)
    engine = before.get("engine", "")
    was = (
        f"The lab had {_had(before)} before; all figures are against ONNX Runtime without plans. "
        if before
        else ""
    )
    if budget.applied:
        none = _off(switches)
        many = len(before.get("memory_plan", ())) > _CALLED
        back = f"**{_LAST}.before" if many else _call({**none, **before})
        if many and (more := {name: value for name, value in none.items() if name not in before}):
            back = f"{_call(more)}, {back}"
        now = "The plans are switched on" + (", and the engine is ONNX Runtime now" if engine else "")
        return f"{was}{now}. Back: lab.set({back})."
    if budget.outcome == outcomes.NO_PLANS_NEEDED:
        on = _off(before)
        off = f" Something is recomputed all the same: lab.set({_call(on)}) switches that off." if on else ""
        return f'{was}The lab is as it was.{off} Ask for less, as in lab.budget("70%").'
    if not budget.solver.ways:
        return "The lab is as it was. Next: a smaller batch, or layer checkpointing: lab.compare_engines() compares."
    wished = {"engine": "ort", **switches} if engine else switches
    floor = ""
    if budget.outcome in {outcomes.TOO_SMALL, outcomes.MISSED}:
        if not _saves(budget):
            return f"{was}The lab is as it was. Take a smaller batch; lab.memory() shows which phase needs the memory."
        reached = budget.best.step_memory_bytes if budget.best else budget.floor_bytes
        floor = f" Ask for {units.size(reached * _ROUNDED_UP)} or more"
        if budget.obstacle is not None and not budget.obstacle.live:
            floor += "; lab.memory() shows the phase that needs the rest, outside of the model's forward and backward."
        else:
            floor += ", or take a smaller batch."
            if "looked at" in budget.no_blocks:
                floor += " Logits may be much of what is left: lab.set(chunked_loss=True), and ask again."
    which = "the closest" if floor else "these plans"
    return f"{was}The lab is as it was.{floor} Switch {which} on: lab.set({_call(wished)})."


def _had(before: Mapping[str, Any]) -> str:
    """Say which engine and plans a lab had: "engine 'eager' and 4 plans"."""
    plans = before.get("memory_plan", ())
    said = [f'engine "{before["engine"]}"'] if "engine" in before else []
    said += [f"memory_level={before['memory_level']}"] if "memory_level" in before else []
    said += [f"recompute={','.join(before['recompute'])}"] if "recompute" in before else []
    said += [units.many(plans, "plan")] if plans else []
    return " and ".join(said)


def _off(switches: Mapping[str, Any]) -> dict[str, Any]:
    """Return those switches that a budget may set, switched off; as JSON has them."""
    nothing = {**NOTHING_RECOMPUTED, "chunked_loss": False}
    off = {name: value for name, value in nothing.items() if name in switches}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in off.items()}


def _call(switches: Mapping[str, Any]) -> str:
    """Write what `Lab.set` takes: names and values, or the record where there are many plans."""
    plans = switches.get("memory_plan", ())
    if len(plans) > _CALLED:
        rest = {name: value for name, value in switches.items() if name != "memory_plan"}
        return ", ".join(filter(None, (_call(rest), f"**{_LAST}.switches")))
    return ", ".join(
        f"{name}={value if isinstance(value, bool) else json.dumps(value)}"
        for name, value in switches.items()
    )


def _plans(budget: Budget) -> Table | Note:
    answer = budget.answer
    if answer.setting:
        said = []
        if answer.chunked_loss:
            said.append(
                "chunked_loss computes the loss in blocks of rows: no graph that trains makes all logits, and to read "
                "them there is an error."
            )
        if answer.memory_level:
            said.append(f"memory_level={answer.memory_level} stands for all plans of the model's layers.")
        if answer.recompute:
            kept, again = kept_words(answer.recompute)
            said.append(f"recompute={','.join(answer.recompute)} keeps {kept} and recomputes {again}.")
        return Note(" ".join(said), Mark.QUIET)
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
        Column("tried because", meaning="how the plans came to be run"),
        Column("plans", numeric=True),
        Column(
            "predicted memory",
            numeric=True,
            meaning="step memory, predicted: simulated, set to one measurement",
        ),
        Column(
            "measured memory",
            numeric=True,
            meaning="step memory, measured: highest point of a step above its start",
        ),
        Column("prediction off", numeric=True, meaning="predicted over measured step memory"),
        Column(
            "predicted time",
            numeric=True,
            meaning="added to a step, predicted from the times of a profiled step",
        ),
        Column("verdict"),
    )
    rows = [row("without plans", "", "0", "", units.size(budget.without.step_memory_bytes), "", "", "")]
    for number, trial in enumerate(budget.trials, start=1):
        told = trial.prediction
        met = trial.step_memory_bytes <= budget.limit_bytes
        closest = trial is budget.best
        because = _BECAUSE.get(trial.why, trial.why)
        if told.setting and trial.why in _BECAUSE:
            because += f": {told.setting}"
        rows.append(
            row(
                f"trial {number}",
                because,
                units.count(len(told.plans)) if told.plans else "",
                units.size(told.step_memory_bytes),
                units.size(trial.step_memory_bytes),
                units.percent(trial.error),
                units.duration(told.cost_ms),
                Cell("met", Mark.GOOD) if met else Cell("closest" if closest else "missed", Mark.BAD),
            )
        )
    return Table("Verified by running", columns, tuple(rows))


def _obstacle(obstacle: Obstacle) -> Folded:
    """Say what keeps memory up."""
    blocks: list[Table | Note] = [
        Note(f"Predicted: {units.size(obstacle.bytes)} of step memory at {obstacle.where}."),
    ]
    if obstacle.live:
        shown = obstacle.live[:_LIVE_SHOWN]
        hidden = len(obstacle.live) - len(shown)
        columns = (Column("what lives there"), Column("size", numeric=True))
        rows = tuple(row(name, units.size(size)) for name, size in shown)
        blocks.append(Table("", columns, rows, left_out(hidden, "smaller ones")))
    return Folded("What keeps memory from falling further", blocks=tuple(blocks), is_open=True)


def _curve(budget: Budget) -> Folded:
    columns = (
        Column("predicted step memory", numeric=True),
        Column("predicted time added", numeric=True),
        Column("plans"),
    )

    def names(one: Prediction) -> str:
        return units.fold(", ".join(one.plans), 200) or one.setting or "none"

    rows = tuple(
        row(units.size(one.step_memory_bytes), units.duration(one.cost_ms), names(one))
        for one in budget.curve
    )
    return Folded("Other budgets, predicted", blocks=(Table("", columns, rows),))


def _compared(budget: Budget) -> Table:
    columns = (
        Column("the same step otherwise"),
        Column("measured step memory", numeric=True),
        Column("measured step", numeric=True),
    )
    rows = tuple(
        row(one.name, units.size(one.step_memory_bytes), units.duration(one.step_ms))
        for one in budget.compared
    )
    return Table("", columns, rows)


def _sources(budget: Budget) -> str:
    """Say once what the numbers are and where they come from."""
    solver = budget.solver
    what = f"Step memory: what a step needs above its start; {budget.kind}, on {budget.device}."
    memory = "Predicted: what was measured without plans, less what a simulation of the step saves."
    lines = [f"{what} {memory} Predicted time: that of the recomputed nodes in a profiled step."]
    if solver.ways:
        places, plans = units.count(solver.places), units.count(solver.plans)
        line = (
            f"Chosen among {plans} plans in {places} places over {units.count(solver.instants)} instants in "
            f"{units.duration(1000 * solver.seconds)}"
        )
        if math.isclose(solver.cost_ms, budget.prediction.cost_ms, abs_tol=1e-3) and budget.plans:
            proven = "proven the cheapest" if solver.proven else "not proven the cheapest in the time allowed"
            line += f"; {proven}, as far as savings add up"
            if solver.gap is not None and not solver.proven:
                line += f" (at most {units.percent(solver.gap)} cheaper)"
        if budget.prediction.setting:
            line += f"; {units.many(solver.settings, 'other setting')} beside them"
        lines.append(f"{line}.")
    return "\n".join(lines)


# ---- the figure -----------------------------------------------------------------------------------------------------


_PREDICTED, _MEASURED, _OTHER, _TIMED = COLOURS[0], COLOURS[5], COLOURS[2], COLOURS[1]
_HEIGHT = 3.8  # inches


def budget_plot(budget: Budget) -> Figure:
    """Draw what plans add to a step's time against the memory that it needs: the front of what plans can do.

    The line is predicted, and so is the time of every mark but two: the answer's own, with its 95 % interval, and those
    of candidates. Measured memory is filled, and joined with its prediction, so that the length of the line is the
    error.
    """
    figure = new_figure(_HEIGHT)
    axes = figure.add_subplot()
    step_ms = budget.without.step_ms
    heading = (
        f"What less memory costs on {budget.device} (hollow and line: predicted; filled: memory measured)"
    )
    time = "added to a step [%]" if step_ms else "added to a step [ms]"
    dress(axes, heading, f"step memory [MiB] ({budget.kind})", time)
    if math.isnan(budget.without.step_memory_bytes):
        say(axes, "Nothing was measured.")
        return figure
    unit = step_ms / 100 if step_ms else 1.0
    _draw_curve(axes, budget, unit)
    _draw_measured(axes, budget, unit)
    if budget.limit_bytes > 0:
        where = budget.limit_bytes / MIB
        if (
            where < 2 * budget.without.step_memory_bytes / MIB
        ):  # a limit far above would press the rest together
            axes.axvline(where, color=INK, linestyle="--", linewidth=1, label="asked for", zorder=0)
    if budget.solver.ways:
        floor = budget.floor_bytes / MIB
        axes.axvline(
            floor, color=INK, linestyle=":", linewidth=1, label="floor: plans reach no lower", zorder=0
        )
    axes.margins(0.1)
    axes.set_xlim(left=0)
    key(axes, 1.02)
    return figure


def _draw_curve(axes: Axes, budget: Budget, unit: float) -> None:
    points = sorted(
        (one.step_memory_bytes / MIB, one.cost_ms / unit) for one in budget.curve or (budget.prediction,)
    )
    x, y = zip(*points, strict=True)
    axes.plot(
        x,
        y,
        color=_PREDICTED,
        marker="o",
        markersize=5,
        markerfacecolor="none",
        linewidth=1.2,
        drawstyle="steps-post",
        label="plans, predicted",
    )


def _draw_measured(axes: Axes, budget: Budget, unit: float) -> None:
    """Draw what was measured: plans at their predicted time, the answer also at its measured one, and other ways."""
    axes.plot(
        [budget.without.step_memory_bytes / MIB],
        [0.0],
        "s",
        color=_MEASURED,
        markersize=7,
        linestyle="none",
        label="without plans",
    )
    for number, trial in enumerate(budget.trials, start=1):
        told = trial.prediction
        label = "plans, memory measured" if number == 1 else None
        sizes = [told.step_memory_bytes / MIB, trial.step_memory_bytes / MIB]
        added = told.cost_ms / unit
        axes.plot(sizes, [added] * 2, color=_MEASURED, linewidth=0.8)
        axes.plot(sizes[1:], [added], "o", color=_MEASURED, markersize=7, linestyle="none", label=label)
        _name(axes, "answer" if trial is budget.best else str(number), sizes[1], added)
    _draw_timing(axes, budget)
    base = budget.compared[0].step_ms if budget.compared else None
    for position, one in enumerate(budget.compared):
        if one.step_ms is None or base is None:
            continue
        label = "candidates, both measured" if position == 0 else None
        x, added = one.step_memory_bytes / MIB, (one.step_ms - base) / unit
        axes.plot([x], [added], "D", color=_OTHER, markersize=6, linestyle="none", label=label)
        _name(axes, plain(one.name), x, added)


def _draw_timing(axes: Axes, budget: Budget) -> None:
    """Draw the answer where its time was measured, with the interval; not where the machine was not steady."""
    timing, best = budget.timing, budget.best
    if timing is None or best is None or not timing.holds or math.isnan(timing.low):
        return
    middle = 100 * (timing.ratio - 1)
    ends = [[max(0.0, middle - 100 * (timing.low - 1))], [max(0.0, 100 * (timing.high - 1) - middle)]]
    axes.errorbar(
        [best.step_memory_bytes / MIB],
        [middle],
        yerr=ends,
        fmt="^",
        color=_TIMED,
        markersize=7,
        capsize=3,
        linewidth=1.2,
        label="answer, time measured as well",
    )


def _name(axes: Axes, name: str, x: float, y: float) -> None:
    axes.annotate(name, (x, y), xytext=(6, 5), textcoords="offset points", fontsize=8, color=INK)
