"""Every code block of the README and of the manual runs as it is written, and prints what the page says."""

from __future__ import annotations

import pages
import pytest

pytestmark = pytest.mark.timeout(1800)  # a page beside others on a busy machine


@pytest.mark.parametrize("path", pages.PAGES, ids=lambda path: path.name)
def test_a_page_tells_what_each_of_its_blocks_is(path):
    assert pages.read(path).notes == []


WITH_CODE = [path for path in pages.PAGES if any(not block.mark for block in pages.read(path).blocks)]


@pytest.mark.parametrize("path", WITH_CODE, ids=lambda path: path.name)
def test_the_blocks_of_a_page_run_in_order(executed, path):
    page = executed(path)
    faults = [f"{block}\n{block.source}\n{block.fault}" for block in page.blocks if block.fault]
    assert not faults, "\n\n".join(faults)
    assert all(block.ran for block in page.blocks if not block.mark)
