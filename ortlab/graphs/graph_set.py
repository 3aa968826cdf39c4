"""The graphs of one build, all stages together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ortlab.errors import OptionError
from ortlab.shown import Shown

if TYPE_CHECKING:
    import pandas as pd

    from ortlab.graphs.stages import Graph


@dataclass(frozen=True, repr=False)
class GraphSet(Shown):
    """All stages of one build, in the order in which they were made; `lab.graphs()` returns it."""

    graphs: tuple[Graph, ...]

    def __iter__(self) -> Iterator[Graph]:
        """Go through the stages, in order."""
        return iter(self.graphs)

    def __len__(self) -> int:
        """Return the number of stages."""
        return len(self.graphs)

    def __getitem__(self, stage: str) -> Graph:
        """Return the graph of a stage, or raise OptionError where there is none."""
        found = next((graph for graph in self.graphs if graph.stage == stage), None)
        if found is None:
            raise OptionError(
                f"There is no graph stage {stage!r}.",
                fix=f"Stages: {', '.join(g.stage for g in self.graphs)}.",
            )
        return found

    @property
    def mode(self) -> str:
        """Whether the graphs are of "training" or of "inference"."""
        return self.graphs[0].mode

    @property
    def part(self) -> str:
        """Path of the part of the model that they are of; empty where the whole model is wrapped."""
        return self.graphs[0].part

    def same_as(self, graph: Graph) -> str:
        """Return the stage before a graph that is the same, byte for byte; empty if there is none."""
        earlier = self.graphs[: self.graphs.index(graph)]
        return next((one.stage for one in earlier if one.serialized == graph.serialized), "")

    def table(self) -> pd.DataFrame:
        """Return one row per stage: nodes by pass, constants, bytes, and the share of forward nodes of known module."""
        import pandas as pd

        return pd.DataFrame([{**_row(graph), "same as": self.same_as(graph)} for graph in self.graphs])

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types, without the graphs themselves."""
        return {"graphs": [graph.to_dict() for graph in self.graphs]}


def _row(graph: Graph) -> dict[str, Any]:
    summary = graph.summary
    return {
        "stage": graph.stage,
        "mode": graph.mode,
        "what": graph.what,
        "nodes": graph.node_count,
        **{str(phase): count for phase, count in summary.counts.items()},
        "operators": len(graph.operators),
        "constants": graph.initializer_count,
        "bytes": len(graph.serialized),
        "opset": graph.opset,
        "mapped": summary.mapped_fraction,
        "digest": graph.digest,
    }
