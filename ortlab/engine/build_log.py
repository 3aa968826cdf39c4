"""Collect what is said while a model is built and run, as the log level has it, into the lab's messages."""

from __future__ import annotations

import functools
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ortlab.engine.patching import replace
from ortlab.engine.runtime_log import CERR, CLOG, COLOURS, RuntimeLog, StandardStream
from ortlab.options.log_levels import LogLevel, severity_of
from ortlab.records.messages import EXPORTER, ORTMODULE, RUNTIME, MessageLog

if TYPE_CHECKING:
    from ortlab.engine.runtime_log import Line

_MEANT_FOR_DEVELOPERS: Final = (
    "type is missing, so it may result in wrong shape inference",
    "[WARNING] - None",
    "unsupported broadcast between ",
    "Potential unsafe merge between symbolic expressions",
)
"""Lines of the exporter that the export filter leaves out (options.DebugOptions.torch_exporter_filter)."""

_OWN_FILE: Final = "Serializing optimized model with Graph Optimization level greater than"
"""Begins a warning about the graph that ortlab itself has a session write, reads at once and deletes."""

_STOPPED: Final = "Following nodes are unreachable for gradient back propagation"
"""Begins a warning about gradients that stop where the forward stops them, as at what it writes to its weights."""

_SHAPE_INFERENCE: Final = "onnxruntime.tools.symbolic_shape_infer"
"""The logger of symbolic shape inference, which runs in the export."""

_DEEP_COPY_UNWANTED: Final = "Since the user requested not to deep copy this model, "
_DEEP_COPY_IMPOSSIBLE: Final = (
    "Due to the limited GPU memory execution manager does not create a deep copy of this model. "
)


# ---- Python: ORTModule and the exporter --------------------------------------------------------------------------


class _Listener(logging.Handler):
    """A handler that passes on what a logger says, by its severity and text."""

    def __init__(self, keep: Callable[[str, str], None]) -> None:
        super().__init__()
        self._keep = keep

    def emit(self, record: logging.LogRecord) -> None:
        self._keep(severity_of(record.levelno), record.getMessage())


def _corrected(text: str) -> str:
    """Exchange the two warnings about deep copies, whose conditions 1.19.2 has swapped."""
    # They stand in ``_graph_transition_manager._get_exported_model``.
    if text.startswith(_DEEP_COPY_UNWANTED):
        return _DEEP_COPY_IMPOSSIBLE + "The" + text.removeprefix(_DEEP_COPY_UNWANTED).removeprefix("the")
    if text.startswith(_DEEP_COPY_IMPOSSIBLE):
        return (
            _DEEP_COPY_UNWANTED
            + "the"
            + text.removeprefix(_DEEP_COPY_IMPOSSIBLE).removeprefix("Therefore, the")
        )
    return text


def ortmodule_logger(level: LogLevel, log: MessageLog, rank: int) -> logging.Logger:
    """Make the logger that a manager of ORTModule writes to, which is nobody else's; its records go to `log`."""
    # 1.19.2 takes one from the registry of `logging`, where two models with different levels share it, and the second
    # one's level holds for both. Most levels let only rank 0 write.

    def keep(severity: str, text: str) -> None:
        log.add(severity, ORTMODULE, _corrected(COLOURS.sub("", text).strip()))

    logger = logging.Logger("orttraining", level.python_level)  # noqa: LOG001 - not to be shared, see above
    logger.addHandler(_Listener(keep))
    logger.disabled = level.rank_zero_only and rank != 0
    return logger


@contextmanager
def exporter_messages(level: LogLevel, log: MessageLog, rank: int) -> Iterator[None]:
    """Collect the warnings of the block, of Python and of torch's C++ code, and the graphs that the exporter prints."""
    # Standard output and standard error stay what they are: the user's model, and perhaps a debugger, runs in the
    # block.
    seen = set[str]()
    heard = not (level.rank_zero_only and rank != 0)

    def keep(severity: str, text: str, *, is_graph: bool = False, where: str = "") -> None:
        for_developers = any(words in text for words in _MEANT_FOR_DEVELOPERS)
        left_out = level.graph_filter if is_graph else level.export_filter and for_developers
        if heard and level.lets_through(severity) and not left_out and text not in seen:
            seen.add(text)
            log.add(severity, EXPORTER, text, place=where)

    def show(message: Warning | str, *_args: Any, **_kwargs: Any) -> None:
        keep("WARNING", str(message))

    def hear(line: Line) -> None:
        keep(line.severity, line.text, where=line.place)

    token = _print_graph.set(functools.partial(keep, "INFO", is_graph=True))
    inference, listener = logging.getLogger(_SHAPE_INFERENCE), _Listener(keep)
    propagated, inference.propagate = inference.propagate, False
    inference.addHandler(listener)
    try:
        with warnings.catch_warnings(), _runtime_log().block(_streams().torch, hear, log.stage):
            warnings.simplefilter("always")
            warnings.showwarning = show
            yield
    finally:
        inference.removeHandler(listener)
        inference.propagate = propagated
        _print_graph.reset(token)


@contextmanager
def shapes_inferred_quietly() -> Iterator[None]:
    """Let nobody hear what shape inference cannot tell, where a page asks it once more and goes without."""
    inference, nobody = logging.getLogger(_SHAPE_INFERENCE), logging.NullHandler()
    propagated, inference.propagate = inference.propagate, False
    inference.addHandler(nobody)
    try:
        yield
    finally:
        inference.removeHandler(nobody)
        inference.propagate = propagated


@contextmanager
def user_code() -> Iterator[None]:
    """Let the user's own C++ code write to standard error as ever while torch's is listened to."""
    with _runtime_log().aside(_streams().torch):
        yield


_print_graph: ContextVar[Callable[[str], None] | None] = ContextVar("print_graph", default=None)


def install() -> None:
    """Take the exporter's graphs where they are made, and redirect nothing while the user's model is traced."""
    # ``_logger.SuppressLogs`` redirects the descriptors of standard output and standard error around the whole export
    # at every level but VERBOSE, so that a debugger in the model's forward waits for input without a prompt. What it
    # was after, torch prints with ``torch._C._jit_onnx_log``, from C++ and to a buffer of its own.
    import torch
    from onnxruntime.training.ortmodule import _logger

    replace(_logger, "_suppress_os_stream_output", _redirect_nothing)
    replace(torch._C, "_jit_onnx_log", _collect_graph)


def _redirect_nothing(_original: Callable[..., Any]) -> Callable[..., Any]:
    @contextmanager
    def suppress_os_stream_output(
        enable: bool = True,  # noqa: ARG001, FBT001, FBT002 - ORT's signature
        on_exit: Callable[[Any], None] | None = None,  # noqa: ARG001
    ) -> Iterator[None]:
        yield

    return suppress_os_stream_output


def _collect_graph(original: Callable[..., None]) -> Callable[..., None]:
    def jit_onnx_log(*parts: object) -> None:
        collect = _print_graph.get()
        if collect is None:
            original(*parts)
        else:
            collect("".join(map(str, parts)))

    return jit_onnx_log


# ---- C++: ONNX Runtime -------------------------------------------------------------------------------------------


@functools.cache
def _runtime_log() -> RuntimeLog:
    return RuntimeLog()


class _Streams(NamedTuple):
    runtime: StandardStream | None
    torch: StandardStream | None


@functools.cache
def _streams() -> _Streams:
    import torch
    from onnxruntime.capi import onnxruntime_pybind11_state

    try:
        return _Streams(
            StandardStream(onnxruntime_pybind11_state.__file__, CLOG), StandardStream(torch._C.__file__, CERR)
        )
    except (OSError, AttributeError, ValueError):  # another C++ library than libstdc++
        return _Streams(None, None)


@contextmanager
def runtime_messages(log: MessageLog, stage: str) -> Iterator[None]:
    """Collect what ONNX Runtime's C++ code logs in the block."""
    # Its lines reach a file as they are written, so that a crash leaves them; the messages get them at the end of the
    # block. Nothing else is redirected.
    runtime_log = _runtime_log()

    def keep(line: Line) -> None:
        if line.text.startswith(_OWN_FILE):
            return
        severity = "INFO" if line.text.startswith(_STOPPED) else line.severity
        log.add(severity, RUNTIME, line.text, line.when, line.place)

    of_run = f", run {log.run}" if log.run else ""
    with log.during(stage), runtime_log.block(_streams().runtime, keep, f"{stage}{of_run}"):
        log.file = runtime_log.path
        yield


@contextmanager
def step_messages(log: MessageLog) -> Iterator[Callable[[], None]]:
    """Collect what ONNX Runtime's C++ code logs while the steps of a run go wrong; a run in order logs nothing."""
    # What an operator logs because Ctrl-C has interrupted it is no failure, and is dropped. Yields a function that
    # drops everything, for a run that keeps the steps before an interrupt and raises none.
    dropped = False

    def drop() -> None:
        nonlocal dropped
        dropped = True

    def keep(line: Line) -> None:
        if not (dropped or isinstance(sys.exc_info()[1], KeyboardInterrupt)):
            log.add(line.severity, RUNTIME, line.text, line.when, line.place)

    with log.during("step"), _runtime_log().block(_streams().runtime, keep, ""):
        yield drop


@contextmanager
def runtime_lines(stage: str) -> Iterator[list[Line]]:
    """Read what ONNX Runtime's C++ code logs in the block, instead of keeping it among the messages."""
    lines: list[Line] = []
    with _runtime_log().block(_streams().runtime, lines.append, stage):
        yield lines
