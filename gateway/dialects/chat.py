"""OpenAI Chat Completions, `POST chat/completions`: messages in, one choice out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gateway.call import Call, Refused, Reply, Request, Tool, ToolResult
from gateway.conversion import Conversion
from gateway.dialects.wire import dump, member, objects, openai_error, text_of

NAME = "chat"
PATH = "chat/completions"
error = openai_error

_KNOWN = (
    *("model", "messages", "tools", "tool_choice", "stream", "stream_options", "n"),
    *("max_tokens", "max_completion_tokens", "response_format"),
)


def parse(body: dict[str, Any]) -> Request:
    if body.get("n") not in (None, 1):
        raise Refused(400, "'n' other than 1 is not supported", "unsupported_member")
    offered = objects(body, "tools", [])
    messages = objects(body, "messages")
    options = member(body, "stream_options", dict, {})
    tools = tuple(map(_tool, offered))
    return Request(
        model=member(body, "model", str),
        stream=member(body, "stream", bool, False),
        tools=() if body.get("tool_choice") == "none" else tools,
        offered=tools,
        results=tuple(_results(messages)),
        conversation={"messages": messages, "tools": offered},
        echo={"include_usage": member(options, "include_usage", bool, False)},
    )


def _tool(tool: dict[str, Any]) -> Tool:
    kind = member(tool, "type", str)
    declared = member(tool, kind, dict)
    description = member(declared, "description", str, "")
    parameters = member(declared, "parameters", dict, {})
    return Tool(member(declared, "name", str), parameters, kind, description=description)


def _results(messages: list[dict[str, Any]]) -> Iterator[ToolResult]:
    for message in messages:
        content = member(message, "content", (str, list), None)
        if member(message, "role", str) == "tool":
            yield ToolResult(text_of(content))


def convert(body: dict[str, Any], conversion: Conversion) -> None:
    for index, message in enumerate(body["messages"]):
        _message(message, f"/messages/{index}", conversion)
    conversion.take_sampling(body)
    conversion.take_limit(body, "max_tokens", "max_completion_tokens")
    wanted = body.get("response_format")
    if wanted is not None and wanted != {"type": "text"}:
        conversion.constraint["response_format"] = wanted
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        conversion.constraint["tool_choice"] = choice
    conversion.ignore_rest(body, *_KNOWN)


def _message(message: dict[str, Any], at: str, conversion: Conversion) -> None:
    role = message["role"]
    if role == "developer":
        conversion.note("developer_as_system", f"{at}/role", "templates know no developer", role, "system")
        role = "system"
    text = conversion.text(message.get("content"), f"{at}/content", ("text", "refusal"))
    if role == "tool":
        conversion.tool_result(member(message, "tool_call_id", str, ""), text)
    elif role == "assistant":
        conversion.messages.append(_assistant(message, text, at, conversion))
    elif role in ("system", "user"):
        conversion.messages.append({"role": role, "content": text})
    else:
        raise Refused(400, f"{at}/role: {role!r} cannot be passed to the engine", "unsupported_role")


def _assistant(message: dict[str, Any], text: str, at: str, conversion: Conversion) -> dict[str, Any]:
    made: dict[str, Any] = {"role": "assistant", "content": text}
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str):
        made["reasoning"] = reasoning
    calls = []
    for index, called in enumerate(objects(message, "tool_calls", [])):
        pointer = f"{at}/tool_calls/{index}"
        kind = member(called, "type", str, "function")
        function = member(called, kind, dict)
        arguments = member(function, "input" if kind == "custom" else "arguments", str, "")
        sent = dump({"input": arguments}) if kind == "custom" else arguments
        calls.append(conversion.tool_call(member(called, "id", str, ""), member(function, "name", str), sent, pointer))
    return made | ({"tool_calls": calls} if calls else {})


def unary(call: Call) -> dict[str, Any]:
    reply = call.reply
    message: dict[str, Any] = {"role": "assistant", "content": reply.text, "refusal": None, **_reasoning(reply)}
    if reply.tool_calls:
        message |= {"content": reply.text or None, "tool_calls": _tool_calls(call)}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish_reason(reply)}
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


def error_events(refused: Refused) -> Iterator[str]:
    yield _chunk(error(refused))


def _deltas(call: Call) -> Iterator[tuple[dict[str, Any], str | None]]:
    reply = call.reply
    yield {"role": "assistant", "content": None if reply.tool_calls else ""}, None
    if reply.reasoning:
        yield _reasoning(reply), None
    if reply.text or not reply.tool_calls:
        yield {"content": reply.text}, None
    for index, begun in enumerate(_tool_calls(call)):
        arguments = begun["function"]["arguments"]
        begun["function"]["arguments"] = ""
        yield {"tool_calls": [{"index": index, **begun}]}, None
        yield {"tool_calls": [{"index": index, "function": {"arguments": arguments}}]}, None
    yield {}, _finish_reason(reply)


def _reasoning(reply: Reply) -> dict[str, str]:
    """Under both names in use; clients read one of them and send it back."""
    return {"reasoning": reply.reasoning, "reasoning_content": reply.reasoning} if reply.reasoning else {}


def _tool_calls(call: Call) -> list[dict[str, Any]]:
    calls = []
    for index, called in enumerate(call.reply.tool_calls):
        function = {"name": called.tool.name, "arguments": called.arguments}
        calls.append({"id": call.part_id("call", index), "type": "function", "function": function})
    return calls


def _finish_reason(reply: Reply) -> str:
    if reply.truncated:
        return "length"
    return "tool_calls" if reply.tool_calls else "stop"


def _head(call: Call) -> dict[str, Any]:
    return {"id": f"chatcmpl-{call.id}", "created": call.created, "model": call.request.model}


def _usage(call: Call) -> dict[str, Any]:
    return {
        "prompt_tokens": call.usage.input,
        "completion_tokens": call.usage.output,
        "total_tokens": call.usage.input + call.usage.output,
        "prompt_tokens_details": {"cached_tokens": call.usage.cached},
        "completion_tokens_details": {"reasoning_tokens": call.usage.reasoning},
    }


def _chunk(data: dict[str, Any]) -> str:
    return f"data: {dump(data)}\n\n"
