"""Whose call it is: path and key, what a key can do, what a closed attempt answers, and the control listener."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from conftest import until
from engine import engine
from recorded import PATHS, Doc, Recorder, another, body, recorder


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorder]:
    with engine() as running, recorder(running, tmp_path_factory.mktemp("shared")) as gateway:
        yield gateway


@pytest.fixture
def gateway(shared: Recorder) -> Recorder:
    return another(shared)


@pytest.fixture(params=PATHS)
def dialect(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def opened(gateway: Recorder, attempt: int = 1, **more: Any) -> Doc:
    answer = gateway.control("POST", "/attempts", {"rollout_id": gateway.rollout, "attempt_id": attempt, **more})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_an_attempt_key_generates_for_its_attempt(gateway: Recorder, dialect: str) -> None:
    told = opened(gateway, 2)
    assert told["base_url"] == gateway.url(f"{gateway.rollout}~2")
    assert gateway.post(dialect, body(dialect), f"{gateway.rollout}~2", told["api_key"]).status_code == 200
    assert len(gateway.trace(attempt=2).calls) == 1


HEADERS = ["authorization", "x-api-key", "x-goog-api-key"]


@pytest.mark.parametrize("header", HEADERS)
def test_a_key_is_read_from_each_header(gateway: Recorder, header: str) -> None:
    key = opened(gateway)["api_key"]
    given = {header: f"Bearer {key}" if header == "authorization" else key}
    answer = gateway.client.post(f"{gateway.url()}/chat/completions", json=body("chat"), headers=given)
    assert answer.status_code == 200


def test_a_key_of_another_path_is_forbidden_in_the_same_words(gateway: Recorder, dialect: str) -> None:
    """Whether the path exists, belongs to another attempt, or never was: no difference shows."""
    key = opened(gateway)["api_key"]
    other = another(gateway)
    opened(other)
    gateway.post("chat", body("chat"), f"{other.rollout}x")  # opened by the run key
    paths = [other.rollout, f"{other.rollout}x", "never", f"{gateway.rollout}~2", "x~y"]
    answers = [gateway.post(dialect, body(dialect), path, key) for path in paths]
    assert {answer.status_code for answer in answers} == {403}
    assert len({answer.content for answer in answers}) == 1
    assert len({tuple(sorted(answer.headers)) for answer in answers}) == 1
    assert gateway.post(dialect, body(dialect), gateway.rollout, key).status_code == 200  # the control
    assert not (gateway.traces / "never").exists()


def test_the_run_key_is_good_for_what_it_opened_only(gateway: Recorder, dialect: str) -> None:
    assert gateway.post(dialect, body(dialect), f"{gateway.rollout}x").status_code == 200
    opened(gateway)
    assert gateway.post(dialect, body(dialect)).status_code == 403


@pytest.mark.parametrize("key", ["", "wrong", "ä"])
def test_an_unknown_key_is_401(gateway: Recorder, dialect: str, key: str) -> None:
    given = {"x-api-key": key.encode()}
    answer = gateway.client.post(f"{gateway.url()}/{PATHS[dialect]}", json=body(dialect), headers=given)
    assert answer.status_code == 401 and not (gateway.traces / gateway.rollout).exists()


def test_a_key_can_do_nothing_but_generate(gateway: Recorder) -> None:
    key = opened(gateway)["api_key"]
    for method, path in [("GET", "/status"), ("POST", "/pause"), ("GET", f"/attempts/{gateway.rollout}/1")]:
        assert gateway.control(method, path, key=key).status_code == 401
        assert gateway.control(method, path, key=gateway.key).status_code == 401
    for path in ("status", "attempts", "../../attempts", "..%2f..%2fattempts", "//responses", "responses/../status"):
        assert gateway.post(path, {}, key=key).status_code in (404, 403)
    base = gateway.exports["MODEL_BASE_URL"].partition("/rollouts")[0]
    admin = {"authorization": f"Bearer {gateway.exports['GATEWAY_ADMIN_KEY']}"}
    assert gateway.client.get(f"{base}/status", headers=admin).status_code == 404
    assert gateway.control("GET", "/status").status_code == 200  # the control
    assert gateway.control("POST", "/resume").json()["paused"] is False


def test_the_admin_key_generates_nothing(gateway: Recorder) -> None:
    assert gateway.post("chat", body("chat"), key=gateway.exports["GATEWAY_ADMIN_KEY"]).status_code == 401


@pytest.mark.parametrize("how", ["release", "freeze"])
def test_a_closed_attempt_answers_409_and_is_not_reopened(gateway: Recorder, dialect: str, how: str) -> None:
    key = opened(gateway)["api_key"]
    mine, theirs = another(gateway), gateway
    mine.post(dialect, body(dialect))
    for one, its_key in ((theirs, key), (mine, gateway.key)):
        assert one.control("POST", f"/attempts/{one.rollout}/1/{how}").status_code == 200
        refused = one.post(dialect, body(dialect), key=its_key)
        assert refused.status_code == 409 and refused.headers["x-should-retry"] == "false"
        again = one.control("POST", "/attempts", {"rollout_id": one.rollout})
        assert again.status_code == 409
    assert mine.post(dialect, body(dialect), f"{mine.rollout}~2").status_code == 200  # the next attempt is its own
    assert len(mine.trace(attempt=2).calls) == 1


def test_stock_clients_do_not_send_again_after_409(gateway: Recorder) -> None:
    gateway.post("chat", body("chat"))
    gateway.control("POST", f"/attempts/{gateway.rollout}/1/release")
    before = len(gateway.trace().calls)
    with pytest.raises(openai.ConflictError):
        openai.OpenAI(base_url=gateway.url(), api_key=gateway.key).chat.completions.create(**body("chat"))
    with pytest.raises(anthropic.ConflictError):
        base = gateway.url().removesuffix("/v1")
        anthropic.Anthropic(base_url=base, api_key=gateway.key).messages.create(**body("messages"))
    assert len(gateway.trace().calls) == before


def test_releasing_cancels_what_is_under_way(gateway: Recorder, dialect: str) -> None:
    gateway.post("chat", body("chat"))
    gateway.engine.held.clear()
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(gateway.post(dialect, body(dialect, "long"))))
    thread.start()
    until(lambda: len(gateway.engine.served) == 2)
    gateway.control("POST", f"/attempts/{gateway.rollout}/1/release", {"reason": "enough"})
    thread.join()
    until(lambda: gateway.engine.served[1].cancelled)
    assert answers[0].status_code == 409
    until(lambda: gateway.states() == ["delivered", "failed"])
    assert gateway.trace().released == "enough"


def test_an_expired_key_is_409(gateway: Recorder) -> None:
    key = opened(gateway, expires_s=0.0)["api_key"]
    assert gateway.post("chat", body("chat"), key=key).status_code == 409


def test_a_restart_keeps_keys_counts_and_closed_attempts(tmp_path: Path) -> None:
    with engine() as model:
        with recorder(model, tmp_path, GATEWAY_API_KEY="run-key-0") as first:
            key = opened(first, budgets={"max_calls": 2})["api_key"]
            first.post("chat", body("chat"), key=key)
            for rollout in ("mine", "gone"):
                first.post("chat", body("chat"), rollout)
            first.control("POST", "/attempts/gone/1/release")
            until(lambda: first.states() == first.states("mine") == ["delivered"])
            first.kill()
        with recorder(model, tmp_path, GATEWAY_API_KEY="run-key-0") as two:
            assert two.post("chat", body("chat"), "gone").status_code == 409
            assert two.post("chat", body("chat"), "r", "wrong").status_code == 401
            answers = [two.post("chat", body("chat", str(n)), key=key) for n in range(2)]
            assert ["exhausted" in answer.text for answer in answers] == [False, True]
            assert two.post("chat", body("chat"), "mine").status_code == 200
            assert [record.seq for record in two.trace("mine").calls.values()] == [0, 1]


def test_attempts_are_kept_apart(gateway: Recorder, dialect: str) -> None:
    for path in (gateway.rollout, f"{gateway.rollout}~2", f"{gateway.rollout}~10"):
        gateway.post(dialect, body(dialect), path)
    assert [len(gateway.trace(attempt=number).calls) for number in (1, 2, 10)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("request_body", "says"),
    [
        ({}, "'rollout_id' is missing"),
        ({"rollout_id": "a/b"}, "'rollout_id'"),
        ({"rollout_id": "a~2"}, "'rollout_id'"),
        ({"rollout_id": "a\nb"}, "'rollout_id'"),
        ({"rollout_id": "a", "attempt_id": 0}, "'attempt_id'"),
        ({"rollout_id": "a", "attempt_id": "1"}, "'attempt_id' must be a number"),
        ({"rollout_id": "a", "purpose": "fun"}, "'purpose'"),
        ({"rollout_id": "a", "budgets": {"max_coins": 1}}, "max_coins"),
        ({"rollout_id": "a", "budgets": {"max_calls": -1}}, "max_calls"),
        ({"rollout_id": "a", "budgets": {"on_context": "x"}}, "on_context"),
    ],
)
def test_what_cannot_be_opened_is_said(gateway: Recorder, request_body: Doc, says: str) -> None:
    answer = gateway.control("POST", "/attempts", request_body)
    assert answer.status_code == 400 and says in answer.json()["error"]["message"]


def test_freezing_and_dropping(gateway: Recorder) -> None:
    gateway.post("chat", body("chat"))
    path = f"/attempts/{gateway.rollout}/1"
    until(lambda: gateway.states() == ["delivered"])
    assert gateway.control("POST", f"{path}/drop", {"snapshot": "x"}).status_code == 409
    snapshot = gateway.control("POST", f"{path}/freeze").json()["snapshot"]
    trace = gateway.control("GET", path).json()
    assert trace["snapshot"] == snapshot and len(trace["records"]) == 1 and trace["closed"] == "frozen"
    assert gateway.control("POST", f"{path}/drop", {"snapshot": "stale"}).status_code == 409
    assert len(gateway.trace().calls) == 1
    assert gateway.control("POST", f"{path}/drop", {"snapshot": snapshot}).status_code == 200
    assert not gateway.trace().calls
    assert gateway.post("chat", body("chat")).status_code == 409
    assert gateway.control("GET", "/attempts/nothing/1").status_code == 404


def test_rewards_of_single_calls(gateway: Recorder) -> None:
    """Also after a freeze, which they make stale; a wrong one changes nothing."""
    gateway.post("chat", body("chat"))
    path = f"/attempts/{gateway.rollout}/1"
    until(lambda: gateway.states() == ["delivered"])
    (call_id,) = gateway.trace().calls
    snapshot = gateway.control("POST", f"{path}/freeze").json()["snapshot"]
    for rewards, status in (
        ({call_id: 0.5}, 200),
        ({call_id: 1, "nosuch": 1}, 404),
        ({call_id: "1"}, 400),
        ({call_id: True}, 400),
        ([call_id], 400),
    ):
        assert gateway.control("POST", f"{path}/rewards", {"rewards": rewards}).status_code == status, rewards
    assert gateway.trace().rewards == gateway.control("GET", path).json()["rewards"] == {call_id: 0.5}
    assert gateway.control("POST", f"{path}/drop", {"snapshot": snapshot}).status_code == 409


def test_labels_of_the_wire_are_kept_and_keys_are_not(gateway: Recorder) -> None:
    metadata = json.dumps({"request_kind": "compaction"})
    headers = {"session_id": "s1", "x_codex_turn_metadata": metadata, "x_stainless_retry_count": "2"}
    gateway.post("responses", body("responses"), **headers)
    (record,) = gateway.trace().calls.values()
    assert (record.labels["kind"], record.labels["retry_count"]) == ("compaction", 2)
    assert record.labels["session"] == "s1" and "httpx" in record.labels["user_agent"]
    claude = {"x_claude_code_session_id": "s2", "x_claude_code_agent_id": "a2"}
    system = [{"type": "text", "text": "x-anthropic: cc_version=1; cc_is_subagent=true;"}]
    gateway.post("messages", body("messages", system=system), **claude)
    record = list(gateway.trace().calls.values())[1]
    assert [record.labels[name] for name in ("session", "agent", "kind")] == ["s2", "a2", "subagent"]
