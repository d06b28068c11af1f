"""What a person sees: the script on a pseudo-terminal, against a deployment that follows a script.

The screen is judged by the bytes that reach it. The ids name the rows of the acceptance trials.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from scripted_deployment import Deployment, Script, serving
from test_script import FOREVER, command, environment, failure, write_tasks

CURSOR = "\x1b[2K"  # rich erases its line with it


class Screen:
    """A process whose terminal this is; its text so far."""

    def __init__(self, words: list[str], env: dict[str, str], columns: int = 100) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.text, self.changed = "", threading.Condition()
        self.process = subprocess.Popen(
            words, env={**env, "TERM": "xterm"}, stdin=slave, stdout=slave, stderr=slave, preexec_fn=adopt_terminal
        )
        os.close(slave)
        self.reader = threading.Thread(target=self.read)
        self.reader.start()

    def read(self) -> None:
        """Until the process and all its children have let go of the terminal, which reads as an error."""
        with contextlib.suppress(OSError):
            while data := os.read(self.master, 65536):
                with self.changed:
                    self.text += data.decode(errors="replace")
                    self.changed.notify_all()
        with self.changed:
            self.changed.notify_all()

    def wait_for(self, pattern: str, seconds: float = 30) -> None:
        with self.changed:
            found = self.changed.wait_for(lambda: re.search(pattern, self.text) or not self.reader.is_alive(), seconds)
            assert found and re.search(pattern, self.text), f"{pattern!r} is not on the screen: {self.text!r}"

    def press_ctrl_c(self) -> None:
        os.write(self.master, b"\x03")

    def end(self) -> int:
        code = self.process.wait(30)
        self.reader.join(10)
        return code


def adopt_terminal() -> None:
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@contextmanager
def shown(folder: Path, script: Script, arguments: str) -> Iterator[tuple[Screen, Deployment]]:
    write_tasks(folder)
    with serving(script) as deployment:
        screen = Screen(command(folder, arguments), environment(deployment.base_url))
        try:
            yield screen, deployment
        finally:
            screen.process.kill()
            screen.end()
            os.close(screen.master)


def until(flag: dict[str, bool]) -> Script:
    return Script(turn=lambda session: {"status": "completed" if flag["on"] else "in_progress"})


def test_progress_is_drawn_and_then_gone(tmp_path: Path) -> None:
    flag = {"on": False}
    with shown(tmp_path, until(flag), "--samples 6 --concurrency 3") as (screen, _):
        screen.wait_for(r"0/6 done · 3 running")
        flag["on"] = True
        screen.wait_for(r"[1-6]/6 done · .*mean 1\.000 · .*tokens · .* left")
        assert screen.end() == 0
    after = screen.text.rpartition(CURSOR)[2]
    assert CURSOR in screen.text and "| default " in after and "done ·" not in after


def test_wait_is_shown(tmp_path: Path) -> None:
    """T13."""
    with shown(tmp_path, Script(), "--samples 4 --concurrency 2") as (screen, deployment):
        deployment.capacity, deployment.script.turn_seconds = 1, 1.0  # one always waits while the other is polled
        screen.wait_for(r"1 running.* · waiting: HTTP 429 rate_limit_exceeded: full")
        assert screen.end() == 0


@pytest.mark.parametrize("arguments", ["", "--quiet"])
def test_agents_error_cannot_steer_the_terminal(tmp_path: Path, arguments: str) -> None:
    """S20: an error with control characters, in the message and in a waiting line."""
    evil = "\x1b]0;owned\x07\x1b[2J\x9b31m\rfake"
    full = (429, {"code": evil, "message": evil}, {})
    script = Script(turn=failure(evil), refuse={"create": [full]})
    with shown(tmp_path, script, arguments) as (screen, _):
        assert screen.end() == 3
    assert not [bad for bad in ("\x1b]0", "\x07", "\x1b[2J", "\x9b", "\rfake") if bad in screen.text]
    assert "owned" in json.loads((tmp_path / "out.jsonl").read_text())["error"], "the error did arrive"


def test_quiet_draws_nothing(tmp_path: Path) -> None:
    with shown(tmp_path, Script(), "--samples 3 --quiet") as (screen, _):
        assert screen.end() == 0
    assert "\x1b" not in screen.text and "done" not in screen.text and "| default " in screen.text


def test_table_fits_the_terminal(tmp_path: Path) -> None:
    """T20."""
    with shown(tmp_path, Script(), "--samples 3 --k 1,2,3 --quiet") as (screen, _):
        assert screen.end() == 0
    rows = [line for line in screen.text.splitlines() if line.startswith("|")]
    assert rows and max(map(len, rows)) <= 100 and "Not shown for want of room" in screen.text


def one_signal(screen: Screen, deployment: Deployment) -> None:
    screen.press_ctrl_c()


def two_signals(screen: Screen, deployment: Deployment) -> None:
    screen.press_ctrl_c()
    screen.wait_for("stopping: interrupted")
    screen.press_ctrl_c()


def hang_up(screen: Screen, deployment: Deployment) -> None:
    screen.process.send_signal(signal.SIGHUP)


@pytest.mark.parametrize("how", [one_signal, two_signals, hang_up])
def test_ctrl_c(tmp_path: Path, how: Callable[[Screen, Deployment], None]) -> None:
    """T19, R11: once or twice, all is cancelled, deleted, recorded; the table and the command to go on are shown."""
    with shown(tmp_path, Script(turn_seconds=FOREVER), "--samples 5 --concurrency 2") as (screen, deployment):
        deployment.wait_for(lambda: deployment.calls["turns"] >= 2)
        how(screen, deployment)
        assert screen.end() == 130
    assert not deployment.alive and "Traceback" not in screen.text
    assert "| default " in screen.text and "to go on:" in screen.text and "--resume" in screen.text
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(line["status"], line["reward"]) for line in lines] == [("cancelled", None)] * 2
