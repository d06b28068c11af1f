"""The agent CLIs, run bare against the gateway, and what was recorded of a run."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import threading
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from conftest import until
from engine import MODEL
from matrix import Cell
from recorded import Doc, Recorder
from wire import Asked, Drop, wire

from core.harnesses.npm import DEFAULT_PREFIX
from gateway.breaks import explain_breaks
from gateway.graph import Graph, build
from gateway.sequences import sequences

SECONDS = 120


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
    model |= {"maxTokens": 32768, "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0}}
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
SLOW = ("pi", "opencode")
"""A turn of these takes seconds of the processor, and their dialect is tried by the stock clients."""
TERMINAL = ("turn.completed", "turn.failed", "result", "agent_end")


@dataclass
class Case:
    """A run of one CLI: what it did, what it sent, and what was recorded."""

    gateway: Recorder
    cli: str
    folder: Path
    exit_code: int | None = None
    asked: list[Asked] = field(default_factory=list)
    events: list[Doc] = field(default_factory=list)

    def play(self, cell: Cell) -> None:
        """A cell of the matrix, to its end; checked for what the CLI must have done."""
        engine = self.gateway.engine
        engine.script = cell.script
        engine.faults.extend(cell.faults)
        options = cell.options.get(self.cli, ())
        self.run(
            options, cell.windows.get(self.cli), cell.drop, patient=cell.exits is not None, **cell.limits(self.cli)
        )
        assert (*self.made,) == cell.made and self.said(cell.says)
        assert cell.exits is None or self.exit_code == cell.exits[self.cli]

    def run(
        self,
        options: tuple[str, ...] = (),
        window: int | None = None,
        drop: Drop | None = None,
        patient: bool = False,
        **budgets: Any,
    ) -> None:
        """The task; `window` is the context that the CLI believes the model to have."""
        asked = {"rollout_id": self.gateway.rollout, "budgets": budgets}
        opened = self.gateway.control("POST", "/attempts", asked).json()
        home, work = self.folder / "home", self.folder / "work"
        work.mkdir(parents=True)
        with wire(opened["base_url"], self.gateway.engine, drop) as proxy:
            proxy.read = lambda: "--include-partial-messages" not in options or self.said("Let me.")
            proxy.clients = self.clients
            self.asked = proxy.asked
            cli = CLIS[self.cli](proxy.url, opened["api_key"], str(home), window)
            for name, text in cli.files.items():
                (home / name).parent.mkdir(parents=True, exist_ok=True)
                (home / name).write_text(text)
            home.mkdir(exist_ok=True)
            self.follow(self.start(cli, options), patient)

    def start(self, cli: Cli, options: tuple[str, ...]) -> subprocess.Popen[str]:
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.folder / "home"), "LANG": "C.UTF-8"}
        with (self.folder / "errors").open("w") as errors:
            return subprocess.Popen(
                [*cli.command[:-1], *options, cli.command[-1]],
                cwd=self.folder / "work",
                env=environment | cli.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )

    def follow(self, process: subprocess.Popen[str], patient: bool) -> None:
        """Up to the terminal event, or the end: some CLIs linger for seconds."""
        assert process.stdout
        overdue = threading.Timer(SECONDS, os.killpg, (process.pid, signal.SIGKILL))
        overdue.start()
        try:
            for line in process.stdout:
                with contextlib.suppress(ValueError):
                    self.events.append(json.loads(line))
                if not patient and self.events and self.events[-1].get("type") in TERMINAL:
                    break
            else:
                self.exit_code = process.wait()
        finally:
            overdue.cancel()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()

    def clients(self) -> int:
        return int(self.gateway.control("GET", f"/attempts/{self.gateway.rollout}/1").json()["clients"])

    def said(self, text: str) -> bool:
        return text in json.dumps(self.events)

    @property
    def made(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "work").iterdir() if path.name.startswith("made"))

    def graph(self) -> Graph:
        return graph_of(self.gateway, self.asked)

    def chains(self, graph: Graph, role: str = "agent") -> list[int]:
        """How many calls each root of that role has below it, itself included."""
        roots = [root for root in graph.roots if graph.calls[root].role == role]
        return [sum(root in graph.path(call) for call in graph.calls) for root in roots]


def graph_of(gateway: Recorder, asked: list[Asked]) -> Graph:
    """Of what was delivered in the end; checked for what holds in every cell."""
    until(lambda: "reply" not in gateway.states())
    again = [one for number, one in enumerate(asked) if one.status == 200 and resent(one, asked[:number])]
    until(lambda: sum(record.resends for record in gateway.trace().calls.values()) >= len(again))
    graph = build(gateway.trace().calls.values())
    assert not [found for found in explain_breaks(graph) if found.caused_by == "gateway"]
    trained = sum(weight for row in sequences(graph, {}).rows for weight in row["weights"])
    eligible = [call.record for call in graph.calls.values() if call.role in ("agent", "subagent")]
    assert trained == sum(len(record.sampled_ids or ()) for record in eligible)
    for one in asked:
        if one.call_id in graph.calls:
            assert len(graph.tools(one.call_id)) == offered(one.body), "a tool was lost"
    return graph


def resent(one: Asked, before: list[Asked]) -> bool:
    return any(other.dropped and other.body == one.body for other in before)


def offered(body: Doc) -> int:
    """Tools on the wire, those in a namespace one by one."""
    return sum(len(tool["tools"]) if tool.get("type") == "namespace" else 1 for tool in body.get("tools") or ())
