"""A TCP proxy on the loopback that can behave as badly as a network.

```python
async with open_proxy(postgres_url) as proxy:
    connection = await TrioConnection.connect(proxy.url)
    proxy.stop("answers")  # the server hears us, we do not hear the server
```
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from typing import Literal
from urllib.parse import urlsplit

import trio

Direction = Literal["questions", "answers"]
BOTH: tuple[Direction, ...] = ("questions", "answers")


class Proxy:
    """What `open_proxy` yields. Whatever is asked of it holds for open connections too."""

    def __init__(self, url: str, nursery: trio.Nursery) -> None:
        self._parts = urlsplit(url)
        self._nursery = nursery
        self._listener: trio.SocketListener | None = None
        self._gates: dict[Direction, trio.Event] = {}
        self._pairs: dict[trio.CancelScope, list[trio.SocketStream]] = {}
        self.port = 0
        self.delay = 0.0
        """Seconds that each piece of data waits before it goes on."""
        self.connections = 0
        """How many were accepted so far."""
        for direction in BOTH:
            self._gates[direction] = trio.Event()
        self.forward()

    @property
    def url(self) -> str:
        """The server's URL, by way of the proxy."""
        credentials, at, _ = self._parts.netloc.rpartition("@")
        return self._parts._replace(netloc=f"{credentials}{at}127.0.0.1:{self.port}").geturl()

    def forward(self) -> None:
        """Undo `stop`: what was held back goes on its way."""
        for gate in self._gates.values():
            gate.set()

    def stop(self, *directions: Direction) -> None:
        """Hold back everything, or one direction: the end of a connection as well as data.

        Both sides see a silent network. Connections are accepted and written to, and nothing
        comes of it.
        """
        for direction in directions or BOTH:
            if self._gates[direction].is_set():
                self._gates[direction] = trio.Event()

    def cut(self) -> None:
        """Reset every open connection. What was held back is lost."""
        for scope, streams in self._pairs.items():
            for stream in streams:
                # With a linger time of zero, closing resets.
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            scope.cancel()

    async def refuse(self) -> None:
        """Refuse new connections. The port can be opened again with `accept`."""
        if self._listener is not None:
            await self._listener.aclose()
            self._listener = None

    def close(self) -> None:
        """Close the listener, for good."""
        if self._listener is not None:
            self._listener.socket.close()
            self._listener = None

    async def accept(self) -> None:
        """Take connections again, on the same port."""
        if self._listener is None:
            (self._listener,) = await trio.open_tcp_listeners(self.port, host="127.0.0.1")
            self.port = self._listener.socket.getsockname()[1]
            self._nursery.start_soon(self._serve, self._listener)

    async def _serve(self, listener: trio.SocketListener) -> None:
        with contextlib.suppress(trio.ClosedResourceError):
            while True:
                self._nursery.start_soon(self._pair, await listener.accept())

    async def _pair(self, near: trio.SocketStream) -> None:
        self.connections += 1
        streams = [near]
        with trio.CancelScope() as scope:
            self._pairs[scope] = streams
            try:
                host, port = self._parts.hostname or "127.0.0.1", self._parts.port or 5432
                far = await trio.open_tcp_stream(host, port)
                streams.append(far)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._pump, "questions", near, far, scope)
                    nursery.start_soon(self._pump, "answers", far, near, scope)
            except OSError:
                pass  # nobody there: the near side sees its connection closed
            finally:
                del self._pairs[scope]
                for stream in streams:
                    stream.socket.close()  # without a checkpoint, which would miss the second

    async def _pump(
        self,
        direction: Direction,
        source: trio.SocketStream,
        sink: trio.SocketStream,
        scope: trio.CancelScope,
    ) -> None:
        with contextlib.suppress(trio.BrokenResourceError):
            async for data in source:
                if self.delay:
                    await trio.sleep(self.delay)
                await self._gates[direction].wait()
                await sink.send_all(data)
        await self._gates[direction].wait()
        scope.cancel()  # one side has gone, so the other goes too


@contextlib.asynccontextmanager
async def open_proxy(url: str) -> AsyncIterator[Proxy]:
    """A proxy in front of the server of `url`, forwarding; gone at the end of the block."""
    async with trio.open_nursery() as nursery:
        proxy = Proxy(url, nursery)
        await proxy.accept()
        try:
            yield proxy
        finally:
            nursery.cancel_scope.cancel()
            # Without a checkpoint, whose cancellation would take the place of the block's error.
            proxy.close()
