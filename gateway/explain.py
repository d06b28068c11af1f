"""Explain a trace in words and a small picture: its chains, what broke, where and why, what is trained. Pure.

The picture has one line per run of calls without a fork, forks below it. Every text from the trace is escaped, since
it goes to a terminal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from gateway.breaks import Break, explain_breaks
from gateway.graph import Graph, build
from gateway.sequences import AccountingError, sequences
from gateway.store import Trace

WORDS = {
    "retokenized_reply": "the reply came back as other ids for the same text",
    "retokenized_args": "tool arguments came back as other ids, equal as JSON",
    "thinking_dropped": "the reasoning of an earlier reply was left out",
    "system_changed": "a system message changed",
    "tools_changed": "the offered tools changed",
    "history_rewritten": "earlier messages were rewritten",
    "history_truncated": "earlier messages were left out",
    "partial_reply": "only the beginning of a reply was kept",
    "template": "the messages are the same, the template rendered them otherwise",
    "gateway_transform": "the gateway changed a message that it had left alone before",
    "new_conversation": "another conversation began: no fault",
    "unknown": "the trace does not tell why",
}


def explain(trace: Trace) -> str:
    graph = build(trace.calls.values())
    return "\n".join(
        [*headline(trace, graph), "", *picture(graph), *breaks(graph), *edges(graph), *notes(graph), *training(graph)]
    )


def headline(trace: Trace, graph: Graph) -> Iterator[str]:
    sampled = sum(call.end - call.start for call in graph.calls.values())
    roots = len(graph.roots)
    yield (
        f"rollout {escaped(trace.rollout_id)}, attempt {trace.attempt_id}: {many(len(graph.calls), 'call')} "
        f"in {many(roots, 'root')}, {many(sampled, 'sampled token')}"
    )
    frozen = (
        "frozen" if trace.frozen == trace.snapshot else "frozen, but calls came later" if trace.frozen else "not frozen"
    )
    yield f"snapshot {trace.snapshot[:12]}, {frozen}" + (
        f"; released: {escaped(trace.released)}" if trace.released else ""
    )
    if trace.torn:
        yield f"the last {trace.torn} bytes are a torn line: left out"


def picture(graph: Graph) -> Iterator[str]:
    for root in graph.roots:
        yield from branch(graph, root, "", "")


def branch(graph: Graph, start: str, first: str, rest: str) -> Iterator[str]:
    """The run of calls that begins at `start`, then what forks off its end. Iterates: chains may be thousands long."""
    pending = [(start, first, rest)]
    while pending:
        begin, lead, indent = pending.pop()
        run = straight(graph, begin)
        yield lead + described(graph, run)
        forks = graph.calls[run[-1]].children
        last = len(forks) - 1
        marks = [("└─ ", "   ") if at == last else ("├─ ", "│  ") for at in range(len(forks))]
        pending += [(fork, indent + mark, indent + space) for fork, (mark, space) in zip(forks, marks, strict=True)][
            ::-1
        ]


def straight(graph: Graph, begin: str) -> list[str]:
    """The calls from `begin` on, as long as there is one child of the same role."""
    run = [begin]
    while (
        len(children := graph.calls[run[-1]].children) == 1 and graph.calls[children[0]].role == graph.calls[begin].role
    ):
        run.append(children[0])
    return run


def described(graph: Graph, run: list[str]) -> str:
    calls = [graph.calls[call_id] for call_id in run]
    names = " ─ ".join(run if len(run) < 5 else [*run[:2], "…", run[-1]])
    sampled = sum(call.end - call.start for call in calls)
    role = calls[0].role + ("" if calls[0].accepted is None else " (accepted)" if calls[0].accepted else " (rejected)")
    count = f"{len(run)} calls, " if len(run) > 1 else ""
    return f"{role}: {escaped(names)}   {count}{calls[-1].end:,} tokens, {sampled:,} of them sampled here"


def breaks(graph: Graph) -> Iterator[str]:
    for found in explain_breaks(graph):
        yield ""
        yield from told(graph, found)


def told(graph: Graph, found: Break) -> Iterator[str]:
    cause = f", caused by the {found.caused_by}" if found.caused_by and found.cls != "new_conversation" else ""
    parent = graph.calls[found.call].parent
    begins = "begins a new root" if parent is None else f"forks off after {parent}"
    yield f"{escaped(found.call)} {escaped(begins)}: {found.cls}{cause}: {WORDS[found.cls]}"
    place = f", message {found.message_index}" * (found.message_index is not None)
    place += f", {escaped(found.pointer)}" if found.pointer else ""
    yield (
        f"  it shares the first {found.common_tokens:,} of {many(found.nearest_tokens, 'token')} with "
        f"{escaped(found.nearest_call)} and differs at token {found.token_index:,}{place}"
    )
    if found.cls != "new_conversation":
        yield f"  before: {escaped(found.before)}"
        yield f"  after:  {escaped(found.after)}"
        yield f"  {many(found.resent_tokens, 'token')} of its prompt had to be computed again"


def edges(graph: Graph) -> Iterator[str]:
    found = [f"{e.root} continues {e.leaf} with the summary of {e.via} ({e.evidence})" for e in graph.continues]
    found += [f"{edge.parent_call} was given what {edge.subagent_leaf} reported" for edge in graph.returns]
    found += [f"{edge.root} was spawned by {edge.call}" for edge in graph.spawned_by]
    yield from ["", *map(escaped, found)] if found else []


def notes(graph: Graph) -> Iterator[str]:
    """Calls outside the graph, and findings by kind."""
    outside = [f"{call_id} is not in the graph: {why}" for call_id, why in graph.left_out.items()]
    kinds: Counter[tuple[str, str]] = Counter()
    for call in graph.calls.values():
        kinds.update((one["level"], one["code"]) for one in call.findings)
    found = outside + [f"{level}: {code} in {many(count, 'call')}" for (level, code), count in sorted(kinds.items())]
    yield from ["", *map(escaped, found)] if found else []


def training(graph: Graph) -> Iterator[str]:
    yield ""
    try:
        found = sequences(graph, {})
    except AccountingError as error:
        yield f"nothing may be exported: {error}"
        return
    yield f"{many(len(found.rows), 'sequence')}, {many(found.eligible_tokens, 'token')} to train"
    for why, count in sorted(found.masked.items()):
        yield f"  {many(count, 'sampled token')} not trained: {escaped(why)}"


def many(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def escaped(text: object) -> str:
    """On one line, and without what a terminal would obey."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in str(text))
