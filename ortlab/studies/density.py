"""How much of a model's inputs is worth computing: counted in batches or steps, and what the sparsity switches do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch

from ortlab.analyses.graphs import count_flops
from ortlab.errors import StepError
from ortlab.options.options import Need
from ortlab.records.density import EMBED, LABEL, THRESHOLD, Density, DensityReport, Reach, SwitchEffect
from ortlab.runs.padded_inputs import DensityProbe
from ortlab.runs.recording import Recording
from ortlab.studies.sweep_run import sweep

if TYPE_CHECKING:
    from ortlab.runs.bench import Bench

_SWITCHES: Final = {LABEL: "label_sparse_optimizer", EMBED: "embedding_sparse_optimizer"}


def density(bench: Bench, *batches: object, measure: int = 0) -> DensityReport:
    """Say how much of the model's inputs is worth computing, and what to do about the rest.

    Parameters
    ----------
    *batches
        Batches to count, each a mapping for `model(**batch)`, a tuple for `model(*batch)`, or what else
        `model(batch)` takes. The model is run on the first without gradients, to see which inputs reach an
        embedding or a cross entropy; nothing of it is kept. Without batches: what the steps have counted, also
        while they run. That needs the switch `print_input_density`.
    measure
        Rounds of runs with and without the sparsity switches, in turns from the start of the last step, to
        measure what they do; 0 for none. The runs are in `lab.runs`.

    Returns
    -------
    DensityReport
        One row per input and step.

    Raises
    ------
    StepError
        If no run has counted anything and no batch is given; or if a batch cannot be counted; or with `measure` if
        no step has run yet.
    Exception
        Whatever the model raises on a batch.
    """
    if batches:
        found, source = _count(bench, batches), f"{len(batches)} batch{'es' if len(batches) > 1 else ''}"
    else:
        found, source = _counted(bench)
    report = DensityReport(found, source, _reached(bench, found, LABEL), _reached(bench, found, EMBED))
    if measure:
        report = replace(report, effects=tuple(_effects(bench, report, measure)))
    return report


def _counted(bench: Bench) -> tuple[Density, str]:
    if isinstance(bench.recording, Recording) and bench.options.print_input_density:
        return bench.recording.density, "the run that goes on"
    counted = [run for run in bench.runs if run.density]
    if counted:
        return counted[-1].density, f"run {counted[-1].number}"
    looked = [run for run in bench.runs if run.options.print_input_density]
    if looked:
        return Density(), f"run {looked[-1].number}"
    raise StepError(
        "No run has counted its inputs.",
        why="The switch print_input_density was off.",
        fix="lab.set(print_input_density=True) and run a step; or count batches: lab.density(batch).",
    )


def _count(bench: Bench, batches: tuple[object, ...]) -> Density:
    bench.check_usable("count batches")
    probe = DensityProbe(bench.module, bench.takeover.original_forward)
    for number, batch in enumerate(batches, start=1):
        if isinstance(batch, Mapping):
            args, kwargs = (), dict(batch)
        else:
            args, kwargs = batch if isinstance(batch, tuple) else (batch,), {}
        try:
            probe.count(number, args, kwargs)
        except TypeError as error:
            raise StepError(
                f"Batch {number} cannot be given to {type(bench.module).__name__}.",
                why=str(error),
                fix="Give a mapping for model(**batch), a tuple for model(*batch), a tensor for model(batch).",
            ) from error
    return probe.read()


def _reached(bench: Bench, density: Density, kind: str) -> Reach:
    """Say what the switch for labels, or for tokens, has to act on."""
    row, options = next((row for row in density.rows if row.kind == kind), None), bench.options
    if row is None:
        return "absent"
    if bench.configuration.engine != "ort":
        return "another engine"
    if kind == LABEL and not any(
        isinstance(one, torch.nn.CrossEntropyLoss) for one in bench.module.modules()
    ):
        return "not a sub-module"
    if not (options.compute_optimizer and getattr(options, _SWITCHES[kind])):
        return "off"
    on_cuda = Need.CUDA in bench.have and any(one.is_cuda for one in bench.module.parameters())
    if kind == EMBED and not on_cuda:
        return "no CUDA"
    return "acts" if row.density < THRESHOLD else "dense"


def _effects(bench: Bench, report: DensityReport, rounds: int) -> list[SwitchEffect]:
    kinds = {LABEL: report.labels, EMBED: report.tokens}
    return [
        _effect(bench, _SWITCHES[kind], rounds) for kind, reach in kinds.items() if reach in ("acts", "off")
    ]


def _effect(bench: Bench, switch: str, rounds: int) -> SwitchEffect:
    on: dict[str, object] = {"compute_optimizer": True, switch: True}
    off: dict[str, object] = {"compute_optimizer": True, switch: False}
    made = sweep(bench, [off, on], rounds=rounds, baseline=off)
    found = {bool(one.point.changes[switch]): one for one in made.outcomes()}
    failure = next((point.failure or point.skipped for point in made.points if not point.measured), "")
    flops = {True: 0, False: 0}
    if not failure:
        present = bench.configuration
        with bench.set_as_before():
            for value, changes in ((True, on), (False, off)):
                bench.configure(present.changed(changes, bench.have))
                flops[value] = count_flops(bench).total
    outcome = found.get(True)
    return SwitchEffect(
        switch,
        outcome.time_ratio if outcome else math.nan,
        outcome.time_low if outcome else math.nan,
        outcome.time_high if outcome else math.nan,
        outcome.verdict if outcome else "",
        outcome.memory_ratio if outcome else math.nan,
        outcome.loss_difference if outcome else None,
        flops[True],
        flops[False],
        rounds,
        made.count,
        failure,
    )
