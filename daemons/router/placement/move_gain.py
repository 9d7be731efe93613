"""Gain of moving running outputs to another replica, against the prefill that they need there; in tokens to prefill."""

from __future__ import annotations

from dataclasses import dataclass

# A row of a decode step costs a replica about as much as a token of a prefill, and once more for every 333 tokens whose
# KV it reads (of a 3B model on an H200: 9 us a token, 10 us a row, 27 us for 1,000 tokens of KV).
_ROW_TOKENS = 1.0
_CONTEXT_TOKENS = 0.003
# Estimates are coarse, and a move stalls its output: it has to save this much more than it costs.
_MARGIN = 1.5
# Fewer outputs than this are no overload, whatever the others have.
_LEAST_OUTPUTS = 4
# Replicas whose outputs differ by less than that share of the mean are even.
_EVEN_SHARE = 0.08
# Nobody knows how long an output that may end by itself will be: once more what it is, at least this.
_LEAST_REMAINING = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaState:
    """num_outputs: running or waiting there. queued_tokens: still to be prefilled there. slowness: time for the same
    work, as a multiple of the fastest replica's."""

    num_outputs: int
    queued_tokens: int
    slowness: float = 1.0

    @property
    def weight(self) -> float:
        """Outputs, as many as they would be on the fastest replica: weights are even where outputs are as fast."""
        return self.num_outputs * self.slowness


@dataclass(frozen=True, slots=True, kw_only=True)
class MovableOutputs:
    """Outputs of one request on one replica. num_tokens: of its prompt and the longest of them. remaining: tokens that
    they will still have, all together.

    uncached_here: tokens of them that are not prefilled where they are; 0 once they run. uncached_there: of prompt and
    output so far, those that are to be prefilled at the other replica.
    """

    num_outputs: int
    num_tokens: int
    remaining: int
    uncached_here: int
    uncached_there: int


def is_uneven(here: ReplicaState, there: ReplicaState, mean: float) -> bool:
    """True if a replica is overloaded, beside another one. mean: of the weights of all."""
    least = max(2.0 * here.slowness, 2 * _EVEN_SHARE * mean)
    return here.num_outputs >= _LEAST_OUTPUTS and here.weight - there.weight > least


def remaining_of(num_ids: int, max_tokens: int, *, ends_early: bool) -> int:
    """Tokens that an output with so many will probably still have. ends_early: it may end before max_tokens."""
    left = max(0, max_tokens - num_ids)
    return min(left, max(num_ids, _LEAST_REMAINING)) if ends_early else left


def gain_of(moved: MovableOutputs, here: ReplicaState, there: ReplicaState) -> float:
    """Tokens to prefill that all outputs of both replicas are spared by the move, less those that it costs them.

    For each token that is still to come, a step here has a row less for the others, one there a row more, and the moved
    output meets fewer rows itself. Its prefill there holds up all who are there; what it had still to be prefilled here
    holds up nobody here any more.
    """
    num, row = moved.num_outputs, _ROW_TOKENS + _CONTEXT_TOKENS * moved.num_tokens
    # Rows that the others' steps have, and those that its own have, before and after.
    fewer_here, more_there = 2 * here.num_outputs - num, 2 * there.num_outputs + num
    spared = (fewer_here * here.slowness - more_there * there.slowness) * row * moved.remaining
    if moved.uncached_here:
        queued = max(0, here.queued_tokens - moved.uncached_here)
        spared += (here.num_outputs * moved.uncached_here + queued) * here.slowness
    cost = ((there.num_outputs + num) * moved.uncached_there + there.queued_tokens) * there.slowness
    return spared - _MARGIN * cost
