"""Exports kept on disk for the next process, each under a key of all that its trace could depend on.

Only the trace is left out when an entry is used: what ORTModule and ortlab do with the exported model after it is done
as ever, so that a process that has read an export is in the same state as one that has made it.

Why this room walks code itself, and does not take cloudpickle: that is not among the dependencies, and its bytes are no
key. It pickles what stands in an importable module by reference, so that an edited file of the user's, a patched
function of an installed package or a changed setting of a module would be a false hit. It writes file names and line
numbers of code, so that a cell of a notebook would miss in each new kernel; and it pickles a set in no fixed order. It
refuses nothing that answers differently each time (a clock, random numbers, `id`). The tests in `test_export_key.py`
hold each of these.

onnxruntime 1.19.2 looks exports up by ``md5(str(module))`` and rank, so that other code, another opset or mode gets a
graph that was made for something else: dropout goes on in `eval()`. Here a key covers the call, the module tree with
its attributes, the code that its forward can reach, the switches, torch's own settings and the versions.
Where it cannot, there is no key, and the reason is given.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import platform
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.overrides

import ortlab
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
from ortlab.engine.disk_cache.fingerprint import Fingerprint, content_digest, tensor_facts
from ortlab.engine.disk_cache.installed_code import OWN, SETTINGS, origin_of_function
from ortlab.engine.exporter import symbolic_module
from ortlab.engine.installation import versions
from ortlab.engine.kept_builds import written_buffers
from ortlab.engine.patching import replace, set_to
from ortlab.engine.schema import buffer_ids
from ortlab.engine.tracing import baked_in
from ortlab.engine.tracing.sizes import ANY_SIZES
from ortlab.engine.tracing.traced_values import TracedValues
from ortlab.options.options import Effect, Options, switches
from ortlab.records.messages import ORTLAB

if TYPE_CHECKING:
    from ortlab.engine.execution import Execution
    from ortlab.engine.kept_builds import Export


# The hooks of nn.Module whose functions take part in a forward; the keys of their tables count from 0 in each process.
_HOOKS: Final = ("_forward_pre_hooks", "_forward_hooks")
_VARIABLES: Final = ("TORCH", "PYTORCH_", "TRANSFORMERS_", "HF_", "ATEN_", "DIFFUSERS_", "TIMM_")
_NAMES_OF_PLACES: Final = ("HOME", "CACHE", "TOKEN", "OFFLINE", "LOG", "ENDPOINT", "VERBOSITY")


def export_key(
    module: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Options,
) -> str:
    """Return the key of the export that a call would need: 64 hexadecimal digits."""
    # The sizes of the arguments are in the key as well: a forward may branch on them.
    parts = dict(module.named_modules())
    known = {id(part): f"module {name}" for name, part in reversed(parts.items())}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        known[id(tensor)] = f"tensor {name}"
    inputs = buffer_ids(module, written_buffers(module))
    print_ = Fingerprint(known)
    _add_surroundings(print_)
    _add_options(print_, module, options)
    for name, part in module.named_modules(remove_duplicate=False):
        print_.add("module", name, known[id(part)])
    for name, part in parts.items():
        if isinstance(part, torch.jit.ScriptModule):
            raise Uncovered(f"{name}, which TorchScript has compiled")
        _add_module(print_, name or "the model", part, known, inputs)
    _add_call(print_, args, kwargs)
    for name, function in _users_symbolics():
        print_.value(function, f"the symbolic of {name}")
    return print_.digest()


# ---- the module ----------------------------------------------------------------------------------------------------


def _add_module(
    print_: Fingerprint, name: str, part: torch.nn.Module, known: Mapping[int, str], inputs: Collection[int]
) -> None:
    print_.add("part", name, part.training)
    takeover = vars(part).get("_ortlab_takeover")
    if takeover is not None and takeover.holds(part):
        print_.describe_class(takeover._original_class)
        if takeover.instance_forward is not None:
            print_.value(takeover.instance_forward, f"{name}.forward")
    else:
        print_.describe_class(type(part))
    _add_tensors(print_, part, known, inputs)
    for table_name in _HOOKS if name != "the model" else ():  # the model's own hooks run around ONNX Runtime
        for hook in getattr(part, table_name).values():
            print_.value(hook, f"a forward hook of {name}")
    for key, value in vars(part).items():
        if key not in baked_in.OF_EVERY_MODULE and not key.startswith("_ortlab"):
            print_.attribute(key, value, f"{name}.{key}")


def _add_tensors(
    print_: Fingerprint, part: torch.nn.Module, known: Mapping[int, str], inputs: Collection[int]
) -> None:
    for table in (part._parameters, part._buffers):
        for key, tensor in table.items():
            print_.add(key, tensor is None)
            if tensor is None:
                continue
            print_.add(known[id(tensor)], type(tensor).__name__, *tensor_facts(tensor))
            if key in part._non_persistent_buffers_set:
                # The exporter knows tensors by their names in `state_dict`; the values of others become constants,
                # but for those of buffers that the forward writes to.
                print_.add("an input" if id(tensor) in inputs else content_digest(tensor))


# ---- the call ------------------------------------------------------------------------------------------------------


def _add_call(print_: Fingerprint, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    tensors: dict[int, int] = {}

    def add(value: Any, where: str) -> None:
        if isinstance(value, torch.Tensor):
            first = tensors.setdefault(id(value), len(tensors))
            print_.add("input", first, type(value).__name__, value.layout, *tensor_facts(value))
        elif isinstance(value, Mapping):
            print_.describe_class(type(value))
            for key, item in value.items():
                print_.add("item", repr(key))
                add(item, f"{where}[{key!r}]")
        elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
            print_.describe_class(type(value))
            print_.add(len(value))
            for position, item in enumerate(value):
                add(item, f"{where}[{position}]")
        else:
            print_.value(value, where)

    print_.add("args", len(args), "kwargs", len(kwargs))
    for position, value in enumerate(args):
        add(value, f"argument {position}")
    for name, value in kwargs.items():
        print_.add(name)
        add(value, f"argument {name}")


# ---- switches and surroundings -------------------------------------------------------------------------------------


def _add_options(print_: Fingerprint, module: torch.nn.Module, options: Options) -> None:
    for refused in ("zero_stage3", "mem_efficient_grad_management"):
        if getattr(options, refused):
            raise Uncovered(f"{refused}, whose graph holds numbers of this process")
    for name, part in module.named_modules() if options.compute_optimizer else ():
        switch = _switch_of_first_batch(part)
        if switch and getattr(options, switch):
            raise Uncovered(
                f"{name}, whose input in the first batch decides what the graph leaves out; "
                f"{switch}=False makes the graph independent of it"
            )
    for one in switches():
        if one.effect <= Effect.EXPORT:
            print_.add(one.name, repr(options._acting(one)))
    print_.add("checkpoint", options.memory_level == 1)


def _switch_of_first_batch(part: torch.nn.Module) -> str:
    """Name the optimizer that measures what a part is given (``_add_check_*_sparsity_hook``), "" if none does."""
    if isinstance(part, torch.nn.CrossEntropyLoss):
        return "label_sparse_optimizer"
    padded = isinstance(part, torch.nn.Embedding) and part.padding_idx is not None
    return "embedding_sparse_optimizer" if padded and part.weight.device.type == "cuda" else ""


def _add_surroundings(print_: Fingerprint) -> None:
    if torch.overrides._get_current_function_mode_stack():
        raise Uncovered("a TorchFunctionMode that is active")
    if torch.utils._python_dispatch._get_current_dispatch_mode_stack():
        raise Uncovered("a TorchDispatchMode that is active")
    print_.add(ortlab.__version__, engine_digest(), sys.version_info[:3], platform.machine())
    print_.add(sorted(versions().items()))
    print_.add(torch.__version__, torch.get_default_dtype(), torch.get_default_device())
    print_.add(torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled())
    print_.add(torch.is_inference_mode_enabled(), torch.get_float32_matmul_precision())
    for device in ("cpu", "cuda"):
        print_.add(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
    backends = torch.backends.cuda
    print_.add(
        backends.flash_sdp_enabled(), backends.mem_efficient_sdp_enabled(), backends.math_sdp_enabled()
    )
    print_.add(getattr(backends, "cudnn_sdp_enabled", bool)(), torch.backends.mha.get_fastpath_enabled())
    print_.add(torch.backends.mkldnn.enabled, torch.cuda.is_available())
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        print_.add(torch.distributed.get_rank(), torch.distributed.get_world_size())
    hooks = torch.nn.modules.module
    for table in (hooks._global_forward_pre_hooks, hooks._global_forward_hooks):
        for hook in table.values():
            print_.value(hook, "a forward hook of all modules")
    for kind in (torch.Tensor, torch.nn.Module):
        print_.describe_class(kind)
    print_.installed.reach("torch.nn.functional")
    print_.installed.reach("torch")
    for name, value in sorted(os.environ.items()):
        if name.startswith(_VARIABLES) and not any(word in name for word in _NAMES_OF_PLACES):
            print_.add(name, value)


def _users_symbolics() -> list[tuple[str, Any]]:
    registry = symbolic_module("registration").registry
    found = []
    for name, group in sorted(registry._registry.items()):
        for opset in sorted(group._functions):
            function = group._functions[opset]
            if hasattr(function, "__code__") and origin_of_function(function) == OWN:
                found.append((f"{name} in opset {opset}", function))
    return found


@functools.cache
def engine_digest() -> str:
    """Return SHA-256 of the engine's own files: another engine may export the same module differently."""
    digest = hashlib.sha256()
    for file in sorted(_folder().rglob("*.py")):
        digest.update(file.relative_to(_folder()).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _folder() -> Path:
    return Path(ortlab.__file__).parent / "engine"


_entry: Final[ContextVar[Entry | None]] = ContextVar("entry", default=None)
_watch: Final[ContextVar[TracedValues | None]] = ContextVar("watch", default=None)


def cached_export(execution: Execution, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Export:
    """Return the export of a call: from `export_cache_dir` if it is there, otherwise made and kept there."""
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
        export = execution.export(args, kwargs)
    return export if entry.reads_sizes else dataclasses.replace(export, sizes=ANY_SIZES)


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
                if type(value) in SETTINGS:
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
