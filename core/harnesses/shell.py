"""`shell`: runs the input message as a bash script. No model; for benches, graders and tests.

The script's exit code does not fail the turn: it is the item's `exit_code`.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator

from core.harnesses import (
    Effect,
    Ended,
    Harness,
    ItemDone,
    ItemStarted,
    Launch,
    OutputDelta,
    OutputReader,
    TurnRequest,
    command_item,
)
from core.sandbox import WORKSPACE, Command, Mount

SCRIPT = ".script.sh"


class Shell(Harness):
    name = "shell"
    protocols = ()
    package = "bash"

    def mounts(self) -> list[Mount] | None:
        return []

    def version(self) -> str | None:
        return "bash"

    def launch(self, turn: TurnRequest) -> Launch:
        script = turn.text.encode(errors="surrogatepass")
        command = Command(["/bin/bash", f"{turn.home}/{SCRIPT}"], turn.env, merge_stderr=True)
        return Launch(command, {SCRIPT: script})

    def reader(self) -> OutputReader:
        return ShellReader()


class ShellReader(OutputReader):
    lines = False

    def __init__(self) -> None:
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.started = False

    def start(self) -> Iterator[Effect]:
        if not self.started:
            self.started = True
            yield ItemStarted("script", command_item(f"bash ~/{SCRIPT}", "in_progress", cwd=WORKSPACE))

    def feed(self, data: bytes) -> Iterator[Effect]:
        yield from self.start()
        text = self.decoder.decode(data)
        if text:
            yield OutputDelta("script", text)

    def exited(self, code: int, seconds: float) -> Iterator[Effect]:
        yield from self.start()
        status = "completed" if code == 0 else "failed"
        item = command_item(f"bash ~/{SCRIPT}", status, exit_code=code, cwd=WORKSPACE)
        yield ItemDone("script", {**item, "duration_ms": round(seconds * 1000)})
        yield Ended()
