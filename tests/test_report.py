"""`python3 -m report` as a process: table, comparison, and the page as bytes. In a browser: test_report_page.py."""

from __future__ import annotations

import base64
import itertools
import json
import math
import re
import statistics
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
from run_files import result, rewards, usage, write_run, write_task
from scripted_deployment import Script
from test_script import by_sample, run, write_tasks

from report.compare import sign_test
from report.page import write_page
from report.reading import Run
from report.record import Json, Result, plain

ROOT = Path(__file__).resolve().parents[1]


def report(*words: str | Path, code: int = 0) -> tuple[str, str]:
    """Output and errors of a command that must end with `code`."""
    command = [sys.executable, "-m", "report", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout, done.stderr


def refused(*words: str | Path) -> str:
    out, err = report(*words, code=2)
    assert out == "" and len(err.splitlines()) == 1
    return err


# --- table ------------------------------------------------------------------------------------


def test_table_is_the_one_that_the_run_printed(tmp_path: Path) -> None:
    write_tasks(tmp_path, "ab")
    done, _ = run(tmp_path, Script(answer=by_sample), "--samples 3 --harness codex --harness claude_sdk --model m")
    assert done.code == 0
    assert report("table", tmp_path / "out.jsonl") == (done.out, "")
    assert done.row[4] not in ("0.000", "1.000")


def test_table_of_an_unfinished_run_counts_what_was_planned(tmp_path: Path) -> None:
    options = {"samples": 4, "tasks": 3}
    path = write_run(tmp_path / "x.jsonl", [result("a", n, 1.0, options=options) for n in range(3)])
    out, _ = report("table", path)
    assert out.splitlines()[2].split("|")[3:5] == [" " * 9 + "12 ", " " * 8 + "3 "]
    assert "3 of 12 scored" in out


def test_table_takes_other_ks(tmp_path: Path) -> None:
    path = rewards(tmp_path / "x.jsonl", {"a": [1.0, 0.0, 0.0, 0.0]})
    out, _ = report("table", path, "--k", "2,3", "--k", "9")
    row = dict(zip(*(re.split(r" *\| *", line.strip("| ")) for line in out.splitlines()[0:3:2]), strict=True))
    assert (row["pass@2"], row["pass@3"], row["pass@9"]) == ("0.500", "0.750", "n/a")
    assert "pass@1" not in row


PRICES = {"m": {"input": 2.0, "cached": 0.5, "output": 10.0}}
TOLD = usage(1_000_000, 100_000, cached=400_000)  # 600,000 at 2, 400,000 at 0.5, 100,000 at 10: 2.4 dollars


@pytest.mark.parametrize(
    ("usages", "cost", "says"),
    [
        pytest.param([TOLD], "2.4000", "", id="known"),
        pytest.param([TOLD, TOLD], "4.8000", "", id="every-attempt"),
        pytest.param([TOLD, None], "at least 2.4000", "1 of 2 attempts do not tell", id="one-unknown"),
        pytest.param([None], "n/a", "1 of 1 attempts do not tell", id="unknown"),
        pytest.param([usage(0, 0)], "0.0000", "", id="nothing"),
        pytest.param([{"input_tokens": 500_000, "output_tokens": 0}], "1.0000", "", id="cached-not-told"),
        pytest.param([{"input_tokens": "x", "output_tokens": 0}], "n/a", "1 of 1 attempts do not tell", id="odd"),
    ],
)
def test_cost_counts_attempts_and_says_what_is_unknown(
    tmp_path: Path, usages: list[Json | None], cost: str, says: str
) -> None:
    last = len(usages)
    attempts = [
        result("a", 0, 1.0 if n == last else None, attempt=n, usage=used, options={"samples": 1, "tasks": 1})
        for n, used in enumerate(usages, 1)
    ]
    (prices := tmp_path / "p.json").write_text(json.dumps(PRICES))
    out, _ = report("table", write_run(tmp_path / "x.jsonl", attempts), "--prices", prices)
    assert out.splitlines()[2].split("|")[-2].strip() == cost
    assert (says in out) if says else out.count("\n") == 3


def test_cost_from_what_was_seen_of_a_failed_attempt_is_a_lower_bound(tmp_path: Path) -> None:
    (prices := tmp_path / "p.json").write_text(json.dumps(PRICES))
    path = write_run(tmp_path / "x.jsonl", [result("a", 0, 0.0, usage=None, usage_observed=TOLD)])
    assert "at least 2.4000" in report("table", path, "--prices", prices)[0]


def test_a_model_without_a_price_has_no_cost(tmp_path: Path) -> None:
    (prices := tmp_path / "p.json").write_text('{"other": {"input": 1, "cached": 1, "output": 1}}')
    out, _ = report("table", rewards(tmp_path / "x.jsonl", {"a": [1.0]}), "--prices", prices)
    assert out.splitlines()[2].split("|")[-2].strip() == "n/a"
    assert "no price for this model; there are: other" in out


# --- Files that are no runs -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "says"),
    [
        pytest.param(None, "cannot read", id="missing"),
        pytest.param(b"", "holds no rollout", id="empty"),
        pytest.param(b"\n\n", "holds no rollout", id="blank"),
    ],
)
@pytest.mark.parametrize("command", ["table", "html"])
def test_a_file_without_rollouts_is_refused(tmp_path: Path, command: str, content: bytes | None, says: str) -> None:
    path = tmp_path / "x.jsonl"
    if content is not None:
        path.write_bytes(content)
    assert says in refused(command, path)
    assert {p.name for p in tmp_path.iterdir()} <= {"x.jsonl"}


@pytest.mark.parametrize(
    "member",
    [
        {"reward": "1"},
        {"reward": True},
        {"reward": [1]},
        {"duration_s": None},
        {"usage": 3},
        {"items": None},
        {"options": None},
        {"error": {}},
        {"started_at": 5},
        {"task_digest": None},
        {"sample": "0"},
        {"self": 1},
        {"reward": 10**400},
        {"usage": {"input_tokens": 10**400}},
        {"usage": {"input_tokens_details": {"cached_tokens": 1e300}}},
    ],
    ids=lambda member: str(member)[:40],
)
def test_an_unsound_line_is_named_and_left_out(tmp_path: Path, member: Json) -> None:
    path = rewards(tmp_path / "x.jsonl", {"a": [1.0, 0.0]})
    line = json.loads(path.read_text().splitlines()[0])
    path.write_text(path.read_text() + json.dumps({**line, "attempt": 2, **member}) + "\n{torn")
    before = path.read_bytes()
    out, err = report("table", path)
    assert "line 3 is no record" in err and "line 4 is no record" in err
    assert out.splitlines()[2].split("|")[5].strip() == "0.500"
    assert path.read_bytes() == before


def test_numbers_that_are_not_finite_are_no_record(tmp_path: Path) -> None:
    path = rewards(tmp_path / "x.jsonl", {"a": [1.0, 0.0]})
    path.write_text(
        path.read_text() + path.read_text().splitlines()[0].replace('"reward": 1.0', '"reward": NaN') + "\n"
    )
    assert "line 3 is no record" in report("table", path)[1]


@pytest.mark.parametrize(
    "words",
    [["table"], ["nosuch"], [], ["table", "x", "--nosuch"], ["compare", "x"], ["table", "x", "--k", "0"]],
    ids=" ".join,
)
def test_wrong_words_are_usage_errors(words: list[str]) -> None:
    command = [sys.executable, "-m", "report", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)
    assert done.returncode == 2 and "usage" in done.stderr and done.stdout == ""


# --- compare ----------------------------------------------------------------------------------


@pytest.mark.parametrize("n", range(9))
def test_sign_test_agrees_with_enumeration(n: int) -> None:
    for better in range(n + 1):
        worse = n - better
        outcomes = [abs(sum(signs)) >= abs(better - worse) for signs in itertools.product((1, -1), repeat=n)]
        assert sign_test(better, worse) == pytest.approx(sum(outcomes) / 2**n, abs=1e-15)


def test_sign_test_of_many_tasks_does_not_overflow() -> None:
    assert 0 < sign_test(4000, 6000) < 1e-80
    assert sign_test(5000, 5000) == 1.0


LEFT: dict[str, list[float | None]] = {
    "a": [1.0, 1.0],
    "b": [1.0, 0.0],
    "c": [0.0, 0.0],
    "d": [1.0, 1.0],
    "e": [1.0, 1.0],
}
RIGHT: dict[str, list[float | None]] = {
    "a": [0.0, 0.0],
    "b": [0.0, 0.0],
    "c": [1.0, 0.0],
    "d": [0.0, 1.0],
    "e": [1.0, 1.0],
}


def cells(out: str) -> list[str]:
    return [cell.strip() for cell in out.splitlines()[5].strip("|").split("|")]


def test_compare_pairs_by_task(tmp_path: Path) -> None:
    out, err = report("compare", rewards(tmp_path / "a.jsonl", LEFT), rewards(tmp_path / "b.jsonl", RIGHT, model="n"))
    gaps = [-1.0, -0.5, 0.5, -0.5, 0.0]
    half = 2.7764451 * statistics.stdev(gaps) / math.sqrt(5)  # Student's t at 4 degrees of freedom
    low, high = max(-1, -0.3 - half), -0.3 + half
    assert cells(out) == ["5", "0.700", "0.400", "-0.300", f"{low:.2f} to {high:.2f}"]
    assert "1 better in B, 3 worse, 1 the same and left out: p = 0.625 (exact, two-sided)" in out
    assert "Solved in A and not in B: a, b\n" in out
    assert "Solved in B and not in A: c\n" in out
    assert "a.jsonl, codex · m: 10 of 10 scored" in out and "b.jsonl, codex · n: 10 of 10 scored" in out
    assert err == "" and "Differs" not in out


def test_compare_the_other_way_round_is_its_mirror(tmp_path: Path) -> None:
    out, _ = report("compare", rewards(tmp_path / "b.jsonl", RIGHT), rewards(tmp_path / "a.jsonl", LEFT))
    assert cells(out)[1:4] == ["0.400", "0.700", "+0.300"]
    assert "3 better in B, 1 worse" in out and "p = 0.625" in out


def test_every_task_lost_has_an_exact_interval(tmp_path: Path) -> None:
    a = rewards(tmp_path / "a.jsonl", {t: [1.0] for t in "abcde"})
    out, _ = report("compare", a, rewards(tmp_path / "b.jsonl", {t: [0.0] for t in "abcde"}))
    reach = 2 * (1 - 0.025 ** (1 / 5))
    assert cells(out)[3:] == ["-1.000", f"-1.00 to {-1 + reach:.2f}"]
    assert "p = 0.0625" in out


def test_tasks_that_do_not_differ_give_no_interval(tmp_path: Path) -> None:
    a = rewards(tmp_path / "a.jsonl", LEFT)
    out, _ = report("compare", a, a)
    assert cells(out)[3:] == ["+0.000", "n/a"] and "No interval" in out and "p = 1 " in out


def test_samples_and_timeouts_that_differ_are_said(tmp_path: Path) -> None:
    options = {"samples": 1, "tasks": 2, "timeout": 60.0}
    a = rewards(tmp_path / "a.jsonl", {"a": [1.0, 0.0], "b": [1.0, 1.0]})
    out, _ = report("compare", a, rewards(tmp_path / "b.jsonl", {"a": [1.0], "b": [0.0]}, options=options))
    assert "Differs: timeout: 900.0 in A, 60.0 in B" in out and "Differs: samples: 2 in A, 1 in B" in out


def test_unscored_rollouts_enter_nothing_and_stand_beside(tmp_path: Path) -> None:
    a = rewards(tmp_path / "a.jsonl", {"a": [1.0, None, None], "b": [0.0, 0.0, 0.0]})
    out, _ = report("compare", a, rewards(tmp_path / "b.jsonl", {"a": [1.0] * 3, "b": [0.0] * 3}))
    assert cells(out)[1:4] == ["0.500", "0.500", "+0.000"]
    assert "4 of 6 scored" in out


@pytest.mark.parametrize(
    ("left", "right", "known", "says"),
    [
        ({"a": [1.0], "b": [1.0]}, {"a": [1.0]}, {}, "task b is only in A"),
        ({"a": [1.0]}, {"a": [1.0], "b": [1.0]}, {}, "task b is only in B"),
        ({"a": [1.0]}, {"a": [1.0]}, {"task_digest": "other"}, "task a is not the same"),
        ({"a": [1.0], "b": [1.0]}, {"a": [1.0], "b": [None]}, {}, "nothing of task b was scored in B"),
        ({"a": [1.0]}, {"a": [1.0]}, {"options": {"samples": 1, "tasks": 3}}, "B holds 1 of its 3 tasks"),
    ],
)
def test_what_is_not_comparable_is_refused_unless_forced(
    tmp_path: Path, left: Any, right: Any, known: Json, says: str
) -> None:
    paths = rewards(tmp_path / "a.jsonl", left), rewards(tmp_path / "b.jsonl", right, **known)
    assert says in refused("compare", *paths)
    out, _ = report("compare", *paths, "--force")
    assert f"Differs: {says}" in out and cells(out)[0] == "1"


def test_nothing_in_common_cannot_be_forced(tmp_path: Path) -> None:
    paths = rewards(tmp_path / "a.jsonl", {"a": [1.0]}), rewards(tmp_path / "b.jsonl", {"b": [1.0]})
    assert "no task was scored on both sides" in refused("compare", *paths, "--force")


def test_a_file_of_several_pairs_needs_a_choice(tmp_path: Path) -> None:
    several = [
        result("a", 0, float(model == "m"), harness, model) for harness in ("codex", "pi") for model in ("m", "x:y")
    ]
    path = write_run(tmp_path / "x.jsonl", several)
    there = "there are: codex:m, codex:x:y, pi:m, pi:x:y"
    assert "by --a" in (said := refused("compare", path, path)) and there in said
    assert "by --b" in (said := refused("compare", path, path, "--a", "pi:m")) and there in said
    assert there in refused("compare", path, path, "--a", "pi:nosuch", "--b", "pi:m")
    out, _ = report("compare", path, path, "--a", "codex:m", "--b", "pi:x:y")
    assert cells(out)[1:4] == ["1.000", "0.000", "-1.000"]


# --- html, as bytes ---------------------------------------------------------------------------

HOSTILE = [
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(1)</script>",
    "<!-- --> <![CDATA[ ]]>",
    "javascript:alert(1)",
    "\x1b[31mred\x1b[0m \x00 \u202e \ud800 \u2028",
    "x" * 1_000_000,
    "${policy} $script {}",
]


def page(tmp_path: Path, results: list[Result]) -> str:
    path, target = write_run(tmp_path / "x.jsonl", results), tmp_path / "x.html"
    write_page(Run(path), target, tmp_path / "tasks")
    return target.read_text("utf-8")


def blocks(text: str) -> tuple[str, list[str]]:
    """The page without its two data blocks, and those."""
    found = re.findall(r'(<script type="text/plain" id="(?:index|details)">)(.*?)</script>', text, re.S)
    assert len(found) == 2
    for start, block in found:
        text = text.replace(start + block, start, 1)
    return text, [block for _, block in found]


def unpacked(block: str) -> list[Any]:
    return [json.loads(zlib.decompress(base64.b64decode(line))) for line in block.split()]


def test_what_an_agent_wrote_changes_no_byte_outside_of_data(tmp_path: Path) -> None:
    items = [
        {"type": text[:50], "role": text, "content": [{"text": text}], "__proto__": {text[:50]: 1}} for text in HOSTILE
    ]
    error, answer = " ".join(text[:100] for text in HOSTILE), {text[:50]: [text[:50]] for text in HOSTILE}
    hostile = result("a", 0, 0.0, items=items, error=error, answer=answer, session_id="<b>")
    bare, data = blocks(page(tmp_path, [hostile]))
    assert bare == blocks(page(tmp_path, [result("a", 0, 0.0)]))[0]
    assert all(re.fullmatch(r"[A-Za-z0-9+/=\n]*", block) for block in data)
    (index,), (detail,) = map(unpacked, data)
    assert detail["error"] == error and detail["items"][0]["content"][0]["text"] == HOSTILE[0]
    assert index["rows"][0]["error"].startswith(HOSTILE[0])


@pytest.mark.parametrize("text", ["<img src=x onerror=alert(1)>", "</script><script>alert(1)</script>", "a&b\"'\u202e"])
def test_names_are_escaped(tmp_path: Path, text: str) -> None:
    known = {"options": {"samples": 2, "tasks": 1}}
    bare, _ = blocks(page(tmp_path, [result(f"t{text}", n, 1.0, f"h{text}", f"m{text}", **known) for n in (0, 1)]))
    assert text not in bare and "\u202e" not in bare
    assert bare.count("<img") == 0 and len(re.findall("<script", bare)) == 3
    escaped = plain(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    assert bare.count(escaped.replace('"', "&quot;").replace("'", "&#x27;")) >= 4


def test_the_page_allows_itself_alone(tmp_path: Path) -> None:
    text = page(tmp_path, [result("a", 0, 1.0)])
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', text)
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe" not in policy
    assert not re.search(r"""\s(?:on\w+|style|src)\s*=|https?://(?!www\.w3\.org/)|@import|url\(""", blocks(text)[0])


def test_keys_stand_beside_what_was_expected(tmp_path: Path) -> None:
    tolerances = '{"tolerances": {"near": {"absolute": 1}}}'
    expected = {"right": 1, "wrong": [1, 2], "missing": None, "near": 10, "huge": 10**40}
    digest = write_task(tmp_path / "tasks", "a", expected, task=tolerances)
    answer = {"right": 1.0, "wrong": [1], "near": 10.5, "huge": 10**40, "more": "é"}
    known = {"answer": answer, "task_digest": digest}
    _, (_, details) = blocks(page(tmp_path, [result("a", 0, 0.0, **known)]))
    assert unpacked(details)[0]["keys"] == [
        ["right", "1", "1.0", "right"],
        ["wrong", "[1, 2]", "[1]", "wrong"],
        ["missing", "null", None, "missing"],
        ["near", "10", "10.5", "right"],
        ["huge", str(10**40), str(10**40), "right"],
        ["more", None, '"é"', "extra"],
    ]


@pytest.mark.parametrize(
    ("task", "digest", "says"),
    [
        ("a", "other", "has changed since the run"),
        ("gone", "d", "there is no task 'gone'"),
        ("../a", "d", "there is no task '../a'"),
        ("broken", "d", "task 'broken': expected.json"),
    ],
)
def test_an_answer_without_its_task_stands_alone(tmp_path: Path, task: str, digest: str, says: str) -> None:
    write_task(tmp_path / "tasks", "a", {"x": "canary"})
    write_task(tmp_path / "tasks", "broken", {"x": "canary"})
    (tmp_path / "tasks/broken/expected.json").write_text("{")
    path = write_run(tmp_path / "x.jsonl", [result(task, 0, 1.0, answer={"x": 1}, task_digest=digest)])
    _, err = report("html", path, "--tasks", tmp_path / "tasks")
    assert says in err
    _, (_, details) = blocks((tmp_path / "x.html").read_text())
    (detail,) = unpacked(details)
    assert detail["keys"] == [["x", None, "1", ""]] and says in detail["note"] and "canary" not in json.dumps(detail)


def test_every_attempt_is_there_once_and_one_counts(tmp_path: Path) -> None:
    first = result("a", 0, None, attempt=1, error="lost")
    results = [first, result("a", 1, 1.0), result("a", 0, 1.0, attempt=2), first]
    _, (index, details) = blocks(page(tmp_path, results))
    rows = unpacked(index)[0]["rows"]
    assert [(r["sample"], r["attempt"], r["attempts"], r["counts"], r["line"]) for r in rows] == [
        (0, 1, 2, False, 0),
        (0, 2, 2, True, 2),
        (1, 1, 1, True, 1),
    ]
    assert [d["error"] for d in unpacked(details)] == ["lost", "", ""]


def test_unknown_tokens_and_unscored_tasks_are_said(tmp_path: Path) -> None:
    bare, _ = blocks(page(tmp_path, [result("a", 0, None, usage=None), result("b", 0, 1.0)]))
    assert "1 of 2 do not tell them" in bare
    assert '<button type="button" class="none" data-task="0" data-pair="0">n/a (0/1)</button>' in bare
    assert '<button type="button" class="r10" data-task="1" data-pair="0">1.00</button>' in bare


def test_a_page_replaces_pages_only(tmp_path: Path) -> None:
    path = write_run(tmp_path / "x.jsonl", [result("a", 0, 1.0)])
    before = path.read_bytes()
    assert "ends in .html" in refused("html", path, "-o", path)
    assert path.read_bytes() == before
    assert "cannot write" in refused("html", path, "-o", tmp_path / "nosuch" / "x.html", "--tasks", tmp_path)
    report("html", path)
    report("html", path)
    assert {p.name for p in tmp_path.iterdir()} == {"x.jsonl", "x.html"}
