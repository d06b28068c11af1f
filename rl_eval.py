#!/usr/bin/env python3
"""Run agent CLIs on a folder of tasks, grade their answers outside the sandbox, report pass@k.

One rollout is one session of one (task, harness, model, sample) on an Agents API. The agent works in a
sandbox without network and leaves /workspace/outputs/answer.json; this script compares it with the task's
expected.json, which never leaves this process. Each finished rollout is one line of strict JSON in the
output file, and the run ends with a Markdown table.

    python3 rl_eval.py                                      five tasks, codex, the scripted policy oracle
    python3 rl_eval.py --harness codex --harness claude_sdk --samples 2
    python3 rl_eval.py --resume runs/20260101T000000Z.jsonl go on with what a run still owes
    python3 rl_eval.py --check                              are the tasks themselves sound?
    MODEL_API_KEY=... python3 rl_eval.py --model my-policy \\
        --model-base-url 'http://127.0.0.1:9000/rollouts/{rollout_id}/v1'
    OPENAI_BASE_URL=... OPENAI_API_KEY=... python3 rl_eval.py --model some-model

Invariants: nothing is created before all input is checked; a session is deleted whatever happened before;
reward is null when nothing was measured and 0.0 when the policy did not earn it; the output file is the only
state of a run, each line an attempt, and a rollout is settled by its first line with a reward; no output holds
a key. Left out: how a session is run, and grading by programs. The room `report/` has the options, the tasks as
they are read, the file of a run, its statistics and all that is shown.
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
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from report.options import (
    RECORDED,
    Pair,
    check_endpoint,
    check_options,
    choose_pairs,
    make_parser,
    recall_options,
    resume_command,
)
from report.record import (
    AGENT_REASONS,
    Book,
    Journal,
    Json,
    Refused,
    Result,
    at,
    differences,
    forced_before,
    is_number,
    keep_secret,
    new_run_id,
    open_journal,
    parse_strictly,
    plain,
    reopen_journal,
    say,
    to_line,
)
from report.tasks import ABSOLUTE, RELATIVE, WORKSPACE, Rules, Task, Tolerance, load_tasks

if TYPE_CHECKING or "asyncio" in sys.modules:
    import asyncio

    from core.embedded import Services
else:  # loaded at its first use, because --help must not pay 90 ms for it
    _spec = importlib.util.find_spec("asyncio")
    _spec.loader = importlib.util.LazyLoader(_spec.loader)
    asyncio = sys.modules["asyncio"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(asyncio)

T = TypeVar("T")

# --- Constants ------------------------------------------------------------------------------------------

ANSWER_PATH = WORKSPACE + "outputs/answer.json"
MAX_ANSWER_BYTES = 1 << 20
# Failures that are the policy's own. A failed turn that names none of them measured nothing.
POLICY_CLASSES = ("model", "budget")
POLICY_CODES = ["context_length_exceeded", "max_output_tokens", "session_budget_exceeded"]
POLICY_CODES += ["cyber_policy", "misalignment_policy_violation"]
# Failures that another attempt would meet again.
LASTING_CODES = ["authentication_error", "invalid_request", "resource_not_found", "usage_limit_exceeded"]
LASTING_CODES += ["billing_not_active", "credit_balance_exhausted"]
ENDED = ("completed", "failed", "cancelled")

FIRST_POLL, POLL_GROWTH, LAST_POLL = 0.2, 1.5, 4.0  # seconds, as all that follow
REQUEST_SECONDS = 30.0
TROUBLE_SECONDS = 60.0  # how long a deployment may misbehave before a request is given up
CANCEL_SECONDS = 330.0  # a public deployment refuses a cancel for up to 5 minutes of preparation
SETTLE_SECONDS = 30.0  # from an accepted cancel to a turn that has ended
HURRY_SECONDS = 1.0  # what cleaning up may still take after a second Ctrl-C
START_SECONDS = 60.0
USAGE_PAUSES = (0.5, 1.0, 2.0, 4.0)  # some deployments fill usage in seconds after the turn
FIRST_RETRY, LAST_RETRY = 0.5, 60.0  # between attempts, doubled each time
CUT, CUT_SECONDS = 0.8, 5.0  # a deployment without room: of the number in flight, once in these seconds
CALM_SECONDS = 10.0  # without a refusal: the number grows faster

# --- Plan -----------------------------------------------------------------------------------------------


class Rollout(NamedTuple):
    """One planned attempt at a task by a harness and a model."""

    id: str
    group_id: str
    run_id: str
    task: Task
    pair: Pair
    sample: int
    input: str


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


def session_body(rollout: Rollout, number: int, endpoint: tuple[str, str] | None, files: list[Json]) -> Json:
    """The create request's arguments for attempt `number`. `endpoint`: a base URL, perhaps with {rollout_id}, and
    its key."""
    pair, names = rollout.pair, {"run_id": rollout.run_id, "rollout_id": rollout.id}
    agent: Json = {} if pair.model is None else {"model": pair.model}
    if pair.harness is not None:
        agent["x_agents_core"] = {"harness": pair.harness}
    body: Json = {
        "agent": agent,
        "input": rollout.input,
        "environment": {"type": "openai_hosted", "files": files, "network": {"access": "disabled"}},
        "metadata": {**names, "group_id": rollout.group_id, "sample": str(rollout.sample), "attempt": str(number)},
        # Another attempt is another session; the same one, sent again also by a later process, is the same session.
        "extra_headers": {"Idempotency-Key": f"{rollout.id}-{number}"},
    }
    if endpoint and pair.protocol:
        # A gateway keeps the calls of attempts apart by this suffix.
        base_url = endpoint[0].replace("{rollout_id}", rollout.id if number == 1 else f"{rollout.id}~{number}")
        bundle = {"protocol": pair.protocol, "base_url": base_url, "api_key": endpoint[1]}
        body["extra_body"] = {"x_agents_core": {"model_provider": bundle}}
    return body


# --- Grading --------------------------------------------------------------------------------------------


def grade(expected: Json, data: bytes, rules: Rules = Rules()) -> tuple[float, Any, str]:  # noqa: B008 immutable
    """Compare an answer's bytes. Returns reward, parsed answer or None, and why it is not 1.0."""
    if len(data) > MAX_ANSWER_BYTES:
        return 0.0, None, f"larger than {MAX_ANSWER_BYTES} bytes"
    try:
        answer = parse_strictly(data)
    except ValueError as error:
        return 0.0, None, str(error)
    reward, reason = compare(expected, answer, rules)
    return reward, answer, reason


def compare(expected: Json, answer: Any, rules: Rules) -> tuple[float, str]:
    """Reward of a parsed answer, and why it is not 1.0."""
    if not isinstance(answer, dict):
        return 0.0, "not a JSON object"
    default = RELATIVE, ABSOLUTE
    wrong = [
        f"{'wrong' if key in answer else 'no'} value for {key!r}"
        for key, value in expected.items()
        if key not in answer or not matches(value, answer[key], rules.tolerances.get(key, default))
    ]
    share = (len(expected) - len(wrong)) / len(expected)
    return (share if rules.fraction else float(share == 1.0)), (wrong or [""])[0]


def matches(expected: Any, actual: Any, tolerance: Tolerance) -> bool:
    """Whether a value is as expected. Recursion goes no deeper than the expected value does."""
    if expected is None or isinstance(expected, bool) or actual is None or isinstance(actual, bool):
        return actual is expected
    if isinstance(expected, (int, float)):
        return isinstance(actual, (int, float)) and close(expected, actual, tolerance)
    if isinstance(expected, str):
        return isinstance(actual, str) and expected.strip() == actual.strip()
    if isinstance(expected, list):
        same = isinstance(actual, list) and len(actual) == len(expected)
        return same and all(matches(e, a, tolerance) for e, a in zip(expected, actual, strict=True))
    same = isinstance(actual, dict) and set(expected) <= set(actual)
    return same and all(matches(value, actual[key], tolerance) for key, value in expected.items())


def close(expected: float, actual: float, tolerance: Tolerance) -> bool:
    """Equal, within the relative tolerance, or within the absolute floor."""
    (a, b), (c, d), ((p, q), (r, s)) = expected.as_integer_ratio(), actual.as_integer_ratio(), tolerance
    gap = abs(a * d - c * b)  # the difference, times b * d
    return gap * q <= abs(a) * d * p or gap * s <= b * d * r


# --- The Agents API, as plain JSON ----------------------------------------------------------------------


class ApiError(Exception):
    """A request that was refused, or that got no answer (`status` None) or a useless one (200)."""

    def __init__(self, message: str, status: int | None = None, wait: float = 0.0, sent: bool = True) -> None:
        super().__init__(message)
        self.status, self.wait, self.sent = status, wait, sent  # wait: seconds that the server asked for
        self.transient = status is None or status in (408, 429) or status >= 500
        self.code, self.full = "", status == 429  # full: there is no room; it is to be waited for


def api_error(error: Any) -> ApiError:
    """Classify an exception of the client or of its HTTP library: here, and nowhere else."""
    status, body = getattr(error, "status_code", None), getattr(error, "body", None)
    if isinstance(error, (ApiError, ValueError, RecursionError)):
        return error if isinstance(error, ApiError) else ApiError("the answer is not JSON", 200)
    if status is None:
        sent = type(error.__cause__).__name__ not in ("ConnectError", "ConnectTimeout")
        return ApiError(f"no answer: {error or type(error).__name__}", sent=sent)
    code = str(at(body, "code") or "")
    message = f"HTTP {status} {code}: {str(at(body, 'message') or error)[:1000]}"
    wait = error.response.headers.get("retry-after", "")
    seconds = min(float(wait), 120.0) if wait.isdecimal() else 0.0
    told = ApiError(message.replace(" :", ":"), status, seconds)
    told.code, told.full = code, status == 429 or (status == 503 and (code == "execution_unavailable" or bool(wait)))
    return told


def place_of(session: Json) -> tuple[Any, Any]:
    """Rollout and attempt that a session was made for."""
    return at(session, "metadata", "rollout_id"), at(session, "metadata", "attempt")


class Api:
    """Requests of the stock client, each sent once. Raises ApiError.

    Raw answers are read, not the client's models: they are the record, unknown members and types included,
    and building models costs more than the rest of a request.
    """

    def __init__(self, client: Any, deployment: Json) -> None:
        from openai.resources.beta.agents.sessions import AsyncSessions

        # As client.beta.agents.sessions, which would import all of beta first: half a second.
        self.client, sessions, self.deployment = client, AsyncSessions(client), deployment
        self.sessions, self.events = sessions.with_raw_response, sessions.events.with_raw_response
        self.turns, self.items = sessions.turns.with_raw_response, sessions.items.with_raw_response
        self.artifacts = sessions.artifacts.with_raw_response
        self.stream_content = sessions.artifacts.with_streaming_response.content

    async def send(self, method: Callable[..., Awaitable[Any]], *args: str, **members: Any) -> Json:
        try:
            answer = await method(*args, timeout=REQUEST_SECONDS, **members)
            self.deployment.setdefault("version", answer.headers.get("openai-version"))
            value = json.loads(answer.content.decode("utf-8", "replace") or "{}")
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
            cursor = at((page.get("data") or [None])[-1], "id") or page.get("last_id")
            if not page.get("has_more") or cursor in (None, after.get("after")):
                return found
            after = {"after": cursor}
        return found

    async def newest(self, wanted: Callable[[Json], bool], method: Any, *args: str) -> Json | None:
        found = await self.list(method, *args, until=wanted)
        return found[-1] if found and wanted(found[-1]) else None

    async def find_session(self, rollout_id: str, number: int) -> Json | None:
        """By metadata, in the unfiltered list: a deployment's filtered lists may lag behind."""

        def ours(session: Json) -> bool:
            return place_of(session) == (rollout_id, str(number))

        return await self.newest(ours, self.sessions.list)

    async def sessions_of(self, run_id: str) -> Sequence[Json]:
        """What is left of a run on the deployment."""
        filtered = partial(self.sessions.list, extra_query={"metadata[run_id]": run_id})
        found = await patiently(self.list, filtered)
        return [session for session in found if at(session, "metadata", "run_id") == run_id]

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


async def patiently(request: Callable[..., Awaitable[T]], *args: Any) -> T:
    """Repeat a request with growing, jittered pauses while its error is transient, for a minute."""
    from tenacity import AsyncRetrying, retry_if_exception, wait_random_exponential

    give_up, growing = time.monotonic() + TROUBLE_SECONDS, wait_random_exponential(multiplier=0.2, max=8.0)

    def error_of(state: Any) -> Any:
        return state.outcome.exception()

    retrying = AsyncRetrying(
        retry=retry_if_exception(lambda error: isinstance(error, ApiError) and error.transient),
        wait=lambda state: 0.1 + max(growing(state), error_of(state).wait),
        stop=lambda state: time.monotonic() + float(state.upcoming_sleep) > give_up,
        reraise=True,
    )
    return await retrying(request, *args)


class Pace:
    """How many rollouts may be in flight, and how soon the next create request may be sent.

    The number is cut when the deployment says that it has no room, at most once in a while, and grows back by one for
    as many creations as it allows; after a time without refusals, by one for each. Who is refused steps back, so that
    the number holds for all.
    """

    def __init__(self, most: int, rate: float | None) -> None:
        self.most, self.allowed = most, float(most)
        self.gap, self.next_creation = (1.0 / rate if rate else 0.0), 0.0
        self.inside, self.cut_at = 0, -math.inf
        self.queue: list[asyncio.Future[None]] = []

    async def enter(self) -> None:
        while self.inside >= int(self.allowed):
            self.queue.append(turn := asyncio.get_running_loop().create_future())
            await turn
        self.inside += 1

    def leave(self) -> None:
        self.inside -= 1
        self.wake()

    def wake(self) -> None:
        for _ in range(min(len(self.queue), int(self.allowed) - self.inside)):
            if not (turn := self.queue.pop(0)).done():
                turn.set_result(None)

    def creation(self) -> float:
        """Seconds to wait for the next create request; also one that is sent again counts."""
        now = time.monotonic()
        begin = max(now, self.next_creation)
        self.next_creation = begin + self.gap
        return begin - now

    def cut(self, error: ApiError) -> None:
        """There was no room: fewer from now on."""
        now = time.monotonic()
        if now - self.cut_at >= max(CUT_SECONDS, error.wait):
            self.allowed, self.cut_at = max(1.0, self.allowed * CUT), now

    async def step_back(self, seconds: float) -> None:
        """Wait outside, and enter again."""
        self.leave()
        await asyncio.sleep(seconds)
        await self.enter()

    def accepted(self) -> None:
        calm = time.monotonic() - self.cut_at > CALM_SECONDS
        self.allowed = min(float(self.most), self.allowed + (1.0 if calm else 1 / self.allowed))
        self.wake()


def pause_after(tries: int, asked: float = 0.0) -> float:
    """Seconds before another try: doubled each time, jittered, and no less than the other side asked for."""
    growing = min(LAST_RETRY, FIRST_RETRY * 2.0 ** min(tries, 10))
    return max(asked, growing) * (1.0 + 0.25 * os.urandom(1)[0] / 255)


# --- One rollout ----------------------------------------------------------------------------------------


MARKS = ("started", "ended", "settled", "graded")  # each ends a phase


class Attempt:
    """What is known of a rollout's session while it runs."""

    def __init__(self, rollout: Rollout, number: int) -> None:
        self.rollout, self.number, self.session_id = rollout, number, ""
        self.session: Json = {}
        self.creating: asyncio.Future[Json] | None = None  # not interrupted: its session would be lost
        self.doubtful = False  # a create request may have made a session that is not known
        self.turn: Json = {}  # the latest root turn
        self.started = False  # it left the queue: from then on time is the policy's
        self.failure: str | None = None  # why the session failed without any turn
        self.trouble: ApiError | None = None  # why the latest request failed
        self.inside = False  # it counts as in flight
        self.began = time.monotonic()  # when the create request that was answered was sent
        self.marks: dict[str, float] = {}  # when phases ended, monotonic

    def mark(self, phase: str) -> None:
        self.marks.setdefault(phase, time.monotonic())

    @property
    def ended(self) -> bool:
        return self.failure is not None or self.turn.get("status") in ENDED

    def timings(self) -> dict[str, float | None]:
        """Seconds per phase, None for one that was not reached. Preparing is told by some deployments alone."""
        told = at(self.turn, "x_agents_core", "timings", "preparing_s")
        preparing = float(told) if is_number(told) else None
        found: dict[str, float | None] = {"queued": None, "preparing": preparing}
        last = self.began
        for phase, mark in zip(("queued", "running", "settling", "grading"), MARKS, strict=True):
            found[phase] = round(self.marks[mark] - last, 3) if mark in self.marks else None
            last = self.marks.get(mark, last)
        if found["queued"] is not None and preparing is not None:
            found["queued"] = round(max(0.0, found["queued"] - preparing), 3)
        return found


async def run_attempt(rollout: Rollout, number: int, api: Api, sweep: Sweep) -> Result:
    """Run one attempt at a rollout, from its create request to its deleted session: all its side effects.

    Raises nothing: an interruption is a result, too.
    """
    result = Result(rollout.id, rollout.task.id, *labels(rollout.pair), rollout.sample, group_id=rollout.group_id)
    result.run_id, result.attempt, result.task_digest = rollout.run_id, number, rollout.task.digest
    result.options, result.deployment = sweep.options, api.deployment
    result.started_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    timeout = rollout.task.rules.timeout or sweep.timeout
    attempt, cancelled = Attempt(rollout, number), False
    try:
        await create(api, attempt, sweep)
        try:
            await asyncio.wait_for(reach_end(api, attempt, sweep), attempt.began + timeout - time.monotonic())
        except asyncio.TimeoutError:
            cancelled = await stop_turn(api, attempt)
        attempt.mark("settled")
        judge(result, attempt, timeout if cancelled else None, sweep.book.agent_failures(rollout.id))
        if result.status == "completed":
            await grade_answer(api, attempt, result)
        attempt.mark("graded")
        await read_record(api, attempt, result)
    except asyncio.CancelledError:
        result.fail(sweep.failure or "interrupted", "error" if sweep.failure else "cancelled")
    except ApiError as error:
        result.fail(str(error))
        # What made no session was refused, or tried for long: another attempt would be no other.
        lasting = not attempt.session and error.status != 409
        result.failure = {"code": None, "class": "deployment", "reason": "not_created" if lasting else "unavailable"}
    except Exception as error:  # a bug here, or in grading one task, must not end the other rollouts
        result.fail(f"{type(error).__name__}: {error}")
    finally:
        result.duration_s = round(time.monotonic() - attempt.began, 3)
        result.timings, result.resolved = attempt.timings(), resolved(attempt.session)
        if leak := await sweep.clean_up(release(api, attempt)):
            result.note(leak)
        if attempt.inside:
            sweep.pace.leave()
        result.session_id, result.turn_id = attempt.session_id or None, attempt.turn.get("id")
        result.attempt = attempt.number
        result.final = result.reward is not None
    return result


def resolved(session: Json) -> Json:
    """Harness and model as the session reads them; null where a deployment does not tell."""
    return {"harness": at(session, "agent", "x_agents_core", "harness"), "model": at(session, "agent", "model")}


async def create(api: Api, attempt: Attempt, sweep: Sweep) -> None:
    """Create the session, once there is room for it, and see that it has no network."""
    files = [
        {"type": "inline", "path": WORKSPACE + name, "data": base64.b64encode(path.read_bytes()).decode()}
        for name, path in attempt.rollout.task.files
    ]
    body = session_body(attempt.rollout, attempt.number, sweep.endpoint, files)
    await sweep.pace.enter()
    attempt.inside, tries, give_up = True, 0, math.inf
    while not attempt.session:
        try:
            if pause := sweep.pace.creation():
                sweep.progress.waiting("--create-rate", pause)
                await asyncio.sleep(pause)
            attempt.session = await create_once(api, attempt, body, sweep)
        except ApiError as error:
            if error.status == 409 and error.code == "idempotency_conflict":
                # A process that was killed made this attempt, and its line is lost: this is the next one.
                attempt.number, attempt.doubtful = attempt.number + 1, False
                body = session_body(attempt.rollout, attempt.number, sweep.endpoint, files)
                continue
            give_up = math.inf if error.full else min(give_up, time.monotonic() + min(TROUBLE_SECONDS, sweep.timeout))
            if not error.transient or time.monotonic() > give_up:
                raise
            pause = pause_after(tries, error.wait)
            if error.full:
                sweep.pace.cut(error)
            sweep.progress.waiting(str(error), pause)
            if error.full:
                attempt.inside = False
                await sweep.pace.step_back(pause)
                attempt.inside = True
            else:
                await asyncio.sleep(pause)
            tries += 1
    sweep.pace.accepted()
    attempt.session_id = attempt.session["id"]
    network = at(attempt.session, "environment", "network")
    if at(network, "access") != "disabled" or at(network, "allowed_domains"):
        sweep.halt(reason := f"the deployment does not confirm that network access is disabled: {network}")
        raise ApiError(reason, 200)


async def reach_end(api: Api, attempt: Attempt, sweep: Sweep) -> None:
    """Poll until the session's turn has ended, or it failed without one."""
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
            sweep.progress.waiting(str(error), pause)


async def create_once(api: Api, attempt: Attempt, body: Json, sweep: Sweep) -> Json:
    """Send the create request, unless an earlier one whose answer was lost made the session."""
    if session := sweep.left.pop((attempt.rollout.id, str(attempt.number)), None):
        return session  # of a process that was killed
    if attempt.doubtful and (session := await api.find_session(attempt.rollout.id, attempt.number)):
        return session
    before, attempt.doubtful, attempt.began = attempt.doubtful, True, time.monotonic()
    attempt.creating = asyncio.ensure_future(api.send(api.sessions.create, **body))
    try:
        return await asyncio.shield(attempt.creating)
    except ApiError as error:
        # A refusal made nothing. After anything else only the list of sessions can tell.
        attempt.doubtful = before or (error.sent and (error.status is None or error.status >= 500))
        attempt.trouble = error
        raise


async def look(api: Api, attempt: Attempt, with_session: bool) -> None:
    """Read the root turn; while there is none, now and then the session: it may have failed."""
    try:
        turn = await api.newest(lambda t: at(t, "subagent_id") is None, api.turns.list, attempt.session_id)
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
        attempt.mark("started")
    if attempt.ended:
        attempt.mark("ended")


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


def judge(result: Result, attempt: Attempt, timeout: float | None, agent_failures: int) -> None:
    """Set status and reward by how the turn ended.

    timeout: after these seconds it was cancelled. agent_failures: earlier attempts whose failure an agent can cause.
    """
    status, kind = attempt.turn.get("status"), failure_class(attempt.turn)
    if status == "failed":
        result.note(f"turn failed: {message_of(attempt.turn)}")
        code, reason = at(attempt.turn, "error", "code"), at(attempt.turn, "x_agents_core", "failure", "reason")
        result.failure = {"code": code, "class": kind or None, "reason": reason}
        if reason in AGENT_REASONS and agent_failures:
            result.note("an earlier attempt ended like this: it counts as the policy's own doing")
            kind = "model"
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
    if named := at(turn, "x_agents_core", "failure", "class"):
        return str(named)
    return "model" if at(turn, "error", "code") in POLICY_CODES else ""


def message_of(resource: Json) -> str:
    """The error of a turn (an object) or of a session (a text) as one text."""
    error = resource.get("error")
    return f"{error.get('code')}: {error.get('message')}" if isinstance(error, dict) else str(error)


async def grade_answer(api: Api, attempt: Attempt, result: Result) -> None:
    """Find, download and grade the answer that the completed turn left."""

    def wanted(artifact: Json) -> bool:
        return (at(artifact, "turn_id"), at(artifact, "path")) == (attempt.turn.get("id"), ANSWER_PATH)

    artifact = await patiently(api.newest, wanted, api.artifacts.list, attempt.session_id)
    if artifact is None:
        result.reward = 0.0
        return result.note("no answer")
    if (artifact.get("size_bytes") or 0) > MAX_ANSWER_BYTES:  # by its own word: not downloaded
        data = bytes(MAX_ANSWER_BYTES + 1)
    else:
        data = await patiently(api.download, attempt.session_id, artifact["id"], MAX_ANSWER_BYTES)
    task = attempt.rollout.task
    result.reward, result.answer, reason = grade(task.expected, data, task.rules)
    if not isinstance(result.answer, dict):
        result.note(f"answer: {reason}")


async def read_record(api: Api, attempt: Attempt, result: Result) -> None:
    """Read the items and the usage; wait for a deployment that fills in usage late."""
    turn, session_id = attempt.turn, attempt.session_id
    # `usage_source` says that the figure, or its absence, is final; a shell script calls no model.
    final = at(turn, "x_agents_core", "usage_source") is not None or attempt.rollout.pair.harness == "shell"
    try:
        if session_id:
            result.items = await patiently(partial(api.list, api.items.list, session_id, order="asc"))
        for pause in () if final or turn.get("status") != "completed" else USAGE_PAUSES:
            if turn.get("usage"):
                break
            await asyncio.sleep(pause)
            turn = await patiently(partial(api.send, api.turns.retrieve, turn["id"], session_id=session_id))
        used = turn.get("usage"), at(turn, "x_agents_core", "usage_observed")
        result.usage, result.usage_observed = (value if isinstance(value, dict) else None for value in used)
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
            found = await patiently(api.find_session, attempt.rollout.id, attempt.number)
            attempt.session_id = found["id"] if found else ""
        if attempt.session_id:
            await patiently(delete_once, api, attempt.session_id, not attempt.ended)
    except ApiError as error:
        return f"session {attempt.session_id or '(unknown)'} could not be deleted: {error}"
    except asyncio.CancelledError:
        return f"session {attempt.session_id or '(unknown)'} may be left behind: interrupted twice"
    return None


async def delete_once(api: Api, session_id: str, running: bool) -> None:
    """Try once to delete a session; what may still run in it is cancelled first."""
    if running:
        with contextlib.suppress(ApiError):
            await api.cancel(session_id)
    try:
        await api.send(api.sessions.delete, session_id)
    except ApiError as error:
        error.transient = error.transient or error.status == 409  # a conflict ends by itself
        if error.status != 404:
            raise


# --- The sweep ------------------------------------------------------------------------------------------


class Sweep:
    """Runs rollouts, so many at a time as the deployment bears, and ends them in good order.

    halt() starts no more rollouts; interrupt() also cancels those in flight, each of which cleans up and is
    recorded; fail() is an interruption that nobody asked for.
    """

    def __init__(self, o: argparse.Namespace, options: Json, book: Book, journal: Journal | None = None) -> None:
        self.timeout, self.retries, self.max_tokens, self.quiet = o.timeout, o.retries, o.max_tokens, o.quiet
        self.pace = Pace(o.concurrency, o.create_rate)
        self.options, self.book, self.journal = options, book, journal
        self.endpoint: tuple[str, str] | None = None
        self.left: dict[tuple[str, str], Json] = {}  # sessions of a killed process, by rollout and attempt
        self.progress: Any = None
        self.failure: str | None = None
        self.halted, self.signals = False, 0
        self.tasks: list[asyncio.Future[Any]] = []
        self.cleanups: set[asyncio.Future[Any]] = set()

    async def run(self, plan: list[Rollout], api: Api) -> None:
        from report.progress import Progress

        owed = [rollout for rollout in plan if self.book.owes(rollout)]
        waiting, self.progress = iter(owed), Progress(len(owed), self.pace, self.book, self.quiet)

        async def worker() -> None:
            for rollout in waiting:
                await self.run_rollout(rollout, api)

        workers = [self.interruptible(worker()) for _ in range(min(self.pace.most, len(owed)))]
        with self.progress:
            for outcome in await asyncio.gather(*workers, return_exceptions=True):
                if isinstance(outcome, Exception):
                    raise outcome

    async def run_rollout(self, rollout: Rollout, api: Api) -> None:
        """Make attempts until one settles the rollout, or no more are due."""
        for tries in range(self.retries + 1):
            if self.halted or self.out_of_tokens():
                return
            result = await run_attempt(rollout, self.book.next_attempt(rollout.id), api, self)
            self.record(result)
            again = tries < self.retries and worth_retrying(result) and not (self.halted or self.out_of_tokens())
            self.progress.done(result, again)
            if not again:
                return
            await asyncio.sleep(pause_after(tries))

    def record(self, result: Result) -> None:
        """Write an attempt, and keep what the table needs: memory must not grow with items."""
        try:
            if self.journal is not None:
                self.journal.append(to_line(result))
        except OSError as error:
            self.fail(f"cannot write {self.journal and self.journal.path}: {error.strerror}")
        tokens = result.tokens
        result.items, result.answer, result.usage_observed, result.timings, result.resolved = [], None, None, {}, {}
        result.usage = None if tokens is None else {"total_tokens": tokens}
        self.book.add(result)

    def out_of_tokens(self) -> bool:
        """Whether the run's tokens are used up; then no more rollouts start."""
        spent = self.max_tokens is not None and self.book.tokens >= self.max_tokens
        if spent:
            self.halt(f"{self.book.tokens} tokens are used, --max-tokens allows {self.max_tokens}")
        return spent

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

    def exit_code(self, plan: list[Rollout]) -> int:
        """130 interrupted; 3 something was not measured; 0 else, whatever the rewards."""
        unmeasured = any(self.book.owes(rollout) for rollout in plan)
        return 130 if self.signals else 3 if self.failure or unmeasured else 0


def worth_retrying(result: Result) -> bool:
    """Whether another attempt may measure what this one did not."""
    lasting = at(result.failure, "reason") == "not_created" or at(result.failure, "code") in LASTING_CODES
    return result.status == "error" and result.reward is None and not lasting


# --- The deployment: the embedded one, or the one that OPENAI_BASE_URL names ----------------------------


def load_client() -> Any:
    """Import the client with the parts that are used: one to two seconds, once."""
    import openai
    from openai.resources.beta.agents import sessions

    for name in ("events", "turns", "items", "artifacts"):
        importlib.import_module(f"{sessions.__name__}.{name}")
    return openai


async def connect(plan: list[Rollout], sweep: Sweep, services: Services | None) -> Api:
    """Make the client; meanwhile start the embedded deployment, if there is to be one."""
    loading = asyncio.get_running_loop().run_in_executor(None, load_client)
    if services is None:
        openai = await loading
        # The client on aiohttp takes half the CPU per request of the one on httpx, with 64 connections.
        client = openai.AsyncOpenAI(max_retries=0, http_client=openai.DefaultAioHttpClient())
        return Api(client, {"base_url": without_secrets(str(client.base_url))})
    starting = [services.start("core")]
    if scripted := [rollout for rollout in plan if rollout.pair.protocol and sweep.endpoint is None]:
        scripts = {rollout.task.id: rollout.task.solution or "true\n" for rollout in scripted}
        names = {rollout.id: rollout.task.id for rollout in scripted}
        starting.append(services.start("gateway", json.dumps({"scripts": scripts, "rollouts": names}) + "\n"))
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
    client = openai.AsyncOpenAI(max_retries=0, base_url=base_url, api_key=key, http_client=http)
    return Api(client, {"base_url": "embedded"})


def without_secrets(url: str) -> str:
    """A URL without user, query and fragment."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


async def run(plan: list[Rollout], sweep: Sweep, embed: bool) -> None:
    """Connect, run what the plan still owes, and stop what was started, whatever happens."""
    from core.embedded import ServiceFailed, Services

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, sweep.signalled)
    services, api = (Services(sweep.fail) if embed else None), None
    try:
        api = await sweep.interruptible(connect(plan, sweep, services))
        if sweep.book.attempts and not embed:
            await sweep.interruptible(find_left(plan, api, sweep))
        await sweep.run(plan, api)
    except asyncio.CancelledError:
        pass  # interrupted before the first rollout
    except asyncio.TimeoutError:
        raise Refused(f"the embedded deployment did not start in {START_SECONDS:g} s", 3) from None
    except ServiceFailed as error:
        raise Refused(str(error), error.code) from None
    except ApiError as error:
        raise Refused(f"the deployment does not answer: {error}", 3) from None
    finally:
        if api is not None:
            await sweep.clean_up(api.client.close())
        if services is not None:
            await sweep.clean_up(services.stop())


async def find_left(plan: list[Rollout], api: Api, sweep: Sweep) -> None:
    """Find the sessions that a killed process left. One whose attempt is due is gone on with, others are deleted."""
    due = {(r.id, str(sweep.book.next_attempt(r.id))) for r in plan if sweep.book.owes(r)}
    due = set() if "forced" in sweep.options else due  # one of another task or model is no session of this rollout
    for session in await api.sessions_of(plan[0].run_id):
        if (key := place_of(session)) in due and key not in sweep.left:
            sweep.left[key] = session
        else:
            await patiently(delete_once, api, session["id"], True)


async def reap(run_id: str) -> int:
    """Delete what a run left on the deployment. Returns the exit code; raises Refused."""
    api = await connect([], Sweep(make_parser().parse_args([]), {}, Book()), None)
    count = 0
    try:
        for session in await api.sessions_of(run_id):
            await patiently(delete_once, api, session["id"], True)
            count += 1
    except ApiError as error:
        raise Refused(f"{count} sessions of run {run_id} deleted, then: {error}", 3) from None
    finally:
        await api.client.close()
    say(plain(f"{count} sessions of run {run_id} deleted"), sys.stdout)
    return 0


# --- Command line ---------------------------------------------------------------------------------------


def start(arguments: list[str] | None) -> int:
    """Check all input, do what is asked for. Returns the exit code; raises Refused."""
    o = make_parser().parse_args(arguments)
    embedded = not os.environ.get("OPENAI_BASE_URL")
    for name in ("MODEL_API_KEY", "OPENAI_API_KEY"):
        keep_secret(os.environ.get(name, ""))
    check_options(o, embedded)
    if o.reap:
        return asyncio.run(reap(o.reap))
    if o.regrade:
        from report.regrade import regrade

        return regrade(o.regrade, load_tasks(o.tasks, o.task), o)
    book, journal = Book(), None
    if o.resume:
        journal = reopen_journal(o.resume, book, read_only=o.list or o.dry_run)
        if book.latest is None:
            say(plain(f"rl_eval: {o.resume} holds no rollout yet: a new run, with the options given here"))
    recall_options(o, book.latest.options if book.latest else {})
    check_endpoint(o)
    pairs, tasks = ([] if o.check else choose_pairs(o, embedded)), load_tasks(o.tasks, o.task)
    if o.check:
        return check(tasks, o, embedded)
    by_oracle = o.model_base_url is None and any(pair.model == "oracle" for pair in pairs)
    if by_oracle and (unsolved := [task.id for task in tasks if task.solution is None]):
        raise Refused(f"task {unsolved[0]!r} has no solution.sh for the scripted policy oracle to run")
    options = {name: getattr(o, name) for name in RECORDED} | {"tasks": len(tasks)}
    if (differing := differences(book, options, tasks)) and not o.force:
        raise Refused(f"{o.resume} is of another run: {'; '.join(differing[:5])} (--force goes on all the same)")
    if forced := forced_before(book) + differing:
        options["forced"] = forced
    run_id = book.latest.run_id if book.latest else new_run_id()
    plan = make_plan(run_id, tasks, pairs, o.samples)
    if o.refill:
        begun = {result.group_id for result in book.outcomes if result.reward is not None}
        plan = [rollout for rollout in plan if rollout.group_id in begun]
    if not plan:
        raise Refused("nothing to run: no group of the run has begun" if o.refill else "nothing to run")
    if o.list or o.dry_run:
        from report.plan import show_plan

        return show_plan(tasks, plan, book, every_task=o.list)
    return sweep_plan(o, plan, Sweep(o, options, book, journal or open_journal(o.out, run_id)), embedded)


def check(tasks: list[Task], o: argparse.Namespace, embedded: bool) -> int:
    """Run each task's solution (sample 0) and nothing (sample 1) by the `shell` harness. Returns the exit code."""
    from report.check import report_check

    inputs = [(task, n, text) for task in tasks for n, text in enumerate((task.solution, "true"))]
    run_id, shell = new_run_id(), Pair("shell", None)
    plan = [make_rollout(run_id, task, shell, n, text) for task, n, text in inputs if text]
    sweep = Sweep(o, {}, Book())
    asyncio.run(run(plan, sweep, embedded))
    lines, code = report_check(tasks, sweep.book.outcomes)
    say("\n".join(lines), sys.stdout)
    return 130 if sweep.signals else code


def sweep_plan(o: argparse.Namespace, plan: list[Rollout], sweep: Sweep, embedded: bool) -> int:
    """Run what is owed and report the whole run. Returns the exit code; raises Refused."""
    journal, owed = sweep.journal, sum(map(sweep.book.owes, plan))
    assert journal is not None
    if o.model_base_url is not None:
        sweep.endpoint = o.model_base_url, os.environ["MODEL_API_KEY"]
    done = f", {len(plan) - owed} of them done" if sweep.book.attempts else ""
    say(plain(f"rl_eval: run {plan[0].run_id}, {len(plan)} rollouts{done}, to {journal.path}"))
    try:
        if owed:
            asyncio.run(run(plan, sweep, embedded))
    finally:
        journal.close()
    from report.summary import report

    code = report(o, sweep.book, sweep.exit_code(plan), plan, ended_well=not sweep.failure and not sweep.signals)
    if any(map(sweep.book.owes, plan)) and journal.size:
        say(plain(f"rl_eval: to go on: {resume_command(o, journal.path)}", 4000))
    return code


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
    sys.modules["rl_eval"] = sys.modules["__main__"]  # for `report`, which must see this module and no second one
    sys.exit(main())
