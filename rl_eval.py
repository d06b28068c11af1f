#!/usr/bin/env python3
"""Run agent CLIs on a folder of tasks, grade their answers outside the sandbox, report pass@k.

One rollout is one session of one (task, harness, model, sample) on an Agents API. The agent works in
a sandbox without network and leaves /workspace/outputs/answer.json; this script compares it with the
task's expected.json, which never leaves this process. Each finished rollout is one line of strict
JSON in the output file; the run ends with a Markdown table.

    python3 rl_eval.py                                      five tasks, codex, the scripted policy oracle
    python3 rl_eval.py --harness codex --harness claude_sdk --samples 2
    python3 rl_eval.py --check                              are the tasks themselves sound?
    MODEL_API_KEY=... python3 rl_eval.py --model my-policy \\
        --model-base-url 'http://127.0.0.1:9000/rollouts/{rollout_id}/v1'
    OPENAI_BASE_URL=... OPENAI_API_KEY=... python3 rl_eval.py --model some-model

Invariants: nothing is created before all input is checked; a session is deleted whatever happened
before; reward is null when nothing was measured and 0.0 when the policy did not earn it; no output
holds a key. Left out: how a session is run (the deployment's part), grading by programs, and running
again what ended in an error.
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
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar
from urllib.parse import quote, urlsplit


def lazily(name: str) -> ModuleType:
    """Return a module that loads at its first use: --help must not pay 90 ms for asyncio."""
    spec = importlib.util.find_spec(name)
    if name in sys.modules or spec is None or spec.loader is None:
        return importlib.import_module(name)
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if TYPE_CHECKING:
    import asyncio
    import hashlib
    import random
else:
    asyncio, hashlib, random = map(lazily, ("asyncio", "hashlib", "random"))

Json = dict[str, Any]
T = TypeVar("T")

# --- Constants --------------------------------------------------------------------------------

HERE = Path(__file__).resolve().parent
WORKSPACE, ANSWER_PATH = "/workspace/", "/workspace/outputs/answer.json"

# What each harness speaks to its model. `shell` has none: it runs its input as a bash script.
PROTOCOL_OF = {"codex": "responses", "claude_sdk": "anthropic", "shell": None}
PROTOCOLS = ("anthropic", "responses", "chat_completions")
SCRIPTED = ("oracle", "nop")

# What a session accepts.
MAX_FILES, MAX_FILE_BYTES, MAX_FILES_BYTES = 50, 5 << 20, 10 << 20
MAX_INPUT_BYTES, MAX_PATH_BYTES, MAX_ID_CHARS = 512 << 10, 4096, 128

MAX_ANSWER_BYTES, MAX_DEPTH = 1 << 20, 100
MAX_DIGITS = 4000  # Python refuses to print an integer of more than 4,300
MAX_TEXT_CHARS = 256 << 10  # of one text in a recorded item
# Tolerance of numbers: one part in RELATIVE of the expected one, or one part in ABSOLUTE of 1. Kept
# as whole numbers, so that comparing is exact for integers of any size.
RELATIVE, ABSOLUTE = 10**6, 10**9

# Failures that are the policy's own. A failed turn that names none of them measured nothing.
POLICY_CLASSES = ("model", "budget")
POLICY_CODES = ["context_length_exceeded", "max_output_tokens", "session_budget_exceeded"]
POLICY_CODES += ["cyber_policy", "misalignment_policy_violation"]
ENDED = ("completed", "failed", "cancelled")

# Seconds.
FIRST_POLL, POLL_GROWTH, LAST_POLL = 0.2, 1.5, 4.0
REQUEST_SECONDS = 30.0
TROUBLE_SECONDS = 60.0  # how long a deployment may misbehave before a request is given up
CANCEL_SECONDS = 330.0  # a public deployment refuses a cancel for up to 5 minutes of preparation
SETTLE_SECONDS = 30.0  # from an accepted cancel to a turn that has ended
DELETE_SECONDS = 60.0
HURRY_SECONDS = 1.0  # what cleaning up may still take after a second Ctrl-C
START_SECONDS = 60.0
USAGE_PAUSES = (0.5, 1.0, 2.0, 4.0)  # some deployments fill usage in seconds after the turn


# --- Words ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A question, the files it is asked about, and the answer that earns 1.0."""

    id: str
    instruction: str
    expected: Json
    files: tuple[tuple[str, Path], ...]  # path below /workspace; where its content is read, late
    solution: str | None  # bash text of the reference solution


@dataclass(frozen=True)
class Pair:
    """A harness with a model; None leaves the choice to the deployment."""

    harness: str | None
    model: str | None
    protocol: str | None = None  # of the model endpoint that sessions are given; None: given none


@dataclass(frozen=True)
class Rollout:
    """One planned attempt at a task by a harness and a model."""

    id: str
    group_id: str
    run_id: str
    task: Task
    pair: Pair
    sample: int
    input: str


@dataclass
class Result:
    """What became of a rollout: one line of the output, its members in this order."""

    rollout_id: str
    task: str
    harness: str
    model: str
    sample: int
    session_id: str | None = None
    status: str = "error"  # completed, failed, cancelled, timeout, error
    reward: float | None = None  # 1.0, 0.0, None when nothing was measured
    answer: Any = None
    duration_s: float = 0.0  # from the create request until everything but the deletion was done
    usage: Json | None = None
    items: list[Any] = field(default_factory=list)
    error: str | None = None
    turn_id: str | None = None
    group_id: str = ""
    started_at: str = ""  # UTC, ISO 8601

    def note(self, message: str) -> None:
        self.error = f"{self.error}; {message}" if self.error else message

    def fail(self, message: str, status: str = "error") -> None:
        self.status, self.reward = status, None
        self.note(message)

    def line(self) -> bytes:
        """The record as a line of strict ASCII JSON: no NaN, no raw surrogate, no secret."""
        record = {f.name: getattr(self, f.name) for f in fields(self)}
        record = {k: strict(v, []) for k, v in record.items() if k != "items"} | {"items": []}
        record["items"] = [strict_item(item) for item in self.items]
        ordered = {f.name: record[f.name] for f in fields(self)}
        return json.dumps(ordered, allow_nan=False).encode("ascii") + b"\n"


class UsageError(Exception):
    """Input that cannot be run: one line, exit 2, and nothing was created."""


class ServiceError(Exception):
    """A service of the embedded deployment did not start; the second argument is its exit code."""


class NetworkError(Exception):
    """The deployment did not confirm that the sandbox has no network."""


# --- Tasks ------------------------------------------------------------------------------------


def load_tasks(folder: Path, wanted: Iterable[str] = ()) -> list[Task]:
    """Load the tasks in `folder`, or the `wanted` ones, in order of their ids. Raises UsageError."""
    try:
        names = sorted(p.name for p in folder.iterdir() if p.is_dir() and p.name[0] not in "._")
    except OSError as error:
        raise UsageError(f"cannot read the task folder {folder}: {error.strerror}") from None
    if unknown := sorted(set(wanted) - set(names)):
        raise UsageError(f"no task {unknown[0]!r} in {folder}; there are: {', '.join(names) or 'none'}")
    check_ids(names)
    if not names:
        raise UsageError(f"no tasks in {folder}")
    return [load_task(folder / name) for name in names if not wanted or name in set(wanted)]


def check_ids(names: Iterable[str]) -> None:
    """Refuse ids that a file system, a terminal or a reader could mistake. Raises UsageError."""
    seen: dict[str, str] = {}
    for name in names:
        if len(name) > MAX_ID_CHARS or not name.isprintable() or name != name.strip() or "\\" in name:
            raise UsageError(f"task id {name[:40]!r}: at most {MAX_ID_CHARS} printable characters")
        other = seen.setdefault(unicodedata.normalize("NFC", name).casefold(), name)
        if other != name:
            raise UsageError(f"duplicate task ids: {other!r} and {name!r}")


def load_task(path: Path) -> Task:
    """Load one task folder. Raises UsageError that names the task and what is wrong."""
    try:
        instruction = read_text(path / "instruction.md")
        expected = parse_answer((path / "expected.json").read_bytes())
        if not instruction.strip() or not isinstance(expected, dict) or not expected:
            what = "expected.json must be an object with a key" if instruction.strip() else "no instruction"
            raise ValueError(what)
        solution = read_text(path / "solution.sh") if (path / "solution.sh").exists() else None
        return Task(path.name, instruction, expected, tuple(find_files(path / "files")), solution)
    except OSError as error:
        raise UsageError(f"task {path.name!r}: {Path(error.filename).name}: {error.strerror}") from None
    except UnicodeError:
        raise UsageError(f"task {path.name!r}: its texts must be UTF-8") from None
    except ValueError as error:
        where = "expected.json: " if isinstance(error, BadAnswer) else ""
        raise UsageError(f"task {path.name!r}: {where}{error}") from None


def read_text(path: Path) -> str:
    """Read a text that can be the input of a turn. Raises ValueError."""
    text = path.read_text(encoding="utf-8-sig")
    if len(text.encode()) > MAX_INPUT_BYTES or "\0" in text:
        raise ValueError(f"{path.name} must be at most {MAX_INPUT_BYTES >> 10} KiB, without NUL")
    return text


def find_files(root: Path) -> list[tuple[str, Path]]:
    """List what is below `root` by relative path, if it exists. Raises ValueError at a limit."""
    if not os.path.lexists(root):
        return []
    found, total = [], 0
    for path in walk(root, root.resolve(strict=True)):
        name, size = path.relative_to(root).as_posix(), path.stat().st_size
        check_path(name)
        found.append((name, path))
        total += size
        if len(found) > MAX_FILES or size > MAX_FILE_BYTES or total > MAX_FILES_BYTES:
            each, in_all = MAX_FILE_BYTES >> 20, MAX_FILES_BYTES >> 20
            limits = f"{MAX_FILES} files, {each} MiB each, {in_all} MiB in total"
            raise ValueError(f"files/{name} goes beyond the limits: {limits}")
    return found


def walk(folder: Path, root: Path, above: tuple[Path, ...] = ()) -> Iterator[Path]:
    """Yield every regular file; links are followed while they stay below `root`. Raises ValueError."""
    real = folder.resolve(strict=True)
    if real in above:
        raise ValueError(f"files/: the symlink {folder.name!r} leads to a folder that holds it")
    for path in sorted(folder.iterdir()):
        # resolve() of a link that leads nowhere gives where it would lead; of a loop, an error.
        if path.is_symlink() and not (path.exists() and path.resolve().is_relative_to(root)):
            raise ValueError(f"files/: the symlink {path.name!r} leaves the folder or leads nowhere")
        if path.is_dir():
            yield from walk(path, root, (*above, real))
        elif path.is_file():
            yield path
        else:
            raise ValueError(f"files/: {path.name!r} is neither a file nor a folder")


def check_path(name: str) -> None:
    """Refuse a path that no session accepts. Raises ValueError."""
    if not name.isprintable() or "\\" in name or len((WORKSPACE + name).encode()) > MAX_PATH_BYTES:
        raise ValueError(f"files/: {name[:200]!r} is no path for a workspace")
    if name.split("/")[0] == ".codex" or name.startswith(".managed-agents") or name == "outputs":
        raise ValueError(f"files/{name}: this path is reserved in the workspace")


# --- Plan -------------------------------------------------------------------------------------


def new_run_id() -> str:
    """A name for a run that sorts by time, like 20260102T030405Z-1a2b."""
    return time.strftime("%Y%m%dT%H%M%SZ-", time.gmtime()) + os.urandom(2).hex()


def labels(pair: Pair) -> tuple[str, str]:
    """Harness and model as the output names them."""
    return pair.harness or "default", "none" if pair.harness == "shell" else pair.model or "default"


def make_rollout(run_id: str, task: Task, pair: Pair, sample: int, text: str) -> Rollout:
    """A rollout whose ids follow from the run's and its place in the plan, also in a later process."""

    def derive(*parts: str) -> str:
        return f"{run_id}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:12]}"

    group = task.id, *labels(pair)
    return Rollout(derive(*group, str(sample)), derive(*group), run_id, task, pair, sample, text)


def make_plan(run_id: str, tasks: list[Task], pairs: list[Pair], samples: int) -> list[Rollout]:
    """Every task by every pair, `samples` times; the samples of a group stand together."""
    places = ((task, pair, sample) for task in tasks for pair in pairs for sample in range(samples))
    return [make_rollout(run_id, task, pair, n, task.instruction) for task, pair, n in places]


def session_body(rollout: Rollout, endpoint: tuple[str, str] | None, files: list[Json]) -> Json:
    """The create request's arguments. `endpoint`: a base URL, perhaps with {rollout_id}, and its key."""
    pair = rollout.pair
    agent: Json = {}
    if pair.model is not None:
        agent["model"] = pair.model
    if pair.harness is not None:
        agent["x_agents_core"] = {"harness": pair.harness}
    names = {"run_id": rollout.run_id, "rollout_id": rollout.id, "group_id": rollout.group_id}
    body: Json = {
        "agent": agent,
        "input": rollout.input,
        "environment": {"type": "openai_hosted", "files": files, "network": {"access": "disabled"}},
        "metadata": {**names, "sample": str(rollout.sample)},
        # The suffix numbers the attempts at this rollout: another attempt is another session.
        "extra_headers": {"Idempotency-Key": f"{rollout.id}-1"},
    }
    if endpoint and pair.protocol:
        base_url = endpoint[0].replace("{rollout_id}", rollout.id)
        bundle = {"protocol": pair.protocol, "base_url": base_url, "api_key": endpoint[1]}
        body["extra_body"] = {"x_agents_core": {"model_provider": bundle}}
    return body


# --- Grading ----------------------------------------------------------------------------------


class BadAnswer(ValueError):
    """Bytes that cannot be compared; the text says why."""


def grade(expected: Json, data: bytes) -> tuple[float, Any, str]:
    """Compare an answer's bytes. Returns reward, parsed answer or None, and why it is not 1.0."""
    try:
        answer = parse_answer(data)
    except BadAnswer as error:
        return 0.0, None, str(error)
    if not isinstance(answer, dict):
        return 0.0, answer, "not a JSON object"
    for key, value in expected.items():
        if key not in answer or not matches(value, answer[key]):
            return 0.0, answer, f"{'wrong' if key in answer else 'no'} value for {key!r}"
    return 1.0, answer, ""


def matches(expected: object, actual: object) -> bool:
    """Whether a value is as expected. Recursion goes no deeper than the expected value does."""
    if expected is None or isinstance(expected, bool) or actual is None or isinstance(actual, bool):
        return actual is expected
    if isinstance(expected, (int, float)):
        return isinstance(actual, (int, float)) and close(expected, actual)
    if isinstance(expected, str):
        return isinstance(actual, str) and expected.strip() == actual.strip()
    if isinstance(expected, list):
        if not isinstance(actual, list) or len(actual) != len(expected):
            return False
        return all(matches(e, a) for e, a in zip(expected, actual, strict=True))
    assert isinstance(expected, dict)
    return isinstance(actual, dict) and all(
        k in actual and matches(v, actual[k]) for k, v in expected.items()
    )


def close(expected: float, actual: float) -> bool:
    """Equal, within the relative tolerance, or within the absolute floor."""
    if expected == actual:
        return True
    (a, b), (c, d) = expected.as_integer_ratio(), actual.as_integer_ratio()
    gap = abs(a * d - c * b)  # the difference, times b * d
    return gap * RELATIVE <= abs(a) * d or gap * ABSOLUTE <= b * d


def parse_answer(data: bytes) -> Any:
    """Parse JSON as strictly as a grader must. Raises BadAnswer.

    Refused: over 1 MiB, not UTF-8 (one leading byte-order mark is ignored), a duplicate key, a number
    that is not finite or has over 4,000 digits, nesting over 100 levels.
    """
    if len(data) > MAX_ANSWER_BYTES:
        raise BadAnswer(f"larger than {MAX_ANSWER_BYTES} bytes")
    try:
        text = data.decode("utf-8").removeprefix("\ufeff")
        hooks: Json = {"parse_float": finite, "parse_constant": finite, "parse_int": short}
        value = json.loads(text, object_pairs_hook=unique, **hooks)
    except UnicodeDecodeError:
        raise BadAnswer("not UTF-8") from None
    except json.JSONDecodeError as error:
        raise BadAnswer(f"not valid JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise BadAnswer("nested too deep") from None
    if deeper_than(value, MAX_DEPTH):
        raise BadAnswer("nested too deep")
    return value


def unique(pairs: list[tuple[str, Any]]) -> Json:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise BadAnswer("not valid JSON: a duplicate key")
    return value


def finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise BadAnswer(f"not valid JSON: {text[:20]} is not finite")
    return value


def short(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise BadAnswer(f"a number of more than {MAX_DIGITS} digits")
    return int(text)


def deeper_than(value: Any, limit: int) -> bool:
    """Whether containers nest beyond `limit`. By levels: recursion is what it guards against."""
    level = [value]
    for _ in range(limit + 1):
        level = [v for v in level if isinstance(v, (dict, list))]
        if not level:
            return False
        level = [child for v in level for child in (v.values() if isinstance(v, dict) else v)]
    return True


# --- What goes out: strict, redacted, harmless to a terminal ----------------------------------


class Redactor:
    """Replaces the run's secrets, also in base64 or URL-encoded, wherever text leaves the script."""

    def __init__(self) -> None:
        self.forms: list[str] = []

    def add(self, secret: str) -> None:
        if len(secret) >= 8:  # a shorter one is a dummy such as "none", and would eat plain words
            coded = base64.b64encode(secret.encode()).decode()
            forms = {secret, quote(secret, safe=""), coded.rstrip("="), coded[: len(secret) // 3 * 4]}
            self.forms = sorted({*self.forms, *forms}, key=len, reverse=True)

    def __call__(self, text: str) -> str:
        for form in self.forms:
            if form in text:
                text = text.replace(form, "[redacted]")
        return text


redact = Redactor()


def strict(value: Any, marks: list[Json], limit: int | None = None, path: str = "", depth: int = 0) -> Any:
    """A copy that strict JSON can hold, without secrets. What else was altered goes to `marks`."""
    if isinstance(value, str):
        text = redact(value)
        if limit is None or len(text) <= limit:
            return text
        raw = text.encode("utf-8", "surrogatepass")
        marks.append({"path": path, "bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()})
        return f"{text[: limit // 2]}\n[{len(text) - limit} characters cut]\n{text[-(limit // 2) :]}"
    if isinstance(value, float) and not math.isfinite(value):
        marks.append({"path": path, "why": "not a JSON number"})
        return str(value)
    if not isinstance(value, (dict, list)):
        return value
    if depth > MAX_DEPTH:
        marks.append({"path": path, "why": "nested too deep"})
        return None
    if isinstance(value, list):
        return [strict(v, marks, limit, f"{path}[{i}]", depth + 1) for i, v in enumerate(value)]
    return {redact(k): strict(v, marks, limit, f"{path}.{k}", depth + 1) for k, v in value.items()}


def strict_item(item: Any) -> Any:
    """An item as the API returned it; if something had to be altered, `x_rl_eval` says what."""
    marks: list[Json] = []
    copy = strict(item, marks, MAX_TEXT_CHARS)
    if marks and isinstance(copy, dict):
        copy["x_rl_eval"] = {"altered": [{**mark, "path": mark["path"][:200]} for mark in marks[:20]]}
    return copy


def plain(text: str, limit: int = 500) -> str:
    """One line that a terminal cannot take for anything but text."""
    text = redact(text)
    text = text if len(text) <= limit else text[:limit] + "..."
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def say(text: str, stream: Any = None) -> None:
    """Print to stderr or `stream`. A reader that has gone away costs no rollout."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=stream or sys.stderr, flush=True)


class Journal:
    """The output file: whole lines, appended, never over an existing file. Raises OSError."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(exist_ok=True) if path.parent == Path("runs") else None
        # A device such as /dev/null is there already, and holds nothing.
        device = path.exists() and stat.S_ISCHR(path.stat().st_mode)
        flags = os.O_WRONLY | os.O_APPEND | (0 if device else os.O_CREAT | os.O_EXCL)
        self.path, self.size, self.fd = path, 0, os.open(path, flags, 0o644)

    def append(self, line: bytes) -> None:
        """Write a line, or leave the file as it was."""
        try:
            written = os.write(self.fd, line)
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


# --- Statistics -------------------------------------------------------------------------------


def pass_at_k(n: int, c: int, k: int) -> float | None:
    """Chance that k of n samples, of which c are right, hold a right one; None if k > n or k < 1.

    The unbiased estimator of Chen et al. 2021 (arXiv:2107.03374), equation 1.
    """
    return None if not 1 <= k <= n else 1.0 - math.comb(n - c, k) / math.comb(n, k)


def mean(values: Iterable[float | None]) -> float | None:
    """Mean of what is known, whatever its order; None if nothing is."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


@dataclass(frozen=True)
class Row:
    """The results of one harness and model; a mean is None when nothing was scored."""

    harness: str
    model: str
    rollouts: int
    scored: int
    mean_reward: float | None
    pass_at: dict[int, tuple[float | None, int]]  # by k: mean over the tasks with k scored; how many
    tasks: int
    errors: int
    timeouts: int
    mean_duration: float | None  # seconds, of scored rollouts


def summarise(results: Iterable[Result], ks: Iterable[int]) -> list[Row]:
    """One row per harness and model, sorted. In pass@k every task weighs the same."""
    by_pair: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        by_pair.setdefault((result.harness, result.model), []).append(result)
    return [summarise_pair(*pair, by_pair[pair], sorted(set(ks))) for pair in sorted(by_pair)]


def summarise_pair(harness: str, model: str, results: list[Result], ks: list[int]) -> Row:
    scored = [result for result in results if result.reward is not None]
    rewards = {task: [r.reward for r in scored if r.task == task] for task in {r.task for r in results}}
    pass_at = {}
    for k in ks:
        estimates = [pass_at_k(len(x), x.count(1.0), k) for x in rewards.values()]
        pass_at[k] = mean(estimates), len(estimates) - estimates.count(None)
    count = [result.status for result in results].count
    reward, duration = mean(r.reward for r in scored), mean(r.duration_s for r in scored)
    sizes = len(results), len(scored), reward, pass_at, len(rewards)
    return Row(harness, model, *sizes, count("error"), count("timeout"), duration)


def markdown(rows: list[Row]) -> str:
    """A Markdown table. A pass@k that not every task could enter says how many did."""
    from tabulate import tabulate

    def number(value: float | None, digits: int = 3) -> str:
        return "n/a" if value is None else f"{value:.{digits}f}"

    def share(value: float | None, tasks: int, of: int) -> str:
        return number(value) + ("" if value is None or tasks == of else f" ({tasks}/{of} tasks)")

    ks = list(rows[0].pass_at) if rows else [1]
    head = ["harness", "model", "rollouts", "scored", "mean reward", *(f"pass@{k}" for k in ks)]
    head += ["errors", "timeouts", "mean duration (s)"]
    body = []
    for row in rows:
        cells = [plain(name).replace("|", "\\|") for name in (row.harness, row.model)]
        cells += [str(row.rollouts), str(row.scored), number(row.mean_reward)]
        cells += [share(*row.pass_at[k], row.tasks) for k in ks]
        body.append([*cells, str(row.errors), str(row.timeouts), number(row.mean_duration, 1)])
    align = ["left", "left"] + ["right"] * (len(head) - 2) if body else None
    return tabulate(body, head, tablefmt="github", disable_numparse=True, colalign=align)


# --- The Agents API, as plain JSON ------------------------------------------------------------


class ApiError(Exception):
    """A request that was refused, or got no usable answer (`status` None)."""

    def __init__(self, message: str, status: int | None = None, wait: float = 0.0) -> None:
        super().__init__(message)
        self.status, self.wait = status, wait  # seconds that the server asked to wait

    @property
    def transient(self) -> bool:
        return self.status is None or self.status in (408, 429) or self.status >= 500


def api_error(error: Any) -> ApiError:
    """Classify an exception of the client or of its HTTP library: here, and nowhere else."""
    status, body = getattr(error, "status_code", None), getattr(error, "body", None)
    if status is None:
        return ApiError(f"no answer: {error if hasattr(error, 'body') else type(error).__name__}")
    body = body if isinstance(body, dict) else {}
    message = f"HTTP {status} {body.get('code') or ''}: {str(body.get('message') or error)[:1000]}"
    wait = error.response.headers.get("retry-after", "")
    return ApiError(message.replace(" :", ":"), status, min(float(wait), 120.0) if wait.isdecimal() else 0.0)


def read_json(data: bytes) -> Json:
    """Parse an answer, tolerating what a careless server may put into it. Raises ApiError."""

    def integer(digits: str) -> int | str:
        return int(digits) if len(digits) <= MAX_DIGITS else f"[integer of {len(digits)} digits]"

    try:
        value = json.loads(data.decode("utf-8", "replace") or "{}", parse_int=integer)
    except (ValueError, RecursionError):
        raise ApiError("no answer: not JSON") from None
    if not isinstance(value, dict):
        raise ApiError("no answer: not a JSON object")
    return value


class Api:
    """Requests of the stock client, each sent once. Raises ApiError.

    Raw answers are read, not the client's models: they are the record, unknown members and types
    included, and building models costs more than the rest of a request.
    """

    def __init__(self, client: Any) -> None:
        self.client = client
        sessions = client.beta.agents.sessions
        self.sessions, self.events = sessions.with_raw_response, sessions.events.with_raw_response
        self.turns, self.items = sessions.turns.with_raw_response, sessions.items.with_raw_response
        self.artifacts = sessions.artifacts.with_raw_response
        self.stream_content = sessions.artifacts.with_streaming_response.content

    async def send(self, method: Callable[..., Awaitable[Any]], *args: str, **members: Any) -> Json:
        try:
            return read_json((await method(*args, timeout=REQUEST_SECONDS, **members)).content)
        except Exception as error:
            raise error if isinstance(error, ApiError) else api_error(error) from None

    async def each(
        self, method: Callable[..., Awaitable[Any]], *args: str, order: str
    ) -> AsyncIterator[Json]:
        """Yield a list's elements. With a cursor of its own: a stock pager stops unseen at a null id."""
        after: Json = {}
        while True:
            page = await self.send(method, *args, limit=100, order=order, **after)
            elements = page.get("data") or []
            for element in elements:
                yield element
            cursor = (elements and elements[-1].get("id")) or page.get("last_id")
            if not page.get("has_more") or not elements:
                return
            if not cursor or cursor == after.get("after"):
                raise ApiError("no answer: a list has more, but no cursor")
            after = {"after": cursor}

    async def newest(
        self, where: Callable[[Json], bool], method: Callable[..., Awaitable[Any]], *args: str
    ) -> Json | None:
        """The newest element of a list that is as wanted, among the first 5,000."""
        seen = 0
        async for element in self.each(method, *args, order="desc"):
            seen += 1
            if where(element):
                return element
            if seen == 5000:
                break
        return None

    async def find_session(self, rollout_id: str) -> Json | None:
        """Unfiltered, because the filtered lists of a deployment may lag behind."""
        return await self.newest(
            lambda s: (s.get("metadata") or {}).get("rollout_id") == rollout_id, self.sessions.list
        )

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


async def patiently(
    request: Callable[..., Awaitable[T]],
    *args: Any,
    seconds: float = TROUBLE_SECONDS,
    conflict: bool = False,
    full: bool = False,
) -> T:
    """Repeat a request with growing, jittered pauses while its error is transient, for `seconds`.

    conflict: a 409 ends by itself, too. full: wait for a deployment without room without end.
    """
    from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, wait_random_exponential

    give_up, growing = time.monotonic() + seconds, wait_random_exponential(multiplier=0.2, max=8.0)

    def error_of(state: RetryCallState) -> Any:
        return state.outcome and state.outcome.exception()

    def late(state: RetryCallState) -> bool:
        waits = full and error_of(state).status in (429, 503)
        return not waits and time.monotonic() + state.upcoming_sleep > give_up

    retrying = AsyncRetrying(
        retry=retry_if_exception(
            lambda e: isinstance(e, ApiError) and (e.transient or (conflict and e.status == 409))
        ),
        wait=lambda state: max(0.1 + growing(state), error_of(state).wait),
        stop=late,
        reraise=True,
    )
    return await retrying(request, *args)


# --- One rollout ------------------------------------------------------------------------------


@dataclass
class Attempt:
    """What is known of a rollout's session while it runs."""

    rollout: Rollout
    session_id: str | None = None
    creating: asyncio.Future[Json] | None = None  # not interrupted: its session would be lost
    doubtful: bool = False  # a create request may have made a session that is not known
    turn: Json = field(default_factory=dict)  # the latest root turn
    started: bool = False  # it left the queue: from then on time is the policy's
    failure: str | None = None  # why the session failed without any turn
    trouble: ApiError | None = None  # why the latest request failed

    @property
    def ended(self) -> bool:
        return self.failure is not None or self.turn.get("status") in ENDED


async def run_rollout(rollout: Rollout, api: Api, sweep: Sweep) -> Result:
    """Run one rollout, from its create request to its deleted session: all its side effects.

    Raises nothing: an interruption is a result, too.
    """
    result = Result(rollout.id, rollout.task.id, *labels(rollout.pair), rollout.sample)
    result.group_id, attempt, began = rollout.group_id, Attempt(rollout), time.monotonic()
    result.started_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    try:
        cancelled = False
        try:
            await asyncio.wait_for(reach_end(api, attempt, sweep.endpoint), sweep.timeout)
        except asyncio.TimeoutError:
            cancelled = await stop_turn(api, attempt)
        judge(result, attempt, sweep.timeout if cancelled else None)
        await read_outcome(api, attempt, result)
    except asyncio.CancelledError:
        result.fail(sweep.failure or "interrupted", "error" if sweep.failure else "cancelled")
    except NetworkError as error:
        result.fail(str(error))
        sweep.halt(str(error))
    except ApiError as error:
        result.fail(str(error))
    except Exception as error:  # a bug here, or in grading one task, must not end the other rollouts
        result.fail(f"{type(error).__name__}: {error}")
    finally:
        result.duration_s = round(time.monotonic() - began, 3)
        if leak := await sweep.clean_up(release(api, attempt)):
            result.note(leak)
        result.session_id, result.turn_id = attempt.session_id, attempt.turn.get("id")
    return result


async def reach_end(api: Api, attempt: Attempt, endpoint: tuple[str, str] | None) -> None:
    """Create the session and poll until its turn has ended, or it failed without one."""
    files = [
        {"type": "inline", "path": WORKSPACE + name, "data": base64.b64encode(path.read_bytes()).decode()}
        for name, path in attempt.rollout.task.files
    ]
    body = session_body(attempt.rollout, endpoint, files)
    session = await patiently(create_once, api, attempt, body, full=True)
    attempt.session_id = session["id"]
    network = (session.get("environment") or {}).get("network") or {}
    if network.get("access") != "disabled" or network.get("allowed_domains"):
        raise NetworkError(f"the deployment does not confirm that network access is disabled: {network}")
    pause, polls = FIRST_POLL, 0
    while not attempt.ended:
        await asyncio.sleep(pause * random.uniform(0.8, 1.2))
        pause, polls = min(pause * POLL_GROWTH, LAST_POLL), polls + 1
        try:
            await look(api, attempt, with_session=polls % 3 == 0)
        except ApiError as error:
            if not error.transient:
                raise
            pause = max(pause, error.wait)


async def create_once(api: Api, attempt: Attempt, body: Json) -> Json:
    """Send the create request, unless an earlier one whose answer was lost made the session."""
    if attempt.doubtful:
        session = await api.find_session(attempt.rollout.id)
        if session is not None:
            return session
    attempt.doubtful = True
    attempt.creating = asyncio.ensure_future(api.send(api.sessions.create, **body))
    try:
        return await asyncio.shield(attempt.creating)
    except ApiError as error:
        attempt.trouble = error
        # A refusal made nothing. After anything else only the list of sessions can tell.
        attempt.doubtful = error.status is None or error.status >= 500
        raise


def is_root(turn: Json) -> bool:
    return turn.get("subagent_id") is None


async def look(api: Api, attempt: Attempt, with_session: bool) -> None:
    """Read the root turn; while there is none, now and then the session: it may have failed."""
    try:
        turn = await api.newest(is_root, api.turns.list, str(attempt.session_id))
        if turn is None and with_session:
            session = await api.send(api.sessions.retrieve, str(attempt.session_id))
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
            give_up = give_up if sent else time.monotonic() + SETTLE_SECONDS
            sent = True
        except ApiError as error:
            if error.status == 409 and not sent:
                give_up = last
            elif not error.transient and error.status != 409:
                break
        await asyncio.sleep(pause)
        pause = min(pause * POLL_GROWTH, LAST_POLL)
    return True


def judge(result: Result, attempt: Attempt, timeout: float | None) -> None:
    """Set status and reward by how the turn ended. `timeout`: after these seconds it was cancelled."""
    status, kind = attempt.turn.get("status"), failure_class(attempt.turn)
    by_policy = kind in POLICY_CLASSES
    if status == "failed":
        result.note(f"turn failed: {message_of(attempt.turn)}")
    if timeout is not None:
        result.note(f"the timeout of {timeout:g} s passed and a cancel was sent")
    if status == "completed":
        result.status = "completed"
    elif attempt.failure is not None:
        result.fail(attempt.failure)
    elif timeout is not None and attempt.trouble is not None:
        # The deployment did not answer: whatever the policy was doing, it was not measured.
        result.fail(str(attempt.trouble))
    elif timeout is not None:
        # The time of a turn that ran was the policy's: 0.0, unless its failure says otherwise. Time
        # that preparation or the queue used was not: null.
        result.status = "timeout"
        result.reward = 0.0 if attempt.started and (by_policy or not kind) else None
        if not attempt.started:
            result.note("the turn had not started")
    elif status == "failed":
        result.status, result.reward = ("failed", 0.0) if by_policy else ("error", None)
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


async def read_outcome(api: Api, attempt: Attempt, result: Result) -> None:
    """Grade a completed turn; read the items and the usage of any."""
    if attempt.session_id is None:
        return
    if result.status == "completed":
        await grade_answer(api, attempt, result)
    try:
        result.items = await patiently(read_items, api, str(attempt.session_id))
        result.usage = await read_usage(api, attempt)
    except ApiError as error:
        # What is graded stays graded: no agent can undo a loss by items that cannot be read.
        result.note(f"items or usage could not be read: {error}")


async def grade_answer(api: Api, attempt: Attempt, result: Result) -> None:
    session_id, turn_id = str(attempt.session_id), attempt.turn["id"]

    def is_answer(artifact: Json) -> bool:
        return bool(artifact.get("turn_id") == turn_id and artifact.get("path") == ANSWER_PATH)

    artifact = await patiently(api.newest, is_answer, api.artifacts.list, session_id)
    if artifact is None:
        result.reward = 0.0
        result.note("no answer")
        return
    data = bytes(MAX_ANSWER_BYTES + 1)  # stands for an answer that is too large to be downloaded
    if (artifact.get("size_bytes") or 0) <= MAX_ANSWER_BYTES:
        data = await patiently(api.download, session_id, artifact["id"], MAX_ANSWER_BYTES)
    result.reward, result.answer, reason = grade(attempt.rollout.task.expected, data)
    if not isinstance(result.answer, dict):
        result.note(f"answer: {reason}")


async def read_items(api: Api, session_id: str) -> list[Any]:
    return [item async for item in api.each(api.items.list, session_id, order="asc")]


async def read_usage(api: Api, attempt: Attempt) -> Json | None:
    """The turn's usage, waiting for a deployment that fills it in late. None is unknown, not zero."""
    turn, turn_id = attempt.turn, str(attempt.turn.get("id"))
    # `usage_source` says that the figure, or its absence, is final; a shell script calls no model.
    final = "usage_source" in (turn.get("x_agents_core") or {}) or attempt.rollout.pair.harness == "shell"
    for pause in USAGE_PAUSES:
        if turn.get("usage") or final or turn.get("status") != "completed":
            break
        await asyncio.sleep(pause)
        turn = await patiently(partial(api.send, api.turns.retrieve, turn_id, session_id=attempt.session_id))
    return turn.get("usage")


async def release(api: Api, attempt: Attempt) -> str | None:
    """Delete the session, whatever state it is in. Returns what may be left behind, if anything."""
    try:
        if attempt.session_id is None and attempt.creating is not None:
            with contextlib.suppress(ApiError):
                attempt.session_id = (await attempt.creating)["id"]
        if attempt.session_id is None and attempt.doubtful:
            found = await patiently(api.find_session, attempt.rollout.id, seconds=DELETE_SECONDS)
            attempt.session_id = found["id"] if found else None
        if attempt.session_id is not None:
            await patiently(delete_once, api, attempt, seconds=DELETE_SECONDS, conflict=True)
    except ApiError as error:
        return f"session {attempt.session_id or '(unknown)'} could not be deleted: {error}"
    except asyncio.CancelledError:
        return f"session {attempt.session_id or '(unknown)'} may be left behind: interrupted twice"
    return None


async def delete_once(api: Api, attempt: Attempt) -> None:
    """Try once to delete the session; what may still run in it is cancelled first."""
    if not attempt.ended:
        with contextlib.suppress(ApiError):
            await api.cancel(str(attempt.session_id))
    try:
        await api.send(api.sessions.delete, str(attempt.session_id))
    except ApiError as error:
        if error.status != 404:
            raise


# --- The sweep --------------------------------------------------------------------------------


class Sweep:
    """Runs rollouts, a fixed number at a time, and ends them in good order.

    halt() starts no more rollouts; interrupt() also cancels those in flight, each of which cleans up
    and is recorded; fail() is an interruption that nobody asked for.
    """

    def __init__(self, timeout: float, concurrency: int, journal: Journal | None = None) -> None:
        self.timeout, self.concurrency, self.journal = timeout, concurrency, journal
        self.endpoint: tuple[str, str] | None = None
        self.results: list[Result] = []
        self.failure: str | None = None
        self.halted = self.signals = 0
        self.tasks: set[asyncio.Future[Any]] = set()
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
        """Write and report a rollout, and keep what the table needs: memory is not to grow with items."""
        try:
            if self.journal is not None:
                self.journal.append(result.line())
        except OSError as error:
            self.fail(f"cannot write {self.journal and self.journal.path}: {error.strerror}")
        self.results.append(replace(result, items=[], answer=None, usage=None))
        name = f"{result.task} · {result.harness} · {result.model} · #{result.sample}"
        reward = "null" if result.reward is None else f"{result.reward:.1f}"
        text = f"[{len(self.results)}/{planned}] {name}: {result.status}, reward {reward}"
        say(plain(f"{text}, {result.duration_s:.1f} s" + (f" · {result.error}" if result.error else "")))

    def interruptible(self, work: Any) -> asyncio.Future[Any]:
        """Start work that an interruption cancels."""
        task: asyncio.Future[Any] = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

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
        ends = [(result.status, result.reward is None) for result in self.results]
        unmeasured = ("error", True) in ends or ("timeout", True) in ends
        return 130 if self.signals else 3 if self.failure or unmeasured else 0


# --- The deployment: the embedded one, or the one that OPENAI_BASE_URL names ------------------


class Embedded:
    """Core and, for the scripted policies, the gateway: processes that live as long as this one.

    Each has a pipe as its stdin. When it closes, which the kernel does even after a kill -9, they stop
    and kill all they run. In a session of their own, they get no Ctrl-C of the terminal.
    """

    def __init__(self, on_exit: Callable[[str], None]) -> None:
        self.on_exit = on_exit
        self.processes: list[asyncio.subprocess.Process] = []
        self.watchers: list[asyncio.Future[None]] = []

    async def start(self, name: str, first_line: str = "") -> dict[str, str]:
        """Start a service; return the two variables it prints once it listens. Raises ServiceError."""
        environment = {k: v for k, v in os.environ.items() if k not in ("MODEL_API_KEY", "OPENAI_API_KEY")}
        command, pipe = (sys.executable, "-m", name, "serve", "--exit-with-stdin"), asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, start_new_session=True, cwd=HERE, env=environment
        )
        self.processes.append(process)
        assert process.stdin and process.stdout
        with contextlib.suppress(ConnectionError):
            process.stdin.write(first_line.encode())
            await process.stdin.drain()
        values: dict[str, str] = {}
        while len(values) < 2:
            line = (await process.stdout.readline()).decode("utf-8", "replace")
            if not line:
                code = await process.wait()
                raise ServiceError(f"the embedded {name} did not start", code if code > 0 else 3)
            key, _, value = line.strip().removeprefix("export ").partition("=")
            values[key] = value.strip("'")
        self.watchers.append(asyncio.ensure_future(self.watch(name, process)))
        return values

    async def watch(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.on_exit(f"the embedded {name} ended with code {await process.wait()}")

    async def stop(self) -> None:
        """Close the pipes, and kill what has not ended in time."""
        for watcher in self.watchers:
            watcher.cancel()
        for process in self.processes:
            assert process.stdin
            process.stdin.close()
        for process in self.processes:
            try:
                await asyncio.wait_for(process.wait(), SETTLE_SECONDS)
            except (asyncio.TimeoutError, asyncio.CancelledError):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def policy_scripts(plan: list[Rollout]) -> str:
    """The line that tells the gateway which script the policy oracle runs in which rollout."""
    scripts = {rollout.task.id: rollout.task.solution or "true\n" for rollout in plan}
    return json.dumps({"scripts": scripts, "rollouts": {r.id: r.task.id for r in plan}}) + "\n"


def load_client() -> Any:
    """Import the client with the part that is used: one to two seconds, once."""
    import openai
    import openai.resources.beta.agents.sessions

    return openai


async def connect(plan: list[Rollout], sweep: Sweep, embedded: Embedded | None) -> Api:
    """Make the client; meanwhile start the embedded deployment, if there is to be one."""
    loading = asyncio.get_running_loop().run_in_executor(None, load_client)
    if embedded is None:
        return Api((await loading).AsyncOpenAI(max_retries=0))
    scripted = [rollout for rollout in plan if rollout.pair.protocol and sweep.endpoint is None]
    starting = [embedded.start("core")]
    starting += [embedded.start("gateway", policy_scripts(scripted))] if scripted else []
    core, *gateway = await asyncio.wait_for(asyncio.gather(*starting), START_SECONDS)
    for values in gateway:
        sweep.endpoint = values["MODEL_BASE_URL"], values["MODEL_API_KEY"]
        redact.add(values["MODEL_API_KEY"])
    base_url, key = core["OPENAI_BASE_URL"], core["OPENAI_API_KEY"]
    redact.add(key)
    say(f"rl_eval: started the embedded Core at {base_url}")
    openai = await loading
    # A proxy that the environment names must not come between this process and its own.
    http = openai.DefaultAsyncHttpxClient(trust_env=False)
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
        raise ServiceError(f"the embedded deployment did not start in {START_SECONDS:g} s", 3) from None
    finally:
        if api is not None:
            await sweep.clean_up(api.client.close())
        if embedded is not None:
            await sweep.clean_up(embedded.stop())


# --- --check ----------------------------------------------------------------------------------


def make_check(run_id: str, tasks: list[Task]) -> list[Rollout]:
    """Two rollouts per task by the `shell` harness: its solution (sample 0) and nothing (sample 1)."""
    inputs = [(task, n, text) for task in tasks for n, text in enumerate((task.solution, "true"))]
    return [make_rollout(run_id, task, Pair("shell", None), n, text) for task, n, text in inputs if text]


def report_check(tasks: list[Task], results: Iterable[Result]) -> tuple[list[str], int]:
    """A line per task, one for all, and the exit code: 1 a task is unsound, 3 not measured, 0."""
    found = {(result.task, result.sample): result for result in results}
    lines, codes = [], []
    for task in tasks:
        problems, code = ["no solution.sh"] * (not task.solution), 0 if task.solution else 1
        for sample, wanted, what in ((0, 1.0, "the solution"), (1, 0.0, "doing nothing")):
            result = found.get((task.id, sample))
            if result is not None and result.reward is not None and result.reward != wanted:
                why = f" ({result.error})" if result.error else ""
                problems.append(f"{what} earned {result.reward:.1f}, not {wanted:.1f}{why}")
                code = 1
            elif (result is None or result.reward is None) and (sample or task.solution):
                problems.append(f"{what} was not measured: {result.error if result else 'not run'}")
                code = code or 3
        lines.append(plain(f"{task.id}: {'; '.join(problems) or 'ok'}"))
        codes.append(code)
    lines.append(f"{codes.count(0)} of {len(tasks)} tasks are sound")
    return lines, 1 if 1 in codes else max(codes)


# --- Command line -----------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line. It names the options and repeats no unknown argument: that may be a key."""
        if message.startswith("unrecognized arguments"):
            options = ", ".join(name for name in self._option_string_actions if name.startswith("--"))
            message = f"unknown option or argument; the options are {options}"
        raise UsageError(message)


def count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text[:9]) < 10**8:
        raise argparse.ArgumentTypeError("must be a whole number of 1 or more")
    return int(text)


def seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < 1e8:
            return float(text)
    raise argparse.ArgumentTypeError("must be a positive number of seconds")


def make_parser() -> Parser:
    about = "Run agent CLIs on tasks in sandboxes without network, grade their answers, report pass@k."
    more = (
        "OPENAI_BASE_URL and OPENAI_API_KEY select a deployment of the Agents API; without them an embedded "
        "one is started. MODEL_API_KEY is the key for --model-base-url. Exit codes: 0 done, whatever the "
        "rewards; 1 --check failed; 2 usage; 3 something was not measured; 130 interrupted."
    )
    parser = Parser(prog="rl_eval.py", description=about, epilog=more, allow_abbrev=False)
    add = parser.add_argument
    add(
        "--harness",
        action="append",
        default=[],
        metavar="NAME",
        help="codex, claude_sdk or shell; repeatable",
    )
    add("--model", action="append", default=[], metavar="NAME", help="repeatable; embedded: oracle or nop")
    add("--samples", type=count, default=1, metavar="K", help="rollouts per task, harness and model")
    add("--concurrency", type=count, default=4, metavar="N", help="rollouts in flight (default 4)")
    add("--tasks", type=Path, default=Path("tasks"), metavar="DIR", help="task folder (default tasks/)")
    add("--task", action="append", default=[], metavar="ID", help="only this task; repeatable")
    add("--timeout", type=seconds, default=900.0, metavar="SECONDS", help="per rollout (default 900)")
    add("--out", type=Path, metavar="PATH", help="JSONL file (default runs/<UTC timestamp>.jsonl)")
    add("--model-base-url", metavar="URL", help="your model endpoint; {rollout_id} is filled in per rollout")
    add("--model-protocol", choices=PROTOCOLS, help="its protocol (default: what the harness speaks)")
    add("--check", action="store_true", help="solutions must earn 1.0, doing nothing 0.0")
    return parser


def check_options(options: argparse.Namespace, embedded: bool) -> None:
    """Refuse what this machine, environment or combination of options cannot do. Raises UsageError."""
    missing = [name for name in ("openai", "tenacity", "tabulate") if not importlib.util.find_spec(name)]
    chosen = options.harness or options.model or options.model_base_url or options.out
    problems = {
        "--check needs the embedded Core: unset OPENAI_BASE_URL": options.check and not embedded,
        "--check takes only --tasks, --task, --concurrency and --timeout": options.check and chosen,
        "the embedded Core is for Linux; name a deployment with OPENAI_BASE_URL": embedded
        and sys.platform != "linux",
        "OPENAI_API_KEY must hold the key of the deployment at OPENAI_BASE_URL": not embedded
        and not os.environ.get("OPENAI_API_KEY"),
        f"missing packages ({', '.join(missing)}): pip install -r requirements.txt": missing,
        "--harness and --model need names": "" in options.harness + options.model,
        "--harness shell takes no --model: it runs the instruction as a script": "shell" in options.harness
        and options.model,
        "--model-protocol needs --model-base-url": options.model_protocol and options.model_base_url is None,
    }
    for message, applies in problems.items():
        if applies:
            raise UsageError(message)
    if options.model_base_url is not None:
        check_endpoint(options.model_base_url, options.model)


def check_endpoint(url: str, models: list[str]) -> None:
    """Refuse a base URL that no session takes, without repeating it: it may hold a secret."""
    try:
        parts = urlsplit(url)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        sound = False
    if not sound or not url.isprintable() or set(url.replace("{rollout_id}", "")) & set(" {}\\"):
        raise UsageError("--model-base-url must be an http or https URL; it may hold {rollout_id}")
    if "@" in url or "?" in url or "#" in url:
        raise UsageError("--model-base-url must hold no user, query or fragment; MODEL_API_KEY takes the key")
    if not models:
        raise UsageError("--model-base-url needs --model: the name that the endpoint knows")
    if not os.environ.get("MODEL_API_KEY"):
        raise UsageError("--model-base-url needs the endpoint's key in MODEL_API_KEY")


def choose_pairs(options: argparse.Namespace, embedded: bool) -> list[Pair]:
    """The pairs of harness and model that run. Raises UsageError for one that cannot."""
    own_endpoint = options.model_base_url is not None
    harnesses = list(dict.fromkeys(options.harness)) or ["codex" if embedded else None]
    models = list(dict.fromkeys(options.model)) or ["oracle" if embedded else None]
    for name in harnesses if embedded else ():
        if name not in PROTOCOL_OF:
            raise UsageError(f"no harness {name!r}; there are: {', '.join(PROTOCOL_OF)}")
    for name in () if own_endpoint else models:
        if name in SCRIPTED and not embedded:
            raise UsageError(f"the scripted policy {name} needs the embedded Core: unset OPENAI_BASE_URL")
        if name not in SCRIPTED and embedded:
            way_out = "--model-base-url, or a deployment at OPENAI_BASE_URL"
            raise UsageError(f"model {name!r} needs {way_out}; of its own there are: {', '.join(SCRIPTED)}")
    pairs = []
    for harness in harnesses:
        protocol = choose_protocol(harness, options.model_protocol) if own_endpoint or embedded else None
        names = [None] if harness == "shell" else models
        pairs += [Pair(harness, model, protocol) for model in names]
    return pairs


def choose_protocol(harness: str | None, named: str | None) -> str | None:
    """What a harness speaks to the endpoint that its sessions are given. Raises UsageError."""
    known = PROTOCOL_OF.get(harness or "")
    if known and named and known != named:
        raise UsageError(f"harness {harness} speaks {known}, not {named}")
    if not known and not named and harness != "shell":
        raise UsageError(f"harness {harness or 'default'}: --model-protocol must name what it speaks")
    return None if harness == "shell" else named or known


def start(arguments: list[str] | None) -> int:
    """Check all input, run, report. Returns the exit code; raises UsageError and ServiceError."""
    options = make_parser().parse_args(arguments)
    embedded = not os.environ.get("OPENAI_BASE_URL")
    for name in ("MODEL_API_KEY", "OPENAI_API_KEY"):
        redact.add(os.environ.get(name, ""))
    check_options(options, embedded)
    pairs = choose_pairs(options, embedded)
    tasks, run_id = load_tasks(options.tasks, options.task), new_run_id()
    if options.check:
        sweep = Sweep(options.timeout, options.concurrency)
        asyncio.run(run(make_check(run_id, tasks), sweep, embedded))
        lines, code = report_check(tasks, sweep.results)
        say("\n".join(lines), sys.stdout)
        return 130 if sweep.signals else code
    for task in tasks:
        if (
            task.solution is None
            and options.model_base_url is None
            and any(p.model == "oracle" for p in pairs)
        ):
            raise UsageError(f"task {task.id!r} has no solution.sh for the scripted policy oracle to run")
    plan = make_plan(run_id, tasks, pairs, options.samples)
    path = options.out or Path("runs", run_id.split("-")[0] + ".jsonl")
    if options.out is None and path.exists():  # another run began in this second
        path = Path("runs", run_id + ".jsonl")
    try:
        journal = Journal(path)
    except OSError as error:
        raise UsageError(f"cannot create {path}: {error.strerror}") from None
    sweep = Sweep(options.timeout, options.concurrency, journal)
    if options.model_base_url is not None:
        sweep.endpoint = options.model_base_url, os.environ["MODEL_API_KEY"]
    say(plain(f"rl_eval: run {run_id}, {len(plan)} rollouts, to {path}"))
    try:
        asyncio.run(run(plan, sweep, embedded))
    finally:
        journal.close()
    say(markdown(summarise(sweep.results, {1, options.samples})), sys.stdout)
    return sweep.exit_code()


def main(arguments: list[str] | None = None) -> int:
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        return start(arguments)
    except (UsageError, ServiceError) as error:
        say(f"rl_eval: {plain(str(error.args[0]))}")
        return 2 if isinstance(error, UsageError) else int(error.args[1])
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
