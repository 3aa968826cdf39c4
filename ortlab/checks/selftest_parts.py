"""The parts of a self-test, and running one in this process: `python -m ortlab.checks.selftest_parts`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

from ortlab.checks.selftest_memory import headline, memory
from ortlab.checks.selftest_optimizers import optimizers
from ortlab.checks.selftest_training import models, switches
from ortlab.checks.selftest_trial import Trial, report

PARTS: Final[dict[str, Callable[[Any, Any], Iterator[Trial]]]] = {
    "models": models,
    "switches": switches,
    "optimizers": optimizers,
    "memory": memory,
    "headline": headline,
}
"""The parts that train, in the order in which they run; "installation", the doctor, comes before."""


def main(part: str, device: str, size: str, tried: str) -> None:
    """Run the trials of a part but those that were tried already, a list of their names as JSON."""
    import warnings

    warnings.simplefilter("ignore")
    report(PARTS[part](device, size), json.loads(tried))


if __name__ == "__main__":
    main(*sys.argv[1:])
