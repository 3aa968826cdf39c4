"""Whose code something is, and the code of installed packages: by version, content of files, and patches.

The version of a package does not show that somebody has edited one of its files in place, or has put a function of
their own into one of its modules while Python ran. Both are common with models of transformers, so the files that a
model's modules are made of are read, with those that they import of the same package.
"""

from __future__ import annotations

import functools
import hashlib
import re
import site
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
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


def origin_of_function(function: types.FunctionType) -> str:
    """Return where a function's code comes from; code that was generated is its module's."""
    file = function.__code__.co_filename
    if file.startswith("<") and not file.startswith("<frozen "):
        file = function.__globals__.get("__file__") or ""
    return origin_of_file(file)


def origin_of_class(kind: type) -> str:
    """Return where a class comes from; one that its module does not know under its name is the user's."""
    origin = origin_of_module(kind.__module__)
    if origin in (OWN, PYTHON) or named(kind.__module__, kind.__qualname__) is kind:
        return origin
    # A class of C code can have a name that its module does not have.
    methods = [value for value in vars(kind).values() if isinstance(value, types.FunctionType)]
    return OWN if methods and any(not origin_of_function(one) for one in methods) else origin


def module_of_builtin(function: Any) -> str:
    """Return the name of the module that a function of C code belongs to; empty if nothing says it."""
    owner = getattr(function, "__objclass__", None) or getattr(function, "__self__", None)
    if isinstance(owner, types.ModuleType):
        return owner.__name__
    module = getattr(function, "__module__", None)
    if isinstance(module, str):
        return module
    kind = owner if isinstance(owner, type) else type(owner)
    return str(kind.__module__)


@functools.cache
def version_of(package: str) -> str:
    """Return the version of an installed top-level package; empty if it has none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return str(getattr(sys.modules.get(package), "__version__", ""))


def named(module: str, qualified_name: str) -> Any:
    """Return what a loaded module has under a dotted name; None if it has nothing."""
    found: Any = sys.modules.get(module)
    for part in qualified_name.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found


@functools.cache
def _package_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    own = (paths["purelib"], paths["platlib"], *site.getsitepackages(), site.getusersitepackages())
    # Those of another installation, which PYTHONPATH or a .pth file names, as modules of a computing centre do.
    shared = (path for path in sys.path if Path(path).name in {"site-packages", "dist-packages"})
    return tuple(dict.fromkeys((*own, *shared)))


@functools.cache
def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple(dict.fromkeys((paths["stdlib"], paths["platstdlib"])))


_BY_VERSION: Final = frozenset(
    (
        "",
        "python",
        "torch",
        "functorch",
        "torchgen",
        "numpy",
        "scipy",
        "sympy",
        "onnx",
        "onnxruntime",
        "ortlab",
    )
)
"""Packages whose version says enough; they have too many files to read them all."""

SETTINGS: Final = (bool, int, float, str, type(None))
_RANDOM_NAME: Final = re.compile(r"[0-9a-f]{8}-?(?:[0-9a-f]{4}-?){3}[0-9a-f]{12}")
"""A UUID: what a process calls itself to others, as ``transformers.utils.hub.SESSION_ID``."""


class InstalledCode:
    """Modules and classes of installed packages."""

    def __init__(self) -> None:
        self._modules: dict[str, types.ModuleType] = {}
        self._classes: dict[int, type] = {}
        self._packages: set[str] = set()

    def reach(self, name: str) -> None:
        """Note that a module is reached."""
        module = sys.modules.get(name)
        if module is not None and name not in self._modules:
            self._packages.add(origin_of_module(name))
            self._modules[name] = module

    def reach_class(self, kind: type) -> None:
        """Note that a class is reached."""
        self._classes.setdefault(id(kind), kind)
        self.reach(kind.__module__)

    def names(self) -> set[str]:
        """Return the names that the methods of these classes use, except in packages known by version."""
        found = set[str]()
        for kind in self._classes.values():
            if origin_of_module(kind.__module__) not in _BY_VERSION:
                for value in vars(kind).values():
                    found.update(_names_in(value))
        return found

    def replaced_functions(self) -> Iterator[tuple[types.FunctionType, str]]:
        """Yield the user's functions that stand in these modules and classes, with their places."""
        self._follow_imports()
        for kind in list(self._classes.values()):
            yield from _foreign(vars(kind), f"{kind.__module__}.{kind.__qualname__}")
        for name in sorted(self._modules):
            for member, value in list(vars(self._modules[name]).items()):
                place = f"{name}.{member}"
                if isinstance(value, types.FunctionType):
                    yield from _foreign({member: value}, name)
                elif isinstance(value, type):
                    if value.__module__ == name and origin_of_module(name) not in _BY_VERSION:
                        yield from _foreign(vars(value), place)
                elif origin_of_class(type(value)) != OWN and not isinstance(value, types.ModuleType):
                    yield from _foreign(_tables(value), place)  # a registry such as ALL_ATTENTION_FUNCTIONS

    def facts(self) -> list[str]:
        """Describe these packages and modules."""
        self._follow_imports()
        facts = [f"{package} {version_of(package)}" for package in sorted(self._packages - {OWN})]
        for name in sorted(self._modules):
            module = self._modules[name]
            if origin_of_module(name) in _BY_VERSION:
                continue
            facts += [name, _file_digest(getattr(module, "__file__", None) or "")]
            facts += [
                f"{key}={value!r}"
                for key, value in sorted(vars(module).items())
                if type(value) in SETTINGS
                and not key.startswith("__")
                and not (isinstance(value, str) and _RANDOM_NAME.fullmatch(value))
            ]
        return facts

    def _follow_imports(self) -> None:
        pending = list(self._modules.values())
        while pending:
            module = pending.pop()
            origin = origin_of_module(module.__name__)
            # A module that loads its parts when they are asked for holds what other code has asked for.
            if origin in _BY_VERSION or type(module) is not types.ModuleType:
                continue
            for value in list(vars(module).values()):
                if isinstance(value, types.ModuleType):
                    name = value.__name__
                elif isinstance(value, (types.FunctionType, type)):
                    name = value.__module__ or ""
                else:
                    continue
                if name in self._modules or name not in sys.modules or origin_of_module(name) != origin:
                    continue
                self.reach(name)
                pending.append(sys.modules[name])


def _names_in(value: object) -> Iterator[str]:
    value = getattr(value, "__func__", getattr(value, "fget", value))
    while isinstance(value, types.FunctionType):
        pending = [value.__code__]
        while pending:
            code = pending.pop()
            yield from code.co_names
            pending += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        value = getattr(value, "__wrapped__", None)


def _foreign(members: Mapping[str, Any], place: str) -> Iterator[tuple[types.FunctionType, str]]:
    for name, value in list(members.items()):
        function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
        if isinstance(function, types.FunctionType) and _is_users(function):
            yield function, f"{place}.{name}"
        elif type(value) is dict:
            for key, item in list(value.items()):
                if isinstance(item, types.FunctionType) and _is_users(item):
                    yield item, f"{place}.{name}[{key!r}]"


def _is_users(function: types.FunctionType) -> bool:
    return origin_of_function(function) == OWN


def _tables(value: object) -> Mapping[str, Any]:
    return {
        name: table
        for attributes in (getattr(value, "__dict__", {}), vars(type(value)))
        for name, table in attributes.items()
        if type(table) is dict
    }


def _file_digest(file: str) -> str:
    try:
        state = Path(file).stat()
    except OSError:
        return ""
    return _digest_of_state(file, state.st_size, state.st_mtime_ns)


@functools.cache
def _digest_of_state(file: str, _size: int, _changed: int) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()
