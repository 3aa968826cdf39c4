"""Every switch of ORTModule, declared once; the groups together are the fields of `ortlab.Options`."""

from __future__ import annotations

from ortlab.options.declarations.compute import Compute
from ortlab.options.declarations.experimental import Experimental
from ortlab.options.declarations.export import Export
from ortlab.options.declarations.logging import Logging
from ortlab.options.declarations.memory import Memory

__all__ = ["Compute", "Experimental", "Export", "Logging", "Memory"]
