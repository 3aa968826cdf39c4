"""The files and folders that options name, looked at when an option is set and not when a build trips over them.

1.19.2 reads the file that tells its Triton fusion which operators to fuse when a session is made. There a file that is
absent is ignored, one that is not JSON ends in a crash of the interpreter (``triton_op_executor.cc``, GetConfigJson),
and a wrong value ends the process (``triton_fusion.h``, a constructor that is noexcept).
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, Final, TypeGuard

from ortlab.errors import OptionError, did_you_mean

if TYPE_CHECKING:
    from typing_extensions import Self

    from ortlab.options.options import Options


_LISTED: Final = (
    *(
        "Add",
        "Sub",
        "Mul",
        "Div",
        "Pow",
        "Sqrt",
        "Exp",
        "Where",
        "Cast",
        "Dropout",
        "DropoutGrad",
        "Identity",
        "Sum",
    ),
    *("Gelu", "QuickGelu", "GeluGrad", "QuickGeluGrad", "ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin"),
    *("Softmax", "SoftmaxGrad_13"),
)
_BEYOND: Final = ("Relu", "Erf", "Tanh", "Sigmoid", "Log", "LayerNormalization", "LayerNormalizationGrad")
OPERATORS: Final = frozenset(_LISTED + _BEYOND)
"""What 1.19.2 can write Triton code for: its own list (``ort_triton/_op_config.py``) and what its templates
(``_codegen.py``) and decompositions (``_decompose.py``) hold beyond that."""

INITIALIZERS: Final = ("none", "scalar", "all")
_KEYS: Final = ("ops", "initializer", "min_nodes", "symbolic_shape_hint")
_EXAMPLE: Final = '{"ops": {"Add": {"versions": [13, 14]}}, "initializer": "scalar", "min_nodes": 2}'


class TritonConfig(str):  # noqa: SLOT000 - text cannot have slots for the content
    """The path of a configuration, with what the file held when it was read."""

    # It is a value of the option `triton_config_file`: two are equal if path and content are. A path without content,
    # as a saved run has it, is plain text.

    content: str  # JSON

    def __new__(cls, path: str, content: str) -> Self:
        """Make one of a path and the JSON that was read there."""
        made = super().__new__(cls, path)
        made.content = content
        return made

    def __eq__(self, other: object) -> bool:
        """Compare paths, and contents where both have one."""
        same_content = not isinstance(other, TritonConfig) or self.content == other.content
        return same_content and super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        """Say whether they differ; text has an operator of its own for that."""
        return not self == other

    __hash__ = str.__hash__

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override] # as `__new__` takes them
        """Give what `copy` and `pickle` make it of."""
        return str(self), self.content


def read_triton_config(path: str) -> TritonConfig:
    """Read and check a file for `triton_config_file`."""
    # It is JSON with the keys `ops`, `initializer`, `min_nodes` and `symbolic_shape_hint`; each may be left out.
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text in UTF-8"
        raise _unusable(path, f"It cannot be read: {reason}.") from None
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        hint = " JSON writes true and false in small letters." if re.search(r"\b(True|False)\b", text) else ""
        raise _unusable(path, f"It is not JSON: {error}.{hint}") from None
    wrong = next(_faults(config), "")
    if wrong:
        raise _unusable(path, wrong)
    return TritonConfig(path, json.dumps(config))


def _unusable(path: str, why: str) -> OptionError:
    return OptionError(
        f"triton_config_file {str(path)!r} cannot be used.",
        why=why,
        fix=f"Write for example {_EXAMPLE}, or set triton_config_file='' for ORT's own list.",
    )


def _faults(config: object) -> Iterator[str]:
    """Say what is wrong, one sentence each; what comes after the first may follow from it."""
    if not isinstance(config, dict):
        yield "It holds no JSON object."
        return
    for key in config:
        if key not in _KEYS:
            yield f"There is no key {key!r}.{_near(key, _KEYS)} Keys: {', '.join(_KEYS)}."
    operators = config.get("ops", {})
    if not isinstance(operators, dict):
        yield "`ops` is not an object with one entry for each operator."
        return
    for name, entry in operators.items():
        if name not in OPERATORS:
            yield f"ORT has no Triton code for the operator {name!r}.{_near(name, OPERATORS)}"
        wrong = _operator_fault(entry)
        if wrong:
            yield f"The operator {name!r}: {wrong}"
    if config.get("initializer", "scalar") not in INITIALIZERS:
        yield f"`initializer` is {config['initializer']!r}; it takes {', '.join(INITIALIZERS)}."
    if not _is_count(config.get("min_nodes", 2)):
        yield f"`min_nodes` is {config['min_nodes']!r}; it takes a whole number of at least 0."
    yield from _hint_faults(config.get("symbolic_shape_hint", {}))


def _operator_fault(entry: object) -> str:
    if not isinstance(entry, dict):
        return "its entry is not an object."
    unknown = next((key for key in entry if key not in _OPERATOR_KEYS), None)
    if unknown is not None:
        return f"there is no key {unknown!r}.{_near(unknown, _OPERATOR_KEYS)}"
    if "versions" not in entry:
        return "`versions` is missing; it lists the versions of ONNX in which the operator was changed."
    wrong = next((key for key, value in entry.items() if not _OPERATOR_KEYS[key][0](value)), None)
    if wrong is not None:
        return f"`{wrong}` is {entry[wrong]!r}; it takes {_OPERATOR_KEYS[wrong][1]}."
    return ""


def _is_versions(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(_is_count(one) and one > 0 for one in value)


def _is_conditions(value: object) -> bool:
    return isinstance(value, dict) and all(_is_condition(key, text) for key, text in value.items())


def _is_condition(key: object, text: object) -> bool:
    """Say whether ``triton_fusion.cc``, IsSupported, understands a condition; both sides are text there."""
    if not isinstance(text, str):
        return False
    if key == "axis":
        return re.fullmatch(r"\s*[+-]?\d+", text) is not None
    if text in ("constant", "single"):
        return key == "axes"
    try:
        axes = json.loads(text)
    except ValueError:
        return False
    return key == "axes" and isinstance(axes, list) and all(type(axis) is int for axis in axes)


_OPERATOR_KEYS: Final[dict[str, tuple[Callable[[Any], bool], str]]] = {
    "versions": (_is_versions, "a list of whole numbers, such as [13, 14]"),
    "domain": (lambda value: isinstance(value, str), 'a text, such as "com.microsoft"'),
    "is_no_op": (lambda value: isinstance(value, bool), "true or false"),
    "ignore_min_nodes": (lambda value: isinstance(value, bool), "true or false"),
    "conditions": (
        _is_conditions,
        '{"axis": "-1"}, or {"axes": ...} with "constant", "single" or a list in quotes such as "[-1]"',
    ),
}


def _hint_faults(hints: object) -> Iterator[str]:
    if not isinstance(hints, dict) or not all(_is_count(size) for size in hints.values()):
        yield "`symbolic_shape_hint` takes a whole number for each pattern of a dimension's name."
        return
    for pattern in hints:
        wrong = "" if pattern == "*" else _pattern_fault(pattern)  # alone, it stands for all dimensions
        if wrong:
            yield f"`symbolic_shape_hint` has the pattern {pattern!r}, which is none: {wrong}."


def _pattern_fault(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        return str(error)
    return ""


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and value >= 0


def _near(name: object, known: Collection[str]) -> str:
    meant = did_you_mean(name, sorted(known))
    return f" {meant}" if meant else ""


def with_files(options: Options, changed: Collection[str]) -> Options:
    """Read what changed options name, refuse what cannot be used, and return the options with what was read."""
    # `changed` names the options that somebody has given a value. A file that was read before is not read again.
    if options.triton_config_file and not isinstance(options.triton_config_file, TritonConfig):
        options = options.replace(triton_config_file=read_triton_config(options.triton_config_file))
    if options.tuning_results_path and {"tuning_results_path", "tuning"} & set(changed):
        _check_tuning_results(Path(options.tuning_results_path), write=options.tuning)
    if {"save_onnx", "save_onnx_path"} & set(changed):
        check_onnx_folder(options)
    if options.export_cache_dir and "export_cache_dir" in changed:
        check_export_folder(options)
    return options


def check_export_folder(options: Options) -> None:
    """Raise OptionError for a folder for exports that no file can be made in, or others can; an absent one is made."""
    folder = Path(options.export_cache_dir).absolute()
    if reason := _no_file_in(folder, make=True):
        raise OptionError(
            f"Exports cannot be kept in {str(folder)!r}.",
            why=reason,
            fix="Set export_cache_dir to a folder that can be written, or leave it empty.",
        )
    if reason := writable_by_others(folder):
        raise OptionError(
            f"Exports are not kept in {str(folder)!r}: others could put graphs there, and your model would run them.",
            why=reason,
            fix=f"Make it yours alone (chmod go-w {folder}), or set export_cache_dir to a folder in your home.",
        )


def writable_by_others(path: Path) -> str:
    """Say who else than this user and root can write a file, or to a folder; empty where nobody can."""
    if os.name != "posix":
        return ""
    state = path.stat()
    if state.st_uid not in (0, os.geteuid()):
        return f"{path} belongs to user {state.st_uid}."
    if state.st_mode & stat.S_IWOTH:
        return f"Every user can write to {path}."
    if state.st_mode & stat.S_IWGRP and not _is_own_group(state.st_gid):
        return f"Group {state.st_gid} can write to {path}."
    return ""


def _is_own_group(number: int) -> bool:
    """Tell whether a group has nobody but this user in it, as many systems make one for each user."""
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(number)
    except KeyError:
        return False
    return group.gr_name == user and set(group.gr_mem) <= {user}


def with_usable_export_folder(options: Options) -> tuple[Options, str]:
    """Return options whose ORTMODULE_CACHE_DIR can be used, and a note about it."""
    # The variable may be set for other programs, so a folder that cannot be written is no reason not to train here.
    try:
        check_export_folder(options)
    except OptionError as error:
        return options.replace(
            export_cache_dir=""
        ), f"ORTMODULE_CACHE_DIR is ignored: {error.what} {error.why}"
    return options, (
        f"Exports are kept in {options.export_cache_dir}, in files of ortlab's own; those that ORTModule may have put "
        "there are not used."
    )


def check_onnx_folder(options: Options) -> None:
    """Raise OptionError where graphs are to be saved, and their folder is absent, no folder, or refuses a file."""
    if not options.save_onnx:
        return
    folder = Path(options.save_onnx_path).absolute()
    if reason := _no_file_in(folder):
        raise OptionError(
            f"Graphs cannot be saved in {str(folder)!r}.",
            why=reason,
            fix="Make the folder, or set save_onnx_path to one that is there and can be written.",
        )


def _no_file_in(folder: Path, *, make: bool = False) -> str:
    """Say why no file can be made in a folder, which `make` makes first; empty where one can."""
    try:
        if make:
            folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        # The permission bits do not tell: they say nothing to root, and nothing about /proc or a full disk.
        with TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return f"A file cannot be made there: {error.strerror}."


def triton_configuration(options: Options) -> dict[str, object]:
    """Return what the Triton configuration of these options holds; empty for ORT's own."""
    value = options.triton_config_file
    if not value:
        return {}
    config = value if isinstance(value, TritonConfig) else read_triton_config(value)
    content: dict[str, object] = json.loads(config.content)
    return content


def _check_tuning_results(folder: Path, *, write: bool) -> None:
    if write:
        there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        if not there.is_dir():
            raise _refusal(folder, f"{there} is no folder.", write=write)
        if not os.access(there, os.W_OK | os.X_OK):
            raise _refusal(folder, f"{there} cannot be written.", write=write)
        return
    # 1.19.2 reads this one (_utils.set_tuning_results), and silently passes over it if it is not there.
    file = folder / "tuning_results_training.json"
    try:
        json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise _refusal(folder, f"{file} cannot be read: {error.strerror}.", write=write) from None
    except (ValueError, RecursionError) as error:
        raise _refusal(folder, f"{file} is not JSON: {error}.", write=write) from None


def _refusal(folder: Path, why: str, *, write: bool) -> OptionError:
    if write:
        fix = "Name a folder that can be written, or set tuning_results_path='' to keep nothing."
    else:
        fix = "Set tuning=True as well to write results there first, or tuning_results_path='' to use none."
    return OptionError(f"tuning_results_path {str(folder)!r} cannot be used.", why=why, fix=fix)


def text_of(path: Path) -> str:
    """Read a file; raise OSError for a device such as /dev/zero, which has no end, and a pipe, which waits."""
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is no file")
    return path.read_text(encoding="utf-8")
