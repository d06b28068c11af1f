"""What `--list` and `--dry-run` show: the tasks, and what would run."""

from __future__ import annotations

import sys
from collections import Counter
from typing import TYPE_CHECKING

from tabulate import tabulate

from report.record import plain, say
from rl_eval import labels

if TYPE_CHECKING:
    from report.record import Book
    from report.tasks import Task
    from rl_eval import Rollout


def show_plan(tasks: list[Task], plan: list[Rollout], book: Book, every_task: bool) -> int:
    """Prints the plan, with the tasks if asked for. Returns the exit code."""
    if every_task:
        say(task_table(tasks) + "\n", sys.stdout)
    owed = [rollout for rollout in plan if book.owes(rollout)]
    for (harness, model), count in sorted(Counter(labels(rollout.pair) for rollout in owed).items()):
        done = sum(labels(rollout.pair) == (harness, model) for rollout in plan) - count
        say(plain(f"{harness} · {model}: {count} rollouts" + (f", {done} more are done" if done else "")), sys.stdout)
    say(f"{len(owed)} rollouts would run; nothing was created", sys.stdout)
    return 0


def task_table(tasks: list[Task]) -> str:
    head = ["task", "files", "keys", "grade", "timeout (s)", "solution"]
    rows = [
        [
            plain(task.id).replace("|", "\\|"),
            len(task.files),
            len(task.expected),
            "fraction" if task.rules.fraction else "binary",
            task.rules.timeout or "",
            "yes" if task.solution else "no",
        ]
        for task in tasks
    ]
    return tabulate(rows, head, tablefmt="github")
