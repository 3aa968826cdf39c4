"""Run a module as ``python -m MODULE ...`` does, in a process that ends with the notebook's.

``python -m ortlab.ranks ipyparallel.engine ...`` is how a cluster starts ipyparallel's controller and engines.
"""

from __future__ import annotations

import runpy
import sys

from ortlab.ranks.guard import watch

if __name__ == "__main__":
    watch()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
