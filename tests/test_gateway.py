"""The gateway from outside: a real server process, real clients, real bash, the real harness CLIs."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

ROOT = Path(__file__).resolve().parent.parent
PATH = "/usr/local/bin:/usr/bin:/bin"
PREFERRED_SHELLS = [shell for shell in ("/bin/sh", "/bin/bash", "/bin/zsh") if Path(shell).exists()]

WRITE = "printf 'from the script\\n' > made.txt\n"

HOSTILE = {
    "quotes": """echo 'single' "double" '"' "'" $'\\t' `echo back`\n""",
    "dollars": 'x=1; echo $x "$x" \'$x\' ${x} $((x+1)) $$ | tr -d 0-9; echo "$@" "$#"\n',
    "heredocs": "".join(
        f"cat <<'{mark}'\nin $HOME {mark}x\n{mark}\n"
        for mark in ("EOF", "END", "DELIM", "SCRIPT", "HEREDOC", "END_OF_SCRIPT_1", "END_OF_SCRIPT_2")
    ),
    "expanding heredoc": "x=5\ncat <<EOF\n$x `echo y` \\$x\nEOF\ncat <<-E\n\ttabbed\n\tE\n",
    "trailing backslash": "echo end\\",
    "trailing backslash and newline": "echo end\\\n",
    "no final newline": "echo no newline",
    "delimiter as last line": "echo a\n# END_OF_SCRIPT_1",
    "100 KB": "".join(f"echo 'line {n} \\ $' >/dev/null\n" for n in range(3500)) + "echo done\n",
    "unicode": "echo 'äöü 漢字 🦀 \u202e \u00a0'; printf '%s' 'ñ' | wc -c\n",
    "carriage returns": "printf '%s' 'a\r\nb\r' | od -c\n",
    "control characters": "printf '%s' '\x01\x1b[31m\x7f' | od -c\n",
    "reads its input": "cat; read -r line || echo no input\necho after\n",
    "exits 3": "echo before\nexit 3\necho never\n",
    "set -e": "set -euo pipefail\nfalse | true\necho never\n",
    "nested bash": """bash -c 'echo "$0" "$1"' "a b" "c'd"\nbash <<'A'\nbash <<'B'\necho $((1+1))\nB\nA\n""",
    "tabs": "if true; then\n\tcat <<-EOF\n\t\ta\tb\n\tEOF\nfi\n",
    "python": "python3 - <<'EOF'\nprint('''it's \"quoted\" \\\\ $x''')\nEOF\n",
    "history": 'echo "!!" !x ~ *nothing* {a,b} # comment\n',
    "empty": "",
}

# Those that neither end the script nor depend on where it ends.
MANY_HOSTILE = "".join(
    [
        "exec >made.txt 2>&1\n",
        *(HOSTILE[name] for name in ("quotes", "dollars", "heredocs", "reads its input")),
        *(HOSTILE[name] for name in ("unicode", "nested bash", "python", "history")),
        "wc -c <<'LONG'\n" + "it's long\n" * 2000 + "LONG\n",
    ]
)

BOOK = {
    "scripts": {
        "write": WRITE,
        "many": MANY_HOSTILE,
        "many and controls": MANY_HOSTILE + HOSTILE["control characters"],
        "many and long": HOSTILE["100 KB"] + MANY_HOSTILE,
        "fail": "exit 4\n",
        **HOSTILE,
    },
    "rollouts": {
        "r1": "write",
        "r 2~xä": "write",
        "fails": "fail",
        "none": None,
        **{name: name for name in ("many", "many and controls", "many and long")},
        **{name: name for name in HOSTILE},
    },
}


# --- The server -------------------------------------------------------------------------------------


CLIENT = httpx.Client(trust_env=False)


@dataclass
class Gateway:
    process: subprocess.Popen[bytes]
    pattern: str
    key: str

    def url(self, rollout_id: str) -> str:
        return self.pattern.replace("{rollout_id}", rollout_id)

    def post(self, path: str, body: Any, rollout_id: str = "r1", **options: Any) -> httpx.Response:
        options.setdefault("headers", {"authorization": f"Bearer {self.key}"})
        content = body if isinstance(body, (bytes, Iterator)) else json.dumps(body)
        return CLIENT.post(f"{self.url(rollout_id)}/{path}", content=content, timeout=30, **options)

    def openai(self, rollout_id: str = "r1") -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url(rollout_id), api_key=self.key, max_retries=0)


def spawn(*options: str, **environment: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "gateway", "serve", *options],
        cwd=ROOT,
        env={"PATH": PATH, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@contextmanager
def serving(*options: str, book: Any = BOOK, **environment: str) -> Iterator[Gateway]:
    with spawn(*options, **environment) as process:
        assert process.stdin and process.stdout
        try:
            if "--scripts" not in options:
                process.stdin.write(json.dumps(book).encode() + b"\n")
                process.stdin.flush()
            lines = [process.stdout.readline().decode() for _ in range(2)]
            (_, url), (_, key) = (shlex.split(line)[1].split("=", 1) for line in lines)
            yield Gateway(process, url, key)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    with serving("--exit-with-stdin") as running:
        yield running


# --- Requests and replies in each dialect -----------------------------------------------------------


def schema(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [next(iter(properties))]}


TEXT, NUMBER = {"type": "string"}, {"type": "number"}
ARGV = {"type": "array", "items": {"type": "string"}}
SECONDS = {"type": "number", "description": "Timeout in seconds (optional)"}
MILLISECONDS = {"type": "number", "description": "Optional timeout in milliseconds (max 600000)"}

# name, schema, the argument that holds the command, the other arguments
SHELL_TOOLS = [
    (
        "exec_command",
        schema(cmd=TEXT, yield_time_ms=NUMBER, tty={"type": "boolean"}),
        {"yield_time_ms": 30000},
    ),
    ("shell_command", schema(command=TEXT, timeout_ms=NUMBER, workdir=TEXT), {"timeout_ms": 600000}),
    ("shell", schema(command=ARGV, timeout_ms=NUMBER), {"timeout_ms": 600000}),
    (
        "Bash",
        schema(command=TEXT, timeout=MILLISECONDS, description=TEXT),
        {"timeout": 600000, "description": "Run the script"},
    ),
    ("bash", schema(command=TEXT, timeout=SECONDS), {"timeout": 600}),
]
OTHER_TOOL = ("Read", schema(file_path=TEXT))
BASH = ("Bash", schema(command=TEXT))

DIALECTS = {"responses": "responses", "chat": "chat/completions", "messages": "messages"}


def body(dialect: str, model: str = "oracle", tools: Any = (BASH,), **more: Any) -> dict[str, Any]:
    """A first request in `dialect`, offering `tools`."""
    user = [{"role": "user", "content": "Do the task."}]
    declared = {
        "responses": lambda name, parameters: {"type": "function", "name": name, "parameters": parameters},
        "chat": lambda name, parameters: {
            "type": "function",
            "function": {"name": name, "parameters": parameters},
        },
        "messages": lambda name, parameters: {"name": name, "input_schema": parameters},
    }[dialect]
    conversation = {"input": user} if dialect == "responses" else {"messages": user}
    limit = {"max_tokens": 1000} if dialect == "messages" else {}
    return {
        "model": model,
        **conversation,
        **limit,
        **({"tools": [declared(*tool) for tool in tools]} if tools else {}),
        **more,
    }


def with_result(request: dict[str, Any], dialect: str, text: str, failed: bool = False) -> dict[str, Any]:
    """`request` continued by a tool call and its result, as clients send them."""
    arguments = {"command": "x"}
    if dialect == "responses":
        call = {"type": "function_call", "call_id": "c1", "name": "Bash", "arguments": json.dumps(arguments)}
        result = {"type": "function_call_output", "call_id": "c1", "output": text}
        return request | {"input": [*request["input"], call, result]}
    if dialect == "chat":
        function = {"name": "Bash", "arguments": json.dumps(arguments)}
        call = {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "function": function}]}
        result = {"role": "tool", "tool_call_id": "c1", "content": text}
    else:
        use = {"type": "tool_use", "id": "c1", "name": "Bash", "input": arguments}
        block = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": text}]}
        call = {"role": "assistant", "content": [use]}
        result = {"role": "user", "content": [block | ({"is_error": True} if failed else {})]}
    return request | {"messages": [*request["messages"], call, result]}


@dataclass
class Reply:
    """What a client makes of a reply."""

    text: str = ""
    tool: str = ""
    arguments: Any = None
    usage: tuple[int, int] = (0, 0)
    ids: tuple[str, ...] = ()


def read(dialect: str, reply: dict[str, Any]) -> Reply:
    return {"responses": read_response, "chat": read_chat, "messages": read_message}[dialect](reply)


def read_response(reply: dict[str, Any]) -> Reply:
    response = Response.model_validate(reply)
    assert response.status == "completed" and response.usage
    usage = (response.usage.input_tokens, response.usage.output_tokens)
    (item,) = response.output
    if item.type == "function_call":
        return Reply("", item.name, json.loads(item.arguments), usage, (response.id, item.id or "", item.call_id))
    return Reply(response.output_text, "", None, usage, (response.id, item.id or ""))


def read_chat(reply: dict[str, Any]) -> Reply:
    completion = ChatCompletion.model_validate(reply)
    (choice,) = completion.choices
    assert completion.usage
    usage = (completion.usage.prompt_tokens, completion.usage.completion_tokens)
    if choice.message.tool_calls:
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls" and call.type == "function"
        return Reply("", call.function.name, json.loads(call.function.arguments), usage, (completion.id, call.id))
    assert choice.finish_reason == "stop"
    return Reply(choice.message.content or "", "", None, usage, (completion.id,))


def read_message(reply: dict[str, Any]) -> Reply:
    assert reply["type"] == "message" and reply["role"] == "assistant"
    (block,) = reply["content"]
    usage = (reply["usage"]["input_tokens"], reply["usage"]["output_tokens"])
    if block["type"] == "tool_use":
        assert reply["stop_reason"] == "tool_use"
        return Reply("", block["name"], block["input"], usage, (reply["id"], block["id"]))
    assert reply["stop_reason"] == "end_turn"
    return Reply(block["text"], "", None, usage, (reply["id"],))


def sse(text: str) -> list[tuple[str, Any]]:
    """The events of a stream, as (event name, data)."""
    events = []
    assert text.endswith("\n\n")
    for block in text[:-2].split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        data = fields["data"]
        events.append((fields.get("event", ""), data if data == "[DONE]" else json.loads(data)))
    return events


def assemble(dialect: str, text: str) -> Reply:
    """Rebuild the reply from its stream alone, checking the protocol on the way."""
    return {"responses": assemble_response, "chat": assemble_chat, "messages": assemble_message}[dialect](sse(text))


def assemble_response(events: list[tuple[str, Any]]) -> Reply:
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    for number, (name, data) in enumerate(events):
        adapter.validate_python(data)
        assert data["type"] == name and data["sequence_number"] == number
    names = [name.removeprefix("response.") for name, _ in events]
    assert names[:3] == ["created", "in_progress", "output_item.added"]
    assert names[-2:] == ["output_item.done", "completed"]
    reply = read_response(events[-1][1]["response"])
    deltas = "".join(data["delta"] for _, data in events if "delta" in data)
    assert (json.loads(deltas) == reply.arguments) if reply.tool else (deltas == reply.text)
    middle = (
        ["function_call_arguments.delta", "function_call_arguments.done"]
        if reply.tool
        else ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
    )
    assert names[3:-2] == middle
    return reply


def assemble_chat(events: list[tuple[str, Any]]) -> Reply:
    assert events[-1] == ("", "[DONE]")
    chunks = [ChatCompletionChunk.model_validate(data) for _, data in events[:-1]]
    last = chunks.pop()
    assert not last.choices and last.usage and all(chunk.usage is None for chunk in chunks)
    usage = (last.usage.prompt_tokens, last.usage.completion_tokens)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant" and {chunk.id for chunk in chunks} == {last.id}
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    finish_reason = chunks[-1].choices[0].finish_reason
    if not calls:
        assert finish_reason == "stop"
        return Reply("".join(delta.content or "" for delta in deltas), "", None, usage, (last.id,))
    assert finish_reason == "tool_calls"
    functions = [call.function for call in calls if call.function]
    arguments = json.loads("".join(function.arguments or "" for function in functions))
    return Reply("", functions[0].name or "", arguments, usage, (last.id, calls[0].id or ""))


def assemble_message(events: list[tuple[str, Any]]) -> Reply:
    names = [name for name, _ in events]
    assert names == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert [data["type"] for _, data in events] == names
    start, block, delta, _, end, _ = (data for _, data in events)
    message, content = start["message"], block["content_block"]
    assert message["usage"]["input_tokens"] == end["usage"]["input_tokens"] > 0
    assert message["content"] == [] and message["stop_reason"] is None
    if content["type"] == "text":
        assert content["text"] == ""
        content = content | {"text": delta["delta"]["text"]}
    else:
        assert content["input"] == {}
        content = content | {"input": json.loads(delta["delta"]["partial_json"])}
    return read_message(message | end["delta"] | {"usage": end["usage"], "content": [content]})


def ask(gateway: Gateway, dialect: str, request: dict[str, Any], rollout_id: str = "r1") -> Reply:
    """Send it unary and streamed; both give the same reply, which is returned."""
    unary = gateway.post(DIALECTS[dialect], request, rollout_id)
    assert unary.status_code == 200, unary.text
    options = {"stream": True} | ({"stream_options": {"include_usage": True}} if dialect == "chat" else {})
    streamed = gateway.post(DIALECTS[dialect], request | options, rollout_id)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    reply = read(dialect, unary.json())
    assert assemble(dialect, streamed.text) == reply
    return reply


@pytest.fixture(params=DIALECTS)
def dialect(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# --- The policies -----------------------------------------------------------------------------------


def test_nop_ends_at_once(gateway: Gateway, dialect: str) -> None:
    reply = ask(gateway, dialect, body(dialect, "nop"))
    assert reply.text == "Nothing to do." and not reply.tool and min(reply.usage) > 0


def test_oracle_calls_then_ends(gateway: Gateway, dialect: str) -> None:
    first = ask(gateway, dialect, body(dialect, tools=[OTHER_TOOL, BASH]))
    assert first.tool == "Bash" and WRITE in first.arguments["command"] and min(first.usage) > 0
    second = ask(gateway, dialect, with_result(body(dialect), dialect, "from the script"))
    assert second.text == "The script ran and ended." and not second.tool
    assert set(first.ids).isdisjoint(second.ids)


@pytest.mark.parametrize("tool", SHELL_TOOLS, ids=lambda tool: tool[0])
def test_oracle_speaks_each_shell_tool(gateway: Gateway, dialect: str, tool: Any) -> None:
    name, parameters, rest = tool
    reply = ask(gateway, dialect, body(dialect, tools=[(name, parameters)]))
    (command,) = (value for key, value in reply.arguments.items() if key in ("cmd", "command"))
    assert reply.tool == name
    assert {key: value for key, value in reply.arguments.items() if value != command} == rest
    assert isinstance(command, list) == (parameters["properties"].get("command") == ARGV)


def run_plainly(command: str | list[str], shell: str, folder: Path) -> tuple[int, bytes]:
    argv = [shell, "-c", command] if isinstance(command, str) else command
    done = subprocess.run(
        argv,
        cwd=folder,
        env={"PATH": PATH, "HOME": str(folder / "home")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=20,
    )
    assert b"here-document" not in done.stderr
    return done.returncode, done.stdout


@pytest.mark.parametrize("parameters", [BASH[1], schema(command=ARGV)], ids=["line", "argv"])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_scripts_arrive_whole(gateway: Gateway, tmp_path: Path, name: str, parameters: Any) -> None:
    """What the tool call runs prints and returns what `bash FILE` does, whatever shell reads the line."""
    (tmp_path / "script.sh").write_bytes(HOSTILE[name].encode())
    reply = ask(gateway, "chat", body("chat", tools=[("bash", parameters)]), name)
    expected = run_plainly(["bash", "script.sh"], "", tmp_path)
    if name.startswith("trailing backslash") and parameters != BASH[1]:
        expected = (
            0,
            expected[1].replace(b"end\n", b"end\\\n") if name == "trailing backslash" else expected[1],
        )
    for shell in PREFERRED_SHELLS:
        assert run_plainly(reply.arguments["command"], shell, tmp_path) == expected


def test_a_line_delimiter_never_occurs_in_the_script(gateway: Gateway) -> None:
    command = ask(gateway, "chat", body("chat"), "heredocs").arguments["command"]
    (mark,) = re.findall(r"3<<'(\w+)' </dev/null\n", command)
    assert mark not in HOSTILE["heredocs"] and command.endswith(f"\n{mark}\n")


RUNNING = "Chunk ID: ab\nWall time: 30.0 seconds\nProcess running with session ID 77\nOutput:\nworking\n"
WRITE_STDIN = ("write_stdin", schema(session_id=NUMBER, chars=TEXT, yield_time_ms=NUMBER))
EXEC = SHELL_TOOLS[0][:2]
ENDED = "The script ran and ended."
BROKE = "The script was called and ended with an error."
STILL_RUNS = "The script was started and still runs; no tool to wait for it was offered."


@pytest.mark.parametrize(
    ("result", "failed", "text"),
    [
        ("Chunk ID: ab\nProcess exited with code 0\nOutput:\nok\n", False, ENDED),
        ("Chunk ID: ab\nProcess exited with code 1\nOutput:\nok\n", False, BROKE),
        ("Process exited with code 0\nOutput:\nProcess running with session ID 9\n", False, ENDED),
        ("Process running with session ID 9 is what it printed", False, ENDED),
        (RUNNING, False, STILL_RUNS),
        ("exec_command failed: CreateProcess", False, BROKE),
        ("boom", True, BROKE),
        ("", False, ENDED),
    ],
)
def test_the_final_message_says_how_it_ended(gateway: Gateway, result: str, failed: bool, text: str) -> None:
    assert ask(gateway, "messages", with_result(body("messages"), "messages", result, failed)).text == text


def test_oracle_polls_a_process_that_still_runs(gateway: Gateway, dialect: str) -> None:
    request = body(dialect, tools=[EXEC, WRITE_STDIN])
    reply = ask(gateway, dialect, with_result(request, dialect, RUNNING))
    assert (reply.tool, reply.arguments) == (
        "write_stdin",
        {"session_id": 77, "chars": "", "yield_time_ms": 300000},
    )


def test_a_request_without_tools_is_answered_by_text(gateway: Gateway, dialect: str) -> None:
    forbidden = {"type": "none"} if dialect == "messages" else "none"
    assert ask(gateway, dialect, body(dialect, tools=())).text
    assert ask(gateway, dialect, body(dialect, tool_choice=forbidden)).text


def test_later_attempts_are_the_same_rollout(gateway: Gateway, dialect: str) -> None:
    for rollout_id in ("r1~2", "r1~31", "r%202~x%C3%A4~2"):
        assert WRITE in ask(gateway, dialect, body(dialect), rollout_id).arguments["command"]


def test_a_resend_gets_the_same_reply_under_the_same_ids(gateway: Gateway, dialect: str) -> None:
    request = body(dialect)
    reordered = dict(reversed(request.items()))
    assert ask(gateway, dialect, request) == ask(gateway, dialect, reordered)
    assert ask(gateway, dialect, request).ids != ask(gateway, dialect, request, "r1~2").ids


def test_tools_of_the_responses_dialect_keep_their_form(gateway: Gateway) -> None:
    local = gateway.post("responses", body("responses", tools=()) | {"tools": [{"type": "local_shell"}]}).json()
    (item,) = Response.model_validate(local).output
    assert item.type == "local_shell_call" and item.action.command == ["bash", "-c", WRITE]
    function = {"type": "function", "name": "exec_command", "parameters": EXEC[1]}
    grouped = [{"type": "web_search"}, {"type": "namespace", "name": "unix", "tools": [function]}]
    reply = gateway.post("responses", body("responses", tools=()) | {"tools": grouped}).json()
    assert (reply["output"][0]["name"], reply["output"][0]["namespace"]) == ("exec_command", "unix")
    assert reply["tools"] == grouped


# --- The stock client -------------------------------------------------------------------------------


def test_openai_client_responses(gateway: Gateway) -> None:
    client = gateway.openai()
    tools: Any = body("responses")["tools"]
    response = client.responses.create(model="oracle", input="Do it.", tools=tools)
    assert response.output[0].type == "function_call"
    assert client.responses.create(model="nop", input="Do it.").output_text == "Nothing to do."
    with client.responses.stream(model="oracle", input="Do it.", tools=tools) as stream:
        types = [event.type for event in stream]
        final = stream.get_final_response()
    assert types[0] == "response.created" and types[-1] == "response.completed"
    assert final.output[0].id == response.output[0].id and final.usage == response.usage


def test_openai_client_chat(gateway: Gateway) -> None:
    client = gateway.openai()
    request: Any = body("chat")
    completion = client.chat.completions.create(**request)
    with client.chat.completions.stream(**request, stream_options={"include_usage": True}) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.tool_calls and completion.choices[0].message.tool_calls
    streamed, unary = final.choices[0].message.tool_calls[0], completion.choices[0].message.tool_calls[0]
    assert (streamed.id, streamed.function.arguments) == (unary.id, unary.function.arguments)  # type: ignore[union-attr]
    assert final.usage == completion.usage
    chunks = list(client.chat.completions.create(**body("chat", "nop"), stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Nothing to do."
    assert all(chunk.usage is None for chunk in chunks)


def test_openai_client_errors_and_models(gateway: Gateway) -> None:
    assert [model.id for model in gateway.openai().models.list()] == ["oracle", "nop"]
    with pytest.raises(openai.NotFoundError, match="unknown model 'gpt'"):
        gateway.openai().responses.create(model="gpt", input="x")
    with pytest.raises(openai.NotFoundError, match="unknown rollout 'nobody'"):
        gateway.openai("nobody").chat.completions.create(**body("chat"))
    with pytest.raises(openai.AuthenticationError):
        gateway.openai().with_options(api_key="wrong").responses.create(model="nop", input="x")


def test_count_tokens_is_what_the_message_reports(gateway: Gateway) -> None:
    request = body("messages")
    counted = gateway.post("messages/count_tokens?beta=true", {k: request[k] for k in request if k != "max_tokens"})
    assert counted.json() == {"input_tokens": ask(gateway, "messages", request).usage[0]}
    longer = request | {"system": "x" * 4000}
    assert ask(gateway, "messages", longer).usage[0] == counted.json()["input_tokens"] + 1000


def test_count_tokens_refuses_as_the_message_does(gateway: Gateway) -> None:
    request = body("messages")
    path = "messages/count_tokens"
    assert refused("messages", gateway.post(path, request | {"model": "gpt"}))[0] == 404
    assert refused("messages", gateway.post(path, request, "nobody"))[0] == 404
    assert refused("messages", gateway.post(path, request, headers={}))[0] == 401
    assert refused("messages", gateway.post(path, request | {"system": 1}))[0] == 400


def test_beta_query_is_accepted(gateway: Gateway) -> None:
    assert read("messages", gateway.post("messages?beta=true", body("messages")).json()).tool == "Bash"


# --- Refusals ---------------------------------------------------------------------------------------


def refused(dialect: str, response: httpx.Response) -> tuple[int, str]:
    """Status and message of a refusal, out of the dialect's own envelope."""
    error = response.json()
    if dialect == "messages":
        kinds = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"}
        assert error["type"] == "error"
        assert error["error"]["type"] == {**kinds, 413: "request_too_large"}[response.status_code]
    else:
        assert set(error["error"]) == {"message", "type", "param", "code"}
    return response.status_code, error["error"]["message"]


@pytest.mark.parametrize(
    ("headers", "accepted"),
    [
        ({}, False),
        ({"authorization": "Bearer"}, False),
        ({"authorization": "Bearer {key}x"}, False),
        ({"authorization": "Basic {key}"}, False),
        ({"authorization": "{key}"}, False),
        ({"x-api-key": ""}, False),
        ({"x-api-key": "ä"}, False),
        ({"authorization": "bearer {key}"}, True),
        ({"x-api-key": "{key}"}, True),
        ({"authorization": "Bearer placeholder", "x-api-key": "{key}"}, True),
    ],
)
def test_keys(gateway: Gateway, dialect: str, headers: dict[str, str], accepted: bool) -> None:
    given = {name: value.replace("{key}", gateway.key).encode() for name, value in headers.items()}
    response = gateway.post(DIALECTS[dialect], body(dialect), headers=given)
    assert response.status_code == 200 if accepted else refused(dialect, response)[0] == 401
    unknown = gateway.post(DIALECTS[dialect], body(dialect), "nobody", headers=given)
    assert refused(dialect, unknown)[0] == (404 if accepted else 401)


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"model": "gpt"}, 404, "unknown model 'gpt'; there are: oracle, nop"),
        ({"model": "\ud800"}, 404, "unknown model"),
        ({"model": None}, 400, "'model' is missing"),
        ({"model": 7}, 400, "'model' must be a string"),
        ({"stream": "yes"}, 400, "'stream' must be a boolean"),
        ({"tools": {}}, 400, "'tools' must be an array"),
        ({"tools": [1]}, 400, "'tools' must be an array of objects"),
        ({"messages": None, "input": None}, 400, "is missing"),
        ({"messages": 1, "input": 1}, 400, "must be"),
        ({"messages": ["x"], "input": ["x"]}, 400, "must be an array of objects"),
    ],
)
def test_bad_members(gateway: Gateway, dialect: str, change: Any, status: int, message: str) -> None:
    found = refused(dialect, gateway.post(DIALECTS[dialect], body(dialect) | change))
    assert found[0] == status and message in found[1]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"\xff{}",
        b'{"model":"nop","model":"oracle"}',
        b'{"a":{"b":1,"b":1}}',
        b'{"a":NaN}',
        b'{"a":-Infinity}',
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a":' + b"9" * 5000 + b"}",
    ],
    ids=lambda text: text[:20],
)
def test_bad_json(gateway: Gateway, dialect: str, text: bytes) -> None:
    assert refused(dialect, gateway.post(DIALECTS[dialect], text))[0] == 400


def test_every_depth_of_nesting_is_answered(gateway: Gateway) -> None:
    """Some depths can be read but not written again; none is a 500."""
    for depth in range(860, 1000, 5):
        request = body("responses", metadata="NESTED")
        text = json.dumps(request).replace('"NESTED"', "[" * depth + "]" * depth)
        assert gateway.post("responses", text.encode()).status_code in (200, 400), depth


def test_a_request_without_a_shell_tool_is_told_what_it_offered(gateway: Gateway, dialect: str) -> None:
    tools = [OTHER_TOOL, ("bash", schema(script=TEXT))]
    status, message = refused(dialect, gateway.post(DIALECTS[dialect], body(dialect, tools=tools)))
    assert status == 400 and "the request offers: Read, bash" in message


def test_what_cannot_be_served_is_named(gateway: Gateway, dialect: str) -> None:
    demanding = ("bash", schema(command=TEXT) | {"required": ["command", "reason"]})
    status, message = refused(dialect, gateway.post(DIALECTS[dialect], body(dialect, tools=[demanding])))
    assert status == 400 and "reason" in message
    status, message = refused(dialect, gateway.post(DIALECTS[dialect], body(dialect), "none"))
    assert status == 400 and "no script" in message
    assert ask(gateway, dialect, body(dialect, "nop"), "none").text


@pytest.mark.parametrize(
    ("dialect", "change"),
    [
        ("responses", {"previous_response_id": "resp_1"}),
        ("responses", {"store": True}),
        ("responses", {"background": True}),
        ("chat", {"n": 2}),
    ],
)
def test_unsupported_members(gateway: Gateway, dialect: str, change: Any) -> None:
    status, message = refused(dialect, gateway.post(DIALECTS[dialect], body(dialect) | change))
    assert status == 400 and repr(next(iter(change))) in message


def test_unknown_routes(gateway: Gateway) -> None:
    for path in ("nothing", "responses/x", "responses/", "../v2/responses", "chat"):
        assert refused("chat", gateway.post(path, {}))[0] == 404
    assert refused("messages", gateway.post("messages/batches", {}))[0] == 404
    assert httpx.get(gateway.url("r1") + "/responses").status_code == 405


MIB = 1024 * 1024


def test_a_body_at_the_limit_is_read(gateway: Gateway, dialect: str) -> None:
    at_limit = json.dumps(body(dialect, "nop")).encode().ljust(32 * MIB)
    assert gateway.post(DIALECTS[dialect], at_limit).status_code == 200


def raw(gateway: Gateway, header: str, sent: bytes) -> bytes:
    """POST responses with one more header and bytes after it; the answer up to the connection's end."""
    host = httpx.URL(gateway.url("r1"))
    head = f"POST {host.path}/responses HTTP/1.1\r\nhost: x\r\nx-api-key: {gateway.key}\r\n{header}\r\n\r\n"
    with socket.create_connection((host.host, host.port or 0), timeout=10) as connection:
        connection.sendall(head.encode() + sent)
        return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.parametrize(
    ("header", "sent"),
    [
        (f"content-length: {32 * MIB + 1}", b""),
        ("transfer-encoding: chunked", b"%x\r\n" % (32 * MIB + 1) + b" " * (32 * MIB + 1)),
    ],
    ids=["declared", "chunked"],
)
def test_a_body_beyond_the_limit_is_refused_without_reading_on(gateway: Gateway, header: str, sent: bytes) -> None:
    answer = raw(gateway, header, sent)  # which never ends, so only a refusal ends the connection
    assert answer.startswith(b"HTTP/1.1 413") and b"body_too_long" in answer


def test_a_client_that_hangs_up_leaves_no_trace() -> None:
    with serving() as running:
        host = httpx.URL(running.url("r1"))
        with socket.create_connection((host.host, host.port or 0)) as connection:
            head = f"POST {host.path}/responses HTTP/1.1\r\nhost: x\r\nx-api-key: {running.key}\r\n"
            connection.sendall(head.encode() + b"content-length: 100\r\n\r\n{")
        assert running.post("responses", body("responses")).status_code == 200
        running.process.terminate()
        assert running.process.stderr and running.process.stderr.read() == b""


# --- Start and stop ---------------------------------------------------------------------------------


def test_the_two_lines_are_a_shell_script() -> None:
    with serving(GATEWAY_API_KEY='it\'s $HOME `x` "k"') as running:
        assert running.key == 'it\'s $HOME `x` "k"'
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/rollouts/\{rollout_id\}/v1", running.pattern)
        assert running.post("responses", body("responses", "nop")).status_code == 200
    with serving() as one, serving() as two:
        assert len(one.key) >= 32 and one.key != two.key


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_cleanly(number: int) -> None:
    with serving() as running, httpx.Client() as client:
        url = running.url("r1") + "/models"
        assert client.get(url, headers={"x-api-key": running.key}).status_code == 200
        running.process.send_signal(number)  # the client's connection is still open
        out, err = running.process.communicate(timeout=5)
        assert (running.process.returncode, out, err) == (0, b"", b"")


def test_the_end_of_standard_input_stops_it() -> None:
    with serving("--exit-with-stdin") as running:
        assert running.process.stdin
        running.process.stdin.write(b"more lines are ignored\n")
        running.process.stdin.flush()
        assert running.post("responses", body("responses", "nop")).status_code == 200
        assert running.process.communicate(timeout=5) == (b"", b"")
        assert running.process.returncode == 0


def test_without_the_option_it_outlives_its_input() -> None:
    with serving() as running:
        assert running.process.stdin
        running.process.stdin.close()
        assert running.post("responses", body("responses", "nop")).status_code == 200


def test_a_book_in_a_file(tmp_path: Path) -> None:
    book = tmp_path / "book.json"
    book.write_text(json.dumps(BOOK, indent=1))
    with serving("--scripts", str(book)) as running:
        assert ask(running, "chat", body("chat")).tool == "Bash"


ONE_SCRIPT = {"a": "true"}


@pytest.mark.parametrize(
    ("book", "reason"),
    [
        (b"", "Expecting value"),
        (b"[]\n", "is an object"),
        (b"{\n", ""),
        (b'{"scripts":{}}\n', '"rollouts"'),
        (b'{"scripts":{},"rollouts":{},"x":1}\n', "an object with the members"),
        (b'{"scripts":{},"rollouts":{},"rollouts":{}}\n', "duplicate"),
        ({"scripts": {"a": 1}, "rollouts": {}}, "'a'"),
        ({"scripts": {"a": "x\0"}, "rollouts": {}}, "NUL"),
        ({"scripts": {"a": "\ud800"}, "rollouts": {}}, "surrogate"),
        ({"scripts": {"a": "".join(map(chr, range(256, 65000)))[:50000]}, "rollouts": {}}, "is longer"),
        ({"scripts": ONE_SCRIPT, "rollouts": {"r": "b"}}, "'b'"),
        ({"scripts": ONE_SCRIPT, "rollouts": {"r~2": "a"}}, "'r~2'"),
        ({"scripts": ONE_SCRIPT, "rollouts": {"r/2": "a"}}, "'r/2'"),
        ({"scripts": ONE_SCRIPT, "rollouts": {"r": ["a"]}}, "'r'"),
    ],
)
def test_a_bad_book_is_one_line_and_exit_2(book: Any, reason: str) -> None:
    text = book if isinstance(book, bytes) else json.dumps(book).encode()
    refuses_to_start(spawn(), text, reason)


def refuses_to_start(process: subprocess.Popen[bytes], text: bytes, reason: str) -> None:
    out, err = process.communicate(text, timeout=10)
    assert process.returncode == 2 and out == b""
    assert err.startswith(b"gateway: ") and err.count(b"\n") == 1 and reason in err.decode()


def test_an_address_it_cannot_have_is_one_line_and_exit_2(gateway: Gateway) -> None:
    book = json.dumps(BOOK).encode()
    taken = str(httpx.URL(gateway.url("r1")).port)
    refuses_to_start(spawn("--port", taken), book, "Address already in use")
    refuses_to_start(spawn("--host", "0.0.0.0"), book, "set GATEWAY_API_KEY")
    refuses_to_start(spawn("--host", "no such host", GATEWAY_API_KEY="k"), book, "cannot listen")
    refuses_to_start(spawn(GATEWAY_API_KEY="a\nb"), book, "printable ASCII")
    refuses_to_start(spawn("--scripts", "/nowhere"), b"", "/nowhere")


def test_it_starts_without_heavy_imports() -> None:
    code = "import sys, gateway.server; print(*[m for m in ('openai', 'httpx', 'pydantic') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT).strip() == b""


# --- The real harness CLIs --------------------------------------------------------------------------


def package_file(package: str, *parts: str) -> str:
    spec = find_spec(package)
    assert spec and spec.origin
    return str(Path(spec.origin).parent.joinpath(*parts))


def codex(gateway: Gateway, rollout_id: str, model: str, home: Path) -> tuple[list[str], dict[str, str]]:
    provider = {"name": "p", "base_url": gateway.url(rollout_id), "env_key": "KEY", "wire_api": "responses"}
    inline = ",".join(f"{name}={json.dumps(value)}" for name, value in provider.items())
    command = [package_file("codex_cli_bin", "bin", "codex"), "exec", "--json", "--skip-git-repo-check"]
    command += ["--dangerously-bypass-approvals-and-sandbox", "-m", model, "-c", "model_provider=p"]
    command += ["-c", f"model_providers.p={{{inline}}}", "Do the task."]
    return command, {"KEY": gateway.key}


def claude(gateway: Gateway, rollout_id: str, model: str, home: Path) -> tuple[list[str], dict[str, str]]:
    command = [package_file("claude_agent_sdk", "_bundled", "claude"), "-p"]
    command += ["--output-format", "stream-json", "--verbose", "--dangerously-skip-permissions"]
    environment = {
        "ANTHROPIC_BASE_URL": gateway.url(rollout_id).removesuffix("/v1"),
        "ANTHROPIC_API_KEY": gateway.key,
        "CLAUDE_CONFIG_DIR": str(home / "claude"),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "IS_SANDBOX": "1",
    }
    return [*command, "--model", model, "Do the task."], environment


def claude_bare(gateway: Gateway, rollout_id: str, model: str, home: Path) -> tuple[list[str], dict[str, str]]:
    command, environment = claude(gateway, rollout_id, model, home)
    return [*command[:2], "--bare", *command[2:]], environment


CLIS = {"codex": codex, "claude": claude, "claude --bare": claude_bare}


def run_cli(cli: str, gateway: Gateway, rollout_id: str, model: str, tmp_path: Path) -> list[dict[str, Any]]:
    """Run the CLI in tmp_path/work up to its terminal event; its events."""
    home, work = tmp_path / "home", tmp_path / "work"
    for folder in (home, work):
        folder.mkdir()
    command, environment = CLIS[cli](gateway, rollout_id, model, home)
    process = subprocess.Popen(
        command,
        cwd=work,
        env={"PATH": PATH, "HOME": str(home), "LANG": "C.UTF-8", **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdout
    events: list[dict[str, Any]] = []
    try:
        for line in process.stdout:
            events.append(json.loads(line))
            if events[-1]["type"] in ("turn.completed", "turn.failed", "result"):
                break  # codex itself lingers for seconds
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
    return events


def ending(events: list[dict[str, Any]]) -> tuple[str, int]:
    """The final message and the input tokens that the CLI reports."""
    last = events[-1]
    if last["type"] == "result":
        assert last["subtype"] == "success" and not last["is_error"]
        return last["result"], last["usage"]["input_tokens"]
    assert last["type"] == "turn.completed", events
    messages = [e["item"]["text"] for e in events if e.get("item", {}).get("type") == "agent_message"]
    return messages[-1], last["usage"]["input_tokens"]


@pytest.mark.parametrize("cli", CLIS)
@pytest.mark.parametrize("model", ["oracle", "nop"])
def test_real_clis(gateway: Gateway, tmp_path: Path, cli: str, model: str) -> None:
    text, input_tokens = ending(run_cli(cli, gateway, "r1", model, tmp_path))
    made = tmp_path / "work" / "made.txt"
    if model == "oracle":
        assert made.read_text() == "from the script\n" and text == "The script ran and ended."
    else:
        assert not made.exists() and text == "Nothing to do."
    assert input_tokens > 100


@pytest.mark.parametrize("cli", ["codex", "claude"])
@pytest.mark.parametrize("name", ["many", "many and controls", "many and long"])
def test_real_clis_run_hostile_scripts(gateway: Gateway, tmp_path: Path, cli: str, name: str) -> None:
    (tmp_path / "script.sh").write_bytes(BOOK["scripts"][name].encode())
    run_plainly(["bash", "script.sh"], "", tmp_path)
    run_cli(cli, gateway, name, "oracle", tmp_path)
    made = (tmp_path / "work" / "made.txt").read_bytes()
    assert made == (tmp_path / "made.txt").read_bytes() and len(made) > 300


@pytest.mark.parametrize("cli", ["codex", "claude"])
def test_real_clis_report_a_failing_script(gateway: Gateway, tmp_path: Path, cli: str) -> None:
    assert ending(run_cli(cli, gateway, "fails", "oracle", tmp_path))[0] == BROKE
