"""One step of a worker: the plan that a scheduler makes and the result that comes back.

The domain form of `radixmesh.worker.v1.StepPlan` and `StepResult`, whose comments are the specification. Both ends
build and read these; `step_codec` turns them into messages, so scheduler and worker can also meet in one process.

A plan is a diff against the worker's slots, applied in this order: barrier ops, saves, releases, admits, grants, loads,
page copies, then the forward. Result rows follow the decode set as last sent, then the finishing prefills in the order
of the chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import overload

import numpy as np

from radixmesh.daemons.runtime.arrays import FloatArray, IntArray, as_ints, empty_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.sampling import Sampling
from radixmesh.worker.v1 import worker_pb2

MAX_PINNED_TRANSFERS = 4096
"""Transfers that hold pages of one worker at a time."""
MAX_TRANSFER_ID_BYTES = 256


class Task(IntEnum):
    """Task of an admitted request; values as in `radixmesh.common.v1.Task`."""

    GENERATE = 1
    EMBED = 2
    SCORE = 3


class DispatchMode(IntEnum):
    """Way in which tokens reach their experts; values as in `radixmesh.worker.v1.ExpertDispatch`."""

    UNSPECIFIED = 0
    NORMAL = 1
    LOW_LATENCY = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Frees a slot; ignored if the slot has moved on to another generation."""

    slot: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Admit:
    """A request enters a slot; its tokens are `prompt_ids` then `output_ids`.

    `cached_pages` hold the KV of the first `cached_len` tokens, but for the last `cached_len % page_size` of them,
    which a page copy of the same plan brings into the slot's first granted page. `cached_len` < number of tokens.
    """

    slot: int
    generation: int
    request_id: str
    index: int = 0
    task: Task = Task.GENERATE
    prompt_ids: IntArray
    output_ids: IntArray = field(default_factory=empty_ints)
    cached_len: int = 0
    cached_pages: IntArray = field(default_factory=empty_ints)
    cached_page_generations: IntArray = field(default_factory=empty_ints)
    max_total_len: int
    sampling: Sampling
    min_tokens: int = 0
    suppressed_ids: IntArray = field(default_factory=empty_ints)
    logprobs_start: int = 0
    cache_namespace: str = ""
    grammar_hash: str = ""
    adapter: str = ""
    trace_context: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Pages appended to a slot's page table, consumed in order."""

    slot: int
    pages: IntArray


class Grants(Sequence[Grant]):
    """Many grants as columns: slots and counts int32 [grants], pages int32 [sum(counts)] grant after grant."""

    __slots__ = ("counts", "pages", "slots")

    def __init__(self, slots: IntArray, counts: IntArray, pages: IntArray) -> None:
        self.slots = slots
        self.counts = counts
        self.pages = pages

    @classmethod
    def of(cls, grants: Iterable[Grant]) -> Grants:
        """Grants as columns; those that are columns already come back as they are."""
        if isinstance(grants, Grants):
            return grants
        parts = tuple(grants)
        return cls(
            as_ints([grant.slot for grant in parts]),
            as_ints([len(grant.pages) for grant in parts]),
            np.concatenate([grant.pages for grant in parts]) if parts else empty_ints(),
        )

    def __len__(self) -> int:
        return len(self.slots)

    @overload
    def __getitem__(self, index: int) -> Grant: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Grant]: ...

    def __getitem__(self, index: int | slice) -> Grant | Sequence[Grant]:
        return list(self)[index]

    def __iter__(self) -> Iterator[Grant]:
        start = 0
        for slot, count in zip(self.slots.tolist(), self.counts.tolist(), strict=True):
            yield Grant(slot=slot, pages=self.pages[start : start + count])
            start += count


@dataclass(frozen=True, slots=True, kw_only=True)
class PageCopy:
    """Copies the KV of the first `num_tokens` tokens of a page into a granted one."""

    source_page: int
    target_page: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PageMove:
    """Copies full pages that follow each other in one prefix between device and host: a save to the host, or a load.

    device_pages, host_pages: int32 [n], beside each other. previous_page: the one before the first of them where they
    move to, -1 = the prefix starts there. op_id: of a load, by which its completion is told; 0 for a save.
    """

    device_pages: IntArray
    host_pages: IntArray
    previous_page: int = -1
    op_id: int = 0
    rank: int = 0
    """Data-parallel rank; 0 in a rank's own section."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """`length` tokens of a slot, from its computed length on; sampling too if they reach its total length."""

    slot: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """Speculative tokens `ids` of a decoding slot from position `start` on. Outputs never depend on it."""

    slot: int
    generation: int
    start: int
    ids: IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step of one DP rank. `decode_set` None means unchanged; `has_forward` False means that only state changes."""

    epoch: int
    step_id: int
    group_generation: int = 0
    barrier_ops: tuple[worker_pb2.BarrierOp, ...] = ()
    expected_us: int = 0
    releases: tuple[Release, ...] = ()
    admits: tuple[Admit, ...] = ()
    grants: Sequence[Grant] = ()
    page_copies: tuple[PageCopy, ...] = ()
    saves: tuple[PageMove, ...] = ()
    loads: tuple[PageMove, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    decode_set: IntArray | None = None
    drafts: tuple[Draft, ...] = ()
    has_forward: bool = True
    max_tokens_per_rank: int = 0
    """Most tokens that a rank computes; 0 = not said, as with one data-parallel rank."""
    idle_ranks: tuple[int, ...] = ()
    """Data-parallel ranks without tokens, which take part in collectives."""
    dispatch: DispatchMode = DispatchMode.UNSPECIFIED
    """Of experts that are divided among ranks; the same on all of them, as everything that the header says."""
    may_have_chunks: bool = field(default=False, compare=False)
    """Some rank's section may have chunks, as the header of a plan that came says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Logprobs of consecutive tokens: own float32 [tokens]; alternatives int32 / float32 [tokens, num_top]."""

    own: FloatArray
    num_top: int
    top_ids: IntArray
    top: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotLogprobs:
    """Logprobs of one slot's consecutive tokens from `first_position` (prompt + output) on."""

    slot: int
    generation: int
    first_position: int
    logprobs: TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotVector:
    """Pooled output of an embed or score task, float32."""

    slot: int
    generation: int
    values: FloatArray


class NoToken(IntEnum):
    """Why a row has no token in a step; values as in `radixmesh.worker.v1.NoTokenReason`."""

    HAS_TOKENS = 0
    NO_ROOM = 1
    NO_MASK = 2
    SLOT_ERROR = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotError:
    """The request of a slot cannot go on; the epoch does."""

    slot: int
    generation: int
    error: MeshError


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of a step: `counts` int32 [rows], `ids` int32 [sum(counts)]; times on the worker's monotonic clock.

    `no_token_reasons` (of NoToken), `drafted` and `accepted` are int32 [rows] or empty: all rows of count 0 had no
    room, and nothing was drafted.
    """

    epoch: int
    step_id: int
    counts: IntArray
    ids: IntArray
    logprobs: tuple[SlotLogprobs, ...] = ()
    prompt_logprobs: tuple[SlotLogprobs, ...] = ()
    vectors: tuple[SlotVector, ...] = ()
    device_start_ns: int = 0
    device_end_ns: int = 0
    weights_version: int = 1
    slot_errors: tuple[SlotError, ...] = ()
    no_token_reasons: IntArray = field(default_factory=empty_ints)
    drafted: IntArray = field(default_factory=empty_ints)
    accepted: IntArray = field(default_factory=empty_ints)
    released_transfers: tuple[str, ...] = ()
    expert_rows: tuple[int, ...] = ()
    """Pairs of a row and an expert that each rank computed, by rank; empty: ranks share no experts."""
    expert_loads: IntArray = field(default_factory=empty_ints)
    """int32 [layers x experts], picks since the last report, of all ranks whose results these are; empty: not now."""
    loaded_ops: tuple[int, ...] = ()
    """Op ids of loads whose pages are there now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Nothing of step `step_id` (0 = the claim) has run, nor will of any later one of the epoch."""

    epoch: int
    step_id: int
    error: MeshError


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRecords:
    """Page records of the consecutive pages from `first_page` on; all int32 [n], `ids` int32 [sum(filled)]."""

    first_page: int
    generations: IntArray
    filled: IntArray
    previous_pages: IntArray
    previous_generations: IntArray
    namespace_indexes: IntArray
    weights_versions: IntArray
    ids: IntArray
