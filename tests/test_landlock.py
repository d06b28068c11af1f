"""Attacks that only a sandbox without namespaces has to withstand: it shares the host's network, objects and user ids.

Those that work against both backends are in `test_sandbox.py` and beside it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import pytest
from attack import end, hear, inside, outside, script_of
from conftest import USER, Boxes, Core, until


@pytest.fixture(params=["root", "unprivileged"])
def box(request: pytest.FixtureRequest, boxes: Boxes) -> Core:
    return boxes.get("landlock", request.param)


@dataclass
class Host:
    """A TCP listener, and a Unix datagram socket that anybody may write to; what they have got."""

    port: int
    path: str
    got: set[str] = field(default_factory=set)

    def accept(self, server: socket.socket) -> None:
        while True:
            with contextlib.suppress(OSError), server.accept()[0] as connection:
                connection.settimeout(5)  # one that says nothing, or resets, does not stop the others
                self.got.add(connection.recv(100).decode())

    def receive(self, server: socket.socket) -> None:
        while True:
            self.got.add(server.recv(100).decode())


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        server = socket.create_server(("127.0.0.1", 0))
        datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        datagrams.bind(f"{directory}/log")
        Path(datagrams.getsockname()).chmod(0o666)
        found = Host(server.getsockname()[1], datagrams.getsockname())
        threading.Thread(target=found.accept, args=[server], daemon=True).start()
        threading.Thread(target=found.receive, args=[datagrams], daemon=True).start()
        yield found


# ── sockets ───────────────────────────────────────────────────────────────────────────────────────

# Ways to turn a connected socket, or a pair of them, to somebody else. `given`: door, port and path outside, a word.
TURN = """
door, port, path, word = given
FAST_OPEN = 0x20000000
def address(family, port):
    return struct.pack("=HH4s8x", family, socket.htons(port), socket.inet_aton("127.0.0.1"))
def send(connected, data, flags, where):
    if libc.sendto(connected.fileno(), data, len(data), flags, where, len(where)) < 0:
        raise OSError(ctypes.get_errno(), "sendto")
def connected():
    found = socket.socket()
    found.connect(("127.0.0.1", door))
    return found
def fast_open():
    with socket.socket() as plain:  # connects and sends in one call, which no filter of `connect` sees
        send(plain, word.encode(), FAST_OPEN, address(2, port))
def reconnect():
    with connected() as turned:
        where = address(0, 0)
        if libc.connect(turned.fileno(), where, len(where)) < 0:
            raise OSError(ctypes.get_errno(), "connect")
        turned.connect(("127.0.0.1", port))
        turned.sendall(word.encode())
def unconnected():
    with socket.socket() as plain:
        plain.connect(("127.0.0.1", port))
        plain.sendall(word.encode())
def datagram():
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    left.sendto(word.encode(), path)
actions = {"fast open": fast_open, "reconnect": reconnect, "unconnected": unconnected, "datagram": datagram}
"""
WAYS = ("fast open", "reconnect", "unconnected", "datagram")


@pytest.mark.parametrize("way", WAYS)
def test_no_socket_is_turned_away_from_the_door(box: Core, host: Host, way: str) -> None:
    word, control = (f"{where} {uuid4()}" for where in ("inside", "outside"))
    run = f"{TURN}\nprint(json.dumps(attempt(actions[{way!r}])))"
    said = inside(box, run, [4141, host.port, host.path, word])
    with socket.create_server(("127.0.0.1", 0)) as door:
        # Again and again: on a busy machine, a packet of this odd kind may be lost.
        given = [door.getsockname()[1], host.port, host.path, control]
        until(lambda: outside(run, given) == "ok" and control in host.got)
    assert word not in host.got and said != "ok"


SERVE = """
def serve(connected):
    port = given or 0
    attempts = {
        "bind": lambda: connected.bind(("0.0.0.0", port)),
        "listen": lambda: connected.listen(),
        "shut down, then listen": lambda: (connected.shutdown(socket.SHUT_RDWR), connected.listen()),
        "accept": lambda: connected.accept(),
    }
    return {name: attempt(action) for name, action in attempts.items()}
found = serve(socket.socket())
with socket.socket() as fresh:
    found["bound at once"] = attempt(lambda: (fresh.bind(("127.0.0.1", 0)), fresh.listen()))
print(json.dumps(found))
"""


def test_nothing_inside_listens(box: Core) -> None:
    said, control = inside(box, SERVE), outside(SERVE.replace('"accept": lambda: connected.accept(),', ""))
    assert "ok" not in said.values()
    assert control["bound at once"] == control["bind"] == control["listen"] == "ok"


KINDS = """
print(json.dumps([attempt(lambda: socket.socket(*words).close()) for words in given]))
"""


def test_there_is_one_kind_of_socket(box: Core) -> None:
    stream, datagram = int(socket.SOCK_STREAM), int(socket.SOCK_DGRAM)
    inet, flags = int(socket.AF_INET), int(socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    others = [(inet, datagram, 0), (inet, stream, 262), (inet, stream, 132), (int(socket.AF_INET6), stream, 0)]
    others += [(int(socket.AF_UNIX), stream, 0), (int(socket.AF_NETLINK), 3, 0), (43, stream, 0), (40, stream, 0)]
    assert inside(box, KINDS, [(inet, stream, 0), (inet, stream | flags, 6)]) == ["ok", "ok"]
    assert "ok" not in inside(box, KINDS, others)
    assert outside(KINDS, others[:1]) == ["ok"]


PORTS = """
def ask(port):
    with socket.socket() as client:
        client.connect(("127.0.0.1", port))
        client.sendall(b"GET / HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
        if not client.recv(100).startswith(b"HTTP/1.1 4"):
            raise OSError(errno.EPROTO, "")
print(json.dumps([attempt(ask, port) for port in given]))
"""


def test_other_ports_are_refused_and_all_sockets_lead_to_the_door(box: Core, host: Host) -> None:
    own = int(box.url.rpartition(":")[2].removesuffix("/v1"))
    assert inside(box, PORTS, [4141, own, host.port, 22]) == ["ok", *["ECONNREFUSED"] * 3]


FLOOD = """
kept, error = [], "none"
while error in ("none",):
    try:
        kept.append(socket.socket())
        kept[-1].connect(("127.0.0.1", 4141))
    except OSError as refused:
        error = errno.errorcode[refused.errno]
print(json.dumps([len(kept), error]))
"""


def test_a_flood_of_sockets_is_bounded(box: Core) -> None:
    count, error = inside(box, FLOOD)
    assert 500 < count <= 4096 and error in ("EMFILE", "ENETDOWN")
    assert inside(box, PORTS, [4141]) == ["ok"]


# ── processes and objects of the host ─────────────────────────────────────────────────────────────

VICTIM = "import time\nprint('ready', flush=True)\ntime.sleep(600)"


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[str]]:
    """A process of the user whose server is not root."""
    as_user = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"] if os.getuid() == 0 else []
    process = subprocess.Popen([*as_user, "/usr/bin/python3", "-c", VICTIM], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.wait()


OTHERS = """
pid, parent = given, os.getppid()
limits = struct.pack("QQ", 1000, 1000)
def read(name):
    open(f"/proc/{pid}/{name}", "rb").read(1)
found = {
    "limit": call(302, pid, 7, limits, 0),
    "affinity": attempt(lambda: os.sched_setaffinity(pid, {0})),
    "priority": attempt(lambda: os.setpriority(os.PRIO_PROCESS, pid, 19)),
    "priority of the user": attempt(lambda: os.setpriority(os.PRIO_USER, 0, 19)),
    "environment": attempt(read, "environ"),
    "memory": attempt(read, "maps"),
    "descriptors": attempt(lambda: os.readlink(f"/proc/{pid}/fd/0")),
    "root": attempt(lambda: os.listdir(f"/proc/{pid}/root")),
    "trace": call(101, 0x4206, pid, 0, 0),
    "signal 0": attempt(lambda: os.kill(pid, 0)),
    "signal": attempt(lambda: os.kill(pid, 10)),
}
print(json.dumps(found))
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers of system calls are those of x86-64")
def test_processes_of_the_same_user_are_out_of_reach(box: Core, victim: subprocess.Popen[str]) -> None:
    own = outside("print(json.dumps(sorted(os.sched_getaffinity(given))))", victim.pid)
    said = inside(box, OTHERS, victim.pid)
    assert [what for what, how in said.items() if how == "ok"] == []
    assert victim.poll() is None and os.getpriority(os.PRIO_PROCESS, victim.pid) == 0
    assert outside("print(json.dumps(sorted(os.sched_getaffinity(given))))", victim.pid) == own
    as_user = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"] if os.getuid() == 0 else []
    control = outside(OTHERS.replace("sys.executable", "python3"), victim.pid, *as_user)
    assert set(control.values()) == {"ok"} and victim.wait(10) == -signal.SIGUSR1


KILL_ALL = """
signals = sorted({attempt(lambda: os.kill(pid, 9)) for pid in range(1, 99999) if pid != os.getpid()
    and os.path.exists(f"/proc/{pid}") and pid != os.getppid()})
print(json.dumps(signals), flush=True)
os.kill(-1, 9)
"""


def test_a_signal_to_all_reaches_the_sandbox_only(box: Core, victim: subprocess.Popen[str]) -> None:
    session, turn = box.run(script_of(KILL_ALL))
    assert turn.status == "completed" and '["EPERM"]' in box.output(session.id)
    assert victim.poll() is None and inside(box, "print(1)") == 1


SHARED = """
number = call(29, given, 4096, 0)  # shmget
print(json.dumps([number, call(64, given, 1, 0o666 | 0o1000), call(68, given, 0o666 | 0o1000), call(240, b"rl", 0o102,
    0o666, 0)]))
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers of system calls are those of x86-64")
def test_shared_objects_of_the_host_do_not_exist(box: Core) -> None:
    key = uuid4().int & 0x3FFFFFFF
    subprocess.run([sys.executable, "-c", f"import ctypes\nassert ctypes.CDLL(None).shmget({key}, 4096, 0o1666) >= 0"])
    try:
        assert inside(box, SHARED, key) == ["ENOSYS"] * 4
        assert outside(SHARED, key) == ["ok"] * 4
    finally:
        for kind in ("-M", "-S", "-Q"):
            subprocess.run(["ipcrm", kind, str(key)], check=False)
        outside("print(json.dumps(call(241, b'rl')))")


# ── files ─────────────────────────────────────────────────────────────────────────────────────────

TOUCH = """
def touch(path):
    with open(path + "/attack", "w") as file:
        file.write("x")
def replace(path):
    os.symlink("/", path + "/attack-link")
def make(path):
    os.mkdir(path + "/attack-directory")
given = [os.path.expandvars(path) for path in given]
print(json.dumps([[attempt(action, path) for action in (touch, replace, make)] for path in given]))
"""


def test_three_places_can_be_written(box: Core) -> None:
    assert box.temporary is not None
    (data,) = (box.temporary / "tmp").glob("rl-eval-core-*")
    own = ["/workspace", "$HOME", "$TMPDIR"]
    others = ["/tmp", "/var/tmp", "/dev/shm", str(data), str(data / "rooms"), "$HOME/..", "/", "/proc/self", "/run"]
    said = inside(box, TOUCH, [*own, *others])
    assert said[: len(own)] == [["ok"] * 3] * len(own)
    assert "ok" not in {how for hows in said[len(own) :] for how in hows}
    if os.getuid() == 0:
        assert outside(TOUCH, ["/dev/shm"]) == [["ok"] * 3]
        for name in ("attack", "attack-link"):
            Path("/dev/shm", name).unlink()
        Path("/dev/shm/attack-directory").rmdir()


LOOK = """
paths = [f"{given}/{name}" for name in ("", "workspace", "workspace/secret", "home", "home/.script.sh")]
def look(path):
    os.listdir(path) if os.path.isdir(path) else open(path).read()
def spoil(path):
    os.unlink(path + "/workspace/secret")
print(json.dumps([*(attempt(look, path) for path in paths), attempt(spoil, given), attempt(os.truncate, paths[2], 0)]))
"""


def test_another_session_is_out_of_reach(box: Core) -> None:
    session, _ = box.run("echo the secret > secret")
    assert box.temporary is not None
    (room,) = box.temporary.glob(f"tmp/*/rooms/{session.id}")
    said = inside(box, LOOK, str(room))
    assert "ok" not in said
    assert (room / "workspace/secret").read_text() == "the secret\n"
    if os.getuid() == 0:
        assert outside(LOOK.replace("spoil, given", "os.stat, given"), str(room)) == ["ok"] * 7


def test_a_temporary_file_is_gone_with_its_turn(box: Core) -> None:
    session, _ = box.run("echo 1 > $TMPDIR/x; ls $TMPDIR")
    box.say(session.id, "ls $TMPDIR")
    assert box.turn(session.id, 2).status == "completed"
    assert box.output(session.id) == "x\n"


def test_the_workspace_follows_the_session(box: Core) -> None:
    first, _ = box.run("echo first > /workspace/x")
    second, _ = box.run("ls /workspace; echo second > /workspace/x")
    box.say(first.id, "cat /workspace/x")
    assert box.turn(first.id, 2).status == "completed"
    assert (box.output(first.id), box.output(second.id)) == ("first\n", "")


def test_a_second_turn_waits_for_the_slot(box: Core) -> None:
    first = box.shell(f"echo begun; {script_of('time.sleep(600)')}")
    hear(box, first.id, "begun")
    second = box.shell("echo now")
    assert next(iter(box.sessions.turns.list(second.id))).status == "queued"
    assert end(box, first.id).status == "cancelled"
    assert box.turn(second.id).status == "completed" and box.output(second.id) == "now\n"
