"""What switches change in a graph: the other graph is built beside what the lab has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ortlab.analyses.builds import builds, engine_of
from ortlab.analyses.graphs import check_stage, graph, graph_of
from ortlab.errors import OptionError
from ortlab.graphs.diff import GraphDiff, diff
from ortlab.graphs.stages import Graph
from ortlab.options.options import Options, setting_words

if TYPE_CHECKING:
    from ortlab.runs.bench import Bench


def graph_diff(
    bench: Bench,
    /,
    before: str | Mapping[str, object] | Graph | None = None,
    after: str | Mapping[str, object] | Graph | None = None,
    *,
    stage: str = "",
    part: str | None = None,
    **changes: object,
) -> GraphDiff:
    """Say what is different between two stages of the present build, or between the graphs of two sets of switches.

    Without anything to compare: what the present switches change against those of the first run, or, where they are
    the same, against the defaults.

    A graph that is not built yet is built for that: the last step runs once from its start, in PyTorch, and ONNX
    Runtime builds what it would have run. Afterwards, also after a failure or an interrupt, weights, gradients,
    optimizers, random state, switches, sessions and ledger are as they were before the call.

    Parameters
    ----------
    before, after
        Two stages, "gradient" and "execution"; or two sets of switches, each a dict as `set` takes it, an empty one
        for the switches as they are; or two graphs, as `graph` returns them. One set of switches alone is compared
        with those of the lab.
    stage
        With switches: which graph is compared, "execution" if not given.
    part
        Path of the part, where several parts of the model are wrapped.
    **changes
        Instead of `after`: switches that are compared with those of the lab.

    Returns
    -------
    GraphDiff
        The differences.

    Raises
    ------
    OptionError
        If it is not clear what is to be compared, there is no such stage, part or switch, or a switch cannot act
        here.
    BuildError
        If a graph cannot be built.
    StepError
        If a graph has to be built and no step has run yet, or one is running.
    Exception
        Whatever the step raises.

    Examples
    --------
    >>> lab.graph_diff("gradient", "execution").sentences
    ('Fused Transpose and MatMul into FusedMatMul, 14 times, in encoder.layer.0 to 1.',)
    >>> lab.graph_diff(memory_level=1)
    >>> lab.set(memory_level=1).graph_diff()
    >>> lab.graph_diff({"compute_optimizer": False}, {}, stage="optimized")
    """
    bench.check_usable("compare graphs")
    if before is None and after is None and not changes:
        return _changes(bench, stage, part)
    first, second = _sides(before, after, changes)
    if isinstance(first, str) and isinstance(second, str):
        if stage:
            raise _unclear(f"stages {first!r} and {second!r}, and stage={stage!r}")
        return diff(graph(bench, first, part), graph(bench, second, part))
    if stage:
        check_stage(stage)
    if isinstance(first, Graph) and isinstance(second, Graph):
        return diff(first, second)
    sides = [
        (one, f"{one.stage} for {one.mode}")
        if isinstance(one, Graph)
        else _graph_with(bench, one, stage, part)
        for one in (first, second)
    ]
    return diff(sides[0][0], sides[1][0], names=(sides[0][1], sides[1][1]))


def _graph_with(
    bench: Bench, side: str | Mapping[str, object], stage: str, part: str | None
) -> tuple[Graph, str]:
    """Return the graph of a stage, or of some switches, and what to call it."""
    if isinstance(side, str):
        return graph(bench, side, part), side
    wished = bench.configuration.tried(side, bench.have)
    if "engine" in side and wished.engine != "ort":
        raise OptionError(
            f"Engine {wished.engine!r} has no graph to compare.",
            why="Only ONNX Runtime runs ONNX graphs.",
            fix="Leave engine out: graphs are those of ONNX Runtime, whichever engine is set.",
        )
    return _graph_of(bench, wished.options, stage, part), _words(side, wished.options) or "as set"


def _graph_of(bench: Bench, options: Options, stage: str, part: str | None) -> Graph:
    """Return the graph of some switches, built beside the lab's if it is not there."""
    engine_of(bench, part, "a graph")
    with builds(bench, part, options=options) as found:
        path, execution = found.only
        note = found.note if options == bench.options else ""
        return replace(graph_of(bench, execution, stage or "execution", path), note=note)


def _changes(bench: Bench, stage: str, part: str | None) -> GraphDiff:
    """Say what the present switches change against those of the first run, or against the defaults."""
    if stage:
        check_stage(stage)
    bench.last_experiment()
    present = bench.options
    first = bench.runs[0] if len(bench.runs) else None
    if first is not None and first.options != present:
        base, name = first.options, f"run {first.number}"
    else:
        base, name = Options(), "the defaults"
    changed = base.changed(present)
    before = _graph_of(bench, base, stage, part)
    after = _graph_of(bench, present, stage, part) if changed else before
    names = (f"{name}: {_words(changed, base)}", _words(changed, present)) if changed else (name, "as set")
    return diff(before, after, names=names)


def _sides(
    before: object, after: object, changes: Mapping[str, object]
) -> tuple[str | Mapping[str, object] | Graph, str | Mapping[str, object] | Graph]:
    """Return what is compared with what."""
    if changes and (before is not None or after is not None):
        raise _unclear("switches by name beside something else")
    if changes:
        return {}, changes
    if after is None and isinstance(before, Mapping) and before:
        return {}, before
    for one in (before, after):
        if not isinstance(one, (str, Mapping, Graph)):
            given = "one thing only" if one is None else f"a {type(one).__name__}"
            raise _unclear(given if before is not None else "nothing")
    if isinstance(before, str) != isinstance(after, str) and not isinstance(before, Graph | type(None)):
        raise _unclear("a stage and something else")
    return before, after  # type: ignore[return-value] # checked above


def _words(names: Iterable[str], options: Options) -> str:
    return ", ".join(setting_words(name, getattr(options, name)) for name in names)


def _unclear(given: str) -> OptionError:
    return OptionError(
        f"It is not clear which graphs to compare: {given} was given.",
        fix='For example lab.graph_diff("gradient", "execution"), lab.graph_diff(memory_level=1) or '
        'lab.graph_diff({"compute_optimizer": False}, {}, stage="optimized").',
    )
