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
import torch

from ortlab.checks import selftest
from ortlab.checks.headline import GELU, Headline, Row, largest
from ortlab.checks.selftest_parts import _LEFT_ALONE, PARTS, other_value, parted
from ortlab.errors import LedgerError, OptionError
from ortlab.options.options import switches
from ortlab.records.checks import Finding, SelfTest
from ortlab.render import html, text
from ortlab.render.check_pages import selftest_verdict

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
    for one in test.findings:
        for written in (report, done.stdout):
            assert one.name in written
            assert one.said in written
    assert "[2/6] models" in done.stdout
    assert f"\n\n{selftest_verdict(test)}\n" in done.stdout
    assert selftest_verdict(test) in report
    assert done.stdout.endswith("(ortlab.records.checks.SelfTest.load reads it)\n")
    assert not done.stderr


def test_the_parts_of_switches_and_memory_name_all_there_is(tmp_path):
    lines, kept = [], []
    test = selftest.run_selftest(
        tiny=True, only=["switches", "memory"], show=lines.append, keep=kept.append, limit_s=3600.0
    )
    assert test.ok, lines
    found = {one.name: one for one in test.findings if one.part == "switches"}
    assert set(found) == {one.name for one in switches()}
    assert [one.name for one in found.values() if one.outcome == "held"] == ["compute_optimizer"]
    assert found["compute_optimizer"].value <= 1e-5
    assert "NVIDIA GPU" in found["triton_debug"].said
    measured = {one.name: one for one in test.findings if one.part == "memory"}
    assert measured["ONNX Runtime"].outcome == measured["PyTorch"].outcome == "stated"
    assert "resident set" in measured["PyTorch"].said
    assert [[*one.seconds] for one in kept] == [["switches"], ["switches", "memory"]]
    assert all(one.interrupted for one in kept)  # a file of it says that there was more to come
    assert not test.interrupted


def test_every_switch_has_another_value_or_a_reason():
    declared = {one.name: one for one in switches()}
    assert set(declared) >= set(_LEFT_ALONE)
    for name in declared.keys() - _LEFT_ALONE:
        assert other_value(declared[name]) not in {None, declared[name].default}, name


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
    _, left = psutil.wait_procs(processes, timeout=60)
    # One that has ended stays a zombie for as long as the machine's first process does not ask for it.
    assert not [one for one in left if one.status() != psutil.STATUS_ZOMBIE]
    test = SelfTest.load(tmp_path / "selftest.json")
    assert test.interrupted
    assert not test.ok
    assert any(one.part == "optimizers" and one.outcome == "held" for one in test.findings)
    assert "\nInterrupted: " in rest
    assert "what is not named was not run" in (tmp_path / "selftest.txt").read_text(encoding="utf-8")


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
    assert "Why: " in done.stderr
    assert "ortlab doctor" in done.stderr
    assert not done.stdout
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


# A part with trials of its own, run as the parts of ortlab are.
TRIALS = """
import json, os, sys, time
from ortlab.records.checks import Finding
from ortlab.checks.selftest_parts import Trial, report

def good(name):
    return Trial("odd", name, lambda: [Finding("odd", name, "held", "as it should")])

def trials():
    if sys.argv[2] != "hang":
        yield from endings()
    yield Trial("odd", "six", lambda: time.sleep(float(sys.argv[1])) or [])
    yield good("seven")
    if sys.argv[2] == "crash":
        os._exit(7)

def endings():
    yield good("one")
    yield Trial("odd", "two", lambda: 1 / 0)
    yield Trial("odd", "three", os.abort)
    yield good("four")
    yield Trial("odd", "five", lambda: sys.exit("that was all"))

report(trials(), json.loads(sys.argv[-1]))
"""


def odd(seconds, end, limit_s=3600.0):
    written = [sys.executable, "-c", f"import sys; sys.path.append({str(REPOSITORY)!r})\n{TRIALS}"]
    ticks = []
    found = selftest.findings_of(
        "odd", [*written, str(seconds), end], limit_s, lambda *told: ticks.append(told)
    )
    return [(one.name, one.outcome, one.said) for one in found], ticks


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_a_trial_that_ends_its_process_does_not_take_the_others_with_it():
    found, ticks = odd(1.5, "crash")
    assert found == [
        ("one", "held", "as it should"),
        ("two", "failed", "ZeroDivisionError: division by zero"),
        ("three", "failed", "its process was ended by SIGABRT"),
        ("four", "held", "as it should"),
        ("five", "failed", "its process ended with code 1: that was all"),
        ("seven", "held", "as it should"),
        ("the rest of it", "failed", "its process ended with code 7"),
    ]
    # What is tried for long is told meanwhile.
    assert "six" in {trial for trial, _ in ticks}
    assert [seconds for _, seconds in ticks] == sorted(seconds for _, seconds in ticks)


def test_a_trial_that_hangs_is_ended_and_named():
    for limit_s in (2, 8, 32, 128):  # the first that this machine comes to the trial in
        found, _ = odd(3600, "hang", limit_s)
        if found[0][0] == "six":
            break
    assert found == [
        ("six", "failed", f"it had not ended after {limit_s} s"),
        ("the rest of it", "not run", f"the {limit_s} s of this part were over"),
    ]


def test_a_part_that_cannot_start_is_a_finding():
    (one,) = selftest.findings_of("nothing", selftest.command("nothing", "cpu", "tiny"), 500)
    assert (one.name, one.outcome) == ("the rest of it", "failed")
    assert "ended with code 1: KeyError" in one.said


def test_when_the_time_is_over_the_rest_is_named():
    lines = []
    test = selftest.run_selftest(tiny=True, limit_s=1e-9, show=lines.append)
    assert {one.part for one in test.not_run} == {*selftest.NAMES, "GPU"}
    assert all("minutes were over" in one.said for one in test.not_run if one.part != "GPU")
    assert test.ok
    assert not test.seconds
    with pytest.raises(OptionError, match="no time for a self-test"):
        selftest.run_selftest(limit_s=0.0, show=lines.append)


def test_an_unknown_part_is_refused():
    with pytest.raises(OptionError, match="no part 'modles'") as caught:
        selftest.run_selftest(only=["modles"])
    assert ", ".join(selftest.NAMES) in caught.value.fix
    assert ("installation", *PARTS) == selftest.NAMES


def test_the_record_is_json_and_a_page(tmp_path):
    test = record()
    assert SelfTest.load(test.save(tmp_path / "one.json")) == test
    assert json.loads((tmp_path / "one.json").read_text(encoding="utf-8"))["ok"] is True
    assert list(test.table()["outcome"]) == ["held", "stated", "not run"]
    for written in (text.render(test), html.render(test)):
        assert "All that was tried holds: 1 held, 1 stated, 1 not run; 3.50 s." in written
        assert "models, 3.50 s" in written
        assert "not asked for" in written
    (tmp_path / "other.json").write_text("[]", encoding="utf-8")
    with pytest.raises(LedgerError, match="is not a self-test"):
        SelfTest.load(tmp_path / "other.json")
    with pytest.raises(LedgerError, match="cannot be read"):
        SelfTest.from_dict({**test.to_dict(), "findings": [{"part": "models"}]})


@pytest.mark.parametrize("outcome", ["failed", "did not hold"])
def test_one_bad_finding_makes_it_bad(outcome):
    bad = record(findings=(*record().findings, Finding("models", "T5", outcome, "no")))
    assert not bad.ok
    assert selftest_verdict(bad).startswith("Not all of it holds: 1 held")
    assert f"! models, T5: {outcome}: no" in text.render(bad)
    assert not record(interrupted=True).ok
    assert selftest_verdict(record(interrupted=True)).startswith("Interrupted: 1 held")


def test_what_is_not_a_number_does_not_hold():
    assert Finding.held_to(1e-5, "models", "BERT", "", math.nan).outcome == "did not hold"
    assert Finding.held_to(1e-5, "models", "BERT", "", 1e-5).outcome == "held"
    assert Finding.held_to(1e-5, "models", "BERT", "by 1", 1.0).said == "by 1 (at most 1e-05)"


def test_two_trainings_part_by_their_losses_or_their_weights():
    start, end = torch.zeros(3, dtype=torch.float64), torch.tensor([3.0, 4.0, 0.0], dtype=torch.float64)
    assert parted(([1.0], [1.0]), (end, end), start) == 0
    assert parted(([1.0, 2.0], [1.0, 2.5]), (end, end), start) == pytest.approx(0.2)
    assert parted(([1.0], [1.0]), (end + torch.tensor([0.0, 0.0, 0.5]), end), start) == pytest.approx(0.1)
    for lost in (math.nan, None):
        assert math.isnan(parted(([1.0, lost], [1.0, 1.0]), (end, end), start))
    assert math.isnan(parted(([1.0], [1.0]), (start, start), start))  # nothing has moved, nothing is shown


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
