"""Streams of the engine read back: the same value as the unary form, and nothing made up where one breaks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from engine import MODEL, Engine, call_text, engine

from gateway.chunks import BrokenStream, Completion, chunks

Doc = dict[str, Any]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
CAPTURE = {"logprobs": True, "return_token_ids": True, "return_tokens_as_token_ids": True}


@pytest.fixture(scope="module")
def model() -> Iterator[Engine]:
    with engine() as running:
        yield running


def read_back(text: str) -> Doc:
    async def lines() -> AsyncIterator[str]:
        for line in text.splitlines():
            yield line

    async def whole() -> Doc:
        completion = Completion()
        async for one in chunks(lines()):
            completion.add(one)
        return completion.whole

    return asyncio.run(whole())


@pytest.mark.parametrize(
    "said",
    [
        "",
        "Fine.",
        "ä" * 50,
        "Why? Because.</think>Fine.",
        "I look.\n" + call_text("look", a="ä" * 20, b=[1, {"c": "\n"}]),
        call_text("look") + "\n" + call_text("look", again=True),
    ],
)
def test_a_stream_gives_what_the_unary_form_gives(model: Engine, said: str) -> None:
    model.reset()
    model.script, model.reasoning = lambda asked: said, True
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "Do."}], "tools": TOOLS, **CAPTURE}
    url, usage = f"{model.url}/chat/completions", {"stream_options": {"include_usage": True}}
    unary = httpx.post(url, json=asked).json()
    streamed = read_back(httpx.post(url, json={**asked, "stream": True, **usage}).text)
    assert streamed["prompt_token_ids"] == unary["prompt_token_ids"] and streamed["usage"] == unary["usage"]
    (one,), (other,) = streamed["choices"], unary["choices"]
    for name in ("token_ids", "logprobs", "finish_reason"):
        assert one[name] == other[name]
    told = {name: value for name, value in one["message"].items() if name != "tool_calls"}
    assert {name: value or None for name, value in told.items()} == {
        name: value or None for name, value in other["message"].items() if name != "tool_calls"
    }
    functions = [[called["function"] for called in each["message"].get("tool_calls") or ()] for each in (one, other)]
    assert functions[0] == functions[1]


def event(value: Any) -> str:
    return f"data: {json.dumps(value)}\n\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "it ended before"),
        (event({"choices": [{"delta": {"content": "Fi"}}]}), "it ended before"),
        (event({"error": {"message": "out of memory"}}) + "data: [DONE]\n\n", "the engine failed: .*out of memory"),
        ("data: {not json\n\n", "no JSON object"),
        (event(["a"]), "no JSON object"),
        (event({"choices": ["a"]}), "no chunk"),
        (event({"choices": [{"delta": {"content": 5}}, {"delta": {"content": "x"}}]}), "no chunk"),
        (event({"choices": [{"delta": {"tool_calls": [{"index": 1000000000, "function": {}}]}}]}), "no chunk"),
        (event({"choices": [{"delta": {"tool_calls": [{"index": "0", "function": {}}]}}]}), "no chunk"),
    ],
)
def test_a_stream_that_breaks_is_no_completion(text: str, says: str) -> None:
    with pytest.raises(BrokenStream, match=says):
        read_back(text)
