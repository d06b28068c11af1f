"""Sixteen hostile sandboxes beside four honest ones: the honest finish, and the server answers meanwhile."""

from __future__ import annotations

import time

import pytest
from conftest import Core

HOSTILE = {
    "fork bomb": "bomb() { bomb | bomb & }; bomb; sleep 60",
    "memory": "python3 -c 'x = []\nwhile True: x.append(bytearray(1 << 24))'; sleep 60",
    "output": "yes | head -c 500000000; sleep 60",
    "spin": "for i in 1 2 3 4; do (while :; do :; done) & done; sleep 60",
}
HONEST = """python3 -c 'print(sum(i * i for i in range(300000)))'; mkdir outputs; echo done > outputs/done.txt"""
HOSTILE_SESSIONS, HONEST_SESSIONS = 16, 4


@pytest.mark.slow
def test_honest_sandboxes_finish_beside_hostile_ones(core: Core) -> None:
    scripts = list(HOSTILE.values()) * (HOSTILE_SESSIONS // len(HOSTILE))
    hostile = [core.shell(script).id for script in scripts]
    for session_id in hostile:
        core.running(session_id)
    honest = [core.shell(HONEST).id for _ in range(HONEST_SESSIONS)]
    started = time.monotonic()
    for session_id in honest:
        assert core.turn(session_id, seconds=60).status == "completed"
        assert core.artifacts(session_id) == {"/workspace/outputs/done.txt": b"done\n"}
    assert time.monotonic() - started < 60
    for session_id in hostile:
        assert core.raw.delete(f"/agents/sessions/{session_id}?cancel=true").status_code == 200
