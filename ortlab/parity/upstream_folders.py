"""Folders that ORTModule's `StatisticsSubscriber` wrote, here or on a cluster: read, and merged as upstream does.

A folder has one folder for each step, with a file for each activation and gradient, and `order.txt` with their names in
the order in which they were written (row I5).
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ortlab.errors import LedgerError
from ortlab.parity.upstream_files import Activation, UnreadableFileError, read_blocks, read_file

ORDER: Final = "order.txt"

_STEP: Final = re.compile(r"step_(\d+)")
_MERGED: Final = re.compile(r"step_(\d+)_\.txt")
_SHOWN: Final = 3


@dataclass(frozen=True)
class ActivationStep:
    """What a folder holds of one step.

    Attributes
    ----------
    number
        Number of the step, from 0 on, as upstream counts forwards.
    activations
        Activations and gradients, in the order in which they were first written.
    problems
        What is missing or cannot be read, a clause each; empty for a whole step.
    """

    number: int
    activations: tuple[Activation, ...]
    problems: tuple[str, ...] = ()

    def find(self, name: str, direction: str) -> Activation | None:
        """Return an activation, or None if the step has none of that name."""
        return next((one for one in self.activations if (one.name, one.direction) == (name, direction)), None)


@dataclass(frozen=True)
class ActivationFolder:
    """What a `StatisticsSubscriber` wrote of one run.

    Attributes
    ----------
    path
        The folder.
    steps
        Its steps, by number.
    problems
        What is wrong with the folder as a whole.
    """

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

    What is half written is read as far as it goes, and what is missing stands in `problems`.

    Parameters
    ----------
    path
        The `output_dir` of the subscriber, with its `step_0`, `step_1`, ...; or `merge_pt`, `merge_ort`.

    Raises
    ------
    LedgerError
        If there is no such folder, or it holds no step.
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
    problems = (f"Steps are missing between the first and the last: {_listed(gaps)}.",) if gaps else ()
    return ActivationFolder(str(folder), steps, problems)


def merge_folders(
    pytorch: str | Path, ort: str | Path, output: str | Path, *, overwrite: bool = False
) -> tuple[Path, Path]:
    """Write one file for each step of two runs, as `merge_activation_summary` of 1.19.2 does, byte for byte (row I7).

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
        problems.append(f"{len(absent)} files that {ORDER} names are missing ({_listed(absent)})")
    unlisted = sorted(files - written.keys())
    if unlisted and order.is_file():
        problems.append(f"{len(unlisted)} files are not in {ORDER} ({_listed(unlisted)})")
    activations, broken = [], []
    for name in [*(one for one in written if one in files), *unlisted]:
        found = _read_activation(folder / name)
        if isinstance(found, str):
            broken.append(f"{name}: {found}")
        else:
            activations.append(found.called(max(1, written[name])))
    if broken:
        problems.append(f"{len(broken)} files cannot be read ({_listed(broken)})")
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


def _listed(names: list[str] | list[int]) -> str:
    shown = ", ".join(str(name) for name in names[:_SHOWN])
    more = len(names) - _SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
