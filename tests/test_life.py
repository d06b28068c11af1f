"""A session's finite life, the reaper, and the doctor: real servers and commands."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import openai
import pytest
from conftest import ROOT, Core, connect, seen_in_processes, service, start_service, until


def command(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """`python3 -m core …`, run to its end."""
    return subprocess.run(
        [sys.executable, "-m", "core", *arguments],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def mark(name: str) -> str:
    return f"life-{name}-{os.getpid()}"


@pytest.fixture(scope="module")
def brief() -> Any:
    """A server whose sessions live for two seconds."""
    with service("core", "serve", "--session-ttl", "2") as running:
        yield connect(running)


def test_a_session_ends_with_its_time(brief: Core) -> None:
    """What runs fails and is killed; the record and the artifacts of earlier turns stay readable."""
    session = brief.shell("mkdir outputs; echo kept > outputs/kept.txt")
    brief.turn(session.id)
    brief.say(session.id, f"exec -a {mark('ttl')} sleep 600")
    turn = brief.turn(session.id, 2)
    failure = turn.to_dict()["x_agents_core"]["failure"]
    assert (turn.status, turn.error.code) == ("failed", "request_timeout")
    assert (failure["class"], failure["reason"]) == ("infrastructure", "session_expired")
    until(lambda: not seen_in_processes(mark("ttl")))
    read = brief.sessions.retrieve(session.id)
    assert read.status == "failed" and brief.artifacts(session.id) == {"/workspace/outputs/kept.txt": b"kept\n"}
    environment = brief.raw.get(f"/agents/environments/{read.environment.id}").json()
    assert environment["status"] == "expired"
    with pytest.raises(openai.ConflictError) as caught:
        brief.say(session.id, "true")
    assert caught.value.code == "environment_unavailable"
    assert brief.sessions.delete(session.id).deleted


def test_an_idle_session_ends_too_and_tells_its_readers(brief: Core) -> None:
    session = brief.shell(None)
    with brief.sessions.events.stream(session.id) as events:
        kinds = [event.type for event in events]
    assert kinds[-2:] == ["agent.session.environment.expired", "agent.session.failed"]


def test_a_life_goes_on_over_a_restart(tmp_path: Path) -> None:
    """The time counts from the creation, not from the start of the server."""
    life = ("--session-ttl", "15")  # long enough for two starts of a server on a busy machine
    with service("core", "serve", "--data", str(tmp_path), *life) as running:
        session, _ = connect(running).run("true")
    with service("core", "serve", "--data", str(tmp_path), *life) as running:
        core = connect(running)
        assert core.sessions.retrieve(session.id).status == "idle"
        until(lambda: core.sessions.retrieve(session.id).status == "failed", 20)
        assert time.time() - session.created_at < 20


def of_run(core: Core, run_id: str, script: str = "true") -> str:
    session = core.shell(script, metadata={"run_id": run_id})
    return str(session.id)


def test_reap_ends_one_run_on_a_server(core: Core) -> None:
    mine = [of_run(core, "dead-run", f"exec -a {mark('reap')} sleep 600"), of_run(core, "dead-run")]
    other = of_run(core, "another-run")
    core.running(mine[0])
    done = command("reap", "--run", "dead-run", OPENAI_BASE_URL=core.url, OPENAI_API_KEY=core.key)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2 sessions removed\n", "")
    assert not seen_in_processes(mark("reap"))
    assert core.sessions.retrieve(other).id == other
    for session_id in mine:
        with pytest.raises(openai.NotFoundError):
            core.sessions.retrieve(session_id)


def test_reap_ends_one_run_on_the_data_of_a_dead_server(tmp_path: Path) -> None:
    running = start_service("core", "serve", "--data", str(tmp_path))
    core = connect(running)
    gone = of_run(core, "dead-run", f"mkdir outputs; echo x > outputs/x; exec -a {mark('dead')} sleep 600")
    core.running(gone)
    stays = of_run(core, "another-run")
    core.turn(stays)
    running.process.send_signal(signal.SIGKILL)
    running.process.wait()
    until(lambda: not seen_in_processes(mark("dead")))
    done = command("reap", "--run", "dead-run", "--data", str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "1 session removed\n")
    assert not (tmp_path / "rooms" / gone).exists() and (tmp_path / "rooms" / stays).exists()
    with service("core", "serve", "--data", str(tmp_path)) as again:
        assert connect(again).sessions.retrieve(stays).id == stays


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("reap", "--all"), "OPENAI_BASE_URL"),
        (("reap", "--all", "--data", "/nowhere"), "no data"),
        (("serve", "--session-ttl", "0"), "--session-ttl"),
        (("serve", "--prices", "/nowhere"), "/nowhere"),
    ],
)
def test_wrong_use_is_one_line(arguments: tuple[str, ...], words: str) -> None:
    done = command(*arguments, OPENAI_BASE_URL="", OPENAI_API_KEY="")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("core: ") and words in done.stderr and done.stderr.count("\n") == 1


def test_reap_says_that_a_server_holds_the_data(tmp_path: Path) -> None:
    with service("core", "serve", "--data", str(tmp_path)):
        done = command("reap", "--all", "--data", str(tmp_path))
    assert done.returncode == 2 and "another server" in done.stderr


def test_doctor_says_what_holds_here(tmp_path: Path) -> None:
    """With an empty prefix and PATH, the harnesses of npm are missing: weaker, and it says how to get them."""
    done = command("doctor", "--npm-prefix", str(tmp_path), PATH="/usr/bin:/bin")
    lines = {line.split()[1]: line for line in done.stdout.splitlines()}
    assert done.returncode == 3 and "Traceback" not in done.stderr
    for name in ("sandbox", "processes", "disk", "output", "codex", "claude_sdk", "shell"):
        assert lines[name].startswith("ok ")
    assert "memory" in lines and "cpu" in lines  # by cgroups or, weaker, without
    assert lines["pi"].startswith("weak ") and "npm install" in lines["pi"]
    assert "bubblewrap" in lines["sandbox"]
