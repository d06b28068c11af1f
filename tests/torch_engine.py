"""A small real inference server: a random Qwen3 of half a million parameters on the CPU, with vLLM's field shapes.

    python3 tests/torch_engine.py WEIGHTS      prints its URL, serves until standard input ends

Every reported log probability is the model's own, of the token that was emitted, after temperature, from decoding
token by token with a cache. A random model writes no valid tool calls, so the server can be steered: a plan says, turn
by turn, which parts of a reply are sampled freely and which are forced. Forcing chooses the token and nothing else: its
log probability is still the one it had among all others. Nothing masks the distribution.

Its tokenizer is a byte-level BPE trained here on this repository's own text; what a random model samples seldom encodes
to the same ids again. The template, the tool calls and the shapes of replies are those of engine.py.

Control: POST /steer {"turns": [[PART, ...], ...]}, POST /weights {"file", "version", "after_tokens"?}: at once, or
so many tokens into the next reply, whose spans then name both versions.

Not here: streams (the gateway asks unary), sampling settings beyond temperature (refused), batching.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import json
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import uvicorn
from engine import Doc, Engine, Served, call_text, error
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from gateway.dialects import chat
from gateway.prompt import EXTENDED, NEUTRAL
from gateway.scripted import run_script

ROOT = Path(__file__).parents[1]
VOCABULARY = 2048
END = 1
"""The id of <|im_end|>, the second special token."""
CONTEXT = 65536
KEPT_CACHES = 4
SEED = 1
"""Of the sampler, at the start and at each new plan."""
PICKED = "picked-"
"""Begins the id of a call that the text of its reply stands for: the template does not spell it out."""

Part = Doc
"""One of: {"text": T} and {"shell": SCRIPT}, forced; {"sample": N}, up to N tokens or the end; {"end": true}, forced;
{"pick": COMMAND}, no tokens: the reply counts as a call of the shell tool, {hex} being its text in hexadecimal."""


# --- The model: the same for the server and for whoever scores its sequences again -------------------------


def random_model(seed: int, spread: float = 0.15) -> Qwen3ForCausalLM:
    """`spread` is the standard deviation of the weights: the larger, the less even the distributions."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=spread,
        bos_token_id=None,
        eos_token_id=END,
    )
    return Qwen3ForCausalLM(config).eval()


def load(model: Qwen3ForCausalLM, file: str | Path) -> Qwen3ForCausalLM:
    model.load_state_dict(torch.load(file, weights_only=True))
    return model


def scores(model: Qwen3ForCausalLM, ids: list[int], positions: list[int], temperatures: list[float]) -> torch.Tensor:
    """The log probability of the token at each position, at its temperature, in one forward pass without a cache."""
    hidden = model.model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]
    logits = model.lm_head(hidden[torch.tensor(positions) - 1]) / torch.tensor(temperatures)[:, None]
    return logits.log_softmax(-1)[range(len(positions)), [ids[at] for at in positions]]


@functools.cache
def tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [ROOT / "README.md", *sorted(ROOT.glob("core/**/*.py")), *sorted(ROOT.glob("gateway/**/*.py"))]
    made.train_from_iterator((text.read_text() for text in texts), trainer)
    assert made.get_vocab_size() == VOCABULARY
    return made


# --- The server --------------------------------------------------------------------------------------------


@dataclass
class Drawn(Served):
    """A request, and what the model made of it."""

    top: list[list[tuple[int, float]]] = field(default_factory=list)
    """The likeliest tokens at each position."""
    spans: list[Doc] = field(default_factory=list)
    pick: str | None = None


@dataclass
class TorchEngine(Engine):
    max_model_len: int = CONTEXT
    model: Qwen3ForCausalLM = field(default_factory=lambda: random_model(0))
    turns: list[list[Part]] = field(default_factory=lambda: [[{"sample": 8}]])
    """What the assistant's first, second, ... reply of a conversation is made of; the last goes for all later ones."""
    swap: Doc | None = None
    """The weights to take in the middle of the next reply."""
    caches: list[tuple[list[int], DynamicCache]] = field(default_factory=list)
    worker: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    """All work on the model, in order."""

    def encode(self, text: str) -> list[int]:
        ids: list[int] = tokenizer().encode(text).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = tokenizer().decode(ids, skip_special_tokens=False)
        return text

    def served_of(self, body: Doc) -> Drawn:
        return Drawn(body, self.encode(self.render(body)))

    def turn(self, message: Doc) -> str:
        spelled = [called for called in message.get("tool_calls") or () if not called["id"].startswith(PICKED)]
        return super().turn({**message, "tool_calls": spelled})

    def refusal(self, body: Doc) -> str | None:
        odd = [name for name, value in (NEUTRAL | EXTENDED[0]).items() if body.get(name, value) != value]
        odd += [name for name in ("response_format", "stop", "logit_bias", "stream") if body.get(name)]
        odd += ["temperature of 0"] if body.get("temperature") == 0 else []
        return f"this engine has no {', '.join(odd)}" if odd else None

    # --- A reply ---

    def parts(self, body: Doc) -> list[Part]:
        """Of the reply that is due. Titles and the like, which come without tools, are sampled."""
        if not body.get("tools"):
            return [{"sample": 8}]
        said = sum(message["role"] == "assistant" for message in body["messages"])
        return self.turns[min(said, len(self.turns) - 1)]

    def wanted(self, served: Drawn) -> Iterator[int | None]:
        """The tokens of the reply: an id is forced, None is sampled."""
        for part in self.parts(served.body):
            if "sample" in part:
                yield from [None] * part["sample"]
            elif "text" in part:
                yield from self.encode(part["text"])
            elif "shell" in part:
                yield from self.encode(self.shell_call(served.body, part["shell"]))
            elif "end" in part:
                yield END
            else:
                served.pick = part["pick"]

    @staticmethod
    def shell_call(body: Doc, script: str) -> str:
        called = run_script(chat.parse(body).offered, script)
        return call_text(called.tool.name, **json.loads(called.arguments))

    @torch.inference_mode()
    def sample(self, served: Drawn) -> str:  # type: ignore[override]
        room = self.max_model_len - len(served.prompt_ids)
        limit = min(room, served.body.get("max_completion_tokens") or room)
        temperature = served.body.get("temperature", 1.0)
        ids, logits, cache = served.sampled_ids, *self.prefill(served.prompt_ids)
        served.spans = [{"start": 0, "end": 0, "version": self.version}]
        for want in self.wanted(served):
            if len(ids) == limit:
                return "length"
            if self.swap and len(ids) == self.swap["after_tokens"]:
                self.take(self.swap)
                logits, cache = self.prefill([*served.prompt_ids, *ids])
                served.spans.append({"start": len(ids), "end": len(ids), "version": self.version})
            logprobs = (logits / temperature).log_softmax(-1)
            drawn = int(torch.multinomial(logprobs.exp(), 1)) if want is None else want
            self.note(served, drawn, logprobs)
            if drawn == END:
                break
            logits = self.forward([drawn], cache)
        return "stop"

    @staticmethod
    def note(served: Drawn, drawn: int, logprobs: torch.Tensor) -> None:
        served.sampled_ids.append(drawn)
        served.logprobs.append(float(logprobs[drawn]))
        values, tokens = logprobs.topk(served.body.get("top_logprobs") or 1)
        served.top.append(list(zip(tokens.tolist(), values.tolist(), strict=True)))
        served.spans[-1]["end"] += 1

    def prefill(self, ids: list[int]) -> tuple[torch.Tensor, DynamicCache]:
        """The logits after `ids`, and a cache to go on with, begun by that of an earlier prompt."""
        kept, known = max(self.caches, key=lambda one: shared(ids, one[0]), default=([], DynamicCache()))
        common, cache = shared(ids, kept), copy.deepcopy(known)
        if common < len(kept):
            cache.crop(common - len(kept))
        logits = self.forward(ids[common:], cache)
        self.caches = [(ids, copy.deepcopy(cache)), *self.caches][:KEPT_CACHES]
        return logits, cache

    def forward(self, ids: list[int], cache: DynamicCache) -> torch.Tensor:
        output = self.model(input_ids=torch.tensor([ids]), cache=cache, use_cache=True, logits_to_keep=1)
        return output.logits[0, -1].float()

    def take(self, weights: Doc) -> None:
        load(self.model, weights["file"])
        self.version, self.swap, self.caches = weights["version"], None, []

    def completion(self, served: Drawn, reason: str) -> Doc:  # type: ignore[override]
        value = super().completion(served, reason)
        return {**value, "weight_versions": served.spans}

    def message(self, served: Drawn, reason: str) -> Doc:  # type: ignore[override]
        ids = served.sampled_ids
        text = self.decode(ids[:-1] if ids and ids[-1] == END else ids)
        message = self.parse(text, bool(served.body.get("tools")))
        if served.pick is not None:
            called = run_script(chat.parse(served.body).offered, served.pick.format(hex=text.encode().hex()))
            function = {"name": called.tool.name, "arguments": called.arguments}
            message["tool_calls"] = [{"id": f"{PICKED}{len(self.served)}", "type": "function", "function": function}]
        return message

    def logprob_content(self, served: Drawn) -> list[Doc]:  # type: ignore[override]
        content = []
        for number, logprob, top in zip(served.sampled_ids, served.logprobs, served.top, strict=True):
            likeliest = top if served.body.get("top_logprobs") else []
            tops = [{"token": f"token_id:{one}", "logprob": value} for one, value in likeliest]
            one = {"token": f"token_id:{number}", "logprob": logprob, "bytes": None, "top_logprobs": tops}
            content.append(one)
        return content

    # --- The routes ---

    async def chat(self, http: Request) -> Response:
        body = json.loads(await http.body())
        if (problem := self.refusal(body)) is not None:
            return error(400, problem)
        served = self.served_of(body)
        if (too_long := self.overflow(served)) is not None:
            return error(400, too_long)
        self.served.append(served)
        reason = await asyncio.get_running_loop().run_in_executor(self.worker, self.sample, served)
        return JSONResponse(self.completion(served, reason))

    async def steer(self, http: Request) -> Response:
        self.turns = json.loads(await http.body())["turns"]
        torch.manual_seed(SEED)
        return JSONResponse({})

    async def weights(self, http: Request) -> Response:
        told = json.loads(await http.body())
        if "after_tokens" in told:
            self.swap = told
        else:
            await asyncio.get_running_loop().run_in_executor(self.worker, self.take, told)
        return JSONResponse({"version": self.version})

    def application(self) -> Starlette:
        app = super().application()
        app.router.routes += [
            Route("/steer", self.steer, methods=["POST"]),
            Route("/weights", self.weights, methods=["POST"]),
        ]
        return app


def shared(one: list[int], other: list[int]) -> int:
    """How many ids both begin with; one less than all of `one`, whose last id has yet to be put in."""
    most = min(len(one) - 1, len(other))
    return next((at for at in range(most) if one[at] != other[at]), most)


async def serve(server: uvicorn.Server, listener: socket.socket) -> None:
    """Until standard input ends."""
    serving = asyncio.create_task(server.serve([listener]))
    await asyncio.to_thread(sys.stdin.read)
    server.should_exit = server.force_exit = True
    await serving


def main(weights: str) -> None:
    engine = TorchEngine(version="0")
    load(engine.model, weights)
    torch.manual_seed(SEED)
    config = uvicorn.Config(engine.application(), lifespan="off", ws="none", log_config=None, access_log=False)
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        print(f"http://127.0.0.1:{listener.getsockname()[1]}/v1", flush=True)
        asyncio.run(serve(uvicorn.Server(config), listener))


if __name__ == "__main__":
    main(sys.argv[1])
