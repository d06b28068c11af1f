"""`/workspace` without mounts: a symbolic link that is turned to the session whose turn runs.

All processes of a machine see the same link, so one server at a time may turn it, and run one sandbox at a time: it
holds a lock on the root directory, which the kernel frees with the server. Who may write to `/` makes the link there,
replaces what a killed server left, and removes it at the end. Anybody else needs a link made once by root, which leads
to a second one that is theirs to turn.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from core.sandbox import WORKSPACE, SandboxUnavailable

OWN_PLACE = "/var/tmp/rl-eval-{uid}/workspace"


class WorkspaceLink:
    """The link, from `acquire` to `release`."""

    def __init__(self, rooms: Path) -> None:
        self.path = Path(WORKSPACE)
        self.nowhere = rooms / "none" / "workspace"  # where it leads between turns
        self.lock = -1

    def acquire(self) -> None:
        """Raises SandboxUnavailable in one line that says what to do."""
        self.lock = os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release_lock()
            raise SandboxUnavailable(
                f"another server on this machine has Landlock sandboxes, and there is one {WORKSPACE}: end it first."
            ) from None
        try:
            self.path = self.find()
            self.turn(self.nowhere)
        except OSError as error:
            self.release_lock()
            raise SandboxUnavailable(f"cannot make {self.path}: {error.strerror}.") from None
        except SandboxUnavailable:
            self.release_lock()
            raise

    def find(self) -> Path:
        """The link to turn: /workspace itself, or the own one that it leads to."""
        workspace, own = Path(WORKSPACE), Path(OWN_PLACE.format(uid=os.getuid()))
        leads_to = workspace.readlink() if workspace.is_symlink() else None
        if leads_to == own:
            own.parent.mkdir(mode=0o755, exist_ok=True)
            if own.parent.lstat().st_uid != os.getuid() or own.parent.is_symlink():
                raise SandboxUnavailable(f"{own.parent} belongs to somebody else: remove it.")
            return own
        if leads_to is None and os.path.lexists(workspace):
            raise SandboxUnavailable(f"{WORKSPACE} exists and is not the server's own: remove or rename it.")
        if leads_to is not None and leads_to.parts[-3:-2] != ("rooms",):
            raise SandboxUnavailable(f"{WORKSPACE} leads to {leads_to}, which is not the server's: remove it.")
        if not os.access("/", os.W_OK):
            command = f"ln -sfn {own} {WORKSPACE}"
            raise SandboxUnavailable(f"{WORKSPACE} must be a link for Landlock sandboxes: run once as root: {command}")
        return workspace

    def turn(self, target: Path) -> None:
        """Has the link lead to `target`, at once."""
        new = self.path.with_name(f".rl-eval-{os.getpid()}")
        new.unlink(missing_ok=True)
        new.symlink_to(target)
        new.replace(self.path)

    def release(self) -> None:
        """Removes the link, if `acquire` has made it, and lets the next server have it."""
        if self.lock >= 0:
            with contextlib.suppress(OSError):
                self.path.unlink()
            self.release_lock()

    def release_lock(self) -> None:
        os.close(self.lock)
        self.lock = -1
