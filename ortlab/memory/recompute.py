"""Recompute plans in a graph: their places, the trace that a step would have with them, and what each costs.

ORT's memory optimizer goes through the places from the last one to the first. It copies their nodes, lets the backward
and earlier copies read the copies' results (``memory_optimizer.cc``, `CreateRecomputeGraph` and `ModifyGraph`), and
orders the graph so that a copy runs right before the first node that needs it (``graph.cc``,
`MemoryEfficientTopologicalSort`). The same is done here with the trace of a profiled step, in a few ms.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from operator import add
from typing import TYPE_CHECKING, Final

from ortlab.memory.products import in_late_order, late_products
from ortlab.memory.trace import lifetimes

if TYPE_CHECKING:
    from ortlab.engine.execution import Execution
    from ortlab.memory.plan import MemoryPlan, PlanRow
    from ortlab.memory.trace import Trace, TracedNode
    from ortlab.runs.experiment import Experiment

EVERYWHERE: Final = -1
"""The count of a plan that acts in all its places."""


@dataclass(frozen=True)
class RecomputePlace:
    """One node of the graph whose results are kept for backward, and what would make them again."""

    cluster: str  # operators of `nodes`: "FusedMatMul+Add+"
    strategy: int  # 1 recompute, 2 recompute with compromise
    # Name of the node whose results are kept, in the graph that is executed without any plan; of a nameless one that of
    # its first result.
    node: str
    # Names of the nodes that would run again, in the order of execution; `node` is the last. "" for one without.
    nodes: tuple[str, ...]
    outputs: tuple[str, ...]  # results of `node` that backward needs
    # Whether it makes what one transformer layer hands to the next. Memory levels keep it: then each layer is
    # recomputed from there, and not from the start of the model.
    boundary: bool = False

    @property
    def plan(self) -> str:
        """Its plan without a count: "FusedMatMul+Add+:1"."""
        return f"{self.cluster}:{self.strategy}"


@dataclass(frozen=True)
class RecomputeChoice:
    """The plans and places that are recomputed."""

    plans: tuple[str, ...]  # as ORT is told them: each for all its places, since 1.19.2 cannot count them
    # Results that are hidden from ORT, by place: those of the plans' places that are not recomputed.
    kept: tuple[tuple[str, ...], ...]
    counts: Mapping[str, int]  # by "<cluster>:<strategy>": in how many places it recomputes


NOTHING: Final = RecomputeChoice((), (), {})
"""Nothing is recomputed."""


@dataclass(frozen=True)
class LevelSet:
    """What a memory level stands for in a model."""

    level: int  # 1 or 2
    plans: int  # that it applies
    places: int  # in which it recomputes
    all_plans: int  # that there are, without those that a higher level adds, as in `all_places`
    all_places: int
    layer_ends: int  # values that one layer hands to the next, from which each is recomputed

    def sentence(self) -> str:
        """Say in words what the level recomputes."""
        if not self.all_places:
            return f"memory_level={self.level} recomputes nothing here: there is no plan for this model."
        does = (
            f"memory_level={self.level} recomputes {_of(self.plans, self.all_plans, 'plan')}"
            f" in {_of(self.places, self.all_places, 'place')}"
        )
        if self.layer_ends:
            ends = "1 layer begins" if self.layer_ends == 1 else f"{self.layer_ends} layers begin"
            return f"{does}; it keeps what {ends} with, and starts again from there."
        return (
            f"{does}. It found no transformer layer to start again from, so that all it recomputes is there at once "
            "when the backward begins: expect little off the peak."
        )

    def __add__(self, other: LevelSet) -> LevelSet:
        """Put the sets of two parts of a model together; a plan of both counts twice."""
        level, *ours = astuple(self)
        other_level, *theirs = astuple(other)
        return LevelSet(max(level, other_level), *map(add, ours, theirs))


@dataclass(frozen=True)
class RecomputePlaces:
    """All places of all recompute plans of a graph."""

    places: tuple[RecomputePlace, ...] = ()  # in the order of the forward
    # Values that one transformer layer hands to the next, in the order of the forward; empty where none were found.
    boundaries: tuple[str, ...] = ()
    # Those in which no plan may act, because the switch `recompute` has copied one of their nodes already.
    ruled_out: tuple[RecomputePlace, ...] = ()

    def beside(self, copies: Collection[str]) -> RecomputePlaces:
        """Return the places that are left where nodes have been copied; `copies` are the names of the copies.

        ORT would give a second copy of a node the name of the first.
        """
        out = {
            place
            for place in self.places
            for name in (place.node, *place.nodes)
            if name in copies or name + COPY in copies
        }
        left = tuple(place for place in self.places if place not in out)
        return replace(self, places=left, ruled_out=tuple(place for place in self.places if place in out))

    def of(self, plan: str) -> tuple[RecomputePlace, ...]:
        """Return the places of `<cluster>:<strategy>`, whatever count follows."""
        name = ":".join(plan.split(":")[:2])
        return tuple(place for place in self.places if place.plan == name)

    def chosen(self, plans: Iterable[str]) -> RecomputeChoice:
        """Say where plans, as in `Options.memory_plan`, recompute.

        A count k means the first k places in the order of the forward: their results would otherwise be kept for
        longest.
        """
        return self._choice(
            {name: self.of(name)[: None if count == EVERYWHERE else count] for name, count in _counted(plans)}
        )

    def at_level(self, level: int) -> tuple[RecomputePlace, ...]:
        """Return the places that memory level 1 or 2 recomputes: all but those at the boundaries of layers.

        1.19.2 can make no session that recomputes two nodes without a name: it calls both copies "_recompute". Where
        there are two, plans that recompute such nodes are left out.
        """
        first: dict[str, RecomputePlace] = {}
        for place in self.places:
            if place.strategy <= level and not place.boundary:
                first.setdefault(place.node, place)  # ORT offers the recomputation without compromise first
        nameless = [place for place in first.values() if "" in place.nodes]
        if sum(place.nodes.count("") for place in nameless) > 1:
            left_out = {place.plan for place in nameless}
            return tuple(place for place in first.values() if place.plan not in left_out)
        return tuple(first.values())

    def of_level(self, level: int) -> RecomputeChoice:
        """Say which plans memory level 1 or 2 stands for, and where they act."""
        recomputed: dict[str, list[RecomputePlace]] = {}
        for place in self.at_level(level):
            recomputed.setdefault(place.plan, []).append(place)
        return self._choice(dict(sorted(recomputed.items())))

    def level_set(self, level: int) -> LevelSet:
        """Count what memory level 1 or 2 recomputes."""
        counts = [count for count in self.of_level(level).counts.values() if count]
        there = [place for place in self.places if place.strategy <= level]
        return LevelSet(
            level,
            plans=len(counts),
            places=sum(counts),
            all_plans=len({place.plan for place in there}),
            all_places=len({place.node for place in there}),
            layer_ends=len(self.boundaries),
        )

    def _choice(self, recomputed: Mapping[str, Sequence[RecomputePlace]]) -> RecomputeChoice:
        acting = {name: places for name, places in recomputed.items() if places}
        nodes = {place.node for places in acting.values() for place in places}
        there = (*self.places, *self.ruled_out)
        rest = (place for place in there if place.plan in acting and place.node not in nodes)
        return RecomputeChoice(
            plans=tuple(f"{name}:{EVERYWHERE}" for name in acting),
            kept=tuple({place.node: place.outputs for place in rest}.values()),
            counts={name: len(places) for name, places in recomputed.items()},
        )


def are_partial(plans: Iterable[str]) -> bool:
    """Tell whether some of these plans do not act in all their places."""
    return any(count != EVERYWHERE for _, count in _counted(plans))


def _counted(plans: Iterable[str]) -> Iterator[tuple[str, int]]:
    for plan in plans:
        for part in plan.split(","):
            name, count = part.rsplit(":", 1)
            if not name.endswith(":0"):  # strategy 0 switches a plan off
                yield name, int(count)


def _of(some: int, every: int, noun: str) -> str:
    many = noun if every == 1 else f"{noun}s"
    return f"all {every} {many}" if some == every and every > 1 else f"{some} of {every} {many}"


COPY: Final = "_recompute"
"""What ORT puts behind the names of a copied node and of its results (``memory_optimizer.cc``); ortlab does, too."""

HELD: Final = "_held"
"""What ortlab puts behind the name of a kept value that copies read through a node of their own."""


def with_places(trace: Trace, places: Iterable[RecomputePlace], plans: tuple[str, ...] = ()) -> Trace:
    """Return the trace that a step would have if some places were recomputed.

    `trace` is a step without plans, in the order that ORT gives to sessions with plans; `plans` is only noted in the
    result. Times and sizes of copies are predicted as those of the nodes that they repeat.
    """
    nodes = {node.name: node for node in trace.nodes}
    position = {node.name: number for number, node in enumerate(trace.nodes)}
    copies: dict[str, TracedNode] = {}
    copied: set[str] = set()
    replaced: set[str] = set()
    for place in sorted(places, key=lambda one: position[one.node], reverse=True):
        for name in place.nodes:
            if name not in copies:
                copies[name] = _copy(nodes[name], copied)
                copied.update(nodes[name].outputs)
        # All results: ORT looks at the graph twice, and then finds what an earlier copy reads of this node, too.
        replaced.update(nodes[place.node].outputs)
    replaced.discard("")
    again = [_reading_copies(node, replaced) for node in copies.values()]
    rest = [_reading_copies(node, replaced) if node.backward else node for node in trace.nodes]
    sizes = {
        output: trace.sizes.get(output.removesuffix(COPY), 0) for node in again for output in node.outputs
    }
    return replace(trace, nodes=tuple(_ordered(rest, again)), sizes={**trace.sizes, **sizes}, plans=plans)


PACKED: Final = "_packed"
"""What ortlab puts behind the name of a mask that is kept with eight entries in a byte."""

_ENTRIES_OF_A_BYTE: Final = 8

_DROPOUTS: Final = frozenset({"Dropout", "com.microsoft.BitmaskDropout"})
"""What ortlab makes again from its mask, which is kept."""


def with_values(trace: Trace, again: Collection[str]) -> Trace:
    """Return the trace that a step would have if the backward made some values of the forward again.

    As `with_places`, for what the switch `recompute` does: nodes of the forward run again whose results the backward
    or another copy reads, if these are in `again`. Masks of dropouts in `again` are kept packed instead. Where
    recomputation is nested, `again` has the copies, too, that are made first, and that other copies read.
    """
    forward, backward = trace.nodes[: trace.first_backward], trace.nodes[trace.first_backward :]
    late = late_products(backward, again)
    backward = tuple(backward[number] for number in in_late_order(backward, late))
    masks = {node.outputs[1]: node for node in forward if node.operator == "Dropout" and node.outputs[1:]}
    packed = {name: masks[name] for name in masks.keys() & set(again)}
    sizes = dict(trace.sizes)
    copies: list[TracedNode] = []
    runs = (
        (COPY, {name for name in again if not name.endswith(COPY)} - packed.keys()),
        (COPY + COPY, {name.removesuffix(COPY) for name in again if name.endswith(COPY)}),
    )
    for ending, names in runs:
        made = _repeated(forward, (*backward, *copies), names)
        masks_read = {node.inputs[1] for node in made if node.operator in _DROPOUTS}
        unpacked = packed.keys() if ending == COPY else packed.keys() & masks_read
        copied = {*unpacked, *(name for node in made for name in node.outputs if name)}
        backward = tuple(_reading_copies(node, copied, ending) for node in backward)
        copies = [_reading_copies(node, copied, ending) for node in copies]
        copies += [_copy(node, copied, ending) for node in made]
        copies += [_unpacking(packed[name], ending) for name in unpacked]
        sizes |= {name + ending: trace.sizes.get(name, 0) for name in copied}
    rest = []
    for node in (*forward, *backward):
        rest.append(node)
        rest += [_packing(packed[name]) for name in node.outputs if name in packed]
    sizes |= {name + PACKED: -(-trace.sizes.get(name, 0) // _ENTRIES_OF_A_BYTE) for name in packed}
    return replace(trace, nodes=tuple(_ordered(rest, copies)), sizes=sizes)


def _repeated(
    forward: Sequence[TracedNode], readers: Iterable[TracedNode], again: Collection[str]
) -> list[TracedNode]:
    """Return the nodes of the forward that make what of `again` is read, by `readers` or by one another, in order.

    A dropout is made again from its mask, which it then reads.
    """
    wanted = {name for node in readers for name in node.inputs if name in again}
    found: list[TracedNode] = []
    for node in reversed(forward):
        if not wanted.isdisjoint(node.outputs):
            read = node.inputs
            if node.operator in _DROPOUTS:
                node = replace(  # noqa: PLW2901 - the same node, as it runs again
                    node, inputs=(node.inputs[0], node.outputs[1], *node.inputs[1:]), outputs=node.outputs[:1]
                )
                read = node.inputs[:1]
            wanted.update(name for name in read if name in again)
            found.append(node)
    return found[::-1]


def _packing(dropout: TracedNode) -> TracedNode:
    """Return what packs the mask of a dropout in the forward."""
    name, mask = dropout.name, dropout.outputs[1]
    return replace(
        dropout,
        name=name + PACKED,
        operator="ortlab::packed_bits",
        inputs=(mask,),
        outputs=(mask + PACKED,),
        ms=0.0,
        recomputes=name,
    )


def _unpacking(dropout: TracedNode, ending: str) -> TracedNode:
    """Return what unpacks the mask of a dropout in the backward."""
    packing = _packing(dropout)
    return replace(
        packing,
        name=packing.name + ending,
        operator="ortlab::unpacked_bits",
        inputs=packing.outputs,
        outputs=(packing.inputs[0] + ending,),
        backward=True,
    )


def _copy(node: TracedNode, copied: Collection[str], ending: str = COPY) -> TracedNode:
    return replace(
        _reading_copies(node, copied, ending),
        name=node.name + ending,
        outputs=tuple(name and name + ending for name in node.outputs),
        backward=True,
        recomputes=node.name,
    )


def _reading_copies(node: TracedNode, replaced: Collection[str], ending: str = COPY) -> TracedNode:
    inputs = tuple(name + ending if name in replaced else name for name in node.inputs)
    return node if inputs == node.inputs else replace(node, inputs=inputs)


def _ordered(nodes: Iterable[TracedNode], copies: Iterable[TracedNode]) -> list[TracedNode]:
    """Put each copy, and the copies that it needs, in front of the first node that needs it.

    ORT may run the branches of one node's copies in another order; the same results live meanwhile.
    """
    waiting = {output: node for node in copies for output in node.outputs if output}
    order: list[TracedNode] = []
    for node in nodes:
        ahead = [node]
        while ahead:  # a stack: copies may need one another through the whole depth of a model
            needed = next((waiting[name] for name in ahead[-1].inputs if name in waiting), None)
            if needed is None:
                order.append(ahead.pop())
            else:
                ahead.append(needed)
                for output in needed.outputs:
                    waiting.pop(output, None)
    return order


@dataclass(frozen=True)
class PlanCost:
    """What one plan does to a step, all its places recomputed."""

    # Off the peak; predicted by simulation. Negative where the peak rises: ORT orders all nodes differently once there
    # is a plan, and what is recomputed needs memory as well.
    peak_saving_bytes: float
    cost_ms: float  # added to the step; predicted as the time of the nodes that run twice
    measured_saving_bytes: float | None = None  # None until it is measured, as is the next
    measured_cost_ms: float | None = None


def predicted_costs(
    plain: Trace, ordered: Trace, places: RecomputePlaces, configs: Iterable[str]
) -> dict[str, PlanCost]:
    """Predict what each of some plans does on its own.

    `plain` is a profiled step without plans, as it runs, and `ordered` the same in the order that ORT gives to sessions
    with plans. Plans of one configuration, with commas between them, are predicted together; those without places are
    left out.
    """
    peak = lifetimes(plain).peak
    found = {}
    for config in configs:
        acting = [place for part in config.split(",") for place in places.of(part)]
        if acting:
            trace = with_places(ordered, acting)
            found[config] = PlanCost(float(peak - lifetimes(trace).peak), trace.recomputed_ms)
    return found


def predicted_savings(
    places: RecomputePlaces, configs: Iterable[str], sizes: Mapping[str, int]
) -> dict[str, float]:
    """Return the bytes that plans no longer keep, by configuration; `sizes` are bytes by name of a result.

    What a size is missing for is left out, and so are a compromise, which saves a part of its results, and plans that
    are offered together, of which ORT counts a part as well.
    """
    found = {}
    for config in configs:
        acting = places.of(config) if "," not in config else ()
        outputs = [sizes.get(name) for place in acting for name in place.outputs if place.strategy == 1]
        if outputs and None not in outputs:
            found[config] = float(sum(filter(None, outputs)))
    return found


def best_costs(costs: Mapping[str, PlanCost], count: int, *, beyond: float = 0.0) -> dict[str, PlanCost]:
    """Return the `count` plans with the most bytes off the peak for each ms, best first.

    `beyond` is how many bytes any plan takes off, by the order of nodes that comes with it; they are no plan's merit.
    """
    saving = [(config, cost) for config, cost in costs.items() if cost.peak_saving_bytes > beyond]
    saving.sort(key=lambda one: (beyond - one[1].peak_saving_bytes) / max(one[1].cost_ms, 1e-9))
    return dict(saving[:count])


@dataclass(frozen=True)
class KnownCosts:
    """Costs of plans, and the graph and step that they were found for."""

    key: object = None  # what `costs_key` gave then
    costs: Mapping[str, PlanCost] = field(default_factory=dict)  # by configuration of the plan
    # What any plan takes off the peak, because ORT orders nodes differently once there is one; predicted.
    by_order_bytes: float = 0.0
    recomputed: tuple[PlanRow, ...] = ()  # values of the switch `recompute` with their costs
    savings: Mapping[str, float] = field(default_factory=dict)  # by configuration, for what no shape tells

    def written_into(self, plan: MemoryPlan, key: object) -> MemoryPlan:
        """Return a plan with these costs if they are of the same graph and step; else the plan as it is."""
        if not self.costs or key != self.key:
            return plan
        rows, recomputed = (
            tuple(
                replace(row, **vars(self.costs[row.config])) if row.config in self.costs else row
                for row in some
            )
            for some in (plan.with_savings(self.savings).rows, self.recomputed)
        )
        return replace(plan, rows=rows, recomputed=recomputed, order_saving_bytes=self.by_order_bytes)


def costs_key(execution: Execution, experiment: Experiment | None) -> object:
    """Return what costs depend on: the gradient graph, and the step with its start."""
    step = None if experiment is None else (experiment.step, experiment.start.digest)
    return execution.built.digest, step
