"""Runs that hang on state outside the model, and labs that are stepped in several threads at once."""

from __future__ import annotations

import copy
import random
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

import ortlab

if TYPE_CHECKING:
    from collections.abc import Callable

    Step = Callable[[], torch.Tensor]

INPUTS = torch.linspace(-1, 1, 12).view(3, 4)


def model_of(seed: int) -> nn.Module:
    """Make a small model."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


# ---- steps that hang on something outside the model ---------------------------------------------------------------


class Loop:
    """A model, its optimizer, and a step whose loss is multiplied by what a function returns."""

    count = 0

    def __init__(self) -> None:
        self.model = model_of(1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def step(self, scale: Callable[[], Any], x: torch.Tensor = INPUTS) -> torch.Tensor:
        """Take a step."""
        self.optimizer.zero_grad()
        loss = (self.model(x) ** 2).mean() * scale()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def _scheduler(loop: Loop) -> Step:
    around = SimpleNamespace(scheduler=torch.optim.lr_scheduler.ExponentialLR(loop.optimizer, 0.5))

    def step() -> torch.Tensor:
        loss = loop.step(lambda: 1.0)
        around.scheduler.step()
        return loss

    return step


def _averages(loop: Loop) -> Step:
    held = {name: one.detach().clone() for name, one in loop.model.named_parameters()}

    def distance() -> torch.Tensor:
        now = dict(loop.model.named_parameters())
        held.update({name: 0.5 * one + 0.5 * now[name].detach() for name, one in held.items()})
        return torch.stack([(one - now[name].detach()).abs().sum() for name, one in held.items()]).sum() + 1

    return lambda: loop.step(distance)


def _averaged_model(loop: Loop) -> Step:
    averaged = torch.optim.swa_utils.AveragedModel(copy.deepcopy(loop.model))

    def step() -> torch.Tensor:
        averaged.update_parameters(loop.model)
        return loop.step(lambda: 1 + averaged(INPUTS).detach().abs().mean())

    return step


def _generator(loop: Loop) -> Step:
    own = torch.Generator().manual_seed(3)
    return lambda: loop.step(lambda: torch.rand((), generator=own))


def _generator_of_numpy(loop: Loop) -> Step:
    own = SimpleNamespace(random=np.random.default_rng(3))
    return lambda: loop.step(lambda: float(own.random.uniform()))


def _counter(loop: Loop) -> Step:
    count = 0

    def step() -> torch.Tensor:
        nonlocal count
        count += 1
        loop.optimizer.param_groups[0]["lr"] = 0.1 / count
        return loop.step(lambda: 1.0)

    return step


def _counter_of_class(loop: Loop) -> Step:
    def scale() -> float:
        Loop.count += 1
        return 1 / Loop.count

    return lambda: loop.step(scale)


def _scaler(loop: Loop) -> Step:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)

    def step() -> torch.Tensor:
        loop.optimizer.zero_grad()
        loss = (loop.model(INPUTS) ** 2).mean()
        scaler.scale(loss).backward()
        scaler.step(loop.optimizer)
        scaler.update()
        return loss.detach() * scaler.get_scale()

    return step


def _loader(loop: Loop) -> Step:
    data = torch.utils.data.TensorDataset(torch.randn(64, 4))
    batches = iter(torch.utils.data.DataLoader(data, batch_size=4, shuffle=True))
    return lambda: loop.step(lambda: 1.0, next(batches)[0])


def _generator_function(loop: Loop) -> Step:
    rates = (0.01 * number for number in range(1000))

    def step() -> torch.Tensor:
        loop.optimizer.param_groups[0]["lr"] = next(rates)
        return loop.step(lambda: 1.0)

    return step


def _annealed(loop: Loop) -> Step:
    loop.model.sharpness = 1.0

    def step() -> torch.Tensor:
        loop.model.sharpness *= 0.5
        return loop.step(lambda: getattr(loop.model, "sharpness"))  # noqa: B009 - as configurable loops do

    return step


def _losses(loop: Loop) -> Step:
    losses = [1.0]

    def step() -> torch.Tensor:
        losses.append(float(loop.step(lambda: 1 + random.choice(losses))))
        return torch.tensor(losses[-1])

    return step


RERUNS: dict[str, Callable[[Loop], Step]] = {
    "a scheduler on an object": _scheduler,
    "averages of weights in a dict": _averages,
    "an averaged model of torch": _averaged_model,
    "a generator of torch": _generator,
    "a generator of NumPy": _generator_of_numpy,
    "a counter": _counter,
    "a counter of a class": _counter_of_class,
    "a gradient scaler": _scaler,
    "an iterator of a DataLoader": _loader,
    "a generator of learning rates": _generator_function,
    "a number of the model that is annealed": _annealed,
    "losses so far, of which one is drawn": _losses,
}
QUICK_RERUNS = ("averages of weights in a dict", "a generator of learning rates")


def count_rerun(case: str, _: int) -> dict[str, Any]:
    """Run three steps twice from one start: the losses are equal, or the run says what nothing puts back."""
    loop = Loop()
    lab = ortlab.wrap(loop.model, log_level="ERROR")
    first = lab.step(RERUNS[case](loop), n=3, memory=False)
    again = lab.rerun(memory=False)
    page = " ".join(str(lab.compare()).split())
    equal = again.losses == first.losses
    said = "nothing puts back" in page or again.data_digest != first.data_digest
    verdict = "equal" if equal else "said" if said else "lost"
    which = [] if equal or said else [f"{first.losses} and {again.losses}"]
    return {
        "case": case,
        "tried": 1,
        "violations": int(verdict == "lost"),
        "verdict": verdict,
        "which": which,
    }


# ---- threads ------------------------------------------------------------------------------------------------------

THREADED = {
    **{
        f"{pair}, {seed}": (pair, seed)
        for pair in ("ort, ort", "ort, eager", "eager, eager")
        for seed in (1, 2)
    },
    **{
        f"another model beside, {where}, {engine}": (where, engine)
        for where in ("in a thread of its own", "in a thread of the step", "in the step")
        for engine in ("ort", "eager")
    },
}

QUICK_THREADED = ("ort, eager, 1", "another model beside, in the step, ort")


class Pausing:
    """A training that lets other threads run between its parts, at moments that a seed decides."""

    def __init__(self, seed: int) -> None:
        self.model = model_of(seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.draw = random.Random(seed)

    def step(self) -> torch.Tensor:
        """Take a step."""
        self.optimizer.zero_grad()
        loss = (self.model(INPUTS) ** 2).mean()
        self.pause()
        loss.backward()
        self.pause()
        self.optimizer.step()
        self.pause()
        return loss.detach()

    def pause(self) -> None:
        """Let other threads run."""
        time.sleep(0.004 * self.draw.random())

    def weights(self) -> list[torch.Tensor]:
        """Return copies of the weights, and the steps that the optimizer has made."""
        made = [one["step"].clone() for one in self.optimizer.state.values()]
        return [*(one.detach().clone() for one in self.model.parameters()), *made]


def count_threads(case: str, _: int) -> dict[str, Any]:
    """Run in threads, and hold what comes of it against the same without."""
    what, how = THREADED[case]
    faults = _two_labs(what.split(", "), how) if isinstance(how, int) else _beside(what, how)
    return {"case": case, "tried": 1, "violations": int(bool(faults)), "which": faults}


def _two_labs(engines: list[str], seed: int) -> list[str]:
    seeds, steps, faults = (seed, seed + 10), (8, 12), []
    alone = []
    for engine, own, number in zip(engines, seeds, steps, strict=True):
        pausing = Pausing(own)
        lab = ortlab.wrap(pausing.model, engine=engine, log_level="ERROR")
        alone.append((lab.step(pausing.step, n=number, memory=False).losses, pausing.weights()))
    both = [Pausing(own) for own in seeds]
    labs = [
        ortlab.wrap(one.model, engine=name, log_level="ERROR")
        for one, name in zip(both, engines, strict=True)
    ]

    def run(place: int) -> None:
        try:
            losses = labs[place].step(both[place].step, n=steps[place], memory=False).losses
            expected, weights = alone[place]
            if losses != expected or not _equal(both[place].weights(), weights):
                faults.append(f"lab {place} has the losses {losses}, alone {expected}")
            labs[place].restore()
            if both[place].optimizer.state:
                faults.append(f"the optimizer of lab {place} is not put back")
        except Exception as error:  # noqa: BLE001 - it is the result
            faults.append(f"lab {place}: {type(error).__name__}: {error}"[:200])

    threads = [threading.Thread(target=run, args=(place,)) for place in (0, 1)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return faults


def _beside(where: str, engine: str) -> list[str]:
    """Train another model beside the lab's: what the step does with it is undone with the step, all else is left."""
    mine, other, over = Pausing(1), Pausing(2), threading.Event()
    lab = ortlab.wrap(mine.model, engine=engine, log_level="ERROR")

    def step() -> torch.Tensor:
        if where == "in a thread of the step":
            thread = threading.Thread(target=other.step)
            thread.start()
            loss = mine.step()
            thread.join()
            return loss
        if where == "in the step":
            other.step()
        return mine.step()

    def go_on() -> None:
        while not over.is_set():
            other.step()

    plain = mine.step
    before = other.weights()
    is_apart = where == "in a thread of its own"
    thread = threading.Thread(target=go_on) if is_apart else None
    if thread is not None:
        thread.start()
    run = lab.step(plain if is_apart else step, n=6, memory=False)
    over.set()
    if thread is not None:
        thread.join()
    after = other.weights()
    lab.restore()
    faults = [] if mine.optimizer.state == {} else ["the lab's own optimizer is not put back"]
    if len(run.steps) != 6 or any(one.backward_ms <= 0 for one in run.steps):  # noqa: PLR2004 - as asked for
        faults.append(f"the run has {len(run.steps)} steps, some without a backward")
    if not _equal(other.weights(), after if is_apart else before):
        left = "as it was after" if _equal(other.weights(), after) else "neither as before nor as after"
        faults.append(f"the other model is {left}")
    return faults


def _equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))
