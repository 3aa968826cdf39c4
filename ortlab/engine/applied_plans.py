"""Which memory plans a session really applies, read from the graph that it executes.

1.19.2 passes over a plan whose cluster the graph does not have, and says nothing of it; and where two plans would
recompute the same result, it takes one of them.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import onnx

from ortlab.engine.inspection.places import Places
from ortlab.errors import BuildError
from ortlab.graphs.nodes import layer_of
from ortlab.memory.plan_reading import operators, read_plan
from ortlab.memory.recompute import COPY

if TYPE_CHECKING:
    import torch

    from ortlab.engine.execution import Execution
    from ortlab.engine.memory_report import MemoryReport
    from ortlab.memory.plan import MemoryPlan
    from ortlab.memory.recompute import RecomputeChoice, RecomputePlace, RecomputePlaces

_EMPTY: Final = re.compile(r"\bempty_dim_param\d+\b")
"""How ORT names a size for which it has no name."""


@dataclass(frozen=True)
class Recomputed:
    """What runs again in the backward of a session: names of nodes of the forward, and their operators."""

    nodes: frozenset[str] = frozenset()
    operators: frozenset[str] = frozenset()

    def lacks(self, plan: str) -> bool:
        """Tell whether a plan is certainly not applied: nothing of one of its operators runs again."""
        cluster, strategy, count = plan.split(":")
        return strategy != "0" and count != "0" and not self.operators.issuperset(operators(cluster))


def plans_of(
    execution: Execution, model: torch.nn.Module, part: str = "", *, level: int | None = None
) -> MemoryPlan:
    """Read the recompute plans of an execution: what ORT offers, and what its session applies of what was asked for.

    `model` is the whole model, in which layers are counted; `part` is the path of the wrapped part that is executed,
    empty for the whole model. `level` asks for a memory level in the place of the options; whether ORT would apply it
    is not known then. Raises `BuildError` where the execution has no backward, or the places of plans at a level cannot
    be told.
    """
    if not execution.training:
        raise BuildError(
            "There are no recompute plans: the last step built no gradient.",
            why="The model was in eval mode, or gradients were off.",
            fix="Run a training step: model.train(), then %%ort_step or lab.step(fn).",
        )
    report, plans, preview = execution.memory_report(), execution.plans, level is not None
    if level is None:
        level = execution.options.memory_level
    elif level:
        counts = execution.recompute_places().of_level(level).counts
        plans = tuple(f"{name}:{count}" for name, count in counts.items())
    else:
        plans = ()
    places = _places(execution, needed=bool(plans))
    symbols, totals = _with_label_filter(report)
    return read_plan(
        report.savings,
        symbols,
        report.insight,
        memory_level=level,
        enabled=plans,
        applied=applied_counts(plans, places, execution.recomputed)
        if plans and places and not preview
        else None,
        label_totals=totals,
        layers=layers_of(places, Places(model, part)) if places else None,
        level_set=places.level_set(level) if places and level else None,
    )


def _places(execution: Execution, *, needed: bool) -> RecomputePlaces | None:
    """Return the places of all plans; None where nobody has asked for them, or ORT's answer cannot be read."""
    if execution.known_places is not None or not needed:
        return execution.known_places
    try:
        return execution.recompute_places()
    except BuildError:  # on Windows and macOS: then it is not known how often a plan is applied
        return None


def _with_label_filter(report: MemoryReport) -> tuple[dict[str, int], dict[str, str]]:
    """Return symbols and totals that know the sizes of the label filter's results: the number of valid labels.

    ORT calls those sizes empty. It inserts Sub, NonZero and Squeeze behind the labels
    (``insert_gather_before_sceloss.cc``).
    """
    symbols, totals = dict(report.symbols), dict(report.label_totals)
    counting = next((name for name in totals if name in symbols), "")
    for config, (formula, _) in report.savings.items():
        if counting and "Sub+NonZero+" in config:
            for name in _EMPTY.findall(formula):
                symbols[name], totals[name] = symbols[counting], totals[counting]
    return symbols, totals


def create_session(manager: Any, choice: RecomputeChoice) -> Recomputed:
    """Create the session that a manager runs, and return what runs again in it."""
    if not choice.plans:
        manager.create_session(choice.plans, choice.kept)
        return Recomputed()
    with tempfile.TemporaryDirectory(prefix="ortlab-") as folder:
        file = Path(folder) / "execution.onnx"
        manager.execution_graph_file = str(file)
        try:
            manager.create_session(choice.plans, choice.kept)
            return recomputed_in(file.read_bytes())
        finally:
            manager.execution_graph_file = ""


def absent_plans(execution: Execution) -> tuple[str, ...]:
    """Return the plans that were asked for, and of which nothing runs again."""
    if execution.options.memory_level or not execution.training:
        return ()
    return tuple(plan for plan in execution.plans if execution.recomputed.lacks(plan))


def absent_words(execution: Execution) -> str:
    """Say which plans a session does not apply, because its graph has no such cluster; empty if it applies all."""
    absent = absent_plans(execution)
    if not absent:
        return ""
    clusters = [
        part.split(":")[0] for config in execution.memory_report().savings for part in config.split(",")
    ]
    known = {part for config in execution.memory_report().savings for part in _names(config)}
    words = []
    for plan in absent:
        near = get_close_matches(plan.split(":")[0], dict.fromkeys(clusters), n=3)
        if plan.rsplit(":", 1)[0] in known:
            words.append(f"{plan} (another plan recomputes the same, or it would save nothing)")
        else:
            hint = f"; near: {', '.join(near)}" if near else ""
            words.append(f"{plan} (no such cluster here{hint})")
    return f"Recompute plans that are not applied: {'; '.join(words)}. lab.plan() lists those of this model."


def _names(config: str) -> list[str]:
    return [part.rsplit(":", 1)[0] for part in config.split(",")]


def recomputed_in(serialized: bytes) -> Recomputed:
    """Read what runs again from a serialised execution graph."""
    nodes = [node for node in onnx.load_model_from_string(serialized).graph.node if node.name.endswith(COPY)]
    return Recomputed(
        frozenset(node.name.removesuffix(COPY) for node in nodes),
        frozenset(node.op_type for node in nodes),
    )


def applied_counts(plans: Iterable[str], places: RecomputePlaces, done: Recomputed) -> dict[str, int]:
    """Count the places in which each plan is applied, by "<cluster>:<strategy>"; 0 for one that is not applied."""
    counts = {plan.rsplit(":", 1)[0]: 0 for plan in plans}
    best: dict[str, tuple[str, RecomputePlace]] = {}
    for name in counts:
        for place in places.of(name):
            if not done.nodes.issuperset(place.nodes):
                continue
            before = best.get(place.node)
            if before is None or len(before[1].nodes) < len(place.nodes):
                best[place.node] = name, place
    for name, _ in best.values():
        counts[name] += 1
    return counts


def layers_of(places: RecomputePlaces, modules: Places) -> Mapping[str, int]:
    """Count the layers of the model that the places of each plan are in, by "<cluster>:<strategy>".

    Leaves out a plan with a place outside of all layers, or with one whose module is not known.
    """
    found: dict[str, set[str]] = {}
    for place in places.places:
        names = (*place.nodes[::-1], *place.outputs)
        path = next((modules.of_name(name).module for name in names if "/" in name), "")
        found.setdefault(f"{place.cluster}:{place.strategy}", set()).add(layer_of(path))
    return {plan: len(layers) for plan, layers in found.items() if "" not in layers}
