"""N-gram drafts: the text goes on as it did the last time that its last tokens occurred in it.

    tokens    ... a b c | x y z ... a b c |            the longest suffix that occurs earlier: a b c
    drafts                                 x y z ...   what followed it there

Of the positions where an earlier occurrence may end, the one with the longest match is taken, of equal ones the latest.
Where what followed reaches the end of the text it begins again, as a text does that repeats itself with that period.
Only the request's own prompt and output are searched: a table across requests would tell one tenant's text to another.
The search is that of prompt-lookup decoding (https://github.com/apoorvumang/prompt-lookup-decoding).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from radixmesh.daemons.runtime.arrays import IntArray, empty_ints
from radixmesh.daemons.worker.runner import SampleInput
from radixmesh.daemons.worker.speculation.drafter import Drafter, DraftRow

if TYPE_CHECKING:
    from radixmesh.daemons.worker.cuda.step.device_drafter import DeviceDrafter

MIN_MATCH = 2
"""Tokens of a suffix at least: one token alone occurs too often to say what follows."""
MAX_MATCH = 8
"""Tokens that are compared at most."""
WINDOW = 4096
"""Positions, the last ones, at which an earlier occurrence may end: what bounds the search of a row."""


class NgramDrafter(Drafter):
    """The search on the host; on a GPU `kernels/sampling/ngram.py` finds the same drafts."""

    def propose(self, rows: Sequence[DraftRow]) -> Sequence[IntArray]:
        return [ngram_drafts(_last_tokens(row.sample), row.most) for row in rows]

    def on_device(self) -> DeviceDrafter:
        from radixmesh.daemons.worker.cuda.step.device_drafter import DeviceNgram

        return DeviceNgram(min_match=MIN_MATCH, max_match=MAX_MATCH, window=WINDOW)


def ngram_drafts(
    tokens: IntArray, most: int, *, min_match: int = MIN_MATCH, max_match: int = MAX_MATCH, window: int = WINDOW
) -> IntArray:
    """Up to `most` ids that may follow `tokens`, int32; none where no suffix of min_match tokens occurred before."""
    length = len(tokens)
    if length - 1 < min_match:
        return empty_ints()
    num_ends = min(window, length - 1)
    # Of an end e in [length - 1 - num_ends, length - 1): how many tokens up to it are those at the end of the text.
    num_equal = np.zeros(num_ends, np.int32)
    is_equal = np.ones(num_ends, np.bool_)
    first = length - 1 - num_ends
    for back in range(min(max_match, length - 1)):
        # Before the text's first token there is nothing to be equal.
        skipped = max(0, back - first)
        is_equal[:skipped] = False
        is_equal[skipped:] &= tokens[first + skipped - back : length - 1 - back] == tokens[length - 1 - back]
        if not is_equal.any():
            break
        num_equal += is_equal
    longest = int(num_equal.max())
    if longest < min_match:
        return empty_ints()
    end = first + num_ends - 1 - int(num_equal[::-1].argmax())
    following = np.arange(most) % (length - 1 - end)
    return tokens[end + 1 + following].astype(np.int32, copy=False)


def _last_tokens(sample: SampleInput) -> IntArray:
    """As many of the last tokens as a search may look at."""
    output_ids = sample.output_ids[-(WINDOW + MAX_MATCH) :]
    lacking = WINDOW + MAX_MATCH - len(output_ids)
    if not lacking:
        return output_ids
    return np.concatenate((sample.prompt_ids[-lacking:], output_ids))
