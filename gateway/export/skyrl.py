"""SkyRL, `GeneratorOutput` (0.3): one dict of lists a line, a line per group, for step-wise training.

The sequences of a rollout lie together under one trajectory id, the last of them with `is_last_step`; each
carries the rollout's reward.
"""

from __future__ import annotations

from collections.abc import Iterator

from gateway.export.shapes import Group, prompt_length, zero_filled
from gateway.record import Doc

NULL_REWARDS = WEIGHTS = ADVANTAGES = False


def convert(group: Group) -> Iterator[Doc]:
    rows = list(group.rows)
    if not rows:
        return
    starts = [prompt_length(row) for _, row in rows]
    placed = [(rollout, row, start) for (rollout, row), start in zip(rows, starts, strict=True)]
    yield {
        "prompt_token_ids": [row["input_ids"][:start] for _, row, start in placed],
        "response_ids": [row["input_ids"][start:] for _, row, start in placed],
        "rewards": [rollout.reward for rollout, _, _ in placed],
        "loss_masks": [row["loss_mask"][start:] for _, row, start in placed],
        "rollout_logprobs": [zero_filled(row)[start:] for _, row, start in placed],
        "stop_reasons": [row["calls"][-1]["finish_reason"] or "stop" for _, row, _ in placed],
        "rollout_metrics": None,
        "trajectory_ids": [{"instance_id": group.id, "repetition_id": row["sample"]} for _, row, _ in placed],
        "is_last_step": [row["index"] == row["count"] - 1 for _, row, _ in placed],
    }
