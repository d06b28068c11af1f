"""`python3 -m core serve`: the embedded Agents API on this machine.

On start it prints, ready to paste into a shell:

    export OPENAI_BASE_URL='http://127.0.0.1:PORT/v1'
    export OPENAI_API_KEY='…'
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import gc
import ipaddress
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import uvicorn
import uvloop

from core.budget import BadPrices, load_prices
from core.connection import connections
from core.doctor import examine, exit_code
from core.egress import new_client
from core.harnesses import registry
from core.harnesses.npm import DEFAULT_PREFIX
from core.reap import ReapFailed, reap
from core.sandbox import SandboxUnavailable
from core.sandbox.backends import AUTO, CHOICES, start_backend, weaker
from core.server import Api
from core.sessions import Options, Sessions
from core.store import StorageFailed, Store, StoreUnavailable
from core.temporary import temporary_data

KEY_VARIABLE = "CORE_API_KEY"
USAGE_ERROR = 2
STORAGE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO)
SLOTS = 64
TTL_SECONDS = 24 * 3600.0
CLIENT_SECONDS = 60.0


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python3 -m core", description="An Agents API for one machine.")
    commands = top.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="serve the API until SIGTERM or Ctrl-C")
    serve.add_argument("--host", default="127.0.0.1", help=f"beyond loopback {KEY_VARIABLE} must be set (%(default)s)")
    serve.add_argument("--port", type=int, default=0, help="0: any free port (%(default)s)")
    serve.add_argument("--data", type=Path, help="where state is kept (a temporary directory, removed at the end)")
    serve.add_argument("--slots", type=int, default=SLOTS, help="sandboxes at a time; more turns wait (%(default)s)")
    serve.add_argument("--session-ttl", type=float, default=TTL_SECONDS, help="a session's life in s (%(default)s)")
    serve.add_argument(
        "--client-timeout",
        type=float,
        default=CLIENT_SECONDS,
        help="s a client may take to send a request, or to take in any of an answer, until it is dropped (%(default)s)",
    )
    serve.add_argument("--prices", type=Path, help="JSON of US dollars per million tokens, for spend limits")
    serve.add_argument(
        "--exit-with-stdin",
        action="store_true",
        help="stop, and kill all sandboxes, when standard input closes",
    )
    doctor = commands.add_parser("doctor", help="say what holds on this machine: exit 0 all, 3 most, 2 no sandboxes")
    for command in (serve, doctor):
        command.add_argument(
            "--npm-prefix",
            type=Path,
            default=DEFAULT_PREFIX,
            help="where `npm install --prefix` put pi and opencode (core/npm; else they are looked for on PATH)",
        )
        command.add_argument(
            "--sandbox", choices=CHOICES, default=AUTO, help="auto: the strongest that works here (%(default)s)"
        )
    reaper = commands.add_parser("reap", help="remove the sessions that a dead client left")
    which = reaper.add_mutually_exclusive_group(required=True)
    which.add_argument("--run", metavar="ID", help="those whose metadata names this run_id")
    which.add_argument("--all", action="store_true")
    reaper.add_argument("--data", type=Path, help="of a server that is down (OPENAI_BASE_URL: one that runs)")
    return top


class Refused(Exception):
    """The server cannot start; the message is one line that says what to do."""


def is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio turns Nagle's delay off.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        raise Refused(f"cannot listen on {host}:{port}: {error}") from None
    return listener


@contextlib.contextmanager
def data_directory(chosen: Path | None) -> Iterator[Path]:
    if chosen is None:
        with temporary_data() as temporary:
            yield temporary
        return
    try:
        chosen.mkdir(parents=True, exist_ok=True)
        probe = chosen / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise Refused(f"cannot write to {chosen}: {error.strerror}") from None
    yield chosen.resolve()


async def serve(arguments: argparse.Namespace, data: Path, key: str) -> None:
    """Runs the server to its end. Raises Refused, SandboxUnavailable, StoreUnavailable, BadPrices."""
    prices = load_prices(arguments.prices)
    listener = listen(arguments.host, arguments.port)
    store = Store(data)
    harnesses = registry(arguments.npm_prefix)
    mounts = [mount for harness in harnesses.values() for mount in harness.mounts() or []]
    try:
        backend, reason = await start_backend(arguments.sandbox, data, mounts)
    except BaseException:
        store.close()
        raise
    options = Options(min(arguments.slots, backend.slots or arguments.slots), prices, arguments.session_ttl)
    try:
        async with new_client() as client:
            sessions = Sessions(store, backend, harnesses, client, data, options)
            sessions.recover()
            server = uvicorn.Server(configuration(Api(sessions, key), arguments.client_timeout))
            if arguments.exit_with_stdin:
                watch_stdin(server)
            backend.on_lost = lambda: stop(server, "the sandbox launcher died")
            gc.freeze()  # what was imported stays: collections need not look through it again and again
            if line := weaker(backend, reason):
                logging.getLogger("core").warning(line)
            announce(listener, arguments.host, key)
            await server.serve(sockets=[listener])
            await sessions.close()
    finally:
        await backend.close()
        store.close()


def configuration(app: Api, client_seconds: float) -> uvicorn.Config:
    """Without what a private server has no use for: logs of each access, proxy headers, a server header."""
    return uvicorn.Config(
        app,
        http=connections(client_seconds),
        lifespan="off",
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=1,
    )


def announce(listener: socket.socket, host: str, key: str) -> None:
    listener.listen(2048)
    shown = f"[{host}]" if ":" in host else host
    print(f"export OPENAI_BASE_URL='http://{shown}:{listener.getsockname()[1]}/v1'")
    print(f"export OPENAI_API_KEY='{key}'", flush=True)


def stop(server: uvicorn.Server, reason: str) -> None:
    logging.getLogger("core").error("stopping: %s", reason)
    server.should_exit = True


def watch_stdin(server: uvicorn.Server) -> None:
    """Whoever started the server holds its standard input open; when that process dies, however, it closes."""
    loop = asyncio.get_running_loop()

    def readable() -> None:
        if not os.read(0, 4096):
            loop.remove_reader(0)
            server.should_exit = True

    os.set_blocking(0, False)
    loop.add_reader(0, readable)


def main() -> int:
    arguments = parser().parse_args()
    try:
        if arguments.command == "doctor":
            findings = examine(arguments.npm_prefix, arguments.sandbox)
            with contextlib.suppress(BrokenPipeError):  # a reader that has seen enough, such as head
                print("\n".join(finding.line() for finding in findings), flush=True)
            return exit_code(findings)
        if arguments.command == "reap":
            count = reap(arguments.run, arguments.data)
            print(f"{count} session{'s' * (count != 1)} removed")
            return 0
        return serve_command(arguments)
    except (Refused, ReapFailed, SandboxUnavailable, StoreUnavailable, StorageFailed, BadPrices) as error:
        print(f"core: {error}", file=sys.stderr)
        return USAGE_ERROR
    except OSError as error:
        if error.errno not in STORAGE_ERRORS:
            raise
        print(f"core: cannot write to {error.filename or arguments.data}: {error.strerror}", file=sys.stderr)
        return USAGE_ERROR


def serve_command(arguments: argparse.Namespace) -> int:
    logging.basicConfig(format="core: %(message)s", level=logging.WARNING, stream=sys.stderr)
    os.umask(0o022)  # sandboxes run under other user ids and must be able to read what is laid out for them
    # uvicorn stops on these signals and raises them again afterwards, when there is still something to clean up.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    key = os.environ.pop(KEY_VARIABLE, "")
    if not key and not is_loopback(arguments.host):
        raise Refused(f"set {KEY_VARIABLE} to serve on {arguments.host}: beyond loopback the key must be yours")
    if arguments.slots < 1 or not arguments.session_ttl > 0 or not arguments.client_timeout > 0:
        raise Refused("--slots, --session-ttl and --client-timeout must be positive")
    with data_directory(arguments.data) as data:
        uvloop.run(serve(arguments, data, key or secrets.token_urlsafe(32)))
    return 0


if __name__ == "__main__":
    if not sys.platform.startswith("linux"):
        print("core: sandboxes need Linux; set OPENAI_BASE_URL to an Agents API elsewhere.", file=sys.stderr)
        sys.exit(USAGE_ERROR)
    sys.exit(main())
