"""The pages of graphs: what is in one, the stages of a build, what differs between two; picture, tree and frame."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from html import escape
from pathlib import PurePath
from typing import TYPE_CHECKING, Final

from ortlab import units
from ortlab.graphs.diff_words import rows
from ortlab.graphs.nodes import PHASES
from ortlab.graphs.viewer.document import SANDBOX
from ortlab.render import graph_picture
from ortlab.render.graph_map import ITSELF, graph_map
from ortlab.render.page import (
    Block,
    Cell,
    Column,
    Drawing,
    Folded,
    Frame,
    Mark,
    Note,
    Page,
    Table,
    left_out,
    row,
)

if TYPE_CHECKING:
    from ortlab.graphs.diff import GraphDiff
    from ortlab.graphs.nodes import Phase, Value
    from ortlab.graphs.onnx_files import FileGraph
    from ortlab.graphs.stages import Graph, GraphSet
    from ortlab.graphs.summary import GraphSummary, Kind, OperatorRow, SummaryNode
    from ortlab.graphs.viewer.document import EmbeddedGraph

VALUES_SHOWN: Final = 12
"""Inputs and outputs of a graph that a page shows, each; the batch and the model's outputs come first."""

EDGES_SHOWN: Final = 12
"""Buffers kept for backward that a page shows: the largest."""

GROUPS_SHOWN: Final = 40
"""Layers or modules that a page shows, each."""

WELL_MAPPED: Final = 0.95
"""From this part of the forward nodes on, a page does not warn that modules are not known."""


def graph_page(graph: Graph) -> Page:
    """Say what is in a graph: operators by count and time, what it keeps for backward, inputs and outputs."""
    summary = graph.summary
    blocks: list[Block] = [
        Note(
            f"{units.count(graph.node_count)} nodes, {units.count(graph.initializer_count)} constants, "
            f"opset {graph.opset}, for {graph.mode}, digest {graph.digest}."
        ),
        *((Note(graph.note, Mark.QUIET),) if graph.note else ()),
        *_passes(summary),
        *_origins(summary),
        *_parameters(summary),
        *_stripped(graph),
        _operators(summary),
        *_times(graph),
        Folded(
            "Where the nodes come from",
            blocks=(
                _groups(summary, "By layer", lambda node: node.origin.layer or OUTSIDE),
                _groups(summary, "By module", lambda node: node.origin.module or ITSELF, sources=True),
            ),
        ),
        *_edges(graph),
        _values("Inputs", summary.inputs),
        _values("Outputs", summary.outputs),
    ]
    return Page(
        f"Graph{f' of {graph.part}' if graph.part else ''}: {graph.stage} ({graph.what})", tuple(blocks)
    )


def graph_set_page(graphs: GraphSet) -> Page:
    """Show all stages of a build, one row each."""
    columns = (
        Column("stage"),
        Column("what it is"),
        *(Column(name, numeric=True) for name in ("nodes", "forward", "backward")),
        Column("constants", numeric=True, meaning="tensors stored in the graph; parameters are fed to it"),
        Column("size", numeric=True, meaning="as ONNX stores it, without parameters"),
        Column("mapped", numeric=True, meaning="part of the forward nodes whose module is known"),
        Column("digest"),
    )
    rows = []
    for graph in graphs:
        counts, same = graph.summary.counts, graphs.same_as(graph)
        rows.append(
            row(
                graph.stage,
                f"{graph.what}; the same as {same}" if same else graph.what,
                units.count(graph.node_count),
                units.count(counts["forward"]),
                units.count(counts["backward"] + counts["recomputed"]),
                units.count(graph.initializer_count),
                units.size(len(graph.serialized)),
                units.percent(graph.summary.mapped_fraction),
                graph.digest,
            )
        )
    of = f" of {graphs.part}" if graphs.part else ""
    notes = tuple(Note(note, Mark.QUIET) for note in dict.fromkeys(one.note for one in graphs) if note)
    return Page(f"Graphs{of} for {graphs.mode}", (Table("", columns, tuple(rows)), *notes))


OUTSIDE: Final = "outside the layers"
UNKNOWN: Final = "not known"


def _passes(summary: GraphSummary) -> tuple[Note, ...]:
    counts = summary.counts
    if not counts["backward"] and not counts["recomputed"]:
        return ()
    again = f", {units.count(counts['recomputed'])} that compute again" if counts["recomputed"] else ""
    return (
        Note(
            f"{units.count(counts['forward'])} in the forward, {units.count(counts['backward'])} in the "
            f"backward{again}."
        ),
    )


def _origins(summary: GraphSummary) -> tuple[Note, ...]:
    total = len(summary.forward_nodes)
    if not total:
        return ()
    found = summary.origins
    known = total - found["not known"]
    words = (
        f"The module is known of {units.count(known)} of the {units.count(total)} forward nodes "
        f"({units.percent(summary.mapped_fraction)}): of {units.count(found['recorded'])} their names say it, of "
        f"{units.count(found['inferred'])} it is inferred from their results and neighbours. "
        f"The export recorded the line of source of {units.count(summary.lines_recorded)}."
    )
    return (Note(words, Mark.QUIET if summary.mapped_fraction >= WELL_MAPPED else Mark.WARN),)


def _parameters(summary: GraphSummary) -> tuple[Note, ...]:
    if not summary.parameter_count:
        return ()
    return (
        Note(
            f"It is fed {units.count(summary.parameter_count)} parameters, {units.size(summary.parameter_bytes)}; the "
            "graph does not hold them."
        ),
    )


def _stripped(graph: Graph) -> tuple[Note, ...]:
    if not graph.stripped_bytes:
        return ()
    return (
        Note(
            f"{units.size(graph.stripped_bytes)} of constants are left out, for viewing: this copy cannot run, and "
            "cannot be saved.",
            Mark.WARN,
        ),
    )


def _operators(summary: GraphSummary) -> Table:
    shown = _phases_of(summary)
    total = sum(one.count for one in summary.operators)
    total_ms = sum(one.total_ms for one in summary.operators)
    columns = [Column("operator"), Column("count", numeric=True), Column("share", numeric=True)]
    columns += [Column(phase, numeric=True, meaning=_MEANING[phase]) for phase in shown]
    if summary.is_measured:
        columns += [
            Column("time", numeric=True, meaning="measured, of the kernels of all its nodes"),
            Column("of time", numeric=True),
            *(Column(f"{phase} time", numeric=True, meaning="measured") for phase in shown),
        ]

    def cells(one: OperatorRow) -> list[str]:
        texts = [one.operator, units.count(one.count), units.percent(one.count / total if total else 0.0)]
        texts += [units.count(one.counts.get(phase, 0)) for phase in shown]
        if summary.is_measured:
            texts += [
                units.duration(one.total_ms),
                units.percent(one.total_ms / total_ms if total_ms else 0.0),
            ]
            texts += [units.duration(one.ms[phase]) if phase in one.ms else "" for phase in shown]
        return texts

    caption = "Operators by time, measured" if summary.is_measured else "Operators"
    return Table(caption, tuple(columns), tuple(row(*cells(one)) for one in summary.operators))


_MEANING: Final = {
    "forward": "nodes that run before the outputs are returned",
    "backward": "nodes that run in the backward",
    "recomputed": "nodes of the forward that run a second time in the backward",
}


def _phases_of(summary: GraphSummary) -> tuple[Phase, ...]:
    """Return the passes that are told apart: none where there is a forward only."""
    counts = summary.counts
    there = tuple(phase for phase in PHASES if counts[phase])
    return there if len(there) > 1 else ()


def _times(graph: Graph) -> tuple[Note, ...]:
    trace = graph.trace
    if trace is None:
        return ()
    unmeasured = graph.summary.unmeasured
    missing = f" {units.count(unmeasured)} nodes have no time: they did not run." if unmeasured else ""
    again = f", {units.duration(trace.recomputed_ms)} of it a second time" if trace.recomputed_ms else ""
    return (
        Note(
            f"Measured with ONNX Runtime's profiler, which slows the step: {units.duration(trace.forward_ms)} in the "
            f"forward, {units.duration(trace.backward_ms)} in the backward{again}; each kernel's time is the shortest "
            f"of {units.count(trace.steps)} steps.{missing}"
        ),
    )


def _groups(
    summary: GraphSummary, caption: str, name: Callable[[SummaryNode], str], *, sources: bool = False
) -> Table:
    """Count nodes by layer or module, in the order of the graph."""
    groups: dict[str, list[SummaryNode]] = {}
    for node in summary.nodes:
        if node.phase is not None:
            groups.setdefault(name(node) if node.origin.is_known else UNKNOWN, []).append(node)
    phases = _phases_of(summary)
    columns = [Column(caption.removeprefix("By ")), Column("nodes", numeric=True)]
    columns += [Column(phase, numeric=True, meaning=_MEANING[phase]) for phase in phases]
    columns += [Column("time", numeric=True, meaning="measured")] if summary.is_measured else []
    columns += [
        Column("source", meaning="lines that the export recorded; else where its forward begins")
    ] * sources
    rows = []
    for title, nodes in list(groups.items())[:GROUPS_SHOWN]:
        texts = [title, units.count(len(nodes))]
        texts += [units.count(sum(node.phase == phase for node in nodes)) for phase in phases]
        texts += [units.duration(sum(node.ms or 0.0 for node in nodes))] if summary.is_measured else []
        texts += [_sources(nodes)] * sources
        rows.append(row(*texts))
    hidden = len(groups) - len(rows)
    rest = left_out(hidden, "more: graph.summary.node_table() has all nodes.")
    return Table(caption, tuple(columns), tuple(rows), rest)


def _sources(nodes: Iterable[SummaryNode]) -> str:
    """Write the lines of a module, by file and without its folder: "modeling_bert.py:77-84"."""
    recorded = {node.origin.source for node in nodes if node.origin.line_recorded}
    begins = {node.origin.source for node in nodes if node.origin.source}
    lines: dict[str, list[int]] = {}
    for source in recorded or begins:
        file, _, line = source.rpartition(":")
        lines.setdefault(PurePath(file).name, []).append(int(line))
    return ", ".join(
        f"{file}:{min(found)}" if len(set(found)) == 1 else f"{file}:{min(found)}-{max(found)}"
        for file, found in sorted(lines.items())
    )


def _edges(graph: Graph) -> tuple[Block, ...]:
    activations = graph.activations
    if activations is None:
        return ()
    count = sum(len(one.kept_by) for one in activations.rows)
    columns = (
        Column("made by"),
        Column("module"),
        Column("size", numeric=True, meaning="bytes of the buffer, worked out from its shape"),
        Column("read by", meaning="nodes of the backward; the output, where the model returns it"),
    )
    rows = tuple(
        row(
            one.operator,
            one.module or ITSELF,
            units.size(one.bytes) if one.bytes is not None else Cell("unknown", Mark.WARN),
            _readers(one.kept_by, returned=one.returned),
        )
        for one in activations.rows[:EDGES_SHOWN]
    )
    hidden = len(activations.rows) - len(rows)
    caption = (
        f"Kept from forward to backward: {units.count(len(activations.rows))} buffers, "
        f"{units.size(activations.total_bytes)}, over "
        f"{units.count(count)} edges"
    )
    rest = left_out(hidden, "more: graph.summary.edge_table() has all edges.")
    return (Table(caption, columns, rows, rest),)


def _readers(names: tuple[str, ...], *, returned: bool) -> str:
    read = [units.many(names, "node")] if names else []
    return ", ".join([*read, *(["the output"] if returned else [])])


def _values(caption: str, values: tuple[tuple[Value, Kind], ...]) -> Table:
    shown = values[:VALUES_SHOWN]
    rows = tuple(row(one.name, one.dtype, _shape(one), kind) for one, kind in shown)
    hidden = len(values) - len(shown)
    return Table(
        f"{caption}: {units.count(len(values))}",
        (
            Column("name"),
            Column("type"),
            Column("shape", meaning="sizes; a name is a symbolic size"),
            Column("what"),
        ),
        rows,
        left_out(hidden, "more."),
    )


def _shape(value: Value) -> str:
    if not value.dtype:
        return UNKNOWN
    return " x ".join(map(str, value.shape)) or "scalar"


# ---- picture, tree and frame ----------------------------------------------------------------------------------------


def with_picture(graph: Graph, summary: Page) -> Page:
    """Put the still picture into the page of a graph, behind its first sentence, and the tree of modules at the end."""
    said, drawn = graph_picture.description(graph), graph_map(graph)
    picture = Drawing(said, lambda: graph_picture.picture(drawn, said))
    first, *others = summary.blocks or (Note(""),)
    tree = Folded("Modules and their operators", graph_picture.tree(drawn))
    return replace(summary, blocks=(first, picture, *others, tree))


def file_page(graph: FileGraph, summary: Page) -> Page:
    """Put what was not read of a file before the rest of its page."""
    notes = tuple(Note(one, Mark.QUIET) for one in graph.notes)
    return replace(summary, blocks=(*notes, *summary.blocks))


def embedded_page(shown: EmbeddedGraph, summary: Page) -> Page:
    """Put the frame under the summary, or say why there is none."""
    return replace(summary, blocks=(*summary.blocks, *_view(shown)))


def frame(shown: EmbeddedGraph) -> str:
    """Write the frame: sandboxed, with the whole page in it."""
    return (
        f'<iframe title="{escape(graph_picture.description(shown.graph))}" sandbox="{SANDBOX}" loading="lazy" '
        f'style="width: 100%; height: {shown.height}px; border: 1px solid #8888; box-sizing: border-box" '
        f'srcdoc="{escape(shown.document.html)}"></iframe>'
    )


def _view(shown: EmbeddedGraph) -> tuple[Block, ...]:
    if shown.refused:
        return (Note(f"The graph cannot be browsed here. {shown.refused}", Mark.WARN),)
    reduced = shown.document.reduced
    words = (Note(reduced, Mark.QUIET),) if reduced else ()
    said = "the graph node by node, which can be browsed in the HTML of the notebook"
    return (*words, Frame(said, lambda: frame(shown)))


# ---- two graphs -----------------------------------------------------------------------------------------------------


DIFFERENCES_SHOWN: Final = 60
"""Differences that a page lists, in the order of the sentences."""

_DIFFERENCE: Final = (
    Column("difference"),
    Column("operators", meaning="what the nodes compute, before and after"),
    Column("module", meaning="where in the model the nodes come from; empty where that is not known"),
    Column("before", meaning="names of the nodes in the first graph"),
    Column("after", meaning="names of the nodes in the second graph"),
    Column("more"),
)

_MARKS: Final = {"removed": Mark.BAD, "added": Mark.GOOD, "changed": Mark.WARN}


def graph_diff_page(diff: GraphDiff) -> Page:
    """Say what is different between two graphs, in sentences, as a picture, and one by one."""
    title = f"Difference of graphs: {diff.before.name} -> {diff.after.name}"
    if diff.is_empty:
        same = f"No difference: both compute the same, in {units.count(len(diff.matched))} matched nodes."
        todo = (
            "Set a switch, then ask again: lab.set(memory_level=1).graph_diff(), or %ort_graph --changes. "
            "Or name one: lab.graph_diff(memory_level=1)."
        )
        return Page(title, (Note(same, Mark.GOOD), Note(todo, Mark.QUIET)))
    blocks: list[Block] = [
        Note("\n".join(diff.sentences)),
        Note(
            f"{units.count(diff.before.nodes)} nodes before, {units.count(diff.after.nodes)} after; "
            f"{units.count(len(diff.matched))} of them are in both."
            + (_constants(diff) if diff.before.constant_nodes != diff.after.constant_nodes else ""),
            Mark.QUIET,
        ),
        *_picture(diff),
        *(Note(note, Mark.QUIET) for note in dict.fromkeys(graph.note for graph in diff.graphs) if note),
        Folded("One by one", blocks=(_differences(diff),), is_open=True),
    ]
    return Page(title, tuple(blocks))


def _constants(diff: GraphDiff) -> str:
    return (
        f" Constants are no nodes here: {units.count(diff.before.constant_nodes)} Constant nodes and "
        f"{units.count(diff.before.constants)} stored constants before, "
        f"{units.count(diff.after.constant_nodes)} and {units.count(diff.after.constants)} after."
    )


def _picture(diff: GraphDiff) -> list[Block]:
    """Draw the second graph by module, with what is different marked, and what only the first has."""
    if not diff.graphs:
        return []
    drawn = graph_map(diff.graphs[1], diff)
    said = f"{diff.after.name}: {', '.join(f'{count} {mark}' for mark, count in drawn['marks'].items())}."
    words = f"What changed, by module. {said}"
    return [Note(said, Mark.QUIET), Drawing(words, lambda: graph_picture.picture(drawn, words))]


def _differences(diff: GraphDiff) -> Table:
    found = list(rows(diff))
    shown = [
        row(
            Cell(one.difference, _MARKS.get(one.difference.rpartition(" ")[2], Mark.PLAIN)),
            one.operators,
            one.module,
            one.before,
            one.after,
            one.more,
        )
        for one in found[:DIFFERENCES_SHOWN]
    ]
    hidden = len(found) - len(shown)
    return Table(
        f"{units.count(len(found))} differences",
        _DIFFERENCE,
        tuple(shown),
        left_out(hidden, "more: diff.table() has them all."),
        sorts=True,
    )
