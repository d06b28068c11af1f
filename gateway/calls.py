"""The life of a call: from an admitted request to a durable reply, whoever is still there to take it.

An `Exchange` is one call of an attempt. The engine's work belongs to it and not to a connection, so a resend after a
dropped connection joins it, or gets its stored reply under the same ids. Order of work: the reply is complete, it is
on the disk, the terminal event is written (delivery.py), `delivered` is noted.

Invariants: a reply that a harness sees is durable before; a call that fails or is cancelled leaves a record without
tokens; text written here (budget stops) is never part of any S.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field, replace
from secrets import token_hex
from typing import Any, Protocol

from gateway.attempts import Attempt, Attempts, closed_refusal
from gateway.call import Call, Refused, Reply, Request, Tool, ToolCall, Usage
from gateway.conversion import Conversion, Original
from gateway.dialects.events import Events
from gateway.engine import UNNAMED, Answer, Engine, Overflow
from gateway.prompt import Policy, Prompt, prompt
from gateway.record import CallRecord, Delta, Doc, Finding, VersionSegment, measured_findings
from gateway.streaming import Feed, follow
from gateway.token_in import TokenIn, Turn
from gateway.weights import Weights

STOP_TEXT = "Step budget exhausted; stopping."
STOPS = 3
"""Synthetic stops in a row before the attempt is closed."""


class Dialect(Protocol):
    """What each module in `dialects/` offers to recorded calls."""

    NAME: str
    PATH: str

    @property
    def Stream(self) -> type[Events]: ...

    def parse(self, body: dict[str, Any]) -> Request: ...
    def convert(self, body: dict[str, Any], conversion: Conversion) -> None: ...
    def unary(self, call: Call) -> dict[str, Any]: ...
    def error(self, refused: Refused) -> dict[str, Any]: ...


@dataclass
class Exchange:
    """One call and its clients; at most one of them is connected at a time."""

    attempt: Attempt
    dialect: Dialect
    request: Request
    digest: str
    record: CallRecord
    """As far as it is known."""
    task: asyncio.Task[Call] = field(init=False)
    connected: bool = True
    answered: bool = False
    """The reply is on its way to the disk, or there: nothing is left to cancel."""
    delivered: bool = False
    cancelled_because: str = ""
    known: Doc = field(default_factory=dict)
    """Members that the record has when it is done."""
    feed: Feed | None = None
    """Its reply as long as the engine writes it, in live mode."""
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def id(self) -> str:
        return self.record.call_id

    @property
    def failed(self) -> bool:
        if not self.task.done():
            return bool(self.cancelled_because)
        return self.task.cancelled() or self.task.exception() is not None

    @property
    def settled(self) -> bool:
        """No client waits and none is waited for."""
        return self.delivered or self.failed

    def done(self, **members: Any) -> CallRecord:
        return replace(self.record, **self.known, **members)

    @property
    def begun(self) -> bool:
        """Clients may have some of the reply."""
        return self.feed is not None and self.feed.begun

    def call(self, reply: Reply, usage: Usage) -> Call:
        return Call(self.id, self.request, reply, usage, self.created)

    def cancel(self, because: str) -> None:
        if not self.answered and not self.task.done():
            self.cancelled_because = because
            self.task.cancel()


class Calls:
    """Begins, resumes and ends exchanges."""

    def __init__(
        self,
        engine: Engine,
        attempts: Attempts,
        weights: Weights,
        policy: Policy,
        grace_s: float,
        live: bool = False,
        token_in: TokenIn | None = None,
    ) -> None:
        self.engine = engine
        self.token_in = token_in
        self.attempts = attempts
        self.weights = weights
        self.policy = policy
        self.grace_s = grace_s
        self.live = live
        self.background: set[asyncio.Task[Any]] = set()

    def begin(
        self, attempt: Attempt, dialect: Dialect, request: Request, body: Doc, digest: str, labels: Doc, path: str
    ) -> Exchange:
        """A call of this request; refused at once when it cannot be put to the engine."""
        conversion = Conversion(attempt.originals)
        dialect.convert(body, conversion)
        capabilities = self.engine.capabilities
        asked = prompt(request, conversion, attempt.purpose, self.policy, self.engine.model, capabilities)
        record = CallRecord(
            rollout_id=attempt.rollout_id,
            attempt_id=attempt.attempt_id,
            call_id=token_hex(12),
            seq=attempt.log.next_seq(),
            dialect=dialect.NAME,
            path=path,
            body_digest=digest,
            labels=labels,
            messages=Delta(asked.messages),
            tools=Delta(asked.tools),
            transforms=new_transforms(attempt, conversion.transforms),
            sampling_requested=asked.requested,
            engine=self.engine.root,
            model=self.engine.model,
            level=capabilities.level,
            findings=asked.findings,
            t_arrival=time.monotonic(),
        )
        # The conversation is in the record; a kept exchange need not hold it too.
        kept = replace(request, conversation={}, results=())
        exchange = Exchange(
            attempt, dialect, kept, digest, record, feed=Feed() if self.live and request.stream else None
        )
        exchange.task = asyncio.create_task(self.run(exchange, asked))
        exchange.task.add_done_callback(report)
        attempt.remember(exchange)
        return exchange

    def resume(self, attempt: Attempt, dialect: Dialect, request: Request, record: CallRecord) -> Exchange:
        """A call whose reply is on the disk since before the gateway started."""
        exchange = Exchange(attempt, dialect, replace(request, conversation={}, results=()), record.body_digest, record)
        reply = reply_of(record.message or {}, record.finish_reason, record.stop_reason, request)

        async def stored() -> Call:
            return exchange.call(reply, Usage(**record.usage))

        exchange.answered = True
        exchange.task = asyncio.create_task(stored())
        attempt.remember(exchange)
        return exchange

    def join(self, exchange: Exchange) -> None:
        """The harness sent it again."""
        exchange.connected = True
        exchange.record = replace(exchange.record, resends=exchange.record.resends + 1)
        if exchange.task.done():
            self.later(self.attempts.off_loop(exchange.attempt.log.resent, exchange.id, exchange.record.resends))

    def leave(self, exchange: Exchange) -> None:
        """The client hung up before it had the reply."""
        exchange.connected = False
        exchange.task.add_done_callback(lambda _: self.unclaimed(exchange))  # called also when it is done already
        if exchange.task.done():
            return
        if self.grace_s > 0:
            asyncio.get_running_loop().call_later(self.grace_s, self.give_up, exchange)
        else:
            self.give_up(exchange)

    def unclaimed(self, exchange: Exchange) -> None:
        """The reply is there; unless a resend came for it meanwhile, nobody takes it."""
        if not (exchange.connected or exchange.delivered or exchange.failed):
            self.later(self.attempts.off_loop(exchange.attempt.log.undelivered, exchange.id, "client hung up"))

    def give_up(self, exchange: Exchange) -> None:
        if not exchange.connected:
            exchange.cancel("client hung up")

    def deliver(self, exchange: Exchange) -> None:
        """Its terminal event was written."""
        exchange.connected, exchange.delivered = False, True
        log, now = exchange.attempt.log, time.monotonic()
        if not log.delivered_at_once(exchange.id, now):
            self.later(self.attempts.off_loop(log.delivered, exchange.id, now))

    def close(self, attempt: Attempt, why: str) -> None:
        """No further call; what the engine does for it is cancelled."""
        attempt.closed = attempt.closed or why
        for exchange in attempt.exchanges:
            exchange.cancel(why)

    def later(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work)
        self.background.add(task)
        task.add_done_callback(self.background.discard)

    async def run(self, exchange: Exchange, asked: Prompt) -> Call:
        """The reply, durable; Refused with what the harness is told."""
        attempt = exchange.attempt
        try:
            if attempt.stops >= STOPS:
                attempt.closed = "its budget is used up"
                raise closed_refusal(attempt.closed)
            if (spent := attempt.exhausted()) is not None:
                return await self.stop(exchange, spent)
            return await self.generate(exchange, asked)
        except Refused as refused:
            await self.failed(exchange, refused.message)
            raise
        except Exception as error:
            await self.failed(exchange, f"the gateway failed: {type(error).__name__}")
            raise
        except asyncio.CancelledError:
            self.later(self.failed(exchange, exchange.cancelled_because or "the gateway stopped"))
            if attempt.closed is not None:
                raise closed_refusal(attempt.closed) from None
            raise
        finally:
            exchange.feed = None  # those who read it keep it; whoever comes now gets the reply itself

    async def generate(self, exchange: Exchange, asked: Prompt) -> Call:
        attempt = exchange.attempt
        attempt.calls += 1
        try:
            answer, before = await asyncio.wait_for(self.ask(exchange, asked), attempt.wall_left())
        except BaseException as error:
            attempt.calls -= 1  # only what the engine answered was spent
            if exchange.begun:
                raise broken_off(error, attempt) from None
            if isinstance(error, asyncio.TimeoutError):
                return await self.stop(exchange, attempt.exhausted() or "max_wall_s")
            if isinstance(error, Overflow) and attempt.budgets.on_context == "stop":
                return await self.stop(exchange, "the engine's context")
            raise
        after = await self.weights.version()
        return await self.store(exchange, answer, before, after)

    async def ask(self, exchange: Exchange, asked: Prompt) -> tuple[Answer, str | None]:
        """(the engine's answer, the version of the weights before it)."""
        attempt = exchange.attempt
        engine = self.token_in.turn(attempt, exchange.record, asked) if self.token_in else self.engine
        await self.check_context(engine, attempt, asked)
        limits = [limit for limit in (asked.applied.get("max_completion_tokens"), attempt.sampled_left()) if limit]
        asked = asked.limited(min(limits, default=None))
        async with self.weights.generating():
            before = await self.weights.version()
            exchange.known["t_engine_start"] = time.monotonic()
            try:
                answer = await self.answer(engine, exchange, asked)
            except Overflow:
                if "max_completion_tokens" not in asked.applied:
                    raise
                # Engines refuse prompt + limit beyond their context. Without a limit they stop at the context, which
                # is then below the limit; a prompt that is too long by itself is refused again.
                asked = asked.limited(None)
                answer = await self.answer(engine, exchange, asked)
        exchange.known |= {"t_engine_end": time.monotonic(), "sampling_applied": asked.applied}
        return answer, before

    async def answer(self, engine: Engine | Turn, exchange: Exchange, asked: Prompt) -> Answer:
        feed, request = exchange.feed, exchange.request
        if feed is None:
            return await engine.chat(asked.body())

        async def count() -> int:
            return await self.engine.count(asked.messages, asked.tools) if exchange.dialect.Stream.COUNTS_FIRST else 0

        return await follow(self.engine, asked.body(), request.offered, feed, count)

    async def check_context(self, engine: Engine | Turn, attempt: Attempt, asked: Prompt) -> None:
        most = attempt.budgets.max_context
        if most is not None and (found := await engine.count(asked.messages, asked.tools)) > most:
            text = f"maximum context length is {most:g} tokens, and the prompt has {found}: prompt is too long"
            raise Overflow(400, f"{text}: {found} tokens > {most:g} maximum", "context_length_exceeded")

    async def store(self, exchange: Exchange, answer: Answer, before: str | None, after: str | None) -> Call:
        attempt = exchange.attempt
        segments, exact = versions(answer, before, after)
        inexact = "the weights changed during the call, and the engine does not say where"
        found: list[Finding] = []
        if segments and not exact:
            found.append({"level": "warn", "code": "version_inexact", "detail": inexact})
        record = exchange.done(
            prompt_ids=None if answer.prompt_ids is None else Delta(answer.prompt_ids),
            sampled_ids=answer.sampled_ids,
            logprobs=answer.logprobs,
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason,
            message=answer.message,
            parse_ok=answer.parse_ok,
            usage=vars(answer.usage),
            version_segments=segments,
            version_exact=exact,
            findings=[*exchange.record.findings, *answer.findings, *found],
            transforms=[*exchange.record.transforms, *answer.transforms],
        )
        reply = reply_of(answer.message, answer.finish_reason, answer.stop_reason, exchange.request)
        call = exchange.call(reply, answer.usage)
        attempt.sampled += answer.usage.output
        attempt.context, attempt.stops = answer.usage.input, 0
        await self.keep(exchange, record.with_findings(measured_findings(record)))
        for index, called in enumerate(answer.message.get("tool_calls") or ()):
            original = Original(str(called.get("id")), str(called["function"]["arguments"]))
            attempt.originals[f"{exchange.id}{index:02d}"] = original
        return call

    async def stop(self, exchange: Exchange, spent: str) -> Call:
        """A normal assistant turn of the gateway's own, because a budget is used up."""
        attempt = exchange.attempt
        attempt.stops += 1
        usage = Usage(attempt.context, 0)
        message = {"role": "assistant", "content": STOP_TEXT}
        why = f"budget used up: {spent}"
        record = exchange.done(state="synthetic", message=message, stop_reason=why, usage=vars(usage))
        await self.keep(exchange, record)
        return exchange.call(Reply(STOP_TEXT), usage)

    async def keep(self, exchange: Exchange, record: CallRecord) -> None:
        exchange.answered = True
        log = exchange.attempt.log
        stored = await asyncio.shield(self.attempts.off_loop(log.reply, record))
        resends = exchange.record.resends
        exchange.record = replace(stored, resends=resends)
        if resends != stored.resends:  # it came again while the reply was on its way to the disk
            self.later(self.attempts.off_loop(log.resent, exchange.id, resends))

    async def failed(self, exchange: Exchange, why: str) -> None:
        await self.keep(exchange, exchange.done(state="failed", evidence=why))


def broken_off(error: BaseException, attempt: Attempt) -> BaseException:
    """What a harness is told that has a part of the reply: an error, never a normal end. Its resend is a new call."""
    if isinstance(error, asyncio.TimeoutError):
        return Refused(502, f"budget used up: {attempt.exhausted() or 'max_wall_s'}", "budget_used_up")
    return Refused(502, error.message, error.code) if isinstance(error, Refused) else error


def report(task: asyncio.Task[Call]) -> None:
    """An error that is no refusal is one of ours: say it where the gateway's log goes."""
    error = None if task.cancelled() else task.exception()
    if error is not None and not isinstance(error, Refused):
        traceback.print_exception(error)


def new_transforms(attempt: Attempt, transforms: list[Doc]) -> list[Doc]:
    """Those that no earlier call of the attempt has recorded."""
    kept = []
    for one in transforms:
        key = (one["kind"], one["pointer"], one["before_sha256"])
        if key not in attempt.reported:
            attempt.reported.add(key)
            kept.append(one)
    return kept


def reply_of(message: Mapping[str, Any], finish_reason: str | None, stop_reason: Any, request: Request) -> Reply:
    named = {tool.function_name: tool for tool in request.offered}
    calls = []
    for called in message.get("tool_calls") or ():
        name, arguments = called["function"]["name"], called["function"]["arguments"]
        # A name that was not offered goes back as it is: to call it is the policy's doing.
        calls.append(ToolCall(named.get(name, Tool(name)), arguments))
    return Reply(
        text=message.get("content") or "",
        tool_calls=tuple(calls),
        reasoning=message.get("reasoning") or message.get("reasoning_content") or "",
        truncated=finish_reason == "length",
        stop_sequence=stop_reason if isinstance(stop_reason, str) else None,
    )


def versions(answer: Answer, before: str | None, after: str | None) -> tuple[list[VersionSegment], bool]:
    """(segments over S, exact). Half-open; without any report there is none."""
    spans = answer.spans
    if spans is not None and (before is None or any(span["version"] != UNNAMED for span in spans)):
        return spans, True
    if before is None or after is None:
        return [], False
    version = before if before == after else f"{before}..{after}"
    return [{"start": 0, "end": answer.usage.output, "version": version}], before == after
