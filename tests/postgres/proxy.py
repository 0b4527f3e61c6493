"""A TCP proxy on the loopback that can behave as badly as a network.

```python
async with open_proxy(postgres_url) as proxy:
    connection = await TrioConnection.connect(proxy.url)
    proxy.stop("answers")  # the server hears us, we do not hear the server
    proxy.break_trip(3, "after")  # the third trip from now on is made, its answer lost
```
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Callable
from typing import Literal
from urllib.parse import urlsplit

import trio

Direction = Literal["questions", "answers"]
BOTH: tuple[Direction, ...] = ("questions", "answers")

When = Literal["before", "during", "after"]
"""A trip is lost before the server hears of it; before its end, so that it is undone; or when it
has been made, with its answer."""

_ENCRYPTION = (80877103, 80877104)
"""Codes of requests that precede a connection's first message."""


class Proxy:
    """What `open_proxy` yields. Whatever is asked of it holds for open connections too."""

    def __init__(self, url: str, nursery: trio.Nursery) -> None:
        self._parts = urlsplit(url)
        self._nursery = nursery
        self._listener: trio.SocketListener | None = None
        self._gates: dict[Direction, trio.Event] = {}
        self._held: dict[Direction, trio.Event] = {}
        self._pairs: dict[trio.CancelScope, list[trio.SocketStream]] = {}
        self.port = 0
        self.delay = 0.0
        """Seconds that each piece of data waits before it goes on."""
        self.connections = 0
        """How many were accepted so far."""
        self.trips = 0
        """How many questions were asked since `break_trip`, by all connections together."""
        self._broken: tuple[int, When] | None = None
        for direction in BOTH:
            self._gates[direction] = trio.Event()
            self._held[direction] = trio.Event()
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
                self._held[direction] = trio.Event()

    async def holds(self, direction: Direction) -> None:
        """Return when something has come since `stop` and is held back."""
        await self._held[direction].wait()

    def cut(self) -> None:
        """Reset every open connection. What was held back is lost."""
        for scope, streams in self._pairs.items():
            for stream in streams:
                # With a linger time of zero, closing resets.
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            scope.cancel()

    def break_trip(self, number: int, when: When) -> None:
        """Break the connection that makes the ``number``-th trip from now on."""
        self.trips = 0
        self._broken = number, when

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
                    trips = Trips(self)
                    nursery.start_soon(self._pump, "questions", near, far, scope, trips.asked)
                    nursery.start_soon(self._pump, "answers", far, near, scope, trips.answered)
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
        passes: Callable[[bytes], tuple[bytes, bool]],
    ) -> None:
        with contextlib.suppress(trio.BrokenResourceError):
            async for data in source:
                if self.delay:
                    await trio.sleep(self.delay)
                if not self._gates[direction].is_set():
                    self._held[direction].set()
                await self._gates[direction].wait()
                passed, is_broken = passes(data)
                await sink.send_all(passed)
                if is_broken:
                    break
        await self._gates[direction].wait()
        scope.cancel()  # one side has gone, so the other goes too


class Trips:
    """The trips of one connection: what it asks up to a point at which it waits for an answer."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._asked = bytearray()
        self._answered = bytearray()
        self._has_begun = False
        self._is_lost = False

    def asked(self, data: bytes) -> tuple[bytes, bool]:
        """What of it the server is to hear, and whether that is all that it will ever hear."""
        self._asked += data
        passed = bytearray()
        # Held back until it is known where the trip ends.
        trip = bytearray()
        start = 0
        while (message := self._message(self._asked, start)) is not None:
            start += len(message)
            trip += message
            if self._has_begun and message[:1] in b"SQ":
                when = self._when()
                if when == "before":
                    return bytes(passed), True
                if when == "during":
                    return bytes(passed + trip[: -len(message)]), True
                self._is_lost = when == "after"
            elif self._has_begun and message[:1] in b"PBDECH":
                continue
            elif not self._has_begun:
                self._has_begun = int.from_bytes(message[4:8], "big") not in _ENCRYPTION
            passed += trip
            trip.clear()
        self._asked = trip + self._asked[start:]
        return bytes(passed), False

    def answered(self, data: bytes) -> tuple[bytes, bool]:
        """What of it the client is to hear, and whether that is all that it will ever hear."""
        if not self._is_lost:
            return data, False
        self._answered += data
        while (message := self._message(self._answered, 0)) is not None:
            del self._answered[: len(message)]
            if message[:1] == b"Z":
                # Ready for the next question: it has been done.
                return b"", True
        return b"", False

    def _when(self) -> When | None:
        self._proxy.trips += 1
        if self._proxy._broken is None or self._proxy.trips != self._proxy._broken[0]:
            return None
        return self._proxy._broken[1]

    def _message(self, data: bytearray, start: int) -> bytes | None:
        """The message that begins there, if it is there as a whole."""
        # The first one of a connection has no letter in front.
        head = 1 if self._has_begun else 0
        if len(data) < start + head + 4:
            return None
        end = start + head + int.from_bytes(data[start + head : start + head + 4], "big")
        return bytes(data[start:end]) if len(data) >= end else None


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
