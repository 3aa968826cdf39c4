"""What the notebook speaks to the ranks through: an ipyparallel client that leaves the user's shell alone.

This module imports ipyparallel, so it is imported only where a cluster starts.
"""

from __future__ import annotations

from typing import Any

from ipyparallel import Client


class QuietClient(Client):  # type: ignore[misc] # Client is Any: ipyparallel has no stubs
    """A client whose connection registers no magics.

    The first client in a notebook registers ``%px``, ``%autopx``, ``%pxresult`` and ``%pxconfig`` for its own engines
    (``ipyparallel/client/client.py``, `Client.__init__`). They would stay when ortlab is unloaded, and would run on the
    ranks what the user means for a cluster of their own; here, ``%%ort_ranks`` is what runs a cell on all.
    """

    def activate(self, *_: Any, **__: Any) -> None:
        """Register nothing."""
