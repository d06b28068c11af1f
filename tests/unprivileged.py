"""`python3 tests/unprivileged.py UID COMMAND…` as root: runs a command as that user, who need not exist.

The interpreter, its packages and this project stay readable at their paths also when they lie below a directory of mode
0700, like root's home: in a mount namespace of its own, an empty directory takes that one's place and holds only these.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

NEEDED = (Path(sys.base_prefix), Path(sys.prefix), Path(__file__).parents[1])
CLONE_NEWNS, MS_BIND, MS_REC, MS_PRIVATE = 0x00020000, 4096, 16384, 1 << 18
libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: Path, kind: str | None, flags: int, options: str | None = None) -> None:
    words = (source.encode(), bytes(target), kind and kind.encode(), flags, options and options.encode())
    if libc.mount(*words) != 0:
        raise OSError(ctypes.get_errno(), f"mount {target}")


def closed_ancestor(path: Path) -> Path | None:
    """The topmost directory above `path` that other users may not enter."""
    return next((above for above in reversed(path.resolve().parents) if not above.stat().st_mode & 1), None)


def uncover() -> None:
    if libc.unshare(CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    mount("none", Path("/"), None, MS_REC | MS_PRIVATE)
    found = [(path.resolve(), closed_ancestor(path)) for path in NEEDED]
    held = {path: (os.open(path, os.O_PATH), closed) for path, closed in found if closed}
    for closed in {closed for _, closed in held.values()}:
        mount("tmpfs", closed, "tmpfs", 0, "mode=0755")
    for path, (descriptor, _) in held.items():
        path.mkdir(parents=True, exist_ok=True)
        mount(f"/proc/self/fd/{descriptor}", path, None, MS_BIND | MS_REC)
        os.close(descriptor)


def main() -> None:
    uid, command = int(sys.argv[1]), sys.argv[2:]
    uncover()
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
