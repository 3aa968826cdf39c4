"""The engines that ONNX Runtime is compared with: plain PyTorch, checkpointing of each layer, and `torch.compile`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from ortlab.engine.checkpointing import CheckpointEngine
from ortlab.errors import BuildError
from ortlab.options.configuration import activation_memory_budget, checkpointed_paths, engine_kind
from ortlab.records.coverage import Coverage
from ortlab.records.runs import Initialization


class EagerEngine:
    """Run the module's own forward."""

    name = "eager"
    executed_by = "eager"
    fallback_reason = ""
    coverage = total_coverage = Coverage()

    def __init__(self, original_forward: Callable[..., Any]) -> None:
        self._forward = original_forward

    def forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the forward in PyTorch."""
        return self._forward(*args, **kwargs)

    def start_over(self) -> None:
        """Do nothing: torch's own random state is all there is."""

    def graph_digests(self) -> dict[str, str]:
        """Return nothing: there is no ONNX graph."""
        return {}

    def pending_stage(self) -> str:
        """Return "": there is nothing to build."""
        return ""


class CompileEngine:
    """Run the module's forward through `torch.compile`.

    Compilation happens inside the first forward and cannot be told apart from running, so all of that forward counts as
    initialisation. `budget` is the share of the activations, 0 to 1, that the partitioner of forward and backward may
    keep, as it counts them (`torch._functorch.config.activation_memory_budget`, from torch 2.4 on); None leaves torch's
    setting alone.
    """

    fallback_reason = ""
    coverage = total_coverage = Coverage()

    def __init__(
        self,
        original_forward: Callable[..., Any],
        on_built: Callable[[Initialization], None],
        name: str = "compile",
        budget: float | None = None,
    ) -> None:
        self.name = name
        self._original_forward = original_forward
        self._budget = budget
        self._graphs = 0
        self._forward: Callable[..., Any] | None = None
        self._called = False
        self._on_built = on_built

    @property
    def executed_by(self) -> str:
        """The engine's name; empty before the first call."""
        return self.name if self._called else ""

    def forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the compiled forward, which is compiled at the first call.

        Raises `BuildError` where there is no C++ compiler, or nothing of the forward was compiled.
        """
        start = time.perf_counter()
        if self._forward is None:
            # Here and not in __init__: torch.compile imports Inductor, which takes seconds, and few labs need it.
            self._forward = torch.compile(self._original_forward, backend=self._backend())
        try:
            outputs = self._forward(*args, **kwargs)
        except Exception as error:
            if _lacks_compiler(error):
                raise BuildError(
                    "torch.compile needs a C++ compiler, and there is none.",
                    why="Its backend Inductor writes C++ for the CPU. "
                    f"It looked for {os.environ.get('CXX') or 'g++ and clang++'}.",
                    fix="Install one (Debian, Ubuntu: sudo apt-get install g++), or name it in CXX and restart.",
                ) from error
            raise
        if not self._called:
            if not self._graphs:
                raise BuildError(
                    "torch.compile compiled nothing of this model's forward.",
                    why="It gives up without an error where its cache for a forward is full, or compilation is off "
                    "(TORCHDYNAMO_DISABLE). PyTorch ran the forward as it is.",
                    fix='Call torch.compiler.reset() and repeat, or take engine="eager".',
                )
            elapsed = (time.perf_counter() - start) * 1000
            self._called = True
            self._on_built(Initialization("graph", 0.0, 0.0, 0.0, elapsed, 0.0, elapsed))
        return outputs

    def start_over(self) -> None:
        """Do nothing: torch's own random state is all there is."""

    def graph_digests(self) -> dict[str, str]:
        """Return nothing: there is no ONNX graph."""
        return {}

    def pending_stage(self) -> str:
        """Return "graph" while nothing has been compiled."""
        return "" if self._called else "graph"

    def _backend(self) -> Callable[[Any, Any], Any]:
        """Return Inductor as a backend of this engine's own.

        Dynamo keeps what it has compiled with the code of the forward, and takes it again for an equal backend: with
        Inductor itself, the second budget would run what was compiled for the first. Inductor's cache on disk is
        safe: its keys hold the setting.
        """
        from torch._dynamo.backends.registry import lookup_backend
        from torch._functorch import config

        inductor: Callable[[Any, Any], Any] = lookup_backend("inductor")

        def backend(graph: Any, inputs: Any) -> Any:
            self._graphs += 1
            if self._budget is None:
                return inductor(graph, inputs)
            # The graph is split into forward and backward while it is compiled; outside, torch's setting is the user's.
            with config.patch(activation_memory_budget=self._budget):
                return inductor(graph, inputs)

        return backend


Baseline: TypeAlias = "EagerEngine | CheckpointEngine | CompileEngine"
"""An engine that ONNX Runtime is compared with."""


def baseline(
    engine: str,
    module: torch.nn.Module,
    original_forward: Callable[..., Any],
    run_original: Callable[..., Any],
    on_built: Callable[[Initialization], None],
) -> Baseline:
    """Make the engine of a name that is not "ort"; raises `OptionError` where the engine cannot run this model.

    `engine` is as `check_engine` returns it. torch.compile compiles `original_forward`; the other engines call
    `run_original`, which runs the module's own forward as it is at that moment.
    """
    kind = engine_kind(engine)
    if kind == "compile":
        return CompileEngine(original_forward, on_built, engine, activation_memory_budget(engine))
    if kind == "checkpoint":
        return CheckpointEngine(module, run_original, engine, checkpointed_paths(engine))
    return EagerEngine(run_original)


def _lacks_compiler(error: BaseException | None) -> bool:
    """Tell whether a missing compiler caused an error; releases of torch wrap its error in different ways."""
    while error is not None:
        if "InvalidCxxCompiler" in f"{type(error).__name__}: {error}":
            return True
        error = error.__cause__ or error.__context__ or getattr(error, "inner_exception", None)
    return False
