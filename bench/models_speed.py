"""A training step on ONNX Runtime takes at most as long as in PyTorch, on models of all kinds: each one's ratio.

A step is forward, backward and AdamW. PyTorch, ONNX Runtime and, with `--compile`, torch.compile live in a process each
(`turns.py`). The models are transformers, convolutional, recurrent, graph, state-space and mixture-of-experts networks,
a discriminator, a recommender and a forecaster (`model_list.py`), each in three sizes: PyTorch takes some 1 to 9 ms,
9 to 55 ms, and more for a step.
"""

from __future__ import annotations

import statistics
from typing import Any

from report import THREADS, Report, arguments, check_names, one_by_one
from rounds import ratio
from turns import Answer, Candidate, in_turns, is_child, serve, slowest_nodes, turn

TURN_SECONDS = 0.7


def main() -> None:
    """Measure, print and write."""
    if is_child():
        serve(Model(is_child()).commands())
        return
    read = arguments(
        __doc__, rounds=5, resumes=True, only="models", also={"compile": "torch.compile as well"}
    )
    from model_list import MODELS, SIZES

    report = Report("models_speed", read)
    chosen = read.only or (["MLP small"] if read.quick else list(MODELS))
    check_names("model", chosen, MODELS)
    names = ["PyTorch", "ORT", *(["torch.compile"] if read.compile else [])]
    rows = one_by_one("models_speed", read, chosen, lambda model: compared(names, model, read.rounds))
    failed = [row for row in rows if "failed" in row]
    rows = sorted((row for row in rows if "failed" not in row), key=lambda row: -row["ORT / PyTorch"])
    report.table("Forward, backward and AdamW, worst first", rows)
    for row in failed:
        report.note(f"{row['model']}: not measured. {row['failed']}")
    ratios = sorted(row["ORT / PyTorch"] for row in rows)
    report.claim("ORT / PyTorch, median of the models", statistics.median(ratios), at_most=0.95)
    report.claim("The same, ninth of ten", ratios[max(round(0.9 * len(ratios)) - 1, 0)], at_most=1.1)
    report.claim("The same, the slowest", ratios[-1], at_most=1.3)
    for size in SIZES:
        of_size = [row["ORT / PyTorch"] for row in rows if row["model"].endswith(size)]
        if of_size:
            report.claim(f"ORT / PyTorch, median of the {size} models", statistics.median(of_size))
    share = sum(one <= 1 for one in ratios) / len(ratios)
    report.claim("Share of the models in which ORT takes no longer than PyTorch", share)
    report.write()


def compared(names: list[str], model: str, rounds: int) -> dict[str, Any]:
    """Build a model on each engine, in a process of its own, and time them in turns; return a row."""
    candidates = [Candidate(__file__, name) for name in names]
    try:
        for candidate in candidates:
            answer = candidate.ask("build", model)
            if "failed" in answer:
                return {"model": model, **answer}
        times, unsettled, failed = in_turns(candidates, rounds)
        if failed:
            return {"model": model, "failed": failed}
        row: dict[str, Any] = {"model": model}
        row |= {f"{name} [ms]": statistics.median(times[name]) * 1e3 for name in names}
        for name in names[1:]:
            found = ratio(times, name, "PyTorch")
            row[f"{name} / PyTorch"] = found.median
            row[f"95 % interval of {name}"] = f"{found.low:.2f} - {found.high:.2f}"
        row["unsettled turns"] = unsettled
        row["slowest nodes of ORT's step [ms]"] = candidates[1].ask("nodes").get("nodes", "")
        return row
    finally:
        for candidate in candidates:
            candidate.close()


class Model:
    """The model of one of the processes."""

    def __init__(self, engine: str) -> None:
        import torch

        torch.set_num_threads(THREADS)
        self._engine = engine
        self._lab: Any = None
        self._call: Any = None
        self._batch: Any = None
        self._optimizer: Any = None

    def commands(self) -> dict[str, Any]:
        """Return what this process can do."""
        return {
            "build": self.build,
            "turn": lambda: turn(self.step, TURN_SECONDS),
            "nodes": lambda: slowest_nodes(self._lab, self.step, 4),
        }

    def build(self, name: str) -> Answer:
        """Make the model and run two steps."""
        import torch
        from model_list import MODELS

        import ortlab

        torch.manual_seed(1)
        model, self._batch = MODELS[name]()
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        if self._engine == "ORT":
            self._lab = ortlab.wrap(model, log_level="ERROR")
        self._call = torch.compile(model) if self._engine == "torch.compile" else model
        self.step()
        self.step()
        return {}

    def step(self) -> Any:
        """Train once; return the loss."""
        loss = self._call(**self._batch)["loss"]
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss


if __name__ == "__main__":
    main()
