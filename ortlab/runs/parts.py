"""A model of which only parts run on ONNX Runtime: the sub-modules that `only` means, and the engine that runs them."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch

from ortlab.engine.inspection.build import BuildingEngine
from ortlab.engine.ort import OrtEngine
from ortlab.errors import OrtlabError, WrapError
from ortlab.records.messages import MessageLog
from ortlab.records.runs import (
    EXECUTED_BY_EAGER,
    EXECUTED_BY_FALLBACK,
    EXECUTED_BY_ORT,
    EXECUTED_BY_PARTS,
    Coverage,
    Part,
)
from ortlab.runs.wrapping import Takeover

if TYPE_CHECKING:
    from ortlab.options.options import Options
    from ortlab.records.runs import Initialization

Wish: TypeAlias = "str | torch.nn.Module"
Wishes: TypeAlias = "Wish | Iterable[Wish]"
"""A path, a pattern or a sub-module; or several."""

_SUGGESTED: Final = 3


def find_parts(model: torch.nn.Module, only: Wishes) -> dict[str, torch.nn.Module]:
    """Find the sub-modules of a model that are to be wrapped: by path, in the order of the model.

    `only` holds dotted paths as `model.named_modules()` gives them, patterns of such paths ("encoder.layer.*", where a
    star stands for one name or a part of it), or the sub-modules themselves; one or several. A container without a
    forward, such as a `ModuleList`, stands for what it holds. Raises WrapError where nothing is named, a path leads
    nowhere or to something that is no module, a module is not in the model or is the model itself, has no forward, or
    lies inside another one that is named.
    """
    wishes: list[object] = [only] if isinstance(only, (str, torch.nn.Module)) else _listed(only)
    if not wishes:
        raise WrapError(
            "There is no part in the list.",
            why="`only` names the sub-modules that ONNX Runtime shall run, and it is empty.",
            fix='Name at least one, as in ortlab.wrap(model, only=["encoder"]), or leave `only` out.',
        )
    known = dict(model.named_modules(remove_duplicate=False))
    found: dict[int, str] = {}
    for wish in wishes:
        for path in _paths(model, wish, known):
            found.setdefault(id(known[path]), path)
    order = list(known)
    paths = sorted(found.values(), key=order.index)
    _refuse_overlaps(paths, known)
    return {path: known[path] for path in paths}


def _listed(only: object) -> list[object]:
    if not isinstance(only, Iterable):
        raise _no_paths(only)
    return list(only)


def _no_paths(given: object) -> WrapError:
    return WrapError(
        f"`only` takes paths of sub-modules, not a {type(given).__name__}.",
        fix='Write for example ortlab.wrap(model, only=["encoder", "decoder.layers.3"]).',
    )


def _paths(model: torch.nn.Module, wish: object, known: dict[str, torch.nn.Module]) -> Iterator[str]:
    if isinstance(wish, torch.nn.Module):
        path = next((path for path, module in known.items() if module is wish), None)
        if path is None:
            raise WrapError(
                f"The {type(wish).__name__} in `only` is not a part of this {type(model).__name__}.",
                why="Parts are sub-modules of the model that is wrapped; a copy of one is another module.",
                fix="Take it from the model itself, or name its path as model.named_modules() gives it.",
            )
        matching = [path]
    elif isinstance(wish, str):
        matching = [wish] if wish in known else _matching(wish, known)
        if not matching:
            raise _unknown(model, wish, known)
    else:
        raise _no_paths(wish)
    for path in matching:
        if known[path] is model:
            raise WrapError(
                "The model itself is not a part of it.",
                fix="Leave `only` out to run the whole model on ONNX Runtime: ortlab.wrap(model).",
            )
        yield from _with_forward(path, known)


def _matching(pattern: str, known: Iterable[str]) -> list[str]:
    """Match name by name, so that a star does not reach into the parts of a part."""
    if not any(character in pattern for character in "*?["):
        return []
    wanted = pattern.split(".")
    return [
        path
        for path in known
        if path
        and len(names := path.split(".")) == len(wanted)
        and all(fnmatch.fnmatchcase(name, one) for name, one in zip(names, wanted, strict=True))
    ]


def _with_forward(path: str, known: dict[str, torch.nn.Module]) -> Iterator[str]:
    """Yield a module's path, or those of what it holds where it has no forward of its own."""
    module = known[path]
    if type(module).forward is not torch.nn.Module.forward or "forward" in module.__dict__:
        yield path
        return
    children = [f"{path}.{name}" for name, _ in module.named_children()]
    if not children:
        raise WrapError(
            f"{path!r} is a {type(module).__name__} without a forward.",
            why="ONNX Runtime runs the forward of a module, and this one only holds things.",
            fix="Name the module that uses it.",
        )
    for child in children:
        yield from _with_forward(child, known)


def _unknown(model: torch.nn.Module, path: str, known: Iterable[str]) -> WrapError:
    what = f"The model has no part {path!r}."
    held: object = model
    try:
        for name in path.split("."):
            held = getattr(held, name)
    except AttributeError:
        near = near_paths(path, known)
        if near:
            return WrapError(what, fix=f"Did you mean {' or '.join(map(repr, near))}?")
        return WrapError(what, fix="The paths of all parts: [name for name, _ in model.named_modules()].")
    return WrapError(
        f"{path!r} is no module.",
        why=f"It is a {type(held).__name__}, which has no forward that ONNX Runtime could run.",
        fix="Name the module that uses it; model.named_modules() lists all.",
    )


def near_paths(path: str, known: Iterable[str]) -> list[str]:
    """Find the paths that may be meant: those that end in it, and those that are written much like it."""
    paths = [one for one in known if one]
    ending = [one for one in paths if one.endswith(f".{path}")]
    close = difflib.get_close_matches(path, paths, n=_SUGGESTED, cutoff=0.6)
    last = path.rpartition(".")[2]
    same_name = [one for one in paths if one.rpartition(".")[2] == last]
    return list(dict.fromkeys([*ending, *close, *same_name]))[:_SUGGESTED]


def _refuse_overlaps(paths: list[str], known: dict[str, torch.nn.Module]) -> None:
    inside = {id(known[path]): path for path in paths}
    for path in paths:
        for module in known[path].modules():
            inner = inside.get(id(module), path)
            if inner != path:
                raise WrapError(
                    f"{inner!r} is a part of {path!r}.",
                    why="One module has one forward: what is inside a part is in that part's graph.",
                    fix=f"Leave out {inner!r} or {path!r}.",
                )


# ---- their engine ---------------------------------------------------------------------------------------------------

_IN_PART: Final = "In the part"
_EARLIEST_FIRST: Final = ("export", "graph", "session", "step", "")


@dataclass
class _Tally:
    """Calls of one part."""

    calls: int = 0
    on_ort: int = 0
    fallback_reason: str = ""


@dataclass
class _Wrapped:
    """One part: its module, the hold on its forward, and what runs it."""

    path: str
    module: torch.nn.Module
    takeover: Takeover
    engine: OrtEngine
    last: _Tally = field(default_factory=_Tally)
    total: _Tally = field(default_factory=_Tally)


class PartsEngine:
    """Run the model's own forward in PyTorch, and some of its sub-modules on ONNX Runtime."""

    # Each part has an `OrtEngine`, with its own exports, graphs and sessions; the switches are the same for all. No
    # part lies inside another. Gradients flow through a part as through any autograd function.

    name = "ort"

    def __init__(
        self,
        module: torch.nn.Module,
        parts: Mapping[str, torch.nn.Module],
        original_forward: Callable[..., Any],
        options: Options,
        progress: Callable[[str, float], None],
        on_built: Callable[[Initialization], None],
        log: MessageLog,
    ) -> None:
        # "ort parts": ONNX Runtime executed all parts that the last call of the model called, PyTorch the rest;
        # "fallback": PyTorch executed a part that ONNX Runtime was asked for; "eager": no part was called.
        self.executed_by = ""
        self._module = module
        self._original_forward = original_forward
        self._options = options
        self._parts: dict[str, _Wrapped] = {}
        taken: list[Takeover] = []
        try:
            for path, part in parts.items():
                takeover = Takeover(part, partial(self._forward_part, path))
                taken.append(takeover)
                engine = OrtEngine(
                    part,
                    takeover.run_original,
                    options,
                    partial(_with_path, progress, path),
                    on_built,
                    log,
                    takeover.instance_forward,
                    path,
                )
                self._parts[path] = _Wrapped(path, part, takeover, engine)
        except BaseException:
            for takeover in taken:
                takeover.release()
            raise

    # ---- who runs the parts -----------------------------------------------------------------------------------

    def take(self) -> None:
        """Take the parts over."""
        for part in self._parts.values():
            part.takeover.take()

    def release(self) -> None:
        """Give the parts back to PyTorch, as long as another engine runs the model."""
        for part in self._parts.values():
            part.takeover.release()

    def forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the model's forward, with its parts on ONNX Runtime."""
        for part in self._parts.values():
            part.last = _Tally()
        outputs = self._original_forward(*args, **kwargs)
        called = [part.last for part in self._parts.values() if part.last.calls]
        if not called:
            self.executed_by = EXECUTED_BY_EAGER
        else:
            on_ort = all(tally.calls == tally.on_ort for tally in called)
            self.executed_by = EXECUTED_BY_PARTS if on_ort else EXECUTED_BY_FALLBACK
        return outputs

    def _forward_part(self, path: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        part = self._parts[path]
        try:
            outputs = part.engine.forward(args, kwargs)
        except OrtlabError as error:
            if not error.what.startswith(_IN_PART):
                error.what = f"{_IN_PART} {path!r}: {error.what}"
                error.args = (str(error),)
            raise
        for tally in (part.last, part.total):
            tally.calls += 1
            tally.on_ort += part.engine.executed_by == EXECUTED_BY_ORT
            tally.fallback_reason = tally.fallback_reason or part.engine.fallback_reason
        return outputs

    def start_over(self) -> None:
        """Count calls from here on, and draw again the random numbers that were drawn at first."""
        for part in self._parts.values():
            part.total = _Tally()
            part.engine.start_over()

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Let calls in the block run with other options, and put everything back afterwards; see `OrtEngine.beside`."""
        options = self._options
        with ExitStack() as stack:
            for engine in self.engines.values():
                stack.enter_context(engine.beside())
            with self._tallies_kept():
                try:
                    yield
                finally:
                    self._options = options

    @contextmanager
    def building(
        self, path: str, options: Options, progress: Callable[[str, float], None]
    ) -> Iterator[BuildingEngine]:
        """Build one part with other switches while the block runs; the record of who executed what stays as it is."""
        part = self._parts[path]
        builder = BuildingEngine(
            part.module,
            part.takeover.run_original,
            options,
            partial(_with_path, progress, path),
            lambda _: None,
            MessageLog(),
            part.takeover.instance_forward,
            path,
        )
        engine = part.engine
        try:
            with self._tallies_kept():
                part.engine = builder
                yield builder
        finally:
            part.engine = engine
            builder.close()

    @contextmanager
    def _tallies_kept(self) -> Iterator[None]:
        """Put back who executed what, however the block ends."""
        executed_by = self.executed_by
        tallies = [(one, replace(one.last), replace(one.total)) for one in self._parts.values()]
        try:
            yield
        finally:
            self.executed_by = executed_by
            for one, last, total in tallies:
                one.last, one.total = last, total

    # ---- what was run -----------------------------------------------------------------------------------------

    @property
    def coverage(self) -> Coverage:
        """Who executed the parts in the last call of the model."""
        return self._coverage({path: part.last for path, part in self._parts.items()})

    @property
    def total_coverage(self) -> Coverage:
        """Who executed the parts since `start_over`."""
        return self._coverage({path: part.total for path, part in self._parts.items()})

    def _coverage(self, tallies: Mapping[str, _Tally]) -> Coverage:
        parts = tuple(
            Part(path, type(part.module).__name__, _size([part.module]), *vars(tallies[path]).values())
            for path, part in self._parts.items()
        )
        counted = [self._parts[part.path].module for part in parts if part.executed or not self.executed_by]
        return Coverage(parts, _size(counted), _size([self._module]))

    @property
    def fallback_reason(self) -> str:
        """Why PyTorch executed a part in the last call of the model; empty if it did not."""
        return self.coverage.fallback_reason

    @property
    def rebuild_reason(self) -> str:
        """Why the parts' last builds were needed, in words."""
        reasons = dict.fromkeys(part.engine.rebuild_reason for part in self._parts.values())
        return "; ".join(reason for reason in reasons if reason)

    def called_again(self) -> tuple[str, ...]:
        """Return the paths of the blocks that a part's forward calls several times; none before a step has run."""
        return tuple(
            f"{path}.{one}" for path, part in self._parts.items() for one in part.engine.called_again()
        )

    def graph_digests(self) -> dict[str, str]:
        """Return the digests of each part's graphs, by its path and the stage."""
        return {
            f"{path}: {stage}": digest
            for path, part in self._parts.items()
            for stage, digest in part.engine.graph_digests().items()
        }

    # ---- what is built ----------------------------------------------------------------------------------------

    @property
    def options(self) -> Options:
        """The switches; assign to change them for all parts."""
        return self._options

    @options.setter
    def options(self, options: Options) -> None:
        self._options = options
        for part in self._parts.values():
            part.engine.options = options

    @property
    def engines(self) -> dict[str, OrtEngine]:
        """What runs each part, by path."""
        return {path: part.engine for path, part in self._parts.items()}

    def pending_stage(self) -> str:
        """Return what the present options redo first in any part: "export", "graph", "session" or ""."""
        stage = self.stage_of(self._options)
        return "" if stage == "step" else stage

    def stage_of(self, options: Options) -> str:
        """Return what these options redo first in any part; see `OrtEngine.stage_of`."""
        # A part that has not been called does not count once another one has been: nothing says that it ever will be.
        return min((one.stage_of(options) for one in self._built), key=_EARLIEST_FIRST.index)

    @property
    def built_options(self) -> Options | None:
        """The switches that were built, in the part that the present ones redo most of; None if nothing is built."""
        return min(
            self._built, key=lambda one: _EARLIEST_FIRST.index(one.stage_of(self._options))
        ).built_options

    @property
    def _built(self) -> list[OrtEngine]:
        engines = list(self.engines.values())
        return [one for one in engines if one.built_options is not None] or engines

    def close(self, *, forget: bool = False) -> None:
        """Give the parts back and free all sessions; see `OrtEngine.close`."""
        self.release()
        for part in self._parts.values():
            part.engine.close(forget=forget)


def _with_path(progress: Callable[[str, float], None], path: str, text: str, fraction: float) -> None:
    progress(f"{path}: {text}" if text else "", fraction)


def _size(modules: Sequence[torch.nn.Module]) -> int:
    """Count the numbers in the parameters of modules, each parameter once."""
    tensors = {id(one): one for module in modules for one in module.parameters()}
    return sum(one.numel() for one in tensors.values())
