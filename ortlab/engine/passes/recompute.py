"""A training graph whose backward computes part of the forward again, instead of reading what was kept of it.

The memory optimizer of 1.19.2 repeats what stands in its list of operators, in chains that it finds by itself. Here any
set of values can be kept: what the backward reads beyond them is made again by copies of the forward's nodes, just
before it is read. Gradients are the same bit for bit, since each copy is the same operator on the same numbers.

What is never made again: what the model returns; integers and shapes, which are small and steer others, but for those
that an Expand repeats; what weights alone determine, which is the same in each step and whose inputs are there anyway;
and what a second run could make otherwise: results of random and stateful operators, of Functions, and of calls of
torch that are not known to be pure. A dropout is made again from its mask: its gradient multiplies by the same numbers
as its forward. The mask is drawn once, by the generator that draws it without recomputation, and kept with eight
entries in a byte.

**How copies stay apart.** A session's CommonSubexpressionElimination finds nodes with the same operator and inputs, and
would make one of each node and its copy: the backward then reads what the forward kept, and nothing is saved. So a copy
whose inputs are all kept reads one of them through a `PassThrough`, ORT's operator that hands its inputs on in the same
memory. No optimizer has to be switched off for it, and it takes no time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

import onnx
from onnx import AttributeProto, TensorProto, helper

from ortlab.engine.passes.graph_edits import (
    FLOAT_TYPES,
    WITHOUT_VALUES,
    aten_operator,
    call_kernel,
    copied,
    declare_aten,
    kernel_call,
)
from ortlab.engine.passes.training_graph import HIDING
from ortlab.graphs.nodes import YIELD, executed_operator
from ortlab.memory.products import in_late_order, is_product, late_products
from ortlab.memory.recompute import COPY, HELD, PACKED
from ortlab.memory.trace import ONNX_VIEWS, WRITTEN_OVER

_MICROSOFT: Final = "com.microsoft"

_OF_DROPOUT: Final = {"Dropout": "DropoutGrad", "BitmaskDropout": "BitmaskDropoutGrad"}
"""By operator that draws a mask: the one that puts the mask on its input again."""

_NEVER: Final = frozenset(
    """BatchNormalization BatchNormInternal Bernoulli BiasDropout BiasSoftmaxDropout BitmaskBiasDropout Multinomial
    NegativeLogLikelihoodLossInternal NonZero PythonOp RandomNormal RandomNormalLike RandomUniform RandomUniformLike
    ShrunkenGather SoftmaxCrossEntropyLoss SoftmaxCrossEntropyLossInternal TritonOp""".split()  # noqa: SIM905
)
"""Operators that a second run may let come out otherwise, or whose work comes to nothing at the start of the backward:
the loss, and the rows that it leaves out."""


_PURE_CALLS: Final = frozenset(
    """abs adaptive_avg_pool2d add addmm attention bmm cat clamp constant_pad_nd contiguous div divided exp expand gelu
    gemm layer_norm leaky_relu linear log log_sum_exp masked_fill matmul matmul_transposed mean
    mean_over mean_over_space mul native_group_norm neg permute pow relu repeat reshape rsqrt select sigmoid silu
    slice softmax split sqrt squeeze stack sub sum sum_over tanh transpose unsqueeze view where convolution copy_of
    cos gather_elements grouped_linear im2col roll sin""".split()  # noqa: SIM905
)
"""Operators of torch, and of ortlab's kernels, that return the same for the same operands and write nothing; others,
PyTorch's attention with its dropout among them, are left alone."""

_APART: Final = "_apart"
"""Ends the names of what goes through a node that hands it on, on the way to who reads it."""

_LATE: Final = "_late"
"""Ends the names of what goes through a node that hands it on when another node has run."""

_REPEATED_TYPES: Final = FLOAT_TYPES | {TensorProto.BOOL}


class ForwardPass:
    """The forward of a training graph, before its session is made, and what the backward reads of it.

    `inputs` are the graph's inputs that a call gives; all others are weights and buffers. Nodes are known by their
    number in the graph.
    """

    def __init__(self, model: onnx.ModelProto, inputs: Collection[str]) -> None:
        self.model = model
        self.nodes: list[onnx.NodeProto] = list(model.graph.node)
        self.made = {name: place for place, node in enumerate(self.nodes) for name in node.output if name}
        self._given = frozenset(inputs)
        self._border = next(place for place, node in enumerate(self.nodes) if node.op_type == YIELD)

    @cached_property
    def types(self) -> dict[str, int]:
        """Element types by value, where the graph tells them."""
        graph = self.model.graph
        return {
            value.name: value.type.tensor_type.elem_type
            for value in (*graph.input, *graph.value_info, *graph.output)
        }

    @cached_property
    def places(self) -> list[int]:
        """The nodes that the model's outputs need, in their order."""
        found = set[int]()
        waiting = self.outputs
        while waiting:
            place = self.made.get(waiting.pop())
            if place is not None and place not in found:
                found.add(place)
                waiting.extend(self.nodes[place].input)
        return sorted(found)

    @cached_property
    def values(self) -> frozenset[str]:
        """What the forward makes."""
        return frozenset(name for place in self.places for name in self.nodes[place].output if name)

    @cached_property
    def backward(self) -> list[int]:
        """The nodes that run for the gradients only, but for those that ask for shapes."""
        forward = {*self.places, self._border}
        return [
            place
            for place, node in enumerate(self.nodes)
            if place not in forward and node.op_type not in WITHOUT_VALUES
        ]

    @property
    def outputs(self) -> list[str]:
        """What the caller gets, in order."""
        return list(self.nodes[self._border].input)

    @cached_property
    def returned(self) -> frozenset[str]:
        """What the caller gets, and the values in whose memory that is."""
        return frozenset(self.root(name) for name in self.outputs)

    @cached_property
    def determined(self) -> frozenset[str]:
        """What weights, buffers and constants alone determine, among them these themselves."""
        graph = self.model.graph
        found = {"", *(one.name for one in graph.initializer)}
        found.update(value.name for value in graph.input if value.name not in self._given)
        for place in self.places:
            if found.issuperset(self.nodes[place].input):
                found.update(self.nodes[place].output)
        return frozenset(found)

    def root(self, name: str) -> str:
        """Return the value in whose memory a value is: itself, unless it is a view."""
        while name in self.made:
            node = self.nodes[self.made[name]]
            if node.domain or node.op_type not in ONNX_VIEWS or node.output[0] != name:
                break
            name = node.input[0]
        return name

    def can_repeat(self, name: str) -> bool:
        """Tell whether a value of the forward, which is no view, comes out the same if its node runs again."""
        node = self.nodes[self.made[name]]
        if name in self.determined:
            return False
        if node.op_type == "Expand":  # of a few indices, say, to one for each entry that is gathered
            return True
        if self.types.get(name, 0) not in _REPEATED_TYPES:
            return False
        if node.op_type in _OF_DROPOUT:
            return name == node.output[0] and any(node.output[1:])
        if node.op_type == "ATen":
            return aten_operator(node).rpartition("::")[2] in _PURE_CALLS
        subgraphs = any(one.type in {AttributeProto.GRAPH, AttributeProto.GRAPHS} for one in node.attribute)
        return node.op_type not in _NEVER and not subgraphs


@dataclass(frozen=True)
class Recomputing:
    """A training graph in which values are made again, and what was put into it."""

    model: onnx.ModelProto
    copies: frozenset[str]  # names of the nodes that were put in to make values again
    returned: tuple[int, ...]  # numbers of the outputs of the forward that the copies read


def recomputing(forward: ForwardPass, kept: Collection[str], between: Collection[str] = ()) -> Recomputing:
    """Return a graph that makes again what its backward reads of the forward, but for the values that are to be kept.

    Values that cannot be made again are kept as well. What is made again may be made of values `between` that are made
    again themselves, of those kept, once and before: then recomputation is nested. The graph of `forward` stays as it
    is.
    """
    return _Rewrite(forward, kept, between).made()


def repeated(
    forward: ForwardPass, kept: Collection[str], between: Collection[str] = ()
) -> tuple[frozenset[str], int]:
    """Return what `recomputing` would make again, masks that it would pack included, and how many nodes for that.

    What it would make in a first run, for values `between`, has a name of its own: that of the copy it is made from.
    """
    rewrite = _Rewrite(forward, kept, between)
    first = (name + COPY for name in rewrite.first.again)
    nodes = len(rewrite.last.repeated) + len(rewrite.first.repeated)
    return frozenset((*rewrite.last.again, *rewrite.packed, *first)), nodes


class _Run:
    """A run of the forward in the backward: the nodes that are repeated, and what their copies read.

    `wanted` are values that others read of it, and `ending` ends the names of its copies and their results.
    """

    def __init__(
        self, forward: ForwardPass, kept: Collection[str], wanted: Collection[str], ending: str
    ) -> None:
        self._forward = forward
        self._kept = {forward.root(name) for name in kept} | forward.returned
        for place in forward.places:
            # A node that has to run again for one of its results makes the others as well.
            outputs = forward.nodes[place].output
            if forward.nodes[place].op_type not in _OF_DROPOUT and not self._kept.isdisjoint(outputs):
                self._kept.update(outputs)
        self._ending = ending
        self.repeated, self.read = self._chosen(wanted)
        self.again = {
            name: name + ending for place in self.repeated for name in _results(forward.nodes[place]) if name
        }
        self.held: dict[str, str] = {}
        self.holders: list[tuple[int, onnx.NodeProto]] = []  # with the place of what makes the value
        self.types: dict[str, int] = {}  # of results that ORT cannot tell the type of

    def asked_to_keep(self, name: str) -> bool:
        """Tell whether a value is to be kept, or has to be since it is returned."""
        return name in self._kept

    def _chosen(self, wanted: Collection[str]) -> tuple[list[int], frozenset[str]]:
        """Return the nodes to repeat, in the order of the graph: those of what is read, back to what is kept.

        Beside them what they, and others, read that is there without.
        """
        forward, read = self._forward, set(wanted)
        waiting = {name for name in wanted if not self._keeps(name)}
        found = []
        for place in reversed(forward.places):
            node = forward.nodes[place]
            if not waiting.isdisjoint(_results(node)):
                found.append(place)
                inputs = node.input[:1] if node.op_type in _OF_DROPOUT else node.input
                read.update(inputs)
                waiting.update(name for name in inputs if not self._keeps(name))
        return found[::-1], frozenset(name for name in read if self._keeps(name))

    def _keeps(self, name: str) -> bool:
        """Tell whether a value is there without being made again in this run."""
        if name not in self._forward.values:
            return True
        root = self._forward.root(name)
        return root in self._kept or root not in self._forward.values or not self._forward.can_repeat(root)

    def copy(self, place: int, packed: Collection[str]) -> onnx.NodeProto:
        """Return a node that makes the results of another one again; `packed` are masks."""
        node = self._forward.nodes[place]
        if node.op_type in _OF_DROPOUT:
            source, *settings = node.input
            again = helper.make_node(
                _OF_DROPOUT[node.op_type],
                [source, node.output[1], *settings],
                node.output[:1],
                domain=_MICROSOFT,
            )
        else:
            again = copied(node)
        again.name = (node.name or node.output[0]) + self._ending
        apart = any(name in self.again for name in again.input)
        for number, name in enumerate(again.input):
            if name in self.again:
                again.input[number] = self.again[name]
            elif name in packed:
                again.input[number] = self.held[name]
            elif self._forward.root(name) in self._forward.returned:
                again.input[number] = self._hold(name)
            elif not apart and name not in self._forward.determined:
                again.input[number] = self._hold(name)
                apart = True
        for number, name in enumerate(again.output):
            if name:
                again.output[number] = self.again[name]
        return again

    def _hold(self, name: str) -> str:
        """Return what copies read in the place of a kept value.

        What the caller was given is copied, unless products alone read it, which have memory of their own for their
        results: another copy may write its result over it, as its last reader.
        """
        if name not in self.held:
            held = self.held[name] = self._name_held(name)
            holder = helper.make_node(HIDING, [name], [held], name=held, domain=_MICROSOFT)
            if self._forward.root(name) in self._forward.returned and not self._only_multiplied(name):
                if self._forward.types.get(name) == TensorProto.BOOL:  # which cannot cross to PyTorch
                    holder = helper.make_node("And", [name, name], [held], name=held)
                else:
                    call_kernel(holder, "copy_of")
            self.holders.append((self._forward.made.get(name, -1), holder))
        return self.held[name]

    def _only_multiplied(self, name: str) -> bool:
        """Tell whether all that this run repeats of what reads a value are products."""
        nodes = (self._forward.nodes[place] for place in self.repeated)
        return all(is_product(executed_operator(node)) for node in nodes if name in node.input)

    def _name_held(self, name: str) -> str:
        return name + self._ending.removeprefix(COPY) + HELD

    def unpack(self, mask: str, place: int) -> None:
        """Let what this run makes, and what reads it, read a mask that is made of its packed entries."""
        held = self._name_held(mask)
        bytes_ = f"{mask}_bytes{held.removeprefix(mask)}"
        node = self._forward.nodes[place]
        unpack = kernel_call("unpacked_bits", [mask + PACKED, f"{mask}_shape"], [bytes_], node)
        unpack.name += held.removeprefix(mask)
        cast = helper.make_node("Cast", [bytes_], [held], name=held, to=TensorProto.BOOL)
        self.holders += [(place, unpack), (place, cast)]
        self.held[mask] = held
        self.types[bytes_] = TensorProto.UINT8


def _results(node: onnx.NodeProto) -> list[str]:
    """Return the results of a node that its copy makes."""
    return list(node.output[:1] if node.op_type in _OF_DROPOUT else node.output)


class _Rewrite:
    """The copies of nodes that a graph gets: of what its backward reads, and of what these copies read."""

    def __init__(self, forward: ForwardPass, kept: Collection[str], between: Collection[str]) -> None:
        self._forward = forward
        self._read = {name for place in forward.backward for name in forward.nodes[place].input}
        self.last = _Run(forward, {*kept, *between}, self._read, COPY)
        self.first = _Run(forward, kept, self.last.read if between else (), COPY + COPY)
        self.packed = dict(self._packed_places())
        self._types: dict[str, int] = {}  # of results that ORT cannot tell the type of

    def made(self) -> Recomputing:
        forward = self._forward
        model = onnx.ModelProto()
        model.CopyFrom(forward.model)
        # What stands in front of what, where both are needed: by the place of what is repeated, then by this order.
        made = dict[str, tuple[tuple[int, int, int], onnx.NodeProto]]()
        copies = set[str]()
        runs = (self.first, self.last)
        for number, run in enumerate(runs):
            for mask, place in self.packed.items():
                if run is self.last or place in run.repeated:
                    run.unpack(mask, place)
            repeats = {place: run.copy(place, self.packed) for place in run.repeated}
            copies.update(node.name for node in repeats.values())
            ordered = [((place, 2 * number + 1, 0), node) for place, node in repeats.items()]
            ordered += [((place, 2 * number, among), node) for among, (place, node) in enumerate(run.holders)]
            for key, node in ordered:
                if run is self.last:
                    _read_instead(node, self.first.again)
                made |= dict.fromkeys(filter(None, node.output), (key, node))
        nodes = [copied(node) for node in self._ordered(made)]
        del model.graph.node[:]
        model.graph.node.extend(nodes)
        if any(node.op_type == "ATen" for run in runs for _, node in run.holders):
            declare_aten(model)
        types = {value.name: value.type for value in (*model.graph.input, *model.graph.value_info)}
        for name, new in (one for run in runs for one in (*run.again.items(), *run.held.items())):
            if name in types:
                model.graph.value_info.add(name=new, type=types[name])
        model.graph.value_info.extend(
            helper.make_tensor_value_info(name, element_type, None)
            for name, element_type in (self._types | self.first.types | self.last.types).items()
            if element_type
        )
        held = {forward.root(name) for run in runs for name in run.held}
        return Recomputing(
            model,
            frozenset(copies),
            tuple(number for number, name in enumerate(forward.outputs) if forward.root(name) in held),
        )

    # ---- masks, eight entries in a byte -----------------------------------------------------------------------

    def _packed_places(self) -> Iterator[tuple[str, int]]:
        """Yield the masks that the backward reads and nobody asks to keep, with the dropouts that they are of."""
        repeated = {*self.last.repeated, *self.first.repeated}
        for place in self._forward.places if repeated else ():
            node = self._forward.nodes[place]
            mask = node.output[1] if node.op_type == "Dropout" and len(node.output) > 1 else ""
            if mask and not self.last.asked_to_keep(mask) and (mask in self._read or place in repeated):
                yield mask, place

    def _packing(self, node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
        """Yield a dropout, and what packs its mask in the forward.

        Only the backward reads a packed mask, so ORT would pack there. So what the forward reads of the dropout goes
        through a node of which the packed mask is another result.
        """
        result, mask, packed = node.output[0], node.output[1], node.output[1] + PACKED
        dropout = copied(node)
        dropout.output[0] = result + _APART
        yield dropout
        yield kernel_call("packed_bits", [mask], [packed + _APART], node)
        yield helper.make_node(
            HIDING,
            [result + _APART, packed + _APART],
            [result, packed],
            name=f"{packed}{_APART}",
            domain=_MICROSOFT,
        )
        yield helper.make_node("Shape", [result], [f"{mask}_shape"], name=f"{mask}_shape")
        self._types |= {packed: TensorProto.UINT8, packed + _APART: TensorProto.UINT8}
        self._types[result + _APART] = self._forward.types.get(result, TensorProto.UNDEFINED)

    # ---- their order ------------------------------------------------------------------------------------------

    def _ordered(
        self, made: Mapping[str, tuple[tuple[int, int, int], onnx.NodeProto]]
    ) -> Iterator[onnx.NodeProto]:
        """Yield all nodes; each copy, and what it needs, stands in front of the first node that needs it.

        What holds a value stands in front of the first copy: it sorts like the node that makes the value.
        """
        forward = self._forward
        there, packing = set[str](), {*self.packed.values()}
        instead = self.first.again | self.last.again | {name: self.last.held[name] for name in self.packed}
        backward = set(forward.backward)
        readings = [_Reading(executed_operator(node), node.input, node.output) for node in forward.nodes]
        late = self._late(readings)
        waits = {other: (name, forward.nodes[other].output[0]) for other, name in late.values()}
        later = {made: made + _LATE for _, made in waits.values()}
        for place in in_late_order(readings, late):
            node = forward.nodes[place]
            if place in backward:
                node = copied(node)
                # What is written over has to be the memory itself: ONNX Runtime frees that of a value that only shares
                # it behind the call, whose result lies in it.
                written = WRITTEN_OVER.get(readings[place].operator, ())
                over = {name for number, name in enumerate(node.input) if number in written}
                _read_instead(node, instead | {name: later[name] for name in later.keys() - over})
                if place in late:
                    _read_instead(node, {late[place][1]: late[place][1] + _LATE})
                yield from _needed(node, made, there)
            if place in packing:
                yield from self._packing(node)
            else:
                yield node
            if place in waits:
                names = waits[place]
                self._types |= {
                    name + _LATE: forward.types.get(name, TensorProto.UNDEFINED) for name in names
                }
                yield helper.make_node(
                    HIDING,
                    names,
                    [name + _LATE for name in names],
                    name=f"{names[1]}{_LATE}",
                    domain=_MICROSOFT,
                )

    def _late(self, readings: Sequence[_Reading]) -> dict[int, tuple[int, str]]:
        """Return which products of the backward wait for others, by place: the other's, and what both read."""
        backward, returned = (
            set(self._forward.backward),
            {one.name for one in self._forward.model.graph.output},
        )
        nodes = [node if place in backward else _Reading("", (), ()) for place, node in enumerate(readings)]
        return {
            place: (other, name)
            for place, (other, name) in late_products(nodes, self.last.again.keys()).items()
            if returned.isdisjoint(readings[other].outputs)
        }


class _Reading(NamedTuple):
    operator: str
    inputs: Sequence[str]
    outputs: Sequence[str]


def _read_instead(node: onnx.NodeProto, instead: Mapping[str, str]) -> None:
    for number, name in enumerate(node.input):
        node.input[number] = instead.get(name, name)


def _needed(
    node: onnx.NodeProto, made: Mapping[str, tuple[tuple[int, int, int], onnx.NodeProto]], there: set[str]
) -> list[onnx.NodeProto]:
    """Return the nodes of `made` that a node needs, and that are not `there` yet, in their order."""
    found: dict[str, tuple[tuple[int, int, int], onnx.NodeProto]] = {}
    waiting = list(node.input)
    while waiting:
        name = waiting.pop()
        if name in made and name not in there:
            place, needed = made[name]
            there.update(needed.output)
            found[needed.name] = (place, needed)
            waiting.extend(needed.input)
    return [needed for _, needed in sorted(found.values(), key=lambda one: one[0])]
