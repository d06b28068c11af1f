"""Anthropic Messages, `POST messages` and `POST messages/count_tokens`: content blocks in and out.

Input tokens are reported when the message starts and again when it ends: a harness that reads 0 at
either place never compacts. How many of them were cached is only known at the end.

On the way to an engine a user turn falls apart into tool messages and user messages in the order of its
blocks, and system messages stay where they are. `cache_control` moves from turn to turn and never goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gateway.call import Call, Refused, Reply, Request, Tool, ToolResult, Usage
from gateway.conversion import Conversion, begins_object, object_of, seal, unseal
from gateway.dialects.events import Events, Part
from gateway.dialects.wire import dump, event, member, objects, text_of

NAME = "messages"
PATH = "messages"

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
    502: "api_error",
    503: "overloaded_error",
}
_KNOWN = ("model", "messages", "system", "tools", "tool_choice", "stream", "max_tokens", "stop_sequences")


def parse(body: dict[str, Any]) -> Request:
    offered = objects(body, "tools", [])
    messages = objects(body, "messages")
    choice = member(body, "tool_choice", dict, {})
    system = member(body, "system", (str, list), "")
    tools = tuple(map(_tool, offered))
    return Request(
        model=member(body, "model", str),
        stream=member(body, "stream", bool, False),
        tools=() if choice.get("type") == "none" else tools,
        offered=tools,
        results=tuple(_results(messages)),
        conversation={"system": system, "messages": messages, "tools": offered},
    )


def _tool(tool: dict[str, Any]) -> Tool:
    kind = member(tool, "type", str, "function")
    if kind == "custom":
        kind = "function"  # this dialect's name for a tool with a schema
    description = member(tool, "description", str, "")
    return Tool(member(tool, "name", str), member(tool, "input_schema", dict, {}), kind, description=description)


def _results(messages: list[dict[str, Any]]) -> Iterator[ToolResult]:
    for message in messages:
        member(message, "role", str)
        if isinstance(member(message, "content", (str, list)), str):
            continue
        for block in objects(message, "content"):
            if block.get("type") == "tool_result":
                text = text_of(member(block, "content", (str, list), ""))
                yield ToolResult(text, member(block, "is_error", bool, False))


def convert(body: dict[str, Any], conversion: Conversion) -> None:
    _refuse_edits(body)
    if system := conversion.text(body.get("system"), "/system"):
        conversion.messages.append({"role": "system", "content": system})
    for index, message in enumerate(body["messages"]):
        _message(message, f"/messages/{index}", conversion)
    conversion.take_sampling(body, stop_sequences="stop")
    conversion.take_limit(body, "max_tokens")
    choice = body.get("tool_choice") or {}
    if choice.get("type") == "any":
        conversion.constraint["tool_choice"] = "required"
    elif choice.get("type") == "tool":
        named = {"name": member(choice, "name", str)}
        conversion.constraint["tool_choice"] = {"type": "function", "function": named}
    output = member(body, "output_config", dict, {})
    if output.get("format"):
        schema = {"name": "output", "schema": output["format"].get("schema")}
        conversion.constraint["response_format"] = {"type": "json_schema", "json_schema": schema}
    conversion.ignore_rest(body, *_KNOWN)


def _refuse_edits(body: dict[str, Any]) -> None:
    """An edit that keeps everything does nothing; any other would rewrite the history unseen by the harness."""
    for edit in objects(member(body, "context_management", dict, {}), "edits", []):
        if edit.get("keep") != "all":
            kind = edit.get("type")
            raise Refused(400, f"'context_management': the edit {kind!r} rewrites history", "unsupported_member")


def _message(message: dict[str, Any], at: str, conversion: Conversion) -> None:
    role, content = message["role"], message["content"]
    if role == "assistant":
        conversion.messages.append(_assistant(content, at, conversion))
    elif role == "system" or isinstance(content, str):
        text = conversion.text(content, f"{at}/content")
        conversion.messages.append({"role": role, "content": text})
    else:
        _user_blocks(content, f"{at}/content", conversion)


def _user_blocks(blocks: list[dict[str, Any]], at: str, conversion: Conversion) -> None:
    texts: list[Any] = []

    def flush() -> None:
        if texts:
            conversion.messages.append({"role": "user", "content": conversion.text(texts, at)})
            texts.clear()

    for index, block in enumerate(blocks):
        if block.get("type") != "tool_result":
            texts.append(block)
            continue
        flush()
        text = conversion.text(block.get("content"), f"{at}/{index}/content")
        if block.get("is_error"):
            conversion.note("error_flag", f"{at}/{index}/is_error", "a tool message has no flag", True, text)
        conversion.tool_result(member(block, "tool_use_id", str), text)
    flush()


def _assistant(content: str | list[dict[str, Any]], at: str, conversion: Conversion) -> dict[str, Any]:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    texts, reasoning, calls = list[Any](), "", list[Any]()
    for index, block in enumerate(content):
        pointer, kind = f"{at}/content/{index}", block.get("type")
        if kind == "thinking":
            reasoning += _thinking(block, pointer, conversion)
        elif kind == "tool_use":
            sent = member(block, "input", dict)
            arguments = sent["INVALID_JSON"] if set(sent) == {"INVALID_JSON"} else sent
            name = member(block, "name", str)
            calls.append(conversion.tool_call(member(block, "id", str), name, arguments, pointer))
        else:
            texts.append(block)
    text = conversion.text(texts, f"{at}/content", joint="") if texts else ""
    made = {"role": "assistant", "content": text}
    return made | ({"reasoning": reasoning} if reasoning else {}) | ({"tool_calls": calls} if calls else {})


def _thinking(block: dict[str, Any], pointer: str, conversion: Conversion) -> str:
    shown = member(block, "thinking", str, "")
    text = unseal(block.get("signature"))
    if text is None:
        return str(shown)
    if text != shown:
        conversion.note("reasoning_restored", pointer, "the signature holds what was sampled", shown, text)
    return text


def error(refused: Refused) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(refused.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": refused.message}}


def unary(call: Call) -> dict[str, Any]:
    ending = {**_ending(call.reply), "usage": _usage(call.usage)}
    return _message_of(call) | ending | {"content": list(_blocks(call))}


class Stream(Events):
    """Arguments are an object here, and clients fail on pieces of something else.

    So a piece of arguments is passed on when it is known to go on an object, and the last one only when the whole is
    known: what is no object in the end travels in a member of one, unless the object had begun. Then the client has a
    part of it, as it does when this protocol's own server reaches its limit within a call.
    """

    COUNTS_FIRST = True

    def begun(self) -> Iterator[str]:
        yield event("message_start", {"message": _message_of(self.call)})

    def opened(self, part: Part) -> Iterator[str]:
        self.arguments = _Arguments()
        block: dict[str, Any] = {"type": "text", "text": ""}
        if part.tool is not None:
            block = _use(self.call, part.number, part.tool, {})
        elif part.kind == "reasoning":
            block = {"type": "thinking", "thinking": "", "signature": ""}
        yield event("content_block_start", {"index": part.index, "content_block": block})

    def grown(self, part: Part, text: str) -> Iterator[str]:
        if part.kind == "call":
            yield from self.more(part, self.arguments.more(part.texts))
        elif part.kind == "reasoning":
            yield self.delta(part, "thinking_delta", "thinking", text)
        else:
            yield self.delta(part, "text_delta", "text", text)

    def closed(self, part: Part) -> Iterator[str]:
        if part.kind == "reasoning":
            yield self.delta(part, "signature_delta", "signature", seal(part.text))
        elif part.kind == "call":
            yield from self.more(part, self.arguments.rest(part.text))
        yield event("content_block_stop", {"index": part.index})

    def ended(self, call: Call) -> Iterator[str]:
        yield event("message_delta", {"delta": _ending(call.reply), "usage": _usage(call.usage)})
        yield event("message_stop", {})

    def failed(self, refused: Refused) -> Iterator[str]:
        yield event("error", {"error": error(refused)["error"]})

    def more(self, part: Part, arguments: str) -> Iterator[str]:
        if arguments:
            yield self.delta(part, "input_json_delta", "partial_json", arguments)

    @staticmethod
    def delta(part: Part, kind: str, name: str, text: str) -> str:
        return event("content_block_delta", {"index": part.index, "delta": {"type": kind, name: text}})


def _message_of(call: Call) -> dict[str, Any]:
    """The message as it begins: no content yet."""
    return {
        "id": f"msg_{call.id}",
        "type": "message",
        "role": "assistant",
        "model": call.request.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(Usage(call.usage.input, 0)),
    }


def _blocks(call: Call) -> Iterator[dict[str, Any]]:
    reply = call.reply
    if reply.reasoning:
        yield {"type": "thinking", "thinking": reply.reasoning, "signature": seal(reply.reasoning)}
    if reply.text or not reply.tool_calls:
        yield {"type": "text", "text": reply.text}
    for index, called in enumerate(reply.tool_calls):
        yield _use(call, index, called.tool, object_of(called.arguments))


def _use(call: Call, index: int, tool: Tool, value: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.part_id("toolu", index), "name": tool.name, "input": value}


class _Arguments:
    """The arguments of a call on their way to a client that reads them as an object while they come."""

    def __init__(self) -> None:
        self.length = self.sent = 0
        self.is_object = True

    def more(self, texts: list[str]) -> str:
        """What may follow, now that the last of `texts` has come: that one is kept back."""
        before, self.length = self.length, self.length + len(texts[-1])
        # A check reads all of them, so it waits until there is a good deal more to pass on.
        if not self.is_object or before - self.sent <= self.sent // 32:
            return ""
        text = "".join(texts[:-1])
        self.is_object = begins_object(text)
        return self.upto(text) if self.is_object else ""

    def rest(self, whole: str) -> str:
        if self.sent:
            return self.upto(whole) if begins_object(whole) else ""
        value = object_of(whole)
        # What is no object travels in a member of one, which the JSON of the arguments alone would not show.
        return whole if "INVALID_JSON" not in value else dump(value)

    def upto(self, text: str) -> str:
        start, self.sent = self.sent, len(text)
        return text[start:]


def _ending(reply: Reply) -> dict[str, Any]:
    if reply.stop_sequence is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.stop_sequence}
    reason = "max_tokens" if reply.truncated else "tool_use" if reply.tool_calls else "end_turn"
    return {"stop_reason": reason, "stop_sequence": None}


def _usage(usage: Usage) -> dict[str, int]:
    """Cached and uncached input are counted apart here; together they are the prompt."""
    return {
        "input_tokens": usage.input - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.output,
    }
