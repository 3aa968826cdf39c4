"""%ort_memory: measures the last step, and shows readings of runs and of old logs."""

from __future__ import annotations

import pytest
from IPython.core.error import UsageError

LOG = "[0/8] step 0 memory (MiB) | phase: pre_forward | allocated: 1866 | max allocated: 1866"


@pytest.mark.parametrize("line", ["--run 1 -n 2", "--run 1 --from x.log", "--from x.log memory_level=1"])
def test_what_was_read_before_takes_nothing_else(shell, line):
    with pytest.raises(UsageError, match="nothing else"):
        shell.run(f"%ort_memory {line}")


def test_a_log_is_shown(shell, tmp_path):
    log = tmp_path / "train of 2023.log"
    log.write_text(f"epoch 1\n{LOG}\n", encoding="utf-8")
    shown = shell.run(f'%ort_memory --from "{log}"')
    assert shown.log("[0/8] ") == LOG


def test_a_log_that_is_not_there_is_a_usage_error(shell, tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        shell.run(f'%ort_memory --from "{tmp_path / "none.log"}"')


def test_the_last_step_is_measured_and_a_run_shown(stepped_shell):
    lab = stepped_shell.user_ns["lab"]
    before, runs = lab._bench.configuration, len(lab.runs)
    measured = stepped_shell.run("%ort_memory -n 1 engine=eager")
    assert (measured.engine, len(measured.steps)) == ("eager", 1)
    assert (lab._bench.configuration, len(lab.runs)) == (before, runs)
    assert "above its start" in stepped_shell.formats(measured)["text/html"]
    assert not stepped_shell.run("%ort_memory --run 1").readings


@pytest.mark.parametrize("line", ["-n 2", "--run 1", "--from x.log"])
def test_a_snapshot_is_of_one_step(shell, line):
    with pytest.raises(UsageError, match="--snapshot takes one step"):
        shell.run(f"%ort_memory --snapshot step.pickle {line}")


def test_on_a_cpu_a_snapshot_says_what_it_needs(eager_shell, tmp_path, unchanged):
    file = tmp_path / "step.pickle"
    with unchanged(eager_shell), pytest.raises(UsageError, match="needs an NVIDIA GPU"):
        eager_shell.run(f'%ort_memory --snapshot "{file}"')
    assert not file.exists()
