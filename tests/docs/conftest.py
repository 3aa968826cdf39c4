"""Runs the pages of the manual, two at a time, and says at the end how many blocks were executed."""

from __future__ import annotations

import shutil
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from forked import forked

sys.path.append(str(Path(__file__).parent))  # pytest's importlib mode leaves sys.path alone
import pages

_READ: list[pages.Page] = []


@pytest.fixture(scope="session", autouse=True)
def kernels(tmp_path_factory):
    """Fork the kernels of all pages from one process."""
    with forked(tmp_path_factory.mktemp("kernels")):
        yield


@pytest.fixture(scope="session")
def executed(request, tmp_path_factory):
    """Return a page with the outcome of each block; pages of all chosen tests run beside each other."""
    wished = {
        item.callspec.params["path"] for item in request.session.items if "executed" in item.fixturenames
    }
    with ThreadPoolExecutor(2) as pool:
        running = {path: pool.submit(_executed, path, tmp_path_factory) for path in sorted(wished)}

        def result(path: Path) -> pages.Page:
            future: Future[pages.Page] = running[path]
            return future.result()

        yield result


def _executed(path: Path, folders: pytest.TempPathFactory) -> pages.Page:
    page = pages.read(path)
    folder = folders.mktemp(path.stem)
    for file in page.files:
        shutil.copy(file, folder)
    started = time.perf_counter()
    if any(not block.mark for block in page.blocks):
        pages.run(page.blocks, folder)
    page.seconds = time.perf_counter() - started
    _READ.append(page)
    return page


def pytest_terminal_summary(terminalreporter):
    """Say how many blocks of how many were executed, and why others were not."""
    if not _READ:
        return
    blocks = [block for page in _READ for block in page.blocks]
    marked = [block for block in blocks if block.mark]
    good = [block for block in blocks if block.ran and not block.fault]
    outputs = [block for block in good if block.expected is not None]
    for page in _READ:
        terminalreporter.line(f"{page.seconds:6.1f} s  {page.path.name}")
    terminalreporter.section("code blocks of README.md and docs/")
    terminalreporter.line(
        f"{len(good)} of {len(blocks)} blocks were executed, {len(outputs)} of them with an output that was compared;"
        f" {len(marked)} are marked as not run here:"
    )
    for mark in sorted({block.mark for block in marked}):
        places = ", ".join(str(block) for block in marked if block.mark == mark)
        terminalreporter.line(f"  {mark}: {places}")
