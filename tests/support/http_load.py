"""Plain HTTP clients, which resume nothing: streams of text through one address, each compared with its answer."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from types import TracebackType

import httpx

from support.http import events_of
from support.jobs import Job

# Of an answer that says "ask again"; a connection that breaks or cannot be made says the same.
_RETRYABLE = (429, 502, 503, 504)


class HttpLoad:
    """`num_streams` clients from enter to exit. failures: wrong answers and refusals. retryable: (client, error) after
    which a client asks again. patience_s: how long the last answers may take at the exit."""

    def __init__(self, address: str, jobs: Sequence[Job], *, num_streams: int = 4, patience_s: float = 60.0) -> None:
        self._jobs = [job for job in jobs if isinstance(job.prompt, str) and len(job.answers) == 1]
        assert self._jobs, "no job is a text with one output"
        self._url = f"http://{address}"
        self._num_streams = num_streams
        self._patience_s = patience_s
        self._tasks: list[asyncio.Task[None]] = []
        self._is_ending = False
        self.failures: list[str] = []
        self.retryable: list[tuple[int, str]] = []
        self.num_completed = 0

    async def __aenter__(self) -> HttpLoad:
        self._tasks = [asyncio.create_task(self._run(number)) for number in range(self._num_streams)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_ending = True
        _, late = await asyncio.wait(self._tasks, timeout=self._patience_s if error is None else 0)
        if late:
            self.failures.append(f"{len(late)} HTTP clients made no end")
        for task in late:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def progressed(self, num: int) -> None:
        """Waits until so many more answers are complete."""
        goal = self.num_completed + num
        while self.num_completed < goal:
            await asyncio.sleep(0.02)

    async def _run(self, number: int) -> None:
        turn = number
        async with httpx.AsyncClient(base_url=self._url, timeout=60.0) as client:
            while not self._is_ending:
                job = self._jobs[turn % len(self._jobs)]
                turn += 1
                try:
                    problem = await self._ask(client, job)
                except httpx.TransportError as error:
                    problem = repr(error)
                if problem:
                    self.retryable.append((number, f"{job.name}: {problem}"))
                    await asyncio.sleep(0.2)

    async def _ask(self, client: httpx.AsyncClient, job: Job) -> str:
        """The error after which to ask again; empty for an answer, or one that no asking again helps."""
        options = dict(job.options)
        body = {"model": "tiny-llama", "prompt": job.prompt, "stream": True, "max_tokens": 2000, **options}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code in _RETRYABLE:
                return f"status {response.status_code}"
            if response.status_code != 200:
                self.failures.append(f"{job.name}: {response.status_code} {(await response.aread())[:300]!r}")
                return ""
            events = await events_of(response)
        if any("error" in event for event in events):
            return f"{events[-1]}"
        text = "".join(event["choices"][0]["text"] for event in events if event.get("choices"))
        (answer,) = job.answers
        self.num_completed += 1
        if text != answer.text:
            pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(text, answer.text, strict=False))
            same = len(list(pairs))
            self.failures.append(
                f"{job.name}: from character {same} on {text[same:][:60]!r}, not {answer.text[same:][:60]!r}; "
                f"last event {events[-2:]}"
            )
        return ""
