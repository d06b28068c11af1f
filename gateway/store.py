"""The trace store: one append-only log per attempt, below one folder that no sandbox mounts.

    store = Store(folder, secrets=[key])
    log = store.open(rollout_id, attempt_id, info={"purpose": "train", ...})   # new, or reopened after a crash
    seq = log.next_seq()                              # when a call arrives
    log.reply(record)                                 # durable when it returns: only now send the terminal event
    log.delivered(call_id, t_terminal=...)            # the terminal event was written without error
    log.undelivered(call_id, "client hung up")        # it was not; a later `delivered` (a resend) overrides it
    log.resent(call_id, 1)                            # the harness sent the call again, n times by now
    log.reward({call_id: 0.5})                        # of single calls; the rollout's is the run's to tell
    log.release("by control"); snapshot = log.freeze()
    log.records()                                     # the calls, states applied: to answer resends after a restart
    store.drop(rollout_id, attempt_id, snapshot)      # StaleSnapshot unless it is the current one
    read(path) -> Trace;  traces(folder) -> every Trace

`reply` takes a whole record (`Delta(tail=everything)` for P, messages and tools) in state `reply`,
`failed` or `synthetic`, and writes it shortened. Every value in it must be strict JSON: refuse a body
with numbers like 1e999 when it arrives, for here it is a ValueError. All methods may be called from
any thread; `reply`, `reward`, `release` and `freeze` wait for the disk, so a server calls them in a thread.

Invariants:
- A line is `LENGTH CRC32 JSON`, both in hexadecimal; the log of a killed process is whole lines and
  at most one torn one, which is cut off and reported (`log.torn`, `Trace.torn`) before anything is
  appended. Damage before the last line is refused: appending there would hide it.
- Appending the same (call, event) twice changes nothing; the same call with other content is refused.
- A snapshot id is the SHA-256 of all lines but `freeze`. So a call that comes after a freeze is kept, and
  shows: the snapshot is no longer current and nothing can be dropped by it.
- One process writes a log (a lock says so); readers need no lock.
- Known secrets, plain, URL-encoded or in base64, are replaced in every string before it is written.

Not here: which calls form a sequence (graph.py). A call left in state `reply` by a crash stays so.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import threading
import time
import zlib
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import orjson

from gateway import strict
from gateway.prefixes import IdTree, ListTree, Node, insert
from gateway.record import ID_BYTES, CallRecord, Delta, Doc, dump, pack, unpack, whole

SCHEMA = "trace/1"
LINE = re.compile(rb"([0-9a-f]{8}) ([0-9a-f]{8}) (.*)", re.DOTALL)
SECRET_CHARACTERS = 8
"""A shorter "secret" is not replaced: it would hit by chance."""
NUMBERS = {int, float, type(None)}
ARRAYS = ("prompt_ids", "sampled_ids", "logprobs")
"""Members of a call. Written by orjson, ten times as quick at numbers; the rest must be ASCII, and fail with a NaN."""
REDACTED = {"reply": "call", "delivered": "changes", "undelivered": "changes", "release": "reason"}
"""The member of an event that may hold a secret."""
NAME_CHARACTERS = 200
"""Of a folder's name; file systems take 255 bytes."""


class StoreError(Exception):
    """One line that names the file and says what to do."""


class StaleSnapshot(StoreError):
    pass


@dataclass
class Trace:
    """One attempt as its log tells it."""

    path: Path
    rollout_id: str = ""
    attempt_id: int = 0
    info: Mapping[str, Any] = field(default_factory=dict)
    opened_at: float = 0.0
    """Wall clock, seconds since the epoch; all other times are monotonic."""
    released: str | None = None
    """Why, if it is."""
    frozen: str | None = None
    """The last snapshot id that a freeze wrote; current if it equals `snapshot`."""
    dropped: bool = False
    snapshot: str = ""
    torn: int = 0
    """Bytes of a last line that was never whole: left out."""
    calls: dict[str, CallRecord] = field(default_factory=dict)
    """By call id, in the order of their replies."""
    rewards: dict[str, float | None] = field(default_factory=dict)
    """Of single calls, by call id; null takes one back."""

    def messages(self, call_id: str) -> list[Any]:
        return whole(self.calls, call_id, "messages")

    def tools(self, call_id: str) -> list[Any]:
        return whole(self.calls, call_id, "tools")

    def apply(self, entry: Doc) -> None:
        """One line of the log. The same line again changes nothing."""
        event = entry.get("event")
        if event == "open":
            self.rollout_id, self.attempt_id = entry["rollout_id"], entry["attempt_id"]
            self.info, self.opened_at = entry["info"], entry["wall_clock"]
        elif event == "reply":
            record = CallRecord.from_json(entry["call"])
            self.calls.setdefault(record.call_id, record)
        elif event in ("delivered", "undelivered", "resent"):
            known = self.calls[entry["call_id"]]
            self.calls[known.call_id] = replace(known, **entry["changes"])
        elif event == "reward":
            self.rewards |= entry["rewards"]
        elif event == "release":
            self.released = entry["reason"]
        elif event == "freeze":
            self.frozen = entry["snapshot"]
        elif event == "drop":
            self.dropped, self.frozen = True, entry["snapshot"]
        else:
            raise ValueError(f"unknown event {event!r}")


class Store:
    def __init__(self, folder: Path, secrets: Iterable[str] = ()) -> None:
        self.folder = folder
        self.redact = Redactor(secrets)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def open(self, rollout_id: str, attempt_id: int = 1, info: Mapping[str, Any] | None = None) -> AttemptLog:
        """The attempt's log, created if need be. `info` describes a new one; a reopened one keeps its own."""
        path = log_path(self.folder, rollout_id, attempt_id)
        path.parent.mkdir(exist_ok=True, mode=0o700)
        return AttemptLog(path, rollout_id, attempt_id, self.redact(dict(info or {})), self.redact)

    def drop(self, rollout_id: str, attempt_id: int, snapshot: str) -> None:
        """Forget the attempt's calls. What remains is one line, so that the attempt is not opened anew."""
        path = log_path(self.folder, rollout_id, attempt_id)
        if not path.exists():
            raise StoreError(f"{path}: no such trace")
        with contextlib.closing(AttemptLog(path, rollout_id, attempt_id, {}, self.redact)) as log:
            if log.trace.snapshot != snapshot:
                raise StaleSnapshot(
                    f"{path}: the snapshot is {log.trace.snapshot} by now: read it again before dropping"
                )
            mark = {"rollout_id": rollout_id, "attempt_id": attempt_id, "info": {}, "wall_clock": log.trace.opened_at}
            lines: list[Doc] = [{"event": "open", "schema": SCHEMA, **mark}, {"event": "drop", "snapshot": snapshot}]
            temporary = path.with_suffix(".new")
            with temporary.open("wb") as file:
                file.write(b"".join(frame(dump(line).encode()) for line in lines))
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            sync_folder(path.parent)


class AttemptLog:
    """The open log of one attempt: the only writer of its file."""

    def __init__(self, path: Path, rollout_id: str, attempt_id: int, info: Mapping[str, Any], redact: Redactor) -> None:
        self.path = path
        self._redact = redact
        self._mutex = threading.RLock()
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._lock()
            self.trace, self._end, self._content = load(path)
            self.torn = self.trace.torn
            self._recover(rollout_id, attempt_id, info)
        except BaseException:
            os.close(self._descriptor)
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StoreError(f"{self.path}: another process writes this trace: give each gateway a folder") from None

    def _recover(self, rollout_id: str, attempt_id: int, info: Mapping[str, Any]) -> None:
        if self.torn:
            os.ftruncate(self._descriptor, self._end)
            os.fdatasync(self._descriptor)
        if self._end == 0:
            identity = {"rollout_id": rollout_id, "attempt_id": attempt_id, "info": info, "wall_clock": time.time()}
            self._append({"event": "open", "schema": SCHEMA, **identity}, sync=True)
            sync_folder(self.path.parent)
            sync_folder(self.path.parent.parent)
        elif (self.trace.rollout_id, self.trace.attempt_id) != (rollout_id, attempt_id):
            raise StoreError(f"{self.path}: holds attempt {self.trace.attempt_id} of {self.trace.rollout_id!r}")
        self._seq = max((call.seq for call in self.trace.calls.values()), default=-1) + 1
        self._index()

    def _index(self) -> None:
        """What the stored calls begin with, so that the next ones can be written as deltas."""
        self._ids, self._messages, self._tools = IdTree(), ListTree(), ListTree()
        self._latest = b"", self._ids.root
        """P + S of the latest call, which the next P mostly begins with: that saves the walk from the root."""
        ends: dict[str, Node] = {}
        for call_id, call in self.trace.calls.items():
            self._messages.insert(call.messages, call_id)
            self._tools.insert(call.tools, call_id)
            insert(self._ids, ends, call)

    def next_seq(self) -> int:
        with self._mutex:
            self._seq += 1
            return self._seq - 1

    def records(self) -> list[CallRecord]:
        with self._mutex:
            return list(self.trace.calls.values())

    def reply(self, record: CallRecord) -> CallRecord:
        """Make the call durable; returns the record as stored. The same one again changes nothing."""
        with self._mutex:
            if (known := self.trace.calls.get(record.call_id)) is not None:
                if (known.seq, known.sampled_ids) != (record.seq, record.sampled_ids and list(record.sampled_ids)):
                    raise StoreError(f"{self.path}: call {record.call_id} is already there with another content")
                return known
            if record.state not in ("reply", "failed", "synthetic"):
                raise ValueError(f"a call is first stored as reply, failed or synthetic, not {record.state}")
            try:
                self._append({"event": "reply", "call": self._shorten(record).as_json()}, sync=True)
            except BaseException:
                self._index()  # or a later call would build on one that is not in the log
                raise
            return self.trace.calls[record.call_id]

    def delivered(self, call_id: str, t_terminal: float | None = None) -> None:
        changes = {"evidence": "terminal_event", "t_terminal": t_terminal}
        with self._mutex:
            if self.trace.calls[call_id].evidence != "terminal_event":
                self._change("delivered", call_id, changes, "delivered")

    def delivered_at_once(self, call_id: str, t_terminal: float) -> bool:
        """`delivered`, unless the log is busy with the disk or fails: then False. This does not wait for the disk."""
        if not self._mutex.acquire(blocking=False):
            return False
        try:
            self.delivered(call_id, t_terminal)
            return True
        except StoreError:
            return False
        finally:
            self._mutex.release()

    def undelivered(self, call_id: str, evidence: str) -> None:
        with self._mutex:
            if self.trace.calls[call_id].evidence is None:
                self._change("undelivered", call_id, {"evidence": evidence}, "undelivered")

    def resent(self, call_id: str, resends: int) -> None:
        with self._mutex:
            if self.trace.calls[call_id].resends != resends:
                self._append({"event": "resent", "call_id": call_id, "changes": {"resends": resends}})

    def _change(self, event: str, call_id: str, changes: Doc, state: str) -> None:
        if self.trace.calls[call_id].state in ("reply", "undelivered"):
            changes = {"state": state, **changes}  # a failed or synthetic call stays what it is
        self._append({"event": event, "call_id": call_id, "changes": changes})

    def reward(self, rewards: Mapping[str, float | None]) -> None:
        """Rewards of single calls, durable. StoreError names a call that is not in the log; then none is written."""
        with self._mutex:
            if unknown := sorted(set(rewards) - set(self.trace.calls)):
                raise StoreError(f"{self.path}: there is no call {unknown[0]}")
            if self.trace.rewards | dict(rewards) != self.trace.rewards:
                self._append({"event": "reward", "rewards": dict(rewards)}, sync=True)

    def release(self, reason: str) -> None:
        with self._mutex:
            if self.trace.released is None:
                self._append({"event": "release", "reason": reason}, sync=True)

    def freeze(self) -> str:
        """Make everything durable; returns the snapshot id over it."""
        with self._mutex:
            if self.trace.frozen != self.trace.snapshot:
                self._append({"event": "freeze", "snapshot": self.trace.snapshot})
            os.fdatasync(self._descriptor)
            return self.trace.snapshot

    def close(self) -> None:
        with self._mutex:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1

    def _append(self, entry: Doc, sync: bool = False) -> None:
        """One line, or an exception and no line: what a full disk leaves half written is cut off again."""
        entry, text = self._written(entry)
        line = frame(text)
        try:
            if os.pwrite(self._descriptor, line, self._end) != len(line):
                raise OSError(28, "the disk is full")
            if sync:
                os.fdatasync(self._descriptor)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._end)
            raise StoreError(f"{self.path}: cannot be written: {error.strerror}") from error
        self._end += len(line)
        if entry["event"] != "freeze":
            self._content.update(line)
            self.trace.snapshot = self._content.hexdigest()
        self.trace.apply(entry)

    def _written(self, entry: Doc) -> tuple[Doc, bytes]:
        """(the entry without known secrets, its JSON). To search the JSON is quicker than to walk through the entry."""
        numbers = numbers_of(entry["call"]) if entry["event"] == "reply" else b""
        text = dump(without_numbers(entry) if numbers else entry)
        if entry["event"] in REDACTED and self._redact.finds(text):
            entry = {name: self._redact(value) if name in REDACTED.values() else value for name, value in entry.items()}
            return entry, dump(entry).encode()
        return entry, text[:-2].encode() + b"," + numbers[1:] + b"}" if numbers else text.encode()

    def _shorten(self, record: CallRecord) -> CallRecord:
        """The record with P, messages and tools as deltas against what this log holds."""
        call_id = record.call_id
        messages = self._messages.shorten(record.messages.tail, call_id)
        tools = self._tools.shorten(record.tools.tail, call_id)
        prompt = record.prompt_ids
        sampled = None if record.sampled_ids is None else list(record.sampled_ids)
        if prompt and (ids := prompt.packed) is not None:
            known, start = self._latest
            if not ids.startswith(known):
                known, start = b"", self._ids.root
            end, shared = self._ids.extend(start, ids[len(known) :], call_id)
            new = pack(sampled or ()) or b""
            self._latest = ids + new, self._ids.extend(end, new, call_id)[0]
            prompt = Delta(unpack(ids[shared.depth * ID_BYTES :]), shared.owner, shared.depth)
        return replace(record, messages=messages, tools=tools, prompt_ids=prompt, sampled_ids=sampled)


def numbers_of(call: Doc) -> bytes:
    """The JSON of an object with the arrays of a call, which are most of it; nothing if they hold more than numbers."""
    tail = (call["prompt_ids"] or {"tail": ()})["tail"]
    if pack(tail) is None or pack(call["sampled_ids"] or ()) is None:
        return b""
    return orjson.dumps({name: call[name] for name in ARRAYS})


def without_numbers(entry: Doc) -> Doc:
    """The entry of a reply to which the arrays can be added at the end."""
    return {"event": entry["event"], "call": {k: v for k, v in entry["call"].items() if k not in ARRAYS}}


def frame(text: bytes) -> bytes:
    return b"%08x %08x %s\n" % (len(text), zlib.crc32(text), text)


def unframe(line: bytes) -> bytes | None:
    """The JSON of a line without its newline; None when it is not whole."""
    match = LINE.fullmatch(line)
    if match is None or int(match[1], 16) != len(match[3]) or int(match[2], 16) != zlib.crc32(match[3]):
        return None
    return match[3]


def load(path: Path) -> tuple[Trace, int, Any]:
    """(the trace, the byte its whole lines end at, their running SHA-256 without `freeze`)."""
    trace, content, end = Trace(path), hashlib.sha256(), 0
    data = path.read_bytes()
    for line in data.splitlines(keepends=True):
        text = unframe(line[:-1]) if line.endswith(b"\n") else None
        if text is None:
            break
        end += len(line)
        try:
            entry = strict.loads(text)
            trace.apply(entry)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise StoreError(f"{path}: byte {end - len(line)}: not a line of {SCHEMA}: {error}") from None
        if entry["event"] != "freeze":
            content.update(line)
    if any(unframe(line) is not None for line in data[end:].split(b"\n")[1:]):
        raise StoreError(f"{path}: damaged at byte {end}, with good lines after it: restore it, or move it away")
    trace.torn, trace.snapshot = len(data) - end, content.hexdigest()
    return trace, end, content


def read(path: Path) -> Trace:
    """One log, also of an attempt that is still written to. StoreError when it is not a whole trace."""
    try:
        trace = load(path)[0]
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from None
    if not trace.attempt_id and not trace.torn:
        raise StoreError(f"{path}: is empty: not a trace")
    return trace


def traces(folder: Path) -> Iterator[Trace]:
    """Every trace below `folder`, in a stable order; a log that was torn before its first line is none."""
    for path in sorted(folder.glob("*/*.log")):
        if path.stat().st_size and (trace := read(path)).attempt_id:
            yield trace


def log_path(folder: Path, rollout_id: str, attempt_id: int) -> Path:
    """`folder/ROLLOUT/ATTEMPT.log`; no rollout id leads out of `folder`."""
    name = quote(rollout_id.encode("utf-8", "surrogatepass"), safe="").replace(".", "%2E")
    if len(name) > NAME_CHARACTERS:
        digest = hashlib.sha256(rollout_id.encode("utf-8", "surrogatepass")).hexdigest()
        name = f"{name[:100]}.{digest}"  # no shorter name holds a dot
    return folder / (name or ".empty") / f"{attempt_id}.log"


def sync_folder(folder: Path) -> None:
    """A new file survives a power cut only once its folder is on the disk too."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Redactor:
    """Replaces the known secrets in every string of a value."""

    def __init__(self, secrets: Iterable[str]) -> None:
        forms = {form for secret in secrets if len(secret) >= SECRET_CHARACTERS for form in spellings(secret)}
        self.pattern = re.compile("|".join(map(re.escape, sorted(forms, key=len, reverse=True)))) if forms else None
        self.marks = [dump(form)[1:-1] for form in forms]

    def finds(self, text: str) -> bool:
        """Whether a value whose JSON this is, as `dump` writes it, holds a secret; true also where it only might."""
        return any(mark in text for mark in self.marks)

    def __call__(self, value: Any) -> Any:
        if self.pattern is None:
            return value
        if isinstance(value, str):
            return self.pattern.sub("[secret]", value)
        if isinstance(value, list | tuple):
            # Token ids and log probabilities are long and hold no text.
            return value if set(map(type, value)) <= NUMBERS else [self(element) for element in value]
        if isinstance(value, Mapping):
            return {self(name): self(member) for name, member in value.items()}
        return value


def spellings(secret: str) -> Iterator[str]:
    """The secret as it may stand in a text: plain, URL-encoded, and inside any base64 that contains it."""
    yield from (secret, quote(secret, safe=""), quote_plus(secret))
    for before in range(3):
        encoded = b64encode(b"\0" * before + secret.encode("utf-8", "surrogatepass")).decode().rstrip("=")
        # The first and last characters also depend on what stands beside the secret.
        sure = encoded[-(-before * 4 // 3) :][: -1 if (before + len(secret.encode())) % 3 else None]
        yield from (sure, sure.replace("+", "-").replace("/", "_"))
