"""Run every benchmark, one after the other, and write what they found into bench/README.md.

python bench/run_all.py                   all but gpu_speed, which needs a GPU, and
                                          install_size, which needs gigabytes and the network
python bench/run_all.py parity toggle     these
python bench/run_all.py --table           none: only write the README's table anew from bench/results
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
README = HERE / "README.md"
BENCHMARKS = (
    "step_overhead",
    "cpu_step",
    "switches",
    "models_speed",
    "layers_speed",
    "parity",
    "outside_models",
    "nothing_lost",
    "first_step",
    "export_cache",
    "preflight",
    "import_time",
    "front_door",
    "toggle",
    "toggle_memory",
    "memory_measurement",
    "step_memory",
    "verdicts",
    "memory_levels",
    "memory_prediction",
    "budget",
    "memory_engines",
    "chunked_loss",
    "batch_size",
    "recompute_batch",
    "recompute_floor",
    "recompute_parity",
    "bisection",
    "load_balance",
    "ranks",
    "fault_finding",
    "capture_overhead",
    "panel",
    "graph_view",
    "gpu_speed",
    "install_size",
)
BY_HAND = ("memory_engines_large",)
"""Files of results that take hours, `python bench/memory_engines.py --large`: in the table, and not run here."""
BEGIN, END = "<!-- results: python bench/run_all.py --table -->", "<!-- end of results -->"


def main() -> None:
    """Run what is asked for, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("benchmarks", nargs="*", metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument("--table", action="store_true", help="run nothing; write the README's table anew")
    read = parser.parse_args()
    unknown = set(read.benchmarks) - set(BENCHMARKS)
    if unknown:
        parser.error(
            f"there is no benchmark {', '.join(sorted(unknown))}; choose from: {', '.join(BENCHMARKS)}"
        )
    names = [] if read.table else read.benchmarks or BENCHMARKS[:-2]
    for name in names:
        print(f"\n== {name}", flush=True)
        subprocess.run([sys.executable, str(HERE / f"{name}.py")], check=True)
    before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    README.write_text(f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


def table() -> str:
    """Return the claims of all result files as a table in Markdown."""
    lines = ["| benchmark | claim | limit | found | |", "|---|---|---|---|---|"]
    for name in (*BENCHMARKS, *BY_HAND):
        file = HERE / "results" / f"{name}.json"
        if not file.exists():
            lines.append(f"| {name} | not measured yet | | | |")
            continue
        content = json.loads(file.read_text(encoding="utf-8"))
        for one in content["claims"]:
            limit = "" if one["at_most"] is None else f"{one['at_most']:g}"
            verdict = {None: "stated", True: "holds", False: "**does not hold**"}[one["holds"]]
            lines.append(f"| {name} | {one['claim']} | {limit} | {number(one['value'])} | {verdict} |")
        machine = content["machine"]
        lines.append(
            f"| | {machine['date'][:10]}, commit {machine['commit']}, {machine['cpu']}, {machine['threads']} threads, "
            f"load {machine['load_average_at_start']:.1f}-{content['load_average_at_end']:.1f} | | | |"
        )
    return "\n".join(lines)


def number(value: float) -> str:
    """Return a figure with five digits, or all of an integer's."""
    return f"{value:,}" if isinstance(value, int) else f"{value:.5g}"


if __name__ == "__main__":
    main()
