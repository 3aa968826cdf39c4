"""What a lab says about its data and its arithmetic: the density of the inputs, and the FLOPs of a step."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, overload

import torch

from ortlab.errors import OptionError, StepError
from ortlab.graphs.diff import diff
from ortlab.graphs.flop_savings import FlopSavings
from ortlab.graphs.flops import Flops
from ortlab.lab.graph_lab import GraphLab
from ortlab.lab.profiling_lab import ProfilingLab
from ortlab.lab.sweeping_lab import SweepingLab
from ortlab.options.options import Need, Options, setting_words
from ortlab.records.density import EMBED, LABEL, Density
from ortlab.records.density_report import THRESHOLD, DensityReport, Reach, SwitchEffect
from ortlab.runs.padded_inputs import DensityProbe
from ortlab.runs.recording import Recording

if TYPE_CHECKING:
    from ortlab.options.configuration import Configuration
    from ortlab.records.runs import Ledger
    from ortlab.runs.wrapping import Takeover

_SWITCHES: Final = {LABEL: "label_sparse_optimizer", EMBED: "embedding_sparse_optimizer"}


class DensityLab(SweepingLab, ProfilingLab, GraphLab):
    """The base of `Lab` that counts tokens, labels and FLOPs; the abstract parts are the lab's."""

    module: torch.nn.Module
    have: frozenset[Need]
    runs: Ledger
    _recording: Any
    _takeover: Takeover

    def density(self, *batches: object, measure: int = 0) -> DensityReport:
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
            density, source = self._count(batches), f"{len(batches)} batch{'es' if len(batches) > 1 else ''}"
        else:
            density, source = self._counted()
        report = DensityReport(density, source, self._labels_reached(density), self._tokens_reached(density))
        if measure:
            report = replace(report, effects=tuple(self._effects(report, measure)))
        return report

    @overload
    def flops(
        self, *, against: None = None, part: str | None = None, n: int = 1, progress: bool = True
    ) -> Flops: ...

    @overload
    def flops(
        self, *, against: Mapping[str, object], part: str | None = None, n: int = 1, progress: bool = True
    ) -> FlopSavings: ...

    def flops(
        self,
        *,
        against: Mapping[str, object] | None = None,
        part: str | None = None,
        n: int = 1,
        progress: bool = True,
    ) -> Flops | FlopSavings:
        """Count the FLOPs of the last step, node by node, from the shapes that its nodes run with.

        The step is run again while ORT's profiler watches; afterwards the lab is as it was.

        Parameters
        ----------
        against
            Options by name, as in `{"label_sparse_optimizer": False}`: what the lab as it is set calculates is held
            against a step with these.
        part
            Path of the part, where several parts of the model are wrapped.
        n
            How often the step is run; each kernel's time is the shortest of them.
        progress
            Whether to show a progress bar on a terminal.

        Returns
        -------
        Flops or FlopSavings
            With `against`: what each node calculates with and without, and what was moved.

        Raises
        ------
        OptionError
            If the engine is not "ort", it is not clear which part is meant, or an option of `against` is unknown or has
            that value already.
        ExecutionError
            If PyTorch executed the step, as a fallback, or the step does not train.
        StepError
            If no step has run yet, or one is running.
        """
        if against is not None:
            return self._flops_saved(against, part, n, progress=progress)
        with self._profiled(n, part, progress=progress) as (profile, _):
            from ortlab.engine.node_flops import node_flops

            nodes = node_flops(profile, self.module, part or "")
        options = self._configuration.options
        changed = ", ".join(
            setting_words(name, getattr(options, name)) for name in options.changed(Options())
        )
        return Flops(nodes, changed, part or "")

    def _flops_saved(
        self, against: Mapping[str, object], part: str | None, n: int, *, progress: bool
    ) -> FlopSavings:
        """Compare the FLOPs of the last step as the lab is set with those of other options."""
        self._check_usable("count FLOPs")
        wished = dict(against)
        configuration = self._configuration
        other = configuration.changed(wished, self.have)
        if other == configuration:
            raise OptionError(
                f"The lab is set so already: {_words(wished)}.",
                why="There is nothing to compare.",
                fix="Set the switch the other way first: lab.set(compute_optimizer=True).",
            )
        having, graph = self.flops(part=part, n=n, progress=progress), self.graph(part=part)
        try:
            self._configure(other)
            compared = self.flops(part=part, n=n, progress=progress)
            same = dict(diff(self.graph(part=part), graph).matched)
        finally:
            self._configure(configuration)
        now = {name: getattr(configuration.options, name, configuration.engine) for name in wished}
        return FlopSavings(compared, having, same, f"{_words(now)} against {_words(wished)}")

    # ---- parts ------------------------------------------------------------------------------------------------

    def _counted(self) -> tuple[Density, str]:
        if isinstance(self._recording, Recording) and self._configuration.options.print_input_density:
            return self._recording.density, "the run that goes on"
        counted = [run for run in self.runs if run.density]
        if counted:
            return counted[-1].density, f"run {counted[-1].number}"
        looked = [run for run in self.runs if run.options.print_input_density]
        if looked:
            return Density(), f"run {looked[-1].number}"
        raise StepError(
            "No run has counted its inputs.",
            why="The switch print_input_density was off.",
            fix="lab.set(print_input_density=True) and run a step; or count batches: lab.density(batch).",
        )

    def _count(self, batches: tuple[object, ...]) -> Density:
        self._check_usable("count batches")
        probe = DensityProbe(self.module, self._takeover.original_forward)
        for number, batch in enumerate(batches, start=1):
            if isinstance(batch, Mapping):
                args, kwargs = (), dict(batch)
            else:
                args, kwargs = batch if isinstance(batch, tuple) else (batch,), {}
            try:
                probe.count(number, args, kwargs)
            except TypeError as error:
                raise StepError(
                    f"Batch {number} cannot be given to {type(self.module).__name__}.",
                    why=str(error),
                    fix="Give a mapping for model(**batch), a tuple for model(*batch), a tensor for model(batch).",
                ) from error
        return probe.read()

    def _labels_reached(self, density: Density) -> Reach:
        rows = [row for row in density.rows if row.kind == LABEL]
        if not rows:
            return "absent"
        if self._configuration.engine != "ort":
            return "another engine"
        if not any(isinstance(one, torch.nn.CrossEntropyLoss) for one in self.module.modules()):
            return "not a sub-module"
        options = self._configuration.options
        if not (options.compute_optimizer and options.label_sparse_optimizer):
            return "off"
        return "acts" if rows[0].density < THRESHOLD else "dense"

    def _tokens_reached(self, density: Density) -> Reach:
        rows = [row for row in density.rows if row.kind == EMBED]
        if not rows:
            return "absent"
        if self._configuration.engine != "ort":
            return "another engine"
        options = self._configuration.options
        if not (options.compute_optimizer and options.embedding_sparse_optimizer):
            return "off"
        if Need.CUDA not in self.have or not any(one.is_cuda for one in self.module.parameters()):
            return "no CUDA"
        return "acts" if rows[0].density < THRESHOLD else "dense"

    def _effects(self, report: DensityReport, rounds: int) -> list[SwitchEffect]:
        kinds = {LABEL: report.labels, EMBED: report.tokens}
        return [
            self._effect(_SWITCHES[kind], rounds) for kind, reach in kinds.items() if reach in ("acts", "off")
        ]

    def _effect(self, switch: str, rounds: int) -> SwitchEffect:
        on: dict[str, object] = {"compute_optimizer": True, switch: True}
        off: dict[str, object] = {"compute_optimizer": True, switch: False}
        sweep = self.sweep([off, on], rounds=rounds, baseline=off)
        found = {bool(one.point.changes[switch]): one for one in sweep.outcomes()}
        failure = next((point.failure or point.skipped for point in sweep.points if not point.measured), "")
        flops = {True: 0, False: 0}
        if not failure:
            configuration = self._configuration
            try:
                for value, changes in ((True, on), (False, off)):
                    self._configure(configuration.changed(changes, self.have))
                    flops[value] = self.flops().total
            finally:
                self._configure(configuration)
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
            sweep.count,
            failure,
        )

    @property
    @abstractmethod
    def _configuration(self) -> Configuration:
        """Engine and switches together."""


def _words(changes: Mapping[str, object]) -> str:
    return ", ".join(setting_words(name, value) for name, value in changes.items())
