"""Rows of sequences with which a network catches up: tokens that it lacks of each, beside no step."""

from __future__ import annotations

from typing import NamedTuple

import torch

from radixmesh.daemons.worker.speculation.drafter import MOST_BEHIND
from radixmesh.kernels.sampling.drafts import DraftInputs
from radixmesh.kernels.sampling.network_rows import NetworkRows

_INT_MAX = 2**31 - 1


class LapsedRows(NamedTuple):
    """inputs: of sequences, at the lengths that their slots have on the device; the dummy slot's have no rows. rows:
    MOST_BEHIND for each of them."""

    inputs: DraftInputs
    rows: NetworkRows

    @classmethod
    def allocate(cls, num_slots: int, device: torch.device) -> LapsedRows:
        """Memory for so many sequences."""
        slots = torch.zeros(num_slots, dtype=torch.int32, device=device)
        unsent, none = torch.full_like(slots, -1), torch.zeros_like(slots)
        inputs = DraftInputs(
            slots=slots,
            max_lens=torch.full_like(slots, _INT_MAX),
            tokens=unsent,
            lengths=unsent,
            starts=none,
            counts=none,
            window_WB=none[None],
            entries_E2=none[:0].view(0, 2),
            num_entries_1=torch.zeros(1, dtype=torch.int32, device=device),
        )
        return cls(inputs, NetworkRows.allocate(num_slots * MOST_BEHIND, num_slots, device))

    def of(self, num_slots: int) -> LapsedRows:
        """The first of them: the same memory."""
        inputs = self.inputs
        inputs = inputs._replace(
            slots=inputs.slots[:num_slots],
            max_lens=inputs.max_lens[:num_slots],
            tokens=inputs.tokens[:num_slots],
            lengths=inputs.lengths[:num_slots],
            starts=inputs.starts[:num_slots],
            counts=inputs.counts[:num_slots],
            window_WB=inputs.window_WB[:, :num_slots],
        )
        return LapsedRows(inputs, self.rows.of(num_slots * MOST_BEHIND, num_slots))
