"""A notebook cell on ranks: sent to all at the same time, its outputs followed while it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from ortlab.ranks.call import call
from ortlab.ranks.outputs import RankOutput, rank_output

if TYPE_CHECKING:
    from ortlab.ranks.lifetime import Lifetime

_OUTPUT_SECONDS: Final = 60.0


def run_cell(
    lifetime: Lifetime,
    source: str,
    ranks: Sequence[int],
    seen: Callable[[tuple[RankOutput, ...]], None],
) -> tuple[RankOutput, ...]:
    """Run a cell on ranks; its parameters, results and errors are those of `Cluster.run_cell`."""
    asked: list[Any] = []

    def ask(view: Any) -> Any:
        asked.append(view.execute(source, silent=False, block=False))
        return asked[-1]

    def outputs() -> tuple[RankOutput, ...]:
        return tuple(rank_output(rank, one.metadata) for rank, one in zip(ranks, asked, strict=False))

    try:
        over = call(lifetime, ranks, ask, lambda: seen(outputs()))
        for one in asked:  # what was printed comes on a channel of its own
            one.wait_for_output(_OUTPUT_SECONDS)
    finally:
        seen(outputs())
    # From the replies: a rank shows the error of a magic as words only.
    over.results()
    return outputs()
