"""What a forward is called with, as its trace sees it.

ORTModule 1.19.2 makes tensors of numbers (``_graph_transition_manager``, `constant_as_tensor`), so that a forward that
looks at their type, or indexes with one, does something else than in PyTorch: a causal model of transformers takes a
tensor for `logits_to_keep` as the positions to keep, and `generate()` gives other words without a sign. Here numbers
stay numbers; a call with another one gets another export anyway (`schema.call_schema`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ortlab.engine.patching import replace
from ortlab.errors import BuildError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


def install() -> None:
    """Let numbers stay numbers, and name an argument that a graph cannot take. Calling it again changes nothing."""
    from onnxruntime.training.ortmodule import _io

    replace(_io, "parse_inputs_for_onnx_export", _read_arguments)


def _read_arguments(original: Callable[..., Any]) -> Callable[..., Any]:
    from onnxruntime.training.ortmodule._fallback import ORTModuleIOError

    def parse_inputs_for_onnx_export(
        parameters: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        constant_as_tensor: bool,  # noqa: ARG001, FBT001 - ORT's signature
        *more: Any,
    ) -> Any:
        try:
            return original(parameters, args, kwargs, False, *more)  # noqa: FBT003 - ORT's signature
        except ORTModuleIOError as error:
            raise _unreadable(str(error)) from error

    return parse_inputs_for_onnx_export


def _unreadable(message: str) -> BuildError:
    """Explain "ORTModule does not support input type <class 'a.B'> for input name"."""
    kind, _, name = message.rpartition(" for input ")
    kind = kind.rpartition("input type ")[2].removeprefix("<class '").removesuffix("'>")
    fix = "Pass the tensors that it holds, in a tuple, a list or a dict; or use PyTorch for such calls: engine='eager'."
    if "cache" in kind.lower():
        fix = (
            "Call it with use_cache=False, also in model.generate(..., use_cache=False); "
            "or generate with PyTorch: lab.set(engine='eager'), and engine='ort' to train on."
        )
    return BuildError(
        f"The argument `{name}` of this call cannot be given to ONNX Runtime.",
        why=f"A graph takes tensors, numbers and texts, in tuples, lists and dicts; this is a {kind}.",
        fix=fix,
    )
