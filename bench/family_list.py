"""The model families of transformers that the zoo does not train, each with a tiny configuration and a batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import transformers
from family_batches import (
    BATCHES,
    Batch,
    Scored,
    classes,
    contrast,
    ids,
    large_image,
    loss_of,
    masked,
    pixels,
    sequence,
    text,
    text_and_image,
    wave,
)
from family_configs import BATCH, IMAGE, LENGTH, PATCH, VOCABULARY, tiny
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

IN_THE_ZOO = frozenset(
    """bert roberta distilbert albert electra deberta-v2 gpt2 gpt_neox opt bloom llama mistral qwen2 qwen3 gemma phi t5
    bart vit clip whisper wav2vec2 resnet convnext swin mamba mixtral fnet cohere beit""".split()  # noqa: SIM905
)


@dataclass(frozen=True)
class Family:
    """How a model of one family is built, and what it is called with.

    Attributes
    ----------
    model : str
        Its class in transformers.
    config : type
        The class of its configuration.
    batch : callable
        Makes a batch.
    entries : dict
        Entries of the configuration that the names do not tell; see `family_configs.tiny`.
    scored : bool
        Whether it has no loss of its own.
    """

    model: str
    config: type
    batch: Callable[[], Batch]
    entries: dict[str, Any] = field(default_factory=dict)
    scored: bool = False

    def build(self, attention: str) -> tuple[nn.Module, Batch]:
        """Return the model, with seeded weights, and a batch."""
        torch.manual_seed(0)
        config = tiny(self.config, self.entries)
        if attention == "eager":  # the other is what transformers takes wherever a part has it
            config._attn_implementation = attention  # noqa: SLF001 - as the zoo sets it
        model = getattr(transformers, self.model)(config)
        for part in model.modules():
            if isinstance(part, torch.nn.Dropout):  # some have their probability in the code
                part.p = 0.0
        return (Scored(model) if self.scored else model), self.batch()

    def attentions(self) -> tuple[str, ...]:
        """Return the kinds of attention that it has."""
        has = getattr(getattr(transformers, self.model), "_supports_sdpa", False)
        return ("sdpa", "eager") if has else ("eager",)


CONVOLUTIONS = {
    "conv_dim": (32, 32),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "num_labels": 4,
    "classifier_proj_size": 32,
    "vocab_size": 32,
}
STAGES = {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1]}
HEADS_OF_STAGES = {"num_attention_heads": [1, 2, 4, 4]}
FOUR_HEADS = {"num_key_value_heads": 4}
LATENT = {
    **FOUR_HEADS,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": ...,
    "qk_head_dim": ...,
}
VISION = {"image_size": IMAGE, "patch_size": PATCH}

# What the names of a configuration's entries do not tell.
ENTRIES: dict[str, dict[str, Any]] = {
    "mobilebert": {"intra_bottleneck_size": 32, "num_feedforward_networks": 2},
    "squeezebert": {
        f"{name}_groups": 2 for name in ("q", "k", "v", "post_attention", "intermediate", "output")
    },
    "funnel": {"block_sizes": [1, 1], "num_decoder_layers": 1, "num_hidden_layers": ...},
    "longformer": {"attention_window": [4, 4]},
    "big_bird": {"attention_type": "original_full"},
    "nystromformer": {"num_landmarks": 4, "segment_means_seq_len": 16},
    "gptj": {"rotary_dim": 4},
    "codegen": {"rotary_dim": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "deepseek_v2": {**LATENT, "num_experts_per_tok": 2, "topk_method": "greedy"},
    "deepseek_v3": LATENT,
    **dict.fromkeys(("axk1", "glm4_moe_lite", "minicpm3", "mistral4", "youtu"), LATENT),
    **dict.fromkeys(("axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa"), FOUR_HEADS),
    "hunyuan_v1_moe": {"head_dim": 8},
    "ministral": {"head_dim": 8},
    "switch_transformers": {"decoder_start_token_id": 0},
    "longcat_flash": {**LATENT, "head_dim": 8},
    "encoder-decoder": {"decoder": {"is_decoder": True, "add_cross_attention": True}},
    "nemotron": {"num_key_value_heads": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
        "n_mamba_heads": 2,
    },
    "zamba2": {
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "n_mamba_heads": 4,
        "mamba_headdim": 16,
        "mamba_d_state": 8,
        "chunk_size": 8,
    },
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
    "wav2vec2-bert": {"feature_projection_input_dim": 80},
    "kimi_linear": {"num_experts_per_tok": 2, "num_experts": 4},
    "bailing_hybrid": {"n_group": 1, "topk_group": 1, "num_experts": 4, "num_experts_per_tok": 2},
    "lilt": {"hidden_size": 48},
    "mamba2": {"head_dim": 16, "num_heads": 4, "state_size": 8, "n_groups": 1, "chunk_size": 8, "expand": 2},
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8},
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8},
    "rembert": {"input_embedding_size": 16, "output_embedding_size": 24},
    "ibert": {"quant_mode": False},
    "deberta": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 8},
    "canine": {
        "num_hash_buckets": 64,
        "num_hash_functions": 4,
        "downsampling_rate": 2,
        "upsampling_kernel_size": 2,
        "local_transformer_stride": 8,
    },
    "esm": {"vocab_size": VOCABULARY, "position_embedding_type": "rotary", "mask_token_id": 3},
    "esmc": {"num_key_value_heads": 4},
    "led": {
        "attention_window": [4, 4],
        "max_encoder_position_embeddings": 64,
        "max_decoder_position_embeddings": 64,
    },
    "longt5": {"encoder_attention_type": "local", "local_radius": 3, "decoder_start_token_id": 0},
    "reformer": {
        "attn_layers": ["local", "local"],
        "local_attn_chunk_length": 8,
        "axial_pos_shape": [4, 4],
        "axial_pos_embds_dim": [16, 16],
        "is_decoder": True,
    },
    "modernbert": {"local_attention": 8},
    "sew": {**CONVOLUTIONS, "squeeze_factor": 2},
    "sew-d": {**CONVOLUTIONS, "squeeze_factor": 2},
    "wavlm": {**CONVOLUTIONS, "num_buckets": 16, "max_bucket_distance": 32},
    "data2vec-audio": {**CONVOLUTIONS, "num_conv_pos_embeddings": 2, "conv_pos_kernel_size": 3},
    "wav2vec2-conformer": {
        **CONVOLUTIONS,
        "conv_depthwise_kernel_size": 7,
        "position_embeddings_type": "relative",
        "max_source_positions": 500,
    },
    **dict.fromkeys(("hubert", "unispeech", "unispeech-sat", "mctct"), CONVOLUTIONS),
    "audio-spectrogram-transformer": {
        "max_length": 32,
        "num_mel_bins": 16,
        "frequency_stride": 8,
        "time_stride": 8,
    },
    "data2vec-vision": {"use_relative_position_bias": True},
    "pvt": {**STAGES, **HEADS_OF_STAGES, "hidden_size": ...},
    "pvt_v2": {"hidden_size": ...},
    "segformer": {**STAGES, **HEADS_OF_STAGES, "hidden_size": ...},
    "mobilevit": {
        "image_size": 64,
        "patch_size": 2,
        "hidden_sizes": [16, 24, 32],
        "neck_hidden_sizes": [8, 8, 16, 16, 24, 24, 32],
    },
    "mobilevitv2": {"image_size": 64, "patch_size": 2, "width_multiplier": 0.25},
    "mobilenet_v1": {"image_size": 64, "depth_multiplier": 0.25},
    "mobilenet_v2": {"image_size": 64, "depth_multiplier": 0.25},
    "efficientnet": {
        "image_size": 64,
        "width_coefficient": 0.25,
        "depth_coefficient": 0.2,
        "hidden_dim": 320,
    },
    "regnet": {**STAGES, "embedding_size": 8, "groups_width": 8},
    "bit": {**STAGES, "embedding_size": 8, "num_groups": 4},
    "poolformer": {**STAGES, "patch_size": ...},
    "levit": {
        "image_size": 64,
        "hidden_sizes": [16, 24, 32],
        "num_attention_heads": [2, 2, 4],
        "depths": [1, 1, 1],
        "key_dim": [8, 8, 8],
        "mlp_ratio": [2, 2, 2],
        "attention_ratio": [2, 2, 2],
        "patch_size": ...,
        "drop_path_rate": 0,
    },
    "cvt": {
        "embed_dim": [16, 16, 32],
        "num_heads": [1, 2, 4],
        "depth": [1, 1, 1],
        "drop_path_rate": [0.0] * 3,
        "attention_drop_rate": [0.0] * 3,
        "drop_rate": [0.0] * 3,
        "hidden_size": ...,
        "patch_size": ...,
    },
    "convnextv2": {**STAGES, "patch_size": 4},
    "focalnet": {
        "embed_dim": 8,
        "depths": [1, 1],
        "hidden_sizes": [8, 16],
        "focal_levels": [1, 1],
        "focal_windows": [3, 3],
        "patch_size": 4,
    },
    "swinv2": {"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4, "patch_size": 2},
    "donut-swin": {"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4, "patch_size": 2},
    "swiftformer": {"depths": [1, 1, 1, 1], "embed_dims": [8, 16, 16, 32]},
    "dpt": {
        "num_hidden_layers": 4,
        "backbone_out_indices": [0, 1, 2, 3],
        "neck_hidden_sizes": [8, 8, 16, 16],
        "fusion_hidden_size": 16,
        "is_hybrid": False,
    },
    "videomae": {"num_frames": 4, "tubelet_size": 2},
    "vivit": {"num_frames": 4, "tubelet_size": [2, 8, 8]},
    "timesformer": {"num_frames": 4},
    "vjepa2": {"frames_per_clip": 4, "tubelet_size": 2, "crop_size": IMAGE, "patch_size": PATCH},
    "perceiver": {
        "num_latents": 8,
        "d_latents": 32,
        "num_blocks": 1,
        "num_self_attends_per_block": 1,
        "num_self_attention_heads": 2,
        "num_cross_attention_heads": 2,
        "max_position_embeddings": LENGTH,
    },
    "layoutlmv3": {
        "input_size": IMAGE,
        "coordinate_size": 6,
        "shape_size": 4,
        "max_2d_position_embeddings": 64,
        "has_relative_attention_bias": True,
        "has_spatial_attention_bias": True,
        "rel_pos_bins": 8,
        "max_rel_pos": 16,
        "rel_2d_pos_bins": 8,
        "max_rel_2d_pos": 16,
    },
    "prophetnet": {
        "num_hidden_layers": ...,
        "num_encoder_attention_heads": 4,
        "num_decoder_attention_heads": 4,
        "ngram": 2,
        "disable_ngram_loss": False,
        "num_buckets": 8,
        "relative_max_distance": 16,
    },
    "hunyuan_v1_dense": {"head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "hiera": {
        "image_size": [IMAGE, IMAGE],
        "embed_dim": 8,
        "depths": [1, 1],
        "num_heads": [1, 2],
        "query_stride": [2, 2],
        "num_query_pool": 1,
        "patch_size": [7, 7],
        "masked_unit_size": [8, 8],
    },
}


def videos() -> Batch:
    """Return clips under the name that some models have for them."""
    return {"pixel_values_videos": torch.randn(BATCH, 4, 3, IMAGE, IMAGE), "labels": classes()}


def features(**more: torch.Tensor) -> Batch:
    """Return sound as it is heard, by frequency."""
    return {"input_features": torch.randn(BATCH, 64, 80), **more}


LARGE_IMAGES = """convnextv2 mobilevit mobilevitv2 mobilenet_v1 mobilenet_v2 efficientnet poolformer levit swiftformer
    regnet bit cvt pvt_v2""".split()  # noqa: SIM905
BATCH_OF: dict[str, Callable[[], Batch]] = {
    **dict.fromkeys(LARGE_IMAGES, large_image),
    "fnet": lambda: {"input_ids": ids(), "labels": ids()},
    "audio-spectrogram-transformer": lambda: {
        "input_values": torch.randn(BATCH, 32, 16),
        "labels": classes(),
    },
    "vjepa2": videos,
    "parakeet_ctc": lambda: features(
        attention_mask=torch.ones(BATCH, 64, dtype=torch.long), labels=torch.randint(3, 20, (BATCH, 2))
    ),
    "wav2vec2-bert": lambda: features(labels=classes()),
    "perceiver": lambda: {"inputs": ids(), "attention_mask": torch.ones(BATCH, LENGTH), "labels": ids()},
    "layoutlmv3": lambda: text_and_image(bbox=boxes(), labels=classes()),
    "git": lambda: text_and_image(labels=ids()),
    "imagegpt": lambda: {"input_ids": ids(), "labels": classes()},
}


def boxes() -> torch.Tensor:
    """Return a box on the page for each token."""
    return torch.randint(0, 50, (BATCH, LENGTH, 1)).expand(BATCH, LENGTH, 4).clone()


def by_head() -> dict[str, Family]:
    """Return the families that transformers lists by what they predict."""
    found: dict[str, Family] = {}
    for head, batch in BATCHES.items():
        for name, classes_of in getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES").items():
            if name in IN_THE_ZOO or name in found:
                continue
            model = classes_of if isinstance(classes_of, str) else classes_of[0]
            found[name] = Family(
                model, CONFIG_MAPPING[name], BATCH_OF.get(name, batch), ENTRIES.get(name, {})
            )
    return found


def of_their_own() -> dict[str, Family]:
    """Return the families whose batch or head is like no other's."""
    T = transformers  # noqa: N806 - so many of its names stand here
    series = {
        "past_values": (BATCH, 10),
        "past_time_features": (BATCH, 10, 1),
        "future_values": (BATCH, 4),
        "future_time_features": (BATCH, 4, 1),
    }

    def forecast() -> Batch:
        drawn = {name: torch.randn(*shape) for name, shape in series.items()}
        return {**drawn, "past_observed_mask": torch.ones(BATCH, 10)}

    def patches() -> Batch:
        return {"past_values": torch.randn(BATCH, 16, 2), "future_values": torch.randn(BATCH, 4, 2)}

    times = {
        "prediction_length": 4,
        "context_length": 8,
        "lags_sequence": [1, 2],
        "num_time_features": 1,
        "pad_token_id": ...,
    }
    patched = {
        "context_length": 16,
        "patch_length": 4,
        "patch_stride": 4,
        "num_input_channels": 2,
        "prediction_length": 4,
        "loss": "mse",
        "pad_token_id": ...,
    }
    return {
        "siglip": Family(
            "SiglipModel", T.SiglipConfig, contrast, {"text_config": {"max_position_embeddings": LENGTH}}
        ),
        "clipseg": Family("CLIPSegModel", T.CLIPSegConfig, contrast),
        "chinese_clip": Family("ChineseCLIPModel", T.ChineseCLIPConfig, contrast),
        "align_text": Family("AlignTextModel", T.AlignTextConfig, text, scored=True),
        "groupvit_text": Family("GroupViTTextModel", T.GroupViTTextConfig, text, scored=True),
        "x_clip": Family(
            "XCLIPModel",
            T.XCLIPConfig,
            lambda: text(pixel_values=torch.randn(BATCH, 2, 3, IMAGE, IMAGE), return_loss=True),
            {
                "vision_config": {"num_frames": 2, "mit_num_hidden_layers": 1},
                "prompt_layers": 1,
            },
        ),
        "blip": Family("BlipForConditionalGeneration", T.BlipConfig, lambda: text_and_image(labels=ids())),
        "vilt": Family(
            "ViltForQuestionAnswering",
            T.ViltConfig,
            lambda: text_and_image(labels=torch.rand(BATCH, 2)),
            {"num_labels": 2, "max_image_length": -1},
        ),
        "lxmert": Family(
            "LxmertForQuestionAnswering",
            T.LxmertConfig,
            lambda: text(
                visual_feats=torch.randn(BATCH, 6, 16), visual_pos=torch.rand(BATCH, 6, 4), labels=classes()
            ),
            {"num_qa_labels": 3, "l_layers": 1, "x_layers": 1, "r_layers": 1, "visual_feat_dim": 16},
        ),
        "visual_bert": Family(
            "VisualBertForVisualReasoning",
            T.VisualBertConfig,
            lambda: text(
                visual_embeds=torch.randn(BATCH, 6, 16),
                visual_attention_mask=torch.ones(BATCH, 6),
                visual_token_type_ids=torch.ones(BATCH, 6, dtype=torch.long),
                labels=classes(),
            ),
            {"visual_embedding_dim": 16},
        ),
        "speech_to_text": Family(
            "Speech2TextForConditionalGeneration",
            T.Speech2TextConfig,
            lambda: {
                "input_features": torch.randn(BATCH, 40, 80),
                "attention_mask": torch.ones(BATCH, 40, dtype=torch.long),
                "labels": ids(),
            },
            {"conv_channels": 32, "decoder_start_token_id": 2},
        ),
        "wav2vec2_ctc": Family(
            "Wav2Vec2ForCTC", T.Wav2Vec2Config, BATCHES["CTC"], {**CONVOLUTIONS, "ctc_loss_reduction": "mean"}
        ),
        "wavlm_ctc": Family(
            "WavLMForCTC",
            T.WavLMConfig,
            BATCHES["CTC"],
            {**CONVOLUTIONS, "num_buckets": 16, "max_bucket_distance": 32},
        ),
        "vit_mae": Family(
            "ViTMAEForPreTraining",
            T.ViTMAEConfig,
            lambda: {"pixel_values": pixels(), "noise": torch.rand(BATCH, 16)},
        ),
        "vit_msn": Family("ViTMSNForImageClassification", T.ViTMSNConfig, BATCHES["IMAGE_CLASSIFICATION"]),
        "upernet": Family(
            "UperNetForSemanticSegmentation",
            T.UperNetConfig,
            BATCHES["SEMANTIC_SEGMENTATION"],
            {
                "backbone_config": T.ConvNextConfig(
                    hidden_sizes=[8, 8, 16, 16],
                    depths=[1, 1, 1, 1],
                    out_features=["stage1", "stage2", "stage3", "stage4"],
                    drop_path_rate=0.0,
                ).to_dict(),
                "hidden_size": 16,
                "pool_scales": [1, 2],
                "auxiliary_channels": 8,
                "auxiliary_in_channels": 16,
            },
        ),
        "glpn": Family(
            "GLPNForDepthEstimation",
            T.GLPNConfig,
            lambda: {"pixel_values": pixels(64), "labels": torch.rand(BATCH, 64, 64) + 0.1},
            {**STAGES, **HEADS_OF_STAGES, "decoder_hidden_size": 16, "hidden_size": ...},
        ),
        "yolos": Family(
            "YolosForObjectDetection",
            T.YolosConfig,
            lambda: {"pixel_values": pixels()},
            {"image_size": [IMAGE, IMAGE], "num_detection_tokens": 4},
            scored=True,
        ),
        "time_series_transformer": Family(
            "TimeSeriesTransformerForPrediction", T.TimeSeriesTransformerConfig, forecast, times
        ),
        "informer": Family(
            "InformerForPrediction", T.InformerConfig, forecast, {**times, "attention_type": "full"}
        ),
        "autoformer": Family(
            "AutoformerForPrediction",
            T.AutoformerConfig,
            forecast,
            {**times, "moving_average": 3, "label_length": 2},
        ),
        "patchtst": Family(
            "PatchTSTForPrediction", T.PatchTSTConfig, patches, {**patched, "distribution_output": "normal"}
        ),
        "patchtsmixer": Family("PatchTSMixerForPrediction", T.PatchTSMixerConfig, patches, patched),
        "decision_transformer": Family(
            "DecisionTransformerModel",
            T.DecisionTransformerConfig,
            lambda: {
                "states": torch.randn(BATCH, 6, 5),
                "actions": torch.randn(BATCH, 6, 3),
                "rewards": torch.randn(BATCH, 6, 1),
                "returns_to_go": torch.randn(BATCH, 6, 1),
                "timesteps": torch.arange(6)[None].expand(BATCH, 6).clone(),
                "attention_mask": torch.ones(BATCH, 6),
            },
            {"state_dim": 5, "act_dim": 3, "max_ep_len": 20},
            scored=True,
        ),
        "univnet": Family(
            "UnivNetModel",
            T.UnivNetConfig,
            lambda: {
                "input_features": torch.randn(BATCH, 10, 100),
                "noise_sequence": torch.randn(BATCH, 10, 64),
            },
            {"model_hidden_channels": 8, "pad_token_id": ...},
            scored=True,
        ),
        "dac": Family(
            "DacModel",
            T.DacConfig,
            lambda: {"input_values": torch.randn(BATCH, 1, 64)},
            {
                "encoder_hidden_size": 8,
                "downsampling_ratios": [2, 2],
                "decoder_hidden_size": 16,
                "n_codebooks": 2,
                "codebook_size": 16,
                "codebook_dim": 4,
                "upsampling_ratios": [2, 2],
                "pad_token_id": ...,
            },
            scored=True,
        ),
        "detr": Family(
            "DetrForObjectDetection",
            T.DetrConfig,
            lambda: {"pixel_values": pixels(64), "pixel_mask": torch.ones(BATCH, 64, 64, dtype=torch.long)},
            {
                "use_timm_backbone": False,
                "use_pretrained_backbone": False,
                "backbone": None,
                "backbone_config": T.ResNetConfig(
                    embedding_size=8,
                    hidden_sizes=[8, 8, 16, 16],
                    depths=[1, 1, 1, 1],
                    layer_type="basic",
                    out_features=["stage4"],
                ).to_dict(),
                "num_queries": 5,
            },
            scored=True,
        ),
        "bert_classification": Family("BertForSequenceClassification", T.BertConfig, sequence),
        "electra_masked": Family("ElectraForMaskedLM", T.ElectraConfig, masked),
        "hubert_classification": Family(
            "HubertForSequenceClassification", T.HubertConfig, wave, CONVOLUTIONS
        ),
    }


def families() -> dict[str, Family]:
    """Return all families by name."""
    own = of_their_own()
    return dict(sorted({**by_head(), **own}.items()))


__all__ = ["Family", "families", "loss_of"]
