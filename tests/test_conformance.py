"""The rows of AGENTS_API 13 that a client walks, by the stock client of both flavours against a real server.

| Rows | Where |
| --- | --- |
| 1, 2, 3, 4, 5, 7, 8, 16, 24 | here |
| 6, 18 | `test_api_lists.py`, and here |
| 9, 13 | `test_api_sessions.py` |
| 10 | `test_artifacts.py`, `test_sandbox.py` |
| 11 | `test_sandbox.py`, `test_door.py`, `test_network.py` |
| 12 | `test_secrets.py`, `test_egress.py` |
| 14 | `test_api_turns.py`, `test_durability.py`, `test_kill.py` |
| 15, 17, 23 | `test_api_errors.py`; the matrix in `test_api_sessions.py`, `test_harnesses.py` |
| 19 | `test_api_events.py` |
| 20 | `test_egress.py` |
| 21 | `test_budget.py` |
| 22 | `test_api_turns.py`, `test_limits.py` |
| 25 | `test_old_client.py`, which runs the rows 1, 7 and 8 from here |
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from conftest import CANCEL, HOSTED, MESSAGE, SHELL, Core, connect, service, until
from model_endpoint import TEXT, ModelEndpoint
from stock import FLAVOURS, Stock

PREFIX = "agent.session."
ANSWER = "mkdir -p outputs; echo 1 > outputs/answer.json"
CODEX: Any = {"model": "m", "x_agents_core": {"harness": "codex"}}


@pytest.fixture(params=FLAVOURS)
def stock(request: pytest.FixtureRequest, core: Core) -> Iterator[Stock]:
    client = Stock(request.param, core)
    yield client
    client.close()


def say(stock: Stock, session_id: str, text: str) -> None:
    message = {"role": "user", "content": [{"type": "input_text", "text": text}]}
    stock.do(stock.sessions.events.create(session_id, events=[{"type": MESSAGE, "input": [message]}]))


def cancel(stock: Stock, session_id: str) -> None:
    stock.do(stock.sessions.events.create(session_id, events=CANCEL))


def shell(stock: Stock, script: str | None, environment: Any = None, **options: Any) -> Any:
    given = {} if script is None else {"input": script}
    return stock.do(
        stock.sessions.create(agent=SHELL, environment={**HOSTED, **(environment or {})}, **given, **options)
    )


# ── 1, 2: a life ──────────────────────────────────────────────────────────────────────────────────


def test_row_1_a_rollout(stock: Stock, model: ModelEndpoint) -> None:
    """create → poll → artifact → items → usage → delete, with a real harness."""
    model.scripts["row-1"] = ANSWER
    extension = {"model_provider": model.bundle("codex", "runs", "row-1")}
    body: Any = {"agent": CODEX, "environment": HOSTED, "input": "go", "metadata": {"run_id": "r"}}
    session = stock.do(stock.sessions.create(**body, extra_body={"x_agents_core": extension}))
    assert session._request_id.startswith("req_")
    network = session.environment.to_dict()["network"]
    assert network == {"access": "disabled", "allowed_domains": []}
    turn = stock.turn(session.id)
    assert (turn.status, turn.error) == ("completed", None)
    (artifact,) = stock.all(stock.sessions.artifacts.list(session.id))
    assert (artifact.turn_id, artifact.path) == (turn.id, "/workspace/outputs/answer.json")
    content = stock.do(stock.sessions.artifacts.content(artifact.id, session_id=session.id))
    assert content.read() == b"1\n"
    items = stock.all(stock.sessions.items.list(session.id, order="asc"))
    assert [item.type for item in items] == ["message", "command_execution", "message"]
    assert stock.do(stock.sessions.turns.retrieve(turn.id, session_id=session.id)).usage.total_tokens == 36
    assert stock.do(stock.sessions.retrieve(session.id)).usage.total_tokens == 36
    assert stock.do(stock.sessions.delete(session.id)).deleted
    with pytest.raises(openai.NotFoundError):
        stock.do(stock.sessions.retrieve(session.id))


def test_row_2_codes(stock: Stock) -> None:
    raw = stock.sessions.with_raw_response
    created = stock.do(raw.create(agent=SHELL, environment=HOSTED, input="true"))
    session_id = created.parse().id
    stock.turn(session_id)
    accepted = stock.do(stock.sessions.events.with_raw_response.create(session_id, events=[]))
    answers = [created, accepted, stock.do(raw.retrieve(session_id)), stock.do(raw.delete(session_id))]
    assert [answer.status_code for answer in answers] == [201, 202, 200, 200]
    assert accepted.http_response.content == b""
    assert all(answer.headers["x-request-id"].startswith("req_") for answer in answers)


# ── 3: a create that is repeated ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("key, sessions", [("a key", 1), (None, 2)])
def test_row_3_a_create_whose_answer_is_lost(core: Core, flavour: str, key: str | None, sessions: int) -> None:
    """The client asks again by itself. Without a key that makes a second session: nobody could know."""
    mark, lost = f"lost-{flavour}-{key}", list[int]()

    def lose_the_first(answer: httpx.Response) -> None:
        if answer.request.method == "POST" and not lost:
            lost.append(answer.status_code)
            raise httpx.RemoteProtocolError("the connection broke")

    client = Stock(flavour, core, lose_the_first)
    headers = {"Idempotency-Key": f"{mark}-{core.key}"} if key else {}
    session = shell(client, "true", metadata={"mark": mark}, extra_headers=headers)
    found = client.all(client.sessions.list(metadata={"mark": mark}))
    assert lost == [201] and len(found) == sessions and session.id in [one.id for one in found]
    if key:
        with pytest.raises(openai.ConflictError) as raised:
            shell(client, "false", extra_headers=headers)
        assert raised.value.code == "idempotency_conflict"
        client.do(client.sessions.delete(session.id))
        with pytest.raises(openai.ConflictError) as raised:
            shell(client, "true", metadata={"mark": mark}, extra_headers=headers)
        assert raised.value.code == "idempotency_conflict"
    client.close()


# ── 4, 5: cancel and delete at every stage ────────────────────────────────────────────────────────


class Stages:
    """A server with one slot, and sessions brought to a stage of their turn."""

    def __init__(self, core: Core, data: Path) -> None:
        self.core = core
        self.data = data
        self.holder: str | None = None

    def bring(self, stage: str) -> str:
        """The id of a session whose turn is there."""
        if stage == "queued":
            self.holder = self.core.shell("sleep 300").id
            self.core.running(self.holder)
            return str(self.core.shell(ANSWER).id)
        if stage == "preparing":
            session = self.core.shell(ANSWER, environment={"setup_commands": [{"command": "sleep 0.4"}]})
            self.wait_for(session.id, "environment.pending")
        elif stage == "running":
            session = self.core.shell(f"{ANSWER}; echo begun; sleep 300")
            self.wait_for(session.id, "turn.item.added", 2)
        elif stage == "finishing":
            session = self.core.shell(f"{ANSWER}; head -c 190000000 /dev/zero > outputs/large")
            blobs = self.data / "blobs" / session.id
            until(lambda: (blobs / "incoming").exists() and (blobs / "incoming").stat().st_size > 1 << 20, every=0)
        else:
            session = self.core.shell(ANSWER)
            self.core.turn(session.id)
        return str(session.id)

    def wait_for(self, session_id: str, kind: str, times: int = 1) -> None:
        seen = 0
        path = f"/agents/sessions/{session_id}/events"
        with self.core.raw.stream("GET", path, headers={"Last-Event-ID": "none"}, timeout=20) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: ") and json.loads(line[6:])["type"] == PREFIX + kind:
                    seen += 1
                    if seen == times:
                        return

    def release(self) -> None:
        if self.holder:
            self.core.raw.delete(f"/agents/sessions/{self.holder}?cancel=true")
            self.holder = None


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stages]:
    data = tmp_path_factory.mktemp("stages")
    with service("core", "serve", "--data", str(data), "--slots", "1") as running:
        yield Stages(connect(running), data)


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize(
    "stage, status, seconds",
    [
        ("queued", "cancelled", 1),
        ("preparing", "cancelled", 1),
        ("running", "cancelled", 10),
        ("finishing", "completed", 20),  # a completion that has begun wins
        ("completed", "completed", 1),
    ],
)
def test_row_4_cancel(stages: Stages, flavour: str, stage: str, status: str, seconds: float) -> None:
    client, session_id = Stock(flavour, stages.core), stages.bring(stage)
    cancel(client, session_id)
    cancel(client, session_id)  # again is no harm
    turn = client.turn(session_id, seconds)
    assert (turn.status, turn.error) == (status, None)
    published = {artifact.path for artifact in client.all(client.sessions.artifacts.list(session_id))}
    assert ("/workspace/outputs/answer.json" in published) == (status == "completed")
    assert "in_progress" not in [item.status for item in client.all(client.sessions.items.list(session_id))]
    assert client.do(client.sessions.retrieve(session_id)).status == "idle"
    stages.release()
    say(client, session_id, "true")  # the session goes on
    assert client.turn(session_id).status == "completed"
    client.do(client.sessions.delete(session_id))
    client.close()


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("stage", ["queued", "preparing", "running", "finishing", "completed"])
def test_row_5_delete(stages: Stages, flavour: str, stage: str) -> None:
    """Refused once and for all while a turn runs; after a cancel the default client waits it out."""
    deletes = list[int]()

    def count(answer: httpx.Response) -> None:
        deletes.extend([answer.status_code] if answer.request.method == "DELETE" else [])

    client, session_id = Stock(flavour, stages.core, count, max_retries=8), stages.bring(stage)
    if stage in ("running", "finishing"):
        with pytest.raises(openai.ConflictError) as raised:
            client.do(client.sessions.delete(session_id))
        assert deletes == [409] and raised.value.code == "conflict_error"
        cancel(client, session_id)
        assert client.do(client.sessions.delete(session_id)).deleted
        assert set(deletes[1:-1]) <= {409} and deletes[-1] == 200
    else:
        assert client.do(client.sessions.delete(session_id)).deleted and deletes == [200]
    assert client.do(client.sessions.delete(session_id)).deleted
    with pytest.raises(openai.NotFoundError):
        client.do(client.sessions.retrieve(session_id))
    assert not (stages.data / "rooms" / session_id).exists() and not (stages.data / "blobs" / session_id).exists()
    stages.release()
    client.close()


# ── 6, 18: pages ──────────────────────────────────────────────────────────────────────────────────


def test_row_6_and_18_pages(stock: Stock, model: ModelEndpoint, core: Core) -> None:
    """Every element once, also where the client pages by `last_id`."""
    session = core.agent("codex", model.bundle("codex", "many", f"pages-{id(stock)}"))
    turn = stock.turn(session.id)
    whole = stock.all(stock.sessions.items.list(session.id, order="asc", limit=100))
    of_turn = stock.all(stock.sessions.turns.items.list(turn.id, session_id=session.id, order="asc", limit=7))
    ids = [item.id for item in whole]
    assert len(set(ids)) == len(ids) == 251 and None not in ids and [item.id for item in of_turn] == ids
    with pytest.raises(openai.BadRequestError):
        stock.do(stock.sessions.turns.list(session.id, limit=101))
    with pytest.raises(openai.NotFoundError):
        stock.do(stock.sessions.turns.list(session.id, after="nothing"))


# ── 7: sessions.stream ────────────────────────────────────────────────────────────────────────────


def test_row_7_a_stream_collects_the_result(stock: Stock, model: ModelEndpoint) -> None:
    extension = {"model_provider": model.bundle("codex", "ok", "row-7")}
    session = stock.do(stock.sessions.create(agent=CODEX, environment=HOSTED, extra_body={"x_agents_core": extension}))
    with stock.inside(stock.sessions.stream(session.id, input="go")) as stream:
        result = stock.do(stream.get_final_result())
    assert result.turn.status == "completed" and result.turn.usage.total_tokens == 18
    assert [part.text for message in result.messages for part in message.content] == [TEXT]


@pytest.mark.parametrize("script, reason", [("echo x > outputs", "failed"), ("sleep 300", "cancelled")])
def test_row_7_a_stream_tells_how_a_turn_ended(stock: Stock, script: str, reason: str) -> None:
    session, kinds = shell(stock, None), list[str]()
    with stock.inside(stock.sessions.stream(session.id, input=script)) as stream:
        stream.with_result_collection()
        for event in stock.each(stream):
            kinds.append(event.type)
            if event.type == f"{PREFIX}turn.in_progress" and reason == "cancelled":
                cancel(stock, session.id)
        with pytest.raises(Exception, match=reason):
            stock.do(stream.get_final_result())
    assert kinds[-2] == f"{PREFIX}turn.{reason}"
    assert stock.turn(session.id).status == reason


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_row_7_a_stream_that_is_cut(flavour: str) -> None:
    """The server dies: no result, and no waiting for one."""
    with service("core", "serve") as running:
        client = Stock(flavour, connect(running))
        session = shell(client, None)
        with client.inside(client.sessions.stream(session.id, input="sleep 300")) as stream:
            next(event for event in client.each(stream) if event.type == f"{PREFIX}turn.in_progress")
            running.process.kill()
            with pytest.raises((RuntimeError, httpx.TransportError, openai.APIConnectionError)):
                client.do(stream.until_done())
        client.close()


def test_row_7_repeated_event_ids(stock: Stock) -> None:
    """What a replay repeats has the ids it had: nothing is counted twice."""
    session = shell(stock, "echo hi")
    stock.turn(session.id)

    def replay(last: str) -> list[str]:
        stream = stock.do(stock.sessions.events.stream(session.id, extra_headers={"Last-Event-ID": last}))
        ids = list[str]()
        for event in stock.each(stream):
            ids.append(event.event_id)
            if event.type == f"{PREFIX}idle":
                break
        stock.do(stream.close())
        return ids

    first = replay("unknown")
    assert replay("unknown") == first and replay(first[3]) == first[4:] and len(set(first)) == len(first)


def test_row_7_tools_of_the_client_are_refused_by_name(stock: Stock) -> None:
    """Priority B, not built: an agent with functions is no agent without."""
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    with pytest.raises(openai.BadRequestError) as raised:
        stock.do(stock.sessions.create(agent={**CODEX, "tools": tools}, environment=HOSTED))
    assert (raised.value.code, raised.value.param) == ("unsupported_or_invalid_configuration", "agent.tools")


# ── 8: the creation stream ────────────────────────────────────────────────────────────────────────


def test_row_8_a_creation_stream(stock: Stock, model: ModelEndpoint) -> None:
    model.scripts["row-8"] = ANSWER
    extension = {"model_provider": model.bundle("codex", "runs", "row-8")}
    body: Any = {"agent": CODEX, "environment": HOSTED, "input": "go", "stream": True}
    stream = stock.do(stock.sessions.create(**body, extra_body={"x_agents_core": extension}))
    result = stock.do(stream.get_final_result())
    assert result.turn.status == "completed"
    assert [part.text for message in result.messages for part in message.content] == [TEXT]
    found = stock.sessions.artifacts.for_result(result)
    content = stock.do(found.content("/workspace/outputs/answer.json"))
    assert content.read() == b"1\n"


@pytest.mark.parametrize("script, reason", [("echo x > outputs", "failed"), (None, "failed")])
def test_row_8_a_creation_stream_that_fails(stock: Stock, script: str | None, reason: str) -> None:
    """In its turn, or before it could run."""
    setup = [] if script else [{"command": "exit 2"}]
    stream = shell(stock, script or "true", {"setup_commands": setup}, stream=True)
    with pytest.raises(Exception, match=reason):
        stock.do(stream.get_final_result())


# ── 16: an item of a type that the client does not know ───────────────────────────────────────────


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_row_16_an_unknown_item_comes_through(tmp_path: Path, flavour: str) -> None:
    """As a newer server may store it."""
    arguments = ("core", "serve", "--data", str(tmp_path))
    with service(*arguments) as running:
        session, _ = connect(running).run("echo hi")
    database = sqlite3.connect(tmp_path / "core.db")
    change = "json_set(doc, '$.type', 'telepathy', '$.waves', json('[1, 2]'))"
    database.execute(f"UPDATE items SET doc={change} WHERE doc LIKE '%command_execution%'")
    database.commit()
    database.close()
    with service(*arguments) as running:
        client = Stock(flavour, connect(running))
        _, item = client.all(client.sessions.items.list(session.id, order="asc"))
        raw = connect(running).raw.get(f"/agents/sessions/{session.id}/items?order=asc").json()["data"][1]
        client.close()
    assert item.type == "telepathy" and item.to_dict() == raw and raw["waves"] == [1, 2]


# ── 24: metadata, and who asks ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_row_24_metadata(core: Core, flavour: str) -> None:
    client = Stock(flavour, core, organization="org-1", project="proj-1")
    mark = f"k&[{flavour}]={threading.get_ident()}"
    session = shell(client, None, metadata={mark: "v é"})
    (found,) = client.all(client.sessions.list(metadata={mark: "v é"}))
    assert found.id == session.id and client.all(client.sessions.list(metadata={mark: "v"})) == []
    assert client.do(client.sessions.update(session.id, metadata={})).metadata == {}
    assert client.all(client.sessions.list(metadata={mark: "v é"})) == []
    client.close()
