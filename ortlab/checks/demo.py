"""The README's first minute without a notebook: a small BERT learns English on ONNX Runtime, within a budget.

The text is Python's own language reference, which ships with every Python (`pydoc_data.topics`, 460 kB of
English). The tokenizer is trained on it and the weights are drawn from the seed, so nothing is downloaded.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor, nn

from ortlab.options.configuration import NOTHING_RECOMPUTED
from ortlab.records.verdicts import FASTER, NO_DIFFERENCE, SLOWER

if TYPE_CHECKING:
    from ortlab.records.comparison import Comparison
    from ortlab.records.runs import Ledger


BUDGET: Final = "70%"

_TURN_STEPS: Final = 4
"""Steps of each turn of the comparison, so that the demo takes about a minute."""

TO_TRY: Final = (
    "lab = %ort_wrap model                      # your own model, in a notebook: the panel appears",
    f"%ort_budget {BUDGET}                            # after a %%ort_step cell with your training step",
    "%ort_compare engine=eager memory_level=1   # against PyTorch, and against ONNX Runtime's own level 1",
)


def main(setting: Setting, show: Callable[[str], None] = print) -> Ledger:
    """Train on ONNX Runtime, take 30 % off the memory that a step needs, and compare with PyTorch."""
    # Returns all runs: the first on ONNX Runtime, then those of the comparison in turns.
    import ortlab
    from ortlab import units
    from ortlab.render import text
    from ortlab.render.page import Folded, Note, Page
    from ortlab.render.pages import compose

    model, step = prepare(setting)
    weights = units.count(sum(parameter.numel() for parameter in model.parameters()))
    show(
        f"A BERT of {setting.layers} layers and {weights} weights learns English from Python's language reference,"
        f" in batches of {setting.batch} x {setting.length} tokens.\n"
    )
    lab = ortlab.wrap(model)
    show(f"lab.step(step, n={setting.steps})                    training steps on ONNX Runtime ...")
    lab.step(step, n=setting.steps)
    show(f'lab.budget("{BUDGET}")                       which plans take 30 % off what a step needs? ...')
    budget = lab.budget(BUDGET)
    show(
        'lab.compare(..., engine="eager")         ONNX Runtime with and without them, and PyTorch, in turns ...'
    )
    comparison = lab.compare(
        NOTHING_RECOMPUTED,
        *([{"engine": "ort"}] if budget.applied else []),  # as the budget has left it
        baseline={"engine": "eager"},
        n=min(setting.steps, _TURN_STEPS),
    )
    answer = next(block.text for block in compose(budget).blocks if isinstance(block, Note))
    page = compose(comparison)
    short = Page(page.title, tuple(block for block in page.blocks if not isinstance(block, Folded)))
    show("\n" + "\n\n".join(textwrap.fill(words, 100) for words in (answer, advice(comparison))))
    show("\n" + text.render(short))
    show("\nNext, with a model of yours (ortlab lab opens a notebook):\n")
    for line in TO_TRY:
        show(f"    {line}")
    return lab.runs


def advice(comparison: Comparison) -> str:
    """Say what to make of ONNX Runtime's time beside PyTorch's."""
    # The comparison's baseline is PyTorch, and its first contrast ONNX Runtime without plans.
    plain = comparison.contrasts[0]
    if plain.verdict == SLOWER:
        return (
            "Without plans ONNX Runtime is slower than PyTorch here, as it is with many models on a CPU. Use it where"
            " memory is what limits you, and measure your own model: some are quicker on it."
        )
    if plain.verdict == FASTER:
        return (
            "Without plans ONNX Runtime is faster than PyTorch here. Measure your own model before you rely on that:"
            " many are slower on a CPU."
        )
    found = "Without plans ONNX Runtime's time could not be told from PyTorch's here, for the machine was unsteady"
    if plain.verdict == NO_DIFFERENCE:
        found = "Without plans ONNX Runtime and PyTorch take the same time here, within 10 %"
    return (
        f"{found}; memory is what decides. Measure your own model: on a CPU some are quicker on ONNX Runtime, and"
        " many are slower."
    )


VOCABULARY = 4096
"""Entries of the tokenizer."""

PADDING, MASK = "[PAD]", "[MASK]"

NOT_PREDICTED = -100
"""Label of a token that the loss leaves out, as torch's cross entropy defines it."""

PREDICTED, BECOME_MASK, BECOME_ANYTHING = 0.15, 0.8, 0.1
"""Share of tokens to predict, and shares of those that are hidden or replaced, as in BERT's paper."""


@dataclass(frozen=True)
class Setting:
    """The size of the experiment."""

    steps: int = 15  # of each run
    layers: int = 4
    hidden: int = 256  # size of a layer, a multiple of 64
    batch: int = 8  # sequences
    length: int = 128  # tokens in a sequence
    seed: int = 2024


def english_text() -> list[str]:
    """Return the topics of Python's language reference, in alphabetical order of their names."""
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Train a byte-level BPE tokenizer of `VOCABULARY` entries; the same texts give the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=[PADDING, MASK], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


class MaskedText:
    """Batches for masked-language modelling, drawn from torch's random state."""

    # A rerun restores that state, so it sees the same batches without being told to. `tokens` are the ids of the whole
    # text, shape (tokens,), int64; `mask_id` is the id of the token that hides another.

    def __init__(self, tokens: Tensor, mask_id: int, batch: int, length: int) -> None:
        self._tokens = tokens
        self._mask_id = mask_id
        self._batch = batch
        self._length = length

    def draw(self) -> dict[str, Tensor]:
        """Cut random passages and hide 15 % of their tokens."""
        # Of those, 80 % become the mask, 10 % a random token, and 10 % stay. Returns `input_ids`, `attention_mask` and
        # `labels`, each of shape (batch, length), int64.
        starts = torch.randint(len(self._tokens) - self._length, (self._batch, 1))
        original = self._tokens[starts + torch.arange(self._length)]
        chosen = torch.rand(original.shape) < PREDICTED
        chosen[:, 0] = True  # a batch without a label has no loss
        fate = torch.rand(original.shape)
        anything = torch.randint(VOCABULARY, original.shape)
        shown = torch.where(chosen & (fate < BECOME_MASK), self._mask_id, original)
        shown = torch.where(chosen & (fate >= 1 - BECOME_ANYTHING), anything, shown)
        return {
            "input_ids": shown,
            "attention_mask": torch.ones_like(shown),
            "labels": torch.where(chosen, original, NOT_PREDICTED),
        }


def bert(setting: Setting, vocabulary: int) -> nn.Module:
    """Make a BERT for masked-language modelling with fresh weights."""
    # Dropout is off: the engines draw different masks from one seed, so their losses could not be compared.
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=setting.hidden,
        num_hidden_layers=setting.layers,
        num_attention_heads=setting.hidden // 64,
        intermediate_size=4 * setting.hidden,
        max_position_embeddings=setting.length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model: nn.Module = BertForMaskedLM(config)
    return model.train()


def prepare(setting: Setting) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Make the model, with the weights of the seed, and its training step."""
    texts = english_text()
    tokenizer = train_tokenizer(texts)
    tokens = torch.tensor([token for one in tokenizer.encode_batch(texts) for token in one.ids])
    torch.manual_seed(setting.seed)
    model = bert(setting, tokenizer.get_vocab_size())
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    data = MaskedText(tokens, tokenizer.get_vocab()[MASK], setting.batch, setting.length)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(**data.draw()).loss
        loss.backward()
        optimizer.step()
        return loss

    return model, step
