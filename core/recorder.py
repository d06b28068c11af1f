"""Writes one turn: turns a harness's effects into Items and events, in the order of AGENTS_API 5.4.

Text is bounded per field: head and tail are kept, a mark says what is missing, and the item names the field and its
full size. The whole text of a flood is never held.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from core.harnesses import Effect, ItemDone, ItemStarted, Notice, OutputDelta
from core.store import Store, new_id
from core.traces import span

Doc = dict[str, Any]
FIELD_BYTES = 256 << 10
STREAMED_BYTES = 256 << 10  # of an item's output, as deltas
MAX_WARNINGS = 20
PREFIX = "agent.session."
SPAN_TYPES = ("command_execution", "function_call", "mcp_call")


@dataclass
class BoundedText:
    """The first and the last FIELD_BYTES/2 bytes of a text that grows, and its size."""

    head: str = ""
    tail: str = ""
    size: int = 0

    def add(self, text: str) -> None:
        self.size += len(text.encode(errors="replace"))
        room = FIELD_BYTES // 2 - len(self.head)
        if room > 0 and not self.tail:
            self.head += text[:room]
            text = text[room:]
        if text:
            self.tail = (self.tail + text)[-FIELD_BYTES // 2 :]

    def value(self) -> str:
        kept = self.head + self.tail
        missing = self.size - len(kept.encode(errors="replace"))
        return f"{self.head}\n[… {missing} bytes left out …]\n{self.tail}" if missing > 0 else kept

    def members(self) -> Doc:
        """What an item says of it: the text as its output, and its size when that is not all."""
        shown = self.value()
        cut = len(shown.encode(errors="replace")) != self.size
        return {
            "output": shown,
            **({"x_agents_core": {"truncated": {"field": "output", "bytes": self.size}}} if cut else {}),
        }


def bounded(value: Any) -> tuple[Any, int | None]:
    """A text cut to the limit, and its full size in bytes if it was cut."""
    if not isinstance(value, str) or len(value) <= FIELD_BYTES // 4:
        return value, None
    text = BoundedText()
    text.add(value)
    shown = text.value()
    return shown, (text.size if shown != value else None)


def bound_item(item: Doc) -> Doc:
    """The item with every long text cut; `x_agents_core.truncated` names the last one that was."""
    truncated: Doc | None = None

    def visit(value: Any, path: str) -> Any:
        nonlocal truncated
        if isinstance(value, dict):
            return {name: visit(member, f"{path}.{name}".lstrip(".")) for name, member in value.items()}
        if isinstance(value, list):
            return [visit(member, f"{path}[{index}]") for index, member in enumerate(value)]
        shown, size = bounded(value)
        if size is not None:
            truncated = {"field": path, "bytes": size}
        return shown

    cut: Doc = visit(item, "")
    return {**cut, "x_agents_core": {"truncated": truncated}} if truncated else cut


@dataclass
class Entry:
    """An item of the turn while it is open."""

    item: Doc
    index: int
    text: BoundedText = field(default_factory=BoundedText)
    streamed: int = 0
    started_ns: int = field(default_factory=time.time_ns)


def item_span(entry: Entry) -> Doc:
    """The span of a command or tool call. Neither its input nor its output is in there."""
    item, command = entry.item, entry.item["type"] == "command_execution"
    name = "command" if command else f"tool {str(item['name'])[:100]}"
    members = {"item.id": item["id"], "exit_code": item.get("exit_code")}
    kind, failed = ("command" if command else "tool"), item["status"] == "failed"
    return span(kind, name, entry.started_ns, time.time_ns(), failed=failed, **members)


class Recorder:
    """`apply` must run inside a transaction of the store."""

    def __init__(self, store: Store, session_id: str, turn_id: str) -> None:
        self.store = store
        self.session_id = session_id
        self.turn_id = turn_id
        self.entries: dict[str, Entry] = {}
        self.count = 0
        self.warnings: list[Doc] = []

    @classmethod
    def reopened(cls, store: Store, session_id: str, turn_id: str) -> Recorder:
        """The recorder of a turn that an earlier server left, with the items that are still open."""
        recorder = cls(store, session_id, turn_id)
        for item in store.items(turn_id):
            if item["type"] == "message" and item["role"] == "user":
                continue
            if item.get("status") == "in_progress":
                recorder.entries[item["id"]] = Entry(item, recorder.count)
            recorder.count += 1
        return recorder

    def apply(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, ItemStarted):
                self.start(effect.key, effect.item)
            elif isinstance(effect, OutputDelta):
                self.delta(effect.key, effect.text)
            elif isinstance(effect, ItemDone):
                self.finish(effect.key, effect.item)
            elif isinstance(effect, Notice) and len(self.warnings) < MAX_WARNINGS:
                self.warnings.append({"code": "harness_notice", "message": effect.message[:500]})

    def emit(self, kind: str, **members: Any) -> None:
        head = {"session_id": self.session_id, "turn_id": self.turn_id}
        self.store.add_event(self.session_id, kind, {**head, **members})

    def start(self, key: str, item: Doc) -> Entry:
        """Opens an item, or renews the state of one that is open."""
        entry = self.entries.get(key)
        if entry is not None:
            entry.item = {**entry.item, **bound_item(item)}
            self.store.save_item(self.session_id, entry.item)
            return entry
        entry = Entry({"id": new_id(), "turn_id": self.turn_id, **bound_item(item)}, self.count)
        self.count += 1
        self.entries[key] = entry
        self.store.save_item(self.session_id, entry.item)
        self.emit(f"{PREFIX}turn.item.added", output_index=entry.index, item=entry.item)
        return entry

    def delta(self, key: str, text: str) -> None:
        entry = self.entries.get(key)
        if entry is None:
            return
        entry.text.add(text)
        if entry.streamed < STREAMED_BYTES:
            shown = text[: STREAMED_BYTES - entry.streamed]
            entry.streamed += len(shown)
            if entry.streamed >= STREAMED_BYTES:
                shown += "\n[… more output follows, not streamed …]\n"
            self.emit(
                "agent.output.command_execution_output.delta",
                item_id=entry.item["id"],
                output_index=entry.index,
                delta=shown,
            )

    def finish(self, key: str, item: Doc) -> None:
        """Closes an item. Streamed output that the harness does not repeat is filled in."""
        streamed = self.entries[key].text if key in self.entries else BoundedText()
        item = bound_item(item)
        if streamed.size and item.get("output") is None:
            item |= streamed.members()
        elif item["type"] == "command_execution" and item.get("output") is None and streamed.size == 0:
            item["output"] = "" if item.get("exit_code") is not None else None
        if item["type"] == "message" and key not in self.entries:
            self.start(key, {**item, "content": [], "status": "in_progress"})
        entry = self.entries.pop(key, None) or self.opened(key, item)
        entry.item = {**entry.item, **item}
        self.store.save_item(self.session_id, entry.item)
        if item["type"] == "message":
            self.emit_text(entry)
        if item["type"] in SPAN_TYPES:
            self.store.add_span(self.session_id, self.turn_id, item_span(entry))
        if item["type"] != "function_call_output":
            self.emit(f"{PREFIX}turn.item.done", output_index=entry.index, item=entry.item)

    def opened(self, key: str, item: Doc) -> Entry:
        """An item that is first seen when it is done: added in its open state, if its type has one."""
        open_state = item if item["type"] == "function_call_output" else {**item, "status": "in_progress"}
        self.start(key, open_state)
        return self.entries.pop(key)

    def emit_text(self, entry: Entry) -> None:
        """The text events of a message whose CLI reports it whole."""
        for number, part in enumerate(entry.item["content"]):
            place = {"item_id": entry.item["id"], "output_index": entry.index, "content_index": number}
            self.emit(f"{PREFIX}turn.content_part.added", **place, part={"type": "output_text", "text": ""})
            self.emit(f"{PREFIX}turn.output_text.delta", **place, delta=part["text"])
            self.emit(f"{PREFIX}turn.output_text.done", **place, text=part["text"])
            self.emit(f"{PREFIX}turn.content_part.done", **place, part=part)

    def abandon(self) -> None:
        """Closes what is still open, as incomplete, keeping the output seen so far."""
        for entry in self.entries.values():
            entry.item["status"] = "incomplete"
            if entry.text.size:
                entry.item |= entry.text.members()
            self.store.save_item(self.session_id, entry.item)
            self.emit(f"{PREFIX}turn.item.done", output_index=entry.index, item=entry.item)
        self.entries.clear()
