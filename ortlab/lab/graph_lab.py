"""What a lab shows of the ONNX graphs of its builds."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from ortlab.errors import BuildError, OptionError
from ortlab.graphs.graph_set import GraphSet
from ortlab.graphs.stages import STAGES, Graph
from ortlab.graphs.triton_kernels import FOLDER, TritonKernels, fused_nodes, read_triton_kernels
from ortlab.lab.remembered_graph import RememberedGraph
from ortlab.options.options import unmet

if TYPE_CHECKING:
    import torch

    from ortlab.engine.execution import Execution
    from ortlab.memory.saved_activations import SavedActivations
    from ortlab.memory.trace import Trace
    from ortlab.options.options import Need, Options

Mode = Literal["training", "inference"]

_MODES: Final[tuple[Mode, ...]] = ("training", "inference")


class GraphLab(RememberedGraph):
    """The base of `Lab` that takes graphs out of its builds; the abstract parts are the lab's."""

    module: torch.nn.Module
    have: frozenset[Need]

    def graph(
        self,
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
        _check_stage(stage)
        with self._one_graph(part, mode) as (path, execution, note):
            found = replace(self._graph(execution, stage, path), note=note)
        wanted = [what for what, asked in (("activations", activations), ("times", profile)) if asked]
        if wanted and (stage != "execution" or found.mode != "training"):
            raise OptionError(
                f"The {stage} graph for {found.mode} has no {' and no '.join(wanted)}.",
                why="ONNX Runtime runs the execution graph, and keeps something for backward in training only.",
                fix='Ask for lab.graph("execution", activations=True, profile=True) after a training step.',
            )
        if activations:
            found = found.with_activations(self.activations(part, progress=False))
        if profile:
            found = found.with_profile(self.profile(part=part))
        return found

    def graphs(self, part: str | None = None, *, mode: Mode | None = None) -> GraphSet:
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
        with self._one_graph(part, mode) as (path, execution, note):
            return GraphSet(
                tuple(replace(self._graph(execution, stage, path), note=note) for stage in STAGES)
            )

    def triton_kernels(self, folder: str | Path = FOLDER) -> TritonKernels:
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
                why=f"Nothing has written a folder {FOLDER} here. {self._why_no_kernels()}",
                fix="lab.set(triton=True, triton_debug=True), then a step. Files of another machine can be read here: "
                "lab.triton_kernels(folder).",
            )
        nodes: dict[int, tuple[str, ...]] = {}
        # Nothing is built, and no step remembered: then no sub-graph is known to be of this lab.
        with suppress(BuildError), self._graphs() as found:
            for execution in found.executions.values():
                graph = Graph("execution", "training", execution.serialized_graph("execution"))
                for key, names in fused_nodes(graph.model).items():
                    nodes[key] = nodes.get(key, ()) + names
        return read_triton_kernels(folder).of_graphs(nodes)

    def _why_no_kernels(self) -> str:
        missing = unmet("triton", self.have)
        off = [name for name in ("triton", "triton_debug") if not getattr(self.options, name)]
        return missing or (f"{' and '.join(off)} is off." if off else "No step has generated a kernel since.")

    @contextmanager
    def _one_graph(self, part: str | None, mode: str | None) -> Iterator[tuple[str, Execution, str]]:
        """Yield the path of the part that graphs are asked of, what runs it, and how it came about."""
        if mode is not None and mode not in _MODES:
            raise OptionError(f"There are no graphs for {mode!r}.", fix=f"Modes: {', '.join(_MODES)}.")
        self._engine_of(part, "a graph")
        with self._graphs(part, training=None if mode is None else mode == "training") as found:
            yield (*found.only, found.note)

    def _graph(self, execution: Execution, stage: str, path: str) -> Graph:
        mode = "training" if execution.training else "inference"
        traced = execution.traced_model(self.module)
        return Graph(stage, mode, execution.serialized_graph(stage), path, traced)

    @property
    @abstractmethod
    def options(self) -> Options:
        """The present switches."""

    @abstractmethod
    def activations(self, part: str | None = None, *, progress: bool = True) -> SavedActivations:
        """Read what the forward keeps."""

    @abstractmethod
    def profile(self, *, part: str | None = None) -> Trace:
        """Profile the last step."""


_UPSTREAM: Final = {
    "torch_exported": "exported",
    "post_processed": "processed",
    "optimized_pre_grad": "optimized",
    "execution_model": "execution",
}
"""What the names of the files that `save_onnx` writes call the stages."""


def _check_stage(stage: str) -> None:
    if stage in STAGES:
        return
    near = get_close_matches(str(stage), (*STAGES, *_UPSTREAM), n=1)
    hint = f"Did you mean {_UPSTREAM.get(near[0], near[0])!r}? " if near else ""
    raise OptionError(f"There is no graph stage {stage!r}.", fix=f"{hint}Stages: {', '.join(STAGES)}.")
