"""What can be seen of a lab: its status, plans, graphs and messages, and what a change would redo."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ortlab.coverage import Coverage
from ortlab.errors import OptionError
from ortlab.memory.plan_costs import costs_key
from ortlab.memory.reading import merged, with_measured_density
from ortlab.partial import PartsEngine
from ortlab.rebuilds import rebuild, rebuild_of_switch
from ortlab.runs import EXECUTED_BY_PARTS
from ortlab.status import Rebuild, Status

if TYPE_CHECKING:
    import torch

    from ortlab.engine.baselines import Baseline
    from ortlab.engine.ort import OrtEngine
    from ortlab.experiment import Experiment
    from ortlab.memory.plan import MemoryPlan
    from ortlab.memory.plan_costs import KnownCosts
    from ortlab.messages import MessageLog, Messages
    from ortlab.options import Options
    from ortlab.runs import Ledger

Observer = Callable[[str], None]
"""Called with "options", "status", "runs" or "progress:<text>:<fraction>" after each change."""


class LabView:
    """The base of `Lab` that looks and changes nothing; what it looks at is the lab's."""

    module: torch.nn.Module
    runs: Ledger
    _options: Options
    _ort: OrtEngine | PartsEngine
    _engine: OrtEngine | PartsEngine | Baseline
    _experiment: Experiment | None
    _known_costs: KnownCosts
    _log: MessageLog
    _observers: list[Observer]
    _wrapped: bool
    _executed_by: str

    def stage_of_change(self, **changes: object) -> str:
        """Tell what a change of switches would redo at the next call of the model, before it is made.

        Parameters
        ----------
        **changes
            Options by name, as for `set`.

        Returns
        -------
        str
            "export", "graph", "session", "step" (nothing is redone, and it acts in the next step) or "" (nothing
            changes). What was built before and is kept counts as there; "export" as long as nothing has been built.

        Raises
        ------
        OptionError
            If `set` would refuse the change for its names or values.
        """
        return self._ort.stage_of(self._options.replace(**changes))

    def plan(self, part: str | None = None, *, level: int | None = None) -> MemoryPlan:
        """Read what ORT keeps for backward and which recompute plans it offers.

        Parameters
        ----------
        part
            Path of a wrapped part of the model; None for the whole model, or for all its parts together.
        level
            A memory level, 0 to 2: what it would recompute, without setting it.

        Raises
        ------
        OptionError
            If there is no such part or level.
        BuildError
            If no training graph has been built yet for the present options.
        """
        if level is not None:
            level = self._options.replace(memory_plan=(), memory_level=level).memory_level
        engines = self._engines(part)
        plans = {
            path: self._plan(engine, path, level) for path, engine in engines.items() if engine.built_options
        }
        if len(engines) == 1 or not plans:
            path, engine = next(iter(engines.items()))
            return self._plan(engine, path, level)
        return merged(plans, missing=tuple(path for path in engines if path not in plans))

    def _plan(self, engine: OrtEngine, path: str, level: int | None) -> MemoryPlan:
        from ortlab.engine.applied_plans import plans_of

        plan = with_measured_density(plans_of(engine.execution, self.module, path, level=level), self.runs)
        return self._known_costs.written_into(plan, costs_key(engine, self._experiment))

    def _engine_of(self, part: str | None, has: str) -> OrtEngine:
        """Return what builds the graphs of the model or of one part; `has` says what each part has of its own."""
        engines = self._engines(part)
        if len(engines) > 1:
            raise OptionError(
                f"Each wrapped part has {has} of its own.", fix=f"Name one: part={next(iter(engines))!r}."
            )
        return next(iter(engines.values()))

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
        return Status(self._engine.name, state, self._executed_by, reason, pending, coverage, detail)

    @property
    def pending(self) -> Rebuild:
        """What the next call redoes on ONNX Runtime with the present switches, and what that took when measured last.

        Examples
        --------
        >>> lab.set(memory_level=1).pending
        Rebuild(stage='session', changed=('memory_level',), is_first=False, last_ms=412.6, run=2)
        """
        return rebuild(self._ort, self.runs, self._options)

    def cost_of_change(self, **changes: object) -> Rebuild:
        """Say what a change of switches would redo, and what that took when measured last; nothing is changed.

        Parameters
        ----------
        **changes
            Options by name, as for `set`.

        Raises
        ------
        OptionError
            If an option is unknown, has a wrong value, or contradicts another.
        """
        return rebuild(self._ort, self.runs, self._options.replace(**changes))

    def cost_of_switch(self, name: str) -> Rebuild:
        """Say the same of one switch, if it had any other value than it has now.

        Raises
        ------
        OptionError
            If there is no such switch.
        """
        return rebuild_of_switch(self._ort, self.runs, self._options, name)

    def observe(self, callback: Observer) -> Callable[[], None]:
        """Call back after each change; returns a function that ends that."""
        self._observers.append(callback)

        def stop() -> None:
            if callback in self._observers:
                self._observers.remove(callback)

        return stop
