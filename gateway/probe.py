"""What an inference server can do, found out by asking it: run once at start, the result is stored with every call.

Levels: `tokens` (P and S as ids, L aligned and processed) may train; `logprobs` (S with log probabilities, no P)
serves analysis; `text` serves evaluation only. Nothing is taken from a server's name or version: members that it does
not know are ignored or refused, and only its answers prove a feature.

Not probed: what a server does under load.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from gateway.agreement import difference, faults
from gateway.call import Refused
from gateway.engine import (
    CAPTURES,
    UNREACHABLE,
    Answer,
    Capabilities,
    Engine,
    object_at,
    prompt_ids_of,
    read_answer,
    version_in,
)
from gateway.hangup import after_a_hang_up
from gateway.prompt import EXTENDED
from gateway.streaming import streamed

Doc = dict[str, Any]

VERSION_PATHS = ("/get_weight_version", "/get_model_info", "/weight_info")
"""Where servers tell the version of their weights: SGLang, and vLLM with VLLM_SERVER_DEV_MODE=1."""
COMPARED = 5
"""Likeliest tokens asked for, so that two requests have some in common whatever they sample."""
TOLERANCE = 0.05
"""Of the ratio between two gaps of log probabilities, which is 2 or 1."""
STREAMED_TOKENS = 64
"""Enough for a tool call."""
CALL: Doc = {"role": "user", "content": "Call the tool `look`."}
USER: Doc = {"role": "user", "content": "Say a word."}
SYSTEM: Doc = {"role": "system", "content": "Be brief."}
DEVELOPER: Doc = {**SYSTEM, "role": "developer"}
REPLY: Doc = {"role": "assistant", "content": "Yes."}
CALLED: Doc = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "call_0", "type": "function", "function": {"name": "look", "arguments": "{}"}}],
}
LOOKED: Doc = {"role": "tool", "tool_call_id": "call_0", "content": "A tree."}
THOUGHT: Doc = {"reasoning": "They want me to look."}
"""As conversions write it."""
TOOL: Doc = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}},
}


class ProbeFailed(Exception):
    """One line: the server cannot serve at all."""


async def probe(engine: Engine, temperature: float) -> Capabilities:
    """What the engine can do when it is sampled at `temperature`."""
    engine.url, models = await base_url(engine)
    length = max_model_len(models, engine.model)
    neutral = await neutral_settings(engine)
    level, answer = await capture_level(engine)
    processed = await is_processed(engine) if level != "text" else None
    lacking = await missing(engine, level, answer, processed, temperature)
    if level == "tokens" and lacking:
        level = "logprobs" if answer.logprobs else "text"
    system = await accepts_messages(engine, [USER, REPLY, SYSTEM, USER])
    developer = await accepts_messages(engine, [DEVELOPER, USER])
    tokenizes = await answers(engine, "/tokenize", {"model": engine.model, "messages": [USER]})
    told = await version_path(engine)
    tools = await accepts(engine, {"tools": [TOOL]})
    otherwise = await stream_differs(engine, level, [TOOL] if tools else [])
    lines = (
        f"level {level}" + (f": not tokens, because {'; '.join(lacking)}" if level != "tokens" else ""),
        f"log probabilities are {PROCESSED[processed]}",
        f"a system message in the middle is {'kept' if system else 'sent as a user message in a tag'}",
        f"a developer message is {'taken' if developer else 'refused'} by the template, and sent as a system message",
        f"reasoning in the history {await reasoning_kept(engine)}",
        f"tools are {'accepted' if tools else 'refused'}",
        f"the streamed form {otherwise or 'agrees with the unary one'}",
        f"a reply sent back {await echo(engine, answer)}",
        f"a generation whose client hung up {await after_a_hang_up(engine, request(engine, [USER]))}",
        f"the version of the weights is {'told by ' + told if told else 'what the trainer names when it resumes'}",
    )
    return Capabilities(level, processed, neutral, system, tokenizes, told, length, otherwise is None, lines)


PROCESSED = {True: "after temperature", False: "before temperature (raw)", None: "absent or not comparable"}


def request(engine: Engine, messages: list[Doc], **members: Any) -> Doc:
    return {"model": engine.model, "messages": messages, "max_completion_tokens": 8, "temperature": 1.0, **members}


async def base_url(engine: Engine) -> tuple[str, list[Any]]:
    """The address below which the routes lie, with or without /v1, and the models there."""
    problem = "nothing"
    for url in (engine.url, f"{engine.url}/v1"):
        try:
            status, value = await engine.get(f"{url}/models")
        except UNREACHABLE as error:
            problem = type(error).__name__
            continue
        if status == 200 and isinstance(value, dict) and isinstance(value.get("data"), list):
            return url, value["data"]
        problem = f"status {status}"
    raise ProbeFailed(f"{engine.url}/models answers {problem}: is it the base URL of an OpenAI-compatible server?")


async def neutral_settings(engine: Engine) -> Doc:
    """The settings beyond OpenAI's as the engine takes them; {} when it takes none."""
    for members in EXTENDED:
        if await accepts(engine, members):
            return members
    return {}


def max_model_len(models: list[Any], name: str) -> int | None:
    names = [model.get("id") for model in models if isinstance(model, dict)]
    if name not in names:
        raise ProbeFailed(f"the engine does not serve {name!r}; it serves: {', '.join(map(str, names)) or 'nothing'}")
    found = models[names.index(name)].get("max_model_len")
    return found if isinstance(found, int) else None


async def capture_level(engine: Engine) -> tuple[str, Answer]:
    """The most that the server accepts to be asked for, and what it answered."""
    problem: Refused | None = None
    for level, capture in CAPTURES.items():
        try:
            return level, read_answer(await post(engine, request(engine, [USER], **capture)))
        except Refused as refused:
            problem = refused
    raise ProbeFailed(f"a short call fails: {problem}")


async def missing(engine: Engine, level: str, answer: Answer, processed: bool | None, temperature: float) -> list[str]:
    """What keeps the server from level `tokens`."""
    if level != "tokens":
        return ["the server refuses to be asked for token ids"]
    found = faults(answer)
    again = read_answer(await post(engine, request(engine, [USER], **CAPTURES["tokens"])))
    if again.prompt_ids != answer.prompt_ids:
        found.append("the same request gave other prompt ids")
    if processed is not True and temperature != 1.0:
        found.append("log probabilities are raw, which only a temperature of 1 allows")
    return found


async def is_processed(engine: Engine) -> bool | None:
    """Twice the temperature halves the gap between two tokens, unless the values are raw."""
    cold, warm = [await first_logprobs(engine, temperature) for temperature in (1.0, 2.0)]
    both = sorted(cold.keys() & warm.keys(), key=lambda token: cold[token])
    if len(both) < 2 or warm[both[0]] == warm[both[-1]]:
        return None
    ratio = (cold[both[-1]] - cold[both[0]]) / (warm[both[-1]] - warm[both[0]])
    return True if abs(ratio - 2) < 2 * TOLERANCE else False if abs(ratio - 1) < TOLERANCE else None


async def first_logprobs(engine: Engine, temperature: float) -> dict[str, float]:
    """Of a few tokens in the first place, the likeliest among them: vLLM puts the sampled one before them."""
    members = {"temperature": temperature, "logprobs": True, "top_logprobs": COMPARED, "max_completion_tokens": 1}
    try:
        choice = (await post(engine, request(engine, [USER], **members)))["choices"][0]
        found = [(str(top["token"]), float(top["logprob"])) for top in choice["logprobs"]["content"][0]["top_logprobs"]]
    except (Refused, KeyError, IndexError, TypeError, ValueError):
        return {}
    seen = Counter(token for token, _ in found)
    return {token: logprob for token, logprob in found if seen[token] == 1}


async def echo(engine: Engine, first: Answer) -> str:
    """Whether the next prompt starts with the first one and its reply."""
    if first.prompt_ids is None or first.sampled_ids is None:
        return "cannot be followed without ids"
    reply = {"role": "assistant", "content": first.message.get("content") or ""}
    try:
        second = await post(engine, request(engine, [USER, reply, USER], **CAPTURES["tokens"]))
    except Refused:
        return "is refused"
    before, after = [*first.prompt_ids, *first.sampled_ids], prompt_ids_of(second) or []
    common = next(
        (n for n, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after))
    )
    if common == len(before):
        return "extends the prompt token by token"
    return f"breaks the prompt at token {common} of {len(before)}: expect more than one sequence per rollout"


async def stream_differs(engine: Engine, level: str, tools: list[Doc]) -> str | None:
    """What the streamed form of a reply gives otherwise than the unary one; None when that is nothing."""
    members = {**CAPTURES[level], **({"tools": tools} if tools else {})}
    asked = request(engine, [CALL], **members) | {"temperature": 0.0, "max_completion_tokens": STREAMED_TOKENS}
    try:
        return difference(read_answer(await post(engine, asked)), await streamed(engine, asked))
    except Refused as refused:
        return f"fails: {refused.message}"


async def reasoning_kept(engine: Engine) -> str:
    """By the length of the prompt, which every server tells. Templates keep it in the turn under way at most."""
    lengths = [await prompt_length(engine, [USER, reply, LOOKED]) for reply in (CALLED, {**CALLED, **THOUGHT})]
    if None in lengths:
        return "is refused, or the length of the prompt is not told"
    return "is kept while the turn goes on" if lengths[0] != lengths[1] else "is left out by the template"


async def prompt_length(engine: Engine, messages: list[Doc]) -> int | None:
    try:
        usage = object_at(await post(engine, request(engine, messages, tools=[TOOL])), "usage")
    except Refused:
        return None
    found = usage.get("prompt_tokens")
    return found if isinstance(found, int) else None


async def version_path(engine: Engine) -> str | None:
    for path in VERSION_PATHS:
        try:
            status, value = await engine.get(engine.root + path)
        except UNREACHABLE:
            continue
        if status == 200 and version_in(value) is not None:
            return path
    return None


async def accepts(engine: Engine, members: Doc) -> bool:
    return await accepts_messages(engine, [USER], **members)


async def accepts_messages(engine: Engine, messages: list[Doc], **members: Any) -> bool:
    try:
        await post(engine, request(engine, messages, **members))
    except Refused:
        return False
    return True


async def answers(engine: Engine, path: str, body: Doc) -> bool:
    try:
        return isinstance((await engine.post(engine.root + path, body)).get("count"), int)
    except Refused:
        return False


async def post(engine: Engine, body: Doc) -> Doc:
    return await engine.post(f"{engine.url}/chat/completions", body)
