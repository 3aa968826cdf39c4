"""A real shell per test: no history database, errors raised into the test, and nothing left behind."""

from __future__ import annotations

import atexit
import builtins
import linecache
import sys
from contextlib import contextmanager

import IPython.core.completer  # noqa: F401 - a shell imports it late, which adds a filter of warnings in the test
import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets.config import Config


class RaisingShell(InteractiveShell):
    """A shell whose `run` raises what the cell raised, so that a test cannot miss it."""

    def run(self, cell: str):
        """Run a cell and return the value of its last line."""
        result = self.run_cell(cell)
        result.raise_error()
        return result.result

    def formats(self, value: object) -> dict[str, str]:
        """Every form in which a front end could show the value, by MIME type."""
        return self.display_formatter.format(value)[0]

    def showtraceback(self, *args, **kwargs) -> None:
        """Print nothing: the error reaches the test."""

    def showsyntaxerror(self, *args, **kwargs) -> None:
        """Print nothing: the error reaches the test."""


def registrations(shell: InteractiveShell) -> dict[str, object]:
    """What an extension can register in a shell."""
    formatters = shell.display_formatter.formatters
    kept = {
        f"{mime}, {table}": dict(getattr(formatter, table))
        for mime, formatter in formatters.items()
        for table in ("singleton_printers", "type_printers", "deferred_printers")
    }
    kept["mime bundle"] = dict(shell.display_formatter.mimebundle_formatter.type_printers)
    # Names only: IPython replaces its own lazy magics when they are first used.
    kept["magics"] = {kind: set(magics) for kind, magics in shell.magics_manager.magics.items()}
    kept["callbacks"] = {event: list(calls) for event, calls in shell.events.callbacks.items()}
    return kept


def interpreter_hooks() -> dict[str, object]:
    """What a shell changes in the interpreter while it lives."""
    return {
        "main": sys.modules["__main__"],
        "displayhook": sys.displayhook,
        "excepthook": sys.excepthook,
        # pybind11 keeps a record there for every compiler that an extension module was built with.
        "builtins": {name for name in vars(builtins) if name != "_" and not name.startswith("__pybind11")},
    }


@contextmanager
def bare():
    """Start a shell without ortlab, and prove at the end that it and the interpreter are as they were."""
    before = interpreter_hooks()
    config = Config()
    config.HistoryManager.enabled = False
    RaisingShell.clear_instance()
    shell = RaisingShell.instance(config=config)
    try:
        yield shell
    finally:
        shell.restore_sys_module_state()
        shell.atexit_operations()
        atexit.unregister(shell.atexit_operations)
        for name in {"__IPYTHON__", "display"} - before["builtins"]:  # IPython itself leaves them
            delattr(builtins, name)
        RaisingShell.clear_instance()
        for name in shell.compile._filename_map:
            linecache.cache.pop(name, None)
    assert interpreter_hooks() == before


@contextmanager
def loaded():
    """Load ortlab into a shell, and unload it again."""
    with bare() as shell:
        before = registrations(shell)
        shell.run("%load_ext ortlab")
        yield shell
        shell.run("%unload_ext ortlab")
        assert registrations(shell) == before


@contextmanager
def wrapped_net():
    """A shell in which a small network is wrapped as `lab`, and has not run yet."""
    with loaded() as shell:
        shell.run(NET)
        shell.run("lab = %ort_wrap net --no-panel")
        lab = shell.user_ns["lab"]
        yield shell
        lab.unwrap()


@pytest.fixture
def bare_shell():
    """Return a shell without ortlab."""
    with bare() as shell:
        yield shell


@pytest.fixture
def shell():
    """Return a shell that has loaded ortlab."""
    with loaded() as shell:
        yield shell


@pytest.fixture
def captured():
    """Collect what cells print and display."""
    with capture_output() as output:
        yield output


NET = """
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
inputs = torch.randn(5, 8)
labels = torch.randint(0, 4, (5,))
"""

LOSS = "loss = nn.functional.cross_entropy(net(inputs), labels)\n"
REST = "loss.backward()\noptimizer.step()\noptimizer.zero_grad()\n"
STEP = "%%ort_step -n 4\n" + LOSS + REST


@pytest.fixture
def net_shell():
    """A shell in which a small network is wrapped as `lab`, and has not run yet."""
    with wrapped_net() as shell:
        yield shell


@pytest.fixture
def eager_shell(net_shell):
    """As `stepped_shell`, executed by PyTorch: for errors that come before any engine does, without an export."""
    net_shell.run("%ort_set engine=eager")
    net_shell.run(STEP)
    return net_shell


@pytest.fixture
def stepped_shell(net_shell):
    """As `net_shell`, after a run of four steps."""
    net_shell.run(STEP)
    return net_shell


def lab_state(shell: InteractiveShell) -> dict[str, object]:
    """Everything that a failed call must leave as it was, as plain values."""
    import torch

    lab, optimizer = shell.user_ns["lab"], shell.user_ns["optimizer"]

    def plain(value: object) -> object:
        if isinstance(value, torch.Tensor):
            return (str(value.dtype), value.tolist())
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value

    return {
        "weights": plain(lab.module.state_dict()),
        "gradients": [plain(parameter.grad) for parameter in lab.module.parameters()],
        "training": [part.training for part in lab.module.modules()],
        "optimizer": plain(optimizer.state_dict()),
        "random state": plain(torch.get_rng_state()),
        "options": lab.options,
        "engine": lab.engine,
        "runs": [run.to_dict() for run in lab.runs],
    }


@pytest.fixture
def unchanged():
    """Return a context manager that proves that its block left a shell's lab as it was."""

    @contextmanager
    def check(shell):
        before = lab_state(shell)
        yield
        assert lab_state(shell) == before

    return check
