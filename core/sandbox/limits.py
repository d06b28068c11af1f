"""Memory and process limits of a sandbox: cgroup v2 or v1 where they can be written, else a watchdog.

Processes are bounded by RLIMIT_NPROC in any case: every sandbox has a user id or a user namespace of its own, so
the kernel counts it alone. Memory has no such limit (RLIMIT_AS breaks node and other runtimes that reserve
address space), hence the watchdog: it adds up the resident memory of the sandbox's processes and kills it above
the limit. It looks twice a second, so an allocation may overshoot by what fits in half a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from core.sandbox import Limits

CGROUP_ROOT = Path("/sys/fs/cgroup")
WATCH_SECONDS = 0.5
PAGE = os.sysconf("SC_PAGE_SIZE")


class Cgroups:
    """A directory of this server below the cgroup root, with one child per sandbox.

    Version 1 has a hierarchy per controller; there RLIMIT_NPROC alone counts processes, as a second controller would
    cost each sandbox a millisecond.
    """

    def __init__(self, parent: Path, version: int) -> None:
        self.parent = parent
        self.version = version

    @classmethod
    def detect(cls) -> Cgroups | None:
        """The first version whose controllers can be written here, or None."""
        name = f"rl-eval-{os.getpid()}"
        for parent, version in ((CGROUP_ROOT / name, 2), (CGROUP_ROOT / "memory" / name, 1)):
            group = cls(parent, version)
            group.sweep()
            try:
                group.prepare()
            except OSError:
                group.close()
            else:
                return group
        return None

    def sweep(self) -> None:
        """Removes what a server left that was killed."""
        for left in self.parent.parent.glob("rl-eval-*"):
            if not Path("/proc", left.name.rpartition("-")[2]).exists():
                Cgroups(left, self.version).close()

    def prepare(self) -> None:
        if self.version == 2 and not (CGROUP_ROOT / "cgroup.controllers").exists():
            raise FileNotFoundError("no cgroup v2")
        if not self.parent.parent.is_dir():
            raise FileNotFoundError(self.parent.parent)
        self.parent.mkdir()
        if self.version == 2:
            (self.parent / "cgroup.subtree_control").write_text("+memory +pids")
        probe = self.create("probe")
        try:
            self.limit(probe, Limits(16, 1 << 26, 0, 0))
        finally:
            self.remove(probe)

    def create(self, name: str) -> Path:
        """Makes the group of one sandbox, unlimited; a process joins by writing itself to its cgroup.procs."""
        group = self.parent / name
        group.mkdir()
        return group

    def limit(self, group: Path, limits: Limits) -> None:
        if self.version == 2:
            (group / "pids.max").write_text(str(limits.processes))
            (group / "memory.max").write_text(str(limits.memory))
            optional = {"memory.swap.max": "0", "memory.oom.group": "0"}
        else:
            (group / "memory.limit_in_bytes").write_text(str(limits.memory))
            optional = {"memory.memsw.limit_in_bytes": str(limits.memory)}
        for file, value in optional.items():
            with contextlib.suppress(OSError):
                (group / file).write_text(value)

    def oom_kills(self, group: Path) -> int:
        """How many processes the kernel has killed in there for want of memory."""
        file = "memory.events" if self.version == 2 else "memory.oom_control"
        with contextlib.suppress(OSError):
            for line in (group / file).read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
        return 0

    def remove(self, group: Path) -> None:
        with contextlib.suppress(OSError):
            group.rmdir()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            for child in self.parent.iterdir():
                if child.is_dir():
                    child.rmdir()
        with contextlib.suppress(OSError):
            self.parent.rmdir()


def held_bytes(namespace: str, limit: int) -> int:
    """Memory of all processes in a PID namespace, given by its name in /proc/*/ns/pid.

    Cheap and too much at first, as pages that processes share count for each. Exact when that exceeds `limit`.
    """
    processes = [entry for entry in Path("/proc").iterdir() if entry.name.isdigit() and inside(entry, namespace)]
    total = sum(map(resident_bytes, processes))
    return total if total <= limit else sum(map(proportional_bytes, processes))


def inside(process: Path, namespace: str) -> bool:
    with contextlib.suppress(OSError):
        return str((process / "ns/pid").readlink()) == namespace
    return False


def resident_bytes(process: Path) -> int:
    with contextlib.suppress(OSError, IndexError):
        return int((process / "statm").read_text().split()[1]) * PAGE
    return 0


def proportional_bytes(process: Path) -> int:
    """Resident memory of a process, each page divided by how many processes share it."""
    with contextlib.suppress(OSError):
        for line in (process / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    return 0


async def watch_memory(namespace: str, limit: int, exceeded: Callable[[], None]) -> None:
    """Calls `exceeded` once, when the namespace holds more than `limit` bytes; ends with the task."""
    while await asyncio.to_thread(held_bytes, namespace, limit) <= limit:
        await asyncio.sleep(WATCH_SECONDS)
    exceeded()
