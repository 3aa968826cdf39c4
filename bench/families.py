"""How many families of transformers that the zoo does not hold train like PyTorch, and by how much the others differ.

python bench/families.py                      all of them, anew
python bench/families.py --resume             those that bench/results/families.json does not hold yet
python bench/families.py --only levit regnet  these, anew; the others stay as they are in the file
python bench/families.py --attention sdpa     with one kind of attention only
python bench/families.py --sample 120         that many, drawn at random, always the same ones
python bench/families.py --table              print the section of bench/README.md, train nothing

Each family is trained in a process of its own, which may take `--limit` seconds. The file is written after each, so
that Ctrl-C loses nothing; `--resume` goes on. A row says when and at which commit it was trained,
and on which processor if not on that of the first rows.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import warnings
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from report import RESULTS, THREADS, machine

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

REPOSITORY = Path(__file__).resolve().parents[1]
VERDICTS = ("within", "rounding", "differs", "error", "not run")
KINDS = ("sdpa", "eager", "default")
LOADED = ("torch", "transformers", "onnx", "onnxruntime", "family_list", "family_training", "ortlab")


def main() -> None:
    """Train what is asked for, show progress, and write."""
    read = arguments()
    os.environ["OMP_NUM_THREADS"] = str(read.threads)
    os.environ["HF_HUB_OFFLINE"] = "1"
    if str(REPOSITORY) not in sys.path:
        sys.path.append(str(REPOSITORY))
    warnings.filterwarnings("ignore")
    from family_list import families

    all_families = families()
    unknown = set(read.only) - set(all_families)
    if unknown:
        raise SystemExit(f"There is no family {', '.join(sorted(unknown))}.")
    file = read.output / "families.json"
    stored = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    old = stored.get("families", {})
    if read.table:
        print(table(old))
        return
    rows: dict[str, dict[str, Any]] = old if read.resume or read.only else {}
    asked = [
        (name, attention)
        for name, family in all_families.items()
        for attention in family.attentions()
        if is_asked(attention, family.attentions(), read.attention) and (not read.only or name in read.only)
    ]
    if read.sample:
        asked = random.Random(0).sample(asked, min(read.sample, len(asked)))
    todo = [one for one in asked if read.only or key(*one) not in rows]
    facts = machine()
    first = stored["machine"] if rows else facts
    try:
        for number, (name, attention) in enumerate(todo, start=1):
            row = in_a_process(child, (name, attention), LOADED, read.limit)
            rows[key(name, attention)] = {"attention": attention, **row, "trained": trained(facts, first)}
            write(file, rows, first)
            print(f"{number:4d}/{len(todo)}  {key(name, attention):42.42s} {line_of(row)}", flush=True)
    except KeyboardInterrupt:
        print(f"\nStopped. {file} holds what was trained; --resume goes on.")
    show(rows)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these families, anew")
    parser.add_argument("--resume", action="store_true", help="keep what the file holds, train the others")
    parser.add_argument("--table", action="store_true", help="print the section of bench/README.md")
    parser.add_argument("--attention", nargs="+", default=["sdpa", "eager"], choices=KINDS)
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="N of them, drawn at random")
    parser.add_argument("--limit", type=float, default=240, help="seconds for one (default 240)")
    parser.add_argument("--threads", type=int, default=THREADS, help=f"threads (default {THREADS})")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the JSON file")
    return parser.parse_args()


def is_asked(attention: str, has: tuple[str, ...], asked: list[str]) -> bool:
    """Say whether one of a family's kinds of attention is to be trained; "default" is what transformers takes."""
    return attention in asked or ("default" in asked and attention == has[0])


def trained(facts: dict[str, Any], first: dict[str, Any]) -> str:
    """Say when and at which commit a row was made, and on which processor if not on that of the file's first rows."""
    elsewhere = "" if facts["cpu"] == first["cpu"] else f", on {facts['cpu']}"
    return f"{facts['date'][:10]}, commit {facts['commit']}{elsewhere}"


def key(name: str, attention: str) -> str:
    """Name a row of the file."""
    return f"{name} {attention}"


def in_a_process(
    train: Callable[..., None], named: tuple[str, ...], loaded: tuple[str, ...], limit: float
) -> dict[str, Any]:
    """Train one model where a crash or a hang ends nothing but itself.

    `train` sends what came of it to its first argument; `loaded` are the modules that all of these processes share.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(loaded))
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.NamedTemporaryFile(prefix="ortlab-family-", suffix=".log") as log:
        process = context.Process(target=written_to, args=(log.name, train, sender, *named))
        process.start()
        sender.close()
        try:
            if not receiver.poll(limit):
                return {"verdict": "error", "reason": f"took over {limit:g} s"}
            return dict(receiver.recv())
        except EOFError:
            process.join()
            last = Path(log.name).read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
            return {
                "verdict": "error",
                "reason": f"the process ended with {process.exitcode}: {' '.join(last)}"[:400],
            }
        finally:
            if process.is_alive():
                process.kill()
            process.join()


def written_to(log: str, train: Callable[..., None], *named: Any) -> None:
    """Train where what is printed goes to a file."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    warnings.filterwarnings("ignore")
    train(*named)


def child(sender: Connection, name: str, attention: str) -> None:
    """Train a family and send what came of it."""
    import torch
    import transformers
    from family_list import families
    from family_training import train

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    transformers.logging.set_verbosity_error()
    sender.send(train(families()[name], attention))
    sender.close()


def line_of(row: dict[str, Any]) -> str:
    """Say in one line what came of a family."""
    if "difference" not in row:
        return f"{row['verdict']:9s} {row.get('reason', '')[:110]}"
    errors = (
        f"error {row['error of ORT']:.1e} / {row['error of PyTorch']:.1e}" if "error of ORT" in row else ""
    )
    return f"{row['verdict']:9s} {row['difference']:.1e} {errors} {row['where']} ({row['seconds']} s)"


def write(file: Path, rows: dict[str, dict[str, Any]], facts: dict[str, Any]) -> None:
    """Write the file, all or nothing."""
    counts = count(rows)
    content = {
        "benchmark": "families",
        "command": "python bench/families.py",
        "machine": facts,
        "claims": claims(counts),
        "counts": counts,
        "families": dict(sorted(rows.items())),
        "load_average_at_end": os.getloadavg()[0],
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_suffix(".new")
    new.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    new.replace(file)


def count(rows: dict[str, dict[str, Any]]) -> dict[str, int]:
    """Count the verdicts."""
    found = [row["verdict"] for row in rows.values()]
    return {verdict: found.count(verdict) for verdict in VERDICTS}


def claims(counts: dict[str, int]) -> list[dict[str, Any]]:
    """Return the figures of a table: shares of what eager PyTorch runs."""
    runs = sum(counts.values()) - counts["not run"]
    shares = {
        "Families (with attention) that eager PyTorch runs": (runs, None),
        "of these not within 1e-5 over 4 steps, share": (1 - counts["within"] / max(runs, 1), 0.10),
        "of these neither within 1e-5 nor within rounding of PyTorch's own, share": (
            1 - (counts["within"] + counts["rounding"]) / max(runs, 1),
            0.02,
        ),
    }
    return [
        {
            "claim": claim,
            "value": value,
            "at_most": limit,
            "holds": None if limit is None else value <= limit,
        }
        for claim, (value, limit) in shares.items()
    ]


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Return the section of the page of benchmarks: the counts, what is not within, and when all that was trained."""
    when = sorted({row["trained"] for row in rows.values()})
    lines = [f"Trained {'; '.join(when)}.", "", "| verdict | families |", "|---|---|"]
    lines += [f"| {verdict} | {number} |" for verdict, number in count(rows).items()]
    lines += ["", "| not within | verdict | difference | ORT's error, PyTorch's | where, or why |"]
    lines += ["|---|---|---|---|---|"]
    for one, row in sorted(rows.items()):
        if row["verdict"] in {"within", "not run"}:
            continue
        apart = f"{row['difference']:.1e}" if "difference" in row else ""
        errors = [f"{row[of]:.1e}" for of in ("error of ORT", "error of PyTorch") if of in row]
        why = shorten(row.get("where") or row.get("reason", ""), 110, placeholder=" ...").replace("|", "/")
        lines.append(f"| {one} | {row['verdict']} | {apart} | {', '.join(errors)} | {why} |")
    return "\n".join(lines)


def show(rows: dict[str, dict[str, Any]]) -> None:
    """Print the counts, and every family that is not within."""
    for one, row in sorted(rows.items()):
        if row["verdict"] not in {"within", "not run"}:
            print(f"  {one:42.42s} {line_of(row)}")
    counts = count(rows)
    print("  ".join(f"{verdict}: {number}" for verdict, number in counts.items()))
    for claim in claims(counts):
        print(f"{claim['claim']}: {claim['value']:.3g}")


if __name__ == "__main__":
    main()
