"""Parameters that a gradient graph fetches itself, with `mem_efficient_grad_management`.

1.19.2 then makes the parameters outputs of an autograd Function whose backward accumulates the gradient at once
(``_mem_efficient_grad_mgmt.py``), so that gradients reach PyTorch one by one while the backward graph still runs. It
cannot be built, since ``_graph_transition_manager._post_export_process`` passes the parameters where the device is
expected; and the Function keeps the parameters that the module had when it was exported, so that one that has been
replaced since is trained no more.
"""

from __future__ import annotations

import ctypes
import itertools
import weakref
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ortlab.engine.patching import replace, set_to
from ortlab.errors import ExecutionError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

RETRIEVES: Final = b".RetrieveParameter_"
"""In the names of the Functions with which a graph fetches its parameters itself."""

UNASKED: Final[ContextVar[frozenset[str]]] = ContextVar("UNASKED", default=frozenset())
"""Parameters that get no gradient in the backward that runs: only outputs without a gradient lead to them."""

_exported: Final[ContextVar[torch.nn.Module | None]] = ContextVar("exported", default=None)
_numbers: Final = itertools.count(1)


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
            if ctx.name not in UNASKED.get():
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
