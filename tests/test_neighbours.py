"""Hostile sandboxes beside honest ones: the honest finish with their answers, the server answers meanwhile, and when
the hostile are ended nothing of them is left.

That each of these attacks does harm where nothing bounds it is shown beside each limit, in `test_sandbox.py` and
`test_sandbox_limits.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from attack import members, namespaces_of
from conftest import HOSTED, Core, Gateway, core_of, until

PYTHON = "python3 - <<'END'\n{}\nEND\nsleep 600"
HOSTILE = {
    "fork bomb": "bomb() { bomb | bomb & }; bomb; sleep 600",
    "memory": PYTHON.format("x = []\nwhile True: x.append(bytearray(1 << 24))"),
    "spin": "for i in 1 2 3 4; do (while :; do :; done) & done; sleep 600",
    "big file": "for i in $(seq 100); do head -c 900M /dev/zero > $i; done; sleep 600",
    "small files": PYTHON.format("for n in range(1000000): open(str(n), 'x').close()"),
    "deleted files": PYTHON.format(
        "import os\nkept = []\nwhile True:\n    kept.append(open('x', 'wb')); os.unlink('x')\n"
        "    os.posix_fallocate(kept[-1].fileno(), 0, 100 << 20)"
    ),
    "output": "yes",
    "descriptors": PYTHON.format("import os, time\nfor _ in range(100):\n    try:\n        while True: os.dup(0)\n"
    "    except OSError: time.sleep(1)"),
}  # fmt: skip
SMALL: dict[str, Any] = {"environment": {"container_size": "small"}}
HONEST = "mkdir outputs; python3 -c 'print(sum(i * i for i in range(300000)))' > outputs/answer.json"
ANSWER = {"/workspace/outputs/answer.json": b"8999955000050000\n"}
GRACE_SECONDS = 60


class Neighbourhood:
    """Hostile sessions of one server, from their start to the proof that they are gone."""

    def __init__(self, core: Core, kinds: list[str]) -> None:
        self.core = core
        self.mark = str(uuid4())
        shown = f"(exec -a {self.mark} sleep 600) & "
        self.sessions = [core.shell(shown + HOSTILE[kind], **SMALL).id for kind in kinds]
        for session_id in self.sessions:
            core.running(session_id)
        self.namespaces = namespaces_of(self.mark)

    def rooms(self) -> list[Path]:
        assert self.core.temporary is not None
        left = (self.core.temporary / "tmp").glob("*/rooms/*")
        return [path for path in left if path.name in self.sessions]

    def end(self) -> None:
        for session_id in self.sessions:
            started = time.monotonic()
            answer = self.core.raw.delete(f"/agents/sessions/{session_id}?cancel=true")
            assert answer.status_code == 200, answer.text
            assert time.monotonic() - started < 20
        assert not self.rooms()
        until(lambda: not members(self.namespaces | namespaces_of(self.mark)))


def codex(core: Core, gateway: Gateway) -> str:
    return str(
        core.sessions.create(
            agent={"model": "oracle", "x_agents_core": {"harness": "codex"}},
            environment=HOSTED,
            input="go",
            extra_body={"x_agents_core": {"model_provider": gateway.bundle("codex")}},
        ).id
    )


def watch_answers(core: Core, session_ids: list[str]) -> Iterator[float]:
    """Seconds that each question took, until all of the sessions' turns are over."""
    left = list(session_ids)
    while left:
        started = time.monotonic()
        (turn,) = core.sessions.turns.list(left[0])
        yield time.monotonic() - started
        if turn.status in ("completed", "failed", "cancelled"):
            left.pop(0)
        else:
            time.sleep(0.05)


def test_an_honest_sandbox_finishes_beside_hostile_ones(box: Core) -> None:
    hostile = Neighbourhood(box, ["fork bomb", "memory", "big file", "output"])
    session = box.shell(HONEST)
    assert box.turn(session.id, seconds=GRACE_SECONDS).status == "completed"
    assert box.artifacts(session.id) == ANSWER
    box.sessions.delete(session.id)
    hostile.end()


@pytest.mark.slow
@pytest.mark.parametrize("user", ["root", "unprivileged"])
def test_four_honest_sandboxes_finish_beside_sixteen_hostile_ones(gateway: Gateway, user: str) -> None:
    with core_of(user) as core:
        hostile = Neighbourhood(core, list(HOSTILE) * 2)
        started = time.monotonic()
        shells = [core.shell(HONEST).id for _ in range(2)]
        agents = [codex(core, gateway) for _ in range(2)]
        slowest = max(watch_answers(core, shells + agents))
        took = time.monotonic() - started
        for session_id in shells + agents:
            assert core.turn(session_id).status == "completed", core.turn(session_id).error
        for session_id in shells:
            assert core.artifacts(session_id) == ANSWER
        for session_id in agents:
            assert core.artifacts(session_id) == {"/workspace/outputs/answer.json": b'{"x": 1}'}
        assert took < GRACE_SECONDS and slowest < 10, (took, slowest)
        print(f"honest: {took:.1f} s, slowest answer {slowest * 1000:.0f} ms")
        hostile.end()
