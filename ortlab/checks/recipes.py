"""The four recipes of ORTModule's guidelines as code for a user's names: FusedAdam, DeepSpeed, Apex, all together."""

from __future__ import annotations

import importlib.util
import json
from typing import TYPE_CHECKING, Any, Final

from ortlab.engine.installation import have
from ortlab.errors import OptionError, did_you_mean
from ortlab.options.switches import REASONS, Need
from ortlab.records.checks import Recipe

if TYPE_CHECKING:
    import torch

_ADAMS: Final = ("Adam", "AdamW")
"""Optimizers of torch that FusedAdam can take the place of."""

_OWN_LR: Final = "1e-4"


_TITLES: Final = {
    "fused_adam": "ONNX Runtime and FusedAdam",
    "deepspeed": "ONNX Runtime inside DeepSpeed ZeRO, with FP16_Optimizer",
    "apex": "ONNX Runtime around Apex O2, with FP16_Optimizer",
    "all": "ONNX Runtime, FusedAdam, DeepSpeed ZeRO and FP16_Optimizer",
}
RECIPES: Final = tuple(_TITLES)
"""Names of the recipes."""

_PACKAGES: Final = {"deepspeed": "deepspeed", "apex": "apex", "all": "deepspeed"}
_INSTALL: Final = {
    "deepspeed": "pip install 'deepspeed<=0.9.2'",
    "apex": "build it with its CUDA extensions, https://github.com/NVIDIA/apex",
}


def recipe(
    name: str,
    *,
    model: str = "model",
    optimizer: str = "optimizer",
    like: torch.optim.Optimizer | None = None,
    wrapped: bool = False,
) -> Recipe:
    """Write the code of a recipe.

    Parameters
    ----------
    name
        One of `RECIPES`.
    model, optimizer
        The names that the code uses.
    like
        The optimizer that is there: FusedAdam takes its place with the same numbers, if it is Adam or AdamW. None
        writes one.
    wrapped
        Whether the model runs on ONNX Runtime already.

    Returns
    -------
    Recipe
        Its code has not been run.

    Raises
    ------
    OptionError
        If there is no such recipe, or FusedAdam cannot stand for `like`.

    Examples
    --------
    >>> print(ortlab.recipe("fused_adam", model="net").code)
    """
    if name not in _TITLES:
        fix = f"{did_you_mean(name, RECIPES)} Recipes: {', '.join(RECIPES)}.".strip()
        raise OptionError(f"There is no recipe {name!r}.", fix=fix)
    is_fused = name in {"fused_adam", "all"}
    wrap = "" if wrapped else f"lab = ortlab.wrap({model})"
    if is_fused:
        made = f"{optimizer} = {_fused(model, optimizer, like)}"
    else:
        made = "" if like else f"{optimizer} = torch.optim.AdamW({model}.parameters(), lr={_OWN_LR})"
    lines = {
        "fused_adam": (wrap, made),
        "deepspeed": (
            _after("before DeepSpeed: ORT has to be inside", wrap),
            made,
            _deepspeed(model, optimizer),
        ),
        "apex": (made, _apex(model, optimizer), _after("after amp, which replaces the forward", wrap)),
        "all": (_after("before DeepSpeed: ORT has to be inside", wrap), made, _deepspeed(model, optimizer)),
    }[name]
    body = "\n".join(line for line in lines if line)
    return Recipe(name, _TITLES[name], f"{_imports(name, body)}\n\n{body}\n", _missing(name))


def _imports(name: str, body: str) -> str:
    libraries = {"deepspeed": "import deepspeed", "apex": "from apex import amp", "all": "import deepspeed"}
    functions = [one for one in ("fp16_optimizer", "fused_adam") if f"{one}(" in body]
    lines = [libraries.get(name, ""), "import torch" if "torch." in body else ""]
    lines += [
        "import ortlab" if "ortlab.wrap" in body else "",
        f"from ortlab.optim import {', '.join(functions)}",
    ]
    return "\n".join(line for line in lines if line)


def _after(why: str, line: str) -> str:
    return line and f"{line}  # {why}"


def _fused(model: str, optimizer: str, like: torch.optim.Optimizer | None) -> str:
    if like is None:
        return f"fused_adam({model}.parameters(), lr={_OWN_LR}, weight_decay=0.01)"
    kind = type(like).__name__
    groups: list[dict[str, Any]] = like.param_groups
    if type(like).__module__.split(".")[0] != "torch" or kind not in _ADAMS:
        raise OptionError(
            f"FusedAdam cannot take the place of {optimizer}, a {kind}.",
            why="It computes Adam and AdamW.",
            fix=f"Delete {optimizer} for a recipe that makes one, or choose another recipe.",
        )
    if any(group.get("amsgrad") or group.get("maximize") for group in groups):
        raise OptionError(
            f"FusedAdam cannot take the place of {optimizer}: it has no amsgrad and no maximize.",
            fix=f"Make {optimizer} without them, or choose another recipe.",
        )
    mode = _mode(like)
    facts: dict[str, Any] = {name: float(groups[0][name]) for name in ("lr", "eps", "weight_decay")}
    facts |= {"betas": tuple(map(float, groups[0]["betas"])), "adam_w_mode": mode}
    values = ", ".join(f"{name}={value!r}" for name, value in facts.items())
    note = "  # L2 in the gradient; eps is added to the root before its correction, in torch after it" * (
        mode == 0
    )
    if len(groups) == 1:
        return f"fused_adam({model}.parameters(), {values}){note}"
    own = json.dumps(["params", "lr", "betas", "eps", "weight_decay"])
    kept = f"[{{key: group[key] for key in {own}}} for group in {optimizer}.param_groups]"
    return f"fused_adam(\n    {kept},\n    {values},\n){note}"


def _mode(like: torch.optim.Optimizer) -> int:
    """Choose mode 2, which has torch's place of eps, unless Adam decays: then the decay has to be that of L2."""
    decays = any(group["weight_decay"] for group in like.param_groups)
    return 0 if type(like).__name__ == "Adam" and decays else 2


def _deepspeed(model: str, optimizer: str) -> str:
    return f"""\
config = {{
    "train_micro_batch_size_per_gpu": 8,
    "fp16": {{"enabled": True}},
    "zero_optimization": {{"stage": 1}},
}}
engine, {optimizer}, _, _ = deepspeed.initialize(model={model}, optimizer={optimizer}, config=config)
{optimizer} = fp16_optimizer({optimizer})


def step(batch):
    loss = engine(**batch).loss
    engine.backward(loss)
    engine.step()
    return loss"""


def _apex(model: str, optimizer: str) -> str:
    return f"""\
{model}, {optimizer} = amp.initialize({model}, {optimizer}, opt_level="O2")
{optimizer} = fp16_optimizer({optimizer})"""


def _missing(name: str) -> tuple[str, ...]:
    package = _PACKAGES.get(name)
    if package is None:
        return ()
    absent = importlib.util.find_spec(package) is None
    said = [f"{package} is not installed: {_INSTALL[package]}."] if absent else []
    if Need.CUDA not in have():
        said.append(f"Training in float16 {REASONS[Need.CUDA]}.")
    return tuple(said)
