"""What a run's rewards say: estimators, intervals, a row per harness and model, gates. Pure: no I/O, no clock.

A reward of None means that nothing was measured. It enters no mean; the columns `errors as 0` are the lower bounds
that count it as a miss, and `scored` of `rollouts` always stands beside.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from report.record import Json, Result


class Gates(NamedTuple):
    """What a run must reach for exit code 0; None: nothing."""

    reward: float | None = None
    passes: Mapping[int, float] = MappingProxyType({})  # by k
    error_rate: float | None = None


def pass_at_k(n: int, c: int, k: int) -> float | None:
    """Chance that k of n samples, of which c are right, hold a right one; None if k > n or k < 1.

    The unbiased estimator of Chen et al. 2021 (arXiv:2107.03374), equation 1.
    """
    return None if not 1 <= k <= n else 1.0 - math.comb(n - c, k) / math.comb(n, k)


def mean(values: Iterable[float | None]) -> float | None:
    """Mean of what is known, whatever its order; None if nothing is."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def pass_hat_k(n: int, c: int, k: int) -> float | None:
    """Chance that k of n samples, of which c are right, are all right; None if k > n or k < 1.

    The unbiased estimator of Yao et al. 2024 (arXiv:2406.12045), section 3.
    """
    return None if not 1 <= k <= n else math.comb(c, k) / math.comb(n, k)


def interval(clusters: Iterable[list[float]], low: float = 0.0, high: float = 1.0) -> tuple[float, float] | None:
    """95 % confidence interval of the mean of clustered values between `low` and `high`; None for one cluster.

    Cluster-robust variance with Student's t at one degree of freedom less than there are clusters (Cameron and Miller
    2015, doi:10.3368/jhr.50.2.317, equations 8 and 12). Where every value is the same bound, that variance is 0 and
    says nothing: then exact, each cluster as one trial (Clopper and Pearson 1934).
    """
    known = [values for values in clusters if values]
    if (count := len(known)) < 2:
        return None
    flat = [value for values in known for value in values]
    centre = math.fsum(flat) / len(flat)
    if centre in (low, high) and low < high:
        reach = (high - low) * (1 - 0.025 ** (1 / count))
        return (low, low + reach) if centre == low else (high - reach, high)
    spread = math.fsum(math.fsum(value - centre for value in values) ** 2 for values in known)
    half = student_t(count - 1) * math.sqrt(spread * count / (count - 1)) / len(flat)
    return max(low, centre - half), min(high, centre + half)


def student_t(degrees: int) -> float:
    """The 97.5 % quantile of Student's t, from its distribution as a finite sum in the angle atan(t / sqrt(degrees))
    (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    below, above, odd = 0.0, math.pi / 2, degrees % 2
    for _ in range(60):
        angle = (below + above) / 2
        sine, cosine = math.sin(angle), math.cos(angle)
        term, total = (cosine if odd else 1.0), 0.0
        for n in range(2 + odd, degrees + 1, 2):
            total, term = total + term, term * cosine * cosine * (n - 1) / n
        share = (angle + sine * total) * 2 / math.pi if odd else sine * total
        below, above = (angle, above) if share < 0.95 else (below, angle)
    return math.tan(below) * math.sqrt(degrees)


def summarise(
    results: list[Result],
    ks: Iterable[int],
    tasks: int = 0,
    samples: int = 0,
    pairs: Iterable[tuple[str, str]] = (),
) -> list[Json]:
    """One row per harness and model, sorted, by column, of one result per rollout. None: nothing was scored.

    `tasks`, `samples` and `pairs` were planned, if more than the results show. In pass@k and pass^k every task weighs
    the same; each is a mean and the share of the tasks that could enter it, those with at least k scored samples. The
    columns `errors as 0` are lower bounds: what was planned and not scored counts as a miss.
    """
    rows = []
    for harness, model in sorted({*pairs, *((r.harness, r.model) for r in results)}):
        mine = [r for r in results if (r.harness, r.model) == (harness, model)]
        by_task: dict[str, list[float]] = {r.task: [] for r in mine}
        planned = {task: max(samples, sum(r.task == task for r in mine)) for task in by_task}
        all_ = max(tasks, len(planned))
        rollouts = sum(planned.values()) + (all_ - len(planned)) * samples
        for r in mine:
            by_task[r.task] += [] if r.reward is None else [r.reward]
        rewards, statuses = [x for xs in by_task.values() for x in xs], [r.status for r in mine]
        row: Json = {"harness": harness, "model": model, "rollouts": rollouts, "scored": len(rewards)}
        row["mean reward"] = mean(rewards)
        row["mean reward, errors as 0"] = math.fsum(rewards) / rollouts
        for name, estimate in (("pass@", pass_at_k), ("pass^", pass_hat_k)):
            for k in sorted(set(ks)):
                found = [estimate(len(xs), xs.count(1.0), k) for xs in by_task.values()]
                least = [estimate(planned[task], xs.count(1.0), k) for task, xs in by_task.items()]
                least += [estimate(samples, 0, k)] * (all_ - len(planned))
                row[f"{name}{k}"] = mean(found), (len(found) - found.count(None), all_)
                row[f"{name}{k}, errors as 0"] = None if None in least else mean(least)
        row |= {"errors": statuses.count("error"), "timeouts": statuses.count("timeout")}
        row["mean duration (s)"] = mean(r.duration_s for r in mine if r.reward is not None)
        row["reward, 95 %"] = interval(by_task.values())
        complete = [xs for task, xs in by_task.items() if len(xs) == planned[task]]
        row |= {"groups": all_, "complete groups": len(complete)}
        rows.append({**row, "zero-variance groups": sum(len(set(xs)) == 1 < len(xs) for xs in complete)})
    return rows


def verdict(rows: list[Json], gates: Gates) -> tuple[list[str], int]:
    """What the gates say of the rows, in a line each that is not met, and the exit code: 0, 1 unmet, 3 undecided.

    Every row must meet every gate. What was not scored within the allowed error rate is left out of means; beyond it
    there is too little to say, whatever the mean.
    """
    lines, codes = [], [0]

    def check(row: Json, name: str, value: float | None, least: float, low_coverage: bool) -> None:
        code = 3 if low_coverage or value is None else int(value < least)
        why = "too little was scored to say" if code == 3 else f"{value:.3f} is less"
        if code:
            lines.append(f"{row['harness']} · {row['model']}: {name} must be at least {least:g}: {why}")
        codes.append(code)

    for row in rows:
        missing = 1 - row["scored"] / row["rollouts"] if row["rollouts"] else 1.0
        if gates.error_rate is not None and missing > gates.error_rate:
            lines.append(f"{row['harness']} · {row['model']}: error rate {missing:.3f}, allowed {gates.error_rate:g}")
            codes.append(1)
            continue
        low = missing > (gates.error_rate or 0.0)
        if gates.reward is not None:
            check(row, "mean reward", row["mean reward"], gates.reward, low)
        for k, least in gates.passes.items():
            entered, tasks = row[f"pass@{k}"][1]
            check(row, f"pass@{k}", row[f"pass@{k}"][0], least, low or entered < tasks * (1 - (gates.error_rate or 0)))
    return lines, 1 if 1 in codes else max(codes)
