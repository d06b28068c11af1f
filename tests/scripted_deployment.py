"""A deployment of the Agents API that follows a script: real HTTP, no agent, no sandbox.

It serves the part of the API that `rl_eval.py` uses and can be told to be public Core (idle and
without a turn while preparing, 409 during a reservation, bare internal errors), the vendor's
(prefixed ids, 429 with Retry-After, late usage, unknown item types) or simply broken. It records what
it was asked, so that a trial judges the script from outside.

    python3 tests/scripted_deployment.py [seconds per turn]      prints the two exports, serves until killed

Left out: validation of requests, streams, everything that the script does not call.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import math
import socket
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

Json = dict[str, Any]
KEY = "scripted-deployment-key"
Refusal = tuple[int, Json, dict[str, str]]  # status, error, headers
ENDED = ("completed", "failed", "cancelled")
USAGE: Json = {
    "input_tokens": 12,
    "input_tokens_details": {"cached_tokens": 0},
    "output_tokens": 3,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 15,
}


@dataclass
class Script:
    """How the deployment behaves. A callable is asked per session."""

    answer: bytes | Callable[[Session], bytes | None] | None = b'{"x": 1}'
    size_bytes: int | None = None
    """What the artifact list says; None: the truth."""
    turn: Json | Callable[[Session], Json] = field(default_factory=lambda: {"status": "completed"})
    """Members of the turn once it has ended."""
    create_seconds: float = 0.0
    """Time until a create request is answered."""
    prepare_seconds: float = 0.0
    turn_seconds: float = 0.0
    """Time until the turn ends by itself; infinity: only a cancel ends it."""
    public: bool = False
    """While preparing: session idle, no turn, 409 for cancel and delete."""
    fail_without_turn: bool = False
    ignore_cancel: bool = False
    """Accept a cancel; the turn completes all the same."""
    usage: Json | None = field(default_factory=lambda: dict(USAGE))
    usage_reads: int = 0
    """How often usage is null before it is there."""
    items: list[Any] = field(default_factory=lambda: [{"type": "message", "role": "assistant", "content": []}])
    prefix: str = ""
    echo_network: Json | None = field(default_factory=lambda: {"access": "disabled", "allowed_domains": []})
    refuse: dict[str, list[Refusal]] = field(default_factory=dict)
    """Per operation, answers given before it works: status, error, headers."""
    lose_create: int = 0
    """So many creates make their session, and answer 503."""
    honour_keys: bool = True
    children: int = 0
    """Child turns, which complete at once and are listed first."""
    delete_conflicts: int = 0
    earlier_turn: bool = False
    """An earlier root turn has a wrong answer at the same path."""
    page: int = 100


class Session:
    """A session, its turn and its clock."""

    def __init__(self, number: int, body: Json, script: Script) -> None:
        self.body, self.script, self.number = body, script, number
        self.id = f"{script.prefix and 'sess_'}{number:08d}"
        self.turn_id = f"{script.prefix and 'turn_'}{number:08d}"
        self.created = time.monotonic()
        self.cancelled: float | None = None
        self.usage_reads = 0
        self.conflicts = script.delete_conflicts
        self.looks = 0
        self.deleted_at: float | None = None

    @property
    def deleted(self) -> bool:
        return self.deleted_at is not None

    def asked(self, times: int) -> bool:
        """Whether a script that calls this was asked so often."""
        self.looks += 1
        return self.looks >= times

    @property
    def preparing(self) -> bool:
        return time.monotonic() < self.created + self.script.prepare_seconds

    @property
    def status(self) -> str:
        script = self.script
        if self.preparing:
            return "cancelled" if self.cancelled and not script.public else "queued"
        ends = self.created + script.prepare_seconds + script.turn_seconds
        own = str(self.members["status"]) if time.monotonic() >= ends else "in_progress"
        if self.cancelled and (own not in ENDED or self.cancelled < ends):
            return "completed" if script.ignore_cancel else "cancelled"
        return own

    @property
    def members(self) -> Json:
        turn = self.script.turn
        return turn(self) if callable(turn) else turn

    @property
    def turns(self) -> list[Json]:
        """Newest first."""
        script, status = self.script, self.status
        if script.fail_without_turn or (script.public and self.preparing):
            return []
        ended = status in ENDED
        self.usage_reads += ended
        usage = script.usage if ended and self.usage_reads > script.usage_reads else None
        turn = {
            "id": self.turn_id,
            "object": "agent.session.turn",
            "session_id": self.id,
            "subagent_id": None,
        }
        turn |= {"error": None, "usage": usage, "started_at": None if self.preparing else 1}
        if ended and status != "cancelled":
            turn |= self.members
        turn["status"] = status
        child = {**turn, "subagent_id": "sub", "status": "completed", "error": None}
        turns = [{**child, "id": f"child{n}"} for n in range(script.children)] + [turn]
        if script.earlier_turn:
            turns.append({**turn, "id": "turn-before", "status": "completed"})
        return turns

    @property
    def artifacts(self) -> list[Json]:
        answer = self.script.answer(self) if callable(self.script.answer) else self.script.answer
        found = []
        if answer is not None and self.status == "completed":
            found.append(self.artifact("answer", self.turn_id, answer))
        if self.script.earlier_turn:
            found.insert(0, self.artifact("before", "turn-before", b'{"x": "wrong"}'))
        return found

    def artifact(self, name: str, turn_id: str, data: bytes) -> Json:
        size = len(data) if self.script.size_bytes is None else self.script.size_bytes
        path = "/workspace/outputs/answer.json"
        return {"id": f"{name}-{self.id}", "turn_id": turn_id, "path": path, "size_bytes": size, "_": data}

    @property
    def public_view(self) -> Json:
        script = self.script
        if script.fail_without_turn and not self.preparing:
            status, error = "failed", "The execution could not complete."
        else:
            idle = self.status in ("completed", "cancelled") or (script.public and self.preparing)
            status, error = ("idle" if idle else "in_progress"), ""
        environment: Json = {"type": "openai_hosted"}
        if script.echo_network is not None:
            environment["network"] = script.echo_network
        view = {"id": self.id, "object": "agent.session", "status": status, "error": error or None}
        return {**view, "environment": environment, "metadata": self.body.get("metadata")}


class Deployment:
    """The server, and what it saw."""

    def __init__(self, script: Script, scripts: dict[str, Script]) -> None:
        self.script, self.scripts = script, scripts
        self.sessions: dict[str, Session] = {}
        self.keys: dict[str, str] = {}
        self.calls: Counter[str] = Counter()
        self.calls_of: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """By the input of the session."""
        self.requests: list[tuple[str, Json]] = []
        self.most_in_flight = 0
        self.capacity = math.inf
        """Sessions that it holds at a time; a create beyond is answered 429."""
        self.free_seconds = 0.0
        """How long a deleted session still takes its room."""
        self.outage: Callable[[str], Refusal | None] = lambda operation: None
        """What an operation is answered instead, if anything."""
        self.creates: list[tuple[float, int, str]] = []
        """Of every create request: when it came, the sessions alive when it was answered, its rollout's id."""
        self.base_url = ""
        self.seen = threading.Condition()
        """Notified at every request."""

    @property
    def alive(self) -> list[Session]:
        # A copy, made at once: the server goes on in its thread.
        return [session for session in list(self.sessions.values()) if not session.deleted]

    @property
    def taken(self) -> int:
        """Sessions that take room."""
        freed = time.monotonic() - self.free_seconds
        return sum(s.deleted_at is None or s.deleted_at > freed for s in self.sessions.values())

    def wait_for(self, condition: Callable[[], bool], seconds: float = 20.0) -> None:
        """Block until a request makes the condition true."""
        with self.seen:
            assert self.seen.wait_for(condition, seconds), f"never happened; calls: {self.calls}"

    def script_of(self, body: Json) -> Script:
        return self.scripts.get(body.get("input", ""), self.script)

    # Routes.

    def note(self, operation: str, body: Json) -> Response | None:
        """Count a request; the refusal that the script has for it, if any."""
        with self.seen:
            self.calls[operation] += 1
            self.calls_of[body.get("input", "")][operation] += 1
            self.seen.notify_all()
        waiting = self.script_of(body).refuse.get(operation)
        if refusal := waiting.pop(0) if waiting else self.outage(operation):
            status, error, headers = refusal
            return JSONResponse({"error": error}, status, headers)
        return None

    async def create(self, request: Request) -> Response:
        body, key = await request.json(), request.headers.get("idempotency-key", "")
        self.requests.append((key, body))
        self.creates.append((time.monotonic(), len(self.alive), (body.get("metadata") or {}).get("rollout_id", "")))
        if request.headers.get("authorization") != f"Bearer {KEY}":
            return error(401, "null", "A valid Agents API bearer key is required.")
        if refused := self.note("create", body):
            return refused
        script = self.script_of(body)
        known = self.keys.get(key) if script.honour_keys else None
        if known and self.sessions[known].deleted:
            return error(409, "idempotency_conflict", "The session of this Idempotency-Key was deleted.")
        if not known and math.isfinite(self.capacity) and self.taken >= self.capacity:
            return JSONResponse(
                {"error": {"code": "rate_limit_exceeded", "message": "full"}}, 429, {"Retry-After": "1"}
            )
        session = self.sessions[known] if known else Session(len(self.sessions) + 1, body, script)
        self.sessions[session.id], self.keys[key] = session, session.id
        self.most_in_flight = max(self.most_in_flight, len(self.alive))
        await asyncio.sleep(script.create_seconds)
        if script.lose_create > 0:
            script.lose_create -= 1
            return error(503, "execution_unavailable", "lost")
        return JSONResponse(session.public_view, 201)

    async def list_sessions(self, request: Request) -> Response:
        wanted = request.query_params.get("metadata[run_id]")
        rows = [session.public_view for session in reversed(self.alive)]
        rows = [row for row in rows if wanted is None or (row["metadata"] or {}).get("run_id") == wanted]
        return self.note("list", {}) or page(request, rows, self.script.page)

    async def on_session(self, operation: str, request: Request) -> tuple[Session, Response | None]:
        """The session of a request, and the answer if it is not to get the usual one."""
        session = self.sessions.get(request.path_params["session"]) or Session(0, {}, self.script)
        gone = session.number == 0 or session.deleted
        return session, self.note(operation, session.body) or (missing() if gone else None)

    async def retrieve(self, request: Request) -> Response:
        session, refused = await self.on_session("retrieve", request)
        return refused or JSONResponse(session.public_view)

    async def delete(self, request: Request) -> Response:
        session, refused = await self.on_session("delete", request)
        if refused:
            return refused
        busy = session.status in ("in_progress", "queued") and not session.script.fail_without_turn
        if session.conflicts > 0 or busy:
            session.conflicts -= 1
            return error(409, "conflict_error", "session must be durably idle")
        session.deleted_at = session.deleted_at or time.monotonic()
        return JSONResponse({"id": session.id, "object": "agent.session.deleted", "deleted": True})

    async def event(self, request: Request) -> Response:
        session, refused = await self.on_session("cancel", request)
        if refused:
            return refused
        if session.script.public and session.preparing:
            return error(409, "conflict_error", "Earlier input to this Session is still pending.")
        session.cancelled = session.cancelled or time.monotonic()
        return Response(status_code=202)

    async def list_turns(self, request: Request) -> Response:
        session, refused = await self.on_session("turns", request)
        return refused or page(request, session.turns, session.script.page)

    async def turn(self, request: Request) -> Response:
        session, refused = await self.on_session("turn", request)
        return refused or JSONResponse(next(t for t in session.turns if t["id"] == session.turn_id))

    async def list_items(self, request: Request) -> Response:
        session, refused = await self.on_session("items", request)
        items = [{"id": f"item{n}", **item} for n, item in enumerate(session.script.items)]
        return refused or page(request, items, session.script.page)

    async def list_artifacts(self, request: Request) -> Response:
        session, refused = await self.on_session("artifacts", request)
        rows = [{k: v for k, v in row.items() if k != "_"} for row in session.artifacts]
        return refused or page(request, rows, session.script.page)

    async def content(self, request: Request) -> Response:
        session, refused = await self.on_session("content", request)
        found = [row["_"] for row in session.artifacts if row["id"] == request.path_params["artifact"]]
        return refused or Response(found[0], media_type="application/octet-stream")

    def app(self) -> Starlette:
        base, one = "/v1/agents/sessions", "/v1/agents/sessions/{session}"
        routes = [
            Route(base, self.create, methods=["POST"]),
            Route(base, self.list_sessions, methods=["GET"]),
            Route(one, self.retrieve, methods=["GET"]),
            Route(one, self.delete, methods=["DELETE"]),
            Route(one + "/events", self.event, methods=["POST"]),
            Route(one + "/turns", self.list_turns),
            Route(one + "/turns/{turn}", self.turn),
            Route(one + "/items", self.list_items),
            Route(one + "/artifacts", self.list_artifacts),
            Route(one + "/artifacts/{artifact}/content", self.content),
        ]
        return Starlette(routes=routes)


def error(status: int, code: str, message: str) -> Response:
    return JSONResponse({"error": {"type": code, "code": code, "message": message, "param": None}}, status)


def missing() -> Response:
    return error(404, "not_found_error", "Resource not found.")


def page(request: Request, rows: list[Json], most: int) -> Response:
    """One page as the API gives it. NaN and lone surrogates pass, as from a careless server."""
    size, after = min(int(request.query_params.get("limit", 20)), most), request.query_params.get("after")
    ids = [row["id"] for row in rows]
    begin = ids.index(after) + 1 if after else 0
    data = rows[begin : begin + size]
    body = {"object": "list", "data": data, "has_more": begin + size < len(rows)}
    body |= {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return Response(json.dumps(body), media_type="application/json")


@contextmanager
def serving(script: Script, scripts: dict[str, Script] | None = None) -> Iterator[Deployment]:
    """Serve from a thread of this process. Sessions whose input is a key of `scripts` follow that one."""
    deployment = Deployment(script, scripts or {})
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    deployment.base_url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    config = uvicorn.Config(deployment.app(), log_level="error", lifespan="off", access_log=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), daemon=True)
    thread.start()
    try:
        yield deployment
    finally:
        server.should_exit = True
        server.force_exit = True
        thread.join(10)
        listener.close()


def file_of(body: Json, path: str) -> bytes:
    """The content of an inline file of a create request."""
    return next(base64.b64decode(f["data"]) for f in body["environment"]["files"] if f["path"] == path)


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 0.0
    with serving(Script(turn_seconds=seconds)) as deployment:
        print(f"export OPENAI_BASE_URL='{deployment.base_url}'\nexport OPENAI_API_KEY='{KEY}'", flush=True)
        for _ in itertools.count():
            time.sleep(1)


if __name__ == "__main__":
    main()
