"""The engine's weights: which version answers, and holding calls back while they change.

A trainer pauses (no new call reaches the engine; `wait` says when those under way are done), updates the weights, and
resumes with the new version's name. An engine that tells its version itself is believed instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gateway.engine import Engine


class Weights:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.named: str | None = None
        """What the trainer called the present version."""
        self.in_flight = 0
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def paused(self) -> bool:
        return not self._open.is_set()

    async def version(self) -> str | None:
        if self.engine.capabilities.reports_version is not None:
            return await self.engine.version()
        return self.named

    @asynccontextmanager
    async def generating(self) -> AsyncIterator[None]:
        """Waits while paused, then counts as under way."""
        await self._open.wait()
        self.in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.in_flight -= 1
            if self.in_flight == 0:
                self._idle.set()

    async def pause(self, wait: bool) -> None:
        self._open.clear()
        if wait:
            await self._idle.wait()

    def resume(self, version: str | None) -> None:
        if version is not None:
            self.named = version
        self._open.set()
