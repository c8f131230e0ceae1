"""Takes a picture of the page of a running server: `python -m tests.dashboards.picture URL FILE.png [--dark]`.

With a question after the options it is asked first, and the reply is shown with its provenance.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from tests.dashboards import chromium

WIDTH, HEIGHT = 1440, 900


async def take(url: str, file: Path, view: str, dark: bool, question: str, seconds: float) -> None:
    program = chromium.find()
    if program is None:
        raise SystemExit("No Chromium is installed; install it and try again.")
    async with chromium.browser(program) as tab:
        page = await tab()
        await page.size(WIDTH, HEIGHT, 2)
        await page.prefer("dark" if dark else "light")
        await page.goto(f"{url.rstrip('/')}/#view={'chat' if question else view}")
        await page.until("document.documentElement.dataset.condition === 'live'", within=60)
        if question:
            await page.click("#chat-input")
            await page.type(question)
            await page.key("Enter")
            await page.until("document.querySelector('.reply .actions:not([hidden])')", within=120)
            await page.run("document.activeElement.blur()")
            await page.key("v")
            await page.run("document.querySelector('.tok[data-draft], .tok').focus({preventScroll: true})")
        await asyncio.sleep(seconds)
        await page.run("scrollTo(0, 0)")
        await page.screenshot(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("file", type=Path)
    parser.add_argument("--view", default="overview")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--seconds", type=float, default=1.0, help="wait before the picture, for charts to fill")
    parser.add_argument("--question", default="")
    given = parser.parse_args()
    asyncio.run(take(given.url, given.file, given.view, given.dark, given.question, given.seconds))


if __name__ == "__main__":
    main()
