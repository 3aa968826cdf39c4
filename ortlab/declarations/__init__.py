"""Every switch of ORTModule, declared once; the groups together are the fields of `ortlab.Options`."""

from __future__ import annotations

from ortlab.declarations.compute import Compute
from ortlab.declarations.experimental import Experimental
from ortlab.declarations.export import Export
from ortlab.declarations.logging import Logging
from ortlab.declarations.memory import Memory

__all__ = ["Compute", "Experimental", "Export", "Logging", "Memory"]
