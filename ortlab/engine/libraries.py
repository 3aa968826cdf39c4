"""Small C++ libraries in the user's cache: each compiled once, by any number of processes at once.

Their sources include nothing of Python or torch, so one library serves every version of both; the key is made of
what does matter: the source, the compiler and the platform.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import platformdirs
from filelock import FileLock

from ortlab.errors import BuildError
from ortlab.options.option_files import writable_by_others

CACHE_VARIABLE: Final = "ORTLAB_CACHE_DIR"
"""Environment variable with the folder to use instead of the user's cache folder."""

Progress = Callable[[str, float], None]
"""Called with what is being done and the fraction done so far."""

FUNCTION_RUNNER: Final = Path(__file__).with_name("functions") / "runner.cpp"
"""Source of the runners of autograd Functions."""

COMPILED_CALLS: Final = Path(__file__).with_name("operators") / "compiled_calls.cpp"
"""Source of the calls of PyTorch's operators that need no Python."""

# Without fused multiplication and addition, which rounds otherwise than torch's two steps.
_FLAGS: Final = ("-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-shared")


def cache_folder() -> Path:
    """Return the folder for what ortlab builds; it need not exist."""
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named) if named else platformdirs.user_cache_path("ortlab")


def library_path(compiler: str, source: Path = FUNCTION_RUNNER) -> Path:
    """Return where the library of this source, compiler (a path) and platform is or would be."""
    files = (source, *sorted(source.parent.glob("*.h")))
    facts = (
        *(file.read_text(encoding="utf-8") for file in files),
        compiler,
        _version(compiler),
        sysconfig.get_platform(),
        *_FLAGS,
    )
    key = hashlib.sha256("\0".join(facts).encode()).hexdigest()[:16]
    return cache_folder() / f"{source.stem}-{key}.so"


def find_compiler() -> str:
    """Return the path of the machine's C++ compiler: ``CXX``, or else ``c++``, ``g++``, ``clang++``."""
    if sys.platform == "win32":
        # ORT is built with Visual C++ there; what is on PATH is MinGW, if anything: another std::vector.
        raise BuildError(
            "ortlab cannot compile on Windows yet.",
            why="That would need Visual C++, with which ONNX Runtime was built, and ortlab cannot drive it.",
            fix="Use Linux, WSL or macOS for models with custom autograd Functions; other models run here.",
        )
    for name in filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++")):
        found = shutil.which(name)
        if found:
            return found
    raise BuildError(
        "There is no C++ compiler.",
        why="Neither CXX nor c++, g++ or clang++ names one.",
        fix="Install one (Debian and Ubuntu: `apt install g++`; macOS: `xcode-select --install`) or set CXX.",
    )


def build(progress: Progress | None = None, source: Path = FUNCTION_RUNNER) -> Path:
    """Compile a source, unless the cache has its library, and return the library's path."""
    # Any number of processes may do so at once: one compiles, the others wait for it. The library appears in the cache
    # under its name only when it is complete.
    report = progress or (lambda _stage, _fraction: None)
    report("Looking for a C++ compiler", 0.0)
    compiler = find_compiler()
    library = library_path(compiler, source)
    try:
        if not library.is_file():
            report("Waiting for the cache folder", 0.1)
            library.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(library.with_suffix(".lock")):
                if not library.is_file():
                    report(f"Compiling {source.name}", 0.2)
                    _compile(compiler, library, source)
        reason = writable_by_others(library)
    except OSError as error:
        raise BuildError(
            f"The cache folder {library.parent} cannot be used.",
            why=str(error),
            fix=f"Make it writable, or set {CACHE_VARIABLE} to a folder that is.",
        ) from error
    if reason:
        raise BuildError(
            f"{library} is not loaded: others could have written it.",
            why=reason,
            fix=f"Delete it, and make {library.parent} yours alone, or set {CACHE_VARIABLE} to a folder in your home.",
        )
    report("Ready", 1.0)
    return library


def _compile(compiler: str, library: Path, source: Path = FUNCTION_RUNNER) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        unfinished = Path(folder) / library.name
        command = [compiler, *_FLAGS, str(source), "-o", str(unfinished)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise BuildError(
                f"{compiler} could not compile {source.name}.",
                why=(done.stderr or done.stdout).strip(),
                fix="Set CXX to another C++ compiler (C++17) and run `ortlab build` again.",
            )
        unfinished.replace(library)


def _version(compiler: str) -> str:
    """Return the first line of ``compiler --version``, so that an upgrade in place is another compiler."""
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    return done.stdout.partition("\n")[0]
