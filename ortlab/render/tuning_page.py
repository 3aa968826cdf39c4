"""The page of tuning results: which implementation was chosen for which shapes, and what the choices hold for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ortlab import units
from ortlab.render.page import Block, Column, Mark, Note, Page, Table, row

if TYPE_CHECKING:
    from ortlab.records.tuning_results import TuningResults

ROWS_SHOWN: Final = 200

_COLUMNS: Final = (
    Column("operator", whole=True),
    Column("sizes", whole=True),
    Column("implementation", numeric=True, meaning="number of the fastest; 0 is taken without tuning"),
    Column("provider"),
)


def tuning_page(found: TuningResults) -> Page:
    """List the choices; ORT keeps no times of them."""
    shown = found.operators[:ROWS_SHOWN]
    hidden = len(found.operators) - len(shown)
    rows = tuple(row(one.operator, one.shape, str(one.choice), one.provider) for one in shown)
    blocks: list[Block] = []
    if rows:
        left_out = f"{units.count(hidden)} more: `table()` has them." if hidden else ""
        blocks.append(Table("", _COLUMNS, rows, left_out))
    else:
        blocks.append(Note("Nothing was tuned.", Mark.QUIET))
    for provider, facts in found.validators.items():
        words = ", ".join(f"{name} {value}" for name, value in facts.items())
        blocks.append(Note(f"{provider} takes them where these are the same: {words}.", Mark.QUIET))
    return Page(f"Tuning results of {found.path}", tuple(blocks))
