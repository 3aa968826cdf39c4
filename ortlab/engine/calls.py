"""What a call of a model is refused for before anything is built or run: devices, empty inputs, transforms, labels."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch
from onnx import numpy_helper
from torch.autograd import forward_ad

from ortlab.engine.devices import check_device
from ortlab.errors import BuildError, ExecutionError

if TYPE_CHECKING:
    import onnx


_META = torch.device("meta")
_LOAD = "Load the weights first: model.to_empty(device='cpu'), then model.load_state_dict(...)."


def check_module(module: torch.nn.Module, available: Collection[str]) -> None:
    """Refuse a module that no session could hold: on several devices, on one without a provider, or without values."""
    kind = type(module).__name__
    places: dict[torch.device, str] = {}
    for name, parameter in module.named_parameters():
        places.setdefault(parameter.device, name)
    if len(places) > 1:
        where = ", ".join(f"{name!r} on {device}" for device, name in places.items())
        first = next(iter(places))
        raise BuildError(
            f"{kind} is on several devices: {where}.",
            why="One ONNX Runtime session trains on one device.",
            fix=_LOAD if _META in places else f"Move all of it to one: model.to({str(first)!r}).",
        )
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta:
            raise BuildError(
                f"{name!r} of {kind} is on device 'meta': it has a shape, and no values.",
                why="A model that is made on 'meta', or offloaded, gets its weights later, or not at all.",
                fix=_LOAD,
            )
        if tensor.is_complex():
            _refuse_complex(f"{name!r} of {kind}", tensor, "Keep it as real numbers,", "x")
    for device in places:
        check_device(device, available)


def _refuse_complex(what: str, tensor: torch.Tensor, do: str, name: str) -> NoReturn:
    raise BuildError(
        f"{what} is {str(tensor.dtype).removeprefix('torch.')}, and a graph takes real numbers.",
        why="ONNX Runtime has no complex tensors. A forward may compute with them between real ones.",
        fix=f"{do} torch.view_as_real({name}), and use torch.view_as_complex({name}) in the forward; "
        "or train with PyTorch: lab.set(engine='eager').",
    )


def check_call(module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse inputs on which ONNX Runtime would end the process, or compute something else."""
    # Its CPU kernels divide by sizes: an empty batch ends the whole process with a floating point exception, or gives a
    # loss where PyTorch's is nan.
    for name, value in named_inputs(module, args, kwargs):
        if not isinstance(value, torch.Tensor):
            continue
        if value.layout is not torch.strided:
            raise BuildError(
                f"`{name}` is a {str(value.layout).removeprefix('torch.')} tensor, which ONNX Runtime cannot read.",
                why="It trains on dense tensors.",
                fix=f"Pass `{name}` as {name}.to_dense(), or engine='eager' for this model.",
            )
        if value.is_complex():
            _refuse_complex(f"`{name}`", value, "Pass", name)
        if not value.numel():
            raise BuildError(
                f"`{name}` is empty: its shape is {shape_words(value)}.",
                why="ONNX Runtime 1.19.2 divides by sizes: an empty batch can end the whole process.",
                fix="Leave such batches out (drop_last, or a filter in the data loader), or let PyTorch run them: "
                "lab.set(engine='eager').",
            )


def named_inputs(
    module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a call's arguments, each behind a name that a user knows."""
    # Names are "input_ids", "past[0]", "batch['labels']"; "argument 1" where the forward has no name. A leaf is
    # whatever is neither a mapping nor a list or tuple that holds a tensor or mapping, at any depth.
    names = argument_names(module, args, kwargs)
    for name, value in zip(names, (*args, *kwargs.values()), strict=True):
        yield from _leaves(name, value)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(f"{name}[{key!r}]", item)
    elif isinstance(value, (list, tuple)) and _holds_tensors(value):
        for position, item in enumerate(value):
            yield from _leaves(f"{name}[{position}]", item)
    else:
        yield name, value


def _holds_tensors(value: Any) -> bool:
    """Tell whether a value is a tensor or a mapping, or a list or tuple that holds one at any depth."""
    if isinstance(value, (list, tuple)):
        return any(map(_holds_tensors, value))
    return isinstance(value, (torch.Tensor, Mapping))


def argument_names(module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """Name each argument of a call."""
    try:
        parameters = [*inspect.signature(module.forward).parameters.values()]
    except (TypeError, ValueError):  # a forward written in C++ shows no parameters
        parameters = []
    known = [one.name for one in parameters if one.kind in {one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD}]
    unknown = [f"argument {number + 1}" for number in range(len(known), len(args))]
    return [*known[: len(args)], *unknown, *kwargs]


def shape_words(tensor: torch.Tensor) -> str:
    """Write a shape as an error does: "2 x 3"."""
    return " x ".join(str(size) for size in tensor.shape) or "a single number"


def refuse_transforms() -> None:
    """Raise ExecutionError if a call comes from inside a transform, whose tensors ONNX Runtime cannot see through."""
    # That is in `torch.func.grad`, `vmap`, `jvp`, `jacrev` and their like, and in
    # `torch.autograd.forward_ad.dual_level`.
    functorch: Any = torch._C._functorch
    layer = functorch.peek_interpreter_stack()
    if layer is not None:
        name = f"torch.func's {str(layer.key()).rpartition('.')[2].lower()} transform"
    elif forward_ad._current_level >= 0:
        name = "forward-mode differentiation (torch.autograd.forward_ad)"
    else:
        return
    raise ExecutionError(
        f"A wrapped model was called inside {name}.",
        why="ONNX Runtime computes outputs and, with backward(), gradients; a transform needs PyTorch's own operators.",
        fix="Call it outside, or with PyTorch: lab.set(engine='eager').",
    )


_LOSSES: Final = frozenset({"SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"})
_KEEPS_VALUES: Final = frozenset(
    "Cast Flatten Gather Identity Pad Reshape Slice Split Squeeze Transpose Unsqueeze".split()  # noqa: SIM905 - so many words are easier to read without quotes
)

_IGNORED: Final = 3
"""Position of the input `ignore_index` of ORT's own losses."""


@dataclass(frozen=True)
class LabelRange:
    """What the labels of a graph's input may be: 0 to `classes` - 1, or `ignored`."""

    # PyTorch raises an IndexError for others. ``SoftmaxCrossEntropyLoss`` and ``NegativeLogLikelihoodLoss`` of 1.19.2
    # take ``scores[label]`` on the CPU unchecked (``cross_entropy.cc``): a label one too high gives a loss that looks
    # like one, a higher one ends the process. So the labels of a batch are looked at before it runs.

    read: Callable[[Sequence[Any], Mapping[str, Any]], Any]  # returns the labels from the arguments of a call
    classes: int
    ignored: int | None  # None where the loss leaves none out

    def holds(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Tell whether all labels of a call are allowed; on other devices than the CPU the kernels check them."""
        labels = self.read(args, kwargs)
        if not isinstance(labels, torch.Tensor) or labels.device.type != "cpu" or not labels.numel():
            return True
        if labels.is_floating_point() or labels.dtype is torch.bool:
            return True
        low, high = (one.item() for one in labels.aminmax())
        if low >= 0 and high < self.classes:
            return True
        strange = (labels < 0) | (labels >= self.classes)
        if self.ignored is not None:
            strange &= labels != self.ignored
        return not bool(strange.any())


def label_ranges(model: onnx.ModelProto, readers: Mapping[str, Any]) -> tuple[LabelRange, ...]:
    """Find the inputs of a graph whose values its losses take for numbers of classes."""
    # Labels that are computed inside the model, and losses over an unknown number of classes, are left out.
    graph = model.graph
    made_by = {output: node for node in graph.node for output in node.output}
    shapes = {value.name: value.type.tensor_type.shape.dim for value in (*graph.value_info, *graph.input)}
    found = []
    for node in graph.node:
        if node.op_type.removesuffix("Internal") not in _LOSSES:
            continue
        scores, labels = node.input[0], node.input[1]
        while labels in made_by and made_by[labels].op_type in _KEEPS_VALUES:
            labels = made_by[labels].input[0]
        sizes = shapes.get(scores, ())
        classes = sizes[1].dim_value if len(sizes) > 1 else 0
        if labels in readers and classes:
            found.append(LabelRange(readers[labels], classes, _ignored(graph, node)))
    return tuple(found)


def _ignored(graph: onnx.GraphProto, loss: onnx.NodeProto) -> int | None:
    """Return the label that a loss leaves out: an attribute in ONNX, the fourth input of ORT's own operators."""
    for attribute in loss.attribute:
        if attribute.name == "ignore_index":
            return int(attribute.i)
    name = loss.input[_IGNORED] if len(loss.input) > _IGNORED else ""
    constants = {one.name: one for one in graph.initializer}
    constants |= {node.output[0]: node.attribute[0].t for node in graph.node if node.op_type == "Constant"}
    return int(numpy_helper.to_array(constants[name]).item()) if name in constants else None
