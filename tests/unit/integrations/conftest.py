"""Tiny seeded models, data in memory, and a process that forgets what accelerate has set for it."""

from __future__ import annotations

import pytest
import small_transformers
import torch

ROWS, LENGTH, WORDS, LABELS = 24, 8, 48, 3


@pytest.fixture(autouse=True)
def _accelerate_forgotten(accelerate_forgotten):
    """Any test in here may make an Accelerator."""


@pytest.fixture
def bert():
    """Return what makes a classifier, the same one each time."""

    def make():
        torch.manual_seed(0)
        sizes = {"layers": 1, "width": 16, "words": WORDS, "max_position_embeddings": LENGTH}
        return small_transformers.bert("ForSequenceClassification", **sizes, num_labels=LABELS)

    return make


@pytest.fixture
def gpt2():
    """Return what makes a language model, the same one each time."""

    def make():
        torch.manual_seed(0)
        sizes = {"layers": 1, "width": 16, "words": WORDS, "n_positions": LENGTH}
        return small_transformers.gpt2(**sizes, use_cache=True)

    return make


class Rows(torch.utils.data.Dataset):
    """Tokens with a label each; `extra` is no argument of any forward, and has to be left out."""

    def __init__(self, count: int = ROWS, *, language: bool = False) -> None:
        draw = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(1, WORDS, (count, LENGTH), generator=draw)
        self.labels = self.tokens.sum(1) % LABELS
        if language:  # the first words of some rows do not count
            self.labels = self.tokens.clone()
            self.labels[::2, :3] = -100

    def __len__(self) -> int:
        """Count the rows."""
        return len(self.tokens)

    def __getitem__(self, row: int) -> dict[str, object]:
        """Return a row."""
        return {
            "input_ids": self.tokens[row],
            "attention_mask": torch.ones(LENGTH, dtype=torch.long),
            "labels": self.labels[row],
            "extra": torch.tensor(row),
        }


@pytest.fixture
def rows():
    """Return the data set's class."""
    return Rows
