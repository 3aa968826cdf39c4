"""The nodes of a group as an ONNX function."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from ortlab.graphs.viewer.order import reads

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto, TensorProto

DOMAIN: Final = "ortlab.module"
"""Domain of the operators that stand for groups."""


class Body:
    """The nodes of a group: what goes in, what comes out, and what tells it from other bodies.

    The nodes come in an order in which they can be computed; `wanted` is what is read outside of the group. Functions
    have no initializers, so that `weights` become nodes in the body, one for each use: netron draws a constant in the
    node that uses it only if there is one such node.
    """

    def __init__(
        self, nodes: Sequence[NodeProto], weights: Mapping[str, TensorProto], wanted: set[str]
    ) -> None:
        import onnx

        self.nodes: list[NodeProto] = []
        self.constants: dict[str, TensorProto] = {}
        for node in nodes:
            copy = onnx.NodeProto()
            copy.CopyFrom(node)
            self.nodes.append(copy)
            for at, name in enumerate(node.input):
                if name in weights:
                    copy.input[at] = self._own_name(name)
                    self.constants[copy.input[at]] = weights[name]
        own = {name for node in nodes for name in node.output if name}
        read = dict.fromkeys(
            name
            for node in self.nodes
            for name in [*node.input, *sorted(reads(node) - set(node.input))]
            if name and name not in own
        )
        self.inputs = [name for name in read if name not in self.constants and name not in weights]
        self.outputs = [name for node in nodes for name in node.output if name in wanted]
        self.values = list(dict.fromkeys([*read, *(name for node in nodes for name in node.output if name)]))

    @property
    def signature(self) -> bytes:
        """The same for bodies that compute the same under other names."""
        number = {name: str(at) for at, name in enumerate(self.values)}
        digest = hashlib.sha256()
        for node in self.nodes:
            ends = ("|".join(number.get(name, "") for name in names) for names in (node.input, node.output))
            digest.update("\n".join([node.domain, node.op_type, *ends]).encode())
            for attribute in sorted(node.attribute, key=lambda one: str(one.name)):
                digest.update(attribute.SerializeToString(deterministic=True))
        for name, tensor in self.constants.items():
            unnamed = type(tensor)()
            unnamed.CopyFrom(tensor)
            unnamed.ClearField("name")
            digest.update(number[name].encode() + unnamed.SerializeToString(deterministic=True))
        digest.update("|".join(number[name] for name in [*self.inputs, *self.outputs]).encode())
        return digest.digest()

    def add_to(self, model: ModelProto, name: str) -> None:
        """Write it into a model as a function."""
        import onnx

        function = model.functions.add(name=name, domain=DOMAIN)
        function.input.extend(self.inputs)
        function.output.extend(self.outputs)
        function.opset_import.extend(model.opset_import)
        for constant, tensor in self.constants.items():
            node = function.node.add(op_type="Constant", output=[constant])
            node.attribute.add(name="value", type=onnx.AttributeProto.TENSOR).t.CopyFrom(tensor)
        function.node.extend(self.nodes)

    def _own_name(self, name: str) -> str:
        count = 1
        own = name
        while own in self.constants:
            count += 1
            own = f"{name} ({count})"
        return own
