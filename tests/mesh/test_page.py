"""The page at / in a browser: chat, the live view under load, a killed worker that comes back; and what it shows whom.

PAGE_SCREENSHOTS=FOLDER keeps the pictures.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from support.browser import Page, browser_page
from support.http import http_address
from support.http_process import DEADLINE_S, http_process
from support.mesh import Mesh, running_mesh

KEY = "key-0123456789abcdef"
WIDE = (1360, 860)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = Path(os.environ.get("PAGE_SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


async def test_chat_answers_retries_and_shows_errors(pictures: Path) -> None:
    worker = {"num_slots": 8}
    async with running_mesh("cpu", worker=worker) as mesh, browser_page() as page:
        await page.size(*WIDE)
        await page.go(f"http://{http_address(mesh)}/")
        await page.until("document.querySelector('#model').value === 'tiny-llama'")
        await _set(page, "temperature", 0)
        await _set(page, "max_tokens", 24)
        await _ask(page, "Who are you?")
        await page.until("!document.querySelector('.growing') && document.querySelectorAll('.foot')[1].innerText")
        answer = await page.text(".message.assistant .body")
        assert answer and "tokens" in await page.text(".message.assistant .foot")
        await _ask(page, "Tell me more.")
        await page.until("!document.querySelector('.growing') && document.querySelectorAll('.foot')[3]?.innerText")
        first_time = await page.text(".message:last-child .body")
        await page.press("r", "KeyR", alt=True)
        await page.until("!document.querySelector('.growing') && document.querySelectorAll('.foot')[3]?.innerText")
        assert await page.text(".message:last-child .body") == first_time, "greedy, so the same again"
        await page.screenshot(pictures / "chat.png")
        await page.size(*WIDE, dark=True)
        await page.screenshot(pictures / "chat-dark.png")
        assert await page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(16, 20, 19)"
        await _fits_a_phone(page, pictures)
        # An error of the router is shown in its words.
        await _set(page, "temperature", -1)
        await page.press("r", "KeyR", alt=True)
        await page.until("document.querySelector('.message .error')?.innerText.includes('temperature')")
        await page.press("n", "KeyN", alt=True)
        assert await page.evaluate("document.querySelectorAll('.message').length") == 0
        await page.go(f"http://{http_address(mesh)}/docs")
        await page.until("document.querySelectorAll('.operation').length > 10")
        await page.click(".operation summary")
        await page.screenshot(pictures / "docs.png")
        problems = [text for text in page.problems if "400" not in text]
        assert problems == [] and mesh.bugs == []


async def _fits_a_phone(page: Page, pictures: Path) -> None:
    """The composer stays in sight and the newest words above it; nothing is wider than the window."""
    await page.size(420, 640, dark=True)
    for _ in range(2):
        await _ask(page, "A" * 400)
        await page.until(
            "document.querySelector('.growing') === null && !document.querySelector('#retry-button').disabled"
        )
    await page.screenshot(pictures / "chat-narrow.png")
    assert await page.evaluate("document.documentElement.scrollWidth") == 420
    bottom = "document.querySelector('{}').getBoundingClientRect().bottom"
    composer, foot = bottom.format("#composer"), bottom.format(".message:last-child .foot")
    assert await page.evaluate(f"{foot} <= {composer} && {composer} <= 640")
    await page.size(*WIDE, dark=True)


async def test_the_live_view_under_load_and_a_killed_worker(pictures: Path) -> None:
    worker = {"num_slots": 24, "num_pages": 6000, "simulated_base_us": 30_000}
    async with running_mesh("simulated", worker=worker) as mesh, browser_page() as page:
        await page.size(*WIDE)
        await page.go(f"http://{http_address(mesh)}/")
        await _stops_a_long_answer(page, mesh)
        async with _load(mesh):
            await _watch(page, mesh, pictures)
        assert page.problems == [] and mesh.bugs == []


async def _stops_a_long_answer(page: Page, mesh: Mesh) -> None:
    await page.until("document.querySelector('#model').value === 'tiny-llama'")
    await _set(page, "max_tokens", 1500)
    await _ask(page, "Go on and on.")
    await page.until("document.querySelectorAll('.message')[1]?.querySelector('.body').innerText.length > 20")
    assert (await mesh.scheduler_state()).load.num_running == 1
    await page.press("Escape")
    await page.until("[...document.querySelectorAll('.foot')].at(-1).innerText.includes('stopped')")
    await _wait_until_idle(mesh)


async def _watch(page: Page, mesh: Mesh, pictures: Path) -> None:
    await page.size(1360, 1120)
    await page.press("2", "Digit2", alt=True)
    await page.until("document.querySelectorAll('.tile').length === 6 && document.querySelectorAll('.run').length > 20")
    await page.until("document.querySelectorAll('.slots .busy').length > 10")
    await page.until(
        "document.querySelectorAll('.spark-line').length && document.querySelectorAll('tbody tr').length > 10"
    )
    await page.until("document.querySelectorAll('.spark-line')[0].getAttribute('points').split(' ').length > 8")
    assert await page.text("#status") == "serving"
    await page.screenshot(pictures / "mesh.png")
    await page.size(1360, 1120, dark=True)
    await page.screenshot(pictures / "mesh-dark.png")
    mesh.cluster.kill("worker")
    await page.until("document.querySelector('.daemon.bad h3')?.innerText === 'Worker group'")
    await page.screenshot(pictures / "mesh-worker-lost.png")
    await page.until(
        "[...document.querySelectorAll('.events .good')].some((e) => e.innerText.includes('again, after'))"
    )
    await page.until("!document.querySelector('.daemon.bad') && document.querySelectorAll('.slots .busy').length > 10")
    await page.until("document.querySelectorAll('.run').length > 20")
    await page.screenshot(pictures / "mesh-worker-back.png")
    await page.size(420, 860)
    await page.screenshot(pictures / "mesh-narrow.png")


async def test_without_a_key_the_view_shows_state_and_version_alone(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"{KEY}\ntenant-key-0123456789 alice\n")
    async with (
        http_process(tmp_path, "--api-keys-file", str(tmp_path / "keys")) as router,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{router.port}", trust_env=False, timeout=DEADLINE_S) as http,
    ):
        assert (await http.get("/mesh")).json().keys() == {"access", "status", "version"}
        assert (await http.get("/mesh", headers={"authorization": "Bearer unknown-0123456789"})).status_code == 401
        for key in (KEY, "tenant-key-0123456789"):
            whole = (await http.get("/mesh", headers={"authorization": f"Bearer {key}"})).json()
            assert (whole["access"], whole["schedulers"], whole["requests"]) == ("full", [], [])
        page = await http.get("/")
        assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
        again = await http.get("/", headers={"if-none-match": page.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        for path in ("/page/app.js", "/page/style.css", "/docs"):
            assert (await http.get(path)).status_code == 200
        for path in ("/page/nothing.js", "/page/..%2fapp.py", "/page/../app.py", "/page/"):
            assert (await http.get(path)).status_code == 404 or path == "/page/../app.py"


async def _ask(page: Page, text: str) -> None:
    await page.write(text)
    await page.press("Enter", text="\r")


async def _set(page: Page, name: str, value: float) -> None:
    await page.evaluate(f"document.querySelector('#{name}').value = {value}")


async def _wait_until_idle(mesh: Mesh) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while (await mesh.scheduler_state()).load.num_running:
            await asyncio.sleep(0.05)


@asynccontextmanager
async def _load(mesh: Mesh) -> AsyncIterator[None]:
    """Streams whose prompts share prefixes of several lengths, more than there are slots."""

    async def one(http: httpx.AsyncClient, i: int) -> None:
        system = [17 + i % 3] * 96 + [60 + i % 6] * 48
        turn = 0
        while True:
            turn += 1
            body = {"prompt": system + [100 + i, 7, turn % 50 + 4] * 8, "max_tokens": 60 + 7 * (i % 9), "seed": i}
            answer = await http.post("/v1/completions", json={**body, "ignore_eos": True})
            assert answer.status_code == 200, answer.text

    limits = httpx.Limits(max_connections=None)
    url = f"http://{http_address(mesh)}"
    async with httpx.AsyncClient(base_url=url, timeout=DEADLINE_S, limits=limits, trust_env=False) as http:
        tasks = [asyncio.create_task(one(http, i)) for i in range(36)]
        try:
            yield
            assert not any(task.done() for task in tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
