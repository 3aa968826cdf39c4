"""Pages of what a lab is and offers: its status, recompute plans, graphs, the whole lab, the doctor's report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ortlab.options import Options
from ortlab.render import units
from ortlab.render.option_pages import difference_page
from ortlab.render.page import Block, Cell, Column, Folded, Mark, Note, Page, Table, row
from ortlab.render.run_pages import ENGINE_NAMES, ledger_page

if TYPE_CHECKING:
    from ortlab.doctor import Report
    from ortlab.graphs.stages import Graph, Value
    from ortlab.lab import Lab
    from ortlab.memory.plan import MemoryPlan
    from ortlab.status import Status

PLANS_SHOWN = 100
"""Plans that a page shows: those with the largest predicted savings."""

VALUES_SHOWN = 30
"""Inputs and outputs of a graph that a page shows, each."""

_STAGES = {
    "export": "the export, the gradient graph and the session",
    "graph": "the gradient graph and the session",
    "session": "the session",
}


def status_note(status: Status) -> Note:
    """Say in one sentence who executes the model and what the next step will cost."""
    name = ENGINE_NAMES.get(status.engine, status.engine)
    if status.state == "unwrapped":
        return Note("Unwrapped: the model runs in PyTorch as it did before.", Mark.QUIET)
    if status.state == "fallback":
        return Note(f"PYTORCH (fallback): {status.reason or 'no reason was recorded'}", Mark.BAD)
    if status.state == "ready":
        return Note(f"{name}: ready.", Mark.GOOD)
    stage = _STAGES.get(status.pending_stage, status.pending_stage)
    if status.state == "rebuild pending":
        return Note(f"{name}: rebuild pending; the next step redoes {stage}.", Mark.WARN)
    return Note(
        f"{name}: not built yet; the next step makes {stage}." if stage else f"{name}: not built yet."
    )


def status_page(status: Status) -> Page:
    """Show the status as its one sentence."""
    return Page("", (status_note(status),))


def lab_page(lab: Lab) -> Page:
    """Show a lab as its panel does: status, switches that were changed, runs."""
    defaults = Options()
    blocks: list[Block] = [status_note(lab.status)]
    if lab.options.changed(defaults):
        changes = difference_page(defaults, lab.options, ("default", "now"))
        blocks += [block for block in changes.blocks if isinstance(block, Table)]
    else:
        blocks.append(Note("All switches are at their defaults.", Mark.QUIET))
    blocks += ledger_page(lab.runs).blocks
    return Page(f"{lab.name}: {type(lab.module).__name__}", tuple(blocks))


def plan_page(plan: MemoryPlan) -> Page:
    """List the recompute plans, largest predicted saving first."""
    if not plan.rows:
        return Page(
            "Memory plan", (Note("ORT offers no recompute plan for this model.", Mark.QUIET), *_report(plan))
        )
    columns = (
        Column("plan", meaning="what memory_plan takes: cluster, strategy, count (-1 for all)"),
        Column("on", meaning="whether the present options apply it"),
        Column("places", numeric=True, meaning="reported by ORT: occurrences in the graph"),
        Column("saves", numeric=True, meaning="predicted by ORT for the first batch, not measured"),
        Column("what it does"),
    )
    rows = tuple(
        row(
            one.config,
            Cell("yes", Mark.GOOD) if one.enabled else Cell("-", Mark.QUIET),
            units.count(one.frequency),
            units.size(one.saving_bytes),
            one.sentence,
        )
        for one in plan.rows[:PLANS_SHOWN]
    )
    hidden = len(plan.rows) - len(rows)
    left_out = f"{units.count(hidden)} plans that save less: lab.plan().table() has them." if hidden else ""
    level = f"memory_level={plan.memory_level} chooses the plans; set it to 0 to choose your own."
    how = "Switch one on with lab.set(memory_plan=[...]), then rerun and compare."
    notes = (
        Note(f"Predicted by ORT for the first batch ({_sizes(plan)}), not measured. {_OVERLAP}", Mark.QUIET),
        Note(level if plan.memory_level else how),
    )
    return Page("Memory plan", (Table("", columns, rows, left_out), *notes, *_report(plan)))


def graph_page(graph: Graph) -> Page:
    """Summarise a graph: operators by count, inputs and outputs with their shapes."""
    from ortlab.graphs.stages import STAGES

    counts = (
        f"{units.count(graph.node_count)} nodes, {units.count(graph.initializer_count)} constants, "
        f"opset {graph.opset}, for {graph.mode}, digest {graph.digest}."
    )
    total = graph.node_count
    operators = Table(
        "Operators",
        (Column("operator"), Column("count", numeric=True), Column("share", numeric=True)),
        tuple(
            row(name, units.count(number), units.percent(number / total))
            for name, number in graph.operators.items()
        ),
    )
    return Page(
        f"Graph: {graph.stage} ({STAGES[graph.stage]})",
        (Note(counts), operators, _values("Inputs", graph.inputs), _values("Outputs", graph.outputs)),
    )


def report_page(report: Report) -> Page:
    """Show what the doctor found, and the command that mends what is wrong."""
    words = {
        "ok": Cell("ok", Mark.GOOD),
        "warn": Cell("WARNING", Mark.WARN),
        "fail": Cell("FAILED", Mark.BAD),
    }
    rows = tuple(row(check.name, words[check.status], check.found) for check in report.checks)
    verdict = Note("This installation can train with ONNX Runtime.", Mark.GOOD)
    if not report.ok:
        verdict = Note("This installation cannot train with ONNX Runtime as it is.", Mark.BAD)
    fixes = [Note(f"{check.name}: {check.fix}", Mark.WARN) for check in report.checks if check.fix]
    table = Table("", (Column("check"), Column("result"), Column("found")), rows)
    return Page("Doctor", (table, verdict, *fixes))


_OVERLAP = "Savings overlap where plans share operators, so they do not add up."


def _sizes(plan: MemoryPlan) -> str:
    return ", ".join(f"{name} = {size:,}" for name, size in plan.symbols.items()) or "no symbolic size"


def _report(plan: MemoryPlan) -> tuple[Folded, ...]:
    return (Folded("ORT's own report", plan.report),) if plan.report else ()


def _values(caption: str, values: tuple[Value, ...]) -> Table:
    shown = values[:VALUES_SHOWN]
    rows = tuple(row(one.name, one.dtype, " x ".join(map(str, one.shape)) or "scalar") for one in shown)
    hidden = len(values) - len(shown)
    return Table(
        f"{caption}: {units.count(len(values))}",
        (Column("name"), Column("type"), Column("shape", meaning="sizes; a name is a symbolic size")),
        rows,
        f"{units.count(hidden)} more." if hidden else "",
    )
