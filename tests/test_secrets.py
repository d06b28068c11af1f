"""Canaries that must not be inside: each lies where a server or a run has such a secret, and a probe looks everywhere.

The probe gets what to look for in another spelling, so that it does not find itself, and finds what was planted.
"""

from __future__ import annotations

import base64
import contextlib
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from attack import HELPERS, inline, outside
from conftest import HOSTS, IDS, ROOT, Core, core_of
from model_endpoint import ModelEndpoint

# Finds words in what every process can be asked for, in their memory, in what they have open, and in all files.
# Programs under /usr and /opt are older than the canaries, unless they were changed.
SEARCH = """
import re, base64
words = {name: bytes(byte ^ 0x55 for byte in bytes.fromhex(text)) for name, text in given["words"].items()}
found = {name: [] for name in words}
spelled = {name: [word, base64.b64encode(word)[:-4], word.hex().encode(), word[::-1]] for name, word in words.items()}
def look(place, data):
    for name, spellings in spelled.items():
        if any(spelling in data for spelling in spellings):
            found[name].append(place)
def look_at_file(path):
    with open(path, "rb") as file:
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            while data := file.read(64 << 20):
                look(path, data)
def look_at_memory(pid):
    regions = open(f"/proc/{pid}/smaps").read().split("VmFlags")
    with open(f"/proc/{pid}/mem", "rb", 0) as memory:
        for region in regions:
            span = re.search(r"^([0-9a-f]+)-([0-9a-f]+) r", region, re.M)
            if span and not re.search(r"^(Rss|Anonymous): +0 kB", region, re.M):
                start, end = (int(number, 16) for number in span.groups())
                memory.seek(start)
                left = min(end - start, 512 << 20)
                while left > 0 and (data := memory.read(min(left, 16 << 20))):
                    look(f"memory of {pid}", data)
                    left -= len(data)
def look_at_process(pid):
    for name in ("environ", "cmdline", "maps", "mountinfo", "mounts", "status", "stack", "auxv", "comm"):
        attempt(lambda: look(f"/proc/{pid}/{name}", open(f"/proc/{pid}/{name}", "rb").read()))
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        attempt(look_at_file, f"/proc/{pid}/fd/{descriptor}")
        attempt(lambda: look(f"/proc/{pid}/fd", os.readlink(f"/proc/{pid}/fd/{descriptor}").encode()))
    if pid != os.getpid():
        attempt(look_at_memory, pid)
look("own environment", repr(os.environ).encode())
pids = given["processes"] or [int(name) for name in os.listdir("/proc") if name.isdigit()]
for pid in pids:
    attempt(look_at_process, pid)
files = 0
for root in given["roots"]:
    for place, directories, names in os.walk(os.path.expanduser(root)):
        directories[:] = [name for name in directories if os.path.join(place, name) != "/proc"]
        for path in (os.path.join(place, name) for name in names):
            about = os.lstat(path)
            if not (path.startswith(("/usr/", "/opt/")) and about.st_ctime < given["since"]):
                files += 1
                look("name", os.fsencode(path))
                if stat.S_ISREG(about.st_mode):
                    attempt(look_at_file, path)
result = {"found": found, "files": files, "processes": len(pids)}
"""
INSIDE = """
os.makedirs("outputs")
with open("outputs/found.json", "w") as file:
    json.dump(result, file)
"""


def hidden(words: dict[str, str], roots: list[str], processes: list[int], since: float) -> dict[str, Any]:
    spelled = {name: bytes(byte ^ 0x55 for byte in word.encode()).hex() for name, word in words.items()}
    return {"words": spelled, "roots": roots, "processes": processes, "since": since}


@dataclass
class Secretive:
    """A server with a canary in each place, by its name."""

    core: Core
    canaries: dict[str, str]
    directory: Path
    since: float


@pytest.fixture(scope="module", params=HOSTS, ids=IDS)
def secretive(request: pytest.FixtureRequest) -> Iterator[Secretive]:
    places = ("core key", "host environment", "expected answer", "solution", "task path", "model key")
    canaries = {place: f"canary{uuid4().hex}" for place in places}
    since = time.time() - 1
    with tempfile.TemporaryDirectory(suffix=canaries["task path"]) as name:
        directory = Path(name)
        directory.chmod(0o755)
        (directory / "expected.json").write_text(json.dumps({"x": canaries["expected answer"]}))
        (directory / "solution.sh").write_text(f"echo {canaries['solution']}")
        env = {"CORE_API_KEY": canaries["core key"], "AWS_SECRET_ACCESS_KEY": canaries["host environment"]}
        backend, user = request.param
        with core_of(user, "--sandbox", backend, env=env, cwd=directory) as core:
            yield Secretive(core, canaries, directory, since)


def test_the_search_finds_them_on_the_host(secretive: Secretive) -> None:
    """The control. The model key is nowhere yet but in the memory of the server, once a session has it."""
    words = {name: word for name, word in secretive.canaries.items() if name != "model key"}
    given = hidden(words, [str(secretive.directory)], [secretive.core.service.process.pid], secretive.since)
    found = outside(f"{SEARCH}\nprint(json.dumps(result))", given)["found"]
    assert [name for name, places in found.items() if not places] == []


# Where nothing is mounted, a walk from the root ends there: what is known to exist has to be named.
NAMED = ["/workspace", "~", *("/usr", "/opt", "/etc", "/var", "/tmp", "/run", "/home", "/root", "/srv", "/mnt", "/sys")]
ROOTS = {"bubblewrap": ["/"], "landlock": [*NAMED, tempfile.gettempdir(), str(ROOT)]}


@pytest.mark.parametrize("harness", ["shell", "codex", "claude_sdk"])
def test_no_canary_is_inside(secretive: Secretive, harness: str, model: ModelEndpoint) -> None:
    core, planted = secretive.core, f"planted{uuid4().hex}"
    given = hidden({**secretive.canaries, "planted": planted}, ROOTS[core.backend], [], secretive.since)
    program = f"{HELPERS}\ngiven = json.loads({json.dumps(given)!r})\n{SEARCH}\n{INSIDE}"
    environment = {"files": inline({"search.py": program, "planted.txt": planted})}
    if harness == "shell":
        session = core.shell(f": {planted}; python3 search.py", environment=environment)
    else:
        label = uuid4().hex
        model.scripts[label] = "python3 search.py"
        bundle = model.bundle(harness, "runs", label, secretive.canaries["model key"])
        session = core.agent(harness, bundle, f"Run it. {planted}", environment=environment)
    turn = core.turn(session.id)
    assert turn.status == "completed", turn.error
    result = json.loads(core.artifacts(session.id)["/workspace/outputs/found.json"])
    places = result["found"].pop("planted")
    assert "/workspace/planted.txt" in places and any("memory" in place for place in places)
    assert {name: places for name, places in result["found"].items() if places} == {}
    assert result["processes"] >= 3 and result["files"] > (5 if core.backend == "bubblewrap" else 2)
    no_canary_in(json.dumps([session.to_dict(), turn.to_dict(), items(core, session.id)]), secretive)


def items(core: Core, session_id: str) -> list[Any]:
    return [item.to_dict() for item in core.sessions.items.list(session_id)]


def no_canary_in(text: str, secretive: Secretive) -> None:
    assert [name for name, word in secretive.canaries.items() if word in text] == []


def test_secrets_are_not_stored(secretive: Secretive) -> None:
    """Runs last: what the server wrote for all the sessions above."""
    assert secretive.core.temporary is not None
    stored = [path for path in (secretive.core.temporary / "tmp").rglob("*") if path.is_file()]
    assert any(path.name == "core.db" for path in stored)
    for path in stored:
        with contextlib.suppress(FileNotFoundError):
            data = path.read_bytes()
            for word in secretive.canaries.values():
                assert word.encode() not in data and base64.b64encode(word.encode())[:-4] not in data
