"""One run of the recording gateway: the engine is probed, then rollouts and the trainer are served until the end."""

from __future__ import annotations

import argparse
import contextlib
import gc
import resource
import socket
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from gateway.attempts import Attempts, Budgets
from gateway.calls import Calls
from gateway.control import Control
from gateway.engine import Engine
from gateway.probe import ProbeFailed, probe
from gateway.prompt import Policy
from gateway.recording import RecordingGateway
from gateway.server import application, serve
from gateway.store import Store
from gateway.token_in import TokenIn, Unavailable
from gateway.weights import Weights

DISK_THREADS = 32
"""Calls that wait for the disk at a time."""


NEEDS = "needs an engine that renders, generates from ids and derenders (vllm serve --enable-scale-out)"


class RunFailed(Exception):
    """One line that says why nothing is served."""


class Run:
    def __init__(self, options: argparse.Namespace, key: str, admin_key: str, upstream_key: str, url: str) -> None:
        self.options = options
        self.key = key
        self.admin_key = admin_key
        self.upstream_key = upstream_key
        self.url = url

    async def serve(self, listener: socket.socket, control: socket.socket, ready: Callable[[], None]) -> None:
        """Until a signal or, if asked, the end of standard input; RunFailed when it cannot begin."""
        options, secrets = self.options, [self.admin_key, self.upstream_key]
        engine = Engine(options.upstream, options.model, self.upstream_key)
        try:
            purpose = await self.probed(engine)
            token_in = await self.token_in(engine)
            store = opened(options)
            raise_file_limit()
            with ThreadPoolExecutor(DISK_THREADS, "disk") as disk:
                attempts = Attempts(store, self.key, secrets, purpose, budgets(options), disk)
                policy = Policy(options.temperature, options.template_kwargs, tuple(options.omit_tool))
                weights, grace, live = Weights(engine), options.retry_grace, options.live
                calls = Calls(engine, attempts, weights, policy, grace, live, token_in)
                served = application(RecordingGateway(engine, attempts, calls))
                controlled = Control(calls, attempts, self.admin_key, self.url).application()
                # What is loaded by now stays. A full collection that looks at it would hold up every call in flight.
                gc.freeze()
                ready()
                await serve([(served, listener), (controlled, control)], options.exit_with_stdin)
        finally:
            await engine.close()

    async def probed(self, engine: Engine) -> str:
        """The purpose of the run, once the engine is known."""
        try:
            engine.capabilities = await probe(engine, self.options.temperature)
        except ProbeFailed as reason:
            raise RunFailed(str(reason)) from None
        level = engine.capabilities.level
        purpose = self.options.purpose or ("train" if level == "tokens" else "eval")
        for line in (*engine.capabilities.lines, f"purpose {purpose}"):
            print(f"gateway: engine {engine.model}: {line}", file=sys.stderr)
        if purpose == "train" and level != "tokens":
            found = engine.capabilities.lines[0]
            raise RunFailed(f"--purpose train needs level tokens, but the engine is at {found}. Use --purpose eval")
        if self.options.live and level == "tokens" and not engine.capabilities.streams:
            found = next(line for line in engine.capabilities.lines if line.startswith("the streamed form"))
            raise RunFailed(f"--live would record other tokens than the engine sampled: {found}. Leave it away")
        return purpose

    async def token_in(self, engine: Engine) -> TokenIn | None:
        """The engine's token routes, if they were asked for."""
        if not self.options.token_in:
            return None
        routes = TokenIn(engine)
        try:
            told = await routes.probe(self.options.template_kwargs)
        except Unavailable as reason:
            raise RunFailed(f"--token-in {NEEDS}, but of this one: {reason}") from None
        print(f"gateway: engine {engine.model}: {told}", file=sys.stderr)
        return routes


def opened(options: argparse.Namespace) -> Store:
    try:
        store = Store(options.traces)
        with tempfile.TemporaryFile(dir=options.traces):  # or the first call would be the one to find out
            return store
    except OSError as error:
        raise RunFailed(f"--traces {options.traces}: {error.strerror}") from None


def budgets(options: argparse.Namespace) -> Budgets:
    return Budgets(
        options.max_calls, options.max_sampled_tokens, options.max_context, options.max_wall, options.on_context
    )


def raise_file_limit() -> None:
    """A connection to the harness, one to the engine and a log per rollout are more than most systems allow."""
    with contextlib.suppress(ValueError, OSError):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
