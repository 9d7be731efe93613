"""The cost of placing an output, in tokens to prefill: routers choose a replica by it, schedulers a data-parallel rank.

It is the time that all requests together lose, so the least of it gives the most throughput to clients that wait for
answers (Little's law), and a place with a short queue to those who wait for a first token:

- its own wait: the tokens queued there, and those of the prompt that are not cached;
- that of the outputs there: all of them stand still while those tokens are computed;
- that of later ones: tokens computed again, since the prompt's KV evicts cached prefixes;
- a row more in every step of the outputs there.

The longest prefix alone would send everything that shares one to the same place; so it spreads to a second one as soon
as waiting costs more than computing. A place with few outputs computes it first: it holds up fewer.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntColumn = npt.NDArray[np.int64]

# Of an evicted token: some of what is evicted is never asked for again.
_EVICTED = 0.5
# Of an output there: a row costs a step about what a token of a prompt does, and some steps are to come.
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
    costs: npt.NDArray[np.float64] = (
        queued_tokens + uncached * (1 + num_outputs) + _EVICTED * evicted + _OUTPUT * num_outputs
    )
    return costs
