"""The control listener: another port and another key than rollouts have, out of a sandbox's reach.

POST /attempts                          {"rollout_id", "attempt_id"?, "purpose"?, "budgets"?, "expires_s"?, "info"?}
POST /attempts/{rollout_id}/{n}/release {"reason"?}
POST /attempts/{rollout_id}/{n}/freeze  → {"snapshot"}
POST /attempts/{rollout_id}/{n}/drop    {"snapshot"}
POST /attempts/{rollout_id}/{n}/rewards {"rewards": {call_id: number or null}}
GET  /attempts/{rollout_id}/{n}         the trace: state, counts, the calls
POST /pause {"wait"?}    POST /resume {"version"?}    GET /status
"""

from __future__ import annotations

import hmac
import math
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.attempts import KEY_SECONDS, Attempt, Attempts, Budgets
from gateway.call import Refused
from gateway.calls import Calls
from gateway.dialects.wire import member, openai_error, read_json, refusal_headers
from gateway.record import attempt_of
from gateway.server import headers_of, json_response, keys_of, read_body
from gateway.store import StaleSnapshot, StoreError

Doc = dict[str, Any]


class Control:
    def __init__(self, calls: Calls, attempts: Attempts, admin_key: str, url: str) -> None:
        self.calls = calls
        self.attempts = attempts
        self.admin_key = admin_key.encode()
        self.url = url
        """Of a rollout, with {rollout_id} in it."""

    def application(self) -> Starlette:
        one = "/attempts/{rollout_id}/{attempt_id:int}"
        app = Starlette(
            routes=[
                self.route("/attempts", "POST", self.open),
                self.route(one, "GET", self.trace),
                self.route(f"{one}/release", "POST", self.release),
                self.route(f"{one}/freeze", "POST", self.freeze),
                self.route(f"{one}/drop", "POST", self.drop),
                self.route(f"{one}/rewards", "POST", self.reward),
                self.route("/pause", "POST", self.pause),
                self.route("/resume", "POST", self.resume),
                self.route("/status", "GET", self.status),
            ]
        )
        app.router.redirect_slashes = False
        return app

    def route(self, path: str, method: str, handler: Callable[[Request, Doc], Awaitable[Doc]]) -> Route:
        async def endpoint(http: Request) -> Response:
            try:
                if not any(hmac.compare_digest(key.encode(), self.admin_key) for key in keys_of(headers_of(http))):
                    raise Refused(401, "the control listener takes the admin key, as Bearer", "invalid_api_key")
                data = await read_body(http)
                return json_response(await handler(http, read_json(data) if data else {}))
            except Refused as refused:
                return refusal(refused)

        return Route(path, endpoint, methods=[method])

    async def open(self, http: Request, body: Doc) -> Doc:
        rollout_id = member(body, "rollout_id", str)
        attempt_id = member(body, "attempt_id", int, 1)
        if (
            not rollout_id.isprintable()
            or "/" in rollout_id
            or attempt_of(rollout_id)[0] != rollout_id
            or attempt_id < 1
        ):
            raise Refused(400, "'rollout_id' is printable, without / and ~N; 'attempt_id' counts from 1", "bad_id")
        purpose = member(body, "purpose", str, self.attempts.purpose)
        self.check_purpose(purpose)
        try:
            budgets = Budgets.of(member(body, "budgets", dict, {}), self.attempts.budgets)
        except ValueError as error:
            raise Refused(400, f"'budgets': {error}", "bad_budget") from None
        expires_s = float(member(body, "expires_s", (int, float), KEY_SECONDS))
        info = member(body, "info", dict, {})
        attempt, key = await self.attempts.open(rollout_id, attempt_id, purpose, budgets, expires_s, info)
        url = self.url.replace("{rollout_id}", attempt.path_id)
        return {**described(attempt), "base_url": url, "api_key": key}

    def check_purpose(self, purpose: str) -> None:
        """What an engine cannot be trained with is refused here, before any sandbox starts."""
        if purpose not in ("train", "eval"):
            raise Refused(400, "'purpose' is train or eval", "bad_purpose")
        level = self.calls.engine.capabilities.level
        if purpose == "train" and level != "tokens":
            message = f"training needs an engine at level tokens; this one is at level {level}: see GET /status"
            raise Refused(400, message, "level_too_low")

    async def find(self, http: Request) -> Attempt:
        return await self.attempts.find(http.path_params["rollout_id"], http.path_params["attempt_id"])

    async def release(self, http: Request, body: Doc) -> Doc:
        attempt = await self.find(http)
        self.calls.close(attempt, "released")
        await self.attempts.off_loop(attempt.log.release, member(body, "reason", str, "by control"))
        return described(attempt)

    async def freeze(self, http: Request, body: Doc) -> Doc:
        attempt = await self.find(http)
        self.calls.close(attempt, "frozen")
        await self.attempts.off_loop(attempt.log.release, "frozen")
        return {**described(attempt), "snapshot": await self.attempts.off_loop(attempt.log.freeze)}

    async def drop(self, http: Request, body: Doc) -> Doc:
        attempt, snapshot = await self.find(http), member(body, "snapshot", str)
        if attempt.closed is None:
            raise Refused(409, "the attempt is open: freeze it first", "attempt_open")
        await self.attempts.off_loop(attempt.log.close)  # one writer at a time
        identity = (attempt.rollout_id, attempt.attempt_id)
        del self.attempts.open_attempts[identity]
        try:
            await self.attempts.off_loop(self.dropped, *identity, snapshot)
        finally:
            attempt = await self.attempts.find(*identity)
        return described(attempt)

    def dropped(self, rollout_id: str, attempt_id: int, snapshot: str) -> None:
        try:
            self.attempts.store.drop(rollout_id, attempt_id, snapshot)
        except StaleSnapshot as error:
            raise Refused(409, str(error), "stale_snapshot") from None
        except StoreError as error:
            raise Refused(503, str(error), "store_failed") from None

    async def reward(self, http: Request, body: Doc) -> Doc:
        """Of single calls, also once the attempt is frozen: the snapshot is another one then."""
        attempt, rewards = await self.find(http), member(body, "rewards", dict)
        for call_id, value in rewards.items():
            if attempt.log.trace.calls.get(call_id) is None:
                raise Refused(404, f"there is no call {call_id!r} in this attempt", "call_not_found")
            if value is not None and (type(value) not in (int, float) or not math.isfinite(value)):
                raise Refused(400, f"the reward of {call_id!r} is no number, nor null", "bad_reward")
        await self.attempts.off_loop(attempt.log.reward, rewards)
        return described(attempt)

    async def trace(self, http: Request, body: Doc) -> Doc:
        attempt = await self.find(http)
        records = [record.as_json() for record in attempt.log.records()]
        return {**described(attempt), "rewards": attempt.log.trace.rewards, "records": records}

    async def pause(self, http: Request, body: Doc) -> Doc:
        await self.calls.weights.pause(member(body, "wait", bool, True))
        return self.weights()

    async def resume(self, http: Request, body: Doc) -> Doc:
        self.calls.weights.resume(member(body, "version", str, None))
        return self.weights()

    def weights(self) -> Doc:
        weights = self.calls.weights
        return {"paused": weights.paused, "in_flight": weights.in_flight, "version": weights.named}

    async def status(self, http: Request, body: Doc) -> Doc:
        capabilities = self.calls.engine.capabilities
        engine = {"url": self.calls.engine.url, "model": self.calls.engine.model, "level": capabilities.level}
        return {**self.weights(), "engine": {**engine, "found": list(capabilities.lines)}}


def described(attempt: Attempt) -> Doc:
    return {
        "rollout_id": attempt.rollout_id,
        "attempt_id": attempt.attempt_id,
        "purpose": attempt.purpose,
        "closed": attempt.closed,
        "clients": sum(exchange.connected for exchange in attempt.exchanges),
        "calls": attempt.calls,
        "sampled_tokens": attempt.sampled,
        "snapshot": attempt.log.trace.snapshot,
    }


def refusal(refused: Refused) -> Response:
    response = json_response(openai_error(refused), refused.status)
    response.headers.update(refusal_headers(refused))
    return response
