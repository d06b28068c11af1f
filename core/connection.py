"""HTTP connections that do not wait for ever: a client that sends a byte now and then, or takes in nothing, is dropped.

uvicorn bounds what it holds for a connection, but not for how long. Each connection is looked at once in a while: its
request must be whole in time, and what is written to it must be getting less. A dropped connection is aborted: an
orderly close would wait for the very bytes that nobody takes in.

Not here: sizes of bodies (`server.py`), readers of events that merely lag (`server.py`), idle connections between
requests (uvicorn's keep-alive).
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import termios
import time
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

LOOKS = 4  # at each connection, in the time that it has
BYTES_PER_SECOND = 1024  # that a client takes in at least
AT_ONCE = struct.pack("ii", 1, 0)


class BoundedProtocol(HttpToolsProtocol):
    seconds: float

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.asked_at: float | None = time.monotonic()  # since when a request is due or under way
        self.taken_at = time.monotonic()  # when the client last took in its share
        self.unsent = 0
        self.look_later()

    def on_message_begin(self) -> None:
        self.asked_at = time.monotonic()
        super().on_message_begin()

    def on_message_complete(self) -> None:
        self.asked_at = None
        super().on_message_complete()

    def resume_writing(self) -> None:
        self.unsent = 0
        super().resume_writing()

    def look_later(self) -> None:
        self.look_task = self.loop.call_later(self.seconds / LOOKS, self.look)

    def connection_lost(self, exc: Exception | None) -> None:
        self.look_task.cancel()
        super().connection_lost(exc)

    def look(self) -> None:
        connection = self.transport.get_extra_info("socket")
        now, unsent = time.monotonic(), self.transport.get_write_buffer_size() + queued(connection)
        share = BYTES_PER_SECOND * self.seconds / LOOKS
        if unsent == 0 or self.unsent == 0 or unsent <= self.unsent - share:
            self.taken_at = now
        self.unsent = unsent
        late = self.asked_at is not None and now - self.asked_at > self.seconds
        if late or now - self.taken_at > self.seconds:
            # Without this the kernel would go on offering what it still holds, for minutes.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
            self.transport.abort()
        else:
            self.look_later()


def queued(connection: socket.socket) -> int:
    """Bytes that the kernel holds until the client has them; it asks for more only when many of them are gone."""
    (size,) = struct.unpack("i", fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)))
    return int(size)


def connections(seconds: float) -> type[asyncio.Protocol]:
    """The protocol of a server whose clients have `seconds` for a request, and for each share of an answer."""
    members: dict[str, Any] = {"seconds": seconds}
    return type("BoundedProtocol", (BoundedProtocol,), members)
