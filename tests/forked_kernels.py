"""Kernels that are forked from one process in which torch is imported: none has to wait for it again.

Jupyter starts this file in the place of ipykernel; it stands for the kernel, and hands signals on to it.
"""

from __future__ import annotations

import builtins
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

ADDRESS = "ORTLAB_TEST_KERNELS"
IMPORTED = ("pandas", "sympy", "ipykernel.kernelapp", "ipywidgets", "anywidget", "torch.onnx", "transformers")
MODELS = ("transformers.models.bert.modeling_bert", "transformers.models.gpt2.modeling_gpt2")
"""No ortlab and no onnxruntime, which notebooks import themselves, and no matplotlib: it asks ipykernel how to draw."""


@contextmanager
def forked(folder: Path) -> Iterator[None]:
    """Let every kernel that is named python3 be a forked one, while the block runs."""
    if sys.platform != "linux":  # where sockets and forks do less
        yield
        return
    spec = folder / "kernels" / "python3" / "kernel.json"
    spec.parent.mkdir(parents=True)
    command = [sys.executable, "-S", __file__, "{connection_file}"]
    spec.write_text(
        json.dumps({"argv": command, "display_name": "Python 3", "language": "python"}), encoding="utf-8"
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(f"\0ortlab-kernels-{os.getpid()}")  # no file, so that its name may not be too long
        listening.listen()
        serving = [sys.executable, __file__, "--serve", str(listening.fileno())]
        process = subprocess.Popen(serving, pass_fds=[listening.fileno()])
    before = {name: os.environ.get(name) for name in (ADDRESS, "JUPYTER_PATH")}
    os.environ[ADDRESS] = f"ortlab-kernels-{os.getpid()}"
    os.environ["JUPYTER_PATH"] = os.pathsep.join(filter(None, [str(folder), before["JUPYTER_PATH"]]))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            os.environ.update({name: value} if value is not None else {})
        process.terminate()
        process.wait()


def serve(number: int) -> None:
    """Fork a kernel for each connection."""
    builtins.__dict__["get_ipython"] = lambda: SimpleNamespace(
        kernel=None
    )  # pandas asks whether it is in a terminal
    for name in IMPORTED + MODELS:
        importlib.import_module(name)
    del builtins.__dict__["get_ipython"]
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a kernel has ended
    with socket.socket(fileno=number) as listening:
        while True:
            connection, _ = listening.accept()
            if os.fork() == 0:
                listening.close()
                be_kernel(connection)
            connection.close()


def be_kernel(connection: socket.socket) -> None:
    """Run a kernel with the folder, variables and streams of the process that stands for it, and end with that."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    request, streams, *_ = socket.recv_fds(connection, 1 << 20, 2)
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream, number)
        os.close(stream)
    file, folder, variables = json.loads(request)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    sys.path[:1] = filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))
    connection.send(str(os.getpid()).encode())
    threading.Thread(target=lambda: os._exit(connection.recv(1) == b""), daemon=True).start()
    from ipykernel.kernelapp import IPKernelApp

    IPKernelApp.launch_instance(["-f", file])
    os._exit(0)


def stand_for_kernel(file: str) -> None:
    """Have a kernel forked, hand signals on to it, and end when it does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(f"\0{os.environ[ADDRESS]}")
        variables = {name: value for name, value in os.environ.items() if name != "JPY_PARENT_PID"}
        socket.send_fds(connection, [json.dumps([file, os.getcwd(), variables]).encode()], [1, 2])  # noqa: PTH109
        kernel = int(connection.recv(64))
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda received, _: os.killpg(kernel, received))
        connection.recv(1)


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(int(sys.argv[2]))
    else:
        stand_for_kernel(sys.argv[1])
