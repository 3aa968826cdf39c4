"""The ONNX graphs of a build, by stage."""

from ortlab.graphs.graph_set import GraphSet
from ortlab.graphs.origins import Origin, origins
from ortlab.graphs.scopes import node_names
from ortlab.graphs.stages import STAGES, Graph, Value
from ortlab.graphs.summary import GraphSummary
from ortlab.graphs.traced_model import TracedModel

__all__ = [
    "STAGES",
    "Graph",
    "GraphSet",
    "GraphSummary",
    "Origin",
    "TracedModel",
    "Value",
    "node_names",
    "origins",
]
