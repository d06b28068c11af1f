"""What can be made of a finished run's file: its table again, a comparison with another one, a page to read.

    python3 -m report table runs/x.jsonl --prices prices.json
    python3 -m report compare runs/a.jsonl runs/b.jsonl
    python3 -m report html runs/x.jsonl -o x.html

Files of runs are only read. Exit codes: 0, 2 for what cannot be done as asked.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib.util import find_spec
from pathlib import Path

from report.options import counts
from report.reading import Run
from report.record import Refused, plain, say


def table(o: argparse.Namespace) -> int:
    """The table that the run printed, with a cost if prices are given."""
    from report.statistics import summarise
    from report.table import markdown

    run = Run(o.run)
    samples = run.planned("samples") or 1
    ks = {k for given in o.k or [[1, samples]] for k in given}
    rows, notes = summarise(run.book.outcomes, ks, run.planned("tasks"), samples), []
    if o.prices:
        from report.cost import add_costs, read_prices

        notes = add_costs(rows, run.book.every, read_prices(o.prices))
    width = os.get_terminal_size(1).columns if os.isatty(1) else None
    say("\n".join([markdown(rows, ks, width), *([""] if notes else []), *notes]), sys.stdout)
    return 0


def compare(o: argparse.Namespace) -> int:
    """Two runs, paired by task. Raises Refused where they are not comparable, unless forced."""
    from report.compare import choose, obstacles, show

    a, b = choose(Run(o.first), "A", o.a), choose(Run(o.second), "B", o.b)
    differing = obstacles(a, b)
    if differing and not o.force:
        more = f"; and {len(differing) - 5} more" if len(differing) > 5 else ""
        raise Refused(f"not comparable: {'; '.join(differing[:5])}{more} (--force compares what is in both)")
    say(show(a, b, differing), sys.stdout)
    return 0


def html(o: argparse.Namespace) -> int:
    """One page that holds the whole run."""
    if find_spec("vl_convert") is None:
        raise Refused("missing package vl-convert-python: pip install -r requirements.txt")
    target = o.output or o.run.with_suffix(".html")
    if target.suffix != ".html":
        raise Refused(f"-o {target}: the name of a page ends in .html")
    from report.page import write_page

    for reason in write_page(Run(o.run), target, o.tasks)[:5]:
        say(plain(f"report: the expected answer is not shown: {reason}"))
    say(plain(f"report: wrote {target}; it holds the expected answers: keep it from agents"))
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Built per call."""
    parser = argparse.ArgumentParser(prog="report", allow_abbrev=False, description="Read what a run has written.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add = (sub := commands.add_parser("table", help="the run's table again", allow_abbrev=False)).add_argument
    sub.set_defaults(do=table)
    add("run", type=Path, metavar="RUN.jsonl")
    add("--k", type=counts, action="append", metavar="K", help="of pass@k and pass^k; repeatable (default 1, samples)")
    add("--prices", type=Path, metavar="FILE",
        help='adds the cost. JSON, US dollars per million tokens: {"MODEL": {"input": 1.25, "cached": 0.125, "output": '
        "10}}")  # fmt: skip
    add = (sub := commands.add_parser("compare", help="two runs, paired by task", allow_abbrev=False)).add_argument
    sub.set_defaults(do=compare)
    add("first", type=Path, metavar="A.jsonl")
    add("second", type=Path, metavar="B.jsonl")
    add("--a", metavar="HARNESS:MODEL", help="which pair of A, if it holds several")
    add("--b", metavar="HARNESS:MODEL", help="which pair of B")
    add("--force", action="store_true", help="compare what is in both, even if tasks differ or are missing")
    add = (sub := commands.add_parser("html", help="a page to read it all", allow_abbrev=False)).add_argument
    sub.set_defaults(do=html)
    add("run", type=Path, metavar="RUN.jsonl")
    add("-o", "--output", type=Path, metavar="PAGE.html", help="default: beside the run")
    add("--tasks", type=Path, default=Path("tasks"), metavar="DIR",
        help="where the expected answers are (default tasks/)")  # fmt: skip
    return parser


def main(arguments: list[str] | None = None) -> int:
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        o = make_parser().parse_args(arguments)
        code: int = o.do(o)
        return code
    except Refused as refused:
        say(f"report: {plain(str(refused))}")
        return refused.code
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
