"""The HTTP face: authentication, routes, error envelopes, event streams. Thin: it parses, calls, answers.

Checks come in the order of AGENTS_API 2.1: authentication, beta header, route, size, body or query, lookup. Routing is
done on the raw path, split on `/` before it is decoded, so that `a%2Fb` is one id.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, BinaryIO
from urllib.parse import unquote

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from core.errors import ApiError, bad_request, not_found, storage_unavailable, unavailable
from core.sessions import CREATE_SCOPE, Sessions
from core.store import Page, StorageFailed, UnknownCursor, dumps
from core.traces import trace_document
from core.wire import (
    BODY_BYTES,
    CREATE_BODY_BYTES,
    Doc,
    Paging,
    Query,
    parse_events,
    parse_object,
    parse_session_create,
    parse_session_update,
)

KEEPALIVE_SECONDS = 15.0
MAX_STREAMS = 512  # event streams at a time
EVENTS_PER_READ, BYTES_PER_READ = 256, 4 << 20
LAG_EVENTS, LAG_BYTES = 256, 64 << 20
LAG_SECONDS = 1.0  # a reader that takes in what is there sooner does not lag, however much is there
KEY_HEADER_BYTES = 128
SMALL_BYTES = CHUNK_BYTES = 1 << 20
PREFIX = "agent.session."
log = logging.getLogger("core")

Handler = Callable[["Api", Request, list[str]], Awaitable[Response]]

# What the API has and this server does not serve (priorities C and D of AGENTS_API 14): path → what to use instead.
ID = "*"
UNSERVED: dict[tuple[str, ...], str] = {
    ("agents", "sessions", ID, "subagents"): "Harnesses run here without subagents.",
    ("agents", "environments", ID, "files"): "Send files in 'environment.files' of the session instead.",
    ("agents", "environments"): "Send 'environment' with each session instead.",
    ("agents", "automations"): "Create sessions when they are due instead.",
    ("agents",): "Send 'agent' with each session instead.",
    ("vaults",): "Send what the agent may know in 'environment.env' of the session instead.",
    ("files",): "Send inline files in 'environment.files' of the session instead.",
    ("skills",): "Send inline files in 'environment.files' of the session instead.",
}


class Json(JSONResponse):
    """Escapes what is not ASCII: a CLI may print half a surrogate pair, which has no UTF-8 form."""

    def render(self, content: Any) -> bytes:
        return dumps(content).encode()


class Api:
    """An ASGI application."""

    def __init__(self, sessions: Sessions, key: str) -> None:
        self.sessions = sessions
        self.key = key.encode()
        self.streams = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        started = time.perf_counter()
        request, request_id = Request(scope, receive), f"req_{uuid.uuid4().hex}"

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                elapsed = round((time.perf_counter() - started) * 1000)
                message["headers"] += [
                    (b"x-request-id", request_id.encode()),
                    (b"openai-version", b"2020-10-01"),
                    (b"openai-processing-ms", str(elapsed).encode()),
                    (b"x-content-type-options", b"nosniff"),
                    (b"cache-control", b"no-store"),
                ]
            await send(message)

        response = await self.answer(request, request_id)
        await response(scope, receive, send_with_headers)

    async def answer(self, request: Request, request_id: str) -> Response:
        try:
            return await self.dispatch(request)
        except ApiError as error:
            return Json(error.body, error.status, headers=error.headers)
        except StorageFailed as failed:
            refused = storage_unavailable(f"The server cannot store anything: {failed}.")
            return Json(refused.body, refused.status, headers=refused.headers)
        except ClientDisconnect:
            return Response(status_code=400)  # nobody reads it
        except Exception:
            log.exception("request %s failed", request_id)
            message = f"The server failed; its log has the details under {request_id}."
            body = {"error": {"type": "server_error", "message": message, "code": "internal_error", "param": None}}
            return Json(body, 500)

    async def dispatch(self, request: Request) -> Response:
        self.authenticate(request)
        segments = path_segments(request)
        if segments[:1] in (["agents"], ["vaults"]):
            check_beta(request)
        for pattern, handlers in ROUTES.items():
            ids = matched(pattern, segments)
            if ids is not None:
                handler = handlers.get(request.method)
                if handler is None:
                    raise not_served(segments, request.method, list(handlers))
                return await handler(self, request, ids)
        raise not_served(segments, request.method, None)

    def authenticate(self, request: Request) -> None:
        offered = request.headers.get("authorization", "")
        scheme, _, key = offered.partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(key.encode("latin-1", "replace"), self.key):
            message = "A valid Agents API bearer key is required."
            raise ApiError(401, "invalid_request_error", None, message, headers={"WWW-Authenticate": "Bearer"})

    # ── sessions ──────────────────────────────────────────────────────────────────────────────────

    async def create_session(self, request: Request, ids: list[str]) -> Response:
        body = parse_object(await read_body(request, CREATE_BODY_BYTES))
        key, digest = idempotency_key(request), self.sessions.digest(body)
        parsed = parse_session_create(body)
        if parsed.stream:
            self.check_streams()
        session_id = self.sessions.replayed(CREATE_SCOPE, key, digest)
        if session_id is None:
            session_id = self.sessions.create(parsed, key, digest)
        if parsed.stream:
            return EventStream(self, self.events(session_id, 0, until_settled=True), 201)
        return Json(self.sessions.document(session_id), 201)

    async def list_sessions(self, request: Request, ids: list[str]) -> Response:
        query = Query(request.scope["query_string"])
        metadata, agent_id = query.metadata(), query.one("agent_id")
        paging = query.paging(clamp=True)
        page = self.page(
            lambda: self.sessions.store.session_page(
                metadata,
                agent_id,
                limit=paging.limit,
                descending=paging.descending,
                after=paging.after,
            ),
            not_found(),
        )
        return list_response(Page([self.sessions.shown(stored) for stored in page.data], page.has_more))

    async def retrieve_session(self, request: Request, ids: list[str]) -> Response:
        return Json(self.sessions.document(ids[0]))

    async def update_session(self, request: Request, ids: list[str]) -> Response:
        metadata = parse_session_update(parse_object(await read_body(request, BODY_BYTES)))
        return Json(self.sessions.set_metadata(ids[0], metadata))

    async def delete_session(self, request: Request, ids: list[str]) -> Response:
        cancel = Query(request.scope["query_string"]).one("cancel") == "true"
        await self.sessions.delete(ids[0], cancel=cancel)
        return Json({"id": ids[0], "object": "agent.session.deleted", "deleted": True})

    # ── turns, items, artifacts ───────────────────────────────────────────────────────────────────

    async def list_turns(self, request: Request, ids: list[str]) -> Response:
        return self.list_of("turns", request, ids[0], {"session_id": ids[0]}, not_found())

    async def retrieve_turn(self, request: Request, ids: list[str]) -> Response:
        return Json(self.element("turns", ids))

    async def list_traces(self, request: Request, ids: list[str]) -> Response:
        paging = Query(request.scope["query_string"]).paging(clamp=False)
        self.sessions.require(ids[0])
        page = self.page(lambda: self.rows("turns", {"session_id": ids[0]}, paging), not_found())
        traces = [trace_document(turn, self.sessions.store.spans(turn["id"])) for turn in page.data]
        return list_response(Page(traces, page.has_more))

    async def list_turn_items(self, request: Request, ids: list[str]) -> Response:
        query = Query(request.scope["query_string"])
        query.paging(clamp=True)
        self.element("turns", ids)
        return self.list_of("items", request, ids[0], {"turn_id": ids[1]}, bad_request(INVALID_ITEM), clamp=True)

    async def list_items(self, request: Request, ids: list[str]) -> Response:
        return self.list_of("items", request, ids[0], {"session_id": ids[0]}, bad_request(INVALID_ITEM), clamp=True)

    async def list_artifacts(self, request: Request, ids: list[str]) -> Response:
        query = Query(request.scope["query_string"])
        environment = query.one("environment_id")
        query.paging(clamp=False)
        if environment not in (None, self.sessions.require(ids[0])["environment"]["id"]):
            return list_response(Page([], False))
        cursor_error = bad_request("after is not a valid artifact ID")
        return self.list_of("artifacts", request, ids[0], {"session_id": ids[0]}, cursor_error)

    async def retrieve_artifact(self, request: Request, ids: list[str]) -> Response:
        return Json(self.element("artifacts", ids))

    async def delete_artifact(self, request: Request, ids: list[str]) -> Response:
        self.sessions.require(ids[0])
        self.sessions.delete_artifact(ids[0], ids[1])
        return Json({"id": ids[1], "object": "agent.session.artifact.deleted", "deleted": True})

    async def artifact_content(self, request: Request, ids: list[str]) -> Response:
        self.sessions.require(ids[0])
        found = self.sessions.store.artifact(ids[0], ids[1])
        if found is None:
            raise not_found()
        # Opened here, so that a deletion meanwhile does not cut the answer.
        file = self.sessions.runner.blobs(ids[0]).path(found[1]).open("rb")
        headers = {"Content-Disposition": "attachment", "Content-Length": str(found[0]["size_bytes"])}
        if found[0]["size_bytes"] > SMALL_BYTES:
            return StreamingResponse(chunks(file), media_type="application/octet-stream", headers=headers)
        with file:  # streaming would take a thread, which costs more than reading a small file
            return Response(file.read(), media_type="application/octet-stream", headers=headers)

    async def retrieve_environment(self, request: Request, ids: list[str]) -> Response:
        stored = self.sessions.store.session_of_environment(ids[0])
        if stored is None:
            raise not_found()
        environment = stored["environment"]
        shown = {name: environment[name] for name in ("id", "type", "files", "plugins", "skills")}
        return Json({"object": "agent.environment", "status": stored["_environment"]["status"], **shown})

    def element(self, table: str, ids: list[str]) -> Doc:
        found = self.sessions.store.one(table, ids[0], ids[1])
        if found is None:
            raise not_found()
        return found

    def list_of(
        self,
        table: str,
        request: Request,
        session_id: str,
        where: Doc,
        cursor_error: ApiError,
        *,
        clamp: bool = False,
    ) -> Response:
        paging = Query(request.scope["query_string"]).paging(clamp=clamp)
        self.sessions.require(session_id)
        return list_response(self.page(lambda: self.rows(table, where, paging), cursor_error))

    def rows(self, table: str, where: Doc, paging: Paging) -> Page:
        return self.sessions.store.page(
            table, where, limit=paging.limit, descending=paging.descending, after=paging.after
        )

    def page(self, read: Callable[[], Page], cursor_error: ApiError) -> Page:
        try:
            return read()
        except UnknownCursor:
            raise cursor_error from None

    # ── events ────────────────────────────────────────────────────────────────────────────────────

    async def create_events(self, request: Request, ids: list[str]) -> Response:
        body = parse_object(await read_body(request, BODY_BYTES))
        key = idempotency_key(request)
        self.sessions.submit(ids[0], parse_events(body), key, self.sessions.digest(body))
        return Response(status_code=202)

    async def stream_events(self, request: Request, ids: list[str]) -> Response:
        self.sessions.require(ids[0])
        self.check_streams()
        position = self.sessions.store.event_position(ids[0], request.headers.get("last-event-id"))
        return EventStream(self, self.events(ids[0], position), 200)

    def check_streams(self) -> None:
        if self.streams >= MAX_STREAMS:
            message = f"{MAX_STREAMS} event streams are open already; close some, or poll."
            raise unavailable(message, "stream_unavailable")

    async def events(self, session_id: str, position: int, *, until_settled: bool = False) -> AsyncIterator[str]:
        """Every event behind `position`, then live. The log is read, not a queue: a slow reader that comes back with
        the id it saw last loses nothing. One that was up to date and lags then is cut."""
        store, news = self.sessions.store, asyncio.Event()
        settled = turn_over = live = False
        with store.listening(session_id, news.set):
            yield ": connected\n\n"
            while not settled:
                news.clear()
                rows, begun = store.events(session_id, position, EVENTS_PER_READ, BYTES_PER_READ), time.monotonic()
                for number, event_id, document in rows:
                    position, kind = number, json.loads(document)["type"]
                    yield f"id: {event_id}\nevent: {kind}\ndata: {document}\n\n"
                    turn_over = turn_over or kind in TURN_ENDS
                    settled = settled or (until_settled and (kind == FAILED or (turn_over and kind == IDLE)))
                if settled or (not rows and self.over(session_id)):
                    return
                live = live or not rows
                if live and time.monotonic() - begun > LAG_SECONDS and self.lags(session_id, position):
                    yield f"event: error\ndata: {dumps(interrupted())}\n\n"
                    return
                if not rows:
                    try:
                        await asyncio.wait_for(news.wait(), KEEPALIVE_SECONDS)
                    except asyncio.TimeoutError:
                        yield ": keepalive\n\n"

    def lags(self, session_id: str, position: int) -> bool:
        events, size = self.sessions.store.events_behind(session_id, position)
        return events >= LAG_EVENTS or size >= LAG_BYTES

    def over(self, session_id: str) -> bool:
        """Whether a session will have no more events: it was deleted, or its environment is gone."""
        stored = self.sessions.store.session(session_id)
        return stored is None or stored["_environment"]["status"] in ("failed", "expired")


class EventStream(StreamingResponse):
    """An answer of events, which its server counts while it is open."""

    def __init__(self, api: Api, events: AsyncIterator[str], status: int) -> None:
        super().__init__(events, status, media_type="text/event-stream")
        self.api = api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.api.streams += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.api.streams -= 1


def interrupted() -> Doc:
    """The only event that is in no log: it has no id of its own to resume from."""
    message = "The reader lags; open the stream again with `Last-Event-ID`."
    error = {"type": "server_error", "code": "stream_interrupted", "message": message, "param": None}
    return {"type": "error", "event_id": str(uuid.uuid4()), "error": error}


TURN_ENDS = tuple(f"{PREFIX}turn.{status}" for status in ("completed", "failed", "cancelled"))
FAILED, IDLE = f"{PREFIX}failed", f"{PREFIX}idle"
INVALID_ITEM = "Invalid session item ID in `after`"
S = ("agents", "sessions", ID)
ROUTES: dict[tuple[str, ...], dict[str, Handler]] = {
    ("agents", "sessions"): {"GET": Api.list_sessions, "POST": Api.create_session},
    S: {"GET": Api.retrieve_session, "POST": Api.update_session, "DELETE": Api.delete_session},
    (*S, "events"): {"GET": Api.stream_events, "POST": Api.create_events},
    (*S, "turns"): {"GET": Api.list_turns},
    (*S, "turns", ID): {"GET": Api.retrieve_turn},
    (*S, "turns", ID, "items"): {"GET": Api.list_turn_items},
    (*S, "items"): {"GET": Api.list_items},
    (*S, "traces"): {"GET": Api.list_traces},
    (*S, "artifacts"): {"GET": Api.list_artifacts},
    (*S, "artifacts", ID): {"GET": Api.retrieve_artifact, "DELETE": Api.delete_artifact},
    (*S, "artifacts", ID, "content"): {"GET": Api.artifact_content},
    ("agents", "environments", ID): {"GET": Api.retrieve_environment},
}


def path_segments(request: Request) -> list[str]:
    """The path below /v1, split before decoding; a path elsewhere gives none."""
    raw = request.scope.get("raw_path") or request.scope["path"].encode()
    _, *segments = raw.decode("latin-1").partition("?")[0].split("/")
    return [unquote(segment) for segment in segments[1:]] if segments[:1] == ["v1"] else []


def matched(pattern: tuple[str, ...], segments: list[str]) -> list[str] | None:
    """The ids of a path that fits the pattern. A literal segment is never an id."""
    if len(pattern) != len(segments):
        return None
    pairs = list(zip(pattern, segments, strict=True))
    if any(want not in (ID, got) or (want == ID and got in ("", "templates")) for want, got in pairs):
        return None
    return [got for want, got in pairs if want == ID]


def check_beta(request: Request) -> None:
    values = request.headers.getlist("openai-beta")
    if values != ["agents=v1"]:
        message = "Send exactly one header `OpenAI-Beta: agents=v1`."
        raise ApiError(400, "invalid_beta", "invalid_beta", message)


def not_served(segments: list[str], method: str, allowed: list[str] | None) -> ApiError:
    """404 where nothing is served, 405 where another method is."""
    operation = f"{method} /{'/'.join(segments)}"[:200]
    if allowed:
        hint, headers = f"Use {' or '.join(allowed)}.", {"Allow": ", ".join(allowed)}
    else:
        hints = (text for pattern, text in UNSERVED.items() if matched(pattern, segments[: len(pattern)]) is not None)
        hint, headers = next(hints, "The README lists what is."), {}
    message = f"{operation} is not supported by this server. {hint}"
    code = "unsupported_operation"
    return ApiError(405 if allowed else 404, code, code, message, headers=headers)


def idempotency_key(request: Request) -> str | None:
    key: str | None = request.headers.get("idempotency-key")
    if key is not None and not 1 <= len(key.encode("latin-1", "replace")) <= KEY_HEADER_BYTES:
        raise bad_request(f"An Idempotency-Key has 1 to {KEY_HEADER_BYTES} bytes.")
    return key


async def read_body(request: Request, limit: int) -> bytes:
    """The whole JSON body; beyond the limit nothing more is read."""
    too_large = ApiError(413, "request_too_large", "request_too_large", f"The body is larger than {limit} bytes.")
    length = request.headers.get("content-length")
    if length is not None and length.isdigit() and int(length) > limit:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise too_large
    if body and request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise bad_request("Send the body with the header `Content-Type: application/json`.")
    return bytes(body)


def chunks(file: BinaryIO) -> Iterator[bytes]:
    with file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def list_response(page: Page) -> Json:
    first, last = (page.data[0]["id"], page.data[-1]["id"]) if page.data else (None, None)
    members = {"has_more": page.has_more, "first_id": first, "last_id": last}
    return Json({"object": "list", "data": page.data, **members})
