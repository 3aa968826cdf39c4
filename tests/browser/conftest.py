"""A real JupyterLab and a real Chromium, each started once, with nothing of the user's configuration."""

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
from dataclasses import dataclass
from pathlib import Path

import pytest

SERVER_SECONDS = 60
"""How long JupyterLab may take to answer."""

CELLS_SECONDS = 120
"""How long a kernel may take to start, import torch and run a notebook's cells."""

CLICK_SECONDS = 30
"""How long a click may take to show its result, an export and a rerun included."""

CHROMIUM_FLAGS = (
    "--no-sandbox",  # Chromium refuses to run as root with its sandbox, and CI containers run as root
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


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

    def use_theme(self, name: str) -> None:
        """Choose the theme of pages opened from now on."""
        self._write("@jupyterlab/apputils-extension/themes", {"theme": f"JupyterLab {name.capitalize()}"})

    def ask_nothing(self) -> None:
        """Answer the question about Jupyter news, whose box would cover the page."""
        self._write(
            "@jupyterlab/apputils-extension/notification", {"fetchNews": "false", "checkForUpdates": False}
        )

    def _write(self, plugin: str, values: dict[str, object]) -> None:
        file = self.settings / f"{plugin}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values), encoding="utf-8")


@pytest.fixture(scope="session")
def jupyter(tmp_path_factory) -> JupyterServer:
    home = tmp_path_factory.mktemp("jupyter")
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
    command += [f"--IdentityProvider.token={server.token}"]
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
    pytest.fail(f"JupyterLab does not answer:\n{log.read_text(encoding='utf-8')[-2000:]}")


def _answers(server: JupyterServer) -> bool:
    try:
        with urllib.request.urlopen(f"{server.url}/api/status?token={server.token}", timeout=5):  # noqa: S310
            return True
    except OSError:  # refused, or no answer yet; URLError is one
        return False


@pytest.fixture(scope="session")
def chromium():
    executable = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if executable is None:
        pytest.fail("The browser tests need Chromium: sudo apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=list(CHROMIUM_FLAGS))
        yield browser
        browser.close()


@pytest.fixture
def open_notebook(jupyter, chromium, tmp_path):
    """Open a notebook in a fresh page; the console errors of every page are checked at the end."""
    complaints: list[str] = []
    contexts = []

    def open_page(notebook: str, *, theme: str = "light", width: int = 1280, height: int = 1000):
        jupyter.use_theme(theme)
        context = chromium.new_context(viewport={"width": width, "height": height})
        contexts.append(context)
        context.set_default_timeout(1000 * CLICK_SECONDS)
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "console", lambda message: complaints.append(message.text) if message.type == "error" else None
        )
        page.goto(jupyter.address(notebook))
        page.wait_for_selector(".jp-Notebook", timeout=1000 * CELLS_SECONDS)
        # Cells that are run before the kernel has been connected stay as they are.
        page.get_by_text("| Idle").first.wait_for(timeout=1000 * CELLS_SECONDS)
        return page

    yield open_page
    for number, context in enumerate(contexts):
        for page in context.pages:
            page.screenshot(path=tmp_path / f"page-{number}.png")  # what a failed test has seen last
        context.close()
    assert complaints == []
