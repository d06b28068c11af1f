"""A tiny policy on real logits, whole: its engine as a process, a gateway before it, sweeps, exported rows.

What the tests of exactness and the toy learning run share. It needs torch (.ci/requirements-torch.txt).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
import torch
from engine import Doc, Engine
from recorded import ROOT, Recorder, recorder
from torch_engine import Part, scores
from transformers import Qwen3ForCausalLM

BOUND = 1e-4
"""Of |log π_again - log π_recorded| at any trained token."""
Models = Mapping[str, Qwen3ForCausalLM]
"""By the version of their weights."""


@dataclass
class Policy:
    url: str
    gateway: Recorder
    folder: Path

    def control(self, path: str, body: Doc) -> None:
        httpx.post(self.url.removesuffix("/v1") + path, json=body, timeout=60).raise_for_status()

    def steer(self, *turns: list[Part]) -> None:
        self.control("/steer", {"turns": turns})

    def swap(self, file: Path, version: str) -> None:
        """As a trainer does it: between calls."""
        self.gateway.control("POST", "/pause").raise_for_status()
        self.control("/weights", {"file": str(file), "version": version})
        self.gateway.control("POST", "/resume").raise_for_status()

    def sweep(self, name: str, *arguments: str) -> list[Doc]:
        """`rl_eval.py` on the folder's tasks, through the gateway; the lines of its file NAME.jsonl."""
        out = self.folder / f"{name}.jsonl"
        endpoint = ("--model", "my-policy", "--model-base-url", self.gateway.exports["MODEL_BASE_URL"])
        command = [sys.executable, "rl_eval.py", "--tasks", str(self.folder / "tasks"), "--out", str(out)]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("OPENAI_")}
        done = subprocess.run(
            [*command, *endpoint, *arguments],
            cwd=ROOT,
            env={**kept, "MODEL_API_KEY": self.gateway.key},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return read_lines(out)

    def export(self, name: str, *arguments: str) -> list[Doc]:
        """The `sequence` rows of the run NAME.jsonl."""
        run, out = self.folder / f"{name}.jsonl", self.folder / f"{name}.rows.jsonl"
        command = [sys.executable, "-m", "gateway", "export", str(run), "--traces", str(self.gateway.traces)]
        subprocess.run([*command, "-o", str(out), *arguments], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return read_lines(out)

    def export_rollouts(self, *rollouts: str) -> list[Doc]:
        """The rows of rollouts that no sweep ran, as samples of one group that all earned 1."""
        names = {"group_id": rollouts[0], "task": "t", "harness": "h", "model": "m", "reward": 1.0}
        lines = [{**names, "rollout_id": rollout, "sample": at} for at, rollout in enumerate(rollouts)]
        run = self.folder / f"{rollouts[0]}.jsonl"
        run.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return self.export(rollouts[0])


def read_lines(path: Path) -> list[Doc]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_task(folder: Path, name: str, instruction: str, expected: Doc, **files: str) -> None:
    task = folder / "tasks" / name
    (task / "files").mkdir(parents=True)
    (task / "instruction.md").write_text(instruction)
    (task / "expected.json").write_text(json.dumps(expected))
    (task / "solution.sh").write_text("false")
    for stem, text in files.items():
        (task / "files" / f"{stem}.py").write_text(text)


def save(model: Qwen3ForCausalLM, file: Path) -> Path:
    torch.save(model.state_dict(), file)
    return file


@contextlib.contextmanager
def policy(folder: Path, model: Qwen3ForCausalLM, *options: str) -> Iterator[Policy]:
    """An engine with the weights of `model`, as version 0, and a gateway with `options` before it."""
    weights = save(model, folder / "0.pt")
    script = Path(__file__).with_name("torch_engine.py")
    with subprocess.Popen(
        [sys.executable, str(script), str(weights)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin and process.stdout
        try:
            url = process.stdout.readline().strip()
            assert url, "the engine did not start"
            with recorder(Engine(url), folder, *options) as gateway:
                yield Policy(url, gateway, folder)
        finally:
            process.stdin.close()


def differences(models: Models, row: Doc, shift: int = 0, raw: bool = False) -> torch.Tensor:
    """|log π_again - log π_recorded| at every trained token, by the weights and temperature that the row names.

    `shift` scores the tokens that many places further on; `raw` scores before temperature. Both are mistakes.
    """
    where = {at: version for start, end, version in row["versions"] for at in range(start, end)}
    heat = {at: temperature for start, end, temperature in row["temperatures"] for at in range(start, end)}
    trained = [at for at, mask in enumerate(row["loss_mask"]) if mask]
    found = torch.full([len(trained)], torch.inf)
    for version, model in models.items():
        mine = [n for n, at in enumerate(trained) if where[at] == version and at + shift < len(row["input_ids"])]
        if mine:
            places = [trained[n] + shift for n in mine]
            temperatures = [1.0 if raw else heat[trained[n]] for n in mine]
            recorded = torch.tensor([row["logprobs"][trained[n]] for n in mine])
            with torch.inference_mode():
                found[mine] = (scores(model, row["input_ids"], places, temperatures) - recorded).abs()
    return found if not shift else found[found.isfinite()]
