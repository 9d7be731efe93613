"""Prompts of data-parallel ranks that share experts begin in the same steps.

A chunk on one rank takes the step of all ranks out of low-latency dispatch. Prompts that come one by one would do so
again and again, each for its own rank; held back for a few steps of decodes, they share the steps that they cost. The
prefill delayer of SGLang's scheduler does this for the same reason.
"""

from __future__ import annotations

from radixmesh.daemons.scheduler.planning.epoch_state import EpochState


class PrefillAlignment:
    """Holds admissions back while ranks decode at low latency, until there is a request for each rank with a free slot.

    max_steps: most plans in a row that hold requests back, 0 = none do. Prompts that are being computed are never held.
    """

    def __init__(self, max_steps: int, max_running_of_rank: int) -> None:
        self._max_steps = max_steps
        self._max_running_of_rank = max_running_of_rank
        self._num_held = 0

    def holds(self, state: EpochState, num_waiting: int) -> bool:
        """True if this plan is to admit nobody. Call it once a plan, with finished prefills gone from the state."""
        is_held = (
            self._num_held < self._max_steps
            and num_waiting > 0
            and not state.prefilling
            and _is_low_latency(state)
            and num_waiting < self._num_open_ranks(state)
        )
        self._num_held = self._num_held + 1 if is_held else 0
        return is_held

    def _num_open_ranks(self, state: EpochState) -> int:
        table = state.table
        most = min(self._max_running_of_rank, table.slots_per_rank)
        return int((table.running_by_rank() < most).sum())


def _is_low_latency(state: EpochState) -> bool:
    """True if there are decodes, and a step of them alone reaches experts at low latency."""
    rows = state.decode_set.num_by_rank
    choice = state.dispatch
    return state.group.ep_size > 1 and choice.mode is None and 0 < max(rows) <= choice.max_tokens
