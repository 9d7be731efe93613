"""The seam between the step contract and a model: slots, pages and plans above it, maths and KV memory below.

A runner owns the KV pool and the weights and nothing of the contract. The executor above it owns slots, page tables,
generations and records, and hands it one list of segments a step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from radixmesh.daemons.runtime.arrays import FloatArray, IntArray, empty_ints
from radixmesh.daemons.runtime.sampling import Sampling
from radixmesh.daemons.runtime.step import Task, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleInput:
    """What drawing one token needs beside its logits.

    `position` is the token's index in prompt + output, the counter of the noise. `output_ids` are those before it.
    """

    sampling: Sampling
    prompt_ids: IntArray
    output_ids: IntArray
    position: int
    suppressed_ids: IntArray = field(default_factory=empty_ints)
    """Ids that may not be drawn here (min_tokens is not reached yet)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Consecutive tokens of one slot to compute: a prefill chunk, or one token of a decode (the same thing).

    `ids` int32 [length] are at positions `start`, `start + 1`, ...; `pages` int32 cover positions [0, start + length):
    position p lives in pages[p // page_size] at p % page_size. KV of [0, start) is there already.
    """

    slot: int
    ids: IntArray
    start: int
    pages: IntArray
    sample: SampleInput | None = None
    """Draw the token after the last one; None: the prompt is not complete yet."""
    prompt_logprobs: range | None = None
    """Prompt positions whose logprobs are wanted, each predicted by a token of this segment: a subset of
    [start + 1, start + length]; with `num_top` of `prompt_num_top`."""
    prompt_ids: IntArray = field(default_factory=empty_ints)
    """The whole prompt, where prompt_logprobs is set: the ids whose logprobs are looked up."""
    prompt_num_top: int = 0
    task: Task = Task.GENERATE
    is_last_chunk: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentOutput:
    """What a segment gave: `token` where it sampled, logprobs where asked for, `vector` float32 of an embed task."""

    token: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    vector: FloatArray | None = None


class ModelRunner(ABC):
    """Runs forwards over a paged KV pool. One thread calls it; calls do not overlap."""

    page_size: int
    num_pages: int
    vocab_size: int
    max_total_len: int
    is_deterministic: bool
    tasks: frozenset[Task]

    @abstractmethod
    def forward(self, segments: Sequence[Segment]) -> list[SegmentOutput]:
        """Computes all segments (each of another slot) and writes their KV; one output per segment, in order.

        Raises nothing for valid segments: the executor has checked ids, pages and lengths. An exception is a died step.
        """

    @abstractmethod
    def copy_page(self, source: int, target: int, num_tokens: int) -> None:
        """Copies the KV of the first `num_tokens` tokens of page `source` to page `target`."""

    @abstractmethod
    def clear(self) -> None:
        """Forgets all KV (its memory stays). Not needed for rightness; makes stale reads visible in tests."""
