"""%ort_memory: measures the last step, and shows readings of runs and of old logs."""

from __future__ import annotations

LOG = "[0/8] step 0 memory (MiB) | phase: pre_forward | allocated: 1866 | max allocated: 1866"


def test_a_log_is_shown(shell, tmp_path):
    log = tmp_path / "train of 2023.log"
    log.write_text(f"epoch 1\n{LOG}\n", encoding="utf-8")
    shown = shell.run(f'%ort_memory --from "{log}"')
    assert shown.log("[0/8] ") == LOG


def test_the_last_step_is_measured_and_a_run_shown(stepped_shell):
    lab = stepped_shell.user_ns["lab"]
    before, runs = lab._bench.configuration, len(lab.runs)
    measured = stepped_shell.run("%ort_memory -n 1 engine=eager")
    assert (measured.engine, len(measured.steps)) == ("eager", 1)
    assert (lab._bench.configuration, len(lab.runs)) == (before, runs)
    assert "above its start" in stepped_shell.formats(measured)["text/html"]
    assert not stepped_shell.run("%ort_memory --run 1").readings
