"""A real vLLM behind the gateway: what it can do is found out, and what is recorded is what its weights say.

    .ci/vllm                        installs it, for the CPU, in .venv/vllm
    pytest -m vllm                  or with VLLM_VENV=FOLDER, where it lies elsewhere

Two servers with the weights of vllm_model.py: `good` as the README says, with the token routes open, and `plain` with
vLLM's own defaults. The calls recorded are scored again by transformers, in vLLM's environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from clis import Case
from conftest import until
from engine import MODEL, Engine
from recorded import ROOT, Doc, Recorder, body, recorder

from gateway.breaks import explain_breaks
from gateway.graph import Graph, build
from gateway.record import CallRecord, stored_ids

pytestmark = pytest.mark.vllm

VENV = Path(os.environ.get("VLLM_VENV", ROOT / ".venv/vllm"))
if not (VENV / "bin/vllm").exists():
    pytest.skip(f"vLLM is not in {VENV}: run .ci/vllm, or say in VLLM_VENV where it is", allow_module_level=True)

HEAT = 0.7
BOUND = 1e-4
"""Of |log π_again - log π_recorded| at any sampled token."""
STARTS_IN = 300
"""Seconds."""
README_FLAGS = ("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm")
ROLLOUTS = count(1)


# --- The servers ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def server(weights: Path, *flags: str) -> Iterator[Engine]:
    """`vllm serve` with these weights; its output is in a file beside them. It is ready once `answering`."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    command = [str(VENV / "bin/vllm"), "serve", str(weights), "--served-model-name", MODEL, "--port", str(port)]
    command += ["--host", "127.0.0.1", "--enforce-eager", "--dtype", "float32", "--max-model-len", "65536"]
    command += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", *flags]
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_PLUGINS": ""}
    log = weights.parent / f"vllm-{port}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield Engine(f"http://127.0.0.1:{port}/v1")
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def answering(engine: Engine) -> Engine:
    def listens() -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{engine.url}/models", timeout=5).status_code == 200
        return False

    until(listens, STARTS_IN, every=0.5)
    return engine


def vllm_python(*arguments: str) -> list[str]:
    return [str(VENV / "bin/python"), str(ROOT / "tests/vllm_model.py"), *arguments]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vllm") / "model"
    subprocess.run(vllm_python("make", str(folder)), check=True)
    return folder


@pytest.fixture(scope="module")
def servers(weights: Path) -> Iterator[tuple[Engine, Engine]]:
    """(good, plain), which start at the same time."""
    with server(weights, *README_FLAGS, "--enable-scale-out") as good, server(weights) as plain:
        yield answering(good), answering(plain)


@pytest.fixture(scope="module")
def good(servers: tuple[Engine, Engine]) -> Engine:
    return servers[0]


@pytest.fixture(scope="module")
def plain(servers: tuple[Engine, Engine]) -> Engine:
    return servers[1]


@pytest.fixture(scope="module")
def by_chat(good: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorder]:
    with recorder(good, tmp_path_factory.mktemp("chat"), "--temperature", str(HEAT)) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def by_tokens(good: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorder]:
    with recorder(good, tmp_path_factory.mktemp("tokens"), "--temperature", str(HEAT), "--token-in") as gateway:
        yield gateway


@pytest.fixture(params=["chat route", "token-in"])
def gateway(request: pytest.FixtureRequest, by_chat: Recorder, by_tokens: Recorder) -> Recorder:
    chosen = by_chat if request.param == "chat route" else by_tokens
    return replace(chosen, rollout=f"r{next(ROLLOUTS)}")


# --- What was recorded --------------------------------------------------------------------------------------


def calls(gateway: Recorder) -> list[CallRecord]:
    until(lambda: "reply" not in gateway.states())
    return sorted(gateway.trace().calls.values(), key=lambda record: record.seq)


def graph(gateway: Recorder) -> Graph:
    return build(calls(gateway))


def arrays(gateway: Recorder) -> list[Doc]:
    """P + S, L and the temperature of each call that the engine answered."""
    known, found = gateway.trace().calls, []
    for record in calls(gateway):
        if record.state == "delivered":
            assert record.fatal is None and record.sampled_ids and record.logprobs
            ids = stored_ids(known, record.call_id)
            heat = record.sampling_applied["temperature"]
            made = {"ids": ids, "start": len(ids) - len(record.sampled_ids), "logprobs": record.logprobs}
            found.append({**made, "temperature": heat})
    return found


@dataclass
class Judge:
    """Scores calls again with the weights that the servers have."""

    process: subprocess.Popen[str]

    def score(self, recorded: list[Doc]) -> list[Doc]:
        assert self.process.stdin and self.process.stdout
        found = []
        for one in recorded:
            self.process.stdin.write(json.dumps(one) + "\n")
            self.process.stdin.flush()
            found.append(json.loads(self.process.stdout.readline()))
        return found

    def is_exact(self, recorded: list[Doc], what: str, heated: bool = True) -> None:
        """Scored again it is the same, and one place further on, or before temperature, it is not."""
        found = self.score(recorded)
        worst, tokens = max(one["worst"] for one in found), sum(len(one["logprobs"]) for one in recorded)
        print(f"\n{what}: {len(recorded)} calls, {tokens} sampled tokens, worst difference {worst:.1e}")
        assert worst < BOUND and max(one["shifted"] for one in found) > BOUND
        assert (max(one["raw"] for one in found) > BOUND) == heated


@pytest.fixture(scope="module")
def judge(weights: Path) -> Iterator[Judge]:
    command = vllm_python("score", str(weights))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Judge(process)
        assert process.stdin
        process.stdin.close()


def way(gateway: Recorder) -> str:
    return "token-in" if "token-in" in gateway.said() else "chat route"


def talk(gateway: Recorder, *turns: str, **members: Any) -> list[Doc]:
    messages: list[Doc] = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        reply = gateway.post("chat", body("chat", messages=messages, **members))
        assert reply.status_code == 200, reply.text
        messages.append(reply.json()["choices"][0]["message"])
    return messages


# --- The probe ----------------------------------------------------------------------------------------------


def test_the_probe_finds_level_tokens(by_chat: Recorder) -> None:
    said = by_chat.said()
    assert "level tokens\n" in said and "log probabilities are after temperature" in said
    assert "tools are accepted" in said and "a system message in the middle is kept" in said
    assert "told by /weight_info" in said and "purpose train" in said


def test_the_probe_says_that_the_defaults_are_raw(plain: Engine, tmp_path: Path) -> None:
    with recorder(plain, tmp_path, "--temperature", str(HEAT)) as gateway:
        said = gateway.said()
    why = "log probabilities are raw, which only a temperature of 1 allows"
    assert f"level logprobs: not tokens, because {why}" in said and "purpose eval" in said
    assert "log probabilities are before temperature (raw)" in said


def test_the_probe_is_the_same_every_time(good: Engine, plain: Engine, tmp_path: Path) -> None:
    """It samples, and vLLM names the sampled token among the likeliest."""
    for engine, word in ((good, "after temperature"), (plain, "before temperature")):
        for _ in range(4):
            with recorder(engine, tmp_path) as gateway:
                assert f"log probabilities are {word}" in gateway.said()


def test_at_temperature_1_the_defaults_are_exact_too(plain: Engine, judge: Judge, tmp_path: Path) -> None:
    """The model's generation defaults (top_k and others) do not reach the distribution: neutral values are sent."""
    with recorder(plain, tmp_path) as gateway:
        assert "level tokens" in gateway.said()
        talk(gateway, "Begin.", "Go on.", "And on.", max_tokens=100)
        judge.is_exact(arrays(gateway), "vLLM's defaults, temperature 1", heated=False)


def test_token_in_is_refused_where_the_routes_are_closed(plain: Engine, tmp_path: Path) -> None:
    told = r"--enable-scale-out\), but of this one: .* 403: Scale-out endpoints are"
    with pytest.raises(AssertionError, match=told), recorder(plain, tmp_path, "--token-in"):
        pass


# --- Exactness ----------------------------------------------------------------------------------------------


def test_stock_clients_in_three_dialects(gateway: Recorder, judge: Judge) -> None:
    url, key = gateway.url(), gateway.key
    chat = openai.OpenAI(base_url=url, api_key=key, max_retries=0)
    messages_ = anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key=key, max_retries=0)
    history: list[Any] = []
    for text in ("Begin.", "Go on."):
        history.append({"role": "user", "content": text})
        chunks = list(chat.chat.completions.create(model=MODEL, messages=history, max_tokens=60, stream=True))
        said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        history.append({"role": "assistant", "content": said})
    items: list[Any] = []
    for text in ("Begin.", "Go on."):
        items.append({"role": "user", "content": text})
        response = chat.responses.create(model=MODEL, input=items, max_output_tokens=60, store=False)
        items += [item.to_dict() for item in response.output]
    turns: list[Any] = []
    for text in ("Begin.", "Go on."):
        turns.append({"role": "user", "content": text})
        with messages_.messages.stream(model=MODEL, messages=turns, max_tokens=60) as stream:
            turns.append({"role": "assistant", "content": stream.get_final_message().to_dict()["content"]})
    assert [record.dialect for record in calls(gateway)] == ["chat"] * 2 + ["responses"] * 2 + ["messages"] * 2
    judge.is_exact(arrays(gateway), f"stock clients, {way(gateway)}")


@pytest.mark.parametrize("cli", ["codex", "claude --bare"])
def test_real_harnesses(gateway: Recorder, judge: Judge, tmp_path: Path, cli: str) -> None:
    """As many runs as it takes to have seen ten calls, four of a run at the most."""
    recorded: list[Doc] = []
    for run in range(10):
        case = Case(replace(gateway, rollout=f"{gateway.rollout}-{run}"), cli, tmp_path / str(run))
        case.run(max_calls=4, max_sampled_tokens=400)
        found = graph(case.gateway)
        assert not [one for one in explain_breaks(found) if one.caused_by == "gateway"]
        assert len(found.roots) == 1 or way(gateway) == "chat route"
        recorded += arrays(case.gateway)
        if len(recorded) >= 10:
            break
    assert len(recorded) >= 10
    judge.is_exact(recorded, f"{cli}, {way(gateway)}")


# --- Drift --------------------------------------------------------------------------------------------------


def drifting(gateway: Recorder) -> Iterator[Recorder]:
    """Conversations of a rollout each, without a limit: most of them hold a reply that encodes to other ids."""
    for number in count(1):
        one = replace(gateway, rollout=f"drift-{number}")
        talk(one, *["Go on."] * 8, max_tokens=60)
        yield one


def test_a_reply_that_encodes_to_other_ids_breaks_the_chain_on_the_chat_route(by_chat: Recorder) -> None:
    one = next(one for one in drifting(by_chat) if explain_breaks(graph(one)))
    breaks = explain_breaks(graph(one))
    assert {(found.cls, found.caused_by) for found in breaks} == {("retokenized_reply", "engine")}
    records, known = calls(one), one.trace().calls
    whole = [stored_ids(known, record.call_id) for record in records]
    for before, after, record in zip(whole, whole[1:], records[1:], strict=False):
        assert (after[: len(before)] != before) == (record.call_id in [found.call for found in breaks])


def test_token_in_makes_one_chain_of_it(by_tokens: Recorder, judge: Judge) -> None:
    def drifted(one: Recorder) -> bool:
        return any(step["kind"] == "token_in" for record in calls(one) for step in record.transforms)

    one = next(one for one in drifting(by_tokens) if drifted(one))
    assert len(graph(one).roots) == 1
    found = [finding for record in calls(one) for finding in record.findings if "token_in" in finding["code"]]
    assert [finding["detail"].split()[0] for finding in found] == ["rendered:", *["continues"] * 7]
    judge.is_exact(arrays(one), "after drift, token-in")


# --- Both ways, and versions --------------------------------------------------------------------------------


@pytest.mark.parametrize("tools", [False, True], ids=["text", "tools"])
def test_both_ways_give_the_same_where_nothing_is_stored(good: Engine, tmp_path: Path, tools: bool) -> None:
    """Greedy, so that both sample alike: P, S, L, the message and its reason, replies of others in the history too."""
    history = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Begin.  é\n"},
        {"role": "assistant", "content": " Sure. "},
        {"role": "user", "content": "Go on."},
    ]
    told = []
    for options in ((), ("--token-in",)):
        with recorder(good, tmp_path, "--purpose", "eval", *options) as gateway:
            for limit in (1, 7, 400):
                asked = body("chat", tools=tools, messages=history, temperature=0, max_tokens=limit)
                assert gateway.post("chat", asked, f"{limit}{options}").status_code == 200
            records = [
                record for limit in (1, 7, 400) for record in calls(replace(gateway, rollout=f"{limit}{options}"))
            ]
        told.append([compared(record) for record in records])
    assert told[0] == told[1] and len(told[0]) == 3


def compared(record: CallRecord) -> Doc:
    assert record.prompt_ids and record.message
    message = {**record.message, "tool_calls": [one["function"] for one in record.message.get("tool_calls") or ()]}
    names = ("sampled_ids", "logprobs", "finish_reason", "stop_reason", "usage", "parse_ok", "version_segments")
    return {name: getattr(record, name) for name in names} | {"message": message, "prompt": record.prompt_ids.tail}


def test_weights_that_change_in_the_middle_of_a_call(good: Engine, tmp_path: Path) -> None:
    """Named anew all the time, until that was in the middle of a call: with few cores a server hears of little then."""
    root, names = good.url.removesuffix("/v1"), count(1)
    asked = body("chat", temperature=1.0, max_tokens=2000, logit_bias={"2": -100})
    with recorder(good, tmp_path, "--purpose", "eval", "--token-in") as gateway:
        gateway.client.timeout = httpx.Timeout(STARTS_IN)
        for number in range(8):
            one = replace(gateway, rollout=f"update-{number}")
            calling = threading.Thread(target=one.post, args=("chat", asked, one.rollout))
            calling.start()
            while calling.is_alive():
                rename(root, str(next(names)))
            (record,) = calls(one)
            if len(record.version_segments) > 1:
                break
    if len(record.version_segments) == 1:
        pytest.skip("the server heard of no update in the middle of a call; test_token_in.py has the case for sure")
    spans = [(one["start"], one["end"]) for one in record.version_segments]
    assert record.version_exact and (spans[0][0], spans[-1][1]) == (0, 2000)
    assert [start for start, _ in spans[1:]] == [end for _, end in spans[:-1]]
    versions = [int(one["version"]) for one in record.version_segments]
    assert versions == sorted(set(versions))


def rename(root: str, version: str) -> None:
    """As a trainer updates weights: calls under way are kept, and go on after it."""
    for path, told in (("pause?mode=keep", {}), ("update_weight_version", {"new_version": version}), ("resume", {})):
        httpx.post(f"{root}/{path}", json=told, timeout=STARTS_IN).raise_for_status()
