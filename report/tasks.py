"""Tasks as they lie in a folder: read, checked, and named by a digest of all that they are made of.

Nothing of a task is believed: what a session would not take, what a grader could not use and what a reader could
mistake is refused by name, before anything runs. Grading itself is the script's.
"""

from __future__ import annotations

import json
import os
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from report.record import Json, Refused, is_number, parse_strictly

WORKSPACE = "/workspace/"
MAX_FILES, MAX_FILE_BYTES, MAX_FILES_BYTES = 50, 5 << 20, 10 << 20  # what a session accepts
MAX_PATH_BYTES, MAX_ID_CHARS = 4096, 128
# Numbers match within RELATIVE of the expected one, or within ABSOLUTE. Both as a ratio of whole numbers, so
# that comparing is exact for integers of any size.
RELATIVE, ABSOLUTE = (1, 10**6), (1, 10**9)

Tolerance = tuple[tuple[int, int], tuple[int, int]]  # relative, absolute


class Rules(NamedTuple):
    """What `task.json` may say: how the task is graded, and in what time it is to be solved."""

    fraction: bool = False  # the share of right keys is earned; else all or nothing
    tolerances: Mapping[str, Tolerance] = MappingProxyType({})  # by key of expected.json
    timeout: float | None = None  # seconds; None: the run's


class Task(NamedTuple):
    """A question, the files it is asked about, and the answer that earns 1.0."""

    id: str
    instruction: str
    expected: Json
    files: tuple[tuple[str, Path], ...]  # path below /workspace; where its content is read, late
    solution: str | None  # bash text of the reference solution
    rules: Rules = Rules()
    digest: str = ""  # of all of the above


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
    name, solution, rules = "instruction.md", path / "solution.sh", path / "task.json"
    try:
        if not (instruction := (path / name).read_text("utf-8-sig")).strip() or "\0" in instruction:
            raise ValueError("no text")
        name = "expected.json"
        expected = parse_strictly((path / name).read_bytes())
        if not isinstance(expected, dict) or not expected:
            raise ValueError("not an object with at least one key")
        name = "solution.sh"
        script = solution.read_text("utf-8") if solution.exists() else None
        name = "task.json"
        settings = parse_rules(parse_strictly(rules.read_bytes()), expected) if rules.exists() else Rules()
        name = "files"
        files = tuple(find_files(path / name))
        contents = [(n, sha256(p.read_bytes()).hexdigest()) for n, p in files]
        parts = [instruction, json.dumps(expected), script, settings, *contents]
        return Task(path.name, instruction, expected, files, script, settings, digest_of(parts))
    except (OSError, ValueError) as error:
        raise Refused(f"task {path.name!r}: {name}: {getattr(error, 'strerror', None) or error}") from None


def parse_rules(given: Any, expected: Json) -> Rules:
    """What task.json says. Raises ValueError, naming the member."""
    if not isinstance(given, dict) or (unknown := sorted(set(given) - {"grade", "tolerances", "timeout"})):
        raise ValueError(f"unknown member {unknown[0]!r}" if isinstance(given, dict) else "not an object")
    if (kind := given.get("grade", "binary")) not in ("binary", "fraction"):
        raise ValueError('grade must be "binary" or "fraction"')
    timeout, tolerances = given.get("timeout"), given.get("tolerances", {})
    if timeout is not None and not (is_number(timeout) and 0 < timeout < 1e8):
        raise ValueError("timeout must be a positive number of seconds")
    if not isinstance(tolerances, dict) or not set(tolerances) <= set(expected):
        raise ValueError("tolerances must be an object of tolerances by key of expected.json")
    return Rules(kind == "fraction", {key: parse_tolerance(key, tolerances[key]) for key in tolerances}, timeout)


def parse_tolerance(key: str, given: Any) -> Tolerance:
    """{"relative": number, "absolute": number}, one of them at least; the other keeps its default."""
    good = isinstance(given, dict) and given and set(given) <= {"relative", "absolute"}
    if not good or not all(is_number(value) and value >= 0 for value in given.values()):
        raise ValueError(f'tolerances: {key!r} must be {{"relative": number, "absolute": number}}')
    relative, absolute = given.get("relative"), given.get("absolute")
    return (
        RELATIVE if relative is None else relative.as_integer_ratio(),
        ABSOLUTE if absolute is None else absolute.as_integer_ratio(),
    )


def digest_of(parts: Iterable[Any]) -> str:
    """Of values whose repr tells all of them, in order, such that no two lists look alike."""
    whole = sha256()
    for part in parts:
        text = repr(part)
        whole.update(f"{len(text)}:{text}".encode("utf-8", "surrogatepass"))
    return whole.hexdigest()[:16]


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
