"""The conformance matrix: its cells, what the policy says in each, and the shape of the graph that must come of it.

The same cells are run live by the real CLIs and replayed from the requests that were recorded of them. A shape names
the roots in order of arrival (titles first) as A, B, ..., each with its calls by role, then edges, breaks, calls that
are not in the graph, resends, and the number of trained tokens.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine import call_text
from wire import Drop

from gateway.breaks import explain_breaks
from gateway.graph import Graph
from gateway.record import CallRecord
from gateway.sequences import sequences

Doc = dict[str, Any]
SHELLS = {"exec_command": "cmd", "shell_command": "command", "Bash": "command", "bash": "command"}
CLIS = ("codex", "claude", "claude --bare", "pi", "opencode")

# ── what the policy says ──────────────────────────────────────────────────────────────────────────


def command(asked: Doc, text: str) -> str:
    """A call of the shell tool that the request offers."""
    names = [tool["function"]["name"] for tool in asked["tools"]]
    name = next(name for name in SHELLS if name in names)
    more = {"description": "Make it"} if name in ("Bash", "bash") else {}
    return call_text(name, **{SHELLS[name]: text, **more})


def results(asked: Doc) -> int:
    return sum(message["role"] == "tool" for message in asked["messages"])


def told(asked: Doc, text: str, *roles: str) -> bool:
    return any(text in str(one.get("content")) for one in asked["messages"] if not roles or one["role"] in roles)


def works(asked: Doc) -> str:
    """One tool call, then an answer."""
    if not asked.get("tools"):
        return "A title."
    return "All is done." if results(asked) else "Let me.\n" + command(asked, "touch made1")


def works_in_parallel(asked: Doc) -> str:
    if not asked.get("tools") or results(asked):
        return works(asked)
    return command(asked, "touch made1") + command(asked, "touch made2")


def works_at_length(asked: Doc) -> str:
    """A first reply of more than a connection holds, or of one that is small enough for every output limit."""
    if not asked.get("tools") or results(asked):
        return works(asked)
    return "Let me.\n" + command(asked, "touch made1 # " + '"' * 15_000)


def titles_at_length(asked: Doc) -> str:
    """With time enough for the title to be asked for again: else opencode ends without."""
    if not asked.get("tools"):
        return "A title. " + '"' * 30_000
    return "All is done." if results(asked) else "Let me.\n" + command(asked, "sleep 10; touch made1")


def never_ends(asked: Doc) -> str:
    return command(asked, f"echo {results(asked)}") if asked.get("tools") else "A title."


SWELLING = "head -c 20000 /dev/zero | tr '\\0' x"


def swells(asked: Doc) -> str:
    """Prints more and more."""
    return command(asked, SWELLING) if asked.get("tools") else "A title."


SUMMARY = "<summary>\n" + "The agent printed a lot of x and has yet to make the file. " * 6 + "\n</summary>"


def swells_until_summarised(asked: Doc) -> str:
    """Prints more and more until the harness asks for a summary; then works on."""
    if told(asked, "Respond with TEXT ONLY", "user") or (not asked.get("tools") and told(asked, "x" * 1000)):
        return SUMMARY
    if not asked.get("tools"):
        return "A title."
    if told(asked, "touch made1 ") or any("touch made1" in str(one.get("tool_calls")) for one in asked["messages"]):
        return "All is done."
    if told(asked, "The agent printed"):
        return "Let me.\n" + command(asked, "touch made1")
    return "Printed." if told(asked, "Print.", "user") and results(asked) >= 6 else command(asked, SWELLING)


def delegates(asked: Doc) -> str:
    """The main agent, which alone is told of the task, has a subagent do the work."""
    if not told(asked, "Do the task.", "user"):
        report = "All is done." if not asked.get("tools") or not results(asked) else "The subagent made the file."
        return report if asked.get("tools") and results(asked) else works(asked)
    if not asked.get("tools"):
        return "A title."
    return waits(asked) or ("All is done." if results(asked) else spawning(asked))


def spawning(asked: Doc) -> str:
    """A call of the tool that starts a subagent."""
    names = [tool["function"]["name"] for tool in asked["tools"]]
    name = next(name for name in ("Agent", "Task", "task", "multi_agent_v1__spawn_agent") if name in names)
    if name.startswith("multi_agent"):
        return call_text(name, message="SUBTASK: make it.")
    kind = "general" if name == "task" else "general-purpose"
    return call_text(name, description="Sub", prompt="SUBTASK: make it.", subagent_type=kind)


def waits(asked: Doc) -> str | None:
    """Codex tells the id of an agent that it started, and has a tool to wait for it."""
    last = asked["messages"][-1]
    if last["role"] != "tool" or '"agent_id"' not in str(last["content"]):
        return None
    return call_text("multi_agent_v1__wait_agent", targets=[json.loads(last["content"])["agent_id"]])


# ── the cells ─────────────────────────────────────────────────────────────────────────────────────

STOPS = {"codex": 70_000, "claude": 80_000, "claude --bare": 35_000, "pi": 36_000, "opencode": 60_000}
"""Tokens of context, bytes here: some results beyond each first prompt."""
SUMMARISES = {"claude": 150_000, "claude --bare": 90_000, "pi": 126_000, "opencode": 90_000}
"""Room for what each keeps beside a summary."""
WINDOWS = {"codex": 65_000, "claude": 115_000, "claude --bare": 70_000, "pi": 131_072, "opencode": 95_000}
"""So that each compacts after a few results: when it does depends on what it keeps free for the reply."""


@dataclass(frozen=True)
class Cell:
    script: Callable[[Doc], str]
    clis: tuple[str, ...] = CLIS
    made: tuple[str, ...] = ("made1",)
    says: str = "All is done."
    budgets: Mapping[str, Any] = field(default_factory=dict)
    contexts: Mapping[str, int] = field(default_factory=dict)
    """`max_context`."""
    windows: Mapping[str, int] = field(default_factory=dict)
    """What the CLI believes to be the model's context."""
    faults: tuple[str, ...] = ()
    drop: Drop | None = None
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    exits: Mapping[str, int] | None = None
    """The exit code by CLI; None when nobody waits for it."""

    def limits(self, cli: str) -> Doc:
        return {**self.budgets, **({"max_context": self.contexts[cli]} if self.contexts else {})}


ENDS = dict.fromkeys(CLIS, 0)
CALL_BEGINS = r'content_block_start.*"index":1|response\.output_item\.done|"tool_calls"'
"""The text before it is complete then."""
NATIVE = {"on_context": "native_error", "max_calls": 30}
PARTIAL = dict.fromkeys(("claude", "claude --bare"), ("--include-partial-messages",))
CELLS = {
    "base": Cell(works),
    "parallel tools": Cell(works_in_parallel, made=("made1", "made2")),
    "subagent": Cell(delegates, clis=("codex", "claude", "opencode")),
    "compaction": Cell(
        swells_until_summarised,
        windows=WINDOWS,
        budgets={"max_calls": 30},
        options={"pi": ("Print.",)},
        exits=ENDS,
    ),
    "engine 5xx twice": Cell(works, faults=("500", "500")),
    "dropped connection": Cell(works, drop=Drop("connection")),
    "dropped at the start": Cell(works_at_length, drop=Drop("."), exits=ENDS),
    "dropped stream": Cell(works_at_length, drop=Drop("Let me."), options=PARTIAL, exits=ENDS),
    "dropped call": Cell(works_at_length, drop=Drop(CALL_BEGINS), options=PARTIAL, exits=ENDS),
    "dropped title": Cell(titles_at_length, clis=("opencode",), drop=Drop(".", tools=False), exits=ENDS),
    "overflow": Cell(swells, made=(), says="Step budget exhausted", contexts=STOPS),
    "overflow, native": Cell(
        swells,
        clis=("codex", "claude", "claude --bare"),
        made=(),
        says="",
        contexts=STOPS,
        budgets=NATIVE,
        exits=dict.fromkeys(CLIS, 1),
    ),
    "overflow, summarised": Cell(
        swells_until_summarised,
        clis=(*SUMMARISES,),
        says="",  # pi's events end with the compaction
        contexts=SUMMARISES,
        budgets=NATIVE,
        exits={**ENDS, "opencode": 1},
    ),
    "budget": Cell(never_ends, made=(), says="Step budget exhausted; stopping.", budgets={"max_calls": 3}),
}

# ── the shape of a graph ──────────────────────────────────────────────────────────────────────────


def shape(graph: Graph, records: Iterable[CallRecord]) -> list[str]:
    roots = sorted(graph.roots, key=lambda root: graph.calls[root].role != "auxiliary")
    names = {root: chr(ord("A") + index) for index, root in enumerate(roots)}
    of = {call: names[graph.path(call)[0]] for call in graph.calls}
    roles = {root: Counter(graph.calls[call].role for call in graph.calls if of[call] == names[root]) for root in roots}
    parts = [f"{names[root]} " + " ".join(f"{role} {n}" for role, n in roles[root].items()) for root in roots]
    for edge in graph.continues:
        parts.append(f"{of[edge.root]} continues {of.get(edge.leaf or '')} by {of[edge.via]} ({edge.evidence})")
    parts += [f"{of[edge.subagent_leaf]} returns to {of[edge.parent_call]}" for edge in graph.returns]
    parts += [f"{of[edge.root]} spawned by {of[edge.call]}" for edge in graph.spawned_by]
    parts += [f"{of[one.call]} {one.cls}" for one in explain_breaks(graph)]
    states = Counter(one.state for one in records if one.state != "delivered" or one.call_id in graph.left_out)
    parts += [f"{n} {state}" for state, n in sorted(states.items())]
    resends = sum(one.resends for one in records)
    parts += [f"{resends} resent"] if resends else []
    trained = sum(weight for row in sequences(graph, {}).rows for weight in row["weights"])
    return [*parts, f"{trained:g} trained"]


SHAPES: dict[str, dict[str, list[str]]] = {
    "base": {
        "codex": ["A agent 2", "108 trained"],
        "claude": ["A agent 2", "130 trained"],
        "claude --bare": ["A agent 2", "130 trained"],
        "pi": ["A agent 2", "130 trained"],
        "opencode": ["A auxiliary 1", "B agent 2", "B new_conversation", "130 trained"],
    },
    "parallel tools": {
        "codex": ["A agent 2", "186 trained"],
        "claude": ["A agent 2", "230 trained"],
        "claude --bare": ["A agent 2", "230 trained"],
        "pi": ["A agent 2", "230 trained"],
        "opencode": ["A auxiliary 1", "B agent 2", "B new_conversation", "230 trained"],
    },
    "subagent": {
        "codex": ["A agent 3", "B subagent 2", "B returns to A", "B spawned by A", "B new_conversation", "380 trained"],
        "claude": ["A agent 3", "B subagent 2", "B returns to A", "B new_conversation", "318 trained"],
        "opencode": [
            "A auxiliary 1",
            "B agent 2",
            "C subagent 2",
            "C returns to B",
            "C spawned by B",
            "B new_conversation",
            "C new_conversation",
            "296 trained",
        ],
    },
    "compaction": {
        "codex": [
            "A agent 3",
            "B compaction 1",
            "C agent 2",
            "C continues A by B (wire_label)",
            "B new_conversation",
            "C history_rewritten",
            "444 trained",
        ],
        "claude": [
            "A agent 3 compaction 1",
            "B agent 2",
            "B continues A by A (visible_text)",
            "B history_rewritten",
            "532 trained",
        ],
        "claude --bare": [
            "A agent 3 compaction 1",
            "B agent 2",
            "B continues A by A (visible_text)",
            "B history_rewritten",
            "532 trained",
        ],
        "pi": [
            "A agent 7",
            "B compaction 1",
            "C compaction 1",
            "D agent 2",
            "D continues A by C (visible_text)",
            "D continues A by B (visible_text)",
            "B new_conversation",
            "C new_conversation",
            "D history_rewritten",
            "943 trained",
        ],
        "opencode": [
            "A auxiliary 1",
            "B agent 4",
            "C compaction 1",
            "D agent 2",
            "D continues B by C (visible_text)",
            "B new_conversation",
            "C new_conversation",
            "D history_rewritten",
            "666 trained",
        ],
    },
    "engine 5xx twice": {
        "codex": ["A agent 2", "2 failed", "108 trained"],
        "claude": ["A agent 2", "2 failed", "130 trained"],
        "claude --bare": ["A agent 2", "2 failed", "130 trained"],
        "pi": ["A agent 2", "2 failed", "130 trained"],
        "opencode": ["A auxiliary 1", "B agent 2", "B new_conversation", "2 failed", "130 trained"],
    },
    "dropped connection": {
        "codex": ["A agent 2", "1 resent", "108 trained"],
        "claude": ["A agent 2", "1 resent", "130 trained"],
        "claude --bare": ["A agent 2", "1 resent", "130 trained"],
        "pi": ["A agent 2", "1 resent", "130 trained"],
        "opencode": ["A auxiliary 1", "B agent 2", "B new_conversation", "1 resent", "130 trained"],
    },
    "dropped at the start": {
        "codex": ["A agent 2", "1 resent", "30111 trained"],
        "claude": ["A agent 2", "1 resent", "30133 trained"],
        "claude --bare": ["A agent 2", "1 resent", "30133 trained"],
        "pi": ["A agent 2", "1 resent", "30133 trained"],
        "opencode": ["A auxiliary 1", "B agent 2", "B new_conversation", "1 resent", "30133 trained"],
    },
    "dropped stream": {
        "codex": ["A agent 2", "1 resent", "30111 trained"],
        "claude": ["A agent 2", "1 resent", "30133 trained"],
        "claude --bare": ["A agent 2", "1 resent", "30133 trained"],
        "pi": ["A agent 2", "1 resent", "30133 trained"],
        "opencode": ["A auxiliary 1", "B agent 2", "B new_conversation", "1 resent", "30133 trained"],
    },
    "dropped call": {
        "codex": ["A agent 2", "1 undelivered", "30111 trained"],
        "claude": ["A agent 2", "1 undelivered", "30133 trained"],
        "claude --bare": ["A agent 2", "1 undelivered", "30133 trained"],
        "pi": ["A agent 2", "1 resent", "30133 trained"],
        "opencode": ["A auxiliary 1", "B agent 2", "B new_conversation", "1 resent", "30133 trained"],
    },
    "dropped title": {
        "opencode": ["A auxiliary 1", "B agent 2", "B new_conversation", "1 resent", "140 trained"],
    },
    "overflow": {
        "codex": ["A agent 4", "1 synthetic", "448 trained"],
        "claude": ["A agent 2", "1 synthetic", "268 trained"],
        "claude --bare": ["A agent 2", "1 synthetic", "268 trained"],
        "pi": ["A agent 2", "1 synthetic", "268 trained"],
        "opencode": ["A auxiliary 1", "B agent 2", "B new_conversation", "1 synthetic", "268 trained"],
    },
    "overflow, native": {
        "codex": ["A agent 4", "1 failed", "448 trained"],
        "claude": ["A agent 3", "1 failed", "402 trained"],
        "claude --bare": ["A agent 3", "1 failed", "402 trained"],
    },
    "overflow, summarised": {
        "claude": [
            "A agent 6 compaction 1",
            "B agent 2",
            "B continues A by A (visible_text)",
            "B history_rewritten",
            "1 failed",
            "934 trained",
        ],
        "claude --bare": [
            "A agent 5 compaction 1",
            "B agent 2",
            "B continues A by A (visible_text)",
            "B history_rewritten",
            "1 failed",
            "800 trained",
        ],
        "pi": [
            "A agent 6",
            "B compaction 1",
            "C agent 2",
            "C continues A by B (visible_text)",
            "B new_conversation",
            "C history_rewritten",
            "1 failed",
            "934 trained",
        ],
        "opencode": [
            "A auxiliary 1",
            "B agent 4",
            "C compaction 1",
            "D agent 2",
            "D continues B by C (visible_text)",
            "B new_conversation",
            "C new_conversation",
            "D history_rewritten",
            "1 failed",
            "666 trained",
        ],
    },
    "budget": {
        "codex": ["A agent 3", "1 synthetic", "246 trained"],
        "claude": ["A agent 3", "1 synthetic", "312 trained"],
        "claude --bare": ["A agent 3", "1 synthetic", "312 trained"],
        "pi": ["A agent 3", "1 synthetic", "312 trained"],
        "opencode": ["A auxiliary 1", "B agent 2", "B new_conversation", "1 synthetic", "208 trained"],
    },
}
