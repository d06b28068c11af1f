"""The read end of a sandbox's output, on any event loop.

Not `loop.connect_read_pipe`: uvloop leaves such a pipe open at its end, and closes the descriptor twice later on. The
second time it closes whatever file has got the number by then.
"""

from __future__ import annotations

import asyncio
import os


class PipeReader:
    """Reads nothing ahead, so that a full pipe holds the writer up, and once per turn of the loop, so that a flood
    holds up nobody else; closes itself at the end."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self.file = os.fdopen(descriptor, "rb", 0)

    async def read(self, size: int) -> bytes:
        """Up to `size` bytes; none at the end."""
        while not self.file.closed:
            await self.readable()
            data = self.file.read(size)
            if data is None:
                continue
            if not data:
                self.file.close()
            return data
        return b""

    async def readable(self) -> None:
        loop, descriptor = asyncio.get_running_loop(), self.file.fileno()
        ready = asyncio.Event()
        loop.add_reader(descriptor, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(descriptor)
