"""Artifacts: what lies under /workspace/outputs when a turn completes, copied without trusting any of it.

Capture runs after every process of the sandbox is gone. Nothing is followed or executed: each entry is opened without
following links, relative to its directory's descriptor, and its type is checked on the open file, so neither a link
nor a FIFO can reach the host or hang the copy. Bytes are stored under their SHA-256, before any row names them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from core.sandbox import OUTPUTS

MIB = 1 << 20
MAX_ENTRIES, MAX_DEPTH, MAX_PATH_BYTES = 4096, 64, 4096
MAX_FILE_BYTES, MAX_TOTAL_BYTES = 200 * MIB, 500 * MIB
MAX_SKIPPED = 100
CHUNK_BYTES = MIB
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class CaptureFailed(Exception):
    """The outputs break a limit: the agent's doing. The message names it."""


@dataclass(frozen=True)
class Captured:
    """One file: its path inside the sandbox, its size in bytes, the digest of its content."""

    path: str
    size: int
    digest: str


@dataclass
class Capture:
    files: list[Captured] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)  # warnings, AGENTS_API 7
    entries: int = 0
    total: int = 0

    def skip(self, path: str, reason: str) -> None:
        """Notes what is not published; beyond MAX_SKIPPED the last note stands for the rest."""
        shown = os.fsencode(path).decode(errors="replace")
        if len(self.skipped) > MAX_SKIPPED:
            shown, reason = f"{OUTPUTS}/…", "more entries like these"
            self.skipped.pop()
        self.skipped.append({"code": "artifact_skipped", "path": shown, "reason": reason})


class Blobs:
    """One session's bytes by SHA-256. Sessions share none, so that the end of one never takes those of another."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, digest: str) -> Path:
        return self.root / digest

    def keep(self, digests: set[str]) -> None:
        """Removes what no artifact names: of a capture that failed, or of artifacts that were deleted."""
        with contextlib.suppress(FileNotFoundError):
            for path in self.root.iterdir():
                if path.name not in digests:
                    path.unlink(missing_ok=True)

    def take(self, source: int, size: int) -> str:
        """Copies `size` bytes of an open file; returns their digest. Raises CaptureFailed if there are not as many."""
        digest = hashlib.sha256()
        self.root.mkdir(mode=0o700, exist_ok=True)
        temporary = self.root / "incoming"
        try:
            with temporary.open("wb") as target:
                left = size
                while left and (chunk := os.read(source, min(left, CHUNK_BYTES))):
                    target.write(chunk)
                    digest.update(chunk)
                    left -= len(chunk)
                if left or os.read(source, 1):
                    raise CaptureFailed("a file changed while it was copied")
                target.flush()
                os.fsync(target.fileno())
            temporary.replace(self.path(digest.hexdigest()))
        finally:
            temporary.unlink(missing_ok=True)
        return digest.hexdigest()


def capture(workspace: Path, inside: str, blobs: Blobs) -> Capture:
    """Copies every regular file below `workspace`/outputs; `inside` is that directory's path in the sandbox.

    Raises CaptureFailed when the agent broke a limit, OSError when the host cannot store the bytes.
    """
    found = Capture()
    try:
        root = os.open(workspace / "outputs", DIRECTORY)
    except FileNotFoundError:
        return found
    except OSError:
        if not is_directory(workspace / "outputs"):
            raise CaptureFailed("outputs is not a directory") from None
        root = open_unreadable(workspace / "outputs", None)
    try:
        walk(root, inside, 1, found, blobs)
    finally:
        os.close(root)
    return found


def is_directory(path: Path) -> bool:
    return stat.S_ISDIR(path.lstat().st_mode)


def open_unreadable(name: Path | str, directory: int | None) -> int:
    """Opens a file or directory of our own user whose mode forbids it, by a descriptor that cannot be swapped."""
    held = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    try:
        link = Path(f"/proc/self/fd/{held}")
        link.chmod(0o700)
        return os.open(link, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    finally:
        os.close(held)


def walk(directory: int, inside: str, depth: int, found: Capture, blobs: Blobs) -> None:
    if depth > MAX_DEPTH:
        raise CaptureFailed(f"outputs are nested more than {MAX_DEPTH} deep")
    names: list[str] = []
    with os.scandir(directory) as entries:
        for entry in entries:
            found.entries += 1
            if found.entries > MAX_ENTRIES:
                raise CaptureFailed(f"outputs hold more than {MAX_ENTRIES} entries")
            names.append(entry.name)
    for name in sorted(names):
        visit(directory, name, f"{inside}/{name}", depth, found, blobs)


def visit(directory: int, name: str, path: str, depth: int, found: Capture, blobs: Blobs) -> None:
    """Takes one entry by its type. Surrogates stand for bytes that are not UTF-8: no path of the API can name them."""
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise CaptureFailed(f"a path under outputs is longer than {MAX_PATH_BYTES} bytes")
    mode = os.lstat(name, dir_fd=directory).st_mode
    if stat.S_ISLNK(mode):
        return
    if stat.S_ISDIR(mode):
        child = open_entry(directory, name, DIRECTORY)
        try:
            walk(child, path, depth + 1, found, blobs)
        finally:
            os.close(child)
    elif not stat.S_ISREG(mode):
        found.skip(path, "not a regular file")
    elif not encodable(path):
        found.skip(path, "its name is not UTF-8")
    else:
        take(directory, name, path, found, blobs)


def take(directory: int, name: str, path: str, found: Capture, blobs: Blobs) -> None:
    file = open_entry(directory, name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        about = os.fstat(file)
        if not stat.S_ISREG(about.st_mode):
            raise CaptureFailed("a file changed while it was copied")
        if about.st_size > MAX_FILE_BYTES:
            raise CaptureFailed(f"a file under outputs is larger than {MAX_FILE_BYTES} bytes")
        found.total += about.st_size
        if found.total > MAX_TOTAL_BYTES:
            raise CaptureFailed(f"outputs are larger than {MAX_TOTAL_BYTES} bytes in all")
        found.files.append(Captured(path, about.st_size, blobs.take(file, about.st_size)))
    finally:
        os.close(file)


def open_entry(directory: int, name: str, flags: int) -> int:
    try:
        return os.open(name, flags, dir_fd=directory)
    except PermissionError:
        return open_unreadable(name, directory)


def encodable(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True
