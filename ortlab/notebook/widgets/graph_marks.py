"""The marks that nodes of a drawn graph have, and their words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

SIGNS: Final = {
    "added": "+",
    "removed": "\N{MINUS SIGN}",
    "moved": "\N{UP DOWN ARROW}",
    "changed": "~",
    "fused": "\N{CIRCLED PLUS}",
}
"""Signs of the marks that have a word, as `viewer/static/page.js` writes them."""

MARKED: Final = "#d6336c"
"""Colour of the nodes that `highlight` marks."""


def counted(marks: Iterable[str]) -> str:
    """Say how many nodes have marks of a known kind, and by which sign they are known."""
    counts = Counter(kind for kind in marks if kind in SIGNS)
    return ", ".join(f"{SIGNS[kind]} {count:,} {kind}" for kind, count in counts.most_common())
