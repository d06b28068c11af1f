"""`gateway.trl`: TRL's rollout_func with the real script, an embedded Core, codex and a recording gateway.

The engine (engine.py) answers right in every second conversation, so a row's reward can be told from its tokens.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import seen_in_processes, until
from engine import END, MODEL, NAMES, START, Engine, call_text, decode, engine
from recorded import Doc, Recorder, body, recorder
from run_files import result, write_run

import gateway.trl
from core.harnesses.npm import DEFAULT_PREFIX
from gateway.export.shapes import CannotExport
from gateway.trl import Rollouts, RolloutsFailed, last_line, places, reward

ROOT = Path(__file__).parents[1]
TEMPERATURE = 0.7
TASKS = {"first": "Answer the first question.", "second": "Answer the second question."}
COPIES = 4


def trainer(temperature: float = TEMPERATURE) -> Any:
    """What is read of a GRPOTrainer; the real one is in the last test."""
    return SimpleNamespace(args=SimpleNamespace(temperature=temperature))


def write_tasks(folder: Path) -> Path:
    for name, instruction in TASKS.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "instruction.md").write_text(instruction + "\n")
        (folder / name / "expected.json").write_text('{"x": 1}')
    return folder


def answering(engine: Engine) -> None:
    """Conversations answer 1 and 0 in turn, by one command each."""
    turn = itertools.count()

    def script(asked: Doc) -> str:
        if asked["messages"][-1]["role"] == "tool":
            return "Done."
        answer = f"mkdir -p outputs; echo '{{\"x\": {next(turn) % 2}}}' > outputs/answer.json"
        offered = [tool["function"]["name"] for tool in asked["tools"]]
        return call_text("exec_command", cmd=answer) if "exec_command" in offered else call_text("bash", command=answer)

    engine.script = script


@dataclass
class Setting:
    gateway: Recorder
    rollouts: Rollouts


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    folder = tmp_path_factory.mktemp("trl")
    with engine() as running, recorder(running, folder, "--temperature", str(TEMPERATURE)) as gateway:
        answering(running)
        yield Setting(gateway, made(gateway, folder))


def made(gateway: Recorder, folder: Path, **more: Any) -> Rollouts:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "MODEL_"))}
    options = ["--concurrency", "4", "--retries", "0"]
    known: Doc = {"runs": folder / "runs", "options": options, "environment": {**kept, **gateway.exports}}
    return Rollouts(write_tasks(folder / "tasks"), gateway.traces, MODEL, **{**known, **more})


@pytest.fixture(scope="module")
def batch(setting: Setting) -> tuple[list[str], dict[str, list[Any]]]:
    """Copies of both prompts, in an order that is not the plan's."""
    first, second = setting.rollouts.prompts()
    prompts = [second] + [first] * COPIES + [second] * (COPIES - 1)
    return prompts, setting.rollouts(prompts, trainer())


def test_there_is_a_row_per_copy_in_the_order_of_the_prompts(batch: Any) -> None:
    prompts, columns = batch
    assert {name: len(column) for name, column in columns.items()} == dict.fromkeys(columns, 2 * COPIES)
    assert all(prompt in decode(ids) for prompt, ids in zip(prompts, columns["prompt_ids"], strict=True))
    assert len(set(columns["rollout_id"])) == 2 * COPIES
    assert set(columns["attempt_id"]) == set(columns["sequences"]) == {1} and all(columns["snapshot"])


def test_rewards_stand_beside_the_tokens_that_earned_them(batch: Any) -> None:
    _, columns = batch
    for ids, earned in zip(columns["completion_ids"], columns["reward"], strict=True):
        assert (r"\"x\": 1" in decode(ids)) == (earned == 1.0) and earned is not None
    assert sorted(columns["reward"]) == [0.0] * COPIES + [1.0] * COPIES
    assert reward([], [], **columns) == columns["reward"]


def test_ids_and_log_probabilities_are_the_engines_own(setting: Setting, batch: Any) -> None:
    """Each row is the last call of a conversation, and what was sampled in it has the engine's log probability."""
    _, columns = batch
    served = {tuple(one.prompt_ids + one.sampled_ids): one for one in setting.gateway.engine.served}
    scored = {len(one.prompt_ids + one.sampled_ids): one for one in served.values()}
    assert scored
    for row in rows(columns):
        whole = row["prompt_ids"] + row["completion_ids"]
        last = served[tuple(whole)]
        start, size = len(row["prompt_ids"]), len(last.sampled_ids)
        assert row["logprobs"][-size:] == last.logprobs and row["env_mask"][-size:] == [1] * size
        for at, (logprob, trained) in enumerate(zip(row["logprobs"], row["env_mask"], strict=True)):
            assert logprob == (Engine.logprob(whole, start + at, TEMPERATURE) if trained else 0.0)
        sampled = [number for number, mask in zip(row["completion_ids"], row["env_mask"], strict=True) if mask]
        assert sampled.count(END) == 2 and 0 in row["env_mask"] and row["env_mask"][0] == 1


def rows(columns: dict[str, list[Any]]) -> Iterator[Doc]:
    for values in zip(*columns.values(), strict=True):
        yield dict(zip(columns, values, strict=True))


def test_no_call_can_come_after_the_batch(setting: Setting, batch: Any) -> None:
    _, columns = batch
    assert setting.gateway.post("responses", body("responses"), columns["rollout_id"][0]).status_code == 409
    trace = setting.gateway.trace(columns["rollout_id"][0])
    assert trace.frozen == trace.snapshot == columns["snapshot"][0]


def test_no_key_is_in_the_files_of_a_run(setting: Setting, batch: Any) -> None:
    written = [path.read_bytes() for path in setting.rollouts.runs.iterdir()]
    assert len(written) == 2 and all(key.encode() not in data for data in written for key in keys(setting.gateway))
    assert not any(key in repr(setting.rollouts) for key in keys(setting.gateway))


def keys(gateway: Recorder) -> list[str]:
    return [gateway.exports["MODEL_API_KEY"], gateway.exports["GATEWAY_ADMIN_KEY"]]


# --- Runs as the script writes them, with calls recorded by the gateway --------------------------------


CHAT = {"role": "user", "content": TASKS["first"]}


def recorded(setting: Setting, folder: Path, rewards: list[float | None], calls: list[int]) -> tuple[Rollouts, Path]:
    """A run of one task: sample n earned rewards[n] and opened calls[n] conversations."""
    lines = [result("first", n, earned, error=None if earned else "It broke.") for n, earned in enumerate(rewards)]
    for line, count in zip(lines, calls, strict=True):
        line.rollout_id = f"{folder.name}-{len(list(setting.gateway.traces.iterdir()))}-{line.sample}"
        for number in range(count):
            asked = body("chat", f"{TASKS['first']} Part {number}.", tools=True)
            assert setting.gateway.post("chat", asked, line.rollout_id, session_id="s").status_code == 200
    return replace(setting.rollouts, runs=folder), write_run(folder / "run.jsonl", lines)


@pytest.fixture
def talking(setting: Setting) -> Iterator[Setting]:
    script, setting.gateway.engine.script = setting.gateway.engine.script, lambda asked: "An answer."
    yield setting
    setting.gateway.engine.script = script


def test_what_was_not_measured_has_no_reward_and_no_call_no_token(talking: Setting, tmp_path: Path) -> None:
    rollouts, path = recorded(talking, tmp_path, [1.0, None, None, 0.0], [1, 1, 0, 0])
    found = [rollouts.read(path, TEMPERATURE)["first", n] for n in range(4)]
    assert [row["reward"] for row in found] == [1.0, None, None, 0.0]
    assert [sum(row["env_mask"]) for row in found] == [len("An answer.") + 1] * 2 + [0, 0]
    assert [row["sequences"] for row in found] == [1, 1, 0, 0]
    assert all(len(row["completion_ids"]) == len(row["logprobs"]) == len(row["env_mask"]) > 0 for row in found)
    assert all(row["prompt_ids"] and set(row) == set(found[0]) for row in found)


def test_several_sequences_are_refused_or_the_longest_is_taken(talking: Setting, tmp_path: Path) -> None:
    talking.gateway.engine.script = lambda asked: "Long." * (1 + 4 * ("Part 1" in asked["messages"][-1]["content"]))
    rollouts, path = recorded(talking, tmp_path, [1.0], [3])
    with pytest.raises(CannotExport, match='-0 has 3 sequences, TRL takes one: see several="longest"'):
        rollouts.read(path, TEMPERATURE)
    row = replace(rollouts, several="longest").read(path, TEMPERATURE)["first", 0]
    assert (row["sequences"], decode(row["completion_ids"][:-1])) == (3, "Long." * 5)


def test_several_sequences_without_a_reward_refuse_no_batch(talking: Setting, tmp_path: Path) -> None:
    rollouts, path = recorded(talking, tmp_path, [1.0, None], [1, 2])
    assert rollouts.read(path, TEMPERATURE)["first", 1]["sequences"] == 2


@pytest.mark.parametrize(("rewards", "calls"), [([None, None], [1, 1]), ([0.0, 0.0], [0, 0])])
def test_a_batch_that_teaches_nothing_is_an_error(
    talking: Setting, tmp_path: Path, rewards: list[float | None], calls: list[int]
) -> None:
    rollouts, path = recorded(talking, tmp_path, rewards, calls)
    with pytest.raises(RolloutsFailed, match=r"nothing to train on: It broke\. .*run\.jsonl"):
        rollouts.read(path, TEMPERATURE)


def test_another_temperature_than_the_trainers_is_refused(talking: Setting, tmp_path: Path) -> None:
    rollouts, path = recorded(talking, tmp_path, [1.0], [1])
    with pytest.raises(RolloutsFailed, match=r"sampled at temperature 0\.7, the trainer scores at 1: "):
        rollouts.read(path, 1.0)


BATCH = """
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from gateway.trl import Rollouts
signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background of a shell ignores it
tasks, traces, runs = map(Path, sys.argv[1:])
rollouts = Rollouts(tasks, traces, "tiny", runs=runs)
rollouts(rollouts.prompts(), SimpleNamespace(args=SimpleNamespace(temperature=0.7)))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM to the script"])
def test_an_interrupted_batch_leaves_nothing_behind(talking: Setting, tmp_path: Path, number: int) -> None:
    """The trainer's Ctrl-C ends the script in order; a script that was ended ends the batch."""
    rollouts, engine = talking.rollouts, talking.gateway.engine
    engine.held.clear()
    before = len(engine.served)
    arguments = [str(rollouts.tasks), str(rollouts.traces), str(tmp_path)]
    process = subprocess.Popen(
        [sys.executable, "-c", BATCH, *arguments], cwd=ROOT, env=rollouts.environment, stderr=subprocess.PIPE, text=True
    )
    try:
        until(lambda: len(engine.served) >= before + 2)
        target = process.pid if number == signal.SIGINT else child_of(process.pid)
        os.kill(target, number)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
        engine.held.set()
    expected = "KeyboardInterrupt" if number == signal.SIGINT else "rl_eval.py ended with 130"
    assert process.returncode and expected in said.splitlines()[-1]
    (path,) = tmp_path.glob("*.jsonl")
    assert [json.loads(line)["status"] for line in path.open()] == ["cancelled", "cancelled"]
    assert not seen_in_processes(path.name)


def child_of(pid: int) -> int:
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


# --- What is wrong is said on one line --------------------------------------------------------------------


def test_the_script_says_what_is_wrong(setting: Setting) -> None:
    rollouts = replace(setting.rollouts, harness="codexx")
    with pytest.raises(RolloutsFailed, match=r"rl_eval\.py ended with 2: rl_eval: no harness 'codexx'; there are: "):
        rollouts([TASKS["first"]], trainer())


def test_a_control_listener_that_is_gone_is_named(talking: Setting, tmp_path: Path) -> None:
    rollouts, path = recorded(talking, tmp_path, [1.0], [1])
    dead = {**rollouts.environment, "GATEWAY_CONTROL_URL": "http://127.0.0.1:9"}
    with pytest.raises(RolloutsFailed, match=r"GATEWAY_CONTROL_URL http://127\.0\.0\.1:9: no answer"):
        replace(rollouts, environment=dead).read(path, TEMPERATURE)
    wrong = {**rollouts.environment, "GATEWAY_ADMIN_KEY": "wrong"}
    with pytest.raises(RolloutsFailed, match=r"did not freeze a trace: .*admin key"):
        replace(rollouts, environment=wrong).read(path, TEMPERATURE)


@pytest.mark.parametrize("name", gateway.trl.NEEDED)
def test_the_gateways_variables_are_needed(setting: Setting, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} not set: paste the lines"):
        replace(setting.rollouts, environment={**setting.rollouts.environment, name: ""})


def test_a_folder_of_traces_or_tasks_that_is_none_is_named(setting: Setting, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no folder: name the one that the gateway was given"):
        replace(setting.rollouts, traces=tmp_path / "none")
    with pytest.raises(ValueError, match="no tasks in"):
        replace(setting.rollouts, tasks=tmp_path, task_ids=None)


@pytest.mark.parametrize(
    "prompt",
    [
        TASKS["first"] + "\n",
        [CHAT],
        [{"role": "system", "content": "Be quick."}, CHAT],
        [{"role": "user", "content": [{"type": "text", "text": TASKS["first"]}]}],
    ],
    ids=["text", "conversation", "with system", "parts"],
)
def test_a_prompt_names_its_task(setting: Setting, prompt: Any) -> None:
    assert setting.rollouts.task_of(prompt) == "first"
    with pytest.raises(ValueError, match="no task has the prompt 'Another'"):
        setting.rollouts.task_of("Another")


def test_prompts_can_be_mapped_to_tasks(setting: Setting) -> None:
    rollouts = replace(setting.rollouts, task_ids={"1": "first", "one": "first", "2": "second"})
    assert rollouts.prompts() == ["1", "one", "2"] and rollouts.task_of("one") == "first"


def test_copies_are_counted_by_task() -> None:
    assert places(["a", "b", "a", "a", "b"]) == [("a", 0), ("b", 0), ("a", 1), ("a", 2), ("b", 1)]


def test_trl_and_torch_are_not_imported() -> None:
    code = "import sys, gateway.trl; sys.exit(bool({'trl', 'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_a_log_without_a_line_has_a_last_line(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("")
    assert last_line(tmp_path / "log") == "it said nothing"


# --- The real trainer (needs trl and torch, which requirements.txt does not install) -----------------------


@pytest.mark.slow
def test_a_step_of_the_installed_trainer(setting: Setting, tmp_path: Path) -> None:
    """The weights move after a batch with rewards of both kinds; the null reward's advantage is zero.

    With pi, whose prompts are short: as bytes, codex's would take this model gigabytes of attention.
    """
    pytest.importorskip("trl")
    if not (DEFAULT_PREFIX / "node_modules" / ".bin" / "pi").exists():
        pytest.skip("pi is not installed: npm install --prefix core/npm")
    import datasets
    import torch
    import trl

    rollouts = replace(setting.rollouts, runs=tmp_path, harness="pi")
    batches: list[dict[str, list[Any]]] = []
    scored: list[dict[str, Any]] = []

    def rolled(prompts: list[str], of: Any) -> dict[str, list[Any]]:
        batches.append(rollouts(prompts, of))
        batches[-1]["reward"][0] = None  # as if the host had failed it
        return batches[-1]

    class Trainer(trl.GRPOTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            scored.append(found := super()._generate_and_score_completions(inputs))
            return found

    config = trl.GRPOConfig(
        output_dir=str(tmp_path / "out"),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2 * COPIES,
        num_generations=COPIES,
        max_steps=1,
        temperature=TEMPERATURE,
        learning_rate=1e-2,
        use_cpu=True,
        report_to=[],
        bf16=False,
    )
    model, tokenizer = tiny()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    made = Trainer(
        model=model,
        reward_funcs=reward,
        args=config,
        rollout_func=rolled,
        processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_dict({"prompt": rollouts.prompts()}),
    )
    made.train()
    (columns,), (inputs,) = batches, scored
    advantages = inputs["advantages"].tolist()
    assert len(columns["reward"]) == len(advantages) == 2 * COPIES and advantages[0] == 0.0
    for earned, advantage in zip(columns["reward"][1:], advantages[1:], strict=True):
        assert advantage == 0.0 or (advantage > 0) == (earned == 1.0)
    assert any(advantages)
    for row, ids, mask in zip(rows(columns), inputs["completion_ids"], inputs["tool_mask"], strict=True):
        size = len(row["completion_ids"])
        assert ids[:size].tolist() == row["completion_ids"] and mask[:size].tolist() == row["env_mask"]
        assert not mask[size:].any()
    assert any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def tiny() -> tuple[Any, Any]:
    """A random model and a tokenizer with the engine's vocabulary."""
    from tokenizers import Tokenizer, decoders, models
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    letters = {letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet()))}
    base = Tokenizer(models.BPE(letters, []))
    base.add_special_tokens([NAMES[START], NAMES[END]])
    base.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=base, eos_token=NAMES[END], pad_token=NAMES[END])
    assert tokenizer.eos_token_id == END
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = Qwen2Config(
        vocab_size=259, num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=1 << 16, **sizes
    )
    return Qwen2ForCausalLM(config), tokenizer
