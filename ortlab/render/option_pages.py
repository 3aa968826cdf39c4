"""Pages of options: all switches with their values, what differs between two records, and a list of some."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ortlab.options.options import Options, declaration, switches
from ortlab.options.switches import Effect, Group, Switch, Value
from ortlab.render.page import Block, Cell, Column, Mark, Note, Page, Table, row

if TYPE_CHECKING:
    from ortlab.options.catalogue import OptionList

EFFECT_WORDS = {
    Effect.WRAP: "re-export",
    Effect.EXPORT: "re-export",
    Effect.GRAPH: "new graph",
    Effect.SESSION: "new session",
    Effect.STEP: "next step",
}
"""What a change of a switch costs before it acts, in words."""

_NAME = Column("switch", meaning="field of ortlab.Options")
_COST = Column("a change takes", meaning="what is redone before a changed value acts")


def options_page(options: Options) -> Page:
    """List every switch by group; values that differ from the default are marked."""
    defaults = Options()
    changed = options.changed(defaults)
    columns = (_NAME, Column("value"), _COST)
    rows = {group: tuple(_row(one, options, defaults) for one in options_in(group)) for group in Group}
    tables = [Table(group.value.capitalize(), columns, rows[group]) for group in Group]
    summary = f"Changed: {', '.join(changed)}." if changed else "All switches are at their defaults."
    return Page("Options", (Note(summary, Mark.PLAIN if changed else Mark.QUIET), *tables))


def difference_page(before: Options, after: Options, names: tuple[str, str] = ("before", "after")) -> Page:
    """List the switches whose values differ between two records, and what going from one to the other costs."""
    changed = after.changed(before)
    if not changed:
        return Page("Options", (Note("No switch differs.", Mark.QUIET),))
    rows = tuple(
        row(
            name,
            value_text(getattr(before, name)),
            value_text(getattr(after, name)),
            EFFECT_WORDS[declaration(name).effect],
        )
        for name in changed
    )
    stage = after.stage_of_change(before)
    cost = "Nothing has to be rebuilt." if stage is None else f"Going over takes: {EFFECT_WORDS[stage]}."
    table = Table("Switches that differ", (_NAME, Column(names[0]), Column(names[1]), _COST), rows)
    return Page("Options", (table, Note(cost)))


def options_in(group: Group) -> tuple[Switch, ...]:
    """Return the switches of one group, in the order of declaration."""
    return tuple(one for one in switches() if one.group is group)


def value_text(value: Value) -> str:
    """Write a value as a user says it: on, off, 17, INFO, none."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ", ".join(value) or "none"
    return str(value) if value != "" else "none"


def _row(one: Switch, options: Options, defaults: Options) -> tuple[Cell, ...]:
    value, default = getattr(options, one.name), getattr(defaults, one.name)
    shown = Cell(value_text(value))
    if value != default:
        shown = Cell(f"{value_text(value)} (default {value_text(default)})", Mark.WARN)
    return row(one.name, shown, EFFECT_WORDS[one.effect])


# ---- a list of some -------------------------------------------------------------------------------------------------


_LISTED = (Column("option"), Column("value"), Column("choices"), Column("what it does"))


def option_list_page(chosen: OptionList) -> Page:
    """List the switches with their help; one that cannot act here is followed by the reason."""
    rows = []
    reasons: list[Block] = []
    for one in chosen.switches:
        value = getattr(chosen.options, one.name)
        shown = value_text(value)
        if value != one.default:
            shown += f" (default {value_text(one.default)})"
        missing = chosen.missing(one.name)
        mark = Mark.QUIET if missing else Mark.WARN if value != one.default else Mark.PLAIN
        choices = "on, off" if one.type is bool else ", ".join(map(str, one.choices))
        rows.append(row(one.name, Cell(shown, mark), choices, one.help))
        if missing:
            reasons.append(Note(missing, Mark.QUIET))
    return Page("Options", (Table("", _LISTED, tuple(rows)), *reasons))
