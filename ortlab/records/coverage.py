"""How much of a model ONNX Runtime executed, where only some of its parts are wrapped."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """One wrapped sub-module, and who executed it."""

    path: str  #: Where it is in the model, as `named_modules` says: "encoder.layer.0"
    kind: str  #: Name of its class
    parameters: int  #: Numbers in its parameters
    calls: int = 0  #: How often it was called
    on_ort: int = 0  #: How many of these calls ONNX Runtime executed
    fallback_reason: str = ""  #: Why PyTorch executed one of them; empty if it executed none

    @property
    def executed(self) -> bool:
        """Whether it was called, and ONNX Runtime executed every call."""
        return 0 < self.calls == self.on_ort


@dataclass(frozen=True)
class Coverage:
    """The wrapped parts of a model; empty, false, where all of it is wrapped or PyTorch was asked for."""

    parts: tuple[Part, ...] = ()  #: In the order of the model
    #: Numbers in the parameters of the parts that ONNX Runtime executed; before the first call, of all parts. A
    #: parameter that two parts share counts once.
    covered: int = 0
    parameters: int = 0  #: Numbers in the model's parameters

    def __bool__(self) -> bool:
        """Tell whether there are parts."""
        return bool(self.parts)

    @property
    def called(self) -> bool:
        """Whether any part was called."""
        return any(part.calls for part in self.parts)

    @property
    def executed(self) -> tuple[str, ...]:
        """Paths of the parts that ONNX Runtime executed in every call."""
        return tuple(part.path for part in self.parts if part.executed)

    @property
    def uncalled(self) -> tuple[str, ...]:
        """Paths of the parts that were not called."""
        return tuple(part.path for part in self.parts if not part.calls)

    @property
    def fallback_reason(self) -> str:
        """Why PyTorch executed a part that ONNX Runtime was asked for, with its path; empty if it did not."""
        return "; ".join(
            f"{part.path}: {part.fallback_reason}" for part in self.parts if part.fallback_reason
        )

    @property
    def share(self) -> float | None:
        """Covered parameters as a fraction of the model's, 0 to 1; None for a model without any."""
        return self.covered / self.parameters if self.parameters else None


def names(paths: Iterable[str], shown: int = 2) -> str:
    """Write paths in a few words: "encoder, head"; "encoder.layer.0 and 11 more"."""
    listed = list(paths)
    if len(listed) <= shown:
        return ", ".join(listed)
    return f"{listed[0]} and {len(listed) - 1} more"
