#!/usr/bin/env python3
"""Run agent CLIs on a folder of tasks, grade their answers outside the sandbox, report pass@k.

One rollout is one session of one (task, harness, model, sample) on an Agents API. The agent works in a
sandbox without network and leaves /workspace/outputs/answer.json; this script compares it with the task's
expected.json, which never leaves this process. Each finished rollout is one line of strict JSON in the
output file, and the run ends with a Markdown table.

    python3 rl_eval.py                                      five tasks, codex, the scripted policy oracle
    python3 rl_eval.py --harness codex --harness claude_sdk --samples 2
    python3 rl_eval.py --check                              are the tasks themselves sound?
    MODEL_API_KEY=... python3 rl_eval.py --model my-policy \\
        --model-base-url 'http://127.0.0.1:9000/rollouts/{rollout_id}/v1'
    OPENAI_BASE_URL=... OPENAI_API_KEY=... python3 rl_eval.py --model some-model

Invariants: nothing is created before all input is checked; a session is deleted whatever happened before;
reward is null when nothing was measured and 0.0 when the policy did not earn it; no output holds a key.
Left out: how a session is run, grading by programs, running again what ended in an error.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import importlib.util
import json
import math
import os
import signal
import stat
import sys
import time
import unicodedata
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar
from urllib.parse import quote, urlsplit

if TYPE_CHECKING or "asyncio" in sys.modules:
    import asyncio
else:  # loaded at its first use, because --help must not pay 90 ms for it
    _spec = importlib.util.find_spec("asyncio")
    _spec.loader = importlib.util.LazyLoader(_spec.loader)
    asyncio = sys.modules["asyncio"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(asyncio)

Json = dict[str, Any]
T = TypeVar("T")

# --- Constants ------------------------------------------------------------------------------------------

HERE = Path(__file__).resolve().parent
WORKSPACE, ANSWER_PATH = "/workspace/", "/workspace/outputs/answer.json"

# What each harness speaks to its model, what it is given first. `shell` has none: it runs its input as a script.
PROTOCOLS_OF: dict[str, tuple[str, ...]] = {
    "codex": ("responses",),
    "claude_sdk": ("anthropic",),
    "pi": ("chat_completions", "responses", "anthropic"),
    "opencode": ("chat_completions",),
    "shell": (),
}
PROTOCOLS = ("anthropic", "responses", "chat_completions")
SCRIPTED = ("oracle", "nop")

MAX_FILES, MAX_FILE_BYTES, MAX_FILES_BYTES = 50, 5 << 20, 10 << 20  # what a session accepts
MAX_PATH_BYTES, MAX_ID_CHARS = 4096, 128
MAX_ANSWER_BYTES = 1 << 20
MAX_TEXT_CHARS, MAX_DEPTH = 256 << 10, 100  # of one text and of nesting in a recorded item
# Numbers match within one part in RELATIVE of the expected one, or one part in ABSOLUTE of 1. Whole
# numbers, so that comparing is exact for integers of any size.
RELATIVE, ABSOLUTE = 10**6, 10**9

# Failures that are the policy's own. A failed turn that names none of them measured nothing.
POLICY_CLASSES = ("model", "budget")
POLICY_CODES = ["context_length_exceeded", "max_output_tokens", "session_budget_exceeded"]
POLICY_CODES += ["cyber_policy", "misalignment_policy_violation"]
ENDED = ("completed", "failed", "cancelled")

FIRST_POLL, POLL_GROWTH, LAST_POLL = 0.2, 1.5, 4.0  # seconds, as all that follow
REQUEST_SECONDS = 30.0
TROUBLE_SECONDS = 60.0  # how long a deployment may misbehave before a request is given up
CANCEL_SECONDS = 330.0  # a public deployment refuses a cancel for up to 5 minutes of preparation
SETTLE_SECONDS = 30.0  # from an accepted cancel to a turn that has ended
HURRY_SECONDS = 1.0  # what cleaning up may still take after a second Ctrl-C
START_SECONDS = 60.0
USAGE_PAUSES = (0.5, 1.0, 2.0, 4.0)  # some deployments fill usage in seconds after the turn

# --- Words (no dataclasses: importing them costs --help 20 ms) -------------------------------------------


class Task(NamedTuple):
    """A question, the files it is asked about, and the answer that earns 1.0."""

    id: str
    instruction: str
    expected: Json
    files: tuple[tuple[str, Path], ...]  # path below /workspace; where its content is read, late
    solution: str | None  # bash text of the reference solution


class Pair(NamedTuple):
    """A harness with a model; None leaves the choice to the deployment."""

    harness: str | None
    model: str | None
    protocol: str | None = None  # of the model endpoint that sessions are given; None: they are given none


class Rollout(NamedTuple):
    """One planned attempt at a task by a harness and a model."""

    id: str
    group_id: str
    run_id: str
    task: Task
    pair: Pair
    sample: int
    input: str


class Result:
    """What became of a rollout: one line of the output, its members in this order."""

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
        self.group_id = ""
        self.started_at = ""  # UTC, ISO 8601
        vars(self).update(known)

    def note(self, message: str) -> None:
        self.error = f"{self.error}; {message}" if self.error else message

    def fail(self, message: str, status: str = "error") -> None:
        self.status, self.reward = status, None
        self.note(message)


class Refused(Exception):
    """The run cannot start: one line, an exit code (2: usage), and nothing was created."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code


# --- Tasks ----------------------------------------------------------------------------------------------


def load_tasks(folder: Path, wanted: Iterable[str] = ()) -> list[Task]:
    """Load the tasks in `folder`, or the `wanted` ones, in order of their ids. Raises Refused."""
    try:
        names = sorted(p.name for p in folder.iterdir() if p.is_dir() and p.name[0] not in "._")
    except OSError as error:
        raise Refused(f"cannot read the task folder {folder}: {error.strerror}") from None
    if unknown := sorted(set(wanted) - set(names)):
        raise Refused(f"no task {unknown[0]!r} in {folder}; there are: {', '.join(names) or 'none'}")
    check_ids(names)
    if not names:
        raise Refused(f"no tasks in {folder}")
    return [load_task(folder / name) for name in names if not wanted or name in set(wanted)]


def check_ids(names: Iterable[str]) -> None:
    """Refuse ids that a file system, a terminal or a reader could mistake."""
    seen: dict[str, str] = {}
    for name in names:
        if len(name) > MAX_ID_CHARS or not name.isprintable() or name != name.strip() or "\\" in name:
            raise Refused(f"task id {name[:40]!r}: at most {MAX_ID_CHARS} printable characters")
        other = seen.setdefault(unicodedata.normalize("NFC", name).casefold(), name)
        if other != name:
            raise Refused(f"duplicate task ids: {other!r} and {name!r}")


def load_task(path: Path) -> Task:
    """Load one task folder. Raises Refused, naming the task and what is wrong with it."""
    name, solution = "instruction.md", path / "solution.sh"
    try:
        if not (instruction := (path / name).read_text("utf-8-sig")).strip() or "\0" in instruction:
            raise ValueError("no text")
        name = "expected.json"
        expected = parse_strictly((path / name).read_bytes())
        if not isinstance(expected, dict) or not expected:
            raise ValueError("not an object with at least one key")
        name = "solution.sh"
        script = solution.read_text("utf-8") if solution.exists() else None
        name = "files"
        return Task(path.name, instruction, expected, tuple(find_files(path / name)), script)
    except (OSError, ValueError) as error:
        raise Refused(f"task {path.name!r}: {name}: {getattr(error, 'strerror', None) or error}") from None


def find_files(root: Path) -> list[tuple[str, Path]]:
    """List what is below `root`, if it exists, by relative path. Raises ValueError at a limit."""
    found, total = [], 0
    for path in walk(root, root.resolve()) if os.path.lexists(root) else ():
        name, size = path.relative_to(root).as_posix(), path.stat().st_size
        if not name.isprintable() or "\\" in name or len((WORKSPACE + name).encode()) > MAX_PATH_BYTES:
            raise ValueError(f"{name[:200]!r} is no path for a workspace")
        if name.split("/")[0] == ".codex" or name.startswith(".managed-agents") or name == "outputs":
            raise ValueError(f"{name}: this path is reserved in the workspace")
        found.append((name, path))
        total += size
        if len(found) > MAX_FILES or size > MAX_FILE_BYTES or total > MAX_FILES_BYTES:
            limits = f"{MAX_FILES} files, {MAX_FILE_BYTES >> 20} MiB each, {MAX_FILES_BYTES >> 20} MiB in all"
            raise ValueError(f"{name} goes beyond the limits: {limits}")
    return found


def walk(folder: Path, root: Path, above: tuple[Path, ...] = ()) -> Iterator[Path]:
    """Yield every regular file; links are followed while they stay below `root`. Raises ValueError."""
    real = folder.resolve(strict=True)
    for path in sorted(folder.iterdir()):
        inside = not path.is_symlink() or (path.exists() and path.resolve().is_relative_to(root))
        if not inside or path.resolve() in (*above, real):
            raise ValueError(f"the symlink {path.name!r} leaves the folder, or leads nowhere or round")
        if path.is_dir():
            yield from walk(path, root, (*above, real))
        elif path.is_file():
            yield path
        else:
            raise ValueError(f"{path.name!r} is neither a file nor a folder")


# --- Plan -----------------------------------------------------------------------------------------------


def labels(pair: Pair) -> tuple[str, str]:
    """Harness and model as the output names them."""
    return pair.harness or "default", "none" if pair.harness == "shell" else pair.model or "default"


def make_rollout(run_id: str, task: Task, pair: Pair, sample: int, text: str) -> Rollout:
    """A rollout whose ids follow from the run's and its place in the plan, also in a later process."""
    group = "\0".join((task.id, *labels(pair)))
    one, all_ = (f"{run_id}-{sha256(t.encode()).hexdigest()[:12]}" for t in (f"{group}\0{sample}", group))
    return Rollout(one, all_, run_id, task, pair, sample, text)


def make_plan(run_id: str, tasks: list[Task], pairs: list[Pair], samples: int) -> list[Rollout]:
    """Every task by every pair, `samples` times; the samples of a group stand together."""
    places = ((task, pair, sample) for task in tasks for pair in pairs for sample in range(samples))
    return [make_rollout(run_id, task, pair, n, task.instruction) for task, pair, n in places]


def session_body(rollout: Rollout, endpoint: tuple[str, str] | None, files: list[Json]) -> Json:
    """The create request's arguments. `endpoint`: a base URL, perhaps with {rollout_id}, and its key."""
    pair, names = rollout.pair, {"run_id": rollout.run_id, "rollout_id": rollout.id}
    agent: Json = {} if pair.model is None else {"model": pair.model}
    if pair.harness is not None:
        agent["x_agents_core"] = {"harness": pair.harness}
    body: Json = {
        "agent": agent,
        "input": rollout.input,
        "environment": {"type": "openai_hosted", "files": files, "network": {"access": "disabled"}},
        "metadata": {**names, "group_id": rollout.group_id, "sample": str(rollout.sample)},
        # The suffix numbers the attempts at this rollout: another attempt is another session.
        "extra_headers": {"Idempotency-Key": f"{rollout.id}-1"},
    }
    if endpoint and pair.protocol:
        base_url = endpoint[0].replace("{rollout_id}", rollout.id)
        bundle = {"protocol": pair.protocol, "base_url": base_url, "api_key": endpoint[1]}
        body["extra_body"] = {"x_agents_core": {"model_provider": bundle}}
    return body


# --- Grading --------------------------------------------------------------------------------------------


def grade(expected: Json, data: bytes) -> tuple[float, Any, str]:
    """Compare an answer's bytes. Returns reward, parsed answer or None, and why it is not 1.0."""
    if len(data) > MAX_ANSWER_BYTES:
        return 0.0, None, f"larger than {MAX_ANSWER_BYTES} bytes"
    try:
        answer = parse_strictly(data)
    except ValueError as error:
        return 0.0, None, str(error)
    if not isinstance(answer, dict):
        return 0.0, answer, "not a JSON object"
    for key, value in expected.items():
        if key not in answer or not matches(value, answer[key]):
            return 0.0, answer, f"{'wrong' if key in answer else 'no'} value for {key!r}"
    return 1.0, answer, ""


def matches(expected: Any, actual: Any) -> bool:
    """Whether a value is as expected. Recursion goes no deeper than the expected value does."""
    if expected is None or isinstance(expected, bool) or actual is None or isinstance(actual, bool):
        return actual is expected
    if isinstance(expected, (int, float)):
        return isinstance(actual, (int, float)) and close(expected, actual)
    if isinstance(expected, str):
        return isinstance(actual, str) and expected.strip() == actual.strip()
    if isinstance(expected, list):
        same = isinstance(actual, list) and len(actual) == len(expected)
        return same and all(matches(e, a) for e, a in zip(expected, actual, strict=True))
    return isinstance(actual, dict) and all(k in actual and matches(v, actual[k]) for k, v in expected.items())


def close(expected: float, actual: float) -> bool:
    """Equal, within the relative tolerance, or within the absolute floor."""
    (a, b), (c, d) = expected.as_integer_ratio(), actual.as_integer_ratio()
    gap = abs(a * d - c * b)  # the difference, times b * d
    return gap * RELATIVE <= abs(a) * d or gap * ABSOLUTE <= b * d


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


# --- What goes out: strict, redacted, harmless to a terminal --------------------------------------------

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


class Journal:
    """The output file: whole lines, appended, never over an existing file. Raises OSError."""

    def __init__(self, path: Path) -> None:
        # A device such as /dev/null is there already, and holds nothing.
        device = path.exists() and stat.S_ISCHR(path.stat().st_mode)
        flags = os.O_WRONLY | os.O_APPEND | (0 if device else os.O_CREAT | os.O_EXCL)
        self.path, self.size, self.fd = path, 0, os.open(path, flags, 0o644)

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


# --- Statistics -----------------------------------------------------------------------------------------


def pass_at_k(n: int, c: int, k: int) -> float | None:
    """Chance that k of n samples, of which c are right, hold a right one; None if k > n or k < 1.

    The unbiased estimator of Chen et al. 2021 (arXiv:2107.03374), equation 1.
    """
    return None if not 1 <= k <= n else 1.0 - math.comb(n - c, k) / math.comb(n, k)


def mean(values: Iterable[float | None]) -> float | None:
    """Mean of what is known, whatever its order; None if nothing is."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def summarise(results: list[Result], ks: Iterable[int]) -> list[Json]:
    """One row per harness and model, sorted, by column. A mean is None when nothing was scored.

    In pass@k every task weighs the same; it is a mean and the share of the tasks that could enter it, those
    with at least k scored samples.
    """
    rows = []
    for harness, model in sorted({(r.harness, r.model) for r in results}):
        mine = [r for r in results if (r.harness, r.model) == (harness, model)]
        scored, statuses = [r for r in mine if r.reward is not None], [r.status for r in mine]
        by_task: dict[str, list[float | None]] = {r.task: [] for r in mine}
        for r in scored:
            by_task[r.task].append(r.reward)
        row: Json = {"harness": harness, "model": model, "rollouts": len(mine), "scored": len(scored)}
        row["mean reward"] = mean(r.reward for r in scored)
        for k in sorted(set(ks)):
            each = [pass_at_k(len(rewards), rewards.count(1.0), k) for rewards in by_task.values()]
            row[f"pass@{k}"] = mean(each), (len(each) - each.count(None), len(each))
        row |= {"errors": statuses.count("error"), "timeouts": statuses.count("timeout")}
        rows.append({**row, "mean duration (s)": mean(r.duration_s for r in scored)})
    return rows


def markdown(rows: list[Json]) -> str:
    """The rows as a Markdown table. A pass@k that not every task could enter says how many did."""
    from tabulate import tabulate

    def cell(value: Any, digits: int = 3) -> str:
        if isinstance(value, tuple):
            mean, (entered, tasks) = value
            return cell(mean) + (f" ({entered}/{tasks} tasks)" if 0 < entered < tasks else "")
        if isinstance(value, str):
            return plain(value).replace("|", "\\|")
        return "n/a" if value is None else f"{value:.{digits}f}" if isinstance(value, float) else str(value)

    body = [[cell(value, 1 if name.endswith("(s)") else 3) for name, value in row.items()] for row in rows]
    align = ["left", "left"] + ["right"] * (len(rows[0]) - 2) if rows else None
    head = list(rows[0]) if rows else ["harness", "model", "rollouts"]
    return tabulate(body, head, tablefmt="github", disable_numparse=True, colalign=align)


# --- The Agents API, as plain JSON ----------------------------------------------------------------------


class ApiError(Exception):
    """A request that was refused, or that got no answer (`status` None) or a useless one (200)."""

    def __init__(self, message: str, status: int | None = None, wait: float = 0.0, sent: bool = True) -> None:
        super().__init__(message)
        self.status, self.wait, self.sent = status, wait, sent  # wait: seconds that the server asked for
        self.transient = status is None or status in (408, 429) or status >= 500


def api_error(error: Any) -> ApiError:
    """Classify an exception of the client or of its HTTP library: here, and nowhere else."""
    status, body = getattr(error, "status_code", None), getattr(error, "body", None)
    if isinstance(error, (ApiError, ValueError, RecursionError)):
        return error if isinstance(error, ApiError) else ApiError("the answer is not JSON", 200)
    if status is None:
        sent = type(error.__cause__).__name__ not in ("ConnectError", "ConnectTimeout")
        return ApiError(f"no answer: {error or type(error).__name__}", sent=sent)
    body = body if isinstance(body, dict) else {}
    message = f"HTTP {status} {body.get('code') or ''}: {str(body.get('message') or error)[:1000]}"
    wait = error.response.headers.get("retry-after", "")
    return ApiError(message.replace(" :", ":"), status, min(float(wait), 120.0) if wait.isdecimal() else 0.0)


class Api:
    """Requests of the stock client, each sent once. Raises ApiError.

    Raw answers are read, not the client's models: they are the record, unknown members and types included,
    and building models costs more than the rest of a request.
    """

    def __init__(self, client: Any) -> None:
        self.client, sessions = client, client.beta.agents.sessions
        self.sessions, self.events = sessions.with_raw_response, sessions.events.with_raw_response
        self.turns, self.items = sessions.turns.with_raw_response, sessions.items.with_raw_response
        self.artifacts = sessions.artifacts.with_raw_response
        self.stream_content = sessions.artifacts.with_streaming_response.content

    async def send(self, method: Callable[..., Awaitable[Any]], *args: str, **members: Any) -> Json:
        try:
            answer = (await method(*args, timeout=REQUEST_SECONDS, **members)).content
            value = json.loads(answer.decode("utf-8", "replace") or "{}")
            return value if isinstance(value, dict) else json.loads("")
        except Exception as error:
            raise api_error(error) from None

    async def list(
        self, method: Any, *args: str, order: str = "desc", until: Callable[[Json], bool] | None = None
    ) -> list[Json]:
        """The elements of a list up to the first that `until` accepts, which comes last; at most 10,000.

        With a cursor of its own: a stock pager stops unseen at a null id.
        """
        found: list[Json] = []
        after: Json = {}
        while len(found) < 10_000:
            page = await self.send(method, *args, limit=100, order=order, **after)
            for element in page.get("data") or []:
                found.append(element)
                if until and until(element):
                    return found
            cursor = (page.get("data") or [{}])[-1].get("id") or page.get("last_id")
            if not page.get("has_more") or cursor in (None, after.get("after")):
                return found
            after = {"after": cursor}
        return found

    async def newest(self, wanted: Callable[[Json], bool], method: Any, *args: str) -> Json | None:
        found = await self.list(method, *args, until=wanted)
        return found[-1] if found and wanted(found[-1]) else None

    async def find_session(self, rollout_id: str) -> Json | None:
        """By metadata, in the unfiltered list: a deployment's filtered lists may lag behind."""

        def ours(session: Json) -> bool:
            return bool((session.get("metadata") or {}).get("rollout_id") == rollout_id)

        return await self.newest(ours, self.sessions.list)

    async def cancel(self, session_id: str) -> None:
        await self.send(self.events.create, session_id, events=[{"type": "agent.session.input.cancel"}])

    async def download(self, session_id: str, artifact_id: str, limit: int) -> bytes:
        """An artifact's content, or somewhat more than its first `limit` bytes."""
        data = bytearray()
        try:
            request = self.stream_content(artifact_id, session_id=session_id, timeout=REQUEST_SECONDS)
            async with request as answer:
                async for chunk in answer.iter_bytes():
                    data += chunk
                    if len(data) > limit:
                        break
        except Exception as error:
            raise api_error(error) from None
        return bytes(data)


async def patiently(request: Callable[..., Awaitable[T]], *args: Any, full: bool = False) -> T:
    """Repeat a request with growing, jittered pauses while its error is transient, for a minute.

    full: wait for a deployment without room as long as it takes.
    """
    from tenacity import AsyncRetrying, retry_if_exception, wait_random_exponential

    give_up, growing = time.monotonic() + TROUBLE_SECONDS, wait_random_exponential(multiplier=0.2, max=8.0)

    def error_of(state: Any) -> Any:
        return state.outcome.exception()

    def late(state: Any) -> bool:
        waits = full and error_of(state).status in (429, 503)
        return not waits and time.monotonic() + float(state.upcoming_sleep) > give_up

    retrying = AsyncRetrying(
        retry=retry_if_exception(lambda error: isinstance(error, ApiError) and error.transient),
        wait=lambda state: 0.1 + max(growing(state), error_of(state).wait),
        stop=late,
        reraise=True,
    )
    return await retrying(request, *args)


# --- One rollout ----------------------------------------------------------------------------------------


class Attempt:
    """What is known of a rollout's session while it runs."""

    def __init__(self, rollout: Rollout) -> None:
        self.rollout, self.session_id = rollout, ""
        self.creating: asyncio.Future[Json] | None = None  # not interrupted: its session would be lost
        self.doubtful = False  # a create request may have made a session that is not known
        self.turn: Json = {}  # the latest root turn
        self.started = False  # it left the queue: from then on time is the policy's
        self.failure: str | None = None  # why the session failed without any turn
        self.trouble: ApiError | None = None  # why the latest request failed

    @property
    def ended(self) -> bool:
        return self.failure is not None or self.turn.get("status") in ENDED


async def run_rollout(rollout: Rollout, api: Api, sweep: Sweep) -> Result:
    """Run one rollout, from its create request to its deleted session: all its side effects.

    Raises nothing: an interruption is a result, too.
    """
    result = Result(rollout.id, rollout.task.id, *labels(rollout.pair), rollout.sample, group_id=rollout.group_id)
    result.started_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    attempt, began, cancelled = Attempt(rollout), time.monotonic(), False
    try:
        try:
            await asyncio.wait_for(reach_end(api, attempt, sweep), sweep.timeout)
        except asyncio.TimeoutError:
            cancelled = await stop_turn(api, attempt)
        judge(result, attempt, sweep.timeout if cancelled else None)
        if result.status == "completed":
            await grade_answer(api, attempt, result)
        await read_record(api, attempt, result)
    except asyncio.CancelledError:
        result.fail(sweep.failure or "interrupted", "error" if sweep.failure else "cancelled")
    except ApiError as error:
        result.fail(str(error))
    except Exception as error:  # a bug here, or in grading one task, must not end the other rollouts
        result.fail(f"{type(error).__name__}: {error}")
    finally:
        result.duration_s = round(time.monotonic() - began, 3)
        if leak := await sweep.clean_up(release(api, attempt)):
            result.note(leak)
        result.session_id, result.turn_id = attempt.session_id or None, attempt.turn.get("id")
    return result


async def reach_end(api: Api, attempt: Attempt, sweep: Sweep) -> None:
    """Create the session and poll until its turn has ended, or it failed without one."""
    files = [
        {"type": "inline", "path": WORKSPACE + name, "data": base64.b64encode(path.read_bytes()).decode()}
        for name, path in attempt.rollout.task.files
    ]
    body = session_body(attempt.rollout, sweep.endpoint, files)
    session = await patiently(create_once, api, attempt, body, full=True)
    attempt.session_id = session["id"]
    network = (session.get("environment") or {}).get("network") or {}
    if network.get("access") != "disabled" or network.get("allowed_domains"):
        sweep.halt(reason := f"the deployment does not confirm that network access is disabled: {network}")
        raise ApiError(reason)
    pause, polls = FIRST_POLL, 0
    while not attempt.ended:
        await asyncio.sleep(pause * (0.8 + 0.4 * os.urandom(1)[0] / 255))
        pause, polls = min(pause * POLL_GROWTH, LAST_POLL), polls + 1
        try:
            await look(api, attempt, with_session=polls % 3 == 0)
        except ApiError as error:
            if not error.transient:
                raise
            pause = max(pause, error.wait)


async def create_once(api: Api, attempt: Attempt, body: Json) -> Json:
    """Send the create request, unless an earlier one whose answer was lost made the session."""
    if attempt.doubtful and (session := await api.find_session(attempt.rollout.id)):
        return session
    attempt.doubtful = True
    attempt.creating = asyncio.ensure_future(api.send(api.sessions.create, **body))
    try:
        return await asyncio.shield(attempt.creating)
    except ApiError as error:
        # A refusal made nothing. After anything else only the list of sessions can tell.
        attempt.doubtful = error.sent and (error.status is None or error.status >= 500)
        attempt.trouble = error
        raise


async def look(api: Api, attempt: Attempt, with_session: bool) -> None:
    """Read the root turn; while there is none, now and then the session: it may have failed."""
    try:
        turn = await api.newest(lambda t: t.get("subagent_id") is None, api.turns.list, attempt.session_id)
        if turn is None and with_session:
            session = await api.send(api.sessions.retrieve, attempt.session_id)
            if session.get("status") == "failed":
                attempt.failure = f"the session failed before any turn: {message_of(session)}"
    except ApiError as error:
        attempt.trouble = error
        raise
    attempt.trouble, attempt.turn = None, turn or attempt.turn
    if attempt.turn.get("started_at") or attempt.turn.get("status") in ("in_progress", "waiting"):
        attempt.started = True


async def stop_turn(api: Api, attempt: Attempt) -> bool:
    """After the timeout: cancel, and poll until the turn has ended. False if it had by itself."""
    pause, sent, last = FIRST_POLL, False, time.monotonic() + CANCEL_SECONDS
    give_up = time.monotonic() + SETTLE_SECONDS
    while attempt.session_id and time.monotonic() < give_up:
        try:
            await look(api, attempt, with_session=True)  # it may have ended since the last poll
            if attempt.ended:
                return sent
            # Sent again each time: one that came while a turn was being prepared may have no effect.
            await api.cancel(attempt.session_id)
            give_up, sent = (give_up if sent else time.monotonic() + SETTLE_SECONDS), True
        except ApiError as error:
            if error.status == 409:
                give_up = give_up if sent else last
            elif not error.transient:
                break
        await asyncio.sleep(pause)
        pause = min(pause * POLL_GROWTH, LAST_POLL)
    return True


def judge(result: Result, attempt: Attempt, timeout: float | None) -> None:
    """Set status and reward by how the turn ended. `timeout`: after these seconds it was cancelled."""
    status, kind = attempt.turn.get("status"), failure_class(attempt.turn)
    if status == "failed":
        result.note(f"turn failed: {message_of(attempt.turn)}")
    if timeout is not None:
        result.note(f"the timeout of {timeout:g} s passed and a cancel was sent")
    if status == "completed":
        result.status = "completed"
    elif attempt.failure is not None or (timeout is not None and attempt.trouble is not None):
        # A deployment that did not answer measured nothing, whatever the policy was doing.
        result.fail(attempt.failure or str(attempt.trouble))
    elif timeout is not None:
        # The time of a turn that ran was the policy's: 0.0, unless its failure says otherwise. Time that
        # preparation or the queue used was not: null.
        own = attempt.started and (not kind or kind in POLICY_CLASSES)
        result.status, result.reward = "timeout", 0.0 if own else None
        if not attempt.started:
            result.note("the turn had not started")
    elif status == "failed":
        result.status, result.reward = ("failed", 0.0) if kind in POLICY_CLASSES else ("error", None)
    else:
        result.fail("the turn was cancelled by someone else", "cancelled")


def failure_class(turn: Json) -> str:
    """The class of a turn's failure, or "". Without one a bare internal_error measured nothing."""
    if named := ((turn.get("x_agents_core") or {}).get("failure") or {}).get("class"):
        return str(named)
    return "model" if (turn.get("error") or {}).get("code") in POLICY_CODES else ""


def message_of(resource: Json) -> str:
    """The error of a turn (an object) or of a session (a text) as one text."""
    error = resource.get("error")
    return f"{error.get('code')}: {error.get('message')}" if isinstance(error, dict) else str(error)


async def grade_answer(api: Api, attempt: Attempt, result: Result) -> None:
    """Find, download and grade the answer that the completed turn left."""

    def wanted(artifact: Json) -> bool:
        return artifact.get("turn_id") == attempt.turn.get("id") and artifact.get("path") == ANSWER_PATH

    artifact = await patiently(api.newest, wanted, api.artifacts.list, attempt.session_id)
    if artifact is None:
        result.reward = 0.0
        return result.note("no answer")
    data = bytes(MAX_ANSWER_BYTES + 1)  # stands for an answer that is too large to be downloaded
    if (artifact.get("size_bytes") or 0) <= MAX_ANSWER_BYTES:
        data = await patiently(api.download, attempt.session_id, artifact["id"], MAX_ANSWER_BYTES)
    result.reward, result.answer, reason = grade(attempt.rollout.task.expected, data)
    if not isinstance(result.answer, dict):
        result.note(f"answer: {reason}")


async def read_record(api: Api, attempt: Attempt, result: Result) -> None:
    """Read the items and the usage; wait for a deployment that fills in usage late."""
    turn, session_id = attempt.turn, attempt.session_id
    # `usage_source` says that the figure, or its absence, is final; a shell script calls no model.
    final = "usage_source" in (turn.get("x_agents_core") or {}) or attempt.rollout.pair.harness == "shell"
    try:
        if session_id:
            result.items = await patiently(partial(api.list, api.items.list, session_id, order="asc"))
        for pause in () if final or turn.get("status") != "completed" else USAGE_PAUSES:
            if turn.get("usage"):
                break
            await asyncio.sleep(pause)
            turn = await patiently(partial(api.send, api.turns.retrieve, turn["id"], session_id=session_id))
        result.usage = turn.get("usage")
    except ApiError as error:
        # What is graded stays graded: no agent can undo a loss by items that cannot be read.
        result.note(f"items or usage could not be read: {error}")


async def release(api: Api, attempt: Attempt) -> str | None:
    """Delete the session, whatever state it is in. Returns what may be left behind, if anything."""
    try:
        if not attempt.session_id and attempt.creating is not None:
            with contextlib.suppress(ApiError):
                attempt.session_id = (await attempt.creating)["id"]
        if not attempt.session_id and attempt.doubtful:
            found = await patiently(api.find_session, attempt.rollout.id)
            attempt.session_id = found["id"] if found else ""
        if attempt.session_id:
            await patiently(delete_once, api, attempt)
    except ApiError as error:
        return f"session {attempt.session_id or '(unknown)'} could not be deleted: {error}"
    except asyncio.CancelledError:
        return f"session {attempt.session_id or '(unknown)'} may be left behind: interrupted twice"
    return None


async def delete_once(api: Api, attempt: Attempt) -> None:
    """Try once to delete the session; what may still run in it is cancelled first."""
    if not attempt.ended:
        with contextlib.suppress(ApiError):
            await api.cancel(attempt.session_id)
    try:
        await api.send(api.sessions.delete, attempt.session_id)
    except ApiError as error:
        error.transient = error.transient or error.status == 409  # a conflict ends by itself
        if error.status != 404:
            raise


# --- The sweep ------------------------------------------------------------------------------------------


class Sweep:
    """Runs rollouts, a fixed number at a time, and ends them in good order.

    halt() starts no more rollouts; interrupt() also cancels those in flight, each of which cleans up and is
    recorded; fail() is an interruption that nobody asked for.
    """

    def __init__(self, timeout: float, concurrency: int, journal: Journal | None = None) -> None:
        self.timeout, self.concurrency, self.journal = timeout, concurrency, journal
        self.endpoint: tuple[str, str] | None = None
        self.results: list[Result] = []
        self.failure: str | None = None
        self.halted, self.signals = False, 0
        self.tasks: list[asyncio.Future[Any]] = []
        self.cleanups: set[asyncio.Future[Any]] = set()

    async def run(self, plan: list[Rollout], api: Api) -> None:
        waiting = iter(plan)

        async def worker() -> None:
            for rollout in waiting:
                if self.halted:
                    return
                self.finish(await run_rollout(rollout, api, self), len(plan))

        workers = [self.interruptible(worker()) for _ in range(min(self.concurrency, len(plan)))]
        for outcome in await asyncio.gather(*workers, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome

    def finish(self, result: Result, planned: int) -> None:
        """Write and report a rollout, and keep what the table needs: memory must not grow with items."""
        try:
            if self.journal is not None:
                self.journal.append(to_line(result))
        except OSError as error:
            self.fail(f"cannot write {self.journal and self.journal.path}: {error.strerror}")
        result.items, result.answer, result.usage = [], None, None
        self.results.append(result)
        name = f"{result.task} · {result.harness} · {result.model} · #{result.sample}: {result.status}"
        reward = "null" if result.reward is None else f"{result.reward:.1f}"
        tail = f" · {result.error}" if result.error else ""
        say(plain(f"[{len(self.results)}/{planned}] {name}, reward {reward}, {result.duration_s:.1f} s{tail}"))

    def interruptible(self, work: Any) -> asyncio.Future[Any]:
        """Start work that an interruption cancels."""
        self.tasks.append(asyncio.ensure_future(work))
        return self.tasks[-1]

    async def clean_up(self, work: Any) -> Any:
        """Finish work in spite of interruptions; only a second signal ends it."""
        task = asyncio.ensure_future(work)
        self.cleanups.add(task)
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({task})
        self.cleanups.discard(task)
        return None if task.cancelled() else task.result()

    def halt(self, reason: str) -> None:
        if not self.halted:
            say(plain(f"rl_eval: stopping: {reason}"))
        self.halted = True

    def interrupt(self, reason: str) -> None:
        self.halt(reason)
        for task in self.tasks:
            task.cancel()

    def fail(self, reason: str) -> None:
        self.failure = self.failure or reason
        self.interrupt(reason)

    def signalled(self) -> None:
        """The first signal cancels what runs; the second leaves cleaning up one more second."""
        self.signals += 1
        if self.signals == 1:
            self.interrupt("interrupted; cancelling what runs (a second time: without waiting)")
        elif self.signals == 2:
            loop = asyncio.get_running_loop()
            loop.call_later(HURRY_SECONDS, lambda: [task.cancel() for task in self.cleanups])

    def exit_code(self) -> int:
        """130 interrupted; 3 something was not measured; 0 else, whatever the rewards."""
        ends = [(result.status, result.reward) for result in self.results]
        unmeasured = ("error", None) in ends or ("timeout", None) in ends
        return 130 if self.signals else 3 if self.failure or unmeasured else 0


# --- The deployment: the embedded one, or the one that OPENAI_BASE_URL names ----------------------------


class Embedded:
    """Core and, for the scripted policies, the gateway: processes that live as long as this one.

    Each has a pipe as its stdin. When it closes, which the kernel does even after a kill -9, they stop and
    kill all they run. In a session of their own, they get no Ctrl-C of the terminal.
    """

    def __init__(self, on_exit: Callable[[str], None]) -> None:
        self.on_exit, self.stopping = on_exit, False
        self.processes: list[asyncio.subprocess.Process] = []
        self.watchers: list[asyncio.Future[None]] = []

    async def start(self, name: str, first_line: str = "") -> list[str]:
        """Start a service; return the base URL and the key that it prints once it listens."""
        command, pipe = (sys.executable, "-m", name, "serve", "--exit-with-stdin"), asyncio.subprocess.PIPE
        environment = {k: v for k, v in os.environ.items() if k not in ("MODEL_API_KEY", "OPENAI_API_KEY")}
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, start_new_session=True, cwd=HERE, env=environment
        )
        self.processes.append(process)
        assert process.stdin and process.stdout
        with contextlib.suppress(ConnectionError):
            process.stdin.write(first_line.encode())
            await process.stdin.drain()
        lines = [await process.stdout.readline(), await process.stdout.readline()]
        if not all(lines):
            code = await process.wait()
            raise Refused(f"the embedded {name} did not start", code if code > 0 else 3)
        self.watchers.append(asyncio.ensure_future(self.watch(name, process)))
        return [line.decode().partition("=")[2].strip().strip("'") for line in lines]

    async def watch(self, name: str, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        if not self.stopping:
            self.on_exit(f"the embedded {name} ended with code {code}")

    async def stop(self) -> None:
        """Close the pipes, and kill what has not ended in time."""
        self.stopping = True
        for process in self.processes:
            assert process.stdin
            process.stdin.close()
        for process in self.processes:
            try:
                await asyncio.wait_for(process.wait(), SETTLE_SECONDS)
            except (asyncio.TimeoutError, asyncio.CancelledError):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def load_client() -> Any:
    """Import the client with the part that is used: one to two seconds, once."""
    import openai
    import openai.resources.beta.agents.sessions

    return openai


async def connect(plan: list[Rollout], sweep: Sweep, embedded: Embedded | None) -> Api:
    """Make the client; meanwhile start the embedded deployment, if there is to be one."""
    loading = asyncio.get_running_loop().run_in_executor(None, load_client)
    if embedded is None:
        openai = await loading
        # The client on aiohttp takes half the CPU per request of the one on httpx, with 64 connections.
        return Api(openai.AsyncOpenAI(max_retries=0, http_client=openai.DefaultAioHttpClient()))
    starting = [embedded.start("core")]
    if scripted := [rollout for rollout in plan if rollout.pair.protocol and sweep.endpoint is None]:
        scripts = {rollout.task.id: rollout.task.solution or "true\n" for rollout in scripted}
        names = {rollout.id: rollout.task.id for rollout in scripted}
        starting.append(embedded.start("gateway", json.dumps({"scripts": scripts, "rollouts": names}) + "\n"))
    # Not wait_for around gather: cancelled, that pair reports a CancelledError that nobody retrieved.
    (base_url, key), *gateway = await asyncio.gather(*(asyncio.wait_for(s, START_SECONDS) for s in starting))
    for endpoint in gateway:
        sweep.endpoint = endpoint[0], endpoint[1]
        keep_secret(endpoint[1])
    keep_secret(key)
    say(f"rl_eval: started the embedded Core at {base_url}")
    openai = await loading
    # A proxy that the environment names must not come between this process and its own.
    http = openai.DefaultAioHttpClient(trust_env=False)
    return Api(openai.AsyncOpenAI(max_retries=0, base_url=base_url, api_key=key, http_client=http))


async def run(plan: list[Rollout], sweep: Sweep, embed: bool) -> None:
    """Connect, run the plan, and stop what was started, whatever happens."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, sweep.signalled)
    embedded, api = (Embedded(sweep.fail) if embed else None), None
    try:
        api = await sweep.interruptible(connect(plan, sweep, embedded))
        await sweep.run(plan, api)
    except asyncio.CancelledError:
        pass  # interrupted before the first rollout
    except asyncio.TimeoutError:
        raise Refused(f"the embedded deployment did not start in {START_SECONDS:g} s", 3) from None
    finally:
        if api is not None:
            await sweep.clean_up(api.client.close())
        if embedded is not None:
            await sweep.clean_up(embedded.stop())


# --- --check --------------------------------------------------------------------------------------------


def make_check(run_id: str, tasks: list[Task]) -> list[Rollout]:
    """Two rollouts per task by the `shell` harness: its solution (sample 0) and nothing (sample 1)."""
    inputs = [(task, n, text) for task in tasks for n, text in enumerate((task.solution, "true"))]
    return [make_rollout(run_id, task, Pair("shell", None), n, text) for task, n, text in inputs if text]


def report_check(tasks: list[Task], results: Iterable[Result]) -> tuple[list[str], int]:
    """A line per task, one for all, and the exit code: 1 a task is unsound, 3 not measured, 0."""
    found = {(result.task, result.sample): result for result in results}
    lines, codes = [], []
    for task in tasks:
        problems, code = ([], 0) if task.solution else (["no solution.sh"], 1)
        for sample, wanted, what in ((0, 1.0, "the solution"), (1, 0.0, "doing nothing")):
            result = found.get((task.id, sample))
            if result is not None and result.reward not in (None, wanted):
                problems.append(f"{what} earned {result.reward}, not {wanted}: {result.error or 'wrong values'}")
                code = 1
            elif (result is None or result.reward is None) and (sample or task.solution):
                problems.append(f"{what} was not measured: {result.error if result else 'not run'}")
                code = code or 3
        lines.append(plain(f"{task.id}: {'; '.join(problems) or 'ok'}"))
        codes.append(code)
    lines.append(f"{codes.count(0)} of {len(tasks)} tasks are sound")
    return lines, 1 if 1 in codes else max(codes)


# --- Command line ---------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line. It names the options and repeats no unknown argument: that may be a key."""
        options = ", ".join(name for name in self._option_string_actions if name.startswith("--"))
        unknown = message.startswith("unrecognized arguments")
        raise Refused(f"unknown option or argument; the options are {options}" if unknown else message)


def positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    def convert(text: str) -> float:
        with contextlib.suppress(ValueError):
            if 0 < kind(text) < 1e8:
                return kind(text)
        raise argparse.ArgumentTypeError(f"must be a positive {'whole ' * (kind is int)}number")

    return convert


def make_parser() -> Parser:
    about = "Run agent CLIs on tasks in sandboxes without network, grade their answers, report pass@k."
    more = (
        "OPENAI_BASE_URL and OPENAI_API_KEY select a deployment of the Agents API; without them an embedded one is "
        "started. MODEL_API_KEY is the key for --model-base-url. Exit codes: 0 done, whatever the rewards; 1 --check "
        "failed; 2 usage; 3 something was not measured; 130 interrupted."
    )
    parser = Parser(prog="rl_eval.py", description=about, epilog=more, allow_abbrev=False)
    add: Any = parser.add_argument
    names = {"action": "append", "default": [], "metavar": "NAME"}
    add("--harness", **names, help="codex, claude_sdk, pi, opencode or shell; repeatable")
    add("--model", **names, help="repeatable; the embedded policies are oracle and nop")
    add("--samples", type=positive(int), default=1, metavar="K", help="rollouts per task, harness and model")
    add("--concurrency", type=positive(int), default=4, metavar="N", help="rollouts in flight (default 4)")
    add("--tasks", type=Path, default=Path("tasks"), metavar="DIR", help="task folder (default tasks/)")
    add("--task", **names, help="only the task of this id; repeatable")
    add("--timeout", type=positive(float), default=900.0, metavar="SECONDS", help="of a rollout (default 900)")
    add("--out", type=Path, metavar="PATH", help="JSONL file (default runs/<UTC timestamp>.jsonl)")
    add("--model-base-url", metavar="URL", help="your model endpoint; {rollout_id} is filled in per rollout")
    add("--model-protocol", choices=PROTOCOLS, help="its protocol (default: what the harness speaks)")
    add("--check", action="store_true", help="solutions must earn 1.0, doing nothing 0.0")
    return parser


def check_options(o: argparse.Namespace, embedded: bool) -> None:
    """Refuse what this machine, environment or combination of options cannot do."""
    url, key, model_key = o.model_base_url, os.environ.get("OPENAI_API_KEY"), os.environ.get("MODEL_API_KEY")
    packages = ("openai", "aiohttp", "tenacity", "tabulate")
    missing = ", ".join(name for name in packages if not importlib.util.find_spec(name))
    problems = [
        (missing, f"missing packages ({missing}): pip install -r requirements.txt"),
        (o.check and not embedded, "--check needs the embedded Core: unset OPENAI_BASE_URL"),
        (embedded and sys.platform != "linux", "the embedded Core is for Linux; name a deployment in OPENAI_BASE_URL"),
        (not embedded and not key, "OPENAI_API_KEY must hold the key of the deployment at OPENAI_BASE_URL"),
        (o.check and (o.harness or o.model or url or o.out), "--check runs the tasks alone: see --help"),
        ("" in o.harness + o.model, "--harness and --model need names"),
        ("shell" in o.harness and o.model, "--harness shell takes no --model: it runs the instruction as a script"),
        (o.model_protocol and url is None, "--model-protocol needs --model-base-url"),
        (url is not None and not is_base_url(url), "--model-base-url must be an http or https URL without user, query "
         "or fragment; it may hold {rollout_id}, and its key goes into MODEL_API_KEY"),
        (url is not None and not o.model, "--model-base-url needs --model: the name that the endpoint knows"),
        (url is not None and not model_key, "--model-base-url needs the endpoint's key in MODEL_API_KEY"),
    ]  # fmt: skip
    for applies, message in problems:
        if applies:
            raise Refused(message)


def is_base_url(url: str) -> bool:
    """Whether a session takes this URL for its model endpoint."""
    with contextlib.suppress(ValueError):
        parts, odd = urlsplit(url), set(url.replace("{rollout_id}", "")) & set(" {}\\@?#")
        return bool(parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and not odd)
    return False


def choose_pairs(options: argparse.Namespace, embedded: bool) -> list[Pair]:
    """The pairs of harness and model that run. Raises Refused for one that cannot."""
    own_endpoint = options.model_base_url is not None
    harnesses = list(dict.fromkeys(options.harness)) or ["codex" if embedded else None]
    models = list(dict.fromkeys(options.model)) or ["oracle" if embedded else None]
    for name in harnesses if embedded else ():
        if name not in PROTOCOLS_OF:
            raise Refused(f"no harness {name!r}; there are: {', '.join(PROTOCOLS_OF)}")
    for name in () if own_endpoint else models:
        if name in SCRIPTED and not embedded:
            raise Refused(f"the scripted policy {name} needs the embedded Core: unset OPENAI_BASE_URL")
        if name not in SCRIPTED and embedded:
            needs = "--model-base-url, or a deployment in OPENAI_BASE_URL"
            raise Refused(f"model {name!r} needs {needs}; without, there are: {', '.join(SCRIPTED)}")
    pairs = []
    for harness in harnesses:
        known, named = PROTOCOLS_OF.get(harness or "", ()), options.model_protocol
        if known and named and named not in known:
            raise Refused(f"harness {harness} speaks {' or '.join(known)}, not {named}")
        if own_endpoint and not known and not named and harness != "shell":
            raise Refused(f"harness {harness or 'default'}: --model-protocol must name what it speaks")
        protocol = (named or next(iter(known), None)) if own_endpoint or embedded else None
        pairs += [Pair("shell", None)] if harness == "shell" else [Pair(harness, model, protocol) for model in models]
    return pairs


def open_journal(path: Path | None, run_id: str) -> Journal:
    """Create the output file. Raises Refused."""
    default, second = Path("runs", run_id.split("-")[0] + ".jsonl"), Path("runs", run_id + ".jsonl")
    try:
        if path is None:
            default.parent.mkdir(exist_ok=True)
            path = second if default.exists() else default  # another run began in the same second
        return Journal(path)
    except OSError as error:
        raise Refused(f"cannot create {path or default}: {error.strerror}") from None


def start(arguments: list[str] | None) -> int:
    """Check all input, run, report. Returns the exit code; raises Refused."""
    options = make_parser().parse_args(arguments)
    embedded = not os.environ.get("OPENAI_BASE_URL")
    for name in ("MODEL_API_KEY", "OPENAI_API_KEY"):
        keep_secret(os.environ.get(name, ""))
    check_options(options, embedded)
    pairs = [] if options.check else choose_pairs(options, embedded)
    tasks = load_tasks(options.tasks, options.task)
    run_id = time.strftime("%Y%m%dT%H%M%SZ-", time.gmtime()) + os.urandom(2).hex()
    sweep = Sweep(options.timeout, options.concurrency)
    if options.check:
        asyncio.run(run(make_check(run_id, tasks), sweep, embedded))
        lines, code = report_check(tasks, sweep.results)
        say("\n".join(lines), sys.stdout)
        return 130 if sweep.signals else code
    if options.model_base_url is not None:
        sweep.endpoint = options.model_base_url, os.environ["MODEL_API_KEY"]
    elif unsolved := [t.id for t in tasks if t.solution is None and any(pair.model == "oracle" for pair in pairs)]:
        raise Refused(f"task {unsolved[0]!r} has no solution.sh for the scripted policy oracle to run")
    plan, sweep.journal = make_plan(run_id, tasks, pairs, options.samples), open_journal(options.out, run_id)
    say(plain(f"rl_eval: run {run_id}, {len(plan)} rollouts, to {sweep.journal.path}"))
    try:
        asyncio.run(run(plan, sweep, embedded))
    finally:
        sweep.journal.close()
    say(markdown(summarise(sweep.results, (1, options.samples))), sys.stdout)
    return sweep.exit_code()


def main(arguments: list[str] | None = None) -> int:
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        return start(arguments)
    except Refused as refused:
        say(f"rl_eval: {plain(str(refused))}")
        return refused.code
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
