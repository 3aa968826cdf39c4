"""The headline experiment: the largest batch of a DeBERTa-v2 under a limit, with and without GELU recomputed.

`bench/recompute_batch.py` runs it in full, `ortlab selftest` in small; both need each engine in a process of its own,
because what an engine has loaded counts in the resident set.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from ortlab.errors import StepError
from ortlab.records import record_files

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from ortlab.lab.lab import Lab

FREE_SHARE: Final = 0.9
"""Of a GPU's free memory, what the batches may take; the rest is for what no allocator counts."""

GELU: Final = ", GELU recomputed"
"""What stands behind the engine's name at a point with plans."""

STATED: Final = 562.041593991271 / 479.2543353561354
"""Samples per second with GELU recomputed over those without, as ONNX Runtime states them of 16 A100."""


@dataclass(frozen=True)
class Size:
    """How large the experiment is: a DeBERTa-v2, whose feed-forward layers are four times as wide as the others."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    length: int  # tokens in a sequence
    batches: tuple[int, ...]  # sizes to try, upwards
    steps: int = 3  # timed, of each run
    misfit: int = (
        0  # the batch that does not fit without plans, in a limit chosen for it; 0 for what a GPU has free
    )


TINY: Final = Size(2, 64, 4, 128, 64, (64, 128, 256), steps=1, misfit=256)
ON_CPU: Final = Size(3, 384, 6, 8192, 256, (2, 4, 8, 12, 16, 24, 32, 48), steps=2, misfit=8)
SMALL_ON_GPU: Final = Size(6, 768, 12, 8192, 256, (4, 8, 16, 32), misfit=16)
ON_GPU: Final = Size(24, 1024, 16, 128_100, 256, tuple(2**power for power in range(13)))


@dataclass(frozen=True)
class Row:
    """One point: a batch size on an engine, perhaps with recompute plans."""

    engine: str  # as `Lab.set` takes it, and behind it what was recomputed: `GELU`, or ", recompute=layers"
    batch: int  # samples
    outcome: str  # "fits", "over the limit", "ran out of memory", "not run", "fell back" or "failed"
    rise_bytes: int | None  # step memory; None if it was not measured
    samples_per_s: float | None  # measured median; None if it was not timed
    plans: tuple[str, ...]


@dataclass(frozen=True)
class Headline:
    """What one engine reached on "cpu" or "cuda"."""

    device: str
    room_bytes: int  # the most step memory that a point may need
    rows: tuple[Row, ...]  # the points, in the order in which they ran

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types, readable by `from_dict`."""
        return asdict(self)

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Headline:
        """Rebuild the record from `to_dict`; a missing field raises KeyError or TypeError."""
        return record_files.rebuilt(cls, record)


def largest(rows: tuple[Row, ...], engine: str) -> Row | None:
    """Return the point of an engine with the largest batch that fits and was timed; None if none was."""
    fitting = [row for row in rows if row.engine == engine and row.samples_per_s]
    return max(fitting, key=lambda row: row.batch, default=None)


def run_headline(
    engine: str, size: Size, device: str, *, room_bytes: int = 0, also: tuple[str, ...] = ()
) -> Headline:
    """Search for the largest batch with one engine, in this process, on "cpu" or "cuda".

    `engine` is as `Lab.set` takes it; "ort" tries batches that do not fit with GELU recomputed as well, and with each
    of `also`, for example "recompute=layers". The optimizer is AdamW; its state is made in a first step.

    `room_bytes` is the most step memory that a point may need: what a step needs above its own start. 0 chooses: a
    quarter of what recomputing GELU saves less than a batch of `size.misfit` needs without, which asks for engine
    "ort"; without a misfit `FREE_SHARE` of what a GPU has free.

    Raises OrtlabError if a batch of the first size cannot be trained.
    """
    import torch

    import ortlab

    model = deberta(size).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    lab = ortlab.wrap(model, name="DeBERTa-v2", log_level="ERROR", engine=engine)

    def make_batch(count: int) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(count)
        ids = torch.randint(5, size.vocabulary, (count, size.length), generator=draw).to(device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}

    def train(batch: dict[str, torch.Tensor]) -> Any:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    try:
        train(make_batch(size.batches[0]))
        plan, saving = gelu_plan(lab) if engine == "ort" else ((), 0.0)
        if not room_bytes:
            room_bytes = _room(lab, make_batch, train, size, saving)
        search = lab.find_batch_size(
            make_batch,
            limit=room_bytes,
            train=train,
            sizes=size.batches,
            plans=[plan, *also] if plan else also,
            n=size.steps,
            progress=False,
        )
    finally:
        lab.unwrap()
    rows = tuple(
        Row(
            engine + (GELU if one.plans == plan else f", {one.plans[0]}") if one.plans else engine,
            one.size,
            one.outcome,
            one.step_memory_bytes,
            one.samples_per_s if one.timed else None,
            one.plans,
        )
        for one in search.points
    )
    return Headline(device, room_bytes, rows)


def deberta(size: Size) -> Any:
    """Return a DeBERTa-v2 for masked-language modelling with seeded weights, in training mode."""
    import torch
    import transformers

    torch.manual_seed(2024)
    # The configuration takes these, and declares none of them.
    relative: dict[str, Any] = {"position_buckets": min(256, size.length), "share_att_key": True}
    relative["norm_rel_ebd"] = "layer_norm"
    config = transformers.DebertaV2Config(
        num_hidden_layers=size.layers,
        hidden_size=size.hidden,
        num_attention_heads=size.heads,
        intermediate_size=4 * size.hidden,
        vocab_size=size.vocabulary,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        **relative,
    )
    return transformers.DebertaV2ForMaskedLM(config).train()


def gelu_plan(lab: Lab) -> tuple[tuple[str, ...], float]:
    """Return the plan that recomputes every GELU, and the bytes it saves in the last batch that ran.

    Of several plans with a GELU it is the shortest, and none where ORT offers none. The bytes are worked out from
    shapes, and go with the batch.
    """
    rows = [row for row in lab.plan().rows if "Gelu" in row.cluster and row.strategy == 1]
    rows.sort(key=lambda row: (row.cluster.count("+"), row.cluster))
    return ((rows[0].config,), rows[0].saving_bytes or 0.0) if rows else ((), 0.0)


def _room(
    lab: Lab,
    make_batch: Callable[[int], Any],
    train: Callable[[Any], object],
    size: Size,
    saving: float,
) -> int:
    import torch

    misfit = size.misfit
    if not misfit:
        return int(FREE_SHARE * torch.cuda.mem_get_info()[0])
    below = [one for one in size.batches if one < misfit]
    loose = lab.find_batch_size(
        make_batch, limit="1 TiB", train=train, sizes=below[-2:], plans=(), n=1, progress=False
    )
    without = loose.predicted(misfit, ())
    if without is None:
        raise StepError(
            f"What a batch of {misfit} takes cannot be told from smaller ones.",
            why="; ".join(f"{one.size}: {one.outcome}" for one in loose.points),
            fix="Give the room in bytes.",
        )
    return int(without - saving * misfit / size.batches[0] / 4)
