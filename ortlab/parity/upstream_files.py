"""The files that ORTModule's `StatisticsSubscriber` writes: one tensor's statistics as text, read back.

The form is that of `onnxruntime/training/utils/hooks/_statistics_subscriber.py` of 1.19.2 (row I5); ortlab's own
writer, which mends the standard deviation, keeps it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from ortlab.records.activation_statistics import SAMPLES, TensorStatistics

if TYPE_CHECKING:
    from collections.abc import Iterator

FORWARD: Final = "forward"
BACKWARD: Final = "backward"

_END: Final = "=" * 16
_HEAD: Final = re.compile(
    r"(?P<depth>>*)(?P<name>.+) (?P<direction>forward|backward) run shape: torch\.Size\(\[(?P<shape>[\d, ]*)\]\) "
    r"dtype: (?P<dtype>\S+) size: torch\.Size\(\[\d*\]\) ?"
)
_RANGE: Final = re.compile(
    r"min: (?P<minimum>\S+) max: (?P<maximum>\S+), mean: (?P<mean>\S+), std: (?P<std>\S+) ?"
)
_STRANGE: Final = re.compile(r"nan: (?P<nan>\d+), inf: (?P<inf>\d+)")
_SAMPLE: Final = re.compile(r"samples\(top \d+\): tensor\(\[(?P<sample>[^\]]*)\].*\)", re.DOTALL)
_SIGNS: Final = re.compile(r"neg: (?P<negative>\d+), pos: (?P<positive>\d+), zero: (?P<zero>\d+),?")
_OUTPUT: Final = re.compile(r"(?P<module>.+)_(?P<index>\d+)_(?P<output>\d+)th_output")

_WORDS: Final = {"True": 1.0, "False": 0.0}


class UnreadableFileError(ValueError):
    """A file of statistics is not whole, or not in the form that 1.19.2 writes."""


@dataclass(frozen=True)
class Activation:
    """What a file says of one tensor."""

    # Upstream's: class, number of the module in the tree, number of the output; or what `inspect_activation` was given.
    name: str
    direction: str  # "forward": the activation; "backward": its gradient
    depth: int  # of the module in the tree, 1 for the model itself; 0 for a tensor of `inspect_activation`
    statistics: TensorStatistics  # with the sample as rounded as it was printed
    resolution: float = 0.0  # what one digit of the last place of the printed sample is worth
    calls: int = 1  # how often its file was written in the step; upstream keeps the last only

    @property
    def module(self) -> str:
        """Class of the module, or the whole name where it is not the output of one."""
        parts = _OUTPUT.fullmatch(self.name)
        return parts["module"] if parts else self.name

    @property
    def std_is_impossible(self) -> bool:
        """Whether the standard deviation is beyond what any values between minimum and maximum have.

        That of 1.19.2 takes a sum for a mean (row T12), so this tells files of upstream's own writer.
        """
        facts, size = self.statistics, self.statistics.size
        if size < 2 or facts.nan or facts.inf or not math.isfinite(facts.std):  # noqa: PLR2004 - n - 1
            return False
        most = (facts.maximum - facts.minimum) / 2 * math.sqrt(size / (size - 1))
        return facts.std > most * (1 + 1e-3) + 1e-30

    def called(self, times: int) -> Activation:
        """Return it with the number of times that its file was written."""
        return replace(self, calls=times)


def output_of(name: str) -> tuple[str, int | None]:
    """Return the module of a name, with its number in the tree, and which of its outputs it is.

    For a name that `inspect_activation` was given: that name, and None.
    """
    parts = _OUTPUT.fullmatch(name)
    return (f"{parts['module']}_{parts['index']}", int(parts["output"])) if parts else (name, None)


def read_blocks(text: str) -> Iterator[Activation]:
    """Yield the statistics in a file of one tensor, or in a merged file of many.

    Raises UnreadableFileError, after what came before, if a block is cut short or has another form.
    """
    lines = text.splitlines()
    start = 0
    for number, line in enumerate(lines):
        if line == _END:
            yield _block(lines[start:number])
            start = number + 1
    rest = [line for line in lines[start:] if line.strip()]
    if rest:
        message = f"it ends in the middle, after {rest[-1][:60]!r}"
        raise UnreadableFileError(message)


def read_file(text: str) -> Activation:
    """Read a file of one tensor; raises UnreadableFileError for one that is empty, broken, or of several tensors."""
    blocks = list(read_blocks(text))
    if len(blocks) != 1:
        raise UnreadableFileError("it is empty" if not blocks else f"it holds {len(blocks)} tensors")
    return blocks[0]


def _block(lines: list[str]) -> Activation:
    lines = [line for line in lines if line.strip()]
    if len(lines) < 5:  # noqa: PLR2004 - head, range, strange values, sample, signs
        raise UnreadableFileError("a part of it is missing")
    head, facts, strange = (
        _matched(pattern, line) for pattern, line in zip((_HEAD, _RANGE, _STRANGE), lines[:3], strict=True)
    )
    sample = _matched(_SAMPLE, "\n".join(lines[3:-1]))["sample"]
    signs = _matched(_SIGNS, lines[-1])
    values, resolution = _sample(sample)
    known: dict[str, Any] = {name: _number(text) for name, text in facts.groupdict().items()}
    known |= {name: int(found[name]) for found in (strange, signs) for name in found.groupdict()}
    statistics = TensorStatistics(
        tuple(int(size) for size in head["shape"].split(",") if size.strip()),
        head["dtype"],
        **known,
        sample=values,
    )
    return Activation(head["name"], head["direction"], len(head["depth"]), statistics, resolution)


def _matched(pattern: re.Pattern[str], text: str) -> re.Match[str]:
    found = pattern.fullmatch(text)
    if found is None:
        message = f"this is not what 1.19.2 writes: {text[:60]!r}"
        raise UnreadableFileError(message)
    return found


def _number(text: str) -> float:
    if text in _WORDS:
        return _WORDS[text]
    try:
        return float(text)
    except ValueError:
        message = f"{text[:40]!r} is not a number"
        raise UnreadableFileError(message) from None


def _sample(text: str) -> tuple[tuple[float, ...], float]:
    """Return the printed values up to an ellipsis, and the coarsest last place among them."""
    printed = [one.strip() for one in text.partition("...")[0].split(",")]
    kept = [one for one in printed if one][:SAMPLES]
    return tuple(_number(one) for one in kept), max((_last_place(one) for one in kept), default=0.0)


def _last_place(text: str) -> float:
    mantissa, _, exponent = text.lower().partition("e")
    whole, point, decimals = mantissa.partition(".")
    if not whole.lstrip("+-").isdigit():
        return 0.0  # nan, inf, True
    return float(10.0 ** (int(exponent or 0) - len(decimals))) if point or exponent else 0.0
