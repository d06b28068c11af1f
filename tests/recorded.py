"""A recording gateway under test: a process of its own before an engine of tests/engine.py."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from engine import MODEL, Engine

from gateway.store import Trace, log_path, read

ROOT = Path(__file__).parents[1]
PATHS = {"responses": "responses", "chat": "chat/completions", "messages": "messages"}
Doc = dict[str, Any]


@dataclass
class Recorder:
    process: subprocess.Popen[str]
    exports: dict[str, str]
    traces: Path
    engine: Engine
    log: Path
    rollout: str = "r"
    """The one that a test speaks of when it names none."""

    def __post_init__(self) -> None:
        self.client = httpx.Client(trust_env=False, timeout=30)

    @property
    def key(self) -> str:
        return self.exports["MODEL_API_KEY"]

    def url(self, rollout: str | None = None) -> str:
        return self.exports["MODEL_BASE_URL"].replace("{rollout_id}", rollout or self.rollout)

    def post(
        self, dialect: str, body: Doc, rollout: str | None = None, key: str | None = None, **headers: str
    ) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.key if key is None else key}", **headers}
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.client.post(f"{self.url(rollout)}/{PATHS.get(dialect, dialect)}", json=body, headers=named)

    def control(self, method: str, path: str, body: Doc | None = None, key: str | None = None) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.exports['GATEWAY_ADMIN_KEY'] if key is None else key}"}
        url = self.exports["GATEWAY_CONTROL_URL"] + path
        return self.client.request(method, url, json={} if body is None else body, headers=headers)

    def trace(self, rollout: str | None = None, attempt: int = 1) -> Trace:
        return read(log_path(self.traces, rollout or self.rollout, attempt))

    def states(self, rollout: str | None = None, attempt: int = 1) -> list[str]:
        return [record.state for record in self.trace(rollout, attempt).calls.values()]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def said(self) -> str:
        return self.log.read_text()


@contextlib.contextmanager
def recorder(engine: Engine, folder: Path, *options: str, **environment: str) -> Iterator[Recorder]:
    log = folder / "gateway.log"
    arguments = ["--upstream", engine.url, "--model", MODEL, "--traces", str(folder / "traces"), *options]
    with log.open("a") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "gateway", "serve", *arguments],
            cwd=ROOT,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    with process:
        assert process.stdout
        lines = "".join(process.stdout.readline() for _ in range(4))
        exports = dict(re.findall(r"export (\w+)='(.*)'", lines))
        if len(exports) != 4:
            raise AssertionError(f"the gateway did not start: {process.wait(10)} {log.read_text()}")
        running = Recorder(process, exports, folder / "traces", engine, log)
        engine.served.clear()  # the probe's
        try:
            yield running
        finally:
            process.kill()
            running.client.close()


def another(shared: Recorder) -> Recorder:
    """The same gateway with a rollout of its own, and the engine as it began."""
    shared.engine.reset()
    return replace(shared, rollout=f"r{next(NUMBERS)}")


NUMBERS = itertools.count(1)


def body(dialect: str, text: str = "Do the task.", stream: bool = False, tools: bool = False, **more: Any) -> Doc:
    """A first request."""
    user = [{"role": "user", "content": text}]
    schema = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
    declared = {
        "responses": {"type": "function", "name": "bash", "parameters": schema},
        "chat": {"type": "function", "function": {"name": "bash", "parameters": schema}},
        "messages": {"name": "bash", "input_schema": schema},
    }[dialect]
    made: Doc = {"model": MODEL, "input" if dialect == "responses" else "messages": user}
    made |= {"tools": [declared]} if tools else {}
    made |= {"max_tokens": 1000} if dialect == "messages" else {}
    return made | ({"stream": True} if stream else {}) | more


def raw(gateway: Recorder, dialect: str, request: Doc) -> socket.socket:
    """A connection on which the request was sent, with a receive buffer that holds little."""
    url, data = httpx.URL(gateway.url()), json.dumps(request).encode()
    head = f"POST {url.path}/{PATHS[dialect]} HTTP/1.1\r\nhost: x\r\nx-api-key: {gateway.key}\r\n"
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(20)
    connection.connect((url.host, url.port))
    connection.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    return connection


def read_events(connection: socket.socket, count: int) -> bytes:
    """Read until `count` events have come whole."""
    data = b""
    while data.count(b"\n\n") < count:
        got = connection.recv(1 << 20)
        assert got, data[-200:]
        data += got
    return data


def text_of(dialect: str, reply: Doc) -> str:
    if dialect == "chat":
        return str(reply["choices"][0]["message"]["content"])
    blocks = reply["content"] if dialect == "messages" else reply["output"][-1]["content"]
    return "".join(block.get("text", "") for block in blocks)


def usage_of(dialect: str, reply: Doc) -> tuple[int, int]:
    usage = reply["usage"]
    if dialect == "chat":
        return usage["prompt_tokens"], usage["completion_tokens"]
    return usage["input_tokens"], usage["output_tokens"]


def events_of(text: str) -> list[tuple[str, Any]]:
    """The events of a stream, comments left out, as (event name, data)."""
    found = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n") if line and not line.startswith(":"))
        if "data" in fields:
            data = fields["data"]
            found.append((fields.get("event", ""), data if data == "[DONE]" else json.loads(data)))
    return found
