"""%ort_density, %ort_flops and %ort_balance: their lines, and the table that is drawn while steps run."""

from __future__ import annotations

import pytest
from IPython.utils.capture import capture_output

from ortlab.graphs.flops import Flops, FlopSavings
from ortlab.ranks.balancing import Balance
from ortlab.records.density import DensityReport


@pytest.mark.row("E1")
def test_the_table_is_drawn_while_steps_run(stepped_shell):
    lab = stepped_shell.user_ns["lab"]
    with capture_output() as shown:
        stepped_shell.run("%ort_density on")
        assert lab.options.print_input_density
        lab.rerun(2)
    drawn = [one.data["text/plain"] for one in shown.outputs]
    assert len(drawn) >= 2
    assert "no step so far" in drawn[0]
    assert f"run {lab.runs[-1].number}" in drawn[-1]
    with capture_output() as shown:
        stepped_shell.run("%ort_density off")
        assert not lab.options.print_input_density
        lab.rerun(1)
    assert not shown.outputs
    report = stepped_shell.run("%ort_density")
    assert isinstance(report, DensityReport)


def test_flops_and_what_is_saved(stepped_shell):
    found = stepped_shell.run("%ort_flops")
    assert isinstance(found, Flops)
    assert found.total > 0
    saved = stepped_shell.run("%ort_flops --baseline compute_optimizer=False")
    assert isinstance(saved, FlopSavings)
    assert saved.changed == "compute_optimizer=True against compute_optimizer=False"
    assert saved.having.total == found.total
    for record in (found, saved):
        forms = stepped_shell.formats(record)
        assert "FLOPs" in forms["text/html"]
        assert "FLOPs" in forms["text/plain"]


def test_balance(shell):
    shell.user_ns["lengths"] = [3, 9, 4, 8, 5, 7, 6, 1]
    record = shell.run("%ort_balance lengths --batch 2 --ranks 2 --epochs 3 --drop-last")
    assert isinstance(record, Balance)
    assert (record.ranks, record.batch_size, len(record.having), record.drop_last) == (2, 2, 3, True)
    assert record.imbalance(record.having) < record.imbalance(record.without)
    assert "max / mean" in shell.formats(record)["text/html"]
