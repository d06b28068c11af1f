"""A streamed chat completion, read back into the value that the unary form would have given.

Invariant: nothing is made up. Prompt ids, sampled ids, log probabilities and text are what the chunks held, in their
order; what no chunk held is missing in the value too. Not here: the connection, and what an answer means (engine.py).
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, AsyncIterator
from typing import Any

Doc = dict[str, Any]

TEXTS = ("content", "reasoning", "reasoning_content")
LAST = ("finish_reason", "stop_reason")


class BrokenStream(Exception):
    """One line: the stream ended before its terminal event, or held something that is no chunk."""


async def chunks(lines: AsyncIterable[str]) -> AsyncIterator[Doc]:
    """The chunks in the lines of an event stream, up to [DONE]."""
    async for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise BrokenStream("an event is no JSON object")
        if "error" in value:
            raise BrokenStream(f"the engine failed: {json.dumps(value['error'])[:200]}")
        yield value
    raise BrokenStream("it ended before [DONE]")


class Completion:
    """Chunks, one after the other, put together."""

    def __init__(self) -> None:
        self.message: Doc = {"role": "assistant", "content": None}
        self.choice: Doc = {"index": 0, "message": self.message}
        self.whole: Doc = {"choices": [self.choice]}

    def add(self, chunk: Doc) -> None:
        """BrokenStream for a chunk of another shape."""
        try:
            self._add(chunk)
        except (AttributeError, KeyError, TypeError):
            raise BrokenStream("an event is no chunk of a chat completion") from None

    def _add(self, chunk: Doc) -> None:
        for name in ("prompt_token_ids", "usage", "weight_versions"):
            if chunk.get(name) is not None:
                self.whole[name] = chunk[name]
        for choice in chunk.get("choices") or ():
            self._add_choice(choice)

    def _add_choice(self, choice: Doc) -> None:
        if isinstance(choice.get("token_ids"), list):
            self.choice.setdefault("token_ids", []).extend(choice["token_ids"])
        content = (choice.get("logprobs") or {}).get("content")
        if isinstance(content, list):
            self.choice.setdefault("logprobs", {"content": []})["content"].extend(content)
        self.choice.update({name: choice[name] for name in LAST if choice.get(name) is not None})
        delta = choice.get("delta") or {}
        for name in TEXTS:
            if delta.get(name):
                self.message[name] = (self.message.get(name) or "") + delta[name]
        for called in delta.get("tool_calls") or ():
            self._add_call(called)

    def _add_call(self, called: Doc) -> None:
        """A piece of a tool call: a new index begins one, and its arguments come in parts."""
        calls = self.message.setdefault("tool_calls", [])
        if called["index"] == len(calls):
            calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
        elif not 0 <= called["index"] < len(calls):
            raise KeyError(called["index"])
        known, function = calls[called["index"]], called.get("function") or {}
        known["id"] = called.get("id") or known["id"]
        for name in ("name", "arguments"):
            known["function"][name] += function.get(name) or ""
