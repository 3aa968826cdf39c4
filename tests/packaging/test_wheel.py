"""The wheel: what is inside, and that it works away from the checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, REPOSITORY],
        check=True,
        capture_output=True,
        text=True,
    )
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The folder that the wheel alone is installed into."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def python(installed: Path, code: str, cwd: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-P", "-c", code] if sys.version_info >= (3, 11) else [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(installed)},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def own_files() -> set[str]:
    """The files of the package: those that git tracks, and in an unpacked sdist, which holds no others, all."""
    if not (REPOSITORY / ".git").exists():
        package = (REPOSITORY / "ortlab").rglob("*")
        return {
            str(path.relative_to(REPOSITORY))
            for path in package
            if path.is_file() and "__pycache__" not in path.parts
        }
    listed = subprocess.run(
        ["git", "ls-files", "ortlab"],  # noqa: S607 - whichever git made the checkout
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
        text=True,
    )
    return set(listed.stdout.split())


def test_holds_every_own_file_of_the_package(wheel):
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    tracked = own_files()
    assert "ortlab/py.typed" in tracked
    assert tracked <= inside
    assert "ortlab/notebooks/01_quickstart.ipynb" in inside


def test_holds_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        folders = {name.partition("/")[0] for name in archive.namelist()}
    assert {folder for folder in folders if not folder.endswith(".dist-info")} == {"ortlab"}


def test_imports_away_from_the_checkout(installed, tmp_path):
    code = """
import pkgutil, importlib, json, ortlab
names = [module.name for module in pkgutil.walk_packages(ortlab.__path__, "ortlab.")]
for name in names:
    importlib.import_module(name)
print(json.dumps([ortlab.__file__, names]))
"""
    result = python(installed, code, tmp_path)
    assert result.returncode == 0, result.stderr
    file, names = json.loads(result.stdout.splitlines()[-1])
    assert Path(file).is_relative_to(installed)
    assert {
        "ortlab.lab.lab",
        "ortlab.notebook.magics",
        "ortlab.notebook.widgets",
        "ortlab.engine.ort",
    } <= set(names)


def test_the_quickstart_comes_out_of_the_wheel(installed, tmp_path):
    code = (
        "from pathlib import Path; from ortlab.cli import place_quickstart; print(place_quickstart(Path()))"
    )
    result = python(installed, code, tmp_path)
    assert result.returncode == 0, result.stderr
    copied = tmp_path / "01_quickstart.ipynb"
    assert copied.read_bytes() == (REPOSITORY / "notebooks" / "01_quickstart.ipynb").read_bytes()


def test_the_command_and_the_metadata(wheel):
    import ortlab

    with zipfile.ZipFile(wheel) as archive:
        (entry,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        assert "ortlab = ortlab.cli:main" in archive.read(entry).decode()
        described = archive.read(metadata).decode()
    assert f"\nVersion: {ortlab.__version__}\n" in described
    assert "\nProvides-Extra: cpu\n" in described
    assert "\nProvides-Extra: cuda\n" in described


def test_import_ortlab_loads_nothing_heavy(installed, tmp_path):
    code = (
        "import sys, ortlab; "
        "print([name for name in ('torch', 'onnxruntime', 'IPython', 'ipywidgets', 'pandas') if name in sys.modules])"
    )
    result = python(installed, code, tmp_path)
    assert result.stdout == "[]\n", result.stderr
