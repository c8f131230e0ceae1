"""Takes a picture of the terminal on a running server: `python -m tests.tui.picture URL OUT.svg QUESTION [KEY...]`."""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
from pathlib import Path

from tui.link import Link
from tui.program import MetraleApp
from tui.sessions import Store

COLUMNS, ROWS = 124, 38
LONGEST_S = 60.0
WEB_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
"""The picture asks no other host for its font."""


async def main(url: str, out: str, question: str, keys: list[str]) -> None:
    app = MetraleApp(Link(url), mode="chat", store=Store(Path(tempfile.mkdtemp())))
    async with app.run_test(size=(COLUMNS, ROWS)) as pilot:
        await pilot.pause(2.0)
        await pilot.press(*("space" if letter == " " else letter for letter in question), "enter")
        await pilot.pause(1.0)
        waited = 0.0
        while waited < LONGEST_S and (reply := app.state.conversation.last_reply) and reply.status != "done":
            await pilot.pause(0.5)
            waited += 0.5
        for key in keys:
            await pilot.press(key)
            await pilot.pause(0.3)
        await pilot.pause(2.0)
        Path(out).write_text(re.sub(WEB_FONTS, "", app.export_screenshot()), encoding="utf-8")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:]))
