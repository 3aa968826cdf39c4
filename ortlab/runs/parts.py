"""The sub-modules that `only` means: paths, patterns and modules, found in a model and checked."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Iterator
from typing import Final, TypeAlias

import torch

from ortlab.errors import WrapError

Wish: TypeAlias = "str | torch.nn.Module"
Wishes: TypeAlias = "Wish | Iterable[Wish]"
"""A path, a pattern or a sub-module; or several."""

_SUGGESTED: Final = 3


def find_parts(model: torch.nn.Module, only: Wishes) -> dict[str, torch.nn.Module]:
    """Find the sub-modules of a model that are to be wrapped.

    Parameters
    ----------
    model
        The model.
    only
        Dotted paths as `model.named_modules()` gives them, patterns of such paths ("encoder.layer.*", where a star
        stands for one name or a part of it), or the sub-modules themselves; one or several. A container without a
        forward, such as a `ModuleList`, stands for what it holds.

    Returns
    -------
    dict
        Sub-modules by path, in the order of the model.

    Raises
    ------
    WrapError
        If nothing is named, a path leads nowhere or to something that is no module, a module is not in the model or
        is the model itself, has no forward, or lies inside another one that is named.
    """
    wishes: list[object] = [only] if isinstance(only, (str, torch.nn.Module)) else _listed(only)
    if not wishes:
        raise WrapError(
            "There is no part in the list.",
            why="`only` names the sub-modules that ONNX Runtime shall run, and it is empty.",
            fix='Name at least one, as in ortlab.wrap(model, only=["encoder"]), or leave `only` out.',
        )
    known = dict(model.named_modules(remove_duplicate=False))
    found: dict[int, str] = {}
    for wish in wishes:
        for path in _paths(model, wish, known):
            found.setdefault(id(known[path]), path)
    order = list(known)
    paths = sorted(found.values(), key=order.index)
    _refuse_overlaps(paths, known)
    return {path: known[path] for path in paths}


def _listed(only: object) -> list[object]:
    if not isinstance(only, Iterable):
        raise WrapError(
            f"`only` takes paths of sub-modules, not a {type(only).__name__}.",
            fix='Write for example ortlab.wrap(model, only=["encoder", "decoder.layers.3"]).',
        )
    return list(only)


def _paths(model: torch.nn.Module, wish: object, known: dict[str, torch.nn.Module]) -> Iterator[str]:
    if isinstance(wish, torch.nn.Module):
        path = next((path for path, module in known.items() if module is wish), None)
        if path is None:
            raise WrapError(
                f"The {type(wish).__name__} in `only` is not a part of this {type(model).__name__}.",
                why="Parts are sub-modules of the model that is wrapped; a copy of one is another module.",
                fix="Take it from the model itself, or name its path as model.named_modules() gives it.",
            )
        matching = [path]
    elif isinstance(wish, str):
        matching = [wish] if wish in known else _matching(wish, known)
        if not matching:
            raise _unknown(model, wish, known)
    else:
        raise WrapError(
            f"`only` takes paths of sub-modules, not a {type(wish).__name__}.",
            fix='Write for example ortlab.wrap(model, only=["encoder", "decoder.layers.3"]).',
        )
    for path in matching:
        if known[path] is model:
            raise WrapError(
                "The model itself is not a part of it.",
                fix="Leave `only` out to run the whole model on ONNX Runtime: ortlab.wrap(model).",
            )
        yield from _with_forward(path, known)


def _matching(pattern: str, known: Iterable[str]) -> list[str]:
    """Match name by name, so that a star does not reach into the parts of a part."""
    if not any(character in pattern for character in "*?["):
        return []
    wanted = pattern.split(".")
    return [
        path
        for path in known
        if path
        and len(names := path.split(".")) == len(wanted)
        and all(fnmatch.fnmatchcase(name, one) for name, one in zip(names, wanted, strict=True))
    ]


def _with_forward(path: str, known: dict[str, torch.nn.Module]) -> Iterator[str]:
    """Yield a module's path, or those of what it holds where it has no forward of its own."""
    module = known[path]
    if type(module).forward is not torch.nn.Module.forward or "forward" in module.__dict__:
        yield path
        return
    children = [f"{path}.{name}" for name, _ in module.named_children()]
    if not children:
        raise WrapError(
            f"{path!r} is a {type(module).__name__} without a forward.",
            why="ONNX Runtime runs the forward of a module, and this one only holds things.",
            fix="Name the module that uses it.",
        )
    for child in children:
        yield from _with_forward(child, known)


def _unknown(model: torch.nn.Module, path: str, known: Iterable[str]) -> WrapError:
    what = f"The model has no part {path!r}."
    held: object = model
    try:
        for name in path.split("."):
            held = getattr(held, name)
    except AttributeError:
        near = near_paths(path, known)
        if near:
            return WrapError(what, fix=f"Did you mean {' or '.join(map(repr, near))}?")
        return WrapError(what, fix="The paths of all parts: [name for name, _ in model.named_modules()].")
    return WrapError(
        f"{path!r} is no module.",
        why=f"It is a {type(held).__name__}, which has no forward that ONNX Runtime could run.",
        fix="Name the module that uses it; model.named_modules() lists all.",
    )


def near_paths(path: str, known: Iterable[str]) -> list[str]:
    """Find the paths that may be meant: those that end in it, and those that are written much like it."""
    paths = [one for one in known if one]
    ending = [one for one in paths if one.endswith(f".{path}")]
    close = difflib.get_close_matches(path, paths, n=_SUGGESTED, cutoff=0.6)
    last = path.rpartition(".")[2]
    same_name = [one for one in paths if one.rpartition(".")[2] == last]
    return list(dict.fromkeys([*ending, *close, *same_name]))[:_SUGGESTED]


def _refuse_overlaps(paths: list[str], known: dict[str, torch.nn.Module]) -> None:
    inside = {id(known[path]): path for path in paths}
    for path in paths:
        for module in known[path].modules():
            inner = inside.get(id(module), path)
            if inner != path:
                raise WrapError(
                    f"{inner!r} is a part of {path!r}.",
                    why="One module has one forward: what is inside a part is in that part's graph.",
                    fix=f"Leave out {inner!r} or {path!r}.",
                )
