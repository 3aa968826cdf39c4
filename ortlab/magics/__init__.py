"""The IPython extension: `load` adds magics and displays to a shell, `unload` puts back what was there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ortlab.magics.blame import BlameMagics
from ortlab.magics.cluster import ClusterMagics
from ortlab.magics.density import DensityMagics
from ortlab.magics.experiment import ExperimentMagics
from ortlab.magics.graphs import GraphMagics
from ortlab.magics.log import LogMagics
from ortlab.magics.memory import MemoryMagics
from ortlab.magics.numbers import NumberMagics
from ortlab.magics.preflight import PreflightMagics
from ortlab.magics.setup import SetupMagics
from ortlab.magics.sweep import SweepMagics

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_MAGICS = (
    SetupMagics,
    PreflightMagics,
    ExperimentMagics,
    LogMagics,
    SweepMagics,
    MemoryMagics,
    BlameMagics,
    GraphMagics,
    NumberMagics,
    DensityMagics,
    ClusterMagics,
)
_replaced: WeakKeyDictionary[InteractiveShell, dict[tuple[str, str], Any]] = WeakKeyDictionary()
"""By shell: the magics of the same kind and name that were there before ours, None where there was none."""


def load(shell: InteractiveShell) -> None:
    """Add the magics and the displays of ortlab's records to a shell; a second call changes nothing."""
    if shell in _replaced:
        return
    from ortlab.magics import record_widgets
    from ortlab.render import display

    registered = shell.magics_manager.magics
    _replaced[shell] = {
        (kind, name): registered[kind].get(name)
        for magics in _MAGICS
        for kind, names in magics.magics.items()
        for name in names
    }
    for magics in _MAGICS:
        shell.register_magics(magics)
    display.register(shell)
    record_widgets.register(shell)


def unload(shell: InteractiveShell) -> None:
    """Take the magics and displays out, and put back what was there before; without `load`, do nothing."""
    from ortlab.magics import record_widgets
    from ortlab.render import display

    for (kind, name), before in _replaced.pop(shell, {}).items():
        registered = shell.magics_manager.magics[kind]
        if before is None:
            registered.pop(name, None)
        else:
            registered[name] = before
    display.unregister(shell)
    record_widgets.unregister(shell)
