"""A snapshot of a GPU's memory: the last step is run again while torch's allocator writes its history down."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ortlab.analyses.activations import activations
from ortlab.errors import BuildError, StepError
from ortlab.memory.device_snapshot import named_snapshot
from ortlab.memory.named_blocks import KeptBuffer, kept_buffers
from ortlab.runs.allocator_history import CudaHistory, Snapshotting
from ortlab.runs.step_memory import without_arena

if TYPE_CHECKING:
    import torch

    from ortlab.memory.device_snapshot import MemorySnapshot
    from ortlab.memory.saved_activations import SavedActivations
    from ortlab.runs.bench import Bench


def memory_snapshot(bench: Bench, /, **changes: object) -> MemorySnapshot:
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
    bench.check_usable("take a memory snapshot")
    device = _gpu_of(bench.module)
    experiment = bench.last_experiment().times(1)
    wished = bench.configuration.tried(changes, bench.have)
    with bench.as_before(experiment) as before, ExitStack() as stack:
        stack.callback(bench.progress.report, "", 1.0)

        def include(optimizer: Any) -> None:
            experiment.start.include(optimizer)
            before.include(optimizer)

        bench.configure(without_arena(bench, wished))
        experiment.start.put_back()
        bench.recording = snapshotting = Snapshotting(
            bench.module,
            bench.engine,
            experiment,
            wished.options,
            include,
            bench.progress.report,
            history=CudaHistory(),
        )
        taken = snapshotting.take()
        if wished.engine != "ort":
            return named_snapshot(taken, device, wished)
        kept = activations(bench, progress=False)
        return named_snapshot(taken, device, wished, _kept_buffers(bench, kept), len(kept.unknown))


def _kept_buffers(bench: Bench, kept: SavedActivations) -> list[KeptBuffer]:
    """Say of each kept activation whose size is known when its memory can have been allocated."""
    from ortlab.engine.allocation_order import earliest_places

    earliest: dict[tuple[str, str], int] = {}
    for path, engine in bench.engines(None).items():
        try:
            execution = engine.execution
        except BuildError:  # a part that was not called
            continue
        values = [row.value for row in kept.rows if row.part == path]
        places = earliest_places(execution, values)
        earliest |= {(path, value): place for value, place in places.items()}
    return kept_buffers(kept, earliest)


def _gpu_of(module: torch.nn.Module) -> torch.device:
    """Return the GPU that a model is on; raises StepError if it is on none."""
    device = next((tensor.device for tensor in module.parameters()), None)
    if device is not None and device.type == "cuda":
        return device
    raise StepError(
        "A memory snapshot needs an NVIDIA GPU.",
        why=f"It is the history of torch's CUDA allocator, and the model is on {device or 'no device'}.",
        fix="Move model and batch to 'cuda'. On a CPU %ort_memory measures a step, and %ort_activations names what it "
        "keeps for backward.",
    )
