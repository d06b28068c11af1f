"""Sandboxes: the only room that starts processes.

`bubblewrap.py` and `landlock.py` are the backends, `backends.py` chooses one; `launcher.py` and `landlock_launcher.py`
are the small processes that fork sandboxes for them; `limits.py` and `disk.py` hold what these may use. Nothing here
knows sessions, harnesses or models: a `Command` goes in, a running `Sandbox` comes out.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from core.sandbox.pipes import PipeReader

HOME = "/home/agent"
WORKSPACE = "/workspace"
OUTPUTS = "/workspace/outputs"


class SandboxUnavailable(Exception):
    """This host cannot run sandboxes; the message is one line that says what to change."""


class SandboxFailed(Exception):
    """One sandbox did not start."""


@dataclass(frozen=True)
class Limits:
    """What one sandbox may use. Bytes, except for `processes`, `cpus` and what is called files.

    `disk` and `files` (directory entries) are those of a session: its room and its artifacts. `output` is what a
    turn may print.
    """

    processes: int
    memory: int
    cpus: int
    file_size: int
    disk: int
    files: int
    temporary: int
    output: int
    open_files: int = 4096


GIB = 1 << 30


def scaled(size: int) -> Limits:
    """The limits of a container size that is `size` times the small one."""
    return Limits(
        processes=256 * size,
        memory=2 * GIB * size,
        cpus=size,
        file_size=GIB * size,
        disk=2 * GIB * size,
        files=200_000 * size,
        temporary=GIB // 2 * size,
        output=GIB * size,
    )


CONTAINER_SIZES: Mapping[str, Limits] = {"small": scaled(1), "medium": scaled(2), "large": scaled(4)}


@dataclass(frozen=True)
class Command:
    """A payload: run by argv (no shell) in /workspace, as the sandbox user, with exactly this environment."""

    argv: list[str]
    env: dict[str, str]
    stdin: bytes = b""
    merge_stderr: bool = False


@dataclass(frozen=True)
class Room:
    """The two directories of a session on the host, both owned by `uid` (None: the server's own user)."""

    path: Path
    uid: int | None

    @property
    def workspace(self) -> Path:
        return self.path / "workspace"

    @property
    def home(self) -> Path:
        return self.path / "home"


class Sandbox(Protocol):
    """A running payload. `wait` returns when every process of the sandbox is gone; `lost`: the host took it down."""

    stdout: PipeReader
    stderr: PipeReader | None
    door: socket.socket | None
    lost: bool

    async def wait(self) -> int: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...

    def memory_exceeded(self) -> bool: ...


@dataclass(frozen=True)
class Mount:
    """A read-only host path that harnesses need inside: `source` appears at `target`."""

    source: Path
    target: str


class Backend(Protocol):
    """A way to run sandboxes: `slots` at a time, None where only the operator bounds them."""

    name: str
    slots: int | None
    on_lost: Callable[[], None]

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def run(self, command: Command, room: Room, limits: Limits, seconds: float) -> Sandbox: ...

    def make_room(self, name: str, number: int) -> Room: ...

    def remove_room(self, name: str) -> None: ...

    def rooms_left(self) -> list[str]: ...

    def processes(self) -> dict[str, list[int]]:
        """The ids of the processes that run now, by the name of their room."""

    def home(self, room: Room) -> str:
        """The path of the room's home directory inside."""
        ...

    async def inside(self, script: str) -> str: ...

    def traits(self) -> list[tuple[str, str, bool]]: ...

    def weaknesses(self) -> list[tuple[str, str]]: ...
