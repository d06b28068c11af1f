"""The formats of `export`: a name, what `--help` says of it, and the module in `export/` of that name.

Apart from those modules, so that a parser can be made without loading them.
"""

from __future__ import annotations

from collections.abc import Mapping

FORMATS: Mapping[str, str] = {
    "sequence": "the neutral row, sequence/1: nothing left out, nulls kept",
    "trl": "TRL rollout_func: a dict of lists per group; one sequence per rollout",
    "trl-async": "TRL AsyncGRPO: TurnRecords, a list per chain",
    "verl": "verl AgentLoopOutput",
    "skyrl": "SkyRL GeneratorOutput: a dict of lists per group",
    "openrlhf": "OpenRLHF agent executor responses",
    "art": "ART Trajectory: messages and choices; its prompts are rendered again, so inexact",
    "prime-rl": "prime-rl TrainingSample, members by name",
    "slime": "slime Sample dicts",
    "tinker": "Tinker Datum: model input and shifted targets",
}


def module_of(name: str) -> str:
    return f"gateway.export.{name.replace('-', '_')}"
