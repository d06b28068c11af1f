"""`python3 -m gateway serve`: start the gateway and say where it listens. The other commands are in commands.py."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import os
import secrets
import signal
import socket
import sys
from pathlib import Path

from gateway import commands
from gateway.scripted import ScriptBook

DESCRIPTION = """\
Serve the scripted policies `oracle` and `nop` at a URL per rollout, in the Responses, Chat Completions and
Messages dialects.

When it listens, it prints two lines for a shell:
  export MODEL_BASE_URL='http://HOST:PORT/rollouts/{rollout_id}/v1'
  export MODEL_API_KEY='KEY'
The key is GATEWAY_API_KEY of the environment, or random. SIGINT and SIGTERM stop it at once."""

SCRIPTS_HELP = """\
the script book, one JSON object: {"scripts": {"NAME": "BASH TEXT"}, "rollouts": {"ROLLOUT_ID": "NAME"}};
a NAME of null gives a rollout no script, so that only nop answers it. `-` (the default) reads it from
the first line of standard input, so that no solution lies in a file"""

EXIT_HELP = """\
stop at the end of standard input, which comes when the parent closes it or dies; what is read after the
script book is ignored"""


class CannotStart(Exception):
    """One line that says why."""


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.run is not None:
        return int(options.run(options))
    # Until the server takes over, the signals end the process in the same way.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(0))
    try:
        start(options.host, options.port, options.scripts, options.exit_with_stdin)
    except CannotStart as reason:
        print(f"gateway: {reason}", file=sys.stderr)
        return 2
    return 0


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser("python3 -m gateway", description="The inference gateway.")
    top.set_defaults(run=None)  # serve is started here, whatever else runs by itself
    chosen = top.add_subparsers(required=True, metavar="COMMAND")
    commands.add(chosen)
    serve = chosen.add_parser(
        "serve",
        help="serve the scripted policies",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    serve.add_argument("--host", default="127.0.0.1", help="default 127.0.0.1; any but loopback needs GATEWAY_API_KEY")
    serve.add_argument("--port", type=port, default=0, help="default 0: the system chooses")
    serve.add_argument("--scripts", metavar="PATH|-", default="-", help=SCRIPTS_HELP)
    serve.add_argument("--exit-with-stdin", action="store_true", help=EXIT_HELP)
    return top


def port(text: str) -> int:
    number = int(text)
    if not 0 <= number <= 65535:
        raise ValueError
    return number


def start(host: str, port: int, scripts: str, exit_with_stdin: bool) -> None:
    key = api_key(host)
    book = read_book(scripts)
    # Imported late: --help and a refusal to start do without.
    from gateway.server import application, serve

    app = application(book, key)
    with listen(host, port) as listener:
        announce(listener, host, key)
        asyncio.run(serve(app, listener, exit_with_stdin))


def api_key(host: str) -> str:
    key = os.environ.get("GATEWAY_API_KEY", "")
    if not key and not is_loopback(host):
        raise CannotStart(f"--host {host} is not loopback: set GATEWAY_API_KEY")
    if not (key.isascii() and (key + "x").isprintable()) or key != key.strip():
        raise CannotStart("GATEWAY_API_KEY must be printable ASCII, without spaces around it, to fit in a header")
    return key or secrets.token_urlsafe(32)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_book(path: str) -> ScriptBook:
    try:
        text = sys.stdin.buffer.readline() if path == "-" else Path(path).read_bytes()
        return ScriptBook.parse(text)
    except (OSError, ValueError) as error:
        where = "standard input" if path == "-" else path
        raise CannotStart(f"no script book in {where}: {error}") from None


def listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # The protocol is named, or asyncio would leave Nagle's algorithm on: 40 ms per call.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
        return listener
    except OSError as error:
        raise CannotStart(f"cannot listen on {host} port {port}: {error.strerror}") from None


def announce(listener: socket.socket, host: str, key: str) -> None:
    """From here on connections are accepted, so the address may be told."""
    netloc = f"[{host}]" if ":" in host else host
    url = f"http://{netloc}:{listener.getsockname()[1]}/rollouts/{{rollout_id}}/v1"
    quoted = key.replace("'", "'\\''")
    print(f"export MODEL_BASE_URL='{url}'\nexport MODEL_API_KEY='{quoted}'", flush=True)


if __name__ == "__main__":
    sys.exit(main())
