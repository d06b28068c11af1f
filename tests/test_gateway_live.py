"""Live mode: what a client sees while the engine writes, what it sees only later, and what is recorded in the end.

Two gateways before one engine, one live and one that replays, must agree in all that lasts. The engine writes as many
chunks as a test lets it (`some`), so that what comes before its end is known and not a matter of time.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from conftest import until
from engine import MODEL, Engine, call_text, engine
from recorded import PATHS, ROOT, Doc, Recorder, another, body, events_of, raw, read_events, recorder

from gateway.record import CallRecord

LIMITS = {"responses": "max_output_tokens", "chat": "max_completion_tokens", "messages": "max_tokens"}
TERMINAL = {"responses": "response.completed", "chat": "[DONE]", "messages": "message_stop"}
FAILURE = {"responses": "response.failed", "chat": '"error":{"message"', "messages": "event: error"}


@pytest.fixture(scope="module")
def model() -> Iterator[Engine]:
    with engine() as running:
        yield running


@pytest.fixture(scope="module")
def shared(model: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorder]:
    with recorder(model, tmp_path_factory.mktemp("live"), "--live") as gateway:
        yield gateway


@pytest.fixture(scope="module")
def replaying(model: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorder]:
    with recorder(model, tmp_path_factory.mktemp("replayed")) as gateway:
        yield gateway


@pytest.fixture
def gateway(shared: Recorder) -> Iterator[Recorder]:
    yield another(shared)
    shared.engine.reset()  # or a stream would wait for ever


@pytest.fixture(params=PATHS)
def dialect(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# --- The same as without ----------------------------------------------------------------------------------

CUSTOM = [{"type": "custom", "name": "apply_patch", "description": "Patches."}]
TEXT = "Grüße, 日本 and 🎉: the task is done."
ONE = "I look.\n" + call_text("bash", command='ls "ä" \\ \n', n=1.0)


@dataclass(frozen=True)
class Case:
    said: str
    members: Any = None
    """More of the request."""


CASES = {
    "text": Case(TEXT),
    "empty": Case(""),
    "reasoning": Case("I think ä,\nso I am.</think>" + TEXT),
    "only reasoning": Case("I think.</think>"),
    "one tool": Case(ONE),
    "parallel tools": Case(ONE + "\n" + call_text("bash", command="pwd") + call_text("bash")),
    "reasoning and tools": Case("Why?</think>" + ONE + call_text("bash", command="{}}")),
    "a tool that was not offered": Case(call_text("rm", path="/")),
    "no object": Case('<tool_call>\n{"name": "bash", "arguments": [1, "}"]}\n</tool_call>'),
    "not parsed": Case('<tool_call>\n{"name": "bash", "arguments": }\n</tool_call>'),
    "custom tool": Case(call_text("apply_patch", input='*** Begin\n"ä" {}\n'), {"tools": CUSTOM}),
    "custom tool, no string": Case(call_text("apply_patch", input=5), {"tools": CUSTOM}),
    "truncated": Case(TEXT, 9),
    "truncated in a call": Case(ONE, 50),
    "truncated in a character": Case(TEXT, 4),
}


def asked(dialect: str, case: Case, **more: Any) -> Doc:
    members = {LIMITS[dialect]: case.members} if isinstance(case.members, int) else case.members or {}
    return body(dialect, stream=True, tools=True, **more) | members


# Only Responses has tools that take free text.
PAIRS = [(dialect, name) for dialect in PATHS for name in CASES if "custom" not in name or dialect == "responses"]


@pytest.mark.parametrize(("dialect", "name"), PAIRS)
def test_live_and_replayed_are_the_same(gateway: Recorder, replaying: Recorder, dialect: str, name: str) -> None:
    """A token a chunk, seven of them, and the whole reply at once."""
    case, model = CASES[name], gateway.engine
    found = []
    for one, tokens in ((gateway, 1), (replace(gateway, rollout=f"{gateway.rollout}-7"), 7), (another(replaying), 7)):
        model.script, model.reasoning, model.chunk_tokens = lambda body: case.said, True, tokens
        message = final(one, dialect, asked(dialect, case))
        until(lambda one=one: one.states() == ["delivered"])
        (record,) = one.trace().calls.values()
        found.append((named(message, record), told(record)))
        assert record.fatal is None and model.served[-1].body["stream"] == (len(found) < 3)
    assert found[0] == found[1] == found[2]


def final(gateway: Recorder, dialect: str, request: Any) -> Doc:
    """The message as the official client puts it together of the events."""
    request.pop("stream", None)
    if dialect == "messages":
        base = gateway.url().removesuffix("/v1")
        with anthropic.Anthropic(base_url=base, api_key=gateway.key, max_retries=0).messages.stream(**request) as one:
            return one.get_final_message().to_dict()
    client = openai.OpenAI(base_url=gateway.url(), api_key=gateway.key, max_retries=0)
    if dialect == "responses":
        with client.responses.stream(**request) as events:
            *_, last = events
            whole: Doc = last.response.to_dict()  # type: ignore[union-attr]
            return whole
    with client.chat.completions.stream(**request, stream_options={"include_usage": True}) as chunks:
        *_, _ = chunks
        return chunks.current_completion_snapshot.to_dict()


def named(message: Doc, record: CallRecord) -> str:
    """As text, without what differs from call to call."""
    kept = {name: value for name, value in message.items() if name not in ("created", "created_at")}
    return json.dumps(kept, sort_keys=True).replace(record.call_id, "CALL")


def told(record: CallRecord) -> Doc:
    """What the engine said, as it is recorded; it numbers the calls of its replies."""
    names = ("prompt_ids", "sampled_ids", "logprobs", "finish_reason", "stop_reason", "message", "parse_ok", "usage")
    value = {name: record.as_json()[name] for name in (*names, "sampling_applied", "findings", "level")}
    for number, called in enumerate(value["message"]["tool_calls"]):
        called["id"] = number
    return value


# --- What comes when --------------------------------------------------------------------------------------


class Reader:
    """A client of a stream that reads as far as a test wants."""

    def __init__(self, gateway: Recorder, dialect: str, request: Doc) -> None:
        headers = {"authorization": f"Bearer {gateway.key}"}
        self.client = httpx.Client(trust_env=False, timeout=30, headers=headers)
        sent = self.client.build_request("POST", f"{gateway.url()}/{PATHS[dialect]}", json=request)
        self.response = self.client.send(sent, stream=True)
        self.parts = self.response.iter_text()
        self.text = ""

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.response.close()
        self.client.close()

    def until(self, reached: Callable[[str], bool]) -> str:
        """Read until what was read is enough."""
        while not reached(self.text):
            self.text += next(self.parts)
        return self.text

    def rest(self) -> str:
        self.text += "".join(self.parts)
        return self.text


def deltas(text: str) -> str:
    """What the deltas in a stream say, of whatever kind."""
    names = ("delta", "thinking", "text", "partial_json", "reasoning", "content")
    found = []
    for _, data in events_of(text[: text.rfind("\n\n") + 2]):
        where: Any = data
        if isinstance(data, dict) and "choices" in data:
            where = data["choices"][0]["delta"] if data["choices"] else {}
            where = where | (where.get("tool_calls") or [{}])[0].get("function", {})
        elif isinstance(data, dict) and isinstance(data.get("delta"), dict):
            where = data["delta"]
        elif not isinstance(data, dict) or "delta" not in str(data.get("type")):
            continue
        values = [where.get(name) for name in (*names, "arguments")]
        found.append(next((one for one in values if isinstance(one, str)), ""))
    return "".join(found)


PARTS = {
    "text": ("One, two, three, four, five.", "One, two, three"),
    "reasoning": ("One, two, three, four, five.</think>Six.", "One, two, three"),
    "arguments": (call_text("bash", command="one two three four five"), '{"command": "one tw'),
}


@pytest.mark.parametrize("part", PARTS)
def test_deltas_come_while_the_engine_writes(gateway: Recorder, dialect: str, part: str) -> None:
    said, seen = PARTS[part]
    model = gateway.engine
    model.script, model.reasoning = lambda asked: said, True
    model.some = 1 + (said.index(seen) + len(seen) + 8) // model.chunk_tokens
    with Reader(gateway, dialect, body(dialect, stream=True, tools=True)) as reader:
        text = reader.until(lambda text: seen in deltas(text))
        assert not model.served[0].ended and not gateway.trace().calls
        assert TERMINAL[dialect] not in text and "finish_reason" not in text.replace('"finish_reason":null', "")
        if dialect == "messages":
            started = events_of(text)[0][1]["message"]
            assert started["usage"]["input_tokens"] == len(model.served[0].prompt_ids)
        model.some = None
        assert TERMINAL[dialect] in reader.rest()
    until(lambda: gateway.states() == ["delivered"])


NEXT = {"responses": '"output_index":1', "chat": '"index":1', "messages": '"index":1'}
COMPLETES = {"responses": "_arguments.done", "chat": NEXT["chat"], "messages": '"content_block_stop"'}


def test_a_call_is_not_complete_before_the_reply_is_on_the_disk(gateway: Recorder, dialect: str) -> None:
    """Harnesses run a tool when its item is closed or its arguments parse, and not only when the reply ends."""
    model = gateway.engine
    model.script = lambda asked: call_text("bash", command="first {}") + call_text("bash", command="second")
    model.chunk_tokens = 1
    model.some = len(model.script({})) + 1  # all but the last token
    with Reader(gateway, dialect, body(dialect, stream=True, tools=True)) as reader:
        text = reader.until(lambda text: '{"command": "first {}' in deltas(text))
        model.some = None
        assert not any(mark in text for mark in (COMPLETES[dialect], NEXT[dialect], TERMINAL[dialect]))
        assert '"}' not in deltas(text)
        reader.until(lambda text: '"}' in deltas(text) or COMPLETES[dialect] in text)
        assert gateway.states()[0] in ("reply", "delivered")
        assert '"second"}' in deltas(reader.rest())


def plain(text: str) -> list[Any]:
    """The events of a stream, those that only go on with a text put together, and not numbered."""
    found: list[Any] = []
    for name, data in events_of(text):
        one = {key: value for key, value in data.items() if key != "sequence_number"} if data != "[DONE]" else {}
        said = one.pop("delta", None) if "delta" in name and isinstance(one.get("delta"), str) else None
        if name == "content_block_delta" and one["delta"]["type"] != "signature_delta":
            said = one["delta"].popitem()[1]
        if not name and one.get("choices"):
            said = growth(one["choices"][0]["delta"])
        if said is not None and found and found[-1][:2] == [name, one]:
            found[-1][2] += said
        else:
            found.append([name, one, said])
    return found


def growth(delta: Doc) -> str | None:
    """Take what a delta of chat completions adds out of it."""
    if calls := delta.get("tool_calls"):
        return calls[0]["function"].pop("arguments") if "name" not in calls[0]["function"] else None
    texts = [delta.pop(name) for name in ("content", "reasoning", "reasoning_content") if delta.get(name)]
    return texts[0] if texts else None


@pytest.mark.parametrize("name", ["text", "reasoning and tools"])
def test_the_events_are_those_of_a_replay(gateway: Recorder, replaying: Recorder, dialect: str, name: str) -> None:
    case, other = CASES[name], another(replaying)
    gateway.engine.script, gateway.engine.reasoning = lambda asked: case.said, True
    one, two = (each.post(dialect, asked(dialect, case)).text for each in (gateway, other))
    ids = [next(iter(each.trace().calls)) for each in (gateway, other)]
    assert len(events_of(one)) > len(events_of(two))
    one, two = (re.sub(r'"created(_at)?":\d+', "", text) for text in (one, two))
    assert plain(one.replace(ids[0], ids[1]).replace(",,", ",")) == plain(two.replace(",,", ","))


# --- Hanging up, and coming back --------------------------------------------------------------------------

BEGUN = {"responses": 2, "chat": 1, "messages": 1}
OPENED = {"responses": 2, "chat": 0, "messages": 1}


@pytest.fixture(scope="module")
def strict(model: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorder]:
    """Without any grace."""
    with recorder(model, tmp_path_factory.mktemp("strict"), "--live", "--retry-grace", "0") as gateway:
        yield gateway


def test_a_client_that_hangs_up_after_any_event(strict: Recorder, dialect: str) -> None:
    """Before the first, after each that comes while the engine writes, and after the last."""
    gateway = another(strict)
    model = gateway.engine
    model.script = lambda asked: "One, two, three, four."
    whole = gateway.post(dialect, body(dialect, "whole", stream=True)).text
    chunks = 1 + -(-len(model.served[0].sampled_ids) // model.chunk_tokens)
    states = ["delivered"]
    for some in range(chunks):
        events = 0 if not some else BEGUN[dialect] + (OPENED[dialect] + some - 1 if some > 1 else 0)
        model.some = some
        with raw(gateway, dialect, body(dialect, f"after {some}", stream=True)) as connection:
            read_events(connection, events)
            until(lambda some=some: len(model.served) == some + 2)
            assert not model.served[-1].ended
        until(lambda: model.served[-1].cancelled)
        states.append("failed")
        until(lambda: gateway.states() == states)
    assert events == BEGUN[dialect] + OPENED[dialect] + chunks - 2 < len(events_of(whole))
    model.some = None
    assert [record.sampled_ids is None for record in gateway.trace().calls.values()] == [False, *[True] * chunks]
    assert "ASGI" not in gateway.said()


def test_a_reply_that_is_ready_after_its_client_left_is_undelivered(strict: Recorder, dialect: str) -> None:
    """The gateway stands still while the client leaves and the engine ends, so that it learns of both at once."""
    gateway = another(strict)
    model = gateway.engine
    model.script = lambda asked: "One, two, three, four."
    for number in range(10):
        model.some = 2
        with raw(gateway, dialect, body(dialect, str(number), stream=True)) as connection:
            read_events(connection, BEGUN[dialect] + OPENED[dialect] + 1)
            gateway.process.send_signal(signal.SIGSTOP)
        model.some = None
        until(lambda: model.served[-1].ended)
        gateway.process.send_signal(signal.SIGCONT)
        until(lambda number=number: len(gateway.states()) == number + 1 and "reply" not in gateway.states())


def test_clients_that_leave_a_busy_gateway_are_no_news(gateway: Recorder) -> None:
    """It then often learns by a write that failed, and must not take that for a fault of its own."""
    gateway.engine.token_seconds, gateway.engine.chunk_tokens = 0.001, 1
    gateway.engine.script = lambda asked: "word " * 60
    with ThreadPoolExecutor(24) as pool:
        list(pool.map(lambda number: leave_early(gateway, number), range(96)))
    until(lambda: len(gateway.states()) == 96)
    assert "ASGI" not in gateway.said()


def leave_early(gateway: Recorder, number: int) -> None:
    with Reader(gateway, "chat", body("chat", str(number), stream=True)) as reader:
        reader.until(lambda text: len(text) > 100 * number)


def clients(gateway: Recorder) -> int:
    return int(gateway.control("GET", f"/attempts/{gateway.rollout}/1").json()["clients"])


def test_a_resend_joins_from_the_beginning(gateway: Recorder, dialect: str) -> None:
    model = gateway.engine
    model.script = lambda asked: "One, two, three, four, five, six."
    model.some, request = 4, body(dialect, stream=True)
    with Reader(gateway, dialect, request) as reader:
        first = reader.until(lambda text: "One, two" in deltas(text))
    until(lambda: clients(gateway) == 0)
    model.some = 6
    with Reader(gateway, dialect, dict(reversed(request.items()))) as reader:
        reader.until(lambda text: "One, two, three" in deltas(text))
        assert not model.served[0].ended
        model.some = None
        second = reader.rest()
    assert second.startswith(first) and TERMINAL[dialect] in second and len(model.served) == 1
    until(lambda: gateway.states() == ["delivered"])
    assert [record.resends for record in gateway.trace().calls.values()] == [1]


HUGE = "Begin. " + "<|wide|>" * 8


def test_a_resend_after_the_reply_gets_the_stored_one(gateway: Recorder, dialect: str) -> None:
    """The reply is on the disk, but its end could not be written: the client did not read on."""
    gateway.engine.script, gateway.engine.chunk_tokens = lambda asked: HUGE, 1
    request = body(dialect, stream=True)
    with Reader(gateway, dialect, request) as reader:
        first = reader.until(lambda text: "Begin." in deltas(text))
        until(lambda: gateway.states() == ["reply"])
    until(lambda: gateway.states() == ["undelivered"])
    second = gateway.post(dialect, request).text
    assert len(gateway.engine.served) == 1 and TERMINAL[dialect] in second
    begun, again = plain(first[: first.rindex("\n\n")]), plain(second)
    assert again[: len(begun) - 1] == begun[:-1] and deltas(second) == "Begin. " + "x" * (8 << 20)
    until(lambda: gateway.states() == ["delivered"])


def test_a_gateway_that_is_killed_before_the_terminal_event(tmp_path: Path, dialect: str) -> None:
    with engine(script=lambda asked: HUGE, chunk_tokens=1) as model:
        request = body(dialect, stream=True)
        live = recorder(model, tmp_path, "--live", GATEWAY_API_KEY="run-key-0")
        with live as gateway, Reader(gateway, dialect, request) as reader:
            first = reader.until(lambda text: "Begin." in deltas(text))
            until(lambda: gateway.states() == ["reply"])
            gateway.kill()
        with recorder(model, tmp_path, "--live", GATEWAY_API_KEY="run-key-0") as gateway:
            (record,) = gateway.trace().calls.values()
            second = gateway.post(dialect, request).text
            assert not model.served and record.call_id in first and record.call_id in second
            assert deltas(second) == "Begin. " + "x" * (8 << 20) and TERMINAL[dialect] in second
            until(lambda: gateway.states() == ["delivered"])


# --- The engine's trouble, budgets ------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["cut", "error", "unfinished", "undone"])
def test_a_stream_that_breaks_never_ends_normally(gateway: Recorder, dialect: str, fault: str) -> None:
    model = gateway.engine
    model.faults.append(fault)
    model.some = 4
    text = gateway.post(dialect, body(dialect, stream=True)).text
    assert "Not" in deltas(text) and FAILURE[dialect] in text and TERMINAL[dialect] not in text
    numbers = [data["sequence_number"] for _, data in events_of(text) if dialect == "responses"]
    assert numbers == list(range(len(numbers)))
    model.some = None
    assert TERMINAL[dialect] in gateway.post(dialect, body(dialect, stream=True)).text
    until(lambda: gateway.states() == ["failed", "delivered"])
    failed, _ = gateway.trace().calls.values()
    assert failed.sampled_ids is None and "engine" in str(failed.evidence)


def test_a_reply_that_cannot_be_recorded_never_ends(tmp_path: Path, dialect: str) -> None:
    with engine() as model, recorder(model, tmp_path, "--live") as gateway:
        model.some = 4
        with Reader(gateway, dialect, body(dialect, stream=True)) as reader:
            reader.until(lambda text: "Not" in deltas(text))
            resource.prlimit(gateway.process.pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
            model.some = None
            text = reader.rest()
        assert FAILURE[dialect] in text and TERMINAL[dialect] not in text and "cannot be written" in text
        resource.prlimit(gateway.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        assert TERMINAL[dialect] in gateway.post(dialect, body(dialect, stream=True)).text


def test_an_attempt_that_is_released_breaks_its_streams_off(gateway: Recorder, dialect: str) -> None:
    gateway.engine.some = 4
    with Reader(gateway, dialect, body(dialect, stream=True)) as reader:
        reader.until(lambda text: "Not" in deltas(text))
        gateway.control("POST", f"/attempts/{gateway.rollout}/1/release")
        text = reader.rest()
    assert FAILURE[dialect] in text and TERMINAL[dialect] not in text
    until(lambda: gateway.engine.served[0].cancelled)


@pytest.mark.parametrize("fault", ["cut", "error", "500", "page"])
def test_before_the_first_byte_an_error_keeps_its_status(gateway: Recorder, dialect: str, fault: str) -> None:
    gateway.engine.faults.append(fault)
    failed = gateway.post(dialect, body(dialect, stream=True))
    assert failed.status_code == 502 and "engine" in failed.json()["error"]["message"]
    until(lambda: gateway.states() == ["failed"])


def test_the_official_clients_raise_when_a_stream_breaks(gateway: Recorder, dialect: str) -> None:
    gateway.engine.faults.append("error")
    gateway.engine.some = 4
    error = anthropic.APIStatusError if dialect == "messages" else openai.APIError
    if dialect == "responses":  # whose failure is an event like others
        assert final(gateway, dialect, body(dialect))["status"] == "failed"
    else:
        with pytest.raises(error, match="told to fail"):
            final(gateway, dialect, body(dialect))


@pytest.mark.parametrize("action", ["stop", "native_error"])
def test_a_prompt_that_is_too_long(tmp_path: Path, dialect: str, action: str) -> None:
    options = ["--live", "--on-context", action]
    with engine(max_model_len=300) as model, recorder(model, tmp_path, *options) as gateway:
        answer = gateway.post(dialect, body(dialect, "x" * 1000, stream=True))
        assert (answer.status_code, "budget exhausted" in answer.text) == (
            (200, True) if action == "stop" else (400, False)
        )
        limited = body(dialect, "short", stream=True) | {LIMITS[dialect]: 290}
        assert TERMINAL[dialect] in gateway.post(dialect, limited).text  # the limit is left to the engine


def test_the_wall_budget(model: Engine, tmp_path: Path, dialect: str) -> None:
    """In the middle of a reply it breaks the stream off, and the resend is told to stop."""
    model.reset()
    with recorder(model, tmp_path, "--live") as gateway:
        opened = gateway.control("POST", "/attempts", {"rollout_id": "r", "budgets": {"max_wall_s": 1}}).json()
        model.some = 3
        answers = [gateway.post(dialect, body(dialect, stream=True), key=opened["api_key"]) for _ in range(2)]
        model.reset()
    assert FAILURE[dialect] in answers[0].text and TERMINAL[dialect] not in answers[0].text
    assert "budget exhausted" in answers[1].text and TERMINAL[dialect] in answers[1].text
    assert gateway.states() == ["failed", "synthetic"]


def test_the_budgets_of_calls_and_tokens(model: Engine, tmp_path: Path, dialect: str) -> None:
    model.reset()
    model.script = lambda asked: "x" * 99
    with recorder(model, tmp_path, "--live", "--max-sampled-tokens", "130") as gateway:
        texts = [gateway.post(dialect, body(dialect, str(n), stream=True)).text for n in range(3)]
        assert [len(served.sampled_ids) for served in model.served] == [100, 30]
        assert "budget exhausted" in texts[2] and TERMINAL[dialect] in texts[2]
        until(lambda: gateway.states() == ["delivered", "delivered", "synthetic"])


# --- Engines that stream less -----------------------------------------------------------------------------


def looks(asked: Doc) -> str:
    return call_text("look") if asked.get("tools") else "Nothing to do."


def test_an_engine_whose_streams_lose_tokens_is_refused(tmp_path: Path) -> None:
    with engine(streamed_ids=False, script=looks) as model:
        command = [sys.executable, "-m", "gateway", "serve", "--upstream", model.url, "--model", MODEL, "--live"]
        refused = subprocess.run([*command, "--traces", str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
        last = refused.stderr.splitlines()[-1]
        assert refused.returncode == 2 and "--live would" in last and "the stream held" in last and not refused.stdout


def test_tokens_that_one_stream_loses_are_found(gateway: Recorder, dialect: str) -> None:
    gateway.engine.streamed_ids, gateway.engine.script = False, lambda asked: ONE
    assert TERMINAL[dialect] in gateway.post(dialect, body(dialect, stream=True, tools=True)).text
    (record,) = gateway.trace().calls.values()
    assert record.fatal == "logprob_misaligned" and len(record.sampled_ids or ()) == len(record.logprobs or ())


def test_without_ids_the_prompt_is_counted_where_it_must_be_told(tmp_path: Path, dialect: str) -> None:
    with engine(ids=False, logprobs=False) as model, recorder(model, tmp_path, "--live") as gateway:
        text = gateway.post(dialect, body(dialect, stream=True)).text
        assert TERMINAL[dialect] in text and "Nothing to do." in deltas(text)
        if dialect == "messages":
            assert events_of(text)[0][1]["message"]["usage"]["input_tokens"] == len(model.served[0].prompt_ids)


def test_what_is_not_streamed_is_asked_as_before(gateway: Recorder, dialect: str) -> None:
    assert gateway.post(dialect, body(dialect)).status_code == 200
    assert gateway.engine.served[0].body["stream"] is False
