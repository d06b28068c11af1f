"""`claude_sdk`: Claude Code, the CLI that the Agent SDK's wheel carries, one process per turn.

It speaks Anthropic Messages only. It runs in its scripted mode (`--bare`: no plugins, hooks, user settings), with the
tools that work without network. Later turns resume the conversation by its id.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from core.errors import unsupported
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
    one_of,
    parse_line,
    reasoning_item,
    result_text,
    tool_item,
    tool_result_effects,
    wheel_version,
)
from core.sandbox import Command, Mount

INSIDE = "/opt/claude/claude"
EFFORTS = ("low", "medium", "high", "xhigh", "max")
THINKING = ("adaptive", "enabled", "disabled")
EDIT_TOOLS = ("Edit", "Write", "MultiEdit", "NotebookEdit")
EXIT_CODE = re.compile(r"Exit code (\d+)\n?")
RETRIES = 4
INSTRUCTIONS = ".claude/instructions.md"


class ClaudeSdk(Harness):
    name = "claude_sdk"
    protocols = ("anthropic",)
    package = "claude-agent-sdk"

    def mounts(self) -> list[Mount] | None:
        found = importlib.util.find_spec("claude_agent_sdk")
        if found is None or found.origin is None:
            return None
        binary = Path(found.origin).with_name("_bundled") / "claude"
        return [Mount(binary, INSIDE)] if binary.is_file() else None

    def version(self) -> str | None:
        return wheel_version(self.package)

    def check_config(self, config: Doc) -> None:
        one_of(config, "effort", EFFORTS)
        thinking = config.get("thinking")
        if thinking is not None:
            path = "agent.x_agents_core.harness_config.thinking"
            if not isinstance(thinking, dict) or thinking.get("type") not in THINKING:
                raise unsupported(f"'thinking.type' must be one of {', '.join(THINKING)}.", path)
            budget = thinking.get("budgetTokens")
            if budget is not None and (type(budget) is not int or budget <= 0 or thinking["type"] != "enabled"):
                raise unsupported("'thinking.budgetTokens' is a positive integer that goes with 'enabled'.", path)
            for name in thinking.keys() - {"type", "budgetTokens"}:
                raise unsupported(f"'thinking.{name}' is not supported by this server.", f"{path}.{name}")
        super().check_config({name: value for name, value in config.items() if name not in ("effort", "thinking")})

    def launch(self, turn: TurnRequest) -> Launch:
        argv = [INSIDE, "-p", "--bare", "--output-format", "stream-json", "--verbose"]
        argv += ["--dangerously-skip-permissions", "--model", turn.agent.model or ""]
        if turn.thread:
            argv += ["--resume", turn.thread]
        files = {}
        if turn.agent.instructions:
            files[INSTRUCTIONS] = turn.agent.instructions.encode(errors="replace")
            argv += ["--append-system-prompt-file", f"{turn.home}/{INSTRUCTIONS}"]
        if effort := turn.agent.harness_config.get("effort"):
            argv += ["--effort", effort]
        command = Command(argv, environment(turn), stdin=turn.text.encode(errors="replace"))
        return Launch(command, files)

    def reader(self) -> OutputReader:
        return ClaudeReader()


def environment(turn: TurnRequest) -> dict[str, str]:
    """What Claude Code reads from its environment; our names win over the session's."""
    ours = {
        "ANTHROPIC_BASE_URL": turn.door_url,
        "ANTHROPIC_API_KEY": turn.door_key,
        "CLAUDE_CONFIG_DIR": f"{turn.home}/.claude",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_RETRIES": str(RETRIES),
        "DISABLE_AUTOUPDATER": "1",
        "IS_SANDBOX": "1",
    }
    if turn.bundle and turn.bundle.max_output_tokens:
        ours["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(turn.bundle.max_output_tokens)
    if turn.bundle and turn.bundle.context_window:
        ours["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = str(turn.bundle.context_window)
    thinking = turn.agent.harness_config.get("thinking") or {}
    if thinking.get("type") == "disabled":
        ours["MAX_THINKING_TOKENS"] = "0"
    elif "budgetTokens" in thinking:
        ours["MAX_THINKING_TOKENS"] = str(thinking["budgetTokens"])
    return {**turn.env, **ours}


class ClaudeReader(OutputReader):
    """Content blocks become items; a tool's result completes the item that its call opened."""

    def __init__(self) -> None:
        self.open: dict[str, Doc] = {}
        self.blocks = 0

    def feed(self, data: bytes) -> Iterator[Effect]:
        event = parse_line(data)
        if event is None:
            return
        kind = event.get("type")
        if kind == "system" and event.get("subtype") == "init":
            yield Thread(str(event.get("session_id")))
        elif kind == "result":
            yield Ended(failure_of(event))
        elif kind in ("assistant", "user") and isinstance(event.get("message"), dict):
            content = event["message"].get("content")
            for block in content if isinstance(content, list) else []:
                if isinstance(block, dict):
                    yield from self.assistant_block(block) if kind == "assistant" else self.user_block(block)

    def assistant_block(self, block: Doc) -> Iterator[Effect]:
        self.blocks += 1
        key, kind = f"block-{self.blocks}", block.get("type")
        if kind == "text":
            yield ItemDone(key, message_item(str(block.get("text", "")), "completed"))
        elif kind == "thinking" and block.get("thinking"):
            yield ItemDone(key, reasoning_item(str(block["thinking"])))
        elif kind == "tool_use":
            name, arguments, call_id = str(block.get("name")), block.get("input"), str(block.get("id"))
            item = tool_item(call_id, name, arguments, shell="Bash", edits=EDIT_TOOLS)
            self.open[call_id] = item
            yield ItemStarted(call_id, item)

    def user_block(self, block: Doc) -> Iterator[Effect]:
        call_id = str(block.get("tool_use_id"))
        item = self.open.pop(call_id, None)
        if block.get("type") != "tool_result" or item is None:
            return
        text, failed = result_text(block.get("content")), block.get("is_error") is True
        code = None
        if item["type"] == "command_execution" and failed and (told := EXIT_CODE.match(text)):
            text, code = text[told.end() :], int(told[1])
        yield from tool_result_effects(call_id, item, text, failed=failed, exit_code=code)


def failure_of(result: Doc) -> str | None:
    """None when the turn succeeded, else Claude Code's own word for what went wrong."""
    if not result.get("is_error") and result.get("subtype") == "success":
        return None
    return str(result.get("result") or result.get("subtype") or "Claude Code reports a failed turn")
