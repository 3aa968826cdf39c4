"""Jobs that CI does not run on every change: both ends of the torch range, and the pinned environment itself.

``nox -s torch_oldest torch_newest`` answers "does ortlab still work with the torch I am stuck with, and with
the newest one?". ``nox -s constraints`` writes requirements/constraints.txt anew.
"""

from __future__ import annotations

import shutil
import tarfile
import zipfile
from pathlib import Path

import nox

nox.options.default_venv_backend = "venv"
nox.options.sessions = ["lint", "types", "docs"]

HERE = Path(__file__).parent
CONSTRAINTS = HERE / "requirements" / "constraints.txt"
ENGINE_TESTS = ("tests/unit", "tests/zoo")
TORCH_PINS_ITSELF = ("cuda-", "nvidia-", "triton==")

CONSTRAINTS_HEADER = """\
# The environment in which the commands of the README are known to work, for CPython 3.10, 3.11 and 3.12.
# Made by `nox -s constraints`; do not edit. torch's own CUDA packages are left out: torch pins them itself.
"""


def _install_with_torch(session: nox.Session, *pins: str) -> None:
    """Install ortlab with another torch than the constraints' one, the rest as the resolver finds it."""
    session.install("--upgrade", "pip>=25.1")
    session.install(*pins, "--group", "test", "-e", ".[cpu]")
    session.run("python", "-c", "import torch; print('torch', torch.__version__)")


@nox.session(python="3.11")
@nox.parametrize("transformers", ["4.46,<4.50", "4.56,<4.57"])
def torch_oldest(session: nox.Session, transformers: str) -> None:
    """Engine tests on the oldest torch in the range: with the transformers of its time, and one with all of the zoo."""
    pins = ("torch>=2.4,<2.5", f"transformers>={transformers}", "numpy<2.3", "setuptools<81")
    _install_with_torch(session, *pins)
    session.run("python", "-m", "pytest", *(session.posargs or ENGINE_TESTS))


@nox.session(python="3.11")
def torch_newest(session: nox.Session) -> None:
    """Engine tests on the newest torch in the range."""
    _install_with_torch(session, "torch>=2.15,<2.16")
    session.run("python", "-m", "pytest", *(session.posargs or ENGINE_TESTS))


@nox.session(python=["3.10", "3.11", "3.12"])
def tests(session: nox.Session) -> None:
    """Unit tests on each supported Python, with the pinned environment."""
    session.install("--upgrade", "pip>=25.1")
    session.install("-c", str(CONSTRAINTS), "--group", "test", "-e", ".[cpu]")
    session.run("python", "-m", "pytest", *(session.posargs or ("tests/unit",)))


@nox.session(python="3.11")
def front_ends(session: nox.Session) -> None:
    """Try the panel in Notebook 7 and Voila, which nothing else needs; Chromium has to be there."""
    session.install("--upgrade", "pip>=25.1")
    groups = ("--group", "test", "--group", "browser")
    session.install("-c", str(CONSTRAINTS), *groups, "-e", ".[cpu]", "notebook>=7.2", "voila>=0.5")
    session.run("python", "-m", "pytest", *(session.posargs or ("tests/browser/front_ends.py",)))


@nox.session(python="3.11")
def lint(session: nox.Session) -> None:
    """Style of every Python file, and spelling of all that is read."""
    session.install("-c", str(CONSTRAINTS), "ruff", "codespell")
    session.run("ruff", "check", ".")
    session.run("codespell")


@nox.session(python="3.11")
def types(session: nox.Session) -> None:
    """Types of the package, strictly."""
    session.install("--upgrade", "pip>=25.1")
    session.install("-c", str(CONSTRAINTS), "--group", "dev", "-e", ".[cpu]")
    session.run("mypy")


@nox.session(python="3.11")
def docs(session: nox.Session) -> None:
    """Documentation, with warnings as errors."""
    session.install("--upgrade", "pip>=25.1")
    session.install("-c", str(CONSTRAINTS), "--group", "docs", "-e", ".[cpu]")
    session.run("python", "-m", "sphinx", "-W", "--keep-going", "-b", "html", "docs", "docs/_build/html")


@nox.session(python="3.11")
def release(session: nox.Session) -> None:
    """Build sdist and wheel as a release has them, check their metadata, and look into both."""
    session.install("build", "twine")
    folder = Path(session.create_tmp()) / "dist"
    shutil.rmtree(folder, ignore_errors=True)
    session.run("python", "-m", "build", "--outdir", str(folder))  # the wheel from the sdist
    session.run("python", "-m", "twine", "check", "--strict", *map(str, folder.iterdir()))
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    missing = {"ortlab/py.typed", "ortlab/cli.py", "ortlab/notebooks/01_quickstart.ipynb"} - inside
    strange = {name for name in inside if name.split("/")[0].partition("-")[0] != "ortlab"}
    with tarfile.open(sdist) as archive:
        shipped = {name.partition("/")[2] for name in archive.getnames()}
    for name in (
        "README.md",
        "LICENSE",
        "run-tests",
        "requirements/constraints.txt",
        "docs/index.md",
        "tests/conftest.py",
    ):
        missing |= {name} - shipped
    strange |= {name for name in shipped if name.startswith((".venv", ".ci", "docs/_build", "build/"))}
    if missing or strange:
        session.error(f"missing: {sorted(missing)}; does not belong there: {sorted(strange)}")
    session.install("--no-deps", str(wheel))
    session.run("python", "-c", "import ortlab; print(ortlab.__version__)")
    for file in (wheel, sdist):
        session.log(f"{file.name}: {file.stat().st_size / 1e6:.1f} MB")


@nox.session(python=False)
def constraints(session: nox.Session) -> None:
    """Resolve requirements/constraints.txt for every supported Python and platform."""
    pins = Path(session.create_tmp()) / "torch.txt"
    pins.write_text("torch==2.13.0\n", encoding="utf-8")
    session.run(
        *("uv", "pip", "compile", "--universal", "--python-version", "3.10", "--no-annotate", "--no-header"),
        *("--quiet", "--extra", "cpu", "--group", "dev", "-c", str(pins)),
        *("pyproject.toml", "-o", str(CONSTRAINTS), *session.posargs),
        external=True,
    )
    lines = CONSTRAINTS.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if not line.startswith(TORCH_PINS_ITSELF)]
    CONSTRAINTS.write_text(CONSTRAINTS_HEADER + "".join(kept), encoding="utf-8")
