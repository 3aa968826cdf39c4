"""A training with all that can be lost of it: in the model, in the optimizer and around it, and in random numbers."""

from __future__ import annotations

import copy
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator

State = dict[str, object]
"""What a training is, by name: tensors as their bytes with dtype and shape, all else as its text."""


class FailedError(Exception):
    """What the user's own code raises."""


class Model(nn.Module):
    """Has a buffer of another dtype than its weights, and numbers that its forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.0))
        self.head = nn.Linear(8, 1)
        self.register_buffer("shift", torch.full((1,), 0.1, dtype=torch.float64))
        self.temperature, self.broken = 1.0, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return one number a row."""
        if self.broken:
            raise FailedError("in the forward")
        return self.head(self.layers(x)) * self.temperature + self.shift.float()


class Remembering(torch.optim.NAdam):
    """Keeps a state of another dtype than its parameters, which torch's own `load_state_dict` would cast."""

    def step(self, closure: Any = None) -> Any:
        """Make a step, and remember the weights in bfloat16."""
        loss = super().step(closure)
        for group in self.param_groups:
            for one in group["params"]:
                self.state[one]["remembered"] = one.detach().bfloat16()
        return loss


class Training:
    """A training as people write it, on one object."""

    def __init__(self, seed: int = 5) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 - the generator that user code draws from
        self.model = Model()
        self.optimizer = Remembering(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)
        self.generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(6, 4)
        self.done, self.averages = 0, {"loss": 0.0}

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        """Run the forward on a batch to which every generator has added something."""
        drawn = torch.rand(batch.shape) + random.random() + float(np.random.rand())  # noqa: NPY002
        drawn = drawn + torch.rand(batch.shape, generator=self.generator)
        return (self.model(batch + drawn) ** 2).mean() / (1 + self.done)

    def step(self, batch: torch.Tensor | None = None) -> torch.Tensor:
        """Take a step."""
        self.optimizer.zero_grad()
        loss = self.loss(self.inputs if batch is None else batch)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.done += 1
        self.averages["loss"] = 0.9 * self.averages["loss"] + 0.1 * float(loss.detach())
        return loss.detach()

    def state(self) -> State:
        """Return what it is now."""
        return {
            **_of_model(self.model),
            **_of_optimizer(self.optimizer),
            **dict(_facts("scheduler", self.scheduler.state_dict())),
            **dict(_facts("scaler", self.scaler.state_dict())),
            **dict(_facts("random", (random.getstate(), np.random.get_state(), torch.get_rng_state()))),  # noqa: NPY002
            **dict(_facts("generator", self.generator.get_state())),
            **dict(_facts("Python", (self.done, self.averages, id(self.optimizer), id(self.scheduler)))),
        }

    def keep(self) -> Any:
        """Return copies from which `load` puts the state back, without help of ortlab's."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        kept = (self.optimizer.state_dict(), self.scheduler.state_dict(), self.scaler.state_dict())
        return copy.deepcopy(
            (
                [(one.detach(), one.grad) for one in tensors],
                *kept,
                (random.getstate(), np.random.get_state(), torch.get_rng_state()),  # noqa: NPY002
                self.generator.get_state(),
                (self.done, self.averages),
            )
        )

    def load(self, kept: Any) -> None:
        """Put back what `keep` returned."""
        tensors, optimizer, scheduler, scaler, drawn, own, (self.done, averages) = copy.deepcopy(kept)
        with torch.no_grad():
            for one, (value, gradient) in zip(
                [*self.model.parameters(), *self.model.buffers()], tensors, strict=True
            ):
                one.copy_(value)
                one.grad = gradient
        self.optimizer.state.clear()
        parameters = [one for group in self.optimizer.param_groups for one in group["params"]]
        self.optimizer.state.update({parameters[index]: one for index, one in optimizer["state"].items()})
        for group, saved in zip(self.optimizer.param_groups, optimizer["param_groups"], strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})
        self.scheduler.load_state_dict(scheduler)
        self.scaler.load_state_dict(scaler)
        random.setstate(drawn[0])
        np.random.set_state(drawn[1])  # noqa: NPY002
        torch.set_rng_state(drawn[2])
        self.generator.set_state(own)
        self.averages.update(averages)


def apart(now: State, then: State) -> list[str]:
    """Return the names of what differs in two states."""
    return [name for name in (now | then) if now.get(name) != then.get(name)]


def _of_model(model: nn.Module) -> State:
    found: State = {}
    for path, part in model.named_modules():
        tables = {name: value for name, value in vars(part).items() if isinstance(value, dict)}
        plain = {name: one for name, one in vars(part).items() if isinstance(one, (bool, int, float, str))}
        found[f"{path} class"] = type(part).__name__
        found[f"{path} attributes"] = repr(plain) + str(sorted(set(vars(part)) - {"_ortlab_takeover"}))
        found |= {
            f"{path} {name}": [(key, id(one)) for key, one in table.items()] for name, table in tables.items()
        }
    for name, one in (*model.named_parameters(), *model.named_buffers()):
        hooks = [
            len(getattr(one, table, None) or ())
            for table in ("_backward_hooks", "_post_accumulate_grad_hooks")
        ]
        found |= dict(_facts(name, (one, one.grad, one.requires_grad, hooks)))
    return found


def _of_optimizer(optimizer: torch.optim.Optimizer) -> State:
    tables = {name: value for name, value in vars(optimizer).items() if name.endswith("_hooks")}
    return {
        **dict(_facts("optimizer", optimizer.state_dict())),
        "optimizer's parameters": [[id(one) for one in group["params"]] for group in optimizer.param_groups],
        "optimizer's hooks": {name: len(table) for name, table in tables.items()},
    }


def _facts(name: str, value: Any) -> Iterator[tuple[str, object]]:
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
        yield name, (str(value.dtype), tuple(value.shape), flat.numpy().tobytes())
    elif isinstance(value, np.ndarray):
        yield name, (str(value.dtype), value.shape, value.tobytes())
    elif isinstance(value, dict):
        yield name, list(value)
        for key, one in value.items():
            yield from _facts(f"{name}.{key}", one)
    elif isinstance(value, (list, tuple)) and len(value) <= 50:  # noqa: PLR2004 - longer ones are of numbers
        for place, one in enumerate(value):
            yield from _facts(f"{name}.{place}", one)
    else:
        yield name, (type(value).__name__, repr(value))
