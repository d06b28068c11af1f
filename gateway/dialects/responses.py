"""OpenAI Responses, `POST responses`: items in, output items out.

A tool may sit in a namespace, whose name goes back with the call. Server-side state (a previous response,
a conversation, background) is refused: a call holds its whole conversation.

An engine sees one assistant message per reply of it: reasoning, text and calls that follow each other are put
together again, and a tool that takes free text is a function with one string parameter, `input`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from gateway.call import Call, Refused, Request, Tool, ToolCall, ToolResult
from gateway.conversion import Conversion, object_of, seal, unseal
from gateway.dialects.wire import dump, event, member, objects, openai_error, text_of

NAME = "responses"
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
_KNOWN = (
    *("model", "input", "instructions", "tools", "tool_choice", "stream", "max_output_tokens", "store", "text"),
    *_STATE,
)
_OURS = re.compile(r"(?:msg|rs|call)_([0-9a-f]{24})(?:\d\d)?")
"""An id that a reply gave to an item or a tool call, and in it the call that it came from."""
_TEXTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")


def parse(body: dict[str, Any]) -> Request:
    for name in _STATE:
        if body.get(name):
            raise Refused(400, f"{name!r} is not supported: nothing is stored here", "unsupported_member")
    offered = objects(body, "tools", [])
    items = member(body, "input", (str, list))
    tools = tuple(_tools(offered))
    return Request(
        model=member(body, "model", str),
        stream=member(body, "stream", bool, False),
        tools=() if body.get("tool_choice") == "none" else tools,
        offered=tools,
        results=() if isinstance(items, str) else tuple(_results(objects(body, "input"))),
        conversation={"instructions": member(body, "instructions", str, ""), "input": items, "tools": offered},
        echo={name: absent if body.get(name) is None else body[name] for name, absent in _ECHO.items()},
    )


def _tools(offered: list[dict[str, Any]], namespace: str | None = None) -> Iterator[Tool]:
    for tool in offered:
        kind = member(tool, "type", str)
        description = member(tool, "description", str, "")
        if kind == "namespace":
            yield from _tools(objects(tool, "tools"), member(tool, "name", str))
        elif kind == "function":
            parameters = member(tool, "parameters", dict, {})
            yield Tool(member(tool, "name", str), parameters, kind, namespace, description)
        elif kind == "local_shell":
            yield Tool(kind, _LOCAL_SHELL, kind)
        elif kind == "custom":
            yield Tool(member(tool, "name", str), _free_text(tool), kind, namespace, description)
        else:
            yield Tool(member(tool, "name", str, kind), kind=kind, namespace=namespace)


def _free_text(tool: dict[str, Any]) -> dict[str, Any]:
    """The schema of a tool that takes free text; a grammar, which nothing enforces here, describes it."""
    grammar = member(tool, "format", dict, {})
    text = {"type": "string"} | ({"description": dump(grammar)} if grammar.get("type") == "grammar" else {})
    return {"type": "object", "properties": {"input": text}, "required": ["input"]}


def _results(items: list[dict[str, Any]]) -> Iterator[ToolResult]:
    for item in items:
        if item.get("type") in _RESULTS:
            yield ToolResult(text_of(member(item, "output", (str, list))))


def convert(body: dict[str, Any], conversion: Conversion) -> None:
    if instructions := body.get("instructions"):
        conversion.messages.append({"role": "system", "content": instructions})
    items = body["input"]
    if isinstance(items, str):
        conversion.messages.append({"role": "user", "content": items})
    else:
        _Items(conversion).take(items)
    conversion.take_sampling(body)
    conversion.take_limit(body, "max_output_tokens")
    text = member(body, "text", dict, {})
    wanted = member(text, "format", dict, {})
    if wanted and wanted.get("type") != "text":
        schema = {name: value for name, value in wanted.items() if name != "type"}
        conversion.constraint["response_format"] = {"type": wanted.get("type"), "json_schema": schema}
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        named = {"type": "function", "function": {"name": choice.get("name")}} if isinstance(choice, dict) else choice
        conversion.constraint["tool_choice"] = named
    conversion.ignore_rest(body, *_KNOWN)


def _reply_id(given: Any) -> str | None:
    found = _OURS.fullmatch(str(given))
    return found[1] if found else None


class _Items:
    """Items become messages; what one reply held becomes one assistant message again."""

    def __init__(self, conversion: Conversion) -> None:
        self.conversion = conversion
        self.reply: dict[str, Any] | None = None
        """The assistant message that is being put together."""
        self.reply_id: str | None = None
        """The gateway's call that it came from, as far as the ids of its items tell."""

    def take(self, items: list[dict[str, Any]]) -> None:
        for index, item in enumerate(items):
            kind = member(item, "type", str, "message")
            step = _STEPS.get(kind)
            if step is None:
                message = f"/input/{index}: an item of type {kind!r} cannot be passed to the engine"
                raise Refused(400, message, "unsupported_item")
            step(self, item, f"/input/{index}")

    def message(self, item: dict[str, Any], at: str) -> None:
        role = member(item, "role", str)
        if role == "assistant":
            text = self.conversion.text(item.get("content"), f"{at}/content", _TEXTS, "")
            self.open("content", item)["content"] += text
            return
        self.reply = None
        text = self.conversion.text(item.get("content"), f"{at}/content", _TEXTS)
        if role == "developer":
            self.conversion.note("developer_as_system", f"{at}/role", "templates know no developer", role, "system")
            role = "system"
        if role not in ("system", "user"):
            raise Refused(400, f"{at}/role: {role!r} cannot be passed to the engine", "unsupported_role")
        self.conversion.messages.append({"role": role, "content": text})

    def reasoning(self, item: dict[str, Any], at: str) -> None:
        text = unseal(item.get("encrypted_content"))
        shown = [*objects(item, "content", []), *objects(item, "summary", [])]
        if text is None:
            text = self.conversion.text(shown, f"{at}/content", _TEXTS)
        elif text not in (part.get("text") for part in shown):
            self.conversion.note("reasoning_restored", at, "the encrypted content holds what was sampled", shown, text)
        self.open("reasoning", item)["reasoning"] = text

    def open(self, part: str, item: dict[str, Any]) -> dict[str, Any]:
        """The assistant message that takes this part: a new one when the current is past it, or another reply's.

        Codex keeps the whole items of a reply that broke off, and puts the next reply right behind them.
        """
        reply_id = _reply_id(item.get("id"))
        past = self.reply is None or "tool_calls" in self.reply or (part == "reasoning" and self.reply["content"])
        if past or self.reply is None or (self.reply_id and reply_id and reply_id != self.reply_id):
            self.reply, self.reply_id = {"role": "assistant", "content": ""}, None
            self.conversion.messages.append(self.reply)
        self.reply_id = reply_id or self.reply_id
        return self.reply

    def call(self, item: dict[str, Any], at: str) -> None:
        called = member(item, "call_id", str)
        made = self.conversion.tool_call(called, *self.named(item), at)
        reply_id = _reply_id(called)
        if self.reply is None or (self.reply_id and reply_id != self.reply_id):
            self.reply, self.reply_id = {"role": "assistant", "content": ""}, None
            self.conversion.messages.append(self.reply)
        self.reply_id = reply_id
        self.reply.setdefault("tool_calls", []).append(made)

    @staticmethod
    def named(item: dict[str, Any]) -> tuple[str, str]:
        """(the name an engine knows the tool by, its arguments)."""
        namespace = member(item, "namespace", str, None)
        name = Tool(member(item, "name", str), namespace=namespace).function_name
        if item["type"] == "custom_tool_call":
            return name, dump({"input": member(item, "input", str)})
        return name, member(item, "arguments", str)

    def result(self, item: dict[str, Any], at: str) -> None:
        text = self.conversion.text(item.get("output"), f"{at}/output", _TEXTS)
        self.conversion.tool_result(member(item, "call_id", str), text)
        # Another call of the same reply may follow: only one without results in between can be another reply's.
        if self.reply_id is None:
            self.reply = None


_STEPS = {
    "message": _Items.message,
    "reasoning": _Items.reasoning,
    "function_call": _Items.call,
    "custom_tool_call": _Items.call,
    "function_call_output": _Items.result,
    "custom_tool_call_output": _Items.result,
}


def unary(call: Call) -> dict[str, Any]:
    usage = {
        "input_tokens": call.usage.input,
        "input_tokens_details": {"cached_tokens": call.usage.cached, "cache_write_tokens": 0},
        "output_tokens": call.usage.output,
        "output_tokens_details": {"reasoning_tokens": call.usage.reasoning},
        "total_tokens": call.usage.input + call.usage.output,
    }
    ending: dict[str, Any] = {"status": "completed"}
    if call.reply.truncated:
        ending = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    return _response(call) | ending | {"output": _items(call), "usage": usage}


def events(call: Call) -> Iterator[str]:
    for number, (name, data) in enumerate(_events(call)):
        yield event(name, {"sequence_number": number, **data})


def error_events(refused: Refused) -> Iterator[str]:
    failed = {"id": "resp_failed", "object": "response", "status": "failed", "output": []}
    reason = {"code": refused.code or "server_error", "message": refused.message}
    yield event("response.failed", {"sequence_number": 0, "response": failed | {"error": reason}})


def _events(call: Call) -> Iterator[tuple[str, dict[str, Any]]]:
    response = _response(call)
    yield "response.created", {"response": response}
    yield "response.in_progress", {"response": response}
    for index, item in enumerate(_items(call)):
        yield from _item_events(index, item)
    whole = unary(call)
    yield f"response.{whole['status']}", {"response": whole}


def _item_events(index: int, item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "response.output_item.added", {"output_index": index, "item": _begun(item)}
    at = {"item_id": item["id"], "output_index": index}
    if item["type"] == "message":
        yield from _text_events({**at, "content_index": 0}, item["content"][0])
    elif item["type"] == "reasoning":
        text = {**at, "content_index": 0}
        yield "response.reasoning_text.delta", {**text, "delta": item["content"][0]["text"]}
        yield "response.reasoning_text.done", {**text, "text": item["content"][0]["text"]}
    elif item["type"] == "function_call":
        yield "response.function_call_arguments.delta", {**at, "delta": item["arguments"]}
        done = {"name": item["name"], "arguments": item["arguments"]}
        yield "response.function_call_arguments.done", {**at, **done}
    elif item["type"] == "custom_tool_call":
        yield "response.custom_tool_call_input.delta", {**at, "delta": item["input"]}
        yield "response.custom_tool_call_input.done", {**at, "input": item["input"]}
    yield "response.output_item.done", {"output_index": index, "item": item}


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


def _items(call: Call) -> list[dict[str, Any]]:
    """The output items, complete."""
    reply, items = call.reply, []
    if reply.reasoning:
        text = {"type": "reasoning_text", "text": reply.reasoning}
        head = {"id": f"rs_{call.id}", "type": "reasoning", "summary": [], "content": [text]}
        items.append({**head, "encrypted_content": seal(reply.reasoning), "status": "completed"})
    if reply.text or not reply.tool_calls:
        part = {"type": "output_text", "text": reply.text, "annotations": [], "logprobs": []}
        message = {"id": f"msg_{call.id}", "type": "message", "role": "assistant"}
        items.append({**message, "status": "completed", "content": [part]})
    items += [_call_item(call, index, called) for index, called in enumerate(reply.tool_calls)]
    return items


def _call_item(call: Call, index: int, called: ToolCall) -> dict[str, Any]:
    tool, common = called.tool, {"status": "completed", "call_id": call.part_id("call", index)}
    if tool.kind == "local_shell":
        action = {"type": "exec", "env": {}, **object_of(called.arguments)}
        return {"id": call.part_id("lsh", index), "type": "local_shell_call", **common, "action": action}
    group = {"namespace": tool.namespace} if tool.namespace else {}
    if tool.kind == "custom":
        head = {"id": call.part_id("ctc", index), "type": "custom_tool_call", **common, "name": tool.name}
        return {**head, "input": _input_of(called.arguments), **group}
    head = {"id": call.part_id("fc", index), "type": "function_call", **common, "name": tool.name}
    return {**head, "arguments": called.arguments, **group}


def _input_of(arguments: str) -> str:
    """The one parameter of a free-text tool; whatever else a policy wrote goes to the tool as it is."""
    value = object_of(arguments).get("input")
    return value if isinstance(value, str) else arguments


def _begun(item: dict[str, Any]) -> dict[str, Any]:
    """The item as it is announced: what the deltas will fill is empty."""
    empty = {"content": [], "arguments": "", "input": ""}
    return item | {"status": "in_progress"} | {k: v for k, v in empty.items() if k in item}
