#!/usr/bin/env python3
"""When the first words of a reply arrive: from the engine, through a gateway that replays, and through a live one.

    python3 bench/live.py [--calls N] [--tokens-per-second R]

One scripted engine (tests/engine.py) writes 100 tokens at that pace, a chunk each, and the three are asked in turns.
Printed per server: ms to the first delta and to the end, p50 and p95. Then the same engine without a pace, 64 calls in
flight: calls per second, which is what it costs to pass 100 chunks on instead of one reply.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx

sys.path[0] = str(Path(__file__).parents[1])  # not this folder, where `gateway` would be another module

from bench.serving import gateway, measure, p95, process, python  # noqa: E402

ENGINE = """
from engine import engine
with engine(script=lambda asked: "word " * 19 + "end.", chunk_tokens=1, token_seconds={seconds}) as running:
    print(running.url, flush=True)
    sys.stdin.read()
"""
IN_FLIGHT = 64


async def times_of(url: str, key: str, number: int) -> tuple[float, float]:
    """(ms to the first delta with text, ms to the end)."""
    messages = [{"role": "user", "content": f"{number} {time.monotonic_ns()}"}]
    body = json.dumps({"model": "tiny", "messages": messages, "stream": True})
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    async with httpx.AsyncClient(timeout=120, trust_env=False, headers=headers) as client:
        started = time.perf_counter()
        async with client.stream("POST", f"{url}/chat/completions", content=body) as answer:
            first = await first_delta(answer.aiter_lines())
            return (first - started) * 1000, (time.perf_counter() - started) * 1000


async def first_delta(lines: AsyncIterator[str]) -> float:
    """When it came; the rest is read too."""
    came = None
    async for line in lines:
        data = line.removeprefix("data: ")
        if came is None and data.startswith("{"):
            choices = json.loads(data)["choices"]
            came = time.perf_counter() if choices and choices[0]["delta"].get("content") else None
    assert came is not None
    return came


def report_delays(servers: dict[str, tuple[str, str]], calls: int) -> None:
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in servers}
    for number in range(calls + 1):
        for name, (url, key) in servers.items():
            measured = asyncio.run(times_of(url.replace("{rollout_id}", "paced"), key, number))
            if number:  # the first round warms up
                found[name].append(measured)
    for name, pairs in found.items():
        first, end = ([pair[index] for pair in pairs] for index in (0, 1))
        middles = f"first delta p50 {statistics.median(first):7.1f} ms  p95 {p95(first):7.1f} ms"
        print(f"  {name:<14} {middles}  end p50 {statistics.median(end):7.1f} ms")


def report_rates(servers: dict[str, tuple[str, str]], calls: int) -> None:
    rates: dict[str, list[float]] = {name: [] for name in servers}
    for number in range(4):
        for name, (url, key) in servers.items():
            _, rate = asyncio.run(measure(url, key, True, IN_FLIGHT, calls))
            if number:
                rates[name].append(rate)
    for name, found in rates.items():
        print(f"  {name:<14} {statistics.median(found):5.0f} calls/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=10, help="per server; default 10")
    parser.add_argument("--tokens-per-second", type=float, default=50.0, help="default 50")
    options = parser.parse_args()
    for seconds in (1 / options.tokens_per_second, 0.0):
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            url = stack.enter_context(process(python(ENGINE.format(seconds=seconds)), 1)).strip()
            servers = {"engine": (url, "none")}
            servers["gateway"] = stack.enter_context(gateway(url, f"{folder}/replayed"))
            servers["gateway --live"] = stack.enter_context(gateway(url, f"{folder}/live", "--live"))
            if seconds:
                print(f"100 tokens, {options.tokens_per_second:g} a second")
                report_delays(servers, options.calls)
            else:
                print(f"100 tokens at once, {IN_FLIGHT} in flight")
                report_rates(servers, IN_FLIGHT)


if __name__ == "__main__":
    main()
