"""What a lab does to take a snapshot of a GPU's memory: run the last step again, and put everything back."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from ortlab.errors import BuildError, StepError
from ortlab.lab.measuring_lab import MeasuringLab
from ortlab.memory.device_snapshot import named_snapshot
from ortlab.memory.named_blocks import KeptBuffer, kept_buffers
from ortlab.runs.snapshot import Snapshot
from ortlab.runs.snapshotting import CudaHistory, Snapshotting

if TYPE_CHECKING:
    import torch

    from ortlab.engine.ort import OrtEngine
    from ortlab.memory.device_snapshot import MemorySnapshot
    from ortlab.memory.saved_activations import SavedActivations


class SnapshotLab(MeasuringLab):
    """The base of `Lab` that takes snapshots of a GPU's memory; the abstract parts are the lab's."""

    def memory_snapshot(self, **changes: object) -> MemorySnapshot:
        """Run the last step again while torch's CUDA allocator writes its history down, and name what is in its blocks.

        The steps do not count, so nothing comes into the ledger. Afterwards, also after a failure or an interrupt,
        weights, gradients, optimizers, random state, engine and options are as they were before the call. A recording
        of the allocator's history that the caller has begun ends.

        Parameters
        ----------
        **changes
            Options to run with, and `engine`, as for `set`. Nothing is changed in the lab.

        Returns
        -------
        MemorySnapshot
            The blocks in use when the forward had ended, and what is in each, as far as it can be told; `save` writes
            the file that torch's memory viewer opens, with the history of the whole step and the names in it.

        Raises
        ------
        StepError
            If the model is not on an NVIDIA GPU, ONNX Runtime keeps a pool of its own there, no step has run yet, a
            step is running, or the step has no backward.
        OptionError
            If a change is none that `set` would take.
        Exception
            Whatever the step raises.

        Examples
        --------
        >>> snapshot = lab.memory_snapshot()
        >>> snapshot.save("step.pickle")  # open it at https://pytorch.org/memory_viz
        """
        self._check_usable("take a memory snapshot")
        device = _gpu_of(self.module)
        experiment = self._last_experiment().times(1)
        configuration = self._configuration
        wished = configuration.tried(changes, self.have)
        before = Snapshot(self.module, experiment.start.stateful)

        def include(optimizer: Any) -> None:
            experiment.start.include(optimizer)
            before.include(optimizer)

        try:
            self._configure(self._without_arena(wished))
            experiment.start.put_back()
            self._recording = snapshotting = Snapshotting(
                self.module,
                self._engine,
                experiment,
                wished.options,
                include,
                self._report_progress,
                CudaHistory(),
            )
            taken = snapshotting.take()
            if wished.engine != "ort":
                return named_snapshot(taken, device, wished)
            activations = self.activations(progress=False)
            return named_snapshot(
                taken, device, wished, self._kept_buffers(activations), len(activations.unknown)
            )
        finally:
            self._recording = None
            before.put_back()
            self._configure(configuration)
            self._report_progress("", 1.0)

    def _kept_buffers(self, activations: SavedActivations) -> list[KeptBuffer]:
        """Say of each kept activation whose size is known when its memory can have been allocated."""
        from ortlab.engine.allocation_order import earliest_places

        earliest: dict[tuple[str, str], int] = {}
        for path, engine in self._engines(None).items():
            try:
                execution = engine.execution
            except BuildError:  # a part that was not called
                continue
            values = [row.value for row in activations.rows if row.part == path]
            places = earliest_places(execution, values)
            earliest |= {(path, value): place for value, place in places.items()}
        return kept_buffers(activations, earliest)

    @abstractmethod
    def _engines(self, part: str | None) -> dict[str, OrtEngine]: ...


def _gpu_of(module: torch.nn.Module) -> torch.device:
    """Return the GPU that a model is on.

    Raises
    ------
    StepError
        If it is on none.
    """
    device = next((tensor.device for tensor in module.parameters()), None)
    if device is not None and device.type == "cuda":
        return device
    raise StepError(
        "A memory snapshot needs an NVIDIA GPU.",
        why=f"It is the history of torch's CUDA allocator, and the model is on {device or 'no device'}.",
        fix="Move model and batch to 'cuda'. On a CPU %ort_memory measures a step, and %ort_activations names what it "
        "keeps "
        "for backward.",
    )
