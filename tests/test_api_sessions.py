"""Sessions over the wire: the life of one, what a create may hold, idempotency, update, filter, files."""

from __future__ import annotations

import asyncio
import base64
import copy
import resource
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from conftest import HOSTED, NO_NETWORK, SHELL, Core, connect, service, until

MIB = 1 << 20
BUNDLE = {"protocol": "responses", "base_url": "http://127.0.0.1:9/v1", "api_key": "a-model-key"}
WHOLE: dict[str, Any] = {
    "agent": {
        "model": "m",
        "instructions": None,
        "tools": [],
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "reasoning": {"effort": None},
        "service_tier": "auto",
        "compaction": {"async": False},
        "experimental": {"time_awareness": False},
        "multi_agent": {"enabled": False},
        "x_agents_core": {"harness": "codex", "harness_config": {"model_reasoning_effort": "low"}},
    },
    "environment": {
        "type": "openai_hosted",
        "container_size": "small",
        "network": {"access": "disabled", "allowed_domains": []},
        "files": [{"type": "inline", "path": "/workspace/a.txt", "data": "aGk="}],
        "packages": {"python": [], "npm": [], "system": []},
        "env": {"NAME": "value"},
        "setup_commands": [{"command": "true", "cwd": "/workspace"}],
        "skills": [],
        "plugins": [],
        "capability_directories": [],
        "desktop": {"enabled": False},
        "environment_id": None,
        "environment_template_id": None,
    },
    "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
    "metadata": {"run_id": "r"},
    "stream": True,
    "stream_options": {"include_obfuscation": False},
    "spend_control": {"limit": None},
    "vault_ids": [],
    "review": "none",
    "prompt_cache_options": None,
    "x_agents_core": {"model_provider": BUNDLE, "harness_config": {}},
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """The whole create with the member at `path` set to `value`."""
    body = copy.deepcopy(WHOLE)
    *parents, last = path.replace("[", ".").replace("]", "").split(".")
    holder: Any = body
    for name in parents:
        holder = holder[int(name) if name.isdigit() else name]
    holder[int(last) if last.isdigit() else last] = value
    return body


def shell_body(**members: Any) -> dict[str, Any]:
    return {"agent": SHELL, "environment": HOSTED, **members}


def file(path: str, data: bytes = b"") -> dict[str, str]:
    return {"type": "inline", "path": path, "data": base64.b64encode(data).decode()}


def with_files(*files: dict[str, str]) -> dict[str, Any]:
    return shell_body(environment={**HOSTED, "files": list(files)})


# ── the life of a session ─────────────────────────────────────────────────────────────────────────


def test_life_with_the_sync_client(core: Core) -> None:
    created = core.sessions.with_raw_response.create(
        agent=SHELL, environment=HOSTED, input="mkdir -p outputs; echo 1 > outputs/a", metadata={"k": "v"}
    )
    assert created.status_code == 201 and created.headers["x-request-id"].startswith("req_")
    session = created.parse()
    assert session._request_id == created.headers["x-request-id"]
    assert core.turn(session.id).status == "completed"
    assert core.artifacts(session.id) == {"/workspace/outputs/a": b"1\n"}
    assert [item.type for item in core.sessions.items.list(session.id, order="asc")] == ["message", "command_execution"]
    cancelled = core.sessions.events.with_raw_response.create(session.id, events=[])
    assert (cancelled.status_code, cancelled.http_response.content) == (202, b"")
    assert core.sessions.events.create(session.id, events=[]) is None
    assert core.sessions.retrieve(session.id).status == "idle"
    deleted = core.sessions.with_raw_response.delete(session.id)
    assert deleted.status_code == 200
    expected = {"id": session.id, "object": "agent.session.deleted", "deleted": True}
    assert deleted.parse().to_dict() == expected == core.sessions.delete(session.id).to_dict()


def test_life_with_the_async_client(core: Core) -> None:
    async def life() -> bytes:
        async with openai.AsyncOpenAI(base_url=core.url + "/", api_key=core.key, max_retries=0) as client:
            sessions: Any = client.beta.agents.sessions
            session = await sessions.create(
                agent=SHELL, environment=HOSTED, input="mkdir -p outputs; echo 2 > outputs/a"
            )
            while not [t async for t in sessions.turns.list(session.id) if t.status == "completed"]:
                await asyncio.sleep(0.02)
            artifacts = [a async for a in sessions.artifacts.list(session.id)]
            content = await sessions.artifacts.content(artifacts[0].id, session_id=session.id)
            await sessions.delete(session.id)
            return bytes(content.read())

    assert asyncio.run(life()) == b"2\n"


def test_a_session_reads_as_documented(core: Core) -> None:
    response = core.post("/agents/sessions", {**copy.deepcopy(WHOLE), "stream": False, "stream_options": None})
    session = response.json()
    assert response.status_code == 201
    assert session["agent"]["x_agents_core"] == {"harness": "codex", "harness_config": {}}  # the top level wins
    assert session["environment"]["network"] == {"access": "disabled", "allowed_domains": []}
    assert session["environment"]["container_size"] == "small"
    (seeded,) = session["environment"]["files"]
    assert seeded.pop("id") and seeded == {"type": "inline", "path": "/workspace/a.txt", "size_bytes": 2}
    assert session["x_agents_core"]["model_provider"] == {
        "protocol": "responses",
        "base_url": BUNDLE["base_url"],
        "api_key_configured": True,
        "context_window": None,
        "max_output_tokens": None,
    }
    assert session["status"] == "in_progress" and session["error"] is None and session["usage"] is None
    assert (session["required_actions"], session["vault_ids"], session["spend_control"]) == ([], [], None)
    read = core.raw.get(f"/agents/environments/{session['environment']['id']}").json()
    assert read["object"] == "agent.environment" and read["status"] in ("pending", "ready")
    assert "setup_commands" not in response.text and "aGk=" not in response.text
    core.raw.delete(f"/agents/sessions/{session['id']}?cancel=true")


# ── what a create may hold ────────────────────────────────────────────────────────────────────────

LEVELS = [
    "x",
    "agent.x",
    "agent.text.x",
    "agent.x_agents_core.x",
    "x_agents_core.x",
    "x_agents_core.harness",
    "x_agents_core.model_provider.x",
    "environment.x",
    "environment.network.x",
    "environment.packages.x",
    "environment.files[0].mode",
    "environment.setup_commands[0].x",
    "stream_options.x",
    "input[0].x",
    "input[0].content[0].x",
]


@pytest.mark.parametrize("path", LEVELS)
def test_an_unknown_member_is_refused_with_its_path(core: Core, path: str) -> None:
    error = core.post("/agents/sessions", changed(path, 1)).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_request_error", path)
    assert error["message"] == f"Unknown parameter: '{path}'."


UNSUPPORTED = "unsupported_or_invalid_configuration"
INVALID = "invalid_request_error"
REFUSED: list[tuple[str, Any, str, str | None]] = [
    ("agent", None, INVALID, "agent"),
    ("agent", [], INVALID, "agent"),
    ("agent_id", "a", UNSUPPORTED, "agent_id"),
    ("agent.model", None, UNSUPPORTED, "agent.model"),
    ("agent.model", 1, INVALID, "agent.model"),
    *(
        ("agent.tools", [tool], UNSUPPORTED, "agent.tools")
        for tool in (
            {"type": "web_search"},
            {"type": "function", "name": "f", "parameters": {"type": "object"}},
            {"type": "mcp", "server_label": "s", "transport": {"type": "http", "server_url": "https://mcp.example"}},
            {"type": "computer_use"},
            {"type": "programmatic_tool_calling"},
        )
    ),
    ("agent.reasoning", {"effort": "low"}, UNSUPPORTED, "agent.reasoning"),
    ("agent.service_tier", "flex", UNSUPPORTED, "agent.service_tier"),
    ("agent.compaction", {"async": True}, UNSUPPORTED, "agent.compaction"),
    ("agent.experimental", {"time_awareness": True}, UNSUPPORTED, "agent.experimental"),
    ("agent.multi_agent", {"enabled": True}, UNSUPPORTED, "agent.multi_agent"),
    ("agent.multi_agent", {"enabled": 0}, UNSUPPORTED, "agent.multi_agent"),
    ("agent.text.format", {"type": "json_schema", "schema": {}}, UNSUPPORTED, "agent.text.format"),
    ("agent.text.verbosity", "loud", INVALID, "agent.text.verbosity"),
    ("agent.x_agents_core", [], INVALID, "agent.x_agents_core"),
    ("agent.x_agents_core", False, INVALID, "agent.x_agents_core"),
    ("agent.x_agents_core.harness", "", UNSUPPORTED, "agent.x_agents_core.harness"),
    ("agent.x_agents_core.harness", "mcode", UNSUPPORTED, "agent.x_agents_core.harness"),
    ("agent.x_agents_core.harness", "shell", UNSUPPORTED, "x_agents_core.model_provider"),
    ("agent.x_agents_core.harness", "claude_sdk", UNSUPPORTED, "x_agents_core.model_provider.protocol"),
    ("agent.x_agents_core.model_provider", BUNDLE, INVALID, "agent.x_agents_core.model_provider"),
    (
        *("x_agents_core.harness_config", {"model_reasoning_effort": "max"}, UNSUPPORTED),
        "agent.x_agents_core.harness_config.model_reasoning_effort",
    ),
    (
        *("x_agents_core.harness_config", {"effort": "low"}, UNSUPPORTED),
        "agent.x_agents_core.harness_config.effort",
    ),
    ("x_agents_core", None, "model_provider_required", "x_agents_core.model_provider"),
    ("x_agents_core", {}, "model_provider_required", "x_agents_core.model_provider"),
    ("x_agents_core.model_provider", {}, INVALID, "x_agents_core.model_provider"),
    ("x_agents_core.model_provider.protocol", "grpc", INVALID, "x_agents_core.model_provider.protocol"),
    ("x_agents_core.model_provider.protocol", "chat_completions", UNSUPPORTED, "x_agents_core.model_provider.protocol"),
    ("x_agents_core.model_provider.api_key", None, INVALID, "x_agents_core.model_provider.api_key"),
    ("x_agents_core.model_provider.api_key", "k" * (16 * 1024 + 1), INVALID, "x_agents_core.model_provider.api_key"),
    ("x_agents_core.model_provider.api_key", "a\nb", INVALID, "x_agents_core.model_provider.api_key"),
    ("x_agents_core.model_provider.context_window", 0, INVALID, "x_agents_core.model_provider.context_window"),
    ("x_agents_core.model_provider.max_output_tokens", True, INVALID, "x_agents_core.model_provider.max_output_tokens"),
    ("x_agents_core.environment", {"env": {}}, UNSUPPORTED, "x_agents_core.environment"),
    ("spend_control", {"limit": 50}, UNSUPPORTED, "spend_control.limit"),
    ("vault_ids", ["v"], UNSUPPORTED, "vault_ids"),
    ("review", "auto_review", UNSUPPORTED, "review"),
    ("prompt_cache_options", {}, UNSUPPORTED, "prompt_cache_options"),
    ("environment", None, INVALID, "environment"),
    ("environment.type", "none", UNSUPPORTED, "environment.type"),
    ("environment.type", "self_hosted", UNSUPPORTED, "environment.type"),
    ("environment.type", "docker", INVALID, "environment.type"),
    ("environment.container_size", "huge", INVALID, "environment.container_size"),
    ("environment.network.allowed_domains", ["a.example"], INVALID, "environment.network.allowed_domains"),
    ("environment.network.blocked_domains", ["a.example"], INVALID, "environment.network.blocked_domains"),
    ("environment.packages.python", ["numpy"], UNSUPPORTED, "environment.packages"),
    ("environment.packages.system", ["gcc"], UNSUPPORTED, "environment.packages"),
    ("environment.env", {"PATH": "x"}, INVALID, "environment.env.PATH"),
    ("environment.env", {"OPENAI_API_KEY": "x"}, INVALID, "environment.env.OPENAI_API_KEY"),
    ("environment.env", {"CODEX_HOME": "x"}, INVALID, "environment.env.CODEX_HOME"),
    ("environment.env", {"OAC_X": "x"}, INVALID, "environment.env.OAC_X"),
    ("environment.env", {"1A": "x"}, INVALID, "environment.env.1A"),
    ("environment.env", {"A": 1}, INVALID, "environment.env.A"),
    ("environment.env", {"A": "x" * (200 << 10)}, INVALID, "environment.env.A"),
    ("environment.env", {f"A{n}": "" for n in range(5000)}, INVALID, "environment.env"),
    (
        *("environment.setup_commands", [{"command": ": " + "x" * (200 << 10)}], INVALID),
        "environment.setup_commands[0].command",
    ),
    ("environment.setup_commands", [{}], INVALID, "environment.setup_commands[0].command"),
    ("environment.environment_template_id", "t", UNSUPPORTED, "environment.environment_template_id"),
    ("environment.environment_id", "e", UNSUPPORTED, "environment.environment_id"),
    ("environment.skills", [{}], UNSUPPORTED, "environment.skills"),
    ("environment.plugins", [{}], UNSUPPORTED, "environment.plugins"),
    ("environment.capability_directories", ["x"], UNSUPPORTED, "environment.capability_directories"),
    ("environment.desktop", {"enabled": True}, UNSUPPORTED, "environment.desktop"),
    ("environment.files[0].type", "file_id", UNSUPPORTED, "environment.files[0].type"),
    ("environment.files[0].data", "aGk", INVALID, "environment.files[0].data"),
    ("environment.files[0].data", "a-_=", INVALID, "environment.files[0].data"),
    ("environment.files[0].data", "é", INVALID, "environment.files[0].data"),
    ("input", None, INVALID, "input"),  # it streams
    ("input", [], INVALID, "input"),
    ("input", 7, INVALID, "input"),
    ("input[0].role", "assistant", INVALID, "input[0].role"),
    ("input[0].content", [], INVALID, "input[0].content"),
    ("input[0].content[0]", {"type": "input_image", "image_url": "data:,"}, UNSUPPORTED, "input[0].content[0]"),
    ("input", "x" * (512 * 1024 + 1), INVALID, "input"),
    ("input", "é" * (256 * 1024) + "x", INVALID, "input"),
    ("metadata", {"k": 1}, INVALID, "metadata.k"),
    ("metadata", {f"k{n}": "" for n in range(17)}, INVALID, "metadata"),
    ("metadata", {"k" * 65: ""}, INVALID, "metadata." + "k" * 65),
    ("metadata", {"": ""}, INVALID, "metadata."),
    ("metadata", {"k": "v" * 513}, INVALID, "metadata.k"),
    ("stream", "yes", INVALID, "stream"),
    ("stream", False, INVALID, "stream_options"),
]


@pytest.mark.parametrize("path, value, code, param", REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_honoured_is_refused_with_its_path(
    core: Core, path: str, value: Any, code: str, param: str | None
) -> None:
    response = core.post("/agents/sessions", changed(path, value))
    error = response.json()["error"]
    assert response.status_code == 400
    assert (error["type"], error["code"], error["param"]) == (INVALID, code, param)


@pytest.mark.parametrize(
    "url, accepted",
    [
        ("http://127.0.0.1:9/rollouts/r1/v1", True),
        ("http://localhost/v1/", True),
        ("http://[::1]:9/v1", True),
        ("http://10.0.0.7/v1", True),
        ("https://models.example/v1", True),
        ("http://models.example/v1", False),
        ("http://8.8.8.8/v1", False),
        ("http://0.0.0.0/v1", False),
        ("https://user@models.example/v1", False),
        ("https://user:secret@models.example/v1", False),
        ("https://@models.example/v1", False),
        ("https://models.example/v1?a=b", False),
        ("https://models.example/v1?", False),
        ("https://models.example/v1#f", False),
        ("ftp://models.example/v1", False),
        ("file:///etc/passwd", False),
        ("//models.example", False),
        ("https://", False),
        ("https://models.example:99999/v1", False),
        ("https://models.example/a b", False),
        ("https://mödels.example/v1", False),
        ("", False),
    ],
)
def test_base_urls(core: Core, url: str, accepted: bool) -> None:
    body = changed("x_agents_core.model_provider.base_url", url) | {"stream": False, "stream_options": None}
    response = core.post("/agents/sessions", {**body, "input": None})
    assert response.status_code == (201 if accepted else 400)
    if accepted:
        core.sessions.delete(response.json()["id"])
    else:
        assert response.json()["error"]["param"] == "x_agents_core.model_provider.base_url"
        assert "secret" not in response.text


def test_input_of_exactly_the_limit(core: Core) -> None:
    script = "echo ok\n#" + "é" * ((512 * 1024 - 10) // 2) + "x"
    assert len(script.encode()) == 512 * 1024
    session, turn = core.run(script)
    assert turn.status == "completed" and core.output(session.id) == "ok\n"
    (message, _) = core.sessions.items.list(session.id, order="asc")
    assert message.content[0].text == script
    with pytest.raises(openai.BadRequestError):
        core.say(session.id, script + "x")


def test_text_of_any_alphabet_comes_back_unchanged(core: Core) -> None:
    text = "ÄÖ ñ 漢字 \U0001f600 \u2028 \u202e \ufeff \x7f \t"
    session, _ = core.run(
        f"printf %s '{text}'; mkdir -p 'outputs/{text}'; touch 'outputs/{text}/f'", metadata={text: text}
    )
    assert core.output(session.id) == text
    assert core.sessions.retrieve(session.id).metadata == {text: text}
    assert list(core.artifacts(session.id)) == [f"/workspace/outputs/{text}/f"]


# ── files ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "sizes, accepted",
    [
        ([0] * 50, True),
        ([0] * 51, False),
        ([5 * MIB], True),
        ([5 * MIB + 1], False),
        ([5 * MIB, 5 * MIB], True),
        ([5 * MIB, 5 * MIB, 1], False),
    ],
)
def test_numbers_and_sizes_of_files(core: Core, sizes: list[int], accepted: bool) -> None:
    response = core.post(
        "/agents/sessions", with_files(*(file(f"/workspace/d/{n}", b"x" * s) for n, s in enumerate(sizes)))
    )
    assert response.status_code == (201 if accepted else 400)
    if accepted:
        session = response.json()
        assert [read["size_bytes"] for read in session["environment"]["files"]] == sizes
        core.say(session["id"], "stat -c %s:%a:%U /workspace/d/* | sort | uniq -c")
        core.turn(session["id"])
        counted = [line.split() for line in core.output(session["id"]).splitlines()]
        assert sorted(counted) == sorted([str(sizes.count(s)), f"{s}:644:agent"] for s in set(sizes))
        core.sessions.delete(session["id"])


@pytest.mark.parametrize(
    "paths",
    [
        ["workspace/a"],
        ["/etc/passwd"],
        ["/workspace"],
        ["/workspace/"],
        ["/workspace/a/"],
        ["/workspace//a"],
        ["/workspace/./a"],
        ["/workspace/../etc/passwd"],
        ["/workspace/a/.."],
        ["/workspaces/a"],
        ["/workspace/a\\b"],
        ["/workspace/" + "a" * 256],
        ["/workspace/" + "/".join("a" * 200 for _ in range(21))],
        ["/workspace/.codex"],
        ["/workspace/.codex/config.toml"],
        ["/workspace/.codex/a\nb"],
        ["/workspace/.managed-agents-x/y"],
        ["/workspace/outputs"],
        ["/workspace/a", "/workspace/a"],
        ["/workspace/a", "/workspace/a/b"],
        ["/workspace/a/b/c", "/workspace/a"],
    ],
)
def test_paths_that_are_refused(core: Core, paths: list[str]) -> None:
    response = core.post("/agents/sessions", with_files(*(file(path) for path in paths)))
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("environment.files")


def test_paths_that_are_accepted(core: Core) -> None:
    paths = ["/workspace/outputs/seed", "/workspace/.codexx", "/workspace/..a", "/workspace/a b/ü", "/workspace/a\nb"]
    deep = "/workspace" + "/a" * 2040
    session = core.post("/agents/sessions", with_files(*(file(path, b"x") for path in [*paths, deep]))).json()
    core.say(session["id"], "find . -type f | wc -l; cat outputs/seed .codexx ..a 'a b/ü' a$'\\n'b")
    core.turn(session["id"])
    assert core.output(session["id"]) == "7\nxxxxx"  # a line break counts twice
    assert core.artifacts(session["id"]) == {"/workspace/outputs/seed": b"x"}
    core.sessions.delete(session["id"])


# ── idempotency ───────────────────────────────────────────────────────────────────────────────────


def test_a_key_makes_one_session(core: Core) -> None:
    key, body = f"key-{uuid.uuid4()}", shell_body(metadata={"a": "1"})
    first = core.post("/agents/sessions", body, idempotency_key=key)
    core.sessions.update(first.json()["id"], metadata={"a": "2"})
    reordered = dict(reversed(body.items()))
    again = core.post("/agents/sessions", reordered, idempotency_key=key)
    assert (again.status_code, again.json()["id"]) == (201, first.json()["id"])
    assert again.json()["metadata"] == {"a": "2"}  # its current state
    other = core.post("/agents/sessions", {**body, "metadata": {}}, idempotency_key=key)
    assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_conflict")
    assert other.headers["x-should-retry"] == "false"
    core.sessions.delete(first.json()["id"])
    deleted = core.post("/agents/sessions", body, idempotency_key=key)
    assert (deleted.status_code, deleted.json()["error"]["code"]) == (409, "idempotency_conflict")
    assert core.post("/agents/sessions", body).json()["id"] != first.json()["id"]


@pytest.mark.parametrize("key, status", [("k" * 128, 201), ("k" * 129, 400), ("", 400)])
def test_length_of_a_key(core: Core, key: str, status: int) -> None:
    assert core.post("/agents/sessions", shell_body(), idempotency_key=key).status_code == status


def test_creates_at_the_same_moment_with_one_key(core: Core) -> None:
    """All get the same session, whose files are there although they are large."""
    key, files = f"key-{uuid.uuid4()}", [file(f"/workspace/{n}", b"x" * MIB) for n in range(4)]
    start = threading.Barrier(6)

    def create(number: int) -> str:
        start.wait()
        return str(core.post("/agents/sessions", with_files(*files), idempotency_key=key).json()["id"])

    with ThreadPoolExecutor(6) as pool:
        (session_id,) = set(pool.map(create, range(6)))
    core.say(session_id, "cat [0-3] | wc -c")
    core.turn(session_id)
    assert core.output(session_id) == f"{4 * MIB}\n"


def test_a_message_key_has_one_effect(core: Core) -> None:
    session = core.shell(None)
    for _ in range(2):
        core.say(session.id, "echo once", idempotency_key="m-1")
        core.turn(session.id)
    assert len(list(core.sessions.turns.list(session.id))) == 1
    with pytest.raises(openai.ConflictError) as raised:
        core.say(session.id, "echo other", idempotency_key="m-1")
    assert raised.value.code == "idempotency_conflict"


def test_a_create_that_failed_for_want_of_space_can_be_repeated(tmp_path: Path) -> None:
    """503, no session, no key, no files left; the same request with the same key succeeds later."""
    with service("core", "serve", "--data", str(tmp_path / "data")) as running:
        core, pid = connect(running), running.process.pid
        body = with_files(file("/workspace/a", b"x" * (2 * MIB)))
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (MIB, resource.RLIM_INFINITY))
        refused = core.post("/agents/sessions", body, idempotency_key="k")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "artifact_storage_unavailable")
        assert int(refused.headers["retry-after"]) <= 120 and str(tmp_path) not in refused.text
        assert list(core.sessions.list()) == [] and list((tmp_path / "data/rooms").iterdir()) == []
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert core.post("/agents/sessions", body, idempotency_key="k").status_code == 201


# ── update, filter, delete ────────────────────────────────────────────────────────────────────────


def test_update_replaces_metadata_whole(core: Core) -> None:
    session = core.shell(None, metadata={"a": "1", "b": "2"})
    path = f"/agents/sessions/{session.id}"
    assert core.post(path, {}).json()["metadata"] == {"a": "1", "b": "2"}
    assert core.sessions.update(session.id, metadata={"c": "3"}).metadata == {"c": "3"}
    assert core.post(path, {"metadata": None}).json()["metadata"] == {}
    for member in ("agent", "prompt_cache_options", "spend_control"):
        assert core.post(path, {member: {"x": 1}}).json()["error"]["param"] == member
    assert core.post(path, {"x": 1}).json()["error"]["param"] == "x"


def test_metadata_filter(core: Core) -> None:
    run = str(uuid.uuid4())
    a = core.shell(None, metadata={"run": run, "odd]key[": "ü&="})
    b = core.shell(None, metadata={"run": run, "n": "2"})

    def found(metadata: dict[str, str]) -> set[str]:
        return {session.id for session in core.sessions.list(metadata=metadata)}

    assert found({"run": run}) == {a.id, b.id}
    assert found({"run": run, "odd]key[": "ü&="}) == {a.id}
    assert found({"run": run, "n": "3"}) == found({"run": run[:-1]}) == set()
    assert [s.id for s in core.sessions.list(agent_id=a.agent.id)] == [a.id]
    core.sessions.update(a.id, metadata={})
    assert found({"run": run}) == {b.id}
    many = "&".join(f"metadata%5Bk{n}%5D=v" for n in range(2000))
    assert core.raw.get(f"/agents/sessions?{many}").status_code == 400
    twice = core.raw.get(f"/agents/sessions?metadata[run]={run}&metadata%5Brun%5D={run}")
    assert twice.json()["error"]["message"].endswith("duplicate field `metadata[run]`")


def test_a_deleted_session_is_gone_for_every_route(core: Core) -> None:
    session, turn = core.run("mkdir -p outputs; touch outputs/a")
    (artifact,) = core.sessions.artifacts.list(session.id)
    core.sessions.delete(session.id)
    path = f"/agents/sessions/{session.id}"
    below = ["", "/turns", f"/turns/{turn.id}", f"/turns/{turn.id}/items", "/items", "/events", "/artifacts"]
    below += [f"/artifacts/{artifact.id}", f"/artifacts/{artifact.id}/content"]
    answers = [core.raw.get(path + end) for end in below]
    answers += [core.post(path, {}), core.post(f"{path}/events", {"events": []})]
    answers += [core.raw.delete(f"{path}/artifacts/{artifact.id}")]
    answers += [core.raw.get(f"/agents/environments/{session.environment.id}")]
    assert {answer.status_code for answer in answers} == {404}
    assert len({answer.content for answer in answers}) == 1
    assert session.id not in {listed.id for listed in core.sessions.list(limit=100)}


def test_delete_while_the_files_are_being_written(tmp_path: Path) -> None:
    """Whoever sees the session in a list sees it whole: its deletion leaves nothing behind."""
    with service("core", "serve", "--data", str(tmp_path / "data")) as running:
        core = connect(running)
        body = with_files(file("/workspace/a", b"x" * 5 * MIB), file("/workspace/b", b"x" * 5 * MIB))
        with ThreadPoolExecutor(2) as pool:
            creates = [
                pool.submit(core.post, "/agents/sessions", {**body, "input": "cat a b | wc -c"}) for _ in range(4)
            ]
            gone = set[str]()
            while len(gone) < 4:
                for session in core.sessions.list():
                    assert core.raw.delete(f"/agents/sessions/{session.id}?cancel=true").status_code == 200
                    gone.add(session.id)
        # The answer of a create may lose the race against the deletion.
        assert {create.result().status_code for create in creates} <= {201, 404}
        assert list((tmp_path / "data/rooms").iterdir()) == []


def test_sessions_by_the_hundred(core: Core) -> None:
    """Tiny sessions, made and deleted by many clients at once, while others are read."""
    run = str(uuid.uuid4())

    def one(number: int) -> tuple[int, int]:
        created = core.post("/agents/sessions", shell_body(metadata={"run": run}))
        return created.status_code, core.raw.delete(f"/agents/sessions/{created.json()['id']}").status_code

    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(one, range(200))) == {(201, 200)}
    assert list(core.sessions.list(metadata={"run": run})) == []


def test_no_organization_or_project_is_needed(core: Core) -> None:
    client: Any = openai.OpenAI(base_url=core.url, api_key=core.key, organization="org-x", project="proj-y")
    assert client.beta.agents.sessions.list(limit=1) is not None


def test_network_is_read_back_exactly(core: Core) -> None:
    for network in (
        NO_NETWORK,
        {"access": "disabled", "allowed_domains": None},
        {"access": "disabled", "allowed_domains": []},
    ):
        session = core.shell(None, environment={"network": network})
        assert session.environment.to_dict()["network"] == {"access": "disabled", "allowed_domains": []}
        until(lambda: core.sessions.retrieve(session.id).status == "idle")  # noqa: B023
