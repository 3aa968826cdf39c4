"""Why a build or a run failed, in the user's words: their own forward, their inputs, or what ORT cannot express."""

from __future__ import annotations

import errno
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from ortlab.engine.border import take_error
from ortlab.engine.calls import argument_names, named_inputs, shape_words
from ortlab.engine.random_state import RandomState
from ortlab.engine.tracing.graph_inputs import Buffers
from ortlab.errors import BuildError, ExecutionError, OrtlabError, caused_by
from ortlab.graphs.nodes import exported_name, path_in, scopes_in

if TYPE_CHECKING:
    from ortlab.options.options import Options


class ForwardError(BuildError):
    """The model's own forward fails or returns nothing that can be trained, in PyTorch as well: never falls back."""


class OutOfMemoryError(ExecutionError):
    """ONNX Runtime had no memory left for a step; nobody asks what PyTorch would say to the same call."""


_LESS: Final = (
    "Take a smaller batch, or keep less for the backward: lab.set(memory_level=1). lab.find_batch_size(...) finds the "
    "largest batch that fits; on a GPU `nvidia-smi` names other processes that hold memory."
)


_FLAG: Final = re.compile(r"We don't have an op for (aten::\w+) but.*?Argument types: [^\n]*\bbool\b")


def explain_build_failure(
    error: Exception,
    module: torch.nn.Module,
    original_forward: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Options | None = None,
    lines: Mapping[str, str] | None = None,
) -> OrtlabError:
    """Find out why a build failed and return the error to raise from what ORTModule raised."""
    # The module's own forward is run once more in PyTorch, without gradients and with its buffers put back, because
    # 1.19.2 reports the user's exception, an output it cannot flatten and an operator it cannot export alike.
    chain = list(causes(error))
    # What ortlab's own code in a forward has raised explains it best.
    said = next((one for one in chain if isinstance(one, OrtlabError)), None)
    if said is not None:
        return said
    own = own_fault(module, original_forward, args, kwargs)
    if own is not None:
        return own
    message = "\n".join(map(str, chain))
    operator = re.search(r"operator '?([\w:]+)'?.{0,40}(?:not supported|unsupported)", message)
    gradient = re.search(
        r"gradient (?:builder|definition)[^.\n]*?(?:for|op)[ :]+(\w+)", message, re.IGNORECASE
    )
    if "two nodes with same node name (_recompute)" in message:
        return BuildError(
            "These memory plans cannot be applied together.",
            why="They recompute several nodes that have no name, and 1.19.2 gives their copies the same one.",
            fix="Use memory_level=1, which leaves them out, or other plans: lab.plan() lists all.",
        )
    flag = _FLAG.search(message)
    if flag:
        return BuildError(
            f"The model gives True or False to {flag.group(1)}, where the exporter of torch knows numbers only.",
            why="It keeps a Python flag, or a tensor of one, as a constant of a kind that the operator does not take.",
            fix="Write int(flag), or flag.to(x.dtype) for a tensor.",
        )
    if operator:
        what = f"ONNX has no form for the operator {operator.group(1)}, so the model cannot be exported."
    elif gradient:
        what = f"ONNX Runtime has no gradient for the operator {gradient.group(1)}."
    else:
        what = f"ONNX Runtime could not build {type(module).__name__}: {_in_words(message, lines)}"
    return BuildError(
        what,
        why=f"ORTModule raised {type(chain[-1]).__name__}; plain PyTorch runs the same call.",
        fix=_without_optimizer(message, options)
        or "Wrap a part of the model that does not use it, or allow PyTorch to step in: lab.set(fallback=True).",
    )


def explain_execution_failure(
    error: Exception, options: Options | None = None, lines: Mapping[str, str] | None = None
) -> BaseException:
    """Return what to raise for a failed run: what a callback left, that memory ran out, or ORT's message in short."""
    kept = take_error()
    if kept is not None:
        return kept
    if ran_out(error):
        torch.cuda.empty_cache()  # for what comes next, a pool of ONNX Runtime's own among it; nothing without CUDA
        where = place(error)
        return OutOfMemoryError(
            f"Memory ran out while ONNX Runtime ran the model{where and f', {where}'}.",
            why=f"ONNX Runtime says: {_first_line(str(error))}",
            fix=_LESS,
        )
    return ExecutionError(
        f"ONNX Runtime failed while it ran the model: {_in_words(str(error), lines) or type(error).__name__}",
        why="The exception's __cause__ has ONNX Runtime's own message.",
        fix=_without_optimizer(str(error), options)
        or "Run the same batch with engine='eager': if PyTorch can, the switches or ONNX Runtime are at fault.",
    )


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what led to it, the latest first."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _first_line(message: str) -> str:
    """Return the line of a message that says something: the last that looks like "SomeError: ...", else the first."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    telling = [line for line in lines if re.match(r"[\w.]*(?:Error|Exception): \S", line)]
    return (telling or lines or [""])[-1 if telling else 0]


# ---- what ONNX Runtime says ------------------------------------------------------------------------------------------

_STATUS: Final = re.compile(r"\[ONNXRuntimeError\] : \d+ : \w+ : ")
_CODE: Final = re.compile(r"\S*onnxruntime\S*\.(?:cc|cpp|h|hpp|cuh?):\d+:? ")
"""A file of ONNX Runtime and a line; the signature of a function stands behind it."""

_CHECKED: Final = re.compile(r"(?P<condition>\S[^()]{0,80}) was false\.? ?(?P<rest>.*)")
_NO_KERNEL: Final = re.compile(
    r"Could not find an implementation for (?P<operator>[\w.]+)\(\d+\) node with name '(?P<name>[^']*)'"
)
_FAILED_AT: Final = re.compile(
    r"Non-zero status code returned while running (?P<operator>\w+) node\. Name: ?'(?P<name>[^']*)' "
    r"Status Message: (?P<rest>.*)",
    re.DOTALL,
)
_NODE_NAME: Final = re.compile(r"['( ](?P<name>/_original_module[^'\s)]*)")

_OPTIMIZERS: Final[Mapping[str, str]] = {
    "label_sparse_optimizer": r"label_filter|InsertGatherBeforeSceLoss|insert_gather_before_sceloss",
    "embedding_sparse_optimizer": r"embedding_filter|padding_elimination|PaddingElimination|PadAndUnflatten",
    "compute_optimizer": r"compute_optimizer|upstream_(?:gather|reshape)|UpStream(?:Gather|Reshape)",
    "triton": r"[Tt]riton",
    "memory_level": r"_recompute\b|memory_optimizer/",
    "cast_level": r"propagate_cast|PropagateCast",
    "aten_backward": r"org\.pytorch\.aten|ATen(?:_\d+)? node",
}
"""By the switch of an optimization: what names it in a message of ONNX Runtime's."""

_OFF: Final[Mapping[str, object]] = {"memory_level": 0, "cast_level": -1}


def _in_words(message: str, lines: Mapping[str, str] | None) -> str:
    """Say what ONNX Runtime's message says: what failed, in which module and line, without its own files and lines."""
    text = _STATUS.sub("", _first_line(message))
    if missing := _NO_KERNEL.search(message):
        where = _where(missing["name"], lines)
        return f"it has no kernel for {missing['operator']} with the dtypes of this model{where}."
    failed = _FAILED_AT.search(message)
    rest = failed["rest"].strip().splitlines()[0] if failed and failed["rest"].strip() else text
    if code := _CODE.search(rest):
        behind = rest[code.end() :]
        check = _CHECKED.search(behind)
        rest = (
            (check["rest"] or f"the check `{check['condition'].split(') ')[-1]}` failed") if check else behind
        )
    if failed:
        return f"{failed['operator']} failed{_where(failed['name'], lines)}: {rest}"
    named = _NODE_NAME.search(message)
    return f"{rest}{_where(named['name'], lines)}" if named else rest


def _where(node: str, lines: Mapping[str, str] | None) -> str:
    """Say which module and which line of source a node comes from, as far as its name tells."""
    name = exported_name(node)
    path = path_in(scopes_in(name), None)
    line = (lines or {}).get(name, "")
    return "".join(filter(None, (path and f", in {path}", line and f", at {line}")))


def _without_optimizer(message: str, options: Options | None) -> str:
    """Say which switch leaves out the optimization that a message names; empty if it names none that is on."""
    for switch, words in _OPTIMIZERS.items():
        if re.search(words, message) and options is not None and options.acts(switch):
            return f"Leave out the optimization that failed: lab.set({switch}={_OFF.get(switch, False)})."
    return ""


# ---- a forward that fails in PyTorch, too ----------------------------------------------------------------------------

_SHOWN: Final = 6
"""How many inputs an error lists."""

_ARRAYS: Final = frozenset({"list", "tuple", "ndarray", "int", "float", "bool"})
"""Types that `torch.as_tensor` takes."""


def own_fault(
    module: torch.nn.Module,
    original_forward: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> ForwardError | None:
    """Run a module's own forward in PyTorch, and return what is wrong with the model or the batch; None if it runs."""
    # Gradients are off, unless it asks for some itself; buffers and random state are put back.
    random, buffers = RandomState.read(), Buffers(module)
    name = type(module).__name__
    try:
        outputs = _without_gradients_if_it_can(original_forward, args, kwargs)
    except Exception as fault:  # noqa: BLE001 - a user's forward may raise anything
        why, fix = _explain(fault, module, args, kwargs)
        fix = _LESS if ran_out(fault) else fix
        what = f"The forward of {name} failed: {type(fault).__name__}: {fault}"
        return caused_by(ForwardError(what, why=why, fix=fix), fault)
    finally:
        random.put_back()
        buffers.restore()
    if next(_tensors(outputs), None) is None:
        kind = "None" if outputs is None else f"a {type(outputs).__name__}"
        return ForwardError(
            f"The forward of {name} returned no tensor, but {kind}.",
            why="Only tensors can carry a loss and gradients.",
            fix="Return the loss or the outputs as tensors, in a tuple, a dict or a dataclass.",
        )
    return None


def _without_gradients_if_it_can(
    forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    try:
        with torch.no_grad():
            return forward(*args, **kwargs)
    except RuntimeError:
        if not torch.is_grad_enabled():
            raise
        return forward(*args, **kwargs)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from _tensors(getattr(value, name))


def _explain(
    fault: Exception,
    module: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> tuple[str, str]:
    """Return why a module's own forward failed, as far as its inputs show it, and what repairs that: sentences."""
    why, fix = (
        _wrong_names(module, args, kwargs)
        or (isinstance(fault, RuntimeError) and _wrong_devices(module, args, kwargs))
        or (isinstance(fault, (TypeError, AttributeError)) and _wrong_kinds(fault, module, args, kwargs))
        or (
            f"It was called with {_listed(list(named_inputs(module, args, kwargs)))}.",
            "Correct the model or the batch; weights, optimizer and the last working build are untouched.",
        )
    )
    return f"{why} It fails in plain PyTorch too; ONNX Runtime had no part in it.", fix


def _wrong_names(
    module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[str, str] | None:
    try:
        signature = inspect.signature(module.forward)
        signature.bind(*args, **kwargs)
    except ValueError:
        return None
    except TypeError:
        takes = ", ".join(
            str(one).partition(":")[0].partition("=")[0].strip()
            + ("" if one.default is one.empty else " (optional)")
            for one in signature.parameters.values()
        )
        given = [f"{len(args)} without a name"] * bool(args) + list(kwargs)
        return (
            f"Its forward takes {takes or 'nothing'}; the call gave {', '.join(given) or 'nothing'}.",
            "Give the batch the names that forward takes; a dict goes in as model(**batch).",
        )
    return None


def _wrong_devices(
    module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[str, str] | None:
    home = next((one.device for one in module.parameters()), None)
    strays = [
        f"`{name}` is on {value.device}"
        for name, value in named_inputs(module, args, kwargs)
        if isinstance(value, torch.Tensor) and home is not None and value.device != home
    ]
    if not strays:
        return None
    return (
        f"The model is on {home}, and {_and(strays)}.",
        f"Move the batch to the model: batch = {{name: value.to({str(home)!r}) for name, value in batch.items()}}.",
    )


def _wrong_kinds(
    fault: Exception, module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[str, str] | None:
    names = argument_names(module, args, kwargs)
    for name, value in zip(names, (*args, *kwargs.values()), strict=True):
        kind = type(value).__name__
        if isinstance(value, torch.Tensor) or kind not in str(fault):
            continue
        if isinstance(value, Mapping):
            return f"`{name}` is a whole {kind}, not a tensor.", "Unpack it: model(**batch)."
        fix = f"Pass torch.as_tensor({name})." if kind in _ARRAYS else f"Pass a tensor as `{name}`."
        return f"`{name}` is a {kind}, not a tensor.", fix
    return None


def _listed(inputs: Sequence[tuple[str, Any]]) -> str:
    words = [f"{name} ({_describe(value)})" for name, value in inputs[:_SHOWN]]
    if len(inputs) > _SHOWN:
        words.append(f"{len(inputs) - _SHOWN} more")
    return _and(words) or "no input"


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}, {shape_words(value)}, {value.device}"
    return "None" if value is None else type(value).__name__


def _and(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


# ---- memory that ran out ---------------------------------------------------------------------------------------------

# What torch's CPU and CUDA allocators, C++, ONNX Runtime's arena and its CUDA provider, cuBLAS and cuDNN say, and first
# what ortlab says of them.
_SAYINGS: Final = (
    "memory ran out while",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "std::bad_alloc",
    "bad allocation",
    "failed to allocate memory for requested buffer",
    "cuda out of memory",
    "cuda failure 2: out of memory",
    "cudaerrormemoryallocation",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
)
_NODE: Final = re.compile(r"while running (\w+) node\. Name:\s*'([^']*)'")
_PASS: Final = re.compile(r"Error in (forward|backward) pass execution")
_TRIED: Final = re.compile(r"(?:tried to allocate (\d+) bytes|Tried to allocate ([\d.]+ [KMGT]iB))")


def ran_out(error: BaseException) -> bool:
    """Tell whether an error, or one that led to it, means that memory ran out."""
    return any(
        isinstance(one, MemoryError)
        or (isinstance(one, OSError) and one.errno == errno.ENOMEM)
        or type(one).__name__ == "OutOfMemoryError"  # torch's, which is not imported for that
        or any(saying in str(one).lower() for saying in _SAYINGS)
        for one in causes(error)
    )


def says_ran_out(text: str) -> bool:
    """Tell whether the words of an error, such as the reason of a fallback, mean that memory ran out."""
    return any(saying in text.lower() for saying in _SAYINGS)


def place(error: BaseException) -> str:
    """Say where memory ran out, as far as the error tells: "in backward, at FusedMatMul (/encoder/...)"; or ""."""
    text = "\n".join(map(str, causes(error)))
    where = []
    if found := _PASS.search(text):
        where.append(f"in {found[1]}")
    if found := _NODE.search(text):
        where.append(f"at {found[1]} ({found[2]})")
    elif found := _TRIED.search(text):
        where.append(f"at a request for {found[1] + ' bytes' if found[1] else found[2]}")
    return ", ".join(where)


def reason(error: BaseException) -> str:
    """Say in one line why a point failed."""
    if isinstance(error, OrtlabError):
        return " ".join(filter(None, (error.what, error.why)))
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
