"""ONNX files, read without their weights."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ortlab.errors import BuildError
from ortlab.graphs.stages import Graph, tensors_of

if TYPE_CHECKING:
    from onnx import ModelProto

KEPT_BYTES: Final = 1024
"""What a tensor may take and still be read with its values."""

FILE: Final = "file"
"""What stands for the stage of a graph that was read from a file."""

_VARINT, _LENGTH = 0, 2
_FIXED: Final = {1: 8, 5: 4}  # bytes of the kinds of numbers that always take as many
_MOST_DIGITS: Final = 10
_WEIGHTS: Final = frozenset((4, 5, 6, 7, 9, 10, 11))
"""Fields of a TensorProto that hold values: float_data ... uint64_data, and raw_data."""

_Schema = dict[int, "_Schema"]
_tensor: _Schema = {}
_sparse: _Schema = {1: _tensor, 2: _tensor}
_graph: _Schema = {}
_node: _Schema = {5: {5: _tensor, 6: _graph, 10: _tensor, 11: _graph, 22: _sparse, 23: _sparse}}
_graph.update({1: _node, 5: _tensor, 15: _sparse})
_MODEL: Final[_Schema] = {7: _graph, 25: {7: _node}}
"""Fields of an ONNX file, by number, in which tensors are: onnx.proto3 of onnx 1.12 and later."""

_KNOWN_OTHERS: Final = (
    (b"PK\x03\x04", "a zip archive, as torch.save writes one", "Export the model: torch.onnx.export(...)."),
    (b"\x80", "a pickle", "Export the model: torch.onnx.export(...)."),
    (b"\x89HDF", "an HDF5 file, as Keras writes one", "Convert it to ONNX, with tf2onnx for example."),
    (b"{", "a JSON text", 'Convert it: onnx.save(onnx.load(path, format="json"), "model.onnx").'),
    (
        b"ir_version",
        "ONNX as text",
        'Convert it: onnx.save(onnx.load(path, format="textproto"), "model.onnx").',
    ),
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself", "Fetch the file: git lfs pull."),
)


@dataclass(frozen=True, repr=False)
class FileGraph(Graph):
    """A graph that was read from a file, without the values of its weights."""

    path: Path = field(default=Path(), kw_only=True)
    left_out: int = field(default=0, kw_only=True)  # tensors that were read without their values
    # Names of the files with weights that the graph names and that are not beside it.
    missing: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know about the reading, in sentences."""
        said = []
        if self.left_out:
            tensors = "1 tensor was" if self.left_out == 1 else f"{self.left_out:,} tensors were"
            said.append(f"{tensors} read without the values; shapes and types are there.")
        if self.missing:
            names = ", ".join(self.missing[:3]) + (", ..." if len(self.missing) > 3 else "")  # noqa: PLR2004
            said.append(f"Weights lie in {names}, which is not there; the graph itself does not need it.")
        return tuple(said)

    def save(self, path: str | Path) -> Path:
        """Write the graph as an ONNX file; raise BuildError where weights were left out, or it cannot be written."""
        if self.left_out:
            raise BuildError(
                f"The graph of {self.path.name} is not saved: it was read without its weights.",
                why="A view needs no weights, and a file without them would pass for the model.",
                fix=f"Copy the file itself: {self.path}",
            )
        return super().save(path)


def open_graph(path: str | Path) -> FileGraph:
    """Open any ONNX file as a graph that can be shown, summarised and compared.

    Weights are passed over in the file and never loaded, so that a file of some gigabytes opens as quickly as a small
    one; nor are files opened that the graph names.

    Parameters
    ----------
    path
        An ``.onnx`` file.

    Returns
    -------
    FileGraph
        Its `stage` is "file", its `part` the name of the file.

    Raises
    ------
    BuildError
        If there is no such file, or it is cut off, or not ONNX.

    Examples
    --------
    >>> ortlab.open_graph("model.onnx").operators
    {'Gemm': 4, 'Relu': 2}
    """
    file = Path(path)
    try:
        if file.is_dir():
            raise BuildError(
                f"{file} is a folder.", fix="Give the ONNX file in it, as in open_graph('model.onnx')."
            )
        with file.open("rb") as opened:
            if not opened.read(1):
                raise BuildError(f"{file} is empty.", fix="Export or copy the model again.")
            with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as held:
                return _read(file, held)
    except FileNotFoundError as error:
        raise BuildError(
            f"There is no file {file}.", why=str(error), fix="Give the path of an ONNX file."
        ) from error
    except OSError as error:
        raise BuildError(
            f"{file} cannot be read.", why=str(error), fix="Make it readable, or copy it elsewhere."
        ) from error


def _read(file: Path, held: mmap.mmap) -> FileGraph:
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    reader = _Reader(held)
    try:
        serialized = b"".join(reader.without_weights(0, len(held), _MODEL))
    except _CutOffError as error:
        raise _not_onnx(file, held, str(error), cut_off=reader.found_graph) from error
    except RecursionError as error:
        raise _not_onnx(file, held, "its graphs stand in each other without end", cut_off=False) from error
    graph = FileGraph(FILE, "inference", serialized, file.name, path=file)
    try:
        model = graph.model
    except DecodeError as error:
        raise _not_onnx(file, held, str(error), cut_off=False) from error
    if not model.ir_version or not model.HasField("graph") or not model.opset_import:
        raise _not_onnx(file, held, "it has no graph or no version", cut_off=False)
    mode = "training" if any(node.op_type == "YieldOp" for node in model.graph.node) else "inference"
    missing = tuple(name for name in _external(model) if not _is_beside(file, name))
    outside = sum(1 for tensor in tensors_of(model.graph) if tensor.external_data)
    return replace(graph, mode=mode, left_out=reader.left_out + outside, missing=missing)


def _not_onnx(file: Path, held: mmap.mmap, why: str, *, cut_off: bool) -> BuildError:
    if cut_off:
        return BuildError(
            f"{file} is cut off: {why}.",
            why="It was not written or copied to its end.",
            fix="Copy or export it again, and compare the sizes.",
        )
    start = held[:32]
    if start[4:8] == b"ORTM":
        return BuildError(
            f"{file} is not an ONNX file but one in ORT format.",
            why="That format holds what a session has made of the graph.",
            fix="Open the ONNX file that it was made from.",
        )
    for head, what, fix in _KNOWN_OTHERS:
        if start.startswith(head):
            return BuildError(f"{file} is not an ONNX file but {what}.", fix=fix)
    return BuildError(
        f"{file} is not an ONNX file.",
        why=f"Its {len(held):,} bytes cannot be read as one: {why}.",
        fix="Give a file that torch.onnx.export or onnx.save has written.",
    )


class _CutOffError(Exception):
    """The bytes end, or make no sense, before the message does."""


class _Reader:
    """Reads the wire format of protobuf, as far as it takes to pass over tensors."""

    def __init__(self, held: mmap.mmap) -> None:
        self._held = held
        self.left_out = 0
        self.found_graph = False

    def without_weights(self, start: int, end: int, schema: _Schema) -> Iterator[bytes]:
        """Yield the bytes of a message, those of large tensors without their values."""
        at = start
        while at < end:
            key, begin = self._varint(at, end)
            number, kind, length = key >> 3, key & 7, 0
            if kind == _VARINT:
                _, after = self._varint(begin, end)
            elif kind in _FIXED:
                after = begin + _FIXED[kind]
            elif kind == _LENGTH and number:
                length, begin = self._varint(begin, end)
                self.found_graph |= schema is _MODEL and number == 7  # noqa: PLR2004 - ModelProto.graph
                after = begin + length
            else:
                raise _CutOffError(f"byte {at:,} begins no field")
            if after > end:
                raise _CutOffError(f"it should have {after - end:,} bytes more")
            if length > KEPT_BYTES and schema is _tensor and number in _WEIGHTS:
                self.left_out += 1
            elif length > KEPT_BYTES and number in schema:
                body = b"".join(self.without_weights(begin, after, schema[number]))
                yield _as_varint(key) + _as_varint(len(body)) + body
            else:
                yield self._held[at:after]
            at = after

    def _varint(self, at: int, end: int) -> tuple[int, int]:
        value = 0
        for digit in range(_MOST_DIGITS):
            if at + digit >= end:
                raise _CutOffError("it ends in the middle of a number")
            byte = self._held[at + digit]
            value |= (byte & 127) << (7 * digit)
            if byte < 128:  # noqa: PLR2004 - the bit that says that another digit follows
                return value, at + digit + 1
        raise _CutOffError(f"byte {at:,} begins no number")


def _as_varint(value: int) -> bytes:
    digits = bytearray()
    while value > 127:  # noqa: PLR2004 - as above
        digits.append(value & 127 | 128)
        value >>= 7
    digits.append(value)
    return bytes(digits)


def _external(model: ModelProto) -> list[str]:
    """Return the names of the files that hold weights."""
    return sorted(
        {
            entry.value
            for tensor in tensors_of(model.graph)
            for entry in tensor.external_data
            if entry.key == "location"
        }
    )


def _is_beside(file: Path, name: str) -> bool:
    """Tell whether a file that a graph names is in the graph's folder; nothing outside is looked at."""
    folder = file.parent.resolve()
    try:
        other = (folder / name).resolve()
        return other.is_relative_to(folder) and other.is_file()
    except (OSError, ValueError):  # a name too long, or with a null byte
        return False
