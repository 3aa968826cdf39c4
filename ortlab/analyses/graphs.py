"""The ONNX graphs of the present switches, stage by stage, and the kernels that Triton made of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from ortlab.analyses import activations as kept
from ortlab.analyses import profiling
from ortlab.analyses.builds import builds, engine_of
from ortlab.errors import BuildError, OptionError
from ortlab.graphs.stages import STAGES, Graph, GraphSet
from ortlab.graphs.triton_kernels import FOLDER, TritonKernels, fused_nodes, read_triton_kernels
from ortlab.options.options import unmet

if TYPE_CHECKING:
    from ortlab.engine.execution import Execution
    from ortlab.runs.bench import Bench

Mode = Literal["training", "inference"]

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
        found = found.with_activations(kept.activations(bench, part, progress=False))
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
