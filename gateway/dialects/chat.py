"""OpenAI Chat Completions, `POST chat/completions`: messages in, one choice out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gateway.call import Call, Refused, Request, Tool, ToolResult, canonical
from gateway.dialects.wire import dump, member, objects, openai_error, text_of

PATH = "chat/completions"
error = openai_error


def parse(body: dict[str, Any]) -> Request:
    if body.get("n") not in (None, 1):
        raise Refused(400, "'n' other than 1 is not supported", "unsupported_member")
    offered = objects(body, "tools", [])
    messages = objects(body, "messages")
    options = member(body, "stream_options", dict, {})
    return Request(
        model=member(body, "model", str),
        stream=member(body, "stream", bool, False),
        tools=() if body.get("tool_choice") == "none" else tuple(map(_tool, offered)),
        results=tuple(_results(messages)),
        prompt=canonical({"messages": messages, "tools": offered}),
        echo={"include_usage": member(options, "include_usage", bool, False)},
    )


def _tool(tool: dict[str, Any]) -> Tool:
    kind = member(tool, "type", str)
    declared = member(tool, kind, dict)
    return Tool(member(declared, "name", str), member(declared, "parameters", dict, {}), kind)


def _results(messages: list[dict[str, Any]]) -> Iterator[ToolResult]:
    for message in messages:
        content = member(message, "content", (str, list), None)
        if member(message, "role", str) == "tool":
            yield ToolResult(text_of(content))


def unary(call: Call) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": call.reply.text, "refusal": None}
    if call.reply.tool_call:
        message |= {"content": None, "tool_calls": [_tool_call(call)]}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish_reason(call)}
    return {**_head(call), "object": "chat.completion", "choices": [choice], "usage": _usage(call)}


def events(call: Call) -> Iterator[str]:
    include_usage = call.request.echo["include_usage"]
    head = {**_head(call), "object": "chat.completion.chunk"} | ({"usage": None} if include_usage else {})
    for delta, finish_reason in _deltas(call):
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        yield _chunk({**head, "choices": [choice]})
    if include_usage:
        yield _chunk({**head, "choices": [], "usage": _usage(call)})
    yield "data: [DONE]\n\n"


def _deltas(call: Call) -> Iterator[tuple[dict[str, Any], str | None]]:
    if call.reply.tool_call:
        begun = _tool_call(call)
        arguments = begun["function"].pop("arguments")
        begun["function"]["arguments"] = ""
        yield {"role": "assistant", "content": None, "tool_calls": [{"index": 0, **begun}]}, None
        yield {"tool_calls": [{"index": 0, "function": {"arguments": arguments}}]}, None
    else:
        yield {"role": "assistant", "content": ""}, None
        yield {"content": call.reply.text}, None
    yield {}, _finish_reason(call)


def _tool_call(call: Call) -> dict[str, Any]:
    called = call.reply.tool_call
    assert called is not None
    function = {"name": called.tool.name, "arguments": called.arguments_json}
    return {"id": f"call_{call.id}", "type": "function", "function": function}


def _finish_reason(call: Call) -> str:
    return "tool_calls" if call.reply.tool_call else "stop"


def _head(call: Call) -> dict[str, Any]:
    return {"id": f"chatcmpl-{call.id}", "created": call.created, "model": call.request.model}


def _usage(call: Call) -> dict[str, int]:
    return {
        "prompt_tokens": call.input_tokens,
        "completion_tokens": call.output_tokens,
        "total_tokens": call.input_tokens + call.output_tokens,
    }


def _chunk(data: dict[str, Any]) -> str:
    return f"data: {dump(data)}\n\n"
