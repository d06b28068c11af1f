"""Advantages: how much better a rollout did than its group. Pure.

One reward per rollout, however many sequences it became, so that a rollout that forks counts once.
A null reward is no measurement: it has no advantage and is in nobody's baseline. A rollout that is the
only measured one of its group has nothing to be compared with: 0.0.

- `grpo`: (r - mean) / (std + 1e-4), std of the sample (Bessel's correction), as TRL's GRPOTrainer has it:
  `nanstd` in trl/trainer/utils.py, `/ (std_rewards + 1e-4)` in trl/trainer/grpo_trainer.py (1.16). DeepSeekMath,
  https://arxiv.org/abs/2402.03300, leaves the kind of std open.
- `dr_grpo`: r - mean. https://arxiv.org/abs/2503.20783
- `rloo`: r - mean of the others = (r - mean) n / (n - 1). https://arxiv.org/abs/2402.14740
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

EPSILON = 1e-4

Kind = Callable[[Sequence[float]], list[float]]


def grpo(rewards: Sequence[float]) -> list[float]:
    apart = dr_grpo(rewards)
    std = math.sqrt(math.fsum(one * one for one in apart) / max(len(rewards) - 1, 1))
    return [one / (std + EPSILON) for one in apart]


def dr_grpo(rewards: Sequence[float]) -> list[float]:
    if is_flat(rewards):
        return [0.0] * len(rewards)  # and not what is left of rounding
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def rloo(rewards: Sequence[float]) -> list[float]:
    count = len(rewards)
    return [one * count / max(count - 1, 1) for one in dr_grpo(rewards)]


KINDS: Mapping[str, Kind] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}


def is_flat(rewards: Sequence[float]) -> bool:
    """No variance: nothing in the group can be learned from."""
    return len(set(rewards)) < 2


def advantages(rewards: Mapping[str, float | None], kind: str) -> dict[str, float | None]:
    """The advantage of each rollout of one group by its id; None where the reward is null."""
    scored = {rollout: reward for rollout, reward in rewards.items() if reward is not None}
    found = dict(zip(scored, KINDS[kind](list(scored.values())), strict=True)) if scored else {}
    return {rollout: found.get(rollout) for rollout in rewards}
