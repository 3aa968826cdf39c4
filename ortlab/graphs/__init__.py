"""The ONNX graphs of a build, by stage.

- `stages`: one graph, and all of a build; `onnx_files`: one from a file; `triton_kernels`: what Triton was made of
- `nodes`: what a node tells, its module and line among it; `summary`: tables
- `diff`: what differs between two graphs, found by `wiring`, `alignment` and `changes`, said by `diff_words`
- `flops`: of a step, and what a switch saves of them; `flop_formulas`: of one node
- `viewer`: the page that draws a graph
"""

from ortlab.graphs.nodes import Origin, Value, node_names, origins
from ortlab.graphs.stages import STAGES, Graph, GraphSet, TracedModel
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
