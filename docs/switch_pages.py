"""The pages of the switches: what their declarations say, and what `bench/switches.py` has measured of each."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

from ortlab.options.options import switches, unmet
from ortlab.options.switches import REASONS, Effect, Group, Switch

BENCH = Path(__file__).parents[1] / "bench"

COST = {
    Effect.WRAP: "the model is wrapped and traced again",
    Effect.EXPORT: "the model is traced again",
    Effect.GRAPH: "the gradient graph is built again",
    Effect.SESSION: "the session is made again",
    Effect.STEP: "nothing is built again",
}
"""What a change costs at the next step."""


def index() -> str:
    """Write every switch with its default and its page, a row each."""
    rows = ["| Switch | Default | Variable |", "|---|---|---|"]
    for one in switches():
        link = f"[`{one.name}`](_generated/switches/{one.group.value}.md#{one.name})"
        rows.append(f"| {link} | {default(one)} | {variables(one)} |")
    return "\n".join([*rows, ""])


def page(group: Group) -> str:
    """Write the page of a family: a section for each of its switches."""
    found, absent = results("switches"), not_measured()
    lines = [f"# Switches: {group.value}", "", how(found), ""]
    for one in switches():
        if one.group is group:
            lines += section(one)
            lines += measured(one, found["tables"], absent)
    return "\n".join(lines)


def how(found: dict[str, Any]) -> str:
    """Say how the tables of a page were measured."""
    machine = found["machine"]
    clock = "processor time" if machine["clock"] == "processor" else "time on the clock"
    threads = "one thread" if machine["threads"] == 1 else f"{machine['threads']} threads"
    return (
        "{doc}`/options` says which switch is for what. Below each stands what it did alone, against the defaults, to "
        "three small models on a CPU: a BERT most of whose labels are ignored, a GPT-2, an LSTM. Above 1 is more. "
        f"*Time* is {clock} of steps in turns on {threads}, with its 95 % interval; one that contains 1 tells no "
        f"difference. (`python bench/switches.py`, {found['rounds']} rounds, torch {machine['versions']['torch']}.) "
        "`%ort_compare memory_level=1` measures your model."
    )


def section(one: Switch) -> list[str]:
    """Write what is declared of a switch."""
    change, leave = one.advice
    facts = [
        f"- Default: {default(one)}"
        + (f"; one of {', '.join(f'`{choice}`' for choice in one.choices)}" if one.choices else ""),
        f"- A change costs: {COST[one.effect]}",
    ]
    if one.env:
        facts.append(f"- Variable: {variables(one)}")
    if one.part_of:
        facts.append(f"- Acts only while [`{one.part_of}`](#{one.part_of}) is on")
    facts += [f"- It {REASONS[need]}" for need in one.needs]
    return [
        f"## {one.name}",
        "",
        one.help.replace("<", "\\<"),
        "",
        change.replace("Change it when", "**Change it when**"),
        "",
        leave.replace("Leave it when", "**Leave it when**"),
        "",
        "```python",
        f"%ort_set {one.name}={example(one)}",
        f"lab.set({one.name}={one.default!r})  # back to the default",
        "```",
        "",
        *facts,
        "",
    ]


def example(one: Switch) -> str:
    """Return a value other than the default, as a magic takes it."""
    if one.type is bool:
        return "off" if one.default else "on"
    if one.choices and one.type is not tuple:
        return str(next(choice for choice in one.choices if choice != one.default))
    if one.type is tuple:
        return one.syntax.example if one.syntax else str(one.choices[0])
    return "100" if one.type is int else "some/path"


def not_measured() -> dict[str, str]:
    """Return why the benchmark has no row of a switch, by name."""
    body = ast.parse((BENCH / "switches.py").read_text(encoding="utf-8")).body
    (value,) = [
        one.value
        for one in body
        if isinstance(one, ast.Assign) and "NOT_MEASURED" in ast.unparse(one.targets[0])
    ]
    read: dict[str, str] = ast.literal_eval(value)
    return read


def measured(one: Switch, tables: dict[str, Any], absent: dict[str, str]) -> list[str]:
    """Write what was measured of a switch, or why nothing was; a switch that has neither is a KeyError."""
    if missing := unmet(one.name, frozenset()) or absent.get(one.name):
        return [f"*Not measured: {missing.rstrip('.')}.*", ""]
    rows = next(iter(tables.values()))
    settings = [row["set"] for row in rows if row["set"].partition("=")[0] == one.name]
    if not settings:
        raise KeyError(one.name)
    lines = ["| Set | Model | Step memory | Time | Loss |", "|---|---|---|---|---|"]
    for setting in settings:
        for model, rows in tables.items():
            (row,) = [each for each in rows if each["set"] == setting]
            if row["note"]:
                lines.append(f"| `{setting}` | {model} | refused: {row['note']} | | |")
                continue
            memory = "" if row["memory"] is None else f"{row['memory']:.2f}x"
            time = f"{row['time']:.2f}x ({row['interval']})"
            loss = "the same" if row["loss"] == 0 else f"{row['loss']:.0e} apart"
            lines.append(f"| `{setting}` | {model} | {memory} | {time} | {loss} |")
    return [*lines, ""]


def default(one: Switch) -> str:
    """Write the default, and ORTModule's where it has another."""
    own = f"`{one.default!r}`"
    return own if one.ort_default == one.default else f"{own} (ORTModule: `{one.ort_default!r}`)"


def variables(one: Switch) -> str:
    """Write the variables of the environment that a switch reads."""
    names = (one.env, *(f"{old} (old)" for old in one.older_env))
    return ", ".join(f"`{name}`" for name in names if name)


def results(benchmark: str) -> dict[str, Any]:
    """Return what a benchmark has measured, with its tables."""
    file = BENCH / "results" / f"{benchmark}.json"
    read: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return read


def in_larger_models() -> str:
    """Write what single switches do to a step of larger models than those of their pages, as a table."""
    rows = []
    engines = results("memory_engines")["tables"]
    ways = (
        "memory_level=1",
        "memory_level=2",
        "recompute=layers",
        "recompute=layers:1/2",
        "recompute=all but matmuls",
    )
    for switch in ways:  # of these the bench has left out some over time
        for model in ("BERT", "GPT-2", "Llama"):
            rows += [
                (switch, model, one["rise / ort"], one["time / ort"], "memory_engines")
                for one in engines[f"{model}, all in the same rounds"]
                if one["configuration"] == f"ort, {switch}"
            ]
    found = {one["claim"]: one["value"] for one in results("chunked_loss")["claims"]}
    rows.append(
        (
            "chunked_loss=on",
            "GPT-2, vocabulary 50,000",
            found["Step memory with chunked_loss / without"],
            found["Time of a step with chunked_loss / without, median of rounds"],
            "chunked_loss",
        )
    )
    rows += [
        (one["ratio"], "BERT", None, one["median of rounds"], "cpu_step")
        for one in results("cpu_step")["tables"]["One switch at a time, against the defaults"]
    ]
    head = "| Set | Model | Step memory | Time of a step | `python bench/...` |\n|---|---|---|---|---|"
    lines = [
        f"| `{setting}` | {model} | {'' if memory is None else f'{memory:.2f}x'} | {time:.2f}x | `{bench}.py` |"
        for setting, model, memory, time, bench in rows
    ]
    return "\n".join(["Against the defaults, on a CPU; above 1 is more.", "", head, *lines, ""])
