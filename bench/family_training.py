"""Train one family on ONNX Runtime, in eager PyTorch and in eager PyTorch with float64, and compare."""

from __future__ import annotations

import copy
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from report import REPOSITORY

if TYPE_CHECKING:
    import torch
    from family_list import Family

FOLDERS = rf"/\S*/site-packages/|{re.escape(str(REPOSITORY))}/"
"""What stands before the names of files of this repository and of installed packages."""
STEPS = 4
TOLERANCE = 1e-5
MOVED = 4
"""How often first weights change in their last digit: where one rounding decides, as at a ReLU, one may miss it."""
FLOOR = 1e-2
"""Part of the largest entry of a kind below which a tensor is compared with that entry, as in the zoo."""
ROUNDING = 3.0
"""How many times PyTorch's own error against float64 counts as rounding, too."""


def train(family: Family, attention: str) -> dict[str, Any]:
    """Return what four steps of one family gave.

    Parameters
    ----------
    family
        What to build.
    attention
        "eager" or "sdpa".

    Returns
    -------
    dict
        `verdict` is one of

        - ``within``: loss, gradients, parameters and buffers of all steps within 1e-5 of PyTorch's;
        - ``rounding``: not, but either no further from float64 than three times PyTorch's own float32, or no further
          from PyTorch than three times the most that PyTorch moves by when its first weights change in their last
          digit, in `MOVED` ways;
        - ``differs``: neither;
        - ``error``: ONNX Runtime did not train it;
        - ``not run``: eager PyTorch does not run this configuration, so that it counts for nothing.

        `difference` is the largest one of a tensor, relative to its own largest entry (or to a hundredth of the
        largest of its kind), `of all` relative to the largest entry of its kind.
    """
    import torch
    from family_list import loss_of

    started = time.monotonic()
    row: dict[str, Any] = {"model": family.model, "attention": attention}
    try:
        model, batch = family.build(attention)
        loss_of(copy.deepcopy(model).train()(**batch)).backward()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is no matter of ONNX Runtime
        return row | {"verdict": "not run", "reason": said(error)}
    row["parameters"] = sum(one.numel() for one in model.parameters())
    try:
        found = compared([copy.deepcopy(model).train(), copy.deepcopy(model).train()], batch)
        if found["verdict"] != "within":
            found = compared(judged(model.train()), batch)
        row |= found
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - it is the result
        row |= {"verdict": "error", "reason": said(error)}
    torch.manual_seed(0)
    return row | {"seconds": round(time.monotonic() - started, 1)}


def judged(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return a model, it again, it with other last digits, several times, and it in float64."""
    moved = [in_the_last_digit(copy.deepcopy(model), seed) for seed in range(1, 1 + MOVED)]
    return [model, copy.deepcopy(model), *moved, copy.deepcopy(model).double()]


def compared(  # noqa: C901 - one step after the other
    sides: list[torch.nn.Module], batch: dict[str, Any]
) -> dict[str, Any]:
    """Train the first on ONNX Runtime beside the same in eager PyTorch, and beside those to judge it by, if given."""
    import torch
    from family_list import loss_of

    import ortlab

    lab = ortlab.wrap(sides[0], log_level="ERROR")
    exact = sides[-1] if len(sides) > 2 else None  # noqa: PLR2004 - those to judge by
    optimizers = [torch.optim.SGD(side.parameters(), lr=1e-2, momentum=0.9) for side in sides]
    worst = Worst()
    moved = Worst()
    errors = [0.0, 0.0]
    for step in range(STEPS):
        losses = []
        for side in list(sides):
            torch.manual_seed(step)
            try:
                losses.append(loss_of(side(**(in_float64(batch) if side is exact else batch))))
            except Exception:
                if side is not exact:
                    raise
                sides, optimizers = sides[:-1], optimizers[:-1]  # some models name float32 in their code
        assert lab.status.executed_by == "ort"
        for loss in losses:
            loss.backward()
        states = [
            {"loss": {"": loss.detach()}, "gradient of": gradients(side)}
            for loss, side in zip(losses, sides, strict=True)
        ]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for state, side in zip(states, sides, strict=True):
            state["parameter"] = dict(side.named_parameters())
            state["buffer"] = dict(side.named_buffers())
        worst.note(states[0], states[1], step)
        for state in states[2 : 2 + MOVED]:
            moved.note(state, states[1], step)
        if exact is not None and sides[-1] is exact:
            errors = [
                max(seen, largest_error(state, states[-1]))
                for seen, state in zip(errors, states[:2], strict=True)
            ]
    row = {
        "difference": worst.difference,
        "where": worst.where,
        "of all": worst.of_all,
        "first step": worst.first_step,
        "loss": worst.loss,
        "moved": moved.difference,
        "by torch": [one.text for one in lab.messages if "PyTorch computes inside" in one.text][-1:],
    }
    lab.unwrap(forget=True)
    if exact is not None and sides[-1] is exact:
        row |= {"error of ORT": errors[0], "error of PyTorch": errors[1]}
    return row | {"verdict": verdict(row)}


def in_the_last_digit(module: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Change each float32 parameter by about one rounding."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for one in module.parameters():
            if one.dtype is torch.float32:
                one.mul_(1 + 2**-24 * torch.randn(one.shape, generator=generator))
    return module


def verdict(row: dict[str, Any]) -> str:
    """Judge what was compared; a NaN is within nothing."""
    if row["difference"] <= TOLERANCE:
        return "within"
    own = row.get("error of PyTorch")
    is_rounding = own is not None and row["error of ORT"] <= ROUNDING * own
    return "rounding" if is_rounding or row["difference"] <= ROUNDING * row["moved"] else "differs"


@dataclass
class Worst:
    """The largest differences of two trainings, and where the first of them is."""

    difference: float = 0.0
    where: str = ""
    of_all: float = 0.0
    first_step: float = 0.0
    loss: float = 0.0

    def note(self, actual: Any, expected: Any, step: int) -> None:
        """Keep the largest differences of a step."""
        for kind, tensors in expected.items():
            assert actual[kind].keys() == tensors.keys(), f"not the same {kind}"
            for name, apart, own, largest in differences(actual[kind], tensors):
                relative = apart / max(own, FLOOR * largest, 1e-30)
                if not relative <= self.difference:
                    self.difference, self.where = relative, f"{kind} {name}, step {step + 1}"
                self.of_all = max(self.of_all, apart / max(largest, 1e-30))
                if kind == "loss":
                    self.loss = max(self.loss, relative)
        if step == 0:
            self.first_step = self.difference


def largest_error(state: Any, exact: Any) -> float:
    """Return the largest difference from float64, relative as in `note`."""
    return max(
        apart / max(own, FLOOR * largest, 1e-30)
        for kind, tensors in exact.items()
        for _, apart, own, largest in differences(state[kind], tensors)
    )


def differences(actual: Any, expected: Any) -> list[tuple[str, float, float, float]]:
    """Return name, largest difference, largest entry, and the largest entry of all, for each tensor."""
    sizes = {name: one.double().abs().max().item() for name, one in expected.items() if one.numel()}
    largest = max(sizes.values(), default=0.0)
    return [
        (name, (actual[name].double() - expected[name].double()).abs().max().item(), own, largest)
        for name, own in sizes.items()
    ]


def gradients(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the gradients of a module by name, copied."""
    return {name: one.grad.clone() for name, one in module.named_parameters() if one.grad is not None}


def in_float64(batch: dict[str, Any]) -> dict[str, Any]:
    """Return a batch with its float32 tensors, such as images, in float64."""
    return {
        name: value.double() if hasattr(value, "is_floating_point") and value.is_floating_point() else value
        for name, value in batch.items()
    }


def said(error: BaseException) -> str:
    """Return an error in one line."""
    text = f"{type(error).__name__}: {getattr(error, 'what', '') or error} {getattr(error, 'why', '') or ''}"
    return " ".join(re.sub(FOLDERS, "", text).split())[:400]
