"""The seam between the decoder and attention over the paged pool on a device, for one step: decode rows, then chunks.

plan() is called for every step on the host, and may copy to the device; begin() prepares what layers share on the
device and is part of what a CUDA graph records: it depends on nothing but shapes and the contents of device tensors.

Legend: T rows, B decode rows (padding included), C chunks, H heads, K kv heads, d head_dim, S tokens of the pool.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.kernels.attention.split_pieces import Tails


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStep:
    """A step's lengths on the host, int32. `num_rows`: decode rows with padding, as the device step has them.

    decode_slots, decode_kv_lens [decode rows without padding]; chunk_slots, chunk_lens, chunk_kv_lens [chunks], the
    chunk's own tokens counted; chunk_pages: of each chunk's sequence, none of the dummy slot's. page_tables [slots,
    pages] of all slots; admissions counts the requests that took a slot so far: while it and the slots are the same, so
    are the pages that rows share.
    """

    num_rows: int
    page_tables: IntArray
    admissions: int
    decode_slots: IntArray
    decode_kv_lens: IntArray
    chunk_slots: IntArray
    chunk_lens: IntArray
    chunk_kv_lens: IntArray
    chunk_pages: Sequence[IntArray] = ()


class TreeMasks(NamedTuple):
    """Of trees of drafts, P decodes each: slots_B, prefix_lens_B int32, masks_T int64, for `paged_tree_attention`."""

    slots_B: torch.Tensor
    prefix_lens_B: torch.Tensor
    masks_T: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStep:
    """The same on the device, int32, beside the page tables [slots + 1, pages].

    row_slots, row_positions [T] of all rows: decode rows, then those of the chunks, in padding the dummy slot's.
    decode_slots, decode_kv_lens [B]: of the first rows; padding has length 0 and, where there are no chunks, the dummy
    slot. chunk_row_starts [C + 1]: where the rows of each chunk begin, and where those of the last one end; padding
    may be a chunk of KV length 0, and chunks without rows. max_chunk_len: known on the host; no chunk is longer.
    """

    page_tables: torch.Tensor
    row_slots: torch.Tensor
    row_positions: torch.Tensor
    decode_slots: torch.Tensor
    decode_kv_lens: torch.Tensor
    chunk_slots: torch.Tensor
    chunk_row_starts: torch.Tensor
    chunk_kv_lens: torch.Tensor
    max_chunk_len: int
    tails: Tails | None = None
    """Of the decodes, where the KV of a branch lies; there are no chunks then."""
    masks: TreeMasks | None = None
    """The same branches tree by tree, for attention that reads what they share once."""
    is_from_host: bool = True
    """False: the slots and lengths are written by a kernel of the step itself."""

    @property
    def num_decodes(self) -> int:
        return self.decode_slots.shape[0]

    @property
    def num_chunks(self) -> int:
        return self.chunk_slots.shape[0]


class StepAttention(ABC):
    """Attention of one step, for any of its layers.

    first_projected: rows from this one on are attended to by `attend_projected`, those before it by `attend` alone.
    None: `attend` takes all rows.
    """

    first_projected: int | None = None

    @abstractmethod
    def attend(
        self,
        query_THd: torch.Tensor,
        keys_SKd: torch.Tensor,
        values_SKd: torch.Tensor,
        window: int | None,
        *,
        sinks_H: torch.Tensor | None = None,
        attention_chunk: int | None = None,
    ) -> torch.Tensor:
        """[T, H, d] in the dtype of the query. The step's own keys and values are in the pool. Over latents the values
        are the first numbers of the keys, and the result is as long as they are.

        window: a token sees itself and the `window - 1` before it; None = all. sinks_H: a score of each head that joins
        its softmax and has no value. attention_chunk: sequences are cut at multiples of it, and a token sees those of
        its own chunk alone; not with a window. Rows of padding hold finite numbers.
        """

    def attend_expanded(
        self, query_THC: torch.Tensor, latents_S1C: torch.Tensor, value_HvR: torch.Tensor
    ) -> torch.Tensor | None:
        """`attend` over latents and the value expansion of its result, [T, H, v], where that is faster in one; None
        where it is not."""
        return None

    def attend_projected(
        self,
        query_THn: torch.Tensor,
        query_rope_THr: torch.Tensor,
        latents_S1C: torch.Tensor,
        w_expand_HER: torch.Tensor,
        out_THv: torch.Tensor,
    ) -> None:
        """Attention over latents by queries that are not absorbed, into the rows of `out` from `first_projected` on.
        All rows' queries; w_expand_HER: expansions of keys, then of values."""
        raise AssertionError("no rows are projected here")


class DeviceAttention(ABC):
    """An implementation. is_batch_invariant: a row's bits depend on its own sequence alone.

    needs_exact_lengths: plan() lays out the work by the lengths of `HostStep`, which then must be exact: decodes yield
    one token each.
    captures_chunks: whether a graph of a step with chunks serves other steps: what tells them apart is read on the
    device. Such a step's `decode_slots` reach into the rows of chunks, where `decode_kv_lens` are 0.
    """

    is_batch_invariant: bool
    captures_chunks: bool = False
    has_triton_alone: bool = False
    """Its kernels are Triton's: no other reads what those were to write."""
    needs_exact_lengths: bool = False

    def reserve(self, num_rows: int) -> None:
        """Makes room for steps of so many decode rows. What was captured before stays valid. Default: any fit."""
        return

    def reserve_trees(self, num_rows: int, num_positions: int) -> None:
        """Makes room for steps of so many trees of so many positions. Default: branches are decodes."""
        return

    def variants(self, num_rows: int) -> tuple[str, ...]:
        """All answers that plan() may give for a step of so many decode rows: graphs are captured for each."""
        return ("",)

    def forget(self) -> None:
        """No rows share anything until the next plan(): steps of fewer rows may be captured. Default: nothing is kept
        from one step to the next."""
        return

    @abstractmethod
    def plan(self, step: HostStep) -> str:
        """Called before the step's work is launched or replayed; never waits for the device.

        Answers which variant of the work suits the step; "" always does.
        """

    @abstractmethod
    def begin(self, step: DeviceStep, variant: str) -> StepAttention:
        """Prepares a step; valid until the next begin()."""


AttentionCreator = Callable[[torch.Tensor], DeviceAttention]
"""Makes the attention over page tables int32 [slots + 1, pages] on the device, the last slot being a dummy."""
