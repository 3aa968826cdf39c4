"""`%ort_plan` evaluates for other batches, reads what old releases wrote, and writes what each of them reads."""

from __future__ import annotations

import json
from pathlib import Path

LOGS = Path(__file__).parents[1] / "unit" / "logs"


def test_old_logs_are_shown_before_any_model_is_there(shell):
    saved = shell.run(f"%ort_plan --from '{LOGS / 'memory_insight_2023.txt'}'")
    assert len(saved.rows) == 12
    shown = shell.formats(saved)
    assert "Not compared with a model" in shown["text/plain"]
    assert "BiasGelu+:1:-1" in shown["text/html"]


def test_plans_of_a_model_are_read_written_and_evaluated(stepped_shell, capsys, tmp_path, unchanged):
    shell = stepped_shell
    with unchanged(shell):
        plan = shell.run("%ort_plan --at batch=50")
        assert plan.symbols["input_dim0"] == 50
        shell.user_ns["size"] = 10
        again = shell.run("%ort_plan --at input_dim0=$size")
        assert again.rows[0].saving_bytes * 5 == plan.rows[0].saving_bytes

        shell.user_ns["old"] = "Dropout:0,Gelu:1,Tile:1"
        saved = shell.run("%ort_plan --from $old")
        assert (saved.dialect, saved.present, saved.absent) == ("2022", ("Gelu+:1:-1",), ("Tile+:1:-1",))
        assert "does not have 1 of 2: Tile+:1:-1" in shell.formats(saved)["text/plain"]
        shell.user_ns["file"] = tmp_path / "plans of today.json"
        shell.run("%ort_plan --from $old --write $file")
        assert json.loads(shell.user_ns["file"].read_text()) == ["Gelu+:1:-1", "Tile+:1:-1"]
    shell.run("%ort_set memory_plan=Gelu+:1:-1")
    shell.run("%ort_rerun")
    shell.run("%ort_plan --write $file")
    assert json.loads(shell.user_ns["file"].read_text()) == ["Gelu+:1:-1"]
    shell.run(f"%ort_plan --write {tmp_path / 'old'} --dialect 2022")
    assert (tmp_path / "old").read_text() == "Gelu:1\n"
    assert f"Saved to {tmp_path / 'old'}" in capsys.readouterr().out
