"""The stock client in its two flavours behind one face, so that a test walks both without being written twice."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
from conftest import TERMINAL, Core, until

FLAVOURS = ("sync", "async")


class Stock:
    """An unpatched client with its own defaults, retries included, unless `options` say otherwise.

    `seen` is told of each answer before the client is; what it raises reaches the client as a broken connection.
    """

    def __init__(
        self, flavour: str, core: Core, seen: Callable[[httpx.Response], None] = lambda answer: None, **options: Any
    ) -> None:
        self.loop = asyncio.new_event_loop()
        self.client: Any

        async def seen_too(answer: httpx.Response) -> None:
            seen(answer)

        if flavour == "sync":
            http: Any = openai.DefaultHttpxClient(event_hooks={"response": [seen]})
            self.client = openai.OpenAI(base_url=core.url, api_key=core.key, http_client=http, **options)
        else:
            http = openai.DefaultAsyncHttpxClient(event_hooks={"response": [seen_too]})
            self.client = openai.AsyncOpenAI(base_url=core.url, api_key=core.key, http_client=http, **options)

    @property
    def agents(self) -> Any:
        return self.client.beta.agents

    @property
    def sessions(self) -> Any:
        return self.client.beta.agents.sessions

    def do(self, value: Any) -> Any:
        """The result of a call of either flavour."""
        return self.loop.run_until_complete(value) if inspect.isawaitable(value) else value

    def all(self, pages: Any) -> list[Any]:
        """All elements of a list or a stream, page after page."""
        return list(self.each(pages))

    def each(self, source: Any) -> Iterator[Any]:
        """Leaving off in the middle leaves the source open."""
        iterator = source.__aiter__() if hasattr(source, "__aiter__") else iter(source)
        with contextlib.suppress(StopAsyncIteration, StopIteration):
            while True:
                yield self.do(iterator.__anext__() if hasattr(iterator, "__anext__") else next(iterator))

    @contextlib.contextmanager
    def inside(self, manager: Any) -> Iterator[Any]:
        if hasattr(manager, "__aenter__"):
            entered = self.do(manager.__aenter__())
            try:
                yield entered
            finally:
                self.do(manager.__aexit__(None, None, None))
        else:
            with manager as entered:
                yield entered

    def turn(self, session_id: str, seconds: float = 60) -> Any:
        """The latest turn once it is over, by polling."""

        def over() -> Any:
            turns = self.all(self.sessions.turns.list(session_id))
            return turns[0] if turns and turns[0].status in TERMINAL else None

        return until(over, seconds)

    def close(self) -> None:
        self.do(self.client.close())
        self.loop.close()
