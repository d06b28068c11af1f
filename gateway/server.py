"""The routes, and the server that listens for them.

A call passes, in this order: the key (401), the rollout (404), the body's size (413), its JSON and
shape (400), the policy (404 for an unknown model, 400 for a request it cannot answer). A refusal is
spoken in the error envelope of the dialect.

A scripted reply is known whole before its first byte, so a stream leaves in one write. The gateway that records
calls is in recording.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway import call, scripted
from gateway.dialects import chat, messages, responses
from gateway.dialects.events import Events
from gateway.dialects.wire import dump, read_json, refusal_headers

PREFIX = "/rollouts/{rollout_id}/v1"
BODY_LIMIT = 32 * 1024 * 1024
"""Bytes of a request body; a longer one is refused without being read on."""
KEEP_ALIVE_S = 75
"""Long, so that a connection is seldom closed while a harness is about to use it again."""


class Dialect(Protocol):
    """What each module in `dialects/` offers to every gateway."""

    PATH: str

    @property
    def Stream(self) -> type[Events]: ...

    def parse(self, body: dict[str, Any]) -> call.Request: ...
    def unary(self, call: call.Call) -> dict[str, Any]: ...
    def error(self, refused: call.Refused) -> dict[str, Any]: ...


class Gateway(Protocol):
    """What answers the routes."""

    async def complete(self, http: Request, dialect: Any) -> Response: ...
    async def count_tokens(self, http: Request, dialect: Any) -> Response: ...
    async def list_models(self, http: Request, dialect: Any) -> Response: ...


class ScriptedGateway:
    """Answers the calls of the rollouts in one script book, for whoever holds the key."""

    def __init__(self, book: scripted.ScriptBook, key: str) -> None:
        self.book = book
        self.key = key.encode()

    async def complete(self, http: Request, dialect: Dialect) -> Response:
        script, request, policy = await self.admit(http, dialect)
        reply = policy(request, script)
        answered = scripted.answered(http.path_params["rollout_id"], request, reply, int(time.time()))
        if request.stream:
            return Response("".join(dialect.Stream(answered).whole()), media_type="text/event-stream")
        return json_response(dialect.unary(answered))

    async def count_tokens(self, http: Request, dialect: Dialect) -> Response:
        _, request, _ = await self.admit(http, dialect)
        return json_response({"input_tokens": scripted.measure(request.prompt)})

    async def list_models(self, http: Request, dialect: Dialect) -> Response:
        self.open(http)
        return models(scripted.POLICIES)

    async def admit(self, http: Request, dialect: Dialect) -> tuple[str | None, call.Request, scripted.Policy]:
        """The rollout's script, the parsed request and the policy it names."""
        script = self.open(http)
        request = dialect.parse(read_json(await read_body(http)))
        return script, request, scripted.policy_of(request.model)

    def open(self, http: Request) -> str | None:
        """Check the key, then find the rollout and its script."""
        if not any(hmac.compare_digest(key.encode(), self.key) for key in keys_of(headers_of(http))):
            raise call.Refused(401, "no valid API key: send it as Bearer or x-api-key", "invalid_api_key")
        return self.book.script(http.path_params["rollout_id"])


def headers_of(http: Request) -> dict[str, str]:
    """The headers by their names in lower case, the first of each. Starlette's own looks through all at every look."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(http.scope["headers"])}


def keys_of(headers: Mapping[str, str]) -> tuple[str, str, str]:
    """The keys that a request presents, empty where it has none."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    bearer = token if scheme.lower() == "bearer" else ""
    return bearer, headers.get("x-api-key", ""), headers.get("x-goog-api-key", "")


def models(names: Iterable[str]) -> Response:
    common = {"object": "model", "created": 0, "owned_by": "gateway"}
    return json_response({"object": "list", "data": [{"id": name, **common} for name in names]})


async def read_body(http: Request) -> bytes:
    """The whole body, or 413 as soon as it is known to be too long."""
    too_long = call.Refused(413, f"the body is longer than {BODY_LIMIT} bytes", "body_too_long")
    if int(http.headers.get("content-length", 0)) > BODY_LIMIT:
        raise too_long
    body = bytearray()
    async for chunk in http.stream():
        body += chunk
        if len(body) > BODY_LIMIT:
            raise too_long
    return bytes(body)


def json_response(value: dict[str, Any], status: int = 200) -> Response:
    return Response(dump(value), status, media_type="application/json")


def refusal(dialect: Dialect, refused: call.Refused) -> Response:
    response = json_response(dialect.error(refused), refused.status)
    response.headers.update(refusal_headers(refused))
    return response


Handler = Callable[[Request, Dialect], Awaitable[Response]]


def route(path: str, handler: Handler, dialect: Dialect, method: str = "POST") -> Route:
    """A route whose refusals are spoken in `dialect`."""

    async def endpoint(http: Request) -> Response:
        try:
            return await handler(http, dialect)
        except call.Refused as refused:
            return refusal(dialect, refused)
        except RecursionError:
            return refusal(dialect, call.Refused(400, "the body is nested too deeply", "invalid_json"))
        except ClientDisconnect:
            return Response(status_code=400)  # nobody is left to read it

    return Route(f"{PREFIX}/{path}", endpoint, methods=[method])


async def no_route(http: Request, error: Exception) -> Response:
    """404 and 405 of the router. The envelope is OpenAI's unless the path is of the Messages dialect."""
    assert isinstance(error, HTTPException)
    refused = call.Refused(error.status_code, f"{http.method} {http.url.path}: {error.detail}", "no_route")
    return refusal(messages if "/v1/messages" in http.url.path else responses, refused)


def application(gateway: Gateway) -> Starlette:
    dialects: tuple[Dialect, ...] = (responses, chat, messages)
    routes = [route(dialect.PATH, gateway.complete, dialect) for dialect in dialects]
    routes.append(route("messages/count_tokens", gateway.count_tokens, messages))
    routes.append(route("models", gateway.list_models, responses, "GET"))
    app = Starlette(routes=routes, exception_handlers={HTTPException: no_route})
    app.router.redirect_slashes = False
    return app


class Connection(HttpToolsProtocol):
    """uvicorn's protocol, which tells the application its transport: only that knows what was really written."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"]["transport"] = self.transport


class Server(uvicorn.Server):
    """uvicorn without its signal handling, which waits for open connections and raises the signal again."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(apps: list[tuple[Starlette, socket.socket]], exit_with_stdin: bool) -> None:
    """Serve until SIGINT, SIGTERM or, if asked, the end of standard input; then drop what is open."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    if exit_with_stdin:
        # A thread, because an event loop cannot wait for every kind of file.
        threading.Thread(target=watch_stdin, args=(loop, stop), daemon=True).start()
    serving = [asyncio.create_task(Server(config_of(app)).serve(sockets=[listener])) for app, listener in apps]
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({*serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    for task in serving:
        if task.done():
            task.result()  # it never ends by itself but with an error
        task.cancel()


def config_of(app: Starlette) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=Connection,
        lifespan="off",
        ws="none",
        proxy_headers=False,
        server_header=False,
        access_log=False,
        log_config=None,
        log_level="warning",
        timeout_keep_alive=KEEP_ALIVE_S,
    )


def watch_stdin(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 65536):
            pass
    with contextlib.suppress(RuntimeError):  # the loop is already closed
        loop.call_soon_threadsafe(stop.set)
