"""TRL, AsyncGRPO (1.16, experimental): a rollout a line, its turns chain by chain.

Each chain is a list of `TurnRecord`s of its own: in a single list, turns of interleaved subagents would fork at
every switch. Read them with `fork_threshold_tokens=0`. A turn that another chain trains has a mask of zeros.
`model_version` is the oldest that sampled.
"""

from __future__ import annotations

from collections.abc import Iterator

from gateway.export.shapes import Group, identity, oldest_version, zero_filled
from gateway.record import Doc

NULL_REWARDS = WEIGHTS = False
ADVANTAGES = True


def convert(group: Group) -> Iterator[Doc]:
    for rollout in group.rollouts:
        names = identity(rollout.rows[0])
        yield {
            **{name: names[name] for name in names if name not in ("index", "count")},
            "group_id": group.number,
            "group": group.id,
            "reward": rollout.reward,
            "advantage": rollout.advantage,
            "model_version": oldest_version(rollout.rows),
            "chains": [turns(row) for row in rollout.rows],
        }


def turns(row: Doc) -> list[Doc]:
    logprobs = zero_filled(row)
    spans = [(call["start"], call["end"]) for call in row["calls"] if call["end"] > call["start"]]
    return [
        {
            "prompt_ids": row["input_ids"][:start],
            "output_ids": row["input_ids"][start:end],
            "output_log_probs": logprobs[start:end],
            "output_mask": row["loss_mask"][start:end],
        }
        for start, end in spans
    ]
