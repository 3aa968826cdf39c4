"""Files that are damaged or no files, and names that no format expects: an error of ortlab's, or it works."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random

import pytest
import torch
from torch import nn

import ortlab
from ortlab.errors import BuildError, LedgerError, OptionError, OrtlabError
from ortlab.options.options import Options
from ortlab.ranks.balancing import balance
from ortlab.records.checks import Finding, SelfTest

JUNK = (
    *(None, 3, -1, 0, "x", "", [], {}, [1], {"a": 1}, True, 1e400, float("nan"), 10**30, 1.5, [[[]]], [None]),
    *("\x00\x1b", ["a", "b"], "2026-01-01"),
)
MUTATIONS = 250
"""For each of four records."""


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    folder = tmp_path_factory.mktemp("records")
    model = nn.Linear(4, 2)
    lab = ortlab.wrap(model)
    lab.step(lambda: model(torch.ones(3, 4)).sum().backward(), n=2)
    finding = Finding("models", "BERT", "held", "differs by 1e-7", 1e-7, 1e-5)
    selftest = SelfTest("cpu", {"torch": "2.13"}, "2026-01-01T00:00:00+00:00", {"models": 3.5}, (finding,))
    return {
        "balance": balance([3, 9, 4, 8] * 4, 2, ranks=2).save(folder / "balance.json"),
        "ledger": lab.runs.save(folder / "ledger.json"),
        "run": lab.runs[0].save(folder / "run.json"),
        "selftest": selftest.save(folder / "selftest.json"),
    }


def places(value, path=()):
    """Yield the way to each entry of a JSON value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def mutated(content, draw):
    content = copy.deepcopy(content)
    *path, last = draw.choice([path for path in places(content) if path])
    holder = content
    for key in path:
        holder = holder[key]
    kind = draw.random()
    if kind < 0.6:
        holder[last] = draw.choice(JUNK)
    elif kind < 0.8:
        del holder[last]
    elif isinstance(holder, dict):
        holder[draw.choice(("extra", "rank", "schema", "number", "record"))] = draw.choice(JUNK)
    else:
        holder.append(draw.choice(JUNK))
    return content


@pytest.mark.parametrize("name", ["balance", "ledger", "run", "selftest"])
def test_a_damaged_record_is_refused_or_can_be_shown(records, name, tmp_path):
    content = json.loads(records[name].read_text())
    draw, file = random.Random(18), tmp_path / "damaged.json"
    for _ in range(MUTATIONS):
        file.write_text(json.dumps(mutated(content, draw)))
        with contextlib.suppress(OrtlabError):
            record = ortlab.load(file)
            _ = repr(record), str(record), record._repr_mimebundle_()


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "[1]", '{"record": []}', '{"record": {"a": 1}}', "[[]]", '{"rank": 1}', "[null]"]
)
def test_what_is_no_record_is_refused(text, tmp_path):
    file = tmp_path / "record.json"
    file.write_text(text)
    with pytest.raises(LedgerError):
        ortlab.load(file)


def test_a_device_is_no_file(monkeypatch):
    with pytest.raises(LedgerError, match="no file"):
        ortlab.load("/dev/zero")
    monkeypatch.setenv("ORTMODULE_MEMORY_OPT_CONFIG", "/dev/zero")
    with pytest.raises(OptionError, match="no file"):
        Options.from_environment(os.environ)


class Flagged(nn.Module):
    """Calculates with Python's True and False."""

    def __init__(self, function) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.layer(x))


@pytest.mark.parametrize(
    "function",
    [
        lambda h: h * True,
        lambda h: True * h + False,
        lambda h: h / True,
        lambda h: h.clamp(False, True),
        lambda h: h.masked_fill(h > 0, True),
        lambda h: torch.where(h > 0, h, True),
    ],
)
def test_a_flag_may_be_a_factor(function):
    model = Flagged(function)
    plain, x = copy.deepcopy(model), torch.randn(5, 4)
    found, wanted = ortlab.wrap(model).module(x), plain(x)
    found.sum().backward()
    wanted.sum().backward()
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(model.layer.weight.grad, plain.layer.weight.grad)


def test_a_flag_where_none_can_be_is_refused_in_words():
    lab = ortlab.wrap(Flagged(lambda h: nn.functional.leaky_relu(h, True)))
    with pytest.raises(BuildError, match="gives True or False to aten::leaky_relu"):
        lab.module(torch.randn(5, 4))


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\nb", "a\x1b[31mb", "\x00", "naïve b"])
def test_a_module_may_have_any_name(name):
    model = nn.Sequential()
    model.add_module(name, nn.Sequential(nn.Linear(4, 4), nn.GELU()))
    lab = ortlab.wrap(model)
    lab.step(lambda: model(torch.ones(2, 4)).sum().backward(), n=1)
    for record in (lab.profile(), lab.flops(), lab.graph(), lab.activations()):
        shown = record._repr_mimebundle_()
        text = f"{record!r}{record}{shown['text/plain']}{shown.get('text/html', '')}"
        assert not {one for one in text if not one.isprintable()} - {"\n", "\N{NO-BREAK SPACE}"}
