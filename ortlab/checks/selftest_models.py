"""Small models of the zoo's core, with seeded weights and no dropout; a step of each; how far two trainings part."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

NAMES: Final = ("BERT", "GPT-2", "Llama", "T5", "ViT", "DeBERTa-v2")
_IDS: Final = 128
"""Vocabulary."""


def small_model(
    name: str, device: str, *, wide: bool = False
) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Make a model of `NAMES`, in training mode, and a batch of its keyword arguments, labels included.

    `wide` means four layers of 256 and 8 sequences of 128, for measuring memory; otherwise two of 64, and 2 of 16.
    """
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
    """Return how far two trainings from one start have parted; nan where something is not a number.

    That is the largest of the relative differences of a loss, step by step, and of the difference of the ends over the
    way of the other from the start (2-norms of `weights`). Single weights are not compared: a key's bias has no
    gradient but rounding, and nothing to compare with.
    """
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
