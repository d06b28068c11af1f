"""The Landlock backend, for hosts that forbid namespaces: an ordinary Docker container, a hardened kernel.

A sandbox sees the host's own file system, of which it can open the same programs, a handful of files in `/etc` and
the session's three directories; of the network it has connections to the door, which the supervisor makes for it
(`landlock_launcher.py`), and no other socket. It has a user id of its own when the server is root, no capability, no
privilege to gain, no signal to anybody outside, and fewer system calls than under bubblewrap (`seccomp.py`).

Threat model. As under bubblewrap: no file outside can be read or written, no process signalled, traced or limited, no
socket connected to; no process outlives the turn; memory, processes, file size and descriptors are bounded. Weaker is
what a namespace would hide or make private: `WEAKNESSES`, and without root `SHARED_USER`. They are the one list of it;
doctor prints each, the server their names. Needed are Landlock 6 (Linux 6.12) and libseccomp; without either there is
no sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from core.sandbox import (
    WORKSPACE,
    Command,
    Limits,
    Mount,
    Room,
    SandboxFailed,
    SandboxUnavailable,
    seccomp,
)
from core.sandbox.bubblewrap import PATH, host_interpreters, parts_of
from core.sandbox.landlock_kernel import DEVICE, NEEDED_ABI, READ, READ_WRITE, SECCOMP_NUMBERS, landlock_abi
from core.sandbox.launched import NICENESS, LaunchedBackend, LaunchedSandbox, raise_open_files
from core.sandbox.launcher import DOOR_HOST
from core.sandbox.limits import (
    WATCH_SECONDS,
    Cgroups,
    cpu_seconds,
    limit_traits,
    proportional_bytes,
    resident_bytes,
    rlimits,
)
from core.sandbox.rooms import remove_tree
from core.sandbox.workspace import WorkspaceLink

WEAKNESSES = (
    ("one at a time", f"sandboxes run one after the other, as there is one {WORKSPACE}"),
    ("processes", "names and command lines of all the host's processes can be read in /proc"),
    ("network facts", "the host's addresses, connections and names of sockets can be read, though not used"),
    ("file names", "of a path that is known, existence, size and times can be asked; of a directory that all users may"
     " list, changes can be watched"),
    ("no servers", "programs inside cannot listen, on TCP or Unix sockets, nor use /tmp or /dev/shm, only TMPDIR"),
    ("door", "a port of the host's loopback, where its users can knock: for the model it wants the session's key"),
)  # fmt: skip
SHARED_USER = (
    "user",
    "the agent has the server's: it may change modes and times of that user's files, the server's too",
)
PROGRAMS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
ETC = (
    *("passwd", "group", "hosts", "host.conf", "nsswitch.conf", "localtime", "timezone", "ld.so.cache", "ld.so.conf"),
    *("ld.so.conf.d", "alternatives", "ssl/certs", "ssl/openssl.cnf", "pki/tls/certs", "pki/ca-trust/extracted"),
    *("ca-certificates", "os-release", "services", "protocols", "mime.types", "bash.bashrc", "profile", "inputrc"),
)
DEVICES = ("null", "zero", "full", "random", "urandom")
HELP = "Landlock sandboxes do not work on this host: {reason}."


class LandlockBackend(LaunchedBackend["LandlockSandbox"]):
    """Starts sandboxes through `landlock_launcher.py`, one at a time. Arguments as of the bubblewrap backend."""

    name = "landlock"
    help = HELP
    slots: int | None = 1

    def __init__(self, data: Path, mounts: list[Mount]) -> None:
        super().__init__(data, mounts)
        self.link = WorkspaceLink(self.rooms)
        self.places = {mount.target: str(mount.source) for mount in mounts}
        self.environment: dict[str, str] = {}

    async def start(self) -> None:
        """Takes /workspace, starts the launcher and one trial sandbox. Raises SandboxUnavailable."""
        self.program = required_filter()
        self.rooms.mkdir(parents=True, exist_ok=True)
        raise_open_files()
        interpreters = host_interpreters()
        self.environment = base_environment(interpreters, self.places)
        if self.uids is not None:
            let_users_in(self.data, [self.rooms, *(mount.source for mount in self.mounts)])
        self.link.acquire()
        self.cgroups = await asyncio.to_thread(Cgroups.detect)
        project = Path(__file__).parents[2]
        rules = fixed_rules([mount.source for mount in self.mounts], interpreters, [self.data, project])
        command = [sys.executable, "-S", "-E", "-B", "-m", "core.sandbox.landlock_launcher"]
        await self.start_launcher(command, {"rules": rules}, project)
        await self.inside("exit 0")

    def traits(self) -> list[tuple[str, str, bool]]:
        """(what, how it is done here, whether that is the strong way)."""
        user = "a user id of its own per sandbox" if self.uids else "the server's own user id"
        sandbox = f"Landlock {landlock_abi()} and seccomp on Linux {platform.release()}; {user}"
        held = [("sandbox", sandbox, True), ("system calls", "dangerous calls are refused", True)]
        return [*held, *limit_traits(self.cgroups), *((what, text, False) for what, text in self.weaknesses())]

    def weaknesses(self) -> list[tuple[str, str]]:
        """What holds less than under bubblewrap."""
        return [*WEAKNESSES, *(() if self.uids else (SHARED_USER,))]

    async def close(self) -> None:
        """Kills every sandbox and the launcher, and gives /workspace back."""
        await super().close()
        self.link.release()

    def processes(self) -> dict[str, list[int]]:
        running = [sandbox for sandbox in list(self.running.values()) if sandbox.supervisor]
        return {sandbox.room: [int(path.name) for path in descendants(sandbox.supervisor)] for sandbox in running}

    def home(self, room: Room) -> str:
        return str(room.home)

    # ── one sandbox ───────────────────────────────────────────────────────────────────────────────

    async def run(self, command: Command, room: Room, limits: Limits, seconds: float) -> LandlockSandbox:
        """Starts a payload, which is killed after `seconds`; returns once it is under way. Raises SandboxFailed."""
        if self.running:
            raise SandboxFailed("another sandbox runs, and there is one /workspace")
        self.count += 1
        name = f"{room.path.name}-{self.count}"
        group = self.cgroups.create(name) if self.cgroups else None
        sandbox = self.running[name] = LandlockSandbox(self, name, group)
        try:
            self.launch(sandbox, command, room, limits, seconds)
        except BaseException:
            sandbox.finish(-1)  # the launcher knows nothing of it
            raise
        await self.until_started(sandbox)
        return sandbox

    def launch(self, sandbox: LandlockSandbox, command: Command, room: Room, limits: Limits, seconds: float) -> None:
        """Turns /workspace to the room, opens the door, and hands the payload to the launcher."""
        self.bind(sandbox, room, limits)
        temporary = fresh_temporary(room)
        self.link.turn(room.workspace)
        sandbox.door = open_door()
        request = {
            "action": "start",
            "id": sandbox.name,
            "argv": [self.moved(word) for word in command.argv],
            "env": self.environment | {"HOME": str(room.home), "TMPDIR": str(temporary)} | command.env,
            "directory": str(room.workspace),
            "uid": room.uid,
            "cgroups": self.groups_of(sandbox.group),
            # Processes are counted by user id: with the supervisor, and with all that an ordinary user runs already.
            "rlimits": rlimits(limits)
            | {"RLIMIT_NPROC": limits.processes + (1 if self.uids else own_tasks())}
            | ({} if self.shares_cpu() else {"RLIMIT_CPU": cpu_seconds(limits, seconds)}),
            "nice": 0 if self.shares_cpu() else NICENESS,
            "rules": [(str(path), READ_WRITE) for path in (room.workspace, room.home, temporary)],
            "seconds": max(seconds, 0.0),
            "door": sandbox.door.getsockname()[1],
            "calls": seccomp.numbers("socket", "connect"),
        }
        self.hand_over(sandbox, request, command, [self.program])

    def moved(self, word: str) -> str:
        """A word of the command line, with the real path of the mount that it lies in."""
        for target, source in self.places.items():
            if word == target or word.startswith(f"{target}/"):
                return source + word.removeprefix(target)
        return word


class LandlockSandbox(LaunchedSandbox):
    """One supervisor and all that runs below it."""

    supervisor = 0  # its process id, once it is under way

    def under_way(self, report: dict[str, Any]) -> None:
        self.supervisor = report["supervisor"]
        super().under_way(report)

    async def watch(self) -> None:
        await watch_memory(self.supervisor, self.memory, self.on_exceeded)


# ── what the host offers ──────────────────────────────────────────────────────────────────────────


def required_filter() -> bytes:
    """The seccomp program of these sandboxes. Raises SandboxUnavailable where the kernel or libseccomp is too old."""
    abi, program = landlock_abi(), seccomp.program_of_landlock()
    if abi < NEEDED_ABI:
        has = f"has Landlock {abi}" if abi else "has no Landlock, or it is off (boot with lsm=landlock,…)"
        raise SandboxUnavailable(HELP.format(reason=f"Landlock {NEEDED_ABI} (Linux 6.12) is needed, the kernel {has}"))
    if program is None:
        raise SandboxUnavailable(HELP.format(reason=f"without a filter they have no walls: {seccomp.MISSING}"))
    if platform.machine() not in SECCOMP_NUMBERS:
        raise SandboxUnavailable(HELP.format(reason=f"this server does not know the numbers of {platform.machine()}"))
    return program


def let_users_in(data: Path, paths: list[Path]) -> None:
    """Sandboxes with user ids of their own must be able to reach what they may open. Raises SandboxUnavailable."""
    for file in data.glob("core.db*"):
        file.chmod(0o600)
    for directory in (data, data / "rooms"):
        directory.chmod(0o711)
    for above in {above for path in paths for above in path.parents}:
        if not above.stat().st_mode & stat.S_IXOTH:
            reason = f"other users cannot reach what lies below {above} (run `chmod o+x {above}`, or move it)"
            raise SandboxUnavailable(HELP.format(reason=reason))


def open_door() -> socket.socket:
    """A listener at a free port of the host's loopback, to which the supervisor connects the sandbox's sockets."""
    door = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    door.bind((DOOR_HOST, 0))
    door.listen(128)
    door.setblocking(False)
    return door


def fresh_temporary(room: Room) -> Path:
    """An empty directory for this sandbox's temporary files."""
    temporary = room.path / "tmp"
    remove_tree(temporary)
    temporary.mkdir(0o700)
    if room.uid is not None:
        os.chown(temporary, room.uid, room.uid)
    return temporary


# ── what a sandbox may open ───────────────────────────────────────────────────────────────────────


def fixed_rules(mounts: list[Path], interpreters: list[Path], private: list[Path]) -> list[tuple[str, int]]:
    """Paths that all sandboxes may open, and the rights on what lies beneath."""
    hidden = [Path("/usr/src"), Path("/usr/local/src"), *(path.resolve() for path in private)]
    places = {Path(name).resolve() for name in PROGRAMS if Path(name).is_dir()} - {Path("/")}
    outside_usr = [place for place in places if not place.is_relative_to("/usr")]
    readable = [path for place in (Path("/usr"), *outside_usr) for path in without(place, hidden)]
    readable += [*mounts, *(part for prefix in interpreters for part in parts_of(prefix)), Path("/proc")]
    readable += [path for name in ETC if (path := Path("/etc", name)).exists()]
    devices = [path for name in DEVICES if (path := Path("/dev", name)).exists()]
    return [*((str(path), READ) for path in readable), *((str(path), DEVICE) for path in devices)]


def without(place: Path, hidden: list[Path]) -> Iterator[Path]:
    """Paths that hold all of `place` but what is hidden: Landlock can only grant. Links lead elsewhere."""
    if place in hidden or place.is_symlink():
        return
    if not any(path.is_relative_to(place) for path in hidden):
        yield place
        return
    for child in place.iterdir():
        yield from without(child, hidden)


def base_environment(interpreters: list[Path], places: dict[str, str]) -> dict[str, str]:
    path = [*(places.get(part, part) for part in PATH.split(":")), *(f"{prefix}/bin" for prefix in interpreters)]
    names = {"USER": "agent", "LOGNAME": "agent", "LANG": "C.UTF-8", "SHELL": "/bin/bash", "PWD": WORKSPACE}
    return {"PATH": ":".join(path), **names}


# ── whose processes these are ─────────────────────────────────────────────────────────────────────


def own_tasks() -> int:
    """How many threads run under the server's user id."""
    count = 0
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and entry.stat().st_uid == os.getuid():
                count += sum(1 for _ in (entry / "task").iterdir())
    return count


def descendants(ancestor: int) -> list[Path]:
    """The processes below `ancestor`, which inherits orphans. Anybody may ask for a process's parent."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, IndexError):
            if entry.name.isdigit():
                parent = int((entry / "stat").read_bytes().rpartition(b")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found, waiting = [], [ancestor]
    while waiting:
        below = children.get(waiting.pop(), [])
        waiting += below
        found += [Path(f"/proc/{pid}") for pid in below]
    return found


def held_bytes(supervisor: int, limit: int) -> int:
    """Memory of a sandbox. As in `limits.py` exact above `limit` only, and then where the server may look: where it is
    root without CAP_SYS_PTRACE, as in a container, pages that processes share count for each."""
    processes = descendants(supervisor)
    total = sum(map(resident_bytes, processes))
    if total <= limit:
        return total
    return sum(proportional_bytes(process) or resident_bytes(process) for process in processes)


async def watch_memory(supervisor: int, limit: int, exceeded: Callable[[], None]) -> None:
    """Calls `exceeded` once, when the sandbox holds more than `limit` bytes; ends with the task."""
    while await asyncio.to_thread(held_bytes, supervisor, limit) <= limit:
        await asyncio.sleep(WATCH_SECONDS)
    exceeded()
