"""The process that starts sandboxes where there are no namespaces, and the supervisor that it forks for each.

Core talks to it as to `launcher.py`, by the same messages. There is one sandbox at a time.

    launcher    domain L: its signals reach the sandboxes, and nothing else
    supervisor  domain A, nested in L, and the sandbox's user id: its signals reach its own sandbox, and nothing else
    payload     domain B, nested in A, with the files it may open: its signals reach neither of the two

Invariants:
- Nothing started here outlives the launcher, and the launcher does not outlive Core. `kill(-1)` of a supervisor reaches
  the whole sandbox at once, whatever forks in there, and no other process: that is the domain, not the user id. The
  supervisor is the subreaper of all of it, sends that when the launcher's end of its socket closes, when the payload
  ends, at the deadline and on request, and again until nobody is left. Should it be killed, the launcher does the same.
- An exit is reported when the supervisor has no child left, hence when the whole process tree of the sandbox is gone.
- The payload makes no socket itself. The filter hands `socket` and `connect` to the supervisor. The one kind that is
  granted comes connected to the door already, and nothing in there can take it apart from it: not `connect`, which is
  never executed, nor a fast open, which the filter refuses. The address that a `connect` names is looked at only for
  an answer that makes sense, so it does no harm that the sandbox may change it meanwhile.

Not here: which command runs, what it may see (`landlock.py`), which calls are refused (`seccomp.py`).
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import math
import os
import select
import signal
import socket
import struct
import sys
import time
from dataclasses import dataclass, field
from typing import Any, NoReturn

from core.sandbox.landlock_kernel import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_DUMPABLE,
    PR_SET_PDEATHSIG,
    Notification,
    answer,
    answer_with_descriptor,
    drop_capabilities,
    enter_scope,
    enter_walls,
    load_filter,
    prctl,
    receive_notification,
)
from core.sandbox.launcher import DOOR_HOST, DOOR_PORT, KILL_AGAIN_SECONDS, LONGEST_POLL_MS, MESSAGE_BYTES, limit

CHANNEL_FD = 3  # of the payload, until it has executed its command
KINDS = socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
PROTOCOLS = (0, socket.IPPROTO_TCP)
ADDRESS_BYTES = 16  # of a struct sockaddr_in

Rules = list[tuple[int, int]]  # an open path, the rights on what lies beneath


def send(channel: socket.socket, **message: Any) -> None:
    """Tells the other side, if it is still there."""
    with contextlib.suppress(OSError):
        channel.send(json.dumps(message).encode())


def wake_on_child() -> int:
    """A descriptor that becomes readable when a child has ended."""
    reading, writing = os.pipe()
    for descriptor in (reading, writing):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return reading


def drain(descriptor: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.read(descriptor, 4096)


def bound_signals() -> None:
    """Makes sure that signals go no further than this process's domain: `kill_domain` rests on that alone."""
    enter_scope()
    try:
        os.kill(os.getppid(), 0)
    except PermissionError:
        return
    raise OSError(errno.ENOSYS, "Landlock does not hold signals back")


def kill_domain() -> None:
    """SIGKILL to all processes in the caller's Landlock domain but itself. Only behind `bound_signals`."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(-1, signal.SIGKILL)


# ── the payload ───────────────────────────────────────────────────────────────────────────────────


def become(request: dict[str, Any], rules: Rules, handed: list[int], channel: int) -> None:
    """In the forked child: confines itself step by step, then turns into the command. Never returns normally."""
    (*streams, program), groups = handed[:4], handed[4:]
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for group in groups:
        os.write(group, b"0")
    os.nice(request["nice"])
    with os.fdopen(program, "rb") as file:
        filter = file.read()
    os.chdir(request["directory"])
    enter_walls(rules)
    drop_capabilities()
    high = [os.dup(descriptor) for descriptor in (*streams, channel)]
    for number, descriptor in enumerate(high):
        os.dup2(descriptor, number, inheritable=number < CHANNEL_FD)
    os.closerange(CHANNEL_FD + 1, os.sysconf("SC_OPEN_MAX"))
    for name, value in request["rlimits"].items():
        limit(name, value)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    os.umask(0o022)
    os.setsid()
    with socket.socket(fileno=CHANNEL_FD) as supervisor:
        listener = load_filter(filter)
        socket.send_fds(supervisor, [b"confined"], [listener])
        os.close(listener)
        os.execve(request["argv"][0], request["argv"], request["env"])


def report_failure(error: BaseException, channel: int) -> None:
    """By the channel's number at first, or by the one that it has moved to."""
    for descriptor in (channel, CHANNEL_FD):
        with contextlib.suppress(OSError):
            os.write(descriptor, f"{type(error).__name__}: {error}".encode())
            return


# ── the supervisor ────────────────────────────────────────────────────────────────────────────────


@dataclass
class Supervisor:
    """One sandbox: answers its calls, ends it, reaps it. Runs in a process of its own, and never returns."""

    launcher: socket.socket
    payload: int
    listener: int
    door: int  # the port where Core listens for this sandbox
    calls: dict[str, int]  # numbers of system calls by name
    deadline: float  # monotonic seconds
    code: int | None = None
    joining: dict[int, tuple[socket.socket, Notification]] = field(default_factory=dict)
    poll: select.poll = field(default_factory=select.poll)

    def run(self) -> NoReturn:
        wake = wake_on_child()
        for descriptor in (wake, self.launcher.fileno(), self.listener):
            self.poll.register(descriptor, select.POLLIN)
        self.reap()
        while True:
            for descriptor, event in self.poll.poll(self.wait_ms()):
                if descriptor == wake:
                    drain(wake)
                    self.reap()
                elif descriptor == self.launcher.fileno():
                    self.obey()
                elif descriptor in self.joining:
                    self.joined(*self.joining.pop(descriptor))
                elif event & select.POLLIN:
                    self.notified()
                else:
                    self.poll.unregister(self.listener)  # nobody is left who could ask

    def wait_ms(self) -> int:
        """Kills what has outlived its deadline; returns how long to wait for the next one."""
        now = time.monotonic()
        if self.deadline <= now:
            self.kill()
        return min(math.ceil(min(self.deadline - now, LONGEST_POLL_MS / 1000) * 1000), LONGEST_POLL_MS)

    def kill(self) -> None:
        kill_domain()
        self.deadline = time.monotonic() + KILL_AGAIN_SECONDS

    def obey(self) -> None:
        order = self.launcher.recv(MESSAGE_BYTES)
        if order == b"terminate":
            if self.code is None:
                os.kill(self.payload, signal.SIGTERM)
            return
        if not order:
            self.poll.unregister(self.launcher)
        self.kill()

    def reap(self) -> None:
        """The end of the payload is the end of all."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                send(self.launcher, event="exit", code=self.code)
                os._exit(0)
            if pid == 0:
                return
            if pid == self.payload:
                code = os.waitstatus_to_exitcode(status)
                self.code = code if code >= 0 else 128 - code
                self.kill()

    def notified(self) -> None:
        call = receive_notification(self.listener)
        if call is None:
            return
        if call.number == self.calls["connect"]:
            answer(self.listener, call.id, self.connect_error(call))
        elif call.arguments[1] & 0xFFFFFFFF & ~KINDS == socket.SOCK_STREAM and call.arguments[2] in PROTOCOLS:
            self.join(call)
        else:
            answer(self.listener, call.id, errno.EPROTONOSUPPORT)

    def join(self, call: Notification) -> None:
        """Begins a connection to the door. It is handed over when it stands: before that, it can be taken apart."""
        door = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK, socket.IPPROTO_TCP)
        error = door.connect_ex((DOOR_HOST, self.door))
        if error == errno.EINPROGRESS:
            self.joining[door.fileno()] = (door, call)
            self.poll.register(door, select.POLLOUT)
        else:
            self.hand_over(door, call, error)

    def joined(self, door: socket.socket, call: Notification) -> None:
        self.poll.unregister(door)
        self.hand_over(door, call, door.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))

    def hand_over(self, door: socket.socket, call: Notification, error: int) -> None:
        kind = call.arguments[1]
        with door:
            if error:
                answer(self.listener, call.id, errno.ENETDOWN)
                return
            door.setblocking(not kind & socket.SOCK_NONBLOCK)
            try:
                answer_with_descriptor(self.listener, call.id, door.fileno(), bool(kind & socket.SOCK_CLOEXEC))
            except OSError as refused:
                answer(self.listener, call.id, refused.errno or errno.EMFILE)

    def connect_error(self, call: Notification) -> int:
        """What `connect` says. Where the address cannot be read, 0: the socket leads to the door all the same."""
        try:
            with open(f"/proc/{call.pid}/mem", "rb", 0) as memory:  # noqa: PTH123
                memory.seek(call.arguments[1])
                address = memory.read(min(call.arguments[2], ADDRESS_BYTES))
        except (OSError, OverflowError, ValueError):
            return 0
        if len(address) < 8 or struct.unpack_from("=H", address)[0] != socket.AF_INET:
            return errno.EAFNOSUPPORT
        host, port = str(ipaddress.IPv4Address(address[4:8])), int.from_bytes(address[2:4], "big")
        if (host, port) == (DOOR_HOST, DOOR_PORT):
            return 0
        return errno.ECONNREFUSED if ipaddress.IPv4Address(host).is_loopback else errno.ENETUNREACH


def supervise(request: dict[str, Any], rules: Rules, handed: list[int], launcher: socket.socket) -> NoReturn:
    """In the process forked for a sandbox: gives up what it does not need, then forks the payload and follows it."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    groups = [os.open(f"{group}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC) for group in request["cgroups"]]
    if request["uid"] is not None:
        os.setgroups([])
        os.setresgid(request["uid"], request["uid"], request["uid"])
        os.setresuid(request["uid"], request["uid"], request["uid"])
    drop_capabilities()
    prctl(PR_SET_DUMPABLE, 0)  # an ordinary user's other processes could look into this one
    bound_signals()
    try:
        follow(request, rules, [*handed, *groups], launcher)
    finally:
        kill_domain()
        os._exit(126)


def follow(request: dict[str, Any], rules: Rules, handed: list[int], launcher: socket.socket) -> NoReturn:
    """Forks the payload and lives as long as anything of it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    payload = os.fork()
    if payload == 0:
        try:
            become(request, rules, handed, theirs.fileno())
        except BaseException as error:
            report_failure(error, theirs.fileno())
        finally:
            os._exit(126)
    theirs.close()
    for descriptor in (*handed, *(descriptor for descriptor, _ in rules)):
        os.close(descriptor)
    listener, problem = confined(ours)
    if listener is None:
        kill_domain()
        os.waitpid(payload, 0)
        send(launcher, event="failed", message=problem)
        send(launcher, event="exit", code=126)
        os._exit(0)
    send(launcher, event="started", supervisor=os.getpid())
    deadline = time.monotonic() + request["seconds"]
    Supervisor(launcher, payload, listener, request["door"], request["calls"], deadline).run()


def confined(channel: socket.socket) -> tuple[int | None, str]:
    """The descriptor of the payload's questions, once it has executed its command; else what went wrong."""
    with channel:
        said, descriptors, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, 1)
        if descriptors and not (failed := channel.recv(MESSAGE_BYTES)):
            return descriptors[0], ""
        return None, (failed if descriptors else said).decode(errors="replace") or "it was killed at its start"


# ── the launcher ──────────────────────────────────────────────────────────────────────────────────


class Launcher:
    """Sandboxes by request id; one thread, one poll loop."""

    def __init__(self, control: socket.socket, rules: Rules) -> None:
        self.control = control
        self.rules = rules
        self.supervisors: dict[int, tuple[str, socket.socket]] = {}  # by the descriptor of the channel
        self.poll = select.poll()
        self.poll.register(control, select.POLLIN)

    def start(self, request: dict[str, Any], handed: list[int]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        room = [(os.open(path, os.O_PATH | os.O_CLOEXEC), rights) for path, rights in request["rules"]]
        pid = os.fork()
        if pid == 0:
            try:
                self.control.close()
                ours.close()
                supervise(request, [*self.rules, *room], handed, theirs)
            except BaseException as error:
                send(theirs, event="failed", message=f"{type(error).__name__}: {error}")
                send(theirs, event="exit", code=-1)
            finally:
                os._exit(126)
        theirs.close()
        for descriptor in (*handed, *(descriptor for descriptor, _ in room)):
            os.close(descriptor)
        self.supervisors[ours.fileno()] = (request["id"], ours)
        self.poll.register(ours, select.POLLIN)

    def report(self, descriptor: int) -> None:
        """Passes on what a supervisor says. When it was killed it says nothing, and its sandbox is ours to end."""
        name, channel = self.supervisors[descriptor]
        said = channel.recv(MESSAGE_BYTES)
        if not said:
            end_all()
            said = json.dumps({"event": "exit", "code": -9}).encode()
        message = json.loads(said)
        if message["event"] == "exit":
            self.poll.unregister(channel)
            del self.supervisors[descriptor]
            channel.close()
        self.control.send(json.dumps({"id": name, **message}).encode())

    def receive(self) -> bool:
        """Handles one request of Core; False at end of file."""
        data, descriptors, _, _ = socket.recv_fds(self.control, MESSAGE_BYTES, 4)
        if not data:
            return False
        request = json.loads(data)
        action = request.pop("action")
        if action == "start":
            self.start(request, descriptors)
            return True
        for name, channel in self.supervisors.values():
            if name == request["id"]:
                with contextlib.suppress(OSError):
                    channel.send(action.encode())
        return True

    def run(self) -> None:
        wake = wake_on_child()
        self.poll.register(wake, select.POLLIN)
        while True:
            for descriptor, _ in self.poll.poll():
                if descriptor == self.control.fileno():
                    if not self.receive():
                        return
                elif descriptor == wake:
                    drain(wake)
                    reap()
                elif descriptor in self.supervisors:
                    self.report(descriptor)


def reap() -> None:
    """Buries supervisors. Their own children come here only when one of them was killed."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0] != 0:
            pass


def end_all() -> None:
    """Kills all sandboxes, with their supervisors, and waits until nothing of them is left."""
    with contextlib.suppress(ChildProcessError):
        while True:
            kill_domain()
            os.waitpid(-1, 0)


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    prctl(PR_SET_DUMPABLE, 0)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    os.chdir("/")
    plan = json.loads(control.recv(MESSAGE_BYTES))
    try:
        rules = [(os.open(path, os.O_PATH | os.O_CLOEXEC), rights) for path, rights in plan["rules"]]
        bound_signals()
    except OSError as error:
        send(control, event="refused", message=str(error))
        return
    send(control, event="ready")
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        Launcher(control, rules).run()
    end_all()


if __name__ == "__main__":
    main()
