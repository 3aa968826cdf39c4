"""Pages of what is checked before training: the doctor, a pre-flight, a self-test, and recipes."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from ortlab import units
from ortlab.records.preflight import Finding, Kind, Level
from ortlab.render.page import Block, Cell, Column, Folded, Mark, Note, Page, Table, row

if TYPE_CHECKING:
    from ortlab.records.checks import Recipe, Report, SelfTest
    from ortlab.records.preflight import Checked, Preflight

# ---- pre-flight -----------------------------------------------------------------------------------------------------


_FINDINGS_SHOWN: Final = 12
"""Rows of findings that are shown at once; the others are folded."""

_NAMED: Final = 3
"""Sub-modules up to which the line to run names them."""

_FINDINGS: Final = (
    Column("module", meaning="path as named_modules gives it; the first, where one thing stands in several"),
    Column("what"),
    Column("line", meaning="file and line of the code it comes from"),
)

_CAPTIONS: Final = {
    Level.OBSTACLE: "Stands in the way",
    Level.WRONG: "Would go wrong without an error",
    Level.NOTE: "Works; worth knowing",
}

_LEVEL_MARKS: Final = {Level.OBSTACLE: Mark.BAD, Level.WRONG: Mark.BAD, Level.NOTE: Mark.QUIET}


def preflight_page(report: Preflight) -> Page:
    """Say on one screen whether a model trains on ONNX Runtime, and what to do if not."""
    words, mark = preflight_verdict(report)
    blocks: list[Block] = [Note(words, mark), Note(f"Next: {next_step(report)}")]
    for level in (Level.OBSTACLE, Level.WRONG):
        blocks += _findings(report.of(level), level)
    if report.parts:
        blocks += _parts(report)
    blocks += _findings(report.of(Level.NOTE), Level.NOTE)
    failed = [one for one in report.checked if not one.trains]
    if failed:
        columns = (Column("sub-module"), Column("class"), Column("why not"))
        rows = tuple(row(one.path, one.module_class, one.reason) for one in failed)
        title = f"Tested and left out: {units.count(len(failed))}"
        blocks.append(Folded(title, blocks=(Table("", columns, rows),)))
    blocks.append(Note(_what_was_done(report), Mark.QUIET))
    return Page(f"Pre-flight of {report.name}: {report.model}", tuple(blocks))


def preflight_verdict(report: Preflight) -> tuple[str, Mark]:
    """Say in one sentence whether the model trains on ONNX Runtime."""
    stopping = [one for one in report.findings if one.stops]
    if not stopping and report.built:
        return _verdict_of_whole(report)
    if report.fails_in_pytorch:
        return "The forward fails in PyTorch, too: correct that first.", Mark.BAD
    if any(one.kind is Kind.DEVICE for one in stopping):
        return "Not everything is on one device that has values: correct that first.", Mark.BAD
    start = "Does not train whole on ONNX Runtime"
    if report.built:
        start = "Would not train right as a whole on ONNX Runtime"
    if report.parts:
        share = units.percent(report.share)
        number = len(report.parts)
        these = f"these {units.count(number)} sub-modules" if number > 1 else "this sub-module"
        return f"{start}: wrap {these}, {share} of the parameters.", Mark.WARN
    return f"{start}, and no sub-module that is worth it does.", Mark.BAD


def _verdict_of_whole(report: Preflight) -> tuple[str, Mark]:
    if not report.training:
        return "ONNX Runtime can run it in eval mode; whether it trains was not looked at.", Mark.WARN
    if not report.parameters:
        return "ONNX Runtime can run it, but there is nothing to train.", Mark.WARN
    by_torch = {one.what for one in report.findings if one.kind is Kind.BY_TORCH}
    if by_torch:
        number = len(by_torch)
        operators = f"{units.count(number)} operators are" if number > 1 else "1 operator is"
        return f"Trains whole on ONNX Runtime; {operators} run by PyTorch inside the graph.", Mark.GOOD
    return "Trains whole on ONNX Runtime.", Mark.GOOD


def next_step(report: Preflight) -> str:
    """Say what to do next, one sentence or command."""
    mode = next((one for one in report.findings if one.kind in {Kind.MODE, Kind.NOT_TRAINED}), None)
    if report.ok:
        return f"lab = ortlab.wrap({report.name})"
    if mode is not None and report.built and mode.fix:
        return mode.fix
    if report.parts:
        return _line_to_run(report)
    fixes = dict.fromkeys(one.fix for one in report.findings if one.stops and one.fix)
    return next(iter(fixes), "train it with PyTorch as it is.")


def _line_to_run(report: Preflight) -> str:
    if len(report.only) <= _NAMED:
        return f"lab = ortlab.wrap({report.name}, only={report.only!r})"
    return f"lab = ortlab.wrap({report.name}, only=report.only), where report is this pre-flight."


def _findings(findings: Sequence[Finding], level: Level) -> list[Block]:
    groups: dict[tuple[Kind, str, str], list[Finding]] = {}
    for one in findings:
        groups.setdefault((one.kind, one.what, one.place.where), []).append(one)
    if not groups:
        return []
    rows = tuple(_finding_row(group, level) for group in groups.values())
    blocks: list[Block] = [Table(_CAPTIONS[level], _FINDINGS, rows[:_FINDINGS_SHOWN])]
    if len(rows) > _FINDINGS_SHOWN:
        more = Table("", _FINDINGS, rows[_FINDINGS_SHOWN:])
        blocks.append(Folded(f"{units.count(len(rows) - _FINDINGS_SHOWN)} more", blocks=(more,)))
    fixes = dict.fromkeys(one.fix for one in findings if one.fix)
    if fixes:
        lines = "\n".join(f"- {fix}" for fix in fixes)
        blocks.append(Note(f"What helps:\n{lines}", Mark.QUIET if level is Level.NOTE else Mark.PLAIN))
    return blocks


def _finding_row(group: Sequence[Finding], level: Level) -> tuple[Cell, ...]:
    one = group[0]
    name = one.place.module or "the model itself"
    others = f" and {units.count(len(group) - 1)} more" if len(group) > 1 else ""
    more = "\n".join(each.place.module or "the model itself" for each in group) if others else ""
    times = f" ({units.count(one.times)} times)" if one.times > 1 else ""
    return row(
        Cell(f"{name} ({one.place.module_class}){others}", more=more),
        Cell(f"{one.what}{times}", _LEVEL_MARKS[level] if level is not Level.NOTE else Mark.PLAIN),
        _short(one.place.where),
    )


def _parts(report: Preflight) -> list[Block]:
    groups: dict[tuple[str, str, int], list[Checked]] = {}
    for part in report.parts:
        parent = part.path.rpartition(".")[0]
        groups.setdefault((parent, part.module_class, part.parameters), []).append(part)
    columns = (
        Column("train on ONNX Runtime"),
        Column("class"),
        Column(
            "parameters",
            numeric=True,
            meaning="trainable numbers in all sub-modules of the row; one that is tied counts in each",
        ),
        Column("of the model", numeric=True),
    )
    rows = []
    for (parent, kind, size), group in groups.items():
        names = _ranges([part.path.rpartition(".")[2] for part in group])
        path = f"{parent}.{names}" if parent else names
        share = units.percent(size * len(group) / report.parameters)
        rows.append(row(path, kind, units.count(size * len(group)), share))
    blocks: list[Block] = [Table("", columns, tuple(rows))]
    if len(report.only) > _NAMED:
        names = ",\n    ".join(map(repr, report.only))
        blocks.append(
            Folded("The same with names", f"lab = ortlab.wrap({report.name}, only=[\n    {names},\n])")
        )
    return blocks


def _ranges(names: Sequence[str]) -> str:
    """Write the numbers of layers as ranges: "{0-3, 5-11}"; a single name as it is."""
    if len(names) == 1:
        return names[0]
    if not all(name.isdecimal() for name in names):
        return f"{{{', '.join(names)}}}"
    runs: list[list[int]] = []
    for number in sorted(map(int, names)):
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return f"{{{', '.join('-'.join(map(str, run)) for run in runs)}}}"


def _what_was_done(report: Preflight) -> str:
    spent = units.duration(report.seconds * 1000)
    untouched = "No step was run, and the model is as it was."
    if not report.built and not report.checked:
        return f"Looked for {spent} on {report.device}. {untouched}"
    what = "The whole model" if report.built and not report.checked else "The model and its sub-modules"
    if not report.built:
        what = f"{units.count(len(report.checked))} sub-modules"
    with_gradient = ", with gradient graph and session" if report.training else ""
    again = "Wrapping does not export again." if report.ok or report.parts else ""
    return f"{what}: exported{with_gradient}, on {report.device}, in {spent}. {untouched} {again}".rstrip()


def _short(where: str) -> str:
    """Write a place without the folder that its package is installed in."""
    if not where:
        return ""
    file = re.sub(r":(\d+)$", "", where)
    for folder in sorted(_folders(), key=len, reverse=True):
        if file.startswith(folder):
            return where[len(folder) :]
    return where


def _folders() -> Iterable[str]:
    for folder in (os.getcwd(), *sys.path):  # noqa: PTH109 - strings are compared
        if folder and folder != os.sep:
            yield folder.rstrip(os.sep) + os.sep


# ---- doctor, self-test, recipe --------------------------------------------------------------------------------------


def report_page(report: Report) -> Page:
    """Show what the doctor found, and the command that repairs what is wrong."""
    words = {
        "ok": Cell("ok", Mark.GOOD),
        "warn": Cell("WARNING", Mark.WARN),
        "fail": Cell("FAILED", Mark.BAD),
    }
    rows = tuple(row(check.name, words[check.status], check.found) for check in report.checks)
    verdict = Note("This installation can train with ONNX Runtime.", Mark.GOOD)
    if not report.ok:
        verdict = Note("This installation cannot train with ONNX Runtime as it is.", Mark.BAD)
    fixes = [Note(f"{check.name}: {check.fix}", Mark.WARN) for check in report.checks if check.fix]
    table = Table("", (Column("check"), Column("result"), Column("found")), rows)
    return Page("Doctor", (table, verdict, *fixes))


_OUTCOME_MARKS: Final = {
    "held": Mark.GOOD,
    "did not hold": Mark.BAD,
    "failed": Mark.BAD,
    "stated": Mark.PLAIN,
    "not run": Mark.QUIET,
}

_MS_PER_S: Final = 1000
_TRIED: Final = (Column("what"), Column("outcome"), Column("found", whole=True))


def selftest_verdict(test: SelfTest) -> str:
    """Say in a line how it ended, how many findings of each outcome there are, and how long it took."""
    counted = {name: sum(one.outcome == name for one in test.findings) for name in _OUTCOME_MARKS}
    words = ", ".join(f"{number} {name}" for name, number in counted.items() if number) or "nothing was run"
    end = (
        "Interrupted"
        if test.interrupted
        else "All that was tried holds"
        if test.ok
        else "Not all of it holds"
    )
    took = units.duration(sum(test.seconds.values()) * _MS_PER_S)
    return f"{end}: {words}; {took}."


def selftest_page(test: SelfTest) -> Page:
    """Give each part a table, after the selftest_verdict and what is against it, and the machine at the end."""
    blocks: list[Block] = [Note(selftest_verdict(test), Mark.GOOD if test.ok else Mark.BAD)]
    blocks += [
        Note(f"{one.part}, {one.name}: {one.outcome}: {one.said}", Mark.BAD)
        for one in test.findings
        if _OUTCOME_MARKS[one.outcome] is Mark.BAD
    ]
    if test.interrupted:
        blocks.append(Note("It was ended before its last part: what is not named was not run.", Mark.BAD))
    for part in dict.fromkeys(one.part for one in test.findings):
        rows = tuple(
            row(one.name, Cell(one.outcome, _OUTCOME_MARKS[one.outcome]), one.said)
            for one in test.findings
            if one.part == part
        )
        took = f", {units.duration(test.seconds[part] * _MS_PER_S)}" if part in test.seconds else ""
        blocks.append(Table(f"{part}{took}", _TRIED, rows))
    facts = tuple(row(name, value) for name, value in {"started": test.started_at, **test.machine}.items())
    blocks.append(Table("machine", (Column(""), Column("", whole=True)), facts))
    return Page(f"Self-test on {test.device}", tuple(blocks))


def recipe_page(recipe: Recipe) -> Page:
    """Show the code, and say what it needs that is not here."""
    lacking = tuple(Note(sentence, Mark.WARN) for sentence in recipe.missing)
    return Page(f"Recipe: {recipe.title}", (*lacking, Folded("Code", recipe.code, is_open=True)))
