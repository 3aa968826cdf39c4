"""The grid of a sweep: which options take which values, read into the points to be tried."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from ortlab.errors import OptionError, did_you_mean
from ortlab.options.configuration import check_engine
from ortlab.options.options import declaration, switches
from ortlab.options.switches import Value

POINTS_MAX: Final = 1000
"""Points of one sweep. Each takes at least a session and some steps; more is a slip of the pen."""

Changes: TypeAlias = dict[str, Value]
"""What one point changes: options by name, "engine" among them."""

_EXAMPLE: Final = 'lab.sweep({"memory_level": [0, 1, 2], "engine": ["ort", "eager"]})'


def read_grid(grid: object) -> list[Changes]:
    """Read a grid, or a list of points, and check every name and value.

    Parameters
    ----------
    grid
        Lists of values by option, "engine" among them, whose combinations are the points: the last option varies
        fastest. Or a list of points, each with its values by option. A value may be text that spells one, as
        everywhere. An option that holds several texts (`memory_plan`) takes a list of such lists.

    Returns
    -------
    list of dict
        What each point changes, in order. Contradictions between options are not looked for here.

    Raises
    ------
    OptionError
        If there is no point, an option is unknown (the near name is suggested), a value has the wrong type, or there
        are more than `POINTS_MAX` points.
    """
    if isinstance(grid, Mapping):
        axes = {_name(name): _values(name, values) for name, values in grid.items()}
        _check_count(math.prod(map(len, axes.values())) if axes else 0)
        return [dict(zip(axes, point, strict=True)) for point in itertools.product(*axes.values())]
    if isinstance(grid, Sequence) and not isinstance(grid, (str, bytes)):
        _check_count(len(grid))
        return [read_point(point) for point in grid]
    raise OptionError(
        f"A sweep needs lists of values by option, or a list of points, not a {type(grid).__name__}.",
        fix=f"For example {_EXAMPLE}.",
    )


def read_point(point: object) -> Changes:
    """Read one point: values by option.

    Raises
    ------
    OptionError
        If it is no dict, an option is unknown, or a value has the wrong type.
    """
    if not isinstance(point, Mapping):
        raise OptionError(
            f"A point of a sweep is a dict of values by option, not {point!r}.",
            fix='For example lab.sweep([{"memory_level": 1}, {"engine": "eager"}]).',
        )
    return {_name(name): _value(name, value) for name, value in point.items()}


def _name(name: Any) -> str:
    known = ["engine", *(one.name for one in switches())]
    if str(name) not in known:
        fix = did_you_mean(name, known, cutoff=0.5) or "`ortlab.options.options.table()` lists all options."
        raise OptionError(f"There is no option {str(name)!r}.", fix=fix)
    return str(name)


def _value(name: str, value: object) -> Value:
    return check_engine(value) if name == "engine" else declaration(name).read(value)


def each_value(name: str, values: object) -> list[Value]:
    """Read one value of an option, or a list of them.

    An option that holds several texts takes a list of lists for several values; a list of texts is one value.

    Raises
    ------
    OptionError
        If there is no such option, or a value has the wrong type.
    """
    known = _name(name)
    several = isinstance(values, (list, range)) and not (
        known != "engine"
        and isinstance(declaration(known).default, tuple)
        and all(isinstance(value, str) for value in values)
    )
    return _values(known, values if several else [values])


def _values(name: str, values: object) -> list[Value]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        values = [values]
    if not isinstance(values, Collection):
        raise OptionError(
            f"{name} needs a list of values, not a {type(values).__name__}.",
            why="Its values have to be counted before anything runs.",
            fix=f"Make a list of it: list({name}_values).",
        )
    if not values:
        raise OptionError(f"{name} has no values to try.", fix=f"For example {_EXAMPLE}.")
    return [_value(name, value) for value in values]


def _check_count(count: int) -> None:
    if not count:
        raise OptionError("The sweep has no points.", fix=f"For example {_EXAMPLE}.")
    if count > POINTS_MAX:
        raise OptionError(
            f"The sweep has {count:,} points.",
            why=f"Each needs a session and some steps; {POINTS_MAX:,} are the most that a sweep takes.",
            fix="Leave values out, or try one group of options after the other.",
        )
