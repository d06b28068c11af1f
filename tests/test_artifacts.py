"""Artifacts: what of /workspace/outputs is published, what is refused, and that the bytes stay."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from conftest import Core, connect, service, until

O = "/workspace/outputs"  # noqa: E741
MAKE = "mkdir -p outputs; cd outputs; "


@pytest.mark.parametrize(
    "script, published",
    [
        ("true", {}),
        ("mkdir outputs", {}),
        (MAKE + "printf 1 > a", {"a": b"1"}),
        (MAKE + "touch empty", {"empty": b""}),
        (MAKE + "mkdir -p d/e; printf 1 > d/e/f; mkdir void", {"d/e/f": b"1"}),
        (MAKE + "printf 1 > a; ln a b", {"a": b"1", "b": b"1"}),
        (MAKE + "printf 1 > a; chmod 000 a", {"a": b"1"}),
        (MAKE + "mkdir d; printf 1 > d/a; chmod 000 d .", {"d/a": b"1"}),
        (MAKE + "printf 1 > .hid; printf 2 > 'a b'; printf 3 > ü", {".hid": b"1", "a b": b"2", "ü": b"3"}),
        (MAKE + "printf 4 > $'n\\nl'", {"n\nl": b"4"}),
        (MAKE + "printf '\\0\\377\\n' > bin", {"bin": b"\0\xff\n"}),
        (MAKE + "head -c 3000000 /dev/zero > big", {"big": bytes(3000000)}),
        (MAKE + "truncate -s 1000000 sparse", {"sparse": bytes(1000000)}),
        (MAKE + "p=.; for n in $(seq 63); do p=$p/d; done; mkdir -p $p; touch $p/f", {"d/" * 63 + "f": b""}),
    ],
    ids=range(14),
)  # fmt: skip
def test_regular_files_are_published(core: Core, script: str, published: dict[str, bytes]) -> None:
    session, turn = core.run(script)
    assert turn.status == "completed" and turn.to_dict()["x_agents_core"]["warnings"] == []
    assert core.artifacts(session.id) == {f"{O}/{path}": data for path, data in published.items()}
    sizes = {artifact.path: artifact.size_bytes for artifact in core.sessions.artifacts.list(session.id)}
    assert sizes == {f"{O}/{path}": len(data) for path, data in published.items()}
    core.sessions.delete(session.id)


@pytest.mark.parametrize("target", ["/etc/passwd", "/proc/self/environ", "a", ".", "..", "/", "nowhere", "/dev/zero"])
def test_links_are_never_followed(core: Core, target: str) -> None:
    session, turn = core.run(f"{MAKE} printf 1 > a; ln -s {target} link; mkdir d; ln -s {target} d/link")
    assert turn.status == "completed"
    assert core.artifacts(session.id) == {f"{O}/a": b"1"}


@pytest.mark.parametrize(
    "make",
    [
        "mkfifo odd",
        "python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"odd\")'",
        "touch $'odd\\xff'",
    ],
)
def test_odd_entries_are_skipped_with_a_mark(core: Core, make: str) -> None:
    session, turn = core.run(f"{MAKE} printf 1 > a; {make}")
    assert turn.status == "completed" and core.artifacts(session.id) == {f"{O}/a": b"1"}
    (warning,) = turn.to_dict()["x_agents_core"]["warnings"]
    assert warning["code"] == "artifact_skipped" and warning["path"].startswith(f"{O}/odd") and warning["reason"]


def test_a_thousand_odd_entries_make_few_marks(core: Core) -> None:
    _, turn = core.run(f"{MAKE} mkfifo $(seq 1000)")
    warnings = turn.to_dict()["x_agents_core"]["warnings"]
    assert turn.status == "completed" and 100 <= len(warnings) <= 101
    assert "more" in warnings[-1]["reason"]


@pytest.mark.parametrize(
    "script",
    [
        "touch outputs",
        "mkdir real; touch real/a; ln -s real outputs",
        "ln -s /etc outputs",
        "mkfifo outputs",
        MAKE + "ln -s -t . $(seq -f /x/%g 4096); touch a",
        MAKE + "mkdir 0; touch 0/a; ln -s -t . $(seq -f /x/%g 4095)",
        MAKE + "p=.; for n in $(seq 64); do p=$p/d; done; mkdir -p $p/e; touch $p/e/f",
        MAKE + "for n in $(seq 20); do d=$(printf %0250d 0); mkdir $d; cd $d; done; touch f",
        MAKE + "truncate -s $((200 * 1024 * 1024 + 1)) big",
        MAKE + "for n in 1 2 3; do truncate -s 180M $n; done",
    ],
    ids=range(10),
)
def test_outputs_beyond_the_limits_fail_the_turn(core: Core, script: str) -> None:
    session, turn = core.run(script)
    assert (turn.status, turn.error.code) == ("failed", "sandbox_error")
    failure = turn.to_dict()["x_agents_core"]["failure"]
    assert (failure["class"], failure["reason"]) == ("model", "artifact_capture_failed")
    assert core.artifacts(session.id) == {} and str(Path.cwd()) not in turn.error.message
    assert core.sessions.delete(session.id).deleted


def test_as_many_entries_as_allowed(core: Core) -> None:
    session, turn = core.run(f"{MAKE} ln -s -t . $(seq -f /x/%g 4095); touch a")
    assert turn.status == "completed", turn.error
    assert core.artifacts(session.id) == {f"{O}/a": b""}


def test_artifacts_by_the_hundred(core: Core) -> None:
    session, turn = core.run(f"{MAKE} touch $(seq 350)")
    assert turn.status == "completed", turn.error
    assert len({artifact.path for artifact in core.sessions.artifacts.list(session.id, limit=100)}) == 350


def test_what_still_writes_is_stopped_before_the_copy(core: Core) -> None:
    session, turn = core.run(f"{MAKE} (setsid bash -c 'while :; do date >> a; done' &) ; sleep 0.1")
    assert turn.status == "completed" and list(core.artifacts(session.id)) == [f"{O}/a"]


# ── later turns ───────────────────────────────────────────────────────────────────────────────────


def published_by(core: Core, session_id: str) -> set[tuple[str, str]]:
    """(path, turn id) of every artifact."""
    return {
        (artifact.path.removeprefix(f"{O}/"), artifact.turn_id) for artifact in core.sessions.artifacts.list(session_id)
    }


def test_a_later_turn_publishes_what_changed(core: Core) -> None:
    session, first = core.run(f"{MAKE} echo 1 > same; echo 1 > changed; echo 1 > gone; echo 1 > deleted")
    ids = {artifact.path: artifact.id for artifact in core.sessions.artifacts.list(session.id)}
    core.sessions.artifacts.delete(ids[f"{O}/deleted"], session_id=session.id)
    core.say(session.id, "cd outputs; echo 2 > changed; rm gone; touch same; echo 2 > new")
    second = core.turn(session.id, 2)
    expected = {("same", first.id), ("changed", first.id), ("gone", first.id)}
    expected |= {("changed", second.id), ("new", second.id), ("deleted", second.id)}
    assert published_by(core, session.id) == expected
    old = core.sessions.artifacts.content(ids[f"{O}/changed"], session_id=session.id).read()
    assert old == b"1\n"  # immutable


def test_the_order_is_of_publication(core: Core) -> None:
    session, _ = core.run(f"{MAKE} touch b a")
    core.say(session.id, "touch outputs/0")
    core.turn(session.id, 2)
    assert [a.path for a in core.sessions.artifacts.list(session.id, order="asc")] == [f"{O}/{n}" for n in "ab0"]


def test_failed_and_cancelled_turns_publish_nothing(core: Core) -> None:
    session, _ = core.run(f"{MAKE} echo 1 > a; mkfifo x; cd ..; mv outputs o; touch outputs")
    assert core.artifacts(session.id) == {}
    core.say(session.id, "rm outputs; mv o outputs; echo 2 > outputs/a; sleep 300")
    core.running(session.id, 2)
    core.cancel(session.id)
    core.turn(session.id, 2)
    assert core.artifacts(session.id) == {}


# ── over the wire ─────────────────────────────────────────────────────────────────────────────────


def test_an_artifact_over_the_wire(core: Core, tmp_path: Path) -> None:
    session, turn = core.run(f"{MAKE} printf hello > a")
    (listed,) = core.sessions.artifacts.list(session.id)
    read = core.sessions.artifacts.retrieve(listed.id, session_id=session.id)
    assert (
        read.to_dict()
        == listed.to_dict()
        == {
            "id": listed.id,
            "object": "agent.session.artifact",
            "session_id": session.id,
            "turn_id": turn.id,
            "environment_id": session.environment.id,
            "path": f"{O}/a",
            "size_bytes": 5,
            "created_at": turn.completed_at,
        }
    )
    content = core.sessions.artifacts.content(listed.id, session_id=session.id)
    assert content.text == "hello"
    headers = content.response.headers
    assert headers["content-type"] == "application/octet-stream" and headers["content-length"] == "5"
    assert headers["content-disposition"] == "attachment"
    content.write_to_file(tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == b"hello"
    deleted = core.sessions.artifacts.delete(listed.id, session_id=session.id)
    assert deleted.to_dict() == {"id": listed.id, "object": "agent.session.artifact.deleted", "deleted": True}
    for ask in (core.sessions.artifacts.retrieve, core.sessions.artifacts.content, core.sessions.artifacts.delete):
        with pytest.raises(openai.NotFoundError):
            ask(listed.id, session_id=session.id)
    assert core.artifacts(session.id) == {}


def test_a_download_survives_the_deletion_of_its_session(core: Core) -> None:
    session, _ = core.run(f"{MAKE} head -c 50000000 /dev/zero > big")
    (artifact,) = core.sessions.artifacts.list(session.id)
    path = f"/agents/sessions/{session.id}/artifacts/{artifact.id}/content"
    with core.raw.stream("GET", path) as answer:
        pieces = answer.iter_bytes()
        size = len(next(pieces))
        core.sessions.delete(session.id)
        assert size + sum(map(len, pieces)) == 50_000_000


def test_sessions_with_equal_bytes_do_not_share_their_fate(core: Core) -> None:
    """Sessions publish the same answer while others that hold it are deleted: no one loses it."""

    def one(number: int) -> Any:
        session, _ = core.run(f"{MAKE} echo same > a")
        if number % 2:
            core.sessions.delete(session.id)
            return None
        return session.id

    with ThreadPoolExecutor(8) as pool:
        kept = [session_id for session_id in pool.map(one, range(40)) if session_id]
    assert {core.artifacts(session_id)[f"{O}/a"] for session_id in kept} == {b"same\n"}


def test_reads_and_deletions_of_artifacts_at_once(core: Core) -> None:
    session, _ = core.run(f"{MAKE} touch $(seq 40)")
    ids = [artifact.id for artifact in core.sessions.artifacts.list(session.id, limit=100)]
    start = threading.Barrier(4)

    def poke(number: int) -> set[int]:
        start.wait()
        path = f"/agents/sessions/{session.id}/artifacts"
        answers: list[httpx.Response] = []
        for id_ in ids:
            answers.append(core.raw.get(f"{path}/{id_}/content") if number % 2 else core.raw.delete(f"{path}/{id_}"))
        return {answer.status_code for answer in answers}

    with ThreadPoolExecutor(4) as pool:
        assert set().union(*pool.map(poke, range(4))) <= {200, 404}
    assert core.artifacts(session.id) == {}


def test_bytes_are_removed_with_what_named_them(tmp_path: Path) -> None:
    """Of deleted artifacts, failed captures and deleted sessions nothing stays on the disk."""
    blobs = tmp_path / "data/blobs"
    with service("core", "serve", "--data", str(tmp_path / "data")) as running:
        core = connect(running)
        session, _ = core.run(f"{MAKE} echo 1 > a; echo 1 > b; echo 2 > c")

        def stored() -> list[bytes]:
            return sorted(path.read_bytes() for path in blobs.rglob("*") if path.is_file())

        assert stored() == [b"1\n", b"2\n"]
        by_path = {artifact.path[-1]: artifact.id for artifact in core.sessions.artifacts.list(session.id)}
        core.sessions.artifacts.delete(by_path["a"], session_id=session.id)
        assert stored() == [b"1\n", b"2\n"]  # b holds the same
        core.sessions.artifacts.delete(by_path["b"], session_id=session.id)
        assert stored() == [b"2\n"]
        core.say(session.id, "cd outputs; echo 3 > d; mkdir z; ln -s -t z $(seq -f /x/%g 5000)")
        assert core.turn(session.id, 2).status == "failed"
        until(lambda: stored() == [b"2\n"])
        core.sessions.delete(session.id)
        assert list(blobs.iterdir()) == []
