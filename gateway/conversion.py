"""One request on its way to an engine: the chat-shaped conversation, and what was changed to make it.

Every dialect converts with this class, so that what is common has one place: text parts become one string,
tool arguments become again the bytes that the engine wrote, what an engine cannot express is refused by name.

Invariant: the same conversation gives the same messages, whatever form its blocks take this time; and nothing
of it is dropped or rewritten without an entry in `transforms`. A library would be shorter and lose what matters
here: converters in use merge or hoist system messages, parse tool arguments and write them again, and drop block
types that they do not know.
"""

from __future__ import annotations

import contextlib
import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jiter

from gateway.call import Refused, canonical, digest

Doc = dict[str, Any]

SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logit_bias", "seed", "stop"),
)
"""Sampling settings by their names in chat completions."""

_REASONING = "rs1."
_DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class Original:
    """A tool call as the engine wrote it; what harnesses send back of it may be spelled otherwise."""

    engine_id: str
    arguments: str


@dataclass
class Conversion:
    """What a dialect's `convert` fills. `originals` are the attempt's tool calls by their ids without prefix."""

    originals: Mapping[str, Original] = field(default_factory=dict)
    messages: list[Doc] = field(default_factory=list)
    sampling: Doc = field(default_factory=dict)
    limit: int | None = None
    """Output tokens the request asks for at the most."""
    constraint: Doc = field(default_factory=dict)
    """Members for the engine that mask its distribution (a response format, a forced tool)."""
    ignored: Doc = field(default_factory=dict)
    """Other members of the request, which are recorded and not forwarded."""
    transforms: list[Doc] = field(default_factory=list)
    findings: list[tuple[str, str]] = field(default_factory=list)

    def note(self, kind: str, pointer: str, reason: str, before: Any, after: Any) -> None:
        digests = {"before_sha256": digest(before), "after_sha256": digest(after)}
        self.transforms.append({"kind": kind, "pointer": pointer, "reason": reason, **digests})

    def text(self, content: Any, pointer: str, kinds: tuple[str, ...] = ("text",), joint: str = "\n") -> str:
        """One string of a content member: a string, null, or a list of parts, which must all be text."""
        if content is None or isinstance(content, str):
            return content or ""
        if not isinstance(content, list):
            raise Refused(400, f"{pointer} must be a string or an array of parts", "wrong_type")
        texts = [self._part(part, f"{pointer}/{index}", kinds) for index, part in enumerate(content)]
        joined = joint.join(texts)
        self.note("flattened", pointer, "the template takes one string, and clients send both forms", content, joined)
        return joined

    def _part(self, part: Any, pointer: str, kinds: tuple[str, ...]) -> str:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds:
            raise Refused(
                400, f"{pointer}: content of type {kind!r} cannot be passed to the engine", "unsupported_content"
            )
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise Refused(400, f"{pointer}: the text is missing", "missing_member")
        return text

    def tool_call(self, call_id: str, name: str, arguments: str | Mapping[str, Any], pointer: str) -> Doc:
        """A call in the history, with the bytes that the engine wrote if they mean the same."""
        sent = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        original = self.original(call_id)
        if original and sent != original.arguments:
            if same_json(sent, original.arguments):
                self.note("arguments_restored", pointer, "equal as JSON to what was sampled", sent, original.arguments)
                sent = original.arguments
            else:
                self.note(
                    "arguments_differ", pointer, "not what was sampled: sent as it came", original.arguments, sent
                )
        return {
            "id": original.engine_id if original else call_id,
            "type": "function",
            "function": {"name": name, "arguments": sent},
        }

    def original(self, call_id: str) -> Original | None:
        return self.originals.get(call_id.partition("_")[2])

    def tool_result(self, call_id: str, text: str) -> None:
        original = self.original(call_id)
        engine_id = original.engine_id if original else call_id
        self.messages.append({"role": "tool", "tool_call_id": engine_id, "content": text})

    def take_sampling(self, body: Mapping[str, Any], **renamed: str) -> None:
        """Sampling settings of the body; `renamed` maps a name of this dialect to that of chat completions."""
        for name in SAMPLING:
            if body.get(name) is not None:
                self.sampling[name] = body[name]
        for theirs, ours in renamed.items():
            if body.get(theirs) is not None:
                self.sampling[ours] = body[theirs]

    def take_limit(self, body: Mapping[str, Any], *names: str) -> None:
        for name in names:
            value = body.get(name)
            if value is None:
                continue
            if type(value) is not int or value < 1:
                raise Refused(400, f"{name!r} must be a positive integer", "wrong_type")
            self.limit = value if self.limit is None else min(value, self.limit)

    def ignore_rest(self, body: Mapping[str, Any], *known: str) -> None:
        """Members that no step used are recorded, not forwarded."""
        used = {*known, *SAMPLING}
        self.ignored = {name: value for name, value in body.items() if name not in used and value is not None}


def same_json(one: str, other: str) -> bool:
    """Equal as JSON documents, numbers as written: 1 and 1.0 differ, spaces and order do not."""
    try:
        return canonical(json.loads(one)) == canonical(json.loads(other))
    except (ValueError, RecursionError):
        return False


def object_of(arguments: str) -> Doc:
    """Tool arguments for a wire form that takes an object. What is none travels whole in the member INVALID_JSON."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": arguments}


def begins_object(text: str) -> bool:
    """Whether more text can make a JSON object of it, or it is one."""
    text = text.lstrip()
    if not text.startswith("{"):
        return False
    with contextlib.suppress(ValueError, RecursionError):
        _, end = _DECODER.raw_decode(text)
        return not text[end:].strip()
    try:
        jiter.from_json(text.encode(), partial_mode=True)  # which reads no further than the first value
    except ValueError:
        return False
    return True


def seal(reasoning: str) -> str:
    """Reasoning text as an opaque token. It carries the text itself, so it outlives a restart."""
    return _REASONING + urlsafe_b64encode(reasoning.encode("utf-8", "surrogatepass")).decode()


def unseal(token: Any) -> str | None:
    """The text of a token of `seal`; None when it is none of ours."""
    if not isinstance(token, str) or not token.startswith(_REASONING):
        return None
    try:
        return urlsafe_b64decode(token.removeprefix(_REASONING)).decode("utf-8", "surrogatepass")
    except ValueError:
        return None
