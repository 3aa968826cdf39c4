"""The search for a batch size: what is asked, then sizes and plans tried under a limit, and what fits timed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils._pytree import tree_leaves

from ortlab import units
from ortlab.engine.diagnosis import ran_out, reason
from ortlab.engine.installation import versions
from ortlab.errors import LedgerError, OptionError, StepError
from ortlab.runs.experiment import check_count, check_weights, start_of
from ortlab.runs.interrupts import interrupts_kept
from ortlab.studies.batch_size import BatchSizeSearch, following, plans_name, remaining
from ortlab.studies.batch_size_room import Room
from ortlab.studies.batch_size_trials import Trials, read_plan_sets
from ortlab.studies.study import check_same_ground, kept

if TYPE_CHECKING:
    MakeBatch = Callable[[int], Any]
    Train = Callable[[Any], object]

    from ortlab.runs.bench import Bench
    from ortlab.studies.batch_size import Task

_EXAMPLE = (
    'lab.find_batch_size(lambda size: {name: tensor[:size] for name, tensor in data.items()}, limit="6 GiB")'
)

STEPS: Final = 3
"""Timed steps of each run, where the user asks for no other number."""

ROUNDS: Final = 2
"""Timed runs of each point."""

_WORDS: Final = {"try": "trying", "time": "timing", "choose": "reading the plans"}


@interrupts_kept()
def find_batch_size(  # noqa: PLR0913 - a limit is of one thing or the other
    bench: Bench,
    make_batch: Callable[[int], Any],
    limit: str | int | None = None,
    *,
    device: str | int | None = None,
    train: Callable[[Any], object] | None = None,
    sizes: Iterable[int] | None = None,
    plans: Sequence[str | Sequence[str]] | None = None,
    n: int = STEPS,
    resume: BatchSizeSearch | None = None,
    progress: bool = True,
) -> BatchSizeSearch:
    """Look for the batch size, and the recompute plans, that train most samples per second under a limit.

    Sizes go up until one does not fit. Then sets of plans are tried on it, each from the largest batch that fits
    without. What fits is timed in rounds. A point that is predicted not to fit is not run; one that runs out of
    memory all the same fails with an error that is written down, and the next point runs. Afterwards weights,
    gradients, optimizers, random state, options and engine are as before; nothing is added to the ledger.

    Parameters
    ----------
    make_batch
        `make_batch(size)` returns a batch of that many samples: a mapping, a tuple or a tensor.
    limit
        What a step may need above its start, its step memory: "6 GiB", or a whole number of bytes.
    device
        Instead: what the whole process may hold (on a CPU, its resident set) or torch's allocator hand out (on
        CUDA), weights, optimizer state and libraries included.
    train
        `train(batch)` takes one training step. By default forward, loss (`output.loss`, or the output itself if it
        is a scalar), backward, and gradients cleared; no optimizer.
    sizes
        Batch sizes to try; by default powers of two from 1.
    plans
        What to recompute where a size does not fit without, as `lab.plan()` has it: each a plan ("Gelu+:1:-1"), a
        value of the switch `recompute` ("recompute=layers"), or several that go together. By default the largest
        that ORT offers, layers, and layers but linear. Every other engine than "ort" has none.
    n
        Timed steps of each run, after one that is not timed; each point that fits has two runs.
    resume
        A search that was interrupted, from `lab.batch_size_searches` or `BatchSizeSearch.load`; it has its
        limit, sizes and plans.
    progress
        Whether to show a progress bar on a terminal.

    Returns
    -------
    BatchSizeSearch
        The record, also in `lab.batch_size_searches`.

    Raises
    ------
    OptionError
        If the limit is no size, or a device holds more already; if both or neither are given, or `make_batch`
        cannot make the first batch.
    StepError
        If the first step fails for another reason than memory, or a step is running.
    LedgerError
        If the search to resume started elsewhere.
    KeyboardInterrupt
        If the user interrupts. The points so far are kept in `lab.batch_size_searches[-1]`.

    Examples
    --------
    >>> lab.find_batch_size(lambda size: {name: tensor[:size] for name, tensor in data.items()}, limit="6 GiB")
    """
    bench.check_usable("search for a batch size")
    check_callable(make_batch, "make_batch")
    if train is not None:
        check_callable(train, "train")
    check_weights(bench.module)
    step = plain_step(bench) if train is None else train
    where = next((tensor.device for tensor in bench.module.parameters()), None)
    if where is None:
        raise OptionError("The model has no parameters, so there is nothing to train.")
    room = Room(where)
    if resume is not None and (limit, device, sizes, plans, n) != (None, None, None, None, STEPS):
        raise OptionError(
            "A search that is resumed has its limit, sizes, plans and steps already.",
            fix="lab.find_batch_size(make_batch, resume=...) alone, with the same train.",
        )
    asked = None if resume is not None else _read(bench, limit, device, sizes, plans, n)
    room.free()
    used = room.used_bytes()
    if asked is not None and asked["of_device"]:
        check_above_floor(asked["asked_bytes"], used, str(where))
    start = start_of(step, bench.module)
    if asked is None:
        assert resume is not None  # noqa: S101 - one of the two is there
        check_resumable(resume, start.digest, versions(), bench.configuration.engine)
        search, search.stopped = resume, False
    else:
        search = BatchSizeSearch(
            len(bench.batch_size_searches) + 1,
            bench.name,
            engine=bench.configuration.engine,
            device=str(where),
            held_bytes=used,
            start_digest=start.digest,
            kept_bytes=start.number_of_bytes,
            versions=versions(),
            **asked,
        )
    trials = Trials(bench, search, lambda size: checked_batch(make_batch, size), step, start, room)
    return _searched(bench, search, trials, show=progress)


def _read(
    bench: Bench, limit: object, device: object, sizes: object, plans: object, steps: int
) -> dict[str, Any]:
    asked_bytes = read_limit(limit, device)
    check_count(steps)
    sets = read_plan_sets(plans)
    if bench.configuration.engine != "ort":
        if sets:
            raise OptionError(
                f"Recompute plans act in ONNX Runtime, and the engine is {bench.configuration.engine!r}.",
                fix='lab.set(engine="ort"), or leave plans out.',
            )
        sets = ()
    return {
        "asked_bytes": asked_bytes,
        "of_device": device is not None,
        "sizes": read_sizes(sizes),
        "plan_sets": sets,
        "steps": steps,
        "rounds": ROUNDS,
    }


def _searched(bench: Bench, search: BatchSizeSearch, trials: Trials, *, show: bool) -> BatchSizeSearch:
    has_session = bench.configuration.engine == "ort" and not bench.engine.pending_stage()

    def stopped() -> str:
        search.stopped = True
        return f"the search after {len(search.points)} points"

    with (
        # Where the first batch failed there is nothing to keep.
        kept(
            bench.batch_size_searches,
            search,
            "lab.batch_size_searches",
            stopped,
            "go on: %ort_find_batch_size MAKE_BATCH --resume, or lab.find_batch_size(make_batch, resume={})",
            is_empty=lambda: not search.points,
        ),
        trials.lab_as_before(had_session=has_session),
        bench.progress.task(show=show) as bar,
    ):
        done = 0
        while (task := following(search)) is not None:
            # How many points there will be is not known before one does not fit.
            bar.report(_task_words(task, search), done / (done + remaining(search) + 1))
            trials.do(task)
            done += 1
    return search


def _task_words(task: Task, search: BatchSizeSearch) -> str:
    """Say what a task does: "Batch 32, no plans: timing, round 1 of 2"."""
    what = _WORDS[task.kind]
    rounds = f", round {task.round} of {search.rounds}" if task.kind == "time" else ""
    return (
        f"Batch {task.size}, {plans_name(task.plans)}: {what}" if task.size else what.capitalize()
    ) + rounds


def read_sizes(sizes: object) -> tuple[int, ...] | None:
    """Return the batch sizes that a user names in ascending order; None stays None."""
    if sizes is None:
        return None
    fix = "sizes=[8, 16, 32], or leave it out for powers of two from 1."
    given = list(sizes) if isinstance(sizes, Iterable) and not isinstance(sizes, (str, bytes)) else [sizes]
    read: set[int] = set()
    for size in given:
        if not units.is_whole(size, 1):
            raise OptionError(f"A batch size must be a whole number from 1 on, not {size!r}.", fix=fix)
        read.add(size)
    if not read:
        raise OptionError("There are no batch sizes to try.", fix=fix)
    return tuple(sorted(read))


def read_limit(limit: object, device: object) -> int:
    """Return the limit of a search in bytes, of step memory or of a whole device."""
    fix = 'lab.find_batch_size(make_batch, limit="6 GiB") of step memory, or device="8 GiB" of all of it.'
    if limit is None and device is None:
        raise OptionError("A search needs a limit of memory.", fix=fix)
    if limit is not None and device is not None:
        raise OptionError("A search has one limit: of step memory, or of the whole device.", fix=fix)
    asked = limit if device is None else device
    if isinstance(asked, str) and "%" in asked:
        raise OptionError(
            f"The limit is {asked.strip()!r}.",
            why="A percentage is of what one step needs; a search changes the batch, and with it what a step needs.",
            fix=fix,
        )
    return units.read_size(asked)


def check_above_floor(limit_bytes: int, used_bytes: int, device: str) -> None:
    """Raise OptionError for a limit below what is in use before any step, which no batch can meet."""
    if limit_bytes > used_bytes:
        return
    what = "The process, with Python, libraries and weights," if device == "cpu" else f"Torch on {device}"
    raise OptionError(
        f"The limit of {limit_bytes:,} bytes is below what is in use before any step.",
        why=f"{what} takes {used_bytes:,} bytes already.",
        fix='Give more, or limit what a step needs above that: lab.find_batch_size(make_batch, limit="6 GiB").',
    )


def check_resumable(
    search: BatchSizeSearch, start_digest: str, present: Mapping[str, str], engine: str
) -> None:
    """Raise LedgerError if a search was made from another start, with another engine or other versions."""
    check_same_ground(search, "search", start_digest, search.versions, present)
    if search.engine != engine:
        raise LedgerError(
            "This search cannot be resumed here: its points were executed by another engine.",
            why=f"They were executed by {search.engine}, and the lab is set to {engine}.",
            fix=f"lab.set(engine={search.engine!r}) first, or start another search.",
        )


def checked_batch(make_batch: MakeBatch, size: int) -> Any:
    """Make a batch and check that a tensor of it has `size` as its first dimension."""
    try:
        batch = make_batch(size)
    except Exception as error:
        if ran_out(error):
            raise MemoryError(f"make_batch({size}): {error}") from error
        raise OptionError(
            f"make_batch({size}) failed: {reason(error)}.",
            fix="Try it by itself; it must return a batch of any size.",
        ) from error
    leaves = tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)  # a BatchEncoding is no dict
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()]
    if not tensors:
        raise OptionError(
            f"make_batch({size}) returned a {type(batch).__name__} without tensors.",
            why="A batch is a mapping, a tuple or a tensor; its size is that of the tensors' first dimension.",
            fix=_EXAMPLE,
        )
    if not any(tensor.size(0) == size for tensor in tensors):
        shapes = ", ".join(" x ".join(map(str, tensor.shape)) for tensor in tensors[:3])
        raise OptionError(
            f"make_batch({size}) returned a batch of {tensors[0].size(0)}: its tensors are {shapes}.",
            why="The first dimension of one tensor at least must be the size that was asked for.",
            fix=_EXAMPLE,
        )
    return batch


def check_callable(thing: object, name: str) -> None:
    """Raise OptionError for what cannot be called."""
    if not callable(thing):
        raise OptionError(f"{name} must be a function, not a {type(thing).__name__}.", fix=_EXAMPLE)


def plain_step(bench: Bench) -> Train:
    """Return the step that is taken where the user gives none: forward, loss, backward, gradients cleared."""
    # The loss is `output.loss`, `output["loss"]`, the first of a tuple, or the output itself, whichever is a scalar.
    # The step has no optimizer, so no peak contains optimizer state.
    module = bench.module

    def train(batch: Any) -> torch.Tensor:
        with bench.takeover.entered():
            if isinstance(batch, Mapping):
                output = module(**batch)
            else:
                output = module(*batch) if isinstance(batch, (tuple, list)) else module(batch)
        loss = _loss(output)
        loss.backward()  # type: ignore[no-untyped-call]
        module.zero_grad(set_to_none=True)
        return loss.detach()

    return train


def _loss(output: Any) -> torch.Tensor:
    first = output[0] if isinstance(output, (tuple, list)) and output else None
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    for found in (named, first, output):
        if isinstance(found, torch.Tensor) and found.numel() == 1:
            return found
    raise StepError(
        f"The model returned a {type(output).__name__} without a loss.",
        why="The search trains by output.loss, or by the output itself if it is a scalar.",
        fix="Put the labels into the batch, or give a step: lab.find_batch_size(make_batch, limit=..., train=step).",
    )
