"""From the first tensor that differs to the module at fault; and the questions of ORTModule's convergence notes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from ortlab.parity.parity import (
    BACKWARD,
    DIFFERS,
    DONE,
    FORWARD,
    FOUND,
    INPUT,
    INPUT_GRADIENT,
    NOT_COMPARED,
    NOT_DONE,
    OUTPUT,
    OUTPUT_GRADIENT,
    PARAMETER_GRADIENT,
    UPDATED_PARAMETER,
    ChecklistItem,
    Divergence,
    Site,
    TensorPair,
)

if TYPE_CHECKING:
    from ortlab.errors import OrtlabError
    from ortlab.parity.observation import Structure
    from ortlab.parity.tensor_comparison import Compared
    from ortlab.records.runs import Run


_ENDS: Final = {"forward": (OUTPUT,), "backward": (OUTPUT_GRADIENT, INPUT_GRADIENT)}

_KINDS: Final = {"forward": FORWARD, "backward": BACKWARD}


class Locating:
    """Finds the first divergence of each phase, in one look or in two."""

    # The compute optimizer moves a slice ahead of the operators before it: what these compute in ONNX Runtime is the
    # slice of what they compute in PyTorch, and is not compared. A fault among them shows only behind them. With the
    # compute optimizer off, the same computation has whole tensors. The pairs are in the order of the reference;
    # `describe` returns class and source line of a module, by its path.

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
        """Look again, with what a run without the compute optimizer shows of the tensors that were not compared."""
        # `whole` is that run, held against the same reference. What was compared stays as it is. Where `whole` agrees
        # with the reference, the first verdict stays, too: what the compute optimizer makes of the graph is what
        # differs then.
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


def find(
    pairs: Sequence[TensorPair], structure: Structure, describe: Callable[[str], tuple[str, str]]
) -> tuple[Divergence | None, Divergence | None, Divergence | None]:
    """Return the first divergence of the forward, of the backward and of the update."""
    # A module whose inputs agree and whose output differs is at fault itself. An input that differs, though no module
    # has returned it so, was computed by the caller, between the calls. In the backward it is the other way round: a
    # gradient goes into a module right and comes out wrong. The pairs are in the order of the reference. `describe`
    # returns class and source line of a module, by its path.
    verdicts = {pair.site: pair.verdict for pair in pairs}

    def first(kinds: Iterable[str]) -> TensorPair | None:
        wanted = frozenset(kinds)
        return next((one for one in pairs if one.site.kind in wanted and one.verdict == DIFFERS), None)

    def divergence(phase: str, pair: TensorPair | None) -> Divergence | None:
        if pair is None:
            return None
        module, reason, others = _at_fault(pair.site, pairs, verdicts, structure)
        kind, source = describe(module)
        return Divergence(phase, module, kind, source, pair, reason, others)

    return (
        divergence("forward", first(FORWARD)),
        divergence("backward", first(BACKWARD)),
        divergence("update", first([UPDATED_PARAMETER])),
    )


def _at_fault(
    site: Site, pairs: Sequence[TensorPair], verdicts: Mapping[Site, str], structure: Structure
) -> tuple[str, str, tuple[str, ...]]:
    """Return the path of the module at fault, the reason, and the paths of others that it may be."""
    if site.kind == OUTPUT:
        return site.module, "what it takes agrees, what it returns does not", _unseen_before(site, pairs)
    if site.kind == INPUT:
        return _handed_over(site, verdicts, structure)
    if site.kind == OUTPUT_GRADIENT:
        return _behind(site, verdicts, structure)
    if site.kind == PARAMETER_GRADIENT:
        return _user(site, structure)
    words = {INPUT_GRADIENT: "the gradient that comes in agrees, the one for its input does not"}
    return site.module, words.get(site.kind, f"its {site.name} differs after the optimizer's step"), ()


def _handed_over(
    site: Site, verdicts: Mapping[Site, str], structure: Structure
) -> tuple[str, str, tuple[str, ...]]:
    """Find who computed what a module takes: one whose output is not seen, or the forward around it."""
    name = f"{site.module}({site.name})"
    source = structure.sources.get(site)
    if source is not None and verdicts.get(source) == NOT_COMPARED:
        return source.module, f"what it returned is not seen itself, but differs where {name} takes it", ()
    caller = _caller(site, structure)
    return caller, f"what it hands to {name} differs, though what its parts returned agrees", ()


def _behind(
    site: Site, verdicts: Mapping[Site, str], structure: Structure
) -> tuple[str, str, tuple[str, ...]]:
    """Find who computed the gradient of something returned: a reader of it that is not seen, or the forward around."""
    returned = [_as(site, OUTPUT)]
    while returned[-1] in structure.returned_by:
        returned.append(structure.returned_by[returned[-1]])
    handing_on = {(one.step, one.module, one.call) for one in returned}
    readers = [
        taken
        for taken, source in structure.sources.items()
        if source in returned and (taken.step, taken.module, taken.call) not in handing_on
    ]
    user = next((one for one in returned if one in structure.own_use), None)
    if user is not None and not structure.own_use[user]:
        readers = [one for one in readers if not user.module or one.module.startswith(f"{user.module}.")]
    unseen = [one for one in readers if verdicts.get(_as(one, INPUT_GRADIENT), NOT_COMPARED) == NOT_COMPARED]
    unseen = _innermost(unseen, structure)
    caller = _caller(returned[-1], structure)
    what = f"the gradient for what {site.module or 'the model'} returned differs"
    if unseen:
        names = tuple(dict.fromkeys(one.module for one in unseen))
        return names[0], f"{what}, and this takes it", (*names[1:], caller)
    if user is not None:
        itself = f"{user.module or 'the model'} itself"
        if structure.own_use[user]:
            return user.module, f"{what}, and {itself} uses that, too", (caller,)
        return user.module, f"{what}, and only {itself} uses that", ()
    return caller, f"{what}, though the gradients that its parts return agree", ()


def _user(site: Site, structure: Structure) -> tuple[str, str, tuple[str, ...]]:
    """Name who has used a parameter: of modules that share it, those that were called."""
    what = f"the gradient of its {site.name} differs"
    called = {call[0] for step, call in structure.callers if step == site.step}
    users = [path for path in structure.sharing.get((site.module, site.name), ()) if path in called]
    if not users:
        return site.module, what, ()
    if len(users) == 1:
        return users[0], what, ()
    return users[0], f"{what}, a sum over {len(users)} modules that share it", tuple(users[1:])


def _innermost(sites: list[Site], structure: Structure) -> list[Site]:
    """Leave out those whose parts are among them: they hand over what these compute."""
    outer = {structure.callers.get((one.step, (one.module, one.call))) for one in sites}
    return [one for one in sites if (one.module, one.call) not in outer]


def _caller(site: Site, structure: Structure) -> str:
    caller = structure.callers.get((site.step, (site.module, site.call)))
    return caller[0] if caller else ""


def _unseen_before(site: Site, pairs: Sequence[TensorPair]) -> tuple[str, ...]:
    """Name the modules right before an output whose own outputs are not compared: they may be in the same operator."""
    names: dict[str, None] = {}
    seen: list[TensorPair] = []
    for pair in pairs:
        if pair.site == site:
            break
        seen.append(pair)
    for pair in reversed(seen):
        if pair.site.kind not in FORWARD:
            continue
        if pair.verdict != NOT_COMPARED:
            if pair.site.kind == OUTPUT:
                break
            continue
        if pair.site.kind == OUTPUT and pair.site.module != site.module:
            names[pair.site.module] = None
    return tuple(names)


def _as(site: Site, kind: str) -> Site:
    return Site(site.step, site.module, site.call, kind, site.name)


@dataclass
class Runs:
    """What the runs of a comparison gave."""

    eager: Run
    ort: Run
    drops: int  # calls of a dropout that were kept from dropping
    draws: bool  # whether the model draws random numbers although no dropout does
    again: Compared  # PyTorch's repetition
    ort_again: Compared
    plain: Compared  # the run without capture, held against the captured one
    plain_losses: tuple[float | None, ...]
    # Losses of PyTorch with dropout as it is, with the start's seed and with another one; empty if not asked for.
    seeds: tuple[tuple[float | None, ...], ...] = ()


def checklist(
    runs: Runs, bounds: Mapping[Site, tuple[float, float]], *, dropout: bool, steps: int
) -> tuple[ChecklistItem, ...]:
    """Answer the questions for these runs; `bounds` are floor and limit of each site."""
    return (
        _seeds(runs),
        ChecklistItem(
            "Same start and data?",
            DONE,
            "Both engines start from the same weights, optimizer, seeds and batches.",
        ),
        _dropout(runs, on=dropout),
        _repeats("PyTorch", runs.again),
        _repeats("ONNX Runtime", runs.ort_again),
        _rounding(bounds, steps),
        _capture(runs, bounds),
    )


def _seeds(runs: Runs) -> ChecklistItem:
    question = "What does another seed change?"
    if not runs.seeds:
        return ChecklistItem(question, NOT_DONE, "Not asked for.")
    ours, others = runs.seeds
    by_seed, by_engine = apart(ours, others), apart(runs.eager.losses, runs.ort.losses)
    if math.isnan(by_seed) or math.isnan(by_engine):
        return ChecklistItem(question, NOT_DONE, "The step has no finite loss to compare.")
    if by_seed == 0:
        return ChecklistItem(question, DONE, "Nothing: the losses of PyTorch are the same with another seed.")
    words = (
        f"With dropout as it is, another seed changes PyTorch's losses by up to {by_seed:.1e}; "
        f"the engines, without it, differ by {by_engine:.1e}."
    )
    return ChecklistItem(question, DONE, words)


def _dropout(runs: Runs, *, on: bool) -> ChecklistItem:
    question = "Is dropout off?"
    if on:
        return ChecklistItem(
            question, NOT_DONE, "It was left on: the engines draw different masks, which is no fault."
        )
    if runs.draws:
        return ChecklistItem(
            question,
            FOUND,
            "Yes, but the step draws random numbers even so: the model is random by design, and the engines may draw "
            "others. What two runs of one engine differ by is part of the floor.",
        )
    if runs.drops:
        return ChecklistItem(question, DONE, "Yes: for these runs every dropout lets everything pass.")
    return ChecklistItem(question, DONE, "Yes: nothing in the model drops anything.")


def _repeats(engine: str, again: Compared) -> ChecklistItem:
    question = f"Does {engine} repeat itself?"
    worst = max((one.relative for one in again.distances.values()), default=0.0)
    if worst == 0:
        return ChecklistItem(question, DONE, "Bit for bit, with deterministic kernels.")
    (site, _) = max(again.distances.items(), key=lambda item: item[1].relative)
    words = f"No: two runs differ by up to {worst:.1e}, in {site.module or 'the model'} ({site.kind}). In the floor."
    return ChecklistItem(question, FOUND, words)


def _rounding(bounds: Mapping[Site, tuple[float, float]], steps: int) -> ChecklistItem:
    question = "What does rounding alone change?"
    floors = [
        floor for site, (floor, _) in bounds.items() if site.step == steps and site.kind != UPDATED_PARAMETER
    ]
    if not floors:
        return ChecklistItem(question, NOT_DONE, "No tensor was seen.")
    middle = sorted(floors)[len(floors) // 2]
    return ChecklistItem(
        question,
        DONE,
        f"Moving what each module returns by some units of rounding moves tensors of step {steps} by "
        f"{middle:.1e} in the middle, {max(floors):.1e} at most.",
    )


def _capture(runs: Runs, bounds: Mapping[Site, tuple[float, float]]) -> ChecklistItem:
    question = "Does looking change the numbers?"
    worst = max((one.relative for one in runs.plain.distances.values()), default=0.0)
    if worst == 0 and list(runs.plain_losses) == list(runs.ort.losses):
        return ChecklistItem(
            question, DONE, "No: losses and parameters are bit for bit those of a run without capture."
        )
    words = (
        f"A little: without capture ONNX Runtime fuses more, and its losses differ by "
        f"{apart(runs.ort.losses, runs.plain_losses):.1e}, its parameters by up to {worst:.1e}."
    )
    limits = {site: limit for site, (_, limit) in bounds.items()}
    over = [site for site, one in runs.plain.distances.items() if one.relative > limits.get(site, math.inf)]
    if over:
        words = (
            f"Yes: without capture {over[0].module or 'the model'}.{over[0].name} differs by "
            f"{runs.plain.distances[over[0]].relative:.1e} after step {over[0].step}, more than rounding explains. "
            "A fusion that capture prevents is at fault; lab.graph('execution') has it."
        )
    return ChecklistItem(question, FOUND if over else DONE, words)


def apart(ours: Sequence[float | None], theirs: Sequence[float | None]) -> float:
    """Return the largest relative difference of two losses of the same step; nan if there are none, or one is nan."""
    differences = [
        abs(one - other) / max(abs(one), abs(other)) if one != other else 0.0
        for one, other in zip(ours, theirs, strict=False)
        if one is not None and other is not None
    ]
    return math.nan if not differences or any(map(math.isnan, differences)) else max(differences)
