"""The IPython extension: `load` adds magics and displays to a shell, `unload` puts back what was there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ortlab.magics.experiment import ExperimentMagics
from ortlab.magics.setup import SetupMagics

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_MAGICS = (SetupMagics, ExperimentMagics)
_replaced: WeakKeyDictionary[InteractiveShell, dict[tuple[str, str], Any]] = WeakKeyDictionary()
"""By shell: the magics of the same kind and name that were there before ours, None where there was none."""


def load(shell: InteractiveShell) -> None:
    """Add the magics and the displays of ortlab's records to a shell; a second call changes nothing."""
    if shell in _replaced:
        return
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


def unload(shell: InteractiveShell) -> None:
    """Take the magics and displays out, and put back what was there before; without `load`, do nothing."""
    from ortlab.render import display

    for (kind, name), before in _replaced.pop(shell, {}).items():
        registered = shell.magics_manager.magics[kind]
        if before is None:
            registered.pop(name, None)
        else:
            registered[name] = before
    display.unregister(shell)
