"""The trace store: durable when it says so, whole after any kill, closed to sandboxes."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import tempfile
import threading
import time
from base64 import b64encode
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from call_records import START, Harness, base, forests, message
from conftest import ROOT, Core
from hypothesis import given, settings

from gateway import store
from gateway.graph import build
from gateway.record import CallRecord, Delta, attempt_of, stored_ids
from gateway.store import StaleSnapshot, Store, StoreError, log_path, read, traces

SECRET = "sk-live/abc+def=ghi"


def conversation(turns: int, rollout_id: str = "r") -> list[CallRecord]:
    harness, history = Harness(rollout_id), START
    for number in range(turns):
        history = [*harness.call(history, f"answer {number}"), message("user", f"and {number}?")]
    return harness.records


def write(folder: Path, records: list[CallRecord], rollout_id: str = "r") -> Path:
    """The records in a log of their own, in the order of their arrival, each delivered."""
    log = Store(folder).open(rollout_id)
    for record in records:
        log.reply(replace(record, state="reply"))
        log.delivered(record.call_id, record.t_terminal)
    log.close()
    return log.path


def same_calls(path: Path, records: list[CallRecord]) -> None:
    """The log holds these calls, once each, with all they had."""
    trace = read(path)
    assert list(trace.calls) == [record.call_id for record in records]
    graph = build(trace.calls.values())
    for record in records:
        assert record.prompt_ids is not None and record.sampled_ids is not None
        stored = trace.calls[record.call_id]
        end = graph.ends[record.call_id]
        assert end.depth == len(record.prompt_ids.tail) + len(record.sampled_ids)
        assert graph.ids(record.call_id) == [*record.prompt_ids.tail, *record.sampled_ids]
        assert (stored.sampled_ids, stored.logprobs) == (record.sampled_ids, record.logprobs)
        assert (
            trace.messages(record.call_id) == record.messages.tail and trace.tools(record.call_id) == record.tools.tail
        )


# What is written is what is read


def test_a_log_gives_back_what_was_written(tmp_path: Path) -> None:
    records = conversation(4)
    same_calls(write(tmp_path, records), records)


def test_what_a_conversation_repeats_is_written_once(tmp_path: Path) -> None:
    records = conversation(40)
    size = write(tmp_path, records).stat().st_size
    ids = sum(len(record.prompt_ids.tail) for record in records if record.prompt_ids)
    new = sum(
        len(one.tail) + len(record.sampled_ids or ()) for record in read_all(tmp_path) if (one := record.prompt_ids)
    )
    assert new < ids / 5 and size < 2_000 * len(records) + 60 * new


def read_all(folder: Path) -> list[CallRecord]:
    return [call for trace in traces(folder) for call in trace.calls.values()]


@settings(max_examples=40, deadline=None)
@given(forests())
def test_any_forest_of_calls_is_read_back_also_after_reopening(records: list[CallRecord]) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for record in records:  # a log that is opened anew for every call
            log = Store(Path(folder)).open("r")
            log.reply(replace(record, state="reply"))
            log.close()
        trace = read(log.path)
        graph = build(replace(call, state="delivered") for call in trace.calls.values())
        expected = [[*(one.prompt_ids or Delta([])).tail, *(one.sampled_ids or ())] for one in records]
        assert [graph.ids(one.call_id) for one in records] == expected
        assert [stored_ids(trace.calls, one.call_id) for one in records] == expected


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        ({"n": 1}, {"n": True}),
        ({"n": 1}, {"n": 1.0}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"s": "é"}, {"s": "e\u0301"}),
    ],
)
def test_messages_that_only_look_equal_are_told_apart(tmp_path: Path, earlier: Any, later: Any) -> None:
    records = [
        replace(one, messages=Delta([value])) for one, value in zip(conversation(2), (earlier, later), strict=True)
    ]
    trace = read(write(tmp_path, records))
    assert [repr(trace.messages(call_id)) for call_id in trace.calls] == [repr([earlier]), repr([later])]


def test_odd_texts_and_numbers_survive_as_strict_json(tmp_path: Path) -> None:
    odd = "lone \ud800, NUL \0, \u2028, \x1b[31m, \r\n, 🎛"
    harness = Harness()
    harness.call(
        [message("user", odd)],
        "x",
        logprobs=[float("nan"), float("-inf"), -0.1234567890123456789, -5e-324],
        prompt_ids=None,
    )
    path = write(tmp_path, harness.records)
    (call,) = read(path).calls.values()
    assert call.messages.tail == [message("user", odd)]
    assert call.logprobs == [None, None, -0.1234567890123456789, -5e-324]
    assert b"NaN" not in path.read_bytes() and b"Infinity" not in path.read_bytes() and path.read_bytes().isascii()


def test_a_value_that_is_no_json_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    records = conversation(3)
    log = Store(tmp_path).open("r")
    log.reply(replace(records[0], state="reply"))
    with pytest.raises(ValueError, match="JSON compliant"):
        log.reply(replace(records[1], state="reply", usage={"n": float("inf")}))
    log.reply(replace(records[2], state="reply"))
    log.close()
    same_calls(log.path, [records[0], records[2]])


# States, resends, freezing


def test_appending_the_same_again_changes_nothing(tmp_path: Path) -> None:
    log = Store(tmp_path).open("r")
    record = replace(conversation(1)[0], state="reply")

    def everything() -> None:
        log.reply(record)
        log.undelivered("c0", "the client hung up")
        log.resent("c0", 1)
        log.delivered("c0", 2.5)
        log.undelivered("c0", "too late to say so")
        log.release("done")
        log.freeze()

    everything()
    size, call = log.path.stat().st_size, log.records()[0]
    assert (call.state, call.evidence, call.resends, call.t_terminal) == ("delivered", "terminal_event", 1, 2.5)
    everything()
    assert log.path.stat().st_size == size and log.records() == [call]
    with pytest.raises(StoreError, match="another content"):
        log.reply(replace(record, sampled_ids=[1, 2, 3]))
    log.close()
    assert read(log.path).calls["c0"] == call


@pytest.mark.parametrize("state", ["failed", "synthetic"])
def test_a_call_that_no_engine_answered_stays_so(tmp_path: Path, state: Any) -> None:
    log = Store(tmp_path).open("r")
    log.reply(replace(conversation(1)[0], state=state))
    log.delivered("c0", 1.0)
    assert log.records()[0].state == state
    with pytest.raises(ValueError, match="first stored"):
        log.reply(replace(conversation(1)[0], call_id="x", state="delivered"))


def test_a_late_call_makes_a_snapshot_stale_and_is_not_lost(tmp_path: Path) -> None:
    ours, (first, late) = Store(tmp_path), conversation(2)
    log = ours.open("r")
    log.reply(replace(first, state="reply"))
    log.release("by control")
    snapshot = log.freeze()
    assert log.freeze() == snapshot
    log.reply(replace(late, state="reply"))
    log.close()
    with pytest.raises(StaleSnapshot, match="read it again"):
        ours.drop("r", 1, snapshot)
    log = ours.open("r")
    assert list(log.trace.calls) == ["c0", "c1"] and log.trace.released == "by control" and log.trace.frozen == snapshot
    current = log.freeze()
    log.close()
    ours.drop("r", 1, current)
    assert read(log.path).dropped and b"answer" not in log.path.read_bytes()
    log = ours.open("r")
    assert log.trace.dropped and log.records() == []  # what is open to ask: no call is to reopen it


def test_one_process_writes_a_log(tmp_path: Path) -> None:
    log = Store(tmp_path).open("r")
    with pytest.raises(StoreError, match="another process writes"):
        Store(tmp_path).open("r")
    log.close()
    Store(tmp_path).open("r").close()


def test_attempts_lie_apart(tmp_path: Path) -> None:
    for attempt in (1, 2):
        log = Store(tmp_path).open("r", attempt, {"purpose": "train"})
        log.reply(replace(conversation(attempt)[-1], attempt_id=attempt, state="reply"))
        log.close()
    assert [(trace.attempt_id, list(trace.calls), trace.info) for trace in traces(tmp_path)] == [
        (1, ["c0"], {"purpose": "train"}),
        (2, ["c1"], {"purpose": "train"}),
    ]


@pytest.mark.parametrize(
    ("path_id", "expected"),
    [
        ("a", ("a", 1)),
        ("a~2", ("a", 2)),
        ("a~b~13", ("a~b", 13)),
        ("a~0", ("a~0", 1)),
        ("a~x", ("a~x", 1)),
        ("~2", ("~2", 1)),
    ],
)
def test_the_attempt_stands_after_the_last_tilde(path_id: str, expected: tuple[str, int]) -> None:
    assert attempt_of(path_id) == expected


@pytest.mark.parametrize(
    "rollout_id", ["../../x", "/etc/x", ".", "..", "a/b", "x" * 3000, "é" * 200, "", "a\0b", "\ud800"]
)
def test_no_rollout_id_leads_out_of_the_folder(tmp_path: Path, rollout_id: str) -> None:
    folder = tmp_path / "traces"
    log = Store(folder).open(rollout_id)
    log.close()
    assert folder in log.path.resolve().parents and len(list(tmp_path.iterdir())) == 1
    assert log_path(folder, rollout_id, 2).parent == log.path.parent and read(log.path).rollout_id == rollout_id


# Secrets


@pytest.mark.parametrize("before", ["", "x", "xy", "xyz"])
@pytest.mark.parametrize("spelling", [str, lambda s: quote(s, safe=""), lambda s: b64encode(s.encode()).decode()])
def test_known_secrets_do_not_reach_the_disk(tmp_path: Path, spelling: Callable[[str], str], before: str) -> None:
    text = spelling(before + SECRET + "tail")
    harness = Harness(user_agent=text)
    harness.call([message("user", [{"type": "text", "text": text}, 1])], text, transforms=[{"reason": text}])
    for secrets, hidden in (([SECRET], True), ([], False)):
        folder = tmp_path / str(hidden)
        log = Store(folder, secrets).open("r", info={text: text})
        log.reply(replace(harness.records[0], state="reply"))
        log.release(text)
        log.close()
        core_of_text = text[len(before) + 3 : len(before) + 3 + 12]
        assert (core_of_text in log.path.read_text()) != hidden


@pytest.mark.parametrize("secret", ['with "quotes"', "back\\slash-", "ümlaut-key"])
def test_a_secret_that_json_spells_otherwise_is_found(tmp_path: Path, secret: str) -> None:
    harness = Harness()
    harness.call([message("user", f"{secret}!")], "x")
    log = Store(tmp_path, [secret]).open("r")
    stored = log.reply(replace(harness.records[0], state="reply"))
    log.undelivered(stored.call_id, f"because of {secret}")
    (call,) = read(log.path).calls.values()
    assert call.messages.tail[0]["content"] == "[secret]!" and call.evidence == "because of [secret]"
    assert (call.sampled_ids, call.logprobs) == (harness.records[0].sampled_ids, harness.records[0].logprobs)


def test_a_delivery_is_noted_at_once_unless_that_would_wait_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = conversation(2)
    log = Store(tmp_path).open("r")
    log.reply(replace(one, state="reply"))
    syncing, go_on, sync = threading.Event(), threading.Event(), os.fdatasync

    def slow(descriptor: int) -> None:
        syncing.set()
        assert go_on.wait(20)
        sync(descriptor)

    monkeypatch.setattr(os, "fdatasync", slow)
    thread = threading.Thread(target=log.reply, args=(replace(other, state="reply"),))
    thread.start()
    assert syncing.wait(20) and not log.delivered_at_once(one.call_id, 1.0)
    go_on.set()
    thread.join()
    assert log.delivered_at_once(one.call_id, 1.0)
    assert [call.state for call in read(log.path).calls.values()] == ["delivered", "reply"]


# Kills, torn lines, damage, a full disk


def test_a_log_cut_at_any_byte_loses_only_the_line_that_was_never_whole(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", conversation(1)).read_bytes()
    ends = [at + 1 for at, byte in enumerate(whole) if byte == ord("\n")]
    path = tmp_path / "1.log"
    for size in range(1, len(whole) + 1):
        path.write_bytes(whole[:size])
        trace, end, _ = store.load(path)
        assert end == max([at for at in ends if at <= size], default=0) and trace.torn == size - end


@pytest.mark.parametrize("seed", range(20))
def test_a_torn_line_is_cut_off_before_anything_is_appended(tmp_path: Path, seed: int) -> None:
    records = conversation(4)
    path = write(tmp_path, records[:3])
    data, chance = path.read_bytes(), random.Random(seed)
    first = data.index(b"\n") + 1
    path.write_bytes(data[: chance.randrange(first, len(data))] + chance.choice([b"", b"\0" * 50, b"\r\xff\n"]))
    kept = [record for record in records[:3] if record.call_id in read(path).calls]
    torn = read(path).torn
    log = Store(tmp_path).open("r")
    assert log.torn == torn and read(path).torn == 0  # reported, and gone before the first append
    for record in [*records[len(kept) : 3], records[3]]:
        log.reply(replace(record, state="reply"))
    log.close()
    assert read(path).torn == 0
    same_calls(path, records)


@pytest.mark.parametrize("damage", [b"0", b"", b"\n"])
def test_damage_before_the_last_line_is_refused(tmp_path: Path, damage: bytes) -> None:
    path = write(tmp_path, conversation(3))
    data = path.read_bytes()
    middle = len(data) // 2
    path.write_bytes(data[:middle] + damage + data[middle + 1 :])
    for use in (lambda: read(path), lambda: Store(tmp_path).open("r"), lambda: list(traces(tmp_path))):
        with pytest.raises(StoreError, match="damaged at byte"):
            use()
    assert path.stat().st_size == len(data) - 1 + len(damage)


def forked(work: Callable[[int], None]) -> tuple[int, int]:
    """Run `work` in a process of its own; it writes to the descriptor it is given. Returns (process, reading end)."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    try:
        work(writing)
    finally:
        os._exit(0)


def serve_calls(folder: Path, records: list[CallRecord], writing: int) -> None:
    """What a gateway does with calls, telling after each step what a harness has seen of it."""
    log = Store(folder).open("r")
    for record in records:
        log.reply(replace(record, state="reply"))
        os.write(writing, f"{record.call_id}\n".encode())  # the terminal event
        log.delivered(record.call_id, record.t_terminal)
    log.freeze()


def acknowledged(child: int, reading: int) -> list[str]:
    with os.fdopen(reading) as pipe:
        seen = pipe.read().split()
    os.waitpid(child, 0)
    return seen


def check_after_kill(folder: Path, records: list[CallRecord], seen: list[str]) -> None:
    """No call that a harness has seen is missing, none is there twice; going on gives what no kill would have given."""
    log = Store(folder).open("r")
    stored = list(log.trace.calls)
    assert stored[: len(seen)] == seen and len(stored) <= len(seen) + 1
    for record in records:
        log.reply(replace(record, state="reply"))
        log.delivered(record.call_id, record.t_terminal)
    log.close()
    same_calls(log.path, records)
    graph = build(read(log.path).calls.values())
    assert graph.path(records[-1].call_id) == [record.call_id for record in records]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("point", range(7))
def test_kill_at_every_sync(tmp_path: Path, point: int, after: bool) -> None:
    """Opening, five replies and the freeze sync once each; the process dies before or after one of them."""
    records, syncs, really = conversation(5), iter(range(100)), os.fdatasync

    def work(writing: int) -> None:
        def sync_and_die(descriptor: int) -> None:
            number = next(syncs)
            if number == point and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            really(descriptor)
            if number == point:
                os.kill(os.getpid(), signal.SIGKILL)

        os.fdatasync = sync_and_die
        serve_calls(tmp_path, records, writing)

    child, reading = forked(work)
    seen = acknowledged(child, reading)
    assert len(seen) == max(point - 1, 0)
    check_after_kill(tmp_path, records, seen)


def kills(count: int) -> list[Any]:
    return [pytest.param(seed, marks=pytest.mark.slow if seed >= 40 else ()) for seed in range(count)]


@pytest.mark.parametrize("seed", kills(200))
def test_kill_at_a_random_moment(tmp_path: Path, seed: int) -> None:
    records = conversation(8)
    child, reading = forked(lambda writing: serve_calls(tmp_path, records, writing))
    time.sleep(random.Random(seed).random() * 0.12)  # the moment, not a wait for something
    os.kill(child, signal.SIGKILL)
    check_after_kill(tmp_path, records, acknowledged(child, reading))


def test_a_call_left_behind_by_a_crash_is_committed_only_if_a_later_prompt_holds_it(tmp_path: Path) -> None:
    first, second = conversation(2)
    log = Store(tmp_path).open("r")
    log.reply(replace(first, state="reply"))
    log.close()
    assert build(read(log.path).calls.values()).left_out == {"c0": "reply"}
    log = Store(tmp_path).open("r")
    log.reply(replace(second, state="reply"))
    log.delivered("c1", 2.0)
    log.close()
    assert build(read(log.path).calls.values()).calls["c0"].evidence == "extended_by c1"


def test_a_full_disk_leaves_whole_lines_and_a_log_that_goes_on(tmp_path: Path) -> None:
    records = conversation(6)
    whole = write(tmp_path / "whole", records).stat().st_size

    def work(writing: int) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        log = Store(tmp_path).open("r")
        resource.setrlimit(resource.RLIMIT_FSIZE, (whole // 2, resource.RLIM_INFINITY))
        for record in records:
            try:
                log.reply(replace(record, state="reply"))
                os.write(writing, b"%s " % record.call_id.encode())
            except StoreError as error:
                assert "cannot be written" in str(error)
                os.write(writing, b"full ")
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                log.reply(replace(record, state="reply"))

    seen = acknowledged(*forked(work))
    assert "full" in seen and seen[0] == "c0" and seen[-1] == "c5"
    same_calls(log_path(tmp_path, "r", 1), records)


# Sandboxes


def test_a_trace_is_out_of_the_sandbox_s_reach(core: Core) -> None:
    folders = [Path(tempfile.mkdtemp(dir=parent)) for parent in ("/tmp", "/var/tmp", "/dev/shm", ROOT)]
    try:
        harness = Harness()
        harness.call([message("user", "canary-of-the-trace")], "x")
        paths = [write(folder, harness.records) for folder in folders]
        assert all(path.stat().st_mode & 0o077 == 0 and path.parent.stat().st_mode & 0o077 == 0 for path in paths)
        look = "; ".join(f"cat '{path}' '/proc/1/root{path}'" for path in paths)
        search = "grep -rlIs canary-of-the-[t]race /tmp /var /dev/shm /home /root /opt /mnt /workspace"
        session, turn = core.run(f"({look}; {search}) 2>/dev/null | sed s/^/LEAK:/; echo done")
        output = core.output(session.id)
        assert turn.status == "completed" and "done" in output and "LEAK" not in output
        # The same reading, where nothing is in the way.
        assert all("canary-of-the-trace" in path.read_text() for path in paths)
    finally:
        for folder in folders:
            shutil.rmtree(folder)


def test_base_conversation_survives_in_the_graph(tmp_path: Path) -> None:
    harness = Harness()
    base(harness)
    path = write(tmp_path, harness.records)
    assert build(read(path).calls.values()).path("c1") == ["c0", "c1"]
