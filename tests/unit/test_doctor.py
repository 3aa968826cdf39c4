"""The doctor looks at this environment, and at others that are made worse through real variables and folders."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ortlab.checks import doctor as examination
from ortlab.engine import installation
from ortlab.options.options import Need, switches, unmet
from ortlab.options.switches import REASONS
from ortlab.records.checks import Check, Report

REPOSITORY = Path(__file__).parents[2]
EXAMINE = (
    "import json; from ortlab.checks.doctor import doctor; print('REPORT' + json.dumps(doctor().to_dict()))"
)


def examine_in_another_process(environ: dict[str, str]) -> dict[str, dict[str, str]]:
    paths = [*filter(None, [environ.pop("PYTHONPATH", None)]), str(REPOSITORY)]
    environ = os.environ | environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-c", EXAMINE], env=environ, capture_output=True, text=True, check=True
    )
    report = json.loads(done.stdout.split("REPORT")[1])
    checks = {check["name"]: check for check in report["checks"]}
    assert report["ok"] == all(check["status"] != "fail" for check in checks.values())
    return checks


@pytest.fixture(scope="module")
def report() -> Report:
    return examination.doctor()


def test_this_environment_trains(report):
    checks = {check.name: check for check in report.checks}

    assert report.ok
    assert checks["Training step"].status == "ok"
    assert "executed by ORT" in checks["Training step"].found
    assert checks["Autograd Functions"].status == "ok"
    assert "onnxruntime 1.19.2 beside torch" in checks["ORTModule"].found
    assert not any(check.fix for check in report.checks if check.status == "ok")


def test_the_report_is_json_and_a_table(report):
    again = json.loads(json.dumps(report.to_dict()))

    assert again["ok"] is True
    assert [check["name"] for check in again["checks"]] == list(report.table().index)
    assert list(report.table().columns) == ["status", "found", "fix"]


def test_only_failures_make_a_report_bad():
    good, odd, bad = Check("a", "ok", ""), Check("b", "warn", "", "do"), Check("c", "fail", "", "do")

    assert Report((good, odd)).ok
    assert not Report((good, odd, bad)).ok


def test_plain_onnxruntime_beside_the_training_release_is_found_before_anything_is_imported(tmp_path):
    info = tmp_path / "onnxruntime-1.24.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: onnxruntime\nVersion: 1.24.1\n", encoding="utf-8"
    )

    checks = examine_in_another_process({"PYTHONPATH": str(tmp_path)})

    assert checks["ONNX Runtime"]["status"] == "fail"
    assert "pip uninstall -y onnxruntime onnxruntime-training" in checks["ONNX Runtime"]["fix"]
    assert "ORTModule" not in checks
    assert checks["ipywidgets"]["status"] == "ok"


def test_an_installation_that_ends_the_process_is_reported(tmp_path):
    # What a library with a missing symbol does: the process is gone before Python can say anything.
    package = tmp_path / "sympy"
    package.mkdir()
    (package / "__init__.py").write_text("import os; os.write(2, b'gone'); os._exit(134)", encoding="utf-8")

    checks = examine_in_another_process({"PYTHONPATH": str(tmp_path)})

    assert checks["ORTModule"]["status"] == "fail"
    assert "ended with code 134: gone" in checks["ORTModule"]["found"]
    assert "selftest" in checks["ORTModule"]["fix"]
    assert "Training step" not in checks


def test_an_import_that_fails_is_reported_with_its_message(tmp_path):
    (tmp_path / "sympy.py").write_text("raise ImportError('sympy is broken')", encoding="utf-8")

    checks = examine_in_another_process({"PYTHONPATH": str(tmp_path)})

    assert checks["ORTModule"]["status"] == "fail"
    assert "sympy is broken" in checks["ORTModule"]["found"]
    assert "GPU" not in checks


def test_variables_are_examined_but_do_not_reach_the_training(tmp_path):
    checks = examine_in_another_process(
        {
            "ORTMODULE_ENABLE_COMPUTE_OPTIMIZER": "0",
            "ORTMODULE_MEMORY_OPT_CONFIG": str(tmp_path / "none.json"),
        }
    )

    assert checks["Variables"]["status"] == "fail"
    assert "ORTMODULE_MEMORY_OPT_CONFIG" in checks["Variables"]["found"]
    assert checks["Training step"]["status"] == "ok"


def test_old_and_unknown_variables_are_a_warning():
    def examined(environ):
        return examination._variables(environ)

    assert examined({}).status == "ok"
    assert examined({"ORTMODULE_MEMORY_OPT_LEVEL": "1"}).status == "ok"
    assert "memory_level=1" in examined({"ORTMODULE_MEMORY_OPT_LEVEL": "1"}).found
    assert examined({"ORTMODULE_ENABLE_SPARSE_OPTIMIZER": "1"}).status == "warn"
    assert examined({"ORTMODULE_TURBO": "1"}).status == "warn"


def test_a_cache_folder_that_cannot_be_made_is_a_warning(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("ORTLAB_CACHE_DIR", str(file / "cache"))

    check = examination._cache()

    assert check.status == "warn"
    assert "ORTLAB_CACHE_DIR" in check.fix


def test_the_compiler_of_torch_compile_is_looked_for_as_it_will_be(tmp_path):
    compiler = tmp_path / "my-compiler"
    compiler.touch(mode=0o755)
    assert examination._compiler({"PATH": str(tmp_path), "CXX": "my-compiler"}).found == str(compiler)
    missing = examination._compiler({"PATH": str(tmp_path)})
    assert missing.status == "ok"
    assert missing.found.endswith('is not installed; on a CPU, engine="compile" needs it')


@pytest.mark.parametrize(
    ("difference", "status"), [(0.0, "ok"), (9e-6, "ok"), (1e-3, "fail"), (float("nan"), "fail")]
)
def test_a_step_with_other_numbers_fails(difference, status):
    assert examination._step("Training step", {"difference": difference, "nodes": []}).status == status


def test_each_switch_that_cannot_act_here_is_there_with_what_it_needs(report):
    have = installation.have()
    checks = [check for check in report.checks if check.name.startswith("Switches (")]
    lacking = {switch.name for switch in switches() if unmet(switch.name, have)}
    named = {name for check in checks for name in check.found.partition(":")[0].split(", ")}
    assert named == lacking
    for switch in switches():
        for need in set(switch.needs) - have:
            assert any(switch.name in check.found and REASONS[need] in check.found for check in checks)
    assert all(check.status == "ok" for check in checks)  # a machine without a GPU is no fault


def test_the_doctor_names_nothing_where_everything_is_there():
    assert examination._switches(frozenset(Need)) == []
