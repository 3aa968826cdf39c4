"""How figures are drawn, without pyplot: nothing global is touched. And those of runs: loss, step time, memory."""

from __future__ import annotations

import io
import re
import statistics
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import quoteattr

from ortlab import units
from ortlab.options.configuration import engine_kind
from ortlab.records.runs import EXECUTED_BY_FALLBACK, Run, Step, step_parts
from ortlab.render.execution_words import ENGINE_NAMES, title
from ortlab.render.page import Drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RUNS_SHOWN = 12
"""Runs that a figure shows: the latest; more bars or lines cannot be told apart."""

INK = "#7a7a7a"
"""Grey of text and axes: contrast 4.3 on white, 4.4 on JupyterLab's dark theme, so one file suits both."""

FALLBACK = "#d32f2f"

# Okabe and Ito's colours, which people with any kind of colour vision can tell apart.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
_PARTS = ("forward", "backward", "optimizer", "everything else")
MIB = 1 << 20
_ENGINE_COLOURS = dict(zip(ENGINE_NAMES, COLOURS, strict=False))
_WIDTH = 8.5  # inches
_INCHES_PER_BAR = 0.34
_LABEL_WIDTH = 30  # characters

_BETWEEN = re.compile(r"<!--.*?-->|(?<=>)\s+(?=<)", re.DOTALL)
_TAG = re.compile(r"<[^>]+>")
_NAME = re.compile(r' id="([^"]*)"')
_REFERENCE = re.compile(r"#([\w.-]+)")
_FONTS = re.compile(r"font-family: [^;\"]*sans-serif")
_UNTURNED = re.compile(r' transform="rotate\(-?0 [^"]*"')
_DIGITS = re.compile(r"(?<![\w.#-])-?\d+\.\d{2,}(?![\w.])")
_SVG_STYLE = "stroke-linejoin: round; stroke-linecap: butt; max-width: 100%; height: auto"


def losses(runs: Sequence[Run]) -> Figure:
    """Draw the loss of every step, one line per run."""
    figure = new_figure(2.8)
    axes = figure.add_subplot()
    _draw_losses(axes, _latest(runs))
    return figure


def memory(runs: Sequence[Run]) -> Figure:
    """Draw the step memory of every run that has one: how far a step rises above its start."""
    shown = [run for run in _latest(runs) if run.step_memory_bytes is not None]
    figure = new_figure(1.2 + _INCHES_PER_BAR * len(shown))
    axes = figure.add_subplot()
    _draw_memory(axes, shown)
    return figure


def overview(runs: Sequence[Run]) -> Figure:
    """Draw loss, step time and memory under one another, for the panel."""
    shown = _latest(runs)
    bars = 0.9 + _INCHES_PER_BAR * len(shown)
    figure = new_figure(2.4 + 2 * bars)
    top, middle, bottom = figure.subplots(3, height_ratios=[2.4, bars, bars])
    _draw_losses(top, shown)
    _draw_times(middle, shown)
    _draw_memory(bottom, [run for run in shown if run.step_memory_bytes is not None])
    return figure


def svg(figure: Figure, description: str) -> str:
    """Write a figure as an ``<svg>`` element whose text and axes can be read on light pages and on dark ones.

    Parameters
    ----------
    figure
        A figure of this module.
    description
        What the figure shows, for readers who do not see it.
    """
    from matplotlib import rc_context

    buffer = io.StringIO()
    # Text stays text, in the page's own font; with the salt the same record is the same text each time it is shown.
    with rc_context({"svg.fonttype": "none", "font.family": "sans-serif", "svg.hashsalt": "ortlab"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    document = buffer.getvalue()
    body = document[document.index("<svg") :]
    # matplotlib's style sheet has the selector `*`: inline, it would restyle the whole page.
    body = re.sub(r"<metadata>.*?</metadata>|<defs>\s*<style.*?</style>\s*</defs>", "", body, flags=re.DOTALL)
    body = _compact(body)
    label = quoteattr(description)
    return body.replace("<svg", f'<svg role="img" aria-label={label} style="{_SVG_STYLE}"', 1)


def drawing(what: str, draw: Callable[[], Figure]) -> Drawing:
    """Put a figure into a page; it is drawn when the page is shown as HTML. `what` is one sentence."""
    return Drawing(what, lambda: svg(draw(), what))


def inline(figure: Figure, description: str) -> str:
    """Write a figure as `svg` does, for a living page: text and axes take the colour of the text around it."""
    return svg(figure, description).replace(INK, "currentColor")


def _compact(body: str) -> str:
    """Remove from an SVG what nobody sees: a notebook is saved with its figures."""
    # Coordinates keep tenths of a point, and only elements that others refer to keep their name.
    body = _BETWEEN.sub("", body)
    used = set(_REFERENCE.findall(body))

    def tag(found: re.Match[str]) -> str:
        named = _NAME.sub(lambda name: name.group() if name.group(1) in used else "", found.group())
        return _DIGITS.sub(shorter, " ".join(named.split()))

    def shorter(number: re.Match[str]) -> str:
        value = float(number.group())
        return f"{value:.1f}" if abs(value) >= 1 else f"{value:.3g}"

    return _TAG.sub(tag, _UNTURNED.sub("", _FONTS.sub("font-family: sans-serif", body)))


def new_figure(height: float) -> Figure:
    """Start a figure of the usual width; its height is in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(_WIDTH, height), layout="constrained", facecolor="none")


def _latest(runs: Sequence[Run]) -> list[Run]:
    return list(runs)[-RUNS_SHOWN:]


def _draw_losses(axes: Axes, runs: list[Run]) -> None:
    for position, run in enumerate(runs):
        points = [(step + 1, loss) for step, loss in enumerate(run.losses) if loss is not None]
        if points:
            x, y = zip(*points, strict=True)
            fallback = run.executed_by == EXECUTED_BY_FALLBACK
            axes.plot(
                x,
                y,
                label=_label(run),
                color=FALLBACK if fallback else COLOURS[position % len(COLOURS)],
                # Runs from one start lie on top of each other; dashes let the lower one show through.
                linestyle=("-", "--", "-.", ":")[position % 4],
                marker="o" if len(points) == 1 else None,
                linewidth=1.5,
            )
    from matplotlib.ticker import MaxNLocator

    dress(axes, "Loss, measured", "step", "loss")
    if axes.lines:
        key(axes)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        whole_steps(axes)
    else:
        say(axes, "No run reported a loss.")


def _draw_times(axes: Axes, runs: list[Run]) -> None:
    rows = [_label(run) for run in runs]
    left = [0.0] * len(runs)
    parts = [step_parts(run.warm_steps, run.step_ms) for run in runs]
    for name, colour in zip(_PARTS, COLOURS, strict=False):
        widths = [of_run[name] for of_run in parts]
        axes.barh(rows, widths, left=left, label=name, color=colour, height=0.6)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    medians = [run.step_ms for run in runs]
    ends = [quartiles(run.warm_steps) for run in runs]
    spread = [
        [median - low for median, (low, _) in zip(medians, ends, strict=True)],
        [high - median for median, (_, high) in zip(medians, ends, strict=True)],
    ]
    axes.errorbar(medians, rows, xerr=spread, fmt="none", ecolor=INK, capsize=3, linewidth=1.2)
    devices = ", ".join(dict.fromkeys(run.device for run in runs))
    heading = (
        f"Step time, measured on {devices} (median of warm steps; whiskers: quartiles)"
        if runs
        else "Step time"
    )
    dress(axes, heading, "ms", "")
    axes.invert_yaxis()
    _mark_fallbacks(axes, runs)
    if runs:
        key(axes)
    else:
        say(axes, "No run yet.")


def _draw_memory(axes: Axes, runs: list[Run]) -> None:
    rows = [_label(run) for run in runs]
    axes.barh(rows, [(run.step_memory_bytes or 0) / MIB for run in runs], color=COLOURS[5], height=0.6)
    devices = ", ".join(dict.fromkeys(run.device for run in runs))
    heading = (
        f"Step memory, measured on {devices} (how far a step rises above its start)"
        if runs
        else "Step memory"
    )
    dress(axes, heading, "MiB", "")
    axes.invert_yaxis()
    _mark_fallbacks(axes, runs)
    if not runs:
        say(axes, "No run measured its step memory.")


def quartiles(steps: Sequence[Step]) -> tuple[float, float]:
    """Return the lower and the upper quartile of the times of steps, in ms."""
    times = [step.total_ms for step in steps]
    if len(times) == 1:
        return times[0], times[0]
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return low, high


def _label(run: Run) -> str:
    """Name a run in a figure: two lines at most, and no dollar sign, which would start a formula."""
    name = units.fold(units.printable(title(run)), 2 * _LABEL_WIDTH - 4)
    # A hyphen is the minus of a plan, "Gelu+:1:-1", and no place to break a line at.
    return plain(textwrap.fill(name, _LABEL_WIDTH, break_on_hyphens=False))


def dress(axes: Axes, heading: str, x: str, y: str) -> None:
    """Give axes their heading, their labels and the grey that suits light and dark themes."""
    axes.set_facecolor("none")
    axes.set_title(heading, loc="left", fontsize=9, color=INK)
    axes.set_xlabel(x, fontsize=8, color=INK)
    axes.set_ylabel(y, fontsize=8, color=INK)
    axes.tick_params(colors=INK, labelsize=8)
    for name, spine in axes.spines.items():
        spine.set_visible(name in {"left", "bottom"})
        spine.set_color(INK)


def key(axes: Axes, top: float = 1.0, **more: Any) -> None:
    """Write the key of a figure beside its axes; `top` is where it begins, as a share of their height."""
    axes.legend(
        frameon=False, labelcolor=INK, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, top), **more
    )


def engine_colour(engine: str, *, fell_back: bool = False) -> str:
    """Return the colour of an engine, the same in every figure; that of a fallback is red."""
    return FALLBACK if fell_back else _ENGINE_COLOURS.get(engine_kind(engine), INK)


def plain(name: str) -> str:
    """Return a name for matplotlib, to which a dollar sign would start a formula."""
    return name.replace("$", r"\$")


def whole_steps(axes: Axes) -> None:
    """Name the step alone on an axis of one step; matplotlib would show twentieths of it, 0.95 to 1.05."""
    low, high = axes.get_xlim()
    if high - low < 1:
        middle = round((low + high) / 2)
        axes.set_xlim(middle - 0.5, middle + 0.5)
        axes.set_xticks([middle])


def _mark_fallbacks(axes: Axes, runs: list[Run]) -> None:
    for label, run in zip(axes.get_yticklabels(), runs, strict=False):
        if run.executed_by == EXECUTED_BY_FALLBACK:
            label.set_color(FALLBACK)


def say(axes: Any, sentence: str) -> None:
    """Write a sentence where a figure has nothing to draw."""
    axes.text(0.5, 0.5, sentence, transform=axes.transAxes, ha="center", va="center", color=INK, fontsize=9)
