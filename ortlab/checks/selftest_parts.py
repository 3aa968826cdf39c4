"""The parts of a self-test, and running one in this process: `python -m ortlab.checks.selftest_parts`."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from ortlab import units
from ortlab.records.checks import Finding

if TYPE_CHECKING:
    import torch

    from ortlab.lab.lab import Lab
    from ortlab.options.options import Switch
    from ortlab.records.runs import Run


NAMES: Final = ("BERT", "GPT-2", "Llama", "T5", "ViT", "DeBERTa-v2")
_IDS: Final = 128
"""Vocabulary."""


def small_model(
    name: str, device: str, *, wide: bool = False
) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Make a model of `NAMES`, in training mode, and a batch of its keyword arguments, labels included."""
    # `wide` means four layers of 256 and 8 sequences of 128, for measuring memory; otherwise two of 64, and 2 of 16.
    import torch

    torch.manual_seed(2024)
    layers, hidden, batch, length = (4, 256, 8, 128) if wide else (2, 64, 2, 16)
    module: torch.nn.Module = _made(name, layers, hidden).train().to(device)
    if name == "ViT":
        labels = torch.tensor([0, 1] * (batch // 2), device=device)
        return module, {"pixel_values": torch.randn(batch, 3, 16, 16, device=device), "labels": labels}
    ids = torch.randint(5, _IDS, (batch, length)).to(device)
    return module, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def step_of(module: torch.nn.Module, batch: dict[str, torch.Tensor]) -> Callable[[], Any]:
    """Return a training step of SGD with momentum, whose loss it returns."""
    import torch

    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)

    def step() -> Any:
        loss = module(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def weights(module: torch.nn.Module) -> torch.Tensor:
    """Return all parameters in one row, in float64."""
    import torch

    return torch.cat([one.detach().double().flatten() for one in module.parameters()])


def parted(
    losses: tuple[Sequence[float | None], Sequence[float | None]],
    ends: tuple[torch.Tensor, torch.Tensor],
    start: torch.Tensor,
) -> float:
    """Return how far two trainings from one start have parted; nan where something is not a number."""
    # That is the largest of the relative differences of a loss, step by step, and of the difference of the ends over
    # the way of the other from the start (2-norms of `weights`). Single weights are not compared: a key's bias has no
    # gradient but rounding, and nothing to compare with.
    import torch

    by_loss = [
        math.nan if one is None or not other else abs(one / other - 1)
        for one, other in zip(*losses, strict=True)
    ]
    end, other_end = ends
    by_weights = (end - other_end).norm() / (other_end - start).norm()
    return torch.tensor([*by_loss, by_weights.item()]).max().item()  # unlike Python's, it keeps a nan


def _made(name: str, layers: int, hidden: int) -> Any:
    import transformers

    common: dict[str, Any] = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": 4}
    words: dict[str, Any] = {"vocab_size": _IDS}
    still: dict[str, Any] = {
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "intermediate_size": 4 * hidden,
    }
    ends: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
    gpt2: dict[str, Any] = {"n_layer": layers, "n_embd": hidden, "n_head": 4}
    gpt2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    llama: dict[str, Any] = {"intermediate_size": 3 * hidden, "num_key_value_heads": 2, "pad_token_id": 0}
    t5: dict[str, Any] = {"num_layers": layers, "d_model": hidden, "d_kv": 16, "num_heads": 4, "d_ff": 128}
    t5 |= {"dropout_rate": 0.0, "decoder_start_token_id": 0, "use_cache": False}
    deberta: dict[str, Any] = {
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 16,
    }
    config, model, sizes = {
        "BERT": ("BertConfig", "BertForMaskedLM", common | words | still),
        "GPT-2": ("GPT2Config", "GPT2LMHeadModel", gpt2 | words | ends),
        "Llama": ("LlamaConfig", "LlamaForCausalLM", common | words | llama | ends),
        "T5": ("T5Config", "T5ForConditionalGeneration", t5 | words),
        "ViT": (
            "ViTConfig",
            "ViTForImageClassification",
            common | still | {"image_size": 16, "patch_size": 8},
        ),
        "DeBERTa-v2": ("DebertaV2Config", "DebertaV2ForMaskedLM", common | words | still | deberta),
    }[name]
    return getattr(transformers, model)(getattr(transformers, config)(**sizes))


Device: TypeAlias = Literal["cpu", "cuda"]
Size: TypeAlias = Literal["small", "tiny"]
"""Of what is tried."""

SAME: Final = {"cpu": 1e-5, "cuda": 1e-3}
"""Largest relative difference of two trainings that should be one. On a GPU other kernels sum in another order, and
some multiply in TF32."""

TRYING: Final = "TRYING"
FINDING: Final = "FINDING"
"""What a line of a part's process begins with; JSON stands behind: a name ("" after each trial), a finding."""


@dataclass(frozen=True)
class Trial:
    """One thing to try."""

    part: str
    name: str
    run: Callable[[], Iterable[Finding]]  # an error that it raises is a finding, too


def not_run(part: str, name: str, why: str) -> Trial:
    """Return a trial that only says why it is not run."""
    return Trial(part, name, lambda: [Finding(part, name, "not run", why)])


def report(trials: Iterable[Trial], tried: Collection[str]) -> None:
    """Run trials, and print a line before and after each, and a line for each finding."""
    # Those named in `tried` are left out, because an earlier process got as far.
    for one in trials:
        if one.name in tried:
            continue
        _print(TRYING, one.name)
        try:
            findings = list(one.run())
        except Exception as error:  # noqa: BLE001 - it is a finding
            findings = [Finding.of_error(one.part, one.name, error)]
        for found in findings:
            _print(FINDING, dataclasses.asdict(found))
        _print(TRYING, "")  # what ends the process from here on is not this trial


def _print(kind: str, content: object) -> None:
    sys.stdout.write(kind + json.dumps(content) + "\n")
    sys.stdout.flush()


_STEPS: Final = 4
_FEW: Final = 2
"""Steps with a switch turned: the second loss has the first one's gradients in it."""

_LEFT_ALONE: Final = {
    "cast_allow": "it takes names of operators, and acts on mixed precision",
    "custom_autograd": "off, it refuses models that need it",
    "export_cache_dir": "it takes a folder",
    "fallback_policy": "it acts only where something fails",
    "fallback_retry": "it acts only where something fails",
    "log_level": "it changes only what is written",
    "memory_plan": "the headline experiment runs with one",
    "save_onnx": "it writes into the folder that it is run in",
    "save_onnx_path": "it takes a folder",
    "save_onnx_prefix": "it takes a file's name",
    "skip_check": "ortlab makes these checks itself, whatever it says",
    "triton_config_file": "it takes a file",
    "triton_debug": "it writes into the folder that it is run in",
    "tuning": "it takes minutes",
    "tuning_max_duration_ms": "tuning takes minutes",
    "tuning_results_path": "it takes a folder",
}
"""Switches that are not tried, and why."""


def models(device: Device, size: Size) -> Iterator[Trial]:
    """Train models of the zoo's core by ONNX Runtime and by PyTorch from one start."""
    for name in NAMES:
        if size == "tiny" and name != NAMES[0]:
            yield not_run("models", name, "the tiny form trains one model")
        else:
            yield Trial("models", name, partial(_trained, name, device))


def _trained(name: str, device: Device) -> list[Finding]:
    import ortlab

    module, batch = small_model(name, device)
    start = weights(module)
    lab = ortlab.wrap(module, name=name, log_level="ERROR")
    try:
        run = lab.step(step_of(module, batch), n=_STEPS, progress=False)
        by_ort = weights(module)
        again = lab.set(engine="eager").rerun(progress=False)
        by_torch = weights(module)
    finally:
        lab.unwrap()
    if run.executed_by != "ort":
        return [_not_ort("models", name, run)]
    apart = parted((run.losses, again.losses), (by_ort, by_torch), start)
    said = f"losses, and what {_STEPS} steps did to the weights, differ from PyTorch's by {apart:.2g}"
    return [Finding.held_to(SAME[device], "models", name, said, apart)]


def switches(device: Device, size: Size) -> Iterator[Trial]:
    """Turn each switch the other way, and take the same steps; those that cannot act here say why."""
    import ortlab
    from ortlab.options.options import switches as declared
    from ortlab.options.options import unmet

    module, batch = small_model("BERT", device)
    start = weights(module)
    lab = ortlab.wrap(module, name="BERT", log_level="ERROR")
    default = lab.step(step_of(module, batch), n=_FEW, progress=False)
    end = weights(module)
    tried = 0
    for one in declared():
        why = unmet(one.name, lab.have) or (one.part_of and unmet(one.part_of, lab.have))
        why = why or _LEFT_ALONE.get(one.name, "")
        if not why and size == "tiny" and tried:
            why = "the tiny form tries one switch"
        if why:
            yield not_run("switches", one.name, why)
            continue
        tried += 1
        yield Trial("switches", one.name, partial(_turned, lab, one, default, (start, end), device))
    lab.unwrap()


def other_value(one: Switch) -> Any:
    """Return a value of a switch that is not its default: False for True, another choice, the least number, words."""
    from ortlab.options.switches import ALL_BUT_MATMULS

    if one.name == "recompute":
        return (ALL_BUT_MATMULS,)
    if one.type is bool:
        return not one.default
    others = [value for value in one.choices if value != one.default]
    return others[0] if others else one.minimum


def _turned(
    lab: Lab, one: Switch, default: Run, ends: tuple[torch.Tensor, torch.Tensor], device: Device
) -> list[Finding]:
    from ortlab.options.options import Options, declaration

    change: dict[str, Any] = {one.name: other_value(one)}
    if one.part_of and not declaration(one.part_of).default:
        change[one.part_of] = True
    start, end = ends
    try:
        run = lab.set(**change).rerun(progress=False)
        here = weights(lab.module)
    finally:
        usual = Options()
        lab.set(**{name: getattr(usual, name) for name in change})
    if run.executed_by != "ort":
        return [_not_ort("switches", one.name, run)]
    apart = parted((run.losses, default.losses), (here, end), start)
    turned = ", ".join(f"{name}={value}" for name, value in change.items())
    said = f"{turned}: losses and weights differ from those of the default by {apart:.2g}"
    return [Finding.held_to(SAME[device], "switches", one.name, said, apart)]


def _not_ort(part: str, name: str, run: Run) -> Finding:
    return Finding(part, name, "did not hold", f"executed by {run.title}: {run.fallback_reason}")


_MODES: Final = {0: "L2", 1: "decay as in transformers", 2: "decay as in torch"}
_AS_TORCH: Final = 2
_LR, _DECAY, _EPS = 1e-2, 0.1, 1e-6
_BOUND: Final = 1e-5
"""Largest difference from float64, relative to the largest number: some roundings of float32 (6e-8) in five steps."""


def optimizers(device: Device, size: Size) -> Iterator[Trial]:
    """Take steps of FusedAdam in each of its modes; take a norm as FP16_Optimizer does."""
    for mode, words in _MODES.items():
        name = f"FusedAdam, {words}"
        if size == "tiny" and mode:
            yield not_run("optimizers", name, "the tiny form tries one mode")
        else:
            yield Trial("optimizers", name, partial(_steps, name, mode, device))
    name = "FP16_Optimizer's norm of float16 gradients"
    yield Trial("optimizers", name, partial(_norm, name, device))
    for library, what in {"DeepSpeed": "DeepSpeed ZeRO", "Apex": "Apex O2"}.items():
        yield not_run("optimizers", f"FP16_Optimizer, {what}", f"the self-test does not start {library}")


def _steps(name: str, mode: int, device: Device) -> list[Finding]:
    import torch

    from ortlab.optim import fused_adam
    from ortlab.records.runs import optimizer_name

    torch.manual_seed(5)
    value = torch.nn.Parameter(torch.randn(4096, device=device))
    optimizer = fused_adam([value], lr=_LR, adam_w_mode=mode, weight_decay=_DECAY, eps=_EPS)
    exact = _Adam(value.detach().double(), mode)
    for _ in range(5):
        value.grad = torch.randn_like(value) * 1e-3
        exact.step(value.grad.double())
        optimizer.step()
    apart = _apart(value.detach().double(), exact.value)
    said = f"{optimizer_name(optimizer)}; differs from float64 by {apart:.2g}"
    return [Finding.held_to(_BOUND, "optimizers", name, said, apart)]


class _Adam:
    """Adam in float64 as ``multi_tensor_adam.cu`` of 1.19.2 writes it, with bias correction and torch's betas."""

    def __init__(self, value: torch.Tensor, mode: int) -> None:
        import torch

        self.value = value.clone()
        self._mean, self._square = torch.zeros_like(value), torch.zeros_like(value)
        self._mode, self._count = mode, 0

    def step(self, slope: torch.Tensor) -> None:
        self._count += 1
        first, second = 1 - 0.9**self._count, 1 - 0.999**self._count
        if self._mode == 0:
            slope = slope + _DECAY * self.value
        if self._mode == _AS_TORCH:
            self.value = self.value * (1 - _LR * _DECAY)
        self._mean = 0.9 * self._mean + 0.1 * slope
        self._square = 0.999 * self._square + 0.001 * slope * slope
        if self._mode == _AS_TORCH:
            root = (self._square / second).sqrt() + _EPS
            self.value = self.value - _LR * self._mean / (first * root)
        else:
            root = self._square.sqrt() + _EPS
            self.value = self.value - _LR * math.sqrt(second) / first * self._mean / root
        if self._mode == 1:
            self.value = self.value * (1 - _LR * _DECAY)


def _norm(name: str, device: Device) -> list[Finding]:
    import torch

    from ortlab.engine import ort_optimizers

    torch.manual_seed(6)
    tensors = [(100 * torch.randn(size, device=device)).half() for size in (30_000, 17, 1)]
    norm, _ = ort_optimizers.multi_tensor_l2norm(2048 * 32, None, [tensors])
    exact = torch.cat([one.double() for one in tensors]).norm()
    apart = _apart(norm.double(), exact.reshape(1))
    return [Finding.held_to(_BOUND, "optimizers", name, f"differs from float64 by {apart:.2g}", apart)]


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one - other).abs().max() / other.abs().max()).item()


_MIB: Final = 2**20
_LEVEL_1: Final = "ONNX Runtime, memory level 1"


def memory(device: Device, size: Size) -> Iterator[Trial]:
    """Measure how far a step rises above its start: ONNX Runtime, PyTorch, and ONNX Runtime at memory level 1."""
    import ortlab

    module, batch = small_model("BERT", device, wide=size != "tiny")
    lab = ortlab.wrap(module, name="BERT", log_level="ERROR")
    lab.step(step_of(module, batch), n=1, progress=False)
    changes: dict[str, dict[str, Any]] = {"ONNX Runtime": {}, "PyTorch": {"engine": "eager"}}
    for name, change in changes.items():
        yield Trial("memory", name, partial(_risen, name, lab, change))
    if size == "tiny":
        yield not_run("memory", _LEVEL_1, "the tiny form leaves it out")
    else:
        yield Trial("memory", _LEVEL_1, partial(_risen, _LEVEL_1, lab, {"memory_level": 1}))
    lab.unwrap()


def _risen(name: str, lab: Lab, change: dict[str, Any]) -> list[Finding]:
    found = lab.memory(**change)
    said = f"a step rises by {found.rise_bytes / _MIB:,.1f} MiB above its start ({found.label})"
    return [Finding("memory", name, "stated", said, float(found.rise_bytes))]


def headline(device: Device, size: Size) -> Iterator[Trial]:
    """Look for the largest batch under a limit, without plans and with GELU recomputed."""
    yield Trial("headline", "largest batch", partial(_searched, device, size))


def _searched(device: Device, size: Size) -> list[Finding]:
    from ortlab.checks import headline as experiment

    small = experiment.SMALL_ON_GPU if device == "cuda" else experiment.ON_CPU
    found = experiment.run_headline("ort", experiment.TINY if size == "tiny" else small, device)
    alone = experiment.largest(found.rows, "ort")
    recomputed = experiment.largest(found.rows, "ort" + experiment.GELU)
    findings = []
    room = units.size(found.room_bytes)
    for name, row in {"nothing recomputed": alone, "GELU recomputed": recomputed}.items():
        if row is None:
            findings.append(
                Finding("headline", name, "did not hold", f"no batch of a DeBERTa-v2 fits in {room}")
            )
        else:
            said = (
                f"the largest batch of a DeBERTa-v2 whose step fits in {room} is {row.batch}; "
                f"it trains {row.samples_per_s:.3g} samples per second"
            )
            findings.append(Finding("headline", name, "stated", said, float(row.batch)))
    if alone and recomputed and alone.samples_per_s and recomputed.samples_per_s:
        pace = recomputed.samples_per_s / alone.samples_per_s
        share = alone.batch / recomputed.batch
        said = (
            f"with nothing recomputed it is {share:.2g} of that with GELU recomputed, "
            "in a limit that was chosen for it"
        )
        findings.append(Finding.held_to(0.5, "headline", "largest batch", said, share))
        said = (
            f"{pace:.3g} times those with nothing recomputed, each with its largest batch "
            f"(ONNX Runtime's own figure is {experiment.STATED:.3g}, on 16 A100)"
        )
        findings.append(Finding("headline", "samples per second, GELU recomputed", "stated", said, pace))
    return findings


PARTS: Final[dict[str, Callable[[Any, Any], Iterator[Trial]]]] = {
    part.__name__: part for part in (models, switches, optimizers, memory, headline)
}
"""The parts that train, in the order in which they run; "installation", the doctor, comes before."""


def main(part: str, device: str, size: str, tried: str) -> None:
    """Run the trials of a part but those that were tried already, a list of their names as JSON."""
    import warnings

    warnings.simplefilter("ignore")
    report(PARTS[part](device, size), json.loads(tried))


if __name__ == "__main__":
    main(*sys.argv[1:])
