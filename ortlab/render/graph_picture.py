"""A graph as a still picture: its modules from top to bottom, forward on the left, backward on the right.

The picture is SVG of our own and not a figure of matplotlib: it is the same in every environment, some ten kilobytes
small, and its labels are text. Its colours stand out from a light page and a dark one, because a saved notebook shows
it as an image, which cannot know the theme of the page around it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from html import escape
from typing import TYPE_CHECKING, Any, Final

from ortlab import units
from ortlab.graphs.outline import outline, parts_of

if TYPE_CHECKING:
    from ortlab.graphs.outline import Flow, Kept, Module, Outline, Side
    from ortlab.graphs.stages import Graph

FLOWS_DRAWN: Final = 120
"""Arrows that a picture has at most: those with most values; how many are left out is written under it."""

INK: Final = "#7a7a7a"
"""Grey of lines and of text outside the boxes: contrast 4.3 on white, 4.4 on JupyterLab's dark theme."""

FILLS: Final = {"forward": "#0b5c91", "backward": "#8a4b00"}
"""Colours of the boxes, for white text: contrast 7.0 and 7.1."""

KEPT: Final = "#1f9e77"
"""Colour of what is kept for backward."""

_KINDS: Final = {
    "added": "#2e9e4f",
    "removed": "#d9534f",
    "moved": "#8f6fd6",
    "changed": "#d08700",
    "fused": "#2f8fd0",
}
_WIDTH: Final = 900
_BOX: Final = 290
_LEFT: Final = 64  # room for arrows that pass boxes by
_HEIGHT: Final = 42
_PITCH: Final = 58
_TOP: Final = 34
_TITLE_LENGTH: Final = 31
_OPERATORS_LENGTH: Final = 42
_TOOLTIP_OPERATORS: Final = 12
_TOOLTIP_LENGTH: Final = 200


def picture(graph: Graph, *, marks: Mapping[str, str] | None = None) -> str:
    """Draw a graph as SVG: a box for each module, forward and backward, and arrows for what flows between them.

    `marks` has "added", "removed", "moved", "changed" or "fused" for names of nodes: each box says how many it has. The
    same graph gives the same text.
    """
    return _Picture(outline(graph), marks or {}).svg(_title(graph))


def description(graph: Graph) -> str:
    """Say what the picture shows, one sentence."""
    return f"{_title(graph)}, by modules: {units.count(graph.node_count)} nodes"


def tree(graph: Graph) -> str:
    """Write the modules as indented text, with the number of nodes and the operators of each."""
    return "\n".join(_indented(outline(graph).modules))


class _Picture:
    """Writes the elements of one picture."""

    def __init__(self, drawn: Outline, marks: Mapping[str, str]) -> None:
        self._drawn = drawn
        self._marks = marks
        self._parts: list[str] = []
        self._sides: dict[Side, int] = {"forward": _LEFT, "backward": _WIDTH - _LEFT - _BOX}

    def svg(self, title: str) -> str:
        rows = self._drawn.modules
        shown = sorted(self._drawn.flows, key=lambda flow: (-flow.values, flow.source, flow.target))[
            :FLOWS_DRAWN
        ]
        width = _WIDTH if self._drawn.has_backward else _LEFT + _BOX + 10
        left_out = len(self._drawn.flows) - len(shown)
        height = _TOP + _PITCH * len(rows) + (22 if left_out else 4)
        for name, x in self._sides.items():
            if name == "forward" or self._drawn.has_backward:
                self._text(x, 20, name if self._drawn.has_backward else "nodes by module", weight=600)
        if self._drawn.has_backward:
            self._text(_WIDTH // 2, 20, "kept for backward", anchor="middle", fill=KEPT, weight=600)
        for flow in sorted(shown, key=lambda flow: (flow.source, flow.target, flow.sides)):
            self._arrow(flow)
        for row, module in enumerate(rows):
            self._box(row, module, "forward")
            self._box(row, module, "backward")
        self._kept_labels()
        if left_out:
            self._text(_LEFT, height - 8, f"{units.count(left_out)} arrows of few values are not drawn.")
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" style="max-width: 100%; height: auto" font-family="system-ui, sans-serif" '
            f'font-size="12"><title>{_safe(title)}</title>{_HEADS}{"".join(self._parts)}</svg>'
        )

    def _box(self, row: int, module: Module, side: Side) -> None:
        nodes = module.forward if side == "forward" else module.backward
        if not nodes:
            return
        operators = module.forward_operators if side == "forward" else module.backward_operators
        x, y = self._sides[side], self._top(row)
        most = ", ".join(
            f"{_short(name.rpartition('.')[2], 24)} {count}" for name, count in operators.items()
        )
        self._parts.append(
            f'<g><title>{_safe(_tooltip(module, nodes, operators))}</title><rect x="{x}" y="{y}" width="{_BOX}" '
            f'height="{_HEIGHT}" rx="4" fill="{FILLS[side]}"/>'
        )
        words = self._mark_words(nodes) or (
            f"{units.count(module.recomputed)} recomputed" if side == "backward" and module.recomputed else ""
        )
        self._text(x + 10, y + 17, _short(module.title, _TITLE_LENGTH, at_end=True), fill="#fff", weight=600)
        self._text(x + _BOX - 10, y + 17, units.count(len(nodes)), fill="#fff", anchor="end")
        limit = max(0, _OPERATORS_LENGTH - len(words) - 2) if words else _OPERATORS_LENGTH
        self._text(x + 10, y + 33, _beginning(most, limit), fill="#fff", size=11)
        if words:
            self._text(x + _BOX - 10, y + 33, words, fill="#fff", anchor="end", size=11, weight=600)
        self._frame(x, y, nodes)
        self._parts.append("</g>")

    def _kinds(self, nodes: tuple[str, ...]) -> Counter[str]:
        return Counter(self._marks[name] for name in nodes if self._marks.get(name) in _KINDS)

    def _mark_words(self, nodes: tuple[str, ...]) -> str:
        kinds = sorted(self._kinds(nodes).items())
        return ", ".join(f"{units.count(count)} {kind}" for kind, count in kinds)

    def _frame(self, x: int, y: int, nodes: tuple[str, ...]) -> None:
        kinds = self._kinds(nodes)
        if kinds:
            colour = _KINDS[max(sorted(kinds), key=kinds.__getitem__)]
            self._parts.append(
                f'<rect x="{x}" y="{y}" width="{_BOX}" height="{_HEIGHT}" rx="4" fill="none" stroke="{colour}" '
                'stroke-width="4"/>'
            )

    def _arrow(self, flow: Flow) -> None:
        source, target = self._drawn.modules[flow.source].title, self._drawn.modules[flow.target].title
        said = f"{_fold(source)} to {_fold(target)}: {_amount(flow)}"
        if flow.is_kept:
            start, end = self._sides["forward"] + _BOX, self._sides["backward"] - 3
            path = _bow(start, self._middle(flow.source), end, self._middle(flow.target))
            width = min(4.0, 1 + flow.values / 8)
            style = f'stroke="{KEPT}" stroke-width="{width:.1f}" stroke-opacity=".75" marker-end="url(#ortlab-kept)"'
        elif flow.sides[0] == flow.sides[1]:
            path = self._along(flow)
            style = f'stroke="{INK}" stroke-width="1.3" stroke-opacity=".8" marker-end="url(#ortlab-flow)"'
        else:  # what a backward hands to a forward does not exist in a graph of one step
            return
        self._parts.append(f'<path d="{path}" fill="none" {style}><title>{_safe(said)}</title></path>')

    def _along(self, flow: Flow) -> str:
        """Lead an arrow from box to box of one side: straight to the next, round the boxes to any other."""
        side = flow.sides[0]
        x = self._sides[side]
        down = flow.target > flow.source
        if abs(flow.target - flow.source) == 1:
            middle = x + _BOX // 2 + (-8 if down == (side == "forward") else 8)  # both ways, side by side
            start = self._top(flow.source) + (_HEIGHT if down else 0)
            end = self._top(flow.target) + (-2 if down else _HEIGHT + 2)
            return f"M{middle} {start}V{end}"
        out = min(_LEFT - 8, 12 + 5 * abs(flow.target - flow.source))
        left = side == "forward"
        edge, bend = (x, x - out) if left else (x + _BOX, x + _BOX + out)
        tip = edge - 3 if left else edge + 3
        start, end = self._middle(flow.source) + 6, self._middle(flow.target) - 6
        return f"M{edge} {start}C{bend} {start} {bend} {end} {tip} {end}"

    def _kept_labels(self) -> None:
        for row, kept in sorted(self._drawn.kept.items()):
            x = self._sides["forward"] + _BOX + 8
            self._parts.append(
                f"<g><title>{_safe(_kept_words(self._drawn.modules[row].title, kept))}</title>"
            )
            size = f" ({units.size(kept.bytes)})" if kept.bytes and not kept.unknown else ""
            self._text(x, self._middle(row) - 5, f"{units.count(kept.count)}{size}", fill=KEPT)
            self._parts.append("</g>")

    def _text(
        self,
        x: int,
        y: int,
        words: str,
        *,
        fill: str = INK,
        anchor: str = "start",
        size: int = 12,
        weight: int = 400,
    ) -> None:
        style = "".join(
            f' {name}="{value}"'
            for name, value, usual in (
                ("text-anchor", anchor, "start"),
                ("font-size", size, 12),
                ("font-weight", weight, 400),
            )
            if value != usual
        )
        self._parts.append(f'<text x="{x}" y="{y}" fill="{fill}"{style}>{_safe(words)}</text>')

    def _top(self, row: int) -> int:
        return _TOP + _PITCH * row

    def _middle(self, row: int) -> int:
        return self._top(row) + _HEIGHT // 2


def _head(name: str, colour: str) -> str:
    return (
        f'<marker id="ortlab-{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0L8 4L0 8z" fill="{colour}"/></marker>'
    )


_HEADS: Final = f"<defs>{_head('flow', INK)}{_head('kept', KEPT)}</defs>"


def _bow(x1: int, y1: int, x2: int, y2: int) -> str:
    if y1 == y2:
        return f"M{x1} {y1}H{x2}"
    middle = (x1 + x2) // 2
    return f"M{x1} {y1}C{middle} {y1} {middle} {y2} {x2} {y2}"


def _title(graph: Graph) -> str:
    return f"Graph{f' of {_fold(graph.part)}' if graph.part else ''}: {graph.stage}"


def _tooltip(module: Module, nodes: tuple[str, ...], operators: Mapping[str, int]) -> str:
    shown = list(operators.items())[:_TOOLTIP_OPERATORS]
    more = len(operators) - len(shown)
    lines = [_fold(module.title), f"{units.count(len(nodes))} nodes"]
    lines += [f"{units.count(count)} {_fold(name)}" for name, count in shown]
    return "\n".join([*lines, f"and {units.count(more)} operators more"] if more else lines)


def _amount(flow: Flow) -> str:
    return units.many(flow.values, "value")


def _kept_words(title: str, kept: Kept) -> str:
    """Say what a module keeps for the backward."""
    noun = "buffer" if kept.are_buffers else "value"
    words = f"{_fold(title)} keeps {units.many(kept.count, noun)} for backward"
    if not kept.are_buffers:
        return words
    lower = "at least " if kept.unknown else ""
    return f"{words}: {lower}{units.size(kept.bytes)}"


def _indented(modules: Iterable[Module]) -> list[str]:
    """Write modules under their parents, each parent where its first module stands."""
    root: dict[str, Any] = {}
    lines = []
    for module in modules:
        level = root
        for part in parts_of(module.title):
            level = level.setdefault(part, {})
        level[""] = module
    waiting = [(0, name, level) for name, level in reversed(root.items())]
    while waiting:
        depth, name, level = waiting.pop()
        own = f": {_words(level[''])}" if "" in level else ""
        lines.append(f"{'  ' * depth}{_short(name, _TITLE_LENGTH)}{own}")
        waiting += [(depth + 1, inner, below) for inner, below in reversed(level.items()) if inner]
    return lines


def _words(module: Module) -> str:
    """Say how many nodes a module has, and of which operators."""
    parts = [f"{units.count(len(module.forward))} forward"] if module.forward else []
    if module.backward:
        parts.append(f"{units.count(len(module.backward))} backward")
    operators = Counter(module.forward_operators) + Counter(module.backward_operators)
    ordered = sorted(operators.items(), key=lambda item: (-item[1], item[0]))
    listed = ", ".join(f"{_short(name, 40)} {count}" for name, count in ordered)
    return f"{', '.join(parts)} ({_beginning(listed, 90)})"


def _short(text: str, limit: int, *, at_end: bool = False) -> str:
    """Shorten a name; the end of a module's path says more than its beginning."""
    text = units.printable(text)
    if len(text) <= limit:
        return text
    return f"…{text[len(text) - limit + 1 :]}" if at_end else units.fold(text, limit)


def _beginning(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1].rpartition(',')[0] or text[: limit - 1]}, …"


def _fold(text: str) -> str:
    return units.fold(units.printable(text), _TOOLTIP_LENGTH)


def _safe(text: str) -> str:
    """Escape a text for SVG, without characters that XML forbids."""
    return escape(
        "".join(char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in text)
    )
