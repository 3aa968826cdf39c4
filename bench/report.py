"""What a benchmark writes: plain tables, its claims with their figures, and a JSON file with the machine's facts."""

from __future__ import annotations

import argparse
import datetime as dt
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results"
THREADS = int(os.environ.get("ORTLAB_BENCH_THREADS", "2"))
"""Threads of OpenMP, PyTorch and ONNX Runtime each."""
CLOCK = os.environ.get("ORTLAB_BENCH_CLOCK", "wall")
"""What steps are timed by; "processor" is the time of this process's threads, for a machine that does other things."""
PACKAGES = ("torch", "onnxruntime-training-cpu", "onnxruntime-training", "onnx", "numpy", "transformers")


def arguments(
    description: str,
    *,
    rounds: int,
    resumes: bool = False,
    only: str = "",
    also: Mapping[str, str] | None = None,
) -> argparse.Namespace:
    """Read the arguments that all benchmarks share, and limit this process and its children to `THREADS` threads.

    Call it before torch is imported: OpenMP reads the number of threads once.

    Parameters
    ----------
    description
        The docstring of the benchmark.
    rounds
        How often everything is measured unless the user says otherwise.
    resumes
        Whether the benchmark can go on with what an interrupted run has found: `--resume`.
    only
        What can be chosen by name, such as "layers": `--only`.
    also
        Flags of this benchmark alone, each with its help.
    """
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=0, help=f"interleaved rounds (default {rounds})")
    parser.add_argument("--quick", action="store_true", help="a tiny setting that shows that it runs")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the JSON file")
    if resumes:
        parser.add_argument("--resume", action="store_true", help="go on with a run that was interrupted")
    if only:
        parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help=f"only these {only}")
    for flag, meaning in (also or {}).items():
        parser.add_argument(f"--{flag}", action="store_true", help=meaning)
    read = parser.parse_args()
    read.rounds = read.rounds or (2 if read.quick else rounds)
    os.environ["OMP_NUM_THREADS"] = str(THREADS)
    os.environ["HF_HUB_OFFLINE"] = "1"
    if str(REPOSITORY) not in sys.path:
        sys.path.append(str(REPOSITORY))  # so that it runs in a checkout that is not installed, too
    return read


def check_names(what: str, names: Iterable[str], known: Collection[str]) -> None:
    """End with the names that there are, unless each of these is one: "There is no model X; there are A, B."."""
    if unknown := set(names) - set(known):
        raise SystemExit(f"There is no {what} {', '.join(sorted(unknown))}; there are {', '.join(known)}.")


class Report:
    """Print what was measured as it comes, and write all of it to `<output>/<name>.json` at the end.

    Parameters
    ----------
    name
        Of the benchmark, and of its file.
    read
        What `arguments` returned.
    command
        That runs it, where it is not the file of its name alone.
    """

    def __init__(self, name: str, read: argparse.Namespace, *, command: str = "") -> None:
        self._name = name
        self._output: Path = read.output
        self._content: dict[str, object] = {
            "benchmark": name,
            "command": command or f"python bench/{name}.py",
            "quick": read.quick,
            "rounds": read.rounds,
            "machine": machine(),
        }
        self._claims: list[dict[str, object]] = []
        self._tables: dict[str, list[dict[str, object]]] = {}
        self._notes: list[str] = []

    def table(self, title: str, rows: list[dict[str, object]]) -> None:
        """Print rows, whose keys are the column heads with their units."""
        print(f"\n{title}")
        heads = list(rows[0])
        cells = [heads, *([_text(row[head]) for head in heads] for row in rows)]
        widths = [max(len(line[column]) for line in cells) for column in range(len(heads))]
        for line in cells:
            first, *rest = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
            print("  ".join([line[0].ljust(len(first)), *rest]))
        self._tables[title] = rows

    def claim(self, text: str, value: float, *, at_most: float | None = None) -> None:
        """Hold a figure against what is claimed of it; without a limit, the figure is only stated."""
        holds = None if at_most is None else value <= at_most
        verdict = (
            "" if holds is None else f" (at most {_text(at_most)}: {'holds' if holds else 'DOES NOT HOLD'})"
        )
        print(f"\n{text}: {_text(value)}{verdict}")
        self._claims.append({"claim": text, "value": value, "at_most": at_most, "holds": holds})

    def note(self, text: str) -> None:
        """Print a sentence that belongs to the figures."""
        print(text)
        self._notes.append(text)

    def write(self) -> Path:
        """Write the JSON file and return its path."""
        self._content |= {"claims": self._claims, "tables": self._tables, "notes": self._notes}
        self._content["load_average_at_end"] = os.getloadavg()[0]
        self._output.mkdir(parents=True, exist_ok=True)
        file = self._output / f"{self._name}.json"
        file.write_text(json.dumps(self._content, indent=1) + "\n", encoding="utf-8")
        _rows_file(self._name, self._output).unlink(missing_ok=True)
        print(f"\nWritten to {file}")
        return file


def one_by_one(
    name: str, read: argparse.Namespace, cases: Sequence[str], measure: Callable[[str], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Measure each case, keep its row at once, and return all rows; `--resume` takes those that are kept.

    Parameters
    ----------
    name
        Of the benchmark; `Report.write` removes what it has kept.
    read
        What `arguments` returned.
    cases
        Names of what is measured.
    measure
        Returns the row of one, which has JSON's types.
    """
    kept = _rows_file(name, read.output)
    how = [read.rounds, read.quick, THREADS, CLOCK]
    lines = kept.read_text(encoding="utf-8").splitlines() if read.resume and kept.exists() else []
    known = [json.loads(line) for line in lines if line.endswith("}")]  # the last one may be cut
    others = [one["case"] for one in known if one["how"] != how]
    if others:
        print(
            f"Not taken, since other rounds, threads or another clock measured them: {', '.join(others)}.",
            file=sys.stderr,
        )
    known = [one for one in known if one["how"] == how]
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text("".join(json.dumps(one) + "\n" for one in known), encoding="utf-8")
    rows = {one["case"]: one["row"] for one in known}
    for case in cases:
        if case not in rows:
            rows[case] = measure(case)
            print(json.dumps(rows[case]), flush=True)
            with kept.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"case": case, "row": rows[case], "how": how}) + "\n")
    return [rows[case] for case in cases]


def _rows_file(name: str, output: Path) -> Path:
    return output / f"{name}-rows.jsonl"


def in_own_process(script: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Any:
    """Run a benchmark's script in a process of its own, and return the JSON of the last line that it printed.

    Parameters
    ----------
    script
        The benchmark's file.
    *arguments
        What tells it that it is the child, and what to measure.
    environment
        Variables to set besides those of this process.
    """
    done = subprocess.run(
        [sys.executable, script, *arguments],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **(environment or {})},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def machine() -> dict[str, object]:
    """Return the facts of this machine that a figure depends on."""
    return {
        "cpu": _cpu(),
        "cores": psutil.cpu_count(logical=False),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "threads": THREADS,
        "clock": CLOCK,
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {
            name: importlib.metadata.version(name)
            for name in PACKAGES
            if any(importlib.metadata.distributions(name=name))
        },
        "commit": _commit(),
        "date": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        "load_average_at_start": os.getloadavg()[0],
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown"
    )


def _commit() -> str:
    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _text(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
