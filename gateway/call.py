"""The neutral shapes between the dialects and the policies: what a call asks, what it is answered.

A dialect turns a request body into a `Request` and a `Call` back into its own wire form; a policy
turns a `Request` into a `Reply`. Neither knows the other.

Invariant: a call is a function of its rollout and its request. A resend has the same body (some
clients only reorder its members), so it gets the same reply under the same ids.

Usage is measured, not estimated and never zero: UTF-8 bytes / 4, rounded up, of the conversation
and the tools as compact JSON with sorted members (input) and of the text or the tool arguments
that are sent back (output). Sampling settings are not counted, so `count_tokens` gives the same figure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import Any


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
    results: tuple[ToolResult, ...]
    prompt: bytes
    """The conversation and the tools as canonical JSON."""
    echo: Mapping[str, Any] = field(default_factory=dict)
    """Members of the request that the dialect's reply repeats or is shaped by."""


@dataclass(frozen=True)
class ToolCall:
    tool: Tool
    arguments: Mapping[str, Any]

    @cached_property
    def arguments_json(self) -> str:
        return canonical(self.arguments).decode("utf-8", "surrogatepass")


@dataclass(frozen=True)
class Reply:
    """An assistant turn: a text, or one tool call."""

    text: str = ""
    tool_call: ToolCall | None = None


@dataclass(frozen=True)
class Call:
    """One answered request, ready to be rendered."""

    rollout_id: str
    request: Request
    reply: Reply
    created: int
    """Seconds since the epoch; the only member that a resend changes."""

    @cached_property
    def id(self) -> str:
        """24 hex digits, the same for equal requests of a rollout; the dialects put prefixes before it."""
        digest = sha256(canonical([self.rollout_id, self.request.model]))
        digest.update(self.request.prompt)
        return digest.hexdigest()[:24]

    @cached_property
    def input_tokens(self) -> int:
        return measure(self.request.prompt)

    @cached_property
    def output_tokens(self) -> int:
        called = self.reply.tool_call
        return measure((called.arguments_json if called else self.reply.text).encode("utf-8", "surrogatepass"))


def canonical(value: Any) -> bytes:
    """Compact JSON with sorted members in UTF-8: equal values have equal bytes."""
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return text.encode("utf-8", "surrogatepass")


def measure(text: bytes) -> int:
    """Usage of a text: its bytes / 4, rounded up."""
    return -(-len(text) // 4)
