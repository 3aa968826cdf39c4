"""Loss and every parameter gradient of ONNX Runtime differ from PyTorch's by at most 1e-5, over 4 training steps.

Each family is trained by three copies with the same weights: behind a lab, in eager PyTorch, and in eager PyTorch with
float64, which tells rounding from fault. They take 4 steps of SGD with momentum on 4 padded batches, dropout 0.
Compared are, in each step, the loss and the gradient of each parameter: the largest difference of two entries, relative
to the largest entry of that gradient.

Some gradients are zero in exact arithmetic, or nearly (the bias of an attention's keys shifts all scores alike, which
softmax does not see): sums whose terms cancel. Where PyTorch's own float32 is further than 2e-6 from its float64,
the difference is taken relative to the model's largest gradient entry instead, the parameters are counted, and the
error of ONNX Runtime against float64 is shown in multiples of PyTorch's.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

from report import THREADS, Report, arguments

CANCELLED = 2e-6


@dataclass
class Worst:
    """The largest differences seen, and where."""

    loss: float = 0.0
    gradient: float = 0.0
    parameter: str = ""
    of_model: float = 0.0
    cancelled: set[str] = field(default_factory=set)
    errors: list[float] = field(default_factory=lambda: [0.0, 0.0])


def main() -> None:
    """Measure, print and write."""
    read = arguments(__doc__, rounds=4)
    import torch
    from models import attentions, batches, families

    torch.set_num_threads(THREADS)
    report = Report("parity", read)
    steps, layers, hidden, batch, length = (2, 1, 32, 2, 8) if read.quick else (read.rounds, 2, 128, 4, 32)
    rows = []
    for family, build in families(layers, hidden).items():
        for attention in attentions(family)[-1:] if read.quick else attentions(family):
            worst = train(build(attention), batches(family, steps, batch, length))
            ours, eager = worst.errors
            rows.append(
                {
                    "model": family,
                    "attention": attention,
                    "loss": worst.loss,
                    "gradient": worst.gradient,
                    "of model's largest": worst.of_model,
                    "cancelled": len(worst.cancelled),
                    "ORT / PyTorch error": ours / eager if eager else "",
                    "worst parameter": worst.parameter,
                }
            )
    report.table(f"Largest relative differences of {steps} steps: {layers} layers, hidden {hidden}", rows)
    report.claim("Loss, worst model", max(row["loss"] for row in rows), at_most=1e-5)
    report.claim(
        "Gradient, worst parameter of all models", max(row["gradient"] for row in rows), at_most=1e-5
    )
    errors = [row["ORT / PyTorch error"] for row in rows if row["cancelled"]]
    report.claim("Where sums cancel, ORT's error / PyTorch's, worst model", max(errors))
    report.write()


def train(model: object, data: list[dict]) -> Worst:
    """Train the copies side by side, and return by how much they differed."""
    import torch

    import ortlab

    eager, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    lab = ortlab.wrap(model, log_level="ERROR")
    sides = (lab.module, eager, exact)
    optimizers = [torch.optim.SGD(side.parameters(), lr=1e-2, momentum=0.9) for side in sides]
    worst = Worst()
    for batch in data:
        losses = [side(**(in_float64(batch) if side is exact else batch))["loss"] for side in sides]
        assert lab.status.executed_by == "ort"
        for loss in losses:
            loss.backward()
        ours, expected, _ = (loss.item() for loss in losses)
        worst.loss = max(worst.loss, abs(ours - expected) / abs(expected))
        compare_gradients(*sides, worst)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    lab.unwrap()
    return worst


def in_float64(batch: dict) -> dict:
    """Return a batch with its float32 tensors, such as images, in float64."""
    return {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}


def compare_gradients(lab: object, eager: object, exact: object, worst: Worst) -> None:
    """Compare the gradient of each parameter and keep the largest differences."""
    largest = max(one.grad.abs().max().item() for one in exact.parameters() if one.grad is not None)
    for (name, a), b, c in zip(lab.named_parameters(), eager.parameters(), exact.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), f"only one side has a gradient of {name}"
        if b.grad is None:
            continue
        apart = (a.grad - b.grad).abs().max().item()
        errors = [(one.grad - c.grad).abs().max().item() for one in (a, b)]
        scale = c.grad.abs().max().item()
        if errors[1] > CANCELLED * scale:
            worst.cancelled.add(name)
            worst.errors = [
                total + error / largest for total, error in zip(worst.errors, errors, strict=True)
            ]
            scale = largest
        worst.of_model = max(worst.of_model, apart / largest)
        if apart / scale > worst.gradient:
            worst.gradient, worst.parameter = apart / scale, name


if __name__ == "__main__":
    main()
