"""Whose code a function, a class or a module is: Python's, an installed package's or the user's own."""

from __future__ import annotations

import functools
import site
import sys
import sysconfig
from importlib import metadata
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, Final

import ortlab

PYTHON: Final = "python"
"""Origin of Python's own library."""

OWN: Final = ""
"""Origin of the user's code: of what no package manager has put there under a version."""

_ORTLAB: Final = str(Path(ortlab.__file__).parent)


@functools.cache
def origin_of_file(file: str) -> str:
    """Return the top-level package that a file was installed with, `PYTHON`, or `OWN`."""
    if file.startswith("<frozen "):
        return PYTHON
    if not file or file.startswith("<"):
        return OWN
    path = Path(file)
    if path.is_relative_to(_ORTLAB):
        return "ortlab"
    for root in _package_folders():
        if path.is_relative_to(root):
            return path.relative_to(root).parts[0].partition(".")[0]
    return PYTHON if any(path.is_relative_to(root) for root in _library_folders()) else OWN


def origin_of_module(name: str) -> str:
    """Return where a module comes from; one without a file of its own is its package's."""
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if isinstance(file, str):
        return origin_of_file(file)
    parent = name.rpartition(".")[0]
    if parent:
        return origin_of_module(parent)
    return PYTHON if name in sys.builtin_module_names or name == "builtins" else OWN


def origin_of_function(function: FunctionType) -> str:
    """Return where a function's code comes from; code that was generated is its module's."""
    file = function.__code__.co_filename
    if file.startswith("<") and not file.startswith("<frozen "):
        file = function.__globals__.get("__file__") or ""
    return origin_of_file(file)


def origin_of_class(kind: type) -> str:
    """Return where a class comes from; one that its module does not know under its name is the user's."""
    origin = origin_of_module(kind.__module__)
    if origin in (OWN, PYTHON) or _named(sys.modules.get(kind.__module__), kind.__qualname__) is kind:
        return origin
    # A class of C code can have a name that its module does not have.
    methods = [value for value in vars(kind).values() if isinstance(value, FunctionType)]
    return OWN if methods and any(not origin_of_function(one) for one in methods) else origin


def module_of_builtin(function: BuiltinFunctionType | Any) -> str:
    """Return the name of the module that a function of C code belongs to; empty if nothing says it."""
    owner = getattr(function, "__objclass__", None) or getattr(function, "__self__", None)
    if isinstance(owner, ModuleType):
        return owner.__name__
    if isinstance(function.__module__ if hasattr(function, "__module__") else None, str):
        return str(function.__module__)
    kind = owner if isinstance(owner, type) else type(owner)
    return str(kind.__module__)


@functools.cache
def version_of(package: str) -> str:
    """Return the version of an installed top-level package; empty if it has none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return str(getattr(sys.modules.get(package), "__version__", ""))


def _named(module: object, qualified_name: str) -> object:
    found = module
    for part in qualified_name.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found


@functools.cache
def _package_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple(
        dict.fromkeys(
            (paths["purelib"], paths["platlib"], *site.getsitepackages(), site.getusersitepackages())
        )
    )


@functools.cache
def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple(dict.fromkeys((paths["stdlib"], paths["platstdlib"])))
