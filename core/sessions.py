"""The life of sessions: admission, messages, cancel, delete, and what a restart leaves.

Invariants:
- A create is durable before it is answered: row, first turn, files and idempotency key.
- At most one root turn of a session is not terminal.
- Secrets (model keys, environment values) live in memory only; after a restart a session that had any cannot go on.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from core import failures
from core.budget import Budget, Price
from core.documents import (
    TERMINAL,
    new_session,
    new_turn,
    session_document,
    user_message,
)
from core.egress import Door
from core.errors import bad_request, conflict, not_found, storage_unavailable, unsupported
from core.harnesses import Harness
from core.proxy import Network
from core.recorder import Recorder
from core.sandbox import Backend
from core.sandbox.rooms import install, remove_tree
from core.store import StorageFailed, Store, new_id
from core.turns import STORE_AGAIN_SECONDS, Live, TurnRunner
from core.waiting import in_thread
from core.wire import Agent, Content, Environment, InputEvents, Message, SessionCreate, ToolResult

PREFIX = "agent.session."
CREATE_SCOPE = ""
DELETE_WAIT_SECONDS = 10.0
LONGEST_TIMER = 3600.0 * 12
BUSY = "session must be durably idle or failed without required actions before deletion"

Doc = dict[str, Any]
log = logging.getLogger("core")


@dataclass(frozen=True)
class Options:
    """The operator's choices: sandboxes at a time, prices by model, a session's life in seconds."""

    slots: int
    prices: dict[str, Price]
    ttl: float


class Sessions:
    """All sessions of this server."""

    def __init__(
        self,
        store: Store,
        backend: Backend,
        harnesses: dict[str, Harness],
        client: httpx.AsyncClient,
        data: Path,
        options: Options,
    ) -> None:
        self.store = store
        self.backend = backend
        self.harnesses = harnesses
        self.client = client
        self.prices = options.prices
        self.ttl = options.ttl
        self.timers: dict[str, asyncio.TimerHandle] = {}
        self.expiring: set[asyncio.Task[None]] = set()
        self.runner = TurnRunner(store, backend, data / "blobs", options.slots)
        self.live: dict[str, Live] = {}
        self.digest_key = digest_key(data / "digest.key")

    # ── create ────────────────────────────────────────────────────────────────────────────────────

    def digest(self, body: Doc) -> str:
        """A keyed digest of a request: it may hold secrets, so no plain hash of it is kept."""
        canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
        return hmac.new(self.digest_key, canonical.encode(errors="surrogatepass"), hashlib.sha256).hexdigest()

    def replayed(self, scope: str, key: str | None, digest: str) -> str | None:
        """The session that an earlier request with this key made. Raises ApiError when that was another request."""
        known = self.store.remembered(scope, key) if key is not None else None
        if known is None:
            return None
        if known[0] != digest:
            raise conflict("This Idempotency-Key was used with another request.", "idempotency_conflict")
        if self.store.session(known[1]) is None:
            raise conflict("The session of this Idempotency-Key was deleted.", "idempotency_conflict")
        return known[1]

    def admit(self, request: SessionCreate) -> Harness:
        """The harness that will run it. Raises ApiError."""
        name = next(iter(self.harnesses)) if request.agent.harness is None else request.agent.harness
        harness = self.harnesses.get(name)
        if harness is None:
            known = ", ".join(self.harnesses)
            message = f"Unknown harness '{name}'; this server has {known}."
            raise unsupported(message, "agent.x_agents_core.harness")
        harness.admit(request.agent, request.bundle)
        if request.ceilings.spend_cents is not None and request.agent.model not in self.prices:
            message = "There is no price for this model on the server, so a spend limit cannot be enforced."
            raise unsupported(message, "spend_control.limit")
        return harness

    def create(self, request: SessionCreate, key: str | None, digest: str) -> str:
        """Makes a session and starts it; returns its id once all of it is durable.

        One transaction without an await: nobody sees half a session, and one that cannot be stored leaves no key.
        """
        harness = self.admit(request)
        if self.runner.disk.short():
            message = "The server's disk is down to its floor of free space; delete sessions, or make room on it."
            raise storage_unavailable(message)
        self.runner.check_line()
        session_id, now = new_id(), int(time.time())
        stored = new_session(request, session_id, (new_id(), new_id()), harness.name, now)
        try:
            with self.store.transaction():
                number = self.store.add_session(stored)
                if key is not None:
                    self.store.remember(CREATE_SCOPE, key, digest, session_id)
                turn_id = self.announce(stored, request.input, now)
                room = self.backend.make_room(session_id, number)
                for file in request.environment.files:
                    install(room.workspace, file.path.removeprefix("/workspace/"), file.data, room.uid)
        except (OSError, StorageFailed) as error:
            self.backend.remove_room(session_id)
            reason = error.strerror if isinstance(error, OSError) else error
            raise storage_unavailable(f"The session cannot be stored: {reason}.") from None
        budget = Budget(request.ceilings, self.prices.get(request.agent.model or ""))
        door = Door(request.bundle, self.client, network=request.environment.network, budget=budget)
        live = Live(session_id, request.agent, harness, request.environment, room, door)
        self.keep(live, now)
        self.spawn(live, turn_id)
        return session_id

    def announce(self, stored: Doc, messages: list[Content] | None, now: int) -> str | None:
        """The first events, and the queued turn of a session that comes with input."""
        created = session_document(stored, None)
        self.store.add_event(stored["id"], f"{PREFIX}created", {"session": created})
        return None if messages is None else self.queue_turn(stored, messages, now)

    def queue_turn(self, stored: Doc, messages: list[Content], now: int) -> str:
        """A queued turn with its user messages, told in the order of AGENTS_API 5.4. Runs inside a transaction."""
        session_id, turn = stored["id"], new_turn(new_id(), stored, now)
        self.store.add_turn(turn)
        head = {"session_id": session_id, "turn_id": turn["id"]}
        self.store.add_event(session_id, f"{PREFIX}turn.created", {**head, "turn": turn})
        for content in messages:
            item = user_message(new_id(), turn["id"], content)
            self.store.save_item(session_id, item)
            self.store.add_event(session_id, f"{PREFIX}turn.item.added", {**head, "output_index": None, "item": item})
        shown = session_document(stored, turn)
        self.store.add_event(session_id, f"{PREFIX}in_progress", {"session": shown})
        return str(turn["id"])

    def spawn(self, live: Live, turn_id: str | None) -> None:
        task = asyncio.create_task(self.runner.run(live, turn_id))
        live.tasks.add(task)
        self.runner.line.add(task)
        task.add_done_callback(lambda done: self.finished(live, done))

    def finished(self, live: Live, task: asyncio.Task[None]) -> None:
        live.tasks.discard(task)
        self.runner.line.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("turn of session %s: %s", live.session_id, error, exc_info=error)

    # ── events ────────────────────────────────────────────────────────────────────────────────────

    def submit(self, session_id: str, events: InputEvents, key: str | None, digest: str) -> None:
        """Applies a batch whole or not at all. Raises ApiError."""
        stored = self.require(session_id)
        if key is not None and self.replayed(session_id, key, digest) is not None:
            return
        for event in events:
            if isinstance(event, ToolResult):  # no harness of this server has tools of the client
                raise bad_request(f"Unknown pending tool call: {event.call_id}")
        messages = [content for event in events if isinstance(event, Message) for content in event.messages]
        if messages:
            self.message(stored, messages, key, digest)
            return
        with self.store.transaction():
            if key is not None:
                self.store.remember(session_id, key, digest, session_id)
        if events:
            self.cancel(session_id)

    def message(self, stored: Doc, messages: list[Content], key: str | None, digest: str) -> None:
        if stored["_environment"]["status"] in ("failed", "expired"):
            raise conflict("The session's environment is gone; create a new session.", "environment_unavailable")
        if self.active_turn(stored["id"]) is not None:
            raise conflict("A turn is under way; wait for its end or cancel it.", "turn_conflict")
        self.runner.check_line()
        live = self.live.get(stored["id"]) or self.revive(stored)
        with self.store.transaction():
            if key is not None:
                self.store.remember(stored["id"], key, digest, stored["id"])
            stored["last_active_at"] = int(time.time())
            self.store.save_session(stored)
            turn_id = self.queue_turn(stored, messages, stored["last_active_at"])
        self.spawn(live, turn_id)

    def cancel(self, session_id: str) -> None:
        """A queued turn is over at once; a running one is told to end. Without one there is nothing to do."""
        turn, live = self.active_turn(session_id), self.live.get(session_id)
        if turn is None or live is None:
            return
        if turn["status"] == "queued":
            self.runner.cancel(live, turn["id"])
        else:
            live.cancelled.set()

    # ── delete ────────────────────────────────────────────────────────────────────────────────────

    async def delete(self, session_id: str, *, cancel: bool) -> None:
        """Removes a session that is not busy, and all it has. Raises ApiError."""
        if self.store.session(session_id) is None:
            if self.store.session_number(session_id) is None:
                raise not_found()
            return
        turn, live = self.active_turn(session_id), self.live.get(session_id)
        if turn is not None and live is not None and turn["status"] != "queued":
            if not cancel:
                raise conflict(BUSY, settling=live.cancelled.is_set())
            live.cancelled.set()
            if live.tasks:
                await asyncio.wait(live.tasks, timeout=DELETE_WAIT_SECONDS)
            if self.active_turn(session_id) is not None:
                raise conflict(BUSY, settling=True)
        elif turn is not None and live is not None:
            self.runner.cancel(live, turn["id"])
        await self.discard(session_id)

    # ── the end of a session's life ───────────────────────────────────────────────────────────────

    def keep(self, live: Live, created_at: int) -> None:
        """Holds a session in memory until its time is over."""
        live.expires_at = created_at + self.ttl
        self.live[live.session_id] = live
        self.watch(live.session_id, live.seconds_left())

    def watch(self, session_id: str, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self.unwatch(session_id)
        # asyncio's timers hold a day at the most reliably; a longer life is watched in pieces.
        self.timers[session_id] = loop.call_later(min(max(seconds, 0), LONGEST_TIMER), self.due, session_id)

    def unwatch(self, session_id: str) -> None:
        if timer := self.timers.pop(session_id, None):
            timer.cancel()

    def due(self, session_id: str) -> None:
        stored = self.store.session(session_id)
        if stored is None:
            return
        left = stored["created_at"] + self.ttl - time.time()
        if left > 0:
            self.watch(session_id, left)
            return
        task = asyncio.create_task(self.expire(stored))
        self.expiring.add(task)
        task.add_done_callback(self.expiring.discard)

    async def expire(self, stored: Doc) -> None:
        """Ends a session: what runs fails and is killed, the sandbox's files go; the record and artifacts stay."""
        session_id, turn = stored["id"], self.active_turn(stored["id"])
        live = self.live.get(session_id) or self.revive(stored)
        try:
            if turn is not None:
                self.runner.fail(live, turn["id"], failures.EXPIRED)
            if stored["_environment"]["status"] in ("pending", "ready"):
                turn_id = turn["id"] if turn is not None else None
                self.runner.move_environment(live, turn_id, "expired", failures.EXPIRED.message)
                with self.store.transaction():
                    self.runner.session_event(live, "failed")
        except StorageFailed:
            self.watch(session_id, STORE_AGAIN_SECONDS)
            return
        await self.stop(session_id)
        await in_thread(self.backend.remove_room, session_id, pool=self.runner.removers)

    async def stop(self, session_id: str) -> None:
        """Ends what runs of a session, and forgets what was in memory."""
        self.unwatch(session_id)
        live = self.live.pop(session_id, None)
        for task in list(live.tasks) if live else []:
            task.cancel()
            await asyncio.wait({task})

    async def discard(self, session_id: str) -> None:
        """Ends what is recorded first, so that nothing new can start; then what runs, then the files."""
        with self.store.transaction():
            self.store.delete_session(session_id)
        await self.stop(session_id)
        await in_thread(self.remove_files, session_id, pool=self.runner.removers)

    def remove_files(self, session_id: str) -> None:
        remove_tree(self.runner.blobs(session_id).root)
        self.backend.remove_room(session_id)

    def delete_artifact(self, session_id: str, artifact_id: str) -> None:
        if self.store.artifact(session_id, artifact_id) is None:
            raise not_found()
        with self.store.transaction():
            self.store.delete_artifact(artifact_id)
        if self.active_turn(session_id) is None:  # else its capture may need the same bytes; its end cleans up
            self.runner.blobs(session_id).keep(self.store.digests(session_id))

    # ── reading ───────────────────────────────────────────────────────────────────────────────────

    def require(self, session_id: str) -> Doc:
        stored = self.store.session(session_id)
        if stored is None:
            raise not_found()
        return stored

    def document(self, session_id: str) -> Doc:
        return self.shown(self.require(session_id))

    def shown(self, stored: Doc) -> Doc:
        return session_document(stored, self.store.last_turn(stored["id"]))

    def active_turn(self, session_id: str) -> Doc | None:
        turn = self.store.last_turn(session_id)
        return turn if turn is not None and turn["status"] not in TERMINAL else None

    def set_metadata(self, session_id: str, metadata: dict[str, str] | None) -> Doc:
        stored = self.require(session_id)
        if metadata is not None:
            stored["metadata"] = metadata
            with self.store.transaction():
                self.store.save_session(stored)
        return self.shown(stored)

    # ── start and stop ────────────────────────────────────────────────────────────────────────────

    def recover(self) -> None:
        """What a server that ended without notice left: half-prepared environments fail, running turns too."""
        for stored in self.all_sessions():
            if stored["_environment"]["status"] == "pending":
                self.runner.fail_environment(self.revive(stored), None, failures.RESTARTED)
                self.live.pop(stored["id"], None)
        for turn in self.store.unfinished_turns():
            stored = self.require(turn["session_id"])
            recorder = Recorder.reopened(self.store, stored["id"], turn["id"])
            self.runner.fail(self.revive(stored), turn["id"], failures.RESTARTED, recorder)
            self.live.pop(stored["id"], None)
        for stored in self.all_sessions():
            if stored["_environment"]["status"] == "ready":
                self.watch(stored["id"], stored["created_at"] + self.ttl - time.time())
        known = {stored["id"] for stored in self.all_sessions()}
        for name in {*self.backend.rooms_left(), *self.runner.blobs_left()} - known:
            self.remove_files(name)

    def all_sessions(self) -> list[Doc]:
        found, after = list[Doc](), None
        while True:
            page = self.store.session_page({}, None, limit=100, descending=False, after=after)
            found += page.data
            if not page.has_more:
                return found
            after = page.data[-1]["id"]

    def revive(self, stored: Doc) -> Live:
        """The live half of a stored session, without its secrets."""
        number = self.store.session_number(stored["id"])
        assert number is not None
        extension = stored["agent"]["x_agents_core"]
        model, instructions = stored["agent"]["model"], stored["agent"]["instructions"]
        verbosity = stored["agent"]["text"]["verbosity"]
        agent = Agent(model, instructions, verbosity, extension["harness"], extension["harness_config"])
        read = stored["environment"]
        network = Network(read["network"]["access"], read["network"]["allowed_domains"])
        environment = Environment(read["container_size"], network, [], {}, [])
        harness = self.harnesses[extension["harness"]]
        room = self.backend.make_room(stored["id"], number)
        door = Door(None, self.client, network=network)
        live = Live(stored["id"], agent, harness, environment, room, door, secrets_lost=stored["_secrets"])
        self.keep(live, stored["created_at"])
        return live

    async def close(self) -> None:
        """Ends every turn without waiting for it; the sandboxes die with the backend."""
        for session_id in list(self.timers):
            self.unwatch(session_id)
        tasks = [*self.expiring, *(task for live in self.live.values() for task in live.tasks)]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=DELETE_WAIT_SECONDS)


def digest_key(path: Path) -> bytes:
    """The key of request digests: made once per data directory, so that idempotency outlives a restart."""
    if not path.exists():
        whole = path.with_suffix(".new")
        whole.touch(mode=0o600)
        whole.write_bytes(secrets.token_bytes(32))
        whole.replace(path)
    return path.read_bytes()
