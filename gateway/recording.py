"""The gateway that records: every call of a rollout to an engine, as the engine saw it.

A call passes, in this order: identity (401, 403, 409), the body's size (413), its JSON and shape (400), what the engine
can express (400); then it is an exchange (calls.py), which is delivered (delivery.py).
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from gateway.attempts import Attempt, Attempts
from gateway.calls import Calls, Dialect
from gateway.conversion import Conversion
from gateway.delivery import Delivery
from gateway.dialects.wire import digest_of, read_json
from gateway.engine import Engine
from gateway.labels import labels, retry_count
from gateway.prompt import prompt
from gateway.server import headers_of, json_response, keys_of, models, read_body


class RecordingGateway:
    def __init__(self, engine: Engine, attempts: Attempts, calls: Calls) -> None:
        self.engine = engine
        self.attempts = attempts
        self.calls = calls

    async def complete(self, http: Request, dialect: Dialect) -> Response:
        headers = headers_of(http)
        attempt = await self.attempts.admit(http.path_params["rollout_id"], keys_of(headers))
        data = await read_body(http)
        body = read_json(data)
        request = dialect.parse(body)
        digest = digest_of(data, body)
        attempt.check()  # it may have been closed while the body came
        exchange = attempt.resend_of(dialect.NAME, digest, retry_count(headers))
        if exchange is None and (stored := attempt.stored.pop((dialect.NAME, digest), None)) is not None:
            exchange = self.calls.resume(attempt, dialect, request, stored)
        if exchange is not None:
            self.calls.join(exchange)
        else:
            path = http.scope["path"].removeprefix(f"/rollouts/{attempt.path_id}")
            told = labels(headers, body)
            exchange = self.calls.begin(attempt, dialect, request, body, digest, told, path)
        return Delivery(self.calls, exchange, dialect, request.stream)

    async def count_tokens(self, http: Request, dialect: Dialect) -> Response:
        """Not a call, and in no budget."""
        attempt = await self.admit(http)
        body = read_json(await read_body(http))
        request, conversion = dialect.parse(body), Conversion(attempt.originals)
        dialect.convert(body, conversion)
        policy, capabilities = self.calls.policy, self.engine.capabilities
        asked = prompt(request, conversion, attempt.purpose, policy, self.engine.model, capabilities)
        return json_response({"input_tokens": await self.engine.count(asked.messages, asked.tools)})

    async def list_models(self, http: Request, dialect: Dialect) -> Response:
        await self.admit(http)
        return models([self.engine.model])

    async def admit(self, http: Request) -> Attempt:
        return await self.attempts.admit(http.path_params["rollout_id"], keys_of(headers_of(http)))
