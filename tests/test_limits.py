"""What the server holds is bounded, and says so: turns that wait, streams, slow clients, a disk that is full."""

from __future__ import annotations

import contextlib
import re
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from conftest import HOSTED, ROOT, SHELL, Core, connect, service, start_service, until
from stock import FLAVOURS, Stock

from core.server import MAX_STREAMS
from core.turns import LINE

SESSIONS = "/agents/sessions"
MIB = 1 << 20


def refused(answer: httpx.Response, code: str) -> None:
    """It is a 503 of this code that the stock client repeats in time."""
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (503, "server_error", code)
    assert 0 < int(answer.headers["retry-after"]) <= 120


# ── turns that wait ───────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def full() -> Iterator[tuple[Core, list[str]]]:
    """A server with one slot, taken, and with as many waiting turns as it admits."""
    with service("core", "serve", "--slots", "1") as running:
        core = connect(running)
        idle = core.shell(None)
        until(lambda: core.agents.environments.retrieve(idle.environment.id).status == "ready")
        holder = core.shell("sleep 600")
        core.running(holder.id)
        body = {"agent": SHELL, "environment": HOSTED, "input": "sleep 600"}
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: core.post(SESSIONS, body), range(LINE)))
        assert {answer.status_code for answer in answers} == {201}
        yield core, [idle.id, *(answer.json()["id"] for answer in answers)]


def test_a_full_line_refuses_creates_and_messages(full: tuple[Core, list[str]]) -> None:
    core, (idle, first, *_) = full
    body = {"agent": SHELL, "environment": HOSTED, "input": "true", "metadata": {"mark": "refused"}}
    refused(core.post(SESSIONS, body, idempotency_key="refused"), "execution_unavailable")
    refused(core.post(SESSIONS, {**body, "stream": True}), "execution_unavailable")
    message = {"type": "agent.session.input.message", "input": [{"role": "user", "content": [TEXT]}]}
    refused(core.post(f"{SESSIONS}/{idle}/events", {"events": [message]}), "execution_unavailable")
    assert list(core.sessions.list(metadata={"mark": "refused"})) == []
    assert list(core.sessions.turns.list(idle)) == []
    assert core.sessions.retrieve(first).status == "in_progress"  # reading goes on


TEXT = {"type": "input_text", "text": "true"}


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_the_stock_client_waits_for_its_place(full: tuple[Core, list[str]], flavour: str) -> None:
    """One that asks again by itself, with a key, has one session once a place is free."""
    core, waiting = full
    answers = list[int]()

    def free_a_place(answer: httpx.Response) -> None:
        answers.append(answer.status_code)
        if answer.status_code == 503:
            answer.headers["retry-after-ms"] = "1"  # so that the test does not wait
            core.raw.delete(f"{SESSIONS}/{waiting.pop()}")

    client = Stock(flavour, core, free_a_place)
    headers = {"Idempotency-Key": f"place-{flavour}"}
    session = client.do(
        client.sessions.create(
            agent=SHELL, environment=HOSTED, input="sleep 600", metadata={"f": flavour}, extra_headers=headers
        )
    )
    assert answers == [503, 201] and [one.id for one in core.sessions.list(metadata={"f": flavour})] == [session.id]
    client.close()


# ── streams ───────────────────────────────────────────────────────────────────────────────────────


def dial(core: Core, receive: int | None = None) -> socket.socket:
    url = urllib.parse.urlsplit(core.url)
    connection = socket.socket()
    if receive:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
    connection.settimeout(30)
    connection.connect((url.hostname, url.port))
    return connection


def head(core: Core, method: str, path: str, *lines: str) -> bytes:
    fields = [*(f"{name}: {value}" for name, value in core.headers.items()), *lines]
    return "\r\n".join([f"{method} /v1{path} HTTP/1.1", "Host: x", *fields, "", ""]).encode()


def test_too_many_streams_are_refused(core: Core) -> None:
    session = core.shell(None)
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(dial(core)) for _ in range(MAX_STREAMS)]
        for stream in streams:
            stream.sendall(head(core, "GET", f"{SESSIONS}/{session.id}/events"))
            assert stream.recv(100).startswith(b"HTTP/1.1 200 ")
        refused(core.raw.get(f"{SESSIONS}/{session.id}/events"), "stream_unavailable")
        body = {"agent": SHELL, "environment": HOSTED, "input": "true", "stream": True, "metadata": {"mark": "stream"}}
        refused(core.post(SESSIONS, body), "stream_unavailable")
        assert list(core.sessions.list(metadata={"mark": "stream"})) == []
        assert core.post(SESSIONS, {**body, "stream": False}).status_code == 201
    until(lambda: core.post(SESSIONS, body).status_code == 201)  # their places are free again


# ── slow clients ──────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def hurried() -> Iterator[Core]:
    """A server that gives its clients a second."""
    with service("core", "serve", "--client-timeout", "1") as running:
        yield connect(running)


def closed(connection: socket.socket, feed: bytes, times: int) -> bool:
    """Whether the server drops a connection on which a byte of `feed` comes ten times a second."""
    connection.settimeout(0.1)
    for number in range(times):
        try:
            if feed:
                connection.sendall(feed[number : number + 1])
            if not connection.recv(1 << 16):
                return True
        except TimeoutError:
            continue
        except OSError:
            return True
    return False


SLOW = {
    "a head": b"POST /v1/agents/sessions HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 100,
    "nothing": b"",
}


@pytest.mark.parametrize("what", [*SLOW, "a body", "a body without a key"])
def test_a_request_that_trickles_is_dropped(hurried: Core, core: Core, what: str) -> None:
    """The control: a server with the usual patience keeps it."""
    for server, dropped, times in ((hurried, True, 100), (core, False, 25)):
        with dial(server) as connection:
            if what in SLOW:
                assert closed(connection, SLOW[what], times) == dropped
            else:
                asked = head(server, "POST", SESSIONS, "Content-Length: 1000")
                connection.sendall(asked if what == "a body" else asked.replace(b"Bearer ", b"Bearer x"))
                if what == "a body without a key":
                    assert connection.recv(4096).startswith(b"HTTP/1.1 401 ")  # at once, whatever is still to come
                assert closed(connection, b"{" + b" " * 900, times) == dropped


def buffered(core: Core) -> int:
    """Bytes that the kernel holds for the clients of this server, on its side."""
    port = int(core.url.removesuffix("/v1").rpartition(":")[2])
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(int(row[4].partition(":")[0], 16) for row in rows if int(row[1].rpartition(":")[2], 16) == port)


def test_a_reader_that_takes_nothing_is_dropped(hurried: Core) -> None:
    """Of an answer and of a stream of events; one that takes it slowly is not."""
    script = "mkdir -p outputs; head -c 60000000 /dev/zero > outputs/a"
    session, _ = hurried.run(script)
    (artifact,) = hurried.sessions.artifacts.list(session.id)
    path = f"{SESSIONS}/{session.id}"
    with contextlib.ExitStack() as stack:
        for asked in (head(hurried, "GET", f"{path}/artifacts/{artifact.id}/content"),) * 3:
            stack.enter_context(dial(hurried, 4096)).sendall(asked)
        until(lambda: buffered(hurried) > MIB)
        until(lambda: buffered(hurried) == 0)  # dropped, not only forgotten
    with dial(hurried, 4096) as slow:
        slow.sendall(head(hurried, "GET", f"{path}/artifacts/{artifact.id}/content"))
        taken, begun = 0, time.monotonic()
        while time.monotonic() - begun < 4:
            threading.Event().wait(0.01)  # a slow client
            taken += len(slow.recv(1 << 16))
        assert taken > 100_000 and slow.recv(1)
    assert hurried.run("true")[1].status == "completed"


# ── the key ───────────────────────────────────────────────────────────────────────────────────────


def command(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "core", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, **options
    )


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_beyond_loopback_the_key_must_be_given(host: str) -> None:
    done = command("serve", "--host", host)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"core: set CORE_API_KEY .*\n", done.stderr)


def test_with_a_key_it_serves_beyond_loopback() -> None:
    with service("core", "serve", "--host", "0.0.0.0", env={"CORE_API_KEY": "a key of mine"}) as running:
        assert running.exports["OPENAI_API_KEY"] == "a key of mine"
        port = running.exports["OPENAI_BASE_URL"].rpartition(":")[2]
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}", api_key="a key of mine")
        assert list(client.beta.agents.sessions.list()) == []


def test_a_key_of_its_own_is_random() -> None:
    keys = set[str]()
    for _ in range(2):
        with service("core", "serve", env={"CORE_API_KEY": ""}) as running:
            keys.add(running.exports["OPENAI_API_KEY"])
    assert len(keys) == 2 and all(len(key) >= 40 for key in keys)


# ── disks ─────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def disk(place: Path, options: str) -> Iterator[Path]:
    """A small file system of its own."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("only root can mount a small disk")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.parametrize("options, words", [("size=16k", "space"), ("ro", "Read-only")])
def test_a_disk_that_takes_nothing_is_one_line(tmp_path: Path, options: str, words: str) -> None:
    with disk(tmp_path, options):
        done = command("serve", "--data", str(tmp_path / "data"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("core: ") and done.stderr.count("\n") == 1
    assert words in done.stderr or "disk is full" in done.stderr


def test_data_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    with service("core", "serve", "--data", str(tmp_path)):
        pass
    database = sqlite3.connect(tmp_path / "core.db")
    database.execute("PRAGMA user_version=99")
    database.close()
    before = (tmp_path / "core.db").read_bytes()
    done = command("serve", "--data", str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "newer version (schema 99)" in done.stderr and "update" in done.stderr
    assert (tmp_path / "core.db").read_bytes() == before


def test_a_disk_that_fills_up_in_mid_run_neither_corrupts_nor_hangs(tmp_path: Path) -> None:
    """Turns end with the cause, creates answer 503, and with space again all is well and whole."""
    with disk(tmp_path, "size=24m"):
        with service("core", "serve", "--data", str(tmp_path / "data"), log=tmp_path / "log") as running:
            core = connect(running)
            before, _ = core.run("mkdir -p outputs; echo kept > outputs/kept")
            filling = core.shell(
                "echo begun; until [ -e go ]; do sleep 0.02; done; head -c 300000 /dev/zero | tr '\\0' x"
            )
            core.running(filling.id)
            until(lambda: "command_execution" in [item.type for item in core.sessions.items.list(filling.id)])
            ballast = tmp_path / "ballast"
            with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            room = tmp_path / "data" / "rooms" / filling.id / "workspace"
            (room / "go").touch()
            body = {"agent": SHELL, "environment": HOSTED, "input": "true"}

            def out_of_space() -> bool:
                answer = core.post(SESSIONS, body)
                if answer.status_code == 503:
                    refused(answer, "artifact_storage_unavailable")
                    assert str(tmp_path) not in answer.text
                return answer.status_code == 503

            until(out_of_space)
            assert core.sessions.retrieve(before.id).status == "idle"  # reading goes on
            assert core.artifacts(before.id) == {"/workspace/outputs/kept": b"kept\n"}
            ballast.unlink()
            turn = core.turn(filling.id, seconds=20)
            failure = turn.to_dict()["x_agents_core"]["failure"]
            assert (turn.status, failure["class"], failure["reason"]) == ("failed", "infrastructure", "storage_failed")
            assert "full" in turn.error.message
            assert "in_progress" not in [item.status for item in core.sessions.items.list(filling.id)]
            turn = core.run("true")[1]
            assert (turn.status, turn.error) == ("completed", None)
            for session in list(core.sessions.list()):
                core.raw.delete(f"{SESSIONS}/{session.id}?cancel=true")
            running.process.kill()
            running.process.wait()
        with service("core", "serve", "--data", str(tmp_path / "data")) as again:
            assert connect(again).run("true")[1].status == "completed"
        database = sqlite3.connect(tmp_path / "data" / "core.db")
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert (tmp_path / "log").read_text() == ""


# ── what dead servers leave ───────────────────────────────────────────────────────────────────────


def test_the_next_server_sweeps_what_a_killed_one_left(tmp_path: Path) -> None:
    """And nothing else: not the data of a living server, not what only has such a name."""
    env = {"TMPDIR": str(tmp_path)}
    dead = start_service("core", "serve", env=env)
    connect(dead).run("mkdir -p outputs/deep; chmod 000 outputs/deep")
    (left,) = tmp_path.iterdir()
    with service("core", "serve", env=env) as living:
        (other,) = set(tmp_path.iterdir()) - {left}
        bystanders = [tmp_path / name for name in ("rl-eval-core-mine", "something.data", "rl-eval-core-file.data")]
        bystanders[0].mkdir()
        bystanders[1].mkdir()
        bystanders[2].touch()
        dead.process.kill()
        dead.process.wait()
        with service("core", "serve", env=env) as third:
            assert not left.exists() and other.exists() and all(path.exists() for path in bystanders)
            assert connect(living).run("true")[1].status == connect(third).run("true")[1].status == "completed"
    assert set(tmp_path.iterdir()) == set(bystanders)
