"""The engines that ONNX Runtime is compared with: plain PyTorch, and `torch.compile`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ortlab.runs import Initialization


class EagerEngine:
    """Run the module's own forward."""

    name = "eager"
    executed_by = "eager"
    fallback_reason = ""

    def __init__(self, original_forward: Callable[..., Any]) -> None:
        self._forward = original_forward

    def forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the forward in PyTorch."""
        return self._forward(*args, **kwargs)

    def graph_digests(self) -> dict[str, str]:
        """Return nothing: there is no ONNX graph."""
        return {}

    def pending_stage(self) -> str:
        """Return "": there is nothing to build."""
        return ""


class CompileEngine:
    """Run the module's forward through `torch.compile`.

    Compilation happens inside the first forward and cannot be told apart from running, so that counts as
    initialisation.
    """

    name = "compile"
    executed_by = "compile"
    fallback_reason = ""

    def __init__(
        self, original_forward: Callable[..., Any], on_built: Callable[[Initialization], None]
    ) -> None:
        self._original_forward = original_forward
        self._forward: Callable[..., Any] | None = None
        self._called = False
        self._on_built = on_built

    def forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the compiled forward, which is compiled at the first call."""
        start = time.perf_counter()
        if self._forward is None:
            # Here and not in __init__: torch.compile imports Inductor, which takes seconds, and few labs need it.
            self._forward = torch.compile(self._original_forward)
        outputs = self._forward(*args, **kwargs)
        if not self._called:
            elapsed = (time.perf_counter() - start) * 1000
            self._called = True
            self._on_built(Initialization("graph", 0.0, 0.0, 0.0, elapsed, 0.0, elapsed))
        return outputs

    def graph_digests(self) -> dict[str, str]:
        """Return nothing: there is no ONNX graph."""
        return {}

    def pending_stage(self) -> str:
        """Return "graph" while nothing has been compiled."""
        return "" if self._called else "graph"
