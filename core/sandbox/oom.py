"""How often the kernel killed a process of this machine for want of memory, wherever it ran.

Not here: the memory limit of a single sandbox (`limits.py`).
"""

from __future__ import annotations

from pathlib import Path


def host_oom_kills() -> int | None:
    """Since the machine started; None where the kernel does not tell."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)
