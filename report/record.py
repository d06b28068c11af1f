"""The record of a run: one line of strict JSON per attempt, how it is written, read back and gone on with.

Invariants: a line holds no key and nothing that strict JSON lacks; the file is whole lines, appended by one run at a
time, and the only state of a run; a rollout is settled by its first line with a reward. It knows neither the API nor
how rollouts are run.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import math
import os
import stat
import sys
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import quote

if TYPE_CHECKING:
    from report.tasks import Task
    from rl_eval import Rollout

Json = dict[str, Any]

VERSION = "0.4"
MAX_TEXT_CHARS, MAX_DEPTH = 256 << 10, 100  # of one text and of nesting in a recorded item
# Failures that an agent can cause by itself: tried once more, then they are the policy's own, too.
AGENT_REASONS = ("harness_exited", "harness_failed", "harness_flooded")


class Refused(Exception):
    """The run cannot start: one line, an exit code (2: usage), and nothing was created."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code


def at(value: Any, *names: str) -> Any:
    """A member of a member of what was read: None where there is none, whatever stands there instead."""
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value


PLACE = ("rollout_id", "task", "harness", "model", "sample")


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class Result:
    """What became of an attempt at a rollout: one line of the output, its members in this order."""

    def __init__(self, rollout_id: str, task: str, harness: str, model: str, sample: int, **known: Any) -> None:
        self.rollout_id, self.task, self.harness, self.model, self.sample = rollout_id, task, harness, model, sample
        self.session_id: str | None = None
        self.status = "error"  # completed, failed, cancelled, timeout, error
        self.reward: float | None = None  # 1.0, 0.0, None when nothing was measured
        self.answer: Any = None
        self.duration_s = 0.0  # from the create request until all but the deletion was done
        self.usage: Json | None = None
        self.items: list[Any] = []
        self.error: str | None = None
        self.turn_id: str | None = None
        self.group_id = self.run_id = ""
        self.started_at = ""  # UTC, ISO 8601
        self.attempt, self.final = 1, False  # final: this attempt settled the rollout
        self.usage_observed: Json | None = None  # what was seen where the sum is not known
        self.failure: Json | None = None  # code, class and reason of a failed turn
        self.timings: dict[str, float | None] = {}  # seconds: queued, preparing, running, settling, grading
        self.task_digest, self.script_version = "", VERSION
        self.resolved: Json = {}  # harness and model as the session reads them
        self.options: Json = {}  # of the run
        self.deployment: Json = {}
        vars(self).update(known)

    @property
    def tokens(self) -> int | None:
        """Input and output, or what was seen of them when the sum is not known; None: nothing was."""
        total, *parts = (
            at(self.usage or self.usage_observed, f"{kind}_tokens") for kind in ("total", "input", "output")
        )
        known = [n for n in (parts if total is None else [total]) if type(n) is int and n >= 0]
        return sum(known) if known else None

    def note(self, message: str) -> None:
        self.error = f"{self.error}; {message}" if self.error else message

    def fail(self, message: str, status: str = "error") -> None:
        self.status, self.reward = status, None
        self.note(message)


# --- What goes out: strict, redacted, harmless to a terminal ---

SECRETS: list[str] = []  # in all their forms


def keep_secret(secret: str) -> None:
    """Have a key redacted from now on, also in base64 or URL-encoded."""
    if len(secret) >= 8:  # a shorter one is a dummy such as "none", and would eat plain words
        coded = base64.b64encode(secret.encode()).decode()
        forms = {secret, quote(secret, safe=""), coded.rstrip("="), coded[: len(secret) // 3 * 4]}
        SECRETS[:] = sorted({*SECRETS, *forms}, key=len, reverse=True)


def redact(text: str) -> str:
    for secret in SECRETS:
        text = text.replace(secret, "[redacted]")
    return text


def plain(text: str, limit: int = 500) -> str:
    """One line that a terminal cannot take for anything but text."""
    text = redact(text)
    text = text if len(text) <= limit else text[:limit] + "..."
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def say(text: str, stream: Any = None) -> None:
    """Print to stderr or `stream`. A reader that has gone away costs no rollout."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=stream or sys.stderr, flush=True)


def strict(value: Any, marks: list[Json], limit: float = math.inf, path: str = "", depth: int = 0) -> Any:
    """A copy that strict JSON can hold, without secrets. What else was altered goes to `marks`."""
    if isinstance(value, str):
        text = redact(value)
        if len(text) <= limit:
            return text
        raw, half = text.encode("utf-8", "surrogatepass"), int(limit // 2)
        marks.append({"path": path, "why": "cut", "bytes": len(raw), "sha256": sha256(raw).hexdigest()})
        return f"{text[:half]}\n[{len(text) - 2 * half} characters cut]\n{text[-half:]}"
    if isinstance(value, float) and not math.isfinite(value):
        marks.append({"path": path, "why": "not a JSON number"})
        return str(value)
    if isinstance(value, (dict, list)) and depth > MAX_DEPTH:
        marks.append({"path": path[:200], "why": "nested too deep"})
        return None
    if isinstance(value, list):
        return [strict(v, marks, limit, f"{path}[{i}]", depth + 1) for i, v in enumerate(value)]
    if isinstance(value, dict):
        return {redact(k): strict(v, marks, limit, f"{path}.{k}", depth + 1) for k, v in value.items()}
    return value


def strict_item(item: Any) -> Any:
    """An item as the API returned it; if something had to be altered, `x_rl_eval` says what."""
    marks: list[Json] = []
    copy = strict(item, marks, MAX_TEXT_CHARS)
    return {**copy, "x_rl_eval": {"altered": marks[:20]}} if marks and isinstance(copy, dict) else copy


def to_line(result: Result) -> bytes:
    """The record as a line of strict ASCII JSON: no NaN, no raw surrogate, no secret."""
    record: Json = {**vars(result), "items": []}
    record = {**strict(record, []), "items": [strict_item(item) for item in result.items]}
    return json.dumps(record, allow_nan=False).encode("ascii") + b"\n"


NEEDED: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("run_id", "rollout_id", "group_id", "task", "harness", "model", "status"), (str,)),
    **dict.fromkeys(("sample", "attempt"), (int,)),
    "reward": (int, float, type(None)),
}
MEMBERS: dict[str, tuple[type, ...]] = {
    **NEEDED,
    **dict.fromkeys(("usage", "usage_observed", "failure"), (dict, type(None))),
    **dict.fromkeys(("options", "timings", "resolved", "deployment"), (dict,)),
    **{"duration_s": (int, float), "error": (str, type(None)), "task_digest": (str,)},
}


# --- The file ---


def parse_strictly(data: bytes) -> Any:
    """Parse JSON as a grader must. Raises ValueError.

    Refused: what is not UTF-8 (one leading byte-order mark is ignored), a duplicate key, a number that is
    not finite or has over 4,300 digits (Python's own limit), nesting too deep to be parsed.
    """

    def finite(text: str) -> float:
        if not math.isfinite(value := float(text)):
            raise ValueError(f"{text[:20]} is not finite")
        return value

    def unique(pairs: list[tuple[str, Any]]) -> Json:
        if len(value := dict(pairs)) < len(pairs):
            raise ValueError("a duplicate key")
        return value

    try:
        text = data.decode("utf-8").removeprefix("\ufeff")
        hooks: Json = {"parse_float": finite, "parse_constant": finite, "object_pairs_hook": unique}
        return json.loads(text, **hooks)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON: {str(error)[:200]}") from None


def read_lines(file: BinaryIO) -> Iterator[tuple[int, int, Json | None]]:
    """Yield number, end in bytes and record of each line that is not blank; None for what is no record of a rollout."""
    end = 0
    for number, line in enumerate(file, 1):
        end += len(line)
        if not line.strip():
            continue
        record = None
        with contextlib.suppress(ValueError):
            record = parse_strictly(line)
        yield number, end, record if is_record(record) else None


def is_record(value: Any) -> bool:
    """Whether a line holds what is read of an attempt, each member of its type."""
    whole = isinstance(value, dict) and set(NEEDED) <= set(value)
    return whole and all(type(value[name]) in kinds for name, kinds in MEMBERS.items() if name in value)


class Book:
    """What is known of a run: every attempt at every rollout, without items and answers.

    A rollout is settled by its first attempt with a reward; until then it is owed.
    """

    def __init__(self) -> None:
        self.attempts: dict[str, dict[int, Result]] = {}
        self.latest: Result | None = None
        self.tokens = 0  # all that are known to be used, failed attempts included
        self.problems: list[str] = []
        self.whole, self.unended = 0, False  # bytes of the file without a torn last line; its last line has no end

    def read(self, file: BinaryIO) -> None:
        size = os.fstat(file.fileno()).st_size
        for number, end, record in read_lines(file):
            file_ended = end == size and os.pread(file.fileno(), 1, size - 1) != b"\n"
            if record is not None:
                self.add_record(record)
                self.unended = file_ended
            elif file_ended:
                self.problems.append(f"line {number} is torn: it is cut off, its rollout runs again")
                return
            else:
                self.problems.append(f"line {number} is no record of a rollout: left alone")
            self.whole = end
        self.whole = size

    def add_record(self, record: Json) -> None:
        result = Result(*(record[name] for name in PLACE))
        known = {name: record[name] for name in vars(result) if name in record and name not in ("items", "answer")}
        vars(result).update(known)
        self.add(result)

    def add(self, result: Result) -> None:
        """A line that is there twice changes nothing."""
        found = self.attempts.setdefault(result.rollout_id, {})
        if result.attempt not in found:
            found[result.attempt] = self.latest = result
            self.tokens += result.tokens or 0

    def outcome(self, rollout_id: str) -> Result | None:
        """The attempt that settled the rollout, else the latest."""
        found = self.attempts.get(rollout_id, {})
        return next((r for _, r in sorted(found.items()) if r.reward is not None), found[max(found)] if found else None)

    def owes(self, rollout: Rollout) -> bool:
        return (found := self.outcome(rollout.id)) is None or found.reward is None

    def next_attempt(self, rollout_id: str) -> int:
        return max(self.attempts.get(rollout_id, [0])) + 1

    def agent_failures(self, rollout_id: str) -> int:
        """How many attempts ended in a failure that an agent can cause."""
        found = self.attempts.get(rollout_id, {}).values()
        return sum(at(r.failure, "reason") in AGENT_REASONS for r in found)

    @property
    def every(self) -> list[Result]:
        return [result for found in self.attempts.values() for result in found.values()]

    @property
    def outcomes(self) -> list[Result]:
        return [found for name in self.attempts if (found := self.outcome(name)) is not None]


def differences(book: Book, options: Json, tasks: list[Task]) -> list[str]:
    """What differs between the run in the book and this one, in words, and was not forced before."""
    digests, found = {task.id: task.digest for task in tasks}, []
    for result in book.every:
        for name in sorted({*result.options, *options} - {"forced"}):
            then, now = result.options.get(name), options.get(name)
            if then != now:
                found.append(f"{name.replace('_', ' ')}: {json.dumps(then)} then, {json.dumps(now)} now")
        if digests.get(result.task) != result.task_digest:
            now = digests.get(result.task)
            change = f"has changed (digest {result.task_digest} then, {now} now)" if now else "is not among the tasks"
            found.append(f"task {result.task} {change}")
    return [line for line in dict.fromkeys(found) if line not in forced_before(book)]


def forced_before(book: Book) -> list[str]:
    """The differences that an earlier --force went over; every line since then holds them."""
    forced = book.latest and book.latest.options.get("forced")
    return forced if isinstance(forced, list) else []


class Journal:
    """The output file: whole lines, appended, by one run at a time. Raises OSError, Refused.

    A new one is never over an existing file. To go on with one, `known` is what it holds.
    """

    def __init__(self, path: Path, known: Book | None = None) -> None:
        # A device such as /dev/null is there already, and holds nothing.
        device = path.exists() and stat.S_ISCHR(path.stat().st_mode)
        flags = os.O_RDWR | os.O_APPEND | (0 if device or known else os.O_CREAT | os.O_EXCL)
        self.path, self.size, self.fd = path, 0, os.open(path, flags, 0o644)
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if known is not None:
                self.go_on(known)
        except BlockingIOError:
            raise Refused(f"another run is writing {path}") from None

    def go_on(self, known: Book) -> None:
        """Read what is there under the lock; cut a torn last line off, end a whole one that lacks only its end."""
        with open(self.fd, "rb", closefd=False) as file:
            known.read(file)
        self.size = known.whole
        os.ftruncate(self.fd, self.size)
        if known.unended:
            self.append(b"\n")

    def append(self, line: bytes) -> None:
        """Write a line, or leave the file as it was."""
        written = 0
        try:
            while written < len(line):
                written += os.write(self.fd, line[written:])
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self.fd, self.size)
            raise
        self.size += len(line)

    def close(self) -> None:
        """Close the file; one that holds nothing is removed."""
        os.close(self.fd)
        if not self.size and self.path.is_file():
            self.path.unlink()


def default_path(run_id: str) -> Path:
    """Where a run is written that names no file. Raises OSError."""
    (folder := Path("runs")).mkdir(exist_ok=True)
    path = folder / (run_id.split("-")[0] + ".jsonl")
    return folder / (run_id + ".jsonl") if path.exists() else path  # another run began in the same second


def open_journal(path: Path | None, run_id: str) -> Journal:
    """Create the output file. Raises Refused."""
    try:
        return Journal(path := path or default_path(run_id))
    except OSError as error:
        raise Refused(f"cannot create {path or 'runs/'}: {error.strerror}") from None


def reopen_journal(path: Path, book: Book, read_only: bool) -> Journal | None:
    """Go on with a file, or only read it: into `book` goes what it holds. Raises Refused."""
    journal = None
    try:
        if read_only:
            with path.open("rb") as file:
                book.read(file)
        else:
            journal = Journal(path, book)
    except OSError as error:
        raise Refused(f"cannot go on with {path}: {error.strerror}") from None
    for problem in book.problems:
        say(plain(f"rl_eval: {path}, {problem}"))
    if len({result.run_id for result in book.every}) > 1:
        raise Refused(f"{path} holds lines of more than one run")
    return journal


def new_run_id() -> str:
    return time.strftime("%Y%m%dT%H%M%SZ-", time.gmtime()) + os.urandom(2).hex()
