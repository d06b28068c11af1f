"""Waiting with a deadline, without ever losing a cancellation.

Before Python 3.12 `asyncio.wait_for` forgets a cancellation that arrives together with the result: whoever cancelled
the task then waits for all it goes on to do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from typing import Any, TypeVar

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


async def in_thread(function: Callable[..., T], *arguments: Any, pool: Executor | None = None) -> T:
    """What a blocking function returns. A cancellation waits until its thread is done with the files it works on."""
    work = asyncio.get_running_loop().run_in_executor(pool, function, *arguments)
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait({work})
        raise
