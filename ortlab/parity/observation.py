"""What the modules of a model take and return in a step, and the gradients of it, tensor by tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from operator import is_
from typing import TYPE_CHECKING, Any, Final

import torch

from ortlab.engine.tracing.taps import Looker, Mark, is_tracing
from ortlab.parity.parity import (
    INPUT,
    INPUT_GRADIENT,
    OUTPUT,
    OUTPUT_GRADIENT,
    PARAMETER_GRADIENT,
    UPDATED_PARAMETER,
    Site,
)

if TYPE_CHECKING:
    from ortlab.engine.capture import Capture

Call = tuple[str, int]
"""Path of a module, and which of its calls in the step."""


@dataclass
class Structure:
    """How the calls of a run hang together; what a divergence is traced back with."""

    # By step and call: the call whose forward made it; None for one of the training step itself.
    callers: dict[tuple[int, Call], Call | None] = field(default_factory=dict)
    # By site of an input: the site of the output that it is.
    sources: dict[Site, Site] = field(default_factory=dict)
    # By site of an output: that of the outer module that returned the same tensor.
    returned_by: dict[Site, Site] = field(default_factory=dict)
    # By site of an output that its module has used itself for what else it returns: whether others use it, too.
    own_use: dict[Site, bool] = field(default_factory=dict)
    # By path of a module and name of its parameter: the modules that have that parameter, if they are several.
    sharing: dict[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)


def sharing(module: torch.nn.Module) -> dict[tuple[str, str], tuple[str, ...]]:
    """Return which modules share a parameter; see `Structure`."""
    owners: dict[int, list[tuple[str, str]]] = {}
    for path, part in module.named_modules():
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(parameter), []).append((path, name))
    return {
        owner: tuple(dict.fromkeys(path for path, _ in of_one))
        for of_one in owners.values()
        for owner in of_one
        if len(of_one) > 1
    }


Receive = Callable[[Site, torch.Tensor], None]
"""Called with each tensor as soon as it is there; the tensor may change afterwards."""

_MADE_BY: Final = "_ortlab_made_by"

_WHOLE: Final = "_ortlab_whole"


class Observation:
    """Watches one run of a model, and gives its tensors to `receive`."""

    # `capture` is what ONNX Runtime hands over; None where PyTorch runs the model. `change` changes each tensor that a
    # module of the model returns.

    def __init__(
        self,
        module: torch.nn.Module,
        receive: Receive,
        capture: Capture | None = None,
        change: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self.structure = Structure(sharing=sharing(module))
        self.step = 0  # the present one, from 1 on
        self.drew = False  # whether a step has drawn random numbers from torch
        self._module = module
        self._receive = receive
        self._capture = capture
        self._change = change
        self._calls: Counter[str] = Counter()
        self._stack: list[Call] = []

    def __deepcopy__(self, memo: Any) -> Observation:
        """Return itself: ORTModule copies the module, hooks included, before it exports it."""
        return self

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch in the block; afterwards none of these hooks is left."""
        with ExitStack() as stack:
            for path, part in self._module.named_modules():
                before = part.register_forward_pre_hook(
                    _Entering(self, path, part), with_kwargs=True, prepend=False
                )
                after = part.register_forward_hook(_Leaving(self, path, part), with_kwargs=True)
                stack.callback(before.remove)
                stack.callback(after.remove)
            leaves: list[tuple[str, Any]] = list(self._module.named_parameters())
            for name, parameter in leaves:
                if parameter.requires_grad and parameter.is_leaf:
                    hook = parameter.register_post_accumulate_grad_hook(self._gradient_of(name))
                    stack.callback(hook.remove)
            yield

    def stepping(self, step: Callable[[], object]) -> Callable[[], object]:
        """Return the training step with its beginning and its end noted."""

        def run() -> object:
            self.step += 1
            self._calls.clear()
            self._stack.clear()
            if self._capture is not None:
                self._capture.start_step()
            before = torch.get_rng_state()
            result = step()
            self.drew |= not torch.equal(before, torch.get_rng_state())
            for name, parameter in self._module.named_parameters():
                if parameter.requires_grad:
                    self._receive(self._site_of(name, UPDATED_PARAMETER), parameter.detach())
            return result

        return run

    def captured(self, mark: Mark, tensor: torch.Tensor) -> None:
        """Take what ONNX Runtime hands over."""
        self._receive(Site(self.step, mark.module, mark.call, mark.kind, mark.name), tensor)

    # ---- parts ------------------------------------------------------------------------------------------------

    def enter(self, path: str, args: Any, kwargs: Any) -> Any:
        """Take what a module is called with, and return what it is to be called with; None for the same."""
        if is_tracing():
            self._mark(path, INPUT, (args, kwargs))
            return None
        if self._looks_away:
            return None
        self._calls[path] += 1
        call = (path, self._calls[path])
        self.structure.callers[self.step, call] = self._stack[-1] if self._stack else None
        self._stack.append(call)
        known: dict[int, torch.Tensor] = {}  # a module may ask whether two inputs are one

        def take(name: str, tensor: torch.Tensor) -> torch.Tensor:
            site = Site(self.step, *call, INPUT, name)
            source = getattr(tensor, _MADE_BY, None)
            if source is not None and source.step == self.step:
                self.structure.sources[site] = source
            self._receive(site, tensor.detach())
            if not tensor.requires_grad or not torch.is_grad_enabled():
                return tensor
            if id(tensor) not in known:
                known[id(tensor)] = alias = tensor.view_as(tensor)
                if source is not None:
                    setattr(alias, _MADE_BY, source)
                self._on_gradient(alias, Site(self.step, *call, INPUT_GRADIENT, name))
            return known[id(tensor)]

        return replaced(args, take), replaced(kwargs, take)

    def leave(self, path: str, outputs: Any) -> Any:
        """Take what a module returns, and return what it is to return; None for the same."""
        if is_tracing():
            self._mark(path, OUTPUT, outputs)
            return None
        if self._looks_away or not self._stack:
            return None
        while self._stack and self._stack[-1][0] != path:  # of calls that have failed
            self._stack.pop()
        call = self._stack.pop()
        returned = {id(tensor) for _, tensor in tensors(outputs) if not tensor.is_leaf}
        moved: dict[int, torch.Tensor] = {}  # a caller may ask whether two outputs are one
        aliases: dict[int, torch.Tensor] = {}

        def take(name: str, tensor: torch.Tensor) -> torch.Tensor:
            site = Site(self.step, *call, OUTPUT, name)
            if self._change is not None and id(tensor) not in moved:
                moved[id(tensor)] = self._change(tensor)
            changed = moved.get(id(tensor), tensor)
            inner = getattr(changed, _MADE_BY, None)
            if inner is not None and inner.step == self.step:
                self.structure.returned_by[inner] = site
            self._receive(site, changed.detach())
            if changed.is_leaf:
                return changed
            setattr(changed, _MADE_BY, site)
            whole = getattr(changed, _WHOLE, changed)
            self._on_gradient(whole, Site(self.step, *call, OUTPUT_GRADIENT, name))
            if self._change is not None or len(returned) == 1:
                return changed  # what is returned alone has been used for nothing else that is
            if id(changed) not in aliases:
                aliases[id(changed)] = alias = changed.view_as(changed)
                setattr(alias, _MADE_BY, site)
                setattr(alias, _WHOLE, whole)
            self._tell_uses_apart(whole, aliases[id(changed)], site)
            return aliases[id(changed)]

        handed_on = replaced(outputs, take)
        return None if handed_on is outputs else handed_on

    def _mark(self, path: str, kind: str, value: Any) -> None:
        if self._capture is None:
            return
        taps = self._capture.taps
        taps.calls[path] += kind == INPUT
        call = taps.calls[path]
        if kind == INPUT:
            args, kwargs = value
            found = [*tensors(args), *tensors(kwargs)]
        else:
            found = list(tensors(value))
        for name, tensor in found:
            taps.mark(Mark(path, call, kind, name), tensor)

    @property
    def _looks_away(self) -> bool:
        """Whether a call is no part of the step: ORTModule's own, or one that torch.utils.checkpoint repeats."""
        return (self._capture is not None and self._capture.taps.silent) or _in_backward()

    def _on_gradient(self, tensor: Any, site: Site) -> None:
        def take(gradient: torch.Tensor | None) -> None:
            if gradient is not None:  # which it is where an autograd.Function returns none
                self._receive(site, gradient.detach())

        tensor.register_hook(take)

    def _tell_uses_apart(self, tensor: Any, alias: Any, site: Site) -> None:
        """Note in the backward whether a returned tensor was used within its module, and whether behind it."""
        # The module has used `tensor`, if it has; its caller gets `alias` instead. `site` is that of the output.
        outside: list[torch.Tensor] = []
        values = tensor.detach()  # which counts what is written into the tensor
        version = values._version  # noqa: SLF001 - torch has no public name for it

        def take(gradient: torch.Tensor | None) -> None:
            from_others = outside.pop() if outside else None
            if gradient is None or values._version != version:  # noqa: SLF001
                return  # a caller that writes into it goes round the alias
            if from_others is None or from_others.data_ptr() != gradient.data_ptr():
                self.structure.own_use[site] = from_others is not None

        alias.register_hook(outside.append)
        tensor.register_hook(take)

    def _gradient_of(self, name: str) -> Callable[[torch.Tensor], None]:
        def take(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                self._receive(self._site_of(name, PARAMETER_GRADIENT), parameter.grad.detach())

        return take

    def _site_of(self, name: str, kind: str) -> Site:
        path, _, own = name.rpartition(".")
        return Site(self.step, path, 0, kind, own)


class _Entering(Looker):
    """A forward pre-hook; it ignores copies of its module."""

    def __init__(self, observation: Observation, path: str, module: torch.nn.Module) -> None:
        self._observation, self._path, self._module = observation, path, id(module)

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        if id(module) != self._module:
            return None
        return self._observation.enter(self._path, args, kwargs)


class _Leaving(Looker):
    """A forward hook; it ignores copies of its module."""

    def __init__(self, observation: Observation, path: str, module: torch.nn.Module) -> None:
        self._observation, self._path, self._module = observation, path, id(module)

    def __call__(self, module: torch.nn.Module, _args: Any, _kwargs: Any, outputs: Any) -> Any:
        if id(module) != self._module:
            return None
        return self._observation.leave(self._path, outputs)


def _in_backward() -> bool:
    internals: Any = torch._C  # noqa: SLF001 - torch has no public way to ask
    return bool(internals._current_graph_task_id() != -1)  # noqa: SLF001


def _is_observed(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and not value.is_sparse


def tensors(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of floating-point numbers in nested sequences and mappings, with their places."""
    found: list[tuple[str, torch.Tensor]] = []

    def note(place: str, tensor: torch.Tensor) -> torch.Tensor:
        found.append((place, tensor))
        return tensor

    replaced(value, note, name)
    yield from found


def replaced(value: Any, take: Callable[[str, torch.Tensor], torch.Tensor], name: str = "") -> Any:
    """Return a nested value with other tensors in it; the same object where nothing has been changed."""
    if _is_observed(value):
        return take(name or "0", value)
    if isinstance(value, Mapping):
        new = {key: replaced(item, take, _inside(name, key)) for key, item in value.items()}
        return value if all(new[key] is item for key, item in value.items()) else _with_items(value, new)
    if isinstance(value, (tuple, list)):
        items = [replaced(item, take, _inside(name, number)) for number, item in enumerate(value)]
        make: Any = getattr(type(value), "_make", type(value))
        return value if all(map(is_, items, value)) else make(items)
    return value


def _with_items(value: Any, items: dict[Any, Any]) -> Any:
    """Return a mapping with other values; outputs of transformers, which know their keys, are changed in place."""
    if type(value) is dict:
        return items
    for key, item in items.items():
        value[key] = item
    return value


def _inside(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)
