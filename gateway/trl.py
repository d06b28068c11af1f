"""TRL: a `rollout_func` for GRPOTrainer, which runs a batch of prompts as rollouts of `rl_eval.py` through the gateway.

    rollouts = Rollouts(tasks=Path("tasks"), traces=Path("traces"), model="Qwen/Qwen3-8B")
    GRPOTrainer(model, reward_funcs=reward, rollout_func=rollouts,
                train_dataset=Dataset.from_dict({"prompt": rollouts.prompts()}), …)

The trainer hands over each prompt as often as it wants completions of it: copy k becomes sample k of the prompt's
task. The script runs as a process of its own, on the deployment and the gateway that `environment` names, and its
file and log stay in `runs`. Then each settling attempt is frozen, and rewards and traces are joined by rollout.

Invariants: one row per copy of a prompt, in their order; ids and log probabilities are the engine's own, and what it
did not sample has `env_mask` 0; a null reward stays None, which TRL leaves out of the baseline and gives the
advantage 0; a rollout without a token to train keeps its reward and becomes one masked token; a batch in which
nothing was measured, or nothing is to be trained, is an error.

Not here: new weights for the engine (TRL's own vLLM server gets them before each batch, others are the caller's
matter), advantages (TRL computes them). TRL and torch are not imported. Shapes as of TRL 1.16.
"""

from __future__ import annotations

import logging
import os
import secrets
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import httpx

from gateway import strict
from gateway.export import Options, Report, find_target, groups, outcomes, summary
from gateway.export.shapes import CannotExport, Rollout
from gateway.export.trl import tokens
from gateway.record import Doc

__all__ = ["Rollouts", "RolloutsFailed", "reward"]

Prompt = str | Sequence[Mapping[str, Any]]
Place = tuple[str, int]
"""Task and sample."""

SCRIPT = Path(__file__).parents[1] / "rl_eval.py"
NEEDED = ("MODEL_BASE_URL", "MODEL_API_KEY", "GATEWAY_CONTROL_URL", "GATEWAY_ADMIN_KEY")
GOOD_CODES = (0, 3)
"""Of the script: with 3 some rollouts were not measured, which their rows say."""
CONTROL_SECONDS = 30.0
NOTHING: Doc = {"prompt_ids": [0], "completion_ids": [0], "logprobs": [0.0], "env_mask": [0], "snapshot": None}
"""A rollout without a token to train: TRL takes no empty completion, and every vocabulary has a token 0."""

logger = logging.getLogger(__name__)


class RolloutsFailed(RuntimeError):
    """One line: why a batch cannot be trained, and what to look at."""


def reward(
    prompts: Sequence[Any], completions: Sequence[Any], reward: list[float | None], **columns: Any
) -> list[float | None]:
    """The reward function: what the rollouts earned. None where nothing was measured."""
    return reward


@dataclass(frozen=True)
class Rollouts:
    """A `rollout_func`. Raises ValueError for a prompt of no task, RolloutsFailed and CannotExport for a batch."""

    tasks: Path
    """The folder of tasks."""
    traces: Path
    """The gateway's."""
    model: str
    """As the gateway and the record name it."""
    harness: str = "codex"
    task_ids: Mapping[str, str] | None = None
    """The task of each prompt. By default a prompt is a task's instruction.md."""
    several: Literal["refuse", "longest"] = "refuse"
    """Of a rollout of several sequences (subagents, compaction) there is room for one. `longest`: the one with the
    most tokens to train, of equal ones the first; the tokens of the others are not trained."""
    options: Sequence[str] = ()
    """More options of rl_eval.py, such as `--concurrency 16`."""
    runs: Path = Path("runs")
    """Where the files of the runs go."""
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ), repr=False)
    """With what `python -m gateway serve` printed; OPENAI_BASE_URL and OPENAI_API_KEY may name a deployment."""

    def __post_init__(self) -> None:
        if missing := [name for name in NEEDED if not self.environment.get(name)]:
            raise ValueError(f"{', '.join(missing)} not set: paste the lines that `python -m gateway serve` printed")
        if "{rollout_id}" not in self.environment["MODEL_BASE_URL"]:
            raise ValueError("MODEL_BASE_URL has no {rollout_id} in it: put single quotes around it in the shell")
        if not self.traces.is_dir():
            raise ValueError(f"traces={self.traces} is no folder: name the one that the gateway was given")
        object.__setattr__(self, "task_ids", read_instructions(self.tasks) if self.task_ids is None else self.task_ids)

    def prompts(self) -> list[str]:
        """One of each: the dataset's column `prompt`."""
        return list(self.task_ids or ())

    def __call__(self, prompts: Sequence[Prompt], trainer: Any) -> dict[str, list[Any]]:
        """A row per prompt, as a dict of lists; `reward` and the names of the rollouts go to reward functions."""
        asked = places([self.task_of(prompt) for prompt in prompts])
        wanted = Counter(task for task, _ in asked)
        rows: dict[Place, Doc] = {}
        for samples in sorted(set(wanted.values())):
            path = self.run([task for task in wanted if wanted[task] == samples], samples)
            rows |= self.read(path, trainer.args.temperature)
        if lost := [f"{task} {sample}" for task, sample in asked if (task, sample) not in rows]:
            raise RolloutsFailed(f"the run has no line for {', '.join(lost[:3])}: see {self.runs}")
        chosen = [rows[place] for place in asked]
        return {name: [row[name] for row in chosen] for name in chosen[0]}

    def task_of(self, prompt: Prompt) -> str:
        text, known = text_of(prompt).strip(), self.task_ids or {}
        if text not in known:
            raise ValueError(f"no task has the prompt {text[:60]!r}: use prompts(), or name its task in task_ids")
        return known[text]

    def run(self, tasks: Iterable[str], samples: int) -> Path:
        """Run the rollouts; their file."""
        self.runs.mkdir(parents=True, exist_ok=True)
        stem = self.runs / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(3)}"
        path, log = stem.with_suffix(".jsonl"), stem.with_suffix(".log")
        chosen = [word for task in tasks for word in ("--task", task)]
        command = [sys.executable, str(SCRIPT), "--tasks", str(self.tasks), *chosen, "--samples", str(samples)]
        command += ["--harness", self.harness, "--model", self.model, "--quiet", "--out", str(path)]
        command += ["--model-base-url", self.environment["MODEL_BASE_URL"], *self.options]
        with log.open("wb") as said:
            code = finish(command, self.environment, said)
        if code not in GOOD_CODES:
            raise RolloutsFailed(f"rl_eval.py ended with {code}: {last_line(log)} (all of it is in {log})")
        return path

    def read(self, path: Path, temperature: float) -> dict[Place, Doc]:
        """The rows of a run that ended."""
        report = Report()
        found = outcomes(path, report)
        self.freeze(found.values())
        joined = groups(path, self.traces, find_target("sequence"), Options(advantage=None), report := Report())
        traced = {rollout.id: rollout for group in joined for rollout in group.rollouts}
        if not traced or all(outcome["reward"] is None for outcome in found.values()):
            raise RolloutsFailed(f"nothing to train on: {first_error(path)} ({summary(report)}). See {path}")
        logger.info("%s: %s", path, summary(report))
        check_temperature(traced.values(), temperature)
        return {(one["task"], one["sample"]): self.row(one, traced.get(one["rollout_id"])) for one in found.values()}

    def row(self, outcome: Doc, rollout: Rollout | None) -> Doc:
        names = {"reward": outcome["reward"], "rollout_id": outcome["rollout_id"], "attempt_id": outcome["attempt"]}
        if rollout is None:
            return {**NOTHING, **names, "sequences": 0}
        count = len(rollout.rows)
        if count > 1 and self.several == "refuse" and outcome["reward"] is not None:
            raise CannotExport(f'rollout {rollout.id} has {count} sequences, TRL takes one: see several="longest"')
        row = max(rollout.rows, key=lambda one: sum(one["loss_mask"]))
        return {**tokens(row), "snapshot": row["snapshot"], **names, "sequences": count}

    def freeze(self, outcomes: Iterable[Doc]) -> None:
        """Let no call come later, and have everything on the disk. An attempt that made no call has no trace."""
        headers = {"authorization": f"Bearer {self.environment['GATEWAY_ADMIN_KEY']}"}
        base = self.environment["GATEWAY_CONTROL_URL"]
        try:
            with httpx.Client(base_url=base, headers=headers, timeout=CONTROL_SECONDS, trust_env=False) as client:
                for one in outcomes:
                    path = f"/attempts/{quote(one['rollout_id'], safe='')}/{one['attempt']}/freeze"
                    if (answer := client.post(path)).status_code not in (200, 404):
                        raise RolloutsFailed(f"the gateway at {base} did not freeze a trace: {answer.text[:300]}")
        except httpx.HTTPError as error:
            raise RolloutsFailed(f"GATEWAY_CONTROL_URL {base}: no answer: {error or type(error).__name__}") from None


def read_instructions(folder: Path) -> dict[str, str]:
    """The tasks of a folder by their instructions. Raises ValueError."""
    found: dict[str, str] = {}
    for path in sorted(folder.glob("[!._]*/instruction.md")):
        text, task = path.read_text("utf-8-sig").strip(), path.parent.name
        if (other := found.setdefault(text, task)) != task:
            raise ValueError(f"tasks {other} and {task} have the same instruction: name the tasks in task_ids")
    if not found:
        raise ValueError(f"no tasks in {folder}")
    return found


def text_of(prompt: Prompt) -> str:
    """A plain prompt, or the last user message of a conversation."""
    if isinstance(prompt, str):
        return prompt
    content = next((one["content"] for one in reversed(prompt) if one.get("role") == "user"), "")
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def places(tasks: Iterable[str]) -> list[Place]:
    """Each task with how often it came before."""
    seen: Counter[str] = Counter()
    found = []
    for task in tasks:
        found.append((task, seen[task]))
        seen[task] += 1
    return found


def finish(command: Sequence[str], environment: Mapping[str, str], said: Any) -> int:
    """Run a command to its end; its exit code. On an interruption it is told to clean up, and waited for."""
    # In a session of its own: a Ctrl-C reaches the trainer alone, and the script one signal, not two.
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True
    )
    try:
        return process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise


def last_line(path: Path) -> str:
    return (path.read_text("utf-8", "replace").strip().splitlines() or ["it said nothing"])[-1][:500]


def first_error(path: Path) -> str:
    """Of a run whose lines have been read."""
    with path.open("rb") as file:
        errors = (strict.loads(line).get("error") for line in file)
        return str(next((error for error in errors if error), "no rollout says why"))[:500]


def check_temperature(rollouts: Iterable[Rollout], temperature: float) -> None:
    """TRL scores tokens at its own temperature: with another one the ratios to what was sampled would be off."""
    spans = (span for rollout in rollouts for row in rollout.rows for span in row["temperatures"])
    if (other := next((span[2] for span in spans if span[2] != temperature), None)) is not None:
        raise RolloutsFailed(
            f"the engine sampled at temperature {other:g}, the trainer scores at {temperature:g}: give GRPOConfig "
            f"temperature={other:g}, or the gateway --temperature {temperature:g}"
        )
