"""The models of `outside_models`: who made them, how a tiny one is built, and what it is called with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import outside_code as code
import outside_state as state
import torch
from torch import nn

PINNED = (
    "timm==1.0.31",
    "torchvision==0.28.0",
    "vit-pytorch==1.26.11",
    "x-transformers==2.31.10",
    "diffusers==0.42.1",
    "einops==0.8.2",
    "einx==0.4.3",
    "frozendict==2.4.7",
    "loguru==0.7.3",
    "torch-einops-utils==0.2.0",
)
"""What is installed for this benchmark alone, without what it depends on: torch and transformers are here."""


@dataclass(frozen=True)
class Outside:
    """A model that somebody else wrote.

    Attributes
    ----------
    source : str
        The package, or whose code it follows.
    build : callable
        Returns the model.
    batch : callable
        Returns positional and named arguments for a number of samples.
    """

    source: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]


def image(size: int, *, channels: int = 3, frames: int = 0) -> Callable[[int], Any]:
    """Return what makes a batch of images or videos."""
    return lambda count: ((torch.randn(count, channels, *([frames] if frames else []), size, size),), {})


def of_code(source: str, build: Callable[[], nn.Module], batch: Callable[[int], tuple[Any, ...]]) -> Outside:
    """Return a model of `outside_code`."""
    return Outside(source, build, lambda count: (batch(count), {}))


def models() -> dict[str, Outside]:
    """Return all models by name."""
    return {
        **of_timm(),
        **of_torchvision(),
        **of_vit_pytorch(),
        **of_x_transformers(),
        **of_diffusers(),
        **others(),
    }


def of_timm() -> dict[str, Outside]:
    """Return those of timm."""
    sized = {
        "vit_tiny_patch16_224": {"patch_size": 8, "img_size": 32, "depth": 2},
        "swinv2_tiny_window8_256": {
            "img_size": 32,
            "window_size": 4,
            "embed_dim": 24,
            "depths": (2, 2),
            "num_heads": (2, 4),
        },
        "mixer_s32_224": {"img_size": 64},
        "gmlp_ti16_224": {"img_size": 32},
        "xcit_nano_12_p16_224": {"img_size": 32, "depth": 2, "embed_dim": 32},
        "cait_xxs24_224": {"img_size": 32, "depth": 2, "embed_dim": 32},
        "eva02_tiny_patch14_224": {"img_size": 28, "depth": 2, "embed_dim": 48},
    }
    plain = (
        *(
            "regnety_002",
            "mobilenetv3_small_050",
            "convnext_atto",
            "ghostnet_050",
            "dla46_c",
            "poolformer_s12",
        ),
        *("mobilevit_xxs", "inception_next_atto", "resnet10t"),
    )

    def made(name: str, settings: dict[str, Any]) -> Outside:
        def build() -> nn.Module:
            import timm

            return timm.create_model(name, num_classes=7, **settings)  # type: ignore[no-any-return]

        return Outside("timm", build, image(settings.get("img_size", 64)))

    every = {**sized, **{name: {} for name in plain}}
    return {name: made(name, settings) for name, settings in every.items()}


def of_torchvision() -> dict[str, Outside]:
    """Return those of torchvision."""

    def made(name: str, batch: Callable[[int], Any], **settings: Any) -> Outside:
        def build() -> nn.Module:
            import torchvision

            found: nn.Module = torchvision.models.get_model(name, weights=None, **settings)
            return found

        return Outside("torchvision", build, batch)

    return {
        "shufflenet_v2_x0_5": made("shufflenet_v2_x0_5", image(64), num_classes=7),
        "squeezenet1_1": made("squeezenet1_1", image(64), num_classes=7),
        "googlenet": made("googlenet", image(64), num_classes=7, init_weights=False, aux_logits=False),
        "lraspp": made("lraspp_mobilenet_v3_large", image(64), num_classes=7, weights_backbone=None),
        "r3d_18": made("r3d_18", image(32, frames=4), num_classes=7),
        "raft_small": made(
            "raft_small",
            lambda count: (tuple(torch.rand(2, count, 3, 128, 128).unbind()), {"num_flow_updates": 2}),
        ),
    }


def of_vit_pytorch() -> dict[str, Outside]:
    """Return those of vit-pytorch."""
    common = {
        "image_size": 32,
        "patch_size": 8,
        "num_classes": 7,
        "dim": 32,
        "depth": 2,
        "heads": 2,
        "mlp_dim": 64,
    }

    def made(
        name: str, module: str, kind: str, settings: dict[str, Any], size: int = 32, frames: int = 0
    ) -> Any:
        def build() -> nn.Module:
            import importlib

            found: nn.Module = getattr(importlib.import_module(f"vit_pytorch.{module}"), kind)(**settings)
            return found

        return {f"{name} (vit-pytorch)": Outside("vit-pytorch", build, image(size, frames=frames))}

    cross = {
        "image_size": 32,
        "num_classes": 7,
        "sm_dim": 16,
        "lg_dim": 32,
        "sm_patch_size": 8,
        "lg_patch_size": 16,
    }
    cross |= {"depth": 1, "lg_enc_depth": 1, "dropout": 0.0, "emb_dropout": 0.0}
    video = {key: value for key, value in common.items() if key not in ("patch_size", "depth")}
    video |= {
        "image_patch_size": 8,
        "frames": 4,
        "frame_patch_size": 2,
        "spatial_depth": 1,
        "temporal_depth": 1,
    }
    return {
        **made("ViT", "vit", "ViT", common),
        **made("SimpleViT", "simple_vit", "SimpleViT", common),
        **made("DeepViT", "deepvit", "DeepViT", common),
        **made("CaiT", "cait", "CaiT", {**common, "cls_depth": 1}),
        **made("CrossViT", "cross_vit", "CrossViT", cross),
        **made("PiT", "pit", "PiT", {**common, "depth": (1, 1)}),
        **made("ViViT", "vivit", "ViViT", video, frames=4),
    }


def of_x_transformers() -> dict[str, Outside]:
    """Return those of x-transformers."""

    def made(name: str, **settings: Any) -> dict[str, Outside]:
        def build() -> nn.Module:
            from x_transformers import Decoder, TransformerWrapper

            layers = Decoder(dim=32, depth=2, heads=2, attn_dim_head=16, **settings)
            found: nn.Module = TransformerWrapper(num_tokens=50, max_seq_len=32, attn_layers=layers)
            return found

        batch = lambda count: ((code.words(count),), {})  # noqa: E731 - one line as the others
        return {f"x-transformers, {name}": Outside("x-transformers", build, batch)}

    return {
        **made("as it is"),
        **made("rotary", rotary_pos_emb=True),
        **made("ALiBi", alibi_pos_bias=True, alibi_num_heads=1),
        **made("T5 bias", rel_pos_bias=True),
        **made("GLU and RMSNorm", ff_glu=True, use_rmsnorm=True, attn_qk_norm=True),
    }


def of_diffusers() -> dict[str, Outside]:
    """Return those of diffusers."""

    def made(kind: str, batch: Callable[[int], Any], **settings: Any) -> dict[str, Outside]:
        def build() -> nn.Module:
            import diffusers

            found: nn.Module = getattr(diffusers, kind)(**settings)
            return found

        return {f"{kind} (diffusers)": Outside("diffusers", build, lambda count: ((), batch(count)))}

    def noisy(count: int, channels: int = 4, size: int = 16) -> dict[str, Any]:
        return {"sample": torch.randn(count, channels, size, size), "timestep": torch.randint(1000, (count,))}

    text = lambda count: torch.randn(count, 5, 16)  # noqa: E731
    pixels = lambda count: {"sample": torch.randn(count, 3, 16, 16)}  # noqa: E731
    blocks = {"block_out_channels": (16, 32), "norm_num_groups": 4, "layers_per_block": 1}
    halves = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    small = {
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "num_layers": 1,
        "sample_size": 16,
        "patch_size": 2,
    }
    return {
        **made(
            "UNet2DModel",
            lambda count: noisy(count, 3),
            **blocks,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        ),
        **made(
            "UNet2DConditionModel",
            lambda count: {**noisy(count), "encoder_hidden_states": text(count)},
            **blocks,
            cross_attention_dim=16,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        ),
        **made("AutoencoderKL", pixels, **blocks, **halves),
        **made("VQModel", pixels, **blocks, **halves),
        **made(
            "DiTTransformer2DModel",
            lambda count: {
                "hidden_states": torch.randn(count, 4, 16, 16),
                "timestep": torch.randint(1000, (count,)),
                "class_labels": torch.randint(10, (count,)),
            },
            **small,
            num_embeds_ada_norm=10,
        ),
        **made(
            "SD3Transformer2DModel",
            lambda count: {
                "hidden_states": torch.randn(count, 4, 16, 16),
                "encoder_hidden_states": text(count),
                "pooled_projections": torch.randn(count, 16),
                "timestep": torch.randint(1000, (count,)),
            },
            **small,
            in_channels=4,
            out_channels=4,
            joint_attention_dim=16,
            caption_projection_dim=16,
            pooled_projection_dim=16,
            pos_embed_max_size=16,
        ),
        **made(
            "FluxTransformer2DModel",
            lambda count: {
                "hidden_states": torch.randn(count, 16, 4),
                "encoder_hidden_states": text(count),
                "pooled_projections": torch.randn(count, 16),
                "timestep": torch.rand(count),
                "img_ids": torch.randint(4, (16, 3)).float(),
                "txt_ids": torch.zeros(5, 3),
            },
            patch_size=1,
            in_channels=4,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=16,
            pooled_projection_dim=16,
            axes_dims_rope=(4, 4, 8),
        ),
    }


def others() -> dict[str, Outside]:
    """Return those that are written out here, and two of transformers that the zoo does not hold."""
    embedded = code.Embedded
    pairs = lambda count: (code.words(count), code.words(count))  # noqa: E731
    hidden = lambda count: (torch.zeros(2, count, code.WIDTH), torch.zeros(2, count, code.WIDTH))  # noqa: E731
    return {
        "nanoGPT": of_code("nanoGPT", lambda: code.NanoGPT(flash=True), pairs),
        "minGPT": of_code("minGPT", code.NanoGPT, pairs),
        "GraphSAGE, mean": of_code("PyTorch Geometric", lambda: code.Sage("mean"), code.graph),
        "GraphSAGE, max": of_code("PyTorch Geometric", lambda: code.Sage("max"), code.graph),
        "GAT": of_code("PyTorch Geometric", code.Gat, code.graph),
        "GCN": of_code("PyTorch Geometric", code.Gcn, code.graph),
        "Informer": of_code("Time-Series-Library", lambda: embedded(code.ProbAttention()), code.series),
        "Autoformer": of_code(
            "Time-Series-Library", lambda: embedded(code.AutoCorrelation(by_batch=False)), code.series
        ),
        "Autoformer, delays of the batch": of_code(
            "Time-Series-Library", lambda: embedded(code.AutoCorrelation(by_batch=True)), code.series
        ),
        "FEDformer": of_code("Time-Series-Library", lambda: embedded(code.FourierBlock()), code.series),
        "TimesNet": of_code("Time-Series-Library", lambda: embedded(code.Periods()), code.series),
        "DLinear": of_code("Time-Series-Library", code.Decomposed, code.series),
        "PatchTST": of_code("Time-Series-Library", code.Patches, code.series),
        "word_language_model": of_code(
            "pytorch/examples", code.WordModel, lambda count: (code.words(count).t(), hidden(count))
        ),
        "vae": of_code("pytorch/examples", code.Vae, lambda count: (torch.rand(count, 1, 8, 8),)),
        "fast_neural_style": of_code(
            "pytorch/examples", code.StyleNet, lambda count: (torch.rand(count, 3, 16, 16),)
        ),
        "siamese_network": of_code(
            "pytorch/examples", code.Siamese, lambda count: tuple(torch.rand(2, count, 1, 16, 16).unbind())
        ),
        "seq2seq, teacher forcing": of_code(
            "PyTorch tutorials", lambda: code.Translation(forcing=True), pairs
        ),
        "seq2seq, its own words": of_code(
            "PyTorch tutorials", lambda: code.Translation(forcing=False), pairs
        ),
        "SNGAN, discriminator": of_code(
            "SNGAN", state.Discriminator, lambda count: (torch.randn(count, 3, 8, 8),)
        ),
        "VQ-VAE, moving averages": of_code(
            "VQ-VAE-2", state.Quantizer, lambda count: (torch.randn(count, 3, 8, 8),)
        ),
        "EEGNet": of_code("EEGNet", state.EegNet, lambda count: (torch.randn(2 * count, 1, 4, 8),)),
        "PixelCNN": of_code("PixelCNN", state.PixelCnn, lambda count: (torch.randn(count, 1, 8, 8),)),
        "Barlow Twins": of_code("Barlow Twins", state.BarlowTwins, state.two),
        "DINO, with its teacher": of_code("DINO", state.Dino, state.two),
        "StyleGAN2, modulated": of_code(
            "StyleGAN2", state.Modulated, lambda count: (torch.randn(count, 4, 6, 6), torch.randn(count, 8))
        ),
        "S4D": of_code("S4", state.S4d, lambda count: (torch.randn(count, 4, 10 + count),)),
        "Informer (transformers)": Outside("transformers", informer, forecast),
        "Reformer (transformers)": Outside(
            "transformers", reformer, lambda count: ((), {"input_ids": torch.randint(50, (count, 16))})
        ),
    }


def informer() -> nn.Module:
    """Build a tiny Informer of transformers."""
    from transformers import InformerConfig, InformerForPrediction

    sizes = {
        "d_model": 16,
        "encoder_layers": 2,
        "decoder_layers": 1,
        "encoder_ffn_dim": 16,
        "decoder_ffn_dim": 16,
    }
    rates = dict.fromkeys(
        ("dropout", "attention_dropout", "activation_dropout", "encoder_layerdrop", "decoder_layerdrop"), 0.0
    )
    config = InformerConfig(
        prediction_length=4, context_length=8, lags_sequence=[1, 2], num_time_features=1, **sizes, **rates
    )
    return InformerForPrediction(config)


def forecast(count: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a batch of it."""
    return (), {
        "past_values": torch.rand(count, 10) + 1,
        "past_time_features": torch.rand(count, 10, 1),
        "past_observed_mask": torch.ones(count, 10),
        "future_values": torch.rand(count, 4) + 1,
        "future_time_features": torch.rand(count, 4, 1),
    }


def reformer() -> nn.Module:
    """Build a tiny Reformer of transformers, with both of its attentions."""
    from transformers import ReformerConfig, ReformerModelWithLMHead

    config = ReformerConfig(
        vocab_size=50,
        hidden_size=16,
        attention_head_size=8,
        num_attention_heads=2,
        feed_forward_size=16,
        attn_layers=["local", "lsh"],
        axial_pos_shape=(4, 4),
        axial_pos_embds_dim=(8, 8),
        num_buckets=4,
        local_attn_chunk_length=4,
        lsh_attn_chunk_length=4,
        max_position_embeddings=16,
        is_decoder=True,
        hash_seed=1,
        hidden_dropout_prob=0.0,
        local_attention_probs_dropout_prob=0.0,
        lsh_attention_probs_dropout_prob=0.0,
    )
    return ReformerModelWithLMHead(config)
