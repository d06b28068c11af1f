"""A session's directories on the host: made, filled, measured and removed although an agent had its hands in them.

Nothing here follows a symbolic link below a room: every component is opened relative to its parent, without following.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import stat
import subprocess
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from core.sandbox import Room

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
MOST_HELD = 64
MANY = 2000  # entries, from which on a tree is removed by another process


def make_room(path: Path, uid: int | None) -> Room:
    """Makes the directories of a session, owned by `uid` (None: by the server's own user)."""
    room = Room(path, uid)
    for directory, mode in ((room.path, 0o700), (room.home, 0o700), (room.workspace, 0o755)):
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode)
            if uid is not None:
                os.chown(directory, uid, uid)
    return room


def open_up(room: Room) -> None:
    """Gives the directories their modes back, which the agent owns and may have taken from itself and from us."""
    room.home.chmod(0o700)
    room.workspace.chmod(0o755)


def install(root: Path, relative: str, data: bytes, uid: int | None) -> None:
    """Writes a file below `root`, mode 0644, making its parents; what stands in the way of either is removed."""
    *parents, name = relative.split("/")
    directory = os.open(root, DIRECTORY)
    try:
        for parent in parents:
            entered = enter(directory, parent, uid)
            os.close(directory)
            directory = entered
        clear(directory, name)
        file = os.open(
            name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644, dir_fd=directory
        )
        with os.fdopen(file, "wb") as stream:
            stream.write(data)
            os.fchmod(file, 0o644)
            if uid is not None:
                os.fchown(file, uid, uid)
    finally:
        os.close(directory)


def enter(directory: int, name: str, uid: int | None) -> int:
    """Opens a subdirectory, making it, in place of anything else of that name."""
    try:
        entered = os.open(name, DIRECTORY, dir_fd=directory)
    except FileNotFoundError:
        pass
    except OSError:
        clear(directory, name)
    else:
        os.fchmod(entered, stat.S_IMODE(os.fstat(entered).st_mode) | stat.S_IRWXU)
        return entered
    os.mkdir(name, 0o755, dir_fd=directory)
    entered = os.open(name, DIRECTORY, dir_fd=directory)
    if uid is not None:
        os.fchown(entered, uid, uid)
    return entered


def clear(directory: int, name: str) -> None:
    """Removes what has that name, if anything; a directory with all it holds."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(os.lstat(name, dir_fd=directory).st_mode):
            remove_tree(Path(f"/proc/{os.getpid()}/fd/{directory}/{name}"))
        else:
            os.unlink(name, dir_fd=directory)


def remove_tree(path: Path) -> None:
    """Removes a directory, whatever an agent made of the modes, depth and number of what is below it."""
    try:
        if not holds_many(path):
            shutil.rmtree(path)
            return
    except FileNotFoundError:
        return
    except (OSError, RecursionError):
        pass
    # GNU rm and chmod walk any depth, do not follow links and hold up no thread of this process; an own directory of
    # mode 000 needs the chmod.
    for command in (["rm", "-rf"], ["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
        if path.is_dir():
            subprocess.run([*command, "--", path], stderr=subprocess.DEVNULL, check=False)


def holds_many(path: Path) -> bool:
    with contextlib.closing(walk(path)) as entries:
        return next(itertools.islice(entries, MANY, None), None) is not None


@dataclass
class Level:
    """A directory on the way down: its name, device and inode, and the subdirectories still to be looked into."""

    name: str
    identity: tuple[int, int]
    left: list[str] = field(default_factory=list)

    def scan(self, directory: int) -> Iterator[os.stat_result]:
        with contextlib.suppress(OSError), os.scandir(directory) as entries:
            for entry in entries:
                try:
                    about = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if stat.S_ISDIR(about.st_mode):
                    self.left.append(entry.name)
                yield about


class Opener:
    """Opens directories without following links, also those of our own user whose mode forbids it.

    Their modes come back when it is left; but only of the first MOST_HELD, each of which takes a descriptor.
    """

    def __init__(self) -> None:
        self.held: list[tuple[int, int]] = []  # descriptor, mode

    def __enter__(self) -> Opener:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor, mode in self.held:
            with contextlib.suppress(OSError):
                Path(f"/proc/self/fd/{descriptor}").chmod(mode)
            os.close(descriptor)

    def open(self, name: Path | str, parent: int | None) -> int | None:
        """A descriptor; None when there is no such directory."""
        try:
            with contextlib.suppress(PermissionError):
                found = os.open(name, DIRECTORY, dir_fd=parent)
                if os.access(f"/proc/self/fd/{found}", os.X_OK):
                    return found
                os.close(found)
            return self.unlock(name, parent)
        except OSError:
            return None

    def unlock(self, name: Path | str, parent: int | None) -> int:
        """Takes hold of the directory first, so that nothing else is opened in its place."""
        held = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        mode, link = stat.S_IMODE(os.fstat(held).st_mode), Path(f"/proc/self/fd/{held}")
        try:
            link.chmod(mode | 0o500)
            return os.open(link, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        finally:
            if len(self.held) < MOST_HELD:
                self.held.append((held, mode))
            else:
                os.close(held)


def walk(root: Path) -> Generator[os.stat_result, None, None]:
    """The state of every entry below a directory that may change meanwhile, at any depth, with few descriptors.

    A directory is left by its "..", and found by its name from `root` when that leads elsewhere: it was moved.
    """
    with Opener() as opener:
        start = opener.open(root, None)
        if start is None:
            return
        current: int | None = os.dup(start)
        levels = [Level("", identity(start))]
        try:
            yield from levels[-1].scan(start)
            while levels:
                if not levels[-1].left:
                    levels.pop()
                    current = climb(current, levels[-1].identity) if levels and current is not None else current
                    continue
                if current is None and (current := descend(start, levels, opener)) is None:
                    levels.pop()
                    continue
                name = levels[-1].left.pop()
                if (child := opener.open(name, current)) is None:
                    continue
                os.close(current)
                current = child
                levels.append(Level(name, identity(child)))
                yield from levels[-1].scan(child)
        finally:
            for descriptor in (start, current):
                if descriptor is not None:
                    os.close(descriptor)


def identity(directory: int) -> tuple[int, int]:
    about = os.fstat(directory)
    return about.st_dev, about.st_ino


def climb(current: int, expected: tuple[int, int]) -> int | None:
    """Closes a directory and opens the one above it, if that is the expected one."""
    above = None
    with contextlib.suppress(OSError):
        above = os.open("..", DIRECTORY, dir_fd=current)
    os.close(current)
    if above is not None and identity(above) != expected:
        os.close(above)
        return None
    return above


def descend(start: int, levels: list[Level], opener: Opener) -> int | None:
    """Opens the last of the levels by the names that lead to it; None when it is not there any more."""
    current = os.dup(start)
    for level in levels[1:]:
        below = opener.open(level.name, current)
        os.close(current)
        if below is None:
            return None
        current = below
    levels[-1].identity = identity(current)
    return current
