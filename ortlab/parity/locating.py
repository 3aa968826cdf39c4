"""Where a divergence is that the compute optimizer hides: a run without it shows what it has cut."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ortlab.parity.divergence import find
from ortlab.parity.pairs import (
    BACKWARD,
    DIFFERS,
    FORWARD,
    INPUT_GRADIENT,
    NOT_COMPARED,
    OUTPUT,
    OUTPUT_GRADIENT,
    TensorPair,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ortlab.errors import OrtlabError
    from ortlab.parity.comparing import Compared
    from ortlab.parity.record import Divergence
    from ortlab.parity.structure import Structure

_ENDS: Final = {"forward": (OUTPUT,), "backward": (OUTPUT_GRADIENT, INPUT_GRADIENT)}
_KINDS: Final = {"forward": FORWARD, "backward": BACKWARD}


class Locating:
    """Finds the first divergence of each phase, in one look or in two.

    The compute optimizer moves a slice ahead of the operators before it: what these compute in ONNX Runtime is the
    slice of what they compute in PyTorch, and is not compared. A fault among them shows only behind them. With the
    compute optimizer off, the same computation has whole tensors.

    The pairs are in the order of the reference; `describe` returns class and source line of a module, by its path.
    """

    def __init__(
        self, pairs: Sequence[TensorPair], structure: Structure, describe: Callable[[str], tuple[str, str]]
    ) -> None:
        self._pairs = pairs
        self._structure = structure
        self._describe = describe
        # Of the forward, of the backward and of the update; their pairs are of the run that was compared.
        self.divergences = find(pairs, structure, describe)
        self.notes: tuple[str, ...] = ()  # on the second look

    @property
    def is_hidden(self) -> bool:
        """Whether a divergence has tensors right before it that were cut, so that it can be there as well."""
        return any(self._cut_before(one) for one in self.divergences if one)

    def give_up(self, error: OrtlabError) -> None:
        """Keep the result of the first look, since there can be no second one."""
        why = str(error).splitlines()[0]
        self.notes = (
            f"The compute optimizer cuts tensors where the runs part; a run without it failed: {why}",
        )

    def look_at(self, whole: Compared) -> None:
        """Look again, with what a run without the compute optimizer shows of the tensors that were not compared.

        `whole` is that run, held against the same reference. What was compared stays as it is. Where `whole` agrees
        with the reference, the first verdict stays, too: what the compute optimizer makes of the graph is what differs
        then.
        """
        completed = tuple(
            replace(pair, distance=whole.distances.get(pair.site)) if pair.distance is None else pair
            for pair in self._pairs
        )
        shown = sum(one.distance is None for one in self._pairs) - sum(
            one.distance is None for one in completed
        )
        again = find(completed, self._structure, self._describe)
        forward, backward, update = (
            self._again(first, second, whole, shown) if first and second else first
            for first, second in zip(self.divergences, again, strict=True)
        )
        self.divergences = forward, backward, update

    def _again(self, first: Divergence, second: Divergence, whole: Compared, shown: int) -> Divergence:
        cut, there = self._cut_before(first), whole.distances.get(first.pair.site)
        if not cut:
            return first
        if there is not None and replace(first.pair, distance=there).verdict != DIFFERS:
            words = (
                "with the compute optimizer off this tensor agrees, so the fault is in what that has moved or cut, and "
                "lab.set(compute_optimizer=False) avoids it"
            )
            others = dict.fromkeys((*first.others, *cut))
            others.pop(first.module, None)
            return replace(first, reason=f"{first.reason}; {words}", others=tuple(others))
        if there is None and second.pair.site == first.pair.site:
            return first
        seen_first = first.pair.site.module or "the model"
        words = (
            f"found with the compute optimizer off: with it, {shown} tensors cannot be compared, and "
            f"{seen_first} is the first that differs"
        )
        return replace(second, pair=first.pair, reason=f"{second.reason} ({words})")

    def _cut_before(self, divergence: Divergence) -> tuple[str, ...]:
        """Name the modules right before a divergence whose tensors are there, but of another shape."""
        kinds, ends = _KINDS.get(divergence.phase, ()), _ENDS.get(divergence.phase, ())
        found: dict[str, None] = {}
        for pair in reversed(self._pairs[: self._pairs.index(divergence.pair)]):
            if pair.site.step != divergence.pair.site.step or pair.site.kind not in kinds:
                continue
            if pair.verdict != NOT_COMPARED and pair.site.kind in ends:
                break
            if pair.reference and pair.candidate and pair.reference.shape != pair.candidate.shape:
                found[pair.site.module] = None
        return tuple(found)
