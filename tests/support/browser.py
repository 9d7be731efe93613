"""Chromium without a window, driven by its DevTools protocol: a page as a reader has it."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

DEADLINE_S = 60.0
_PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome")
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *("--no-first-run", "--disable-extensions", "--disable-background-networking", "--disable-sync"),
    *("--no-proxy-server", "--mute-audio", "--remote-debugging-port=0", "--force-color-profile=srgb"),
)


def find_chromium() -> str:
    """The program; skips the test where there is none."""
    found = next((path for name in _PROGRAMS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no chromium here: apt-get install chromium")
    return found


class Page:
    """One tab. problems: exceptions, errors of the console and refusals by the content security policy."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._last_id = 0
        self._answers: dict[int, asyncio.Future[dict]] = {}  # type: ignore[type-arg]
        self.problems: list[str] = []
        self._reader = asyncio.create_task(self._read())

    async def call(self, method: str, **params: object) -> dict:  # type: ignore[type-arg]
        self._last_id += 1
        answer = self._answers[self._last_id] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._last_id, "method": method, "params": params})
        async with asyncio.timeout(DEADLINE_S):
            return await answer

    async def go(self, url: str) -> None:
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    async def evaluate(self, expression: str) -> object:
        """The value, as JSON has it. Raises AssertionError for an exception of the page."""
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, condition: str, timeout_s: float = DEADLINE_S) -> None:
        """Waits until the expression is true."""
        deadline = time.monotonic() + timeout_s
        while not await self.evaluate(condition):
            if time.monotonic() > deadline:
                shown = await self.evaluate("document.body.innerText")
                pytest.fail(f"never true: {condition}\nproblems: {self.problems}\npage:\n{shown}")
            await asyncio.sleep(0.05)

    async def text(self, selector: str) -> str:
        return str(await self.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    async def click(self, selector: str) -> None:
        await self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    async def write(self, text: str) -> None:
        """Types where the focus is."""
        await self.call("Input.insertText", text=text)

    async def press(self, key: str, code: str = "", *, alt: bool = False, text: str = "") -> None:
        keys = {"key": key, "code": code or key, "modifiers": 1 if alt else 0}
        virtual = {"Enter": 13, "Escape": 27, "Tab": 9}.get(key, ord(key[0].upper()))
        keys |= {"windowsVirtualKeyCode": virtual, "nativeVirtualKeyCode": virtual}
        await self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **keys)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **keys)

    async def size(self, width: int, height: int, *, dark: bool = False) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def screenshot(self, path: Path) -> None:
        answer = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(answer["data"]))

    async def _read(self) -> None:
        async for message in self._socket:
            event = json.loads(message.data)
            answer = self._answers.pop(event.get("id", 0), None)
            if answer is not None and not answer.done():
                answer.set_result(event.get("result", {"exceptionDetails": event.get("error")}))
            params = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                self.problems.append(str(params["exceptionDetails"]))
            if event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
                self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")


@asynccontextmanager
async def browser_page() -> AsyncIterator[Page]:
    """A tab of a browser of its own, with a profile of its own."""
    program = find_chromium()
    with tempfile.TemporaryDirectory(prefix="browser", ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            *(program, *_FLAGS, f"--user-data-dir={profile}", "about:blank"),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            async with aiohttp.ClientSession() as session:
                url = await _page_url(session, Path(profile) / "DevToolsActivePort", process)
                async with session.ws_connect(url, max_msg_size=64 << 20) as socket:
                    page = Page(socket)
                    for domain in ("Page", "Runtime", "Log"):
                        await page.call(f"{domain}.enable")
                    yield page
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def _page_url(session: aiohttp.ClientSession, port_file: Path, process: asyncio.subprocess.Process) -> str:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if process.returncode is not None:
            pytest.skip(f"chromium ends at once here, with {process.returncode}")
        lines = port_file.read_text().split("\n") if port_file.exists() else []
        if len(lines) > 1:
            async with session.get(f"http://127.0.0.1:{lines[0]}/json/list") as answer:
                targets = await answer.json()
            pages = [target["webSocketDebuggerUrl"] for target in targets if target["type"] == "page"]
            if pages:
                return str(pages[0])
        await asyncio.sleep(0.05)
    pytest.skip("chromium does not start here")
