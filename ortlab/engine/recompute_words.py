"""What the switch `recompute` asks for, in a graph: which values of the forward are kept for the backward.

"layers" keeps what each layer hands on, and makes the rest of a layer again when its backward begins, as gradient
checkpointing does; "layers:2" does so for every two layers. Names and patterns of modules do the same for these
modules. "all but matmuls" keeps what products of matrices and convolutions return, and makes all else again.
"""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from ortlab.engine.baselines import find_layers
from ortlab.engine.passes.recompute import WITHOUT_VALUES, ForwardPass, Recomputing, recomputing
from ortlab.engine.passes.training_graph import GraphInfo
from ortlab.errors import OptionError, did_you_mean
from ortlab.graphs.nodes import executed_operator, joined, path_in, scopes_in
from ortlab.options.switches import ALL_BUT_MATMULS, LAYERS

if TYPE_CHECKING:
    import torch

    from ortlab.engine.kept_builds import BuiltGraph

_PRODUCTS: Final = frozenset(
    """Conv ConvTranspose Einsum FusedConv FusedGemm FusedMatMul Gemm MatMul
    addmm bmm convolution gemm linear matmul matmul_transposed""".split()  # noqa: SIM905
)
"""The operators that do most of a model's arithmetic, of ONNX and of torch."""

Regions = Mapping[str, object]
"""By path of a module whose forward runs again: the region that it is in. A region hands on what others read of it."""


def find_regions(module: torch.nn.Module, words: Sequence[str], part: str = "") -> Regions | None:
    """Say which modules of a model run again, and which of them together; None for "all but matmuls".

    `words` are what `Options.recompute` holds. `part` is the path of the module in the model that it is a part of,
    whose names are asked for, and which may have them elsewhere. Raises OptionError, with near names, where the model
    has no such modules or layers.
    """
    if ALL_BUT_MATMULS in words:
        return None
    paths = {id(one): path for path, one in module.named_modules()}
    if words[0].partition(":")[0] != LAYERS:
        return {path: path for word in words for path in _matching(module, word, part)}
    together = int(words[0].partition(":")[2] or 1)
    try:
        lists = find_layers(module)
    except OptionError as error:
        raise OptionError(
            f"{type(module).__name__} has no repeated layers to recompute.",
            why=error.why,
            fix='Name modules, as in recompute=["encoder.layer.*.attention"], or use recompute="all but matmuls".',
        ) from None
    return {
        paths[id(layer)]: (layers.path, number // together)
        for layers in lists
        for number, layer in enumerate(layers.modules)
    }


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
            '"layers", "layers:2" and "all but matmuls".',
            fix=near or f"For example {', '.join(map(repr, known[:3])) or LAYERS}.",
        )
    # What lies inside a module that runs again runs again with it.
    return [one for one in found if not any(one.startswith(f"{outer}.") for outer in found)]


def kept_values(forward: ForwardPass, regions: Regions | None, modules: Collection[str]) -> frozenset[str]:
    """Return the values that are kept: of a region, what the rest of the model reads; for None, products.

    `modules` are the paths of the modules that the names in the graph begin with.
    """
    if regions is None:
        return frozenset(
            name
            for place in forward.places
            if executed_operator(forward.nodes[place]).rpartition(":")[2].rpartition(".")[2] in _PRODUCTS
            for name in forward.nodes[place].output
        )
    inside = _regions_of_nodes(forward, regions, modules)
    kept = set[str]()
    for place in forward.places:
        node = forward.nodes[place]
        if inside[place] is None:
            kept.update(name for name in node.output if name)
        if node.op_type not in WITHOUT_VALUES:
            kept.update(
                name
                for name in node.input
                if name in forward.values and inside[forward.made[name]] != inside[place]
            )
    return frozenset(kept)


def _regions_of_nodes(
    forward: ForwardPass, regions: Regions, modules: Collection[str]
) -> dict[int, object | None]:
    """Return the region of each node of the forward; a node without a module's name goes with what it reads."""
    found: dict[int, object | None] = {}
    for place in forward.places:
        node = forward.nodes[place]
        name = next((one for one in (node.name, *node.output) if "/" in one), "")
        if name:
            path = path_in(scopes_in(name), modules)
            found[place] = _region(path, regions)
        else:
            before = next((forward.made[one] for one in node.input if one in forward.values), None)
            found[place] = None if before is None else found[before]
    return found


def _region(path: str, regions: Regions) -> object | None:
    while path and path not in regions:
        path = path.rpartition(".")[0]
    return regions.get(path)


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
        regions = find_regions(module, words, part)
        modules = [path for path, _ in module.named_modules()]
        made = recomputing(forward, kept_values(forward, regions, modules))
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
