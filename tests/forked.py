"""Kernels and programs that are forked from one process in which torch is imported: none has to wait for it again.

Jupyter starts this file in the place of ipykernel, and tests in the place of Python: it stands for the process that is
forked, hands signals on to it, and ends as it does.
"""

from __future__ import annotations

import atexit
import builtins
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace

ADDRESS, KERNELS = "ORTLAB_TEST_PROCESSES", "JUPYTER_PATH"
IMPORTED = ("pandas", "sympy", "ipykernel.kernelapp", "ipywidgets", "anywidget", "torch.onnx", "transformers")
MODELS = ("transformers.models.bert.modeling_bert", "transformers.models.gpt2.modeling_gpt2")
"""No ortlab and no onnxruntime, which programs import themselves, and no matplotlib: it asks ipykernel how to draw."""


@contextmanager
def forked(folder: Path) -> Iterator[None]:
    """Let every kernel that is named python3 be a forked one, while the block runs."""
    if sys.platform != "linux":
        yield
        return
    spec = folder / "kernels" / "python3" / "kernel.json"
    spec.parent.mkdir(parents=True)
    command = python("-m", "ipykernel_launcher", "-f", "{connection_file}")
    spec.write_text(
        json.dumps({"argv": command, "display_name": "Python 3", "language": "python"}), encoding="utf-8"
    )
    before = {name: os.environ.get(name) for name in (ADDRESS, KERNELS)}
    os.environ[ADDRESS] = server()
    os.environ[KERNELS] = os.pathsep.join(filter(None, [str(folder), before[KERNELS]]))
    try:
        yield
    finally:
        for name, value in before.items():
            del os.environ[name]
            os.environ.update({name: value} if value is not None else {})


def python(*arguments: str | Path) -> list[str]:
    """Return the command that runs Python: any `-W`, then "-c" and code, "-m" and a module, or a script.

    A test that needs the process itself, its number, its limits or what it has imported, starts `sys.executable`.
    """
    given = [str(one) for one in arguments]
    if sys.platform != "linux":  # where sockets and forks do less
        return [sys.executable, *given]
    return [sys.executable, "-S", __file__, "--stand", server(), *given]


@cache
def server() -> str:
    """Start the process that forks, unless there is one already, and return where it listens; it ends with this one."""
    if ADDRESS in os.environ:
        return os.environ[ADDRESS]
    address = f"ortlab-tests-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(f"\0{address}")  # no file, so that its name may not be too long
        listening.listen()
        serving = [sys.executable, __file__, "--serve", str(listening.fileno())]
        process = subprocess.Popen(
            serving, pass_fds=[listening.fileno()], stdin=subprocess.PIPE, start_new_session=True
        )
    atexit.register(process.wait)
    atexit.register(process.stdin.close)  # before it
    return address


def serve(number: int) -> None:
    """Fork a process for each connection, until standard input ends."""
    builtins.__dict__["get_ipython"] = lambda: SimpleNamespace(
        kernel=None
    )  # pandas asks whether it is in a terminal
    for name in IMPORTED + MODELS:
        importlib.import_module(name)
    del builtins.__dict__["get_ipython"]
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, reap)
    listening = socket.socket(fileno=number)
    while listening in select.select([listening, sys.stdin], [], [])[0]:
        connection, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                run(*be_another(connection))
            except SystemExit as end:
                if end.code:
                    raise
            threading._shutdown()
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)  # taking apart what the parent has imported would take as long as importing it
        connection.close()


def reap(*_: object) -> None:
    """Let what has ended go; its processor time is then this process's."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def be_another(connection: socket.socket) -> list[str]:
    """Be a process with the folder, variables and streams of the one that stands for it; return its arguments.

    The process that returns is a child, and ends with the one that stands for it, which is told how it has ended.
    """
    request, streams, *_ = socket.recv_fds(connection, 1 << 20, 3)
    child = os.fork()
    if child:
        for stream in (0, 1, 2, *streams):  # whoever reads what the child writes waits for their end
            os.close(stream)
        connection.send(str(child).encode())
        stopped = threading.Thread(
            target=lambda: connection.recv(1) or os.kill(child, signal.SIGKILL), daemon=True
        )
        stopped.start()
        _, status = os.waitpid(child, 0)
        connection.send(str(os.waitstatus_to_exitcode(status)).encode())
        os._exit(0)
    connection.close()
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    arguments, folder, variables = json.loads(request)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    return arguments


def run(*arguments: str) -> None:
    """Run what Python was asked to run, as `__main__`."""
    while arguments[0] == "-W":
        _, option, *arguments = arguments
        warnings._setoption(option)
    kind, *sys.argv = arguments
    path = os.environ.get("PYTHONPATH", "")
    main = sys.modules["__main__"] = ModuleType("__main__")
    sys.path[:1] = ["", *filter(None, path.split(os.pathsep))]
    if kind == "-m":
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        code, sys.argv[0] = sys.argv[0], "-c"
        exec(compile(code, "<string>", "exec"), vars(main))  # noqa: S102 - that is what is asked for
    else:
        sys.argv.insert(0, kind)
        sys.path[0], main.__file__ = os.path.dirname(kind), kind  # noqa: PTH120 - as Python has it
        exec(compile(Path(kind).read_bytes(), kind, "exec"), vars(main))  # noqa: S102


def stand(address: str, *arguments: str) -> None:
    """Have a process forked, hand signals on to it, and end as it does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(f"\0{address}")
        variables = {name: value for name, value in os.environ.items() if name != "JPY_PARENT_PID"}
        request = json.dumps([arguments, os.getcwd(), variables]).encode()  # noqa: PTH109
        socket.send_fds(connection, [request], [0, 1, 2])
        child = int(connection.recv(64))
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda received, _: os.killpg(child, received))
        code = int(connection.recv(64) or -signal.SIGKILL)
    if code < 0:
        with suppress(OSError):  # nobody can catch SIGKILL
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(int(sys.argv[2]))
    else:
        stand(*sys.argv[2:])
