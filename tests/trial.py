"""What a trial of the script has: a folder of tasks, a scripted deployment, and runs that start in milliseconds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forked import Forked, Helper, helper
from scripted_deployment import Deployment, Json, Script, Session, serving
from test_script import Run, environment, finished, write_tasks


@dataclass
class Trial:
    folder: Path
    deployment: Deployment
    helper: Helper

    @property
    def path(self) -> Path:
        return self.folder / "out.jsonl"

    def start(self, arguments: str, **env: str) -> Forked:
        """`OUT` in the arguments is the run's file."""
        words = arguments.replace("OUT", str(self.path)).split()
        variables = environment(self.deployment.base_url, **env)
        return self.helper.start(self.folder, ["--tasks", str(self.folder / "tasks"), *words], variables)

    def run(self, arguments: str, **env: str) -> Run:
        process = self.start(arguments, **env)
        return self.end(process)

    def end(self, process: Forked) -> Run:
        code = process.wait()
        return finished(self.folder, code, process.out, process.err)

    def begin(self, arguments: str) -> Run:
        return self.run(f"--out OUT {arguments}")

    def resume(self, arguments: str = "") -> Run:
        return self.run(f"--resume OUT {arguments}")

    def creates(self, rollout_id: str) -> int:
        return sum(found == rollout_id for _, _, found in self.deployment.creates)


@contextmanager
def trial(folder: Path, runs: Helper, script: Script | None = None, tasks: Any = ("t",)) -> Iterator[Trial]:
    """A trial with its own deployment, in an empty folder."""
    folder.mkdir(exist_ok=True)
    write_tasks(folder, tasks)
    with serving(script or Script(answer=by_place)) as deployment:
        yield Trial(folder, deployment, runs)


@contextmanager
def helping(folder: Path) -> Iterator[Helper]:
    with helper(folder) as runs:
        yield runs


def by_place(session: Session) -> bytes:
    """An answer that depends on the sample alone: every second one is right."""
    return b'{"x": %d}' % (1 + int(session.body["metadata"]["sample"]) % 2)


def final(lines: list[Json]) -> list[str]:
    """The rollouts that lines settle, one name per line, sorted."""
    return sorted(line["rollout_id"] for line in lines if line["final"])


def measured(path: Path) -> list[Json]:
    """The rows of a JSON summary without what a clock tells."""
    rows = json.loads(path.read_text())["rows"]
    return [{name: value for name, value in row.items() if name != "mean duration (s)"} for row in rows]
