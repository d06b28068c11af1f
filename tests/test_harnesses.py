"""One acceptance table for all harnesses: real CLIs in real sandboxes, with scripted policies and failing endpoints.

pi and opencode come from npm (`npm install --prefix core/npm`); where they are missing, their rows are skipped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import HOSTED, PROTOCOLS, Core, Gateway, core_of, seen_in_processes, service, until
from model_endpoint import ModelEndpoint

from core.harnesses import registry
from core.harnesses.npm import DEFAULT_PREFIX
from core.sandbox.backends import BACKENDS

Doc = dict[str, Any]
HARNESSES = ("codex", "claude_sdk", "pi", "opencode")
MARK = f"harness-test-{os.getpid()}"
SCRIPTS = {
    "solve": """mkdir -p outputs; echo "it's done"; printf '{"x": 1}' > outputs/answer.json; exit 3""",
    "hang": f"trap '' TERM; exec -a {MARK} sleep 600",
}
RECORDED = Path(__file__).parent / "fixtures" / "requests.json"


@pytest.fixture(scope="module")
def policies() -> Iterator[Gateway]:
    book = {"scripts": SCRIPTS, "rollouts": {name: name for name in SCRIPTS}}
    with service("gateway", "serve", "--scripts", "-", first_line=json.dumps(book) + "\n") as running:
        yield Gateway(running)


@pytest.fixture(scope="module", params=BACKENDS)
def core(request: pytest.FixtureRequest) -> Iterator[Core]:
    """A server per backend, as root or as whoever runs the tests."""
    user = "root" if os.getuid() == 0 else "unprivileged"
    with core_of(user, "--sandbox", request.param) as running:
        yield running


@pytest.fixture(params=HARNESSES)
def harness(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    if registry(DEFAULT_PREFIX)[name].mounts() is None:
        pytest.skip(f"{name} is not installed: npm install --prefix core/npm")
    return name


def start(core: Core, harness: str, model: str, bundle: Doc, text: str = "Do the task.") -> str:
    session = core.sessions.create(
        agent={"model": model, "instructions": "Be brief.", "x_agents_core": {"harness": harness}},
        environment=HOSTED,
        input=text,
        extra_body={"x_agents_core": {"model_provider": bundle}},
    )
    return str(session.id)


def items(core: Core, session_id: str) -> list[Doc]:
    return [item.to_dict() for item in core.sessions.items.list(session_id, order="asc")]


def test_oracle_runs_the_script(core: Core, policies: Gateway, harness: str) -> None:
    session_id = start(core, harness, "oracle", policies.bundle(harness, "solve"))
    turn = core.turn(session_id)
    assert (turn.status, turn.error) == ("completed", None)
    assert turn.usage is not None and turn.usage.total_tokens > 0
    assert core.artifacts(session_id) == {"/workspace/outputs/answer.json": b'{"x": 1}'}
    asked, command, *_, answer = items(core, session_id)
    assert (asked["role"], answer["type"], answer["role"]) == ("user", "message", "assistant")
    assert command["type"] == "command_execution" and "answer.json" in command["command"]
    assert (command["output"].strip(), command["exit_code"], command["status"]) == ("it's done", 3, "failed")
    assert all(item["status"] != "in_progress" for item in items(core, session_id))


def test_nop_says_so_and_a_second_turn_knows_the_first(
    core: Core, model: ModelEndpoint, policies: Gateway, harness: str
) -> None:
    session_id = start(core, harness, "nop", policies.bundle(harness, "solve"))
    first = core.turn(session_id)
    core.say(session_id, "Once more.")
    second = core.turn(session_id, 2)
    assert (first.status, second.status) == ("completed", "completed")
    assert core.artifacts(session_id) == {}
    assert second.usage.input_tokens > first.usage.input_tokens  # the conversation went along
    assert [item["type"] for item in items(core, session_id)] == ["message"] * 4


def test_a_cancel_ends_it_and_all_it_started(core: Core, policies: Gateway, harness: str) -> None:
    session_id = start(core, harness, "oracle", policies.bundle(harness, "hang"))
    until(lambda: seen_in_processes(MARK), 60)
    core.cancel(session_id)
    turn = core.turn(session_id, seconds=10)
    assert turn.status == "cancelled" and not seen_in_processes(MARK)
    commands = [item["status"] for item in items(core, session_id) if item["type"] == "command_execution"]
    assert set(commands) <= {"incomplete", "failed"}  # Claude Code still reports what its SIGTERM broke off


@pytest.mark.parametrize(
    "status, code",
    [
        (401, "authentication_error"),
        pytest.param(500, "server_error", marks=pytest.mark.slow),  # pi and opencode try again for a minute
    ],
)
def test_a_refusing_endpoint_is_the_providers_failure(
    core: Core, model: ModelEndpoint, harness: str, status: int, code: str
) -> None:
    session_id = start(core, harness, "m", model.bundle(harness, str(status), f"{harness}-{status}-acceptance"))
    turn = core.turn(session_id, seconds=120)
    failure = turn.to_dict()["x_agents_core"]["failure"]
    assert (turn.status, turn.error.code, failure["class"]) == ("failed", code, "provider")
    assert str(status) in turn.error.message


def test_a_missing_binary_names_its_package(tmp_path: Path) -> None:
    """With an empty prefix and PATH, nothing of npm is there: 400 that says what to install."""
    from conftest import connect

    with service("core", "serve", "--npm-prefix", str(tmp_path), env={"PATH": "/usr/bin:/bin"}) as running:
        for name, package in (("pi", "@mariozechner/pi-coding-agent"), ("opencode", "opencode-ai")):
            body = {
                "agent": {"model": "m", "x_agents_core": {"harness": name}},
                "environment": HOSTED,
                "input": "go",
            }
            answer = connect(running).post("/agents/sessions", body)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "agent.x_agents_core.harness")
            assert package in error["message"] and "npm install" in error["message"]


def test_another_protocol_is_refused(core: Core, harness: str) -> None:
    if harness == "pi":
        return  # speaks all three
    protocol = next(p for p in ("responses", "anthropic") if p != PROTOCOLS[harness])
    bundle = {"protocol": protocol, "base_url": "http://127.0.0.1:9/v1", "api_key": "k"}
    agent = {"model": "m", "x_agents_core": {"harness": harness}}
    extension = {"model_provider": bundle}
    answer = core.post(
        "/agents/sessions", {"agent": agent, "environment": HOSTED, "input": "go", "x_agents_core": extension}
    )
    assert answer.json()["error"]["param"] == "x_agents_core.model_provider.protocol"


# ── what each CLI sends ───────────────────────────────────────────────────────────────────────────


def summary(path: str, headers: dict[str, str], body: Doc) -> Doc:
    """The shape of a request: what would have to be reviewed when a pin moves."""
    tools = [tool.get("name") or tool.get("function", {}).get("name") or tool["type"] for tool in body.get("tools", [])]
    return {
        "path": path,
        "headers": sorted(name for name in headers if name not in ("host", "content-length", "connection")),
        "members": sorted(body),
        "tools": sorted(tools),
    }


def test_requests_are_as_recorded(core: Core, model: ModelEndpoint, harness: str) -> None:
    """After an upgrade: remove the harness from tests/fixtures/requests.json, run this, review what it wrote."""
    label = f"{harness}-401-acceptance"
    if not model.requests[label]:  # else the test of a refusing endpoint has sent it already
        core.turn(start(core, harness, "m", model.bundle(harness, "401", label)), seconds=120)
    first = model.requests[label][0]
    found = summary(first.path.replace(f"/401/{label}", ""), first.headers, first.body)
    recorded: Doc = json.loads(RECORDED.read_text())
    if harness not in recorded:
        RECORDED.write_text(json.dumps({**recorded, harness: found}, indent=1) + "\n")
        pytest.fail(f"there was no recording of {harness}; it is in {RECORDED.name} now: review it")
    assert found == recorded[harness]
