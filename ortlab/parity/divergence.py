"""From the first tensor that differs to the module whose computation differs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from ortlab.parity.pairs import (
    BACKWARD,
    DIFFERS,
    FORWARD,
    INPUT,
    INPUT_GRADIENT,
    NOT_COMPARED,
    OUTPUT,
    OUTPUT_GRADIENT,
    PARAMETER_GRADIENT,
    UPDATED_PARAMETER,
    Site,
    TensorPair,
)
from ortlab.parity.record import Divergence

if TYPE_CHECKING:
    from collections.abc import Callable

    from ortlab.parity.structure import Structure


def find(
    pairs: Sequence[TensorPair], structure: Structure, describe: Callable[[str], tuple[str, str]]
) -> tuple[Divergence | None, Divergence | None, Divergence | None]:
    """Return the first divergence of the forward, of the backward and of the update.

    A module whose inputs agree and whose output differs is at fault itself. An input that differs, though no module has
    returned it so, was computed by the caller, between the calls. In the backward it is the other way round: a gradient
    goes into a module right and comes out wrong.

    The pairs are in the order of the reference. `describe` returns class and source line of a module, by its path.
    """
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
