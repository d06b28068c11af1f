"""Waiting with a deadline, without ever losing a cancellation.

Before Python 3.12 `asyncio.wait_for` forgets a cancellation that arrives together with the result: whoever cancelled
the task then waits for all it goes on to do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def within(seconds: float, awaitable: Awaitable[T]) -> T:
    """The result of `awaitable`. Raises asyncio.TimeoutError after `seconds`, when it was cancelled and has ended."""
    task = asyncio.ensure_future(awaitable)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            raise asyncio.TimeoutError
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
