"""Traces: a root turn as OTLP JSON, the shape of ExportTraceServiceRequest (OpenTelemetry protocol, JSON encoding).

The trace id is the turn's UUID without dashes. Under the turn's span lie its preparation, each call and each command or
tool call. No prompt, output, environment value or key is in there. Pure.
"""

from __future__ import annotations

import hashlib
from typing import Any

Doc = dict[str, Any]
INTERNAL, CLIENT = 1, 3
STATUS_OK, STATUS_ERROR = 1, 2
SECOND = 1_000_000_000


def span(kind: str, name: str, start: int, end: int, *, failed: bool = False, **attributes: Any) -> Doc:
    """A stored span. Times in nanoseconds since the epoch."""
    return {"kind": kind, "name": name, "start": start, "end": end, "failed": failed, "attributes": attributes}


def trace_document(turn: Doc, spans: list[Doc]) -> Doc:
    trace_id = turn["id"].replace("-", "")
    root_id = span_id(turn["id"], "turn")
    children = [otlp_span(stored, trace_id, span_id(turn["id"], str(n)), root_id) for n, stored in enumerate(spans)]
    scope = {"scope": {"name": "rl-eval.core"}, "spans": [root_span(turn, trace_id, root_id), *children]}
    resource = {"attributes": attributes({"service.name": "rl-eval-core", "session.id": turn["session_id"]})}
    return {
        "id": turn["id"],
        "object": "agent.session.trace",
        "session_id": turn["session_id"],
        "created_at": turn["created_at"],
        "otlp": {"resourceSpans": [{"resource": resource, "scopeSpans": [scope]}]},
    }


def span_id(turn_id: str, name: str) -> str:
    return hashlib.sha256(f"{turn_id}/{name}".encode()).hexdigest()[:16]


def root_span(turn: Doc, trace_id: str, root_id: str) -> Doc:
    """The turn itself; one that runs has no end yet."""
    members: Doc = {"turn.status": turn["status"]}
    if turn["usage"]:
        members |= {"usage.input_tokens": turn["usage"]["input_tokens"]}
        members |= {"usage.output_tokens": turn["usage"]["output_tokens"]}
    if turn["error"]:
        members["error.code"] = turn["error"]["code"]
    ended = turn["completed_at"]
    found = {
        "traceId": trace_id,
        "spanId": root_id,
        "name": "turn",
        "kind": INTERNAL,
        "startTimeUnixNano": str(turn["created_at"] * SECOND),
        "attributes": attributes(members),
        "status": {"code": STATUS_ERROR} if turn["error"] else {"code": STATUS_OK} if ended else {},
    }
    return found | ({"endTimeUnixNano": str(ended * SECOND)} if ended else {})


def otlp_span(stored: Doc, trace_id: str, own_id: str, parent_id: str) -> Doc:
    return {
        "traceId": trace_id,
        "spanId": own_id,
        "parentSpanId": parent_id,
        "name": stored["name"],
        "kind": CLIENT if stored["kind"] == "call" else INTERNAL,
        "startTimeUnixNano": str(stored["start"]),
        "endTimeUnixNano": str(stored["end"]),
        "attributes": attributes({"span.type": stored["kind"], **stored["attributes"]}),
        "status": {"code": STATUS_ERROR if stored["failed"] else STATUS_OK},
    }


def attributes(members: Doc) -> list[Doc]:
    """OTLP attributes; a null is left out. 64-bit integers are strings, as the JSON encoding asks."""
    found = []
    for key, value in members.items():
        if isinstance(value, int) and not isinstance(value, bool):
            found.append({"key": key, "value": {"intValue": str(value)}})
        elif value is not None:
            found.append({"key": key, "value": {"stringValue": str(value)}})
    return found
