"""The recording of a run: steps are executed, and their times, losses, memory by phase and data are written down.

`Recording` runs the steps itself, `HeldRecording` does so under a ceiling of memory, and `LoopRecording` lets somebody
else's loop run them, such as transformers' Trainer or one with accelerate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ortlab.engine.installation import versions
from ortlab.errors import StepError
from ortlab.records.density import Density
from ortlab.records.memory_phases import MemoryPhases
from ortlab.records.runs import (
    EXECUTED_BY_EAGER,
    EXECUTED_BY_FALLBACK,
    Initialization,
    Run,
    Step,
    names,
    optimizer_name,
)
from ortlab.runs.experiment import DataDigest, not_called
from ortlab.runs.interrupts import interrupts_kept
from ortlab.runs.padded_inputs import DensityProbe
from ortlab.runs.process_memory import MemoryProbe, PhaseProbe, device_of, memory_probe
from ortlab.runs.stopwatch import (
    OtherPrograms,
    Stopwatch,
    exchange_watched,
    faults_since,
    page_faults,
    synchronizer,
)

if TYPE_CHECKING:
    from ortlab.options.options import Options
    from ortlab.records.runs import Coverage
    from ortlab.runs.experiment import Experiment
    from ortlab.runs.progress import Progress


class Engine(Protocol):
    """One way to execute a module; see `ortlab.engine`."""

    name: str

    @property
    def executed_by(self) -> str:
        """Who executed the last call; empty before the first."""

    @property
    def fallback_reason(self) -> str:
        """Why PyTorch executed the call though ORT was asked for; empty if it did not."""

    @property
    def total_coverage(self) -> Coverage:
        """Who executed the wrapped parts since `start_over`; empty where the whole model is run."""

    def forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the module's forward."""

    def start_over(self) -> None:
        """Draw in the next call the random numbers that were drawn in the first, once the seeds are set."""

    def graph_digests(self) -> dict[str, str]:
        """Return a digest of each graph that was executed, by stage; empty for engines without graphs."""


class Recording:
    """Executes an experiment once; while it does, the lab sends each forward through `forward`."""

    # The module has to stand at the experiment's start. `original_forward` is looked at for inputs with padding.

    interrupt: KeyboardInterrupt | None = None  # stopped the run, whose steps so far are kept

    def __init__(
        self,
        module: torch.nn.Module,
        engine: Engine,
        original_forward: Callable[..., Any],
        experiment: Experiment,
        progress: Progress,
    ) -> None:
        self._module = module
        self._engine = engine
        self._experiment = experiment
        self._progress = progress
        self._device = device_of(module)
        self._probe: MemoryProbe = memory_probe(self._device)
        self._others = OtherPrograms()
        self._rises: list[int | None] = []
        self._stopwatch = Stopwatch(
            synchronize=synchronizer(self._device),
            on_optimizer=self._note_optimizer,
            on_backward=self._check_root,
            module=module,
        )
        self._original_forward = original_forward
        self._density: DensityProbe | None = None
        self._phases: PhaseProbe | None = None
        self._number = 0
        self._data = DataDigest()
        self._initialization: Initialization | None = None
        self._fallback_reason = ""
        self._executed_by: set[str] = set()
        self._modes: set[bool] = set()
        self._optimizers: dict[str, None] = {}  # in the order of their first steps

    def run(self, number: int, options: Options, *, show: bool, partial: bool = False) -> Run:
        """Execute the steps and write the run down."""
        # With `partial`, Ctrl-C keeps the steps before it as a run and is left in `interrupt`; otherwise it is raised.
        started_at = datetime.now(timezone.utc).isoformat(timespec="seconds")
        start = self._experiment.start
        if options.print_input_density:
            self._density = DensityProbe(self._module, self._original_forward)
        if options.print_memory_stats:
            self._phases = phases = PhaseProbe(self._device)
            self._stopwatch.on_phase = lambda phase: phases.take(self._number, phase)
        start.seed(self._engine.name)
        self._engine.start_over()
        return Run(
            number=number,
            engine=self._engine.name,
            options=options,
            start_digest=start.digest,
            seed=torch.initial_seed(),
            device=str(self._device),
            started_at=started_at,
            # What follows is known only once the steps have run.
            steps=self._steps(show=show, partial=partial),
            mode=self._mode(),
            initialization=self._initialization,
            memory=self._probe.read(),
            fallback_reason=self._fallback_reason,
            data_digest=self._data.hexdigest(),
            graph_digests=self._engine.graph_digests(),
            versions=versions(),
            density=self.density,
            phases=self._phases.read() if self._phases else (),
            coverage=self._engine.total_coverage,
            optimizers=tuple(self._optimizers),
            step_memory_bytes=self._step_memory(),
            others_cores=self._others.cores(),
            planned_steps=self._planned_steps,
            unkept=start.unkept,
        )

    @property
    def memory_phases(self) -> MemoryPhases:
        """The memory that has been read so far at the points of the steps."""
        return MemoryPhases(self._phases.read() if self._phases else (), "this run")

    @property
    def density(self) -> Density:
        """The density of the inputs that have been counted so far; empty unless `print_input_density` is on."""
        return self._density.read() if self._density else Density()

    @property
    def _planned_steps(self) -> int:
        return self._experiment.count

    def _steps(self, *, show: bool, partial: bool) -> tuple[Step, ...]:
        count = self._experiment.count
        steps: list[Step] = []
        self._probe.start()
        self._others.start()
        exchange = exchange_watched(self._module, self._stopwatch, self._device)
        with (
            exchange,
            self._experiment.start.steps_watched(),
            self._stopwatch.watching(),
            self._progress.task(count, evenly=True, show=show) as task,
        ):
            try:
                with interrupts_kept() as raise_lost:
                    for number in range(1, count + 1):
                        raise_lost()
                        self._number = number
                        steps.append(self._step())
                        task.step(steps[-1].loss, steps[-1].total_ms)
            except KeyboardInterrupt as interrupt:
                if not (partial and steps):
                    raise
                self.interrupt = interrupt
        return tuple(steps)

    def forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run one forward of the module, timed."""
        watch = self._stopwatch
        self._modes.add(self._module.training)
        with watch.excluded():
            self._data.update(list(args), dict(kwargs))
            if self._density is not None:
                self._density.count(self._number, args, kwargs)
        with watch.forward():
            outputs = self._engine.forward(args, kwargs)
        self._executed_by.add(self._engine.executed_by)
        self._fallback_reason = self._fallback_reason or self._engine.fallback_reason
        return outputs

    def built(self, done: Initialization) -> None:
        """Write down that the engine has just built something, before it runs the module."""
        self._add_build(done)
        # An export needs more memory than the steps it is for: their peak counts from here on.
        with self._stopwatch.excluded():
            self._probe.start()

    def _add_build(self, done: Initialization) -> None:
        self._stopwatch.initialization_ms += done.total_ms
        so_far = self._initialization
        self._initialization = done if so_far is None else so_far.plus(done)

    def _step(self) -> Step:
        watch = self._stopwatch
        self._executed_by = set()
        self._probe.start_step()
        faults = page_faults()
        watch.start_step()
        result = self._experiment.step()
        total_ms = watch.elapsed_ms()
        taken = faults_since(faults)
        self._rises.append(self._probe.rise_of_step() if not watch.initialization_ms else None)
        self._check_step()
        step = self._timed(total_ms, _loss(result, watch.backward_root))
        return replace(step, page_faults=taken and taken.minor, swapped_pages=taken and taken.major)

    def _timed(self, total_ms: float, loss: float | None) -> Step:
        """Write down what the stopwatch shows of a step."""
        watch = self._stopwatch
        return Step(
            total_ms=total_ms,
            forward_ms=watch.forward_ms,
            backward_ms=watch.backward_ms,
            optimizer_ms=watch.optimizer_ms,
            initialization_ms=watch.initialization_ms,
            loss=loss,
            executed_by=self._who(),
            exchange_ms=watch.exchange_ms,
        )

    def _step_memory(self) -> int | None:
        """Return the highest rise of a warm step, in bytes, where the allocator tells it in passing, as on CUDA."""
        warm = [rise for rise in self._rises[1:] if rise is not None]
        return max(warm) if warm and self._allocator_tells() else None

    def _allocator_tells(self) -> bool:
        """Say whether the engine's memory comes from torch's allocator: ORT may keep a pool of its own."""
        options = getattr(self._engine, "options", None)
        return self._engine.name != "ort" or bool(options and options.external_gpu_allocator)

    def _note_optimizer(self, optimizer: object) -> None:
        self._experiment.start.include(optimizer)
        self._optimizers[optimizer_name(optimizer)] = None

    def _who(self) -> str:
        # A call of the model that uses none of the wrapped parts takes nothing from those that do.
        who = self._executed_by - {EXECUTED_BY_EAGER} or self._executed_by
        return next(iter(who)) if len(who) == 1 else EXECUTED_BY_FALLBACK

    def _mode(self) -> str:
        if len(self._modes) > 1:
            return "mixed"
        return "training" if True in self._modes else "evaluation"

    def _check_root(self, root: torch.Tensor) -> None:
        """Explain a backward that torch is about to refuse."""
        if root.requires_grad:
            return
        name, parameters = type(self._module).__name__, list(self._module.parameters())
        if not any(parameter.requires_grad for parameter in parameters):
            raise StepError(
                f"{name} has no trainable parameter, so backward() has nothing to compute.",
                why=f"All of its {len(parameters)} parameters have requires_grad=False."
                if parameters
                else "It has no parameters at all.",
                fix="Unfreeze what shall learn: model.head.requires_grad_(True). To time inference, call model.eval() "
                "and no backward().",
            )
        raise StepError(
            "The loss does not depend on any parameter, so backward() has nothing to compute.",
            why="It was computed under torch.no_grad(), detached, or from something else than the model's outputs.",
            fix="Compute it from what the model returned, outside torch.no_grad().",
        )

    def _check_step(self) -> None:
        if not self._stopwatch.forward_calls:
            raise not_called("There is nothing that ONNX Runtime could have executed.")
        if self._engine.name == "ort" and self._executed_by == {EXECUTED_BY_EAGER}:
            parts = [part.path for part in self._engine.total_coverage.parts]
            raise StepError(
                "The step called the model, but none of its wrapped parts.",
                why=f"The model's forward did not call {names(parts)}, so PyTorch executed all of it.",
                fix="Wrap sub-modules that the forward calls: ortlab.wrap(model, only=[...]) after lab.unwrap().",
            )
        if self._module.training and not self._stopwatch.backward_calls:
            raise StepError(
                "The step called the model but no backward().",
                why="Without it nothing is trained, and there is no backward pass to measure.",
                fix="Add loss.backward() and optimizer.step(), or call model.eval() first to time inference.",
            )


def _loss(result: object, root: torch.Tensor | None) -> float | None:
    loss = result if isinstance(result, (torch.Tensor, float, int)) else root
    if isinstance(loss, torch.Tensor):
        return float(loss.detach().float().item()) if loss.numel() == 1 else None
    return None if loss is None else float(loss)


class HeldRecording(Recording):
    """Executes an experiment once, under a ceiling that `hold` puts up."""

    # A build is not held to the limit: C++ code that builds graphs does not survive a lack of memory, and it needs
    # about as much for a small batch as for a large one. `pending` says whether the engine builds something first.
    # `settle` prepares the heap before steps and between them, so that the resident set follows the live buffers.

    def __init__(
        self, *facts: Any, hold: Callable[[], None], settle: Callable[[], object], pending: bool
    ) -> None:
        super().__init__(*facts)
        self._hold = hold
        self._settle = settle
        self._pending = pending

    def run(self, number: int, options: Options, *, show: bool, partial: bool = False) -> Run:
        """Execute the steps and write the run down; see `Recording.run`."""
        self._settle()
        if not self._pending:
            self._hold()
        return super().run(number, options, show=show, partial=partial)

    def built(self, done: Initialization) -> None:
        """Write down that the engine has just built something, and put the ceiling up before it runs."""
        with self._stopwatch.excluded():
            self._settle()
        super().built(done)
        self._hold()

    def _step(self) -> Step:
        step = super()._step()
        self._settle()
        return step


class LoopRecording(Recording):
    """Executes a whole loop once, and finds its steps."""

    # A step goes from the first forward in training mode after the last step to the end of the optimizer's step, so it
    # has as many forwards as gradients are accumulated over. Evaluation, logging, saving and the loading of a step's
    # first batch belong to no step.

    failure: BaseException | None = None  # what ended the loop early, after at least one step

    @property
    def _planned_steps(self) -> int:
        return 0  # the loop knows, and tells nobody

    def _steps(self, *, show: bool, partial: bool) -> tuple[Step, ...]:  # noqa: ARG002 - the loop draws its own bar
        self._done: list[Step] = []
        self._losses: list[float] = []
        self._is_open = False
        self._measured: Step | None = None
        self._probe.start()
        exchange = exchange_watched(self._module, self._stopwatch, self._device)
        line = self._progress.task(show=False)
        with exchange, self._stopwatch.watching(), line as self._task:
            hook = register_optimizer_step_post_hook(self._optimizer_stepped)
            try:
                with interrupts_kept():  # which has to see an interrupt leave: another one would follow
                    self._experiment.step()
            except BaseException as failure:
                self._close()
                if not self._done:
                    raise
                self.failure = failure
            finally:
                hook.remove()
        self._close()
        if not self._done:
            self._explain_no_step()
        return tuple(self._done)

    def forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run one forward of the module; timed, and part of a step, in training mode only."""
        if not self._module.training:
            outputs = self._engine.forward(args, kwargs)
            self._fallback_reason = self._fallback_reason or self._engine.fallback_reason
            return outputs
        self._close()
        if not self._is_open:
            self._is_open = True
            self._number += 1
            self._executed_by = set()
            self._stopwatch.start_step()
        with self._stopwatch.excluded():
            self._note_loss()
        return super().forward(args, kwargs)

    def built(self, done: Initialization) -> None:
        """Write down that the engine has just built something; the peak starts anew for the first graph only."""
        if self._module.training and not self._done:
            super().built(done)
        else:
            self._add_build(done)

    def _optimizer_stepped(self, optimizer: Any, *_: Any) -> None:
        """Measure the open step as it is now; another optimizer may follow before the next forward."""
        watch = self._stopwatch
        if not self._is_open or not watch.steps(optimizer):
            return
        with watch.excluded():
            self._note_loss()
        self._measured = self._timed(watch.elapsed_ms(), sum(self._losses) if self._losses else None)

    def _note_loss(self) -> None:
        """Add the loss of the last backward to the step's; the loop has scaled each to its part of the batch."""
        root, self._stopwatch.backward_root = self._stopwatch.backward_root, None
        if isinstance(root, torch.Tensor) and root.numel() == 1:
            self._losses.append(float(root.detach().float().item()))

    def _close(self) -> None:
        """End the open step if its optimizer has stepped; otherwise leave it open."""
        if self._measured is None:
            return
        self._done.append(self._measured)
        self._task.step(self._measured.loss, self._measured.total_ms)
        self._losses, self._is_open, self._measured = [], False, None

    def _explain_no_step(self) -> None:
        if not self._is_open:
            raise StepError(
                "The training did not call the wrapped model in training mode.",
                why="There is nothing that ONNX Runtime could have executed.",
                fix="Give the trainer the model that was wrapped, Trainer(model=lab.module), and let it train.",
            )
        raise StepError(
            "The training called the model, and no optimizer made a step.",
            why="A step is written down when a torch.optim optimizer has made it.",
            fix="Let the loop call optimizer.step(), or time single calls: lab.step(fn).",
        )
