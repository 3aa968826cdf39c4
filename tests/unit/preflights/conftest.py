"""The models of this folder can be imported by its tests, and the operators that some of them need are defined."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))


@pytest.fixture(scope="session", autouse=True)
def own_operators():
    """Define operators of one's own for as long as the tests run."""
    from broken_models import define_operators

    library = define_operators()
    yield
    library._destroy()
