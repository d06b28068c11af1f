"""Turns: cancel and delete at every moment, slots, preparation, later turns, and what a killed server leaves."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from conftest import CANCEL, HOSTED, SHELL, TERMINAL, Core, connect, seen_in_processes, service, start_service, until
from model_endpoint import ModelEndpoint

BUSY = "session must be durably idle or failed without required actions before deletion"


def marked(mark: str, seconds: float = 300) -> str:
    """A script of which every process carries `mark`, some of them in the background and deaf to SIGTERM."""
    deaf = f'trap "" TERM; exec -a {mark} sleep {seconds}'
    return (
        f"mkdir -p outputs; echo x > outputs/a; echo begun; (setsid bash -c '{deaf}' &); exec -a {mark} sleep {seconds}"
    )


def begun(core: Core, session_id: str) -> bool:
    return "begun" in str(list(events_of(core, session_id)))


def events_of(core: Core, session_id: str) -> Iterator[dict[str, Any]]:
    """The events so far: the log is replayed from its beginning, up to what is there."""
    headers = {"Last-Event-ID": "none"}
    with core.raw.stream("GET", f"/agents/sessions/{session_id}/events", headers=headers, timeout=0.5) as answer:
        try:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    yield json.loads(line[6:])
        except httpx.ReadTimeout:
            return


# ── cancel ────────────────────────────────────────────────────────────────────────────────────────


def test_cancel_a_running_turn(core: Core) -> None:
    """Terminal within 10 s by polling, nothing published, open items closed, no process left."""
    mark = f"mark-{uuid.uuid4()}"
    session = core.shell(marked(mark))
    until(lambda: seen_in_processes(mark))
    assert core.sessions.retrieve(session.id).status == "in_progress"
    assert core.sessions.events.with_raw_response.create(session.id, events=CANCEL).status_code == 202
    turn = core.turn(session.id, seconds=10)
    assert (turn.status, turn.error) == ("cancelled", None)
    assert not seen_in_processes(mark)
    assert core.artifacts(session.id) == {}
    assert [item.status for item in core.sessions.items.list(session.id, order="asc")] == ["completed", "incomplete"]
    assert core.output(session.id) == "begun\n"
    assert core.sessions.retrieve(session.id).status == "idle"
    core.say(session.id, "cat outputs/a")
    assert core.turn(session.id, 2).status == "completed"
    assert core.artifacts(session.id) == {"/workspace/outputs/a": b"x\n"}


def test_cancel_a_harness_whose_model_is_silent(core: Core, model: ModelEndpoint) -> None:
    """The call that is under way ends with the turn."""
    session = core.agent("codex", model.bundle("codex", "hang", "cancel"))
    until(lambda: model.requests["cancel"])
    core.cancel(session.id)
    turn = core.turn(session.id, seconds=10)
    assert (turn.status, turn.usage) == ("cancelled", None)
    assert model.hung_up["cancel"].wait(5)


def test_cancel_without_a_turn_has_no_effect(core: Core) -> None:
    session, turn = core.run("echo done")
    core.cancel(session.id)
    core.sessions.events.create(session.id, events=CANCEL * 3)
    assert core.sessions.turns.retrieve(turn.id, session_id=session.id).to_dict() == turn.to_dict()
    idle = core.shell(None)
    core.cancel(idle.id)
    assert list(core.sessions.turns.list(idle.id)) == []


def test_cancel_while_preparing_leaves_the_session_usable(core: Core) -> None:
    setup = [{"command": "sleep 0.5; echo prepared > /workspace/p"}]
    session = core.shell("cat p", environment={"setup_commands": setup})
    core.cancel(session.id)
    assert core.turn(session.id, seconds=0.4).status == "cancelled"  # at once, not after the preparation
    core.say(session.id, "cat p")
    assert core.turn(session.id, 2).status == "completed"
    assert core.output(session.id) == "prepared\n"


@pytest.mark.parametrize("milliseconds", [0, 10, 20, 30, 40, 50, 60, 80])
def test_cancel_at_any_moment(core: Core, milliseconds: int) -> None:
    """A completion may win; whoever wins, the record is whole, and the next turn runs."""
    session = core.shell("mkdir -p outputs; echo x > outputs/a")
    threading.Event().wait(milliseconds / 1000)
    core.cancel(session.id)
    turn = core.turn(session.id, seconds=10)
    assert turn.status in ("completed", "cancelled")
    assert (core.artifacts(session.id) != {}) == (turn.status == "completed")
    assert "in_progress" not in [item.status for item in core.sessions.items.list(session.id)]
    core.say(session.id, "true")
    assert core.turn(session.id, 2).status == "completed"


# ── delete ────────────────────────────────────────────────────────────────────────────────────────


def test_delete_while_running_is_refused_once(core: Core) -> None:
    """The default client, which repeats settling conflicts, asks once and then deletes after a cancel."""
    requests: list[Any] = []
    client: Any = openai.OpenAI(
        base_url=core.url,
        api_key=core.key,
        http_client=openai.DefaultHttpxClient(event_hooks={"request": [requests.append]}),
    )
    session = core.shell("sleep 300")
    core.running(session.id)
    with pytest.raises(openai.ConflictError) as raised:
        client.beta.agents.sessions.delete(session.id)
    assert (raised.value.code, raised.value.body["message"]) == ("conflict_error", BUSY)  # type: ignore[index,call-overload]
    assert len(requests) == 1 and raised.value.response.headers["x-should-retry"] == "false"
    core.cancel(session.id)
    assert client.beta.agents.sessions.delete(session.id).deleted
    assert client.beta.agents.sessions.delete(session.id).deleted  # again


def test_delete_with_cancel_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    mark = f"mark-{uuid.uuid4()}"
    with service("core", "serve", "--data", str(tmp_path / "data")) as running:
        core = connect(running)
        session = core.shell(marked(mark))
        until(lambda: seen_in_processes(mark))
        assert core.raw.delete(f"/agents/sessions/{session.id}?cancel=true").status_code == 200
        assert not seen_in_processes(mark)
        assert list((tmp_path / "data/rooms").iterdir()) == []


@pytest.mark.parametrize("milliseconds", [0, 10, 20, 30, 50])
def test_delete_at_any_moment(core: Core, milliseconds: int) -> None:
    setup = [{"command": "sleep 0.02"}]
    session = core.shell("mkdir -p outputs; echo x > outputs/a", environment={"setup_commands": setup})
    threading.Event().wait(milliseconds / 1000)
    assert core.raw.delete(f"/agents/sessions/{session.id}?cancel=true").status_code == 200
    assert core.raw.get(f"/agents/sessions/{session.id}").status_code == 404


def test_cancels_deletes_and_messages_all_at_once(core: Core) -> None:
    """Nobody gets a server error, and in the end every session is gone."""
    sessions = [core.shell("sleep 0.05", environment={"setup_commands": [{"command": "true"}]}) for _ in range(6)]
    message = {
        "type": "agent.session.input.message",
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "true"}]}],
    }

    def poke(number: int) -> int:
        path = f"/agents/sessions/{sessions[number % 6].id}"
        if number % 5 == 4:
            return core.raw.delete(f"{path}?cancel=true").status_code
        if number % 5 == 3:
            return core.raw.delete(path).status_code
        return core.post(f"{path}/events", {"events": CANCEL if number % 5 else [message]}).status_code

    with ThreadPoolExecutor(12) as pool:
        assert set(pool.map(poke, range(120))) <= {200, 202, 404, 409}
    for session in sessions:
        until(lambda: core.raw.delete(f"/agents/sessions/{session.id}?cancel=true").status_code == 200)  # noqa: B023
        assert core.raw.get(f"/agents/sessions/{session.id}/turns").status_code == 404


# ── slots ─────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def blocked(core: Core, slots: int) -> Iterator[list[Any]]:
    """All slots taken by sessions that run until the end of the block."""
    holders = [core.shell("sleep 300") for _ in range(slots)]
    for holder in holders:
        core.running(holder.id)
    yield holders
    for holder in holders:
        core.raw.delete(f"/agents/sessions/{holder.id}?cancel=true")


def test_turns_beyond_the_slots_wait(tmp_path: Path) -> None:
    """Queued turns are readable, cancellable and deletable; the rest are admitted in order, two at a time."""
    data = tmp_path / "data"
    with service("core", "serve", "--data", str(data), "--slots", "2") as running:
        core = connect(running)
        with blocked(core, 2):
            waiting = [core.shell(f"echo {n}; sleep 0.05") for n in range(10)]
            for session in waiting:
                assert core.sessions.retrieve(session.id).status == "in_progress"
                (turn,) = core.sessions.turns.list(session.id)
                assert (turn.status, turn.started_at) == ("queued", None)
            cancelled, deleted, *rest = waiting
            core.cancel(cancelled.id)
            (turn,) = core.sessions.turns.list(cancelled.id)
            assert turn.status == "cancelled" and core.sessions.retrieve(cancelled.id).status == "idle"
            core.sessions.delete(deleted.id)
            with pytest.raises(openai.ConflictError) as raised:
                core.say(rest[0].id, "true")
            assert raised.value.code == "turn_conflict"
        assert [core.turn(session.id).status for session in rest] == ["completed"] * 8
    database = sqlite3.connect(data / "core.db")
    rows = database.execute("SELECT session_id, json_extract(doc, '$.type') FROM events ORDER BY seq").fetchall()
    order, now, most = list[str](), 0, 0
    for session_id, kind in rows:
        if session_id in {session.id for session in rest}:
            order += [session_id] if kind.endswith("turn.in_progress") else []
            now += kind.endswith("turn.in_progress") - kind.endswith("turn.completed")
            most = max(most, now)
    assert order == [session.id for session in rest] and most == 2


# ── preparation ───────────────────────────────────────────────────────────────────────────────────


def test_setup_commands_run_in_order_as_the_agent(core: Core) -> None:
    setup = [
        {"command": "mkdir d; id -un > who; echo $SECRET > env"},
        {"command": "pwd > ../where", "cwd": "/workspace/d"},
    ]
    environment = {"setup_commands": setup, "env": {"SECRET": "s3"}}
    session, turn = core.run("cat who env where; echo $SECRET", environment=environment)
    assert turn.status == "completed" and turn.to_dict()["x_agents_core"]["timings"]["preparing_s"] > 0
    assert core.output(session.id) == "agent\ns3\n/workspace/d\ns3\n"


@pytest.mark.parametrize(
    "command, code",
    [({"command": "exit 2"}, 2), ({"command": "true", "cwd": "/nowhere"}, 1), ({"command": "kill -9 $$"}, 137)],
)
def test_a_failing_setup_command_fails_turn_and_session(core: Core, command: Any, code: int) -> None:
    session, turn = core.run("true", environment={"setup_commands": [{"command": "true"}, command]})
    message = f'script "setup_commands[1]" failed with exit code {code}'
    assert turn.status == "failed" and turn.error.to_dict() == {"code": "sandbox_error", "message": message}
    failure = turn.to_dict()["x_agents_core"]["failure"]
    assert (failure["class"], failure["reason"]) == ("environment", "setup_command_failed")
    assert failure["params"] == {"index": 1, "exit_code": code}
    read = core.sessions.retrieve(session.id)
    assert (read.status, read.error) == ("failed", message)
    environment = core.agents.environments.retrieve(session.environment.id)
    assert environment.status == "failed"
    with pytest.raises(openai.ConflictError) as raised:
        core.say(session.id, "true")
    assert raised.value.code == "environment_unavailable"
    assert raised.value.response.headers["x-should-retry"] == "false"
    assert core.sessions.delete(session.id).deleted


def test_a_session_without_input_fails_without_a_turn(core: Core) -> None:
    session = core.shell(None, environment={"setup_commands": [{"command": "exit 3"}]})
    until(lambda: core.sessions.retrieve(session.id).status == "failed")
    assert list(core.sessions.turns.list(session.id)) == []


@pytest.mark.parametrize("first", [None, "true"])
def test_a_message_sent_during_a_preparation_that_fails_fails_too(core: Core, first: str | None) -> None:
    session = core.shell(first, environment={"setup_commands": [{"command": "sleep 0.4; exit 1"}]})
    if first:
        core.cancel(session.id)
    core.say(session.id, "true")
    turn = core.turn(session.id, 2 if first else 1, seconds=10)
    assert (turn.status, turn.error.code) == ("failed", "sandbox_error")


@pytest.mark.parametrize("given", [None, "true"] * 3)
def test_delete_during_a_preparation_ends_it(core: Core, given: str | None) -> None:
    """Also when its sandbox is just being started."""
    mark = f"mark-{uuid.uuid4()}"
    session = core.shell(given, environment={"setup_commands": [{"command": f"exec -a {mark} sleep 300"}]})
    until(lambda: seen_in_processes(mark), every=0)
    assert core.sessions.delete(session.id).deleted and not seen_in_processes(mark)


# ── later turns ───────────────────────────────────────────────────────────────────────────────────


def test_a_session_keeps_its_files_and_thread(core: Core, model: ModelEndpoint) -> None:
    """The second turn of a real harness sees the first one's conversation."""
    session = core.agent("codex", model.bundle("codex", "ok", "thread"), text="first words")
    assert core.turn(session.id).status == "completed"
    core.say(session.id, "second words")
    assert core.turn(session.id, 2).status == "completed"
    assert "first words" in str(model.requests["thread"][1].body)
    usage = core.sessions.retrieve(session.id).usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (22, 14, 36)


def test_a_message_while_a_turn_runs_is_refused(core: Core) -> None:
    session = core.shell("sleep 300")
    core.running(session.id)
    with pytest.raises(openai.ConflictError) as raised:
        core.say(session.id, "true")
    assert raised.value.code == "turn_conflict" and raised.value.response.headers["x-should-retry"] == "false"
    core.raw.delete(f"/agents/sessions/{session.id}?cancel=true")


def test_a_failed_turn_leaves_the_session_usable(core: Core) -> None:
    session, turn = core.run("echo x > outputs")
    assert turn.status == "failed" and core.sessions.retrieve(session.id).status == "failed"
    assert core.sessions.retrieve(session.id).error == turn.error.message
    core.say(session.id, "rm outputs")
    assert core.turn(session.id, 2).status == "completed"
    assert core.sessions.retrieve(session.id).status == "idle"


def test_turns_leave_no_descriptor_open(core: Core) -> None:
    """Neither open nor, worse, to be closed once more when another file has its number."""
    descriptors = Path(f"/proc/{core.service.process.pid}/fd")

    def turns(count: int) -> int:
        for _ in range(count):
            core.run("echo hi")
        return len(list(descriptors.iterdir()))

    before = turns(3)
    assert turns(20) <= before + 2


# ── restart ───────────────────────────────────────────────────────────────────────────────────────


def test_a_killed_server_leaves_nothing_hanging(tmp_path: Path, model: ModelEndpoint) -> None:
    """After kill -9 and a start on the same data every turn is over, and keys still name the same session."""
    mark, arguments = f"mark-{uuid.uuid4()}", ("core", "serve", "--data", str(tmp_path / "data"), "--slots", "3")
    running = start_service(*arguments)
    core = connect(running)
    body = {"agent": SHELL, "environment": HOSTED, "input": marked(mark)}
    in_turn = core.post("/agents/sessions", body, idempotency_key="k").json()["id"]
    calling = core.agent("codex", model.bundle("codex", "hang", "killed")).id
    preparing = core.shell("true", environment={"setup_commands": [{"command": f"exec -a {mark} sleep 300"}]}).id
    queued = core.shell("true").id
    deleted = core.shell(None).id
    core.sessions.delete(deleted)
    until(lambda: seen_in_processes(mark) and begun(core, in_turn) and model.requests["killed"])
    os.kill(running.process.pid, signal.SIGKILL)
    running.process.wait()
    until(lambda: not seen_in_processes(mark), 10)
    assert model.hung_up["killed"].wait(10)

    with service(*arguments) as again:
        core = connect(again)
        for session_id in (in_turn, calling, preparing, queued):
            (turn,) = core.sessions.turns.list(session_id)
            assert (turn.status, turn.error.to_dict()) == (
                "failed",
                {"code": "server_error", "message": "interrupted by restart"},
            )
            failure = turn.to_dict()["x_agents_core"]["failure"]
            assert (failure["class"], failure["reason"]) == ("infrastructure", "server_restarted")
            assert "in_progress" not in [item.status for item in core.sessions.items.list(session_id)]
            assert core.sessions.retrieve(session_id).status == "failed"
        kinds = [event["type"].removeprefix("agent.session.") for event in events_of(core, in_turn)]
        assert kinds[-3:] == ["turn.item.done", "turn.failed", "failed"]
        kinds = [event["type"].removeprefix("agent.session.") for event in events_of(core, queued)]
        assert kinds[-3:] == ["environment.failed", "turn.failed", "failed"]
        assert core.post("/agents/sessions", body, idempotency_key="k").json()["id"] == in_turn
        assert core.post("/agents/sessions", {**body, "input": "x"}, idempotency_key="k").status_code == 409
        core.say(in_turn, "cat outputs/a")
        assert core.turn(in_turn, 2).status == "completed" and core.output(in_turn).endswith("x\n")
        core.say(calling, "go on")  # its key was in memory only
        turn = core.turn(calling, 2)
        assert (turn.status, turn.error.code) == ("failed", "authentication_error")
        for session_id in (in_turn, calling, preparing, queued, deleted):
            assert core.sessions.delete(session_id).deleted
        assert list((tmp_path / "data/rooms").iterdir()) == []
        assert list((tmp_path / "data/blobs").iterdir()) == []


def test_an_orderly_stop_ends_running_turns_too(tmp_path: Path) -> None:
    mark, arguments = f"mark-{uuid.uuid4()}", ("core", "serve", "--data", str(tmp_path / "data"))
    running = start_service(*arguments, log=tmp_path / "log")
    core = connect(running)
    session = core.shell(marked(mark))
    until(lambda: seen_in_processes(mark))
    begin = time.monotonic()
    assert running.stop() == 0 and time.monotonic() - begin < 10
    assert not seen_in_processes(mark) and (tmp_path / "log").read_text() == ""
    with service(*arguments) as again:
        assert connect(again).turn(session.id).status in TERMINAL


def test_two_servers_do_not_share_their_data(tmp_path: Path) -> None:
    arguments = ("core", "serve", "--data", str(tmp_path / "data"))
    with service(*arguments) as running:
        core = connect(running)
        session = core.shell("sleep 0.5; echo ok")
        with pytest.raises(AssertionError, match="exit status 2"):
            start_service(*arguments, log=tmp_path / "log").stop()
        assert core.turn(session.id).status == "completed"
    assert "use another --data" in (tmp_path / "log").read_text()
