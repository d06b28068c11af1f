"""A toy learning run on the CPU: GRPO through a real harness, the gateway and rl_eval.py's grading.

    python3 tests/learning.py [STEPS]      prints the mean reward of each step, draws docs/learning.png

A step is what a trainer does: a sweep of SAMPLES rollouts of one task by the harness `pi`, `gateway export`, one
gradient step on the rows, the new weights into the engine while the gateway holds calls back. The task: the policy
samples one token, the agent runs `choose.py` with it, and of the four choices that it may come to one is right. So an
untrained model earns a quarter of the rewards, and nothing but the sampled token decides.

Before each update the rows are scored again with the weights that sampled them: a wrong mask, shift or
temperature shows there first.

Not here: a trainer. The loss is GRPO's with one gradient step per batch, each rollout counted once.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import vl_convert
from engine import Doc
from policy import Policy, differences, policy, save, write_task
from recorded import ROOT
from torch_engine import VOCABULARY, random_model, scores, tokenizer
from transformers import Qwen3ForCausalLM

CHOICES = 4
RIGHT = 2
SAMPLES = 8
STEPS = 14
RATE = 1e-2
SPREAD = 0.1
CLIP = 0.2
INSTRUCTION = "Choose."
CHOOSE = f"""\
import json, pathlib, sys

pathlib.Path("outputs").mkdir(exist_ok=True)
choice = sum(bytes.fromhex(sys.argv[1])) % {CHOICES}
pathlib.Path("outputs/answer.json").write_text(json.dumps({{"choice": choice}}))
"""


@dataclass
class Step:
    reward: float
    """Mean over the group."""
    expected: float
    """What the policy would earn on average: the probability of all tokens that lead to the right choice."""
    worst: float
    """The largest |log π_train - log π_rollout| before the update."""

    def told(self) -> str:
        return f"mean reward {self.reward:.3f}, expected {self.expected:.3f}, worst difference {self.worst:.1e}"


def learn(folder: Path, steps: int = STEPS) -> list[Step]:
    write_task(folder, "choose", INSTRUCTION, {"choice": RIGHT}, choose=CHOOSE)
    model = random_model(0, SPREAD)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    done = []
    with policy(folder, model) as running:
        running.steer([{"sample": 1}, {"pick": "python3 choose.py '{hex}'"}], [{"sample": 1}])
        for number in range(steps):
            done.append(step(running, model, optimizer, number))
            print(f"step {number}: {done[-1].told()}", flush=True)
    return done


def step(running: Policy, model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, number: int) -> Step:
    name = f"step-{number}"
    lines = running.sweep(name, "--harness", "pi", "--samples", str(SAMPLES))
    rewards = [line["reward"] for line in lines]
    rows = running.export(name)
    assert {version for row in rows for _, _, version in row["versions"]} == {str(number)}
    expected = expectation(model, rows[0])
    worst = max(float(differences({str(number): model}, row).max()) for row in rows)
    update(model, optimizer, rows)
    running.swap(save(model, running.folder / f"{number + 1}.pt"), str(number + 1))
    return Step(sum(rewards) / len(rewards), expected, worst)


def expectation(model: Qwen3ForCausalLM, row: Doc) -> float:
    """By the distribution at the end of the prompt, which all rollouts share, and the rule of choose.py."""
    texts = [tokenizer().decode([number], skip_special_tokens=False) for number in range(VOCABULARY)]
    right = torch.tensor([sum(text.encode()) % CHOICES == RIGHT for text in texts])
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([row["input_ids"][: row["calls"][0]["start"]]])).logits[0, -1]
    return float(logits.softmax(-1)[right].sum())


def update(model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, rows: list[Doc]) -> None:
    """One step of the clipped objective; a rollout counts once, however many rows and tokens it has."""
    optimizer.zero_grad()
    sizes: Counter[str] = Counter()
    for row in rows:
        sizes[row["rollout_id"]] += sum(row["weights"])
    for row in rows:
        if row["advantage"]:
            (loss(model, row) / sizes[row["rollout_id"]] / len(sizes)).backward()
    optimizer.step()


def loss(model: Qwen3ForCausalLM, row: Doc) -> torch.Tensor:
    places = [at for at, mask in enumerate(row["loss_mask"]) if mask]
    recorded = torch.tensor([row["logprobs"][at] for at in places])
    weights = torch.tensor([float(row["weights"][at]) for at in places])
    ratio = (scores(model, row["input_ids"], places, [1.0] * len(places)) - recorded).exp()
    gain = torch.min(ratio * row["advantage"], ratio.clamp(1 - CLIP, 1 + CLIP) * row["advantage"])
    return -(gain * weights).sum()


def draw(steps: list[Step], file: Path) -> None:
    """Both curves, with chance as a dashed line."""
    kinds = {"earned": "reward", "expected": "expected"}
    values = [
        {"step": at, "what": what, "value": getattr(one, name)}
        for at, one in enumerate(steps)
        for what, name in kinds.items()
    ]
    axes = {
        "x": {"field": "step", "type": "quantitative", "axis": {"tickMinStep": 1}},
        "y": {"field": "value", "type": "quantitative", "title": "mean reward", "scale": {"domain": [0, 1]}},
        "color": {"field": "what", "type": "nominal", "title": None},
    }
    curves = {"mark": {"type": "line", "point": True}, "data": {"values": values}, "encoding": axes}
    chance = {"mark": {"type": "rule", "strokeDash": [4, 4]}, "encoding": {"y": {"datum": steps[0].expected}}}
    title = f"GRPO, harness pi, {SAMPLES} rollouts a step; dashed: the untrained policy"
    file.parent.mkdir(exist_ok=True)
    figure = {"width": 480, "height": 200, "title": title, "layer": [curves, chance]}
    file.write_bytes(vl_convert.vegalite_to_png(figure, scale=1.5))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        draw(learn(Path(made), *map(int, sys.argv[1:2])), ROOT / "docs" / "learning.png")
