"""ART, `Trajectory` (0.5): a sequence a line, as messages with the trained replies as choices.

Inexact, and marked so: ART renders the prompt again with its own template. The sampled ids ride in the choices
as `token_id:N`, which ART puts in place of the re-tokenized reply.

In JSON a choice is a dict, and ART takes any dict for a message: make `Choice(**part)` of those with a `message`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gateway.export.shapes import Group, Rollout, identity
from gateway.record import Doc

NULL_REWARDS = WEIGHTS = ADVANTAGES = False


def convert(group: Group) -> Iterator[Doc]:
    for rollout, row in group.rows:
        leaf = row["calls"][-1]["call_id"]
        advantage = {} if rollout.advantage is None else {"advantage": rollout.advantage}
        yield {
            "messages_and_choices": messages_and_choices(rollout, row, leaf),
            "tools": rollout.graph.tools(leaf) or None,
            "reward": rollout.reward,
            "metrics": advantage,
            "metadata": {**identity(row), "exact": False},
        }


def messages_and_choices(rollout: Rollout, row: Doc, leaf: str) -> list[Any]:
    graph = rollout.graph
    found: list[Any] = [*graph.messages(leaf), graph.calls[leaf].record.message]
    for call in row["calls"]:
        if any(row["loss_mask"][call["start"] : call["end"]]):
            found[len(graph.messages(call["call_id"]))] = choice(rollout, row, call)
    return [message for message in found if message is not None]


def choice(rollout: Rollout, row: Doc, call: Doc) -> Doc:
    span = slice(call["start"], call["end"])
    pairs = zip(row["input_ids"][span], row["logprobs"][span], strict=True)
    tokens = [{"token": f"token_id:{id}", "logprob": value, "bytes": None, "top_logprobs": []} for id, value in pairs]
    message = rollout.graph.calls[call["call_id"]].record.message
    return {
        "index": 0,
        "finish_reason": call["finish_reason"] or "stop",
        "logprobs": {"content": tokens, "refusal": None},
        "message": message or {"role": "assistant", "content": ""},
    }
