#!/usr/bin/env python3
"""What the script itself costs: CPU, memory, requests and file handles, against a deployment that follows a script.

    python3 bench/sweep.py [--rollouts N] [--concurrency N] [--turn-seconds S] [--errors SHARE]

The deployment (tests/scripted_deployment.py) is a process of its own. Each figure is of a whole process of
`rl_eval.py`, its start taken off by a run of one rollout. Beside the CPU: what the same six requests cost by the stock
client alone, which no program that uses it can go below. Prints a Markdown table beside the budgets.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
KEY = "scripted-deployment-key"
ENVIRONMENT: Any = {"type": "openai_hosted", "files": [], "network": {"access": "disabled"}}


def serve(connection: Connection, turn_seconds: float, errors: float) -> None:
    """A deployment whose every 1 / errors-th create is refused with 500 once. Answers each message with its counts."""
    sys.path.insert(0, str(ROOT / "tests"))
    from scripted_deployment import Script, serving  # type: ignore[import-not-found]

    asked = [0]

    def outage(operation: str) -> tuple[int, dict[str, str], dict[str, str]] | None:
        asked[0] += operation == "create"
        failing = operation == "create" and errors and asked[0] % round(1 / errors) == 0
        return (500, {"code": "internal_error", "message": "down"}, {}) if failing else None

    with serving(Script(turn_seconds=turn_seconds)) as deployment:
        deployment.outage = outage
        connection.send(deployment.base_url)
        while connection.recv():
            connection.send(dict(deployment.calls))
            deployment.calls.clear()
            deployment.sessions.clear()
            deployment.keys.clear()
            deployment.requests.clear()
            deployment.creates.clear()


def bare(connection: Connection, base_url: str, rollouts: int, concurrency: int) -> None:
    """The requests of so many rollouts by the client alone, nothing kept, nothing repeated. Sends seconds of CPU."""
    import openai

    async def rollout(client: Any, room: asyncio.Semaphore, name: str) -> None:
        sessions = client.beta.agents.sessions
        raw, turns = sessions.with_raw_response, sessions.turns.with_raw_response
        async with room:
            once: Any = {"metadata": {"rollout_id": name}, "extra_headers": {"Idempotency-Key": name}}
            made = await raw.create(agent={}, input="Solve it.", environment=ENVIRONMENT, **once)
            session = json.loads(made.content)["id"]
            await asyncio.sleep(0.2)  # as the script waits before its first poll
            json.loads((await turns.list(session, limit=100)).content)
            found = json.loads((await sessions.artifacts.with_raw_response.list(session, limit=100)).content)
            artifact = found["data"][0]["id"]
            async with sessions.artifacts.with_streaming_response.content(artifact, session_id=session) as answer:
                await answer.read()
            json.loads((await sessions.items.with_raw_response.list(session, limit=100)).content)
            await raw.delete(session)

    async def all_of_them() -> float:
        http = openai.DefaultAioHttpClient()
        room = asyncio.Semaphore(concurrency)
        async with openai.AsyncOpenAI(base_url=base_url, api_key=KEY, max_retries=0, http_client=http) as client:
            await rollout(client, room, "first")  # imports what it needs
            began = time.process_time()
            await asyncio.gather(*(rollout(client, room, str(n)) for n in range(rollouts)))
            return time.process_time() - began

    connection.send(asyncio.run(all_of_them()))


class Cost(NamedTuple):
    cpu: float  # seconds
    seconds: float
    peak_mb: float
    handles: int
    requests: int


class Bench:
    def __init__(self, folder: Path, connection: Connection) -> None:
        self.folder, self.connection, self.base_url = folder, connection, str(connection.recv())
        task = folder / "tasks" / "t"
        task.mkdir(parents=True)
        (task / "instruction.md").write_text("Solve it.")
        (task / "expected.json").write_text('{"x": 1}')

    def cost(self, rollouts: int, concurrency: int) -> Cost:
        """Run so many rollouts. Every one must have been graded."""
        out = self.folder / f"{rollouts}-{concurrency}.jsonl"
        words = [sys.executable, str(ROOT / "rl_eval.py"), "--tasks", str(self.folder / "tasks"), "--quiet"]
        words += ["--samples", str(rollouts), "--concurrency", str(concurrency), "--out", str(out)]
        env = {**os.environ, "OPENAI_BASE_URL": self.base_url, "OPENAI_API_KEY": KEY}
        began = time.monotonic()
        process = subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL)
        handles: list[int] = [0]
        watcher = threading.Thread(target=watch, args=(process.pid, handles))
        watcher.start()
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.monotonic() - began
        watcher.join()
        process.returncode = os.waitstatus_to_exitcode(status)
        with out.open() as file:
            scored = sum(json.loads(line)["reward"] == 1.0 for line in file)
        assert (process.returncode, scored) == (0, rollouts), f"exit code {process.returncode}, {scored} scored"
        self.connection.send(True)
        calls: dict[str, Any] = self.connection.recv()
        cpu = usage.ru_utime + usage.ru_stime
        return Cost(cpu, seconds, usage.ru_maxrss / 1024, max(handles), sum(calls.values()))


def watch(pid: int, handles: list[int]) -> None:
    """Collect how many files a process has open, until it has ended."""
    while True:
        try:
            handles.append(len(os.listdir(f"/proc/{pid}/fd")))  # noqa: PTH208  the names are not looked at
        except OSError:
            return
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--turn-seconds", type=float, default=0.0)
    parser.add_argument("--errors", type=float, default=0.0)
    o = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    server = context.Process(target=serve, args=(there, o.turn_seconds, o.errors), daemon=True)
    server.start()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), here)
        start, alone = bench.cost(1, 1), bench.cost(10, 1)
        tenth, whole = bench.cost(o.rollouts // 10, o.concurrency), bench.cost(o.rollouts, o.concurrency)
        ours, theirs = context.Pipe()
        alone_client = context.Process(target=bare, args=(theirs, bench.base_url, o.rollouts, o.concurrency))
        alone_client.start()
        theirs.close()  # so that its end is seen, should it fail
        client = float(ours.recv()) / o.rollouts * 1000
        alone_client.join()
    here.send(False)
    server.join()
    cpu = (whole.cpu - start.cpu) / (o.rollouts - 1) * 1000
    print("| What | Measured | Budget |\n| --- | --- | --- |")
    print(f"| CPU of the script per rollout | {cpu:.1f} ms, {cpu / client:.2f} × the client alone | 5 ms |")
    print(f"| CPU of its six requests by the stock client alone | {client:.1f} ms | – |")
    print(f"| CPU of the script's start and end | {start.cpu:.1f} s | – |")
    peaks = f"{tenth.peak_mb:.0f} and {whole.peak_mb:.0f} MB, {whole.peak_mb / tenth.peak_mb:.2f} ×"
    print(f"| peak memory, {o.rollouts // 10} and {o.rollouts} rollouts | {peaks} | 60 MB, 1.1 × |")
    asked = f"{alone.requests / 10:.1f} and {whole.requests / o.rollouts:.1f}"
    print(f"| requests per rollout, 1 and {o.concurrency} in flight | {asked} | the same |")
    print(f"| open files at most | {whole.handles} | – |")
    print(f"| rollouts per second | {o.rollouts / whole.seconds:.0f} | – |")


if __name__ == "__main__":
    main()
