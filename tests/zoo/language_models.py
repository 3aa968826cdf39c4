"""Small language models of transformers: encoders, decoders, and both in one."""

from __future__ import annotations

from typing import Any

import transformers
from zoo_case import (
    HEADS,
    LAYERS,
    NO_DROPOUT,
    SIZE,
    SPECIAL,
    VOCABULARY,
    WIDTH,
    Case,
    text,
    tokens,
    transformer,
)

ENCODER = {**SIZE, **NO_DROPOUT, "vocab_size": VOCABULARY}
DECODER = {**SIZE, **SPECIAL, "vocab_size": VOCABULARY, "use_cache": False}
GROUPED = {**DECODER, "num_key_value_heads": 2}
"""Two heads share the keys and values of one: grouped-query attention."""
DROPOUT_OFF = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
CHECKPOINTS = {"use_reentrant": False}

Described = tuple[Any, dict]


# ---- encoders -------------------------------------------------------------------------------------------------


@transformer("BertForMaskedLM")
def bert() -> Described:
    return transformers.BertConfig(**ENCODER), text(causal=False)


@transformer("RobertaForMaskedLM")
def roberta() -> Described:
    """Counts positions from the input, behind the padding token."""
    return transformers.RobertaConfig(**ENCODER, pad_token_id=1), text(padded=True, causal=False)


@transformer("DistilBertForMaskedLM")
def distilbert() -> Described:
    sizes = {"n_layers": LAYERS, "dim": WIDTH, "n_heads": HEADS, "hidden_dim": 2 * WIDTH}
    off = {"dropout": 0.0, "attention_dropout": 0.0}
    return transformers.DistilBertConfig(**sizes, **off, vocab_size=VOCABULARY), text(causal=False)


@transformer("AlbertForMaskedLM")
def albert() -> Described:
    """All layers share their parameters."""
    return transformers.AlbertConfig(**ENCODER, embedding_size=32), text(causal=False)


@transformer("ElectraForMaskedLM")
def electra() -> Described:
    return transformers.ElectraConfig(**ENCODER, embedding_size=32), text(causal=False)


@transformer("DebertaV2ForMaskedLM", sdpa=False)
def deberta_v2() -> Described:
    relative = {"relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"]}
    return transformers.DebertaV2Config(**ENCODER, **relative), text(causal=False)


@transformer("FNetForMaskedLM", sdpa=False)
def fnet() -> Described:
    """Mixes tokens by a Fourier transform: complex numbers."""
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "intermediate_size": 2 * WIDTH}
    config = transformers.FNetConfig(**sizes, vocab_size=VOCABULARY, hidden_dropout_prob=0.0)
    return config, text(mask=False, causal=False)


# ---- decoders -------------------------------------------------------------------------------------------------


def _gpt2() -> Any:
    return transformers.GPT2Config(
        n_layer=LAYERS,
        n_embd=WIDTH,
        n_head=HEADS,
        vocab_size=VOCABULARY,
        use_cache=False,
        bos_token_id=1,
        eos_token_id=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )


@transformer("GPT2LMHeadModel")
def gpt2() -> Described:
    return _gpt2(), text()


@transformer("GPT2LMHeadModel")
def gpt2_without_mask() -> Described:
    return _gpt2(), text(mask=False)


@transformer("GPT2LMHeadModel")
def gpt2_padded() -> Described:
    return _gpt2(), text(padded=True)


@transformer("GPTNeoXForCausalLM")
def gpt_neox() -> Described:
    return transformers.GPTNeoXConfig(**DECODER), text()


@transformer("OPTForCausalLM")
def opt() -> Described:
    sizes = {**DECODER, "ffn_dim": 2 * WIDTH, "word_embed_proj_dim": WIDTH}
    del sizes["intermediate_size"]
    return transformers.OPTConfig(**sizes, dropout=0.0, attention_dropout=0.0), text()


@transformer("BloomForCausalLM", sdpa=False)
def bloom() -> Described:
    sizes = {"n_layer": LAYERS, "hidden_size": WIDTH, "n_head": HEADS}
    return transformers.BloomConfig(**sizes, use_cache=False, vocab_size=VOCABULARY), text()


@transformer("LlamaForCausalLM")
def llama() -> Described:
    return transformers.LlamaConfig(**DECODER), text()


@transformer("LlamaForCausalLM")
def llama_grouped_query() -> Described:
    return transformers.LlamaConfig(**GROUPED), text(padded=True)


@transformer("MistralForCausalLM")
def mistral() -> Described:
    """Looks back by a window that is shorter than the sentence."""
    return transformers.MistralConfig(**GROUPED, sliding_window=6), text()


@transformer("MixtralForCausalLM")
def mixtral() -> Described:
    """A mixture of experts: each token goes through some of the experts, which torch's kernels sort out."""
    return transformers.MixtralConfig(**GROUPED, num_local_experts=4), text()


@transformer("Qwen2ForCausalLM")
def qwen2() -> Described:
    return transformers.Qwen2Config(**GROUPED), text()


@transformer("Qwen3ForCausalLM")
def qwen3() -> Described:
    return transformers.Qwen3Config(**GROUPED, head_dim=16), text()


@transformer("GemmaForCausalLM")
def gemma() -> Described:
    sizes = {**DECODER, "num_key_value_heads": 1, "head_dim": 16}
    return transformers.GemmaConfig(**sizes), text()


@transformer("PhiForCausalLM")
def phi() -> Described:
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attention_dropout": 0.0}
    return transformers.PhiConfig(**DECODER, **off), text()


@transformer("CohereForCausalLM")
def cohere() -> Described:
    """Its rotary embedding repeats along the last axis and stacks there, which torch's exporter confuses."""
    return transformers.CohereConfig(**GROUPED), text()


@transformer("MambaForCausalLM", sdpa=False)
def mamba() -> Described:
    """A state space model: a loop over the tokens, and depthwise convolutions."""
    sizes = {"num_hidden_layers": LAYERS, "hidden_size": 32, "state_size": 4, "vocab_size": VOCABULARY}
    config = transformers.MambaConfig(**sizes, use_cache=False, pad_token_id=0)
    return config, {"input_ids": tokens(8), "labels": tokens(8)}


# ---- encoder and decoder --------------------------------------------------------------------------------------


@transformer("T5ForConditionalGeneration")
def t5() -> Described:
    sizes = {"num_layers": LAYERS, "d_model": WIDTH, "d_ff": 2 * WIDTH, "num_heads": HEADS, "d_kv": 16}
    starts = {"use_cache": False, "decoder_start_token_id": 0}
    config = transformers.T5Config(**sizes, **starts, vocab_size=VOCABULARY, dropout_rate=0.0)
    return config, text(causal=False)


@transformer("BartForConditionalGeneration")
def bart() -> Described:
    encoder = {"encoder_layers": LAYERS, "encoder_ffn_dim": 2 * WIDTH, "encoder_attention_heads": HEADS}
    decoder = {"decoder_layers": LAYERS, "decoder_ffn_dim": 2 * WIDTH, "decoder_attention_heads": HEADS}
    config = transformers.BartConfig(
        **encoder, **decoder, **DROPOUT_OFF, d_model=WIDTH, vocab_size=VOCABULARY, use_cache=False
    )
    return config, text(causal=False)


# ---- gradient checkpointing -----------------------------------------------------------------------------------


def _checkpointed(case: Case) -> Case:
    case.model.gradient_checkpointing_enable(CHECKPOINTS)
    return case


@transformer("BertForMaskedLM", memory_level=1)
def _bert_at_level_1() -> Described:
    return transformers.BertConfig(**ENCODER), text(causal=False)


def gradient_checkpointing_bert(attention: str) -> Case:
    """Checkpointed regions are part of the graph; ONNX Runtime recomputes instead, at memory level 1."""
    return _checkpointed(_bert_at_level_1(attention))


@transformer("GPT2LMHeadModel", memory_level=1)
def _gpt2_at_level_1() -> Described:
    return _gpt2(), text()


def gradient_checkpointing_gpt2(attention: str) -> Case:
    return _checkpointed(_gpt2_at_level_1(attention))


@transformer("LlamaForCausalLM", memory_level=1)
def _llama_at_level_1() -> Described:
    return transformers.LlamaConfig(**GROUPED), text()


def gradient_checkpointing_llama(attention: str) -> Case:
    return _checkpointed(_llama_at_level_1(attention))
