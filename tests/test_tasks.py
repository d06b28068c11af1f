"""The bundled tasks: their data can be made again, and their answers cannot be earned carelessly.

A careless solution is the reference with one rule of the instruction forgotten. That each of them
writes a whole answer, and not the expected one, shows that the rule matters in the data.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TASKS = Path(__file__).parent.parent / "tasks"
TASK_IDS = ("failed-logins", "inventory-bug", "orders-json", "salaries-sqlite", "sales-by-region")


def matches(expected: Any, answer: Any) -> bool:
    if isinstance(expected, dict):
        keys = isinstance(answer, dict) and expected.keys() <= answer.keys()
        return keys and all(matches(value, answer[key]) for key, value in expected.items())
    if isinstance(expected, list):
        pairs = isinstance(answer, list) and len(answer) == len(expected)
        return pairs and all(map(matches, expected, answer))
    if isinstance(expected, str):
        return isinstance(answer, str) and answer.strip() == expected.strip()
    return type(answer) in (int, float) and math.isclose(expected, answer, rel_tol=1e-6, abs_tol=1e-9)


def expected_of(task: str) -> Any:
    return json.loads((TASKS / task / "expected.json").read_text(encoding="utf-8"))


def files_of(task: str) -> list[Path]:
    return [path for path in (TASKS / task / "files").rglob("*") if not path.is_dir()]


def answer_of(task: str, script: str, workspace: Path) -> Any:
    """What a script run by bash in a copy of the task's files leaves as its answer."""
    shutil.copytree(TASKS / task / "files", workspace)
    # The interpreter of the tests, not a version manager's slow stand-in for it.
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=workspace,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads((workspace / "outputs/answer.json").read_text(encoding="utf-8"))


def solution_of(task: str) -> str:
    return (TASKS / task / "solution.sh").read_text(encoding="utf-8")


def content(path: Path) -> bytes:
    """A file's bytes; of a database its statements, as SQLite stamps its version into the bytes."""
    if path.suffix != ".db":
        return path.read_bytes()
    database = sqlite3.connect(path)
    dump = "\n".join(database.iterdump())
    database.close()
    return dump.encode()


def zeroed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: zeroed(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return []
    return "" if isinstance(value, str) else 0


def test_every_task_is_tested() -> None:
    assert sorted(path.parent.name for path in TASKS.glob("*/instruction.md")) == sorted(TASK_IDS)


@pytest.mark.parametrize("task", TASK_IDS)
def test_files_are_within_the_limits(task: str) -> None:
    files = files_of(task)
    sizes = [path.stat().st_size for path in files]
    assert 1 <= len(files) <= 50 and max(sizes) <= 5 * 2**20 and sum(sizes) <= 10 * 2**20
    assert not any(path.is_symlink() for path in files)


@pytest.mark.parametrize("task", TASK_IDS)
def test_an_empty_answer_is_not_the_expected_one(task: str) -> None:
    assert not matches(expected_of(task), {})
    assert not matches(expected_of(task), zeroed(expected_of(task)))


def test_the_generator_makes_the_same_data_again(tmp_path: Path) -> None:
    subprocess.run([sys.executable, TASKS / "generate.py", tmp_path], check=True, timeout=60)
    made = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.relative_to(tmp_path).parts[0] for path in made} == set(TASK_IDS)
    checked_in = {path for task in TASK_IDS for path in (TASKS / task / "files/data").iterdir()}
    assert checked_in == {TASKS / path.relative_to(tmp_path) for path in made if path.name != "expected.json"}
    for path in made:
        assert content(path) == content(TASKS / path.relative_to(tmp_path)), path.name


@pytest.mark.parametrize("task", TASK_IDS)
def test_the_reference_earns_the_expected_answer(task: str, tmp_path: Path) -> None:
    assert matches(expected_of(task), answer_of(task, solution_of(task), tmp_path / "workspace"))


def test_the_inventory_ships_with_passing_tests(tmp_path: Path) -> None:
    shutil.copytree(TASKS / "inventory-bug/files", tmp_path / "workspace")
    command = [sys.executable, "-m", "unittest", "discover", "tests"]
    subprocess.run(command, cwd=tmp_path / "workspace", check=True, capture_output=True, timeout=60)


FINISHED = """
def finished(path):
    return [order for order in load(path)["orders"] if order["status"] in ("completed", "shipped")]


"""

# Task, what the careless solution does, and the edits that turn the reference into it.
CARELESS: list[tuple[str, str, dict[str, str]]] = [
    ("sales-by-region", "ignores refunds", {"] -= amount(refund)": "] -= 0"}),
    ("sales-by-region", "adds refunds", {"] -= amount(refund)": "] += amount(refund)"}),
    (
        "sales-by-region",
        "splits on commas",
        {
            'records = {row["record_id"]: row for row in csv.DictReader(file)}': (
                'header, *lines = [line.rstrip("\\n").split(",") for line in file]\n'
                "    rows = [dict(zip(header, fields)) for fields in lines if len(fields) == len(header)]\n"
                '    records = {row["record_id"]: row for row in rows}'
            )
        },
    ),
    (
        "sales-by-region",
        "books refunds to the quarter of the refund",
        {'net[cell(sales[refund["refund_of"]])]': ('net[cell(sales[refund["refund_of"]])[0], cell(refund)[1]]')},
    ),
    (
        "sales-by-region",
        "books refunds to the region of the refund",
        {
            'net[cell(sales[refund["refund_of"]])]': (
                'net[cell(refund)[0] or cell(sales[refund["refund_of"]])[0], cell(sales[refund["refund_of"]])[1]]'
            )
        },
    ),
    (
        "sales-by-region",
        "leaves out refunds given in the next year",
        {'and record["refund_of"] in sales': 'and record["refund_of"] in sales and "2024" in record["date"]'},
    ),
    (
        "sales-by-region",
        "removes only rows equal in every character",
        {
            '{row["record_id"]: row for row': "{tuple(row.values()): row for row",
            'record["record_id"]: record\n': "index: record\n",
            "for record in final\n": "for index, record in enumerate(final)\n",
            'record["refund_of"] in sales': 'record["refund_of"] in ids',
            "refunds = [": 'ids = {sale["record_id"]: sale for sale in sales.values()}\nrefunds = [',
            'sales[refund["refund_of"]]': 'ids[refund["refund_of"]]',
        },
    ),
    (
        "sales-by-region",
        "takes equal records of different ids for one",
        {'{row["record_id"]: row for row': "{tuple(row.values())[1:]: row for row"},
    ),
    ("sales-by-region", "counts void records", {'if record["status"] != "void"': "if True"}),
    ("sales-by-region", "counts all years", {"[0] == 2024": "[0] > 0"}),
    (
        "sales-by-region",
        "reads the month first",
        {"_, month, year": "month, day, year", "int(year), int(month)": "int(year), min(int(month), 12)"},
    ),
    (
        "sales-by-region",
        "takes each spelling of a region for a region",
        {
            '["region"].strip().capitalize()': '["region"]',
            "net = {(region, quarter): Decimal(0) for region in REGIONS for quarter in QUARTERS}": (
                "from collections import Counter\nnet = Counter()"
            ),
        },
    ),
    ("sales-by-region", "ends a price at its comma", {'.replace(",", "")': '.split(",")[0]'}),
    ("failed-logins", "counts a repeated message once", {"int(repeated[1])": "1"}),
    ("failed-logins", "includes the repeated line in its N", {"int(repeated[1])": "int(repeated[1]) - 1"}),
    ("failed-logins", "ignores repeated messages", {"int(repeated[1])": "0"}),
    (
        "failed-logins",
        "takes the first address",
        {"(.*) from (\\S+) port \\d+ ssh2": "(.*?) from ([0-9]\\S+) .*"},
    ),
    ("failed-logins", "leaves out invalid users", {"for (.*) from": "for (?!invalid user)(.*) from"}),
    (
        "failed-logins",
        "takes a user name for one word",
        {"for (.*) from": "for (?:invalid user )?(\\S+) from"},
    ),
    ("failed-logins", "takes local time for UTC", {"hours=2": "hours=0"}),
    ("failed-logins", "shifts the clock the wrong way", {"hours=2": "hours=-2"}),
    ("failed-logins", "counts equal lines once", {"for text in log:": "for text in set(log):"}),
    ("failed-logins", "keeps mapped addresses apart", {'.removeprefix("::ffff:")': ""}),
    ("failed-logins", "counts the monitoring", {"in MONITORING": "in ()"}),
    (
        "failed-logins",
        "takes the network for a prefix of the text",
        {"ipaddress.ip_address(address) in MONITORING": 'address.startswith("10.20")'},
    ),
    ("failed-logins", "counts all hosts", {"gate1 sshd": "\\S+ sshd"}),
    ("failed-logins", "counts all programs", {"gate1 sshd": "gate1 \\S+?"}),
    ("failed-logins", "counts all methods", {"Failed password for (.*)": "Failed \\S+ for (.*)"}),
    ("failed-logins", "counts these words anywhere", {"ATTEMPT.fullmatch": "ATTEMPT.search"}),
    (
        "failed-logins",
        "orders equal counts by number",
        {"(-entry[1], entry[0])": "(-entry[1], int(ipaddress.ip_address(entry[0])))"},
    ),
    ("inventory-bug", "forgets the thresholds", {'threshold:": "if units >=': 'threshold:": "if units >'}),
    ("inventory-bug", "forgets the last day", {'last_day": "<= day <=': 'last_day": "<= day <'}),
    (
        "inventory-bug",
        "goes on adding discounts up",
        {'"(100 - volume) * (100 - promotion) / 10000"': '"(100 - volume - promotion) / 100"'},
    ),
    ("inventory-bug", "rounds half to even", {"(CENT, ROUND_HALF_UP)": "(CENT)"}),
    ("inventory-bug", "does not round", {'".quantize(CENT, ROUND_HALF_UP)"': '""'}),
    ("inventory-bug", "runs the report as it is", {"code = code.replace(wrong, right)": "pass"}),
    ("inventory-bug", "values another day", {"--as-of 2024-06-30": "--as-of 2024-07-01"}),
    ("orders-json", "ignores bundles", {'item.get("components", [])': "[]"}),
    (
        "orders-json",
        "ignores how many bundles",
        {'times * int(component["quantity"])': 'int(component["quantity"])'},
    ),
    ("orders-json", "ignores how many in a bundle", {'times * int(component["quantity"])': "times"}),
    (
        "orders-json",
        "skips quantities in strings",
        {'int(component["quantity"])': '({1: 1, 2: 2, 3: 3}.get(component["quantity"], 0))'},
    ),
    ("orders-json", "keeps the first revision", {'["revision"] > known': '["revision"] < known'}),
    (
        "orders-json",
        "keeps every revision",
        {'orders[order["order_id"]] = order': "orders[id(order)] = order"},
    ),
    (
        "orders-json",
        "looks at the status before the revision",
        {'load(path)["orders"]:': "finished(path):", "customers = {": FINISHED + "customers = {"},
    ),
    ("orders-json", "counts every status", {'order["status"] not in ("completed", "shipped") or ': ""}),
    ("orders-json", "counts completed orders only", {'("completed", "shipped")': '("completed",)'}),
    ("orders-json", "wants the SKU as it is spelled", {".strip().upper() == WANTED": " == WANTED"}),
    ("orders-json", "ignores spaces only", {".strip().upper() == WANTED": ".strip() == WANTED"}),
    (
        "orders-json",
        "accepts SKUs that contain the SKU",
        {'item["sku"].strip().upper() == WANTED': 'WANTED in item["sku"].upper()'},
    ),
    ("orders-json", "ignores returns", {'(item.get("returned") or 0)': "0"}),
    ("orders-json", "ignores merges", {"while customers": "while False and customers"}),
    ("orders-json", "follows one merge", {"while customers": "if customers"}),
    ("orders-json", "counts internal customers", {' or customers[customer]["internal"]': ""}),
    (
        "orders-json",
        "looks at the merged customer for internal",
        {'customers[customer]["internal"]': 'customers[order["customer"]["id"]]["internal"]'},
    ),
    ("orders-json", "takes yen for hundredths", {'"JPY": Decimal(1)': '"JPY": Decimal("0.01")'}),
    ("orders-json", "adds currencies up", {'Decimal(payment["eur_rate"])': "1"}),
    ("orders-json", "counts customers who kept nothing", {"if units[customer] > 0": ""}),
    ("salaries-sqlite", "loses kinds that are NULL", {"IS NOT 'contractor'": "<> 'contractor'"}),
    ("salaries-sqlite", "counts contractors", {"employees.kind IS NOT 'contractor'": "1"}),
    ("salaries-sqlite", "ends rows a day early", {"valid_to >= :day": "valid_to > :day"}),
    ("salaries-sqlite", "wants an end date", {"IS NULL OR": "IS NOT NULL AND"}),
    ("salaries-sqlite", "takes the first day of the year", {"-12-31": "-01-01"}),
    ("salaries-sqlite", "counts second assignments", {"assignments.is_primary = 1": "1"}),
    (
        "salaries-sqlite",
        "reads numbers up to the comma",
        {"replace(salaries.amount, ',', '')": "salaries.amount"},
    ),
    (
        "salaries-sqlite",
        "takes unknown salaries for nothing",
        {
            "AND salaries.amount IS NOT NULL": "",
            "replace(salaries.amount,": "replace(coalesce(salaries.amount, 0),",
        },
    ),
    (
        "salaries-sqlite",
        "replaces unknown salaries by corrected ones",
        {"GROUP BY employee_id": "AND amount IS NOT NULL GROUP BY employee_id"},
    ),
    ("salaries-sqlite", "counts corrected rows too", {"GROUP BY employee_id": "GROUP BY id"}),
    ("salaries-sqlite", "keeps the wrong row", {"max(id)": "min(id)"}),
    (
        "salaries-sqlite",
        "divides integers",
        {"* 100.0 / salaries.fte_percent": "* (100 / salaries.fte_percent)"},
    ),
    ("salaries-sqlite", "ignores part time", {"* 100.0 / salaries.fte_percent": ""}),
    ("salaries-sqlite", "takes months for years", {"THEN 12": "THEN 1"}),
    (
        "salaries-sqlite",
        "keeps one department of a name",
        {"assignments.is_primary = 1": "departments.id < 9"},
    ),
    (
        "salaries-sqlite",
        "averages averages",
        {
            "for _, salary in salaries)": (
                "for salary in [fmean(own for name, own in salaries if name == one) for one in names])"
            )
        },
    ),
]


@pytest.mark.parametrize(
    ("task", "edits"),
    [pytest.param(task, edits, id=f"{task}: {what}") for task, what, edits in CARELESS],
)
def test_a_careless_solution_does_not_earn_it(task: str, edits: dict[str, str], tmp_path: Path) -> None:
    script = solution_of(task)
    for rule, careless in edits.items():
        assert rule in script
        script = script.replace(rule, careless)
    answer, expected = answer_of(task, script, tmp_path / "workspace"), expected_of(task)
    assert answer.keys() == expected.keys()
    assert not matches(expected, answer)
