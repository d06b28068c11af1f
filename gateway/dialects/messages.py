"""Anthropic Messages, `POST messages` and `POST messages/count_tokens`: content blocks in and out.

Input tokens are reported when the message starts and again when it ends: a harness that reads 0 at
either place never compacts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gateway.call import Call, Refused, Request, Tool, ToolResult, canonical, measure
from gateway.dialects.wire import event, member, objects, text_of

PATH = "messages"

_ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}


def parse(body: dict[str, Any]) -> Request:
    offered = objects(body, "tools", [])
    messages = objects(body, "messages")
    choice = member(body, "tool_choice", dict, {})
    system = member(body, "system", (str, list), "")
    return Request(
        model=member(body, "model", str),
        stream=member(body, "stream", bool, False),
        tools=() if choice.get("type") == "none" else tuple(map(_tool, offered)),
        results=tuple(_results(messages)),
        prompt=canonical({"system": system, "messages": messages, "tools": offered}),
    )


def _tool(tool: dict[str, Any]) -> Tool:
    kind = member(tool, "type", str, "function")
    return Tool(member(tool, "name", str), member(tool, "input_schema", dict, {}), kind)


def _results(messages: list[dict[str, Any]]) -> Iterator[ToolResult]:
    for message in messages:
        member(message, "role", str)
        if isinstance(member(message, "content", (str, list)), str):
            continue
        for block in objects(message, "content"):
            if block.get("type") == "tool_result":
                text = text_of(member(block, "content", (str, list), ""))
                yield ToolResult(text, member(block, "is_error", bool, False))


def error(refused: Refused) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(refused.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": refused.message}}


def count(request: Request) -> dict[str, int]:
    return {"input_tokens": measure(request.prompt)}


def unary(call: Call) -> dict[str, Any]:
    ending = {"stop_reason": _stop_reason(call), "usage": _usage(call, call.output_tokens)}
    return _message(call) | ending | {"content": [_block(call)]}


def events(call: Call) -> Iterator[str]:
    block, begun = _block(call), dict[str, Any]()
    if block["type"] == "text":
        begun = {"text": ""}
        delta = {"type": "text_delta", "text": block["text"]}
    else:
        assert call.reply.tool_call is not None
        begun = {"input": {}}
        delta = {"type": "input_json_delta", "partial_json": call.reply.tool_call.arguments_json}
    yield event("message_start", {"message": _message(call)})
    yield event("content_block_start", {"index": 0, "content_block": block | begun})
    yield event("content_block_delta", {"index": 0, "delta": delta})
    yield event("content_block_stop", {"index": 0})
    ending = {"stop_reason": _stop_reason(call), "stop_sequence": None}
    yield event("message_delta", {"delta": ending, "usage": _usage(call, call.output_tokens)})
    yield event("message_stop", {})


def _message(call: Call) -> dict[str, Any]:
    """The message as it begins: no content yet."""
    return {
        "id": f"msg_{call.id}",
        "type": "message",
        "role": "assistant",
        "model": call.request.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(call, 0),
    }


def _block(call: Call) -> dict[str, Any]:
    called = call.reply.tool_call
    if called is None:
        return {"type": "text", "text": call.reply.text}
    return {"type": "tool_use", "id": f"toolu_{call.id}", "name": called.tool.name, "input": called.arguments}


def _stop_reason(call: Call) -> str:
    return "tool_use" if call.reply.tool_call else "end_turn"


def _usage(call: Call, output_tokens: int) -> dict[str, int]:
    return {
        "input_tokens": call.input_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": output_tokens,
    }
