"""Let the tests of this folder import the families of the benchmarks; pytest's importlib mode leaves sys.path alone."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "bench"))
