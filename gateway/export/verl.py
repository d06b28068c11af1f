"""verl, `AgentLoopOutput` (0.9): a sequence a line.

The prompt ends at the first sampled token. verl caps prompt and response at its configured lengths. Its group
baseline counts rows; where a rollout has several, use the advantage in `extra_fields`, which counts rollouts.
"""

from __future__ import annotations

from collections.abc import Iterator

from gateway.export.shapes import Group, identity, prompt_length, zero_filled
from gateway.record import Doc

NULL_REWARDS = WEIGHTS = ADVANTAGES = False


def convert(group: Group) -> Iterator[Doc]:
    for rollout, row in group.rows:
        start = prompt_length(row)
        yield {
            "prompt_ids": row["input_ids"][:start],
            "response_ids": row["input_ids"][start:],
            "response_mask": row["loss_mask"][start:],
            "response_logprobs": zero_filled(row)[start:],
            "reward_score": rollout.reward,
            "num_turns": len(row["calls"]),
            "metrics": {},
            "extra_fields": {**identity(row), "uid": group.id, "advantage": rollout.advantage},
        }
