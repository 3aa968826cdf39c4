"""The graphs of which a view shows one, and what of it shall be shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ortlab.graphs.stages import Graph

HOPS: Final = 2
"""How far the neighbourhood of a node reaches, unless another number is asked for."""

GROUPS: Final = {"auto": "grouped if it is large", "module": "grouped by module", "none": "every node"}
"""How a whole graph is drawn: what `group` takes, and its words in the browser."""


@dataclass(frozen=True)
class GraphSource:
    """Graphs to choose from: the stages of a build, the two sides of a difference, or a single one."""

    titles: Mapping[str, str]  # words, by the name that `read` takes
    read: Callable[[str], Graph]
    # Returns the first marks of the nodes, as `GraphView.highlight` takes them; None keeps marks between graphs.
    colours: Callable[[str], Mapping[str, str]] | None = None
    code: str = ""  # Python code that stands beside each graph
    about_code: str = ""  # one line


@dataclass(frozen=True)
class Wanted:
    """What shall be shown; the fields are `GraphView`'s parameters."""

    stage: str
    around: str
    hops: int
    group: str
