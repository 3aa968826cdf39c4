"""Switches with the values they have here, what each does, and why some cannot act."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ortlab.options.options import Need, Options, Switch, declaration, switches, unmet
from ortlab.shown import Shown

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, repr=False)
class OptionList(Shown):
    """Some switches, or all, to be looked up.

    Attributes
    ----------
    options
        The record that holds the values.
    names
        Which switches; all, in the order of declaration, if none is named.
    have
        What this machine offers: `Lab.have`. None if that is not known, and no switch is marked then.

    Raises
    ------
    OptionError
        If there is no switch of a name; the message suggests the near one.
    """

    options: Options
    names: tuple[str, ...] = ()
    have: frozenset[Need] | None = None

    def __post_init__(self) -> None:
        """Fill in the names, or check them."""
        found = [declaration(name) for name in self.names] or switches()
        object.__setattr__(self, "names", tuple(one.name for one in found))

    @property
    def switches(self) -> tuple[Switch, ...]:
        """Their declarations."""
        return tuple(declaration(name) for name in self.names)

    def missing(self, name: str) -> str:
        """Say why a switch cannot act on this machine; "" if it can, or if that is not known."""
        return "" if self.have is None else unmet(name, self.have)

    def table(self) -> pd.DataFrame:
        """One row per switch, indexed by name: value, default, choices, what is missing, help."""
        import pandas as pd

        rows = [
            {
                "name": one.name,
                "value": getattr(self.options, one.name),
                "default": one.default,
                "choices": one.choices,
                "missing": self.missing(one.name),
                "help": one.help,
            }
            for one in self.switches
        ]
        return pd.DataFrame(rows).set_index("name")
