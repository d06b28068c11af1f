"""Token-in: a call that goes on from an earlier reply of its attempt is prompted with that call's own ids, P + S.

Rendered from text, a reply seldom encodes to the ids that were sampled, and the prompt breaks there. Here the engine
renders the conversation (`render`), stored ids take the place of what stands there for them, the engine generates from
exactly these (`generate`), and makes a message of what it sampled (`derender`). So template, tokenizer and tool parser
stay in the engine, and every id is one that it rendered or sampled:

    rendered:    BEFORE   reply, encoded again   TAIL        AFTER
    sent:        P        S                      its rest    AFTER

BEFORE is what the earlier call was rendered to, TAIL what the template writes at the end of a reply, AFTER the new
messages and the start of the next reply. Invariant: stored ids are sent only where two renderings, with the new
messages and without them, show these four parts for this very call (`Turn.joined`), and where the reply came back as
it was given: text, reasoning and tool calls. Otherwise the call takes the chat route, and its findings say why.

Not here: streams, stop strings and constrained sampling, which the three routes do not serve as the chat route does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

from gateway.agreement import faults
from gateway.attempts import Attempt
from gateway.call import Refused, canonical
from gateway.engine import CAPTURE, Answer, Engine, object_at, read_answer
from gateway.prompt import Prompt
from gateway.record import CallRecord, Doc, Finding, pack, stored_ids, whole

GENERATE = "/inference/v1/generate"
RENDERED_ONLY = "rendered: it goes on from no reply of this attempt"
USER: Doc = {"role": "user", "content": "Say a word."}
REPLY: Doc = {"role": "assistant", "content": "Yes."}
HISTORY: Doc = {"add_generation_prompt": False}


class Unavailable(Exception):
    """One line: why the engine cannot be used in this way."""


class NotShown(Exception):
    """Why stored ids cannot be put into this prompt."""


@dataclass
class Rendering:
    """What a prompt was rendered to, enough to know it again."""

    length: int
    digest: bytes

    @classmethod
    def of(cls, ids: Sequence[int]) -> Rendering:
        return cls(len(ids), digest_of(ids))

    def begins(self, ids: Sequence[int]) -> bool:
        return len(ids) >= self.length and digest_of(ids[: self.length]) == self.digest


@dataclass
class Replies:
    """The replies of an attempt, by the conversations that they end."""

    ends: dict[bytes, list[str]] = field(default_factory=dict)
    """Call ids, in the order of their answers."""
    rendered: dict[str, Rendering] = field(default_factory=dict)
    """Of the calls of this life of the gateway."""

    def add(self, call_id: str, tools: list[Doc], before: bytes, message: Mapping[str, Any]) -> None:
        """The reply of a call to the conversation whose digest is `before`."""
        self.ends.setdefault(key(tools, step(before, message)), []).append(call_id)

    @classmethod
    def of(cls, records: Iterable[CallRecord]) -> Replies:
        """Those of an earlier life of the gateway. A call's messages begin with those of its base."""
        made, calls, chains = cls(), dict[str, CallRecord](), dict[str, list[bytes]]()
        for record in records:
            calls[record.call_id] = record
            base, kept = record.messages.base_call, record.messages.keep
            begun = chains[base][: kept + 1] if base else [b""]
            chains[record.call_id] = [*begun, *chain(record.messages.tail, begun[-1])]
            if record.state in ("reply", "delivered", "undelivered") and record.message:
                tools = whole(calls, record.call_id, "tools")
                made.add(record.call_id, tools, chains[record.call_id][-1], record.message)
        return made


@dataclass(frozen=True)
class Template:
    """How the engine's template writes replies, as far as it was found out on a plain one."""

    tail: list[int]
    """What ends a reply: its end token, and what follows up to the next message."""
    lead: list[int]
    """What comes before a reply that stands last and not before the same one with messages after it: Qwen3 writes empty
    reasoning there."""

    def after(self, before: Rendering, upto: list[int], full: list[int], varied: list[int]) -> list[int]:
        """What follows a reply in the rendering `full`; NotShown where that is not clear.

        `upto` ends with that reply, and `varied` has another text in the message after it.
        """
        if not (before.begins(upto) and before.begins(full)):
            raise NotShown("the template writes what comes before the reply otherwise than when it was asked for")
        written = upto[before.length :]
        if written[-len(self.tail) :] != self.tail:
            raise NotShown("the template ends this reply otherwise than a plain one")
        if full[: len(upto)] == upto:
            return full[len(upto) :]
        end = last_end(self.tail, full[: shared(full, varied)])
        if end <= before.length or written != [*self.lead, *full[before.length : end]]:
            raise NotShown("the template writes the reply otherwise once messages follow it")
        return full[end:]


class TokenIn:
    """The engine by way of its token routes, once `probe` has found them."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.template = Template([], [])

    async def probe(self, template: Mapping[str, Any]) -> str:
        """What was found, for people; Unavailable when these routes do not do what the chat route does."""
        body: Doc = {"model": self.engine.model, "messages": [USER], "max_completion_tokens": 8, **CAPTURE}
        if template:
            body["chat_template_kwargs"] = dict(template)
        if self.engine.capabilities.level != "tokens":
            raise Unavailable(f"it is at {self.engine.capabilities.lines[0]}")
        try:
            expected = await self.engine.chat(body)
            request = await self.render(body)
            answer = await self.generate(body, request, request["token_ids"])
            told = await self.learn(body, request["token_ids"])
        except Refused as refused:
            raise Unavailable(refused.message) from None
        if request["token_ids"] != expected.prompt_ids:
            raise Unavailable("its render route gives other prompt ids than its chat route")
        if found := faults(answer):
            raise Unavailable(f"its generate route falls short: {'; '.join(found)}")
        return f"token-in: {told}"

    async def learn(self, body: Doc, asked: list[int]) -> str:
        """Find out the template; what that means, for people."""
        upto = await self.ids({**body, "messages": [USER, REPLY], **HISTORY})
        text = await self.ids({**body, "messages": [USER, REPLY], **HISTORY, "continue_final_message": True})
        full, varied = [await self.ids({**body, "messages": [USER, REPLY, one]}) for one in (USER, another(USER))]
        if upto[: len(text)] != text or len(upto) == len(text):
            raise Unavailable("its template does not show where a reply ends")
        before, tail = Rendering.of(asked), upto[len(text) :]
        written, kept = upto[before.length :], full[before.length : last_end(tail, full[: shared(full, varied)])]
        lead = written[: len(written) - len(kept)] if written[len(written) - len(kept) :] == kept else []
        self.template = Template(tail, lead)
        try:
            self.template.after(before, upto, full, varied)
        except NotShown as reason:
            return f"the chat route in a plain conversation, because {reason}"
        return "a prompt goes on from the ids of the reply before it"

    def turn(self, attempt: Attempt, record: CallRecord, asked: Prompt) -> Turn:
        return Turn(self, attempt, record, asked)

    async def render(self, body: Doc) -> Doc:
        """The request to `generate` that the engine makes of a chat request; its `token_ids` are the rendering."""
        body = {name: value for name, value in body.items() if name != "max_completion_tokens"}
        rendered = await self.engine.post(f"{self.engine.url}/chat/completions/render", body)
        ids = rendered.get("token_ids")
        if not isinstance(ids, list) or not ids or not isinstance(rendered.get("sampling_params"), dict):
            raise Refused(502, "the engine rendered something that is no prompt", "engine_malformed")
        return rendered

    async def ids(self, body: Doc) -> list[int]:
        found: list[int] = (await self.render(body))["token_ids"]
        return found

    async def generate(self, body: Doc, rendered: Doc, ids: list[int]) -> Answer:
        """The answer to exactly these ids, sampled as `body` says, in the form of the chat route's."""
        limit = body.get("max_completion_tokens")
        sampling = {name: value for name, value in rendered["sampling_params"].items() if name != "max_tokens"}
        sampling |= {} if limit is None else {"max_tokens": limit}
        request = {**rendered, "token_ids": ids, "sampling_params": sampling, "return_token_ids": True}
        generated = await self.engine.post(self.engine.root + GENERATE, request)
        choices = generated.get("choices")
        if generated.get("prompt_token_ids") != ids or not isinstance(choices, list) or len(choices) != 1:
            raise Refused(502, "the engine's answer does not hold one choice for these ids", "engine_malformed")
        choice = object_at({"choice": choices[0]}, "choice")
        message = await self.derender(body, generated, choice)
        chosen = {**choice, "message": message, "logprobs": {"content": list(named(choice))}}
        if message.get("tool_calls"):
            chosen["finish_reason"] = "tool_calls"  # as the chat route has it, of a reply cut off after them too
        return read_answer({**generated, "choices": [chosen]})

    async def derender(self, body: Doc, generated: Doc, choice: Doc) -> Doc:
        """The message that the engine's parsers make of a choice."""
        ids = choice.get("token_ids") or []
        if choice.get("finish_reason") == "stop" and not isinstance(choice.get("stop_reason"), str):
            ids = ids[:-1]  # the token that ended the reply, which the chat route does not decode and this one would
        if not ids:
            return {"role": "assistant", "content": ""}
        shown = {**choice, "token_ids": ids, "logprobs": None}
        request = {"generate_response": {**generated, "choices": [shown]}, "chat_request": body}
        answer = await self.engine.post(f"{self.engine.url}/chat/completions/derender", request)
        parsed = answer.get("choices")
        return object_at(parsed[0], "message") if isinstance(parsed, list) and len(parsed) == 1 else {}


@dataclass
class Plan:
    """How a call is put to the engine."""

    finding: Finding
    rendered: Doc | None = None
    """None on the chat route."""
    ids: list[int] | None = None
    """The prompt, as far as it is known before the answer."""
    transforms: list[Doc] = field(default_factory=list)


class Turn:
    """One call. It has the engine's face: `count` and `chat`."""

    def __init__(self, token_in: TokenIn, attempt: Attempt, record: CallRecord, asked: Prompt) -> None:
        self.token_in = token_in
        self.engine = token_in.engine
        self.attempt = attempt
        self.record = record
        self.asked = asked
        self.before = chain(asked.messages)
        """Digests of the conversation after each message."""
        self.plan: Plan | None = None

    async def count(self, messages: list[Doc], tools: list[Doc]) -> int:
        ids = (await self.planned()).ids
        return await self.engine.count(messages, tools) if ids is None else len(ids)

    async def chat(self, body: Doc) -> Answer:
        plan = await self.planned()
        if plan.rendered is None or plan.ids is None:
            answer = await self.engine.chat(body)
            self.remember(answer, answer.prompt_ids)
        else:
            answer = await self.token_in.generate(body, plan.rendered, plan.ids)
            self.remember(answer, plan.rendered["token_ids"])
        return replace(answer, findings=[*answer.findings, plan.finding], transforms=plan.transforms)

    def remember(self, answer: Answer, rendered: list[int] | None) -> None:
        """So that a later prompt can go on from this reply, once it is in the log."""
        if self.attempt.replies is not None and rendered is not None and answer.sampled_ids:
            before = self.before[-1] if self.before else b""
            self.attempt.replies.add(self.record.call_id, self.asked.tools, before, answer.message)
            self.attempt.replies.rendered[self.record.call_id] = Rendering.of(rendered)

    async def planned(self) -> Plan:
        if self.attempt.replies is None:
            earlier = self.attempt.log.records()
            known = await asyncio.to_thread(Replies.of, earlier) if earlier else Replies()
            self.attempt.replies = self.attempt.replies or known
        if self.plan is None:
            self.plan = await self.made()
        return self.plan

    async def made(self) -> Plan:
        if (why := only_by_chat(self.asked.body())) is not None:
            return Plan(fallback(why))
        rendered = await self.token_in.render(self.asked.body())
        full, parent = rendered["token_ids"], self.parent()
        if parent is None:
            return Plan({"level": "info", "code": "token_in", "detail": RENDERED_ONLY}, rendered, full)
        call_id, count = parent
        try:
            ids = await self.joined(call_id, count, full)
        except NotShown as reason:
            return Plan(fallback(str(reason)), ids=full)
        detail = f"continues {call_id}"
        return Plan(
            {"level": "info", "code": "token_in", "detail": detail}, rendered, ids, replaced(count - 1, full, ids)
        )

    def parent(self) -> tuple[str, int] | None:
        """The call with the longest conversation, reply included, that this one begins with, and its length.

        Of several, one that was delivered for sure, then one of the same session and agent, then the latest.
        """
        assert self.attempt.replies is not None
        for count in range(len(self.before), 0, -1):
            found = self.attempt.replies.ends.get(key(self.asked.tools, self.before[count - 1]), [])
            calls = self.attempt.log.trace.calls
            known = [calls[one] for one in found if one in calls and calls[one].state in ("reply", "delivered")]
            if known:
                return max(known, key=self.likelihood).call_id, count
        return None

    def likelihood(self, call: CallRecord) -> tuple[bool, int, int]:
        same = sum(call.labels.get(name) == self.record.labels.get(name) for name in ("session", "agent"))
        return call.state == "delivered", same, call.seq

    async def joined(self, call_id: str, count: int, full: list[int]) -> list[int]:
        """P + S of the call, then what follows its reply in the rendering `full`; NotShown where that is not clear."""
        calls, template = self.attempt.log.trace.calls, self.token_in.template
        rest = unsampled(calls[call_id], template.tail)
        upto, varied = await self.rendering(self.asked.messages[:count], **HISTORY), full
        if template.lead and full[: len(upto)] != upto and count < len(self.asked.messages):
            first, *others = self.asked.messages[count:]
            varied = await self.rendering([*self.asked.messages[:count], another(first), *others])
        before = await self.rendering_of(call_id, count - 1)
        return [*stored_ids(calls, call_id), *rest, *template.after(before, upto, full, varied)]

    async def rendering(self, messages: list[Doc], **members: Any) -> list[int]:
        return await self.token_in.ids({**self.asked.body(), "messages": messages, **members})

    async def rendering_of(self, call_id: str, count: int) -> Rendering:
        """What that call's prompt was rendered to, its conversation being the first messages of this one."""
        assert self.attempt.replies is not None
        known = self.attempt.replies.rendered
        if call_id not in known:
            known[call_id] = Rendering.of(await self.rendering(self.asked.messages[:count]))
        return known[call_id]


def another(message: Doc) -> Doc:
    """The message with a text that begins otherwise."""
    return {**message, "content": "!" if str(message.get("content") or "").lstrip().startswith("?") else "?"}


def shared(one: list[int], other: list[int]) -> int:
    """How many ids both begin with."""
    most = min(len(one), len(other))
    return next((at for at in range(most) if one[at] != other[at]), most)


def last_end(part: list[int], ids: list[int]) -> int:
    """Where the last occurrence of `part` ends; 0 when there is none."""
    places = range(len(ids), len(part) - 1, -1)
    return next((end for end in places if ids[end - len(part) : end] == part), 0)


def only_by_chat(body: Mapping[str, Any]) -> str | None:
    """Why a request cannot take the token routes."""
    if body.get("stop"):
        return "stop strings, which derender would leave in the text"
    if body.get("response_format") or body.get("tool_choice") not in (None, "auto", "none"):
        return "constrained sampling"
    return None


def fallback(why: str) -> Finding:
    return {"level": "warn", "code": "token_in_fallback", "detail": f"the chat route was taken: {why}"}


def unsampled(call: CallRecord, tail: list[int]) -> list[int]:
    """What of the template's end of a reply is not in its S."""
    if call.finish_reason == "length":
        return tail
    sampled = call.sampled_ids or [-1]
    # A reply that was cut off after its calls says tool_calls too.
    unclear = call.finish_reason == "tool_calls" and len(sampled) == call.sampling_applied.get("max_completion_tokens")
    if isinstance(call.stop_reason, str) or sampled[-1] not in tail or unclear:
        raise NotShown("the reply ended with something that the template does not write there")
    return tail[tail.index(sampled[-1]) + 1 :]


def replaced(index: int, full: list[int], ids: list[int]) -> list[Doc]:
    """The entry in `transforms` where stored ids differ from the rendering."""
    if ids == full:
        return []
    digests = {"before_sha256": digest_of(full).hex(), "after_sha256": digest_of(ids).hex()}
    reason = "the ids that were sampled, not their text encoded again"
    return [{"kind": "token_in", "pointer": f"/messages/{index}", "reason": reason, **digests}]


def named(choice: Doc) -> Iterator[Doc]:
    """The log probabilities of `generate` in the form that the chat route gives them."""
    for one in object_at(choice, "logprobs").get("content") or ():
        yield {"token": f"token_id:{one.get('token_id')}", "logprob": one.get("logprob")}


def digest_of(ids: Sequence[int]) -> bytes:
    return sha256(pack(ids) or b"").digest()


def chain(messages: Iterable[Mapping[str, Any]], before: bytes = b"") -> list[bytes]:
    """A digest of the conversation after each message."""
    digests = []
    for message in messages:
        before = step(before, message)
        digests.append(before)
    return digests


def step(before: bytes, message: Mapping[str, Any]) -> bytes:
    return sha256(before + canonical(essence(message))).digest()


def essence(message: Mapping[str, Any]) -> Any:
    """What a message says, whichever of the forms in use it has."""
    if message["role"] != "assistant":
        return message
    functions = [(called.get("id"), called["function"]) for called in message.get("tool_calls") or ()]
    calls = [[call_id, function["name"], function["arguments"]] for call_id, function in functions]
    reasoning = message.get("reasoning") or message.get("reasoning_content") or ""
    return ["assistant", message.get("content") or "", reasoning, calls]


def key(tools: list[Doc], conversation: bytes) -> bytes:
    return sha256(canonical(tools) + conversation).digest()
