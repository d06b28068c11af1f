"""The conformance matrix: the real CLIs through the recording gateway, and the token graph that comes of it.

In every cell: no break, no tool lost, what is trained is what was sampled once, and the harness ends by itself.
The CLIs run bare; pi and opencode are skipped where npm has not installed them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from conftest import until
from engine import MODEL, Engine, call_text, engine
from recorded import Doc, Recorder, another, recorder

from core.harnesses.npm import DEFAULT_PREFIX
from gateway.breaks import explain_breaks
from gateway.graph import Graph, build
from gateway.sequences import sequences

SHELLS = {"exec_command": "cmd", "shell_command": "command", "Bash": "command", "bash": "command"}
SECONDS = 60


@dataclass
class Cli:
    command: list[str]
    environment: dict[str, str]
    files: dict[str, str]


def package_file(package: str, *parts: str) -> str:
    spec = find_spec(package)
    assert spec and spec.origin
    return str(Path(spec.origin).parent.joinpath(*parts))


def npm(program: str) -> str:
    linked = DEFAULT_PREFIX / "node_modules" / ".bin" / program
    found = str(linked) if linked.exists() else shutil.which(program)
    if found is None:
        pytest.skip(f"{program} is not installed: npm install --prefix core/npm")
    return found


def codex(url: str, key: str, home: str, window: int | None = None) -> Cli:
    provider = {"name": "p", "base_url": url, "env_key": "KEY", "wire_api": "responses"}
    inline = ",".join(f"{name}={json.dumps(value)}" for name, value in provider.items())
    command = [package_file("codex_cli_bin", "bin", "codex"), "exec", "--json", "--skip-git-repo-check"]
    command += ["--dangerously-bypass-approvals-and-sandbox", "-m", MODEL, "-c", "model_provider=p"]
    command += ["-c", 'web_search="disabled"', "-c", f"model_providers.p={{{inline}}}"]
    command += ["-c", f"model_context_window={window}"] if window else []
    return Cli([*command, "Do the task."], {"KEY": key}, {})


def claude(url: str, key: str, home: str, window: int | None = None) -> Cli:
    command = [package_file("claude_agent_sdk", "_bundled", "claude"), "-p", "--output-format", "stream-json"]
    command += ["--verbose", "--dangerously-skip-permissions", "--model", MODEL, "Do the task."]
    environment = {
        "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": key,
        "CLAUDE_CONFIG_DIR": f"{home}/claude",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "IS_SANDBOX": "1",
    }
    environment |= {"CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(window)} if window else {}
    return Cli(command, environment, {})


def claude_bare(url: str, key: str, home: str, window: int | None = None) -> Cli:
    cli = claude(url, key, home, window)
    return Cli([*cli.command[:2], "--bare", *cli.command[2:]], cli.environment, {})


def pi(url: str, key: str, home: str, window: int | None = None) -> Cli:
    model = {"id": MODEL, "name": MODEL, "reasoning": False, "input": ["text"]}
    model |= {"contextWindow": window or 131072}
    model |= {"maxTokens": 16384, "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0}}
    provider = {"baseUrl": url, "api": "openai-completions", "apiKey": "KEY", "models": [model]}
    command = [npm("pi"), "--mode", "json", "--provider", "p", "--model", MODEL, "-p", "Do the task."]
    environment = {"KEY": key, "PI_CODING_AGENT_DIR": f"{home}/pi", "PI_OFFLINE": "1"}
    return Cli(command, environment, {"pi/models.json": json.dumps({"providers": {"p": provider}})})


def opencode(url: str, key: str, home: str, window: int | None = None) -> Cli:
    options = {"baseURL": url, "apiKey": key}
    model: Doc = {"name": MODEL, **({"limit": {"context": window, "output": 8192}} if window else {})}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "p", "options": options, "models": {MODEL: model}}
    permission = {"edit": "allow", "bash": "allow", "webfetch": "deny"}
    settings = {"autoupdate": False, "share": "disabled", "provider": {"p": provider}, "permission": permission}
    command = [npm("opencode"), "run", "--pure", "--format", "json", "--model", f"p/{MODEL}", "Do the task."]
    names = ("AUTOUPDATE", "LSP_DOWNLOAD", "MODELS_FETCH", "SHARE")
    environment = {f"OPENCODE_DISABLE_{name}": "1" for name in names}
    return Cli(command, environment, {".config/opencode/opencode.json": json.dumps(settings)})


CLIS = {"codex": codex, "claude": claude, "claude --bare": claude_bare, "pi": pi, "opencode": opencode}
TERMINAL = ("turn.completed", "turn.failed", "result", "agent_end")


@dataclass
class Case:
    """A run of one CLI: what it did and what was recorded."""

    gateway: Recorder
    cli: str
    folder: Path
    exit_code: int | None = None

    def run(
        self, url: str | None = None, options: tuple[str, ...] = (), window: int | None = None, **budgets: Any
    ) -> None:
        """The task, to its end; `window` is the context that the CLI believes the model to have."""
        asked = {"rollout_id": self.gateway.rollout, "budgets": budgets}
        opened = self.gateway.control("POST", "/attempts", asked).json()
        home, work = self.folder / "home", self.folder / "work"
        work.mkdir(parents=True)
        cli = CLIS[self.cli](url or opened["base_url"], opened["api_key"], str(home), window)
        for name, text in cli.files.items():
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).write_text(text)
        home.mkdir(exist_ok=True)
        environment = {"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8", **cli.environment}
        with (self.folder / "errors").open("w") as errors:
            process = subprocess.Popen(
                [*cli.command[:-1], *options, cli.command[-1]],
                cwd=work,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        self.follow(process)

    def follow(self, process: subprocess.Popen[str]) -> None:
        """Up to the terminal event, or the end: some CLIs linger for seconds."""
        assert process.stdout
        overdue = threading.Timer(SECONDS, os.killpg, (process.pid, signal.SIGKILL))
        overdue.start()
        self.events: list[Doc] = []
        try:
            for line in process.stdout:
                with contextlib.suppress(ValueError):
                    self.events.append(json.loads(line))
                if self.events and self.events[-1].get("type") in TERMINAL:
                    break
            else:
                self.exit_code = process.wait()
        finally:
            overdue.cancel()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()

    def said(self, text: str) -> bool:
        return text in json.dumps(self.events)

    @property
    def made(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "work").iterdir() if path.name.startswith("made"))

    def graph(self) -> Graph:
        """Of what was delivered in the end; checked for what holds in every cell."""
        until(lambda: "reply" not in self.gateway.states())
        trace = self.gateway.trace()
        graph = build(trace.calls.values())
        assert not [found for found in explain_breaks(graph) if found.caused_by == "gateway"]
        assert not [one for call in graph.calls.values() for one in call.findings if one["code"] == "tool_omitted"]
        rows = sequences(graph, {}).rows
        trained = sum(weight for row in rows for weight in row["weights"])
        eligible = [call.record for call in graph.calls.values() if call.role in ("agent", "subagent")]
        assert trained == sum(len(record.sampled_ids or ()) for record in eligible)
        for served in self.gateway.engine.served:
            assert len(served.body.get("tools") or ()) in (0, *self.tools())
        return graph

    def tools(self) -> set[int]:
        return {len(served.body.get("tools") or ()) for served in self.gateway.engine.served}

    def chains(self, graph: Graph, role: str = "agent") -> list[int]:
        """How many calls each root of that role has below it, itself included."""
        roots = [root for root in graph.roots if graph.calls[root].role == role]
        return [sum(root in graph.path(call) for call in graph.calls) for root in roots]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorder]:
    with engine() as running, recorder(running, tmp_path_factory.mktemp("shared")) as gateway:
        yield gateway


# A turn of these takes seconds of the processor, and their dialect is tried by the stock clients.
SLOW = ("pi", "opencode")


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in CLIS])
def case(request: pytest.FixtureRequest, shared: Recorder, tmp_path: Path) -> Case:
    if request.param in ("pi", "opencode"):
        npm(request.param)
    gateway = another(shared)
    gateway.engine.script = works
    return Case(gateway, request.param, tmp_path)


def command(asked: Doc, text: str) -> str:
    """A call of the shell tool that the request offers."""
    names = [tool["function"]["name"] for tool in asked["tools"]]
    name = next(name for name in SHELLS if name in names)
    more = {"description": "Make it"} if name in ("Bash", "bash") else {}
    return call_text(name, **{SHELLS[name]: text, **more})


def results(asked: Doc) -> int:
    return sum(message["role"] == "tool" for message in asked["messages"])


def works(asked: Doc) -> str:
    """One tool call, then an answer."""
    if not asked.get("tools"):
        return "A title."
    return "All is done." if results(asked) else "Let me.\n" + command(asked, "touch made1")


def works_in_parallel(asked: Doc) -> str:
    if not asked.get("tools") or results(asked):
        return works(asked)
    return command(asked, "touch made1") + command(asked, "touch made2")


def never_ends(asked: Doc) -> str:
    return command(asked, f"echo {results(asked)}") if asked.get("tools") else "A title."


def side(cli: str) -> list[int]:
    """opencode asks for a title beside the task."""
    return [1] if cli == "opencode" else []


def test_base(case: Case) -> None:
    case.run()
    assert case.made == ["made1"] and case.said("All is done.")
    graph = case.graph()
    assert case.chains(graph) == [2]
    assert [role for role in (graph.calls[root].role for root in graph.roots) if role != "agent"] == [
        "auxiliary" for _ in side(case.cli)
    ]


def test_parallel_tools(case: Case) -> None:
    case.gateway.engine.script = works_in_parallel
    case.run()
    assert case.made == ["made1", "made2"] and case.said("All is done.")
    assert case.chains(case.graph()) == [2]


def test_engine_failures(case: Case) -> None:
    case.gateway.engine.faults.extend(["500", "500"])
    case.run()
    assert case.made == ["made1"] and case.said("All is done.")
    assert case.chains(case.graph()) == [2]
    assert case.gateway.states().count("failed") == 2


def test_budget(case: Case) -> None:
    case.gateway.engine.script = never_ends
    case.run(max_calls=3)
    assert case.said("Step budget exhausted; stopping.")
    graph = case.graph()
    assert "synthetic" in case.gateway.states() and len(graph.calls) == 3
    assert not [call for call in graph.calls.values() if "exhausted" in call.text]


@dataclass
class Cutter:
    """A proxy before the gateway that drops its first connection with a request that offers tools, once told to."""

    target: tuple[str, int]
    engine: Engine
    cuts: int = 0

    def serve(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                threading.Thread(target=self.pass_on, args=(client,), daemon=True).start()

    def pass_on(self, client: socket.socket) -> None:
        server = socket.create_connection(self.target)
        threading.Thread(target=self.pump, args=(server, client), daemon=True).start()
        with contextlib.suppress(OSError):
            self.requests(client, server)
        for one in (client, server):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def requests(self, client: socket.socket, server: socket.socket) -> None:
        while data := client.recv(1 << 16):
            if not self.cuts and self.engine.held.is_set():
                self.engine.held.clear()
            server.sendall(data)
            if not self.cuts and b'"tools"' in data:
                self.cuts = 1
                until(lambda: self.engine.served)
                threading.Timer(0.05, self.engine.held.set).start()
                return

    @staticmethod
    def pump(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_RDWR)


def test_a_dropped_connection(case: Case) -> None:
    """The connection of the first call breaks while the engine works: the resend is the same call."""
    url = case.gateway.exports["MODEL_BASE_URL"]
    host, port = url.split("/")[2].split(":")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(50)
        cutter = Cutter((host, int(port)), case.gateway.engine)
        threading.Thread(target=cutter.serve, args=(listener,), daemon=True).start()
        own = url.replace(f":{port}", f":{listener.getsockname()[1]}").replace("{rollout_id}", case.gateway.rollout)
        case.run(own)
    assert case.made == ["made1"] and case.said("All is done.") and cutter.cuts == 1
    graph = case.graph()
    assert case.chains(graph) == [2]
    assert sum(call.record.resends for call in graph.calls.values()) == 1


# --- Cells that take longer, or that only some CLIs have ---------------------------------------------------


def delegates(asked: Doc) -> str:
    """The main agent, which alone is told of the task, has a subagent do the work."""
    if "Do the task." not in json.dumps([one for one in asked["messages"] if one["role"] == "user"]):
        return works(asked)
    if not asked.get("tools"):
        return "A title."
    return "All is done." if results(asked) else spawning(asked)


def spawning(asked: Doc) -> str:
    """A call of the tool that starts a subagent."""
    names = [tool["function"]["name"] for tool in asked["tools"]]
    name = next(name for name in ("Agent", "Task", "task") if name in names)
    kind = "general" if name == "task" else "general-purpose"
    return call_text(name, description="Sub", prompt="SUBTASK: make it.", subagent_type=kind)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["claude", "opencode"], indirect=True)
def test_a_subagent_is_a_chain_of_its_own(case: Case) -> None:
    case.gateway.engine.script = delegates
    case.run()
    assert case.made == ["made1"] and case.said("All is done.")
    graph = case.graph()
    # Claude Code starts it in the background: the main agent is called once more when it is done.
    assert case.chains(graph) == [3 if case.cli == "claude" else 2] and case.chains(graph, "subagent") == [2]
    if case.cli == "claude":
        roles = [[one["role"] for one in served.body["messages"]] for served in case.gateway.engine.served]
        assert any("system" in each[1:] for each in roles)  # in the middle, where the harness put it


@pytest.mark.slow
def test_a_context_that_is_too_long_ends_by_itself(case: Case) -> None:
    """The harness prints more and more until the engine's context is full."""

    def swells(asked: Doc) -> str:
        return command(asked, "head -c 20000 /dev/zero | tr '\\0' x") if asked.get("tools") else "A title."

    case.gateway.engine.script = swells
    case.run(max_context=150_000)
    assert case.said("Step budget exhausted; stopping.")
    case.graph()


@pytest.mark.slow
@pytest.mark.parametrize("case", ["codex"], indirect=True)
def test_usage_held_high_is_ended_by_the_call_budget(case: Case) -> None:
    """Codex compacts as long as the engine counts more tokens than its window holds."""
    case.gateway.engine.script = lambda asked: command(asked, "echo on") if asked.get("tools") else "A summary. " * 50
    case.run(options=("-c", "model_context_window=20000"), max_calls=8)
    assert len(case.gateway.engine.served) == 8 and case.said("Step budget exhausted; stopping.")
    kinds = [record.labels["kind"] for record in case.gateway.trace().calls.values()]
    assert kinds.count("compaction") > 1 and "synthetic" in case.gateway.states()
    graph = case.graph()
    assert len(graph.continues) > 1
