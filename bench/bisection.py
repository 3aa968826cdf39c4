"""Whom a bisection names among 24 switches, and in how many runs: every position, every pair, and on ONNX Runtime.

The search alone is asked for each single culprit and each pair of culprits among 24 changes. Then a model whose
gradients depend on `custom_autograd` trains on ONNX Runtime with 24 switches changed, of which that one changes the
loss, and two others together a figure of the user's. Switches that need a GPU, name files or contradict the culprit are
left out.
"""

from __future__ import annotations

import itertools
import math
import time
from typing import TYPE_CHECKING

from report import Report, arguments

if TYPE_CHECKING:
    from ortlab.records.runs import Run

CHANGES = {
    "custom_autograd": False,
    "compute_optimizer": False,
    "label_sparse_optimizer": False,
    "aten_cross_entropy": False,
    "aten_backward": False,
    "intra_op_spinning": True,
    "cast_level": 0,
    "cast_strategy": "NONE",
    "cast_allow": ["Reshape"],
    "memory_level": 1,
    "cpu_memory_arena": False,
    "memory_efficient_gradient": True,
    "opset": 16,
    "allow_autograd_checkpoint": True,
    "deepcopy_before_export": False,
    "symbolic_shape_inference": False,
    "static_shape": True,
    "skip_check": [],
    "fallback": True,
    "fallback_retry": True,
    "log_level": "ERROR",
    "print_input_density": True,
    "sdpa_fallback": True,
    "grad_accumulation_cache": True,
}
LIMIT = 2 * math.log2(24) + 4
REPEATED = 1  # the baseline runs twice, to know what equal runs differ by


def main() -> None:
    """Measure, print and write."""
    read = arguments(__doc__, rounds=1)
    report = Report("bisection", read)
    names = list(CHANGES)
    single = [_asked(names, {name}) for name in names]
    pairs = [_asked(names, set(pair)) for pair in itertools.combinations(names, 2)]
    report.table(
        "The search alone, 24 changes",
        [
            {
                "culprits": title,
                "cases": len(found),
                "found": sum(ok for ok, _ in found),
                "runs, mean": sum(runs for _, runs in found) / len(found),
                "runs, most": max(runs for _, runs in found),
            }
            for title, found in (("one", single), ("two that act together", pairs))
        ],
    )
    rows = _real(names[:6] if read.quick else names)
    report.table("On ONNX Runtime", rows)
    report.claim(
        "One culprit among 24, most runs of all positions", max(runs for _, runs in single), at_most=LIMIT
    )
    report.claim("One culprit among 24, runs on ONNX Runtime", rows[0]["runs"], at_most=LIMIT)
    missed = sum(not ok for ok, _ in (*single, *pairs)) + sum(not row["found"] for row in rows)
    report.claim("Culprits, alone or in pairs, that were not found", missed, at_most=0)
    report.claim("Two culprits among 24, runs on ONNX Runtime", rows[1]["runs"])
    report.write()


def _asked(names: list[str], culprits: set[str]) -> tuple[bool, int]:
    """Return whether the search finds these culprits, and in how many runs."""
    from ortlab.studies.bisection_search import smallest_sets

    asked = {frozenset(): False, frozenset(names): True}

    def test(some: frozenset[str]) -> bool:
        asked[some] = culprits <= some
        return asked[some]

    found = [set(one.names) for one in smallest_sets(names, test)]
    return found == [culprits], len(asked) + REPEATED


def _real(names: list[str]) -> list[dict[str, object]]:
    import torch

    import ortlab

    class Doubling(torch.autograd.Function):
        @staticmethod
        def forward(_: object, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(_: object, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 3  # which only an export that keeps the function can know

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = torch.nn.Linear(16, 16), torch.nn.Linear(16, 300)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            logits = self.outer(torch.nn.functional.gelu(Doubling.apply(self.inner(x))))
            return torch.nn.functional.cross_entropy(logits, y)

    torch.manual_seed(3)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(8, 16), torch.randint(300, (8,))

    def step() -> torch.Tensor:
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def both(run: Run) -> bool:
        return run.options.intra_op_spinning and not run.options.compute_optimizer

    lab = ortlab.wrap(model)
    lab.step(step, n=3)
    rows = []
    changes = {name: CHANGES[name] for name in names}
    for metric, culprits in (
        ("loss", {"custom_autograd"}),
        (both, {"intra_op_spinning", "compute_optimizer"}),
    ):
        started = time.perf_counter()
        bisection = lab.bisect(metric, changes=changes, n=3, progress=False)
        rows.append(
            {
                "metric": bisection.metric,
                "changes": len(changes),
                "named by it": "; ".join(" + ".join(one.names) for one in bisection.culprits),
                "found": [set(one.names) for one in bisection.culprits] == [culprits],
                "runs": bisection.runs,
                "seconds": time.perf_counter() - started,
            }
        )
    lab.unwrap()
    return rows


if __name__ == "__main__":
    main()
