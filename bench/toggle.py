"""A switched option is ready in at most 0.10 (session) or 0.30 (graph) of a full re-wrap's time, the step left out.

The model is a BERT (12 layers, hidden 768, batch 2, sequence 128). Every round makes each change once: `memory_level`
(a new session), `compute_optimizer` (a new gradient graph and session, with no graph kept from before), a wrap of the
same model whose export is kept, and a full re-wrap (everything anew, from the export on).

The time to ready is taken in two ways. The engine measures what it rebuilds, from the call of the model until its
session is there. From outside it is the first call after the change less a plain call of the same round; that has the
page faults of a fresh session's memory in it, too. The floor is what ONNX Runtime itself needs to create the session.

The second part takes the change and the next step (forward and backward) against a fresh process that imports
everything, builds and takes a step; the creation of the model is not counted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable

from report import REPOSITORY, THREADS, Report, arguments

SESSION = "session: memory_level"
GRAPH = "graph: compute_optimizer"
KEPT = "wrap again, export kept"
FULL = "full re-wrap"
PLAIN = "plain forward"
FRESH = "fresh process"


def main() -> None:
    """Measure, print and write."""
    if "--child" in sys.argv:
        print(json.dumps(fresh_step(float(sys.argv[-1]), quick="--quick" in sys.argv)))
        return
    read = arguments(__doc__, rounds=7)
    import torch
    from rounds import Times, interleave, ratio, rows

    torch.set_num_threads(THREADS)
    report = Report("toggle", read)
    subject = Subject(quick=read.quick)
    changes = {
        SESSION: subject.switch_memory_level,
        GRAPH: subject.switch_compute_optimizer,
        KEPT: subject.wrap_again,
        FULL: subject.re_wrap,
    }
    calls = {
        PLAIN: subject.forward_after,
        **{name: subject.timed(name, change) for name, change in changes.items()},
    }
    subject.forward_after()
    times = interleave(calls, read.rounds, warm_up=0 if read.quick else 2)
    report.table(
        f"The call after the change: {'a tiny model' if read.quick else 'BERT, 12 layers, hidden 768'}",
        rows(times, unit="s", scale=1),
    )

    built = {name: subject.built[name][-read.rounds :] for name in changes}
    engine: Times = {name: [one.total_ms / 1000 for one in ones] for name, ones in built.items()}
    floor: Times = {
        f"{name}, ORT's part": [one.session_ms / 1000 for one in built[name]] for name in (SESSION, GRAPH)
    }
    outside: Times = {
        name: [call - plain for call, plain in zip(times[name], times[PLAIN], strict=True)]
        for name in changes
    }
    report.table("Change to ready, measured by the engine", rows(engine | floor, unit="s", scale=1))
    report.table("Change to ready, measured from outside", rows(outside, unit="s", scale=1))
    ratios = {
        (name, how): ratio(ready, name, FULL)
        for name in (SESSION, GRAPH, KEPT)
        for how, ready in (("engine", engine), ("outside", outside))
    }
    report.table("Ratios", [one.row(f"{name} / {FULL}, {how}") for (name, how), one in ratios.items()])
    for (name, how), one in ratios.items():
        limit = {SESSION: 0.10, GRAPH: 0.30}.get(name)
        report.claim(f"{name} / {FULL}, to ready, {how}, median of rounds", one.median, at_most=limit)
    for name in (SESSION, GRAPH):
        above = ratio(engine | floor, name, f"{name}, ORT's part")
        report.claim(f"{name}, to ready / ORT's creation of the session", above.median)

    steps = {
        FRESH: lambda: in_fresh_process(quick=read.quick),
        SESSION: lambda: subject.step_after(subject.switch_memory_level),
        GRAPH: lambda: subject.step_after(subject.switch_compute_optimizer),
    }
    times = interleave(steps, 1 if read.quick else 3, warm_up=0 if read.quick else 1)
    report.table("Change to the end of the next step", rows(times, unit="s", scale=1))
    against = {name: ratio(times, name, FRESH) for name in (SESSION, GRAPH)}
    report.table(
        "Ratios to the fresh process", [one.row(f"{name} / {FRESH}") for name, one in against.items()]
    )
    for name, one in against.items():
        report.claim(f"{name} / {FRESH}, to the end of the next step", one.median, at_most=0.20)
    report.write()


class Subject:
    """A model, its batch and its lab."""

    def __init__(self, *, quick: bool) -> None:
        from models import bert, tiny, tokens

        import ortlab

        self._model, self._batch = tiny() if quick else (bert(12, 768, heads=12), tokens(2, 128))
        self._lab = ortlab.wrap(self._model, log_level="ERROR")
        self.built: dict[str, list] = {}

    def timed(self, name: str, change: Callable[[], None]) -> Callable[[], float]:
        """Return a function that makes a change, calls the model and returns the seconds of both."""

        def call() -> float:
            stage = self._prepare(change)
            done = []
            seconds = self.forward_after(lambda: self._make(change, done))
            assert [one.stage for one in done] == [stage], (name, done)
            self.built.setdefault(name, []).append(done[0])
            return seconds

        return call

    def forward_after(self, change: Callable[[], object] = lambda: None) -> float:
        """Take a forward after a change; return the seconds of both."""
        start = time.perf_counter()
        change()
        self._model(**self._batch)
        seconds = time.perf_counter() - start
        assert self._lab.status.executed_by == "ort"
        return seconds

    def step_after(self, change: Callable[[], None]) -> float:
        """Take a forward and a backward after a change; return the seconds of all."""
        self._prepare(change)
        self._model.zero_grad()
        start = time.perf_counter()
        change()
        self._model(**self._batch)["loss"].backward()
        return time.perf_counter() - start

    def switch_memory_level(self) -> None:
        """Switch between levels 0 and 1."""
        self._lab.set(memory_level=1 - self._lab.options.memory_level)

    def switch_compute_optimizer(self) -> None:
        """Switch it off or on."""
        self._lab.set(compute_optimizer=not self._lab.options.compute_optimizer)

    def wrap_again(self) -> None:
        """Unwrap the model and wrap it with the same options; its export and graph are kept."""
        self._wrap(forget=False)

    def re_wrap(self) -> None:
        """Unwrap the model and wrap it again; nothing is kept."""
        self._wrap(forget=True)

    def _wrap(self, *, forget: bool) -> None:
        import ortlab

        options = self._lab.options
        self._lab.unwrap(forget=forget)
        self._lab = ortlab.wrap(self._model, options=options)

    def _prepare(self, change: Callable[[], object]) -> str:
        """Drop graphs that a change would find again; return the stage that it has to redo."""
        from ortlab.engine.kept_builds import kept_exports

        if change == self.switch_compute_optimizer:
            for kept in kept_exports(self._model):
                kept.export.graphs.clear()
        return {self.switch_compute_optimizer: "graph", self.re_wrap: "export"}.get(change, "session")

    def _make(self, change: Callable[[], object], done: list) -> None:
        change()
        self._lab._bench.ort._on_built = done.append  # noqa: SLF001 - what the engine measured, and a lab tells runs only


def in_fresh_process(*, quick: bool) -> float:
    """Return the seconds from the start of a process to the end of its first step, less the model's creation."""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    start = time.time()
    command = [sys.executable, __file__, *(["--quick"] if quick else []), "--child", str(start)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return float(found["total"] - found["model"])


def fresh_step(start: float, *, quick: bool) -> dict[str, float]:
    """Import, wrap, take one step; return the seconds since `start` and those of the model's creation."""
    import torch
    from models import bert, tiny, tokens

    import ortlab

    torch.set_num_threads(THREADS)
    if not quick:
        import transformers.models.bert.modeling_bert  # noqa: F401 - an import, not the model's creation

    before = time.time()
    model, tensors = tiny() if quick else (bert(12, 768, heads=12), tokens(2, 128))
    created = time.time() - before
    lab = ortlab.wrap(model, log_level="ERROR")
    model(**tensors)["loss"].backward()
    assert lab.status.executed_by == "ort"
    return {"total": time.time() - start, "model": created}


if __name__ == "__main__":
    main()
