"""The page of one graph: an HTML document for the `srcdoc` of a sandboxed frame, which carries all that it needs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ortlab.errors import InstallError, OptionError
from ortlab.graphs.nodes import node_names, operator_of
from ortlab.graphs.stages import stripped
from ortlab.graphs.viewer.bundle import STATIC, bundle, content_hash, operator_types, pack
from ortlab.graphs.viewer.grouping import in_order
from ortlab.graphs.viewer.reduction import GROUPINGS, PLACED_GROUPED, cost, reduced
from ortlab.shown import Shown

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, ValueInfoProto

    from ortlab.graphs.stages import Graph
    from ortlab.graphs.viewer.grouping import Group

_CATEGORIES = {
    "Layer": {"FusedMatMul", "FusedGemm", "TransposeMatMul", "ATen", "PythonOp"},
    "Normalization": {"SkipLayerNormalization", "SimplifiedLayerNormalization", "LayerNormalization"},
    "Activation": {"BiasGelu", "FastGelu", "Gelu", "QuickGelu", "BiasSoftmax", "BiasSoftmaxDropout"},
    "Dropout": {"BitmaskDropout", "BiasDropout", "BitmaskBiasDropout", "DropoutGrad", "BitmaskDropoutGrad"},
}
"""Colours, by netron's categories, of ORT's own operators, which netron does not know."""

KEPT_BYTES: Final = 256
"""Values of a constant up to this size are shown; of larger ones the shape and the type are."""

_NEWEST_IR: Final = 10

SANDBOX: Final = "allow-scripts allow-downloads"
"""The `sandbox` of the frame: scripts in an origin of their own, without access to the notebook."""

PATIENCE_MS: Final = 17_500
"""How long the browser places nodes after netron's question at 2.5 s, before it gives up: 20 s in all."""

_FIRST_STYLE: Final = (
    "body { font-family: system-ui, sans-serif; } "
    "#ortlab-wait { position: absolute; top: 40%; width: 100%; text-align: center; color: #777; }"
)


@dataclass(frozen=True)
class Document:
    """A graph as a page, or the reason why it is not drawn."""

    html: str = field(repr=False)  # for the `srcdoc` of a frame with `SANDBOX`; empty if the graph is refused
    nodes: int  # of the graph
    drawn: int  # nodes that the page draws at first: groups count once
    reduced: str = ""  # what was left out or put together, in words; empty if everything is drawn
    refused: str = ""  # why there is no page, in words; empty if there is one


def document(
    graph: Graph,
    *,
    around: str = "",
    hops: int = 2,
    group: str = "auto",
    colours: Mapping[str, str] | None = None,
    netron: Path | None = None,
) -> Document:
    """Make the page of a graph."""
    if group not in GROUPINGS:
        raise OptionError(
            f"A graph is not grouped by {group!r}.", fix=f"Choose one of: {', '.join(GROUPINGS)}."
        )
    whole = lean(graph.model)
    reduction = reduced(graph, whole, around=around, hops=hops, group=group)
    if reduction.refused:
        return Document("", graph.node_count, 0, reduction.words, reduction.refused)
    model = reduction.model
    shown = {node.name for node in model.graph.node} | {
        name for each in reduction.groups for name in each.nodes
    }
    nodes = [node for node in whole.graph.node if node.name in shown]
    operators = sorted({operator_of(node) for node in nodes})
    facts = {
        "file": f"{graph.stage}.onnx",
        "operators": operators_json(model, netron),
        "names": [node.name for node in nodes],
        "operatorNames": operators,
        "operatorOf": [operators.index(operator_of(node)) for node in nodes],
        **_groups(reduction.groups, {node.name: at for at, node in enumerate(nodes)}),
        "colours": dict(colours or {}),
        "reduced": reduction.words,
        "around": around,
        "patience": PATIENCE_MS,
        "heavy": not cost(model.graph.node).within(PLACED_GROUPED),  # not without a worker that can be ended
    }
    count = len(model.graph.node)
    html = _page(model.SerializeToString(deterministic=True), facts, count, netron)
    return Document(html, nodes=graph.node_count, drawn=count, reduced=reduction.words)


def _groups(groups: Sequence[Group], numbers: Mapping[str, int]) -> dict[str, object]:
    """Return what the page has to know of groups: under which names the nodes of a shared function are drawn."""
    functions: dict[str, Group] = {}
    listed = {}
    for group in groups:
        first = functions.setdefault(group.function, group)
        listed[group.name] = {
            "title": group.title,
            "backward": group.backward,
            "function": group.function,
            "nodes": [numbers[name] for name in group.nodes],
            "values": [] if first is group else group.values,
        }
    shared = {name: {"nodes": group.nodes, "values": group.values} for name, group in functions.items()}
    return {"groups": listed, "functions": shared}


def _page(model: bytes, facts: Mapping[str, object], drawn: int, netron: Path | None) -> str:
    page = bundle(netron)
    loader = (STATIC / "loader.js").read_text(encoding="utf-8")
    # Only our two scripts run: a policy that names them by hash also stops what a name or a comment in the graph
    # might bring in as an attribute such as onerror.
    scripts = f"'sha256-{content_hash(loader)}' 'sha256-{page.script_hash}'"
    policy = (
        f"default-src 'none'; script-src {scripts} blob:; worker-src blob:; style-src 'unsafe-inline'; "
        "img-src data: blob:; connect-src 'none'; form-action 'none'; base-uri 'none'"
    )
    packed = {"page": page.packed, "facts": pack(json.dumps(facts).encode()), "model": pack(model)}
    data = "".join(
        f'<script type="text/plain" id="ortlab-{name}">{text}</script>\n' for name, text in packed.items()
    )
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>Graph</title>
<!-- Drawn by Netron {page.version}, (c) Lutz Roeder, MIT License; the notice stands in the script. -->
<style>{_FIRST_STYLE}</style></head>
<body><p id="ortlab-wait" role="status">Drawing {drawn:,} nodes …</p>
{data}<script>{loader}</script></body></html>
"""


def lean(model: ModelProto) -> ModelProto:
    """Return a copy as it is drawn; the model itself stays as it is."""
    # The nodes stand in an order in which they can be computed, and have unique names. Parameters are constants without
    # values, which netron shows in the nodes that use them, as it shows those of an inference graph; their gradients
    # are no outputs, so that two nodes for each parameter are not drawn.
    import onnx

    copy, _ = stripped(model, KEPT_BYTES)
    # Netron knows an ONNX file by its first bytes: a version of the format up to 10, and a producer with a plain name.
    copy.ir_version = min(model.ir_version, _NEWEST_IR) or _NEWEST_IR
    copy.producer_name = "ortlab"
    for tensor in copy.graph.initializer:  # a small one may name a file, which the page has not
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
    for name, node in zip(node_names(model.graph), copy.graph.node, strict=True):
        node.name = name
    ordered = in_order(copy.graph.node)
    del copy.graph.node[:]
    copy.graph.node.extend(ordered)
    _fold_parameters(copy.graph)
    return copy


def is_parameter(value: ValueInfoProto) -> bool:
    """Say whether an input is a parameter or a buffer: it is named by a module's path, and its shape has no symbols."""
    sizes = value.type.tensor_type.shape.dim
    return "." in value.name and not any(size.dim_param for size in sizes)


def _fold_parameters(graph: GraphProto) -> None:
    parameters = [value for value in graph.input if is_parameter(value)]
    names = {value.name for value in parameters}
    batch = [value for value in graph.input if value.name not in names]
    results = [value for value in graph.output if value.name.removesuffix("_grad") not in names]
    del graph.input[:], graph.output[:]
    graph.input.extend(batch)
    graph.output.extend(results)
    held = {tensor.name for tensor in graph.initializer}
    for value in parameters:
        if value.name not in held:
            tensor = value.type.tensor_type
            sizes = [size.dim_value for size in tensor.shape.dim]
            graph.initializer.add(name=value.name, data_type=tensor.elem_type, dims=sizes)


def operators_json(model: ModelProto, package: Path | None = None) -> str:
    """Return netron's description of each operator of a graph, functions included, as JSON."""
    imported = {entry.domain or "ai.onnx": entry.version for entry in model.opset_import}
    used = {(node.domain or "ai.onnx", node.op_type) for node in model.graph.node}
    for function in model.functions:
        used |= {(node.domain or "ai.onnx", node.op_type) for node in function.node}
    newest: dict[tuple[str, str], dict[str, Any]] = {}
    for entry in operator_types(package):
        key = (str(entry["module"]), str(entry["name"]))
        known = newest.get(key, {"version": -1})["version"]
        if key in used and known < int(str(entry.get("version", 0))) <= imported.get(key[0], 0):
            newest[key] = {name: value for name, value in entry.items() if name != "examples"}
    for domain, name in sorted(used - newest.keys()):
        category = next((category for category, names in _CATEGORIES.items() if name in names), "")
        if category:
            newest[domain, name] = {
                "name": name,
                "module": domain,
                "version": 1,
                "category": category,
                "description": "",
            }
    return json.dumps([newest[key] for key in sorted(newest)], separators=(",", ":"))


MOST_CHARACTERS: Final = 3_000_000
"""Size of a page that is put into a notebook; a larger one would make that slow to save and to open."""

HEIGHT: Final = 560


@dataclass(frozen=True, repr=False)
class EmbeddedGraph(Shown):
    """A graph and its page, or the reason why there is none."""

    graph: Graph
    document: Document
    height: int = HEIGHT  # of the frame, in pixels

    @property
    def refused(self) -> str:
        """Why the page is not shown, in words; empty if it is."""
        size = len(self.document.html)
        if size > MOST_CHARACTERS:
            return (
                f"The page would add {size / 1e6:.1f} MB to the notebook, and {MOST_CHARACTERS / 1e6:.0f} are the "
                "limit. Name a node to show what is around it, or take show_graph, whose page is not saved."
            )
        return self.document.refused


def embed_graph(
    graph: Graph, *, around: str = "", hops: int = 2, group: str = "auto", height: int = HEIGHT
) -> EmbeddedGraph:
    """Return a graph as a page that stays alive in a saved notebook and in exported HTML, without a kernel.

    It adds some 300 kB and the graph itself to the notebook, constants of up to 256 bytes included, weights not.

    Parameters
    ----------
    graph
        Of `lab.graph(...)` or `ortlab.open_graph(...)`.
    around
        Name of a node: only its neighbourhood is drawn.
    hops
        How many edges the neighbourhood reaches, in both directions.
    group
        "auto" groups by module where the whole would be too large to be placed, "module" always, "none" never.
    height
        Of the frame, in pixels.

    Returns
    -------
    EmbeddedGraph
        Where the page cannot be made, summary and still picture stand alone, and why.

    Raises
    ------
    OptionError
        If there is no node `around`, or `group` is another word.

    Examples
    --------
    >>> ortlab.embed_graph(lab.graph("execution"))
    """
    return EmbeddedGraph(graph, drawn(graph, around=around, hops=hops, group=group), height)


def drawn(graph: Graph, *, around: str, hops: int, group: str) -> Document:
    """Make the page of a graph; where netron is missing or broken, that is the reason why there is none."""
    try:
        return document(graph, around=around, hops=hops, group=group)
    except InstallError as error:
        return Document("", graph.node_count, 0, refused=str(error))
