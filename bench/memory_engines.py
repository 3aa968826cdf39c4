"""At equal measured memory, a step of ONNX Runtime that recomputes against checkpointed layers and torch.compile.

Six models (4 layers, of T5 4 + 4, hidden 512, 8 heads, vocabulary 8192, dropout as their families have it) train with
AdamW on a batch of 8 sequences of 256 tokens, the ViT on 8 images of 256 patches, each in a fresh process. First the
rise of a step's memory above its start is measured for the candidates: PyTorch, PyTorch with each layer checkpointed,
torch.compile by itself and with activation memory budgets. `lab.budget` is asked for what rises as each candidate does:
plans of ONNX Runtime, or layers that ortlab recomputes. Then all of them, memory level 1 and words of the switch
`recompute` run in interleaved rounds, and the memory of each is measured again. A candidate is held against the fastest
configuration of ONNX Runtime that rises by at most 1.02 of what the candidate rises by; where there is none, that is
said.

At least 27 of the 30 are to take no less time than ONNX Runtime does then.

With `--large` the models have 12 layers of 768, and batches of 4 x 128 and of 2 x 512 tokens: hours for all of them,
a quarter of an hour for one (`--only "GPT-2, 4 x 128"`).
"""

from __future__ import annotations

import json
import sys
from typing import Any

from budget import MIB, training
from report import THREADS, Report, arguments, check_names, in_own_process, machine, one_by_one
from rounds import ratio

BUDGETS = (0.5, 0.2)
WORDS = ("layers", "layers:1/2", "layers:1/2 nested", "all but matmuls")
STEPS = 3
"""Steps of each run; the first does not count."""

MODELS = ("BERT", "GPT-2", "Llama", "DeBERTa-v2", "T5", "ViT")

QUICK, USUAL = (2, 32, 4, 64, 128), (4, 512, 8, 256, 8192)
"""Layers, their width, sequences, tokens of each, vocabulary."""
LARGE = {
    f"{model}, {rows} x {length}": (model, (12, 768, rows, length, 8192))
    for rows, length in ((4, 128), (2, 512))
    for model in MODELS
}

EQUAL = 1.02
"""Ratio of two rises up to which the smaller one is not called smaller."""


def main() -> None:
    """Measure, print and write."""
    if "--child" in sys.argv:
        family, rounds = sys.argv[sys.argv.index("--child") + 1 :][:2]
        print(json.dumps(candidates(family, int(rounds), quick="--quick" in sys.argv)))
        return
    also = {"large": "12 layers of 768, two shapes of batches"}
    read = arguments(__doc__, rounds=3, resumes=True, only="models", also=also)
    name = "memory_engines_large" if read.large else "memory_engines"
    report = Report(name, read, command="python bench/memory_engines.py --large" if read.large else "")
    families = read.only or (MODELS[1:2] if read.quick else tuple(LARGE) if read.large else MODELS)
    check_names("model", families, LARGE if read.large else MODELS)
    rows = one_by_one(name, read, families, lambda one: in_fresh_process(one, read.rounds, quick=read.quick))
    report.table(
        "When each was measured",
        [{"model": family, **found["measured"]} for family, found in zip(families, rows, strict=True)],
    )
    held = []
    for family, found in zip(families, rows, strict=True):
        report.table(f"{family}, all in the same rounds", found["table"])
        for candidate, why in found["failed"].items():
            report.note(f"{family}: {candidate} was not measured: {why}")
        held += [{"model": family, **row} for row in found["held"]]
    report.table("Each candidate, and the fastest of ONNX Runtime that needs no more memory", held)
    for row in held:
        title = f"{row['model']}: ORT / {row['candidate']} at equal memory, median of rounds"
        if row["ratio"] is None:
            report.note(f"{title}: no configuration of ONNX Runtime needs as little memory.")
        else:
            report.claim(title, row["ratio"])
    report.claim(
        "Candidates that ONNX Runtime cannot follow to their memory",
        sum(row["ratio"] is None for row in held),
        at_most=0,
    )
    quicker = sum(row["ratio"] is None or row["ratio"] > 1 for row in held)
    report.claim(
        f"Candidates, of {len(held)}, that are quicker than ONNX Runtime at their memory",
        quicker,
        at_most=len(held) // 10,
    )
    report.write()


def in_fresh_process(family: str, rounds: int, *, quick: bool) -> dict[str, Any]:
    """Measure in a process of its own; return what `candidates` does, and when that was."""
    facts = machine()  # models may be measured in several runs, see `--resume`
    found: dict[str, Any] = in_own_process(
        __file__, *(["--quick"] if quick else []), "--child", family, str(rounds)
    )
    when = {"date": str(facts["date"])[:10], "commit": facts["commit"]}
    return found | {"measured": when | {"load before": facts["load_average_at_start"]}}


def candidates(family: str, rounds: int, *, quick: bool) -> dict[str, Any]:
    """Measure one model; return a row for each candidate, why some were not measured, and all at equal memory."""
    import torch

    import ortlab
    from ortlab.errors import OrtlabError

    torch.set_num_threads(THREADS)
    kind, shape = LARGE.get(family, (family, QUICK if quick else USUAL))
    model, batch = training(kind, *shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    lab = ortlab.wrap(model, name=family, log_level="ERROR")

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    lab.step(step, n=1, progress=False)
    # The quick setting compiles nothing: that alone would take most of its time.
    compiled = [] if quick else ["compile", *(f"compile:{budget}" for budget in BUDGETS)]
    engines = ["eager", "checkpoint", *compiled]
    chosen: dict[str, str] = {}
    # Its libraries are in every start from here on.
    lab.budget("90%", verify=False, curve=False, progress=False)
    for engine in engines:
        try:
            rise = lab.memory(engine=engine).rise_bytes
        except OrtlabError as error:
            say(family, f"{engine}: {error.what}")
            continue
        budget = lab.budget(rise, apply=False, timed=False, curve=False, progress=False)
        if budget.answer.acts:
            chosen.setdefault(json.dumps(budget.switches), f"chosen for {engine}")
        say(family, f"{engine}: rises {rise / MIB:.1f} MiB; {budget.outcome}, {budget.switches}")
    also: list[dict[str, Any]] = [{"memory_level": 1}, *({"recompute": [word]} for word in WORDS)]
    for one in also:
        chosen.pop(json.dumps(one), "")
    also += map(json.loads, chosen)
    found = lab.compare_engines(STEPS, rounds=rounds, engines=engines, budgets=(), also=also, progress=False)
    lab.unwrap()
    return judged(found, chosen)


def judged(found: Any, chosen: dict[str, str]) -> dict[str, Any]:
    """Return what `candidates` does of the record of `lab.compare_engines`."""
    measured = [
        candidate for candidate in found if candidate.outcome is not None and candidate.rise_bytes > 0
    ]
    names = {candidate.point.number: short(candidate, chosen) for candidate in found}
    times = {
        names[candidate.point.number]: [run.step_ms for run in candidate.point.runs] for candidate in measured
    }
    rises = {names[candidate.point.number]: candidate.rise_bytes for candidate in measured}
    on_ort = [
        names[candidate.point.number]
        for candidate in measured
        if candidate.engine == "ort" and not candidate.point.fell_back
    ]
    table = [
        {
            "configuration": names[candidate.point.number],
            "switches": str(switches(candidate) or ""),
            "step [ms]": round(candidate.point.step_ms, 1),
            "time / ort": candidate.outcome.time_ratio if candidate.outcome else None,
            "rise [MiB]": round(candidate.rise_bytes / MIB, 1),
            "rise / ort": candidate.rise_ratio,
        }
        for candidate in measured
    ]
    failed = {
        names[candidate.point.number]: candidate.reason or candidate.no_memory
        for candidate in found
        if candidate not in measured
    }
    held = [at_equal_memory(name, on_ort, times, rises) for name in times if name not in on_ort]
    return {"table": table, "failed": {name: why for name, why in failed.items() if why}, "held": held}


def at_equal_memory(
    candidate: str, on_ort: list[str], times: dict[str, list[float]], rises: dict[str, float]
) -> dict[str, Any]:
    """Hold a candidate against the fastest configuration of ONNX Runtime that rises by no more."""
    fitting = [name for name in on_ort if rises[name] <= EQUAL * rises[candidate]]
    row: dict[str, Any] = {"candidate": candidate, "rise [MiB]": round(rises[candidate] / MIB, 1)}
    if not fitting:
        least = min(on_ort, key=rises.__getitem__)
        return row | {
            "ORT": f"none; least: {least}",
            "its rise [MiB]": round(rises[least] / MIB, 1),
            "ratio": None,
            "interval": "",
        }
    best = min(fitting, key=lambda name: ratio(times, name, candidate).median)
    against = ratio(times, best, candidate)
    return row | {
        "ORT": best,
        "its rise [MiB]": round(rises[best] / MIB, 1),
        "ratio": against.median,
        "interval": f"{against.low:.3f} - {against.high:.3f}",
    }


def switches(candidate: Any) -> dict[str, Any]:
    """Return what a candidate changes beside the engine, as JSON has it."""
    changes = {name: value for name, value in candidate.point.changes.items() if name != "engine"}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in changes.items()}


def short(candidate: Any, chosen: dict[str, str]) -> str:
    """Name a candidate: what a budget has chosen by the candidate whose memory it was chosen for."""
    name = chosen.get(json.dumps(switches(candidate)))
    return f"ort, {name}" if name else str(candidate.name)


def say(family: str, words: str) -> None:
    """Tell how far it is, on standard error."""
    print(f"{family}: {words}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
