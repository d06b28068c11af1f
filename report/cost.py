"""What a run cost at given prices. Every attempt counts; what is not known is said, and never taken for nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from core.budget import BadPrices, Price, load_prices
from report.record import Json, Refused, plain

if TYPE_CHECKING:
    from report.record import Result

COLUMN = "cost (US$)"


def read_prices(path: Path) -> dict[str, Price]:
    """Prices by model, in the format of Core's `--prices`. Raises Refused."""
    try:
        return load_prices(path)
    except BadPrices as error:
        raise Refused(str(error)) from None


def priced(usage: Json | None) -> Json | None:
    """A usage with all that a price needs; None where it does not tell. Tokens not told as cached are not cached."""
    if usage is None:
        return None
    details = usage.get("input_tokens_details")
    cached = details.get("cached_tokens") or 0 if isinstance(details, dict) else 0
    counts = usage.get("input_tokens"), usage.get("output_tokens"), cached
    if not all(type(count) is int for count in counts):
        return None
    return {"input_tokens": counts[0], "output_tokens": counts[1], "input_tokens_details": {"cached_tokens": cached}}


def add_costs(rows: list[Json], attempts: list[Result], prices: dict[str, Price]) -> list[str]:
    """Give each row its cost. Returns a line for each row whose cost is not, or not wholly, known."""
    notes = []
    for row in rows:
        who = f"{plain(row['harness'])} · {plain(row['model'])}"
        mine = [r for r in attempts if (r.harness, r.model) == (row["harness"], row["model"])]
        if (price := prices.get(row["model"])) is None:
            row[COLUMN] = None
            notes.append(f"{who}: no price for this model; there are: {plain(', '.join(sorted(prices)) or 'none')}")
            continue
        seen = [priced(r.usage) or priced(r.usage_observed) for r in mine]
        unknown = sum(priced(r.usage) is None for r in mine)
        known = [price.cents(usage) / 100 for usage in seen if usage is not None]
        row[COLUMN] = None if not known else f"{'at least ' if unknown else ''}{sum(known):.4f}"
        if unknown:
            notes.append(f"{who}: {unknown} of {len(mine)} attempts do not tell their usage: it is not in the cost")
    return notes
