"""What a self-test tries, part by part; each part runs in a process of its own, because a GPU can end a process.

A part yields findings as it goes, so that what it had found before a crash or an interrupt is known.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from ortlab.errors import OrtlabError
from ortlab.selftest.record import Finding

if TYPE_CHECKING:
    import torch

    from ortlab.lab import Lab
    from ortlab.options import Options

Size = str
"""Of what is tried: "small" or "tiny"."""

_SAME: Final = {"cpu": 1e-5, "cuda": 1e-3}
"""Largest relative difference of losses, and of what four steps of SGD did to all weights together (2-norm). On a GPU
other kernels sum in another order, and some multiply in TF32."""

_STEPS: Final = 4
_MODELS: Final = {"tiny": ("BERT",), "small": ("BERT", "GPT-2", "Llama", "T5", "ViT", "DeBERTa-v2")}
_LEFT_ALONE: Final = {
    "fallback_retry": "acts only where something fails",
    "custom_autograd": "off, it refuses models that need it",
    "save_onnx": "writes into the folder that it is run in",
    "tuning": "takes minutes",
}
"""Switches that are not tried, and why."""


def models(device: str, size: Size) -> Iterator[Finding]:
    """Train models of the zoo's core by ONNX Runtime and by PyTorch from one start, and compare losses and weights."""
    import ortlab

    for name in _MODELS[size]:
        module, batch = _model(name, device)
        lab = ortlab.wrap(module, name=name, log_level="ERROR")
        step = _step(module, batch)
        start = _flat(module)
        try:
            run = lab.step(step, n=_STEPS, progress=False)
            by_ort = _flat(module)
            again = lab.set(engine="eager").rerun(progress=False)
            by_torch = _flat(module)
            # As far as they have moved: a key's bias has no gradient but rounding, and nothing to compare with.
            apart = ((by_ort - by_torch).norm() / (by_torch - start).norm()).item()
            losses = zip(run.losses, again.losses, strict=True)
            apart = max(apart, *(abs(one / other - 1) for one, other in losses if one and other))
        except Exception as error:  # noqa: BLE001 - it is a finding
            yield _failed("models", name, error)
            continue
        finally:
            lab.unwrap()
        if run.executed_by != "ort":
            yield Finding("models", name, "did not hold", f"executed by {run.title}: {run.fallback_reason}")
            continue
        said = f"losses and what {_STEPS} steps did to the weights differ from PyTorch's by {apart:.1e} (relative)"
        yield _held("models", name, said, apart, _SAME[device])


def switches(device: str, size: Size) -> Iterator[Finding]:
    """Turn each switch that can act here the other way, and take the same steps; the losses have to stay."""
    import ortlab
    from ortlab.options import Options, unmet
    from ortlab.options import switches as declared

    module, batch = _model("BERT", device)
    lab = ortlab.wrap(module, name="BERT", log_level="ERROR")
    default = lab.step(_step(module, batch), n=2, progress=False)
    tried = 0
    for one in declared():
        if one.broken or one.part_of or one.type not in (bool, int):
            continue
        if one.name in _LEFT_ALONE:
            yield Finding("switches", one.name, "not run", _LEFT_ALONE[one.name])
            continue
        if lacking := unmet(one.name, lab.have):
            yield Finding("switches", one.name, "not run", str(lacking))
            continue
        if size == "tiny" and tried:
            yield Finding("switches", one.name, "not run", "the tiny form tries one switch")
            continue
        value = (
            not one.default if one.type is bool else next((c for c in one.choices if c != one.default), None)
        )
        if value is None:
            continue
        tried += 1
        yield _switched(lab, Options(), {one.name: value}, default.losses, device)
    lab.unwrap()


def _switched(
    lab: Lab, default: Options, change: dict[str, Any], losses: tuple[float | None, ...], device: str
) -> Finding:
    name = ", ".join(f"{option}={value}" for option, value in change.items())
    try:
        run = lab.set(**change).rerun(progress=False)
    except Exception as error:  # noqa: BLE001 - it is a finding
        return _failed("switches", name, error)
    finally:
        lab.set(**{option: getattr(default, option) for option in change})
    if run.executed_by != "ort":
        return Finding("switches", name, "did not hold", f"executed by {run.title}: {run.fallback_reason}")
    apart = max(abs(one / other - 1) for one, other in zip(run.losses, losses, strict=True) if one and other)
    said = f"losses differ from those of the default by {apart:.1e} (relative)"
    return _held("switches", name, said, apart, _SAME[device])


def optimizers(device: str, size: Size) -> Iterator[Finding]:
    """Take steps of FusedAdam in each of its modes, and hold them against Adam in float64."""
    import torch

    from ortlab.optim import fused_adam
    from ortlab.optimizer_names import optimizer_name

    modes = {0: "L2", 1: "decay as in transformers", 2: "decay as in torch"}
    for mode, name in list(modes.items())[: 1 if size == "tiny" else None]:
        torch.manual_seed(5)
        value = torch.nn.Parameter(torch.randn(4096, device=device))
        optimizer = fused_adam([value], lr=1e-2, adam_w_mode=mode, weight_decay=0.1)
        exact = _Adam(value.detach().double(), mode)
        for _ in range(5):
            value.grad = torch.randn_like(value) * 1e-3
            exact.step(value.grad.double())
            optimizer.step()
        apart = _apart(value.detach().double(), exact.value)
        said = f"{optimizer_name(optimizer)}; differs from float64 by {apart:.1e} (relative)"
        yield _held("optimizers", f"FusedAdam, {name}", said, apart, 1e-5)
    yield from _norm(device)
    for library, what in {"deepspeed": "DeepSpeed ZeRO", "apex": "Apex O2"}.items():
        yield Finding(
            "optimizers", f"FP16_Optimizer, {what}", "not run", f"the self-test does not start {library}"
        )


class _Adam:
    """Adam in float64 with decay 0.1, learning rate 0.01 and epsilon 1e-6, as ``multi_tensor_adam.cu`` writes it."""

    def __init__(self, value: torch.Tensor, mode: int) -> None:
        import torch

        self.value = value.clone()
        self._mean, self._square = torch.zeros_like(value), torch.zeros_like(value)
        self._mode, self._count = mode, 0

    def step(self, slope: torch.Tensor) -> None:
        self._count += 1
        lr, decay, eps = 1e-2, 0.1, 1e-6
        first, second = 1 - 0.9**self._count, 1 - 0.999**self._count
        if self._mode == 0:
            slope = slope + decay * self.value
        if self._mode == 2:  # noqa: PLR2004 - as AdamWMode numbers them
            self.value = self.value * (1 - lr * decay)
        self._mean = 0.9 * self._mean + 0.1 * slope
        self._square = 0.999 * self._square + 0.001 * slope * slope
        if self._mode == 2:  # noqa: PLR2004
            self.value = self.value - lr * self._mean / (first * ((self._square / second).sqrt() + eps))
        else:
            self.value = self.value - lr * math.sqrt(second) / first * self._mean / (
                self._square.sqrt() + eps
            )
        if self._mode == 1:
            self.value = self.value * (1 - lr * decay)


def _norm(device: str) -> Iterator[Finding]:
    import torch

    from ortlab.engine import fused_ops

    torch.manual_seed(6)
    tensors = [(100 * torch.randn(size, device=device)).half() for size in (30_000, 17, 1)]
    norm, _ = fused_ops.multi_tensor_l2norm(2048 * 32, None, [tensors])
    exact = torch.cat([one.double() for one in tensors]).norm()
    apart = _apart(norm.double(), exact.reshape(1))
    said = f"differs from float64 by {apart:.1e} (relative)"
    yield _held("optimizers", "FP16_Optimizer's norm of float16 gradients", said, apart, 1e-5)


def memory(device: str, size: Size) -> Iterator[Finding]:
    """Measure how far a step rises above its start: PyTorch, ONNX Runtime, and ONNX Runtime at memory level 1."""
    import ortlab

    module, batch = _model("BERT", device, wide=size != "tiny")
    lab = ortlab.wrap(module, name="BERT", log_level="ERROR")
    lab.step(_step(module, batch), n=1, progress=False)
    changes: dict[str, dict[str, Any]] = {"ONNX Runtime": {}, "PyTorch": {"engine": "eager"}}
    if size != "tiny":
        changes["ONNX Runtime, memory level 1"] = {"memory_level": 1}
    for name, change in changes.items():
        try:
            found = lab.measure_memory(**change)
        except Exception as error:  # noqa: BLE001 - it is a finding
            yield _failed("memory", name, error)
            continue
        said = f"a step rises by {found.rise_bytes:,} bytes ({found.label})"
        yield Finding("memory", name, "stated", said, float(found.rise_bytes))
    lab.unwrap()


def headline(device: str, size: Size) -> Iterator[Finding]:
    """Run the headline experiment (row F6) in small: the largest batch with and without GELU recomputed."""
    from ortlab import headline as experiment

    small = experiment.SMALL_ON_GPU if device == "cuda" else experiment.ON_CPU
    found = experiment.run_headline("ort", experiment.TINY if size == "tiny" else small, device)
    alone = experiment.largest(found.rows, "ort")
    recomputed = experiment.largest(found.rows, "ort" + experiment.GELU)
    for name, row in {"without plans": alone, "GELU recomputed": recomputed}.items():
        if row is None:
            yield Finding("headline", name, "did not hold", "no batch fits")
        else:
            said = f"largest batch {row.batch}, {row.samples_per_s:.4g} samples per second"
            yield Finding("headline", name, "stated", said, float(row.batch))
    if alone and recomputed and alone.samples_per_s and recomputed.samples_per_s:
        said = f"the batch grows {recomputed.batch / alone.batch:g} times, the samples per second "
        said += (
            f"{recomputed.samples_per_s / alone.samples_per_s:.3f} times (row F6: 2 and {experiment.F6:.2f})"
        )
        yield _held("headline", "batch without / with", said, alone.batch / recomputed.batch, 0.5)


PARTS: Final[dict[str, Callable[[str, Size], Iterator[Finding]]]] = {
    "models": models,
    "switches": switches,
    "optimizers": optimizers,
    "memory": memory,
    "headline": headline,
}
"""The parts that train, in the order in which they run; "installation", the doctor, comes before."""


def _model(name: str, device: str, *, wide: bool = False) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Return a small model with seeded weights and no dropout, and a batch with labels."""
    import torch
    import transformers as t

    torch.manual_seed(2024)
    layers, hidden, batch, length = (4, 256, 8, 128) if wide else (2, 64, 2, 16)
    common: dict[str, Any] = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": 4,
        "vocab_size": 128,
    }
    still: dict[str, Any] = {
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "intermediate_size": 4 * hidden,
    }
    ends: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
    gpt2: dict[str, Any] = {
        "n_layer": layers,
        "n_embd": hidden,
        "n_head": 4,
        "vocab_size": 128,
        "resid_pdrop": 0.0,
    }
    gpt2 |= {"embd_pdrop": 0.0, "attn_pdrop": 0.0}
    t5: dict[str, Any] = {
        "num_layers": layers,
        "d_model": hidden,
        "d_kv": 16,
        "num_heads": 4,
        "d_ff": 128,
        "vocab_size": 128,
    }
    t5 |= {"dropout_rate": 0.0, "decoder_start_token_id": 0, "use_cache": False}
    relative: dict[str, Any] = {
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 16,
    }
    made: dict[str, Callable[[], Any]] = {
        "BERT": lambda: t.BertForMaskedLM(t.BertConfig(**common, **still)),
        "GPT-2": lambda: t.GPT2LMHeadModel(t.GPT2Config(**gpt2, **ends)),
        "Llama": lambda: t.LlamaForCausalLM(
            t.LlamaConfig(
                **common, **ends, intermediate_size=3 * hidden, num_key_value_heads=2, pad_token_id=0
            )
        ),
        "T5": lambda: t.T5ForConditionalGeneration(t.T5Config(**t5)),
        "ViT": lambda: t.ViTForImageClassification(
            t.ViTConfig(
                num_hidden_layers=layers,
                hidden_size=hidden,
                num_attention_heads=4,
                image_size=16,
                patch_size=8,
                **still,
            )
        ),
        "DeBERTa-v2": lambda: t.DebertaV2ForMaskedLM(t.DebertaV2Config(**common, **still, **relative)),
    }
    model: torch.nn.Module = made[name]().train().to(device)
    if name == "ViT":
        labels = torch.tensor([0, 1] * (batch // 2), device=device)
        return model, {"pixel_values": torch.randn(batch, 3, 16, 16, device=device), "labels": labels}
    ids = torch.randint(5, 128, (batch, length)).to(device)
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def _step(module: torch.nn.Module, batch: dict[str, torch.Tensor]) -> Callable[[], Any]:
    import torch

    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)

    def step() -> Any:
        loss = module(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def _flat(module: torch.nn.Module) -> torch.Tensor:
    import torch

    return torch.cat([one.detach().double().flatten() for one in module.parameters()])


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one - other).abs().max() / other.abs().max().clamp_min(1e-30)).item()


def _held(part: str, name: str, said: str, value: float, bound: float) -> Finding:
    # Written so that nan does not hold.
    return Finding(part, name, "held" if value <= bound else "did not hold", said, value, bound)


def _failed(part: str, name: str, error: Exception) -> Finding:
    words = " ".join(filter(None, (error.what, error.why))) if isinstance(error, OrtlabError) else str(error)
    lines = words.strip().splitlines() or [""]
    return Finding(part, name, "failed", f"{type(error).__name__}: {lines[0]}")


def main(part: str, device: str, size: Size) -> None:
    """Run one part in this process, and print each finding as a line of JSON."""
    import warnings

    warnings.simplefilter("ignore")
    with contextlib.suppress(BrokenPipeError):  # whoever started it has gone
        for one in PARTS[part](device, size):
            print("FINDING" + json.dumps(dataclasses.asdict(one)), flush=True)  # noqa: T201 - read by the parent


if __name__ == "__main__":
    main(*sys.argv[1:])
