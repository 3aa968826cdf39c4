"""What a lab does to show what switches change in a graph: it builds the other one beside what it has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ortlab.engine.building import BuildingEngine
from ortlab.errors import OptionError, StepError
from ortlab.graphs.diff import GraphDiff, diff
from ortlab.graphs.stages import STAGES, Graph
from ortlab.interrupts import interrupts_kept
from ortlab.messages import MessageLog
from ortlab.partial import PartsEngine
from ortlab.snapshot import Snapshot

if TYPE_CHECKING:
    import torch

    from ortlab.configuration import Configuration
    from ortlab.engine.execution import Execution
    from ortlab.engine.ort import OrtEngine
    from ortlab.experiment import Experiment
    from ortlab.options import Need
    from ortlab.wrapping import Takeover


class GraphDiffLab(ABC):
    """The base of `Lab` that compares graphs; the abstract parts are the lab's."""

    module: torch.nn.Module
    have: frozenset[Need]
    _ort: Any
    _engine: Any
    _takeover: Takeover
    _executed_by: str

    def graph_diff(
        self,
        before: str | Mapping[str, object] | Graph | None = None,
        after: str | Mapping[str, object] | Graph | None = None,
        *,
        stage: str = "",
        part: str | None = None,
        **changes: object,
    ) -> GraphDiff:
        """Say what is different between two stages of the present build, or between the graphs of two sets of switches.

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
            If a graph cannot be built, or another engine than "ort" runs the model.
        StepError
            If a graph has to be built and no step has run yet, or one is running.
        Exception
            Whatever the step raises.

        Examples
        --------
        >>> lab.graph_diff("gradient", "execution").sentences
        ('Fused Transpose and MatMul into FusedMatMul, 14 times, in encoder.layer.0 to 1.',)
        >>> lab.graph_diff(memory_level=1)
        >>> lab.graph_diff({"compute_optimizer": False}, {}, stage="optimized")
        """
        self._check_usable("compare graphs")
        first, second = _sides(before, after, changes)
        if isinstance(first, str) and isinstance(second, str):
            if stage:
                raise _unclear(f"stages {first!r} and {second!r}, and stage={stage!r}")
            return diff(self.graph(first, part), self.graph(second, part))
        _check_stage(stage)
        if isinstance(first, Graph) and isinstance(second, Graph):
            return diff(first, second)
        sides = [
            (one, f"{one.stage} for {one.mode}")
            if isinstance(one, Graph)
            else self._graph_with(one, stage, part)
            for one in (first, second)
        ]
        return diff(sides[0][0], sides[1][0], names=(sides[0][1], sides[1][1]))

    def _graph_with(
        self, side: str | Mapping[str, object], stage: str, part: str | None
    ) -> tuple[Graph, str]:
        """Return the graph of a stage, or of some switches, and what to call it."""
        if isinstance(side, str):
            return self.graph(side, part), side
        wished = self.configuration.changed(side, self.have)
        if wished.engine != "ort":
            raise OptionError(
                f"Engine {wished.engine!r} has no graph to compare.",
                why="Only ONNX Runtime runs ONNX graphs.",
                fix='Leave engine out; lab.set(engine="ort") switches the lab back.',
            )
        words = ", ".join(f"{name}={getattr(wished.options, name)!r}" for name in side) or "as set"
        engine = self._engine_of(part, "a graph")
        if engine.built_options is not None and engine.stage_of(wished.options) in ("", "step"):
            return self.graph(stage or "execution", part), words
        with self._built_beside(wished, engine) as (path, execution):
            return self._graph(execution, stage or "execution", path), words

    @contextmanager
    def _built_beside(self, wished: Configuration, engine: OrtEngine) -> Iterator[tuple[str, Execution]]:
        """Build with other switches what the last step needs; the lab keeps everything that it has."""
        experiment = self._last_experiment()
        options = wished.options.replace(save_onnx=False)  # the user's files are of the present build
        path = next(path for path, one in self._engines(None).items() if one is engine)
        before, executed_by = Snapshot(self.module, experiment.start.stateful), self._executed_by
        try:
            with self._builder(path, options) as builder:
                experiment.start.put_back()
                with interrupts_kept() as raise_lost:
                    experiment.step()
                    raise_lost()
                if builder.built_options is None:
                    raise StepError(
                        f"The graph of {path or 'the model'} cannot be built for other switches.",
                        why="The last step did not call it.",
                        fix="Run a step that does.",
                    )
                yield path, builder.execution
        finally:
            self._executed_by = executed_by
            before.put_back()
            self._report_progress("", 1.0)
            self._notify("status")

    @contextmanager
    def _builder(self, path: str, options: Any) -> Iterator[BuildingEngine]:
        """Put an engine that only builds in the place of the one that runs the model, or a part of it."""
        if isinstance(self._ort, PartsEngine):
            with self._ort.building(path, options, self._report_progress) as builder:
                yield builder
            return
        takeover, engine = self._takeover, self._engine
        builder = BuildingEngine(
            self.module,
            takeover.run_original,
            options,
            self._report_progress,
            lambda _: None,
            MessageLog(),
            takeover.instance_forward,
        )
        try:
            self._engine = builder
            yield builder
        finally:
            self._engine = engine
            builder.close()

    @abstractmethod
    def graph(self, stage: str = "execution", part: str | None = None) -> Graph:
        """Return one of the ONNX graphs of the present build."""

    @property
    @abstractmethod
    def configuration(self) -> Configuration:
        """Engine and switches together."""

    @abstractmethod
    def _graph(self, execution: Execution, stage: str, path: str) -> Graph: ...

    @abstractmethod
    def _engines(self, part: str | None) -> dict[str, OrtEngine]: ...

    @abstractmethod
    def _engine_of(self, part: str | None, has: str) -> OrtEngine: ...

    @abstractmethod
    def _last_experiment(self) -> Experiment: ...

    @abstractmethod
    def _check_usable(self, what: str) -> None: ...

    @abstractmethod
    def _report_progress(self, text: str, fraction: float) -> None: ...

    @abstractmethod
    def _notify(self, event: str) -> None: ...


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


def _unclear(given: str) -> OptionError:
    return OptionError(
        f"It is not clear which graphs to compare: {given} was given.",
        fix='For example lab.graph_diff("gradient", "execution"), lab.graph_diff(memory_level=1) or '
        'lab.graph_diff({"compute_optimizer": False}, {}, stage="optimized").',
    )


def _check_stage(stage: str) -> None:
    if stage and stage not in STAGES:
        raise OptionError(f"There is no graph stage {stage!r}.", fix=f"Stages: {', '.join(STAGES)}.")
