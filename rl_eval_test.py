"""Tests of rl_eval.py that need no network, no deployment and no `openai` package.

    python3 rl_eval_test.py        or        pytest rl_eval_test.py

Grading, statistics, tasks, the plan, the record and the options. What needs a deployment is in
tests/test_script.py. The ids G1 to T16 name the rows of the acceptance trials.
"""

from __future__ import annotations

import base64
import itertools
import json
import math
import os
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import report.record
import rl_eval
from report import ci, statistics
from report.options import Pair, check_endpoint, check_options, choose_pairs, make_parser, recall_options
from report.record import Book, Json, Refused, Result, keep_secret, plain, to_line
from report.table import markdown
from report.tasks import Task, load_task, load_tasks

BUNDLED = ["failed-logins", "inventory-bug", "orders-json", "salaries-sqlite", "sales-by-region"]


# --- Grading ----------------------------------------------------------------------------------

HUGE = "9" * 400


@pytest.mark.parametrize(
    ("expected", "answer", "reward"),
    [
        pytest.param({"x": 1}, '{"x":1,"y":9}', 1.0, id="G1"),
        pytest.param({"x": 1, "y": 2}, '{"x":1}', 0.0, id="G2"),
        pytest.param({"x": None}, "{}", 0.0, id="G3-missing"),
        pytest.param({"x": None}, '{"x":null}', 1.0, id="G3-null"),
        pytest.param({"x": None}, '{"x":0}', 0.0, id="G3-zero"),
        pytest.param({"x": 1}, '{"x":true}', 0.0, id="G4-true"),
        pytest.param({"x": 1}, '{"x":"1"}', 0.0, id="G4-text"),
        pytest.param({"x": 1}, '{"x":"1.0"}', 0.0, id="G4-decimal-text"),
        pytest.param({"x": 1}, '{"x":[1]}', 0.0, id="G4-list"),
        pytest.param({"x": 1}, '{"x":1.0}', 1.0, id="G4-float"),
        pytest.param({"x": True}, '{"x":1}', 0.0, id="G5-one"),
        pytest.param({"x": True}, '{"x":"true"}', 0.0, id="G5-text"),
        pytest.param({"x": True}, '{"x":false}', 0.0, id="G5-false"),
        pytest.param({"x": True}, '{"x":true}', 1.0, id="G5-true"),
        pytest.param({"x": 0}, '{"x":1e-12}', 1.0, id="G6-floor"),
        pytest.param({"x": 0}, '{"x":0.001}', 0.0, id="G6-beyond"),
        pytest.param({"x": 0}, '{"x":-0.0}', 1.0, id="G6-negative-zero"),
        pytest.param({"x": 0}, '{"x":false}', 0.0, id="G6-false"),
        pytest.param({"x": 0.00354}, '{"x":0.004}', 0.0, id="G7-rounded"),
        pytest.param({"x": 0.00354}, '{"x":0.003540000001}', 1.0, id="G7-near"),
        pytest.param({"x": 5.5}, '{"x":-5.5}', 0.0, id="G7-sign"),
        pytest.param({"x": 1000000}, '{"x":1000000.9}', 1.0, id="relative-inside"),
        pytest.param({"x": 1000000}, '{"x":1000001.1}', 0.0, id="relative-outside"),
        pytest.param({"x": 1}, '{"x":NaN}', 0.0, id="G8-nan"),
        pytest.param({"x": 1}, '{"x":Infinity}', 0.0, id="G8-infinity"),
        pytest.param({"x": 1}, '{"x":-Infinity}', 0.0, id="G8-minus-infinity"),
        pytest.param({"x": 1}, '{"x":1,"y":NaN}', 0.0, id="G8-elsewhere"),
        pytest.param({"x": 1}, '{"x":1e400}', 0.0, id="G9"),
        pytest.param({"x": int(HUGE)}, f'{{"x":{HUGE}}}', 1.0, id="G10-same"),
        pytest.param({"x": int(HUGE)}, f'{{"x":8{HUGE[1:]}}}', 0.0, id="G10-off"),
        pytest.param({"x": int(HUGE)}, '{"x":1.5}', 0.0, id="G10-float"),
        pytest.param({"x": 1.5}, f'{{"x":{HUGE}}}', 0.0, id="G10-float-expected"),
        pytest.param({"x": 1}, f'{{"x":{"7" * 5000}}}', 0.0, id="G11"),
        pytest.param({"s": "abc"}, '{"s":" abc\\n"}', 1.0, id="G12"),
        pytest.param({"s": "abc"}, '{"s":"\u00a0abc\u00a0"}', 1.0, id="G12-no-break"),
        pytest.param({"s": "abc"}, '{"s":"\u3000abc\u3000"}', 1.0, id="G12-ideographic"),
        pytest.param({"s": "abc"}, '{"s":"ab\u200bc"}', 0.0, id="G13-inside"),
        pytest.param({"s": "abc"}, '{"s":"abc\u200b"}', 0.0, id="G13-end"),
        pytest.param({"s": "abc"}, '{"s":"ABC"}', 0.0, id="G13-case"),
        pytest.param({"s": "\u00e9"}, '{"s":"e\u0301"}', 0.0, id="G14"),
        pytest.param({"x": 1}, '{"x":2,"x":1}', 0.0, id="G15"),
        pytest.param({"x": 1}, '{"x":1,"y":{"z":1,"z":1}}', 0.0, id="G15-nested"),
        pytest.param({"a": {"b": 1, "c": "t"}}, '{"a":{"b":1.0000000001,"c":" t ","d":0}}', 1.0, id="G16"),
        pytest.param({"a": {"b": 1, "c": "t"}}, '{"a":{"b":1}}', 0.0, id="G16-missing"),
        pytest.param({"a": {"b": 1}}, '{"a":[1]}', 0.0, id="G16-list"),
        pytest.param({"l": ["a", "b"]}, '{"l":["b","a"]}', 0.0, id="G17-order"),
        pytest.param({"l": ["a", "b"]}, '{"l":["a"]}', 0.0, id="G17-short"),
        pytest.param({"l": ["a", "b"]}, '{"l":["a","b","c"]}', 0.0, id="G17-long"),
        pytest.param({"l": ["a", {"k": 1}]}, '{"l":[" a",{"k":1,"j":2}]}', 1.0, id="G17-same"),
        pytest.param({"l": []}, '{"l":{}}', 0.0, id="G17-object"),
        pytest.param({"x": 1}, "[" * 100_000 + "]" * 100_000, 0.0, id="G18-arrays"),
        pytest.param({"x": 1}, '{"a":' * 100_000 + "1" + "}" * 100_000, 0.0, id="G18-objects"),
        pytest.param({"x": 1}, '{"x":' + "[" * 500 + "]" * 500 + "}", 0.0, id="G18-parsable"),
        pytest.param({"x": 1}, '{"x":1,"y":' + "[" * 99 + "]" * 99 + "}", 1.0, id="G18-shallow"),
        pytest.param({"x": 1}, '[{"x":1}]', 0.0, id="G20-list"),
        pytest.param({"x": 1}, '"x"', 0.0, id="G20-text"),
        pytest.param({"x": 1}, "1", 0.0, id="G20-number"),
        pytest.param({"x": 1}, "null", 0.0, id="G20-null"),
        pytest.param({"x": 1}, "", 0.0, id="G21-empty"),
        pytest.param({"x": 1}, "   ", 0.0, id="G21-spaces"),
        pytest.param({"x": 1}, '{"x":1', 0.0, id="G21-open"),
        pytest.param({"x": 1}, '{"x":1} trailing', 0.0, id="G21-trailing"),
        pytest.param({"s": "\u00e9"}, '{"s":"\u00e9"}'.encode("latin-1"), 0.0, id="G22-latin-1"),
        pytest.param({"s": "\u00e9"}, '{"s":"\u00e9"}'.encode("utf-16"), 0.0, id="G22-utf-16"),
        pytest.param({"x": 1}, b'\xef\xbb\xbf{"x":1}', 1.0, id="G23"),
        pytest.param({"x": 1}, b'\xef\xbb\xbf\xef\xbb\xbf{"x":1}', 0.0, id="G23-two"),
        pytest.param({"s": "\ud800"}, '{"s":"\\ud800"}', 1.0, id="G24-same"),
        pytest.param({"s": "\ud800"}, '{"s":"\\ud801"}', 0.0, id="G24-other"),
        pytest.param({"x": 1}, b'{"x":1}' + b" " * (2**20 - 7), 1.0, id="G27-exactly"),
        pytest.param({"x": 1}, b'{"x":1}' + b" " * (2**20 - 6), 0.0, id="G27-beyond"),
    ],
)
def test_grade(expected: Json, answer: str | bytes, reward: float) -> None:
    began = time.monotonic()
    data = answer if isinstance(answer, bytes) else answer.encode()
    earned, parsed, reason = rl_eval.grade(expected, data)
    assert earned == reward
    assert (reason == "") == (reward == 1.0)
    assert time.monotonic() - began < 1.0
    json.dumps(parsed, allow_nan=False).encode("ascii")


@pytest.mark.parametrize("text", ['{"x": [1, "b", null, {"y": 2.5}]}', '{"s": "\\ud800", "t": true}'])
def test_every_expected_answer_earns_its_own_reward(text: str) -> None:
    assert rl_eval.grade(json.loads(text), text.encode())[0] == 1.0


# --- Statistics -------------------------------------------------------------------------------


@pytest.mark.parametrize("n", range(1, 9))
def test_pass_at_k_equals_exact_enumeration(n: int) -> None:
    """T16: over all ways to draw k of n samples, the share that holds a right one."""
    for right, k in itertools.product(range(n + 1), range(1, n + 1)):
        draws = list(itertools.combinations([True] * right + [False] * (n - right), k))
        exact = Fraction(sum(map(any, draws)), len(draws))
        assert statistics.pass_at_k(n, right, k) == pytest.approx(float(exact), abs=1e-12)


@pytest.mark.parametrize(
    ("n", "c", "k", "estimate"),
    [(4, 1, 4, 1.0), (0, 0, 1, None), (3, 3, 4, None), (3, 3, 0, None), (5, 0, 5, 0.0), (200, 100, 100, 1.0)],
)
def test_pass_at_k_at_the_edges(n: int, c: int, k: int, estimate: float | None) -> None:
    assert statistics.pass_at_k(n, c, k) == (None if estimate is None else pytest.approx(estimate))


def result(task: str, reward: float | None, status: str = "completed", **members: Any) -> Result:
    return Result("r", task, "codex", "m", 0, status=status, reward=reward, duration_s=2.0, **members)


def test_summary_counts_and_averages() -> None:
    results = [result("a", 1.0), result("a", 0.0), result("b", 0.0), result("b", 0.0)]
    results += [result("c", 0.0, "timeout"), result("c", None, "error"), result("d", None, "cancelled")]
    (row,) = statistics.summarise(results, {1, 2})
    assert (row["rollouts"], row["scored"], row["errors"], row["timeouts"]) == (7, 5, 1, 1)
    assert row["mean reward"] == pytest.approx(0.2)
    assert row["pass@1"] == (pytest.approx(0.5 / 3), (3, 4))
    assert row["pass@2"] == (pytest.approx(0.5), (2, 4))


def test_summary_does_not_depend_on_the_order_of_completion() -> None:
    results = [result(t, r) for t in "abc" for r in (0.0, 1.0, 1.0, None)]
    results += [Result("r", "a", "claude_sdk", "m", 0, status="error")]
    summary = statistics.summarise(results, {1, 4})
    assert all(
        statistics.summarise(order, {4, 1}) == summary
        for order in (results[::-1], sorted(results, key=lambda r: str(r.reward)))
    )


def test_tasks_weigh_the_same_whatever_was_scored() -> None:
    """R15."""
    (row,) = statistics.summarise([result("a", 1.0)] + [result("b", 0.0)] * 7, {1})
    assert row["pass@1"] == (0.5, (2, 2))


def test_nothing_scored_is_not_zero() -> None:
    """T4."""
    table = markdown(statistics.summarise([result("a", None, "error")] * 3, {1, 8}), {1, 8})
    assert table.splitlines()[2].count("n/a") == 6 and "0.000" not in table.splitlines()[2]


def test_table_says_how_many_tasks_entered_and_is_markdown() -> None:
    results = [result("a", 1.0), result("a", 0.0), result("b", 1.0), result("b", None, "error")]
    head, _, line, *_ = markdown(statistics.summarise(results, {1, 2}), {1, 2}).splitlines()
    columns = [cell.strip() for cell in head.strip("|").split("|")]
    assert columns[:8] == ["harness", "model", "rollouts", "scored", "mean reward", "pass@1", "pass@2", "pass^2"]
    assert columns[8:] == ["errors", "timeouts", "mean duration (s)", "reward, 95 %"]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:8] == ["codex", "m", "4", "3", "0.667", "0.750", "1.000 (1/2 tasks)", "0.000 (1/2 tasks)"]
    assert cells[8:] == ["1", "0", "2.0", "0.00 to 1.00"]


def test_one_sample_needs_one_pass_column() -> None:
    assert markdown(statistics.summarise([result("a", 1.0)], {1}), {1}).count("pass@") == 1


@pytest.mark.parametrize("n", range(1, 9))
def test_pass_hat_k_equals_exact_enumeration(n: int) -> None:
    """Over all ways to draw k of n samples, the share whose samples are all right."""
    for right, k in itertools.product(range(n + 1), range(1, n + 1)):
        draws = list(itertools.combinations([True] * right + [False] * (n - right), k))
        exact = Fraction(sum(map(all, draws)), len(draws))
        assert statistics.pass_hat_k(n, right, k) == pytest.approx(float(exact), abs=1e-12)


@pytest.mark.parametrize(
    ("n", "c", "k", "estimate"), [(0, 0, 1, None), (3, 3, 4, None), (3, 3, 3, 1.0), (4, 2, 2, 1 / 6), (8, 1, 2, 0.0)]
)
def test_pass_hat_k_at_the_edges(n: int, c: int, k: int, estimate: float | None) -> None:
    assert statistics.pass_hat_k(n, c, k) == (None if estimate is None else pytest.approx(estimate))


# Two-sided 95 %, from any printed table.
STUDENT_T = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 9: 2.262, 10: 2.228, 29: 2.045, 30: 2.042}
STUDENT_T |= {60: 2.000, 120: 1.980, 1000: 1.962}


@pytest.mark.parametrize("degrees", STUDENT_T)
def test_students_t_is_the_published_one(degrees: int) -> None:
    assert statistics.student_t(degrees) == pytest.approx(STUDENT_T[degrees], abs=0.0006)


@pytest.mark.parametrize(("trials", "upper"), [(2, 0.8419), (3, 0.7076), (5, 0.5218), (10, 0.3085), (50, 0.0711)])
def test_all_wrong_and_all_right_have_the_published_exact_interval(trials: int, upper: float) -> None:
    """Clopper and Pearson, no success in so many trials, and its mirror image."""
    assert statistics.interval([[0.0]] * trials) == (0.0, pytest.approx(upper, abs=0.0001))
    assert statistics.interval([[1.0, 1.0]] * trials) == (pytest.approx(1 - upper, abs=0.0001), 1.0)


def test_interval_of_single_values_is_students() -> None:
    """Clusters of one are the textbook's interval of a mean."""
    values = [0.1, 0.4, 0.35, 0.8, 0.55, 0.3]
    mean, deviation = sum(values) / 6, math.sqrt(sum((v - sum(values) / 6) ** 2 for v in values) / 5)
    half = 2.5706 * deviation / math.sqrt(6)
    assert statistics.interval([[v] for v in values]) == pytest.approx((mean - half, mean + half), abs=1e-4)


def test_interval_is_clustered_by_task() -> None:
    """By an independent formula: the variance of a ratio estimator over clusters of unequal size."""
    clusters = [[1.0, 1.0, 0.0], [0.0, 0.0], [1.0], [0.0, 1.0, 0.0, 0.0]]
    totals, sizes, count = [sum(c) for c in clusters], [len(c) for c in clusters], len(clusters)
    ratio = sum(totals) / sum(sizes)
    residuals = [total - ratio * size for total, size in zip(totals, sizes, strict=True)]
    variance = sum(r * r for r in residuals) / (count - 1) / count / (sum(sizes) / count) ** 2
    half = 3.1824 * math.sqrt(variance)
    assert statistics.interval(clusters) == pytest.approx((max(0, ratio - half), min(1, ratio + half)), abs=1e-4)


def test_samples_of_one_task_are_no_independent_trials() -> None:
    """Ten samples that agree within each task say no more than one each."""
    few = statistics.interval([[1.0], [0.0], [1.0], [0.0]])
    assert few is not None and statistics.interval([[1.0] * 10, [0.0] * 10] * 2) == pytest.approx(few)
    assert statistics.interval([[1.0, 0.0, 1.0]]) is None and statistics.interval([]) is None


def test_bounds_of_unequal_coverage() -> None:
    """R15: errors left out, and errors as misses; k beyond the scored samples is n/a."""
    results = [result("a", 1.0)] * 2 + [result("b", 1.0), result("b", None, "error")]
    (row,) = statistics.summarise(results, {1, 2, 3}, tasks=3, samples=2)
    assert (row["rollouts"], row["scored"]) == (6, 3)
    assert (row["mean reward"], row["mean reward, errors as 0"]) == (1.0, 0.5)
    assert row["pass@1"] == (1.0, (2, 3)) and row["pass@1, errors as 0"] == pytest.approx((1 + 0.5 + 0) / 3)
    assert row["pass@2"] == (1.0, (1, 3)) and row["pass@2, errors as 0"] == pytest.approx((1 + 1 + 0) / 3)
    assert row["pass@3"] == (None, (0, 3)) and row["pass@3, errors as 0"] is None
    assert row["pass^2, errors as 0"] == pytest.approx(1 / 3)
    assert (row["groups"], row["complete groups"], row["zero-variance groups"]) == (3, 1, 1)


def test_pair_that_never_ran_has_a_row() -> None:
    ran, never = statistics.summarise([result("a", 1.0)], {1, 2}, 2, 1, [("codex", "m"), ("pi", "m")])
    assert (ran["rollouts"], ran["scored"], never["rollouts"], never["scored"]) == (2, 1, 2, 0)
    assert never["mean reward"] is None and never["mean reward, errors as 0"] == 0.0
    assert never["pass@1, errors as 0"] == 0.0 and never["pass@2, errors as 0"] is None


def gates(reward: float | None = None, error_rate: float | None = None, **passes: float) -> statistics.Gates:
    return statistics.Gates(reward, {int(k[1:]): v for k, v in passes.items()}, error_rate)


@pytest.mark.parametrize(
    ("rewards", "asked", "code"),
    [
        pytest.param([1.0, 0.0], gates(), 0, id="nothing asked"),
        pytest.param([1.0, 0.0], gates(0.5), 0, id="just enough"),
        pytest.param([1.0, 0.0], gates(0.5000001), 1, id="just below"),
        pytest.param([1.0, None], gates(0.5), 3, id="not measured"),
        pytest.param([1.0, None], gates(0.5, 0.5), 0, id="as many errors as allowed"),
        pytest.param([1.0, None], gates(0.5, 0.49), 1, id="more errors than allowed"),
        pytest.param([None, None], gates(0.0), 3, id="nothing measured"),
        pytest.param([None, None], gates(0.0, 1.0), 3, id="nothing measured, all allowed"),
        pytest.param([0.0, 0.0], gates(0.0), 0, id="all zero is measured"),
        pytest.param([1.0, 0.0], gates(p2=1.0), 0, id="pass@2"),
        pytest.param([1.0, 0.0], gates(p1=0.51), 1, id="pass@1 below"),
        pytest.param([1.0, 0.0], gates(p3=0.1), 3, id="k beyond the samples"),
        pytest.param([1.0, 1.0], gates(0.9, 0.0, p1=0.9), 0, id="all of them"),
        pytest.param([1.0, 0.0, None], gates(0.9, 0.5, p1=0.1), 1, id="one unmet"),
    ],
)
def test_verdict(rewards: list[float | None], asked: statistics.Gates, code: int) -> None:
    """R12, R13."""
    results = [result("a", reward, "completed" if reward is not None else "error") for reward in rewards]
    lines, found = statistics.verdict(statistics.summarise(results, {1, *asked.passes}), asked)
    assert (found, bool(lines)) == (code, code != 0)
    assert all("codex · m" in line and "\n" not in line for line in lines)


@pytest.mark.parametrize("width", [80, 100, None])
@pytest.mark.parametrize("model", ["m", "a-vendor/a-model-of-a-long-name-2026-01-01|"])
def test_table_fits(width: int | None, model: str) -> None:
    """T20: k up to 100 in 80 columns; what is left out is named."""
    ks = {1, 2, 4, 8, 16, 32, 64, 100}
    results = [Result("r", t, "claude_sdk", model, 0, reward=float(n % 2)) for t in "abc" for n in range(100)]
    rows = statistics.summarise(results, ks)
    text = markdown(rows, ks, width)
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert all(len(line) <= (width or 10_000) for line in table) and "mean reward" in table[0]
    assert ("pass@64" in table[0]) == (width is None)
    assert ("Not shown" in text and "pass@64" in text and "--json" in text) == (width is not None)


# --- Files for CI -------------------------------------------------------------------------------


def book_of(*results: Result) -> Book:
    book = Book()
    for number, one in enumerate(results):
        one.rollout_id = str(number)
        book.add(one)
    return book


HOSTILE = ['<a & b>"', "\x1b[31mred", "]]>", "a\0b", "\ud800", "\ufffe", "|cell|", "日本", "\u202e"]


@pytest.mark.parametrize("name", HOSTILE)
def test_junit_is_well_formed_whatever_names_and_errors_hold(tmp_path: Path, name: str) -> None:
    results = [result(name, 1.0), result(name, 0.5), result(name, None, "error", error=name), result(name, 0.0)]
    ci.write_junit(tmp_path / "j.xml", results)
    root = ElementTree.fromstring((tmp_path / "j.xml").read_bytes())
    (suite,) = root
    assert [(e.get("tests"), e.get("failures"), e.get("errors")) for e in (root, suite)] == [("4", "2", "1")] * 2
    assert len(suite.findall("testcase")) == 4 and "reward 0.5" in str(suite.findall("*/failure")[0].get("message"))


@pytest.mark.parametrize("name", HOSTILE)
def test_json_summary_is_strict_and_has_every_number(tmp_path: Path, name: str) -> None:
    results = [result(name, 1.0, usage={"total_tokens": 7}), result(name, None, "error")]
    rows = statistics.summarise(results, {1, 100})
    ci.write_json(tmp_path / "s.json", rows, book_of(*results), ["unmet"], 3)
    summary = json.loads((tmp_path / "s.json").read_bytes(), parse_constant=no_constant)
    assert summary["exit_code"] == 3 and summary["tokens"] == 7 and summary["attempts_of_unknown_tokens"] == 1
    assert summary["rows"][0]["pass@100"] == [None, [0, 1]] and summary["rows"][0]["scored"] == 1
    assert name not in markdown(rows, {1}) or (name.isprintable() and "|" not in name)


# --- The book -----------------------------------------------------------------------------------


def line_of(rollout_id: str, attempt: int, reward: float | None, **members: Any) -> bytes:
    known = {"run_id": "run", "group_id": "g", "attempt": attempt, "status": "completed", "reward": reward}
    return to_line(Result(rollout_id, "t", "h", "m", 0, **{**known, **members}))


def read(path: Path, data: bytes) -> Book:
    path.write_bytes(data)
    book = Book()
    with path.open("rb") as file:
        book.read(file)
    return book


def test_first_attempt_with_a_reward_settles(tmp_path: Path) -> None:
    lines = [line_of("r", 1, None), line_of("r", 3, 0.0), line_of("r", 2, 1.0), line_of("q", 1, None)]
    for order in itertools.permutations(lines):
        book = read(tmp_path / "f", b"".join([*order, order[0]]))
        outcome = book.outcome("r")
        assert outcome is not None and (outcome.attempt, outcome.reward) == (2, 1.0)
        assert book.next_attempt("r") == 4 and book.next_attempt("q") == 2 and book.next_attempt("new") == 1
        assert len(book.every) == 4 and not book.problems


def test_every_cut_of_a_file_is_read_right(tmp_path: Path) -> None:
    """T6: at each byte."""
    lines = [line_of(str(n), 1, 1.0) for n in range(2)]
    data = b"".join(lines)
    for cut in range(len(data) + 1):
        book = read(tmp_path / "f", data[:cut])
        whole = sum(cut >= len(b"".join(lines[: n + 1])) - 1 for n in range(2))  # only the line's end may be missing
        ends = [0, len(lines[0]) - 1, len(lines[0]), len(data) - 1, len(data)]
        assert len(book.every) == whole and bool(book.problems) == (cut not in ends)
        assert book.unended == (cut in (ends[1], ends[3]))
        assert book.whole == (cut if cut in ends else len(b"".join(lines[:whole])))


def test_tokens_of_every_attempt_count_once(tmp_path: Path) -> None:
    lines = [line_of("r", n, None, usage={"input_tokens": 3, "output_tokens": n}) for n in (1, 2)]
    assert read(tmp_path / "f", b"".join([*lines, *lines])).tokens == 9


# --- Tasks ------------------------------------------------------------------------------------


def write_task(folder: Path, name: str = "t", **contents: str | bytes | None) -> Path:
    """A sound task, with files replaced (or, with None, left out) by their name without suffix."""
    task = folder / name
    task.mkdir(parents=True)
    files: dict[str, str | bytes | None] = {
        "instruction": "Do it.",
        "expected": '{"x": 1}',
        "solution": "true",
    }
    names = {"instruction": "instruction.md", "expected": "expected.json", "solution": "solution.sh"}
    for key, content in {**files, **contents}.items():
        if content is not None:
            (task / names[key]).write_bytes(content if isinstance(content, bytes) else content.encode())
    return task


def test_bundled_tasks_load() -> None:
    tasks = load_tasks(Path(rl_eval.__file__).parent / "tasks")
    assert {task.id for task in tasks} >= set(BUNDLED)
    assert all(task.solution and task.files for task in tasks)


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_task_expects_what_grades_as_right(name: str) -> None:
    folder = Path(rl_eval.__file__).parent / "tasks"
    (task,) = load_tasks(folder, [name])
    assert rl_eval.grade(task.expected, (folder / name / "expected.json").read_bytes())[0] == 1.0
    assert "outputs/answer.json" in task.instruction


@pytest.mark.parametrize(
    ("contents", "says"),
    [
        ({"instruction": None}, "instruction.md"),
        ({"instruction": "  \n"}, "instruction"),
        ({"instruction": b"\xff"}, "instruction.md: 'utf-8'"),
        ({"instruction": "a\0b"}, "instruction.md"),
        ({"solution": b"\xff"}, "solution.sh"),
        ({"expected": None}, "expected.json"),
        ({"expected": "{}"}, "expected.json"),
        ({"expected": "[1]"}, "expected.json"),
        ({"expected": "{"}, "expected.json"),
        ({"expected": '{"x": NaN}'}, "expected.json"),
        ({"expected": '{"x": 1, "x": 2}'}, "expected.json"),
    ],
)
def test_unsound_task_is_refused(tmp_path: Path, contents: Json, says: str) -> None:
    """G31."""
    write_task(tmp_path, "sound")
    write_task(tmp_path, "unsound", **contents)
    with pytest.raises(Refused, match=r"task 'unsound'") as caught:
        load_tasks(tmp_path)
    assert says in str(caught.value) and "\n" not in str(caught.value)
    assert [task.id for task in load_tasks(tmp_path, ["sound", "sound"])] == ["sound"]


def test_digest_is_the_same_in_every_process_and_tells_a_changed_file(tmp_path: Path) -> None:
    data = write_task(tmp_path) / "files" / "data"
    data.parent.mkdir()
    data.write_text("1")
    code = "import pathlib, sys; from report.tasks import load_task; print(load_task(pathlib.Path(sys.argv[1])).digest)"

    def digest() -> str:
        words, cwd = [sys.executable, "-c", code, str(tmp_path / "t")], Path(rl_eval.__file__).parent
        return subprocess.run(words, capture_output=True, text=True, check=True, cwd=cwd).stdout

    first = digest()
    assert digest() == first
    data.write_text("2")
    assert digest() != first


def test_task_without_solution_loads(tmp_path: Path) -> None:
    write_task(tmp_path, solution=None)
    assert load_tasks(tmp_path)[0].solution is None


@pytest.mark.parametrize("wanted", ["nosuch", "../t", "t/", "/t", ".", ""])
def test_unknown_task_names_the_known(tmp_path: Path, wanted: str) -> None:
    """T15."""
    write_task(tmp_path)
    with pytest.raises(Refused, match=r"there are: t$"):
        load_tasks(tmp_path, [wanted])


def test_what_is_no_task_is_skipped(tmp_path: Path) -> None:
    for name in ("two words", "ünïcode-日本", "_shared", ".git", "__pycache__"):
        write_task(tmp_path, name)
    (tmp_path / "generate.py").write_text("")
    assert [task.id for task in load_tasks(tmp_path)] == ["two words", "ünïcode-日本"]


@pytest.mark.parametrize("names", [["x" * 129], ["a\nb"], ["a\u202eb"], [" a"], ["a\\b"], ["Case", "case"]])
def test_ids_that_could_be_mistaken_are_refused(tmp_path: Path, names: list[str]) -> None:
    """R17."""
    for name in names:
        write_task(tmp_path, name)
    with pytest.raises(Refused, match="task id"):
        load_tasks(tmp_path)


@pytest.mark.parametrize("folder", ["missing", "empty"])
def test_no_tasks_is_an_error(tmp_path: Path, folder: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(Refused):
        load_tasks(tmp_path / folder)


def files_of(task: Path) -> list[str]:
    return [name for name, _ in load_task(task).files]


def test_files_keep_their_paths(tmp_path: Path) -> None:
    task = write_task(tmp_path)
    for name in ("a.csv", ".hidden/b", "sub/deep/c", "outputs/seed"):
        (task / "files" / name).parent.mkdir(parents=True, exist_ok=True)
        (task / "files" / name).write_text(name)
    (task / "files" / "link").symlink_to("sub/deep/c")
    (task / "files" / "folder").symlink_to("sub")
    assert sorted(files_of(task)) == [
        ".hidden/b",
        "a.csv",
        "folder/deep/c",
        "link",
        "outputs/seed",
        "sub/deep/c",
    ]
    assert dict(load_task(task).files)["link"].read_text() == "sub/deep/c"


@pytest.mark.parametrize("target", ["../expected.json", "/etc/passwd", "nowhere", "link", ".", "../../t/solution.sh"])
def test_symlink_that_leaves_is_refused(tmp_path: Path, target: str) -> None:
    task = write_task(tmp_path)
    (task / "files").mkdir()
    (task / "files" / "link").symlink_to(target)
    with pytest.raises(Refused, match="symlink"):
        load_task(task)


def test_files_folder_may_be_elsewhere_but_not_a_file(tmp_path: Path) -> None:
    task = write_task(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a").write_text("a")
    (task / "files").symlink_to(tmp_path / "data")
    assert files_of(task) == ["a"]
    other = write_task(tmp_path, "other")
    (other / "files").write_text("")
    with pytest.raises(Refused):
        load_task(other)


def test_fifo_is_refused(tmp_path: Path) -> None:
    task = write_task(tmp_path)
    (task / "files").mkdir()
    os.mkfifo(task / "files" / "pipe")
    with pytest.raises(Refused, match="neither"):
        load_task(task)


@pytest.mark.parametrize("name", [".codex/config", ".managed-agents-x/a", "outputs", "a\\b", "a\nb", "\udcff"])
def test_paths_that_no_session_takes_are_refused(tmp_path: Path, name: str) -> None:
    task = write_task(tmp_path)
    path = task / "files" / name
    path.parent.mkdir(parents=True)
    path.write_text("")
    with pytest.raises(Refused):
        load_task(task)


@pytest.mark.parametrize(
    ("sizes", "accepted"),
    [
        ([1] * 50, True),
        ([1] * 51, False),
        ([5 << 20], True),
        ([(5 << 20) + 1], False),
        ([5 << 20, 5 << 20], True),
        ([5 << 20, 5 << 20, 1], False),
    ],
)
def test_limits_of_files(tmp_path: Path, sizes: list[int], accepted: bool) -> None:
    """A13."""
    task = write_task(tmp_path)
    (task / "files").mkdir()
    for number, size in enumerate(sizes):
        with (task / "files" / f"{number}").open("wb") as file:
            file.truncate(size)
    if accepted:
        assert len(files_of(task)) == len(sizes)
    else:
        with pytest.raises(Refused, match="limits"):
            load_task(task)


# --- task.json ----------------------------------------------------------------------------------


def with_rules(tmp_path: Path, text: str, expected: str = '{"x": 100, "y": "a", "z": 3}') -> Task:
    task = write_task(tmp_path, expected=expected)
    (task / "task.json").write_text(text)
    return load_task(task)


@pytest.mark.parametrize(
    ("rules", "answer", "reward"),
    [
        ("{}", '{"x": 100, "y": "a", "z": 3}', 1.0),
        ("{}", '{"x": 100, "y": "a"}', 0.0),
        ('{"grade": "binary"}', '{"x": 100, "y": "a"}', 0.0),
        ('{"grade": "fraction"}', '{"x": 100, "y": "a"}', 2 / 3),
        ('{"grade": "fraction"}', '{"x": 100, "y": "b", "z": 9}', 1 / 3),
        ('{"grade": "fraction"}', '{"x": 100, "y": "a", "z": 3, "w": 0}', 1.0),
        ('{"grade": "fraction"}', "{}", 0.0),
        ('{"grade": "fraction"}', "[]", 0.0),
        ('{"grade": "fraction"}', '{"x": 100, "x": 100, "y": "a"}', 0.0),
        ('{"tolerances": {"x": {"relative": 0.01}}}', '{"x": 101, "y": "a", "z": 3}', 1.0),
        ('{"tolerances": {"x": {"relative": 0.01}}}', '{"x": 101.1, "y": "a", "z": 3}', 0.0),
        ('{"tolerances": {"x": {"relative": 0.01}}}', '{"x": 100, "y": "a", "z": 3.01}', 0.0),
        ('{"tolerances": {"x": {"absolute": 2}}}', '{"x": 98, "y": "a", "z": 3}', 1.0),
        ('{"tolerances": {"x": {"absolute": 2}}}', '{"x": 97.9, "y": "a", "z": 3}', 0.0),
        ('{"tolerances": {"x": {"relative": 0, "absolute": 0}}}', '{"x": 100.00001, "y": "a", "z": 3}', 0.0),
        ('{"tolerances": {"x": {"relative": 0, "absolute": 0}}}', '{"x": 100.0, "y": "a", "z": 3}', 1.0),
        ('{"tolerances": {"y": {"absolute": 9}}}', '{"x": 100, "y": "b", "z": 3}', 0.0),
    ],
)
def test_rules_of_a_task(tmp_path: Path, rules: str, answer: str, reward: float) -> None:
    task = with_rules(tmp_path, rules)
    assert rl_eval.grade(task.expected, answer.encode(), task.rules)[0] == pytest.approx(reward)


def test_timeout_of_a_task(tmp_path: Path) -> None:
    assert with_rules(tmp_path, '{"timeout": 12.5}').rules.timeout == 12.5


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ("[]", "not an object"),
        ("{", "not valid JSON"),
        ('{"grades": "fraction"}', "unknown member 'grades'"),
        ('{"grade": "partial"}', "grade"),
        ('{"grade": ["binary"]}', "grade"),
        ('{"grade": null}', "grade"),
        ('{"timeout": 0}', "timeout"),
        ('{"timeout": "5"}', "timeout"),
        ('{"timeout": true}', "timeout"),
        ('{"timeout": 1e999}', "finite"),
        ('{"tolerances": {"w": {"absolute": 1}}}', "tolerances"),
        ('{"tolerances": [1]}', "tolerances"),
        ('{"tolerances": {"x": 1}}', "tolerances"),
        ('{"tolerances": {"x": {}}}', "tolerances"),
        ('{"tolerances": {"x": {"relative": -1}}}', "tolerances"),
        ('{"tolerances": {"x": {"relative": true}}}', "tolerances"),
        ('{"tolerances": {"x": {"relativ": 1}}}', "tolerances"),
        ('{"tolerances": {"x": {"relative": null}}}', "tolerances"),
    ],
)
def test_unsound_rules_are_refused(tmp_path: Path, rules: str, says: str) -> None:
    with pytest.raises(Refused, match=r"task 't': task.json") as caught:
        with_rules(tmp_path, rules)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_rules_belong_to_the_digest(tmp_path: Path) -> None:
    texts = ["{}", '{"grade": "fraction"}', '{"timeout": 5}', '{"tolerances": {"x": {"absolute": 1}}}']
    digests = [with_rules(tmp_path / str(n), text).digest for n, text in enumerate(texts)]
    assert len(set(digests)) == 4 and with_rules(tmp_path / "again", texts[3]).digest == digests[3]


# --- Plan -------------------------------------------------------------------------------------

TASK = Task("t", "Do it.", {"x": 1}, (), "true")


def test_plan_is_every_combination_with_distinct_ids() -> None:
    pairs = [Pair("codex", "m", "responses"), Pair("claude_sdk", "m", "anthropic"), Pair(None, None)]
    plan = rl_eval.make_plan("run", [TASK, Task("u", "Do.", {"x": 1}, (), None)], pairs, 4)
    assert len({rollout.id for rollout in plan}) == len(plan) == 24
    groups = {rollout.group_id for rollout in plan}
    assert len(groups) == 6 and not groups & {rollout.id for rollout in plan}
    assert all(rollout.id.startswith("run-") for rollout in plan)
    assert [r.sample for r in plan[:4]] == [0, 1, 2, 3] and len({r.group_id for r in plan[:4]}) == 1


def test_ids_are_the_same_in_another_process() -> None:
    first, again = (rl_eval.make_plan("run", [TASK], [Pair("codex", "m")], 2) for _ in range(2))
    assert [r.id for r in first] == [r.id for r in again]


def test_session_body_holds_what_the_api_knows_and_nothing_of_the_answer() -> None:
    (rollout,) = rl_eval.make_plan("run", [TASK], [Pair("codex", "m", "responses")], 1)
    endpoint = "http://127.0.0.1:1/rollouts/{rollout_id}/v1", "key"
    body = rl_eval.session_body(rollout, 1, endpoint, [])
    assert body["agent"] == {"model": "m", "x_agents_core": {"harness": "codex"}}
    bundle = body["extra_body"]["x_agents_core"]["model_provider"]
    url = f"http://127.0.0.1:1/rollouts/{rollout.id}/v1"
    assert bundle == {"protocol": "responses", "base_url": url, "api_key": "key"}
    assert body["environment"]["network"] == {"access": "disabled"}
    assert body["extra_headers"]["Idempotency-Key"].startswith(rollout.id)
    assert "expected" not in repr(body)


def test_default_pair_names_nothing_and_shell_has_no_model() -> None:
    (rollout,) = rl_eval.make_plan("run", [TASK], [Pair(None, None)], 1)
    body = rl_eval.session_body(rollout, 1, None, [])
    assert body["agent"] == {} and "extra_body" not in body
    assert rl_eval.labels(Pair(None, None)) == ("default", "default")
    assert rl_eval.labels(Pair("shell", None)) == ("shell", "none")


# --- Options ----------------------------------------------------------------------------------


def pairs_of(monkeypatch: pytest.MonkeyPatch, arguments: str, embedded: bool, key: str = "a-model-key") -> list[Pair]:
    monkeypatch.setenv("MODEL_API_KEY", key)
    monkeypatch.setenv("OPENAI_API_KEY", "" if embedded else "a-deployment-key")
    options = make_parser().parse_args(arguments.split())
    check_options(options, embedded)
    recall_options(options, {})
    check_endpoint(options)
    return choose_pairs(options, embedded)


URL = "--model-base-url http://127.0.0.1:9/v1"


@pytest.mark.parametrize(
    ("arguments", "embedded", "pairs"),
    [
        ("", True, [("codex", "oracle", "responses")]),
        ("", False, [(None, None, None)]),
        ("--harness claude_sdk --model nop", True, [("claude_sdk", "nop", "anthropic")]),
        ("--harness shell", True, [("shell", None, None)]),
        ("--harness shell --harness codex", True, [("shell", None, None), ("codex", "oracle", "responses")]),
        ("--harness mcode --model m", False, [("mcode", "m", None)]),
        ("--model m --model m", False, [(None, "m", None)]),
        (f"--model m {URL}", True, [("codex", "m", "responses")]),
        (
            f"--harness mcode --model m {URL} --model-protocol chat_completions",
            False,
            [("mcode", "m", "chat_completions")],
        ),
        (
            f"--harness codex --harness claude_sdk --model m {URL}",
            False,
            [("codex", "m", "responses"), ("claude_sdk", "m", "anthropic")],
        ),
    ],
)
def test_pairs(monkeypatch: pytest.MonkeyPatch, arguments: str, embedded: bool, pairs: list[Any]) -> None:
    assert pairs_of(monkeypatch, arguments, embedded) == [Pair(*pair) for pair in pairs]


@pytest.mark.parametrize(
    ("arguments", "embedded", "says"),
    [
        ("--harness nosuch", True, "codex, claude_sdk, pi, opencode, shell"),
        ("--harness shell --model m", True, "shell"),
        ("--model m", True, "--model-base-url"),
        ("--model oracle", False, "embedded"),
        (URL, True, "--model"),
        ("--model-protocol responses --model nop", True, "--model-base-url"),
        (f"--model m --harness codex {URL} --model-protocol anthropic", True, "speaks responses"),
        (f"--model m {URL}", False, "--model-protocol"),
        (f"--model m --harness mcode {URL}", False, "--model-protocol"),
        ("--check", False, "embedded"),
        ("--check --model nop", True, "--check runs the tasks alone"),
        ("--samples 0", True, "--samples"),
        ("--samples 4 --min-pass 1=0.5 --min-pass 5=0.9", True, "at most --samples, 4 here"),
        ("--concurrency x", True, "--concurrency"),
        ("--timeout nan", True, "--timeout"),
        ("--timeout -1", True, "--timeout"),
        ("--model-protocol nosuch", True, "anthropic"),
        ("--sample 3", True, "--samples"),
        ("--model m --model-base-url ftp://h/v1", True, "http"),
        ("--model m --model-base-url http:///v1", True, "http"),
        ("--model m --model-base-url http://h:99999/v1", True, "http"),
        ("--model m --model-base-url http://h/{rollout}/v1", True, "{rollout_id}"),
    ],
)
def test_refused_options(monkeypatch: pytest.MonkeyPatch, arguments: str, embedded: bool, says: str) -> None:
    with pytest.raises(Refused) as caught:
        pairs_of(monkeypatch, arguments, embedded)
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "arguments",
    [
        "--model m --model-base-url http://user:SECRET@h/v1",
        "--model m --model-base-url http://h/v1?key=SECRET",
        "--model m --model-base-url http://h/v1#SECRET",
        "--model m --model-base-url SECRET",
        "--model-api-key SECRET",
        "--api-key=SECRET",
        "SECRET",
        "--samples SECRET",
    ],
)
def test_misplaced_secret_is_not_repeated(monkeypatch: pytest.MonkeyPatch, arguments: str) -> None:
    """S26."""
    with pytest.raises(Refused) as caught:
        pairs_of(monkeypatch, arguments, embedded=True)
    assert "SECRET" not in str(caught.value)


def test_endpoint_without_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Refused, match="MODEL_API_KEY"):
        pairs_of(monkeypatch, f"--model m {URL}", embedded=True, key="")


# --- The record -------------------------------------------------------------------------------


def no_constant(text: str) -> None:
    raise AssertionError(text)


def stored(**members: Any) -> Json:
    """A record written and read back by a strict parser."""
    line = to_line(result("t", None, **members))
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    record: Json = json.loads(line, parse_constant=no_constant)
    return record


def test_record_has_its_members_in_order() -> None:
    names = "rollout_id task harness model sample session_id status reward answer duration_s usage items error"
    names += " turn_id group_id run_id started_at attempt final usage_observed failure timings task_digest"
    assert list(stored()) == [*names.split(), "script_version", "resolved", "options", "deployment"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e309, [{"a": math.nan}]])
def test_numbers_that_json_lacks_are_replaced_and_marked(value: Any) -> None:
    """T14."""
    (item,) = stored(items=[{"id": "1", "type": "x", "value": value}])["items"]
    assert item["x_rl_eval"]["altered"][0]["why"] == "not a JSON number"


@pytest.mark.parametrize("text", ["\ud800", "a\0b", "line\nline\u2028line", "\x1b[31m", "日本"])
def test_odd_text_survives(text: str) -> None:
    record = stored(items=[{"text": text}], answer={text: text}, error=text)
    assert (record["items"], record["answer"], record["error"]) == ([{"text": text}], {text: text}, text)


def test_long_text_is_cut_with_size_and_digest() -> None:
    (item,) = stored(items=[{"id": "1", "output": "x" * 50_000_000}])["items"]
    mark = item["x_rl_eval"]["altered"][0]
    assert len(item["output"]) < 300_000 and "characters cut" in item["output"]
    assert mark["path"] == ".output" and mark["bytes"] == 50_000_000 and len(mark["sha256"]) == 64


def test_deep_items_do_not_break_the_line() -> None:
    deep: Any = "end"
    for _ in range(5000):
        deep = [deep]
    assert stored(items=[{"arguments": deep}])["items"][0]["x_rl_eval"]["altered"][0]["why"] == "nested too deep"


def test_untouched_item_is_as_it_was() -> None:
    item = {"id": "1", "type": "nosuch", "n": 1, "f": 0.5, "l": [None, True], "x_agents_core": {"y": {}}}
    assert stored(items=[item, "text", None])["items"] == [item, "text", None]


def test_secrets_are_redacted_in_every_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """S25."""
    monkeypatch.setattr("report.record.SECRETS", [])
    secret = "sk-canary/+key=42"
    keep_secret(secret)
    keep_secret("none")
    coded = base64.b64encode(secret.encode()).decode()
    texts = [secret, coded, "sk-canary%2F%2Bkey%3D42", f"Bearer {secret}!"]
    record = stored(items=[{"output": text, text: [text]} for text in texts], answer={"x": secret}, error=secret)
    dumped = json.dumps(record) + plain(" ".join(texts))
    assert not [text for text in texts[:3] if text in dumped] and "none" not in report.record.SECRETS


@pytest.mark.parametrize("text", ["\x1b]0;title\x07", "a\rb", "a\nb", "\u202e", "\ud800", "\x9b31m"])
def test_terminal_gets_no_control_characters(text: str) -> None:
    assert plain(text).isprintable()


# --- What it costs to look --------------------------------------------------------------------


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys, rl_eval\n"
        "try: rl_eval.main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'openai', 'tenacity', 'tabulate', 'asyncio.base_events'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    folder = Path(rl_eval.__file__).parent
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "") and "--model-base-url" in done.stdout


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
