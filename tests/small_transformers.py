"""Small transformers with random weights, and a step over them: every family takes the same words for its sizes.

What only one family has, `more` takes as its configuration calls it; it wins over what is given here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers


def _made(name: str, config: dict[str, object]) -> torch.nn.Module:
    kind = getattr(transformers, name)
    return kind(kind.config_class(**config)).train()


def _sizes(layers: int, width: int, heads: int, words: int) -> dict[str, object]:
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": 2 * width}
    return {**sizes, "num_attention_heads": heads, "vocab_size": words}


def bert(head="ForMaskedLM", *, family="Bert", layers=2, width=32, heads=2, words=64, drop=0.0, **more):
    drops = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), drop)
    return _made(family + head, {**_sizes(layers, width, heads, words), **drops, **more})


def gpt2(*, layers=2, width=32, heads=2, words=64, drop=0.0, **more):
    sizes = {"n_layer": layers, "n_embd": width, "n_head": heads, "vocab_size": words}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), drop)
    ends = {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
    return _made("GPT2LMHeadModel", {**sizes, **drops, **ends, **more})


def llama(*, layers=2, width=32, heads=2, words=64, drop=0.0, **more):
    sizes = _sizes(layers, width, heads, words)
    return _made("LlamaForCausalLM", {**sizes, "attention_dropout": drop, "use_cache": False, **more})


def t5(*, layers=2, width=32, heads=2, words=64, drop=0.0, **more):
    sizes = {"num_layers": layers, "d_model": width, "num_heads": heads, "d_kv": width // heads}
    rest = {"d_ff": 2 * width, "vocab_size": words, "dropout_rate": drop, "use_cache": False}
    return _made("T5ForConditionalGeneration", {**sizes, **rest, "decoder_start_token_id": 0, **more})


def vit(*, layers=2, width=32, heads=2, drop=0.0, size=32, patch=8, **more):
    sizes = {**_sizes(layers, width, heads, 0), "image_size": size, "patch_size": patch}
    drops = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), drop)
    return _made("ViTForImageClassification", {**sizes, **drops, **more})


def batch_of(rows=2, length=8, words=64, *, first=0, mask=False) -> dict[str, torch.Tensor]:
    """Draw tokens from `first` on, which are their own labels; with `mask`, none of them is padding."""
    ids = torch.randint(first, words, (rows, length))
    return {"input_ids": ids, **({"attention_mask": torch.ones_like(ids)} if mask else {}), "labels": ids}


def step_of(model, batch, optimizer=None) -> Callable[[], torch.Tensor]:
    """Return a step that gives its loss, which the gradients survive where there is no optimizer."""

    def step() -> torch.Tensor:
        loss = model(**batch).loss
        loss.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return step
