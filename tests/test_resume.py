"""Nothing lost, nothing doubled: a run that was killed, cut, torn or interrupted goes on where it was.

Real runs of the script as forked processes (tests/forked.py) against a deployment that follows a script. The ids name
the rows of the acceptance trials.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from forked import Helper
from scripted_deployment import USAGE, Json, Script, Session
from test_script import DOWN, environment, failure, write_tasks
from trial import Trial, by_place, final, helping, measured, trial

SEEDS, REQUESTS = 200, 24  # requests: of four rollouts at least
PLAN = "--samples 2 --retries 2"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Helper]:
    with helping(tmp_path_factory.mktemp("helper")) as helper:
        yield helper


@pytest.fixture
def one(tmp_path: Path, runs: Helper) -> Iterator[Trial]:
    with trial(tmp_path / "one", runs) as found:
        yield found


def whole_lines(path: Path) -> list[bytes]:
    return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


# --- T6: killed at any moment, cut at any byte --------------------------------------------------


def test_killed_at_any_moment_and_cut_at_any_byte(tmp_path: Path, runs: Helper) -> None:
    """T6, T7: 200 seeds."""
    with trial(tmp_path / "shared", runs, tasks=()) as shared:
        reference = folder_of(shared, tmp_path / "reference")
        assert reference.begin(f"{PLAN} --json summary.json").code == 0
        expected = measured(reference.folder / "summary.json")
        assert expected[0]["scored"] == 4 and expected[0]["mean reward"] == 0.5
        with ThreadPoolExecutor(12) as pool:
            trials = [folder_of(shared, tmp_path / f"seed{seed}") for seed in range(SEEDS)]
            outcomes = list(pool.map(kill_and_resume, trials, range(SEEDS), [expected] * SEEDS))
        assert not shared.deployment.alive
    # Without these the trial would have tried nothing.
    for happened in ("killed", "cut", "kept some", "kept none", "went on with a session"):
        assert sum(happened in outcome for outcome in outcomes) > 3, happened


def folder_of(shared: Trial, folder: Path) -> Trial:
    """A trial of its own tasks at a shared deployment, which tells them apart by the instruction."""
    folder.mkdir()
    write_tasks(folder, ("a", "b"))
    for name in ("a", "b"):
        (folder / "tasks" / name / "instruction.md").write_text(f"{folder.name} {name}")
    return Trial(folder, shared.deployment, shared.helper)


def kill_and_resume(one: Trial, seed: int, expected: list[Json]) -> set[str]:
    """Returns what happened."""
    chance, happened = random.Random(seed), set()
    inputs, moment = [f"{one.folder.name} {name}" for name in ("a", "b")], chance.randint(1, REQUESTS)
    arguments = f"{PLAN} --concurrency {chance.randint(1, 4)}"
    process = one.start(f"--out OUT {arguments}")
    one.deployment.wait_for(lambda: sum(one.deployment.calls_of[name].total() for name in inputs) >= moment, 60)
    time.sleep(chance.random() * 0.005)  # no moment is to be favoured: the request is answered, or its line written
    process.kill()
    happened |= {"killed"} if process.wait() == -signal.SIGKILL else {"ended"}
    if chance.random() < 0.5:
        happened.add("cut")
        os.truncate(one.path, chance.randint(0, one.path.stat().st_size))
    kept = whole_lines(one.path)
    happened.add("kept some" if kept else "kept none")
    before = {line["rollout_id"]: one.creates(line["rollout_id"]) for line in map(json.loads, kept) if line["final"]}
    left = {session.id for session in one.deployment.alive if session.body["input"] in inputs}
    done = one.resume(f"{arguments} --json summary.json")
    assert done.code == 0, (seed, done.err)
    happened |= {"went on with a session"} if left & {line["session_id"] for line in done.lines} else set()
    lines = whole_lines(one.path)
    assert lines[: len(kept)] == kept, f"seed {seed}: a good line was lost"
    assert len(final(done.lines)) == len(set(final(done.lines))) == 4, f"seed {seed}"
    assert {name: one.creates(name) for name in before} == before, f"seed {seed}: what was finished ran again"
    assert measured(one.folder / "summary.json") == expected, f"seed {seed}"
    for run_id in {s.body["metadata"]["run_id"] for s in one.deployment.alive if s.body["input"] in inputs}:
        assert not kept, f"seed {seed}: a session was left behind"
        assert one.run(f"--reap {run_id}").code == 0  # no line told the resumed run of this one
    return happened


# --- Reading a file again -----------------------------------------------------------------------


def test_resumed_twice_with_a_doubled_line(one: Trial) -> None:
    """T7, R1, R6: nothing changes, the summary least of all."""
    assert one.begin("--samples 4 --json first.json").code == 0
    lines, requests = whole_lines(one.path), one.deployment.calls.total()
    one.path.write_bytes(b"".join([*lines, lines[1]]))
    tables = [one.resume(f"--json {name}.json") for name in ("second", "third")]
    summaries = [json.loads((one.folder / f"{n}.json").read_text()) for n in ("first", "second", "third")]
    assert summaries[0] == summaries[1] == summaries[2] and summaries[0]["tokens"] == 60
    assert tables[0].out == tables[1].out and [done.code for done in tables] == [0, 0]
    assert one.deployment.calls.total() == requests and whole_lines(one.path) == [*lines, lines[1]]


OTHER = b'{"rollout_id": "x", "reward": 1.0, "task": "t"}\n'
WRONG_TYPES: list[Json] = [
    {"reward": "1.0"},
    {"reward": True},
    {"usage": [1]},
    {"options": "none"},
    {"failure": "dead"},
    {"duration_s": None},
    {"error": 5},
    {"attempt": True},
    {"sample": "0"},
    {"task_digest": None},
]


@pytest.mark.parametrize(
    "odd",
    [
        b"garbage\n",
        b"\n\n  \n",
        b"[" * 5000 + b"\n",
        b"\xff\x00\n",
        b'{"a": NaN}\n',
        OTHER,
        *WRONG_TYPES,
    ],
    ids=str,
)
def test_line_that_is_no_record(one: Trial, odd: bytes | Json) -> None:
    """R3: told with its number, never deleted, the others used."""
    one.begin("--samples 2")
    first, second = whole_lines(one.path)
    if isinstance(odd, dict):
        odd = json.dumps({**json.loads(second), "rollout_id": "of another", **odd}).encode() + b"\n"
    one.path.write_bytes(first + odd + second)
    done = one.start("--resume OUT")
    assert done.wait() == 0 and "Traceback" not in done.err
    assert one.path.read_bytes() == first + odd + second and one.deployment.calls["create"] == 2
    assert ("line 2 is no record" in done.err) == bool(odd.strip())


def test_record_with_unknown_members_is_a_record(one: Trial) -> None:
    one.begin("")
    (line,) = whole_lines(one.path)
    one.path.write_bytes(json.dumps({**json.loads(line), "self": 1, "tokens": 2, "new": {}}).encode() + b"\n")
    assert one.resume().code == 0 and one.deployment.calls["create"] == 1


@pytest.mark.parametrize("tail", [b'{"run_id": "', b"\0" * 500, b"}", b'"'])
def test_torn_line_is_cut_before_anything_is_appended(one: Trial, tail: bytes) -> None:
    """R2."""
    one.begin("--samples 3")
    lines = whole_lines(one.path)
    one.path.write_bytes(b"".join(lines[:2]) + tail)
    done = one.resume()
    assert "line 3 is torn" in done.err and done.err.index("torn") < done.err.index("[1/1]")
    assert done.code == 0 and whole_lines(one.path)[:2] == lines[:2] and len(final(done.lines)) == 3


def test_whole_line_without_its_end_is_kept(one: Trial) -> None:
    one.begin("--samples 2")
    data = one.path.read_bytes()
    one.path.write_bytes(data[:-1])
    assert one.resume().code == 0 and one.path.read_bytes() == data


def test_file_without_a_line_begins_a_run_and_says_so(one: Trial) -> None:
    one.path.write_bytes(b"")
    done = one.resume("--samples 2")
    assert done.code == 0 and len(done.lines) == 2 and "holds no rollout yet" in done.err


# --- Another run ----------------------------------------------------------------------------------


def edit(name: str, text: str) -> Callable[[Trial], None]:
    def change(one: Trial) -> None:
        path = one.folder / "tasks" / "t" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

    return change


DIFFERENCES: dict[str, tuple[Callable[[Trial], None], str, str]] = {
    "expected": (edit("expected.json", '{"x": 2}'), "", "task t has changed"),
    "instruction": (edit("instruction.md", "Else."), "", "task t has changed"),
    "file": (edit("files/new", "1"), "", "task t has changed"),
    "rules": (edit("task.json", '{"grade": "fraction"}'), "", "task t has changed"),
    "another task": (lambda one: write_tasks(one.folder, ["u"]), "", "tasks: 1 then, 2 now"),
    "samples": (lambda one: None, "--samples 5", "samples: 3 then, 5 now"),
    "harness": (lambda one: None, "--harness codex", "harness: []"),
    "model": (lambda one: None, "--model m", "model: []"),
    "timeout": (lambda one: None, "--timeout 5", "timeout: 900.0 then, 5.0 now"),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_other_run_is_refused_and_forced(one: Trial, name: str) -> None:
    """R4: refused with the difference named, recorded when forced, and then not asked for again."""
    change, arguments, says = DIFFERENCES[name]
    one.begin("--samples 3")
    keep = whole_lines(one.path)[:1]
    one.path.write_bytes(keep[0])
    change(one)
    refused = one.resume(arguments)
    assert refused.code == 2 and says in refused.err and "--force" in refused.err and whole_lines(one.path) == keep
    assert one.deployment.calls["create"] == 3
    forced = one.resume(f"{arguments} --force")
    assert forced.code == 0 and whole_lines(one.path)[:1] == keep
    assert all(says in forced_line["options"]["forced"][0] for forced_line in forced.lines[1:])
    assert len(forced.lines) > 1
    again = one.resume()
    assert again.code == 0 and len(again.lines) == len(forced.lines), again.err


def test_options_are_recalled(one: Trial) -> None:
    one.begin("--samples 3 --harness codex --model m --timeout 77")
    lines = whole_lines(one.path)
    one.path.write_bytes(lines[0])
    done = one.resume()
    assert done.code == 0 and len(final(done.lines)) == 3 and done.lines[2]["options"] == done.lines[0]["options"]
    assert {(line["harness"], line["model"]) for line in done.lines} == {("codex", "m")}


def test_two_runs_may_not_write_one_file(one: Trial) -> None:
    process = one.start("--out OUT --samples 2")
    one.deployment.wait_for(lambda: one.deployment.calls["create"] >= 1)
    second = one.run("--resume OUT")
    assert second.code == 2 and "another run is writing" in second.err
    assert one.end(process).code == 0
    assert one.resume().code == 0, "the lock ends with its run"


# --- What is owed ---------------------------------------------------------------------------------


def test_errors_are_owed_again_as_new_attempts(tmp_path: Path, runs: Helper) -> None:
    """R5, R6, T5: earlier attempts and their usage stay; ids stay; the group is complete in the end."""
    broken = {"on": True}

    def turn(session: Session) -> Json:
        bad = broken["on"] and session.body["metadata"]["sample"] == "1"
        return failure("server_error", "infrastructure") if bad else {"status": "completed"}

    with trial(tmp_path / "one", runs, Script(answer=by_place, turn=turn)) as one:
        first = one.begin("--samples 8 --retries 0 --json first.json")
        assert first.code == 3 and len(first.lines) == 8 and len(final(first.lines)) == 7
        assert "0 of 1 groups complete" in first.out and "--resume" in first.err
        broken["on"] = False
        done = one.resume("--refill --json second.json")
        assert done.code == 0 and one.deployment.calls["create"] == 9 and len(final(done.lines)) == 8
        assert done.lines[:8] == first.lines and done.lines[8]["attempt"] == 2 and done.lines[8]["sample"] == 1
        failed = next(line for line in done.lines if line["reward"] is None)
        assert (
            failed["usage"] == USAGE
            and failed["final"] is False
            and failed["rollout_id"] == done.lines[8]["rollout_id"]
        )
        assert len({(line["run_id"], line["group_id"]) for line in done.lines}) == 1
        (before,), (after,) = (json.loads((one.folder / f"{n}.json").read_text())["rows"] for n in ("first", "second"))
        assert (before["complete groups"], after["complete groups"]) == (0, 1)
        assert json.loads((one.folder / "second.json").read_text())["tokens"] == 9 * 15


def test_refill_owes_only_groups_that_have_begun(tmp_path: Path, runs: Helper) -> None:
    with trial(tmp_path / "one", runs, tasks=("a", "b")) as one:
        one.begin("--samples 3")
        lines = [line for line in whole_lines(one.path) if json.loads(line)["task"] == "a"]
        one.path.write_bytes(lines[0])
        done = one.resume("--refill")
        assert done.code == 0 and len(done.lines) == 3 and {line["task"] for line in done.lines} == {"a"}
        assert one.resume().code == 0 and len(whole_lines(one.path)) == 6


def test_refill_of_nothing_is_an_error(tmp_path: Path, runs: Helper) -> None:
    """R9: an empty plan is no success."""
    with trial(tmp_path / "one", runs, Script(turn=failure("server_error", "infrastructure"))) as one:
        assert one.begin("--retries 0").code == 3
        done = one.resume("--refill")
        assert done.code == 2 and "no group of the run has begun" in done.err


def test_interrupted_run_is_completed(tmp_path: Path, runs: Helper) -> None:
    """T19."""
    hang = {"on": True}

    def turn(session: Session) -> Json:
        return {"status": "in_progress" if hang["on"] else "completed"}

    with trial(tmp_path / "one", runs, Script(answer=by_place, turn=turn)) as one:
        process = one.start("--out OUT --samples 5 --concurrency 2")
        one.deployment.wait_for(lambda: one.deployment.calls["turns"] >= 2)
        process.kill(signal.SIGINT)
        first = one.end(process)
        assert first.code == 130 and len(first.lines) == 2 and not one.deployment.alive
        assert {(line["status"], line["reward"]) for line in first.lines} == {("cancelled", None)}
        hang["on"] = False
        command = first.err.split("to go on: ")[1].splitlines()[0]
        assert "--resume" in command and f"--tasks={one.folder}/tasks" in command and "--concurrency=2" in command
        done = one.resume()
        assert done.code == 0 and len(final(done.lines)) == 5 and done.out.count("| 5 ") == 0


# --- What a killed run left -----------------------------------------------------------------------


def left_behind(one: Trial, hang: dict[str, bool]) -> str:
    """Kill a run of 4 rollouts that has one line and two sessions. Returns the run's id."""
    process = one.start("--out OUT --samples 4 --concurrency 2")
    one.deployment.wait_for(lambda: one.deployment.calls["delete"] >= 1 and len(one.deployment.alive) == 2)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    hang["on"] = False
    (line,) = map(json.loads, whole_lines(one.path))
    assert len(one.deployment.alive) == 2
    return str(line["run_id"])


@pytest.fixture
def hanging(tmp_path: Path, runs: Helper) -> Iterator[tuple[Trial, dict[str, bool]]]:
    """Only sample 0 ends, until told otherwise."""
    hang = {"on": True}

    def turn(session: Session) -> Json:
        stuck = hang["on"] and session.body["metadata"]["sample"] != "0"
        return {"status": "in_progress" if stuck else "completed"}

    with trial(tmp_path / "one", runs, Script(answer=by_place, turn=turn)) as one:
        yield one, hang


def test_session_of_a_killed_run_is_gone_on_with(hanging: tuple[Trial, dict[str, bool]]) -> None:
    """A4, T3: found by metadata, not paid twice."""
    one, hang = hanging
    left_behind(one, hang)
    alive = {session.id for session in one.deployment.alive}
    done = one.resume()
    assert done.code == 0 and one.deployment.calls["create"] == 4 and not one.deployment.alive
    assert alive <= {line["session_id"] for line in done.lines} and {line["attempt"] for line in done.lines} == {1}


def test_reap_ends_what_is_left_of_one_run(hanging: tuple[Trial, dict[str, bool]], tmp_path: Path) -> None:
    """T3."""
    one, hang = hanging
    run_id = left_behind(one, hang)
    other = one.run("--reap 20000101T000000Z-0000")
    assert other.code == 0 and "0 sessions" in other.out and len(one.deployment.alive) == 2
    done = one.run(f"--reap {run_id}")
    assert done.code == 0 and "2 sessions" in done.out and not one.deployment.alive
    ended = one.resume()
    assert ended.code == 0 and len(final(ended.lines)) == 4


def test_session_of_a_task_that_changed_is_not_gone_on_with(hanging: tuple[Trial, dict[str, bool]]) -> None:
    one, hang = hanging
    left_behind(one, hang)
    alive = {session.id for session in one.deployment.alive}
    (one.folder / "tasks" / "t" / "instruction.md").write_text("Solve another.")
    done = one.resume("--force")
    assert done.code == 0 and not one.deployment.alive and len(final(done.lines)) == 4
    assert not alive & {line["session_id"] for line in done.lines if line["final"]}


def test_reap_needs_a_deployment(one: Trial) -> None:
    done = one.run("--reap x", OPENAI_BASE_URL="")
    assert done.code == 2 and "OPENAI_BASE_URL" in done.err


# --- Files that cannot be written -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--out nosuch/out.jsonl", "nosuch"),
        ("--out tasks", "tasks"),
        ("--resume nosuch.jsonl", "nosuch.jsonl"),
        ("--resume tasks", "tasks"),
        ("--resume OUT --out OUT", "--out"),
        ("--json nosuch/x.json", "nosuch"),
        ("--junit tasks", "tasks"),
        ("--refill", "--resume"),
        ("--force", "--resume"),
        ("--task nosuch", "there are: t"),
        ("--min-pass 1", "K=V"),
        ("--min-reward 1.5", "0 to 1"),
        ("--k 0", "--k"),
        ("--regrade OUT --harness codex", "--regrade"),
    ],
)
def test_refused_before_any_session(one: Trial, arguments: str, says: str) -> None:
    """R9, T15."""
    done = one.run(arguments)
    assert done.code == 2 and says in done.err and len(done.err.splitlines()) == 1
    assert not one.deployment.calls


def test_disk_that_fills_up(one: Trial) -> None:
    """R8: after some lines no more fit; what is there still loads, and the run can go on elsewhere."""
    one.begin("--samples 4")
    lines = whole_lines(one.path)
    one.path.write_bytes(b"".join(lines[:2]))
    limit = len(b"".join(lines[:2])) + 100
    words = [sys.executable, "-c", LIMITED, str(limit), str(Path(__file__).parent.parent), *resume_words(one)]
    env = environment(one.deployment.base_url)
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 3 and "cannot write" in done.stderr and str(one.path) in done.stderr, done.stderr
    assert whole_lines(one.path) == lines[:2] and not one.deployment.alive and "Traceback" not in done.stderr
    ended = one.resume()
    assert ended.code == 0 and len(final(ended.lines)) == 4


LIMITED = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
sys.path.insert(0, sys.argv[2])
import rl_eval
sys.exit(rl_eval.main(sys.argv[3:]))
"""


def resume_words(one: Trial) -> list[str]:
    return ["--tasks", str(one.folder / "tasks"), "--resume", str(one.path)]


# --- Order and time -------------------------------------------------------------------------------


def test_summary_does_not_depend_on_the_order_of_completion(tmp_path: Path, runs: Helper) -> None:
    """R16, R18: the same file in any order gives the same summary, and so does any number in flight."""
    with trial(tmp_path / "one", runs, tasks=("a", "b", "c")) as one:
        one.begin("--samples 3 --concurrency 9 --json first.json")
        lines = whole_lines(one.path)
        for seed in range(3):
            random.Random(seed).shuffle(lines)
            one.path.write_bytes(b"".join(lines))
            one.resume(f"--json other{seed}.json")
            first, other = ((one.folder / f"{name}.json").read_text() for name in ("first", f"other{seed}"))
            assert first == other


def test_line_tells_what_makes_it_auditable(one: Trial) -> None:
    done = one.begin("--model m --harness codex")
    line: dict[str, Any] = done.line
    assert line["task_digest"] and line["run_id"] and line["attempt"] == 1 and line["script_version"]
    assert line["options"]["model"] == ["m"] and line["options"]["timeout"] == 900.0
    assert line["deployment"]["base_url"] == one.deployment.base_url.rstrip("/") + "/"
    assert set(line["timings"]) == {"queued", "preparing", "running", "settling", "grading"}
    known = [seconds for seconds in line["timings"].values() if seconds is not None]
    assert len(known) == 4 and min(known) >= 0 and sum(known) <= line["duration_s"] + 0.01


def test_trouble_while_the_leftovers_are_looked_for(one: Trial) -> None:
    one.begin("--samples 2")
    one.path.write_bytes(whole_lines(one.path)[0])
    one.deployment.script.refuse["list"] = [DOWN] * 2
    assert one.resume().code == 0 and one.deployment.calls["list"] == 3


# --- Graded again ---------------------------------------------------------------------------------


def test_regrade(tmp_path: Path, runs: Helper) -> None:
    """G33: new rewards by the tasks as they are now; no request; the old file untouched; errors stay errors."""

    def turn(session: Session) -> Json:
        bad = session.body["metadata"]["sample"] == "3"
        return failure("credit_balance_exhausted") if bad else {"status": "completed"}

    with trial(tmp_path / "one", runs, Script(answer=by_place, turn=turn)) as one:
        assert one.begin("--samples 4").code == 3
        old, requests = one.path.read_bytes(), one.deployment.calls.total()
        edit("expected.json", '{"x": 2}')(one)
        again = one.start("--regrade OUT --out again.jsonl --json again.json")
        assert again.wait() == 3 and "3 rewards of 4 changed" in again.err
        assert one.path.read_bytes() == old and one.deployment.calls.total() == requests
        before, after = (
            {line["sample"]: line for line in map(json.loads, (one.folder / name).read_text().splitlines())}
            for name in ("out.jsonl", "again.jsonl")
        )
        assert [after[n]["reward"] for n in range(4)] == [0.0, 1.0, 0.0, None]
        assert {name: after[1][name] for name in ("rollout_id", "items", "usage", "answer")} == {
            name: before[1][name] for name in ("rollout_id", "items", "usage", "answer")
        }
        assert after[1]["task_digest"] != before[1]["task_digest"]
        assert json.loads((one.folder / "again.json").read_text())["rows"][0]["scored"] == 3
        edit("expected.json", '{"x": 2, "y": 1}')(one)
        edit("task.json", '{"grade": "fraction"}')(one)
        third = one.start("--regrade again.jsonl --out third.jsonl --min-reward 0.1 --max-error-rate 0.25")
        assert third.wait() == 0, third.err
        rewards = [json.loads(line)["reward"] for line in (one.folder / "third.jsonl").read_text().splitlines()]
        assert sorted(rewards, key=str) == [0.0, 0.0, 0.5, None]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [("--regrade OUT --out OUT", "File exists"), ("--regrade OUT --task t", "not among"), ("--regrade no", "no")],
)
def test_regrade_that_cannot_be(tmp_path: Path, runs: Helper, arguments: str, says: str) -> None:
    with trial(tmp_path / "one", runs, tasks=("t", "u")) as one:
        one.begin("")
        old = one.path.read_bytes()
        done = one.run(arguments)
        assert done.code == 2 and says in done.err and one.path.read_bytes() == old
        assert not (one.folder / "runs").exists()


# --- Looking, and odd names -----------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--list", "--dry-run"])
def test_looking_changes_nothing(one: Trial, option: str) -> None:
    first = one.run(f"{option} --samples 3 --harness a --harness b --out OUT")
    assert first.code == 0 and "6 rollouts would run" in first.out and "a · default: 3 rollouts" in first.out
    assert ("| t " in first.out) == (option == "--list") and not one.path.exists()
    one.begin("--samples 3")
    torn = whole_lines(one.path)[0] + b'{"torn'
    one.path.write_bytes(torn)
    second = one.start(f"--resume OUT {option}")
    assert second.wait() == 0 and "2 rollouts would run" in second.out and one.path.read_bytes() == torn
    assert one.deployment.calls["create"] == 3


NAMES = ["two words", "ünïcode-日本", "a.b", "..c", "-d", "x" * 128, "'quoted' $(id) `id`", "|&<>"]


def test_odd_task_names_work_end_to_end(tmp_path: Path, runs: Helper) -> None:
    """R17."""
    names = [name for name in NAMES if not name.startswith(".")]
    with trial(tmp_path / "one", runs, tasks=names) as one:
        done = one.begin("--concurrency 8 --junit j.xml --json j.json")
        assert done.code == 0 and {line["task"] for line in done.lines} == set(names)
        assert one.resume().code == 0 and one.run("--list").code == 0
        assert sorted(path.name for path in one.folder.iterdir() if path.suffix in (".jsonl", ".json", ".xml")) == [
            "j.json",
            "j.xml",
            "out.jsonl",
        ]


def test_task_whose_file_vanishes_is_an_error_of_its_own(tmp_path: Path, runs: Helper) -> None:
    """G32: trouble with one task leaves the others alone."""

    def answer(session: Session) -> bytes:
        (tmp_path / "one" / "tasks" / "b" / "files" / "sub" / "data.bin").unlink(missing_ok=True)
        return b'{"x": 1}'

    with trial(tmp_path / "one", runs, Script(answer=answer), tasks=("a", "b", "c")) as one:
        done = one.begin("--concurrency 1 --retries 0")
        found = {line["task"]: (line["status"], line["reward"]) for line in done.lines}
        assert found == {"a": ("completed", 1.0), "b": ("error", None), "c": ("completed", 1.0)} and done.code == 3
