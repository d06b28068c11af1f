"""One self-contained page of a run: table, charts, heat map, and every attempt readable item by item.

Nothing that an agent wrote stands in the page as text: answers, errors and items are compressed, in base64, in data
blocks that no browser executes, and the page's script makes text nodes of them (page.js). What is named by the run's
owner (tasks, harnesses, models) is escaped. A policy lets the page's own script and style run, known by their digests,
and nothing be loaded from anywhere. Charts are static SVG. A page holds the expected answers: it is not for agents.
"""

from __future__ import annotations

import html
import json
import zlib
from base64 import b64encode
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from report import charts
from report.reading import Run, records
from report.record import Json, Refused, plain, redact, strict
from report.statistics import mean, summarise
from report.table import cell, columns
from report.tasks import ABSOLUTE, RELATIVE, load_task
from rl_eval import matches

if TYPE_CHECKING:
    from report.record import Result
    from report.tasks import Task

HERE = Path(__file__).resolve().parent
MOST_KS = 32  # of a curve; beyond, its ks are thinned out
LIST_ERROR_CHARS = 300  # of an error in the list; the rollout itself shows all
FACTS = [
    *("rollout_id", "session_id", "turn_id", "group_id", "started_at", "duration_s", "attempt", "timings", "usage"),
    *("usage_observed", "failure", "resolved", "task_digest", "script_version", "options", "deployment"),
]


def write_page(run: Run, target: Path, tasks: Path) -> list[str]:
    """Write the page. Returns why expected answers are not shown, a line per task. Raises Refused."""
    answers = Answers(tasks)
    index, details = read_attempts(run, answers)
    part = target.with_name(target.name + ".part")
    try:
        part.write_text(build(run, index, details, answers.missing), encoding="utf-8")
        part.replace(target)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise Refused(f"cannot write {target}: {error.strerror}") from None
    return sorted(answers.missing.values())


# --- What the page's script reads -----------------------------------------------------------------------


class Answers:
    """The tasks of a folder, as far as they are those that the run was graded by."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.missing = folder, dict[str, str]()
        self.known: dict[str, Task | None] = {}
        try:
            self.names = {path.name for path in folder.iterdir()}
        except OSError:
            self.names = set()

    def find(self, name: str, digest: str) -> Task | None:
        """The task, or None; then `missing` says why."""
        if name not in self.known:
            self.known[name] = self.load(name)
        task = self.known[name]
        if task is not None and task.digest != digest:
            self.missing[name] = f"task {name!r} in {self.folder} has changed since the run"
            return None
        return task

    def load(self, name: str) -> Task | None:
        if name not in self.names:  # also keeps what a file calls a task from naming another folder
            self.missing[name] = f"there is no task {name!r} in {self.folder}"
            return None
        try:
            return load_task(self.folder / name)
        except Refused as refused:
            self.missing[name] = str(refused)
            return None


def read_attempts(run: Run, answers: Answers) -> tuple[Json, list[str]]:
    """The list of attempts, sorted, and each one packed, in the file's order; `line` of a row tells which."""
    found = [(harness, model) for harness, model in run.pairs]
    tasks = sorted({result.task for result in run.book.every})
    rows: dict[tuple[str, int], Json] = {}
    details: list[str] = []
    for _, record in records(run.path):
        if record is None or (key := (record["rollout_id"], record["attempt"])) in rows:
            continue
        if (result := run.book.attempts.get(key[0], {}).get(key[1])) is None:
            continue  # written since the run was read
        outcome = run.book.outcome(key[0])
        rows[key] = {
            "line": len(details),
            "task": tasks.index(result.task),
            "pair": found.index((result.harness, result.model)),
            "attempts": len(run.book.attempts[key[0]]),
            "counts": outcome is not None and outcome.attempt == result.attempt,
            **list_entry(result),
        }
        details.append(pack(detail(record, answers)))
    order = sorted(rows.values(), key=lambda row: (row["task"], row["pair"], row["sample"], row["attempt"]))
    return {"tasks": tasks, "pairs": [charts.name(*pair) for pair in found], "rows": order}, details


def list_entry(result: Result) -> Json:
    error = redact(result.error or "")[: LIST_ERROR_CHARS + 1]
    return {
        "sample": result.sample,
        "attempt": result.attempt,
        "status": plain(result.status),
        "reward": result.reward,
        "seconds": result.duration_s,
        "tokens": result.tokens,
        "error": error if len(error) <= LIST_ERROR_CHARS else error[:LIST_ERROR_CHARS] + "…",
    }


def detail(record: Json, answers: Answers) -> Json:
    """What is shown of one attempt. Values become texts here: a browser's numbers would round them."""
    marks: list[Json] = []
    task, answer = answers.find(record["task"], record["task_digest"]), strict(record.get("answer"), marks)
    facts = [(name, strict(record[name], marks)) for name in FACTS if record.get(name) is not None]
    items = [strict(item, marks) for item in record["items"]]
    notes = [] if task is not None else [f"The expected answer is not shown: {answers.missing[record['task']]}."]
    notes += ["There is no answer."] if answer is None else []
    notes += [f"Left out, because {mark['why']}: a value in {mark['path'] or 'it'}." for mark in marks[:5]]
    return {
        "keys": compare_keys(task, answer),
        "answer": None if answer is None or isinstance(answer, dict) else json_text(answer),
        "note": redact(" ".join(notes)),
        "error": redact(record["error"] or ""),
        "facts": [[name, json_text(value)] for name, value in facts],
        "items": items,
    }


def compare_keys(task: Task | None, answer: Any) -> list[list[str | None]]:
    """Key, expected value, value of the answer, verdict: right, wrong, missing, extra; or "" where nothing is expected
    because the task is not known."""
    given, expected = (answer if isinstance(answer, dict) else {}), ({} if task is None else task.expected)
    rows: list[list[str | None]] = []
    for key, value in expected.items():
        tolerance = task.rules.tolerances.get(key, (RELATIVE, ABSOLUTE)) if task else (RELATIVE, ABSOLUTE)
        verdict = "missing" if key not in given else "right" if matches(value, given[key], tolerance) else "wrong"
        rows.append([key, json_text(value), json_text(given[key]) if key in given else None, verdict])
    left = "" if task is None else "extra"
    return rows + [[key, None, json_text(given[key]), left] for key in given if key not in expected]


def json_text(value: Any) -> str:
    """On one line if it is short."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    short = json.dumps(value, ensure_ascii=False)
    return short if len(short) <= 80 else json.dumps(value, ensure_ascii=False, indent=2)


def pack(value: Any) -> str:
    """As page.js unpacks it."""
    return b64encode(zlib.compress(json.dumps(value, allow_nan=False).encode("ascii"))).decode("ascii")


# --- The page -------------------------------------------------------------------------------------------


def build(run: Run, index: Json, details: list[str], missing: Iterable[str]) -> str:
    """The whole page as text."""
    style, script = ((HERE / name).read_text("utf-8") for name in ("page.css", "page.js"))
    tasks, samples = run.planned("tasks"), run.planned("samples") or 1
    most = max(samples, 1 + max(result.sample for result in run.book.every))
    step = -(-most // MOST_KS)
    rows = summarise(run.book.outcomes, {1, samples, most, *range(step, most + 1, step)}, tasks, samples)
    notes = [f"Expected answers are not shown for: {', '.join(map(plain, sorted(missing)))}."] if missing else []
    return Template((HERE / "page.html").read_text("utf-8")).substitute(
        policy=policy(script, style),
        title=escape(f"rl-eval: {run.path.name}"),
        style=style,
        script=script,
        summary=escape(summary(run, rows)),
        notes="".join(f"<p>{escape(note)}</p>" for note in notes),
        table=results(rows, {1, samples}),
        charts="\n".join(figures(run, rows)),
        heat=heat_map(run, index),
        index=pack(index),
        details="".join(line + "\n" for line in details),
    )


def policy(script: str, style: str) -> str:
    """Nothing is loaded, nothing runs but these two."""
    script, style = (b64encode(sha256(text.encode()).digest()).decode() for text in (script, style))
    sources = f"script-src 'sha256-{script}'; style-src 'sha256-{style}'"
    return f"default-src 'none'; {sources}; base-uri 'none'; form-action 'none'"


def escape(text: str) -> str:
    """For text and attributes of markup."""
    return html.escape(plain(text))


def summary(run: Run, rows: list[Json]) -> str:
    runs = sorted({result.run_id for result in run.book.every})
    scored, planned = sum(row["scored"] for row in rows), sum(row["rollouts"] for row in rows)
    began = min((result.started_at for result in run.book.every), default="")
    return f"{scored} of {planned} rollouts scored; run {', '.join(runs[:5])}, begun {began or 'at an unknown time'}"


def results(rows: list[Json], ks: set[int]) -> str:
    """The table, with the interval next to the mean."""
    names = [name for name in columns(rows, ks, None)[0] if name != "reward, 95 %"]
    place = names.index("mean reward") + 1
    names[place:place] = ["reward, 95 %", "mean reward, errors as 0"]
    head = "".join(f'<th scope="col"{number(name)}>{escape(name)}</th>' for name in names)
    body = ""
    for row in rows:
        cells = "".join(f"<td{number(name)}>{escape(shown(name, row[name]))}</td>" for name in names)
        body += f"<tr>{cells}</tr>"
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def number(column: str) -> str:
    return "" if column in ("harness", "model") else ' class="number"'


def shown(column: str, value: Any) -> str:
    return value if isinstance(value, str) else cell(value, 1 if column.endswith("(s)") else 3)


def figures(run: Run, rows: list[Json]) -> list[str]:
    """A figure per chart; in place of one that has nothing to show, why."""
    results = run.book.outcomes
    seconds = [(charts.name(r.harness, r.model), r.duration_s) for r in results]
    tokens = [(charts.name(r.harness, r.model), r.tokens) for r in results]
    told = [(pair, float(count)) for pair, count in tokens if count is not None]
    unknown = f"; {len(tokens) - len(told)} of {len(tokens)} do not tell them" if len(told) < len(tokens) else ""
    found = [
        ("Mean reward", charts.intervals(rows), "nothing was scored"),
        ("pass@k and pass^k", charts.curves(rows), "there is one sample per task only"),
        ("Duration: least, quartiles, most", charts.boxes("seconds", seconds), ""),
        (f"Tokens: least, quartiles, most{unknown}", charts.boxes("tokens", told), "none are known"),
    ]
    return [
        f"<figure><figcaption>{escape(title)}</figcaption>{svg or f'<p>No chart: {why}.</p>'}</figure>"
        for title, svg, why in found
    ]


def heat_map(run: Run, index: Json) -> str:
    """Task by pair: the mean reward, and how many were scored if not all."""
    groups: dict[tuple[str, str], list[float | None]] = {}
    for result in run.book.outcomes:
        groups.setdefault((result.task, charts.name(result.harness, result.model)), []).append(result.reward)
    head = "".join(f'<th scope="col">{escape(pair)}</th>' for pair in index["pairs"])
    body = ""
    for t, task in enumerate(index["tasks"]):
        cells = [heat_cell(groups.get((task, pair), []), t, p) for p, pair in enumerate(index["pairs"])]
        body += f'<tr><th scope="row">{escape(task)}</th>{"".join(cells)}</tr>'
    return f'<table><thead><tr><th scope="col">task</th>{head}</tr></thead><tbody>{body}</tbody></table>'


def heat_cell(rewards: list[float | None], task: int, pair: int) -> str:
    value, scored = mean(rewards), sum(reward is not None for reward in rewards)
    kind = "none" if value is None else f"r{round(min(1.0, max(0.0, value)) * 10)}"
    coverage = f" ({scored}/{len(rewards)})" if scored < len(rewards) else ""
    label = f"{'n/a' if value is None else f'{value:.2f}'}{coverage}" if rewards else "–"
    return f'<td><button type="button" class="{kind}" data-task="{task}" data-pair="{pair}">{label}</button></td>'
