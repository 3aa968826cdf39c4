"""A subscription: subscribers that see a model, until it is closed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self


class Subscription:
    """Subscribers that see a model until `close`, or until the end of a with block.

    Parameters
    ----------
    context
        What subscribes, and ends it.
    subscribers
        The subscribers.
    """

    def __init__(self, context: AbstractContextManager[None], subscribers: Sequence[Any]) -> None:
        self.subscribers = tuple(subscribers)
        self._context: AbstractContextManager[None] | None = context
        context.__enter__()

    def close(self) -> None:
        """End it; the model has its hooks and attributes of before. Again, it does nothing."""
        context, self._context = self._context, None
        if context is not None:
            context.__exit__(None, None, None)

    def __enter__(self) -> Self:
        """Return itself: it is subscribed already."""
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        self.close()

    def __repr__(self) -> str:
        """Show who is subscribed, and whether it is over."""
        names = ", ".join(type(one).__name__ for one in self.subscribers)
        return f"Subscription({names}, {'closed' if self._context is None else 'open'})"
