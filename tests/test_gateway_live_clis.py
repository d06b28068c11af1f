"""The real CLIs through a live gateway: a call and an answer, and no tool that runs before its call is recorded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from clis import SLOW, Case, npm
from engine import engine
from matrix import command, results, works
from recorded import Doc, Recorder, another, recorder


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorder]:
    with engine() as running, recorder(running, tmp_path_factory.mktemp("live"), "--live") as gateway:
        yield gateway


@pytest.mark.parametrize("cli", ["codex", "claude", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_turn(shared: Recorder, tmp_path: Path, cli: str) -> None:
    if cli in SLOW:
        npm(cli)
    case = Case(another(shared), cli, tmp_path)
    case.gateway.engine.script = works
    case.run()
    assert case.made == ["made1"] and case.said("All is done.")
    assert case.chains(case.graph()) == [2]
    streamed = [served.body["stream"] for served in case.gateway.engine.served]
    assert all(streamed) and len(streamed) == 2 + (cli == "opencode")  # its title


@pytest.mark.parametrize("cli", ["codex", "claude"])
def test_no_tool_runs_before_its_call_is_recorded(shared: Recorder, tmp_path: Path, cli: str) -> None:
    """Both run a tool as soon as its call is closed: the engine waits with the last token, long enough to see it."""
    case, ended = Case(another(shared), cli, tmp_path), tmp_path / "ended"
    model = case.gateway.engine

    def two_calls(asked: Doc) -> str:
        if not asked.get("tools") or results(asked):
            return works(asked)
        model.some = 2 + len(said := command(asked, f"test -e {ended} && touch made1") * 2) // model.chunk_tokens
        threading.Timer(1, release).start()
        return said

    def release() -> None:
        assert not model.served[0].ended
        ended.touch()
        model.some = None

    model.script = two_calls
    case.run()
    assert case.made == ["made1"] and model.served[0].ended
    printed = [message["content"] for message in model.served[1].body["messages"] if message["role"] == "tool"]
    assert len(printed) == 2 and not any("rror" in text or "code 1" in text for text in printed)
