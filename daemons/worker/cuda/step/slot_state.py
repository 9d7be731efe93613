"""State by slot on the device: page tables and last tokens. The host sends what changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.steps.step import Admit
from radixmesh.daemons.worker.cuda.device import Device

# Page table entries of one slot that are a copy of their own: an index for each, and its scatter, would take longer.
_MANY_ENTRIES = 512


class SlotState:
    """Tables of [num_slots + 1]: the last slot is a dummy, whose page is the pool's dummy page, for rows of padding.

    page_tables int32 [num_slots + 1, pages]; last_tokens int32 [num_slots + 1]: the
    token that was sampled last, the input of the next decode. lengths int32 [num_slots + 1]: prompt and output with
    that token, kept once a decode may yield several of them and the device alone knows how many.
    """

    def __init__(self, device: Device, *, num_slots: int, max_pages: int, dummy_page: int) -> None:
        self._device = device
        self._max_pages = max_pages
        self.dummy_slot = num_slots
        where = device.torch_device
        self.page_tables = torch.zeros(num_slots + 1, max_pages, dtype=torch.int32, device=where)
        self.page_tables[num_slots] = dummy_page
        self.last_tokens = torch.zeros(num_slots + 1, dtype=torch.int32, device=where)
        self.lengths = torch.zeros_like(self.last_tokens)
        self.keeps_lengths = False
        self._num_sent = np.zeros(num_slots + 1, np.int32)
        self._new_tokens: dict[int, tuple[int, int]] = {}

    def admitted(self, admit: Admit) -> None:
        """A request took the slot: its pages are sent anew, and its last token, in case it decodes at once."""
        self._num_sent[admit.slot] = 0
        ids = admit.output_ids if len(admit.output_ids) else admit.prompt_ids
        self._new_tokens[admit.slot] = int(ids[-1]), len(admit.prompt_ids) + len(admit.output_ids)

    def forget(self, slots: Sequence[int]) -> None:
        """Their pages will be sent anew."""
        self._num_sent[list(slots)] = 0

    def new_entries(self, slots: IntArray, page_tables: IntArray, num_pages: IntArray) -> IntArray:
        """Page table entries of `slots` that the device does not have yet, int32 [entries, 2]: the index in the flat
        tables, and the page. They count as sent. Those of slots that lack many are sent at once, and not among them."""
        counts, sent = num_pages[slots], self._num_sent[slots]
        lacking = counts - sent
        if lacking.max(initial=0) >= _MANY_ENTRIES:
            for slot in slots[lacking >= _MANY_ENTRIES].tolist():
                start, stop = self._num_sent[slot], num_pages[slot]
                self._device.upload(page_tables[slot, start:stop], self.page_tables[slot, start:stop])
                self._num_sent[slot] = stop
            sent = self._num_sent[slots]
            lacking = counts - sent
        num_new = int(lacking.sum())
        entries = np.empty((num_new, 2), np.int32)
        if num_new:
            rows = np.repeat(slots, lacking)
            columns = np.repeat(sent - (np.cumsum(lacking) - lacking), lacking) + np.arange(num_new)
            entries[:, 0] = rows * np.int64(self._max_pages) + columns
            entries[:, 1] = page_tables[rows, columns]
            self._num_sent[slots] = counts
        return entries

    @property
    def has_new_tokens(self) -> bool:
        """Some slot has a last token, or a length, that the device does not have yet."""
        return bool(self._new_tokens)

    def row_tokens(self, slots: IntArray) -> IntArray:
        """The new last tokens of `slots`, each once, or -1: int32. They count as sent, and those of others are sent."""
        return self.row_states(slots)[0]

    def row_states(self, slots: IntArray) -> tuple[IntArray, IntArray]:
        """The same, and the lengths that go with them."""
        tokens, lengths = np.full((2, len(slots)), -1, np.int32)
        if self._new_tokens:
            others, self._new_tokens = self._new_tokens, {}
            for row, slot in enumerate(slots.tolist()):
                tokens[row], lengths[row] = others.pop(slot, (-1, -1))
            self._send_tokens(others)
        return tokens, lengths

    def sampled(self, slots: torch.Tensor, positions: torch.Tensor) -> None:
        """Tokens at `positions` of `slots` were sampled by a prefill: int32 on the device."""
        if self.keeps_lengths:
            self.lengths.index_copy_(0, slots.long(), positions + 1)

    def send(self, slots: IntArray, page_tables: IntArray, num_pages: IntArray) -> None:
        """Brings what changed of `slots` to the device, behind all work so far. Tables are those of the host."""
        tokens, self._new_tokens = self._new_tokens, {}
        self._send_tokens(tokens)
        self.send_entries(self.new_entries(slots, page_tables, num_pages))

    def send_entries(self, entries: IntArray) -> None:
        """Writes new_entries()'s, behind all work so far."""
        if len(entries):
            indexes, pages = self._sent(entries.T)
            self.page_tables.view(-1).index_copy_(0, indexes.long(), pages)

    def _send_tokens(self, states: Mapping[int, tuple[int, int]]) -> None:
        if states:
            numbers = [(slot, token, length) for slot, (token, length) in states.items()]
            slots, tokens, lengths = self._sent(np.array(numbers, np.int32).T)
            self.last_tokens.index_copy_(0, slots.long(), tokens)
            if self.keeps_lengths:
                self.lengths.index_copy_(0, slots.long(), lengths)

    def _sent(self, numbers: IntArray) -> torch.Tensor:
        sent = torch.empty(numbers.size, dtype=torch.int32, device=self._device.torch_device)
        self._device.upload(np.ascontiguousarray(numbers).reshape(-1), sent)
        return sent.view(numbers.shape)
