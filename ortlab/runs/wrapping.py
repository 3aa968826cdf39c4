"""Put a lab between a module and its callers, without changing the module's identity.

The module stays the object it was: only its class is swapped for a subclass of the same name whose forward asks the
lab. So optimizers, DDP, `state_dict` keys, `isinstance`, hooks and library code that looks at attributes go on working,
and there is no second module whose parameters could drift apart. A copy or a pickle of a wrapped module is a plain,
unwrapped module.

ORTModule replaces a module's forward, so it belongs next to the model. What spreads training over processes hooks into
parameters and gradients and goes around it: ORT inside DDP and DeepSpeed, never the other way round. `torch.compile`
may be around a wrapped model, where it compiles what ORT does not run.
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
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from ortlab.engine.patching import set_to
from ortlab.errors import WrapError
from ortlab.runs.interrupts import say, undisturbed

Dispatch = Callable[[Sequence[Any], Mapping[str, Any]], Any]
"""Called with the positional and the keyword arguments of a forward."""

_KEY = "_ortlab_takeover"
_subclasses: weakref.WeakKeyDictionary[type, type] = weakref.WeakKeyDictionary()


class Takeover:
    """A module's forward in the hands of a lab: `dispatch` is called in its place."""

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
        """Take the module over, at first or again after `release`; does nothing if it is taken."""
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
        """Run a forward: the lab's, or the module's own where the lab itself is tracing or falling back."""
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
def wrapped_whole(module: torch.nn.Module) -> Iterator[None]:
    """Give a module and its parts back to PyTorch where the block, which wraps them, does not come to its end."""
    before = {id(part) for part in module.modules() if is_wrapped(part)}
    try:
        yield
    except BaseException as error:
        with undisturbed():
            for part in module.modules():
                if is_wrapped(part) and id(part) not in before:
                    part.__dict__[_KEY].release()
        if isinstance(error, KeyboardInterrupt):
            say(error, "Stopped before the model was wrapped; it is PyTorch's, as before.")
        raise


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
    """Raise WrapError for what ORTModule cannot train."""
    # That is what is no `torch.nn.Module`, is scripted or wrapped already, or has wrappers around it that belong around
    # ORT or do not go together with it.
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


_apart: Callable[..., Any] | None = None


def _untraced() -> Callable[..., Any]:
    """Return the call of a takeover for a caller that torch.compile may be tracing."""
    # Made once, for that takes as long as a kernel, and without functools.cache, through which torch.compile looks.
    global _apart  # noqa: PLW0603 - one for the process
    if _apart is None:
        _apart = torch.compiler.disable(Takeover.__call__)  # type: ignore[no-untyped-call]
    return _apart


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
            return _untraced()(takeover, self, args, kwargs)
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


_ORT: Final = "ORT"
_DDP: Final = "DistributedDataParallel"
_DATA_PARALLEL: Final = "DataParallel"
_FSDP: Final = "FullyShardedDataParallel"
_FULLY_SHARD: Final = "fully_shard"
_COMPILE: Final = "torch.compile"
_DEEPSPEED: Final = "DeepSpeedEngine"

_KINDS: Final = {
    ("torch", "DistributedDataParallel"): _DDP,
    ("torch", "DataParallel"): _DATA_PARALLEL,
    ("torch", "FullyShardedDataParallel"): _FSDP,
    ("torch", "FSDPModule"): _FULLY_SHARD,
    ("torch", "OptimizedModule"): _COMPILE,
    ("deepspeed", "DeepSpeedEngine"): _DEEPSPEED,
    ("onnxruntime", "ORTModule"): _ORT,
    ("ortlab", "ORTModule"): _ORT,
}
"""Wrappers by package and class; by name, so that neither DeepSpeed nor torch.distributed is imported for it."""

_INNER: Final = {
    _DDP: "module",
    _DATA_PARALLEL: "module",
    _FSDP: "_fsdp_wrapped_module",
    _COMPILE: "_orig_mod",
    _DEEPSPEED: "module",
}
"""The attribute with what is wrapped; `fully_shard` has none, it changes the module's class."""

_HOOKS: Final = "It hooks into parameters and gradients, and what ORT exports runs no such hooks."

_AROUND: Final = {
    _DDP: (_HOOKS, "DistributedDataParallel(model)"),
    _DEEPSPEED: (_HOOKS, "deepspeed.initialize(model=model, ...)"),
    _COMPILE: ("A compiled forward cannot be exported.", "torch.compile(model)"),
}
"""What goes around a wrapped model: why it cannot be inside, and how it is put around."""

_NOT_WITH_ORT: Final = {
    _DATA_PARALLEL: (
        "It copies the module to each GPU in each step, and ORTModule holds one module on one device.",
        "Use DistributedDataParallel, one process per GPU: ortlab.wrap(model), then DistributedDataParallel(model).",
    ),
    _FSDP: (
        "It frees and gathers the parameters around each layer's forward, and a graph of ORT needs all of them.",
        "Use DistributedDataParallel or DeepSpeed's ZeRO stages 1 and 2, which leave parameters whole.",
    ),
    _FULLY_SHARD: (
        "It makes the parameters sharded DTensors, and a graph of ORT needs plain and whole ones.",
        "Use DistributedDataParallel or DeepSpeed's ZeRO stages 1 and 2, which leave parameters whole.",
    ),
}
"""Why a wrapper does not go together with ORT in any order, and what does."""


@dataclass(frozen=True)
class Layer:
    """One thing around a model, or the model itself."""

    kind: str  #: "ORT", the name of a wrapper such as "DistributedDataParallel", or "" for the model
    name: str  #: How it is written in a nest: the kind, or the class of the model


@dataclass(frozen=True)
class Fault:
    """Why a nest of wrappers cannot work; `what`, `why` and `fix` as in an `OrtlabError`."""

    what: str
    why: str
    fix: str


@dataclass(frozen=True)
class WrapperOrder:
    """The wrappers around a model, as they are nested."""

    layers: tuple[Layer, ...]  #: From the outermost to the model
    inside: tuple[str, ...]  #: Kinds of wrappers around parts of the model
    fault: Fault | None  #: What is wrong with the order; None if nothing is

    @property
    def written(self) -> str:
        """The nest in one line, for example "DistributedDataParallel(ORT(Net))"."""
        return "(".join(layer.name for layer in self.layers) + ")" * (len(self.layers) - 1)

    @property
    def has_ort(self) -> bool:
        """Whether ORT runs anything of it."""
        return _ORT in self.inside or any(layer.kind == _ORT for layer in self.layers)


def wrapper_order(module: torch.nn.Module, *, wrapping: bool = False) -> WrapperOrder:
    """Look at everything that is put around a model.

    Parameters
    ----------
    module
        The outermost module: what the training loop calls.
    wrapping
        Whether `ortlab.wrap` is about to be put around it.

    Returns
    -------
    WrapperOrder
        The nest, and what is wrong with it.
    """
    layers, core = _nest(module)
    if wrapping:
        layers.insert(0, Layer(_ORT, _ORT))
    inside = tuple(
        dict.fromkeys(kind for part in core.modules() if part is not core for kind in _kinds_of_part(part))
    )
    order = WrapperOrder(tuple(layers), inside, None)
    return replace(order, fault=_fault(order))


def check_call(module: torch.nn.Module) -> None:
    """Raise WrapError for a call of a wrapped module that `DataParallel` has copied or FSDP has sharded since."""
    attributes = module.__dict__
    kind = _DATA_PARALLEL if attributes.get("_is_replica") else None
    if attributes.get("_is_fsdp_managed_module"):  # torch/distributed/fsdp/_dynamo_utils.py
        kind = _FSDP
    elif _is_sharded(type(module)):  # type: ignore[arg-type] # a class is hashable
        kind = _FULLY_SHARD
    if kind is not None:
        why, fix = _NOT_WITH_ORT[kind]
        raise WrapError(f"{kind} is around a model that ORT is to run.", why=why, fix=fix)


@functools.lru_cache(maxsize=64)
def _is_sharded(kind: type) -> bool:
    return _FULLY_SHARD in _kinds_of_class(kind)


def _nest(module: torch.nn.Module) -> tuple[list[Layer], torch.nn.Module]:
    """Return the layers from the outermost one, and the model in their middle."""
    layers: list[Layer] = []
    while True:
        kinds = list(_kinds(module))
        layers += [Layer(kind, kind) for kind in kinds]
        inner = next((getattr(module, _INNER[kind], None) for kind in kinds if kind in _INNER), None)
        if not isinstance(inner, torch.nn.Module):
            return [*layers, Layer("", type(module).__name__)], module
        module = inner


def _kinds(module: torch.nn.Module) -> Iterator[str]:
    """Name the wrappers that one module is, the outer one first."""
    if is_wrapped(module):
        yield _ORT
    yield from _kinds_of_class(type(module))


def _kinds_of_part(module: torch.nn.Module) -> Iterator[str]:
    yield from _kinds(module)
    # Module.compile(); on the outermost one it is around ORT in any case.
    if getattr(module, "_compiled_call_impl", None) is not None:
        yield _COMPILE


def _kinds_of_class(kind: type) -> Iterator[str]:
    for body in kind.__mro__:
        known = _KINDS.get((body.__module__.partition(".")[0], body.__name__))
        if known is not None:
            yield known


def _fault(order: WrapperOrder) -> Fault | None:
    kinds = [layer.kind for layer in order.layers]
    if not order.has_ort:
        return None
    for kind in (*kinds, *order.inside):
        if kind in _NOT_WITH_ORT:
            why, fix = _NOT_WITH_ORT[kind]
            return Fault(f"{kind} and ORT do not go together: {order.written}.", why, fix)
    first = kinds.index(_ORT) if _ORT in kinds else len(kinds)
    for kind in (*kinds[first:], *(order.inside if _ORT in kinds else ())):
        if kind in _AROUND:
            why, call = _AROUND[kind]
            return Fault(
                f"The order is wrong: ORT is around {kind}, and has to be inside it: {order.written}.",
                why,
                f"Wrap the model first, ortlab.wrap(model), then {call}. Where {kind} is there already, wrap what "
                f"is in it: ortlab.wrap(model.{_INNER[kind]}).",
            )
    return None
