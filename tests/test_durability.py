"""kill -9 of the server at random moments, over and over on the same data: nothing told is lost or doubled."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from conftest import HOSTED, TERMINAL, Core, connect, start_service, until

SCRIPT = """mkdir -p outputs; echo kept > outputs/answer.txt; sleep 0.05"""
CREATORS = 4


class Ledger:
    """What the server has acknowledged: the sessions by idempotency key, and those seen completed."""

    def __init__(self) -> None:
        self.sessions: dict[str, str] = {}
        self.completed: set[str] = set()
        self.count = 0
        self.lock = threading.Lock()

    def next_key(self) -> str:
        with self.lock:
            self.count += 1
            return f"key-{self.count}"


def create(core: Core, key: str) -> Any:
    return core.sessions.create(
        agent={"x_agents_core": {"harness": "shell"}},
        environment=HOSTED,
        input=SCRIPT,
        metadata={"key": key},
        extra_headers={"Idempotency-Key": key},
    )


def work(core: Core, ledger: Ledger, stop: threading.Event) -> None:
    """Creates sessions and watches them end, until the server is gone."""
    with contextlib.suppress(openai.APIConnectionError):
        while not stop.is_set():
            key = ledger.next_key()
            session_id = create(core, key).id
            ledger.sessions[key] = session_id
            turn = core.turn(session_id, seconds=30)
            if turn.status == "completed":
                ledger.completed.add(session_id)


def has_grown(ledger: Ledger, before: int) -> bool:
    return len(ledger.sessions) > before


def check(core: Core, ledger: Ledger, keys: list[str]) -> None:
    for key in keys:
        again = create(core, key)
        assert again.id == ledger.sessions.setdefault(key, again.id)
        assert len(list(core.sessions.list(metadata={"key": key}))) == 1
        turn = core.turn(again.id)
        assert turn.status in TERMINAL
        assert again.id not in ledger.completed or turn.status == "completed"
        kept = core.artifacts(again.id)
        assert kept == ({"/workspace/outputs/answer.txt": b"kept\n"} if turn.status == "completed" else {})
        for item in core.sessions.items.list(again.id):
            assert item.status != "in_progress"


@pytest.mark.parametrize("points", [5, pytest.param(100, marks=pytest.mark.slow)])
def test_random_kills_lose_and_double_nothing(tmp_path: Path, points: int) -> None:
    ledger, dice = Ledger(), random.Random(points)
    running = start_service("core", "serve", "--data", str(tmp_path))
    for _ in range(points):
        core, stop, before = connect(running), threading.Event(), ledger.count
        threads = [threading.Thread(target=work, args=(core, ledger, stop)) for _ in range(CREATORS)]
        for thread in threads:
            thread.start()
        until(partial(has_grown, ledger, len(ledger.sessions)))
        stop.wait(dice.uniform(0, 0.6))  # the moment of the kill is what is tried, not waited for
        running.process.send_signal(signal.SIGKILL)
        running.process.wait()
        stop.set()
        for thread in threads:
            thread.join()
        running = start_service("core", "serve", "--data", str(tmp_path))
        check(connect(running), ledger, [f"key-{number}" for number in range(before + 1, ledger.count + 1)])
    rooms = {path.name for path in (tmp_path / "rooms").iterdir()}
    assert rooms <= set(ledger.sessions.values())
    running.stop()
