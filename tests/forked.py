"""Runs of rl_eval.py as processes that start in milliseconds.

A helper process imports the script and the client once; each run is a fork of it that calls `rl_eval.main` for real,
with its own arguments, environment and outputs. A run can be killed like any process; one whose test is gone is killed.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "rl_eval.py"


class Forked:
    """A run that has been started, and what it has written so far."""

    def __init__(self, address: str, folder: Path, name: str, words: list[str], env: dict[str, str]) -> None:
        self.paths = folder / f"{name}.out", folder / f"{name}.err"
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.connect(address)
        self.reader = self.connection.makefile("rb")
        order = {"words": words, "env": env, "cwd": str(folder), "outputs": [str(path) for path in self.paths]}
        self.connection.sendall(json.dumps(order).encode() + b"\n")
        self.pid = int(self.reader.readline())

    def wait(self) -> int:
        """Its exit code; minus the signal that killed it."""
        code = int(self.reader.readline())
        self.reader.close()
        self.connection.close()
        return code

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    @property
    def out(self) -> str:
        return self.paths[0].read_text()

    @property
    def err(self) -> str:
        return self.paths[1].read_text()


class Helper:
    def __init__(self, address: str) -> None:
        self.address, self.count = address, 0

    def start(self, folder: Path, words: list[str], env: dict[str, str]) -> Forked:
        self.count += 1
        return Forked(self.address, folder, f"run{self.count}", words, env)


@contextmanager
def helper(folder: Path) -> Iterator[Helper]:
    """A running helper; `folder` holds its socket."""
    address = str(folder / "helper.sock")
    words = [sys.executable, str(Path(__file__).resolve()), address]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin and process.stdout
        assert process.stdout.readline() == "ready\n"
        try:
            yield Helper(address)
        finally:
            process.stdin.close()


# --- In the helper ------------------------------------------------------------------------------


def serve(address: str) -> None:
    """Fork a keeper per connection, until stdin is closed."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    while sys.stdin not in (ready := select.select([listener, sys.stdin], [], [])[0]):
        assert ready
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            keep(connection)
            os._exit(0)
        connection.close()


def keep(connection: socket.socket) -> None:
    """Start the run that is asked for; tell its process id, then its exit code. Kill it when nobody listens."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    order = json.loads(connection.makefile("rb").readline())
    if (pid := os.fork()) == 0:
        connection.close()
        be_the_run(order)
    connection.sendall(f"{pid}\n".encode())
    ended = os.pidfd_open(pid)
    if connection in select.select([connection, ended], [], [])[0]:
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):
        connection.sendall(f"{code}\n".encode())


def be_the_run(order: dict[str, Any]) -> None:
    import rl_eval

    code = 99
    try:
        for descriptor, path in enumerate(order["outputs"], 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.clear()
        os.environ.update(order["env"])
        os.chdir(order["cwd"])
        sys.argv[:] = [str(SCRIPT), *order["words"]]
        code = rl_eval.main(order["words"])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    import asyncio  # noqa: F401  before the script, which would load it lazily

    sys.path.insert(0, str(ROOT))
    import aiohttp  # noqa: F401
    import tenacity  # noqa: F401

    import core.embedded  # noqa: F401
    import report.plan
    import report.progress
    import report.regrade
    import report.summary  # noqa: F401
    import rl_eval

    openai = rl_eval.load_client()
    openai.DefaultAioHttpClient()  # imports what it needs
    gc.collect()
    gc.freeze()
    serve(sys.argv[1])


if __name__ == "__main__":
    main()
