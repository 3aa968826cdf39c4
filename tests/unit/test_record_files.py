"""A file that holds something else, or a part of a record, is told, whatever the record."""

from __future__ import annotations

import json

import pytest

from ortlab.errors import LedgerError
from ortlab.graphs.diff import GraphDiff
from ortlab.graphs.flops import Flops, FlopSavings
from ortlab.memory.measured import MemoryMeasurement
from ortlab.parity.parity import Parity
from ortlab.ranks.balancing import Balance, balance
from ortlab.records.checks import Finding, SelfTest
from ortlab.records.density import DensityReport
from ortlab.records.record_files import checked
from ortlab.records.runs import Run
from ortlab.studies.batch_size import BatchSizeSearch
from ortlab.studies.bisection import Bisection
from ortlab.studies.budget import Budget
from ortlab.studies.engine_comparison import EngineComparison
from ortlab.studies.sweep import Sweep

RECORDS = {
    Balance: "record of a load balance",
    BatchSizeSearch: "search",
    Bisection: "bisection",
    Budget: "budget",
    DensityReport: "record of densities",
    FlopSavings: "record of saved FLOPs",
    Flops: "record of FLOPs",
    GraphDiff: "difference of graphs",
    Parity: "comparison of tensors",
    EngineComparison: "record of candidates",
    Run: "run",
    SelfTest: "self-test",
    Sweep: "sweep",
}


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_what_is_no_such_record_is_refused_with_its_name(record, tmp_path):
    file, noun = tmp_path / "record.json", RECORDS[record]
    layout = 2 if record in {FlopSavings, Budget, BatchSizeSearch, Run} else 1
    for content, said in {
        "[]": f"{file} is not a {noun}",
        "{": f"{file} of a {noun} cannot be read",
        "{}": f"This {noun} has layout None",
        json.dumps({"schema": 99}): f"This {noun} has layout 99, and this ortlab reads layout {layout}",
        json.dumps({"schema": layout}): f"This {noun} cannot be read",
        json.dumps({"schema": layout, "nodes": 3, "points": 3, "sweep": 3}): f"This {noun} cannot be read",
    }.items():
        file.write_text(content, encoding="utf-8")
        with pytest.raises(LedgerError, match=said):
            record.load(file)


def test_what_no_page_can_show_is_refused(tmp_path):
    """Numbers that no column holds, and halves of characters that no file does; a list in place of a record."""
    good = Balance.load(balance([3, 9, 4, 8], 2, ranks=2).save(tmp_path / "balance.json")).to_dict()
    for change in ({"batch_size": 10**30}, {"batch_size": -(10**30)}):
        with pytest.raises(LedgerError, match=next(iter(change))):
            Balance.from_dict({**good, **change})
    finding = Finding("models", "BERT", "held", "\ud800", 1e-7, 1e-5)
    with pytest.raises(TypeError, match="is '"):
        checked(finding)
    for kind in (Balance, Run, Sweep, MemoryMeasurement):
        with pytest.raises(LedgerError, match="cannot be read"):
            kind.from_dict([1])
    with pytest.raises(LedgerError, match="cannot be read"):
        MemoryMeasurement.from_dict({"steps": [3]})


def test_a_record_goes_to_a_file_and_comes_back(tmp_path):
    flops = Flops((), "forward")
    assert Flops.load(flops.save(tmp_path / "flops.json")) == flops
