"""A router's end of a scheduler's Serve stream, for loads that are counted and not read."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Mapping, Sequence

import grpc
import numpy as np
from numpy.typing import NDArray

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.arrays import IntArray, pack_ints, unpack_ints
from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.daemons.runtime.rpc.hello import make_hello
from radixmesh.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

_FRAME_OF = 64


class BulkStream:
    """A router's end of Serve that counts tokens and looks at nothing else. An async context manager.

    cache_salt: of all its requests; those of another salt find nothing of theirs in the cache. temperature: likewise;
    0 is greedy. keeps_outputs: for `outputs`; else tokens are counted alone. keeps_times: for `gaps_s`,
    `all_begun_at` and `steady_tok_s`.
    """

    def __init__(
        self,
        address: str,
        name: str,
        cache_salt: str = "",
        *,
        temperature: float = 0.0,
        keeps_outputs: bool = False,
        keeps_times: bool = False,
    ) -> None:
        self._channel = open_channel(address)
        self._stub = scheduler_pb2_grpc.SchedulerServiceStub(self._channel)
        self._call = self._stub.Serve()
        self._name = name
        self._num_sent = 0
        self._news = asyncio.Event()
        self._reading: asyncio.Task[None] | None = None
        self.error: BaseException | None = None
        self.first_token_at = self.last_token_at = 0.0
        """On the monotonic clock; 0 until there is one."""
        self._hash_of_grammar: dict[bytes, str] = {}
        self._cache_salt, self._temperature, self._keeps_outputs = cache_salt, temperature, keeps_outputs
        self.num_tokens = self.num_finished = self.prompt_tokens = self.cached_tokens = 0
        self._outputs: list[scheduler_pb2.TokenBatch] = []
        self._times: list[tuple[float, scheduler_pb2.TokenBatch]] | None = [] if keeps_times else None

    async def __aenter__(self) -> BulkStream:
        await self._call.write(scheduler_pb2.ServeRequest(hello=make_hello(daemon="router", instance_id=self._name)))
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._call.cancel()
        if self._reading is not None:
            self._reading.cancel()
        await self._channel.close()

    async def state(self) -> scheduler_pb2.GetStateResponse:
        return await self._stub.GetState(scheduler_pb2.GetStateRequest())

    async def submit(
        self,
        prompts: Sequence[IntArray],
        max_tokens: int | Sequence[int],
        num_top: Mapping[int, int] | None = None,
        grammar: bytes = b"",
    ) -> None:
        """Requests that go on to their length; `max_tokens` of each, or of all. num_top: the alternatives whose
        logprobs are asked for, by number of the prompt; others ask for no logprobs. Seeds are the numbers of requests
        in the stream. grammar: artefact that all of them follow, sent once a stream, as by a router; empty = none."""
        is_new = bool(grammar) and grammar not in self._hash_of_grammar
        if is_new:
            self._hash_of_grammar[grammar] = hashlib.sha256(grammar).hexdigest()
        grammar_hash = self._hash_of_grammar[grammar] if grammar else ""
        lengths = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
        index = 0
        for start in range(0, len(prompts), _FRAME_OF):
            frame = scheduler_pb2.ServeRequest()
            for prompt, length in zip(
                prompts[start : start + _FRAME_OF], lengths[start : start + _FRAME_OF], strict=True
            ):
                sampling = common_pb2.SamplingParams(temperature=self._temperature)
                if num_top and index in num_top:
                    sampling.num_top_logprobs = num_top[index]
                self._num_sent += 1
                sampling.seed = self._num_sent
                index += 1
                frame.submits.add(
                    handle=self._num_sent,
                    sequence=self._num_sent,
                    request_id=f"{self._name}-{self._num_sent}",
                    task=common_pb2.TASK_GENERATE,
                    prompt_ids=pack_ints(prompt),
                    cache_salt=self._cache_salt,
                    sampling=sampling,
                    stop=common_pb2.StopParams(max_tokens=length, ignore_eos=True),
                    grammar_hash=grammar_hash,
                )
            if is_new and not start:
                frame.submits[0].blobs.add(hash=grammar_hash, data=grammar)
            await self._call.write(frame)

    def outputs(self) -> dict[int, list[int]]:
        """Token ids by the number of the request in the stream, from 1 on."""
        found: dict[int, list[int]] = {}
        for batch in self._outputs:
            ids, starts = unpack_ints(batch.ids, "ids"), 0
            for handle, count in zip(
                unpack_ints(batch.handles, "handles"), unpack_ints(batch.counts, "counts"), strict=True
            ):
                found.setdefault(int(handle), []).extend(ids[starts : starts + count].tolist())
                starts += int(count)
        return found

    def gaps_s(self) -> NDArray[np.float64]:
        """Seconds between the tokens of a row, of all rows: ITL as it is seen here. Of several that came together the
        first has waited, the others have not."""
        last: dict[int, float] = {}
        gaps: list[float] = []
        for at, batch in self._times or ():
            for handle in unpack_ints(batch.handles, "handles").tolist():
                if handle in last:
                    gaps.append(at - last[handle])
                last[handle] = at
        return np.array(gaps)

    def all_begun_at(self) -> float:
        """When the last request to begin had its first token, on the monotonic clock."""
        begun: set[int] = set()
        last = 0.0
        for at, batch in self._times or ():
            handles = set(unpack_ints(batch.handles, "handles").tolist())
            last = last if handles <= begun else at
            begun |= handles
        return last

    def steady_tok_s(self, first: float = 0.3, last: float = 0.9) -> float:
        """Tokens a second between these shares of all tokens: neither prompts nor the last rows that are left."""
        times, counts = zip(*((at, len(batch.ids) // 4) for at, batch in self._times or ()), strict=True)
        done = np.cumsum(counts)
        begin, end = (int(np.searchsorted(done, share * done[-1])) for share in (first, last))
        return float(done[end] - done[begin]) / (times[end] - times[begin])

    async def until(self, num_tokens: int = 0, num_finished: int = 0, timeout_s: float = 300.0) -> None:
        async with asyncio.timeout(timeout_s):
            while self.num_tokens < num_tokens or self.num_finished < num_finished:
                if self.error is not None:
                    raise self.error
                self._news.clear()
                await self._news.wait()

    async def _read(self) -> None:
        try:
            while isinstance(frame := await self._call.read(), scheduler_pb2.ServeResponse):
                self.num_tokens += len(frame.tokens.ids) // 4
                if frame.tokens.ids:
                    if self._keeps_outputs:
                        self._outputs.append(frame.tokens)
                    if self._times is not None:
                        self._times.append((time.monotonic(), frame.tokens))
                    self.first_token_at = self.first_token_at or time.monotonic()
                    self.last_token_at = time.monotonic()
                for finished in frame.finished:
                    self.num_finished += 1
                    self.prompt_tokens += finished.usage.prompt_tokens
                    self.cached_tokens += finished.usage.cached_tokens
                for rejected in frame.rejected:
                    self.error = RuntimeError(str(rejected.error))
                self._news.set()
        except grpc.aio.AioRpcError as error:
            self.error = error
            self._news.set()
