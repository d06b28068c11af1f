"""What an engine is sent for a request: messages where its template takes them, tools it can express, pinned sampling.

Invariant: what the engine cannot express is refused by name, unless an option says to leave it out; then the
call says so (`tool_omitted`). For training the distribution is the policy's own: neutral values are sent
explicitly, for a server left alone applies the model's defaults, and whatever masks the distribution is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gateway.call import Refused, Request, Tool
from gateway.conversion import Conversion
from gateway.engine import CAPTURES, Capabilities

Doc = dict[str, Any]

NEUTRAL: Doc = {"top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
EXTENDED: tuple[Doc, ...] = tuple({"top_k": off, "min_p": 0.0, "repetition_penalty": 1.0} for off in (0, -1))
"""Beyond OpenAI's, with all the spellings of a top_k that is off: SGLang refuses 0."""
TAGS = ("<system>\n", "\n</system>")
"""Around a system message that a template does not take where it stands."""


@dataclass(frozen=True)
class Policy:
    """How calls are sampled, for a whole run."""

    temperature: float = 1.0
    template: Mapping[str, Any] = field(default_factory=dict)
    """`chat_template_kwargs`: the same for every call."""
    omitted_tools: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prompt:
    """What the engine gets, and what is recorded beside it."""

    messages: list[Doc]
    tools: list[Doc]
    requested: Doc
    applied: Doc
    members: Doc
    """The rest of the body: model, capture, template, tool choice."""
    findings: list[Any]

    def body(self) -> Doc:
        tools = {"tools": self.tools} if self.tools else {}
        return {**self.members, "messages": self.messages, **tools, **self.applied}

    def limited(self, most: int | None) -> Prompt:
        """With at most `most` output tokens; None leaves the limit to the engine's context."""
        if most == self.applied.get("max_completion_tokens"):
            return self
        kept = {name: value for name, value in self.applied.items() if name != "max_completion_tokens"}
        return replace(self, applied=kept if most is None else {**kept, "max_completion_tokens": most})


def prompt(
    request: Request, found: Conversion, purpose: str, policy: Policy, model: str, capabilities: Capabilities
) -> Prompt:
    findings: list[Any] = []
    tools = [function(tool) for tool in usable(request.offered, policy, findings)]
    forced = constraint(found, purpose, findings)
    if tools and request.offered and not request.tools:
        forced = {**forced, "tool_choice": "none"}
    members: Doc = {"model": model, "n": 1, "stream": False, **CAPTURES[capabilities.level], **forced}
    if policy.template:
        members["chat_template_kwargs"] = dict(policy.template)
    if request.model != model:
        found.note("model", "/model", "one model is served here", request.model, model)
    requested: Doc = {**found.sampling, "max_tokens": found.limit}
    if found.ignored:
        requested["other"] = found.ignored
    applied = sampling(found, purpose, policy, capabilities, findings)
    if found.limit is not None:
        applied["max_completion_tokens"] = found.limit
    return Prompt(placed(found, capabilities), tools, requested, applied, members, findings)


def usable(offered: tuple[Tool, ...], policy: Policy, findings: list[Any]) -> list[Tool]:
    """The offered tools that an engine can be told of; 400 for another, unless it is to be left out."""
    kept: dict[str, Tool] = {}
    omitted = []
    for tool in offered:
        if tool.function_name in policy.omitted_tools or tool.kind in policy.omitted_tools:
            omitted.append(tool.function_name)
        elif tool.kind not in ("function", "custom"):
            message = f"the tool {tool.name!r} of type {tool.kind!r} cannot be passed to the engine: switch it off"
            raise Refused(400, f"{message} in the harness, or start the gateway with --omit-tool", "unsupported_tool")
        elif tool.function_name in kept:
            raise Refused(400, f"two tools are called {tool.function_name!r}", "unsupported_tool")
        else:
            kept[tool.function_name] = tool
    if omitted:
        findings.append({"level": "warn", "code": "tool_omitted", "detail": ", ".join(omitted)})
    return list(kept.values())


def function(tool: Tool) -> Doc:
    described = {"description": tool.description} if tool.description else {}
    declared = {"name": tool.function_name, **described, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": declared}


def constraint(found: Conversion, purpose: str, findings: list[Any]) -> Doc:
    if not found.constraint:
        return {}
    names = ", ".join(found.constraint)
    if purpose == "train":
        message = f"{names!r} masks the distribution of the policy: refused where the purpose is training"
        raise Refused(400, message, "constrained_sampling")
    findings.append({"level": "fatal", "code": "constrained_sampling", "detail": names})
    return found.constraint


def sampling(found: Conversion, purpose: str, policy: Policy, capabilities: Capabilities, findings: list[Any]) -> Doc:
    stop = {"stop": found.sampling["stop"]} if found.sampling.get("stop") else {}
    if purpose != "train":
        asked = {name: v for name, v in found.sampling.items() if capabilities.neutral or name not in EXTENDED[0]}
        return asked | stop
    pinned = {"temperature": policy.temperature, **NEUTRAL, **capabilities.neutral}
    changed = [name for name, value in found.sampling.items() if name != "stop" and pinned.get(name) != value]
    if changed:
        detail = f"asked for otherwise, and pinned: {', '.join(changed)}"
        findings.append({"level": "info", "code": "sampling_policy_changed", "detail": detail})
    return pinned | stop


def placed(found: Conversion, capabilities: Capabilities) -> list[Doc]:
    """Every system message where the harness put it, in a form that the template takes there."""
    if capabilities.system_anywhere:
        return found.messages
    kept = []
    for index, message in enumerate(found.messages):
        if index and message["role"] == "system":
            tagged = {"role": "user", "content": message["content"].join(TAGS)}
            found.note("system_as_user", f"/messages/{index}", "the template takes no system here", message, tagged)
            message = tagged
        kept.append(message)
    return kept
