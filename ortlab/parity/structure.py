"""How the calls and the modules of a run hang together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from ortlab.parity.pairs import Site

Call = tuple[str, int]
"""Path of a module, and which of its calls in the step."""


@dataclass
class Structure:
    """How the calls of a run hang together; what a divergence is traced back with."""

    # By step and call: the call whose forward made it; None for one of the training step itself.
    callers: dict[tuple[int, Call], Call | None] = field(default_factory=dict)
    # By site of an input: the site of the output that it is.
    sources: dict[Site, Site] = field(default_factory=dict)
    # By site of an output: that of the outer module that returned the same tensor.
    returned_by: dict[Site, Site] = field(default_factory=dict)
    # By site of an output that its module has used itself for what else it returns: whether others use it, too.
    own_use: dict[Site, bool] = field(default_factory=dict)
    # By path of a module and name of its parameter: the modules that have that parameter, if they are several.
    sharing: dict[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)


def sharing(module: torch.nn.Module) -> dict[tuple[str, str], tuple[str, ...]]:
    """Return which modules share a parameter; see `Structure`."""
    owners: dict[int, list[tuple[str, str]]] = {}
    for path, part in module.named_modules():
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(parameter), []).append((path, name))
    return {
        owner: tuple(dict.fromkeys(path for path, _ in of_one))
        for of_one in owners.values()
        for owner in of_one
        if len(of_one) > 1
    }
