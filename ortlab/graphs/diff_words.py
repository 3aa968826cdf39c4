"""The differences of two graphs in words: like ones together, with how many there are and where."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from ortlab.graphs.diff import Change, DiffNode, GraphDiff, Move, Rewrite

OPERATORS_NAMED: Final = 8
"""Operators that a sentence counts one by one."""

LAYERS_NAMED: Final = 4
"""Places that a sentence names one by one."""

_VALUES: Final = ("dtype", "shape")


class Row(NamedTuple):
    """One difference as a row of a table."""

    difference: str
    before: str
    after: str
    operators: str
    module: str
    backward: bool
    more: str


def sentences(diff: GraphDiff) -> tuple[str, ...]:
    """Say what was moved, rewritten, repeated, removed, added and changed, like ones together; empty if nothing."""
    return (
        *_moved(diff.moved),
        *_rewritten(diff.rewritten),
        *_counted(diff.recomputed, "Added {} recompute {}"),
        *_counted(diff.recomputed_before, "Removed {} recompute {}"),
        *_listed(diff.removed, "Removed"),
        *_listed(diff.added, "Put in"),
        *_changed(diff.changed),
        *_signature(diff),
    )


def rows(diff: GraphDiff) -> Iterator[Row]:
    """Yield each difference by itself, in the order of the sentences."""
    for rewrite in diff.rewritten:
        verb = "fused" if rewrite.is_fusion else "replaced"
        ops = f"{operators_words(rewrite.before)} -> {operators_words(rewrite.after)}"
        yield _row(verb, rewrite.before, rewrite.after, ops, "")
    for move in diff.moved:
        more = f"{_direction(move)} past {_count(len(move.past), 'node')}: {operators_words(move.past)}"
        yield _row("moved", move.before, move.after, short(move.before[0].operator), more)
    for node in diff.recomputed:
        yield _row("recompute node added", (), (node,), short(node.operator), "")
    for node in diff.recomputed_before:
        yield _row("recompute node removed", (node,), (), short(node.operator), "")
    for node in diff.removed:
        yield _row("removed", (node,), (), short(node.operator), "")
    for node in diff.added:
        yield _row("added", (), (node,), short(node.operator), "")
    for one in diff.changed:
        more = f"{one.what}: {one.old} -> {one.new}"
        yield _row("changed", (one.before,), (one.after,), short(one.before.operator), more)


def short(operator: str) -> str:
    """Name an operator as ORT's users do, without the domain of ORT's own ones."""
    return operator.removeprefix("com.microsoft.")


def operators_words(nodes: Iterable[DiffNode]) -> str:
    """Count operators in words: "2 Mul, Add and Gelu", the most frequent first."""
    counts = Counter(short(node.operator) for node in nodes)
    words = [f"{number} {name}" if number > 1 else name for name, number in counts.most_common()]
    if len(words) > OPERATORS_NAMED:
        rest = sum(number for _, number in counts.most_common()[OPERATORS_NAMED - 1 :])
        words = [*words[: OPERATORS_NAMED - 1], f"{rest} others"]
    return _and(words)


def _row(
    difference: str, before: Sequence[DiffNode], after: Sequence[DiffNode], operators: str, more: str
) -> Row:
    nodes = (*before, *after)
    modules = dict.fromkeys(node.module for node in nodes if node.module)
    return Row(
        difference,
        ", ".join(node.name for node in before),
        ", ".join(node.name for node in after),
        operators,
        ", ".join(modules),
        all(node.backward for node in nodes),
        more,
    )


# ---- sentences ------------------------------------------------------------------------------------------------


def _rewritten(rewritten: Sequence[Rewrite]) -> Iterator[str]:
    groups: dict[tuple[object, ...], list[Rewrite]] = defaultdict(list)
    for one in rewritten:
        kinds = (tuple(sorted(node.operator for node in side)) for side in (one.before, one.after))
        groups[(*kinds, _in_backward(one.after))].append(one)
    for ones in sorted(groups.values(), key=lambda ones: (not ones[0].is_fusion, -len(ones))):
        first, times = ones[0], len(ones)
        ours, theirs = operators_words(first.before), operators_words(first.after)
        where = _where([one.after for one in ones])
        if len(first.before) == len(first.after) == 1:
            count = f"{times} " if times > 1 else ""
            yield f"Replaced {count}{ours} by {theirs}{where}."
        elif first.is_fusion:
            yield f"Fused {ours} into {theirs}{_times(times)}{where}."
        else:
            yield f"Replaced {ours} by {theirs}{_times(times)}{where}."


def _moved(moved: Sequence[Move]) -> Iterator[str]:
    groups: dict[tuple[object, ...], list[Move]] = defaultdict(list)
    for one in moved:
        kinds = tuple(sorted(node.operator for node in one.past))
        groups[one.before[0].operator, one.up, kinds, len(one.before), len(one.after)].append(one)
    for ones in groups.values():
        first = ones[0]
        past = f"{_count(len(first.past), 'node')} ({operators_words(first.past)})"
        came = f", from {len(first.before)} places" if len(first.before) > 1 else ""
        places = f", to {len(first.after)} places" if len(first.after) > 1 else came
        name = short(first.before[0].operator)
        where = _where([one.before for one in ones])
        yield f"Moved {len(ones)} {name} {_direction(first)} past {past}{places}{where}."


def _counted(nodes: Sequence[DiffNode], words: str) -> Iterator[str]:
    if nodes:
        told = words.format(len(nodes), "node" if len(nodes) == 1 else "nodes")
        yield f"{told}: {operators_words(nodes)}{_where([(node,) for node in nodes])}."


def _listed(nodes: Sequence[DiffNode], verb: str) -> Iterator[str]:
    for backward in (False, True):
        some = [node for node in nodes if node.backward == backward]
        if some:
            total = f" ({len(some)} nodes)" if len({node.operator for node in some}) > 1 else ""
            count = "1 " if len(some) == 1 else ""
            yield f"{verb} {count}{operators_words(some)}{total}{_where([(node,) for node in some])}."


def _changed(changed: Sequence[Change]) -> Iterator[str]:
    groups: dict[tuple[str, str], list[Change]] = defaultdict(list)
    for one in changed:
        groups["" if one.what in _VALUES else short(one.before.operator), one.what].append(one)
    for (operator, what), ones in sorted(
        groups.items(), key=lambda item: (item[0][1] in _VALUES, -len(item[1]))
    ):
        kinds = Counter((one.old, one.new) for one in ones)
        (old, new), most = kinds.most_common(1)[0]
        told = f"from {old} to {new}"
        if len(kinds) > 1:
            told = f"{told} ({most} of them)" if most > 1 else ""
        where = _where([(one.after,) for one in ones])
        if what.startswith("input "):
            yield f"{_count(len(ones), operator, '')} read another value as {what}{where}."
            continue
        subject = f"{what} of {len(ones)} {operator}"
        if what in _VALUES:
            subject = (
                f"{what} of {_count(len(ones), 'result')} ({operators_words(one.after for one in ones)})"
            )
        yield f"Changed {subject}{f' {told}' if told else ''}{where}."


def _signature(diff: GraphDiff) -> Iterator[str]:
    for verb, side in (("Removed", diff.before), ("Added", diff.after)):
        for what, names in (("input", side.inputs), ("output", side.outputs)):
            if names:
                shown = _and(
                    [
                        *names[:LAYERS_NAMED],
                        *([f"{len(names) - LAYERS_NAMED} others"] * (len(names) > LAYERS_NAMED)),
                    ]
                )
                yield f"{verb} {_count(len(names), what)} of the graph: {shown}."


# ---- parts of sentences ---------------------------------------------------------------------------------------


def _direction(move: Move) -> str:
    return "up" if move.up else "down"


def _times(number: int) -> str:
    return "" if number == 1 else f", {number} times"


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{plural}"


def _and(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else "".join(words)


def _in_backward(nodes: Sequence[DiffNode]) -> bool:
    return bool(nodes) and all(node.backward for node in nodes)


def _where(groups: Sequence[Sequence[DiffNode]]) -> str:
    """Say where nodes are: in the backward, in which layers or modules."""
    nodes = [node for group in groups for node in group]
    backward = (
        ", in the backward"
        if _in_backward(nodes) and not any("_recompute" in node.name for node in nodes)
        else ""
    )
    places = dict.fromkeys(node.layer or node.module for node in nodes)
    if not all(places) or not places:
        return backward
    return f"{backward}, in {_and(_ranges(places))}"


def _ranges(paths: Iterable[str]) -> list[str]:
    """Write paths with those of successive numbers together: "encoder.layer.0 to 11"."""
    numbered: dict[str, list[int]] = defaultdict(list)
    plain = []
    for path in paths:
        head, _, last = path.rpartition(".")
        if last.isdigit():
            numbered[head].append(int(last))
        else:
            plain.append(path)
    found = []
    for head, numbers in numbered.items():
        for start, end in _runs(sorted(numbers)):
            name = f"{head}.{start}" if head else str(start)
            found.append(name if start == end else f"{name} to {end}")
    words = [*found, *plain]
    if len(words) > LAYERS_NAMED:
        words = [*words[: LAYERS_NAMED - 1], f"{len(words) - LAYERS_NAMED + 1} other places"]
    return words


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = runs[-1][0], number
        else:
            runs.append((number, number))
    return runs
