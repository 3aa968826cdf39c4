"""The saved activations: what the forward of a training graph keeps for its backward, one row for each buffer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal
from weakref import ref

from ortlab.errors import OptionError
from ortlab.memory.symbolic_sizes import Shape, bytes_at, bytes_formula, other_symbols, summed
from ortlab.shown import Shown

if TYPE_CHECKING:
    import pandas as pd

    from ortlab.lab.lab import Lab


@dataclass(frozen=True)
class SavedActivation:
    """One buffer that the forward fills and that is still there when the backward begins."""

    value: str  #: Name in the execution graph of the result that fills the buffer
    #: Name and operator of the node that computes it, and which of its outputs it is, from 0. Operators outside ONNX
    #: carry their domain; a call of torch carries its name.
    node: str
    operator: str
    output: int
    module: str  #: Path in the model of the module that computes it; empty for the model's own forward
    source: str  #: File and line where the forward of that module begins; empty where it is torch's own
    #: Path of the layer that the module belongs to, as in "transformer.h.0"; empty outside the layers.
    layer: str
    #: Sizes; a symbolic one is an expression. None where it is not known.
    shape: Shape | None
    dtype: str  #: ONNX element type, lower case - "float", "bool", ...
    element_bytes: int  #: Bytes of one element
    #: What it takes at the present sizes, in bytes. None where it is not known.
    bytes: int | None
    #: Names of the results that read the same buffer under another shape (Reshape, Squeeze, Identity and the like) and
    #: that the backward reads: they take nothing on their own.
    views: tuple[str, ...] = ()
    kept_by: tuple[str, ...] = ()  #: Names of the backward nodes that read it, or one of its views
    #: Whether the model returns it, or a view of it, so that it is there even if no backward node reads it.
    returned: bool = False
    #: Configurations of the recompute plans that remove it, each applied alone; None where nobody has looked.
    plans: tuple[str, ...] | None = None
    measured: bool = False  #: Whether the bytes are those of a run, because the shape is not known before it
    position: int = 0  #: Place of the node in the order of execution, from 0
    part: str = ""  #: Path of the wrapped part of the model; empty where the whole model is wrapped

    @property
    def bytes_symbolic(self) -> str:
        """What it takes in bytes, in terms of the input's dimensions; empty where that is not known."""
        return "" if self.shape is None else bytes_formula(self.shape, self.element_bytes)


@dataclass(frozen=True)
class KeptInput:
    """An input of the model that the backward reads; it is the caller's tensor, so keeping it takes nothing more."""

    name: str  #: Name of the graph's input
    #: As for `SavedActivation`.
    shape: Shape | None
    dtype: str
    element_bytes: int
    bytes: int | None
    kept_by: tuple[str, ...]  #: Names of the backward nodes that read it, or a view of it
    part: str = ""  #: Path of the wrapped part of the model


@dataclass(frozen=True)
class ActivationGroup:
    """Activations of one layer, operator or module."""

    name: str  #: Of the layer, operator or module
    count: int  #: Activations
    bytes: int  #: What they take together, in bytes; those of unknown size left out
    unknown: int = 0  #: Activations of unknown size


@dataclass(frozen=True)
class PlanEffect:
    """What one recompute plan, applied alone, does to what is kept; worked out from the graph with it, not measured."""

    config: str  #: The plan - "Gelu+:1:-1"
    removed: tuple[SavedActivation, ...]  #: Activations that are no longer kept
    added: tuple[SavedActivation, ...]  #: Activations that are kept instead - what the recomputed nodes read
    parts: tuple[str, ...] = ()  #: Wrapped parts of the model that have it

    @property
    def removed_bytes(self) -> int | None:
        """What it removes, in bytes; None where the size of one of them is not known."""
        return summed(row.bytes for row in self.removed)

    @property
    def added_bytes(self) -> int | None:
        """What is kept instead, in bytes; None where the size of one of them is not known."""
        return summed(row.bytes for row in self.added)

    @property
    def net_bytes(self) -> int | None:
        """By how much less is kept, in bytes; negative where it is more, None where that is not known."""
        removed, added = self.removed_bytes, self.added_bytes
        return None if removed is None or added is None else removed - added


def layer_of(path: str) -> str:
    """Return the path of the layer that a module is in: the first of its parents that is one of a numbered list.

    Empty for a module that is in none.
    """
    names = path.split(".")
    for count, name in enumerate(names, start=1):
        if name.isdigit():
            return ".".join(names[:count])
    return ""


def in_any_layer(path: str) -> str:
    """Return the path of a module with a star for its layer's number: "transformer.h.*.mlp.act"."""
    layer = layer_of(path)
    if not layer:
        return path
    container, dot, _ = layer.rpartition(".")
    return f"{container}{dot}*" + path.removeprefix(layer)


def largest_first(rows: Iterable[SavedActivation]) -> tuple[SavedActivation, ...]:
    """Order rows: those of unknown size first, since they may be large, then the largest."""
    return tuple(
        sorted(
            rows,
            key=lambda row: (row.bytes is not None, -(row.bytes or 0), row.part, row.position, row.output),
        )
    )


Kind = Literal["layer", "operator", "module"]
"""What activations are put together by."""

KINDS: Final[tuple[Kind, ...]] = ("layer", "operator", "module")

OUTSIDE: Final = "outside the layers"
"""Name of the group of what belongs to no layer: embeddings, head, loss."""


class ActivationsSource:
    """The lab that saved activations were read from, which this does not keep alive, and the path of a part."""

    def __init__(self, lab: Lab | None = None, part: str | None = None) -> None:
        self._lab = None if lab is None else ref(lab)
        self.part = part

    @property
    def lab(self) -> Lab | None:
        """The lab; None if it is gone."""
        return None if self._lab is None else self._lab()

    def __reduce__(self) -> tuple[type[ActivationsSource], tuple[()]]:
        """Let saved activations go to another process, or to a file: its lab stays here."""
        return ActivationsSource, ()


@dataclass(frozen=True, repr=False)
class SavedActivations(Shown):
    """What is kept for backward, the largest first.

    The rows are buffers, so their bytes add up: two results that share one are one row. Parameters, buffers of the
    model and constants are not in it; nor are the inputs, which the caller holds.
    """

    rows: tuple[SavedActivation, ...]  #: The activations
    #: Sizes of the input's dimensions that the bytes are for.
    symbols: Mapping[str, int] = field(default_factory=dict)
    #: Those that ONNX Runtime's last call had otherwise, since a graph serves batches of many sizes; empty where none.
    last_batch: Mapping[str, int] = field(default_factory=dict, kw_only=True)
    inputs: tuple[KeptInput, ...] = ()  #: Inputs that the backward reads
    applied: tuple[str, ...] = ()  #: Recompute plans that are applied in the graph that it was read from
    #: Wrapped parts of the model that have no graph yet, because they were not called.
    missing: tuple[str, ...] = ()
    #: What each recompute plan does to it, applied alone to the graph without plans; empty where nobody has looked.
    effects: tuple[PlanEffect, ...] = ()
    #: What its page shows: the groups of one kind; everything where it is empty.
    shown_by: Kind | Literal[""] = ""
    #: The lab that it was read from, as long as that lives; not written to JSON.
    source: ActivationsSource = field(default_factory=ActivationsSource, compare=False)
    #: How its graph came about, where it was built for this; empty where it was there.
    note: str = field(default="", compare=False)

    @property
    def total_bytes(self) -> int:
        """Sum of the rows, in bytes; rows of unknown size are left out, see `unknown`."""
        return sum(map(_bytes, self.rows))

    @property
    def unknown(self) -> tuple[SavedActivation, ...]:
        """Activations whose size is not known; the total is a lower bound if there are any."""
        return tuple(row for row in self.rows if row.bytes is None)

    @property
    def returned_bytes(self) -> int:
        """Of the total, what is there only because the model returns it: no backward node reads it. In bytes."""
        return sum(_bytes(row) for row in self.rows if row.returned and not row.kept_by)

    @property
    def plans_known(self) -> bool:
        """Whether the rows say which plans remove them."""
        return all(row.plans is not None for row in self.rows)

    def share(self, row: SavedActivation | ActivationGroup) -> float | None:
        """Return what part of the total a row or group is, from 0 to 1; None where its size is not known."""
        if row.bytes is None:
            return None
        return row.bytes / self.total_bytes if self.total_bytes else 0.0

    def by(self, kind: Kind) -> tuple[ActivationGroup, ...]:
        """Put the rows together; the bytes of the groups add up to the total.

        Parameters
        ----------
        kind
            "layer" (in the model's order, what is outside them last), "operator" or "module" (the largest first).

        Raises
        ------
        OptionError
            If it is something else.
        """
        _check(kind)
        groups: dict[str, list[SavedActivation]] = {}
        for row in self.rows:
            groups.setdefault(self.group_of(row, kind), []).append(row)
        made = [
            ActivationGroup(name, len(rows), sum(map(_bytes, rows)), sum(row.bytes is None for row in rows))
            for name, rows in groups.items()
        ]
        if kind == "layer":
            # Some small nodes of a layer run early; where its largest activation stands is where it belongs.
            place = {name: (name == OUTSIDE, max(rows, key=_bytes).position) for name, rows in groups.items()}
            return tuple(sorted(made, key=lambda group: place[group.name]))
        return tuple(sorted(made, key=lambda group: (-group.bytes, group.name)))

    def group_of(self, row: SavedActivation, kind: Kind) -> str:
        """Return the name of the group that a row is in; see `by`."""
        _check(kind)
        return {
            "operator": row.operator,
            "layer": row.layer or OUTSIDE,
            "module": row.module or "the model itself",
        }[kind]

    def alike(self) -> tuple[tuple[SavedActivation, ...], ...]:
        """Put together what is the same in all layers: operator, place in the layer, shape and plans.

        Returns
        -------
        tuple
            Activations that are alike, in the model's order; those that take most together first, and before them
            those of unknown size.
        """
        found: dict[object, list[SavedActivation]] = {}
        for row in sorted(self.rows, key=lambda row: row.position):
            key = (
                in_any_layer(row.module),
                row.operator,
                row.output,
                row.shape,
                row.dtype,
                row.returned,
                row.plans,
                row.bytes,
            )
            found.setdefault(key, []).append(row)
        ordered = sorted(
            found.values(), key=lambda rows: (rows[0].bytes is not None, -sum(map(_bytes, rows)))
        )
        return tuple(map(tuple, ordered))

    def shown(self, kind: Kind | Literal[""]) -> SavedActivations:
        """Return the same with a page that shows the groups of one kind only, or everything.

        Raises
        ------
        OptionError
            If there is no such kind.
        """
        if kind:
            _check(kind)
        return replace(self, shown_by=kind)

    def at(self, *, batch: int | None = None, sequence: int | None = None, **sizes: int) -> SavedActivations:
        """Evaluate for another batch; nothing is built.

        Parameters
        ----------
        batch
            First dimension of every input.
        sequence
            Second dimension of every input.
        **sizes
            Symbols by name, as in `activations.at(input_ids_dim1=512)`.

        Returns
        -------
        SavedActivations
            The rows at the new sizes. One whose bytes are those of a run, or depend on how many labels of a batch
            count, is of unknown size then.

        Raises
        ------
        OptionError
            If there is no such symbol, a size is no whole number from 1, or `batch` could mean several.
        """
        symbols, _ = other_symbols(
            self.symbols, self.symbols, {}, batch=batch, sequence=sequence, label_density=None, sizes=sizes
        )
        if symbols == dict(self.symbols):
            return self
        values: dict[str, dict[str, int]] = {}

        def bytes_of(one: SavedActivation | KeptInput) -> int | None:
            if one.part not in values:
                values[one.part] = _of_part(one.part, symbols)
            return None if one.shape is None else bytes_at(one.shape, one.element_bytes, values[one.part])

        def evaluated(rows: Iterable[SavedActivation]) -> tuple[SavedActivation, ...]:
            return tuple(replace(row, bytes=bytes_of(row), measured=False) for row in rows)

        return replace(
            self,
            rows=largest_first(evaluated(self.rows)),
            symbols=symbols,
            last_batch={},
            inputs=tuple(replace(one, bytes=bytes_of(one)) for one in self.inputs),
            effects=tuple(
                replace(one, removed=evaluated(one.removed), added=evaluated(one.added))
                for one in self.effects
            ),
        )

    def table(self) -> pd.DataFrame:
        """One row per activation, the largest first; sizes in bytes."""
        import pandas as pd

        return pd.DataFrame(
            [
                {
                    "activation": row.value,
                    "operator": row.operator,
                    "layer": row.layer,
                    "module": row.module,
                    "source": row.source,
                    "shape": None if row.shape is None else list(row.shape),
                    "dtype": row.dtype,
                    "bytes": row.bytes,
                    "share": self.share(row),
                    "formula": row.bytes_symbolic,
                    "read by": list(row.kept_by),
                    "returned": row.returned,
                    **({} if row.plans is None else {"plans": list(row.plans)}),
                    **({"part": row.part} if row.part else {}),
                }
                for row in self.rows
            ]
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types, with the total and the groups that the rows add up to."""
        rows = [{**asdict(row), "bytes_symbolic": row.bytes_symbolic} for row in self.rows]
        groups = {kind: [asdict(group) for group in self.by(kind)] for kind in KINDS}
        fields = asdict(self)
        fields.pop("source")
        return {**fields, "rows": rows, "total_bytes": self.total_bytes, "groups": groups}


def _check(kind: str) -> None:
    if kind not in KINDS:
        raise OptionError(
            f"Activations cannot be put together by {kind!r}.", fix=f"Choose one of {', '.join(KINDS)}."
        )


def merged(by_part: Mapping[str, SavedActivations], missing: tuple[str, ...] = ()) -> SavedActivations:
    """Put the saved activations of a model's parts, by path, together; `missing` names those without a graph yet."""
    symbols: dict[str, int] = {}
    for path, activations in by_part.items():
        for name, size in activations.symbols.items():
            alike = all(other.symbols.get(name, size) == size for other in by_part.values())
            symbols[name if alike else f"{path}{_OF_PART}{name}"] = size
    last = {
        name if name in symbols else f"{path}{_OF_PART}{name}": size
        for path, activations in by_part.items()
        for name, size in activations.last_batch.items()
    }
    return SavedActivations(
        largest_first(row for one in by_part.values() for row in one.rows),
        symbols,
        tuple(given for one in by_part.values() for given in one.inputs),
        tuple(dict.fromkeys(config for one in by_part.values() for config in one.applied)),
        missing,
        _together(effect for one in by_part.values() for effect in one.effects),
        last_batch=last,
    )


def _together(effects: Iterable[PlanEffect]) -> tuple[PlanEffect, ...]:
    """Put the effects of a plan on several parts together."""
    found: dict[str, PlanEffect] = {}
    for one in effects:
        before = found.get(one.config, PlanEffect(one.config, (), ()))
        found[one.config] = PlanEffect(
            one.config, before.removed + one.removed, before.added + one.added, before.parts + one.parts
        )
    return tuple(found.values())


def _bytes(row: SavedActivation) -> int:
    return row.bytes or 0


_OF_PART: Final = ": "
"""Between the path of a part and a symbol that has another value in another part."""


def _of_part(part: str, symbols: Mapping[str, int]) -> dict[str, int]:
    begin = f"{part}{_OF_PART}"
    own = {name.removeprefix(begin): size for name, size in symbols.items() if name.startswith(begin)}
    return {**symbols, **own}


_EVERYWHERE = -1


def kept_with(
    activations: SavedActivations, plans: Sequence[str], places: Mapping[str, int]
) -> SavedActivations:
    """Return what is kept with these plans; an estimate, since plans may act on each other.

    `activations` knows the effects of all plans. `places` has, by plan such as "Gelu+:1:-1", in how many places of the
    graph it can act: a plan in some of them removes the first ones of what it removes in all.
    """
    effects = {effect.config: effect for effect in activations.effects}
    kept = {_key(row): row for row in activations.rows}
    for plan in activations.applied:  # back to the graph without plans, as the effects are told for it
        effect = effects.get(_everywhere(plan))
        if effect is not None:
            kept.update({_key(row): row for row in _first(effect.removed, plan, places)})
    added: dict[tuple[str, str], SavedActivation] = {}
    for config in (part for plan in plans for part in plan.split(",")):
        effect = effects.get(_everywhere(config))
        if effect is None:
            continue
        for row in _first(effect.removed, config, places):
            kept.pop(_key(row), None)
            added.pop(_key(row), None)
        added.update({_key(row): row for row in _first(_new(effect, kept), config, places)})
    return replace(activations, rows=tuple({**added, **kept}.values()), applied=tuple(plans))


def _new(effect: PlanEffect, kept: Mapping[tuple[str, str], SavedActivation]) -> list[SavedActivation]:
    return [row for row in effect.added if _key(row) not in kept]


def _first(rows: Iterable[SavedActivation], plan: str, places: Mapping[str, int]) -> list[SavedActivation]:
    """Return what a plan acts on in its first places, in the order of the graph."""
    ordered = sorted(rows, key=lambda row: row.position)
    count, every = int(plan.rpartition(":")[2]), places.get(_everywhere(plan), 0)
    if count == _EVERYWHERE or not every:
        return ordered
    return ordered[: round(len(ordered) * min(count / every, 1.0))]


def _everywhere(plan: str) -> str:
    return f"{plan.rpartition(':')[0]}:{_EVERYWHERE}"


def _key(row: SavedActivation) -> tuple[str, str]:
    return row.part, row.value
