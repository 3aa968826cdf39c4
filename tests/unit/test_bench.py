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
    "cpu_step": {"aten_backward=False", "aten_cross_entropy=False", "intra_op_spinning=True"},
    "layers_speed": {"relu", "leaky_relu", "elu"},
    "gpu_speed": {"tiny"},
    "models_speed": {"MLP small"},
    "parity": {"BERT", "GPT-2", "Llama", "T5", "ViT", "DeBERTa-v2", "BLOOM"},
    "import_time": {"import ortlab / pass"},
    "toggle": {"session: memory_level / fresh process", "graph: compute_optimizer / fresh process"},
    "toggle_memory": {1},
    "install_size": {"pip", "bin"},
    "first_step": {"ort / compile"},
    "preflight": {"pre-flight with search"},
    "memory_prediction": {"memory level 1", "recompute=layers"},
    "recompute_parity": {"bert-eager", "mlp-none"},
    "export_cache": {"with / without", "filling / without"},
    "graph_view": {"BERT, 1 layer"},
    "load_balance": {"balanced / as they come"},
    "ranks": {"as they come", "balanced"},
    "switches": {"memory_level=1"},
    "nothing_lost": {"ledger", "results of tuning"},
}
STATED_ONLY = {"install_size", "export_cache", "gpu_speed", "switches"}

# They train in many fresh processes: minutes even in the tiny setting, which is why they are not run here.
LONG = {
    "budget",
    "step_memory",
    "verdicts",
    "batch_size",
    "bisection",
    "capture_overhead",
    "chunked_loss",
    "fault_finding",
    "front_door",
    "memory_levels",
    "memory_measurement",
    "memory_engines",
    "outside_models",
    "panel",
    "recompute_batch",
    "recompute_floor",
}


def bench(name: str, *arguments: str) -> subprocess.CompletedProcess:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, str(BENCH / f"{name}.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=500, env=environment)


def printed(value: object) -> str:
    """Return a cell as `report.Report.table` prints it: 420.0 is printed as 420."""
    return f"{value:.5g}" if isinstance(value, float) else str(value)


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
        assert all(printed(next(iter(row.values()))) in result.stdout for row in rows)
    last = list(record["tables"].values())[-1]
    assert ROWS[name] <= {next(iter(row.values())) for row in last}
    assert record["claims"]
    for claim in record["claims"]:
        assert claim["claim"] in result.stdout
        assert (claim["holds"] is None) == (claim["at_most"] is None)
    assert all(claim["at_most"] is None for claim in record["claims"]) == (name in STATED_ONLY)


@pytest.mark.parametrize("name", sorted(LONG))
def test_a_long_benchmark_says_what_it_holds(name):
    result = bench(name, "--help")
    assert result.returncode == 0, result.stderr
    assert "--quick" in result.stdout
    assert "--rounds" in result.stdout


def test_families_are_trained_judged_and_kept(tmp_path):
    result = bench("families", "--only", "deit", "--attention", "default", "--output", str(tmp_path))
    assert result.returncode == 0, result.stderr
    record = json.loads((tmp_path / "families.json").read_text(encoding="utf-8"))
    (row,) = record["families"].values()
    assert row["verdict"] == "within"
    assert 0 < row["difference"] <= 1e-5
    assert record["counts"]["within"] == 1
    unknown = bench("families", "--only", "no such family", "--output", str(tmp_path))
    assert unknown.returncode != 0
    assert "There is no family no such family." in unknown.stderr


def test_every_benchmark_is_listed_and_tested():
    shared = {
        "layer_list",
        "model_list",
        "models",
        "outside_code",
        "outside_state",
        "outside_list",
        "report",
        "rounds",
        "run_all",
        "turns",
    } | {path.stem for kind in ("family", "lost") for path in BENCH.glob(f"{kind}_*.py")}
    scripts = {path.stem for path in BENCH.glob("*.py")} - shared
    assert scripts == ROWS.keys() | LONG | {"families"}
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
