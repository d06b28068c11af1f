"""Tinker, `Datum` (0.38): a sequence a line, the only target whose arrays are shifted.

`model_input` is the ids without the last, `target_tokens` without the first; every per-token array loses its
first element, so that each value stands at its token's predictor.
"""

from __future__ import annotations

from collections.abc import Iterator

from gateway.export.shapes import Group, identity, spread, zero_filled
from gateway.record import Doc

NULL_REWARDS = WEIGHTS = False
ADVANTAGES = True


def convert(group: Group) -> Iterator[Doc]:
    for rollout, row in group.rows:
        assert rollout.advantage is not None
        yield {
            "model_input": row["input_ids"][:-1],
            "loss_fn_inputs": {
                "target_tokens": row["input_ids"][1:],
                "logprobs": zero_filled(row)[1:],
                "advantages": spread(row, rollout.advantage)[1:],
                "mask": [float(trained) for trained in row["loss_mask"][1:]],
            },
            "metadata": identity(row),
        }
