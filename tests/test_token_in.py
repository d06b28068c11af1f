"""Token-in: the prompt that goes on from a reply begins with the ids that were sampled, or the call says why not.

A real gateway with --token-in before the engine of engine.py, whose token routes have vLLM's shapes. `drift` makes the
engine render replies to other ids than it sampled, which breaks every chain on the chat route.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from clis import Case
from conftest import until
from engine import END, MODEL, Engine, call_text, encode, engine
from matrix import works
from recorded import PATHS, ROOT, Doc, Recorder, another, body, raw, recorder, text_of
from test_gateway_resends import clients
from test_gateway_serving import TWO_CALLS, second

from gateway.breaks import explain_breaks
from gateway.graph import build
from gateway.record import CallRecord, stored_ids

TAIL = [END, *b"\n"]
"""What the template writes at the end of a reply."""
STOPPED = "Step budget exhausted; stopping."


@pytest.fixture(scope="module")
def model() -> Iterator[Engine]:
    with engine() as running:
        yield running


@pytest.fixture(scope="module")
def shared(model: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorder]:
    with recorder(model, tmp_path_factory.mktemp("tokens"), "--token-in") as gateway:
        yield gateway


@pytest.fixture(scope="module")
def by_chat(model: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorder]:
    with recorder(model, tmp_path_factory.mktemp("chat")) as gateway:
        yield gateway


@pytest.fixture
def gateway(shared: Recorder) -> Recorder:
    return another(shared)


@pytest.fixture(params=PATHS)
def dialect(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def say(gateway: Recorder, messages: list[Doc], *turns: str, **members: Any) -> list[Doc]:
    """A conversation by chat completions: the user's turns, each followed by the reply, as it came."""
    for turn in turns:
        messages = [*messages, {"role": "user", "content": turn}]
        headers = {"x_session_id": members["session"]} if "session" in members else {}
        asked = {name: value for name, value in members.items() if name != "session"}
        reply = gateway.post("chat", body("chat", messages=messages, **asked), **headers)
        assert reply.status_code == 200, reply.text
        messages = [*messages, reply.json()["choices"][0]["message"]]
    return messages


def calls(gateway: Recorder) -> list[CallRecord]:
    until(lambda: "reply" not in gateway.states())
    return sorted(gateway.trace().calls.values(), key=lambda record: record.seq)


def ways(gateway: Recorder) -> list[tuple[str, str]]:
    """(code, detail) of what each call says of its way."""
    found = [[one for one in record.findings if one["code"].startswith("token_in")] for record in calls(gateway)]
    assert all(len(one) == 1 for one in found)
    return [(one["code"], one["detail"]) for (one,) in found]


def roots(gateway: Recorder) -> int:
    graph = build(calls(gateway))
    assert all(record.state in ("delivered", "failed") for record in calls(gateway))
    return len(graph.roots)


def prompts(gateway: Recorder) -> list[list[int]]:
    known = gateway.trace().calls
    ids = [(stored_ids(known, record.call_id), len(record.sampled_ids or ())) for record in calls(gateway)]
    return [whole[: len(whole) - sampled] for whole, sampled in ids]


# --- Drift ------------------------------------------------------------------------------------------------


def test_a_conversation_that_drifts_is_one_chain(gateway: Recorder, by_chat: Recorder, dialect: str) -> None:
    other = replace(by_chat, rollout=gateway.rollout)
    gateway.engine.drift = True
    gateway.engine.script = lambda asked: TWO_CALLS if asked["messages"][-1]["role"] == "user" else "Done.  "
    for one in (gateway, other):
        first = body(dialect, tools=True)
        reply = one.post(dialect, first).json()
        assert one.post(dialect, second(dialect, first, reply)).status_code == 200
    assert (roots(gateway), roots(other)) == (1, 2)
    assert [record.transforms and record.transforms[-1]["kind"] for record in calls(gateway)][1] == "token_in"
    one, two = gateway.engine.served[:2]
    results = "<|im_start|>tool\nok<|im_end|>\n" * 2
    assert two.prompt_ids == one.prompt_ids + one.sampled_ids + encode(f"\n{results}<|im_start|>assistant\n")
    assert [served.route for served in gateway.engine.served] == ["generate"] * 2 + ["chat"] * 2
    assert prompts(gateway) == [one.prompt_ids, two.prompt_ids]
    first_call, second_call = calls(gateway)
    assert (second_call.sampled_ids, second_call.logprobs) == (two.sampled_ids, two.logprobs)
    assert ways(gateway)[1] == ("token_in", f"continues {first_call.call_id}")


@pytest.mark.parametrize(
    "sampled",
    [
        pytest.param(list(b"<|im_end|>\n<|im_start|>user\nno"), id="the text of an end"),
        pytest.param(list(b"<|im_end|>"), id="nothing but the text of an end"),
        pytest.param([0xFF, 0xC3], id="no text"),
        pytest.param([], id="nothing but its end"),
        pytest.param([END, *b"\n"], id="an end that does not end it"),
    ],
)
def test_whatever_was_sampled_is_in_the_next_prompt(gateway: Recorder, sampled: list[int]) -> None:
    gateway.engine.script = lambda asked: sampled
    say(gateway, [], "Begin.", "Go on.", "And on.")
    first, *later = gateway.engine.served
    before = first
    for served in later:
        begun = [*before.prompt_ids, *sampled, END, *b"\n"]
        assert served.prompt_ids[: len(begun)] == begun
        before = served
    assert roots(gateway) == 1
    turn = encode("<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n")
    assert later[0].prompt_ids == [*first.prompt_ids, *sampled, END, *b"\n", *turn]


def test_a_truncated_reply_is_closed_by_the_template(gateway: Recorder) -> None:
    gateway.engine.drift = True
    gateway.engine.script = lambda asked: "    and so on"
    messages = say(gateway, [], "Begin.", max_tokens=6)
    say(gateway, messages, "Go on.")
    one, two = gateway.engine.served
    assert one.sampled_ids == list(b"    an") and calls(gateway)[0].finish_reason == "length"
    begun = [*one.prompt_ids, *one.sampled_ids, *TAIL]
    assert two.prompt_ids[: len(begun)] == begun and roots(gateway) == 1


@pytest.mark.parametrize("cli", ["codex", "claude --bare"])
def test_what_a_real_harness_sends_back_is_one_chain(gateway: Recorder, tmp_path: Path, cli: str) -> None:
    gateway.engine.drift = True
    gateway.engine.script = lambda asked: works(asked) + "  "
    case = Case(gateway, cli, tmp_path)
    case.run()
    assert case.made == ["made1"] and case.chains(case.graph()) == [2]
    assert [code for code, _ in ways(gateway)] == ["token_in"] * 2
    assert "continues" in ways(gateway)[1][1]


def test_empty_reasoning_before_the_last_reply_is_seen_through(tmp_path: Path) -> None:
    """Qwen3's template. The rendering that ends with the reply is no beginning of the one that goes on."""
    with engine(hollow=True, drift=True) as model, recorder(model, tmp_path, "--token-in") as gateway:
        model.script = lambda asked: TWO_CALLS if asked["messages"][-1]["role"] == "user" else "Done.  "
        first = body("chat", tools=True)
        following = second("chat", first, gateway.post("chat", first).json())
        message = gateway.post("chat", following).json()["choices"][0]["message"]
        say(gateway, [*following["messages"], message], "?", tools=first["tools"])
        assert [code for code, _ in ways(gateway)] == ["token_in"] * 3 and roots(gateway) == 1
        one, two, three = model.served
        begun = [*two.prompt_ids, *two.sampled_ids]
        assert three.prompt_ids == [*begun, *encode("\n<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n")]
        assert two.prompt_ids[: len(one.prompt_ids) + len(one.sampled_ids)] == [*one.prompt_ids, *one.sampled_ids]


# --- Both ways on the same traffic ------------------------------------------------------------------------


def plain(gateway: Recorder) -> None:
    say(gateway, [{"role": "system", "content": "Be brief."}], "Begin.", "Go on.", "And on.")


def with_a_note(gateway: Recorder) -> None:
    messages = say(gateway, [], "Begin.")
    say(gateway, [*messages, {"role": "system", "content": "It is late."}], "Go on.")


def with_tools(gateway: Recorder) -> None:
    first = body("messages", tools=True)
    reply = gateway.post("messages", first).json()
    gateway.post("messages", second("messages", first, reply)).raise_for_status()


def forked(gateway: Recorder) -> None:
    messages = say(gateway, [], "Begin.")
    say(gateway, messages, "Go left.")
    say(gateway, messages, "Go right.")


def truncated(gateway: Recorder) -> None:
    messages = say(gateway, [], "Begin.", max_tokens=3)
    say(gateway, messages, "Go on.")


def rewritten(gateway: Recorder) -> None:
    messages = say(gateway, [], "Begin.")
    say(gateway, [messages[0], {"role": "assistant", "content": "Another reply."}], "Go on.")


TRAFFIC = (plain, with_a_note, with_tools, forked, truncated, rewritten)


@pytest.mark.parametrize("reasons", [False, True], ids=["", "with reasoning"])
@pytest.mark.parametrize("traffic", TRAFFIC, ids=lambda traffic: str(traffic.__name__))
def test_where_nothing_drifts_both_ways_are_the_same(
    gateway: Recorder, by_chat: Recorder, traffic: Any, reasons: bool
) -> None:
    """P, S, L, the message and what is counted: only the way differs, and the spans that the token routes add."""
    other = replace(by_chat, rollout=gateway.rollout)
    gateway.engine.reasoning = reasons
    thought = "Hm.</think>" if reasons else ""
    gateway.engine.script = lambda asked: thought + (TWO_CALLS if asked.get("tools") else "A reply.")
    for one in (gateway, other):
        traffic(one)
    assert prompts(gateway) == prompts(other)
    for mine, theirs in zip(calls(gateway), calls(other), strict=True):
        for name in ("sampled_ids", "logprobs", "finish_reason", "stop_reason", "usage", "parse_ok", "transforms"):
            assert getattr(mine, name) == getattr(theirs, name), name
        assert without_ids(mine.message) == without_ids(theirs.message)
        assert [one for one in mine.findings if one["code"] != "token_in"] == list(theirs.findings)
    routes = [served.route for served in gateway.engine.served]
    assert routes == ["generate"] * (len(routes) // 2) + ["chat"] * (len(routes) // 2)


def without_ids(message: Any) -> Any:
    return {**message, "tool_calls": [{**called, "id": ""} for called in message["tool_calls"]]}


# --- Which reply a call goes on from ----------------------------------------------------------------------


def test_a_fork_goes_on_from_the_same_ids_twice(gateway: Recorder) -> None:
    gateway.engine.drift = True
    gateway.engine.script = lambda asked: "  A reply. "
    messages = say(gateway, [], "Begin.")
    say(gateway, messages, "Go left.", "And on.")
    say(gateway, messages, "Go right.")
    one = gateway.engine.served[0]
    begun = [*one.prompt_ids, *one.sampled_ids, *b"\n"]
    assert all(served.prompt_ids[: len(begun)] == begun for served in gateway.engine.served[1:])
    graph = build(calls(gateway))
    (root,) = graph.roots
    assert len(graph.calls) == 4 and sum(call.parent == root for call in graph.calls.values()) == 2


def test_a_resend_is_no_call(gateway: Recorder) -> None:
    gateway.engine.drift = True
    gateway.engine.script = lambda asked: "  A reply. "
    messages = [*say(gateway, [], "Begin."), {"role": "user", "content": "Go on."}]
    asked = body("chat", messages=messages)
    texts = [gateway.post("chat", asked, x_stainless_retry_count=count).text for count in ("0", "1")]
    assert texts[0] == texts[1] and len(gateway.engine.served) == 2 and roots(gateway) == 1


def test_two_replies_that_read_alike_are_told_apart_by_their_session(gateway: Recorder) -> None:
    kinds = iter([[0xFF], [0xFE], [0xFF]])  # all read U+FFFD
    gateway.engine.script = lambda asked: next(kinds, [0xFD])
    ended = [say(gateway, [], "Begin.", session=name) for name in ("a", "b", "c")]
    assert ended[0] == ended[1]
    for name in ("b", "a", "unknown"):
        say(gateway, ended[0], "Go on.", session=name)
    assert [prompt[len(gateway.engine.served[0].prompt_ids)] for prompt in prompts(gateway)[3:]] == [0xFE, 0xFF, 0xFF]
    ids = [record.call_id for record in calls(gateway)]
    assert [detail for _, detail in ways(gateway)[3:]] == [f"continues {ids[at]}" for at in (1, 0, 2)]


def test_a_reply_that_nobody_got_is_not_gone_on_from(gateway: Recorder) -> None:
    kinds = iter([[0xFF], [0xFE]])  # both read U+FFFD
    gateway.engine.script = lambda asked: next(kinds, [0xFD])
    messages = say(gateway, [], "Begin.")
    gateway.engine.held.clear()
    with raw(gateway, "chat", body("chat", messages=messages[:1])):
        until(lambda: len(gateway.engine.served) == 2)
    until(lambda: clients(gateway) == 0)
    gateway.engine.held.set()
    until(lambda: len(gateway.states()) == 2)  # the second is in the log, and went nowhere
    say(gateway, messages, "Go on.")
    first, _, last = sorted(gateway.trace().calls.values(), key=lambda record: record.seq)
    assert f"continues {first.call_id}" in [finding["detail"] for finding in last.findings]


def test_another_rollout_is_no_memory(gateway: Recorder) -> None:
    gateway.engine.drift = True
    gateway.engine.script = lambda asked: "  A reply. "
    messages = say(gateway, [], "Begin.")
    other = replace(gateway, rollout=f"{gateway.rollout}-other")
    say(other, messages, "Go on.")
    assert ways(other) == [("token_in", "rendered: it goes on from no reply of this attempt")]


def test_a_reply_that_the_harness_changed_is_rendered(gateway: Recorder) -> None:
    gateway.engine.script = lambda asked: "A reply."
    messages = say(gateway, [], "Begin.")
    say(gateway, [messages[0], {"role": "assistant", "content": "A reply"}], "Go on.")
    assert ways(gateway)[1] == ("token_in", "rendered: it goes on from no reply of this attempt")
    (found,) = explain_breaks(build(calls(gateway)))
    assert found.caused_by == "harness"


def test_a_restarted_gateway_goes_on_from_the_log(model: Engine, tmp_path: Path) -> None:
    model.reset()
    model.drift = True
    model.script = lambda asked: "  A reply. "
    with recorder(model, tmp_path, "--token-in", GATEWAY_API_KEY="k" * 20) as gateway:
        messages = say(gateway, [], "Begin.", "Go on.")
        assert len(calls(gateway)) == 2  # delivered
        gateway.kill()
    with recorder(model, tmp_path, "--token-in", GATEWAY_API_KEY="k" * 20) as gateway:
        say(gateway, messages, "And on.", "To the end.")
        assert roots(gateway) == 1 and [code for code, _ in ways(gateway)] == ["token_in"] * 4


# --- Where it cannot be shown that the ids fit ------------------------------------------------------------


@pytest.mark.parametrize("said", ["", "<think>Hm.</think>"], ids=["parsed", "left in the text"])
def test_qwen3_dropping_what_was_thought_takes_the_chat_route(tmp_path: Path, said: str) -> None:
    with engine(hollow=True, forgets=True, reasoning=True) as model, recorder(model, tmp_path, "--token-in") as gateway:
        model.reasoning = not said
        model.forgets_text = bool(said)
        model.script = lambda asked: f"{said or 'Hm.</think>'}A reply."
        say(gateway, [], "Begin.", "Go on.")
        assert [code for code, _ in ways(gateway)] == ["token_in", "token_in_fallback"]


def test_a_reply_cut_off_right_after_its_call_takes_the_chat_route(gateway: Recorder) -> None:
    """Its reason is tool_calls, and it ends with a token of the template, but not with its end."""
    called = call_text("bash", command="ls")
    gateway.engine.script = lambda asked: f"{called}\nand so on"
    first = body("chat", tools=True, max_tokens=len(encode(called)) + 1)
    reply = gateway.post("chat", first).json()
    gateway.post("chat", second("chat", first, reply)).raise_for_status()
    record = calls(gateway)[0]
    assert record.finish_reason == "tool_calls" and (record.sampled_ids or [0])[-1] in TAIL
    assert ways(gateway)[1][0] == "token_in_fallback"


def test_a_template_that_forgets_reasoning_takes_the_chat_route(gateway: Recorder) -> None:
    gateway.engine.reasoning = gateway.engine.forgets = gateway.engine.drift = True
    first = body("chat", tools=True)
    gateway.engine.script = lambda asked: (
        "Hm.</think>" + (TWO_CALLS if asked["messages"][-1]["role"] == "user" else "Done.")
    )
    reply = gateway.post("chat", first).json()
    following = second("chat", first, reply)
    message = gateway.post("chat", following).json()["choices"][0]["message"]
    say(gateway, [*following["messages"], message], "Go on.", tools=first["tools"])
    codes, details = zip(*ways(gateway), strict=True)
    assert codes == ("token_in", "token_in", "token_in_fallback")  # with tool results, the reasoning is kept
    why = "the template writes what comes before the reply otherwise than when it was asked for"
    assert details[2] == f"the chat route was taken: {why}"
    assert [served.route for served in gateway.engine.served] == ["generate", "generate", "chat"]
    assert roots(gateway) == 2


def test_a_template_that_opens_replies_otherwise_takes_the_chat_route(gateway: Recorder) -> None:
    gateway.engine.opening = "<think>\n\n</think>\n\n"
    say(gateway, [], "Begin.", "Go on.")
    why = "the template writes what comes before the reply otherwise than when it was asked for"
    assert ways(gateway)[1] == ("token_in_fallback", f"the chat route was taken: {why}")


def test_a_template_that_ends_calls_otherwise_takes_the_chat_route(gateway: Recorder) -> None:
    gateway.engine.ends_alike = False
    gateway.engine.script = lambda asked: TWO_CALLS
    first = body("chat", tools=True)
    reply = gateway.post("chat", first).json()
    gateway.post("chat", second("chat", first, reply)).raise_for_status()
    assert ways(gateway)[1] == (
        "token_in_fallback",
        "the chat route was taken: the template ends this reply otherwise than a plain one",
    )


def test_stop_strings_take_the_chat_route_and_their_reply_is_gone_on_from(gateway: Recorder) -> None:
    gateway.engine.drift = True
    gateway.engine.script = lambda asked: "  A reply. "
    messages = say(gateway, [], "Begin.", stop=["###"])
    say(gateway, messages, "Go on.")
    assert [code for code, _ in ways(gateway)] == ["token_in_fallback", "token_in"] and roots(gateway) == 1


# --- Budgets, errors, versions ----------------------------------------------------------------------------


def test_the_context_is_counted_on_the_ids(gateway: Recorder) -> None:
    """The rendering, without the spaces that were sampled, would fit."""
    gateway.engine.drift = True
    gateway.engine.script = lambda asked: " " * 200 + "A reply."
    opened = gateway.control("POST", "/attempts", {"rollout_id": gateway.rollout, "budgets": {"max_context": 200}})
    key = opened.json()["api_key"]
    first = body("chat")
    message = gateway.post("chat", first, key=key).json()["choices"][0]["message"]
    following = {**first, "messages": [*first["messages"], message, {"role": "user", "content": "Go on."}]}
    assert len(encode(gateway.engine.render(following))) < 200
    assert text_of("chat", gateway.post("chat", following, key=key).json()) == STOPPED
    assert len(gateway.engine.served) == 1


def test_the_engine_is_told_what_may_still_be_sampled(gateway: Recorder) -> None:
    gateway.engine.script = lambda asked: "A reply."
    opened = gateway.control(
        "POST", "/attempts", {"rollout_id": gateway.rollout, "budgets": {"max_sampled_tokens": 12}}
    )
    key = opened.json()["api_key"]
    texts = [text_of("chat", gateway.post("chat", body("chat"), key=key).json()) for _ in range(3)]
    assert texts == ["A reply.", "A r", STOPPED]


def test_a_prompt_beyond_the_context_stops_the_harness(gateway: Recorder) -> None:
    """The ids do not fit, though the rendering does; and then not even the rendering."""
    gateway.engine.drift = True
    gateway.engine.script = lambda asked: " " * 200 + "A reply."
    messages = say(gateway, [], "Begin.")
    gateway.engine.max_model_len = 200
    for turn in ("Go on.", "Go on." * 40):
        asked = body("chat", messages=[*messages, {"role": "user", "content": turn}])
        assert text_of("chat", gateway.post("chat", asked).json()) == STOPPED
    assert len(gateway.engine.served) == 1


@pytest.mark.parametrize("route", ["render", "generate", "derender"])
def test_a_broken_route_fails_the_call_and_not_the_next(gateway: Recorder, route: str) -> None:
    messages = say(gateway, [], "Begin.")
    asked = body("chat", messages=[*messages, {"role": "user", "content": "Go on."}])
    gateway.engine.broken = route
    failed = gateway.post("chat", asked)
    assert (failed.status_code, failed.json()["error"]["code"]) == (502, "engine_failed")
    gateway.engine.broken = ""
    assert gateway.post("chat", asked).status_code == 200
    assert [record.state for record in calls(gateway)] == ["delivered", "failed", "delivered"] and roots(gateway) == 1


def test_a_call_across_an_update_says_where_the_weights_changed(gateway: Recorder) -> None:
    gateway.engine.script = lambda asked: "A reply."
    gateway.engine.spans = [{"version": "1", "start": 0, "end": 3}, {"version": "2", "start": 3, "end": 9}]
    say(gateway, [], "Begin.")
    (record,) = calls(gateway)
    expected = [{"start": 0, "end": 3, "version": "1"}, {"start": 3, "end": 9, "version": "2"}]
    assert (record.version_segments, record.version_exact) == (expected, True)


def test_the_trainer_names_weights_that_the_engine_has_no_name_for(gateway: Recorder) -> None:
    say(gateway, [], "Begin.")
    gateway.control("POST", "/resume", {"version": "41"}).raise_for_status()
    say(gateway, [], "Begin.")
    found = [[span["version"] for span in record.version_segments] for record in calls(gateway)]
    assert found == [["default"], ["41"]] and all(record.version_exact for record in calls(gateway))


# --- Where the engine has no such routes ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("switches", "told"),
    [
        ({"scale_out": False}, "the engine answered 403: Scale-out endpoints are disabled. Restart vllm serve"),
        ({"ids": False}, "it is at level logprobs"),
        ({"broken": "derender"}, "the engine answered 500: derender is broken"),
    ],
)
def test_it_is_refused_at_the_start_in_one_line(tmp_path: Path, switches: Doc, told: str) -> None:
    with engine(**switches) as model:
        lines = refused("--upstream", model.url, "--model", MODEL, "--traces", str(tmp_path), "--token-in")
    assert lines[-1].startswith("gateway: --token-in needs an engine that renders") and told in lines[-1]


def test_the_scripted_policies_have_no_ids() -> None:
    assert refused("--token-in") == [
        "gateway: --token-in goes with --upstream URL: the scripted policies have no token ids"
    ]


def test_it_does_not_stream(tmp_path: Path) -> None:
    line = "gateway: --live and --token-in exclude each other: the token routes do not stream messages"
    options = ("--upstream", "http://127.0.0.1:1/v1", "--model", MODEL, "--traces", str(tmp_path))
    assert refused(*options, "--live", "--token-in") == [line]


def refused(*options: str) -> list[str]:
    command = [sys.executable, "-m", "gateway", "serve", *options]
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    return done.stderr.splitlines()
