"""The graphs that an analysis looks at: those that are there, or those that the remembered step builds beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ortlab.engine.inspection.build import BuildingEngine
from ortlab.errors import OptionError, StepError
from ortlab.options.configuration import Configuration
from ortlab.records.messages import MessageLog
from ortlab.runs.experiment import iterator_of, leaving_no_trace
from ortlab.runs.interrupts import interrupts_kept
from ortlab.runs.parts import PartsEngine

if TYPE_CHECKING:
    from ortlab.engine.execution import Execution
    from ortlab.engine.ort import OrtEngine
    from ortlab.options.options import Options
    from ortlab.runs.bench import Bench

_BUILT: Final = (
    "Built for this page: the last step ran once more in PyTorch, and ONNX Runtime built the graph that it would run "
    "with the present switches. The lab is as it was."
)


@dataclass(frozen=True)
class Found:
    """What an analysis looks at."""

    executions: Mapping[str, Execution]  # by path of the wrapped part; of the model, under the empty path
    missing: tuple[str, ...] = ()  # wrapped parts that have no graph, because nothing has called them
    note: str = ""  # how a graph came about that the lab did not have; empty where it had them all

    @property
    def only(self) -> tuple[str, Execution]:
        """Path and execution where there is one of them."""
        ((path, execution),) = self.executions.items()
        return path, execution


@contextmanager
def builds(
    bench: Bench, part: str | None = None, *, options: Options | None = None, training: bool | None = None
) -> Iterator[Found]:
    """Yield the graphs for some switches, by default the present ones, whichever engine runs the model."""
    # A graph that is not there is built from the last step, beside the lab's own; it is gone after the block.
    engines, wished = bench.engines(part), bench.options if options is None else options
    engine_name = bench.engine.name  # while a graph is built, another engine stands in its place
    mode = True if training is None and bench.experiment is not None else training
    ready = {path: engine.ready(wished, training=mode) for path, engine in engines.items()}
    there = {path: one for path, one in ready.items() if one is not None}
    absent = {path: engine for path, engine in engines.items() if path not in there}
    if there and all(engine.built_options is None for engine in absent.values()):
        absent = {}  # nothing has called them so far, and nothing says that the last step does
    if absent and (bench.experiment is None or training is False):
        for path, engine in absent.items():
            if engine.built_options is not None or not there:
                there[path] = engine.execution_of(wished, training=training)
        absent = {}
    with ExitStack() as stack:
        if absent:
            for engine in absent.values():
                engine.check_buildable(wished)
            built = stack.enter_context(_built_beside(bench, wished, absent))
            there |= {
                path: one.execution if training is None else one.execution_for(training=training)
                for path, one in built.items()
            }
        missing = tuple(path for path in engines if path not in there)
        yield Found(
            {path: there[path] for path in engines if path in there},
            missing,
            _note(bench, engine_name, absent),
        )


def _note(bench: Bench, engine: str, built: Mapping[str, OrtEngine]) -> str:
    """Say how a graph came about that the lab did not have, and when the lab will run it."""
    words = [_BUILT] if built else []
    drawn = iterator_of(bench.experiment.step) if built and bench.experiment is not None else None
    if drawn is not None:
        words.append(f"The step drew from its {type(drawn).__name__} once more.")
    if engine != "ort":
        words.append(
            f'The lab\'s engine is {engine}: ONNX Runtime runs this graph after lab.set(engine="ort").'
        )
    return " ".join(words)


@contextmanager
def _built_beside(
    bench: Bench, options: Options, engines: Mapping[str, OrtEngine]
) -> Iterator[dict[str, BuildingEngine]]:
    """Build what the last step needs of some parts; the lab keeps everything that it has."""
    bench.check_usable("build a graph")
    experiment = bench.last_experiment()
    options = options.replace(save_onnx=False)  # the user's files are of the present build
    with bench.as_before(experiment) as before, ExitStack() as stack:
        stack.callback(bench.progress.report, "", 1.0)
        builders = stack.enter_context(_builders(bench, engines, options))
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


@contextmanager
def _builders(
    bench: Bench, engines: Mapping[str, OrtEngine], options: Options
) -> Iterator[dict[str, BuildingEngine]]:
    """Put engines that only build in the place of those that run the model, or parts of it."""
    if isinstance(bench.ort, PartsEngine):
        with ExitStack() as stack:
            engine = bench.engine
            if engine is not bench.ort:  # PyTorch runs the model, and has its parts back
                stack.callback(bench.ort.release)
                bench.ort.take()
                stack.callback(setattr, bench, "engine", engine)
                bench.engine = bench.ort
            yield {
                path: stack.enter_context(bench.ort.building(path, options, bench.progress.report))
                for path in engines
            }
        return
    takeover, engine = bench.takeover, bench.engine
    builder = BuildingEngine(
        bench.module,
        takeover.run_original,
        options,
        bench.progress.report,
        lambda _: None,
        MessageLog(),
        takeover.instance_forward,
    )
    try:
        bench.engine = builder
        yield {"": builder}
    finally:
        bench.engine = engine
        builder.close()


@contextmanager
def on_ort(bench: Bench) -> Iterator[None]:
    """Run the model on ONNX Runtime in the block, whichever engine is set; afterwards all is as before."""
    with bench.set_as_before(), bench.ort.beside():
        if bench.engine.name != "ort":
            bench.configure(Configuration("ort", bench.options))
        yield


def engine_of(bench: Bench, part: str | None, has: str) -> OrtEngine:
    """Return what builds the graphs of the model or of one part; `has` says what each part has of its own."""
    engines = bench.engines(part)
    if len(engines) > 1:
        raise OptionError(
            f"Each wrapped part has {has} of its own.", fix=f"Name one: part={next(iter(engines))!r}."
        )
    return next(iter(engines.values()))
