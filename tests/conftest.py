"""Every test leaves the process as it found it: environment, folder, warning filters, torch's flags."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest

# pytest's importlib mode leaves sys.path alone.
sys.path.append(str(Path(__file__).parent))
from row_listing import pytest_addoption, pytest_configure  # noqa: F401 - pytest finds its hooks here

# No test may open a window or reach a model hub.
os.environ["MPLBACKEND"] = "Agg"
os.environ["HF_HUB_OFFLINE"] = "1"

# A shell that starts the tests in the background lets them ignore Ctrl-C, which many tests send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# pytest writes the name of the running phase into the first; torch sets the others with the first optimizer and at the
# first torch.compile.
VOLATILE = {
    "PYTEST_CURRENT_TEST",
    "TORCHINDUCTOR_CACHE_DIR",
    "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
    "CUDA_MODULE_LOADING",  # by torch 2.4, when it first looks for a GPU
}


@pytest.fixture(autouse=True, scope="module")
def earlier_modules_out_of_the_garbage():
    """Keep what earlier test modules have left alive out of later collections of garbage."""
    yield
    gc.unfreeze()  # what this module's fixtures held is garbage now
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def earlier_tests_out_of_the_garbage(earlier_modules_out_of_the_garbage):
    """Keep what is alive before a test out of its collections.

    A run of the lab collects a few times, and among the objects of all packages that takes longer than most runs.
    """
    gc.collect()
    gc.freeze()


@lru_cache(maxsize=1)
def packages(count: int) -> frozenset[str]:
    """Name the packages that are imported; asked twice a test, and there are thousands of modules."""
    return frozenset(name.partition(".")[0] for name in sys.modules)


@dataclass(frozen=True)
class ProcessState:
    """What a test could leave behind for the next one."""

    environment: dict[str, str]
    folder: str
    warning_filters: tuple
    torch_flags: dict[str, object] | None
    packages: frozenset[str]

    @classmethod
    def now(cls) -> ProcessState:
        return cls(
            environment={name: value for name, value in os.environ.items() if name not in VOLATILE},
            folder=os.getcwd(),  # noqa: PTH109 - the string is compared, not walked
            warning_filters=tuple(warnings.filters),
            torch_flags=torch_flags() if "torch" in sys.modules else None,
            packages=packages(len(sys.modules)),
        )

    def changes(self, before: ProcessState) -> list[str]:
        """Describe in words what is different from `before`."""
        found = []
        for name in sorted(self.environment.keys() | before.environment.keys()):
            was, now = before.environment.get(name), self.environment.get(name)
            if was != now:
                found.append(f"environment variable {name}: {was!r} -> {now!r}")
        if self.folder != before.folder:
            found.append(f"working directory: {before.folder} -> {self.folder}")
        # A package may add filters of its own when it is first imported; that is neither ours nor undone.
        if self.packages == before.packages and self.warning_filters != before.warning_filters:
            found.append(f"warning filters: {set(self.warning_filters) ^ set(before.warning_filters)}")
        if self.torch_flags is not None:
            expected = before.torch_flags or TORCH_DEFAULTS
            found += [
                f"torch {name}: {expected[name]} -> {now}"
                for name, now in self.torch_flags.items()
                if name in expected and expected[name] != now
            ]
        return found


# What a fresh torch says, for tests that import it first; strings, so that torch need not be imported here.
TORCH_DEFAULTS = {
    "default dtype": "torch.float32",
    "deterministic algorithms": False,
    "deterministic, warn only": False,
    "gradient recording": True,
    "anomaly detection": False,
    "autocast on the CPU": False,
}


def torch_flags() -> dict[str, object]:
    import torch

    return {
        "default dtype": str(torch.get_default_dtype()),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "deterministic, warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "gradient recording": torch.is_grad_enabled(),
        "anomaly detection": torch.is_anomaly_enabled(),
        "autocast on the CPU": torch.is_autocast_enabled("cpu"),
        "threads": torch.get_num_threads(),
    }


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Show what a child process said before it failed; `CalledProcessError` itself names the exit code only."""
    report = yield
    error = call.excinfo.value if call.excinfo else None
    if isinstance(error, subprocess.CalledProcessError):
        for name, text in (("output", error.stdout), ("error", error.stderr)):
            said = text.decode(errors="replace") if isinstance(text, bytes) else text
            if said:
                report.sections.append((f"standard {name} of the child process", said))
    return report


@pytest.fixture(autouse=True)
def nothing_global_left_behind():
    """Fail the test that changes the process for those after it."""
    before = ProcessState.now()
    yield
    changes = ProcessState.now().changes(before)
    assert not changes, "the test left the process changed:\n  " + "\n  ".join(changes)


@pytest.fixture
def wrap():
    """Return `ortlab.wrap`; its labs are unwrapped at the end of the test, also of one that fails."""
    import ortlab

    with ExitStack() as labs:

        def wrapped(*args, **kwargs):
            lab = ortlab.wrap(*args, **kwargs)
            labs.callback(lab.unwrap)
            return lab

        yield wrapped


@pytest.fixture(autouse=True)
def no_open_figures():
    """Close the figures of a test, so that none is drawn into the next one's."""
    yield
    if "matplotlib.pyplot" in sys.modules:
        import matplotlib.pyplot as plt

        plt.close("all")
