"""Progress on stderr while a run goes on: a live line on a terminal, else a plain line per attempt."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Any

from report.record import plain, say
from report.statistics import mean

if TYPE_CHECKING:
    from report.record import Book, Result
    from rl_eval import Pace

WAIT_LINE_SECONDS = 10.0  # between two plain lines that say what is waited for


class Progress:
    """`planned` rollouts are to run; `book` holds what is known, `pace` how many are in flight. A context manager."""

    def __init__(self, planned: int, pace: Pace, book: Book, quiet: bool) -> None:
        self.planned, self.pace, self.book, self.quiet = planned, pace, book, quiet
        self.done_count, self.errors = 0, 0
        self.waits_for, self.waits_until = "", 0.0
        self.rewards: list[float] = []
        self.began, self.next_wait_line = time.monotonic(), 0.0
        self.live: Any = None

    def __enter__(self) -> Progress:
        if not self.quiet and sys.stderr.isatty():
            self.live = make_live(self.line)
            self.live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self.live is not None:
            with contextlib.suppress(OSError, ValueError):
                self.live.stop()

    def done(self, result: Result, again: bool) -> None:
        """An attempt ended; `again`: another one follows."""
        if not again:
            self.done_count += 1
            self.errors += result.reward is None
            self.rewards += [] if result.reward is None else [result.reward]
        if self.live is None and not self.quiet:
            say(plain(self.attempt_line(result, again)))

    def waiting(self, reason: str, seconds: float) -> None:
        """A rollout waits for so long: the deployment has no room, or is in trouble, or its turn has not come."""
        now = time.monotonic()
        self.waits_for, self.waits_until = reason, max(self.waits_until, now + seconds)
        if self.live is None and not self.quiet and now >= self.next_wait_line:
            self.next_wait_line = now + WAIT_LINE_SECONDS
            say(plain(f"rl_eval: waiting: {reason}; {self.pace.inside} of {int(self.pace.allowed)} in flight"))

    def attempt_line(self, result: Result, again: bool) -> str:
        name = f"{result.task} · {result.harness} · {result.model} · #{result.sample}: {result.status}"
        reward = (
            "null" if result.reward is None else f"{result.reward:.3g}" if result.reward % 1 else str(result.reward)
        )
        tail = f" · {result.error}" if result.error else ""
        tail += f" · attempt {result.attempt}, another follows" if again else ""
        return f"[{self.done_count}/{self.planned}] {name}, reward {reward}, {result.duration_s:.1f} s{tail}"

    def line(self) -> str:
        """One line of what there is: how far, how well, how long yet."""
        parts = [f"{self.done_count}/{self.planned} done", f"{self.pace.inside} running"]
        parts += [f"{self.errors} errors"] if self.errors else []
        if self.rewards:
            parts.append(f"mean {mean(self.rewards):.3f}")
        if tokens := self.book.tokens:
            parts.append(f"{tokens:,} tokens")
        if self.done_count:
            seconds = (time.monotonic() - self.began) / self.done_count * (self.planned - self.done_count)
            parts.append(f"{duration(seconds)} left")
        if time.monotonic() < self.waits_until:
            parts.append(f"waiting: {plain(self.waits_for, 60)}")
        return " · ".join(parts)


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def make_live(line: Any) -> Any:
    """rich's live display; imported here, as only a terminal needs it."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(stderr=True)
    return Live(console=console, get_renderable=lambda: Text(line(), overflow="ellipsis", no_wrap=True), transient=True)
