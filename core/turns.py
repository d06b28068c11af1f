"""Running one turn: prepare the environment, start the harness in a sandbox, follow it to its end, publish.

Invariants:
- A turn ends at the harness's own terminal event; then every process of its sandbox is killed.
- What is published was captured after they were all gone, and appears in the transaction that completes the turn.
- Whoever reads a terminal status reads the final items, usage and artifacts.
- A session that exceeded its limit of disk is over: its environment fails, and its room is removed at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from core import failures
from core.artifacts import Blobs, Capture, CaptureFailed, capture
from core.documents import TERMINAL, add_usage, artifact_document, environment_state, session_document
from core.egress import DOOR_URL, Call, Door
from core.errors import unavailable
from core.failures import Death, Failure
from core.harnesses import Effect, Ended, Harness, OutputReader, Thread, TurnRequest
from core.recorder import Recorder
from core.sandbox import CONTAINER_SIZES, OUTPUTS, Backend, Command, Limits, Room, Sandbox, SandboxFailed
from core.sandbox.disk import Breach, DiskWatcher, Usage, Watched, breach, measure
from core.sandbox.oom import host_oom_kills
from core.sandbox.pipes import PipeReader
from core.sandbox.rooms import install, open_up
from core.store import StorageFailed, Store, new_id
from core.traces import span
from core.waiting import in_thread, within
from core.wire import Agent, Environment

CHUNK_BYTES = 1 << 16
LINE_BYTES = 8 << 20
PARSED_BYTES = 128 << 20  # of a harness's events in a turn; what it streams and nobody reads does not count
LINE_COST = 256  # what each event counts beside its bytes
STDERR_BYTES = 16 << 10
GRACE_SECONDS = 1.0
REMOVERS = 32
STEP_SECONDS = 120.0
LINE = 1024  # turns and preparations that may wait for a slot
STORE_AGAIN_SECONDS = 1.0
PREPARATION_SECONDS = 1800.0
PREFIX = "agent.session."

Doc = dict[str, Any]


@dataclass
class Live:
    """What a session keeps in memory: its room, its door, its secrets, and the turn that is running."""

    session_id: str
    agent: Agent
    harness: Harness
    environment: Environment
    room: Room
    door: Door
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    expires_at: float = 0.0  # seconds since the epoch
    secrets_lost: bool = False

    def variables(self) -> dict[str, str]:
        """The session's own environment variables; what leads to the proxy wins."""
        return {**self.environment.env, **self.environment.network.environment(DOOR_URL)}

    def seconds_left(self) -> float:
        return self.expires_at - time.time()

    @property
    def limits(self) -> Limits:
        return CONTAINER_SIZES[self.environment.container_size]


@dataclass(frozen=True)
class Outcome:
    """How the harness's process went. `ended` is None when there was no terminal event."""

    ended: Ended | None
    cancelled: bool
    lost: bool
    flooded: bool
    death: Death
    breach: Breach | None
    watched: Watched


class TurnRunner:
    """Runs turns with at most `slots` sandboxes at a time; first come, first served."""

    def __init__(self, store: Store, backend: Backend, blobs: Path, slots: int) -> None:
        self.store = store
        self.backend = backend
        self.blob_root = blobs
        self.slots = asyncio.Semaphore(slots)
        self.disk = DiskWatcher(blobs.parent, backend.processes)
        # Removing takes a while where an agent left a million files; nothing else shall wait for that.
        self.removers = ThreadPoolExecutor(REMOVERS, "remove")
        self.line: set[asyncio.Task[None]] = set()  # those that wait for a slot
        blobs.mkdir(mode=0o700, exist_ok=True)

    def blobs(self, session_id: str) -> Blobs:
        return Blobs(self.blob_root / session_id)

    def directories(self, live: Live) -> tuple[Path, ...]:
        """Where a session's files lie, which its limit of disk is for."""
        return live.room.path, self.blobs(live.session_id).root

    def watching(self, live: Live, sandbox: Sandbox, held: Usage) -> contextlib.AbstractContextManager[Watched]:
        return self.disk.watching(live.room.path.name, self.directories(live), live.limits, sandbox.kill, held)

    def blobs_left(self) -> list[str]:
        """Sessions with blobs on disk, of this server or of an earlier one."""
        return [path.name for path in self.blob_root.iterdir()]

    def check_line(self) -> None:
        """Raises ApiError (503) when too many wait already."""
        if len(self.line) >= LINE:
            message = f"{LINE} turns wait for a sandbox already; try again later."
            raise unavailable(message, "execution_unavailable")

    async def run(self, live: Live, turn_id: str | None) -> None:
        """Prepares the session if it is not, then runs the turn, if any. Any defect here fails the turn."""
        task = asyncio.current_task()
        assert task is not None
        async with live.lock, self.slots:
            self.line.discard(task)
            try:
                if await self.prepare(live, turn_id) and turn_id is not None:
                    await self.run_turn(live, turn_id)
            except StorageFailed as error:
                await self.fail_once_stored(live, turn_id, failures.storage_failure(str(error), "turn"))
            except Exception as error:
                message = f"The server failed: {type(error).__name__}."
                failure = Failure("internal_error", message, "infrastructure", "server_defect")
                await self.fail_once_stored(live, turn_id, failure)
                raise

    async def fail_once_stored(self, live: Live, turn_id: str | None, failure: Failure) -> None:
        """Ends a turn, or a preparation, that nothing runs for any more; on a full disk as soon as that can be told."""
        while True:
            try:
                if self.session(live)["_environment"]["status"] == "pending":
                    self.fail_environment(live, turn_id, failure)
                elif turn_id is not None:
                    begun = self.turn(live, turn_id)["status"] == "in_progress"
                    recorder = Recorder.reopened(self.store, live.session_id, turn_id) if begun else None
                    self.fail(live, turn_id, failure, recorder)
                return
            except StorageFailed:
                await asyncio.sleep(STORE_AGAIN_SECONDS)

    # ── preparation ───────────────────────────────────────────────────────────────────────────────

    async def prepare(self, live: Live, turn_id: str | None) -> bool:
        """Runs the setup commands once per session. False when they failed and the session with them."""
        stored, started, began = self.session(live), time.time_ns(), time.monotonic()
        if stored["_environment"]["status"] != "pending":
            return bool(stored["_environment"]["status"] == "ready")
        self.move_environment(live, turn_id, "pending")
        failure = None
        try:
            failure = await within(PREPARATION_SECONDS, self.setup(live))
        except asyncio.TimeoutError:
            failure = failures.sandbox_failure("initialization did not complete", "preparation_timeout")
        except (SandboxFailed, OSError) as error:
            failure = failures.sandbox_failure(f"The sandbox did not start: {error}", "sandbox_lost")
        if turn_id is not None:
            preparation = span("preparation", "preparation", started, time.time_ns(), failed=failure is not None)
            self.record_preparation(live, turn_id, preparation, time.monotonic() - began)
        if failure is None:
            self.move_environment(live, turn_id, "ready")
            return True
        self.fail_environment(live, turn_id, failure)
        await self.remove_room(live)
        return False

    async def setup(self, live: Live) -> Failure | None:
        for index, (command, directory) in enumerate(live.environment.setup_commands):
            code, found = await self.setup_command(live, command, directory)
            if found is not None:
                return failures.sandbox_failure(found.message, found.reason, index=index, **found.params)
            if code != 0:
                message = f'script "setup_commands[{index}]" failed with exit code {code}'
                return failures.sandbox_failure(message, "setup_command_failed", index=index, exit_code=code)
        return None

    async def setup_command(self, live: Live, command: str, directory: str) -> tuple[int, Breach | None]:
        script = 'cd -- "$1" && exec /bin/bash -c "$2"'
        argv = ["/bin/bash", "-c", script, "setup", directory, command]
        sandbox = await self.backend.run(
            Command(argv, live.variables(), merge_stderr=True), live.room, live.limits, live.seconds_left()
        )
        draining = asyncio.create_task(drain(sandbox.stdout))
        try:
            with self.watching(live, sandbox, Usage()) as watched:
                async with self.opened(live, sandbox):
                    return await within(STEP_SECONDS, sandbox.wait()), watched.breach
        finally:
            sandbox.kill()
            await sandbox.wait()
            await draining

    def move_environment(self, live: Live, turn_id: str | None, status: str, error: str | None = None) -> None:
        with self.store.transaction():
            stored = self.session(live)
            stored["_environment"] = {"status": status, "error": error}
            self.store.save_session(stored)
            members = {
                "session_id": live.session_id,
                "turn_id": turn_id,
                "environment": environment_state(stored),
            }
            self.store.add_event(live.session_id, f"{PREFIX}environment.{status}", members)

    def fail_environment(
        self, live: Live, turn_id: str | None, failure: Failure, recorder: Recorder | None = None
    ) -> None:
        """Also fails the turn that waits, which is not the one of `turn_id` when that was cancelled meanwhile."""
        self.move_environment(live, turn_id, "failed", failure.message)
        turn = self.store.last_turn(live.session_id)
        if turn is not None and turn["status"] not in TERMINAL:
            self.fail(live, turn["id"], failure, recorder)
        else:
            with self.store.transaction():
                self.session_event(live, "failed")

    # ── the turn ──────────────────────────────────────────────────────────────────────────────────

    async def run_turn(self, live: Live, turn_id: str) -> None:
        turn = self.turn(live, turn_id)
        if turn["status"] != "queued":
            return  # cancelled while it waited
        if live.secrets_lost:
            self.fail(live, turn_id, failures.KEY_LOST)
            return
        if live.door.budget.exhausted.is_set():
            self.fail(live, turn_id, failures.budget_failure(live.door.budget.spent))
            return
        held = await self.held(live, turn)
        if (over := breach(held, live.limits)) is not None:
            await self.give_up(live, turn_id, over)
            return
        if self.turn(live, turn_id)["status"] != "queued":
            return  # cancelled while its room was measured
        self.begin(live, turn)
        recorder = Recorder(self.store, live.session_id, turn_id)
        live.door.begin_turn()
        live.door.on_call = lambda call: self.add_span(live, turn_id, call_span(call))
        try:
            outcome = await self.drive(live, turn_id, recorder, held)
        except (SandboxFailed, OSError) as error:
            message = f"The sandbox did not start: {error}"
            self.fail(live, turn_id, failures.sandbox_failure(message, "sandbox_lost"), recorder)
            return
        await self.settle(live, turn_id, recorder, outcome)

    async def held(self, live: Live, turn: Doc) -> Usage:
        """What the session has on disk before the turn; of a new one only what came with it, which is little."""
        if self.store.is_first_turn(turn) and not live.environment.setup_commands:
            return Usage()
        return await in_thread(measure, self.directories(live), live.limits)

    def begin(self, live: Live, turn: Doc) -> None:
        live.cancelled.clear()
        with self.store.transaction():
            turn |= {"status": "in_progress", "started_at": int(time.time())}
            self.store.save_turn(turn)
            self.turn_event(live, turn, "turn.in_progress")

    async def drive(self, live: Live, turn_id: str, recorder: Recorder, held: Usage) -> Outcome:
        """Runs the harness to its terminal event, its exit, or a cancel; returns when its sandbox is gone."""
        launch = live.harness.launch(self.request(live, turn_id))
        await in_thread(lay_out, live.room, launch.home_files)
        started, kills = time.monotonic(), host_oom_kills()
        sandbox = await self.backend.run(launch.command, live.room, live.limits, live.seconds_left())
        output = Output(live.harness.reader(), live.limits.output, lambda effects: self.apply(live, recorder, effects))
        reading = asyncio.create_task(output.follow(sandbox.stdout))
        stderr = asyncio.create_task(output.tail(sandbox.stderr, STDERR_BYTES))
        try:
            with self.watching(live, sandbox, held) as watched:
                async with self.opened(live, sandbox):
                    await self.until_over(live, sandbox, output)
        finally:
            sandbox.kill()
            code = await sandbox.wait()
        await reading
        said = (await stderr).decode(errors="replace")
        cancelled, found = live.cancelled.is_set(), watched.breach or output.breach
        if not cancelled and not sandbox.lost and not output.flooded and found is None:
            output.exited(code, time.monotonic() - started)
        starved = kills is None or host_oom_kills() != kills
        death = Death(code, said, memory_exceeded=sandbox.memory_exceeded(), host_starved=starved)
        return Outcome(output.ended, cancelled, sandbox.lost, output.flooded, death, found, watched)

    def opened(self, live: Live, sandbox: Sandbox) -> contextlib.AbstractAsyncContextManager[None]:
        assert sandbox.door is not None
        return live.door.open(sandbox.door)

    async def until_over(self, live: Live, sandbox: Sandbox, output: Output) -> None:
        """Waits for the terminal event or the exit. A cancel or a ceiling gets SIGTERM and a moment before the kill."""
        exited, budget = asyncio.create_task(sandbox.wait()), live.door.budget
        events = (live.cancelled, output.over, budget.exhausted)
        waits = [exited, *(asyncio.create_task(event.wait()) for event in events)]
        seconds = budget.ceilings.max_turn_seconds
        try:
            done, _ = await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if not done and seconds is not None:
                budget.fire(f"The turn's ceiling of {seconds} seconds has passed.", "budget_seconds", seconds)
            if output.ended is None and (live.cancelled.is_set() or budget.exhausted.is_set()):
                sandbox.terminate()
                await asyncio.wait({exited}, timeout=GRACE_SECONDS)
        finally:
            for wait in waits:
                wait.cancel()

    def request(self, live: Live, turn_id: str) -> TurnRequest:
        said = [item for item in self.store.items(turn_id) if item.get("role") == "user"]
        text = "\n\n".join(part["text"] for item in said for part in item["content"])
        thread = self.session(live)["_thread"]
        env = live.variables()
        home = self.backend.home(live.room)
        return TurnRequest(live.agent, live.door.bundle, DOOR_URL, live.door.key, text, env, thread, home)

    def apply(self, live: Live, recorder: Recorder, effects: list[Effect]) -> None:
        with self.store.transaction():
            recorder.apply(effects)
            for effect in effects:
                if isinstance(effect, Thread):
                    stored = self.session(live)
                    stored["_thread"] = effect.name
                    self.store.save_session(stored)

    # ── the end of a turn ─────────────────────────────────────────────────────────────────────────

    async def settle(self, live: Live, turn_id: str, recorder: Recorder, outcome: Outcome) -> None:
        calls = live.door.calls
        if live.door.budget.exhausted.is_set():
            self.fail(live, turn_id, failures.budget_failure(live.door.budget.spent), recorder)
        elif outcome.watched.breach is not None:
            await self.give_up(live, turn_id, outcome.watched.breach, recorder)
            outcome.watched.cleared = True
        elif outcome.ended is not None and outcome.ended.error is None:
            await self.complete(live, turn_id, recorder)
        elif outcome.cancelled:
            self.cancel(live, turn_id, recorder)
        elif outcome.lost:
            self.fail(live, turn_id, failures.SANDBOX_LOST, recorder)
        elif outcome.breach is not None:
            self.fail(live, turn_id, failures.limit_failure(outcome.breach), recorder)
        elif outcome.flooded:
            self.fail(live, turn_id, failures.FLOODED, recorder)
        elif outcome.ended is not None:
            self.fail(live, turn_id, failures.turn_failure(calls, outcome.ended.error or ""), recorder)
        elif live.seconds_left() <= 0:  # the launcher killed it then, which the session's timer is about to tell
            self.fail(live, turn_id, failures.EXPIRED, recorder)
        else:
            self.fail(live, turn_id, failures.exit_failure(calls, outcome.death), recorder)

    async def complete(self, live: Live, turn_id: str, recorder: Recorder) -> None:
        blobs = self.blobs(live.session_id)
        try:
            open_up(live.room)
            found = await in_thread(capture, live.room.workspace, OUTPUTS, blobs)
            now = int(time.time())
            with self.store.transaction():
                recorder.abandon()
                self.publish(live, turn_id, found, now)
                recorder.warnings += found.skipped
                self.end(live, turn_id, "completed", recorder, now)
        except CaptureFailed as error:
            self.fail(live, turn_id, failures.capture_failure(str(error)), recorder)
        except OSError as error:
            self.fail(live, turn_id, failures.storage_failure(error.strerror or "I/O error", "capture"), recorder)
        finally:
            await in_thread(blobs.keep, self.store.digests(live.session_id))

    async def give_up(self, live: Live, turn_id: str, over: Breach, recorder: Recorder | None = None) -> None:
        """Ends a session that exceeded its limit of disk, which it could not go on with, and takes the space back."""
        self.fail_environment(live, turn_id, failures.limit_failure(over), recorder)
        await self.remove_room(live)

    async def remove_room(self, live: Live) -> None:
        await in_thread(self.backend.remove_room, live.room.path.name, pool=self.removers)

    def publish(self, live: Live, turn_id: str, found: Capture, now: int) -> None:
        """A later turn publishes a path again only when its content changed."""
        stored, known = self.session(live), self.store.published(live.session_id)
        for file in found.files:
            if known.get(file.path) != file.digest:
                document = artifact_document(new_id(), stored, turn_id, file.path, file.size, now)
                self.store.add_artifact(document, file.digest)

    def cancel(self, live: Live, turn_id: str, recorder: Recorder | None = None) -> None:
        with self.store.transaction():
            if recorder:
                recorder.abandon()
            self.end(live, turn_id, "cancelled", recorder, int(time.time()))

    def fail(self, live: Live, turn_id: str, failure: Failure, recorder: Recorder | None = None) -> None:
        with self.store.transaction():
            if recorder:
                recorder.abandon()
            self.end(live, turn_id, "failed", recorder, int(time.time()), failure)

    def end(
        self,
        live: Live,
        turn_id: str,
        status: str,
        recorder: Recorder | None,
        now: int,
        failure: Failure | None = None,
    ) -> None:
        """The terminal state and its events. A turn that is already over stays as it is."""
        turn = self.turn(live, turn_id)
        if turn["status"] in TERMINAL:
            return
        turn |= {"status": status, "completed_at": now}
        extension = turn["x_agents_core"]
        if recorder is not None:
            usage, observed = live.door.usage()
            turn["usage"] = usage
            extension["usage_source"] = "egress" if live.door.bundle else None
            if usage is None and observed is not None:
                extension["usage_observed"] = observed
            extension["warnings"] = recorder.warnings
        if failure is not None:
            turn["error"] = {**failure.error(), "message": live.door.mask(failure.message)}
            extension["failure"] = failure.record(now)
        self.store.save_turn(turn)
        stored = self.session(live)
        stored["last_active_at"] = now
        add_usage(stored, turn, first=self.store.is_first_turn(turn))
        if stored["spend_control"] is not None:
            stored["spend_control"]["consumed"] = int(live.door.budget.cents)
        self.store.save_session(stored)
        self.turn_event(live, turn, f"turn.{status}", usage=turn["usage"])
        self.session_event(live, "failed" if status == "failed" else "idle")

    def add_span(self, live: Live, turn_id: str, stored_span: Doc) -> None:
        """On a full disk the trace lacks a span; what the turn itself cannot store then ends it."""
        with contextlib.suppress(StorageFailed), self.store.transaction():
            self.store.add_span(live.session_id, turn_id, stored_span)

    def record_preparation(self, live: Live, turn_id: str, stored_span: Doc, seconds: float) -> None:
        """In the trace and in the turn; on a full disk in neither, as with any span."""
        with contextlib.suppress(StorageFailed), self.store.transaction():
            self.store.add_span(live.session_id, turn_id, stored_span)
            turn = self.turn(live, turn_id)
            turn["x_agents_core"]["timings"]["preparing_s"] = round(seconds, 3)
            self.store.save_turn(turn)

    # ── reading and telling ───────────────────────────────────────────────────────────────────────

    def session(self, live: Live) -> Doc:
        stored = self.store.session(live.session_id)
        if stored is None:
            raise KeyError(live.session_id)
        return stored

    def turn(self, live: Live, turn_id: str) -> Doc:
        turn = self.store.one("turns", live.session_id, turn_id)
        if turn is None:
            raise KeyError(turn_id)
        return turn

    def session_event(self, live: Live, name: str) -> None:
        document = session_document(self.session(live), self.store.last_turn(live.session_id))
        self.store.add_event(live.session_id, f"{PREFIX}{name}", {"session": document})

    def turn_event(self, live: Live, turn: Doc, name: str, **members: Any) -> None:
        head = {"session_id": live.session_id, "turn_id": turn["id"], "turn": turn}
        self.store.add_event(live.session_id, f"{PREFIX}{name}", {**head, **members})


def call_span(call: Call) -> Doc:
    """The span of one model call."""
    usage = call.usage or {}
    members = {"http.status": call.status, "problem": call.problem, "error.code": call.error_code}
    tokens = {name: usage.get(name) for name in ("input_tokens", "output_tokens")}
    ended = call.ended_ns or call.started_ns
    return span("call", f"POST {call.path}", call.started_ns, ended, failed=call.failed, **members, **tokens)


class Output:
    """The harness's output on its way to the record, up to its terminal event. Trouble there counts as the end."""

    def __init__(self, reader: OutputReader, limit: int, apply: Callable[[list[Effect]], None]) -> None:
        self.reader = reader
        self.limit = limit
        self.apply = apply
        self.read = 0  # bytes of standard output and error
        self.ended: Ended | None = None
        self.over = asyncio.Event()
        self.parsed = 0  # bytes of lines that were looked into

    @property
    def flooded(self) -> bool:
        return self.parsed > PARSED_BYTES

    @property
    def breach(self) -> Breach | None:
        """Its limit, if more was printed before the terminal event."""
        if self.read <= self.limit or self.ended is not None:
            return None
        message = f"The sandbox printed more than its limit of {self.limit} bytes in a turn."
        return Breach(message, "output_exceeded", {"limit_bytes": self.limit})

    def count(self, size: int) -> None:
        self.read += size
        if self.read > self.limit:
            self.over.set()

    async def follow(self, stream: PipeReader) -> None:
        """Reads to the end of the stream; what comes behind the terminal event is thrown away."""
        lines = Lines(LINE_BYTES) if self.reader.lines else None
        try:
            while chunk := await stream.read(CHUNK_BYTES):
                self.count(len(chunk))
                for piece in lines.feed(chunk) if lines else [chunk]:
                    if not self.flooded and not self.reader.skips(piece):
                        self.parsed += len(piece) + LINE_COST if lines else 0
                        self.take(self.reader.feed(piece))
                if self.flooded:
                    self.over.set()
            if lines and lines.rest and not self.flooded:
                self.take(self.reader.feed(bytes(lines.rest)))
        except BaseException:
            self.over.set()
            raise

    async def tail(self, stream: PipeReader | None, size: int) -> bytes:
        """The last `size` bytes of standard error, read to its end."""
        kept = bytearray()
        while stream is not None and (chunk := await stream.read(CHUNK_BYTES)):
            self.count(len(chunk))
            kept += chunk
            del kept[: max(0, len(kept) - size)]
        return bytes(kept)

    def exited(self, code: int, seconds: float) -> None:
        self.take(self.reader.exited(code, seconds))

    def take(self, effects: Iterator[Effect]) -> None:
        found = [] if self.ended else list(effects)
        if not found:
            return
        self.apply(found)
        self.ended = next((effect for effect in found if isinstance(effect, Ended)), None)
        if self.ended:
            self.over.set()


class Lines:
    """Splits a stream into lines; one that grows beyond `longest` bytes is dropped up to its end."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.rest = bytearray()
        self.skipping = False

    def feed(self, chunk: bytes) -> list[bytes]:
        *lines, rest = chunk.split(b"\n")
        whole = []
        for line in lines:
            if not self.skipping:
                whole.append(bytes(self.rest + line))
            self.rest.clear()
            self.skipping = False
        if not self.skipping:
            self.rest += rest
        if len(self.rest) > self.longest:
            self.rest.clear()
            self.skipping = True
        return whole


async def drain(stream: PipeReader) -> None:
    while await stream.read(CHUNK_BYTES):
        pass


def lay_out(room: Room, files: dict[str, bytes]) -> None:
    """Prepares a room for a turn; may have to remove what an agent put in the place of a file."""
    open_up(room)
    for name, data in files.items():
        install(room.home, name, data, room.uid)
