"""A simulated worker whose decodes yield any number of tokens a step: what speculation and skipped rows do to lengths.

The tokens are those of SimulatedRunner, whatever the numbers: only how many of them come in one step is random.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from radixmesh.daemons.runtime.arrays import IntArray, empty_ints
from radixmesh.daemons.runtime.steps.step import TokenLogprobs
from radixmesh.daemons.worker.runner import DecodeRows, Segment, SegmentOutput, StepOutput
from radixmesh.daemons.worker.simulated.runner import SimulatedRunner


class UnevenRunner(SimulatedRunner):
    """Each decode yields 0 to max_tokens_per_row tokens, at random from `row_seed`, as far as its slot has room."""

    def __init__(self, *, max_tokens_per_row: int = 4, row_seed: int = 0, **of_simulated: object) -> None:
        """of_simulated: the arguments of SimulatedRunner."""
        super().__init__(**of_simulated)  # type: ignore[arg-type]
        self.max_tokens_per_row = max_tokens_per_row
        self._random = np.random.default_rng(row_seed)

    def step(self, rows: DecodeRows, segments: Sequence[Segment], ready_ns: int) -> StepOutput:
        if rows.max_tokens is None:
            return super().step(rows, segments, ready_ns)
        counts = self._random.integers(0, rows.max_tokens + 1).astype(np.int32)
        # First tokens of all rows, then second ones of the rows that yield two: each reads the KV of the one before.
        tokens = np.zeros((len(rows.slots), self.max_tokens_per_row), np.int32)
        ids, last = rows.ids.copy(), int(counts.max(initial=0))
        for number in range(last):
            chosen = np.flatnonzero(counts > number)
            ids[chosen] = tokens[chosen, number] = self._decode(_few(rows, chosen, ids, number))
        timed = super().step(_few(rows, np.zeros(0, np.intp), ids, 0), segments, ready_ns)
        flat = tokens[np.arange(self.max_tokens_per_row) < counts[:, None]]
        return replace(timed, tokens=flat, counts=counts)

    def forward(self, segments: Sequence[Segment]) -> list[SegmentOutput]:
        return [self._compute(s) if s.max_tokens is None else self._decode_segment(s) for s in segments]

    def _decode_segment(self, segment: Segment) -> SegmentOutput:
        """A decode that comes as a segment: as many tokens, one after the other."""
        assert segment.max_tokens is not None and segment.sample is not None
        num_tokens = int(self._random.integers(0, segment.max_tokens + 1))
        got: list[SegmentOutput] = []
        for number in range(num_tokens):
            before = segment.ids if not got else np.array([got[-1].token], np.int32)
            sample = replace(segment.sample, position=segment.sample.position + number)
            got.append(self._compute(replace(segment, ids=before, start=segment.start + number, sample=sample)))
        if not got:
            return SegmentOutput()
        tokens = [token for output in got for token in output.tokens]
        logprobs = [output.logprobs for output in got if output.logprobs is not None]
        return SegmentOutput(
            token=tokens[0],
            more_tokens=tuple(tokens[1:]),
            logprobs=_joined(logprobs) if logprobs else None,
            prompt_logprobs=got[0].prompt_logprobs,
        )


def _few(
    rows: DecodeRows, chosen: IntArray | np.ndarray[tuple[int], np.dtype[np.intp]], ids: IntArray, ahead: int
) -> DecodeRows:
    """Some of the rows, `ahead` tokens further on."""
    return replace(
        rows,
        slots=rows.slots[chosen],
        ids=ids[chosen],
        positions=rows.positions[chosen] + np.int32(ahead),
        seeds=rows.seeds[chosen],
        is_sampled=rows.is_sampled[chosen],
        max_tokens=empty_ints(),
    )


def _joined(parts: Sequence[TokenLogprobs]) -> TokenLogprobs:
    return TokenLogprobs(
        own=np.concatenate([part.own for part in parts]),
        num_top=parts[0].num_top,
        top_ids=np.concatenate([part.top_ids for part in parts]),
        top=np.concatenate([part.top for part in parts]),
    )
