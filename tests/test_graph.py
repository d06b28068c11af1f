"""The token graph against a reference that tries every pair, and against the ways harnesses break a prefix."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from call_records import START, SUMMARY, TOOLS, Harness, base, forests, message, render, tool_call
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.breaks import explain_breaks
from gateway.graph import Graph, GraphBuilder, build, commit, upwards
from gateway.record import ID_BYTES, CallRecord, Delta, measured_findings
from gateway.sequences import AccountingError, check_accounts, cut, sequences

# Properties: random forests over an alphabet so small that prefixes also meet by chance


def p(record: CallRecord) -> list[int]:
    assert record.prompt_ids is not None
    return list(record.prompt_ids.tail)


def p_and_s(record: CallRecord) -> list[int]:
    return [*p(record), *(record.sampled_ids or ())]


def committed(records: list[CallRecord]) -> list[CallRecord]:
    def proved(one: CallRecord) -> bool:
        whole = p_and_s(one)
        return bool(one.sampled_ids) and any(k.seq > one.seq and p(k)[: len(whole)] == whole for k in records)

    return [one for one in records if one.state == "delivered" or (one.state == "reply" and proved(one))]


def reference_parent(record: CallRecord, calls: list[CallRecord]) -> str | None:
    """The rule of the parent, tried on every pair."""

    def may(other: CallRecord) -> bool:
        mine, theirs = len(p_and_s(record)), len(p_and_s(other))
        return other is not record and (theirs, other.seq) < (mine, record.seq) and p(record)[:theirs] == p_and_s(other)

    candidates = [other for other in calls if may(other)]
    session = record.labels["session"]
    best = max(
        candidates,
        key=lambda one: (len(p_and_s(one)), one.labels["session"] == session, commit(one)),
        default=None,
    )
    return best and best.call_id


def shape(graph: Graph) -> Any:
    """Everything a graph says, without the trie it is read from."""
    calls = {
        call_id: (
            call.start,
            call.end,
            call.evidence,
            call.parent,
            call.children,
            call.role,
            call.accepted,
            call.findings,
        )
        for call_id, call in graph.calls.items()
    }
    edges = graph.continues, graph.returns, graph.spawned_by
    return (
        list(calls.items()),
        graph.left_out,
        edges,
        explain_breaks(graph),
        {one: graph.ids(one) for one in graph.calls},
    )


@given(forests())
def test_parents_are_the_longest_exact_prefix_among_committed_calls(records: list[CallRecord]) -> None:
    graph, calls = build(records), committed(records)
    assert list(graph.calls) == [one.call_id for one in calls]
    assert {one.call_id: graph.calls[one.call_id].parent for one in calls} == {
        one.call_id: reference_parent(one, calls) for one in calls
    }


@given(forests(), st.randoms(use_true_random=False))
def test_every_order_of_arrival_gives_the_same_graph(records: list[CallRecord], random: Any) -> None:
    shuffled = random.sample(records, len(records))
    assert shape(build(shuffled)) == shape(build(records))


@given(forests(), st.randoms(use_true_random=False))
def test_a_graph_that_grows_call_by_call_equals_one_built_at_once(records: list[CallRecord], random: Any) -> None:
    builder, known = GraphBuilder(), []
    for record in random.sample(records, len(records)):
        builder.add(record)
        known.append(record)
        assert shape(builder.graph()) == shape(build(known))


@given(forests())
def test_a_path_is_its_leaf_and_every_call_on_it_a_prefix(records: list[CallRecord]) -> None:
    graph = build(records)
    for leaf in graph.calls:
        ids = graph.ids(leaf)
        assert ids == p_and_s(graph.records[leaf])
        for call_id in graph.path(leaf):
            call = graph.calls[call_id]
            assert ids[: call.end] == p_and_s(call.record) and call.end - call.start == len(
                call.record.sampled_ids or ()
            )


@pytest.mark.parametrize("ownership", ["first", "split"])
@given(records=forests())
def test_each_eligible_token_has_weight_one_and_every_other_token_none(
    ownership: Any, records: list[CallRecord]
) -> None:
    graph = build(records)
    found = sequences(graph, {}, ownership)
    total: dict[tuple[str, int], float] = {}
    for one in found.rows:
        assert len(one["input_ids"]) == len(one["loss_mask"]) == len(one["logprobs"]) == len(one["weights"])
        own = {at: call["call_id"] for call in one["calls"] for at in range(call["start"], call["end"])}
        for at, weight in enumerate(one["weights"]):
            assert bool(weight) == bool(one["loss_mask"][at])
            assert not weight or (at in own and one["logprobs"][at] is not None)
            if weight:
                start = next(call["start"] for call in one["calls"] if call["call_id"] == own[at])
                total[own[at], at - start] = total.get((own[at], at - start), 0) + weight
    eligible = {
        (one.call_id, at)
        for one in committed(records)
        if graph.calls[one.call_id].role == "agent" and len(one.logprobs or ()) == len(one.sampled_ids or ())
        for at in range(len(one.sampled_ids or ()))
    }
    assert set(total) == eligible and all(math.isclose(weight, 1) for weight in total.values())


@given(forests())
def test_misaligned_log_probabilities_are_flagged_and_nothing_of_the_call_is_trained(records: list[CallRecord]) -> None:
    graph = build(records)
    rows = sequences(graph, {}).rows
    for one in committed(records):
        if len(one.logprobs or ()) != len(one.sampled_ids or ()):
            assert one.fatal == "logprob_misaligned"
            spans = [(row, call) for row in rows for call in row["calls"] if call["call_id"] == one.call_id]
            for row, call in spans:
                assert not any(row["loss_mask"][call["start"] : call["end"]])
                assert set(row["logprobs"][call["start"] : call["end"]]) <= {None}


# Forks, ancestors that come late, ambiguity


def test_five_children_under_one_call_train_its_tokens_once() -> None:
    harness = Harness()
    history = harness.call(START, "I ask five helpers")
    for number in range(5):
        harness.call([*history, message("user", f"helper {number}")], f"done {number}", labels={"kind": "agent"})
    sampled = sum(len(record.sampled_ids or ()) for record in harness.records)
    for ownership in ("first", "split"):
        found = sequences(build(harness.records), {}, ownership)  # type: ignore[arg-type]
        assert len(found.rows) == 5 and found.eligible_tokens == sampled
        assert math.isclose(sum(sum(row["weights"]) for row in found.rows), sampled)
    assert [row["weights"].count(0.2) for row in found.rows] == [len(harness.records[0].sampled_ids or ())] * 5


def test_accounts_that_do_not_balance_stop_the_export() -> None:
    harness = Harness()
    base(harness)
    found = sequences(build(harness.records), {})
    found.rows[0]["weights"][-1] = 0
    with pytest.raises(AccountingError, match="eligible"):
        check_accounts(found)


def test_an_ancestor_that_becomes_known_late_is_put_in_between() -> None:
    harness = Harness()
    base(harness)
    a, b = harness.records
    c = replace(b, call_id="later", seq=9, prompt_ids=Delta([*p_and_s(b), 1]))
    builder = GraphBuilder()
    for record in (a, c):
        builder.add(record)
    assert builder.graph().calls["later"].parent == a.call_id
    builder.add(b)
    assert builder.graph().path("later") == [a.call_id, b.call_id, "later"]


def test_of_equal_calls_the_one_of_the_same_agent_becomes_the_parent_and_the_doubt_is_noted() -> None:
    harness = Harness(session="s")
    for agent in ("x", "y"):
        history = harness.call(START, "same", labels={"agent": agent})
    harness.call([*history, message("user", "go on")], "done", labels={"agent": "x"})
    call = build(harness.records).calls["c2"]
    assert call.parent == "c0" and [finding["code"] for finding in call.findings] == ["parent_ambiguous"]


# States


@pytest.mark.parametrize(
    ("state", "continued", "kept"),
    [
        ("delivered", False, True),
        ("reply", True, True),
        ("reply", False, False),
        ("undelivered", True, False),
        ("failed", False, False),
        ("synthetic", True, False),
    ],
)
def test_which_calls_are_committed(state: Any, continued: bool, kept: bool) -> None:
    harness = Harness()
    history = harness.call(START, "first", state=state)
    if continued:
        harness.call([*history, message("user", "and?")], "second")
    graph = build(harness.records)
    assert ("c0" in graph.calls) == kept and ("c0" in graph.left_out) == (not kept)
    if continued and kept:
        assert graph.calls["c0"].evidence == ("extended_by c1" if state == "reply" else "terminal_event")
    assert sequences(graph, {}).eligible_tokens == sum(call.end - call.start for call in graph.calls.values())


FINDINGS = [
    ({"logprobs": None}, "no_logprobs"),
    ({"logprobs": [-0.5]}, "logprob_misaligned"),
    ({"sampled_ids": [1, 2], "logprobs": [-0.5, float("nan")]}, "logprob_filler"),
    ({"sampled_ids": [1, 2], "logprobs": [-0.5, -9999.0]}, "logprob_filler"),
    ({"sampled_ids": [1, 2], "logprobs": [-0.5, 0.25]}, "positive_logprob"),
    ({"sampled_ids": [1, -2], "logprobs": [-0.5, -0.5]}, "invalid_token_id"),
    ({"prompt_ids": None}, "no_prompt_ids"),
]


@pytest.mark.parametrize(("members", "code"), FINDINGS)
def test_unusable_arrays_are_fatal(members: dict[str, Any], code: str) -> None:
    harness = Harness()
    harness.call(START, "reply", **members)
    (record,) = harness.records
    assert record.fatal == code
    assert sequences(build([record]), {}).rows == []


def test_tokens_that_are_all_certain_are_marked_and_trained() -> None:
    harness = Harness()
    harness.call(START, "ab", logprobs=[0.0] * 5)
    assert [finding["code"] for finding in measured_findings(harness.records[0])] == ["all_certain"]
    assert sequences(build(harness.records), {}).eligible_tokens == 5


# Breaks: what a harness sends instead of its honest history, and what is said about it

CALLED = message("assistant", "", tool_calls=tool_call('{"cmd": "wc -l a.txt"}'))
THOUGHT = message("assistant", "I count", reasoning_content="hm, wc it is")
RESULT = message("tool", "12 a.txt", tool_call_id="t1")
Change = Callable[[list[dict[str, Any]]], dict[str, Any]]


def changed(at: int, **members: Any) -> Change:
    return lambda history: {"messages": [*history[:at], history[at] | members, *history[at + 1 :]]}


def resampled(harness: Harness) -> None:
    """The first reply as it would have come back, had the policy sampled other ids for the same text."""
    record = harness.records[0]
    harness.records[0] = replace(record, sampled_ids=[99, *(record.sampled_ids or ())[1:]])


BREAKS: list[tuple[str, dict[str, Any], Change, str, str | None, str | None, int | None]] = [
    (
        "system",
        CALLED,
        changed(0, content="be brief, it is noon"),
        "system_changed",
        "harness",
        "/messages/0/content",
        0,
    ),
    (
        "arguments",
        CALLED,
        changed(2, tool_calls=tool_call('{"cmd":"wc -l a.txt"}')),
        "retokenized_args",
        "harness",
        "/messages/2/tool_calls/0/function/arguments",
        2,
    ),
    (
        "big number",
        message("assistant", "", tool_calls=tool_call('{"n": 1.0}')),
        changed(2, tool_calls=tool_call('{"n": 1}')),
        "retokenized_args",
        "harness",
        "/messages/2/tool_calls/0/function/arguments",
        2,
    ),
    (
        "thinking",
        THOUGHT,
        changed(2, reasoning_content=""),
        "thinking_dropped",
        "harness",
        "/messages/2/reasoning_content",
        2,
    ),
    (
        "partial",
        message("assistant", "a long answer"),
        changed(2, content="a long"),
        "partial_reply",
        "harness",
        "/messages/2/content",
        2,
    ),
    (
        "rewritten",
        message("assistant", "a long answer"),
        changed(2, content="a short one"),
        "history_rewritten",
        "harness",
        "/messages/2/content",
        2,
    ),
    (
        "question",
        CALLED,
        changed(1, content="count the words"),
        "history_rewritten",
        "harness",
        "/messages/1/content",
        1,
    ),
    (
        "reply dropped",
        CALLED,
        lambda history: {"messages": [*history[:2], history[3]]},
        "history_rewritten",
        "harness",
        "/messages/2",
        2,
    ),
    (
        "head dropped",
        CALLED,
        lambda history: {"messages": [history[0], *history[2:]]},
        "history_truncated",
        "harness",
        "/messages/1",
        1,
    ),
    (
        "tools",
        CALLED,
        lambda history: {"messages": history, "tools": [*TOOLS, *TOOLS]},
        "tools_changed",
        "harness",
        "/tools/1",
        None,
    ),
    (
        "template",
        CALLED,
        lambda history: {"messages": history, "prompt_ids": Delta([7, *render(history, TOOLS)])},
        "template",
        "template",
        None,
        None,
    ),
    (
        "gateway",
        CALLED,
        lambda history: {
            **changed(1, content="count")(history),
            "transforms": [{"kind": "hoist", "pointer": "/messages/1", "reason": "x"}],
        },
        "gateway_transform",
        "gateway",
        "/messages/1/content",
        1,
    ),
]


@pytest.mark.parametrize(
    ("name", "reply", "change", "cls", "cause", "pointer", "index"), BREAKS, ids=[row[0] for row in BREAKS]
)
def test_a_break_is_classified_and_placed(
    name: str, reply: Any, change: Change, cls: str, cause: Any, pointer: Any, index: Any
) -> None:
    harness = Harness(session="s")
    history = harness.call(START, reply)
    sent = change([*history, RESULT])
    harness.call(sent.pop("messages"), "done", **sent)
    graph = build(harness.records)
    (found,) = explain_breaks(graph)
    assert (found.cls, found.caused_by, found.message_index) == (cls, cause, index)
    assert pointer is None or (found.pointer or "").startswith(pointer)
    first, second = (graph.ids(one) for one in ("c0", "c1"))
    assert first[: found.common_tokens] == second[: found.common_tokens]
    assert first[found.common_tokens : found.common_tokens + 1] != second[found.common_tokens : found.common_tokens + 1]
    assert found.token_index == found.common_tokens and found.nearest_tokens == len(first)
    assert found.resent_tokens == graph.calls["c1"].start - found.common_tokens
    assert found.before != found.after and max(len(found.before), len(found.after)) <= 200
    assert graph.calls["c1"].role == "agent"  # a broken chain goes on being trained


@pytest.mark.parametrize(
    ("reply", "cls", "cause"),
    [
        (message("assistant", "there are 12"), "retokenized_reply", "engine"),
        (CALLED, "retokenized_args", "engine"),
        (THOUGHT, "thinking_dropped", "template"),
    ],
)
def test_a_reply_that_comes_back_as_other_ids_for_the_same_text(reply: Any, cls: str, cause: str) -> None:
    harness = Harness()
    harness.call([*harness.call(START, reply), RESULT], "done")
    resampled(harness)
    (found,) = explain_breaks(build(harness.records))
    assert (found.cls, found.caused_by, found.message_index) == (cls, cause, 2)
    assert found.before.startswith("ids ") and found.before != found.after


def long_history() -> tuple[Harness, list[dict[str, Any]]]:
    harness = Harness(session="s")
    history = harness.call(START, CALLED)
    for number in range(4):
        result = message("tool", f"{number} lines of output", tool_call_id="t1")
        history = harness.call([*history, result], THOUGHT | {"content": f"step {number}"})
    return harness, history


@pytest.mark.parametrize(
    ("change", "cls", "pointer", "parent"),
    [
        (changed(5, content="[cleared]"), "history_rewritten", "/messages/5/content", "c1"),
        (changed(10, content="another step"), "history_rewritten", "/messages/10/content", "c3"),
        (changed(4, reasoning_content=""), "thinking_dropped", "/messages/4/reasoning_content", "c0"),
        (lambda history: {"messages": [*history[:5], *history[7:]]}, "history_truncated", "/messages/5/content", "c1"),
    ],
)
def test_a_history_changed_in_its_middle_is_a_fork_and_explained(
    change: Change, cls: str, pointer: str, parent: str
) -> None:
    harness, history = long_history()
    harness.call(change([*history, message("user", "go on")])["messages"], "done")
    graph = build(harness.records)
    (found,) = explain_breaks(graph)
    assert graph.calls["c5"].parent == parent and (found.call, found.cls, found.pointer) == ("c5", cls, pointer)
    assert sequences(graph, {}).eligible_tokens == sum(len(record.sampled_ids or ()) for record in harness.records)


def test_forks_that_are_no_breaks_are_not_reported() -> None:
    """Five questions after one reply, a question asked again of the middle, and a second sample."""
    harness, history = long_history()
    for number in range(5):
        harness.call([*history, message("user", f"question {number}")], "answer")
    harness.call([*history[:5], message("user", "instead of the tool's result")], "answer")
    harness.call(history[:4], "another sample")
    assert explain_breaks(build(harness.records)) == []


def test_a_reply_cut_at_its_limit_is_extended_and_the_end_token_is_context() -> None:
    harness = Harness()
    history = harness.call(START, "cut sho")
    record = harness.records[0]
    harness.records[0] = replace(
        record,
        sampled_ids=(record.sampled_ids or ())[:-1],
        logprobs=(record.logprobs or ())[:-1],
        finish_reason="length",
    )
    harness.call([*history, message("user", "go on")], "rt")
    graph = build(harness.records)
    (row,) = sequences(graph, {}).rows
    assert graph.path("c1") == ["c0", "c1"] and row["loss_mask"][graph.calls["c0"].end] == 0 and row["truncated"]


# Roles and edges, by harness


def roles(graph: Graph) -> list[str]:
    return [call.role for call in graph.calls.values()]


def test_base() -> None:
    harness = Harness()
    base(harness)
    graph = build(harness.records)
    assert roles(graph) == ["agent", "agent"] and graph.roots == ["c0"] and explain_breaks(graph) == []


def test_a_toolless_title_call_beside_the_main_chain_is_auxiliary() -> None:
    harness = Harness(session="s")
    harness.call([message("system", "make a title"), START[1]], "Counting", tools=[])
    base(harness)
    graph = build(harness.records)
    assert [(found.call, found.cls) for found in explain_breaks(graph)] == [("c1", "new_conversation")]
    assert len(sequences(graph, {}).rows) == 1


def test_a_labelled_subagent_has_its_own_chain_and_edges_both_ways() -> None:
    harness = Harness(session="main")
    history = harness.call(START, message("assistant", "", tool_calls=tool_call("{}", "task")))
    harness.call(
        [START[0], message("user", "look at b.txt")],
        "b.txt holds 40 words",
        labels={"session": "sub", "parent": "main"},
    )
    harness.call([*history, message("tool", "result: b.txt holds 40 words", tool_call_id="t1")], "done")
    graph = build(harness.records)
    assert roles(graph) == ["agent", "subagent", "agent"]
    assert [(edge.subagent_leaf, edge.parent_call) for edge in graph.returns] == [("c1", "c2")]
    assert [(edge.root, edge.call) for edge in graph.spawned_by] == [("c1", "c0")]
    assert [(found.call, found.cls) for found in explain_breaks(graph)] == [("c1", "new_conversation")]
    assert [row["role"] for row in sequences(graph, {}).rows] == ["subagent", "agent"]


def test_a_subagent_in_the_background_is_told_of_in_a_user_message_and_spawned_by_who_named_its_task() -> None:
    harness = Harness(session="main")
    spawn = tool_call(json.dumps({"prompt": "look at b.txt and count"}), "task")
    history = harness.call(START, message("assistant", "", tool_calls=spawn))
    asked = [*history, message("tool", "launched", tool_call_id="t1")]
    history = harness.call(
        asked, message("assistant", "", tool_calls=tool_call('{"for": "all that there is"}', "wait"))
    )
    harness.call(
        [START[0], message("user", "Task: look at b.txt and count")],
        "b.txt holds 40 words",
        labels={"session": "sub", "parent": "main"},
    )
    harness.call([*history, message("user", "It is done: b.txt holds 40 words")], "done")
    graph = build(harness.records)
    assert [(edge.root, edge.call) for edge in graph.spawned_by] == [("c2", "c0")]
    assert [(edge.subagent_leaf, edge.parent_call) for edge in graph.returns] == [("c2", "c3")]


@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize("toolless", [False, True])
def test_a_compaction_that_the_harness_went_on_with(toolless: bool, labelled: bool) -> None:
    """Appended to the chain with the same tools (Claude Code), or toolless with its own system prompt (Codex, Pi)."""
    harness = Harness(session="s")
    history = base(harness)
    asked = [message("system", "summarise"), *history[1:]] if toolless else history
    summary = "short" if labelled else SUMMARY
    labels = {"kind": "compaction"} if labelled else {}
    harness.call(
        [*asked, message("user", "summarise")], f"<s>{summary}</s>", tools=[] if toolless else None, labels=labels
    )
    harness.call([START[0], message("user", f"We begin anew. {summary}")], "I go on")
    graph = build(harness.records)
    assert roles(graph) == ["agent", "agent", "compaction", "agent"] and graph.calls["c2"].accepted
    (edge,) = graph.continues
    assert (edge.root, edge.via, edge.leaf) == ("c3", "c2", "c1")
    assert edge.evidence == ("wire_label" if labelled else "visible_text")
    assert explain_breaks(graph)[-1].cls == "history_rewritten"
    assert "c2" not in [call["call_id"] for row in sequences(graph, {}).rows for call in row["calls"]]
    asked_for = sequences(graph, {}, compactions=True)
    assert "c2" in [call["call_id"] for row in asked_for.rows for call in row["calls"]]
    assert [row["continues"] and row["continues"]["via"] for row in sequences(graph, {}).rows] == [None, "c2"]


def test_a_summary_that_comes_back_as_a_first_reply() -> None:
    """opencode: a toolless call, whose text then stands in the history as if the agent had said it."""
    harness = Harness(session="s")
    harness.call([message("system", "make a title"), START[1]], "Counting the lines of a file. " * 5, tools=[])
    base(harness)
    harness.call([message("system", "summarise"), message("user", "<conversation>")], SUMMARY, tools=[])
    begun = [START[0], message("user", "What did we do so far?"), message("assistant", SUMMARY)]
    harness.call([*begun, message("user", "go on")], "I go on")
    graph = build(harness.records)
    assert roles(graph) == ["auxiliary", "agent", "agent", "compaction", "agent"]
    assert [(edge.root, edge.via, edge.leaf) for edge in graph.continues] == [("c4", "c3", "c2")]
    assert explain_breaks(graph)[-1].cls == "history_rewritten"


def test_a_call_that_is_given_the_last_summary_to_write_the_next_is_no_agent() -> None:
    """Pi: it is a compaction too, though its prompt begins with what the agent went on with."""
    harness = Harness()
    base(harness)
    ask = message("system", "summarise")
    harness.call([ask, message("user", "<conversation>")], SUMMARY, tools=[])
    harness.call([START[0], message("user", f"The summary: {SUMMARY}")], "I go on")
    harness.call([ask, message("user", f"<previous-summary>{SUMMARY}")], "the next summary " * 9, tools=[])
    graph = build(harness.records)
    assert roles(graph) == ["agent", "agent", "compaction", "agent", "compaction"]
    assert [graph.calls[one].accepted for one in ("c2", "c4")] == [True, False]
    assert [(edge.root, edge.via, edge.leaf) for edge in graph.continues] == [("c3", "c2", "c1")]


def test_a_history_that_breaks_after_its_first_reply_does_not_begin_with_a_summary() -> None:
    harness = Harness(session="s")
    harness.call(START, SUMMARY)
    harness.call([START[0], message("user", "count"), message("assistant", SUMMARY), message("user", "on")], "I go on")
    graph = build(harness.records)
    assert roles(graph)[0] == "agent" and not graph.continues


@pytest.mark.parametrize(
    ("texts", "accepted"),
    [
        ((f"Before: {SUMMARY}", SUMMARY[::-1]), [True, True]),
        ((SUMMARY, SUMMARY), [True, True]),
        ((SUMMARY, "something else " * 20), [True, False]),
    ],
    ids=["of two parts", "the same twice", "one for nothing"],
)
def test_two_summaries_before_one_new_beginning(texts: tuple[str, str], accepted: list[bool]) -> None:
    """Pi: of the turns before and of the one under way, or at the end of a turn and again before the next."""
    harness = Harness()
    base(harness)
    for text in texts:
        harness.call([message("system", "summarise"), message("user", f"<conversation> {text[:1]}")], text, tools=[])
    used = " --- ".join(text for text, used in zip(texts, accepted, strict=True) if used)
    history = harness.call([START[0], message("user", f"The summary: {used}")], "I go on")
    harness.call([*history, message("user", "more")], "done")
    graph = build(harness.records)
    assert roles(graph) == ["agent", "agent", "compaction", "compaction", "agent", "agent"]
    assert [graph.calls[one].accepted for one in ("c2", "c3")] == accepted
    assert {(edge.root, edge.leaf) for edge in graph.continues} == {("c4", "c1")}
    assert len(sequences(graph, {}).rows) == 2


def test_a_compaction_that_the_harness_rejected_is_never_trained() -> None:
    harness = Harness(session="s")
    history = base(harness)
    harness.call([message("system", "summarise"), *history], "no", tools=[], labels={"kind": "compaction"})
    graph = build(harness.records)
    assert graph.calls["c2"].accepted is False
    assert "c2" not in [call["call_id"] for row in sequences(graph, {}, compactions=True).rows for call in row["calls"]]


def test_a_reply_the_harness_lost_is_discarded() -> None:
    harness = Harness()
    harness.call(START, "lost")
    history = harness.call(START, "kept")
    harness.call([*history, message("user", "go on")], "done")
    graph = build(harness.records)
    assert roles(graph) == ["discarded", "agent", "agent"]
    assert [[call["call_id"] for call in row["calls"]] for row in sequences(graph, {}).rows] == [["c1", "c2"]]


def test_a_lost_reply_that_was_mostly_a_tool_call_is_discarded_and_no_summary() -> None:
    """Its short text is likely to stand in the prompt somewhere; that is no evidence of anything."""
    harness = Harness()
    reply = message("assistant", "a", tool_calls=tool_call(json.dumps({"cmd": "echo " + "b" * 9000})))
    harness.call(START, reply)
    history = harness.call(START, reply)
    harness.call([*history, message("tool", "b", tool_call_id="t1")], "done")
    graph = build(harness.records)
    assert roles(graph) == ["discarded", "agent", "agent"] and not graph.continues


def test_two_samples_of_one_prompt_both_train() -> None:
    harness = Harness()
    harness.call(START, "one")
    harness.call(START, "two", labels={"kind": "agent"})
    graph = build(harness.records)
    assert len(sequences(graph, {}).rows) == 2 and explain_breaks(graph)[0].cls == "new_conversation"


def test_a_call_of_another_client_is_foreign() -> None:
    harness = Harness(user_agent="claude-cli/2.1.332 (external)")
    base(harness)
    harness.call([message("user", "hello model")], "hello", labels={"user_agent": "python-requests/2.32"})
    graph = build(harness.records)
    assert roles(graph)[-1] == "foreign" and len(sequences(graph, {}).rows) == 1


# Rows


def test_a_row_says_which_call_each_token_came_from() -> None:
    harness = Harness()
    base(harness)
    graph = build(harness.records)
    (row,) = sequences(graph, {"rollout_id": "r"}).rows
    assert row["input_ids"] == graph.ids("c1") and row["rollout_id"] == "r" and (row["index"], row["count"]) == (0, 1)
    for call, record in zip(row["calls"], harness.records, strict=True):
        span = slice(call["start"], call["end"])
        assert row["input_ids"][span] == record.sampled_ids and row["logprobs"][span] == record.logprobs
        assert set(row["loss_mask"][span]) == {1}
    assert row["versions"] == [[call["start"], call["end"], "v1"] for call in row["calls"]] and row["versions_exact"]
    assert row["temperatures"] == [[call["start"], call["end"], 1.0] for call in row["calls"]]
    assert sum(row["loss_mask"]) == sum(len(record.sampled_ids or ()) for record in harness.records)


@pytest.mark.parametrize("spare", [-1, 0, 5])
def test_a_row_is_cut_at_the_end_of_a_call(spare: int) -> None:
    harness = Harness()
    base(harness)
    (row,) = sequences(build(harness.records), {}).rows
    first = row["calls"][0]["end"]
    short = cut(row, first + spare)
    assert len(short["input_ids"]) == len(short["weights"]) == (first if spare >= 0 else 0) and short["truncated"]
    assert cut(row, len(row["input_ids"])) is row


# Size


@settings(max_examples=20)
@given(forests())
def test_deltas_build_the_same_graph_as_whole_prompts(records: list[CallRecord]) -> None:
    """Each P against a random earlier call's P + S, the bases known later or sooner."""
    short: list[CallRecord] = []
    for at, record in enumerate(records):
        base_of = records[at // 2] if at else None
        whole, known = p(record), p_and_s(base_of) if base_of else []
        keep = next(
            (n for n, (a, b) in enumerate(zip(whole, known, strict=False)) if a != b), min(len(whole), len(known))
        )
        delta = Delta(whole[keep:], base_of.call_id, keep) if base_of and keep else Delta(whole)
        short.append(replace(record, prompt_ids=delta))
    assert shape(build(short[::-1])) == shape(build(records))


@pytest.mark.slow
@pytest.mark.parametrize(("calls", "context"), [(300, 92_000), (1_000, 100_000)])
def test_memory_is_linear_in_new_tokens(calls: int, context: int) -> None:
    step = context // calls
    records, ends = [], 0
    for number in range(calls):
        tail = [(ends + at) % 50_000 for at in range(step - 40)]
        delta = Delta(tail, f"c{number - 1}" if number else None, ends)
        records.append(
            CallRecord("r", 1, f"c{number}", number, prompt_ids=delta, sampled_ids=[1] * 40, state="delivered")
        )
        ends += step
    graph = build(records)
    nodes = {node for end in graph.ends.values() for node in upwards(end)}
    assert sum(len(node.edge) for node in nodes) == ID_BYTES * ends and len(graph.roots) == 1
