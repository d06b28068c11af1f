"""A model endpoint that answers as told by its URL: `{url}/<behaviour>/<label>/v1`, in the dialect that is asked.

A real HTTP server in a thread. It keeps the requests it got by label, so that a test can count them and see what
reached the model.
"""

from __future__ import annotations

import contextlib
import copy
import http.server
import json
import select
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

Doc = dict[str, Any]
TEXT = "all done"
USAGE = {
    "responses": {
        "input_tokens": 11,
        "input_tokens_details": {"cached_tokens": 5},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 3},
        "total_tokens": 18,
    },
    "messages": {
        "input_tokens": 4,
        "cache_read_input_tokens": 5,
        "cache_creation_input_tokens": 2,
        "output_tokens": 7,
    },
}
TOO_LONG = {
    "responses": {"code": "context_length_exceeded", "message": "Your input exceeds the context window."},
    "messages": {"type": "invalid_request_error", "message": "prompt is too long: 250000 tokens > 200000 maximum"},
}


@dataclass
class Request:
    """What arrived: path, headers (names in lower case), body."""

    path: str
    headers: dict[str, str]
    body: Doc


@dataclass
class Step:
    """One answer: what the model thinks, and the tools that it calls at once (name, arguments)."""

    calls: list[tuple[str, Doc]] = field(default_factory=list)
    thought: str = ""


@dataclass
class ModelEndpoint:
    url: str
    scripts: dict[str, str] = field(default_factory=dict)  # label → what the behaviour `runs` has the harness run
    plays: dict[str, list[Step]] = field(default_factory=dict)  # label → the answers of the behaviour `plays`
    requests: dict[str, list[Request]] = field(default_factory=lambda: defaultdict(list))
    hung_up: dict[str, threading.Event] = field(default_factory=lambda: defaultdict(threading.Event))

    def bundle(self, harness: str, behaviour: str, label: str, key: str = "a-model-key") -> Doc:
        protocol = {"codex": "responses", "claude_sdk": "anthropic"}.get(harness, "chat_completions")
        return {"protocol": protocol, "base_url": f"{self.url}/{behaviour}/{label}/v1", "api_key": key}


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    endpoint: ModelEndpoint

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def do_POST(self) -> None:
        self.data = self.rfile.read(int(self.headers["content-length"]))
        self.body: Doc = json.loads(self.data)
        _, behaviour, label, _, *rest = self.path.partition("?")[0].split("/")
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.label, self.dialect = label, rest[0]
        self.endpoint.requests[label].append(Request(self.path, headers, self.body))
        if rest[-1] == "count_tokens":
            self.whole(200, {"input_tokens": 11})
        elif behaviour[:3].isdigit():  # a status, and a code perhaps: `429-usage_limit_exceeded`
            status, _, code = behaviour.partition("-")
            self.error(int(status), {"message": f"told to answer {status}", **({"code": code} if code else {})})
        else:
            BEHAVIOURS[behaviour](self)

    def whole(self, status: int, value: Doc) -> None:
        data = json.dumps(value).encode()
        self.begin(status, "application/json", {"content-length": str(len(data))})
        self.wfile.write(data)

    def error(self, status: int, error: Doc) -> None:
        self.whole(status, {"type": "error", "error": {"type": "told_error", **error}})

    def begin(self, status: int, kind: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"content-type": kind, **(headers or {"transfer-encoding": "chunked"})}.items():
            self.send_header(name, value)
        self.end_headers()

    def chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.wfile.flush()

    def stream(self, events: list[Doc]) -> None:
        self.begin(200, "text/event-stream")
        for event in events:
            self.chunk(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode())

    def key(self) -> str:
        return self.headers.get("x-api-key") or self.headers["authorization"].removeprefix("Bearer ")


def events(dialect: str, usage: Doc | None) -> list[Doc]:
    """A whole answer of one message."""
    counted = {} if usage is None else {"usage": usage}
    if dialect == "responses":
        item = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed"}
        part = {"type": "output_text", "text": TEXT, "annotations": []}
        return [
            {"type": "response.created", "response": {"id": "resp_1"}},
            {"type": "response.output_item.done", "output_index": 0, "item": {**item, "content": [part]}},
            {"type": "response.completed", "response": {"id": "resp_1", "output": [], **counted}},
        ]
    message = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": [], "stop_reason": None}
    ending = {"stop_reason": "end_turn", "stop_sequence": None}
    return [
        {"type": "message_start", "message": {**message, **counted}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": TEXT}},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": ending, **counted},
        {"type": "message_stop"},
    ]


def call_events(dialect: str, tools: list[Doc], script: str) -> list[Doc]:
    """A whole answer that calls the shell tool of codex or Claude Code."""
    if dialect == "responses":
        (tool,) = (tool for tool in tools if tool.get("name") == "exec_command")
        call = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": tool["name"]}
        item = {**call, "arguments": json.dumps({"cmd": script, "yield_time_ms": 20000}), "status": "completed"}
        told = events(dialect, USAGE[dialect])
        return [told[0], {"type": "response.output_item.done", "output_index": 0, "item": item}, told[-1]]
    told = events(dialect, USAGE[dialect])
    told[1]["content_block"] = {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {}}
    told[2]["delta"] = {"type": "input_json_delta", "partial_json": json.dumps({"command": script})}
    told[4]["delta"]["stop_reason"] = "tool_use"
    return told


def runs(handler: Handler) -> None:
    """Has the harness run the script of the label, then ends the turn."""
    answered = b"function_call_output" in handler.data or b"tool_result" in handler.data
    if answered:
        handler.stream(events(handler.dialect, USAGE[handler.dialect]))
    else:
        script = handler.endpoint.scripts[handler.label]
        handler.stream(call_events(handler.dialect, handler.body.get("tools", []), script))
    handler.chunk(b"")


def runs_on(handler: Handler, told: bool = True) -> None:
    """Has the harness run the script of the label again and again: a policy that never ends."""
    answer = call_events(handler.dialect, handler.body.get("tools", []), handler.endpoint.scripts[handler.label])
    number = len(handler.endpoint.requests[handler.label])
    answer[1] = json.loads(json.dumps(answer[1]).replace("call_1", f"call_{number}"))
    if not told:
        answer[-1]["response"].pop("usage")
    handler.stream(answer)
    handler.chunk(b"")


def runs_on_untold(handler: Handler) -> None:
    runs_on(handler, told=False)


def plays(handler: Handler) -> None:
    """Step by step, whatever the harness makes of it; then a last message."""
    told = [request for request in handler.endpoint.requests[handler.label] if request.body.get("tools")]
    steps, number = handler.endpoint.plays[handler.label], len(told)
    step = steps[number - 1] if handler.body.get("tools") and number <= len(steps) else Step()
    DIALECTS[handler.dialect](handler, step, number)
    handler.chunk(b"")


def play_responses(handler: Handler, step: Step, number: int) -> None:
    first, message, last = events("responses", USAGE["responses"])
    items = [message["item"]] if not step.calls else []
    for index, (name, arguments) in enumerate(step.calls):
        call = {"type": "function_call", "id": f"fc_{number}_{index}", "call_id": f"call_{number}_{index}"}
        items.append({**call, "name": name, "arguments": json.dumps(arguments), "status": "completed"})
    if step.thought:
        summary = [{"type": "summary_text", "text": step.thought}]
        items.insert(0, {"type": "reasoning", "id": f"rs_{number}", "summary": summary, "encrypted_content": "x"})
    done = [
        {"type": "response.output_item.done", "output_index": index, "item": item} for index, item in enumerate(items)
    ]
    handler.stream([first, *done, last])


def play_messages(handler: Handler, step: Step, number: int) -> None:
    first, *_, ending, last = events("messages", USAGE["messages"])
    blocks: list[tuple[Doc, list[Doc]]] = []
    if step.thought:
        deltas = [
            {"type": "thinking_delta", "thinking": step.thought},
            {"type": "signature_delta", "signature": "x"},
        ]
        blocks.append(({"type": "thinking", "thinking": "", "signature": ""}, deltas))
    if not step.calls:
        blocks.append(({"type": "text", "text": ""}, [{"type": "text_delta", "text": TEXT}]))
    for index, (name, arguments) in enumerate(step.calls):
        block = {"type": "tool_use", "id": f"toolu_{number}_{index}", "name": name, "input": {}}
        blocks.append((block, [{"type": "input_json_delta", "partial_json": json.dumps(arguments)}]))
        ending["delta"]["stop_reason"] = "tool_use"
    middle: list[Doc] = []
    for index, (block, deltas) in enumerate(blocks):
        middle.append({"type": "content_block_start", "index": index, "content_block": block})
        middle += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
        middle.append({"type": "content_block_stop", "index": index})
    handler.stream([first, *middle, ending, last])


def play_chat(handler: Handler, step: Step, number: int) -> None:
    deltas: list[Doc] = [{"role": "assistant", "content": ""}]
    if step.thought:
        deltas.append({"reasoning_content": step.thought})
    if not step.calls:
        deltas.append({"content": TEXT})
    for index, (name, arguments) in enumerate(step.calls):
        function = {"name": name, "arguments": json.dumps(arguments)}
        call = {"index": index, "id": f"call_{number}_{index}", "type": "function", "function": function}
        deltas.append({"tool_calls": [call]})
    head = {"id": "chat_1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    ending = {"index": 0, "delta": {}, "finish_reason": "tool_calls" if step.calls else "stop"}
    usage = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}
    handler.begin(200, "text/event-stream")
    for delta in deltas:
        choice = {"index": 0, "delta": delta, "finish_reason": None}
        handler.chunk(f"data: {json.dumps({**head, 'choices': [choice]})}\n\n".encode())
    handler.chunk(f"data: {json.dumps({**head, 'choices': [ending]})}\n\n".encode())
    handler.chunk(f"data: {json.dumps({**head, 'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode())


DIALECTS: dict[str, Callable[[Handler, Step, int], None]] = {
    "responses": play_responses,
    "messages": play_messages,
    "chat": play_chat,
}


def many(handler: Handler) -> None:
    """250 messages in one answer."""
    first, message, last = events("responses", USAGE["responses"])
    handler.stream([first, *(copy.deepcopy(message) for _ in range(250)), last])
    handler.chunk(b"")


def ok(handler: Handler) -> None:
    handler.stream(events(handler.dialect, USAGE[handler.dialect]))
    handler.chunk(b"")


def no_usage(handler: Handler) -> None:
    handler.stream(events(handler.dialect, None))
    handler.chunk(b"")


def cut(handler: Handler) -> None:
    """The connection breaks in the middle of the answer."""
    handler.stream(events(handler.dialect, USAGE[handler.dialect])[:2])
    handler.close_connection = True


def ends_early(handler: Handler) -> None:
    """The answer ends in good order, but before its last event."""
    handler.stream(events(handler.dialect, USAGE[handler.dialect])[:2])
    handler.chunk(b"")


def page(handler: Handler) -> None:
    """Not an answer of a model at all."""
    data = b"<html>welcome</html>"
    handler.begin(200, "text/html", {"content-length": str(len(data))})
    handler.wfile.write(data)


def hang(handler: Handler) -> None:
    """Says nothing until the client hangs up."""
    select.select([handler.connection], [], [], 60)
    handler.endpoint.hung_up[handler.label].set()
    handler.close_connection = True


def echo(handler: Handler) -> None:
    """Refuses, and repeats the key it was sent, in pieces."""
    message = f"no such key: {handler.key()} !"
    handler.begin(401, "application/json")
    data = json.dumps({"type": "error", "error": {"type": "authentication_error", "message": message}}).encode()
    for start in range(0, len(data), 7):
        handler.chunk(data[start : start + 7])
    handler.chunk(b"")


def echo_stream(handler: Handler) -> None:
    """Fails in mid-stream with the key in the event."""
    error = {"code": "told_code", "type": "told_error", "message": f"no such key: {handler.key()} !"}
    failed = {"type": "response.failed", "response": {"id": "resp_1", "status": "failed", "error": error}}
    handler.stream([failed if handler.dialect == "responses" else {"type": "error", "error": error}])
    handler.chunk(b"")


def too_long(handler: Handler) -> None:
    handler.error(400, TOO_LONG[handler.dialect])


def quota(handler: Handler) -> None:
    handler.error(429, {"code": "insufficient_quota", "type": "insufficient_quota", "message": "no credit"})


def redirect(handler: Handler) -> None:
    handler.begin(307, "text/plain", {"location": f"{handler.endpoint.url}/ok/elsewhere/v1", "content-length": "0"})


def incomplete(handler: Handler) -> None:
    """The model ran into its limit of output tokens."""
    if handler.dialect == "responses":
        ending = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        handler.stream([{"type": "response.incomplete", "response": {"id": "resp_1", "output": [], **ending}}])
    else:
        told = events(handler.dialect, USAGE[handler.dialect])
        told[-2]["delta"]["stop_reason"] = "max_tokens"
        handler.stream(told)
    handler.chunk(b"")


BEHAVIOURS: dict[str, Callable[[Handler], None]] = {
    behaviour.__name__: behaviour
    for behaviour in (
        *(ok, runs, runs_on, runs_on_untold, plays, many, no_usage, cut, ends_early, page, hang, echo, echo_stream),
        *(too_long, quota, redirect, incomplete),
    )
}


@contextlib.contextmanager
def model_endpoint() -> Iterator[ModelEndpoint]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    endpoint = ModelEndpoint(f"http://127.0.0.1:{server.server_address[1]}")
    server.RequestHandlerClass = type("Bound", (Handler,), {"endpoint": endpoint})
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield endpoint
    finally:
        server.shutdown()
        server.server_close()
