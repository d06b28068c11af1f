"""The table of a run: Markdown, as wide as there is room for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tabulate import tabulate

from report.record import Json, plain

HIDDEN = ("groups", "complete groups", "zero-variance groups")
# Left out first when there is not enough room; pass^k and the larger k go before these.
SPARE = ("mean duration (s)", "timeouts", "reward, 95 %", "errors")
LEAST_NAME = 8  # characters of a name that are shown at least


def columns(rows: list[Json], ks: Iterable[int], width: int | None) -> tuple[list[str], list[str]]:
    """The columns that are shown, and those that found no room in `width` characters (None: any)."""
    wanted = sorted(set(ks), reverse=True)
    asked = {f"pass@{k}" for k in wanted} | {f"pass^{k}" for k in wanted if k > 1}  # pass^1 is pass@1
    names = [name for name in (rows[0] if rows else ()) if name in asked or not name.startswith(("pass@", "pass^"))]
    names = [name for name in names if name not in HIDDEN and not name.endswith("errors as 0")]
    left_out: list[str] = []
    order = [f"pass^{k}" for k in wanted] + [f"pass@{k}" for k in wanted[:-1]] + list(SPARE)
    for name in order:
        if width is None or len(render(rows, names).splitlines()[0]) <= width:
            break
        if name in names:
            names.remove(name)
            left_out.append(name)
    return names, left_out


def markdown(rows: list[Json], ks: Iterable[int], width: int | None = None) -> str:
    """The rows as a Markdown table, and below it what it leaves out and what must be known to read it."""
    names, left_out = columns(rows, ks, width)
    notes = [f"Not shown for want of room: {', '.join(left_out)}; --json PATH has all."] if left_out else []
    for row in rows:
        who = f"{plain(row['harness'])} · {plain(row['model'])}"
        if row["scored"] < row["rollouts"]:
            bound = f"{row['mean reward, errors as 0']:.3f}"
            notes.append(f"{who}: {row['scored']} of {row['rollouts']} scored; mean reward with the rest as 0: {bound}")
        complete, groups, flat = row["complete groups"], row["groups"], row["zero-variance groups"]
        if row["rollouts"] > groups and (complete < groups or flat):
            notes.append(
                f"{who}: {complete} of {groups} groups complete, {flat} of these with the same reward throughout"
            )
    excess = 0 if width is None else len(render(rows, names).splitlines()[0]) - width
    return "\n".join([render(rows, names, max(0, excess)), *([""] if notes else []), *notes])


def render(rows: list[Json], names: list[str], excess: int = 0) -> str:
    """The Markdown; model names are cut by `excess` characters, the longest first."""
    body = [[cell(row[name], 1 if name.endswith("(s)") else 3) for name in names] for row in rows]
    longest = max((len(line[1]) for line in body), default=0)
    for line in body if excess else ():
        most = max(LEAST_NAME, longest - excess)
        line[1] = line[1] if len(line[1]) <= most else line[1][: most - 1].rstrip("\\") + "…"
    align = ["left", "left"] + ["right"] * (len(names) - 2) if rows else None
    head = names or ["harness", "model", "rollouts"]
    return tabulate(body, head, tablefmt="github", disable_numparse=True, colalign=align)


def cell(value: Any, digits: int = 3) -> str:
    """A pass@k that not every task could enter says how many did."""
    if isinstance(value, tuple) and isinstance(value[1], tuple):
        mean, (entered, tasks) = value
        return cell(mean) + (f" ({entered}/{tasks} tasks)" if 0 < entered < tasks else "")
    if isinstance(value, tuple):
        return f"{value[0]:.2f} to {value[1]:.2f}"
    if isinstance(value, str):
        return plain(value).replace("|", "\\|")
    return "n/a" if value is None else f"{value:.{digits}f}" if isinstance(value, float) else str(value)
