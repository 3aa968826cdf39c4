"""The main job without a notebook: train a small BERT on ONNX Runtime, toggle, rerun, compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ortlab import demo_peak
from ortlab.masked_language import Setting, prepare

if TYPE_CHECKING:
    from ortlab.memory.plan import MemoryPlan
    from ortlab.render.page import Page
    from ortlab.runs import Ledger, PeakMemory


def main(setting: Setting, show: Callable[[str], None] = print) -> Ledger:
    """Train on ORT, on PyTorch, and on ORT with recompute plans, from the same start, and compare.

    Parameters
    ----------
    setting
        The size of the experiment.
    show
        Called with each piece of text.

    Returns
    -------
    Ledger
        The three runs.

    Raises
    ------
    OrtlabError
        If the installation cannot train; the error says what to do.
    """
    import ortlab
    from ortlab.render import text, units

    model, step = prepare(setting)
    weights = units.count(sum(parameter.numel() for parameter in model.parameters()))
    show(
        f"A BERT of {setting.layers} layers and {weights} weights learns English from Python's language reference:"
        f" {setting.steps} steps of {setting.batch} x {setting.length} tokens."
    )
    lab = ortlab.wrap(model)
    show("\n1. On ONNX Runtime ...\n")
    lab.step(step, n=setting.steps)
    show(text.render(lab.options))
    plan = lab.plan()
    show("\n" + text.render(without_logs(plan)))
    chosen = largest_savings(plan)
    show("\n2. The same steps, from the same start, on PyTorch ...")
    lab.set(engine="eager").rerun()
    show(f"\n3. The same steps on ONNX Runtime, recomputing {' and '.join(chosen)} ...")
    lab.set(engine="ort", memory_plan=chosen).rerun()
    show("\n" + text.render(lab.compare()))
    show("\n4. Peak memory once more, now of a fresh process for each, which has no earlier runs ...")
    peaks = {
        "ort": demo_peak.measure(setting, "ort"),
        "eager": demo_peak.measure(setting, "eager"),
        f"ort, recomputing {' and '.join(chosen)}": demo_peak.measure(setting, "ort", chosen),
    }
    show("\n" + text.render(peak_page(peaks)))
    return lab.runs


def largest_savings(plan: MemoryPlan, count: int = 2) -> tuple[str, ...]:
    """Return the recompute plans with the largest predicted savings, as `Options.memory_plan` takes them.

    Plans that recompute with compromise are left out: they save a part of a size only.
    """
    return tuple(row.config for row in plan.rows if row.strategy == 1)[:count]  # rows are sorted by saving


def without_logs(record: object) -> Page:
    """Return a record's page without the long texts that a notebook keeps folded."""
    from ortlab.render.page import Folded, Page
    from ortlab.render.pages import compose

    page = compose(record)
    return Page(page.title, tuple(block for block in page.blocks if not isinstance(block, Folded)))


def peak_page(peaks: dict[str, PeakMemory | None]) -> Page:
    """Set peaks that were measured in fresh processes beside each other; ratios are against the first."""
    from ortlab.render import units
    from ortlab.render.page import Column, Note, Page, Table, row

    columns = tuple(
        Column(name, numeric=bool(name)) for name in ("", "before the step", "peak", "rise", "ratio")
    )
    first = next(iter(peaks.values()))
    rows = tuple(
        row(
            name,
            units.size(peak.start_bytes if peak else None),
            units.size(peak.peak_bytes if peak else None),
            units.size(peak.rise_bytes if peak else None),
            units.ratio(peak.rise_bytes / first.rise_bytes if peak and first else None),
        )
        for name, peak in peaks.items()
    )
    note = (
        "Measured: resident set of a fresh process in which freed memory goes back to the system at once. Before the"
        " step there are libraries, weights and optimizer state; the rise is gradients and what is kept for backward."
    )
    return Page("Peak memory", (Table("", columns, rows), Note(note)))
