"""Export and explain: golden advantages, every target read back as its consumer reads it, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from call_records import START, SUMMARY, Harness, base, message, tool_call
from conftest import ROOT
from openai.types.chat.chat_completion import Choice

from gateway.advantages import advantages
from gateway.export import CannotExport, Options, Report, export
from gateway.export.shapes import oldest_version
from gateway.formats import FORMATS
from gateway.record import CallRecord
from gateway.store import Store, StoreError

Doc = dict[str, Any]

# Advantages. By hand: rewards 1, 0, 0, 1 have mean 1/2, squared distances 4 x 1/4, sample variance 1/3.

GOLDEN: list[tuple[str, list[float | None], list[float | None]]] = [
    ("grpo", [1, 0, 0, 1], [0.5 / (3**-0.5 + 1e-4)] * 1 + [-0.5 / (3**-0.5 + 1e-4)] * 2 + [0.5 / (3**-0.5 + 1e-4)]),
    ("grpo", [1, 0, 0, 1], [0.8658755, -0.8658755, -0.8658755, 0.8658755]),
    ("dr_grpo", [1, 0, 0, 1], [0.5, -0.5, -0.5, 0.5]),
    ("rloo", [1, 0, 0, 1], [2 / 3, -2 / 3, -2 / 3, 2 / 3]),
    ("rloo", [0.25, 0.5, 1], [-0.5, -0.125, 0.625]),
    ("dr_grpo", [1, None, 0], [0.5, None, -0.5]),
    ("rloo", [1, None, 0], [1, None, -1]),
    ("grpo", [1, None, 0], [0.5 / (0.5**0.5 + 1e-4), None, -0.5 / (0.5**0.5 + 1e-4)]),
    ("grpo", [0.1, 0.1, 0.1], [0, 0, 0]),
    ("dr_grpo", [0.1, 0.1, 0.1], [0, 0, 0]),
    ("rloo", [1], [0]),
    ("grpo", [1, None], [0, None]),
    ("rloo", [None, None], [None, None]),
    ("grpo", [], []),
]


@pytest.mark.parametrize(("kind", "rewards", "expected"), GOLDEN)
def test_advantages(kind: str, rewards: list[float | None], expected: list[float | None]) -> None:
    found = advantages({str(at): reward for at, reward in enumerate(rewards)}, kind)
    assert [value if value is None else pytest.approx(value, abs=1e-6) for value in found.values()] == expected


# A run: two groups, retries, a null reward, subagents, a compaction


def forking(harness: Harness) -> None:
    """A main chain, a subagent, a compaction and the restart: three sequences."""
    history = harness.call(START, message("assistant", "", tool_calls=tool_call("{}", "task")))
    harness.call(
        [START[0], message("user", "look")], "b.txt holds 40 words", labels={"session": "sub", "parent": "main"}
    )
    history = harness.call([*history, message("tool", "b.txt holds 40 words", tool_call_id="t1")], "I see")
    harness.call([*history, message("user", "summarise")], SUMMARY)
    harness.call([START[0], message("user", f"Go on. {SUMMARY}")], "done", finish_reason="length")


def twice(harness: Harness) -> None:
    """Two samples of one prompt after a common turn: two sequences that share tokens."""
    history = harness.call(START, "first")
    for text in ("left", "right"):
        harness.call([*history, message("user", text)], text, labels={"kind": "agent"})


def line(rollout: str, group: str, sample: int, reward: float | None, attempt: int = 1, **members: Any) -> Doc:
    known = {
        "rollout_id": rollout,
        "group_id": group,
        "task": group,
        "harness": "codex",
        "model": "m",
        "sample": sample,
    }
    return {**known, "session_id": "s", "status": "completed", "attempt": attempt, "reward": reward, **members}


LINES = [
    line("a-0", "a", 0, 1.0),
    line("b-0", "b", 0, 0.5, items=[{"text": "x" * 100}]),
    line("a-1", "a", 1, None, status="error"),
    line("a-2", "a", 2, 0),
    line("a-1", "a", 1, 0.0, attempt=2),
    line("a-1", "a", 1, 1.0, attempt=3),  # settled before: its first reward counts
    line("b-1", "b", 1, None, status="error"),
]
PLAYS: list[tuple[str, int, Callable[[Harness], object]]] = [
    ("a-0", 1, forking),
    ("a-1", 1, forking),
    ("a-1", 2, base),
    ("a-2", 1, twice),
    ("b-0", 1, base),
    ("b-1", 1, base),
]


def store(folder: Path, rollout: str, attempt: int, play: Callable[[Harness], object]) -> list[CallRecord]:
    harness = Harness(rollout, attempt, session="main")
    play(harness)
    log = Store(folder).open(rollout, attempt)
    for record in harness.records:
        log.reply(replace(record, state="reply"))
        log.delivered(record.call_id, record.t_terminal)
    log.freeze()
    log.close()
    return harness.records


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with run.jsonl and traces/."""
    folder = tmp_path_factory.mktemp("run")
    for play in PLAYS:
        store(folder / "traces", *play)
    (folder / "run.jsonl").write_text("".join(json.dumps(one) + "\n" for one in LINES))
    return folder


def exported(run: Path, out: Path, target: str = "sequence", **options: Any) -> tuple[list[Doc], Report]:
    report = export(run / "run.jsonl", run / "traces", target, out, Options(**options))
    return [json.loads(one) for one in out.read_text().splitlines()], report


# The neutral row


def test_rows_carry_the_outcome_of_the_attempt_that_settled_the_rollout(run: Path, tmp_path: Path) -> None:
    rows, report = exported(run, tmp_path / "x", advantage="dr_grpo")
    assert [(row["rollout_id"], row["attempt_id"], row["index"], row["count"]) for row in rows] == [
        ("a-0", 1, 0, 3),
        ("a-0", 1, 1, 3),
        ("a-0", 1, 2, 3),
        ("a-1", 2, 0, 1),
        ("a-2", 1, 0, 2),
        ("a-2", 1, 1, 2),
        ("b-0", 1, 0, 1),
        ("b-1", 1, 0, 1),
    ]
    assert {row["rollout_id"]: (row["reward"], row["advantage"]) for row in rows} == {
        "a-0": (1.0, pytest.approx(2 / 3)),
        "a-1": (0.0, pytest.approx(-1 / 3)),
        "a-2": (0, pytest.approx(-1 / 3)),
        "b-0": (0.5, 0.0),
        "b-1": (None, None),
    }
    assert [row["role"] for row in rows[:3]] == ["subagent", "agent", "agent"]
    assert [row["truncated"] for row in rows[:3]] == [False, False, True] and rows[2]["continues"]["via"] == "c3"
    assert (report.rollouts, report.groups, report.null_rewards, report.incomplete, report.unfrozen) == (5, 2, 1, 1, 0)
    assert report.sequences == 8 and report.masked["role compaction"] == len(SUMMARY.encode()) + 3


ROW = {
    "schema": str, "snapshot": str, "rollout_id": str, "attempt_id": int, "group_id": str, "task": str, "harness": str,
    "model": str, "sample": int, "index": int, "count": int, "role": str, "input_ids": list, "loss_mask": list,
    "logprobs": list, "weights": list, "calls": list, "versions": list, "versions_exact": bool, "temperatures": list,
    "reward": (float, int, type(None)), "advantage": (float, type(None)), "truncated": bool,
    "continues": (dict, type(None)), "findings": list,
}  # fmt: skip


def test_a_row_has_the_members_of_the_schema(run: Path, tmp_path: Path) -> None:
    rows, _ = exported(run, tmp_path / "x")
    for row in rows:
        assert set(row) == set(ROW) and all(isinstance(row[name], kind) for name, kind in ROW.items())  # type: ignore[arg-type]


def test_rewards_of_single_calls_ride_with_them(tmp_path: Path) -> None:
    """TOKEN_TRACES 11: they stand beside the rollout's, which stays what the run says."""
    records = store(tmp_path / "traces", "a-0", 1, base)
    (tmp_path / "run.jsonl").write_text(json.dumps(line("a-0", "a", 0, 1.0)))
    before = exported(tmp_path, tmp_path / "x")[0][0]["snapshot"]
    log = Store(tmp_path / "traces").open("a-0", 1)
    log.reward({records[0].call_id: 0.25, records[1].call_id: 1.0})
    log.reward({records[1].call_id: None})
    with pytest.raises(StoreError, match="no call nosuch"):
        log.reward({records[0].call_id: 0.5, "nosuch": 1.0})
    log.close()
    ((row,), _) = exported(tmp_path, tmp_path / "x")
    assert [call["reward"] for call in row["calls"]] == [0.25, *[None] * (len(records) - 1)]
    assert row["reward"] == 1.0 and row["snapshot"] != before


def test_the_same_inputs_give_the_same_bytes(run: Path, tmp_path: Path) -> None:
    for target in FORMATS:
        if target != "trl":
            first, second = tmp_path / f"{target}-1", tmp_path / f"{target}-2"
            exported(run, first, target), exported(run, second, target)
            assert first.read_bytes() == second.read_bytes() != b""


# Every target, read back as its consumer reads it: for each sequence the trained ids, their log probabilities
# and the ids before each.

Trained = list[tuple[tuple[int, ...], int, float]]


def trained(ids: list[int], mask: list[Any], logprobs: list[Any]) -> Trained:
    assert len(ids) == len(mask) == len(logprobs)
    return [(tuple(ids[:at]), id, logprobs[at]) for at, id in enumerate(ids) if mask[at]]


def read_rows(lines: list[Doc]) -> Iterator[Trained]:
    for one in lines:
        yield trained(one["input_ids"], one["loss_mask"], one["logprobs"])


def read_trl(lines: list[Doc]) -> Iterator[Trained]:
    for one in lines:
        lists = one["prompt_ids"], one["completion_ids"], one["env_mask"], one["logprobs"]
        for prompt, completion, mask, logprobs in zip(*lists, strict=True):
            assert mask[0] and len(completion) == len(mask) == len(logprobs)
            yield trained(prompt + completion, [0] * len(prompt) + mask, [0] * len(prompt) + logprobs)


def read_trl_async(lines: list[Doc]) -> Iterator[Trained]:
    """As `_chain_to_sequences` with a fork threshold of 0: each turn's prompt must begin with what was there."""
    for one in lines:
        for chain in one["chains"]:
            ids: list[int] = []
            mask: list[int] = []
            logprobs: list[float] = []
            for turn in chain:
                assert turn["prompt_ids"][: len(ids)] == ids
                context = len(turn["prompt_ids"]) - len(ids)
                ids = turn["prompt_ids"] + turn["output_ids"]
                mask += [0] * context + turn["output_mask"]
                logprobs += [0.0] * context + turn["output_log_probs"]
            yield trained(ids, mask, logprobs)


def read_verl(lines: list[Doc]) -> Iterator[Trained]:
    for one in lines:
        start = len(one["prompt_ids"])
        assert isinstance(one["reward_score"], float) and set(one["metrics"]) <= {"generate_sequences", "tool_calls"}
        mask, logprobs = [0] * start + one["response_mask"], [0] * start + one["response_logprobs"]
        yield trained(one["prompt_ids"] + one["response_ids"], mask, logprobs)


def read_skyrl(lines: list[Doc]) -> Iterator[Trained]:
    for one in lines:
        ends = zip(one["trajectory_ids"], [*one["trajectory_ids"][1:], None], one["is_last_step"], strict=True)
        assert all((now != following) == last for now, following, last in ends)
        assert len(one["rewards"]) == len(one["stop_reasons"]) == len(one["response_ids"])
        lists = one["prompt_token_ids"], one["response_ids"], one["loss_masks"], one["rollout_logprobs"]
        for prompt, response, mask, logprobs in zip(*lists, strict=True):
            yield trained(prompt + response, [0] * len(prompt) + mask, [0] * len(prompt) + logprobs)


def read_openrlhf(lines: list[Doc]) -> Iterator[Trained]:
    """As `_process_response_into_experience`, which shifts the mask and the log probabilities by one itself."""
    for one in lines:
        ids = one["observation_tokens"]
        mask = [0] * len(ids)
        for start, end in one["action_ranges"]:
            mask[start:end] = [1] * (end - start)
        assert all(isinstance(value, int | float) for value in one["extra_logs"].values())
        shifted = mask[1:], one["rollout_log_probs"][1:]
        yield trained(ids, [0, *shifted[0]], [0, *shifted[1]])


def read_prime_rl(lines: list[Doc]) -> Iterator[Trained]:
    for one in lines:
        lengths = {len(one[name]) for name in ("token_ids", "mask", "logprobs", "temperatures", "advantages")}
        assert len(lengths) == 1 and all(isinstance(value, bool) for value in one["mask"])
        assert [bool(value) for value in one["advantages"]] in ([False] * len(one["mask"]), one["mask"])
        yield trained(one["token_ids"], one["mask"], one["logprobs"])


def read_slime(lines: list[Doc]) -> Iterator[Trained]:
    for one in lines:
        start = len(one["tokens"]) - one["response_length"]
        assert one["status"] in ("completed", "truncated") and isinstance(one["rollout_id"], int)
        yield trained(one["tokens"], [0] * start + one["loss_mask"], [0] * start + one["rollout_log_probs"])


def read_tinker(lines: list[Doc]) -> Iterator[Trained]:
    for one in lines:
        inputs = one["loss_fn_inputs"]
        assert {len(value) for value in inputs.values()} == {len(one["model_input"])}
        assert all(isinstance(value, float) for name in ("mask", "advantages", "logprobs") for value in inputs[name])
        ids = [*one["model_input"][:1], *inputs["target_tokens"]]
        yield trained(ids, [0, *inputs["mask"]], [0, *inputs["logprobs"]])


READERS: dict[str, Callable[[list[Doc]], Iterator[Trained]]] = {
    "sequence": read_rows,
    "trl-async": read_trl_async,
    "verl": read_verl,
    "skyrl": read_skyrl,
    "openrlhf": read_openrlhf,
    "prime-rl": read_prime_rl,
    "slime": read_slime,
    "tinker": read_tinker,
}


@pytest.mark.parametrize("target", READERS)
def test_a_target_gives_back_the_trained_ids_in_their_context(run: Path, tmp_path: Path, target: str) -> None:
    rows, _ = exported(run, tmp_path / "rows")
    expected = [
        one for one, row in zip(read_rows(rows), rows, strict=True) if row["reward"] is not None or target == "sequence"
    ]
    lines, _ = exported(run, tmp_path / "lines", target)
    assert list(READERS[target](lines)) == expected and all(expected)
    assert "NaN" not in (tmp_path / "lines").read_text()


def test_trl_takes_rollouts_of_one_sequence(run: Path, tmp_path: Path) -> None:
    with pytest.raises(CannotExport, match="rollout a-0 has 3 sequences, this format takes one: use trl-async"):
        exported(run, tmp_path / "x", "trl")
    assert list(tmp_path.iterdir()) == []  # nothing half written
    (tmp_path / "run.jsonl").write_text("".join(json.dumps(one) + "\n" for one in LINES if one["group_id"] == "b"))
    (tmp_path / "traces").symlink_to(run / "traces")
    rows, _ = exported(tmp_path, tmp_path / "rows")
    lines, _ = exported(tmp_path, tmp_path / "lines", "trl")
    assert list(read_trl(lines)) == list(read_rows(rows))[:1]
    assert {len(member) for member in lines[0].values()} == {1} and lines[0]["reward"] == [0.5]


def test_art_carries_the_sampled_ids_in_its_choices(run: Path, tmp_path: Path) -> None:
    rows, _ = exported(run, tmp_path / "rows")
    lines, _ = exported(run, tmp_path / "lines", "art")
    for row, one in zip([row for row in rows if row["reward"] is not None], lines, strict=True):
        choices = [Choice.model_validate(part) for part in one["messages_and_choices"] if "finish_reason" in part]
        tokens = [token for choice in choices if choice.logprobs for token in choice.logprobs.content or ()]
        found = [(int(token.token.split(":")[1]), token.logprob) for token in tokens]
        assert found == [(id, value) for _, id, value in trained(row["input_ids"], row["loss_mask"], row["logprobs"])]
        roles = [part["message"]["role"] if "message" in part else part["role"] for part in one["messages_and_choices"]]
        assert roles[:2] == ["system", "user"] and roles[-1] == "assistant" and one["metadata"]["exact"] is False


def test_a_rollout_that_forks_counts_once(run: Path, tmp_path: Path) -> None:
    slime, _ = exported(run, tmp_path / "s", "slime")
    assert [one["rollout_id"] for one in slime] == [0, 0, 0, 1, 2, 2, 3] and {one["group_index"] for one in slime} == {
        0,
        1,
    }
    verl, _ = exported(run, tmp_path / "v", "verl", advantage="rloo")
    assert [one["extra_fields"]["advantage"] for one in verl] == [1.0] * 3 + [-0.5] * 3 + [0.0]


@pytest.mark.parametrize(
    ("versions", "oldest"),
    [(["41", "9"], 9), (["10..12", "11"], 10), (["v2", "v1"], "v1"), ([], None)],
)
def test_a_sample_has_the_oldest_version_that_sampled_it(versions: list[str], oldest: Any) -> None:
    assert oldest_version([{"versions": [[0, 1, version] for version in versions]}]) == oldest


def test_split_weights_reach_the_targets_that_hold_them(run: Path, tmp_path: Path) -> None:
    lines, report = exported(run, tmp_path / "x", "prime-rl", ownership="split")
    shared = [one for one in lines if "rl_weights" in one]
    assert len(shared) == 2 and {0.5, 1, 0} == {*shared[0]["rl_weights"]} and report.sequences == 7
    with pytest.raises(CannotExport, match="use --ownership first"):
        exported(run, tmp_path / "y", "verl", ownership="split")


# What is left out, and what is refused


def test_groups_without_variance_are_dropped_on_request(run: Path, tmp_path: Path) -> None:
    rows, report = exported(run, tmp_path / "x", drop_zero_variance=True)
    assert {row["group_id"] for row in rows} == {"a"} and report.zero_variance == 1


def test_accepted_compactions_are_trained_on_request(run: Path, tmp_path: Path) -> None:
    rows, report = exported(run, tmp_path / "x", compactions=True)
    assert "role compaction" not in report.masked
    assert any(call["call_id"] == "c3" for row in rows for call in row["calls"])


def test_a_cut_is_made_between_calls_and_flagged(run: Path, tmp_path: Path) -> None:
    whole, _ = exported(run, tmp_path / "x")
    length = whole[-1]["calls"][0]["end"] + 3
    rows, report = exported(run, tmp_path / "y", max_length=length)
    assert max(len(row["input_ids"]) for row in rows) <= length and report.cut > 0
    flagged = [
        row
        for row in rows
        if any(finding["code"] == "truncated" and "cut" in finding["detail"] for finding in row["findings"])
    ]
    assert flagged and all(row["truncated"] and row["loss_mask"][-1] for row in flagged)


def test_bad_lines_are_named_and_the_others_used(run: Path, tmp_path: Path) -> None:
    odd = ["{", '{"a": 1}', json.dumps(line("z", "z", 0, None) | {"reward": "1"}), "", '{"rollout_id": NaN}']
    text = "".join(json.dumps(one) + "\n" for one in LINES[:2])
    (tmp_path / "run.jsonl").write_text("\n".join(odd) + "\n" + text + text[:40])
    (tmp_path / "traces").symlink_to(run / "traces")
    rows, report = exported(tmp_path, tmp_path / "x")
    assert [problem.split(":")[0] for problem in report.problems] == ["line 1", "line 2", "line 3", "line 5", "line 8"]
    assert {row["rollout_id"] for row in rows} == {"a-0", "b-0"}


def test_a_rollout_without_a_trace_leaves_its_group_incomplete(run: Path, tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").write_text("".join(json.dumps(one) + "\n" for one in [*LINES, line("a-9", "a", 9, 1.0)]))
    (tmp_path / "traces").symlink_to(run / "traces")
    rows, report = exported(tmp_path, tmp_path / "x", advantage="dr_grpo")
    assert report.no_trace == ["a-9"] and report.incomplete == 2
    assert rows[0]["advantage"] == 0.5  # its reward was measured, so it counts in the baseline


def gateway(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gateway", *map(str, arguments)], cwd=ROOT, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        (["-f", "nonsense"], 2, "choose from 'sequence'"),
        (["-o", "{run}/run.jsonl"], 2, "exists: choose another name"),
        (["--traces", "{run}/nowhere"], 2, "is no folder"),
        (["--traces", "{empty}"], 1, "nothing to export"),
        (["-f", "tinker", "--advantage", "none"], 1, "needs advantages"),
        (["--max-length", "3"], 1, "nothing to export"),
        (["-o", "{run}/nowhere/x"], 1, "cannot be written: No such file"),
    ],
)
def test_a_refusal_is_one_line_and_leaves_nothing(
    run: Path, tmp_path: Path, change: list[str], code: int, said: str
) -> None:
    out = tmp_path / "out"
    (empty := tmp_path / "empty").mkdir()
    command = ["export", run / "run.jsonl", "--traces", run / "traces", "-o", out]
    done = gateway(*command, *[one.format(run=run, empty=empty) for one in change])
    assert done.returncode == code and said in done.stderr and "Traceback" not in done.stderr
    assert code == 2 or done.stderr.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty"]


def test_a_damaged_trace_stops_the_export(run: Path, tmp_path: Path) -> None:
    store(tmp_path / "traces", "a-0", 1, base)
    (path,) = (tmp_path / "traces").glob("*/*.log")
    data = path.read_bytes()
    path.write_bytes(data[:300] + b"x" + data[301:])
    done = gateway("export", run / "run.jsonl", "--traces", tmp_path / "traces", "-o", tmp_path / "out")
    assert done.returncode == 1 and "damaged at byte" in done.stderr and not (tmp_path / "out").exists()
    assert gateway("explain", path).returncode == 1


def test_the_export_command_says_what_it_did(run: Path, tmp_path: Path) -> None:
    done = gateway("export", run / "run.jsonl", "--traces", run / "traces", "-f", "verl", "-o", tmp_path / "out")
    assert done.returncode == 0 and "sequences: 7, of rollouts: 4, in groups: 2" in done.stdout
    assert "null rewards: 1" in done.stdout and "role compaction" in done.stdout


# Explain


def test_explain_tells_what_broke_where_and_why(tmp_path: Path) -> None:
    def play(harness: Harness) -> None:
        history = harness.call(START, message("assistant", "", tool_calls=tool_call('{"cmd": "wc -l a.txt"}')))
        history[2] = message("assistant", "", tool_calls=tool_call('{"cmd":"wc -l a.txt"}'))
        for number in range(6):
            history = harness.call([*history, message("tool", f"\x1b[31m{number}", tool_call_id="t1")], "once more")

    store(tmp_path, "a\x1b[2J", 1, play)
    done = gateway("explain", tmp_path)
    assert done.returncode == 0 and "\x1b" not in done.stdout
    for words in (
        "rollout a\\x1b[2J, attempt 1: 7 calls in 2 roots",
        "agent: c1 ─ c2 ─ … ─ c6   6 calls",
        "c1 begins a new root: retokenized_args, caused by the harness",
        "message 2, /messages/2/tool_calls/0/function/arguments",
        'before: {"cmd": "wc -l a.txt"}',
        'after:  {"cmd":"wc -l a.txt"}',
        "2 sequences, ",
    ):
        assert words in done.stdout


def test_explain_draws_forks_edges_and_what_is_not_trained(run: Path) -> None:
    done = gateway("explain", run / "traces" / "a-0" / "1.log")
    assert "└─ compaction (accepted): c3" in done.stdout and "c4 continues c2 with the summary of c3" in done.stdout
    assert "c2 was given what c1 reported" in done.stdout and "not trained: role compaction" in done.stdout
    forks = gateway("explain", run / "traces" / "a-2" / "1.log").stdout
    assert "├─ agent: c1" in forks and "└─ agent: c2" in forks


def test_explain_takes_a_trace(tmp_path: Path) -> None:
    assert gateway("explain", tmp_path).returncode == 2
    assert "cannot be read" in gateway("explain", tmp_path / "no.log").stderr
