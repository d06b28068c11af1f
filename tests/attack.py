"""What the tests of attacks share: probes, and the view from outside.

A probe is Python source that prints one JSON value. It runs in a sandbox by the `shell` harness, and as a control where
the protection is off, most often on the host. What a probe says of itself is never the proof where something can be
seen from outside: a listener, a file, the process table.
"""

from __future__ import annotations

import base64
import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
from conftest import Core

HELPERS = '''
import ctypes, errno, json, os, resource, socket, stat, struct, subprocess, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def attempt(action, *arguments):
    """"ok", or the name of the error."""
    try:
        action(*arguments)
        return "ok"
    except OSError as error:
        return errno.errorcode.get(error.errno, str(error))
def call(number, *arguments):
    result = libc.syscall(number, *arguments)
    return "ok" if result >= 0 else errno.errorcode[ctypes.get_errno()]
'''


def script_of(source: str, given: Any = None, mark: str = "") -> str:
    """A bash script that runs a probe, which finds `given` under that name; `mark` stands in its command line."""
    program = f"{HELPERS}\ngiven = json.loads({json.dumps(given)!r})\n{source}"
    return f"python3 - {mark} <<'PROBE_ENDS'\n{program}\nPROBE_ENDS\n"


def inside(core: Core, source: str, given: Any = None, **options: Any) -> Any:
    """What a probe finds in a sandbox of its own."""
    session, turn = core.run(script_of(source, given), **options)
    output = core.output(session.id)
    assert turn.status == "completed", turn.error
    core.sessions.delete(session.id)
    return json.loads(output.strip().splitlines()[-1])


def outside(source: str, given: Any = None, *wrapped: str) -> Any:
    """What the same probe finds on the host, run by the command `wrapped` if there is one."""
    program = f"{HELPERS}\ngiven = json.loads({json.dumps(given)!r})\n{source}"
    done = subprocess.run([*wrapped, sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def hear(core: Core, session_id: str, word: str, seconds: float = 30) -> str:
    """What a running script has printed up to and with `word`."""
    heard = ""
    # An unknown event id replays all events from the first one.
    headers = {"Authorization": f"Bearer {core.key}", "OpenAI-Beta": "agents=v1", "Last-Event-ID": "none"}
    with httpx.stream(
        "GET", f"{core.url}/agents/sessions/{session_id}/events", headers=headers, timeout=seconds
    ) as log:
        for line in log.iter_lines():
            if line.startswith("data: "):
                heard += json.loads(line[6:]).get("delta") or ""
            if word in heard:
                return heard
    raise AssertionError(f"{word} was not printed: {heard}")


def end(core: Core, session_id: str) -> Any:
    """Cancels the session's turn and deletes the session; returns the turn."""
    core.cancel(session_id)
    turn = core.turn(session_id)
    core.sessions.delete(session_id)
    return turn


def inline(files: dict[str, str]) -> list[dict[str, str]]:
    """Files of an environment, by their names in the workspace."""
    encoded = {name: base64.b64encode(text.encode()).decode() for name, text in files.items()}
    return [{"type": "inline", "path": f"/workspace/{name}", "data": data} for name, data in encoded.items()]


def peak_memory(core: Core) -> int:
    """The most that the server ever held, in bytes."""
    return int(Path(f"/proc/{core.service.process.pid}/status").read_text().partition("VmHWM:")[2].split()[0]) << 10


def processes() -> dict[int, tuple[str, str]]:
    """Of all processes of this machine that can be looked at: PID namespace and command line by id."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found[int(entry.name)] = (str((entry / "ns/pid").readlink()), words)
    return found


def namespaces_of(mark: str) -> set[str]:
    """The PID namespaces of sandboxes that run a command with this mark; where they have none, the mark itself."""
    own = str(Path("/proc/self/ns/pid").readlink())
    found = {namespace for namespace, words in processes().values() if mark in words}
    return {mark if namespace == own else namespace for namespace in found}


def members(namespaces: set[str]) -> list[str]:
    """The processes in these. By its mark, one that has another command line is not found."""
    return [
        words for namespace, words in processes().values() if namespace in namespaces or has_mark(words, namespaces)
    ]


def has_mark(words: str, marks: set[str]) -> bool:
    return any(mark in words for mark in marks)


def another_runs_meanwhile(core: Core) -> bool:
    """Whether a second session gets its turn while a first one is busy; with one slot there is none to ask."""
    return core.backend == "landlock" or inside(core, "print(1)") == 1
