"""rl_eval.py as a process, against a deployment that follows a script (tests/scripted_deployment.py).

Judged from outside: exit code, output file, table, and what the deployment was asked. The ids A4 to
T19 name the rows of the acceptance trials.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from scripted_deployment import KEY, USAGE, Deployment, Json, Script, Session, file_of, serving

SCRIPT = Path(__file__).resolve().parent.parent / "rl_eval.py"
FOREVER = math.inf
MODEL_KEY = "sk-canary-of-the-model-endpoint"


@dataclass
class Run:
    """A finished run of the script."""

    code: int
    out: str
    err: str
    lines: list[Json]

    @property
    def line(self) -> Json:
        (line,) = self.lines
        return line

    @property
    def row(self) -> list[str]:
        """The cells of the table's only row."""
        return [cell.strip() for cell in self.out.splitlines()[2].strip("|").split("|")]


def write_tasks(folder: Path, names: Iterable[str] = ("t",), expected: str = '{"x": 1}') -> None:
    for name in names:
        (folder / "tasks" / name / "files" / "sub").mkdir(parents=True)
        (folder / "tasks" / name / "instruction.md").write_text(f"Solve {name}.")
        (folder / "tasks" / name / "expected.json").write_text(expected)
        (folder / "tasks" / name / "solution.sh").write_text("true # canary-of-the-solution")
        (folder / "tasks" / name / "files" / "sub" / "data.bin").write_bytes(b"\x00\xff" + name.encode())


def command(folder: Path, arguments: str) -> list[str]:
    out = [] if "--out" in arguments or "--resume" in arguments else ["--out", str(folder / "out.jsonl")]
    once = [] if "--retries" in arguments else ["--retries", "0"]
    return [sys.executable, str(SCRIPT), "--tasks", str(folder / "tasks"), *out, *once, *arguments.split()]


def environment(base_url: str = "", **more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OPENAI_", "MODEL_"))}
    deployment = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": KEY} if base_url else {}
    return {**kept, **deployment, "PYTHONWARNINGS": "error::ResourceWarning", **more}


def finished(folder: Path, code: int, out: str, err: str) -> Run:
    path = folder / "out.jsonl"
    data = path.read_text() if path.exists() else ""
    assert data == "" or data.endswith("\n")
    assert "Traceback" not in err, err
    return Run(code, out, err, [json.loads(line, parse_constant=refuse) for line in data.splitlines()])


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def run(
    folder: Path, script: Script, arguments: str = "", scripts: dict[str, Script] | None = None, **env: str
) -> tuple[Run, Deployment]:
    """Run the script against a deployment until it ends; by default with one task."""
    if not (folder / "tasks").exists():
        write_tasks(folder)
    with serving(script, scripts) as deployment:
        words, variables = command(folder, arguments), environment(deployment.base_url)
        done = subprocess.run(
            words,
            env={**variables, **env},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd=folder,
        )
    return finished(folder, done.returncode, done.stdout, done.stderr), deployment


@contextmanager
def started(
    folder: Path, script: Script, arguments: str, scripts: dict[str, Script] | None = None
) -> Iterator[tuple[Deployment, subprocess.Popen[str]]]:
    """Start the script against a deployment; killed at the end if it still runs."""
    with serving(script, scripts) as deployment:
        process = subprocess.Popen(
            command(folder, arguments),
            env=environment(deployment.base_url),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            yield deployment, process
        finally:
            process.kill()
            process.communicate()


def usage_error(folder: Path, arguments: str, **env: str) -> str:
    """Run the script with something wrong; return its one line."""
    done = subprocess.run(
        command(folder, arguments),
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert not (folder / "out.jsonl").exists()
    return done.stderr


# --- A sound deployment -----------------------------------------------------------------------


def test_a_run_is_lines_and_a_table(tmp_path: Path) -> None:
    arguments = "--samples 2 --harness codex --harness claude_sdk --model m"
    write_tasks(tmp_path, "ab")
    done, deployment = run(tmp_path, Script(answer=by_sample), arguments)
    assert done.code == 0 and len(done.lines) == 8 and not deployment.alive
    assert {line["reward"] for line in done.lines if line["sample"] == 0} == {1.0}
    assert {line["reward"] for line in done.lines if line["sample"] == 1} == {0.0}
    line = next(line for line in done.lines if line["reward"] == 1.0)
    assert line["status"] == "completed" and line["answer"] == {"x": 1} and line["usage"] == USAGE
    assert line["items"] == [{"id": "item0", "type": "message", "role": "assistant", "content": []}]
    assert line["error"] is None and line["session_id"] and line["turn_id"] and line["duration_s"] > 0
    assert done.out.count("0.500") == 4 and done.out.count("1.000") == 2
    assert "| codex " in done.out and "| claude_sdk " in done.out and "pass@2" in done.out


def by_sample(session: Session) -> bytes:
    return b'{"x": 1}' if session.body["metadata"]["sample"] == "0" else b'{"x": 2}'


def test_what_is_sent(tmp_path: Path) -> None:
    done, deployment = run(tmp_path, Script())
    ((key, body),) = deployment.requests
    assert key.startswith(done.line["rollout_id"])
    assert body["agent"] == {} and body["input"] == "Solve t." and "x_agents_core" not in body
    assert body["metadata"]["rollout_id"] == done.line["rollout_id"]
    assert body["metadata"]["group_id"] == done.line["group_id"]
    assert done.line["rollout_id"].startswith(body["metadata"]["run_id"])
    assert body["environment"]["type"] == "openai_hosted"
    assert body["environment"]["network"] == {"access": "disabled"}
    assert [file["path"] for file in body["environment"]["files"]] == ["/workspace/sub/data.bin"]
    assert file_of(body, "/workspace/sub/data.bin") == b"\x00\xfft"
    assert done.row[:2] == ["default", "default"]
    calls = {"create": 1, "turns": 1, "artifacts": 1, "content": 1, "items": 1, "delete": 1}
    assert deployment.calls == calls


def test_all_zero_is_no_failure(tmp_path: Path) -> None:
    done, _ = run(tmp_path, Script(answer=b"{}"), "--samples 3")
    assert done.code == 0 and done.row[3:7] == ["3", "0.000", "0.000", "0.000"]


def test_nothing_secret_leaves(tmp_path: Path) -> None:
    """T11, S25: nothing of the expected answer is sent; no key is in any output."""
    write_tasks(tmp_path, expected='{"x": "canary-of-the-answer"}')
    coded = base64.b64encode(MODEL_KEY.encode()).decode()
    turn = {"status": "failed", "error": {"code": "internal_error", "message": f"\x1b[31m{MODEL_KEY}\n{KEY}"}}
    script = Script(turn=turn, items=[{"type": "x", "output": f"{MODEL_KEY} {coded} {KEY}", KEY: MODEL_KEY}])
    url = "http://127.0.0.1:9/rollouts/{rollout_id}/v1"
    arguments = f"--harness codex --harness claude_sdk --model m --model-base-url {url}"
    done, deployment = run(tmp_path, script, arguments, MODEL_API_KEY=MODEL_KEY)
    assert done.code == 3 and len(done.lines) == 2
    everything = done.out + done.err + (tmp_path / "out.jsonl").read_text()
    assert not [secret for secret in (MODEL_KEY, KEY, coded, "\x1b") if secret in everything]
    assert "canary" not in json.dumps([{**b, "x_agents_core": None} for _, b in deployment.requests])
    bundles = [body["x_agents_core"]["model_provider"] for _, body in deployment.requests]
    assert sorted(bundle["protocol"] for bundle in bundles) == ["anthropic", "responses"]
    urls = {f"http://127.0.0.1:9/rollouts/{line['rollout_id']}/v1" for line in done.lines}
    assert {bundle["base_url"] for bundle in bundles} == urls
    assert all(bundle["api_key"] == MODEL_KEY for bundle in bundles)


@pytest.mark.parametrize(("concurrency", "samples"), [(1, 3), (16, 40)])
def test_number_in_flight(tmp_path: Path, concurrency: int, samples: int) -> None:
    """R18."""
    script = Script(turn_seconds=0.1, answer=by_sample)
    done, deployment = run(tmp_path, script, f"--samples {samples} --concurrency {concurrency}")
    assert deployment.most_in_flight == concurrency
    assert sorted(line["reward"] for line in done.lines) == [0.0] * (samples - 1) + [1.0]


# --- Cases: one task each, all of them in one run ---------------------------------------------


def failure(code: str, kind: str | None = None) -> Json:
    turn: Json = {"status": "failed", "error": {"code": code, "message": "why"}}
    return turn if kind is None else {**turn, "x_agents_core": {"failure": {"class": kind}}}


FULL = (429, {"code": "rate_limit_exceeded", "message": "full"}, {"Retry-After": "1"})
DOWN = (500, {"code": "internal_error", "message": "down"}, {})
BUSY = (503, {"code": "execution_unavailable", "message": "busy"}, {"Retry-After": "1"})
WRONG = (400, {"code": "invalid_request_error", "message": "wrong", "param": "agent"}, {})
LATE = (500, {}, {"Retry-After": "60"})

ODD_ITEMS: list[Any] = [{"id": f"i{n}", "type": "nosuch", "n": n} for n in range(250)]
ODD_ITEMS[100] |= {"value": math.nan, "text": "\ud800\x00", "output": "x" * 400_000}
ODD_ITEMS[249]["id"] = None


@dataclass
class Case:
    """How the deployment treats a task, and what must come of it."""

    script: Script
    status: str = "completed"
    reward: float | None = 1.0
    says: str | None = None
    """What the record's error holds; None: it is null."""
    calls: Json = field(default_factory=dict)
    """How often the deployment was asked."""


CASES = {
    # G19, G27, G29, A10, A11
    "no answer": Case(Script(answer=None), reward=0.0, says="no answer", calls={"content": 0}),
    "no JSON": Case(Script(answer=b"{"), reward=0.0, says="not valid JSON"),
    "no object": Case(Script(answer=b"[1]"), reward=0.0, says="not a JSON object"),
    "wrong": Case(Script(answer=b'{"x": 2}'), reward=0.0),
    "too large": Case(Script(answer=b'{"x": 1' + b" " * (1 << 20)), reward=0.0, says="larger", calls={"content": 0}),
    "said to be large": Case(Script(size_bytes=200_000_000), reward=0.0, says="larger", calls={"content": 0}),
    "larger than said": Case(Script(answer=b'{"x": 1}' + b" " * (8 << 20), size_bytes=9), reward=0.0, says="larger"),
    "just small enough": Case(Script(answer=b'{"x": 1}' + b" " * ((1 << 20) - 8))),
    "two turns": Case(Script(earlier_turn=True)),
    "many child turns": Case(Script(children=150)),
    "small pages": Case(Script(children=30, page=7)),
    "prefixed ids": Case(Script(prefix="x")),
    # T14, A6, A12
    "odd items": Case(Script(items=ODD_ITEMS)),
    "late usage": Case(Script(usage_reads=2), calls={"turn": 2}),
    "usage unknown": Case(
        Script(usage=None, turn={"status": "completed", "x_agents_core": {"usage_source": "egress"}}),
        calls={"turn": 0},
    ),
    # A19, T8: who caused a failure
    "bare": Case(Script(turn=failure("internal_error")), "error", None, "internal_error"),
    "outputs": Case(Script(turn=failure("sandbox_error", "model")), "failed", 0.0, "sandbox_error"),
    "sandbox": Case(Script(turn=failure("sandbox_error", "environment")), "error", None, "sandbox_error"),
    "budget": Case(Script(turn=failure("session_budget_exceeded", "budget")), "failed", 0.0, "budget"),
    "provider": Case(Script(turn=failure("rate_limit_exceeded", "provider")), "error", None, "rate_limit"),
    "crash": Case(Script(turn=failure("server_error", "infrastructure")), "error", None, "server_error"),
    "context": Case(Script(turn=failure("context_length_exceeded")), "failed", 0.0, "context", {"artifacts": 0}),
    "blocked": Case(Script(turn=failure("cyber_policy")), "failed", 0.0, "cyber_policy"),
    "new code": Case(Script(turn=failure("nosuch")), "error", None, "nosuch"),
    "new class": Case(Script(turn=failure("max_output_tokens", "nosuch")), "error", None, "max_output"),
    "no error": Case(Script(turn={"status": "failed", "error": None}), "error", None, "failed"),
    "cancelled": Case(Script(turn={"status": "cancelled"}), "cancelled", None, "someone else"),
    # A9
    "no turn": Case(
        Script(fail_without_turn=True, prepare_seconds=0.5), "error", None, "before any turn", {"cancel": 0}
    ),
    "no turn, public": Case(
        Script(fail_without_turn=True, public=True, prepare_seconds=0.5), "error", None, "before any turn"
    ),
    "idle while preparing": Case(Script(public=True, prepare_seconds=2.0)),
    "unknown status": Case(Script(turn=lambda s: {"status": "completed" if s.asked(6) else "nosuch"})),
    # T13, A4: a deployment in trouble
    "trouble create": Case(Script(refuse={"create": [FULL, DOWN, BUSY]}), calls={"create": 4}),
    "trouble turns": Case(Script(refuse={"turns": [FULL, DOWN, BUSY]}), calls={"turns": 4}),
    "trouble artifacts": Case(Script(refuse={"artifacts": [FULL, DOWN, BUSY]}), calls={"artifacts": 4}),
    "trouble content": Case(Script(refuse={"content": [FULL, DOWN, BUSY]}), calls={"content": 4}),
    "trouble items": Case(Script(refuse={"items": [FULL, DOWN, BUSY]}), calls={"items": 4}),
    "trouble delete": Case(Script(refuse={"delete": [FULL, DOWN, BUSY]}), calls={"delete": 4}),
    "refused create": Case(Script(refuse={"create": [WRONG]}), "error", None, "400", {"create": 1, "delete": 0}),
    "refused turns": Case(Script(refuse={"turns": [WRONG]}), "error", None, "request_error: wrong", {"turns": 1}),
    "refused artifacts": Case(Script(refuse={"artifacts": [WRONG]}), "error", None, "wrong", {"artifacts": 1}),
    "refused items": Case(Script(refuse={"items": [WRONG]}), says="could not be read"),
    "refused usage": Case(Script(refuse={"turn": [WRONG]}, usage_reads=1), says="could not be read"),
    "lost create": Case(Script(lose_create=2), calls={"create": 1}),
    "lost create, keys ignored": Case(Script(lose_create=2, honour_keys=False), calls={"create": 1}),
    "delete conflicts": Case(Script(delete_conflicts=3), calls={"delete": 4}),
    # G30; a timeout of 8 s holds for all
    "timeout": Case(Script(turn_seconds=FOREVER), "timeout", 0.0, "timeout of 8 s"),
    "timeout while queued": Case(Script(prepare_seconds=FOREVER, turn_seconds=FOREVER), "timeout", None, "not started"),
    "timeout while reserved": Case(
        Script(prepare_seconds=10.0, turn_seconds=FOREVER, public=True), "timeout", 0.0, "timeout of 8 s"
    ),
    "timeout, completion wins": Case(Script(turn_seconds=FOREVER, ignore_cancel=True), says="timeout of 8 s"),
    "timeout, unreachable": Case(Script(refuse={"turns": [DOWN] * 99}), "error", None, "down"),
    "timeout, ended unseen": Case(Script(turn_seconds=7.0, refuse={"turns": [LATE]}), calls={"cancel": 0}),
}


@dataclass
class Cases:
    """The one run of all cases, by name."""

    run: Run
    deployment: Deployment
    lines: dict[str, Json]


@pytest.fixture(scope="module", autouse=True)
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Cases]]:
    """The run of all cases takes 40 s of waiting: it starts first, and the tests of it stand last."""
    folder = tmp_path_factory.mktemp("cases")
    write_tasks(folder, list(CASES))
    scripts = {f"Solve {name}.": case.script for name, case in CASES.items()}
    with started(folder, Script(), "--concurrency 99 --timeout 8", scripts) as (deployment, process):

        def wait() -> Cases:
            out, err = process.communicate(timeout=90)
            done = finished(folder, process.returncode, out, err)
            return Cases(done, deployment, {line["task"]: line for line in done.lines})

        yield wait


@pytest.fixture(scope="module")
def cases(running: Callable[[], Cases]) -> Cases:
    return running()


def test_only_errors_make_no_mean(tmp_path: Path) -> None:
    """T4."""
    done, _ = run(tmp_path, Script(turn=failure("internal_error")), "--samples 2")
    assert done.code == 3 and done.row[2:7] == ["2", "0", "n/a", "n/a", "n/a"]


def test_network_that_is_not_confirmed_stops_the_run(tmp_path: Path) -> None:
    """T12."""
    echoes: dict[str, Json | None] = {"missing": None, "open": {"access": "enabled"}}
    echoes["domains"] = {"access": "disabled", "allowed_domains": ["x.y"]}
    scripts = {f"Solve {name}.": Script(echo_network=e, turn_seconds=FOREVER) for name, e in echoes.items()}
    write_tasks(tmp_path, list(echoes))
    done, deployment = run(tmp_path, Script(), "--samples 5 --concurrency 15", scripts=scripts)
    assert done.code == 3 and 1 <= len(done.lines) <= 15 and not deployment.alive
    assert {(line["status"], line["reward"]) for line in done.lines} == {("error", None)}
    assert all("network" in line["error"] for line in done.lines) and deployment.calls["turns"] == 0


def test_network_failure_starts_no_more(tmp_path: Path) -> None:
    done, deployment = run(tmp_path, Script(echo_network=None), "--samples 9 --concurrency 1")
    assert done.code == 3 and len(done.lines) == 1 and len(deployment.sessions) == 1


def test_wrong_key_is_an_error(tmp_path: Path) -> None:
    done, _ = run(tmp_path, Script(), OPENAI_API_KEY="not-the-deployments-key")
    assert done.code == 3 and "401" in done.line["error"]


def test_deployment_that_is_not_there(tmp_path: Path) -> None:
    """A connection that fails is tried again until the timeout; then it is an error, not a 0.0."""
    write_tasks(tmp_path)
    words, env = command(tmp_path, "--timeout 1.5"), environment("http://127.0.0.1:9/v1")
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=20, check=False)
    ended = finished(tmp_path, done.returncode, done.stdout, done.stderr)
    assert (ended.code, ended.line["status"], ended.line["reward"]) == (3, "error", None)


# --- Clocks that jump -------------------------------------------------------------------------

JUMPING = """
import time
real, calls = time.time, [0]
def jumping(*given):
    calls[0] += 1
    return real() + (3600, -3600, 30 * 365 * 86400)[calls[0] % 3]
time.time = jumping
gmtime = time.gmtime
time.gmtime = lambda *given: gmtime(*(given or (jumping(),)))
"""


def test_a_wall_clock_that_jumps_moves_no_deadline(tmp_path: Path) -> None:
    """R10: an hour on, an hour back, thirty years on, at each look."""
    write_tasks(tmp_path, ["ends", "hangs"])
    (tmp_path / "clock").mkdir()
    (tmp_path / "clock" / "sitecustomize.py").write_text(JUMPING)
    scripts = {"Solve hangs.": Script(turn_seconds=FOREVER)}
    clock = {"PYTHONPATH": str(tmp_path / "clock")}
    done, _ = run(tmp_path, Script(turn_seconds=0.3), "--timeout 2", scripts, **clock)
    found = {line["task"]: line for line in done.lines}
    assert (found["ends"]["status"], found["hangs"]["status"]) == ("completed", "timeout")
    assert 0.3 <= found["ends"]["duration_s"] < found["hangs"]["duration_s"] and found["hangs"]["duration_s"] >= 2
    assert all(seconds is None or seconds >= 0 for line in done.lines for seconds in line["timings"].values())
    again, _ = run(tmp_path, Script(), f"--resume {tmp_path / 'out.jsonl'}", **clock)
    assert again.code == 0 and again.lines == done.lines and again.out == done.out


# --- Interruption -----------------------------------------------------------------------------


def interrupted(folder: Path, process: subprocess.Popen[str]) -> Run:
    out, err = process.communicate(timeout=30)
    return finished(folder, process.returncode, out, err)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_cancels_deletes_and_records(tmp_path: Path, number: signal.Signals) -> None:
    """T19."""
    write_tasks(tmp_path)
    script = Script(turn_seconds=FOREVER)
    with started(tmp_path, script, "--samples 9 --concurrency 3") as (deployment, process):
        deployment.wait_for(lambda: deployment.calls["turns"] >= 6)
        process.send_signal(number)
        done = interrupted(tmp_path, process)
    assert done.code == 130 and len(deployment.sessions) == 3 and not deployment.alive
    assert [(line["status"], line["reward"]) for line in done.lines] == [("cancelled", None)] * 3
    assert done.row[2:5] == ["9", "0", "n/a"]


def test_interruption_at_any_request_leaves_no_session(tmp_path: Path) -> None:
    """R11: each task hangs at another request when the signal comes."""
    operations = ["create", "turns", "artifacts", "content", "items", "delete"]
    write_tasks(tmp_path, operations)
    scripts = {f"Solve {name}.": Script(refuse={name: [DOWN] * 4}) for name in operations}
    with started(tmp_path, Script(), "--concurrency 6", scripts) as (deployment, process):
        deployment.wait_for(lambda: all(deployment.calls_of[f"Solve {n}."][n] >= 1 for n in operations))
        process.send_signal(signal.SIGINT)
        done = interrupted(tmp_path, process)
    assert done.code == 130 and not deployment.alive and len(done.lines) == 6
    statuses = {line["task"]: (line["status"], line["reward"]) for line in done.lines}
    assert statuses.pop("delete") == ("completed", 1.0)
    assert set(statuses.values()) == {("cancelled", None)}


def test_interruption_while_a_create_is_answered_slowly(tmp_path: Path) -> None:
    write_tasks(tmp_path)
    with started(tmp_path, Script(create_seconds=2.0, turn_seconds=FOREVER), "") as (deployment, process):
        deployment.wait_for(lambda: deployment.calls["create"] >= 1)
        process.send_signal(signal.SIGINT)
        done = interrupted(tmp_path, process)
    assert done.code == 130 and len(deployment.sessions) == 1 and not deployment.alive
    assert done.line["session_id"] and done.line["status"] == "cancelled"


def test_second_signal_is_quicker(tmp_path: Path) -> None:
    write_tasks(tmp_path)
    script = Script(turn_seconds=FOREVER, delete_conflicts=10**6)
    with started(tmp_path, script, "--samples 2") as (deployment, process):
        deployment.wait_for(lambda: deployment.calls["turns"] >= 2)
        process.send_signal(signal.SIGINT)
        deployment.wait_for(lambda: deployment.calls["delete"] >= 2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=8)
    done = finished(tmp_path, process.returncode, out, err)
    assert done.code == 130 and len(done.lines) == 2
    assert all("left behind" in line["error"] and line["session_id"] in line["error"] for line in done.lines)


# --- Output -----------------------------------------------------------------------------------


def test_full_disk_stops_the_run(tmp_path: Path) -> None:
    """R8."""
    script = Script(turn=lambda s: {"status": "completed" if s.asked(3) else "in_progress"})
    done, deployment = run(tmp_path, script, "--samples 9 --concurrency 3 --out /dev/full")
    assert done.code == 3 and "/dev/full" in done.err and "No space left" in done.err
    assert not deployment.alive and len(deployment.sessions) <= 4


def test_existing_file_is_never_touched(tmp_path: Path) -> None:
    """R7."""
    write_tasks(tmp_path)
    (tmp_path / "old.jsonl").write_text("old")
    done, deployment = run(tmp_path, Script(), f"--out {tmp_path}/old.jsonl")
    assert done.code == 2 and "old.jsonl" in done.err and not deployment.calls
    assert (tmp_path / "old.jsonl").read_text() == "old"


def test_output_goes_to_runs_by_default(tmp_path: Path) -> None:
    write_tasks(tmp_path)
    with serving(Script()) as deployment:
        words = [sys.executable, str(SCRIPT)]
        env = environment(deployment.base_url)
        subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, timeout=60, check=True)
    (path,) = (tmp_path / "runs").iterdir()
    assert path.suffix == ".jsonl" and len(path.read_text().splitlines()) == 1


def test_closed_outputs_lose_no_rollout(tmp_path: Path) -> None:
    write_tasks(tmp_path)
    with serving(Script()) as deployment:
        reader, writer = os.pipe()
        os.close(reader)
        words, env = command(tmp_path, "--samples 3"), environment(deployment.base_url)
        code = subprocess.run(words, env=env, stdout=writer, stderr=writer, timeout=60, check=False).returncode
        os.close(writer)
    assert code == 0 and len(finished(tmp_path, code, "", "").lines) == 3


# --- Refused before anything exists -----------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--task nosuch", "there are: t"),
        ("--task ../t", "there are: t"),
        ("--samples 0", "--samples"),
        ("--model oracle", "embedded"),
        ("--check", "embedded"),
        ("--harness shell --model m", "shell"),
        ("--out nosuch/out.jsonl", "nosuch/out.jsonl"),
        ("--model m --model-base-url http://127.0.0.1:9/v1", "MODEL_API_KEY"),
        ("--model-api-key sk-misplaced", "options are"),
    ],
)
def test_usage_errors_with_a_deployment(tmp_path: Path, arguments: str, says: str) -> None:
    write_tasks(tmp_path)
    with serving(Script()) as deployment:
        env = {"OPENAI_BASE_URL": deployment.base_url, "OPENAI_API_KEY": KEY}
        line = usage_error(tmp_path, arguments, **env)
    assert says in line and "sk-misplaced" not in line and not deployment.calls


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--harness nosuch", "codex, claude_sdk, pi, opencode, shell"),
        ("--model m", "--model-base-url"),
        ("--task x", "are: t"),
    ],
)
def test_usage_errors_without_a_deployment(tmp_path: Path, arguments: str, says: str) -> None:
    write_tasks(tmp_path)
    assert says in usage_error(tmp_path, arguments)


def test_task_without_solution_runs_with_a_model_but_not_with_oracle(tmp_path: Path) -> None:
    write_tasks(tmp_path)
    (tmp_path / "tasks" / "t" / "solution.sh").unlink()
    assert "solution.sh" in usage_error(tmp_path, "")
    done, _ = run(tmp_path, Script(), "--model m")
    assert done.line["reward"] == 1.0


# --- The embedded deployment: processes that stand in for core and gateway -----------------------

STAND_IN = """
import json, os, sys
from pathlib import Path
sys.path.insert(0, os.environ["TESTS"])
from scripted_deployment import KEY, Script, serving
name, log = Path(__file__).parent.name, Path(os.environ["LOG"])
first = sys.stdin.readline() if name == "gateway" else ""
seen = {"argv": sys.argv[1:], "env": dict(os.environ), "first": first, "pid": os.getpid()}
(log / f"{name}.seen").write_text(json.dumps(seen))
if os.environ.get("REFUSE") == name:
    print("this host forbids sandboxes", file=sys.stderr)
    sys.exit(2)
if os.environ.get("STUCK") == name:
    sys.exit(bool(sys.stdin.read()))
answer = lambda session: None if session.body["input"] == "true" else b'{"x": 1}'
with serving(Script(answer=answer, turn_seconds=float(os.environ.get("TURN", 0)))) as deployment:
    url, kind = deployment.base_url, "OPENAI"
    if name == "gateway":
        url, kind = "http://127.0.0.1:9/rollouts/{rollout_id}/v1", "MODEL"
    print(f"export {kind}_BASE_URL='{url}'\\nexport {kind}_API_KEY='{KEY}'", flush=True)
    if os.environ.get("DIE") == name:
        os._exit(7)
    sys.stdin.read()
    (log / f"{name}-requests.seen").write_text(json.dumps([body for _, body in deployment.requests]))
"""


@dataclass
class House:
    """A copy of the script beside stand-ins, which write what they see to files."""

    folder: Path

    def start(self, arguments: str, **env: str) -> subprocess.Popen[str]:
        words = [sys.executable, str(self.folder / "rl_eval.py"), "--tasks", str(self.folder / "tasks")]
        variables = environment(TESTS=str(Path(__file__).parent), LOG=str(self.folder), **env)
        return subprocess.Popen(
            [*words, *arguments.split()],
            env=variables,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, arguments: str, **env: str) -> Run:
        process = self.start(arguments, **env)
        out, err = process.communicate(timeout=60)
        return finished(self.folder, process.returncode, out, err)

    def seen(self, name: str) -> Any:
        return json.loads((self.folder / f"{name}.seen").read_text())


@pytest.fixture
def house(tmp_path: Path) -> House:
    write_tasks(tmp_path)
    shutil.copy(SCRIPT, tmp_path)
    shutil.copytree(SCRIPT.parent / "report", tmp_path / "report")
    for name in ("core", "gateway"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__main__.py").write_text(STAND_IN)
    shutil.copy(SCRIPT.parent / "core" / "embedded.py", tmp_path / "core")
    return House(tmp_path)


def test_embedded_run_is_codex_with_oracle(house: House) -> None:
    done = house.run("--out out.jsonl --samples 2", MODEL_API_KEY=MODEL_KEY)
    assert done.code == 0 and done.row[:5] == ["codex", "oracle", "2", "2", "1.000"]
    assert "started the embedded Core" in done.err and KEY not in done.err
    core, gateway, requests = house.seen("core"), house.seen("gateway"), house.seen("core-requests")
    assert core["argv"] == gateway["argv"] == ["serve", "--exit-with-stdin"]
    assert not [v for seen in (core, gateway) for v in seen["env"].values() if MODEL_KEY in v]
    first = json.loads(gateway["first"])
    assert first["scripts"] == {"t": "true # canary-of-the-solution"}
    assert first["rollouts"] == {line["rollout_id"]: "t" for line in done.lines}
    assert requests[0]["agent"] == {"model": "oracle", "x_agents_core": {"harness": "codex"}}
    bundle = requests[0]["x_agents_core"]["model_provider"]
    assert (bundle["protocol"], bundle["api_key"]) == ("responses", KEY)
    assert bundle["base_url"].split("/")[4] in first["rollouts"]


def test_check(house: House) -> None:
    """R19."""
    done = house.run("--check")
    assert (done.code, done.out.splitlines()) == (0, ["t: ok", "1 of 1 tasks are sound"])
    assert not (house.folder / "runs").exists()
    write_tasks(house.folder, ["u", "v"], expected='{"x": 2}')
    (house.folder / "tasks" / "v" / "solution.sh").unlink()
    done = house.run("--check")
    assert done.code == 1 and "t: ok" in done.out and "u: the solution earned 0.0" in done.out
    assert "v: no solution.sh" in done.out and "1 of 3 tasks are sound" in done.out


def test_check_that_cannot_measure(house: House) -> None:
    done = house.run("--check --timeout 0.5", TURN="600", DIE="core")
    assert done.code == 3 and "not measured" in done.out


@pytest.mark.parametrize("name", ["core", "gateway"])
def test_service_that_refuses_to_start(house: House, name: str) -> None:
    done = house.run("--out out.jsonl", REFUSE=name)
    assert done.code == 2 and "this host forbids sandboxes" in done.err and done.out == ""
    assert not (house.folder / "out.jsonl").exists()


def test_core_that_dies_is_an_error_at_once(house: House) -> None:
    done = house.run("--out out.jsonl --samples 9", DIE="core")
    assert done.code == 3 and "ended with code 7" in done.err
    assert all((line["status"], line["reward"]) == ("error", None) for line in done.lines)


def test_kill_takes_the_services_along(house: House) -> None:
    process = house.start("--out out.jsonl", TURN="600")
    assert process.stderr is not None
    while "started the embedded Core" not in process.stderr.readline():
        pass
    pids = [house.seen(name)["pid"] for name in ("core", "gateway")]
    process.kill()
    process.communicate()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            wait_gone(pid)


def wait_gone(pid: int) -> None:
    """Block until a process that is not ours has ended."""
    descriptor = os.pidfd_open(pid)
    assert select.select([descriptor], [], [], 15)[0], f"{pid} still runs"
    os.close(descriptor)


def test_interrupt_while_services_start(house: House) -> None:
    process = house.start("--out out.jsonl", STUCK="gateway")
    while not (house.folder / "gateway.seen").exists():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    done = finished(house.folder, process.returncode, out, err)
    assert done.code == 130 and not (house.folder / "out.jsonl").exists()


def test_interrupt_stops_the_services(house: House) -> None:
    process = house.start("--out out.jsonl", TURN="600")
    assert process.stderr is not None
    while "started the embedded Core" not in process.stderr.readline():
        pass
    pids = [house.seen(name)["pid"] for name in ("core", "gateway")]
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


# --- The cases -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_case(cases: Cases, name: str) -> None:
    case, line, calls = CASES[name], cases.lines[name], cases.deployment.calls_of[f"Solve {name}."]
    assert (line["status"], line["reward"]) == (case.status, case.reward), line["error"]
    assert line["error"] is None if case.says is None else case.says in line["error"]
    assert {operation: calls[operation] for operation in case.calls} == case.calls
    sessions = [s for s in list(cases.deployment.sessions.values()) if s.body["input"] == f"Solve {name}."]
    assert len(sessions) == (name != "refused create")
    assert all(session.deleted and session.id == line["session_id"] for session in sessions)


def test_cases_together(cases: Cases) -> None:
    """R13: errors are counted, kept out of the mean, and make the exit code."""
    rewards = [case.reward for case in CASES.values() if case.reward is not None]
    errors = sum(case.status == "error" for case in CASES.values())
    mean = f"{sum(rewards) / len(rewards):.3f}"
    tasks = f"({len(rewards)}/{len(CASES)} tasks)"
    assert cases.run.code == 3 and len(cases.run.lines) == len(CASES)
    expected = [str(len(CASES)), str(len(rewards)), mean, f"{mean} {tasks}", str(errors), "3"]
    assert cases.run.row[2:8] == expected


def test_odd_items_are_recorded_in_order(cases: Cases) -> None:
    items = cases.lines["odd items"]["items"]
    assert [item["n"] for item in items] == list(range(250)) and items[7] == ODD_ITEMS[7]
    assert len(items[100]["x_rl_eval"]["altered"]) == 2


def test_usage(cases: Cases) -> None:
    assert cases.lines["late usage"]["usage"] == USAGE and cases.lines["usage unknown"]["usage"] is None


def test_failure_without_a_turn_ends_at_once(cases: Cases) -> None:
    ended = max(cases.lines[name]["duration_s"] for name in ("no turn", "no turn, public"))
    assert ended < cases.lines["timeout while queued"]["duration_s"]
