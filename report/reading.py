"""Read a run's file for what is shown of it. The file is never altered; what is no record is said, not guessed.

Attempts go into the script's `Book`, without items and answers; a page reads those again, one record at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from report.record import Book, Json, Refused, plain, read_lines, say

LARGE = 1e15  # no reward, duration or count reaches it; beyond floats, sums would fail
NONE = type(None)
MEMBERS: dict[str, tuple[type, ...]] = {
    "reward": (int, float, NONE),
    "duration_s": (int, float),
    "error": (str, NONE),
    "usage": (dict, NONE),
    "usage_observed": (dict, NONE),
    "items": (list,),
    "options": (dict,),
    "task_digest": (str,),
    "started_at": (str,),
}


class Run:
    """What a file holds, and what was planned by the options it records."""

    def __init__(self, path: Path) -> None:
        """Raises Refused."""
        self.path, self.book = path, Book()
        for number, record in records(path):
            if record is None:
                say(plain(f"report: {path}, line {number} is no record of a rollout: left out"))
            else:
                self.book.add_record(record)
        if not self.book.attempts:
            raise Refused(f"{path} holds no rollout")

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Harness and model, sorted."""
        return sorted({(result.harness, result.model) for result in self.book.every})

    def planned(self, name: str) -> int:
        """`tasks` or `samples`, as the lines' options tell; 0 if they do not."""
        told = [result.options.get(name) for result in self.book.every]
        return max((value for value in told if type(value) is int), default=0)


def records(path: Path) -> Iterator[tuple[int, Json | None]]:
    """Yield line number and record, None for what is no record of a rollout. Raises Refused."""
    try:
        with path.open("rb") as file:
            for number, _, record in read_lines(file):
                yield number, (record if record is not None and is_sound(record) else None)
    except OSError as error:
        raise Refused(f"cannot read {path}: {error.strerror}") from None


def is_sound(record: Json) -> bool:
    """Whether the members that are computed with are what they must be; a bool is no number."""
    counted = [record.get(name) for name in ("reward", "duration_s", "usage", "usage_observed")]
    small = all(abs(number) < LARGE for value in counted for number in numbers(value))  # NaN is not
    return small and "self" not in record and all(type(record.get(name)) in kinds for name, kinds in MEMBERS.items())


def numbers(value: Any) -> Iterator[float]:
    """The numbers in a value, and in the objects in it."""
    if type(value) in (int, float):
        yield value
    elif isinstance(value, dict):
        for member in value.values():
            yield from numbers(member)
