"""What the switch `recompute` asks for, in a graph: which values of the forward are kept for the backward.

"layers" keeps what each layer hands on, and makes the rest of a layer again when its backward begins, as gradient
checkpointing does; "layers:2" does so for every two layers, "layers:1/2" for each half of a layer, "layers[:4]" for the
first four. In a model without a list of layers, the blocks count that its forward calls several times.
"layers:4 nested" keeps what every fourth layer hands on, first makes again what the others do, and from that layer by
layer the rest. Names and patterns of modules do the same as "layers" for these modules. "all but matmuls" keeps what
products of matrices and convolutions return, and makes all else again; "all but linear" does not keep products of two
activations, such as attention has. Both can be said of layers and modules: "layers[4:8] but linear".
"""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Final, TypeAlias, cast
from weakref import WeakKeyDictionary

from ortlab.engine.baselines import SMALLEST_SHARE, are_blocks, count_numbers, find_layers
from ortlab.engine.passes.graph_edits import FLOAT_TYPES, WITHOUT_VALUES
from ortlab.engine.passes.recompute import (
    ForwardPass,
    Recomputing,
    recomputing,
    repeated,
)
from ortlab.engine.passes.training_graph import GraphInfo
from ortlab.errors import OptionError, did_you_mean
from ortlab.graphs.nodes import CALL, executed_operator, joined, path_in, scopes_in
from ortlab.memory.plan import RECOMPUTE_IS, PlanRow
from ortlab.memory.products import is_product
from ortlab.memory.recompute import COPY
from ortlab.options.switches import (
    ALL_BUT_MATMULS,
    LAYERS,
    LINEAR,
    MATMULS,
    WAYS,
    LayerRange,
    kept_words,
    read_layers,
)

if TYPE_CHECKING:
    import onnx
    import torch

    from ortlab.engine.execution import Execution
    from ortlab.engine.kept_builds import BuiltGraph

_ALL: Final = "all"
_BUT: Final = " but "


@dataclass(frozen=True)
class Region:
    """What runs again together: it hands on what others read of it, and may keep products inside."""

    of: object  # the layers or the module
    kept: str = ""  # "matmuls", "linear", or nothing
    halves: bool = False  # whether it is two regions, as equal in products as a single value can part them
    second: bool = False  # whether it is the second of them
    # Of what it is a part, that runs again as a whole first, to make again what its parts hand on; None for no part.
    within: object = None
    # The scopes around it and the number of the call: a module that is called several times is as many regions.
    call: tuple[str, ...] = ()

    @property
    def whole(self) -> Region:
        """The region that this one is a part of, or itself."""
        return self if self.within is None else Region(self.within, self.kept, call=self.call)


WHOLE: Final = "whole"
"""What a region is of that is no part of the model, but all of it: nothing but products is kept."""

Blocks: TypeAlias = Callable[[], Sequence[str]]
"""Returns the paths of the blocks that a forward calls several times; see `called_again`."""

Regions = Mapping[str, Region]
"""By path of a module whose forward runs again: the region that it is in."""


def find_regions(
    module: torch.nn.Module, words: Sequence[str], part: str = "", again: Blocks = tuple
) -> Regions | Region:
    """Say which modules of a model run again, and which of them together; one region for "all but ...".

    `words` are what `Options.recompute` holds. `part` is the path of the module in the model that it is a part of,
    whose names are asked for, and which may have them elsewhere. `again` is asked where no list has layers.
    Raises OptionError, with near names, where the model has no such modules or layers.
    """
    if words[0].startswith(f"{_ALL}{_BUT}"):
        return Region(WHOLE, words[0].partition(_BUT)[2])
    ranges = [found for found in map(read_layers, words) if found is not None]
    if not ranges:
        named = [word.partition(_BUT) for word in words]
        return {
            path: Region(path, kept)
            for pattern, _, kept in named
            for path in _matching(module, pattern, part)
        }
    layers = numbered_layers(module, again)
    found: dict[str, Region] = {}
    for one in ranges:
        some = layers[one.first : one.end]
        if not some:
            raise OptionError(
                f"{type(module).__name__} has no layers {str(one)!r} to recompute.",
                why=f"It has {len(layers)}, numbered from 0.",
                fix=f"For example {LayerRange(one.first % len(layers), kept=one.kept)}.",
            )
        for path, inside, number in some:
            stretch = (inside, number // one.together)
            found[path] = (
                Region((inside, number), one.kept, one.halves, within=stretch)
                if one.nested
                else Region(stretch, one.kept, one.halves)
            )
    return found


def numbered_layers(module: torch.nn.Module, again: Blocks = tuple) -> list[tuple[str, str, int]]:
    """Return the layers that repeat, in the model's order: path, path of the list that it is in, number in that.

    Where no list has any, these are the blocks that the forward calls `again`. Raises OptionError where there are none.
    """
    paths = {id(one): path for path, one in module.named_modules()}
    try:
        lists = find_layers(module)
    except OptionError as error:
        if blocks := again():
            return [(path, path, 0) for path in blocks]
        raise OptionError(
            f"{type(module).__name__} has no repeated layers to recompute.",
            why=f"{error.why} A block that the forward calls several times counts, too, once a step has run.",
            fix='Name modules, as in recompute=["encoder.layer.*.attention"], or use recompute="all but matmuls".',
        ) from None
    return [
        (paths[id(layer)], layers.path, number)
        for layers in lists
        for number, layer in enumerate(layers.modules)
    ]


def called_again(graph: onnx.GraphProto, module: torch.nn.Module) -> tuple[str, ...]:
    """Return the paths of the blocks that a forward calls several times, in the model's order, none inside another.

    A block has parts and parameters, at least a tenth of those that the largest of them has.
    """
    known = dict(module.named_modules())
    named = {tuple(scopes_in(node.name)) for node in graph.node}
    called = {
        path_in(scopes[: depth + 1], known)
        for scopes in named
        for depth, scope in enumerate(scopes)
        if CALL in scope
    }
    sizes = {
        path: count_numbers(block) for path, block in known.items() if path in called and are_blocks([block])
    }
    large = [path for path, size in sizes.items() if size and size >= SMALLEST_SHARE * max(sizes.values())]
    return tuple(path for path in large if not any(path.startswith(f"{outer}.") for outer in large))


def _matching(module: torch.nn.Module, pattern: str, part: str) -> list[str]:
    known = [path for path, _ in module.named_modules() if path]
    found = [path for path in known if fnmatch.fnmatchcase(joined(part, path), pattern)]
    if not found and part and fnmatch.fnmatchcase(part, pattern):
        return [""]
    if not found and not part:
        near = did_you_mean(pattern, [LAYERS, ALL_BUT_MATMULS, *known], most=3)
        raise OptionError(
            f"{type(module).__name__} has no module {pattern!r} to recompute.",
            why="recompute takes paths as model.named_modules() gives them, or patterns of such, beside "
            '"layers", "layers[:4]", "layers:2" and "all but matmuls".',
            fix=near or f"For example {', '.join(map(repr, known[:3])) or LAYERS}.",
        )
    # What lies inside a module that runs again runs again with it.
    return [one for one in found if not any(one.startswith(f"{outer}.") for outer in found)]


def kept_values(
    forward: ForwardPass, regions: Regions | Region, modules: Collection[str]
) -> tuple[frozenset[str], frozenset[str]]:
    """Return the values that are kept: of a region, what the rest of the model reads, and the products it is to keep.

    Beside them those that parts of a nested region hand on, which are made again before the rest is made of them.
    `modules` are the paths of the modules that the names in the graph begin with.
    """
    if isinstance(regions, Region):
        products = (
            name
            for place in forward.places
            if _is_product(forward, place, regions.kept)
            for name in forward.nodes[place].output
        )
        return frozenset(products), frozenset()
    inside = regions_of_nodes(forward, regions, modules)
    wholes = {place: region and region.whole for place, region in inside.items()}
    kept = _handed_on(forward, wholes)
    return kept, _handed_on(forward, inside) - kept if wholes != inside else frozenset()


def _handed_on(forward: ForwardPass, inside: Mapping[int, Region | None]) -> frozenset[str]:
    kept = set[str]()
    for place in forward.places:
        node, region = forward.nodes[place], inside[place]
        if region is None or (region.kept and _is_product(forward, place, region.kept)):
            kept.update(name for name in node.output if name)
        if node.op_type not in WITHOUT_VALUES:
            kept.update(
                name for name in node.input if name in forward.values and inside[forward.made[name]] != region
            )
    return frozenset(kept)


def _is_product(forward: ForwardPass, place: int, which: str) -> bool:
    """Tell whether a node is a product of matrices or a convolution; with "linear", one with a weight."""
    node = forward.nodes[place]
    if not is_product(executed_operator(node)):
        return False
    return which != LINEAR or any(name in forward.determined for name in node.input if name)


def regions_of_nodes(
    forward: ForwardPass, regions: Regions, modules: Collection[str]
) -> dict[int, Region | None]:
    """Return the region of each node of the forward; a node without a module's name goes with what it reads."""
    found: dict[int, Region | None] = {}
    by_scopes: dict[tuple[str, ...], Region | None] = {}
    for place in forward.places:
        node = forward.nodes[place]
        name = next((one for one in (node.name, *node.output) if "/" in one), "")
        if name:
            scopes = tuple(scopes_in(name))
            if scopes not in by_scopes:
                by_scopes[scopes] = _region(scopes, regions, modules)
            found[place] = by_scopes[scopes]
        else:
            before = next((forward.made[one] for one in node.input if one in forward.values), None)
            found[place] = None if before is None else found[before]
    by_region: dict[Region, list[int]] = {}
    for place, region in found.items():
        if region is not None and region.halves:
            by_region.setdefault(region, []).append(place)
    for region, places in by_region.items():
        order = _as_needed(forward, places)
        second = replace(region, second=True)
        found.update(dict.fromkeys(order[_half(forward, order) :], second))
    return found


def _as_needed(forward: ForwardPass, places: Sequence[int]) -> list[int]:
    """Return a region's nodes in an order in which each stands right in front of the first that needs it."""
    inside, order = set(places), dict[int, None]()
    read = {forward.made.get(name) for place in places for name in forward.nodes[place].input}
    waiting = [place for place in reversed(places) if place not in read]
    while waiting:
        place = waiting[-1]
        makers = (forward.made.get(name, -1) for name in forward.nodes[place].input)
        missing = [one for one in makers if one in inside and one not in order]
        if missing:
            waiting += reversed(missing)
        else:
            order[waiting.pop()] = None
    return list(order)


def _half(forward: ForwardPass, places: Sequence[int]) -> int:
    """Return how many of a region's nodes are its first half: behind them a single value is needed of all before.

    Of such positions it is the one that parts the products best, the last of several; all nodes where there is none.
    """
    last_read: dict[str, int] = {}
    for number, place in enumerate(places):
        for name in forward.nodes[place].input:
            last_read[forward.root(name)] = number
    needed = set[str]()
    products, cuts = 0, [(0, 0)]
    for number, place in enumerate(places):
        needed.update(
            root
            for root in map(forward.root, forward.nodes[place].output)
            if forward.types.get(root) in FLOAT_TYPES
            and root not in forward.determined
            and last_read.get(root, -1) > number
        )
        needed = {root for root in needed if last_read[root] > number}
        products += _is_product(forward, place, MATMULS)
        if len(needed) == 1:
            cuts.append((products, number + 1))
    best = min(abs(2 * before - products) for before, _ in cuts)
    return max(end for before, end in cuts if abs(2 * before - products) == best) or len(places)


def _region(scopes: Sequence[str], regions: Regions, modules: Collection[str]) -> Region | None:
    paths = [path_in(scopes[:depth], modules) for depth in range(len(scopes) + 1)]
    of = paths[-1]
    while of and of not in regions:
        of = of.rpartition(".")[0]
    if of not in regions:
        return None
    depth = next(depth for depth, path in enumerate(paths) if not of or f"{path}.".startswith(f"{of}."))
    *around, called = scopes[:depth] or [""]
    return replace(regions[of], call=(*around, called.partition(CALL)[2]))


def made_again(
    built: BuiltGraph, module: torch.nn.Module, inputs: Collection[str]
) -> dict[str, tuple[frozenset[str], ...]]:
    """Return what the backward makes again, layer by layer, by what is kept inside; empty without repeated layers.

    `built` is a graph in which nothing is recomputed.
    """
    try:
        layers = numbered_layers(module, partial(called_again, built.models.optimized_model.graph, module))
    except OptionError:
        return {}
    forward = ForwardPass(built.models.optimized_model, inputs)
    modules = [path for path, _ in module.named_modules()]
    found = {}
    for way in WAYS:
        one = LayerRange.in_way(way)
        regions = {
            path: Region(number, one.kept, one.halves, within=number if one.nested else None)
            for number, (path, _, _) in enumerate(layers)
        }
        inside = regions_of_nodes(forward, regions, modules)
        by_layer: list[set[str]] = [set() for _ in layers]
        for name in repeated(forward, *kept_values(forward, regions, modules))[0]:
            region = inside[forward.made[name if name in forward.made else name.removesuffix(COPY)]]
            if region is not None:
                by_layer[cast("int", region.of)].add(name)
        found[way] = tuple(map(frozenset, by_layer))
    return found


def recomputed_rows(
    execution: Execution, part: str, wishes: Iterable[tuple[str, ...]]
) -> dict[PlanRow, frozenset[str]]:
    """Return a row for each value of the switch `recompute`, with the values of the graph that are then made again.

    `part` is the path of the wrapped part that is executed, empty for the whole model. A wish that names what it does
    not have, or under which nothing is made again, is left out.
    """
    forward = ForwardPass(execution.unrepeated.models.optimized_model, execution.user_inputs)
    modules = [path for path, _ in execution.module.named_modules()]
    again = partial(called_again, execution.unrepeated.models.optimized_model.graph, execution.module)
    found = {}
    for words in dict.fromkeys(wishes):
        try:
            regions = find_regions(execution.module, words, part, again)
        except OptionError:
            continue
        values, nodes = repeated(forward, *kept_values(forward, regions, modules))
        kept, rest = kept_words(words)
        row = PlanRow(
            f"{RECOMPUTE_IS}{','.join(words)}",
            cluster="",
            strategy=1,
            frequency=nodes,
            saving_symbolic="",
            saving_bytes=None,
            enabled=execution.options.recompute == words,
            sentence=f"Keep {kept} and recompute {rest}.",
        )
        if nodes:
            found[row] = values
    return found


# --- the graph that sessions are made of --------------------------------------------------------------------------

_REWRITTEN: Final[WeakKeyDictionary[BuiltGraph, dict[object, tuple[BuiltGraph, Recomputing]]]] = (
    WeakKeyDictionary()
)
"""By graph, then by the words: what is read of a graph is kept with it."""


def recomputed_graph(
    built: BuiltGraph, words: tuple[str, ...], module: torch.nn.Module, inputs: Collection[str], part: str
) -> tuple[BuiltGraph, Recomputing]:
    """Return a graph whose backward makes again what `words` say, and how it was made; worked out once per graph.

    `module` is the one that was exported, `part` its path in a larger model, and `inputs` the names of the graph's
    inputs that a call gives.
    """
    known = _REWRITTEN.setdefault(built, {})
    if words not in known:
        forward = ForwardPass(built.models.optimized_model, inputs)
        again = partial(called_again, built.models.optimized_model.graph, module)
        regions = find_regions(module, words, part, again)
        modules = [path for path, _ in module.named_modules()]
        made = recomputing(forward, *kept_values(forward, regions, modules))
        known[words] = _built_of(built, made), made
    return known[words]


def _built_of(built: BuiltGraph, made: Recomputing) -> BuiltGraph:
    models = copy.copy(built.models)
    models.optimized_model = made.model
    digest = sha256(made.model.SerializeToString()).hexdigest()
    # What copies read of the outputs is read by the backward.
    saved = {*built.info.module_output_indices_requires_save_for_backward, *made.returned}
    info = GraphInfo(built.info, module_output_indices_requires_save_for_backward=sorted(saved))
    return replace(built, models=models, info=info, digest=digest)
