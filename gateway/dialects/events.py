"""The events of one reply, made as its pieces come.

Each dialect has a subclass, `Stream`, with its own events. A reply that is known whole goes through the same code in
big pieces (`whole`), so that it is told in the same events, under the same ids, as one that is passed on while the
engine writes it.

Invariant: parts follow each other, and a part is closed before the next is opened. What ends the reply is last, and it
is one string.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field

from gateway.call import Call, Kind, Piece, Refused, Tool, pieces


@dataclass
class Part:
    """Reasoning, a text, or a tool call."""

    kind: Kind
    index: int
    """Among the parts of the reply."""
    number: int
    """Of a call, among the calls."""
    tool: Tool | None = None
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Events(ABC):
    COUNTS_FIRST = False
    """Whether the first event tells the input tokens."""

    def __init__(self, call: Call) -> None:
        self.call = call
        """When it begins, neither its reply nor the tokens that were sampled are known."""
        self.part: Part | None = None
        """The one that is open."""
        self.parts = self.calls = 0

    def whole(self) -> Iterator[str]:
        """A reply that is known already."""
        yield from self.begun()
        for piece in pieces(self.call.reply):
            yield from self.feed(piece)
        yield from self.end(self.call)

    def feed(self, piece: Piece) -> Iterator[str]:
        part = self.part
        if part is None or piece.kind != part.kind or piece.tool is not None:
            yield from self.close()
            part = self.part = Part(piece.kind, self.parts, self.calls, piece.tool)
            self.parts += 1
            self.calls += piece.kind == "call"
            yield from self.opened(part)
            if piece.tool is not None:
                return  # it names the call, and its arguments follow
        part.texts.append(piece.text)
        yield from self.grown(part, piece.text)

    def end(self, call: Call) -> Iterator[str]:
        """What is missing, once the call is known whole. The last string is the terminal event."""
        if not call.reply.text and not call.reply.tool_calls:
            yield from self.feed(Piece("text", ""))
        yield from self.close()
        yield from self.ended(call)

    def close(self) -> Iterator[str]:
        if self.part is not None:
            yield from self.closed(self.part)
        self.part = None

    @abstractmethod
    def begun(self) -> Iterator[str]: ...

    @abstractmethod
    def opened(self, part: Part) -> Iterator[str]: ...

    @abstractmethod
    def grown(self, part: Part, text: str) -> Iterator[str]:
        """`text` is the last of the part's texts."""

    @abstractmethod
    def closed(self, part: Part) -> Iterator[str]: ...

    @abstractmethod
    def ended(self, call: Call) -> Iterator[str]: ...

    @abstractmethod
    def failed(self, refused: Refused) -> Iterator[str]:
        """The stream breaks off here, whatever has been written."""
