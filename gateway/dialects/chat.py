"""OpenAI Chat Completions, `POST chat/completions`: messages in, one choice out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gateway.call import Call, Refused, Reply, Request, Tool, ToolCall, ToolResult
from gateway.conversion import Conversion
from gateway.dialects.events import Events, Part
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
    message: dict[str, Any] = {"role": "assistant", "content": reply.text, "refusal": None}
    message |= _reasoning(reply.reasoning)
    if reply.tool_calls:
        calls = [_tool_call(call, index, called) for index, called in enumerate(reply.tool_calls)]
        message |= {"content": reply.text or None, "tool_calls": calls}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish_reason(reply)}
    return {**_head(call), "object": "chat.completion", "choices": [choice], "usage": _usage(call)}


class Stream(Events):
    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self.include_usage = call.request.echo["include_usage"]
        self.head = {**_head(call), "object": "chat.completion.chunk"} | ({"usage": None} if self.include_usage else {})

    def begun(self) -> Iterator[str]:
        # Null until there is text: a reply that only calls tools has none.
        yield self.chunk({"role": "assistant", "content": None})

    def opened(self, part: Part) -> Iterator[str]:
        if part.tool is not None:
            begun = _tool_call(self.call, part.number, ToolCall(part.tool, ""))
            yield self.chunk({"tool_calls": [{"index": part.number, **begun}]})

    def grown(self, part: Part, text: str) -> Iterator[str]:
        if part.kind == "call":
            yield self.chunk({"tool_calls": [{"index": part.number, "function": {"arguments": text}}]})
        else:
            yield self.chunk({"content": text} if part.kind == "text" else _reasoning(text))

    def closed(self, part: Part) -> Iterator[str]:
        return iter(())

    def ended(self, call: Call) -> Iterator[str]:
        yield self.chunk({}, _finish_reason(call.reply))
        if self.include_usage:
            yield _chunk({**self.head, "choices": [], "usage": _usage(call)})
        yield "data: [DONE]\n\n"

    def failed(self, refused: Refused) -> Iterator[str]:
        yield _chunk(error(refused))

    def chunk(self, delta: dict[str, Any], finish_reason: str | None = None) -> str:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return _chunk({**self.head, "choices": [choice]})


def _reasoning(text: str) -> dict[str, str]:
    """Under both names in use; clients read one of them and send it back."""
    return {"reasoning": text, "reasoning_content": text} if text else {}


def _tool_call(call: Call, index: int, called: ToolCall) -> dict[str, Any]:
    function = {"name": called.tool.name, "arguments": called.arguments}
    return {"id": call.part_id("call", index), "type": "function", "function": function}


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
