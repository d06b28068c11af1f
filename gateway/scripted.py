"""The scripted policies: pure functions of a request, so a resend gets the same answer.

`oracle` answers a conversation without tool results with one call of the shell tool that the request
offers, running the rollout's script; it polls while the tool says that the script still runs, and
ends with a final message. `nop` ends at once.

Which shell tool: chosen by the offered name and the schema of its arguments, not by harness, so
that a harness that renames nothing needs nothing here.

How the script travels: where the tool takes an argument list, verbatim after `bash -c`; where it
takes a command line, as a quoted heredoc on descriptor 3, which no shell expands. The script's own
standard input is /dev/null: if bash read the script from there, a program that reads its input would
eat the rest. A script that some harness would refuse, because it is long or holds control characters,
is packed (gzip, base64) and unpacked by bash.

Invariant: a call is a function of its rollout and its request. A resend has the same body (some
clients only reorder its members), so it gets the same reply under the same ids.

Usage is measured, not estimated and never zero: UTF-8 bytes / 4, rounded up, of the conversation
and the tools as compact JSON with sorted members (input) and of the text or the tool arguments
that are sent back (output). Sampling settings are not counted, so `count_tokens` gives the same figure.

Not covered: a script that is still too long when packed is refused when the book is read.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from gzip import compress
from hashlib import sha256
from itertools import count
from typing import Any

from gateway import strict
from gateway.call import Call, Refused, Reply, Request, Tool, ToolCall, Usage, canonical

SHELL_TOOLS = ("exec_command", "shell_command", "shell", "local_shell", "bash")
"""Names of shell tools, lower case, the preferred one first."""

COMMAND_ARGUMENTS = ("cmd", "command")

EXEC_WAIT_MS = 30_000
"""The longest a codex exec_command waits before it returns with the process still running."""
POLL_WAIT_MS = 300_000
"""The longest a codex write_stdin without input waits."""
SCRIPT_TIMEOUT_MS = 600_000
"""The longest foreground command of Claude Code; others take at least as much."""

PLAIN_BYTES = 32 * 1024
"""Longer scripts are packed."""
PACKED_BYTES = 96 * 1024
"""Longer packed ones are refused: harnesses wrap the command and pass it as one argument, and Linux takes
no more than 128 KiB in one (MAX_ARG_STRLEN)."""

# Claude Code refuses a command that holds one, tabs and newlines excepted.
CONTROL_CHARACTER = re.compile(r"[^\t\n\x20-\x7e\xa0-\U0010ffff]")

# The head of codex's exec result; what the script printed comes after a line "Output:".
PROCESS_STATE = re.compile(r"^Process (?:running with session ID (\d+)|exited with code (-?\d+))$", re.MULTILINE)


@dataclass(frozen=True)
class ScriptBook:
    """Which script the oracle runs for which rollout; a rollout may have none."""

    scripts: Mapping[str, str]
    rollouts: Mapping[str, str | None]

    @classmethod
    def parse(cls, text: bytes) -> ScriptBook:
        """Read `{"scripts": {name: text}, "rollouts": {rollout_id: name or null}}`, or raise ValueError."""
        book = strict.loads(text)
        if not isinstance(book, dict) or set(book) != {"scripts", "rollouts"}:
            raise ValueError('a script book is an object with the members "scripts" and "rollouts"')
        scripts, rollouts = book["scripts"], book["rollouts"]
        if not isinstance(scripts, dict) or not isinstance(rollouts, dict):
            raise ValueError('"scripts" and "rollouts" are objects')
        for name, script in scripts.items():
            check_script(name, script)
        for rollout_id, name in rollouts.items():
            check_rollout(rollout_id, name, scripts)
        return cls(scripts, rollouts)

    def script(self, attempt_id: str) -> str | None:
        """The script of the rollout that `attempt_id` belongs to; 404 for an unknown rollout."""
        rollout_id = rollout_of(attempt_id)
        if rollout_id not in self.rollouts:
            raise Refused(404, f"unknown rollout {rollout_id!r}", "rollout_not_found")
        name = self.rollouts[rollout_id]
        return None if name is None else self.scripts[name]


def check_script(name: str, script: object) -> None:
    if not name or not isinstance(script, str):
        raise ValueError(f"script {name!r} must have a name and a text")
    if "\0" in script:
        raise ValueError(f"script {name!r} holds a NUL, which no shell can be given")
    # A lone surrogate raises UnicodeEncodeError here, which is a ValueError.
    if len(deliverable(script)) > PACKED_BYTES:
        raise ValueError(f"script {name!r} is longer than {PACKED_BYTES} bytes even when packed")


def check_rollout(rollout_id: str, name: object, scripts: Mapping[str, str]) -> None:
    if not rollout_id or "/" in rollout_id or rollout_of(rollout_id) != rollout_id:
        raise ValueError(f"rollout id {rollout_id!r} is empty, holds a / or ends like an attempt's")
    if name is not None and (not isinstance(name, str) or name not in scripts):
        raise ValueError(f"rollout {rollout_id!r} names the script {name!r}, which is not in the book")


def rollout_of(attempt_id: str) -> str:
    """`<id>~2` is a later attempt of rollout `<id>`: split at the last `~` if only digits follow."""
    return re.sub(r"~[0-9]+\Z", "", attempt_id)


def nop(request: Request, script: str | None) -> Reply:
    return Reply("Nothing to do.")


def oracle(request: Request, script: str | None) -> Reply:
    if script is None:
        raise Refused(400, "this rollout has no script for the oracle to run", "no_script")
    if request.results:
        return after_result(request)
    if not request.tools:
        # A title or a summary is asked for, beside the task.
        return Reply("Run the script.")
    return Reply(tool_calls=(run_script(request.tools, script),))


Policy = Callable[[Request, "str | None"], Reply]

POLICIES: Mapping[str, Policy] = {"oracle": oracle, "nop": nop}


def policy_of(model: str) -> Policy:
    """The policy that a request names as its model; 404 if there is none of that name."""
    if model not in POLICIES:
        raise Refused(404, f"unknown model {model!r}; there are: {', '.join(POLICIES)}", "model_not_found")
    return POLICIES[model]


def answered(rollout_id: str, request: Request, reply: Reply, created: int) -> Call:
    """The call of a scripted reply; `created` is the only member that a resend changes."""
    digest = sha256(canonical([rollout_id, request.model]))
    digest.update(request.prompt)
    sent = "".join(called.arguments for called in reply.tool_calls) or reply.text
    usage = Usage(measure(request.prompt), measure(sent.encode("utf-8", "surrogatepass")))
    return Call(digest.hexdigest()[:24], request, reply, usage, created)


def measure(text: bytes) -> int:
    """Usage of a text: its bytes / 4, rounded up."""
    return -(-len(text) // 4)


def call_of(tool: Tool, arguments: Mapping[str, Any]) -> ToolCall:
    return ToolCall(tool, canonical(arguments).decode("utf-8", "surrogatepass"))


def after_result(request: Request) -> Reply:
    """Poll while the process runs, then say how it ended, by the tool's own words before the output."""
    result = request.results[-1]
    state = PROCESS_STATE.search(result.text.partition("\nOutput:\n")[0])
    session, exit_code = state.groups() if state else (None, None)
    if session:
        poll = next((tool for tool in request.tools if tool.name == "write_stdin"), None)
        if poll is None:
            return Reply("The script was started and still runs; no tool to wait for it was offered.")
        arguments = {"session_id": int(session), "chars": "", "yield_time_ms": POLL_WAIT_MS}
        return Reply(tool_calls=(call_of(poll, arguments),))
    if result.failed or exit_code not in (None, "0") or result.text.startswith("exec_command failed"):
        return Reply("The script was called and ended with an error.")
    return Reply("The script ran and ended.")


def run_script(tools: tuple[Tool, ...], script: str) -> ToolCall:
    """A call of the shell tool among the offered ones; 400 if there is none."""
    for name in SHELL_TOOLS:
        for tool in tools:
            argument = command_argument(tool)
            if tool.name.lower() == name and argument:
                return call_of(tool, shell_arguments(tool, argument, script))
    offered = ", ".join(tool.name for tool in tools)
    raise Refused(400, f"the oracle needs a shell tool; the request offers: {offered}", "no_shell_tool")


def properties(tool: Tool) -> Mapping[str, Any]:
    """The schemas of the tool's arguments, those that are not objects left out."""
    found = tool.parameters.get("properties")
    return {k: v for k, v in found.items() if isinstance(v, dict)} if isinstance(found, dict) else {}


def command_argument(tool: Tool) -> str | None:
    return next((name for name in COMMAND_ARGUMENTS if name in properties(tool)), None)


def shell_arguments(tool: Tool, argument: str, script: str) -> dict[str, Any]:
    """The command, a sentence and the longest waiting time, as far as the tool takes them."""
    schemas, text = properties(tool), deliverable(script)
    as_list = "array" in str(schemas[argument].get("type"))
    known = {
        argument: ["bash", "-c", text] if as_list else command_line(text),
        "description": "Run the script",
        "timeout": SCRIPT_TIMEOUT_MS // (1000 if in_seconds(schemas.get("timeout", {})) else 1),
        "timeout_ms": SCRIPT_TIMEOUT_MS,
        "yield_time_ms": EXEC_WAIT_MS,
    }
    required = tool.parameters.get("required")
    unknown = [name for name in (required if isinstance(required, list) else ()) if name not in known]
    if unknown:
        reason = f"the oracle cannot fill {', '.join(map(str, unknown))}, which {tool.name} requires"
        raise Refused(400, reason, "no_shell_tool")
    return {name: value for name, value in known.items() if name in schemas}


def in_seconds(schema: Mapping[str, Any]) -> bool:
    """Only its description says what a timeout is counted in; most say milliseconds."""
    return re.search(r"\bseconds?\b", str(schema.get("description")), re.IGNORECASE) is not None


def command_line(script: str) -> str:
    """A command line that runs `script` with bash, whatever shell reads the line.

    The heredoc ends the last line when the script does not; to bash that makes no difference.
    """
    end = next(mark for n in count(1) if (mark := f"END_OF_SCRIPT_{n}") not in script)
    newline = "" if script.endswith("\n") else "\n"
    return f"bash /dev/fd/3 3<<'{end}' </dev/null\n{script}{newline}{end}\n"


def deliverable(script: str) -> str:
    """The script itself if every harness passes it on; else a short one that unpacks and runs it."""
    if len(script.encode()) <= PLAIN_BYTES and not CONTROL_CHARACTER.search(script):
        return script
    packed = b64encode(compress(script.encode(), mtime=0)).decode()
    return f"eval \"$(base64 -d <<'END' | gzip -dc\n{packed}\nEND\n)\"\n"
