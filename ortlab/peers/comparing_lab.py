"""What a lab does to compare itself with its peers: the same steps on each, then the memory of each."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

from ortlab.engine_names import check_engine
from ortlab.errors import OptionError
from ortlab.memory.measuring_lab import MeasuringLab
from ortlab.peers.peers import Peers
from ortlab.snapshot import Snapshot
from ortlab.sweeps.running import reason
from ortlab.sweeps.sweeping_lab import SweepingLab

if TYPE_CHECKING:
    from ortlab.memory.measured import MemoryMeasurement
    from ortlab.status import Status
    from ortlab.sweeps.points import Point

ENGINES: Final = ("eager", "checkpoint", "compile")
BUDGETS: Final = (0.5,)
"""Activation memory budgets that `torch.compile` is tried with, beside its own choice."""

ROUNDS: Final = 3
_MEASURED_STEPS: Final = 2


class ComparingLab(SweepingLab, MeasuringLab):
    """The base of `Lab` that runs peers: a sweep over them, and the memory of each."""

    def peers(
        self,
        n: int | None = None,
        *,
        rounds: int = ROUNDS,
        engines: Iterable[str] = ENGINES,
        budgets: Iterable[float] | None = None,
        also: Iterable[Mapping[str, object]] = (),
        memory: bool = True,
        progress: bool = True,
    ) -> Peers:
        """Run the last step on ONNX Runtime as it is set, and on what else could run it, from the same start.

        The peers are PyTorch, PyTorch with each layer checkpointed, `torch.compile`, and `torch.compile` with
        activation memory budgets. Rounds go forwards and backwards in turn, so that a drift of the machine favours
        none. Then the memory of each is measured by itself. A peer that fails is recorded with the reason, and the
        others go on. Afterwards, also after a failure or an interrupt, weights, optimizer, random state, options and
        engine are as they were before the call.

        `torch.compile` takes minutes for a large model, once for each budget; that is no part of a step's time.

        Parameters
        ----------
        n
            Steps of each run; by default as many as the last step call had.
        rounds
            Runs of each peer.
        engines
            The peers: "eager", "checkpoint", "compile", with what they are told, as for `set`.
        budgets
            Activation memory budgets from 0 to 1; 0.5 if "compile" is among the engines.
        also
            Other configurations to stand in the same table, as `set` takes them: `[{"memory_level": 1},
            {"memory_plan": lab.budget("2 GiB").plans}]`. They run on ONNX Runtime unless they name another engine.
        memory
            Whether to measure the memory of each peer with `measure_memory`, which takes some more steps. Without, the
            table has the peaks of the runs, which earlier peers in the same process may have raised.
        progress
            Whether to show a progress bar on a terminal.

        Returns
        -------
        Peers
            The record. Its runs are in `lab.runs`, and their sweep in `lab.sweeps`.

        Raises
        ------
        OptionError
            If a budget or a configuration makes no sense. Nothing has run then.
        StepError
            If no step has run yet, or a step is running.
        KeyboardInterrupt
            If the user interrupts. The runs made so far are kept in `lab.sweeps[-1]`.

        Examples
        --------
        >>> lab.peers(budgets=[0.5, 0.2], also=[{"memory_level": 1}]).table()
        """
        self._check_usable("run peers")
        experiment = self._last_experiment()
        points = _points(engines, budgets, also)
        last, configuration = self._experiment, self.configuration
        before = Snapshot(self.module, experiment.start.stateful)
        try:
            sweep = self.sweep(points, n=n, rounds=rounds, baseline=points[0], progress=progress)
            found = Peers(sweep)
            self._say_details(found)
            if memory:
                self._measure_peers(found, progress=progress)
        finally:
            self._experiment = last
            before.put_back()
            self.configure(configuration)
        return found

    def _say_details(self, found: Peers) -> None:
        for point in found.sweep.points:
            if point.measured and point.configuration is not None and point.value("engine") != "ort":
                self.configure(point.configuration)
                if detail := self.status.detail:
                    found.details[point.number] = detail

    def _measure_peers(self, found: Peers, *, progress: bool) -> None:
        from tqdm import tqdm

        measured = [point for point in found.sweep.points if point.measured]
        # With disable=None tqdm draws on terminals only; a notebook shows the panel's bar instead.
        with tqdm(
            measured, unit="peer", leave=False, disable=None if progress else True, desc="Memory"
        ) as bar:
            for point in bar:
                bar.set_description(f"Memory of {found.name(point)}")
                try:
                    found.memories[point.number] = self._measure_peer(point)
                except Exception as error:  # noqa: BLE001 - whatever is raised is a result of the peer
                    found.no_memory[point.number] = reason(error)

    def _measure_peer(self, point: Point) -> MemoryMeasurement:
        assert point.configuration is not None  # noqa: S101 - it was run
        self.configure(point.configuration)
        return self.measure_memory(steps=_MEASURED_STEPS)

    @property
    @abstractmethod
    def status(self) -> Status:
        """What the lab is doing now."""


def _points(
    engines: Iterable[str], budgets: Iterable[float] | None, also: Iterable[Mapping[str, object]]
) -> list[dict[str, object]]:
    """Return what each peer changes, ONNX Runtime as it is set first."""
    points: list[dict[str, object]] = [{"engine": "ort"}]
    for one in _listed(also, "other configurations", '[{"memory_level": 1}]'):
        if not isinstance(one, Mapping):
            raise OptionError(
                f"A configuration is a dict of values by option, not {one!r}.",
                fix='For example lab.peers(also=[{"memory_level": 1}]).',
            )
        points.append({"engine": "ort", **one})
    chosen = [check_engine(one) for one in _listed(engines, "engines", '["eager", "checkpoint"]')]
    if budgets is None:
        budgets = BUDGETS if "compile" in chosen else ()
    listed = _listed(budgets, "activation memory budgets", "[0.5, 0.2]")
    chosen += [check_engine(f"compile:{budget}") for budget in listed]
    return points + [{"engine": one} for one in dict.fromkeys(chosen) if one != "ort"]


def _listed(given: object, what: str, example: str) -> list[object]:
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        raise OptionError(f"The {what} are a list, not {given!r}.", fix=f"For example {example}.")
    return list(given)
