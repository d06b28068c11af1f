"""The record of one call, schema `call/1`: what the wire said, what the engine said, and what became of it.

A call is three arrays: P, the engine's own prompt ids; S, the ids it sampled; L, one log probability
per id of S. This module says how they are held, checked and written; it obtains none of them.

Lists that grow with a conversation (P, messages, tools) are held as a `Delta`: the first `keep`
elements of an earlier call's list, then `tail`. Whoever makes a record gives them whole,
`Delta(tail=the_list)`; the store shortens them. For P the earlier list is that call's P + S.

A record is strict JSON: no NaN, no Infinity, lone surrogates escaped. A log probability that is not
finite is written as null, which `measured_findings` flags; it is never replaced by a number.

Labels (what the wire offered, evidence and not identity) have these members, null where the wire is
silent: `session`, `agent`, `parent` (the session or agent that spawned this one), `kind` (`agent`,
`subagent`, `compaction`, `auxiliary` or `foreign`), `retry_count`, `user_agent`.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal, TypedDict

SCHEMA = "call/1"
ID_BYTES = 4
"""A token id in memory: unsigned, of the machine's byte order."""
ID_CODE = next(code for code in "IL" if array(code).itemsize == ID_BYTES)
FILLER = -9999.0
"""What engines report for a token outside a mask: not a measurement."""

Doc = dict[str, Any]
State = Literal["reply", "delivered", "undelivered", "failed", "synthetic"]
Level = Literal["fatal", "warn", "info"]


class Finding(TypedDict):
    level: Level
    code: str
    detail: str


class VersionSegment(TypedDict):
    """Half-open over S. `version` names the engine's weights; two versions, "a..b", if it is not exact."""

    start: int
    end: int
    version: str


@dataclass(frozen=True)
class Delta:
    """A list: the first `keep` elements of that of `base_call`, then `tail`. Whole when there is no base."""

    tail: list[Any]
    base_call: str | None = None
    keep: int = 0

    @cached_property
    def packed(self) -> bytes | None:
        """The tail as `pack` gives it."""
        return pack(self.tail)

    def as_json(self) -> Doc:
        return {"base_call": self.base_call, "keep": self.keep, "tail": self.tail}

    @classmethod
    def from_json(cls, value: Any) -> Delta:
        if not isinstance(value, dict) or set(value) != {"base_call", "keep", "tail"}:
            raise ValueError("a delta has the members base_call, keep and tail")
        return cls(value["tail"], value["base_call"], value["keep"])


@dataclass(frozen=True)
class CallRecord:
    """One call. Times are monotonic seconds; ids and log probabilities are the engine's, or None."""

    rollout_id: str
    attempt_id: int
    """Counts from 1."""
    call_id: str
    """The gateway's own, unique in the attempt; never the harness's."""
    seq: int
    """Order of arrival in the attempt."""
    dialect: str = ""
    """`chat`, `responses`, `messages` or `google`."""
    path: str = ""
    body_digest: str = ""
    """SHA-256 of the parsed body with members sorted at every level, numbers as written."""
    labels: Mapping[str, Any] = field(default_factory=dict)
    messages: Delta = field(default_factory=lambda: Delta([]))
    """Chat-shaped, after conversion."""
    tools: Delta = field(default_factory=lambda: Delta([]))
    transforms: Sequence[Doc] = ()
    """Steps of the conversion: {kind, pointer, reason, before_sha256, after_sha256}."""
    sampling_requested: Mapping[str, Any] = field(default_factory=dict)
    sampling_applied: Mapping[str, Any] = field(default_factory=dict)
    engine: str = ""
    model: str = ""
    level: str = "text"
    """Capability of the engine: `tokens`, `logprobs` or `text`."""
    prompt_ids: Delta | None = None
    sampled_ids: Sequence[int] | None = None
    logprobs: Sequence[float | None] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    message: Mapping[str, Any] | None = None
    """The reply as the engine parsed it: derived data."""
    parse_ok: bool = True
    usage: Mapping[str, Any] = field(default_factory=dict)
    version_segments: Sequence[VersionSegment] = ()
    version_exact: bool = False
    t_arrival: float | None = None
    t_engine_start: float | None = None
    t_engine_end: float | None = None
    t_terminal: float | None = None
    state: State = "reply"
    evidence: str | None = None
    """What decided between delivered and undelivered: `terminal_event`, `extended_by CALL`, or why not."""
    resends: int = 0
    findings: Sequence[Finding] = ()

    def as_json(self) -> Doc:
        """The `call/1` object; strict JSON once it is dumped with `dump`."""
        members = dict(vars(self))
        for name in ("messages", "tools", "prompt_ids"):
            members[name] = members[name] and members[name].as_json()
        for name in ("transforms", "version_segments", "findings"):
            members[name] = list(members[name])
        members["logprobs"] = self.logprobs and list(map(finite, self.logprobs))
        return {"schema": SCHEMA, **members}

    @classmethod
    def from_json(cls, value: Any) -> CallRecord:
        """The record of a `call/1` object; ValueError when it is none."""
        if not isinstance(value, dict) or value.get("schema") != SCHEMA:
            raise ValueError(f"not a record of schema {SCHEMA}")
        members = {name: member for name, member in value.items() if name != "schema"}
        if odd := set(members) ^ MEMBERS:
            raise ValueError(f"members missing or unknown in a {SCHEMA} record: {', '.join(sorted(odd))}")
        for name in ("messages", "tools", "prompt_ids"):
            members[name] = members[name] and Delta.from_json(members[name])
        return cls(**members)

    def with_findings(self, found: Iterable[Finding]) -> CallRecord:
        """The record with those findings that it does not have yet."""
        known = {finding["code"] for finding in self.findings}
        new = [one for one in found if one["code"] not in known]
        return replace(self, findings=[*self.findings, *new]) if new else self

    @property
    def fatal(self) -> str | None:
        """The code that keeps this call's tokens out of training, if there is one."""
        found = [*self.findings, *measured_findings(self)]
        return next((finding["code"] for finding in found if finding["level"] == "fatal"), None)


def whole(calls: Mapping[str, CallRecord], call_id: str, name: str) -> list[Any]:
    """The `messages` or `tools` of a call, put together from the deltas that lead to it."""
    delta: Delta = getattr(calls[call_id], name)
    parts, wanted = [delta.tail], delta.keep
    while delta.base_call is not None:
        delta = getattr(calls[delta.base_call], name)
        parts.append(delta.tail[: max(wanted - delta.keep, 0)])
        wanted = min(wanted, delta.keep)
    return [element for part in reversed(parts) for element in part]


def stored_ids(calls: Mapping[str, CallRecord], call_id: str) -> list[int]:
    """P + S of a call, put together from the deltas that lead to it; empty where P is missing."""
    parts: list[Sequence[int]] = []
    following: str | None = call_id
    wanted: int | None = None
    while following is not None:
        call = calls[following]
        if call.prompt_ids is None:
            return []
        delta, own = call.prompt_ids, [*call.prompt_ids.tail, *(call.sampled_ids or ())]
        parts.append(own if wanted is None else own[: max(wanted - delta.keep, 0)])
        wanted = delta.keep if wanted is None else min(wanted, delta.keep)
        following = delta.base_call
    return [one for part in reversed(parts) for one in part]


MEMBERS = {one.name for one in fields(CallRecord)}
ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))
ATTEMPT = re.compile(r"(.+)~([1-9][0-9]{0,8})", re.DOTALL)


def attempt_of(path_id: str) -> tuple[str, int]:
    """(rollout_id, attempt_id) of the id in a URL: `<id>` is attempt 1, `<id>~2` the second."""
    match = ATTEMPT.fullmatch(path_id)
    return (match[1], int(match[2])) if match else (path_id, 1)


def measured_findings(record: CallRecord) -> list[Finding]:
    """What the arrays themselves show. Pure, and the same whoever asks: gateway, graph or a reader."""
    if record.state in ("failed", "synthetic"):
        return []
    found: list[Finding] = []

    def add(level: Level, code: str, detail: str) -> None:
        found.append({"level": level, "code": code, "detail": detail})

    if record.finish_reason == "length":
        add("info", "truncated", "the reply ended at its token limit")
    if record.prompt_ids is None:
        add("fatal", "no_prompt_ids", "the engine gave no prompt ids")
    sampled, logprobs = record.sampled_ids, record.logprobs
    if sampled is None or logprobs is None:
        add("fatal", "no_logprobs", "the engine gave no sampled ids or no log probabilities")
        return found
    if (record.prompt_ids and record.prompt_ids.packed is None) or pack(sampled) is None:
        add("fatal", "invalid_token_id", "a token id is not an integer between 0 and 2^32")
    if len(sampled) != len(logprobs):
        add("fatal", "logprob_misaligned", f"{len(logprobs)} log probabilities for {len(sampled)} tokens")
    known = [value for value in logprobs if value is not None]
    if len(known) < len(logprobs) or not all(map(math.isfinite, known)) or FILLER in known:
        add("fatal", "logprob_filler", "a log probability is missing, not finite, or a filler")
    if any(value > 0 for value in known):
        add("fatal", "positive_logprob", "a log probability is above 0")
    if not sampled:
        add("info", "nothing_trainable", "no token was sampled")
    elif not any(logprobs) and len(known) == len(logprobs):
        add("warn", "all_certain", "every log probability is 0")
    return found


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def pack(ids: Sequence[int]) -> bytes | None:
    """Token ids as bytes, ID_BYTES each; None when one is no integer in range."""
    try:
        return array(ID_CODE, ids).tobytes()
    except (OverflowError, TypeError):
        return None


def unpack(data: bytes) -> list[int]:
    ids: array[int] = array(ID_CODE)
    ids.frombytes(data)
    return ids.tolist()


def dump(value: Any) -> str:
    """Strict, compact JSON on one line, members in their order; ValueError for NaN and Infinity."""
    return ENCODER.encode(value)
