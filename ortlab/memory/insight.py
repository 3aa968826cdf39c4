"""Savings read from ORT's MemoryInsight text, which counts every output that a plan stops keeping."""

from __future__ import annotations

import re

_ROW = re.compile(r"\|(?P<places>\d+)\s*\|")
_OPTION = re.compile(r">>Option \d+\s*: (?P<kind>\w+) subgraph (?P<cluster>\S+)")
_OUTPUT = re.compile(
    r"- Output \d+\s*: \[(?P<elements>.+)\], byte/elem: (?P<bytes>\d+), (?P<percent>\d+)% saved"
)

_STRATEGIES = {"Recompute": 1, "RecomputeWithCompromise": 2}


def savings(report: str) -> dict[str, tuple[str, int]]:
    """Add up what each plan saves, over all its places and all outputs of each.

    `get_serialized_ortmodule_memory_stat` of 1.19.2 counts one output in each place, whichever a hash table holds
    first: for a LayerNormalization that is the normalised tensor in one place and the mean, which is hundreds of
    times smaller, in the next, and others in the next process. Its text lists them all.

    Parameters
    ----------
    report
        ORT's MemoryInsight table, with sizes in terms of symbolic dimensions.

    Returns
    -------
    dict
        Configuration of a plan ("LayerNormalization+:1:-1") to the sum in bytes, an expression over symbols, and the
        number of places.
    """
    terms: dict[str, list[str]] = {}
    found: dict[str, int] = {}
    places, config = 0, ""
    for line in report.splitlines():
        if row := _ROW.match(line):
            places, config = int(row["places"]), ""
        if option := _OPTION.search(line):
            strategy = _STRATEGIES.get(option["kind"])
            config = f"{option['cluster']}:{strategy}:-1" if strategy else ""
            if config:
                found[config] = found.get(config, 0) + places
        output = _OUTPUT.search(line)
        if output and config:
            size = f"({output['elements']})*{output['bytes']}*{output['percent']}/100"
            terms.setdefault(config, []).append(f"{places}*{size}")
    return {config: (" + ".join(sizes), found[config]) for config, sizes in terms.items()}
