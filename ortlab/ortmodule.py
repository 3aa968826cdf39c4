"""ORTModule as onnxruntime-training 1.19.2 has it, on ortlab's engine: an existing script changes one line.

That is its import, to ``from ortlab.ortmodule import ORTModule, DebugOptions, LogLevel``. The last two are ORTModule's
own classes.
"""

from __future__ import annotations

import functools
import inspect
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from ortlab.engine import load
from ortlab.engine.graph_optimizers import register_graph_optimizer
from ortlab.errors import OptionError, WrapError
from ortlab.lab.lab import wrap
from ortlab.options.options import Options
from ortlab.options.variables import JSON_CONFIG, read_json_config
from ortlab.runs.bench import bench_of

if TYPE_CHECKING:
    from ortlab.lab.lab import Lab

__all__ = [
    "ONNX_OPSET_VERSION",
    "DebugOptions",
    "LogLevel",
    "ORTModule",
    "load_from_json",
    "register_graph_optimizer",
]

DebugOptions: Final = load().DebugOptions
LogLevel: Final = load().LogLevel
ONNX_OPSET_VERSION = 17  # assign to it, as to ORTModule's, before a model is wrapped

_FORWARDED: Final = """
    add_module apply bfloat16 buffers children cpu cuda double eval extra_repr float get_buffer get_extra_state
    get_parameter get_submodule half load_state_dict modules named_buffers named_children named_modules named_parameters
    parameters register_buffer register_module register_parameter requires_grad_ set_extra_state set_submodule
    share_memory state_dict to to_empty train type zero_grad _apply _load_from_state_dict _save_to_state_dict""".split()  # noqa: SIM905
"""What torch.nn.Module can do, and the model does in its place; hooks are the ORTModule's own."""

_TABLES: Final = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set")
"""The tables of a module that are the model's."""


class ORTModule(torch.nn.Module):
    """A model whose forward and backward ONNX Runtime executes; else it is the model that it was made of.

    Parameters, buffers, sub-modules, modes, attributes and methods are those of the model. A method of its own that
    calls the model's forward runs on ONNX Runtime if it is called here. The model itself goes on as PyTorch's, with the
    same weights. Copies and pickles are ORTModules of a model of their own.

    Parameters
    ----------
    module
        Any `torch.nn.Module`. Wrap it before DistributedDataParallel or DeepSpeed are put around it.
    debug_options
        ORTModule's `DebugOptions`: log level, and whether to save the graphs. The `ORTMODULE_*` variables and the file
        that `ORTMODULE_JSON_CONFIG_PATH` names act as in 1.19.2.

    Raises
    ------
    WrapError
        If the object cannot be wrapped.
    OptionError
        If a variable, or the file, has a value that makes no sense, or needs something that is missing here.

    Notes
    -----
    As in 1.19.2, PyTorch computes a model that ONNX Runtime cannot, and a warning says so, unless
    ``ORTMODULE_FALLBACK_POLICY=FALLBACK_DISABLE``: then the first call raises an error with the reason.

    Examples
    --------
    >>> model = ORTModule(model, DebugOptions(log_level=LogLevel.INFO))
    >>> model.lab.memory()
    """

    def __init__(self, module: torch.nn.Module, debug_options: Any = None) -> None:
        self._begin(module, debug_options, None, "ort")

    def _begin(
        self, module: torch.nn.Module, debug_options: Any, options: Options | None, engine: str
    ) -> None:
        if isinstance(module, ORTModule):
            raise WrapError("An ORTModule cannot be wrapped in another.", fix="Use the one that you have.")
        super().__init__()
        for table in _TABLES:  # found in the model, by `__getattr__`
            del self.__dict__[table]
        hidden = [name for name in ("lab", "module") if hasattr(module, name)]
        bench = bench_of(module)
        changes = {} if options is not None else _changes(debug_options or DebugOptions())
        if bench is None or bench.takeover.door is None:  # not another ORTModule of this model
            wrap(module, options=options, engine=engine, **changes)
            bench = bench_of(module)
            assert bench is not None  # noqa: S101 - `wrap` has just made it
            bench.takeover.door = ContextVar("inside an ORTModule", default=False)
        elif debug_options is not None and bench.lab is not None:
            bench.lab.set(**changes)
        self.__dict__ |= {"_module": module, "_bench": bench, "forward": self._with_signature(module)}
        if hidden:
            warnings.warn(
                f"The {' and '.join(hidden)} of {type(module).__name__} is behind ORTModule's own: "
                f"ort_model.module.{hidden[0]} is the model's.",
                stacklevel=3,
            )

    def _with_signature(self, module: torch.nn.Module) -> Callable[..., Any]:
        """Return the forward as one with the model's signature, which transformers' Trainer asks for."""

        def forward(*inputs: Any, **kwargs: Any) -> Any:
            return type(self).forward(self, *inputs, **kwargs)

        forward.__signature__ = inspect.signature(module.forward)  # type: ignore[attr-defined]
        return forward

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model's forward on ONNX Runtime; the first call builds what it needs.

        Parameters
        ----------
        *inputs, **kwargs
            What the model's forward takes.

        Returns
        -------
        object
            What the model's forward returns.
        """
        with self._inside():
            return self._module(*inputs, **kwargs)

    @property
    def module(self) -> torch.nn.Module:
        """The model, which PyTorch runs where it is called itself."""
        model: torch.nn.Module = self.__dict__["_module"]
        return model

    @property
    def lab(self) -> Lab:
        """The model's lab: switches, memory, graphs, parity; its steps call the ORTModule."""
        lab: Lab = self.__dict__["_bench"].lab
        return lab

    @property
    def training(self) -> bool:  # type: ignore[override] # an attribute there
        """Whether the model is in training mode."""
        return self.module.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "_module" in self.__dict__:  # not while torch.nn.Module begins
            self.module.training = mode

    def _inside(self) -> AbstractContextManager[None]:
        entered: AbstractContextManager[None] = self.__dict__["_bench"].takeover.entered()
        return entered

    def _replicate_for_data_parallel(self) -> ORTModule:
        raise WrapError(
            "torch.nn.DataParallel and ORTModule do not go together.",
            why="It copies the module to each GPU in each step, and ORTModule holds one module on one device.",
            fix="Use DistributedDataParallel(ORTModule(model)), one process per GPU.",
        )

    def __getattr__(self, name: str) -> Any:
        """Return the model's attribute; its methods run its forward on ONNX Runtime."""
        if name.startswith("__") or "_module" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(self.module, name)
        if inspect.ismethod(value) and value.__self__ is self.module:
            return self._method(value)
        return value

    def _method(self, method: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.isgeneratorfunction(method):

            def steps(*args: Any, **kwargs: Any) -> Iterator[Any]:
                made, ended = method(*args, **kwargs), object()
                while True:
                    with self._inside():
                        item = next(made, ended)
                    if item is ended:
                        return
                    yield item

            return functools.wraps(method)(steps)

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._inside():
                return self._own(method(*args, **kwargs))

        return call

    def _own(self, result: Any) -> Any:
        """Return the ORTModule where the model has returned itself."""
        return self if result is self.module else result

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the model, unless it is the ORTModule's own."""
        if "_module" not in self.__dict__ or name in self.__dict__ or hasattr(type(self), name):
            object.__setattr__(self, name, value)
        else:
            setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        """Delete an attribute of the model, unless it is the ORTModule's own."""
        object.__delattr__(self, name) if name in self.__dict__ else delattr(self.module, name)

    def __dir__(self) -> list[str]:
        """List the names of the model beside the ORTModule's own."""
        return sorted({*object.__dir__(self), *dir(self.module)})

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy or pickle the model, its switches and the hooks around it; the copy builds its own graphs."""
        made = ("_module", "_bench", "forward")
        own = {name: value for name, value in self.__dict__.items() if name not in made}
        return self._again, (self.module, self.lab.options, self.lab.engine), own

    @classmethod
    def _again(cls, module: torch.nn.Module, options: Options, engine: str) -> ORTModule:
        """Make the ORTModule of a copied model."""
        made = cls.__new__(cls)
        made._begin(module, None, options, engine)  # noqa: SLF001 - of this class
        return made

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Take over the hooks of a copy."""
        self.__dict__.update(state)


def _forwarded(name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(torch.nn.Module, name))
    def method(self: ORTModule, *args: Any, **kwargs: Any) -> Any:
        return self._own(getattr(self.module, name)(*args, **kwargs))

    return method


for _name in _FORWARDED:
    if hasattr(torch.nn.Module, _name):  # torch 2.4 has no set_submodule
        setattr(ORTModule, _name, _forwarded(_name))


def _changes(debug: Any) -> dict[str, Any]:
    """Return the switches by which an ORTModule begins otherwise than a lab does: fallback is on, as in 1.19.2."""
    asked, _ = Options.from_environment(os.environ)
    changes: dict[str, Any] = {}
    if not _says_fallback():
        changes["fallback"] = True
    if debug.logging.log_level is not LogLevel.WARNING:
        changes["log_level"] = debug.logging.log_level.name
    if Options().opset != ONNX_OPSET_VERSION and asked.opset == Options().opset:
        changes["opset"] = ONNX_OPSET_VERSION
    if debug.save_onnx:
        files = debug.save_onnx_models
        changes |= {
            "save_onnx": True,
            "save_onnx_prefix": files.name_prefix,
            "save_onnx_path": str(files.path),
        }
    return changes


def _says_fallback() -> bool:
    """Tell whether the environment says if PyTorch may step in."""
    if "ORTMODULE_FALLBACK_POLICY" in os.environ:
        return True
    path = os.environ.get(JSON_CONFIG)
    return bool(path) and "fallback" in read_json_config(Path(str(path)))


def load_from_json(ortmodule: ORTModule, path: str | Path | None = None) -> None:
    """Set switches from ORTModule's JSON configuration, as `experimental.json_config.load_from_json` does.

    Parameters
    ----------
    ortmodule
        What is to be configured.
    path
        The file; by default the one that `ORTMODULE_JSON_CONFIG_PATH` names.

    Raises
    ------
    OptionError
        If there is no file, it cannot be read, or a key or a value makes no sense; nothing is changed then.
    """
    path = path or os.environ.get(JSON_CONFIG)
    if not path:
        raise OptionError("No JSON configuration is named.", fix=f"Give its path, or set {JSON_CONFIG}.")
    changes: dict[str, Any] = dict(read_json_config(Path(path)))
    ortmodule.lab.set(**changes)
