"""Nothing of a sandbox survives its end, whatever it does and whoever dies. Seen from outside, in the process table."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import openai
import pytest
from attack import end, hear, inside, members, namespaces_of, processes, script_of
from conftest import (
    BOXES,
    HOSTS,
    IDS,
    NO_NETWORK,
    ROOT,
    UNPRIVILEGED,
    USER,
    Core,
    connect,
    core_in,
    core_of,
    service,
    until,
    workspace_of,
)

from core.sandbox.bubblewrap import SPARES

GONE_SECONDS = 10
CONTAINER = (sys.executable, str(ROOT / "tests/container.py"))

# Ignores what can be ignored, leaves its session and its parent, stops itself, and lives on in 30 copies.
STUBBORN = """
import platform, signal
def tracer():
    # Clears PR_SET_PDEATHSIG of the sandbox's first process: has it call prctl(1, 0).
    def ptrace(request, address=0, data=0):
        return libc.ptrace(ctypes.c_long(request), ctypes.c_long(1), ctypes.c_void_p(address), ctypes.c_void_p(data))
    if platform.machine() != "x86_64" or ptrace(16) != 0:  # PTRACE_ATTACH
        return
    os.waitpid(1, 0x40000000)
    saved = (ctypes.c_ulonglong * 27)()
    ptrace(12, 0, ctypes.addressof(saved))  # PTRACE_GETREGS
    changed = (ctypes.c_ulonglong * 27)(*saved)
    changed[10], changed[14], changed[13], changed[15] = 157, 1, 0, (1 << 64) - 1  # rax, rdi, rsi, orig_rax
    changed[16] = saved[16] - 2  # rip, back at the `syscall` that it waits in
    ptrace(13, 0, ctypes.addressof(changed))
    ptrace(9)  # PTRACE_SINGLESTEP, over that instruction
    os.waitpid(1, 0x40000000)
    after = (ctypes.c_ulonglong * 27)()
    ptrace(12, 0, ctypes.addressof(after))
    ptrace(13, 0, ctypes.addressof(saved))
    ptrace(17)  # PTRACE_DETACH
    print("traced", ctypes.c_longlong(after[10]).value, flush=True)
for number in range(1, 32):
    if number not in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN)
if given == "tracing":
    tracer()
for _ in range(30):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            libc.prctl(1, 0)
            libc.prctl(15, b"renamed")
            if os.fork() == 0:
                os.kill(os.getpid(), signal.SIGSTOP)
            while given == "busy":
                pass
            while True:
                time.sleep(60)
        os._exit(0)
print("settled", flush=True)
while True:
    time.sleep(60)
"""
KINDS = ("sleeping", "tracing")


def stubborn(core: Core, kind: str) -> tuple[str, set[str]]:
    """(session, PID namespace) of a sandbox full of processes that want to stay."""
    mark = str(uuid4())
    session = core.shell(script_of(STUBBORN, kind, mark))
    hear(core, session.id, "settled")
    namespaces = namespaces_of(mark)
    assert len(namespaces) == 1 and len(members(namespaces)) > 30
    return session.id, namespaces


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def launchers(core: Core) -> list[int]:
    """The processes of this server's launcher: the one outside its PID namespace, and the first one within. Under
    Landlock: the launcher, and the supervisor of the sandbox that runs."""
    outer = children(core.service.process.pid)
    assert len(outer) == 1
    return [*outer, *children(outer[0])]


def left(core: Core) -> list[int]:
    """What the launcher has not buried yet; those that wait for a payload are not bwrap yet."""
    if core.backend == "landlock":
        return launchers(core)[1:]
    return [pid for pid in children(launchers(core)[1]) if name_of(pid) == "bwrap"]


def name_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def waiting(core: Core) -> set[int]:
    """The sandboxes that wait for a payload, once they are as many as there should be and nothing else is left."""
    launcher = launchers(core)[1]
    until(lambda: len(children(launcher)) == SPARES and not left(core), GONE_SECONDS)
    return set(children(launcher))


@pytest.mark.parametrize("kind", [*KINDS, "busy"])
def test_a_cancel_ends_all_processes(box: Core, kind: str) -> None:
    session, namespaces = stubborn(box, kind)
    turn = end(box, session)
    assert turn.status == "cancelled" and turn.completed_at - turn.started_at < 60
    assert not members(namespaces)  # as soon as the turn is over, not some time later


def test_the_end_of_the_script_ends_what_it_left(box: Core) -> None:
    mark = str(uuid4())
    leaving = f"mkfifo $TMPDIR/said; {{\n{script_of(STUBBORN, 'sleeping', mark)}}} >$TMPDIR/said &"
    session = box.shell(f"{leaving}\nread said <$TMPDIR/said; echo $said; exit 3")
    assert box.turn(session.id).status == "completed" and box.output(session.id) == "settled\n"
    assert not namespaces_of(mark)


def test_a_tree_like_that_survives_the_usual_kill() -> None:
    """The control: SIGTERM and then SIGKILL to the process group of the child leave it alive."""
    mark = str(uuid4())
    child = subprocess.Popen(
        ["bash", "-c", script_of(STUBBORN, "sleeping", mark)], stdout=subprocess.PIPE, start_new_session=True
    )
    assert child.stdout is not None and child.stdout.readline() == b"settled\n"
    os.killpg(child.pid, signal.SIGTERM)
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    left = [pid for pid, (_, words) in processes().items() if mark in words]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert len(left) >= 30


def test_sessions_deleted_while_their_sandboxes_start_leave_nothing(box: Core) -> None:
    client = openai.AsyncOpenAI(base_url=box.url, api_key=box.key, max_retries=0)
    sessions = client.beta.agents.sessions
    agent: Any = {"x_agents_core": {"harness": "shell"}}
    environment: Any = {"type": "openai_hosted", "network": NO_NETWORK, "setup_commands": [{"command": "sleep 300"}]}

    async def come_and_go(number: int) -> None:
        session = await sessions.create(agent=agent, environment=environment, input="true")
        await asyncio.sleep(number % 10 * 0.002)  # to hit every moment of a start
        await sessions.delete(session.id, extra_query={"cancel": "true"})

    async def all_of_them() -> None:
        for _ in range(4):
            await asyncio.gather(*map(come_and_go, range(20)))

    asyncio.run(asyncio.wait_for(all_of_them(), 60))
    until(lambda: not left(box), GONE_SECONDS)
    assert inside(box, "print(1)") == 1
    if box.backend == "bubblewrap":
        assert len(waiting(box)) == SPARES


@pytest.mark.parametrize("user", ["root", "unprivileged"])
def test_a_sandbox_that_waited_serves_once(user: str) -> None:
    with core_of(user) as core:
        before = waiting(core)
        assert inside(core, "print(1)") == 1
        after = waiting(core)
        assert len(before & after) == SPARES - 1  # the one that served was replaced
        assert not (before - after) & set(processes())


@pytest.mark.parametrize("user", ["root", "unprivileged"])
def test_sandboxes_that_died_while_they_waited_are_not_missed(user: str) -> None:
    with core_of(user) as core:
        killed = waiting(core)
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        until(lambda: not killed & set(processes()), GONE_SECONDS)
        assert inside(core, "print(1)") == 1
        assert not waiting(core) & killed


ENDS: dict[str, Callable[[Core], None]] = {
    "kill -9 of the server": lambda core: core.service.process.kill(),
    "kill -9 of the launcher": lambda core: os.kill(launchers(core)[0], signal.SIGKILL),
    "kill -9 of the launcher's first process": lambda core: os.kill(launchers(core)[1], signal.SIGKILL),
    "SIGTERM": lambda core: core.service.process.terminate(),
    "SIGINT": lambda core: core.service.process.send_signal(signal.SIGINT),
    "standard input closes": lambda core: core.service.process.stdin.close(),  # type: ignore[union-attr]
}


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize(("backend", "user"), HOSTS, ids=IDS)
def test_the_end_of_the_server_ends_all_sandboxes(backend: str, user: str, how: str) -> None:
    if backend == "landlock" and "first process" in how:
        pytest.skip("there is none under Landlock; the next test ends the supervisor, which the server survives")
    with core_of(user, "--sandbox", backend) as core:
        kinds = KINDS if backend == "bubblewrap" else KINDS[-1:]  # one at a time
        sandboxes = [stubborn(core, kind)[1] for kind in kinds]
        launcher = launchers(core)
        if backend == "bubblewrap":
            launcher += children(launcher[1])  # those that wait for a payload too
        ENDS[how](core)
        core.service.process.wait(GONE_SECONDS)
        until(lambda: not any(members(namespaces) for namespaces in sandboxes), GONE_SECONDS)
        until(lambda: not set(launcher) & set(processes()), GONE_SECONDS)
        if "server" not in how:
            assert core.temporary is not None and not list((core.temporary / "tmp").iterdir())
            assert (backend, user) != ("landlock", "root") or not os.path.lexists("/workspace")


@pytest.mark.parametrize("user", ["root", "unprivileged"])
def test_a_landlock_sandbox_whose_supervisor_was_killed_is_gone_all_the_same(user: str) -> None:
    with core_of(user, "--sandbox", "landlock") as core:
        session, namespaces = stubborn(core, "sleeping")
        os.kill(launchers(core)[1], signal.SIGKILL)
        assert core.turn(session).status == "completed"  # the script's exit code is its own affair
        assert not members(namespaces)
        assert inside(core, "print(1)") == 1


@pytest.mark.skipif(os.getuid() != 0, reason="only root may replace a link in /")
def test_landlock_has_one_workspace_and_a_killed_servers_is_taken_over() -> None:
    same = "print(json.dumps(os.path.realpath('/workspace') == os.getcwd()))"
    serve = [sys.executable, "-m", "core", "serve", "--sandbox", "landlock"]
    with core_of("root", "--sandbox", "landlock") as core:
        assert inside(core, same)
        done = subprocess.run(serve, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30)
        assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
        assert "another server" in done.stderr
        assert inside(core, same)
        core.service.process.kill()
        core.service.process.wait()
    assert Path("/workspace").is_symlink()
    with core_of("root", "--sandbox", "landlock") as core:
        assert inside(core, same)


@pytest.mark.skipif(os.getuid() != 0, reason="only root may make something in /")
@pytest.mark.parametrize("kind", ["directory", "link"])
def test_landlock_leaves_a_workspace_alone_that_is_somebody_elses(kind: str, tmp_path: Path) -> None:
    workspace = Path("/workspace")
    BOXES.stop("landlock")
    workspace.mkdir() if kind == "directory" else workspace.symlink_to(tmp_path)
    try:
        serve = [sys.executable, "-m", "core", "serve", "--sandbox", "landlock"]
        done = subprocess.run(serve, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1) and "/workspace" in done.stderr
        assert workspace.is_dir() if kind == "directory" else workspace.readlink() == tmp_path
    finally:
        workspace.rmdir() if kind == "directory" else workspace.unlink()


@pytest.mark.parametrize("user", ["root", "unprivileged"])
def test_a_turn_whose_launcher_died_fails_and_says_so(user: str, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as directory:
        data = ("--data", f"{directory}/data")
        with core_in(Path(directory), user, *data) as core:
            session, _ = stubborn(core, "sleeping")
            os.kill(launchers(core)[1], signal.SIGKILL)
            core.service.process.wait(GONE_SECONDS)
        with core_in(Path(directory), user, *data) as core:
            turn = core.turn(session)
            assert turn.status == "failed" and "launcher" in turn.error.message
            assert turn.to_dict()["x_agents_core"]["failure"]["class"] == "environment"


# ── a host without namespaces ─────────────────────────────────────────────────────────────────────

# Runs a command in a user namespace that maps all ids and may have no user namespaces of its own.
NO_NAMESPACES = """
import ctypes, os, sys
made, mapped = os.pipe(), os.pipe()
pid = os.fork()
if pid == 0:
    assert ctypes.CDLL(None).unshare(0x10000000) == 0
    os.write(made[1], b"x")
    os.read(mapped[0], 1)
    with open("/proc/sys/user/max_user_namespaces", "w") as setting:
        setting.write("0")
    os.execvp(sys.argv[1], sys.argv[1:])
os.read(made[0], 1)
for name in ("uid_map", "gid_map"):
    with open(f"/proc/{pid}/{name}", "w") as file:
        file.write("0 0 4294967295")
os.write(mapped[1], b"x")
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


# Each takes namespaces away for real: by the kernel's own limit, and as Docker does.
HOSTS_WITHOUT = {
    "limit": {"root": (sys.executable, "-c", NO_NAMESPACES, sys.executable), "unprivileged": ()},
    "container": {"root": (*CONTAINER, "0", sys.executable), "unprivileged": (*CONTAINER, str(USER), sys.executable)},
}
HOSTS_WITHOUT["limit"]["unprivileged"] = (sys.executable, "-c", NO_NAMESPACES, *UNPRIVILEGED)
WITHOUT = [(host, user) for host in HOSTS_WITHOUT for user in ("root", "unprivileged")]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can take namespaces away")
@pytest.mark.parametrize(("host", "user"), WITHOUT)
def test_without_namespaces_bubblewrap_says_so_in_one_line(host: str, user: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o777)
        command = [*HOSTS_WITHOUT[host][user], "-m", "core", "serve", "--sandbox", "bubblewrap"]
        env = {**os.environ, "TMPDIR": directory, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, timeout=30)
        assert (done.returncode, done.stdout) == (2, ""), done
        assert len(done.stderr.splitlines()) == 1 and "max_user_namespaces" in done.stderr
        assert not list(Path(directory).iterdir())


@pytest.mark.skipif(os.getuid() != 0, reason="only root can take namespaces away")
@pytest.mark.parametrize(("host", "user"), WITHOUT)
def test_without_namespaces_landlock_takes_over_and_says_what_is_weaker(host: str, user: str, tmp_path: Path) -> None:
    BOXES.stop("landlock")
    log = tmp_path / "log"
    with workspace_of(user, ("landlock",)), tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o777)
        env = {"TMPDIR": directory, "PYTHONPATH": str(ROOT)}
        with service("core", "serve", python=HOSTS_WITHOUT[host][user], env=env, log=log) as running:
            core = connect(running)
            probe = "print(json.dumps([os.getcwd() == os.path.realpath('/workspace'), attempt(os.listdir, '/')]))"
            assert inside(core, probe) == [True, "EACCES"]
            grow = 'python3 -c "import time; kept = bytes([1]) * (2200 << 20); time.sleep(60)"'
            hog, _ = core.run(grow, environment={"container_size": "small"})
            assert [item.exit_code for item in core.sessions.items.list(hog.id) if item.type != "message"] == [137]
            session = core.shell(script_of(STUBBORN, "sleeping", "stubborn-in-a-container"))
            hear(core, session.id, "settled")
            assert end(core, session.id).status == "cancelled" and not members({"stubborn-in-a-container"})
        said = log.read_text().splitlines()
        assert len(said) == 1 and "sandboxes by landlock, because bubblewrap" in said[0] and "processes" in said[0]


def run_core(python: tuple[str, ...], *arguments: str) -> subprocess.CompletedProcess[str]:
    """`python3 -m core …` to its end, with temporary files that leave nothing behind."""
    BOXES.stop("landlock")
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o777)
        env = {**os.environ, "TMPDIR": directory, "PYTHONPATH": str(ROOT)}
        command = [*python, "-m", "core", *arguments]
        done = subprocess.run(
            command, env=env, cwd="/", capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
        )
        assert not list(Path(directory).iterdir())
        return done


@pytest.mark.skipif(os.getuid() != 0, reason="only root can take namespaces away")
def test_the_doctor_names_bubblewrap_or_landlock_as_it_holds() -> None:
    done = run_core(HOSTS_WITHOUT["container"]["root"], "doctor")
    lines = {line.split()[1]: line for line in done.stdout.splitlines()}
    assert done.returncode == 3 and "Landlock" in lines["sandbox"] and lines["sandbox"].startswith("ok")
    for name in ("bubblewrap", "memory", "processes", "door"):
        assert lines[name].startswith("weak")
    assert run_core((sys.executable,), "doctor", "--sandbox", "landlock").returncode == 3


@pytest.mark.skipif(os.getuid() != 0, reason="only root can take namespaces away")
@pytest.mark.parametrize(("command", "printed"), [("serve", "stderr"), ("doctor", "stdout")])
def test_with_neither_bubblewrap_nor_landlock_one_line_names_both_reasons(command: str, printed: str) -> None:
    """An ordinary user in a container that has no link at /workspace."""
    done = run_core(HOSTS_WITHOUT["container"]["unprivileged"], command)
    lines = [line for line in getattr(done, printed).splitlines() if "bubblewrap" in line]
    assert done.returncode == 2 and len(lines) == 1
    assert "max_user_namespaces" in lines[0] and f"ln -sfn /var/tmp/rl-eval-{USER}/workspace /workspace" in lines[0]


WITHOUT_LANDLOCK = """
import errno, os, sys, pyseccomp
profile = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
profile.add_rule(pyseccomp.ERRNO(errno.ENOSYS), "landlock_create_ruleset")
profile.load()
os.execvp(sys.argv[1], sys.argv[1:])
"""


def test_without_landlock_there_is_one_line_that_says_what_is_needed() -> None:
    done = run_core((sys.executable, "-c", WITHOUT_LANDLOCK, sys.executable), "serve", "--sandbox", "landlock")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1) and "Linux 6.12" in done.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="only root's sandboxes have user ids of their own")
def test_data_where_landlock_sandboxes_cannot_reach_it_is_refused_in_one_line(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    done = run_core((sys.executable,), "serve", "--sandbox", "landlock", "--data", str(tmp_path / "data"))
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1) and "chmod o+x" in done.stderr


def test_a_launcher_that_is_behind_loses_no_request() -> None:
    """More starts at once than its socket holds; without the queue some of them fail."""
    with core_of("root" if os.getuid() == 0 else "unprivileged", "--slots", "200") as core:
        launcher = launchers(core)[1]
        os.kill(launcher, signal.SIGSTOP)
        try:
            sessions = [core.shell("true") for _ in range(200)]
            assert core.sessions.retrieve(sessions[-1].id).status == "in_progress"
        finally:
            os.kill(launcher, signal.SIGCONT)
        assert {core.turn(session.id).status for session in sessions} == {"completed"}
