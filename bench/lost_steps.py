"""Steps that change something and fail: all of it is undone, and the user's own exception is what is raised."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import torch
from lost_state import FailedError, Remembering, Training, apart
from torch import nn
from torch.nn.utils import prune

import ortlab

if TYPE_CHECKING:
    from collections.abc import Callable

    Way = Callable[[Training], object]


def _failing(*_: object) -> None:
    raise FailedError("in a hook")


def _in_the_backward(one: Training) -> None:
    loss = one.loss(one.inputs)
    loss.register_hook(_failing)
    loss.backward()


def _in_the_scaler(one: Training) -> None:
    one.scaler.scale(one.loss(one.inputs)).backward()
    one.scaler.unscale_(one.optimizer)


MODEL: dict[str, Way] = {
    "weight written": lambda one: one.model.head.weight.data.add_(1.0),
    "weight given other data": lambda one: setattr(one.model.head.weight, "data", torch.zeros(3, 4)),
    "parameter replaced": lambda one: setattr(one.model.head, "weight", nn.Parameter(torch.zeros(1, 8))),
    "parameter taken away": lambda one: setattr(one.model.head, "bias", None),
    "parameter added": lambda one: setattr(one.model, "scale", nn.Parameter(torch.ones(1))),
    "requires_grad flipped": lambda one: one.model.requires_grad_(requires_grad=False),
    "gradients replaced": lambda one: [
        setattr(p, "grad", torch.ones_like(p)) for p in one.model.parameters()
    ],
    "buffer written": lambda one: one.model.shift.fill_(7.0),
    "buffer of another dtype": lambda one: setattr(one.model, "shift", torch.zeros(1)),
    "buffer deleted": lambda one: delattr(one.model.layers[1], "running_mean"),
    "model made half": lambda one: one.model.half(),
    "evaluation mode": lambda one: one.model.eval(),
    "layer added": lambda one: one.model.layers.append(nn.Linear(8, 8)),
    "layer replaced": lambda one: setattr(one.model, "head", nn.Linear(8, 1)),
    "layer removed": lambda one: one.model.layers.pop(3),
    "rate of dropout changed": lambda one: setattr(one.model.layers[3], "p", 0.5),
    "number that the forward reads": lambda one: setattr(one.model, "temperature", 0.5),
    "layer pruned": lambda one: prune.l1_unstructured(one.model.head, "weight", 0.5),
    "hooks on a layer": lambda one: (
        one.model.head.register_forward_hook(lambda *_: None),
        one.model.head.register_full_backward_hook(lambda *_: None),
    ),
    "hooks on parameters": lambda one: (
        one.model.head.weight.register_hook(lambda gradient: 2 * gradient),
        one.model.head.bias.register_post_accumulate_grad_hook(lambda _: None),
    ),
}
AROUND: dict[str, Way] = {
    "optimizer stepped": lambda one: one.optimizer.step(),
    "group of parameters added": lambda one: one.optimizer.add_param_group(
        {"params": [nn.Parameter(torch.ones(2))], "lr": 7.0}
    ),
    "parameters taken from their group": lambda one: one.optimizer.param_groups[0]["params"].clear(),
    "learning rate set": lambda one: one.optimizer.param_groups[0].update(lr=7.0),
    "optimizer emptied": lambda one: one.optimizer.state.clear(),
    "optimizer replaced": lambda one: setattr(one, "optimizer", Remembering(one.model.parameters(), lr=7.0)),
    "hook on the optimizer": lambda one: one.optimizer.register_step_pre_hook(
        lambda *_: one.optimizer.zero_grad()
    ),
    "scheduler stepped": lambda one: (one.scheduler.step(), setattr(one.scheduler, "gamma", 0.5)),
    "scaler left between its calls": _in_the_scaler,
    "random numbers drawn": lambda one: (
        torch.rand(3),
        torch.rand(3, generator=one.generator),
        random.random(),
    ),
    "numbers in Python": lambda one: (setattr(one, "done", 7), one.averages.update(another=1.0)),
    "forward that fails": lambda one: (setattr(one.model, "broken", True), one.step()),
    "backward that fails": _in_the_backward,
    "optimizer that fails": lambda one: (one.optimizer.register_step_post_hook(_failing), one.step()),
}
WAYS = MODEL | AROUND
CASES = tuple(WAYS)
QUICK = CASES[::12]


def count(case: str, _: int) -> dict[str, Any]:
    """Let a step fail, look at what is left, and at what the next step does."""
    trained = Training()
    lab = ortlab.wrap(trained.model, log_level="ERROR")
    lab.step(trained.step, n=2, memory=False)
    before, options, kept = trained.state(), lab.options, trained.keep()
    expected = trained.step()
    after = trained.state()
    trained.load(kept)

    def fails() -> None:
        trained.step()
        WAYS[case](trained)
        raise FailedError("at the end of the step")

    faults = apart(trained.state(), before)
    assert not faults, faults  # `load` has put all back
    try:
        lab.step(fails, n=2, memory=False)
        faults.append("nothing was raised")
    except FailedError:
        pass
    except Exception as error:  # noqa: BLE001 - it is the result
        faults.append(f"raised was {type(error).__name__}: {error}"[:200])
    faults += [f"{name} is not as it was" for name in apart(trained.state(), before)[:6]]
    if lab.options != options or len(lab.runs) != 1:
        faults.append(f"{len(lab.runs)} runs, {lab.options!r}")
    try:
        loss = trained.step()
        if not torch.equal(loss, expected):
            faults.append(f"the next step has the loss {float(loss)}, not {float(expected)}")
        faults += [f"after the next step, {name} is another" for name in apart(trained.state(), after)[:6]]
    except Exception as error:  # noqa: BLE001 - it is the result
        faults.append(f"the next step fails: {type(error).__name__}: {error}"[:200])
    return {"case": case, "tried": 1, "violations": int(bool(faults)), "which": faults[:6]}
