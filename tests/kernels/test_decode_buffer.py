"""Numbers of decode steps on their way to the device, which fetches them by a kernel."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.plans import admit

from radixmesh.daemons.worker.cuda.device import HostDevice
from radixmesh.daemons.worker.cuda.step.inputs.decode_buffer import DecodeBuffer
from radixmesh.daemons.worker.cuda.step.slot_state import SlotState

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tensors of the host need Triton's interpreter")


def test_a_decode_row_brings_its_new_token_and_its_pages_with_it():
    device = HostDevice()
    state = SlotState(device, num_slots=3, max_pages=4, dummy_page=9)
    buffer = DecodeBuffer(device, max_rows=3, dummy_slot=3)
    tables, num_pages = np.arange(12, dtype=np.int32).reshape(3, 4), np.array([2, 3, 1], np.int32)
    for slot, last in ((0, 8), (1, 7)):
        state.admitted(admit(slot, [3, last]))
    slots = np.array([2, 0], np.int32)
    for expected in ([[8, 8], [0, 0], [1, 1]], []):
        entries, tokens = state.new_entries(slots, tables, num_pages), state.row_tokens(slots)
        assert entries.tolist() == expected and tokens.tolist() == ([-1, 8] if expected else [-1, -1])
        rows = SimpleNamespace(slots=slots, positions=np.array([5, 6], np.int32))
        buffer.stage(rows, 3, tokens, entries, 11)
        views = buffer.fetch(3)
        assert views.slots.tolist() == [2, 0, 3] and views.positions.tolist() == [5, 6, 0]
        assert views.kv_lens.tolist() == [6, 7, 0] and views.tokens.tolist() == [*tokens.tolist(), -1]
        assert views.num_entries_1.tolist() == [len(expected)] and views.ring_index_1.tolist() == [11]
        assert views.entries_E2[: len(expected)].tolist() == expected
    # A token that belongs to no row of the step is sent by itself, once.
    assert state.last_tokens.tolist() == [0, 7, 0, 0]


def test_steps_that_are_sent_ahead_are_received_in_their_order():
    buffer = DecodeBuffer(HostDevice(), max_rows=2, dummy_slot=9)
    no_tokens, no_entries = np.full(1, -1, np.int32), np.zeros((0, 2), np.int32)
    waited = []
    fetched = 0
    for step in range(50):
        rows = SimpleNamespace(slots=np.array([step], np.int32), positions=np.array([7], np.int32))
        if step - fetched == 16:
            assert buffer.fetch(2).slots.tolist() == [fetched, 9]
            fetched += 1
        buffer.stage(rows, 2, no_tokens, no_entries, step)
        buffer.fence(SimpleNamespace(wait=lambda step=step: waited.append(step)))
    assert waited == list(range(34))
