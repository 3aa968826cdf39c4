"""Of models that are broken on purpose, a pre-flight names the module that is guilty."""

from __future__ import annotations

import pytest
import torch
from broken_models import BROKEN

import ortlab
from ortlab.records.preflight import Kind

LEAST = 0.95
"""Of twenty, nineteen."""

NO_STOP = {"FunctionWithWrongBackward"}
"""Faults of a backward, which show when it runs; a pre-flight can only point at them."""

_named: dict[str, bool] = {}


@pytest.mark.parametrize("name", BROKEN)
def test_the_guilty_module_is_named(name):
    torch.manual_seed(0)
    broken = BROKEN[name]()
    report = ortlab.preflight(broken.model, broken.batch, search=False, progress=False)
    stopping = [one for one in report.findings if one.stops]
    if name in NO_STOP:
        stopping = [one for one in report.findings if one.kind is Kind.FUNCTION]
    _named[name] = bool(stopping) and all(one.place.module == broken.guilty for one in stopping)
    assert _named[name], [(one.kind.value, one.what, one.place) for one in report.findings]
    assert report.ok == (name in NO_STOP)
    for one in stopping:
        assert one.what
        assert one.place.module_class == type(broken.model.get_submodule(broken.guilty)).__name__


def test_nineteen_of_twenty_are_named(capsys, request):
    if len(_named) < len(BROKEN):  # a part of them was chosen: count the others here
        for name in BROKEN.keys() - _named.keys():
            torch.manual_seed(0)
            broken = BROKEN[name]()
            report = ortlab.preflight(broken.model, broken.batch, search=False, progress=False)
            _named[name] = any(one.place.module == broken.guilty for one in report.findings)
    with capsys.disabled():
        print(
            f"\npre-flight names the guilty module of {sum(_named.values())} of {len(_named)} broken models"
        )
    assert len(_named) >= 20
    assert sum(_named.values()) >= LEAST * len(_named)


@pytest.mark.parametrize(
    "name",
    [
        "Branch",
        "Item",
        "OperatorWithoutGradient",
        "Counter",
        "Global",
        "WritesWithoutGradient",
        "forward_hook",
    ],
)
def test_the_line_is_named(name):
    torch.manual_seed(0)
    broken = BROKEN[name]()
    report = ortlab.preflight(broken.model, broken.batch, search=False, progress=False)
    lines = [one.place.where for one in report.findings if one.stops]
    wanted = {
        "Branch": "if y.mean() > 0:",
        "Item": "return y / (y.abs().max().item() + 1.0)",
        "OperatorWithoutGradient": "return torch.special.zeta(y.abs() + 1.5, torch.ones(()))",
        "Counter": "self.calls += 1",
        "Global": "draws += 1",
        "WritesWithoutGradient": "y.clamp_(max=0.5)",
        "forward_hook": "scaled = hidden / (1 + hidden.abs().max().item())",
    }
    assert [_source(line) for line in lines] == [wanted[name]]


def _source(where: str) -> str:
    file, _, number = where.rpartition(":")
    with open(file, encoding="utf-8") as text:  # noqa: PTH123 - as it was given
        return text.read().splitlines()[int(number) - 1].strip()
