"""The FLOPs of the last step, node by node, and how many of them a switch saves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ortlab.analyses.graphs import graph
from ortlab.analyses.profiling import profiled_step
from ortlab.errors import OptionError
from ortlab.graphs.diff import diff
from ortlab.graphs.flops import Flops, FlopSavings
from ortlab.options.options import Options, setting_words

if TYPE_CHECKING:
    from ortlab.runs.bench import Bench


def count_flops(bench: Bench, part: str | None = None, n: int = 1, *, progress: bool = True) -> Flops:
    """Count the FLOPs of the last step with the present switches; see `Lab.flops`."""
    from ortlab.engine.node_flops import node_flops

    with profiled_step(bench, n, part, progress=progress) as (seen, _):
        nodes = node_flops(seen, bench.module, part or "")
    changed = ", ".join(
        setting_words(name, getattr(bench.options, name)) for name in bench.options.changed(Options())
    )
    return Flops(nodes, changed, part or "")


def flops_saved(
    bench: Bench, against: Mapping[str, object], part: str | None = None, n: int = 1, *, progress: bool = True
) -> FlopSavings:
    """Compare the FLOPs of the last step as the lab is set with those of other options; see `Lab.flops`."""
    bench.check_usable("count FLOPs")
    present = bench.configuration
    other = present.changed(dict(against), bench.have)
    if other == present:
        raise OptionError(
            f"The lab is set so already: {_words(against)}.",
            why="There is nothing to compare.",
            fix="Set the switch the other way first: lab.set(compute_optimizer=True).",
        )
    having, drawn = count_flops(bench, part, n, progress=progress), graph(bench, part=part)
    with bench.set_as_before():
        bench.configure(other)
        compared = count_flops(bench, part, n, progress=progress)
        same = dict(diff(graph(bench, part=part), drawn).matched)
    now = {name: getattr(present.options, name, present.engine) for name in against}
    return FlopSavings(compared, having, same, f"{_words(now)} against {_words(against)}")


def _words(changes: Mapping[str, object]) -> str:
    return ", ".join(setting_words(name, value) for name, value in changes.items())
