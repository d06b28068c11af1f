"""Records of calls for tests of the graph and what follows it: a chat template over bytes, and a harness's memory.

Ids below 256 are bytes of UTF-8, those above are the template's. A reply is sampled as the template would render it,
so that a history that comes back unchanged extends the prompt.
"""

from __future__ import annotations

import json
from itertools import count
from typing import Any

from hypothesis import strategies as st

from gateway.record import CallRecord, Delta

BEGIN, END = 300, 301
ROLES = {"system": 310, "developer": 311, "user": 312, "assistant": 313, "tool": 314}
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
Message = dict[str, Any]


def message(role: str, content: str, **members: Any) -> Message:
    return {"role": role, "content": content, **members}


def tool_call(arguments: str, name: str = "bash", id: str = "t1") -> list[Message]:
    return [{"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}]


def body_ids(one: Message) -> list[int]:
    """What the template writes after the role: reasoning, text, tool calls."""
    calls = "".join(json.dumps(call["function"]) for call in one.get("tool_calls") or ())
    return list(
        f"{one.get('reasoning_content') or ''}|{one.get('content') or ''}|{calls}".encode("utf-8", "surrogatepass")
    )


def render(messages: list[Message], tools: list[Message]) -> list[int]:
    ids = [BEGIN, *json.dumps(tools).encode()]
    for one in messages:
        ids += [BEGIN, ROLES[one["role"]], *body_ids(one), END]
    return [*ids, BEGIN, ROLES["assistant"]]


class Harness:
    """Makes the calls of one attempt, delivered unless told otherwise."""

    def __init__(self, rollout_id: str = "r", attempt_id: int = 1, **labels: Any) -> None:
        self.rollout_id, self.attempt_id, self.labels = rollout_id, attempt_id, labels
        self.numbers = count()
        self.records: list[CallRecord] = []

    def call(
        self,
        messages: list[Message],
        reply: Message | str,
        tools: list[Message] | None = None,
        labels: dict[str, Any] | None = None,
        **members: Any,
    ) -> list[Message]:
        """Records a call; returns the messages with the reply, as an honest harness keeps them."""
        number = next(self.numbers)
        answer = message("assistant", reply) if isinstance(reply, str) else reply
        offered = TOOLS if tools is None else tools
        sampled = [*body_ids(answer), END]
        given: dict[str, Any] = {
            "call_id": f"c{number}",
            "dialect": "chat",
            "model": "m",
            "level": "tokens",
            "labels": {**self.labels, **(labels or {})},
            "messages": Delta(messages),
            "tools": Delta(offered),
            "prompt_ids": Delta(render(messages, offered)),
            "sampled_ids": sampled,
            "logprobs": [-(index + 1) / 64 for index in range(len(sampled))],
            "finish_reason": "stop",
            "message": answer,
            "sampling_applied": {"temperature": 1.0},
            "version_segments": [{"start": 0, "end": len(sampled), "version": "v1"}],
            "version_exact": True,
            "t_terminal": float(number),
            "state": "delivered",
        }
        self.records.append(CallRecord(self.rollout_id, self.attempt_id, seq=number, **(given | members)))
        return [*messages, answer]


START = [message("system", "be brief"), message("user", "count the lines of a.txt")]
SUMMARY = (
    "Summary of the work so far: the file a.txt was opened, has 12 lines, and the answer must be written to answer.json"
)


def base(harness: Harness) -> list[Message]:
    """One tool call and an answer."""
    history = harness.call(START, message("assistant", "", tool_calls=tool_call('{"cmd": "wc -l a.txt"}')))
    return harness.call([*history, message("tool", "12 a.txt", tool_call_id="t1")], "there are 12 lines")


@st.composite
def forests(draw: st.DrawFn) -> list[CallRecord]:
    """Calls of one attempt that extend, fork, drift from or repeat earlier ones, or begin anew."""
    records: list[CallRecord] = []
    ids = st.lists(st.integers(0, 2), max_size=4)
    for seq in range(draw(st.integers(1, 9))):
        prompt = draw(ids)
        if records and draw(st.integers(0, 4)):
            known = draw(st.sampled_from(records))
            assert known.prompt_ids is not None and known.sampled_ids is not None
            whole = [*known.prompt_ids.tail, *known.sampled_ids]
            drifted = len(whole) - draw(st.sampled_from([0, 0, 0, 1, 2]))
            prompt = draw(st.sampled_from([[*whole[: max(drifted, 0)], *prompt], known.prompt_ids.tail]))
        sampled = draw(ids)
        missing = draw(st.sampled_from([0, 0, 0, 0, 1]))
        records.append(
            CallRecord(
                "r",
                1,
                f"c{seq}",
                seq,
                labels={
                    "session": draw(st.sampled_from(["s", "t"])),
                    "kind": draw(st.sampled_from(["agent", None, "auxiliary"])),
                },
                messages=Delta([message("user", "go")]),
                level="tokens",
                prompt_ids=Delta(prompt),
                sampled_ids=sampled,
                logprobs=[-0.5] * max(len(sampled) - missing, 0),
                t_terminal=float(draw(st.integers(0, 3))),
                state=draw(st.sampled_from(["delivered"] * 5 + ["reply", "undelivered", "synthetic", "failed"])),
            )
        )
    return records
