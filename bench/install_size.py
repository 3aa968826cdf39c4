"""From an empty environment to a finished `ortlab demo` on the CPU: wall time and bytes installed, stated.

The first command of the README is run as it stands, part by part, in a clone of the repository's last commit: what is
not committed is not measured. Time depends on the network, and bytes on what pip's indexes offer for this machine
(with a CPU build of torch at hand, no CUDA package is installed). The clone is deleted at the end.

`--quick` stops after the part that creates the environment.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from pathlib import Path

from report import REPOSITORY, Report, arguments

LARGEST = 12


def main() -> None:
    """Measure, print and write."""
    read = arguments(__doc__, rounds=1)
    report = Report("install_size", read)
    with tempfile.TemporaryDirectory(prefix="ortlab-bench-") as folder:
        clone = Path(folder) / "ortlab"
        clone_command = ["git", "clone", "--quiet", str(REPOSITORY), str(clone)]
        subprocess.run(clone_command, check=True)
        parts = first_command((clone / "README.md").read_text(encoding="utf-8")).split(" && ")
        seconds = {part: run(part, clone) for part in (parts[:1] if read.quick else parts)}
        installed = sizes(clone / ".venv")
    times = [{"command": part, "wall time [s]": spent} for part, spent in seconds.items()]
    report.table("Parts of the README's first command", times)
    largest = sorted(installed.items(), key=lambda item: item[1], reverse=True)[:LARGEST]
    report.table("Largest packages", [{"folder": name, "size [MB]": size / 1e6} for name, size in largest])
    report.claim("Empty environment to finished demo, wall time [s]", sum(seconds.values()))
    report.claim("Installed [bytes]", sum(installed.values()))
    report.write()


def first_command(readme: str) -> str:
    """Return the first command of the README: the content of its first block that installs."""
    return readme.split("```sh installs\n")[1].partition("```")[0].strip()


def run(command: str, folder: Path) -> float:
    """Run a part of the command in an environment without this process's Python, and return the seconds it took."""
    kept = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    start = time.perf_counter()
    shell = ["/bin/bash", "-c", command]
    subprocess.run(shell, cwd=folder, env=kept, check=True)
    return time.perf_counter() - start


def sizes(environment: Path) -> dict[str, int]:
    """Return the bytes of each package folder in an environment; the rest of it is under its own name."""
    found: dict[str, int] = {}
    for file in environment.rglob("*"):
        if file.is_symlink() or not file.is_file():
            continue
        parts = file.relative_to(environment).parts
        name = parts[parts.index("site-packages") + 1] if "site-packages" in parts else parts[0]
        found[name] = found.get(name, 0) + file.stat().st_size
    return found


if __name__ == "__main__":
    main()
