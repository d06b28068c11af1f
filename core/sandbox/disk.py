"""The disk that sandboxes may use: a limit per session, and a floor of free space for the whole machine.

No quota of a file system is assumed, so this is a watchdog. Five times a second it asks how full the file system of the
data directory is, which costs nothing. It measures a session's directories only when the file system grew by half of
what that session has left since it was last measured, and every MASKED_SECONDS, as others may free what one fills. So
the measurings become frequent where the limit is near. A sandbox has no `fallocate` (`seccomp.py`): space is taken no
faster than it is written.

Counted are blocks, not lengths: a sparse file counts what it holds, a hard-linked one once, and one that was deleted as
long as a process of the sandbox has it open. Not seen, neither by the limit nor by the floor: deleted files that are
only mapped or on their way through a socket. They are gone with the sandbox. What is written between two looks may
exceed a limit; when the floor is reached, whoever grew most is killed.

Not here: how a sandbox is killed, and what becomes of its turn. The tmpfs of a sandbox is memory (`limits.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from core.sandbox import Limits
from core.sandbox.rooms import walk

LOOK_SECONDS = 0.2
MASKED_SECONDS = 5.0
STEP_BYTES, STEP_FILES = 16 << 20, 1024  # growth that is never worth a look
REST, SHORT_REST = 10, 2  # a measuring is not repeated before so many times what it took; short: the limit may be hit
MEASURE_SECONDS = 5.0  # of CPU time
FLOOR_SHARE, LEAST_FLOOR, MOST_FLOOR, MOST_SHARE = 0.02, 1 << 30, 8 << 30, 0.25
GROWER_BYTES, GROWER_FILES = 64 << 20, 16_384  # who grew by less did not fill the machine
RELIEF_SECONDS = 10.0

log = logging.getLogger("core")


@dataclass(frozen=True)
class Usage:
    bytes: int = 0
    files: int = 0  # directory entries

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.bytes + other.bytes, self.files + other.files)

    def __sub__(self, other: Usage) -> Usage:
        return Usage(self.bytes - other.bytes, self.files - other.files)


@dataclass(frozen=True)
class Breach:
    """A limit of a sandbox that was exceeded: a sentence for people, and a word and numbers for programs."""

    message: str
    reason: str
    params: dict[str, int]


@dataclass(frozen=True)
class Host:
    """How full a file system is. File systems without a fixed number of files report none; they never lack any."""

    used: Usage
    free: Usage
    total: Usage

    @classmethod
    def of(cls, path: Path) -> Host:
        about = os.statvfs(path)
        used = Usage((about.f_blocks - about.f_bfree) * about.f_frsize, about.f_files - about.f_ffree)
        free = Usage(about.f_bavail * about.f_frsize, about.f_favail)
        return cls(used, free, Usage(about.f_blocks * about.f_frsize, about.f_files))

    @property
    def floor(self) -> Usage:
        """2 %, but of bytes no less than 1 GiB and no more than 8 GiB; never more than a quarter."""
        share = min(max(LEAST_FLOOR, int(self.total.bytes * FLOOR_SHARE)), MOST_FLOOR)
        return Usage(min(share, int(self.total.bytes * MOST_SHARE)), int(self.total.files * FLOOR_SHARE))

    @property
    def short(self) -> bool:
        return self.free.bytes < self.floor.bytes or self.free.files < self.floor.files


def breach(usage: Usage, limits: Limits) -> Breach | None:
    if usage.bytes > limits.disk:
        message = f"The session's files exceeded its disk limit of {limits.disk} bytes."
        return Breach(message, "disk_exceeded", {"limit_bytes": limits.disk})
    if usage.files > limits.files:
        message = f"The session exceeded its limit of {limits.files} files."
        return Breach(message, "disk_exceeded", {"limit_files": limits.files})
    return None


def measure(directories: Iterable[Path], limits: Limits) -> Usage:
    """What lies below the directories; no further than to the limits, nor than MEASURE_SECONDS."""
    size = count = 0
    linked: set[int] = set()
    started = time.thread_time()
    for directory in directories:
        with contextlib.closing(walk(directory)) as entries:
            for about in entries:
                count += 1
                if about.st_nlink == 1 or stat.S_ISDIR(about.st_mode):
                    size += about.st_blocks * 512
                elif about.st_ino not in linked:
                    linked.add(about.st_ino)
                    size += about.st_blocks * 512
                if count > limits.files or size > limits.disk:
                    return Usage(size, count)
                if count % STEP_FILES == 0 and time.thread_time() - started > MEASURE_SECONDS:
                    return Usage(size, count)
    return Usage(size, count)


def deleted(processes: Iterable[int], device: int) -> Usage:
    """What deleted files on that device hold that the processes have open."""
    found: dict[int, int] = {}
    for descriptor in descriptors(processes):
        with contextlib.suppress(OSError):
            about = descriptor.stat()
            if about.st_nlink == 0 and about.st_dev == device:
                found[about.st_ino] = about.st_blocks * 512
    return Usage(sum(found.values()), len(found))


def descriptors(processes: Iterable[int]) -> Iterator[Path]:
    for pid in processes:
        with contextlib.suppress(OSError):
            yield from Path(f"/proc/{pid}/fd").iterdir()


@dataclass(eq=False)
class Watched:
    """A sandbox that runs. `usage` is what its session held when the host looked like `seen`, `first` at its start."""

    name: str
    directories: tuple[Path, ...]
    limits: Limits
    kill: Callable[[], None]
    first: Usage
    seen: Usage
    usage: Usage = field(init=False)
    measured: float = field(default_factory=time.monotonic)
    took: float = 0.0
    breach: Breach | None = None
    cleared: bool = False  # what a sandbox that was killed held is gone

    def __post_init__(self) -> None:
        self.usage = self.first

    @property
    def growth(self) -> Usage:
        return self.usage - self.first

    def due(self, used: Usage, now: float) -> bool:
        grown, left = used - self.seen, Usage(self.limits.disk, self.limits.files) - self.usage
        urgent = grown.bytes >= left.bytes or grown.files >= left.files
        worth = grown.bytes >= max(STEP_BYTES, left.bytes // 2) or grown.files >= max(STEP_FILES, left.files // 2)
        rest = self.took * (SHORT_REST if urgent else REST)
        return (worth or now - self.measured >= MASKED_SECONDS) and now - self.measured >= rest

    def end(self, found: Breach) -> None:
        if self.breach is None:
            self.breach = found
            self.kill()


class DiskWatcher:
    """Watches the sandboxes it is told of. `processes` tells what runs, by the names under which they are watched."""

    def __init__(self, root: Path, processes: Callable[[], Mapping[str, list[int]]]) -> None:
        self.root = root
        self.processes = processes
        self.watched: list[Watched] = []
        self.victim: Watched | None = None
        self.victim_at = -math.inf
        self.task: asyncio.Task[None] | None = None
        self.thread = ThreadPoolExecutor(1, "disk")  # one, so that measuring never takes more than one core

    def short(self) -> bool:
        """Whether the machine is down to its floor of free space."""
        return Host.of(self.root).short

    @contextlib.contextmanager
    def watching(
        self, name: str, directories: tuple[Path, ...], limits: Limits, kill: Callable[[], None], held: Usage
    ) -> Iterator[Watched]:
        """Watches what a sandbox writes below the directories, which hold `held`, and kills it over its limits."""
        watched = Watched(name, directories, limits, kill, held, Host.of(self.root).used)
        self.watched.append(watched)
        if self.task is None or self.task.done():
            self.task = asyncio.create_task(self.run())
        try:
            yield watched
        finally:
            self.watched.remove(watched)

    async def run(self) -> None:
        """Looks until nothing runs any more."""
        while self.watched:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self.look()
            except OSError as error:
                log.error("the disk cannot be watched: %s", error)

    async def look(self) -> None:
        host, now = Host.of(self.root), time.monotonic()
        due = [watched for watched in self.watched if watched.due(host.used, now)]
        await self.update(due, host)
        if host.short and not self.relief_is_near(now):
            await self.update([watched for watched in self.watched if watched not in due], host)
            self.relieve(host, now)

    async def update(self, due: list[Watched], host: Host) -> None:
        """Measures, the quick ones first, and ends what is over its limits."""
        if not due:
            return
        loop = asyncio.get_running_loop()
        hidden = await loop.run_in_executor(self.thread, self.deleted, {watched.name for watched in due})
        for watched in sorted(due, key=lambda watched: watched.took):
            started = time.monotonic()
            found = await loop.run_in_executor(self.thread, measure, watched.directories, watched.limits)
            watched.usage = found + hidden.get(watched.name, Usage())
            watched.seen, watched.measured = host.used, time.monotonic()
            watched.took = watched.measured - started
            if (over := breach(watched.usage, watched.limits)) is not None:
                watched.end(over)

    def deleted(self, names: set[str]) -> dict[str, Usage]:
        device = self.root.stat().st_dev
        return {name: deleted(pids, device) for name, pids in self.processes().items() if name in names}

    def relief_is_near(self, now: float) -> bool:
        """Whether the space of one that was killed is still to come back."""
        return self.victim is not None and not self.victim.cleared and now - self.victim_at < RELIEF_SECONDS

    def relieve(self, host: Host, now: float) -> None:
        """Ends the one that grew most of what the machine lacks."""
        lacks_bytes = host.free.bytes < host.floor.bytes

        def grown(watched: Watched) -> int:
            return watched.growth.bytes if lacks_bytes else watched.growth.files

        growers = [watched for watched in self.watched if watched.breach is None]
        most = max(growers, key=grown, default=None)
        if most is None or grown(most) < (GROWER_BYTES if lacks_bytes else GROWER_FILES):
            return
        self.victim, self.victim_at = most, now
        what, floor = ("bytes", host.floor.bytes) if lacks_bytes else ("files", host.floor.files)
        lack = f"The machine's disk has less than {floor} {what} free"
        message = f"{lack}, and this sandbox grew most: by {grown(most)} {what}."
        most.end(Breach(message, "disk_exceeded", {f"floor_{what}": floor}))
