"""How a run bears a deployment: how many in flight, how soon, how often tried again, and what it may use.

Real runs as forked processes against a deployment that follows a script and counts. The ids name the rows of the
acceptance trials.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from forked import Helper
from scripted_deployment import Json, Refusal, Script, Session
from test_script import DOWN, FULL, WRONG, failure
from trial import by_place, final, helping, trial


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Helper]:
    with helping(tmp_path_factory.mktemp("helper")) as helper:
        yield helper


# --- In flight ------------------------------------------------------------------------------------


@pytest.mark.parametrize("concurrency", [1, 4, 64])
def test_number_in_flight_and_requests_per_rollout(tmp_path: Path, runs: Helper, concurrency: int) -> None:
    """R18, R14: the same rewards, never more in flight, and six requests for a rollout that ends at once."""
    samples = 3 if concurrency == 1 else 64
    with trial(tmp_path / "one", runs) as one:
        done = one.begin(f"--samples {samples} --concurrency {concurrency}")
        assert done.code == 0 and one.deployment.most_in_flight <= concurrency
        assert sum(line["reward"] for line in done.lines) == (samples + 1) // 2
        polls = one.deployment.calls.pop("turns")
        assert set(one.deployment.calls.values()) == {samples} and len(one.deployment.calls) == 5
        assert polls <= samples * 1.2  # now and then one is delayed by a busy machine, not by its neighbours


def test_no_room_lowers_the_number_and_trouble_does_not(tmp_path: Path, runs: Helper) -> None:
    """T13: 429 with Retry-After, then 500, and then a sound deployment: nothing is scored as a failure."""
    began: list[float] = []

    def outage(operation: str) -> Refusal | None:
        began.append(time.monotonic())
        seconds = began[-1] - began[0]
        full = (429, {"code": "rate_limit_exceeded", "message": "full"}, {"Retry-After": "1"})
        return full if seconds < 1.5 and operation == "create" else DOWN if 1.5 <= seconds < 3 else None

    with trial(tmp_path / "one", runs) as one:
        one.deployment.outage = outage
        done = one.begin("--samples 50 --concurrency 8")
        assert done.code == 0 and len(done.lines) == len(final(done.lines)) == 50
        waits = [line for line in done.err.splitlines() if "waiting" in line]
        assert waits and "429" in waits[0] and "of 6 in flight" in waits[0]
        assert one.deployment.most_in_flight == 8  # it grew back to what was asked for
        assert {line["attempt"] for line in done.lines} == {1}


def test_trouble_alone_keeps_the_number(tmp_path: Path, runs: Helper) -> None:
    """T13: all create requests of a second are answered 500; as many as before come after."""
    began: list[float] = []

    def outage(operation: str) -> Refusal | None:
        began.append(time.monotonic())
        return DOWN if began[-1] - began[0] < 1 else None

    with trial(tmp_path / "one", runs, Script(answer=by_place, turn_seconds=1.5)) as one:
        one.deployment.outage = outage
        done = one.begin("--samples 8 --concurrency 8")
        assert done.code == 0 and one.deployment.most_in_flight == 8
        assert "waiting: HTTP 500" in done.err and "8 of 8 in flight" in done.err


def test_both_caps_hold_where_room_comes_late(tmp_path: Path, runs: Helper) -> None:
    """T18: the deployment frees a session's room 0.5 s after its deletion, and holds fewer than are asked for."""
    rate = 20.0
    with trial(tmp_path / "one", runs) as one:
        one.deployment.capacity, one.deployment.free_seconds = 6, 0.5
        done = one.begin(f"--samples 40 --concurrency 10 --create-rate {rate}")
        assert done.code == 0 and len(final(done.lines)) == 40
        times = [moment for moment, _, _ in one.deployment.creates]
        # As many as the rate allows in any window; 5 more, as a busy machine may see one late and the next in time.
        for length in (10, 20, len(times) - 1):
            assert all(b - a >= (length - 5) / rate for a, b in zip(times, times[length:], strict=False))
        assert one.deployment.most_in_flight <= 6 and max(alive for _, alive, _ in one.deployment.creates) <= 10


def test_create_rate_is_held_also_by_requests_that_are_sent_again(tmp_path: Path, runs: Helper) -> None:
    with trial(tmp_path / "one", runs) as one:
        one.deployment.script.refuse["create"] = [DOWN] * 20
        done = one.begin("--samples 10 --concurrency 10 --create-rate 10")
        times = [moment for moment, _, _ in one.deployment.creates]
        assert "waiting: --create-rate" in done.err
        assert done.code == 0 and len(times) == 30 and times[-1] - times[0] >= 2.7


def test_without_a_create_rate_they_come_at_once(tmp_path: Path, runs: Helper) -> None:
    """The control of the two above."""
    with trial(tmp_path / "one", runs) as one:
        one.begin("--samples 10 --concurrency 10")
        times = [moment for moment, _, _ in one.deployment.creates]
        assert any(b - a < 0.02 for a, b in pairwise(times)) and times[-1] - times[0] < 2


# --- Tried again ----------------------------------------------------------------------------------


def died(session: Session) -> Json:
    turn = failure("server_error", "infrastructure")
    turn["x_agents_core"]["failure"]["reason"] = "harness_exited"
    return turn


def once(first: Callable[[Session], Json]) -> Callable[[Session], Json]:
    """A turn that fails in the first attempt only."""
    return lambda session: first(session) if session.body["metadata"]["attempt"] == "1" else {"status": "completed"}


def failing(code: str, kind: str | None = None) -> Callable[[Session], Json]:
    return lambda session: failure(code, kind)


ATTEMPTS: dict[str, tuple[Callable[[Session], Json], str, list[float | None], int]] = {
    "sound": (lambda session: {"status": "completed"}, "", [1.0], 0),
    "once": (once(failing("server_error", "infrastructure")), "", [None, 1.0], 0),
    "for good": (failing("server_error", "infrastructure"), "", [None] * 3, 3),
    "no retries": (failing("server_error", "infrastructure"), "--retries 0", [None], 3),
    "one retry": (failing("server_error", "infrastructure"), "--retries 1", [None] * 2, 3),
    "public core": (failing("internal_error"), "--retries 1", [None] * 2, 3),
    "the agent's doing, once": (once(died), "", [None, 1.0], 0),
    "the agent's doing, twice": (died, "", [None, 0.0], 0),
    "policy": (failing("context_length_exceeded"), "", [0.0], 0),
    "budget": (failing("session_budget_exceeded", "budget"), "", [0.0], 0),
    "wrong key of the model": (failing("authentication_error", "provider"), "", [None], 3),
    "no such model": (failing("resource_not_found", "provider"), "", [None], 3),
    "no credit": (failing("credit_balance_exhausted", "provider"), "", [None], 3),
    "cancelled by someone": (lambda session: {"status": "cancelled"}, "", [None], 3),
}


@pytest.mark.parametrize("name", ATTEMPTS)
def test_attempts(tmp_path: Path, runs: Helper, name: str) -> None:
    """R5, T8, S16: each attempt is a line with its usage and a session of its own; one of them at most is final."""
    turn, arguments, rewards, code = ATTEMPTS[name]
    with trial(tmp_path / "one", runs, Script(turn=turn)) as one:
        done = one.begin(f"--json summary.json {arguments}")
    assert (done.code, [line["reward"] for line in done.lines]) == (code, rewards), done.err
    assert [line["attempt"] for line in done.lines] == list(range(1, len(rewards) + 1))
    assert [line["final"] for line in done.lines] == [reward is not None for reward in rewards]
    assert len({line["rollout_id"] for line in done.lines}) == 1
    assert len({line["session_id"] for line in done.lines}) == len(rewards) and not one.deployment.alive
    keys = {key for key, _ in one.deployment.requests}
    assert len(keys) == len(rewards)
    used = sum(line["usage"]["total_tokens"] for line in done.lines if line["usage"])
    assert json.loads((one.folder / "summary.json").read_text())["tokens"] == used


def test_agents_failure_counts_across_processes(tmp_path: Path, runs: Helper) -> None:
    """No loser turns 0.0 into null by dying, however often the run is resumed."""
    with trial(tmp_path / "one", runs, Script(turn=died)) as one:
        assert one.begin("--retries 0").code == 3
        done = one.resume("--retries 0")
        assert done.code == 0 and [line["reward"] for line in done.lines] == [None, 0.0]
        assert "the policy's own" in done.lines[1]["error"]


def test_one_of_many_whose_endpoint_fails(tmp_path: Path, runs: Helper) -> None:
    """T8."""

    def turn(session: Session) -> Json:
        bad = session.body["metadata"]["sample"] == "7"
        return failure("server_error: HTTP 500", "provider") if bad else {"status": "completed"}

    with trial(tmp_path / "one", runs, Script(turn=turn)) as one:
        done = one.begin("--samples 100 --concurrency 32")
    assert done.code == 3 and len(final(done.lines)) == 99 and len(done.lines) == 102
    assert "99 of 100 scored" in done.out and "500" in next(x["error"] for x in done.lines if x["reward"] is None)


STATUSES = [(400, 1), (401, 1), (403, 1), (404, 1), (422, 1), (408, 3), (429, 3), (500, 3), (502, 3), (503, 3)]


@pytest.mark.parametrize(("status", "creates"), STATUSES)
def test_statuses_of_a_create_that_are_sent_again(tmp_path: Path, runs: Helper, status: int, creates: int) -> None:
    refused = (status, {"code": "x", "message": "why"}, {})
    with trial(tmp_path / "one", runs, Script(refuse={"create": [refused] * 2})) as one:
        done = one.begin("")
    assert one.deployment.calls["create"] == creates and len(done.lines) == 1
    assert (done.code, done.line["status"]) == ((0, "completed") if creates == 3 else (3, "error"))
    assert creates == 3 or str(status) in done.line["error"]


@pytest.mark.parametrize("refusal", [FULL, DOWN], ids=["429", "500"])
def test_retry_after_is_respected(tmp_path: Path, runs: Helper, refusal: Refusal) -> None:
    late = (refusal[0], refusal[1], {"Retry-After": "2"})
    with trial(tmp_path / "one", runs, Script(refuse={"create": [late]})) as one:
        done = one.begin("")
    first, second = (moment for moment, _, _ in one.deployment.creates)
    assert done.code == 0 and second - first >= 2.0


def test_lost_answer_and_trouble_after_it_leave_one_session(tmp_path: Path, runs: Helper) -> None:
    """A4: the first create made a session, and its answer was lost; keys are ignored; the next ones fail, too."""
    script = Script(lose_create=1, honour_keys=False, turn_seconds=0.2, refuse={"list": [DOWN, WRONG]})
    with trial(tmp_path / "one", runs, script) as one:
        done = one.begin("--retries 0")
    assert len(one.deployment.sessions) == 1 and not one.deployment.alive, done.err


HOSTILE: list[Json] = [
    {"status": "completed", "usage": [1]},
    {"status": "completed", "usage": {"total_tokens": "many"}},
    {"status": "completed", "usage": {"total_tokens": -5, "input_tokens": True}},
    {"status": "completed", "x_agents_core": "text"},
    {"status": "completed", "x_agents_core": {"timings": [1], "usage_observed": 7}},
    {"status": "failed", "error": "text", "x_agents_core": {"failure": "text"}},
    {"status": "failed", "error": {"code": ["x"], "message": None}, "x_agents_core": {"failure": {"reason": {}}}},
    {"status": ["completed"]},
]


@pytest.mark.parametrize("turn", HOSTILE, ids=str)
def test_turn_of_odd_types_breaks_nothing(tmp_path: Path, runs: Helper, turn: Json) -> None:
    with trial(tmp_path / "one", runs, Script(turn=turn)) as one:
        done = one.begin("--retries 0 --timeout 1.5")
        assert done.code in (0, 3) and len(done.lines) == 1 and not one.deployment.alive
        assert one.resume("--retries 0").code in (0, 3)


# --- A budget -------------------------------------------------------------------------------------


def test_budget_of_tokens(tmp_path: Path, runs: Helper) -> None:
    """T10: failed attempts count; once it is used up nothing starts; the run says so, and can be resumed."""
    with trial(tmp_path / "one", runs, Script(turn=once(failing("server_error", "infrastructure")))) as one:
        done = one.begin("--samples 5 --concurrency 1 --max-tokens 45 --json summary.json")
        # 15 tokens an attempt: a failed one, a good one, a failed one.
        assert done.code == 3 and [line["reward"] for line in done.lines] == [None, 1.0, None]
        assert "45 tokens are used, --max-tokens allows 45" in done.err and done.err.count("another follows") == 1
        assert "--resume" in done.err and one.deployment.calls["create"] == 3 and "1 of 5 scored" in done.out
        again = one.resume("--max-tokens 45")
        assert again.code == 3 and one.deployment.calls["create"] == 3
        ended = one.resume()
        assert ended.code == 0 and len(final(ended.lines)) == 5


@pytest.mark.parametrize(
    ("members", "tokens"),
    [
        ({"usage": None, "x_agents_core": {"usage_observed": {"input_tokens": 30, "output_tokens": 7}}}, 37),
        ({"usage": {"input_tokens": 10, "output_tokens": 4}}, 14),
        ({"usage": None}, 0),
    ],
    ids=["observed", "parts", "unknown"],
)
def test_what_counts(tmp_path: Path, runs: Helper, members: Json, tokens: int) -> None:
    """T10, A12: what was seen counts where the sum is not known; what is unknown is said to be."""
    known: Json = {"x_agents_core": {"usage_source": "egress"}, **members}
    known["x_agents_core"] |= {"usage_source": "egress"}
    with trial(tmp_path / "one", runs, Script(turn={"status": "completed", **known}, usage=None)) as one:
        done = one.begin("--json summary.json --max-tokens 1 --samples 2 --concurrency 1")
        summary: Json = json.loads((one.folder / "summary.json").read_text())
    assert len(done.lines) == (1 if tokens else 2) and summary["tokens"] == tokens
    assert summary["attempts_of_unknown_tokens"] == (0 if tokens else 2)


# --- Gates ----------------------------------------------------------------------------------------

GATES: list[tuple[str, float, int]] = [
    # arguments, share of eight rollouts that are never measured, exit code; half of the measured are right
    ("", 0, 0),
    ("--min-reward 0.5", 0, 0),
    ("--min-reward 0.51", 0, 1),
    ("--min-pass 1=0.5 --min-pass 8=1", 0, 0),
    ("--min-pass 1=0.5 --min-pass 2=0.9", 0, 1),
    ("--min-reward 0.1", 0.25, 3),
    ("--min-reward 0.1 --max-error-rate 0.25", 0.25, 0),
    ("--min-reward 0.9 --max-error-rate 0.25", 0.25, 1),
    ("--min-reward 0.1 --max-error-rate 0.2", 0.25, 1),
    ("--max-error-rate 0", 0, 0),
    ("--max-error-rate 0.5", 1, 1),
    ("--min-reward 0.9", 1, 3),
    ("", 1, 3),
]


@pytest.mark.parametrize(("arguments", "lost", "code"), GATES)
def test_gates(tmp_path: Path, runs: Helper, arguments: str, lost: float, code: int) -> None:
    """R12, R13."""

    def turn(session: Session) -> Json:
        unmeasured = int(session.body["metadata"]["sample"]) >= 8 * (1 - lost)
        return failure("credit_balance_exhausted") if unmeasured else {"status": "completed"}

    with trial(tmp_path / "one", runs, Script(answer=by_place, turn=turn)) as one:
        done = one.begin(f"--samples 8 --concurrency 8 --json s.json --junit s.xml {arguments}")
        summary: Json = json.loads((one.folder / "s.json").read_text())
    assert done.code == summary["exit_code"] == code, done.err
    assert bool(summary["unmet"]) == (bool(arguments) and code != 0)
    assert all(line in done.err for line in summary["unmet"])


def test_gate_does_not_forgive_what_never_ran(tmp_path: Path, runs: Helper) -> None:
    """A second harness that the budget left nothing for is measured by the same gates."""
    with trial(tmp_path / "one", runs) as one:
        words = "--harness a --harness b --concurrency 1 --max-tokens 1 --min-reward 0.5 --max-error-rate 0.5"
        done = one.begin(f"{words} --junit s.xml")
        assert done.code == 1 and "b · default: error rate 1.000" in done.err
        assert any(line.startswith("| b ") and "n/a" in line for line in done.out.splitlines())
        assert "not run" in (one.folder / "s.xml").read_text()


def test_gate_does_not_forgive_a_run_that_broke(tmp_path: Path, runs: Helper) -> None:
    with trial(tmp_path / "one", runs) as one:
        done: Any = one.run("--out /dev/full --max-error-rate 1")
        assert done.code == 3 and "/dev/full" in done.err
