"""Runs steps on a device: steps of decodes alone as captured graphs, steps with chunks through `prompt_steps.py`.

    launch   step inputs -> forward -> sample, tokens to the host -> event        nothing waits
    result   event is done -> tokens, times; logprobs from hidden states that were kept

Tokens never pass through the host on their way to the next step: a decode row reads the last token of its slot on the
device. Logprobs of sampled tokens are computed there too, in steps with a row that asks, and come with the tokens.
Those of prompt tokens are computed when the step's result is asked for, from hidden states that were kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from radixmesh.daemons.runtime.arrays import FloatArray
from radixmesh.daemons.runtime.sampling import Sampling
from radixmesh.daemons.runtime.steps.step import Admit, Task
from radixmesh.daemons.worker.cuda.attention.backend import DeviceAttention
from radixmesh.daemons.worker.cuda.device import Device, DeviceClock, TimedEvent
from radixmesh.daemons.worker.cuda.model.device_model import DeviceModel
from radixmesh.daemons.worker.cuda.step.decode_buffer import DecodeBuffer
from radixmesh.daemons.worker.cuda.step.decode_graphs import DecodeGraphs
from radixmesh.daemons.worker.cuda.step.host_logits import HostLogits, KeptPrompt
from radixmesh.daemons.worker.cuda.step.host_step import host_step
from radixmesh.daemons.worker.cuda.step.prompt_steps import PromptSteps, no_rows
from radixmesh.daemons.worker.cuda.step.prompt_vectors import Collect, PromptVectors
from radixmesh.daemons.worker.cuda.step.slot_sampler import SlotSampler
from radixmesh.daemons.worker.cuda.step.slot_state import SlotState
from radixmesh.daemons.worker.cuda.step.token_ring import NOTHING, Fetched, TokenRing
from radixmesh.daemons.worker.cuda.step.warm_up import warm_up_steps
from radixmesh.daemons.worker.kv_pool import KvPool
from radixmesh.daemons.worker.runner import (
    DecodeRows,
    ModelRunner,
    Segment,
    SegmentOutput,
    StepOutput,
)
from radixmesh.daemons.worker.step_handle import StepHandle
from radixmesh.kernels.rope_kv import KvTarget
from radixmesh.kernels.sampling.sample import TokenTarget
from radixmesh.kernels.scatter_embed import scatter_embed

# Decode steps of the warm-up: the first ones of a device that was just started are slow.
_WARM_UP_DECODES = 100
_NO_PROMPTS: Mapping[int, KeptPrompt] = {}
_NO_VECTORS: Mapping[int, Collect] = {}

AttentionCreator = Callable[[torch.Tensor], DeviceAttention]
"""Makes the attention over page tables int32 [slots + 1, pages] on the device, the last slot being a dummy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerLimits:
    """num_slots: requests that hold a slot; max_tokens_per_step: rows of one step; graph_rows, prompt_rows: sizes of
    the steps of decodes, and of those with chunks, that are captured, ascending, none where nothing is."""

    num_slots: int
    max_tokens_per_step: int
    max_total_len: int
    graph_rows: tuple[int, ...]
    prompt_rows: tuple[int, ...] = ()


class DeviceRunner(ModelRunner):
    """One thread calls it; steps overlap with that thread's work and run in the order of their launches."""

    is_asynchronous = True
    suppresses_rows = True

    def __init__(
        self,
        device: Device,
        model: DeviceModel,
        pool: KvPool,
        create_attention: AttentionCreator,
        limits: RunnerLimits,
        *,
        is_deterministic: bool,
        use_pdl: bool,
        embed_pooling: str = "mean",
    ) -> None:
        """use_pdl: kernels at a step's beginning and end may begin before those ahead of them have ended (Hopper)."""
        self.page_size = pool.page_size
        self.num_pages = pool.num_pages
        self.vocab_size = model.vocab_size
        self.num_layers = model.num_layers
        self.tasks = model.tasks
        self.max_total_len = limits.max_total_len
        self.is_deterministic = is_deterministic
        self._limits = limits
        self._admissions = 0
        self._use_pdl = use_pdl
        self.device = device
        self.model = model
        self.pool = pool
        # Plans may grant `Limits.max_pages_per_slot` at most. With a column less, the last page of one slot would
        # be written to the next one's table.
        max_pages = limits.max_total_len // pool.page_size + 1
        with device.in_order(), torch.inference_mode():
            self.slots = SlotState(device, num_slots=limits.num_slots, max_pages=max_pages, dummy_page=pool.num_pages)
            self._attention = create_attention(self.slots.page_tables)
            self._sampler = SlotSampler(
                limits.num_slots,
                max_rows=limits.num_slots,
                vocab_size=self.vocab_size,
                max_total_len=limits.max_total_len,
                device=device.torch_device,
            )
            self._prompts = PromptSteps(
                device,
                model,
                self._attention,
                self.slots,
                page_size=pool.page_size,
                max_tokens=limits.max_tokens_per_step,
                max_total_len=limits.max_total_len,
                sizes=limits.prompt_rows,
            )
            self._decodes = DecodeBuffer(device, max_rows=limits.num_slots, dummy_slot=self.slots.dummy_slot)
            self._tokens = TokenRing(device, max_rows=limits.num_slots)
            self._graphs = DecodeGraphs(device, limits.graph_rows)
            self._clock = DeviceClock(device.record_event())
        self._host_logits = HostLogits(device, model)
        self._vectors = PromptVectors(device, model, embed_pooling)

    def can_batch(self, sampling: Sampling) -> bool:
        return True

    def admitted(self, admit: Admit) -> None:
        self._admissions += 1
        self.slots.admitted(admit)
        self._sampler.admitted(admit)

    def warm_up(self) -> None:
        """Compiles and captures, largest first: smaller graphs reuse its memory. Then runs prompts that no graph is
        for, and steps as they will come, so that no request waits for a compiler or a library's start."""
        rows = no_rows()
        with self.device.in_order(), torch.inference_mode():
            self._prompts.capture()
            if Task.GENERATE not in self.tasks:
                self._prompts.warm_up()
                self.device.record_event().wait()
                return
            for num_rows in sorted(self._graphs.sizes, reverse=True):
                step = host_step(rows, (), num_rows)
                self._attention.plan(step)
                send = partial(self._stage_decodes, rows, num_rows)
                for variant in self._attention.variants(num_rows):
                    self._graphs.capture(num_rows, variant, partial(self._decode, num_rows, variant), send)
            self._prompts.warm_up()
            self._sampler.warm_up(self.model.dtype)
            for rows, segments in warm_up_steps(
                num_slots=self._limits.num_slots,
                max_prompt_len=self.max_total_len - 1,
                max_tokens_per_step=self._limits.max_tokens_per_step,
                num_decodes=_WARM_UP_DECODES if self.device.torch_device.type == "cuda" else 1,
            ):
                self.launch(rows, segments, 0)
            self.device.record_event().wait()

    @torch.inference_mode()
    def launch(self, rows: DecodeRows, segments: Sequence[Segment], ready_ns: int) -> StepHandle[StepOutput]:
        with self.device.in_order():
            self._sampler.send()
            if not segments:
                return self._launch_decodes(rows)
            slots = np.concatenate([rows.slots, np.array([s.slot for s in segments], np.int32)])
            self.slots.send(slots, rows.page_tables, rows.num_pages)
            return self._launch_chunks(rows, segments)

    def _launch_decodes(self, rows: DecodeRows) -> StepHandle[StepOutput]:
        num_rows = len(rows.slots)
        if not num_rows:
            # Rows there were, but none had room: kernels take no grids of nothing.
            start = self._clock.begin(self.device)
            return self._handle(start, start)
        bucket = self._graphs.bucket(num_rows)
        step = host_step(rows, (), bucket or num_rows, self._admissions)
        variant = self._attention.plan(step)
        self._stage_decodes(rows, step.num_rows)
        start = self._clock.begin(self.device)
        replay = self._decode if bucket is None else self._graphs.replay
        logits_TV = replay(step.num_rows, variant)
        views = self._decodes.views(step.num_rows)
        target, asking = self._target(views.ring_index_1), self._sampler.asking(rows.slots)
        self._sampler.resample(logits_TV, views.slots, views.kv_lens, rows.slots, target)
        self._sampler.logprobs(logits_TV, views.slots, target, self._tokens.logprobs, asking)
        end = self._clock.end(self.device)
        self._decodes.fence(end)
        return self._handle(start, end, self._tokens.fetch(num_rows, end, asking), num_rows)

    def _stage_decodes(self, rows: DecodeRows, num_rows: int) -> None:
        """Stages the inputs of a step of decodes alone; `num_rows` with padding."""
        entries = self.slots.new_entries(rows.slots, rows.page_tables, rows.num_pages)
        if len(entries) > self._decodes.max_entries:
            self.slots.send_entries(entries)
            entries = entries[:0]
        self._decodes.stage(rows, num_rows, self.slots.row_tokens(rows.slots), entries, self._tokens.take())

    def _decode(self, num_rows: int, variant: str) -> torch.Tensor:
        """A step of decodes alone, whose inputs are staged, with all rows sampled greedily: its logits. Graphs record
        it."""
        views, tables = self._decodes.fetch(num_rows), self.slots.page_tables
        x_TD = scatter_embed(
            views.slots,
            views.tokens,
            views.entries_E2,
            views.num_entries_1,
            tables,
            self.slots.last_tokens,
            self.model.embedding_VD,
            use_pdl=self._use_pdl,
        )
        attention = self._attention.begin(views.attention(tables), variant)
        target = KvTarget(views.positions, views.slots, tables, self.page_size)
        logits_TV = self.model.logits(self.model.layers(x_TD, target, attention))
        # The token of a row is at the position that follows its KV.
        to = self._target(views.ring_index_1)
        self._sampler.sample_greedily(logits_TV, views.slots, views.kv_lens, to, use_pdl=self._use_pdl)
        return logits_TV

    def _target(self, ring_index_1: torch.Tensor) -> TokenTarget:
        return TokenTarget(ring_RT=self._tokens.rows, ring_index_1=ring_index_1, last_tokens_S=self.slots.last_tokens)

    @torch.inference_mode()
    def logits(self, segments: Sequence[Segment]) -> list[FloatArray]:
        """The logits of every token of segments, float32 [length, vocabulary] each, for comparing: it waits for them.

        The segments' pages lie in the tables of their slots for that long: requests there have theirs sent anew.
        """
        rows = no_rows()
        size = max(len(segment.pages) for segment in segments)
        tables = np.zeros((1 + max(segment.slot for segment in segments), size), np.int32)
        num_pages = np.zeros(len(tables), np.int32)
        for segment in segments:
            tables[segment.slot, : len(segment.pages)] = segment.pages
            num_pages[segment.slot] = len(segment.pages)
        slots = [segment.slot for segment in segments]
        with self.device.in_order():
            self.slots.forget(slots)
            self.slots.send(np.array(slots, np.int32), tables, num_pages)
            self.slots.forget(slots)
            forward = self._prompts.forward(rows, segments, is_captured=False)
            return np.split(self._host_logits.of(forward.hidden_TD), forward.chunk_ends[:-1])

    def forward(self, segments: Sequence[Segment]) -> list[SegmentOutput]:
        raise AssertionError("a device runner is launched")

    @torch.inference_mode()
    def copy_page(self, source: int, target: int, num_tokens: int) -> None:
        with self.device.in_order():
            self.pool.copy_page(source, target, num_tokens)

    @torch.inference_mode()
    def clear(self) -> None:
        with self.device.in_order():
            self.pool.clear()

    def _launch_chunks(self, rows: DecodeRows, segments: Sequence[Segment]) -> StepHandle[StepOutput]:
        """Launches a step with chunks, and samples all rows whose token is wanted."""
        start = self._clock.begin(self.device)
        sampled = [i for i, s in enumerate(segments) if s.sample is not None]
        slots = np.concatenate([rows.slots, np.array([segments[i].slot for i in sampled], np.int32)])
        ring_index, asking = self._tokens.take() if len(slots) else 0, self._sampler.asking(slots)
        forward = self._prompts.forward(rows, segments, sampled, ring_index=ring_index, admissions=self._admissions)
        if len(slots):
            to = forward.sampled
            target = self._target(to.ring_index_1)
            logits_TV = self.model.logits(forward.hidden_TD.index_select(0, to.rows))
            self._sampler.sample(logits_TV, to.slots, to.positions, slots, target)
            self._sampler.logprobs(logits_TV, to.slots, target, self._tokens.logprobs, asking)
        kept, vectors = {}, {}
        for index, segment in enumerate(segments):
            last = int(forward.chunk_ends[index])
            hidden_TD = forward.hidden_TD[last - len(segment.ids) : last]
            vector = self._vectors.launch(segment, hidden_TD)
            if vector is not None:
                vectors[index] = vector
            if segment.prompt_logprobs is not None:
                # It is asked for when other steps have been launched.
                own_TD = hidden_TD.clone() if forward.is_overwritten else hidden_TD
                kept[index] = KeptPrompt.of(segment, own_TD)
        done = self._clock.end(self.device)
        fetched = self._tokens.fetch(len(slots), done, asking) if len(slots) else None
        return self._handle(start, done, fetched, len(rows.slots), len(segments), sampled, kept, vectors)

    def _handle(
        self,
        start: TimedEvent,
        end: TimedEvent,
        fetched: StepHandle[Fetched] | None = None,
        num_decodes: int = 0,
        num_segments: int = 0,
        sampled: Sequence[int] = (),
        kept: Mapping[int, KeptPrompt] = _NO_PROMPTS,
        vectors: Mapping[int, Collect] = _NO_VECTORS,
    ) -> StepHandle[StepOutput]:
        """A step on the device. `sampled`: indexes of the segments whose tokens follow the decode rows' in `fetched`;
        kept: prompts whose logprobs are wanted; vectors: those of tasks, by segment. The clock places steps in the
        order in which results are asked for."""

        def collect() -> StepOutput:
            end.wait()
            start_ns, end_ns = self._clock.place(start, end)
            tokens, logprobs = NOTHING if fetched is None else fetched.result()
            row_of = {segment: num_decodes + number for number, segment in enumerate(sampled)}
            segments = [
                SegmentOutput(
                    token=int(tokens[row_of[index]]) if index in row_of else None,
                    logprobs=logprobs.get(row_of[index]) if index in row_of else None,
                    prompt_logprobs=self._host_logits.prompt_logprobs(kept[index]) if index in kept else None,
                    vector=vectors[index]() if index in vectors else None,
                )
                for index in range(num_segments)
            ]
            return StepOutput(
                tokens=tokens[:num_decodes],
                segments=segments,
                logprobs={row: of_row for row, of_row in logprobs.items() if row < num_decodes},
                start_ns=start_ns,
                end_ns=end_ns,
            )

        return StepHandle(end, collect)
