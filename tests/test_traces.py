"""Traces: OTLP JSON per root turn, and that nothing of what was said is in there."""

from __future__ import annotations

import json
from typing import Any

from conftest import Core
from model_endpoint import ModelEndpoint

Doc = dict[str, Any]


def spans_of(trace: Doc) -> list[Doc]:
    (resource,) = trace["otlp"]["resourceSpans"]
    (scope,) = resource["scopeSpans"]
    return list(scope["spans"])


def attributes(span: Doc) -> dict[str, str]:
    return {pair["key"]: next(iter(pair["value"].values())) for pair in span["attributes"]}


def test_a_turn_holds_its_preparation_calls_and_commands(core: Core, model: ModelEndpoint) -> None:
    model.scripts["traced"] = "echo a-word-of-the-agent; exit 3"
    session = core.agent("codex", model.bundle("codex", "runs", "traced"), text="a-word-of-the-user")
    turn = core.turn(session.id)
    (trace,) = (trace.to_dict() for trace in core.sessions.traces.list(session.id))
    root, *children = spans_of(trace)
    assert trace["id"] == turn.id and root["traceId"] == turn.id.replace("-", "")
    assert [child["name"] for child in children] == [
        "preparation",
        "POST /v1/responses",
        "command",
        "POST /v1/responses",
    ]
    assert {child["parentSpanId"] for child in children} == {root["spanId"]}
    assert len({span["spanId"] for span in (root, *children)}) == 5
    for span in children:
        assert int(span["startTimeUnixNano"]) <= int(span["endTimeUnixNano"])
    call, command = children[1], children[2]
    assert attributes(call)["http.status"] == "200" and attributes(call)["input_tokens"] == "11"
    assert attributes(command)["exit_code"] == "3" and command["status"]["code"] == 2
    assert "a-word" not in json.dumps(trace)


def test_a_running_turn_gives_what_is_there(core: Core) -> None:
    session = core.shell("sleep 60")
    core.running(session.id)
    (trace,) = (trace.to_dict() for trace in core.sessions.traces.list(session.id))
    root, preparation = spans_of(trace)
    assert "endTimeUnixNano" not in root and preparation["name"] == "preparation"
    core.cancel(session.id)
    core.turn(session.id)


def test_traces_page_like_turns(core: Core) -> None:
    session, _ = core.run("true")
    core.say(session.id, "true")
    core.turn(session.id, 2)
    turns = [turn.id for turn in core.sessions.turns.list(session.id, order="asc")]
    traces = [trace.id for trace in core.sessions.traces.list(session.id, order="asc", limit=1)]
    assert traces == turns
    assert core.raw.get(f"/agents/sessions/{session.id}/traces?limit=0").status_code == 400
