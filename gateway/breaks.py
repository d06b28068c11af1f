"""Why a prefix broke: every root after the first, explained against the earlier call it shares most with.

A history that was changed in its middle makes no root but a fork: the call still extends an early one. Such forks are
explained too: those whose prompt goes on after an earlier call's whole P but not with its S, and those that
go on with later replies after a message that differs. A fork into another question is no break.

A break is seen in token ids and explained in messages: the first message that differs from what the
nearest call had asked and answered, the field of it, and a class. Where all messages agree, the ids
tell whether the break lies in ids that were sampled (they came back as other ids for the same text) or
in what the template wrote. Pure. Nothing is decoded: where only ids differ, ids are shown.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal

from gateway.graph import Graph, GraphCall, likeness, names, text_of, upwards
from gateway.prefixes import Node

BreakClass = Literal[
    "retokenized_reply",
    "retokenized_args",
    "thinking_dropped",
    "system_changed",
    "tools_changed",
    "history_rewritten",
    "history_truncated",
    "partial_reply",
    "template",
    "gateway_transform",
    "new_conversation",
    "unknown",
]
Cause = Literal["harness", "template", "engine", "gateway"]
SHOWN_CHARACTERS = 200
SHOWN_IDS = 8
REASONING = ("reasoning_content", "reasoning", "thinking")
THINKING_STARTS = 8
"""A break within so many ids of a reply's start, of a reply that has reasoning, is the template leaving that out."""
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Break:
    call: str
    nearest_call: str
    """Of the earlier calls, the one that shares the longest prefix of ids."""
    common_tokens: int
    nearest_tokens: int
    token_index: int
    """The first id of the call's P that differs."""
    message_index: int | None
    """The first message that differs; None where only ids do."""
    pointer: str | None
    """JSON pointer into the converted request."""
    cls: BreakClass
    caused_by: Cause | None
    before: str
    after: str
    resent_tokens: int
    """Ids of P beyond the common ones: context that was computed again."""

    def as_json(self) -> dict[str, Any]:
        members = dict(self.__dict__)
        return {("class" if name == "cls" else name): member for name, member in members.items()}


@dataclass(frozen=True)
class Difference:
    """Where the request first differs from what was expected. `before` and `after` are the values there."""

    cls: BreakClass
    caused_by: Cause | None
    message_index: int | None = None
    pointer: str | None = None
    before: Any = None
    after: Any = None


def explain_breaks(graph: Graph) -> list[Break]:
    """One for every root but the first, and for every fork that is a break, in order of arrival."""
    found = []
    for call_id, call in list(graph.calls.items())[1:]:
        if call.parent is None or is_forked(graph, call):
            nearest, common = nearest_call(graph, call_id)
            if call.parent is None or is_break(graph, call, nearest, common):
                found.append(explain_break(graph, call, nearest, common))
    return found


def is_forked(graph: Graph, call: GraphCall) -> bool:
    """Whether other ids than the call's own were seen between its parent's end and its prompt's."""
    assert call.parent is not None
    until = graph.ends[call.parent]
    between = takewhile(lambda node: node is not until, upwards(graph.prompts[call.record.call_id].parent))
    return any(len(node.children) > 1 for node in between) or len(until.children) > 1


def is_break(graph: Graph, call: GraphCall, nearest: GraphCall, common: int) -> bool:
    parent = graph.calls[call.parent] if call.parent else None
    if parent is None or common <= parent.end:
        return parent is None
    answered = [graph.calls[one] for one in graph.path(nearest.record.call_id) if graph.calls[one].end > parent.end]
    if any(one.start <= common < one.end and one.start < call.start for one in answered):
        return True
    mine, expected = graph.messages(call.record.call_id), expectation(graph, nearest)
    index = first_difference(expected, mine)
    replies = [one for one in mine[index:] if one.get("role") == "assistant"]
    return any(same(reply, later) for reply in replies for later in expected[index:])


def expectation(graph: Graph, nearest: GraphCall) -> list[Any]:
    """The messages of a call and its reply: what a harness that keeps its history sends next."""
    message = nearest.record.message
    return [*graph.messages(nearest.record.call_id), *([] if message is None else [message])]


def explain_break(graph: Graph, call: GraphCall, nearest: GraphCall, common: int) -> Break:
    found = difference(graph, call, nearest, common)
    if found.before is None and found.after is None:
        sides = (nearest, nearest.end), (call, call.start)
        before, after = (shown_ids(graph.ids(one.record.call_id)[:end], common) for one, end in sides)
    else:
        before, after = shown(found.before, found.after)
    return Break(
        call.record.call_id,
        nearest.record.call_id,
        common,
        nearest.end,
        common,
        found.message_index,
        found.pointer,
        found.cls,
        found.caused_by,
        before,
        after,
        call.start - common,
    )


def nearest_call(graph: Graph, root: str) -> tuple[GraphCall, int]:
    """The earlier call with the longest common prefix, and its length; among equal ones as parents are chosen."""
    depths: dict[Node, int] = {node: node.depth for node in upwards(graph.prompts[root])}
    record, role = graph.calls[root].record, graph.calls[root].role

    def shared(call: GraphCall) -> int:
        passed, node = [], graph.ends[call.record.call_id]
        while node not in depths:
            passed.append(node)
            assert node.parent is not None
            node = node.parent
        depths.update((one, depths[node]) for one in passed)
        return depths[node]

    earlier = [call for call in graph.calls.values() if call.record.seq < record.seq and call.record.call_id != root]
    nearest = max(
        earlier or graph.calls.values(),
        key=lambda call: (shared(call), call.role == role, likeness(record, call.record)),
    )
    return nearest, shared(nearest)


def difference(graph: Graph, call: GraphCall, nearest: GraphCall, common: int) -> Difference:
    """The class, the cause and the place, most telling evidence first."""
    if graph.prompts[call.record.call_id] is graph.prompts[nearest.record.call_id]:
        return Difference("new_conversation", "harness")  # the same prompt again: nothing broke
    mine, expected = graph.messages(call.record.call_id), expectation(graph, nearest)
    index = first_difference(expected, mine)
    place = compare(expected, mine, index)
    if not continues(graph, call) and begins_anew(graph, call):
        return Difference("new_conversation", "harness", place.message_index, place.pointer, place.before, place.after)
    if any(edge.root == call.record.call_id for edge in graph.continues):
        return Difference("history_rewritten", "harness", place.message_index, place.pointer, place.before, place.after)
    transform = place.pointer and next((one for one in call.record.transforms if touches(one, place.pointer)), None)
    if transform:
        return Difference("gateway_transform", "gateway", place.message_index, place.pointer, place.before, place.after)
    tools = graph.tools(nearest.record.call_id), graph.tools(call.record.call_id)
    if tools[0] != tools[1]:
        at = first_difference(*tools)
        values = (tool[at] if at < len(tool) else None for tool in tools)
        return Difference("tools_changed", "harness", None, *descend(f"/tools/{at}", *values))
    if not expected or not mine:
        return Difference("unknown", None)
    if index == len(mine) == len(graph.messages(nearest.record.call_id)):
        return Difference("template", "template")  # the same request as before, rendered otherwise
    return place if place.message_index is not None else in_tokens(graph, nearest, common)


def continues(graph: Graph, call: GraphCall) -> bool:
    return any(edge.root == call.record.call_id for edge in graph.continues)


def begins_anew(graph: Graph, call: GraphCall) -> bool:
    """No fault: a call beside the conversations, or the first root of one. A chain that broke has an earlier root."""
    if call.parent is not None:
        return False
    if call.role in ("auxiliary", "compaction", "foreign"):
        return True
    earlier = [graph.calls[root] for root in graph.roots if graph.calls[root].record.seq < call.record.seq]
    mine = [one for one in earlier if one.role in (call.role, "discarded")]
    if call.role == "subagent":
        return all(names(one.record) != names(call.record) for one in mine)
    return call.role == "agent" and not mine


def first_difference(expected: Sequence[Any], mine: Sequence[Any]) -> int:
    """Index of the first element that differs; the shorter length if none does."""
    pairs = enumerate(zip(expected, mine, strict=False))
    return next((at for at, (before, after) in pairs if not same(before, after)), min(len(expected), len(mine)))


def same(before: Any, after: Any) -> bool:
    """Equal to a template: null, "" and an absent member make the same prompt."""
    return bool(before == after or meaning(before) == meaning(after))


def meaning(message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    known = {name: member for name, member in message.items() if member not in (None, "", [])}
    known.pop("refusal", None)
    return known | ({"content": text_of(message)} if text_of(message) else {})


def compare(expected: Messages, mine: Messages, index: int) -> Difference:
    """The difference at `index`; no message index where every message that both have agrees."""
    if index == len(expected):
        return Difference("template", "template")
    before = expected[index]
    if index == len(mine):
        return Difference("history_truncated", "harness", index, f"/messages/{index}", before, None)
    after = mine[index]
    pointer, old, new = descend(f"/messages/{index}", before, after)
    roles = {before.get("role"), after.get("role")}
    cls: BreakClass = "history_rewritten"
    if any(same(after, later) for later in expected[index + 1 :]):
        cls = "history_truncated"
    elif roles & {"system", "developer"}:
        cls = "system_changed"
    elif roles == {"assistant"}:
        cls, part = compare_replies(before, after)
        pointer, old, new = descend(f"/messages/{index}{part}", *(dig(one, part) for one in (before, after)))
    return Difference(cls, "harness", index, pointer, old, new)


def compare_replies(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[BreakClass, str]:
    """The class and the pointer, within the message, of a reply that came back changed."""
    plain = [
        {name: member for name, member in meaning(one).items() if name not in REASONING} for one in (before, after)
    ]
    if plain[0] == plain[1]:
        part = next(name for name in REASONING if before.get(name) != after.get(name))
        return ("history_rewritten" if after.get(part) else "thinking_dropped"), f"/{part}"
    if text_of(before) != text_of(after):
        cut = text_of(before).startswith(text_of(after)) and not after.get("tool_calls")
        return ("partial_reply" if cut else "history_rewritten"), "/content"
    pairs = list(zip(calls_of(before), calls_of(after), strict=False))
    for at, (old, new) in enumerate(pairs):
        if old != new and old[0] == new[0] and same_json(old[1], new[1]):
            return "retokenized_args", f"/tool_calls/{at}/function/arguments"
    fewer = len(calls_of(after)) < len(calls_of(before)) and all(old == new for old, new in pairs)
    return ("partial_reply" if fewer else "history_rewritten"), "/tool_calls"


def calls_of(message: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    functions = [one.get("function") or {} for one in message.get("tool_calls") or ()]
    return [(one.get("name"), one.get("arguments")) for one in functions]


def same_json(before: Any, after: Any) -> bool:
    """Whether two argument texts are the same value, numbers as JavaScript reads them."""
    try:
        values = [json.loads(one, parse_int=float) if isinstance(one, str) else one for one in (before, after)]
    except ValueError:
        return False
    return bool(values[0] == values[1])


def touches(transform: Mapping[str, Any], pointer: str) -> bool:
    where = str(transform.get("pointer") or "")
    return bool(where) and (f"{pointer}/".startswith(f"{where}/") or f"{where}/".startswith(f"{pointer}/"))


def in_tokens(graph: Graph, nearest: GraphCall, common: int) -> Difference:
    """All messages agree: in ids that were sampled, or in the template's."""
    for call_id in graph.path(nearest.record.call_id):
        call = graph.calls[call_id]
        if call.start <= common < call.end:
            message, index = call.record.message or {}, len(graph.messages(call_id))
            pointer = f"/messages/{index}"
            if any(message.get(name) for name in REASONING) and common - call.start < THINKING_STARTS:
                return Difference("thinking_dropped", "template", index, pointer)
            if calls_of(message) and not text_of(message):
                return Difference("retokenized_args", "engine", index, f"{pointer}/tool_calls")
            return Difference("retokenized_reply", "engine", index, f"{pointer}/content")
    return Difference("template", "template")


def descend(pointer: str, before: Any, after: Any) -> tuple[str, Any, Any]:
    """Follow the first member or element that differs, down to a value."""
    while True:
        if isinstance(before, dict) and isinstance(after, dict):
            keys: list[Any] = [*before, *(name for name in after if name not in before)]
            differ = [name for name in keys if before.get(name) != after.get(name)]
        elif isinstance(before, list) and isinstance(after, list):
            at = first_difference(before, after)
            differ = [at] if at < min(len(before), len(after)) else []
        else:
            return pointer, before, after
        if not differ:
            return pointer, before, after
        escaped = str(differ[0]).replace("~", "~0").replace("/", "~1")
        pointer, before, after = (
            f"{pointer}/{escaped}",
            *(one.get(differ[0]) if isinstance(one, dict) else one[differ[0]] for one in (before, after)),
        )


def dig(message: Any, pointer: str) -> Any:
    for step in pointer.split("/")[1:]:
        message = message[int(step)] if isinstance(message, list) else (message or {}).get(step)
    return message


def shown(before: Any, after: Any) -> tuple[str, str]:
    """At most SHOWN_CHARACTERS of each around their first difference."""
    texts = [one if isinstance(one, str) else json.dumps(one) for one in (before, after)]
    pairs = enumerate(zip(*texts, strict=False))
    at = next((at for at, (old, new) in pairs if old != new), min(map(len, texts)))
    start = max(at - SHOWN_CHARACTERS // 2, 0)
    old, new = (text[start : start + SHOWN_CHARACTERS] for text in texts)
    return old, new


def shown_ids(ids: Sequence[int], at: int) -> str:
    start = max(at - SHOWN_IDS // 2, 0)
    return "ids " + " ".join(map(str, ids[start : at + SHOWN_IDS]))
