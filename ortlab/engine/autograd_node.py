"""A step of a training session: forward, the node of autograd between its halves, backward.

The backward refuses what PyTorch refuses, and gives no gradient where PyTorch gives none.

The autograd node of 1.19.2 (``_training_manager.py``, `_ORTModuleFunction`) tells autograd of one output, and of no
input, that its backward reads it. So where a weight, a batch or an output is written to between forward and backward,
gradients are computed with the new values, without a word. A second backward through one forward ends in an
AttributeError, and the gradient of a gradient (`create_graph=True`) is lost.

Where no gradient comes for an output, as for one of two heads, 1.19.2 takes zeros for it, and so the head's weights get
a gradient of zeros: an optimizer with momentum or weight decay then moves weights that it leaves alone in PyTorch. And
where the derivative behind such an output is infinite, as that of a logarithm of 0, zero times infinity is not a number
and goes on into what the loss does reach: then the backward is refused.
"""

# ruff: noqa: E402 - onnxruntime.training can be imported only after load() has prepared torch for it

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]

from ortlab.engine import load
from ortlab.engine.functions.context import contexts_made, release_serials
from ortlab.engine.passes.graph_edits import (
    WITHOUT_VALUES,
    GraphFacts,
    aten_operator,
    attributes_of,
    has_inner_graphs,
)
from ortlab.engine.patching import set_to
from ortlab.engine.retrieved_parameters import RETRIEVES, UNASKED
from ortlab.engine.tracing.graph_inputs import advanced_by_graph
from ortlab.errors import ExecutionError

load()

from onnxruntime.capi import _pybind_state as C
from onnxruntime.training.ortmodule import _utils

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    import onnx

_SAME_MEMORY: Final = frozenset(
    {"Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}
)
"""Operators whose output may be their input's memory, or that an optimizer of the session may look through."""

_VERSION: Final = attrgetter("_version")


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


class AutogradNode:
    """Mixin of ORTModule's training manager: runs its session, between whose halves stands a node of autograd."""

    recomputes = False
    runs_python = True  # whether Python's code may run in the midst of the session: a Function's
    # Since the module's tensors last changed: by place among the inputs, with addresses and as ONNX Runtime's values.
    fed_parameters: dict[int, tuple[torch.Tensor, int, Any]]
    lines: Mapping[str, str]
    # Of the graph that is built, by which outputs a gradient was given for.
    _known_unasked: tuple[onnx.ModelProto, dict[tuple[bool, ...], _Unasked]]
    _known_reads: tuple[onnx.ModelProto, list[int], list[str]]  # of the graph that is built: places and names
    _device: torch.device
    _execution_agent: Any
    _gradient_accumulation_manager: Any
    _gradient_map: Sequence[int]
    _graph_info: Any
    _graph_transition_manager: Any
    _onnx_models: Any

    def run(self, inputs: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Run the session's forward; the backward of what it returns runs the session's backward."""
        self._gradient_accumulation_manager.maybe_update_cache_before_run()
        # What `Function.apply` calls when it has looked at each parameter for a transform of torch.func; none goes on.
        apply: Any = super(torch.autograd.Function, self._forward_class).apply  # type: ignore[attr-defined,misc]
        outputs: tuple[torch.Tensor, ...] = apply(*inputs)
        return outputs

    def _create_autofunction_class(self) -> type:
        manager, self.fed_parameters = self, {}

        class _ORTModuleFunction(torch.autograd.Function):  # the name says in `grad_fn` who ran the forward
            @staticmethod
            def forward(ctx: Any, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
                return manager._run_forward(ctx, inputs)

            @staticmethod
            def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
                found = manager._run_backward(ctx, gradients)
                if torch.is_grad_enabled():  # create_graph=True
                    anchor = torch.zeros((), requires_grad=True)
                    return _FirstDerivative.apply(anchor, *found)  # type: ignore[no-untyped-call]
                return found

        return _ORTModuleFunction

    # ---- the two halves of a run -------------------------------------------------------------------------------

    # As the Function of 1.19.2, without what it asks anew in each step: a small model's step is half Python's.

    def _run_forward(self, ctx: Any, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        ctx.run = run = _Pass()
        cached = self._gradient_accumulation_manager
        fetches = C.OrtValueVector()
        if self.runs_python:
            with contexts_made() as serials:
                self._execution_agent.run_forward(self._fed(inputs), fetches, run.state, cached.cache)
            if serials:
                weakref.finalize(run, release_serials, serials).atexit = False
        else:
            self._execution_agent.run_forward(self._fed(inputs), fetches, run.state, cached.cache)
        outputs: tuple[torch.Tensor, ...]
        outputs = cached.extract_outputs_and_maybe_update_cache(fetches, self._device)
        run.outputs = [(one.shape, one.dtype) for one in outputs]
        ctx.set_materialize_grads(False)  # a gradient that is not given stays None
        facts = self._graph_info
        # ONNX Runtime keeps what its backward reads, and `save_for_backward` would look at each parameter twice.
        names, read = self._read(inputs)
        run.read = names, read, [*map(_VERSION, read)]
        ctx.save_for_backward(
            *[
                outputs[index]
                for index in facts.module_output_indices_requires_save_for_backward
                if index < len(outputs)
            ]
        )
        silent = facts.output_grad_indices_non_differentiable
        if silent:  # told all at once: each call replaces what the one before said
            ctx.mark_non_differentiable(*[outputs[index] for index in silent])
        return outputs

    def _fed(self, inputs: Sequence[torch.Tensor]) -> Any:
        """Hand the inputs to ONNX Runtime: parameters that are where they were as they were handed over before."""
        feeds = C.OrtValueVector()
        feeds.reserve(len(inputs))
        for place, one in enumerate(inputs):
            known = self.fed_parameters.get(place)
            if known and known[0] is one and known[1] == one.data_ptr() and one.is_contiguous():
                feeds.push_back(known[2])
                continue
            kept = isinstance(one, torch.nn.Parameter) and one.is_contiguous() and one.dtype is not torch.bool
            # Nobody but Python may hold a parameter itself, or `torch.utils.swap_tensors` refuses it.
            _feed(feeds, one.detach() if kept else one)
            if kept:
                self.fed_parameters[place] = one, one.data_ptr(), feeds[place]
        return feeds

    def _run_backward(self, ctx: Any, gradients: Sequence[torch.Tensor | None]) -> Any:
        run: _Pass = ctx.run
        if run.state is None:
            raise _used_up()
        names, read, versions = run.read
        if [*map(_VERSION, read)] != versions:
            before = zip(names, read, versions, strict=True)
            raise _changed(name for name, tensor, version in before if tensor._version != version)
        try:
            _ = ctx.saved_tensors
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            raise _changed() from error
        unasked, silent = self._unasked_by(gradients), self._graph_info.output_grad_indices_non_differentiable
        given = [
            self._missing(index, *run.outputs[index]) if one is None else one
            for index, one in enumerate(gradients)
            if index not in silent
        ]
        fetches = C.OrtValueVector()
        # What is kept of the forward is freed as soon as the backward has run.
        state, run.state, run.read = run.state, None, _NOTHING_READ
        del names, read, versions
        with set_to(UNASKED, unasked.retrieved) if unasked.retrieved else nullcontext():
            self._execution_agent.run_backward(_feeds(given), fetches, state)
        del state
        made = _utils._ortvalues_to_torch_tensor(fetches, self._device)
        found = tuple([made[index] if index != -1 else None for index in self._gradient_map])
        return found if unasked is _NOTHING else unasked.left_out_of(found)

    def _missing(self, index: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Return the gradient of an output that none was given for: zeros, a scalar where the graph allows for that."""
        whole = index in self._graph_info.output_grad_indices_require_full_shape
        return torch.zeros(shape if whole else (), dtype=dtype, device=self._device)

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
            if RETRIEVES in attributes_of(node).get("func_name", b"")
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

    def _read(self, inputs: Sequence[torch.Tensor]) -> tuple[list[str], list[torch.Tensor]]:
        """Return names and tensors of the inputs that the backward reads."""
        model = self._onnx_models.optimized_model
        known = vars(self).get("_known_reads")
        if known is None or known[0] is not model:
            info = self._graph_transition_manager._post_export_processed_model_info
            wanted = (
                {value.name for value in model.graph.input} if self.recomputes else read_in_backward(model)
            )
            # 1.19.2 and ortlab write these.
            wanted -= set(advanced_by_graph(info._post_export_processed_model))
            names = info.onnx_graph_input_names
            known = self._known_reads = (
                model,
                [place for place, name in enumerate(names) if name in wanted],
                [name for name in names if name in wanted],
            )
        _, places, names = known
        read = [inputs[place] for place in places]
        if any(map(torch.Tensor.is_inference, read)):
            # They have no version, and autograd refuses to keep them.
            kept = [not one.is_inference() for one in read]
            return [*itertools.compress(names, kept)], [*itertools.compress(read, kept)]
        return names, read


_NOTHING_READ: Final[tuple[list[str], list[torch.Tensor], list[int]]] = ([], [], [])


class _Pass:
    """A forward whose backward has not run yet: what ONNX Runtime keeps for it, what was given and what came out."""

    def __init__(self) -> None:
        self.state: Any = C.PartialGraphExecutionState()
        self.outputs: list[tuple[torch.Size, torch.dtype]] = []
        self.read = _NOTHING_READ  # inputs that the backward reads: their names, themselves, their versions


def _feeds(tensors: Sequence[torch.Tensor]) -> Any:
    """Hand tensors to ONNX Runtime, which reads dense ones and has booleans as bytes: the others without a copy."""
    feeds = C.OrtValueVector()
    feeds.reserve(len(tensors))
    for one in tensors:
        _feed(feeds, one)
    return feeds


def _feed(feeds: Any, tensor: torch.Tensor) -> None:
    # As `border.give_capsule`, but without detaching each parameter in each step.
    dense = tensor if tensor.is_contiguous() else tensor.contiguous()
    is_boolean = tensor.dtype is torch.bool
    feeds.push_back(to_dlpack(dense.to(torch.uint8) if is_boolean else dense), is_boolean)


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
        if node.op_type in WITHOUT_VALUES or not forward.isdisjoint(node.output):
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


def _changed(names: Iterable[str] = ()) -> ExecutionError:
    named = [name.removeprefix("_original_module.") for name in names]
    shown = ", ".join(named[:3]) or "an output of the model"
    shown += f" and {len(named) - 3} more" if len(named) > 3 else ""  # noqa: PLR2004
    return ExecutionError(
        f"Written to between a forward pass and its backward: {shown}.",
        why="The backward reads it, and with the new values its gradients would be wrong; PyTorch refuses it, too.",
        fix="Call backward() before optimizer.step() and before you write to a batch or an output in place; "
        "or call the model again.",
    )
