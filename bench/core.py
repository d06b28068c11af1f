#!/usr/bin/env python3
"""What Core itself costs: requests, sessions, streams and a large database. A server of its own, raw HTTP on loopback.

    python3 bench/core.py [--sessions N] [--turns N]

For 1, 64 and 256 sessions in flight: sessions per second, CPU of Core per session, and p50/p95 of a create, a poll and
an artifact read in ms. Then memory per live idle session, events per second to 32 readers of one flood of output, and
list queries against a database that holds N turns (DESIGN.md and issue: under 5 ms; Core under 150 MB). Root or user
namespaces needed, no network.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import aiohttp

sys.path[0] = str(Path(__file__).parents[1])  # not this folder, where `core` would be this file

from bench.overhead import percentile, service, stat_cpu_ms  # noqa: E402
from core.store import Store, new_id  # noqa: E402

SCRIPT = """mkdir -p outputs && echo '{"x": 1}' > outputs/answer.json"""
ENVIRONMENT = {"type": "openai_hosted", "network": {"access": "disabled"}}
AGENT = {"x_agents_core": {"harness": "shell"}}
ENDED = ("completed", "failed", "cancelled")
FIRST_POLL, POLL_GROWTH = 0.2, 1.5  # as the script does
READERS, FLOOD_LINES = 32, 2000
Doc = dict[str, Any]


class Timed:
    """A client whose requests are timed by name, in ms. On aiohttp: its own cost must not drown what is measured."""

    def __init__(self, exports: dict[str, str]) -> None:
        headers = {"Authorization": f"Bearer {exports['OPENAI_API_KEY']}", "OpenAI-Beta": "agents=v1"}
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=120)
        self.base_url = exports["OPENAI_BASE_URL"]
        self.client = aiohttp.ClientSession(headers=headers, connector=connector, timeout=timeout)
        self.times: dict[str, list[float]] = defaultdict(list)

    async def __aenter__(self) -> Timed:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.client.close()

    async def __call__(self, name: str, method: str, path: str, body: Doc | None = None) -> Any:
        """The parsed answer; None when it is not JSON."""
        started = time.perf_counter()
        async with self.client.request(method, self.base_url + path, json=body) as answer:
            data = await answer.read()
            self.times[name].append((time.perf_counter() - started) * 1000)
            answer.raise_for_status()
            return json.loads(data) if answer.content_type == "application/json" and data else None


async def session(timed: Timed) -> None:
    body = {"agent": AGENT, "environment": ENVIRONMENT, "input": SCRIPT}
    path = f"/agents/sessions/{(await timed('create', 'POST', '/agents/sessions', body))['id']}"
    pause = FIRST_POLL
    while True:
        await asyncio.sleep(pause)
        pause *= POLL_GROWTH
        (turn,) = (await timed("poll", "GET", f"{path}/turns"))["data"]
        if turn["status"] in ENDED:
            break
    assert turn["status"] == "completed", turn
    (artifact,) = (await timed("artifacts", "GET", f"{path}/artifacts"))["data"]
    await timed("content", "GET", f"{path}/artifacts/{artifact['id']}/content")
    await timed("delete", "DELETE", path)


async def in_flight(exports: dict[str, str], core: int, sessions: int, flight: int) -> str:
    slots = asyncio.Semaphore(flight)

    async def one(timed: Timed) -> None:
        async with slots:
            await session(timed)

    cpu, started = stat_cpu_ms(core)[0], time.perf_counter()
    async with Timed(exports) as timed:
        await asyncio.gather(*(one(timed) for _ in range(sessions)))
    seconds = time.perf_counter() - started
    cpu = (stat_cpu_ms(core)[0] - cpu) / sessions
    columns = [f"{sessions / seconds:.1f}", f"{cpu:.1f}"]
    for name in ("create", "poll", "content"):
        times = timed.times[name]
        columns.append(f"{statistics.median(times):.1f} / {percentile(times, 0.95):.1f}")
    return f"| {flight} | {' | '.join(columns)} |"


def resident_kb(pid: int) -> int:
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1])


async def memory(exports: dict[str, str], core: int, count: int) -> str:
    """kB that Core grows by for each idle session it holds."""
    before, body = resident_kb(core), {"agent": AGENT, "environment": ENVIRONMENT}
    async with Timed(exports) as timed:
        names = [(await timed("create", "POST", "/agents/sessions", body))["id"] for _ in range(count)]
        grown = (resident_kb(core) - before) / count
        for name in names:
            await timed("delete", "DELETE", f"/agents/sessions/{name}")
    return f"memory per live session   {grown:.1f} kB; Core in all {resident_kb(core) / 1024:.0f} MB"


async def streams(exports: dict[str, str]) -> str:
    """Events per second that 32 readers of one session get, all together."""
    body, ready = {"agent": AGENT, "environment": ENVIRONMENT}, asyncio.Semaphore(0)
    script = f"for i in $(seq {FLOOD_LINES}); do echo line $i; sleep 0.001; done"
    message = {"role": "user", "content": [{"type": "input_text", "text": script}]}
    events = {"events": [{"type": "agent.session.input.message", "input": [message]}]}
    async with Timed(exports) as timed:
        path = f"/agents/sessions/{(await timed('create', 'POST', '/agents/sessions', body))['id']}"
        readers = [asyncio.create_task(count_events(timed, path, ready)) for _ in range(READERS)]
        for _ in readers:
            await ready.acquire()
        started = time.perf_counter()
        await timed("say", "POST", f"{path}/events", events)
        total = sum(await asyncio.gather(*readers))
        seconds = time.perf_counter() - started
        await timed("delete", "DELETE", path)
    return f"events to {READERS} readers      {total / seconds:.0f} per second ({total} in {seconds:.1f} s)"


async def count_events(timed: Timed, path: str, ready: asyncio.Semaphore) -> int:
    """How many events a reader got until the turn was over."""
    count = 0
    async with timed.client.get(f"{timed.base_url}{path}/events") as answer:
        async for line in answer.content:
            if line.startswith(b": connected"):
                ready.release()
            count += line.startswith(b"id: ")
            if line == b"event: agent.session.turn.completed\n":
                return count
    raise AssertionError("the stream ended early")


# ── a large database ────────────────────────────────────────────────────────────────────────────


def fill(data: Path, turns: int, per_session: int = 100) -> str:
    """Turns with two items each, over many sessions; returns the id of one of them."""
    store, session_id = Store(data), ""
    now = int(time.time())
    for _ in range(max(1, turns // per_session)):
        session_id = new_id()
        with store.transaction():
            stored: Doc = json.loads(json.dumps(TEMPLATE)) | {
                "id": session_id,
                "created_at": now,
                "last_active_at": now,
            }
            stored["agent"]["id"], stored["environment"]["id"] = new_id(), new_id()
            store.add_session(stored)
            for _ in range(per_session):
                turn = {"id": new_id(), "session_id": session_id, "status": "completed", "usage": None, "error": None}
                store.add_turn(turn)
                for _ in range(2):
                    item: Doc = {
                        "id": new_id(),
                        "type": "message",
                        "turn_id": turn["id"],
                        "content": [],
                        "role": "user",
                    }
                    store.save_item(session_id, item)
    store.close()
    return session_id


TEMPLATE: Doc = {
    "object": "agent.session",
    "agent": {"x_agents_core": {"harness": "shell", "harness_config": {}}},
    "environment": {},
    "metadata": {"run_id": "bench"},
    "spend_control": None,
    "_environment": {"status": "expired", "error": None},
    "_secrets": False,
    "_thread": None,
    "_usage": None,
}


async def large_database(exports: dict[str, str], session_id: str) -> list[str]:
    path = f"/agents/sessions/{session_id}"
    queries = {
        "turns": f"{path}/turns",
        "items, 100": f"{path}/items?limit=100",
        "sessions": "/agents/sessions",
        "sessions of a run": "/agents/sessions?metadata%5Brun_id%5D=bench",
    }
    async with Timed(exports) as timed:
        for _ in range(100):
            for name, query in queries.items():
                await timed(name, "GET", query)
    return [
        f"  list {name:20}  p50 {statistics.median(times):.1f} ms, p95 {percentile(times, 0.95):.1f} ms"
        for name, times in timed.times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=300, help="per row (%(default)s)")
    parser.add_argument("--turns", type=int, default=100_000, help="in the large database (%(default)s)")
    arguments = parser.parse_args()
    with service("core", "serve", "--slots", "256") as (core, exports):
        print("| in flight | sessions/s | Core CPU, ms | create p50 / p95, ms | poll | content |")
        print("| --- | --- | --- | --- | --- | --- |")
        for flight in (1, 64, 256):
            count = arguments.sessions if flight > 1 else min(30, arguments.sessions)
            print(asyncio.run(in_flight(exports, core, max(count, flight), flight)), flush=True)
        print(asyncio.run(memory(exports, core, 500)), flush=True)
        print(asyncio.run(streams(exports)), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        session_id = fill(Path(folder), arguments.turns)
        with service("core", "serve", "--data", folder) as (core, exports):
            print(f"a database of {arguments.turns} turns")
            print("\n".join(asyncio.run(large_database(exports, session_id))))


if __name__ == "__main__":
    main()
