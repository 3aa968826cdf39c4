"""The lab: one model under experiment, its switches, its steps and its runs; `wrap` makes it, `latest` finds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MethodType
from typing import TYPE_CHECKING, Concatenate, Generic, ParamSpec, TypeVar, overload

from ortlab.analyses import graphs as stages
from ortlab.analyses import memory as measuring
from ortlab.analyses import profiling
from ortlab.errors import OptionError
from ortlab.options.catalogue import check_names
from ortlab.parity import folder_comparison, parity_run
from ortlab.records.runs import names
from ortlab.records.status import rebuild, rebuild_of_switch
from ortlab.runs import bench, stepping
from ortlab.runs.bench import Bench
from ortlab.runs.interrupts import interrupts_kept
from ortlab.runs.parts import PartsEngine
from ortlab.runs.wrapping import check_wrappable, wrapped_whole
from ortlab.shown import ShownAsPanel
from ortlab.studies import (
    batch_size_run,
    bisection_run,
    budget_run,
    comparison_run,
    density,
    plans,
    sweep_run,
)

if TYPE_CHECKING:
    import torch

    from ortlab.graphs.flops import Flops, FlopSavings
    from ortlab.options.options import Options
    from ortlab.ranks.ledgers import Ranks
    from ortlab.records.messages import Messages
    from ortlab.records.status import Rebuild, Status
    from ortlab.runs.parts import Wishes

P = ParamSpec("P")
R = TypeVar("R")


class OnBench(Generic[P, R]):
    """A function of another room as a method of `Lab`: its first argument is the lab's bench."""

    def __init__(self, function: Callable[Concatenate[Bench, P], R]) -> None:
        self._function = function

    @overload
    def __get__(self, lab: None, owner: type[Lab]) -> Callable[Concatenate[Bench, P], R]: ...

    @overload
    def __get__(self, lab: Lab, owner: type[Lab]) -> Callable[P, R]: ...

    def __get__(self, lab: Lab | None, owner: type[Lab]) -> Callable[..., R]:
        return self._function if lab is None else MethodType(self._function, lab._bench)


class Lab(ShownAsPanel):
    """One model under experiment; `ortlab.wrap` makes it.

    Parameters
    ----------
    module
        The model. It keeps its identity: `lab.module is model`, and calling it runs the lab's engine.
    only
        The sub-modules that ONNX Runtime runs; None for the whole model. See `ortlab.wrap`.
    options
        The switches; by default those that the `ORTMODULE_*` environment variables set.
    engine
        "ort", "eager", "checkpoint" or "compile"; see `set`.
    name
        What tables and errors call the model.

    Attributes
    ----------
    module
        The model.
    name
        Its name.
    runs
        The ledger.
    sweeps
        The sweeps, in order; one that was interrupted, too.
    budgets
        The budgets that were asked for, in order.
    notes
        What the environment variables meant, one sentence each; and where the last lines of a process are that died
        inside ONNX Runtime.
    from_environment
        By option: the environment variable that gave it its first value.

    Raises
    ------
    WrapError
        If the object or a part of it cannot be wrapped, or there is no such part.
    OptionError
        If an option is unknown, wrong, or needs something that is missing here.

    Examples
    --------
    >>> lab = ortlab.wrap(model)
    >>> run = lab.step(train_one_batch, n=20)
    >>> lab.rerun(memory_level=1)
    >>> lab.compare(engine="eager", memory_level=1)
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        only: Wishes | None = None,
        options: Options | None = None,
        engine: str = "ort",
        name: str = "model",
        **changes: object,
    ) -> None:
        check_names(changes, Lab)
        self._bench = own = Bench(module, only=only, options=options, engine=engine, name=name, **changes)
        own.lab = self
        self._ranks: Ranks | None = None
        self.module = module
        self.name = name
        self.runs = own.runs
        self.sweeps = own.sweeps
        self.budgets = own.budgets
        self.bisections = own.bisections
        self.batch_size_searches = own.batch_size_searches
        self.notes = own.notes
        self.from_environment = own.from_environment
        self.have = own.have

    # ---- train --------------------------------------------------------------------------------------------------

    step = OnBench(stepping.step)
    rerun = OnBench(stepping.rerun)
    record = OnBench(stepping.record)

    @interrupts_kept()
    def restore(self) -> Lab:
        """Go back to the start of the last step call: weights, buffers, gradients, optimizers, random state.

        Raises
        ------
        StepError
            If no step has run yet.
        """
        self._bench.check_usable("restore")
        self._bench.last_experiment().start.put_back()
        self._bench.notify("options")  # as after `set`: who follows the lab has shown what holds now
        return self

    # ---- switch -------------------------------------------------------------------------------------------------

    @property
    def options(self) -> Options:
        """The present switches; change them with `set`."""
        return self._bench.options

    @property
    def engine(self) -> str:
        """The engine of the next step: "ort", "eager", "checkpoint" or "compile", with what it is told; see `set`."""
        name: str = self._bench.engine.name
        return name

    def set(self, *, engine: str | None = None, **changes: object) -> Lab:
        """Change switches, or the engine; the next call rebuilds what they touch, and only that.

        Parameters
        ----------
        engine
            "ort"; "eager", plain PyTorch; "checkpoint", which runs each layer under `torch.utils.checkpoint`
            ("checkpoint:encoder+decoder.block" names them); "compile", `torch.compile` ("compile:0.5" gives it an
            activation memory budget). None leaves it.
        **changes
            Options by name, as in `lab.set(memory_level=1)`.

        Returns
        -------
        Lab
            The lab itself.

        Raises
        ------
        OptionError
            If an option or the engine is unknown, has a wrong value, contradicts another, or cannot act here, or the
            model has no layers to checkpoint. Nothing is changed then.
        StepError
            If a step is running.
        """
        self._bench.check_usable("change options")
        check_names(changes, Lab.set)
        wished = changes if engine is None else {**changes, "engine": engine}
        self._bench.configure(self._bench.configuration.changed(wished, self.have))
        return self

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
            With the first stage to be redone.

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
            found = rebuild(self._bench.ort, self.runs, self.options.replace(**changes))
            return found if changes or not self._bench.unchanged else replace(found, changed=())
        if changes:
            raise OptionError(
                "A rebuild is asked for one switch by name, or for values.",
                fix=f'lab.rebuild("{switch}"), or lab.rebuild({next(iter(changes))}=...).',
            )
        return rebuild_of_switch(self._bench.ort, self.runs, self.options, switch)

    # ---- ask what to switch on, and why -------------------------------------------------------------------------

    budget = OnBench(budget_run.budget)
    compare = OnBench(comparison_run.compare)
    compare_engines = OnBench(comparison_run.compare_engines)
    sweep = OnBench(sweep_run.sweep)
    find_batch_size = OnBench(batch_size_run.find_batch_size)
    bisect = OnBench(bisection_run.bisect)
    parity = OnBench(parity_run.parity)
    subscribe = OnBench(folder_comparison.subscribe)

    # ---- look at memory, graph and data -------------------------------------------------------------------------

    activations = OnBench(measuring.activations)
    memory = OnBench(measuring.memory)
    memory_snapshot = OnBench(measuring.memory_snapshot)
    plan = OnBench(plans.plan)
    graph = OnBench(stages.graph)
    graphs = OnBench(stages.graphs)
    graph_diff = OnBench(stages.graph_diff)
    triton_kernels = OnBench(stages.triton_kernels)
    profile = OnBench(profiling.profile)
    density = OnBench(density.density)

    @overload
    def flops(
        self, *, baseline: None = None, part: str | None = None, n: int = 1, progress: bool = True
    ) -> Flops: ...

    @overload
    def flops(
        self, *, baseline: Mapping[str, object], part: str | None = None, n: int = 1, progress: bool = True
    ) -> FlopSavings: ...

    def flops(
        self,
        *,
        baseline: Mapping[str, object] | None = None,
        part: str | None = None,
        n: int = 1,
        progress: bool = True,
    ) -> Flops | FlopSavings:
        """Count the FLOPs of the last step, node by node, from the shapes that its nodes run with.

        The step is run again while ORT's profiler watches; afterwards the lab is as it was.

        Parameters
        ----------
        baseline
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
            With `baseline`: what each node calculates with and without, and what was moved.

        Raises
        ------
        OptionError
            If the engine is not "ort", it is not clear which part is meant, or an option of `baseline` is unknown or
            has that value already.
        ExecutionError
            If PyTorch executed the step, as a fallback, or the step does not train.
        StepError
            If no step has run yet, or one is running.
        """
        if baseline is not None:
            return stages.flops_saved(self._bench, baseline, part, n, progress=progress)
        return stages.count_flops(self._bench, part, n, progress=progress)

    # ---- look at the lab ----------------------------------------------------------------------------------------

    @property
    def status(self) -> Status:
        """What the lab is doing now."""
        return self._bench.status

    @property
    def messages(self) -> Messages:
        """What torch's exporter, ORTModule and ONNX Runtime have said in this lab, oldest first.

        `log_level` decides what they say. What is said during an export is there after the next export at that level.
        """
        return self._bench.log.messages

    def _headline(self) -> str:
        """Name the model, the engine, the options that differ from the defaults and the number of runs."""
        ort = self._bench.ort
        parts = tuple(ort.engines) if isinstance(ort, PartsEngine) else ()
        only = f"only {names(parts)}, " if parts else ""
        return (
            f"{self.name}: {type(self.module).__name__}, {only}engine={self.engine!r}, {self.status.state}, "
            f"runs={len(self.runs)}, {self.options!r}"
        )

    # ---- the end ------------------------------------------------------------------------------------------------

    def unwrap(self, *, forget: bool = False) -> torch.nn.Module:
        """Give the model its own forward back and free ONNX Runtime's sessions; weights stay as trained.

        Parameters
        ----------
        forget
            Whether to drop the exports and gradient graphs of the model as well. They hold no weights, are otherwise
            kept as long as the model lives, and let the next lab of the same model start with a new session only.

        Returns
        -------
        torch.nn.Module
            The model.
        """
        self._bench.unwrap(forget=forget)
        return self.module


def wrap(
    module: torch.nn.Module,
    *,
    only: Wishes | None = None,
    options: Options | None = None,
    engine: str = "ort",
    name: str = "model",
    **changes: object,
) -> Lab:
    """Run a PyTorch model on ONNX Runtime, and make it the subject of a lab.

    The model keeps its identity, its parameters and its `state_dict` keys; only who runs its forward changes. The
    first call exports it and builds the gradient graph.

    Parameters
    ----------
    module
        Any `torch.nn.Module`. Wrap it before DDP or DeepSpeed are put around it.
    only
        The sub-modules that ONNX Runtime shall run, where it cannot or shall not run the whole model: dotted paths as
        `module.named_modules()` gives them, patterns ("encoder.layer.*"), or the sub-modules themselves; one or
        several. PyTorch runs the rest, and gradients flow through. By default the whole model.
    options
        The switches; by default those that the `ORTMODULE_*` environment variables set.
    engine
        "ort", "eager", "checkpoint" or "compile"; see `Lab.set`.
    name
        What tables and errors call the model.
    **changes
        Switches by name, as in `ortlab.wrap(model, memory_level=1)`.

    Raises
    ------
    WrapError
        If the object or a part of it cannot be wrapped, or there is no such part.
    OptionError
        If an option is unknown, wrong, or needs something that is missing here.
    InstallError
        If the installed packages cannot train with ONNX Runtime.
    """
    check_wrappable(module)
    with wrapped_whole(module), interrupts_kept():
        lab = Lab(module, only=only, options=options, engine=engine, name=name, **changes)
        lab._bench.note_wrapped()
        return lab


def latest() -> Lab | None:
    """Return the lab that was wrapped last and is not unwrapped; if all are, the last one; None if there is none."""
    last = bench.latest()
    return None if last is None else last.lab
