"""Sequences: the trainable rows of one attempt, schema `sequence/1`. Pure.

A sequence is the P + S of a leaf. Each sampled token of an eligible call is trained exactly once,
however many sequences share it: with ownership `first` it has weight 1 in the sequence whose leaf
committed first and 0 elsewhere, with `split` the weight 1/occurrences in each. The sum is checked.

Eligible is a call with a trainable role (agent, subagent; accepted compactions when asked for) from an
engine that reports ids and log probabilities, with nothing fatal found in its arrays and no constraint
on its sampling. Calls with other roles are no leaves; on the way to a leaf they are context, as is an
eligible role's call whose log probabilities are unusable.

Per-token lists are as long as `input_ids` and aligned to the token, not to its predictor; spans are
half-open. `calls` names every call on the path and where its S lies, trained here or not.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gateway.graph import Graph, GraphCall, commit
from gateway.record import Doc

SCHEMA = "sequence/1"
TRAINABLE_ROLES = ("agent", "subagent")
Ownership = Literal["first", "split"]


class AccountingError(Exception):
    """Some sampled token would be trained not at all or more than once: nothing may be exported."""


@dataclass
class Sequences:
    rows: list[Doc]
    """`sequence/1` objects, those of one attempt, by leaf commit."""
    eligible_tokens: int
    dropped: int
    """Sequences without any weight."""
    masked: Counter[str] = field(default_factory=Counter)
    """Why sampled tokens are not trained: number of tokens by reason."""


def sequences(
    graph: Graph, identity: Mapping[str, Any], ownership: Ownership = "first", compactions: bool = False
) -> Sequences:
    """The rows of an attempt. `identity`: the members of a row that say whose it is (snapshot, group_id, task, ...)."""
    verdicts = {call_id: ineligible(call, compactions) for call_id, call in graph.calls.items()}
    leaves = find_leaves(graph, compactions)
    paths = [graph.path(leaf) for leaf in leaves]
    shares = assign(paths, verdicts, ownership)
    rows = [row(graph, path, share, verdicts) for path, share in zip(paths, shares, strict=True)]
    kept = [one for one, share in zip(rows, shares, strict=True) if any(share.values())]
    for index, one in enumerate(kept):
        one |= {**identity, "index": index, "count": len(kept)}
    found = Sequences(kept, 0, len(rows) - len(kept))
    for call_id, why in verdicts.items():
        size = graph.calls[call_id].end - graph.calls[call_id].start
        found.masked.update({why: size} if why else {})
        found.eligible_tokens += 0 if why else size
    check_accounts(found)
    return found


def ineligible(call: GraphCall, compactions: bool) -> str | None:
    """Why the call's tokens are not trained; None if they are."""
    record = call.record
    if not has_trainable_role(call, compactions):
        return f"role {call.role}"
    if record.fatal is not None:
        return record.fatal
    if any(finding["code"] == "constrained_sampling" for finding in record.findings):
        return "constrained_sampling"
    return None if record.level == "tokens" else f"level {record.level}"


def has_trainable_role(call: GraphCall, compactions: bool) -> bool:
    return call.role in TRAINABLE_ROLES or (compactions and call.role == "compaction" and call.accepted is True)


def find_leaves(graph: Graph, compactions: bool) -> list[str]:
    """The calls with a trainable role that no such call comes after, in the order of their commits."""
    inner: set[str] = set()
    trainable = [call_id for call_id, call in graph.calls.items() if has_trainable_role(call, compactions)]
    for call_id in trainable:
        parent = graph.calls[call_id].parent
        while parent is not None and parent not in inner:
            inner.add(parent)
            parent = graph.calls[parent].parent
    return sorted((one for one in trainable if one not in inner), key=lambda one: commit(graph.calls[one].record))


def assign(
    paths: Sequence[Sequence[str]], verdicts: Mapping[str, str | None], ownership: Ownership
) -> list[dict[str, float]]:
    """The weight of each eligible call in each sequence."""
    occurrences = Counter(call_id for path in paths for call_id in path)
    owned: set[str] = set()
    shares = []
    for path in paths:
        mine = [call_id for call_id in path if verdicts[call_id] is None]
        if ownership == "split":
            shares.append({call_id: 1 / occurrences[call_id] for call_id in mine})
        else:
            shares.append({call_id: 0.0 if call_id in owned else 1.0 for call_id in mine})
            owned.update(mine)
    return shares


def row(graph: Graph, path: Sequence[str], share: Mapping[str, float], verdicts: Mapping[str, str | None]) -> Doc:
    ids = graph.ids(path[-1])
    weights: list[float] = [0] * len(ids)
    logprobs: list[float | None] = [None] * len(ids)
    calls = [graph.calls[call_id] for call_id in path]
    for call in calls:
        values = call.record.logprobs
        if values is not None and len(values) == call.end - call.start:
            logprobs[call.start : call.end] = values
        weight = share.get(call.record.call_id, 0.0)
        weights[call.start : call.end] = [int(weight) if weight in (0, 1) else weight] * (call.end - call.start)
    trained = [call for call in calls if share.get(call.record.call_id)]
    return {
        "schema": SCHEMA,
        "role": (trained or calls)[-1].role,
        "input_ids": ids,
        "loss_mask": [int(weight > 0) for weight in weights],
        "logprobs": logprobs,
        "weights": weights,
        "calls": [call_entry(call) for call in calls],
        "versions": [span for call in calls for span in versions(call)],
        "versions_exact": all(call.record.version_exact for call in trained),
        "temperatures": [span for call in calls for span in temperature(call)],
        "reward": None,
        "advantage": None,
        "truncated": any(call.record.finish_reason == "length" for call in calls),
        "continues": continued(graph, path[0]),
        "findings": [finding for call in calls for finding in described(call, verdicts)],
    }


def call_entry(call: GraphCall) -> Doc:
    record = call.record
    where = {"call_id": record.call_id, "start": call.start, "end": call.end}
    return {**where, "finish_reason": record.finish_reason, "reward": None}


def versions(call: GraphCall) -> list[list[Any]]:
    segments = call.record.version_segments
    return [[call.start + one["start"], call.start + one["end"], one["version"]] for one in segments]


def temperature(call: GraphCall) -> list[list[Any]]:
    value = call.record.sampling_applied.get("temperature")
    return [] if value is None else [[call.start, call.end, value]]


def continued(graph: Graph, root: str) -> Doc | None:
    found = (edge for edge in graph.continues if edge.root == root)
    return next(({"via": edge.via, "leaf": edge.leaf, "evidence": edge.evidence} for edge in found), None)


def described(call: GraphCall, verdicts: Mapping[str, str | None]) -> Iterable[Doc]:
    """The call's findings, and why it is context only, each with the call's id."""
    for finding in call.findings:
        yield {"call_id": call.record.call_id, **finding}
    why = verdicts[call.record.call_id]
    if why and why not in [finding["code"] for finding in call.findings]:
        yield {"call_id": call.record.call_id, "level": "warn", "code": "not_trained", "detail": why}


def check_accounts(found: Sequences) -> None:
    total = math.fsum(weight for one in found.rows for weight in one["weights"])
    if not math.isclose(total, found.eligible_tokens, rel_tol=1e-9, abs_tol=1e-6):
        raise AccountingError(f"the weights sum to {total}, but {found.eligible_tokens} sampled tokens are eligible")


def cut(one: Doc, length: int) -> Doc:
    """The row up to the last call that ends within `length` ids, flagged; the row itself if it fits."""
    if len(one["input_ids"]) <= length:
        return one
    calls = [call for call in one["calls"] if call["end"] <= length]
    end = calls[-1]["end"] if calls else 0
    lists = {name: one[name][:end] for name in ("input_ids", "loss_mask", "logprobs", "weights")}
    spans = {name: [span for span in one[name] if span[1] <= end] for name in ("versions", "temperatures")}
    lost = sum(one["loss_mask"][end:])
    finding = {"level": "warn", "code": "truncated", "detail": f"cut to {end} ids: {lost} trained tokens left out"}
    return {**one, **lists, **spans, "calls": calls, "truncated": True, "findings": [*one["findings"], finding]}
