"""A harness CLI that misbehaves: a program in codex's place, run by the real server in a real sandbox."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import HOSTED, ROOT, Core, core_of

from core.sandbox.backends import BACKENDS

BUNDLE = {"protocol": "responses", "base_url": "http://127.0.0.1:9/v1", "api_key": "a-model-key"}
COMPLETED = """{"type":"turn.completed","usage":{}}"""
Doc = dict[str, Any]


@pytest.fixture(scope="module", params=BACKENDS)
def impostor(request: pytest.FixtureRequest) -> Iterator[tuple[Core, Callable[[str], None]]]:
    """A server whose codex is whatever bash script the test writes."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        yield from impostor_in(Path(directory), request.param)


def impostor_in(packages: Path, backend: str) -> Iterator[tuple[Core, Callable[[str], None]]]:
    package = packages / "codex_cli_bin"
    for part in ("bin", "codex-path"):
        (package / part).mkdir(parents=True)
    (package / "__init__.py").touch()
    program = package / "bin" / "codex"

    def become(script: str) -> None:
        program.write_text(f"#!/bin/bash\n{script}\n")
        program.chmod(0o755)

    become("true")
    user = "root" if os.getuid() == 0 else "unprivileged"
    with core_of(user, "--sandbox", backend, env={"PYTHONPATH": f"{packages}:{ROOT}"}) as core:
        yield core, become


def start(core: Core, **extension: Any) -> str:
    extension = {"x_agents_core": {"model_provider": BUNDLE, **extension}}
    session = core.sessions.create(agent={"model": "m"}, environment=HOSTED, input="go", extra_body=extension)
    return str(session.id)


def run(core: Core, **extension: Any) -> tuple[str, Any]:
    session_id = start(core, **extension)
    return session_id, core.turn(session_id, seconds=60)


# script, (status, error code, class), words of the message
CASES: dict[str, tuple[str, tuple[str, str, str], str]] = {
    "ends in silence": ("exit 0", ("failed", "server_error", "infrastructure"), "status 0 and no terminal event"),
    "crashes": ("echo 'the last word' >&2; exit 9", ("failed", "server_error", "infrastructure"), "the last word"),
    # Its model never answered, so the agent had no hand in it.
    "is killed": ("kill -9 $$", ("failed", "server_error", "infrastructure"), "signal 9"),
    "has a fault": ("kill -SEGV $$", ("failed", "server_error", "infrastructure"), "signal 11"),
    "prints no JSON": (
        "echo '{\"type\":'; echo nonsense; echo '[]'; echo 7; printf '\\xff\\xfe\\n'; exit 1",
        ("failed", "server_error", "infrastructure"),
        "status 1",
    ),
    "prints odd JSON": (
        """echo '{"type":"item.completed","item":{"id":[],"type":{},"x":1e999}}'; echo '{"type":"item.completed"}';
        echo '{"type":"item.completed","item":{"type":"command_execution","status":5,"exit_code":"x"}}'
        exit 1""",
        ("failed", "server_error", "infrastructure"),
        "status 1",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_it_ends_the_turn_with_the_right_error(impostor: tuple[Core, Callable[[str], None]], case: str) -> None:
    core, become = impostor
    script, expected, words = CASES[case]
    become(script)
    session_id, turn = run(core)
    failure = turn.to_dict()["x_agents_core"]["failure"]
    assert (turn.status, turn.error.code, failure["class"]) == expected
    assert words in turn.error.message
    assert core.sessions.items.list(session_id).data  # readable, whatever was in it


HANGS = {
    "in silence": "sleep 600",
    "deaf to SIGTERM": "trap '' TERM INT HUP; while :; do sleep 600; done",
    "stopped": "kill -STOP $$",
    "with its output closed": "exec >&- 2>&-; sleep 600",
    "in the middle of a line": """printf '{"type":"turn.'; sleep 600""",
}


@pytest.mark.parametrize("hang", HANGS.values(), ids=HANGS)
def test_one_that_hangs_ends_with_its_ceiling_or_a_cancel(
    impostor: tuple[Core, Callable[[str], None]], hang: str
) -> None:
    core, become = impostor
    become(hang)
    _, turn = run(core, limits={"max_turn_seconds": 1})
    failure = turn.to_dict()["x_agents_core"]["failure"]
    assert (turn.status, turn.error.code, failure["class"]) == ("failed", "session_budget_exceeded", "budget")
    assert failure["reason"] == "budget_seconds" and turn.completed_at - turn.started_at < 11
    session_id = start(core)
    core.running(session_id)
    core.cancel(session_id)
    assert core.turn(session_id, seconds=10).status == "cancelled"


def resident_mb(pid: int) -> float:
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


FLOODS = {
    "one line of 1 GB": "head -c 1000000000 /dev/zero | tr '\\0' x",
    "stderr": "head -c 300000000 /dev/zero >&2",
}


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
def test_a_flood_is_bounded(impostor: tuple[Core, Callable[[str], None]], flood: str) -> None:
    core, become = impostor
    become(f"{flood}; echo; echo '{COMPLETED}'; sleep 600")
    before = resident_mb(core.service.process.pid)
    _, turn = run(core)
    assert turn.status == "completed"  # the terminal event behind the flood was seen
    assert resident_mb(core.service.process.pid) - before < 80


@pytest.mark.parametrize("stream", [1, 2], ids=["one line", "stderr"])
def test_a_flood_without_end_is_ended(impostor: tuple[Core, Callable[[str], None]], stream: int) -> None:
    core, become = impostor
    become(f"cat /dev/zero >&{stream}")
    before = resident_mb(core.service.process.pid)
    _, turn = run(core)
    failure = turn.to_dict()["x_agents_core"]["failure"]
    assert (turn.status, turn.error.code) == ("failed", "sandbox_error")
    assert (failure["class"], failure["reason"]) == ("model", "output_exceeded")
    assert resident_mb(core.service.process.pid) - before < 80


@pytest.mark.parametrize("text", ["", "x" * 500], ids=["short", "long"])
def test_a_flood_of_events_ends_the_turn(impostor: tuple[Core, Callable[[str], None]], text: str) -> None:
    core, become = impostor
    become(f"""yes '{{"type":"nothing","text":"{text}"}}'""")
    _, turn = run(core)
    assert (turn.status, turn.error.code) == ("failed", "server_error") and "more events" in turn.error.message


def test_it_may_linger_but_the_turn_is_over(impostor: tuple[Core, Callable[[str], None]]) -> None:
    core, become = impostor
    become(f"echo '{COMPLETED}'; trap '' TERM; sleep 600")
    _, turn = run(core)
    assert turn.status == "completed" and turn.completed_at - turn.started_at < 5


def test_what_comes_behind_the_terminal_event_does_not_count(impostor: tuple[Core, Callable[[str], None]]) -> None:
    core, become = impostor
    late = '{"type":"item.completed","item":{"id":"i","type":"agent_message","text":"too late"}}'
    become(f"printf '%s\\n' '{COMPLETED}' '{late}'; sleep 600")
    session_id, turn = run(core)
    assert turn.status == "completed"
    assert [item.role for item in core.sessions.items.list(session_id)] == ["user"]
