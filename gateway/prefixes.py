"""Prefix trees: which earlier list a new one begins with, exactly and in time linear in what is new.

`IdTree` is a compressed trie of token ids, each edge a run of ids, so that it holds every token once
however many calls share it. Invariant: the edges on the path from the root to a node, put together,
are the ids of that node; splitting an edge leaves every node that was handed out where it was.

`ListTree` does the same for lists of JSON values. Equal means equal as written: 1, 1.0 and true differ,
and so do two orders of an object's members.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.record import ID_BYTES, CallRecord, Delta, dump, pack


class Node:
    """A position in an `IdTree`: `depth` ids from the root, the last of them in `edge`."""

    __slots__ = ("children", "depth", "edge", "owner", "parent")

    def __init__(self, parent: Node | None, edge: bytes, owner: str | None) -> None:
        self.parent = parent
        self.edge = edge
        self.owner = owner
        """A call whose ids pass through here: the first that did."""
        self.depth: int = (parent.depth if parent else 0) + len(edge) // ID_BYTES
        self.children: dict[bytes, Node] = {}

    def ids(self) -> bytes:
        """All ids from the root to here."""
        edges, node = [], self
        while node.parent is not None:
            edges.append(node.edge)
            node = node.parent
        return b"".join(reversed(edges))


class IdTree:
    def __init__(self) -> None:
        self.root = Node(None, b"", None)

    def extend(self, start: Node, ids: bytes, owner: str) -> tuple[Node, Node]:
        """Go from `start` along `ids`, adding what is missing. Returns (the end, the last place known before)."""
        node, at = start, 0
        while at < len(ids):
            child = node.children.get(ids[at : at + ID_BYTES])
            if child is None:
                end = Node(node, ids[at:], owner)
                node.children[end.edge[:ID_BYTES]] = end
                return end, node
            common = common_bytes(child.edge, ids[at : at + len(child.edge)])
            node = child if common == len(child.edge) else split(child, common)
            at += common
        return node, node

    def cut(self, node: Node, depth: int) -> Node:
        """The position `depth` ids from the root on the path to `node`."""
        if not 0 <= depth <= node.depth:
            raise ValueError(f"no prefix of {depth} ids in a list of {node.depth}")
        while node.parent is not None and node.parent.depth >= depth:
            node = node.parent
        return node if node.depth == depth else split(node, len(node.edge) - (node.depth - depth) * ID_BYTES)


def split(node: Node, at: int) -> Node:
    """A new node after `at` bytes of the edge to `node`, which keeps the rest."""
    assert node.parent is not None
    upper = Node(node.parent, node.edge[:at], node.owner)
    node.parent.children[upper.edge[:ID_BYTES]] = upper
    node.parent, node.edge = upper, node.edge[at:]
    upper.children[node.edge[:ID_BYTES]] = node
    return upper


def common_bytes(left: bytes, right: bytes) -> int:
    """Length of the longest common prefix, in whole ids. Comparing slices is memcmp; a loop would be Python."""
    end = min(len(left), len(right))
    if left[:end] == right[:end]:
        return end
    low, high = 0, end // ID_BYTES  # equal up to low; not equal up to high
    while high - low > 1:
        middle = (low + high) // 2
        part = slice(low * ID_BYTES, middle * ID_BYTES)
        low, high = (middle, high) if left[part] == right[part] else (low, middle)
    return low * ID_BYTES


def insert(tree: IdTree, ends: dict[str, Node], record: CallRecord) -> Node | None:
    """Put a stored call into `tree` and its end (of P + S) into `ends`. Returns the end of its P.

    None, and no end, if P is missing or holds invalid ids: no other call's P was written as a delta against
    such a one. A call with an invalid S ends with its P.
    """
    prompt = record.prompt_ids
    if prompt is None or (ids := pack(prompt.tail)) is None:
        return None
    start = tree.cut(ends[prompt.base_call], prompt.keep) if prompt.base_call else tree.root
    node = tree.extend(start, ids, record.call_id)[0]
    ends[record.call_id] = tree.extend(node, pack(record.sampled_ids or ()) or b"", record.call_id)[0]
    return node


class Branch:
    """A position in a `ListTree`: `depth` values from the root, the last of them `value`."""

    __slots__ = ("children", "depth", "owner", "parent", "value")

    def __init__(self, parent: Branch | None, value: Any, owner: str | None) -> None:
        self.parent = parent
        self.value = value
        self.owner = owner
        self.depth: int = parent.depth + 1 if parent else 0
        self.children: list[Branch] = []


class ListTree:
    def __init__(self) -> None:
        self.root = Branch(None, None, None)
        self._ends: dict[str, Branch] = {}

    def shorten(self, values: Sequence[Any], owner: str) -> Delta:
        """`values` as what an earlier list begins with and the rest; remembers them for later lists."""
        node, keep = self.root, 0
        for value in values:
            for child in node.children:
                if identical(child.value, value):
                    node, keep = child, keep + 1
                    break
            else:
                break
        delta = Delta(list(values[keep:]), node.owner, keep)
        self._grow(node, delta.tail, owner)
        return delta

    def insert(self, delta: Delta, owner: str) -> None:
        """Put a stored list into the tree; its base is there already."""
        node = self._ends[delta.base_call] if delta.base_call else self.root
        while node.depth > delta.keep and node.parent is not None:
            node = node.parent
        self._grow(node, delta.tail, owner)

    def _grow(self, node: Branch, tail: Sequence[Any], owner: str) -> None:
        for value in tail:
            child = Branch(node, value, owner)
            node.children.append(child)
            node = child
        self._ends[owner] = node


def identical(left: Any, right: Any) -> bool:
    """Whether both are written alike. `==` alone takes 1, 1.0 and true for one, and any order of members."""
    if left != right:
        return False
    if type(left) is dict and set(map(type, left.values())) == {str} and list(left) == list(right):
        return True  # the usual message; for the others it is worth writing them down
    return dump(left) == dump(right)
