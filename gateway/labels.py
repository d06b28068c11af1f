"""What the wire says about a call: evidence for the token graph, never identity.

The names are those of the harnesses' own headers and members, each in this one place. Members of the result:
`session`, `agent`, `parent`, `kind`, `retry_count`, `user_agent`; null where the wire is silent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

SESSION_HEADERS = ("x-claude-code-session-id", "session-id", "x-session-id", "session_id", "x-session-affinity")
AGENT_HEADERS = ("x-claude-code-agent-id", "thread-id")
PARENT_HEADERS = ("x-codex-parent-thread-id", "x-parent-session-id")
CODEX_METADATA = "x-codex-turn-metadata"
CODEX_SUBAGENT = "x-openai-subagent"
CLAUDE_SUBAGENT = "cc_is_subagent=true"


def labels(headers: Mapping[str, str], body: Mapping[str, Any]) -> dict[str, Any]:
    metadata = codex_metadata(headers)
    parent = first(headers, PARENT_HEADERS) or metadata.get("parent_turn_id")
    return {
        "session": first(headers, SESSION_HEADERS) or claude_session(body),
        "agent": first(headers, AGENT_HEADERS),
        "parent": parent,
        "kind": kind(headers, body, metadata, parent),
        "retry_count": retry_count(headers),
        "user_agent": headers.get("user-agent"),
    }


def kind(headers: Mapping[str, str], body: Mapping[str, Any], metadata: Mapping[str, Any], parent: Any) -> str | None:
    if metadata.get("request_kind") == "compaction":
        return "compaction"
    system = body.get("system")
    first_block = system[0] if isinstance(system, list) and system else None
    claude = isinstance(first_block, dict) and CLAUDE_SUBAGENT in str(first_block.get("text"))
    return "subagent" if claude or parent or headers.get(CODEX_SUBAGENT) else None


def retry_count(headers: Mapping[str, str]) -> int | None:
    text = headers.get("x-stainless-retry-count", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 6 else None


def first(headers: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((value for name in names if (value := headers.get(name))), None)


def codex_metadata(headers: Mapping[str, str]) -> dict[str, Any]:
    return json_object(headers.get(CODEX_METADATA))


def claude_session(body: Mapping[str, Any]) -> str | None:
    metadata = body.get("metadata")
    user = metadata.get("user_id") if isinstance(metadata, dict) else None
    found = json_object(user).get("session_id")
    return found if isinstance(found, str) else None


def json_object(text: Any) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
