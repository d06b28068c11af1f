"""Strict JSON: no duplicate members, no NaN or Infinity, no number that becomes one, UTF-8 only.

A text that orjson writes exactly as it read it is strict: of two members of one name it keeps one, and NaN it refuses.
Most clients write as it does, and it is several times as quick. Every other text is looked at member by member.
"""

from __future__ import annotations

import json
import math
from typing import Any

import orjson


def loads(text: bytes) -> Any:
    """The value of `text`; ValueError when it is not strict JSON or nested beyond what Python reads."""
    try:
        value = orjson.loads(text)
        if as_written(value, text):
            return value
    except ValueError:
        pass  # it says less of what is wrong, and refuses lone surrogates
    try:
        return json.loads(text.decode(), object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def as_written(value: Any, text: bytes) -> bool:
    """Whether `text` is what orjson writes for `value`: every number in its shortest form, no space, no escape."""
    try:
        return orjson.dumps(value) == text
    except TypeError:  # nested deeper than it writes, a larger integer, a lone surrogate
        return False


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
