"""The engines that ONNX Runtime is compared with: plain PyTorch, checkpointing of each layer, and `torch.compile`."""

from __future__ import annotations

import fnmatch
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

import torch

from ortlab.errors import BuildError, OptionError, StepError
from ortlab.options.configuration import activation_memory_budget, checkpointed_paths, engine_kind
from ortlab.records.runs import Coverage, Initialization


class _PyTorchEngine:
    """What engines have in common that build no ONNX graph."""

    fallback_reason = ""
    coverage = total_coverage = Coverage()

    def start_over(self) -> None:
        """Do nothing: torch's own random state is all there is."""

    def graph_digests(self) -> dict[str, str]:
        """Return nothing: there is no ONNX graph."""
        return {}

    def pending_stage(self) -> str:
        """Return "": there is nothing to build."""
        return ""


class EagerEngine(_PyTorchEngine):
    """Run the module's own forward."""

    name = "eager"
    executed_by = "eager"

    def __init__(self, original_forward: Callable[..., Any]) -> None:
        self._forward = original_forward

    def forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the forward in PyTorch."""
        return self._forward(*args, **kwargs)


class CompileEngine(_PyTorchEngine):
    """Run the module's forward through `torch.compile`."""

    # Compilation happens inside the first forward and cannot be told apart from running, so all of that forward counts
    # as initialisation.

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
        """Run the compiled forward, which is compiled at the first call."""
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

    def pending_stage(self) -> str:
        """Return "graph" while nothing has been compiled."""
        return "" if self._called else "graph"

    def _backend(self) -> Callable[[Any, Any], Any]:
        """Return Inductor as a backend of this engine's own."""
        # Dynamo keeps what it has compiled with the code of the forward, and takes it again for an equal backend: with
        # Inductor itself, the second budget would run what was compiled for the first. Inductor's cache on disk is
        # safe: its keys hold the setting.
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


SMALLEST_SHARE: Final = 0.1
"""Lists of another class, with fewer parameters than this share of the largest list's, are adapters or heads."""

_CONTAINERS: Final = (torch.nn.ModuleList, torch.nn.Sequential)


class CheckpointEngine(_PyTorchEngine):
    """Run the module's own forward, with each layer under `torch.utils.checkpoint.checkpoint`."""

    # Of each layer only the inputs are kept for the backward pass, which runs its forward again. The random state is
    # kept with them, so that dropout draws the same masks and all numbers are those of plain PyTorch, bit for bit.
    # Layers get their other forward for the time of a call only; between calls the model is as the user made it. Layers
    # run plainly where no gradients are recorded. In training, a layer gets no cache of keys and values, which the
    # second forward would fill once more; transformers' own checkpointing does the same, and is off in the meantime.

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
        """Run the forward in PyTorch, its layers checkpointed."""
        with ExitStack() as meanwhile:
            meanwhile.enter_context(_own_checkpointing_off(self._module))
            for layers in self.layers:
                for layer in layers.modules:
                    meanwhile.enter_context(_replaced(layer))
            return self._forward(*args, **kwargs)


@contextmanager
def _replaced(layer: torch.nn.Module) -> Iterator[None]:
    """Put a checkpointed forward on a layer in the block; it calls the one that a library may have put there."""
    on_instance = {name: value for name, value in vars(layer).items() if name == "forward"}
    vars(layer)["forward"] = partial(_checkpointed, layer, layer.forward)
    try:
        yield
    finally:
        vars(layer).pop("forward", None)
        vars(layer).update(on_instance)


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
        context_fn=lambda: (nullcontext(), _SecondForward(layer)),
    )


def _is_cache(layer: torch.nn.Module, value: object) -> bool:
    """Tell whether an argument is a cache of transformers."""
    # With a cache that holds something, a layer's outputs depend on more than its inputs.
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


class _SecondForward(AbstractContextManager[None]):
    """Around a layer's second forward: its buffers stay as they are, and nothing inside it is checkpointed again."""

    # Running statistics must not be updated twice by one step, so what has changed since the first forward began is
    # hidden behind copies. A backward that is repeated (`retain_graph=True`) enters it several times.

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
                if getattr(part, "track_running_stats", False) or any(
                    id(buffer) in changed for buffer in part.buffers(recurse=False)
                ):
                    kept = dict(part._buffers)
                    inside.callback(part._buffers.update, kept)
                    part._buffers.update(
                        {name: None if buffer is None else buffer.clone() for name, buffer in kept.items()}
                    )
            self._inside = inside.pop_all()

    def __exit__(self, *raised: object) -> None:
        self._inside.close()


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


@dataclass(frozen=True)
class Layers:
    """Modules that are checkpointed one by one, and where they are in the model."""

    path: str  # "encoder.block"
    modules: tuple[torch.nn.Module, ...]

    def __str__(self) -> str:
        """Write "6 T5Block in encoder.block"; of a module that was named itself, "T5Block encoder.block.0"."""
        kinds = ", ".join(dict.fromkeys(type(module).__name__ for module in self.modules))
        if len(self.modules) == 1:
            return f"{kinds} {self.path}"
        return f"{len(self.modules)} {kinds} in {self.path or 'the model'}"


def find_layers(model: torch.nn.Module, paths: Sequence[str] = ()) -> tuple[Layers, ...]:
    """Find the layers of a model, in the model's order."""
    # The user names `paths` as `model.named_modules()` gives them, or patterns of such; a `ModuleList` or a
    # `Sequential` stands for what it holds. Without them: what repeats in the `ModuleList` or `Sequential` where that
    # has most parameters, and in every other one that repeats the same class or at least a tenth of these parameters.
    # The model itself may be one of them; lists inside a layer of another one do not count. Where nothing repeats: what
    # holds most of the parameters as the only module of a list, as ALBERT's layer does, which is called several times.
    known = dict(model.named_modules())
    known.pop("")
    if not paths:
        return _repeated(model, known)
    chosen: dict[str, Layers] = {}
    for path in paths:
        matching = fnmatch.filter(known, path)
        if not matching:
            raise OptionError(
                f"{type(model).__name__} has no module {path!r} to checkpoint.",
                why="After the colon stand paths as model.named_modules() gives them, or patterns of such.",
                fix=f'For example {", ".join(repr(one) for one in list(known)[:3])}; or engine="checkpoint" alone.',
            )
        for name in matching:
            module = known[name]
            inner = tuple(dict.fromkeys(module)) if isinstance(module, _CONTAINERS) else (module,)
            if inner:
                chosen[name] = Layers(name, inner)
    _refuse_nests(chosen)
    return tuple(chosen[name] for name in known if name in chosen)


def _repeated(model: torch.nn.Module, known: Mapping[str, torch.nn.Module]) -> tuple[Layers, ...]:
    found: list[Layers] = []
    inside: set[int] = set()
    for name, one in (("", model), *known.items()):  # a list comes before those inside it
        if id(one) not in inside and (layers := _layers_in(one)):
            found.append(Layers(name, layers))
            inside.update(id(part) for layer in layers for part in layer.modules())
    if not found:
        found += _single(model, known)
    if not found:
        others = [name for name, one in known.items() if isinstance(one, _CONTAINERS)]
        seen = f" It has {', '.join(others[:3])}, which hold no such modules." if others else ""
        raise OptionError(
            f"{type(model).__name__} has no repeated layers to checkpoint.",
            why="Looked for a torch.nn.ModuleList or Sequential with at least two modules of one class that have "
            f"parameters; beside others they count if they have parts.{seen}",
            fix="Name modules yourself, with a plus sign between them: "
            f'engine="checkpoint:{(others or ["+".join(list(known)[:2]) or "path"])[0]}".',
        )
    largest = max(found, key=lambda one: count_numbers(*one.modules))
    least = count_numbers(*largest.modules) * SMALLEST_SHARE
    kind = type(largest.modules[0])
    return tuple(one for one in found if type(one.modules[0]) is kind or count_numbers(*one.modules) >= least)


def _single(model: torch.nn.Module, known: Mapping[str, torch.nn.Module]) -> list[Layers]:
    """Return the outermost list of a single block that has most of the model's parameters, if there is one."""
    for name, one in known.items():
        inside = dict(one.named_children()) if isinstance(one, _CONTAINERS) else {}
        blocks = tuple(inside.values())
        if len(blocks) == 1 and are_blocks(blocks) and 2 * count_numbers(*blocks) > count_numbers(model):
            return [Layers(f"{name}.{next(iter(inside))}", blocks)]
    return []


def _layers_in(container: torch.nn.Module) -> tuple[torch.nn.Module, ...]:
    """Return what repeats in a list: all of it, or else, of the blocks among others, those with most parameters."""
    if not isinstance(container, _CONTAINERS):
        return ()
    by_class: dict[type, dict[torch.nn.Module, None]] = {}
    for one in container:
        by_class.setdefault(type(one), {})[one] = None
    alike = [tuple(ones) for ones in by_class.values() if len(ones) > 1 and all(map(count_numbers, ones))]
    if len(by_class) > 1:
        alike = [ones for ones in alike if are_blocks(ones)]
    found = max(alike, key=lambda ones: count_numbers(*ones), default=())
    # Stages that are lists of blocks themselves are no layers: the blocks are.
    blocks = [one for stage in found if are_blocks(inner := _layers_in(stage)) for one in inner]
    return () if blocks and 2 * count_numbers(*blocks) >= count_numbers(*found) else found


def are_blocks(modules: Sequence[torch.nn.Module]) -> bool:
    """Tell whether any of these has parts."""
    return any(True for one in modules for _ in one.children())


def count_numbers(*modules: torch.nn.Module) -> int:
    """Return how many numbers the parameters of modules hold."""
    return sum(parameter.numel() for one in modules for parameter in one.parameters())


def _refuse_nests(chosen: Mapping[str, Layers]) -> None:
    """Refuse a module that is named twice, or inside another one: it would be recomputed twice."""
    owner: dict[int, str] = {}
    for name, layers in chosen.items():
        held = [part for layer in layers.modules for part in layer.modules()]
        other = next((owner[id(part)] for part in held if id(part) in owner), None)
        if other is not None:
            raise OptionError(
                f"{name} and {other} have modules in common.",
                why="What lies inside a checkpointed module is recomputed with it already.",
                fix="Name one of the two.",
            )
        owner |= {id(part): name for part in held}


Baseline: TypeAlias = "EagerEngine | CheckpointEngine | CompileEngine"
"""An engine that ONNX Runtime is compared with."""


def baseline(
    engine: str,
    module: torch.nn.Module,
    original_forward: Callable[..., Any],
    run_original: Callable[..., Any],
    on_built: Callable[[Initialization], None],
) -> Baseline:
    """Make the engine of a name that is not "ort"; raises `OptionError` where the engine cannot run this model."""
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
