"""Strict JSON: no duplicate members, no NaN or Infinity, no number that becomes one, UTF-8 only."""

from __future__ import annotations

import json
import math
from typing import Any


def loads(text: bytes) -> Any:
    """The value of `text`; ValueError when it is not strict JSON or nested beyond what Python reads."""
    try:
        return json.loads(text.decode(), object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"duplicate member {next(n for n in names if names.count(n) > 1)!r}")
    return members


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:40]} is out of range")
    return number


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
