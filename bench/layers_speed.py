"""A layer alone, forward and backward, takes ONNX Runtime as long as PyTorch: each layer's ratio, worst first.

PyTorch and ONNX Runtime live in a process each (`turns.py`). Beside each ratio stand the nodes on which ONNX Runtime's
step spends most of its time: this is the list to work down.
"""

from __future__ import annotations

import statistics
from typing import Any

from report import THREADS, Report, arguments, check_names, one_by_one
from rounds import ratio
from turns import Answer, Candidate, in_turns, is_child, serve, slowest_nodes, turn

TURN_SECONDS = 0.15
SLOW = 1.3
"""A ratio that nobody should meet."""
MEASURABLE = 1.0
"""Milliseconds of PyTorch's step from which on a layer counts: below, the fixed cost of a step is what is compared."""


def main() -> None:
    """Measure, print and write."""
    if is_child():
        serve(Layer(is_child()).commands())
        return
    read = arguments(__doc__, rounds=7, resumes=True, only="layers")
    from layer_list import layers

    report = Report("layers_speed", read)
    chosen = read.only or list(layers())[: 3 if read.quick else None]
    check_names("layer", chosen, layers())
    engines = [Candidate(__file__, engine) for engine in ("PyTorch", "ORT")]
    rows = one_by_one("layers_speed", read, chosen, lambda name: compared(engines, name, read.rounds))
    for engine in engines:
        engine.close()
    failed = [row for row in rows if "failed" in row]
    rows = sorted((row for row in rows if "failed" not in row), key=lambda row: -row["ORT / PyTorch"])
    report.table("Forward and backward of one layer, worst first", rows)
    for row in failed:
        report.note(f"{row['layer']}: not measured. {row['failed']}")
    counted = [row["ORT / PyTorch"] for row in rows if read.quick or row["PyTorch [ms]"] >= MEASURABLE]
    report.claim("ORT / PyTorch, median of the layers above 1 ms", statistics.median(counted), at_most=1.0)
    slow = sum(one > SLOW for one in counted)
    report.claim(f"Layers above 1 ms whose ratio is above {SLOW}", slow, at_most=0)
    report.write()


def compared(engines: list[Candidate], name: str, rounds: int) -> dict[str, Any]:
    """Build a layer on each engine, and time them in turns; return a row."""
    engines[:] = [Candidate(__file__, one.name) if one.ended else one for one in engines]
    for engine in engines:
        answer = engine.ask("build", name)
        if "failed" in answer:
            return {"layer": name, **answer}
    times, unsettled, failed = in_turns(engines, rounds)
    if failed:
        return {"layer": name, "failed": failed}
    found = ratio(times, "ORT", "PyTorch")
    return {
        "layer": name,
        "PyTorch [ms]": statistics.median(times["PyTorch"]) * 1e3,
        "ORT [ms]": statistics.median(times["ORT"]) * 1e3,
        "ORT / PyTorch": found.median,
        "95 % interval": f"{found.low:.2f} - {found.high:.2f}",
        "unsettled turns": unsettled,
        "slowest nodes of ORT's step [ms]": engines[1].ask("nodes").get("nodes", ""),
    }


class Layer:
    """The layer that one of the two processes has built last."""

    def __init__(self, engine: str) -> None:
        import torch

        torch.set_num_threads(THREADS)
        self._engine = engine
        self._lab: Any = None
        self._module: Any = None
        self._x: Any = None
        self._gradient: Any = None

    def commands(self) -> dict[str, Any]:
        """Return what this process can do."""
        return {
            "build": self.build,
            "turn": lambda: turn(self.step, TURN_SECONDS),
            "nodes": lambda: slowest_nodes(self._lab, self.step, 3),
        }

    def build(self, name: str) -> Answer:
        """Make a layer and run it once."""
        import torch
        from layer_list import layers

        import ortlab

        if self._lab is not None:
            self._lab.unwrap()
            self._lab = None
        torch.manual_seed(1)
        make, shape = layers()[name]
        self._module, self._x = make(), torch.randn(shape)
        if self._engine == "ORT":
            self._lab = ortlab.wrap(self._module, log_level="ERROR")
        self._gradient = torch.rand_like(self._module(self._x))
        self.step()
        return {}

    def step(self) -> None:
        """Run forward and backward."""
        self._module.zero_grad(set_to_none=True)
        self._module(self._x).backward(self._gradient)


if __name__ == "__main__":
    main()
