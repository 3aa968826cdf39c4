"""What a lab does to hold PyTorch and ONNX Runtime against each other, and to be as it was before."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from ortlab.runs.experiment import check_count
from ortlab.runs.interrupts import interrupts_kept, say
from ortlab.runs.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from ortlab.engine.capture import Edit
    from ortlab.engine.ort import OrtEngine
    from ortlab.options.configuration import Configuration
    from ortlab.options.options import Options
    from ortlab.parity.observation import Observation
    from ortlab.parity.record import Parity
    from ortlab.records.runs import Run
    from ortlab.runs.experiment import Experiment
    from ortlab.runs.progress import Progress
    from ortlab.runs.recording import Recording

_STEPS: Final = 2
"""The first step shows what the engines compute, the second what they make of what was updated."""


class ParityLab(ABC):
    """The base of `Lab` that compares engines; the abstract parts are the lab's."""

    module: torch.nn.Module
    name: str
    _options: Options
    _engine: Any
    _takeover: Any
    _recording: Recording | None
    _progress: Progress

    @interrupts_kept()
    def parity(
        self,
        n: int = _STEPS,
        *,
        dropout: bool = False,
        seeds: bool = True,
        progress: bool = True,
    ) -> Parity:
        """Run the last step on PyTorch and on ONNX Runtime from the same start, and compare every tensor.

        What modules take and return, the gradients of it, the parameters' gradients and the updated parameters are held
        against each other. PyTorch runs three times: once more as it is, and once with everything that a module returns
        moved by some units of rounding; ONNX Runtime runs twice, and once without anything taken out of it. So it is
        known at each place what repetition and rounding explain. If the runs part behind tensors that the compute
        optimizer has cut, ONNX Runtime runs once more with it off, to look for the module among them.

        Parameters
        ----------
        n
            How many steps.
        dropout
            Whether dropout stays as it is; otherwise it lets everything pass, wherever it is called. The two engines
            draw different masks.
        seeds
            Whether PyTorch runs twice more with dropout as it is, once with another seed.
        progress
            Whether to show a progress bar on a terminal.

        Returns
        -------
        Parity
            Every tensor with its facts on both sides, the first divergences, and the checklist. The ledger, the
            options, the weights and the optimizer are as they were before, also after a failure or an interrupt.

        Raises
        ------
        StepError
            If no step has run yet, one is running, or the runs got different batches.
        BuildError, ExecutionError
            If ONNX Runtime cannot build or run the step; PyTorch does not step in.
        Exception
            Whatever the step raises.

        Examples
        --------
        >>> found = lab.parity(n=2)
        >>> found.first
        """
        try:
            return self._parity(n, dropout=dropout, seeds=seeds, progress=progress)
        except KeyboardInterrupt as interrupt:
            say(
                interrupt,
                "Stopped the comparison; nothing is kept, and the lab is as it was before. Ask again.",
            )
            raise

    # ---- parts ------------------------------------------------------------------------------------------------

    def _parity(
        self, steps: int, *, dropout: bool, seeds: bool, progress: bool, edit: Edit | None = None
    ) -> Parity:
        """Compare; `edit` changes ONNX Runtime's gradient graph, for experiments with faults."""
        self._check_usable("compare engines")
        check_count(steps)
        experiment = self._last_experiment().times(steps)
        from ortlab.engine.apart import built_apart
        from ortlab.parity.running import compare_engines

        @contextmanager
        def apart(**changes: object) -> Iterator[Callable[[], None]]:
            with ExitStack() as stack:
                engines = self._engines(None).values()
                freeing = [stack.enter_context(built_apart(engine, **changes)) for engine in engines]

                def free_sessions() -> None:
                    for free in freeing:
                        free()

                yield free_sessions

        def trial(engine: str, observation: Observation | None = None, *, seed: int | None = None) -> Run:
            return self._observed(experiment, engine, observation, seed)

        with (
            self._left_as_it_was(experiment),
            interrupts_kept() as raise_lost,
            self._progress.task(show=progress) as bar,
        ):

            def tell(text: str, fraction: float) -> None:
                raise_lost()
                bar.report(text, fraction)

            return compare_engines(
                self.module,
                trial,
                apart,
                name=self.name,
                steps=steps,
                dropout=dropout,
                ask_seeds=seeds,
                cuts=self._options.compute_optimizer,
                progress=tell,
                edit=edit,
            )

    def _observed(
        self, experiment: Experiment, engine: str, observation: Observation | None, seed: int | None
    ) -> Run:
        """Go back to the start and run the steps; what is built apart keeps the options that it was given."""
        import torch

        from ortlab.runs.recording import Recording

        if self.engine != engine:
            self._engine = self._choose(engine)
        experiment.start.put_back()
        if seed is not None:
            torch.manual_seed(seed)
        step = experiment.step if observation is None else observation.stepping(experiment.step)
        self._recording = Recording(
            self.module,
            self._engine,
            self._takeover.original_forward,
            replace(experiment, step=step),
            self._progress,
        )
        try:
            return self._recording.run(0, self._options.replace(print_memory_stats=False), show=False)
        finally:
            self._recording = None

    @contextmanager
    def _left_as_it_was(self, experiment: Experiment) -> Iterator[None]:
        before, configuration = Snapshot(self.module, experiment.start.stateful), self._configuration
        try:
            yield
        finally:
            before.put_back()
            self._configure(configuration)

    @property
    @abstractmethod
    def engine(self) -> str:
        """The engine of the next step."""

    @property
    @abstractmethod
    def _configuration(self) -> Configuration:
        """Engine and switches together."""

    @abstractmethod
    def _configure(self, configuration: Configuration) -> object:
        """Take over engine and switches as a whole."""

    @abstractmethod
    def _choose(self, engine: str) -> Any: ...

    @abstractmethod
    def _engines(self, part: str | None) -> dict[str, OrtEngine]: ...

    @abstractmethod
    def _check_usable(self, what: str) -> None: ...

    @abstractmethod
    def _last_experiment(self) -> Experiment: ...
