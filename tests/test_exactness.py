"""Exactness on real logits: what the gateway recorded is what the weights say, token by token.

Rows recorded through the gateway from a real model (torch_engine.py) are scored again from their ids alone, in one
forward pass without a cache, by the same weights. The largest difference of a trained token's log probability must
stay under BOUND; masks, shifts, temperatures and versions that are off by anything exceed it, which the controls show.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install -r .ci/requirements-torch.txt")
pytest.importorskip("transformers", reason="transformers is not installed: pip install -r .ci/requirements-torch.txt")

from engine import Doc
from policy import BOUND, Models, Policy, differences, policy, save, write_task
from recorded import body
from torch_engine import random_model

HEAT = 0.7
ANSWER = """mkdir -p outputs; printf '{"x": 1}' > outputs/answer.json"""
WORDS = "The weights of a model may change while it writes, and then each token has its own. " * 2


@pytest.fixture(scope="module")
def models() -> Models:
    return {"0": random_model(0), "1": random_model(1)}


@pytest.fixture(scope="module")
def running(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Policy]:
    with policy(tmp_path_factory.mktemp("policy"), models["0"], "--temperature", str(HEAT)) as made:
        yield made


def talk(running: Policy, rollout: str, *turns: str) -> None:
    """A conversation by chat completions: the user's turns, with the assistant's replies between them."""
    messages: list[Doc] = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        reply = running.gateway.post("chat", body("chat", tools=True, messages=messages), rollout)
        assert reply.status_code == 200, reply.text
        messages.append({"role": "assistant", "content": reply.json()["choices"][0]["message"]["content"]})


def worst(models: Models, rows: list[Doc], shift: int = 0, raw: bool = False) -> float:
    return max(float(differences(models, row, shift, raw).max()) for row in rows)


def test_after_a_fork(running: Policy, models: Models) -> None:
    running.steer([{"text": "One answer for all."}, {"end": True}], [{"sample": 24}])
    talk(running, "fork", "Begin.", "Go left.")
    for turn in ("Go left.", "Go right."):  # the history as it was sampled, then another sample of the same prompt
        history: list[Doc] = [{"role": "user", "content": "Begin."}]
        history += [{"role": "assistant", "content": "One answer for all."}, {"role": "user", "content": turn}]
        running.gateway.post("chat", body("chat", tools=True, messages=history), "fork").raise_for_status()
    rows = running.export_rollouts("fork")
    first = Counter(row["calls"][0]["call_id"] for row in rows)
    assert len(rows) == 3 and len(first) == 1  # one root, three leaves
    assert [row["loss_mask"][row["calls"][0]["start"]] for row in rows] == [1, 0, 0]
    assert worst(models, rows) < BOUND
    assert worst(models, rows, shift=1) > BOUND and worst(models, rows, raw=True) > BOUND


def test_where_text_encodes_to_other_ids(running: Policy, models: Models) -> None:
    """A random model's text never comes back as the ids it sampled: the prompt breaks, and both parts stay exact."""
    running.steer([{"sample": 48}])
    talk(running, "drift", "Begin.", "Go on.")
    rows = running.export_rollouts("drift")
    assert len(rows) == 2 and worst(models, rows) < BOUND


def test_across_a_swap_in_mid_call(
    running: Policy, models: Models, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(lambda: running.swap(running.folder / "0.pt", "0"))
    running.steer([{"text": WORDS}, {"sample": 16}])
    file = str(save(models["1"], tmp_path / "1.pt"))
    running.control("/weights", {"file": file, "version": "1", "after_tokens": 12})
    talk(running, "swap", "Begin.")
    (row,) = running.export_rollouts("swap")
    (begin, middle, old), (again, end, new) = row["versions"]
    assert (old, new, middle - begin, again) == ("0", "1", 12, middle) and end == len(row["input_ids"])
    assert row["versions_exact"] and worst(models, [row]) < BOUND
    claimed = {**row, "versions": [[begin, end, "0"]]}
    assert worst(models, [claimed]) > BOUND  # a single version for the call would be false


def test_across_a_swap_between_calls(
    running: Policy, models: Models, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(lambda: running.swap(running.folder / "0.pt", "0"))
    running.steer([{"text": "One answer for all."}, {"end": True}], [{"sample": 24}])
    talk(running, "between", "Begin.")
    running.swap(save(models["1"], tmp_path / "1.pt"), "1")
    history = [{"role": "user", "content": "Begin."}, {"role": "assistant", "content": "One answer for all."}]
    history += [{"role": "user", "content": "Go on."}]
    running.gateway.post("chat", body("chat", tools=True, messages=history), "between").raise_for_status()
    (row,) = running.export_rollouts("between")
    assert [version for _, _, version in row["versions"]] == ["0", "1"]
    assert worst(models, [row]) < BOUND
    swapped = {**row, "versions": [[start, end, "0"] for start, end, _ in row["versions"]]}
    assert worst(models, [swapped]) > BOUND


@pytest.mark.slow
@pytest.mark.parametrize(("temperature", "samples"), [(HEAT, 8), (1.0, 2)])
def test_groups_of_real_harnesses(models: Models, tmp_path: Path, temperature: float, samples: int) -> None:
    """The command of the README, `--samples 8`: every group's exported rows are exact."""
    write_task(tmp_path, "one", "Write the answer.", {"x": 1})
    with policy(tmp_path, models["0"], "--temperature", str(temperature)) as running:
        running.steer([{"sample": 12}, {"shell": ANSWER}, {"end": True}], [{"sample": 16}, {"end": True}])
        chosen = ("--harness", "codex", "--harness", "claude_sdk", "--samples", str(samples))
        lines = running.sweep("run", *chosen)
        rows = running.export("run")
    # A reply ends where the policy samples its end, which may be before the forced call.
    assert {line["reward"] for line in lines} <= {0.0, 1.0} and sum(line["reward"] for line in lines) > samples
    groups = Counter(group for group, _ in {(row["group_id"], row["rollout_id"]) for row in rows})
    assert list(groups.values()) == [samples, samples]
    found = [float(differences(models, row).max()) for row in rows]
    print(f"\n{len(rows)} rows, {sum(sum(row['loss_mask']) for row in rows)} tokens, worst {max(found):.1e}")
    assert max(found) < BOUND
    assert worst(models, rows[:1], shift=1) > BOUND
    assert (worst(models, rows[:1], raw=True) > BOUND) == (temperature != 1.0)
