"""Draw the figures of the manual: concepts, and measured memory against time.

    python docs/drawings.py        # writes docs/images/*.svg

Everything in them comes from somewhere: the switches from their declarations, the points from `bench/results`, the
curves from the rule that the text beside them states, the rooms from the package and the manual's table of them.
`tests/docs/test_manual.py` says when a file is not what this script draws. They have a ground of their own, and follow
the reader's light or dark setting.
"""

from __future__ import annotations

import ast
import json
import math
import re
import sys
import textwrap
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from ortlab.options.catalogue import switches  # noqa: E402 - the checkout's
from ortlab.options.switches import Effect  # noqa: E402

IMAGES = HERE / "images"
RESULTS = HERE.parent / "bench" / "results"

_STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328 }
.ground { fill: #ffffff } .box { fill: #f2f4f7; stroke: #8a929c } .line { fill: none; stroke: #57606a }
.head { font-weight: 600 } .small { font-size: 11px }
.code { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: 11px }
.quiet { fill: #57606a } .grid { stroke: #d5d9de }
.ort { fill: #0b6bcb; stroke: #0b6bcb }
.torch { fill: #b3461c; stroke: #b3461c }
.other { fill: #6a737d; stroke: #6a737d }
.kept { fill: #0b6bcb; fill-opacity: .22; stroke: #0b6bcb }
.again { fill: none; stroke: #0b6bcb; stroke-dasharray: 4 3 }
.hollow { fill: #ffffff } .stroke { fill: none; stroke-width: 2 } text.ort, text.torch, text.other { stroke: none }
@media (prefers-color-scheme: dark) {
text { fill: #e6e8eb } .ground { fill: #16191d }
.box { fill: #242930; stroke: #7d8590 } .line { stroke: #a2a9b1 }
.quiet { fill: #a2a9b1 } .grid { stroke: #383e46 }
.ort { fill: #63b1ff; stroke: #63b1ff }
.torch { fill: #ff9b6b; stroke: #ff9b6b } .other { fill: #a2a9b1; stroke: #a2a9b1 }
.kept { fill: #63b1ff; stroke: #63b1ff } .again { stroke: #63b1ff }
.hollow { fill: #16191d } .stroke { fill: none } text.ort, text.torch, text.other { stroke: none } }
"""

Point = tuple[float, float]


class Drawing:
    """Shapes and words on a ground, in pixels from the top left."""

    def __init__(self, width: int, height: int, says: str) -> None:
        says, size = escape(says), f'width="{width}" height="{height}"'
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {size} role="img">',
            f"<title>{says}</title><style>{_STYLE}</style>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"',
            'orient="auto">',
            '<path d="M0 0L8 4L0 8z" class="other"/></marker></defs>',
            f'<rect {size} rx="8" class="ground"/>',
        ]

    def box(self, x: float, y: float, width: float, height: float, kind: str = "box") -> None:
        """Draw a rectangle."""
        place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{min(4, width / 6):.1f}"'
        self._parts.append(f'<rect {place} class="{kind}"/>')

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        """Write a line."""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'
        )

    def lines(self, x: float, y: float, words: Sequence[str], kind: str = "small", step: float = 15) -> None:
        """Write lines under one another."""
        for number, line in enumerate(words):
            self.text(x, y + number * step, line, kind)

    def path(self, points: Sequence[Point], kind: str = "line", *, tip: bool = False) -> None:
        """Join points; `tip` ends the line in an arrow."""
        way = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        end = ' marker-end="url(#tip)"' if tip else ""
        self._parts.append(f'<path d="{way}" class="{kind}"{end}/>')

    def dot(self, x: float, y: float, kind: str, *, shape: str = "circle") -> None:
        """Mark a point."""
        if shape == "circle":
            self._parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" class="{kind}"/>')
        elif shape == "square":
            self.box(round(x - 4.5, 1), round(y - 4.5, 1), 9, 9, kind)
        else:
            self.path([(x, y - 6), (x + 6, y), (x, y + 6), (x - 6, y), (x, y - 6)], kind)

    def __str__(self) -> str:
        """Write it as SVG."""
        return "\n".join([*self._parts, "</svg>\n"])


def measured() -> dict[str, Any]:
    """Return what `bench/memory_engines.py` has measured."""
    read: dict[str, Any] = json.loads((RESULTS / "memory_engines.json").read_text(encoding="utf-8"))
    return read


_SHORT = {
    "eager": ("PyTorch", "torch", "square"),
    "checkpoint": ("checkpointed layers", "torch", "diamond"),
    "compile": ("torch.compile", "other", "square"),
    "compile:0.5": ("torch.compile, budget 0.5", "other", "diamond"),
}


_WIDEST = 1.25
"""The most memory that is drawn, as a share of PyTorch's."""


def memory_time() -> Drawing:
    """Draw step memory against the time of a step, as shares of PyTorch's, for three models."""
    found = measured()
    machine = found["machine"]
    threads, drawn = machine["threads"], ("BERT", "GPT-2", "Llama")
    runs = [row for row in found["tables"]["When each was measured"] if row["model"] in drawn]
    when = " and ".join(sorted({row["date"] for row in runs}))
    busy = "; other programs ran beside it" * any(row["load before"] > machine["cores"] for row in runs)
    drawing = Drawing(
        900, 372, "Step memory against the time of a step, as shares of PyTorch's, measured for three models"
    )
    drawing.text(20, 26, "Less memory is further left, less time is further down; PyTorch is 100 %.", "head")
    wide, high, top = 250, 220, 66
    models = {
        family: {row["configuration"]: row for row in found["tables"][f"{family}, all in the same rounds"]}
        for family in drawn
    }
    times = [
        row["step [ms]"] / rows["eager"]["step [ms]"] for rows in models.values() for row in rows.values()
    ]
    least, most = math.floor(10 * min(times)) / 10, math.ceil(10 * max(times)) / 10
    for number, (family, rows) in enumerate(models.items()):
        base, left = rows["eager"], 48 + number * (wide + 38)

        def at(name: str, rows: dict[str, Any] = rows, base: Any = base, left: int = left) -> Point:
            memory = rows[name]["rise [MiB]"] / base["rise [MiB]"]
            time = rows[name]["step [ms]"] / base["step [ms]"]
            return left + wide * memory / _WIDEST, top + high * (most - time) / (most - least)

        drawing.text(left, top - 12, family, "head")
        for share in (25, 50, 75, 100):
            x = left + wide * share / 100 / _WIDEST
            drawing.path([(x, top), (x, top + high)], "grid")
            drawing.text(x, top + high + 16, f"{share} %", "small quiet", "middle")
        for share in range(round(100 * least), round(100 * most) + 1, 10):
            y = top + high * (most - share / 100) / (most - least)
            drawing.path([(left, y), (left + wide, y)], "grid")
            if number == 0:
                drawing.text(left - 6, y + 4, f"{share} %", "small quiet", "end")
        ours = sorted((at(name), name) for name in rows if name.startswith("ort"))
        front = [one for one, _ in ours if not any(x <= one[0] and y > one[1] for (x, y), _ in ours)]
        drawing.path(front, "ort stroke")
        for one, name in ours:
            by_ortlab = "recompute" in f"{name} {rows[name].get('switches', '')}"
            shape = "square" if by_ortlab else "circle"
            drawing.dot(*one, "ort" if one in front else "ort hollow", shape=shape)
        for name, (_, kind, shape) in _SHORT.items():
            drawing.dot(*at(name), kind, shape=shape)
    words = (
        "step memory: how far a step rises above its start. Hollow: another of ortlab's settings needs no more memory "
        "and less time."
    )
    drawing.text(48, top + high + 34, words, "small quiet")
    x = 30.0
    for words, kind, shape in (  # the line joins the best of ortlab
        ("ortlab: ONNX Runtime's plans", "ort", "circle"),
        ("layers that ortlab recomputes", "ort", "square"),
        *_SHORT.values(),
    ):
        drawing.dot(x, 340, kind, shape=shape)
        drawing.text(x + 11, 344, words, "small")
        x += 30 + 5.9 * len(words)
    drawing.text(
        48,
        362,
        f"python bench/memory_engines.py, {when}: 4 layers of 512, batch 8 x 256, AdamW, CPU, {threads} thread"
        f"{'s' * (threads > 1)}; all in turns{busy}.",
        "small quiet",
    )
    return drawing


_STAGES = (
    ("wrap", ("The model gets an engine;", "its parameters stay."), Effect.WRAP),
    ("export", ("The forward is traced on a", "batch: an ONNX graph."), Effect.EXPORT),
    ("gradient", ("The graph is optimised, and", "its gradient appended."), Effect.GRAPH),
    ("session", ("Recompute is put in, kernels", "chosen, memory planned."), Effect.SESSION),
    ("step", ("Forward, your loss, backward;", "gradients go to PyTorch."), Effect.STEP),
)


def way_of_a_step() -> Drawing:
    """Draw the stages from a model to a step, each with the switches that act from there on."""
    rows = [
        (title, does, textwrap.wrap(", ".join(one.name for one in switches() if one.effect is effect), 90))
        for title, does, effect in _STAGES
    ]
    heights = [max(66, 16 * len(names) + 22) for *_, names in rows]
    says = "Wrap, export, gradient, session, step: what each does, and the switches that act from there on"
    drawing = Drawing(900, 44 + sum(heights) + 16 * len(rows), says)
    drawing.text(20, 26, "A switch acts from one stage on; what stands above it is not built again.", "head")
    y = 44
    for (title, does, names), height in zip(rows, heights, strict=True):
        drawing.box(20, y, 210, height)
        drawing.text(32, y + 20, title, "head")
        drawing.lines(32, y + 39, does)
        drawing.lines(252, y + 22, names, "code", 16)
        y += height + 16
        if y < 44 + sum(heights) + 16 * len(rows):
            drawing.path([(125, y - 16), (125, y - 1)], tip=True)
    return drawing


LAYERS, MADE, HANDED = 6, 4, 1


def levels(*, recompute: bool) -> list[int]:
    """Return memory after each half step of a model whose layers make `MADE` results, of which one is handed on."""
    kept = HANDED if recompute else MADE
    forward = [level for layer in range(LAYERS) for level in (layer * kept + MADE, (layer + 1) * kept)]
    backward = [level for layer in reversed(range(LAYERS)) for level in (layer * kept + MADE, layer * kept)]
    return [0, *forward, *backward]


def kept_and_recomputed() -> Drawing:
    """Draw what a step keeps for its backward, all of it or only what layers hand on, and its memory."""
    drawing = Drawing(
        900, 400, "What a step keeps for its backward, and what is computed again, with the memory of both"
    )
    ways = (
        ("Everything is kept", False, 20),
        ('recompute="layers": only what a layer hands on is kept', True, 470),
    )
    for title, recompute, left in ways:
        drawing.text(left, 26, title, "head")
        for layer in range(LAYERS):
            x = left + layer * 66
            drawing.box(x, 44, 58, 26)
            drawing.text(x + 29, 61, f"layer {layer + 1}", "small", "middle")
            for result in range(MADE):
                handed = result == MADE - 1
                drawing.box(x + 4 + result * 13, 84, 11, 22, "kept" if handed or not recompute else "again")
            drawing.box(x, 120, 58, 26)
            drawing.text(x + 29, 137, "backward", "small", "middle")
        drawing.path([(left, 78), (left + 388, 78)], tip=True)
        drawing.path([(left + 388, 113), (left, 113)], tip=True)
    drawing.box(20, 160, 11, 14, "kept")
    drawing.text(38, 172, "kept from forward to backward", "small")
    drawing.box(240, 160, 11, 14, "again")
    drawing.text(258, 172, "computed a second time, right before the layer's backward reads it", "small")
    top, high, left, wide = 200, 150, 60, 800
    peak = LAYERS * MADE
    for recompute, kind in ((False, "torch stroke"), (True, "ort stroke")):
        curve = levels(recompute=recompute)
        points = [
            (left + wide * step / (len(curve) - 1), top + high * (1 - level / peak))
            for step, level in enumerate(curve)
        ]
        drawing.path(points, kind)
        most = max(curve)
        drawing.text(
            left + wide / 2, top + high * (1 - most / peak) - 6, f"peak {most}", "small head", "middle"
        )
    drawing.path([(left, top - 6), (left, top + high), (left + wide, top + high)])
    drawing.text(left + 6, top + 6, "memory", "small quiet")
    drawing.text(left + wide / 4, top + high + 18, "forward", "small quiet", "middle")
    drawing.text(left + 3 * wide / 4, top + high + 18, "backward", "small quiet", "middle")
    drawing.text(left + 130, top + 40, "everything is kept", "small torch")
    drawing.text(left + wide / 2 + 30, top + high - 62, "layers are recomputed", "small ort")
    drawing.text(
        20,
        390,
        f"Drawn by a rule: each of {LAYERS} layers makes {MADE} results and hands one on. The peak falls, time rises "
        "by a second forward.",
        "small quiet",
    )
    return drawing


def in_turns() -> Drawing:
    """Draw how times are compared, and what the memory of a step is."""
    drawing = Drawing(
        900,
        372,
        "Rounds that go forwards and backwards, the interval of their ratios, and the rise of a step",
    )
    drawing.text(20, 26, "Time: in turns, and the ratio is taken within a round", "head")
    for number in range(3):
        order = ("baseline", "candidate") if number % 2 == 0 else ("candidate", "baseline")
        for place, name in enumerate(order):
            x = 20 + number * 150 + place * 68
            drawing.box(x, 44, 64, 30, "kept" if name == "candidate" else "box")
            drawing.text(x + 32, 63, name, "small", "middle")
        drawing.text(20 + number * 150 + 66, 92, f"round {number + 1}", "small quiet", "middle")
    drawing.lines(
        20,
        120,
        [
            "A machine that slows down meanwhile slows both sides of a round.",
            "The interval is over the rounds' ratios; a verdict needs all of it:",
        ],
    )
    middle, scale = 235, 900
    for y, low, high, says in (
        (168, -0.16, -0.08, "faster"),
        (196, -0.04, 0.05, "no difference"),
        (224, -0.13, 0.06, "too unsteady to tell"),
    ):
        drawing.path([(middle + low * scale, y), (middle + high * scale, y)], "ort stroke")
        drawing.dot(middle + (low + high) / 2 * scale, y, "ort")
        drawing.text(middle + 60, y + 4, says, "small")
    drawing.box(middle - 0.03 * scale, 152, 0.06 * scale, 90, "again")
    drawing.text(middle, 258, "equal, ± 3 %", "small quiet", "middle")
    left, top, base = 500, 60, 236
    drawing.text(left, 26, "Memory: how far a step rises above its start", "head")
    drawing.box(left, base - 96, 360, 96, "box")
    drawing.lines(
        left + 10,
        base - 70,
        ["Python, libraries, weights, optimizer state:", "there before and after the step, in no comparison"],
    )
    points = [
        (left + 360 * step / 40, base - 96 - 70 * math.sin(math.pi * step / 40) ** 0.8) for step in range(41)
    ]
    drawing.path(points, "ort stroke")
    drawing.path([(left + 180, base - 96), (left + 180, base - 164)], tip=True)
    drawing.text(left + 188, base - 122, "step memory", "small head")
    drawing.text(left, top, "memory of the process", "small quiet")
    drawing.text(left + 180, base + 18, "one step", "small quiet", "middle")
    drawing.path([(20, 276), (880, 276)], "grid")
    drawing.text(20, 300, "Every figure says which of the three it is", "head")
    for x, title, does in (
        (20, "measured", "on this machine, in this process"),
        (310, "predicted", "by simulating a profiled step, before anything runs"),
        (640, "reported by ONNX Runtime", "its own words, which may be another thing"),
    ):
        drawing.text(x, 326, title, "head")
        drawing.text(x, 344, does, "small")
    return drawing


def what_parity_means() -> Drawing:
    """Draw distances over the depth of a model: rounding below the limit, and a first divergence above it."""
    drawing = Drawing(
        900,
        330,
        "Differences of two engines over the depth of a model, with the floor, the limit and the first divergence",
    )
    drawing.text(20, 26, "How far ONNX Runtime's tensors are from PyTorch's, module by module", "head")
    left, wide, top, high = 100, 740, 50, 200
    names = ("embeddings", "layer 0", "layer 1", "layer 2", "layer 3", "layer 4", "head")
    floors = (-7.2, -6.9, -6.8, -6.7, -6.6, -6.5, -6.4)
    seen = (-7.3, -6.8, -6.6, -3.0, -2.9, -2.8, -2.6)

    def y(exponent: float) -> float:
        return top + high * (-2 - exponent) / 6

    for exponent in (-8, -6, -4, -2):
        drawing.path([(left, y(exponent)), (left + wide, y(exponent))], "grid")
        drawing.text(left - 8, y(exponent) + 4, f"1e{exponent}", "small quiet", "end")
    xs = [left + wide * (number + 0.5) / len(names) for number in range(len(names))]
    drawing.path([(x, y(one)) for x, one in zip(xs, floors, strict=True)], "other stroke")
    limits = [one + math.log10(4) for one in floors]
    drawing.path([(x, y(one)) for x, one in zip(xs, limits, strict=True)], "again")
    for x, name, one, limit in zip(xs, names, seen, limits, strict=True):
        drawing.dot(x, y(one), "torch" if one > limit else "ort")
        drawing.text(x, top + high + 18, name, "small", "middle")
    drawing.text(
        xs[3] + 12,
        y(-3.5),
        "first divergence: what layer 2 takes agrees, what it returns does not",
        "small torch",
    )
    drawing.text(
        xs[3] + 12, y(-4.45), "what follows differs as well, and says nothing of itself", "small quiet"
    )
    drawing.text(xs[3] + 40, y(-5.75), "limit: four times the floor", "small ort")
    drawing.text(
        xs[3] + 40, y(-7.15), "floor: what repetition and rounding explain, measured here", "small quiet"
    )
    drawing.lines(
        20,
        300,
        [
            "Both engines start from the same weights, optimizer, seeds and batch, with dropout off. Below the limit",
            "lies rounding: no two engines add in the same order. The distances are drawn as an example.",
        ],
        "small quiet",
    )
    return drawing


_FLOORS = {
    "errors": ("for all", ""),
    "options": ("pure data", "runs no model"),
    "engine": ("ONNX Runtime", "and torch's exporter"),
    "runs": ("steps", "and what is found"),
    "lab": ("what users hold", ""),
    "render": ("what users see", ""),
}
"""The first room of each floor of the house, and what the floor is."""


def rooms() -> list[str]:
    """Return the rooms of the package in their order, which the table of `docs/contributing.md` gives."""
    page = (HERE / "contributing.md").read_text(encoding="utf-8")
    rows = re.findall(r"(?m)^\| (`[^|]*`) \|", page.partition("| room |")[2])
    return [name for row in rows for name in re.findall(r"`(\w+)(?:/|\.py)`", row)]


def said(room: str) -> str:
    """Return the first sentence of a room's docstring, or of its file's."""
    package = HERE.parent / "ortlab"
    file = package / room / "__init__.py" if (package / room).is_dir() else package / f"{room}.py"
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    first = re.split(r"(?<=\.)\s", docstring.partition("\n\n")[0])[0]
    return " ".join(first.replace("`", "").split())


def map_of_rooms() -> Drawing:
    """Draw the rooms of the package, a floor for each kind, from the one that knows nobody down to what users see."""
    floors: list[list[str]] = []
    for room in rooms():
        if room in _FLOORS:
            floors.append([])
        floors[-1].append(room)
    left, wide, gap = 150, 700, 10
    drawn = []
    for floor in floors:
        width = (wide - gap * (len(floor) - 1)) / len(floor)
        drawn.append(
            (
                width,
                [
                    (room, textwrap.wrap(said(room), int((width - 12) / 6.3), break_on_hyphens=False))
                    for room in floor
                ],
            )
        )
    heights = [34 + 14 * max(len(words) for _, words in boxes) for _, boxes in drawn]
    drawing = Drawing(
        900,
        62 + sum(heights) + 14 * len(heights),
        "The rooms of the package: each imports from those above it only",
    )
    drawing.text(20, 26, "A room imports from the rooms before it: left of it, or above.", "head")
    y = 44
    for floor, (width, boxes), height in zip(floors, drawn, heights, strict=True):
        kind, more = _FLOORS[floor[0]]
        drawing.text(20, y + 20, kind, "small head")
        drawing.text(20, y + 36, more, "small quiet")
        for number, (room, words) in enumerate(boxes):
            x = left + number * (width + gap)
            drawing.box(x, y, width, height, "kept" if room == "engine" else "box")
            drawing.text(x + 9, y + 19, room, "head")
            drawing.lines(x + 9, y + 36, words, "small", 14)
        y += height + 14
    drawing.path([(874, y - 14), (874, 48)], tip=True)
    drawing.text(874, y + 4, "imports", "small quiet", "middle")
    return drawing


DRAWINGS = {
    "rooms.svg": map_of_rooms,
    "memory-time.svg": memory_time,
    "way-of-a-step.svg": way_of_a_step,
    "kept-and-recomputed.svg": kept_and_recomputed,
    "in-turns.svg": in_turns,
    "what-parity-means.svg": what_parity_means,
}


def main() -> None:
    """Write every drawing."""
    for name, draw in DRAWINGS.items():
        (IMAGES / name).write_text(str(draw()), encoding="utf-8")


if __name__ == "__main__":
    main()
