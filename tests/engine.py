"""A small real inference server with vLLM's field shapes, which can be told to misbehave. No GPU, no torch.

Its tokenizer is byte-level with two special tokens, its template is ChatML with Hermes tool calls, its sampler follows
`script`, and its log probabilities are a fixed function of the prefix, divided by the temperature. So everything that
the gateway records can be computed again from what is here: `Engine.served` is the engine's own log.

The token routes (render, generate, derender) have the shapes of vLLM 0.32: tests/test_vllm.py asks the real one.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import json
import re
import socket
import threading
import time
import zlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

Doc = dict[str, Any]
MODEL = "tiny"
START, END, WIDE = 256, 257, 258
SPECIAL = {"<|im_start|>": START, "<|im_end|>": END, "<|wide|>": WIDE}
NAMES = {START: "<|im_start|>", END: "<|im_end|>", WIDE: "x" * (1 << 20)}
"""What they decode to. The wide one makes a reply of many megabytes from a few tokens."""
SPEED = 500
"""Tokens in a second, where a call is told not to end by itself."""
HOLLOW = "<think>\n\n</think>\n\n"
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)


def encode(text: str) -> list[int]:
    ids: list[int] = []
    for part in re.split(r"(<\|(?:im_start|im_end|wide)\|>)", text):
        ids += [SPECIAL[part]] if part in SPECIAL else part.encode("utf-8", "surrogatepass")
    return ids


def decode(ids: list[int]) -> str:
    data = b"".join(NAMES[one].encode() if one in NAMES else bytes([one]) for one in ids)
    return data.decode("utf-8", "replace")


def forgotten(message: Doc) -> Any:
    """The text of a message without the reasoning in it."""
    text = message.get("content")
    return text.rpartition("</think>")[2] if text and message["role"] == "assistant" else text


def call_text(name: str, **arguments: Any) -> str:
    """A tool call as this model writes it."""
    spelled = json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {spelled}}}\n</tool_call>'


@dataclass
class Served:
    """One request as the engine saw it."""

    body: Doc
    prompt_ids: list[int]
    sampled_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    version: str = ""
    route: str = "chat"
    cancelled: bool = False
    ended: bool = False
    """A stream that was sent to its end."""


Script = Callable[[Doc], str | list[int]]


def talk(body: Doc) -> str:
    return "Nothing to do."


@dataclass
class Engine:
    """The switches of the server; all may be changed while it runs."""

    url: str = ""
    script: Script = talk
    """The reply to a request body, as text of the model, tool calls included, or as ids."""
    faults: deque[str] = field(default_factory=deque)
    """For the next calls, one each: a status, `page`, or `` for none.

    Of a stream: `unfinished` (no finish reason), `undone` (no [DONE]); and, after `some` chunks, `cut` (the connection
    breaks) and `error` (a chunk that tells of one)."""
    ids: bool = True
    logprobs: bool = True
    raw: bool = False
    """Log probabilities before temperature."""
    old: bool = False
    """Refuses members that OpenAI does not have."""
    sglang: bool = False
    """Prompt ids within the choice and none in streams; a top_k of 0 is refused, as SGLang does."""
    drift: bool = False
    """Assistant text is rendered without its spaces at the ends, and calls with other ones."""
    system_anywhere: bool = True
    tokenizes: bool = True
    streamed_ids: bool = True
    """Streams give the ids of tool calls; with some tool parsers of vLLM they do not."""
    misaligned: bool = False
    filler: bool = False
    reasoning: bool = False
    """Text up to </think> is reasoning."""
    metrics: bool = False
    """/metrics tells how many calls are being worked on."""
    deaf: bool = False
    """Generates on for clients that hung up."""
    working: int = 0
    forgets: bool = False
    """Reasoning from before the last user message is not rendered."""
    opening: str = ""
    """What the template writes where a reply is due, and not where it stands in the history."""
    forgets_text: bool = False
    """Reasoning that was left in the text of a reply is rendered only while it stands last."""
    hollow: bool = False
    """A reply that stands last gets empty reasoning, as from Qwen3's template."""
    ends_alike: bool = True
    """Else the template closes a reply that holds tool calls in another way."""
    scale_out: bool = True
    """The token routes are open."""
    broken: str = ""
    """The token route that answers 500."""
    max_model_len: int = 1 << 20
    version: str | None = None
    """Of the weights; told at /get_weight_version when it is not None."""
    spans: list[Doc] | None = None
    held: threading.Event = field(default_factory=threading.Event)
    """Calls wait until it is set."""
    chunk_tokens: int = 4
    """In each chunk of a stream."""
    some: int | None = None
    """A stream waits after so many chunks until this is another number, or None: then it ends."""
    token_seconds: float = 0.0
    """Between the tokens of a call, streamed or not."""
    during: Callable[[], None] = lambda: None
    """Run in the middle of a call."""
    served: list[Served] = field(default_factory=list)
    rendered: dict[str, Doc] = field(default_factory=dict)
    """Chat requests by the id that they were rendered under: the script answers them."""

    stop: Callable[[], None] = lambda: None
    """End the server."""

    def __post_init__(self) -> None:
        self.held.set()

    def reset(self) -> None:
        """All switches as they are by default."""
        self.held.set()
        fresh = Engine(self.url, stop=self.stop)
        for one in fields(Engine):
            setattr(self, one.name, getattr(fresh, one.name))

    # --- The tokenizer and the template ---------------------------------------------------------------

    encode = staticmethod(encode)
    decode = staticmethod(decode)

    def served_of(self, body: Doc) -> Served:
        return Served(body, self.encode(self.render(body)), version=self.version or "")

    def render(self, body: Doc) -> str:
        messages, tools = body["messages"], body.get("tools")
        if self.forgets:
            last = max((at for at, message in enumerate(messages) if message["role"] == "user"), default=0)
            messages = [{**message, "reasoning": None} for message in messages[:last]] + messages[last:]
        if self.hollow and messages[-1]["role"] == "assistant" and not messages[-1].get("reasoning"):
            messages = [*messages[:-1], {**messages[-1], "content": f"{HOLLOW}{messages[-1].get('content') or ''}"}]
        if self.forgets_text:
            messages = [{**message, "content": forgotten(message)} for message in messages[:-1]] + messages[-1:]
        head = f"<|im_start|>tools\n{json.dumps(tools)}<|im_end|>\n" if tools else ""
        text = head + "".join(map(self.turn, messages))
        if body.get("continue_final_message"):
            return text.removesuffix("<|im_end|>\n")
        due = f"<|im_start|>assistant\n{self.opening}"
        return text + (due if body.get("add_generation_prompt", True) else "")

    def turn(self, message: Doc) -> str:
        text = str(message.get("content") or "")
        if self.drift and message["role"] == "assistant":
            text = text.strip()
        if self.reasoning and message.get("reasoning"):
            text = f"{message['reasoning']}</think>{text}"
        for called in message.get("tool_calls") or ():
            arguments = json.loads(called["function"]["arguments"])
            spelled = call_text(called["function"]["name"], **arguments)
            text += spelled.replace('": ', '":') if self.drift else spelled
        if message.get("tool_calls") and not self.ends_alike:
            return f"<|im_start|>{message['role']}\n{text}<|im_end|>"
        return f"<|im_start|>{message['role']}\n{text}<|im_end|>\n"

    def refusal(self, body: Doc) -> str | None:
        roles = [message["role"] for message in body["messages"]]
        if not self.system_anywhere and "system" in roles[1:]:
            return "System message must be at the beginning."
        if self.sglang and body.get("top_k") == 0:
            return "top_k must be -1 (disable) or at least 1, got 0."
        if self.sglang and body.get("stream") and body.get("return_token_ids"):
            return "return_token_ids is not supported with streaming on /v1/chat/completions."
        known = {"model", "messages", "tools", "tool_choice", "stream", "stream_options", "n", "logprobs", "stop"}
        known |= {"top_logprobs", "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed"}
        odd = set(body) - known - {"max_tokens", "max_completion_tokens", "response_format"}
        return f"Unrecognized request argument supplied: {', '.join(sorted(odd))}" if self.old and odd else None

    # --- The sampler ----------------------------------------------------------------------------------

    def sample(self, served: Served) -> str:
        """Fill S and L; the finish reason."""
        asked = served.body.get("max_completion_tokens") or served.body.get("max_tokens")
        room = self.max_model_len - len(served.prompt_ids)
        said = self.script(served.body)
        ids = [*(self.encode(said) if isinstance(said, str) else said), END]
        limit = min(room, asked or room)
        reason = "length" if len(ids) > limit else "stop"
        served.sampled_ids = ids[:limit]
        temperature = 1.0 if self.raw else served.body.get("temperature") or 1.0
        whole = [*served.prompt_ids, *ids]
        first = len(served.prompt_ids)
        served.logprobs = [self.logprob(whole, first + n, temperature) for n in range(len(served.sampled_ids))]
        return reason

    @staticmethod
    def logprob(ids: list[int], position: int, temperature: float) -> float:
        """A fixed function of the position and the few ids before it."""
        seen = (position, *ids[max(position - 8, 0) : position])
        return -(1 + zlib.crc32(str(seen).encode()) % 1000) / 1000 / temperature

    def completion(self, served: Served, reason: str) -> Doc:
        body, ids = served.body, served.sampled_ids
        message = self.message(served, reason)
        if message.get("tool_calls"):
            reason = "tool_calls"  # as vLLM says also where the limit came right after them
        choice: Doc = {"index": 0, "message": message, "logprobs": None, "finish_reason": reason, "stop_reason": None}
        usage = {"prompt_tokens": len(served.prompt_ids), "completion_tokens": len(ids)}
        value = {"id": "chatcmpl-0", "object": "chat.completion", "created": 1, "model": MODEL, "choices": [choice]}
        value["usage"] = {**usage, "total_tokens": sum(usage.values())}
        if self.logprobs and body.get("logprobs"):
            choice["logprobs"] = {"content": self.logprob_content(served)}
        if self.ids and body.get("return_token_ids"):
            choice["token_ids"] = ids
            (choice if self.sglang else value)["prompt_token_ids"] = served.prompt_ids
        if self.spans is not None:
            value["weight_versions"] = self.spans
        return value

    def message(self, served: Served, reason: str) -> Doc:
        ids = served.sampled_ids
        text = self.decode(ids[:-1] if reason == "stop" else ids)
        return self.parse(text, bool(served.body.get("tools")))

    def logprob_content(self, served: Served) -> list[Doc]:
        spell = served.body.get("return_tokens_as_token_ids") and self.ids
        scale = 1.0 if self.raw else served.body.get("temperature") or 1.0
        content = []
        for number, logprob in zip(served.sampled_ids, served.logprobs, strict=True):
            token = f"token_id:{number}" if spell else decode([number])
            one: Doc = {
                "token": token,
                "logprob": -9999.0 if self.filler else logprob,
                "bytes": None,
                "top_logprobs": [],
            }
            if served.body.get("top_logprobs"):
                one["top_logprobs"] = [
                    {"token": "a", "logprob": -0.5 / scale},
                    {"token": "b", "logprob": -1.75 / scale},
                ]
            content.append(one)
        return content[:-1] if self.misaligned else content

    def parse(self, text: str, tools: bool) -> Doc:
        message: Doc = {"role": "assistant", "content": text, "tool_calls": []}
        if self.reasoning and "</think>" in text:
            message["reasoning"], _, text = text.partition("</think>")
            message["content"] = text
        found = CALL.findall(text) if tools else []
        with contextlib.suppress(ValueError, KeyError, TypeError):
            for number, one in enumerate(json.loads(call) for call in found):
                function = {"name": one["name"], "arguments": json.dumps(one["arguments"], ensure_ascii=False)}
                call_id = f"chatcmpl-tool-{len(self.served)}-{number}"
                message["tool_calls"].append({"id": call_id, "type": "function", "function": function})
            if found:
                message["content"] = text[: text.index("<tool_call>")] or None
        return message

    # --- The routes -----------------------------------------------------------------------------------

    async def chat(self, http: Request) -> Response:
        body = json.loads(await http.body())
        if (problem := self.refusal(body)) is not None:
            return error(400, problem)
        served = self.served_of(body)
        if (too_long := self.overflow(served)) is not None:
            return error(400, too_long)
        return await self.answered(http, served, self.completion)

    async def answered(self, http: Request, served: Served, shape: Callable[[Served, str], Doc]) -> Response:
        self.served.append(served)
        fault = self.faults.popleft() if self.faults else ""
        if fault.isdigit():
            return error(int(fault), f"told to answer {fault}")
        if fault == "page":
            return Response("<html>welcome</html>", media_type="text/html")
        self.during()
        self.working += 1
        try:
            if not await self.wait(http, served):
                return Response(status_code=499)
        finally:
            self.working -= 1
        value = shape(served, self.sample(served))
        if not served.body.get("stream"):
            await asyncio.sleep(self.token_seconds * len(served.sampled_ids))
            return JSONResponse(value)
        return StreamingResponse(self.stream(served, value, fault), media_type="text/event-stream")

    async def stream(self, served: Served, value: Doc, fault: str) -> AsyncIterator[str]:
        """The completion as chunks, as far as the switches let it come."""
        try:
            for number, one in enumerate(self.chunks(served, value, fault)):
                if fault in ("cut", "error") and number == (self.some or 0):
                    if fault == "cut":
                        raise ConnectionError("told to break off")
                    yield event({"error": {"message": "told to fail", "type": "InternalServerError", "code": 500}})
                    break
                while not fault and self.some is not None and number >= self.some:
                    await asyncio.sleep(0.002)
                await asyncio.sleep(self.token_seconds * self.chunk_tokens)
                yield event(one)
            if fault != "undone":
                yield "data: [DONE]\n\n"
            served.ended = True
        finally:
            served.cancelled = not served.ended

    def chunks(self, served: Served, value: Doc, fault: str) -> Iterator[Doc]:
        """A role with the prompt's ids, then some tokens each with what they add to the message, then the usage."""
        head = {name: value[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
        prompt = {"prompt_token_ids": value["prompt_token_ids"]} if "prompt_token_ids" in value else {}
        begun = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        yield {**head, **prompt, "choices": [begun]}
        choice, spans = value["choices"][0], {"weight_versions": self.spans} if self.spans else {}
        for index, deltas in enumerate(self.deltas(served, choice["message"])):
            start, end = index * self.chunk_tokens, (index + 1) * self.chunk_tokens
            lost = not self.streamed_ids and any("tool_calls" in delta for delta in deltas)
            one = {"index": 0, "delta": merged(deltas), "finish_reason": None}
            one |= part_of(choice, start, start if lost else end)
            if end < len(served.sampled_ids):
                yield {**head, "choices": [one]}
            elif fault != "unfinished":
                last = {name: choice[name] for name in ("finish_reason", "stop_reason")}
                yield {**head, **spans, "choices": [one | last]}
        if (served.body.get("stream_options") or {}).get("include_usage"):
            yield {**head, "choices": [], "usage": value["usage"]}

    def deltas(self, served: Served, message: Doc) -> Iterator[list[Doc]]:
        """For each chunk what its tokens complete: nothing within a character, a mark or the end."""
        ids, at, decoder = served.sampled_ids, 0, codecs.getincrementaldecoder("utf-8")("replace")
        texts = [decoder.decode(NAMES[one].encode() if one in NAMES else bytes([one])) for one in ids]
        if ids[-1:] == [END]:
            texts[-1] = ""
        spans = list(spans_of("".join(texts), message))
        for first in range(0, len(ids), self.chunk_tokens):
            text = "".join(texts[first : first + self.chunk_tokens])
            start, at = at, at + len(text)
            found = [(delta, max(begin, start), min(end, at)) for begin, end, delta in spans]
            yield [delta(text[begin - start : end - start]) for delta, begin, end in found if begin < end]

    def overflow(self, served: Served) -> str | None:
        length, asked = len(served.prompt_ids), served.body.get("max_completion_tokens") or 0
        if length + max(asked, 1) <= self.max_model_len:
            return None
        return (
            f"This model's maximum context length is {self.max_model_len} tokens. However, you requested "
            f"{length + asked} tokens ({length} in the messages, {asked} in the completion)."
        )

    async def wait(self, http: Request, served: Served) -> bool:
        """Until released, or for as long as the tokens take; False when the client hung up, as vLLM notices it."""
        body = served.body
        done = time.monotonic() + (body["max_completion_tokens"] / SPEED if body.get("ignore_eos") else 0)
        while not self.held.is_set() or time.monotonic() < done:
            if not self.deaf and await http.is_disconnected():
                served.cancelled = True
                return False
            await asyncio.sleep(0.005)
        return True

    async def told_metrics(self, http: Request) -> Response:
        if not self.metrics:
            return error(404, "Not Found")
        name = "vllm:num_requests_running"
        text = f'# TYPE {name} gauge\n{name}{{engine="0",model_name="{MODEL}"}} {float(self.working)}\n'
        return Response(text, media_type="text/plain")

    def closed(self, route: str) -> Response | None:
        if not self.scale_out:
            told = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
            return error(403, told)
        return error(500, f"{route} is broken") if self.broken == route else None

    async def to_ids(self, http: Request) -> Response:
        """/v1/chat/completions/render"""
        body = json.loads(await http.body())
        if (refused := self.closed("render")) is not None:
            return refused
        ids = self.served_of(body).prompt_ids
        if (problem := self.refusal(body) or self.overflow(Served({}, ids))) is not None:
            return error(400, problem)
        request_id = f"chatcmpl-{len(self.rendered):016x}"
        self.rendered[request_id] = body
        asked = body.get("max_completion_tokens") or body.get("max_tokens")
        room = self.max_model_len - len(ids)
        sampling = {name: body[name] for name in SAMPLING if name in body}
        sampling |= {"max_tokens": min(asked or room, room), "stop": body.get("stop") or []}
        sampling |= {"logprobs": body.get("top_logprobs", 0)} if body.get("logprobs") else {}
        made = {"request_id": request_id, "token_ids": ids, "sampling_params": sampling, "model": body["model"]}
        return JSONResponse(
            {**made, "features": None, "return_token_ids": None, "output_mode": "tokens", "stream": False}
        )

    async def generate(self, http: Request) -> Response:
        """/inference/v1/generate"""
        asked = json.loads(await http.body())
        if (refused := self.closed("generate")) is not None:
            return refused
        sampling, ids = asked["sampling_params"], asked["token_ids"]
        if len(ids) >= self.max_model_len:
            told = f"The decoder prompt (length {len(ids)}) is longer than the maximum model length of "
            return error(400, f"{told}{self.max_model_len}.")
        body = self.rendered[asked["request_id"]]
        kept = {name: value for name, value in body.items() if not name.startswith("max_")}
        kept |= {"return_token_ids": asked["return_token_ids"], "temperature": sampling.get("temperature")}
        kept |= {"max_completion_tokens": sampling["max_tokens"]} if "max_tokens" in sampling else {}
        return await self.answered(
            http, replace(self.served_of(kept), prompt_ids=ids, route="generate"), self.generated
        )

    def generated(self, served: Served, reason: str) -> Doc:
        value = self.completion(served, reason)
        (chosen,) = value["choices"]
        spans = self.spans or [{"version": self.version or "default", "start": 0, "end": len(served.sampled_ids)}]
        choice: Doc = {"index": 0, "finish_reason": reason, "stop_reason": None, "weight_versions": spans}
        choice |= {"token_ids": served.sampled_ids, "logprobs": chosen["logprobs"]}
        if choice["logprobs"]:
            pairs = zip(served.sampled_ids, choice["logprobs"]["content"], strict=False)
            content = [{"token_id": at, "logprob": one["logprob"], "rank": 1, "top_logprobs": []} for at, one in pairs]
            choice["logprobs"] = {"content": content}
        ids = value.get("prompt_token_ids")
        return {
            "request_id": "generate-tokens-0",
            "choices": [choice],
            "prompt_token_ids": ids,
            "usage": value["usage"],
        }

    async def to_message(self, http: Request) -> Response:
        """/v1/chat/completions/derender: it decodes every id it is given, the end of a reply too."""
        asked = json.loads(await http.body())
        if (refused := self.closed("derender")) is not None:
            return refused
        (choice,) = asked["generate_response"]["choices"]
        if not choice["token_ids"]:
            return error(400, "choice 0 has empty or null token_ids")
        message = self.parse(self.decode(choice["token_ids"]), bool(asked["chat_request"].get("tools")))
        made = {"index": 0, "message": message, "logprobs": None, "finish_reason": choice["finish_reason"]}
        return JSONResponse({"id": "generate-tokens-0", "object": "chat.completion", "choices": [made]})

    async def tokenize(self, http: Request) -> Response:
        body = json.loads(await http.body())
        ids = self.served_of(body).prompt_ids
        return JSONResponse({"count": len(ids), "max_model_len": self.max_model_len, "tokens": ids})

    async def models(self, http: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": MODEL, "max_model_len": self.max_model_len}]})

    async def weight_version(self, http: Request) -> Response:
        return JSONResponse({"weight_version": self.version}) if self.version is not None else error(404, "Not Found")

    def application(self) -> Starlette:
        routes = [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/chat/completions/render", self.to_ids, methods=["POST"]),
            Route("/inference/v1/generate", self.generate, methods=["POST"]),
            Route("/v1/chat/completions/derender", self.to_message, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/get_weight_version", self.weight_version),
            Route("/metrics", self.told_metrics),
        ]
        if self.tokenizes:
            routes.append(Route("/tokenize", self.tokenize, methods=["POST"]))
        return Starlette(routes=routes)


def error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "BadRequestError", "code": status}}, status)


Delta = Callable[[str], Doc]


def spans_of(text: str, message: Doc) -> Iterator[tuple[int, int, Delta]]:
    """(start, end, the delta of some of it) of each part of the message within the text of the model."""
    at, content = 0, message["content"] or ""
    if "reasoning" in message:
        yield 0, len(message["reasoning"]), lambda part: {"reasoning": part}
        at = len(message["reasoning"]) + len("</think>")
    yield at, at + len(content), lambda part: {"content": part}
    for index, called in enumerate(message["tool_calls"]):
        at = text.index('"arguments": ', at) + len('"arguments": ')
        yield from call_spans(at, index, called)


def call_spans(at: int, index: int, called: Doc) -> Iterator[tuple[int, int, Delta]]:
    """The id and the name come before the arguments, which are spelled here as the message has them."""
    begun = {**called, "index": index, "function": {**called["function"], "arguments": ""}}
    yield at - 1, at, lambda part: {"tool_calls": [begun]}
    end = at + len(called["function"]["arguments"])
    yield at, end, lambda part: {"tool_calls": [{"index": index, "function": {"arguments": part}}]}


def merged(deltas: list[Doc]) -> Doc:
    """One delta of several, as of a chunk with several tokens."""
    whole: Doc = {}
    for name, value in (member for delta in deltas for member in delta.items()):
        whole[name] = whole[name] + value if name in whole else value
    return whole


def part_of(choice: Doc, start: int, end: int) -> Doc:
    """The ids and log probabilities of some tokens."""
    logprobs = choice["logprobs"] and {"content": choice["logprobs"]["content"][start:end]}
    ids = {"token_ids": choice["token_ids"][start:end]} if "token_ids" in choice else {}
    return {"logprobs": logprobs if end > start else None, **ids}


def event(value: Doc) -> str:
    return f"data: {json.dumps(value)}\n\n"


class Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def engine(**switches: Any) -> Iterator[Engine]:
    """A running engine, in a thread of this process."""
    made = Engine(**switches)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(512)
        made.url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        server = Server(
            uvicorn.Config(made.application(), lifespan="off", ws="none", log_config=None, access_log=False)
        )
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)

        def stop() -> None:
            made.held.set()
            server.should_exit = server.force_exit = True
            thread.join()

        made.stop = stop
        thread.start()
        try:
            yield made
        finally:
            stop()
