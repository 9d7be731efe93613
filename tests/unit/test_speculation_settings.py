"""Flags of speculation: what fits each other becomes one choice, and the rest an error that names the flags."""

from __future__ import annotations

from pathlib import Path

import pytest

from radixmesh.daemons.worker.limits import MAX_TOKENS_PER_ROW
from radixmesh.daemons.worker.speculation.settings import SpeculativeAlgorithm, read_speculation

OFF, NGRAM, STANDALONE = SpeculativeAlgorithm.OFF, SpeculativeAlgorithm.NGRAM, SpeculativeAlgorithm.STANDALONE
FOLDER = Path("draft-model")


def test_without_an_algorithm_there_is_no_speculation() -> None:
    assert read_speculation(OFF, None, None) is None


@pytest.mark.parametrize(("num_steps", "num_tokens", "most"), [(None, None, 4), (7, None, 7), (None, 6, 5), (3, 4, 3)])
def test_either_number_says_the_other(num_steps: int | None, num_tokens: int | None, most: int) -> None:
    found = read_speculation(NGRAM, num_steps, num_tokens)
    assert found is not None and (found.max_drafts, found.draft_model) == (most, None)
    found = read_speculation(STANDALONE, num_steps, num_tokens, FOLDER)
    assert found is not None and (found.max_drafts, found.draft_model) == (most, FOLDER)


@pytest.mark.parametrize(
    ("algorithm", "num_steps", "num_tokens", "folder", "said"),
    [
        (OFF, 3, None, None, "need --speculative-algorithm"),
        (OFF, None, 3, None, "need --speculative-algorithm"),
        (OFF, None, None, FOLDER, "need --speculative-algorithm"),
        (STANDALONE, None, None, None, "needs --speculative-draft-model-path"),
        (NGRAM, None, None, FOLDER, "leave it out"),
        (NGRAM, 3, 3, None, "verified as 4 tokens"),
        (NGRAM, 0, None, None, "must be in"),
        (NGRAM, MAX_TOKENS_PER_ROW, None, None, "must be in"),
    ],
)
def test_what_does_not_fit_is_said(
    algorithm: SpeculativeAlgorithm, num_steps: int | None, num_tokens: int | None, folder: Path | None, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        read_speculation(algorithm, num_steps, num_tokens, folder)
