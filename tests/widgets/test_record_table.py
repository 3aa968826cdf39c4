"""The table that widgets share: what it sends to the browser, and what it does with what comes back."""

from __future__ import annotations

import gc
import json
from dataclasses import dataclass

import pytest
from ipywidgets.widgets.widget import _instances as open_widgets

from ortlab.notebook.widgets.controls import close_tree
from ortlab.notebook.widgets.record_table import PAGE, Column, Content, Intents, Look, RecordTable


@dataclass(frozen=True)
class Fruit:
    name: str
    grams: float | None


COLUMNS = [
    Column("fruit", lambda one: one.name, lambda one: one.name),
    Column("weight", lambda one: one.grams, lambda one: f"{one.grams} g", numeric=True, meaning="of one"),
]

FRUIT = [Fruit("plum", 30.0), Fruit("Apple", 150.0), Fruit("<b>kiwi</b>", None), Fruit("banana", 120.0)]


def content(records, **more) -> Content[Fruit]:
    return Content(
        records, COLUMNS, lambda one: one.name, lambda one: Look(one.name), ("fruit", "fruits"), **more
    )


@pytest.fixture
def asked():
    return []


@pytest.fixture
def table(asked):
    intents = Intents(
        tick=lambda *values: asked.append(("tick", *values)),
        count=lambda *values: asked.append(("count", *values)),
        choose=lambda *values: asked.append(("choose", *values)),
        slide=lambda *values: asked.append(("slide", *values)),
        pick=lambda *values: asked.append(("pick", *values)),
    )
    table = RecordTable("Fruit", intents)
    table.show(content(FRUIT))
    yield table
    close_tree(table)


def shown(table) -> list[str]:
    return [row["cells"][0] for row in table.table["rows"]]


def tell(table, act, *values):
    """Do what the browser's script does."""
    table._handle_custom_msg({"do": act, "with": list(values)}, [])


def test_the_order_is_that_of_the_record_until_a_heading_is_pressed(table):
    assert shown(table) == ["plum", "Apple", "<b>kiwi</b>", "banana"]
    tell(table, "sort", "weight")  # numbers: the largest first, what has none last
    assert shown(table) == ["Apple", "banana", "plum", "<b>kiwi</b>"]
    assert table.table["sorted"] == {"name": "weight", "descending": True}
    tell(table, "sort", "weight")
    assert shown(table) == ["plum", "banana", "Apple", "<b>kiwi</b>"]
    tell(table, "sort", "fruit")  # words: from a to z, in any case
    assert shown(table) == ["<b>kiwi</b>", "Apple", "banana", "plum"]
    tell(table, "sort", "no such column")
    assert shown(table) == ["<b>kiwi</b>", "Apple", "banana", "plum"]


def test_the_filter_wants_all_words_in_any_case(table):
    tell(table, "filter", "AN ba")
    assert shown(table) == ["banana"]
    assert table.table["found"] == "1 of 4 fruits"
    tell(table, "filter", "pear")
    assert shown(table) == []
    tell(table, "filter", "")
    assert table.table["found"] == "4 fruits"


def test_ten_thousand_rows_go_to_the_browser_a_page_at_a_time(table):
    table.show(content([Fruit(f"fruit {number}", float(number)) for number in range(10_000)]))
    assert len(shown(table)) == PAGE
    assert table.table["found"] == "1 to 50 of 10,000 fruits"
    assert len(json.dumps(table.table)) < 20_000
    tell(table, "turn", 1)
    assert table.table["found"] == "51 to 100 of 10,000 fruits"
    assert table.table["pages"] == {"earlier": True, "later": True}
    tell(table, "sort", "weight")
    assert shown(table)[0] == "fruit 9999"  # a new order begins at its first page
    tell(table, "turn", -5)
    assert not table.table["pages"]["earlier"]
    tell(table, "turn", 10_000)
    assert shown(table)[-1] == "fruit 0"
    assert not table.table["pages"]["later"]
    tell(table, "filter", "fruit 99")
    fitting = sum("99" in str(number) for number in range(10_000))
    assert table.table["found"] == f"1 to 50 of {fitting} fruits that fit; 10,000 in all"


def test_intents_are_passed_on_and_the_table_is_drawn_again_even_if_nothing_changed(table, asked):
    before = table.table["drawn"]
    tell(table, "tick", "plum", True)
    tell(table, "count", "plum", 3)
    tell(table, "choose", "plum")
    tell(table, "slide", "batch", 8)
    tell(table, "pick", "layer")
    assert asked == [
        ("tick", "plum", True),
        ("count", "plum", 3),
        ("choose", "plum"),
        ("slide", "batch", 8),
        ("pick", "layer"),
    ]
    assert table.table["drawn"] == before + 5


def test_a_slide_is_answered_after_its_table(table, monkeypatch):
    sent = []
    monkeypatch.setattr(table, "send", lambda message: sent.append((message, table.table["drawn"])))
    before = table.table["drawn"]
    tell(table, "slide", "batch", 8)  # without a mark: nobody waits for an answer
    table._handle_custom_msg({"do": "slide", "with": ["batch", 9], "asked": "k3"}, [])
    assert sent == [({"answered": "k3"}, before + 2)]


def test_order_and_filter_outlive_new_content(table):
    tell(table, "sort", "weight")
    tell(table, "filter", "p")
    table.show(content([Fruit("pear", 170.0), Fruit("fig", 20.0), Fruit("papaya", 900.0)]))
    assert shown(table) == ["papaya", "pear"]


def test_a_closed_table_is_forgotten():
    gc.collect()
    before = set(open_widgets)
    tables = [RecordTable("Fruit", Intents()) for _ in range(3)]
    for one in tables:
        one.show(content(FRUIT))
        close_tree(one)
    assert set(open_widgets) == before
    kinds = {type(one) for one in tables}
    del tables, one
    gc.collect()
    alive = [held for held in gc.get_objects() if isinstance(held, RecordTable) and type(held) in kinds]
    assert alive == []


def test_the_repr_has_no_address(table):
    assert repr(table) == "RecordTable('Fruit')"
