"""N-gram drafts: against a search that looks at every occurrence, and the bounds of the search."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.drafting import sample_of

from radixmesh.daemons.worker.speculation import ngram
from radixmesh.daemons.worker.speculation.drafter import DraftRow
from radixmesh.daemons.worker.speculation.ngram import NgramDrafter, ngram_drafts


def _searched(tokens: list[int], most: int, min_match: int, max_match: int, window: int) -> list[int]:
    """By definition: the longest suffix that ends at an earlier position of the window, the latest of equal ones."""
    length = len(tokens)
    best, best_end = 0, -1
    for end in range(max(0, length - 1 - window), length - 1):
        num = 0
        while num < min(max_match, end + 1) and tokens[end - num] == tokens[length - 1 - num]:
            num += 1
        if num >= max(best, min_match):
            best, best_end = num, end
    if best_end < 0:
        return []
    text = list(tokens)
    for number in range(most):
        text.append(text[best_end + 1 + number])
    return text[length:]


@given(
    st.lists(st.integers(0, 3), max_size=40),
    st.integers(1, 9),
    st.integers(1, 3),
    st.integers(0, 5),
    st.integers(1, 30),
)
@example([0, 0, 0], 1, 2, 0, 1)
def test_drafts_are_those_of_a_search_by_definition(tokens, most, min_match, more, window):
    limits = {"min_match": min_match, "max_match": min_match + more, "window": window}
    got = ngram_drafts(np.array(tokens, np.int32), most, **limits)
    assert got.dtype == np.int32
    assert got.tolist() == _searched(tokens, most, **limits)


def test_prompt_and_output_are_one_text_wherever_it_is_cut():
    text = [5, 6, 7, 8, 9, 1, 5, 6, 7]
    for cut in range(1, len(text) + 1):
        row = DraftRow(sample=sample_of(text[:cut], text[cut:]), most=3)
        assert NgramDrafter().propose([row])[0].tolist() == [8, 9, 1]


@pytest.mark.parametrize("num_output", [0, 10, 10_000, 400_000])
def test_a_row_is_searched_no_further_back_than_the_window(num_output):
    """Memory, and so time, of a draft do not grow with the request."""
    reach = ngram.WINDOW + ngram.MAX_MATCH
    text = np.arange(500_000, dtype=np.int32)
    text[-2:] = text[-reach - 2 : -reach]  # The occurrence before it is just out of reach.
    sample = sample_of(text[: len(text) - num_output], text[len(text) - num_output :])
    drafter = NgramDrafter()
    tracemalloc.start()
    try:
        assert not len(drafter.propose([DraftRow(sample=sample, most=4)])[0])
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < text.nbytes // 4, "what is looked at is copied at least once"
    text[-2:] = text[-ngram.WINDOW - 2 : -ngram.WINDOW]
    want = text[-ngram.WINDOW : 4 - ngram.WINDOW].tolist()
    sample = sample_of(text[: len(text) - num_output], text[len(text) - num_output :])
    assert drafter.propose([DraftRow(sample=sample, most=4)])[0].tolist() == want
