"""How a lab shows itself in a cell: as its panel, once."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from IPython import get_ipython
from IPython.display import display

from ortlab.notebook.widgets.record_display import in_kernel

if TYPE_CHECKING:
    from ortlab.lab.lab import Lab

_shown: WeakKeyDictionary[Lab, int] = WeakKeyDictionary()
"""By lab: the execution count of the cell in which it was shown last, or said what it was set to."""


def show_panel(lab: Lab) -> None:
    """Show the panel of a lab, or raise NotImplementedError so that IPython shows the other forms.

    It raises where no widget can live, or this cell has shown the lab already.
    """
    if was_shown(lab) or not in_kernel():
        raise NotImplementedError
    show(lab)


def show(lab: Lab) -> None:
    """Show a lab now: its panel, or its page where no widget can live. Its cell does not show it a second time."""
    if in_kernel():
        from ortlab.notebook.widgets.panel import panel

        # Not by `display`, which would print an error and go on.
        panel(lab)._ipython_display_()
    else:
        display(lab)
    note_shown(lab)


def note_shown(lab: Lab) -> None:
    """Have the lab show itself as one line for the rest of the cell that runs."""
    shell = get_ipython()
    if shell is not None:
        _shown[lab] = shell.execution_count


def was_shown(lab: Lab) -> bool:
    """Tell whether the cell that runs has shown the lab already."""
    shell = get_ipython()
    return shell is not None and _shown.get(lab) == shell.execution_count
