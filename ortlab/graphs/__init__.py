"""The ONNX graphs of a build, by stage."""

from ortlab.graphs.stages import STAGES, Graph, Value

__all__ = ["STAGES", "Graph", "Value"]
