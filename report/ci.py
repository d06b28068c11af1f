"""What CI systems read of a run: a JSON summary with every number, and JUnit XML."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from report.record import Json, plain

if TYPE_CHECKING:
    from report.record import Book, Result


def write_json(path: Path, rows: list[Json], book: Book, unmet: list[str], code: int) -> None:
    """Strict JSON: the rows of the table with all their columns, and what was used. Raises OSError."""
    unknown = sum(result.tokens is None for result in book.every)
    summary: Json = {"run_id": book.latest and book.latest.run_id, "rows": rows, "attempts": len(book.every)}
    summary |= {"tokens": book.tokens, "attempts_of_unknown_tokens": unknown, "unmet": unmet, "exit_code": code}
    path.write_text(json.dumps(summary, indent=2, allow_nan=False) + "\n")


def write_junit(path: Path, results: list[Result]) -> None:
    """A suite per harness and model, a case per rollout: a failure below 1.0, an error where nothing was measured.

    Raises OSError.
    """
    root = ElementTree.Element("testsuites", name="rl_eval")
    suites: dict[tuple[str, str], ElementTree.Element] = {}
    for result in sorted(results, key=lambda r: (r.harness, r.model, r.task, r.sample)):
        pair = result.harness, result.model
        if pair not in suites:
            suites[pair] = ElementTree.SubElement(root, "testsuite", name=plain(" · ".join(pair)))
        add_case(suites[pair], result)
    for suite in (root, *suites.values()):
        count(suite)
    ElementTree.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)


def add_case(suite: ElementTree.Element, result: Result) -> None:
    name, seconds = f"{plain(result.task)} #{result.sample}", f"{result.duration_s:.3f}"
    case = ElementTree.SubElement(suite, "testcase", classname=plain(result.task), name=name, time=seconds)
    said = plain(result.error or "the answer is wrong", 4000)
    if result.reward is None:
        ElementTree.SubElement(case, "error", type=result.status, message=said)
    elif result.reward < 1.0:
        ElementTree.SubElement(case, "failure", type=result.status, message=f"reward {result.reward:g}: {said}")


def count(suite: ElementTree.Element) -> None:
    for kind, tag in (("tests", "testcase"), ("failures", "failure"), ("errors", "error")):
        suite.set(kind, str(len(suite.findall(f".//{tag}"))))
