"""Ctrl-C, once and twice within 60 ms, at random moments of long calls: the state before, or that of a whole call."""

from __future__ import annotations

import random
import resource
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from lost_state import Training, apart

import ortlab

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

STEPPING = ("wrap and step", "step", "rerun", "rerun with an option", "set and step")
"""What trains and leaves it so; studies leave the model as it was."""
AGAIN_S = (0.0005, 0.005, 0.02, 0.06)
TRIES = 20
"""Moments that are tried for one press; it may come after the end."""


class Setting:
    """A lab with its training."""

    def __init__(self) -> None:
        self.training = Training()
        self.lab: Any = self.wrapped()
        self.lab.step(self.training.step, n=2, memory=False)

    def wrapped(self) -> Any:
        """Wrap the model."""
        return ortlab.wrap(self.training.model, log_level="ERROR")

    def wrap_and_step(self) -> None:
        """Wrap the model anew, from its export on, and take a step."""
        self.lab = None
        self.lab = self.wrapped()
        self.lab.step(self.training.step, n=1, memory=False)


CALLS: dict[str, Callable[[Setting], object]] = {
    "wrap and step": Setting.wrap_and_step,
    "step": lambda one: one.lab.step(one.training.step, n=2),
    "rerun": lambda one: one.lab.rerun(2),
    "rerun with an option": lambda one: one.lab.rerun(2, memory=False, memory_level=1),
    "set and step": lambda one: one.lab.set(memory_level=1).step(one.training.step, n=1, memory=False),
    "sweep": lambda one: one.lab.sweep({"memory_level": [0, 1]}, n=1),
    "budget": lambda one: one.lab.budget("90%", curve=False),
    "batch size": lambda one: one.lab.find_batch_size(
        lambda size: torch.ones(size, 4), "400 MiB", train=one.training.step, sizes=[2, 4], n=1
    ),
    "parity": lambda one: one.lab.parity(1, seeds=False),
    "bisect": lambda one: one.lab.bisect("loss", changes={"memory_level": 1, "aten_backward": False}, n=1),
}
CASES, QUICK = tuple(CALLS), ("step", "sweep")


class Gate:
    """Lets Ctrl-C in as long as a call runs."""

    is_open = False

    def handler(self, number: int, frame: FrameType | None) -> None:
        """Raise KeyboardInterrupt, as Python's own handler does."""
        if self.is_open:
            signal.default_int_handler(number, frame)


GATE = Gate()


@dataclass
class Pressed:
    """A call that is interrupted, and what came of it."""

    call: Callable[[], object]
    moments: tuple[float, ...]  # seconds until the first press, and from it to the second
    end: str = ""  # "done", "interrupt", or another error
    words: str = ""  # of the interrupt
    sent: list[float] = field(default_factory=list)  # when presses were sent
    ended: threading.Event = field(default_factory=threading.Event)

    def press(self) -> None:
        """Send Ctrl-C to the main thread at the moments, as long as the call runs."""
        for wait in self.moments:
            if self.ended.wait(wait):
                return
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            self.sent.append(time.monotonic())

    def run(self) -> bool:
        """Make the call; say whether a press came before its end."""
        thread = threading.Thread(target=self.press)
        try:
            GATE.is_open = True
            thread.start()
            self.call()
            GATE.is_open = False
            self.end = "done"
        except KeyboardInterrupt as interrupt:
            GATE.is_open = False
            self.end, self.words = "interrupt", str(interrupt)
        except Exception as error:  # noqa: BLE001 - it is the result
            GATE.is_open = False
            self.end = f"{type(error).__name__}: {error}"[:200]
        returned = time.monotonic()
        self.ended.set()
        thread.join()
        # The main thread may be quicker than who writes down that a press was sent.
        return self.end == "interrupt" or any(one < returned for one in self.sent)


class Trial:
    """One kind of call, first undisturbed, then interrupted."""

    def __init__(self, case: str) -> None:
        self.case, self.call, self.setting = case, CALLS[case], Setting()
        training = self.training = self.setting.training
        training.step()
        self.kept, self.options, self.process = training.keep(), self.setting.lab.options, of_process()
        self.seconds = []
        for _ in range(2):  # the first builds what the second finds
            self.start()
            self.before, began = training.state(), time.monotonic()
            self.call(self.setting)
            self.seconds.append(time.monotonic() - began)
        self.after, self.set_after = training.state(), self.setting.lab.options
        training.load(self.kept)
        self.loss = float(training.step())
        self.runs = 0

    def start(self) -> None:
        """Go back to before the call."""
        lab = self.setting.lab
        if self.case == "wrap and step":
            if lab is not None:
                lab.unwrap(forget=True)
            self.runs = 0
        else:
            changed = self.options.changed(lab.options)
            lab.set(**{name: getattr(self.options, name) for name in changed})
            self.runs = len(lab.runs)
        self.training.load(self.kept)

    def interrupted(self, draw: random.Random, *, twice: bool) -> Pressed:
        """Interrupt the call at a moment before its end."""
        for _ in range(TRIES):
            self.start()
            moment = min(self.seconds) * draw.random()
            pressed = Pressed(
                lambda: self.call(self.setting), (moment, draw.choice(AGAIN_S)) if twice else (moment,)
            )
            if pressed.run():
                break
        return pressed

    def faults(self, pressed: Pressed) -> list[str]:
        """Say what is neither as before the call nor as after it."""
        found = ["Ctrl-C was swallowed"] if pressed.end == "done" else []
        if pressed.end not in {"done", "interrupt"}:
            found.append(f"the call ended with {pressed.end}")
        found += self._lost()
        found += [
            f"{name} is not as it was" for name, one in of_process().items() if self.process[name] != one
        ]
        self.training.load(self.kept)
        try:
            loss = float(self.training.step())
        except Exception as error:  # noqa: BLE001 - it is the result
            return [*found, f"the next step fails: {type(error).__name__}: {error}"[:200]]
        if abs(loss - self.loss) > 1e-6 * abs(self.loss):  # rounding of another graph
            found.append(f"the next step has the loss {loss}, not {self.loss}")
        return found

    def _lost(self) -> list[str]:
        now, lab, case = self.training.state(), self.setting.lab, self.case
        if lab is None:  # `wrap` was interrupted
            ortlab.wrap(self.training.model).unwrap()  # which refuses a model that is still wrapped
            return _neither(apart(now, self.before))
        partial = [run.is_partial for run in list(lab.runs)[self.runs :]]
        whole = case in STEPPING and now == self.after and now != self.before
        found = (
            [] if now == self.before or whole else _neither(apart(now, self.before), apart(now, self.after))
        )
        if case == "sweep":
            fits = not any(partial)
        elif case in STEPPING:
            fits = partial == [False] if whole else partial in ([], [True])
        else:
            fits = not partial
        if not fits:
            found.append(f"the state is {'after' if whole else 'before'}, new runs are partial: {partial}")
        allowed = [self.options]
        if case == "set and step":
            allowed = [self.set_after] if whole else [self.options, self.set_after]
        elif case == "budget" and lab.budgets and lab.budgets[-1].applied:
            allowed.append(self.options.replace(**lab.budgets[-1].switches))
        if lab.options not in allowed or lab.engine != "ort":
            found.append(f"the switches are {lab.options!r}, the engine {lab.engine}")
        return found


def count(case: str, rounds: int) -> dict[str, Any]:
    """Interrupt a call as often once as twice, and count what is lost."""
    signal.signal(signal.SIGINT, GATE.handler)
    trial, draw, violations, wordless = Trial(case), random.Random(case), list[str](), 0
    for number in range(2 * rounds):
        pressed = trial.interrupted(draw, twice=bool(number % 2))
        wordless += pressed.end == "interrupt" and not pressed.words
        if faults := trial.faults(pressed):
            at = ", ".join(f"{one:.4f}" for one in pressed.moments)
            violations.append(f"pressed after {at} s, {pressed.end}: {'; '.join(faults)}")
    row = {"case": case, "seconds": min(trial.seconds), "tried": 2 * rounds, "without words": wordless}
    return row | {"violations": len(violations), "which": violations[:5]}


def _neither(*differences: list[str]) -> list[str]:
    words = " and ".join(", ".join(one[:4]) + f" ({len(one)})" for one in differences)
    return [f"the state is another: {words}"] if all(differences) else []


def of_process() -> dict[str, object]:
    """Return what of the process a call may not leave changed."""
    limits = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    return {
        "the handler of SIGINT": signal.getsignal(signal.SIGINT),
        "sys.unraisablehook": sys.unraisablehook,
        "torch.autograd.backward": torch.autograd.backward,
        "the ceiling of memory": tuple(map(resource.getrlimit, limits)),
        "whether gradients are on": torch.is_grad_enabled(),
        "whether algorithms are deterministic": torch.are_deterministic_algorithms_enabled(),
    }
