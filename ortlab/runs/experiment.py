"""What a rerun repeats: a step, how often it runs, and the start that it goes back to, bit for bit."""

from __future__ import annotations

import copy
import hashlib
import inspect
import io
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves

from ortlab import units
from ortlab.engine.random_state import RandomState
from ortlab.errors import StepError
from ortlab.runs.interrupts import protected, undisturbed
from ortlab.runs.python_state import PythonState


@dataclass(frozen=True)
class Experiment:
    """A training step, to be run a number of times from one start."""

    step: Callable[[], object]
    count: int
    start: Snapshot
    source: str = ""  # of the step, as far as it is known

    @classmethod
    def begin(
        cls,
        module: torch.nn.Module,
        step: Callable[[], object],
        count: int,
        watch: Iterable[object],
        source: str,
    ) -> Experiment:
        """Make an experiment that starts where everything stands now."""
        if not callable(step):
            raise StepError(
                f"A step must be something to call, not a {type(step).__name__}.",
                fix="Pass a function: lab.step(lambda: train(batch), n=20).",
            )
        check_count(count)
        return cls(step, count, start_of(step, module, watch), source)

    def times(self, count: int | None) -> Experiment:
        """Return the same experiment with another number of steps, which `check_count` checks; None leaves it."""
        if count is None:
            return self
        check_count(count)
        return replace(self, count=count)


def check_count(count: object) -> None:
    """Raise StepError for a number of steps that is no whole number from 1 on."""
    if not units.is_whole(count, 1):
        raise StepError(f"The number of steps must be a whole number from 1 on, not {count!r}.")


# ---- the start ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Tensor:
    tensor: torch.Tensor
    value: torch.Tensor
    grad: torch.Tensor | None
    requires_grad: bool

    @classmethod
    def read(cls, tensor: torch.Tensor) -> _Tensor:
        grad = tensor.grad.detach().clone() if tensor.grad is not None else None
        return cls(tensor, tensor.detach().clone(), grad, tensor.requires_grad)

    def put_back(self) -> None:
        tensor, value = self.tensor, self.value
        tensor.grad = None  # whose dtype and shape have to be those of the tensor
        if (tensor.dtype, tensor.shape, tensor.device) != (value.dtype, value.shape, value.device):
            tensor.data = value.clone()  # somebody has put other memory there, as module.half() does
        else:
            tensor.copy_(value)
        if tensor.requires_grad != self.requires_grad and tensor.is_leaf:
            tensor.requires_grad_(self.requires_grad)
        tensor.grad = None if self.grad is None else self.grad.clone()


_TABLES: Final = ("_parameters", "_buffers", "_modules")


class _Module:
    """The parameters, buffers and parts of a module: the objects under each name, and what they hold."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.tensors = [_Tensor.read(tensor) for tensor in (*module.parameters(), *module.buffers())]
        self._parts = [
            (part, part.training, {table: dict(getattr(part, table)) for table in _TABLES})
            for part in module.modules()
        ]

    def put_back(self) -> None:
        """Make the module what it was: a parameter that was replaced is under its name again."""
        for part, training, tables in self._parts:
            part.training = training
            for table, held in tables.items():
                now = getattr(part, table)
                if list(now) != list(held) or any(now[name] is not one for name, one in held.items()):
                    now.clear()
                    now.update(held)
        with torch.no_grad():
            for tensor in self.tensors:
                tensor.put_back()


class _Optimizer:
    """The groups of an optimizer of torch and their parameters."""

    # Its own ``load_state_dict`` casts states to the dtype of their parameter, which loses digits of what an optimizer
    # keeps in float32 for a parameter of bfloat16, and refuses other groups than there are.

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = [(group, list(group["params"])) for group in optimizer.param_groups]

    @staticmethod
    def suits(thing: object) -> bool:
        """Say whether an object is an optimizer whose state is that of torch's base class."""
        base = torch.optim.Optimizer
        return isinstance(thing, base) and all(
            getattr(type(thing), name) is getattr(base, name) for name in ("state_dict", "load_state_dict")
        )

    def put_back(self, state: Mapping[str, Any]) -> None:
        """Take over a copy of what ``state_dict`` returned, every tensor as it is."""
        state = copy.deepcopy(state)
        numbered: dict[Any, Any] = {}
        for (group, parameters), saved in zip(self._groups, state["param_groups"], strict=True):
            numbered |= dict(zip(saved.pop("params"), parameters, strict=True))
            group.clear()
            group.update({"params": list(parameters), **saved})
        self._optimizer.param_groups[:] = [group for group, _ in self._groups]
        self._optimizer.state.clear()
        for key, held in state["state"].items():
            self._optimizer.state[numbered.get(key, key)] = held


class _Scaler:
    """What a gradient scaler knows of its optimizers between its updates, which its ``state_dict`` leaves out."""

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler
        self._known = copy.deepcopy(vars(scaler).get("_per_optimizer_states"))  # one that is off has none

    def put_back(self) -> None:
        """Let optimizers be unscaled again that were not when it was read."""
        if self._known is not None:
            self._scaler._per_optimizer_states = copy.deepcopy(self._known)  # noqa: SLF001 - nothing else does it


class Snapshot:
    """Everything that decides how the next steps go, as far as Python can reach it."""

    # What cannot be put back is an iterator that a step draws its batches from: it goes on where it stands, and the
    # runs' data digests then differ; `unkept` says what else. Besides the module's parameters, gradients, buffers and
    # training flags, the states of the objects in `stateful` are kept: optimizers, schedulers, gradient scalers, other
    # modules, and what the step has in Python.

    def __init__(self, module: torch.nn.Module, stateful: Iterable[Any] = ()) -> None:
        self._module = module
        self._whole = _Module(module)
        self._tensors = self._whole.tensors
        self._states: dict[int, tuple[Any, Any]] = {}
        self._inside: dict[int, _Module | _Optimizer | _Scaler] = {}
        self._random = RandomState.read()
        for thing in stateful:
            self.include(thing)
        self._at_first = tuple(self._states.values())

    @cached_property
    def digest(self) -> str:
        """Digest of weights, buffers, the states that were given, and random state; equal digests, equal starts."""
        digest = hashlib.blake2b(digest_size=8)
        for tensor in self._tensors:
            digest.update(_bytes(tensor.value))
        for _, state in self._at_first:
            for leaf in _leaves(state):
                digest.update(leaf)
        digest.update(_bytes(self._random.torch_cpu))
        return digest.hexdigest()

    def include(self, thing: Any) -> None:
        """Keep the state of one more object, as it is now, unless it is kept already."""
        if id(thing) in self._states or thing is self._module:
            return
        self._states[id(thing)] = (thing, copy.deepcopy(thing.state_dict()))
        if isinstance(thing, torch.nn.Module):
            self._inside[id(thing)] = _Module(thing)
        elif _Optimizer.suits(thing):
            self._inside[id(thing)] = _Optimizer(thing)
        elif isinstance(thing, torch.amp.GradScaler):
            self._inside[id(thing)] = _Scaler(thing)

    @property
    def stateful(self) -> list[Any]:
        """The objects besides the module that are kept."""
        return [thing for thing, _ in self._states.values()]

    @protected
    def put_back(self) -> None:
        """Make everything what it was, in place: parameters and optimizers stay the objects they are."""
        # Ctrl-C is raised afterwards: half of the weights would be those of another step. Where one object refuses its
        # state, all others get theirs, and the error says which did not.
        refused: list[str] = []
        with undisturbed():
            self._whole.put_back()
            for thing, state in self._states.values():
                try:
                    self._put_one_back(thing, state)
                except Exception as error:  # noqa: BLE001, PERF203 - each is an object of the user's
                    refused.append(f"{type(thing).__name__} ({error})")
            self._random.put_back()
        if refused:
            _say_refused(refused)

    def _put_one_back(self, thing: Any, state: Any) -> None:
        inside = self._inside.get(id(thing))
        if isinstance(inside, _Optimizer):
            inside.put_back(state)
            return
        if inside is not None:
            inside.put_back()
        thing.load_state_dict(copy.deepcopy(state))

    @contextmanager
    def steps_watched(self) -> Iterator[None]:
        """Let steps run in the block, and learn what of their state in Python they change."""
        with ExitStack() as stack:
            for thing in self.stateful:
                if isinstance(thing, PythonState):
                    stack.enter_context(thing.steps_watched())
            yield

    @property
    def unkept(self) -> tuple[str, ...]:
        """What decides how the next steps go, and cannot be put back."""
        return tuple(
            words for thing in self.stateful if isinstance(thing, PythonState) for words in thing.unkept
        )

    @property
    def number_of_bytes(self) -> int:
        """The bytes that the copies of tensors take."""
        held = [tensor for one in self._tensors for tensor in (one.value, one.grad) if tensor is not None]
        held += [
            one for one in tree_leaves([state for _, state in self._states.values()]) if torch.is_tensor(one)
        ]
        return sum(tensor.nbytes for tensor in held if not tensor.is_meta)

    @property
    def ort_seed(self) -> int:
        """A seed for ORT's generator that follows from torch's random state: the same start, the same dropout."""
        digest = hashlib.blake2b(_bytes(self._random.torch_cpu), digest_size=4).digest()
        return 2 + int.from_bytes(digest, "little") % (2**31 - 2)

    def seed(self, engine: str) -> None:
        """Let ORT's generator, whose state cannot be read, start from the seed of this point, where ORT executes."""
        if engine == "ort":
            from ortlab.engine.sessions import seed

            seed(self.ort_seed)


def _say_refused(refused: list[str]) -> None:
    """Say what could not be put back: with the error that is on its way, or else as one."""
    what = f"The state of {', '.join(refused)} could not be put back; everything else was."
    error = sys.exc_info()[1]
    if error is None:
        raise StepError(what, fix="Make it anew before the next step.")
    if hasattr(error, "add_note"):  # from Python 3.11 on
        error.add_note(what)


class DataDigest:
    """A digest of the tensors that a model was given, in order; equal digests, equal data."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=8)

    def update(self, *values: Any) -> None:
        """Add the tensors, numbers and texts in nested containers."""
        for leaf in _leaves(values):
            self._digest.update(leaf)

    def hexdigest(self) -> str:
        """Return the digest so far."""
        return self._digest.hexdigest()


def is_stateful(thing: object) -> bool:
    """Say whether an object can be kept in a snapshot: it has `state_dict()` and `load_state_dict()`."""
    if isinstance(thing, type):
        return False
    load: Callable[..., Any] | None = getattr(thing, "load_state_dict", None)
    return callable(load) and callable(getattr(thing, "state_dict", None))


def _leaves(value: Any) -> Iterator[bytes]:
    if isinstance(value, torch.Tensor):
        yield str((value.dtype, tuple(value.shape))).encode()
        yield _bytes(value)
    elif isinstance(value, dict) or hasattr(value, "items"):
        for key, item in value.items():
            yield str(key).encode()
            yield from _leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    elif value is None or isinstance(value, (bool, int, float, str)):
        yield repr(value).encode()


def _bytes(tensor: torch.Tensor) -> bytes:
    if tensor.is_meta:
        return b""  # there are no values
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


_NAMED: Final = 3
"""Parameters that an error names."""


def not_called(why: str) -> StepError:
    """Make the error of a step that did not call the model."""
    return StepError(
        "The step did not call the wrapped model.",
        why=why,
        fix="Call the model that was wrapped in the step: loss = model(**batch).loss.",
    )


def check_weights(module: torch.nn.Module) -> None:
    """Raise StepError for weights that are nan, infinite or without values: every later step would give nan."""
    # A frozen parameter may be infinite, as a mask is.
    kind = type(module).__name__
    for name, parameter in module.named_parameters():
        if parameter.is_meta:
            raise StepError(
                f"The weights of {kind} are not loaded: {name!r} is on device 'meta', without values.",
                fix="Load them first: model.to_empty(device='cpu'), then model.load_state_dict(...).",
            )
    wrong = {name: words for name, one in module.named_parameters() if (words := _fault(one))}
    if not wrong:
        return
    named = ", ".join(f"{name!r} ({words})" for name, words in list(wrong.items())[:_NAMED])
    more = f" and {len(wrong) - _NAMED} more parameters" if len(wrong) > _NAMED else ""
    raise StepError(
        f"The weights of {kind} are not finite: {named}{more}.",
        why="Every loss and every gradient that follows would be nan.",
        fix="Go back to weights that are: lab.restore() takes those from before the last run, load_state_dict those of "
        "a checkpoint. If training brought them there, lower the learning rate or clip the gradients.",
    )


def _fault(parameter: torch.Tensor) -> str:
    if not parameter.is_floating_point() or not parameter.numel():
        return ""
    values = parameter.detach()
    nan = int(values.isnan().sum())
    if nan:
        return f"nan in {nan:,} of {values.numel():,} values"
    infinite = int(values.isinf().sum()) if parameter.requires_grad else 0
    return f"infinite in {infinite:,} of {values.numel():,} values" if infinite else ""


def start_of(step: Callable[..., object], module: torch.nn.Module, watch: Iterable[object] = ()) -> Snapshot:
    """Return where everything stands now that a step of a module reaches, and what else is to be watched."""
    python = PythonState(step, module, is_stateful)
    stateful = [thing for thing in (*watch, *mentioned(step), *python.found) if is_stateful(thing)]
    stateful.append(python)  # last: it refers to what the others hold
    return Snapshot(module, stateful)


# ---- what a step names ----------------------------------------------------------------------------------------------


def mentioned(step: Callable[..., object]) -> list[object]:
    """Return the objects that a function names: in its closure, its globals, and what a method belongs to."""
    owner = getattr(step, "__self__", None)
    function = inspect.unwrap(getattr(step, "__func__", step))
    if not inspect.isfunction(function):
        return [owner]
    variables = inspect.getclosurevars(function)
    return [owner, *variables.nonlocals.values(), *variables.globals.values()]


_CONTAINERS: Final = (list, dict, set, deque)
"""Subclasses are left alone: nobody knows what filling them does."""

_DEEPEST: Final = 3


def iterator_of(step: Callable[..., object]) -> object | None:
    """Return an iterator that a step, or a function that it names, draws from; None if none is found."""
    # What is drawn from an iterator is gone, so steps that ortlab runs for its own sake must not draw.
    return next((one for one in named_by(step) if hasattr(type(one), "__next__")), None)


@contextmanager
def leaving_no_trace(step: Callable[..., object]) -> Iterator[None]:
    """Let a step run in the block for ortlab's own sake: what it prints, assigns or appends is gone afterwards."""
    cell = getattr(step, "variables_kept", nullcontext)
    with cell(), _containers_kept(step), redirect_stdout(io.StringIO()):
        yield


@contextmanager
def _containers_kept(step: Callable[..., object]) -> Iterator[None]:
    """Put back, after the block, the content of lists, dicts, sets and deques that a step names."""
    held = [one for one in named_by(step) if type(one) in _CONTAINERS]
    before = [copy.copy(one) for one in held]
    try:
        yield
    finally:
        for one, content in zip(held, before, strict=True):
            one.clear()
            (one.update if isinstance(one, (dict, set)) else one.extend)(content)


def named_by(step: Callable[..., object]) -> list[Any]:
    """Return the objects that a step names, and those that the functions among them name, `_DEEPEST` levels deep."""
    named = getattr(step, "objects", None)  # a cell looks for itself
    if callable(named):
        return list(named())
    found: list[Any] = []
    looked = {id(step)}
    layer: list[object] = mentioned(step)
    for _ in range(_DEEPEST):
        found += layer
        functions = [one for one in layer if inspect.isfunction(one) and id(one) not in looked]
        looked |= {id(one) for one in functions}
        layer = [one for function in functions for one in mentioned(function)]
    return list({id(one): one for one in found}.values())
