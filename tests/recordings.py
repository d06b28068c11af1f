"""The requests of the conformance matrix as the real CLIs sent them, in files that can be reviewed and replayed.

    python tests/recordings.py record [CLI ...]

plays every cell of the matrix live and writes `fixtures/matrix/<CLI>.jsonl` anew: do it when a pin moves, and review
the difference. A line is the CLI's version, a part that requests share, or a request with what the engine replied.
Nothing in it is of this machine: paths, dates and ids are replaced, those of the gateway's calls by `{call-N}`, where N
counts the requests of the cell. Runs of one text are written as `⟪text*N⟫`.
"""

from __future__ import annotations

import getpass
import json
import platform
import re
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from clis import Case, graph_of
from conftest import until
from engine import decode, engine
from matrix import CELLS, CLIS, Cell, shape
from recorded import ROOT, Recorder, another, recorder
from wire import NARROW, Asked, Doc, Drop, note

from core.harnesses.npm import DEFAULT_PREFIX
from gateway.labels import AGENT_HEADERS, CODEX_METADATA, CODEX_SUBAGENT, PARENT_HEADERS, SESSION_HEADERS

FOLDER = Path(__file__).parent / "fixtures" / "matrix"
LABELS = (*SESSION_HEADERS, *AGENT_HEADERS, *PARENT_HEADERS, CODEX_METADATA, CODEX_SUBAGENT, "x-stainless-retry-count")
PATHS = ("/responses", "/chat/completions", "/messages", "/messages/count_tokens")
UNORDERED = ("client_metadata", "metadata")
SHARED = 200
"""Characters of a member from which on it is a part of its own."""


@dataclass
class Line:
    """A request of a cell."""

    cell: str
    path: str
    headers: dict[str, str]
    body: Doc
    status: int
    call: int | None
    """The first request of the same call, by number."""
    dropped: str
    reply: str | None
    """The engine's, as text."""


def pinned(cli: str) -> str:
    packages = {"codex": "openai-codex-cli-bin", "claude": "claude-agent-sdk", "claude --bare": "claude-agent-sdk"}
    if cli in packages:
        return version(packages[cli])
    names = {"pi": "@mariozechner/pi-coding-agent", "opencode": "opencode-ai"}
    return str(json.loads((DEFAULT_PREFIX / "package.json").read_text())["dependencies"][names[cli]])


# ── what is of this machine or of this run ────────────────────────────────────────────────────────


@dataclass
class Neutral:
    """Replaces what differs between two recordings; the same id by the same replacement within a cell."""

    folder: Path
    calls: dict[str, int]
    found: dict[str, str] = field(default_factory=dict)

    def text(self, text: str) -> str:
        modules = DEFAULT_PREFIX / "node_modules"
        paths = {str(self.folder): "/case", str(modules.resolve()): "/npm", str(modules): "/npm", str(ROOT): "/project"}
        paths |= {path.replace("/", "-"): new.replace("/", "-") for path, new in paths.items()}
        for path, new in paths.items():
            text = text.replace(path, new)
        for call, number in self.calls.items():
            text = text.replace(call, f"{{call-{number}}}")
        for pattern, new in FIXED:
            text = re.sub(pattern, new, text)
        return re.sub(IDS, self.numbered, text)

    def numbered(self, match: re.Match[str]) -> str:
        """The same length and the same form, with a number in the place of what is random."""
        whole = match[0]
        if whole not in self.found:
            prefix = re.match(r"(?:ses|msg|prt|tool)_|a(?=[0-9a-f]{16}$)|", whole)
            kept, number = prefix[0] if prefix else "", len(self.found) + 1
            plain = f"{number:0{len(whole) - len(kept)}}"
            self.found[whole] = f"00000000-0000-4000-8000-{number:012}" if "-" in whole else kept + plain
        return self.found[whole]


IDS = re.compile(
    r"(?<![0-9a-f-])[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}(?![0-9a-f-])"
    r"|\b[0-9a-f]{64}\b|\ba[0-9a-f]{16}\b|\b(?:ses|msg|prt|tool)_[0-9a-zA-Z]{26}\b"
)
FIXED = (
    (r"\b20\d\d-\d\d-\d\d(?![\d-])", "2026-01-01"),
    (r"\b[A-Z][a-z]{2} [A-Z][a-z]{2} \d\d 20\d\d\b", "Thu Jan 01 2026"),
    (r"\b1[6-9]\d{11}\b", "1767225600000"),
    (r"Chunk ID: [0-9a-f]{6}", "Chunk ID: 000000"),
    (r"Wall time: [\d.]+", "Wall time: 0.0000"),
    (r"(<duration_ms>)\d+", r"\g<1>1000"),
    (r'(nickname\\*":\\*")\w+', r"\1Ada"),
    (re.escape(platform.release()), "6.1.0"),
)
"""Dates, times and names. A version such as 2026-01-01.1 is none."""


def neutral_lines(name: str, case: Case) -> list[Line]:
    """The requests of a case that was played."""
    asked = [one for one in case.asked if one.path.partition("?")[0] in PATHS and one.body]
    for number, one in enumerate(asked):
        if one.dropped == "connection":  # without a reply that would name the call; it was resumed
            one.call_id = next(other.call_id for other in asked[number + 1 :] if other.body == one.body)
    numbers = list(range(len(asked)))
    calls = {asked[number].call_id: number for number in reversed(numbers) if asked[number].call_id}
    replies = {record.call_id: record.sampled_ids for record in case.gateway.trace().calls.values()}
    clean = Neutral(case.folder, calls)
    lines = []
    for one in asked:
        sampled = replies.get(one.call_id)
        headers = {label: one.headers[label] for label in LABELS if label in one.headers}
        headers["user-agent"] = one.headers.get("user-agent", "").split(" ")[0]
        told = {name: ordered(one.body[name]) for name in UNORDERED if name in one.body}
        kept = {
            "headers": ordered(headers),
            "body": {**one.body, **told},
            "reply": decode(sampled[:-1]) if sampled else None,
        }
        kept = json.loads(clean.text(json.dumps(kept, ensure_ascii=False)))
        lines.append(Line(name, one.path, **kept, status=one.status, call=calls.get(one.call_id), dropped=one.dropped))
    return lines


def ordered(value: Any) -> Any:
    """Members by name, in JSON within strings too: Codex writes them as they come out of its hash tables."""
    if isinstance(value, str) and value.startswith("{"):
        return json.dumps(ordered(json.loads(value)))
    return {name: ordered(value[name]) for name in sorted(value)} if isinstance(value, dict) else value


# ── the files ─────────────────────────────────────────────────────────────────────────────────────


def path_of(cli: str) -> Path:
    return FOLDER / f"{cli.replace(' --', '-')}.jsonl"


def save(cli: str, lines: list[Line]) -> None:
    written = [json.dumps({"cli": cli, "version": pinned(cli)})]
    parts: dict[str, int] = {}

    def part(value: Any) -> int:
        text = json.dumps({"part": value}, ensure_ascii=False)
        if text not in parts:
            parts[text] = len(parts)
            written.append(text)
        return parts[text]

    for line in lines:
        long = {name: value for name, value in line.body.items() if len(json.dumps(value)) > SHARED}
        refs = {
            name: [part(one) for one in value] if isinstance(value, list) else part(value)
            for name, value in long.items()
        }
        rest = {name: value for name, value in line.body.items() if name not in long}
        written.append(json.dumps({**vars(line), "body": rest, "parts": refs}, ensure_ascii=False))
    text = "\n".join(re.sub(r"(.{1,8}?)\1{49,}", shorter, one) for one in written) + "\n"
    places = (f"{Path.home()}/", f"{ROOT}/", f"{sys.prefix}/", f"{tempfile.gettempdir()}/tmp")
    for secret in (*places, f"{getpass.getuser()}@", socket.gethostname(), "Bearer"):
        if found := re.search(re.escape(secret), text):
            raise AssertionError(f"{cli}: the recording holds {text[found.start() - 150 : found.end() + 150]!r}")
    FOLDER.mkdir(exist_ok=True)
    path_of(cli).write_text(text)


def shorter(match: re.Match[str]) -> str:
    return f"⟪{match[1]}*{len(match[0]) // len(match[1])}⟫"


def load(cli: str) -> tuple[str, list[Line]]:
    """(the version of the CLI, its requests)."""
    text = re.sub(r"⟪(.{1,8}?)\*(\d+)⟫", lambda match: match[1] * int(match[2]), path_of(cli).read_text())
    first, *values = map(json.loads, text.splitlines())
    parts = [value["part"] for value in values if "part" in value]
    lines = []
    for value in values:
        if "part" not in value:
            refs = value.pop("parts")
            long = {
                name: [parts[one] for one in ref] if isinstance(ref, list) else parts[ref] for name, ref in refs.items()
            }
            lines.append(Line(**{**value, "body": value["body"] | long}))
    return first["version"], lines


# ── replay ────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Replay:
    """Sends the requests of a cell in their order; the engine replies what it replied then."""

    gateway: Recorder
    cell: Cell
    cli: str
    ids: dict[int, str] = field(default_factory=dict)
    """The ids that the gateway gives its calls now, by request."""
    asked: list[Asked] = field(default_factory=list)

    def play(self, lines: list[Line]) -> None:
        budgets = {"rollout_id": self.gateway.rollout, "budgets": self.cell.limits(self.cli)}
        self.opened = self.gateway.control("POST", "/attempts", budgets).json()
        for number, line in enumerate(lines):
            self.gateway.engine.script = lambda asked, line=line: line.reply or ""
            self.gateway.engine.faults.extend(["500"] if line.status >= 500 else [])
            one = self.made(line)
            if line.dropped:
                self.dropped(one, line.dropped)
            else:
                self.sent(one, line.status)
            if line.call == number:
                self.ids[number] = one.call_id
            self.asked.append(one)

    def made(self, line: Line) -> Asked:
        text = json.dumps({"headers": line.headers, "body": line.body}, ensure_ascii=False)
        text = re.sub(r"\{call-(\d+)\}", lambda match: self.ids[int(match[1])], text)
        return Asked(line.path, **json.loads(text))

    def sent(self, one: Asked, status: int) -> None:
        headers = {**one.headers, "authorization": f"Bearer {self.opened['api_key']}"}
        response = self.gateway.client.post(self.opened["base_url"] + one.path, json=one.body, headers=headers)
        note(one, b"HTTP/1.1 %d " % response.status_code + response.content[:4096])
        assert response.status_code == status, response.text[:500]

    def dropped(self, one: Asked, after: str) -> None:
        """Like `Wire`: the reply breaks off while the engine works, or after so much of it."""
        working, states = len(self.gateway.engine.served), len(self.gateway.states())
        if after == "connection":
            self.gateway.engine.held.clear()
        with self.connection(one) as connection:
            if after == "connection":
                until(lambda: len(self.gateway.engine.served) > working)
            else:
                seen = b""
                while Drop(after).length(seen) is None:
                    seen += connection.recv(2048)
                note(one, seen)
        if after == "connection":
            until(lambda: clients(self.gateway) == 0)
            self.gateway.engine.held.set()
        until(lambda: self.gateway.states()[states:] in (["reply"], ["undelivered"]))
        (record,) = list(self.gateway.trace().calls.values())[states:]
        one.call_id = record.call_id

    def connection(self, one: Asked) -> socket.socket:
        host, port = self.opened["base_url"].split("/")[2].split(":")
        path = "/" + self.opened["base_url"].split("/", 3)[3] + one.path
        data = json.dumps(one.body).encode()
        headers = {**one.headers, "host": "x", "authorization": f"Bearer {self.opened['api_key']}"}
        head = "".join(f"{name}: {value}\r\n" for name, value in {**headers, "content-length": str(len(data))}.items())
        connection = socket.socket()
        for option in NARROW:
            connection.setsockopt(*option)
        connection.connect((host, int(port)))
        connection.sendall(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + data)
        return connection


def clients(gateway: Recorder) -> int:
    return int(gateway.control("GET", f"/attempts/{gateway.rollout}/1").json()["clients"])


# ── the command ───────────────────────────────────────────────────────────────────────────────────


def played(cli: str) -> Iterator[Line]:
    with tempfile.TemporaryDirectory() as folder, engine() as model, recorder(model, Path(folder)) as shared:
        for number, (name, cell) in enumerate(CELLS.items()):
            if cli in cell.clis:
                case = Case(another(shared), cli, Path(folder) / f"case{number}")
                began = time.monotonic()
                case.play(cell)
                found = shape(graph_of(case.gateway, case.asked), case.gateway.trace().calls.values())
                print(f"{cli}, {name}: {time.monotonic() - began:.1f} s: {'; '.join(found)}", flush=True)
                yield from neutral_lines(name, case)


def main(clis: list[str]) -> None:
    for cli in clis or CLIS:
        save(cli, list(played(cli)))
        print(f"{path_of(cli)}: {path_of(cli).stat().st_size} bytes", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] != ["record"]:
        sys.exit(__doc__)
    main(sys.argv[2:])
