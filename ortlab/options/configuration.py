"""A configuration: who executes the model, by the name of an engine, and with which switches.

Engines are "ort", "eager", "checkpoint" and "compile", the last two with what they are told.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from ortlab.errors import OptionError, did_you_mean
from ortlab.options.option_files import with_files
from ortlab.options.options import Need, Options, check_needs
from ortlab.options.switches import shown

ENGINES: Final = ("ort", "eager", "checkpoint", "compile")
"""ONNX Runtime, plain PyTorch, PyTorch with each layer under `torch.utils.checkpoint`, `torch.compile`."""

NOTHING_RECOMPUTED: Final[Mapping[str, object]] = {"memory_plan": (), "memory_level": 0, "recompute": ()}
"""The switches with which nothing is recomputed: what plans, levels and recomputed layers are held against."""

_NUMBER: Final = re.compile(r"\d{0,3}\.?\d{0,12}(e-\d{1,2})?")


@dataclass(frozen=True)
class Configuration:
    """An engine and the switches; a change makes a new record."""

    engine: str  #: "ort", "eager", "checkpoint" or "compile", with what it is told: see `check_engine`
    options: Options  #: The switches

    @property
    def recomputing(self) -> dict[str, object]:
        """The switches that recompute something, with their values."""
        values = {name: getattr(self.options, name) for name in NOTHING_RECOMPUTED}
        return {name: value for name, value in values.items() if value}

    def changed(self, changes: Mapping[str, object], have: Collection[Need]) -> Configuration:
        """Return the configuration after some changes, if it can act in this process."""
        wished = dict(changes)
        engine = check_engine(wished.pop("engine", self.engine))
        options = with_files(self.options.replace(**wished), changes)
        check_needs(options, have)
        return Configuration(engine, options)

    def tried(self, changes: Mapping[str, object], have: Collection[Need]) -> Configuration:
        """Return the configuration after changes that are for one call."""
        # A memory level and a list of plans are two ways to choose plans, so the one that is named takes the place of
        # the other that the lab has. For changes that stay, `changed` refuses that, as it would undo a choice unasked.
        wished = dict(changes)
        if "memory_plan" not in wished and _is_level(wished.get("memory_level")):
            wished["memory_plan"] = ()
        elif "memory_level" not in wished and wished.get("memory_plan"):
            wished["memory_level"] = 0
        return self.changed(wished, have)


def _is_level(value: object) -> bool:
    """Say whether a level, as text or a number, is one that chooses plans."""
    return value is not None and str(value).strip() not in {"0", ""}


def check_engine(engine: object) -> str:
    """Return the name of an engine in its usual spelling: without spaces, and the budget as Python writes it."""
    # "compile:0.5" is `torch.compile` with an activation memory budget of 0.5; "checkpoint:encoder.block+decoder.block"
    # checkpoints these modules, paths as `named_modules()` gives them, each of which may be a pattern, with a plus sign
    # between them.
    text = engine.strip() if isinstance(engine, str) else ""
    kind, colon, told = (part.strip() for part in text.partition(":"))
    if kind not in ENGINES:
        fix = f"{did_you_mean(kind or engine, ENGINES)} Engines: {', '.join(ENGINES)}.".strip()
        raise OptionError(f"There is no engine {shown(engine)}.", fix=fix)
    if not colon:
        return kind
    if kind == "compile":
        return f"compile:{_read_budget(told):g}"
    if kind == "checkpoint":
        paths = [path.strip() for path in told.split("+")]
        if not all(paths):
            raise OptionError(
                f"The engine {shown(engine)} names no module between two signs.",
                why="After the colon stand paths of modules, with a plus sign between them.",
                fix='Write for example engine="checkpoint:encoder.block+decoder.block", or "checkpoint" alone.',
            )
        return f"checkpoint:{'+'.join(paths)}"
    raise OptionError(
        f"The engine {kind!r} takes nothing after a colon.",
        why='Only "compile" (a budget) and "checkpoint" (paths of modules) do.',
        fix=f'Write engine="{kind}".',
    )


def engine_kind(engine: str) -> str:
    """Return which of `ENGINES` it is, whatever it is told."""
    return engine.partition(":")[0]


def activation_memory_budget(engine: str) -> float | None:
    """Return the budget of "compile:0.5", a share from 0 to 1; None where none is asked for."""
    kind, _, told = engine.partition(":")
    return float(told) if kind == "compile" and told else None


def checkpointed_paths(engine: str) -> tuple[str, ...]:
    """Return the paths of "checkpoint:encoder.block+decoder.block"; empty where ortlab looks for the layers."""
    kind, _, told = engine.partition(":")
    return tuple(told.split("+")) if kind == "checkpoint" and told else ()


def _read_budget(text: str) -> float:
    value = float(text) if text and _NUMBER.fullmatch(text) and text != "." else -1.0
    if not 0.0 <= value <= 1.0:
        raise OptionError(
            f"{shown(text)} is no activation memory budget.",
            why="It is a share from 0 (recompute all that can be) to 1 (keep what torch.compile keeps by itself).",
            fix='Write for example engine="compile:0.5".',
        )
    return value
