"""A small seeded batch for each kind of model, with labels for its own loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from family_configs import BATCH, IMAGE, LENGTH
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

Batch = dict[str, "torch.Tensor | bool"]
TWO_CLASSES = (0, 1)


def ids() -> torch.Tensor:
    """Return tokens, none of them a special one."""
    return torch.randint(5, 100, (BATCH, LENGTH))


def text(**more: object) -> Batch:
    """Return tokens with a mask that leaves nothing out."""
    tokens = ids()
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), **more}


def classes() -> torch.Tensor:
    """Return a class for each sample."""
    return torch.tensor(TWO_CLASSES)


def causal() -> Batch:
    """Return tokens, and others as labels."""
    return text(labels=ids())


def masked() -> Batch:
    """Return tokens, and a label for each."""
    return text(labels=ids())


def sequence() -> Batch:
    """Return tokens, and a class for each text."""
    return text(labels=classes())


def pixels(size: int = IMAGE) -> torch.Tensor:
    """Return images."""
    return torch.randn(BATCH, 3, size, size)


def image(size: int = IMAGE) -> Batch:
    """Return images, and a class for each."""
    return {"pixel_values": pixels(size), "labels": classes()}


def large_image() -> Batch:
    """Return images that five halvings leave more than one pixel of."""
    return image(64)


def segments() -> Batch:
    """Return images, and a class for each pixel."""
    return {"pixel_values": pixels(64), "labels": torch.randint(0, 2, (BATCH, 64, 64))}


def video() -> Batch:
    """Return clips of four images, and a class for each."""
    return {"pixel_values": torch.randn(BATCH, 4, 3, IMAGE, IMAGE), "labels": classes()}


def wave() -> Batch:
    """Return sound, and a class for each."""
    return {"input_values": torch.randn(BATCH, 800), "labels": classes()}


def spelled_wave() -> Batch:
    """Return sound, and what is said."""
    return {"input_values": torch.randn(BATCH, 800), "labels": torch.randint(3, 20, (BATCH, 5))}


def text_and_image(**more: object) -> Batch:
    """Return texts with an image for each."""
    return text(pixel_values=pixels(), **more)


def contrast() -> Batch:
    """Return texts and images whose pairs a contrastive loss is to find."""
    return {"input_ids": ids(), "pixel_values": pixels(), "return_loss": True}


BATCHES: dict[str, Callable[[], Batch]] = {
    "CAUSAL_LM": causal,
    "MASKED_LM": masked,
    "SEQ_TO_SEQ_CAUSAL_LM": masked,
    "SEQUENCE_CLASSIFICATION": sequence,
    "IMAGE_CLASSIFICATION": image,
    "AUDIO_CLASSIFICATION": wave,
    "CTC": spelled_wave,
    "SEMANTIC_SEGMENTATION": segments,
    "VIDEO_CLASSIFICATION": video,
}
"""The batch of each head, by the name of its mapping in transformers; where a type has several heads, the first."""


class Scored(nn.Module):
    """A model without a loss, and a loss of its first output: a weighted mean of squares."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        output = self.model(**batch)[0]
        weights = torch.linspace(0.5, 1.5, output.shape[-1], dtype=output.dtype)
        return (output * weights).pow(2).mean()


def loss_of(output: object) -> torch.Tensor:
    """Return the loss of what a model returned."""
    return output if isinstance(output, torch.Tensor) else output.loss  # type: ignore[attr-defined]
