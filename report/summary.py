"""The end of a run: its table, the summaries that were asked for, and what the gates say of it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from report.ci import write_json, write_junit
from report.record import Refused, Result, plain, say
from report.statistics import Gates, summarise, verdict
from report.table import markdown
from rl_eval import labels

if TYPE_CHECKING:
    from report.record import Book
    from rl_eval import Rollout


def report(o: argparse.Namespace, book: Book, code: int, plan: Sequence[Rollout] = (), ended_well: bool = True) -> int:
    """Print the table, write the summaries, and let the gates decide. Returns the exit code.

    A gate may forgive errors that `code` tells of, but not a run that did not end well.
    """
    gates = Gates(o.min_reward, dict(o.min_pass), o.max_error_rate)
    ks = {k for given in o.k or [[1, o.samples]] for k in given}
    told = [n for result in book.every if type(n := result.options.get("tasks")) is int]
    tasks = max([*told, len({rollout.task.id for rollout in plan})])
    rows = summarise(book.outcomes, ks | set(gates.passes), tasks, o.samples, {labels(r.pair) for r in plan})
    width = os.get_terminal_size(1).columns if os.isatty(1) else None
    say(markdown(rows, ks, width), sys.stdout)
    unmet, judged = verdict(rows, gates)
    for line in unmet:
        say(plain(f"rl_eval: {line}"))
    if ended_well:
        code = judged or (0 if gates.error_rate is not None and rows else code)
    try:
        if o.json:
            write_json(o.json, rows, book, unmet, code)
        if o.junit:
            write_junit(o.junit, [*book.outcomes, *(unknown(r) for r in plan if book.outcome(r.id) is None)])
    except OSError as error:
        raise Refused(f"cannot write {error.filename}: {error.strerror}", 3) from None
    return code


def unknown(rollout: Rollout) -> Result:
    """What stands for a rollout that was not begun."""
    return Result(rollout.id, rollout.task.id, *labels(rollout.pair), rollout.sample, error="not run")
