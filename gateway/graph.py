"""The token graph: the calls of one attempt as a forest, by exact prefix. Pure: no I/O, no clock.

The parent of a call is the committed call whose P + S is the longest exact prefix of its P. The calls
lie in one trie of token ids (prefixes.py), in which a parent is the nearest node above that a call
ends at; so whatever order calls become known in, late ancestors included, the graph is the same.
Nothing is realigned, truncated or discarded at a fork or a break.

    builder = GraphBuilder(); builder.add(record) ...; graph = builder.graph()
    graph = build(records)

Invariants: the graph is a function of the set of records; the ids along a path from a root to a leaf
are exactly the leaf's P + S; memory is linear in new tokens.

Which records are in it: those delivered, and those a crash left in state `reply` whose P + S (S not
empty) a later call's P begins with, which proves that the harness had them. The others are listed with
the reason.

Roles say what a call was for: the wire's label first, structure second. What became of a break is told
in breaks.py, what is trained in sequences.py.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.prefixes import IdTree, Node, insert
from gateway.record import CallRecord, Finding, unpack, whole

EVIDENCE_TOKENS = 64
"""A summary is recognised by this many tokens of its visible text in a later root."""
LABELLED = ("agent", "subagent", "compaction", "auxiliary", "foreign")
SHORTEST_REPORT = 16
"""Characters of a subagent's task or last text; a shorter one may stand elsewhere by chance."""


@dataclass
class GraphCall:
    """A committed call in the forest. Its S are the ids [start, end) of its P + S."""

    record: CallRecord
    start: int
    end: int
    evidence: str
    parent: str | None = None
    children: list[str] = field(default_factory=list)
    """In order of arrival."""
    role: str = "unknown"
    accepted: bool | None = None
    """Of a compaction: whether the harness went on with its summary."""
    findings: list[Finding] = field(default_factory=list)
    """The record's, and `parent_ambiguous`."""

    @property
    def text(self) -> str:
        """The visible text of the reply."""
        return text_of(self.record.message)


@dataclass(frozen=True)
class Continues:
    """`root` begins with the summary that `via` wrote at the end of the chain of `leaf`."""

    root: str
    via: str
    leaf: str | None
    evidence: str


@dataclass(frozen=True)
class Returns:
    """The last text of a subagent stands in a tool result that `parent_call` was given."""

    subagent_leaf: str
    parent_call: str


@dataclass(frozen=True)
class SpawnedBy:
    root: str
    call: str


@dataclass
class Graph:
    calls: dict[str, GraphCall]
    """In order of arrival."""
    left_out: dict[str, str]
    """Calls that are not committed, and why."""
    records: Mapping[str, CallRecord]
    """All, committed or not: deltas lead through them."""
    ends: Mapping[str, Node]
    prompts: Mapping[str, Node]
    continues: list[Continues] = field(default_factory=list)
    returns: list[Returns] = field(default_factory=list)
    spawned_by: list[SpawnedBy] = field(default_factory=list)

    @property
    def roots(self) -> list[str]:
        return [call_id for call_id, call in self.calls.items() if call.parent is None]

    def ids(self, call_id: str) -> list[int]:
        """P + S."""
        return unpack(self.ends[call_id].ids())

    def path(self, call_id: str) -> list[str]:
        """From the root to the call."""
        found = [call_id]
        while (parent := self.calls[found[-1]].parent) is not None:
            found.append(parent)
        return found[::-1]

    def messages(self, call_id: str) -> list[Any]:
        return whole(self.records, call_id, "messages")

    def tools(self, call_id: str) -> list[Any]:
        return whole(self.records, call_id, "tools")


def build(records: Iterable[CallRecord]) -> Graph:
    builder = GraphBuilder()
    for record in records:
        builder.add(record)
    return builder.graph()


class GraphBuilder:
    """Takes records one by one, in any order; a record that is a delta waits for its base."""

    def __init__(self) -> None:
        self.records: dict[str, CallRecord] = {}
        self._tree = IdTree()
        self._ends: dict[str, Node] = {}
        self._prompts: dict[str, Node] = {}
        self._waiting: dict[str, list[CallRecord]] = {}

    def add(self, record: CallRecord) -> None:
        """Take a call, or the newer state of one that is known."""
        known = record.call_id in self.records
        self.records[record.call_id] = record
        ready = [] if known else [record]
        while ready:
            one = ready.pop()
            base = one.prompt_ids and one.prompt_ids.base_call
            if base and base not in self._ends:
                self._waiting.setdefault(base, []).append(one)
            elif (prompt := insert(self._tree, self._ends, one)) is not None:
                self._prompts[one.call_id] = prompt
                ready += self._waiting.pop(one.call_id, [])

    def graph(self) -> Graph:
        if self._waiting:
            raise ValueError(f"calls build on calls that are missing: {', '.join(self._waiting)}")
        proofs = self._proofs()
        calls: dict[str, GraphCall] = {}
        left_out: dict[str, str] = {}
        for record in sorted(self.records.values(), key=arrival):
            evidence = committed_by(record, proofs)
            if evidence is None or record.call_id not in self._prompts:
                left_out[record.call_id] = "no token ids" if evidence else record.evidence or record.state
            else:
                span = self._prompts[record.call_id].depth, self._ends[record.call_id].depth
                calls[record.call_id] = GraphCall(record, *span, evidence, findings=list(record.findings))
        graph = Graph(calls, left_out, dict(self.records), dict(self._ends), dict(self._prompts))
        find_parents(graph)
        find_edges(graph)
        return graph

    def _proofs(self) -> dict[str, str]:
        """For calls in state `reply`: the first later call whose P begins with their P + S."""
        pending: dict[Node, list[CallRecord]] = {}
        for record in self.records.values():
            if record.state == "reply" and record.sampled_ids and record.call_id in self._ends:
                pending.setdefault(self._ends[record.call_id], []).append(record)
        proofs: dict[str, str] = {}
        later = sorted(self.records.values(), key=arrival) if pending else []
        for record in later:
            for node in upwards(self._prompts.get(record.call_id)):
                for known in pending.get(node, ()):
                    if known.seq < record.seq:
                        proofs.setdefault(known.call_id, record.call_id)
        return proofs


def arrival(record: CallRecord) -> tuple[int, str]:
    return record.seq, record.call_id


def commit(record: CallRecord) -> tuple[float, int, str]:
    """Sorts calls by when their reply was with the harness, as far as the record knows."""
    times = (record.t_terminal, record.t_engine_end, record.t_arrival)
    return next((time for time in times if time is not None), 0.0), record.seq, record.call_id


def committed_by(record: CallRecord, proofs: Mapping[str, str]) -> str | None:
    if record.state == "delivered":
        return record.evidence or "terminal_event"
    if record.state == "reply" and record.call_id in proofs:
        return f"extended_by {proofs[record.call_id]}"
    return None


def upwards(node: Node | None) -> Iterable[Node]:
    while node is not None:
        yield node
        node = node.parent


# Parents


def find_parents(graph: Graph) -> None:
    ending: dict[Node, list[GraphCall]] = {}
    for call_id, call in graph.calls.items():
        ending.setdefault(graph.ends[call_id], []).append(call)
    for call_id, call in graph.calls.items():
        candidates = next(
            filter(None, (above(call, ending.get(node, ())) for node in upwards(graph.prompts[call_id]))), []
        )
        if not candidates:
            continue
        parent = max(candidates, key=lambda one: likeness(call.record, one.record))
        call.parent = parent.record.call_id
        parent.children.append(call_id)
        if len(candidates) > 1:
            others = ", ".join(sorted(one.record.call_id for one in candidates if one is not parent))
            call.findings.append({"level": "warn", "code": "parent_ambiguous", "detail": f"equal P + S: {others}"})


def above(call: GraphCall, ending: Sequence[GraphCall]) -> list[GraphCall]:
    """Those of the calls that end at one node which may be its parent: of two without S, the earlier only."""
    return [
        one for one in ending if one is not call and (one.end < call.end or arrival(one.record) < arrival(call.record))
    ]


def likeness(record: CallRecord, other: CallRecord) -> tuple[bool, bool, tuple[float, int, str]]:
    """Sorts equal candidates: same session, then same agent, then the latest commit."""
    mine, theirs = record.labels, other.labels
    session, agent = (mine.get(name) == theirs.get(name) for name in ("session", "agent"))
    return session, agent, commit(other)


# Edges and roles


def find_edges(graph: Graph) -> None:
    """Roles depend on `continues`; `returns` and `spawned_by` on roles. Roots are taken in order of arrival."""
    roots = graph.roots
    if not roots:
        return
    main = main_root(graph, roots)
    graph.continues = find_continues(graph, [root for root in roots[1:] if graph.tools(root) or not graph.tools(main)])
    assign_roles(graph, roots, main)
    graph.returns = find_returns(graph)
    graph.spawned_by = find_spawns(graph, roots)


def main_root(graph: Graph, roots: Sequence[str]) -> str:
    """The first root that nothing marks as something else; one with tools, if any has tools."""
    plain = [root for root in roots if label(graph.calls[root].record) in (None, "agent")] or list(roots)
    return next((root for root in plain if graph.tools(root)), plain[0])


def label(record: CallRecord) -> str | None:
    """The role the wire offers."""
    kind = record.labels.get("kind")
    if kind in LABELLED:
        return str(kind)
    return "subagent" if record.labels.get("parent") else None


def assign_roles(graph: Graph, roots: Sequence[str], main: str) -> None:
    accepted = {edge.via for edge in graph.continues}
    summarising = {instructions(graph, via) for via in accepted if not graph.tools(via)} - {""}
    discarded = find_discarded(graph)
    chain: dict[str, str] = {}
    heads: dict[str, str] = {}
    for root in roots:
        base = root_role(graph, root, main, chain, heads)
        pending = [(root, base)]
        while pending:
            call_id, inherited = pending.pop()
            call = graph.calls[call_id]
            own = label(call.record) or ("foreign" if is_foreign(graph, call_id, main) else inherited)
            twin = own == "auxiliary" and instructions(graph, call_id) in summarising
            if twin or (own in ("agent", "subagent", "unknown", "auxiliary") and call_id in accepted):
                call.role = "compaction"
            else:
                call.role = "discarded" if call_id in discarded and own != "compaction" else own
            call.accepted = call_id in accepted if call.role == "compaction" else None
            # What a chain is for outlasts a call in it that serves something else.
            chain[call_id] = inherited if own in ("compaction", "foreign") else own
            pending += [(child, chain[call_id]) for child in call.children]
        heads.setdefault(conversation(graph, root), root)


def root_role(graph: Graph, root: str, main: str, chain: Mapping[str, str], heads: Mapping[str, str]) -> str:
    edge = next((edge for edge in graph.continues if edge.root == root), None)
    if root == main:
        return "agent"
    if edge is not None and edge.leaf is not None:
        return chain.get(edge.leaf, "agent")
    if not graph.tools(root) and graph.tools(main):
        return "auxiliary"
    mine = names(graph.calls[root].record)
    for known in chain:
        if any(mine) and names(graph.calls[known].record) == mine and chain[known] in ("agent", "subagent"):
            return chain[known]
    same = heads.get(conversation(graph, root))
    return chain[same] if same else "unknown"


def names(record: CallRecord) -> tuple[Any, Any]:
    return record.labels.get("session"), record.labels.get("agent")


def conversation(graph: Graph, root: str) -> str:
    """What was asked first: it names a conversation even where its system prompt or its tools changed."""
    return repr(questions(graph, root))


def questions(graph: Graph, root: str) -> list[Any]:
    return [one for one in head(graph.messages(root)) if one.get("role") not in ("system", "developer")]


def instructions(graph: Graph, call_id: str) -> str:
    """What the harness told the model to be: two calls that share it, and have no tools, serve the same end."""
    return "\n".join(text_of(one) for one in graph.messages(call_id) if one.get("role") in ("system", "developer"))


def head(messages: Sequence[Any]) -> list[Any]:
    """The messages before the first reply."""
    replies = (index for index, one in enumerate(messages) if one.get("role") == "assistant")
    return list(messages[: next(replies, len(messages))])


def is_foreign(graph: Graph, call_id: str, main: str) -> bool:
    """Another client than the harness: programs that the agent wrote may find the endpoint too."""
    client, harness = (product(graph.calls[one].record) for one in (call_id, main))
    return client is not None and harness is not None and client != harness


def product(record: CallRecord) -> str | None:
    agent = record.labels.get("user_agent")
    return str(agent).split("/")[0].split(" ")[0] if agent else None


def find_discarded(graph: Graph) -> set[str]:
    """Childless calls with the same P as one that was continued."""
    by_prompt: dict[Node, list[str]] = {}
    for call_id in graph.calls:
        by_prompt.setdefault(graph.prompts[call_id], []).append(call_id)
    found = set()
    for same in by_prompt.values():
        if any(graph.calls[one].children for one in same):
            found |= {one for one in same if not graph.calls[one].children}
    return found


def find_continues(graph: Graph, roots: Sequence[str]) -> list[Continues]:
    """Most roots begin with one summary; Pi writes two, of the turns before and of the one under way.

    `roots` are those that may: a call without tools that holds a summary is asked for the next one.
    """
    found: list[Continues] = []
    searched: dict[tuple[str, str], bool] = {}
    for root in roots:
        vias, evidence = summaries_of(graph, root, searched)
        leaf = summarised(graph, vias[0], {edge.via for edge in found} | set(vias)) if vias else None
        since = graph.calls[leaf].record.seq if leaf else -1
        kept = [via for via in vias if via == vias[0] or graph.calls[via].record.seq > since]
        found += [Continues(root, via, leaf, evidence) for via in kept]
    return found


def summaries_of(graph: Graph, root: str, searched: dict[tuple[str, str], bool]) -> tuple[list[str], str]:
    """The calls whose summaries the root may begin with, the likeliest first, and how that is known."""
    record = graph.calls[root].record
    if label(record) in ("compaction", "auxiliary", "foreign"):
        return [], ""
    earlier = [call for call in graph.calls.values() if call.record.seq < record.seq and not call.children]
    for call in reversed(earlier):
        parents = call.record.labels.get("parent"), record.labels.get("parent")
        if label(call.record) == "compaction" and names(call.record) == names(record) and parents[0] == parents[1]:
            taken = any(label(graph.calls[one].record) in (None, "agent") for one in between(graph, call, record))
            return ([], "") if taken else ([call.record.call_id], "wire_label")
    asked, answered = opening(graph, root)
    vias: list[str] = []
    for call in reversed(earlier):
        apart = bool(graph.tools(root)) and not graph.tools(call.record.call_id)
        if vias and not apart:
            continue
        text = f"{asked}\n{answered}" if apart else asked
        key = (call.record.call_id, text)
        if key not in searched:
            searched[key] = holds(text, call)
        vias += [call.record.call_id] if searched[key] else []
    return vias, "visible_text"


def opening(graph: Graph, root: str) -> tuple[str, str]:
    """(what was asked before the first reply, the first reply).

    opencode puts its summary there, as if it had been said: the reply of a call without tools, which no reply of the
    conversation itself is.
    """
    messages = graph.messages(root)
    asked = "\n".join(map(text_of, questions(graph, root)))
    return asked, text_of(next((one for one in messages if one.get("role") == "assistant"), None))


def between(graph: Graph, call: GraphCall, record: CallRecord) -> list[str]:
    """Roots of the same conversation after `call` and before `record`."""
    return [
        root
        for root in graph.roots
        if call.record.seq < (other := graph.calls[root].record).seq < record.seq and names(other) == names(record)
    ]


def holds(text: str, call: GraphCall) -> bool:
    """Whether `text` repeats EVIDENCE_TOKENS or more of the reply; harnesses strip tags around a summary."""
    reply, tokens = call.text, len(call.record.sampled_ids or ())
    if tokens < EVIDENCE_TOKENS or not reply:
        return False
    size = max(len(spoken(call.record)) * EVIDENCE_TOKENS // tokens, 1)
    starts = range(0, len(reply) - size + 1, max(size // 2, 1))
    return any(reply[start : start + size] in text for start in starts)


def spoken(record: CallRecord) -> str:
    """All that the sampled tokens stand for: reasoning, text and tool calls."""
    message = record.message or {}
    reasoning = message.get("reasoning") or message.get("reasoning_content") or ""
    return "".join([reasoning, text_of(message), *(f"{name}{arguments}" for name, arguments in calls_of(record))])


def calls_of(record: CallRecord) -> list[tuple[str, str]]:
    """(name, arguments) of each tool call of the reply."""
    functions = [called.get("function") or {} for called in (record.message or {}).get("tool_calls") or ()]
    return [(str(one.get("name")), str(one.get("arguments"))) for one in functions]


def summarised(graph: Graph, via: str, vias: set[str]) -> str | None:
    """The leaf of the chain that `via` summarised: its parent, or else the latest call of that conversation."""
    call = graph.calls[via]
    if call.parent is not None:
        return call.parent
    before = [other for other in graph.calls.values() if other.record.seq < call.record.seq]
    before = [other for other in before if names(other.record) == names(call.record)]
    talks = [one for one in before if label(one.record) != "compaction" and one.record.call_id not in vias]
    found = [one.record.call_id for one in talks if graph.tools(one.record.call_id)] or [
        one.record.call_id for one in talks if not graph.tools(via)
    ]
    return found[-1] if found else None


def find_returns(graph: Graph) -> list[Returns]:
    found = []
    for call_id, call in graph.calls.items():
        text = call.text.strip()
        if call.role != "subagent" or call.children or len(text) < SHORTEST_REPORT:
            continue
        for other_id, other in graph.calls.items():
            if other.record.seq > call.record.seq and any(text in result for result in new_results(other)):
                found.append(Returns(call_id, other_id))
                break
    return found


def new_results(call: GraphCall) -> list[str]:
    """Tool results that no earlier call was given, and what a conversation was told since: Claude Code reports a
    subagent that ran in the background in a user message."""
    roles = ("tool",) if call.parent is None else ("tool", "user")
    return [text_of(one) for one in call.record.messages.tail if one.get("role") in roles]


def find_spawns(graph: Graph, roots: Sequence[str]) -> list[SpawnedBy]:
    found = []
    for root in roots:
        record = graph.calls[root].record
        parent = record.labels.get("parent")
        callers = [
            call_id
            for call_id, call in graph.calls.items()
            if call.record.seq < record.seq and parent and parent in names(call.record)
        ]
        if callers:
            asked, _ = opening(graph, root)
            told = [call_id for call_id in callers if any(one in asked for one in tasks(graph.calls[call_id].record))]
            found.append(SpawnedBy(root, (told or callers)[-1]))
    return found


def tasks(record: CallRecord) -> list[str]:
    """Texts in the arguments of its tool calls that are long enough to be known again."""
    values: list[Any] = []
    for _, arguments in calls_of(record):
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(arguments)
            values += found.values() if isinstance(found, dict) else []
    return [value for value in values if isinstance(value, str) and len(value) >= SHORTEST_REPORT]


def text_of(message: Mapping[str, Any] | None) -> str:
    """The text of a chat message; parts of a list are put together."""
    content = (message or {}).get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(str(part.get("text") or "") for part in parts if isinstance(part, dict))
