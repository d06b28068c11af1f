#!/usr/bin/env python3
"""What the recording gateway adds to a call, beside a bare pass-through of the same bytes and LiteLLM's proxy.

    python3 bench/serving.py [--calls N] [--litellm PATH-OF-ITS-PROGRAM]

Each server is a process of its own before one scripted engine (tests/engine.py). In turns, round by round, so that a
busy machine is busy for all: the engine directly, two starlette applications that pass bytes on (with httpx and with
aiohttp, which the gateway uses), the gateway, a second one with its traces in memory (/dev/shm), which tells what the
disk costs, and `litellm` where it is given. All are sent the same bytes, which ask for token ids and log probabilities
as the gateway must, so that the engine does the same for each; but of a streamed call the gateway asks the engine for
the whole reply, which costs that one less than its chunks. Printed: p50 and p95 in ms and calls per second at 1 and 64
in flight, streamed and not, and deep in a rollout; what each adds at the median, and how many times what the first
pass-through adds. A call has 1,000 prompt tokens and 100 sampled ones; a deep one has 100 turns of 92,000 tokens in
all, and each extends the one before. The traces lie on the disk of the temporary folder: the gateway waits for it once
per call.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import httpx

ROOT = Path(__file__).parents[1]
ROUNDS = 6
ANSWER_SECONDS = 60
IN_FLIGHT = (1, 64)
DEEP_TURNS = 100
DEEP_TOKENS = 92_000  # the engine's tokens are bytes
CAPTURE = {"logprobs": True, "top_logprobs": 0, "return_token_ids": True, "return_tokens_as_token_ids": True}
SERVER = """
import asyncio, socket, sys
sys.path[:0] = [{root!r}, {tests!r}]
{body}
"""
ENGINE = """
import time
from engine import engine
with engine(script=lambda asked: "x" * 99) as running:
    print(running.url, flush=True)
    sys.stdin.read()
"""
WITH_HTTPX = """
import httpx
client = httpx.AsyncClient(timeout=60, trust_env=False, limits=httpx.Limits(max_connections=None))

async def pass_on(request):
    data = await request.body()
    if b'"stream":true' not in data:
        answer = await client.post({url!r} + "/chat/completions", content=data, headers=KIND)
        return Response(answer.content, answer.status_code, media_type="application/json")
    sent = client.build_request("POST", {url!r} + "/chat/completions", content=data, headers=KIND)
    answer = await client.send(sent, stream=True)
    return StreamingResponse(answer.aiter_raw(), answer.status_code, media_type="text/event-stream")
"""
WITH_AIOHTTP = """
import aiohttp, functools

@functools.cache
def client():
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3))

async def pass_on(request):
    data = await request.body()
    answer = await client().post({url!r} + "/chat/completions", data=data, headers=KIND)
    if b'"stream":true' not in data:
        return Response(await answer.read(), answer.status, media_type="application/json")
    return StreamingResponse(answer.content.iter_any(), answer.status, media_type="text/event-stream")
"""
PASS_THROUGH = """
import uvicorn
from starlette.applications import Starlette
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
KIND = {{"content-type": "application/json"}}
{pass_on}
listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
listener.bind(("127.0.0.1", 0))
listener.listen(512)
print(f"http://127.0.0.1:{{listener.getsockname()[1]}}", flush=True)
app = Starlette(routes=[Route("/chat/completions", pass_on, methods=["POST"])])
uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off")).run(sockets=[listener])
"""


@contextlib.contextmanager
def process(command: list[str], lines: int, **environment: str) -> Iterator[str]:
    """A server that lives as long as the block; what it printed first."""
    running = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert running.stdout
        yield "".join(running.stdout.readline() for _ in range(lines))
    finally:
        running.kill()
        running.wait()


def python(body: str) -> list[str]:
    return [sys.executable, "-c", SERVER.format(root=str(ROOT), tests=str(ROOT / "tests"), body=body)]


@contextlib.contextmanager
def gateway(engine: str, folder: str, *options: str) -> Iterator[tuple[str, str]]:
    command = [sys.executable, "-m", "gateway", "serve", "--upstream", engine, "--model", "tiny", "--traces", folder]
    with process([*command, *options], 4) as printed:
        exports = dict(re.findall(r"export (\w+)='(.*)'", printed))
        yield exports["MODEL_BASE_URL"], exports["MODEL_API_KEY"]


@contextlib.contextmanager
def litellm(program: str, engine: str, folder: str) -> Iterator[tuple[str, str]]:
    """LiteLLM's proxy with one model, once it answers."""
    chosen = {"model": "openai/tiny", "api_base": engine, "api_key": "none"}
    settings = Path(folder, "litellm.yaml")
    settings.write_text(json.dumps({"model_list": [{"model_name": "tiny", "litellm_params": chosen}]}))
    url = "http://127.0.0.1:4711"
    command = [program, "--config", str(settings), "--host", "127.0.0.1", "--port", "4711"]
    with process(command, 0, LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY="true"):
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/health/liveliness", timeout=5).status_code == 200:
                    break
            time.sleep(0.5)
        yield url, "none"


def turns(tokens: int, text: str) -> list[dict[str, str]]:
    """A conversation of about so many tokens in so many turns that it is deep, which begins with `text`."""
    each = tokens // DEEP_TURNS - len("<|im_start|>assistant\n<|im_end|>\n")
    roles = ("user", "assistant")
    made = [{"role": roles[n % 2], "content": f"{n} ".ljust(each, "x")} for n in range(DEEP_TURNS)]
    return [{"role": "user", "content": text}, *made]


def request(name: int, number: int, stream: bool, deep: bool) -> str:
    """The body of a call. A deep one extends those before it by a turn; any other begins a conversation."""
    text = f"{name} {number} {time.monotonic_ns()} ".ljust(970, "x")
    messages = [{"role": "user", "content": text}]
    if deep:
        messages = [
            *turns(DEEP_TOKENS, str(name)),
            *({"role": "user", "content": str(n)} for n in range(number)),
            *messages,
        ]
    asked = {"model": "tiny", "messages": messages, **CAPTURE, **({"stream": True} if stream else {})}
    return json.dumps(asked, separators=(",", ":"))


async def measure(
    url: str, key: str, stream: bool, in_flight: int, calls: int, deep: bool = False
) -> tuple[list[float], float]:
    """(ms of each call, calls per second)."""
    times: list[float] = []
    numbers = iter(range(calls))
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    # Connections that the servers would close soon are not used again.
    connector, patience = aiohttp.TCPConnector(limit=0, keepalive_timeout=2), aiohttp.ClientTimeout(ANSWER_SECONDS)
    async with aiohttp.ClientSession(connector=connector, timeout=patience) as client:

        async def worker(name: int) -> None:
            own = f"{url.replace('{rollout_id}', f'rollout-{name}')}/chat/completions"
            for number in numbers:
                data = request(name, number, stream, deep)
                started = time.perf_counter()
                async with client.post(own, data=data, headers=headers) as answer:
                    text = await answer.read()
                times.append((time.perf_counter() - started) * 1000)
                assert answer.status == 200, text

        began = time.perf_counter()
        await asyncio.gather(*(worker(number) for number in range(in_flight)))
        return times, calls / (time.perf_counter() - began)


def p95(times: list[float]) -> float:
    return statistics.quantiles(times, n=20)[-1]


def compare(servers: dict[str, tuple[str, str]], stream: bool, in_flight: int, calls: int, deep: bool = False) -> None:
    """One block of the table."""
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in servers}
    lost: list[str] = []
    for number in range(ROUNDS + 1):
        for name, (url, key) in servers.items():
            try:
                times, rate = asyncio.run(measure(url, key, stream, in_flight, calls // ROUNDS, deep))
            except asyncio.TimeoutError:
                print(f"\n{name} left a call unanswered for {ANSWER_SECONDS} s: left out from here on", flush=True)
                lost.append(name)
                continue
            if number:  # the first round warms up
                found[name][0].extend(times)
                found[name][1].append(rate)
        for name in lost:
            servers.pop(name, None)
            found.pop(name, None)
    print(f"\n{'streamed' if stream else 'unary'}, {in_flight} in flight{', deep' if deep else ''}")
    base, passing = (statistics.median(found[name][0]) for name in ("engine", "pass-through"))
    for name, (times, rates) in found.items():
        middle, rate = statistics.median(times), statistics.median(rates)
        added = (
            f"{middle - base:9.2f} ms added, {(middle - base) / (passing - base):5.2f} x" if name != "engine" else ""
        )
        print(f"  {name:<14} p50 {middle:8.2f} ms  p95 {p95(times):8.2f} ms  {rate:7.0f}/s {added}", flush=True)


def run(calls: int, litellm_program: str | None) -> None:
    """The whole table."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        engine = stack.enter_context(process(python(ENGINE), 1)).strip()
        servers: dict[str, Any] = {"engine": (engine, "none")}
        for name, pass_on in (("pass-through", WITH_HTTPX), ("with aiohttp", WITH_AIOHTTP)):
            command = python(PASS_THROUGH.format(pass_on=pass_on.format(url=engine)))
            servers[name] = (stack.enter_context(process(command, 1)).strip(), "none")
        servers["gateway"] = stack.enter_context(gateway(engine, folder))
        memory = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
        servers["in memory"] = stack.enter_context(gateway(engine, memory))
        if litellm_program:
            servers["litellm"] = stack.enter_context(litellm(litellm_program, engine, folder))
        for stream in (False, True):
            for in_flight in IN_FLIGHT:
                compare(servers, stream, in_flight, max(calls, 2 * ROUNDS * in_flight))
        compare(servers, False, 1, max(calls // 5, ROUNDS), deep=True)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--calls", type=int, default=400, help="per server and block; default 400")
    parser.add_argument("--litellm", metavar="PATH", help="the program `litellm` of an environment of its own")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options(parser)
    chosen = parser.parse_args()
    run(chosen.calls, chosen.litellm)


if __name__ == "__main__":
    main()
