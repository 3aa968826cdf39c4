"""Exports kept on disk for the next process, each under a key of all that its trace could depend on.

Only the trace is left out when an entry is used: what ORTModule and ortlab do with the exported model after it is done
as ever, so that a process that has read an export is in the same state as one that has made it.

Why this room walks code itself, and does not take cloudpickle: that is not among the dependencies, and its bytes are no
key. It pickles what stands in an importable module by reference, so that an edited file of the user's, a patched
function of an installed package or a changed setting of a module would be a false hit. It writes file names and line
numbers of code, so that a cell of a notebook would miss in each new kernel; and it pickles a set in no fixed order. It
refuses nothing that answers differently each time (a clock, random numbers, `id`). The tests in `test_export_key.py`
hold each of these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

from ortlab.engine.disk_cache import Uncovered
from ortlab.engine.disk_cache.entries import (
    Entry,
    ExportFolder,
    Settled,
    UnusableEntry,
    check_constants,
    pack,
    unpack,
)
from ortlab.engine.disk_cache.key import export_key
from ortlab.engine.patching import replace, set_to
from ortlab.engine.tracing.traced_values import TracedValues
from ortlab.records.messages import ORTLAB

if TYPE_CHECKING:
    import torch

    from ortlab.engine.execution import Execution
    from ortlab.engine.kept_builds import Export

_PLAIN: Final = (bool, int, float, str, type(None))

_entry: Final[ContextVar[Entry | None]] = ContextVar("entry", default=None)
_watch: Final[ContextVar[TracedValues | None]] = ContextVar("watch", default=None)


def cached_export(execution: Execution, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Export:
    """Return the export of a call: from `export_cache_dir` if it is there, otherwise made and kept there.

    The execution's log says what is done, and why an export cannot be kept.
    """
    _install()
    cache = _Cache(execution)
    try:
        key = export_key(execution.module, args, kwargs, execution.options)
    except Uncovered as answer:
        cache.say_unkept(answer.thing)
        return execution.export(args, kwargs)
    entry = cache.read(key)
    if entry is not None:
        return _read_export(entry, execution, args, kwargs)
    watch = TracedValues()
    before = _plain_attributes(execution.module)
    with set_to(_watch, watch):
        export = execution.export(args, kwargs)
    try:
        settled = _checked(export, execution.module, watch, before)
        with _reverted(execution.module, settled, before):
            _check_key(export_key(execution.module, args, kwargs, execution.options), key)
        data = pack(export, key, settled)
    except Uncovered as answer:
        cache.say_unkept(answer.thing)
    else:
        cache.write(key, data)
    return export


def _checked(
    export: Export, module: torch.nn.Module, watch: TracedValues, before: Mapping[tuple[str, str, str], Any]
) -> tuple[Settled, ...]:
    """Check that an export holds nothing of its first batch, and return what the trace settled in the module."""
    if watch.baked_in:
        raise Uncovered(watch.baked_in)
    check_constants(export.exported.exported_model, module)
    return _settled(module, before)


def _check_key(after: str, before: str) -> None:
    if after != before:
        raise Uncovered("something that its forward itself changes")


def _read_export(
    entry: Entry, execution: Execution, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Export:
    for one in entry.settled:
        _set(execution.module, one, one.value)
    with execution.log.during("export"):
        for level, source, text in entry.messages:
            execution.log.add(level, source, text)
    with set_to(_entry, entry):
        # No trace has shown whether sizes became numbers in it; the key holds the sizes, and so does this process.
        return dataclasses.replace(execution.export(args, kwargs), numbers=True)


def _install() -> None:
    """Let ``GraphTransitionManager._export_model`` take its result from an entry, or be watched while it traces."""
    from onnxruntime.training.ortmodule._graph_transition_manager import GraphTransitionManager

    replace(GraphTransitionManager, "_export_model", _read_or_watched)


def _read_or_watched(original: Callable[..., Any]) -> Callable[..., Any]:
    def export_model(**kwargs: Any) -> Any:
        entry, watch = _entry.get(), _watch.get()
        if entry is not None:
            return _as_traced(entry, kwargs["flattened_module"], kwargs["model_info_for_export"])
        if watch is None:
            return original(**kwargs)
        with watch.on():
            return original(**kwargs)

    return export_model


def _as_traced(entry: Entry, flattened: Any, inputs: Any) -> tuple[Any, Any, list[str], list[str]]:
    """Return what ``_export_model`` returns, as its own last lines work it out."""
    flattened._output_schema = entry.output_schema
    names = [one.name for one in entry.model.graph.input]
    training = {name for name, _ in flattened.named_parameters()} | set(
        inputs.onnx_graph_input_names_require_grad
    )
    return entry.model, entry.output_schema, names, [name for name in names if name in training]


# ---- attributes that a forward settles in its first call -------------------------------------------------------------


def _plain_attributes(module: torch.nn.Module) -> dict[tuple[str, str, str], Any]:
    found: dict[tuple[str, str, str], Any] = {}
    seen: set[int] = set()
    for path, part in module.named_modules():
        for holder in ("", "config"):
            owner = getattr(part, holder, None) if holder else part
            if id(owner) in seen:
                continue
            seen.add(id(owner))
            for name, value in getattr(owner, "__dict__", {}).items():
                if type(value) in _PLAIN:
                    found[path, holder, name] = value
    return found


def _settled(module: torch.nn.Module, before: Mapping[tuple[str, str, str], Any]) -> tuple[Settled, ...]:
    return tuple(
        Settled(*place, value)
        for place, value in _plain_attributes(module).items()
        if place in before and (type(before[place]), before[place]) != (type(value), value)
    )


@contextmanager
def _reverted(
    module: torch.nn.Module, settled: Sequence[Settled], before: Mapping[tuple[str, str, str], Any]
) -> Iterator[None]:
    try:
        for one in settled:
            _set(module, one, before[one.path, one.holder, one.name])
        yield
    finally:
        for one in settled:
            _set(module, one, one.value)


def _set(module: torch.nn.Module, one: Settled, value: object) -> None:
    owner: Any = module.get_submodule(one.path)
    vars(getattr(owner, one.holder) if one.holder else owner)[one.name] = value


# ---- the folder ----------------------------------------------------------------------------------------------------


class _Cache:
    """The folder of one execution's option, and what it says to the user."""

    def __init__(self, execution: Execution) -> None:
        self._execution = execution
        self._folder = ExportFolder(execution.options.export_cache_dir)

    def say(self, level: str, text: str) -> None:
        with self._execution.log.during("export"):
            self._execution.log.add(level, ORTLAB, text)

    def say_unkept(self, thing: str) -> None:
        self.say("WARNING", f"This export is not kept in {self._folder.path}: it may depend on {thing}.")

    def read(self, key: str) -> Entry | None:
        """Return an entry that fits the module, None if there is none."""
        file = self._folder.file(key)
        try:
            data = self._folder.read(key)
            if data is None:
                return None
            entry = unpack(data, key)
            _check_fit(entry, self._execution)
        except (OSError, UnusableEntry) as problem:
            self.say("WARNING", f"{file} is ignored, since {problem}. The model is exported anew.")
            return None
        self.say("INFO", f"The export was read from {file}; the model was not traced.")
        return entry

    def write(self, key: str, data: bytes) -> None:
        """Keep an entry, or say why not; a full disk is no reason to stop a training."""
        try:
            file = self._folder.write(key, data)
        except OSError as error:
            self.say("WARNING", f"This export is not kept in {self._folder.path}: {error}.")
        else:
            self.say("INFO", f"The export was written to {file}.")


def _check_fit(entry: Entry, execution: Execution) -> None:
    module = execution.module
    tensors = {
        f"_original_module.{name}" for name, _ in (*module.named_parameters(), *module.named_buffers())
    }
    # Those of the user are checked when the graph gets its inputs (construct_inputs).
    asked = {one.name for one in entry.model.graph.input if one.name.startswith("_original_module.")}
    if not asked <= tensors:
        raise UnusableEntry("its graph asks for tensors that this model does not have")
    before = _plain_attributes(module)
    if any((one.path, one.holder, one.name) not in before for one in entry.settled):
        raise UnusableEntry("it settles attributes that this model does not have")
