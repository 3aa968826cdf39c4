"""Three ways in which recompute plans have been written down since 2022, the logs that go with them, and plain words.

- 2022: `Dropout:0,Gelu:1`, operator and strategy; logged as a MemoryAlleviation summary.
- 2023: `BiasGelu+:1:-1,Cast+:2:-1`, cluster, strategy and count; logged as a feature matrix and a MemoryInsight table.
- 2024: a JSON file with a list of the same plans, which 1.19.2 wants; logged as the same two.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ortlab.errors import OptionError
from ortlab.memory import alleviation, feature_matrix, insight

if TYPE_CHECKING:
    from ortlab.memory.alleviation import Alleviation
    from ortlab.memory.feature_matrix import FeatureMatrix
    from ortlab.memory.insight import MemoryInsight

_ONE_OPERATOR: Final = re.compile(r"(?P<operator>\w+)\+:(?P<strategy>[01]):-1")


def write_json(plans: Iterable[str]) -> str:
    """Write plans as 1.19.2 wants them in the file that ORTMODULE_MEMORY_OPT_CONFIG names."""
    return json.dumps(list(plans))


def write_inline(plans: Iterable[str]) -> str:
    """Write plans as releases of 2023 wanted them in ORTMODULE_MEMORY_OPT_CONFIG itself."""
    return ",".join(plans)


def write_alleviation(plans: Iterable[str]) -> str:
    """Write plans as ORTMODULE_ENABLE_MEMORY_ALLEVIATION wanted them in 2022.

    Raises OptionError where a plan is more than one operator, recomputed wherever it occurs: that dialect could say no
    more.
    """
    entries = []
    for plan in plans:
        one = _ONE_OPERATOR.fullmatch(plan)
        if one is None:
            raise OptionError(
                f"{plan} cannot be written as in 2022.",
                why="That dialect has one operator, strategies 0 and 1, and no count.",
                fix="Write it inline or as JSON.",
            )
        entries.append(f"{one['operator']}:{one['strategy']}")
    return ",".join(entries)


_WRITERS: Final = {"2022": write_alleviation, "2023": write_inline, "2024": write_json}


def write(plans: Iterable[str], dialect: str = "2024") -> str:
    """Write plans, as configurations, in the dialect of "2022", "2023" or "2024".

    Raises OptionError where there is no such dialect, or it cannot say what a plan says.
    """
    if dialect not in _WRITERS:
        raise OptionError(
            f"There is no dialect {dialect!r}.",
            why="They are named after the year: 2022 (Gelu:1), 2023 (Gelu+:1:-1) and 2024 (a JSON list).",
            fix="1.19.2 reads 2024.",
        )
    return _WRITERS[dialect](plans)


def save(path: str | os.PathLike[str], plans: Iterable[str], dialect: str = "2024") -> Path:
    """Write plans to a file; raise OptionError as `write` does, or where the file cannot be written."""
    text, file = write(plans, dialect), Path(path)
    try:
        file.write_text(text + "\n", encoding="utf-8")
    except (OSError, ValueError) as error:
        raise OptionError(
            f"{file!s} cannot be written.", why=f"{error}.", fix="Choose another path."
        ) from error
    return file


@dataclass(frozen=True)
class Log:
    """What a log says about recomputation."""

    alleviations: tuple[Alleviation, ...]  #: The summaries of 2022
    matrix: FeatureMatrix  #: The feature matrix, without features if there is none
    insight: MemoryInsight  #: The MemoryInsight table, without rows if there is none

    @property
    def complete(self) -> bool:
        """Whether no table was cut off before its end."""
        return (
            self.matrix.complete and self.insight.complete and all(one.complete for one in self.alleviations)
        )


def has_tables(text: str) -> bool:
    """Tell whether a text is a log with a table of plans, whole or cut off, rather than a configuration."""
    log = _tables(text)
    return bool(log.alleviations or log.matrix.features or log.insight.rows)


def read_log(text: str) -> Log:
    """Read an old log, whichever release wrote it; raise OptionError where it holds none of the tables."""
    log = _tables(text)
    if not (log.alleviations or log.matrix.features or log.insight.rows):
        raise OptionError(
            "This text holds no table of recompute plans.",
            why="Looked for were a MemoryAlleviation summary, ORTModule's feature matrix and a MemoryInsight table.",
            fix="Paste the log from the line with their title on, written with log level INFO.",
        )
    return log


def _tables(text: str) -> Log:
    log = Log(alleviation.read(text), feature_matrix.read(text), insight.read(text))
    if log.complete or text.endswith("\n") or "\n" not in text:
        return log
    return _tables(text[: text.rindex("\n") + 1])  # the line in which it was cut may hold half a number


def write_log(log: Log) -> str:
    """Write the tables of a log again, as their release printed them, without its other lines."""
    tables = [alleviation.write(summary) for summary in log.alleviations]
    if log.matrix.features:
        tables.append(feature_matrix.write(log.matrix))
    if log.insight.rows:
        tables.append(insight.write(log.insight))
    return "\n\n".join(tables)


_WORDS: Final = {
    "Gelu": "GELU",
    "FastGelu": "GELU",
    "QuickGelu": "GELU",
    "BiasGelu": "GELU and its bias",
    "Relu": "ReLU",
    "Dropout": "dropout",
    "BitmaskDropout": "dropout",
    "BiasDropout": "dropout and a bias",
    "LayerNormalization": "layer normalisation",
    "SimplifiedLayerNormalization": "RMS normalisation",
    "SkipLayerNormalization": "layer normalisation",
    "Softmax": "softmax",
    "BiasSoftmax": "softmax and its bias",
    "BiasSoftmaxDropout": "softmax and dropout",
    "MatMul": "matmul",
    "FusedMatMul": "matmul",
    "Gemm": "matmul",
    "Add": "addition",
    "Sub": "subtraction",
    "Mul": "multiplication",
    "Div": "division",
    "Pow": "power",
    "Sqrt": "square root",
    "Tanh": "tanh",
    "Sigmoid": "sigmoid",
    "Erf": "error function",
    "Neg": "negation",
    "Cast": "cast",
    "Where": "where",
    "Gather": "gather",
    "Concat": "concat",
    "Slice": "slice",
    "Split": "split",
    "Expand": "expand",
    "Tile": "tile",
    "Reshape": "reshape",
    "Transpose": "transpose",
    "Squeeze": "reshape",
    "Unsqueeze": "reshape",
}
"""Operators in words; others keep ORT's name."""


def operators(cluster: str) -> list[str]:
    """Split a cluster, or several with commas, into its operators: "Where+Dropout+" holds two."""
    return [name for name in re.split(r"[+,]", cluster) if name]


def sentence(cluster: str, strategy: int, frequency: int, layers: int | None = None) -> str:
    """Say what a plan does in `frequency` places, which are in `layers` layers of the model.

    Strategy 1 recomputes, 2 recomputes with compromise. `layers` is None where that is not known.
    """
    words: list[str] = []
    for name in operators(cluster):
        word = _WORDS.get(name, name)
        if word not in words[-1:]:
            words.append(word)
    what = ", ".join(words[:-1]) + " and " + words[-1] if len(words) > 1 else "".join(words)
    where = _counted(frequency, "place")
    if layers:
        where = (
            _counted(layers, "layer") if layers == frequency else f"{where} of {_counted(layers, 'layer')}"
        )
    partly = "; that saves a part of it" if strategy > 1 else ""
    return f"Recompute {what} in {where} instead of keeping it{partly}."


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
