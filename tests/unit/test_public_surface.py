"""What users can reach: few names, each there and documented, and one call that reads every saved record."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import re
from pathlib import Path

import pytest

import ortlab
import ortlab.parity
from ortlab.errors import LedgerError
from ortlab.graphs.flops import Flops
from ortlab.loading import HOMES
from ortlab.records.record_files import JsonRecord
from ortlab.records.runs import Ledger

REPOSITORY = Path(__file__).parents[2]


def test_the_package_has_at_most_twenty_names():
    assert len(ortlab.__all__) <= 20
    assert set(ortlab.__all__) <= set(dir(ortlab))
    for name in ortlab.__all__:
        assert inspect.getdoc(getattr(ortlab, name)), name


def test_a_lab_has_at_most_thirty_members():
    members = [name for name in dir(ortlab.Lab) if not name.startswith("_")]
    assert len(members) <= 30
    for name in members:
        assert inspect.getdoc(getattr(ortlab.Lab, name)), name


def test_one_page_lists_every_public_name():
    page = (REPOSITORY / "docs" / "api.md").read_text(encoding="utf-8")
    members = {f"lab.{name}" for name in dir(ortlab.Lab) if not name.startswith("_")}
    names = {f"ortlab.{name}" for name in ortlab.__all__}
    table = [line for line in page.splitlines() if line.startswith("|")]
    listed = re.findall(r"`((?:lab|ortlab)\.\w+)`", "\n".join(table))
    assert set(listed) == members | names | {"ortlab.parity", "ortlab.ranks"}
    assert len(listed) == len(set(listed))


@pytest.mark.parametrize("name", ortlab.parity.__all__)
def test_what_parity_offers_beside_a_lab_is_there(name):
    assert inspect.getdoc(getattr(ortlab.parity, name))


def test_every_record_that_can_be_saved_can_be_loaded():
    for module in pkgutil.walk_packages(ortlab.__path__, "ortlab."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    saved = {kind._noun: (kind.__module__, kind.__name__) for kind in JsonRecord.__subclasses__()}
    assert {noun: home for noun, home in saved.items() if home[0].startswith("ortlab.")} == HOMES


def test_a_file_says_what_it_holds(tmp_path):
    flops = Flops((), "forward")
    assert ortlab.load(flops.save(tmp_path / "flops.json")) == flops
    assert isinstance(ortlab.load(Ledger().save(tmp_path / "runs.json")), Ledger)


@pytest.mark.parametrize("content", ["{}", "3", "{", json.dumps({"record": "song", "schema": 1})])
def test_what_holds_no_record_is_refused(content, tmp_path):
    file = tmp_path / "other.json"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(LedgerError, match=r"other\.json"):
        ortlab.load(file)
    with pytest.raises(LedgerError, match=r"nothing\.json"):
        ortlab.load(tmp_path / "nothing.json")
