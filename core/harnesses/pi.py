"""`pi`: the pi coding agent in its JSON mode, one process per turn.

It speaks all three protocols and takes its endpoint from `models.json`. Its terminal event is `agent_end`; after an
error it may try again by itself, so an error counts only when the process is gone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from core.harnesses import (
    Doc,
    Effect,
    Ended,
    Harness,
    ItemDone,
    ItemStarted,
    Launch,
    OutputDelta,
    OutputReader,
    Thread,
    TurnRequest,
    message_item,
    parse_line,
    reasoning_item,
    result_text,
    tool_item,
    tool_result_effects,
)
from core.harnesses.npm import NPM_INSTALL, find, npm_version
from core.sandbox import Command, Mount

DIRECTORY = ".pi/agent"
KEY_VARIABLE = "PI_DOOR_KEY"
# A bundle need not say these; pi wants numbers to decide when to compact.
CONTEXT_WINDOW, MAX_OUTPUT_TOKENS = 131072, 16384
APIS = {
    "chat_completions": "openai-completions",
    "responses": "openai-responses",
    "anthropic": "anthropic-messages",
}
EDIT_TOOLS = ("edit", "write")
EXIT_CODE = re.compile(r"\n*Command exited with code (\d+)\s*\Z")


class Pi(Harness):
    name = "pi"
    protocols = ("chat_completions", "responses", "anthropic")
    package = "@mariozechner/pi-coding-agent"
    install = NPM_INSTALL

    def __init__(self, prefix: Path) -> None:
        self.found = find("pi", prefix)

    def mounts(self) -> list[Mount] | None:
        return [self.found[0]] if self.found else None

    def version(self) -> str | None:
        return npm_version(self.package, self.found[0]) if self.found else None

    def launch(self, turn: TurnRequest) -> Launch:
        assert self.found is not None and turn.bundle is not None
        argv = ["/usr/bin/env", "node", self.found[1], "--mode", "json", "-p"]
        argv += ["--provider", "door", "--model", turn.agent.model or ""]
        if turn.thread:
            argv += ["--session", turn.thread]
        if turn.agent.instructions:
            argv += ["--append-system-prompt", f"{turn.home}/{DIRECTORY}/instructions.md"]
        env = {
            **turn.env,
            KEY_VARIABLE: turn.door_key,
            "PI_CODING_AGENT_DIR": f"{turn.home}/{DIRECTORY}",
            "PI_OFFLINE": "1",
        }
        files = {f"{DIRECTORY}/models.json": json.dumps(models(turn)).encode()}
        if turn.agent.instructions:
            files[f"{DIRECTORY}/instructions.md"] = turn.agent.instructions.encode(errors="replace")
        return Launch(Command(argv, env, stdin=turn.text.encode(errors="replace")), files)

    def reader(self) -> OutputReader:
        return PiReader()


def models(turn: TurnRequest) -> Doc:
    """The door as pi's only provider. Its Anthropic client adds `/v1` itself."""
    assert turn.bundle is not None
    model = {
        "id": turn.agent.model,
        "name": turn.agent.model,
        "reasoning": False,
        "input": ["text"],
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
        "contextWindow": turn.bundle.context_window or CONTEXT_WINDOW,
        "maxTokens": turn.bundle.max_output_tokens or MAX_OUTPUT_TOKENS,
    }
    url = turn.door_url if turn.bundle.protocol == "anthropic" else f"{turn.door_url}/v1"
    provider = {"baseUrl": url, "api": APIS[turn.bundle.protocol], "apiKey": KEY_VARIABLE, "models": [model]}
    return {"providers": {"door": provider}}


class PiReader(OutputReader):
    """Tool executions become items; the text of an assistant message arrives whole with its end."""

    def __init__(self) -> None:
        self.open: dict[str, Doc] = {}
        self.seen: dict[str, int] = {}
        self.blocks = 0
        self.error: str | None = None

    def skips(self, line: bytes) -> bool:
        """Updates repeat the whole message so far, each time; its end is enough."""
        return line.startswith(b'{"type":"message_update"')

    def feed(self, data: bytes) -> Iterator[Effect]:
        event = parse_line(data)
        if event is None:
            return
        kind = event.get("type")
        if kind == "session":
            yield Thread(str(event.get("id")))
        elif kind == "message_end" and isinstance(event.get("message"), dict):
            yield from self.message(event["message"])
        elif kind == "tool_execution_start":
            yield self.started(event)
        elif kind == "tool_execution_update":
            yield from self.progress(event)
        elif kind == "tool_execution_end":
            yield from self.finished(event)
        elif kind == "agent_end" and self.error is None:
            yield Ended()

    def message(self, message: Doc) -> Iterator[Effect]:
        if message.get("role") != "assistant":
            return
        failed = message.get("stopReason") in ("error", "aborted")
        self.error = str(message.get("errorMessage") or "pi reports a failed turn") if failed else None
        content = message.get("content")
        for block in content if isinstance(content, list) else []:
            self.blocks += 1
            if block.get("type") == "text" and block.get("text"):
                yield ItemDone(f"block-{self.blocks}", message_item(str(block["text"]), "completed"))
            elif block.get("type") == "thinking" and block.get("thinking"):
                yield ItemDone(f"block-{self.blocks}", reasoning_item(str(block["thinking"])))

    def started(self, event: Doc) -> Effect:
        call_id, name, arguments = str(event.get("toolCallId")), str(event.get("toolName")), event.get("args")
        item = tool_item(call_id, name, arguments, shell="bash", edits=EDIT_TOOLS)
        self.open[call_id] = item
        return ItemStarted(call_id, item)

    def progress(self, event: Doc) -> Iterator[Effect]:
        """pi repeats the output so far; once it drops the head of it, there is nothing to append to."""
        call_id = str(event.get("toolCallId"))
        text, seen = partial_text(event.get("partialResult")), self.seen.get(call_id, 0)
        if self.open.get(call_id, {}).get("type") == "command_execution" and len(text) > seen:
            self.seen[call_id] = len(text)
            yield OutputDelta(call_id, text[seen:])

    def finished(self, event: Doc) -> Iterator[Effect]:
        call_id = str(event.get("toolCallId"))
        item = self.open.pop(call_id, None)
        if item is None:
            return
        text, failed = partial_text(event.get("result")), event.get("isError") is True
        code = None
        if item["type"] == "command_execution" and (told := EXIT_CODE.search(text)) and failed:
            text, code = text[: told.start()], int(told[1])
        yield from tool_result_effects(call_id, item, text, failed=failed, exit_code=code)

    def exited(self, code: int, seconds: float) -> Iterator[Effect]:
        if self.error is not None:
            yield Ended(self.error)


def partial_text(result: Any) -> str:
    return result_text(result.get("content")) if isinstance(result, dict) else ""
