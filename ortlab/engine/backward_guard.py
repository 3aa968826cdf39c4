"""A backward pass of a wrapped model refuses what PyTorch refuses, and gives no gradient where PyTorch gives none.

The autograd node of 1.19.2 (``_training_manager.py``, `_ORTModuleFunction`) tells autograd of one output, and of no
input, that its backward reads it. So where a weight, a batch or an output is written to between forward and backward,
gradients are computed with the new values, without a word. A second backward through one forward ends in an
AttributeError, and the gradient of a gradient (`create_graph=True`) is lost.

Where no gradient comes for an output, as for one of two heads, 1.19.2 takes zeros for it, and so the head's weights get
a gradient of zeros: an optimizer with momentum or weight decay then moves weights that it leaves alone in PyTorch. And
where the derivative behind such an output is infinite, as that of a logarithm of 0, zero times infinity is not a number
and goes on into what the loss does reach: then the backward is refused.

With `mem_efficient_grad_mgmt`, 1.19.2 makes the parameters outputs of an autograd Function whose backward accumulates
the gradient at once (``_mem_efficient_grad_mgmt.py``), so that gradients reach PyTorch one by one while the backward
graph still runs. It cannot be built, since ``_graph_transition_manager._post_export_process`` passes the
parameters where the device is expected; and the Function keeps the parameters that the module had when it was exported,
so that one that has been replaced since is trained no more.
"""

from __future__ import annotations

import ctypes
import itertools
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from ortlab.engine.passes.graph_edits import GraphFacts, aten_operator, attributes_of, has_inner_graphs
from ortlab.engine.patching import replace, set_to
from ortlab.engine.tracing.graph_inputs import advanced_by_graph
from ortlab.errors import ExecutionError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    import onnx


_SAME_MEMORY: Final = frozenset(
    {"Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}
)
"""Operators whose output may be their input's memory, or that an optimizer of the session may look through."""

_WITHOUT_VALUES: Final = frozenset({"Shape", "Size"})

_RETRIEVES: Final = b".RetrieveParameter_"
"""In the names of the Functions with which a graph fetches its parameters itself."""


class _Unasked(NamedTuple):
    """What only those outputs of a model lead to that no gradient was given for."""

    inputs: frozenset[int] = frozenset()  # of the graph, by their numbers
    retrieved: frozenset[str] = frozenset()  # parameters that the graph fetches itself
    steep: str = ""  # a node whose derivative may be infinite, and its line

    def left_out_of(self, found: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        """Return the other gradients, which have to be numbers where a derivative may be infinite."""
        kept = tuple(None if number in self.inputs else one for number, one in enumerate(found))
        if self.steep and any(one is not None and bool(one.isnan().any()) for one in kept):
            raise ExecutionError(
                f"Gradients are not numbers, and {self.steep}, may be why: no gradient was given for what it computes.",
                why="ONNX Runtime takes zeros there, and zero times an infinite derivative is not a number. PyTorch "
                "goes no such way.",
                fix="Return that output detached (.detach()), or let PyTorch run the model: lab.set(engine='eager').",
            )
        return kept


_NOTHING: Final = _Unasked()
_STEEP: Final = frozenset(
    "Acos Acosh Asin ATen Atanh Div Log Pow PythonOp Reciprocal ReduceL2 ReduceLogSum Sqrt".split()  # noqa: SIM905
)
"""Operators whose derivative may be infinite."""


class GuardedBackward:
    """Mixin of ORTModule's training manager: its autograd nodes refuse in backward what PyTorch refuses."""

    recomputes = False
    lines: Mapping[str, str]
    # Of the graph that is built, by which outputs a gradient was given for.
    _known_unasked: tuple[onnx.ModelProto, dict[tuple[bool, ...], _Unasked]]
    _onnx_models: Any
    _graph_info: Any
    _graph_transition_manager: Any

    def _create_autofunction_class(self) -> type:
        function: Any = super()._create_autofunction_class()  # type: ignore[misc] # untyped base
        manager = self

        class _ORTModuleFunction(function):  # type: ignore[misc] # the name says in `grad_fn` who ran the forward
            @staticmethod
            def forward(ctx: Any, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
                outputs: tuple[torch.Tensor, ...] = function.forward(ctx, *inputs)
                read = manager._read(inputs)
                ctx.versions = [
                    (name, weakref.ref(tensor), tensor._version)
                    for name, tensor in read
                    if not tensor.is_inference()  # which has none, and which autograd refuses to keep
                ]
                kept = manager._graph_info.module_output_indices_requires_save_for_backward
                ctx.save_for_backward(
                    *(outputs[index] for index in kept if index < len(outputs)),
                    *(tensor for _, tensor in read),
                )
                return outputs

            @staticmethod
            def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
                if not hasattr(ctx.run_info, "state"):
                    raise _used_up()
                try:
                    _ = ctx.saved_tensors
                except RuntimeError as error:
                    raise _changed(ctx.versions, error) from error
                # 1.19.2 would read them again, which torch.utils.checkpoint refuses.
                read = SimpleNamespace(run_info=ctx.run_info, saved_tensors=())
                unasked = manager._unasked_by(gradients)
                with set_to(_unasked, unasked.retrieved) if unasked.retrieved else nullcontext():
                    found = function.backward(read, *gradients)
                if unasked is not _NOTHING:
                    found = unasked.left_out_of(found)
                if torch.is_grad_enabled():  # create_graph=True
                    anchor = torch.zeros((), requires_grad=True)
                    return _FirstDerivative.apply(anchor, *found)  # type: ignore[no-untyped-call]
                return found

        return _ORTModuleFunction

    def _unasked_by(self, gradients: Sequence[torch.Tensor | None]) -> _Unasked:
        """Say what has no gradient where some of the outputs have none."""
        if all(gradient is not None for gradient in gradients):
            return _NOTHING
        model = self._onnx_models.optimized_model
        known = getattr(self, "_known_unasked", None)
        if known is None or known[0] is not model:
            known = self._known_unasked = (model, {})
        given = tuple(gradient is not None for gradient in gradients)
        if given not in known[1]:
            known[1][given] = self._led_to_by_none(given)
        return known[1][given]

    def _led_to_by_none(self, given: Sequence[bool]) -> _Unasked:
        info = self._graph_transition_manager._post_export_processed_model_info
        forward = info._post_export_processed_model
        names = self._graph_info.user_output_names
        known = {value.name for value in forward.graph.output}
        # What an inner graph reads of the values outside is not followed.
        if has_inner_graphs(forward.graph) or not known.issuperset(names):
            return _NOTHING
        facts = GraphFacts(forward)
        left_out = facts.leading_out - facts.leading_to(itertools.compress(names, given))
        retrieved = {
            node.output[1]
            for node in forward.graph.node
            if _RETRIEVES in attributes_of(node).get("func_name", b"")
        }
        inputs = enumerate(info.onnx_graph_input_names)
        unasked = _Unasked(
            frozenset(number for number, name in inputs if name in left_out),
            frozenset(left_out & retrieved),
            next((self._placed(node) for node in forward.graph.node if _is_steep(node, left_out)), ""),
        )
        return unasked if any(unasked) else _NOTHING

    def _placed(self, node: onnx.NodeProto) -> str:
        line = self.lines.get(node.name, "")
        return f"{aten_operator(node) or node.op_type} at {line}" if line else node.name

    def _read(self, inputs: Sequence[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        """Return name and tensor of the inputs that the backward reads."""
        info = self._graph_transition_manager._post_export_processed_model_info
        model = self._onnx_models.optimized_model
        known = vars(self).get("_known_reads")
        if known is None or known[0] is not model:
            names = (
                {value.name for value in model.graph.input} if self.recomputes else read_in_backward(model)
            )
            names -= set(
                advanced_by_graph(info._post_export_processed_model)
            )  # 1.19.2 and ortlab write these
            known = self._known_reads = (model, names)
        pairs = zip(info.onnx_graph_input_names, inputs, strict=False)
        return [(name, tensor) for name, tensor in pairs if name in known[1]]


class _FirstDerivative(torch.autograd.Function):
    """Hands gradients on, and refuses to compute their gradients."""

    @staticmethod
    def forward(_ctx: Any, _anchor: torch.Tensor, *gradients: torch.Tensor | None) -> Any:  # type: ignore[override]
        return gradients

    @staticmethod
    def backward(_ctx: Any, *_gradients: torch.Tensor | None) -> Any:
        raise ExecutionError(
            "The gradient of a gradient was asked for, through a wrapped model (create_graph=True).",
            why="ONNX Runtime computes first derivatives only.",
            fix="Use PyTorch for such steps, as a gradient penalty or a Hessian needs: lab.set(engine='eager').",
        )


def _is_steep(node: onnx.NodeProto, values: Collection[str]) -> bool:
    """Say whether a node makes one of these values with a derivative that may be infinite."""
    return node.op_type in _STEEP and any(name in values for name in node.output)


def read_in_backward(model: onnx.ModelProto) -> set[str]:
    """Return the inputs of a gradient graph whose values its backward, the part behind ORT's `YieldOp`, reads."""
    graph = model.graph
    makers = {name: node for node in graph.node for name in node.output if name}
    forward: set[str] = set()
    pending = [name for node in graph.node if node.op_type == "YieldOp" for name in node.input]
    while pending:
        name = pending.pop()
        if name not in forward:
            forward.add(name)
            pending += makers[name].input if name in makers else ()
    inputs = {value.name for value in graph.input}
    read: set[str] = set()
    for node in graph.node:
        if node.op_type in _WITHOUT_VALUES or not forward.isdisjoint(node.output):
            continue
        for name in node.input:
            source = name
            while source in makers and makers[source].op_type in _SAME_MEMORY:
                source = makers[source].input[0]
            if source in inputs and node.op_type != "YieldOp":
                read.add(source)
    return read


def _used_up() -> ExecutionError:
    return ExecutionError(
        "backward() came a second time through one forward pass of a wrapped model.",
        why="ONNX Runtime frees what it has kept for the backward as soon as that has run, retain_graph or not.",
        fix="Add the losses up and call backward() once, or call the model again. For a Jacobian, or two backward "
        "passes of a multi-task loss, use PyTorch: lab.set(engine='eager').",
    )


def _changed(
    versions: Sequence[tuple[str, weakref.ref[torch.Tensor], int]], error: RuntimeError
) -> Exception:
    if "modified by an inplace operation" not in str(error):
        return error
    present = [(name, reference(), version) for name, reference, version in versions]
    names = [name for name, tensor, version in present if tensor is not None and tensor._version != version]
    shown = ", ".join(name.removeprefix("_original_module.") for name in names[:3])
    shown = shown + (f" and {len(names) - 3} more" if len(names) > 3 else "") or "an output of the model"  # noqa: PLR2004
    return ExecutionError(
        f"Written to between a forward pass and its backward: {shown}.",
        why="The backward reads it, and with the new values its gradients would be wrong; PyTorch refuses it, too.",
        fix="Call backward() before optimizer.step() and before you write to a batch or an output in place; "
        "or call the model again.",
    )


_exported: Final[ContextVar[torch.nn.Module | None]] = ContextVar("exported", default=None)
_numbers: Final = itertools.count(1)
_unasked: Final[ContextVar[frozenset[str]]] = ContextVar("unasked", default=_NOTHING.retrieved)


def install() -> None:
    """Put the repairs in. Calling it again changes nothing."""
    from onnxruntime.training.ortmodule import _mem_efficient_grad_mgmt
    from onnxruntime.training.ortmodule._graph_transition_manager import GraphTransitionManager

    replace(GraphTransitionManager, "_post_export_process", _note_module)
    replace(_mem_efficient_grad_mgmt, "post_processing_enable_mem_efficient_training", _on_their_device)
    replace(_mem_efficient_grad_mgmt, "_create_param_retrieval_function", _retrieve_present_parameters)


def _note_module(original: Callable[..., Any]) -> Callable[..., Any]:
    def post_export_process(flatten_module: Any, *args: Any, **kwargs: Any) -> Any:
        with set_to(_exported, flatten_module):
            return original(flatten_module, *args, **kwargs)

    return post_export_process


def _on_their_device(original: Callable[..., Any]) -> Callable[..., Any]:
    def post_processing(model: Any, named_parameters: Any, retrieved: Mapping[str, torch.Tensor]) -> Any:
        device = next(iter(retrieved.values())).device
        return original(model, named_parameters, device)

    return post_processing


class _Parameter(NamedTuple):
    """Where a parameter is, and what its value is like: a replacement of another kind means a new export."""

    module: weakref.ref[torch.nn.Module]
    path: str
    shape: tuple[int, ...]
    element_type: int

    def value(self) -> torch.nn.Parameter:
        """Return the parameter that is there now."""
        module = self.module()
        if module is None:
            raise ReferenceError("the module of this graph is gone")
        return module.get_parameter(self.path)


def _hooked(path: str) -> ExecutionError:
    return ExecutionError(
        f"{path} has a hook that runs as soon as its gradient is there (register_post_accumulate_grad_hook).",
        why="With mem_efficient_grad_management that is in the middle of ONNX Runtime's backward pass, which may read "
        "the weight later on; an optimizer in the hook would make the gradients before it wrong.",
        fix="Set mem_efficient_grad_management=False, or remove the hook and step after backward().",
    )


def _retrieve_present_parameters(_original: Callable[..., Any]) -> Callable[..., type]:
    def create_function(retrieved: Mapping[str, torch.nn.Parameter], trigger_gradient: torch.Tensor) -> type:
        import torch
        from onnxruntime.training.utils import pytorch_type_to_onnx_dtype

        flattened: Any = _exported.get()
        module = flattened._original_module  # the Function outlives the graph, and must not keep the model
        paths = {id(parameter): path for path, parameter in module.named_parameters(remove_duplicate=False)}
        parameters = {
            name: _Parameter(
                weakref.ref(module),
                paths[id(parameter)],
                tuple(parameter.shape),
                int(pytorch_type_to_onnx_dtype(parameter.dtype)),
            )
            for name, parameter in retrieved.items()
        }

        def forward(ctx: Any, _trigger: torch.Tensor, name: str) -> torch.nn.Parameter:
            parameter = parameters[name].value()
            ctx.name, ctx.parameter = name, parameter
            if getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise _hooked(parameters[name].path)
            return parameter

        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            if ctx.name not in _unasked.get():
                ctx.parameter.backward(gradient)
            return trigger_gradient, None

        def infer_shape(node: Any, _shapes: Any, _types: Any) -> tuple[list[Any], list[Any]]:
            (pointers,) = (
                attribute.ints for attribute in node.attribute if attribute.name == "input_pointer_scalars"
            )
            one = parameters[ctypes.cast(pointers[0], ctypes.py_object).value]
            return [list(one.shape)], [one.element_type]

        members: dict[str, Any] = {
            "forward": staticmethod(forward),
            "backward": staticmethod(backward),
            "infer_shape": staticmethod(infer_shape),
        }
        return type(f"RetrieveParameter_{next(_numbers)}", (torch.autograd.Function,), members)

    return create_function
