"""The last step to the harness: wait for the reply, keep the connection alive, write, and know what was written.

In live mode the reply is written while the engine writes it, but for what ends it (streaming.py).

Invariant: a call is noted as delivered if and only if its terminal event, or its whole unary body, was handed to the
kernel on a connection that still stood. A stream that breaks never ends with a normal terminal event.

uvicorn drops writes to a lost connection without an error, so this asks the transport itself (server.py puts it into
the request's state).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import Iterator
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.call import Call, Piece, Refused, Reply, Usage
from gateway.calls import Calls, Dialect, Exchange
from gateway.dialects.events import Events
from gateway.dialects.wire import dump, refusal_headers

KEEPALIVE_SECONDS = 10.0
LOST_SECONDS = 1.0
KEEPALIVE = b": keepalive\n\n"


class Delivery(Response):
    """The answer to one client of an exchange."""

    def __init__(self, calls: Calls, exchange: Exchange, dialect: Dialect, stream: bool) -> None:
        self.calls = calls
        self.exchange = exchange
        self.dialect = dialect
        self.stream = stream
        self.feed = exchange.feed
        self.events: Events | None = None
        """Of a reply that is passed on while the engine writes it."""
        self.passed = 0
        """How many pieces of it."""
        self.begun = False
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.send, self.transport = send, scope["state"]["transport"]
        # So that a write goes to the kernel at once, and what it did not take can be waited for.
        self.transport.set_write_buffer_limits(high=0)
        self.gone = asyncio.create_task(hung_up(receive))
        try:
            if not await self.waited():
                return
            outcome = reply_or_refusal(self.exchange)
            if isinstance(outcome, Refused):
                await self.refuse(outcome)
            elif await self.write(outcome):
                self.calls.deliver(self.exchange)
                return
        finally:
            if not self.exchange.delivered:
                self.calls.leave(self.exchange)
            if self.lost:  # uvicorn is told a moment later than the transport, and would complain of half a reply
                await asyncio.wait({self.gone}, timeout=LOST_SECONDS)
            self.gone.cancel()

    @property
    def lost(self) -> bool:
        return self.gone.done() or bool(self.transport.is_closing())

    async def waited(self) -> bool:
        """True once the call is over; False if the client hung up first. A silent stream gets comments meanwhile."""
        task = self.exchange.task
        while not task.done() and not self.lost:
            if await self.pass_on():
                continue
            waiting: set[asyncio.Future[Any]] = {task, self.gone, *([self.feed.change()] if self.feed else ())}
            done, _ = await asyncio.wait(waiting, timeout=KEEPALIVE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if not done and self.stream:
                await self.begin(200, b"text/event-stream")
                await self.put(KEEPALIVE)
        return not self.lost

    async def pass_on(self) -> bool:
        """Write what is new of a reply that has begun; whether there was anything."""
        feed, written = self.feed, list[str]()
        if feed is None or feed.input_tokens is None:
            return False
        if self.events is None:
            self.events = self.dialect.Stream(self.exchange.call(Reply(), Usage(feed.input_tokens, 0)))
            written += self.events.begun()
        written += self.pieces(self.events, feed.pieces[self.passed : feed.shown])
        self.passed = feed.shown
        if not written:
            return False
        await self.begin(200, b"text/event-stream")
        await self.put("".join(written).encode())
        return True

    @staticmethod
    def pieces(events: Events, pieces: list[Piece]) -> Iterator[str]:
        return itertools.chain.from_iterable(map(events.feed, pieces))

    async def write(self, call: Call) -> bool:
        """Whether the reply was written to its last byte."""
        if self.begun:
            *events, terminal = self.rest(call)
            await self.put("".join(events).encode())
            return await self.last(terminal.encode())
        # All of it is here: one packet with a length wakes the client once, and costs both sides less than chunks.
        text = "".join(self.rest(call)) if self.stream else dump(self.dialect.unary(call))
        data, kind = text.encode(), b"text/event-stream" if self.stream else b"application/json"
        with corked(self.transport):
            await self.begin(200, kind, (b"content-length", str(len(data)).encode()))
            return await self.last(data)

    def rest(self, call: Call) -> Iterator[str]:
        if self.events is None or self.feed is None:
            return self.dialect.Stream(call).whole()
        return itertools.chain(self.pieces(self.events, self.feed.pieces[self.passed :]), self.events.end(call))

    async def refuse(self, refused: Refused) -> None:
        if self.begun:
            events = self.events or self.dialect.Stream(self.exchange.call(Reply(), Usage(0, 0)))
            await self.last("".join(events.failed(refused)).encode())
            return
        data = dump(self.dialect.error(refused)).encode()
        headers = refusal_headers(refused).items()
        extra = [(name.encode(), value.encode()) for name, value in headers]
        length = (b"content-length", str(len(data)).encode())
        await self.begin(refused.status, b"application/json", length, *extra)
        await self.last(data)

    async def begin(self, status: int, kind: bytes, *headers: tuple[bytes, bytes]) -> None:
        if not self.begun:
            self.begun = True
            start = {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind), *headers]}
            await self.send(start)

    async def put(self, data: bytes, more: bool = True) -> None:
        await self.send({"type": "http.response.body", "body": data, "more_body": more})

    async def last(self, data: bytes) -> bool:
        """Write the last bytes; whether all of them went out before the connection was lost."""
        await self.put(b"")  # waits until everything before is with the kernel
        if self.lost:
            return False
        await self.put(data)
        written = not self.lost and self.transport.get_write_buffer_size() == 0
        await self.put(b"", more=False)  # waits likewise
        return written or not self.lost


@contextlib.contextmanager
def corked(transport: Any) -> Iterator[None]:
    """What is written meanwhile leaves in full packets, the last one at the end. Linux has that; others send more."""
    if not hasattr(socket, "TCP_CORK"):
        yield
        return
    connection = transport.get_extra_info("socket")
    if not transport.is_closing():
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
    try:
        yield
    finally:
        if not transport.is_closing():
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 0)


async def hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def reply_or_refusal(exchange: Exchange) -> Any:
    """The call, or why there is none."""
    if exchange.task.cancelled():
        return Refused(502, f"the call was given up: {exchange.cancelled_because}", "cancelled")
    error = exchange.task.exception()
    if error is None:
        return exchange.task.result()
    return error if isinstance(error, Refused) else Refused(500, "the gateway failed; its log says how", "internal")
