from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

from ortlab.options.options import Options
from ortlab.records.runs import Ledger
from ortlab.render import html
from ortlab.render.page import Cell, Column, Folded, Mark, Note, Page, Table, row

VOID = {"br"}


class Outline(HTMLParser):
    """Collects tags, attributes and text, and fails on tags that do not nest."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words = ""
        self.feed(source)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def test_a_comparison_is_a_semantic_table(comparison):
    outline = Outline(html.render(comparison))
    assert outline.count("table") == 2  # the second, folded, has the runs in full
    assert outline.count("tr") == 2 * (1 + 4)
    heads = [attrs for name, attrs in outline.tags if name == "th"]
    assert [attrs["scope"] for attrs in heads].count("col") == 7 + 9
    assert [attrs["scope"] for attrs in heads].count("row") == 4 + 4
    assert "0.83x [0.83, 0.84]" in outline.words
    assert any("measured" in (attrs.get("title") or "") for attrs in heads)


def test_numbers_are_set_flush_right_and_nothing_else(new_run):
    source = html.fragment(Ledger([new_run(1)]))
    assert '<td class="ortlab-number">10.1 ms</td>' in source
    assert '<th scope="row"><span>#1 ort</span></th>' in source


def test_a_fallback_is_red_and_says_so_in_words(fallback_run, comparison):
    for record in (fallback_run, comparison, Ledger([fallback_run])):
        source = html.fragment(record)
        assert re.search(r'class="ortlab-bad">[^<]*PYTORCH \(fallback\)', source)


def test_hostile_text_stays_text(fallback_run):
    name = "<script>alert(1)</script>\"' onmouseover=alert(2) 🐍 &amp;"
    page = Page(
        name,
        (
            Table(name, (Column(name, meaning=name), Column("")), (row(name, name),), left_out=name),
            Note(name, Mark.BAD),
            Folded(name, name),
        ),
    )
    for source in (html.render(page), html.render(fallback_run)):
        outline = Outline(source)
        assert outline.count("script") == 0
        assert not any(attribute.startswith("on") for _, attrs in outline.tags for attribute in attrs)
    assert Outline(html.render(page)).words.count(name) == 9


def test_a_name_of_ten_thousand_characters_is_folded():
    table = Table("", (Column("name"),), (row("x" * 10_000),))
    assert len(html.table(table)) < 1000


def test_pages_need_no_script_no_network_and_stay_in_their_class(comparison):
    source = html.render(comparison)
    assert "<script" not in source

    assert "http" not in source
    assert "@import" not in source
    selectors = re.findall(r"^([^{}\n]+)\{", html.STYLE, re.MULTILINE)
    assert selectors
    assert all(part.strip().startswith(".ortlab") for line in selectors for part in line.split(","))


def test_a_table_that_sorts_brings_one_script_with_nothing_of_the_record_in_it():
    name = "</script><script>alert(1)</script>"
    rows = tuple((Cell(f"{name} {number}"), Cell(str(number))) for number in range(3))
    plain = Table(name, (Column("name"), Column("number")), rows)
    sorts = replace(plain, sorts=True)
    whole = html.table(sorts)
    assert whole.count("<script>") == 1
    assert html.SORT_SCRIPT in whole
    assert "alert" not in html.SORT_SCRIPT
    bare = whole.replace(html.SORT_SCRIPT, "").replace(f" {html.SORTS}", "").strip()
    assert bare == html.table(plain).strip()  # without the script it is the table that it would be


def test_options_show_every_switch_once():
    outline = Outline(html.render(Options()))
    assert outline.count("table") == 5
    assert outline.words.count("memory_level") == 1


def test_text_and_html_say_the_same(comparison):
    from ortlab.render import text

    words = " ".join(Outline(html.render(comparison)).words.split())
    for line in text.render(comparison).splitlines():
        for cell in re.split(r"\s{2,}", line.strip("! ")):
            if cell and not set(cell) <= {"-", " "}:
                assert cell in words
