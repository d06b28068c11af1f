"""What each CLI tells of its work, as Items: one table over the real harnesses, with a model that plays the same steps.

What a CLI does not tell is null. Subagents and MCP are off everywhere (`test_api_sessions.py` has their refusals).
"""

from __future__ import annotations

import base64
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from conftest import Core
from model_endpoint import TEXT, ModelEndpoint, Step

from core.harnesses import registry
from core.harnesses.npm import DEFAULT_PREFIX

Doc = dict[str, Any]
HARNESSES = ("codex", "claude_sdk", "pi", "opencode")
PATCH = """apply_patch <<'EOF'
*** Begin Patch
*** Update File: notes.txt
@@
-old
+new
*** End Patch
EOF
"""
CLAUDE_EDIT = {"file_path": "/workspace/notes.txt", "old_string": "old", "new_string": "new"}
OPENCODE_EDIT = {"filePath": "/workspace/notes.txt", "oldString": "old", "newString": "new"}

# harness → how its model runs a command, edits a file, reads one (codex has no tool for that)
SHELLS: dict[str, Callable[[str], tuple[str, Doc]]] = {
    "codex": lambda script: ("exec_command", {"cmd": script}),
    "claude_sdk": lambda script: ("Bash", {"command": script}),
    "pi": lambda script: ("bash", {"command": script}),
    "opencode": lambda script: ("bash", {"command": script, "description": "run it"}),
}
EDITS: dict[str, tuple[str, Doc]] = {
    "codex": ("exec_command", {"cmd": PATCH}),
    "claude_sdk": ("Edit", CLAUDE_EDIT),
    "pi": ("edit", {"path": "notes.txt", "edits": [{"oldText": "old", "newText": "new"}]}),
    "opencode": ("edit", OPENCODE_EDIT),
}
READS: dict[str, tuple[str, Doc]] = {
    "claude_sdk": ("Read", {"file_path": "/workspace/notes.txt"}),
    "pi": ("read", {"path": "notes.txt"}),
    "opencode": ("read", {"filePath": "/workspace/notes.txt"}),
}
# What a command that succeeds reports as its exit code: some CLIs tell it only of those that fail.
SUCCESS: dict[str, int | None] = {"codex": 0, "claude_sdk": None, "pi": None, "opencode": 0}


@pytest.fixture(params=[*HARNESSES[:-1], pytest.param(HARNESSES[-1], marks=pytest.mark.slow)])  # seconds each
def harness(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    if registry(DEFAULT_PREFIX)[name].mounts() is None:
        pytest.skip(f"{name} is not installed: npm install --prefix core/npm")
    return name


def play(core: Core, model: ModelEndpoint, harness: str, *steps: Step) -> tuple[Any, list[Doc]]:
    """(the turn, its items behind the user's message) of a harness whose model plays these steps."""
    label = f"items-{uuid.uuid4()}"
    model.plays[label] = list(steps)
    seed = {"type": "inline", "path": "/workspace/notes.txt", "data": base64.b64encode(b"old\n").decode()}
    session = core.agent(harness, model.bundle(harness, "plays", label), environment={"files": [seed]})
    turn = core.turn(session.id, seconds=120)
    items = [item.to_dict() for item in core.sessions.items.list(session.id, order="asc")]
    assert all(item["status"] != "in_progress" for item in items)
    return turn, items[1:]


def test_a_command_with_its_output_and_exit_code(core: Core, model: ModelEndpoint, harness: str) -> None:
    turn, items = play(core, model, harness, Step([SHELLS[harness]("echo out; echo err >&2; exit 3")], "a thought"))
    assert turn.status == "completed"
    thought, command, message = items
    assert thought["type"] == "reasoning" and thought["summary"] == [{"type": "summary_text", "text": "a thought"}]
    assert command["type"] == "command_execution" and "echo out; echo err >&2; exit 3" in command["command"]
    assert sorted(command["output"].split()) == ["err", "out"]  # and nothing else, such as a line about the exit code
    assert (command["exit_code"], command["status"], command["cwd"], command["duration_ms"]) == (
        3,
        "failed",
        None,
        None,
    )
    assert [part["text"] for part in message["content"]] == [TEXT] and message["phase"] is None


def test_commands_that_are_called_at_once(core: Core, model: ModelEndpoint, harness: str) -> None:
    calls = [SHELLS[harness](f"echo number {number}") for number in (1, 2)]
    _, (*commands, _) = play(core, model, harness, Step(calls))  # in the order in which they happened to begin
    for number, command in enumerate(sorted(commands, key=lambda item: str(item["output"])), 1):
        assert f"echo number {number}" in command["command"] and command["output"].strip() == f"number {number}"
        assert (command["status"], command["exit_code"]) == ("completed", SUCCESS[harness])


def test_an_edit_is_a_call_of_apply_patch(core: Core, model: ModelEndpoint, harness: str) -> None:
    """Without an output item, and done: the file is another one afterwards."""
    before = [Step([READS[harness]])] if harness in READS else []  # some edit only what they have read
    after = Step([SHELLS[harness]("cat notes.txt")])
    _, items = play(core, model, harness, *before, Step([EDITS[harness]]), after)
    *read, edit, look, _ = items
    assert (edit["type"], edit["name"], edit["status"]) == ("function_call", "apply_patch", "completed")
    assert "notes.txt" in str(edit["arguments"]) and look["output"].strip() == "new"
    if before:
        call, output = read
        assert (call["type"], call["name"].lower(), call["status"]) == ("function_call", "read", "completed")
        assert (output["type"], output["call_id"]) == ("function_call_output", call["call_id"])
        assert "old" in output["output"] and output["error"] is None


def with_absent_text(value: Any) -> Any:
    """The arguments of an edit, with a text to look for that is nowhere."""
    if isinstance(value, dict):
        return {name: with_absent_text(member) for name, member in value.items()}
    if isinstance(value, list):
        return [with_absent_text(member) for member in value]
    return value.replace("\n-old", "\n-absent") if "\n-old" in value else "absent" if value == "old" else value


def test_an_edit_that_fails(core: Core, model: ModelEndpoint, harness: str) -> None:
    """Of a patch that does not apply, codex tells nothing."""
    before = [Step([READS[harness]])] if harness in READS else []
    name, arguments = EDITS[harness]
    after = Step([SHELLS[harness]("cat notes.txt")])
    turn, items = play(core, model, harness, *before, Step([(name, with_absent_text(arguments))]), after)
    *edits, look, _ = items
    assert turn.status == "completed" and look["output"].strip() == "old"
    told = [(item["name"], item["status"]) for item in edits if item.get("name") == "apply_patch"]
    assert told == ([] if harness == "codex" else [("apply_patch", "failed")])


# harness → a command that its tool ends after two seconds, and what tells so (codex has no such deadline of its own)
DEADLINES: dict[str, tuple[tuple[str, Doc], str]] = {
    "codex": (("exec_command", {"cmd": "timeout 2 sleep 60", "yield_time_ms": 30000}), "124"),
    "claude_sdk": (("Bash", {"command": "sleep 60", "timeout": 2000}), "timed out after 2s"),
    "pi": (("bash", {"command": "sleep 60", "timeout": 2}), "timed out after 2 seconds"),
    "opencode": (("bash", {"command": "sleep 60", "timeout": 2000, "description": "run it"}), "timeout 2000 ms"),
}


def test_the_record_names_the_inner_deadline(core: Core, model: ModelEndpoint, harness: str) -> None:
    """The command's own, not the turn's, and the turn goes on."""
    call, words = DEADLINES[harness]
    turn, (command, _) = play(core, model, harness, Step([call]))
    assert turn.status == "completed" and turn.completed_at - turn.started_at < 30
    assert command["status"] == "failed" and words in f"{command['output']} {command['exit_code']}"


# ── a harness that its agent kills ────────────────────────────────────────────────────────────────

# From a session of its own, which no harness ends with the command: all others but the sandbox's first process.
KILL_ALL = "for p in $(cd /proc; ls -d [0-9]*); do [ $p -gt 1 ] && [ $p != $$ ] && kill -9 $p; done"


def test_an_agent_that_kills_its_harness_gains_nothing(core: Core, model: ModelEndpoint, harness: str) -> None:
    """It is the policy's own failure, not trouble of the machine."""
    turn, _ = play(core, model, harness, Step([SHELLS[harness](f"setsid bash -c '{KILL_ALL}'; sleep 60")]))
    failure = turn.to_dict()["x_agents_core"]["failure"]
    assert (turn.status, turn.error.code) == ("failed", "sandbox_error")
    assert (failure["class"], failure["reason"], failure["params"]) == ("model", "harness_killed", {"signal": 9})
    assert "signal 9" in turn.error.message
