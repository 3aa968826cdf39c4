"""Collect what a build says, instead of letting it run over the user's cell; `lab.messages` holds it."""

from __future__ import annotations

import logging
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from ortlab.messages import Message

_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")
_ORT_LINE: Final = re.compile(r"^\S+ \S+ \[(?P<level>[VIWEF]):onnxruntime:[^\]]*\] ?(?P<text>.*)$")
_ORT_LEVELS: Final = {"V": "DEBUG", "I": "INFO", "W": "WARNING", "E": "ERROR", "F": "ERROR"}


class _Collector(logging.Handler):
    def __init__(self, messages: list[Message]) -> None:
        super().__init__()
        self._messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        text = _COLOURS.sub("", record.getMessage()).strip()
        self._messages.append(Message(record.levelname, "ORTModule", text))


@contextmanager
def python_messages(messages: list[Message]) -> Iterator[None]:
    """Collect ORTModule's log records and the Python warnings of the block.

    Parameters
    ----------
    messages
        Where they are appended.
    """
    logger = logging.getLogger("orttraining")
    collector, propagated = _Collector(messages), logger.propagate
    logger.addHandler(collector)
    logger.propagate = False
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        logger.removeHandler(collector)
        logger.propagate = propagated
    seen = dict.fromkeys(str(warning.message) for warning in caught)
    messages.extend(Message("WARNING", "exporter", text) for text in seen)


@contextmanager
def runtime_messages(messages: list[Message]) -> Iterator[None]:
    """Collect what ONNX Runtime's C++ code writes to standard error in the block.

    Only for blocks that run no user code: the file descriptor is the whole process's. What does not look like a
    message of ONNX Runtime, a crash report for one, is written to standard error afterwards.

    Parameters
    ----------
    messages
        Where they are appended.
    """
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        try:
            os.dup2(file.fileno(), 2)
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            _read(file.read().decode(errors="replace"), messages)


def _read(output: str, messages: list[Message]) -> None:
    for line in output.splitlines():
        plain = _COLOURS.sub("", line)
        match = _ORT_LINE.match(plain)
        if match:
            messages.append(Message(_ORT_LEVELS[match["level"]], "ONNX Runtime", match["text"]))
        elif plain.strip():
            sys.stderr.write(line + "\n")
