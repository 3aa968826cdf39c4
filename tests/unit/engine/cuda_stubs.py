"""Libraries with the names and the versions of CUDA's, compiled here: what the loader does with them is real."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]

DRIVER = """
#include <stdlib.h>
static int number(const char *name, int other) { const char *t = getenv(name); return t ? atoi(t) : other; }
int cuDriverGetVersion(int *version) { *version = number("STUB_CUDA", 12040); return 0; }
int cuInit(unsigned flags) { return number("STUB_INIT", 0); }
"""


def compiled(file: Path, source: str, *needed: Path) -> Path:
    """Compile a shared library whose soname is its file name, and which needs others."""
    file.parent.mkdir(parents=True, exist_ok=True)
    code = file.with_suffix(".c")
    code.write_text(source, encoding="utf-8")
    compiler = shutil.which("cc") or shutil.which("gcc") or "c++"
    language = ["-x", "c"]
    command = [
        compiler,
        *language,
        "-shared",
        "-fPIC",
        f"-Wl,-soname,{file.name}",
        "-o",
        str(file),
        str(code),
    ]
    subprocess.run(
        [*command, "-x", "none", "-Wl,--no-as-needed", *map(str, needed)], check=True, capture_output=True
    )
    code.unlink()
    return file


def wheels(folder: Path) -> dict[str, Path]:
    """Lay out the six libraries as the nvidia-*-cu11 wheels do; return their files by soname."""
    from ortlab.engine.devices import LIBRARIES

    files = {}
    for one in LIBRARIES:
        name = one.soname.partition(".")[0]
        file = folder / "nvidia" / one.folder / "lib" / one.soname
        files[one.soname] = compiled(file, f"int {name}_version(void) {{ return 11; }}")
    return files


def build_with_cuda(folder: Path, needed: list[Path]) -> Path:
    """Make a package `onnxruntime` with a CUDA provider that needs the libraries, as the linker writes it down."""
    package = folder / "onnxruntime"
    (package / "capi").mkdir(parents=True)
    (package / "__init__.py").touch()
    compiled(package / "capi" / "libonnxruntime_providers_shared.so", "int shared;")
    source = "".join(f"int {file.name.partition('.')[0]}_version(void);" for file in needed)
    called = " + ".join(f"{file.name.partition('.')[0]}_version()" for file in needed)
    source += f"int provider_total(void) {{ return {called}; }}"
    return compiled(package / "capi" / "libonnxruntime_providers_cuda.so", source, *needed)


def python(code: str, *folders: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run code in another process, with folders in front of its path."""
    kept = {name: value for name, value in os.environ.items() if name not in {"CUDA_HOME", "CUDA_PATH"}}
    path = os.pathsep.join(map(str, (*folders, REPOSITORY)))
    return subprocess.run(
        [sys.executable, "-c", code],
        env=kept | {"LD_LIBRARY_PATH": "", "PYTHONPATH": path} | environ,
        capture_output=True,
        text=True,
        check=False,
    )
