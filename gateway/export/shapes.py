"""What the exporters are given, and what several of them do alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from gateway.graph import Graph
from gateway.record import Doc


class CannotExport(Exception):
    """One line: what is wrong with the data, and what to do."""


@dataclass
class Rollout:
    """A rollout with its trace: that of the attempt which settled it."""

    outcome: Doc
    """Its line in the run's file."""
    number: int
    """Its place among the rollouts of the run, from 0."""
    advantage: float | None
    graph: Graph
    rows: list[Doc]
    """`sequence/1`, complete."""

    @property
    def id(self) -> str:
        return str(self.outcome["rollout_id"])

    @property
    def reward(self) -> float:
        """Exporters whose target cannot hold a null are not given rollouts that have one."""
        return float(self.outcome["reward"])


@dataclass
class Group:
    """The samples of one task, harness and model, by sample."""

    id: str
    number: int
    """Its place among the groups of the run, from 0."""
    rollouts: list[Rollout] = field(default_factory=list)

    @property
    def rows(self) -> Iterator[tuple[Rollout, Doc]]:
        for rollout in self.rollouts:
            for row in rollout.rows:
                yield rollout, row


def prompt_length(row: Doc) -> int:
    """Ids before the first sampled one of the row."""
    return int(row["calls"][0]["start"]) if row["calls"] else len(row["input_ids"])


def zero_filled(row: Doc) -> list[float]:
    """The log probabilities for a target that cannot hold null: 0.0 where no token is trained."""
    pairs = zip(row["logprobs"], row["loss_mask"], strict=True)
    return [value if trained else 0.0 for value, trained in pairs]


def spread(row: Doc, value: float) -> list[float]:
    """`value` for every trained token, 0.0 elsewhere."""
    return [value if trained else 0.0 for trained in row["loss_mask"]]


def identity(row: Doc) -> Doc:
    """The members that say whose a row is, for the places where a target lets them travel along."""
    names = ("snapshot", "rollout_id", "attempt_id", "group_id", "task", "harness", "model", "sample", "index", "count")
    return {name: row[name] for name in names}


def oldest_version(rows: list[Doc]) -> int | str | None:
    """The first of the versions that sampled the rows' tokens, by number where all are numbers; of "a..b" it is a."""
    found = {str(span[2]).split("..")[0] for row in rows for span in row["versions"]}
    if all(version.isdecimal() for version in found):
        return min(map(int, found), default=None)
    return min(found)
