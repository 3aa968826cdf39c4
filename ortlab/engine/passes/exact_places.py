"""Values that the memory optimizer of 1.19.2 shall leave alone.

It applies a plan in all places of its cluster or in none: it reads a count, compares it with a number of places that
it has counted to one only (``optimization_planner.cc``, ``FinalizeNodePlansFromUserConfig``), and recomputes everywhere
for any count but 0, for which it leaves out the last place. So a place that is not to be recomputed is made one that it
cannot recompute: its results go through a node that hands its inputs on as they are, without a copy, and that is
not in the list of what the optimizer may repeat.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import onnx
from onnx import helper

HIDING: Final = "PassThrough"
"""ORT's operator that returns its inputs, in the same memory (``pass_through.cc``); on the CPU and on CUDA."""

_DOMAIN: Final = "com.microsoft"
_SUFFIX: Final = "_to_keep"


def leaving_alone(model: onnx.ModelProto, kept: Iterable[Sequence[str]]) -> tuple[onnx.ModelProto, list[str]]:
    """Copy a training graph, before its session is made, so that the results in `kept` cannot be recomputed.

    `kept` lists them by node. Returns the copy, and those of the results that no node of the graph makes.
    """
    copied = onnx.ModelProto()
    copied.CopyFrom(model)
    graph = copied.graph
    wanted = {output for outputs in kept for output in outputs}
    types = {value.name: value for value in graph.value_info}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        nodes.append(node)
        made = [output for output in node.output if output]
        if wanted.isdisjoint(made):
            continue
        wanted.difference_update(made)
        # All results go through one node: what only backward reads would otherwise be handed on there, too late.
        for number, output in enumerate(node.output):
            if output:
                node.output[number] = output + _SUFFIX
                if output in types:
                    graph.value_info.add(name=output + _SUFFIX, type=types[output].type)
        name = f"{node.name or made[0]}{_SUFFIX}"
        nodes.append(
            helper.make_node(HIDING, [one + _SUFFIX for one in made], made, name=name, domain=_DOMAIN)
        )
    del graph.node[:]
    graph.node.extend(nodes)
    return copied, sorted(wanted)
