"""Pages of the manual as programs: the code blocks of a page, run in order as a reader would run them.

What stands behind the language of a fence says how a block is meant:

    ```python               a cell of a notebook; all cells of a page run in one kernel, magics and all
    ```bash                 a command line, run in the folder in which the kernel runs
    ```text output          what the block before it prints; a line `...` stands for any lines
    ```python script        a program: run by Python alone, after the blocks before it that hold no magics
    ```python needs-gpu     not run here; the words of `MARKS` stand in the paragraph above, for the reader
    ```diff                 lines that a reader adds to a file of their own: shown, never run; `added` names them
    ```{include} FILE       a page within the page
    ```{literalinclude} F   a file that the reader saves beside the notebook
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import nbformat
from forked import python
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbval.plugin import get_sanitize_patterns

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
PAGES = (REPOSITORY / "README.md", *sorted(path for path in DOCS.glob("*.md") if path.stem[0] != "_"))

MARKS = {
    "installs": "installs",
    "stays-open": "*Stays open",
    "takes-minutes": "*Takes ",
    "needs-gpu": "*Needs a GPU",
    "needs-slurm": "*Needs Slurm",
    "needs-deepspeed": "*Needs DeepSpeed",
}
"""Why a block is not run here, and what the paragraph above it has to tell the reader."""

TIMEOUT_S = 600
"""What a block may take."""

SCRIPT = "python script"
DIFF = "diff"
LANGUAGES = {"python": "kernel", "bash": "shell", "sh": "shell"}

_FENCE = re.compile(
    r"^(?P<indent> *)(?P<fence>`{3,})(?P<info>[^`\n]*)\n(?P<text>(?s:.*?))^(?P=indent)(?P=fence) *$",
    re.MULTILINE,
)
# What of the README's answers follows the times of the machine: costs, verdicts, and which plans are cheapest.
_ANSWERS = [
    (r"costs .*?: \d+ plans? \(.*?\); measured", "costs TIME: PLANS; measured"),
    (
        r"step memory\b(?: than the baseline| as the baseline)? and .*?interval.*?\)(?: than the baseline)?",
        "MEMORY, TIME",
    ),
    (r"Added \d+ recompute nodes: .*?\.(?= [A-Z\d]|$)", "ADDED"),
]
_SANITIZE = [
    (re.compile(pattern), replacement)
    for pattern, replacement in get_sanitize_patterns(
        (REPOSITORY / "tests" / "nbval_sanitize.cfg").read_text(encoding="utf-8")
    )
]


@dataclass
class Block:
    """A code block of a page: where it stands, what it is, and what came of it."""

    page: Path
    line: int
    info: str
    source: str
    above: str
    expected: str | None = None
    printed: str = ""
    fault: str = ""
    ran: bool = False

    @property
    def language(self) -> str:
        return self.info.split()[0] if self.info else ""

    @property
    def mark(self) -> str:
        """Why it is not run here, or nothing."""
        return self.info.partition(" ")[2] if not self.is_script else ""

    @property
    def is_script(self) -> bool:
        return self.info == SCRIPT

    @property
    def has_magics(self) -> bool:
        return re.search(r"^(\w+ = )?%", self.source, re.MULTILINE) is not None

    def __str__(self) -> str:
        return f"{named(self.page)}:{self.line}"


@dataclass
class Page:
    """The code blocks of a page in order, the files that its reader saves, and the lines that its diffs add."""

    path: Path
    blocks: list[Block] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0


def named(path: Path) -> str:
    """Name a page as a reader knows it."""
    return str(path.relative_to(REPOSITORY)) if path.is_relative_to(REPOSITORY) else path.name


def read(path: Path) -> Page:
    """Find the code blocks of a page; what is wrong with how they are written is in its `notes`."""
    page = Page(path)
    text = path.read_text(encoding="utf-8")
    for match in _FENCE.finditer(text):
        info = match["info"].strip()
        line = text.count("\n", 0, match.start()) + 1
        place = f"{named(path)}:{line}"
        paragraph = text[: match.start()].rstrip().rpartition("\n\n")[2]
        directive, _, argument = info.partition("} ")
        if directive == "{include":
            included = path.parent / argument
            if included.is_file() and included.parent == DOCS and included.stem[0] == "_":
                inner = read(included)
                page.blocks += inner.blocks
                page.files += inner.files
                page.notes += inner.notes
        elif directive == "{literalinclude":
            page.files.append(path.parent / argument)
        elif info.startswith("{"):
            continue
        elif info == DIFF:
            page.added += [one[2:] for one in match["text"].splitlines() if one.startswith("+ ")]
        elif info == "text output":
            if page.blocks:
                page.blocks[-1].expected = match["text"]
            else:
                page.notes.append(f"{place}: an output without a block before it")
        else:
            block = Block(path, line, info, match["text"], paragraph)
            page.blocks.append(block)
            page.notes += [f"{place}: {fault}" for fault in _faults(block)]
    return page


def _faults(block: Block) -> list[str]:
    """Say what a reader is not told about a block."""
    if block.language not in LANGUAGES:
        return [f"a block of {block.language or 'no'} language: say python, bash, or text output"]
    if not block.mark or block.is_script:
        return []
    if block.mark not in MARKS:
        return [f"there is no mark {block.mark!r}"]
    if MARKS[block.mark] not in block.above:
        return [
            f"marked {block.mark}, and the reader is not told: the words {MARKS[block.mark]!r} above are missing"
        ]
    return []


def run(blocks: list[Block], folder: Path) -> None:
    """Run blocks one after another in one kernel and one folder; what came of each is written into it."""
    asyncio.run(_run(blocks, folder))


async def _run(blocks: list[Block], folder: Path) -> None:
    notebook = nbformat.v4.new_notebook()
    place = {"metadata": {"path": str(folder)}}
    client = NotebookClient(
        notebook, kernel_name="python3", timeout=TIMEOUT_S, startup_timeout=TIMEOUT_S, resources=place
    )
    async with client.async_setup_kernel():
        for block in blocks:
            if block.mark:
                continue
            block.printed, block.fault = "", ""
            if block.is_script:
                before = [one.source for one in blocks[: blocks.index(block)] if _is_plain(one)]
                _run_in_shell(block, folder, python("-c", "\n".join([*before, block.source])))
            elif LANGUAGES[block.language] == "shell":
                _run_in_shell(block, folder, ["/bin/bash", "-euo", "pipefail", "-c", block.source])
            else:
                await _run_in_kernel(block, client)
            block.ran = True
            if not block.fault and block.expected is not None and not fits(block.expected, block.printed):
                block.fault = f"printed\n{block.printed}\nwhere the page says\n{block.expected}"


async def _run_in_kernel(block: Block, client: NotebookClient) -> None:
    cell = nbformat.v4.new_code_cell(block.source.rstrip("\n"))
    client.nb.cells.append(cell)
    try:
        await client.async_execute_cell(cell, len(client.nb.cells) - 1)
    except CellExecutionError as error:
        block.fault = str(error)
    block.printed = "\n".join(_text(output) for output in cell.outputs)


def _text(output: nbformat.NotebookNode) -> str:
    if output.output_type == "stream":
        return output.text
    return output.get("data", {}).get("text/plain", "")


def environment() -> dict[str, str]:
    """Give the environment of a reader who has activated the virtual environment."""
    return {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}


def _is_plain(block: Block) -> bool:
    """Tell whether a block is Python that needs no notebook."""
    return block.info == "python" and not block.has_magics


def _run_in_shell(block: Block, folder: Path, command: list[str]) -> None:
    done = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )
    block.printed = done.stdout
    if done.returncode:
        block.fault = f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"


def fits(expected: str, printed: str) -> bool:
    """Tell whether something was printed as a page says, but for what varies from run to run."""
    parts = [re.escape(sanitized(part)) for part in re.split(r"(?m)^\s*\.\.\.\s*$", expected)]
    return re.fullmatch(".*".join(parts), sanitized(printed)) is not None


def sanitized(text: str) -> str:
    """Replace what varies from run to run, as in the tests of the notebooks."""
    text = " ".join(text.split())  # lines break where a number makes them
    for pattern, replacement in (*_ANSWERS, *_SANITIZE):
        text = re.sub(pattern, replacement, text)
    return " ".join(text.split())
