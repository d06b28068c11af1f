"""Compare two runs of the same tasks, paired by task: B minus A, exactly, and only what is comparable.

A task's mean is over its scored rollouts; a reward of null enters nowhere, and both coverages stand beside. Not in
here: what `report.statistics` computes, and any judgement of which difference matters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from tabulate import tabulate

from report.reading import Run
from report.record import Json, Refused, Result, plain
from report.statistics import interval, mean, summarise
from report.table import cell

SOLVED = 0.5  # a task whose mean reward is at least this
SAME = 1e-9  # means no further apart than this are a tie; rounding of sums is smaller


class Side(NamedTuple):
    """One harness and model of one run."""

    name: str
    results: list[Result]  # one per rollout
    row: Json  # of the run's table
    tasks: int  # planned

    @property
    def rewards(self) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {result.task: [] for result in self.results}
        for result in self.results:
            found[result.task] += [] if result.reward is None else [result.reward]
        return found

    def told(self, name: str) -> list[object]:
        """What the lines' options say under this name, each once."""
        return list(dict.fromkeys(result.options.get(name) for result in self.results))


def choose(run: Run, label: str, wanted: str | None) -> Side:
    """The side of a run; `wanted` is HARNESS:MODEL. Raises Refused if that leaves none or several."""
    names = {f"{harness}:{model}": (harness, model) for harness, model in run.pairs}
    there = ", ".join(names)
    if wanted is None and len(names) > 1:
        raise Refused(f"{run.path} holds several pairs: choose one by --{label.lower()}; there are: {there}")
    if wanted is not None and wanted not in names:
        raise Refused(f"{run.path} holds no pair {wanted!r}; there are: {there}")
    pair = names[wanted] if wanted is not None else run.pairs[0]
    results = [result for result in run.book.outcomes if (result.harness, result.model) == pair]
    tasks = run.planned("tasks")
    (row,) = summarise(results, [1], tasks, run.planned("samples"))
    return Side(f"{label}: {run.path}, {' · '.join(pair)}", results, row, tasks)


def obstacles(a: Side, b: Side) -> list[str]:
    """Why the two cannot be paired task by task, in words."""
    found = []
    for here, label, there in ((a, "A", b.rewards), (b, "B", a.rewards)):
        seen = here.rewards
        if len(seen) < here.tasks:
            found.append(f"{label} holds {len(seen)} of its {here.tasks} tasks")
        found += [f"task {task} is only in {label}" for task in sorted(set(seen) - set(there))]
        found += [f"nothing of task {task} was scored in {label}" for task in sorted(seen) if not seen[task]]
    digests: list[dict[str, set[str]]] = []
    for side in (a, b):
        digests.append({})
        for result in side.results:
            digests[-1].setdefault(result.task, set()).add(result.task_digest)
    for task in sorted(set(digests[0]) & set(digests[1])):
        if len(digests[0][task] | digests[1][task]) > 1:
            found.append(f"task {task} is not the same: it was changed")
    return found


def sign_test(better: int, worse: int) -> float:
    """Two-sided p of the exact sign test (Dixon and Mood 1946), ties left out; 1 where there is nothing to test."""
    n = better + worse
    term, tail = 1, 0
    for i in range(min(better, worse) + 1):
        tail, term = tail + term, term * (n - i) // (i + 1)  # term: the ways to choose i of n
    return min(1.0, 2 * tail / (1 << n))


class Comparison(NamedTuple):
    """Of the tasks that both sides scored."""

    means: dict[str, tuple[float, float]]  # by task: A, B

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in self.means.values()]

    @property
    def better(self) -> int:
        return sum(gap > SAME for gap in self.gaps)

    @property
    def worse(self) -> int:
        return sum(gap < -SAME for gap in self.gaps)

    @property
    def reach(self) -> tuple[float, float] | None:
        """95 % interval of the mean gap. None where every gap is the same: there is no spread to tell it from."""
        same = max(self.gaps) - min(self.gaps) <= SAME
        return None if same and abs(self.gaps[0]) < 1 else interval([[gap] for gap in self.gaps], -1.0, 1.0)

    def flipped(self, was: int) -> list[str]:
        """Tasks solved on one side (0: A, 1: B) and not on the other."""
        return sorted(task for task, pair in self.means.items() if pair[was] >= SOLVED > pair[1 - was])


def compare(a: Side, b: Side) -> Comparison:
    """Raises Refused if no task was scored on both sides."""
    left, right = a.rewards, b.rewards
    means = {task: (mean(left[task]), mean(right[task])) for task in sorted(set(left) & set(right))}
    both = {task: (x, y) for task, (x, y) in means.items() if x is not None and y is not None}
    if not both:
        raise Refused("no task was scored on both sides")
    return Comparison(both)


def notes(a: Side, b: Side) -> list[str]:
    """What else differs between the runs and is not what they are compared for."""
    found = []
    for name in ("timeout", "samples"):
        if (then := a.told(name)) != (now := b.told(name)):
            found.append(f"{name}: {', '.join(map(str, then))} in A, {', '.join(map(str, now))} in B")
    return found


def show(a: Side, b: Side, differing: Iterable[str]) -> str:
    """The comparison as Markdown; `differing`: obstacles that it was told to pass over. Raises Refused."""
    found = compare(a, b)
    lines = [f"{side.name}: {side.row['scored']} of {side.row['rollouts']} scored" for side in (a, b)]
    means = [math.fsum(pair[i] for pair in found.means.values()) / len(found.means) for i in (0, 1)]
    values = [str(len(found.means)), *map(cell, means), f"{means[1] - means[0]:+.3f}", cell(found.reach)]
    head = ["tasks", "A: mean of tasks", "B: mean of tasks", "B - A", "95 %, paired by task"]
    table = tabulate([values], head, tablefmt="github", disable_numparse=True, stralign="right")
    ties = len(found.means) - found.better - found.worse
    test = f"{found.better} better in B, {found.worse} worse, {ties} the same and left out"
    sides = (("A", "B"), ("B", "A"))
    flips = [", ".join(found.flipped(n)) or "none" for n in (0, 1)]
    solved = [f"Solved in {x} and not in {y}: {tasks}" for (x, y), tasks in zip(sides, flips, strict=True)]
    tail = [f"Sign test: {test}: p = {sign_test(found.better, found.worse):.4g} (exact, two-sided)", *solved]
    tail[1:1] = [] if found.reach else ["No interval: the tasks do not differ among themselves, or there is only one"]
    tail.append(f"(solved: a mean reward of at least {SOLVED:g})")
    tail += [f"Differs: {line}" for line in [*differing, *notes(a, b)]]
    return "\n".join([*map(shown, lines), "", table, "", *map(shown, tail)])


def shown(line: str) -> str:
    return plain(line, 4000)
