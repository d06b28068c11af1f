"""A reply while the engine writes it: its chunks become pieces for the harness and, in the end, a unary call's answer.

A harness acts on a complete tool call, not only on a complete reply: some run a tool as soon as its item is closed, or
its arguments parse. So a client is shown everything up to what would complete the first call (`Feed.shown`); the rest
follows when the reply is durable.

A reply is reasoning, then a text, then calls. What a stream holds of an earlier part once a later one has begun is not
passed on, as the unary parsers of engines leave it out (some write the blank lines between two calls as text); unless
it is blank, the record says so. Its tokens are in S like all others.

Invariant: what is recorded is what a unary call with the same tokens gives; when the chunks held fewer tokens than the
engine counted, the call is flagged and trains nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from gateway.call import Kind, Piece, Refused, Tool
from gateway.engine import Answer, Doc, Engine, object_at, prompt_ids_of, read_answer, whole
from gateway.record import Finding

ORDER: tuple[Kind, ...] = ("reasoning", "text", "call")


class Feed:
    """The pieces of a reply so far, for any number of clients, each from the beginning."""

    def __init__(self) -> None:
        self.input_tokens: int | None = None
        """None until the engine has begun to answer."""
        self.pieces: list[Piece] = []
        self.shown = 0
        """How many of the pieces a client may have before the reply is durable."""
        self.calls = 0
        self.opening = ""
        """What the arguments of the first call begin with."""
        self.waiting: asyncio.Future[None] | None = None

    @property
    def begun(self) -> bool:
        return self.input_tokens is not None

    def begin(self, input_tokens: int) -> None:
        self.input_tokens = input_tokens
        self.wake()

    def add(self, piece: Piece) -> None:
        self.pieces.append(piece)
        self.calls += piece.tool is not None
        if self.calls < 2 and not self.completes(piece):
            self.shown = len(self.pieces)
            self.wake()

    def completes(self, piece: Piece) -> bool:
        """Whether the first call may be complete with it. If an object goes on after a brace, it was not."""
        if piece.kind != "call":
            return False
        self.opening = self.opening or piece.text.lstrip()[:1]
        return self.opening not in ("", "{") or piece.text.rstrip().endswith("}")

    def change(self) -> asyncio.Future[None]:
        """Done when there is more to show."""
        if self.waiting is None:
            self.waiting = asyncio.get_running_loop().create_future()
        return self.waiting

    def wake(self) -> None:
        if self.waiting is not None and not self.waiting.done():
            self.waiting.set_result(None)
        self.waiting = None


async def follow(
    engine: Engine, body: Doc, offered: tuple[Tool, ...], feed: Feed, count: Callable[[], Awaitable[int]]
) -> Answer:
    """The engine's answer; `feed` gets it meanwhile. `count` tells the prompt's tokens where the stream does not."""
    assembly = Assembly(offered)
    async with aclosing(engine.stream(body)) as chunks:
        async for chunk in chunks:
            found = list(assembly.take(chunk))
            if not feed.begun:
                prompt_ids = assembly.prompt_ids
                feed.begin(await count() if prompt_ids is None else len(prompt_ids))
            for piece in found:
                feed.add(piece)
    return assembly.answer()


async def streamed(engine: Engine, body: Doc) -> Answer:
    """The engine's answer to `body` by way of a stream."""

    async def none() -> int:
        return 0

    return await follow(engine, body, (), Feed(), none)


class Assembly:
    """The chunks of a stream of vLLM's shape, put together."""

    def __init__(self, offered: tuple[Tool, ...]) -> None:
        self.named = {tool.function_name: tool for tool in offered}
        self.value: Doc = {}
        """Members beside the choice; a stream has each once."""
        self.choice: Doc = {}
        self.ids: list[Any] = []
        self.logprobs: list[Any] = []
        self.part: Kind = "reasoning"
        """Where the reply has come to."""
        self.texts: dict[Kind, list[str]] = {"reasoning": [], "text": []}
        self.calls: list[Doc] = []
        self.late = False
        """Some text was not passed on."""

    @property
    def prompt_ids(self) -> list[int] | None:
        return prompt_ids_of(self.value)

    def take(self, chunk: Doc) -> Iterator[Piece]:
        for name in ("usage", "weight_versions"):
            if chunk.get(name) is not None:
                self.value[name] = chunk[name]
        if (prompt_ids := prompt_ids_of(chunk)) is not None:
            self.value["prompt_token_ids"] = prompt_ids
        choices = chunk.get("choices")
        if not isinstance(choices, list) or len(choices) > 1 or not all(isinstance(one, dict) for one in choices):
            raise malformed("a chunk that does not hold one choice")
        for choice in choices:
            self.measured(choice)
            yield from self.delta(object_at(choice, "delta"))

    def measured(self, choice: Doc) -> None:
        for name in ("finish_reason", "stop_reason", "weight_versions"):
            if choice.get(name) is not None:
                self.choice[name] = choice[name]
        if isinstance(ids := choice.get("token_ids"), list):
            self.ids += ids
            self.choice["token_ids"] = self.ids
        if isinstance(content := object_at(choice, "logprobs").get("content"), list):
            self.logprobs += content
            self.choice["logprobs"] = {"content": self.logprobs}

    def delta(self, delta: Doc) -> Iterator[Piece]:
        yield from self.text("reasoning", delta.get("reasoning") or delta.get("reasoning_content"))
        yield from self.text("text", delta.get("content"))
        calls = delta.get("tool_calls") or []
        if not isinstance(calls, list) or not all(isinstance(one, dict) for one in calls):
            raise malformed("a chunk with tool calls that are none")
        for called in calls:
            yield from self.call(called, object_at(called, "function"))

    def text(self, kind: Kind, text: Any) -> Iterator[Piece]:
        if not text:
            return
        if not isinstance(text, str):
            raise malformed("a chunk with a text that is none")
        if ORDER.index(kind) < ORDER.index(self.part):
            self.late = self.late or bool(text.strip())
            return
        self.part = kind
        self.texts[kind].append(text)
        yield Piece(kind, text)

    def call(self, called: Doc, function: Doc) -> Iterator[Piece]:
        index, name, arguments = called.get("index"), function.get("name"), function.get("arguments")
        if index == len(self.calls) and isinstance(name, str):
            self.part = "call"
            self.calls.append({"id": called.get("id"), "name": name, "arguments": []})
            # A name that was not offered goes on as it is: to call it is the policy's doing.
            yield Piece("call", "", self.named.get(name, Tool(name)))
        elif index != len(self.calls) - 1 or called.get("id") not in (None, self.calls[-1]["id"]):
            raise malformed("a tool call that begins without a name, or goes on after the next has begun")
        if not isinstance(arguments, str | None):
            raise malformed("a tool call with arguments that are no text")
        if arguments:
            self.calls[-1]["arguments"].append(arguments)
            yield Piece("call", arguments)

    def answer(self) -> Answer:
        """What a unary call would have given."""
        if self.choice.get("finish_reason") is None:
            raise Refused(502, "the engine's stream ended without a finish reason", "engine_broken")
        answer = read_answer({**self.value, "choices": [{**self.choice, "message": self.message()}]})
        return replace(answer, findings=[*answer.findings, *self.findings(answer)])

    def message(self) -> Doc:
        reasoning, text = ("".join(self.texts[kind]) for kind in ("reasoning", "text"))
        calls = []
        for one in self.calls:
            function = {"name": one["name"], "arguments": "".join(one["arguments"])}
            calls.append({"id": one["id"], "type": "function", "function": function})
        content = text or (None if calls else "")
        return {"role": "assistant", "content": content, **({"reasoning": reasoning} if reasoning else {})} | {
            "tool_calls": calls
        }

    def findings(self, answer: Answer) -> Iterator[Finding]:
        told = whole(object_at(self.value, "usage").get("completion_tokens"))
        if answer.sampled_ids is not None and told and told != len(answer.sampled_ids):
            detail = f"the stream held {len(answer.sampled_ids)} of {told} sampled tokens"
            yield {"level": "fatal", "code": "logprob_misaligned", "detail": detail}
        if self.late:
            detail = "text that came after a later part of the reply was not passed on"
            yield {"level": "warn", "code": "message_filtered", "detail": detail}


def malformed(what: str) -> Refused:
    return Refused(502, f"the engine streamed {what}", "engine_malformed")
