"""`python3 -m gateway serve`: start the gateway and say where it listens. The other commands are in commands.py."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ipaddress
import math
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from gateway import commands, strict
from gateway.scripted import ScriptBook

DESCRIPTION = """\
Serve an inference server, or the scripted policies `oracle` and `nop`, at a URL per rollout, in the Responses,
Chat Completions and Messages dialects.

With --upstream every call is recorded below --traces as the engine saw it. Without, the policies answer.

When it listens, it prints two lines for a shell:
  export MODEL_BASE_URL='http://HOST:PORT/rollouts/{rollout_id}/v1'
  export MODEL_API_KEY='KEY'
and, with --upstream, two more for the trainer:
  export GATEWAY_CONTROL_URL='http://127.0.0.1:PORT'
  export GATEWAY_ADMIN_KEY='KEY'
The keys are GATEWAY_API_KEY and GATEWAY_ADMIN_KEY of the environment, or random. UPSTREAM_API_KEY is sent to the
engine, if it is set. SIGINT and SIGTERM stop it at once."""

SCRIPTS_HELP = """\
the script book, one JSON object: {"scripts": {"NAME": "BASH TEXT"}, "rollouts": {"ROLLOUT_ID": "NAME"}};
a NAME of null gives a rollout no script, so that only nop answers it. `-` (the default) reads it from
the first line of standard input, so that no solution lies in a file"""

EXIT_HELP = """\
stop at the end of standard input, which comes when the parent closes it or dies; what is read after the
script book is ignored"""


PURPOSE_HELP = """\
train: sampling is pinned, and what an engine cannot be trained with is refused; eval: harnesses choose.
Default: train where the engine gives token ids and log probabilities, else eval"""

OMIT_HELP = """\
leave out a tool, by its name or its type, that the engine cannot express, instead of refusing the call;
every such call is marked"""

TOKEN_IN_HELP = """\
prompt a call that goes on from an earlier reply with the ids that were sampled, where the engine's own rendering shows
that they fit; needs `vllm serve --enable-scale-out`"""

CONTEXT_HELP = """\
when a prompt is too long: stop (the harness is told to stop; default), or native_error (the error of
its own dialect, so that it may compact)"""

LIVE_HELP = """\
pass streams on while the engine writes them; what ends a reply still waits until the reply is recorded"""

GRACE_HELP = "how long a call of a client that hung up goes on, for its resend to find; default 3"


class CannotStart(Exception):
    """One line that says why."""


class Parser(argparse.ArgumentParser):
    """Says on one line what is wrong, and takes no option by half its name."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments"):
            message = "unknown option or argument"  # not repeated: it may be a key
        raise CannotStart(f"{message} (see {self.prog} --help)")


def main(arguments: list[str] | None = None) -> int:
    try:
        options = parser().parse_args(arguments)
    except CannotStart as reason:
        print(f"gateway: {reason}", file=sys.stderr)
        return 2
    if options.run is not None:
        return int(options.run(options))
    # Until the server takes over, the signals end the process in the same way.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(0))
    try:
        check(options)
        if options.upstream is None:
            start(options.host, options.port, options.scripts or "-", options.exit_with_stdin)
        else:
            record(options)
    except CannotStart as reason:
        print(f"gateway: {reason}", file=sys.stderr)
        return 2
    return 0


def parser() -> argparse.ArgumentParser:
    top = Parser("python3 -m gateway", description="The inference gateway.")
    top.set_defaults(run=None)  # serve is started here, whatever else runs by itself
    chosen = top.add_subparsers(required=True, metavar="COMMAND")
    commands.add(chosen)
    serve = chosen.add_parser(
        "serve",
        help="serve an engine, or the scripted policies",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    serve.add_argument("--host", default="127.0.0.1", help="default 127.0.0.1; any but loopback needs GATEWAY_API_KEY")
    serve.add_argument("--port", type=port, default=0, help="default 0: the system chooses")
    serve.add_argument("--scripts", metavar="PATH|-", help=SCRIPTS_HELP)
    serve.add_argument("--exit-with-stdin", action="store_true", help=EXIT_HELP)
    add_recording(serve.add_argument_group("recording an engine").add_argument)
    return top


def add_recording(add: Callable[..., Any]) -> None:
    add("--upstream", metavar="URL", help="base URL of an OpenAI-compatible inference server")
    add("--model", metavar="NAME", help="the model it serves; every call goes to this one")
    add("--traces", metavar="DIR", type=Path, help="where the traces go")
    add("--purpose", choices=("train", "eval"), help=PURPOSE_HELP)
    add(
        "--temperature",
        type=above_zero,
        default=1.0,
        metavar="T",
        help="of training; default 1. eval: what harnesses ask",
    )
    add("--template-kwargs", type=json_object, default={}, metavar="JSON", help="chat_template_kwargs of every call")
    add("--live", action="store_true", help=LIVE_HELP)
    add("--token-in", action="store_true", help=TOKEN_IN_HELP)
    add("--omit-tool", action="append", default=[], metavar="NAME", help=OMIT_HELP)
    add("--max-calls", type=positive, metavar="N", help="engine calls of an attempt; then the harness is told to stop")
    add("--max-sampled-tokens", type=positive, metavar="N", help="tokens an attempt may sample")
    add("--max-context", type=positive, metavar="N", help="prompt tokens of one call")
    add("--max-wall", type=above_zero, metavar="SECONDS", help="time since an attempt was opened")
    add("--on-context", choices=("stop", "native_error"), default="stop", help=CONTEXT_HELP)
    add("--retry-grace", type=seconds, default=3.0, metavar="SECONDS", help=GRACE_HELP)
    add(
        "--control-port",
        type=port,
        default=0,
        help="of the control listener, on loopback; default 0: the system chooses",
    )
    add("--admin-key", metavar="KEY", help="of the control listener; GATEWAY_ADMIN_KEY does not show in process lists")


def positive(text: str) -> int:
    with contextlib.suppress(ValueError):
        if (number := int(text)) > 0:
            return number
    raise argparse.ArgumentTypeError("must be a positive whole number")


def above_zero(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (number := float(text)) < math.inf:
            return number
    raise argparse.ArgumentTypeError("must be a number above 0")


def seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= (number := float(text)) < math.inf:
            return number
    raise argparse.ArgumentTypeError("must be a number of seconds, 0 or more")


def json_object(text: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        if isinstance(value := strict.loads(text.encode()), dict):
            return value
    raise argparse.ArgumentTypeError("must be a JSON object")


def port(text: str) -> int:
    with contextlib.suppress(ValueError):
        if 0 <= (number := int(text)) <= 65535:
            return number
    raise argparse.ArgumentTypeError("must be a number from 0 to 65535")


def check(options: argparse.Namespace) -> None:
    """Refuse what would be left unheard, or would show a key."""
    if options.upstream is None:
        if options.model or options.traces:
            raise CannotStart("--model and --traces go with --upstream URL, the engine whose calls are recorded")
        if options.token_in:
            raise CannotStart("--token-in goes with --upstream URL: the scripted policies have no token ids")
        return
    if not options.model or options.traces is None:
        raise CannotStart("--upstream needs --model NAME and --traces DIR")
    if options.live and options.token_in:
        raise CannotStart("--live and --token-in exclude each other: the token routes do not stream messages")
    if options.scripts is not None:
        raise CannotStart("--scripts is for the scripted policies: leave it or --upstream away")
    if not is_base_url(options.upstream):
        raise CannotStart(
            "--upstream must be an http or https URL without user, query or fragment; its key goes into "
            "UPSTREAM_API_KEY"
        )


def is_base_url(url: str) -> bool:
    with contextlib.suppress(ValueError):
        parts = urlsplit(url)
        return bool(
            parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and not set(url) & set(" @?#")
        )
    return False


def start(host: str, port: int, scripts: str, exit_with_stdin: bool) -> None:
    key = api_key(host)
    book = read_book(scripts)
    # Imported late: --help and a refusal to start do without.
    from gateway.server import ScriptedGateway, application, serve

    app = application(ScriptedGateway(book, key))
    with listen(host, port) as listener:
        announce(listener, host, key)
        asyncio.run(serve([(app, listener)], exit_with_stdin))


def record(options: argparse.Namespace) -> None:
    """Serve the engine until told to stop."""
    key, upstream_key = api_key(options.host), key_of("UPSTREAM_API_KEY")
    admin_key = options.admin_key or key_of("GATEWAY_ADMIN_KEY") or secrets.token_urlsafe(32)
    if admin_key == key:
        raise CannotStart("GATEWAY_ADMIN_KEY and GATEWAY_API_KEY must differ: rollouts must not control the gateway")
    # Imported late: --help and the scripted policies do without.
    import uvloop

    from gateway.run import Run, RunFailed

    with listen(options.host, options.port) as listener, listen("127.0.0.1", options.control_port) as control:
        run = Run(options, key, admin_key, upstream_key, rollout_url(listener, options.host))

        def ready() -> None:
            announce(listener, options.host, key)
            print(f"export GATEWAY_CONTROL_URL='http://127.0.0.1:{control.getsockname()[1]}'")
            print(f"export GATEWAY_ADMIN_KEY='{quoted(admin_key)}'", flush=True)

        try:
            uvloop.run(run.serve(listener, control, ready))
        except RunFailed as reason:
            raise CannotStart(str(reason)) from None


def api_key(host: str) -> str:
    key = key_of("GATEWAY_API_KEY")
    if not key and not is_loopback(host):
        raise CannotStart(f"--host {host} is not loopback: set GATEWAY_API_KEY")
    return key or secrets.token_urlsafe(32)


def key_of(name: str) -> str:
    """What the environment has under this name, or nothing."""
    key = os.environ.get(name, "")
    if not (key.isascii() and (key + "x").isprintable()) or key != key.strip():
        raise CannotStart(f"{name} must be printable ASCII, without spaces around it, to fit in a header")
    return key


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
    url = rollout_url(listener, host)
    print(f"export MODEL_BASE_URL='{url}'\nexport MODEL_API_KEY='{quoted(key)}'", flush=True)


def rollout_url(listener: socket.socket, host: str) -> str:
    netloc = f"[{host}]" if ":" in host else host
    return f"http://{netloc}:{listener.getsockname()[1]}/rollouts/{{rollout_id}}/v1"


def quoted(key: str) -> str:
    return key.replace("'", "'\\''")


if __name__ == "__main__":
    sys.exit(main())
