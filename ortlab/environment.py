"""Options from and to the ORTMODULE_* environment variables, those of 1.19.2 and those of earlier releases."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path

from ortlab.errors import OptionError
from ortlab.switches import Switch, Value, translate_old_plans

# Read by 1.19.2 in places that no option stands for.
_OTHER_VARIABLES = frozenset({"ORTMODULE_TORCH_CPP_DIR", "ORTMODULE_JSON_CONFIG_PATH"})
_SKIP_PREFIX = "SKIP_CHECK_"
_FALLBACK_PREFIX = "FALLBACK_"


def read(environ: Mapping[str, str], switches: tuple[Switch, ...]) -> tuple[dict[str, Value], tuple[str, ...]]:
    """Read the variables that are set.

    Parameters
    ----------
    environ
        Variables by name; those that do not begin with "ORTMODULE_" are ignored.
    switches
        The declarations to read for.

    Returns
    -------
    changes : dict of str to Value
        Options by name.
    notes : tuple of str
        What a user should know: translated, ignored and acting variables.

    Raises
    ------
    OptionError
        A variable has a value that makes no sense.
    """
    changes: dict[str, Value] = {}
    notes: list[str] = []
    for one in switches:
        set_names = [name for name in (one.env, *one.older_env) if name and name in environ]
        if not set_names:
            continue
        name = set_names[0]
        value = _read_one(one, name, environ[name])
        if value is None:
            continue
        changes[one.name] = value
        if name in one.older_env:
            notes.append(f"{name} is no longer read by ORTModule 1.19.2; taken as {one.name}={value!r}.")
        elif value != one.default:
            notes.append(f"{name} sets {one.name}={value!r}.")
        notes += [f"{older} is ignored, because {name} is set." for older in set_names[1:]]
    return changes, (*notes, *_unknown(environ, switches))


def _read_one(one: Switch, name: str, text: str) -> Value | None:
    """Value of a variable, or None where it says nothing about this switch."""
    try:
        if name == "ORTMODULE_ENABLE_MEMORY_ALLEVIATION":
            return one.read(translate_old_plans(text))
        if one.name == "memory_plan":
            return one.read(_plans_in(text))
        if one.name == "skip_check":
            names = [part.strip().removeprefix(_SKIP_PREFIX) for part in text.split("|")]
            return () if "DISABLED" in names else one.read(names)
        if one.name == "fallback":
            return text.strip() != "FALLBACK_DISABLE"
        if one.name == "fallback_policy":
            policy = text.strip().removeprefix(_FALLBACK_PREFIX)
            return None if policy == "DISABLE" else one.read(policy)
        if one.name == "sdpa_fallback":
            # 1.19.2 takes any text at all, even "0", for on (_custom_op_symbolic_registry.ATEN_SDPA_FALLBACK).
            return text != ""
        return one.read(text)
    except OptionError as error:
        raise OptionError(
            f"The environment variable {name} is {text!r}, which makes no sense.",
            why=error.why or error.what,
            fix=f"Unset {name}, or give it a value such as {one.example}.",
        ) from None


def _plans_in(text: str) -> list[str] | str:
    """Plans of ORTMODULE_MEMORY_OPT_CONFIG: 1.19.2 wants a JSON file, earlier releases took the plans themselves."""
    path = Path(text)
    if ":" in path.name and path.suffix != ".json":
        return text
    try:
        plans = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        message = f"{text} is not a readable JSON file"
        raise OptionError(message, why=f"The file cannot be read as JSON: {error}.") from None
    if not isinstance(plans, list) or not all(isinstance(plan, str) for plan in plans):
        message = f"{text} does not hold a list of plans"
        raise OptionError(message, why='The file must hold a JSON list of plans, such as ["Gelu+:1:-1"].')
    return plans


def _unknown(environ: Mapping[str, str], switches: tuple[Switch, ...]) -> tuple[str, ...]:
    known = {name for one in switches for name in (one.env, *one.older_env)} | _OTHER_VARIABLES
    notes = []
    for name in sorted(environ):
        if name.startswith("ORTMODULE_") and name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
            notes.append(f"{name} is not read by anything" + (f"; did you mean {near[0]}?" if near else "."))
    return tuple(notes)


def write(values: Mapping[str, Value], switches: tuple[Switch, ...], memory_plan_file: Path | None) -> dict[str, str]:
    """Write options as the variables that 1.19.2 reads.

    Parameters
    ----------
    values
        Options by name.
    switches
        The declarations to write.
    memory_plan_file
        Where the caller has put the plans, as a JSON list; used only if there are any.

    Returns
    -------
    dict of str to str
        Variables to set. A variable that is left out has to be unset: where 1.19.2 takes an empty text for a
        path or for "on", only absence means the default.
    """
    written: dict[str, str] = {}
    for one in switches:
        value = values[one.name]
        if not one.env or one.name == "fallback_policy":
            continue
        if one.name == "memory_plan":
            if value:
                written[one.env] = str(memory_plan_file)
        elif one.name == "skip_check":
            names = value if isinstance(value, tuple) and value else ("DISABLED",)
            written[one.env] = "|".join(_SKIP_PREFIX + name for name in names)
        elif one.name == "fallback":
            policy = values["fallback_policy"] if value else "DISABLE"
            if policy != "DEFAULT":
                written[one.env] = f"{_FALLBACK_PREFIX}{policy}"
        elif isinstance(value, bool):
            if value or one.name != "sdpa_fallback":
                written[one.env] = "1" if value else "0"
        elif value != "":
            written[one.env] = str(value)
    return written
