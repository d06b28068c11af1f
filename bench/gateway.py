#!/usr/bin/env python3
"""What the gateway costs: calls beside a pass-through and LiteLLM's proxy (bench/serving.py), then traces.

    python3 bench/gateway.py [--calls N] [--litellm PATH-OF-ITS-PROGRAM] [--size CALLS:TOKENS ...] [--folder DIR]

Traces are of one long conversation, without server and network. For each size (default 300 calls up to 92,000 tokens of
context, 1,000 up to 100,000): the store's time per call, p50 and p95 in ms, once with the disk of --folder and once in
memory (/dev/shm), where only Python's part is left; bytes per call in the log, beside what the calls would take whole;
seconds to read the log, to build the graph, to reopen the log, to make the rows, and to explain a trace in which every
tenth call broke off. Memory is the process's peak.
"""

from __future__ import annotations

import argparse
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).parents[1])  # not this folder, where `gateway` would be this file

from bench import serving  # noqa: E402
from gateway.breaks import explain_breaks  # noqa: E402
from gateway.graph import build  # noqa: E402
from gateway.record import CallRecord, Delta, dump  # noqa: E402
from gateway.sequences import sequences  # noqa: E402
from gateway.store import Store, read  # noqa: E402

VOCABULARY = 150_000
CHARACTERS_PER_TOKEN = 4
SAMPLED_SHARE = 3  # one new token in three is sampled


def conversation(calls: int, tokens: int, broken: int = 0) -> Iterator[CallRecord]:
    """One chain that grows evenly; with `broken`, every so many calls the history comes back changed."""
    chance, step = random.Random(0), tokens // calls
    ids: list[int] = []
    messages: list[dict[str, Any]] = []
    for number in range(calls):
        if broken and number % broken == broken - 1:
            ids[len(ids) // 2] += 1
            messages[len(messages) // 2] = {"role": "user", "content": f"changed {number}"}
        sampled = [chance.randrange(VOCABULARY) for _ in range(step // SAMPLED_SHARE)]
        ids = [*ids, *(chance.randrange(VOCABULARY) for _ in range(step - len(sampled)))]
        text = chance.randbytes(step * CHARACTERS_PER_TOKEN // 2).hex()
        messages = [*messages, {"role": "user", "content": text}]
        reply = {"role": "assistant", "content": f"reply {number}"}
        yield CallRecord(
            "bench",
            1,
            f"call-{number}",
            number,
            messages=Delta(messages),
            level="tokens",
            prompt_ids=Delta(ids),
            sampled_ids=sampled,
            logprobs=[-chance.random() for _ in sampled],
            message=reply,
            t_terminal=float(number),
        )
        ids, messages = [*ids, *sampled], [*messages, reply]


def write(folder: Path, records: Iterator[CallRecord]) -> tuple[Path, list[float], float]:
    """The log, ms per call, and the mean bytes of a call written whole (every 20th is measured)."""
    log, times, whole = Store(folder).open("bench"), [], []
    for record in records:
        started = time.perf_counter()
        log.reply(record)
        log.delivered(record.call_id, record.t_terminal)
        times.append((time.perf_counter() - started) * 1000)
        if record.seq % 20 == 0:
            whole.append(len(dump(record.as_json())))
    log.close()
    return log.path, times, statistics.mean(whole)


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    started = time.perf_counter()
    return work(), time.perf_counter() - started


def measure(calls: int, tokens: int, folder: Path) -> None:
    print(f"{calls:,} calls, {tokens:,} tokens of context")
    for name, parent in (("disk", folder), ("memory", Path("/dev/shm"))):
        with tempfile.TemporaryDirectory(dir=parent) as scratch:
            path, times, whole = write(Path(scratch), conversation(calls, tokens))
            p50, p95 = statistics.median(times), statistics.quantiles(times, n=20)[-1]
            print(f"  store, {name}: p50 {p50:.1f} ms, p95 {p95:.1f} ms per call")
            if name == "memory":
                size = path.stat().st_size / calls
                print(f"  log: {size:,.0f} bytes per call; whole it would be {whole:,.0f}: 1/{whole / size:.0f}")
                measure_reading(path)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as scratch:
        path, _, _ = write(Path(scratch), conversation(calls, tokens, broken=10))
        graph = build(replace(call, state="delivered") for call in read(path).calls.values())
        breaks, seconds = timed(lambda: explain_breaks(graph))
        print(f"  explain: {seconds:.2f} s for {len(breaks)} breaks")


def measure_reading(path: Path) -> None:
    trace, reading = timed(lambda: read(path))
    graph, building = timed(lambda: build(trace.calls.values()))
    rows, making = timed(lambda: sequences(graph, {}))
    log, reopening = timed(lambda: Store(path.parents[1]).open("bench"))
    log.close()
    assert len(graph.roots) == 1 and len(rows.rows) == 1 and rows.eligible_tokens > 0
    print(f"  read {reading:.2f} s, graph {building:.3f} s, rows {making:.2f} s, reopen {reopening:.2f} s")


def size(text: str) -> tuple[int, int]:
    calls, tokens = text.split(":")
    return int(calls), int(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=size, action="append", metavar="CALLS:TOKENS")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    serving.options(parser)
    options = parser.parse_args()
    serving.run(options.calls, options.litellm)
    print()
    for calls, tokens in options.size or [(300, 92_000), (1_000, 100_000)]:
        measure(calls, tokens, options.folder)
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")


if __name__ == "__main__":
    main()
