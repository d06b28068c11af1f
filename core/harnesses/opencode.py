"""`opencode`: `opencode run --format json`, one process per turn.

It takes its endpoint from `opencode.json` and speaks Chat Completions through the provider package it carries. It has
no terminal event: the turn is over when the process ends after a last step that called no tool. A title of our own
spares the call that would invent one; web tools are off, as there is no network.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from core.harnesses import (
    Doc,
    Effect,
    Ended,
    Harness,
    ItemDone,
    ItemStarted,
    Launch,
    OutputReader,
    Thread,
    TurnRequest,
    message_item,
    parse_line,
    reasoning_item,
    tool_item,
    tool_result_effects,
)
from core.harnesses.npm import NPM_INSTALL, find, npm_version
from core.sandbox import Command, Mount

CONFIG = ".config/opencode/opencode.json"
INSTRUCTIONS = ".config/opencode/instructions.md"
KEY_VARIABLE = "OPENCODE_DOOR_KEY"
EDIT_TOOLS = ("edit", "write", "patch", "apply_patch", "multiedit")


class OpenCode(Harness):
    name = "opencode"
    protocols = ("chat_completions",)
    package = "opencode-ai"
    install = NPM_INSTALL

    def __init__(self, prefix: Path) -> None:
        self.found = find("opencode", prefix)

    def mounts(self) -> list[Mount] | None:
        return [self.found[0]] if self.found else None

    def version(self) -> str | None:
        return npm_version(self.package, self.found[0]) if self.found else None

    def launch(self, turn: TurnRequest) -> Launch:
        assert self.found is not None
        argv = [self.found[1], "run", "--pure", "--format", "json", "--thinking", "--title", "session"]
        argv += ["--model", f"door/{turn.agent.model}"]
        if turn.thread:
            argv += ["--session", turn.thread]
        ours = {
            KEY_VARIABLE: turn.door_key,
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_SHARE": "1",
        }
        command = Command(argv, {**turn.env, **ours}, stdin=turn.text.encode(errors="replace"))
        files = {CONFIG: json.dumps(configuration(turn)).encode()}
        if turn.agent.instructions:
            files[INSTRUCTIONS] = turn.agent.instructions.encode(errors="replace")
        return Launch(command, files)

    def reader(self) -> OutputReader:
        return OpenCodeReader()


def configuration(turn: TurnRequest) -> Doc:
    model: Doc = {"name": turn.agent.model}
    if turn.bundle and turn.bundle.context_window and turn.bundle.max_output_tokens:
        model["limit"] = {"context": turn.bundle.context_window, "output": turn.bundle.max_output_tokens}
    options = {"baseURL": f"{turn.door_url}/v1", "apiKey": f"{{env:{KEY_VARIABLE}}}"}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "door", "options": options}
    found: Doc = {
        "autoupdate": False,
        "share": "disabled",
        "provider": {"door": {**provider, "models": {turn.agent.model: model}}},
        "permission": {"edit": "allow", "bash": "allow", "webfetch": "deny", "websearch": "deny"},
    }
    if turn.agent.instructions:
        found["instructions"] = [f"{turn.home}/{INSTRUCTIONS}"]
    return found


class OpenCodeReader(OutputReader):
    """Parts are reported when they are done, tools with their result."""

    def __init__(self) -> None:
        self.blocks = 0
        self.named = False
        self.finished = False
        self.error: str | None = None

    def feed(self, data: bytes) -> Iterator[Effect]:
        event = parse_line(data)
        if event is None:
            return
        kind, part = event.get("type"), event.get("part")
        if not self.named and event.get("sessionID"):
            self.named = True
            yield Thread(str(event["sessionID"]))
        if kind == "error":
            self.error = error_text(event.get("error"))
        if not isinstance(part, dict):
            return
        self.blocks += 1
        if kind == "step_finish":
            self.finished, self.error = part.get("reason") != "tool-calls", None
        elif kind == "text" and part.get("text"):
            yield ItemDone(f"block-{self.blocks}", message_item(str(part["text"]), "completed"))
        elif kind == "reasoning" and part.get("text"):
            yield ItemDone(f"block-{self.blocks}", reasoning_item(str(part["text"])))
        elif kind == "tool_use":
            yield from tool_effects(part)

    def exited(self, code: int, seconds: float) -> Iterator[Effect]:
        if self.error is not None:
            yield Ended(self.error)
        elif self.finished and code == 0:
            yield Ended()


def error_text(error: object) -> str:
    if not isinstance(error, dict):
        return "opencode reports an error"
    data = error.get("data")
    return str(
        (data.get("message") if isinstance(data, dict) else None) or error.get("name") or "opencode reports an error"
    )


def object_of(holder: Doc, name: str) -> Doc:
    value = holder.get(name)
    return value if isinstance(value, dict) else {}


def tool_effects(part: Doc) -> Iterator[Effect]:
    state = object_of(part, "state")
    call_id, name, arguments = str(part.get("callID")), str(part.get("tool")), state.get("input")
    metadata = object_of(state, "metadata")
    failed = state.get("status") == "error"
    text = str(state.get("error") if failed else state.get("output") or "")
    item, code = tool_item(call_id, name, arguments, shell="bash", edits=EDIT_TOOLS), None
    if item["type"] == "command_execution":
        told = metadata.get("exit")
        code = told if isinstance(told, int) else None
        # Without an exit code it was ended, by its time-out say: only the tool's own words tell of that.
        text = str(metadata.get("output", text)) if code is not None else text
        failed = failed or code != 0
    yield ItemStarted(call_id, item)
    yield from tool_result_effects(call_id, item, text, failed=failed, exit_code=code)
