"""A model of the zoo with its batch, and how models of transformers become one."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import transformers

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH, LENGTH, VOCABULARY = 2, 16, 300
LAYERS, WIDTH, HEADS = 2, 64, 4
SIZE = {
    "num_hidden_layers": LAYERS,
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "intermediate_size": 2 * WIDTH,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def loss_of(output: Any) -> torch.Tensor:
    """Return the loss of an output: a tensor, or what is called loss in a mapping or a dataclass."""
    if isinstance(output, torch.Tensor):
        return output
    return output["loss"] if isinstance(output, dict) else output.loss


@dataclass(frozen=True)
class Case:
    """A model, what to call it with, how its output becomes a loss, the options to wrap it with, and its step size."""

    model: torch.nn.Module
    batch: dict[str, torch.Tensor]
    loss: Callable[[Any], torch.Tensor] = loss_of
    options: dict[str, object] = field(default_factory=dict)
    learning_rate: float = 1e-2


@dataclass(frozen=True)
class Entry:
    """One line of the zoo: a model with one of its attention implementations."""

    build: Callable[[str], Case]
    attention: str

    @property
    def name(self) -> str:
        """Say what it is, as in `bert-sdpa`; `lstm-none` has no attention to choose."""
        return f"{self.build.__name__}-{self.attention}"

    def make(self) -> Case:
        """Build the model and its batch from a fixed seed."""
        torch.manual_seed(0)
        return self.build(self.attention)

    def absent(self) -> str:
        """Say why the installed transformers cannot make it; empty if it can."""
        model = getattr(self.build, "model", None)
        if model is None:
            return ""
        known = getattr(transformers, model, None)
        if known is None:
            return f"transformers {transformers.__version__} has no {model}"
        if self.attention == "sdpa" and not known._supports_sdpa:
            return f"transformers {transformers.__version__} has no sdpa attention for {model}"
        return ""


def transformer(
    model: str, *, sdpa: bool = True, learning_rate: float = 1e-2, **options: object
) -> Callable[[Callable[[], tuple[Any, dict]]], Callable[[str], Case]]:
    """Make a builder of a function that returns the configuration and the batch of a model of transformers.

    Parameters
    ----------
    model
        Name of the class.
    sdpa
        Whether the newest transformers has `scaled_dot_product_attention` for it, beside its own ("eager").
    learning_rate
        Of the optimizer.
    **options
        To wrap it with.
    """

    def decorate(describe: Callable[[], tuple[Any, dict]]) -> Callable[[str], Case]:
        @functools.wraps(describe)
        def build(attention: str) -> Case:
            config, batch = describe()
            config._attn_implementation = attention
            made = getattr(transformers, model)(config)
            return Case(made, batch, options=options, learning_rate=learning_rate)

        build.model = model
        build.attentions = ("eager", "sdpa") if sdpa else ("eager",)
        return build

    return decorate


def tokens(length: int = LENGTH, count: int = BATCH) -> torch.Tensor:
    """Return random tokens, none of which is special."""
    return torch.randint(5, VOCABULARY, (count, length))


def text(*, mask: bool = True, padded: bool = False, causal: bool = True) -> dict[str, torch.Tensor]:
    """Return a batch of sentences; with `padded`, the second is shorter, and its padding is not predicted."""
    ids = tokens()
    labels = ids.clone() if causal else tokens()
    seen = torch.ones_like(ids)
    if padded:
        seen[1, 10:] = 0
        labels = labels.masked_fill(seen == 0, -100)
    batch = {"input_ids": ids, "labels": labels}
    return batch | {"attention_mask": seen} if mask else batch


def images(count: int = BATCH) -> dict[str, torch.Tensor]:
    """Return images of 32 by 32 points, each with the number of its class."""
    return {"pixel_values": torch.randn(count, 3, 32, 32), "labels": torch.arange(1, count + 1)}
