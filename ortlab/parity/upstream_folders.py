"""Folders that ORTModule's `StatisticsSubscriber` wrote, here or on a cluster: read, and merged as upstream does.

A folder has one folder for each step, with a file for each activation and gradient, and `order.txt` with their names in
the order in which they were written. Their form is that of 1.19.2, in
`onnxruntime/training/utils/hooks/_statistics_subscriber.py`; ortlab's own writer, which repairs the standard deviation,
keeps it.
"""

from __future__ import annotations

import math
import re
import shutil
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ortlab.errors import LedgerError
from ortlab.records.activation_statistics import SAMPLES, TensorStatistics

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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
        """Whether the standard deviation is beyond what any values between minimum and maximum have."""
        # That of 1.19.2 takes a sum for a mean, so this tells files of upstream's own writer.
        facts, size = self.statistics, self.statistics.size
        if size < 2 or facts.nan or facts.inf or not math.isfinite(facts.std):  # noqa: PLR2004 - n - 1
            return False
        most = (facts.maximum - facts.minimum) / 2 * math.sqrt(size / (size - 1))
        return facts.std > most * (1 + 1e-3) + 1e-30

    def called(self, times: int) -> Activation:
        """Return it with the number of times that its file was written."""
        return replace(self, calls=times)


def output_of(name: str) -> tuple[str, int | None]:
    """Return the module of a name, with its number in the tree, and which of its outputs it is."""
    # For a name that `inspect_activation` was given: that name, and None.
    parts = _OUTPUT.fullmatch(name)
    return (f"{parts['module']}_{parts['index']}", int(parts["output"])) if parts else (name, None)


def read_blocks(text: str) -> Iterator[Activation]:
    """Yield the statistics in a file of one tensor, or in a merged file of many."""
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


ORDER: Final = "order.txt"

_STEP: Final = re.compile(r"step_(\d+)")
_MERGED: Final = re.compile(r"step_(\d+)_\.txt")
_SHOWN: Final = 3


@dataclass(frozen=True)
class ActivationStep:
    """What a folder holds of one step."""

    number: int  # from 0 on, as upstream counts forwards
    activations: tuple[Activation, ...]  # and gradients, in the order in which they were first written
    problems: tuple[str, ...] = ()  # what is missing or cannot be read, a clause each

    def find(self, name: str, direction: str) -> Activation | None:
        """Return an activation, or None if the step has none of that name."""
        return next((one for one in self.activations if (one.name, one.direction) == (name, direction)), None)


@dataclass(frozen=True)
class ActivationFolder:
    """What a `StatisticsSubscriber` wrote of one run; `problems` are those of the folder as a whole."""

    path: str
    steps: tuple[ActivationStep, ...]
    problems: tuple[str, ...] = ()

    @property
    def all_problems(self) -> tuple[str, ...]:
        """What is wrong with the folder and with each step, a sentence each."""
        return (
            *self.problems,
            *(f"Step {step.number}: {'; '.join(step.problems)}." for step in self.steps if step.problems),
        )

    def step(self, number: int) -> ActivationStep | None:
        """Return the step of that number; None if it is not there."""
        return next((one for one in self.steps if one.number == number), None)


def read_folder(path: str | Path) -> ActivationFolder:
    """Read the folder of a `StatisticsSubscriber`, or a folder that `merge_activation_summary` made of one.

    `path` is the `output_dir` of the subscriber, with its `step_0`, `step_1`, ...; or `merge_pt`, `merge_ort`. What is
    half written is read as far as it goes, and what is missing stands in `problems`. Raises LedgerError if there is no
    such folder, or it holds no step.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise LedgerError(
            f"There is no folder {folder}.",
            fix="Give the output_dir of a StatisticsSubscriber.",
        )
    found: dict[int, ActivationStep] = {}
    for entry in sorted(folder.iterdir()):
        whole, merged = _STEP.fullmatch(entry.name), _MERGED.fullmatch(entry.name)
        if whole and entry.is_dir():
            number = int(whole[1])
            found[number] = _read_step(number, entry)
        elif merged and entry.is_file() and int(merged[1]) not in found:
            number = int(merged[1])
            found[number] = _read_merged(number, entry)
    if not found:
        parents = [one.name for one in folder.iterdir() if one.is_dir() and any(one.glob("step_*"))]
        raise LedgerError(
            f"{folder} holds no steps.",
            why="A StatisticsSubscriber makes a folder step_0, step_1, ... for each step.",
            fix=f"Did you mean {folder / min(parents)}?"
            if parents
            else "Give its output_dir, after at least one step.",
        )
    steps = tuple(found[number] for number in sorted(found))
    gaps = sorted(set(range(steps[0].number, steps[-1].number)) - found.keys())
    problems = (f"Steps are missing between the first and the last: {listed(gaps)}.",) if gaps else ()
    return ActivationFolder(str(folder), steps, problems)


def merge_folders(
    pytorch: str | Path, ort: str | Path, output: str | Path, *, overwrite: bool = False
) -> tuple[Path, Path]:
    """Write one file for each step of two runs, as `merge_activation_summary` of 1.19.2 does, byte for byte.

    Both follow the order of PyTorch's step 0, so that a diff tool finds like beside like. Tensors that it does not have
    are left out, as upstream does; so are those that a step lacks.

    Parameters
    ----------
    pytorch, ort
        Folders of the two runs, `--pt_dir` and `--ort_dir`.
    output
        Folder to write, with `merge_pt` and `merge_ort` in it.
    overwrite
        Whether a folder that is there already is replaced.

    Returns
    -------
    merged_pytorch, merged_ort : Path
        The two folders.

    Raises
    ------
    LedgerError
        If the output exists and may not be replaced, would take one of the runs with it, or step 0 of PyTorch has no
        `order.txt`. Nothing is changed then.
    """
    sources, target = [Path(pytorch), Path(ort)], Path(output)
    for source in sources:
        if not source.is_dir():
            raise LedgerError(
                f"There is no folder {source}.", fix="Give the output_dir of a StatisticsSubscriber."
            )
        if source.resolve() == target.resolve() or target.resolve() in source.resolve().parents:
            raise LedgerError(
                f"{target} cannot be the output: it holds the run {source}.", fix="Give another folder."
            )
    first = sources[0] / "step_0" / ORDER
    if not first.is_file():
        raise LedgerError(
            f"{first} is missing, so there is no order to follow.",
            why="Both runs are merged in the order of PyTorch's step 0.",
            fix="Record step 0 as well (no start_step), or read the folders with ortlab.parity.compare_folders.",
        )
    if target.exists():
        if not overwrite:
            raise LedgerError(
                f"{target} exists already.", fix="Give another folder, or overwrite=True to replace it."
            )
        shutil.rmtree(target)
    names = [line.rstrip("\n") for line in first.read_text(encoding="utf-8").splitlines(keepends=True)]
    merged = target / "merge_pt", target / "merge_ort"
    for source, goal in zip(sources, merged, strict=True):
        goal.mkdir(parents=True)
        for step in source.iterdir():
            if step.is_dir():
                _merge_step(step, names, goal / f"{step.name}_.txt")
    return merged


def _merge_step(step: Path, names: list[str], goal: Path) -> None:
    with goal.open("w", encoding="utf-8") as out:
        for name in names:
            file = step / name
            if file.exists():
                out.write(file.read_text(encoding="utf-8"))
                out.write("\n")


def _read_step(number: int, folder: Path) -> ActivationStep:
    files = {one.name for one in folder.iterdir() if one.is_file()} - {ORDER}
    order = folder / ORDER
    problems = []
    try:
        lines = order.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError):
        problems.append(f"{ORDER} is missing, so the order is that of the names")
        lines = sorted(files)
    is_cut = lines and lines[-1] not in ("", *files)
    written = Counter(line for line in lines if line)
    if is_cut:
        problems.append(f"{ORDER} ends in the middle of a name")
        written.pop(lines[-1])
    absent = [name for name in written if name not in files]
    if absent:
        problems.append(f"{len(absent)} files that {ORDER} names are missing ({listed(absent)})")
    unlisted = sorted(files - written.keys())
    if unlisted and order.is_file():
        problems.append(f"{len(unlisted)} files are not in {ORDER} ({listed(unlisted)})")
    activations, broken = [], []
    for name in [*(one for one in written if one in files), *unlisted]:
        found = _read_activation(folder / name)
        if isinstance(found, str):
            broken.append(f"{name}: {found}")
        else:
            activations.append(found.called(max(1, written[name])))
    if broken:
        problems.append(f"{len(broken)} files cannot be read ({listed(broken)})")
    return ActivationStep(number, tuple(activations), tuple(problems))


def _read_activation(file: Path) -> Activation | str:
    """Read a file, or say why it cannot be read."""
    try:
        return read_file(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, UnreadableFileError) as error:
        return str(error)


def _read_merged(number: int, file: Path) -> ActivationStep:
    found: dict[tuple[str, str], Activation] = {}
    try:
        for one in read_blocks(file.read_text(encoding="utf-8")):
            key = one.name, one.direction
            found[key] = one.called(found[key].calls + 1 if key in found else 1)
    except (OSError, UnicodeDecodeError, UnreadableFileError) as error:
        return ActivationStep(
            number, tuple(found.values()), (f"{file.name} cannot be read to its end: {error}",)
        )
    return ActivationStep(number, tuple(found.values()))


def listed(names: Sequence[str] | Sequence[int]) -> str:
    """Name the first few, and count the others."""
    shown = ", ".join(str(name) for name in names[:_SHOWN])
    more = len(names) - _SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
