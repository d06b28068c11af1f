"""`python3 -m core doctor`: what holds on this host, found by trying it.

Exit codes: 0 all is there; 2 sandboxes cannot run; 3 they run, but something is missing or weaker.
"""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass
from pathlib import Path

from core.harnesses import Harness, registry
from core.sandbox import SandboxUnavailable
from core.sandbox.backends import start_backend

TOOLS = ("bash", "git", "python3", "node", "rg")


@dataclass(frozen=True)
class Finding:
    """One line of the report. `level`: ok, weak (something is missing or weaker), bad (sandboxes cannot run)."""

    level: str
    what: str
    text: str

    def line(self) -> str:
        return f"{self.level:4}  {self.what:12}  {self.text}"


WATCHED = (
    Finding("ok", "disk", "a watchdog that looks five times a second; a floor of free space for the machine"),
    Finding("ok", "output", "counted as it is read"),
)


def examine(npm_prefix: Path, sandbox: str) -> list[Finding]:
    harnesses = registry(npm_prefix)
    found = asyncio.run(examine_sandbox(harnesses, sandbox))
    return [*found, *(examine_harness(harness) for harness in harnesses.values())]


def exit_code(findings: list[Finding]) -> int:
    levels = {finding.level for finding in findings}
    return 2 if "bad" in levels else 3 if "weak" in levels else 0


async def examine_sandbox(harnesses: dict[str, Harness], choice: str) -> list[Finding]:
    """Starts the backend for real: what it reports is what sessions would get."""
    mounts = [mount for harness in harnesses.values() for mount in harness.mounts() or []]
    with tempfile.TemporaryDirectory(prefix="rl-eval-doctor-") as data:
        try:
            backend, reason = await start_backend(choice, Path(data), mounts)
        except SandboxUnavailable as error:
            return [Finding("bad", "sandbox", str(error))]
        try:
            tools = await backend.inside(
                f"for t in {' '.join(TOOLS)}; do command -v $t >/dev/null && echo $t; done; true"
            )
        except SandboxUnavailable as error:
            return [Finding("bad", "sandbox", str(error))]
        finally:
            await backend.close()
    missing = [tool for tool in TOOLS if tool not in tools.split()]
    traits = [Finding("ok" if strong else "weak", what, text) for what, text, strong in backend.traits()]
    refused = [Finding("weak", "bubblewrap", reason)] if reason else []
    return [*refused, *traits, *WATCHED, tools_finding(missing)]


def tools_finding(missing: list[str]) -> Finding:
    if missing:
        return Finding("weak", "tools", f"not in the sandbox: {', '.join(missing)}; install them on this machine")
    return Finding("ok", "tools", ", ".join(TOOLS))


def examine_harness(harness: Harness) -> Finding:
    if harness.mounts() is None:
        return Finding("weak", harness.name, f"not installed: {harness.package}; run `{harness.install}`")
    return Finding("ok", harness.name, harness.version() or "")
