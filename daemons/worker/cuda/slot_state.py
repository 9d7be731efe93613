"""What the device keeps by slot: page tables and last tokens. Written from the host as it changes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.step import Admit
from radixmesh.daemons.worker.cuda.device import Device


class SlotState:
    """Tables of [num_slots + 1]: the last slot is a dummy, whose page is the pool's dummy page, for rows of padding.

    page_tables int32 [num_slots + 1, pages]; last_tokens int32 [num_slots + 1]: drawn last, the next decode's input.
    """

    def __init__(self, device: Device, *, num_slots: int, max_pages: int, dummy_page: int) -> None:
        self._device = device
        self._max_pages = max_pages
        self.dummy_slot = num_slots
        where = device.torch_device
        self.page_tables = torch.zeros(num_slots + 1, max_pages, dtype=torch.int32, device=where)
        self.page_tables[num_slots] = dummy_page
        self.last_tokens = torch.zeros(num_slots + 1, dtype=torch.int32, device=where)
        self._num_sent = np.zeros(num_slots + 1, np.int32)
        self._new_tokens: dict[int, int] = {}

    def admitted(self, admit: Admit) -> None:
        """A request took the slot: its pages are sent anew, and its last token, in case it decodes at once."""
        self._num_sent[admit.slot] = 0
        ids = admit.output_ids if len(admit.output_ids) else admit.prompt_ids
        self._new_tokens[admit.slot] = int(ids[-1])

    def forget(self, slots: Sequence[int]) -> None:
        """Their pages will be sent anew."""
        self._num_sent[list(slots)] = 0

    def send(self, slots: IntArray, page_tables: IntArray, num_pages: IntArray) -> None:
        """Brings what changed of `slots` to the device, behind all work so far. Tables are those of the host."""
        tokens, self._new_tokens = self._new_tokens, {}
        lacking = num_pages[slots] - self._num_sent[slots]
        num_new = int(lacking.sum())
        if not num_new and not tokens:
            return
        rows = np.repeat(slots, lacking)
        firsts = self._num_sent[slots] - (np.cumsum(lacking) - lacking)
        columns = np.repeat(firsts, lacking) + np.arange(num_new)
        self._num_sent[slots] = num_pages[slots]
        token_slots = np.fromiter(tokens.keys(), np.int32, len(tokens))
        token_ids = np.fromiter(tokens.values(), np.int32, len(tokens))
        places = rows.astype(np.int64) * self._max_pages + columns
        packed = np.concatenate([places.astype(np.int32), page_tables[rows, columns], token_slots, token_ids])
        sent = torch.empty(len(packed), dtype=torch.int32, device=self._device.torch_device)
        self._device.upload(packed, sent)
        if num_new:
            self.page_tables.view(-1).index_copy_(0, sent[:num_new].long(), sent[num_new : 2 * num_new])
        if tokens:
            at = sent[2 * num_new : 2 * num_new + len(tokens)].long()
            self.last_tokens.index_copy_(0, at, sent[2 * num_new + len(tokens) :])
