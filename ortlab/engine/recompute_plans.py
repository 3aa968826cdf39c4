"""Recompute plans: what ORT's memory optimizer offers, where each would act, and which a session really applies.

1.19.2 passes over a plan whose cluster the graph does not have, and says nothing of it; and where two plans would
recompute the same result, it takes one of them. So the places are read from what it says while it looks, and the plans
that are applied from the graph that the session executes.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import onnx

from ortlab.engine.inspection.places import Places
from ortlab.engine.operators.quick_choice import BEHIND_PLANS
from ortlab.engine.passes.graph_edits import aten_operator
from ortlab.engine.saved_activations import kept_bytes, name_of
from ortlab.errors import BuildError
from ortlab.graphs.nodes import YIELD, without_stand_in
from ortlab.memory import insight
from ortlab.memory.dialects import operators
from ortlab.memory.plan_reading import read_plan
from ortlab.memory.recompute import COPY, RecomputePlace, RecomputePlaces, predicted_savings
from ortlab.memory.saved_activations import layer_of

if TYPE_CHECKING:
    import torch

    from ortlab.engine.execution import Execution
    from ortlab.engine.runtime_log import Line
    from ortlab.memory.plan import MemoryPlan
    from ortlab.memory.recompute import RecomputeChoice


PROBE_ANYWHERE = "1:0"
"""Look for subgraphs anywhere; ORT's default."""


@dataclass(frozen=True)
class MemoryReport:
    """The answer of `get_serialized_ortmodule_memory_stat`, for a session without any plan applied."""

    insight: str  # ORT's MemoryInsight table
    # By plan ("Gelu+:1:-1"): the predicted saving in bytes, summed over its places, in terms of symbolic dimensions;
    # and the number of places.
    savings: Mapping[str, tuple[str, int]]
    symbols: Mapping[str, int]  # sizes of the symbolic dimensions in the batch that the graph was built with
    # For each symbol that counts labels which are not ignored: the number of all labels, a formula.
    label_totals: Mapping[str, str] = field(default_factory=dict)


_ATTENTION: Final = frozenset({"Softmax", "BiasSoftmax", "BiasSoftmaxDropout"})

_NORMS: Final = frozenset({"LayerNormalization", "SimplifiedLayerNormalization"})

_ON_THE_WAY: Final = _NORMS | {"Dropout", "BitmaskDropout", "Cast"}
"""What may stand between the end of a layer and the value that goes into the next one."""

_CANDIDATE: Final = re.compile(
    r"Find candidate output named \[(?P<output>.+)\] of Node (?P<node>.*)\([^()]*\)$"
)

_COMPROMISED: Final = re.compile(r"Searching Node .* for compromised recompute$")

_LOOKS: Final = re.compile(r"Enter SelectRecomputeSubgraph for Node (?P<node>.*)\((?P<operator>[^()]*)\)$")

_FOUND: Final = re.compile(
    r"Node (?P<node>.*?)\((?P<operator>[^()]*)\) can be recomputed(?: with its precedent nodes: (?P<before>.*))?$"
)

_BEFORE: Final = re.compile(r"\(name:(?P<name>.*?), type:(?P<operator>[^()]*)\)")


class _Found(NamedTuple):
    cluster: str
    strategy: int
    node: str
    nodes: tuple[str, ...]


def find_places(lines: Sequence[Line], graph: onnx.GraphProto) -> RecomputePlaces:
    """Read the places from ORT's messages; they come in the order of the forward.

    `lines` are what it said at VERBOSE while it was asked for its plans anywhere in `graph` (``recompute_analysis.cc``,
    ``CheckNodeForRecompute``): node by node from the graph's end to its start.
    """
    makers = {output: node for node in graph.node for output in node.output if output}
    outputs: dict[str, list[str]] = {}
    for line in lines:
        if match := _CANDIDATE.match(line.text):
            maker = makers.get(match["output"])
            outputs.setdefault(name_of(maker) if maker else match["node"], []).append(match["output"])
    nameless = _Nameless(graph, outputs)
    found: list[_Found] = []
    node, strategy, compromises = "", 1, False
    for line in lines:
        if _COMPROMISED.match(line.text):
            compromises = True
        elif match := _LOOKS.match(line.text):
            if not compromises:
                node = match["node"] or nameless.next(match["operator"])
            strategy, compromises = 2 if compromises else 1, False
        elif match := _FOUND.match(line.text):
            before = _BEFORE.findall(match["before"] or "")
            nodes = [*before, (match["node"], match["operator"])]
            found.append(
                _Found(
                    cluster="".join(f"{operator}+" for _, operator in nodes),
                    strategy=strategy,
                    node=node,
                    nodes=tuple(name for name, _ in nodes),
                )
            )
    order = {output: number for node in graph.node for number, output in enumerate(node.output)}
    stashed = {output for several in outputs.values() for output in several}
    layers = boundaries(graph, stashed)
    places = tuple(
        RecomputePlace(
            *one,
            outputs=tuple(sorted(outputs.get(one.node, ()), key=lambda output: order.get(output, 0))),
            boundary=not layers.isdisjoint(outputs.get(one.node, ())),
        )
        for one in reversed(found)
    )
    return RecomputePlaces(
        places, tuple(output for node in graph.node for output in node.output if output in layers)
    )


class _Nameless:
    """The nodes without a name whose results are kept: those of a function that ORT has put in place of a node.

    ORT tells them apart by their operator only, and looks at the last one first.
    """

    def __init__(self, graph: onnx.GraphProto, outputs: Mapping[str, Sequence[str]]) -> None:
        self._left: dict[str, list[str]] = {}
        for node in graph.node:
            if not node.name and name_of(node) in outputs:
                self._left.setdefault(node.op_type, []).append(name_of(node))

    def next(self, operator: str) -> str:
        """Return what the next node of an operator that ORT looks at is known as; empty if none is left."""
        left = self._left.get(operator)
        return left.pop() if left else ""


_WHERE_READ: Final = "" if sys.platform == "linux" else "; its messages can be read on Linux only"


def check_places(places: RecomputePlaces, report: str) -> None:
    """Raise BuildError unless the places found are those that ORT counts in `report`, its MemoryInsight table."""
    counted: Counter[tuple[str, int]] = Counter()
    for row in insight.read(report).rows:
        counted.update({(option.cluster, option.strategy): row.places for option in row.options})
    found = Counter((place.cluster, place.strategy) for place in places.places)
    if found != counted:
        cluster, strategy = next(iter((counted - found) + (found - counted)))
        raise BuildError(
            "The places of this model's recompute plans cannot be told.",
            why=f"ONNX Runtime counts {counted[cluster, strategy]} places of {cluster}:{strategy} and names "
            f"{found[cluster, strategy]} of them{_WHERE_READ}.",
            fix="Use memory_level=0 and plans for all places, as in Gelu+:1:-1.",
        )


def boundaries(graph: onnx.GraphProto, stashed: Collection[str]) -> frozenset[str]:
    """Return the values that transformer layers hand to each other, among those that backward needs (`stashed`).

    They are enough to recompute a layer from: one for each attention whose residual is found. Where a layer
    normalisation comes last, it is the normalisation's input, so that its result is recomputed, too. `graph` is a
    training graph, as it is executed.
    """
    # Before the YieldOp, which hands the outputs to PyTorch.
    forward = list(takewhile(lambda node: node.op_type != YIELD, graph.node))
    producers = {output: node for node in forward for output in node.output if output}
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in forward:
        for value in node.input:
            readers.setdefault(value, []).append(node)
    order = {id(node): number for number, node in enumerate(forward)}
    found = set[str]()
    for node in forward:
        if node.op_type in _ATTENTION:
            residual = _residual(node, producers, readers, order)
            found.update(_worth_keeping(residual, producers, stashed))
    return frozenset(found)


def _residual(
    attention: onnx.NodeProto,
    producers: Mapping[str, onnx.NodeProto],
    readers: Mapping[str, list[onnx.NodeProto]],
    order: Mapping[int, int],
) -> str:
    """Return the value that an attention is made of and that is added to its result; empty if there is none."""
    above = _ancestors(attention, producers)
    waiting = deque(node for value in attention.output for node in readers.get(value, ()))
    below = set(attention.output)
    additions = []
    seen = set[int]()
    while waiting:
        node = waiting.popleft()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if node.op_type == "Add" and any(value in above for value in node.input):
            additions.append(node)
            continue
        below.update(node.output)
        waiting.extend(reader for value in node.output for reader in readers.get(value, ()))
    if not additions:
        return ""
    first = min(additions, key=lambda node: order[id(node)])
    return next((value for value in first.input if value in above and value in producers), "")


def _ancestors(node: onnx.NodeProto, producers: Mapping[str, onnx.NodeProto]) -> frozenset[str]:
    found = set[str]()
    waiting = [value for value in node.input if value]
    while waiting:
        value = waiting.pop()
        if value in found:
            continue
        found.add(value)
        if value in producers:
            waiting.extend(one for one in producers[value].input if one)
    return frozenset(found)


def _worth_keeping(
    residual: str, producers: Mapping[str, onnx.NodeProto], stashed: Collection[str]
) -> list[str]:
    """Return the saved value that the residual is cheaply made of, or the residual, or nothing."""
    chosen = [residual] if residual in stashed else []
    value = residual
    while value in producers and producers[value].op_type in _ON_THE_WAY:
        normalises = producers[value].op_type in _NORMS
        value = producers[value].input[0]
        if normalises:
            return [value] if value in stashed else chosen
    return chosen


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
    read = read_plan(
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
    return _with_worked_out(read, execution, model, part)


def _with_worked_out(plan: MemoryPlan, execution: Execution, model: torch.nn.Module, part: str) -> MemoryPlan:
    """Say what plans save whose formula has sizes that no input gives: the bytes of the same results, from shapes."""
    # ORT names such sizes as it infers shapes, behind a convolution for one; ortlab computes them for this batch.
    unresolved = [row.config for row in plan.rows if row.saving_bytes is None]
    places = _places(execution, needed=True) if unresolved else None
    if places is None:
        return plan
    return plan.with_savings(predicted_savings(places, unresolved, kept_bytes(execution, model, part)))


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
    with manager.graph_written() as file:
        manager.create_session(choice.plans, choice.kept)
        graph = file.read_bytes()
        if manager.users_file:  # of `save_onnx`; a session writes its graph to one file only
            Path(manager.users_file).write_bytes(graph)
        return recomputed_in(graph, manager.copies)


def absent_words(execution: Execution) -> str:
    """Say which plans a session does not apply, because its graph has no such cluster; empty if it applies all."""
    if execution.options.memory_level or not execution.training:
        return ""
    absent = [plan for plan in execution.plans if execution.recomputed.lacks(plan)]
    if not absent:
        return ""
    # By "<cluster>:<strategy>", in the order of the report.
    known = dict.fromkeys(
        part.rsplit(":", 1)[0] for config in execution.memory_report().savings for part in config.split(",")
    )
    clusters = dict.fromkeys(name.split(":")[0] for name in known)
    words = []
    for plan in absent:
        near = get_close_matches(plan.split(":")[0], clusters, n=3)
        if plan.rsplit(":", 1)[0] in known:
            words.append(f"{plan} (another plan recomputes the same, or it would save nothing)")
        else:
            hint = f"; near: {', '.join(near)}" if near else ""
            taken = ", or `recompute` makes it again already" if execution.options.recompute else ""
            words.append(f"{plan} (no such cluster here{taken}{hint})")
    return f"Recompute plans that are not applied: {'; '.join(words)}. lab.plan() lists those of this model."


def recomputed_in(serialized: bytes, others: Collection[str] = ()) -> Recomputed:
    """Read what plans recompute from a serialised execution graph; `others` are copies that no plan has made."""
    graph = onnx.load_model_from_string(serialized).graph
    nodes = [node for node in graph.node if node.name.endswith(COPY) and node.name not in others]
    planned = {call: operator for operator, call in BEHIND_PLANS.items()}
    return Recomputed(
        frozenset(node.name.removesuffix(COPY) for node in nodes),
        frozenset(planned.get(aten_operator(node)) or without_stand_in(node).op_type for node in nodes),
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
