"""Two ranks on CPUs: parity with one process, how soon a killed rank is reported, and how even their times are.

Parity: a BERT with ORT inside DistributedDataParallel on two gloo ranks, against one process with the whole batch, on
ORT and in PyTorch. Killed: a rank is killed while the other waits for it in an exchange; the time runs from the signal
to the error in the notebook, when all processes have ended. Spread: an epoch whose batches are padded to their longest
sample, dealt out as samples come and balanced by length; computing is told apart from the exchange of gradients.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from typing import Any

from load_balance import drawn
from report import Report, arguments

BATCH = 8


def make(vocabulary: int, hidden: int) -> Any:
    """Make the BERT that all figures are about; it runs on each rank."""
    import torch
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=4 * hidden,
        max_position_embeddings=128,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForMaskedLM(config).train()


def train(make: Any, engine: str, steps: int) -> dict[str, Any]:
    """Train on this process's part of each batch, and return losses and parameters."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import ortlab

    model = make(200, 64)
    together = dist.is_initialized()
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
    lab = ortlab.wrap(model, engine=engine)
    called = DistributedDataParallel(model) if together else model
    optimizer = torch.optim.AdamW(called.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        tokens, labels = torch.randint(1, 200, (2, 8, 32))[:, rank::ranks].contiguous()
        loss = called(input_ids=tokens, labels=labels).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    lab.unwrap()
    return {"losses": losses, "parameters": [one.detach().clone() for one in model.parameters()]}


def dealt(make: Any, sizes: list[int], epochs: list[list[list[int]]]) -> dict[str, Any]:
    """Train one run for each way of dealing samples out, and return this rank's ledger."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import ortlab
    from ortlab.ranks.ledgers import rank_ledger

    model = make(200, 128)
    lab = ortlab.wrap(model, print_input_density=True)
    parallel = DistributedDataParallel(model)
    for batches in epochs:
        own = iter(batches[dist.get_rank()])

        def step() -> Any:
            batch = next(own)  # noqa: B023 - called before the next turn
            ids = torch.zeros(len(batch), max(sizes[index] for index in batch), dtype=torch.long)
            for row, index in zip(ids, batch, strict=True):
                row[: sizes[index]] = index % 199 + 1
            loss = parallel(input_ids=ids, attention_mask=(ids != 0).long(), labels=ids.roll(1, 1)).loss
            loss.backward()
            parallel.zero_grad()
            return loss

        lab.step(step, n=min(map(len, batches)), progress=False)
    return rank_ledger(lab.runs).to_dict()


def killed() -> tuple[float, int]:
    """Kill a rank that another waits for; return the seconds to its report, and the processes that are left then."""
    import psutil

    from ortlab.ranks import Cluster
    from ortlab.ranks.processes import RankDiedError

    before = {one.pid for one in psutil.Process().children(recursive=True)}
    sent = 0.0

    def kill(outputs: Any) -> None:
        nonlocal sent
        if not sent and all("waits" in one.stdout for one in outputs):
            time.sleep(1)  # rank 0 is in the exchange by then
            sent = time.perf_counter()
            os.kill(cluster.processes[1], signal.SIGKILL)

    cell = """
import time, torch, torch.distributed as dist
print("waits", flush=True)
if dist.get_rank() == 1:
    time.sleep(3600)
dist.all_reduce(torch.ones(1))
"""
    with Cluster(2, threads=1) as cluster:
        try:
            cluster.run_cell(cell, seen=kill)
        except RankDiedError:
            seconds = time.perf_counter() - sent
    left = {one.pid for one in psutil.Process().children(recursive=True)} - before
    return seconds, len(left)


def main() -> None:
    """Measure, and write the record."""
    read = arguments(__doc__, rounds=5)
    from ortlab.ranks import Cluster
    from ortlab.ranks.balancing import balance
    from ortlab.ranks.ledgers import RankLedger, Ranks

    report = Report("ranks", read)
    sizes = drawn(64 if read.quick else 1024)
    record = balance(sizes, BATCH, ranks=2)
    ways = {"as they come": record.without[0], "balanced": record.having[0]}
    with Cluster(2, threads=1) as cluster:
        ranks = cluster.run(train, make, "ort", 4)
        ledgers = cluster.run(
            dealt, make, sizes, [[list(map(list, rank)) for rank in epoch.batches] for epoch in ways.values()]
        )
    rows = []
    for engine in ("ort", "eager"):
        alone = train(make, engine, 4)
        means = [statistics.mean(both) for both in zip(*(one["losses"] for one in ranks), strict=True)]
        losses = max(abs(one / other - 1) for one, other in zip(means, alone["losses"], strict=True))
        parameters = max(
            float((one - other).abs().max() / other.abs().max().clamp_min(1e-3))
            for one, other in zip(ranks[0]["parameters"], alone["parameters"], strict=True)
        )
        rows.append({"one process on": engine, "losses apart": losses, "parameters apart": parameters})
        report.claim(f"Loss of 2 ranks against one process on {engine}, relative", losses, at_most=1e-5)
    report.table("Two ranks with ORT inside DistributedDataParallel, largest differences over 4 steps", rows)

    rounds = [killed() for _ in range(1 if read.quick else read.rounds)]
    report.claim("A killed rank is reported, all others ended [s]", max(one for one, _ in rounds), at_most=10)
    report.claim("Processes that are left then", max(left for _, left in rounds), at_most=0)
    report.table(
        "A rank is killed while another waits for it",
        [
            {"round": number, "reported after [s]": seconds, "left": left}
            for number, (seconds, left) in enumerate(rounds, start=1)
        ],
    )

    both = Ranks(tuple(RankLedger.from_dict(one) for one in ledgers))
    spreads = []
    for number, name in enumerate(ways, start=1):
        shown = both.of(number)
        spread = shown.spread()
        assert spread is not None
        times = [one.computing_ms for one in shown.rows()]
        spreads.append(
            {
                "samples": name,
                "slowest / mean": spread,
                "tokens of the ranks": " and ".join(str(one.tokens) for one in shown.rows()),
                "rank 0 computes [ms]": times[0],
                "rank 1 computes [ms]": times[1],
                "exchange [ms]": statistics.mean(one.exchange_ms or 0.0 for one in shown.rows()),
            }
        )
        report.claim(f"Slowest rank over the mean in a step, samples {name}", spread)
    report.table("Computing of two ranks in a step, an epoch each", spreads)
    report.write()


if __name__ == "__main__":
    main()
