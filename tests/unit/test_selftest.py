"""The self-test is run for real, in its smallest form: files, exit codes, what is named as not run, Ctrl-C."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from ortlab.errors import LedgerError, OptionError
from ortlab.headline import GELU, Headline, Row, largest
from ortlab.render import html, text
from ortlab.selftest import running
from ortlab.selftest.parts import PARTS, _held
from ortlab.selftest.record import Finding, SelfTest

REPOSITORY = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {
    "PYTHONPATH": str(REPOSITORY),
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONUNBUFFERED": "1",
}


# A shell that starts tests in the background has them ignore Ctrl-C, and what they start as well.
HEARS = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from ortlab.cli import main
sys.exit(main(sys.argv[1:]))
"""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", HEARS, "selftest", *arguments]


def record(**changes) -> SelfTest:
    made = SelfTest(
        "cpu",
        {"torch": "2.13.0"},
        "2026-01-01T00:00:00+00:00",
        {"models": 3.5},
        (
            Finding("models", "BERT", "held", "differs by 1e-7", 1e-7, 1e-5),
            Finding("memory", "PyTorch", "stated", "rises by 5 bytes", 5.0),
            Finding("headline", "all of it", "not run", "not asked for"),
        ),
    )
    return dataclasses.replace(made, **changes)


def test_the_smallest_form_trains_writes_both_files_and_names_what_was_not_run(tmp_path):
    done = subprocess.run(
        command("--tiny", "--only", "models", "optimizers", "--output", str(tmp_path / "out")),
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    test = SelfTest.load(tmp_path / "out" / "selftest.json")
    assert test.ok
    found = {(one.part, one.name): one for one in test.findings}
    assert found["models", "BERT"].outcome == "held"
    assert 0 <= found["models", "BERT"].value <= 1e-5
    assert "FusedAdam by PyTorch's fused kernel" in found["optimizers", "FusedAdam, L2"].said
    reasons = {(one.part, one.said) for one in test.not_run}
    for part in ("installation", "switches", "memory", "headline"):
        assert (part, "not asked for") in reasons
    assert any(part == "GPU" and "--gpu" in said for part, said in reasons)
    assert set(test.seconds) == {"models", "optimizers"}

    report = (tmp_path / "out" / "selftest.txt").read_text(encoding="utf-8")
    assert report.strip() in done.stdout
    for one in test.findings:
        assert one.name in report
        assert one.said in report
    assert "[2/6] models" in done.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="a signal of POSIX")
def test_ctrl_c_keeps_what_was_found_and_leaves_no_process(tmp_path):
    child = subprocess.Popen(
        command("--tiny", "--only", "optimizers", "headline", "--output", str(tmp_path)),
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        for line in child.stdout:
            if line.startswith("[") and "headline" in line:
                break
        processes = psutil.Process(child.pid).children(recursive=True)
        child.send_signal(signal.SIGINT)
        rest, errors = child.communicate()
    finally:
        child.kill()
    assert child.returncode == 130, errors
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive
    test = SelfTest.load(tmp_path / "selftest.json")
    assert test.interrupted
    assert not test.ok
    assert any(one.part == "optimizers" and one.outcome == "held" for one in test.findings)
    assert "It was interrupted" in rest


def test_without_a_gpu_the_next_step_is_named(tmp_path):
    done = subprocess.run(
        command("--gpu", "--output", str(tmp_path)),
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "There is no GPU that PyTorch and ONNX Runtime both see." in done.stderr
    assert "ortlab doctor" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(tmp_path):
    (tmp_path / "file").touch()
    done = subprocess.run(
        command("--output", str(tmp_path / "file" / "out")),
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "Give another --output" in done.stderr
    assert "installation" not in done.stdout


def test_a_part_that_ends_its_process_is_a_finding():
    (one,) = running._part("nothing", "cpu", "tiny", 500)
    assert one.outcome == "failed"
    assert "ended with code 1" in one.said
    assert "KeyError" in one.said


def test_when_the_time_is_over_the_rest_is_named():
    lines = []
    test = running.run_selftest(tiny=True, limit_s=0.0, show=lines.append)
    assert {one.part for one in test.not_run} == {*running.NAMES, "GPU"}
    assert all("seconds were over" in one.said for one in test.not_run if one.part != "GPU")
    assert test.ok
    assert not test.seconds
    assert len(lines) == len(test.findings)


def test_an_unknown_part_is_refused():
    with pytest.raises(OptionError, match="no part 'modles'") as caught:
        running.run_selftest(only=["modles"])
    assert ", ".join(running.NAMES) in caught.value.fix
    assert ("installation", *PARTS) == running.NAMES


def test_the_record_is_json_and_a_page(tmp_path):
    test = record()
    assert SelfTest.load(test.save(tmp_path / "one.json")) == test
    assert json.loads((tmp_path / "one.json").read_text(encoding="utf-8"))["ok"] is True
    assert list(test.table()["outcome"]) == ["held", "stated", "not run"]
    for written in (text.render(test), html.render(test)):
        assert "1 held, 1 stated, 1 not run." in written
        assert "models, 3.5 s" in written
        assert "not asked for" in written
    (tmp_path / "other.json").write_text("[]", encoding="utf-8")
    with pytest.raises(LedgerError, match="no self-test"):
        SelfTest.load(tmp_path / "other.json")
    with pytest.raises(LedgerError, match="cannot be read"):
        SelfTest.from_dict({**test.to_dict(), "findings": [{"part": "models"}]})


@pytest.mark.parametrize("outcome", ["failed", "did not hold"])
def test_one_bad_finding_makes_it_bad(outcome):
    bad = record(findings=(*record().findings, Finding("models", "T5", outcome, "no")))
    assert not bad.ok
    assert not record(interrupted=True).ok


def test_what_is_not_a_number_does_not_hold():
    assert _held("models", "BERT", "", math.nan, 1e-5).outcome == "did not hold"
    assert _held("models", "BERT", "", 1e-5, 1e-5).outcome == "held"


def test_the_headline_names_the_largest_batch_that_was_timed():
    rows = (
        Row("ort", 2, "fits", 10, 1.5, ()),
        Row("ort", 4, "fits", 20, 1.75, ()),
        Row("ort", 8, "over the limit", 40, None, ()),
        Row("ort" + GELU, 8, "fits", 30, 1.25, ("Gelu+:1:-1",)),
    )
    assert largest(rows, "ort").batch == 4
    assert largest(rows, "ort" + GELU).plans == ("Gelu+:1:-1",)
    assert largest(rows, "eager") is None
    found = Headline("cpu", 100, rows)
    assert Headline.from_dict(json.loads(json.dumps(found.to_dict()))) == found
