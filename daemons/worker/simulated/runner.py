"""The simulated model: hashes for KV, made-up tokens, modelled time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from radixmesh.daemons.runtime.arrays import IntArray, empty_ints
from radixmesh.daemons.runtime.kv_share import KvShare
from radixmesh.daemons.runtime.sampling import Sampling
from radixmesh.daemons.runtime.steps.step import Task, TokenLogprobs
from radixmesh.daemons.worker.host_memory.host_segment import HostSegment
from radixmesh.daemons.worker.runner import DecodeRows, ModelRunner, Segment, SegmentOutput, StepOutput
from radixmesh.daemons.worker.simulated.clock import StepClock
from radixmesh.daemons.worker.simulated.host_pool import SimulatedHostPool
from radixmesh.daemons.worker.simulated.latency import LatencyModel, StepShape
from radixmesh.daemons.worker.simulated.token_source import (
    EMPTY_PREFIX,
    Alphabet,
    HashArray,
    noise_of,
    token_hashes,
    witness_positions,
)

_POISON = np.uint64(0xDEADDEADDEADDEAD)
_LN2 = float(np.log(2.0))


class SimulatedRunner(ModelRunner):
    """KV is one 64-bit hash a token (see token_source); tokens depend on it, the seed and the position alone.

    Of the sampling parameters only temperature (zero or not), seed and suppressed ids count. Logprobs are those of a
    made-up distribution: the token itself has 1/2, the ordinary ids after it 1/4, 1/8, ...; prompt tokens likewise.
    """

    is_deterministic = True
    tasks = frozenset({Task.GENERATE})

    def __init__(
        self,
        *,
        page_size: int,
        num_pages: int,
        vocab_size: int,
        max_total_len: int,
        alphabet: Alphabet,
        latency: LatencyModel,
        clock: StepClock,
    ) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self.kv_dtype, self.kv_layout = "uint64", f"page={page_size};hash"
        self.kv_token_bytes, self.kv_token_layout = 8, "hash"
        self.vocab_size = vocab_size
        self.max_total_len = max_total_len
        self.alphabet = alphabet
        self.clock = clock
        self._latency = latency
        self.kv = np.full(num_pages * page_size, _POISON, np.uint64)

    def now_ns(self) -> int:
        return self.clock.now_ns()

    def can_batch(self, sampling: Sampling) -> bool:
        return not sampling.wants_logprobs

    def step(self, rows: DecodeRows, segments: Sequence[Segment], ready_ns: int) -> StepOutput:
        tokens = self._decode(rows) if len(rows.slots) else empty_ints()
        outputs = self.forward(segments)
        duration_us = self._latency.step_us(_shape_of(rows, segments))
        start_ns, end_ns = self.clock.run(int(duration_us * 1000.0), ready_ns)
        return StepOutput(tokens=tokens, segments=outputs, start_ns=start_ns, end_ns=end_ns)

    def forward(self, segments: Sequence[Segment]) -> list[SegmentOutput]:
        return [self._compute(segment) for segment in segments]

    def copy_page(self, source: int, target: int, num_tokens: int) -> None:
        size = self.page_size
        self.kv[target * size : target * size + num_tokens] = self.kv[source * size : source * size + num_tokens]

    def read_kv(self, indexes: IntArray, part: KvShare | None = None) -> npt.NDArray[np.uint8]:
        return self.kv[indexes].view(np.uint8)

    def write_kv(self, indexes: IntArray, data: npt.NDArray[np.uint8], part: KvShare | None = None) -> None:
        self.kv[indexes] = data.view(np.uint64)

    def add_host_pool(self, num_bytes: int, segment: HostSegment | None = None) -> None:
        assert segment is None, "a simulated worker's host memory goes with it"
        self.host_pool = SimulatedHostPool(
            num_bytes,
            self.kv,
            self.page_size,
            self.clock,
            poison=_POISON,
            load_token_us=self._latency.per_loaded_token,
        )

    def clear(self) -> None:
        self.kv.fill(_POISON)

    def _decode(self, rows: DecodeRows) -> IntArray:
        positions = rows.positions
        before = np.maximum(positions - 1, 0)
        prefix = np.where(positions > 0, self._read(rows, before), EMPTY_PREFIX)
        prefix = prefix + token_hashes(rows.ids, positions)
        self.kv[self._places(rows, positions)] = prefix
        witnesses = self._read(rows, witness_positions(prefix, positions))
        return self.alphabet.sample(noise_of(prefix, witnesses, rows.seeds, rows.is_sampled, positions + 1))

    def _read(self, rows: DecodeRows, positions: IntArray) -> HashArray:
        return self.kv[self._places(rows, positions)]

    def _places(self, rows: DecodeRows, positions: IntArray) -> IntArray:
        if self.page_size == 1:
            return rows.page_tables[rows.slots, positions]
        pages = rows.page_tables[rows.slots, positions // self.page_size]
        return pages * self.page_size + positions % self.page_size

    def _compute(self, segment: Segment) -> SegmentOutput:
        end = segment.start + len(segment.ids)
        positions = np.arange(segment.start, end, dtype=np.int32)
        kv_indices = segment.pages[positions // self.page_size] * self.page_size + positions % self.page_size
        before = self._at(segment, segment.start - 1) if segment.start else EMPTY_PREFIX
        # Sums wrap around: 64-bit arithmetic is what the hash is defined in.
        contents = np.cumsum(token_hashes(segment.ids, positions), dtype=np.uint64) + before
        self.kv[kv_indices] = contents
        token, logprobs = (None, None) if segment.sample is None else self._sample(segment, contents[-1:], end - 1)
        return SegmentOutput(token=token, logprobs=logprobs, prompt_logprobs=self._prompt_logprobs(segment))

    def _sample(self, segment: Segment, prefix: HashArray, last: int) -> tuple[int, TokenLogprobs | None]:
        sample = segment.sample
        assert sample is not None and sample.position == last + 1
        position = np.array([last], np.int32)
        witnessed = witness_positions(prefix, position)[:, 0].tolist()
        witnesses = np.array([[self._at(segment, at)] for at in witnessed], np.uint64)
        sampling = sample.sampling
        seeds, is_sampled = np.array([sampling.seed or 0], np.uint64), np.array([not sampling.is_greedy])
        noise = noise_of(prefix, witnesses, seeds, is_sampled, position + 1)
        token = self.alphabet.sample_unsuppressed(int(noise[0]), frozenset(sample.suppressed_ids.tolist()))
        if sampling.num_top_logprobs is None:
            return token, None
        return token, self._logprobs(np.array([token], np.int32), sampling.num_top_logprobs)

    def _at(self, segment: Segment, position: int) -> np.uint64:
        page = int(segment.pages[position // self.page_size])
        value: np.uint64 = self.kv[page * self.page_size + position % self.page_size]
        return value

    def _prompt_logprobs(self, segment: Segment) -> TokenLogprobs | None:
        wanted = segment.prompt_logprobs
        if wanted is None:
            return None
        return self._logprobs(segment.prompt_ids[wanted.start : wanted.stop], segment.prompt_num_top)

    def _logprobs(self, ids: IntArray, num_top: int) -> TokenLogprobs:
        ordinary = self.alphabet.ordinary
        ranks = np.arange(num_top, dtype=np.int32)
        first = np.searchsorted(ordinary, ids)
        top_ids = ordinary[(first[:, None] + ranks) % len(ordinary)]
        if num_top:
            top_ids[:, 0] = ids
        return TokenLogprobs(
            own=np.full(len(ids), -_LN2, np.float32),
            num_top=num_top,
            top_ids=top_ids.astype(np.int32),
            top=np.broadcast_to(-_LN2 * (ranks + 1.0), (len(ids), num_top)).astype(np.float32),
        )


def _shape_of(rows: DecodeRows, segments: Sequence[Segment]) -> StepShape:
    """A segment of one token that samples is a decode, whichever way it came."""
    decode_rows, decode_context = len(rows.slots), int(rows.positions.sum()) + len(rows.slots)
    prefill_tokens = prefill_context = 0
    for segment in segments:
        length = len(segment.ids)
        if length == 1 and segment.sample is not None:
            decode_rows += 1
            decode_context += segment.start + 1
        else:
            prefill_tokens += length
            prefill_context += length * segment.start + length * (length + 1) // 2
    return StepShape(
        prefill_tokens=prefill_tokens,
        prefill_context=prefill_context,
        decode_rows=decode_rows,
        decode_context=decode_context,
    )
