"""The limits of disk, CPU and output, by a server that is root and by one that is not.

Each with a control: the same program below the limit goes through. Memory, processes and descriptors are tried in
`test_sandbox.py`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import platform
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import openai
import pytest
from attack import end, hear, inside, outside, peak_memory, processes, script_of
from conftest import HOSTED, SHELL, Core, core_in, until

from core.sandbox import CONTAINER_SIZES, Limits
from core.sandbox.disk import measure
from core.sandbox.limits import Cgroups, temporary_bytes
from core.sandbox.rooms import remove_tree, walk

MIB = 1 << 20
SMALL: dict[str, Any] = {"environment": {"container_size": "small"}}
LIMITS = CONTAINER_SIZES["small"]


def failure_of(turn: Any) -> tuple[str, str, str, str]:
    failure = (turn.to_dict()["x_agents_core"]["failure"] or {}) if turn.status == "failed" else {}
    return turn.status, turn.error and turn.error.code, failure.get("class"), failure.get("reason")


DISK_EXCEEDED = ("failed", "sandbox_error", "model", "disk_exceeded")

# ── disk ──────────────────────────────────────────────────────────────────────────────────────────

FILL = """
home, kept = os.environ["HOME"], []
def fill(path, mib, directory=None):
    file = os.open(path, os.O_WRONLY | os.O_CREAT, dir_fd=directory)
    os.posix_fallocate(file, 0, mib << 20)
    return file
def name(number):  # with few inodes, which are slow to write
    for index in range(number):
        if index % 50000 == 0:
            os.close(os.open(f"file{index}", os.O_WRONLY | os.O_CREAT))
        os.link(f"file{index // 50000 * 50000}", f"link{index}")
"""
# How `given` units are written, and how many are within and beyond the limit: 512 MiB, or 1000 names of files.
WAYS = {
    "workspace": ("for n in range(given): fill(str(n), 512)", 1, 5),
    "home": ("for n in range(given): fill(f'{home}/{n}', 512)", 1, 5),
    "deleted files": ("for n in range(given): kept.append(fill('x', 512)); os.unlink('x')", 1, 5),
    "closed directory": (
        """
os.mkdir("d"); os.mkdir("d/e"); directory = os.open("d/e", os.O_RDONLY); os.chmod("d/e", 0); os.chmod("d", 0)
os.chmod(".", 0)
os.fchmod(directory, 0o700)
for n in range(given): fill(str(n), 512, directory)
os.fchmod(directory, 0)
""",
        1,
        5,
    ),
    "deep tree": (
        "for _ in range(3000): os.mkdir('d'); os.chdir('d')\nfor n in range(given): fill(str(n), 512)",
        1,
        5,
    ),
    "names of files": ("name(given * 1000)", 20, 1000),
}


@pytest.mark.parametrize("way", WAYS)
def test_disk_is_limited(box: Core, way: str) -> None:
    program, _, beyond = WAYS[way]
    session, turn = box.run(script_of(f"{FILL}{program}\ntime.sleep(60)", beyond), **SMALL)
    assert failure_of(turn) == DISK_EXCEEDED, turn.error
    assert str(LIMITS.files if way == "names of files" else LIMITS.disk) in turn.error.message
    assert turn.completed_at - turn.started_at < 50  # not by its own end
    assert box.sessions.retrieve(session.id).status == "failed"
    assert box.temporary is not None
    until(lambda: not list(box.temporary.glob(f"tmp/*/rooms/{session.id}")), 30)  # type: ignore[union-attr]
    with pytest.raises(openai.ConflictError):
        box.say(session.id, "echo again")
    box.sessions.delete(session.id)


@pytest.mark.parametrize("way", WAYS)
def test_the_same_below_the_limit_goes_through(box: Core, way: str) -> None:
    program, within, _ = WAYS[way]
    session, turn = box.run(script_of(f"{FILL}{program}\ntime.sleep(2); print('written')", within), **SMALL)
    assert turn.status == "completed", turn.error
    assert "written" in box.output(session.id)
    box.sessions.delete(session.id)


def test_space_is_not_taken_faster_than_it_is_written(box: Core, tmp_path: Path) -> None:
    if platform.machine() != "x86_64":
        pytest.skip("the number of fallocate is that of x86-64")
    source = """
file = os.open(given, os.O_WRONLY | os.O_CREAT)
print(json.dumps([call(285, file, 0, 0, ctypes.c_long(1 << 20)), attempt(os.posix_fallocate, file, 0, 1 << 20)]))
"""
    assert inside(box, source, "x") == ["ENOTSUP", "ok"]
    assert outside(source, str(tmp_path / "x")) == ["ok", "ok"]


def test_what_takes_no_space_does_not_count(box: Core) -> None:
    program = """
for n in range(8):
    with open(f"sparse{n}", "wb") as file: os.truncate(file.fileno(), 900 << 20)
os.close(fill("one", 900))
for n in range(8): os.link("one", f"link{n}")
os.symlink("/usr", "elsewhere")
time.sleep(2)
print(1)
"""
    assert inside(box, FILL + program, **SMALL) == 1


def test_a_larger_size_has_more_disk(box: Core) -> None:
    program, _, beyond = WAYS["workspace"]
    options = {"environment": {"container_size": "large"}}
    assert inside(box, f"{FILL}{program}\ntime.sleep(2); print(1)", beyond, **options) == 1


def test_what_earlier_turns_left_and_published_counts(box: Core) -> None:
    leave = """
os.mkdir("outputs")
for name in "xy": fill(name, 700)
for n in range(3): os.pwrite(fill(f"outputs/{n}", 150), str(n).encode(), 0)
"""
    session, turn = box.run(script_of(FILL + leave), **SMALL)
    assert turn.status == "completed", turn.error
    box.say(session.id, "echo 'it ran'")
    assert failure_of(box.turn(session.id, 2)) == DISK_EXCEEDED
    assert "it ran" not in box.output(session.id)
    box.sessions.delete(session.id)


def test_a_setup_command_is_limited_too(box: Core) -> None:
    command = script_of(f"{FILL}{WAYS['workspace'][0]}\ntime.sleep(60)", 6)
    environment = {"container_size": "small", "setup_commands": [{"command": command}]}
    _, turn = box.run("echo 'it ran'", environment=environment)
    assert failure_of(turn) == ("failed", "sandbox_error", "environment", "disk_exceeded")


@contextlib.contextmanager
def little_disk(directory: Path) -> Iterator[Path]:
    """A file system of 1 GiB, whose floor is a quarter."""
    data = directory / "data"
    data.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1g", "tmpfs", data], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("only root can mount a file system to be filled")
    try:
        yield data
    finally:
        subprocess.run(["umount", "--lazy", data], check=True)


@pytest.mark.parametrize("user", ["root", "unprivileged"])
def test_the_machine_keeps_a_floor_of_free_space(tmp_path_factory: pytest.TempPathFactory, user: str) -> None:
    """Within its own limit, but more than the machine has: who wrote most ends, and nobody else."""
    directory = tmp_path_factory.mktemp("floor")
    closed = [path for path in directory.parents if path.stat().st_mode & 1 == 0]
    for path in closed:
        path.chmod(0o711)
    with little_disk(directory) as data, core_in(directory, user, "--data", str(data)) as core:
        moderate = script_of(f"{FILL}fill('x', 100)\nprint('begun', flush=True)\ntime.sleep(6); print('done')")
        honest = core.shell(moderate)
        hear(core, honest.id, "begun")
        greedy = core.shell(script_of(f"{FILL}fill('x', 750)\ntime.sleep(60)"))
        turn = core.turn(greedy.id)
        assert failure_of(turn) == DISK_EXCEEDED and "grew most" in turn.error.message, turn.error
        assert core.turn(honest.id).status == "completed"
        until(lambda: os.statvfs(data).f_bavail * os.statvfs(data).f_frsize > 512 * MIB)
        (data / "filler").write_bytes(b"x")
        with (data / "filler").open("wb") as filler:
            os.posix_fallocate(filler.fileno(), 0, 800 * MIB)
        refused = core.post("/agents/sessions", {"agent": SHELL, "environment": HOSTED, "input": "true"})
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "artifact_storage_unavailable"
        assert int(refused.headers["Retry-After"]) > 0
        (data / "filler").unlink()
        assert core.run("true")[1].status == "completed"


@pytest.mark.slow
@pytest.mark.parametrize("directories", [1, 400])
def test_what_a_session_may_hold_is_gone_within_seconds(tmp_path: Path, directories: int) -> None:
    count = CONTAINER_SIZES["medium"].files
    for directory in range(directories):
        (tmp_path / "room" / str(directory)).mkdir(parents=True)
        for number in range(count // directories):
            (tmp_path / "room" / str(directory) / str(number)).touch()
    started = time.monotonic()
    remove_tree(tmp_path / "room")
    assert time.monotonic() - started < 10
    assert not (tmp_path / "room").exists()


# ── measuring what changes ────────────────────────────────────────────────────────────────────────


def test_a_walk_stays_below_its_root_when_a_directory_is_moved_out(tmp_path: Path) -> None:
    for name in ("root/a/b", "root/a/c", "other/x"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").write_text(name)
    seen: list[int] = []
    moved = False
    for about in walk(tmp_path / "root"):
        seen.append(about.st_ino)
        inner = tmp_path / "root/a/b"
        if not moved and inner.exists() and about.st_ino == (inner / "file").stat().st_ino:
            inner.rename(tmp_path / "other/b")
            moved = True
    assert moved
    assert (tmp_path / "root/a/c/file").stat().st_ino in seen
    assert (tmp_path / "other/x/file").stat().st_ino not in seen


@pytest.fixture
def deep_tree(tmp_path: Path) -> Iterator[Path]:
    """3000 directories, one in the other."""
    directory = os.open(tmp_path, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=directory)
        directory, above = os.open("d", os.O_RDONLY, dir_fd=directory), directory
        os.close(above)
    os.close(directory)
    yield tmp_path
    remove_tree(tmp_path / "d")
    assert not (tmp_path / "d").exists()


def test_a_walk_needs_few_descriptors(deep_tree: Path) -> None:
    gc.collect()
    before = len(list(Path("/proc/self/fd").iterdir()))
    most = max(len(list(Path("/proc/self/fd").iterdir())) for _ in walk(deep_tree))
    assert most - before < 5
    assert measure([deep_tree], LIMITS).files == 3000
    assert len(list(Path("/proc/self/fd").iterdir())) == before


# ── CPU ───────────────────────────────────────────────────────────────────────────────────────────

SPIN = """
children, began = [], time.monotonic()
for _ in range(3):
    pid = os.fork()
    if pid == 0:
        while time.monotonic() - began < 3: pass
        os._exit(0)
    children.append(pid)
used = 0.0
for pid in children:
    usage = os.wait4(pid, 0)[2]
    used += usage.ru_utime + usage.ru_stime
print(json.dumps(used / (time.monotonic() - began)))
"""


def test_cpu_time_is_limited(core: Core) -> None:
    if not Path("/sys/fs/cgroup/cpu").is_dir() or os.getuid() != 0:
        pytest.skip("no cgroup of CPU time can be written here: doctor says that the ceiling is weaker")
    assert inside(core, SPIN, **SMALL) < 1.2
    if outside(SPIN) < 1.4:
        pytest.skip("this machine has no second core free for a control")
    assert inside(core, SPIN) > 1.3  # the medium size


def test_without_a_cgroup_cpu_time_is_limited_by_process_and_priority(box: Core) -> None:
    source = "print(json.dumps([os.nice(0), resource.getrlimit(resource.RLIMIT_CPU)[0]]))"
    nice, seconds = inside(box, source)
    assert (nice == 5 and 0 < seconds <= 2 * 24 * 3600) or (nice == 0 and seconds == -1)
    unprivileged = Path(f"/proc/{box.service.process.pid}").stat().st_uid != 0
    assert nice == 5 or not unprivileged


def test_the_groups_of_cgroup_v2(tmp_path: Path) -> None:
    """A scratch directory in place of the kernel's: the files and values of its documentation."""
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids")
    groups = Cgroups.detect(tmp_path)
    assert groups is not None and groups.version == 2 and groups.cpu == groups.parent
    group = groups.create("a")
    groups.limit(group, CONTAINER_SIZES["large"])
    found = {file.name: file.read_text() for file in group.iterdir()}
    assert found == {
        "pids.max": "1024",
        "memory.max": str(8 << 30),
        "memory.swap.max": "0",
        "memory.oom.group": "0",
        "cpu.max": "400000 100000",
    }
    assert groups.joined(group) == [str(group)]
    assert (groups.parent / "cpu.weight").read_text() == str(min(10_000, 100 * (os.cpu_count() or 1)))


# ── memory behind files, output ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("count", [0, 20_000])
def test_files_in_a_tmpfs_count_as_memory(box: Core, count: int) -> None:
    mark = str(uuid4())
    source = "for n in range(given): open(f'/tmp/{n}', 'x').close()\nprint('made', flush=True); time.sleep(60)"
    session = box.shell(script_of(source, count, mark))
    hear(box, session.id, "made")
    (pid,) = (pid for pid, (_, words) in processes().items() if f"python3 - {mark}" in words)
    assert count << 10 <= temporary_bytes(Path("/proc", str(pid))) < (count << 10) + MIB
    end(box, session.id)


def test_output_without_end_is_ended(box: Core) -> None:
    before = peak_memory(box)
    session = box.shell("yes 'a line of some length, as programs print them when they are in a loop'", **SMALL)
    assert inside(box, "print(1)") == 1  # another session, meanwhile
    turn = box.turn(session.id)
    assert failure_of(turn) == ("failed", "sandbox_error", "model", "output_exceeded"), turn.error
    item = next(item for item in box.sessions.items.list(session.id) if item.type == "command_execution")
    assert item.status == "incomplete" and len(item.output) < MIB and "bytes left out" in item.output
    assert item.to_dict()["x_agents_core"]["truncated"]["bytes"] > LIMITS.output - MIB
    assert peak_memory(box) - before < 64 << 20


def test_every_size_is_a_multiple_of_the_small_one() -> None:
    sizes = [CONTAINER_SIZES[name] for name in ("small", "medium", "large")]
    for name in Limits.__dataclass_fields__:
        small, medium, large = (getattr(size, name) for size in sizes)
        assert name == "open_files" or (medium, large) == (2 * small, 4 * small)
