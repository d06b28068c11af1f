"""Files of runs for the tests of `report/`, written by the script's own writer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from report.record import Json, Result, to_line
from report.tasks import load_task

OPTIONS = {"samples": 2, "tasks": 1, "timeout": 900.0}


def result(
    task: str, sample: int, reward: float | None, harness: str = "codex", model: str = "m", **known: Any
) -> Result:
    """A finished attempt. Its rollout's id follows from its place, as in a run."""
    rollout_id = f"run-{task}-{harness}-{model}-{sample}"
    defaults: Json = {
        "group_id": f"run-{task}-{harness}-{model}",
        "run_id": "run",
        "status": "error" if reward is None else "completed",
        "reward": reward,
        "duration_s": 1.5,
        "task_digest": "d",
        "started_at": "2026-01-01T00:00:00Z",
        "options": OPTIONS,
        "usage": usage(1000, 100),
    }
    return Result(rollout_id, task, harness, model, sample, **{**defaults, **known})


def usage(given: int, got: int, cached: int = 0) -> Json:
    details = {"cached_tokens": cached}
    return {"input_tokens": given, "input_tokens_details": details, "output_tokens": got, "total_tokens": given + got}


def write_run(path: Path, results: list[Result]) -> Path:
    path.write_bytes(b"".join(map(to_line, results)))
    return path


def rewards(path: Path, by_task: dict[str, list[float | None]], **known: Any) -> Path:
    """A run with these rewards, in which nothing is owed."""
    samples = max(map(len, by_task.values()))
    known.setdefault("options", {"samples": samples, "tasks": len(by_task), "timeout": 900.0})
    return write_run(path, [result(t, n, r, **known) for t, rs in by_task.items() for n, r in enumerate(rs)])


def write_task(folder: Path, name: str, expected: Any, **files: str) -> str:
    """A task; returns its digest."""
    task = folder / name
    task.mkdir(parents=True)
    (task / "instruction.md").write_text("Do it.")
    (task / "expected.json").write_text(json.dumps(expected))
    for file, content in files.items():
        (task / f"{file}.json").write_text(content)
    return load_task(task).digest
