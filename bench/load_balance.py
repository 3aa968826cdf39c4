"""How even ranks are with and without load balancing: tokens per rank counted, waiting measured on two processes.

The lengths are of the kind of the reference's GLUE example, sentences of 11 to 85 tokens, most of them short: drawn
from a log-normal distribution fitted to the 160 counts that its density table prints, cut at its 128 tokens. Measured
is a step of a BERT whose batches are padded to their longest sample, in two processes with a thread each. The two ways
of dealing take turns step by step, and each round is an epoch of both.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from report import Report, arguments
from rounds import ratio, rows

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
            hidden_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=1024,
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
    read = arguments(__doc__, rounds=8)
    from ortlab.ranks import Cluster
    from ortlab.ranks.balancing import balance, measured

    report = Report("load_balance", read)
    sizes = drawn(256 if read.quick else 4096)
    counted = []
    for ranks in (2, 4, 8):
        record = balance(sizes, 8, ranks=ranks, epochs=2)
        before, after = record.imbalance(record.without), record.imbalance(record.having)
        counted.append(
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
    report.claim("Samples that an epoch leaves out", max(row["left out"] for row in counted), at_most=0)
    report.table("Tokens per rank, counted; waiting follows from them", counted)
    few = sizes[: 48 if read.quick else 512]
    with Cluster(2, threads=1) as cluster:
        timed = measured(
            balance(few, 8, ranks=2, epochs=1 if read.quick else read.rounds), cluster, step_maker(few)
        )
    dealt = {"as they come": timed.without, "balanced": timed.having}
    for what, of in (("A rank's waiting in an epoch", "lost_ms"), ("Time of an epoch", "epoch_ms")):
        times = {name: [getattr(one.timing, of) for one in epochs] for name, epochs in dealt.items()}
        apart = ratio(times, "balanced", "as they come")
        report.table(f"{what}, 2 processes, measured", rows(times, scale=1))
        report.table(f"{what}: the ratio of both in each round", [apart.row("balanced / as they come")])
        report.claim(f"{what}, balanced / as samples come, 2 processes, measured", apart.median, at_most=1)
    expected = [_padded_steps(timed, epochs) for epochs in dealt.values()]
    report.claim("Time of an epoch, the same, if it went with padded tokens", expected[1] / expected[0])
    report.write()


def _padded_steps(record: Any, epochs: Any) -> int:
    """Add up the padded tokens of the fullest rank of each step."""
    return sum(max(step) for epoch in epochs for step in record.tokens(epoch))


if __name__ == "__main__":
    main()
