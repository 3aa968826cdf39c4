"""Why a module could not be built, as a finding: the error's words, with the module and the line it comes from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from ortlab.engine.diagnosis import ForwardError
from ortlab.engine.inspection.standing import backward_hook
from ortlab.engine.inspection.translation import causes
from ortlab.errors import OrtlabError
from ortlab.records.preflight import Finding, Kind, Place

if TYPE_CHECKING:
    from ortlab.engine.inspection.places import Places
    from ortlab.engine.inspection.translation import Translation

_NODE: Final = re.compile(r"/_original_module(?:/[\w.]+)+")
"""Name of a node in an ONNX graph."""

_LINE: Final = re.compile(r" cannot be exported: (?P<where>.+), line (?P<line>\d+): ")
_BUFFERS: Final = re.compile(r"changes buffers: (?P<name>[^,]+?)(?:,.*)?\.$")

_HOOKED: Final = re.compile(r"(?P<module>[\w.]+)[^:]*? has a backward hook")

_KINDS: Final = (
    (r"^(Writing|Assigning|Reading a tensor)", Kind.WRITE),
    (r"changes buffers", Kind.BUFFER),
    (r"returns something that is no tensor|returned no tensor", Kind.OUTPUT),
    (r"checkpoint", Kind.CHECKPOINT),
    (r"is on device|same device", Kind.DEVICE),
    (r"has no gradient for|gradient builder", Kind.NO_GRADIENT),
    (r"Half|float16|bfloat16|complex|[Dd]type", Kind.DTYPE),
)


def finding_of(error: BaseException, places: Places, translation: Translation) -> Finding:
    """Say what an error of a build means, and where it comes from."""
    what, fix = _words(error)
    if isinstance(error, ForwardError):
        if error.__cause__ is None:
            return Finding.of(Kind.OUTPUT, what, places.root, fix)
        return finding_of_forward(error.__cause__, places)
    hooked = _HOOKED.match(what)
    if hooked:
        return backward_hook(places.inside(hooked["module"]))
    kind = next((kind for pattern, kind in _KINDS if re.search(pattern, what)), Kind.BUILD)
    if kind is Kind.NO_GRADIENT and translation.untrained:
        operator, place = _untrained(what, translation)
        return Finding.of(kind, f"ONNX Runtime has no gradient for {operator}.", place, fix)
    place = places.root if kind is Kind.OUTPUT else _place_of(error, what, places)
    line = _LINE.search(what)
    if line:
        place = place._replace(where=f"{line['where']}:{line['line']}")
        what = what[: line.start()] + " cannot be exported."
    return Finding.of(kind, what, place, fix)


def _place_of(error: BaseException, what: str, places: Places) -> Place:
    """Find where an error comes from: a buffer or a node that it names, or the line that raised its first cause."""
    buffers = _BUFFERS.search(what.splitlines()[0])
    if buffers:
        return places.of_parameter(buffers["name"])
    node = next(filter(None, (_NODE.search(str(one)) for one in causes(error))), None)
    if node:
        return places.of_name(node[0])
    return next(filter(None, (_place_in(one, places) for one in _innermost_first(error))), places.root)


def finding_of_forward(error: BaseException, places: Places) -> Finding:
    """Say where a forward fails in PyTorch."""
    return Finding.of(
        Kind.FORWARD,
        f"The forward fails in PyTorch, too: {type(error).__name__}: {error}",
        _raised_at(error, places),
        "Mend the model or the batch; the model is untouched.",
    )


def _words(error: BaseException) -> tuple[str, str]:
    if isinstance(error, OrtlabError):
        says_more = re.search("returns something", error.what)
        return " ".join(filter(None, (error.what, error.why if says_more else ""))), error.fix
    return f"{type(error).__name__}: {str(error).strip() or 'no message'}".splitlines()[0], ""


def _untrained(what: str, translation: Translation) -> tuple[str, Place]:
    for operators, operator, place in translation.untrained:
        if any(re.search(rf"\b{one}\b", what) for one in operators):
            return operator, place
    _, operator, place = translation.untrained[0]
    return operator, place


def _raised_at(error: BaseException, places: Places) -> Place:
    return places.of_traceback(error.__traceback__)


def _place_in(error: BaseException, places: Places) -> Place | None:
    place = places.of_traceback(error.__traceback__)
    return place if place.where else None


def _innermost_first(error: BaseException) -> Iterator[BaseException]:
    return reversed(list(causes(error)))
