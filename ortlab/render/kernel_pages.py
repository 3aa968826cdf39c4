"""The pages of kernels: the sub-graphs that Triton runs, one of them with its code, and what ORT has tuned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ortlab import units
from ortlab.errors import BuildError
from ortlab.render.graph_pages import graph_page, with_picture
from ortlab.render.page import Block, Cell, Code, Column, Mark, Note, Page, Table, left_out, row

if TYPE_CHECKING:
    from ortlab.graphs.triton_kernels import TritonKernel, TritonKernels
    from ortlab.records.tuning_results import TuningResults

_COLUMNS: Final = (
    Column("sub-graph", numeric=True),
    Column("operators", whole=True),
    Column(
        "run by", meaning="nodes of the lab's graph that run it; none if it is of another graph", whole=True
    ),
    Column("kernels", numeric=True, meaning="Triton functions in its newest code"),
    Column("versions of code", numeric=True, meaning="one for each choice of sizes, and for each process"),
    Column("key", meaning="ORT's hash of the sub-graph, as in the names of the files"),
)


def kernels_page(found: TritonKernels) -> Page:
    """List the sub-graphs."""
    rows = tuple(_row(one) for one in found)
    note = (
        "%ort_triton_kernels N, or ortlab.show_graph(kernels.kernel(N)), draws one with its code. ONNX Runtime deletes "
        "nothing "
        "in the folder: what no node runs is of another graph, or of an earlier one."
    )
    return Page(
        f"Sub-graphs that Triton runs, in {found.folder}", (Table("", _COLUMNS, rows), Note(note, Mark.QUIET))
    )


def kernel_page(kernel: TritonKernel) -> Page:
    """Show one: what is in it, who runs it, and its code."""
    blocks: list[Block] = [Note(_run_by(kernel))]
    for form, words in kernel.forms.items():
        page = with_picture(kernel.graph(form), graph_page(kernel.graph(form)))
        blocks += [Note(f"{form.capitalize()}: {words}."), *page.blocks]
    if kernel.source:
        blocks.append(Code(code_title(kernel), kernel.source))
    else:
        blocks.append(Note("No code was generated for it.", Mark.WARN))
    return Page(f"Sub-graph {kernel.number} that Triton runs: {_operators(kernel)}", tuple(blocks))


def code_title(kernel: TritonKernel) -> str:
    """Say what the code beside a sub-graph is; empty where there is none."""
    if not kernel.sources:
        return ""
    older = len(kernel.sources) - 1
    more = f", the newest of {units.count(older + 1)}" if older else ""
    return f"{kernel.sources[-1].name}: {units.many(kernel.functions, 'Triton kernel')}{more}"


def _row(kernel: TritonKernel) -> tuple[Cell, ...]:
    return row(
        units.count(kernel.number),
        _operators(kernel),
        ", ".join(kernel.nodes) if kernel.nodes else Cell("none of this lab's graph", Mark.QUIET),
        _functions(kernel),
        units.count(len(kernel.sources)),
        str(kernel.key),
    )


def _functions(kernel: TritonKernel) -> str | Cell:
    if not kernel.sources:
        return Cell("none generated", Mark.WARN)
    try:
        return units.count(len(kernel.functions))
    except BuildError:
        return Cell("not readable", Mark.WARN)


def _operators(kernel: TritonKernel) -> str:
    try:
        nodes = kernel.graph("original").model.graph.node
    except BuildError as error:  # one damaged file does not hide the others
        return f"not known: {error.what}"
    return ", ".join(node.op_type for node in nodes)


def _run_by(kernel: TritonKernel) -> str:
    if not kernel.nodes:
        return f"No node of the lab's graph runs it. Key {kernel.key}."
    return f"Run by {', '.join(kernel.nodes)}. Key {kernel.key}."


# ---- what ORT has tuned ---------------------------------------------------------------------------------------------


ROWS_SHOWN: Final = 200
_TUNED: Final = (
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
        rest = left_out(hidden, "more: `table()` has them.")
        blocks.append(Table("", _TUNED, rows, rest))
    else:
        blocks.append(Note("Nothing was tuned.", Mark.QUIET))
    for provider, facts in found.validators.items():
        words = ", ".join(f"{name} {value}" for name, value in facts.items())
        blocks.append(Note(f"{provider} takes them where these are the same: {words}.", Mark.QUIET))
    return Page(f"Tuning results of {found.path}", tuple(blocks))
