"""Harnesses: one file per agent CLI. A new one is a new file and a line in `HARNESSES`.

A harness says how a turn is started (`Launch`) and turns what its CLI prints into effects: Items, text deltas, the
end of the turn. It starts nothing, stores nothing and knows no session beyond what a turn hands it.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from core.errors import unsupported
from core.sandbox import Command, Mount
from core.wire import Agent, Bundle

Doc = dict[str, Any]


@dataclass(frozen=True)
class TurnRequest:
    """What a turn hands to its harness. `thread` is what an earlier turn of the session left with `Thread`,
    `home` the path of the sandbox's home directory."""

    agent: Agent
    bundle: Bundle | None
    door_url: str
    door_key: str
    text: str
    env: dict[str, str]
    thread: str | None
    home: str


@dataclass(frozen=True)
class Launch:
    """The command of a turn, and files to lay into the sandbox's home first (relative path → content)."""

    command: Command
    home_files: dict[str, bytes] = field(default_factory=dict)


# Effects of a harness's output, in order. `key` names an item within its turn.


@dataclass(frozen=True)
class ItemStarted:
    key: str
    item: Doc  # type and members, without id and turn_id


@dataclass(frozen=True)
class OutputDelta:
    """More output of a command, or more text of a message."""

    key: str
    text: str


@dataclass(frozen=True)
class ItemDone:
    """The final state. An item that never started counts as started by this."""

    key: str
    item: Doc


@dataclass(frozen=True)
class Thread:
    """The harness's own name for the conversation, needed to go on in a later turn."""

    name: str


@dataclass(frozen=True)
class Notice:
    """Something the harness warned of that is no failure."""

    message: str


@dataclass(frozen=True)
class Ended:
    """The harness's terminal event. `error` is its own word for what went wrong, None when it succeeded."""

    error: str | None = None


Effect = ItemStarted | OutputDelta | ItemDone | Thread | Notice | Ended


class OutputReader:
    """Turns one turn's output into effects. Unparsable lines are skipped: a CLI may print anything."""

    lines = True  # whether `feed` gets whole lines; else chunks as they come

    def skips(self, line: bytes) -> bool:
        """Whether a line is known to hold nothing, without a look into it."""
        del line
        return False

    def feed(self, data: bytes) -> Iterator[Effect]:
        raise NotImplementedError

    def exited(self, code: int, seconds: float) -> Iterator[Effect]:
        """The process is gone. A harness without a terminal event of its own ends the turn here."""
        del code, seconds
        return iter(())


class Harness:
    """One agent CLI. `protocols` is what it speaks to its model; none: it calls no model and takes no bundle."""

    name: ClassVar[str]
    protocols: ClassVar[tuple[str, ...]]
    package: ClassVar[str]
    install: ClassVar[str] = "pip install -r requirements.txt"
    verbosity: ClassVar[bool] = False

    def mounts(self) -> list[Mount] | None:
        """What it needs inside the sandbox; None when it is not installed."""
        raise NotImplementedError

    def version(self) -> str | None:
        """What is installed, as its package tells."""
        raise NotImplementedError

    def launch(self, turn: TurnRequest) -> Launch:
        raise NotImplementedError

    def reader(self) -> OutputReader:
        raise NotImplementedError

    def admit(self, agent: Agent, bundle: Bundle | None) -> None:
        """Refuses what this harness cannot run (AGENTS_API 11.1). Raises ApiError."""
        if self.mounts() is None:
            message = f"The harness '{self.name}' is not installed: it comes with {self.package}; run `{self.install}`."
            raise unsupported(message, "agent.x_agents_core.harness")
        provider = "x_agents_core.model_provider"
        if not self.protocols and bundle is not None:
            raise unsupported(f"The harness '{self.name}' calls no model.", provider)
        if self.protocols and bundle is None:
            message = f"The harness '{self.name}' needs a model: send '{provider}'."
            raise unsupported(message, provider, "model_provider_required")
        if bundle is not None and bundle.protocol not in self.protocols:
            message = f"The harness '{self.name}' speaks {' or '.join(self.protocols)}, not '{bundle.protocol}'."
            raise unsupported(message, f"{provider}.protocol")
        if self.protocols and not agent.model:
            raise unsupported(f"The harness '{self.name}' needs a model name.", "agent.model")
        if agent.verbosity != "medium" and not self.verbosity:
            raise unsupported(f"The harness '{self.name}' has no verbosity.", "agent.text.verbosity")
        self.check_config(agent.harness_config)

    def check_config(self, config: Doc) -> None:
        for name in config:
            path = f"agent.x_agents_core.harness_config.{name}"
            raise unsupported(f"The harness '{self.name}' has no setting '{name}'.", path)


def wheel_version(package: str) -> str | None:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return None


def result_text(content: Any) -> str:
    """The text of a tool's result: a string, or a list of text parts."""
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content or "")


def tool_result_effects(call_id: str, item: Doc, text: str, *, failed: bool, exit_code: int | None) -> Iterator[Effect]:
    """Completes the item that a tool's call opened; a call other than an edit gets its output as an item of its own."""
    status = "failed" if failed else "completed"
    if item["type"] == "command_execution":
        yield ItemDone(call_id, {**item, "status": status, "output": text, "exit_code": exit_code})
        return
    yield ItemDone(call_id, {**item, "status": status})
    if item["name"] != "apply_patch":
        members = {"output": None if failed else text, "error": text if failed else None}
        output_item = {"type": "function_call_output", "call_id": call_id, **members, "status": status}
        yield ItemDone(f"{call_id}-output", output_item)


def parse_line(data: bytes) -> Doc | None:
    """One event of a CLI's JSON output; None for anything else. Numbers that JSON cannot hold become text."""

    def number(text: str) -> float | str:
        value = float(text)
        return value if math.isfinite(value) else text

    try:
        event = json.loads(data, parse_float=number, parse_constant=str)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) else None


def one_of(config: Doc, name: str, values: tuple[str, ...]) -> None:
    """Raises ApiError when the setting is there and not one of `values`."""
    if name in config and config[name] not in values:
        path = f"agent.x_agents_core.harness_config.{name}"
        raise unsupported(f"'{name}' must be one of {', '.join(values)}.", path)


def message_item(text: str, status: str) -> Doc:
    content = [{"type": "output_text", "text": text}] if status != "in_progress" else []
    return {"type": "message", "role": "assistant", "phase": None, "content": content, "status": status}


def command_item(
    command: str, status: str, output: str | None = None, exit_code: int | None = None, cwd: str | None = None
) -> Doc:
    members = {"command": command, "cwd": cwd, "duration_ms": None, "exit_code": exit_code, "output": output}
    return {"type": "command_execution", **members, "status": status}


def call_item(call_id: str, name: str, arguments: Any, status: str) -> Doc:
    return {
        "type": "function_call",
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
        "status": status,
    }


def tool_item(call_id: str, name: str, arguments: Any, *, shell: str, edits: tuple[str, ...]) -> Doc:
    """The item that a tool's call opens: a command for the shell tool, `apply_patch` for a native edit."""
    command = arguments.get("command") if isinstance(arguments, dict) else None
    if name == shell and isinstance(command, str):
        return command_item(command, "in_progress")
    if name in edits:
        return call_item(call_id, "apply_patch", {"tool": name, "input": arguments}, "in_progress")
    return call_item(call_id, name, arguments, "in_progress")


def reasoning_item(text: str) -> Doc:
    return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}], "status": "completed"}


def registry(npm_prefix: Path) -> dict[str, Harness]:
    """The harnesses of this server by id, the default first."""
    from core.harnesses.claude_sdk import ClaudeSdk
    from core.harnesses.codex import Codex
    from core.harnesses.opencode import OpenCode
    from core.harnesses.pi import Pi
    from core.harnesses.shell import Shell

    found = (Codex(), ClaudeSdk(), Pi(npm_prefix), OpenCode(npm_prefix), Shell())
    return {harness.name: harness for harness in found}
