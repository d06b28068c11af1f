"""The inference server behind the gateway, through its chat completions: one call out, one answer in.

`Answer` holds what the engine said and nothing else: P, S and L are its own arrays or None, never made from
text. A call is unary or a stream of chunks, of which streaming.py makes the same answer; cancelling the task that waits
closes the connection, which ends the generation.

What the server can do is found out by probe.py and kept in `Capabilities`. Not here: dialects, sampling
policy, records.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from gateway.call import Refused, Usage
from gateway.record import Finding, VersionSegment

Doc = dict[str, Any]

CONNECT_SECONDS = 10.0
IDLE_SECONDS = 3.0
"""Less than the 5 s after which common servers close a silent connection: one that they close is never written to."""
ANSWER_SECONDS = 3600.0
"""A long generation is silent until it ends; shorter limits are the budgets' and the harness's."""
PATIENT = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=ANSWER_SECONDS)
AT_ONCE = aiohttp.ClientTimeout(total=CONNECT_SECONDS)
READ_BYTES = 1 << 20
"""Taken before reading pauses: a reply of a long prompt's ids is not read in small steps."""
SHOWN_CHARACTERS = 500
"""Of an engine's error, in ours."""

AS_JSON = {"content-type": "application/json"}
UNREACHABLE = (aiohttp.ClientError, asyncio.TimeoutError)
"""What the client raises where no whole answer came."""

CAPTURE: Doc = {
    "logprobs": True,
    "top_logprobs": 0,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
}
"""What vLLM is asked for. An older server ignores what it does not know: only the reply proves a feature."""
CAPTURES: Mapping[str, Doc] = {"tokens": CAPTURE, "logprobs": {"logprobs": True}, "text": {}}

UNNAMED = "default"
"""What vLLM calls the version of weights that nobody has named."""
OVERFLOW = re.compile(
    r"context.?(length|window|size)|maximum (model|context|sequence)|max_model_len|too (long|many tokens)"
)
TOKEN_ID = re.compile(r"token_id:(\d+)")
UNPARSED = re.compile(r"<tool_call>|<function=|\[TOOL_CALLS\]|<\|python_tag\|>")
"""Marks of a call in a text: had the engine's parser understood it, they would not be there."""


class Overflow(Refused):
    """The prompt does not fit into the engine's context."""


@dataclass(frozen=True)
class Capabilities:
    """What the probe found."""

    level: str = "text"
    processed: bool | None = None
    """Whether log probabilities are after temperature; None when that could not be told."""
    neutral: Mapping[str, Any] = field(default_factory=dict)
    """The sampling settings beyond OpenAI's that it takes, each with the value that does nothing."""
    system_anywhere: bool = False
    tokenizes: bool = False
    reports_version: str | None = None
    """The path, below the server's root, that tells the version of the weights."""
    max_model_len: int | None = None
    streams: bool = False
    """The streamed form of a reply gives the same prompt ids, sampled ids, log probabilities and message."""
    lines: tuple[str, ...] = ()
    """What was found, for people."""


@dataclass(frozen=True)
class Answer:
    message: Doc
    finish_reason: str | None
    stop_reason: str | int | None
    prompt_ids: list[int] | None
    sampled_ids: list[int] | None
    logprobs: list[float | None] | None
    usage: Usage
    spans: list[VersionSegment] | None
    parse_ok: bool
    findings: list[Finding] = field(default_factory=list)
    transforms: list[Doc] = field(default_factory=list)
    """What was changed on the way to the engine after the conversion of the request."""


class Engine:
    def __init__(self, url: str, model: str, key: str = "") -> None:
        self.url = url.rstrip("/")
        self.model = model
        self.key = key
        self.capabilities = Capabilities()
        headers = {"accept-encoding": "identity", **({"authorization": f"Bearer {key}"} if key else {})}
        self.client = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS),
            timeout=PATIENT,
            headers=headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=READ_BYTES,
        )

    @property
    def root(self) -> str:
        """Where the routes beside OpenAI's lie."""
        return self.url.removesuffix("/v1")

    async def post(self, url: str, body: Doc) -> Doc:
        """The JSON object that answers `body`; Refused with the status that a harness is to see."""
        content = written(body)
        try:
            async with self.client.post(url, data=content, headers=AS_JSON, allow_redirects=False) as response:
                status, data = response.status, await response.read()
        except UNREACHABLE as error:
            raise unreachable(error) from None
        if status != 200:
            raise self.refusal(status, error_text(data))
        value = json_of(data)
        if not isinstance(value, dict):
            raise Refused(502, "the engine answered something that is no JSON object", "engine_malformed")
        return value

    async def get(self, url: str) -> tuple[int, Any]:
        """(status, the JSON value or None) of a route that answers at once."""
        status, text = await self.get_text(url)
        return status, json_of(text.encode())

    async def get_text(self, url: str) -> tuple[int, str]:
        async with self.client.get(url, allow_redirects=False, timeout=AT_ONCE) as response:
            return response.status, (await response.read()).decode("utf-8", "replace")

    def refusal(self, status: int, text: str) -> Refused:
        if self.key:
            text = text.replace(self.key, "[secret]")
        message = f"the engine answered {status}: {text[:SHOWN_CHARACTERS]}"
        if status in (400, 413) and OVERFLOW.search(text.lower()):
            return Overflow(400, message, "context_length_exceeded")
        if status in (400, 413, 422):
            return Refused(status, message, "engine_refused")
        return Refused(502, message, "engine_failed")

    async def chat(self, body: Doc) -> Answer:
        return read_answer(await self.post(f"{self.url}/chat/completions", body))

    async def stream(self, body: Doc) -> AsyncGenerator[Doc, None]:
        """The chunks of the answer as they come; Refused when the engine tells of an error or breaks off."""
        url, ended = f"{self.url}/chat/completions", False
        content = written({**body, "stream": True, "stream_options": {"include_usage": True}})
        try:
            async with self.client.post(url, data=content, headers=AS_JSON, allow_redirects=False) as response:
                if response.status != 200:
                    raise self.refusal(response.status, error_text(await response.read()))
                async for data in event_data(response.content.iter_any()):
                    if data == b"[DONE]":
                        ended = True  # and read on, so that the connection can be used again
                    else:
                        yield self.chunk(data)
        except UNREACHABLE as error:
            raise unreachable(error) from None
        if not ended:
            raise Refused(502, "the engine's stream broke off", "engine_broken")

    def chunk(self, data: bytes) -> Doc:
        value = json_of(data)
        if not isinstance(value, dict):
            raise Refused(502, "the engine streamed something that is no JSON object", "engine_malformed")
        if "error" in value or value.get("object") == "error":
            error = object_at(value, "error") or value
            raise self.refusal(whole(error.get("code")) or 500, said(value))
        return value

    async def count(self, messages: list[Doc], tools: list[Doc]) -> int:
        """Tokens of the prompt by the engine's own rendering; one token is generated where it cannot just count."""
        body = {"model": self.model, "messages": messages, **({"tools": tools} if tools else {})}
        if self.capabilities.tokenizes:
            found = (await self.post(f"{self.root}/tokenize", body)).get("count")
        else:
            answer = await self.post(f"{self.url}/chat/completions", {**body, "max_completion_tokens": 1})
            found = object_at(answer, "usage").get("prompt_tokens")
        if not isinstance(found, int):
            raise Refused(502, "the engine did not say how many tokens the prompt has", "engine_malformed")
        return found

    async def version(self) -> str | None:
        """The version of the weights as the server tells it now; None when it has no such route."""
        path = self.capabilities.reports_version
        if path is None:
            return None
        try:
            status, value = await self.get(self.root + path)
        except UNREACHABLE:
            return None
        return version_in(value) if status == 200 else None

    async def close(self) -> None:
        await asyncio.shield(self.client.close())


def json_of(data: bytes) -> Any:
    """The JSON value, or None. NaN, with which orjson does not read on, becomes a finding of the call."""
    try:
        return orjson.loads(data)
    except ValueError:
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            return None


def written(body: Doc) -> bytes:
    try:
        return orjson.dumps(body)
    except TypeError:  # a lone surrogate, a large integer
        return json.dumps(body, separators=(",", ":")).encode()


async def event_data(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of server-sent events, which engines write on one line each."""
    rest = b""
    async for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def unreachable(error: Exception) -> Refused:
    return Refused(502, f"the engine cannot be reached: {type(error).__name__}", "engine_unreachable")


def error_text(data: bytes) -> str:
    """What an error says, whatever its envelope."""
    value = json_of(data)
    return data.decode("utf-8", "replace") if value is None else said(value)


def said(value: Any) -> str:
    error = value.get("error", value) if isinstance(value, dict) else value
    return str(error.get("message", error) if isinstance(error, dict) else error)


def version_in(value: Any) -> str | None:
    found = value.get("weight_version") if isinstance(value, dict) else None
    return str(found) if isinstance(found, str | int) else None


def object_at(holder: Mapping[str, Any], name: str) -> Doc:
    value = holder.get(name)
    return value if isinstance(value, dict) else {}


def read_answer(value: Doc) -> Answer:
    """The answer in a chat completion of vLLM's or SGLang's shape; what is missing there is None here."""
    choices = value.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise Refused(502, "the engine's answer does not hold one choice", "engine_malformed")
    choice = choices[0]
    message = object_at(choice, "message")
    if not well_formed(message):
        raise Refused(502, "the engine's answer holds a message that is none of chat completions", "engine_malformed")
    prompt_ids, (sampled, logprobs, findings) = prompt_ids_of(value), sampled_of(choice)
    return Answer(
        message=message,
        finish_reason=choice.get("finish_reason"),
        stop_reason=choice.get("stop_reason", choice.get("matched_stop")),
        prompt_ids=prompt_ids,
        sampled_ids=sampled,
        logprobs=logprobs,
        usage=usage_of(object_at(value, "usage"), prompt_ids, sampled),
        spans=spans_of(value.get("weight_versions", choice.get("weight_versions"))),
        parse_ok=parsed(message),
        findings=findings,
    )


def well_formed(message: Doc) -> bool:
    """Whether a text, reasoning and calls have the types that they are rendered from."""
    texts = [message.get(name) for name in ("content", "reasoning", "reasoning_content")]
    calls = message.get("tool_calls") or []
    if not all(text is None or isinstance(text, str) for text in texts) or not isinstance(calls, list):
        return False
    functions = [object_at(called, "function") if isinstance(called, dict) else {} for called in calls]
    return all(isinstance(one.get(name), str) for one in functions for name in ("name", "arguments"))


def prompt_ids_of(value: Doc) -> list[int] | None:
    """vLLM has them beside the choices, SGLang in each."""
    choices = value.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    found = value.get("prompt_token_ids") or choice.get("prompt_token_ids")
    return found if isinstance(found, list) and found else None


def sampled_of(choice: Doc) -> tuple[list[int] | None, list[float | None] | None, list[Finding]]:
    """(S, L, findings). Older servers give the ids only as token strings, which newer ones are checked against."""
    content = object_at(choice, "logprobs").get("content")
    ids = choice.get("token_ids")
    ids = ids if isinstance(ids, list) else None
    if not isinstance(content, list):
        return ids, None, []
    entries: list[Doc] = [one if isinstance(one, dict) else {} for one in content]
    logprobs = [one.get("logprob") for one in entries]
    tokens = [one.get("token") for one in entries]
    if ids is not None and tokens == [f"token_id:{one}" for one in ids]:
        return ids, logprobs, []  # as nearly always, and quicker than to look at each
    matches = [TOKEN_ID.fullmatch(str(token)) for token in tokens]
    named = [int(match[1]) for match in matches if match]
    if ids is None:
        return (named if named and len(named) == len(content) else None), logprobs, []
    if named and named != ids:
        detail = "the token strings beside the log probabilities name other ids"
        return ids, logprobs, [{"level": "fatal", "code": "id_string_mismatch", "detail": detail}]
    return ids, logprobs, []


def usage_of(told: Doc, prompt_ids: list[int] | None, sampled: list[int] | None) -> Usage:
    """Counted from P and S where they are known, else as the engine says."""
    prompt_details, output_details = (
        object_at(told, "prompt_tokens_details"),
        object_at(told, "completion_tokens_details"),
    )
    return Usage(
        input=len(prompt_ids) if prompt_ids is not None else whole(told.get("prompt_tokens")),
        output=len(sampled) if sampled is not None else whole(told.get("completion_tokens")),
        cached=whole(prompt_details.get("cached_tokens")),
        reasoning=whole(output_details.get("reasoning_tokens")),
    )


def whole(value: Any) -> int:
    return value if type(value) is int and value >= 0 else 0


def spans_of(value: Any) -> list[VersionSegment] | None:
    if not isinstance(value, list) or not value:
        return None
    try:
        return [{"start": one["start"], "end": one["end"], "version": str(one["version"])} for one in value]
    except (KeyError, TypeError):
        return None


def parsed(message: Doc) -> bool:
    """False when the engine's tool parser gave up: a call left in the text, or arguments that are no JSON."""
    if UNPARSED.search(str(message.get("content") or "")):
        return False
    try:
        for called in message.get("tool_calls") or ():
            json.loads(called["function"]["arguments"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return False
    return True
