"""Whether two answers of an engine to one request agree, as far as two answers can: one unary, one streamed.

Engines sample otherwise the second time, also at temperature 0, when their arithmetic depends on what else they do. So
ids and texts are compared up to there, and what must agree in any case is what the streamed form gives at all.
"""

from __future__ import annotations

import json
from itertools import takewhile
from typing import Any

from gateway.engine import Answer
from gateway.record import CallRecord, Delta, measured_findings

VALUES = 0.05
"""Of log probabilities of the same token after the same ids: arithmetic in 16 bits varies by less."""


def faults(answer: Answer) -> list[str]:
    """What keeps an answer from being trained."""
    prompt_ids = None if answer.prompt_ids is None else Delta(answer.prompt_ids)
    record = CallRecord("", 1, "", 0, prompt_ids=prompt_ids, sampled_ids=answer.sampled_ids, logprobs=answer.logprobs)
    found = [*measured_findings(record), *answer.findings]
    return [finding["detail"] for finding in found if finding["level"] == "fatal"]


def difference(unary: Answer, streamed: Answer, counted: int | None) -> str | None:
    """What the streamed answer holds otherwise, as the end of a sentence; None when nothing is.

    `counted` are its tokens by the engine's own count: ids that are missing look like another sample.
    """
    new = [fault for fault in faults(streamed) if fault not in faults(unary)]
    if new:
        return f"is less than the unary one: {new[0]}"
    if unary.prompt_ids != streamed.prompt_ids:
        return "gives other prompt ids"
    ids, others = unary.sampled_ids or [], streamed.sampled_ids or []
    if others and counted not in (None, len(others)):
        return f"gives {len(others)} ids for {counted} tokens"
    same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(ids, others, strict=False))))
    if ids and not same:
        return "samples another first token at temperature 0, so that the two cannot be compared"
    if apart(unary, streamed, same):
        return "gives other log probabilities"
    if ids != others and said(unary) == said(streamed):
        return "gives other ids for the same message"
    return "gives another message" if ids == others and said(unary) != said(streamed) else None


def apart(unary: Answer, streamed: Answer, same: int) -> bool:
    pairs = zip((unary.logprobs or [])[:same], (streamed.logprobs or [])[:same], strict=False)
    return any(one is None or other is None or abs(one - other) > VALUES for one, other in pairs)


def said(answer: Answer) -> list[Any]:
    """What a message says, without the ids of its calls, which are new each time, and the spacing of arguments."""
    message = answer.message
    reasoning = message.get("reasoning") or message.get("reasoning_content") or ""
    functions = [called["function"] for called in message.get("tool_calls") or ()]
    return [message.get("content") or "", reasoning, *((one["name"], meant(one["arguments"])) for one in functions)]


def meant(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
