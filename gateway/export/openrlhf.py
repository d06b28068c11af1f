"""OpenRLHF, what an agent executor returns (0.11): a sequence a line.

`rollout_log_probs` is as long as `observation_tokens`: the consumer drops index 0 of it and of the mask itself.
`extra_logs` are numbers, since they become tensors; so who a row belongs to stands in `label`.
"""

from __future__ import annotations

from collections.abc import Iterator

from gateway.export.shapes import Group, identity, zero_filled
from gateway.record import Doc

NULL_REWARDS = WEIGHTS = ADVANTAGES = False


def convert(group: Group) -> Iterator[Doc]:
    for rollout, row in group.rows:
        advantage = {} if rollout.advantage is None else {"advantage": rollout.advantage}
        yield {
            "prompt": group.id,
            "label": identity(row),
            "observation_tokens": row["input_ids"],
            "action_ranges": [[call["start"], call["end"]] for call in row["calls"] if is_trained(row, call)],
            "rollout_log_probs": zero_filled(row),
            "reward": rollout.reward,
            "scores": rollout.reward,
            "truncated": row["truncated"],
            "extra_logs": {"rollout": rollout.number, "group": group.number, "turns": len(row["calls"]), **advantage},
        }


def is_trained(row: Doc, call: Doc) -> bool:
    return any(row["loss_mask"][call["start"] : call["end"]])
