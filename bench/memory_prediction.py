"""What recompute plans save and cost is predicted from a profiled step; here it is held against measured steps.

Three models (4 layers, hidden 512, 8 heads, vocabulary 8192, dropout as their families have it) train with AdamW on a
batch of 8 sequences of 256 and of 512 tokens, each in a fresh process. Memory level 1, the five plans with the
largest savings printed by ORT, and layers recomputed in six ways are simulated in a profiled step without plans, then
run and measured by `lab.memory`. At 256 tokens their time is measured as well, in interleaved rounds with none, and the
order of predicted costs is held against that of the measured ones (Kendall's tau); plans whose predicted costs differ
by less than 1 % of the step are one place in the order, since their measured ones cannot be told apart. The error of a
predicted cost is a share of the measured one, or of 1 % of the step where that is more.

With `--memory` no time is measured, so that the machine may do other things; what is claimed of the order of costs then
stays what it was.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from budget import FAMILIES, MIB, training
from report import THREADS, Report, arguments, in_own_process, one_by_one

from ortlab.lab.following import recompute_places

LENGTHS = (256, 512)
PLANS = 5
STEPS = 4
"""Timed steps of each run; the first does not count."""

LEVEL = "memory level 1"
RECOMPUTED = (
    "layers",
    "layers:1/2",
    "layers:1/2 nested",
    "layers:2 nested",
    "layers but linear",
    "layers[:2]",
)
TAU, COST = "Kendall's tau", "Predicted cost"
"""What claims of costs have in their words."""


def main() -> None:
    """Measure, print and write."""
    if "--child" in sys.argv:
        family, length, rounds = sys.argv[sys.argv.index("--child") + 1 :][:3]
        print(json.dumps(predictions(family, int(length), int(rounds), quick="--quick" in sys.argv)))
        return
    also = {"memory": "measure no times, on a machine that is not idle"}
    read = arguments(__doc__, rounds=5, resumes=True, also=also)
    report = Report("memory_prediction", read)
    families, lengths = (FAMILIES[1:2], (32,)) if read.quick else (FAMILIES, LENGTHS)
    timed = () if read.memory else lengths[:1]
    cases = {
        f"{family}, {length} tokens{', timed' if length in timed else ''}": (family, length)
        for family in families
        for length in lengths
    }

    def measured(case: str) -> dict[str, Any]:
        family, length = cases[case]
        rounds = str(read.rounds if length in timed else 0)
        quick = ["--quick"] if read.quick else []
        return {"plans": in_own_process(__file__, *quick, "--child", family, str(length), rounds)}

    kept = one_by_one("memory_prediction", read, list(cases), measured)
    found, with_costs, taus = [], [], {}
    for (case, (family, length)), one in zip(cases.items(), kept, strict=True):
        rows = one["plans"]
        report.table(case, rows)
        found += rows
        if length in timed:
            with_costs += rows
            taus[family] = tau(rows, least=rows[0]["step without [ms]"] / 100), tau(rows)
    for text, of in (("Predicted saving of the peak", "error"), ("Predicted peak", "error of the peak")):
        errors = [abs(row[of]) for row in found]
        limit = 0.1 if of == "error" else 0.02
        report.claim(
            f"{text}, {len(errors)} plans, median absolute error", float(np.median(errors)), at_most=limit
        )
        report.claim(f"{text}, largest absolute error", float(max(errors)))
    if with_costs:
        claim_costs(report, with_costs)
    for family, (told, every) in taus.items():
        report.claim(f"{family}: 1 - {TAU} of predicted and measured costs", 1 - told, at_most=0.2)
        report.claim(f"{family}: the same over all pairs, however close, {TAU}", 1 - every)
    if read.memory:
        repeat_costs(report, read.output / "memory_prediction.json")
    report.write()


def claim_costs(report: Report, rows: list[dict[str, Any]]) -> None:
    """Hold predicted costs against measured ones."""
    dear = [row for row in rows if row["measured cost [ms]"] >= row["step without [ms]"] / 10]
    told = {
        f"{COST}, {len(rows)} plans": rows,
        f"{COST}, of these the {len(dear)} that cost a tenth of the step or more": dear,
    }
    for text, some in told.items():
        if some:
            errors = [abs(row["error of the cost"]) for row in some]
            report.claim(f"{text}, median absolute error", float(np.median(errors)), at_most=0.1)
    shares = [
        abs(row["predicted cost [ms]"] - row["measured cost [ms]"]) / row["step without [ms]"] for row in rows
    ]
    for share, value in (("median", float(np.median(shares))), ("largest", max(shares))):
        text = f"{COST}, {len(rows)} plans, {share} error as a share of the step without"
        report.claim(text, value)


def repeat_costs(report: Report, file: Path) -> None:
    """Claim of costs what is claimed in a record, and say of which commit they are."""
    record = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"claims": []}
    for one in record["claims"]:
        if TAU in one["claim"] or COST in one["claim"]:
            since = "" if "(of " in one["claim"] else f" (of {record['machine']['commit']})"
            report.claim(one["claim"] + since, one["value"], at_most=one["at_most"])


def predictions(family: str, length: int, rounds: int, *, quick: bool) -> list[dict[str, Any]]:
    """Predict and measure one model; return a row for each plan. Without rounds, no times are measured."""
    import torch

    import ortlab
    from ortlab.engine.recompute_words import made_again, recomputed_rows
    from ortlab.memory.layer_planner import LayerPlanner
    from ortlab.memory.recompute import with_places
    from ortlab.memory.trace import lifetimes

    torch.set_num_threads(THREADS)
    model, batch = training(family, *((2, 32, 4, length, 128) if quick else (4, 512, 8, length, 8192)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    lab = ortlab.wrap(model, name=family, log_level="ERROR")

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    lab.step(step, n=1, progress=False)
    plain, ordered = lab.profile(progress=False), lab.profile(memory_efficient_order=True, progress=False)
    places = recompute_places(lab)
    printed = [row for row in lab.plan().rows if "," not in row.config and row.strategy == 1]
    printed = printed[: 1 if quick else PLANS]
    acting = {row.config: places.of(row.config) for row in printed}
    acting[LEVEL] = places.at_level(1)
    changes: dict[str, dict[str, Any]] = {row.config: {"memory_plan": [row.config]} for row in printed}
    changes[LEVEL] = {"memory_level": 1}
    told = {row.config: row.saving_bytes for row in printed}
    simulated = {name: with_places(ordered, chosen) for name, chosen in acting.items()}
    execution = lab._bench.ort.execution  # noqa: SLF001 - what a budget asks
    planner = LayerPlanner(ordered, made_again(execution.built, execution.module, execution.user_inputs))
    words = [(word,) for word in (RECOMPUTED[:1] if quick else RECOMPUTED)]
    for row, again in recomputed_rows(execution, "", words).items():
        simulated[row.config] = planner.with_words(row.switches["recompute"], again)
        changes[row.config] = row.switches
    base = lab.memory().rise_bytes
    rows = []
    for name, trace in simulated.items():
        saving = lifetimes(plain).peak - lifetimes(trace).peak
        measured = base - lab.memory(**changes[name]).rise_bytes
        rows.append(
            {
                "plan": name,
                "printed by ORT [MiB]": None if told.get(name) is None else round(told[name] / MIB, 1),
                "predicted [MiB]": round(saving / MIB, 1),
                "measured [MiB]": round(measured / MIB, 1),
                # Of what was measured, and of 1 % of the step's memory at least: a plan may save nothing.
                "error": (saving - measured) / max(abs(measured), base / 100),
                "error of the peak": (measured - saving) / (base - measured),
                **({"predicted cost [ms]": round(trace.recomputed_ms, 1)} if rounds else {}),
            }
        )
        print(family, length, rows[-1], file=sys.stderr, flush=True)
    if rounds:
        sweep = lab.sweep(list(changes.values()), n=STEPS, rounds=1 if quick else rounds, progress=False)
        none = sweep.baseline.runs
        points = {point.number: point for point in sweep.points}
        for number, row in enumerate(rows, start=1):
            pairs = zip(points[number].runs, none, strict=True)
            added = [run.step_ms - other.step_ms for run, other in pairs]
            row["measured cost [ms]"] = round(float(np.median(added)), 1)
            row["step without [ms]"] = round(float(np.median([run.step_ms for run in none])), 1)
            least = max(abs(row["measured cost [ms]"]), row["step without [ms]"] / 100)
            row["error of the cost"] = (row["predicted cost [ms]"] - row["measured cost [ms]"]) / least
    lab.unwrap()
    return rows


def tau(rows: list[dict[str, Any]], *, least: float = 0.0) -> float:
    """Return Kendall's tau of predicted and measured costs, over pairs whose predicted ones differ by `least` ms."""
    agreeing = []
    for number, one in enumerate(rows):
        for other in rows[:number]:
            predicted = one["predicted cost [ms]"] - other["predicted cost [ms]"]
            if abs(predicted) >= max(least, 1e-9):
                measured = one["measured cost [ms]"] - other["measured cost [ms]"]
                agreeing.append(1 if predicted * measured > 0 else -1)
    return float(np.mean(agreeing)) if agreeing else 1.0


if __name__ == "__main__":
    main()
