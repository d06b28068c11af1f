"""Attacks on the door: from inside a sandbox whose harness has a model, with nothing but sockets.

What passed is what the model endpoint got; what came back is read as the bytes that arrived in the sandbox.
"""

from __future__ import annotations

import base64
import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from attack import HELPERS, end, hear, inline, inside, peak_memory, script_of
from conftest import Core
from model_endpoint import BEHAVIOURS, Handler, ModelEndpoint, runs

KEY = f"canary-{uuid4()}"

# Sends raw requests to the door, `KEY` in them being the session's own; prints what came back to each.
SEND = """
import base64, re
def own_key():
    for name in os.listdir("/proc"):
        if name.isdigit():
            found = re.search(rb"CODEX_DOOR_KEY=([^\\0]+)", open(f"/proc/{name}/environ", "rb").read())
            if found:
                return found[1]
def exchange(data):
    with socket.create_connection(("127.0.0.1", 4141)) as client:
        client.settimeout(5)
        got = b""
        try:
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
            while chunk := client.recv(1 << 16):
                got += chunk
        except OSError as error:
            got += b" " + type(error).__name__.encode()
        return got
key = own_key()
os.makedirs("outputs")
answers = {}
for name, (text, filler) in json.load(open("requests.json")).items():
    data = base64.b64decode(text).replace(b"KEY", key) + b"x" * filler
    answers[name] = base64.b64encode(exchange(data)).decode()
with open("outputs/answers.json", "w") as file:
    json.dump({"key": key.decode(), "answers": answers}, file)
"""


def attacked(handler: Handler) -> None:
    """Does what the body asks for; without such a wish it has the harness run the script of the label."""
    wish, key = handler.body.get("wish"), handler.key()
    if wish is None:
        runs(handler)
    elif wish == "header":
        handler.begin(200, "application/json", {"x-request-id": key, "x-other": key, "content-length": "2"})
        handler.wfile.write(b"{}")
    elif wish == "split":
        handler.begin(200, "text/event-stream")
        for piece in ("data: ", key[:1], key[1:9], key[9:], key[:5], "\n\n"):
            handler.chunk(piece.encode())
        handler.chunk(b"")
    else:
        status = {"error": 500, "redirect": 307}.get(wish, 200)
        data = json.dumps({"you sent": key}).encode()
        packed = {"content-encoding": "gzip"} if wish == "gzip" else {}
        data = gzip.compress(data) if packed else data
        place = {"location": f"{handler.endpoint.url}/ok/elsewhere/v1/responses"} if wish == "redirect" else {}
        handler.begin(status, "application/json", {"content-length": str(len(data)), **packed, **place})
        handler.wfile.write(data)


BEHAVIOURS["attacked"] = attacked


def request(line: str = "POST /v1/responses HTTP/1.1", wish: str = "body", **headers: str | None) -> bytes:
    """A request as the harness would send it, but for what is named."""
    body = json.dumps({"wish": wish, "line": line}).encode()
    usual = {"Host": "127.0.0.1:4141", "Authorization": "Bearer KEY", "Content-Length": str(len(body))}
    usual |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [line, "Connection: close", *(f"{name}: {value}" for name, value in usual.items() if value is not None)]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def smuggled(head: str, body: str) -> bytes:
    hidden = "POST /v1/responses HTTP/1.1\r\nHost: 127.0.0.1:4141\r\nContent-Length: 2\r\n\r\n{}"
    shown = "POST /v1/responses HTTP/1.1\r\nHost: 127.0.0.1:4141\r\nAuthorization: Bearer KEY"
    return f"{shown}\r\n{head}\r\n\r\n{body}{hidden}".encode()


REFUSED = {
    "CONNECT": request("CONNECT 192.0.2.1:443 HTTP/1.1"),
    "absolute form": request("POST http://127.0.0.1:4141/v1/responses HTTP/1.1"),
    "absolute form elsewhere": request("POST http://192.0.2.1/v1/responses HTTP/1.1", Host="192.0.2.1"),
    "another host": request(Host="192.0.2.1"),
    "another port": request(Host="127.0.0.1:80"),
    "no host": request(Host=None),
    "GET": request("GET /v1/responses HTTP/1.1"),
    "PUT": request("PUT /v1/responses HTTP/1.1"),
    "OPTIONS *": request("OPTIONS * HTTP/1.1"),
    "method of another case": request("post /v1/responses HTTP/1.1"),
    "another dialect": request("POST /v1/messages HTTP/1.1"),
    "models": request("POST /v1/models HTTP/1.1"),
    "a stored response": request("POST /v1/responses/resp_1/cancel HTTP/1.1"),
    "root": request("POST / HTTP/1.1"),
    "slash at the end": request("POST /v1/responses/ HTTP/1.1"),
    "two slashes": request("POST //v1/responses HTTP/1.1"),
    "two slashes and a host": request("POST //192.0.2.1/v1/responses HTTP/1.1"),
    "dots": request("POST /v1/../v1/responses HTTP/1.1"),
    "dots to another rollout": request("POST /v1/responses/../../../ok/other/v1/responses HTTP/1.1"),
    "encoded": request("POST /v1/%72esponses HTTP/1.1"),
    "encoded slash": request("POST /v1%2fresponses HTTP/1.1"),
    "encoded dots": request("POST /v1/%2e%2e/v1/responses HTTP/1.1"),
    "backslash": request("POST /v1\\responses HTTP/1.1"),
    "query": request("POST /v1/responses?url=http://192.0.2.1 HTTP/1.1"),
    "fragment": request("POST /v1/responses#x HTTP/1.1"),
    "user in the target": request("POST @192.0.2.1/v1/responses HTTP/1.1"),
    "no key": request(Authorization=None),
    "wrong key": request(Authorization="Bearer sandbox-0123456789abcdef0123456789abcdef"),
    "empty key": request(Authorization="Bearer "),
    "two lengths": smuggled("Content-Length: 2\r\nContent-Length: 0", ""),
    "length of another sign": smuggled("Content-Length: +0", ""),
    "bad chunk": smuggled("Transfer-Encoding: chunked", "0x0\r\n\r\n"),
    "unknown encoding": smuggled("Transfer-Encoding: gzip, chunked", "0\r\n\r\n"),
    "space before the colon": smuggled("Content-Length : 0", ""),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": bytes.fromhex("16030100a5010000a10303") + bytes(160),
}
# More than a door takes: the request, and how many bytes follow.
LARGE = {
    "endless header": (b"POST /v1/responses HTTP/1.1\r\nX: ", 1 << 20),
    "large body": (request(Content_Length=str(40 << 20)), 40 << 20),
    "large body without a key": (request(Content_Length=str(40 << 20), Authorization=None), 40 << 20),
}
# Requests that pass, and whose hidden second one does not: it has no key. The last one passes without a body, which is
# no request to the endpoint.
SMUGGLED = {
    "length and chunks": smuggled("Content-Length: 60\r\nTransfer-Encoding: chunked", "2\r\n{}\r\n0\r\n\r\n"),
    "pipeline": smuggled("Content-Length: 2", "{}"),
    "folded header": smuggled("X: a\r\n Content-Length: 0", ""),
}
ECHOES = ("body", "header", "split", "gzip", "error", "redirect")


@dataclass
class Relayed:
    """What the door answered to each request, and what the endpoint got."""

    answers: dict[str, bytes]
    endpoint: ModelEndpoint
    label: str
    key: str

    def status(self, name: str) -> int | None:
        """None: the connection was closed without an answer."""
        first = self.answers[name].partition(b"\r\n")[0].split()
        return int(first[1]) if first[:1] == [b"HTTP/1.1"] else None

    def passed(self) -> list[dict[str, Any]]:
        """Bodies of what the endpoint got, apart from the harness's own requests."""
        return [request.body for request in self.endpoint.requests[self.label] if "input" not in request.body]


def relay(core: Core, endpoint: ModelEndpoint, requests: dict[str, tuple[bytes, int]]) -> Relayed:
    """Sends the requests from inside a session of codex."""
    encoded = {name: (base64.b64encode(head).decode(), filler) for name, (head, filler) in requests.items()}
    label, files = uuid4().hex, {"probe.py": HELPERS + SEND, "requests.json": json.dumps(encoded)}
    endpoint.scripts[label] = "python3 probe.py"
    bundle = endpoint.bundle("codex", "attacked", label, KEY)
    session = core.agent("codex", bundle, environment={"files": inline(files)})
    turn = core.turn(session.id)
    assert turn.status == "completed", turn.error
    found = json.loads(core.artifacts(session.id)["/workspace/outputs/answers.json"])
    answers = {name: base64.b64decode(text) for name, text in found["answers"].items()}
    return Relayed(answers, endpoint, label, found["key"])


@pytest.fixture(scope="module")
def relayed(core: Core, model: ModelEndpoint) -> Relayed:
    neighbour = relay(core, model, {})
    assert neighbour.key.startswith("sandbox-")
    requests = {"good": (request(), 0), "key of another session": (request(Authorization=f"Bearer {neighbour.key}"), 0)}
    requests |= {name: (data, 0) for name, data in (REFUSED | SMUGGLED).items()} | LARGE
    requests |= {f"echo {wish}": (request(wish=wish), 0) for wish in ECHOES}
    return relay(core, model, requests)


def test_a_request_as_it_should_be_passes(relayed: Relayed) -> None:
    """The control."""
    assert relayed.status("good") == 200 and b"you sent" in relayed.answers["good"]


@pytest.mark.parametrize("name", [*REFUSED, *LARGE, "key of another session"])
def test_the_door_is_no_relay(relayed: Relayed, name: str) -> None:
    assert relayed.status(name) in (None, 400, 401, 403, 404, 413, 431, 501)


def test_only_the_requests_that_may_pass_arrive(relayed: Relayed) -> None:
    wishes = sorted(str(body.get("wish")) for body in relayed.passed())
    # Of the requests that hide another, what they show passes: `{}` in the first two.
    assert wishes == sorted(["body", *ECHOES, "None", "None"])
    assert not relayed.endpoint.requests["other"] and not relayed.endpoint.requests["elsewhere"]


@pytest.mark.parametrize("wish", ECHOES)
def test_the_key_does_not_come_back(relayed: Relayed, wish: str) -> None:
    answer = relayed.answers[f"echo {wish}"]
    assert relayed.status(f"echo {wish}") == {"error": 500, "redirect": 502}.get(wish, 200)
    assert KEY.encode() not in answer and b"[key]" in answer
    assert b"location" not in answer.lower() and b"x-other" not in answer.lower()


def test_what_the_endpoint_echoes_otherwise_is_the_key(model: ModelEndpoint) -> None:
    """The control: the same requests past the door."""
    for wish in ECHOES:
        url = f"{model.url}/attacked/control/v1/responses"
        answer = httpx.post(url, json={"wish": wish}, headers={"authorization": f"Bearer {KEY}"})
        assert KEY in answer.text + str(answer.headers)


def test_the_endpoint_sees_nothing_of_the_sandbox(relayed: Relayed) -> None:
    for request in relayed.endpoint.requests[relayed.label]:
        assert request.headers["authorization"] == f"Bearer {KEY}"
        assert relayed.key not in str(request.headers)


FLOOD = """
held = []
for _ in range(8):
    if os.fork() == 0:
        for _ in range(500):
            if attempt(lambda: held.append(socket.create_connection(("127.0.0.1", 4141), 1))) == "ok":
                attempt(held[-1].sendall, b"POST /v1/responses HTTP/1.1\\r\\nHost: ")
        print("flooded", flush=True)
        time.sleep(600)
time.sleep(600)
"""


def test_thousands_of_connections_do_not_stop_the_server(core: Core) -> None:
    before = open_files(core)
    session = core.shell(script_of(FLOOD))
    hear(core, session.id, "flooded")
    assert inside(core, "print(1)") == 1
    assert open_files(core) - before < 200
    assert end(core, session.id).status == "cancelled"


def open_files(core: Core) -> int:
    return len(list(Path(f"/proc/{core.service.process.pid}/fd").iterdir()))


HOLD = """
held = []
head = b"POST /v1/responses HTTP/1.1\\r\\nHost: 127.0.0.1:4141\\r\\nAuthorization: Bearer " + own_key()
for _ in range(16):
    client = socket.create_connection(("127.0.0.1", 4141), 10)
    attempt(client.sendall, head + b"\\r\\nContent-Length: 30000000\\r\\n\\r\\n" + bytes(20_000_000))
    held.append(client)
os.makedirs("outputs")
open("outputs/answers.json", "w").write(json.dumps({"key": "", "answers": {}}))
"""


def test_unfinished_requests_do_not_fill_the_memory(core: Core, model: ModelEndpoint) -> None:
    label, before = uuid4().hex, peak_memory(core)
    program = HELPERS + SEND.partition("def exchange")[0] + HOLD
    model.scripts[label] = "python3 hold.py"
    bundle = model.bundle("codex", "attacked", label, KEY)
    session = core.agent("codex", bundle, environment={"files": inline({"hold.py": program})})
    assert core.turn(session.id).status == "completed"
    assert "/workspace/outputs/answers.json" in core.artifacts(session.id)
    assert peak_memory(core) - before < 160 << 20  # of 320
