"""`codex`: the Codex CLI in its non-interactive mode, `codex exec --json`, one process per turn.

It speaks the Responses API only and takes its endpoint from configuration, not from the environment. Later turns of a
session resume the thread that the first one named. Subagents, plugins and hosted tools are off: they need the network,
or turns that this server does not serve yet.
"""

from __future__ import annotations

import importlib.util
import json
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
    Notice,
    OutputReader,
    Thread,
    TurnRequest,
    call_item,
    command_item,
    message_item,
    one_of,
    parse_line,
    reasoning_item,
    wheel_version,
)
from core.sandbox import Command, Mount

INSIDE = "/opt/codex"
KEY_VARIABLE = "CODEX_DOOR_KEY"
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
OFF = ("multi_agent", "apps", "plugins", "image_generation", "browser_use", "computer_use", "memories")
RETRIES = 3  # per request, and again per broken stream: 16 requests at the most to an endpoint that always fails


class Codex(Harness):
    name = "codex"
    protocols = ("responses",)
    package = "openai-codex-cli-bin"
    verbosity = True

    def mounts(self) -> list[Mount] | None:
        found = importlib.util.find_spec("codex_cli_bin")
        if found is None or found.origin is None:
            return None
        package = Path(found.origin).parent
        return [Mount(package, INSIDE), Mount(package / "codex-path", "/opt/tools")]

    def version(self) -> str | None:
        return wheel_version(self.package)

    def check_config(self, config: Doc) -> None:
        one_of(config, "model_reasoning_effort", EFFORTS)
        super().check_config({name: value for name, value in config.items() if name != "model_reasoning_effort"})

    def launch(self, turn: TurnRequest) -> Launch:
        argv = [f"{INSIDE}/bin/codex", "exec"]
        if turn.thread:
            argv += ["resume", turn.thread]
        argv += ["--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
        argv += ["--model", turn.agent.model or ""]
        for feature in OFF:
            argv += ["--disable", feature]
        env = {**turn.env, KEY_VARIABLE: turn.door_key, "CODEX_HOME": f"{turn.home}/.codex"}
        command = Command([*argv, "-"], env, stdin=turn.text.encode(errors="replace"))
        return Launch(command, {".codex/config.toml": toml(settings(turn))})

    def reader(self) -> OutputReader:
        return CodexReader()


def settings(turn: TurnRequest) -> Doc:
    """Configuration by dotted name: the door as the only provider, and what the session asked for."""
    provider = {
        "name": "door",
        "base_url": f"{turn.door_url}/v1",
        "env_key": KEY_VARIABLE,
        "wire_api": "responses",
        "request_max_retries": RETRIES,
        "stream_max_retries": RETRIES,
    }
    found: Doc = {f"model_providers.door.{name}": value for name, value in provider.items()}
    found |= {"model_provider": "door", "web_search": "disabled", "check_for_update_on_startup": False}
    found |= {"analytics.enabled": False}
    if turn.agent.instructions:
        found["developer_instructions"] = turn.agent.instructions
    if turn.agent.verbosity != "medium":
        found["model_verbosity"] = turn.agent.verbosity
    found |= turn.agent.harness_config
    if turn.bundle and turn.bundle.context_window:
        found["model_context_window"] = turn.bundle.context_window
    if turn.bundle and turn.bundle.max_output_tokens:
        found["model_max_output_tokens"] = turn.bundle.max_output_tokens
    return found


def toml(values: Doc) -> bytes:
    """A TOML document of dotted names: strings, numbers and booleans are spelled as in JSON, but for DEL."""
    spelled = {name: json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f") for name, value in values.items()}
    return "".join(f"{name} = {value}\n" for name, value in spelled.items()).encode(errors="replace")


class CodexReader(OutputReader):
    def feed(self, data: bytes) -> Iterator[Effect]:
        event = parse_line(data)
        if event is None:
            return
        kind, item = event.get("type"), event.get("item")
        if kind == "thread.started":
            yield Thread(str(event.get("thread_id")))
        elif kind == "turn.completed":
            yield Ended()
        elif kind == "turn.failed":
            yield Ended(text_of(event.get("error")) or "codex reports a failed turn")
        elif kind == "error":
            yield Notice(text_of(event))
        elif isinstance(item, dict) and kind in ("item.started", "item.updated", "item.completed"):
            yield from item_effects(item, done=kind == "item.completed")


def text_of(error: Any) -> str:
    return str(error.get("message", "")) if isinstance(error, dict) else str(error or "")


def item_effects(item: Doc, *, done: bool) -> Iterator[Effect]:
    if item.get("type") == "error":
        yield Notice(text_of(item))
        return
    key, converted = str(item.get("id")), convert(item, done=done)
    if converted is not None:
        yield ItemDone(key, converted) if done else ItemStarted(key, converted)


def convert(item: Doc, *, done: bool) -> Doc | None:
    """A thread item of codex as an Item of the API; None while there is nothing to show."""
    kind = item.get("type")
    reported = item.get("status") if item.get("status") in ("in_progress", "completed", "failed") else None
    status = reported or ("completed" if done else "in_progress")
    if done and status == "in_progress":
        status = "completed"
    if kind == "command_execution":
        output, code = item.get("aggregated_output"), item.get("exit_code")
        return command_item(str(item.get("command", "")), status, output if done else None, code)
    if kind == "agent_message":
        return message_item(str(item.get("text", "")), "completed" if done else "in_progress")
    if kind == "reasoning":
        return reasoning_item(str(item.get("text", ""))) if done else None
    if kind == "file_change":
        return call_item(str(item.get("id")), "apply_patch", {"changes": item.get("changes", [])}, status)
    if kind == "mcp_tool_call":
        members = {name: item.get(name) for name in ("arguments", "error")}
        names = {"server_label": item.get("server"), "name": item.get("tool"), "output": item.get("result")}
        return {"type": "mcp_call", **names, **members, "status": status}
    if kind == "web_search":
        action = {"type": "search", "query": item.get("query")}
        return {"type": "web_search_call", "action": action, "status": status}
    if kind == "todo_list":
        return call_item(str(item.get("id")), "update_plan", {"items": item.get("items", [])}, status)
    # A kind of a newer CLI: kept visible as a call under its own name rather than dropped.
    rest = {name: value for name, value in item.items() if name not in ("id", "type", "status")}
    return call_item(str(item.get("id")), str(kind), rest, status)
