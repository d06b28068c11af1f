"""What the server refuses, and how: keys, the beta header, JSON, sizes, unserved operations; and rude clients."""

from __future__ import annotations

import json
import socket
import time
import urllib.parse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from conftest import HOSTED, SHELL, Core, connect, service
from hypothesis import given, settings
from hypothesis import strategies as st

BETA = ("OpenAI-Beta", "agents=v1")
NOT_FOUND = (
    b'{"error":{"type":"not_found_error","message":"Resource not found.","code":"not_found_error","param":null}}'
)
SESSIONS = "/agents/sessions"
VALID = json.dumps({"agent": SHELL, "environment": HOSTED}).encode()
MIB = 1 << 20
PLAIN = httpx.Client(trust_env=False)  # sends no header of ours


def ask(core: Core, method: str, path: str, headers: list[tuple[str, str]], content: bytes = b"") -> httpx.Response:
    """A request with these headers and no others of ours."""
    return PLAIN.request(method, core.url + path, headers=headers, content=content)


def keyed(core: Core, *more: tuple[str, str]) -> list[tuple[str, str]]:
    return [("Authorization", f"Bearer {core.key}"), *more]


# ── the order of checks ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "value", [None, "", "Bearer", "Bearer wrong", "Basic {key}", "{key}", "Bearer {key}x", "Bearer é"]
)
def test_a_wrong_key_is_refused_first(core: Core, value: str | None) -> None:
    headers = [] if value is None else [("Authorization", value.replace("{key}", core.key))]
    response = PLAIN.post(core.url + "/agents/nothing", headers=[(n, v.encode()) for n, v in headers], content=b"{bad")
    assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error"] == {
        "type": "invalid_request_error",
        "message": "A valid Agents API bearer key is required.",
        "code": None,
        "param": None,
    }


@pytest.mark.parametrize(
    "values", [[], [""], ["agents=v2"], ["agents=v1", "agents=v1"], ["agents=v1, agents=v1"], ["Agents=v1"]]
)
@pytest.mark.parametrize("path", ["/agents", "/agents/sessions", "/agents/nothing/at/all", "/vaults", "/agents%2Fx"])
def test_the_beta_header_is_exact(core: Core, path: str, values: list[str]) -> None:
    response = ask(core, "POST", path, keyed(core, *(("OpenAI-Beta", value) for value in values)), b"{bad")
    if path == "/agents%2Fx":  # one segment, which is not `agents`
        assert response.status_code == 404
    else:
        assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_beta")
        assert response.json()["error"]["type"] == "invalid_beta"


@pytest.mark.parametrize("path", ["/files", "/skills", "/nothing"])
def test_no_beta_header_is_needed_elsewhere(core: Core, path: str) -> None:
    response = ask(core, "GET", path, keyed(core))
    assert (response.status_code, response.json()["error"]["code"]) == (404, "unsupported_operation")


def test_every_answer_carries_the_standard_headers(core: Core) -> None:
    for response in (
        core.raw.get(SESSIONS),
        core.raw.get("/agents/nothing/at/all"),
        core.raw.get(f"{SESSIONS}/nothing"),
        core.post(SESSIONS, b"{"),
        ask(core, "GET", SESSIONS, []),
    ):
        assert len(response.headers["x-request-id"]) == len("req_") + 32
        assert response.headers["openai-version"] == "2020-10-01"
        assert response.headers["openai-processing-ms"].isdigit()
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["cache-control"] == "no-store"


def test_the_stock_client_reads_the_envelope(core: Core) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        core.sessions.retrieve("nothing")
    error = raised.value
    assert (error.code, error.type, error.param) == ("not_found_error", "not_found_error", None)
    assert error.request_id is not None and error.request_id.startswith("req_")


def test_query_is_judged_before_lookup(core: Core) -> None:
    for path in (f"{SESSIONS}/nothing/turns", f"{SESSIONS}/nothing/artifacts", f"{SESSIONS}/nothing/turns/x/items"):
        assert core.raw.get(f"{path}?order=up").status_code == 400
        assert core.raw.get(path).status_code == 404
    assert core.post(f"{SESSIONS}/nothing/events", {"events": None}).status_code == 400
    assert core.post(f"{SESSIONS}/nothing", {"x": 1}).status_code == 400


# ── JSON ──────────────────────────────────────────────────────────────────────────────────────────

DEEP = b'{"agent":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
BAD_JSON: dict[str, bytes] = {
    "empty": b"",
    "blank": b" ",
    "cut": b'{"agent":',
    "trailing": VALID + b"x",
    "two": VALID + VALID,
    "array": b"[" + VALID + b"]",
    "string": b'"x"',
    "null": b"null",
    "number": b"1",
    "byte order mark": b"\xef\xbb\xbf" + VALID,
    "not UTF-8": b'{"agent":"\xff"}',
    "UTF-16": VALID.decode().encode("utf-16"),
    "NaN": b'{"agent":NaN}',
    "Infinity": b'{"agent":-Infinity}',
    "duplicate": b'{"agent":{},"agent":{}}',
    "deep duplicate": b'{"metadata":{"a":"1","a":"1"}}',
    "escaped duplicate": b'{"metadata":{"a":"1","\\u0061":"1"}}',
    "NUL": b'{"metadata":{"a":"\\u0000"}}',
    "NUL in a name": b'{"metadata":{"a\\u0000":"1"}}',
    "raw NUL": b'{"metadata":{"a":"\x00"}}',
    "half a pair": b'{"metadata":{"a":"\\ud800"}}',
    "half a pair in a name": b'{"\\udfff":1}',
    "half a pair in UTF-8": b'{"metadata":{"a":"\xed\xa0\x80"}}',
    "deep": DEEP,
    "deep with NUL": b'{"agent":' + b"[" * 900 + b'"\\u0000"' + b"]" * 900 + b"}",
    "long number": b'{"agent":' + b"9" * 10_000 + b"}",
    "comment": b"/**/" + VALID,
    "single quotes": b"{'agent':1}",
}


@pytest.mark.parametrize("body", BAD_JSON.values(), ids=BAD_JSON.keys())
def test_bad_json_is_refused_and_changes_nothing(core: Core, body: bytes) -> None:
    before = [session.id for session in core.sessions.list(limit=1)]
    for path in (SESSIONS, f"{SESSIONS}/nothing", f"{SESSIONS}/nothing/events"):
        response = core.post(path, body)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_request_error")
    assert [session.id for session in core.sessions.list(limit=1)] == before


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
MEMBERS = st.sampled_from(
    ["agent", "environment", "input", "metadata", "stream", "x_agents_core", "vault_ids", "review", "spend_control"]
)


@settings(max_examples=40, deadline=None)
@given(body=st.dictionaries(MEMBERS | st.text(max_size=8), ANY_JSON, max_size=4))
def test_no_body_makes_the_server_fail(core: Core, body: dict[str, Any]) -> None:
    for path in (SESSIONS, f"{SESSIONS}/nothing", f"{SESSIONS}/nothing/events"):
        response = core.post(path, body)
        assert response.status_code in (400, 404), response.text
        assert response.json()["error"]["type"] in ("invalid_request_error", "not_found_error")


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "application/jsonx"])
def test_a_body_is_sent_as_json(core: Core, kind: str | None) -> None:
    more = [BETA] if kind is None else [BETA, ("Content-Type", kind)]
    response = ask(core, "POST", SESSIONS, keyed(core, *more), VALID)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_request_error")


def test_json_with_a_charset_is_json(core: Core) -> None:
    response = ask(
        core, "POST", SESSIONS, keyed(core, BETA, ("Content-Type", "Application/JSON; charset=utf-8")), VALID
    )
    assert response.status_code == 201


def test_bodies_of_get_and_delete_are_not_read(core: Core) -> None:
    session = core.shell(None)
    path = f"{SESSIONS}/{session.id}"
    assert core.raw.request("GET", path, content=b"{bad").status_code == 200
    assert core.raw.request("GET", f"{path}/items", content=b"x" * MIB).status_code == 200
    assert core.raw.request("DELETE", path, content=b'{"a":NaN').status_code == 200


# ── sizes and slow clients ────────────────────────────────────────────────────────────────────────


def padded(size: int) -> bytes:
    """A valid create of exactly that many bytes."""
    return VALID + b" " * (size - len(VALID))


def pieces(data: bytes) -> Iterator[bytes]:
    for start in range(0, len(data), 1 << 18):
        yield data[start : start + (1 << 18)]


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(
    "path, size, status",
    [
        (SESSIONS, 16 * MIB, 201),
        (SESSIONS, 16 * MIB + 1, 413),
        (f"{SESSIONS}/nothing", MIB, 400),
        (f"{SESSIONS}/nothing", MIB + 1, 413),
        (f"{SESSIONS}/nothing/events", MIB + 1, 413),
    ],
)
def test_sizes_of_bodies(core: Core, path: str, size: int, status: int, chunked: bool) -> None:
    data = padded(size)
    response = core.raw.post(path, content=pieces(data) if chunked else data)
    assert response.status_code == status
    if status == 413:
        error = response.json()["error"]
        assert error["type"] == error["code"] == "request_too_large"


def dial(core: Core) -> socket.socket:
    url = urllib.parse.urlsplit(core.url)
    return socket.create_connection((url.hostname, url.port), timeout=20)


def head(core: Core, *lines: str) -> bytes:
    """The beginning of a create, as a client may send it by hand."""
    fields = [f"Authorization: Bearer {core.key}", "OpenAI-Beta: agents=v1", "Content-Type: application/json", *lines]
    return "\r\n".join([f"POST /v1{SESSIONS} HTTP/1.1", "Host: x", *fields, "", ""]).encode()


@pytest.mark.parametrize("announced", [10**9, 10**18])
def test_a_huge_body_is_refused_before_it_is_sent(core: Core, announced: int) -> None:
    with dial(core) as connection:
        connection.sendall(head(core, f"Content-Length: {announced}"))
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


def test_an_expected_continue_is_answered(core: Core) -> None:
    with dial(core) as connection:
        connection.sendall(head(core, f"Content-Length: {len(VALID)}", "Expect: 100-continue"))
        assert connection.recv(100).startswith(b"HTTP/1.1 100 ")
        connection.sendall(VALID)
        assert connection.recv(100).startswith(b"HTTP/1.1 201 ")


def test_slow_clients_hold_up_nobody(core: Core) -> None:
    """Half requests, and readers that do not read, stay open while others are served at once."""
    slow = [dial(core) for _ in range(100)]
    for number, connection in enumerate(slow):
        connection.sendall(head(core, "Content-Length: 1000")[: None if number % 2 else 40])
        if number % 2:
            connection.sendall(b'{"agent"')
    session, turn = core.run("head -c 3000000 /dev/zero | tr '\\0' x")
    reader = dial(core)
    path = f"GET /v1{SESSIONS}/{session.id}/items HTTP/1.1"
    reader.sendall(head(core).replace(f"POST /v1{SESSIONS} HTTP/1.1".encode(), path.encode()) * 50)
    begun = time.monotonic()
    for _ in range(20):
        assert core.raw.get(f"{SESSIONS}/{session.id}").status_code == 200
    assert turn.status == "completed" and time.monotonic() - begun < 5
    for connection in [*slow, reader]:
        connection.close()
    assert core.raw.get(SESSIONS).status_code == 200


def test_a_client_that_hangs_up_is_no_failure_of_the_server(tmp_path: Path) -> None:
    """Neither in its request, nor in an answer, nor in an event stream: the log stays empty."""
    with service("core", "serve", log=tmp_path / "log") as running:
        core = connect(running)
        session, _ = core.run(
            "head -c 3000000 /dev/zero | tr '\\0' x; mkdir outputs; head -c 9000000 /dev/zero > outputs/a"
        )
        (artifact,) = core.sessions.artifacts.list(session.id)
        path = f"/v1{SESSIONS}/{session.id}"
        with dial(core) as connection:
            connection.sendall(head(core, "Content-Length: 1000") + b'{"agent"')
        for end in ("/events", "/items", f"/artifacts/{artifact.id}/content"):
            with dial(core) as connection:
                connection.sendall(head(core).replace(f"POST /v1{SESSIONS} ".encode(), f"GET {path}{end} ".encode()))
                assert connection.recv(100).startswith(b"HTTP/1.1 200 ")
        core.run("true")
    assert (tmp_path / "log").read_text() == ""


@pytest.mark.parametrize(
    "request_bytes", [b"\x00\x01\x02\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET\r\n\r\n", b"A" * 100_000 + b"\r\n\r\n"]
)
def test_what_is_not_http_is_refused(core: Core, request_bytes: bytes) -> None:
    with dial(core) as connection:
        connection.sendall(request_bytes)
        assert connection.recv(100)[9:12] in (b"400", b"401", b"404", b"")
    assert core.raw.get(SESSIONS).status_code == 200


# ── nothing there ─────────────────────────────────────────────────────────────────────────────────


def test_missing_malformed_foreign_and_deleted_read_alike(core: Core) -> None:
    gone, other = core.shell(None), core.shell(None)
    done, turn = core.run("mkdir -p outputs; touch outputs/a")
    (artifact,) = core.sessions.artifacts.list(done.id)
    core.sessions.delete(gone.id)
    ids = [
        gone.id,
        "x",
        "a%2Fb",
        "%00",
        "%FF",
        "..",
        "%2e%2e",
        "0" * 5000,
        "é",
        "'",
        "*",
        "00000000-0000-0000-0000-000000000000",
    ]
    paths = [f"{SESSIONS}/{id_}" for id_ in ids if id_ not in ("..", "%2e%2e")]
    paths += [f"{SESSIONS}/{done.id}/turns/{id_}" for id_ in [*ids, done.id] if id_ not in ("..", "%2e%2e")]
    paths += [f"{SESSIONS}/{other.id}/turns/{turn.id}", f"{SESSIONS}/{other.id}/turns/{turn.id}/items"]
    paths += [
        f"{SESSIONS}/{other.id}/artifacts/{artifact.id}",
        f"{SESSIONS}/{other.id}/artifacts/{artifact.id}/content",
    ]
    paths += ["/agents/environments/x", f"/agents/environments/{gone.environment.id}"]
    answers = {path: core.raw.get(path) for path in paths}
    assert {
        path for path, answer in answers.items() if (answer.status_code, answer.content) != (404, NOT_FOUND)
    } == set()
    for path in (f"{SESSIONS}/x", f"{SESSIONS}/{other.id}/artifacts/{artifact.id}"):
        assert core.raw.delete(path).content == NOT_FOUND
    assert core.artifacts(done.id) == {"/workspace/outputs/a": b""}


S, E = "/agents/sessions/s", "/agents/environments"
UNSERVED = [
    *(("GET", "/agents"), ("POST", "/agents"), ("GET", "/agents/a"), ("POST", "/agents/a"), ("DELETE", "/agents/a")),
    *(
        ("GET", f"{S}/subagents"),
        ("GET", f"{S}/subagents/g"),
        ("GET", f"{S}/subagents/g/items"),
    ),
    *(
        ("GET", f"{S}/subagents/g/turns"),
        ("GET", f"{S}/subagents/g/turns/t"),
        ("GET", f"{S}/subagents/g/turns/t/items"),
    ),
    *(("GET", E), ("POST", E), ("GET", f"{E}/e/files"), ("POST", f"{E}/e/files"), ("GET", f"{E}/templates")),
    *(
        ("POST", f"{E}/templates"),
        ("GET", f"{E}/templates/t"),
        ("POST", f"{E}/templates/t"),
        ("DELETE", f"{E}/templates/t"),
    ),
    *(("GET", "/vaults"), ("POST", "/vaults"), ("GET", "/vaults/v"), ("POST", "/vaults/v"), ("DELETE", "/vaults/v")),
    *(("GET", "/vaults/v/credentials"), ("POST", "/vaults/v/credentials"), ("GET", "/vaults/v/credentials/c")),
    *(("POST", "/vaults/v/credentials/c"), ("DELETE", "/vaults/v/credentials/c")),
    *(("GET", "/agents/automations"), ("POST", "/agents/automations"), ("GET", "/agents/automations/u")),
    *(("POST", "/agents/automations/u"), ("DELETE", "/agents/automations/u"), ("POST", "/agents/automations/u/pause")),
    *(("POST", "/agents/automations/u/resume"), ("GET", "/agents/automations/u/invocations")),
    *(("POST", "/agents/automations/u/invocations"), ("GET", "/agents/automations/u/invocations/i")),
    *(("GET", "/files"), ("POST", "/files"), ("GET", "/files/f"), ("DELETE", "/files/f"), ("GET", "/files/f/content")),
    *(("GET", "/skills"), ("POST", "/skills"), ("GET", "/skills/k/versions"), ("DELETE", "/skills/k")),
]


@pytest.mark.parametrize("method, path", UNSERVED)
def test_an_unserved_operation_says_what_to_use_instead(core: Core, method: str, path: str) -> None:
    response = core.raw.request(method, path, content=b"{}" if method == "POST" else None)
    error = response.json()["error"]
    assert response.status_code == 404 and "allow" not in response.headers
    assert error["type"] == error["code"] == "unsupported_operation"
    assert error["message"].startswith(f"{method} {path} is not supported by this server. ")
    assert error["message"].endswith(" instead.") or "without subagents" in error["message"]


SERVED = {
    "/agents/sessions": "GET, POST",
    S: "GET, POST, DELETE",
    f"{S}/events": "GET, POST",
    f"{S}/turns": "GET",
    f"{S}/turns/t": "GET",
    f"{S}/turns/t/items": "GET",
    f"{S}/items": "GET",
    f"{S}/artifacts": "GET",
    f"{S}/artifacts/a": "GET, DELETE",
    f"{S}/artifacts/a/content": "GET",
    f"{E}/e": "GET",
}


@pytest.mark.parametrize("path, allowed", SERVED.items())
def test_a_wrong_method_names_the_right_ones(core: Core, path: str, allowed: str) -> None:
    for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"):
        if method not in allowed.split(", "):
            response = core.raw.request(method, path)
            assert (response.status_code, response.headers["allow"]) == (405, allowed)
            if method != "HEAD":
                assert response.json()["error"]["code"] == "unsupported_operation"


@pytest.mark.parametrize(
    "path",
    [
        "/agents/sessions/",
        "//agents/sessions",
        "/agents//sessions",
        "/agents/sessions/s/",
        "/agents/sessions/s/turns/",
        "",
    ],
)
def test_paths_are_exact(core: Core, path: str) -> None:
    url = core.url + path
    response = PLAIN.get(url, headers=core.headers)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "unsupported_operation")


def test_nothing_outside_of_v1(core: Core) -> None:
    root = core.url.removesuffix("/v1")
    for path in ("/", "/agents/sessions", "/v2/agents/sessions", "/v1", "/docs", "/openapi.json", "/v1/../v1/agents"):
        assert PLAIN.get(root + path, headers=core.headers).status_code in (400, 404)


def test_after_all_that_the_server_still_runs_turns(core: Core) -> None:
    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(lambda number: core.run(f"exit {number}")[1].status, range(8)))
    assert outcomes == ["completed"] * 8
