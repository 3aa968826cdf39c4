"""An export as bytes and back, and the folder in which exports wait for the next process.

The bytes are an ONNX model and JSON: nothing that runs when it is read. The folder has whole files or none, from any
number of writers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import struct
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import onnx
import torch
from filelock import FileLock, Timeout

from ortlab.engine.disk_cache import Uncovered
from ortlab.engine.disk_cache.installed_code import named
from ortlab.engine.tracing.outputs import Part
from ortlab.options.option_files import writable_by_others

if TYPE_CHECKING:
    from ortlab.engine.kept_builds import Export


MAGIC: Final = b"ortlab export 2\n"
"""First bytes of each entry; another number is another format."""


class UnusableEntry(ValueError):  # noqa: N818 - an answer, not an error
    """A file that is no entry, is damaged, or was written in another format."""


@dataclass(frozen=True)
class Settled:
    """An attribute that the forward settled in its first call, such as ``config.problem_type``."""

    path: str  # of the module in the model
    holder: str  # "config" for an attribute of the module's `config`, otherwise ""
    name: str
    value: bool | int | float | str | None


@dataclass(frozen=True)
class Entry:
    """What an entry holds."""

    model: onnx.ModelProto  # without weights
    output_schema: Any  # structure of the forward's result
    settled: tuple[Settled, ...]  # what the trace changed in the model, to be repeated
    messages: tuple[tuple[str, str, str], ...]  # level, source and text of what the export said
    reads_sizes: bool  # whether the forward has read sizes in Python; what it read of them is not kept


def pack(export: Export, key: str, settled: Sequence[Settled]) -> bytes:
    """Write an export; raise Uncovered if it holds something that another process cannot use."""
    model = export.exported.exported_model
    check_model(model)
    record = {
        "key": key,
        "output_schema": _write_schema(export.exported.module_forward_output_schema),
        "settled": [dataclasses.astuple(one) for one in settled],
        "messages": [(one.level, one.source, one.text) for one in export.messages],
        "reads_sizes": export.sizes.any,
    }
    parts = [json.dumps(record).encode(), model.SerializeToString()]
    payload = b"".join(struct.pack("<Q", len(part)) + part for part in parts)
    return MAGIC + hashlib.sha256(payload).digest() + payload


def unpack(data: bytes, key: str) -> Entry:
    """Read what `pack` wrote; raise UnusableEntry if the bytes are not those of an entry with this key."""
    head = len(MAGIC) + 32
    if data[: len(MAGIC)] != MAGIC:
        raise UnusableEntry("it is no export of this version of ortlab")
    payload = data[head:]
    if hashlib.sha256(payload).digest() != data[len(MAGIC) : head]:
        raise UnusableEntry("it is damaged")
    try:
        (length,) = struct.unpack_from("<Q", payload)
        record = json.loads(payload[8 : 8 + length])
        if record["key"] != key:
            raise UnusableEntry("it was written for another key")  # noqa: TRY301 - passed on below
        model = onnx.load_model_from_string(payload[8 + length + 8 :])
        check_model(model)
        return Entry(
            model,
            _read_schema(record["output_schema"]),
            tuple(_read_settled(*one) for one in record["settled"]),
            tuple((str(level), str(source), str(text)) for level, source, text in record["messages"]),
            bool(record["reads_sizes"]),
        )
    except UnusableEntry:
        raise
    except Uncovered as answer:
        raise UnusableEntry(f"it holds {answer.thing}") from None
    except Exception as error:
        raise UnusableEntry(f"it cannot be read: {type(error).__name__}: {error}") from error


def check_model(model: onnx.ModelProto) -> None:
    """Raise Uncovered for a model that means something in one process only, or keeps tensors in other files."""
    # The former runs autograd Functions, which ORT knows by numbers and names of the process.
    graphs = [model.graph]
    while graphs:
        graph = graphs.pop()
        if any(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in graph.initializer):
            raise Uncovered("tensors in other files")
        for node in graph.node:
            if node.op_type in ("PythonOp", "PythonOpGrad"):
                names = [one.s.decode() for one in node.attribute if one.name == "func_name"]
                raise Uncovered(f"the autograd Function {''.join(names)}, which runs in this process only")
            for attribute in node.attribute:
                if attribute.t.data_location == onnx.TensorProto.EXTERNAL:
                    raise Uncovered("tensors in other files")
                graphs += [*attribute.graphs, *([attribute.g] if attribute.g.node else [])]


def check_constants(model: onnx.ModelProto, module: torch.nn.Module) -> None:
    """Raise Uncovered if a constant equals a parameter or buffer of `state_dict`, whose values keys leave out."""
    constants = [
        attribute.t for node in model.graph.node if node.op_type == "Constant" for attribute in node.attribute
    ]
    found: dict[tuple[int, ...], list[bytes]] = {}
    for tensor in (*constants, *model.graph.initializer):
        found.setdefault(tuple(tensor.dims), []).append(onnx.numpy_helper.to_array(tensor).tobytes())
    for name, value in module.state_dict().items():
        alike = found.get(tuple(value.shape), ()) if isinstance(value, torch.Tensor) else ()
        if alike and value.numel() > 1:
            values = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            if values in alike:
                raise Uncovered(f"{name}, whose values became a constant of the graph")


def _read_settled(path: str, holder: str, name: str, value: Any) -> Settled:
    if holder not in ("", "config") or not isinstance(value, (bool, int, float, str, type(None))):
        raise UnusableEntry("it sets what no forward settles")
    return Settled(path, holder, name, value)


# ---- the structure of a result -------------------------------------------------------------------------------------


def _write_schema(schema: Any) -> Any:
    if schema is None or isinstance(schema, (bool, int, float, str)):
        return schema
    if type(schema).__name__ == "_TensorStub":
        return {"tensor": [schema.tensor_idx, schema.name, schema.dtype, schema.shape_dims]}
    kind = type(schema)
    if isinstance(schema, Part):
        raise Uncovered("a result with an object in it, such as a cache of keys and values")
    if named(kind.__module__, kind.__qualname__) is not kind:
        raise Uncovered(f"the result, of class {kind.__module__}.{kind.__qualname__}, which no name leads to")
    where = [kind.__module__, kind.__qualname__]
    if isinstance(schema, Mapping):
        return {"mapping": where, "items": [[key, _write_schema(value)] for key, value in schema.items()]}
    return {"sequence": where, "items": [_write_schema(value) for value in schema]}


def _read_schema(record: Any) -> Any:
    from onnxruntime.training.utils.torch_io_helper import _TensorStub

    if not isinstance(record, dict):
        return record
    if "tensor" in record:
        index, name, dtype, dims = record["tensor"]
        return _TensorStub(index, name=name, dtype=dtype, shape_dims=dims)
    base = Mapping if "mapping" in record else Sequence
    where = record["mapping" if base is Mapping else "sequence"]
    kind = named(*where)
    # An entry may come from somebody else: only a container that is loaded already is made.
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise UnusableEntry(f"its result is of class {'.'.join(where)}, which is not loaded here")
    if base is Mapping:
        # As torch_io_helper.extract_data_and_schema makes it.
        return kind(**{key: _read_schema(value) for key, value in record["items"]})
    items = [_read_schema(value) for value in record["items"]]
    return kind._make(items) if hasattr(kind, "_make") else kind(items)  # type: ignore[call-arg]


# ---- the folder ------------------------------------------------------------------------------------------------------

KEPT_FILES: Final = 50
KEPT_BYTES: Final = 1_000_000_000
"""How much a folder holds; what was used longest ago goes first."""

SUFFIX: Final = ".ortexport"
_LOCK: Final = ".ortexport.lock"
_UNFINISHED: Final = ".ortexport-part"
_PATIENCE_S: Final = 10


class ExportFolder:
    """Entries by key, in a folder that is made when something is written."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def file(self, key: str) -> Path:
        """Return where the entry of a key is or would be."""
        return self.path / f"{key}{SUFFIX}"

    def read(self, key: str) -> bytes | None:
        """Return an entry, None if there is none; raise OSError or UnusableEntry if it cannot be read or trusted."""
        file = self.file(key)
        try:
            reason = writable_by_others(file)
            if reason:
                raise UnusableEntry(f"others could have written it: {reason.removesuffix('.')}")
            data = file.read_bytes()
        except FileNotFoundError:
            return None
        with contextlib.suppress(OSError):
            os.utime(file)  # it was used now
        return data

    def write(self, key: str, data: bytes) -> Path:
        """Put an entry in its place and make room for it; raise OSError if the folder stays locked or unwritable."""
        file = self.file(key)
        self.path.mkdir(mode=0o755, parents=True, exist_ok=True)
        try:
            with FileLock(self.path / _LOCK, timeout=_PATIENCE_S):
                self._replace(file, data)
                self._make_room(file)
        except Timeout as error:
            raise OSError(f"another process has kept {error.lock_file} locked for {_PATIENCE_S} s") from error
        return file

    def _replace(self, file: Path, data: bytes) -> None:
        # Not with tempfile, whose files nobody else may read: the folder may be shared.
        unfinished = self.path / f"{uuid.uuid4().hex}{_UNFINISHED}"
        try:
            unfinished.write_bytes(data)
            unfinished.replace(file)
        finally:
            unfinished.unlink(missing_ok=True)

    def _make_room(self, newest: Path) -> None:
        # Under the lock, so what is unfinished now was left by a writer that was killed.
        found = []
        for file in self.path.iterdir():
            with contextlib.suppress(OSError):  # gone meanwhile
                if file.suffix == _UNFINISHED:
                    file.unlink()
                elif file.suffix == SUFFIX and file != newest:
                    state = file.stat()
                    found.append((state.st_mtime, state.st_size, file))
        total = newest.stat().st_size
        for position, (_, size, file) in enumerate(sorted(found, reverse=True), start=2):
            total += size
            if position > KEPT_FILES or total > KEPT_BYTES:
                with contextlib.suppress(OSError):
                    file.unlink()
