"""TRL, `rollout_func` of GRPOTrainer (1.16): one dict of lists a line, a line per group.

One row per copy of the prompt: a rollout of several sequences does not fit and is refused. `env_mask` keeps
what was not sampled out of the loss. Other keys go to the reward functions.
"""

from __future__ import annotations

from collections.abc import Iterator

from gateway.export.shapes import CannotExport, Group, identity, prompt_length, zero_filled
from gateway.record import Doc

NULL_REWARDS = WEIGHTS = ADVANTAGES = False


def convert(group: Group) -> Iterator[Doc]:
    lists: dict[str, list[object]] = {}
    for rollout in group.rollouts:
        if len(rollout.rows) != 1:
            raise CannotExport(
                f"rollout {rollout.id} has {len(rollout.rows)} sequences, this format takes one: use trl-async"
            )
        row = rollout.rows[0]
        members = {
            **tokens(row),
            "reward": rollout.reward,
            "advantage": rollout.advantage,
            **identity(row),
        }
        for name, member in members.items():
            lists.setdefault(name, []).append(member)
    if lists:
        yield lists


def tokens(row: Doc) -> Doc:
    """The members that hold the row's tokens."""
    start = prompt_length(row)
    return {
        "prompt_ids": row["input_ids"][:start],
        "completion_ids": row["input_ids"][start:],
        "logprobs": zero_filled(row)[start:],
        "env_mask": row["loss_mask"][start:],
    }
