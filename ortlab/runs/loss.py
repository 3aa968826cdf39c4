"""A loss of one's own inside a model's forward, so that ONNX Runtime computes it with the model.

Where the loss stays outside, the logits cross from ONNX Runtime to PyTorch and their gradient crosses back, and no
optimizer of the graph sees which labels count. optimum had a `ModuleWithLoss` around the model for this. Here the model
keeps its identity: only its class is swapped for a subclass of the same name, so `state_dict` keys, `config`,
`save_pretrained` and optimizers are what they were, and a checkpoint is a checkpoint of the plain model.

`TokenLoss` is the cross entropy that transformers' models compute inside their forward, as a module that ORT can see:
ORT's label sparsity finds `torch.nn.CrossEntropyLoss` sub-modules only. Models of transformers call
`torch.nn.functional.cross_entropy`, or make the module anew in each forward, so nothing is left out. With
`ortlab.with_loss(model, ortlab.TokenLoss(), loss_only=True)` the same loss is a sub-module, and its gather can move
ahead of the head, whose logits nobody else reads.
"""

from __future__ import annotations

import copyreg
import dataclasses
import functools
import inspect
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias, TypeVar

import torch
from torch.jit._trace import TracerWarning

from ortlab.errors import StepError, WrapError
from ortlab.runs.wrapping import is_wrapped, same_named_subclass

Loss: TypeAlias = Callable[..., torch.Tensor]
"""Called as `loss(outputs, labels)`, and with `num_items_in_batch=` by name if it takes that."""

Model = TypeVar("Model", bound=torch.nn.Module)

_LABELS: Final = "labels"
_ITEMS: Final = "num_items_in_batch"
_PART: Final = "ortlab_loss"
_subclasses: weakref.WeakKeyDictionary[type, dict[tuple[bool, bool], type]] = weakref.WeakKeyDictionary()
"""By class of a model: the subclasses, by whether the loss takes items, and whether it is returned alone."""


def with_loss(model: Model, loss: Loss, *, loss_only: bool = False) -> Model:
    """Let a model's forward end with a loss function.

    Its forward then takes `labels` by name, which the model itself no longer gets, and returns what it returned with
    the loss in front: as `loss` of a dict or a dataclass, else as the first of a tuple. Called without labels in
    evaluation, it returns what it returned before.

    Parameters
    ----------
    model
        Any module that is not wrapped yet. It is changed in place.
    loss
        A function, a module or another callable that takes the model's outputs and the labels, and returns a tensor of
        one element. If it has a parameter `num_items_in_batch`, it gets the number of labels in the whole accumulated
        batch from transformers' Trainer. Both `Trainer(compute_loss_func=...)` and transformers' `LabelSmoother` are of
        this form.
    loss_only
        Whether the model returns nothing but its loss while it trains. What it returns has to be computed, so that only
        then ONNX Runtime leaves out what belongs to ignored labels. In evaluation it returns all.

    Returns
    -------
    torch.nn.Module
        The model itself.

    Raises
    ------
    WrapError
        If the model is wrapped or has a loss already, if the loss cannot be called, or if it has parameters.

    Examples
    --------
    >>> lab = ortlab.wrap(ortlab.with_loss(model, LabelSmoother(0.1)))
    >>> Trainer(model=model, args=arguments, train_dataset=data).train()
    """
    _check(model, loss)
    part = loss if isinstance(loss, torch.nn.Module) else _CalledLoss(loss)
    takes_items = _takes_items(part.loss if isinstance(part, _CalledLoss) else part.forward)
    original: type = type(model)
    try:
        model.__class__ = _subclass(original, takes_items=takes_items, loss_only=loss_only)
    except TypeError as error:
        raise WrapError(
            f"A {original.__name__} cannot be given a loss.",
            why=f"Its class does not allow its forward to be replaced: {error}.",
            fix="Put it into a plain torch.nn.Module that calls it and computes the loss.",
        ) from error
    # In the model, so that what the export depends on is seen there, and ORT finds a CrossEntropyLoss; its
    # tensors stay out of the state_dict.
    for each in part.modules():
        each._non_persistent_buffers_set.update(each._buffers)  # noqa: SLF001 - what register_buffer writes to
    model._modules[_PART] = part  # noqa: SLF001 - add_module calls hooks that third parties have registered
    return model


def without_loss(model: Model) -> Model:
    """Give a model the forward back that it had before `with_loss`; does nothing if it has no loss.

    Raises
    ------
    WrapError
        If the model is wrapped.
    """
    if is_wrapped(model):
        raise WrapError("The model is wrapped.", fix="Unwrap it first: lab.unwrap(), %ort_unwrap.")
    if has_loss(model):
        model.__class__ = type(model).__base__  # type: ignore[assignment] # the class that was swapped
        del model._modules[_PART]  # noqa: SLF001 - as above
    return model


def has_loss(model: torch.nn.Module) -> bool:
    """Tell whether a model's forward ends with a loss that `with_loss` has put there."""
    return _PART in model._modules  # noqa: SLF001 - as above


class _CalledLoss(torch.nn.Module):
    """A callable as a module, so that an export notices when what the callable is made of changes."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.loss = loss
        if not inspect.isroutine(loss) and not isinstance(loss, functools.partial):
            self.code = type(loss).__call__
            self.settings = getattr(loss, "__dict__", {})  # the dict itself: what is set there later is seen

    def forward(self, outputs: Any, labels: torch.Tensor, **items: Any) -> torch.Tensor:
        """Call the loss."""
        return self.loss(outputs, labels, **items)


def _check(model: torch.nn.Module, loss: Loss) -> None:
    if is_wrapped(model):
        raise WrapError(
            "The model is wrapped already.",
            why="The loss has to be part of the forward that is exported.",
            fix="Unwrap it, and give it the loss first: ortlab.wrap(ortlab.with_loss(lab.unwrap(), loss)).",
        )
    if has_loss(model):
        raise WrapError("The model has a loss already.", fix="Take it out first: ortlab.without_loss(model).")
    if not callable(loss):
        raise WrapError(
            f"A {type(loss).__name__} is no loss.",
            fix="Give a function or a module that is called as loss(outputs, labels).",
        )
    if isinstance(loss, torch.nn.Module) and any(True for _ in loss.parameters()):
        raise WrapError(
            f"The loss {type(loss).__name__} has parameters.",
            why="They would be trained with the model and be missing from its checkpoints.",
            fix="Put the loss into the model's own class, and return it from its forward.",
        )


def _takes_items(loss: Loss) -> bool:
    try:
        parameters = inspect.signature(loss).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return False
    return _ITEMS in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())


def _subclass(original: type, *, takes_items: bool, loss_only: bool) -> type:
    known = _subclasses.setdefault(original, {})
    if (takes_items, loss_only) in known:
        return known[takes_items, loss_only]
    own: Callable[..., Any] = original.forward  # type: ignore[attr-defined] # every torch.nn.Module has one

    @functools.wraps(own)
    def forward(
        self: torch.nn.Module, *args: Any, labels: Any = None, num_items_in_batch: Any = None, **kwargs: Any
    ) -> Any:
        if labels is None and self.training:
            raise StepError(
                f"This {original.__name__} computes its own loss, and the call has no labels.",
                why="It was given a loss with ortlab.with_loss, and there is nothing to train without one.",
                fix="Pass labels=..., or call model.eval() first. Under a Trainer, leave "
                "label_smoothing_factor and compute_loss_func unset: they keep the labels from the model.",
            )
        outputs = own(self, *args, **kwargs)
        if labels is None:
            return outputs
        items = {} if num_items_in_batch is None or not takes_items else {_ITEMS: num_items_in_batch}
        loss = self._modules[_PART](outputs, labels, **items)  # type: ignore[misc] # it is no None
        if not isinstance(loss, torch.Tensor):
            raise StepError(
                f"The loss function returned a {type(loss).__name__}, not a tensor.",
                fix="Return a tensor of one element that the outputs lead to.",
            )
        return _in_front(loss, outputs, alone=loss_only and self.training)

    def reduce_ex(self: torch.nn.Module, protocol: Any) -> Any:
        constructor, arguments, *rest = own_reduce(self, protocol)
        if constructor is copyreg.__newobj__:  # type: ignore[attr-defined] # its class could not be found by name
            return (_new, (original, takes_items, loss_only), *rest)
        return (constructor, arguments, *rest)

    own_reduce: Callable[..., Any] = original.__reduce_ex__
    forward.__signature__ = _signature(own, takes_items=takes_items)  # type: ignore[attr-defined]
    members = {
        "forward": forward,
        "accepts_loss_kwargs": takes_items,  # transformers' Trainer asks for it
        "__reduce_ex__": reduce_ex,
    }
    known[takes_items, loss_only] = subclass = same_named_subclass(original, members)
    return subclass


def _new(original: type, takes_items: bool, loss_only: bool = False) -> torch.nn.Module:  # noqa: FBT001, FBT002 - called by copy and pickle
    made: torch.nn.Module = object.__new__(_subclass(original, takes_items=takes_items, loss_only=loss_only))
    return made


def _signature(forward: Callable[..., Any], *, takes_items: bool) -> inspect.Signature:
    """Return a forward's signature with the parameters of a loss; libraries choose the columns of a data set by it."""
    signature = inspect.signature(forward)
    kept = list(signature.parameters.values())
    last = [kept.pop()] if kept and kept[-1].kind is inspect.Parameter.VAR_KEYWORD else []
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
        for name in (_LABELS, *([_ITEMS] if takes_items else []))
        if name not in signature.parameters
    ]
    return signature.replace(parameters=[*kept, *added, *last])


def _in_front(loss: torch.Tensor, outputs: Any, *, alone: bool) -> Any:
    """Put the loss where a Trainer looks for it, with the outputs or alone."""
    named = {field.name for field in dataclasses.fields(outputs)} if dataclasses.is_dataclass(outputs) else ()
    if isinstance(outputs, Mapping):
        kept = {} if alone else {name: value for name, value in outputs.items() if name != "loss"}
        made: type = type(outputs) if "loss" in named else dict
        return made(loss=loss, **kept)
    if "loss" in named:
        others = {name: None for name in named if name != "loss"} if alone else {}
        return dataclasses.replace(outputs, loss=loss, **others)
    if isinstance(outputs, (tuple, list)):
        return (loss,) if alone else (loss, *outputs)
    if isinstance(outputs, torch.Tensor):
        return (loss,) if alone else (loss, outputs)
    raise StepError(
        f"The loss has no place in a {type(outputs).__name__}.",
        why="A forward with a loss returns a tensor, a tuple, a dict, or a dataclass with a field `loss`.",
        fix="Give its class a field `loss` that is None by default.",
    )


class TokenLoss(torch.nn.Module):
    """Cross entropy of logits, shape (..., classes), against labels, shape (...).

    Parameters
    ----------
    ignore_index
        The label that does not count.
    shift
        Whether a place predicts the label of the next one, as causal language models do.

    Examples
    --------
    >>> lab = ortlab.wrap(ortlab.with_loss(BertForMaskedLM(config), ortlab.TokenLoss(), loss_only=True))
    >>> lab = ortlab.wrap(ortlab.with_loss(GPT2LMHeadModel(config), ortlab.TokenLoss(shift=True), loss_only=True))
    """

    def __init__(self, *, ignore_index: int = -100, shift: bool = False) -> None:
        super().__init__()
        self.cross_entropy = torch.nn.CrossEntropyLoss(ignore_index=ignore_index)
        self.shift = shift

    def forward(self, outputs: Any, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean over the labels that count; a tensor of one element.

        Parameters
        ----------
        outputs
            What the model returned: logits, or an object, a mapping or a tuple with them.
        labels
            Class numbers, int64.

        Raises
        ------
        StepError
            If there are no logits in the outputs, or their shape does not fit that of the labels.
        """
        logits = _logits(outputs)
        if logits.shape[:-1] != labels.shape:
            raise StepError(
                f"Logits of shape {tuple(logits.shape)} do not fit labels of shape {tuple(labels.shape)}.",
                why="TokenLoss takes a label for each place of the logits' shape but the last.",
                fix="Give labels of that shape, or write the loss as a function: with_loss(model, my_loss).",
            )
        if self.shift:
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        loss: torch.Tensor = self.cross_entropy(logits.reshape(-1, _classes(logits)), labels.reshape(-1))
        return loss


def _classes(logits: torch.Tensor) -> int:
    """Return the number of classes as a constant of a trace: the weights of the head have that size."""
    # ORT moves its gather ahead of a Reshape only if the shape is constant (upstream_reshape.cc).
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TracerWarning)
        return int(logits.shape[-1])


def _logits(outputs: Any) -> torch.Tensor:
    if isinstance(outputs, Mapping):
        found = outputs.get("logits")
    elif isinstance(outputs, tuple | list):
        found = outputs[0] if outputs else None
    else:
        found = getattr(outputs, "logits", outputs)
    if not isinstance(found, torch.Tensor):
        raise StepError(
            f"There are no logits in a {type(outputs).__name__}.",
            fix="Return a tensor, or something whose `logits` is one; or write the loss as a function.",
        )
    return found
