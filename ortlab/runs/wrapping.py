"""Put a lab between a module and its callers, without changing the module's identity.

The module stays the object it was: only its class is swapped for a subclass of the same name whose forward asks the
lab. So optimizers, DDP, `state_dict` keys, `isinstance`, hooks and library code that looks at attributes go on working,
and there is no second module whose parameters could drift apart. A copy or a pickle of a wrapped module is a plain,
unwrapped module.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from ortlab.engine.patching import set_to
from ortlab.errors import WrapError

Dispatch = Callable[[Sequence[Any], Mapping[str, Any]], Any]
"""Called with the positional and the keyword arguments of a forward."""

_KEY = "_ortlab_takeover"
_subclasses: weakref.WeakKeyDictionary[type, type] = weakref.WeakKeyDictionary()


class Takeover:
    """A module's forward in the hands of a lab: `dispatch` is called in its place.

    Raises WrapError where `check_wrappable` or `take` does.
    """

    def __init__(self, module: torch.nn.Module, dispatch: Dispatch) -> None:
        check_wrappable(module)
        self._module = weakref.ref(module)
        self._original_class = type(module)
        self.instance_forward: Callable[..., Any] | None = None
        self._dispatch = dispatch
        self._inside = False
        # An ORTModule's: only calls inside `entered` are the lab's; all others of the model are PyTorch's.
        self.door: ContextVar[bool] | None = None
        # Calls from several threads take turns: what ORTModule prepares for a run belongs to one call.
        self._one_call = threading.RLock()
        self.take()

    def take(self) -> None:
        """Take the module over, at first or again after `release`; does nothing if it is taken.

        Raises WrapError where the module's class does not allow it.
        """
        module = self._module()
        if module is None or _KEY in module.__dict__:
            return
        # Libraries such as accelerate put a forward on the instance, which would hide that of the class.
        self.instance_forward = module.__dict__.pop("forward", None)
        try:
            module.__class__ = _subclass(self._original_class)
        except TypeError as error:
            if self.instance_forward is not None:
                module.__dict__["forward"] = self.instance_forward
            raise WrapError(
                f"A {self._original_class.__name__} cannot be wrapped.",
                why=f"Its class does not allow its forward to be replaced: {error}.",
                fix="Put it into a plain torch.nn.Module that calls it, and wrap that.",
            ) from error
        module.__dict__[_KEY] = self

    def __call__(self, module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a forward: the lab's, or the module's own where the lab itself is tracing or falling back.

        Raises WrapError where a wrapper that was put around the module since has made it impossible.
        """
        from ortlab.runs.wrapper_order import check_call

        check_call(module)
        if not self.holds(module):
            return self._original_class.forward(module, *args, **kwargs)
        if self.door is not None and not self.door.get():
            return self.original_forward(*args, **kwargs)
        with self._one_call:
            if self._inside:
                return self.original_forward(*args, **kwargs)
            # A forward that was put on the module since, as accelerate's for mixed precision, is around this call, and
            # no part of the export. Its autocast could not be entered twice either: it forgets what was on before.
            around = module.__dict__.get("forward")
            try:  # Ctrl-C may come between any two lines
                self._inside = True
                module.__dict__.pop("forward", None)
                return self._dispatch(args, kwargs)
            finally:
                self._inside = False
                if around is not None:
                    module.__dict__["forward"] = around

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Let this thread's calls in the block be the lab's, where only those of an ORTModule are."""
        if self.door is None:
            yield
            return
        with set_to(self.door, value=True):
            yield

    @property
    def original_forward(self) -> Callable[..., Any]:
        """The module's own forward: the one that was put on the object, or else its class's, as it is now."""
        if self.instance_forward is not None:
            return self.instance_forward
        bound: Callable[..., Any] = types.MethodType(self._original_class.forward, self._module())
        return bound

    def run_original(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward as it is at this moment."""
        return self.original_forward(*args, **kwargs)

    def holds(self, module: object) -> bool:
        """Say whether this is the module that was taken over, and not a copy of it."""
        return self._module() is module

    def release(self) -> None:
        """Give the module its own class and forward back; does nothing the second time."""
        module = self._module()
        if module is None or module.__dict__.pop(_KEY, None) is None:
            return
        module.__class__ = self._original_class
        if self.instance_forward is not None:
            module.__dict__["forward"] = self.instance_forward


def is_wrapped(module: object) -> bool:
    """Say whether a lab holds this module's forward."""
    takeover = getattr(module, "__dict__", {}).get(_KEY)
    return isinstance(takeover, Takeover) and takeover.holds(module)


@contextmanager
def released(model: object) -> Iterator[None]:
    """Give a model and its parts back to PyTorch in the block, whatever labs hold them."""
    parts = model.modules() if isinstance(model, torch.nn.Module) else ()
    takeovers = [part.__dict__[_KEY] for part in parts if is_wrapped(part)]
    try:
        for takeover in takeovers:
            takeover.release()
        yield
    finally:
        for takeover in takeovers:
            takeover.take()


def check_wrappable(module: object) -> None:
    """Raise WrapError for what ORTModule cannot train.

    That is what is no `torch.nn.Module`, is scripted or wrapped already, or has wrappers around it that belong around
    ORT or do not go together with it (rows A5, A6).
    """
    from ortlab.runs.wrapper_order import wrapper_order

    name = type(module).__name__
    if not isinstance(module, torch.nn.Module):
        raise WrapError(
            f"A {name} cannot be wrapped.",
            why="Only a torch.nn.Module has a forward that ONNX Runtime can train.",
            fix="Wrap the model itself, for example: lab = ortlab.wrap(model).",
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise WrapError(
            f"The scripted module {name} cannot be wrapped.",
            why="Its forward is compiled by TorchScript already.",
            fix="Wrap the module that it was scripted from.",
        )
    ours = ("onnxruntime.training", "ortlab.ortmodule")
    if type(module).__module__.startswith(ours) or is_wrapped(module):
        raise WrapError(
            f"This {name} is wrapped already.",
            why="One module has one forward, and one lab decides who runs it.",
            fix="Use the lab you have, or unwrap first: lab.unwrap(), %ort_unwrap.",
        )
    fault = wrapper_order(module, wrapping=True).fault
    if fault is not None:
        raise WrapError(fault.what, why=fault.why, fix=fault.fix)


def _subclass(original: type) -> type:
    known = _subclasses.get(original)
    if known is not None:
        return known

    @functools.wraps(original.forward)  # type: ignore[attr-defined] # every torch.nn.Module has one
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        takeover = self.__dict__.get(_KEY)
        if takeover is None:
            return original.forward(self, *args, **kwargs)  # type: ignore[attr-defined]
        # torch.compile may be around the caller; what ORT executes is not to be traced.
        if "torch._dynamo" in sys.modules:
            apart: Callable[..., Any] = torch.compiler.disable(takeover)  # type: ignore[no-untyped-call]
            return apart(self, args, kwargs)
        return takeover(self, args, kwargs)

    # accelerate's unwrap_model(keep_fp32_wrapper=False) follows `__wrapped__` to the innermost function and puts that
    # on the model: PyTorch would run it from then on, and nothing would say so.
    forward.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    del forward.__wrapped__

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

    subclass = same_named_subclass(original, {"forward": forward, "__reduce_ex__": reduce_ex})
    _subclasses[original] = subclass
    return subclass


def same_named_subclass(original: type, members: Mapping[str, Any]) -> type:
    """Make a subclass that passes for the original wherever a class is shown."""
    shown = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    return types.new_class(
        original.__name__, (original,), exec_body=lambda names: names.update({**members, **shown})
    )
