"""The cost of placing an output, in tokens to prefill: routers choose a replica by it, schedulers a data-parallel rank.

Its own wait: the tokens queued there, and those of the prompt that are not cached. The cost to others: the tokens
computed again by those whose cached prefixes the prompt's KV evicts, and a little for every output that runs there. The
longest prefix alone would send everything that shares one to the same place; so it spreads to a second one as soon as
waiting costs more than computing.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntColumn = npt.NDArray[np.int64]

# Of an evicted token: some of what is evicted is never asked for again.
_EVICTED = 0.5
# A running output takes a row of every step; among equals the place with fewer of them is faster.
_OUTPUT = 16.0


def placement_costs(
    num_tokens: int,
    *,
    matched_tokens: IntColumn,
    queued_tokens: IntColumn,
    free_tokens: IntColumn,
    num_outputs: IntColumn,
) -> npt.NDArray[np.float64]:
    """Cost at each place, float64 [places], of a prompt of num_tokens; columns have one entry a place.

    matched_tokens: of the prompt, cached there. free_tokens: room in KV memory that nobody's prefix takes.
    """
    uncached = num_tokens - matched_tokens
    evicted = np.maximum(uncached - free_tokens, 0)
    costs: npt.NDArray[np.float64] = uncached + queued_tokens + _EVICTED * evicted + _OUTPUT * num_outputs
    return costs
