"""The installations are real folders with real metadata, seen by a Python that has no other packages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ortlab.engine import installation
from ortlab.errors import InstallError
from ortlab.options.switches import Need

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest itself needs it there

REPOSITORY = Path(__file__).parents[3]

CHECK = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])
from ortlab.engine import installation
from ortlab.errors import InstallError
try:
    installation.check()
    error = None
except InstallError as refusal:
    error = {"what": refusal.what, "why": refusal.why, "fix": refusal.fix}
heavy = sorted({"torch", "onnxruntime", "numpy"} & set(sys.modules))
found = [[one.name, one.version] for one in installation.distributions()]
print(json.dumps({"error": error, "heavy": heavy, "found": found}))
"""


class Site:
    """A folder with packages, as pip would have filled it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, version in {"torch": "2.13.0+cpu", "onnx": "1.23.0", "numpy": "2.4.6"}.items():
            self.add(name, version)

    def add(
        self, name: str, version: str, requires: tuple[str, ...] = (), top_level: str | None = None
    ) -> None:
        info = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {one}" for one in requires]
        (info / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")
        if top_level:
            (info / "top_level.txt").write_text(top_level + "\n", encoding="utf-8")

    def remove(self, name: str) -> None:
        for info in self.folder.glob(f"{name.replace('-', '_')}-*.dist-info"):
            (info / "METADATA").unlink()
            info.rmdir()

    def add_onnxruntime_files(self, built_as: str) -> None:
        for path, text in {
            "__init__.py": "raise ImportError('nobody shall import this')",
            "training/ortmodule/__init__.py": "",
            "capi/build_and_package_info.py": f"package_name = '{built_as}'\n__version__ = '1.19.2'\n",
        }.items():
            file = self.folder / "onnxruntime" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")

    def check(self) -> dict:
        # -S leaves site-packages out: what counts is what this folder holds.
        command = [sys.executable, "-I", "-S", "-c", CHECK, json.dumps([str(self.folder), str(REPOSITORY)])]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return json.loads(done.stdout)


@pytest.fixture
def site(tmp_path) -> Site:
    return Site(tmp_path / "site-packages")


@pytest.fixture
def trainable(site) -> Site:
    site.add("onnxruntime-training-cpu", "1.19.2", requires=("numpy >=1.16.6", "onnx"))
    site.add_onnxruntime_files("onnxruntime-training-cpu")
    return site


def test_a_good_installation_passes_without_importing_it(trainable):
    assert trainable.check() == {
        "error": None,
        "heavy": [],
        "found": [["onnxruntime-training-cpu", "1.19.2"]],
    }


def test_nothing_installed(site):
    result = site.check()

    assert "not installed" in result["error"]["what"]
    assert f"{sys.executable} -m pip install onnxruntime-training-cpu==1.19.2" in result["error"]["fix"]


@pytest.mark.parametrize(
    "other",
    [
        "onnxruntime",
        "onnxruntime-gpu",
        "onnxruntime-training",
        "onnxruntime-directml",
        "ort-nightly",
        "OnnxRuntime_QNN",
    ],
)
def test_two_that_overwrite_each_other(trainable, other):
    trainable.add(other, "1.24.1")

    error = trainable.check()["error"]

    assert "installed together" in error["what"]
    uninstall, install = error["fix"].split(" && ")
    assert "pip uninstall -y" in uninstall
    assert other.lower().replace("_", "-") in uninstall
    assert "onnxruntime-training-cpu" in uninstall
    assert "==1.19.2" in install


@pytest.mark.parametrize("only", [("onnxruntime", "1.24.1"), ("onnxruntime-training-cpu", "1.17.1")])
def test_another_kind_or_release(site, only):
    site.add(*only)

    error = site.check()["error"]

    assert f"{only[0]} {only[1]}" in error["what"]
    assert f"pip uninstall -y {only[0]} && " in error["fix"]
    assert "pip install onnxruntime-training-cpu==1.19.2" in error["fix"]


def test_the_release_for_cuda_counts_whatever_cuda_it_was_built_for(site):
    site.add("onnxruntime-training", "1.19.2+cu118")
    site.add_onnxruntime_files("onnxruntime-training")

    assert site.check()["error"] is None


def test_who_had_a_gpu_package_is_offered_one_where_there_is_one(site):
    site.add("onnxruntime-gpu", "1.24.1")
    exists = sys.platform == "linux" and sys.version_info < (3, 12)

    fix = site.check()["error"]["fix"]

    assert f"pip install onnxruntime-training{'' if exists else '-cpu'}==1.19.2" in fix


@pytest.mark.parametrize("neighbour", ["onnxruntime-extensions", "onnxruntime-genai", "optimum-onnx"])
def test_packages_that_only_sound_alike(trainable, neighbour):
    trainable.add(neighbour, "0.14.0")

    assert trainable.check()["error"] is None


def test_a_package_with_a_folder_of_its_own(trainable):
    trainable.add("onnxruntime-vitisai-tools", "1.0", top_level="vitis_tools")

    assert trainable.check()["error"] is None


def test_files_that_another_distribution_has_overwritten(trainable):
    trainable.add_onnxruntime_files("onnxruntime")

    error = trainable.check()["error"]

    assert "damaged" in error["what"]
    assert "files of onnxruntime" in error["why"]
    assert "pip uninstall -y onnxruntime-training-cpu && " in error["fix"]


def test_files_that_another_distribution_took_with_it(site):
    site.add("onnxruntime-training-cpu", "1.19.2")

    assert "damaged" in site.check()["error"]["what"]

    (site.folder / "onnxruntime").mkdir()
    (site.folder / "onnxruntime" / "__init__.py").touch()

    assert "training/ortmodule" in site.check()["error"]["why"]


def test_a_dependency_of_onnxruntime_is_missing(site):
    site.add("onnxruntime-training-cpu", "1.19.2", requires=("numpy", "cerberus", 'pytest ; extra == "test"'))
    site.add_onnxruntime_files("onnxruntime-training-cpu")

    error = site.check()["error"]

    assert error["what"].endswith("needs: cerberus.")
    assert "pip install cerberus" in error["fix"]


@pytest.mark.parametrize("name", ["torch", "onnx", "numpy"])
def test_a_package_is_missing(trainable, name):
    trainable.remove(name)

    error = trainable.check()["error"]

    assert error["what"] == f"{name} is not installed."
    assert "pip install" in error["fix"]
    assert f"{name}>=" in error["fix"]


@pytest.mark.parametrize(
    ("name", "version"), [("torch", "2.3.1"), ("torch", "2.16.0"), ("onnx", "1.15.0"), ("numpy", "1.25.2")]
)
def test_a_package_of_another_time(trainable, name, version):
    trainable.remove(name)
    trainable.add(name, version)

    error = trainable.check()["error"]

    assert error["what"] == f"{name} {version} cannot be used."
    assert f"{name}>=" in error["fix"]


@pytest.mark.parametrize("version", ["2.4.0", "2.9.1+cu128", "2.15.0.dev20260401"])
def test_every_torch_of_the_range(trainable, version):
    trainable.remove("torch")
    trainable.add("torch", version)

    assert trainable.check()["error"] is None


def test_another_python(monkeypatch):
    monkeypatch.setattr(installation, "PYTHONS", ((3, 90), (3, 91)))

    with pytest.raises(InstallError, match=r"3\.90 up to, but not including, 3\.91") as refusal:
        installation.check()

    assert "Python 3.11" in refusal.value.fix


def test_the_ranges_are_those_that_pip_reads():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    ours = {
        name: f"{name}>={installation.dotted(first)}" + (f",<{installation.dotted(last)}" if last else "")
        for name, (first, last) in installation.PACKAGES.items()
    }

    assert set(ours.values()) <= set(project["dependencies"])
    first, too_new = installation.PYTHONS
    assert project["requires-python"] == f">={installation.dotted(first)},<{installation.dotted(too_new)}"
    extras = project["optional-dependencies"]
    assert f"{installation.CPU}=={installation.ORT_VERSION}" in extras["cpu"]
    assert any(one.startswith(f"{installation.CUDA}=={installation.ORT_VERSION};") for one in extras["cuda"])


def test_this_very_environment_can_train():
    installation.check()

    [one] = installation.distributions()
    assert one.is_training
    assert (one.location / "onnxruntime").is_dir()


def test_what_switches_can_rely_on_agrees_with_torch():
    import torch

    present = installation.have()

    assert present <= set(Need)
    assert (Need.CUDA in present) <= torch.cuda.is_available()
    assert not (Need.AMPERE in present and Need.CUDA not in present)
    built = installation.check_onnxruntime().name
    assert (Need.TRITON_BUILD in present) == (built == installation.CUDA)
