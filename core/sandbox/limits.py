"""Memory, CPU and process limits of a sandbox: cgroup v2 or v1 where they can be written, else a watchdog and rlimits.

Processes are bounded by RLIMIT_NPROC in any case: every sandbox has a user id or a user namespace of its own, so
the kernel counts it alone. Memory has no such limit (RLIMIT_AS breaks node and other runtimes that reserve
address space), hence the watchdog: it adds up the resident memory of the sandbox's processes and kills it above
the limit. It looks twice a second, so an allocation may overshoot by what fits in half a second. What the kernel holds
for the files of a sandbox's tmpfs counts too, as it does in a memory cgroup: nothing else bounds their number.

CPU: a ceiling by size, equal weight among sandboxes, and to all of them together the weight of one process per core,
so that neither the server nor other programs starve. Without cgroups, each process has a ceiling of CPU seconds and
all are nicer than the server: several processes may then use more CPUs than the ceiling says.

Not here: disk (`disk.py`), and output, which whoever reads it counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections.abc import Callable
from pathlib import Path

from core.sandbox import CONTAINER_SIZES, Limits

CGROUP_ROOT = Path("/sys/fs/cgroup")
CPU_PERIOD = 100_000  # microseconds
WATCH_SECONDS = 0.5
TEMPORARY = ("tmp", "dev/shm")
TMPFS_INODE = 1024  # bytes of kernel memory for a file and its name, about
PAGE = os.sysconf("SC_PAGE_SIZE")


class Cgroups:
    """A directory of this server below the cgroup root, with one child per sandbox.

    Version 1 has a hierarchy per controller: `cpu` is the directory in that of CPU time, None where there is none to
    write. Processes are left to RLIMIT_NPROC there.
    """

    def __init__(self, parent: Path, version: int, cpu: Path | None = None) -> None:
        self.parent = parent
        self.version = version
        self.cpu = cpu

    @classmethod
    def detect(cls, root: Path = CGROUP_ROOT) -> Cgroups | None:
        """The first version whose controllers can be written here, or None."""
        name = f"rl-eval-{os.getpid()}"
        for parent, version in ((root / name, 2), (root / "memory" / name, 1)):
            group = cls(parent, version, root / "cpu" / name if version == 1 else parent)
            group.sweep()
            try:
                group.prepare()
            except OSError:
                group.close()
            else:
                return group
        return None

    @property
    def parents(self) -> list[Path]:
        """Its directories, one per hierarchy."""
        return [self.parent] if self.cpu in (None, self.parent) else [self.parent, self.cpu]

    def sweep(self) -> None:
        """Removes what a server left that was killed."""
        for parent in self.parents:
            for left in parent.parent.glob("rl-eval-*"):
                if not Path("/proc", left.name.rpartition("-")[2]).exists():
                    Cgroups(left, self.version).close()

    def prepare(self) -> None:
        if self.version == 2 and not (self.parent.parent / "cgroup.controllers").exists():
            raise FileNotFoundError("no cgroup v2")
        if not self.parent.parent.is_dir():
            raise FileNotFoundError(self.parent.parent)
        self.parent.mkdir()
        if self.version == 2:
            (self.parent / "cgroup.subtree_control").write_text("+memory +pids")
        self.prepare_cpu()
        probe = self.create("probe")
        try:
            self.limit(probe, CONTAINER_SIZES["small"])
        finally:
            self.remove(probe)

    def prepare_cpu(self) -> None:
        """Forgets the controller of CPU time where it cannot be had."""
        cores = os.cpu_count() or 1
        try:
            if self.version == 2:
                (self.parent / "cgroup.subtree_control").write_text("+cpu")
                (self.parent / "cpu.weight").write_text(str(min(100 * cores, 10_000)))
            elif self.cpu is not None:
                self.cpu.mkdir()
                (self.cpu / "cpu.shares").write_text(str(min(1024 * cores, 1 << 18)))
                (self.cpu / "cpu.cfs_quota_us").write_text("-1")  # not there in a kernel without bandwidth control
        except OSError:
            if self.version == 1 and self.cpu is not None:
                self.remove_empty(self.cpu)
            self.cpu = None

    def create(self, name: str) -> Path:
        """Makes the group of one sandbox, unlimited; a process joins by writing itself to cgroup.procs of all its
        `joined`."""
        group = self.parent / name
        for directory in self.joined(group):
            Path(directory).mkdir()
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
        self.limit_cpu(group.name, limits.cpus * CPU_PERIOD)

    def limit_cpu(self, name: str, quota: int) -> None:
        """`quota`: microseconds of CPU time per CPU_PERIOD."""
        if self.cpu is None:
            return
        if self.version == 2:
            (self.cpu / name / "cpu.max").write_text(f"{quota} {CPU_PERIOD}")
        else:
            (self.cpu / name / "cpu.cfs_period_us").write_text(str(CPU_PERIOD))
            (self.cpu / name / "cpu.cfs_quota_us").write_text(str(quota))

    def joined(self, group: Path) -> list[str]:
        """The directories of a sandbox's group, one per hierarchy."""
        return [str(parent / group.name) for parent in self.parents]

    def oom_kills(self, group: Path) -> int:
        """How many processes the kernel has killed in there for want of memory."""
        file = "memory.events" if self.version == 2 else "memory.oom_control"
        with contextlib.suppress(OSError):
            for line in (group / file).read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
        return 0

    def remove(self, group: Path) -> None:
        for directory in self.joined(group):
            self.remove_empty(Path(directory))

    def remove_empty(self, directory: Path) -> None:
        with contextlib.suppress(OSError):
            directory.rmdir()

    def close(self) -> None:
        for parent in self.parents:
            for child in list(parent.iterdir()) if parent.is_dir() else []:
                self.remove_empty(child)
            self.remove_empty(parent)


def held_bytes(namespace: str, limit: int) -> int:
    """Memory of all processes in a PID namespace, given by its name in /proc/*/ns/pid, and of their tmpfs's files.

    Cheap and too much at first, as pages that processes share count for each. Exact when that exceeds `limit`.
    """
    processes = [entry for entry in Path("/proc").iterdir() if entry.name.isdigit() and inside(entry, namespace)]
    kept = max(map(temporary_bytes, processes[:1]), default=0)  # all of them see the same
    total = kept + sum(map(resident_bytes, processes))
    return total if total <= limit else kept + sum(map(proportional_bytes, processes))


def temporary_bytes(process: Path) -> int:
    """What the kernel holds for the files that a process sees in its tmpfs. Their content is bounded by its size."""
    total = 0
    for place in TEMPORARY:
        with contextlib.suppress(OSError):
            seen = process / "root" / place
            if seen.stat().st_dev != Path("/", place).stat().st_dev:  # else it is the host's: bwrap is not done yet
                about = os.statvfs(seen)
                total += (about.f_files - about.f_ffree) * TMPFS_INODE
    return total


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


def rlimits(limits: Limits) -> dict[str, int]:
    return {
        "RLIMIT_NPROC": limits.processes,
        "RLIMIT_FSIZE": limits.file_size,
        "RLIMIT_NOFILE": limits.open_files,
        "RLIMIT_CORE": 1,  # at 0 the kernel still starts the host's program that collects core dumps, if there is one
    }


def cpu_seconds(limits: Limits, seconds: float) -> int:
    """The most CPU time that a payload of so many seconds could use within its ceiling."""
    return max(1, math.ceil(seconds * limits.cpus))


def limit_traits(cgroups: Cgroups | None) -> list[tuple[str, str, bool]]:
    """How the limits hold here that are the same for every backend, as `traits` tells them."""
    version = f"cgroup v{cgroups.version}" if cgroups else ""
    counted = "cgroup v2 and rlimit" if version == "cgroup v2" else "rlimit, counted per sandbox"
    shared = cgroups is not None and cgroups.cpu is not None
    cpu = version if shared else "rlimit per process, and lower priority: several may exceed the ceiling"
    return [
        ("processes", counted, True),
        ("memory", version or "a watchdog that looks twice a second", bool(version)),
        ("cpu", cpu, shared),
        ("open files", "rlimit per process", True),
        ("file size", "rlimit", True),
    ]
