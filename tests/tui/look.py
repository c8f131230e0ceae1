"""Pictures of a running screen for people who change it: `python -m tests.tui.look OUT.svg COLUMNS ROWS KEY...`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tests.tui.staged import staged


async def main(out: str, columns: int, rows: int, keys: list[str]) -> None:
    mode, scene, *pressed = keys
    app = staged(scene, mode)
    async with app.run_test(size=(columns, rows)) as pilot:
        await pilot.pause(0.2)
        for key in pressed:
            await pilot.press(key)
            await pilot.pause(0.1)
        await pilot.pause(0.4)
        Path(out).write_text(app.export_screenshot(), encoding="utf-8")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]))
