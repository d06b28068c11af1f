"""`python3 -m gateway export` and `explain`: arguments in, one report or one line of complaint out.

Exit codes: 0 done; 1 the data does not allow it; 2 the arguments do not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gateway.formats import FORMATS

ADVANTAGES = ("grpo", "dr_grpo", "rloo", "none")

EXPORT = """\
Join a run's rewards with its traces, by rollout and attempt, and write what a trainer reads, one JSON object a line.

Of each rollout the attempt that settled it counts. Rollouts with a null reward and groups with one are reported and
never filled in. The formats:
"""

EXPLAIN = """\
Say in words and a small picture which calls a trace holds, where a prompt broke off from what was sampled before,
by whose doing, and what would be trained. TRACE is a .log file, or a folder with some below it."""


def add(commands: Any) -> None:
    """The parsers of both commands; each leaves its function in `run`."""
    formats = "\n".join(f"  {name:<10} {about}" for name, about in FORMATS.items())
    export = commands.add_parser(
        "export",
        help="write a run's traces as training data",
        description=EXPORT + formats,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    export.set_defaults(run=run_export)
    export.add_argument("runfile", metavar="RUN.jsonl", type=Path, help="what rl_eval.py wrote")
    export.add_argument("--traces", metavar="DIR", type=Path, required=True, help="what the gateway wrote")
    export.add_argument(
        "-f", "--format", choices=FORMATS, default="sequence", metavar="FORMAT", help="default sequence"
    )
    export.add_argument("-o", "--out", metavar="OUT", type=Path, required=True, help="a new file")
    export.add_argument("--advantage", choices=ADVANTAGES, default="grpo", help="default grpo")
    export.add_argument(
        "--drop-zero-variance", action="store_true", help="leave out groups whose rewards are all equal"
    )
    export.add_argument(
        "--ownership", choices=("first", "split"), default="first", help="of tokens in several sequences"
    )
    export.add_argument(
        "--compactions", action="store_true", help="train the summaries that a harness went on with, too"
    )
    export.add_argument("--max-length", type=positive, metavar="N", help="cut sequences at the last call that fits")
    explain = commands.add_parser("explain", help="tell what happened in a trace", description=EXPLAIN)
    explain.set_defaults(run=run_explain)
    explain.add_argument("trace", metavar="TRACE", type=Path)


def positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError
    return number


def run_export(options: argparse.Namespace) -> int:
    # Imported late, here and below: a gateway that serves does without.
    from gateway.export import CannotExport, Options, export, summary

    if options.out.exists():
        return refuse(f"{options.out} exists: choose another name", 2)
    if not options.traces.is_dir():
        return refuse(f"--traces {options.traces} is no folder", 2)
    kind = None if options.advantage == "none" else options.advantage
    chosen = Options(kind, options.drop_zero_variance, options.ownership, options.compactions, options.max_length)
    try:
        report = export(options.runfile, options.traces, options.format, options.out, chosen)
    except CannotExport as reason:
        return refuse(str(reason), 1)
    except OSError as error:
        return refuse(f"{options.out}: cannot be written: {error.strerror}", 1)
    print(f"{options.out}: {summary(report)}")
    return 0


def run_explain(options: argparse.Namespace) -> int:
    from gateway.explain import explain
    from gateway.store import StoreError, read

    paths: Sequence[Path] = sorted(options.trace.rglob("*.log")) if options.trace.is_dir() else [options.trace]
    if not paths:
        return refuse(f"no trace below {options.trace}", 2)
    try:
        print("\n\n".join(explain(read(path)) for path in paths))
    except StoreError as reason:
        return refuse(str(reason), 1)
    return 0


def refuse(reason: str, code: int) -> int:
    print(f"gateway: {reason}", file=sys.stderr)
    return code
