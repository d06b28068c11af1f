"""The door with real CLIs: what reaches the model, what a failing model makes of a turn, and where the key is not."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import HOSTED, Core, connect, service
from model_endpoint import TEXT, ModelEndpoint

from core.egress import DOOR_URL, Call, Door
from core.failures import turn_failure
from core.wire import Bundle

KEY = "sk-canary-4f1d9c27b35e"
Doc = dict[str, Any]

# ── the causes of AGENTS_API 4.3 ──────────────────────────────────────────────────────────────────

# Causes that a provider names itself: the status that it says them with.
NAMED = {
    "400-cyber_policy": "model",
    "403-misalignment_policy_violation": "model",
    "429-flex_unavailable": "provider",
    "429-usage_limit_exceeded": "provider",
    "429-project_spend_limit_exceeded": "provider",
    "429-organization_spend_limit_exceeded": "provider",
    "403-organization_usage_limit_exceeded": "provider",
    "403-billing_not_active": "provider",
    "402-credit_balance_exhausted": "provider",
}

# behaviour: code, class, what the message holds
CAUSES: dict[str, tuple[str, str, str]] = {
    "401": ("authentication_error", "provider", "answered 401"),
    "403": ("authentication_error", "provider", "answered 403"),
    "404": ("resource_not_found", "provider", "answered 404"),
    "429": ("rate_limit_exceeded", "provider", "answered 429"),
    "402": ("usage_limit_exceeded", "provider", "answered 402"),
    "408": ("request_timeout", "provider", "answered 408"),
    "422": ("invalid_request", "provider", "answered 422"),
    "500": ("server_error", "provider", "answered 500"),
    "503": ("server_overloaded", "provider", "answered 503"),
    "529": ("server_overloaded", "provider", "answered 529"),
    "too_long": ("context_length_exceeded", "model", "answered 400"),
    "incomplete": ("max_output_tokens", "model", "token limit"),
    "quota": ("credit_balance_exhausted", "provider", "no credit"),
    "cut": ("connection_failed", "provider", "broke off"),
    "ends_early": ("connection_failed", "provider", "broke off"),
    "page": ("server_error", "provider", "none of a model"),
    "redirect": ("server_error", "provider", "answered 307"),
    "echo": ("authentication_error", "provider", "no such key: [key]"),
    "echo_stream": ("server_error", "provider", "no such key: [key]"),
    "unresolvable": ("connection_failed", "provider", "cannot be reached"),
    **{said: (said[4:], class_, f"answered {said[:3]}") for said, class_ in NAMED.items()},
}
# Claude Code waits 10 s between its attempts: 529 stands for all that it repeats.
RUN = {
    "codex": "401 402 404 408 422 429 500 503 too_long incomplete quota cut ends_early page echo echo_stream redirect "
    "unresolvable " + " ".join(NAMED),
    "claude_sdk": "403 404 529 too_long incomplete ends_early page echo_stream",
}
ROWS = [(harness, behaviour) for harness, behaviours in RUN.items() for behaviour in behaviours.split()]
ELSEWHERE = {"unresolvable": f"https://{'x' * 70}.invalid/v1"}


@pytest.fixture(scope="module", autouse=True)
def failing(core: Core, model: ModelEndpoint) -> Iterator[dict[tuple[str, str], str]]:
    """A session for each row, all at once: they mostly wait, while the other tests run."""
    sessions = dict[tuple[str, str], str]()
    for harness, behaviour in ROWS:
        bundle = model.bundle(harness, behaviour, f"{harness}-{behaviour}", KEY)
        bundle["base_url"] = ELSEWHERE.get(behaviour, bundle["base_url"])
        sessions[harness, behaviour] = core.agent(harness, bundle).id
    yield sessions
    for session_id in sessions.values():
        core.raw.delete(f"/agents/sessions/{session_id}?cancel=true")


# ── what passes ───────────────────────────────────────────────────────────────────────────────────


@dataclass
class Done:
    turn: Any
    items: list[Doc]
    endpoint: ModelEndpoint
    label: str


def done(core: Core, model: ModelEndpoint, harness: str, behaviour: str, **options: Any) -> Done:
    label = f"{harness}-{behaviour}-{time.monotonic_ns()}"
    if "script" in options:
        model.scripts[label] = options.pop("script")
    session = core.agent(harness, model.bundle(harness, behaviour, label, KEY), **options)
    turn = core.turn(session.id)
    return Done(turn, [item.to_dict() for item in core.sessions.items.list(session.id, order="asc")], model, label)


USED = {
    "codex": {"input": 11, "cached": 5, "output": 7, "reasoning": 3},
    "claude_sdk": {"input": 11, "cached": 5, "output": 7, "reasoning": 0},
}


@pytest.mark.parametrize("harness", ["codex", "claude_sdk"])
def test_usage_is_what_the_provider_reported(core: Core, model: ModelEndpoint, harness: str) -> None:
    turn, used = done(core, model, harness, "ok").turn, USED[harness]
    assert turn.status == "completed"
    assert turn.usage.to_dict() == {
        "input_tokens": used["input"],
        "input_tokens_details": {"cached_tokens": used["cached"]},
        "output_tokens": used["output"],
        "output_tokens_details": {"reasoning_tokens": used["reasoning"]},
        "total_tokens": used["input"] + used["output"],
    }
    assert turn.to_dict()["x_agents_core"]["usage_source"] == "egress"


@pytest.mark.parametrize("harness", ["codex"])
def test_missing_usage_is_null_and_never_zero(core: Core, model: ModelEndpoint, harness: str) -> None:
    turn = done(core, model, harness, "no_usage").turn
    assert (turn.status, turn.usage) == ("completed", None)
    assert core.sessions.retrieve(turn.session_id).usage is None


AUTH = {"codex": ("authorization", f"Bearer {KEY}"), "claude_sdk": ("x-api-key", KEY)}
PROBE = """
echo "door: $ANTHROPIC_BASE_URL $CODEX_DOOR_KEY" | sed 's/sandbox-[0-9a-f]*/PLACEHOLDER/'
cat /proc/self/environ /proc/1/environ /proc/*/cmdline 2>/dev/null | tr '\\0' '\\n'
cat ~/.codex/config.toml ~/.claude/* 2>/dev/null
"""


@pytest.mark.parametrize("harness", ["codex", "claude_sdk"])
def test_the_key_is_put_on_outside_and_never_inside(core: Core, model: ModelEndpoint, harness: str) -> None:
    """The agent runs a command that looks for it; the model gets it, and nothing of the sandbox's own auth."""
    found = done(core, model, harness, "runs", script=PROBE)
    assert found.turn.status == "completed"
    (command,) = (item for item in found.items if item["type"] == "command_execution")
    assert "4141" in command["output"] or "PLACEHOLDER" in command["output"]
    assert KEY not in json.dumps(found.items)
    assert found.items[-1]["content"][0]["text"] == TEXT
    for request in model.requests[found.label]:
        name, value = AUTH[harness]
        assert request.headers[name] == value
        assert {"authorization", "x-api-key"} & set(request.headers) == {name}
        assert "sandbox-" not in json.dumps(request.headers)


DOOR = "http://127.0.0.1:4141"
REFUSALS = f"""
key=$CODEX_DOOR_KEY
ask() {{ curl -s -o /dev/null -w '%{{http_code}} ' --max-time 5 -H "Authorization: Bearer $key" "$@"; }}
ask -d '{{}}' {DOOR}/v1/chat/completions
ask -d '{{}}' {DOOR}/v1/responses/../models
ask -d '{{}}' --path-as-is {DOOR}/v1/responses/../models
ask -d '{{}}' '{DOOR}/v1/responses?x=1'
ask {DOOR}/v1/models
ask {DOOR}/v1/responses
ask -d '{{}}' -H 'Host: models.example' {DOOR}/v1/responses
ask -d '{{}}' -x {DOOR} http://models.example/v1/responses
ask -x {DOOR} https://models.example/
key=wrong
ask -d '{{}}' {DOOR}/v1/responses
ask -d '{{}}' -H 'Authorization:' {DOOR}/v1/responses
echo; curl -s --max-time 3 MODEL > /dev/null; echo "direct: $?"
"""


def test_the_door_lets_nothing_else_out(core: Core, model: ModelEndpoint) -> None:
    script = REFUSALS.replace("MODEL", f"{model.url}/ok/leak/v1/responses")
    found = done(core, model, "codex", "runs", script=script)
    (command,) = (item for item in found.items if item["type"] == "command_execution")
    answers, direct = command["output"].strip().splitlines()[-2:]
    assert set(answers.split()) <= {"000", "401", "404"} and len(answers.split()) == 11
    assert direct.startswith("direct: ") and direct != "direct: 0"
    assert len(model.requests[found.label]) == 2  # the harness's own calls
    assert not any(request.path.startswith("/ok/leak") for request in model.requests["leak"])


@pytest.mark.parametrize("harness, path", [("codex", "responses"), ("claude_sdk", "messages")])
def test_calls_go_to_the_path_of_the_protocol(core: Core, model: ModelEndpoint, harness: str, path: str) -> None:
    """Below the whole base URL, whatever stands in front; for `anthropic` with or without its `/v1`."""
    label = f"path-{harness}"
    bundle = model.bundle(harness, "ok", label)
    turns = [core.turn(core.agent(harness, bundle).id)]
    if harness == "claude_sdk":
        without = {**bundle, "base_url": bundle["base_url"].removesuffix("/v1") + "/"}
        turns.append(core.turn(core.agent(harness, without).id))
    assert {turn.status for turn in turns} == {"completed"}
    expected = f"/ok/{label}/v1/{path}"
    paths = {request.path.partition("?")[0] for request in model.requests[label]}
    assert paths - {f"{expected}/count_tokens"} == {expected}


def test_instructions_and_the_model_s_name_arrive(core: Core, model: ModelEndpoint) -> None:
    for harness in ("codex", "claude_sdk"):
        label = f"instructed-{harness}"
        agent = {"model": "some/model-7b", "instructions": 'Mind the "gap" ü', "x_agents_core": {"harness": harness}}
        body = {
            "agent": agent,
            "environment": HOSTED,
            "input": "the task itself",
            "x_agents_core": {"model_provider": model.bundle(harness, "ok", label)},
        }
        assert core.turn(core.post("/agents/sessions", body).json()["id"]).status == "completed"
        sent = model.requests[label][-1].body
        assert sent["model"] == "some/model-7b"
        assert 'Mind the \\"gap\\" ü' in json.dumps(sent, ensure_ascii=False) and "the task itself" in json.dumps(sent)


def test_a_model_that_says_nothing_in_time(model: ModelEndpoint) -> None:
    """The door alone, with less patience than the server's ten minutes."""

    async def ask() -> tuple[httpx.Response, list[Call]]:
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        listener.setblocking(False)
        async with httpx.AsyncClient(timeout=0.3) as impatient, httpx.AsyncClient(trust_env=False) as sandbox:
            door = Door(Bundle(**model.bundle("codex", "hang", "silent")), impatient)
            headers = {"host": DOOR_URL.removeprefix("http://"), "authorization": f"Bearer {door.key}"}
            async with door.open(listener):
                answer = await sandbox.post(f"http://127.0.0.1:{port}/v1/responses", json={}, headers=headers)
            return answer, door.calls

    answer, calls = asyncio.run(ask())
    failure = turn_failure(calls, "")
    assert (answer.status_code, failure.code, failure.class_) == (504, "request_timeout", "provider")
    assert model.hung_up["silent"].wait(5)  # the endpoint is not kept at it


# ── the canary ────────────────────────────────────────────────────────────────────────────────────


def test_secrets_are_found_nowhere(tmp_path: Path, model: ModelEndpoint) -> None:
    """Neither key nor env value nor setup command nor file data in an answer, an event, the log or the database."""
    secrets = {"key": KEY, "env": "env-canary-77aa", "setup": "setup-canary-88bb", "file": "file-canary-99cc"}
    environment = {
        "env": {"SECRET": secrets["env"]},
        "setup_commands": [{"command": f": {secrets['setup']}"}],
        "files": [{"type": "inline", "path": "/workspace/f", "data": "ZmlsZS1jYW5hcnktOTljYw=="}],
    }
    data, log = tmp_path / "data", tmp_path / "log"
    with service("core", "serve", "--data", str(data), log=log) as running:
        core = connect(running)
        ids = []
        for behaviour in ("echo", "echo_stream", "ok"):
            bundle = model.bundle("codex", behaviour, f"canary-{behaviour}", KEY)
            ids.append(core.agent("codex", bundle, environment=environment).id)
        failing = {**environment, "setup_commands": [{"command": f"echo {secrets['setup']} >&2; exit 3"}]}
        ids.append(core.shell("true", environment=failing).id)
        answers = [core.raw.get("/agents/sessions").text]
        for session_id in ids:
            core.turn(session_id)
            path = f"/agents/sessions/{session_id}"
            answers += [core.raw.get(path + end).text for end in ("", "/turns", "/items", "/artifacts")]
            answers.append(core.raw.get(f"/agents/environments/{core.raw.get(path).json()['environment']['id']}").text)
        broken = {
            "agent": {},
            "environment": {**HOSTED, **environment},
            "x_agents_core": {"model_provider": {"api_key": KEY}},
        }
        answers.append(core.post("/agents/sessions", broken).text)
        outside = [path for path in data.rglob("*") if path.is_file() and "rooms" not in path.parts]
        on_disk = {path.name: path.read_bytes() for path in outside}
    on_disk |= {path.name: path.read_bytes() for path in data.rglob("core.db*")} | {"log": log.read_bytes()}
    assert "core.db" in on_disk
    for secret in secrets.values():
        assert not [answer for answer in answers if secret in answer]
        assert [name for name, content in on_disk.items() if secret.encode() in content] == []
    for path in (data / "rooms").rglob("*"):
        if path.is_file():
            assert KEY.encode() not in path.read_bytes(), path


@pytest.mark.parametrize("harness, behaviour", ROWS)
def test_a_failing_model_is_named(
    core: Core, failing: dict[tuple[str, str], str], harness: str, behaviour: str
) -> None:
    code, class_, words = CAUSES[behaviour]
    session_id = failing[harness, behaviour]
    turn = core.turn(session_id)
    failure = turn.to_dict()["x_agents_core"]["failure"]
    assert (turn.status, turn.error.code, failure["class"]) == ("failed", code, class_)
    assert words in turn.error.message
    assert turn.usage is None or behaviour == "incomplete"  # that one was an answer, with its usage
    if behaviour.isdigit():
        assert failure["reason"] == "provider_http_status" and failure["params"] == {"http_status": int(behaviour)}
    session = core.raw.get(f"/agents/sessions/{session_id}")
    assert (session.json()["status"], session.json()["error"]) == ("failed", turn.error.message)
    items = core.raw.get(f"/agents/sessions/{session_id}/items")
    assert "in_progress" not in [item["status"] for item in items.json()["data"]]
    assert KEY not in session.text + items.text + turn.to_json()
