"""The record of many ranks: files of a training come together, what is missing or uneven is said, figures add up."""

from __future__ import annotations

import dataclasses
import json

import pytest

import ortlab
from ortlab.errors import LedgerError
from ortlab.lab.following import observe, show_ranks, shown_ranks
from ortlab.options.options import Options
from ortlab.ranks.ledgers import RankLedger, Ranks, save_rank
from ortlab.records.density import EMBED, LABEL, Density, DensityRow
from ortlab.records.runs import PeakMemory, Run, Step
from ortlab.render import html, text

MIB = 1 << 20


def make_run(number=1, *, forward_ms=20.0, exchange_ms=5.0, steps=3, **rest):
    """Make a run whose steps take `forward_ms`, 30 ms of backward with the exchange in it, and 10 ms of optimizer."""
    step = Step(
        total_ms=70.0,
        forward_ms=forward_ms,
        backward_ms=30.0,
        optimizer_ms=10.0,
        initialization_ms=0.0,
        loss=2.5,
        executed_by="ort",
        exchange_ms=exchange_ms,
    )
    values = {
        "number": number,
        "engine": "ort",
        "options": Options(),
        "steps": (step,) * steps,
        "initialization": None,
        "memory": PeakMemory(500 * MIB, 600 * MIB, "resident set"),
        "fallback_reason": "",
        "device": "cpu",
        "start_digest": "a" * 64,
        "data_digest": "b" * 64,
        "seed": 7,
        "started_at": "2025-01-01T10:00:00+00:00",
    }
    return Run(**{**values, **rest})


def ledger(rank, *runs, ranks=2, host="here"):
    return RankLedger(rank, ranks, host, 100 + rank, "gloo", runs or (make_run(),))


@pytest.fixture
def ranks():
    """Rank 0 computes 20 + 25 + 10 = 55 ms in a step; rank 1 10 + 25 + 10 = 45 ms."""
    return Ranks((ledger(1, make_run(forward_ms=10.0)), ledger(0)))


def test_figures_of_ranks_add_up(ranks):
    assert [one.rank for one in ranks.rows()] == [0, 1]
    assert [one.computing_ms for one in ranks.rows()] == [55.0, 45.0]
    assert [one.exchange_ms for one in ranks.rows()] == [5.0, 5.0]
    assert ranks.spread() == pytest.approx(55 / 50)
    table = ranks.table()
    assert table["computing [ms]"].tolist() == [55.0, 45.0]
    assert table["peak [bytes]"].tolist() == [600 * MIB] * 2
    page = text.render(ranks)
    assert "Run 1 on 2 ranks" in page
    assert "the slowest rank computes 1.10x as long as the mean" in page
    assert "1.10x" in html.render(ranks)
    assert not ranks.cautions()
    left, right = ortlab.plot(ranks).axes
    assert len(left.patches) == 2 * 5
    assert sum(bar.get_width() for bar in left.patches) == pytest.approx(2 * 70)
    assert [bar.get_width() for bar in right.patches] == [600, 600]


def test_files_come_together_and_a_missing_one_is_said(ranks, tmp_path):
    folder = ranks.save(tmp_path / "ledgers")
    names = ["rank-00000-of-00002.json", "rank-00001-of-00002.json"]
    assert sorted(one.name for one in folder.iterdir()) == names
    assert ortlab.load(folder) == ranks
    assert Ranks.load([folder / name for name in reversed(names)]) == ranks
    (folder / names[0]).unlink()
    alone = Ranks.load(folder)
    assert alone.missing == (0,)
    assert alone.spread() is None
    assert "No ledger of rank 0: it died, or has not saved it." in text.render(alone)


def test_what_cannot_be_told_apart_is_left_out():
    unknown = Ranks(tuple(ledger(rank, make_run(exchange_ms=None)) for rank in range(2)))
    assert unknown.spread() is None
    assert [one.computing_ms for one in unknown.rows()] == [None, None]
    page = " ".join(text.render(unknown).split())
    assert "slowest" not in page
    assert "Tokens are counted with print_input_density=True." in page
    counting = make_run(options=Options(print_input_density=True))
    page = " ".join(text.render(Ranks((ledger(0, counting), ledger(1, counting)))).split())
    assert "No tokens were counted: no embedding of the model has a padding index." in page
    assert len(ortlab.plot(unknown).axes) == 2


def test_runs_that_not_all_ranks_have_are_not_set_side_by_side():
    uneven = Ranks((ledger(0, make_run(1), make_run(2)), ledger(1, make_run(1))))
    assert (uneven.numbers, uneven.shown) == ((1,), 1)
    assert "different numbers of runs" in text.render(uneven)
    with pytest.raises(LedgerError, match=r"no run 2 on all ranks.\n.*: 1\."):
        uneven.of(2)
    nothing = Ranks((RankLedger(0, 2, "here", 1, "gloo", ()), ledger(1)))
    assert nothing.shown == 0
    assert "no run in common" in text.render(nothing)
    assert len(ortlab.plot(nothing).axes) == 2
    several = Ranks(tuple(ledger(rank, make_run(1), make_run(2)) for rank in range(2)))
    assert several.shown == 2
    assert several.of(1).rows()[0].run.number == 1


def test_what_makes_ranks_unlike_is_said():
    fallen = make_run(fallback_reason="no kernel")
    fallen = dataclasses.replace(
        fallen, steps=tuple(dataclasses.replace(one, executed_by="fallback") for one in fallen.steps[:2])
    )
    page = text.render(Ranks((ledger(0), ledger(1, fallen))))
    assert "Rank 1 fell back to PyTorch: no kernel" in page
    assert "not all" in page.lower()
    assert "different numbers of steps" in page
    assert "PYTORCH (fallback)" in page
    switched = Ranks((ledger(0), ledger(1, make_run(options=Options(memory_level=1)))))
    assert "different switches" in text.render(switched)


@pytest.mark.parametrize(
    ("hosts", "names"),
    [
        (("node-1.example.org", "node-2.example.org"), ("node-1", "node-2")),
        (("node.one.example.org", "node.two.example.org"), ("node.one.example.org", "node.two.example.org")),
        (("10.0.0.1", "11.0.0.1"), ("10.0.0.1", "11.0.0.1")),
    ],
)
def test_ranks_on_several_machines_say_which(hosts, names):
    apart = Ranks(tuple(ledger(rank, host=host) for rank, host in enumerate(hosts)))
    page = " ".join(text.render(apart).split())
    assert "machine" in page
    for name in names:
        assert f"{name}: cpu" in page
    assert f"Times: measured on {', '.join(names)}: cpu." in page
    assert "machine" not in text.render(Ranks((ledger(0), ledger(1))))


def test_tokens_of_a_tensor_that_is_passed_twice_count_once():
    def row(step, kind, name, valid):
        return DensityRow(step, kind, name, 0, valid, 64, (valid,))

    causal = [row(1, EMBED, "input_ids", 50), row(1, EMBED, "labels", 50)]
    causal += [row(1, LABEL, "input_ids", 50), row(1, LABEL, "labels", 50)]
    both = [
        row(2, EMBED, "input_ids", 20),
        row(2, EMBED, "decoder_input_ids", 20),
        row(2, LABEL, "labels", 20),
    ]
    run = make_run(density=Density((*causal, *both)))
    record = Ranks((ledger(0, run), ledger(1, run)))
    assert [one.tokens for one in record.rows()] == [90, 90]


def test_ledgers_that_do_not_belong_together_are_refused(tmp_path):
    with pytest.raises(LedgerError, match="There is no ledger"):
        Ranks(())
    with pytest.raises(LedgerError, match=r"different trainings(.|\n)*2 and 3 ranks"):
        Ranks((ledger(0), ledger(1, ranks=3)))
    with pytest.raises(LedgerError, match="of the same rank"):
        Ranks((ledger(0), ledger(0)))
    with pytest.raises(LedgerError, match="has no ledger of a rank"):
        Ranks.load(tmp_path)
    with pytest.raises(LedgerError, match="cannot be read"):
        Ranks.load(tmp_path / "nowhere.json")
    (tmp_path / "rank-00000-of-00001.json").write_text("[]", encoding="utf-8")
    with pytest.raises(LedgerError, match="no ledger of a rank"):
        Ranks.load(tmp_path)
    record = ledger(0, ranks=1).to_dict()
    for wrong, words in (
        ({**record, "schema": 9}, "layout 9"),
        ({**record, "colour": 1}, "colour"),
        ({**record, "ranks": 10**12}, "rank is 0 of 10"),
        ({**record, "rank": 7}, "rank is 7 of 1"),
        ({**record, "runs": [{"schema": 1, "number": "x"}]}, "cannot be read"),
    ):
        (tmp_path / "rank-00000-of-00001.json").write_text(json.dumps(wrong), encoding="utf-8")
        with pytest.raises(LedgerError, match=words):
            Ranks.load(tmp_path)


def test_a_lab_by_itself_writes_the_ledger_of_the_only_rank(lab, experiment, tmp_path):
    lab.step(experiment.step, n=2)
    path = save_rank(lab.runs, tmp_path / "new" / "folder")
    assert path.name == "rank-00000-of-00001.json"
    alone = Ranks.load(path.parent)
    assert (alone.ranks, alone.missing, alone.spread()) == (1, (), None)
    (only,) = alone.rows()
    assert only.run == lab.runs[-1]
    assert only.exchange_ms is None
    told = []
    observe(lab, told.append)
    show_ranks(lab, alone)
    assert shown_ranks(lab) is alone
    assert told == ["runs"]


@pytest.mark.parametrize("names", [("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")])
def test_a_rank_without_a_process_group_is_known_by_its_launcher(monkeypatch, names):
    from ortlab.ranks.ledgers import rank_ledger

    for name, value in zip(names, ("3", "8"), strict=True):
        monkeypatch.setenv(name, value)
    found = rank_ledger(())
    assert (found.rank, found.ranks, found.backend) == (3, 8, "")
