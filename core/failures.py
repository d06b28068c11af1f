"""Why a turn failed: from what the door and the sandbox saw to the codes of AGENTS_API 4.3. Pure.

`Failure.class_` decides what an evaluation may count: `model` and `budget` are the policy's own outcomes, `provider`,
`environment` and `infrastructure` measured nothing.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import Any

from core.budget import Spent
from core.egress import Call
from core.sandbox.disk import Breach


@dataclass(frozen=True)
class Failure:
    code: str
    message: str
    class_: str
    reason: str
    stage: str = "turn"
    params: dict[str, Any] = field(default_factory=dict)

    def error(self) -> dict[str, str]:
        return {"code": self.code, "message": self.message}

    def record(self, now: int) -> dict[str, Any]:
        head = {"class": self.class_, "reason": self.reason, "stage": self.stage}
        return {**head, "params": self.params, "failed_at": now}


CODES_BY_STATUS = {
    401: "authentication_error",
    402: "usage_limit_exceeded",
    403: "authentication_error",
    404: "resource_not_found",
    408: "request_timeout",
    429: "rate_limit_exceeded",
    503: "server_overloaded",
    529: "server_overloaded",
}
# Causes that a provider names itself, in `error.code` or `error.type`.
NAMED_BY_MODEL = (
    "context_length_exceeded",
    "max_output_tokens",
    "cyber_policy",
    "misalignment_policy_violation",
)
NAMED_BY_PROVIDER = (
    "usage_limit_exceeded",
    "project_spend_limit_exceeded",
    "organization_spend_limit_exceeded",
    "organization_usage_limit_exceeded",
    "billing_not_active",
    "credit_balance_exhausted",
    "flex_unavailable",
    "rate_limit_exceeded",
    "server_error",
)
QUOTA = {"insufficient_quota": "credit_balance_exhausted"}  # said with a 429, which is no rate limit then
OTHER_NAMES = {
    "overloaded_error": "server_overloaded",
    "server_is_overloaded": "server_overloaded",
    "rate_limit_error": "rate_limit_exceeded",
    "authentication_error": "authentication_error",
    "api_error": "server_error",
}
TOO_LONG = ("context length", "context window", "prompt is too long", "maximum context")


def call_failure(call: Call, attempts: int) -> Failure:
    """The failure that a failed call explains. `attempts` counts the harness's failed calls at the end of the turn."""
    times = f"to {attempts} attempts" if attempts > 1 else "to the request"
    said = f": {call.error_message}" if call.error_message else ""
    if call.problem == "timeout":
        return Failure(
            "request_timeout",
            "The model endpoint did not answer in time.",
            "provider",
            "provider_unreachable",
        )
    if call.problem == "unreachable":
        message = f"The model endpoint cannot be reached{said}. Check the base URL and that it is running."
        return Failure("connection_failed", message, "provider", "provider_unreachable")
    if call.problem == "cut":
        return Failure("connection_failed", "The model's answer broke off.", "provider", "provider_unreachable")
    if call.problem == "malformed":
        message = "The model endpoint's answer is none of a model. Check the base URL."
        return Failure("server_error", message, "provider", "provider_malformed_answer")
    code, class_ = status_code(call)
    if call.status == 200:
        return Failure(code, f"The model's answer ended with an error{said}", class_, "provider_error")
    message = f"The model endpoint answered {call.status} {times}{said}"
    return Failure(code, message, class_, "provider_http_status", params={"http_status": call.status})


def status_code(call: Call) -> tuple[str, str]:
    """(error code, class) of a call that was answered with an error."""
    named = QUOTA.get(call.error_code or "", call.error_code or "")
    if named in NAMED_BY_MODEL:
        return named, "model"
    if call.status in (400, 413, 422, 200) and any(text in (call.error_message or "").lower() for text in TOO_LONG):
        return "context_length_exceeded", "model"
    if named in NAMED_BY_PROVIDER:
        return named, "provider"
    if call.status in CODES_BY_STATUS:
        return CODES_BY_STATUS[call.status], "provider"
    if named in OTHER_NAMES:
        return OTHER_NAMES[named], "provider"
    if call.status is not None and 400 <= call.status < 500:
        return "invalid_request", "provider"
    return "server_error", "provider"


def turn_failure(calls: list[Call], said: str) -> Failure:
    """A turn that its harness gave up. The last call tells why; without a failed one it is the harness's trouble."""
    if calls and calls[-1].failed:
        failed = 0
        for call in reversed(calls):
            if not call.failed:
                break
            failed += 1
        return call_failure(calls[-1], failed)
    return Failure("internal_error", f"The harness gave up: {said[:500]}", "infrastructure", "harness_failed")


@dataclass(frozen=True)
class Death:
    """The end of a harness without its terminal event: bwrap's exit status (negative: a signal ended bwrap itself) and
    the last it printed on stderr. `host_starved`: the kernel killed something on this machine for want of memory
    meanwhile, or does not tell."""

    code: int
    stderr: str
    memory_exceeded: bool
    host_starved: bool


SENT_ONLY = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def exit_failure(calls: list[Call], death: Death) -> Failure:
    """A harness that ended without its terminal event.

    A signal that no fault raises was sent. Core sent none to a harness whose death it has to explain, and the kernel
    none if memory was not wanting. From outside only this machine's operator could; inside only what the model had the
    harness run, which takes an answered call.
    """
    code, params = death.code, {"exit_code": death.code}
    if death.memory_exceeded:
        message = "The sandbox exceeded its memory limit and the harness was killed."
        return Failure("sandbox_error", message, "model", "memory_exceeded")
    if code < 0:  # out of the agent's reach
        message = f"The sandbox was ended by signal {-code} from outside."
        return Failure("sandbox_error", message, "environment", "sandbox_lost", params=params)
    if code - 128 in SENT_ONLY and not death.host_starved and any(call.counted for call in calls):
        message = f"The harness was ended by signal {code - 128}, sent from inside its sandbox."
        return Failure("sandbox_error", message, "model", "harness_killed", params={"signal": code - 128})
    if calls and calls[-1].failed:
        return turn_failure(calls, "")
    ended = f"signal {code - 128}" if code > 128 else f"status {code}"
    last = death.stderr.strip().splitlines()[-1:] or [""]
    tail = f": {last[0][:300]}" if last[0] else ""
    message = f"The harness ended with {ended} and no terminal event{tail}"
    return Failure("server_error", message, "infrastructure", "harness_exited", params=params)


def limit_failure(breach: Breach) -> Failure:
    """A limit of the sandbox that was exceeded in a turn: the agent's doing."""
    return Failure("sandbox_error", breach.message, "model", breach.reason, params=breach.params)


def budget_failure(spent: Spent) -> Failure:
    return Failure("session_budget_exceeded", spent.message, "budget", spent.reason, params={"limit": spent.limit})


RESTARTED = Failure("server_error", "interrupted by restart", "infrastructure", "server_restarted")
SANDBOX_LOST = Failure(
    "sandbox_error", "The sandbox was lost: the launcher of sandboxes died.", "environment", "sandbox_lost"
)
EXPIRED = Failure("request_timeout", "The session's life is over.", "infrastructure", "session_expired")
FLOODED = Failure(
    "server_error", "The harness printed more events than a turn can hold.", "infrastructure", "harness_flooded"
)
KEY_LOST = Failure(
    "authentication_error",
    "The session's model key was lost when the server restarted; create a new session.",
    "infrastructure",
    "server_restarted",
)


def sandbox_failure(message: str, reason: str, **params: Any) -> Failure:
    return Failure("sandbox_error", message, "environment", reason, "preparation", params)


def capture_failure(message: str) -> Failure:
    return Failure(
        "sandbox_error",
        f"Outputs were not published: {message}.",
        "model",
        "artifact_capture_failed",
        "capture",
    )


def storage_failure(message: str, stage: str) -> Failure:
    """The host's disk is full, or fails."""
    what, reason = ("Outputs", "artifact_capture_failed") if stage == "capture" else ("The turn", "storage_failed")
    return Failure("server_error", f"{what} could not be stored: {message}.", "infrastructure", reason, stage)
