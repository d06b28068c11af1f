"""What the backends share: a launcher process that forks sandboxes on request, and what it reports of them.

Core talks to it over one SOCK_SEQPACKET socket, a JSON message and some descriptors each way. It ends with Core, and
all sandboxes with it; when it dies by itself, they are lost.

Not here: what a sandbox sees and how it is made (`bubblewrap.py`, `landlock.py` and their launchers).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import socket
import subprocess
import zlib
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from core.sandbox import CONTAINER_SIZES, Command, Limits, Mount, Room, SandboxFailed, SandboxUnavailable
from core.sandbox.launcher import MESSAGE_BYTES
from core.sandbox.limits import Cgroups
from core.sandbox.pipes import PipeReader
from core.sandbox.rooms import make_room, remove_tree
from core.waiting import within

READ_BYTES = 1 << 20
START_SECONDS = 30.0
UID_RANGES = ((1_900_000_000, 100_000), (60_000, 5_000))  # first host uid, how many; the first that is mapped
NICENESS = 5  # of sandboxes whose CPU time no cgroup weighs

S = TypeVar("S", bound="LaunchedSandbox")


class LaunchedSandbox:
    """One sandbox of a launcher: from its start to the end of its last process."""

    stdout: PipeReader

    def __init__(self, backend: LaunchedBackend[Any], name: str, group: Path | None) -> None:
        loop = asyncio.get_running_loop()
        self.backend = backend
        self.name = name
        self.room = ""  # known with the payload
        self.memory = 0  # bytes that the payload may hold
        self.group = group
        self.stderr: PipeReader | None = None
        self.door: socket.socket | None = None
        self.started: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[int] = loop.create_future()
        self.watchdog: asyncio.Task[None] | None = None
        self.exceeded = False
        self.lost = False

    async def watch(self) -> None:
        """Calls `on_exceeded` when the memory is too much; only where no cgroup holds it."""
        raise NotImplementedError

    def under_way(self, report: dict[str, Any]) -> None:
        del report
        if not self.started.done():
            self.started.set_result(None)
        if self.group is None:
            self.watchdog = asyncio.create_task(self.watch())

    def on_exceeded(self) -> None:
        self.exceeded = True
        self.kill()

    def failed(self, message: str) -> None:
        if not self.started.done():
            self.started.set_exception(SandboxFailed(message))

    def finish(self, code: int) -> None:
        self.backend.running.pop(self.name, None)
        self.failed(f"it ended with status {code} before the payload ran")
        if not self.ended.done():
            self.ended.set_result(code)
        if self.watchdog is not None:
            self.watchdog.cancel()
        if self.backend.cgroups is not None and self.group is not None:
            self.exceeded = self.backend.cgroups.oom_kills(self.group) > 0
            self.backend.cgroups.remove(self.group)
        # Nobody may be waiting for a start that failed after its own time-out.
        with contextlib.suppress(BaseException):
            self.started.exception()

    async def wait(self) -> int:
        """The payload's exit status, once every process is gone (negative: a signal ended what holds them)."""
        return await asyncio.shield(self.ended)

    def terminate(self) -> None:
        self.signal("terminate")

    def kill(self) -> None:
        self.signal("kill")

    def signal(self, action: str) -> None:
        if not self.ended.done():
            with contextlib.suppress(SandboxFailed):
                self.backend.send({"action": action, "id": self.name})

    def memory_exceeded(self) -> bool:
        """Whether the memory limit killed something in there; known once it has ended."""
        return self.exceeded


class LaunchedBackend(Generic[S]):
    """A launcher and its sandboxes.

    `data` is the server's directory: rooms lie in `data/rooms`. `mounts` are read-only host paths for harnesses.
    """

    help: ClassVar[str]  # one line with {reason} in it, for a host where this does not work

    def __init__(self, data: Path, mounts: list[Mount]) -> None:
        self.data = data
        self.rooms = data / "rooms"
        self.mounts = mounts
        self.uids = first_uid()
        # Processes are counted by user id, so servers side by side should not hand out the same ones.
        self.first_number = zlib.crc32(os.fsencode(data.resolve()))
        self.cgroups: Cgroups | None = None
        self.running: dict[str, S] = {}
        self.control: socket.socket | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.on_lost: Callable[[], None] = lambda: None
        self.count = 0
        self.outbox: deque[tuple[bytes, list[int]]] = deque()

    # ── the launcher ──────────────────────────────────────────────────────────────────────────────

    async def start_launcher(self, command: list[str], plan: dict[str, Any], folder: Path | None = None) -> None:
        """Starts it by `command` and the number of its socket, and sends it `plan`. Raises SandboxUnavailable."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                cwd=folder,
                env={},
                start_new_session=True,
            )
        ours.setblocking(False)
        self.control = ours
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(ours, json.dumps(plan).encode())
        reply = await asyncio.wait_for(loop.sock_recv(ours, MESSAGE_BYTES), START_SECONDS)
        answer = json.loads(reply or b'{"event": "refused", "message": "the launcher ended"}')
        if answer["event"] != "ready":
            raise SandboxUnavailable(self.help.format(reason=answer["message"]))
        loop.add_reader(ours, self.on_message)

    def send(self, message: dict[str, Any], descriptors: list[int] | None = None) -> None:
        """Sends a request, or keeps it, in order, while the launcher is behind: no kill may be lost."""
        if self.control is None:
            raise SandboxFailed("the launcher is gone")
        data, handed = json.dumps(message).encode(), descriptors or []
        if not self.outbox:
            try:
                socket.send_fds(self.control, [data], handed)
                return
            except BlockingIOError:
                asyncio.get_running_loop().add_writer(self.control, self.flush)
            except OSError as error:
                raise SandboxFailed(f"the launcher does not answer: {error.strerror}") from None
        self.outbox.append((data, [os.dup(descriptor) for descriptor in handed]))  # the caller closes its own

    def flush(self) -> None:
        """Sends what was kept, as far as the launcher takes it."""
        assert self.control is not None
        while self.outbox:
            data, handed = self.outbox[0]
            try:
                socket.send_fds(self.control, [data], handed)
            except BlockingIOError:
                return
            except OSError:
                break  # it is gone, as its end of the socket is about to tell
            self.outbox.popleft()
            for descriptor in handed:
                os.close(descriptor)
        self.drop_outbox()

    def drop_outbox(self) -> None:
        assert self.control is not None
        asyncio.get_running_loop().remove_writer(self.control)
        while self.outbox:
            for descriptor in self.outbox.popleft()[1]:
                os.close(descriptor)

    def on_message(self) -> None:
        """One report of the launcher: a door, a start, a failure, an exit."""
        assert self.control is not None
        try:
            data, descriptors, _, _ = socket.recv_fds(self.control, MESSAGE_BYTES, 1)
        except BlockingIOError:
            return
        except OSError:
            data, descriptors = b"", []
        if not data:
            self.lost()
            return
        report = json.loads(data)
        sandbox = self.running.get(report["id"])
        if sandbox is None:
            for descriptor in descriptors:
                os.close(descriptor)
        elif report["event"] == "door":
            sandbox.door = socket.socket(fileno=descriptors[0])
            sandbox.door.setblocking(False)
        elif report["event"] == "started":
            sandbox.under_way(report)
        elif report["event"] == "failed":
            sandbox.failed(report["message"])
        elif report["event"] == "exit":
            sandbox.finish(report["code"])
            self.on_exit(sandbox)

    def on_exit(self, sandbox: S) -> None:
        """A sandbox is gone."""

    def lost(self) -> None:
        """The launcher died, and all sandboxes with it."""
        assert self.control is not None
        self.drop_outbox()
        asyncio.get_running_loop().remove_reader(self.control)
        self.control.close()
        self.control = None
        for sandbox in list(self.running.values()):
            sandbox.lost = True
            sandbox.failed("the launcher died")
            sandbox.finish(-9)
        self.on_lost()

    async def close(self) -> None:
        """Kills every sandbox and the launcher."""
        if self.control is not None:
            self.on_lost = lambda: None
            self.drop_outbox()
            asyncio.get_running_loop().remove_reader(self.control)
            self.control.close()
        if self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self.process.wait, 10)
            self.process.kill()
        for sandbox in list(self.running.values()):
            sandbox.finish(-9)
        if self.cgroups is not None:
            self.cgroups.close()

    # ── sandboxes ─────────────────────────────────────────────────────────────────────────────────

    async def run(self, command: Command, room: Room, limits: Limits, seconds: float) -> S:
        """Starts a payload, which is killed after `seconds`; returns once it is under way. Raises SandboxFailed."""
        raise NotImplementedError

    async def until_started(self, sandbox: S) -> None:
        """Raises SandboxFailed, with the sandbox killed."""
        try:
            await within(START_SECONDS, asyncio.shield(sandbox.started))
        except asyncio.TimeoutError:
            sandbox.kill()
            raise SandboxFailed(f"the sandbox did not start within {START_SECONDS:g} s") from None
        except BaseException:
            sandbox.kill()
            await asyncio.wait({sandbox.ended}, timeout=START_SECONDS)
            raise

    def bind(self, sandbox: S, room: Room, limits: Limits) -> None:
        """Gives a sandbox what it may use, before its payload runs."""
        if self.cgroups is not None and sandbox.group is not None:
            self.cgroups.limit(sandbox.group, limits)
        sandbox.room, sandbox.memory = room.path.name, limits.memory

    def hand_over(self, sandbox: S, request: dict[str, Any], command: Command, files: list[bytes]) -> None:
        """Sends the launcher a payload: its streams, then `files` in memory. Raises SandboxFailed."""
        pipes = [os.pipe() for _ in range(1 if command.merge_stderr else 2)]
        handed = [memory_file(command.stdin), pipes[0][1], pipes[-1][1], *map(memory_file, files)]
        sandbox.stdout, *errors = [PipeReader(reading) for reading, _ in pipes]
        sandbox.stderr = errors[0] if errors else None
        try:
            self.send(request, handed)
        finally:
            for descriptor in set(handed):
                os.close(descriptor)

    async def inside(self, script: str) -> str:
        """What a shell script prints in a sandbox of its own. Raises SandboxUnavailable when it does not succeed."""
        room = self.make_room("trial", 0)
        try:
            command, limits = Command(["/bin/sh", "-c", script], {}, merge_stderr=True), CONTAINER_SIZES["small"]
            sandbox = await self.run(command, room, limits, START_SECONDS)
            code = await asyncio.wait_for(sandbox.wait(), START_SECONDS)
            printed = (await sandbox.stdout.read(READ_BYTES)).decode(errors="replace")
            if sandbox.door is not None:
                sandbox.door.close()
        except (SandboxFailed, OSError, asyncio.TimeoutError) as error:
            raise SandboxUnavailable(self.help.format(reason=str(error) or "no answer")) from None
        finally:
            self.remove_room("trial")
        if code != 0:
            reason = printed.strip().splitlines()[-1:] or [f"exit status {code}"]
            raise SandboxUnavailable(self.help.format(reason=reason[0]))
        return printed

    def groups_of(self, sandbox_group: Path | None) -> list[str]:
        """The cgroups that a sandbox joins."""
        return self.cgroups.joined(sandbox_group) if self.cgroups and sandbox_group else []

    def shares_cpu(self) -> bool:
        """Whether cgroups bound and share CPU time here."""
        return self.cgroups is not None and self.cgroups.cpu is not None

    # ── rooms ─────────────────────────────────────────────────────────────────────────────────────

    def make_room(self, name: str, number: int) -> Room:
        """The directories of a session. `number` picks the user id that owns them when the server is root."""
        uid = None if self.uids is None else self.uids[0] + (self.first_number + number) % self.uids[1]
        return make_room(self.rooms / name, uid)

    def remove_room(self, name: str) -> None:
        remove_tree(self.rooms / name)

    def rooms_left(self) -> list[str]:
        """Names of rooms on disk, of this server or of an earlier one with the same data directory."""
        return [path.name for path in self.rooms.iterdir()]


def first_uid() -> tuple[int, int] | None:
    """The range of host user ids for sandboxes when the server is root; None when it is not."""
    if os.getuid() != 0:
        return None
    mapped = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    for first, count in UID_RANGES:
        if any(inside <= first and first + count <= inside + size for inside, _, size in mapped):
            return first, count
    raise SandboxUnavailable("no unprivileged user ids are mapped here: run the server as an ordinary user instead.")


def raise_open_files() -> None:
    """Descriptors of this server as far as they go: sandboxes need many, and an agent that shares its user id may send
    so many through sockets that a server with fewer is refused its own (ETOOMANYREFS)."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def memory_file(data: bytes) -> int:
    descriptor = os.memfd_create("stdin", os.MFD_CLOEXEC)
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
