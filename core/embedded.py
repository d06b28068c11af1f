"""Services as child processes that live as long as their parent: how a script starts a deployment of its own.

Each has a pipe as its stdin. When it closes, which the kernel does even after a kill -9, they stop and kill all they
run. In a session of their own, they get no Ctrl-C of the terminal.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
STOP_SECONDS = 30.0
KEYS = ("MODEL_API_KEY", "OPENAI_API_KEY", "OPENAI_BASE_URL")  # of the parent; no business of a service


class ServiceFailed(Exception):
    """A service ended before it listened. `code`: its exit code, or 3."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"the embedded {name} did not start")
        self.code = code


class Services:
    """Modules of this project that serve, each by `python3 -m NAME serve`. `on_exit` is told of one that dies."""

    def __init__(self, on_exit: Callable[[str], None]) -> None:
        self.on_exit, self.stopping = on_exit, False
        self.processes: list[asyncio.subprocess.Process] = []
        self.watchers: list[asyncio.Future[None]] = []

    async def start(self, name: str, first_line: str = "") -> list[str]:
        """Starts a service; returns the base URL and the key that it prints once it listens. Raises ServiceFailed."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", name, "serve", "--exit-with-stdin"),
            stdin=pipe,
            stdout=pipe,
            start_new_session=True,
            cwd=PROJECT,
            env={name: value for name, value in os.environ.items() if name not in KEYS},
        )
        self.processes.append(process)
        assert process.stdin and process.stdout
        with contextlib.suppress(ConnectionError):
            process.stdin.write(first_line.encode())
            await process.stdin.drain()
        lines = [await process.stdout.readline(), await process.stdout.readline()]
        if not all(lines):
            code = await process.wait()
            raise ServiceFailed(name, code if code > 0 else 3)
        self.watchers.append(asyncio.ensure_future(self.watch(name, process)))
        return [line.decode().partition("=")[2].strip().strip("'") for line in lines]

    async def watch(self, name: str, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        if not self.stopping:
            self.on_exit(f"the embedded {name} ended with code {code}")

    async def stop(self) -> None:
        """Closes the pipes, and kills what has not ended in time."""
        self.stopping = True
        for process in self.processes:
            assert process.stdin
            process.stdin.close()
        for process in self.processes:
            try:
                await asyncio.wait_for(process.wait(), STOP_SECONDS)
            except (asyncio.TimeoutError, asyncio.CancelledError):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
