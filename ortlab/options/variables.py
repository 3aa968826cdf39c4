"""Options from and to the ORTMODULE_* variables and their JSON file, and plans as they have been written since 2022."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ortlab.errors import OptionError
from ortlab.options.catalogue import declaration, switches
from ortlab.options.option_files import text_of
from ortlab.options.switches import PLAN, shown

if TYPE_CHECKING:
    from ortlab.options.switches import Switch, Value


JSON_CONFIG: Final = "ORTMODULE_JSON_CONFIG_PATH"
_OLD_PLANS: Final = "ORTMODULE_ENABLE_MEMORY_ALLEVIATION"


def read(environ: Mapping[str, str]) -> tuple[dict[str, Value], tuple[str, ...]]:
    """Read the variables that are set: options by name, and notes."""
    # A note is one sentence for each variable that is translated, ignored or sets something. Variables that do not
    # begin with "ORTMODULE_" are ignored.
    changes: dict[str, Value] = {}
    notes: list[str] = []
    for one in switches():
        names = _set_names(one, environ)
        value = _read_one(one, names[0], environ[names[0]]) if names else None
        if value is None:
            continue
        changes[one.name] = value
        if names[0] in one.older_env:
            notes.append(f"{names[0]} is no longer read by ORTModule 1.19.2; taken as {one.name}={value!r}.")
        elif value != one.default:
            notes.append(f"{names[0]} sets {one.name}={value!r}.")
        notes += [f"{older} is ignored for {one.name}, because {names[0]} is set." for older in names[1:]]
    return changes, (*notes, *_unknown(environ))


def sources(environ: Mapping[str, str]) -> dict[str, str]:
    """Return, for each option that a variable sets, the name of the variable."""
    found = ((one, _set_names(one, environ)) for one in switches())
    return {
        one.name: names[0]
        for one, names in found
        if names and _read_one(one, names[0], environ[names[0]]) is not None
    }


def _set_names(one: Switch, environ: Mapping[str, str]) -> list[str]:
    """List the variables of a switch that are set, the one that 1.19.2 reads first."""
    return [name for name in (one.env, *one.older_env) if name and name in environ]


def _read_one(one: Switch, name: str, text: str) -> Value | None:
    """Return the value that a variable has for a switch, or None if it says nothing about it."""
    reader = _READERS.get(name if name == _OLD_PLANS else one.name)
    try:
        value = reader(text.strip()) if reader else text
        return None if value is None else one.read(value)
    except OptionError as error:
        raise OptionError(
            f"The environment variable {name} is {shown(text)}, which makes no sense.",
            why=error.why,
            fix=f"Unset {name}, or give it a value that means {one.name}={one.example}.",
        ) from None


def _read_skip_check(text: str) -> list[str]:
    names = [name.strip().removeprefix("SKIP_CHECK_") for name in text.split("|")]
    return [] if "DISABLED" in names else names


def _read_fallback_policy(text: str) -> list[str] | None:
    policy = text.upper().removeprefix("FALLBACK_")
    return None if policy == "DISABLE" else [policy]


def _read_plans(text: str) -> object:
    """Read plans from the JSON file that 1.19.2 wants, or from the text itself, as releases before 1.19 had it."""
    if re.search(r":[012]:(-1|\d+)$", text):
        return text
    try:
        plans = json.loads(text_of(Path(text)))
    except (OSError, ValueError, RecursionError) as error:
        raise OptionError(
            f"{shown(text)} cannot be read.", why=f"It is not a readable JSON file: {error}."
        ) from None
    if not isinstance(plans, list):
        raise OptionError(f"{shown(text)} holds no list.", why="The file must hold a JSON list of plans.")
    return plans


_OLD_PLAN: Final = re.compile(r"(?P<operators>[\w.]+(?:\+[\w.]+)*)\+?:(?P<strategy>[012])")


def read_plans(text: str) -> tuple[str, ...]:
    """Read a configuration in any of the three dialects into plans as `Options.memory_plan` takes them."""
    # Operators that the first dialect switches off (`Dropout:0`) are left out.
    text = text.strip()
    plans: list[str] = []
    for entry in _json_entries(text) if text.startswith("[") else text.split(","):
        entry = entry.strip()  # noqa: PLW2901 - the same entry
        old = _OLD_PLAN.fullmatch(entry)
        if re.fullmatch(PLAN.pattern, entry):
            plans.append(entry)
        elif old and old["strategy"] != "0":
            plans.append(f"{old['operators']}+:{old['strategy']}:-1")
        elif entry and not old:
            raise OptionError(
                f"{shown(entry)} is no recompute plan.",
                why="Plans are written as Gelu:1, as Gelu+:1:-1, or as a JSON list of the latter.",
                fix=f"Write for example {PLAN.example}.",
            )
    return tuple(dict.fromkeys(plans))


def dialect_of(text: str) -> str:
    """Return the dialect of a configuration that `read_plans` can read: "2022", "2023" or "2024"."""
    text = text.strip()
    if text.startswith("["):
        return "2024"
    entries = [entry.strip() for entry in text.split(",") if entry.strip()]
    return "2023" if all(re.fullmatch(PLAN.pattern, entry) for entry in entries) else "2022"


def _json_entries(text: str) -> list[str]:
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise OptionError(
            "The list of plans is no JSON.", why=f"{error}.", fix=f'Write for example ["{PLAN.example}"].'
        ) from None
    if not all(isinstance(entry, str) for entry in entries):
        raise OptionError(
            "The list of plans holds something that is no text.", fix=f'Write for example ["{PLAN.example}"].'
        )
    # One entry may hold several plans with commas, for one cluster that is recomputed as several.
    return [part for entry in entries for part in entry.split(",")]


# Variables whose text is not the value itself: by option, and the removed one by its own name.
_READERS: Mapping[str, Callable[[str], object]] = {
    "skip_check": _read_skip_check,
    "fallback": lambda text: text.upper() != "FALLBACK_DISABLE",
    "fallback_policy": _read_fallback_policy,
    # Any text at all, even "0", is on in 1.19.2 (_custom_op_symbolic_registry.ATEN_SDPA_FALLBACK).
    "sdpa_fallback": bool,
    "memory_plan": _read_plans,
    _OLD_PLANS: read_plans,
}


def _unknown(environ: Mapping[str, str]) -> list[str]:
    known = {name for one in switches() for name in (one.env, *one.older_env)} | {JSON_CONFIG}
    notes = []
    for name in sorted(environ):
        if name.startswith("ORTMODULE_") and name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
            notes.append(f"{name} is read by nothing{f'; did you mean {near[0]}?' if near else '.'}")
    return notes


def write(values: Mapping[str, Value], memory_plan_file: Path | None) -> dict[str, str]:
    """Write options as the variables that 1.19.2 reads."""
    # A variable that is left out has to be unset: where 1.19.2 takes even an empty text for a path or for "on", only
    # its absence means the default. The caller has written the plans, as a JSON list, to `memory_plan_file`.
    written: dict[str, str] = {}
    for one in switches():
        text = _WRITERS.get(one.name, _write_plain)(values[one.name])
        if one.env and text:
            written[one.env] = text
    if not values["fallback"]:
        written["ORTMODULE_FALLBACK_POLICY"] = "FALLBACK_DISABLE"
    if "ORTMODULE_MEMORY_OPT_CONFIG" in written:
        written["ORTMODULE_MEMORY_OPT_CONFIG"] = str(memory_plan_file)
    return written


def _write_plain(value: Value) -> str:
    if isinstance(value, tuple):
        return ",".join(value)
    return str(int(value)) if isinstance(value, bool) else str(value)


def _write_skip_check(value: Value) -> str:
    names = value if isinstance(value, tuple) and value else ("DISABLED",)
    return "|".join(f"SKIP_CHECK_{name}" for name in names)


def _write_fallback_policy(value: Value) -> str:
    # The variable holds one name; other sets of policies are for the engine to put into the fallback manager.
    return f"FALLBACK_{value[0]}" if isinstance(value, tuple) and len(value) == 1 else ""


# As _READERS; an empty text leaves the variable out.
_WRITERS: Mapping[str, Callable[[Value], str]] = {
    "skip_check": _write_skip_check,
    "fallback": lambda _: "",
    "fallback_policy": _write_fallback_policy,
    "sdpa_fallback": lambda value: "1" if value else "",
}


# ---- ORTModule's own JSON configuration (ortmodule.experimental.json_config) ----------------------------------------

_JSON_OPTIONS: Final[Mapping[str, str]] = {
    "PropagateCastOps.Strategy": "cast_strategy",
    "PropagateCastOps.Level": "cast_level",
    "PropagateCastOps.Allow": "cast_allow",
    "UseExternalGPUAllocator": "external_gpu_allocator",
    "EnableCustomAutogradFunction": "custom_autograd",
    "EnableGradAccOptimization": "grad_accumulation_cache",
    "RunSymbolicShapeInference": "symbolic_shape_inference",
    "UseStaticShape": "static_shape",
    "SkipCheck": "skip_check",
    "DebugOptions.LogLevel": "log_level",
    "DebugOptions.SaveONNX": "save_onnx",
    "DebugOptions.ONNXPrefix": "save_onnx_prefix",
    "DebugOptions.SaveONNXPath": "save_onnx_path",
    "UseMemoryEfficientGradient": "memory_efficient_gradient",
    "FallbackPolicy": "fallback_policy",
    "OnnxOpsetVersion": "opset",
}
# Of ORT's enumerations: what each value begins with, and the value that switches off.
_ENUMERATIONS: Final = {
    "skip_check": ("SKIP_CHECK_", "DISABLED"),
    "fallback_policy": ("FALLBACK_", "DISABLE"),
}


def read_json_config(path: Path) -> dict[str, Value]:
    """Read options by name from a file that `load_from_json` of ORTModule takes."""
    try:
        data = json.loads(text_of(path))
    except (OSError, ValueError, RecursionError) as error:
        raise _refusal(path, f"It is not a readable JSON file: {error}.") from None
    if not isinstance(data, dict):
        raise _refusal(path, "It holds no JSON object.")
    flat: dict[str, object] = {}
    for key, value in data.items():
        flat |= (
            {f"{key}.{inner}": one for inner, one in value.items()}
            if isinstance(value, dict)
            else {key: value}
        )
    changes: dict[str, Value] = {}
    for key, value in flat.items():
        if key not in _JSON_OPTIONS:
            raise _refusal(path, f"It has the key {shown(key)}, which ORTModule does not know.")
        name = _JSON_OPTIONS[key]
        try:
            items = _without_prefix(name, value)
            changes[name] = declaration(name).read(items)
        except OptionError as error:
            raise _refusal(path, f"Its key {shown(key)} is {shown(value)}. {error.why}") from None
        if name == "fallback_policy":
            changes["fallback"] = bool(items)
    return changes


def _without_prefix(name: str, value: object) -> object:
    """Strip the prefix of ORT's enumerations; return an empty list if the value that switches off is among them."""
    if name not in _ENUMERATIONS or not isinstance(value, list):
        return value
    prefix, off = _ENUMERATIONS[name]
    items = [str(item).removeprefix(prefix) for item in value]
    return [] if off in items else items


def _refusal(path: Path, why: str) -> OptionError:
    return OptionError(
        f"ORTModule's JSON configuration {path} cannot be used.",
        why=why,
        fix=f"Correct the file, or unset {JSON_CONFIG}.",
    )
