"""The way from a browser to a remote JupyterLab: one host name, and nothing of that host's own localhost behind it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

HOST = "lab.example"
"""Name under which the browser knows the server; no resolver knows it."""

_LONGEST_HEAD = 1 << 16


class Proxy:
    """An HTTP proxy that lets `HOST` through to a port of this machine and refuses every other address.

    Attributes
    ----------
    port
        Where it listens.
    refused
        The addresses that were asked for in vain.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self.port = 0
        self.refused: list[str] = []
        self._open: set[asyncio.StreamWriter] = set()

    async def serve(self) -> asyncio.Server:
        """Begin to listen."""
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0, limit=_LONGEST_HEAD)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await self._request(reader, writer)
        writer.close()

    async def end(self) -> None:
        """Break off all connections, the web sockets among them."""
        for writer in self._open:
            writer.transport.abort()
        await asyncio.sleep(0.2)  # the transports close in the loop

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        first, rest = head.split(b"\r\n", 1)
        method, address, version = first.decode("latin-1").split(" ")
        tunnel = method == "CONNECT"  # web sockets come this way
        parts = urlsplit(f"//{address}" if tunnel else address)
        if parts.hostname != HOST:
            self.refused.append(address)
            writer.write(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            await writer.drain()
            return
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        self._open.add(far_writer)
        if tunnel:
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        else:
            path = parts.path + (f"?{parts.query}" if parts.query else "")
            kept = [line for line in rest.split(b"\r\n") if not line.lower().startswith(_OWN_HEADERS)]
            lines = [f"{method} {path} {version}".encode("latin-1"), b"Connection: close", *kept]
            far_writer.write(b"\r\n".join(lines))  # one request a connection: no second one can go elsewhere
        await asyncio.gather(_pass_on(reader, far_writer), _pass_on(far_reader, writer))


_OWN_HEADERS = (b"connection:", b"proxy-connection:", b"keep-alive:")


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_LONGEST_HEAD):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(OSError):
        writer.close()


@contextmanager
def running(target: int) -> Iterator[Proxy]:
    """Run a proxy to a port of this machine in a thread of its own: Playwright has a loop in this one."""
    proxy = Proxy(target)
    ready, end = threading.Event(), asyncio.Event()
    loops = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        server = await proxy.serve()
        ready.set()
        await end.wait()
        server.close()
        await proxy.end()

    thread = threading.Thread(target=asyncio.run, args=(serve(),), name="proxy")
    thread.start()
    ready.wait()
    try:
        yield proxy
    finally:
        loops[0].call_soon_threadsafe(end.set)
        thread.join()
