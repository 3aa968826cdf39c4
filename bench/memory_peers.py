"""At equal measured memory, a step of ONNX Runtime with recompute plans against checkpointed layers and torch.compile.

Three models (4 layers, hidden 512, 8 heads, vocabulary 8192, dropout as their families have it) train with AdamW on a
batch of 8 sequences of 256 tokens, each in a fresh process. First the rise of a step's memory above its start is
measured for the peers: PyTorch, PyTorch with each layer checkpointed, torch.compile by itself and with activation
memory budgets. `lab.budget` is asked for plans whose rise is each peer's. Then all of them, and memory levels 1 and 2,
run in interleaved rounds, and the memory of each is measured again. A peer is held against the fastest configuration
of ONNX Runtime that rises by at most 1.02 of what the peer rises by; where there is none, that is said.

Nothing is claimed: the ratios are stated whatever they are.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from budget import FAMILIES, MIB, language_model
from report import THREADS, Report, arguments, in_own_process
from rounds import ratio

BUDGETS = (0.5, 0.2)
STEPS = 4
"""Steps of each run; the first does not count."""

EQUAL = 1.02
"""Ratio of two rises up to which the smaller one is not called smaller."""


def main() -> None:
    """Measure, print and write."""
    if "--child" in sys.argv:
        family, rounds = sys.argv[sys.argv.index("--child") + 1 :][:2]
        print(json.dumps(peers(family, int(rounds), quick="--quick" in sys.argv)))
        return
    read = arguments(__doc__, rounds=5)
    report = Report("memory_peers", read)
    held = []
    for family in FAMILIES[1:2] if read.quick else FAMILIES:
        found = in_fresh_process(family, read.rounds, quick=read.quick)
        report.table(f"{family}, all in the same rounds", found["table"])
        for peer, why in found["failed"].items():
            report.note(f"{family}: {peer} was not measured: {why}")
        held += [{"model": family, **row} for row in found["held"]]
    report.table("Each peer, and the fastest of ONNX Runtime that needs no more memory", held)
    for row in held:
        title = f"{row['model']}: ORT / {row['peer']} at equal memory, median of rounds"
        if row["ratio"] is None:
            report.note(f"{title}: no configuration of ONNX Runtime needs as little memory.")
        else:
            report.claim(title, row["ratio"])
    report.claim(
        "Peers that ONNX Runtime cannot follow to their memory", sum(row["ratio"] is None for row in held)
    )
    report.write()


def in_fresh_process(family: str, rounds: int, *, quick: bool) -> dict[str, Any]:
    """Measure in a process of its own; return what `peers` does."""
    found: dict[str, Any] = in_own_process(
        __file__, *(["--quick"] if quick else []), "--child", family, str(rounds)
    )
    return found


def peers(family: str, rounds: int, *, quick: bool) -> dict[str, Any]:
    """Measure one model; return a row for each peer, why some were not measured, and the peers at equal memory."""
    import torch

    import ortlab
    from ortlab.errors import OrtlabError

    torch.set_num_threads(THREADS)
    model, batch = language_model(family, *((2, 32, 4, 64, 128) if quick else (4, 512, 8, 256, 8192)))
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
    chosen: dict[tuple[str, ...], str] = {}
    lab.budget(
        saving=0.1, verify=False, curve=False, progress=False
    )  # its libraries are in every start from here on
    for engine in engines:
        try:
            rise = lab.measure_memory(engine=engine).rise_bytes
        except OrtlabError as error:
            say(family, f"{engine}: {error.what}")
            continue
        # What earlier peers left in the process, as compiled code, is in its start by now, and in every peak.
        start = lab.measure_memory().start_bytes
        budget = lab.budget(start + rise, curve=False, progress=False)
        if budget.plans:
            chosen.setdefault(tuple(budget.plans), f"plans for {engine}")
        say(family, f"{engine}: rises {rise / MIB:.1f} MiB; {budget.outcome}, {len(budget.plans)} plans")
    also: list[dict[str, Any]] = [{"memory_level": level} for level in ((1,) if quick else (1, 2))]
    also += [{"memory_plan": list(plans)} for plans in chosen]
    found = lab.peers(STEPS, rounds=rounds, engines=engines, budgets=(), also=also, progress=False)
    lab.unwrap()
    return judged(found, chosen)


def judged(found: Any, chosen: dict[tuple[str, ...], str]) -> dict[str, Any]:
    """Return what `peers` does of the record of `lab.peers`."""
    measured = [peer for peer in found if peer.outcome is not None and peer.memory is not None]
    names = {peer.point.number: short(peer, chosen) for peer in found}
    times = {names[peer.point.number]: [run.step_ms for run in peer.point.runs] for peer in measured}
    rises = {names[peer.point.number]: peer.rise_bytes for peer in measured}
    on_ort = [
        names[peer.point.number] for peer in measured if peer.engine == "ort" and not peer.point.fell_back
    ]
    table = [
        {
            "configuration": names[peer.point.number],
            "step [ms]": round(peer.point.step_ms, 1),
            "time / ort": peer.outcome.time_ratio if peer.outcome else None,
            "rise [MiB]": round(peer.rise_bytes / MIB, 1),
            "rise / ort": peer.rise_ratio,
            "peak of the process [MiB]": round(peer.peak_bytes / MIB, 1),
        }
        for peer in measured
    ]
    failed = {
        names[peer.point.number]: peer.reason or peer.no_memory for peer in found if peer not in measured
    }
    held = [at_equal_memory(name, on_ort, times, rises) for name in times if name not in on_ort]
    return {"table": table, "failed": {name: why for name, why in failed.items() if why}, "held": held}


def at_equal_memory(
    peer: str, on_ort: list[str], times: dict[str, list[float]], rises: dict[str, float]
) -> dict[str, Any]:
    """Hold a peer against the fastest configuration of ONNX Runtime that rises by no more."""
    fitting = [name for name in on_ort if rises[name] <= EQUAL * rises[peer]]
    row: dict[str, Any] = {"peer": peer, "rise [MiB]": round(rises[peer] / MIB, 1)}
    if not fitting:
        least = min(on_ort, key=rises.__getitem__)
        return row | {
            "ORT": f"none; least: {least}",
            "its rise [MiB]": round(rises[least] / MIB, 1),
            "ratio": None,
            "interval": "",
        }
    best = min(fitting, key=lambda name: ratio(times, name, peer).median)
    against = ratio(times, best, peer)
    return row | {
        "ORT": best,
        "its rise [MiB]": round(rises[best] / MIB, 1),
        "ratio": against.median,
        "interval": f"{against.low:.3f} - {against.high:.3f}",
    }


def short(peer: Any, chosen: dict[tuple[str, ...], str]) -> str:
    """Name a peer: a list of plans by the peer whose memory they were chosen for."""
    plans = tuple(peer.point.changes.get("memory_plan", ()))
    return f"ort, {chosen.get(plans, 'plans')}" if plans else peer.name


def say(family: str, words: str) -> None:
    """Tell how far it is, on standard error."""
    print(f"{family}: {words}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
