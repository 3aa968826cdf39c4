"""What each switch does to a step, against the defaults: its memory, its time and its numbers, in three models.

A BERT with its loss inside, of which 15 % of the labels count and a fifth of the tokens is padding; a GPT-2 that
returns loss and logits (both 2 layers, hidden 128, batch 8, length 64, vocabulary 4096, attention by
`scaled_dot_product_attention`, no dropout); an LSTM language model. Each model has a process of its own, and each
switch a copy of the model beside one with the defaults. Memory is the step memory of a run; time is that of interleaved
steps; the numbers are the loss of a step, and each gradient over its own largest entry (which says nothing of those
that are rounding alone, such as a key bias's).

Nothing is claimed. The manual shows the table, a switch at a time. On a machine that does other things:
`ORTLAB_BENCH_THREADS=1 ORTLAB_BENCH_CLOCK=processor python bench/switches.py`.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from typing import Any

from report import CLOCK, THREADS, Report, arguments, in_own_process
from rounds import interleave, ratio

MODELS = ("BERT", "GPT-2", "LSTM")
COUNTED = 0.15
"""Share of a BERT's labels that count."""

ALL_PLANS = "every plan of the model"
SETTINGS: dict[str, dict[str, Any]] = {
    "compute_optimizer=off": {"compute_optimizer": False},
    "label_sparse_optimizer=off": {"label_sparse_optimizer": False},
    "aten_cross_entropy=off": {"aten_cross_entropy": False},
    "aten_recurrent=off": {"aten_recurrent": False},
    "aten_backward=off": {"aten_backward": False},
    "cast_level=-1": {"cast_level": -1},
    "cast_strategy=INSERT_AND_REDUCE": {"cast_strategy": "INSERT_AND_REDUCE"},
    "cast_allow=Reshape": {"cast_allow": ["Reshape"]},
    "memory_level=1": {"memory_level": 1},
    "memory_level=2": {"memory_level": 2},
    f"memory_plan={ALL_PLANS}": {"memory_plan": ALL_PLANS},
    "recompute=layers": {"recompute": ["layers"]},
    'recompute="all but matmuls"': {"recompute": ["all but matmuls"]},
    "cpu_memory_arena=off": {"cpu_memory_arena": False},
    "chunked_loss=on": {"chunked_loss": True},
    "mem_efficient_grad_management=on": {"mem_efficient_grad_management": True},
    "memory_efficient_gradient=on": {"memory_efficient_gradient": True},
    "opset=14": {"opset": 14},
    "symbolic_shape_inference=off": {"symbolic_shape_inference": False},
    "static_shape=on": {"static_shape": True},
    "skip_check=": {"skip_check": []},
    "log_level=VERBOSE": {"log_level": "VERBOSE"},
    "sdpa_fallback=on": {"sdpa_fallback": True},
    "grad_accumulation_cache=on": {"grad_accumulation_cache": True},
}
"""What is measured, as `%ort_set` takes it, and as `lab.set` does."""

NOT_MEASURED = {
    "intra_op_spinning": "it needs a second thread. `cpu_step.py` measures it",
    "custom_autograd": "none of the three models has a `torch.autograd.Function`",
    "allow_autograd_checkpoint": "none of the three models calls `torch.utils.checkpoint`",
    "deepcopy_before_export": "it acts before the first step",
    "export_cache_dir": "it acts before the first step. `export_cache.py` measures that",
    "fallback": "it acts where ONNX Runtime fails, and these models train there",
    "fallback_policy": "it acts where ONNX Runtime fails, and these models train there",
    "fallback_retry": "it acts where ONNX Runtime fails, and these models train there",
    "save_onnx": "it writes files, and changes no step",
    "save_onnx_prefix": "it names files, and changes no step",
    "save_onnx_path": "it names a folder, and changes no step",
    "print_input_density": "it counts beside the step",
    "print_memory_stats": "it reads beside the step",
}
"""Why a switch that acts without a GPU has no row."""


_now = time.process_time if CLOCK == "processor" else time.perf_counter


def main() -> None:
    """Measure, print and write."""
    if "--child" in sys.argv:
        name, rounds = sys.argv[sys.argv.index("--child") + 1 :][:2]
        print(json.dumps(measured(name, int(rounds), quick="--quick" in sys.argv)))
        return
    read = arguments(__doc__, rounds=6)
    report = Report("switches", read)
    for name in MODELS[1:2] if read.quick else MODELS:
        quick = ["--quick"] if read.quick else []
        rows = in_own_process(__file__, *quick, "--child", name, str(read.rounds))
        report.table(name, rows)
    report.claim("Switches that were set", len(SETTINGS))
    report.write()


def measured(name: str, rounds: int, *, quick: bool) -> list[dict[str, Any]]:
    """Hold each setting against the defaults, in one model; return a row for each."""
    import torch

    torch.set_num_threads(THREADS)
    model, batch = case(name, quick=quick)
    chosen = list(SETTINGS.items())[8:9] if quick else list(SETTINGS.items())
    default = Side(model, batch)
    rows = []
    for setting, changes in chosen:
        row: dict[str, Any] = {"set": setting}
        try:
            if changes.get("memory_plan") == ALL_PLANS:
                plans = {part for one in default.lab.plan().rows for part in one.config.split(",")}
                changes = {"memory_plan": sorted(plans)}  # noqa: PLW2901
            side = Side(model, batch, **changes)
        except Exception as error:  # noqa: BLE001 - what a model refuses is its row
            row |= {"memory": None, "time": None, "interval": "", "loss": None, "gradients": None}
            rows.append(row | {"note": str(error).splitlines()[0]})
            continue
        times = interleave({"other": side.timed, "default": default.timed}, rounds)
        against = ratio(times, "other", "default")
        arena = setting.startswith("cpu_memory_arena")  # memory is measured with the arena off
        rows.append(
            row
            | {
                "memory": None if arena else side.rise / default.rise,
                "time": against.median,
                "interval": f"{against.low:.2f} to {against.high:.2f}",
                "loss": abs(side.loss - default.loss) / abs(default.loss),
                "gradients": max(
                    float((one - other).abs().max() / other.abs().max().clamp_min(1e-6))
                    for one, other in zip(side.gradients, default.gradients, strict=True)
                ),
                "note": "",
            }
        )
        side.lab.unwrap(forget=True)
        print(name, rows[-1], file=sys.stderr, flush=True)
    return rows


class Side:
    """A copy of a model in a lab, what its first step computed, and what a step of it needs."""

    def __init__(self, model: Any, batch: dict[str, Any], **changes: Any) -> None:
        import ortlab

        self.module = copy.deepcopy(model)
        self.batch = batch
        self.lab = ortlab.wrap(self.module, options=ortlab.Options(**{"log_level": "ERROR", **changes}))
        self.rise = self.lab.step(self.step, n=1, progress=False).step_memory_bytes
        assert self.lab.status.executed_by == "ort"
        self.loss = float(self.step().detach())
        self.gradients = [one.grad.clone() for one in self.module.parameters() if one.grad is not None]

    def step(self) -> Any:
        """Run forward and backward; return the loss."""
        self.module.zero_grad(set_to_none=True)
        loss = self.module(**self.batch)["loss"]
        loss.backward()
        return loss

    def timed(self) -> float:
        """Run a step; return its seconds, of the clock that was chosen."""
        start = _now()
        self.step()
        return _now() - start


def case(name: str, *, quick: bool) -> tuple[Any, dict[str, Any]]:
    """Return a model in training mode and a batch for it."""
    import torch
    from torch import nn

    torch.manual_seed(2024)
    if name == "LSTM":
        from model_list import LanguageModel, WithLoss

        x = torch.randint(2000, (16, 64))
        return WithLoss(LanguageModel(nn.LSTM, 256, 2)), {"x": x, "labels": x}
    import transformers as t

    layers, length, vocabulary = (2, 16, 512) if quick else (2, 64, 4096)
    ids = torch.randint(5, vocabulary, (8, length))
    if name == "GPT-2":
        still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
        config = t.GPT2Config(n_layer=layers, n_embd=128, n_head=4, vocab_size=vocabulary, **still)
        return t.GPT2LMHeadModel(config).train(), {"input_ids": ids, "labels": ids}
    from models import bert

    import ortlab

    mask = (torch.arange(length) < torch.linspace(length, 0.6 * length, 8).long()[:, None]).long()
    labels = torch.where((torch.rand(8, length) < COUNTED) & (mask == 1), ids, -100)
    model = ortlab.with_loss(
        bert(layers, 128, heads=4, vocabulary=vocabulary), ortlab.TokenLoss(), loss_only=True
    )
    return model, {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}


if __name__ == "__main__":
    main()
