"""How even ranks are with and without load balancing: tokens per rank counted, waiting measured on two processes.

The lengths are of the kind of the reference's GLUE example, sentences of 11 to 85 tokens, most of them short: drawn
from a log-normal distribution fitted to the 160 counts that its density table prints, cut at its 128 tokens. Measured
is a step of a small BERT whose batches are padded to their longest sample, in two processes with a thread each.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from report import Report, arguments

TABLE = Path(__file__).parents[1] / "tests" / "unit" / "logs" / "density_glue.txt"
LIMIT = 128


def drawn(count: int) -> list[int]:
    """Draw lengths of the kind that the reference's table prints."""
    import numpy as np

    printed = re.findall(r"\[([\d, ]+)\]", TABLE.read_text(encoding="utf-8"))
    logarithms = np.log([int(number) for line in printed for number in line.split(",")])
    lengths = np.random.default_rng(0).lognormal(logarithms.mean(), logarithms.std(), count)
    return lengths.round().clip(3, LIMIT).astype(int).tolist()


def step_maker(sizes: list[int]) -> Any:
    """Return what each process calls to get its training step."""

    def make_step(_rank: int) -> Any:
        import torch
        from transformers import BertConfig, BertForSequenceClassification

        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=200,
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=512,
            max_position_embeddings=128,
        )
        model = BertForSequenceClassification(config).train()

        def step(batch: list[int]) -> None:
            width = max(sizes[index] for index in batch)
            ids = torch.zeros(len(batch), width, dtype=torch.long)
            for row, index in zip(ids, batch, strict=True):
                row[: sizes[index]] = index % 199 + 1
            labels = torch.tensor([index % 2 for index in batch])
            model(input_ids=ids, attention_mask=(ids != 0).long(), labels=labels).loss.backward()
            model.zero_grad()

        return step

    return make_step


def main() -> None:
    """Count for 2, 4 and 8 ranks, measure for 2, and write the record."""
    read = arguments(__doc__, rounds=3)
    from ortlab.cluster import Cluster
    from ortlab.data.balancing import balance, measured

    report = Report("load_balance", read)
    sizes = drawn(256 if read.quick else 4096)
    rows = []
    for ranks in (2, 4, 8):
        record = balance(sizes, 8, ranks=ranks, epochs=2)
        before, after = record.imbalance(record.without), record.imbalance(record.having)
        rows.append(
            {
                "ranks": ranks,
                "max / mean, as they come": before,
                "max / mean, balanced": after,
                "worst step, as they come": record.worst(record.without),
                "worst step, balanced": record.worst(record.having),
                "waiting, as they come": record.waiting(record.without),
                "waiting, balanced": record.waiting(record.having),
                "left out": max(len(record.missing(epoch)) for epoch in record.having),
            }
        )
        report.claim(f"Maximum over mean tokens per rank, balanced, {ranks} ranks", after)
        report.claim(f"The same as samples come, {ranks} ranks", before)
    report.claim("Samples that an epoch leaves out", max(row["left out"] for row in rows), at_most=0)
    report.table("Tokens per rank, counted; waiting follows from them", rows)
    few = sizes[: 48 if read.quick else 512]
    with Cluster(2, threads=1) as cluster:
        timed = measured(
            balance(few, 8, ranks=2, epochs=1 if read.quick else read.rounds), cluster, step_maker(few)
        )
    assert timed.lost_ms is not None
    assert timed.epoch_ms is not None
    report.claim(
        "A rank's waiting, balanced / as samples come, 2 processes", timed.lost_ms[1] / timed.lost_ms[0]
    )
    report.claim("Time of an epoch, the same", timed.epoch_ms[1] / timed.epoch_ms[0])
    report.table(
        "Two processes, measured",
        [
            {"samples": name, "a rank waits in an epoch [ms]": lost, "epoch [ms]": whole}
            for name, lost, whole in zip(
                ("as they come", "balanced"), timed.lost_ms, timed.epoch_ms, strict=True
            )
        ],
    )
    report.write()


if __name__ == "__main__":
    main()
