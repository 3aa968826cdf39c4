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
    """Some switches, or all, to be looked up."""

    options: Options
    names: tuple[str, ...] = ()  # all switches, in the order of declaration, if none is named
    have: frozenset[Need] | None = None  # `Lab.have`; None if that is not known, and no switch is marked then

    def __post_init__(self) -> None:
        """Fill in the names, or check them: `declaration` refuses a name that no switch has."""
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
        """Return one row per switch, indexed by name: value, default, choices, what is missing, help."""
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
