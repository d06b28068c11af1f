"""The documents the API answers with, made from what is stored. Pure: no clock, no I/O.

A stored session document holds what never changes, the environment's state, and internal members that start with an
underscore; `session_document` derives the rest (status, error, usage) from its turns.
"""

from __future__ import annotations

from typing import Any

from core.budget import Ceilings
from core.egress import sum_usage
from core.wire import SessionCreate

Doc = dict[str, Any]
ACTIVE = ("queued", "in_progress", "waiting")
TERMINAL = ("completed", "failed", "cancelled")


def new_session(request: SessionCreate, session_id: str, ids: tuple[str, str], harness: str, now: int) -> Doc:
    """The stored form. `ids` are those of the agent and of the environment; file ids are made from the latter."""
    agent_id, environment_id = ids
    extension: Doc = {}
    if request.bundle is not None:
        extension["model_provider"] = request.bundle.public()
    if request.limits:
        extension["limits"] = request.limits
    return {
        "id": session_id,
        "object": "agent.session",
        "created_at": now,
        "last_active_at": now,
        "agent": agent_document(request, agent_id, harness),
        "environment": environment_document(request, environment_id),
        "metadata": request.metadata,
        "vault_ids": [],
        "spend_control": spend_document(request.ceilings, 0),
        "x_agents_core": extension,
        "_environment": {"status": "pending", "error": None},
        "_secrets": request.bundle is not None or bool(request.environment.env),
        "_thread": None,
        "_usage": None,
    }


def spend_document(ceilings: Ceilings, cents: float) -> Doc | None:
    return None if ceilings.spend_cents is None else {"limit": ceilings.spend_cents, "consumed": int(cents)}


def agent_document(request: SessionCreate, agent_id: str, harness: str) -> Doc:
    agent = request.agent
    return {
        "id": agent_id,
        "model": agent.model or "none",
        "name": None,
        "instructions": agent.instructions,
        "tools": [],
        "reasoning": {"effort": None, "summary": None},
        "text": {"format": {"type": "text"}, "verbosity": agent.verbosity},
        "multi_agent": {"enabled": False, "max_concurrent_subagents": None},
        "service_tier": "auto",
        "compaction": {"async": False},
        "experimental": {"time_awareness": False},
        "x_agents_core": {"harness": harness, "harness_config": agent.harness_config},
    }


def environment_document(request: SessionCreate, environment_id: str) -> Doc:
    network = request.environment.network
    files = [
        {"id": f"{environment_id}-{index}", "type": "inline", "path": file.path, "size_bytes": len(file.data)}
        for index, file in enumerate(request.environment.files)
    ]
    return {
        "id": environment_id,
        "type": "openai_hosted",
        "container_size": request.environment.container_size,
        "network": {"access": network.access, "allowed_domains": network.domains},
        "files": files,
        "packages": {"npm": [], "python": [], "system": []},
        "plugins": [],
        "skills": [],
        "capability_directories": [],
    }


def session_document(stored: Doc, last: Doc | None) -> Doc:
    """A session as the API shows it. `last`: its latest root turn (AGENTS_API 3.7, first match wins)."""
    environment = stored["_environment"]
    if environment["status"] in ("failed", "expired"):
        status, error = "failed", environment["error"]
    elif last is not None and last["status"] in ACTIVE:
        status, error = "in_progress", None
    elif last is not None and last["status"] == "failed":
        status, error = "failed", last["error"]["message"]
    else:
        status, error = "idle", None
    shown = {name: value for name, value in stored.items() if not name.startswith("_")}
    usage = stored["_usage"] if last is not None and last["status"] in TERMINAL else None
    return {**shown, "status": status, "error": error, "required_actions": [], "usage": usage}


def add_usage(stored: Doc, turn: Doc, *, first: bool) -> None:
    """Adds a turn that has ended: the sum over root turns, null for good once one is unknown."""
    known = turn["usage"] if first else stored["_usage"] and turn["usage"]
    stored["_usage"] = sum_usage([turn["usage"]] if first else [stored["_usage"], turn["usage"]]) if known else None


def environment_state(stored: Doc) -> Doc:
    """What environment events carry."""
    state = stored["_environment"]
    error = state["error"] and {
        "type": "server_error",
        "code": "environment_error",
        "message": state["error"],
    }
    return {
        "id": stored["environment"]["id"],
        "type": "openai_hosted",
        "status": state["status"],
        "error": error,
    }


def new_turn(turn_id: str, session: Doc, now: int) -> Doc:
    return {
        "id": turn_id,
        "object": "agent.session.turn",
        "session_id": session["id"],
        "agent_id": session["agent"]["id"],
        "subagent_id": None,
        "created_at": now,
        "started_at": None,
        "completed_at": None,
        "status": "queued",
        "error": None,
        "usage": None,
        "x_agents_core": {
            "usage_source": None,
            "failure": None,
            "warnings": [],
            "timings": {"preparing_s": None},  # of the environment, in the turn that waited for it
        },
    }


def user_message(item_id: str, turn_id: str, content: list[Doc]) -> Doc:
    head = {"id": item_id, "type": "message", "turn_id": turn_id, "role": "user", "phase": None}
    return {**head, "content": content, "status": "completed"}


def artifact_document(artifact_id: str, session: Doc, turn_id: str, path: str, size: int, now: int) -> Doc:
    return {
        "id": artifact_id,
        "object": "agent.session.artifact",
        "session_id": session["id"],
        "turn_id": turn_id,
        "environment_id": session["environment"]["id"],
        "path": path,
        "size_bytes": size,
        "created_at": now,
    }
