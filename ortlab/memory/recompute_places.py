"""The places of recompute plans in a graph, and which of them a set of plans recomputes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

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
        return LevelSet(
            max(self.level, other.level),
            self.plans + other.plans,
            self.places + other.places,
            self.all_plans + other.all_plans,
            self.all_places + other.all_places,
            self.layer_ends + other.layer_ends,
        )


@dataclass(frozen=True)
class RecomputePlaces:
    """All places of all recompute plans of a graph."""

    places: tuple[RecomputePlace, ...] = ()  # in the order of the forward
    # Values that one transformer layer hands to the next, in the order of the forward; empty where none were found.
    boundaries: tuple[str, ...] = ()

    def of(self, plan: str) -> tuple[RecomputePlace, ...]:
        """Return the places of `<cluster>:<strategy>`, whatever count follows."""
        cluster, strategy = plan.split(":")[:2]
        return tuple(
            place for place in self.places if (place.cluster, place.strategy) == (cluster, int(strategy))
        )

    def chosen(self, plans: Iterable[str]) -> RecomputeChoice:
        """Say where plans, as in `Options.memory_plan`, recompute.

        A count k means the first k places in the order of the forward: their results would otherwise be kept for
        longest.
        """
        recomputed: dict[str, list[RecomputePlace]] = {}
        for name, count in _counted(plans):
            places = self.of(name)
            recomputed[name] = list(places if count == EVERYWHERE else places[:count])
        return self._choice(recomputed)

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
            left_out = {(place.cluster, place.strategy) for place in nameless}
            return tuple(one for one in first.values() if (one.cluster, one.strategy) not in left_out)
        return tuple(first.values())

    def of_level(self, level: int) -> RecomputeChoice:
        """Say which plans memory level 1 or 2 stands for, and where they act."""
        recomputed: dict[str, list[RecomputePlace]] = {}
        for place in self.at_level(level):
            recomputed.setdefault(f"{place.cluster}:{place.strategy}", []).append(place)
        return self._choice(dict(sorted(recomputed.items())))

    def level_set(self, level: int) -> LevelSet:
        """Count what memory level 1 or 2 recomputes."""
        counts = [count for count in self.of_level(level).counts.values() if count]
        there = [place for place in self.places if place.strategy <= level]
        return LevelSet(
            level,
            plans=len(counts),
            places=sum(counts),
            all_plans=len({(place.cluster, place.strategy) for place in there}),
            all_places=len({place.node for place in there}),
            layer_ends=len(self.boundaries),
        )

    def _choice(self, recomputed: Mapping[str, list[RecomputePlace]]) -> RecomputeChoice:
        acting = {name: places for name, places in recomputed.items() if places}
        nodes = {place.node for places in acting.values() for place in places}
        kept = {
            place.node: place.outputs for name in acting for place in self.of(name) if place.node not in nodes
        }
        return RecomputeChoice(
            plans=tuple(f"{name}:{EVERYWHERE}" for name in acting),
            kept=tuple(kept.values()),
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
