"""What ORTModule's export of a ``torch.autograd.Function`` needs beyond 1.19.2.

``_custom_autograd_function_exporter.py`` names a Function by its qualified class name and registers it with
ORT under that name, for ever: ORT "doesn't overwrite existing registered functions" (``RegisterEntry`` in
``custom_function_register.cc``). In a notebook the class of a cell that was run again has the same name,
and the *old* code runs without a word; so do classes made in a function. :func:`unique_names` gives every
class its own name.

The exporter also accepts a Function only if it derives from ``torch.autograd.Function`` directly, and
passes boolean tensors as ``uint8``; both are repaired in :func:`export_any_function`.

Functions of users are exported with their own backward, not with the derivative of a ``symbolic``: torch's exporter
puts the ``symbolic`` of an ``autograd.Function`` into the graph where there is one, and ONNX Runtime then derives the
gradient from that: a straight-through estimator, or a backward that is wrong, trains another way than in PyTorch,
without a word. While a training graph is exported, the symbolics of users' Functions are out of sight, and the
Functions run as they do in PyTorch, forward and backward.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.autograd import Function

from ortlab.engine.functions.runner import boolean_arguments
from ortlab.engine.patching import replace
from ortlab.engine.tracing.source_lines import model_line
from ortlab.errors import BuildError

_BOOL: Final = 9  # onnx.TensorProto.BOOL
_UINT8: Final = 2  # onnx.TensorProto.UINT8

_lock = threading.Lock()
# ORT holds every class that it ever registered, so holding them here adds nothing.
_classes: Final[dict[str, list[type]]] = {}
_unavailable = ""


def forbid(reason: str) -> None:
    """Make the export of a Function fail with a reason, where nothing could run it; "" allows it."""
    global _unavailable  # noqa: PLW0603 - what the platform can do is a fact of the process
    _unavailable = reason


def unique_names(name_of_class: Callable[[type], str]) -> Callable[[type], str]:
    """Wrap ``get_fully_qualified_class_name``: the second class of one name gets ``~2``, and so on."""

    def name(cls: type) -> str:
        plain = name_of_class(cls)
        with _lock:
            namesakes = _classes.setdefault(plain, [])
            if cls not in namesakes:
                namesakes.append(cls)
            number = namesakes.index(cls) + 1
        return plain if number == 1 else f"{plain}~{number}"

    return name


def register_any_function(register: Callable[[str, Any], None]) -> Callable[[str, Any], None]:
    """Wrap ``register_torch_autograd_function``: accept a Function that derives from another one."""
    # ORT looks for ``torch.autograd.Function`` among the direct bases (``EnsureTorchAutogradFunction``) and then takes
    # three attributes, so it gets an object that has just those.

    def register_function(name: str, cls: Any) -> None:
        if Function not in cls.__bases__:
            cls = types.SimpleNamespace(
                __bases__=(Function,), apply=cls.apply, forward=cls.forward, backward=cls.backward
            )
        register(name, cls)

    return register_function


def export_any_function(export: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``_default_export``: say where Functions cannot run, and carry boolean tensors through."""
    # ORT exchanges booleans as ``uint8``. The runner is told which arguments to turn back, under a name of the Function
    # that says so, and a boolean output is declared as what it is, ``uint8``, with a ``Cast`` after it.

    def export_function(
        graph: Any,
        name: str,
        cls: type,
        convention: str,
        n_outputs: int,
        output_types: list[int],
        output_ranks: list[int],
        /,  # the node's own attributes arrive as keywords, and one of them is called "name"
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if _unavailable:
            raise BuildError(
                f"The custom autograd Function {name} cannot run inside ONNX Runtime here.",
                why=_unavailable,
                fix="Install a C++ compiler and run `ortlab build`; models without such Functions need none.",
            )
        booleans = frozenset(
            position
            for position, (kind, arg) in enumerate(zip(convention, args, strict=True))
            if kind == "d" and arg.type().scalarType() == "Bool"
        )
        if booleans:
            name += "~bool" + "_".join(map(str, sorted(booleans)))
            boolean_arguments[name] = booleans
        carried = [_UINT8 if kind == _BOOL else kind for kind in output_types]
        outputs = export(graph, name, cls, convention, n_outputs, carried, output_ranks, *args, **kwargs)
        if booleans:
            _register_supplements(name, cls)
        if carried == output_types:
            return outputs
        cast = [
            graph.op("Cast", output, to_i=_BOOL) if kind == _BOOL else output
            for output, kind in zip(outputs if n_outputs > 1 else (outputs,), output_types, strict=True)
        ]
        return tuple(cast) if n_outputs > 1 else cast[0]

    return export_function


def name_inner_functions(lower: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap ``_jit_pass_lower_all_tuples``, which stops at Functions whose results are used in another Function only."""

    def lower_all_tuples(graph: Any) -> None:
        try:
            lower(graph)
        except RuntimeError as error:
            left = [one for one in graph.nodes() if one.kind() == "prim::PythonOp" and _gives_tuple(one)]
            if not left:
                raise
            raise BuildError(
                f"The autograd Function {left[0].pyname()} is applied inside another autograd Function"
                f"{f', at {line}' if (line := model_line(left[0].sourceRange())) else '.'}",
                why="The exporter of torch traces both, and can put only one of them into a graph.",
                fix="Leave the part that uses them to PyTorch, with the parts around it wrapped: ortlab.wrap(model, "
                "only=[...]); or train with PyTorch: lab.set(engine='eager').",
            ) from error

    return lower_all_tuples


def _gives_tuple(node: Any) -> bool:
    return any(one.type().kind() == "TupleType" for one in node.outputs())


def _register_supplements(name: str, cls: Any) -> None:
    """Register ``infer_shape`` and ``alias_input`` under a name that the exporter does not know."""
    from onnxruntime.capi import _pybind_state

    if hasattr(cls, "infer_shape"):
        _pybind_state.register_shape_inference_function(name, cls.infer_shape)
    if hasattr(cls, "alias_input"):
        _pybind_state.register_input_alias_function(name, cls.alias_input)


def install() -> None:
    """Apply all of it to ORTModule's exporter; idempotent."""
    from onnxruntime.training.ortmodule import _custom_autograd_function_exporter as exporter

    replace(exporter, "get_fully_qualified_class_name", unique_names)
    replace(exporter, "register_torch_autograd_function", register_any_function)
    replace(exporter, "_default_export", export_any_function)
    replace(torch._C, "_jit_pass_lower_all_tuples", name_inner_functions)


# --- backwards of their own ---------------------------------------------------------------------------------------

_OF_THE_EXPORT = ("torch", "onnxruntime")
"""Packages whose Functions with a symbolic are parts of an export."""


@contextmanager
def own_backwards() -> Iterator[None]:
    """Hide the symbolics of users' Functions in the block."""
    hidden = [
        (kind, vars(kind)["symbolic"])
        for kind in functions()
        if "symbolic" in vars(kind) and kind.__module__.partition(".")[0] not in _OF_THE_EXPORT
    ]
    for kind, _ in hidden:
        del kind.symbolic  # type: ignore[attr-defined] # it is in the class's own dictionary
    try:
        yield
    finally:
        for kind, symbolic in hidden:
            kind.symbolic = symbolic  # type: ignore[attr-defined]


def functions() -> Iterator[type[Function]]:
    """Go through all classes of Functions that there are in this process."""
    pending: list[type[Function]] = [Function]
    seen: set[type[Function]] = set()
    while pending:
        for kind in pending.pop().__subclasses__():
            if kind not in seen:
                seen.add(kind)
                pending.append(kind)
                yield kind
