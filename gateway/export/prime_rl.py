"""prime-rl, `TrainingSample` (mid-2026): a sequence a line, members by name.

prime-rl encodes the struct by position: build it by name, `TrainingSample(**line)`, with the version you train
with. `rl_weights` is our `weights`, left out where it equals the mask.
"""

from __future__ import annotations

from collections.abc import Iterator

from gateway.export.shapes import Group, spread, zero_filled
from gateway.record import Doc

NULL_REWARDS = False
WEIGHTS = ADVANTAGES = True


def convert(group: Group) -> Iterator[Doc]:
    for rollout, row in group.rows:
        assert rollout.advantage is not None
        sample = {
            "token_ids": row["input_ids"],
            "mask": [bool(trained) for trained in row["loss_mask"]],
            "logprobs": zero_filled(row),
            "temperatures": temperatures(row),
            "env_name": row["task"],
            "advantages": spread(row, rollout.advantage),
        }
        yield sample | ({} if row["weights"] == row["loss_mask"] else {"rl_weights": row["weights"]})


def temperatures(row: Doc) -> list[float]:
    """One per token; 1.0, which changes nothing, where none was sampled."""
    found = [1.0] * len(row["input_ids"])
    for start, end, value in row["temperatures"]:
        found[start:end] = [float(value)] * (end - start)
    return found
