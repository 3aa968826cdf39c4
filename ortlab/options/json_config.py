"""Options from ORTModule's own JSON configuration (ortmodule.experimental.json_config)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ortlab.errors import OptionError
from ortlab.options.catalogue import declaration
from ortlab.options.switches import shown

if TYPE_CHECKING:
    from ortlab.options.switches import Value

VARIABLE = "ORTMODULE_JSON_CONFIG_PATH"

_OPTIONS: Mapping[str, str] = {
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
_PREFIXES = {"skip_check": "SKIP_CHECK_", "fallback_policy": "FALLBACK_"}
_OFF = {"skip_check": "DISABLED", "fallback_policy": "DISABLE"}


def read(path: Path) -> dict[str, Value]:
    """Read options by name from a file that `load_from_json` of ORTModule takes.

    Raises OptionError where the file cannot be read, is not a JSON object, or has an unknown key or a value that makes
    no sense.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _refusal(path, f"It is not a readable JSON file: {error}.") from None
    if not isinstance(data, dict):
        raise _refusal(path, "It holds no JSON object.")
    flat: dict[str, object] = {}
    for key, value in data.items():
        if isinstance(value, dict):
            flat |= {f"{key}.{inner}": inner_value for inner, inner_value in value.items()}
        else:
            flat[key] = value
    changes: dict[str, Value] = {}
    for key, value in flat.items():
        if key not in _OPTIONS:
            raise _refusal(path, f"It has the key {shown(key)}, which ORTModule does not know.")
        name = _OPTIONS[key]
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
    if name not in _PREFIXES or not isinstance(value, list):
        return value
    items = [str(item).removeprefix(_PREFIXES[name]) for item in value]
    return [] if _OFF[name] in items else items


def _refusal(path: Path, why: str) -> OptionError:
    return OptionError(
        f"ORTModule's JSON configuration {path} cannot be used.",
        why=why,
        fix=f"Mend the file, or unset {VARIABLE}.",
    )
