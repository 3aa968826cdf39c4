"""What can be seen of a lab: its status, plans, graphs and messages, and what a change would redo."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ortlab.errors import OptionError
from ortlab.lab.remembered_graph import RememberedGraph
from ortlab.memory.plan_costs import costs_key
from ortlab.memory.reading import merged, with_measured_density
from ortlab.records.coverage import Coverage
from ortlab.records.rebuilds import rebuild, rebuild_of_switch
from ortlab.records.runs import EXECUTED_BY_PARTS
from ortlab.records.status import Rebuild, Status
from ortlab.runs.partial import PartsEngine

if TYPE_CHECKING:
    import torch

    from ortlab.engine.baselines import Baseline
    from ortlab.engine.execution import Execution
    from ortlab.engine.ort import OrtEngine
    from ortlab.memory.plan import MemoryPlan
    from ortlab.memory.plan_costs import KnownCosts
    from ortlab.options.options import Options
    from ortlab.records.messages import MessageLog, Messages
    from ortlab.records.runs import Ledger
    from ortlab.runs.experiment import Experiment


class LabView(RememberedGraph):
    """The base of `Lab` that looks and changes nothing; what it looks at is the lab's."""

    module: torch.nn.Module
    runs: Ledger
    _options: Options
    _ort: OrtEngine | PartsEngine
    _engine: OrtEngine | PartsEngine | Baseline
    _experiment: Experiment | None
    _known_costs: KnownCosts
    _log: MessageLog
    _wrapped: bool
    _executed_by: str

    def plan(
        self,
        part: str | None = None,
        *,
        level: int | None = None,
        costs: bool = False,
        measure: int = 0,
        rounds: int = 3,
        progress: bool = True,
    ) -> MemoryPlan:
        """Read what ORT keeps for backward and which recompute plans it offers; with `costs`, what each of them costs.

        Parameters
        ----------
        part
            Path of a wrapped part of the model; None for the whole model, or for all its parts together.
        level
            A memory level, 0 to 2: what it would recompute, without setting it.
        costs
            Whether to profile the last step without plans, and to simulate what each plan takes off its peak and adds
            to its time. From then on `plan` and the panel show these columns for this step.
        measure
            With costs: how many plans to run as well, those with the most bytes off the peak for each ms, in turns with
            none, as a sweep in `lab.sweeps`; the memory of each is measured.
        rounds
            Runs of each plan that is measured.
        progress
            Whether to show a progress bar on a terminal.

        Raises
        ------
        OptionError
            If there is no such part or level; with costs, if the engine is not "ort" or several parts are wrapped.
        BuildError
            If no step has run in this lab yet, or ONNX Runtime cannot build the training graph.
        """
        if costs or measure:
            if part is not None or level is not None:
                raise OptionError(
                    "Costs are of all the plans of a model.",
                    fix="Leave part and level out: lab.plan(costs=True).",
                )
            return self._plan_costs(measure, rounds=rounds, progress=progress)
        if level is not None:
            level = self._options.replace(memory_plan=(), memory_level=level).memory_level
        with self._graphs(part) as found:
            plans = {path: self._plan(one, path, level) for path, one in found.executions.items()}
        if len(plans) == 1 and not found.missing:
            plan = next(iter(plans.values()))
        else:
            plan = merged(plans, missing=found.missing)
        return replace(plan, note=found.note)

    if TYPE_CHECKING:  # `PricingLab` has it, which stands behind this class among the bases of `Lab`

        def _plan_costs(self, measure: int = 0, *, rounds: int = 3, progress: bool = True) -> MemoryPlan: ...

    def _plan(self, execution: Execution, path: str, level: int | None) -> MemoryPlan:
        from ortlab.engine.applied_plans import plans_of

        plan = with_measured_density(plans_of(execution, self.module, path, level=level), self.runs)
        return self._known_costs.written_into(plan, costs_key(execution, self._experiment))

    def _engines(self, part: str | None) -> dict[str, OrtEngine]:
        """Return what builds graphs, by path of the part; the path is empty where the whole model is wrapped."""
        whole = {} if isinstance(self._ort, PartsEngine) else {"": self._ort}
        parts = self._ort.engines if isinstance(self._ort, PartsEngine) else {}
        if part is None:
            return whole or parts
        if part not in parts:
            names = (
                f"Parts: {', '.join(parts)}." if parts else "The model is wrapped as a whole: leave part out."
            )
            raise OptionError(f"There is no wrapped part {part!r}.", fix=names)
        return {part: parts[part]}

    @property
    def messages(self) -> Messages:
        """What torch's exporter, ORTModule and ONNX Runtime have said in this lab, oldest first.

        `log_level` decides what they say. What is said during an export is there after the next export at that level.
        """
        return self._log.messages

    @property
    def status(self) -> Status:
        """What the lab is doing now."""
        pending = self._engine.pending_stage()
        if not self._wrapped:
            state = "unwrapped"
        elif self._engine.fallback_reason:
            state = "fallback"
        elif not pending:
            state = "ready"
        else:
            ran = self._executed_by in (self._engine.name, EXECUTED_BY_PARTS)
            state = "rebuild pending" if ran else "not built"
        reason = self._engine.fallback_reason or getattr(self._engine, "rebuild_reason", "")
        coverage = self._engine.coverage if self._wrapped else Coverage()
        detail = getattr(self._engine, "detail", "")
        can_repeat = self._experiment is not None
        return Status(
            self._engine.name, state, self._executed_by, reason, pending, coverage, detail, can_repeat
        )

    def rebuild(self, switch: str | None = None, /, **changes: object) -> Rebuild:
        """Say what the next call would redo on ONNX Runtime, and what that took when measured last; change nothing.

        Parameters
        ----------
        switch
            The name of one switch: as if it had another value than now, whichever.
        **changes
            Options by name, as for `set`. Without any, the switches as they are.

        Returns
        -------
        Rebuild
            With the first stage to be redone; `str(lab.rebuild())` says it in words.

        Raises
        ------
        OptionError
            If there is no such switch, a value is wrong, or contradicts another; or both forms are used at once.

        Examples
        --------
        >>> lab.rebuild(memory_level=1)
        Rebuild(stage='session', changed=('memory_level',), is_first=False, last_ms=412.6, run=2)
        """
        if switch is None:
            return rebuild(self._ort, self.runs, self._options.replace(**changes))
        if changes:
            raise OptionError(
                "A rebuild is asked for one switch by name, or for values.",
                fix=f'lab.rebuild("{switch}"), or lab.rebuild({next(iter(changes))}=...).',
            )
        return rebuild_of_switch(self._ort, self.runs, self._options, switch)
