"""Hard ceilings of a session: checked at the door before each call is forwarded (AGENTS_API 10.2).

A call already under way may overshoot. Tokens that a provider does not report are estimated from the bytes that passed,
so that silence does not buy a free call; such an estimate counts here and never becomes a usage.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BYTES_PER_TOKEN = 4
PER_MILLION = 1_000_000


@dataclass(frozen=True)
class Ceilings:
    """None: no ceiling. `max_turn_seconds` holds for each turn, the others for the session."""

    max_calls: int | None = None
    max_total_tokens: int | None = None
    max_turn_seconds: int | None = None
    spend_cents: int | None = None


@dataclass(frozen=True)
class Price:
    """US dollars per million tokens."""

    input: float
    cached: float
    output: float

    def cents(self, usage: dict[str, Any]) -> float:
        cached: int = usage["input_tokens_details"]["cached_tokens"]
        fresh: int = usage["input_tokens"] - cached
        output: int = usage["output_tokens"]
        dollars = fresh * self.input + cached * self.cached + output * self.output
        return dollars * 100 / PER_MILLION


class BadPrices(ValueError):
    """The price file cannot be used; the message is one line."""


def load_prices(path: Path | None) -> dict[str, Price]:
    """Prices by model: `{"model": {"input": 1.25, "cached": 0.125, "output": 10}}`. Raises BadPrices."""
    if path is None:
        return {}
    try:
        rows = json.loads(path.read_text())
        names = ("input", "cached", "output")
        return {model: Price(*(float(row[name]) for name in names)) for model, row in rows.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadPrices(f"cannot use the price file {path}: {error!r}") from None


@dataclass(frozen=True)
class Spent:
    """A ceiling that fired: words for people, the failure's reason, the ceiling's value."""

    message: str
    reason: str
    limit: int


@dataclass
class Budget:
    """What a session has used, and whether a ceiling has fired."""

    ceilings: Ceilings
    price: Price | None = None
    calls: int = 0
    tokens: int = 0
    cents: float = 0.0
    fired: Spent | None = None
    exhausted: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def spent(self) -> Spent:
        """The ceiling that fired; only when `exhausted` is set."""
        assert self.fired is not None
        return self.fired

    def check(self) -> Spent | None:
        """Why the next call may not be forwarded. It counts as a call if it may."""
        ceilings = self.ceilings
        used = (
            ("calls", "budget_calls", self.calls, ceilings.max_calls),
            ("tokens", "budget_tokens", self.tokens, ceilings.max_total_tokens),
            ("US cents", "budget_cost", self.cents, ceilings.spend_cents),
        )
        for unit, reason, count, limit in used:
            if limit is not None and count >= limit:
                return self.fire(f"The session's ceiling of {limit} {unit} is used up.", reason, limit)
        self.calls += 1
        return None

    def add(self, usage: dict[str, Any] | None, passed_bytes: int) -> None:
        """Counts a call that has ended; `passed_bytes` in both directions serve where usage is unknown."""
        self.tokens += usage["total_tokens"] if usage else -(-passed_bytes // BYTES_PER_TOKEN)
        if usage and self.price:
            self.cents += self.price.cents(usage)
        elif self.price:
            self.cents += passed_bytes / BYTES_PER_TOKEN * max(self.price.input, self.price.output) * 100 / PER_MILLION

    def fire(self, message: str, reason: str, limit: int) -> Spent:
        self.fired = Spent(message, reason, limit)
        self.exhausted.set()
        return self.fired
