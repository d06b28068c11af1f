"""The command line of `rl_eval.py`: what may be asked for, what contradicts itself, which harness runs which model.

Everything is checked before anything is created; each refusal is one line that says what to do and repeats no key.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shlex
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from urllib.parse import urlsplit

from report.record import Json, Refused

# What each harness speaks to its model, what it is given first. `shell` has none: it runs its input as a script.
PROTOCOLS_OF: dict[str, tuple[str, ...]] = {
    "codex": ("responses",),
    "claude_sdk": ("anthropic",),
    "pi": ("chat_completions", "responses", "anthropic"),
    "opencode": ("chat_completions",),
    "shell": (),
}
PROTOCOLS = ("anthropic", "responses", "chat_completions")
SCRIPTED = ("oracle", "nop")


class Pair(NamedTuple):
    """A harness with a model; None leaves the choice to the deployment."""

    harness: str | None
    model: str | None
    protocol: str | None = None  # of the model endpoint that sessions are given; None: they are given none


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line. It names the options and repeats no unknown argument: that may be a key."""
        options = ", ".join(name for name in self._option_string_actions if name.startswith("--"))
        unknown = message.startswith("unrecognized arguments")
        raise Refused(f"unknown option or argument; the options are {options}" if unknown else message)


def number(kind: type[int] | type[float], least: float, most: float, what: str) -> Callable[[str], float]:
    """A converter that takes numbers above `least`, and up to `most`."""

    def convert(text: str) -> float:
        with contextlib.suppress(ValueError):
            if least < kind(text) <= most:
                return kind(text)
        raise argparse.ArgumentTypeError(f"must be {what}")

    return convert


count, seconds = number(int, 0, 1e8, "a positive whole number"), number(float, 0, 1e8, "a positive number")
share = number(float, -1e-300, 1, "a number from 0 to 1")


def counts(text: str) -> list[int]:
    return [int(count(part)) for part in text.split(",")]


def threshold(text: str) -> tuple[int, float]:
    k, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError("must be K=V, such as 1=0.8")
    return int(count(k)), share(value)


def make_parser() -> Parser:
    about = "Run agent CLIs on tasks in sandboxes without network, grade their answers, report pass@k."
    more = (
        "OPENAI_BASE_URL and OPENAI_API_KEY select a deployment of the Agents API; without them an embedded one is "
        "started. MODEL_API_KEY is the key for --model-base-url. Exit codes: 0 done, whatever the rewards; 1 a check "
        "or a gate failed; 2 usage; 3 something was not measured; 130 interrupted."
    )
    parser = Parser(prog="rl_eval.py", description=about, epilog=more, allow_abbrev=False)
    names: Json = {"action": "append", "default": [], "metavar": "NAME"}
    add: Any = parser.add_argument_group("what runs").add_argument
    add("--harness", **names, help="codex, claude_sdk, pi, opencode or shell; repeatable")
    add("--model", **names, help="repeatable; the embedded policies are oracle and nop")
    add("--samples", type=count, metavar="K", help="rollouts per task, harness and model (default 1)")
    add("--tasks", type=Path, default=Path("tasks"), metavar="DIR", help="task folder (default tasks/)")
    add("--task", **names, help="only the task of this id; repeatable")
    add("--timeout", type=seconds, metavar="SECONDS", help="of a rollout (default 900)")
    add("--model-base-url", metavar="URL", help="your model endpoint; {rollout_id} is filled in per rollout")
    add("--model-protocol", choices=PROTOCOLS, help="its protocol (default: what the harness speaks)")
    add = parser.add_argument_group("how it runs").add_argument
    add("--concurrency", type=count, default=4, metavar="N", help="rollouts in flight, at most (default 4)")
    add("--create-rate", type=seconds, metavar="R", help="sessions created per second, at most")
    add("--retries", type=number(int, -1, 100, "a whole number"), default=2, metavar="N",
        help="more attempts after an infrastructure error (default 2)")  # fmt: skip
    add("--max-tokens", type=count, metavar="N", help="of the run; when used up, no rollout starts")
    add("--resume", type=Path, metavar="PATH", help="go on with a run's file: what it owes is run and appended")
    add("--refill", action="store_true", help="with --resume: only what groups lack that have begun")
    add("--force", action="store_true", help="with --resume: even if tasks or options differ; recorded")
    add = parser.add_argument_group("what comes out").add_argument
    add("--out", type=Path, metavar="PATH", help="JSONL file (default runs/<UTC timestamp>.jsonl)")
    add("--k", type=counts, action="append", metavar="K", help="of pass@k and pass^k; repeatable (default 1, samples)")
    add("--json", type=Path, metavar="PATH", help="write the summary with every number")
    add("--junit", type=Path, metavar="PATH", help="write JUnit XML")
    add("--quiet", action="store_true", help="no progress")
    add = parser.add_argument_group("gates: exit code 1 if unmet, 3 if too little was scored").add_argument
    add("--min-reward", type=share, metavar="V", help="mean reward of every harness and model, at least")
    add("--min-pass", type=threshold, action="append", default=[], metavar="K=V", help="their pass@K, at least")
    add("--max-error-rate", type=share, metavar="V", help="rollouts that were not scored, at most")
    add = parser.add_argument_group("instead of a run").add_mutually_exclusive_group().add_argument
    add("--list", action="store_true", help="the tasks, and what would run")
    add("--dry-run", action="store_true", help="check everything, run nothing")
    add("--check", action="store_true", help="solutions must earn 1.0, doing nothing 0.0")
    add("--regrade", type=Path, metavar="PATH", help="grade a file's answers with the tasks as they are now")
    add("--reap", metavar="RUN", help="delete what a killed run left on the deployment")
    return parser


DEFAULTS: Json = {"samples": 1, "timeout": 900.0}
RECORDED = ("harness", "model", "task", "samples", "timeout", "model_base_url", "model_protocol")


def recall_options(o: argparse.Namespace, recorded: Json) -> None:
    """Fill in what the command line leaves open: as the run was started, else the defaults."""
    for name in RECORDED:
        known = [value for value in (recorded.get(name), DEFAULTS.get(name)) if value is not None]
        if getattr(o, name) in (None, []) and known:
            setattr(o, name, known[0])


def refuse_first(problems: Iterable[tuple[Any, str]]) -> None:
    """Raise Refused with the message of the first problem that applies."""
    for applies, message in problems:
        if applies:
            raise Refused(message)


def check_options(o: argparse.Namespace, embedded: bool) -> None:
    """Refuse what this machine, environment or combination of options cannot do."""
    packages = ("openai", "aiohttp", "tenacity", "tabulate", "rich")
    missing = ", ".join(name for name in packages if not importlib.util.find_spec(name))
    key, chosen = os.environ.get("OPENAI_API_KEY"), o.harness or o.model or o.model_base_url
    refuse_first([
        (missing, f"missing packages ({missing}): pip install -r requirements.txt"),
        (o.check and not embedded, "--check needs the embedded Core: unset OPENAI_BASE_URL"),
        (o.reap and embedded, "--reap needs a deployment in OPENAI_BASE_URL: an embedded Core ends with its run"),
        (embedded and sys.platform != "linux", "the embedded Core is for Linux; name a deployment in OPENAI_BASE_URL"),
        (not embedded and not key, "OPENAI_API_KEY must hold the key of the deployment at OPENAI_BASE_URL"),
        (o.check and (chosen or o.out or o.resume), "--check runs the tasks alone: see --help"),
        ((o.regrade or o.reap) and (chosen or o.resume), "--regrade and --reap run nothing: see --help"),
        (o.resume and o.out, "--resume appends to the file it names: leave --out away"),
        ((o.refill or o.force) and not o.resume, "--refill and --force need --resume"),
        *((path and (path.is_dir() or not path.parent.is_dir()), f"cannot write {path}: no such folder, or it is one")
          for path in (o.json, o.junit)),
    ])  # fmt: skip


def check_endpoint(o: argparse.Namespace) -> None:
    """Refuse what contradicts itself, once it is known what was recorded."""
    url, model_key = o.model_base_url, os.environ.get("MODEL_API_KEY")
    refuse_first([
        ("" in o.harness + o.model, "--harness and --model need names"),
        ("shell" in o.harness and o.model, "--harness shell takes no --model: it runs the instruction as a script"),
        (o.model_protocol and url is None, "--model-protocol needs --model-base-url"),
        (url is not None and not is_base_url(url), "--model-base-url must be an http or https URL without user, query "
         "or fragment; it may hold {rollout_id}, and its key goes into MODEL_API_KEY"),
        (url is not None and not o.model, "--model-base-url needs --model: the name that the endpoint knows"),
        (url is not None and not model_key, "--model-base-url needs the endpoint's key in MODEL_API_KEY"),
        (any(k > o.samples for k, _ in o.min_pass), f"--min-pass K=V: K is at most --samples, {o.samples} here"),
    ])  # fmt: skip


def is_base_url(url: str) -> bool:
    """Whether a session takes this URL for its model endpoint."""
    with contextlib.suppress(ValueError):
        parts, odd = urlsplit(url), set(url.replace("{rollout_id}", "")) & set(" {}\\@?#")
        return bool(parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and not odd)
    return False


def choose_pairs(options: argparse.Namespace, embedded: bool) -> list[Pair]:
    """The pairs of harness and model that run. Raises Refused for one that cannot."""
    own_endpoint = options.model_base_url is not None
    harnesses = list(dict.fromkeys(options.harness)) or ["codex" if embedded else None]
    models = list(dict.fromkeys(options.model)) or ["oracle" if embedded else None]
    for name in harnesses if embedded else ():
        if name not in PROTOCOLS_OF:
            raise Refused(f"no harness {name!r}; there are: {', '.join(PROTOCOLS_OF)}")
    for name in () if own_endpoint else models:
        if name in SCRIPTED and not embedded:
            raise Refused(f"the scripted policy {name} needs the embedded Core: unset OPENAI_BASE_URL")
        if name not in SCRIPTED and embedded:
            needs = "--model-base-url, or a deployment in OPENAI_BASE_URL"
            raise Refused(f"model {name!r} needs {needs}; without, there are: {', '.join(SCRIPTED)}")
    pairs = []
    for harness in harnesses:
        known, named = PROTOCOLS_OF.get(harness or "", ()), options.model_protocol
        if known and named and named not in known:
            raise Refused(f"harness {harness} speaks {' or '.join(known)}, not {named}")
        if own_endpoint and not known and not named and harness != "shell":
            raise Refused(f"harness {harness or 'default'}: --model-protocol must name what it speaks")
        protocol = (named or next(iter(known), None)) if own_endpoint or embedded else None
        pairs += [Pair("shell", None)] if harness == "shell" else [Pair(harness, model, protocol) for model in models]
    return pairs


def resume_command(o: argparse.Namespace, path: Path) -> str:
    """How to go on: what the file does not record is said again, where it was not left to the default."""
    kept = [(name, getattr(o, name)) for name in ("tasks", "concurrency", "create_rate", "retries")]
    words = [f"--{name.replace('_', '-')}={value}" for name, value in kept if value != make_parser().get_default(name)]
    return shlex.join([sys.executable, sys.argv[0], "--resume", str(path), *words])
