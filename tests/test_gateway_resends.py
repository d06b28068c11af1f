"""Resends: the same body while the first is undelivered is one call, a genuine repeat is another."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import until
from engine import MODEL, Engine, engine
from recorded import PATHS, Doc, Recorder, another, body, raw, recorder

from gateway import engine as inference
from gateway.attempts import Attempts, Budgets
from gateway.calls import Calls
from gateway.dialects import chat
from gateway.prompt import Policy
from gateway.store import Store
from gateway.weights import Weights


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


def later(gateway: Recorder, dialect: str, request: Doc) -> tuple[threading.Thread, list[httpx.Response]]:
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(gateway.post(dialect, request)))
    thread.start()
    return thread, answers


def resent(gateway: Recorder) -> list[int]:
    return [record.resends for record in gateway.trace().calls.values()]


def reordered(request: Doc) -> Doc:
    return dict(reversed(request.items()))


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "streamed"])
def test_a_resend_joins_the_running_generation(gateway: Recorder, dialect: str, stream: bool) -> None:
    gateway.engine.held.clear()
    request = body(dialect, stream=stream)
    with raw(gateway, dialect, request):
        until(lambda: gateway.engine.served)
    until(lambda: clients(gateway) == 0)
    thread, answers = later(gateway, dialect, reordered(request))
    until(lambda: clients(gateway) == 1)
    gateway.engine.held.set()
    thread.join()
    assert answers[0].status_code == 200 and len(gateway.engine.served) == 1
    assert not gateway.engine.served[0].cancelled
    until(lambda: gateway.states() == ["delivered"])
    assert resent(gateway) == [1]


def clients(gateway: Recorder) -> int:
    """How many wait for a reply, as the control listener tells."""
    return int(gateway.control("GET", f"/attempts/{gateway.rollout}/1").json()["clients"])


def test_a_resend_gets_the_stored_reply_under_the_same_ids(gateway: Recorder, dialect: str) -> None:
    gateway.engine.script = lambda asked: "<|wide|>" * 8
    request = body(dialect)
    with raw(gateway, dialect, request) as connection:
        assert connection.recv(12) == b"HTTP/1.1 200"
    until(lambda: gateway.states() == ["undelivered"])
    (record,) = gateway.trace().calls.values()
    again = gateway.post(dialect, reordered(request))
    assert record.call_id in json.dumps(ids(again.json())) and len(gateway.engine.served) == 1
    until(lambda: gateway.states() == ["delivered"])
    assert resent(gateway) == [1]


def ids(reply: Doc) -> list[Any]:
    return [reply["id"]]


def test_a_parallel_prompt_is_a_second_call(gateway: Recorder, dialect: str) -> None:
    gateway.engine.held.clear()
    request = body(dialect)
    threads = [later(gateway, dialect, request) for _ in range(2)]
    until(lambda: len(gateway.engine.served) == 2)
    gateway.engine.held.set()
    for thread, _ in threads:
        thread.join()
    one, two = (answers[0].json()["id"] for _, answers in threads)
    assert one != two
    until(lambda: gateway.states() == ["delivered"] * 2)


def test_a_repeat_after_delivery_is_a_new_sample(gateway: Recorder, dialect: str) -> None:
    one, two = (gateway.post(dialect, body(dialect)).json()["id"] for _ in range(2))
    assert one != two and len(gateway.engine.served) == 2 and resent(gateway) == [0, 0]


def test_a_repeat_with_a_retry_mark_is_the_stored_reply(gateway: Recorder, dialect: str) -> None:
    one = gateway.post(dialect, body(dialect)).json()
    two = gateway.post(dialect, body(dialect), x_stainless_retry_count="1").json()
    assert one["id"] == two["id"] and len(gateway.engine.served) == 1
    assert gateway.post(dialect, body(dialect), x_stainless_retry_count="0").json()["id"] != one["id"]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"metadata": {"a": 1, "b": 2}}, {"metadata": {"b": 2, "a": 1}}, True),
        ({"metadata": {"a": 1}}, {"metadata": {"a": 2}}, False),
        ({"temperature": 1}, {"temperature": 1.0}, False),
        ({"stream": True}, {}, False),
    ],
    ids=str,
)
def test_equal_is_the_parsed_body(gateway: Recorder, one: Doc, other: Doc, same: bool) -> None:
    first = gateway.post("chat", body("chat", **one))
    second = gateway.post("chat", body("chat", **other), x_stainless_retry_count="1")
    assert len(gateway.engine.served) == (1 if same else 2)
    assert first.status_code == second.status_code == 200


def test_another_rollout_with_the_same_body_is_another_call(gateway: Recorder) -> None:
    other = another(gateway)
    for one in (gateway, other):
        one.post("chat", body("chat"), x_stainless_retry_count="1")
    assert len(gateway.engine.served) == 2


def test_after_an_engine_failure_the_resend_is_a_new_call(gateway: Recorder, dialect: str) -> None:
    gateway.engine.faults.extend(["500", "500"])
    answers = [gateway.post(dialect, body(dialect), x_stainless_retry_count=str(n)) for n in range(3)]
    assert [answer.status_code for answer in answers] == [502, 502, 200]
    until(lambda: gateway.states() == ["failed", "failed", "delivered"])


def test_the_grace_is_what_keeps_a_call_for_its_resend(tmp_path: Path, dialect: str) -> None:
    """The control: without it the engine's work is cancelled at once, and the resend is sampled again."""
    with engine() as model, recorder(model, tmp_path, "--retry-grace", "0") as gateway:
        model.held.clear()
        with raw(gateway, dialect, body(dialect)):
            until(lambda: model.served)
        until(lambda: model.served[0].cancelled)
        model.held.set()
        assert gateway.post(dialect, body(dialect)).status_code == 200
        assert len(model.served) == 2
        until(lambda: gateway.states() == ["failed", "delivered"])


def test_a_resend_after_a_restart_gets_the_stored_reply(tmp_path: Path, dialect: str) -> None:
    """The gateway was killed between the reply and the terminal event."""
    with engine() as model:
        with recorder(model, tmp_path, GATEWAY_API_KEY="run-key-0") as first:
            model.script = lambda asked: "<|wide|>" * 8
            with raw(first, dialect, body(dialect)) as connection:
                assert connection.recv(12) == b"HTTP/1.1 200"
                first.kill()
            assert first.states() == ["reply"]
        with recorder(model, tmp_path, GATEWAY_API_KEY="run-key-0") as second:
            assert second.post(dialect, body(dialect)).status_code == 200
            assert not model.served
            until(lambda: second.states() == ["delivered"])


def test_a_resend_while_the_reply_is_on_its_way_to_the_disk_is_counted(tmp_path: Path) -> None:
    """The disk is held: its only thread waits, and the reply behind it."""
    disk_free = threading.Event()

    async def resend(model: Engine, disk: ThreadPoolExecutor) -> int:
        upstream, asked = inference.Engine(model.url, MODEL), body("chat")
        attempts = Attempts(Store(tmp_path), "run-key-0", [], "eval", Budgets(), disk)
        attempt, _ = await attempts.open("r", 1, "eval", Budgets(), 60, {})
        calls = Calls(upstream, attempts, Weights(upstream), Policy(), 3)
        disk.submit(disk_free.wait)
        exchange = calls.begin(attempt, chat, chat.parse(asked), asked, "digest", {}, chat.PATH)
        while not exchange.answered:
            await asyncio.sleep(0.005)
        calls.leave(exchange)
        calls.join(exchange)
        disk_free.set()
        await exchange.task
        await asyncio.gather(*calls.background)
        await upstream.close()
        return attempt.log.trace.calls[exchange.id].resends

    with engine() as model, ThreadPoolExecutor(1) as disk:
        assert asyncio.run(resend(model, disk)) == 1
