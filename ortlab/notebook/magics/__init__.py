"""The IPython extension: `load` adds magics to a shell, `unload` puts back what was there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ortlab.notebook.magics.cluster import ClusterMagics
from ortlab.notebook.magics.experiment import ExperimentMagics
from ortlab.notebook.magics.graphs import GraphMagics
from ortlab.notebook.magics.memory import MemoryMagics
from ortlab.notebook.magics.setup import SetupMagics
from ortlab.notebook.magics.studies import StudyMagics

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_MAGICS = (SetupMagics, ExperimentMagics, StudyMagics, MemoryMagics, GraphMagics, ClusterMagics)
_replaced: WeakKeyDictionary[InteractiveShell, dict[tuple[str, str], Any]] = WeakKeyDictionary()
"""By shell: the magics of the same kind and name that were there before ours, None where there was none."""


def load(shell: InteractiveShell) -> None:
    """Add the magics to a shell; a second call changes nothing."""
    if shell in _replaced:
        return
    registered = shell.magics_manager.magics
    _replaced[shell] = {
        (kind, name): registered[kind].get(name)
        for magics in _MAGICS
        for kind, names in magics.magics.items()
        for name in names
    }
    for magics in _MAGICS:
        shell.register_magics(magics)


def unload(shell: InteractiveShell) -> None:
    """Take the magics out, and put back what was there before; without `load`, do nothing."""
    for (kind, name), before in _replaced.pop(shell, {}).items():
        registered = shell.magics_manager.magics[kind]
        if before is None:
            registered.pop(name, None)
        else:
            registered[name] = before
