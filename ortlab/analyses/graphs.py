"""The ONNX graphs of the present switches, what other switches change in them, their FLOPs, and Triton's kernels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from ortlab.analyses import memory, profiling
from ortlab.analyses.builds import builds, engine_of
from ortlab.analyses.profiling import profiled_step
from ortlab.errors import BuildError, OptionError
from ortlab.graphs.diff import GraphDiff, diff
from ortlab.graphs.flops import Flops, FlopSavings
from ortlab.graphs.stages import STAGES, Graph, GraphSet
from ortlab.graphs.triton_kernels import FOLDER, TritonKernels, fused_nodes, read_triton_kernels
from ortlab.options.catalogue import check_names
from ortlab.options.configuration import engine_kind
from ortlab.options.options import Options, setting_words, unmet
from ortlab.records.runs import Run

if TYPE_CHECKING:
    from ortlab.engine.execution import Execution
    from ortlab.runs.bench import Bench

Mode = Literal["training", "inference"]

Compared = str | Mapping[str, object] | Graph | Run
"""What `graph_diff` compares: a stage, switches, a graph, a run."""

_MODES: Final[tuple[Mode, ...]] = ("training", "inference")


def graph(
    bench: Bench,
    stage: str = "execution",
    part: str | None = None,
    *,
    mode: Mode | None = None,
    activations: bool = False,
    profile: bool = False,
) -> Graph:
    """Return one of the ONNX graphs of the present switches.

    If it is not built yet, it is built from the last step, beside what the lab has; see `Graph.note`. The engine
    that runs the model makes no difference.

    Parameters
    ----------
    stage
        "exported", "processed", "optimized" (before the gradient), "gradient" or "execution".
    part
        Path of a wrapped part of the model; it has to be given where several parts are wrapped.
    mode
        "training" or "inference"; by default training, or inference where no training step has run.
    activations
        Whether to read what the forward keeps for the backward as well; the execution graph of training has that.
    profile
        Whether to profile the last step (see `profile`), so that each node has its time. Execution graph only.

    Raises
    ------
    OptionError
        If there is no such stage, part or mode, or the stage has no times or no activations.
    BuildError
        If no step has run in this lab yet, or ONNX Runtime cannot build the graph.

    Examples
    --------
    >>> lab.graph("optimized").operators
    {'Gemm': 4, 'Gelu': 2}
    >>> lab.graph("execution").save("step.onnx")
    """
    check_stage(stage)
    with _one_graph(bench, part, mode) as (path, execution, note):
        found = replace(graph_of(bench, execution, stage, path), note=note)
    wanted = [what for what, asked in (("activations", activations), ("times", profile)) if asked]
    if wanted and (stage != "execution" or found.mode != "training"):
        raise OptionError(
            f"The {stage} graph for {found.mode} has no {' and no '.join(wanted)}.",
            why="ONNX Runtime runs the execution graph, and keeps something for backward in training only.",
            fix='Ask for lab.graph("execution", activations=True, profile=True) after a training step.',
        )
    if activations:
        found = found.with_activations(memory.activations(bench, part, progress=False))
    if profile:
        found = found.with_profile(profiling.profile(bench, part=part))
    return found


def graphs(bench: Bench, part: str | None = None, *, mode: Mode | None = None) -> GraphSet:
    """Return the graphs of all five stages, for the present switches.

    Parameters
    ----------
    part, mode
        As for `graph`.

    Raises
    ------
    OptionError, BuildError
        As for `graph`.
    """
    with _one_graph(bench, part, mode) as (path, execution, note):
        return GraphSet(
            tuple(replace(graph_of(bench, execution, stage, path), note=note) for stage in STAGES)
        )


def triton_kernels(bench: Bench, folder: str | Path = FOLDER) -> TritonKernels:
    """List the sub-graphs that ORT's Triton fusion took out of the graph, and the kernels that it generated.

    They are there after a step with `triton` and `triton_debug` on. `ortlab.show_graph` shows one with its code.

    Parameters
    ----------
    folder
        Where they were written: ``triton_debug`` below the folder of the process.

    Returns
    -------
    TritonKernels
        Those that the lab's graph runs, in its order; then those that are in the folder from elsewhere.

    Raises
    ------
    BuildError
        If there are none; the error says what they need, and what of it is missing here.

    Examples
    --------
    >>> lab.set(triton=True, triton_debug=True).rerun()
    >>> ortlab.show_graph(lab.triton_kernels().kernel(1))
    """
    if str(folder) == FOLDER and not Path(folder).is_dir():
        raise BuildError(
            "There are no Triton kernels to show.",
            why=f"Nothing has written a folder {FOLDER} here. {_why_no_kernels(bench)}",
            fix="lab.set(triton=True, triton_debug=True), then a step. Files of another machine can be read here: "
            "lab.triton_kernels(folder).",
        )
    nodes: dict[int, tuple[str, ...]] = {}
    # Nothing is built, and no step remembered: then no sub-graph is known to be of this lab.
    with suppress(BuildError), builds(bench) as found:
        for execution in found.executions.values():
            one = Graph("execution", "training", execution.serialized_graph("execution"))
            for key, names in fused_nodes(one.model).items():
                nodes[key] = nodes.get(key, ()) + names
    return read_triton_kernels(folder).of_graphs(nodes)


def _why_no_kernels(bench: Bench) -> str:
    missing = unmet("triton", bench.have)
    off = [name for name in ("triton", "triton_debug") if not getattr(bench.options, name)]
    return missing or (f"{' and '.join(off)} is off." if off else "No step has generated a kernel since.")


@contextmanager
def _one_graph(bench: Bench, part: str | None, mode: str | None) -> Iterator[tuple[str, Execution, str]]:
    """Yield the path of the part that graphs are asked of, what runs it, and how it came about."""
    if mode is not None and mode not in _MODES:
        raise OptionError(f"There are no graphs for {mode!r}.", fix=f"Modes: {', '.join(_MODES)}.")
    engine_of(bench, part, "a graph")
    with builds(bench, part, training=None if mode is None else mode == "training") as found:
        yield (*found.only, found.note)


def graph_of(bench: Bench, execution: Execution, stage: str, path: str) -> Graph:
    """Return the graph of a stage of what runs the model, or a part of it."""
    mode = "training" if execution.training else "inference"
    traced = execution.traced_model(bench.module)
    return Graph(stage, mode, execution.serialized_graph(stage), path, traced)


_UPSTREAM: Final = {
    "torch_exported": "exported",
    "post_processed": "processed",
    "optimized_pre_grad": "optimized",
    "execution_model": "execution",
}
"""What the names of the files that `save_onnx` writes call the stages."""


def check_stage(stage: str) -> None:
    """Refuse what is no stage, and suggest the near name; raise OptionError then."""
    if stage in STAGES:
        return
    near = get_close_matches(str(stage), (*STAGES, *_UPSTREAM), n=1)
    hint = f"Did you mean {_UPSTREAM.get(near[0], near[0])!r}? " if near else ""
    raise OptionError(f"There is no graph stage {stage!r}.", fix=f"{hint}Stages: {', '.join(STAGES)}.")


def graph_diff(
    bench: Bench,
    /,
    before: Compared | None = None,
    after: Compared | None = None,
    *,
    stage: str = "",
    part: str | None = None,
    **changes: object,
) -> GraphDiff:
    """Say what is different between two stages of the present build, or the graphs of two runs or sets of switches.

    Without anything to compare: what the present switches change against those of the first run, or, where they are
    the same, against the defaults.

    A graph that is not built yet is built for that: the last step runs once from its start, in PyTorch, and ONNX
    Runtime builds what it would have run. Afterwards, also after a failure or an interrupt, weights, gradients,
    optimizers, random state, switches, sessions and ledger are as they were before the call.

    Parameters
    ----------
    before, after
        Two stages, "gradient" and "execution"; or two sets of switches, each a dict as `set` takes it, an empty one
        for the switches as they are; or two runs of `lab.runs`, for the switches that they had; or two graphs, as
        `graph` returns them. One set of switches alone is compared with those of the lab.
    stage
        With switches or runs: which graph is compared, "execution" if not given.
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
    >>> lab.graph_diff(lab.runs[0], lab.runs[-1])
    """
    bench.check_usable("compare graphs")
    check_names(changes, graph_diff)
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
    bench: Bench, side: str | Run | Mapping[str, object], stage: str, part: str | None
) -> tuple[Graph, str]:
    """Return the graph of a stage, of a run or of some switches, and what to call it."""
    if isinstance(side, str):
        return graph(bench, side, part), side
    if isinstance(side, Run):
        return _graph_of_run(bench, side, stage, part), f"run {side.title}"
    wished = bench.configuration.tried(side, bench.have)
    if "engine" in side and wished.engine != "ort":
        raise OptionError(
            f"Engine {wished.engine!r} has no graph to compare.",
            why="Only ONNX Runtime runs ONNX graphs.",
            fix="Leave engine out: graphs are those of ONNX Runtime, whichever engine is set.",
        )
    return _graph_of(bench, wished.options, stage, part), _words(side, wished.options) or "as set"


def _graph_of_run(bench: Bench, run: Run, stage: str, part: str | None) -> Graph:
    """Return the graph that a run had, with what its forward keeps."""
    if engine_kind(run.engine) != "ort" or run.fell_back:
        raise OptionError(
            f"Run {run.title} has no graph to compare.",
            why="PyTorch executed it, and only ONNX Runtime runs ONNX graphs.",
            fix="Take runs that ONNX Runtime executed.",
        )
    return _graph_of(bench, run.options, stage, part, activations=stage in {"", "execution"})


def _graph_of(
    bench: Bench, options: Options, stage: str, part: str | None, *, activations: bool = False
) -> Graph:
    """Return the graph of some switches, built beside the lab's if it is not there."""
    engine_of(bench, part, "a graph")
    with builds(bench, part, options=options) as found:
        path, execution = found.only
        note = found.note if options == bench.options else ""
        made = replace(graph_of(bench, execution, stage or "execution", path), note=note)
        if activations and made.mode == "training":
            made = made.with_activations(memory.read_kept(bench, execution, path))
        return made


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


def _sides(before: object, after: object, changes: Mapping[str, object]) -> tuple[Compared, Compared]:
    """Return what is compared with what."""
    if changes and (before is not None or after is not None):
        raise _unclear("switches by name beside something else")
    if changes:
        return {}, changes
    if after is None and isinstance(before, Mapping) and before:
        return {}, before
    for one in (before, after):
        if not isinstance(one, (str, Mapping, Graph, Run)):
            given = "one thing only" if one is None else f"a {type(one).__name__}"
            raise _unclear(given if before is not None else "nothing")
    if isinstance(before, str) != isinstance(after, str) and not isinstance(before, Graph | type(None)):
        raise _unclear("a stage and something else")
    return before, after  # type: ignore[return-value] # checked above


def _words(names: Iterable[str], options: Options) -> str:
    return _settings({name: getattr(options, name) for name in names})


def _settings(values: Mapping[str, object]) -> str:
    return ", ".join(setting_words(name, value) for name, value in values.items())


def _unclear(given: str) -> OptionError:
    return OptionError(
        f"It is not clear which graphs to compare: {given} was given.",
        fix='For example lab.graph_diff("gradient", "execution"), lab.graph_diff(memory_level=1) or '
        'lab.graph_diff({"compute_optimizer": False}, {}, stage="optimized").',
    )


def count_flops(bench: Bench, part: str | None = None, n: int = 1, *, progress: bool = True) -> Flops:
    """Count the FLOPs of the last step with the present switches; see `Lab.flops`."""
    from ortlab.engine.profiling import node_flops

    with profiled_step(bench, n, part, progress=progress) as (seen, _):
        path = next(iter(bench.engines(part)))
        nodes = node_flops(seen, bench.module, path)
    return Flops(nodes, _words(bench.options.changed(Options()), bench.options), path)


def flops_saved(
    bench: Bench,
    baseline: Mapping[str, object],
    part: str | None = None,
    n: int = 1,
    *,
    progress: bool = True,
) -> FlopSavings:
    """Compare the FLOPs of the last step as the lab is set with those of other options; see `Lab.flops`."""
    bench.check_usable("count FLOPs")
    present = bench.configuration
    other = present.changed(dict(baseline), bench.have)
    if other == present:
        raise OptionError(
            f"The lab is set so already: {_settings(baseline)}.",
            why="There is nothing to compare.",
            fix="Set the switch the other way first: lab.set(compute_optimizer=True).",
        )
    having, drawn = count_flops(bench, part, n, progress=progress), graph(bench, part=part)
    with bench.set_as_before():
        bench.configure(other)
        compared = count_flops(bench, part, n, progress=progress)
        same = dict(diff(graph(bench, part=part), drawn).matched)
    now = {name: getattr(present.options, name, present.engine) for name in baseline}
    return FlopSavings(compared, having, same, f"{_settings(now)} against {_settings(baseline)}")
