"""The database: sessions, turns, items, events, artifacts. The only writer of state.

SQLite in WAL mode, one connection, used from the event loop's thread only: transactions are short and never span an
`await`. A commit survives the end of the process at any moment; the last commits before a power failure may be lost.

Invariants:
- An event is written in the transaction of the state it tells, so what it announces can be read at once.
- `Store.transaction` calls the listeners after the commit, never before.
- No secret is stored: keys and environment values of a session stay in memory.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1
SCHEMA = """
CREATE TABLE sessions (seq INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, created_at INTEGER NOT NULL,
    last_active_at INTEGER NOT NULL, deleted INTEGER NOT NULL DEFAULT 0, agent_id TEXT NOT NULL,
    environment_id TEXT NOT NULL, metadata TEXT NOT NULL, doc TEXT NOT NULL);
CREATE INDEX sessions_by_environment ON sessions (environment_id);
CREATE TABLE turns (seq INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, session_id TEXT NOT NULL, status TEXT NOT NULL,
    doc TEXT NOT NULL);
CREATE INDEX turns_by_session ON turns (session_id, seq);
CREATE TABLE items (seq INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, session_id TEXT NOT NULL, turn_id TEXT NOT NULL,
    doc TEXT NOT NULL);
CREATE INDEX items_by_session ON items (session_id, seq);
CREATE INDEX items_by_turn ON items (turn_id, seq);
CREATE TABLE artifacts (seq INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, session_id TEXT NOT NULL,
    path TEXT NOT NULL, sha256 TEXT NOT NULL, doc TEXT NOT NULL);
CREATE INDEX artifacts_by_session ON artifacts (session_id, seq);
CREATE TABLE events (seq INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, session_id TEXT NOT NULL, doc TEXT NOT NULL);
CREATE INDEX events_by_session ON events (session_id, seq);
CREATE TABLE spans (seq INTEGER PRIMARY KEY, session_id TEXT NOT NULL, turn_id TEXT NOT NULL, doc TEXT NOT NULL);
CREATE INDEX spans_by_turn ON spans (turn_id, seq);
CREATE INDEX spans_by_session ON spans (session_id);
CREATE TABLE idempotency (scope TEXT NOT NULL, key TEXT NOT NULL, digest TEXT NOT NULL, session_id TEXT NOT NULL,
    PRIMARY KEY (scope, key));
"""

Doc = dict[str, Any]


def new_id() -> str:
    return str(uuid.uuid4())


dumps = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


@dataclass(frozen=True)
class Page:
    """One page of a list: the documents in the asked order, and whether more follow."""

    data: list[Doc]
    has_more: bool


class UnknownCursor(Exception):
    """`after` names no element of the list."""


class StoreUnavailable(Exception):
    """The database cannot be opened; the message is one line that says what to do."""


class StorageFailed(Exception):
    """The disk takes no more, or fails; what was to be written is not there. The message is SQLite's own."""


FAILURES = ("database or disk is full", "disk I/O error", "attempt to write a readonly database", "unable to open")


class Store:
    """All state below the directory `data`: `core.db` and what SQLite keeps beside it."""

    def __init__(self, data: Path) -> None:
        self.path = data / "core.db"
        self.listeners: dict[str, set[Callable[[], None]]] = {}
        self.touched: set[str] = set()
        try:
            self.db = sqlite3.connect(self.path, isolation_level=None, timeout=0)
            self.prepare()
        except sqlite3.OperationalError as error:
            hint = " by another server: use another --data" if "locked" in str(error) else ""
            raise StoreUnavailable(f"cannot open {self.path}: {error}{hint}") from None
        except sqlite3.Error as error:
            raise StoreUnavailable(f"cannot open {self.path}: {error}") from None

    def prepare(self) -> None:
        self.path.chmod(0o600)
        self.db.execute("PRAGMA locking_mode=EXCLUSIVE")  # a second server would fail the turns of the first
        self.db.execute("PRAGMA journal_mode=WAL")
        self.db.execute("PRAGMA synchronous=NORMAL")
        (version,) = self.db.execute("PRAGMA user_version").fetchone()
        if version > SCHEMA_VERSION:
            raise StoreUnavailable(
                f"{self.path} was written by a newer version (schema {version}): update, or use another --data."
            )
        if version == 0:
            self.db.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version={SCHEMA_VERSION}; COMMIT;")

    def close(self) -> None:
        self.db.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Commits what the block wrote, or nothing of it; then wakes the readers of the sessions it touched.

        Raises StorageFailed.
        """
        try:
            self.db.execute("BEGIN IMMEDIATE")
            self.touched = set()
            yield
            self.db.execute("COMMIT")
        except BaseException as error:
            if self.db.in_transaction:  # a full disk may have ended it already
                self.db.execute("ROLLBACK")
            if isinstance(error, sqlite3.OperationalError) and str(error).startswith(FAILURES):
                raise StorageFailed(str(error)) from None
            raise
        for session_id in self.touched:
            for wake in self.listeners.get(session_id, ()):
                wake()

    # ── sessions ──────────────────────────────────────────────────────────────────────────────────

    def add_session(self, doc: Doc) -> int:
        """Stores a new session; returns its number, unique in this database."""
        cursor = self.db.execute(
            "INSERT INTO sessions (id, created_at, last_active_at, agent_id, environment_id, metadata, doc)"
            " VALUES (?,?,?,?,?,?,?)",
            (
                doc["id"],
                doc["created_at"],
                doc["last_active_at"],
                doc["agent"]["id"],
                doc["environment"]["id"],
                dumps(doc["metadata"]),
                dumps(doc),
            ),
        )
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def save_session(self, doc: Doc) -> None:
        self.db.execute(
            "UPDATE sessions SET last_active_at=?, metadata=?, doc=? WHERE id=?",
            (doc["last_active_at"], dumps(doc["metadata"]), dumps(doc), doc["id"]),
        )

    def session(self, session_id: str) -> Doc | None:
        row = self.db.execute("SELECT doc FROM sessions WHERE id=? AND deleted=0", (session_id,)).fetchone()
        return json.loads(row[0]) if row else None

    def session_of_environment(self, environment_id: str) -> Doc | None:
        row = self.db.execute(
            "SELECT doc FROM sessions WHERE environment_id=? AND deleted=0", (environment_id,)
        ).fetchone()
        return json.loads(row[0]) if row else None

    def session_number(self, session_id: str) -> int | None:
        """The number of a session, also of a deleted one; None for an id that never was."""
        row = self.db.execute("SELECT seq FROM sessions WHERE id=?", (session_id,)).fetchone()
        return row[0] if row else None

    def delete_session(self, session_id: str) -> None:
        """Removes all of a session but its id and idempotency key."""
        for table in ("turns", "items", "artifacts", "events", "spans"):
            self.db.execute(f"DELETE FROM {table} WHERE session_id=?", (session_id,))
        self.db.execute("DELETE FROM idempotency WHERE scope=?", (session_id,))
        self.db.execute("UPDATE sessions SET deleted=1, metadata='{}', doc='{}' WHERE id=?", (session_id,))
        self.touched.add(session_id)

    # ── turns, items, artifacts ───────────────────────────────────────────────────────────────────

    def add_turn(self, doc: Doc) -> None:
        self.db.execute(
            "INSERT INTO turns (id, session_id, status, doc) VALUES (?,?,?,?)",
            (doc["id"], doc["session_id"], doc["status"], dumps(doc)),
        )

    def save_turn(self, doc: Doc) -> None:
        self.db.execute("UPDATE turns SET status=?, doc=? WHERE id=?", (doc["status"], dumps(doc), doc["id"]))

    def last_turn(self, session_id: str) -> Doc | None:
        query = "SELECT doc FROM turns WHERE session_id=? ORDER BY seq DESC LIMIT 1"
        row = self.db.execute(query, (session_id,)).fetchone()
        return json.loads(row[0]) if row else None

    def is_first_turn(self, turn: Doc) -> bool:
        query = "SELECT id FROM turns WHERE session_id=? ORDER BY seq LIMIT 1"
        return bool(self.db.execute(query, (turn["session_id"],)).fetchone()[0] == turn["id"])

    def unfinished_turns(self) -> list[Doc]:
        rows = self.db.execute("SELECT doc FROM turns WHERE status IN ('queued','in_progress','waiting') ORDER BY seq")
        return [json.loads(row[0]) for row in rows.fetchall()]

    def save_item(self, session_id: str, doc: Doc) -> None:
        """Stores an item, or its new state under the same id; its place in the order never changes."""
        self.db.execute(
            "INSERT INTO items (id, session_id, turn_id, doc) VALUES (?,?,?,?)"
            " ON CONFLICT (id) DO UPDATE SET doc=excluded.doc",
            (doc["id"], session_id, doc["turn_id"], dumps(doc)),
        )

    def items(self, turn_id: str) -> list[Doc]:
        """All items of a turn, in the order they were first seen."""
        rows = self.db.execute("SELECT doc FROM items WHERE turn_id=? ORDER BY seq", (turn_id,))
        return [json.loads(row[0]) for row in rows.fetchall()]

    def add_artifact(self, doc: Doc, digest: str) -> None:
        self.db.execute(
            "INSERT INTO artifacts (id, session_id, path, sha256, doc) VALUES (?,?,?,?,?)",
            (doc["id"], doc["session_id"], doc["path"], digest, dumps(doc)),
        )

    def artifact(self, session_id: str, artifact_id: str) -> tuple[Doc, str] | None:
        """An artifact and the digest of its bytes."""
        row = self.db.execute(
            "SELECT doc, sha256 FROM artifacts WHERE session_id=? AND id=?", (session_id, artifact_id)
        ).fetchone()
        return (json.loads(row[0]), row[1]) if row else None

    def delete_artifact(self, artifact_id: str) -> None:
        self.db.execute("DELETE FROM artifacts WHERE id=?", (artifact_id,))

    def digests(self, session_id: str) -> set[str]:
        """What the session's artifacts hold."""
        return {row[0] for row in self.db.execute("SELECT sha256 FROM artifacts WHERE session_id=?", (session_id,))}

    def published(self, session_id: str) -> dict[str, str]:
        """Path → digest of the latest artifact of each path."""
        rows = self.db.execute("SELECT path, sha256 FROM artifacts WHERE session_id=? ORDER BY seq", (session_id,))
        return dict(rows.fetchall())

    def add_span(self, session_id: str, turn_id: str, doc: Doc) -> None:
        """Stores a span of a turn; one that comes after the turn's deletion goes nowhere."""
        values = (session_id, turn_id, dumps(doc), turn_id)
        query = (
            "INSERT INTO spans (session_id, turn_id, doc) SELECT ?,?,? WHERE EXISTS (SELECT 1 FROM turns WHERE id=?)"
        )
        self.db.execute(query, values)

    def spans(self, turn_id: str) -> list[Doc]:
        rows = self.db.execute("SELECT doc FROM spans WHERE turn_id=? ORDER BY seq", (turn_id,))
        return [json.loads(row[0]) for row in rows.fetchall()]

    # ── reading ───────────────────────────────────────────────────────────────────────────────────

    def one(self, table: str, session_id: str, element_id: str) -> Doc | None:
        row = self.db.execute(
            f"SELECT doc FROM {table} WHERE session_id=? AND id=?", (session_id, element_id)
        ).fetchone()
        return json.loads(row[0]) if row else None

    def page(self, table: str, where: Doc, *, limit: int, descending: bool, after: str | None) -> Page:
        """Rows of `table` whose columns equal `where`, in order of creation. Raises UnknownCursor."""
        conditions = [f"{column}=?" for column in where]
        values = list(where.values())
        return self.select(table, conditions, values, limit=limit, descending=descending, after=after)

    def session_page(self, metadata: dict[str, str], agent_id: str | None, **paging: Any) -> Page:
        """Sessions that carry all of `metadata`, exactly."""
        conditions, values = ["deleted=0"], list[Any]()
        for key, value in metadata.items():
            conditions.append("EXISTS (SELECT 1 FROM json_each(metadata) WHERE key=? AND value=?)")
            values += [key, value]
        if agent_id is not None:
            conditions.append("agent_id=?")
            values.append(agent_id)
        return self.select("sessions", conditions, values, **paging)

    def select(
        self,
        table: str,
        conditions: list[str],
        values: list[Any],
        *,
        limit: int,
        descending: bool,
        after: str | None,
    ) -> Page:
        matching = " AND ".join(conditions) or "1"
        query, parameters = f"SELECT doc FROM {table} WHERE {matching}", list(values)
        if after is not None:
            row = self.db.execute(f"SELECT seq FROM {table} WHERE id=? AND {matching}", [after, *values]).fetchone()
            if row is None:
                raise UnknownCursor(after)
            query += f" AND seq {'<' if descending else '>'} ?"
            parameters.append(row[0])
        query += f" ORDER BY seq {'DESC' if descending else 'ASC'} LIMIT ?"
        rows = self.db.execute(query, [*parameters, limit + 1]).fetchall()
        return Page([json.loads(row[0]) for row in rows[:limit]], len(rows) > limit)

    # ── events and keys ───────────────────────────────────────────────────────────────────────────

    def add_event(self, session_id: str, kind: str, members: Doc) -> None:
        event_id = new_id()
        doc = {"type": kind, "event_id": event_id, **members}
        self.db.execute("INSERT INTO events (id, session_id, doc) VALUES (?,?,?)", (event_id, session_id, dumps(doc)))
        self.touched.add(session_id)

    def events(self, session_id: str, after: int, limit: int, size: int) -> list[tuple[int, str, str]]:
        """(position, event id, JSON) of the events behind position `after`: `limit` at the most, and no more once they
        hold `size` characters."""
        query = "SELECT seq, id, doc FROM events WHERE session_id=? AND seq>? ORDER BY seq LIMIT ?"
        found, held = list[tuple[int, str, str]](), 0
        with contextlib.closing(self.db.execute(query, (session_id, after, limit))) as rows:
            for row in rows:
                found.append(row)
                held += len(row[2])
                if held >= size:
                    break
        return found

    def events_behind(self, session_id: str, after: int) -> tuple[int, int]:
        """How many events lie behind position `after`, and their characters."""
        query = "SELECT COUNT(*), COALESCE(SUM(LENGTH(doc)), 0) FROM events WHERE session_id=? AND seq>?"
        count, size = self.db.execute(query, (session_id, after)).fetchone()
        return count, size

    def event_position(self, session_id: str, event_id: str | None) -> int:
        """Where a reader starts: behind `event_id`, at the first event if it is unknown, at the end if it is None."""
        if event_id is None:
            row = self.db.execute("SELECT MAX(seq) FROM events WHERE session_id=?", (session_id,)).fetchone()
        else:
            query = "SELECT seq FROM events WHERE session_id=? AND id=?"
            row = self.db.execute(query, (session_id, event_id)).fetchone()
        return row[0] or 0 if row else 0

    @contextlib.contextmanager
    def listening(self, session_id: str, wake: Callable[[], None]) -> Iterator[None]:
        """`wake` is called after each commit that wrote an event of the session."""
        self.listeners.setdefault(session_id, set()).add(wake)
        try:
            yield
        finally:
            self.listeners[session_id].discard(wake)
            if not self.listeners[session_id]:
                del self.listeners[session_id]

    def remembered(self, scope: str, key: str) -> tuple[str, str] | None:
        """(digest of the request, session id) of an idempotency key."""
        query = "SELECT digest, session_id FROM idempotency WHERE scope=? AND key=?"
        row = self.db.execute(query, (scope, key)).fetchone()
        return (row[0], row[1]) if row else None

    def remember(self, scope: str, key: str, digest: str, session_id: str) -> None:
        self.db.execute("INSERT INTO idempotency VALUES (?,?,?,?)", (scope, key, digest, session_id))
