"""Which backend a host gets. One line of `BACKENDS` each, the strongest first."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from core.sandbox import Backend, Mount, SandboxUnavailable, seccomp
from core.sandbox.bubblewrap import BubblewrapBackend
from core.sandbox.landlock import LandlockBackend

BACKENDS: Mapping[str, type[BubblewrapBackend] | type[LandlockBackend]] = {
    "bubblewrap": BubblewrapBackend,
    "landlock": LandlockBackend,
}
AUTO = "auto"
CHOICES = (AUTO, *BACKENDS)


async def start_backend(choice: str, data: Path, mounts: list[Mount]) -> tuple[Backend, str]:
    """The chosen backend, started, or with "auto" the strongest that starts. With it, why a stronger one does not.

    Raises SandboxUnavailable, which names every reason.
    """
    reasons = []
    for name in BACKENDS if choice == AUTO else (choice,):
        backend = BACKENDS[name](data, mounts)
        try:
            await backend.start()
        except SandboxUnavailable as error:
            await backend.close()
            reasons.append(str(error))
        except BaseException:
            await backend.close()
            raise
        else:
            return backend, " ".join(reasons)
    raise SandboxUnavailable(" ".join(reasons))


def weaker(backend: Backend, reason: str) -> str | None:
    """One line on what the host's sandboxes do not hold, None when there is nothing to say."""
    weaknesses = backend.weaknesses()
    if not weaknesses:
        return None if seccomp.program() else f"weaker: {seccomp.MISSING}"
    names = ", ".join(what for what, _ in weaknesses)
    because = f", because {reason.split('. ')[0].rstrip('.')}" if reason else ""
    return f"sandboxes by {backend.name}{because}; weaker (doctor explains): {names}"
