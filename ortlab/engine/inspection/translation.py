"""Watch how torch's exporter translates a traced graph: what has no form, what PyTorch runs, which Functions there are.

An operator that cannot be translated is noted and stands in for itself, so that one export finds all of them; the
export then fails at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.checkpoint import CheckpointFunction

from ortlab.engine.operators.untrained_operators import Watcher
from ortlab.errors import BuildError
from ortlab.records.preflight import Finding, Kind, Place

if TYPE_CHECKING:
    from ortlab.engine.inspection.places import Places


class Translation(Watcher):
    """Report what becomes of the nodes of one traced graph."""

    def __init__(self, places: Places, report: Callable[[Finding], None]) -> None:
        self._places = places
        self._report = report
        self._failure: BuildError | None = None
        self._doubtful: set[int] = set()
        # Operators of ONNX on the way of a gradient that ONNX Runtime may not train: obstacles if the gradient graph
        # cannot be built.
        self.untrained: list[tuple[frozenset[str], str, Place]] = []
        self.trained_by_torch: set[str] = set()  # operators that PyTorch runs and differentiates

    def called(self, node: Any) -> None:
        """Note an autograd Function that stays one."""
        name = node.pyname() if hasattr(node, "pyname") else node.kind()
        if name == CheckpointFunction.__name__:  # refused, or left to PyTorch as the user wished
            return
        self._report(
            Finding.of(
                Kind.FUNCTION,
                f"The autograd Function {name} runs as it is, in Python; nothing checks its backward.",
                self._places.of_node(node),
                "ortlab.parity.check_functions(model, ...) compares its backward with finite differences.",
            )
        )

    def left(self, node: Any, *, trained: bool) -> None:
        """Note an operator that PyTorch runs inside the graph."""
        if trained:
            self.trained_by_torch.add(node.kind())
        again = ", and once more in the backward" if trained else ""
        self._report(
            Finding.of(
                Kind.BY_TORCH,
                f"PyTorch runs {node.kind()} inside the graph{again}.",
                self._places.of_node(node),
            )
        )

    def without_gradient(self, node: Any, operators: set[str], why: str) -> None:
        """Note operators that ONNX Runtime may have no gradient for, and why PyTorch cannot run them."""
        self.untrained.append((frozenset(operators), f"{node.kind()} ({why})", self._places.of_node(node)))

    def failed(self, node: Any, error: Exception) -> None:
        """Note an operator that cannot be translated; what uses its result may fail only for that."""
        doubtful = any(one.unique() in self._doubtful for one in node.inputs())
        self._doubtful |= {one.unique() for one in node.outputs()}
        place = self._places.of_node(node)
        if doubtful and not _has_no_rule(error):
            return
        refusal = next((one for one in causes(error) if isinstance(one, BuildError)), None)
        finding = _no_rule(node, error, place) if refusal is None else _refusal(refusal, place)
        self._report(finding)
        self._failure = self._failure or refusal or BuildError(finding.what, why=str(error).strip())

    def finish(self) -> None:
        """End the export; raise BuildError if an operator could not be translated."""
        if self._doubtful:
            raise self._failure or BuildError("An operator could not be translated.")


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what led to it, the latest first."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _has_no_rule(error: Exception) -> bool:
    return type(error).__name__ == "UnsupportedOperatorError"


def _no_rule(node: Any, error: Exception, place: Place) -> Finding:
    why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    reason = getattr(error, "not_a_call", "")
    what = f"ONNX has no form for {node.kind()}"
    if not _has_no_rule(error):
        what = f"{node.kind()} cannot be written in ONNX as it is used here ({why.rstrip('.')})"
    also = f", and PyTorch cannot run it inside the graph: {reason}" if reason else ""
    return Finding.of(
        Kind.NO_RULE, f"{what}{also}.", place, "Use another operator, or leave this module to PyTorch."
    )


def _refusal(error: BuildError, place: Place) -> Finding:
    if "checkpoint" in error.what:
        return Finding.of(Kind.CHECKPOINT, error.what, place, error.fix)
    what = " ".join(filter(None, (error.what, error.why)))
    return Finding.of(Kind.NO_RULE, what, place, error.fix)
