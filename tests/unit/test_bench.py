"""Every benchmark runs in a tiny setting, prints its tables and writes its record; what it finds is not judged here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"

# Each benchmark, and what the first column of its last table holds.
ROWS = {
    "step_overhead": {"inputs", "modules, parameters"},
    "parity": {"BERT", "GPT-2", "Llama", "T5", "ViT", "DeBERTa-v2", "BLOOM"},
    "import_time": {"import ortlab / pass"},
    "toggle": {"session: memory_level / full re-wrap", "graph: compute_optimizer / full re-wrap"},
    "install_size": {"pip", "bin"},
    "first_step": {"ort / compile"},
}
STATED_ONLY = {"toggle", "install_size"}


def bench(name: str, *arguments: str) -> subprocess.CompletedProcess:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, str(BENCH / f"{name}.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=500, env=environment)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_prints_its_tables_and_writes_its_record(name, tmp_path):
    result = bench(name, "--quick", "--output", str(tmp_path))
    assert result.returncode == 0, result.stderr
    record = json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))
    assert record["quick"] is True
    assert record["machine"]["versions"]["torch"]
    for title, rows in record["tables"].items():
        assert title in result.stdout
        assert all(str(next(iter(row.values()))) in result.stdout for row in rows)
    last = list(record["tables"].values())[-1]
    assert ROWS[name] <= {next(iter(row.values())) for row in last}
    assert record["claims"]
    for claim in record["claims"]:
        assert claim["claim"] in result.stdout
        assert (claim["holds"] is None) == (claim["at_most"] is None)
    assert all(claim["at_most"] is None for claim in record["claims"]) == (name in STATED_ONLY)


def test_every_benchmark_is_listed_and_tested():
    scripts = {path.stem for path in BENCH.glob("*.py")} - {"models", "report", "rounds", "run_all"}
    assert scripts == ROWS.keys()
    readme = (BENCH / "README.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in readme for name in scripts)


def test_the_readme_shows_the_committed_results():
    before = (BENCH / "README.md").read_text(encoding="utf-8")
    result = bench("run_all", "--table")
    after = (BENCH / "README.md").read_text(encoding="utf-8")
    (BENCH / "README.md").write_text(before, encoding="utf-8")
    assert result.returncode == 0, result.stderr
    assert after == before


def test_an_unknown_benchmark_is_refused():
    result = bench("run_all", "speed")
    assert result.returncode == 2
    assert "there is no benchmark speed; choose from: step_overhead" in result.stderr
