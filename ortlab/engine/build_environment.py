"""What one build sees: the `ORTMODULE_*` variables that ORTModule 1.19.2 reads, and the options behind them.

1.19.2 reads some switches while it is imported, for the whole process and for good. What they switch is replaced by
functions that ask here (`acts`, `present`): each build, of each lab, has its own answer.

Triton's fusion it switches on for the process (``_graph_execution_manager``): from then on every session fuses, by the
file that the environment names at that moment, and whether generated code is kept for reading was settled while
``onnxruntime.training.ort_triton`` was imported. Here each session fuses if its own options say so, by the file that
was read when the option was set, and keeps the code of its own kernels. What stays on for the process is that the
tuning of matrix products tries Triton's as well (``cuda/tunable/math/gemm.cc``).
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

from ortlab.engine.patching import replace, set_to
from ortlab.options.option_files import triton_configuration

if TYPE_CHECKING:
    from collections.abc import Callable

    from ortlab.options.options import Options


PREFIX: Final = "ORTMODULE_"

one_build_at_a_time: Final = threading.RLock()
"""Held by whoever builds: the environment, torch's exporter and standard error belong to the whole process."""


@contextmanager
def build_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Let a build see exactly these `ORTMODULE_*` variables, then put the environment back."""
    # 1.19.2 reads its switches from the process's environment, in `_RuntimeOptions`, in `DebugOptions` and in the
    # replacement of `torch.utils.checkpoint`. Two labs with different options share that environment, so a build owns
    # it under a lock and leaves nothing behind.
    with one_build_at_a_time:
        before = {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}
        try:
            _replace(variables)
            yield
        finally:
            _replace(before)


def _replace(variables: Mapping[str, str]) -> None:
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        del os.environ[name]
    os.environ.update(variables)


_options: Final[ContextVar[Options | None]] = ContextVar("options", default=None)


def building_with(options: Options) -> AbstractContextManager[None]:
    """Let these options answer in the block."""
    return set_to(_options, options)


def present() -> Options | None:
    """Return the options of the build that is going on; None outside of one."""
    return _options.get()


def acts(name: str) -> bool:
    """Tell whether a switch is on in the build that is going on; outside of one, none is."""
    options = _options.get()
    return options is not None and options.acts(name)


FUSION: Final = "TritonFusion"
"""The optimizer of ORT that fuses (``triton_fusion.h``); a session leaves it out where the option is off."""


def prepare(options: Options) -> None:
    """Load ORT's Triton package where these options need it. Importing it takes a second or two."""
    if not options.acts("triton"):
        return
    from onnxruntime.training import ort_triton
    from onnxruntime.training.ort_triton import triton_op_executor as executor

    replace(ort_triton, "get_config", _configuration_of_build)
    replace(executor, "_gen_key", _apart_while_debugging)
    replace(executor, "_gen_module", _debugging_by_options)
    replace(executor._ShapeCache, "get_shape", _hints_of_options)
    if options.acts("flash_attention"):
        from onnxruntime.training.ort_triton.kernel import _flash_attn  # registers its graph optimizer

        for kernel in (_flash_attn.flash_attn_forward, _flash_attn.flash_attn_backward):
            executor.register_triton_kernel(kernel)


@contextmanager
def stepping(
    options: Options, collecting: Callable[[], AbstractContextManager[None]] | None
) -> Iterator[None]:
    """Let kernels generated in a step of this lab ask for its options, in the block of `collecting`, if any."""
    with building_with(options), nullcontext() if collecting is None else collecting():
        yield


def _configuration_of_build(_original: Callable[[], str]) -> Callable[[], str]:
    def get_config() -> str:
        from onnxruntime.training.ort_triton._op_config import get_supported_ops

        options = present()
        config = {} if options is None else triton_configuration(options)
        config.pop("symbolic_shape_hint", None)  # for the shapes of a step, see below
        defaults = {"ops": get_supported_ops(), "initializer": "scalar", "min_nodes": 2}
        return json.dumps(defaults | config)

    return get_config


def _apart_while_debugging(original: Callable[..., int]) -> Callable[..., int]:
    """Give kernels keys of their own for debugging: a kernel's code is written out only when it is generated."""

    def gen_key(*args: Any) -> int:
        return hash((original(*args), acts("triton_debug")))

    return gen_key


def _debugging_by_options(original: Callable[..., Any]) -> Callable[..., Any]:
    from onnxruntime.training.ort_triton import triton_op_executor as executor

    def gen_module(*args: Any) -> Any:
        before = executor._DEBUG_MODE
        executor._DEBUG_MODE = acts("triton_debug")
        try:
            return original(*args)
        finally:
            executor._DEBUG_MODE = before

    return gen_module


def _hints_of_options(original: Callable[..., Any]) -> Callable[..., Any]:
    from onnxruntime.training.ort_triton.triton_op_executor import _ShapeCache

    def get_shape(*args: Any) -> Any:
        options = present()
        config = {} if options is None else triton_configuration(options)
        hints: Any = config.get("symbolic_shape_hint", {})
        _ShapeCache.min_symbolic_shape = hints.get("*", 0)
        _ShapeCache.symbolic_shape_hint = {name: size for name, size in hints.items() if name != "*"} or None
        return original(*args)

    return get_shape
