"""Export: a run's outcomes, joined with its traces by (rollout_id, attempt), as what a trainer reads.

A target is one module here and one line in formats.py. It says whether it holds null rewards and fractional
weights and whether it needs advantages, and turns a group, held whole, into JSON objects; groups are
written one after the other, in the order of the run's file, so that memory follows the largest group and the same
inputs give the same bytes.

A rollout's outcome is its first line with a reward, else its last; its trace is that attempt's. What is
left out is counted in the `Report`, never filled in: rollouts without a trace, null rewards, groups with either.
Exporting nothing is an error.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Protocol

from gateway import strict
from gateway.advantages import advantages, is_flat
from gateway.export.shapes import CannotExport, Group, Rollout
from gateway.formats import module_of
from gateway.graph import build
from gateway.record import Doc, dump
from gateway.sequences import AccountingError, Ownership, cut, sequences
from gateway.store import StoreError, log_path, read

__all__ = ["CannotExport", "Options", "Report", "export", "summary"]

NEEDED = ("rollout_id", "group_id", "task", "harness", "model", "sample")


class Target(Protocol):
    """What each module of a target offers."""

    NULL_REWARDS: bool
    """Whether it can hold a rollout whose reward is null."""
    WEIGHTS: bool
    """Whether it can hold weights other than 0 and 1."""
    ADVANTAGES: bool
    """Whether it needs them."""

    def convert(self, group: Group) -> Iterator[Doc]: ...


@dataclass(frozen=True)
class Options:
    advantage: str | None = "grpo"
    drop_zero_variance: bool = False
    ownership: Ownership = "first"
    compactions: bool = False
    max_length: int | None = None


@dataclass
class Report:
    """What an export did and what it left out."""

    lines: int = 0
    groups: int = 0
    rollouts: int = 0
    sequences: int = 0
    trained_tokens: int = 0
    no_trace: list[str] = field(default_factory=list)
    no_sequence: list[str] = field(default_factory=list)
    """Rollouts whose trace has nothing to train."""
    null_rewards: int = 0
    incomplete: int = 0
    """Groups with a null reward or a missing trace."""
    zero_variance: int = 0
    """Groups whose rewards are all equal: kept unless dropping them was asked for."""
    unfrozen: int = 0
    masked: Counter[str] = field(default_factory=Counter)
    """Sampled tokens that are not trained, by reason."""
    dropped: int = 0
    """Sequences that held no token to train."""
    cut: int = 0
    problems: list[str] = field(default_factory=list)
    """Lines of the run's file that are no outcomes."""


def find_target(name: str) -> Target:
    target: Target = import_module(module_of(name))
    return target


def export(run: Path, folder: Path, target: str, out: Path, options: Options = Options()) -> Report:
    """Write the run's rollouts to `out`; CannotExport leaves no file behind."""
    exporter, report = find_target(target), Report()
    if options.ownership == "split" and not exporter.WEIGHTS:
        raise CannotExport(f"{target} has a mask of zeros and ones: use --ownership first")
    if options.advantage is None and exporter.ADVANTAGES:
        raise CannotExport(f"{target} needs advantages: use --advantage grpo, dr_grpo or rloo")
    temporary = out.with_name(out.name + ".part")
    try:
        with temporary.open("x", encoding="ascii") as file:
            for group in groups(run, folder, exporter, options, report):
                for line in exporter.convert(group):
                    file.write(dump(line) + "\n")
                    report.lines += 1
        if not report.lines:
            raise CannotExport(f"nothing to export: {summary(report)}")
        temporary.rename(out)
    except FileExistsError:
        raise CannotExport(f"{temporary} exists: another export writes it, or remove it") from None
    except (AccountingError, StoreError) as error:
        temporary.unlink(missing_ok=True)
        raise CannotExport(str(error)) from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return report


def groups(run: Path, folder: Path, exporter: Target, options: Options, report: Report) -> Iterator[Group]:
    numbers = count()
    for number, (group_id, members) in enumerate(by_group(outcomes(run, report)).items()):
        rewards = {one["rollout_id"]: one["reward"] for one in members}
        scored = [reward for reward in rewards.values() if reward is not None]
        report.zero_variance += is_flat(scored)
        before = len(report.no_trace), report.null_rewards
        found = advantages(rewards, options.advantage) if options.advantage else dict.fromkeys(rewards)
        group = Group(group_id, number)
        for outcome in members:
            report.null_rewards += outcome["reward"] is None
            trace = load(outcome, next(numbers), found[outcome["rollout_id"]], folder, options, report)
            if trace and (outcome["reward"] is not None or exporter.NULL_REWARDS):
                group.rollouts.append(trace)
        report.incomplete += before != (len(report.no_trace), report.null_rewards)
        if group.rollouts and not (options.drop_zero_variance and is_flat(scored)):
            add_up(group, report)
            yield group


def add_up(group: Group, report: Report) -> None:
    report.groups += 1
    report.rollouts += len(group.rollouts)
    for _, row in group.rows:
        report.sequences += 1
        report.trained_tokens += sum(row["loss_mask"])


def outcomes(run: Path, report: Report) -> dict[str, Doc]:
    """What became of each rollout: its first line with a reward, else its last. Lines in the order of the file."""
    found: dict[str, Doc] = {}
    try:
        with run.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    add_outcome(found, number, line, report)
    except OSError as error:
        raise CannotExport(f"{run}: cannot be read: {error.strerror}") from None
    return found


def add_outcome(found: dict[str, Doc], number: int, line: bytes, report: Report) -> None:
    try:
        outcome = outcome_of(line)
    except ValueError as error:
        report.problems.append(f"line {number}: {error}")
        return
    known = found.get(outcome["rollout_id"])
    if known is None or known["reward"] is None:
        found[outcome["rollout_id"]] = outcome


def outcome_of(line: bytes) -> Doc:
    value = strict.loads(line)
    if not isinstance(value, dict) or any(value.get(name) is None for name in NEEDED):
        raise ValueError("no record of a rollout")
    reward = value.get("reward")
    if reward is not None and (type(reward) not in (int, float) or not math.isfinite(reward)):
        raise ValueError(f"reward {json.dumps(reward)[:40]} is no finite number")
    return {name: value[name] for name in NEEDED} | {"reward": reward, "attempt": value.get("attempt", 1)}


def by_group(found: Mapping[str, Doc]) -> dict[str, list[Doc]]:
    grouped: dict[str, list[Doc]] = {}
    for outcome in found.values():
        grouped.setdefault(outcome["group_id"], []).append(outcome)
    return {name: sorted(members, key=lambda one: one["sample"]) for name, members in grouped.items()}


def load(
    outcome: Doc, number: int, advantage: float | None, folder: Path, options: Options, report: Report
) -> Rollout | None:
    """The rollout with its trace; None, and a note in the report, if there is nothing of it to train."""
    path = log_path(folder, outcome["rollout_id"], outcome["attempt"])
    if not path.exists() or (trace := read(path)).dropped or not trace.attempt_id:
        report.no_trace.append(outcome["rollout_id"])
        return None
    report.unfrozen += trace.frozen != trace.snapshot
    graph = build(trace.calls.values())
    names = {name: outcome[name] for name in NEEDED if name != "rollout_id"}
    whose = {"snapshot": trace.snapshot, "rollout_id": trace.rollout_id, "attempt_id": trace.attempt_id, **names}
    try:
        found = sequences(graph, whose, options.ownership, options.compactions)
    except AccountingError as error:
        raise AccountingError(f"{path}: {error}") from None
    report.masked += found.masked
    report.dropped += found.dropped
    rows = [finish(row, outcome, advantage, trace.rewards, options, report) for row in found.rows]
    rows = [row for row in rows if any(row["loss_mask"])]
    if not rows:
        report.no_sequence.append(outcome["rollout_id"])
        return None
    return Rollout(
        outcome, number, advantage, graph, [{**row, "index": at, "count": len(rows)} for at, row in enumerate(rows)]
    )


def finish(
    row: Doc,
    outcome: Doc,
    advantage: float | None,
    of_calls: Mapping[str, float | None],
    options: Options,
    report: Report,
) -> Doc:
    """The row with its rewards and its advantage, cut if it is too long."""
    calls = [{**call, "reward": of_calls.get(call["call_id"])} for call in row["calls"]]
    row |= {"reward": outcome["reward"], "advantage": advantage, "calls": calls}
    short = row if options.max_length is None else cut(row, options.max_length)
    report.cut += short is not row
    return short


def summary(report: Report) -> str:
    """What was exported, and what was left out, on one line."""
    masked = ", ".join(f"{why} {count:,}" for why, count in sorted(report.masked.items()))
    notes: list[tuple[str, object]] = [
        ("null rewards", report.null_rewards),
        ("incomplete groups", report.incomplete),
        ("groups without variance", report.zero_variance),
        ("rollouts without a trace", shortened(report.no_trace)),
        ("rollouts with nothing to train", shortened(report.no_sequence)),
        ("sequences cut to the maximum length", report.cut),
        ("sequences left out, as others train their tokens", report.dropped),
        ("traces not frozen", report.unfrozen),
        ("sampled tokens not trained", masked),
        ("lines left alone", shortened(report.problems)),
    ]
    done = f"sequences: {report.sequences}, of rollouts: {report.rollouts}, in groups: {report.groups}"
    return "; ".join([f"{done}; tokens to train: {report.trained_tokens:,}", *(f"{k}: {v}" for k, v in notes if v)])


def shortened(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
