"""Harnesses: one file per agent CLI. A new one is a new file and a line in `HARNESSES`.

A harness says how a turn is started (`Launch`) and turns what its CLI prints into effects: Items, text deltas, the
end of the turn. It starts nothing, stores nothing and knows no session beyond what a turn hands it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from core.errors import unsupported
from core.sandbox import Command, Mount
from core.wire import Agent, Bundle

Doc = dict[str, Any]


@dataclass(frozen=True)
class TurnRequest:
    """What a turn hands to its harness. `thread` is what an earlier turn of the session left with `Thread`."""

    agent: Agent
    bundle: Bundle | None
    door_url: str
    door_key: str
    text: str
    env: dict[str, str]
    thread: str | None


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

    def feed(self, data: bytes) -> Iterator[Effect]:
        raise NotImplementedError

    def exited(self, code: int, seconds: float) -> Iterator[Effect]:
        """The process is gone. A harness without a terminal event of its own ends the turn here."""
        del code, seconds
        return iter(())


class Harness:
    """One agent CLI. `protocol` is what it speaks to its model; None: it calls none and takes no bundle."""

    name: ClassVar[str]
    protocol: ClassVar[str | None]
    package: ClassVar[str]
    verbosity: ClassVar[bool] = False
    config: ClassVar[frozenset[str]] = frozenset()

    def mounts(self) -> list[Mount] | None:
        """What it needs inside the sandbox; None when it is not installed."""
        raise NotImplementedError

    def launch(self, turn: TurnRequest) -> Launch:
        raise NotImplementedError

    def reader(self) -> OutputReader:
        raise NotImplementedError

    def admit(self, agent: Agent, bundle: Bundle | None) -> None:
        """Refuses what this harness cannot run (AGENTS_API 11.1). Raises ApiError."""
        if self.mounts() is None:
            message = f"The harness '{self.name}' is not installed: run `pip install {self.package}` and start again."
            raise unsupported(message, "agent.x_agents_core.harness")
        provider = "x_agents_core.model_provider"
        if self.protocol is None and bundle is not None:
            raise unsupported(f"The harness '{self.name}' calls no model.", provider)
        if self.protocol is not None and bundle is None:
            message = f"The harness '{self.name}' needs a model: send '{provider}'."
            raise unsupported(message, provider, "model_provider_required")
        if bundle is not None and bundle.protocol != self.protocol:
            message = f"The harness '{self.name}' speaks '{self.protocol}', not '{bundle.protocol}'."
            raise unsupported(message, f"{provider}.protocol")
        if self.protocol is not None and not agent.model:
            raise unsupported(f"The harness '{self.name}' needs a model name.", "agent.model")
        if agent.verbosity != "medium" and not self.verbosity:
            raise unsupported(f"The harness '{self.name}' has no verbosity.", "agent.text.verbosity")
        self.check_config(agent.harness_config)

    def check_config(self, config: Doc) -> None:
        for name in config:
            path = f"agent.x_agents_core.harness_config.{name}"
            raise unsupported(f"The harness '{self.name}' has no setting '{name}'.", path)


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


def reasoning_item(text: str) -> Doc:
    return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}], "status": "completed"}


def registry() -> dict[str, Harness]:
    """The harnesses of this server by id, the default first."""
    from core.harnesses.claude_sdk import ClaudeSdk
    from core.harnesses.codex import Codex
    from core.harnesses.shell import Shell

    return {harness.name: harness for harness in (Codex(), ClaudeSdk(), Shell())}
