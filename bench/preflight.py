"""A pre-flight of a 12-layer model against one full export of it.

The pre-flight looks at the model, exports it under watch, builds the gradient graph and creates a session. The export
is that of the engine on its own: the forward that finds the outputs, the trace, the translation to ONNX and shape
inference. Both start from nothing each time. The model is a BERT (12 layers, hidden 768, batch 2, sequence 128). With a
fault in one layer (a branch on data) the search for parts is timed, too; that is only stated.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from report import THREADS, Report, arguments

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn


def main() -> None:
    """Measure, print and write."""
    read = arguments(__doc__, rounds=7)
    import torch
    from models import bert, tokens
    from rounds import interleave, ratio, rows

    import ortlab
    from ortlab.engine import kept_builds
    from ortlab.engine.execution import Execution
    from ortlab.options.options import Options
    from ortlab.records.messages import MessageLog

    torch.set_num_threads(THREADS)
    report = Report("preflight", read)
    model, broken = (bert(1, 32, vocabulary=64) if read.quick else bert(12, 768) for _ in range(2))
    layers = broken.bert.encoder.layer
    layers[len(layers) // 2].intermediate.intermediate_act_fn = _branching()
    batch = tokens(2, 16, 64) if read.quick else tokens(2, 128)

    def preflight() -> None:
        kept_builds.forget(model)
        found = ortlab.preflight(model, batch, progress=False)
        assert found.ok, found

    def export() -> None:
        Execution(model, Options(), MessageLog(), training=True).export((), batch)

    def search() -> None:
        found = ortlab.preflight(broken, batch, progress=False)
        assert found.only
        assert not found.ok

    spent: dict[str, list[float]] = {"pre-flight": [], "export": []}

    def counted(name: str, candidate: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            before = time.process_time()
            candidate()
            spent[name].append(time.process_time() - before)

        return run

    candidates = {"pre-flight": counted("pre-flight", preflight), "export": counted("export", export)}
    times = interleave(candidates, read.rounds, warm_up=1)
    report.table("A model that trains whole", rows(times, unit="s", scale=1))
    used = {name: values[1:] for name, values in spent.items()}
    report.table("The same in processor time of all threads", rows(used, unit="s", scale=1))
    found, of_processor = ratio(times, "pre-flight", "export"), ratio(used, "pre-flight", "export")
    report.table(
        "Ratio",
        [found.row("pre-flight / export"), of_processor.row("pre-flight / export, processor time")],
    )
    report.claim("Pre-flight / one full export, median of rounds", found.median, at_most=1.5)
    report.claim("The same in processor time", of_processor.median)
    searching = interleave({"pre-flight with search": search}, 1 if read.quick else 3, warm_up=0)
    report.table("A model with a branch on data in one layer", rows(searching, unit="s", scale=1))
    report.write()


def _branching() -> nn.Module:
    from torch import nn

    class Branching(nn.Module):
        """GELU, with a branch on data."""

        def forward(self, x: Tensor) -> Tensor:
            """Apply GELU, and once more if the mean is large."""
            y = nn.functional.gelu(x)
            return nn.functional.gelu(y) if y.mean() > 1 else y

    return Branching()


if __name__ == "__main__":
    main()
