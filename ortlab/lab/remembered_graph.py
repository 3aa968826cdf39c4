"""The graphs that an analysis looks at: those that are there, or those that the remembered step builds beside them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ortlab.engine.building import BuildingEngine
from ortlab.errors import OptionError, StepError
from ortlab.options.configuration import Configuration
from ortlab.records.messages import MessageLog
from ortlab.runs.experiment import iterator_of, leaving_no_trace
from ortlab.runs.interrupts import interrupts_kept
from ortlab.runs.partial import PartsEngine
from ortlab.runs.snapshot import Snapshot

if TYPE_CHECKING:
    import torch

    from ortlab.engine.execution import Execution
    from ortlab.engine.ort import OrtEngine
    from ortlab.options.options import Options
    from ortlab.runs.experiment import Experiment
    from ortlab.runs.wrapping import Takeover

_BUILT: Final = (
    "Built for this page: the last step ran once more in PyTorch, and ONNX Runtime built the graph that it would run "
    "with the present switches. The lab is as it was."
)


@dataclass(frozen=True)
class Found:
    """What an analysis looks at.

    Attributes
    ----------
    executions
        What runs the graph of each wrapped part, by its path; of the model, under the empty path.
    missing
        Wrapped parts that have no graph, because nothing has called them.
    note
        How a graph came about that the lab did not have; empty where it had them all.
    """

    executions: Mapping[str, Execution]
    missing: tuple[str, ...] = ()
    note: str = ""

    @property
    def only(self) -> tuple[str, Execution]:
        """Path and execution where there is one of them."""
        ((path, execution),) = self.executions.items()
        return path, execution


class RememberedGraph(ABC):
    """The base of what looks at graphs; the abstract parts are the lab's."""

    module: torch.nn.Module
    _ort: OrtEngine | PartsEngine
    _engine: Any
    _takeover: Takeover
    _experiment: Experiment | None
    _executed_by: str

    @contextmanager
    def _graphs(
        self, part: str | None = None, *, options: Options | None = None, training: bool | None = None
    ) -> Iterator[Found]:
        """Yield the graphs for some switches, by default the present ones, whichever engine runs the model.

        A graph that is not there is built from the last step, beside the lab's own; it is gone after the block.

        Parameters
        ----------
        part
            Path of a wrapped part; all parts if not given.
        options
            The switches.
        training
            Which mode; by default training, or inference where the last step does not train.

        Raises
        ------
        BuildError
            If there is no graph and no step to build it from, or ONNX Runtime cannot build it. The lab is as it was.
        StepError
            If a graph has to be built while a step is running.
        Exception
            Whatever the step raises. The lab is as it was.
        """
        engines, wished = self._engines(part), self._configuration.options if options is None else options
        mode = True if training is None and self._experiment is not None else training
        ready = {path: engine.ready(wished, training=mode) for path, engine in engines.items()}
        there = {path: one for path, one in ready.items() if one is not None}
        absent = {path: engine for path, engine in engines.items() if path not in there}
        if there and all(engine.built_options is None for engine in absent.values()):
            absent = {}  # nothing has called them so far, and nothing says that the last step does
        if absent and (self._experiment is None or training is False):
            for path, engine in absent.items():
                if engine.built_options is not None or not there:
                    there[path] = engine.execution_of(wished, training=training)
            absent = {}
        with ExitStack() as stack:
            if absent:
                for engine in absent.values():
                    engine.check_buildable(wished)
                built = stack.enter_context(self._built_beside(wished, absent))
                there |= {
                    path: one.execution if training is None else one.execution_for(training=training)
                    for path, one in built.items()
                }
            missing = tuple(path for path in engines if path not in there)
            yield Found({path: there[path] for path in engines if path in there}, missing, self._note(absent))

    def _note(self, built: Mapping[str, OrtEngine]) -> str:
        engine = self._configuration.engine
        words = [_BUILT] if built else []
        drawn = iterator_of(self._experiment.step) if built and self._experiment is not None else None
        if drawn is not None:
            words.append(f"The step drew from its {type(drawn).__name__} once more.")
        if engine != "ort":
            words.append(
                f'The lab\'s engine is {engine}: ONNX Runtime runs this graph after lab.set(engine="ort").'
            )
        return " ".join(words)

    @contextmanager
    def _built_beside(
        self, options: Options, engines: Mapping[str, OrtEngine]
    ) -> Iterator[dict[str, BuildingEngine]]:
        """Build what the last step needs of some parts; the lab keeps everything that it has.

        Yields
        ------
        dict of str to BuildingEngine
            What has built the graph of each part that the step calls, by its path.
        """
        self._check_usable("build a graph")
        experiment = self._last_experiment()
        options = options.replace(save_onnx=False)  # the user's files are of the present build
        before, executed_by = Snapshot(self.module, experiment.start.stateful), self._executed_by
        try:
            with ExitStack() as stack:
                builders = stack.enter_context(self._builders(engines, options))
                with leaving_no_trace(experiment.step), interrupts_kept() as raise_lost:
                    experiment.start.put_back()
                    experiment.step()
                    raise_lost()
                before.put_back()
                built = {path: one for path, one in builders.items() if one.built_options is not None}
                if not built:
                    raise StepError(
                        f"The graph of {', '.join(path for path in engines if path) or 'the model'} cannot be built.",
                        why="The last step did not call it.",
                        fix="Run a step that does.",
                    )
                yield built
        finally:
            self._executed_by = executed_by
            before.put_back()
            self._report_progress("", 1.0)
            self._notify("status")

    @contextmanager
    def _builders(
        self, engines: Mapping[str, OrtEngine], options: Options
    ) -> Iterator[dict[str, BuildingEngine]]:
        """Put engines that only build in the place of those that run the model, or parts of it."""
        if isinstance(self._ort, PartsEngine):
            with ExitStack() as stack:
                engine = self._engine
                if engine is not self._ort:  # PyTorch runs the model, and has its parts back
                    stack.callback(self._ort.release)
                    self._ort.take()
                    stack.callback(setattr, self, "_engine", engine)
                    self._engine = self._ort
                yield {
                    path: stack.enter_context(self._ort.building(path, options, self._report_progress))
                    for path in engines
                }
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
            yield {"": builder}
        finally:
            self._engine = engine
            builder.close()

    @contextmanager
    def _on_ort(self) -> Iterator[None]:
        """Run the model on ONNX Runtime in the block, whichever engine is set; afterwards all is as before."""
        configuration, executed_by = self._configuration, self._executed_by
        try:
            with self._ort.beside():
                if configuration.engine != "ort":
                    self._configure(Configuration("ort", configuration.options))
                yield
        finally:
            if self._configuration != configuration:
                self._configure(configuration)
            self._executed_by = executed_by
            self._notify("status")

    def _engine_of(self, part: str | None, has: str) -> OrtEngine:
        """Return what builds the graphs of the model or of one part; `has` says what each part has of its own."""
        engines = self._engines(part)
        if len(engines) > 1:
            raise OptionError(
                f"Each wrapped part has {has} of its own.", fix=f"Name one: part={next(iter(engines))!r}."
            )
        return next(iter(engines.values()))

    @property
    @abstractmethod
    def _configuration(self) -> Configuration:
        """Engine and switches together."""

    @abstractmethod
    def _configure(self, configuration: Configuration) -> object:
        """Take over engine and switches as a whole."""

    @abstractmethod
    def _engines(self, part: str | None) -> dict[str, OrtEngine]: ...

    @abstractmethod
    def _last_experiment(self) -> Experiment: ...

    @abstractmethod
    def _check_usable(self, what: str) -> None: ...

    @abstractmethod
    def _report_progress(self, text: str, fraction: float) -> None: ...

    @abstractmethod
    def _notify(self, event: str) -> None: ...
