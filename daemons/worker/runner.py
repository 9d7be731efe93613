"""The seam between the step contract and a model: slots, pages and plans above it, maths and KV memory below.

A runner owns the KV pool and the weights and nothing of the contract. The executor above it owns slots, page tables,
generations and records, and hands it one list of segments a step.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.arrays import FloatArray, IntArray, empty_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.kv_share import WHOLE_KV, KvShare
from radixmesh.daemons.runtime.sampling import Sampling
from radixmesh.daemons.runtime.steps.step import Admit, DispatchMode, Task, TokenLogprobs
from radixmesh.daemons.worker.guided.guide import Guide
from radixmesh.daemons.worker.guided.mask_memory import MaskSink
from radixmesh.daemons.worker.step_handle import StepHandle

if TYPE_CHECKING:
    from radixmesh.daemons.worker.experts.expert_moves import ExpertMoves
    from radixmesh.daemons.worker.host_memory.host_pool import HostPool
    from radixmesh.daemons.worker.kv_transfer.device_memory import KvDevice
from radixmesh.daemons.worker.host_memory.host_segment import HostSegment


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleInput:
    """The inputs of sampling one token, beside its logits.

    `position` is the token's index in prompt + output, the counter of the noise. `output_ids` are those before it.
    """

    sampling: Sampling
    prompt_ids: IntArray
    output_ids: IntArray
    position: int
    suppressed_ids: IntArray = field(default_factory=empty_ints)
    """Ids that may not be sampled here (min_tokens is not reached yet)."""
    guide: Guide | None = None
    """Of an output that follows a grammar: says which ids may be sampled here."""


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
    """Sample the token after the last one; None: the prompt is not complete yet."""
    prompt_logprobs: range | None = None
    """Prompt positions whose logprobs are wanted, each predicted by a token of this segment: a subset of
    [start + 1, start + length]; with `num_top` of `prompt_num_top`."""
    prompt_ids: IntArray = field(default_factory=empty_ints)
    """The whole prompt, where prompt_logprobs is set: the ids whose logprobs are looked up."""
    prompt_num_top: int = 0
    max_tokens: int | None = None
    """Most tokens that a decode may yield: the slot has pages and room for so many. None: the segment yields exactly
    one token if it samples."""
    parents: IntArray = field(default_factory=empty_ints)
    """Of a decode with drafts: the row that each of `ids` follows, as in a `DraftTree`; empty: the one before it."""
    task: Task = Task.GENERATE
    is_last_chunk: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentOutput:
    """The outcome of a segment: `token` where it sampled, logprobs of what it sampled where asked for, `vector` float32
    of an embed task, or of a score task with the score alone.

    A decode of a runner with max_tokens_per_row > 1 yields `token` and `more_tokens`, or nothing: `token` is None then.
    """

    token: int | None = None
    more_tokens: tuple[int, ...] = ()
    num_drafts: int = 0
    """Drafts that a decode computed; `more_tokens` are those of them that sampling confirmed."""
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    vector: FloatArray | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        """All that was sampled, in order."""
        return () if self.token is None else (self.token, *self.more_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBounds:
    """Of decode rows whose lengths the host knows late, because steps with them are in flight; int32 [rows].

    max_lens: total length that each row may reach: its slot has pages and room for so many tokens. known_lens: tokens
    of the row's slot that the host knows, `tokens[slot, :known_len]`, int32 [num_slots, max_total_len].
    """

    max_lens: IntArray
    known_lens: IntArray
    tokens: IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRows:
    """Decodes as arrays [rows], for runners whose `can_batch` took the slots' sampling.

    Row i computes token `ids[i]` at `positions[i]` of slot `slots[i]` and samples the one at positions[i] + 1.
    `page_tables` int32 [num_slots, max_pages] of all slots: position p lives in page_tables[slot, p // page_size];
    `num_pages` int32 [num_slots]: how many of them a slot has. `seeds` uint64 and `is_sampled` bool (temperature > 0)
    say how. All are valid until step() or launch() returns. An asynchronous runner has sampled the ids itself and may
    not have told them yet: where it has not, `ids` hold anything.
    """

    slots: IntArray
    ids: IntArray
    positions: IntArray
    page_tables: IntArray
    num_pages: IntArray
    seeds: npt.NDArray[np.uint64]
    is_sampled: npt.NDArray[np.bool_]
    max_tokens: IntArray | None = None
    """Most tokens that each row may yield: its slot has pages and room for so many. None: one each."""
    bounds: RowBounds | None = None
    """For an asynchronous runner with max_tokens_per_row > 1, which keeps exact lengths itself, and instead of
    max_tokens: ids and positions are those that the host knows, or older."""
    is_repeat: bool = False
    """True: the launch before had the same rows and nothing else, and since then their slots took no other request and
    no page: only positions are new."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """`tokens` int32 of the decode rows, row after row; `segments` of the segments; device times on a monotonic clock.

    logprobs: of the tokens of those decode rows whose requests ask for logprobs, by index of the row.

    counts: int32 [rows], tokens of each row, 0 to its max_tokens; None: one each. A row that yields n > 0 tokens has
    computed its input token and all but the last one of those it yields: KV is written for n positions.

    num_drafts: int32 [rows], drafts that each row computed, of which those it yields but the last token were accepted.
    """

    tokens: IntArray
    counts: IntArray | None = None
    num_drafts: IntArray | None = None
    segments: list[SegmentOutput]
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    start_ns: int
    end_ns: int
    expert_rows: int | None = None
    """As in StepResult; None: all experts are here, or nobody counts the rows that come."""
    expert_loads: IntArray | None = None
    """As in StepResult; None: not now."""


class ModelRunner(ABC):
    """Runs forwards over a paged KV pool. One thread calls it; calls do not overlap.

    is_asynchronous: launch() returns before the forward has run, and the next one may be launched by then.
    """

    is_asynchronous: bool = False
    max_tokens_per_row: int = 1
    """Most tokens that a decode yields in a step. 1: exactly one. Otherwise it may yield any number from 0 on, which is
    known when the step is done. If the runner is asynchronous too, it takes all decodes as DecodeRows, with bounds."""
    takes_grammars: bool = False
    """True if rows can be constrained by the grammar that an admit names."""
    mask_wait_s: float | None = 0.05
    """Most seconds that a launch waits for masks of tokens that it samples; rows without one yield nothing then. None:
    it waits for all. An asynchronous runner waits for those of prompts alone, and may leave decode rows without."""
    skips_rows: bool = False
    """True if a decode row of any slot may yield no token; else those of outputs that follow a grammar alone. Of an
    asynchronous runner with max_tokens_per_row 1, which keeps exact lengths itself then and tells counts."""
    kv_dtype: str = ""
    """Element type of KV pages; empty: not known to others, who then share none."""
    kv_layout: str = ""
    """Fingerprint of how a page lies in memory, and of the rank's place if it has a part of the heads; empty: likewise.
    """
    kv_is_whole: bool = False
    """True if the other ranks of a tensor-parallel group hold the same KV."""
    kv_token_bytes: int = 0
    """Bytes of the KV of one token in read_kv() and write_kv(); 0: it has neither, and takes part in no transfers."""
    kv_token_layout: str = ""
    """Fingerprint of these bytes: layers and planes of all heads, whatever the page size is."""
    kv_share: KvShare = WHOLE_KV
    """Heads whose KV this rank has."""
    kv_device: KvDevice | None = None
    """Copies KV between pages and memory of a device, beside read_kv() and write_kv(); None: there is no such memory.
    """
    expert_moves: ExpertMoves | None = None
    """Moves experts between the ranks that share them; None: all are here."""
    host_pool: HostPool | None = None
    """Pages of host memory that KV moves to and from; None: there are none."""
    draft_seconds: float = 0.0
    """Time of all steps so far that went to drafts: proposing them, and what a network computes beside the target. A
    device that drafts inside captured steps does not tell."""
    suppresses_rows: bool = False
    """True if decode rows may come while ids are suppressed (min_tokens), not only segments."""

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

    def read_kv(self, indexes: IntArray, part: KvShare | None = None) -> npt.NDArray[np.uint8]:
        """KV of tokens at `indexes`, int32 page x page_size + offset: a copy, [len(indexes) x kv_token_bytes] bytes,
        in chunks of 256 tokens, of each the rows of plane after plane, layer after layer. part: heads of `kv_share`
        (None: all of them), of which a token has as many bytes fewer. Called between steps."""
        raise NotImplementedError

    def write_kv(self, indexes: IntArray, data: npt.NDArray[np.uint8], part: KvShare | None = None) -> None:
        """Writes what read_kv() gave of as many tokens and of these heads, here or in another process. Called between
        steps."""
        raise NotImplementedError

    def kv_part_bytes(self, part: KvShare) -> int:
        """Bytes of the KV of one token in read_kv() of a part."""
        return self.kv_token_bytes // self.kv_share.size * part.size

    def add_host_pool(self, num_bytes: int, segment: HostSegment | None = None) -> None:
        """From now on `host_pool` is there, of at most so many bytes: in `segment`, or, where it is None, in memory of
        this process. Raises UNSUPPORTED, or INVALID_ARGUMENT for bytes that cannot be had or hold no page. To be called
        before an executor is made of the runner."""
        message = "this model's runner keeps KV on the device alone: set --host-kv-bytes 0"
        raise MeshError(ErrorReason.ERROR_REASON_UNSUPPORTED, message, {"feature": "host_tier"})

    def formed(self) -> None:
        """The ranks that hold the model together have met: settles what they must do alike.

        Raises CollectiveAborted.
        Called before the first forward of every generation of the group. Default: nothing to settle.
        """
        return

    def set_dispatch_mode(
        self, dispatch: DispatchMode, max_tokens_per_rank: int, *, may_have_chunks: bool = False
    ) -> None:
        """The shape of the forward that comes next, which all ranks were told alike. may_have_chunks: some rank may
        have segments. Default: has no need of it."""
        return

    def now_ns(self) -> int:
        """The clock of StepOutput's times and of `ready_ns`; any thread may ask."""
        return time.monotonic_ns()

    def can_batch(self, sampling: Sampling) -> bool:
        """True if decodes of a slot with this sampling may come as DecodeRows. Default: all come as segments."""
        return False

    def admitted(self, admit: Admit) -> None:
        """A request took a slot: what its decode rows will need of it. Default: nothing is kept by slot."""
        return

    def mask_sink(self, admit: Admit) -> MaskSink | None:
        """Memory for the masks of a request that follows a grammar, asked for before it is `admitted`; None: it lies
        with the guide. Raises OVERLOADED where there is no more."""
        return None

    def launch(self, rows: DecodeRows, segments: Sequence[Segment], ready_ns: int) -> StepHandle[StepOutput]:
        """Starts one forward of rows and segments; steps run in the order of their launches. Default: runs it whole."""
        return StepHandle.of(self.step(rows, segments, ready_ns))

    def step(self, rows: DecodeRows, segments: Sequence[Segment], ready_ns: int) -> StepOutput:
        """One forward of rows and segments, times included; `ready_ns`: when its plan was there, same clock.

        Default: times forward() for the segments; there are no rows where can_batch() is always False.
        """
        assert len(rows.slots) == 0, f"{len(rows.slots)} decode rows for a runner that takes none"
        start_ns = self.now_ns()
        # Without segments too: other ranks may count on this one.
        outputs = self.forward(segments)
        return StepOutput(tokens=empty_ints(), segments=outputs, start_ns=start_ns, end_ns=self.now_ns())
