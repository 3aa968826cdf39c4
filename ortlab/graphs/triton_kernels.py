"""What ORT's Triton fusion wrote for reading: each sub-graph that it fused, and the kernels it generated.

With ``triton_debug`` on, 1.19.2 writes three files for each sub-graph into the folder ``triton_debug`` below the
present one (``ort_triton/triton_op_executor.py``, `_gen_module`): ``KEY_original.onnx`` as it was cut out of the graph,
``KEY_processed.onnx`` with its operators taken apart and the sizes that the code is for, and ``func_NAME_KEY.py``. KEY
is a hash of the sub-graph, the same in every process; NAME is drawn anew whenever the code is generated, for other
sizes or in another process, so that one sub-graph may have several. Nothing is ever deleted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ortlab.errors import BuildError, OptionError
from ortlab.graphs.onnx_files import open_graph
from ortlab.shown import Shown

if TYPE_CHECKING:
    import pandas as pd
    from onnx import ModelProto

    from ortlab.graphs.stages import Graph

FOLDER: Final = "triton_debug"
"""Where ORT writes, below the present folder."""

FORMS: Final = {
    "original": "as ONNX Runtime cut it out of the graph",
    "processed": "taken apart, with the sizes that the code is for",
}
"""The two forms in which a sub-graph is written."""

_GRAPH: Final = re.compile(r"(?P<key>-?\d+)_(?P<form>original|processed)\.onnx")
_SOURCE: Final = re.compile(r"func_[0-9a-f]{8}_(?P<key>-?\d+)\.py")
_FUNCTION: Final = re.compile(r"^@triton\.jit\s*^def (\w+)\(", re.MULTILINE)
_OPERATOR: Final = "TritonOp"


@dataclass(frozen=True, repr=False)
class TritonKernel(Shown):
    """One fused sub-graph and the code that was generated for it."""

    number: int  #: Of the sub-graph in its list, from 1
    key: int  #: ORT's hash of the sub-graph; the attribute ``onnx_key`` of its node
    #: The files of its forms, by "original" and "processed"; both are there, unless somebody has deleted one.
    graphs: Mapping[str, Path]
    sources: tuple[Path, ...]  #: Generated files, the newest last; none if the code could not be generated
    #: Names of the nodes of the lab's graph that run it; empty if they are not known.
    nodes: tuple[str, ...] = ()

    def graph(self, form: str = "original") -> Graph:
        """Open the sub-graph.

        Parameters
        ----------
        form
            "original", as it was cut out of the graph; or "processed", with its operators taken apart into those that
            there is code for, and the sizes that the newest code was generated for.

        Raises
        ------
        OptionError
            If there is no such form.
        BuildError
            If the file is not there or no ONNX.
        """
        if form not in FORMS:
            raise OptionError(f"A sub-graph has no form {form!r}.", fix=f"Forms: {', '.join(FORMS)}.")
        if form not in self.graphs:
            raise BuildError(
                f"The {form} form of sub-graph {self.key} is not there.",
                why="ONNX Runtime writes both, so it was deleted, or not copied with the others.",
                fix="Delete the folder and train again with triton_debug=True.",
            )
        return replace(open_graph(self.graphs[form]), stage=form)

    @property
    def forms(self) -> dict[str, str]:
        """The forms that are there, and what each is, in words."""
        return {form: words for form, words in FORMS.items() if form in self.graphs}

    @cached_property
    def source(self) -> str:
        """The newest code; empty if there is none.

        Raises
        ------
        BuildError
            If the file cannot be read.
        """
        if not self.sources:
            return ""
        try:
            return self.sources[-1].read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BuildError(
                f"{self.sources[-1]} cannot be read.",
                why=f"{error}.",
                fix="Make it readable, or copy it again.",
            ) from error

    @property
    def operators(self) -> dict[str, int] | None:
        """Count of the sub-graph's nodes by operator, as it was cut out; None if its file is missing or damaged."""
        try:
            return self.graph("original").operators
        except BuildError:
            return None

    @property
    def functions(self) -> tuple[str, ...]:
        """Names of the Triton kernels in the newest code, in their order."""
        return tuple(_FUNCTION.findall(self.source))


@dataclass(frozen=True, repr=False)
class TritonKernels(Shown):
    """The sub-graphs in a folder, those of the lab's graph first, in its order."""

    folder: Path  #: The folder
    kernels: tuple[TritonKernel, ...]  #: One for each sub-graph

    def __len__(self) -> int:
        return len(self.kernels)

    def __iter__(self) -> Iterator[TritonKernel]:
        return iter(self.kernels)

    def kernel(self, number: int) -> TritonKernel:
        """Return a sub-graph by its number in the list.

        Raises
        ------
        OptionError
            If there is none of that number.
        """
        for one in self.kernels:
            if one.number == number:
                return one
        raise OptionError(
            f"There is no sub-graph {number} in {self.folder}.", fix=f"They are 1 to {len(self.kernels)}."
        )

    def of_graphs(self, nodes: Mapping[int, tuple[str, ...]]) -> TritonKernels:
        """Say which nodes run which sub-graph, and put those first that one runs.

        Parameters
        ----------
        nodes
            By key: names of the nodes of a graph; `fused_nodes` gives them.
        """
        order = {key: place for place, key in enumerate(nodes)}
        known = sorted(self.kernels, key=lambda one: (order.get(one.key, len(order)), one.key))
        return TritonKernels(
            self.folder,
            tuple(
                replace(one, number=number, nodes=nodes.get(one.key, ()))
                for number, one in enumerate(known, start=1)
            ),
        )

    def table(self) -> pd.DataFrame:
        """One row for each sub-graph: its operators and nodes, the kernels of its newest code, and the files."""
        import pandas as pd

        columns = ["number", "key", "operators", "nodes", "kernels", "source"]
        return pd.DataFrame(
            [
                {
                    "number": one.number,
                    "key": one.key,
                    "operators": one.operators,
                    "nodes": list(one.nodes),
                    "kernels": list(one.functions),
                    "source": str(one.sources[-1]) if one.sources else "",
                }
                for one in self.kernels
            ],
            columns=columns,
        )


def read_triton_kernels(folder: str | Path = FOLDER) -> TritonKernels:
    """List what ORT's Triton fusion wrote into a folder, on this machine or another; no Triton is needed for that.

    Parameters
    ----------
    folder
        As ORT has named it.

    Returns
    -------
    TritonKernels
        Its sub-graphs, by key; other files are left alone.

    Raises
    ------
    BuildError
        If there is no such folder, or nothing in it is of ORT's Triton fusion.
    """
    place = Path(folder)
    graphs: dict[int, dict[str, Path]] = {}
    sources: dict[int, list[Path]] = {}
    try:
        files = sorted(place.iterdir(), key=lambda one: (one.stat().st_mtime_ns, one.name))
    except OSError as error:
        raise BuildError(
            f"There are no Triton kernels to read: the folder {place} cannot be opened ({error.strerror}).",
            why="ONNX Runtime writes it while it generates kernels with triton_debug on, in the folder of the process.",
            fix="Train with lab.set(triton=True, triton_debug=True), or name another folder.",
        ) from error
    for file in files:
        if found := _GRAPH.fullmatch(file.name):
            graphs.setdefault(int(found["key"]), {})[found["form"]] = file
        elif found := _SOURCE.fullmatch(file.name):
            sources.setdefault(int(found["key"]), []).append(file)
    keys = sorted(graphs.keys() | sources.keys())
    if not keys:
        raise BuildError(
            f"The folder {place} holds no Triton kernels.",
            why="None of its files is named as ONNX Runtime names them: 123_original.onnx, func_0123abcd_123.py.",
            fix="Train with lab.set(triton=True, triton_debug=True), or name another folder.",
        )
    return TritonKernels(
        place,
        tuple(
            TritonKernel(number, key, graphs.get(key, {}), tuple(sources.get(key, ())))
            for number, key in enumerate(keys, start=1)
        ),
    )


def fused_nodes(model: ModelProto) -> dict[int, tuple[str, ...]]:
    """Name the nodes of an execution graph that run generated kernels, by key of the sub-graph."""
    # The keys are in the order of the first node of each.
    found: dict[int, list[str]] = {}
    for node in model.graph.node:
        for attribute in node.attribute if node.op_type == _OPERATOR else ():
            if attribute.name == "onnx_key":
                found.setdefault(attribute.i, []).append(node.name)
    return {key: tuple(names) for key, names in found.items()}
