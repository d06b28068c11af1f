"""A proxy between a CLI and the gateway: it keeps what came over the wire, and can drop one reply.

It speaks just enough HTTP/1.1: requests with a length, one per connection. What it drops is chosen by `Drop`; the
gateway sees the break, because so little of the reply fits between the two that the rest was still to be written.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from conftest import until
from engine import Engine

Doc = dict[str, Any]
NARROW = ((socket.SOL_SOCKET, socket.SO_RCVBUF, 2048), (socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536))
"""A connection that holds some 50 kB that nobody has read; on an ordinary one of loopback it is megabytes."""
CALL_ID = re.compile(rb"(?:chatcmpl-|msg_|resp_)([0-9a-f]{24})")


@dataclass
class Asked:
    """A request, and what became of it."""

    path: str
    """Below the base URL of the rollout."""
    headers: dict[str, str]
    body: Doc
    status: int = 0
    call_id: str = ""
    dropped: str = ""
    """The `after` of the `Drop` that befell its reply."""


@dataclass(frozen=True)
class Drop:
    """The first reply to a request with (or without) tools breaks."""

    after: str
    """`connection`: while the engine works; else the pattern of the last event that comes through."""
    tools: bool = True

    def length(self, seen: bytes) -> int | None:
        """How much of a reply comes through; None while that is not there yet."""
        end = 0
        while (end := seen.find(b"\n\n", end) + 2) > 1:
            if re.search(self.after.encode(), seen[:end]):
                return end
        return None


@dataclass
class Wire:
    url: str
    """The base URL that the CLI is given."""
    target: tuple[str, int]
    engine: Engine
    drop: Drop | None = None
    read: Callable[[], bool] = lambda: True
    """Whether the CLI has read what came through: only then the connection breaks."""
    clients: Callable[[], int] = lambda: 0
    """How many connections the gateway has whose calls are under way."""
    open: int = 0
    asked: list[Asked] = field(default_factory=list)

    def serve(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                threading.Thread(target=self.connection, args=(client,), daemon=True).start()

    def connection(self, client: socket.socket) -> None:
        drop = None
        with client, socket.socket() as server, contextlib.suppress(OSError):
            head, data = request_of(client)
            if not head:
                return
            one = asked_of(head, data)
            drop = self.chosen(one)
            self.asked.append(one)
            for option in NARROW if drop else ():
                server.setsockopt(*option)
            self.open += 1
            server.connect(self.target)
            server.sendall(re.sub(rb"(?im)^connection: .*\r\n", b"", head)[:-2] + b"connection: close\r\n\r\n" + data)
            if drop is None:
                self.pass_on(one, server, client)
            elif drop.after == "connection":
                until(lambda: any(served.body.get("tools") for served in self.engine.served))
            else:
                self.pass_on_until(drop, one, server, client)
        self.open -= 1
        if drop and drop.after == "connection":
            until(lambda: self.clients() <= self.open)  # the gateway knows
            self.engine.held.set()

    def chosen(self, one: Asked) -> Drop | None:
        drop = self.drop
        if drop is None or drop.tools != bool(one.body.get("tools")):
            return None
        self.drop, one.dropped = None, drop.after
        return drop

    def pass_on(self, one: Asked, server: socket.socket, client: socket.socket) -> None:
        seen = b""
        while data := server.recv(1 << 16):
            seen = note(one, seen + data) if len(seen) < 4096 else seen
            client.sendall(data)

    def pass_on_until(self, drop: Drop, one: Asked, server: socket.socket, client: socket.socket) -> None:
        seen = b""
        while (length := drop.length(seen)) is None:
            if not (data := server.recv(2048)):
                return
            seen += data
        note(one, seen)
        client.sendall(seen[:length])
        until(self.read)


def note(one: Asked, seen: bytes) -> bytes:
    """Takes status and call id from the beginning of a reply."""
    one.status = int(seen[9:12] or 0)
    if found := CALL_ID.search(seen):
        one.call_id = found[1].decode()
    return seen


def request_of(client: socket.socket) -> tuple[bytes, bytes]:
    """(head, body); empty when the client closed a connection that it did not use."""
    data = b""
    while b"\r\n\r\n" not in data:
        if not (got := client.recv(1 << 16)):
            return b"", b""
        data += got
    head, _, body = data.partition(b"\r\n\r\n")
    found = re.search(rb"(?im)^content-length: *(\d+)", head)
    length = int(found[1]) if found else 0
    while len(body) < length and (got := client.recv(1 << 16)):
        body += got
    return head + b"\r\n\r\n", body


def asked_of(head: bytes, data: bytes) -> Asked:
    first, *lines = head.decode("latin-1").strip().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    path = re.sub(r"^/rollouts/[^/]+/v1", "", first.split(" ")[1])
    return Asked(path, headers, json.loads(data) if data else {})


@contextlib.contextmanager
def wire(url: str, engine: Engine, drop: Drop | None = None) -> Iterator[Wire]:
    """A proxy before the base URL `url`."""
    host, port = url.split("/")[2].split(":")
    with socket.create_server(("127.0.0.1", 0), backlog=50) as listener:
        own = url.replace(f":{port}", f":{listener.getsockname()[1]}")
        made = Wire(own, (host, int(port)), engine, drop)
        threading.Thread(target=made.serve, args=(listener,), daemon=True).start()
        if drop and drop.after == "connection":
            engine.held.clear()
        yield made
        engine.held.set()
