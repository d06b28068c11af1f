"""Whether an engine stops generating for a client that hung up. Only the engine knows, so only its metrics tell.

A long call is begun and left, once the engine counts it as running; then short calls are made until the count is what
it was before, for some engines count anew only when they compute. Not told: by engines without such metrics, and while
others use the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from typing import Any

from gateway.call import Refused
from gateway.engine import UNREACHABLE, Engine

Doc = dict[str, Any]

RUNNING = re.compile(r"^(?:vllm:num_requests_running|sglang:num_running_reqs)(?:\{.*\})? +(\S+)", re.MULTILINE)
"""Gauges at /metrics; SGLang has them with --enable-metrics."""
LONG_TOKENS = 4096
"""More than any engine makes in the seconds below."""
BEGIN_SECONDS = 3.0
STOP_SECONDS = 2.0
POLL_SECONDS = 0.02


async def running(engine: Engine) -> int | None:
    """How many calls the engine generates for, by its own account."""
    try:
        status, text = await engine.get_text(f"{engine.root}/metrics")
        found = [float(value) for value in RUNNING.findall(text)] if status == 200 else []
    except (*UNREACHABLE, ValueError):
        return None
    return round(sum(found)) if found else None


async def after_a_hang_up(engine: Engine, short: Doc) -> str:
    """What becomes of a generation whose client left, as the end of a sentence. `short` is a body that is answered."""
    before = await running(engine)
    if before is None:
        return "is not told by the engine, which has no metrics that say"
    if before:
        return "could not be told while others use the engine"
    long = {**short, "max_completion_tokens": LONG_TOKENS, "ignore_eos": True}
    call = asyncio.create_task(engine.post(f"{engine.url}/chat/completions", long))
    begun = await counted(engine, 1, BEGIN_SECONDS, call)
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError, Refused):
        await call
    if not begun:
        return "could not be told: the engine did not count a call while it worked"
    return "stops" if await counted(engine, 0, STOP_SECONDS, None, short) else "goes on for nobody"


async def counted(
    engine: Engine, number: int, seconds: float, call: asyncio.Task[Any] | None, short: Doc | None = None
) -> bool:
    """Whether the engine comes to count so many running calls, in time and before `call` ends."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and not (call and call.done()):
        if short is not None:
            with contextlib.suppress(Refused):
                await engine.post(f"{engine.url}/chat/completions", {**short, "max_completion_tokens": 1})
        if await running(engine) == number:
            return True
        await asyncio.sleep(POLL_SECONDS)
    return False
