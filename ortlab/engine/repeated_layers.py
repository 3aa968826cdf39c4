"""The repeated layers of a model: what torch.utils.checkpoint is put around, layer by layer."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from ortlab.errors import OptionError

_SMALLEST_SHARE: Final = 0.1
"""Lists with fewer parameters than this share of the largest list's are adapters or heads, not layers."""

_CONTAINERS: Final = (torch.nn.ModuleList, torch.nn.Sequential)


@dataclass(frozen=True)
class Layers:
    """Modules that are checkpointed one by one, and where they are in the model."""

    path: str  # "encoder.block"
    modules: tuple[torch.nn.Module, ...]

    def __str__(self) -> str:
        """Write "6 T5Block in encoder.block"; of a module that was named itself, "T5Block encoder.block.0"."""
        kinds = ", ".join(dict.fromkeys(type(module).__name__ for module in self.modules))
        if len(self.modules) == 1:
            return f"{kinds} {self.path}"
        return f"{len(self.modules)} {kinds} in {self.path}"


def find_layers(model: torch.nn.Module, paths: Sequence[str] = ()) -> tuple[Layers, ...]:
    """Find the layers of a model, in the model's order.

    The user names `paths` as `model.named_modules()` gives them, or patterns of such; a `ModuleList` or a `Sequential`
    stands for what it holds. Without them: the largest (by parameters) `ModuleList` or `Sequential` of at least two
    modules of one class that have parameters, and every other such list with at least a tenth of its parameters; lists
    inside a layer of another one do not count. Raises OptionError if there is no such list, a path leads nowhere, or
    two paths have modules in common.
    """
    known = dict(model.named_modules())
    known.pop("")
    if not paths:
        return _repeated(model, known)
    chosen: dict[str, Layers] = {}
    for path in paths:
        matching = fnmatch.filter(known, path)
        if not matching:
            raise OptionError(
                f"{type(model).__name__} has no module {path!r} to checkpoint.",
                why="After the colon stand paths as model.named_modules() gives them, or patterns of such.",
                fix=f'For example {", ".join(repr(one) for one in list(known)[:3])}; or engine="checkpoint" alone.',
            )
        for name in matching:
            module = known[name]
            inner = tuple(dict.fromkeys(module)) if isinstance(module, _CONTAINERS) else (module,)
            if inner:
                chosen[name] = Layers(name, inner)
    _refuse_nests(chosen)
    return tuple(chosen[name] for name in known if name in chosen)


def _repeated(model: torch.nn.Module, known: Mapping[str, torch.nn.Module]) -> tuple[Layers, ...]:
    lists = {name: one for name, one in known.items() if isinstance(one, _CONTAINERS) and _alike(list(one))}
    outermost = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    sizes = {name: _numbers(lists[name]) for name in outermost}
    if not sizes:
        others = [name for name, one in known.items() if isinstance(one, _CONTAINERS)]
        seen = f" It has {', '.join(others[:3])}, which hold no such modules." if others else ""
        raise OptionError(
            f"{type(model).__name__} has no repeated layers to checkpoint.",
            why="Looked for a torch.nn.ModuleList or Sequential with at least two modules of one class that have "
            f"parameters.{seen}",
            fix="Name modules yourself, with a plus sign between them: "
            f'engine="checkpoint:{(others or ["+".join(list(known)[:2]) or "path"])[0]}".',
        )
    smallest = max(sizes.values()) * _SMALLEST_SHARE
    return tuple(
        Layers(name, tuple(dict.fromkeys(lists[name]))) for name, size in sizes.items() if size >= smallest
    )


def _alike(modules: Sequence[torch.nn.Module]) -> bool:
    kinds = {type(module) for module in modules}
    apart = len({id(module) for module in modules})
    return apart > 1 and len(kinds) == 1 and all(next(one.parameters(), None) is not None for one in modules)


def _numbers(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _refuse_nests(chosen: Mapping[str, Layers]) -> None:
    """Refuse a module that is named twice, or inside another one: it would be recomputed twice."""
    owner: dict[int, str] = {}
    for name, layers in chosen.items():
        held = [part for layer in layers.modules for part in layer.modules()]
        other = next((owner[id(part)] for part in held if id(part) in owner), None)
        if other is not None:
            raise OptionError(
                f"{name} and {other} have modules in common.",
                why="What lies inside a checkpointed module is recomputed with it already.",
                fix="Name one of the two.",
            )
        owner |= {id(part): name for part in held}
