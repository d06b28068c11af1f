"""The neutral shapes between the dialects and the policies: what a call asks, what it is answered.

A dialect turns a request body into a `Request` and an answered `Call` back into its own wire form; a policy
turns a `Request` into a `Reply`. Neither knows the other.

A `Request` is the reduced view that routes and scripts need; the whole conversation, for an engine, is made
from the same body by the dialect's `convert` (conversion.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import Any, Literal

import orjson


class Refused(Exception):
    """The call is not answered. Each dialect puts this into its own error envelope."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code


@dataclass(frozen=True)
class Tool:
    """A tool the request offers."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """JSON schema of its arguments; empty when its kind has none."""
    kind: str = "function"
    """`function`, or the wire name of a kind that is called in another form."""
    namespace: str | None = None
    """The group the tool was offered in; it goes back with a call of the tool."""
    description: str = ""

    @property
    def function_name(self) -> str:
        """Its one name for an engine, which knows no groups."""
        return f"{self.namespace}__{self.name}" if self.namespace else self.name


@dataclass(frozen=True)
class ToolResult:
    """What a tool returned for an earlier call, oldest first in a request."""

    text: str
    failed: bool = False


@dataclass(frozen=True)
class Request:
    model: str
    stream: bool
    tools: tuple[Tool, ...]
    """What may be called now: empty when the request forbids tools."""
    offered: tuple[Tool, ...]
    """What it declares, whether or not it may be called now."""
    results: tuple[ToolResult, ...]
    conversation: Mapping[str, Any]
    """The members of the body that hold the conversation and the tools."""
    echo: Mapping[str, Any] = field(default_factory=dict)
    """Members of the request that the dialect's reply repeats or is shaped by."""

    @cached_property
    def prompt(self) -> bytes:
        """The conversation and the tools as canonical JSON."""
        return canonical(self.conversation)


@dataclass(frozen=True)
class ToolCall:
    tool: Tool
    arguments: str
    """Normally a JSON object, but byte for byte what the policy wrote."""


@dataclass(frozen=True)
class Reply:
    """An assistant turn: reasoning, then a text, then tool calls; each may be missing."""

    text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    truncated: bool = False
    """The policy ran into its limit of output tokens."""
    stop_sequence: str | None = None
    """The stop string of the request that ended it."""


Kind = Literal["reasoning", "text", "call"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Some more of a reply. All reasoning comes before the text, the text before the calls, a call before the next."""

    kind: Kind
    text: str
    tool: Tool | None = None
    """What is called: a call begins with a piece that only says this."""


def pieces(reply: Reply) -> Iterator[Piece]:
    """A whole reply as few pieces."""
    if reply.reasoning:
        yield Piece("reasoning", reply.reasoning)
    if reply.text:
        yield Piece("text", reply.text)
    for called in reply.tool_calls:
        yield Piece("call", "", called.tool)
        yield Piece("call", called.arguments)


@dataclass(frozen=True)
class Usage:
    """Tokens of a call. `cached` are among the `input`, `reasoning` among the `output`."""

    input: int
    output: int
    cached: int = 0
    reasoning: int = 0


@dataclass(frozen=True)
class Call:
    """One answered request, ready to be rendered."""

    id: str
    """24 hex digits; the dialects put prefixes before it."""
    request: Request
    reply: Reply
    usage: Usage
    created: int
    """Seconds since the epoch."""

    def part_id(self, prefix: str, index: int) -> str:
        """The id of a part of the reply, unique in the rollout."""
        return f"{prefix}_{self.id}{index:02d}"


def digest(value: Any) -> str:
    """SHA-256 of a strict JSON value, members sorted at every level: of what orjson writes where it can, for speed."""
    try:
        return sha256(orjson.dumps(value, option=orjson.OPT_SORT_KEYS)).hexdigest()
    except TypeError:  # a lone surrogate, a large integer
        return sha256(canonical(value)).hexdigest()


def canonical(value: Any) -> bytes:
    """Compact JSON with sorted members in UTF-8: equal values have equal bytes."""
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return text.encode("utf-8", "surrogatepass")
