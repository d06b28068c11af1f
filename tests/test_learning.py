"""A real harness, the gateway and the grader carry enough to learn from: the toy run of learning.py."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install -r .ci/requirements-torch.txt")
pytest.importorskip("transformers", reason="transformers is not installed: pip install -r .ci/requirements-torch.txt")
pytest.importorskip(
    "vl_convert", reason="vl-convert-python is not installed: pip install -r .ci/requirements-torch.txt"
)

from clis import npm
from learning import draw, learn
from policy import BOUND


@pytest.mark.slow
def test_the_mean_reward_doubles(tmp_path: Path) -> None:
    npm("pi")
    steps = learn(tmp_path)
    chance, last = steps[0].expected, steps[-3:]
    assert 0.15 < chance < 0.35
    assert sum(step.reward for step in last) / len(last) >= 2 * chance and last[-1].expected >= 2 * chance
    assert max(step.worst for step in steps) < BOUND
    draw(steps, tmp_path / "learning.png")
    assert (tmp_path / "learning.png").read_bytes().startswith(b"\x89PNG")
