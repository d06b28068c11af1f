"""The recording gateway from outside: dialects, exactness of what is recorded, delivery, engine trouble, budgets.

A real gateway process before a real engine (engine.py); the official clients parse every stream.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from conftest import until
from engine import END, MODEL, Engine, call_text, decode, engine
from recorded import (
    PATHS,
    ROOT,
    Doc,
    Recorder,
    another,
    body,
    events_of,
    raw,
    read_events,
    recorder,
    text_of,
    usage_of,
)

from gateway.call import Refused
from gateway.engine import read_answer
from gateway.graph import build


@pytest.fixture
def model() -> Iterator[Engine]:
    with engine() as running:
        yield running


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


TWO_CALLS = "Let me see.\n" + call_text("bash", command="ls ä", n=1.0) + call_text("bash", command="pwd")


# --- What is recorded is what the engine said -------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "streamed"])
def test_a_call_is_recorded_as_the_engine_saw_it(gateway: Recorder, dialect: str, stream: bool) -> None:
    gateway.engine.script = lambda asked: TWO_CALLS
    response = gateway.post(dialect, body(dialect, stream=stream, tools=True))
    assert response.status_code == 200
    (served,), trace = gateway.engine.served, gateway.trace()
    (record,) = trace.calls.values()
    assert record.prompt_ids and record.prompt_ids.tail == served.prompt_ids
    assert (record.sampled_ids, record.logprobs) == (served.sampled_ids, served.logprobs)
    assert served.sampled_ids[-1] == END and decode(served.sampled_ids[:-1]) == TWO_CALLS
    assert trace.messages(record.call_id) == served.body["messages"]
    assert trace.tools(record.call_id) == served.body["tools"]
    assert (record.level, record.model, record.fatal) == ("tokens", MODEL, None)
    until(lambda: gateway.states() == ["delivered"])


def test_usage_is_what_the_engine_counted(gateway: Recorder, dialect: str) -> None:
    reply = gateway.post(dialect, body(dialect)).json()
    (served,) = gateway.engine.served
    assert usage_of(dialect, reply) == (len(served.prompt_ids), len(served.sampled_ids))
    streamed = events_of(gateway.post(dialect, body(dialect, stream=True)).text)
    if dialect == "messages":
        counts = [data["usage"]["input_tokens"] for name, data in streamed if name == "message_delta"]
        counts += [data["message"]["usage"]["input_tokens"] for name, data in streamed if name == "message_start"]
        assert counts == [len(served.prompt_ids)] * 2


def test_ids_are_unique_and_a_second_sample_is_a_second_call(gateway: Recorder, dialect: str) -> None:
    gateway.engine.script = lambda asked: TWO_CALLS
    texts = [gateway.post(dialect, body(dialect, tools=True)).text for _ in range(2)]
    known = [set(call_ids(json.loads(text))) for text in texts]
    assert not known[0] & known[1] and all(len(ids) >= 3 for ids in known)


def call_ids(value: Any) -> Iterator[str]:
    """Every id in a reply."""
    if isinstance(value, list):
        for one in value:
            yield from call_ids(one)
    elif isinstance(value, dict):
        yield from (one for name, one in value.items() if name in ("id", "call_id") and isinstance(one, str))
        for one in value.values():
            yield from call_ids(one)


def test_training_pins_the_sampling_and_keeps_what_was_asked(gateway: Recorder) -> None:
    asked = {"temperature": 0.2, "top_p": 0.5, "presence_penalty": 1, "logit_bias": {"5": 9}, "seed": 7, "odd": [1]}
    gateway.post("chat", body("chat", **asked, max_tokens=50, stop=["STOP"]))
    (served,), (record,) = gateway.engine.served, gateway.trace().calls.values()
    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    neutral |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "max_completion_tokens": 50, "stop": ["STOP"]}
    assert record.sampling_applied == neutral and neutral.items() <= served.body.items()
    assert not {"logit_bias", "seed", "odd", "parallel_tool_calls", "include_reasoning"} & set(served.body)
    wanted = {name: value for name, value in asked.items() if name != "odd"} | {"stop": ["STOP"]}
    assert record.sampling_requested == {**wanted, "max_tokens": 50, "other": {"odd": [1]}}
    assert [finding["code"] for finding in record.findings] == ["sampling_policy_changed"]


def test_evaluation_leaves_the_sampling_to_the_harness(model: Engine, tmp_path: Path) -> None:
    with recorder(model, tmp_path, "--purpose", "eval") as gateway:
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
        gateway.post("chat", body("chat", temperature=0.2, response_format=schema))
        (served,), (record,) = model.served, gateway.trace().calls.values()
        assert served.body["temperature"] == 0.2 and "top_p" not in served.body
        assert served.body["response_format"] == schema and record.fatal == "constrained_sampling"


# --- Order, text, arguments -------------------------------------------------------------------------


def test_system_messages_in_the_middle_stay_there(gateway: Recorder) -> None:
    conversation = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": "b"},
        {"role": "system", "content": "note"},
        {"role": "user", "content": "c"},
    ]
    gateway.post("messages", body("messages", messages=conversation, system=[{"type": "text", "text": "head"}]))
    (served,) = gateway.engine.served
    roles = [(message["role"], message["content"]) for message in served.body["messages"]]
    assert roles == [("system", "head"), ("user", "a"), ("assistant", "b"), ("system", "note"), ("user", "c")]


def test_a_template_that_wants_the_system_first_gets_a_tag(tmp_path: Path) -> None:
    with engine(system_anywhere=False) as model, recorder(model, tmp_path) as gateway:
        items = [{"role": "developer", "content": "x"}, {"role": "user", "content": "y"}]
        assert gateway.post("responses", body("responses", input=items, instructions="head")).status_code == 200
        (served,), (record,) = model.served, gateway.trace().calls.values()
        tagged = {"role": "user", "content": "<system>\nx\n</system>"}
        assert served.body["messages"] == [
            {"role": "system", "content": "head"},
            tagged,
            {"role": "user", "content": "y"},
        ]
        assert {"system_as_user", "developer_as_system"} <= {step["kind"] for step in record.transforms}


def test_a_reply_behind_the_whole_items_of_one_that_broke_off_is_another(gateway: Recorder) -> None:
    """Codex keeps what came through of a broken stream, and what it gets next goes right behind it."""
    gateway.engine.script = lambda asked: "Let me." + (call_text("bash", command="ls") if lost else "")
    user = body("responses", tools=True)["input"]
    lost: Doc = {}
    lost = gateway.post("responses", body("responses", tools=True)).json()["output"][0]
    kept = gateway.post("responses", body("responses", tools=True, input=[*user, lost])).json()["output"]
    result = {"type": "function_call_output", "call_id": kept[1]["call_id"], "output": "a.txt"}
    gateway.post("responses", body("responses", tools=True, input=[*user, lost, *kept, result]))
    _, second, third = gateway.engine.served
    assert [one["content"] for one in third.body["messages"]] == ["Do the task.", "Let me.", "Let me.", "a.txt"]
    whole = [*second.prompt_ids, *second.sampled_ids]
    assert third.prompt_ids[: len(whole)] == whole


def parts(text: str) -> list[Doc]:
    return [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}]


@pytest.mark.parametrize("dialect", ["chat", "messages"])
def test_the_same_text_is_the_same_tokens(gateway: Recorder, dialect: str) -> None:
    for content in ("same", parts("same")):
        gateway.post(dialect, body(dialect, messages=[{"role": "user", "content": content}]))
    one, two = gateway.engine.served
    assert one.prompt_ids == two.prompt_ids


def second(dialect: str, first: Doc, reply: Doc, spell: Any = lambda text: text) -> Doc:
    """The next request of a client that sends arguments back as `spell` writes them."""
    if dialect == "responses":
        items = [
            {**item, "arguments": spell(item["arguments"])} if item["type"] == "function_call" else item
            for item in reply["output"]
        ]
        called = [item["call_id"] for item in items if item["type"] == "function_call"]
        results = [{"type": "function_call_output", "call_id": one, "output": "ok"} for one in called]
        return first | {"input": [*first["input"], *items, *results]}
    if dialect == "chat":
        message = reply["choices"][0]["message"]
        for called in message["tool_calls"]:
            called["function"]["arguments"] = spell(called["function"]["arguments"])
        results = [{"role": "tool", "tool_call_id": one["id"], "content": "ok"} for one in message["tool_calls"]]
        return first | {"messages": [*first["messages"], message, *results]}
    uses = [block for block in reply["content"] if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": use["id"], "content": parts("ok")} for use in uses]
    turn = [{"role": "assistant", "content": reply["content"]}, {"role": "user", "content": results}]
    return first | {"messages": [*first["messages"], *turn]}


def test_a_conversation_is_one_chain(gateway: Recorder, dialect: str) -> None:
    """Two parallel calls, both in S, both results in the next P, and P2 starts with P1+S1."""
    gateway.engine.script = lambda asked: TWO_CALLS if len(asked["messages"]) == 1 else "Done."
    first = body(dialect, tools=True)
    reply = gateway.post(dialect, first).json()
    compact = json.dumps(json.loads('{"command": "ls ä", "n": 1.0}'), separators=(",", ":"))
    spell = {'{"command": "ls ä", "n": 1.0}': compact}
    gateway.post(dialect, second(dialect, first, reply, lambda text: spell.get(text, text)))
    one, two = gateway.engine.served
    assert two.prompt_ids[: len(one.prompt_ids) + len(one.sampled_ids)] == one.prompt_ids + one.sampled_ids
    assert decode(two.prompt_ids).count("<|im_start|>tool\nok") == 2
    until(lambda: gateway.states() == ["delivered"] * 2)
    graph = build(gateway.trace().calls.values())
    assert len(graph.roots) == 1


def test_arguments_that_changed_are_sent_as_they_came(gateway: Recorder) -> None:
    gateway.engine.script = lambda asked: call_text("bash", n=1.0) if len(asked["messages"]) == 1 else "Done."
    first = body("chat", tools=True)
    reply = gateway.post("chat", first).json()
    gateway.post("chat", second("chat", first, reply, lambda text: '{"n": 1}'))
    assert '{"n": 1}' in gateway.engine.served[1].body["messages"][1]["tool_calls"][0]["function"]["arguments"]
    kinds = [step["kind"] for step in list(gateway.trace().calls.values())[1].transforms]
    assert "arguments_differ" in kinds and "arguments_restored" not in kinds


BROKEN = '<tool_call>\n{"name": "bash", "arguments": }\n</tool_call>'


def test_a_call_that_did_not_parse_is_marked_and_passed_on(gateway: Recorder, dialect: str) -> None:
    gateway.engine.script = lambda asked: BROKEN
    reply = gateway.post(dialect, body(dialect, tools=True)).json()
    (record,) = gateway.trace().calls.values()
    assert BROKEN in text_of(dialect, reply) and not record.parse_ok and record.fatal is None


def test_reasoning_comes_back_as_it_was_sampled(tmp_path: Path, dialect: str) -> None:
    with engine(reasoning=True) as model, recorder(model, tmp_path) as gateway:
        model.script = lambda asked: (
            "I think ä.</think>" + TWO_CALLS if len(asked["messages"]) == 1 else "</think>Done."
        )
        first = body(dialect, tools=True)
        reply = gateway.post(dialect, first).json()
        if dialect == "messages":
            reply["content"][0]["thinking"] = ""  # as clients do that show none
        if dialect == "responses":
            reply["output"][0] |= {"content": [], "summary": []}
        assert gateway.post(dialect, second(dialect, first, reply)).status_code == 200
        one, two = model.served
        assert two.prompt_ids[: len(one.prompt_ids) + len(one.sampled_ids)] == one.prompt_ids + one.sampled_ids


def test_namespaced_and_free_text_tools_go_there_and_back(gateway: Recorder) -> None:
    member = {"type": "function", "name": "spawn", "parameters": {"type": "object", "properties": {}}}
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}
    tools = [
        {"type": "namespace", "name": "agents", "description": "d", "tools": [member]},
        {"type": "custom", "name": "apply_patch", "description": "Patches.", "format": grammar},
    ]
    said = call_text("agents__spawn") + call_text("apply_patch", input="*** Begin\nä")
    gateway.engine.script = lambda asked: said if len(asked["messages"]) == 1 else "Done."
    first = body("responses") | {"tools": tools}
    reply = gateway.post("responses", first).json()
    spawn, patch = reply["output"]
    assert (spawn["type"], spawn["name"], spawn["namespace"]) == ("function_call", "spawn", "agents")
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "apply_patch", "*** Begin\nä")
    told = [tool["function"] for tool in gateway.engine.served[0].body["tools"]]
    assert [tool["name"] for tool in told] == ["agents__spawn", "apply_patch"]
    assert "lark" in json.dumps(told[1]["parameters"])
    outputs = [{"type": "function_call_output", "call_id": spawn["call_id"], "output": "1"}]
    outputs.append({"type": "custom_tool_call_output", "call_id": patch["call_id"], "output": "2"})
    gateway.post("responses", first | {"input": [*first["input"], spawn, outputs[0], patch, outputs[1]]})
    one, two = gateway.engine.served
    assert two.prompt_ids[: len(one.prompt_ids) + len(one.sampled_ids)] == one.prompt_ids + one.sampled_ids


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}


@pytest.mark.parametrize(
    ("dialect", "change", "named"),
    [
        ("responses", {"tools": [{"type": "web_search"}]}, "web_search"),
        ("responses", {"tools": [{"type": "local_shell"}]}, "local_shell"),
        ("messages", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ("responses", {"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_image"),
        ("messages", {"messages": [{"role": "user", "content": [IMAGE]}]}, "image"),
        ("messages", {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking"}]}]}, "redacted"),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
        ("chat", {"messages": [{"role": "narrator", "content": "x"}]}, "narrator"),
        ("chat", {"n": 2}, "'n'"),
        ("chat", {"max_tokens": 0}, "'max_tokens'"),
        ("responses", {"previous_response_id": "resp_1"}, "previous_response_id"),
        ("responses", {"store": True}, "store"),
        ("chat", {"response_format": {"type": "json_object"}}, "response_format"),
        ("responses", {"text": {"format": {"type": "json_schema", "schema": {}}}}, "response_format"),
        ("messages", {"tool_choice": {"type": "any"}}, "tool_choice"),
        ("chat", {"tool_choice": "required"}, "tool_choice"),
        ("messages", {"context_management": {"edits": [{"type": "clear_tool_uses", "keep": 3}]}}, "clear_tool_uses"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_expressed_is_refused_by_name(gateway: Recorder, dialect: str, change: Doc, named: str) -> None:
    refused = gateway.post(dialect, body(dialect) | change)
    message = refused.json()["error"]["message"]
    assert refused.status_code == 400 and named in message and not gateway.engine.served
    assert gateway.post(dialect, body(dialect)).status_code == 200


def test_what_changes_nothing_is_accepted(gateway: Recorder) -> None:
    odd = {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}
    odd |= {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}, "metadata": {"user_id": "x"}}
    assert gateway.post("messages?beta=true", body("messages", **odd)).status_code == 200


def test_a_tool_is_left_out_only_where_that_is_asked_for(model: Engine, tmp_path: Path) -> None:
    with recorder(model, tmp_path, "--omit-tool", "web_search") as gateway:
        tools = [*body("responses", tools=True)["tools"], {"type": "web_search"}]
        assert gateway.post("responses", body("responses") | {"tools": tools}).status_code == 200
        (record,) = gateway.trace().calls.values()
        assert [(one["code"], one["detail"]) for one in record.findings] == [("tool_omitted", "web_search")]
        assert len(model.served[0].body["tools"]) == 1


def test_tokens_are_counted_by_the_engine(tmp_path: Path) -> None:
    for number, tokenizes in enumerate((True, False)):
        folder = tmp_path / str(number)
        folder.mkdir()
        with engine(tokenizes=tokenizes) as model, recorder(model, folder) as gateway:
            request = body("messages", system="sys", tools=True)
            counted = gateway.post("messages/count_tokens", {n: v for n, v in request.items() if n != "max_tokens"})
            assert not list(gateway.traces.glob("*/*.log")) or not gateway.trace().calls
            reply = gateway.post("messages", request).json()
            assert counted.json() == {"input_tokens": reply["usage"]["input_tokens"]}


# --- The official clients ---------------------------------------------------------------------------


def test_openai_client(gateway: Recorder) -> None:
    gateway.engine.script = lambda asked: TWO_CALLS
    client = openai.OpenAI(base_url=gateway.url(), api_key=gateway.key, max_retries=0)
    assert [model.id for model in client.models.list()] == [MODEL]
    request: Any = body("chat", tools=True)
    with client.chat.completions.stream(**request, stream_options={"include_usage": True}) as stream:
        final = stream.get_final_completion()
    calls = final.choices[0].message.tool_calls
    assert calls and [call.function.arguments for call in calls] == [
        '{"command": "ls ä", "n": 1.0}',
        '{"command": "pwd"}',
    ]
    assert final.choices[0].finish_reason == "tool_calls" and final.usage
    tools: Any = body("responses", tools=True)["tools"]
    with client.responses.stream(model=MODEL, input="Do it.", tools=tools) as streamed:
        types = [event.type for event in streamed]
        response = streamed.get_final_response()
    assert types[-1] == "response.completed" and len(response.output) == 3 and response.usage
    assert response.usage.output_tokens == final.usage.completion_tokens


def test_anthropic_client(gateway: Recorder) -> None:
    gateway.engine.script = lambda asked: TWO_CALLS
    base = gateway.url().removesuffix("/v1")
    client = anthropic.Anthropic(base_url=base, api_key=gateway.key, max_retries=0)
    request: Any = body("messages", tools=True)
    with client.messages.stream(**request) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert [block.type for block in final.content] == ["text", "tool_use", "tool_use"]
    assert final.stop_reason == "tool_use" and final.content[1].input == {"command": "ls ä", "n": 1.0}  # type: ignore[union-attr]
    assert client.messages.create(**request).usage.input_tokens == final.usage.input_tokens
    del request["max_tokens"]
    assert client.messages.count_tokens(**request).input_tokens == final.usage.input_tokens
    with pytest.raises(anthropic.BadRequestError, match="rewrites history"):
        client.messages.create(**body("messages"), extra_body={"context_management": {"edits": [{"keep": 1}]}})


@pytest.mark.parametrize("stream", [False, True])
def test_a_truncated_reply_says_so(gateway: Recorder, dialect: str, stream: bool) -> None:
    limit = {"responses": "max_output_tokens", "chat": "max_completion_tokens", "messages": "max_tokens"}[dialect]
    response = gateway.post(dialect, body(dialect, stream=stream, **{limit: 5}))
    told = {"responses": '"incomplete_details":{"reason":"max_output_tokens"}', "chat": '"finish_reason":"length"'}
    assert told.get(dialect, '"stop_reason":"max_tokens"') in response.text
    (record,) = gateway.trace().calls.values()
    assert record.finish_reason == "length" and len(record.sampled_ids or ()) == 5
    if dialect == "responses" and stream:
        assert events_of(response.text)[-1][0] == "response.incomplete"


# --- Delivery ---------------------------------------------------------------------------------------


def test_a_client_that_hangs_up_before_the_reply_is_no_delivery(model: Engine, tmp_path: Path, dialect: str) -> None:
    with recorder(model, tmp_path, "--retry-grace", "0") as gateway:
        model.held.clear()
        with raw(gateway, dialect, body(dialect, stream=True)):
            until(lambda: model.served)
        until(lambda: model.served[0].cancelled)  # the engine's work ends with it
        until(lambda: gateway.states() == ["failed"])
        (record,) = gateway.trace().calls.values()
        assert record.sampled_ids is None and record.evidence == "client hung up"


HUGE = "<|wide|>" * 8


def test_a_client_that_hangs_up_at_any_event(gateway: Recorder, dialect: str) -> None:
    """A reply too large for all buffers: the terminal event cannot be written before the client reads on."""
    gateway.engine.script = lambda asked: HUGE
    assert gateway.post(dialect, body(dialect, stream=True)).status_code == 200
    big = {"responses": 5, "chat": 2, "messages": 3}[dialect]  # the first event that holds the text
    for number in range(big):
        with raw(gateway, dialect, body(dialect, str(number), stream=True)) as connection:
            if number:
                read_events(connection, number)
            until(lambda wanted=number + 2: len(gateway.trace().calls) == wanted)
        until(lambda: "reply" not in gateway.states())
    assert gateway.states() == ["delivered", *["undelivered"] * big]


def test_a_half_written_unary_reply_is_no_delivery(gateway: Recorder, dialect: str) -> None:
    gateway.engine.script = lambda asked: HUGE
    with raw(gateway, dialect, body(dialect)) as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    until(lambda: gateway.states() == ["undelivered"])
    assert gateway.post(dialect, body(dialect)).status_code == 200
    until(lambda: gateway.states() == ["delivered"])


@pytest.mark.slow
def test_a_silent_stream_is_kept_alive(gateway: Recorder, dialect: str) -> None:
    gateway.engine.held.clear()
    with raw(gateway, dialect, body(dialect, stream=True)) as connection:
        assert b": keepalive\n\n" in read_events(connection, 1)
        gateway.engine.faults.append("")
        gateway.engine.held.set()
        until(lambda: b"nothing" in connection.recv(1 << 20).lower())


@pytest.mark.slow
def test_an_error_after_the_stream_began_is_the_dialects_own(gateway: Recorder, dialect: str) -> None:
    gateway.engine.held.clear()
    gateway.engine.max_model_len = 1 << 20
    with raw(gateway, dialect, body(dialect, stream=True)) as connection:
        read_events(connection, 1)
        gateway.control("POST", f"/attempts/{gateway.rollout}/1/release")
        data = b""
        while not data.endswith(b"0\r\n\r\n"):
            data += connection.recv(1 << 16)
    error = {"responses": b"response.failed", "chat": b'data: {"error"', "messages": b"event: error"}[dialect]
    assert error in data
    assert not any(mark in data for mark in (b"[DONE]", b"message_stop", b"response.completed"))


# --- The engine's trouble ---------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "streamed"])
@pytest.mark.parametrize(("fault", "status"), [("500", 502), ("503", 502), ("400", 400), ("422", 422), ("page", 502)])
def test_engine_failures(gateway: Recorder, dialect: str, stream: bool, fault: str, status: int) -> None:
    gateway.engine.faults = deque([fault])
    failed = gateway.post(dialect, body(dialect, stream=stream))
    assert failed.status_code == status and failed.json()["error"]["message"].startswith("the engine answered")
    assert gateway.post(dialect, body(dialect, stream=stream)).status_code == 200
    until(lambda: gateway.states() == ["failed", "delivered"])


def test_an_engine_that_is_gone(tmp_path: Path, dialect: str) -> None:
    with engine() as model, recorder(model, tmp_path) as gateway:
        model.stop()
        gone = gateway.post(dialect, body(dialect))
        assert gone.status_code == 502 and "cannot be reached" in gone.json()["error"]["message"]
        assert gone.json()["error"]["type"] == ("api_error" if dialect == "messages" else "server_error")
        until(lambda: gateway.states() == ["failed"])


@pytest.mark.parametrize(
    "message",
    [
        {"content": 1},
        {"content": None, "reasoning": ["x"]},
        {"tool_calls": {"x": 1}},
        {"tool_calls": [1]},
        {"tool_calls": [{"function": {"name": "x"}}]},
        {"tool_calls": [{"function": {"name": "x", "arguments": {}}}]},
    ],
    ids=str,
)
def test_a_malformed_message_of_the_engine_is_refused(message: Doc) -> None:
    with pytest.raises(Refused, match="none of chat completions"):
        read_answer({"choices": [{"message": message}]})
    assert read_answer({"choices": [{"message": {"content": "x", "tool_calls": None}}]}).message["content"] == "x"


ENGINE = ["--upstream", "{url}", "--model", MODEL, "--traces", "/tmp/x"]
"""Of commands that start nothing."""


def start(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gateway", "serve", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, env={**environment})


def looks(asked: Doc) -> str:
    """A tool call, if a tool is offered."""
    return call_text("look") if asked.get("tools") else "Nothing to do."


@pytest.mark.parametrize(
    ("switches", "level", "says"),
    [
        ({}, "tokens", "after temperature"),
        ({"raw": True}, "tokens", "before temperature (raw)"),
        ({"ids": False}, "logprobs", "the engine gave no prompt ids"),
        ({"logprobs": False}, "text", "no log probabilities"),
        ({"misaligned": True}, "logprobs", "log probabilities for"),
        ({"filler": True}, "logprobs", "a filler"),
        ({"old": True}, "logprobs", "refuses to be asked for token ids"),
        ({"script": lambda asked: " said "}, "tokens", "extends the prompt"),
        ({"script": lambda asked: " said ", "drift": True}, "tokens", "breaks the prompt at token"),
        ({"system_anywhere": False}, "tokens", "a user message in a tag"),
        ({"version": "41"}, "tokens", "told by /get_weight_version"),
        ({"sglang": True}, "tokens", "the streamed form fails: the engine answered 400: return_token_ids"),
        ({"sglang": True, "script": lambda asked: " said "}, "tokens", "extends the prompt"),
        ({}, "tokens", "a developer message is taken"),
        ({}, "tokens", "reasoning in the history is left out"),
        ({"reasoning": True}, "tokens", "reasoning in the history is kept"),
        ({}, "tokens", "a generation whose client hung up is not told"),
        ({"metrics": True}, "tokens", "a generation whose client hung up stops"),
        ({"metrics": True, "deaf": True}, "tokens", "a generation whose client hung up goes on"),
        ({"metrics": True, "working": 1}, "tokens", "could not be told while others use the engine"),
        ({}, "tokens", "the streamed form agrees"),
        ({"script": looks}, "tokens", "the streamed form agrees"),
        ({"script": looks, "streamed_ids": False}, "tokens", "the streamed form is less than the unary one: the"),
        ({"ids": False, "script": looks}, "logprobs", "the streamed form agrees"),
        ({"logprobs": False, "ids": False, "script": looks}, "text", "the streamed form agrees"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value,
)
def test_the_probe_says_plainly_what_the_engine_can(tmp_path: Path, switches: Doc, level: str, says: str) -> None:
    with engine(**switches) as model, recorder(model, tmp_path) as gateway:
        assert f"level {level}" in gateway.said() and says in gateway.said()
        assert f"purpose {'train' if level == 'tokens' else 'eval'}" in gateway.said()
        assert gateway.post("chat", body("chat")).status_code == 200
        (record,) = gateway.trace().calls.values()
        assert record.level == level and (record.fatal is None) == (level == "tokens")


@pytest.mark.parametrize(("switches", "off"), [({}, 0), ({"sglang": True}, -1)])
def test_a_call_is_recorded_whole_from_both_engines(tmp_path: Path, switches: Doc, off: int) -> None:
    """Where an engine puts its ids, and how it spells a top_k that is off, is found out."""
    with engine(**switches) as model, recorder(model, tmp_path) as gateway:
        gateway.post("chat", body("chat"))
        (record,), (served,) = gateway.trace().calls.values(), model.served
        assert record.prompt_ids and list(record.prompt_ids.tail) == served.prompt_ids
        assert (record.sampled_ids, record.logprobs) == (served.sampled_ids, served.logprobs)
        assert record.sampling_applied["top_k"] == served.body["top_k"] == off and record.fatal is None


@pytest.mark.parametrize("switches", [{"ids": False}, {"old": True}, {"raw": True, "temperature": "0.7"}], ids=str)
def test_an_engine_that_cannot_train_is_refused_before_anything(tmp_path: Path, switches: Doc) -> None:
    heat = ["--temperature", switches.pop("temperature", "1")]
    with engine(**switches) as model:
        common = ["--upstream", model.url, "--model", MODEL, "--traces", str(tmp_path)]
        refused = start(*common, *heat, "--purpose", "train")
        assert refused.returncode == 2 and "needs level tokens" in refused.stderr.splitlines()[-1]
        with recorder(model, tmp_path, *heat) as gateway:
            asked = {"rollout_id": "r", "purpose": "train"}
            answer = gateway.control("POST", "/attempts", asked)
            assert answer.status_code == 400 and "level" in answer.json()["error"]["message"]
            assert gateway.control("POST", "/attempts", asked | {"purpose": "eval"}).status_code == 200


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--upstream", "http://127.0.0.1:1"], "--upstream needs --model"),
        (["--upstream", "http://127.0.0.1:1", "--model", "x", "--traces", "/tmp/x"], "base URL"),
        (["--upstream", "{url}", "--model", "other", "--traces", "/tmp/x"], "serves: tiny"),
        (["--upstream", "{url}", "--model", MODEL, "--traces", "/proc/x"], "--traces /proc/x"),
        # A file system that exists and takes no file, as one that is mounted read-only
        (["--upstream", "{url}", "--model", MODEL, "--traces", "/proc/self"], "--traces /proc/self: "),
        (["--model", MODEL, "--traces", "/tmp/x"], "go with --upstream"),
        ([*ENGINE, "--scripts", "book.json"], "--scripts is for the scripted policies"),
        ([*ENGINE, "--temperature", "0"], "--temperature: must be a number above 0"),
        ([*ENGINE, "--temperature", "nan"], "--temperature: must be a number above 0"),
        ([*ENGINE, "--max-wall", "inf"], "--max-wall: must be a number above 0"),
        ([*ENGINE, "--retry-grace", "-1"], "--retry-grace: must be a number of seconds, 0 or more"),
        ([*ENGINE, "--max-calls", "0"], "--max-calls: must be a positive whole number"),
        ([*ENGINE, "--template-kwargs", "[1]"], "--template-kwargs: must be a JSON object"),
        ([*ENGINE, "--port", "65536"], "--port: must be a number from 0 to 65535"),
        ([*ENGINE, "--max-cal", "5"], "unknown option or argument (see python3 -m gateway --help)"),
        (["--upstream", "ftp://host/v1", "--model", "x", "--traces", "/tmp/x"], "must be an http or https URL"),
    ],
)
def test_what_cannot_start_is_one_line_and_exit_2(model: Engine, options: list[str], says: str) -> None:
    refused = start(*[option.replace("{url}", model.url) for option in options])
    lines = [line for line in refused.stderr.splitlines() if not line.startswith(f"gateway: engine {MODEL}: ")]
    assert refused.returncode == 2 and len(lines) == 1 and says in lines[0] and not refused.stdout


SECRET = "sk-secret-0123456789"


@pytest.mark.parametrize(
    ("options", "environment", "says"),
    [
        (
            ["--upstream", f"http://user:{SECRET}@127.0.0.1:1/v1", "--model", "x", "--traces", "/tmp/x"],
            {},
            "without user",
        ),
        (["--upstream", f"http://127.0.0.1:1/v1?k={SECRET}", "--model", "x", "--traces", "/tmp/x"], {}, "without user"),
        (["--upstream-key", SECRET], {}, "unknown option or argument"),
        (ENGINE, {"UPSTREAM_API_KEY": f"{SECRET}\n"}, "UPSTREAM_API_KEY must be printable ASCII"),
        (ENGINE, {"GATEWAY_ADMIN_KEY": f"{SECRET}\n"}, "GATEWAY_ADMIN_KEY must be printable ASCII"),
        (ENGINE, {"GATEWAY_ADMIN_KEY": SECRET, "GATEWAY_API_KEY": SECRET}, "must differ"),
    ],
)
def test_a_key_in_a_wrong_place_is_refused_and_not_shown(
    model: Engine, options: list[str], environment: dict[str, str], says: str
) -> None:
    refused = start(*[option.replace("{url}", model.url) for option in options], **environment)
    assert refused.returncode == 2 and says in refused.stderr and refused.stderr.count("\n") == 1
    assert SECRET not in refused.stderr + refused.stdout


def test_a_base_url_without_v1_is_found(model: Engine, tmp_path: Path) -> None:
    model.url = model.url.removesuffix("/v1")
    with recorder(model, tmp_path) as gateway:
        assert gateway.post("chat", body("chat")).status_code == 200


# --- Context ----------------------------------------------------------------------------------------


def test_a_limit_beyond_the_context_is_left_to_the_engine(tmp_path: Path) -> None:
    with engine(max_model_len=400) as model, recorder(model, tmp_path) as gateway:
        answer = gateway.post("messages", body("messages") | {"max_tokens": 32000})
        assert answer.status_code == 200
        (record,) = gateway.trace().calls.values()
        assert record.sampling_requested["max_tokens"] == 32000
        assert "max_completion_tokens" not in record.sampling_applied


OVERFLOWS = ["engine", "budget"]


@pytest.mark.parametrize("source", OVERFLOWS)
@pytest.mark.parametrize("action", ["stop", "native_error"])
def test_a_prompt_that_is_too_long(tmp_path: Path, dialect: str, source: str, action: str) -> None:
    options = ["--on-context", action, *(["--max-context", "300"] if source == "budget" else [])]
    with (
        engine(max_model_len=300 if source == "engine" else 1 << 20) as model,
        recorder(model, tmp_path, *options) as gateway,
    ):
        answer = gateway.post(dialect, body(dialect, "x" * 1000))
        if action == "stop":
            assert answer.status_code == 200 and "budget exhausted" in text_of(dialect, answer.json())
            assert gateway.states() == ["synthetic"]
        else:
            assert answer.status_code == 400 and "maximum" in answer.json()["error"]["message"]
            until(lambda: gateway.states() == ["failed"])
        assert gateway.post(dialect, body(dialect, "short")).status_code == 200


# --- Budgets ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "streamed"])
def test_the_call_budget_ends_the_harness_in_its_own_dialect(
    model: Engine, tmp_path: Path, dialect: str, stream: bool
) -> None:
    with recorder(model, tmp_path, "--max-calls", "2") as gateway:
        answers = [gateway.post(dialect, body(dialect, str(n), stream=stream)) for n in range(6)]
        assert [answer.status_code for answer in answers] == [200] * 5 + [409]
        assert answers[5].headers["x-should-retry"] == "false"
        assert all("Step budget exhausted; stopping." in answer.text for answer in answers[2:5])
        assert len(model.served) == 2
        until(lambda: gateway.states() == ["delivered"] * 2 + ["synthetic"] * 3 + ["failed"])
        stops = list(gateway.trace().calls.values())[2:]
        assert all(record.sampled_ids is None for record in stops) and "max_calls 2" in str(stops[0].stop_reason)


def test_the_last_call_is_clamped_to_the_token_budget(model: Engine, tmp_path: Path) -> None:
    model.script = lambda asked: "x" * 99
    with recorder(model, tmp_path, "--max-sampled-tokens", "130") as gateway:
        answers = [gateway.post("chat", body("chat", str(n))).json() for n in range(3)]
        assert [answer["choices"][0]["finish_reason"] for answer in answers] == ["stop", "length", "stop"]
        assert [len(served.sampled_ids) for served in model.served] == [100, 30]
        assert "budget exhausted" in text_of("chat", answers[2])


def test_the_wall_budget_cancels_the_engine(model: Engine, tmp_path: Path, dialect: str) -> None:
    with recorder(model, tmp_path, "--max-wall", "0.5") as gateway:
        model.held.clear()
        answer = gateway.post(dialect, body(dialect))
        assert answer.status_code == 200 and "budget exhausted" in text_of(dialect, answer.json())
        until(lambda: model.served[0].cancelled)
        assert gateway.states() == ["synthetic"]


# --- Versions of the weights ------------------------------------------------------------------------


def segments(gateway: Recorder) -> list[tuple[list[Any], bool]]:
    return [
        ([(one["start"], one["end"], one["version"]) for one in record.version_segments], record.version_exact)
        for record in gateway.trace().calls.values()
    ]


def test_weights_swapped_in_mid_call(tmp_path: Path) -> None:
    with engine(version="41") as model, recorder(model, tmp_path) as gateway:
        gateway.post("chat", body("chat", "before"))
        model.during = lambda: setattr(model, "version", "42")
        gateway.post("chat", body("chat", "during"))
        model.spans = [{"version": "42", "start": 0, "end": 3}, {"version": "43", "start": 3, "end": 15}]
        gateway.post("chat", body("chat", "told"))
        length = len(model.served[0].sampled_ids)
        exact, mixed, told = segments(gateway)
        assert exact == ([(0, length, "41")], True)
        assert mixed == ([(0, length, "41..42")], False)
        assert told == ([(0, 3, "42"), (3, 15, "43")], True)


def test_pause_holds_calls_back_and_resume_names_the_version(gateway: Recorder) -> None:
    gateway.control("POST", "/resume", {"version": "1"})
    gateway.engine.held.clear()
    answers: list[httpx.Response] = []

    def call(text: str) -> threading.Thread:
        thread = threading.Thread(target=lambda: answers.append(gateway.post("chat", body("chat", text))))
        thread.start()
        return thread

    running = call("under way")
    until(lambda: gateway.engine.served)
    assert gateway.control("POST", "/pause", {"wait": False}).json() == {"paused": True, "in_flight": 1, "version": "1"}
    held = call("held back")
    draining = threading.Thread(target=lambda: answers.append(gateway.control("POST", "/pause")))
    draining.start()
    gateway.engine.held.set()
    for thread in (running, draining):
        thread.join()
    assert len(gateway.engine.served) == 1 and gateway.control("GET", "/status").json()["in_flight"] == 0
    gateway.control("POST", "/resume", {"version": "2"})
    held.join()
    assert [version for (((_, _, version),), _) in segments(gateway)] == ["1", "2"]
    assert all(exact for _, exact in segments(gateway))


# --- Secrets ----------------------------------------------------------------------------------------


def test_no_key_reaches_the_disk_or_the_log(model: Engine, tmp_path: Path) -> None:
    keys = {"GATEWAY_API_KEY": "run-key-0123456789", "GATEWAY_ADMIN_KEY": "admin-key-0123456789"}
    keys["UPSTREAM_API_KEY"] = "engine-key-0123456789"
    with recorder(model, tmp_path, **keys) as gateway:
        model.script = lambda asked: f"I know {keys['GATEWAY_API_KEY']}"
        gateway.post("chat", body("chat", f"keys: {keys}"))
        opened = gateway.control("POST", "/attempts", {"rollout_id": "a"}).json()
        gateway.post("chat", body("chat", opened["api_key"]), "a", opened["api_key"])
        assert opened["api_key"] in json.dumps(model.served[1].body)  # the model did see it
        stored = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
        assert b"[secret]" in stored
        assert not [name for name, key in {**keys, "attempt": opened["api_key"]}.items() if key.encode() in stored]
