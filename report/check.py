"""What `--check` says of the tasks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from report.record import plain

if TYPE_CHECKING:
    from report.record import Result
    from report.tasks import Task


def report_check(tasks: list[Task], results: Iterable[Result]) -> tuple[list[str], int]:
    """A line per task, one for all, and the exit code: 1 a task is unsound, 3 not measured, 0."""
    found = {(result.task, result.sample): result for result in results}
    lines, codes = [], []
    for task in tasks:
        problems, code = ([], 0) if task.solution else (["no solution.sh"], 1)
        for sample, wanted, what in ((0, 1.0, "the solution"), (1, 0.0, "doing nothing")):
            result = found.get((task.id, sample))
            if result is not None and result.reward not in (None, wanted):
                problems.append(f"{what} earned {result.reward}, not {wanted}: {result.error or 'wrong values'}")
                code = 1
            elif (result is None or result.reward is None) and (sample or task.solution):
                problems.append(f"{what} was not measured: {result.error if result else 'not run'}")
                code = code or 3
        lines.append(plain(f"{task.id}: {'; '.join(problems) or 'ok'}"))
        codes.append(code)
    lines.append(f"{codes.count(0)} of {len(tasks)} tasks are sound")
    return lines, 1 if 1 in codes else max(codes)
