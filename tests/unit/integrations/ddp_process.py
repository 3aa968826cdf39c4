"""One process of a group that trains with DistributedDataParallel, in PyTorch and with ORT inside; prints JSON.

python ddp_process.py STORE_FILE RANK WORLD_SIZE
"""

from __future__ import annotations

import contextlib
import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ortlab
from ortlab.ortmodule import ORTModule

STEPS, PARTS = 3, 2


class Classifier(nn.Module):
    """Layers with a frozen one, a normalisation and a loss; BatchNorm's statistics are what DDP sends around."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.norm = nn.BatchNorm1d(8)
        self.first = nn.Linear(8, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.last = nn.Linear(16, 3)

    def forward(self, tokens, labels):
        hidden = self.norm(self.embedding(tokens).mean(1))
        logits = self.last(torch.relu(self.frozen(self.first(hidden))))
        return nn.functional.cross_entropy(logits, labels), logits


def train(rank: int, order: str) -> tuple[nn.Module, list[float], str]:
    """Train on this rank's data: accumulated over two batches, the first without synchronisation, and clipped."""
    torch.manual_seed(0)
    model = Classifier()
    lab = ortlab.wrap(model) if order == "wrapped first" else None
    around = ORTModule(model) if order == "ORTModule" else model
    parallel = DistributedDataParallel(around)
    if order == "wrapped inside":
        lab = ortlab.wrap(parallel.module)
    elif order == "ORTModule":
        lab = around.lab
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9)
    data = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(STEPS):
        for part in range(PARTS):
            tokens = torch.randint(0, 20, (4, 6), generator=data)
            labels = torch.randint(0, 3, (4,), generator=data)
            with parallel.no_sync() if part < PARTS - 1 else contextlib.nullcontext():
                loss = parallel(tokens, labels)[0]
                (loss / PARTS).backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(parallel.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    executed_by = lab.status.executed_by if lab is not None else "eager"
    if lab is not None:
        lab.unwrap()
    return model, losses, executed_by


def found(rank: int) -> dict[str, object]:
    """Hold ORT inside DDP, wrapped before and after DDP was made, against PyTorch."""
    expected, losses, _ = train(rank, "not wrapped")
    results = {}
    for order in ("wrapped first", "wrapped inside", "ORTModule"):
        model, measured, executed_by = train(rank, order)
        pairs = zip(model.state_dict().values(), expected.state_dict().values(), strict=True)
        results[order] = {
            "executed by": executed_by,
            "losses": [measured, losses],
            "differences": [relative(one, other) for one, other in pairs],
            "weights": [float(value.detach().double().sum()) for value in model.parameters()],
        }
    return results


def main() -> None:
    store, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    try:
        print(json.dumps(found(rank)))
    finally:
        dist.destroy_process_group()


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    one, other = one.double(), other.double()
    return float((one - other).abs().max() / other.abs().max().clamp_min(1e-12))


if __name__ == "__main__":
    main()
