"""The cost of placing an output, in tokens to prefill: routers choose a replica by it, schedulers a data-parallel rank.

It counts the time that requests lose by the choice, its own and that of others:

- its own wait: the tokens queued there, and those of the prompt that are not cached;
- that of outputs there, which stand still while those tokens are computed. Not in full: a prefix that is computed a
  second time serves all later requests with it, and where many outputs share few slots a second replica is worth more;
  but more where it has more of them than another replica: steps serve most when rows are spread evenly;
- that of later ones: tokens computed again, since the prompt's KV evicts cached prefixes;
- a row more in every step of the outputs there;
- its wait for KV that is loaded from the replica's host memory, which holds up nobody else.

The longest prefix alone would send everything that shares one to the same replica; so it spreads to a second one as
soon as waiting costs more than computing, and first to one with few outputs. A slower replica takes longer for all of
it. The factors are those that served six kinds of load best in virtual time (bench/router_policies.py): counting all
outputs in full cost 14% of the tokens/s of a crowd.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntColumn = npt.NDArray[np.int64]
FloatColumn = npt.NDArray[np.float64]

# Of an evicted token: with half of that the seed's kind of load lost 1% of its hits to second copies of prefixes.
_EVICTED = 1.0
# Of an uncached token, for each of the first outputs there; where every replica has about so many, for each of the
# first that one has beyond the least loaded one.
_HELD_UP, _MOST_HELD_UP, _MOST_BEYOND = 0.25, 8, 4
# Of an output there: a row costs a step about what a token of a prompt does, and some steps are to come.
_OUTPUT = 16.0


def placement_costs(
    num_tokens: int,
    *,
    matched_tokens: IntColumn,
    queued_tokens: IntColumn,
    free_tokens: IntColumn,
    num_outputs: IntColumn,
    load_tokens: FloatColumn | None = None,
    slowness: FloatColumn | None = None,
) -> FloatColumn:
    """Cost at each replica, float64 [replicas], of a prompt of num_tokens; columns have one entry a replica.

    matched_tokens: of the prompt, cached there. free_tokens: room in KV memory that nobody's prefix takes. load_tokens:
    to prefill in the time in which those of matched_tokens are loaded that lie in host memory; None: none do.
    slowness: time for the same work, as a multiple of the fastest one's; None = equal.
    """
    uncached = num_tokens - matched_tokens
    # A bound that all replicas have reached tells none from another: prompts without a prefix would crowd where nobody
    # waits at the moment, and uneven rows cost 3% of the tokens/s at 12 outputs a replica.
    least = int(num_outputs.min())
    counted = min(least, _MOST_HELD_UP)
    most = least + max(_MOST_HELD_UP - counted, _MOST_BEYOND)
    held_up = _HELD_UP * np.minimum(num_outputs, most) - _HELD_UP * (least - counted)
    evicted = np.maximum(uncached - free_tokens, 0)
    costs: FloatColumn = queued_tokens + uncached * (1.0 + held_up) + _EVICTED * evicted + _OUTPUT * num_outputs
    if load_tokens is not None:
        costs += load_tokens
    return costs if slowness is None else costs * slowness
