"""An engine that builds what ONNX Runtime would run, and lets PyTorch run it: to see the graph of other switches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ortlab.engine.ort import OrtEngine
from ortlab.records.runs import EXECUTED_BY_EAGER


class BuildingEngine(OrtEngine):
    """Build, at each call of the module, the graph and the session for it, and run the module's own forward.

    ONNX Runtime draws no random numbers then. The state of its generator can be set but not read, so nothing could put
    right what it would draw later.
    """

    def forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Build what the call needs, and run it in PyTorch; raises `BuildError` where the build fails."""
        self.prepare(args, kwargs)
        self.executed_by = EXECUTED_BY_EAGER
        return self._original_forward(*args, **kwargs)
