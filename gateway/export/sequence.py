"""`sequence/1`, the neutral row: one JSON object a line, as TOKEN_TRACES section 14 has it. Holds everything."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.export.shapes import Group
from gateway.record import Doc

NULL_REWARDS = WEIGHTS = True
ADVANTAGES = False


def convert(group: Group) -> Iterator[Doc]:
    yield from (row for _, row in group.rows)
