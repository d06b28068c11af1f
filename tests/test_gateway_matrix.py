"""The conformance matrix: what the CLIs send, through the recording gateway, and the token graph that comes of it.

Each cell runs twice: replayed from the requests that were recorded of the CLI (recordings.py), and live by the CLI
itself, bare. The shape must be the same, and in every cell no break is caused by the gateway, no tool is lost, and what
is trained is what was sampled once. pi and opencode are skipped where npm has not installed them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from clis import SLOW, Case, graph_of, npm, offered
from engine import engine
from matrix import CELLS, CLIS, SHAPES, command, shape
from recorded import Recorder, another, recorder
from recordings import Line, Replay, load, pinned

PAIRS = [(cell, cli) for cell, one in CELLS.items() for cli in one.clis]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorder]:
    with engine() as running, recorder(running, tmp_path_factory.mktemp("shared")) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def recordings() -> dict[str, list[Line]]:
    return {cli: load(cli)[1] for cli in CLIS}


def test_every_cell_is_recorded_by_the_versions_that_are_pinned(recordings: dict[str, list[Line]]) -> None:
    """After an upgrade: python tests/recordings.py record, and review the difference."""
    assert {cli: load(cli)[0] for cli in CLIS} == {cli: pinned(cli) for cli in CLIS}
    assert {(line.cell, cli) for cli, lines in recordings.items() for line in lines} == set(PAIRS)
    assert {cell: set(shapes) for cell, shapes in SHAPES.items()} == {cell: set(CELLS[cell].clis) for cell in CELLS}


@pytest.mark.parametrize(("cell", "cli"), PAIRS)
def test_replayed(shared: Recorder, recordings: dict[str, list[Line]], cell: str, cli: str) -> None:
    replay = Replay(another(shared), CELLS[cell], cli)
    replay.play([line for line in recordings[cli] if line.cell == cell])
    graph = graph_of(replay.gateway, replay.asked)
    assert shape(graph, replay.gateway.trace().calls.values()) == SHAPES[cell][cli]


QUICK = ("base",)
"""Of the others the replays tell in the default suite; the CLIs themselves take minutes of the processor."""


def live(pairs: list[tuple[str, str]]) -> list[object]:
    slow = [cli in SLOW or cell not in QUICK for cell, cli in pairs]
    return [pytest.param(*pair, marks=[pytest.mark.slow] * one) for pair, one in zip(pairs, slow, strict=True)]


@pytest.mark.parametrize(("cell", "cli"), live(PAIRS))
def test_live(shared: Recorder, tmp_path: Path, cell: str, cli: str) -> None:
    if cli in SLOW:
        npm(cli)
    case = Case(another(shared), cli, tmp_path)
    case.play(CELLS[cell])
    found, expected = shape(case.graph(), case.gateway.trace().calls.values()), SHAPES[cell][cli]
    if (cell, cli) == ("engine 5xx twice", "opencode"):  # the title may take one of them, or the task both
        found, expected = found[-2:], expected[-2:]
    assert found == expected


@pytest.mark.slow
def test_usage_held_high_is_ended_by_the_call_budget(shared: Recorder, tmp_path: Path) -> None:
    """Codex compacts as long as the engine counts more tokens than its window holds."""
    case = Case(another(shared), "codex", tmp_path)
    case.gateway.engine.script = lambda asked: command(asked, "echo on") if asked.get("tools") else "A summary. " * 50
    case.run(window=20_000, max_calls=8)
    assert len(case.gateway.engine.served) == 8 and case.said("Step budget exhausted; stopping.")
    kinds = [record.labels["kind"] for record in case.gateway.trace().calls.values()]
    assert kinds.count("compaction") > 1 and "synthetic" in case.gateway.states()
    assert len(case.graph().continues) > 1


def test_codex_offers_a_namespace_of_tools_to_its_main_agent_alone(recordings: dict[str, list[Line]]) -> None:
    """The pinned version does so without any setting; core/ switches it off by `multi_agent`."""
    lines = [line for line in recordings["codex"] if line.cell == "subagent"]
    assert {(len(line.body["tools"]), offered(line.body)) for line in lines} == {(8, 12), (7, 7)}
    items = [item for item in lines[-1].body["input"] if item["type"] == "function_call"]
    assert [item.get("namespace") for item in items] == ["multi_agent_v1", "multi_agent_v1"]
