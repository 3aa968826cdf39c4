"""The members of the user's classes and modules that code can reach by the names that stand in it."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any, Final

_BY_ANY_NAME: Final = frozenset(
    ("getattr", "vars", "dir", "setattr", "delattr", "attrgetter", "methodcaller", "__dict__")
)
"""Names of what reaches attributes whose names do not stand in the code."""

# What every class has, and what runs only when an object is made, shown or copied.
_OF_EVERY_CLASS: Final = frozenset(
    (
        *(
            "__module__",
            "__qualname__",
            "__doc__",
            "__dict__",
            "__weakref__",
            "__annotations__",
            "__annotate__",
        ),
        *(
            "__annotate_func__",
            "__annotations_cache__",
            "__abstractmethods__",
            "_abc_impl",
            "__firstlineno__",
        ),
        *("__static_attributes__", "__parameters__", "__orig_bases__", "__slots__", "__match_args__"),
        *(
            "__dataclass_fields__",
            "__dataclass_params__",
            "__repr__",
            "__str__",
            "__reduce__",
            "__reduce_ex__",
        ),
        *("__getstate__", "__setstate__", "__del__", "__sizeof__", "__dir__", "__format__"),
        "__jit_unused_properties__",
    )
)
_CONSTRUCTION: Final = frozenset(
    ("__init__", "__new__", "__post_init__", "__init_subclass__", "__set_name__")
)

FUNCTION_LIKE: Final = (
    types.FunctionType,
    staticmethod,
    classmethod,
    property,
    functools.cached_property,
    functools.partialmethod,
)
"""Kinds of members that run only when they are named; nobody knows what reads a value of another kind."""


class Owner:
    """A class or a module of the user, whose members are described when code names them."""

    def __init__(self, holder: Any, name: str) -> None:
        self.holder = holder  # keeps its id
        self.name = name  # in the description
        self.members: Mapping[str, Any] = vars(holder)
        self.is_module = isinstance(holder, types.ModuleType)
        self.made_here = False
        self.described: set[str] = set()


class NamedMembers:
    """Owners that were reached, and the names in the code that was reached."""

    def __init__(self) -> None:
        self.names: set[str] = {"forward"}  # every name that stands in the code
        self.owners: dict[int, Owner] = {}  # the user's classes and modules, by their `id`

    def owner(self, holder: type | types.ModuleType, name: str) -> Owner:
        """Return the record of a class or a module, new if it was not reached before."""
        return self.owners.setdefault(id(holder), Owner(holder, name))

    def uses(self, name: str) -> bool:
        """Return whether the code names this, or may reach what it does not name."""
        return name in self.names or not _BY_ANY_NAME.isdisjoint(self.names)

    def not_yet_described(self) -> Iterator[tuple[Owner, str]]:
        """Yield each member that the code can reach, once, also those that become reachable meanwhile."""
        found = True
        while found:
            found = False
            for owner in list(self.owners.values()):
                for name in sorted(owner.members.keys() - owner.described):
                    if self._wants(owner, name, owner.members[name]):
                        owner.described.add(name)
                        found = True
                        yield owner, name

    def _wants(self, owner: Owner, name: str, value: object) -> bool:
        if owner.is_module:
            return self.uses(name) and not (name.startswith("__") and name.endswith("__"))
        if name in _OF_EVERY_CLASS or (name in _CONSTRUCTION and not owner.made_here):
            return False
        special = name.startswith("__") and name.endswith("__")
        return special or not isinstance(value, FUNCTION_LIKE) or self.uses(name)
