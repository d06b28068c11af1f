"""The process that starts sandboxes: single-threaded, standard library only, forked from once per sandbox.

Core talks to it over one SOCK_SEQPACKET socket. A sandbox takes two requests. `prepare` forks a child, which joins its
cgroup and makes its network namespace; the answer brings the listening socket of the door, opened on that namespace's
loopback. Then the child waits. `start` names the payload and brings its stdin, stdout and stderr, a file of bwrap's
options (in argv the sandbox could read them from /proc/1/cmdline) and a seccomp filter. So all that takes long and
does not depend on the payload can be done before there is one. A child serves one `start`, then it is that sandbox.

Invariants:
- Nothing started here outlives the launcher, and the launcher does not outlive Core. It is the first process of a
  PID namespace, so the kernel kills all in there with it; it ends at end of file on the socket, and by
  PR_SET_PDEATHSIG. (The sandboxes' own PR_SET_PDEATHSIG would not do: an agent may trace the first process of its
  sandbox and clear it.)
- An exit is reported only when the whole process tree of the sandbox is gone: when bwrap and the first process of
  the PID namespace are, whose end the kernel delays until it has killed all others.
- What a sandbox may mount is staged once, by descriptor, in a private mount namespace. So binaries below a home
  directory of mode 0700 can be mounted although bwrap itself runs unprivileged.

Not here: which command runs, what it may see, cgroups (`bubblewrap.py`, `limits.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import math
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OPTIONS_FD, FILTER_FD, STATUS_FD = 3, 4, 5  # in the process that becomes bwrap
STAGE = "/tmp"  # covered by a tmpfs in the launcher's own mount namespace only
DOOR_HOST, DOOR_PORT = "127.0.0.1", 4141
MESSAGE_BYTES = 1 << 20
KILL_AGAIN_SECONDS, LONGEST_POLL_MS = 1.0, 1 << 30

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x00020000, 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18
MS_RELATIME, ST_RELATIME = 1 << 21, 4096
PR_SET_PDEATHSIG = 1
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1

libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: Any) -> None:
    """Calls a libc function that returns 0; raises OSError with its name otherwise."""
    if getattr(libc, name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def bind(descriptor: int, target: str) -> None:
    call("mount", f"/proc/self/fd/{descriptor}".encode(), target.encode(), None, MS_BIND | MS_REC, None)


def make_read_only(target: str) -> None:
    """A remount must repeat the mount's other flags, which nobody but root may clear."""
    flags = os.statvfs(target).f_flag
    flags = flags & ~ST_RELATIME | (MS_RELATIME if flags & ST_RELATIME else 0)
    call("mount", None, target.encode(), None, MS_REMOUNT | MS_BIND | MS_RDONLY | flags, None)


def unshare(flags: int) -> None:
    """New namespaces. Without root they need a user namespace first, which maps nobody but the caller.

    The one around each sandbox also makes RLIMIT_NPROC count that sandbox alone.
    """
    uid, gid = os.getuid(), os.getgid()
    if uid == 0:
        call("unshare", flags)
        return
    call("unshare", CLONE_NEWUSER | flags)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


def stage(sources: dict[str, str], writable: list[str], masks: list[str]) -> None:
    """Mounts each host path of `sources` (target below STAGE → host path) on a tmpfs at STAGE.

    All but the targets in `writable` become read-only. `masks` are directories below STAGE that become empty.
    """
    held = {target: os.open(source, os.O_PATH) for target, source in sources.items()}
    call("mount", b"tmpfs", STAGE.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, b"mode=0755,size=1m")
    for target, descriptor in held.items():
        place = Path(STAGE, target)
        if Path(f"/proc/self/fd/{descriptor}").is_dir():
            place.mkdir(parents=True, exist_ok=True)
        else:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.touch()
        bind(descriptor, str(place))
        os.close(descriptor)
        # bwrap runs from here and stays open to the sandbox as /proc/1/exe: an unprivileged server's own file.
        if target not in writable:
            make_read_only(str(place))
    for mask in masks:
        call("mount", b"tmpfs", f"{STAGE}/{mask}".encode(), b"tmpfs", MS_NOSUID | MS_NODEV, b"mode=0755,size=0")


def open_door() -> socket.socket:
    """Raises the loopback of a new network namespace and listens there: the sandbox's only way out."""
    unshare(CLONE_NEWNET)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("16sH14x", b"lo", 0)
        (flags,) = struct.unpack("16xH14x", fcntl.ioctl(probe, SIOCGIFFLAGS, request))
        fcntl.ioctl(probe, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | IFF_UP))
    door = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    door.bind((DOOR_HOST, DOOR_PORT))
    door.listen(128)
    return door


def limit(name: str, value: int) -> None:
    kind = getattr(resource, name)
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def namespace_of(pid: int) -> str:
    """The PID namespace of a process by its name, which is the same for all; empty when it is gone."""
    try:
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    except OSError:
        return ""


def get_ready(request: dict[str, Any], control: socket.socket) -> None:
    """In the forked child: what takes long and is the same for all payloads."""
    os.setsid()
    for group in request["cgroups"]:
        # Unbuffered: after a fork, what a text file object touches costs half a millisecond in page faults.
        members = os.open(f"{group}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
        os.write(members, b"0")  # may wait for all processors: 20 ms and more
        os.close(members)
    with open_door() as door:
        reply = {"id": request["id"], "event": "door"}
        socket.send_fds(control, [json.dumps(reply).encode()], [door.fileno()])


def become(request: dict[str, Any], handed: list[int], status: int) -> None:
    """In the child that has its request: confines itself step by step, then turns into bwrap. Never returns."""
    os.nice(request["nice"])
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 64) for descriptor in (*handed, status)]
    for number, descriptor in enumerate(high):
        os.dup2(descriptor, number)
    os.closerange(STATUS_FD + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    if request["uid"] is not None:
        os.setgroups([])
        os.setresgid(request["uid"], request["uid"], request["uid"])
        os.setresuid(request["uid"], request["uid"], request["uid"])
    for name, value in request["rlimits"].items():
        limit(name, value)
    os.umask(0o022)
    bwrap = request["bwrap"]
    os.execve(
        bwrap,
        [bwrap, "--args", str(OPTIONS_FD), "--json-status-fd", str(STATUS_FD), "--", *request["argv"]],
        {},
    )


@dataclass
class Child:
    """One sandbox, or one to be: `orders` takes its payload, once. `first` is the first process of its PID namespace,
    known once bwrap has told it."""

    name: str
    bwrap: int
    status: int
    orders: socket.socket | None
    told: bytes = b""
    first: int | None = None
    doomed: bool = False
    code: int | None = None
    deadline: float = math.inf  # monotonic seconds


class Launcher:
    """Sandboxes by request id; one thread, one poll loop."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.children: dict[str, Child] = {}
        self.poll = select.poll()

    def send(self, message: dict[str, Any]) -> None:
        self.control.send(json.dumps(message).encode())

    def prepare(self, request: dict[str, Any]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        reading, writing = os.pipe()
        try:
            pid = os.fork()
        except OSError as error:  # the host's limit of processes: this sandbox fails, the others live
            for descriptor in (reading, writing, ours.detach(), theirs.detach()):
                os.close(descriptor)
            self.send({"id": request["id"], "event": "failed", "message": str(error)})
            self.send({"id": request["id"], "event": "exit", "code": -1})
            return
        if pid == 0:
            try:
                get_ready(request, self.control)
                order, handed, _, _ = socket.recv_fds(theirs, MESSAGE_BYTES, STATUS_FD)
                become(json.loads(order), handed, writing)
            except BaseException as error:
                with contextlib.suppress(OSError):
                    os.write(writing, json.dumps({"failed": str(error)}).encode() + b"\n")
            finally:
                os._exit(126)
        theirs.close()
        os.close(writing)
        self.children[request["id"]] = Child(request["id"], pid, reading, ours)
        self.poll.register(reading, select.POLLIN)

    def start(self, child: Child | None, order: bytes, seconds: float, handed: list[int]) -> None:
        """Passes the request on to the child that waits for it; when that has died, its end is told as any other."""
        if child is not None and child.orders is not None:
            with child.orders, contextlib.suppress(BrokenPipeError, ConnectionResetError):
                socket.send_fds(child.orders, [order], handed)
            child.orders = None
            child.deadline = time.monotonic() + seconds
        for descriptor in handed:
            os.close(descriptor)

    def read_status(self, child: Child) -> None:
        """bwrap writes its status lines in pieces; only whole ones count."""
        data = os.read(child.status, 4096)
        if not data:
            self.poll.unregister(child.status)
            os.close(child.status)
            child.status = -1
        *lines, child.told = (child.told + data).split(b"\n")
        for line in lines:
            report = json.loads(line)
            if "child-pid" in report:
                child.first = report["child-pid"]
                self.send({"id": child.name, "event": "started", "namespace": namespace_of(child.first)})
                if child.doomed:
                    self.kill(child)
            elif "failed" in report:
                self.send({"id": child.name, "event": "failed", "message": report["failed"]})

    def terminate(self, child: Child) -> None:
        """SIGTERM to the payload: the only process that the namespace's first one started itself."""
        with contextlib.suppress(OSError, IndexError):
            children = Path(f"/proc/{child.first}/task/{child.first}/children").read_text()
            os.kill(int(children.split()[0]), signal.SIGTERM)

    def kill(self, child: Child) -> None:
        """SIGKILL to the namespace's first process, hence to all; as soon as it is known. Without bwrap, which may
        have made it and not told yet, it would live on."""
        child.doomed = True
        if child.orders is not None:
            os.kill(child.bwrap, signal.SIGKILL)
        elif child.first is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.first, signal.SIGKILL)

    def reap(self) -> None:
        """Reports the sandboxes of which nothing is left."""
        for child in list(self.children.values()):
            if child.code is None:
                pid, status = os.waitpid(child.bwrap, os.WNOHANG)
                if pid == 0:
                    continue
                while child.status >= 0:
                    self.read_status(child)
                child.code = os.waitstatus_to_exitcode(status)
                self.kill_orphans()
            if child.first is None or self.gone(child.first):
                del self.children[child.name]
                if child.orders is not None:
                    child.orders.close()
                self.send({"id": child.name, "event": "exit", "code": child.code})

    def kill_orphans(self) -> None:
        """Ends what lost its bwrap: killed early, that leaves behind a first process that waits for it for ever."""
        bwraps = {child.bwrap for child in self.children.values() if child.code is None}
        firsts = {child.first for child in self.children.values()}
        for pid in map(int, Path("/proc/self/task/1/children").read_text().split()):
            if pid not in bwraps:
                os.kill(pid, signal.SIGKILL)
                if pid not in firsts:
                    os.waitpid(pid, 0)

    def gone(self, first: int) -> bool:
        """bwrap may end before the namespace's first process does, which the launcher then inherits."""
        try:
            pid, _ = os.waitpid(first, os.WNOHANG)
        except ChildProcessError:
            return True
        return pid != 0

    def receive(self) -> bool:
        """Handles one request of Core; False at end of file."""
        data, descriptors, _, _ = socket.recv_fds(self.control, MESSAGE_BYTES, STATUS_FD)
        if not data:
            return False
        request = json.loads(data)
        action, child = request["action"], self.children.get(request["id"])
        if action == "prepare":
            self.prepare(request)
        elif action == "start":
            self.start(child, data, request["seconds"], descriptors)
        elif child is not None:
            (self.terminate if action == "terminate" else self.kill)(child)
        return True

    def run(self) -> None:
        wake_reading, wake_writing = os.pipe()
        os.set_blocking(wake_writing, False)
        os.set_blocking(wake_reading, False)
        signal.set_wakeup_fd(wake_writing, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.poll.register(self.control, select.POLLIN)
        self.poll.register(wake_reading, select.POLLIN)
        while True:
            for descriptor, _ in self.poll.poll(self.next_deadline_ms()):
                if descriptor == self.control.fileno():
                    if not self.receive():
                        return
                elif descriptor == wake_reading:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake_reading, 4096)
                    self.reap()
                else:
                    for child in self.children.values():
                        if child.status == descriptor:
                            self.read_status(child)

    def next_deadline_ms(self) -> int | None:
        """Kills what has outlived its deadline, also when Core no longer asks for it; returns how long to wait."""
        now = time.monotonic()
        for child in self.children.values():
            if child.deadline <= now:
                self.kill(child)
                child.deadline = now + KILL_AGAIN_SECONDS
        first = min((child.deadline for child in self.children.values()), default=math.inf)
        return None if first == math.inf else min(int((first - now) * 1000) + 1, LONGEST_POLL_MS)


def become_first(control: socket.socket) -> None:
    """Goes on as the first process of a new PID namespace; the caller waits outside for its end."""
    unshare(CLONE_NEWNS | CLONE_NEWPID)
    pid = os.fork()
    if pid != 0:
        control.close()
        _, status = os.waitpid(pid, 0)
        os._exit(status != 0)
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
    call("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    call("mount", b"proc", b"/proc", b"proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, None)


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(number, lambda *_: None)  # ignored, but unlike by SIG_IGN not in what a child becomes
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
    os.chdir("/")  # bwrap keeps the name of its directory in memory, where the sandbox can read it
    plan = json.loads(control.recv(MESSAGE_BYTES))
    try:
        become_first(control)
        stage(plan["sources"], plan["writable"], plan["masks"])
    except OSError as error:
        control.send(json.dumps({"event": "refused", "message": str(error), "errno": error.errno}).encode())
        return
    control.send(json.dumps({"event": "ready"}).encode())
    launcher = Launcher(control)
    try:
        launcher.run()
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN):
            raise
    finally:
        for child in launcher.children.values():
            launcher.kill(child)


if __name__ == "__main__":
    main()
