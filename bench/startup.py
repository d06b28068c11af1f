#!/usr/bin/env python3
"""What `rl_eval.py --help` costs beside `python3 -c pass`, taken in turns in one run.

    python3 bench/startup.py [--runs N]

Prints the median wall time of both in ms and their ratio (DESIGN.md: at most 6 times).
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "rl_eval.py"
COMMANDS = {"rl_eval.py --help": [str(SCRIPT), "--help"], "python3 -c pass": ["-c", "pass"]}


def wall_ms(arguments: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
    return (time.perf_counter() - started) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=40, help="of each command (%(default)s)")
    runs = parser.parse_args().runs
    samples: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(runs):  # in turns, so that a busy moment of the machine hits both
        for name, arguments in COMMANDS.items():
            samples[name].append(wall_ms(arguments))
    medians = {name: statistics.median(times) for name, times in samples.items()}
    for name, median in medians.items():
        print(f"{name:20} {median:7.1f} ms (median of {runs})")
    helping, passing = medians.values()
    print(f"{'ratio':20} {helping / passing:7.1f} x  (budget 6 x)")


if __name__ == "__main__":
    main()
