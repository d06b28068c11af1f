"""The door: the only way out of a sandbox, from its loopback to one model endpoint.

Core accepts the connections of the sandbox's own loopback from outside (`sandbox/launcher.py` opened the listener), so
nothing of ours runs inside. A request passes when it is a POST to a model path of the session's protocol, in origin
form, for the door's own host, with the session's placeholder key. The real key is put on here; redirects are not
followed; bodies and streams pass through byte for byte, but for the key if the endpoint repeats it. Anything else is
refused unsent. Connections and the bytes held for them are bounded: the agent has all the time and wit to open more.

Every call is recorded: status, tokens as the provider reported them, and what went wrong. `failures` turns the last
failure into the error of a turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import h11
import httpx

from core.budget import Budget, Ceilings
from core.proxy import Network, TunnelRefused, open_tunnel, pump
from core.sandbox.launcher import DOOR_HOST, DOOR_PORT
from core.waiting import within
from core.wire import Bundle

BODY_BYTES = 32 << 20
DOOR_BYTES = 2 * BODY_BYTES  # of request bodies held at a time, over all connections of a door
MAX_CONNECTIONS = 64  # per door
MASKED_KEY_BYTES = 12  # a shorter key is a placeholder ("EMPTY"), and such a word may stand in any answer
KEPT_BYTES = 4 << 20  # of an answer, to find its usage and its error
IDLE_SECONDS = 600.0
CONNECT_SECONDS = 10.0
READ_SECONDS = 600.0
CHUNK_BYTES = 1 << 16

DOOR_URL = f"http://{DOOR_HOST}:{DOOR_PORT}"
PATHS = {
    "responses": ("/v1/responses",),
    "chat_completions": ("/v1/chat/completions",),
    "anthropic": ("/v1/messages", "/v1/messages/count_tokens"),
}
# Labels of harnesses pass: a gateway behind the door reads them. Auth, cookies and forwarding headers do not.
HOP_HEADERS = {"host", "connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "expect"}
OWN_HEADERS = {"content-length", "accept-encoding"}
SECRET_HEADERS = {"authorization", "x-api-key", "x-goog-api-key", "api-key", "cookie", "forwarded", "via"}
DROPPED_REQUEST_HEADERS = HOP_HEADERS | OWN_HEADERS | SECRET_HEADERS
DROPPED_REQUEST_PREFIXES = ("x-forwarded-", "x-real-", "cf-", "proxy-")
# What ends a stream of each protocol. One that lacks it broke off, however orderly its connection closed.
LAST_EVENTS = {
    "responses": (b'"response.completed"', b'"response.incomplete"', b'"response.failed"'),
    "chat_completions": (b"[DONE]",),
    "anthropic": (b'"message_stop"',),
}
NOTED = (b'"usage"', b'"error"', b'"incomplete_details"', b'"stop_reason"')
STOPPED_AT_LIMIT = {
    "max_output_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "model_context_window_exceeded": "context_length_exceeded",
}
PASSED_ANSWER_HEADERS = frozenset(
    {"content-type", "retry-after", "retry-after-ms", "x-should-retry", "request-id", "x-request-id"}
)


@dataclass
class Call:
    """One request of the harness to its model. Tokens are None when the provider did not report them."""

    path: str
    started_ns: int
    status: int | None = None
    passed_bytes: int = 0  # of the request's and the answer's body
    # "unreachable", "timeout", "cut", "malformed": the answer never came, broke off, or is none of a model
    problem: str | None = None
    error_code: str | None = None
    error_message: str | None = None
    usage: dict[str, Any] | None = None
    ended_ns: int | None = None

    @property
    def counted(self) -> bool:
        """Whether it reached the model and so belongs into the usage."""
        return self.status == 200 and not self.path.endswith("count_tokens")

    @property
    def failed(self) -> bool:
        return (
            self.problem is not None or (self.status is not None and self.status >= 300) or self.error_code is not None
        )


def call_usage(protocol: str, reported: Any) -> dict[str, Any] | None:
    """A provider's usage object in the API's shape; None when it lacks the totals (AGENTS_API 10.1)."""
    if not isinstance(reported, dict):
        return None
    names = (
        ("prompt_tokens", "completion_tokens") if protocol == "chat_completions" else ("input_tokens", "output_tokens")
    )
    source, output = count(reported, names[0]), count(reported, names[1])
    if source is None or output is None:
        return None
    if protocol == "anthropic":
        cached = count(reported, "cache_read_input_tokens") or 0
        source += cached + (count(reported, "cache_creation_input_tokens") or 0)
        reasoning = 0
    else:
        kind = "prompt" if protocol == "chat_completions" else "input"
        cached = count(reported.get(f"{kind}_tokens_details"), "cached_tokens") or 0
        other = "completion" if protocol == "chat_completions" else "output"
        reasoning = count(reported.get(f"{other}_tokens_details"), "reasoning_tokens") or 0
    return usage_shape(source, cached, output, reasoning)


def usage_shape(source: int, cached: int, output: int, reasoning: int) -> dict[str, Any]:
    return {
        "input_tokens": source,
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": source + output,
    }


def count(holder: Any, name: str) -> int | None:
    value = holder.get(name) if isinstance(holder, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def sum_usage(usages: list[dict[str, Any]]) -> dict[str, Any]:
    return usage_shape(
        sum(usage["input_tokens"] for usage in usages),
        sum(usage["input_tokens_details"]["cached_tokens"] for usage in usages),
        sum(usage["output_tokens"] for usage in usages),
        sum(usage["output_tokens_details"]["reasoning_tokens"] for usage in usages),
    )


class Observer:
    """Reads a passing answer for its usage and its error; keeps at most KEPT_BYTES of it at a time."""

    def __init__(self, protocol: str, call: Call, streamed: bool) -> None:
        self.protocol = protocol
        self.call = call
        self.streamed = streamed
        self.buffer = bytearray()
        self.merged: dict[str, Any] = {}
        self.begun = False
        self.ended = False

    def feed(self, chunk: bytes) -> None:
        self.buffer += chunk
        if self.streamed:
            *lines, rest = bytes(self.buffer).split(b"\n")
            self.buffer = bytearray(rest)
            for line in lines:
                if line.startswith(b"data:"):
                    self.begun = True
                    self.ended = self.ended or any(mark in line for mark in LAST_EVENTS[self.protocol])
                    if any(mark in line for mark in NOTED):
                        self.event(line[5:])
        if len(self.buffer) > KEPT_BYTES:
            self.buffer.clear()

    def end(self) -> None:
        """The answer came to the end of its body. What broke off before has no usage: half of one is none."""
        if not self.streamed:
            self.ended = self.event(bytes(self.buffer))
        if self.ended and self.merged:
            self.call.usage = call_usage(self.protocol, self.merged)
        if not self.ended and not self.call.failed:
            self.call.problem = "cut" if self.begun else "malformed"

    def event(self, data: bytes) -> bool:
        """One SSE payload or a whole body. Anthropic reports input first and output last, so later values win."""
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            return False
        if not isinstance(value, dict):
            return False
        for holder in (value, value.get("response"), value.get("message")):
            if isinstance(holder, dict):
                if isinstance(holder.get("usage"), dict):
                    self.merged |= {name: part for name, part in holder["usage"].items() if part is not None}
                self.note_error(holder.get("error"))
                self.note_stop(holder.get("incomplete_details"), "reason")
        self.note_stop(value.get("delta") if self.streamed else value, "stop_reason")
        return True

    def note_stop(self, holder: Any, name: str) -> None:
        if isinstance(holder, dict) and (code := STOPPED_AT_LIMIT.get(str(holder.get(name)))):
            self.call.error_code = code
            self.call.error_message = "the model stopped at its token limit"

    def note_error(self, error: Any) -> None:
        if isinstance(error, dict):
            self.call.error_code = str(error.get("code") or error.get("type") or "error")
            self.call.error_message = str(error.get("message") or "")[:500]


@dataclass
class Door:
    """One session's door. `key` is the placeholder that the sandbox holds instead of the real key."""

    bundle: Bundle | None
    client: httpx.AsyncClient
    key: str = field(default_factory=lambda: f"sandbox-{secrets.token_hex(16)}")
    network: Network = field(default_factory=lambda: Network("disabled"))
    budget: Budget = field(default_factory=lambda: Budget(Ceilings()))
    on_call: Callable[[Call], None] = lambda call: None  # told of each call that has ended
    calls: list[Call] = field(default_factory=list)
    held: int = 0  # bytes of request bodies in memory

    def begin_turn(self) -> None:
        self.calls = []

    def usage(self) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """(usage, what was observed): the first is None unless every counted call of the turn reported its own."""
        counted = [call for call in self.calls if call.counted]
        known = [call.usage for call in counted if call.usage is not None]
        observed = sum_usage(known) if known else None
        return (observed if counted and len(known) == len(counted) else None), observed

    @contextlib.asynccontextmanager
    async def open(self, listener: socket.socket) -> AsyncIterator[None]:
        """Serves the sandbox's listener; on leaving, all its connections are closed."""
        tasks: set[asyncio.Task[None]] = set()

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if len(tasks) >= MAX_CONNECTIONS:
                writer.transport.abort()
                return
            task = asyncio.create_task(Connection(self, reader, writer).serve())
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        server = await asyncio.start_server(connected, sock=listener)
        try:
            yield
        finally:
            server.close()
            for task in list(tasks):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def refusal(self, request: h11.Request) -> tuple[int, str] | None:
        """Why a request may not pass, or None. The same words whatever lies behind the door."""
        headers = dict(request.headers)
        if self.bundle is None:
            return 403, "This sandbox has no model endpoint."
        path, _, query = request.target.partition(b"?")
        if request.method != b"POST" or path.decode("latin-1") not in PATHS[self.bundle.protocol]:
            return 404, "Not a model path of this endpoint."
        if query not in (b"", b"beta=true"):
            return 404, "Not a model path of this endpoint."
        if headers.get(b"host") not in (
            f"{DOOR_HOST}:{DOOR_PORT}".encode(),
            f"localhost:{DOOR_PORT}".encode(),
        ):
            return 404, "Not a model path of this endpoint."
        offered = headers.get(b"x-api-key") or headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        if not hmac.compare_digest(offered, self.key.encode()):
            return 401, "The key is not this session's."
        return None

    def counts(self, request: h11.Request) -> bool:
        """Whether ceilings hold for a request: counting tokens is no call."""
        return not request.target.partition(b"?")[0].endswith(b"/count_tokens")

    def upstream_url(self, target: bytes) -> str:
        """Where a path of the door leads (AGENTS_API 11.3)."""
        assert self.bundle is not None
        base = self.bundle.base_url.rstrip("/")
        path = target.decode("latin-1").removeprefix("/v1")
        if self.bundle.protocol == "anthropic" and not base.endswith("/v1"):
            return f"{base}/v1{path}"
        return base + path

    def upstream_headers(self, request: h11.Request) -> list[tuple[bytes, bytes]]:
        assert self.bundle is not None
        passed = [
            (name, value)
            for name, value in request.headers
            if (text := name.decode("latin-1")) not in DROPPED_REQUEST_HEADERS
            and not text.startswith(DROPPED_REQUEST_PREFIXES)
        ]
        key = self.bundle.api_key.encode()
        auth = (b"x-api-key", key) if self.bundle.protocol == "anthropic" else (b"authorization", b"Bearer " + key)
        # An encoded answer could not be counted; the harness accepts a plain one.
        return [*passed, auth, (b"accept-encoding", b"identity")]

    def mask(self, text: str) -> str:
        secret = self.bundle.api_key if self.bundle else ""
        return text.replace(secret, "[key]") if len(secret) >= MASKED_KEY_BYTES else text


class Mask:
    """Takes the key out of an answer, also where chunks split it. All other bytes pass, at once unless they may
    be the beginning of the key."""

    def __init__(self, key: str) -> None:
        self.key = key.encode()
        self.held = b""

    def feed(self, chunk: bytes) -> bytes:
        if len(self.key) < MASKED_KEY_BYTES:
            return chunk
        data = (self.held + chunk).replace(self.key, b"[key]")
        longest = min(len(self.key) - 1, len(data))
        keep = next((size for size in range(longest, 0, -1) if data.endswith(self.key[:size])), 0)
        self.held = data[len(data) - keep :]
        return data[: len(data) - keep]


class Connection:
    """One connection from the sandbox: HTTP/1.1 by h11, one request after the other."""

    def __init__(self, door: Door, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.door = door
        self.reader = reader
        self.writer = writer
        self.http = h11.Connection(h11.SERVER)

    async def serve(self) -> None:
        try:
            while await self.one():
                self.http.start_next_cycle()
        except (h11.ProtocolError, ConnectionError, asyncio.TimeoutError):
            pass
        finally:
            self.writer.close()

    async def event(self) -> Any:
        while (event := self.http.next_event()) is h11.NEED_DATA:
            self.http.receive_data(await within(IDLE_SECONDS, self.reader.read(CHUNK_BYTES)))
        return event

    async def one(self) -> bool:
        """Serves one request; False when the connection is over."""
        request = await self.event()
        if not isinstance(request, h11.Request):
            return False
        if request.method == b"CONNECT" and self.door.network.access != "disabled":
            return await self.tunnel(request)
        refused = self.door.refusal(request)
        if self.http.they_are_waiting_for_100_continue and not refused:
            await self.send(h11.InformationalResponse(status_code=100, headers=[]))
        body, size = bytearray(), 0
        try:
            while isinstance(event := await self.event(), h11.Data):
                size += len(event.data)
                if not refused:
                    body += event.data
                    self.door.held += len(event.data)
                if size > BODY_BYTES or self.door.held > DOOR_BYTES:
                    await self.answer_error(413, f"A request is at most {BODY_BYTES} bytes.")
                    return False
            if not refused and self.door.counts(request) and (spent := self.door.budget.check()):
                refused = 400, spent.message
            if refused:
                await self.answer_error(*refused)
            else:
                await self.forward(request, bytes(body))
        finally:
            self.door.held -= len(body)
        return self.http.our_state is h11.DONE and self.http.their_state is h11.DONE

    async def send(self, event: Any) -> None:
        data = self.http.send(event)
        if data:
            self.writer.write(data)
            await self.writer.drain()

    async def answer_error(self, status: int, message: str) -> None:
        """An error in the envelope that both dialects share: type and message under `error`."""
        kinds = {
            401: "authentication_error",
            403: "permission_error",
            404: "not_found_error",
            413: "request_too_large",
        }
        error = {"type": kinds.get(status, "api_error"), "message": message, "code": None, "param": None}
        body = json.dumps({"type": "error", "error": error}).encode()
        fields = [("content-type", "application/json"), ("content-length", str(len(body)))]
        await self.send(h11.Response(status_code=status, headers=fields))
        await self.send(h11.Data(data=body))
        await self.send(h11.EndOfMessage())

    async def tunnel(self, request: h11.Request) -> bool:
        """A CONNECT of a sandbox with network: its connection ends with the tunnel."""
        try:
            reader, writer = await open_tunnel(self.door.network, request.target)
        except TunnelRefused as refused:
            await self.answer_error(refused.status, str(refused))
            return False
        try:
            await self.event()  # the end of a request without a body
            await self.send(h11.Response(status_code=200, headers=[]))
            rest, _ = self.http.trailing_data
            writer.write(rest)
            directions = (pump(self.reader, writer), pump(reader, self.writer))
            await asyncio.gather(*directions)
        finally:
            writer.close()
        return False

    async def forward(self, request: h11.Request, body: bytes) -> None:
        call = Call(request.target.partition(b"?")[0].decode("latin-1"), time.time_ns(), passed_bytes=len(body))
        self.door.calls.append(call)
        url = self.door.upstream_url(request.target)
        begun = broken = False
        try:
            headers = self.door.upstream_headers(request)
            async with self.door.client.stream("POST", url, content=body, headers=headers) as answer:
                call.status = answer.status_code
                begun = True
                await self.relay(answer, call)
        except httpx.TimeoutException:
            broken, call.problem = True, "cut" if begun else "timeout"
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            broken, call.problem = True, "cut" if begun else "unreachable"
            call.error_message = self.door.mask(f"{type(error).__name__}: {error}")[:500]
        finally:
            call.ended_ns = time.time_ns()
            if call.counted:
                self.door.budget.add(call.usage, call.passed_bytes)
            self.door.on_call(call)
        if broken and not begun:
            await self.answer_error(504 if call.problem == "timeout" else 502, "The model endpoint did not answer.")
        elif broken:
            raise ConnectionError("the model's answer broke off")

    async def relay(self, answer: httpx.Response, call: Call) -> None:
        """Passes the answer on as it comes. What the sandbox sees of it: status, few headers, the bytes."""
        assert self.door.bundle is not None
        kind = answer.headers.get("content-type", "")
        observer = Observer(self.door.bundle.protocol, call, kind.startswith("text/event-stream"))
        mask = Mask(self.door.bundle.api_key)
        # A redirect would tell the sandbox another address and is of no use to it.
        status = 502 if 300 <= answer.status_code < 400 else answer.status_code
        passed = [(name, value) for name, value in answer.headers.items() if name in PASSED_ANSWER_HEADERS]
        fields = [(name, self.door.mask(value)) for name, value in passed]
        await self.send(h11.Response(status_code=status, headers=[*fields, ("transfer-encoding", "chunked")]))
        # An endpoint that refuses may repeat the key it was sent: nothing of the answer may carry it in.
        async for chunk in answer.aiter_bytes():
            call.passed_bytes += len(chunk)
            await self.pass_on(mask.feed(chunk), observer)
        await self.pass_on(mask.held, observer)
        observer.end()
        await self.send(h11.EndOfMessage())

    async def pass_on(self, chunk: bytes, observer: Observer) -> None:
        if chunk:
            observer.feed(chunk)
            await self.send(h11.Data(data=chunk))


def new_client() -> httpx.AsyncClient:
    """The client for all doors: no proxy or netrc of the host, no redirects."""
    timeout = httpx.Timeout(READ_SECONDS, connect=CONNECT_SECONDS, pool=None)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    return httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False, follow_redirects=False)
