"""A graph as a still picture: the map of `graph_map.py` as it is when it opens, forward, what is kept, backward.

The picture is SVG of our own and not a figure of matplotlib: it is the same in every environment, some ten kilobytes
small, and its labels are text. Its colours stand out from a light page and a dark one, because a saved notebook shows
it as an image, which cannot know the theme of the page around it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, Final, Literal

from ortlab import units
from ortlab.render.graph_map import COLOURS, OWN

if TYPE_CHECKING:
    from ortlab.graphs.stages import Graph

ROWS: Final = 24
"""Rows that are opened at most; more are drawn where the outermost modules are more."""

DRAWN: Final = 40
"""Rows that are drawn at most; how many are left out is written under them."""

INK: Final = "#7a7a7a"
"""Grey of text: contrast 4.3 on white, 4.4 on JupyterLab's dark theme."""

KEPT: Final = "#1b9e77"
"""Colour of what is kept for backward."""

_ROW: Final = 22
_TOP: Final = 30
_WIDTH: Final = 900
_ONE_SIDE: Final = 470
_BAR: Final = 160
_NUMBERS: Final = 284  # right end of what stands before the forward's bars
_FORWARD: Final = 290 + _BAR  # right end of the forward's bars
_KEPT_WORDS: Final = _FORWARD + 6
_BANDS: Final = (_FORWARD + 72, _WIDTH - _BAR - 74)
_TITLE: Final = 38
_THICK: Final = 0.86  # of a row's height: what the row with most bytes takes

_Side = Literal["f", "b"]


def picture(drawn: Mapping[str, Any], title: str) -> str:
    """Draw what `graph_map` returned as SVG: a row for each module, bands for what is kept, a legend."""
    # What is marked gives the bars their colours; without marks the kinds of operators do.
    return _Picture(drawn).svg(title)


def description(graph: Graph) -> str:
    """Say what the picture shows, one sentence."""
    part = f" of {units.fold(units.printable(graph.part), 200)}" if graph.part else ""
    return f"Graph{part}: {graph.stage}, by modules: {units.count(graph.node_count)} nodes"


def tree(drawn: Mapping[str, Any]) -> str:
    """Write the rows of the picture as indented text, with the number of nodes and the operators of each."""
    rows = drawn["rows"]
    shown, left_out = _shown(rows)
    lines = [_line(rows[at]) for at in shown]
    return "\n".join([*lines, f"and {units.count(left_out)} more"] if left_out else lines)


def opened(rows: Sequence[Mapping[str, Any]], room: int = ROWS) -> list[int]:
    """Return the rows that are seen if what has most nodes is opened first, as long as all rows fit."""
    # What is the same in each layer is opened in all or in none; single operators stay folded. So does `graph_map.js`.
    inner: dict[int, list[int]] = defaultdict(list)
    for at, row in enumerate(rows):
        inner[row["p"]].append(at)
    offered: dict[str, list[int]] = defaultdict(list)  # what opens together

    def offer(found: Sequence[int]) -> None:
        for at in found:
            if any(inner[one] for one in inner[at]):
                path = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", rows[at]["facts"][0][1])
                offered[f"{path} {rows[at]['t'] == OWN}"].append(at)

    def nodes(group: Sequence[int]) -> int:
        return sum(sum(rows[at][side]["k"].values()) for at in group for side in ("f", "b"))

    seen = list(inner[-1])
    offer(seen)
    while offered:
        group = offered.pop(max(offered, key=lambda name: nodes(offered[name])))
        below = [one for at in group for one in inner[at]]
        if len(seen) + len(below) <= room:
            seen += below
            offer(below)
    return sorted(seen)


def _shown(rows: Sequence[Mapping[str, Any]]) -> tuple[list[int], int]:
    """Return the rows that are drawn, and how many that belong there are left out."""
    seen = opened(rows)
    return seen[:DRAWN], max(0, len(seen) - DRAWN)


class _Picture:
    """Writes the elements of one picture."""

    def __init__(self, drawn: Mapping[str, Any]) -> None:
        self._drawn = drawn
        self._rows = drawn["rows"]
        self._shown, self._left_out = _shown(self._rows)
        self._closed = set(self._shown) - {self._rows[at]["p"] for at in self._shown}
        self._marks = bool(drawn["marks"])
        self._what: Literal["m", "k"] = "m" if self._marks else "k"
        self._parts: list[str] = []

    def svg(self, title: str) -> str:
        both = self._drawn["backward"]
        width = _WIDTH if both else _ONE_SIDE
        self._text(_FORWARD, 18, "forward" if both else "nodes", anchor="end", weight=600)
        if both:
            self._text(sum(_BANDS) // 2, 18, "kept for backward", anchor="middle", fill=KEPT, weight=600)
            self._text(_BANDS[1] + 6, 18, "backward", weight=600)
            self._bands()
        most = max((self._amount(at, side) for at in self._closed for side in ("f", "b")), default=0)
        for place, at in enumerate(self._shown):
            self._row(_TOP + _ROW * place, at, most)
        height = self._legend(_TOP + _ROW * len(self._shown) + 20, width)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" style="max-width: 100%; height: auto" font-family="system-ui, sans-serif" '
            f'font-size="12"><title>{_safe(title)}</title>{_HATCH}{"".join(self._parts)}</svg>'
        )

    def _amount(self, at: int, side: _Side) -> int:
        return sum(self._rows[at][side][self._what].values())

    def _row(self, y: int, at: int, most: int) -> None:
        row = self._rows[at]
        limit = _TITLE - 2 * row["d"]
        self._text(
            4 + 12 * row["d"], y + 15, units.fold(row["t"], limit), weight=400 if at in self._closed else 600
        )
        if at not in self._closed:
            return
        words = "difference" if self._marks else "operator"
        self._text(_NUMBERS, y + 15, row["f"]["w"][words], anchor="end")
        self._bar(y, _FORWARD, row["f"], most, -1)
        if self._drawn["backward"]:
            self._text(_KEPT_WORDS, y + 15, row["f"]["w"]["bytes"], fill=KEPT, size=11)
            self._bar(y, _BANDS[1] + 6, row["b"], most, 1)
            self._text(_BANDS[1] + 12 + _BAR, y + 15, row["b"]["w"][words])

    def _bar(self, y: int, start: float, side: Mapping[str, Any], most: int, way: Literal[-1, 1]) -> None:
        """Draw the parts of one side, away from the middle."""
        whole = sum(side[self._what].values())
        if not whole:
            return
        width = max(1.5, _BAR * whole / most)
        x = start if way > 0 else start - width
        for name, count in side[self._what].items():
            part = width * count / whole
            self._rect(x, y, part, COLOURS[name])
            x += part
        if side["r"] and not self._marks:
            self._rect(start, y, width * side["r"] / whole, "url(#ortlab-again)")

    def _rect(self, x: float, y: int, width: float, fill: str) -> None:
        self._parts.append(f'<rect x="{x:.1f}" y="{y + 3}" width="{width:.1f}" height="16" fill="{fill}"/>')

    def _bands(self) -> None:
        """Draw what is kept from where it is made to where it is read last, as wide as its bytes."""
        flows: dict[tuple[int, int], float] = defaultdict(float)
        for maker, reader, size in self._drawn["kept"]:
            ends = self._place(maker), self._place(reader)
            if None not in ends:
                flows[ends] += size if self._drawn["sized"] else 1  # type: ignore[index]
        sums: tuple[dict[int, float], dict[int, float]] = (defaultdict(float), defaultdict(float))
        for ends, size in flows.items():
            for end, total in zip(ends, sums, strict=True):
                total[end] += size
        largest = max((size for total in sums for size in total.values()), default=0) or 1
        scale = _ROW * _THICK / largest
        at = [
            {end: _TOP + _ROW * (end + 0.5) - size * scale / 2 for end, size in total.items()}
            for total in sums
        ]
        (left, right), middle = _BANDS, sum(_BANDS) / 2
        for ends, size in sorted(flows.items()):
            ys = []
            for end, heights in zip(ends, at, strict=True):
                ys.append(heights[end] + size * scale / 2)
                heights[end] += size * scale
            self._parts.append(
                f'<path d="M{left} {ys[0]:.1f}C{middle:.0f} {ys[0]:.1f} {middle:.0f} {ys[1]:.1f} {right} {ys[1]:.1f}" '
                f'fill="none" stroke="{KEPT}" stroke-opacity=".5" stroke-width="{max(0.75, size * scale):.1f}"/>'
            )

    def _place(self, at: int) -> int | None:
        """Return which of the drawn rows an operation is in; None if its row is left out."""
        while at >= 0 and at not in self._closed:
            at = self._rows[at]["p"]
        return self._shown.index(at) if at >= 0 else None

    def _legend(self, y: int, width: int) -> int:
        """Write what the colours are under the rows, and return the height of all."""
        named = self._drawn["marks" if self._marks else "kinds"]
        entries = [(COLOURS[key], f"{words} {key}" if self._marks else words) for key, words in named.items()]
        if not self._marks and any(row["b"]["r"] for row in self._rows):
            entries.append(("url(#ortlab-again)", "recomputed"))
        if self._drawn["kept"]:
            unit = "its bytes" if self._drawn["sized"] else "the number of values"
            entries.append((KEPT, f"kept: as wide as {unit}"))
        x = 0.0
        for fill, words in entries:
            if x and x + 28 + 6.4 * len(words) > width:
                x, y = 0.0, y + 18
            self._rect(x + 4, y - 15, 11, fill)
            self._text(x + 20, y, words, size=11)
            x += 34 + 6.2 * len(words)
        if self._left_out:
            y += 18
            self._text(4, y, f"{units.count(self._left_out)} more modules are not drawn.", size=11)
        return y + 10

    def _text(
        self,
        x: float,
        y: int,
        words: str,
        *,
        fill: str = INK,
        anchor: str = "start",
        size: int = 12,
        weight: int = 400,
    ) -> None:
        if not words:
            return
        style = "".join(
            f' {name}="{value}"'
            for name, value, usual in (
                ("text-anchor", anchor, "start"),
                ("font-size", size, 12),
                ("font-weight", weight, 400),
            )
            if value != usual
        )
        self._parts.append(f'<text x="{x:.0f}" y="{y}" fill="{fill}"{style}>{_safe(words)}</text>')


_HATCH: Final = (
    '<defs><pattern id="ortlab-again" width="5" height="5" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="2" height="5" fill="#000" fill-opacity=".6"/>'
    '<rect x="2" width="3" height="5" fill="#fff" fill-opacity=".6"/></pattern></defs>'
)
"""What is recomputed, over the colour of its kind."""


def _line(row: Mapping[str, Any]) -> str:
    """Write one row of the tree: "  attention: 24 forward, 60 backward (2 FusedMatMul, Softmax)"."""
    sides = [
        f"{row[side]['w']['operator']} {name}"
        for side, name in (("f", "forward"), ("b", "backward"))
        if row[side]["w"]["operator"]
    ]
    operators = dict(row["facts"]).get("operators", "")
    listed = f" ({operators})" if operators else ""
    return f"{'  ' * row['d']}{row['t']}: {', '.join(sides)}{listed}"


def _safe(text: str) -> str:
    """Escape a text for SVG, without characters that XML forbids."""
    return escape(
        "".join(char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in text)
    )
