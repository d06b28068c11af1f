"""`--regrade`: grade the answers of a finished run again, with the tasks as they are now. No session, no model call."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from report.record import Book, Json, Refused, new_run_id, open_journal, plain, read_lines, say
from report.summary import report
from rl_eval import compare

if TYPE_CHECKING:
    from report.tasks import Task


def regrade(path: Path, tasks: list[Task], o: argparse.Namespace) -> int:
    """Writes every line of `path` with its new reward to a new file. Returns the exit code; raises Refused."""
    known, book, changed = {task.id: task for task in tasks}, Book(), 0
    try:
        with path.open("rb") as file:
            missing = {r["task"] for _, _, r in read_lines(file) if r is not None} - set(known)
            if missing:
                raise Refused(f"{path}: its task {sorted(missing)[0]!r} is not among the tasks")
            journal = open_journal(o.out, new_run_id())
            file.seek(0)
            for number, _, record in read_lines(file):
                if record is None:
                    say(plain(f"rl_eval: {path}, line {number} is no record of a rollout: left out"))
                    continue
                after = graded(record, known[record["task"]])
                changed += after["reward"] != record["reward"]
                journal.append(json.dumps(after, allow_nan=False).encode("ascii") + b"\n")
                book.add_record(after)
    except OSError as error:
        raise Refused(f"cannot regrade {path}: {error.strerror}") from None
    journal.close()
    say(plain(f"rl_eval: {changed} rewards of {len(book.every)} changed, to {journal.path}"))
    o.samples = max((result.options.get("samples", 1) for result in book.every), default=1)
    return report(o, book, 3 if any(result.reward is None for result in book.outcomes) else 0)


def graded(record: Json, task: Task) -> Json:
    """The line with the reward that its answer earns now. What was not graded by its answer stays as it is."""
    after = {**record, "task_digest": task.digest}
    if record["status"] != "completed" or record["reward"] is None or record.get("answer") is None:
        return after
    reward, reason = compare(task.expected, record["answer"], task.rules)
    error = None if isinstance(record["answer"], dict) else f"answer: {reason}"
    return {**after, "reward": reward, "error": error if reward != record["reward"] else record["error"]}
