"""Pages of a profiled step and of what it shows: times and FLOPs by node, Triton kernels, tuned operators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ortlab import units
from ortlab.errors import BuildError
from ortlab.memory.trace import lifetimes
from ortlab.render.graph_pages import graph_page, with_picture
from ortlab.render.page import Block, Cell, Code, Column, Mark, Note, Page, Table, left_out, row
from ortlab.render.plots import COLOURS, INK, drawing, dress, new_figure, plain, say

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ortlab.graphs.flop_formulas import Shape
    from ortlab.graphs.flops import Flops, FlopSavings, Kind, NodeChange
    from ortlab.graphs.triton_kernels import TritonKernel, TritonKernels
    from ortlab.memory.trace import Trace
    from ortlab.records.tuning_results import TuningResults


OPERATORS_SHOWN: Final = 20
"""Rows of operators that a page shows: those that take the most time."""


def trace_page(trace: Trace) -> Page:
    """List operators by time, forward, backward and recomputed apart."""
    table = trace.table()
    total = trace.step_ms
    columns = (
        Column("operator"),
        Column("pass"),
        Column("nodes", numeric=True),
        Column("time", numeric=True),
        Column("share", numeric=True, meaning="of the whole step"),
        Column("results", numeric=True),
    )
    rows = tuple(
        row(
            one["operator"],
            one["pass"],
            units.count(one["nodes"]),
            units.duration(one["time [ms]"]),
            units.percent(one["time [ms]"] / total if total else 0.0),
            units.size(one["results [bytes]"]),
        )
        for one in table.head(OPERATORS_SHOWN).to_dict("records")
    )
    more = len(table) - len(rows)
    left_out = f"{units.many(more, 'more row')}: trace.table() has them." if more else ""
    again = f", {units.duration(trace.recomputed_ms)} of it a second time" if trace.recomputed_ms else ""
    found = lifetimes(trace)
    at = trace.nodes[found.peak_at]
    sentences = (
        f"Kernels took {units.duration(trace.forward_ms)} in the forward and {units.duration(trace.backward_ms)} in "
        f"the backward{again}. Measured with ONNX Runtime's profiler, which slows the step; each kernel's time is the "
        f"shortest of {units.many(trace.steps, 'step')}."
    )
    memory = (
        f"Buffers of {units.size(found.peak)} are alive at the peak, in the {'backward' if at.backward else 'forward'} "
        f"where {at.operator} runs: simulated from measured sizes. {units.size(sum(one.size for one in found.kept))} "
        "are kept from the forward for the backward."
    )
    return Page(
        "Profile of a step",
        (
            Note(sentences),
            *_account(trace),
            *_modules(trace),
            Table("Operators by time", columns, rows, left_out=left_out),
            Note(memory),
        ),
    )


def _account(trace: Trace) -> list[Table]:
    """Say where a step's time goes, in shares that add up, where the profiler saw whole steps."""
    if not trace.beside:
        return []
    columns = (Column("part"), Column("time", numeric=True), Column("share", numeric=True))
    rows = [
        row(part, units.duration(ms), units.percent(ms / trace.step_ms if trace.step_ms else 0.0))
        for part, ms in trace.account().items()
    ]
    return [Table("Where a step's time goes", columns, tuple(rows))]


def _modules(trace: Trace) -> list[Block]:
    """Hold each module's time against PyTorch's, where that was measured, by what ONNX Runtime takes longer."""
    if not trace.eager:
        return []
    table = trace.by_module()
    columns = (
        Column("module", whole=True),
        Column("class"),
        Column("ONNX Runtime", numeric=True),
        Column("share", numeric=True, meaning="of the whole step on ONNX Runtime"),
        Column("PyTorch", numeric=True),
        Column("ratio", numeric=True, meaning="ONNX Runtime's time over PyTorch's"),
    )
    rows = tuple(
        row(
            one["module"] or "the model itself",
            one["class"],
            units.duration(one["time [ms]"]),
            units.percent(one["time [ms]"] / trace.step_ms if trace.step_ms else 0.0),
            units.duration(one["eager [ms]"]),
            units.ratio(one["time [ms]"] / one["eager [ms]"]) if one["eager [ms]"] else "",
        )
        for one in table.head(OPERATORS_SHOWN).to_dict("records")
    )
    more = len(table) - len(rows)
    words = (
        f"Its modules take {units.duration(table['time [ms]'].sum())} on ONNX Runtime and "
        f"{units.duration(table['eager [ms]'].sum())} in PyTorch. Layers are added up. A module's time is its own, "
        "forward and backward, without its children's. ONNX Runtime may compute two modules in one kernel, whose time "
        "stands at one of them. PyTorch's times hold its Python as well."
    )
    return [
        Table(
            "Beside PyTorch, module by module: what ONNX Runtime loses most on comes first",
            columns,
            rows,
            left_out=f"{units.many(more, 'more row')}: trace.by_module() has them." if more else "",
        ),
        Note(words, Mark.QUIET),
    ]


# ---- FLOPs ----------------------------------------------------------------------------------------------------------


ROWS_SHOWN: Final = 20
"""Rows of a table that a page shows: those with the most FLOPs."""

_RULE: Final = (
    "Counted from the shapes that the nodes ran with: products of matrices, convolutions, attention and recurrent "
    "cells; a multiplication and an addition are two operations. Element-wise operators count as none."
)


def flops_page(flops: Flops) -> Page:
    """Say what a step calculates, by module and by operator."""
    spent = flops.ms
    rate = (
        f", {units.flops(flops.total / spent * 1000)}/s in the {units.duration(spent)} of their kernels"
        if spent
        else ""
    )
    again = f", {units.flops(flops.recomputed)} of it a second time" if flops.recomputed else ""
    blocks: list[Block] = [
        Note(
            f"{units.flops(flops.total)} in a step: {units.flops(flops.forward)} forward and "
            f"{units.flops(flops.backward)} backward{again}{rate}."
        ),
        _summed(flops, "module"),
        _summed(flops, "operator"),
    ]
    if flops.uncounted:
        operators = ", ".join(dict.fromkeys(node.operator for node in flops.uncounted))
        blocks.append(
            Note(
                f"{units.count(len(flops.uncounted))} nodes are not counted, because their shapes do not tell what "
                f"they calculate: {operators}.",
                Mark.WARN,
            )
        )
    times = "Times: measured with ONNX Runtime's profiler, which slows the step."
    blocks.append(Note(f"{_RULE} {times} All nodes: flops.table().", Mark.QUIET))
    return Page(f"FLOPs of a step{_of(flops)}", tuple(blocks))


def savings_page(savings: FlopSavings) -> Page:
    """Say what a switch saves, where, and what was moved for that."""
    blocks: list[Block] = [Note(_saved(savings), Mark.GOOD if savings.saved > 0 else Mark.PLAIN)]
    if savings.moved:
        columns = (
            Column("leaves rows out"),
            Column("of", meaning="module that the model's own code does it in"),
            Column("what it reads is made in", meaning="module that it has been moved behind"),
            Column("shape", meaning="of what it reads"),
            Column("left", meaning="shape of its result"),
        )
        rows = tuple(
            row(
                node.operator.rpartition(".")[2],
                node.module or "the model itself",
                node.reads or "the model itself",
                _shape(node.inputs[0]) if node.inputs else units.MISSING,
                _shape(node.outputs[0]),
            )
            for node in savings.moved
        )
        blocks.append(Table("Moved towards the inputs, in the forward", columns, rows))
    changes = [one for one in savings.changes if one.saved]
    if changes:
        blocks.append(_changes(changes))
        blocks.append(
            drawing(
                "FLOPs by module with and without the switch; ortlab.plot(savings) draws it.",
                lambda: savings_plot(savings),
            )
        )
    fewer = sum(one.fewer_elements for one in savings.passed if not one.saved)
    if fewer > 0:
        without = [one for one in savings.passed if not one.saved]
        blocks.append(
            Note(
                f"{units.many(without, 'element-wise node')} of the forward made "
                f"{units.count(fewer)} numbers fewer: savings.table() has them."
            )
        )
    blocks.append(Note(_RULE, Mark.QUIET))
    return Page(f"FLOPs saved: {savings.changed}", tuple(blocks))


def _saved(savings: FlopSavings) -> str:
    before, after = units.flops(savings.without.total), units.flops(savings.having.total)
    if savings.saved > 0:
        return f"{units.percent(savings.share)} of the step's FLOPs are saved: {after} instead of {before}."
    if savings.saved < 0:
        return f"The step calculates more: {after} instead of {before}."
    return f"Nothing is saved: {after} either way. No slice or gather of this model could be moved ahead of a product."


def _summed(flops: Flops, kind: Kind) -> Table:
    sums = flops.by(kind)
    shown = list(sums.items())[:ROWS_SHOWN]
    times = {
        key: sum(node.ms for node in flops.nodes if node.flops and node.key(kind) == key) for key, _ in shown
    }
    rows = tuple(
        row(
            key or "the model itself",
            units.flops(count),
            units.percent(count / flops.total),
            units.duration(times[key]),
            f"{units.flops(count / times[key] * 1000)}/s" if times[key] else units.MISSING,
        )
        for key, count in shown
    )
    columns = (Column(kind), *(Column(name, numeric=True) for name in ("FLOPs", "share", "time", "speed")))
    more = len(sums) - len(shown)
    left_out = f'{units.count(more)} more: flops.by("{kind}") has them.' if more else ""
    return Table(f"By {kind}, forward and backward", columns, rows, left_out)


def _changes(changes: list[NodeChange]) -> Table:
    columns = (
        Column("node"),
        Column("module"),
        Column("pass"),
        Column("result without", meaning="shape of its result without the switch"),
        Column("with", meaning="shape of its result with the switch"),
        Column("saved", numeric=True, meaning="FLOPs"),
    )
    rows = tuple(
        row(
            units.fold(one.node.operator.rpartition(".")[2], 60),
            one.node.module or "the model itself",
            "backward" if one.node.backward else "forward",
            _shape(one.without.outputs[0]) if one.without else "-",
            _shape(one.having.outputs[0]) if one.having else "-",
            Cell(units.flops(one.saved), Mark.GOOD if one.saved > 0 else Mark.WARN),
        )
        for one in changes[:ROWS_SHOWN]
    )
    more = len(changes) - len(rows)
    left_out = f"{units.count(more)} more: savings.table() has them." if more else ""
    return Table("Saved, node by node", columns, rows, left_out)


def _shape(shape: Shape) -> str:
    return " x ".join(map(str, shape)) or "one number"


def _of(flops: Flops) -> str:
    words = [f"part {flops.part}"] if flops.part else []
    words += [flops.configuration] if flops.configuration else []
    return f": {', '.join(words)}" if words else ""


# ---- the figures ----------------------------------------------------------------------------------------------------


MODULES_SHOWN: Final = 16
_MEGA: Final = 1e6


def flops_plot(flops: Flops) -> Figure:
    """Draw the FLOPs of each module, forward and backward apart, the largest first."""
    names = list(flops.by("module"))[:MODULES_SHOWN]
    figure = new_figure(1.2 + 0.28 * max(len(names), 1))
    axes = figure.add_subplot()
    dress(axes, "FLOPs of a step, by module", "MFLOPs", "")
    if not names:
        say(axes, "No node multiplies matrices.")
        return figure
    left = [0.0] * len(names)
    for backward, colour in ((False, COLOURS[0]), (True, COLOURS[1])):
        widths = [
            sum(node.flops or 0 for node in flops.nodes if node.module == name and node.backward is backward)
            / _MEGA
            for name in names
        ]
        label = "backward" if backward else "forward"
        axes.barh(list(map(_label, names)), widths, left=left, label=label, color=colour, height=0.6)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.legend(frameon=False, labelcolor=INK, fontsize=8)
    return figure


def savings_plot(savings: FlopSavings) -> Figure:
    """Draw the FLOPs of the modules that change, without the switch and with it."""
    names = list(savings.by_module())[:MODULES_SHOWN]
    figure = new_figure(1.4 + 0.4 * max(len(names), 1))
    axes = figure.add_subplot()
    dress(axes, f"FLOPs of a step: {units.printable(savings.changed)}", "MFLOPs", "")
    if not names:
        say(axes, "No module calculates more or less.")
        return figure
    places = range(len(names))
    for offset, flops, label, colour in (
        (-0.2, savings.without, "without", COLOURS[1]),
        (0.2, savings.having, "with", COLOURS[0]),
    ):
        sums = flops.by("module")
        axes.barh(
            [place + offset for place in places],
            [sums.get(name, 0) / _MEGA for name in names],
            label=label,
            color=colour,
            height=0.36,
        )
    axes.set_yticks(list(places), list(map(_label, names)))
    axes.invert_yaxis()
    axes.legend(frameon=False, labelcolor=INK, fontsize=8)
    return figure


def _label(name: str) -> str:
    return plain(units.fold(units.printable(name), 44)) or "the model itself"


_COLUMNS: Final = (
    Column("sub-graph", numeric=True),
    Column("operators", whole=True),
    Column(
        "run by", meaning="nodes of the lab's graph that run it; none if it is of another graph", whole=True
    ),
    Column("kernels", numeric=True, meaning="Triton functions in its newest code"),
    Column("versions of code", numeric=True, meaning="one for each choice of sizes, and for each process"),
    Column("key", meaning="ORT's hash of the sub-graph, as in the names of the files"),
)


def kernels_page(found: TritonKernels) -> Page:
    """List the sub-graphs."""
    rows = tuple(_row(one) for one in found)
    note = (
        "%ort_triton_kernels N, or ortlab.show_graph(kernels.kernel(N)), draws one with its code. ONNX Runtime deletes "
        "nothing "
        "in the folder: what no node runs is of another graph, or of an earlier one."
    )
    return Page(
        f"Sub-graphs that Triton runs, in {found.folder}", (Table("", _COLUMNS, rows), Note(note, Mark.QUIET))
    )


def kernel_page(kernel: TritonKernel) -> Page:
    """Show one: what is in it, who runs it, and its code."""
    blocks: list[Block] = [Note(_run_by(kernel))]
    for form, words in kernel.forms.items():
        page = with_picture(kernel.graph(form), graph_page(kernel.graph(form)))
        blocks += [Note(f"{form.capitalize()}: {words}."), *page.blocks]
    if kernel.source:
        blocks.append(Code(code_title(kernel), kernel.source))
    else:
        blocks.append(Note("No code was generated for it.", Mark.WARN))
    return Page(f"Sub-graph {kernel.number} that Triton runs: {_operators(kernel)}", tuple(blocks))


def code_title(kernel: TritonKernel) -> str:
    """Say what the code beside a sub-graph is; empty where there is none."""
    if not kernel.sources:
        return ""
    older = len(kernel.sources) - 1
    more = f", the newest of {units.count(older + 1)}" if older else ""
    return f"{kernel.sources[-1].name}: {units.many(kernel.functions, 'Triton kernel')}{more}"


def _row(kernel: TritonKernel) -> tuple[Cell, ...]:
    return row(
        units.count(kernel.number),
        _operators(kernel),
        ", ".join(kernel.nodes) if kernel.nodes else Cell("none of this lab's graph", Mark.QUIET),
        _functions(kernel),
        units.count(len(kernel.sources)),
        str(kernel.key),
    )


def _functions(kernel: TritonKernel) -> str | Cell:
    if not kernel.sources:
        return Cell("none generated", Mark.WARN)
    try:
        return units.count(len(kernel.functions))
    except BuildError:
        return Cell("not readable", Mark.WARN)


def _operators(kernel: TritonKernel) -> str:
    try:
        nodes = kernel.graph("original").model.graph.node
    except BuildError as error:  # one damaged file does not hide the others
        return f"not known: {error.what}"
    return ", ".join(node.op_type for node in nodes)


def _run_by(kernel: TritonKernel) -> str:
    if not kernel.nodes:
        return f"No node of the lab's graph runs it. Key {kernel.key}."
    return f"Run by {', '.join(kernel.nodes)}. Key {kernel.key}."


# ---- what ORT has tuned ---------------------------------------------------------------------------------------------


TUNED_SHOWN: Final = 200
_TUNED: Final = (
    Column("operator", whole=True),
    Column("sizes", whole=True),
    Column("implementation", numeric=True, meaning="number of the fastest; 0 is taken without tuning"),
    Column("provider"),
)


def tuning_page(found: TuningResults) -> Page:
    """List the choices; ORT keeps no times of them."""
    shown = found.operators[:TUNED_SHOWN]
    hidden = len(found.operators) - len(shown)
    rows = tuple(row(one.operator, one.shape, str(one.choice), one.provider) for one in shown)
    blocks: list[Block] = []
    if rows:
        rest = left_out(hidden, "more: `table()` has them.")
        blocks.append(Table("", _TUNED, rows, rest))
    else:
        blocks.append(Note("Nothing was tuned.", Mark.QUIET))
    for provider, facts in found.validators.items():
        words = ", ".join(f"{name} {value}" for name, value in facts.items())
        blocks.append(Note(f"{provider} takes them where these are the same: {words}.", Mark.QUIET))
    return Page(f"Tuning results of {found.path}", tuple(blocks))
