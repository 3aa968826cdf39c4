"""What netron shows of operators, for those that a graph uses: all of ONNX would be 5 MB."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortlab.graphs.viewer.bundle import operator_types

if TYPE_CHECKING:
    from onnx import ModelProto

_CATEGORIES = {
    "Layer": {"FusedMatMul", "FusedGemm", "TransposeMatMul", "ATen", "PythonOp"},
    "Normalization": {"SkipLayerNormalization", "SimplifiedLayerNormalization", "LayerNormalization"},
    "Activation": {"BiasGelu", "FastGelu", "Gelu", "QuickGelu", "BiasSoftmax", "BiasSoftmaxDropout"},
    "Dropout": {"BitmaskDropout", "BiasDropout", "BitmaskBiasDropout", "DropoutGrad", "BitmaskDropoutGrad"},
}
"""Colours, by netron's categories, of ORT's own operators, which netron does not know."""


def operators_json(model: ModelProto, package: Path | None = None) -> str:
    """Return netron's description of each operator of a graph, as JSON.

    Parameters
    ----------
    model
        The graph, functions included.
    package
        The folder of a netron package; by default the installed one.
    """
    imported = {entry.domain or "ai.onnx": entry.version for entry in model.opset_import}
    used = {(node.domain or "ai.onnx", node.op_type) for node in model.graph.node}
    for function in model.functions:
        used |= {(node.domain or "ai.onnx", node.op_type) for node in function.node}
    newest: dict[tuple[str, str], dict[str, Any]] = {}
    for entry in operator_types(package):
        key = (str(entry["module"]), str(entry["name"]))
        version = int(str(entry.get("version", 0)))
        known = newest.get(key)
        if (
            key in used
            and version <= imported.get(key[0], 0)
            and (known is None or version > known["version"])
        ):
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
