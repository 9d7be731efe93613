"""The part of a program's run that all its states share: the client, its bounds, its tasks and its sum of usage."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import Any, cast

from radixmesh.client.async_client import AsyncClient
from radixmesh.client.errors import AbortedError, InvalidRequestError, OverloadedError, UnavailableError
from radixmesh.client.options import Message, Options
from radixmesh.client.results import Chunk, Completion, Encoded, Usage

# Requests of one run, or of one batch, that are open at a time.
MAX_REQUESTS = 256
# Of one run: forks of forks grow with a power of their depth.
MAX_STATES = 16_384
_MIN_WAIT_S = 0.05
_RETRY_S = 0.25


class Runtime:
    """One run of a program. options: what every generation of it has unless it says otherwise.

    slots: shared by the runs of a batch. path: of the run within its batch; it tells equal seeds of its states apart.
    """

    def __init__(
        self,
        client: AsyncClient,
        options: Options,
        *,
        slots: asyncio.Semaphore | None = None,
        path: tuple[int, ...] = (),
    ) -> None:
        self.client = client
        self.path = path
        self._options = options
        self._slots = slots or asyncio.Semaphore(MAX_REQUESTS)
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_states = 0
        self._usage = Usage(prompt_tokens=0, output_tokens=0, cached_tokens=0)

    @property
    def usage(self) -> Usage:
        """Tokens of all requests so far."""
        return self._usage

    @property
    def shared_options(self) -> Options:
        """Options of every generation of the run."""
        return self._options

    @property
    def model(self) -> str:
        return self._options.get("model", "")

    def count_states(self, count: int) -> None:
        """Raises InvalidRequestError for more than a run may have."""
        self._num_states += count
        if self._num_states > MAX_STATES:
            message = f"a program may have {MAX_STATES} states: fork less, or run it in several"
            raise InvalidRequestError(message, "TOO_LARGE", {"max": str(MAX_STATES)})

    def start(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def drain(self) -> None:
        """Waits until no state has anything left to do."""
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    async def cancel(self) -> None:
        """Ends what still runs; its requests are aborted."""
        for task in list(self._tasks):
            task.cancel()
        await self.drain()

    def options_of(self, own: Options, path: tuple[int, ...], number: int) -> Options:
        """Options of generation `number` of the state at path. A seed of the whole run is made one of its own for it:
        forks of one text would otherwise all sample the same."""
        merged = cast("Options", {**self._options, **own})
        if own.get("seed") is None and (seed := self._options.get("seed")) is not None:
            merged["seed"] = _derived_seed(seed, (*self.path, *path, number))
        return merged

    async def encode(
        self, inputs: Sequence[str | Sequence[Message]], *, add_special_tokens: bool | None = None
    ) -> list[Encoded]:
        """Ids of texts and chats. A lost router is waited for, as streams do."""
        until = asyncio.get_running_loop().time() + self.client.resume_timeout_s
        while True:
            try:
                return await self.client.encode(inputs, model=self.model, add_special_tokens=add_special_tokens)
            except (UnavailableError, OverloadedError) as error:
                after_s = (error.retry_after_s if isinstance(error, OverloadedError) else None) or _RETRY_S
                if asyncio.get_running_loop().time() + after_s > until:
                    raise
                await asyncio.sleep(after_s)

    async def stream(self, prompt: str | Sequence[int], options: Options) -> AsyncGenerator[Chunk, None]:
        """Chunks of one output. A full queue is waited for, as long as a client waits for a lost router."""
        until = asyncio.get_running_loop().time() + self.client.resume_timeout_s
        async with self._slots:
            while True:
                stream = self.client.generate(prompt, **cast("Any", options))
                is_begun = False
                try:
                    async for chunk in stream:
                        is_begun = True
                        self._add(chunk)
                        yield chunk
                    return
                except OverloadedError as error:
                    after_s = error.retry_after_s
                    if is_begun or after_s is None or asyncio.get_running_loop().time() + after_s > until:
                        raise
                    await asyncio.sleep(max(after_s, _MIN_WAIT_S))
                finally:
                    await stream.aclose()

    async def complete(self, prompt: Sequence[int], options: Options) -> Completion:
        """As stream, whole; for requests whose prompt is scored."""
        until = asyncio.get_running_loop().time() + self.client.resume_timeout_s
        async with self._slots:
            while True:
                try:
                    done = await self.client.complete(prompt, **cast("Any", options))
                except OverloadedError as error:
                    after_s = error.retry_after_s
                    if after_s is None or asyncio.get_running_loop().time() + after_s > until:
                        raise
                    await asyncio.sleep(max(after_s, _MIN_WAIT_S))
                    continue
                for output in done.outputs:
                    self._add(Chunk(index=0, finish=output.finish))
                return done

    def _add(self, chunk: Chunk) -> None:
        if chunk.finish is None:
            return
        if chunk.finish.reason == "abort":
            raise chunk.finish.error or AbortedError("a request of this program was aborted", "ABORTED")
        one, total = chunk.finish.usage, self._usage
        self._usage = Usage(
            prompt_tokens=total.prompt_tokens + one.prompt_tokens,
            output_tokens=total.output_tokens + one.output_tokens,
            cached_tokens=total.cached_tokens + one.cached_tokens,
        )


def _derived_seed(seed: int, path: tuple[int, ...]) -> int:
    digest = hashlib.blake2b(repr((seed, path)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
