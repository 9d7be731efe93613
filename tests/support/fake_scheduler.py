"""A scheduler that keeps the contract to the letter and makes up its tokens: a function of prompt, seed and position.

Faults are attributes that a test sets; what routers said is kept in lists that a test reads.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import grpc

from radixmesh.common.v1 import common_pb2
from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.arrays import pack_floats, pack_ints, unpack_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.hello import check_hello, make_hello
from radixmesh.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

_LOAD_EVERY_S = 0.2


@dataclass(slots=True, eq=False)
class Run:
    """One submitted output."""

    submit: scheduler_pb2.Submit
    ids: list[int]
    num_resumed: int
    is_prefilled: bool = False


@dataclass(slots=True, eq=False)
class Serving:
    """One router's stream."""

    runs: dict[int, Run] = field(default_factory=dict)
    sequence: int = 0
    pending: scheduler_pb2.ServeResponse = field(default_factory=scheduler_pb2.ServeResponse)
    news: asyncio.Event = field(default_factory=asyncio.Event)


class FakeScheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    """model: what it serves. step_s: time between steps. per_step: tokens of a row per step."""

    def __init__(self, model: common_pb2.ModelIdentity, *, step_s: float = 0.0, per_step: int = 1) -> None:
        self.model = model
        self.step_s = step_s
        self.per_step = per_step
        self.instance_id = f"fake-{id(self)}"
        self.adapters: tuple[str, ...] = ()
        self.num_pages = 1000  # Of one token, on each rank.
        self.num_ranks = 1
        self.group = scheduler_pb2.GROUP_STATE_SERVING
        self.reject: MeshError | None = None  # Every submit gets it.
        self.is_leaving = False  # Says so in its loads.
        self.is_silent = False  # Says nothing at all, but keeps the stream.
        self.ignores_aborts = False  # Goes on with attempts that it was told to end.
        self.is_paused = False  # Runs no steps; loads go out.
        self.mangle: Callable[[scheduler_pb2.ServeResponse], None] | None = None  # Sees every frame before it leaves.
        self.on_step: Callable[[int], None] | None = None  # Called before each step with tokens made so far.
        self.num_tokens = 0
        self.num_streams = 0
        self.submits: list[scheduler_pb2.Submit] = []
        self.stops: list[scheduler_pb2.FinishedByStop] = []
        self.aborts: list[scheduler_pb2.Abort] = []
        self.finished_keys: set[tuple[str, int]] = set()
        self._servings: set[Serving] = set()

    @property
    def num_running(self) -> int:
        return sum(len(serving.runs) for serving in self._servings)

    async def Serve(
        self, request_iterator: AsyncIterator[scheduler_pb2.ServeRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[scheduler_pb2.ServeResponse]:
        first = await anext(request_iterator)
        ours = make_hello(self.instance_id, "scheduler", self.model)
        check_hello(first.hello, ours)
        serving = Serving()
        self._servings.add(serving)
        self.num_streams += 1
        reader = asyncio.create_task(self._read(serving, request_iterator))
        try:
            while self.is_silent:
                await asyncio.sleep(0.05)
            hello = scheduler_pb2.SchedulerHello(
                hello=ours, adapters=self.adapters, page_size=1, num_pages=self.num_pages
            )
            yield scheduler_pb2.ServeResponse(hello=hello, load=self._load(serving))
            told = time.monotonic()
            while not reader.done():
                frame = self._step(serving)
                if time.monotonic() - told > _LOAD_EVERY_S:
                    told = time.monotonic()
                    frame.load.CopyFrom(self._load(serving))
                if self.mangle is not None:
                    self.mangle(frame)
                if frame.ByteSize() and not self.is_silent:
                    yield frame
                await self._rest(serving)
            await reader
        finally:
            reader.cancel()
            self._servings.discard(serving)

    async def _rest(self, serving: Serving) -> None:
        if serving.runs and not self.is_paused and not self.is_silent:
            await asyncio.sleep(self.step_s)
            return
        serving.news.clear()
        try:
            async with asyncio.timeout(0.05):
                await serving.news.wait()
        except TimeoutError:
            return

    async def _read(self, serving: Serving, frames: AsyncIterator[scheduler_pb2.ServeRequest]) -> None:
        async for frame in frames:
            earlier: dict[int, scheduler_pb2.Submit] = {}
            for submit in frame.submits:
                earlier[submit.handle] = whole = whole_submit(submit, earlier)
                self.take_submit(serving, whole)
            for stop in frame.stops:
                self.stops.append(stop)
                run = serving.runs.get(stop.handle)
                if run is not None:
                    del run.ids[stop.num_output :]
                    self._finish(serving, run, common_pb2.FINISH_REASON_STOP)
            for abort in frame.aborts:
                self._abort(serving, abort)
            serving.news.set()

    def take_submit(self, serving: Serving, submit: scheduler_pb2.Submit) -> None:
        self.submits.append(submit)
        serving.sequence = submit.sequence
        if self.reject is not None:
            serving.pending.rejected.add(handle=submit.handle, attempt=submit.attempt, error=self.reject.to_proto())
            return
        wanted = len(submit.prompt_ids) // 4 + submit.stop.max_tokens
        if min(wanted, self.model.max_total_len) > self.num_pages + 1:
            error = MeshError(ErrorReason.ERROR_REASON_NEVER_FITS, f"this replica has {self.num_pages} pages")
            serving.pending.rejected.add(handle=submit.handle, attempt=submit.attempt, error=error.to_proto())
            return
        for other in self._servings:
            for handle, run in tuple(other.runs.items()):
                if (run.submit.request_id, run.submit.index) != (submit.request_id, submit.index):
                    continue
                if run.submit.attempt >= submit.attempt:
                    error = MeshError(ErrorReason.ERROR_REASON_STALE_ATTEMPT, "a higher attempt runs")
                    serving.pending.rejected.add(handle=submit.handle, attempt=submit.attempt, error=error.to_proto())
                    return
                del other.runs[handle]
        resumed = unpack_ints(submit.resumed_output_ids, "resumed").tolist()
        serving.runs[submit.handle] = Run(submit, resumed, len(resumed))

    def _abort(self, serving: Serving, abort: scheduler_pb2.Abort) -> None:
        self.aborts.append(abort)
        if self.ignores_aborts:
            return
        found = False
        for other in (serving,) if abort.is_own else tuple(self._servings):
            for run in tuple(other.runs.values()):
                if run.submit.request_id != abort.request_id:
                    continue
                if abort.HasField("index") and abort.index != run.submit.index:
                    continue
                if abort.HasField("below_attempt") and run.submit.attempt >= abort.below_attempt:
                    continue
                found = True
                error = MeshError(ErrorReason.ERROR_REASON_ABORTED, "somebody aborted the request")
                self._finish(other, run, common_pb2.FINISH_REASON_ABORT, error=error)
                other.news.set()
        if abort.abort_id:
            is_known = any(key[0] == abort.request_id for key in self.finished_keys)
            missed = scheduler_pb2.ABORT_OUTCOME_FINISHED if is_known else scheduler_pb2.ABORT_OUTCOME_UNKNOWN
            outcome = scheduler_pb2.ABORT_OUTCOME_FOUND if found else missed
            serving.pending.abort_results.add(abort_id=abort.abort_id, outcome=outcome)

    def _step(self, serving: Serving) -> scheduler_pb2.ServeResponse:
        if not self.is_paused and not self.is_silent:
            if self.on_step is not None and serving.runs:
                self.on_step(self.num_tokens)
            self._make_tokens(serving)
        frame, serving.pending = serving.pending, scheduler_pb2.ServeResponse()
        return frame

    def _make_tokens(self, serving: Serving) -> None:
        handles, attempts, firsts, counts, ids = [], [], [], [], []
        batch = serving.pending.tokens
        for handle, run in tuple(serving.runs.items()):
            self._prefill(serving, handle, run)
            first, ending = len(run.ids), None
            for _ in range(self.per_step):
                token = token_of(self.model, run.submit, len(run.ids))
                run.ids.append(token)
                ending = ending_of(self.model, run.submit, run.ids)
                if ending is not None:
                    break
            if run.submit.sampling.HasField("num_top_logprobs"):
                logprobs = logprobs_of(run.ids[first:], first, run.submit.sampling.num_top_logprobs)
                batch.logprobs.add(row=len(handles), logprobs=logprobs)
            handles.append(handle)
            attempts.append(run.submit.attempt)
            firsts.append(first)
            counts.append(len(run.ids) - first)
            ids += run.ids[first:]
            if ending is not None:
                self._finish(serving, run, ending)
        if handles:
            self.num_tokens += len(ids)
            batch.handles, batch.attempts = pack_ints(handles), pack_ints(attempts)
            batch.first_output_indexes, batch.counts = pack_ints(firsts), pack_ints(counts)
            batch.ids = pack_ints(ids)
            batch.weights_version = 1

    def _prefill(self, serving: Serving, handle: int, run: Run) -> None:
        if run.is_prefilled:
            return
        run.is_prefilled = True
        prompt, start = unpack_ints(run.submit.prompt_ids, "prompt").tolist(), run.submit.logprobs_start
        if run.submit.sampling.prompt_logprobs and start < len(prompt):
            serving.pending.prompt_logprobs.add(
                handle=handle, first_position=start, logprobs=logprobs_of(prompt[start:], start, 0)
            )

    def _finish(
        self, serving: Serving, run: Run, reason: common_pb2.FinishReason, *, error: MeshError | None = None
    ) -> None:
        submit = run.submit
        serving.runs.pop(submit.handle, None)
        self.finished_keys.add((submit.request_id, submit.index))
        is_end = reason == common_pb2.FINISH_REASON_STOP and run.ids and run.ids[-1] in end_ids_of(self.model, submit)
        serving.pending.finished.add(
            handle=submit.handle,
            attempt=submit.attempt,
            reason=reason,
            num_output=len(run.ids),
            stop_id=run.ids[-1] if is_end else None,
            usage=common_pb2.Usage(
                prompt_tokens=len(submit.prompt_ids) // 4, output_tokens=len(run.ids), cached_tokens=3
            ),
            error=error.to_proto() if error is not None else None,
        )

    def _load(self, serving: Serving) -> scheduler_pb2.Load:
        load = scheduler_pb2.Load(
            submit_sequence=serving.sequence,
            num_running=self.num_running,
            group=self.group,
            epoch=1,
            is_draining=self.is_leaving,
            is_leaving=self.is_leaving,
        )
        if self.num_ranks > 1:
            load.total_pages = load.free_pages = self.num_ranks * self.num_pages
            load.ranks.extend(
                scheduler_pb2.RankLoad(dp_rank=rank, free_pages=self.num_pages) for rank in range(self.num_ranks)
            )
        return load


def whole_submit(submit: scheduler_pb2.Submit, earlier: dict[int, scheduler_pb2.Submit]) -> scheduler_pb2.Submit:
    """The submit with what it shares with an earlier one of its frame."""
    if not submit.HasField("shares_with"):
        return submit
    whole = scheduler_pb2.Submit()
    whole.CopyFrom(earlier[submit.shares_with])
    for own in ("resumed_output_ids", "logprobs_start", "index", "attempt"):
        whole.ClearField(own)  # type: ignore[arg-type]
    whole.MergeFrom(submit)
    whole.ClearField("shares_with")
    return whole


def token_of(model: common_pb2.ModelIdentity, submit: scheduler_pb2.Submit, output_index: int) -> int:
    """The token at an output index: a function of prompt, seed and index; an EOS id about every 40 tokens."""
    return made_up_token(model, submit.prompt_ids, submit.sampling.seed, output_index)


def made_up_token(model: common_pb2.ModelIdentity, prompt_ids: bytes, seed: int, output_index: int) -> int:
    digest = hashlib.blake2b(prompt_ids + seed.to_bytes(8, "little") + output_index.to_bytes(4, "little")).digest()
    eos_ids = unpack_ints(model.eos_ids, "eos_ids").tolist()
    if eos_ids and output_index and digest[7] < 6:
        return int(eos_ids[0])
    token = int.from_bytes(digest[:4], "little") % model.vocab_size
    while token in eos_ids:
        token = (token + 1) % model.vocab_size
    return token


def end_ids_of(model: common_pb2.ModelIdentity, submit: scheduler_pb2.Submit) -> set[int]:
    ids = set(unpack_ints(submit.stop.stop_ids, "stop_ids").tolist())
    return ids if submit.stop.ignore_eos else ids | set(unpack_ints(model.eos_ids, "eos_ids").tolist())


def ending_of(
    model: common_pb2.ModelIdentity, submit: scheduler_pb2.Submit, ids: list[int]
) -> common_pb2.FinishReason | None:
    if ids[-1] in end_ids_of(model, submit):
        return common_pb2.FINISH_REASON_STOP
    most = min(submit.stop.max_tokens, model.max_total_len - len(submit.prompt_ids) // 4)
    return common_pb2.FINISH_REASON_LENGTH if len(ids) >= most else None


def logprobs_of(ids: list[int], first: int, num_top: int) -> common_pb2.Logprobs:
    """Made up: the position's own logprob is -(position + id / 1000), alternatives are id + 1, id + 2, ..."""
    return common_pb2.Logprobs(
        token_logprobs=pack_floats([-(first + i + token / 1000) for i, token in enumerate(ids)]),
        num_top=num_top,
        top_ids=pack_ints([token + k for token in ids for k in range(num_top)]),
        top_logprobs=pack_floats([-float(first + i + k) for i in range(len(ids)) for k in range(num_top)]),
    )
