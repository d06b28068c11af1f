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
from gateway.dialects.events import Events, Part
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
_SPECIAL = ("custom", "local_shell")
"""Tools whose calls are items of their own type."""
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


class Stream(Events):
    """The input of a tool that takes free text comes in one piece.

    The policy calls it with a JSON object, and what is none in the end goes to the tool as it is: only the whole tells.
    """

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self.number = 0

    def begun(self) -> Iterator[str]:
        response = _response(self.call)
        yield self.event("response.created", {"response": response})
        yield self.event("response.in_progress", {"response": response})

    def opened(self, part: Part) -> Iterator[str]:
        item = _begun(_item(self.call, part))
        self.at = {"item_id": item["id"], "output_index": part.index}
        yield self.event("response.output_item.added", {"output_index": part.index, "item": item})
        if part.kind == "text":
            yield self.text("content_part.added", part=_text_part(""))

    def grown(self, part: Part, text: str) -> Iterator[str]:
        if part.kind == "text":
            yield self.text("output_text.delta", delta=text, logprobs=[])
        elif part.kind == "reasoning":
            yield self.text("reasoning_text.delta", delta=text)
        elif part.tool is not None and part.tool.kind not in _SPECIAL:
            yield self.within("function_call_arguments.delta", delta=text)

    def closed(self, part: Part) -> Iterator[str]:
        item = _item(self.call, part)
        if item["type"] == "message":
            yield self.text("output_text.done", text=part.text, logprobs=[])
            yield self.text("content_part.done", part=item["content"][0])
        elif item["type"] == "reasoning":
            yield self.text("reasoning_text.done", text=part.text)
        elif item["type"] == "function_call":
            yield self.within("function_call_arguments.done", name=item["name"], arguments=item["arguments"])
        elif item["type"] == "custom_tool_call":
            yield self.within("custom_tool_call_input.delta", delta=item["input"])
            yield self.within("custom_tool_call_input.done", input=item["input"])
        yield self.event("response.output_item.done", {"output_index": part.index, "item": item})

    def ended(self, call: Call) -> Iterator[str]:
        whole = unary(call)
        yield self.event(f"response.{whole['status']}", {"response": whole})

    def failed(self, refused: Refused) -> Iterator[str]:
        reason = {"code": refused.code or "server_error", "message": refused.message}
        yield self.event("response.failed", {"response": _response(self.call) | {"status": "failed", "error": reason}})

    def text(self, event_name: str, **data: Any) -> str:
        return self.within(event_name, content_index=0, **data)

    def within(self, event_name: str, **data: Any) -> str:
        """An event of the item that is open."""
        return self.event(f"response.{event_name}", {**self.at, **data})

    def event(self, name: str, data: dict[str, Any]) -> str:
        numbered = {"sequence_number": self.number, **data}
        self.number += 1
        return event(name, numbered)


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
        items.append(_reasoning_item(call, reply.reasoning))
    if reply.text or not reply.tool_calls:
        items.append(_message_item(call, reply.text))
    return items + [_call_item(call, index, called) for index, called in enumerate(reply.tool_calls)]


def _item(call: Call, part: Part) -> dict[str, Any]:
    if part.tool is not None:
        return _call_item(call, part.number, ToolCall(part.tool, part.text))
    return (_message_item if part.kind == "text" else _reasoning_item)(call, part.text)


def _reasoning_item(call: Call, text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    head = {"id": f"rs_{call.id}", "type": "reasoning", "summary": [], "content": content}
    return {**head, "encrypted_content": seal(text), "status": "completed"}


def _message_item(call: Call, text: str) -> dict[str, Any]:
    message = {"id": f"msg_{call.id}", "type": "message", "role": "assistant"}
    return {**message, "status": "completed", "content": [_text_part(text)]}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call_item(call: Call, index: int, called: ToolCall) -> dict[str, Any]:
    tool, common = called.tool, {"status": "completed", "call_id": call.part_id("call", index)}
    if tool.kind == "local_shell":
        action = {"type": "exec", "env": {}, **object_of(called.arguments or "{}")}
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
