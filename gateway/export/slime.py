"""slime, `Sample.from_dict` (mid-2026): a sequence a line.

`loss_mask` and `rollout_log_probs` cover the response only. All sequences of a rollout have the same integer
`rollout_id`, or the loss would count a rollout that forks several times.
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
            "group_index": group.number,
            "index": rollout.number,
            "rollout_id": rollout.number,
            "prompt": "",
            "tokens": row["input_ids"],
            "response": "",
            "response_length": len(row["input_ids"]) - start,
            "label": None,
            "reward": rollout.reward,
            "loss_mask": row["loss_mask"][start:],
            "rollout_log_probs": zero_filled(row)[start:],
            "weight_versions": list(dict.fromkeys(str(span[2]) for span in row["versions"])),
            "status": "truncated" if row["truncated"] else "completed",
            "metadata": {**identity(row), "advantage": rollout.advantage},
        }
