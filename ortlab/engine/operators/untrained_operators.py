"""Leave to torch each traced operator that ONNX cannot express or ONNX Runtime 1.19.2 cannot train.

Which these are is seen where they are translated: if torch's exporter has no form for an operator, or its form has a
node on the way of a gradient that 1.19.2 has no right gradient for, then the form is put aside and the operator becomes
a call of torch's own (`ortlab.engine.operators.call_symbolics`). So no list of operators has to be kept, and an
operator that needs no gradient stays ONNX.
"""

from __future__ import annotations

import importlib
import warnings
from collections import Counter
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from ortlab.engine.exporter import symbolic_module
from ortlab.engine.operators.call_symbolics import (
    NotACallError,
    expanded_by_torch,
    has_no_kernels,
    is_complex,
    leave_to_torch,
)
from ortlab.engine.operators.symbolic_words import LeftToTorch, cast_like, is_training_export, sizes_between
from ortlab.engine.patching import replace
from ortlab.errors import BuildError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ortlab.engine.inspection.failures import Translation

# ``gradient_builder_registry.cc`` of 1.19.2, less Resize and ConvTranspose, whose gradients have no kernel on the CPU,
# and BatchNormalization, MaxPool, AveragePool, ScatterElements, whose gradients are wrong where torch emits them.
TRAINED: Final = frozenset(
    """Abs Add Cast Clip Concat Conv Cos Div Dropout Erf Exp Expand Flatten GRU Gather GatherElements GatherND Gemm
    GlobalAveragePool Identity LSTM LayerNormalization LeakyRelu Log LogSoftmax MatMul Max Min Mul Neg Pad Pow
    Reciprocal ReduceL2 ReduceLogSumExp ReduceMean ReduceSum Relu Reshape ScatterND Sigmoid Sin Slice Softmax
    SoftmaxCrossEntropyLoss Split Sqrt Squeeze Sub Tanh Tile TopK Transpose Trilu Unsqueeze Where""".split()  # noqa: SIM905 - so many words are easier to read without quotes
)
"""The operators of ONNX that 1.19.2 trains on every device."""

# No gradient flows through these, in torch as in ONNX Runtime.
_ENDS: Final = frozenset(
    """And ArgMax ArgMin Constant ConstantOfShape Equal EyeLike Greater GreaterOrEqual IsInf IsNaN Less LessOrEqual
    Multinomial NonZero Not OneHot Or RandomNormalLike RandomUniformLike Range Shape Size Xor""".split()  # noqa: SIM905
)
# Inputs through which no gradient flows (``gradient_graph_builder.h``, STOP_GRADIENT_EDGES).
_NOT_FOLLOWED: Final = {
    "Clip": {1, 2}, "Dropout": {1, 2}, "Expand": {1}, "Gather": {1}, "GatherElements": {1}, "GatherND": {1}, "Pad": {1},
    "ReduceSum": {1}, "Reshape": {1}, "ScatterND": {1}, "Slice": {1, 2, 3, 4}, "Split": {1}, "Squeeze": {1},
    "Tile": {1}, "TopK": {1}, "Trilu": {1}, "Unsqueeze": {1}, "Where": {0},
}  # fmt: skip
_HOOK: Final = "_run_symbolic_function"
_FLOATS: Final = frozenset({1, 10, 11, 16})  # ONNX's numbers of float, float16, double, bfloat16


class _Export:
    """One export in work: what needs a gradient in its traced graph, and what was left to torch."""

    # The tracer's own `requires_grad` is not enough: it is false for what ``aten::_convolution`` returns.

    def __init__(self) -> None:
        self.left: Counter[str] = Counter()
        self._needing: set[int] = set()

    def needs(self, value: Any) -> bool:
        """Say whether a gradient goes to a traced value."""
        if value.node().kind() == "prim::ListConstruct":
            return any(map(self.needs, value.node().inputs()))
        if value.unique() in self._needing:
            return True
        return (
            value.node().kind() != "prim::Constant"
            and value.type().kind() == "TensorType"
            and value.type().scalarType() in _DIFFERENTIABLE
            and bool(value.requires_grad())
        )

    def note(self, node: Any) -> bool:
        """Pass the need on from the inputs of a node to its outputs, and say whether there is one."""
        needing = node.kind() != "aten::detach" and any(map(self.needs, node.inputs()))
        if needing:
            self._needing |= {
                output.unique()
                for output in node.outputs()
                if output.type().kind() != "TensorType" or output.type().scalarType() in _DIFFERENTIABLE
            }
        return any(map(self.needs, node.outputs()))


_DIFFERENTIABLE: Final = frozenset(
    {None, "Half", "BFloat16", "Float", "Double", "ComplexFloat", "ComplexDouble"}
)
_export: Final[ContextVar[_Export]] = ContextVar("export")


WATCHER: Final[ContextVar[Translation | None]] = ContextVar("watcher", default=None)
"""Who is told what becomes of the nodes that this thread exports; a pre-flight is."""


def install() -> None:
    """Watch each export of ORTModule. Calling it again changes nothing."""
    from onnxruntime.training.ortmodule._graph_transition_manager import GraphTransitionManager

    replace(GraphTransitionManager, "_export_model", _watch)


def _watch(original: Callable[..., Any]) -> Callable[..., Any]:
    def export_model(**kwargs: Any) -> Any:
        watcher = WATCHER.get()
        try:
            with _translating():
                exported = original(**kwargs)
        except Exception:
            if watcher is not None:
                watcher.finish()  # what could not be translated is the cause of what came after it
            raise
        if watcher is not None:
            watcher.finish()
        return exported

    return export_model


@contextmanager
def _translating() -> Iterator[None]:
    """Let torch's exporter ask `_translate` for each operator, until the export ends."""
    places = [
        module
        for module in map(importlib.import_module, ("torch.onnx", symbolic_module("utils").__name__))
        if hasattr(module, _HOOK)
    ]
    originals = [getattr(module, _HOOK) for module in places]
    export = _Export()
    token = _export.set(export)
    try:
        for module, original in zip(places, originals, strict=True):
            module.__dict__[_HOOK] = _translate(original)
        yield
    finally:
        for module, original in zip(places, originals, strict=True):
            module.__dict__[_HOOK] = original
        _export.reset(token)
    if export.left:
        counts = (f"{name} ({count})" if count > 1 else name for name, count in sorted(export.left.items()))
        warnings.warn(f"PyTorch computes inside the graph: {', '.join(counts)}.", UserWarning, stacklevel=2)


def _translate(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function that the exporter's C++ code asks for the form of each node."""

    def run_symbolic_function(
        graph: Any, block: Any, node: Any, inputs: Any, *rest: Any, **options: Any
    ) -> Any:
        env, values_in_env, new_nodes, *_ = rest

        def context() -> Any:
            return symbolic_module("jit_utils").GraphContext(
                graph=graph,
                block=block,
                opset=importlib.import_module("torch.onnx._globals").GLOBALS.export_onnx_opset_version,
                original_node=node,
                params_dict=symbolic_module("utils")._params_dict,
                env=env,
                values_in_env=values_in_env,
                new_nodes=new_nodes,
            )

        def onnx_form() -> Any:
            with _constants_kept(inputs):
                return original(graph, block, node, inputs, *rest, **options)

        def translated() -> Any:
            _type_what_is_written(node)
            needed = _export.get().note(node)
            if node.kind().partition("::")[0] in {"prim", "onnx"}:
                if watcher is not None and node.kind() == "prim::PythonOp":
                    watcher.called(node)
                return onnx_form()
            return _Translation(node, inputs, needed and is_training_export(), context, onnx_form).emit()

        watcher = WATCHER.get()
        if watcher is None:
            return translated()
        try:
            return translated()
        except Exception as error:  # noqa: BLE001 - symbolic functions raise anything
            watcher.failed(node, error)
            return _stand_in(context(), node)

    return run_symbolic_function


def _type_what_is_written(node: Any) -> None:
    """Let what a write in place leaves behind have a type: the exporter forgets it, and that numbers are complex."""
    if node.kind() == "onnx::Placeholder":
        for value, written in zip(node.outputs(), next(node.blocks()).outputs(), strict=True):
            value.setType(written.type())


def _stand_in(g: Any, node: Any) -> Any:
    """Emit a node that nothing can execute, with outputs of the types that were traced."""
    outputs = list(node.outputs())
    made = g.op("ortlab::Untranslated", outputs=len(outputs))
    if len(outputs) == 1:
        return made.setType(outputs[0].type())
    return [value.setType(output.type()) for value, output in zip(made, outputs, strict=True)]


@dataclass(frozen=True)
class _Translation:
    """The choice between ONNX and torch for one node of a traced graph."""

    node: Any
    inputs: Any
    trained: bool
    context: Callable[[], Any]
    onnx_form: Callable[[], Any]

    def emit(self) -> Any:
        """Emit the node in one way or the other; return the values of its outputs."""
        if self.node.kind() == "aten::size" and is_complex(next(self.node.inputs())):
            g = self.context()  # without the last dimension, of real and imaginary parts
            return g.op("Gather", sizes_between(g, self.inputs[0], 0, -1), self.inputs[1], axis_i=0)
        if self.node.kind() not in _COPY and any(
            map(is_complex, (*self.node.inputs(), *self.node.outputs()))
        ):
            return self._by_torch("it works on complex numbers")
        kind, values = self.node.kind(), (*self.node.inputs(), *self.node.outputs())
        if kind in _DRAWS:
            return self._by_torch("it draws random numbers")
        by_torch = kind in _OF_EQUALS or (kind in _BY_TORCH and is_training_export())
        by_torch |= kind in _OF_LARGE_NUMBERS and any(map(_is_small_whole, values))
        if by_torch or (kind not in _OF_ALL_DTYPES and any(map(has_no_kernels, values))):
            with suppress(NotACallError):
                return self._leave()
        return self._in_onnx()

    def _in_onnx(self) -> Any:
        sources = _sources(self.node, self.inputs) if self.trained else {}
        try:
            emitted = self.onnx_form()
        except BuildError:
            raise
        except LeftToTorch as wish:
            return self._by_torch(str(wish))
        except Exception as error:
            try:
                return self._leave()
            except NotACallError as why:
                error.not_a_call = str(why)  # type: ignore[attr-defined] # for a pre-flight to say
            raise
        untrained = _untrained(emitted, sources) if self.trained else set()
        if untrained:
            try:
                return self._leave()
            except NotACallError as why:  # the gradient builder says what it lacks
                watcher = WATCHER.get()
                if watcher is not None:
                    watcher.without_gradient(self.node, untrained, str(why))
        return emitted

    def _by_torch(self, why: str) -> Any:
        try:
            return self._leave()
        except NotACallError as error:
            raise BuildError(
                f"{self.node.kind()} cannot be put into a graph of ONNX Runtime.",
                why=f"ONNX Runtime cannot run it ({why}), and PyTorch cannot be called for it ({error}).",
                fix="Leave the part of the model that uses it out of the wrapped module.",
            ) from None

    def _leave(self) -> Any:
        g, inputs = self.context(), list(self.inputs)
        if self.node.kind() == _ASSIGNMENT:
            target, places, values, *_ = self.node.inputs()
            inputs[2] = cast_like(g, inputs[2], values, target)
            if not list(places.node().inputs()) and is_complex(target) == is_complex(values):  # to all of it
                return expanded_by_torch(g, inputs[2], inputs[0])
        emitted = leave_to_torch(g, self.node, inputs, trained=self.trained)
        _export.get().left[self.node.kind()] += 1
        watcher = WATCHER.get()
        if watcher is not None:
            watcher.left(self.node, trained=self.trained)
        return emitted


_ASSIGNMENT: Final = "aten::index_put"
"""Torch casts the values of ``x[...] = values`` before it calls this."""
_COPY: Final = frozenset({"aten::copy", "aten::copy_"})
"""Torch has no gradient for it; its symbolic function makes another call of it."""

_OF_ALL_DTYPES: Final = frozenset(
    f"aten::{name}"
    for name in ("_shape_as_tensor", "copy", "copy_", "detach", "dim", "numel", "size", "to", "type_as")
)
"""Casts, and questions about a shape: ONNX Runtime has kernels for these, whatever the dtype. A copy knows dtypes."""

_DRAWS: Final = frozenset(
    f"aten::{name}"
    for name in (
        "bernoulli", "multinomial", "normal", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like",
        "randperm", "rrelu", "rrelu_with_noise",
    )
)  # fmt: skip
"""Operators that draw: torch's own draw the random numbers of PyTorch for the same seed, in evaluation, too.

ONNX Runtime's generators do not even draw theirs again for the same `torch.manual_seed`.
"""

# Operators whose form in ONNX is never right: the Range of linspace and the Loop of an embedding bag end the process
# when 1.19.2 builds a graph with them. Or it is slow: a roll would be slices put together, whose gradient is a sum of
# padded parts, and im2col a gather of single entries. Or it has none without the layer behind it, as packed sequences.
_BY_TORCH: Final = frozenset(
    f"aten::{name}"
    for name in (
        "_pack_padded_sequence", "_pad_packed_sequence", "embedding_bag", "im2col", "linspace", "roll",
    )
)  # fmt: skip
_OF_EQUALS: Final = frozenset({"aten::topk"})
"""Operators that choose among equal values otherwise than those of ONNX, which take the first.

A router of a mixture of experts begins with equal scores where its weights begin with zeros: other experts were
trained.
"""
_OF_LARGE_NUMBERS: Final = frozenset(
    f"aten::{name}"
    for name in ("abs", "add", "div", "floor_divide", "mul", "neg", "pow", "remainder", "sub", "sum")
)
"""Operators of which ONNX Runtime has no kernel for whole numbers of eight and sixteen bits."""
_SMALL: Final = 16


def _is_small_whole(value: Any) -> bool:
    kind = value.type()
    return kind.kind() == "TensorType" and kind.scalarType() in {"Byte", "Char", "Short"}


@contextmanager
def _constants_kept(inputs: Any) -> Iterator[None]:
    """Undo what a symbolic function changes in its constants, which other operators share."""
    # Torch's symbolic function of repeat_interleave (``symbolic_opset11``, to 2.15) adds the rank to a negative
    # dimension in place; a later ``torch.stack(..., dim=-1)`` then stacks along another one.
    constants = [
        (tensor, tensor.clone())
        for tensor in (
            value.node().t("value")
            for value in inputs
            if hasattr(value, "node")  # a PythonOp has functions among its inputs
            and value.node().kind() == "onnx::Constant"
            and value.node().hasAttribute("value")
            and value.node().kindOf("value") == "t"
        )
        if tensor.numel() <= _SMALL
    ]
    try:
        yield
    finally:
        for tensor, before in constants:
            # They may be tensors of the model, whose writes autograd counts.
            if not torch.equal(tensor, before):
                tensor.copy_(before)


def _sources(node: Any, inputs: Any) -> dict[int, bool]:
    """Return the inputs of a node in the graph that is being made, and which of them need a gradient."""
    # Call it before the node is translated: torch's symbolic function of `cat` takes empty tensors out of its list.
    needs = _export.get().needs
    sources: dict[int, bool] = {}
    for traced, value in zip(node.inputs(), inputs, strict=True):
        if not isinstance(value, torch.Value):
            continue
        if traced.node().kind() == "prim::ListConstruct" and value.node().kind() == "prim::ListConstruct":
            parts = zip(traced.node().inputs(), value.node().inputs(), strict=True)
            sources |= {part.unique(): needs(one) for one, part in parts}
        else:
            sources[value.unique()] = needs(traced)
    return sources


def _untrained(emitted: Any, sources: dict[int, bool]) -> set[str]:
    """Return the ONNX operators that a gradient meets in what was emitted and that 1.19.2 cannot train."""
    found: set[str] = set()
    for value in emitted if isinstance(emitted, (list, tuple)) else [emitted]:
        if value is not None:
            _follow(value, sources, found)
    return found


def _follow(value: Any, sources: dict[int, bool], found: set[str]) -> bool:
    """Say whether a value needs a gradient, and collect in `found` what has none on the way to the sources."""
    known = sources.get(value.unique())
    if known is not None:
        return known
    node = value.node()
    domain, _, operator = node.kind().partition("::")
    ends = (domain == "onnx" and operator in _ENDS) or (domain == "prim" and operator != "ListConstruct")
    ends |= operator == "Cast" and node.i("to") not in _FLOATS
    sources[value.unique()] = False
    if operator in {"If", "Loop"}:  # 1.19.2 follows no gradient into a branch, and says nothing
        sources[value.unique()] = True
        found.add(operator)
    elif not ends:
        stopped = _NOT_FOLLOWED.get(operator, set()) if domain == "onnx" else set()
        followed = [
            _follow(one, sources, found) for index, one in enumerate(node.inputs()) if index not in stopped
        ]
        sources[value.unique()] = any(followed)
        exponent = operator == "Pow" and followed[1]  # GetPowGradient leaves that one out
        if any(followed) and domain == "onnx" and (exponent or not _is_trained(node, operator)):
            found.add(operator)
    return sources[value.unique()]


def _is_trained(node: Any, operator: str) -> bool:
    if operator == "Pad":  # GetPadGradient: "Pad gradient currently supports constant mode only"
        return "mode" not in node.attributeNames() or node.s("mode") == "constant"
    if operator in {"LSTM", "GRU"} and "direction" in node.attributeNames():
        # As lstm_io_utils.cc says, their kernels support "the forward direction for now" and no other.
        return bool(node.s("direction") == "forward")
    return operator in TRAINED
