"""Whose call it is: rollouts and attempts by the path, keys, and what an attempt may still spend.

Two kinds of key. An attempt key is issued when an attempt is opened on the control listener; it can do one thing,
generate for that attempt, and path and key must agree. The run key is for deployments that keep it outside the
sandbox: it opens a rollout at the first call on an unused id and is good for those that it opened.

Invariants: a foreign path and one that does not exist are answered with identical bytes; a closed attempt is never
opened again, whatever the key and however often the gateway starts; no key is written to the disk, only digests.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from gateway.call import Refused
from gateway.conversion import Original
from gateway.record import CallRecord, attempt_of
from gateway.store import AttemptLog, Redactor, Store, StoreError, log_path, read

if TYPE_CHECKING:
    from gateway.calls import Exchange
    from gateway.token_in import Replies

ID_CHARACTERS = 512
KEY_SECONDS = 7 * 24 * 3600.0
"""Life of an attempt key, unless the opening says otherwise."""
KEPT_EXCHANGES = 8
"""Answered calls of an attempt that a resend can still be recognised by."""

CLOSED = "attempt_closed"
FORBIDDEN = "this key is not good for this path"


@dataclass(frozen=True)
class Budgets:
    """What an attempt may spend; None is no limit."""

    max_calls: int | None = None
    max_sampled_tokens: int | None = None
    max_context: int | None = None
    max_wall_s: float | None = None
    on_context: str = "stop"
    """`stop`, or `native_error` so that the harness may compact."""

    @classmethod
    def of(cls, value: Mapping[str, Any], default: Budgets) -> Budgets:
        """The budgets in a JSON object, those it does not name from `default`; ValueError says what is wrong."""
        members = {**asdict(default), **value}
        if odd := set(members) - set(asdict(default)):
            raise ValueError(f"unknown budgets: {', '.join(sorted(odd))}; there are: {', '.join(asdict(default))}")
        for name, limit in members.items():
            if name == "on_context":
                if limit not in ("stop", "native_error"):
                    raise ValueError("on_context is stop or native_error")
            elif limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float) or limit <= 0):
                raise ValueError(f"{name} is a number above 0, or null")
        return cls(**members)


@dataclass
class Attempt:
    """One execution of a rollout."""

    rollout_id: str
    attempt_id: int
    log: AttemptLog
    purpose: str
    budgets: Budgets
    opened: float
    """Monotonic seconds."""
    expires: float | None = None
    closed: str | None = None
    """Why no call is answered any more."""
    calls: int = 0
    sampled: int = 0
    context: int = 0
    """Prompt tokens of the last call."""
    stops: int = 0
    """Synthetic stops in a row."""
    originals: dict[str, Original] = field(default_factory=dict)
    """Tool calls of the attempt by their ids without prefix."""
    reported: set[tuple[str, str, str]] = field(default_factory=set)
    """Transforms that an earlier call of the attempt has recorded: like messages, they are kept as a delta."""
    exchanges: list[Exchange] = field(default_factory=list)
    replies: Replies | None = None
    """What a prompt of stored ids can go on from; None until token_in.py asks."""
    stored: dict[tuple[str, str], CallRecord] = field(default_factory=dict)
    """Replies of an earlier life of the gateway that were not delivered, by dialect and digest."""

    @property
    def path_id(self) -> str:
        return self.rollout_id if self.attempt_id == 1 else f"{self.rollout_id}~{self.attempt_id}"

    def check(self) -> None:
        if self.closed is None and self.expires is not None and time.monotonic() > self.expires:
            self.closed = "expired"
        if self.closed is not None:
            raise closed_refusal(self.closed)

    def remember(self, exchange: Exchange) -> None:
        self.exchanges.append(exchange)
        answered = [one for one in self.exchanges if one.settled]
        for old in answered[: max(len(answered) - KEPT_EXCHANGES, 0)]:
            self.exchanges.remove(old)

    def resend_of(self, dialect: str, digest: str, retry_count: int | None) -> Exchange | None:
        """The call that a request with this digest is a resend of, or None for a genuine one."""
        same = [one for one in self.exchanges if (one.dialect.NAME, one.digest) == (dialect, digest) and not one.failed]
        waiting = next((one for one in same if not one.connected and not one.delivered), None)
        if waiting is not None or not retry_count:
            return waiting
        return next((one for one in reversed(same) if one.delivered), None)

    def exhausted(self) -> str | None:
        """The budget that is used up, with its value."""
        budgets = self.budgets
        spent = (
            ("max_calls", self.calls, budgets.max_calls),
            ("max_sampled_tokens", self.sampled, budgets.max_sampled_tokens),
            ("max_wall_s", time.monotonic() - self.opened, budgets.max_wall_s),
        )
        return next((f"{name} {limit:g}" for name, used, limit in spent if limit is not None and used >= limit), None)

    def wall_left(self) -> float | None:
        limit = self.budgets.max_wall_s
        return None if limit is None else max(self.opened + limit - time.monotonic(), 0.0)

    def sampled_left(self) -> int | None:
        limit = self.budgets.max_sampled_tokens
        return None if limit is None else max(int(limit) - self.sampled, 1)

    def recall(self, record: CallRecord) -> None:
        """Count a call of an earlier life of the gateway."""
        for index, called in enumerate((record.message or {}).get("tool_calls") or ()):
            function = called.get("function") or {}
            original = Original(str(called.get("id")), str(function.get("arguments")))
            self.originals[f"{record.call_id}{index:02d}"] = original
        if record.state in ("reply", "delivered", "undelivered"):
            self.calls += 1
            self.sampled += int(record.usage.get("output", 0))
        if record.state in ("reply", "undelivered"):
            self.stored[record.dialect, record.body_digest] = record


def closed_refusal(why: str) -> Refused:
    return Refused(409, f"this attempt is over ({why})", CLOSED)


class Attempts:
    """All attempts of this gateway, and who may use them."""

    def __init__(
        self, store: Store, run_key: str, secret_values: Iterable[str], purpose: str, budgets: Budgets, disk: Executor
    ) -> None:
        self.store = store
        self.run_key = digest_of(run_key)
        self.secrets = [run_key, *secret_values]
        self.purpose = purpose
        self.budgets = budgets
        self.disk = disk
        self.open_attempts: dict[tuple[str, int], Attempt] = {}
        self.keys: dict[str, tuple[str, int]] = {}
        self.opening = asyncio.Lock()

    async def admit(self, path_id: str, keys: Iterable[str]) -> Attempt:
        """The attempt that may generate with these keys on this path; 401, 403 or 409."""
        identity = attempt_of(path_id)
        digests = {digest_of(key) for key in keys if key}
        owners = {self.keys[digest] for digest in digests if digest in self.keys}
        if not owners and self.run_key not in digests:
            if not await self._reopened(identity, digests):
                raise Refused(
                    401, "no valid API key: send it as Bearer, x-api-key or x-goog-api-key", "invalid_api_key"
                )
            owners = {identity}
        attempt = self.open_attempts.get(identity)
        if owners and owners != {identity}:
            raise Refused(403, FORBIDDEN, "forbidden")
        if not owners:
            if attempt is None:
                attempt = await self._open_by_run_key(path_id, identity)
            attempt.check()
            if attempt.log.trace.info.get("opened_by") != "run_key":
                raise Refused(403, FORBIDDEN, "forbidden")
        assert attempt is not None
        attempt.check()
        return attempt

    async def _open_by_run_key(self, path_id: str, identity: tuple[str, int]) -> Attempt:
        if len(path_id) > ID_CHARACTERS or not path_id.isprintable():
            raise Refused(404, f"a rollout id has at most {ID_CHARACTERS} printable characters", "rollout_not_found")
        async with self.opening:
            return self.open_attempts.get(identity) or await self._load(
                identity, {"opened_by": "run_key", "purpose": self.purpose, "budgets": asdict(self.budgets)}
            )

    async def _reopened(self, identity: tuple[str, int], digests: set[str]) -> bool:
        """Whether one of these is the key of an attempt that was opened before the gateway started."""
        path = log_path(self.store.folder, *identity)
        if not digests or identity in self.open_attempts or not path.exists():
            return False
        async with self.opening:
            info = (await self.off_loop(read, path)).info
            known = digests & {info.get("key_sha256")}
            if known and identity not in self.open_attempts:
                await self._load(identity, info)
                self.keys[known.pop()] = identity
            return identity in self.keys.values()

    async def open(
        self,
        rollout_id: str,
        attempt_id: int,
        purpose: str,
        budgets: Budgets,
        expires_s: float,
        info: Mapping[str, Any],
    ) -> tuple[Attempt, str]:
        """A new attempt and its key; 409 when it was opened before."""
        identity, key = (rollout_id, attempt_id), secrets.token_urlsafe(32)
        async with self.opening:
            if identity in self.open_attempts or log_path(self.store.folder, *identity).exists():
                raise Refused(409, f"attempt {attempt_id} of {rollout_id!r} was opened before", "attempt_exists")
            described: dict[str, Any] = {"opened_by": "control", "purpose": purpose, "budgets": asdict(budgets)}
            described |= {"key_sha256": digest_of(key), "expires_at": time.time() + expires_s, "caller": dict(info)}
            attempt = await self._load(identity, described, key)
        self.keys[digest_of(key)] = identity
        return attempt, key

    async def _load(self, identity: tuple[str, int], info: Mapping[str, Any], key: str = "") -> Attempt:
        self.store.redact = Redactor([*self.secrets, key])
        log = await self.off_loop(self.store.open, *identity, info)
        trace = log.trace
        now, wall = time.monotonic(), time.time()
        told = trace.info.get("budgets")
        attempt = Attempt(
            *identity,
            log,
            purpose=str(trace.info.get("purpose", self.purpose)),
            budgets=Budgets.of(told, Budgets()) if isinstance(told, dict) else self.budgets,
            opened=now - max(wall - trace.opened_at, 0.0),
            closed="released" if trace.released is not None else "dropped" if trace.dropped else None,
        )
        if "expires_at" in trace.info:
            attempt.expires = now + trace.info["expires_at"] - wall
        for record in log.records():
            attempt.recall(record)
        self.open_attempts[identity] = attempt
        return attempt

    async def find(self, rollout_id: str, attempt_id: int) -> Attempt:
        """An attempt for the control listener, from the disk if need be; 404."""
        identity = (rollout_id, attempt_id)
        async with self.opening:
            if identity not in self.open_attempts:
                if not log_path(self.store.folder, *identity).exists():
                    raise Refused(404, f"there is no attempt {attempt_id} of {rollout_id!r}", "attempt_not_found")
                await self._load(identity, {})
        return self.open_attempts[identity]

    async def off_loop(self, function: Any, *arguments: Any) -> Any:
        """Call something that waits for the disk; what the disk refuses is 503."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self.disk, function, *arguments)
        except StoreError as error:
            raise Refused(503, f"the trace cannot be written: {error}", "store_failed") from None


def digest_of(key: str) -> str:
    return sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
