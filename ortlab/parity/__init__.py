"""PyTorch against ONNX Runtime, tensor by tensor.

`lab.parity()` compares the two in a lab. Beside it: ORTModule's folders of activation statistics, and what a
model's own code can call.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ortlab.engine.subscriptions import inspect_activation
    from ortlab.engine.tensor_subscriber import TensorSubscriber
    from ortlab.parity.folder_comparison import StatisticsSubscriber, compare_folders
    from ortlab.parity.function_check_run import check_functions
    from ortlab.parity.upstream_folders import merge_folders

_HOMES = {
    "StatisticsSubscriber": "ortlab.parity.folder_comparison",
    "TensorSubscriber": "ortlab.engine.tensor_subscriber",
    "check_functions": "ortlab.parity.function_check_run",
    "compare_folders": "ortlab.parity.folder_comparison",
    "inspect_activation": "ortlab.engine.subscriptions",
    "merge_folders": "ortlab.parity.upstream_folders",
}

__all__ = [
    "StatisticsSubscriber",
    "TensorSubscriber",
    "check_functions",
    "compare_folders",
    "inspect_activation",
    "merge_folders",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: the engine, too, imports modules of this folder."""
    if name not in _HOMES:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    return getattr(importlib.import_module(_HOMES[name]), name)
