"""The command line, run as users run it: in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from forked import python

import ortlab
from ortlab import cli
from ortlab.errors import OrtlabError

REPOSITORY = Path(__file__).parents[2]


def ortlab_command(*arguments: str, **keywords) -> subprocess.CompletedProcess:
    keywords.setdefault("timeout", 300)
    return subprocess.run(
        python("-m", "ortlab.cli", *arguments),
        capture_output=True,
        text=True,
        check=False,
        **keywords,
    )


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """Let the process find the checkout from any folder, installed or not."""
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))


def test_version():
    result = ortlab_command("--version")
    assert (result.returncode, result.stdout) == (0, f"ortlab {ortlab.__version__}\n")


def test_help_names_every_command_and_loads_neither_torch_nor_onnxruntime():
    code = (
        "import sys\n"
        "from ortlab.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print([name for name in ('torch', 'onnxruntime', 'transformers') if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    for command in ("demo", "lab", "doctor", "selftest", "build"):
        assert f"\n    {command} " in result.stdout
    assert result.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: COMMAND"),
        (["dmeo"], "invalid choice: 'dmeo'"),
        (["doctor", "--jsno"], "unrecognized arguments: --jsno"),
        (["demo", "--steps", "0"], "'0' is not a whole number from 1 to"),
        (["demo", "--steps", "many"], "'many' is not a whole number"),
        (["demo", "--hidden", "100"], "100 is not a multiple of 64"),
        (["demo", "--length", "4"], "'4' is not a whole number from 8 to 512"),
        (["demo", "--seed", "1"], "'1' is not a whole number from 2 to"),
    ],
)
def test_wrong_arguments_are_named_and_exit_with_2(arguments, message):
    result = ortlab_command(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_doctor_table_and_json_agree(capsys):
    # In a process of its own, docs/command_line.md runs it.
    codes, said = zip(
        *((cli.main(["doctor", *more]), capsys.readouterr().out) for more in ([], ["--json"])), strict=True
    )
    report = json.loads(said[1])
    assert report["checks"]
    for check in report["checks"]:
        assert check["name"] in said[0]
    assert codes == ((0, 0) if report["ok"] else (1, 1))


def test_doctor_reports_an_installation_without_onnxruntime(tmp_path):
    # A package that shadows the real one, as a half-removed installation does.
    broken = tmp_path / "onnxruntime"
    broken.mkdir()
    (broken / "__init__.py").write_text(
        "raise ImportError('libonnxruntime.so: cannot open')", encoding="utf-8"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}"}
    result = ortlab_command("doctor", "--json", env=environment)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    report = json.loads(result.stdout)
    assert report["ok"] is False
    assert any(check["status"] == "fail" for check in report["checks"])


def test_a_failure_is_one_message_without_a_traceback(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    result = ortlab_command("lab", "--folder", str(tmp_path / "file"), "--no-browser")
    assert result.returncode == 1
    assert result.stderr.startswith("ortlab lab: The quickstart notebook cannot be written to")
    assert "Next: " in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for one process")
def test_ctrl_c_prints_one_line():
    process = subprocess.Popen(
        [
            sys.executable,
            "-u",
            "-m",
            "ortlab.cli",
            "demo",
            "--steps",
            "10000",
            "--layers",
            "1",
            "--hidden",
            "64",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert "learns English" in process.stdout.readline()
        time.sleep(1)  # into the build or the steps; the outcome is the same at any time
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "ortlab demo: interrupted."
    assert "Traceback" not in errors


class TestQuickstart:
    def test_is_the_notebook_of_the_repository(self, tmp_path):
        placed = cli.place_quickstart(tmp_path / "new" / "folder")
        assert placed == tmp_path / "new" / "folder" / "01_quickstart.ipynb"
        assert placed.read_bytes() == (REPOSITORY / "notebooks" / "01_quickstart.ipynb").read_bytes()

    def test_is_never_overwritten(self, tmp_path):
        mine = tmp_path / "01_quickstart.ipynb"
        mine.write_text("my notes", encoding="utf-8")
        assert cli.place_quickstart(tmp_path) == mine
        assert mine.read_text(encoding="utf-8") == "my notes"

    def test_a_folder_of_its_name_is_an_error(self, tmp_path):
        (tmp_path / "01_quickstart.ipynb").mkdir()
        with pytest.raises(OrtlabError, match="cannot be written to"):
            cli.place_quickstart(tmp_path)

    @pytest.mark.skipif(os.name == "nt", reason="the stand-in for the user's browser is a shell script")
    def test_opens_in_jupyterlab(self, tmp_path, unused_port, monkeypatch):
        # Jupyter hands the browser a page that goes on to the notebook with the server's token.
        browser, opened = tmp_path / "browser", tmp_path / "opened"
        browser.write_text(f'#!/bin/sh\ncp "${{1#file://}}" {opened}.part && mv {opened}.part {opened}\n')
        browser.chmod(0o755)
        monkeypatch.setenv("BROWSER", str(browser))
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "ortlab.cli", "lab", "--folder", ".", "--allow-root"),
                *("--ip=127.0.0.1", f"--port={unused_port}", "--ServerApp.port_retries=0"),
                "--IdentityProvider.token=",
            ],
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            page = wait_for(
                f"http://127.0.0.1:{unused_port}/api/contents/01_quickstart.ipynb?content=0", process
            )
            assert json.loads(page)["type"] == "notebook"
            deadline = time.monotonic() + 30
            while not opened.exists() and time.monotonic() < deadline:
                time.sleep(0.1)
        finally:
            process.terminate()
            process.communicate(timeout=60)
        assert f"127.0.0.1:{unused_port}/lab/tree/01_quickstart.ipynb" in opened.read_text(encoding="utf-8")


@pytest.fixture
def unused_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(address: str, process: subprocess.Popen, seconds: float = 90) -> bytes:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert process.poll() is None, process.stderr.read()
        try:
            with urllib.request.urlopen(address, timeout=5) as answer:  # noqa: S310 - our own server
                return answer.read()
        except OSError:
            time.sleep(0.3)
    raise AssertionError(f"{address} did not answer within {seconds} s")
