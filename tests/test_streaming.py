"""A reply in chunks, in pieces and in events: whatever the pieces, the same in the end, and what may be seen when."""

from __future__ import annotations

import json
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded import events_of

from gateway.call import Call, Piece, Refused, Reply, Request, Tool, ToolCall, Usage, pieces
from gateway.conversion import begins_object
from gateway.dialects import chat, messages, responses
from gateway.streaming import Assembly, Feed

Doc = dict[str, Any]
BASH = Tool("bash")
PATCH = Tool("apply_patch", kind="custom")


def chunk(delta: Doc, ids: list[int] | None = None, **choice: Any) -> Doc:
    content = [{"token": f"token_id:{one}", "logprob": -one / 8} for one in ids or ()]
    measured = {"token_ids": ids, "logprobs": {"content": content}} if ids is not None else {}
    return {"choices": [{"index": 0, "delta": delta, **measured, **choice}]}


def called(index: int, arguments: str, name: str | None = None) -> Doc:
    begun = {"id": f"t{index}", "type": "function"} if name else {}
    function = {**({"name": name} if name else {}), "arguments": arguments}
    return {"tool_calls": [{"index": index, **begun, "function": function}]}


FIRST = {**chunk({"role": "assistant", "content": ""}), "prompt_token_ids": [1, 2, 3]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 3}}


def assembled(*chunks: Doc) -> tuple[Assembly, list[Piece]]:
    assembly = Assembly((BASH,))
    return assembly, [piece for one in chunks for piece in assembly.take(one)]


def test_chunks_become_the_answer_of_a_unary_call() -> None:
    last = chunk({}, [6], finish_reason="tool_calls", stop_reason=None)
    usage = {**USAGE, "usage": USAGE["usage"] | {"prompt_tokens_details": {"cached_tokens": 2}}}
    assembly, found = assembled(
        FIRST,
        chunk({"reasoning": "Hm"}, [4]),
        chunk({"reasoning_content": "."}),
        chunk({}, []),
        chunk({"content": "Yes."}),
        chunk(called(0, "", "bash"), [5]),
        chunk(called(0, '{"a": ')),
        chunk({"tool_calls": [*called(0, "1}")["tool_calls"], *called(1, "{}", "rm")["tool_calls"]]}),
        last,
        usage,
    )
    answer = assembly.answer()
    assert (answer.prompt_ids, answer.sampled_ids, answer.logprobs) == ([1, 2, 3], [4, 5, 6], [-0.5, -0.625, -0.75])
    assert answer.finish_reason == "tool_calls" and answer.usage == Usage(3, 3, cached=2) and not answer.findings
    functions = [("t0", "bash", '{"a": 1}'), ("t1", "rm", "{}")]
    calls = [
        {"id": one, "type": "function", "function": {"name": name, "arguments": sent}} for one, name, sent in functions
    ]
    assert answer.message == {"role": "assistant", "content": "Yes.", "reasoning": "Hm.", "tool_calls": calls}
    assert [piece.text for piece in found] == ["Hm", ".", "Yes.", "", '{"a": ', "1}", "", "{}"]
    assert [piece.tool for piece in found if piece.tool] == [BASH, Tool("rm")]


def test_the_text_between_two_calls_is_no_part_of_the_message() -> None:
    """As some parsers of vLLM stream it, and none gives it in the unary form."""
    calls = [chunk(called(index, "{}", "bash"), [4 + index]) for index in range(2)]
    last = chunk({}, [6], finish_reason="stop")
    blank, spoken = (
        assembled(FIRST, calls[0], chunk({"content": text}), calls[1], last, USAGE)[0].answer()
        for text in ("\n", "\nAnd:")
    )
    assert blank.message == spoken.message and blank.message["content"] is None and not blank.findings
    assert [(one["level"], one["code"]) for one in spoken.findings] == [("warn", "message_filtered")]


def test_tokens_that_are_missing_altogether_are_found() -> None:
    """Ids and log probabilities of a chunk are lost together, so that they stay aligned."""
    answer = assembled(FIRST, chunk({"content": "a"}, [4]), chunk({}, [6], finish_reason="stop"), USAGE)[0].answer()
    assert [(one["level"], one["code"]) for one in answer.findings] == [("fatal", "logprob_misaligned")]


@pytest.mark.parametrize(
    "chunks",
    [
        [{}],
        [{"choices": ["x"]}],
        [{"choices": [{}, {}]}],
        [chunk({"content": 5})],
        [chunk({"reasoning": ["x"]})],
        [chunk({"tool_calls": {"index": 0}})],
        [chunk({"tool_calls": ["x"]})],
        [chunk(called(0, "{}"))],
        [chunk(called(1, "{}", "bash"))],
        [chunk(called(0, "{}", "bash")), chunk(called(1, "{}", "bash")), chunk(called(0, "{}"))],
        [chunk(called(0, "{}", "bash")), chunk({"tool_calls": [{"index": 0, "id": "other", "function": {}}]})],
        [chunk({"tool_calls": [{"index": 0, "function": {"name": "bash", "arguments": {}}}]})],
        [chunk({"tool_calls": [{"index": None, "function": {"name": "bash"}}]})],
    ],
    ids=str,
)
def test_chunks_of_another_shape_are_refused(chunks: list[Doc]) -> None:
    with pytest.raises(Refused, match="the engine streamed"):
        assembled(*chunks)


def test_without_a_finish_reason_there_is_no_answer() -> None:
    with pytest.raises(Refused, match="without a finish reason"):
        assembled(FIRST, chunk({"content": "a"}, [4]))[0].answer()


CALL = Piece("call", "", BASH)


@pytest.mark.parametrize(
    ("added", "shown"),
    [
        ([Piece("reasoning", "a"), Piece("text", "{}"), Piece("text", "}")], [1, 2, 3]),
        ([CALL, Piece("call", '{"a'), Piece("call", '": 1')], [1, 2, 3]),
        ([CALL, Piece("call", '{"a": "}'), Piece("call", '"'), Piece("call", "} \n")], [1, 1, 3, 3]),
        ([CALL, Piece("call", "{}"), CALL, Piece("call", '{"a')], [1, 1, 1, 1]),
        ([CALL, Piece("call", " "), Piece("call", "[1"), Piece("call", "]")], [1, 2, 2, 2]),
        ([CALL, Piece("call", "tr"), Piece("call", "ue")], [1, 1, 1]),
    ],
    ids=str,
)
def test_what_would_complete_a_call_is_not_shown(added: list[Piece], shown: list[int]) -> None:
    feed, found = Feed(), []
    for piece in added:
        feed.add(piece)
        found.append(feed.shown)
    assert found == shown


@pytest.mark.parametrize(
    ("text", "begins"),
    [
        *[
            (text, True)
            for text in ("{", ' {"', '{"a": ', '{"a": "ä\\', '{"a": tr', '{"a": {"b": [1, -', '{"a": 1} \n')
        ],
        *[(text, False) for text in ("", " ", "[", '"x', "ls", '{"a": }', '{"a": 1}x', '{"a": 1}}', '{"a": "\ud800')],
        ('{"a":' * 10_000, False),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_text_that_can_become_an_object(text: str, begins: bool) -> None:
    assert begins_object(text) == begins


def cut(text: str, at: list[int]) -> list[str]:
    ends = sorted({0, len(text), *(one % (len(text) + 1) for one in at)})
    return [text[start:end] for start, end in pairwise(ends)]


def call_of(reply: Reply) -> Call:
    request = Request("m", True, (), (BASH, PATCH), (), {}, echo={"include_usage": True})
    return Call("0" * 24, request, reply, Usage(9, 5), 1)


TEXTS = st.text(max_size=12)
OBJECTS = st.dictionaries(st.text(max_size=3), st.one_of(st.text(max_size=6), st.integers(), st.lists(st.none())))
ARGUMENTS = st.one_of(OBJECTS.map(json.dumps), OBJECTS.map(lambda one: json.dumps(one, ensure_ascii=False, indent=1)))
REPLIES = st.builds(
    Reply,
    text=TEXTS,
    reasoning=TEXTS,
    tool_calls=st.lists(st.builds(ToolCall, st.sampled_from([BASH, PATCH]), ARGUMENTS), max_size=3).map(tuple),
)


def streamed(dialect: ModuleType, reply: Reply, at: list[int]) -> str:
    """The events when each piece comes in several."""
    call = call_of(reply)
    stream, found = dialect.Stream(call_of(Reply())), list[str]()
    found += stream.begun()
    for piece in pieces(reply):
        for text in [""] if piece.tool else cut(piece.text, at):
            found += stream.feed(Piece(piece.kind, text, piece.tool))
    return "".join([*found, *stream.end(call)])


def joined(text: str) -> list[Any]:
    """The events, with what goes on put together."""
    found: list[Any] = []
    for name, data in events_of(text):
        key, said = split(name, data)
        if said is not None and found and found[-1][0] == key:
            found[-1][1] += said
        else:
            found.append([key, said])
    return [one for one in found if one[1] != ""]


def split(name: str, data: Any) -> tuple[str, str | None]:
    """(an event without what it adds, what it adds)."""
    if data == "[DONE]":
        return data, None
    kept = {key: value for key, value in data.items() if key != "sequence_number"}
    said = kept.pop("delta") if isinstance(kept.get("delta"), str) else None
    if name == "content_block_delta" and kept["delta"]["type"] != "signature_delta":
        said = kept["delta"].popitem()[1]
    if not name and kept["choices"]:
        delta = kept["choices"][0]["delta"]
        calls = delta.get("tool_calls")
        if calls and "name" not in calls[0]["function"]:
            said = calls[0]["function"].pop("arguments")
        elif not calls and "role" not in delta and delta:
            said, *_ = delta.values()
            delta.clear()
    return json.dumps([name, kept], sort_keys=True), said


@pytest.mark.parametrize("dialect", [chat, messages, responses], ids=lambda dialect: dialect.NAME)
@given(reply=REPLIES, at=st.lists(st.integers(0, 200), max_size=6))
def test_the_events_do_not_depend_on_the_pieces(dialect: ModuleType, reply: Reply, at: list[int]) -> None:
    whole = "".join(dialect.Stream(call_of(reply)).whole())
    pieced = streamed(dialect, reply, at)
    assert joined(pieced) == joined(whole)
    numbers = [data["sequence_number"] for _, data in events_of(pieced) if dialect is responses]
    assert numbers == list(range(len(numbers)))


@pytest.mark.parametrize(
    ("texts", "seen", "whole"),
    [
        (["ls -la"], "", '{"INVALID_JSON":"ls -la"}'),
        (["[1", "]"], "", '{"INVALID_JSON":"[1]"}'),
        (['{"a": "b'], "", '{"INVALID_JSON":"{\\"a\\": \\"b"}'),
        (['{"a": ', '"b'], '{"a": ', '{"a": "b'),
        (['{"a": ', "}", " x"], '{"a": ', '{"a": '),
        (['{"a": 1', "}", "x"], '{"a": 1}', '{"a": 1}'),
        (["", ""], "", '{"INVALID_JSON":""}'),
    ],
    ids=str,
)
def test_arguments_that_are_no_object_in_messages(texts: list[str], seen: str, whole: str) -> None:
    """Nothing that a client could not read as an object goes out, wherever it turns out."""
    stream = messages.Stream(call_of(Reply()))
    found = [*stream.begun(), *stream.feed(CALL)]
    for text in texts:
        found += stream.feed(Piece("call", text))
    assert arguments(found) == seen
    found += stream.end(call_of(Reply(tool_calls=(ToolCall(BASH, "".join(texts)),))))
    assert arguments(found) == whole


def arguments(events: list[str]) -> str:
    found = [data["delta"] for name, data in events_of("".join(events)) if name == "content_block_delta"]
    return "".join(one["partial_json"] for one in found)
