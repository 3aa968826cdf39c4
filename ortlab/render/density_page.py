"""The page and the figure of densities: ORTModule's table, and what to do about what it shows; the table of a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from ortlab import units
from ortlab.records.density import EMBED, LABEL, THRESHOLD
from ortlab.render.page import Block, Cell, Column, Mark, Note, Page, Table, row
from ortlab.render.plots import COLOURS, INK, drawing, dress, key, new_figure, plain, say, whole_steps

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ortlab.records.density import Density, DensityReport, SwitchEffect

STEPS_SHOWN: Final = 10
"""Steps that a page shows, the latest; ORTModule printed as many at a time."""

_SAMPLES_SHOWN: Final = 32
_COLUMNS: Final = (
    Column("STEP", numeric=True),
    Column(
        "INPUT TYPE", meaning="EMBED: tokens that an embedding looks up; LABEL: targets of a cross entropy"
    ),
    Column("INPUT NAME", meaning="name of the model's argument"),
    Column("PAD IDX", numeric=True, meaning="the padding token, or the label that is ignored"),
    Column("DENSITY", numeric=True, meaning="counted: share of what is neither padding nor ignored"),
    Column("VALID TOKENS", numeric=True, meaning="counted"),
    Column("TOTAL TOKENS", numeric=True, meaning="counted"),
    Column("VALID TOKENS/BATCH", meaning="counted: valid tokens of each sample", whole=True),
)


def density_page(report: DensityReport) -> Page:
    """Show the latest steps in ORTModule's own columns, then advice, then what was measured."""
    blocks: list[Block] = []
    if report.density:
        blocks.append(_table(report))
        blocks.append(
            drawing(
                "Density of each input over the steps; ortlab.plot(report) draws it.",
                lambda: density_plot(report),
            )
        )
    blocks += _advice(report)
    if report.effects:
        blocks.append(_effects(report))
        blocks += [
            Note(f"{one.switch} was not measured: {one.failure}", Mark.BAD)
            for one in report.effects
            if one.failure
        ]
    return Page(f"Density of the inputs: counted in {report.source}", tuple(blocks))


def _table(report: DensityReport) -> Table:
    steps = sorted({one.step for one in report.rows})[-STEPS_SHOWN:]
    shown = [one for one in report.rows if one.step in steps]
    rows = tuple(
        row(
            units.count(one.step),
            one.kind,
            one.name,
            str(one.pad_index),
            units.density(one.density),
            str(one.valid),
            str(one.total),
            _samples(one.valid_per_sample),
        )
        for one in shown
    )
    more = len(report.rows) - len(shown)
    left_out = f"{units.count(more)} earlier rows: report.table() has them." if more else ""
    return Table("Valid token/label density (valid/total)", _COLUMNS, rows, left_out)


def _samples(counts: tuple[int, ...]) -> str:
    if not counts:
        return "N/A"
    written = ", ".join(map(str, counts[:_SAMPLES_SHOWN]))
    return f"[{written}, ...]" if len(counts) > _SAMPLES_SHOWN else f"[{written}]"


def _advice(report: DensityReport) -> Iterator[Note]:
    if not report.density and report.labels == report.tokens == "unknown":
        yield Note("The table is drawn here when a step has been counted.", Mark.QUIET)
        return
    means = {(one.kind, one.name): mean for one, mean in report.density.means()}
    yield from _about_tokens(report, {name: mean for (kind, name), mean in means.items() if kind == EMBED})
    yield from _about_labels(report, {name: mean for (kind, name), mean in means.items() if kind == LABEL})
    for one in report.all_ignored[:1]:
        count = units.count(len(report.all_ignored))
        yield Note(
            f"Every label of {one.name} was ignored in {count} of the steps (step {one.step} first): the mean loss "
            "over no label is nan, and so are its gradients. Leave such batches out.",
            Mark.BAD,
        )


def _about_tokens(report: DensityReport, means: dict[str, float]) -> Iterator[Note]:
    if not means:
        yield Note(
            "No padding was counted: no input reaches an embedding with a padding index. Give the embedding one, "
            "torch.nn.Embedding(..., padding_idx=0), or the model's config a pad_token_id.",
            Mark.WARN,
        )
        return
    for name, mean in means.items():
        if mean >= THRESHOLD:
            yield Note(
                f"{name}: {units.percent(1 - mean)} of the tokens are padding; little to gain.", Mark.GOOD
            )
            continue
        words = f"{name}: {units.percent(1 - mean)} of the tokens are padding. "
        longest = report.padded_to_longest(name)
        if longest is not None and longest < 1:
            words += (
                f"Dynamic batching: padding each batch only to its own longest sample would leave "
                f"{units.percent(longest)} of the tokens; batches of samples of like length, down to "
                f"{units.percent(mean)}. (Where all padding stands at one end.) "
            )
        elif longest is not None:
            words += (
                f"Each batch is as short as its longest sample already; batches of samples of like length would "
                f"leave down to {units.percent(mean)} of the tokens. "
            )
        yield Note(words + _EMBEDDING[report.tokens].format(share=units.percent(1 - mean)), Mark.WARN)


_EMBEDDING: Final = {
    "acts": "Embedding sparsity leaves the padding out of what is computed.",
    "off": "embedding_sparse_optimizer is off.",
    "no CUDA": "Embedding sparsity would leave the padding out, but acts on CUDA only.",
    "dense": "Embedding sparsity does not act: the first batch had less than 10 % padding.",
    "another engine": "Embedding sparsity needs engine=ort.",
    "not a sub-module": "",
    "absent": "",
    "unknown": "",
}


def _about_labels(report: DensityReport, means: dict[str, float]) -> Iterator[Note]:
    if not means:
        yield Note(
            "No labels were counted: no input reaches torch.nn.functional.cross_entropy inside the model. If the loss "
            "is computed outside, put it inside: ortlab.with_loss(model, ortlab.TokenLoss(), loss_only=True).",
            Mark.WARN,
        )
        return
    for name, mean in means.items():
        ignored = units.percent(1 - mean)
        if mean >= THRESHOLD:
            yield Note(
                f"{name}: {units.percent(mean)} of the labels count; label sparsity has nothing to do.",
                Mark.GOOD,
            )
            continue
        words, mark = _LABELS[report.labels]
        yield Note(f"{name}: {ignored} of the labels are ignored. " + words.format(share=ignored), mark)


_ACTS: Final = (
    "Label sparsity acts: it cuts about {share} of the loss FLOPs; where the model does not return its logits, also of "
    'the layers ahead that work place by place. lab.flops(against={{"label_sparse_optimizer": False}}) counts them.'
)

_OFF: Final = (
    "Label sparsity is off: lab.set(compute_optimizer=True, label_sparse_optimizer=True) will cut about {share} of "
    "the loss FLOPs."
)

_UNSEEN: Final = (
    "Label sparsity would cut about {share} of the loss FLOPs, but cannot see this loss: it is no "
    "torch.nn.CrossEntropyLoss sub-module. ortlab.with_loss(model, ortlab.TokenLoss(), loss_only=True) makes it "
    "one (shift=True for causal language models)."
)

_LABELS: Final = {
    "acts": (_ACTS, Mark.GOOD),
    "off": (_OFF, Mark.WARN),
    "not a sub-module": (_UNSEEN, Mark.WARN),
    "dense": (
        "Label sparsity does not act: in the first batch, by which it is decided, 90 % or more of the labels count.",
        Mark.WARN,
    ),
    "another engine": (
        "Label sparsity needs engine=ort; it would cut about {share} of the loss FLOPs.",
        Mark.QUIET,
    ),
    "absent": ("", Mark.QUIET),
    "unknown": ("", Mark.QUIET),
    "no CUDA": ("", Mark.QUIET),
}


def _effects(report: DensityReport) -> Table:
    columns = (
        Column("switch"),
        Column("time", numeric=True, meaning="measured: step time with it over that without, 95 % interval"),
        Column("verdict"),
        Column(
            "FLOPs of the step", numeric=True, meaning="counted from shapes: with it, and what that saves"
        ),
        Column("step memory", numeric=True, meaning="measured: with it over without"),
        Column(
            "loss difference", numeric=True, meaning="measured: largest relative difference, step by step"
        ),
    )
    first = report.effects[0]
    caption = (
        f"On against off, measured: {units.count(first.rounds)} rounds of {units.count(first.steps)} steps in turns, "
        "from one start"
    )
    return Table(caption, columns, tuple(_effect(one) for one in report.effects))


def _effect(one: SwitchEffect) -> tuple[Cell, ...]:
    return row(
        one.switch,
        units.ratio_interval(one.time_ratio, one.time_low, one.time_high),
        one.verdict or units.MISSING,
        f"{units.flops(one.flops_with)} ({units.percent(one.flops_share)} saved)"
        if one.flops_without
        else units.MISSING,
        units.ratio(one.memory_ratio),
        units.difference(one.loss_difference),
    )


# ---- the table of a run, and the figure -----------------------------------------------------------------------------


_INPUT = (
    Column("input", meaning="name of the model's argument"),
    Column("holds", meaning="tokens that an embedding looks up, or labels of a cross entropy"),
    Column("left out", numeric=True, meaning="the padding token, or the label that is ignored"),
    Column("density", numeric=True, meaning="counted: share that is not left out, over all steps of the run"),
    Column("last step", numeric=True, meaning="counted: how many are not left out, and how many there are"),
    Column("per sample", numeric=True, meaning="counted in the last step: fewest and most of one sample"),
)


def density_table(density: Density) -> Table:
    """List each input once: its mean density, and the counts of the last step."""
    rows = []
    for last, mean in density.means():
        samples = last.valid_per_sample
        rows.append(
            row(
                last.name,
                "tokens" if last.kind == EMBED else "labels",
                str(last.pad_index),
                units.percent(mean),
                f"{units.count(last.valid)} of {units.count(last.total)}",
                f"{units.count(min(samples))} to {units.count(max(samples))}" if samples else "-",
            )
        )
    return Table("Density of the inputs: counted, all steps in run.density.table()", _INPUT, tuple(rows))


def density_plot(report: DensityReport) -> Figure:
    """Draw which part of each input counts, step by step; the line below which the sparsity optimizers act, too."""
    from matplotlib.ticker import MaxNLocator

    from ortlab.records.density import THRESHOLD

    figure = new_figure(2.8)
    axes = figure.add_subplot()
    dress(axes, f"Density of the inputs, counted in {report.source}", "step", "valid [%]")
    inputs = dict.fromkeys((one.kind, one.name) for one in report.rows)
    if not inputs:
        say(axes, "Nothing was counted.")
        return figure
    for position, (kind, name) in enumerate(inputs):
        rows = [one for one in report.rows if (one.kind, one.name) == (kind, name)]
        axes.plot(
            [one.step for one in rows],
            [100 * one.density for one in rows],
            label=plain(f"{kind} {units.printable(name)}"),
            color=COLOURS[position % len(COLOURS)],
            marker="o",
            markersize=4,
            linewidth=1.5,
        )
    axes.axhline(100 * THRESHOLD, color=INK, linestyle=":", linewidth=1)
    axes.set_ylim(0, 105)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    whole_steps(axes)
    key(axes)
    return figure
