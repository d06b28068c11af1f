"""OpenAI Responses, `POST responses`: items in, output items out.

A tool may sit in a namespace, whose name goes back with the call. Server-side state (a previous response,
a conversation, background) is refused: a call holds its whole conversation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gateway.call import Call, Refused, Request, Tool, ToolCall, ToolResult, canonical
from gateway.dialects.wire import event, member, objects, openai_error, text_of

PATH = "responses"
error = openai_error

_STATE = ("previous_response_id", "conversation", "background", "store", "prompt")
_RESULTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")
# What a hosted shell takes; as a tool of this dialect it carries no schema of its own.
_LOCAL_SHELL = {"properties": {"command": {"type": "array"}, "timeout_ms": {"type": "integer"}}}
# What a reply repeats of its request, with the value that stands for absence.
_ECHO: dict[str, Any] = {
    "instructions": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "temperature": None,
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
}


def parse(body: dict[str, Any]) -> Request:
    for name in _STATE:
        if body.get(name):
            raise Refused(400, f"{name!r} is not supported: nothing is stored here", "unsupported_member")
    offered = objects(body, "tools", [])
    items = member(body, "input", (str, list))
    prompt = {"instructions": member(body, "instructions", str, ""), "input": items, "tools": offered}
    return Request(
        model=member(body, "model", str),
        stream=member(body, "stream", bool, False),
        tools=() if body.get("tool_choice") == "none" else tuple(_tools(offered)),
        results=() if isinstance(items, str) else tuple(_results(objects(body, "input"))),
        prompt=canonical(prompt),
        echo={name: absent if body.get(name) is None else body[name] for name, absent in _ECHO.items()},
    )


def _tools(offered: list[dict[str, Any]], namespace: str | None = None) -> Iterator[Tool]:
    for tool in offered:
        kind = member(tool, "type", str)
        if kind == "namespace":
            yield from _tools(objects(tool, "tools"), member(tool, "name", str))
        elif kind == "function":
            yield Tool(member(tool, "name", str), member(tool, "parameters", dict, {}), namespace=namespace)
        elif kind == "local_shell":
            yield Tool(kind, _LOCAL_SHELL, kind)
        else:
            yield Tool(member(tool, "name", str, kind), kind=kind, namespace=namespace)


def _results(items: list[dict[str, Any]]) -> Iterator[ToolResult]:
    for item in items:
        if item.get("type") in _RESULTS:
            yield ToolResult(text_of(member(item, "output", (str, list))))


def unary(call: Call) -> dict[str, Any]:
    usage = {
        "input_tokens": call.input_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": call.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": call.input_tokens + call.output_tokens,
    }
    return _response(call) | {"status": "completed", "output": [_item(call)], "usage": usage}


def events(call: Call) -> Iterator[str]:
    for number, (name, data) in enumerate(_events(call)):
        yield event(name, {"sequence_number": number, **data})


def _events(call: Call) -> Iterator[tuple[str, dict[str, Any]]]:
    response, item = _response(call), _item(call)
    yield "response.created", {"response": response}
    yield "response.in_progress", {"response": response}
    yield "response.output_item.added", {"output_index": 0, "item": _begun(item)}
    at = {"item_id": item["id"], "output_index": 0}
    if item["type"] == "message":
        yield from _text_events({**at, "content_index": 0}, item["content"][0])
    elif item["type"] == "function_call":
        yield "response.function_call_arguments.delta", {**at, "delta": item["arguments"]}
        yield (
            "response.function_call_arguments.done",
            {**at, "name": item["name"], "arguments": item["arguments"]},
        )
    yield "response.output_item.done", {"output_index": 0, "item": item}
    yield "response.completed", {"response": unary(call)}


def _text_events(at: dict[str, Any], part: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "response.content_part.added", {**at, "part": part | {"text": ""}}
    yield "response.output_text.delta", {**at, "delta": part["text"], "logprobs": []}
    yield "response.output_text.done", {**at, "text": part["text"], "logprobs": []}
    yield "response.content_part.done", {**at, "part": part}


def _response(call: Call) -> dict[str, Any]:
    """The response as it begins: no output yet."""
    return {
        "id": f"resp_{call.id}",
        "object": "response",
        "created_at": call.created,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": call.request.model,
        "output": [],
        "store": False,
        "usage": None,
        **call.request.echo,
    }


def _item(call: Call) -> dict[str, Any]:
    """The one output item, complete."""
    called = call.reply.tool_call
    if called is None:
        part = {"type": "output_text", "text": call.reply.text, "annotations": [], "logprobs": []}
        message = {"id": f"msg_{call.id}", "type": "message", "role": "assistant"}
        return {**message, "status": "completed", "content": [part]}
    if called.tool.kind == "local_shell":
        return _local_shell_call(call.id, called)
    item = {
        "id": f"fc_{call.id}",
        "type": "function_call",
        "status": "completed",
        "call_id": f"call_{call.id}",
        "name": called.tool.name,
        "arguments": called.arguments_json,
    }
    return item | ({"namespace": called.tool.namespace} if called.tool.namespace else {})


def _local_shell_call(call_id: str, called: ToolCall) -> dict[str, Any]:
    return {
        "id": f"lsh_{call_id}",
        "type": "local_shell_call",
        "status": "completed",
        "call_id": f"call_{call_id}",
        "action": {"type": "exec", "env": {}, **called.arguments},
    }


def _begun(item: dict[str, Any]) -> dict[str, Any]:
    """The item as it is announced: what the deltas will fill is empty."""
    empty = {"content": [], "arguments": ""}
    return item | {"status": "in_progress"} | {k: v for k, v in empty.items() if k in item}
