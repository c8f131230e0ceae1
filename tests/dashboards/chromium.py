"""A real headless Chromium, driven over the DevTools protocol with nothing but `websockets`."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--hide-scrollbars",
    "--metrics-recording-only",
    "--no-default-browser-check",
    "--no-first-run",
    "--remote-debugging-port=0",
    "--js-flags=--expose-gc",
    "about:blank",
)
START_S = 30.0
ANSWER_S = 30.0
KEYS = {
    "Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, ""), "ArrowLeft": (37, ""), "ArrowUp": (38, ""),
    "ArrowRight": (39, ""), "ArrowDown": (40, ""), "Home": (36, ""), "End": (35, ""), " ": (32, " "),
}  # fmt: skip


def find() -> str | None:
    """The browser of this machine; `METRALE_TEST_CHROMIUM` names another."""
    return os.environ.get("METRALE_TEST_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class PageError(AssertionError):
    """The page threw, or did not become what a test waited for."""


class Page:
    """One tab. What it logged, threw, requested and was refused is kept in lists."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._ids = 0
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reader = asyncio.create_task(self._read())
        self.console: list[str] = []
        self.requested: list[str] = []
        self.sockets: list[str] = []
        self._excuses: list[str] = []

    def excuse(self, words: str) -> None:
        """A message of the browser that this test brings about on purpose."""
        self._excuses.append(words)

    def excused(self, line: str) -> bool:
        return any(words in line for words in self._excuses)

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._ids += 1
        answer = self._waiting[self._ids] = asyncio.get_running_loop().create_future()
        await self._connection.send(json.dumps({"id": self._ids, "method": method, "params": params}))
        return await asyncio.wait_for(answer, ANSWER_S)

    async def open(self) -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.call("Performance.enable", timeDomain="threadTicks")

    async def goto(self, url: str) -> None:
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    async def reload(self) -> None:
        """Return once the new document has taken the place of the old one and is complete."""
        await self.run("window.beforeReload = true")
        await self.call("Page.reload")
        await self.until("!window.beforeReload && document.readyState === 'complete'")

    async def run(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited if it is a promise. Raises `PageError` when it throws."""
        answer = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise PageError(f"{expression}: {details.get('exception', {}).get('description', details['text'])}")
        return answer["result"].get("value")

    async def until(self, expression: str, within: float = 10.0) -> Any:
        """Wait until the expression is truthy and return it."""
        deadline = time.monotonic() + within
        value = None
        while time.monotonic() < deadline:
            with contextlib.suppress(PageError):
                value = await self.run(expression)
                if value not in (None, False, 0, ""):  # an element comes as {}
                    return value
            await asyncio.sleep(0.03)
        with contextlib.suppress(PageError):
            value = await self.run(expression)
        raise PageError(f"After {within:g} s still {value!r}: {expression}")

    async def text(self, selector: str) -> str:
        return str(await self.run(f"document.querySelector({json.dumps(selector)})?.textContent ?? ''"))

    async def click(self, selector: str) -> None:
        """Click with the mouse, at the middle of the element, so that what covers it would be clicked instead."""
        place = await self.until(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); if (!e) return null;"
            " e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect();"
            " return r.width ? [r.x + r.width / 2, r.y + r.height / 2] : null; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            await self.call("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1)

    async def key(self, key: str, modifiers: int = 0) -> None:
        code, text = KEYS.get(key, (ord(key.upper()[0]), key))
        more: dict[str, Any] = {"text": text} if text and not modifiers & 6 else {}
        shared = {"key": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        await self.call("Input.dispatchKeyEvent", type="keyDown" if more else "rawKeyDown", **shared, **more)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **shared)

    async def type(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def size(self, width: int, height: int, scale: float = 1) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )

    async def prefer(self, scheme: str, motion: str = "no-preference") -> None:
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": motion},
        ]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def heap_bytes(self) -> int:
        """JavaScript heap in use after full collections: the least of three looks, since work goes on between them."""
        looks = []
        for _ in range(3):
            await asyncio.sleep(0.2)
            await self.call("HeapProfiler.collectGarbage")
            looks.append(int((await self.call("Runtime.getHeapUsage"))["usedSize"]))
        return min(looks)

    async def metrics(self) -> dict[str, float]:
        """Counters of the tab; durations are CPU seconds of its main thread, so that a busy machine does not count."""
        found = await self.call("Performance.getMetrics")
        return {entry["name"]: entry["value"] for entry in found["metrics"]}

    async def screenshot(self, path: Path, full: bool = False) -> None:
        answer = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=full)
        path.write_bytes(base64.b64decode(answer["data"]))

    async def close(self) -> None:
        """Close the tab; a second time does nothing."""
        if self._reader.done():
            return
        with contextlib.suppress(PageError, ConnectionClosed):
            await self.call("Page.close")
        self._reader.cancel()
        await self._connection.close()

    async def _read(self) -> None:
        with contextlib.suppress(ConnectionClosed):
            async for raw in self._connection:
                message = json.loads(raw)
                if "id" in message:
                    self._settle(message)
                else:
                    self._note(message["method"], message["params"])

    def _settle(self, message: dict[str, Any]) -> None:
        answer = self._waiting.pop(message["id"])
        if answer.done():
            return
        if "error" in message:
            answer.set_exception(PageError(message["error"]["message"]))
        else:
            answer.set_result(message["result"])

    def _note(self, method: str, params: dict[str, Any]) -> None:
        notes: dict[str, Callable[[], None]] = {
            "Runtime.consoleAPICalled": lambda: self.console.append(_console(params)),
            "Runtime.exceptionThrown": lambda: self.console.append(_thrown(params)),
            "Log.entryAdded": lambda: self.console.append(f"{params['entry']['level']}: {params['entry']['text']}"),
            "Network.requestWillBeSent": lambda: self.requested.append(params["request"]["url"]),
            "Network.webSocketCreated": lambda: self.sockets.append(params["url"]),
        }
        notes.get(method, lambda: None)()


def _console(params: dict[str, Any]) -> str:
    words = " ".join(str(part.get("value", part.get("description", ""))) for part in params["args"])
    return f"{params['type']}: {words}"


def _thrown(params: dict[str, Any]) -> str:
    details = params["exceptionDetails"]
    return f"exception: {details.get('exception', {}).get('description', details['text'])}"


@contextlib.asynccontextmanager
async def browser(program: str) -> AsyncIterator[Callable[[], Any]]:
    """Run the browser with a fresh profile; yields a function that opens a tab in a private context of its own."""
    profile = Path(tempfile.mkdtemp(prefix="metrale-chromium-"))
    quiet = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        program, f"--user-data-dir={profile}", *FLAGS, stdout=quiet, stderr=quiet
    )
    try:
        port, path = await _endpoint(profile, process)
        async with connect(f"ws://127.0.0.1:{port}{path}", max_size=None, proxy=None) as control:
            pages: list[Page] = []

            async def tab() -> Page:
                context = await _ask(control, "Target.createBrowserContext")
                target = await _ask(
                    control, "Target.createTarget", url="about:blank", browserContextId=context["browserContextId"]
                )
                address = f"ws://127.0.0.1:{port}/devtools/page/{target['targetId']}"
                page = Page(await connect(address, max_size=None, proxy=None))
                await page.open()
                pages.append(page)
                return page

            yield tab
            for page in pages:
                await page.close()
    finally:
        if process.returncode is None:
            process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), 5)
        if process.returncode is None:
            process.kill()
            await process.wait()
        shutil.rmtree(profile, ignore_errors=True)


_numbers = iter(range(1, 1_000_000))


async def _ask(control: ClientConnection, method: str, **params: Any) -> dict[str, Any]:
    number = next(_numbers)
    await control.send(json.dumps({"id": number, "method": method, "params": params}))
    async for raw in control:
        message = json.loads(raw)
        if message.get("id") == number:
            if "error" in message:
                raise PageError(message["error"]["message"])
            return dict(message["result"])
    raise PageError(f"The browser left before it answered {method}.")


async def _endpoint(profile: Path, process: asyncio.subprocess.Process) -> tuple[int, str]:
    """Port and path that the browser wrote down when it was ready."""
    file = profile / "DevToolsActivePort"
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.returncode is not None:
            raise PageError(f"The browser ended at once with code {process.returncode}.")
        if file.exists() and len(lines := file.read_text().splitlines()) >= 2:
            return int(lines[0]), lines[1]
        await asyncio.sleep(0.05)
    raise PageError(f"The browser was not ready within {START_S:g} s.")
