"""Chunks of a step: launched, sampled where a prompt ends, and their outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from radixmesh.daemons.runtime.steps.step import TokenLogprobs
from radixmesh.daemons.worker.cuda.model.device_model import DeviceModel
from radixmesh.daemons.worker.cuda.step.outputs.host_logits import HostLogits, KeptPrompt
from radixmesh.daemons.worker.cuda.step.outputs.prompt_vectors import Collect, PromptVectors
from radixmesh.daemons.worker.cuda.step.outputs.token_ring import NOBODY, NOTHING, Asking, Fetched, TokenRing
from radixmesh.daemons.worker.cuda.step.prompt_steps import PromptForward, PromptSteps, no_rows
from radixmesh.daemons.worker.cuda.step.sampling.slot_sampler import SlotSampler
from radixmesh.daemons.worker.cuda.step.slot_state import SlotState
from radixmesh.daemons.worker.runner import DecodeRows, Segment, SegmentOutput
from radixmesh.daemons.worker.step_handle import DeviceEvent, StepHandle


class LaunchedChunks(NamedTuple):
    """num_rows: decode rows of the same forward, whose tokens come first; sampled: indexes of the segments whose tokens
    follow those; kept: prompts whose logprobs are wanted; vectors: those of tasks; prompt_logprobs: those that are
    there already; all three by index of the segment."""

    num_rows: int
    num_segments: int
    sampled: Sequence[int]
    asking: Asking
    kept: Mapping[int, KeptPrompt]
    vectors: Mapping[int, Collect]
    prompt_logprobs: Mapping[int, TokenLogprobs] = MappingProxyType({})

    def with_prompt_logprobs(self, host_logits: HostLogits) -> LaunchedChunks:
        """With logprobs of prompts; waits for the step if there are any."""
        if not self.kept:
            return self
        found = {index: host_logits.prompt_logprobs(kept) for index, kept in self.kept.items()}
        return self._replace(kept={}, prompt_logprobs=found)

    @property
    def num_tokens(self) -> int:
        return self.num_rows + len(self.sampled)

    def outputs(self, fetched: Fetched, host_logits: HostLogits) -> list[SegmentOutput]:
        """Outputs of all segments; waits for logprobs of prompts and for vectors."""
        prompts = self.with_prompt_logprobs(host_logits).prompt_logprobs
        row_of = {segment: self.num_rows + number for number, segment in enumerate(self.sampled)}
        return [
            SegmentOutput(
                token=int(fetched.tokens[row_of[index]]) if index in row_of else None,
                logprobs=fetched.logprobs.get(row_of[index]) if index in row_of else None,
                prompt_logprobs=prompts.get(index),
                vector=self.vectors[index]() if index in self.vectors else None,
            )
            for index in range(self.num_segments)
        ]


NO_CHUNKS = LaunchedChunks(0, 0, (), NOBODY, {}, {})


class ChunkSteps:
    """Runs chunks through `prompts`, beside decode rows or alone; tokens go to the ring `tokens`."""

    def __init__(
        self,
        prompts: PromptSteps,
        model: DeviceModel,
        slots: SlotState,
        tokens: TokenRing,
        vectors: PromptVectors,
    ) -> None:
        self._prompts, self._model, self._vectors = prompts, model, vectors
        self._slots, self._tokens = slots, tokens

    def launch(
        self, rows: DecodeRows, segments: Sequence[Segment], sampler: SlotSampler, admissions: int
    ) -> LaunchedChunks:
        """Launches a forward, and samples all rows whose token is wanted."""
        sampled = [i for i, s in enumerate(segments) if s.sample is not None]
        slots = np.concatenate([rows.slots, np.array([segments[i].slot for i in sampled], np.int32)])
        ring_index, asking = self._tokens.take() if len(slots) else 0, NOBODY
        forward = self._prompts.forward(rows, segments, sampled, ring_index=ring_index, admissions=admissions)
        if len(slots):
            to = forward.sampled
            target = self._tokens.target(to.ring_index_1, self._slots.last_tokens)
            logits_TV = self._model.logits(forward.hidden_TD.index_select(0, to.rows))
            logprobs = self._tokens.logprobs
            asking = sampler.tokens_of(logits_TV, to.slots, to.positions, slots, target, logprobs, is_sampled=False)
            self._slots.sampled(to.slots, to.positions)
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
        return LaunchedChunks(len(rows.slots), len(segments), sampled, asking, kept, vectors)

    def forward_alone(self, segments: Sequence[Segment]) -> PromptForward:
        """A forward of segments, kernel by kernel, of which nothing is sampled.

        Their pages lie in the tables of their slots for that long: requests there have theirs sent anew.
        """
        size = max(len(segment.pages) for segment in segments)
        tables = np.zeros((1 + max(segment.slot for segment in segments), size), np.int32)
        num_pages = np.zeros(len(tables), np.int32)
        for segment in segments:
            tables[segment.slot, : len(segment.pages)] = segment.pages
            num_pages[segment.slot] = len(segment.pages)
        slots = [segment.slot for segment in segments]
        self._slots.forget(slots)
        self._slots.send(np.array(slots, np.int32), tables, num_pages)
        self._slots.forget(slots)
        return self._prompts.forward(no_rows(), segments, is_captured=False)

    def fetch(self, chunks: LaunchedChunks, end: DeviceEvent) -> StepHandle[Fetched]:
        """Tokens of the chunks that were launched last, and of the decode rows before them."""
        if not chunks.num_tokens:
            return StepHandle.of(NOTHING)
        return self._tokens.fetch(chunks.num_tokens, end, chunks.asking)
