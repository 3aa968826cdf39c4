"""A real JupyterLab for tests and benchmarks, and the Chromium that looks at it."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SERVER_SECONDS = 60
"""How long JupyterLab may take to answer."""

CHROMIUM_FLAGS = (
    "--no-sandbox",  # Chromium refuses to run as root with its sandbox, and CI containers run as root
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

RULES = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]}
"""What axe-core checks: contrast, names, roles and keyboard, by the Web Content Accessibility Guidelines 2.2, AA."""


def chromium_executable() -> str:
    """Find Chromium.

    Raises
    ------
    RuntimeError
        If it is not installed.
    """
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if (found := shutil.which(name)) is not None:
            return found
    raise RuntimeError("The browser tests need Chromium: sudo apt-get install chromium")


@dataclass(frozen=True)
class JupyterServer:
    """A running JupyterLab."""

    url: str
    token: str
    folder: Path
    settings: Path

    def address(self, notebook: str) -> str:
        """Where a notebook opens; `reset` closes what an earlier test has opened."""
        return f"{self.url}/lab/tree/{notebook}?token={self.token}&reset"

    def end_kernels(self, notebooks: set[str]) -> None:
        """End the kernels of notebooks; those of closed pages would keep their memory until the server ends."""
        for session in json.loads(self._asked("GET", "api/sessions")):
            if session["path"] in notebooks:
                self._asked("DELETE", f"api/sessions/{session['id']}")

    def _asked(self, method: str, what: str) -> bytes:
        address = f"{self.url}/{what}?token={self.token}"
        with urllib.request.urlopen(urllib.request.Request(address, method=method), timeout=60) as answer:  # noqa: S310
            return answer.read()

    def use_theme(self, name: str) -> None:
        """Choose the theme of pages opened from now on."""
        self._write("@jupyterlab/apputils-extension/themes", {"theme": f"JupyterLab {name.capitalize()}"})

    def ask_nothing(self) -> None:
        """Answer the question about Jupyter news, whose box would cover the page."""
        self._write(
            "@jupyterlab/apputils-extension/notification", {"fetchNews": "false", "checkForUpdates": False}
        )

    def keep_widgets(self) -> None:
        """Save notebooks of pages opened from now on with the state of their widgets."""
        self._write("@jupyter-widgets/jupyterlab-manager/plugin", {"saveState": True})

    def _write(self, plugin: str, values: dict[str, object]) -> None:
        file = self.settings / f"{plugin}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values), encoding="utf-8")


@contextmanager
def started(home: Path) -> Iterator[JupyterServer]:
    """Run a JupyterLab with nothing of the user's configuration; its files and settings are in `home`.

    Raises
    ------
    RuntimeError
        If it does not answer.
    """
    folder = home / "notebooks"
    folder.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = JupyterServer(f"http://127.0.0.1:{port}", secrets.token_hex(16), folder, home / "settings")
    server.ask_nothing()
    private = {
        "JUPYTER_CONFIG_DIR": home / "config",
        "JUPYTER_RUNTIME_DIR": home / "runtime",
        "JUPYTERLAB_SETTINGS_DIR": server.settings,
        "JUPYTERLAB_WORKSPACES_DIR": home / "workspaces",
        "IPYTHONDIR": home / "ipython",
    }
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}"]
    command += ["--ServerApp.port_retries=0", f"--ServerApp.root_dir={folder}"]
    # A proxy gives the server another name, as JupyterHub's does.
    command += [f"--IdentityProvider.token={server.token}", "--ServerApp.allow_remote_access=True"]
    log = home / "server.log"
    # The kernel has to import this ortlab, whether or not it is installed.
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, **{name: str(value) for name, value in private.items()}, "PYTHONPATH": path}
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        _wait_for(server, process, log)
        yield server
    finally:
        process.terminate()  # JupyterLab ends its kernels before itself
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for(server: JupyterServer, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + SERVER_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        if _answers(server):
            return
        time.sleep(0.2)
    raise RuntimeError(f"JupyterLab does not answer:\n{log.read_text(encoding='utf-8')[-2000:]}")


def _answers(server: JupyterServer) -> bool:
    try:
        with urllib.request.urlopen(f"{server.url}/api/status?token={server.token}", timeout=5):  # noqa: S310
            return True
    except OSError:  # refused, or no answer yet; URLError is one
        return False
