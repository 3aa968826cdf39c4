"""PyTorch with each layer under `torch.utils.checkpoint`: what ONNX Runtime's recompute plans are compared with."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from ortlab.engine.repeated_layers import find_layers
from ortlab.errors import StepError
from ortlab.records.coverage import Coverage


class CheckpointEngine:
    """Run the module's own forward, with each layer under `torch.utils.checkpoint.checkpoint`.

    Of each layer only the inputs are kept for the backward pass, which runs its forward again. The random state is kept
    with them, so that dropout draws the same masks and all numbers are those of plain PyTorch, bit for bit. Layers get
    their other forward for the time of a call only; between calls the model is as the user made it.

    Layers run plainly where no gradients are recorded. In training, a layer gets no cache of keys and values, which the
    second forward would fill once more; transformers' own checkpointing does the same, and is off in the meantime.

    `paths` are those that the user named; see `find_layers`. Raises `OptionError` where the model has no such layers.
    """

    fallback_reason = ""
    coverage = total_coverage = Coverage()

    def __init__(
        self,
        module: torch.nn.Module,
        original_forward: Callable[..., Any],
        name: str = "checkpoint",
        paths: Sequence[str] = (),
    ) -> None:
        self.name = self.executed_by = name
        self._module = module
        self._forward = original_forward
        self.layers = find_layers(module, paths)

    @property
    def detail(self) -> str:
        """What is checkpointed, in words: "6 T5Block in encoder.block"."""
        return ", ".join(map(str, self.layers))

    def forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the forward in PyTorch, its layers checkpointed.

        Raises `StepError` where a layer in training is given a cache that holds something.
        """
        with ExitStack() as meanwhile:
            meanwhile.enter_context(_own_checkpointing_off(self._module))
            for layers in self.layers:
                for layer in layers.modules:
                    meanwhile.enter_context(_replaced(layer))
            return self._forward(*args, **kwargs)

    def start_over(self) -> None:
        """Do nothing: torch's own random state is all there is."""

    def graph_digests(self) -> dict[str, str]:
        """Return nothing: there is no ONNX graph."""
        return {}

    def pending_stage(self) -> str:
        """Return "": there is nothing to build."""
        return ""


@contextmanager
def _replaced(layer: torch.nn.Module) -> Iterator[None]:
    """Put a checkpointed forward on a layer in the block; it calls the one that a library may have put there."""
    on_instance = layer.__dict__.get("forward")
    layer.__dict__["forward"] = partial(_checkpointed, layer, layer.forward)
    try:
        yield
    finally:
        if on_instance is None:
            layer.__dict__.pop("forward", None)
        else:
            layer.__dict__["forward"] = on_instance


def _checkpointed(layer: torch.nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a layer's forward so that only its inputs are kept."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if layer.training:
        args = tuple(None if _is_cache(layer, value) else value for value in args)
        kwargs = {name: None if _is_cache(layer, value) else value for name, value in kwargs.items()}
        kwargs |= {name: False for name in ("use_cache",) if kwargs.get(name)}
    elif any(_is_cache(layer, value) for value in (*args, *kwargs.values())):
        return forward(*args, **kwargs)  # generation, with gradients recorded by oversight
    from torch.utils.checkpoint import checkpoint

    # Keyword arguments are bound here, because checkpoint has some of its own.
    return checkpoint(
        partial(forward, **kwargs),
        *args,
        use_reentrant=False,
        preserve_rng_state=True,
        context_fn=partial(_contexts, layer),
    )


def _is_cache(layer: torch.nn.Module, value: object) -> bool:
    """Tell whether an argument is a cache of transformers.

    Raises `StepError` if it holds something and the layer trains: with it, the layer's outputs depend on more than its
    inputs.
    """
    caches = sys.modules.get("transformers.cache_utils")
    if caches is None or not isinstance(value, caches.Cache):
        return False
    if layer.training and value.get_seq_length():
        raise StepError(
            f"A {type(layer).__name__} that is given a filled cache cannot be checkpointed.",
            why="The backward pass would run the layer again, and the cache has changed by then.",
            fix='Train without past_key_values, or with engine="eager".',
        )
    return True


def _contexts(layer: torch.nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return what goes around the two forwards of a layer."""
    return nullcontext(), _SecondForward(layer)


class _SecondForward(AbstractContextManager[None]):
    """Around a layer's second forward: its buffers stay as they are, and nothing inside it is checkpointed again.

    Running statistics must not be updated twice by one step, so what has changed since the first forward began is
    hidden behind copies. A backward that is repeated (`retain_graph=True`) enters it several times.
    """

    def __init__(self, layer: torch.nn.Module) -> None:
        self._layer = layer
        self._versions = {name: buffer._version for name, buffer in layer.named_buffers()}
        self._inside = ExitStack()

    def __enter__(self) -> None:
        changed = {
            id(buffer)
            for name, buffer in self._layer.named_buffers()
            if self._versions.get(name) != buffer._version
        }
        with ExitStack() as inside:
            inside.enter_context(_own_checkpointing_off(self._layer))
            for part in self._layer.modules():
                # A normalisation's statistics change without a new version, the count of its batches with one.
                if any(id(buffer) in changed for buffer in part.buffers(recurse=False)) or _has_statistics(
                    part
                ):
                    kept = dict(part._buffers)
                    inside.callback(part._buffers.update, kept)
                    part._buffers.update(
                        {name: None if buffer is None else buffer.clone() for name, buffer in kept.items()}
                    )
            self._inside = inside.pop_all()

    def __exit__(self, *raised: object) -> None:
        self._inside.close()


def _has_statistics(part: torch.nn.Module) -> bool:
    return bool(getattr(part, "track_running_stats", False))


@contextmanager
def _own_checkpointing_off(module: torch.nn.Module) -> Iterator[None]:
    """Switch transformers' own checkpointing off in the block: layers would be recomputed twice."""
    on = [part for part in module.modules() if getattr(part, "gradient_checkpointing", None) is True]
    try:
        for part in on:
            part.gradient_checkpointing = False  # type: ignore[assignment]
        yield
    finally:
        for part in on:
            part.gradient_checkpointing = True  # type: ignore[assignment]
