"""Ranks in the browser: a row for each, sorted and picked by run; in the panel as soon as the lab knows of them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import ortlab
from ortlab.lab.following import show_ranks
from ortlab.notebook.widgets.controls import close_tree
from ortlab.notebook.widgets.ranks_part import RanksPart, bundle_of
from ortlab.ranks.ledgers import RankLedger, Ranks
from ortlab.render import text


@pytest.fixture
def ranks(lab):
    """Two ranks with two runs, made of what this process has measured; rank 1 was slower in the second."""
    model = lab.module
    inputs = torch.randn(4, 8)
    lab.step(lambda: model(inputs).sum().backward(), n=2)
    run = lab.runs[-1]

    def made(number, exchange_ms, factor):
        steps = tuple(
            dataclasses.replace(one, exchange_ms=exchange_ms, forward_ms=factor * (1 + one.forward_ms))
            for one in run.steps
        )
        return dataclasses.replace(run, number=number, steps=steps)

    return Ranks(
        tuple(
            RankLedger(rank, 2, "here", 7, "gloo", (made(1, 0.0, 1), made(2, 0.0, 1 + 2 * rank)))
            for rank in range(2)
        )
    )


def tell(table, act, *values):
    """Do what the browser's script does."""
    table._handle_custom_msg({"do": act, "with": list(values)}, [])


def test_each_rank_is_a_row_and_a_run_can_be_picked(ranks):
    part = RanksPart(framed=True)
    assert part.layout.display == "none"
    part.show(ranks)
    assert part.layout.display is None
    rows = part.table.table["rows"]
    assert [row["cells"][0] for row in rows] == ["0", "1"]
    assert part.table.table["picker"]["value"] == "2"
    tell(part.table, "sort", "computing")
    assert [row["cells"][0] for row in part.table.table["rows"]] == ["1", "0"]
    tell(part.table, "pick", "1")
    assert part.ranks.shown == 1
    assert part.table.table["picker"]["value"] == "1"
    assert "1.00x" in part._notes.value
    part.show(None)
    assert part.layout.display == "none"
    close_tree(part)


def test_a_record_is_shown_in_a_table_of_its_own(ranks):
    bundle = bundle_of(ranks)
    assert set(bundle) == {"application/vnd.jupyter.widget-view+json"}
    assert bundle_of(Ranks((RankLedger(0, 2, "here", 7, "gloo", ()),))) == {}


def test_the_panel_shows_what_the_lab_is_told(lab, ranks):
    panel = ortlab.panel(lab)
    try:
        assert "Ranks" not in [name for name, _ in panel.tabs.bar.options]
        show_ranks(lab, ranks)
        assert panel.tabs.bar.options[-1][0] == "Ranks"
        assert panel.tabs.pages.children[-1] is panel.ranks
        assert len(panel.ranks.table.table["rows"]) == 2
        show_ranks(lab, ranks.of(1))
        assert panel.ranks.table.table["picker"]["value"] == "1"
        assert "Run 1 on 2 ranks" in text.render(panel.page())
    finally:
        show_ranks(lab, None)
        panel.close()
