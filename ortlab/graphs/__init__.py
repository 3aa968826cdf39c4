"""The ONNX graphs of a build, by stage."""

from ortlab.graphs.nodes import node_names
from ortlab.graphs.origins import Origin, origins
from ortlab.graphs.stages import STAGES, Graph, GraphSet, TracedModel, Value
from ortlab.graphs.summary import GraphSummary

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
