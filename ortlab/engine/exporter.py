"""Make the exporter that ORTModule 1.19.2 was written for available in the torch that is installed.

ORTModule drives torch's TorchScript ONNX exporter through private modules. Torch has moved those modules
since (``torch.onnx._internal.torchscript_exporter``), left thin public modules behind that lack the private
names, and made another exporter the default of :func:`torch.onnx.export`. Nothing here replaces behaviour
that other users of torch can see: modules and attributes are only *added* under names that are free, and
the choice of exporter travels as an argument of ORTModule's own export call.

Each adaptation looks for the feature it needs, not for a version number: torch 2.4 needs none of them, and a
torch that moves one name needs only that one.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from typing import TYPE_CHECKING, Any, Final

from packaging.version import Version

from ortlab.engine.patching import replace
from ortlab.errors import InstallError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

OLDEST_TORCH: Final = "2.4"
"""The oldest torch that ortlab is tested with."""

NEWEST_TORCH: Final = "2.15"
"""The newest torch that ortlab is tested with; a newer one works while it has the TorchScript exporter."""

_ORTMODULE: Final = "onnxruntime.training.ortmodule"

_MOVED_TO: Final = "torch.onnx._internal.torchscript_exporter"

# What `onnxruntime/training/ortmodule` of 1.19.2 imports, and the name it has in the package it moved to.
_MODULES_USED_BY_ORT: Final = {
    "torch.onnx._internal.jit_utils": "jit_utils",  # _custom_op_symbolic_registry.wrap_custom_export_function
    "torch.onnx._globals": "_globals",  # _custom_autograd_function_exporter._export_pt_1_10
    "torch.onnx._type_utils": "_type_utils",  # _custom_op_symbolic_registry.softmax
    "torch.onnx.symbolic_helper": "symbolic_helper",  # _custom_op_symbolic_registry
    "torch.onnx.symbolic_opset9": "symbolic_opset9",  # _custom_op_symbolic_registry.convolution, group_norm
    "torch.onnx.symbolic_opset11": "symbolic_opset11",  # _custom_op_symbolic_registry.squeeze
}


def prepare_torch() -> None:
    """Give ORTModule the exporter modules it imports; call it before ORTModule is imported."""
    # Modules that torch has moved are made importable under their old names, and private functions that the thin public
    # modules lack are added to them.
    _check_version()
    _undo_failed_import()
    for old_name, moved_name in _MODULES_USED_BY_ORT.items():
        if _find(f"{_MOVED_TO}.{moved_name}"):
            _make_importable(old_name, f"{_MOVED_TO}.{moved_name}")
        elif not _find(old_name):
            raise InstallError(
                f"torch {_torch_version()} has no TorchScript ONNX exporter.",
                why=f"ONNX Runtime's training module needs {old_name}; this torch has moved or removed it.",
                fix=f"Install a torch from {OLDEST_TORCH} to {NEWEST_TORCH}.",
            )


def adapt_ort() -> None:
    """Adapt ORTModule to the torch that is installed; call it after ORTModule is imported."""
    # ORTModule's own export then asks for the TorchScript exporter by name. Its NVTX marks do nothing on a torch
    # without CUDA, which would answer them with an error.
    _choose_torchscript_exporter()
    _leave_out_nvtx()


def symbolic_module(name: str) -> ModuleType:
    """Import one of the modules of torch's TorchScript exporter, wherever this torch keeps it."""
    places = (f"{_MOVED_TO}.{name}", f"torch.onnx.{name}", f"torch.onnx._internal.{name}")
    return importlib.import_module(next(filter(_find, places), places[0]))


def _find(name: str) -> bool:
    """Say whether a module can be imported, without importing it (its parents are imported)."""
    try:
        return name in sys.modules or importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


def _torch_version() -> str:
    import torch

    return str(torch.__version__)


def _check_version() -> None:
    try:
        version = _torch_version()
    except ImportError as error:
        raise InstallError(
            "torch is not installed.",
            why=str(error),
            fix=f"Install a torch from {OLDEST_TORCH} to {NEWEST_TORCH}.",
        ) from error
    # "2.4" <= 2.4.0a0 does not hold, so compare the release numbers only: nightly builds have the code
    # already.
    if Version(version).release < Version(OLDEST_TORCH).release:
        raise InstallError(
            f"torch {version} is too old.",
            why="ortlab adapts ONNX Runtime's training module to the exporter of newer versions of torch.",
            fix=f"Install a torch from {OLDEST_TORCH} to {NEWEST_TORCH}.",
        )


def _undo_failed_import() -> None:
    """Take back what an import of ORTModule replaced in torch before it failed."""
    # ``import onnxruntime`` of the training package tries to import ORTModule and passes over the ImportError that
    # today's torch gives it. By then ``onnxruntime/training/ortmodule/__init__.py`` has put its own functions into
    # torch; a second import would wrap these, and each seed would be set twice, the second time around any repair.
    import torch
    import torch.utils.checkpoint

    if _ORTMODULE in sys.modules:
        return
    for owner, name, kept_as in (
        (torch, "manual_seed", "torch_manual_seed"),
        (torch.cuda, "manual_seed", "torch_cuda_manual_seed"),
        (torch.utils.checkpoint, "checkpoint", "original_checkpoint"),
    ):
        function = getattr(owner, name)
        while getattr(function, "__module__", "") == _ORTMODULE:
            outer = inspect.getclosurevars(function)
            function = {**outer.globals, **outer.nonlocals}[kept_as]
        setattr(owner, name, function)


def _make_importable(old_name: str, new_name: str) -> None:
    """Make `new_name` importable as `old_name`; a module that is still there gets what it lacks."""
    moved = importlib.import_module(new_name)
    if not _find(old_name):
        parent, _, child = old_name.rpartition(".")
        sys.modules[old_name] = moved
        setattr(importlib.import_module(parent), child, moved)
        return
    still_there = importlib.import_module(old_name)
    for name, value in vars(moved).items():
        if not name.startswith("__") and not hasattr(still_there, name):
            setattr(still_there, name, value)


def _choose_torchscript_exporter() -> None:
    """Pass ``dynamo=False`` with ORTModule's own call of `torch.onnx.export`, where that argument exists."""
    # ORTModule 1.19.2 relies on the default (``_graph_transition_manager.GraphTransitionManager._get_exported_model``),
    # which was the TorchScript exporter then. `_export_extra_kwargs` is its own hook for further arguments.
    import torch.onnx
    from onnxruntime.training.ortmodule._graph_transition_manager import GraphTransitionManager

    if "dynamo" in inspect.signature(torch.onnx.export).parameters:
        replace(GraphTransitionManager, "__init__", _ask_for_torchscript)


def _ask_for_torchscript(original: Callable[..., None]) -> Callable[..., None]:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self._export_extra_kwargs["dynamo"] = False

    return init


def _leave_out_nvtx() -> None:
    """Make ORT's NVTX marks do nothing where torch has no NVTX."""
    # ``onnxruntime/training/utils/torch_profile_utils.py`` asks ``hasattr(torch.cuda.nvtx, "range_push")``, which holds
    # on every build; on a torch without CUDA the function is there and raises.
    import torch

    if hasattr(torch._C, "_nvtx"):
        return
    from onnxruntime.training.utils import torch_profile_utils

    def no_range_push(msg: str) -> None:
        """Mark nothing: there is no NVTX to mark it in."""

    def no_range_pop() -> None:
        """Mark nothing: there is no NVTX to mark it in."""

    torch_profile_utils.torch_nvtx_range_push = no_range_push
    torch_profile_utils.torch_nvtx_range_pop = no_range_pop
