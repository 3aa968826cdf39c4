"""Put a lab between a module and its callers, without changing the module's identity.

The module stays the object it was: only its class is swapped for a subclass of the same name whose forward asks the
lab. So optimizers, DDP, `state_dict` keys, `isinstance`, hooks and library code that looks at attributes go on working,
and there is no second module whose parameters could drift apart. A copy or a pickle of a wrapped module is a plain,
unwrapped module.
"""

from __future__ import annotations

import copyreg
import functools
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ortlab.errors import WrapError

Dispatch = Callable[[Sequence[Any], Mapping[str, Any]], Any]
"""Called with the positional and the keyword arguments of a forward."""

_KEY = "_ortlab_takeover"
_subclasses: weakref.WeakKeyDictionary[type, type] = weakref.WeakKeyDictionary()


class Takeover:
    """A module's forward in the hands of a lab.

    Parameters
    ----------
    module
        The module to take over.
    dispatch
        Called in place of the module's forward.

    Raises
    ------
    WrapError
        If the object is no module, is taken over already, or cannot be.
    """

    def __init__(self, module: torch.nn.Module, dispatch: Dispatch) -> None:
        check_wrappable(module)
        self._module = weakref.ref(module)
        self._original_class = type(module)
        # Libraries such as accelerate put a forward on the instance, which would hide that of the class.
        self._instance_forward = module.__dict__.pop("forward", None)
        self._dispatch = dispatch
        self._inside = False
        try:
            module.__class__ = _subclass(self._original_class)
        except TypeError as error:
            if self._instance_forward is not None:
                module.__dict__["forward"] = self._instance_forward
            raise WrapError(
                f"A {self._original_class.__name__} cannot be wrapped.",
                why=f"Its class does not allow its forward to be replaced: {error}.",
                fix="Put it into a plain torch.nn.Module that calls it, and wrap that.",
            ) from error
        module.__dict__[_KEY] = self
        bound = types.MethodType(self._original_class.forward, module)
        self.original_forward: Callable[..., Any] = self._instance_forward or bound

    def __call__(self, module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a forward: the lab's, or the module's own where the lab itself is tracing or falling back."""
        if not self.holds(module):
            return self._original_class.forward(module, *args, **kwargs)
        if self._inside:
            return self.original_forward(*args, **kwargs)
        self._inside = True
        try:
            return self._dispatch(args, kwargs)
        finally:
            self._inside = False

    def holds(self, module: object) -> bool:
        """Tell whether this is the module that was taken over, and not a copy of it."""
        return self._module() is module

    def release(self) -> None:
        """Give the module its own class and forward back; does nothing the second time."""
        module = self._module()
        if module is None or module.__dict__.pop(_KEY, None) is None:
            return
        module.__class__ = self._original_class
        if self._instance_forward is not None:
            module.__dict__["forward"] = self._instance_forward


def is_wrapped(module: object) -> bool:
    """Tell whether a lab holds this module's forward."""
    takeover = getattr(module, "__dict__", {}).get(_KEY)
    return isinstance(takeover, Takeover) and takeover.holds(module)


def check_wrappable(module: object) -> None:
    """Refuse what ORTModule cannot train.

    Raises
    ------
    WrapError
        If it is no `torch.nn.Module`, a `DataParallel` (row A6), or wrapped already.
    """
    name = type(module).__name__
    if not isinstance(module, torch.nn.Module):
        raise WrapError(
            f"A {name} cannot be wrapped.",
            why="Only a torch.nn.Module has a forward that ONNX Runtime can train.",
            fix="Wrap the model itself, for example: lab = ortlab.wrap(model).",
        )
    if isinstance(module, torch.nn.DataParallel):
        raise WrapError(
            "A DataParallel model cannot be wrapped.",
            why="It copies the module to each GPU in each step, and ORTModule holds one module on one device.",
            fix="Wrap the inner model (model.module), and use torch.nn.parallel.DistributedDataParallel around it.",
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise WrapError(
            f"The scripted module {name} cannot be wrapped.",
            why="Its forward is compiled by TorchScript already.",
            fix="Wrap the module that it was scripted from.",
        )
    if type(module).__module__.startswith("onnxruntime.training") or is_wrapped(module):
        raise WrapError(
            f"This {name} is wrapped already.",
            why="One module has one forward, and one lab decides who runs it.",
            fix="Use the lab you have, or unwrap first: lab.unwrap(), %ort_unwrap.",
        )


def _subclass(original: type) -> type:
    known = _subclasses.get(original)
    if known is not None:
        return known

    @functools.wraps(original.forward)  # type: ignore[attr-defined] # every torch.nn.Module has one
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        takeover = self.__dict__.get(_KEY)
        if takeover is None:
            return original.forward(self, *args, **kwargs)  # type: ignore[attr-defined]
        return takeover(self, args, kwargs)

    def reduce_ex(self: torch.nn.Module, protocol: Any) -> Any:
        reduce: Any = original.__reduce_ex__
        reduced = reduce(self, protocol)
        constructor, arguments, state, *rest = reduced
        if constructor is copyreg.__newobj__:  # type: ignore[attr-defined] # pickle insists on obj's own class there
            constructor = object.__new__
        plain = tuple(original if argument is subclass else argument for argument in arguments)
        if isinstance(state, dict):
            state = {key: value for key, value in state.items() if key != _KEY}
        return (constructor, plain, state, *rest)

    members = {
        "forward": forward,
        "__reduce_ex__": reduce_ex,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
    }
    subclass: type = types.new_class(
        original.__name__, (original,), exec_body=lambda names: names.update(members)
    )
    _subclasses[original] = subclass
    return subclass
