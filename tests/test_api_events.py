"""Events: their order, what each carries, live and replayed; the helpers of the stock client over them."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from conftest import HOSTED, MESSAGE, SHELL, Core, until
from model_endpoint import TEXT, ModelEndpoint

Event = dict[str, Any]
PREFIX = "agent.session."
DELTA = "agent.output.command_execution_output.delta"
ADMISSION = ["turn.created", "turn.item.added", "in_progress"]
PREPARATION = ["environment.pending", "environment.ready"]
COMMAND = ["turn.item.added", DELTA, "turn.item.done"]
TEXT_EVENTS = ["turn.content_part.added", "turn.output_text.delta", "turn.output_text.done", "turn.content_part.done"]


def kinds(events: list[Event]) -> list[str]:
    return [event["type"].removeprefix(PREFIX) for event in events]


def frames(lines: Iterator[str]) -> Iterator[Event]:
    """The events of an SSE stream; checks the form of every frame."""
    fields = dict[str, str]()
    for line in lines:
        if line and not line.startswith(":"):
            name, _, value = line.partition(": ")
            fields[name] = value
        elif not line and fields:
            event = json.loads(fields["data"])
            assert (fields["id"], fields["event"]) == (event["event_id"], event["type"])
            yield event
            fields = {}


@contextmanager
def subscribed(core: Core, session_id: str, last: str | None = None) -> Iterator[Iterator[Event]]:
    headers = {} if last is None else {"Last-Event-ID": last}
    with core.raw.stream("GET", f"/agents/sessions/{session_id}/events", headers=headers, timeout=30) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        yield frames(answer.iter_lines())


def created(core: Core, script: str, **environment: Any) -> list[Event]:
    """All events of a creation stream."""
    body = {"agent": SHELL, "environment": {**HOSTED, **environment}, "input": script, "stream": True}
    with core.raw.stream("POST", "/agents/sessions", content=json.dumps(body)) as answer:
        assert answer.status_code == 201 and answer.headers["content-type"].startswith("text/event-stream")
        return list(frames(answer.iter_lines()))


def take(events: Iterator[Event], last: str) -> list[Event]:
    """Events up to and with the first one of type `last`."""
    taken = list[Event]()
    for event in events:
        taken.append(event)
        if event["type"] == PREFIX + last:
            return taken
    raise AssertionError(f"the stream ended before {last}: {kinds(taken)}")


def first(most: int, events: Iterator[Event]) -> Iterator[Event]:
    """So many events, or those up to the turn's last, after which none comes."""
    for event in itertools.islice(events, most):
        yield event
        if event["type"] == PREFIX + "idle":
            return


# ── order ─────────────────────────────────────────────────────────────────────────────────────────


def test_events_of_a_completed_turn(core: Core) -> None:
    events = created(core, "echo hi; mkdir -p outputs; touch outputs/a")
    expected = ["created", *ADMISSION, *PREPARATION, "turn.in_progress", *COMMAND, "turn.completed", "idle"]
    assert kinds(events) == expected
    by_kind = dict(zip(kinds(events), events, strict=True))
    session_id = by_kind["created"]["session"]["id"]
    turn_id = by_kind["turn.created"]["turn_id"]
    assert by_kind["created"]["session"]["status"] == "idle"
    assert by_kind["turn.created"]["turn"]["status"] == "queued"
    assert by_kind["in_progress"]["session"]["status"] == "in_progress"
    assert by_kind["environment.pending"]["environment"]["status"] == "pending"
    assert by_kind["turn.in_progress"]["turn"]["status"] == "in_progress"
    assert (by_kind[DELTA]["delta"], by_kind[DELTA]["output_index"]) == ("hi\n", 0)
    assert by_kind["turn.item.done"]["item"]["output"] == "hi\n" and by_kind["turn.item.done"]["output_index"] == 0
    assert by_kind["turn.completed"]["usage"] is None and by_kind["idle"]["session"]["status"] == "idle"
    message = events[2]
    assert (message["output_index"], message["item"]["role"], message["turn_id"]) == (None, "user", turn_id)
    for event in events:
        assert event.get("session_id", session_id) == session_id and "obfuscation" not in event
    assert len({event["event_id"] for event in events}) == len(events)
    # What the events tell is what the record holds.
    assert core.sessions.turns.retrieve(turn_id, session_id=session_id).to_dict() == by_kind["turn.completed"]["turn"]
    assert core.raw.get(f"/agents/sessions/{session_id}").json() == by_kind["idle"]["session"]


def test_events_of_a_failed_turn(core: Core) -> None:
    events = created(core, "echo x > outputs")
    assert kinds(events)[-3:] == ["turn.item.done", "turn.failed", "failed"]
    assert events[-2]["turn"]["error"]["code"] == "sandbox_error" and events[-1]["session"]["status"] == "failed"


def test_events_of_a_failed_preparation(core: Core) -> None:
    events = created(core, "true", setup_commands=[{"command": "exit 2"}])
    tail = ["environment.pending", "environment.failed", "turn.failed", "failed"]
    assert kinds(events) == ["created", *ADMISSION, *tail]
    assert events[-3]["environment"]["error"] == {
        "type": "server_error",
        "code": "environment_error",
        "message": 'script "setup_commands[0]" failed with exit code 2',
    }
    with subscribed(core, events[0]["session"]["id"], "replay") as replayed:
        assert list(replayed) == events  # the stream of a lost environment ends


def test_events_of_a_cancelled_turn(core: Core) -> None:
    session = core.shell("echo hi; sleep 300")
    with subscribed(core, session.id, "replay") as events:
        until(lambda: next(events)["type"] == DELTA)
        core.cancel(session.id)
        tail = take(events, "idle")
    assert kinds(tail) == ["turn.item.done", "turn.cancelled", "idle"]
    assert (tail[0]["item"]["status"], tail[0]["item"]["output"]) == ("incomplete", "hi\n")


def test_only_the_first_turn_prepares(core: Core) -> None:
    session, _ = core.run("true")
    with subscribed(core, session.id) as events:
        core.say(session.id, "echo 2")
        assert kinds(take(events, "idle")) == [*ADMISSION, "turn.in_progress", *COMMAND, "turn.completed", "idle"]


def test_events_of_an_assistant_message(core: Core, model: ModelEndpoint) -> None:
    session = core.agent("codex", model.bundle("codex", "ok", "events"))
    with subscribed(core, session.id, "replay") as stream:
        events = take(stream, "idle")
    start = kinds(events).index("turn.in_progress") + 1
    ending = ["turn.completed", "idle"]
    assert kinds(events)[start:] == ["turn.item.added", *TEXT_EVENTS, "turn.item.done", *ending]
    added, part, delta, text, part_done, done, completed = events[start:-1]
    assert (added["item"]["status"], added["item"]["content"]) == ("in_progress", [])
    assert part["part"] == {"type": "output_text", "text": ""} and part_done["part"]["text"] == TEXT
    assert delta["delta"] == text["text"] == done["item"]["content"][0]["text"] == TEXT
    assert {event["item_id"] for event in (part, delta, text, part_done)} == {added["item"]["id"]}
    assert {(event["output_index"], event["content_index"]) for event in (part, delta, text, part_done)} == {(0, 0)}
    assert completed["usage"]["total_tokens"] == 18 and done["item"]["status"] == "completed"


def test_what_an_event_announces_can_be_read_at_once(core: Core) -> None:
    for _ in range(5):
        session = core.shell("mkdir -p outputs; date > outputs/a")
        with subscribed(core, session.id, "replay") as events:
            turn_id = take(events, "turn.completed")[-1]["turn_id"]
        assert core.sessions.turns.retrieve(turn_id, session_id=session.id).status == "completed"
        assert len(core.artifacts(session.id)) == 1


# ── live and replayed ─────────────────────────────────────────────────────────────────────────────


def test_replay_has_no_gap_and_no_repeat(core: Core) -> None:
    session = core.shell("for n in 1 2 3 4 5; do echo $n; sleep 0.02; done")
    with subscribed(core, session.id, "unknown") as events:
        whole = take(events, "idle")
    ids = [event["event_id"] for event in whole]
    for number, last in enumerate(ids[:-1]):
        with subscribed(core, session.id, last) as events:
            assert take(events, "idle") == whole[number + 1 :]


def test_a_reader_that_reconnects_all_the_time_loses_nothing(core: Core) -> None:
    session = core.shell("for n in $(seq 40); do echo $n; sleep 0.01; done")
    seen, last = list[Event](), "none"
    while not seen or seen[-1]["type"] != PREFIX + "idle":
        with subscribed(core, session.id, last) as events:
            seen += first(3, events)
        last = seen[-1]["event_id"]
    with subscribed(core, session.id, "none") as events:
        assert take(events, "idle") == seen
    assert "".join(event["delta"] for event in seen if event["type"] == DELTA) == core.output(session.id)


def test_a_slow_reader_loses_nothing(core: Core) -> None:
    """Megabytes of events behind, and still in order."""
    session = core.shell(None)
    with subscribed(core, session.id) as events:
        for number in range(1, 9):
            core.say(session.id, "head -c 200000 /dev/zero | tr '\\0' x")
            core.turn(session.id, number)
        taken = [take(events, "idle") for _ in range(8)]
    assert all(len("".join(e["delta"] for e in turn if e["type"] == DELTA)) == 200000 for turn in taken)


def test_a_reader_that_lags_is_cut_and_goes_on_where_it_was(core: Core) -> None:
    """The control is `test_a_slow_reader_loses_nothing`: one that is behind by less is not cut."""
    session = core.shell(None)
    until(lambda: core.agents.environments.retrieve(session.environment.id).status == "ready")
    headers = "".join(f"{name}: {value}\r\n" for name, value in core.headers.items())
    host, port = core.url.removeprefix("http://").removesuffix("/v1").split(":")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(30)
        connection.connect((host, int(port)))
        connection.sendall(f"GET /v1/agents/sessions/{session.id}/events HTTP/1.0\r\n{headers}\r\n".encode())
        with connection.makefile("rb") as answer:
            while b": connected" not in answer.readline():
                pass
            for number in range(1, 41):  # more than the buffers of two sockets hold
                core.say(session.id, "head -c 200000 /dev/zero | tr '\\0' x")
                core.turn(session.id, number)
            lines = [line.decode().rstrip("\n") for line in answer]  # to the end: the server has closed it
    *shown, error = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert (error["type"], error["error"]["code"]) == ("error", "stream_interrupted")
    with subscribed(core, session.id, shown[-1]["event_id"]) as events:
        rest = [event for _ in range(40 - kinds(shown).count("idle")) for event in take(events, "idle")]
    with subscribed(core, session.id, "none") as events:
        until(lambda: next(events)["type"] == PREFIX + "environment.ready")
        assert [event for _ in range(40) for event in take(events, "idle")] == shown + rest


def test_a_stream_without_replay_starts_now(core: Core) -> None:
    session, _ = core.run("true")
    with subscribed(core, session.id) as events:
        core.say(session.id, "true")
        assert next(events)["type"] == PREFIX + "turn.created"


def test_many_readers_see_the_same(core: Core) -> None:
    session = core.shell("sleep 0.3; echo hi")
    seen: list[list[Event]] = []

    def read() -> None:
        with subscribed(core, session.id, "none") as events:
            seen.append(take(events, "idle"))

    readers = [threading.Thread(target=read) for _ in range(20)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(30)
    assert len(seen) == 20 and all(events == seen[0] for events in seen)


def test_a_stream_ends_with_its_session(core: Core) -> None:
    session, _ = core.run("true")
    with subscribed(core, session.id) as events:
        core.sessions.delete(session.id)
        assert list(events) == []


def test_obfuscation_is_accepted_and_absent(core: Core) -> None:
    session, _ = core.run("true")
    path = f"/agents/sessions/{session.id}/events?include_obfuscation=true"
    with core.raw.stream("GET", path, headers={"Last-Event-ID": ""}) as answer:
        assert "obfuscation" not in next(frames(answer.iter_lines()))


def test_the_flood_of_a_command_is_bounded_and_marked(core: Core) -> None:
    session, turn = core.run("yes | head -c 50000000")
    (_, item) = (found.to_dict() for found in core.sessions.items.list(session.id, order="asc"))
    assert turn.status == "completed" and len(item["output"]) < 300_000 and "bytes left out" in item["output"]
    assert item["x_agents_core"]["truncated"] == {"field": "output", "bytes": 50_000_000}
    with subscribed(core, session.id, "none") as events:
        assert len(json.dumps(take(events, "idle"))) < 2_000_000


# ── input events ──────────────────────────────────────────────────────────────────────────────────


def said(text: str) -> Event:
    return {"role": "user", "content": [{"type": "input_text", "text": text}]}


SAID = said("true")
TEXT_MESSAGE: Event = {"type": MESSAGE, "input": [SAID]}
RESULT: Event = {"type": f"{PREFIX}input.tool_result", "turn_id": "t", "call_id": "c", "success": True, "output": "x"}
CANCEL: Event = {"type": f"{PREFIX}input.cancel"}


@pytest.mark.parametrize(
    "events, param",
    [
        (None, "events"),
        ({}, "events"),
        ([1], "events[0]"),
        ([{}], "events[0].type"),
        ([{"type": "x"}], "events[0].type"),
        ([CANCEL] * 65, "events"),
        ([CANCEL, TEXT_MESSAGE], "events"),
        ([RESULT, CANCEL], "events"),
        ([{**CANCEL, "x": 1}], "events[0].x"),
        ([CANCEL, {**CANCEL, "turn_id": "t"}], "events[1].turn_id"),
        ([{**TEXT_MESSAGE, "x": 1}], "events[0].x"),
        ([{**TEXT_MESSAGE, "input": "text"}], "events[0].input"),
        ([{**TEXT_MESSAGE, "input": []}], "events[0].input"),
        ([{**TEXT_MESSAGE, "input": [{**SAID, "x": 1}]}], "events[0].input[0].x"),
        ([{**RESULT, "call_id": None}], "events[0].call_id"),
        ([{**RESULT, "turn_id": None}], "events[0].turn_id"),
        ([{**RESULT, "success": None}], "events[0].success"),
        ([{**RESULT, "x": 1}], "events[0].x"),
        ([{**RESULT, "error": "e"}], "events[0]"),
        ([{**RESULT, "success": False}], "events[0]"),
        ([{"type": f"{PREFIX}input.mcp_approval_request_result", "request_id": "r", "response": {}}], "events[0].type"),
        ([{"type": f"{PREFIX}input.computer_use_approval_request_result"}], "events[0].type"),
    ],
    ids=range(22),
)  # fmt: skip
def test_batches_that_are_refused_whole(core: Core, events: Any, param: str) -> None:
    session = core.shell(None)
    response = core.post(f"/agents/sessions/{session.id}/events", {"events": events})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert list(core.sessions.turns.list(session.id)) == []


def test_an_unknown_tool_call_has_the_words_the_client_waits_for(core: Core) -> None:
    session = core.shell(None)
    with pytest.raises(openai.BadRequestError) as raised:
        core.sessions.events.create(session.id, events=[RESULT])
    assert raised.value.code == "invalid_request_error"
    assert raised.value.body["message"] == "Unknown pending tool call: c"  # type: ignore[index,call-overload]
    assert core.post("/agents/sessions/nothing/events", {"events": [RESULT]}).status_code == 404


def test_a_queued_turn_exists_when_a_message_is_accepted(core: Core) -> None:
    session = core.shell(None)
    for number in range(1, 4):
        core.say(session.id, "true")
        assert len(list(core.sessions.turns.list(session.id))) == number
        core.turn(session.id, number)


def test_messages_of_one_batch_make_one_turn(core: Core) -> None:
    """Each is an item of its own, in order and with its own event; the harness gets them all."""
    session = core.shell(None)
    until(lambda: core.agents.environments.retrieve(session.environment.id).status == "ready")
    first = {**TEXT_MESSAGE, "input": [said("echo 1"), said("echo 2; echo 3")]}
    with subscribed(core, session.id) as stream:
        core.sessions.events.create(session.id, events=[first, {**TEXT_MESSAGE, "input": [said("echo 4")]}])
        events = take(stream, "in_progress")
    assert kinds(events) == ["turn.created", *["turn.item.added"] * 3, "in_progress"]
    core.turn(session.id)
    assert core.output(session.id) == "1\n2\n3\n4\n" and len(list(core.sessions.turns.list(session.id))) == 1
    items = [item.to_dict() for item in core.sessions.items.list(session.id, order="asc")][:3]
    assert items == [event["item"] for event in events[1:4]]
    assert [item["content"][0]["text"] for item in items] == ["echo 1", "echo 2; echo 3", "echo 4"]


def test_messages_of_a_creation_are_items_of_their_own(core: Core) -> None:
    agent, messages = {"x_agents_core": {"harness": "shell"}}, [said("echo 1"), said("echo 2")]
    session = core.sessions.create(agent=agent, environment=HOSTED, input=messages)
    core.turn(session.id)
    assert [item.type for item in core.sessions.items.list(session.id, order="asc")] == [
        "message",
        "message",
        "command_execution",
    ]


# ── the stock client's helpers ────────────────────────────────────────────────────────────────────


def test_sessions_stream_collects_the_result(core: Core, model: ModelEndpoint) -> None:
    session = core.agent("codex", model.bundle("codex", "ok", "helper"), text=None)
    until(lambda: core.agents.environments.retrieve(session.environment.id).status == "ready")
    with core.sessions.stream(session.id, input="go") as stream:
        result = stream.get_final_result()
    assert result.turn.status == "completed" and result.turn.usage.total_tokens == 18
    assert [part.text for message in result.messages for part in message.content] == [TEXT]


def test_async_sessions_stream_collects_the_result(core: Core, model: ModelEndpoint) -> None:
    session = core.agent("claude_sdk", model.bundle("claude_sdk", "ok", "async-helper"), text=None)

    async def run() -> Any:
        async with openai.AsyncOpenAI(base_url=core.url, api_key=core.key) as client:
            sessions: Any = client.beta.agents.sessions
            async with sessions.stream(session.id, input="go") as stream:
                return await stream.get_final_result()

    result = asyncio.run(run())
    assert [part.text for message in result.messages for part in message.content] == [TEXT]


def test_creation_stream_collects_the_result_and_its_artifact(core: Core, model: ModelEndpoint) -> None:
    model.scripts["creation"] = "mkdir -p outputs && printf 42 > outputs/answer"
    stream = core.agent("codex", model.bundle("codex", "runs", "creation"), stream=True)
    result = stream.get_final_result()
    assert [part.text for message in result.messages for part in message.content] == [TEXT]
    content = core.sessions.artifacts.for_result(result).content("/workspace/outputs/answer")
    assert content.read() == b"42"


@pytest.mark.parametrize("script, reason", [("echo x > outputs", "failed"), ("sleep 300", "cancelled")])
def test_sessions_stream_tells_how_a_turn_ended(core: Core, script: str, reason: str) -> None:
    session = core.shell(None)
    with core.sessions.stream(session.id, input=script) as stream:
        stream.with_result_collection()
        for event in stream:
            if event.type == PREFIX + "turn.in_progress" and reason == "cancelled":
                core.cancel(session.id)
        with pytest.raises(Exception, match=reason):
            stream.get_final_result()
    if reason == "failed":  # the helper enters idle sessions only
        with pytest.raises(ValueError, match="idle"), core.sessions.stream(session.id, input="true"):
            pass


def test_closing_a_stream_does_not_end_the_turn(core: Core) -> None:
    stream = core.shell("sleep 0.3; echo done", stream=True)
    session_id = next(event.session.id for event in stream)
    stream.close()
    assert core.turn(session_id).status == "completed" and core.output(session_id) == "done\n"


def test_a_creation_with_a_key_streams_again_from_the_first_event(core: Core) -> None:
    def ids() -> list[str]:
        stream = core.shell("echo hi", stream=True, extra_headers={"Idempotency-Key": f"stream-{core.key}"})
        return [event.event_id for event in stream]

    assert ids() == ids()


def test_polling_and_streaming_reach_the_same_state(core: Core) -> None:
    events = created(core, "echo hi")
    polled, turn = core.run("echo hi")
    ids = {"id", "session_id", "agent_id", "created_at", "started_at", "completed_at"}
    streamed = {name: value for name, value in events[-2]["turn"].items() if name not in ids}
    read = {name: value for name, value in turn.to_dict().items() if name not in ids}
    assert {type(shown["x_agents_core"].pop("timings")["preparing_s"]) for shown in (streamed, read)} == {float}
    assert streamed == read
    assert core.sessions.retrieve(polled.id).status == events[-1]["session"]["status"]
