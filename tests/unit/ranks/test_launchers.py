"""The script of the manual's page on many ranks runs under torchrun and accelerate, and its ledgers open here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ortlab
from ortlab.render import text

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "docs" / "train_ranks.py"
PAGE = ROOT / "docs" / "many_ranks.md"

TORCHRUN = "torchrun --standalone --nproc-per-node 2"
ACCELERATE = (
    "accelerate launch --multi_gpu --num_processes 2 --num_machines 1 --main_process_port 0 "
    "--mixed_precision no --dynamo_backend no"
)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("launcher", [TORCHRUN, ACCELERATE])
def test_the_script_of_the_manual_trains_on_two_ranks(launcher, tmp_path):
    commands = PAGE.read_text(encoding="utf-8").replace(" \\\n    ", " ")
    assert f"{launcher} train_ranks.py ledgers\n```" in commands
    program, *arguments = launcher.split()
    command = [str(Path(sys.executable).with_name(program)), *arguments, str(SCRIPT), "ledgers"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")]).rstrip(
        os.pathsep
    )
    finished = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=800, check=False
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    ranks = ortlab.load(tmp_path / "ledgers")
    assert (ranks.ranks, ranks.missing, ranks.cautions()) == (2, (), ())
    first, second = ranks.rows()
    assert first.run.executed_by == second.run.executed_by == "ort"
    assert first.ledger.backend == "gloo"
    assert first.tokens == second.tokens == 5 * 4 * 32
    assert first.run.losses != second.run.losses
    for one in (first, second):
        assert 0 < one.exchange_ms < one.step_ms
        assert 0 < one.computing_ms < one.step_ms
    assert ranks.spread() >= 1
    assert "Run 1 on 2 ranks" in text.render(ranks)
