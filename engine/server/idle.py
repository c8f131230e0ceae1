"""The link of a server without an engine: it shows recorded runs and answers SQL, nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from engine.levers.resolve import resolve
from engine.protocol.commands import ChangeLever, Command, Submit
from engine.protocol.events import Event, Facts, Finished, LeverChanged, Ready, Usage

SENTENCE = "This server shows recorded runs only; start an engine with `metrale serve`."
FACTS = Facts(
    run_id="", model="no engine", device="none", dtype="none", vocab_size=0, max_context=1, kv_tokens=0, block_size=1,
    max_batch_size=0, drafters=(),
)  # fmt: skip


class NoEngine:
    """Implements `EngineLink`; is ready at once and refuses all work."""

    def __init__(self) -> None:
        self._tell: Callable[[Event], None] = lambda event: None

    async def start(self, on_event: Callable[[Event], None], on_death: Callable[[str], None]) -> None:
        self._tell = on_event
        levers, sources = resolve()
        on_event(Ready(facts=FACTS, levers=levers, sources={name: str(source) for name, source in sources.items()}))

    def send(self, command: Command) -> None:
        answer: Event
        match command:
            case Submit():
                answer = Finished(request_id=command.request_id, reason="refused", usage=Usage(), error=SENTENCE)
            case ChangeLever():
                answer = LeverChanged(
                    change_id=command.change_id, name=command.name, old=command.value, new=command.value, tick=0,
                    origin=command.origin, error=SENTENCE,
                )  # fmt: skip
            case _:
                return
        asyncio.get_running_loop().call_soon(self._tell, answer)

    async def stop(self) -> None:
        pass
