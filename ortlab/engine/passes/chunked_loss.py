"""Put the head of a model and its cross entropy into one node, so that full logits never exist (`chunked_loss`).

Looked for is a product with a matrix, with a bias or without, then what leaves each row a row (casts, slices of rows,
reshapes), then a cross entropy. Where something else reads the logits, or something else stands between, the graph
stays as it is, and the lab says why. Logits that the forward returns are left out of the graph; in their place stands
an object that refuses to be read (`ortlab.engine.tracing.outputs`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from onnx import TensorProto, helper

from ortlab.engine.build_environment import acts
from ortlab.engine.operators.chunked_loss import KERNEL, MEAN, SUM, How, rows_of_block
from ortlab.engine.operators.gradients import call_text
from ortlab.engine.operators.torch_calls import TENSOR, VALUE, parsed
from ortlab.engine.passes.graph_edits import (
    LOSSES,
    NAMESPACE,
    GraphFacts,
    Shape,
    aten_operator,
    attributes_of,
    copied,
    declare_aten,
    kernel_call,
)
from ortlab.engine.patching import replace, set_to
from ortlab.engine.tracing.outputs import UnmadePart, names_of_tensors
from ortlab.memory.symbolic_sizes import shape_at
from ortlab.units import size

if TYPE_CHECKING:
    from collections.abc import Callable

    import onnx

SWITCH: Final = "chunked_loss"

_CALLED_LOSS: Final = f"{NAMESPACE}::cross_entropy"
_TORCHS_LOSS: Final = "cross_entropy_loss"
_RESHAPES: Final = frozenset(
    {"Reshape", "Flatten", "Squeeze", "Unsqueeze", "view", "reshape", "_unsafe_view"}
)
"""Operators of ONNX and of torch, which computes those of half precision."""
_UP_TO_FLOAT: Final = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16})
_FOUR: Final = 4
_TO_THE_END: Final = 2**31 - 1
_MATRIX: Final = 2


@dataclass
class Findings:
    """What the pass has done with one graph."""

    replaced: list[Replaced] = field(default_factory=list)
    obstacles: list[str] = field(default_factory=list)  # one for each cross entropy that stays as it is
    unmade: list[str] = field(default_factory=list)  # outputs as the user reads them: "logits"


class Replaced(NamedTuple):
    """A head and its loss that are one node now."""

    rows: Shape  # of the labels; empty if it is not known
    width: int  # of what the head reads
    classes: int
    element_type: int  # of the logits that are not made


class _Obstacle(Exception):  # noqa: N818 - an answer, not an error
    """Why a cross entropy stays as it is."""


_findings: Final[ContextVar[Findings | None]] = ContextVar("findings", default=None)


def install() -> None:
    """Let each export of a graph that trains be looked at. Calling it again changes nothing."""
    from onnxruntime.training.ortmodule._graph_transition_manager import GraphTransitionManager

    replace(GraphTransitionManager, "_post_export_process", _leave_outputs_out)


def _leave_outputs_out(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``GraphTransitionManager._post_export_process``: say where outputs are missing, and what was found."""

    def post_export_process(*args: Any, **kwargs: Any) -> Any:
        from torch.onnx import TrainingMode

        if not acts(SWITCH) or kwargs["export_mode"] != TrainingMode.TRAINING:
            return original(*args, **kwargs)
        findings = Findings()
        with set_to(_findings, findings):
            info = original(*args, **kwargs)
        exported = [value.name for value in kwargs["exported_model_info"].exported_model.graph.output]
        there = {value.name for value in info._post_export_processed_model.graph.output}
        schema = info.module_forward_output_schema
        names = names_of_tensors(schema)
        unmade = {
            place: names.get(place, f"[{place}]") for place, name in enumerate(exported) if name not in there
        }
        if unmade:
            info.module_forward_output_schema = UnmadePart(schema, unmade, SWITCH)
        findings.unmade = list(unmade.values())
        info.chunked_loss = findings
        return info

    return post_export_process


def messages(info: Any, sizes: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield level and text of what there is to say of an export; nothing if nothing was looked for."""
    findings: Findings | None = getattr(info, SWITCH, None)
    if findings is None:
        return
    for one in findings.replaced:
        yield "INFO", _success(one, findings.unmade, sizes)
    for why in findings.obstacles:
        yield "WARNING", f"{SWITCH} leaves a cross entropy as it is: {why}."
    if not findings.replaced and not findings.obstacles:
        yield "WARNING", _NO_LOSS


_NO_LOSS: Final = (
    f"{SWITCH} does nothing: the graph has no cross entropy. The loss is another one, or it is computed outside of "
    "the model; ortlab.with_loss(model, ortlab.TokenLoss(), loss_only=True) makes it part of it."
)


def _success(one: Replaced, unmade: Sequence[str], sizes: Mapping[str, int]) -> str:
    shape = shape_at(one.rows, sizes) if one.rows else None
    if shape is None:
        text = f"The loss is computed in blocks of rows: logits of {one.classes} classes never exist."
    else:
        rows, step = prod(shape), rows_of_block(one.width)
        blocks = -(-rows // step)
        whole = rows * one.classes * helper.tensor_dtype_to_np_dtype(one.element_type).itemsize
        logits = f"logits of {rows} x {one.classes} ({size(whole)})"
        if blocks > 1:
            text = f"The loss is computed in {blocks} blocks of {step} rows: {logits} never exist."
        else:
            text = f"The loss is computed in 1 block of {rows} rows: {logits} exist for a moment, and are not kept."
        text += " Rows whose label is ignored are left out."
    if unmade:
        names = " and ".join(f"'{name}'" for name in unmade)
        text += f" The forward returns no {names} in training: reading it is an error."
    return text


def block_bytes(info: Any, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return for each loss in blocks how many bytes the logits of a block take; `sizes` as in `messages`."""
    # Scores are float32; logits of half precision are there beside them.
    findings: Findings | None = getattr(info, SWITCH, None)
    found = []
    for one in findings.replaced if findings else ():
        shape = shape_at(one.rows, sizes) if one.rows else None
        step = rows_of_block(one.width)
        width = helper.tensor_dtype_to_np_dtype(one.element_type).itemsize
        rows = step if shape is None else min(prod(shape), step)
        found.append(rows * one.classes * (_FOUR if width == _FOUR else _FOUR + width))
    return tuple(found)


def chunk_losses(model: onnx.ModelProto) -> bool:
    """Put each head and its cross entropy into one node; say whether the model changed."""
    findings = _findings.get()
    if findings is None:
        return False
    for name in [node.output[0] for node in model.graph.node if _is_loss(node)]:
        loss = next(node for node in model.graph.node if name in node.output)
        try:
            findings.replaced.append(_Rewrite(model, loss).apply())
        except _Obstacle as obstacle:
            findings.obstacles.append(str(obstacle))
    return bool(findings.replaced)


def _is_loss(node: onnx.NodeProto) -> bool:
    return _operator(node) in {*LOSSES, _CALLED_LOSS, _TORCHS_LOSS}


def _operator(node: onnx.NodeProto) -> str:
    return aten_operator(node).removeprefix("aten::") or str(node.op_type)


class _Product(NamedTuple):
    """What logits are made of."""

    node: onnx.NodeProto
    hidden: str
    weight: str
    bias: str
    turned: bool  # whether the weight has the shape (width, classes)


class _Rewrite:
    """One cross entropy of a graph, and what its logits come from; raises _Obstacle where it has to stay."""

    def __init__(self, model: onnx.ModelProto, loss: onnx.NodeProto) -> None:
        self._model, self._facts, self._loss = model, GraphFacts(model), loss
        self._target, self._class_weight, reduction, ignored = self._arguments()
        self._passed = [loss.input[0]]  # the values between product and loss, the last first
        self._slices: list[onnx.NodeProto] = []  # of rows, the last first
        self._product = self._follow(loss.input[0])
        self._width, self._classes = self._check_shapes()
        self._how = How(reduction, ignored, int(self._product.turned), *self._wanted())

    # ---- what is there ----------------------------------------------------------------------------------------

    def _arguments(self) -> tuple[str, str, int, int]:
        """Return target, class weights ("" if there are none), reduction and the ignored label."""
        node = self._loss
        if _operator(node) == _TORCHS_LOSS:
            raise _Obstacle("it has label smoothing or class probabilities, or is not computed in float32")
        if any(name in self._facts.consumed for name in node.output[1:]):
            raise _Obstacle("its log probabilities are read")
        inputs = [*node.input, *[""] * _FOUR]
        if aten_operator(node):
            reduction = self._constant(inputs[3], "its reduction")
            ignored = self._constant(inputs[4], "the ignored label")
        else:
            attributes = attributes_of(node)
            how = attributes.get("reduction", b"mean").decode()
            reduction = {"mean": MEAN, "sum": SUM}.get(how, 0)
            ignored = attributes.get("ignore_index", -100)
            if inputs[3]:
                ignored = self._constant(inputs[3], "the ignored label")
        if reduction not in {MEAN, SUM}:
            raise _Obstacle("it gives one loss for each row (reduction='none')")
        if self._facts.element_types.get(node.output[0]) != TensorProto.FLOAT:
            raise _Obstacle("it is not computed in float32")
        return self._unmarked(inputs[1]), inputs[2], reduction, ignored

    def _constant(self, name: str, what: str) -> int:
        values = self._facts.vector(name)
        if not values:
            raise _Obstacle(f"{what} is computed")
        return values[0]

    def _unmarked(self, target: str) -> str:
        """Leave out the marker that ORTModule puts on sparse labels: ignored rows are left out here anyway."""
        node = self._facts.producers.get(target)
        if node is not None and node.op_type == "PythonOp":
            name = attributes_of(node).get("func_name", b"").decode()
            if name.endswith("FlagAndPrintDensity"):
                return str(node.input[0])
        return target

    def _follow(self, value: str) -> _Product:
        """Go back from the loss's logits to the product that makes them."""
        producer = self._facts.producers.get(value)
        perm = [] if producer is None else list(attributes_of(producer).get("perm", []))
        if (
            producer is not None
            and len(perm) > _MATRIX
            and perm == [0, len(perm) - 1, *range(1, len(perm) - 1)]
        ):
            value = self._step_back(
                producer
            )  # it brings the classes from the end to where the loss wants them
        elif self._facts.ranks.get(value) != _MATRIX:
            raise _Obstacle("the classes are not the last dimension of its logits")
        while True:
            producer = self._facts.producers.get(value)
            if producer is None:
                raise _Obstacle("its logits are an input of the model")
            product = self._as_product(producer)
            if product is not None:
                return product
            self._check_passed(producer)
            value = self._step_back(producer)

    def _check_passed(self, node: onnx.NodeProto) -> None:
        """Raise _Obstacle if a node leaves rows no rows, or rounds."""
        operator = _operator(node)
        if operator == "Slice":
            if not self._is_whole(node):
                self._slices.append(node)
        elif operator in _RESHAPES:
            if self._slices:
                raise _Obstacle("its logits are reshaped before rows of them are taken")
        elif operator == "Cast":
            if attributes_of(node)["to"] != TensorProto.FLOAT:
                raise _Obstacle("its logits are cast to another type than float32")
        elif operator != "Identity":
            raise _Obstacle(f"{operator} stands between the product that makes the logits and the loss")

    def _step_back(self, node: onnx.NodeProto) -> str:
        self._passed.append(node.input[0])
        return str(node.input[0])

    def _is_whole(self, node: onnx.NodeProto) -> bool:
        """Say whether a Slice takes all; raise _Obstacle where it takes classes, or what it takes is not constant."""
        rank = self._facts.ranks.get(node.input[0], 0)
        starts, ends, *more = (self._facts.vector(name) for name in node.input[1:])
        axes = more[0] if more else list(range(len(starts or [])))
        if starts is None or ends is None or axes is None or not rank:
            raise _Obstacle("what is taken of its logits is computed")
        steps = more[1] if len(more) > 1 else [1]
        whole = steps is not None and set(steps) == {1} and not any(starts) and min(ends) >= _TO_THE_END
        if not whole and any(axis % rank == rank - 1 for axis in axes):
            raise _Obstacle("some classes are taken of its logits")
        return whole

    def _as_product(self, node: onnx.NodeProto) -> _Product | None:
        """Read a node as a product of rows with a matrix, with a bias or without; None if it is none."""
        operator, inputs, ranks = _operator(node), [*node.input, ""], self._facts.ranks
        product = None
        if operator == "Add":
            product = self._with_bias(node)
        elif operator == "MatMul" and ranks.get(inputs[1]) == _MATRIX:
            product = self._of_table(node, inputs[0], inputs[1], turned=True)
        elif operator == "Gemm":
            how = attributes_of(node)
            if how.get("alpha", 1) == how.get("beta", 1) == 1 and not how.get("transA"):
                table = self._of_table(node, inputs[0], inputs[1], turned=not how.get("transB"))
                product = table._replace(bias=inputs[2])
        elif operator == "linear":
            text = call_text(node)
            kinds = [kind for kind, *_ in parsed(text).arguments] if text else []
            if kinds in ([TENSOR] * 3, [TENSOR, TENSOR, VALUE]):
                product = _Product(node, inputs[0], inputs[1], inputs[2], turned=False)
        if product is not None and product.bias and ranks.get(product.bias) != 1:
            return None
        return product

    def _with_bias(self, node: onnx.NodeProto) -> _Product | None:
        """Read an Add as that of a bias."""
        for bias, value in (tuple(node.input), tuple(reversed(node.input))):
            inner = self._facts.producers.get(value)
            if self._facts.ranks.get(bias) == 1 and inner is not None and inner.op_type == "MatMul":
                product = self._as_product(inner)
                if product is not None:
                    self._passed.append(value)
                    return product._replace(bias=bias)
        return None

    def _of_table(self, node: onnx.NodeProto, hidden: str, table: str, *, turned: bool) -> _Product:
        """Return a product, of the weight itself where the table is its transpose."""
        made = self._facts.producers.get(table)
        if made is not None and made.op_type == "Transpose" and attributes_of(made).get("perm") == [1, 0]:
            return _Product(node, hidden, made.input[0], "", not turned)
        return _Product(node, hidden, table, "", turned)

    def _check_shapes(self) -> tuple[int, int]:
        """Return the width of a row and the number of classes, if rows stay rows on the way to the loss."""
        shapes = self._facts.shapes
        shape = shapes.get(self._product.weight, ())
        width, classes = (
            [None] * 2 if len(shape) != _MATRIX else shape if self._product.turned else shape[::-1]
        )
        if not isinstance(classes, int) or not isinstance(width, int):
            raise _Obstacle("the shape of the weight that makes its logits is not known")
        if self._facts.element_types.get(self._product.node.output[0]) not in _UP_TO_FLOAT:
            raise _Obstacle("its logits are of float64")
        for name in self._passed:
            made = self._facts.producers.get(name)
            if made is None or _operator(made) not in _RESHAPES:
                continue
            last = self._wanted_shape(made) or shapes.get(name, (None,))
            if last[-1] != classes:
                raise _Obstacle(
                    "its logits are reshaped, and their last dimension is not that of the classes"
                )
        return width, classes

    def _wanted_shape(self, node: onnx.NodeProto) -> Sequence[Any]:
        """Return the constant shape that a node gives its input; nothing where it is computed."""
        if node.op_type == "Reshape":
            return self._facts.vector(node.input[1]) or ()
        text = call_text(node)
        kind, *given = parsed(text).arguments[1] if text else (None,)
        return given[0] if kind == VALUE else ()

    def _wanted(self) -> tuple[int, int, int]:
        """Say of hidden states, weight and bias whether their gradients are needed."""
        product, needed = self._product, self._facts.differentiable
        of_hidden, of_weight, of_bias = (
            int(name in needed) for name in (product.hidden, product.weight, product.bias)
        )
        return of_hidden, of_weight, of_bias

    # ---- what comes instead -----------------------------------------------------------------------------------

    def apply(self) -> Replaced:
        """Put one node in the place of product and loss, unless something else reads the logits."""
        graph, facts, product = self._model.graph, self._facts, self._product
        logits = self._logits_returned()
        outputs = [value.name for value in graph.output if value.name not in logits]
        nodes: list[onnx.NodeProto] = []
        for node in graph.node:
            nodes += self._new_nodes() if node.output[0] == self._loss.output[0] else [node]
        before = _needed(graph.node, [value.name for value in graph.output])
        after = _needed(nodes, outputs)
        kept = [node for node in nodes if not after.isdisjoint(node.output) or before.isdisjoint(node.output)]
        self._check_readers(kept)
        done = Replaced(
            facts.shapes.get(self._target, ()),
            self._width,
            self._classes,
            facts.element_types.get(product.node.output[0], TensorProto.FLOAT),
        )
        kept = [copied(node) for node in kept]
        for place in reversed(range(len(graph.output))):
            if graph.output[place].name in logits:
                del graph.output[place]
        del graph.node[:]
        graph.node.extend(kept)
        declare_aten(self._model)
        return done

    def _logits_returned(self) -> set[str]:
        """Return the outputs of the graph that are the logits, as they are or cast."""
        same = self._passed_on = set(self._passed)
        for node in self._model.graph.node:
            if node.op_type in {"Identity", "Cast"} and node.input[0] in same:
                same.update(node.output)
        return same & {value.name for value in self._model.graph.output}

    def _new_nodes(self) -> list[onnx.NodeProto]:
        product, stem = self._product, self._loss.output[0]
        new, hidden = [], product.hidden
        for number, taken in enumerate(reversed(self._slices)):
            name = f"{stem}_rows{number}"
            new.append(helper.make_node("Slice", [hidden, *taken.input[1:]], [name], name=f"{name}_Slice"))
            hidden = name
        how = helper.make_tensor(f"{stem}_how_value", TensorProto.INT64, [len(self._how)], list(self._how))
        new.append(helper.make_node("Constant", [], [f"{stem}_how"], name=f"{stem}_how_Constant", value=how))
        inputs = [hidden, product.weight, product.bias, self._target, self._class_weight, f"{stem}_how"]
        gradients = [f"{stem}_of_{what}" for what in ("hidden", "weight", "bias")]
        return [*new, kernel_call(KERNEL, inputs, [stem, *gradients], self._loss)]

    def _check_readers(self, nodes: Sequence[onnx.NodeProto]) -> None:
        """Raise _Obstacle if the logits would be made all the same, because something else reads them."""
        for node in nodes:
            if not self._passed_on.isdisjoint(_reads(node)) and self._passed_on.isdisjoint(node.output):
                raise _Obstacle(f"{_operator(node)} reads its logits, too")


def _needed(nodes: Sequence[onnx.NodeProto], outputs: Sequence[str]) -> set[str]:
    """Return what the nodes make that outputs depend on; `nodes` are in topological order."""
    read, needed = set(outputs), set[str]()
    for node in reversed(nodes):
        if not read.isdisjoint(node.output):
            needed.update(node.output)
            read.update(_reads(node))
    return needed


def _reads(node: onnx.NodeProto) -> Iterator[str]:
    """Yield what a node reads, also inside the graphs that it holds."""
    yield from node.input
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            for inner in graph.node:
                yield from _reads(inner)
            yield from (value.name for value in graph.output)
