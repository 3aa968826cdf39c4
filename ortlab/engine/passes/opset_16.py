"""Let the compute optimizer see through layer normalisations of opset 17.

1.19.2 exports with opset 17 by default, in which ONNX has an operator LayerNormalization of its own. Its compute
optimizer knows only the one that ORT had before, registered as of opset 1 (``compute_optimizer/upstream_gather.cc``),
so that a slice, or a label filter, stops at the last layer normalisation of every transformer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from onnx import defs

if TYPE_CHECKING:
    import onnx

_NEWER: Final = 17
_OLDER: Final = 16
_ORT_HAD_IT: Final = "LayerNormalization"


def declare_opset_16(model: onnx.ModelProto) -> bool:
    """Declare a graph of opset 17 as one of opset 16, if it is one but for its layer normalisations.

    They then mean ORT's own operator, which computes the same, with the same kernels.

    Parameters
    ----------
    model
        The graph, after its shapes are inferred.

    Returns
    -------
    bool
        Whether the model changed.
    """
    declared = next((one for one in model.opset_import if not one.domain), None)
    if declared is None or declared.version != _NEWER:
        return False
    operators = {node.op_type for node in model.graph.node if not node.domain}
    if _ORT_HAD_IT not in operators or not all(_is_older(name) for name in operators - {_ORT_HAD_IT}):
        return False
    declared.version = _OLDER
    return True


def _is_older(operator: str) -> bool:
    """Tell whether an operator means the same in both; those that ONNX does not know are ORT's own."""
    return not defs.has(operator) or bool(defs.get_schema(operator, _NEWER).since_version <= _OLDER)
