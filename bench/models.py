"""The models that are measured: transformers of eight families with seeded weights, nothing downloaded."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]

VOCABULARY, LABELS, IGNORED = 512, 10, -100


def bert(layers: int, hidden: int, *, heads: int = 8, vocabulary: int = 30522) -> nn.Module:
    """Return a BERT for masked-language modelling, without dropout, in training mode."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(2024)
    config = BertConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        intermediate_size=4 * hidden,
        vocab_size=vocabulary,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForMaskedLM(config).train()


class Tiny(nn.Module):
    """What `--quick` measures instead of a BERT: called alike, made without transformers, exported at once."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2024)
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.hidden = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.LayerNorm(16))
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Batch:
        """Return the loss of each token's own label, and the logits."""
        hidden = self.embedding(input_ids) * attention_mask[..., None]
        logits = self.head(hidden + self.hidden(hidden))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def tiny() -> tuple[nn.Module, Batch]:
    """Return the model of `--quick` and a batch for it."""
    return Tiny().train(), tokens(2, 16, VOCABULARY)


def tokens(batch: int, length: int, vocabulary: int = 30522) -> Batch:
    """Return random `input_ids`, `attention_mask` (all ones) and `labels`, each of shape (batch, length), int64."""
    ids = torch.randint(5, vocabulary, (batch, length), generator=torch.Generator().manual_seed(7))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def families(
    layers: int, hidden: int, *, heads: int = 4, inner: int = 2, vocabulary: int = VOCABULARY
) -> dict[str, Callable[[str], nn.Module]]:
    """Return a constructor for each family, which takes the attention ("eager" or "sdpa"); dropout is 0 everywhere.

    Feed-forward layers are `inner` times as wide as the others, but GPT-2's and BLOOM's, which are four times as wide.
    """
    import transformers as t

    common = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    wide = {"intermediate_size": inner * hidden}
    text = {"vocab_size": vocabulary}
    gpt2 = {"n_layer": layers, "n_embd": hidden, "n_head": heads}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
    image = {"image_size": 32, "patch_size": 8, "num_labels": LABELS}
    t5 = {"num_layers": layers, "d_model": hidden, "num_heads": heads, "d_kv": hidden // heads}
    relative = {"relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"]}
    configs = {
        "BERT": (t.BertForMaskedLM, t.BertConfig(**common, **wide, **text, **still)),
        "GPT-2": (
            t.GPT2LMHeadModel,
            t.GPT2Config(**gpt2, **text, **ends, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
        ),
        "Llama": (
            t.LlamaForCausalLM,
            t.LlamaConfig(**common, **wide, **text, **ends, num_key_value_heads=2, pad_token_id=0),
        ),
        "T5": (
            t.T5ForConditionalGeneration,
            t.T5Config(
                **t5, d_ff=inner * hidden, **text, use_cache=False, decoder_start_token_id=0, dropout_rate=0.0
            ),
        ),
        "ViT": (t.ViTForImageClassification, t.ViTConfig(**common, **wide, **image, **still)),
        "DeBERTa-v2": (
            t.DebertaV2ForMaskedLM,
            t.DebertaV2Config(**common, **wide, **text, **still, **relative),
        ),
        "ALBERT": (t.AlbertForMaskedLM, t.AlbertConfig(**common, **wide, **text, **still)),
        "BLOOM": (
            t.BloomForCausalLM,
            t.BloomConfig(n_layer=layers, hidden_size=hidden, n_head=heads, **text, **ends),
        ),
    }

    def constructor(family: str) -> Callable[[str], nn.Module]:
        def build(attention: str) -> nn.Module:
            kind, config = configs[family]
            config._attn_implementation = attention  # noqa: SLF001 - what from_pretrained(attn_implementation=) sets
            torch.manual_seed(2024)
            return kind(config).train()

        return build

    return {family: constructor(family) for family in configs}


def attentions(family: str) -> tuple[str, ...]:
    """Return the attention implementations that transformers has for a family."""
    return ("eager",) if family in {"DeBERTa-v2", "BLOOM"} else ("eager", "sdpa")


def batches(family: str, count: int, batch: int, length: int) -> list[Batch]:
    """Return different batches for training; sentences are padded on the right, and padding is not predicted."""
    generator = torch.Generator().manual_seed(11)
    if family == "ViT":
        return [
            {
                "pixel_values": torch.randn(batch, 3, 32, 32, generator=generator),
                "labels": torch.randint(LABELS, (batch,), generator=generator),
            }
            for _ in range(count)
        ]
    lengths = torch.linspace(length, length / 2, batch).long()[:, None]
    mask = (torch.arange(length) < lengths).long()
    made = []
    for _ in range(count):
        ids = torch.randint(5, VOCABULARY, (batch, length), generator=generator)
        labels = torch.randint(5, VOCABULARY, (batch, length), generator=generator) if family == "T5" else ids
        made.append(
            {
                "input_ids": torch.where(mask == 1, ids, 0),
                "attention_mask": mask,
                "labels": torch.where(mask == 1, labels, IGNORED),
            }
        )
    return made
