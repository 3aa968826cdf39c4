"""What torch's exporter and ONNX Runtime 1.19.2 warn of in models that are in order, and why nobody has to act on it.

A warning that is listed here is kept as a message of level INFO, with the reason; every other warning stays one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_EXPORTER: Final = "exporter"
_RUNTIME: Final = "ONNX Runtime"


@dataclass(frozen=True)
class Known:
    """One harmless warning."""

    source: str  # as in `ortlab.records.messages.Message`
    begins: str  # regular expression of how it begins
    reason: str  # why it is harmless, one sentence


_CHECKED: Final = (  # `ortlab.engine.tracing.guards`
    "ortlab checks in every step that the value is the one that the graph was made with, and stops the step if not."
)
_SIZED: Final = (
    "An export that uses a size as a number is for that size; a batch of another size is exported anew."
)

KNOWN: Final[tuple[Known, ...]] = (
    Known(
        _RUNTIME,
        r"Removing initializer '.*'\. It is not used by any node and should be removed from the model\.$",
        "ONNX Runtime drops a constant that its own optimisers no longer need; results and time stay the same.",
    ),
    Known(
        _RUNTIME,
        r"No transformer layer boundary nodes found",
        "A memory level then chooses among all nodes instead of layer by layer; lab.plan() lists what it recomputes.",
    ),
    Known(
        _EXPORTER,
        r"Converting a tensor to a (Python (boolean|float|index|integer|list|number)|NumPy array) might cause",
        _CHECKED,
    ),
    Known(_EXPORTER, r"torch\.(tensor|as_tensor|from_numpy) results are registered as constants", _CHECKED),
    Known(_EXPORTER, r"(Iterating over a tensor|Using len to get tensor shape) might cause", _SIZED),
    Known(
        _EXPORTER,
        r"Constant folding - .*Constant folding not applied\.",
        "torch leaves the operator in the graph, and ONNX Runtime computes it or folds it itself.",
    ),
)
"""Every warning that is known to be harmless."""


def reason_harmless(source: str, text: str) -> str:
    """Return why nobody has to act on a message; empty for one that is not known."""
    for one in KNOWN:
        if one.source == source and re.match(one.begins, text, re.DOTALL):
            return one.reason
    return ""


def markdown() -> str:
    """Write the list in Markdown, for the documentation."""
    rows = [("who", "begins with", "why nobody has to act"), ("---",) * 3]
    rows += [(one.source, f"`{one.begins}`".replace("|", "\\|"), one.reason) for one in KNOWN]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows) + "\n"
