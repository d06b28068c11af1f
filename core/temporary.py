"""The data directory of a server that was given none: removed at its end, or, after a kill -9, by the next one.

A server holds an flock on its directory as long as it lives; the kernel lets go of it with the process, whatever ended
it. So a directory of this kind whose lock is free belongs to a dead server. It gets its name only once it is locked:
under that name there is never one that is still being made.

Not here: a directory chosen with `--data`, which is never removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from core.sandbox.rooms import DIRECTORY, remove_tree

PREFIX, SUFFIX = "rl-eval-core-", ".data"


@contextlib.contextmanager
def temporary_data() -> Iterator[Path]:
    """Sweeps what dead servers left, then makes a directory for this one."""
    sweep(Path(tempfile.gettempdir()))
    made = Path(tempfile.mkdtemp(prefix=PREFIX))
    lock = os.open(made, DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        made = made.rename(made.with_suffix(SUFFIX))
        yield made
    finally:
        remove_tree(made)
        os.close(lock)


def sweep(place: Path) -> None:
    """Removes the directories of dead servers of this user; those of others, and all that is no directory, stay."""
    for path in place.glob(f"{PREFIX}*{SUFFIX}"):
        with contextlib.suppress(OSError), held(path) as about:
            if about.st_uid == os.geteuid():
                remove_tree(path)


@contextlib.contextmanager
def held(path: Path) -> Iterator[os.stat_result]:
    """Locks a directory that no living server holds. Raises OSError."""
    lock = os.open(path, DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield os.fstat(lock)
    finally:
        os.close(lock)
