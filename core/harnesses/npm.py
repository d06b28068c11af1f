"""Where harnesses that come from npm lie: below `--npm-prefix`, else on PATH.

Their versions are pinned in `core/npm/package.json`, which is also the default prefix.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from core.sandbox import Mount

DEFAULT_PREFIX = Path(__file__).parents[1] / "npm"
NPM_INSTALL = "npm install --prefix core/npm"
INSIDE = "/opt/npm"


def npm_version(package: str, mount: Mount) -> str | None:
    """The package and its version, as its package.json tells."""
    try:
        return f"{package} {json.loads((mount.source / package / 'package.json').read_text())['version']}"
    except (OSError, ValueError, KeyError):
        return None


def find(program: str, prefix: Path) -> tuple[Mount, str] | None:
    """The node_modules folder to mount for a program, and the program's path inside; None when it is not installed."""
    linked = prefix / "node_modules" / ".bin" / program
    found = linked if linked.exists() else shutil.which(program)
    if found is None:
        return None
    real = Path(found).resolve()
    modules = [parent for parent in real.parents if parent.name == "node_modules"]
    if not modules:
        return None
    inside = f"{INSIDE}/{program}/node_modules"
    return Mount(modules[-1], inside), f"{inside}/{real.relative_to(modules[-1])}"
