"""The only package that touches the insides of onnxruntime.training 1.19.2 and of torch's exporter."""

from __future__ import annotations

import logging
import threading
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

_loading = threading.Lock()
_loaded: ModuleType | None = None


def load() -> ModuleType:
    """Import ORTModule, ready to train beside the installed torch, and return ``onnxruntime.training.ortmodule``."""
    # Importing ORTModule changes torch for the whole process. That stays, because ORTModule needs it:
    # :func:`torch.manual_seed` and :func:`torch.cuda.manual_seed` seed ONNX Runtime too, and
    # :func:`torch.utils.checkpoint.checkpoint` steps aside while ORTModule exports a model at memory level 1.
    global _loaded  # noqa: PLW0603 - the process has one torch and one ORT to adapt
    with _loading:
        if _loaded is None:
            _loaded = _load()
        return _loaded


def _load() -> ModuleType:
    from ortlab.engine import (
        devices,
        exporter,
        extensions,
        graph_optimizers,
        installation,
        repairs,
        retrieved_parameters,
    )
    from ortlab.engine.build_environment import build_environment
    from ortlab.engine.operators import gradients, symbolics, untrained_operators
    from ortlab.engine.passes import chunked_loss, graph_passes
    from ortlab.engine.tracing import taps

    installation.check()
    devices.preload()
    # Without the user's variables: 1.19.2 takes some for the whole process here, and takes a number only (int("on")).
    with _root_logger_kept(), build_environment({}):
        exporter.prepare_torch()  # the torch.onnx of torch 2.4 imports onnxruntime itself
        installation.import_apart("onnxruntime.training.ortmodule")
        from onnxruntime.training import ortmodule

    with warnings.catch_warnings():
        # An export imports these; DeepSpeed is for one of them only, which asks for it by name.
        warnings.filterwarnings("ignore", "DeepSpeed import error", UserWarning)
        import onnxruntime.training.utils.hooks  # noqa: F401
    exporter.adapt_ort()
    extensions.install()
    symbolics.install()
    untrained_operators.install()
    gradients.install()
    graph_passes.install()
    chunked_loss.install()
    graph_optimizers.install()
    retrieved_parameters.install()
    repairs.install_all()
    taps.install()  # last: what it adds to the outputs of a trace stands behind what the repairs add
    module: ModuleType = ortmodule
    return module


@contextmanager
def _root_logger_kept() -> Iterator[None]:
    """Put the root logger's handlers back: 1.19.2 calls `logging.basicConfig` (onnxruntime/tools/logger.py)."""
    # With a handler there, the user's own `logging.basicConfig` would do nothing.
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
