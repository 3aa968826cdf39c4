"""Recomputing GELU lets the batch double under a limit; the samples per second of both are measured.

ONNX Runtime states of DeBERTa on 16 A100: batch 16 takes 65 % of 40 GB, and with GELU recomputed batch 32 takes 97 %,
at 1.17 times the samples per second. Here BERT and GPT-2 (4 layers, hidden 512, 8 heads, vocabulary 8192) train on the
CPU with sequences of 256 tokens, each in a fresh process. The limit lies a quarter of what recomputing GELU saves below
what batch 8 takes without plans, so that batch 4 fits without, and batch 8 with the plan only. Plans of a GELU are
those whose cluster has one; a model that offers none gets the largest plans.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from budget import language_model
from report import THREADS, Report, arguments, in_own_process

if TYPE_CHECKING:
    from ortlab.studies.batch_size import BatchSizeSearch

FAMILIES = ("BERT", "GPT-2")
SIZES = (2, 4, 8)
MIB = 2**20
STATED = 562.041593991271 / 479.2543353561354


def main() -> None:
    """Measure, print and write."""
    if "--child" in sys.argv:
        print(json.dumps(searched(sys.argv[sys.argv.index("--child") + 1], quick="--quick" in sys.argv)))
        return
    read = arguments(__doc__, rounds=1)
    report = Report("batch_size", read)
    for family in FAMILIES[:1] if read.quick else FAMILIES:
        found = in_fresh_process(family, quick=read.quick)
        report.table(f"{family}: {found['sentence']}", found["rows"])
        grows = found["largest without"] / found["largest with plans"]
        report.claim(f"{family}: largest batch without plans / with", grows, at_most=0.5)
        report.claim(f"{family}: largest error of the predicted peaks of points that ran", found["error"])
        report.claim(
            f"{family}: samples/s with plans / without (ONNX Runtime states {STATED:.2f}, on A100)",
            found["ratio"],
        )
    report.write()


def in_fresh_process(family: str, *, quick: bool) -> dict[str, Any]:
    """Measure in a process of its own; return what `searched` does."""
    found: dict[str, Any] = in_own_process(__file__, *(["--quick"] if quick else []), "--child", family)
    return found


def searched(family: str, *, quick: bool) -> dict[str, Any]:
    """Search without a tight limit for the line of peaks, then under one that batch 8 misses without plans."""
    import torch

    import ortlab
    from ortlab.render.batch_size_page import closing_sentence
    from ortlab.studies.batch_size_trials import largest_plan_sets

    torch.set_num_threads(THREADS)
    sizes = tuple(size * 32 for size in SIZES) if quick else SIZES
    model, data = language_model(
        family, *((2, 64, sizes[-1], 64, 128) if quick else (4, 512, sizes[-1], 256, 8192))
    )
    lab = ortlab.wrap(model, name=family, log_level="ERROR")

    def make_batch(size: int) -> dict[str, torch.Tensor]:
        return {name: tensor[:size] for name, tensor in data.items()}

    def loose() -> BatchSizeSearch:
        """Try sizes where everything fits."""
        return lab.find_batch_size(make_batch, device="1 TiB", sizes=sizes[-3:-1], n=1)

    loss = model(**make_batch(2)).loss
    loss.backward()
    model.zero_grad()
    table = lab.plan()
    gelu = [(row.config,) for row in table.rows if "Gelu" in row.cluster and row.strategy == 1][:1]
    sets = gelu or list(largest_plan_sets(table))[:1]
    without = loose().predicted(sizes[-1], ())
    saving = next(row.saving_bytes or 0.0 for row in table.rows if row.config == sets[0][0]) * sizes[-1] / 2
    search = lab.find_batch_size(
        make_batch, device=int(without - saving / 4), sizes=sizes, plans=sets, n=1 if quick else 3
    )
    lab.unwrap()
    alone, larger = search.largest(()), search.best_with_plans
    assert alone is not None
    ratio, low, high = search.pace_ratio(larger, alone) if larger else (float("nan"),) * 3
    ran = [one for one in search.points if one.peak_bytes and one.predicted_bytes]
    return {
        "sentence": closing_sentence(search),
        "largest without": alone.size,
        "largest with plans": larger.size if larger else alone.size,
        "ratio": ratio,
        "interval": [low, high],
        "error": max((abs(one.predicted_bytes / one.peak_bytes - 1) for one in ran), default=0.0),
        "rows": [
            {
                "batch": one.size,
                "plans": ",".join(one.plans) or "none",
                "outcome": one.outcome,
                "predicted [MiB]": round(one.predicted_bytes / MIB, 1) if one.predicted_bytes else "",
                "measured [MiB]": round(one.peak_bytes / MIB, 1) if one.peak_bytes else "",
                "samples/s": round(one.samples_per_s, 2) if one.timed else "",
            }
            for one in search.points
        ],
    }


if __name__ == "__main__":
    main()
