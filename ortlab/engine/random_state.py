"""Random state of Python, NumPy and torch: read, put back, and protected from a build that fails."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

GENERATORS: Final = (random.Random, np.random.Generator, np.random.RandomState)
"""What draws random numbers beside torch; the modules `random` and `numpy.random` are read as these."""


def state_of(generator: Any) -> Any:
    """Return the state of a generator of Python, NumPy or torch."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return (getattr(generator, "getstate", None) or generator.get_state)()


def put_state(generator: Any, state: Any) -> None:
    """Give a generator a state that `state_of` has returned."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        (getattr(generator, "setstate", None) or generator.set_state)(state)


@dataclass(frozen=True)
class RandomState:
    """The state of every generator that a training step may draw from."""

    # ONNX Runtime's own generator has no state that can be read. ORTModule seeds it from `torch.manual_seed`, so a
    # restart from the same point seeds it again; see `ortlab.runs.experiment`.

    python: Any
    numpy: Any
    torch_cpu: torch.Tensor
    torch_cuda: tuple[torch.Tensor, ...]

    @classmethod
    def read(cls) -> RandomState:
        """Read the present state."""
        cuda = tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else ()
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda)  # noqa: NPY002

    def put_back(self) -> None:
        """Make this the present state, bit for bit."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002 - the global generator is the one user code draws from
        torch.set_rng_state(self.torch_cpu)
        if self.torch_cuda:
            torch.cuda.set_rng_state_all(list(self.torch_cuda))


@contextmanager
def restored_on_failure() -> Iterator[None]:
    """Put the random state back if the block fails or is interrupted; 1.19.2 does so only when an export succeeds."""
    state = RandomState.read()
    try:
        yield
    except BaseException:
        state.put_back()
        raise
