"""A switched option is ready sooner than after a full re-wrap, because only the stage that it touches is redone.

The model is a BERT (12 layers, hidden 768, batch 2, sequence 128). Timed is from the switch to the end of the first
forward after it: for `memory_level` (the session is made anew), for `compute_optimizer` (gradient graph and session),
and for unwrapping and wrapping (export, too). A plain forward is timed for scale; each of the others contains one.
The first change of `memory_level` after an export also asks ORT which plans there are, and is in a line of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from report import THREADS, Report, arguments
from rounds import interleave, ratio, rows


def main() -> None:
    """Measure, print and write."""
    read = arguments(__doc__, rounds=5)
    import torch
    from models import bert, tokens

    torch.set_num_threads(THREADS)
    report = Report("toggle", read)
    layers, hidden, batch, length = (1, 32, 2, 16) if read.quick else (12, 768, 2, 128)
    subject = Subject(bert(layers, hidden, heads=4 if read.quick else 12), tokens(batch, length))
    subject.re_wrap()
    first = subject.switch_memory_level()
    candidates = {
        "plain forward": subject.forward,
        "session: memory_level": subject.switch_memory_level,
        "graph: compute_optimizer": subject.switch_compute_optimizer,
    }
    times = interleave(candidates, read.rounds, warm_up=2)
    # Apart from the others: a new export would make each switch after it a first one.
    times |= interleave({"full re-wrap": subject.re_wrap}, read.rounds, warm_up=0)
    times["session, first time"] = [first]
    title = f"From the switch to the end of the first forward: BERT, {layers} layers, hidden {hidden}"
    report.table(title, rows(times, unit="s", scale=1))
    switches = [name for name in candidates if ":" in name]
    against = {name: ratio(times, name, "full re-wrap") for name in switches}
    report.table("Ratios", [one.row(f"{name} / full re-wrap") for name, one in against.items()])
    for name, one in against.items():
        report.claim(f"{name} / full re-wrap, median of rounds", one.median)
    report.write()


class Subject:
    """A model, its batch and its lab; each method takes a forward and returns the seconds until it ended."""

    def __init__(self, model: object, batch: dict) -> None:
        import ortlab

        self._model = model
        self._batch = batch
        self._lab = ortlab.wrap(model, log_level="ERROR")

    def forward(self) -> float:
        """Take a plain forward."""
        return self._forward_after(lambda: None)

    def switch_memory_level(self) -> float:
        """Switch between levels 0 and 1."""
        level = 1 - self._lab.options.memory_level
        return self._forward_after(lambda: self._lab.set(memory_level=level))

    def switch_compute_optimizer(self) -> float:
        """Switch it off or on."""
        on = not self._lab.options.compute_optimizer
        return self._forward_after(lambda: self._lab.set(compute_optimizer=on))

    def re_wrap(self) -> float:
        """Unwrap the model and wrap it again, with the options of the beginning."""
        import ortlab

        def change() -> None:
            self._lab.unwrap()
            self._lab = ortlab.wrap(self._model, log_level="ERROR")

        return self._forward_after(change)

    def _forward_after(self, change: Callable[[], object]) -> float:
        start = time.perf_counter()
        change()
        self._model(**self._batch)
        assert self._lab.status.executed_by == "ort"
        return time.perf_counter() - start


if __name__ == "__main__":
    main()
