"""The engine without a mesh: the daemons' own domain objects, composed in one process.

text --TextCodec--> ids --Planner--> plans --StepLink--> results --Planner--> token rows --DecoderTable--> text

Text is decoded while the next steps run. With a ThreadLink nothing here crosses a process boundary, so what the mesh
adds can be told; it is an offline engine as well.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType

from hop_ladder.step_link import StepLink
from radixmesh.daemons.runtime.arrays import as_ints
from radixmesh.daemons.runtime.detokenize.decoder_table import DecoderTable
from radixmesh.daemons.runtime.detokenize.messages import EntryFailure, OpenEntry, TokenBatch
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.sampling import Sampling, Stop
from radixmesh.daemons.runtime.steps.step import StepResult
from radixmesh.daemons.runtime.tokenize.text_codec import TextCodec, TextItem
from radixmesh.daemons.scheduler.planning.planner import Planner
from radixmesh.daemons.scheduler.planning.settings import PlannerSettings
from radixmesh.daemons.scheduler.planning.timing.lookahead import Lookahead
from radixmesh.daemons.scheduler.results.outputs import Finished, Outputs, TokenRows
from radixmesh.daemons.scheduler.sequence import SequenceKey, Submission

_OWNER = 1


@dataclass(slots=True)
class Delta:
    """New tokens of one output. `finished` is set on the last one."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    finished: Finished | None = None


class OneProcess:
    """An async context manager. One event loop; an engine whose worker is lost is over."""

    def __init__(self, link: StepLink, codec: TextCodec, table: DecoderTable, settings: PlannerSettings) -> None:
        self._link = link
        self._codec = codec
        self._table = table
        self._planner = Planner(settings)
        self._lookahead = Lookahead(depth=None, max_in_flight=1)
        self._outputs: dict[int, asyncio.Queue[Delta | Exception]] = {}
        self._num_requests = 0
        self._eos_ids: tuple[int, ...] = ()
        self._results: deque[StepResult | Exception] = deque()
        self._wake = asyncio.Event()
        self._sent_idle_s: dict[int, float] = {}
        self._driving: asyncio.Task[None] | None = None
        self._failure: Exception | None = None

    async def __aenter__(self) -> OneProcess:
        held = await self._link.open(self._arrived)
        self._planner.begin_epoch(held.epoch, held.info, held.snapshot)
        self._lookahead = Lookahead(depth=None, max_in_flight=held.info.max_plans_in_flight)
        self._eos_ids = held.info.eos_ids
        self._driving = asyncio.create_task(self._drive())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._driving is not None:
            self._driving.cancel()
            with suppress(asyncio.CancelledError):
                await self._driving
        await self._link.close()

    @property
    def num_live(self) -> int:
        """Requests that wait or run."""
        return self._planner.num_live

    async def generate(
        self, prompt: str | Sequence[int], sampling: Sampling, stop: Stop
    ) -> AsyncGenerator[Delta, None]:
        """Deltas of one output; leaving early aborts it. Raises MeshError for what cannot run."""
        if self._failure is not None:
            raise self._failure
        self._num_requests += 1
        handle, name = self._num_requests, f"request-{self._num_requests}"
        queue = self._outputs[handle] = asyncio.Queue()
        try:
            ids = self._encode(prompt)
            entry = OpenEntry(
                handle=handle,
                prompt_tail_ids=ids[-8:],
                stops=stop.stop,
                include_stop=stop.include_stop,
                skip_special_tokens=stop.skip_special_tokens,
                eos_ids=(*stop.stop_ids, *(() if stop.ignore_eos else self._eos_ids)),
            )
            failure = self._table.open(entry)
            if isinstance(failure, EntryFailure):
                raise failure.error
            self._planner.submit(
                Submission(
                    key=SequenceKey(name, 0),
                    owner=_OWNER,
                    handle=handle,
                    prompt_ids=as_ints(ids),
                    sampling=sampling,
                    stop=stop,
                )
            )
            self._wake.set()
            while True:
                delta = await queue.get()
                if isinstance(delta, Exception):
                    raise delta
                yield delta
                if delta.finished is not None:
                    return
        finally:
            del self._outputs[handle]
            self._table.close([handle])
            self._planner.abort(name)

    def _encode(self, prompt: str | Sequence[int]) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        encoded = self._codec.encode([TextItem(text=prompt)])[0]
        if encoded.error is not None:
            raise encoded.error
        ids: list[int] = encoded.ids.tolist()
        return ids

    def _arrived(self, result: StepResult | Exception) -> None:
        self._results.append(result)
        self._wake.set()

    async def _drive(self) -> None:
        """The whole engine: results in, plans out, and text while the worker computes."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                outputs = [self._process(self._results.popleft()) for _ in range(len(self._results))]
                await self._send_plans()
                for output in (*outputs, self._planner.take_outputs()):
                    self._deliver(output)
        except Exception as error:
            self._failure = error
            for queue in self._outputs.values():
                queue.put_nowait(error)

    def _process(self, result: StepResult | Exception) -> Outputs:
        if isinstance(result, Exception):
            raise result
        sent_s = self._sent_idle_s.pop(result.step_id, None)
        if sent_s is not None:
            device_us = (result.device_end_ns - result.device_start_ns) / 1000
            self._lookahead.observe_round_trip((time.monotonic() - sent_s) * 1e6, device_us)
        return self._planner.process(result)

    async def _send_plans(self) -> None:
        """Plans ahead for as long as the lookahead wants."""
        planner = self._planner
        assert planner.state is not None, "the epoch lasts as long as the engine"
        while True:
            steps = planner.state.in_flight.steps()
            if not self._lookahead.wants_more(len(steps), sum(step.plan.expected_us for step in steps[1:])):
                return
            now = time.monotonic()
            plan = planner.plan(now)
            if plan is None:
                return
            if not steps and plan.has_forward:
                self._sent_idle_s = {plan.step_id: now}
            await self._link.send(plan)

    def _deliver(self, outputs: Outputs) -> None:
        """Tokens to their requests, with their text."""
        deltas: dict[int, Delta] = {}
        for rows in outputs.rows:
            self._add_rows(deltas, rows)
        for finished in outputs.finished:
            if finished.handle not in self._outputs:
                continue
            if finished.error is not None:
                self._outputs[finished.handle].put_nowait(finished.error)
                continue
            self._add_text(deltas, _last_rows([finished.handle], [finished.num_output]))
            deltas.setdefault(finished.handle, Delta()).finished = finished
        for rejected in outputs.rejected:
            self._fail(rejected.handle, rejected.error)
        for handle, delta in deltas.items():
            if handle in self._outputs:
                self._outputs[handle].put_nowait(delta)

    def _add_rows(self, deltas: dict[int, Delta], rows: TokenRows) -> None:
        handles, counts, ids = rows.handles.tolist(), rows.counts.tolist(), rows.ids.tolist()
        end = 0
        for handle, count in zip(handles, counts, strict=True):
            start, end = end, end + count
            deltas.setdefault(handle, Delta()).ids += ids[start:end]
        batch = TokenBatch(
            handles=handles,
            first_indexes=rows.firsts.tolist(),
            counts=counts,
            finals=bytes(len(handles)),
            ids=ids,
            min_id=int(rows.ids.min()),
            max_id=int(rows.ids.max()),
        )
        self._add_text(deltas, batch)

    def _add_text(self, deltas: dict[int, Delta], batch: TokenBatch) -> None:
        texts, failures = self._table.push(batch)
        for text in texts:
            deltas.setdefault(text.handle, Delta()).text += text.text
            if text.stop is not None:
                # Its Finished comes with the planner's next outputs.
                self._planner.finish_by_stop(_OWNER, text.handle, text.stop.num_tokens)
                self._wake.set()
        for failure in failures:
            self._fail(failure.handle, failure.error)

    def _fail(self, handle: int, error: MeshError) -> None:
        if handle in self._outputs:
            self._outputs[handle].put_nowait(error)


def _last_rows(handles: list[int], num_output: list[int]) -> TokenBatch:
    """No tokens, but none will follow: held-back text comes out."""
    return TokenBatch(
        handles=handles,
        first_indexes=num_output,
        counts=[0] * len(handles),
        finals=b"\1" * len(handles),
        ids=(),
        min_id=0,
        max_id=0,
    )
