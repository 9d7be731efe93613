"""A small server of OpenAI's API with the quirks of others: no usage, errors in the stream, streams that break off."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web


class SmallOpenAI:
    """Answers every prompt with `num_events` events of text; keeps the bodies that it was sent.

    has_usage, has_ids: whether it tells token counts and output ids. failing: prompts' first ids or texts that get an
    error: {"x": 503} by status, {"x": "event"} within the stream, {"x": "cut"} by closing the connection.
    """

    def __init__(self) -> None:
        self.bodies: list[dict[str, object]] = []
        self.num_events = 4
        self.has_usage = True
        self.has_ids = False
        self.failing: dict[object, object] = {}
        self.base = ""

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "small"}, {"id": "other"}]})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        is_chat = "messages" in body
        prompt = body["messages"][-1]["content"] if is_chat else body["prompt"]
        fault = self.failing.get(prompt if isinstance(prompt, str) else prompt[0])
        if isinstance(fault, int):
            return web.json_response({"error": {"message": "come back later", "code": fault}}, status=fault)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for number in range(self.num_events):
            if fault and number == 2:
                if fault == "event":
                    await self._event(response, {"error": {"message": "it broke"}})
                    await response.write_eof()
                elif request.transport is not None:
                    request.transport.abort()
                return response
            text = f"w{number} "
            choice: dict[str, object] = {"index": 0, "finish_reason": None}
            choice |= {"delta": {"content": text}} if is_chat else {"text": text}
            if self.has_ids:
                choice["token_ids"] = [100 + number, 200 + number]
            await self._event(response, {"choices": [choice]})
        await self._event(response, {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
        if self.has_usage and body["stream_options"]["include_usage"]:
            usage = {"prompt_tokens": 10, "completion_tokens": 2 * self.num_events}
            await self._event(
                response, {"choices": [], "usage": usage | {"prompt_tokens_details": {"cached_tokens": 4}}}
            )
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _event(self, response: web.StreamResponse, content: object) -> None:
        await response.write(b"data: " + json.dumps(content).encode() + b"\n\n")


@asynccontextmanager
async def small_openai() -> AsyncIterator[SmallOpenAI]:
    """A running server on a free port."""
    server = SmallOpenAI()
    app = web.Application()
    app.router.add_get("/v1/models", server.models)
    app.router.add_post("/v1/completions", server.answer)
    app.router.add_post("/v1/chat/completions", server.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    server.base = f"http://{host}:{port}/v1"
    try:
        yield server
    finally:
        await runner.cleanup()
