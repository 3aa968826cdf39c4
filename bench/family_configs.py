"""Make the configuration of any model of transformers tiny, by the names of its entries."""

from __future__ import annotations

import re
from typing import Any

HIDDEN, HEADS, LAYERS, WIDER, VOCABULARY = 32, 4, 2, 64, 120
BATCH, LENGTH, IMAGE, PATCH = 2, 16, 32, 8

# The first pattern that matches the whole name of an entry gives its value; None leaves the entry as it is.
SIZES: tuple[tuple[str, int | None], ...] = (
    (r"(pad|eos|bos|sep|cls|mask|unk|decoder_start)_token_id", None),
    (r".*(vocab_size|vocabulary_size)(_per_layer_input)?", VOCABULARY),
    (r"type_vocab_size", 2),
    (r"(encoder_|decoder_)?(num_key_value_heads|num_kv_heads)", 2),
    (r"n_heads?|(num_)?heads|.*(num|encoder|decoder)_attention_heads", HEADS),
    (r".*head_dim|d_kv|d_head|attention_head_size", 8),
    (r".*lora_rank|.*low_rank_dim", 16),
    (r"first_k_dense_replace|n_group|topk_group|n_shared_experts|num_shared_experts", 1),
    (r"num_experts_per_tok|moe_topk|moe_top_k|num_selected_experts|moe_k|top_k_experts", 2),
    (r"(num|n|moe_num|router_num)_(local_|routed_)?experts", 4),
    (r"(moe_|shared_expert_|moe_shared_expert_)intermediate_size|expert_(ffn.*|dim|size)", HIDDEN),
    (r".*(intermediate_size|intermediate_dim|ffn_dim|ffn_size)|d_ff|n_inner|d_inner", WIDER),
    (r"dim_feedforward|feed_forward_size|ffn_hidden_size", WIDER),
    (
        r"(.*_)?hidden_size(_per_layer_input)?|d_model|n_embe?d|emb_dim|dim|embed_dim|hidden_dim|lru_width",
        HIDDEN,
    ),
    (r"embedding_size|projection_dim|word_embed_proj_dim|.*projection_size", HIDDEN),
    (r"n_layers?|depth|(en|de)coder_layers|(.*_)?num_(hidden_|encoder_|decoder_)?layers", LAYERS),
    (r".*max_position_embeddings|n_positions|n_ctx|max_(source|target)_positions", 64),
    (r"max_sequence_length|max_seq_len|seq_length", 64),
    (r"sliding_window|local_attention|attention_chunk_size|(local_)?window_size|chunk_size", 8),
    (r"image_size|img_size", IMAGE),
    (r"patch_size", PATCH),
)
OFF = re.compile(r".*(drop|noise|layerdrop|spec_augment|use_cache|mask_time_prob|mask_feature_prob).*")


def tiny(config_class: type, given: dict[str, Any] | None = None) -> Any:  # noqa: C901 - a list of rules
    """Return a configuration of a class in which everything that has a size is small, and nothing is random.

    Parameters
    ----------
    config_class
        A configuration of transformers; those inside it are made tiny, too.
    given
        Entries that shall have these values; ``...`` leaves one as the class has it, and a dict names entries of a
        configuration inside.
    """
    given = dict(given or {})
    default = config_class()
    chosen: dict[str, Any] = {}
    for name, value in vars(default).items():
        if name.startswith("_") or name in given or _is_read_only(config_class, name):
            continue
        if OFF.fullmatch(name) and isinstance(value, bool | float | int):
            chosen[name] = type(value)(0)
        elif isinstance(value, int) and not isinstance(value, bool):
            size = size_of(name)
            if size is not None:
                chosen[name] = size
    for name, inner in configs_inside(default).items():
        entries = given.pop(name, {})
        if entries is not ... and "model_type" in entries:  # a whole configuration, of another class perhaps
            chosen[name] = entries
        elif entries is not ...:
            chosen[name] = tiny(type(inner), entries).to_dict()
    if "pad_token_id" not in given:
        chosen |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        if hasattr(default, "decoder_start_token_id"):
            chosen["decoder_start_token_id"] = 0
    chosen |= {name: value for name, value in given.items() if value is not ...}
    return config_class(**chosen)


def size_of(name: str) -> int | None:
    """Return what an entry of this name is made, None where it stays."""
    return next((size for pattern, size in SIZES if re.fullmatch(pattern, name)), None)


def configs_inside(config: Any) -> dict[str, Any]:
    """Return the configurations that are entries of one, by name."""
    from transformers import PretrainedConfig

    return {name: value for name, value in vars(config).items() if isinstance(value, PretrainedConfig)}


def _is_read_only(config_class: type, name: str) -> bool:
    found = getattr(config_class, name, None)
    return isinstance(found, property) and found.fset is None
