"""A pytest plugin that fails a notebook's cell where its kernel says that it failed, as `jupyter execute` does.

A magic's UsageError is a line among the outputs, and no exception: nbval overlooks it where outputs are not compared.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from forked import ADDRESS, forked
from nbval.kernel import RunningKernel

PATIENCE_SECONDS: Final = 300
"""How long a kernel may take to start, and to answer, on a machine that is busy with other things."""


def pytest_configure(config) -> None:
    """Fork the kernels of all notebooks from one process, unless there is one already."""
    config.option.nbval_kernel_startup_timeout = PATIENCE_SECONDS
    if ADDRESS not in os.environ:
        kernels = ExitStack()
        config.add_cleanup(kernels.close)
        kernels.enter_context(forked(Path(kernels.enter_context(tempfile.TemporaryDirectory()))))


def await_reply(self: RunningKernel, msg_id: str, timeout: float | None = None) -> None:
    """Wait for the reply to a cell, in the place of nbval's own method, which reads of it only that it is there."""
    while True:
        message = self.get_message(stream="shell", timeout=timeout and max(timeout, PATIENCE_SECONDS))
        if message["parent_header"].get("msg_id") == msg_id:
            break
    reply = message["content"]
    if reply["status"] != "ok":
        raise RuntimeError(
            f"The cell failed. {reply.get('ename', reply['status'])}: {reply.get('evalue', '')}"
        )


RunningKernel.await_reply = await_reply
