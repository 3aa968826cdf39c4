"""Every switch by name: what there is, what it needs, the tables that are generated, and lists to be looked up."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ortlab.errors import OptionError, did_you_mean
from ortlab.options.declarations import Compute, Experimental, Export, Logging, Memory
from ortlab.options.switches import REASONS, Group, Need, Switch, declared
from ortlab.shown import Shown

if TYPE_CHECKING:
    import pandas as pd

    from ortlab.options.options import Options

_GROUPS = {
    Group.COMPUTE: Compute,
    Group.MEMORY: Memory,
    Group.EXPORT: Export,
    Group.LOGGING: Logging,
    Group.EXPERIMENTAL: Experimental,
}


@functools.cache
def switches() -> tuple[Switch, ...]:
    """Return every switch, in the order of declaration."""
    return tuple(one for group, record in _GROUPS.items() for one in declared(record, group))


@functools.cache
def _by_name() -> Mapping[str, Switch]:
    return {one.name: one for one in switches()}


def declaration(name: str) -> Switch:
    """Return the switch of this name; raise OptionError, which suggests the near name, if there is none."""
    try:
        return _by_name()[name]
    except KeyError:
        meant = did_you_mean(name, _by_name(), cutoff=0.5)
        fix = meant or "`ortlab.options.options.table()` lists all options."
        raise OptionError(f"There is no option {name!r}.", fix=fix) from None


def check_names(names: Iterable[str], call: Callable[..., object]) -> None:
    """Refuse a name that is no option; the error says what the call takes beside options."""
    own = [
        one.name
        for one in inspect.signature(call).parameters.values()
        if one.default is not one.empty and one.kind is not one.POSITIONAL_ONLY
    ]
    for name in names:
        if name not in _by_name() and name != "engine":
            meant = did_you_mean(name, [*own, "engine", *_by_name()], cutoff=0.5)
            beside = (
                f"Beside options it takes {', '.join(own)}; ortlab.options.options.table() lists the options."
            )
            raise OptionError(f"There is no option {name!r}.", fix=f"{meant} {beside}".strip())


def variable_names() -> frozenset[str]:
    """Return every environment variable that an option stands for and 1.19.2 reads."""
    return frozenset(one.env for one in switches() if one.env)


def unmet(name: str, have: Collection[Need]) -> str:
    """Say in one sentence why a switch cannot act here; "" if it can."""
    # The sentence names what is missing first and how to get it, or what is broken in 1.19.2. `have` is what
    # `ortlab.engine.installation.have()` returns.
    one = declaration(name)
    if one.broken:
        return f"{name} {one.broken}."
    needs = one.needs + (declaration(one.part_of).needs if one.part_of else ())
    return next((f"{name} {REASONS[need]}." for need in needs if need not in have), "")


def table() -> pd.DataFrame:
    """Every switch as a row.

    Returns
    -------
    pandas.DataFrame
        Indexed by name, with the columns type, default, ort_default, choices, effect, group, needs, env,
        older_env and help.
    """
    import pandas as pd

    rows = [
        {
            "name": one.name,
            "type": one.type.__name__,
            "default": one.default,
            "ort_default": one.ort_default,
            "choices": one.choices,
            "effect": one.effect.name.lower(),
            "group": one.group.value,
            "needs": tuple(need.value for need in one.needs),
            "env": one.env,
            "older_env": one.older_env,
            "help": one.help,
        }
        for one in switches()
    ]
    return pd.DataFrame(rows).set_index("name")


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
