"""A step whose tensors are captured, looked at and written takes at most twice as long as one without.

Timed are training steps of a BERT of 4 layers as wide as BERT-base (hidden 768, vocabulary 30522), batch 8 and length
128, with AdamW, on ONNX Runtime and on PyTorch, in turns. Captured are what each module takes and returns, the
gradients of that, the parameters' gradients and the updated parameters; of each the facts are computed, and the whole
tensor is written to a file. The distances to another run, which need a second file, are no part of it, as upstream's
subscriber has none.

What capture takes grows with the number of elements, what a step takes with that and the width: a narrow BERT, hidden
256, is stated for that. One whose tensors are tiny shows what capture takes for each tensor, whatever its size.

ONNX Runtime's captured steps have a session of their own. What it takes to export and build is paid once, and stated.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from report import THREADS, Report, arguments
from rounds import Times, interleave, ratio

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ortlab.parity.tensor_comparison import Reference

ENGINES = ("ort", "eager")
LARGE = (4, 768, 30522, 8, 128)
NARROW = (4, 256, 30522, 8, 128)
SMALL = (4, 16, 64, 1, 8)
QUICK = (1, 32, 64, 2, 8)
WITHOUT, CAPTURED = "without", "captured"


class Measured(NamedTuple):
    """What steps of both kinds have taken, and what the captured ones were about."""

    times: Times
    first_ms: float
    tensors: int
    written: int

    @property
    def fixed_us(self) -> float:
        """How much longer a captured step is for each tensor, in microseconds."""
        apart = statistics.median(self.times[CAPTURED]) - statistics.median(self.times[WITHOUT])
        return apart / self.tensors * 1e6


def main() -> None:
    """Measure, print and write."""
    read = arguments(__doc__, rounds=11)
    import torch

    torch.set_num_threads(THREADS)
    report = Report("capture_overhead", read)
    large = {engine: measure(engine, QUICK if read.quick else LARGE, read.rounds) for engine in ENGINES}
    narrow = {engine: measure(engine, QUICK if read.quick else NARROW, read.rounds) for engine in ENGINES}
    small = {engine: measure(engine, SMALL, read.rounds) for engine in ENGINES}
    report.table("A training step of a BERT, hidden 768: medians", [row(*one) for one in large.items()])
    report.table("Hidden 256", [row(*one) for one in narrow.items()])
    report.table("The same with tiny tensors", [row(*one) for one in small.items()])
    for engine, found in large.items():
        worst = ratio(found.times, CAPTURED, WITHOUT)
        report.claim(f"Captured / without, {engine}, median of rounds", worst.median, at_most=2.0)
        report.claim(f"MB written for a step, {engine}", found.written / 1e6)
    for engine, found in narrow.items():
        times = ratio(found.times, CAPTURED, WITHOUT)
        report.claim(f"The same where hidden is 256, {engine}", times.median)
    for engine, found in small.items():
        report.claim(f"Capture of a tiny tensor, {engine} [us]", found.fixed_us)
    report.note("Steps of narrow and of tiny models take longer than twice: what that is made of is stated.")
    report.write()


def row(engine: str, found: Measured) -> dict[str, object]:
    """Return a row of a table."""
    against = ratio(found.times, CAPTURED, WITHOUT)
    return {
        "engine": engine,
        "without [ms]": statistics.median(found.times[WITHOUT]) * 1e3,
        "captured [ms]": statistics.median(found.times[CAPTURED]) * 1e3,
        "ratio": against.median,
        "95 % interval": f"{against.low:.2f} - {against.high:.2f}",
        "of minima": against.of_minima,
        "first captured step [ms]": found.first_ms,
        "tensors": found.tensors,
        "bytes per step": found.written,
    }


def measure(engine: str, size: tuple[int, ...], rounds: int) -> Measured:
    """Time steps of both kinds on one engine.

    Parameters
    ----------
    engine
        "ort" or "eager".
    size
        Layers, hidden size, vocabulary, batch and length of the BERT.
    rounds
        How often each kind is timed.
    """
    import torch
    from models import bert, tokens

    import ortlab
    from ortlab.parity.tensor_comparison import Reference, stored

    layers, hidden, vocabulary, batch_size, length = size
    model, batch = bert(layers, hidden, vocabulary=vocabulary), tokens(batch_size, length, vocabulary)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> Any:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    lab = ortlab.wrap(model, log_level="ERROR", engine=engine)
    lab.step(step, progress=False)
    seen: dict[str, int] = {}
    with watching(lab, model, engine) as captured:

        def captured_step() -> float:
            with stored() as store:
                reference = Reference(store)
                seconds = captured(step, reference)
                seen.update(tensors=len(reference.facts), written=store.number_of_bytes)
            return seconds

        first = captured_step()  # of ONNX Runtime, it builds
        times = interleave({WITHOUT: step, CAPTURED: captured_step}, rounds)
    lab.unwrap(forget=True)
    return Measured(times, first * 1e3, seen["tensors"], seen["written"])


@contextlib.contextmanager
def watching(lab: Any, model: Any, engine: str) -> Iterator[Callable[[Any, Reference], float]]:
    """Make what runs a step, hands its tensors over as a run of `lab.parity()` does, and returns its seconds."""
    from ortlab.engine.capture import Capture
    from ortlab.engine.kept_builds import built_apart
    from ortlab.parity.observation import Observation

    capture = Capture(lambda _mark, _tensor: None) if engine == "ort" else None
    own = lab._bench.ort._sessions  # noqa: SLF001 - the step without capture keeps its session
    with built_apart(lab._bench.ort):  # noqa: SLF001
        apart = lab._bench.ort._sessions  # noqa: SLF001

        def captured(step: Any, reference: Reference) -> float:
            observation = Observation(model, reference.take, capture)
            if capture is not None:
                capture.receive = observation.captured
            lab._bench.ort._sessions = apart  # noqa: SLF001
            try:
                with observation.watching(), capture.active() if capture else contextlib.nullcontext():
                    seen = observation.stepping(step)
                    started = time.perf_counter()
                    seen()
                    return time.perf_counter() - started
            finally:
                lab._bench.ort._sessions = own  # noqa: SLF001

        lab._bench.ort._sessions = own  # noqa: SLF001
        try:
            yield captured
        finally:
            lab._bench.ort._sessions = apart  # noqa: SLF001


if __name__ == "__main__":
    main()
