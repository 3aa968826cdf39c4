"""The zoo: every model that ortlab promises to train like PyTorch does, with each of its attentions."""

from __future__ import annotations

from image_and_speech_models import beit, clip, convnext, resnet, swin, vit, wav2vec2, whisper
from language_models import (
    albert,
    bart,
    bert,
    bloom,
    cohere,
    deberta_v2,
    distilbert,
    electra,
    fnet,
    gemma,
    gpt2,
    gpt2_padded,
    gpt2_without_mask,
    gpt_neox,
    gradient_checkpointing_bert,
    gradient_checkpointing_gpt2,
    gradient_checkpointing_llama,
    llama,
    llama_grouped_query,
    mamba,
    mistral,
    mixtral,
    opt,
    phi,
    qwen2,
    qwen3,
    roberta,
    t5,
)
from torch_models import (
    autograd_function,
    cnn_with_batch_norm,
    dataclass_output,
    dict_output,
    frozen_layers,
    grouped_convolution,
    gru,
    integer_and_bool_inputs,
    label_smoothing,
    lstm,
    mlp,
    multihead_attention,
    several_losses,
    tied_weights,
    transformer_encoder,
    transposed_convolution,
    untrained_activations,
)
from zoo_case import Entry

OF_TRANSFORMERS = (
    *(bert, roberta, distilbert, albert, electra, deberta_v2, fnet),
    *(gpt2, gpt2_without_mask, gpt2_padded, gpt_neox, opt, bloom, llama, llama_grouped_query),
    *(mistral, mixtral, qwen2, qwen3, gemma, phi, cohere, mamba, t5, bart),
    *(vit, beit, swin, resnet, convnext, clip, whisper, wav2vec2),
)
CHECKPOINTED = (gradient_checkpointing_bert, gradient_checkpointing_gpt2, gradient_checkpointing_llama)
OF_TORCH = (
    *(mlp, cnn_with_batch_norm, grouped_convolution, transposed_convolution, lstm, gru),
    *(multihead_attention, transformer_encoder, untrained_activations, label_smoothing, autograd_function),
    *(frozen_layers, tied_weights, integer_and_bool_inputs, several_losses, dict_output, dataclass_output),
)

ENTRIES = (
    *(Entry(build, attention) for build in OF_TRANSFORMERS for attention in build.attentions),
    *(Entry(build, attention) for build in CHECKPOINTED for attention in ("eager", "sdpa")),
    *(Entry(build, "none") for build in OF_TORCH),
)
"""All of it, whatever transformers is installed; `Entry.absent` says what an older one does not have."""
