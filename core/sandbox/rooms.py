"""A session's directories on the host: made, filled and removed although an agent had its hands in them.

Nothing here follows a symbolic link below a room: every component is opened relative to its parent, without following.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
from pathlib import Path

from core.sandbox import Room

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


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
    """Removes a directory, whatever an agent made of the modes, depth and names below it."""
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return
    except (OSError, RecursionError):
        # GNU rm and chmod walk any depth and do not follow links; an own directory of mode 000 needs the chmod.
        subprocess.run(["chmod", "-R", "u+rwX", "--", path], stderr=subprocess.DEVNULL, check=False)
        subprocess.run(["rm", "-rf", "--", path], stderr=subprocess.DEVNULL, check=False)
